-- interval: tile classes and spans never contradict the elements, and are tight for the masks people use.

local expression = require "expression"
local functions = require "functions"
local interval = require "interval"
local problem = require "problem"
local random = require "random"

local tests = {}

local PARAMS = problem.parse("fp32 d=8 mask={l == 0 & f32(doc[q]) == x & on & pick[h] & ramp[k] == x} params={" .. random.declarations .. "}").params

local function parse_mask(text)
    local by_name, errors = {}, {}
    for _, param in ipairs(PARAMS) do by_name[param.name] = param end
    local node = expression.parse(text, {params = by_name, forms = require("forms").by_name, field = "mask", errors = errors, used = {}})
    if not node then error(problem.format_errors(text, errors)) end
    return node
end

local function mask_of(text)
    local p = assert(problem.parse("bf16 d=64 " .. text))
    return p.mask
end

local function random_box(env)
    local function part(start, length)
        local lo = random.pick(0, length - 1)
        return start + lo, start + random.pick(lo, math.min(length - 1, lo + 5))
    end
    local box = {b = env.b, h = env.h, hkv = env.hkv, seq_q = env.seq_q, seq_k = env.seq_k, q_start = env.q_start, k_start = env.k_start}
    box.q_lo, box.q_hi = part(env.q_start, env.seq_q)
    box.k_lo, box.k_hi = part(env.k_start, env.seq_k)
    return box
end

local function values_of(env)
    return {params = {l = env.l, x = env.x, on = env.on}, load = function(name, indices)
        local value = env[name][indices[1] + 1]
        if value == nil then return ({doc = 0, ramp = 0.0, pick = false})[name] end
        return value
    end}
end

local function describe(text, box)
    local parts = {}
    for _, key in ipairs {"q_lo", "q_hi", "k_lo", "k_hi", "q_start", "k_start", "seq_q", "seq_k", "h"} do
        parts[#parts + 1] = key .. "=" .. box[key]
    end
    return text .. "\n" .. table.concat(parts, " ")
end

-- Calls visit(q, k, visible) on the elements of a box until it returns false.
local function each(box, env, f, visit)
    for q = box.q_lo, box.q_hi do
        for k = box.k_lo, box.k_hi do
            env.q, env.k = q, k
            visit(q, k, f(env))
        end
    end
end

local function check_class(text, mask, f, env, box, known)
    local class = interval.class(mask, box, known and values_of(env) or nil)
    if class == "partial" then return class end
    each(box, env, f, function(q, k, visible)
        if visible ~= (class == "full") then
            error(("class %s, but q=%d k=%d is %s\n%s l=%d"):format(class, q, k, visible, describe(text, box), env.l))
        end
    end)
    return class
end

local function check_spans(text, mask, f, env, box, direction, known)
    local spans = interval.spans(mask, box, direction, known and values_of(env) or nil)
    local wide = {}
    for key, value in pairs(box) do wide[key] = value end
    if direction == "keys" then wide.k_lo, wide.k_hi = box.k_start, box.k_start + box.seq_k - 1
    else wide.q_lo, wide.q_hi = box.q_start, box.q_start + box.seq_q - 1 end
    each(wide, env, f, function(q, k, visible)
        local at = direction == "keys" and k or q
        local some, all = false, false
        for _, span in ipairs(spans) do
            some = some or span.outer[1] <= at and at <= span.outer[2]
            all = all or span.inner[1] <= at and at <= span.inner[2]
        end
        if visible and not some or all and not visible then
            error(("%s: q=%d k=%d is %s, outer %s, inner %s\n%s l=%d"):format(direction, q, k, visible, some, all, describe(text, box), env.l))
        end
    end)
end

function tests.class_is_sound()
    random.seed(20)
    local decided = 0
    for i = 1, 3000 do
        local text, f = random.mask(i % 4 + 1)
        local mask = parse_mask(text)
        for _ = 1, 3 do
            local env = random.launch()
            if check_class(text, mask, f, env, random_box(env), i % 3 ~= 0) ~= "partial" then decided = decided + 1 end
        end
    end
    assert(decided > 2000, "too few tiles were decided to trust this test: " .. decided)
end

function tests.spans_are_sound()
    random.seed(30)
    local walks = 0
    for i = 1, 2000 do
        local text, f = random.plain_mask(i % 3)
        local mask = parse_mask(text)
        if interval.walk(mask).kind == "range" then
            walks = walks + 1
            for _ = 1, 3 do
                local env = random.launch()
                local box = random_box(env)
                check_class(text, mask, f, env, box, true)
                check_spans(text, mask, f, env, box, "keys", i % 4 ~= 0)
                check_spans(text, mask, f, env, box, "queries", i % 4 ~= 0)
            end
        end
    end
    assert(walks > 1000, "too few masks had walk range: " .. walks)
end

-- Kernels that are told so take the outer spans of a row for what it sees.
function tests.single_rows_are_exact_where_it_is_said()
    random.seed(40)
    local exact, others = 0, 0
    for i = 1, 2000 do
        local text = random.plain_mask(i % 3)
        local mask = parse_mask(text)
        local uses = functions.uses {mask = mask}
        if uses.exact_rows then
            exact = exact + 1
            for _ = 1, 5 do
                local env = random.launch()
                local box = random_box(env)
                box.q_hi = box.q_lo
                for _, span in ipairs(interval.spans(interval.bounds(mask) or mask, box, "keys", values_of(env))) do
                    local outer, inner = span.outer, span.inner
                    if outer[1] <= outer[2] and (outer[1] ~= inner[1] or outer[2] ~= inner[2]) then
                        error(("outer %d..%d, inner %d..%d\n%s l=%d"):format(outer[1], outer[2], inner[1], inner[2], describe(text, box), env.l))
                    end
                end
            end
        elseif uses.walk == "range" then
            others = others + 1
        end
    end
    assert(exact > 500 and others > 50, ("too few masks: %d exact, %d not"):format(exact, others))
end

-- What bounds a walk and the rest are together the mask.
function tests.bounds_and_the_rest_are_the_mask()
    random.seed(41)
    local found = 0
    for i = 1, 1000 do
        local text, f = random.plain_mask(i % 3)
        local mask = parse_mask("(" .. text .. ") & (q + 3 * k) % 5 != 0")
        local bounds, rest = interval.bounds(mask)
        if bounds then
            found = found + 1
            assert(interval.walk(bounds).kind == "range")
            local env = random.launch()
            local values = values_of(env)
            for _ = 1, 20 do
                local box = random_box(env)
                local point = setmetatable({q = box.q_lo, k = box.k_lo, row = box.q_lo - box.q_start, col = box.k_lo - box.k_start, params = values.params, load = values.load}, {__index = box})
                local seen = expression.evaluate(bounds, point) and expression.evaluate(rest, point)
                local right = expression.evaluate(mask, point)
                assert(seen == right, text)
            end
        end
    end
    assert(found > 300, "too few masks have bounds: " .. found)
    local function bounds_of(text) return (interval.bounds(mask_of("mask={" .. text .. "}"))) end
    assert(expression.print(bounds_of "k <= q & k % 3 == 0 & q - k < 9") == "k <= q & q - k < 9")
    assert(not bounds_of "k <= q" and not bounds_of "k % 3 == 0" and not bounds_of "k <= q | k % 3 == 0")
end

-- What is made of blocks has exact classes, wherever tiles and blocks begin.
function tests.blocks_are_exact()
    random.seed(42)
    local num_exact = 0
    for _, text in ipairs {"butterfly(8)", "bigbird(0, 0, 1, 3)", "row / 8 * 3 % 5 != col / 8", "block_diagonal(12)", "hash(q / 16, k / 8, h) % 3 == 0",
                           "k / 8 % 3 == 1", "popcount(q / 4) % 2 == 0"} do
        local mask = mask_of("mask={" .. text .. "}")
        assert(interval.blocks(mask), text)
        for _ = 1, 60 do
            local box = {b = 0, h = 1, hkv = 0, seq_q = 300, seq_k = 280, q_start = random.pick(-40, 40), k_start = random.pick(-9, 9)}
            local q, k = random.pick(0, 299), random.pick(0, 279)
            box.q_lo, box.q_hi = box.q_start + q, box.q_start + math.min(q + random.pick(0, 40), 299)
            box.k_lo, box.k_hi = box.k_start + k, box.k_start + math.min(k + random.pick(0, 40), 279)
            local some, all = false, true
            for i = box.q_lo, box.q_hi do
                for j = box.k_lo, box.k_hi do
                    local seen = expression.evaluate(mask, setmetatable({q = i, k = j, row = i - box.q_start, col = j - box.k_start, params = {}}, {__index = box}))
                    some, all = some or seen, all and seen
                end
            end
            local right, class = all and "full" or some and "partial" or "empty", interval.class(mask, box, {params = {}})
            local blocks = interval.blocks(mask)
            local function most_met(of, lo, hi) return of and (hi - lo) // of.size + 2 or 1 end
            if most_met(blocks.q, box.q_lo, box.q_hi) * most_met(blocks.k, box.k_lo, box.k_hi) <= interval.MOST_BLOCKS then
                num_exact = num_exact + 1
                if class ~= right then error(("%s\nis %s, not %s"):format(describe(text, box), class, right)) end
            end
        end
    end
    assert(num_exact > 200)
    for _, text in ipairs {"q / 8 == k", "q / 8 == q / 16 & k > 3", "q / 8 + row / 8 == k / 8"} do
        assert(not interval.blocks(mask_of("mask={" .. text .. "}")), text)
    end
    local part, rest = interval.block_part(mask_of("mask={q / 8 == k / 8 & (q + k) % 3 == 0}"))
    assert(expression.print(part) == "q / 8 == k / 8" and expression.print(rest) == "(q + k) % 3 == 0")
end

-- Counts tiles of 16 x 16 that are visited and full by the walk, and those that should be.
local function count(text, seq_q, seq_k, direction)
    local mask = mask_of(text)
    local p = problem.parse("bf16 d=64 " .. text)
    assert(interval.walk(p.mask).kind == "range")
    local tile = 16
    local box = {b = 0, h = 0, hkv = 0, seq_q = seq_q, seq_k = seq_k, q_start = seq_k - seq_q, k_start = 0}
    for first_q = 0, seq_q - 1, tile do
        for first_k = 0, seq_k - 1, tile do
            box.q_lo, box.q_hi = box.q_start + first_q, box.q_start + math.min(first_q + tile, seq_q) - 1
            box.k_lo, box.k_hi = first_k, math.min(first_k + tile, seq_k) - 1
            local some, all = false, true
            for q = box.q_lo, box.q_hi do
                for k = box.k_lo, box.k_hi do
                    local visible = expression.evaluate(mask, {q = q, k = k})
                    some, all = some or visible, all and visible
                end
            end
            local lo, hi = box.k_lo, box.k_hi
            if direction == "queries" then lo, hi = box.q_lo, box.q_hi end
            local visited, full = false, false
            for _, span in ipairs(interval.spans(mask, box, direction)) do
                visited = visited or span.outer[1] <= span.outer[2] and span.outer[1] <= hi and lo <= span.outer[2]
                full = full or span.inner[1] <= lo and hi <= span.inner[2]
            end
            local where = ("%s %s: tile at q=%d k=%d "):format(text, direction, box.q_lo, box.k_lo)
            assert(visited == some, where .. (some and "is skipped" or "is visited in vain"))
            assert(full == all, where .. (all and "is full but not known to be" or "is not full"))
            local class = interval.class(mask, box)
            assert(class == (all and "full" or some and "partial" or "empty"), where .. "has class " .. class)
        end
    end
end

function tests.spans_are_tight()
    for _, text in ipairs {"causal", "mask={causal & window(20, 0)}", "mask={window(9, 3)}", "mask={prefix(5)}", "mask={prefix(40)}",
                           "mask={window(-1, 4)}", "mask={abs(q - k) <= 17}", "mask={k < 4 | window(40, 0) & causal}"} do
        for _, direction in ipairs {"keys", "queries"} do
            count(text, 70, 70, direction)
            count(text, 33, 90, direction)
            count(text, 90, 33, direction)
        end
    end
end

function tests.walks()
    local function walk(mask, declarations)
        return interval.walk(mask_of(("mask={%s}%s"):format(mask, declarations and " params={" .. declarations .. "}" or "")))
    end
    assert(#interval.walk(nil).spans == 1)
    assert(#walk("causal").spans == 1)
    assert(#walk("window(l, r)", "l: i32, r: i32").spans == 1)
    assert(#walk("prefix(n)", "n: i32").spans == 2)
    assert(#walk("k != 3 & k <= q").spans == 2)
    assert(#walk("h < 4 ? causal : window(9, 9)").spans == 2)
    assert(#walk("row == q - 7").spans == 1)
    assert(#walk("k <= q + width[h]", "width: i32[heads_q]").spans == 1)
    assert(#walk("k == 1 | k == 3 | k == 5 | k == 7").spans == 4)
    local function classify(mask, declarations, reason)
        local w = walk(mask, declarations)
        assert(w.kind == "classify", mask .. " has walk " .. w.kind)
        assert(w.reason:find(reason, 1, true), w.reason)
    end
    classify("k == 1 | k == 3 | k == 5 | k == 7 | k == 9", nil, "more than 4 spans")
    classify("document(doc)", "doc: i32[seq_k]", "`doc[q] <= doc[k]` is not")
    classify("k / 64 == q / 64", nil, "is not of the form")
    classify("2 * k <= q", nil, "is not of the form")
    classify("f32(k) < x", "x: f32", "compares f32")
    classify("seen[k]", "seen: bool[seq_k]", "`seen[k]` is read from memory")
end

-- Documents of 100 keys, and blocks of 64 x 64 of which every third is seen.
function tests.arrays_are_looked_at()
    local env = {params = {}, load = function(name, indices)
        if name == "doc" then return indices[1] // 100 end
        return (indices[1] + indices[2]) % 3 == 0
    end}
    local function class(text, q_lo, k_lo, size)
        local box = {q_lo = q_lo, q_hi = q_lo + size - 1, k_lo = k_lo, k_hi = k_lo + size - 1, b = 0, h = 0, hkv = 0,
                     seq_q = 4096, seq_k = 4096, q_start = 0, k_start = 0}
        return interval.class(mask_of(text), box, env)
    end
    local documents = "mask={document(doc)} params={doc: i32[seq_k]}"
    assert(class(documents, 0, 36, 64) == "full", "one document")
    assert(class(documents, 0, 128, 64) == "empty", "others")
    assert(class(documents, 0, 64, 64) == "partial", "a document ends inside")
    assert(class(documents, 0, 2048, 1024) == "empty")
    assert(class(documents, 0, 2048, 1025) == "partial", "more entries than are looked at")
    local bytes = " params={m: u8[seq_q, seq_k]}"
    assert(class("mask={m[row, col] <= 255}" .. bytes, 0, 0, 64) == "full", "u8, though more than are looked at")
    assert(class("mask={4 * (m[row, col] * m[row, col]) <= 100000}" .. bytes, 0, 0, 64) == "partial")
    local blocks = "mask={blk[row / 64, col / 64] & causal} params={blk: bool[ceil(seq_q/64), ceil(seq_k/64)]}"
    assert(class(blocks, 256, 128, 64) == "full", "a block that is seen")
    assert(class(blocks, 256, 192, 64) == "empty", "one that is not")
    assert(class(blocks, 256, 128, 128) == "partial", "four, one of them seen")
    assert(class(blocks, 384, 384, 64) == "partial", "the diagonal")
end

function tests.variables_count_once()
    local box = {q_lo = 100, q_hi = 163, k_lo = 0, k_hi = 63, b = 0, h = 0, hkv = 0, seq_q = 256, seq_k = 256, q_start = 0, k_start = 0}
    local function class(mask) return interval.class(mask_of("mask={" .. mask .. "}"), box) end
    assert(class("q + k - q <= 63") == "full")
    assert(class("q / 2 + 70 > q / 2 + k") == "full")
    assert(class("row + 5 == q + 5") == "full")
    assert(class("(q - k) % 200 > 500") == "empty")
    assert(class("k / 64 == 0") == "full")
    assert(class("q / k == 3") == "partial", "the divisor may be 0")
end

function tests.the_unknown_is_partial()
    local box = {q_lo = 100, q_hi = 163, k_lo = 0, k_hi = 63, b = 0, h = 0, hkv = 0, seq_q = 256, seq_k = 256, q_start = 0, k_start = 0}
    for _, mask in ipairs {
        "16777216 * (q - 90) + 16777216 * (q - 90) > 0", "q * 30000000 < 0", "q * 30000000 / 2 > 0", "q * q * q * q * q > 0", "q / (k - 5) > -200", -- may wrap, may divide by 0
        "abs(hash(q, k, 1)) >= 0", "abs(q * 30000000) >= 0",                                         -- |-2^31| is -2^31
        "abs(exp(f32(q))) >= 0.0", "sqrt(f32(k) - 1.0) >= 0.0", "f32(q) / f32(k) >= 0.0",            -- may be NaN
        "f32(q) * 1e38 - f32(q) * 1e38 <= 0.0", "min(log(f32(k)), 1.0) <= 2.0", "i32(tanh(f32(k))) > -5",
    } do
        local class = interval.class(mask_of("mask={" .. mask .. "}"), box)
        assert(class == "partial", mask .. " is " .. class)
    end
end

return tests
