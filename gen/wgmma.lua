--[[ wgmma: the text of the matrix products of target hopper.

  wgmma.text{name=, comment=, columns=, dtype=, a=, b=, transposed=, first=} -> a macro and a CUDA function around the
      wgmma.m64n<columns>k16 of a product, which start it
    a           {"registers"}: four a step hold operand A
                {"shared", offsets}: an operand in shared memory, with the offset of each step (parts/wgmma.cu); transposed = true:
                its rows lie contiguous, not its depth
    b           the offsets of operand B
    transposed  operand B lies with its columns contiguous (V), not its depth (K)
    high        the upper word of descriptors, operand_high if nil
    first       the first step overwrites the accumulators, which are outputs alone and hold no registers before

  wgmma.steps(depth, chunk_rows) -> the offsets of an operand's steps of 16: along its columns, in chunks of 64 with so many
      rows, or, without these, down its rows

All steps are one `asm`: the compiler takes an eighth longer where each is one of its own, with all accumulators as its
operands. Operands and order: PTX ISA, "wgmma.mma_async"; descriptors: "Matrix Descriptor Format". ]]

local wgmma = {}

local PER_LINE = 8 -- operands on a line of text

-- Items 0..count - 1 in lines, the first with `first` before it, the others with `other`; `stop` ends all but the last.
local function add_lines(out, count, format, first, other, stop, last_stop)
    for i = 0, count - 1, PER_LINE do
        local items = {}
        for j = i, math.min(i + PER_LINE, count) - 1 do items[#items + 1] = format:format(j) end
        out[#out + 1] = (i == 0 and first or other) .. table.concat(items, ", ") .. (i + PER_LINE < count and stop or last_stop)
    end
end

function wgmma.text(p)
    local sums, steps = p.columns // 2, #p.b -- accumulators of a thread
    local shared = p.a[1] == "shared"
    local num_a = shared and 1 or 4 * steps
    local b, high = sums + num_a, sums + num_a + 1 -- numbers of operands
    local element = p.dtype == "bf16" and "bf16" or "f16"
    local upper = p.high or "operand_high"
    local macro = p.name:upper() .. "_SUMS"
    local out = {"// " .. p.comment, "#define " .. macro .. " \\"}
    add_lines(out, sums, "%%%d", '    "{', '    "', ', " \\', '}"')
    out[#out + 1] = ("static __device__ __forceinline__ void %s(float (&sum)[%d], %s, unsigned b) {"):format(
        p.name, sums, shared and "unsigned a" or ("const unsigned (&a)[%d]"):format(num_a))
    out[#out + 1] = "    asm volatile("
    out[#out + 1] = ('        "{.reg .pred add; .reg .b32 at; .reg .b64 %sb;"'):format(shared and "a, " or "")
    for i = 1, steps do
        local adds = not (p.first and i == 1)
        if i == 1 or (p.first and i == 2) then
            out[#out + 1] = ('        "setp.%s.b32 add, 0, 0;"'):format(adds and "eq" or "ne")
        end
        local line = ('        "add.u32 at, %%%d, %d; mov.b64 b, {at, %%%d};'):format(b, p.b[i], high)
        local a = "a"
        if shared then
            line = line .. (' add.u32 at, %%%d, %d; mov.b64 a, {at, %%%d};'):format(sums, p.a[2][i], high)
        else
            local r = sums + 4 * (i - 1)
            a = ("{%%%d, %%%d, %%%d, %%%d}"):format(r, r + 1, r + 2, r + 3)
        end
        out[#out + 1] = line .. '"'
        out[#out + 1] = ('        "wgmma.mma_async.sync.aligned.m64n%dk16.f32.%s.%s " %s ", %s, b, add, 1, 1, %s%d;%s"'):format(
            p.columns, element, element, macro, a, shared and (p.a.transposed and "1, " or "0, ") or "", p.transposed and 1 or 0, i == steps and "}" or "")
    end
    add_lines(out, sums, p.first and '"=f"(sum[%d])' or '"+f"(sum[%d])', "        : ", "          ", ",", "")
    if shared then
        out[#out + 1] = '        : "r"(a), "r"(b), "r"(' .. upper .. '));'
    else
        add_lines(out, num_a, '"r"(a[%d])', "        : ", "          ", ",", ",")
        out[#out + 1] = '          "r"(b), "r"(' .. upper .. '));'
    end
    out[#out + 1] = "}"
    return table.concat(out, "\n")
end

function wgmma.steps(depth, chunk_rows)
    local list = {}
    for i = 0, depth // 16 - 1 do list[i + 1] = chunk_rows and i // 4 * (chunk_rows * 8) + i % 4 * 2 or i * 128 end
    return list
end

return wgmma
