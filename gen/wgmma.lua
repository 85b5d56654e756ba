--[[ wgmma: the text of the matrix instructions of target hopper.

  wgmma.text(name, comment, columns, dtype, a, transposed, first) -> a CUDA function around one wgmma.m64n<columns>k16
    a           "shared": operand A is read through a descriptor; "registers": from four registers
    transposed  operand B lies with its columns contiguous (V), not its depth (K)
    first       the accumulators are overwritten, not added to; they are outputs alone, so they hold no registers before

Operands and order: PTX ISA, "wgmma.mma_async"; descriptors: "Matrix Descriptor Format". ]]

local wgmma = {}

local PER_LINE = 8 -- operands on a line of text

local function lines_of(count, format, first)
    local lines = {}
    for i = 0, count - 1, PER_LINE do
        local items = {}
        for j = i, math.min(i + PER_LINE, count) - 1 do items[#items + 1] = format:format(first + j) end
        lines[#lines + 1] = table.concat(items, ", ")
    end
    return lines
end

function wgmma.text(name, comment, columns, dtype, a, transposed, first)
    local count = columns // 2 -- accumulators of a thread
    local element = dtype == "bf16" and "bf16" or "f16"
    local shared = a == "shared"
    local out = {
        "// " .. comment,
        ("static __device__ __forceinline__ void %s(float (&sum)[%d], %s, unsigned long long b) {"):format(
            name, count, shared and "unsigned long long a" or "const unsigned *a"),
        "    asm volatile(",
        ([[        "{.reg .pred add; setp.%s.b32 add, 0, 0;"]]):format(first and "ne" or "eq"),
        ([[        "wgmma.mma_async.sync.aligned.m64n%dk16.f32.%s.%s {"]]):format(columns, element, element),
    }
    local names = lines_of(count, "%%%d", 0)
    for i, line in ipairs(names) do
        out[#out + 1] = ([[        "%s%s"]]):format(line, i < #names and ", " or "},")
    end
    if shared then
        out[#out + 1] = ([[        " %%%d, %%%d, add, 1, 1, 0, %d;}"]]):format(count, count + 1, transposed and 1 or 0)
    else
        out[#out + 1] = ([[        " {%%%d, %%%d, %%%d, %%%d}, %%%d, add, 1, 1, %d;}"]]):format(count, count + 1, count + 2,
            count + 3, count + 4, transposed and 1 or 0)
    end
    local operands = lines_of(count, first and [["=f"(sum[%d])]] or [["+f"(sum[%d])]], 0)
    for i, line in ipairs(operands) do
        out[#out + 1] = (i == 1 and "        : " or "          ") .. line .. (i < #operands and "," or "")
    end
    out[#out + 1] = shared and [[        : "l"(a), "l"(b));]] or [[        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));]]
    out[#out + 1] = "}"
    return table.concat(out, "\n")
end

return wgmma
