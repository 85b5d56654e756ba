--[[ template: turns a template file into text.

  A line `//@ lua` is one Lua statement (or a piece of one: `//@ for i = 1, 2 do` ... `//@ end`).
  Any other line is copied; `${expr}` in it is one integer, identifier, type or literal: never a line of code.
  `//@ part("softmax")` inserts parts/softmax of the same target or, if it has none, of templates/parts, `//@ part("rows", {name = "q"})` with further names;
  `//@ text(t)` inserts text made by the generator.
  Both keep the indentation of the line they stand in.

  template.render(name, read, environment) -> text
    name         "mma/forward.cu"
    read(name)   -> text of a template, nil if there is none
    environment  table of names the Lua lines and holes may use; an undefined name is an error at its template line

Each template line becomes exactly one line of Lua, so Lua's own messages carry the template's line number. ]]

local template = {}

local HOLE = "%${([^{}]*)}"

-- A hole takes one token, possibly signed or qualified: code in a hole would escape the reader's eye.
local function check_hole(value, expression)
    if math.type(value) == "integer" then return tostring(value) end
    if type(value) == "string" and value:match("^[%w_%.%-%+ ]+[%*]?$") then return value end
    error(("hole ${%s}: '%s' is not an integer, identifier or type"):format(expression, tostring(value)), 2)
end

-- Lua source of a template: line n of the result is line n of the template.
local function translate(text)
    local lines = {}
    for line in (text:gsub("\n$", "") .. "\n"):gmatch("(.-)\n") do
        local indent, statement = line:match("^(%s*)//@%s?(.*)$")
        if statement then
            local inserts = statement:match("^part%(") or statement:match("^text%(")
            lines[#lines + 1] = inserts and ("_indent = %q; %s"):format(indent, statement) or statement
        else
            local pieces, at = {}, 1
            for from, expression, to in line:gmatch("()" .. HOLE .. "()") do
                pieces[#pieces + 1] = ("%q"):format(line:sub(at, from - 1))
                pieces[#pieces + 1] = ("_hole((%s), %q)"):format(expression, expression)
                at = to
            end
            pieces[#pieces + 1] = ("%q"):format(line:sub(at))
            lines[#lines + 1] = ("_line(%s)"):format(table.concat(pieces, " .. "))
        end
    end
    return table.concat(lines, "\n")
end

function template.render(name, read, environment)
    local out = {}
    local function emit(indent, text)
        for line in (text:gsub("\n$", "") .. "\n"):gmatch("(.-)\n") do
            out[#out + 1] = line == "" and "" or indent .. line
        end
    end
    local scope
    local function run(file)
        local text = read(file)
        if not text then error(("template '%s' does not exist"):format(file), 0) end
        local chunk, message = load(translate(text), "@templates/" .. file, "t", scope)
        if not chunk then error(message, 0) end
        chunk()
    end
    local base, locals = "", {}
    scope = setmetatable({
        _indent = "",
        _hole = check_hole,
        _line = function(line) out[#out + 1] = line == "" and "" or base .. line end,
        part = function(part, names)
            local outer_base, outer_locals = base, locals
            base, locals = base .. scope._indent, names or {}
            local own, shared = name:match("^[^/]+") .. "/parts/" .. part .. name:match("%.%w+$"), "parts/" .. part .. name:match("%.%w+$")
            run(read(own) and own or shared)
            base, locals = outer_base, outer_locals
        end,
        text = function(text) emit(base .. scope._indent, text) end,
    }, {__index = function(_, key)
        local value = locals[key]
        if value == nil then value = environment[key] end
        if value == nil then error(("undefined name '%s'"):format(key), 2) end
        return value
    end})
    run(name)
    return table.concat(out, "\n") .. "\n"
end

return template
