--[[ arch: facts about the processors kernels are made for.

  arch.get("sm_90") -> row or nil, message; "90" is the same, and so is "sm_90a": only its kernels of hopper are for sm_90a
  arch.names        -> {"sm_75", ...} in order

Shared memory and register limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute
Capability". Instruction support: PTX ISA, "mma", "cp.async", "red", "wgmma.mma_async". ]]

local arch = {}

local KIB = 1024

-- smem_block_bytes: the most dynamic shared memory one block can have; smem_sm_bytes: of a multiprocessor, of which
-- the system takes 1 KiB per resident block.
local ROWS = {
    {name = "sm_75", sm = 75, smem_block_bytes = 64 * KIB, smem_sm_bytes = 64 * KIB},
    {name = "sm_80", sm = 80, smem_block_bytes = 163 * KIB, smem_sm_bytes = 164 * KIB},
    {name = "sm_86", sm = 86, smem_block_bytes = 99 * KIB, smem_sm_bytes = 100 * KIB},
    {name = "sm_87", sm = 87, smem_block_bytes = 163 * KIB, smem_sm_bytes = 164 * KIB},
    {name = "sm_89", sm = 89, smem_block_bytes = 99 * KIB, smem_sm_bytes = 100 * KIB},
    {name = "sm_90", sm = 90, smem_block_bytes = 227 * KIB, smem_sm_bytes = 228 * KIB},
    {name = "sm_100", sm = 100, smem_block_bytes = 227 * KIB, smem_sm_bytes = 228 * KIB},
    {name = "sm_103", sm = 103, smem_block_bytes = 227 * KIB, smem_sm_bytes = 228 * KIB},
    {name = "sm_110", sm = 110, smem_block_bytes = 227 * KIB, smem_sm_bytes = 228 * KIB},
    {name = "sm_120", sm = 120, smem_block_bytes = 99 * KIB, smem_sm_bytes = 100 * KIB},
    {name = "sm_121", sm = 121, smem_block_bytes = 99 * KIB, smem_sm_bytes = 100 * KIB},
}

arch.registers_sm = 65536
arch.registers_thread = 255
arch.names = {}
local by_name = {}
for _, row in ipairs(ROWS) do
    row.cp_async = row.sm >= 80       -- copies to shared memory that do not pass through registers
    row.bf16 = row.sm >= 80           -- mma on bf16
    row.mma_k16 = row.sm >= 80        -- m16n8k16; older: two m16n8k8
    row.vector_red = row.sm >= 90     -- red.global.add.v4.f32
    row.wgmma = row.sm == 90          -- wgmma.mma_async, which needs code for sm_90a and exists on no other arch
    arch.names[#arch.names + 1] = row.name
    for _, suffix in ipairs(row.wgmma and {"", "a"} or {""}) do
        by_name[row.name .. suffix], by_name[row.sm .. suffix] = row, row
    end
end
by_name.host = {name = "host", sm = 0}

function arch.get(name)
    local row = by_name[name]
    if row then return row end
    return nil, ("arch '%s' is not known; known: %s"):format(tostring(name), table.concat(arch.names, " "))
end

return arch
