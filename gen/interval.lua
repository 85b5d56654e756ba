--[[ interval: what a mask does to a whole tile of the score matrix, by interval arithmetic. Never wrong, only vague:
what is not known makes a tile partial, never empty and never full.

  interval.walk(mask)      -> {kind = "range", spans = conjunctions} or {kind = "classify", reason = text}; nil: no mask
  interval.rows(conjunction, direction)           -> bounds of one span, as gen/functions.lua emits them
  interval.spans(mask, box, direction, env)       -> list of {outer = {lo, hi}, inner = {lo, hi}}; lo > hi is empty
  interval.class(mask, box, env)                  -> "empty" | "partial" | "full"
  interval.bounds(mask)    -> bounds, rest: a conjunction of walk classify as its part of walk range and the others; nil: not both
  interval.block_part(mask) -> part, rest: the conjuncts made of blocks of positions and the others, either may be nil;
  interval.blocks(part)    -> {q = {name =, size =}, k =} or nil: the blocks; the class then looks at one element of each
  interval.describe(mask, backend)                -> the class of a tile in the backend's terms (text in functions.lua)
  interval.range(node)     -> lo, hi of an i32 node whatever the launch; interval.exact(node): its sum cannot wrap
  interval.uniform(node)   -> whether a node has one value on a whole tile
  interval.stored(param)   -> lo, hi of what an array of integers or bools can hold

  box: q_lo q_hi k_lo k_hi (inclusive positions), q_start k_start seq_q seq_k b h hkv
  env: params {name = value}, load(name, indices) -> value; both may be missing, then their values are unknown.
  A class asks load for at most MOST_LOADS entries that a tile reads of an array
  direction: "keys", spans of keys that queries q_lo..q_hi see; "queries", the other way round

Walk range. The mask becomes a disjunction of conjunctions of atoms a q + b k + c <= 0 with a, b in -1, 0, 1 and c uniform
(the same for the whole tile), and of uniform conditions. `row` is q - q_start and `col` is k - k_start.
Wrapping. An atom is compared in 64 bits, which is right only where both sides of the comparison stay inside i32 in
exact arithmetic. Where that is not plain from the ranges of the variables, the atom carries checks made at run time.

Called by functions (text of walks), main (`why`) and tests. ]]

local expression = require "expression"

local interval = {}

local I32_MIN, I32_MAX = expression.I32_MIN, expression.I32_MAX
local LENGTH = 1 << 30 -- the runtime keeps lengths within it and positions within -LENGTH .. LENGTH - 1
local MAX_SPANS = 4
local MAX_CONJUNCTIONS = 16    -- while the disjunction is being built
local MAX_COEFFICIENT, MAX_TERMS = 1 << 24, 64 -- sums of such terms fit 64 bits

local POSITION, INDEX = {-LENGTH, LENGTH - 1}, {0, LENGTH - 1}
local RANGE = {q = POSITION, k = POSITION, q_start = POSITION, k_start = POSITION, row = INDEX, col = INDEX,
               b = INDEX, h = INDEX, hkv = INDEX, seq_q = {0, LENGTH}, seq_k = {0, LENGTH}}
local TILE_VARIABLES = {q = true, k = true, row = true, col = true, s = true}

local STORED = {u8 = {0, 255}, bool = {0, 1}}

function interval.stored(param)
    return table.unpack(STORED[param.dtype] or {I32_MIN, I32_MAX})
end

interval.MOST_LOADS = 1024 -- for one load; where a tile meets more, they may be all that the array can hold

local varying = setmetatable({}, {__mode = "k"})

-- Whether a node has one value on a whole tile.
local function uniform(node)
    local varies = varying[node]
    if varies == nil then
        varies = node.op == "var" and TILE_VARIABLES[node.name] or false
        for _, arg in ipairs(node.args or {}) do varies = varies or not uniform(arg) end
        varying[node] = varies
    end
    return not varies
end

interval.uniform = uniform

-- -- sums ------------------------------------------------------------------------------------------------------

-- A sum is {c, terms}: c plus coefficients times nodes; terms are {coefficient, node} in order of first use.

local function add_to(sum, factor, c, terms)
    sum.c = sum.c + factor * c
    for _, term in ipairs(terms) do
        local key = expression.print(term.node)
        local found
        for _, have in ipairs(sum.terms) do
            if expression.print(have.node) == key then found = have end
        end
        if found then
            found.coefficient = found.coefficient + factor * term.coefficient
        else
            sum.terms[#sum.terms + 1] = {coefficient = factor * term.coefficient, node = term.node}
        end
    end
end

local function combine(fa, a, fb, b)
    local sum = {c = 0, terms = {}}
    add_to(sum, fa, a.c, a.terms)
    if b then add_to(sum, fb, b.c, b.terms) end
    local kept = {}
    for _, term in ipairs(sum.terms) do
        if term.coefficient ~= 0 then kept[#kept + 1] = term end
    end
    sum.terms = kept
    return sum
end

local function is_small(sum)
    if #sum.terms > MAX_TERMS or math.abs(sum.c) > 1 << 40 then return false end
    for _, term in ipairs(sum.terms) do
        if math.abs(term.coefficient) > MAX_COEFFICIENT then return false end
    end
    return true
end

local function single(node)
    return {c = 0, terms = {{coefficient = 1, node = node}}}
end

-- The sum that an i32 node is, in exact arithmetic; other operations are terms.
local function sum_of(node)
    local sum
    if node.op == "const" then
        return {c = node.value, terms = {}}
    elseif node.op == "+" or node.op == "-" then
        sum = combine(1, sum_of(node.args[1]), node.op == "+" and 1 or -1, sum_of(node.args[2]))
    elseif node.op == "neg" then
        sum = combine(-1, sum_of(node.args[1]))
    elseif node.op == "*" and node.args[1].op == "const" and math.abs(node.args[1].value) <= MAX_COEFFICIENT then
        sum = combine(node.args[1].value, sum_of(node.args[2]))
    end
    if sum and is_small(sum) then return sum end
    return single(node)
end

-- The sum that one side of a comparison is. A uniform side is one value, however it came about.
local function side_of(node)
    if uniform(node) and node.op ~= "const" then return single(node) end
    return sum_of(node)
end

local START = {row = {op = "var", type = "i32", name = "q_start", size = 1},
               col = {op = "var", type = "i32", name = "k_start", size = 1}}
local POSITION_OF = {row = expression.variable("q"), col = expression.variable("k")}

-- Writes row as q - q_start and col as k - k_start.
local function to_positions(sum)
    local out = {c = sum.c, terms = {}}
    for _, term in ipairs(sum.terms) do
        local name = term.node.op == "var" and term.node.name
        if START[name] then
            out = combine(1, out, term.coefficient, combine(1, single(POSITION_OF[name]), -1, single(START[name])))
        else
            out = combine(1, out, 1, {c = 0, terms = {term}})
        end
    end
    return out
end

local function coefficient(sum, name)
    for _, term in ipairs(sum.terms) do
        if term.node.op == "var" and term.node.name == name then return term.coefficient end
    end
    return 0
end

-- -- one recursion for all backends ----------------------------------------------------------------------------

--[[ A backend gives the meaning of intervals: numbers here, text in functions.lua.
  backend.op(name, ...)   applies an operation of the table `numbers` below
  backend.const(lo, hi)   an i32 interval
  backend.var(name)       the interval of q, k, row, col, or of another variable
  backend.point(node)     interval or class of a uniform node, nil where its value is unknown
  backend.load(node, indices)  interval of what a load reads for a box of indices; missing: it may be anything
  backend.read(node)      the same where it is known already, else nil; may be missing ]]

local Describe = {}
Describe.__index = Describe

local range_of

-- Interval of a sum in 64 bits, without regard to wrapping.
function Describe:sum(sum)
    local op, result = self.backend.op, nil
    for _, term in ipairs(sum.terms) do
        local value = self:int(term.node)
        local c = term.coefficient
        if result and c == 1 then result = op("iv_add", result, value)
        elseif result and c == -1 then result = op("iv_sub", result, value)
        else
            if c ~= 1 then value = op("iv_scale", value, c) end
            result = result and op("iv_add", result, value) or value
        end
    end
    if not result then return self.backend.const(sum.c, sum.c) end
    return sum.c ~= 0 and op("iv_shift", result, sum.c) or result
end

-- Interval of + - * in 64 bits, before wrapping.
function Describe:unwrapped(node)
    local sum = sum_of(node)
    if #sum.terms ~= 1 or sum.terms[1].node ~= node then return self:sum(sum) end
    local a, b = self:int(node.args[1]), node.args[2] and self:int(node.args[2])
    if node.op == "neg" then return self.backend.op("iv_scale", a, -1) end
    return self.backend.op(({["+"] = "iv_add", ["-"] = "iv_sub", ["*"] = "iv_mul"})[node.op], a, b)
end

function Describe:int(node)
    local known = self.known[node]
    if not known then
        known = uniform(node) and node.op ~= "const" and self.backend.point(node) or self:int_structure(node)
        self.known[node] = known
    end
    return known
end

function Describe:int_structure(node)
    local B, op, args = self.backend, node.op, node.args
    if op == "const" then return B.const(node.value, node.value) end
    if op == "var" then return B.var(node.name) end
    if op == "+" or op == "-" or op == "neg" or op == "*" then
        local result = self:unwrapped(node)
        if not self.static and interval.exact(node) then return result end
        return B.op("iv_wrap", result)
    elseif op == "/" or op == "%" or op == "min" or op == "max" then
        local name = ({["/"] = "iv_div", ["%"] = "iv_mod", min = "iv_min", max = "iv_max"})[op]
        return B.op(name, self:int(args[1]), self:int(args[2]))
    elseif op == "abs" then
        return B.op("iv_abs", self:int(args[1]))
    elseif op == "?:" then
        return B.op("iv_select", self:class(args[1]), self:int(args[2]), self:int(args[3]))
    elseif op == "i32" then
        if args[1].type == "bool" then return B.op("iv_of_class", self:class(args[1])) end
        return B.op("iv_of_float", self:float(args[1]))
    elseif op == "popcount" then
        return B.const(0, 32)
    elseif op == "load" then
        return self:loaded(node) or B.const(interval.stored(node.param))
    elseif op == "&" then
        local least = I32_MAX
        local nonnegative = false
        for _, arg in ipairs(args) do
            local lo, hi = interval.range(arg)
            if lo >= 0 then nonnegative, least = true, math.min(least, hi) end
        end
        if nonnegative then return B.const(0, least) end
    end
    return B.const(I32_MIN, I32_MAX)
end

local FLOAT = {["+"] = "fv_add", ["-"] = "fv_sub", ["*"] = "fv_mul", ["/"] = "fv_div", neg = "fv_neg", min = "fv_min",
               max = "fv_max", abs = "fv_abs", sqrt = "fv_sqrt", floor = "fv_floor"}

function Describe:float(node)
    local B, op, args = self.backend, node.op, node.args
    local point = uniform(node) and B.point(node)
    if point then return point end
    if op == "?:" then return B.op("fv_select", self:class(args[1]), self:float(args[2]), self:float(args[3])) end
    if op == "f32" then
        if args[1].type == "bool" then return B.op("fv_of_class", self:class(args[1])) end
        return B.op("fv_of_int", self:int(args[1]))
    end
    if not FLOAT[op] then return B.op("fv_unknown") end
    local values = {}
    for i, arg in ipairs(args) do values[i] = self:float(arg) end
    return B.op(FLOAT[op], table.unpack(values))
end

-- Interval of what a load of integers or bools finds over the tile, if the backend looks.
function Describe:loaded(node)
    local found = self.backend.read and self.backend.read(node)
    if found or not self.backend.load then return found end
    local indices = {}
    for i, index in ipairs(node.args) do indices[i] = self:int(index) end
    return self.backend.load(node, indices)
end

-- Whether nothing is known of a node that varies over the tile.
function Describe:is_opaque(node)
    if uniform(node) then return false end
    local op = node.op
    if op == "&" then return interval.range(node) == I32_MIN end
    if op == "load" then return not self.backend.load and node.param.dtype ~= "u8" end
    return op == "hash" or op == "xor" or op == "|"
end

-- Class of a comparison of integers, with each variable counted once.
function Describe:compare_int(op, a, b)
    local B = self.backend
    if op == ">" or op == ">=" then return self:compare_int(expression.mirror[op], b, a) end
    if op == "!=" then return B.op("cl_not", self:compare_int("==", a, b)) end
    local difference = combine(1, side_of(a), -1, side_of(b))
    if coefficient(difference, "q") ~= 0 and coefficient(difference, "row") ~= 0
        or coefficient(difference, "k") ~= 0 and coefficient(difference, "col") ~= 0 then
        difference = to_positions(difference)
    end
    if not is_small(difference) then difference = combine(1, single(a), -1, single(b)) end
    for _, term in ipairs(difference.terms) do
        if self:is_opaque(term.node) then return B.op("cl_const", 1) end
    end
    if op == "<" then difference.c = difference.c + 1 end
    local class = B.op(op == "==" and "cl_zero" or "cl_at_most_zero", self:sum(difference))
    for _, side in ipairs {a, b} do
        if not uniform(side) and not interval.exact(side) then
            class = B.op("cl_if_fits", class, self:unwrapped(side))
        end
    end
    return class
end

function Describe:class(node)
    local B, op, args = self.backend, node.op, node.args
    if node.op == "const" then return B.op("cl_const", node.value and 2 or 0) end
    local point = uniform(node) and B.point(node)
    if point then return point end
    if op == "&" or op == "|" then
        local class = self:class(args[1])
        for i = 2, #args do class = B.op(op == "&" and "cl_and" or "cl_or", class, self:class(args[i])) end
        return class
    elseif op == "!" then
        return B.op("cl_not", self:class(args[1]))
    elseif op == "?:" then
        return B.op("cl_select", self:class(args[1]), self:class(args[2]), self:class(args[3]))
    elseif expression.comparison[op] then
        local a, b = args[1], args[2]
        if a.type == "i32" then return self:compare_int(op, a, b) end
        if a.type == "bool" then
            local class = B.op("cl_alike", self:class(a), self:class(b))
            return op == "==" and class or B.op("cl_not", class)
        end
        local x, y = self:float(a), self:float(b)
        if op == "<" then return B.op("cl_below", x, y) end
        if op == ">" then return B.op("cl_below", y, x) end
        if op == "<=" then return B.op("cl_not_above", x, y) end
        if op == ">=" then return B.op("cl_not_above", y, x) end
        if op == "==" then return B.op("cl_equal", x, y) end
        return B.op("cl_or", B.op("cl_below", x, y), B.op("cl_below", y, x))
    elseif op == "load" then
        local found = self:loaded(node)
        if found then return B.op("cl_not", B.op("cl_zero", found)) end
    end
    return B.op("cl_const", 1)
end

function interval.describe(mask, backend)
    return setmetatable({backend = backend, known = {}}, Describe):class(mask)
end

-- -- numbers ---------------------------------------------------------------------------------------------------

-- An i32 interval is {lo, hi} in 64 bits; an f32 one {lo, hi}, lo = NaN where the value may be anything, NaN included;
-- a class is 0 empty (false everywhere), 1 partial, 2 full (true everywhere).

local FULL = {I32_MIN, I32_MAX}
local UNKNOWN = {0 / 0, 0 / 0}

local function f32(x) return (string.unpack("<f", string.pack("<f", x))) end

local function hull(...)
    return {math.min(...), math.max(...)}
end

local function finite(x)
    return x[1] - x[1] == 0 and x[2] - x[2] == 0
end

local function corners(a, b, f)
    return hull(f(a[1], b[1]), f(a[1], b[2]), f(a[2], b[1]), f(a[2], b[2]))
end

local function float2(f)
    return function(a, b)
        if not (finite(a) and finite(b)) then return UNKNOWN end
        return f(a, b)
    end
end

local function float1(f)
    return function(a)
        if not finite(a) then return UNKNOWN end
        return f(a)
    end
end

local function select(c, a, b)
    if c == 2 then return a end
    if c == 0 then return b end
    return nil
end

local numbers = {
    iv_add = function(a, b) return {a[1] + b[1], a[2] + b[2]} end,
    iv_sub = function(a, b) return {a[1] - b[2], a[2] - b[1]} end,
    iv_scale = function(a, c) return hull(c * a[1], c * a[2]) end,
    iv_shift = function(a, c) return {a[1] + c, a[2] + c} end,
    iv_wrap = function(a) return a[1] >= I32_MIN and a[2] <= I32_MAX and a or FULL end,
    iv_mul = function(a, b) return corners(a, b, function(x, y) return x * y end) end,
    iv_div = function(a, b)
        if b[1] <= 0 and b[2] >= 0 then return FULL end
        local q = corners(a, b, function(x, y) return x // y end)
        return q[2] <= I32_MAX and q or FULL
    end,
    -- The remainder has the divisor's sign and is smaller; by 0 it is 0.
    iv_mod = function(a, b)
        if b[1] == b[2] and b[1] ~= 0 and a[1] // b[1] == a[2] // b[1] then return {a[1] % b[1], a[2] % b[1]} end
        local lo, hi = math.min(b[1] + 1, 0), math.max(b[2] - 1, 0)
        if b[1] > 0 and a[1] >= 0 then hi = math.min(hi, a[2]) end
        return {lo, hi}
    end,
    iv_min = function(a, b) return {math.min(a[1], b[1]), math.min(a[2], b[2])} end,
    iv_max = function(a, b) return {math.max(a[1], b[1]), math.max(a[2], b[2])} end,
    iv_abs = function(a)
        if a[1] == I32_MIN then return FULL end
        return {math.max(0, a[1], -a[2]), math.max(-a[1], a[2])}
    end,
    iv_select = function(c, a, b)
        return select(c, a, b) or {math.min(a[1], b[1]), math.max(a[2], b[2])}
    end,
    iv_of_class = function(c) return {c // 2, (c + 1) // 2} end,
    iv_of_float = function(a)
        if a[1] ~= a[1] then return FULL end
        local function to_i32(x)
            return expression.evaluate({op = "i32", args = {expression.constant("f32", x)}}, {})
        end
        return {to_i32(a[1]), to_i32(a[2])}
    end,
    fv_unknown = function() return UNKNOWN end,
    fv_of_int = function(a) return {f32(a[1] + 0.0), f32(a[2] + 0.0)} end,
    fv_of_class = function(c) return {c // 2 + 0.0, (c + 1) // 2 + 0.0} end,
    fv_add = float2(function(a, b) return {f32(a[1] + b[1]), f32(a[2] + b[2])} end),
    fv_sub = float2(function(a, b) return {f32(a[1] - b[2]), f32(a[2] - b[1])} end),
    fv_mul = float2(function(a, b) return corners(a, b, function(x, y) return f32(x * y) end) end),
    fv_div = float2(function(a, b)
        if b[1] <= 0 and b[2] >= 0 then return UNKNOWN end
        return corners(a, b, function(x, y) return f32(x / y) end)
    end),
    fv_neg = float1(function(a) return {-a[2], -a[1]} end),
    fv_min = float2(function(a, b) return {math.min(a[1], b[1]), math.min(a[2], b[2])} end),
    fv_max = float2(function(a, b) return {math.max(a[1], b[1]), math.max(a[2], b[2])} end),
    fv_abs = float1(function(a) return {math.max(0.0, a[1], -a[2]), math.max(-a[1], a[2])} end),
    fv_sqrt = float1(function(a)
        if a[1] < 0 then return UNKNOWN end
        return {f32(math.sqrt(a[1])), f32(math.sqrt(a[2]))}
    end),
    fv_floor = float1(function(a) return {math.floor(a[1]) + 0.0, math.floor(a[2]) + 0.0} end),
    fv_select = function(c, a, b)
        local one = select(c, a, b)
        if one then return one end
        if a[1] ~= a[1] or b[1] ~= b[1] then return UNKNOWN end
        return {math.min(a[1], b[1]), math.max(a[2], b[2])}
    end,
    cl_const = function(c) return c end,
    cl_and = math.min,
    cl_or = math.max,
    cl_not = function(c) return 2 - c end,
    cl_alike = function(a, b)
        if a == 1 or b == 1 then return 1 end
        return a == b and 2 or 0
    end,
    cl_select = function(c, a, b) return select(c, a, b) or (a == b and a or 1) end,
    cl_at_most_zero = function(a) return a[2] <= 0 and 2 or a[1] > 0 and 0 or 1 end,
    cl_zero = function(a) return (a[1] > 0 or a[2] < 0) and 0 or a[1] == a[2] and 2 or 1 end,
    cl_if_fits = function(c, a) return a[1] >= I32_MIN and a[2] <= I32_MAX and c or 1 end,
    cl_below = function(a, b) return a[2] < b[1] and 2 or a[1] >= b[2] and 0 or 1 end,
    cl_not_above = function(a, b) return a[2] <= b[1] and 2 or a[1] > b[2] and 0 or 1 end,
    cl_equal = function(a, b)
        if a[2] < b[1] or a[1] > b[2] then return 0 end
        return a[1] == a[2] and b[1] == b[2] and a[1] == b[1] and 2 or 1
    end,
}

local function apply(name, ...)
    return numbers[name](...)
end

-- What holds whatever the launch.
local everything = {
    op = apply,
    const = function(lo, hi) return {lo, hi} end,
    var = function(name) return RANGE[name] end,
    point = function() return nil end,
}

local ranges = setmetatable({}, {__mode = "k"})

function range_of(node)
    local range = ranges[node]
    if not range then
        range = setmetatable({backend = everything, known = {}, static = true}, Describe):int(node)
        ranges[node] = range
    end
    return range
end

function interval.range(node)
    local range = range_of(node)
    return range[1], range[2]
end

-- Whether a sum may be added up in i32, in any order and whatever the launch.
function interval.is_small(sum)
    local most = math.abs(sum.c)
    for _, term in ipairs(sum.terms) do
        local range = range_of(term.node)
        most = most + math.abs(term.coefficient) * math.max(-range[1], range[2])
    end
    return most <= I32_MAX
end

-- Whether a node's value is its exact value: true of all but + - * that may leave i32.
function interval.exact(node)
    if node.op ~= "+" and node.op ~= "-" and node.op ~= "*" and node.op ~= "neg" then return true end
    local range = setmetatable({backend = everything, known = {}, static = true}, Describe):unwrapped(node)
    return range[1] >= I32_MIN and range[2] <= I32_MAX
end

-- Variables and values of one tile, as expression.evaluate takes them.
local function environment(box, env)
    env = env or {}
    return {b = box.b, h = box.h, hkv = box.hkv, seq_q = box.seq_q, seq_k = box.seq_k, q_start = box.q_start,
            k_start = box.k_start, params = env.params, load = env.load}
end

local function is_unknown(value) return value == nil or value ~= value end

-- Hull of what `load` gives for a box of indices.
local function hull_of_loads(load, node, box)
    local any = {interval.stored(node.param)}
    local lo, hi, num, indices = I32_MAX, I32_MIN, 1, {}
    for _, index in ipairs(box) do
        num = num * (index[2] - index[1] + 1)
        if num > interval.MOST_LOADS then return any end
    end
    local function visit(axis)
        if axis > #box then
            local value = load(node.name, indices)
            if is_unknown(value) then return false end
            if type(value) == "boolean" then value = value and 1 or 0 end
            lo, hi = math.min(lo, value), math.max(hi, value)
            return true
        end
        for x = box[axis][1], box[axis][2] do
            indices[axis] = x
            if not visit(axis + 1) then return false end
        end
        return true
    end
    return load and visit(1) and {lo, hi} or any
end

local CLASS = {[0] = "empty", "partial", "full"}

-- -- blocks ----------------------------------------------------------------------------------------------------

interval.MOST_BLOCKS = 64 -- of a tile, one value of the mask each; where there are more, intervals must do

local SIDE = {q = "q", row = "q", k = "k", col = "k"}
local blocks_of = setmetatable({}, {__mode = "k"})

local function find_blocks(mask)
    local found = {}
    local function visit(node)
        local variable, size = node.args and node.args[1], node.args and node.args[2]
        if node.op == "/" and variable.op == "var" and SIDE[variable.name] and size.op == "const" and size.value > 1 then
            local side = SIDE[variable.name]
            if found[side] and (found[side].name ~= variable.name or found[side].size ~= size.value) then return false end
            found[side] = {name = variable.name, size = size.value}
            return true
        end
        if node.op == "var" and TILE_VARIABLES[node.name] then return false end
        for _, arg in ipairs(node.args or {}) do
            if not visit(arg) then return false end
        end
        return true
    end
    return mask and visit(mask) and (found.q or found.k) and found or false
end

-- {q = {name =, size =}, k =}: the mask is the same in blocks of so many positions, `name` being q or row, k or col; a side on which
-- it does not depend is nil. nil where it is not made of blocks.
function interval.blocks(mask)
    if not mask then return nil end
    if blocks_of[mask] == nil then blocks_of[mask] = find_blocks(mask) end
    return blocks_of[mask] or nil
end

local block_parts = setmetatable({}, {__mode = "k"})

-- The part of a mask that is made of blocks, of its conjuncts those that agree in the blocks, and the rest; either may be nil.
function interval.block_part(mask)
    if not mask then return nil end
    if not block_parts[mask] then
        local part, rest
        for _, arg in ipairs(mask.op == "&" and mask.args or {mask}) do
            local with = interval.blocks(arg) and (part and expression.make("&", {part, arg}) or arg)
            if with and interval.blocks(with) then part = with else rest = rest and expression.make("&", {rest, arg}) or arg end
        end
        block_parts[mask] = {part, rest}
    end
    return block_parts[mask][1], block_parts[mask][2]
end

-- The class of a box by one element of each block that it meets; nil where there are too many.
local function class_of_blocks(mask, blocks, boxes, values)
    local sides, num = {}, 1
    for i, side in ipairs {"q", "k"} do
        local of = blocks[side]
        local lo, hi = table.unpack(of and boxes[of.name] or {0, 0})
        sides[i] = {name = of and of.name, lo = lo, size = of and of.size or 1, first = lo // (of and of.size or 1), last = hi // (of and of.size or 1)}
        num = num * (sides[i].last - sides[i].first + 1)
    end
    if num > interval.MOST_BLOCKS then return nil end
    local some, all, unknown = false, true, false
    local element = setmetatable({}, {__index = values})
    for i = sides[1].first, sides[1].last do
        for j = sides[2].first, sides[2].last do
            if sides[1].name then element[sides[1].name] = math.max(i * sides[1].size, sides[1].lo) end
            if sides[2].name then element[sides[2].name] = math.max(j * sides[2].size, sides[2].lo) end
            local seen = expression.evaluate(mask, element)
            if is_unknown(seen) then unknown = true else some, all = some or seen, all and seen end
        end
    end
    if unknown then return 1 end
    return all and 2 or some and 1 or 0
end

local function class_number(mask, box, env)
    local values = environment(box, env)
    local boxes = {q = {box.q_lo, box.q_hi}, k = {box.k_lo, box.k_hi},
                   row = {box.q_lo - box.q_start, box.q_hi - box.q_start},
                   col = {box.k_lo - box.k_start, box.k_hi - box.k_start}}
    local part, rest = interval.block_part(mask)
    local class = part and class_of_blocks(part, interval.blocks(part), boxes, values)
    if class then return math.min(class, rest and class_number(rest, box, env) or 2) end
    return interval.describe(mask, {
        op = apply,
        const = function(lo, hi) return {lo, hi} end,
        var = function(name) return boxes[name] or RANGE[name] end,
        point = function(node)
            local value = expression.evaluate(node, values)
            if is_unknown(value) then return nil end
            if node.type == "bool" then return value and 2 or 0 end
            return {value, value}
        end,
        load = function(node, indices) return hull_of_loads(values.load, node, indices) end,
    })
end

function interval.class(mask, box, env) return CLASS[class_number(mask, box, env)] end

-- -- disjunctive form ------------------------------------------------------------------------------------------

-- An atom is {text, node} with a uniform bool node, or {text, sum, checks}: sum <= 0, sure where the sums of checks
-- stay inside i32.

-- Equal keys mean equal atoms.
local key_of
function key_of(sum, checks)
    local parts = {}
    for _, term in ipairs(sum.terms) do
        parts[#parts + 1] = ("%d*%s"):format(term.coefficient, expression.print(term.node))
    end
    table.sort(parts)
    local key = sum.c .. " " .. table.concat(parts, " ")
    for _, check in ipairs(checks) do key = key .. " if " .. key_of(check, {}) end
    return key
end

local function contains(conjunction, text)
    for _, atom in ipairs(conjunction) do
        if atom.text == text then return true end
    end
    return false
end

-- Whether every atom of a is in b: then b is seen wherever a is.
local function implied_by(a, b)
    for _, atom in ipairs(a) do
        if not contains(b, atom.text) then return false end
    end
    return true
end

-- Drops conjunctions that others contain.
local function absorb(list)
    local kept = {}
    for i, conjunction in ipairs(list) do
        local needed = true
        for j, other in ipairs(list) do
            if i ~= j and implied_by(other, conjunction) and (j < i or not implied_by(conjunction, other)) then
                needed = false
            end
        end
        if needed then kept[#kept + 1] = conjunction end
    end
    return kept
end

local TOO_MANY = "it needs more than %d spans"

local function either(a, b)
    local list = {}
    for _, conjunction in ipairs(a) do list[#list + 1] = conjunction end
    for _, conjunction in ipairs(b) do list[#list + 1] = conjunction end
    list = absorb(list)
    if #list > MAX_CONJUNCTIONS then return nil, TOO_MANY:format(MAX_SPANS) end
    return list
end

local function both(a, b)
    local list = {}
    for _, left in ipairs(a) do
        for _, right in ipairs(b) do
            local joined = {table.unpack(left)}
            for _, atom in ipairs(right) do
                if not contains(joined, atom.text) then joined[#joined + 1] = atom end
            end
            list[#list + 1] = joined
        end
    end
    list = absorb(list)
    if #list > MAX_CONJUNCTIONS then return nil, TOO_MANY:format(MAX_SPANS) end
    return list
end

-- Joins two results of the functions below, any of which may have failed.
local function join(how, a, why_a, b, why_b)
    if not a then return nil, why_a end
    if not b then return nil, why_b end
    return how(a, b)
end

local at_most

-- Splits a <= b where a side is min, max or abs; nil if none is.
local function split_extreme(a, b, strict)
    local function pair(how, a1, b1, a2, b2)
        local x, why_x = at_most(a1, b1, strict)
        local y, why_y = at_most(a2, b2, strict)
        return true, join(how, x, why_x, y, why_y)
    end
    local function sides(node)
        if uniform(node) then return nil end
        if node.op == "min" or node.op == "max" then return node.op, node.args[1], node.args[2] end
        if node.op == "abs" then -- |x| is max(x, -x); the check of -x fails where it wraps
            return "max", node.args[1], expression.make("neg", {node.args[1]})
        end
    end
    local op, x, y = sides(a)
    if op then return pair(op == "max" and both or either, x, b, y, b) end
    op, x, y = sides(b)
    if op then return pair(op == "max" and either or both, a, x, a, y) end
    return false
end

-- a <= b, or a < b if strict is 1.
function at_most(a, b, strict)
    local done, list, why = split_extreme(a, b, strict)
    if done then return list, why end
    local sum = to_positions(combine(1, side_of(a), -1, side_of(b)))
    sum.c = sum.c + strict
    if not is_small(sum) then return nil, ("`%s` is too large a sum"):format(expression.print(a)) end
    local text = expression.print(expression.make(strict == 1 and "<" or "<=", {a, b}))
    for _, term in ipairs(sum.terms) do
        local position = term.node.op == "var" and (term.node.name == "q" or term.node.name == "k")
        if not position and not uniform(term.node) or position and math.abs(term.coefficient) > 1 then
            return nil, ("`%s` is not of the form q or k or q - k <= c"):format(text)
        end
    end
    local checks = {}
    for _, side in ipairs {a, b} do
        if not uniform(side) and not interval.exact(side) then checks[#checks + 1] = to_positions(sum_of(side)) end
    end
    if #sum.terms == 0 and #checks == 0 then return sum.c <= 0 and {{}} or {} end
    return {{{text = key_of(sum, checks), shown = text, sum = sum, checks = checks}}}
end

local disjunction

local function disjunction_of(args, how, negate)
    local list, why = disjunction(args[1], negate)
    for i = 2, #args do
        local more, why_more = disjunction(args[i], negate)
        list, why = join(how, list, why, more, why_more)
    end
    return list, why
end

function disjunction(node, negate)
    local op, args = node.op, node.args
    if op == "const" then return node.value ~= negate and {{}} or {} end
    if uniform(node) then
        if negate then node = expression.make("!", {node}) end
        local text = expression.print(node)
        return {{{text = text, shown = text, node = node}}}
    end
    if op == "!" then return disjunction(args[1], not negate) end
    if op == "&" or op == "|" then
        return disjunction_of(args, ((op == "&") ~= negate) and both or either, negate)
    end
    local a, b = args and args[1], args and args[2]
    local function branches(c, x, negate_x, y, negate_y)
        local c1, why1 = disjunction(c, false)
        local x1, why2 = disjunction(x, negate_x)
        local first, why3 = join(both, c1, why1, x1, why2)
        local c0, why4 = disjunction(c, true)
        local y1, why5 = disjunction(y, negate_y)
        local second, why6 = join(both, c0, why4, y1, why5)
        return join(either, first, why3, second, why6)
    end
    if op == "?:" then return branches(a, b, negate, args[3], negate) end
    if expression.comparison[op] and a.type == "bool" then
        local differ = (op == "!=") ~= negate
        return branches(a, b, differ, b, not differ)
    end
    if expression.comparison[op] and a.type == "i32" then
        if negate then op = expression.opposite[op] end
        if op == ">" or op == ">=" then op, a, b = expression.mirror[op], b, a end
        if op == "<" or op == "<=" then return at_most(a, b, op == "<" and 1 or 0) end
        local strict = op == "!=" and 1 or 0
        local x, why_x = at_most(a, b, strict)
        local y, why_y = at_most(b, a, strict)
        return join(op == "==" and both or either, x, why_x, y, why_y)
    end
    if expression.comparison[op] then return nil, ("`%s` compares f32"):format(expression.print(node)) end
    return nil, ("`%s` is read from memory"):format(expression.print(node))
end

local walks = setmetatable({}, {__mode = "k"}) -- of masks met: schedules ask for each of their candidates

local function find_walk(mask)
    local list, why = disjunction(mask, false)
    if list and #list > MAX_SPANS then list, why = nil, TOO_MANY:format(MAX_SPANS) end
    if not list then return {kind = "classify", reason = why} end
    if #list == 0 then list = {{{text = "false", shown = "false", node = expression.constant("bool", false)}}} end
    return {kind = "range", spans = list}
end

function interval.walk(mask)
    if not mask then return {kind = "range", spans = {{}}} end
    walks[mask] = walks[mask] or find_walk(mask)
    return walks[mask]
end

local bounds_of = setmetatable({}, {__mode = "k"})

local function find_bounds(mask)
    if mask.op ~= "&" or interval.walk(mask).kind == "range" then return {} end
    local bounds, rest
    local function both_of(a, b) return a and expression.make("&", {a, b}) or b end
    for _, arg in ipairs(mask.args) do
        if interval.walk(arg).kind == "range" and not uniform(arg) then bounds = both_of(bounds, arg) else rest = both_of(rest, arg) end
    end
    return bounds and rest and interval.walk(bounds).kind == "range" and {bounds, rest} or {}
end

-- A mask of walk classify that is a conjunction: the part of walk range and the rest, nil where it has not both.
function interval.bounds(mask)
    if not mask then return nil end
    bounds_of[mask] = bounds_of[mask] or find_bounds(mask)
    return table.unpack(bounds_of[mask])
end

-- -- spans -----------------------------------------------------------------------------------------------------

--[[ The atoms of a conjunction solved for the walked variable (k for "keys", q for "queries"), a list of
  {kind = "if", node}                     a uniform condition
  {kind = "upper" | "lower", ...}         walked <= bound, walked >= bound
  {kind = "when", ...}                    bound <= 0, without the walked variable
where bound is {other, c, terms}: other * (the other variable) + c + terms. Also checks, of the atom. ]]
function interval.rows(conjunction, direction)
    local walked, other = "k", "q"
    if direction == "queries" then walked, other = other, walked end
    local rows = {}
    for i, atom in ipairs(conjunction) do
        if atom.node then
            rows[i] = {kind = "if", node = atom.node}
        else
            local slope = coefficient(atom.sum, walked)
            local factor = slope == 1 and -1 or 1
            local terms = {}
            for _, term in ipairs(atom.sum.terms) do
                local name = term.node.op == "var" and term.node.name
                if name ~= walked and name ~= other then
                    terms[#terms + 1] = {coefficient = factor * term.coefficient, node = term.node}
                end
            end
            rows[i] = {kind = slope == 1 and "upper" or slope == -1 and "lower" or "when",
                       other = factor * coefficient(atom.sum, other), c = factor * atom.sum.c, terms = terms,
                       checks = atom.checks}
        end
    end
    return rows
end

function interval.spans(mask, box, direction, env)
    local values = environment(box, env)
    local first, last, other_lo, other_hi = box.k_start, box.k_start + box.seq_k - 1, box.q_lo, box.q_hi
    if direction == "queries" then
        first, last, other_lo, other_hi = box.q_start, box.q_start + box.seq_q - 1, box.k_lo, box.k_hi
    end
    local walked_name = direction == "queries" and "q" or "k"
    -- Exact value of a sum of uniform terms, nil where one is unknown.
    local function constant_part(c, terms)
        for _, term in ipairs(terms) do
            local value = expression.evaluate(term.node, values)
            if value == nil then return nil end
            c = c + term.coefficient * value
        end
        return c
    end
    local function fits(check)
        local rest, lo, hi = {}, 0, 0
        for _, term in ipairs(check.terms) do
            local name = term.node.op == "var" and term.node.name
            if name == "q" or name == "k" then
                local a, b = other_lo, other_hi
                if name == walked_name then a, b = first, last end
                if term.coefficient < 0 then a, b = b, a end
                lo, hi = lo + term.coefficient * a, hi + term.coefficient * b
            else
                rest[#rest + 1] = term
            end
        end
        local c = constant_part(check.c, rest)
        return c ~= nil and c + lo >= I32_MIN and c + hi <= I32_MAX
    end
    local spans = {}
    for i, conjunction in ipairs(interval.walk(mask).spans) do
        local outer, inner = {first, last}, {first, last}
        local some, all = true, true
        for _, row in ipairs(interval.rows(conjunction, direction)) do
            if row.kind == "if" then
                local value = expression.evaluate(row.node, values)
                some, all = some and value ~= false, all and value == true
            else
                local c = constant_part(row.c, row.terms)
                local sure = c ~= nil
                for _, check in ipairs(row.checks) do sure = sure and fits(check) end
                if not sure then
                    all = false
                else
                    local least = c + row.other * (row.other < 0 and other_hi or other_lo)
                    local most = c + row.other * (row.other < 0 and other_lo or other_hi)
                    if row.kind == "upper" then
                        outer[2], inner[2] = math.min(outer[2], most), math.min(inner[2], least)
                    elseif row.kind == "lower" then
                        outer[1], inner[1] = math.max(outer[1], least), math.max(inner[1], most)
                    else
                        some, all = some and least <= 0, all and most <= 0
                    end
                end
            end
        end
        spans[i] = {outer = some and outer or {1, 0}, inner = all and inner or {1, 0}}
    end
    return spans
end

return interval
