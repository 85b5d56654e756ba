-- translate: the text of an emitted hopper kernel as C++ for emulate.h: every `asm` becomes a call. An instruction that
-- it does not know is an error.
--
--     translate(source, "attnloom_forward") -> text that exports `extern "C" void emu_kernel(const void *args)`
--
-- Called by tests/test_emulate.c.

-- A part of the instruction's text, and the call; $* is all operands, $1 the first.
local CALLS = {
    {"mbarrier.init", "emu_barrier_init($*);"},
    {"mbarrier.try_wait", "emu_barrier_wait($*);"},
    {"mbarrier.arrive.expect_tx", "emu_barrier_arrive($*);"},
    {"mbarrier.arrive.shared", "ptx_arrive($*);"},
    {"barrier.cta.sync %0, 256", "emu_named_barrier($1, 256, 1);"},
    {"barrier.cta.sync %0, 128", "emu_named_barrier($1, 128, 1);"},
    {"barrier.cta.red.or.pred out, %2, 256", "ptx_any_of_256($*);"},
    {"barrier.cta.arrive %0, 256", "emu_named_barrier($1, 256, 0);"},
    {"cp.async.bulk.tensor.5d.shared", "emu_load($*);"},
    {"cp.async.bulk.tensor.5d.global", "emu_store($*);"},
    {"cp.async.bulk.commit_group", ";"},
    {"cp.async.bulk.wait_group.read 0", "emu_stores_wait();"},
    {"fence.proxy.async", ";"},
    {"prefetch.tensormap", ";"},
    {"setmaxnreg", ";"},
    {"griddepcontrol", ";"},
    {"wgmma.fence", "emu_wgmma_fence();"},
    {"wgmma.commit_group", "emu_wgmma_commit();"},
    {"wgmma.wait_group", "emu_wgmma_wait($1);"},
    {"ldmatrix.sync.aligned.m8n8.x4.shared", "ptx_ldmatrix($*);"},
    {"stmatrix.sync.aligned.m8n8.x4.shared", "ptx_stmatrix($*);"},
    {"ex2.approx", "ptx_ex2($*);"},
    {"lg2.approx", "ptx_lg2($*);"},
    {"rcp.approx", "ptx_rcp($*);"},
    {"tanh.approx", "ptx_tanh($*);"},
    {"cvt.rn.bf16x2.f32", "ptx_pack_bf16($*);"},
    {"cvt.rn.f16x2.f32", "ptx_pack_fp16($*);"},
    {"ld.shared.v4.b32", "ptx_load_4_words($*);"},
    {"ld.shared.b32", "ptx_load_word($*);"},
    {"st.shared.v4.b32", "ptx_store_4_words_shared($*);"},
    {"st.shared.b32", "ptx_store_word($*);"},
    {"red.shared.or.b32", "ptx_or_word($*);"},
    {"st.global.v4.b32", "ptx_store_4_words($*);"},
    {"st.global.v4.f32", "ptx_put_4_floats($*);"},
    {"ld.relaxed.gpu.global.v4.f32", "ptx_get_4_floats($*);"},
    {"ld.acquire.gpu.global.u32 %0, [%1]", "emu_poll(); $1 = *($2);"},
    {"st.release.gpu.global.u32 [%0], %1", "*($1) = $2;"},
    {"red.relaxed.gpu.global.add.v4.f32", "ptx_add_4_floats($*);"},
    {"cvt.f32.f16 %0, l", "ptx_unpack_fp16($*);"},
    {"cvt.f32.f16 %0, %1", "ptx_fp16_to_float($*);"},
    {"mov.b32 %0, %1", "$1 = $2;"},
    {"prmt.b32 %0, %1, 0, 0xbb99", "ptx_signs_of_halves($*);"},
    {"fma.rn.bf16x2 %0, %1, %2, %0", "ptx_zero_fma_bf16($*);"},
    {"fma.rn.f16x2 %0, %1, %2, %0", "ptx_zero_fma_fp16($*);"},
}

-- Index behind the parenthesis that closes the one at `from`; strings may hold others.
local function behind(text, from)
    local depth, at = 0, from
    while true do
        local c = text:sub(at, at)
        if c == "" then error("no end of: " .. text:sub(from, from + 80)) end
        if c == '"' then
            repeat
                at = at + (text:sub(at, at) == "\\" and 2 or 1)
            until text:sub(at, at) == '"'
        end
        depth = depth + (c == "(" and 1 or c == ")" and -1 or 0)
        at = at + 1
        if depth == 0 then return at end
    end
end

-- "text" MACRO "more" : "=r"(x) : "r"(y + 1) -> the instruction, with the macro's name, and the expressions of its operands.
local function parts(body)
    local words, at = {}, 1
    while true do
        local _, stop, word = body:find('^%s*"([^"]*)"', at)
        if not stop then _, stop, word = body:find("^%s*([%u_]+)", at) end
        if not stop then break end
        words[#words + 1] = word
        at = stop + 1
    end
    local operands = {}
    while true do
        local _, open = body:find('"[=+]?[rflhn]"%s*%(', at)
        if not open then break end
        at = behind(body, open)
        operands[#operands + 1] = body:sub(open + 1, at - 2)
    end
    return table.concat(words), operands
end

-- The array of which operands first..last are the elements from some first one on.
local function array_of(operands, first, last)
    local name, from = operands[first]:match("^(.*)%[(%d+)%]$")
    for i = first, last do
        local wanted = ("%s[%d]"):format(name, tonumber(from) + i - first)
        if operands[i] ~= wanted then error(("wgmma: operand %s, not %s"):format(operands[i], wanted)) end
    end
    return "&" .. operands[first]
end

-- All steps of a product (gen/wgmma.lua). What is between two instructions says from which operands descriptors are made.
local function wgmma(text, operands)
    local calls, adds = {}, nil
    local high = operands[#operands]
    local function descriptor(before, name)
        local at, offset, upper = before:match("add%.u32 at, %%(%d+), (%d+); mov%.b64 " .. name .. ", {at, %%(%d+)};")
        if not at or operands[upper + 1] ~= high then error("wgmma: what is descriptor " .. name .. "? " .. before) end
        return ("ptx_words(%s + %d, %s)"):format(operands[at + 1], offset, high)
    end
    for before, n, dtype, a, transposed in text:gmatch(
        "(.-)wgmma%.mma_async%.sync%.aligned%.m64n(%d+)k16%.f32%.([bf16]+)%.[bf16]+ [%u_]+, (.-), b, add, 1, 1, ([%d, ]+);") do
        local sums = n // 2
        if before:find("setp.eq.b32 add, 0, 0;", 1, true) then adds = 1 end
        if before:find("setp.ne.b32 add, 0, 0;", 1, true) then adds = 0 end
        local first = a:match("^{%%(%d+), %%%d+, %%%d+, %%%d+}$")
        local transposed_a, transposed_b = transposed:match("^([01]), ([01])$")
        if first then transposed_a, transposed_b = "0", transposed:match("^[01]$") end
        if not adds or not (first or a == "a") or not transposed_b then error("wgmma of another form: " .. text) end
        calls[#calls + 1] = ("emu_wgmma(%d, %d, %d, %s, %s, %s, %s, %s);"):format(n, dtype == "bf16" and 1 or 0, adds,
            array_of(operands, 1, sums), first and array_of(operands, first + 1, first + 4) .. ", 0" or "nullptr, " .. descriptor(before, "a"),
            descriptor(before, "b"), transposed_a, transposed_b)
    end
    local _, num = text:gsub("wgmma%.mma_async", "")
    if #calls ~= num then error("wgmma of another form: " .. text) end
    return table.concat(calls, " ")
end

local function call_of(instruction, operands)
    if instruction == "" then return ";" end
    if instruction:find("wgmma.mma_async", 1, true) then return wgmma(instruction, operands) end
    for _, row in ipairs(CALLS) do
        if instruction:find(row[1], 1, true) then
            return (row[2]:gsub("%$(.)", function(which)
                return which == "*" and table.concat(operands, ", ") or operands[tonumber(which)]
            end))
        end
    end
    error("no emulation of: " .. instruction)
end

return function(source, symbol)
    local out, at = {'#include "device.h"\n'}, 1
    while true do
        local first, open = source:find("%f[%w_]asm%s*%(", at)
        local first_volatile, open_volatile = source:find("%f[%w_]asm volatile%s*%(", at)
        if not first or (first_volatile and first_volatile < first) then first, open = first_volatile, open_volatile end
        if not first then break end
        local stop = behind(source, open)
        out[#out + 1] = source:sub(at, first - 1)
        out[#out + 1] = call_of(parts(source:sub(open + 1, stop - 2)))
        at = source:find(";", stop, true) + 1
    end
    out[#out + 1] = source:sub(at)
    local text, num = table.concat(out):gsub("extern __shared__ [^\n]- shared%[%];", "unsigned char *const shared = emu_shared;")
    if num > 1 then error("the kernel does not declare its shared memory as expected") end
    return text .. ('\nextern "C" __attribute__((visibility("default"))) void emu_kernel(const void *args) { %s(*(const LoomArgs *)args); }\n')
        :format(symbol)
end
