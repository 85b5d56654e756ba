--[[ random: random expressions, each as text and as a Lua function that computes it by itself, without gen/.

  random.expression(type, depth, score)      -> text, f; f(env) is the value. type: "i32" | "f32" | "bool"
  random.mask(depth), random.plain_mask()    -> text, f of a mask; plain: of comparisons affine in q and k
  random.launch()                            -> env: all variables but q and k, params and arrays
  random.declarations                        -> text of params that the expressions may use

env holds q k q_start k_start b h hkv seq_q seq_k s and the params l (i32), x (f32), on (bool), doc (i32[seq_k]),
ramp (f32[16]), pick (bool[heads_q]). The sequence of expressions is fixed: the generator has its own seed. ]]

local random = {}

random.declarations = "l: i32, x: f32, on: bool, doc: i32[seq_k], ramp: f32[16], pick: bool[heads_q]"
random.heads_q = 8

local state = 1
function random.seed(value) state = value end

-- Integer in lo .. hi.
local function pick(lo, hi)
    state = (state * 6364136223846793005 + 1442695040888963407)
    return lo + (state >> 33) % (hi - lo + 1)
end
random.pick = pick

local function one_of(list) return list[pick(1, #list)] end
random.one_of = one_of

local function single(x) return (string.unpack("<f", string.pack("<f", x))) end
local function low_half(x) return (string.unpack("<i4", string.pack("<i8", x):sub(1, 4))) end

local function row(env) return env.q - env.q_start end
local function col(env) return env.k - env.k_start end

local VARIABLES = {
    {"q", function(e) return e.q end}, {"k", function(e) return e.k end}, {"q", function(e) return e.q end},
    {"k", function(e) return e.k end}, {"row", row}, {"col", col}, {"h", function(e) return e.h end},
    {"b", function(e) return e.b end}, {"hkv", function(e) return e.hkv end}, {"seq_q", function(e) return e.seq_q end},
    {"seq_k", function(e) return e.seq_k end}, {"l", function(e) return e.l end},
}
local CONSTANTS = {0, 1, 2, 3, 5, 7, 8, 16, 63, 64, 100, 1000, 65536, 1073741824, 2147483647}
local FLOATS = {"0.0", "0.5", "1.0", "2.0", "3.25", "1e-3", "1e10", "7.5"}

local function binary(op, a, fa, b, fb, meaning)
    return ("(%s %s %s)"):format(a, op, b), function(e) return meaning(fa(e), fb(e)) end
end

local INT = {
    ["+"] = function(a, b) return low_half(a + b) end,
    ["-"] = function(a, b) return low_half(a - b) end,
    ["*"] = function(a, b) return low_half(a * b) end,
    ["/"] = function(a, b)
        if b == 0 then return 0 end
        return low_half((a - a % b) // b)
    end,
    ["%"] = function(a, b)
        if b == 0 then return 0 end
        local rest = math.fmod(a, b)
        if rest ~= 0 and (rest < 0) ~= (b < 0) then rest = rest + b end
        return rest
    end,
}
local FLOAT = {
    ["+"] = function(a, b) return single(a + b) end, ["-"] = function(a, b) return single(a - b) end,
    ["*"] = function(a, b) return single(a * b) end, ["/"] = function(a, b) return single(a / b) end,
}
local COMPARE = {
    ["<"] = function(a, b) return a < b end, ["<="] = function(a, b) return a <= b end,
    [">"] = function(a, b) return a > b end, [">="] = function(a, b) return a >= b end,
    ["=="] = function(a, b) return a == b end, ["!="] = function(a, b) return a < b or b < a end,
}
local COMPARISONS = {"<", "<=", ">", ">=", "==", "!="}

local function bits(x)
    local n = 0
    for i = 0, 31 do n = n + (x >> i & 1) end
    return n
end

local function array(list, n, outside)
    return function(index)
        if index < 0 or index >= n then return outside end
        return list[index + 1]
    end
end

local gen = {}

function random.expression(type, depth, score)
    return gen[type](depth, score)
end

local function choice(type, depth, score)
    local c, fc = gen.bool(depth - 1, score)
    local a, fa = gen[type](depth - 1, score)
    local b, fb = gen[type](depth - 1, score)
    return ("(%s ? %s : %s)"):format(c, a, b), function(e)
        local x, y = fa(e), fb(e)
        if fc(e) then return x end
        return y
    end
end

function gen.i32(depth, score)
    if depth <= 0 or pick(1, 6) == 1 then
        if pick(1, 3) == 1 then
            local c = one_of(CONSTANTS)
            if pick(1, 3) == 1 then
                c = -c
                return ("(%d)"):format(c), function() return c end
            end
            return tostring(c), function() return c end
        end
        local v = one_of(VARIABLES)
        return v[1], v[2]
    end
    local kind = pick(1, 22)
    if kind <= 12 then
        local op = one_of {"+", "-", "+", "-", "*", "/", "%"}
        local a, fa = gen.i32(depth - 1, score)
        local b, fb = gen.i32(depth - 1, score)
        return binary(op, a, fa, b, fb, INT[op])
    elseif kind == 13 then
        return choice("i32", depth, score)
    elseif kind == 14 then
        local a, fa = gen.f32(depth - 1, score)
        return ("i32(%s)"):format(a), function(e)
            local v = fa(e)
            if v ~= v then return 0 end
            if v >= 2147483647 then return 2147483647 end
            if v <= -2147483648 then return -2147483648 end
            return (math.modf(v)) // 1 | 0
        end
    elseif kind == 15 then
        local a, fa = gen.i32(depth - 1, score)
        return ("doc[%s]"):format(a), function(e) return array(e.doc, e.seq_k, 0)(fa(e)) end
    elseif kind == 16 then
        local a, fa = gen.i32(depth - 1, score)
        return ("abs(%s)"):format(a), function(e)
            local v = fa(e)
            return low_half(v < 0 and -v or v)
        end
    elseif kind == 17 then
        local a, fa = gen.i32(depth - 1, score)
        return ("(-%s)"):format(a), function(e) return low_half(-fa(e)) end
    elseif kind == 18 then
        local a, fa = gen.i32(depth - 1, score)
        return ("popcount(%s)"):format(a), function(e) return bits(fa(e)) end
    elseif kind == 19 then
        local a, fa = gen.bool(depth - 1, score)
        return ("i32(%s)"):format(a), function(e) return fa(e) and 1 or 0 end
    end
    local name = one_of {"min", "max", "xor"}
    local a, fa = gen.i32(depth - 1, score)
    local b, fb = gen.i32(depth - 1, score)
    return ("%s(%s, %s)"):format(name, a, b), function(e)
        local x, y = fa(e), fb(e)
        if name == "xor" then return x ~ y end
        if name == "min" then return x < y and x or y end
        return x > y and x or y
    end
end

function gen.f32(depth, score)
    if depth <= 0 or pick(1, 6) == 1 then
        local kind = pick(1, score and 4 or 3)
        if kind == 1 then
            local text = one_of(FLOATS)
            local value = single(tonumber(text))
            return text, function() return value end
        elseif kind == 2 then
            return "x", function(e) return e.x end
        elseif kind == 4 then
            return "s", function(e) return e.s end
        end
        local a, fa = gen.i32(0, score)
        return ("f32(%s)"):format(a), function(e) return single(fa(e) + 0.0) end
    end
    local kind = pick(1, 12)
    if kind <= 5 then
        local op = one_of {"+", "-", "*", "/"}
        local a, fa = gen.f32(depth - 1, score)
        local b, fb = gen.f32(depth - 1, score)
        return binary(op, a, fa, b, fb, FLOAT[op])
    elseif kind == 6 then
        return choice("f32", depth, score)
    elseif kind == 7 then
        local a, fa = gen.i32(depth - 1, score)
        return ("ramp[%s]"):format(a), function(e) return array(e.ramp, 16, 0.0)(fa(e)) end
    elseif kind == 8 then
        local a, fa = gen.f32(depth - 1, score)
        return ("(-%s)"):format(a), function(e) return -fa(e) end
    elseif kind <= 10 then
        local name = one_of {"abs", "sqrt", "floor"}
        local a, fa = gen.f32(depth - 1, score)
        return ("%s(%s)"):format(name, a), function(e)
            local v = fa(e)
            if name == "abs" then return v < 0 and -v or v == 0 and 0.0 or v end
            if name == "sqrt" then return single(math.sqrt(v)) end
            if v ~= v or v - v ~= 0 then return v end
            return v - v % 1
        end
    end
    local name = one_of {"min", "max"}
    local a, fa = gen.f32(depth - 1, score)
    local b, fb = gen.f32(depth - 1, score)
    return ("%s(%s, %s)"):format(name, a, b), function(e)
        local x, y = fa(e), fb(e)
        if x ~= x then return y end
        if y ~= y then return x end
        if name == "min" then return x < y and x or y end
        return x > y and x or y
    end
end

function gen.bool(depth, score)
    local kind = depth <= 0 and pick(1, 3) or pick(1, 9)
    if kind <= 3 then
        if kind == 1 and pick(1, 8) == 1 then return "on", function(e) return e.on end end
        if kind == 2 and pick(1, 8) == 1 then
            local a, fa = gen.i32(math.min(depth, 1), score)
            return ("pick[%s]"):format(a), function(e) return array(e.pick, random.heads_q, false)(fa(e)) end
        end
        local type = pick(1, 4) == 1 and "f32" or "i32"
        local op = one_of(COMPARISONS)
        local a, fa = gen[type](depth - 1, score)
        local b, fb = gen[type](depth - 1, score)
        return binary(op, a, fa, b, fb, COMPARE[op])
    elseif kind <= 7 then
        local op = one_of {"&", "|"}
        local a, fa = gen.bool(depth - 1, score)
        local b, fb = gen.bool(depth - 1, score)
        return binary(op, a, fa, b, fb, function(x, y)
            if op == "&" then return x and y end
            return x or y
        end)
    elseif kind == 8 then
        local a, fa = gen.bool(depth - 1, score)
        return ("(!%s)"):format(a), function(e) return not fa(e) end
    end
    return choice("bool", depth, score)
end

function random.mask(depth) return gen.bool(depth, false) end

local PARTS = {{"q", 1}, {"k", 1}, {"row", 1}, {"col", 1}, {"q", -1}, {"k", -1}, {"h", 1}, {"l", 1}, {"l", -1}, {"seq_k", 1}}
local VALUE = {row = row, col = col}

local function plain_sum()
    local text, terms = nil, {}
    for _ = 1, pick(1, 2) do
        local part = one_of(PARTS)
        text = (text and text .. (part[2] < 0 and " - " or " + ") or part[2] < 0 and "-" or "") .. part[1]
        terms[#terms + 1] = part
    end
    local c = one_of {0, 0, 0, 1, 3, 4, 9, -2, -7, 2147483647, 1073741824}
    if c ~= 0 then text = text .. (c < 0 and " - " or " + ") .. math.abs(c) end
    return text, function(e)
        local sum = c
        for _, part in ipairs(terms) do
            sum = sum + part[2] * (VALUE[part[1]] and VALUE[part[1]](e) or e[part[1]])
        end
        return low_half(sum)
    end
end

-- Comparisons of sums, joined: many of these masks have walk range.
function random.plain_mask(depth)
    depth = depth or 2
    if depth == 0 or pick(1, 3) == 1 then
        local op = one_of(COMPARISONS)
        local a, fa = plain_sum()
        local b, fb = plain_sum()
        if pick(1, 6) == 1 then
            a, fa = ("abs(%s)"):format(a), (function(f) return function(e) return low_half(math.abs(f(e))) end end)(fa)
        end
        return binary(op, a, fa, b, fb, COMPARE[op])
    end
    local a, fa = random.plain_mask(depth - 1)
    if pick(1, 6) == 1 then return ("(!%s)"):format(a), function(e) return not fa(e) end end
    local op = one_of {"&", "|", "&"}
    local b, fb = random.plain_mask(depth - 1)
    return binary(op, a, fa, b, fb, function(x, y)
        if op == "&" then return x and y end
        return x or y
    end)
end

function random.launch()
    local seq_q, seq_k = pick(1, 24), pick(1, 24)
    local heads = random.heads_q
    local far = one_of {0, 0, 0, 0, 1000000, -1000000}
    local env = {seq_q = seq_q, seq_k = seq_k, q_start = one_of {seq_k - seq_q, seq_k - seq_q, pick(-20, 20)} + far,
                 k_start = one_of {0, 0, pick(-9, 9)} + far, b = pick(0, 3), h = pick(0, heads - 1), s = pick(-40, 40) / 8,
                 l = one_of {0, 3, 5, -1, 100, 2147483647, -2147483648, 1073741824}, x = one_of {0.0, 1.5, -3.0, 1e9},
                 on = pick(0, 1) == 1, doc = {}, ramp = {}, pick = {}}
    env.hkv = env.h // 2
    for i = 1, seq_k do env.doc[i] = pick(0, 3) end
    for i = 1, 16 do env.ramp[i] = pick(-8, 8) / 4 end
    for i = 1, heads do env.pick[i] = pick(0, 1) == 1 end
    return env
end

return random
