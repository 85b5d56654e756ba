-- wgmma: the text around one matrix instruction, whole for small ones and by its operands for all widths.

local wgmma = require "wgmma"

local tests = {}

local function equal(a, b)
    if a ~= b then error(("%s\nis not\n%s"):format(tostring(a), tostring(b)), 2) end
end

function tests.queries_from_shared_memory()
    equal(wgmma.text("first_qk", "s = Q K^T", 24, "bf16", "shared", false, true), [[
// s = Q K^T
static __device__ __forceinline__ void first_qk(float (&sum)[12], unsigned long long a, unsigned long long b) {
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, 0, 0;"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11},"
        " %12, %13, add, 1, 1, 0, 0;}"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3]), "=f"(sum[4]), "=f"(sum[5]), "=f"(sum[6]), "=f"(sum[7]),
          "=f"(sum[8]), "=f"(sum[9]), "=f"(sum[10]), "=f"(sum[11])
        : "l"(a), "l"(b));
}]])
end

function tests.weights_from_registers()
    equal(wgmma.text("add_pv", "o += P V", 16, "fp16", "registers", true, false), [[
// o += P V
static __device__ __forceinline__ void add_pv(float (&sum)[8], const unsigned *a, unsigned long long b) {
    asm volatile(
        "{.reg .pred add; setp.eq.b32 add, 0, 0;"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7},"
        " {%8, %9, %10, %11}, %12, add, 1, 1, 1;}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}]])
end

-- The numbers that `pattern` captures in `text` are 0, 1, ... `count` - 1.
local function counts(text, pattern, count)
    local next_number = 0
    for number in text:gmatch(pattern) do
        equal(tonumber(number), next_number)
        next_number = next_number + 1
    end
    equal(next_number, count)
end

-- Every width an instruction has: each operand is named once, in order, and has its value.
function tests.operands_of_all_widths()
    for columns = 8, 256, 8 do
        for _, a in ipairs {"shared", "registers"} do
            for _, first in ipairs {true, false} do
                local text, sums = wgmma.text("f", "", columns, "bf16", a, false, first), columns // 2
                counts(text, "%%(%d+)", sums + (a == "shared" and 2 or 5))
                counts(text, (first and "=" or "+") .. 'f"%(sum%[(%d+)%]%)', sums)
                equal(select(2, text:gsub('f"%(sum', "")), sums)
                equal(text:find(("m64n%dk16."):format(columns), 1, true) ~= nil, true)
                equal(text:find(("(&sum)[%d]"):format(sums), 1, true) ~= nil, true)
            end
        end
    end
end

-- The bit that transposes B comes last. A in shared memory has one too, 0 as queries lie with their depth contiguous.
function tests.transposed_operands()
    local function tail(a, transposed)
        return wgmma.text("f", "", 8, "bf16", a, transposed, false):match "add(, 1, 1[^;]*);}"
    end
    equal(tail("shared", false), ", 1, 1, 0, 0")
    equal(tail("shared", true), ", 1, 1, 0, 1")
    equal(tail("registers", false), ", 1, 1, 0")
    equal(tail("registers", true), ", 1, 1, 1")
end

return tests
