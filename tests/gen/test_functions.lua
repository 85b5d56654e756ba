-- functions: the emitted text holds what the problem needs and nothing else, and compiles without a warning.

local abi = require "abi"
local functions = require "functions"
local problem = require "problem"
local random = require "random"

local tests = {}

local function parse(text)
    local p, errors = problem.parse(text)
    if not p then error(problem.format_errors(text, errors), 2) end
    return p
end

local function emit(text, language) return functions.text(parse(text), language or "cuda") end

local function holds(text, wanted)
    if not text:find(wanted, 1, true) then error(("%s\nis not in\n%s"):format(wanted, text), 2) end
end

local function lacks(text, unwanted)
    if text:find(unwanted, 1, true) then error(("%s\nis in\n%s"):format(unwanted, text), 2) end
end

local PROBLEMS = {
    "bf16 d=64",
    "bf16 d=64 backward",
    "bf16 d=64 causal backward",
    "bf16 d=64 mask={window(l, r) & (k < 4 | causal)} params={l: i32, r: i32} backward",
    "bf16 d=64 mask={k <= q + l} params={l: i32} backward",
    "bf16 d=64 mask={false} backward",
    "bf16 d=64 mask={document(doc) & causal} params={doc: i64[seq_k]} backward",
    "bf16 d=64 mask={blk[b, h, row/64, col/64]} params={blk: bool[batch, heads_q, ceil(seq_q/64), ceil(seq_k/64)]}",
    "bf16 d=64 score={alibi(slopes)} params={slopes: f16[heads_q]} backward",
    "bf16 d=64 score={softcap(c) + bias[h % 3, q, k]} params={c: f32, bias: bf16[3, seq_q, seq_k]} backward",
    "bf16 d=64 mask={exp(f32(q)) + sin(x) * tanh(f32(k)) < log(x) / cos(f32(q - k))} params={x: f32} backward",
    "bf16 d=64 mask={hash(q, k, l) % 10 < 3 | popcount(xor(q, k)) == u[k]} params={l: i32, u: u8[seq_k]}",
    "bf16 d=64 score={sqrt(exp(s)) / log(abs(s)) + sin(s) - cos(min(s, 3)) * floor(max(s, f32(q)))} backward",
    "bf16 d=64 mask={(q < 3 ? on : q != k) == (f32(q) != x)} params={on: bool, x: f32}",
}

function tests.causal()
    local text = emit("bf16 d=128 causal backward")
    holds(text, "enum { num_spans = 1 };")
    holds(text, "    return k <= q;\n")
    holds(text, "outer[0] = i32_span(first, i32_min(last, q_hi));")
    holds(text, "inner[0] = i32_span(first, i32_min(last, q_lo));")
    holds(text, "outer[0] = i32_span(i32_max(first, k_lo), last);")
    holds(text, "inner[0] = i32_span(i32_max(first, k_hi), last);")
    lacks(text, "score")
    lacks(text, "tile_class")
    lacks(emit("bf16 d=128 causal"), "visible_queries")
end

function tests.arrays_of_tiles()
    local text = emit("bf16 d=64 mask={m[row, col] < 9 & m[row, col] != hkv & on[k]} params={m: u8[seq_q, seq_k], on: bool[seq_k]}")
    holds(text, "> 1024) return iv(0LL, 255LL);")
    holds(text, "> 1024) return iv(0LL, 1LL);")
    local _, num = text:gsub("param_m_range%(args, row, col%)", "")
    assert(num == 1, "what a tile reads of an array is looked at once")
end

function tests.no_mask()
    local text = emit("bf16 d=128")
    holds(text, "outer[0] = i32_span(first, last);")
    lacks(text, "bool visible(")
    local uses = functions.uses(parse("bf16 d=128"))
    assert(uses.walk == "range" and uses.num_spans == 1 and not uses.mask and not uses.score)
end

function tests.uses()
    local uses = functions.uses(parse("bf16 d=64 mask={k / 64 == q / 64} score={s * 2}"))
    assert(uses.walk == "classify" and uses.mask and uses.score)
    assert(functions.uses(parse("bf16 d=64 mask={prefix(3)}")).num_spans == 2)
end

function tests.helpers_are_emitted_once_and_only_if_used()
    for _, text in ipairs(PROBLEMS) do
        for _, language in ipairs {"c", "cuda"} do
            local out = emit(text, language)
            local defined = {}
            for name in out:gmatch("\nstatic [^\n(]-([%w_]+)%(") do
                assert(not defined[name], name .. " is defined twice for " .. text)
                defined[name] = true
            end
            for name in pairs(defined) do
                local asked = ({visible = 1, score = 1, score_slope = 1, visible_keys = 1, visible_queries = 1, tile_class = 1})[name]
                local _, count = out:gsub("%f[%w_]" .. name .. "%(", "")
                assert(asked or count > 1, ("%s is never called for %s in %s"):format(name, text, language))
            end
            for _, type in ipairs {"Iv", "Fv"} do
                local _, count = out:gsub("%f[%w]" .. type .. "%f[%W]", "")
                assert(count ~= 2, type .. " is declared but not used for " .. text)
            end
        end
    end
end

function tests.same_text_twice()
    for _, text in ipairs(PROBLEMS) do assert(emit(text) == emit(text)) end
end

function tests.cuda_takes_nothing_from_a_library()
    for _, text in ipairs(PROBLEMS) do
        local out = emit(text, "cuda")
        for _, word in ipairs {"#include", "double", "expf(", "logf(", "tanhf(", "sinf(", "cosf(", "sqrtf(", "INFINITY", "NAN"} do
            lacks(out, word)
        end
    end
end

function tests.masks_are_never_contracted()
    local text = emit("bf16 d=64 mask={f32(q) * x + 1.0 < sqrt(f32(k)) / x} params={x: f32}")
    holds(text, "return f32_mul((float)q, args->p_x) + 1.0f < f32_div(f32_sqrt((float)k), args->p_x);")
    holds(text, "__fmul_rn(a, b)")
    holds(text, "__fdiv_rn(a, b)")
    holds(text, "__fsqrt_rn(x)")
    holds(emit("bf16 d=64 mask={f32(q) * x < 1.0} params={x: f32}", "c"), "return (float)((double)a * (double)b);")
end

function tests.scores_are_fast()
    local text = emit("bf16 d=64 score={softcap(50)} backward")
    holds(text, "return 50.0f * fast_tanh(s * 0.02f);")
    holds(text, "const float t0 = fast_tanh(s * 0.02f);\n    return 1.0f - t0 * t0;")
    holds(emit("bf16 d=64 score={softcap(50)}", "c"), "return 50.0f * tanhf(s / 50.0f);")
end

function tests.cheap_forms_where_bounds_prove_them()
    holds(emit("bf16 d=64 mask={row / 64 == col / 64}"), "return row / 64 == col / 64;")
    holds(emit("bf16 d=64 mask={q / 64 == k / 64}"), "return (q >> 6) == (k >> 6);")
    holds(emit("bf16 d=64 mask={q / 60 == (q - k) % 8}"), "return i32_div(q, 60) == ((q - k) & 7);")
    holds(emit("bf16 d=64 mask={h % 4 == 0}"), "return work->head % 4 == 0;")
    holds(emit("bf16 d=64 mask={q - k < 9}"), "return q - k < 9;")
    holds(emit("bf16 d=64 mask={q + l < k} params={l: i32}"), "return i32_add(q, args->p_l) < k;")
    holds(emit("bf16 d=64 mask={q * k < 9}"), "i32_mul(q, k)")
    holds(emit("bf16 d=64 mask={q + l - l < k} params={l: i32}"), "i32_sub(i32_add(q, args->p_l), args->p_l)")
end

function tests.loads_are_guarded_unless_bounds_prove_them()
    local text = emit("bf16 d=64 score={s + p[b, h, q, col / 2]} params={p: f32[batch, heads_q, seq_q, ceil(seq_k/2)]}")
    holds(text, "if ((unsigned)i2 >= (unsigned)args->seq_q || (unsigned)i3 >= ((unsigned)args->seq_k + 1u) / 2u) return 0;")
    holds(text, "i0 * args->p_p_stride_0 + i1 * args->p_p_stride_1 + i2 * args->p_p_stride_2 + i3 * args->p_p_stride_3")
    holds(text, "__ldg(")
    lacks(emit("bf16 d=64 score={s + p[h % 4]} params={p: f32[4]}"), "(unsigned)")
    holds(emit("bf16 d=64 score={s + p[h % 5]} params={p: f32[4]}"), "if ((unsigned)i0 >= 4u) return 0;")
    holds(emit("bf16 d=64 score={s + p[hkv]} params={p: f32[heads_q]}"), "if ((unsigned)i0 >= (unsigned)args->heads_q) return 0;")
    lacks(emit("bf16 d=64 score={s + p[hkv]} params={p: f32[heads_kv]}"), "(unsigned)")
end

-- Writes problems, each with a caller of all its functions, and has the system's compiler read them.
local function compile(texts)
    local path = os.tmpname()
    local failed = {}
    for _, text in ipairs(texts) do
        local p = parse(text)
        local out = {
            "#include <limits.h>\n#include <math.h>\n#include <stdbool.h>\n#include <stdint.h>", abi.struct(abi.fields(p, "forward", {})),
            "typedef struct Work {\n    int batch, head, head_kv, tile, seq_q, seq_k, q_start, k_start;\n} Work;", functions.text(p, "c"),
            "float use(const LoomArgs *args, const Work *work);\nfloat use(const LoomArgs *args, const Work *work) {\n    float sum = 0;",
        }
        local uses = functions.uses(p)
        if uses.mask then out[#out + 1] = "    sum += visible(args, work, 1, 2) ? 1.0f : 0.0f;" end
        if uses.score then out[#out + 1] = "    sum += score(args, work, 1, 2, 0.5f);" end
        if uses.score and p.backward then out[#out + 1] = "    sum += score_slope(args, work, 1, 2, 0.5f);" end
        if uses.walk == "classify" then
            out[#out + 1] = "    sum += (float)tile_class(args, work, 0, 1, 2, 3);"
        else
            out[#out + 1] = "    Span outer[num_spans], inner[num_spans];\n    visible_keys(args, work, 0, 1, outer, inner);\n    sum += (float)outer[0].lo;"
            if p.backward then out[#out + 1] = "    visible_queries(args, work, 0, 1, outer, inner);\n    sum += (float)inner[0].lo;" end
        end
        out[#out + 1] = "    return sum;\n}\n"
        local file = assert(io.open(path, "w"))
        file:write(table.concat(out, "\n"))
        file:close()
        if not os.execute(("cc -std=c11 -Wall -Wextra -Werror -fsyntax-only -x c %s"):format(path)) then failed[#failed + 1] = text end
    end
    os.remove(path)
    assert(#failed == 0, "does not compile without a warning: " .. table.concat(failed, "\n"))
end

function tests.c_text_compiles_without_warnings()
    compile(PROBLEMS)
    random.seed(4)
    local texts = {}
    while #texts < 12 do
        local mask = random.mask(4)
        local score = random.expression("f32", 4, true)
        local declared = {}
        for name, storage in random.declarations:gmatch("(%w+): ([^,]+)") do
            if (mask .. " " .. score):find("%f[%w_]" .. name .. "%f[^%w_]") then declared[#declared + 1] = name .. ": " .. storage end
        end
        local text = ("bf16 d=64 mask={%s} score={%s}%s backward"):format(mask, score,
            #declared > 0 and " params={" .. table.concat(declared, ", ") .. "}" or "")
        if problem.parse(text) then texts[#texts + 1] = text end
    end
    compile(texts)
end

return tests
