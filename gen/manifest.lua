--[[ manifest: the kernels that are wanted ahead of time, as a Lua file that returns a list.

    local list = {"fp16 d=64 causal"}
    for _, d in ipairs {64, 80, 128} do
        list[#list + 1] = {("bf16 d=%d causal backward"):format(d), archs = {"sm_90a"}, hint = {seq_q = 8192, seq_k = 8192}}
    end
    return list

  manifest.read(text, name, run) -> {{problem=, archs=, target=, schedule=, schedule_backward=, hint=, place=}, ...} or nil, messages
  manifest.rows("sm_80,sm_90a")  -> rows of arch.lua, each once, or nil, message
  manifest.expand(entries, rows) -> an entry for each arch of rows that it is for, with arch= in place of archs; one that is for none
                                    of them comes once, without arch

An entry is a problem text, or a table with the problem text first and any of the fields below. problem comes back as written,
archs by their names in arch.lua, nil where the entry is for all archs; place, `kernels.lua:4`, is for messages. All faults of a file
are told at once, a line each. The file sees the names below and no others; `run(chunk)` calls it within limits and returns what
pcall does. Called by main. ]]

local arch = require "arch"
local problem_text = require "problem"

local manifest = {}

local FUNCTIONS = {"assert", "error", "ipairs", "next", "pairs", "select", "tonumber", "tostring", "type"}
local LIBRARIES = {math = math, string = string, table = table, utf8 = utf8}
local NOT_HERE = {random = true, randomseed = true} -- the same file gives the same kernels
local GLOBALS = _G

local TARGETS = {mma = true, hopper = true}
local SIZES = {batch = true, heads_q = true, heads_kv = true, seq_q = true, seq_k = true}

-- Steps that one call of a C function may take: there no instructions are counted, nor is the time looked at.
local MAX_STEPS = 10000000

local function size(value) return type(value) == "string" and #value or 0 end
local function number(value) return tonumber(value) or 0 end

-- Each part of a pattern that repeats, balances or refers back can stand for as many pieces as the text has places. Methods of
-- texts are limited themselves while this runs.
local function pattern_steps(text, pattern, plain)
    local loops = 1
    if type(pattern) == "string" and not plain then
        loops = loops + select(2, string.gsub(pattern, "[*+%-?]", "")) + select(2, string.gsub(pattern, "%%[bf%d]", ""))
    end
    return (size(pattern) + 1) * (size(text) + 1.0) ^ loops
end

local STEPS = {
    string = {
        rep = function(text, count, between) return number(count) * (size(text) + size(between) + 1.0) end,
        find = function(text, pattern, _, plain) return pattern_steps(text, pattern, plain) end,
        match = function(text, pattern) return pattern_steps(text, pattern) end,
        gmatch = function(text, pattern) return pattern_steps(text, pattern) end,
        gsub = function(text, pattern) return pattern_steps(text, pattern) end,
    },
    table = {move = function(_, first, last) return number(last) - (number(first) + 0.0) end},
}

-- Copies, so that nothing the file does to a library outlives it.
local function copy_of(name)
    local copy = {}
    for key, value in pairs(LIBRARIES[name]) do copy[key] = not NOT_HERE[key] and value or nil end
    for key, steps in pairs(STEPS[name] or {}) do
        local own = copy[key]
        copy[key] = function(...)
            if steps(...) > MAX_STEPS then
                error(("%s.%s could take more than %d steps, the limit of manifests"):format(name, key, MAX_STEPS), 2)
            end
            return own(...)
        end
    end
    return copy
end

local function environment()
    local names = {}
    for _, name in ipairs(FUNCTIONS) do names[name] = GLOBALS[name] end
    for name in pairs(LIBRARIES) do names[name] = copy_of(name) end
    return setmetatable(names, {__index = function(_, name)
        error(("name '%s' is not defined; a manifest has %s, math, string, table and utf8")
            :format(tostring(name), table.concat(FUNCTIONS, ", ")), 2)
    end})
end

-- run(chunk), with the methods of texts limited too.
local function run_with_limits(run, chunk)
    local of_texts = getmetatable ""
    local methods = of_texts.__index
    of_texts.__index = copy_of "string"
    local ok, list = run(chunk)
    of_texts.__index = methods
    return ok, list
end

local function is_text(value)
    return type(value) == "string" and not value:find("\0", 1, true) and value or nil, "a text without a byte 0"
end

-- What a field may hold: the value as it is handed on, or nil and what it should be.
local CHECKS = {
    schedule = is_text,
    schedule_backward = is_text,
    target = function(value)
        return TARGETS[value] and value, "'mma' or 'hopper'; kernels of target host are compiled where they run"
    end,
    archs = function(value)
        local rule, names = "a list of archs, such as {'sm_80', 'sm_90a'}", {}
        if type(value) ~= "table" or #value == 0 then return nil, rule end
        for i, name in ipairs(value) do
            local row, message = arch.get(name)
            if not row or row.name == "host" then return nil, rule .. (message and "; " .. message or "") end
            names[i] = row.name
        end
        return names
    end,
    hint = function(value)
        local rule = "a table of the sizes batch, heads_q, heads_kv, seq_q and seq_k, whole numbers from 0"
        if type(value) ~= "table" then return nil, rule end
        local shape = {}
        for name in pairs(SIZES) do shape[name] = 0 end
        for name, size in pairs(value) do
            if not SIZES[name] or math.type(size) ~= "integer" or size < 0 then return nil, rule end
            shape[name] = size
        end
        return shape
    end,
}
local FIELDS = {}
for name in pairs(CHECKS) do FIELDS[#FIELDS + 1] = name end
table.sort(FIELDS)

local function shown(value)
    return type(value) == "string" and "'" .. value:gsub("\0", "\\0") .. "'" or type(value) == "table" and "a table" or tostring(value)
end

-- Calls use(literal, line, behind) with each literal of a Lua text that is not in a comment; `behind` is the place after it.
local function each_literal(text, use)
    local place, line, counted = 1, 1, 1
    while true do
        local at = text:find("[%-\"'%[]", place)
        if not at then return end
        line = line + select(2, text:sub(counted, at - 1):gsub("\n", ""))
        counted = at
        local comment = text:sub(at, at + 1) == "--"
        local first = comment and at + 2 or at
        local level = text:match("^%[(=*)%[", first)
        local quote = not comment and text:match("^[\"']", at)
        if level then
            local stop, behind = text:find("]" .. level .. "]", first, true)
            if not comment then use(text:sub(first + #level + 2, stop - 1), line, behind + 1) end
            place = behind + 1
        elseif comment then
            place = text:find("\n", at, true) or #text + 1
        elseif quote then
            local stop = at
            repeat
                stop = text:find("[\\" .. quote .. "]", stop + 1)
                local escape = text:sub(stop, stop) == "\\"
                if escape then stop = stop + 1 end
            until not escape
            use(text:sub(at + 1, stop - 1), line, stop + 1)
            place = stop + 1
        else
            place = at + 1
        end
    end
end

-- The start and the end of a literal, around its format specifiers.
local function around(literal)
    local tail = #literal + 1
    for behind in literal:gmatch "%%[%d%-%.]*%a()" do tail = behind end
    return literal:sub(1, (literal:find("%", 1, true) or tail) - 1), literal:sub(tail)
end

-- line_of(problem) of a file: the line whose literal tells most of a problem, where there is one such line. A literal tells all,
-- what it has around its format specifiers or, where `..` puts more behind it, how the text begins.
local function line_finder(text)
    local LEAST = 4
    local whole, parts, by_ends = {}, {}, {}
    each_literal(text, function(literal, line, behind)
        local head, tail = around(literal)
        local known = whole[literal]
        whole[literal] = (known == nil or known == line) and line
        if not literal:find("%", 1, true) and not text:find("^%s*%.%.", behind) then return end
        local ends = head .. "\0" .. tail
        local part = by_ends[ends]
        if part then
            part.line = part.line == line and line
        else
            part = {head = head, tail = tail, line = line}
            by_ends[ends], parts[#parts + 1] = part, part
        end
    end)
    return function(problem)
        if whole[problem] ~= nil then return whole[problem] end
        local best, found = LEAST - 1, nil
        for _, part in ipairs(parts) do
            local told = #part.head + #part.tail
            if told >= best and told <= #problem and problem:sub(1, #part.head) == part.head
                and problem:sub(#problem - #part.tail + 1) == part.tail then
                found = (told > best or found == part.line) and part.line
                best = told
            end
        end
        return found
    end
end

-- One entry checked; what is wrong goes to `report`.
local function read_entry(entry, report)
    local problem = entry
    if type(entry) == "table" then problem = entry[1] end
    if type(problem) ~= "string" then
        return report(nil, "problem", ("is %s, it must be a problem text, such as {'bf16 d=128 causal'}"):format(shown(problem)))
    end
    local p, errors = problem_text.parse(problem)
    if not p then return report(problem, errors[1].field, problem_text.format_errors(problem, errors)) end
    local result = {problem = problem}
    if type(entry) == "string" then return result end
    local unknown = {}
    for name in pairs(entry) do
        if name ~= 1 and not CHECKS[name] then unknown[#unknown + 1] = shown(name) end
    end
    table.sort(unknown)
    if unknown[1] then
        report(problem, "field", ("%s is not known; known: %s"):format(table.concat(unknown, ", "), table.concat(FIELDS, " ")))
    end
    for _, name in ipairs(FIELDS) do
        if entry[name] ~= nil then
            local value, rule = CHECKS[name](entry[name])
            if not value then report(problem, name, ("is %s, it must be %s"):format(shown(entry[name]), rule)) end
            result[name] = value
        end
    end
    return result
end

function manifest.read(text, name, run)
    local function named(message) -- what Lua says has the line, unless it is about the whole
        if type(message) ~= "string" then message = "it raised " .. shown(message) end
        return message:find("^%S.*:%d+: ") and message or name .. ": " .. message
    end
    local chunk, message = load(text, "@" .. name, "t", environment())
    if not chunk then return nil, named(message) end
    local ok, list = run_with_limits(run, chunk)
    if not ok then return nil, named(list) end
    if type(list) ~= "table" then return nil, ("%s: it returns %s, it must return a list of entries"):format(name, shown(list)) end
    local entries, messages, count = {}, {}, 0
    for _ in pairs(list) do count = count + 1 end
    for i = 1, count do
        if list[i] == nil then
            for key in pairs(list) do
                if math.type(key) == "integer" and key > i then
                    return nil, ("%s: entry %d is nil, but entry %d is not"):format(name, i, key)
                end
            end
            return nil, ("%s: the list has %d entries and keys other than 1 to %d"):format(name, count, count)
        end
    end
    if count == 0 then return nil, name .. ": the list is empty" end
    local line_of = line_finder(text)
    for i, entry in ipairs(list) do
        local function report(problem, field, what)
            local line = problem and line_of(problem)
            messages[#messages + 1] = ("%s:%s entry %d%s: %s: %s"):format(name, line and line .. ":" or "", i,
                problem and (", \"%s\""):format(problem) or "", field, what)
        end
        entries[i] = read_entry(entry, report)
        if entries[i] then
            local line = line_of(type(entry) == "table" and entry[1] or entry)
            entries[i].place = line and ("%s:%d"):format(name, line) or ("%s: entry %d"):format(name, i)
        end
    end
    if messages[1] then return nil, table.concat(messages, "\n") end
    return entries
end

function manifest.rows(names)
    local rows, seen = {}, {}
    for name in (names .. ","):gmatch "(.-)," do
        local row, message = arch.get(name)
        if not row then return nil, message end
        if row.name == "host" then return nil, "kernels of target host are compiled where they run, not ahead" end
        if not seen[row] then rows[#rows + 1], seen[row] = row, true end
    end
    return rows
end

function manifest.expand(entries, rows)
    local list = {}
    for _, entry in ipairs(entries) do
        local wanted, used = {}, false
        for _, name in ipairs(entry.archs or {}) do wanted[name] = true end
        local function add(name)
            local copy = {}
            for key, value in pairs(entry) do copy[key] = value end
            copy.archs, copy.arch = nil, name
            list[#list + 1] = copy
        end
        for _, row in ipairs(rows) do
            if not entry.archs or wanted[row.name] then
                add(row.name)
                used = true
            end
        end
        if not used then add(nil) end
    end
    return list
end

return manifest
