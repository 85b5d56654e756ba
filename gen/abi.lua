--[[ abi: the argument struct of every kernel, declared once.

  abi.fields(problem, pass, workspace, maps)  -> list of {name=, type=, source=, doc=}, offsets filled in; pass "prepare" has
                                                 no tensors
  abi.of_kernel(problem, kernel)  -> those of a kernel of kernel.list
  abi.struct(fields)  -> C text of the struct, the same for CUDA and host
  abi.rows(fields)    -> {size=, rows = list of {offset=, type=, source=, rows=, chunks=}}: the packing table of the runtime

`maps`, of kernels that copy by TMA: list of {tensor=, rows=, chunks=}. The struct then begins with a map of each, encoded at
launch for `chunks` boxes side by side of 64 elements x `rows` rows. A map holds the tensor's address and strides, so these are left out; an
output keeps its address, by which a kernel sees whether it is wanted.

`source` says where the runtime takes the value from at launch; runtime/plan.c turns it into an enum once:
  batch heads_q heads_kv group seq_q seq_k q_start k_start scale
  <tensor>.data   <tensor>.stride.batch|seq|head      tensor: q k v o lse dout dlse dq dk dv
  param.<slot>.data|scalar|stride.<axis>              slot and axis count from 0
  workspace.<place>                                   a region of kernel.lua's list
  <tensor>.map                                        with `rows` and `chunks` of its boxes
Order: maps, then 8-byte fields, then 4-byte fields, so that there is no padding inside. A later capability (lengths in
device memory, page tables, seeds) is a further row here; the digest of this file is in the cache key. ]]

local abi = {}

local SIZE = {map = 128, ptr = 8, i64 = 8, i32 = 4, u32 = 4, f32 = 4}
local MAP_ALIGNMENT = 64
local STRIDED_AXES = {"batch", "seq", "head"}
-- Element types of array parameters in C text.
abi.storage = {i32 = "int", i64 = "long long", u8 = "unsigned char", bool = "unsigned char", f32 = "float",
               f16 = "unsigned short", bf16 = "unsigned short"}

local FORWARD = {{"q", true}, {"k", true}, {"v", true}, {"o"}, {"lse"}}
local BACKWARD = {{"q", true}, {"k", true}, {"v", true}, {"o", true}, {"lse", true}, {"dout", true}, {"dlse", true},
                  {"dq"}, {"dk"}, {"dv"}}

-- Element type of a tensor in C text: lse and dlse are float, all others have the problem's dtype.
local function element(problem, name)
    if name == "lse" or name == "dlse" then return "float" end
    return problem.dtype == "fp32" and "float" or "unsigned short"
end

function abi.fields(problem, pass, workspace, maps)
    local first, wide, narrow, mapped = {}, {}, {}, {}
    local function add(name, type, source, text, doc)
        local list = type == "map" and first or SIZE[type] == 8 and wide or narrow
        list[#list + 1] = {name = name, type = type, source = source, text = text, doc = doc}
    end
    for _, map in ipairs(maps or {}) do
        add(map.tensor .. "_map", "map", map.tensor .. ".map", "LoomMap ", ("%d box(es) of 64 x %d"):format(map.chunks, map.rows))
        first[#first].rows, first[#first].chunks, mapped[map.tensor] = map.rows, map.chunks, true
    end
    for _, row in ipairs(pass == "backward" and BACKWARD or pass == "forward" and FORWARD or {}) do
        local name, read = row[1], row[2]
        if not (read and mapped[name]) then
            add(name, "ptr", name .. ".data", (read and "const " or "") .. element(problem, name) .. " *", nil)
        end
        for _, axis in ipairs(mapped[name] and {} or STRIDED_AXES) do
            add(name .. "_stride_" .. axis, "i64", name .. ".stride." .. axis, "long long ", nil)
        end
    end
    for _, region in ipairs(workspace or {}) do
        local text = (region.prepared and pass ~= "prepare" and "const " or "") .. region.type .. " *"
        add(region.name, "ptr", "workspace." .. region.place, text, region.doc)
    end
    for slot, param in ipairs(problem.params) do
        local from = "param." .. slot - 1
        if param.dims then
            add("p_" .. param.name, "ptr", from .. ".data", "const " .. abi.storage[param.dtype] .. " *", nil)
            for axis = 1, #param.dims do
                add(("p_%s_stride_%d"):format(param.name, axis - 1), "i64", ("%s.stride.%d"):format(from, axis - 1),
                    "long long ", nil)
            end
        else
            local type = param.dtype == "f32" and "f32" or "i32"
            add("p_" .. param.name, type, from .. ".scalar", type == "f32" and "float " or "int ", nil)
        end
    end
    for _, name in ipairs {"batch", "heads_q", "heads_kv", "group", "seq_q", "seq_k", "q_start", "k_start"} do
        add(name, "i32", name, "int ", name == "group" and "heads_q / heads_kv" or nil)
    end
    add("scale", "f32", "scale", "float ", "multiplies Q K^T")
    local fields, offset = {}, 0
    for _, list in ipairs {first, wide, narrow} do
        for _, field in ipairs(list) do
            field.offset = offset
            offset = offset + SIZE[field.type]
            fields[#fields + 1] = field
        end
    end
    local alignment = #first > 0 and MAP_ALIGNMENT or 8
    fields.size = (offset + alignment - 1) // alignment * alignment
    return fields
end

function abi.of_kernel(problem, k)
    return abi.fields(problem, k.prepares and "prepare" or k.pass, k.workspace, k.maps)
end

function abi.struct(fields)
    local lines = {}
    if fields[1].type == "map" then
        lines[1] = ("typedef struct __align__(%d) LoomMap { unsigned long long words[%d]; } LoomMap;  // a tensor map of the TMA unit")
            :format(MAP_ALIGNMENT, SIZE.map // 8)
        lines[2] = ""
    end
    lines[#lines + 1] = "typedef struct LoomArgs {  // strides in elements"
    for _, field in ipairs(fields) do
        lines[#lines + 1] = ("    %s%s;%s"):format(field.text, field.name, field.doc and "  // " .. field.doc or "")
    end
    lines[#lines + 1] = "} LoomArgs;"
    return table.concat(lines, "\n")
end

function abi.rows(fields)
    local rows = {}
    for i, field in ipairs(fields) do
        rows[i] = {offset = field.offset, type = field.type, source = field.source, rows = field.rows, chunks = field.chunks}
    end
    return {size = fields.size, rows = rows}
end

return abi
