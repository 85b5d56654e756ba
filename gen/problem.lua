--[[ problem: the text of an attention problem, read and printed here alone.

  problem.parse(text)                 -> problem | nil, errors
  problem.print(problem)              -> canonical text; parse(print(p)) equals p, equal problems print equally
  problem.format_errors(text, errors) -> one paragraph per error: field (the first error's is the
                                         caller's to print), message, the line and a caret

  parse("bf16 d=128 causal backward") ->
      {text = "bf16 d=128 mask={k <= q} backward", dtype = "bf16", d = 128, dv = 128, mask = node, score = nil,
       params = {}, backward = true, deterministic = false}

A param is {name, dtype, dims}: dims is nil for a scalar, else a list of integers and of {word = "seq_q", div = 64}, which
stands for ceil(seq_q/64), without div for the word itself. params are in the order of their names; that order is their slots.

An error is {field, offset, message, status}: offset counts bytes from 0, status is "INVALID" or, for what is well said
but not built, "UNSUPPORTED". All errors of a text are found at once. Called by main. ]]

local expression = require "expression"
local forms = require "forms"

local problem = {}

local MAX_TEXT = 8192
local MAX_PARAMS, MAX_DIMS, MAX_NAME = 32, 4, 40
local MIN_HEAD, MAX_HEAD, HEAD_STEP = 8, 256, 8

local DTYPES = {bf16 = true, fp16 = true, fp32 = true}
local FLAGS = {causal = true, backward = true, deterministic = true}
local KEYS = {d = true, mask = true, score = true, params = true}
-- Part of the grammar from the first day, so that they are never taken for something else.
local NOT_YET = {e4m3 = true, grad = true, out = true, kv = true, dropout = true, sink = true, varlen = true,
                 paged = true, lse = true, rope = true}
local EXPRESSION_KEYS = {mask = true, score = true}

local STORAGE = {i32 = true, i64 = true, u8 = true, bool = true, f32 = true, f16 = true, bf16 = true}
local SCALAR = {i32 = true, f32 = true, bool = true}
local SHAPE_WORDS = {batch = true, heads_q = true, heads_kv = true, seq_q = true, seq_k = true}
local CONSTANTS = {["true"] = true, ["false"] = true, inf = true}

local quote = expression.quote

local function names(...)
    local list = {}
    for _, set in ipairs {...} do
        for name in pairs(set) do list[#list + 1] = name end
    end
    table.sort(list)
    return list
end

-- -- reading ---------------------------------------------------------------------------------------------------

--[[ Splits the text into words: {name, offset, value, value_offset, braced}; offsets count from 0. ]]
local function split(text, report)
    local words, pos = {}, 1
    while true do
        pos = text:find("[^ \t\r\n]", pos)
        if not pos then return words end
        local name = text:match("^[%w_]+", pos)
        if not name then
            local junk = text:match("^[^%w_ \t\r\n]+", pos)
            report("problem", pos - 1, ("%s is not a word; words are dtype, name=value or name={...}"):format(quote(junk)))
            pos = pos + #junk
        else
            local word = {name = name, offset = pos - 1}
            words[#words + 1] = word
            pos = pos + #name
            local equals = text:match("^[ \t\r\n]*=[ \t\r\n]*()", pos)
            if equals then
                pos = equals
                word.value_offset = pos - 1
                if text:sub(pos, pos) == "{" then
                    local close = text:find("}", pos, true)
                    if not close then
                        report("problem." .. name, pos - 1, "this { is never closed by }")
                        close = #text + 1
                        word.unclosed = true
                    end
                    word.braced, word.first, word.last = true, pos + 1, close - 1
                    word.value = text:sub(pos + 1, close - 1)
                    pos = close + 1
                else
                    word.value = text:match("^[^ \t\r\n]*", pos)
                    pos = pos + #word.value
                end
            end
        end
    end
end

local function read_head_dim(text, field, offset, report)
    local value = #text <= 9 and text:match("^%d+$") and math.tointeger(tonumber(text))
    if not value then
        report(field, offset, ("head dim %s is not a number; write d=128, or d=192:128 for another dim of v"):format(quote(text)))
    elseif value == 0 or value % HEAD_STEP ~= 0 or value < MIN_HEAD or value > MAX_HEAD then
        report(field, offset, ("head dim %d: it must be a multiple of %d from %d to %d"):format(value, HEAD_STEP, MIN_HEAD, MAX_HEAD),
            value > 0 and "UNSUPPORTED" or "INVALID")
        value = nil
    end
    return value
end

local function read_dims(word, report)
    if word.braced then
        report("problem.d", word.value_offset, "head dims are written d=128 or d=192:128, without braces")
        return nil
    end
    local first, colon, second = word.value:match("^([^:]*)(:?)(.*)$")
    local d = read_head_dim(first, "problem.d", word.value_offset, report)
    local dv = d
    if colon ~= "" then dv = read_head_dim(second, "problem.d", word.value_offset + #first + 1, report) end
    return d, dv
end

-- One dimension of an array param: an integer, a shape word or ceil(word/N).
local function read_array_dim(text, offset, field, report)
    local word, div = text:match("^ceil%(%s*([%a_][%w_]*)%s*/%s*(%d+)%s*%)$")
    word = word or text:match("^[%a_][%w_]*$")
    if word then
        if not SHAPE_WORDS[word] then
            report(field, offset, ("dimension %s is none of %s%s"):format(quote(word), table.concat(names(SHAPE_WORDS), " "),
                expression.suggest(word, names(SHAPE_WORDS))))
            return nil
        end
        local by = div and #div <= 10 and math.tointeger(tonumber(div)) or not div and 1
        if not by or by < 1 or by > expression.I32_MAX then
            report(field, offset, ("dimension %s: the divisor must be 1 .. %d"):format(quote(text), expression.I32_MAX))
            return nil
        end
        return {word = word, div = by > 1 and by or nil}
    end
    local size = text:match("^%d+$") and #text <= 10 and math.tointeger(tonumber(text))
    if not size or size < 1 or size > expression.I32_MAX then
        report(field, offset, ("dimension %s is not 1 .. %d, a shape word (%s) or ceil(word/N)"):format(quote(text),
            expression.I32_MAX, table.concat(names(SHAPE_WORDS), " ")))
        return nil
    end
    return size
end

local function check_param_name(name, offset, seen, field, report)
    local what
    if expression.variables[name] then what = "a variable of the algebra"
    elseif expression.functions[name] then what = "a function of the algebra"
    elseif forms.by_name[name] then what = "a named form"
    elseif CONSTANTS[name] then what = "a constant"
    elseif seen[name] then what = "already declared"
    elseif #name > MAX_NAME then what = ("longer than %d characters"):format(MAX_NAME)
    elseif not name:find("^[%a_]") then what = "no name: it must begin with a letter"
    end
    if what then report(field, offset, ("param %s is %s"):format(quote(name), what)) end
    return what == nil
end

-- Reads `name: dtype[dims], ...` into a list and a table by name.
local function read_params(text, word, report)
    local field = "problem.params"
    local list, by_name = {}, {}
    if not word.braced then
        report(field, word.value_offset or word.offset, "write params={name: dtype[dims], name: dtype}")
        return list, by_name
    end
    local pos = word.first
    local stop = word.last
    local function skip() pos = text:find("[^ \t\r\n]", pos) or #text + 1 end
    local function fail(message)
        report(field, math.min(pos, stop + 1) - 1, message)
        return list, by_name
    end
    skip()
    if pos > stop then return fail("params is empty: leave it out, or write params={name: dtype[dims]}") end
    while true do
        local name, after = text:match("^([%w_]+)()", pos)
        if not name or pos > stop then return fail("expected the name of a param") end
        local name_offset = pos - 1
        pos = after
        skip()
        if pos > stop or text:sub(pos, pos) ~= ":" then return fail(("expected : and a dtype after %s"):format(quote(name))) end
        pos = pos + 1
        skip()
        local dtype = text:match("^[%w_]+", pos)
        if not dtype or pos > stop then return fail(("expected the dtype of %s"):format(quote(name))) end
        local dtype_offset = pos - 1
        pos = pos + #dtype
        skip()
        local param = {name = name, dtype = dtype, offset = name_offset}
        local right = check_param_name(name, name_offset, by_name, field, report)
        if not STORAGE[dtype] then
            report(field, dtype_offset, ("dtype %s of %s is none of %s%s"):format(quote(dtype), quote(name),
                table.concat(names(STORAGE), " "), expression.suggest(dtype, names(STORAGE))))
            right = false
        end
        if pos <= stop and text:sub(pos, pos) == "[" then
            param.dims = {}
            local close = text:find("]", pos, true)
            if not close or close > stop then return fail(("the [ of %s is never closed by ]"):format(quote(name))) end
            local inside, base = text:sub(pos + 1, close - 1), pos
            for start, part in (inside .. ","):gmatch("()([^,]*),") do
                local lead, body = part:match("^(%s*)(.-)%s*$")
                local dim = read_array_dim(body, base + start - 1 + #lead, field, report)
                right = right and dim ~= nil
                param.dims[#param.dims + 1] = dim or 1
            end
            if #param.dims > MAX_DIMS then
                report(field, base - 1, ("%s has %d dimensions; at most %d"):format(quote(name), #param.dims, MAX_DIMS))
                right = false
            end
            pos = close + 1
        elseif STORAGE[dtype] and not SCALAR[dtype] then
            report(field, dtype_offset, ("scalar param %s: i32, f32 or bool, not %s"):format(quote(name), dtype))
            right = false
        end
        param.broken = not right
        if not by_name[name] then
            list[#list + 1] = param
            by_name[name] = param
        end
        skip()
        if pos > stop then break end
        if text:sub(pos, pos) ~= "," then return fail(("expected , or } after %s"):format(quote(name))) end
        pos = pos + 1
        skip()
    end
    if #list > MAX_PARAMS then
        report(field, word.value_offset, ("%d params; at most %d"):format(#list, MAX_PARAMS))
    end
    return list, by_name
end

-- Parses the braces of mask or score; a wrong type is an error at the opening brace.
local function read_expression(text, word, by_name, used, errors)
    local field = "problem." .. word.name
    if not word.braced then
        errors[#errors + 1] = {field = field, offset = word.value_offset or word.offset,
                               message = ("an expression stands in braces: %s={...}"):format(word.name)}
        return nil
    end
    if word.unclosed then return nil end
    local node = expression.parse(text, {first = word.first, last = word.last, params = by_name, forms = forms.by_name,
        score = word.name == "score", field = field, errors = errors, used = used})
    if not node then return nil end
    local wanted = word.name == "mask" and "bool" or "f32"
    if node.type == "i32" and wanted == "f32" then node = expression.make("f32", {node}) end
    if node.type ~= wanted then
        errors[#errors + 1] = {field = field, offset = word.value_offset,
                               message = ("a %s must be %s; this is %s"):format(word.name, wanted, node.type)}
        return nil
    end
    return node
end

-- Checks each word by itself and keeps the first of each kind.
local function sort_words(words, report)
    local found = {}
    for _, word in ipairs(words) do
        local name = word.name
        local kind = (DTYPES[name] or name == "e4m3") and "dtype" or name == "causal" and "mask" or name
        if NOT_YET[name] then
            report("problem." .. name, word.offset, ("%s is not yet supported"):format(name), "UNSUPPORTED")
            if name == "e4m3" then found.dtype = found.dtype or word end
        elseif not (DTYPES[name] or FLAGS[name] or KEYS[name]) then
            report("problem", word.offset, ("unknown word %s%s"):format(quote(name),
                expression.suggest(name, names(DTYPES, FLAGS, KEYS, NOT_YET))))
        elseif KEYS[name] and not word.value then
            report("problem." .. name, word.offset, ("%s needs a value: %s"):format(name,
                name == "d" and "d=128" or name .. "={...}"))
            found[kind] = found[kind] or {missing = true}
        elseif not KEYS[name] and word.value then
            report("problem." .. name, word.value_offset, ("%s takes no value"):format(name))
            found[kind] = found[kind] or word
        elseif found[kind] then
            local before = found[kind].name
            report("problem." .. kind, word.offset, before == name and ("%s is given twice"):format(name)
                or before and ("%s is given beside %s"):format(name, before) or ("%s is given twice"):format(name))
        else
            found[kind] = word
        end
    end
    return found
end

-- Reports params that the mask and the score do not depend on; returns them in slot order.
local function settle_params(list, used, nodes, report)
    local needed = {}
    for _, node in ipairs(nodes) do
        expression.walk(node, function(at)
            if at.param then needed[at.name] = true end
        end)
    end
    local params = {}
    for _, param in ipairs(list) do
        if not used[param.name] then
            report("problem.params", param.offset, ("param %s is never used"):format(quote(param.name)))
        elseif not needed[param.name] then
            report("problem.params", param.offset, ("param %s changes nothing: its terms fold away"):format(quote(param.name)))
        end
        params[#params + 1] = param
    end
    table.sort(params, function(a, b) return a.name < b.name end)
    return params
end

function problem.parse(text)
    local errors = {}
    local function report(field, offset, message, status)
        errors[#errors + 1] = {field = field, offset = offset, message = message, status = status}
    end
    local function finish(result)
        if #errors == 0 then return result end
        for i, err in ipairs(errors) do
            err.status, err.order = err.status or "INVALID", i
        end
        table.sort(errors, function(a, b)
            if a.offset ~= b.offset then return a.offset < b.offset end
            return a.order < b.order
        end)
        return nil, errors
    end
    if #text > MAX_TEXT then
        report("problem", MAX_TEXT, ("the text has %d bytes; at most %d"):format(#text, MAX_TEXT))
        return finish()
    end
    local found = sort_words(split(text, report), report)
    local result = {params = {}, backward = found.backward ~= nil,
        deterministic = found.deterministic ~= nil and found.backward ~= nil} -- a forward always is
    if found.dtype then
        result.dtype = found.dtype.name
    else
        report("problem.dtype", #text, "the dtype is missing: bf16, fp16 or fp32")
    end
    if not found.d then
        report("problem.d", #text, "the head dim is missing: d=128, or d=192:128 for another dim of v")
    elseif not found.d.missing then
        result.d, result.dv = read_dims(found.d, report)
    end
    local list, by_name, used = {}, {}, {}
    if found.params and not found.params.missing then list, by_name = read_params(text, found.params, report) end
    local nodes, sound = {}, true
    for _, key in ipairs {"mask", "score"} do
        local word = found[key]
        local node
        if word and word.name == "causal" then
            node = expression.parse("causal", {params = {}, forms = forms.by_name, field = "problem.mask", errors = errors, used = {}})
        elseif word and not word.missing then
            node = read_expression(text, word, by_name, used, errors)
            sound = sound and node ~= nil
        end
        nodes[#nodes + 1] = node
        result[key] = node
    end
    if result.mask and result.mask.op == "const" and result.mask.value then result.mask = nil end
    if result.score and result.score.op == "var" then result.score = nil end
    if sound then result.params = settle_params(list, used, nodes, report) end
    if #errors > 0 then return finish() end
    for _, param in ipairs(result.params) do param.offset, param.broken = nil, nil end
    result.text = problem.print(result)
    if #result.text > MAX_TEXT then
        report("problem", 0, ("the canonical text has %d bytes; at most %d"):format(#result.text, MAX_TEXT))
    end
    return finish(result)
end

-- -- printing --------------------------------------------------------------------------------------------------

-- Text of one dimension: "64", "seq_q" or "ceil(seq_q/64)".
function problem.print_dim(dim)
    if type(dim) ~= "table" then return tostring(dim) end
    if not dim.div then return dim.word end
    return ("ceil(%s/%d)"):format(dim.word, dim.div)
end

local function print_param(param)
    if not param.dims then return ("%s: %s"):format(param.name, param.dtype) end
    local dims = {}
    for i, dim in ipairs(param.dims) do dims[i] = problem.print_dim(dim) end
    return ("%s: %s[%s]"):format(param.name, param.dtype, table.concat(dims, ", "))
end

function problem.print(p)
    local words = {p.dtype, "d=" .. p.d .. (p.dv ~= p.d and ":" .. p.dv or "")}
    local function add(word) words[#words + 1] = word end
    if p.mask then add(("mask={%s}"):format(expression.print(p.mask))) end
    if p.score then add(("score={%s}"):format(expression.print(p.score))) end
    if #p.params > 0 then
        local params = {}
        for i, param in ipairs(p.params) do params[i] = print_param(param) end
        add(("params={%s}"):format(table.concat(params, ", ")))
    end
    if p.backward then add("backward") end
    if p.deterministic then add("deterministic") end
    return table.concat(words, " ")
end

-- -- errors ----------------------------------------------------------------------------------------------------

local MAX_COLUMNS, MAX_SHOWN = 100, 20

-- The line that holds offset, cut around it, and the column of the caret in it, counted from 0.
local function excerpt(text, offset)
    local first = 1
    for newline in text:gmatch("()\n") do
        if newline <= offset then first = newline + 1 end
    end
    local line = text:sub(first, (text:find("\n", first, true) or #text + 1) - 1)
    line = line:gsub("\t", " "):gsub("\r", " "):gsub("[^\32-\126]", "?")
    local column = math.max(0, math.min(offset - first + 1, #line))
    if #line > MAX_COLUMNS then
        local start = math.max(0, math.min(column - MAX_COLUMNS // 2, #line - MAX_COLUMNS))
        line = (start > 0 and "..." or "") .. line:sub(start + 1, start + MAX_COLUMNS)
            .. (start + MAX_COLUMNS < #line and "..." or "")
        column = column - start + (start > 0 and 3 or 0)
    end
    return line, column
end

function problem.format_errors(text, errors)
    local lines = {}
    for i, err in ipairs(errors) do
        if i > MAX_SHOWN then
            lines[#lines + 1] = ("and %d more errors"):format(#errors - MAX_SHOWN)
            break
        end
        local line, column = excerpt(text, err.offset)
        lines[#lines + 1] = (i > 1 and err.field .. ": " or "") .. err.message
        lines[#lines + 1] = "    " .. line
        lines[#lines + 1] = "    " .. (" "):rep(column) .. "^"
    end
    return table.concat(lines, "\n")
end

return problem
