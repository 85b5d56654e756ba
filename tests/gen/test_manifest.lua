-- manifest: what entries become, and what is said of those that are wrong. Limits are tested in tests/test_generator.c.

local manifest = require "manifest"

local tests = {}

local function read(text) return manifest.read(text, "kernels.lua", pcall) end

local function expect_fault(text, ...)
    local entries, messages = read(text)
    assert(not entries, "no fault was found in: " .. text)
    for _, words in ipairs {...} do
        assert(messages:find(words, 1, true), ("'%s' is not in: %s"):format(words, messages))
    end
end

function tests.entries_are_read()
    local entries = assert(read [[
local list = {"fp16 d=64 causal"}
for _, d in ipairs {64, 192} do
    list[#list + 1] = {("bf16 backward d=%d causal"):format(d), target = "mma", archs = {"80", "sm_90a"},
                       schedule = "tile=64x64", schedule_backward = "tile=32x32", hint = {seq_k = 7}}
end
return list
]])
    assert(#entries == 3)
    local first, last = entries[1], entries[3]
    assert(first.problem == "fp16 d=64 causal" and first.place == "kernels.lua:1")
    assert(not first.archs and not first.target and not first.schedule and not first.hint)
    assert(last.problem == "bf16 backward d=192 causal" and last.place == "kernels.lua:3")
    assert(last.target == "mma" and last.schedule == "tile=64x64" and last.schedule_backward == "tile=32x32")
    assert(table.concat(last.archs, " ") == "sm_80 sm_90" and last.hint.seq_k == 7 and last.hint.batch == 0)
end

function tests.entries_are_for_each_arch()
    local entries = assert(read 'return {"bf16 d=64", {"bf16 d=80", archs = {"sm_90"}}, {"bf16 d=96", archs = {"sm_120"}}}')
    local list, text = manifest.expand(entries, assert(manifest.rows "80,sm_90a,sm_90")), {}
    for i, entry in ipairs(list) do text[i] = entry.problem .. " " .. tostring(entry.arch) end
    text = table.concat(text, "; ")
    assert(text == "bf16 d=64 sm_80; bf16 d=64 sm_90; bf16 d=80 sm_90; bf16 d=96 nil", text)
    for names, words in pairs {["sm_80,"] = "arch '' is not known", ["sm_8"] = "'sm_8'", host = "where they run"} do
        local rows, message = manifest.rows(names)
        assert(not rows and message:find(words, 1, true), message)
    end
end

-- Texts put together in several places are told apart by their number alone.
function tests.places_that_are_not_known_are_not_guessed()
    local entries = assert(read [[
local a = "bf16 d=" .. 64
local b = "bf16 d=" .. 80
local c = ("%s d=%d backward"):format("fp16", 64)
return {a, b, {"fp16 d=64"}, c}
]])
    assert(entries[4].place == "kernels.lua:3", entries[4].place)
    local same = assert(read "return {'bf16 d=64',\n{'bf16 d=64'},\n{'bf16 d=64'}}")
    assert(same[3].place == "kernels.lua: entry 3", same[3].place)
    assert(entries[1].place == "kernels.lua: entry 1" and entries[3].place == "kernels.lua:4", entries[3].place)
end

function tests.faults_of_entries_name_line_entry_and_field()
    expect_fault('return {\n  "bf16 d=64",\n  "bf16 d=7",\n  {"fp16 d=64 mask={k <}"}}',
                 'kernels.lua:3: entry 2, "bf16 d=7": problem.d: ', 'kernels.lua:4: entry 3, "fp16 d=64 mask={k <}": problem.mask: ')
    expect_fault('return {{"bf16 d=64", schedul = "x"}}', "kernels.lua:1: entry 1", "field: 'schedul' is not known",
                 "known: archs hint schedule schedule_backward target")
    expect_fault('return {{"bf16 d=64", schedule = 7}}', "schedule: is 7, it must be a text")
    expect_fault('return {{"bf16 d=64", target = "host"}}', "target: is 'host', it must be 'mma' or 'hopper'")
    expect_fault('return {{"bf16 d=64", archs = {"sm_81"}}}', "archs: is a table", "arch 'sm_81' is not known; known: sm_75")
    expect_fault('return {{"bf16 d=64", archs = {"host"}}}', "archs: ")
    expect_fault('return {{"bf16 d=64", archs = "sm_80"}}', "archs: is 'sm_80', it must be a list of archs")
    expect_fault('return {{"bf16 d=64", hint = {seq = 7}}}', "hint: is a table, it must be a table of the sizes batch")
    expect_fault('return {{"bf16 d=64", hint = {seq_q = -1}}}', "hint: ")
    expect_fault('return {{"bf16 d=64", hint = {seq_q = 0.5}}}', "hint: ")
    expect_fault("return {7}", "kernels.lua: entry 1: problem: is 7, it must be a problem text")
    expect_fault("return {{target = 'mma'}}", "entry 1: problem: is nil")
end

-- A text that begins like that of another line is not taken for it.
function tests.lines_are_those_of_their_literals()
    expect_fault("local list = {'bf16 d=64 causl'}\nfor _, d in ipairs {64} do\n    list[2] = {('bf16 d=%d causal backward'):format(d), x = 1}\n"
                 .. "end\nreturn list", "kernels.lua:1: entry 1,", "kernels.lua:3: entry 2,")
    expect_fault("local list = {'bf16 d=64'}\nlist[2] = {'bf16 d=' .. 64 .. ' causal', x = 1}\nreturn list", "kernels.lua:2: entry 2,")
end

-- Neither in comments nor in parts of a longer text is there an entry's line.
function tests.comments_are_no_lines()
    expect_fault("-- 'bf16 d=64 x' is not there\nreturn {'bf16 d=64 x'} -- \"bf16 d=64 x\"", "kernels.lua:2: entry 1,")
    expect_fault("--[==[\n'bf16 d=64 x'\n]] ]==]\nlocal a = {'\\'', [=[\n]]]=], \"--\"}\nreturn {'bf16 d=64 x'}",
                 "kernels.lua:6: entry 1,")
    expect_fault("return {[[bf16 d=64 x]],\n'bf16 d=64\\z\n x'}", "kernels.lua:1: entry 1,")
end

function tests.long_files_are_read_at_once()
    local lines, start = {}, os.clock()
    for i = 1, 4000 do lines[i] = ("{'bf16 d=64 mask={k <= q + %d}'},"):format(i) end
    for i = 1, 200 do lines[4000 + i] = ("{('bf16 d=%%d mask={k <= q - %d}'):format(64)},"):format(i) end
    lines[#lines + 1] = "[[" .. ("x % "):rep(50000) .. "]]"
    local text = "return {\n" .. table.concat(lines, "\n") .. "\n}"
    expect_fault(text, "kernels.lua:4202: entry 4201")
    local entries = assert(read((text:gsub("%[%[.*%]%]", ""))))
    assert(entries[4000].place == "kernels.lua:4001" and entries[4200].place == "kernels.lua:4201", entries[4200].place)
    assert(os.clock() - start < 20, "that took too long")
end

-- A call of a C function is not cut short, so it is not begun.
function tests.long_calls_are_refused()
    for _, call in ipairs {"('').rep('', 1e18)", "(''):rep(1e18)", "string.rep('x', 7e6, 'yy')", "table.move({}, 1, 1e15, 2)",
                           "table.move({}, math.mininteger, math.maxinteger, 2)", "('a'):rep(40):find(('a-'):rep(40) .. 'b')",
                           "string.match(('a'):rep(3000), '.-.-b')", "('a'):rep(40):gsub(('a?'):rep(40) .. 'b', '')",
                           "('a'):rep(4000):gmatch('.-b')", "('x'):rep(1e6):find(('x'):rep(1e3) .. 'y', 1, true)"} do
        expect_fault("\nlocal x = " .. call, "kernels.lua:2: ", "could take more than 10000000 steps, the limit of manifests")
    end
    assert(read "local d = ('bf16 d=64'):match 'd=(%d+)' return {('x'):rep(0) .. ('fp16 d=%d'):format(d), (('bf16_d=64'):gsub('_', ' '))}")
    assert(#("x"):rep(1e8) == 1e8) -- the generator's own texts are as before
    expect_fault("string.rep = nil; error(('x'):rep(3))", "xxx")
end

function tests.faults_of_the_file_name_it()
    expect_fault("return {'bf16 d=64', nil, 'bf16 d=80'}", "kernels.lua: entry 2 is nil, but entry 3 is not")
    expect_fault("return {{'bf16 d=64', schedule = 'tile=64x64\\0'}}", "schedule: is 'tile=64x64\\0', it must be a text without")
    expect_fault("return {", "kernels.lua:1:")
    expect_fault("\nlocal x = nil + 1", "kernels.lua:2:")
    expect_fault("return", "kernels.lua: it returns nil, it must return a list of entries")
    expect_fault("return {}", "kernels.lua: the list is empty")
    expect_fault("return {'bf16 d=64', more = 'bf16 d=80'}", "keys other than 1 to 2")
    expect_fault("\nerror {}", "kernels.lua: it raised a table")
    expect_fault("\27Lua", "kernels.lua", "binary chunk")
end

-- Only what a list of texts takes is there, and libraries are copies.
function tests.nothing_else_is_seen()
    for _, name in ipairs {"io", "os", "debug", "load", "require", "dofile", "pcall", "setmetatable", "getmetatable", "collectgarbage",
                           "rawset", "_G", "read_template", "run_limited"} do
        expect_fault("\nlocal x = " .. name, "kernels.lua:2:", "name '" .. name .. "' is not defined")
    end
    expect_fault("return {math.random()}", "kernels.lua:1:", "'random'")
    assert(read "string.format = nil; table.concat = nil; x = 7; return {'bf16 d=64'}")
    assert(string.format and table.concat and not rawget(_G, "x"))
end

return tests
