-- wgmma: the text around one matrix instruction, whole for small ones and by its operands for all widths.

local wgmma = require "wgmma"

local tests = {}

local function equal(a, b)
    if a ~= b then error(("%s\nis not\n%s"):format(tostring(a), tostring(b)), 2) end
end

function tests.queries_from_shared_memory()
    equal(wgmma.text{name = "qk", comment = "s = Q K^T", columns = 24, dtype = "bf16", a = {"shared", {0, 2}}, b = {0, 4}, first = true}, [[
// s = Q K^T
#define QK_SUMS \
    "{%0, %1, %2, %3, %4, %5, %6, %7, " \
    "%8, %9, %10, %11}"
static __device__ __forceinline__ void qk(float (&sum)[12], unsigned a, unsigned b) {
    asm volatile(
        "{.reg .pred add; .reg .b32 at; .reg .b64 a, b;"
        "setp.ne.b32 add, 0, 0;"
        "add.u32 at, %13, 0; mov.b64 b, {at, %14}; add.u32 at, %12, 0; mov.b64 a, {at, %14};"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 " QK_SUMS ", a, b, add, 1, 1, 0, 0;"
        "setp.eq.b32 add, 0, 0;"
        "add.u32 at, %13, 4; mov.b64 b, {at, %14}; add.u32 at, %12, 2; mov.b64 a, {at, %14};"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 " QK_SUMS ", a, b, add, 1, 1, 0, 0;}"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3]), "=f"(sum[4]), "=f"(sum[5]), "=f"(sum[6]), "=f"(sum[7]),
          "=f"(sum[8]), "=f"(sum[9]), "=f"(sum[10]), "=f"(sum[11])
        : "r"(a), "r"(b), "r"(operand_high));
}]])
end

function tests.weights_from_registers()
    equal(wgmma.text{name = "pv", comment = "o += P V", columns = 16, dtype = "fp16", a = {"registers"}, b = {0, 128}, transposed = true}, [[
// o += P V
#define PV_SUMS \
    "{%0, %1, %2, %3, %4, %5, %6, %7}"
static __device__ __forceinline__ void pv(float (&sum)[8], const unsigned (&a)[8], unsigned b) {
    asm volatile(
        "{.reg .pred add; .reg .b32 at; .reg .b64 b;"
        "setp.eq.b32 add, 0, 0;"
        "add.u32 at, %16, 0; mov.b64 b, {at, %17};"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " PV_SUMS ", {%8, %9, %10, %11}, b, add, 1, 1, 1;"
        "add.u32 at, %16, 128; mov.b64 b, {at, %17};"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " PV_SUMS ", {%12, %13, %14, %15}, b, add, 1, 1, 1;}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]),
          "r"(b), "r"(operand_high));
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

-- Every width an instruction has, and some depths: each sum is named once, in order, and each operand has its value.
function tests.operands_of_all_widths()
    for columns = 8, 256, 8 do
        for steps = 1, 3 do
            for _, first in ipairs {true, false} do
                for _, a in ipairs {"shared", "registers"} do
                    local offsets = table.pack(table.unpack({0, 2, 4}, 1, steps))
                    local text, sums = wgmma.text{name = "f", comment = "", columns = columns, dtype = "bf16", first = first,
                                                  a = a == "shared" and {a, offsets} or {a}, b = offsets}, columns // 2
                    counts(text:match "#define F_SUMS(.-)static", "%%(%d+)", sums)
                    counts(text, (first and "=" or "+") .. 'f"%(sum%[(%d+)%]%)', sums)
                    counts(text, '"r"%(a%[(%d+)%]%)', a == "shared" and 0 or 4 * steps)
                    equal(select(2, text:gsub(("wgmma.mma_async.sync.aligned.m64n%dk16."):format(columns), "")), steps)
                    equal(text:find(("(&sum)[%d]"):format(sums), 1, true) ~= nil, true)
                    local most = 0
                    for number in text:gmatch "%%(%d+)" do most = math.max(most, tonumber(number)) end
                    equal(most, sums + (a == "shared" and 2 or 4 * steps + 1)) -- the upper word
                end
            end
        end
    end
end

-- The bit that transposes B comes last. A in shared memory has one too, 0 as queries lie with their depth contiguous.
function tests.transposed_operands()
    local function tail(a, transposed)
        return wgmma.text{name = "f", comment = "", columns = 8, dtype = "bf16", a = {a, {0}}, b = {0}, transposed = transposed}
            :match "add(, 1, 1[^;]*);}"
    end
    equal(tail("shared", false), ", 1, 1, 0, 0")
    equal(tail("shared", true), ", 1, 1, 0, 1")
    equal(tail("registers", false), ", 1, 1, 0")
    equal(tail("registers", true), ", 1, 1, 1")
end

return tests
