-- problem: texts, canonical texts, and what is said about wrong ones.

local problem = require "problem"
local random = require "random"

local tests = {}

local function must_parse(text)
    local p, errors = problem.parse(text)
    if not p then error(problem.format_errors(text, errors), 2) end
    return p
end

-- The canonical text is `wanted` and reads back to itself.
local function prints(text, wanted)
    local p = must_parse(text)
    if p.text ~= wanted then error(("%s\nprints as %s\nnot as    %s"):format(text, p.text, wanted), 2) end
    assert(must_parse(p.text).text == p.text)
    assert(problem.print(p) == p.text)
    return p
end

function tests.canonical_texts()
    prints("bf16 d=128", "bf16 d=128")
    prints("  d=128:128   bf16 ", "bf16 d=128")
    prints("bf16 d=128 causal", "bf16 d=128 mask={k <= q}")
    prints("bf16 d=128 mask={causal}", "bf16 d=128 mask={k <= q}")
    prints("bf16 d=256 mask={causal & window(4095, 0)} score={softcap(50)} backward",
        "bf16 d=256 mask={k <= q & q - k <= 4095} score={50.0 * tanh(s / 50.0)} backward")
    prints("fp16 d=64 mask={doc[q] == doc[k]} params={doc: i32[seq_k]}", "fp16 d=64 mask={doc[q] == doc[k]} params={doc: i32[seq_k]}")
    prints("deterministic backward score={s + bias[h, row, col]} params={bias:f32[heads_q,seq_q,seq_k]} d=192:128 bf16",
        "bf16 d=192:128 score={s + bias[h, row, col]} params={bias: f32[heads_q, seq_q, seq_k]} backward deterministic")
    prints("fp32 d=64 mask={true}", "fp32 d=64")
    prints("fp32 d=64 score={s}", "fp32 d=64")
    prints("fp32 d=64 score={q - k}", "fp32 d=64 score={f32(q - k)}")
    prints("fp32 d=64 mask={false}", "fp32 d=64 mask={false}")
    prints("fp32\nd = 64\n\tmask = { causal }", "fp32 d=64 mask={k <= q}")
    local p = prints("fp32 d=8 mask={z[q]} params={z : bool[ ceil( seq_q / 64 ) ]}",
        "fp32 d=8 mask={z[q]} params={z: bool[ceil(seq_q/64)]}")
    assert(p.params[1].dims[1].word == "seq_q" and p.params[1].dims[1].div == 64)
end

function tests.fields()
    local p = must_parse("bf16 d=192:128 mask={q - k < wide} score={s + w2[h, 3]} params={wide: i32, w2: f16[heads_q, 4]} backward")
    assert(p.dtype == "bf16" and p.d == 192 and p.dv == 128 and p.backward and not p.deterministic)
    assert(p.mask.type == "bool" and p.score.type == "f32")
    assert(#p.params == 2 and p.params[1].name == "w2" and p.params[2].name == "wide", "params are in the order of their names")
    assert(p.params[1].dims[1].word == "heads_q" and not p.params[1].dims[1].div and p.params[1].dims[2] == 4)
    assert(p.params[2].dims == nil and p.params[2].dtype == "i32")
end

function tests.a_form_and_its_formula_are_one_problem()
    for _, pair in ipairs {
        {"causal", "k <= q"}, {"causal", "q >= k"}, {"causal", "!(k > q)"}, {"causal & window(9, 0)", "window(9, 0)"},
        {"window(9, 3)", "q - k <= 9 & k - q <= 3"}, {"window(3, -1)", "q - k <= 3"}, {"prefix(4) & true", "k <= q | k < 4"},
    } do
        local a, b = must_parse("fp16 d=32 mask={" .. pair[1] .. "}"), must_parse("fp16 d=32 mask={" .. pair[2] .. "}")
        assert(a.text == b.text, a.text .. " is not " .. b.text)
    end
end

-- text has an error whose field and message are as given, at the offset of mark in it.
local function refuses(text, field, message, mark, status)
    local p, errors = problem.parse(text)
    if p then error(text .. " is accepted", 2) end
    local offset = mark and text:find(mark, 1, true) - 1 or #text
    local shown = {}
    for _, err in ipairs(errors) do
        if err.field == field and err.message:find(message, 1, true) and err.offset == offset and err.status == (status or "INVALID") then
            return
        end
        shown[#shown + 1] = ("%s at %d %s: %s"):format(err.field, err.offset, err.status, err.message)
    end
    error(("%s\n%s"):format(text, table.concat(shown, "\n")), 2)
end

function tests.errors()
    refuses("d=64", "problem.dtype", "the dtype is missing: bf16, fp16 or fp32")
    refuses("bf16", "problem.d", "the head dim is missing")
    refuses("bf16 d", "problem.d", "d needs a value: d=128", "d")
    refuses("bf16 d=big", "problem.d", 'head dim "big" is not a number', "big")
    refuses("bf16 d=12", "problem.d", "head dim 12: it must be a multiple of 8 from 8 to 256", "12", "UNSUPPORTED")
    refuses("bf16 d=64:264", "problem.d", "head dim 264: it must be a multiple of 8 from 8 to 256", "264", "UNSUPPORTED")
    refuses("bf16 d=0", "problem.d", "head dim 0", "0")
    refuses("bf16 d={64}", "problem.d", "without braces", "{64}")
    refuses("bf16 fp16 d=64", "problem.dtype", "fp16 is given beside bf16", "fp16")
end

function tests.duplicates_and_unknown_words()
    local function at(text, field, message, offset)
        local p, errors = problem.parse(text)
        assert(not p, text .. " is accepted")
        for _, err in ipairs(errors) do
            if err.field == field and err.message:find(message, 1, true) and err.offset == offset then return end
        end
        error(("%s: %s at %d: %s"):format(text, errors[1].field, errors[1].offset, errors[1].message), 2)
    end
    at("bf16 d=64 causal causal", "problem.mask", "causal is given twice", 17)
    at("bf16 d=64 causal mask={true}", "problem.mask", "mask is given beside causal", 17)
    at("bf16 d=64 d=64", "problem.d", "d is given twice", 10)
    at("bf16 d=64 cuasal", "problem", 'unknown word "cuasal"; did you mean "causal"?', 10)
    at("bf16 d=64 backwards", "problem", 'did you mean "backward"?', 10)
    at("bf16 d=64 zzzzzz", "problem", 'unknown word "zzzzzz"', 10)
    at("bf16 d=64 backward=1", "problem.backward", "backward takes no value", 19)
    at("bf16 d=64 mask=causal", "problem.mask", "stands in braces", 15)
    at("bf16 d=64 mask={causal", "problem.mask", "never closed by }", 15)
    at("bf16 d=64 mask={q + k}", "problem.mask", "a mask must be bool; this is i32", 15)
    at("bf16 d=64 score={k < q}", "problem.score", "a score must be f32; this is bool", 16)
    at("bf16, d=64", "problem", '"," is not a word', 4)
end

function tests.what_is_not_yet_built_is_refused_by_name()
    for _, word in ipairs {"grad={bias}", "out=fp32", "kv=fp8", "dropout", "sink", "varlen", "paged=64", "lse=merged", "rope=10000"} do
        refuses("bf16 d=64 " .. word, "problem." .. word:match("^%w+"), word:match("^%w+") .. " is not yet supported", word, "UNSUPPORTED")
    end
    refuses("e4m3 d=64", "problem.e4m3", "e4m3 is not yet supported", "e4m3", "UNSUPPORTED")
end

function tests.params()
    local function params(list, message, mark)
        refuses("bf16 d=64 mask={p[q] == 0} params={" .. list .. "}", "problem.params", message, mark)
    end
    params("p: i32[seq_k], z: f32", 'param "z" is never used', "z: f32")
    params("p: i23[seq_k]", 'dtype "i23" of "p" is none of', "i23")
    params("p: i32[seq]", 'dimension "seq" is none of', "seq]")
    params("p: i32[0]", 'dimension "0" is not 1', "0]}")
    params("p: i32[ceil(seq_k/0)]", "the divisor must be 1", "ceil")
    params("p: i32[1, 2, 3, 4, 5]", '"p" has 5 dimensions; at most 4', "[1, 2")
    params("p: i32[seq_k], p: f32", 'param "p" is already declared', "p: f32")
    params("p: i32[seq_k], q: f32", 'param "q" is a variable', "q: f32")
    params("p: i32[seq_k], exp: f32", 'param "exp" is a function', "exp: f32")
    params("p: i32[seq_k], causal: f32", 'param "causal" is a named form', "causal: f32")
    params("p: i32[seq_k], inf: f32", 'param "inf" is a constant', "inf: f32")
    params("p: i32[seq_k], 2nd: f32", 'param "2nd" is no name', "2nd")
    params("p: i32[seq_k], wide: i64", 'scalar param "wide": i32, f32 or bool, not i64', "i64")
    params("p i32[seq_k]", 'expected : and a dtype after "p"', "i32[seq")
    params("p: i32[seq_k", 'the [ of "p" is never closed', "[seq_k")
    refuses("bf16 d=64 params={}", "problem.params", "params is empty", "}")
    refuses("bf16 d=64 mask={true | on} params={on: bool}", "problem.params", 'param "on" changes nothing', "on: bool")
    refuses("bf16 d=64 mask={w == 0}", "problem.mask", '"w" is neither declared', "w ==")
end

function tests.all_errors_at_once_with_carets()
    local text = "bf16 d=66 mask={kk <= q}\nscore={s + doc} params={doc: i32[seq_k]} foo"
    local p, errors = problem.parse(text)
    assert(not p and #errors == 4)
    assert(problem.format_errors(text, errors) == [[
head dim 66: it must be a multiple of 8 from 8 to 256
    bf16 d=66 mask={kk <= q}
           ^
problem.mask: "kk" is neither declared in params nor known; did you mean "k"?
    bf16 d=66 mask={kk <= q}
                    ^
problem.score: doc is an array: write doc[...] with 1 index
    score={s + doc} params={doc: i32[seq_k]} foo
               ^
problem: unknown word "foo"
    score={s + doc} params={doc: i32[seq_k]} foo
                                             ^]])
    local long = "bf16 d=64 " .. ("fp16 "):rep(60)
    for line in problem.format_errors(long, select(2, problem.parse(long))):gmatch("[^\n]+") do
        assert(#line <= 112, "a line of an error is too long: " .. line)
    end
end

local TEXTS = {
    "bf16 d=192:128 score={s + bias[h, row, col]} params={bias: f32[heads_q, seq_q, seq_k]} backward deterministic",
    "fp16 d=64 mask={document(doc) & window(l, 0) | k < 4} params={doc: i64[seq_k], l: i32}",
    "fp32 d=40 mask={hash(q, k, 7) % 10 < 3 ? !(q == k) : f32(k) >= 1e-3 * x} params={x: f32} score={softcap(-1.5e3)}",
    "bf16 d=8 mask={blk[b, h, row/64, col/64] & causal} params={blk: bool[batch, heads_q, ceil(seq_q/64), ceil(seq_k/64)]}",
}
local BYTES = "{}[]()=<>!&|?:+-*/%.,0123456789eEskq \n\t\0\x80\xff\"'\\$#;_"

-- Whatever the bytes: an answer, never a Lua error; and what is accepted reads back to itself.
function tests.mutated_texts()
    random.seed(99)
    local accepted = 0
    for i = 1, 3000 do
        local text = TEXTS[i % #TEXTS + 1]
        for _ = 1, random.pick(1, 3) do
            local at = random.pick(1, #text)
            local kind = random.pick(1, 4)
            local byte = random.pick(1, #BYTES)
            local insert = BYTES:sub(byte, byte)
            if kind == 1 then text = text:sub(1, at - 1) .. text:sub(at + 1)
            elseif kind == 2 then text = text:sub(1, at) .. insert .. text:sub(at + 1)
            elseif kind == 3 then text = text:sub(1, at - 1) .. insert .. text:sub(at + 1)
            else
                local from = random.pick(1, #text)
                text = text:sub(1, at) .. text:sub(from, from + random.pick(1, 20)) .. text:sub(at + 1)
            end
        end
        local p, errors = problem.parse(text)
        if p then
            accepted = accepted + 1
            assert(must_parse(p.text).text == p.text)
        else
            assert(#errors > 0)
            for _, err in ipairs(errors) do
                assert(err.offset >= 0 and err.offset <= #text and err.field:find("^problem") and err.status)
            end
            assert(not problem.format_errors(text, errors):find("[^\n\32-\126]"), "an error shows raw bytes")
        end
    end
    assert(accepted > 50, "too few mutated texts are right: " .. accepted)
end

function tests.hostile_texts()
    for _, text in ipairs {"", "\0", ("("):rep(8000), ("bf16 "):rep(1600), ("x="):rep(4000), ("{"):rep(8000), ("a"):rep(9000),
                           "bf16 d=64 mask={" .. ("!"):rep(8000) .. "}", "bf16 d=64 mask={" .. ("1?"):rep(4000) .. "}",
                           "bf16 d=64 score={" .. ("softcap("):rep(60) .. "s" .. (")"):rep(60) .. "}",
                           "bf16 d=64 mask={" .. ("min(q,"):rep(1000) .. "}", "bf16 d=64 params={" .. ("a:i32,"):rep(1300) .. "}",
                           "bf16 d=999999999999999999999", "bf16 d=64 mask={k < 99999999999999999999}"} do
        local p, errors = problem.parse(text)
        assert(not p and #errors > 0, "accepted: " .. text:sub(1, 40))
        problem.format_errors(text, errors)
    end
end

return tests
