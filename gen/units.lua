--[[ units: a score as a function of S = Q K^T before the scale, with as little to do for each element as there can be.

  units.of(score) -> inner, unit     nodes with score = unit * inner; unit is the same for all elements and above 0, nil for 1.
                                     In inner the variable s is S as the products leave it; units.scale stands for the scale.
  units.cap(score) -> cap, factor    where the score is cap * tanh(factor * s) and no more: cap and factor, above 0 for every
                                     launch; else nil

A softmax needs inner alone: the unit goes into the factor that makes exponents of it, which is there in any case. What is
the same on a whole tile is gathered, so that it can be computed once:

  softcap    30 tanh(s / 30)        30 times tanh(s (scale / 30))
  ALiBi      s - slope |q - k|      scale times s - (slope / scale) |q - k|

Values differ from those of the text by roundings alone. The scale is from 2^-64 to 2^64 (include/attnloom.h); constants that could
leave f32 with it stay where they are, and what a launch brings, such as slopes, saturates when it is divided by the unit, so that
no 0 meets an infinity that the text has not.

Called by functions. ]]

local expression = require "expression"
local interval = require "interval"

local units = {}

local make, uniform = expression.make, interval.uniform

local S = expression.variable("s")
local SCALE = {op = "var", type = "f32", name = "args.scale", size = 1} -- a name that no text of a user has

units.scale = SCALE

local MOST_FACTOR, MOST_UNIT = 2.0 ^ 20, 2.0 ^ 12

-- Whether a uniform node is above 0 whatever the launch, and neither large nor small: made of the scale and of constants.
local function is_positive(node)
    if node.op == "const" then return node.value >= 1 / MOST_UNIT and node.value <= MOST_UNIT end
    if node.op == "*" or node.op == "/" then return is_positive(node.args[1]) and is_positive(node.args[2]) end
    return node == SCALE
end

local function join(inner, unit) return unit and make("*", {inner, unit}) or inner end

-- node / unit, where that costs an element nothing: each term has a uniform factor. nil where one has none.
local function divided(node, unit)
    if uniform(node) then
        if node.op == "const" and math.abs(node.value) > MOST_FACTOR then return nil end
        local quotient = make("/", {node, unit})
        quotient.saturates = true
        return quotient
    end
    local a, b = table.unpack(node.args or {})
    if node.op == "*" then
        local first = uniform(b) and divided(b, unit) or divided(a, unit)
        if not first then return nil end
        return make("*", {first, uniform(b) and a or b})
    elseif node.op == "/" or node.op == "neg" then
        local first = divided(a, unit)
        return first and make(node.op, {first, b})
    elseif node.type == "f32" and (node.op == "+" or node.op == "-") then
        local first, second = divided(a, unit), divided(b, unit)
        return first and second and make(node.op, {first, second})
    end
end

local ONE = expression.constant("f32", 1.0)

-- 1 / node, nil where that may leave f32.
local function inverse(node)
    if node.op == "const" and not (math.abs(node.value) > 1e-30 and math.abs(node.value) < 1e30) then return nil end
    return make("/", {ONE, node})
end

-- inner and unit of any node; unit may be any uniform f32 node.
local function split(node)
    if node.op == "var" and node.name == "s" then return S, SCALE end
    if not node.args or uniform(node) then return node end
    local a, b = node.args[1], node.args[2]
    if node.type == "f32" then
        if node.op == "*" and uniform(a) then a, b = b, a end
        local factor = (node.op == "*" or node.op == "/") and uniform(b) and (node.op == "*" and b or inverse(b))
        if factor then
            local inner, unit = split(a)
            return inner, unit and make("*", {unit, factor}) or factor
        elseif node.op == "+" or node.op == "-" then
            local inner_a, unit_a = split(a)
            local inner_b, unit_b = split(b)
            local all_a, all_b = join(inner_a, unit_a), join(inner_b, unit_b)
            if inner_a == S and is_positive(unit_a) then
                local other = divided(all_b, unit_a)
                if other then return make(node.op, {S, other}), unit_a end
            elseif inner_b == S and node.op == "+" and is_positive(unit_b) then
                local other = divided(all_a, unit_b)
                if other then return make("+", {other, S}), unit_b end
            end
            return make(node.op, {all_a, all_b})
        end
    end
    local args = {}
    for i, arg in ipairs(node.args) do args[i] = join(split(arg)) end
    if node.op == "load" then return expression.load(node.param, args) end
    return make(node.op, args)
end

function units.of(score)
    local inner, unit = split(score)
    if unit and is_positive(unit) then return inner, unit end
    return join(inner, unit)
end

function units.cap(score)
    local tanh, cap = units.of(score)
    if tanh.op ~= "tanh" then return nil end
    local a, b = table.unpack(tanh.args[1].op == "*" and tanh.args[1].args or {})
    if b == S then a, b = b, a end
    cap = cap or ONE
    if a == S and is_positive(b) and cap.op == "const" then return cap, b end
end

return units
