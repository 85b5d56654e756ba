--[[ functions: the text of a problem's mask and score, in C (for host) and CUDA (for mma).

  functions.text(problem, language, wanted) -> text; language is "c" or "cuda"; wanted {keys=, queries=, slope=, classes=} leaves out
                                       the walks, the slope and the class of a tile a kernel does not call, nil takes all; only = "classes" leaves
                                       out all that is of an element; without arrays = true a class does not look at what a tile reads of arrays; with reads = true
                                       it is told what its queries and its keys read, see functions.reads; with bounds = true
                                       a conjunction has the keys of its part of walk range, and the class is that
                                       of the rest, see interval.bounds; with units = true
                                       the score is one for the elements of a tile, see ELEMENT_OF_TILE; with sides = "rows" or "columns"
                                       there is the mask for these, as far as spans do not tell, see tile_mask_functions; with whole = true all of it, in place
                                       of that of an element, where it has terms
  functions.reads(problem, bounds)  -> {queries = list of loads, keys =}: loads of integers or bools by one position alone, as `ids[q]`,
                                       that the class of a tile asks for; with bounds that of the rest
  functions.uses(problem)           -> {mask =, score = bool, walk = "range" | "classify", num_spans =, bounds =, exact_rows =, even =, of_batch =, of_head =, of_head_kv =, listed =,
                                       of_tile =, row_terms =, column_terms =,
                                       one_tanh =, capped =, at_diagonal =}; num_spans: of a range, or of bounds;
                                       bounds: of walk classify, with spans of a part of it;
                                       exact_rows: the spans of a single row are what it sees, or what that part lets it, whatever its position;
                                       even: all queries of a head see the same keys; of_batch, of_head, of_head_kv: the mask differs between these, of_head_kv where it does between heads of k alone;
                                       listed: GPU kernels find its tiles in lists;
                                       of_tile: what of the mask is asked for each element of a partial tile, beside exact spans of its rows;
                                       row_terms, column_terms: with sides there are such, and terms_of_lane of one of them; whole = {rows =, columns =}: with whole;
                                       one_tanh: with units the score takes its tanh from the kernel; capped: it is all that
                                       units.cap knows, and a kernel gets score_cap and score_factor; at_diagonal: it is
                                       made of positions, so that it may well be largest where they meet

What is emitted is listed in docs/design.md section 3: visible, score, score_slope, and visible_keys, visible_queries, Span
and num_spans, or tile_class (0 empty, 1 partial, 2 full); plus the helpers they use and nothing else. visible_keys and
visible_queries answer within the sequence: spans lie inside k_start .. k_start + seq_k - 1 (or the same of q).
The text relies on LoomArgs (gen/abi.lua) and on Work; in C also on <math.h>, <stdint.h>, <stdbool.h>.

Masks are computed with the same IEEE operations in both languages, in the order written, so that every kernel decides
every element alike. Scores are fast: contraction is allowed, and on CUDA functions come from the approximations below.

Called by emit. ]]

local expression = require "expression"
local helpers = require "helpers"
local interval = require "interval"
local problem_text = require "problem"
local units = require "units"

local functions = {}

local STORAGE = {i32 = "int", i64 = "long long", u8 = "unsigned char", bool = "unsigned char", f32 = "float",
                 f16 = "unsigned short", bf16 = "unsigned short"}
local C_TYPE = {i32 = "int", f32 = "float", bool = "bool"}
local VARIABLE = {q = "q", k = "k", row = "row", col = "col", s = "s", b = "work->batch", h = "work->head",
                  hkv = "work->head_kv", seq_q = "work->seq_q", seq_k = "work->seq_k", q_start = "work->q_start",
                  k_start = "work->k_start", [units.scale.name] = "args->scale"}

-- -- scalars ---------------------------------------------------------------------------------------------------

-- Precedence of emitted text.
local CHOICE, OR, AND, EQUALITY, RELATION, SUM, PRODUCT, UNARY, PRIMARY = 1, 2, 3, 4, 5, 6, 7, 8, 9
local MAX_DEPTH = 12 -- deeper text is cut by a local

--[[ Writes expressions of one emitted function. Nodes that are costly and occur twice, or lie deep, become locals:
  lines collects their definitions. With `terms`, a list, what is the same for a whole tile is put there. ]]
local Writer = {}
Writer.__index = Writer

local function writer(unit, fast)
    return setmetatable({unit = unit, fast = fast, lines = {}, names = {}, counts = {}, used = {}, num_locals = 0}, Writer)
end

local function is_costly(node)
    if not node.args then return false end
    if node.op == "load" or node.op == "?:" then return true end
    if expression.functions[node.op] then return node.op ~= "f32" and node.op ~= "i32" end
    return node.type == "f32" or node.op == "/" or node.op == "%"
end

-- By how much an i32 node grows with q (or row) and with k (or col), where it is a sum or difference of them and of what does
-- not depend on them; nil where it is not.
local GROWS = {q = {1, 0}, row = {1, 0}, k = {0, 1}, col = {0, 1}}
local function growth(node)
    if interval.uniform(node) then return 0, 0 end
    if node.op == "var" then return table.unpack(GROWS[node.name]) end
    if node.op == "+" or node.op == "-" then
        local sign = node.op == "+" and 1 or -1
        local aq, ak = growth(node.args[1])
        local bq, bk = growth(node.args[2])
        if aq and bq then return aq + sign * bq, ak + sign * bk end
    elseif node.op == "neg" then
        local aq, ak = growth(node.args[1])
        if aq then return -aq, -ak end
    end
end

-- How far an element's value lies beside that of the one at q and k, by its growth.
local OFFSET = {["1 0"] = "dq", ["0 1"] = "dk", ["-1 0"] = "-dq", ["0 -1"] = "-dk", ["1 -1"] = "(dq - dk)", ["-1 1"] = "(dk - dq)",
                ["1 1"] = "(dq + dk)", ["-1 -1"] = "(-dq - dk)"}

-- Counts how often each part of node will be asked for.
function Writer:count(node)
    local key = expression.print(node)
    self.counts[key] = (self.counts[key] or 0) + 1
    if self.counts[key] > 1 then return end
    for _, arg in ipairs(node.args or {}) do self:count(arg) end
end

function Writer:call(name, ...)
    self.unit:need(name)
    return ("%s(%s)"):format(name, table.concat({...}, ", ")), PRIMARY
end

function Writer:operand(node, least)
    local text, level = self:write(node)
    return level < least and "(" .. text .. ")" or text
end

-- A comma-separated operand.
function Writer:argument(node)
    return (self:write(node))
end

local function float_text(value, language)
    if value == math.huge then return language == "c" and "INFINITY" or "__int_as_float(0x7f800000)" end
    if value == -math.huge then return "-" .. float_text(math.huge, language) end
    return expression.number(value) .. "f"
end

local function infix(writer, node, op, level)
    return ("%s %s %s"):format(writer:operand(node.args[1], level), op, writer:operand(node.args[2], level + 1)), level
end

local function nonnegative(node) return interval.range(node) >= 0 end
local function positive(node) return interval.range(node) >= 1 end

local WRITE = {i32 = {}, f32 = {}, bool = {}}

-- Whether plain C arithmetic does: neither the node nor a sum or product below it can leave i32.
local function is_plain(node)
    if node.op ~= "+" and node.op ~= "-" and node.op ~= "*" and node.op ~= "neg" then return true end
    if not interval.exact(node) then return false end
    for _, arg in ipairs(node.args) do
        if not is_plain(arg) then return false end
    end
    return true
end

for op, level in pairs {["+"] = SUM, ["-"] = SUM, ["*"] = PRODUCT} do
    local name = ({["+"] = "i32_add", ["-"] = "i32_sub", ["*"] = "i32_mul"})[op]
    WRITE.i32[op] = function(w, node, a, b)
        if is_plain(node) then return infix(w, node, op, level) end
        return w:call(name, w:argument(a), w:argument(b))
    end
end
for op, name in pairs {["/"] = "i32_div", ["%"] = "i32_mod"} do
    WRITE.i32[op] = function(w, node, a, b)
        if nonnegative(a) and positive(b) then return infix(w, node, op, PRODUCT) end
        local power = b.op == "const" and b.value > 0 and b.value & (b.value - 1) == 0 -- floors of any sign are then bits
        if power and op == "%" then return ("(%s & %d)"):format(w:operand(a, PRIMARY), b.value - 1), PRIMARY end
        if power then return ("(%s >> %d)"):format(w:operand(a, PRIMARY), math.tointeger(math.log(b.value, 2))), PRIMARY end
        return w:call(name, w:argument(a), w:argument(b))
    end
end

function WRITE.i32.neg(w, node, a)
    if is_plain(node) then return "-" .. w:operand(a, UNARY), UNARY end
    return w:call("i32_sub", "0", w:argument(a))
end

WRITE.i32["&"] = function(w, node)
    local list = {}
    for i, arg in ipairs(node.args) do list[i] = w:operand(arg, PRIMARY) end
    return "(" .. table.concat(list, " & ") .. ")", PRIMARY
end
WRITE.i32["|"] = function(w, node)
    local list = {}
    for i, arg in ipairs(node.args) do list[i] = w:operand(arg, PRIMARY) end
    return "(" .. table.concat(list, " | ") .. ")", PRIMARY
end
function WRITE.i32.xor(w, _, a, b)
    return ("(%s ^ %s)"):format(w:operand(a, PRIMARY), w:operand(b, PRIMARY)), PRIMARY
end
function WRITE.i32.i32(w, _, a)
    if a.type == "bool" then return ("%s ? 1 : 0"):format(w:operand(a, OR)), CHOICE end
    return w:call("i32_of_f32", w:argument(a))
end
for _, name in ipairs {"min", "max", "abs", "popcount", "hash"} do
    WRITE.i32[name] = function(w, node)
        local list = {}
        for i, arg in ipairs(node.args) do list[i] = w:argument(arg) end
        return w:call("i32_" .. name, table.unpack(list))
    end
end

WRITE.f32["+"] = function(w, node) return infix(w, node, "+", SUM) end
WRITE.f32["-"] = function(w, node) return infix(w, node, "-", SUM) end
WRITE.f32["*"] = function(w, node, a, b)
    if w.fast then return infix(w, node, "*", PRODUCT) end
    return w:call("f32_mul", w:argument(a), w:argument(b))
end
WRITE.f32["/"] = function(w, node, a, b)
    if node.saturates then return w:call("f32_div_saturating", w:argument(a), w:argument(b)) end
    if not w.fast then return w:call("f32_div", w:argument(a), w:argument(b)) end
    if w.unit.language == "c" then return infix(w, node, "/", PRODUCT) end
    local inverse = b.op == "const" and 1 / b.value
    if inverse and math.abs(inverse) > 1e-30 and math.abs(inverse) < 1e30 then
        local single = string.unpack("<f", string.pack("<f", inverse))
        return ("%s * %s"):format(w:operand(a, PRODUCT), float_text(single, "cuda")), PRODUCT
    end
    return w:call("fast_div", w:argument(a), w:argument(b))
end
function WRITE.f32.neg(w, _, a) return "-" .. w:operand(a, PRIMARY), UNARY end

-- f32 of what grows with dq and dk, which the compiler knows: one conversion serves all elements of a thread, the others are
-- an addition away. Exact up to 2^24; beyond, there is one rounding more, which depends on the element's place in its tile.
local function float_beside(w, node)
    local aq, ak = growth(node)
    local offset = aq and OFFSET[("%d %d"):format(aq, ak)]
    if not offset or not is_plain(node) then return end
    w.at_first = true
    local first = w:operand(node, PRIMARY)
    w.at_first = false
    return ("(float)%s + (float)%s"):format(first, offset), SUM
end

function WRITE.f32.f32(w, _, a)
    if w.beside and not w.at_first then
        local inner = a.op == "abs" and a.args[1]
        local text, level = float_beside(w, inner or a)
        if text and inner then return ("fabsf(%s)"):format(text), PRIMARY end
        if text then return text, level end
    end
    if a.type == "bool" then return ("%s ? 1.0f : 0.0f"):format(w:operand(a, OR)), CHOICE end
    return "(float)" .. w:operand(a, PRIMARY), UNARY
end
function WRITE.f32.abs(w, _, a) return ("fabsf(%s)"):format(w:argument(a)), PRIMARY end
function WRITE.f32.floor(w, _, a) return ("floorf(%s)"):format(w:argument(a)), PRIMARY end
for _, name in ipairs {"min", "max"} do
    WRITE.f32[name] = function(w, _, a, b) return w:call("f32_" .. name, w:argument(a), w:argument(b)) end
end
for _, name in ipairs {"exp", "log", "tanh", "sqrt", "sin", "cos"} do
    WRITE.f32[name] = function(w, _, a)
        if not w.fast then return w:call("f32_" .. name, w:argument(a)) end
        if w.unit.language == "c" then return ("%sf(%s)"):format(name, w:argument(a)), PRIMARY end
        return w:call("fast_" .. name, w:argument(a))
    end
end

for op in pairs(expression.comparison) do
    local level = (op == "==" or op == "!=") and EQUALITY or RELATION
    WRITE.bool[op] = function(w, node, a, b)
        if op == "!=" and a.type == "f32" then return w:call("f32_differ", w:argument(a), w:argument(b)) end
        return ("%s %s %s"):format(w:operand(a, SUM), op, w:operand(b, SUM)), level
    end
end
for op, text in pairs {["&"] = " && ", ["|"] = " || "} do
    WRITE.bool[op] = function(w, node)
        local list = {}
        for i, arg in ipairs(node.args) do list[i] = w:operand(arg, EQUALITY) end
        return table.concat(list, text), op == "&" and AND or OR
    end
end
WRITE.bool["!"] = function(w, _, a) return "!" .. w:operand(a, PRIMARY), UNARY end

local function write_choice(w, node)
    local c, a, b = node.args[1], node.args[2], node.args[3]
    return ("%s ? %s : %s"):format(w:operand(c, OR), w:operand(a, OR), w:operand(b, OR)), CHOICE
end

-- Text of a node's own operation.
function Writer:expand(node)
    local op = node.op
    if op == "const" then
        local value = node.value
        if node.type == "bool" then return tostring(value), PRIMARY end
        if node.type == "i32" and value == expression.I32_MIN then return "(-2147483647 - 1)", PRIMARY end
        local text = node.type == "f32" and float_text(value, self.unit.language) or tostring(value)
        return text, text:sub(1, 1) == "-" and UNARY or PRIMARY
    elseif op == "var" then
        self.used[node.name] = true
        local offset = self.beside and not self.at_first and GROWS[node.name]
        if offset then return ("%s + %s"):format(VARIABLE[node.name], OFFSET[("%d %d"):format(table.unpack(offset))]), SUM end
        return VARIABLE[node.name], PRIMARY
    elseif op == "param" then
        if node.type == "bool" then return ("args->p_%s != 0"):format(node.name), EQUALITY end
        return "args->p_" .. node.name, PRIMARY
    elseif op == "load" then
        local list = {"args"}
        for i, arg in ipairs(node.args) do list[i + 1] = self:argument(arg) end
        return ("param_%s(%s)"):format(node.name, table.concat(list, ", ")), PRIMARY
    elseif op == "?:" then
        return write_choice(self, node)
    end
    return WRITE[node.type][op](self, node, node.args[1], node.args[2])
end

-- The key of a node's local: what is beside the element at q and k has another value than that one.
function Writer:key(node)
    return (self.at_first and "first: " or "") .. expression.print(node)
end

-- Puts the value of a node into a local.
function Writer:define(node, text)
    local name = "t" .. self.num_locals
    self.num_locals = self.num_locals + 1
    self.lines[#self.lines + 1] = ("const %s %s = %s;"):format(C_TYPE[node.type], name, text)
    self.names[self:key(node)] = name
    return name
end

-- The term that a node is.
function Writer:term(node)
    local key = expression.print(node)
    if not self.terms[key] then
        self.terms[key] = "t" .. #self.terms
        self.terms[#self.terms + 1] = {name = self.terms[key], node = node}
    end
    return "terms->" .. self.terms[key]
end

-- Text and precedence of a node, or of the local that holds it.
function Writer:write(node)
    local key = self:key(node)
    if self.names[key] then return self.names[key], PRIMARY end
    if self.terms and interval.uniform(node) and node.op ~= "const" and node.op ~= "param" and node ~= units.scale then
        return self:term(node), PRIMARY
    end
    self.depth = (self.depth or 0) + 1
    local deep = self.depth % MAX_DEPTH == 0
    local text, level = self:expand(node)
    self.depth = self.depth - 1
    if node.args and (deep or is_costly(node) and (self.counts[key] or 0) > 1) then
        return self:define(node, text), PRIMARY
    end
    return text, level
end

-- The same, with every operation in a local.
function Writer:hold(node)
    local key = self:key(node)
    if node.args and not self.names[key] then
        local text = self:write(node)
        if not self.names[key] then self:define(node, text) end
    end
    return self:operand(node, PRIMARY)
end

-- -- arrays ----------------------------------------------------------------------------------------------------

local ALWAYS_INSIDE = {b = "batch", h = "heads_q", hkv = "heads_kv"}

-- Whether an index lies inside a dimension whatever the launch.
local function is_inside(index, dim)
    if type(dim) == "number" then
        local lo, hi = interval.range(index)
        return lo >= 0 and hi < dim
    end
    return index.op == "var" and ALWAYS_INSIDE[index.name] == dim.word and not dim.div
end

local function extent(dim)
    if type(dim) == "number" then return dim .. "u" end
    if not dim.div then return ("(unsigned)args->%s"):format(dim.word) end
    return ("((unsigned)args->%s + %du) / %du"):format(dim.word, dim.div - 1, dim.div)
end

local function print_dims(param)
    local dims = {}
    for i, dim in ipairs(param.dims) do
        dims[i] = problem_text.print_dim(dim)
    end
    return table.concat(dims, ", ")
end

-- The function that reads one array. guards[axis]: whether some read may fall outside that axis.
local function array_function(unit, param, guards)
    local indices, offsets, tests = {}, {}, {}
    for axis, dim in ipairs(param.dims) do
        local index = "i" .. axis - 1
        indices[axis] = "int " .. index
        offsets[axis] = ("%s * args->p_%s_stride_%d"):format(index, param.name, axis - 1)
        if guards[axis] then tests[#tests + 1] = ("(unsigned)%s >= %s"):format(index, extent(dim)) end
    end
    local element = ("args->p_%s + %s"):format(param.name, table.concat(offsets, " + "))
    element = unit.language == "c" and ("*(%s)"):format(element) or ("__ldg(%s)"):format(element)
    local type = C_TYPE[expression.param(param).type]
    local value = element
    if param.dtype == "bool" then value = element .. " != 0"
    elseif param.dtype == "i64" then value = "(int)" .. element -- the low half: i32 wraps
    elseif param.dtype == "f16" or param.dtype == "bf16" then
        local decode = "f32_of_" .. param.dtype
        unit:need(decode)
        value = ("%s(%s)"):format(decode, element)
    end
    local lines = {
        ("// %s: %s[%s]%s"):format(param.name, param.dtype, print_dims(param), #tests > 0 and ", 0 outside" or ""),
        ("%s %s param_%s(const LoomArgs *args, %s) {"):format(unit.static, type, param.name, table.concat(indices, ", ")),
    }
    if #tests > 0 then
        lines[#lines + 1] = ("    if (%s) return %s;"):format(table.concat(tests, " || "), type == "bool" and "false" or "0")
    end
    lines[#lines + 1] = ("    return %s;"):format(value)
    lines[#lines + 1] = "}"
    return table.concat(lines, "\n")
end

-- Vectors by which a range is read: type, members.
local VECTOR = {i32 = {"int4", {"x", "y", "z", "w"}}, i64 = {"longlong2", {"x", "y"}}, u8 = {"uchar4", {"x", "y", "z", "w"}},
                bool = {"uchar4", {"x", "y", "z", "w"}}}

-- The function that finds what a tile reads of an array.
local function array_range_function(unit, param, guards)
    unit:need("iv")
    local least, most = interval.stored(param) -- not more than interval.range says: sums are taken to fit by that
    local any = ("iv(%dLL, %dLL)"):format(least, most)
    local lines, parameters, indices = {}, {}, {}
    local function add(depth, format, ...) lines[#lines + 1] = (" "):rep(4 * depth) .. format:format(...) end
    for axis = 1, #param.dims do
        parameters[axis] = ("Iv i%d"):format(axis - 1)
    end
    add(0, "// Least and largest of %s over a box of indices; anything where it holds more than %d.", param.name, interval.MOST_LOADS)
    add(0, "%s Iv param_%s_range(const LoomArgs *args, %s) {", unit.static, param.name, table.concat(parameters, ", "))
    add(1, "long long num = 1;")
    for axis = 0, #param.dims - 1 do add(1, "if ((num *= i%d.hi - i%d.lo + 1) > %d) return %s;", axis, axis, interval.MOST_LOADS, any) end
    add(1, "int lo = 2147483647, hi = -2147483647 - 1;")
    local last, depth = #param.dims - 1, #param.dims
    local function take(at, value)
        add(at, "lo = %s < lo ? %s : lo;", value, value)
        add(at, "hi = %s > hi ? %s : hi;", value, value)
    end
    for axis = 0, last do -- counted, since the last index may be the largest there is
        indices[axis + 1] = axis < last and "x" .. axis or ("(int)i%d.lo + n"):format(axis)
        add(math.min(axis + 1, depth), "const int num%d = (int)(i%d.hi - i%d.lo) + 1;", axis, axis, axis)
        if axis < last then
            if unit.language == "cuda" then lines[#lines + 1] = "#pragma unroll 1" end
            add(axis + 1, "for (int n%d = 0; n%d < num%d; ++n%d) {", axis, axis, axis, axis)
            add(axis + 2, "const int x%d = (int)i%d.lo + n%d;", axis, axis, axis)
        end
    end
    add(depth, "int n = 0;")
    if unit.language == "cuda" then
        local vector, parts = table.unpack(VECTOR[param.dtype])
        local tests, offsets = {("args->p_%s_stride_%d == 1"):format(param.name, last)}, {}
        for axis = 0, last do
            local first, final = axis < last and "x" .. axis or "i" .. axis .. ".lo", axis < last and "x" .. axis or "i" .. axis .. ".hi"
            if guards[axis + 1] then tests[#tests + 1] = ("%s >= 0 && %s < (long long)%s"):format(first, final, extent(param.dims[axis + 1])) end
            offsets[axis + 1] = axis < last and ("x%d * args->p_%s_stride_%d"):format(axis, param.name, axis) or ("i%d.lo"):format(axis)
        end
        add(depth, "const %s *const from = (const %s *)(args->p_%s + %s);", vector, vector, param.name, table.concat(offsets, " + "))
        add(depth, "const bool whole = %s && (size_t)from %% sizeof *from == 0;  // side by side, inside", table.concat(tests, " && "))
        add(depth, "const int vectors = whole ? num%d / %d : 0;", last, #parts)
        lines[#lines + 1] = "#pragma unroll 4  // reads wait together"
        add(depth, "for (int i = 0; i < vectors; ++i) {")
        add(depth + 1, "const %s v = __ldg(from + i);", vector)
        for _, part in ipairs(parts) do
            take(depth + 1, (param.dtype == "bool" and "(v.%s != 0)" or param.dtype == "i64" and "(int)v.%s" or "v.%s"):format(part))
        end
        add(depth, "}")
        add(depth, "n += %d * vectors;", #parts)
        lines[#lines + 1] = "#pragma unroll 1"
    end
    add(depth, "for (; n < num%d; ++n) {", last)
    add(depth + 1, "const int value = param_%s(args, %s);", param.name, table.concat(indices, ", "))
    take(depth + 1, "value")
    add(depth, "}")
    for at = last, 1, -1 do add(at, "}") end
    add(1, "return iv(lo, hi);")
    add(0, "}")
    return table.concat(lines, "\n")
end

-- Functions of all arrays that the nodes read, in slot order; those in `ranges` are looked at for whole tiles too. Others are functions
-- of their elements, where `used` names them.
local function array_functions(unit, problem, nodes, ranges, used)
    local guards = {}
    for _, root in ipairs(nodes) do
        expression.walk(root, function(node)
            if node.op ~= "load" then return end
            local of = guards[node.name] or {}
            guards[node.name] = of
            for axis, index in ipairs(node.args) do
                -- the interval of an index may be wider than the index, by which it is judged here
                of[axis] = of[axis] or not is_inside(index, node.param.dims[axis]) or ranges[node.name] and index.op ~= "var"
            end
        end)
    end
    local list = {}
    for _, param in ipairs(problem.params) do
        local name = "param_" .. param.name .. "("
        if guards[param.name] and (ranges[param.name] or used:find(name, 1, true)) then
            list[#list + 1] = array_function(unit, param, guards[param.name])
        end
        if ranges[param.name] then list[#list + 1] = array_range_function(unit, param, guards[param.name]) end
    end
    return list
end

local MAX_COMMENT = 160

-- Text of an expression for a comment.
local function shown(text)
    return #text > MAX_COMMENT and text:sub(1, MAX_COMMENT - 3) .. "..." or text
end

-- -- functions of one element ----------------------------------------------------------------------------------

-- Wraps lines of a body into a function; names what the body does not use, against warnings.
local function assemble(unit, comment, head, parameters, lines)
    local body = table.concat(lines, "\n")
    local unused = {}
    for _, parameter in ipairs(parameters) do
        local name = parameter:match("([%w_]+)[%[%]]*$")
        if not body:find("%f[%w_]" .. name .. "%f[^%w_]") then unused[#unused + 1] = ("    (void)%s;"):format(name) end
    end
    local out = {"// " .. comment, ("%s %s(%s) {"):format(unit.static, head, table.concat(parameters, ", "))}
    for _, line in ipairs(unused) do out[#out + 1] = line end
    for _, line in ipairs(lines) do out[#out + 1] = line:sub(1, 1) == "#" and line or "    " .. line end
    out[#out + 1] = "}"
    return table.concat(out, "\n")
end

local ELEMENT = {"const LoomArgs *args", "const Work *work", "int q", "int k"}
local ELEMENT_SCORE = {"const LoomArgs *args", "const Work *work", "int q", "int k", "float s"}
-- One of the elements that a thread has of a tile: that at q + dq and k + dk, with dq and dk constants, so that what depends on
-- q and k is computed once; s is S before the scale, and the result in units of score_unit (gen/units.lua).
local ELEMENT_OF_TILE = {"const LoomArgs *args", "const Work *work", "const Terms *terms", "int q", "int k", "int dq", "int dk", "float s"}
-- The same where the kernel computes the only tanh, of what tanh_argument gives.
local ELEMENT_OF_TILE_TANH = table.move(ELEMENT_OF_TILE, 1, #ELEMENT_OF_TILE, 1, {})
ELEMENT_OF_TILE_TANH[#ELEMENT_OF_TILE_TANH + 1] = "float tanh_x"

-- The tanh of a score that differs between elements, if it has one and no other.
local function only_tanh(score)
    local found, num = nil, 0
    if score then
        expression.walk(score, function(node)
            if node.op ~= "tanh" or interval.uniform(node) then return end
            if not found or expression.print(found) ~= expression.print(node) then num = num + 1 end
            found = node
        end)
    end
    return num == 1 and found or nil
end

local function element_function(unit, comment, head, parameters, node, fast, terms, names)
    local w = writer(unit, fast)
    w.beside, w.terms = terms ~= nil, terms
    for key, name in pairs(names or {}) do w.names[key] = name end
    if parameters == ELEMENT_OF_TILE_TANH then w.names[w:key(only_tanh(node))] = "tanh_x" end
    w:count(node)
    local text = w:write(node)
    local lines = {}
    if w.used.row then lines[#lines + 1] = "const int row = q - work->q_start;" end
    if w.used.col then lines[#lines + 1] = "const int col = k - work->k_start;" end
    for _, line in ipairs(w.lines) do lines[#lines + 1] = line end
    lines[#lines + 1] = ("return %s;"):format(text)
    return assemble(unit, comment .. shown(expression.print(node)), head, parameters, lines)
end

-- Parts of a mask that are costly and depend on the query alone (rows; those that depend on neither are there too) or on the key
-- alone (columns), as large as they can be.
local ROW, COLUMN = {q = true, row = true}, {k = true, col = true}
local function one_sided(mask)
    local sides, found = {rows = {}, columns = {}}, {}
    local function depends(node, names)
        return expression.any(node, function(part) return part.op == "var" and names[part.name] end)
    end
    local function visit(node)
        if not node.args or not expression.any(node, is_costly) then return end
        local of_row, of_column = depends(node, ROW), depends(node, COLUMN)
        if of_row and of_column then
            for _, arg in ipairs(node.args) do visit(arg) end
        elseif not found[expression.print(node)] then
            found[expression.print(node)] = true
            local list = of_column and sides.columns or sides.rows
            list[#list + 1] = node
        end
    end
    if mask then visit(mask) end
    return sides
end

-- The function that gets the terms that another lane has.
local function terms_of_lane(unit, type, nodes)
    local lines = {}
    for i, node in ipairs(nodes) do
        local field = "terms.t" .. i - 1
        lines[i] = node.type == "bool" and ("%s = __shfl_sync(~0u, (int)%s, lane) != 0;"):format(field, field)
            or ("%s = __shfl_sync(~0u, %s, lane);"):format(field, field)
    end
    lines[#lines + 1] = "return terms;"
    return assemble(unit, "The terms that another lane has.", type .. " terms_of_lane", {type .. " terms", "int lane"}, lines)
end

-- A mask for the elements of a tile by RowTerms and ColumnTerms, where there are some: what costs much is computed once a row
-- and column, or once a warp: of `by_lanes`, rows or columns, each lane makes those of one.
local function tile_mask_functions(unit, mask, by_lanes)
    local sides, names, list = one_sided(mask), {}, {}
    local parameters = {"const LoomArgs *args", "const Work *work"}
    for _, side in ipairs {{"rows", "RowTerms", "row_terms", "query q", "int q"}, {"columns", "ColumnTerms", "column_terms", "key k", "int k"}} do
        local w, fields, values = writer(unit, false), {}, {}
        for _, node in ipairs(sides[side[1]]) do w:count(node) end
        for i, node in ipairs(sides[side[1]]) do
            local name = "t" .. i - 1
            fields[i] = ("    %s %s;  // %s\n"):format(C_TYPE[node.type], name, shown(expression.print(node)))
            values[i] = ("terms.%s = %s;"):format(name, w:argument(node))
            names[expression.print(node)] = ("%s->%s"):format(side[1], name)
        end
        if #fields > 0 then
            local lines = {}
            if w.used.row then lines[#lines + 1] = "const int row = q - work->q_start;" end
            if w.used.col then lines[#lines + 1] = "const int col = k - work->k_start;" end
            for _, line in ipairs(w.lines) do lines[#lines + 1] = line end
            lines[#lines + 1] = side[2] .. " terms;"
            for _, line in ipairs(values) do lines[#lines + 1] = line end
            lines[#lines + 1] = "return terms;"
            list[#list + 1] = ("// What the mask makes of %s alone.\ntypedef struct %s {\n%s} %s;"):format(side[4], side[2], table.concat(fields), side[2])
            list[#list + 1] = assemble(unit, "See " .. side[2] .. ".", side[2] .. " " .. side[3],
                {"const LoomArgs *args", "const Work *work", side[5]}, lines)
            if side[1] == by_lanes then list[#list + 1] = terms_of_lane(unit, side[2], sides[by_lanes]) end
            parameters[#parameters + 1] = ("const %s *%s"):format(side[2], side[1])
        end
    end
    table.move({"int q", "int k"}, 1, 2, #parameters + 1, parameters)
    list[#list + 1] = element_function(unit, "Whether query q sees key k, with what is known of both: ", "bool visible_of",
        parameters, mask, false, nil, names)
    return list
end

-- The score for the elements of a tile: what units.cap finds, or its terms, its unit, itself, and what it takes tanh of if it has
-- one tanh.
local function tile_score_functions(unit, score)
    local function of_launch(comment, name, node)
        return assemble(unit, comment, "float " .. name, {"const LoomArgs *args"},
            {("return %s;"):format(node and writer(unit, false):argument(node) or "1.0f")})
    end
    local cap, factor = units.cap(score)
    if cap then
        return {of_launch("The score is cap * tanh(factor * s).", "score_cap", cap), of_launch("See score_cap.", "score_factor", factor)}
    end
    local inner, of = units.of(score)
    local tanh, terms, list = only_tanh(inner), {}, {}
    if tanh then
        unit:need("any_tanh")
        list[1] = element_function(unit, "What the score takes tanh of: ", "float tanh_argument", ELEMENT_OF_TILE, tanh.args[1], true, terms)
    end
    local comment = of and ("The score, in units of %s: "):format(expression.print(of)) or "The score: "
    list[#list + 1] = element_function(unit, comment, "float score", tanh and ELEMENT_OF_TILE_TANH or ELEMENT_OF_TILE, inner, true, terms)
    local w = writer(unit, false)
    local fields, values = {}, {}
    for i, term in ipairs(terms) do
        fields[i] = ("    %s %s;  // %s\n"):format(C_TYPE[term.node.type], term.name, shown(expression.print(term.node)))
        values[#values + 1] = ("terms.%s = %s;"):format(term.name, w:argument(term.node))
        if term.node.type == "f32" then -- else a division may end up in the loop of tiles
            values[#values + 1] = ('asm volatile("" : "+f"(terms.%s));  // made here'):format(term.name)
        end
    end
    local lines = {"Terms terms;"}
    for _, line in ipairs(w.lines) do lines[#lines + 1] = line end
    for _, value in ipairs(values) do lines[#lines + 1] = value end
    lines[#lines + 1] = "return terms;"
    return {
        ("// What of the score is the same for all elements of a work.\ntypedef struct Terms {\n%s} Terms;"):format(table.concat(fields)),
        assemble(unit, "The terms of a work.", "Terms score_terms", {"const LoomArgs *args", "const Work *work"}, lines),
        of_launch("What scores are in units of.", "score_unit", of),
        table.unpack(list),
    }
end

-- Whether all queries of a head see the same keys.
local function is_even(mask)
    return not expression.any(mask, function(node) return node.op == "var" and (node.name == "q" or node.name == "row") end)
end

-- Of what is made of positions, such as a distance; not what is only read there.
local function is_made_of_positions(node)
    if not node or node.op == "load" then return false end
    if node.op == "var" then return GROWS[node.name] ~= nil end
    for _, arg in ipairs(node.args or {}) do
        if is_made_of_positions(arg) then return true end
    end
    return false
end

-- -- walk range ------------------------------------------------------------------------------------------------

-- Text of an integer of up to 64 bits.
local function literal(value)
    return math.abs(value) > expression.I32_MAX and value .. "LL" or tostring(value)
end

-- Text of a sum of uniform terms and, with a factor, of the bound `other` of the box; in 64 bits where i32 may not do.
local function sum_text(w, sum, other, other_variable, factor)
    local all = {c = sum.c, terms = {table.unpack(sum.terms)}}
    local positive_parts, parts = {}, {}
    local function add(coefficient, text)
        local list = coefficient > 0 and positive_parts or parts
        list[#list + 1] = {coefficient, text}
    end
    if factor ~= 0 then
        add(factor, other)
        table.insert(all.terms, {coefficient = factor, node = other_variable})
    end
    for _, term in ipairs(sum.terms) do add(term.coefficient, w:hold(term.node)) end
    local wide = not interval.is_small(all)
    local text = ""
    for i, part in ipairs(table.move(parts, 1, #parts, #positive_parts + 1, positive_parts)) do
        local value = wide and "(long long)" .. part[2] or part[2]
        if math.abs(part[1]) ~= 1 then value = math.abs(part[1]) .. " * " .. value end
        if i == 1 then text = (part[1] < 0 and "-" or "") .. value
        else text = text .. (part[1] < 0 and " - " or " + ") .. value end
    end
    local c = sum.c
    if text == "" then return literal(c) end
    if c == 0 then return text end
    return text .. (c < 0 and " - " or " + ") .. literal(math.abs(c))
end

local function nest(name, list, last)
    local text = last
    for i = #list, 1, -1 do text = ("%s(%s, %s)"):format(name, text, list[i]) end
    return text
end

local function conjunction_text(conjunction)
    local list = {}
    for i, atom in ipairs(conjunction) do list[i] = atom.shown end
    if #list == 0 then return "all" end
    return shown(table.concat(list, " & "))
end

-- Text of the condition that the sums of an atom's checks stay inside i32 over the whole walk.
local function check_text(w, check, names)
    local lo, hi = {c = check.c, terms = {}}, {c = check.c, terms = {}}
    local ends_lo, ends_hi = {}, {}
    for _, term in ipairs(check.terms) do
        local name = term.node.op == "var" and term.node.name
        local range = names[name]
        if range then
            local a, b = range[1], range[2]
            if term.coefficient < 0 then a, b = b, a end
            ends_lo[#ends_lo + 1] = {term.coefficient, a}
            ends_hi[#ends_hi + 1] = {term.coefficient, b}
        else
            table.insert(lo.terms, term)
            table.insert(hi.terms, term)
        end
    end
    local function text(sum, ends)
        local out = sum_text(w, sum, nil, nil, 0)
        for _, at in ipairs(ends) do out = ("%s %s (long long)%s"):format(out, at[1] < 0 and "-" or "+", at[2]) end
        return out
    end
    w.unit:need("in_i32")
    -- the leading 0 keeps a sum of i32 terms in 64 bits
    return ("in_i32(0LL + %s) && in_i32(0LL + %s)"):format(text(lo, ends_lo), text(hi, ends_hi))
end

-- Whether no bound of the spans can leave i32.
local function is_narrow(spans, direction, other_variable)
    for _, conjunction in ipairs(spans) do
        for _, row in ipairs(interval.rows(conjunction, direction)) do
            if row.kind == "upper" or row.kind == "lower" then
                local terms = {table.unpack(row.terms)}
                terms[#terms + 1] = {coefficient = row.other, node = other_variable}
                if not interval.is_small {c = row.c, terms = terms} then return false end
            end
        end
    end
    return true
end

-- visible_keys or visible_queries.
local function range_function(unit, spans, direction)
    local walked, other, length, start = "k", "q", "seq_k", "k_start"
    if direction == "queries" then walked, other, length, start = "q", "k", "seq_q", "q_start" end
    local w = writer(unit, false)
    local body = {}
    local other_variable = expression.variable(other)
    local names = {[walked] = {"first", "last"}, [other] = {other .. "_lo", other .. "_hi"}}
    local narrow = is_narrow(spans, direction, other_variable)
    local least, largest, made = narrow and "i32_min" or "wide_min", narrow and "i32_max" or "wide_max", narrow and "i32_span" or "span"
    for i, conjunction in ipairs(spans) do
        local outer = {lower = {}, upper = {}, when = {}}
        local inner = {lower = {}, upper = {}, when = {}}
        local lines = {}
        for j, row in ipairs(interval.rows(conjunction, direction)) do
            if row.kind == "if" then
                local text = w:operand(row.node, EQUALITY)
                outer.when[#outer.when + 1] = text
                inner.when[#inner.when + 1] = text
            else
                local sure
                if #row.checks > 0 then
                    local tests = {}
                    for n, check in ipairs(row.checks) do tests[n] = check_text(w, check, names) end
                    sure = ("sure_%d_%d"):format(i - 1, j - 1)
                    lines[#lines + 1] = ("const bool %s = %s; // nothing wraps"):format(sure, table.concat(tests, " && "))
                    inner.when[#inner.when + 1] = sure
                end
                local function bound(most)
                    local at = (row.other > 0) == most and "_hi" or "_lo"
                    return sum_text(w, row, other .. at, other_variable, row.other)
                end
                if row.kind == "when" then
                    local some = bound(false) .. " <= 0"
                    outer.when[#outer.when + 1] = sure and ("(!%s || %s)"):format(sure, some) or some
                    inner.when[#inner.when + 1] = bound(true) .. " <= 0"
                else
                    local some = bound(row.kind == "upper")
                    if sure then some = ("%s ? %s : %s"):format(sure, some, row.kind == "upper" and "last" or "first") end
                    table.insert(outer[row.kind], some)
                    table.insert(inner[row.kind], bound(row.kind == "lower"))
                end
            end
        end
        local function span(side)
            if #side.lower > 0 then unit:need(largest) end
            if #side.upper > 0 then unit:need(least) end
            local text = ("%s(%s, %s)"):format(made, nest(largest, side.lower, "first"), nest(least, side.upper, "last"))
            if #side.when == 0 then return text end
            return ("%s ? %s : %s(1, 0)"):format(table.concat(side.when, " && "), text, made)
        end
        body[#body + 1] = "// " .. conjunction_text(conjunction)
        for _, line in ipairs(lines) do body[#body + 1] = line end
        body[#body + 1] = ("outer[%d] = %s;"):format(i - 1, span(outer))
        body[#body + 1] = ("inner[%d] = %s;"):format(i - 1, span(inner))
    end
    unit:need(made)
    local lines = {("const %s first = work->%s, last = first + work->%s - 1;"):format(narrow and "int" or "long long", start, length)}
    for _, line in ipairs(w.lines) do lines[#lines + 1] = line end
    for _, line in ipairs(body) do lines[#lines + 1] = line end
    local comment = direction == "keys" and "Keys that some (outer) and that all (inner) of the queries q_lo..q_hi see."
        or "Queries that see some (outer) and that see all (inner) of the keys k_lo..k_hi."
    return assemble(unit, comment, "void visible_" .. direction,
        {"const LoomArgs *args", "const Work *work", ("int %s_lo"):format(other), ("int %s_hi"):format(other),
         "Span outer[]", "Span inner[]"}, lines)
end

-- -- what a side of a tile reads ---------------------------------------------------------------------------------

local SIDE_OF = {q = "queries", row = "queries", k = "keys", col = "keys"}

-- The side whose position alone an integer or bool load reads by, and the axis of that; nil where it reads otherwise.
local function read_side(node)
    local axis
    for i, index in ipairs(node.args) do
        if not interval.uniform(index) then
            if axis or index.op ~= "var" then return nil end
            axis = i
        end
    end
    return axis and SIDE_OF[node.args[axis].name], axis
end

local reads_of = setmetatable({}, {__mode = "k"}) -- of masks met

local function find_reads(mask)
    local reads, found = {queries = {}, keys = {}}, {}
    local function nothing() return "" end
    interval.describe(mask, {op = nothing, const = nothing, var = nothing, point = nothing, load = nothing, read = function(node)
        local side, text = read_side(node), expression.print(node)
        if side and not found[text] then
            found[text] = true
            table.insert(reads[side], node)
        end
    end})
    return reads
end

local function class_reads(mask)
    reads_of[mask] = reads_of[mask] or find_reads(mask)
    return reads_of[mask]
end

function functions.reads(problem, bounds)
    local rest = bounds and select(2, interval.bounds(problem.mask))
    return class_reads(rest or problem.mask)
end

local READS = {queries = {type = "QueryReads", call = "query_reads", lo = "q_lo", hi = "q_hi", start = "q_start"},
               keys = {type = "KeyReads", call = "key_reads", lo = "k_lo", hi = "k_hi", start = "k_start"}}

-- The function by which `lanes` threads side by side find what a side of a tile reads: each has part of it, and all know in the end.
local function reads_function(unit, side, loads)
    local of = READS[side]
    local w = writer(unit, false)
    local lines, fields = {}, {}
    local function add(depth, format, ...) lines[#lines + 1] = (" "):rep(4 * depth) .. format:format(...) end
    for i, node in ipairs(loads) do
        local param, _, axis = node.param, read_side(node)
        local vector, parts = table.unpack(VECTOR[param.dtype])
        local offsets, indices, tests = {}, {}, {("args->p_%s_stride_%d == 1"):format(param.name, #param.dims - 1)}
        for at, index in ipairs(node.args) do
            local first = at == axis and "first" or w:operand(index, PRIMARY)
            indices[at] = at == axis and "first + n" or first
            offsets[at] = at == #param.dims and first or ("%s * args->p_%s_stride_%d"):format(first, param.name, at - 1)
            if not is_inside(index, param.dims[at]) then
                local final = at == axis and "(long long)first + num" or first .. " + 1LL"
                tests[#tests + 1] = ("%s >= 0 && %s <= (long long)%s"):format(first, final, extent(param.dims[at]))
            end
        end
        local position = node.args[axis].name
        fields[i] = ("    int lo%d, hi%d;  // %s\n"):format(i - 1, i - 1, shown(expression.print(node)))
        local function take(depth, value)
            add(depth, "lo = min(lo, %s);", value)
            add(depth, "hi = max(hi, %s);", value)
        end
        add(0, "{  // %s", shown(expression.print(node)))
        add(1, "const int first = %s;", (position == "row" or position == "col") and ("%s - work->%s"):format(of.lo, of.start) or of.lo)
        add(1, "int lo = 2147483647, hi = -2147483647 - 1, done = 0;")
        if axis == #param.dims then
            add(1, "const %s *const from = (const %s *)(args->p_%s + %s);", vector, vector, param.name, table.concat(offsets, " + "))
            add(1, "const int vectors = %s && (size_t)from %% sizeof *from == 0 ? num / %d : 0;  // side by side, inside",
                table.concat(tests, " && "), #parts)
            add(1, "if (vectors > 0) {")
            lines[#lines + 1] = "#pragma unroll  // reads wait together"
            add(2, "for (int i = 0; i < most; i += %d * lanes) {", #parts)
            add(3, "const %s v = __ldg(from + min(i / %d + lane, vectors - 1));", vector, #parts)
            for _, part in ipairs(parts) do
                take(3, (param.dtype == "bool" and "(int)(v.%s != 0)" or "(int)v.%s"):format(part))
            end
            add(2, "}")
            add(2, "done = %d * vectors;", #parts)
            add(1, "}")
        end
        lines[#lines + 1] = "#pragma unroll 4"
        add(1, "for (int n = done + lane; n < num; n += lanes) {")
        add(2, "const int value = param_%s(args, %s);", param.name, table.concat(indices, ", "))
        take(2, "value")
        add(1, "}")
        lines[#lines + 1] = "#pragma unroll"
        add(1, "for (int distance = 1; distance < lanes; distance *= 2) {")
        add(2, "lo = min(lo, __shfl_xor_sync(~0u, lo, distance));")
        add(2, "hi = max(hi, __shfl_xor_sync(~0u, hi, distance));")
        add(1, "}")
        add(1, "reads.lo%d = lo;", i - 1)
        add(1, "reads.hi%d = hi;", i - 1)
        add(0, "}")
    end
    local body = {"const int lane = threadIdx.x % lanes, num = " .. ("%s - %s + 1;"):format(of.hi, of.lo), of.type .. " reads;"}
    for _, line in ipairs(w.lines) do body[#body + 1] = line end
    for _, line in ipairs(lines) do body[#body + 1] = line end
    body[#body + 1] = "return reads;"
    return ("// Least and largest of what %s %s .. %s of a tile read of arrays.\ntypedef struct %s {\n%s} %s;\n\n"):format(
            side, of.lo, of.hi, of.type, table.concat(fields), of.type)
        .. assemble(unit, "See " .. of.type .. "; all threads of a warp call it, for `most` positions or fewer.", of.type .. " " .. of.call,
            {"const LoomArgs *args", "const Work *work", "int " .. of.lo, "int " .. of.hi, "int most"}, body)
end

-- -- walk classify ---------------------------------------------------------------------------------------------

local MAX_LINE = 60 -- longer interval text becomes a local

-- Lines of a class by blocks: of `part`, from one element of each block of the tile, where these are few.
local function block_lines(part, call, others)
    local lines, num = {}, {}
    local function add(depth, format, ...) lines[#lines + 1] = (" "):rep(4 * depth) .. format:format(...) end
    local blocks, position = interval.blocks(part), {}
    for _, side in ipairs {"q", "k"} do
        local of = blocks[side]
        position[side] = side .. "_lo"
        if of then
            local start = (of.name == "row" or of.name == "col") and (" - work->%s_start"):format(side) or ""
            add(0, "const int %s_first = i32_div(%s_lo%s, %d), %s_last = i32_div(%s_hi%s, %d);", side, side, start, of.size, side, side, start, of.size)
            num[#num + 1] = ("(%s_last - %s_first + 1LL)"):format(side, side)
            local corner = ("%s_block * %d"):format(side, of.size) .. (start ~= "" and (" + work->%s_start"):format(side) or "")
            position[side] = ("(%s_block == %s_first ? %s_lo : %s)"):format(side, side, side, corner)
        end
    end
    add(0, "if (%s <= %d) {  // in blocks, which are seen as a whole", table.concat(num, " * "), interval.MOST_BLOCKS)
    add(1, "bool some = false, all = true;")
    local depth = 1
    for _, side in ipairs {"q", "k"} do
        if blocks[side] then
            add(depth, "for (int %s_block = %s_first; %s_block <= %s_last; ++%s_block) {", side, side, side, side, side)
            depth = depth + 1
        end
    end
    add(depth, "const bool seen = %s(args, work, %s, %s);", call, position.q, position.k)
    add(depth, "some = some || seen;")
    add(depth, "all = all && seen;")
    for at = depth - 1, 1, -1 do add(at, "}") end
    add(1, "return %s;", others:format("all ? 2 : some ? 1 : 0"))
    add(0, "}")
    return lines
end

local function tile_class_function(unit, mask, ranges, seen, reads)
    local w = writer(unit, false)
    local used = {}
    local num_locals = 0
    local TYPE = {iv = "Iv", fv = "Fv", cl = "int"}
    local loads = {} -- text of a call -> local
    local function define(kind, text)
        local name = kind .. num_locals
        num_locals = num_locals + 1
        w.lines[#w.lines + 1] = ("const %s %s = %s;"):format(TYPE[kind], name, text)
        return name
    end
    local function hold(kind, text)
        return #text <= MAX_LINE and text or define(kind, text)
    end
    local function operation(name, ...)
        if name == "cl_const" then return tostring((...)) end
        unit:need(name)
        local list = {}
        for i, value in ipairs {...} do
            list[i] = type(value) == "number" and literal(value) or value
        end
        return hold(name:sub(1, 2), ("%s(%s)"):format(name, table.concat(list, ", ")))
    end
    local backend = {
        op = operation,
        const = function(lo, hi)
            unit:need("iv")
            return ("iv(%s, %s)"):format(literal(lo), literal(hi))
        end,
        var = function(name)
            used[name] = true
            return name
        end,
        point = function(node)
            local kind = ({i32 = "iv", f32 = "fv", bool = "cl"})[node.type]
            unit:need(kind .. "_point")
            return hold(kind, ("%s_point(%s)"):format(kind, w:argument(node)))
        end,
        load = ranges and function(node, indices)
            ranges[node.name] = true
            local text = ("param_%s_range(args, %s)"):format(node.name, table.concat(indices, ", "))
            loads[text] = loads[text] or define("iv", text) -- loops: each once
            return loads[text]
        end,
        read = reads and function(node)
            local side, text = read_side(node), expression.print(node)
            for i, load in ipairs(side and reads[side] or {}) do
                if expression.print(load) == text then
                    unit:need("iv")
                    return ("iv(%s->lo%d, %s->hi%d)"):format(side, i - 1, side, i - 1)
                end
            end
        end,
    }
    local part, rest = interval.block_part(mask)
    if part and ranges then
        unit:need("i32_div")
        local others = "%s"
        if rest then
            unit:need("cl_and")
            local text = interval.describe(rest, backend) -- which adds lines
            w.lines[#w.lines + 1] = ("const int others = %s;"):format(text)
            w.lines[#w.lines + 1] = "if (others == 0) return 0;"
            others = "cl_and(others, %s)"
        end
        for _, line in ipairs(block_lines(part, seen(part), others)) do w.lines[#w.lines + 1] = line end
    end
    local text = interval.describe(mask, backend)
    local lines = {}
    if used.q then lines[#lines + 1] = "const Iv q = iv(q_lo, q_hi);" end
    if used.k then lines[#lines + 1] = "const Iv k = iv(k_lo, k_hi);" end
    if used.row then lines[#lines + 1] = "const Iv row = iv(q_lo - work->q_start, q_hi - work->q_start);" end
    if used.col then lines[#lines + 1] = "const Iv col = iv(k_lo - work->k_start, k_hi - work->k_start);" end
    if #lines > 0 then unit:need("iv") end
    for _, line in ipairs(w.lines) do lines[#lines + 1] = line end
    lines[#lines + 1] = ("return %s;"):format(text)
    local parameters = {"const LoomArgs *args", "const Work *work", "int q_lo", "int q_hi", "int k_lo", "int k_hi"}
    for _, side in ipairs {"queries", "keys"} do
        if reads and #reads[side] > 0 then parameters[#parameters + 1] = ("const %s *%s"):format(READS[side].type, side) end
    end
    return assemble(unit, "Class of the tile q_lo..q_hi x k_lo..k_hi: 0 empty, 1 partial, 2 full; 1 where it is not known.",
        "int tile_class", parameters, lines)
end

-- -- whole text ------------------------------------------------------------------------------------------------

local found_uses = setmetatable({}, {__mode = "k"}) -- of problems met: schedules ask for each of their candidates

local function find_uses(problem)
    local mask, score = problem.mask, problem.score
    local walk, bounds = interval.walk(mask), interval.bounds(mask)
    local spans = bounds and interval.walk(bounds).spans or walk.spans
    local exact_rows = spans ~= nil
    for _, conjunction in ipairs(spans or {}) do
        for _, atom in ipairs(conjunction) do exact_rows = exact_rows and #(atom.checks or {}) == 0 end
    end
    local function reads(name)
        return expression.any(mask, function(node) return node.op == "var" and node.name == name end)
    end
    local of_head = reads "h"
    local of_tile = select(2, interval.bounds(mask))
    if not exact_rows then of_tile = nil end
    local sides, whole = one_sided(of_tile or mask), one_sided(mask)
    return {
        mask = mask ~= nil, score = score ~= nil, walk = walk.kind, bounds = bounds ~= nil, num_spans = spans and #spans,
        listed = mask ~= nil and (walk.kind == "classify" or #spans > 1), exact_rows = exact_rows, even = is_even(mask),
        of_batch = reads "b", of_head = of_head, of_head_kv = not of_head and reads "hkv",
        of_tile = of_tile or mask, row_terms = #sides.rows > 0, column_terms = #sides.columns > 0,
        whole = {rows = #whole.rows > 0, columns = #whole.columns > 0},
        capped = score ~= nil and units.cap(score) ~= nil, one_tanh = score ~= nil and only_tanh(units.of(score)) ~= nil,
        at_diagonal = is_made_of_positions(score),
    }
end

function functions.uses(problem)
    found_uses[problem] = found_uses[problem] or find_uses(problem)
    return found_uses[problem]
end

local STATIC = {c = "static inline", cuda = "static __device__ __forceinline__"}

function functions.text(problem, language, wanted)
    local needed = {}
    local unit = {language = language, static = STATIC[language]}
    function unit:need(name) needed[name] = true end

    local only_classes = wanted and wanted.only == "classes"
    local nodes, list = {}, {}
    if problem.mask then nodes[#nodes + 1] = problem.mask end
    if problem.score and not only_classes then nodes[#nodes + 1] = problem.score end
    local ranges = {} -- arrays of which a class looks at all that a tile reads
    local function add_visible()
        list[#list + 1] = element_function(unit, "Whether query q sees key k: ", "bool visible", ELEMENT, problem.mask, false)
    end
    local uses = functions.uses(problem)
    local of_sides = wanted and wanted.sides and uses.of_tile
    if of_sides and wanted.whole then
        of_sides = (uses.whole.rows or uses.whole.columns) and problem.mask
    elseif not uses.bounds and uses.exact_rows then
        of_sides = nil -- spans tell of each element
    end
    if problem.mask and not only_classes and not (of_sides and wanted.whole) then add_visible() end
    for _, text in ipairs(of_sides and tile_mask_functions(unit, of_sides, wanted.sides) or {}) do list[#list + 1] = text end
    if problem.score and not only_classes then
        if wanted and wanted.units then
            for _, text in ipairs(tile_score_functions(unit, problem.score)) do list[#list + 1] = text end
        else
            list[#list + 1] = element_function(unit, "The score: ", "float score", ELEMENT_SCORE, problem.score, true)
        end
        if problem.backward and (not wanted or wanted.slope) then
            list[#list + 1] = element_function(unit, "d(score)/ds: ", "float score_slope", ELEMENT_SCORE,
                expression.slope(problem.score), true)
        end
    end
    local walk, bounds, rest = interval.walk(problem.mask), nil, nil
    if wanted and wanted.bounds then bounds, rest = interval.bounds(problem.mask) end
    local spans = bounds and interval.walk(bounds).spans or walk.spans
    if bounds then list[#list + 1] = range_function(unit, spans, "keys") end
    if walk.kind == "range" then
        if not wanted or wanted.keys then list[#list + 1] = range_function(unit, walk.spans, "keys") end
        if problem.backward and (not wanted or wanted.queries) then
            list[#list + 1] = range_function(unit, walk.spans, "queries")
        end
    elseif not wanted or wanted.classes then
        local function seen(part)
            if part == problem.mask then
                if only_classes then add_visible() end
                return "visible"
            end
            list[#list + 1] = element_function(unit, "Whether query q sees key k by what is made of blocks: ", "bool visible_by_blocks", ELEMENT, part, false)
            return "visible_by_blocks"
        end
        local reads = wanted and wanted.reads and class_reads(rest or problem.mask)
        for _, side in ipairs {"queries", "keys"} do
            if reads and #reads[side] > 0 then list[#list + 1] = reads_function(unit, side, reads[side]) end
        end
        local text = tile_class_function(unit, rest or problem.mask, (not wanted or wanted.arrays) and ranges, seen, reads)
        list[#list + 1] = text
    end
    local arrays = array_functions(unit, problem, nodes, ranges, table.concat(list, "\n"))

    local out = {}
    if spans then
        out[#out + 1] = ("enum { num_spans = %d };"):format(#spans)
        out[#out + 1] = "typedef struct Span {  // inclusive; empty when lo > hi\n    int lo, hi;\n} Span;"
    end
    for _, text in ipairs(helpers.texts(needed, language, unit.static)) do out[#out + 1] = text end
    for _, text in ipairs(arrays) do out[#out + 1] = text end
    for _, text in ipairs(list) do out[#out + 1] = text end
    return table.concat(out, "\n\n")
end

return functions
