--[[ expression: the algebra of masks and scores.

  expression.parse(text, scope)  -> node | nil        errors are appended to scope.errors
  expression.make(op, args)      -> node | nil, message      typed, folded; the only way nodes are built
  expression.print(node)         -> canonical text; parse(print(node)) is node again
  expression.evaluate(node, env) -> value of one element, nil where env does not know enough
  expression.slope(node)         -> d(node)/ds as a node
  expression.walk(node, visit)   visit(node) on every node, operands first
  expression.any(node, test)     -> whether test holds for a node or a part of it

  parse("q - k <= 4095 & k <= q", {...}) -> {op = "&", type = "bool", args = {...}}

A node is {op, type, args, size} with type i32, f32 or bool; leaves have no args: {op = "const", value}, {op = "var", name},
{op = "param", name, param}; {op = "load", name, param, args} reads an array. `&` and `|` hold two or more operands.
Nodes are immutable and may be shared. Precedence, loosest first: ?:  |  &  comparisons (which do not chain)  + -  * / %
unary - and !. An i32 beside an f32 becomes f32; bool never converts unless written i32(x) or f32(x).

Called by problem (text), interval and functions. Wrong text is never a Lua error: every message says what is wrong where.

Canonical form. Only rewrites that keep every result bit are made: constants fold with the meaning of docs/design.md;
operands of & and | are sorted, simple ones first, and listed once; a constant stands left of * and right of + and of
comparisons; two non-constants compare by < and <=. ]]

local expression = {}

local I32_MIN, I32_MAX = -2147483648, 2147483647
local MAX_DEPTH, MAX_SIZE = 64, 1024

expression.I32_MIN, expression.I32_MAX = I32_MIN, I32_MAX

-- Names the language owns. The runtime keeps positions within -2^30 .. 2^30 - 1 and lengths within 2^30.
expression.variables = {q = "i32", k = "i32", row = "i32", col = "i32", b = "i32", h = "i32", hkv = "i32",
                        seq_q = "i32", seq_k = "i32", s = "f32"}

-- What each function takes: "number" is i32 or f32 alike, "any" is a cast.
expression.functions = {
    min = {2, "number"}, max = {2, "number"}, abs = {1, "number"},
    i32 = {1, "any", "i32"}, f32 = {1, "any", "f32"},
    exp = {1, "f32"}, log = {1, "f32"}, tanh = {1, "f32"}, sqrt = {1, "f32"}, sin = {1, "f32"}, cos = {1, "f32"},
    floor = {1, "f32"},
    xor = {2, "i32"}, popcount = {1, "i32"}, hash = {3, "i32"},
}

local OPERATORS = {
    ["+"] = "number", ["-"] = "number", ["*"] = "number", ["/"] = "number", ["%"] = "i32", neg = "number",
    ["<"] = "number", ["<="] = "number", [">"] = "number", [">="] = "number",
    ["=="] = "alike", ["!="] = "alike", ["&"] = "bits", ["|"] = "bits", ["!"] = "bool", ["?:"] = "choice",
}
local COMPARISON = {["<"] = true, ["<="] = true, [">"] = true, [">="] = true, ["=="] = true, ["!="] = true}
local MIRROR = {["<"] = ">", ["<="] = ">=", [">"] = "<", [">="] = "<=", ["=="] = "==", ["!="] = "!="}
local OPPOSITE = {["<"] = ">=", ["<="] = ">", [">"] = "<=", [">="] = "<", ["=="] = "!=", ["!="] = "=="}
expression.comparison, expression.mirror, expression.opposite = COMPARISON, MIRROR, OPPOSITE

local PRECEDENCE = {["?:"] = 1, ["|"] = 2, ["&"] = 3,
                    ["<"] = 4, ["<="] = 4, [">"] = 4, [">="] = 4, ["=="] = 4, ["!="] = 4,
                    ["+"] = 5, ["-"] = 5, ["*"] = 6, ["/"] = 6, ["%"] = 6, neg = 7, ["!"] = 7}

-- -- meaning of one operation ---------------------------------------------------------------------------------

local function round_f32(x)
    return (string.unpack("<f", string.pack("<f", x)))
end

local function wrap_i32(x)
    return ((x + 0x80000000) & 0xFFFFFFFF) - 0x80000000
end

local function is_nan(x)
    return x ~= x
end

local function truncate(x)
    if is_nan(x) then return 0 end
    if x >= 2147483648.0 then return I32_MAX end
    if x <= -2147483649.0 then return I32_MIN end
    return math.tointeger(x < 0 and math.ceil(x) or math.floor(x))
end

local function tanh(x)
    if math.abs(x) < 1e-3 then return x - x * x * x / 3 + 2 * x * x * x * x * x / 15 end
    return 1 - 2 / (1 + math.exp(2 * x))
end

local function floor(x)
    if x == 0 or is_nan(x) or math.abs(x) == math.huge then return x end
    return math.floor(x) + 0.0
end

-- Finaliser of MurmurHash3 on 32 bits.
local function mix(x)
    x = x & 0xFFFFFFFF
    x = ((x ~ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ~ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ~ x >> 16
end

local function popcount(x)
    local n = 0
    x = x & 0xFFFFFFFF
    while x ~= 0 do
        n, x = n + 1, x & x - 1
    end
    return n
end

local I32 = {
    ["+"] = function(a, b) return wrap_i32(a + b) end,
    ["-"] = function(a, b) return wrap_i32(a - b) end,
    ["*"] = function(a, b) return wrap_i32(a * b) end,
    ["/"] = function(a, b) return b == 0 and 0 or wrap_i32(a // b) end,
    ["%"] = function(a, b) return b == 0 and 0 or a % b end,
    ["&"] = function(a, b) return wrap_i32(a & b) end,
    ["|"] = function(a, b) return wrap_i32(a | b) end,
    neg = function(a) return wrap_i32(-a) end,
    min = function(a, b) return math.min(a, b) end,
    max = function(a, b) return math.max(a, b) end,
    abs = function(a) return wrap_i32(math.abs(a)) end,
    xor = function(a, b) return wrap_i32(a ~ b) end,
    popcount = popcount,
    hash = function(a, b, seed) return wrap_i32(mix(mix(mix(seed + 0x9E3779B9) + a) + b)) end,
    i32 = function(a) return a end,
    f32 = function(a) return round_f32(a + 0.0) end,
}
local F32 = {
    ["+"] = function(a, b) return round_f32(a + b) end,
    ["-"] = function(a, b) return round_f32(a - b) end,
    ["*"] = function(a, b) return round_f32(a * b) end,
    ["/"] = function(a, b) return round_f32(a / b) end,
    neg = function(a) return -a end,
    min = function(a, b) return (is_nan(b) or a < b) and a or b end,
    max = function(a, b) return (is_nan(b) or a > b) and a or b end,
    abs = math.abs,
    exp = function(a) return round_f32(math.exp(a)) end,
    log = function(a) return round_f32(math.log(a)) end,
    tanh = function(a) return round_f32(tanh(a)) end,
    sqrt = function(a) return round_f32(math.sqrt(a)) end,
    sin = function(a) return round_f32(math.sin(a)) end,
    cos = function(a) return round_f32(math.cos(a)) end,
    floor = floor,
    i32 = truncate,
    f32 = function(a) return a end,
}
local BOOL = {
    ["&"] = function(a, b) return a and b end,
    ["|"] = function(a, b) return a or b end,
    ["!"] = function(a) return not a end,
    ["=="] = function(a, b) return a == b end,
    ["!="] = function(a, b) return a ~= b end,
    i32 = function(a) return a and 1 or 0 end,
    f32 = function(a) return a and 1.0 or 0.0 end,
}
local COMPARE = {
    ["<"] = function(a, b) return a < b end, ["<="] = function(a, b) return a <= b end,
    [">"] = function(a, b) return a > b end, [">="] = function(a, b) return a >= b end,
    ["=="] = function(a, b) return a == b end,
    ["!="] = function(a, b) return a < b or a > b end, -- false with NaN, like every comparison
}
for op, meaning in pairs(COMPARE) do
    I32[op], F32[op] = meaning, meaning
end
local MEANING = {i32 = I32, f32 = F32, bool = BOOL}

-- -- building nodes --------------------------------------------------------------------------------------------

local function leaf(op, type, fields)
    fields.op, fields.type, fields.size = op, type, 1
    return fields
end

local function constant(type, value)
    return leaf("const", type, {value = value})
end

local function raw(op, type, args)
    local size = 1
    for _, arg in ipairs(args) do size = size + arg.size end
    return {op = op, type = type, args = args, size = size}
end

local function is_const(node, value)
    return node.op == "const" and (value == nil or node.value == value)
end

-- A variable other than a length: the difference of two of them never leaves i32.
local function is_place(node)
    return node.op == "var" and node.name ~= "seq_q" and node.name ~= "seq_k"
end

expression.constant = constant

function expression.variable(name)
    return leaf("var", expression.variables[name], {name = name})
end

-- Element type of a parameter's storage.
local ELEMENT = {i32 = "i32", i64 = "i32", u8 = "i32", bool = "bool", f32 = "f32", f16 = "f32", bf16 = "f32"}

function expression.param(param)
    return leaf("param", ELEMENT[param.dtype], {name = param.name, param = param})
end

function expression.load(param, indices)
    local node = raw("load", ELEMENT[param.dtype], indices)
    node.name, node.param = param.name, param
    return node
end

local texts = setmetatable({}, {__mode = "k"})

local function same(a, b)
    return a == b or a.size == b.size and a.type == b.type and expression.print(a) == expression.print(b)
end

local make

-- Operands of & or |, flattened, each once, simple ones first. unit is the constant that changes nothing, zero the one
-- that decides.
local function fold_bits(op, type, args)
    local unit, zero
    if type == "bool" then unit = op == "&" else unit = op == "&" and -1 or 0 end
    if type == "bool" then zero = not unit else zero = op == "&" and 0 or -1 end
    local flat, seen, value = {}, {}, unit
    local function add(node)
        if node.op == op then
            for _, arg in ipairs(node.args) do add(arg) end
        elseif node.op == "const" then
            value = MEANING[type][op](value, node.value)
        else
            local text = expression.print(node)
            if not seen[text] then
                seen[text] = true
                flat[#flat + 1] = node
            end
        end
    end
    for _, arg in ipairs(args) do add(arg) end
    if value == zero then return constant(type, zero) end
    if value ~= unit then flat[#flat + 1] = constant(type, value) end
    if #flat == 0 then return constant(type, unit) end
    if #flat == 1 then return flat[1] end
    table.sort(flat, function(a, b)
        if a.size ~= b.size then return a.size < b.size end
        return expression.print(a) < expression.print(b)
    end)
    return raw(op, type, flat)
end

-- Sum or difference; c is added to x, exact on i32 because wrapping sums associate.
local function fold_sum(op, type, a, b)
    if op == "+" and is_const(a) then a, b = b, a end
    if b.op == "neg" then return fold_sum(op == "+" and "-" or "+", type, a, b.args[1]) end
    if type == "i32" and op == "-" and same(a, b) then return constant("i32", 0) end
    if type == "i32" and op == "-" and is_const(a, 0) then return make("neg", {b}) end
    if not is_const(b) then return raw(op, type, {a, b}) end
    local c = b.value
    if type == "f32" then
        -- x + 0 turns -0 into 0, so only x + -0 and x - 0 are x
        if c == 0 and (1 / c > 0) == (op == "-") then return a end
        if c < 0 then op, b = op == "+" and "-" or "+", constant("f32", -c) end
        return raw(op, type, {a, b})
    end
    local sum = op == "+" and c or -c
    if (a.op == "+" or a.op == "-") and is_const(a.args[2]) then
        sum = sum + (a.op == "+" and a.args[2].value or -a.args[2].value)
        a = a.args[1]
    end
    sum = wrap_i32(sum)
    if sum == 0 then return a end
    if sum > 0 or sum == I32_MIN then return raw("+", type, {a, constant("i32", sum)}) end
    return raw("-", type, {a, constant("i32", -sum)})
end

local function fold_product(op, type, a, b)
    if op == "*" and is_const(b) then a, b = b, a end
    local one = type == "i32" and 1 or 1.0
    if op == "*" then
        if is_const(a, one) then return b end
        if is_const(a, -one) then return make("neg", {b}) end
        if type == "i32" and is_const(a, 0) then return a end
    elseif op == "/" and is_const(b, one) then
        return a
    end
    if type == "i32" and op ~= "*" then
        if is_const(a, 0) or is_const(b, 0) then return constant("i32", 0) end
        if op == "%" and (is_const(b, 1) or is_const(b, -1)) then return constant("i32", 0) end
    end
    return raw(op, type, {a, b})
end

local function fold_comparison(op, a, b)
    if is_const(a) then op, a, b = MIRROR[op], b, a end
    local type = a.type
    if type == "bool" then
        if is_const(b) then return b.value == (op == "==") and a or make("!", {a}) end
        if same(a, b) then return constant("bool", op == "==") end
        return raw(op, "bool", {a, b})
    end
    if type == "i32" then
        if same(a, b) then return constant("bool", COMPARE[op](0, 0)) end
        if is_const(b, I32_MAX) and (op == "<=" or op == ">") then return constant("bool", op == "<=") end
        if is_const(b, I32_MIN) and (op == "<" or op == ">=") then return constant("bool", op == ">=") end
        if is_const(b, 0) and a.op == "-" and is_place(a.args[1]) and is_place(a.args[2]) then
            return fold_comparison(op, a.args[1], a.args[2])
        end
    end
    if not is_const(b) and (op == ">" or op == ">=") then op, a, b = MIRROR[op], b, a end
    return raw(op, "bool", {a, b})
end

local function fold_choice(type, c, a, b)
    if is_const(c) then return c.value and a or b end
    if same(a, b) then return a end
    if c.op == "!" then return fold_choice(type, c.args[1], b, a) end
    if type == "bool" and is_const(a) and is_const(b) then return a.value and c or make("!", {c}) end
    return raw("?:", type, {c, a, b})
end

local function fold_not(a)
    if a.op == "!" then return a.args[1] end
    if COMPARISON[a.op] and a.args[1].type ~= "f32" then return make(OPPOSITE[a.op], a.args) end
    return raw("!", "bool", {a})
end

local function fold(op, type, args)
    local all = true
    for _, arg in ipairs(args) do all = all and arg.op == "const" end
    local operand = args[1].type
    if all and op ~= "?:" then
        local value = args[1].value
        if op == "&" or op == "|" then
            for i = 2, #args do value = MEANING[operand][op](value, args[i].value) end
        else
            value = MEANING[operand][op](value, args[2] and args[2].value, args[3] and args[3].value)
        end
        if value == value then return constant(type, value) end -- NaN has no literal and stays an operation
    end
    local a, b, c = args[1], args[2], args[3]
    if op == "+" or op == "-" then return fold_sum(op, type, a, b) end
    if op == "*" or op == "/" or op == "%" then return fold_product(op, type, a, b) end
    if COMPARISON[op] then return fold_comparison(op, a, b) end
    if op == "&" or op == "|" then return fold_bits(op, type, args) end
    if op == "!" then return fold_not(a) end
    if op == "?:" then return fold_choice(type, a, b, c) end
    if op == "neg" and a.op == "neg" then return a.args[1] end
    if (op == "i32" or op == "f32") and operand == op then return a end
    if (op == "min" or op == "max") and same(a, b) then return a end
    return raw(op, type, args)
end

local WANTED = {number = "i32 or f32", f32 = "f32 or i32", i32 = "i32", bool = "bool",
                alike = "two numbers or two bools", bits = "two bools or two i32"}

local function refuse(op, wanted, args)
    local types = {}
    for i, arg in ipairs(args) do types[i] = arg.type end
    return nil, ("%s takes %s, not %s"):format(op == "neg" and "-" or op, WANTED[wanted], table.concat(types, " and "))
end

-- Makes all of args f32 if one of them is.
local function promote(args)
    local type = "i32"
    for _, arg in ipairs(args) do
        if arg.type == "f32" then type = "f32" end
    end
    local out = {}
    for i, arg in ipairs(args) do out[i] = type == "f32" and fold("f32", "f32", {arg}) or arg end
    return out, type
end

function make(op, args)
    local rule = expression.functions[op]
    local wanted = rule and rule[2] or OPERATORS[op]
    local num_bool = 0
    for _, arg in ipairs(args) do
        if arg.type == "bool" then num_bool = num_bool + 1 end
    end
    if wanted == "choice" then
        local c, a, b = args[1], args[2], args[3]
        if c.type ~= "bool" then return nil, ("the condition of ?: must be bool, not %s"):format(c.type) end
        if (a.type == "bool") ~= (b.type == "bool") then
            return nil, ("both results of ?: must be numbers or both bool, not %s and %s"):format(a.type, b.type)
        end
        if a.type == "bool" then return fold("?:", "bool", args) end
        local sides, type = promote {a, b}
        return fold("?:", type, {c, sides[1], sides[2]})
    elseif wanted == "any" then
        return fold(op, rule[3], args)
    elseif wanted == "bool" then
        if num_bool < #args then return refuse(op, wanted, args) end
        return fold(op, "bool", args)
    elseif wanted == "i32" then
        for _, arg in ipairs(args) do
            if arg.type ~= "i32" then return refuse(op, wanted, args) end
        end
        return fold(op, "i32", args)
    elseif wanted == "bits" then
        for _, arg in ipairs(args) do
            if arg.type ~= args[1].type or arg.type == "f32" then return refuse(op, wanted, args) end
        end
        return fold(op, args[1].type, args)
    elseif wanted == "alike" and num_bool == #args then
        return fold(op, "bool", args)
    end
    if num_bool > 0 then return refuse(op, wanted, args) end
    if wanted == "f32" then
        return fold(op, "f32", {fold("f32", "f32", args)})
    end
    local sides, type = promote(args)
    return fold(op, COMPARISON[op] and "bool" or type, sides)
end

expression.make = make

-- -- printing --------------------------------------------------------------------------------------------------

-- Shortest decimal text that reads back as the same f32, always with a mark that it is no i32.
function expression.number(value)
    if value == math.huge then return "inf" end
    if value == -math.huge then return "-inf" end
    local text, digits = nil, 0
    repeat
        digits = digits + 1
        text = ("%%.%de"):format(digits - 1):format(value)
    until round_f32(tonumber(text)) == value
    local exponent = tonumber(text:match("e(.*)$"))
    if exponent < -5 or exponent > 9 then return text end
    return ("%%.%df"):format(math.max(1, digits - 1 - exponent)):format(value)
end

local function print_const(node)
    if node.type == "f32" then return expression.number(node.value) end
    return tostring(node.value)
end

local function precedence(node)
    if node.op == "const" then
        return print_const(node):sub(1, 1) == "-" and 7 or 8
    end
    return PRECEDENCE[node.op] or 8
end

local function print_node(node)
    local op, args = node.op, node.args
    if op == "const" then return print_const(node) end
    if op == "var" or op == "param" then return node.name end
    local own = PRECEDENCE[op]
    local function operand(arg, least)
        local text = expression.print(arg)
        return precedence(arg) < least and "(" .. text .. ")" or text
    end
    if not own then
        local list = {}
        for i, arg in ipairs(args) do list[i] = expression.print(arg) end
        local inside = table.concat(list, ", ")
        return op == "load" and ("%s[%s]"):format(node.name, inside) or ("%s(%s)"):format(op, inside)
    elseif op == "neg" then
        return "-" .. operand(args[1], args[1].op == "const" and 9 or 7)
    elseif op == "!" then
        return "!" .. operand(args[1], 7)
    elseif op == "?:" then
        return ("%s ? %s : %s"):format(operand(args[1], 2), operand(args[2], 1), operand(args[3], 1))
    elseif op == "&" or op == "|" then
        local list = {}
        for i, arg in ipairs(args) do list[i] = operand(arg, own + 1) end
        return table.concat(list, " " .. op .. " ")
    end
    return ("%s %s %s"):format(operand(args[1], COMPARISON[op] and own + 1 or own), op, operand(args[2], own + 1))
end

function expression.print(node)
    local text = texts[node]
    if not text then
        text = print_node(node)
        texts[node] = text
    end
    return text
end

-- -- reading ---------------------------------------------------------------------------------------------------

-- Least number of single-character edits between two short words.
local function distance(a, b)
    local row = {}
    for j = 0, #b do row[j] = j end
    for i = 1, #a do
        local diagonal = row[0]
        row[0] = i
        for j = 1, #b do
            local cost = a:byte(i) == b:byte(j) and 0 or 1
            diagonal, row[j] = row[j], math.min(row[j] + 1, row[j - 1] + 1, diagonal + cost)
        end
    end
    return row[#b]
end

-- `; did you mean "x"?` for the closest of the candidate names, or "".
function expression.suggest(name, candidates)
    if #name > 32 then return "" end
    table.sort(candidates)
    local best, least = nil, #name <= 2 and 1 or 2
    for _, candidate in ipairs(candidates) do
        local d = distance(name, candidate)
        if d < least or d == least and not best then best, least = candidate, d end
    end
    return best and ('; did you mean "%s"?'):format(best) or ""
end

-- A word or byte of hostile text, fit for a message.
function expression.quote(text)
    if #text > 40 then text = text:sub(1, 37) .. "..." end
    return '"' .. text:gsub("[^\32-\126]", function(c) return ("\\x%02x"):format(c:byte()) end) .. '"'
end

local quote = expression.quote
local TWO = {["<="] = true, [">="] = true, ["=="] = true, ["!="] = true, ["&&"] = true, ["||"] = true}
local HINT = {["&&"] = "; write & for and", ["||"] = "; write | for or", ["="] = "; write == to compare",
              ["^"] = "; write xor(a, b)", ["~"] = "; write xor(a, -1)"}

local Parser = {}
Parser.__index = Parser

-- Raises the parser's only exception; caught in parse.
local STOP = {}

function Parser:report(offset, message)
    local errors = self.scope.errors
    errors[#errors + 1] = {field = self.scope.field, offset = self.fixed or offset, message = self.prefix .. message}
end

function Parser:stop(offset, message)
    self:report(offset, message)
    error(STOP, 0)
end

function Parser:advance()
    local text, last = self.text, self.last
    local at = text:find("[^ \t\r\n]", self.pos) or #text + 1
    self.at = math.min(at, last + 1) - 1 -- offset of the token, counted from 0
    if at > last then
        self.kind, self.token, self.pos = "end", "the end", last + 1
        return
    end
    local name = text:match("^[%a_][%w_]*", at)
    local number = text:match("^%d+%.?%d*[eE][+-]?%d+", at) or text:match("^%.%d+[eE][+-]?%d+", at)
        or text:match("^%d+%.?%d*", at) or text:match("^%.%d+", at)
    local token = name or number or text:sub(at, at)
    self.kind = name and "name" or number and "number" or "symbol"
    if self.kind == "symbol" and TWO[text:sub(at, at + 1)] then token = text:sub(at, at + 1) end
    self.token, self.pos = token, at + #token
    if self.pos > last + 1 then self.pos = last + 1 end
    if number and text:find("^[%w_.]", self.pos) and self.pos <= last then
        self:stop(self.at, ("%s is not a number"):format(quote(text:match("^[%w_.]+", at))))
    end
end

function Parser:accept(token)
    if self.kind == "symbol" and self.token == token then
        self:advance()
        return true
    end
    return false
end

-- The token at hand, for a message.
function Parser:found()
    return self.kind == "end" and self.token or quote(self.token)
end

function Parser:expect(token, where)
    if not self:accept(token) then
        self:stop(self.at, ("expected %s %s, found %s"):format(token, where, self:found()))
    end
end

-- Builds a node; a type error is reported and absorbed, so that the rest is still checked.
function Parser:build(op, args, offset)
    local broken = false
    for _, arg in ipairs(args) do broken = broken or arg.broken end
    if broken then return self:broken() end
    local node, message = make(op, args)
    if not node then
        self:report(offset, message)
        return self:broken()
    end
    if node.size > MAX_SIZE then
        self:stop(offset, ("the expression has more than %d operations and operands"):format(MAX_SIZE))
    end
    return node
end

function Parser:broken()
    return {op = "const", type = "bool", value = false, size = 1, broken = true}
end

function Parser:number(sign)
    local token, offset = self.token, self.at
    self:advance()
    if token:find("^%d+$") then
        local value = #token <= 12 and math.tointeger(tonumber(token)) or I32_MAX + 2
        value = sign * value
        if value < I32_MIN or value > I32_MAX then
            self:report(offset, ("%s does not fit i32 (%d .. %d)"):format(quote(token), I32_MIN, I32_MAX))
            return self:broken()
        end
        return constant("i32", value)
    end
    local exact = tonumber(token)
    local value = round_f32(exact)
    if value == math.huge or value == 0 and token:match("^[^eE]*"):find("[1-9]") then
        self:report(offset, ("%s does not fit f32 (about 1e-45 .. 3.4e38)"):format(quote(token)))
        return self:broken()
    end
    return constant("f32", sign * value)
end

function Parser:arguments(close)
    local args, offsets = {}, {}
    if self:accept(close) then return args, offsets end
    repeat
        offsets[#offsets + 1] = self.at
        args[#args + 1] = self:expression(true)
    until not self:accept(",")
    self:expect(close, "after the last argument")
    return args, offsets
end

-- Parses the body of a named form with its parameters bound to args; an error points at the use of the form.
function Parser:form(name, args, offset)
    local list = self.scope.forms[name]
    local chosen
    for _, form in ipairs(list) do
        local fits = #form.names == #args
        for i = 1, fits and #args or 0 do fits = fits and form.arrays[i] == (args[i].array ~= nil) end
        if fits then chosen = form end
    end
    if not chosen then
        local signatures = {}
        for i, form in ipairs(list) do signatures[i] = form.signature end
        self:report(offset, ("%s is used as %s"):format(name, table.concat(signatures, " or ")))
        return self:broken()
    end
    local bindings = {}
    for i, arg in ipairs(args) do
        if arg.broken then return self:broken() end
        bindings[chosen.names[i]] = arg
    end
    local inner = setmetatable({
        text = chosen.body, last = #chosen.body, pos = 1, scope = self.scope, bindings = bindings, depth = self.depth,
        fixed = self.fixed or offset, prefix = self.prefix .. "in " .. chosen.signature .. ": ",
    }, Parser)
    return inner:whole()
end

function Parser:unknown(name, offset)
    local scope, known = self.scope, {}
    for _, names in ipairs {expression.variables, expression.functions, scope.params, scope.forms} do
        for key in pairs(names) do
            if key ~= "s" or scope.score then known[#known + 1] = key end
        end
    end
    self:report(offset, ("%s is neither declared in params nor known%s"):format(quote(name),
        expression.suggest(name, known)))
end

function Parser:call(name, offset)
    local rule = expression.functions[name]
    self:advance()
    local args, offsets = self:arguments(")")
    if not rule then
        if self.scope.forms[name] then return self:form(name, args, offset) end
        self:unknown(name, offset)
        return self:broken()
    end
    for i, arg in ipairs(args) do args[i] = self:value(arg, offsets[i]) end
    if #args ~= rule[1] then
        self:report(offset, ("%s takes %d argument%s, not %d"):format(name, rule[1], rule[1] == 1 and "" or "s", #args))
        return self:broken()
    end
    return self:build(name, args, offset)
end

function Parser:load(param, offset)
    self:advance()
    local indices, offsets = self:arguments("]")
    self.scope.used[param.name] = true
    if #indices ~= #param.dims then
        self:report(offset, ("%s has %d dimension%s, not %d"):format(param.name, #param.dims,
            #param.dims == 1 and "" or "s", #indices))
        return self:broken()
    end
    for i, index in ipairs(indices) do
        indices[i] = self:value(index, offsets[i])
        if index.broken then return self:broken() end
        if indices[i].type ~= "i32" then
            self:report(offsets[i], ("an index must be i32, not %s"):format(indices[i].type))
            return self:broken()
        end
    end
    return expression.load(param, indices)
end

function Parser:name()
    local name, offset, scope = self.token, self.at, self.scope
    self:advance()
    local opens = self.kind == "symbol" and self.token
    local bound = self.bindings and self.bindings[name]
    local param = not bound and scope.params[name]
    local array = bound and bound.array or param and param.dims and param
    if array then
        if opens == "[" then return self:load(array, offset) end
        return {array = array, name = name}
    end
    if opens == "[" then
        if not bound and not scope.params[name] and not expression.variables[name] then
            self:unknown(name, offset)
            self:advance()
            self:arguments("]")
            return self:broken()
        end
        self:stop(offset, ("%s is not an array"):format(quote(name)))
    end
    if bound then return bound end
    if opens == "(" then return self:call(name, offset) end
    if name == "true" or name == "false" then return constant("bool", name == "true") end
    if name == "inf" then return constant("f32", math.huge) end
    if expression.variables[name] then
        if name == "s" and not scope.score then
            self:report(offset, "a mask may not read s, the score")
            return self:broken()
        end
        return expression.variable(name)
    end
    if scope.params[name] then
        scope.used[name] = true
        return expression.param(scope.params[name])
    end
    if scope.forms[name] then return self:form(name, {}, offset) end
    if expression.functions[name] then
        self:report(offset, ("%s is a function: write %s(...)"):format(name, name))
        return self:broken()
    end
    self:unknown(name, offset)
    return self:broken()
end

-- An array may stand alone only as the argument of a form.
function Parser:value(node, offset)
    if not node.array then return node end
    self.scope.used[node.array.name] = true
    self:report(offset, ("%s is an array: write %s[...] with %d ind%s"):format(node.name, node.name, #node.array.dims,
        #node.array.dims == 1 and "ex" or "ices"))
    return self:broken()
end

function Parser:primary()
    if self.kind == "number" then return self:number(1) end
    if self.kind == "name" then return self:name() end
    if self:accept("(") then
        local node = self:expression()
        self:expect(")", "to close the parenthesis")
        return node
    end
    self:stop(self.at, ("expected a value, found %s%s"):format(self:found(), HINT[self.token] or ""))
end

function Parser:unary()
    local offset = self.at
    if self:accept("-") then
        if self.kind == "number" then return self:number(-1) end
        return self:deeper(function() return self:build("neg", {self:value(self:unary(), offset)}, offset) end)
    elseif self:accept("!") then
        return self:deeper(function() return self:build("!", {self:value(self:unary(), offset)}, offset) end)
    end
    return self:primary()
end

function Parser:deeper(read)
    self.depth = self.depth + 1
    if self.depth > MAX_DEPTH then self:stop(self.at, ("nesting is deeper than %d"):format(MAX_DEPTH)) end
    local node = read()
    self.depth = self.depth - 1
    return node
end

local LEVELS = {{["|"] = true}, {["&"] = true}, COMPARISON, {["+"] = true, ["-"] = true},
                {["*"] = true, ["/"] = true, ["%"] = true}}

function Parser:binary(level)
    local operators = LEVELS[level]
    if not operators then return self:unary() end
    local first = self.at
    local left = self:binary(level + 1)
    local chained = false
    while self.kind == "symbol" and operators[self.token] do
        local op, offset = self.token, self.at
        if chained then
            self:stop(offset, "comparisons do not chain: write a < b & b < c")
        end
        chained = operators == COMPARISON
        left = self:value(left, first)
        self:advance()
        local start = self.at
        local right = self:value(self:binary(level + 1), start)
        left = self:build(op, {left, right}, offset)
    end
    return left
end

function Parser:expression(array_allowed)
    return self:deeper(function()
        local first = self.at
        local node = self:binary(1)
        local offset = self.at
        if self:accept("?") then
            local start_a = self.at
            local a = self:value(self:expression(), start_a)
            self:expect(":", "between the results of ?:")
            local start_b = self.at
            local b = self:value(self:expression(), start_b)
            node = self:build("?:", {self:value(node, first), a, b}, offset)
        end
        return array_allowed and node or self:value(node, first)
    end)
end

function Parser:whole()
    self:advance()
    local node = self:expression()
    if self.kind ~= "end" then
        self:stop(self.at, ("expected an operator, found %s%s"):format(self:found(), HINT[self.token] or ""))
    end
    return node
end

--[[ scope: first, last   bytes of text to read, counted from 1 (default: all)
            params        name -> {name, dtype, dims}
            forms         name -> list of forms (gen/forms.lua)
            score         whether s may be read
            field         name used in errors
            errors, used  filled: list of {field, offset, message}; set of names of params that were mentioned ]]
function expression.parse(text, scope)
    local parser = setmetatable({text = text, pos = scope.first or 1, last = scope.last or #text, scope = scope,
                                 depth = 0, prefix = ""}, Parser)
    local before = #scope.errors
    local ok, node = pcall(parser.whole, parser)
    if not ok and node ~= STOP then error(node, 0) end
    if #scope.errors > before then return nil end
    return node
end

-- -- looking at nodes ------------------------------------------------------------------------------------------

function expression.walk(node, visit)
    for _, arg in ipairs(node.args or {}) do expression.walk(arg, visit) end
    visit(node)
end

-- Whether test holds for the node or a part of it; false for nil.
function expression.any(node, test)
    if not node then return false end
    if test(node) then return true end
    for _, arg in ipairs(node.args or {}) do
        if expression.any(arg, test) then return true end
    end
    return false
end

--[[ env: {name = value} of variables, env.params {name = value} of scalars, env.load(name, indices) -> value or nil.
  nil stands for a value that env does not know. ]]
function expression.evaluate(node, env)
    local op = node.op
    if op == "const" then return node.value end
    if op == "var" then return env[node.name] end
    if op == "param" then return env.params and env.params[node.name] end
    local values = {}
    for i, arg in ipairs(node.args) do
        local value = expression.evaluate(arg, env)
        if value == nil then return nil end
        values[i] = value
    end
    if op == "load" then return env.load and env.load(node.name, values) end
    if op == "?:" then
        if values[1] then return values[2] end
        return values[3]
    end
    local meaning = MEANING[node.args[1].type][op]
    local value = meaning(values[1], values[2], values[3])
    for i = 3, (op == "&" or op == "|") and #values or 0 do value = meaning(value, values[i]) end
    return value
end

-- -- derivative ------------------------------------------------------------------------------------------------

local ZERO, ONE = constant("f32", 0.0), constant("f32", 1.0)

local function is_zero(node)
    return is_const(node, 0.0)
end

-- Product of a derivative and a factor; constants are multiplied together where that is exact enough to be safe.
local function times(a, b)
    if is_zero(a) or is_zero(b) then return ZERO end
    if is_const(b) then a, b = b, a end
    if is_const(a) and b.op == "*" and is_const(b.args[1]) then
        local product = round_f32(a.value * b.args[1].value)
        if math.abs(product) > 1e-30 and math.abs(product) < 1e30 then
            return make("*", {constant("f32", product), b.args[2]})
        end
    end
    return make("*", {a, b})
end

local function plus(a, b)
    if is_zero(a) then return b end
    if is_zero(b) then return a end
    return make("+", {a, b})
end

local function minus(a, b)
    if is_zero(b) then return a end
    if is_zero(a) then return make("neg", {b}) end
    return make("-", {a, b})
end

-- Each rule gets the node, its operands and a function d that differentiates an operand.
local SLOPE = {
    ["+"] = function(_, a, b, d) return plus(d(a), d(b)) end,
    ["-"] = function(_, a, b, d) return minus(d(a), d(b)) end,
    ["*"] = function(_, a, b, d) return plus(times(d(a), b), times(a, d(b))) end,
    ["/"] = function(node, a, b, d)
        local top = minus(d(a), times(node, d(b)))
        if is_zero(top) then return ZERO end
        return make("/", {top, b})
    end,
    neg = function(_, a, _, d) return minus(ZERO, d(a)) end,
    exp = function(node, a, _, d) return times(node, d(a)) end,
    log = function(_, a, _, d) return make("/", {d(a), a}) end,
    tanh = function(node, a, _, d) return times(make("-", {ONE, make("*", {node, node})}), d(a)) end,
    sqrt = function(node, a, _, d) return make("/", {times(constant("f32", 0.5), d(a)), node}) end,
    sin = function(_, a, _, d) return times(make("cos", {a}), d(a)) end,
    cos = function(_, a, _, d) return times(make("neg", {make("sin", {a})}), d(a)) end,
    abs = function(_, a, _, d) return make("?:", {make(">=", {a, ZERO}), d(a), minus(ZERO, d(a))}) end,
}

-- min and max: the side that gave the value; the left at ties, the number where the other side is NaN.
local function slope_of_extreme(comparison)
    return function(_, a, b, d)
        local left = make(comparison, {a, b})
        if not is_const(b) then left = make("|", {left, make("!", {make("==", {b, b})})}) end
        return make("?:", {left, d(a), d(b)})
    end
end
SLOPE.min, SLOPE.max = slope_of_extreme("<="), slope_of_extreme(">=")

function expression.slope(node)
    local known = {}
    local function d(of)
        if known[of] then return known[of] end
        local result = ZERO
        if of.op == "var" and of.name == "s" then
            result = ONE
        elseif of.type == "f32" and of.op == "?:" then
            result = make("?:", {of.args[1], d(of.args[2]), d(of.args[3])})
        elseif of.type == "f32" and SLOPE[of.op] then
            local depends = false
            for _, arg in ipairs(of.args) do depends = depends or not is_zero(d(arg)) end
            if depends then result = SLOPE[of.op](of, of.args[1], of.args[2], d) end
        end
        known[of] = result
        return result
    end
    return d(node)
end

return expression
