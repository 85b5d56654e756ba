--[[ kernel: which kernels a problem needs and what each looks like from outside: tiles, constants, shared memory,
grid, workspace. Emission (emit.lua) and the runtime (descriptors, docs/design.md section 5) both read this.

  kernel.list(problem, pass, target, schedule, arch) -> list of kernels in launch order, each
    {name=, pass=, symbol=, template="mma/forward.cu", title=, threads=, smem_bytes=, blocks_per_sm=,
     calls = generated functions it uses, beside visible and score, see functions.text,
     constants = {{name, value, comment}, ...}, shared = {{name, bytes, comment}, ...}, phases = {text, ...},
     grid = {batch=, heads=, seq=, rows=, persistent = blocks a multiprocessor that share out the tiles, or nil}, needs=,
     workspace = list of {name=, place=, type=, bytes=, dims=, prepared=, doc=}: bytes for each of the dims, which are texts as of
     arrays; kernels that name the same place share it, prepared: it depends on the mask alone;
     target=, maps = tensor maps it takes, see abi.lua, or nil,
     walks = {over=, own=, other=, parts=}: tiles of keys or queries that it visits, whether of the mask they are `listed`,
     prepares: it makes what is prepared; overlapped: the next kernel may begin when all its blocks have, overlaps: it may begin then
     and waits itself for what it needs of those before it}
  kernel.accumulators(problem, pass, schedule) -> f32 registers a thread holds through the main loop (target mma)
  kernel.smem_bytes(problem, pass, target, schedule) -> the most any kernel of the pass asks for
  kernel.hopper_needed(problem, schedule), kernel.hopper_registers(problem, schedule) -> registers that a consumer needs;
                                                 {that a thread of the planner's warpgroup has, of a consumer}
  kernel.hopper_o_shared(problem, schedule) -> whether O leaves through shared memory

`schedule` is a table of integers, see schedule.lua. ]]

local arch = require "arch"
local expression = require "expression"
local functions = require "functions"
local interval = require "interval"

local kernel = {}

local FLOAT_BYTES, HALF_BYTES = 4, 2
local MMA_K = 16        -- depth of one mma
local MMA_N = 8         -- columns of one mma
local CHUNK = 8         -- elements in 16 bytes, the unit of copies and of ldmatrix rows

local DQ_REGISTERS = 48 -- most accumulators for the columns of dQ that a warp of backward_dkv computes at once

local function round_up(value, unit) return (value + unit - 1) // unit * unit end

-- Shared rows are an odd number of 16-byte chunks apart, so the 8 rows an ldmatrix reads lie in different banks.
local function pitch(columns) return (columns // CHUNK | 1) * CHUNK end

local function shared_total(shared)
    local bytes = 0
    for _, region in ipairs(shared) do bytes = bytes + round_up(region[2], 128) end
    return bytes
end

local function append(list, more)
    for _, item in ipairs(more) do list[#list + 1] = item end
    return list
end

local function head_dims(problem)
    return round_up(problem.d, MMA_K), round_up(problem.dv, MMA_K)
end

-- 8-wide columns of each of `parts` warps that share `depth` columns, in pairs: one ldmatrix serves two. The last warp
-- may have too many; it computes on what lies behind its row and stores nothing of it.
local function share(depth, parts) return (depth // MMA_K + parts - 1) // parts * 2 end

-- Constants of the bits of what is seen of a tile (templates/mma/parts/seen.cu): words of at most 8 columns.
local function seen_constants(columns)
    local width = math.min(columns, 8)
    while columns % width ~= 0 do width = width - 1 end
    return {{"seen_columns", width, "columns of accumulators in one word of bits of what is seen"},
            {"seen_words", columns // width, "such words of a tile"}}
end

local BOX_COLUMNS, BOX_ROW_BYTES = 64, 128 -- of what one TMA instruction copies

-- Head dims of the hopper backward. Unequal ones go up to whole boxes, which TMA fills with zeros: ptxas (13.0) finds registers for
-- all equal dims and for those, and serialises the products of many others (40:72, 64:96, 104:128).
local function hopper_backward_dims(problem)
    if problem.d == problem.dv then return head_dims(problem) end
    return round_up(problem.d, BOX_COLUMNS), round_up(problem.dv, BOX_COLUMNS)
end

-- The sum of dQ of target hopper: {columns of a warpgroup, floats of a row}. With tiles of 128 queries each of the two warpgroups
-- makes all columns of half of the rows, with tiles of 64 half of the columns of all, a chunk of 64 where there are two.
local function hopper_dq(problem, s)
    local d = hopper_backward_dims(problem)
    local columns = s.tile_q == 128 and d or d > 64 and 64 or d // 2
    return columns, 2 * 64 * columns // s.tile_q
end

-- Whether dK or dV of 64 keys fill the registers of a warpgroup: then each of two makes one of them.
local function is_wide(problem) return math.max(problem.d, problem.dv) > 128 end

-- Whether backward_dkv has registers for dQ, and so may take turns in adding to it.
function kernel.may_take_turns(problem) return not is_wide(problem) and problem.score == nil end

-- Whether dQ has a kernel of its own: where backward_dkv has no registers for it, and where its sum must not depend on the order.
local function has_own_dq(problem, s)
    return not kernel.may_take_turns(problem) or problem.deterministic and s.dq_turns == 0
end

local TURNS = 8 -- warps that add to dQ of a tile

-- The workspace of the backward: D per row of q, and the f32 sum of dQ where blocks add to it.
local function backward_workspace(problem, target, s)
    local rows = {"batch", "heads_q", "seq_q"}
    local list = {{name = "delta", type = "float", bytes = FLOAT_BYTES, dims = rows, doc = "[batch, heads_q, seq_q] rowsum(dO * O) - dLSE"}}
    if target == "mma" and not problem.deterministic then
        list[2] = {name = "dq_sum", type = "float", bytes = head_dims(problem) * FLOAT_BYTES, dims = rows,
                   doc = "[batch, heads_q, seq_q, depth_qk] sum of dQ / scale"}
    end
    if target == "hopper" and not has_own_dq(problem, s) then
        local columns, floats = hopper_dq(problem, s)
        local tiles = {"batch", "heads_q", ("ceil(seq_q/%d)"):format(s.tile_q)}
        list[2] = {name = "dq_sum", type = "float", bytes = s.tile_q * floats * FLOAT_BYTES, dims = tiles,
                   doc = ("[batch, heads_q, tiles, 2, %d, 128, 4] sum of dQ / scale, in the order of accumulators"):format(columns // 8)}
        if s.dq_turns == 1 then
            list[3] = {name = "turns", type = "unsigned", bytes = TURNS * 4, dims = tiles,
                       doc = ("[batch, heads_q, tiles, %d] who has added last to what a warp has of dQ, counted from 1"):format(TURNS)}
        end
    end
    return list
end

-- -- lists of tiles ----------------------------------------------------------------------------------------

-- The classes of the tiles of a mask that is more than one span of keys are found once, by kernels that run before, for all heads
-- and batches that see alike; `walks` of the kernel that reads them says what its tiles are.
local CLASS_CHUNK = 128 -- classes of tiles, a byte each, that a reader takes at once: rows are multiples of it
local CLASS_GROUP = 8 -- tiles of its own side that a block has at once, at most

-- Threads of a block that finds classes, blocks of a multiprocessor that share out the tiles, those of them that have to fit at once
-- (with more the compiler spills), and threads that share what a tile reads. Where the walked side reads arrays, few blocks read
-- them, all threads at once; else many wait less for one element each.
local CLASS_BLOCKS = {reads = {threads = 512, blocks = 1, fit = 1, lanes = 4}, plain = {threads = 256, blocks = 4, fit = 2, lanes = 1}}

-- How many masks differ: {batches, heads}.
local function masks_of(uses)
    return {uses.of_batch and "batch" or "1", uses.of_head and "heads_q" or uses.of_head_kv and "heads_kv" or "1"}
end

local function class_regions(problem, target, walks)
    local uses = functions.uses(problem)
    local own, other = "seq_q", "seq_k"
    if walks.over == "queries" then own, other = other, own end
    local masks = masks_of(uses)
    local rows = ("ceil(%s/%d)"):format(own, walks.own)
    local of = ("%s_%s_%dx%d"):format(target, walks.over, walks.own, walks.other)
    local list = {
        {name = "classes", place = "classes_" .. of, type = "unsigned char", bytes = CLASS_CHUNK, prepared = true,
         dims = {masks[1], masks[2], rows, ("ceil(%s/%d)"):format(other, walks.other * CLASS_CHUNK)},
         doc = ("[%s, %s, tiles, tiles of %s, to a multiple of %d]"):format(masks[1], masks[2], walks.over, CLASS_CHUNK)},
    }
    if uses.even then return list end
    return append(list, {
        {name = "order", place = "order_" .. of, type = "int", bytes = 8, prepared = true, dims = {masks[1], masks[2], rows},
         doc = ("[%s, %s, 2, tiles] those that visit most first, then how many each visits"):format(masks[1], masks[2])},
        {name = "loads", place = "loads_" .. of, type = "int", bytes = 16, prepared = true, dims = {masks[1], masks[2]},
         doc = ("[%s, %s, 4] how many the first in the order visits, and all together; then a word, see count_begin"):format(masks[1], masks[2])},
    })
end

-- The kernel that makes them.
local function class_kernel(problem, of)
    local uses, walks = functions.uses(problem), of.walks
    local batch, heads = table.unpack(masks_of(uses))
    local over_keys = walks.over == "keys"
    local reads = uses.walk == "range" and {queries = {}, keys = {}} or functions.reads(problem, of.calls.bounds)
    local blocks = #reads[walks.over] > 0 and CLASS_BLOCKS.reads or CLASS_BLOCKS.plain
    local lanes = math.max(walks.parts == 3 and 4 or walks.parts, blocks.lanes)
    return {
        name = of.name .. "_classes", template = "lists/classes.cu", title = "classes of tiles under the mask, and the order in which they are taken",
        threads = blocks.threads, calls = {only = "classes", classes = true, arrays = true, reads = true, bounds = of.calls.bounds, [walks.over] = true},
        walks = walks, reads = {queries = #reads.queries > 0, keys = #reads.keys > 0}, prepares = true, needs = of.needs,
        constants = {
            {over_keys and "tile_q" or "tile_k", walks.own, ("%s of a tile"):format(over_keys and "queries" or "keys")},
            {over_keys and "tile_k" or "tile_q", walks.other, ("%s of a tile"):format(walks.over)},
            {"class_chunk", CLASS_CHUNK, "bytes: rows are multiples of it"},
            {"parts", walks.parts, "of a tile's own rows, each with a class of its own"},
            {"part_rows", walks.own // walks.parts, "rows of a part"},
            {"lanes", lanes, "threads that find the classes of one tile"},
            {"threads", blocks.threads, "threads of a block"},
            {"fit", blocks.fit, "blocks of a multiprocessor, at least"},
            {"most_own", CLASS_GROUP, "tiles of its own side that a block has at once"},
        },
        shared = {}, phases = {"work, and what its own tiles read", "classes", not uses.even and "order" or nil},
        grid = {batch = batch, heads = heads, seq = over_keys and "seq_q" or "seq_k", rows = walks.own, persistent = blocks.blocks},
    }
end

-- -- mma ---------------------------------------------------------------------------------------------------

local mma = {}

local function mma_constants(problem, s)
    local d, dv = head_dims(problem)
    return {
        {"dim_qk", problem.d, "head dim of q and k"},
        {"dim_v", problem.dv, "head dim of v and o"},
        {"depth_qk", d, "dim_qk rounded up to one mma, zeros past dim_qk"},
        {"depth_v", dv, "the same of dim_v"},
        {"tile_q", s.tile_q, "queries of a tile"},
        {"tile_k", s.tile_k, "keys of a tile"},
        {"warps", s.warps, "warps of a block"},
        {"threads", 32 * s.warps, "threads of a block"},
        {"pitch_qk", pitch(d), "elements from row to row of q and k in shared memory: odd in 16-byte chunks"},
        {"pitch_v", pitch(dv), "the same of v and dO"},
    }
end

-- Where a partial tile's values that are not finite are noted; see templates/mma/parts/careful.cu.
local function note_nonfinite(problem, shared)
    if problem.mask then shared[#shared + 1] = {"nonfinite", 3 * 32, "rows, columns, queries: bit sets"} end
    return shared
end

-- Shared memory of the kernels that use it, apart from the rest: every candidate of a schedule is asked for it.
local mma_shared = {}

function mma_shared.forward(problem, s)
    local d, dv = head_dims(problem)
    return note_nonfinite(problem, {
        {"q", s.tile_q * pitch(d) * HALF_BYTES, "[tile_q][pitch_qk]"},
        {"k", s.tile_k * pitch(d) * HALF_BYTES, "[tile_k][pitch_qk]"},
        {"v", s.tile_k * pitch(dv) * HALF_BYTES, "[tile_k][pitch_v]"},
    })
end

function mma_shared.backward_dkv(problem, s)
    local d, dv = head_dims(problem)
    local shared = {
        {"k", s.tile_k * pitch(d) * HALF_BYTES, "[tile_k][pitch_qk]"},
        {"v", s.tile_k * pitch(dv) * HALF_BYTES, "[tile_k][pitch_v]"},
        {"q", s.stages * s.tile_q * pitch(d) * HALF_BYTES, "[stages][tile_q][pitch_qk]"},
        {"dout", s.stages * s.tile_q * pitch(dv) * HALF_BYTES, "[stages][tile_q][pitch_v]"},
        {"stats", s.stages * 2 * s.tile_q * FLOAT_BYTES, "[stages][2][tile_q] LSE and D"},
    }
    local through_shared = s.split > 1 or not problem.deterministic
    if through_shared then
        shared[#shared + 1] = {"ds", s.tile_k * pitch(s.tile_q) * HALF_BYTES, "[tile_k][pitch_ds] transposed dS"}
    end
    if s.split > 1 then
        shared[#shared + 1] = {"p", s.tile_k * pitch(s.tile_q) * HALF_BYTES, "[tile_k][pitch_ds] transposed P"}
    end
    return problem.deterministic and shared or note_nonfinite(problem, shared)
end

function mma_shared.backward_dq(problem, s)
    local d, dv = head_dims(problem)
    return note_nonfinite(problem, {
        {"q", 16 * s.dq_warps * pitch(d) * HALF_BYTES, "[tile_q][pitch_qk]"},
        {"dout", 16 * s.dq_warps * pitch(dv) * HALF_BYTES, "[tile_q][pitch_v]"},
        {"k", s.dq_tile_k * pitch(d) * HALF_BYTES, "[tile_k][pitch_qk]"},
        {"v", s.dq_tile_k * pitch(dv) * HALF_BYTES, "[tile_k][pitch_v]"},
    })
end

function mma.forward(problem, s)
    local d, dv = head_dims(problem)
    local rows_per_warp = s.tile_q // s.warps
    return {
        name = "forward", template = "mma/forward.cu", calls = {keys = true, sides = "columns", whole = true}, title = "O = softmax(S) V, LSE = ln(sum exp S)",
        threads = 32 * s.warps, blocks_per_sm = s.blocks,
        constants = append(append(mma_constants(problem, s), {
            {"row_tiles", rows_per_warp // 16, "16-row mma tiles of a warp"},
            {"key_columns", s.tile_k // MMA_N, "8-key columns of S"},
            {"value_columns", dv // MMA_N, "8-wide columns of O"},
        }), seen_constants(s.tile_k // MMA_N)),
        shared = mma_shared.forward(problem, s),
        phases = {"work and first loads", "S = Q K^T", "score and mask", "softmax", "O += P V", "store O and LSE"},
        grid = {heads = "heads_q", seq = "seq_q", rows = s.tile_q},
        walks = {over = "keys", own = s.tile_q, other = s.tile_k, parts = 1},
    }
end

-- What backward_delta clears besides making D: a sum of dQ of so many floats a row, in tiles of so many rows, or turns of such tiles.
local function clears_sum(columns, tile)
    return {title = "dQ sum = 0", phase = "clear the sum of dQ", constants = {
        {"sum_columns", columns, "floats of a row of the sum of dQ"}, {"sum_tile", tile, "rows of which it has a multiple"}}}
end

local function clears_turns(problem, tile)
    return {title = "nobody has had a turn", phase = "clear turns, and dQ that nobody may add to", constants = {
        {"dim_qk", problem.d, "head dim of q and k"}, {"dq_tile", tile, "rows of a tile of dQ"}, {"turns", TURNS, "of a tile of dQ"}}}
end

local function backward_delta(problem, clears)
    local rows, title = 16, "D = rowsum(dO * O) - dLSE"
    return {
        name = "backward_delta", template = "mma/backward_delta.cu", title = clears and title .. "; " .. clears.title or title,
        threads = 128,
        constants = append({
            {"dim_v", problem.dv, "head dim of v and o"},
            {"tile_q", rows, "rows of a block"},
            {"threads", 128, "threads of a block"},
        }, clears and clears.constants or {}),
        shared = {},
        phases = {"D of each row", clears and clears.phase},
        grid = {heads = "heads_q", seq = "seq_q", rows = rows},
    }
end

function mma.backward_delta(problem)
    return backward_delta(problem, not problem.deterministic and clears_sum((head_dims(problem)), 1) or nil)
end

-- Columns of dQ a warp of backward_dkv computes at once: all, or as many pairs as leave room beside dK and dV.
local function dq_step(problem, s)
    local query_warps = math.min(s.warps, s.tile_q // s.rows)
    local pairs_of_columns = share(head_dims(problem), s.warps // query_warps) // 2
    local registers = 8 * (s.tile_q // query_warps // 16) -- of a pair
    if pairs_of_columns * registers <= DQ_REGISTERS then return 2 * pairs_of_columns end
    local step = math.max(DQ_REGISTERS // 2 // registers, 1)
    while pairs_of_columns % step ~= 0 do step = step - 1 end
    return 2 * step
end

function mma.backward_dkv(problem, s)
    local d, dv = head_dims(problem)
    local key_warps = s.warps // s.split
    local query_warps = math.min(s.warps, s.tile_q // s.rows)
    return {
        name = "backward_dkv", template = "mma/backward_dkv.cu", calls = {queries = true, slope = true, sides = "rows", whole = true},
        title = problem.deterministic and "dV = P^T dO, dK = scale dS^T Q"
            or "dV = P^T dO, dK = scale dS^T Q, dQ sum += dS K",
        threads = 32 * s.warps, blocks_per_sm = s.blocks,
        constants = append(append(mma_constants(problem, s), {
            {"stages", s.stages, "buffers of q and dO"},
            {"split", s.split, "warps that share 16 keys, each with its part of the head dim"},
            {"key_warps", key_warps, "groups of warps along the keys"},
            {"key_tiles", s.rows // 16, "16-key mma tiles of a warp"},
            {"query_columns", s.tile_q // MMA_N // s.split, "8-query columns of S^T a warp computes"},
            {"qk_columns", share(d, s.split), "8-wide columns of dK a warp owns"},
            {"value_columns", share(dv, s.split), "8-wide columns of dV a warp owns"},
            {"pitch_ds", pitch(s.tile_q), "elements from key to key of dS in shared memory"},
            {"query_warps", query_warps, "groups of warps along the queries of dQ"},
            {"query_tiles", s.tile_q // query_warps // 16, "16-query mma tiles of dQ of a warp"},
            {"dq_columns", share(d, s.warps // query_warps), "8-wide columns of dQ a warp computes"},
            {"dq_step", dq_step(problem, s), "of these at once, which bounds registers"},
        }), seen_constants(s.tile_q // MMA_N // s.split)),
        shared = mma_shared.backward_dkv(problem, s),
        phases = {"work, k and v", "S^T = K Q^T", "P^T", "dP^T = V dO^T, dS^T", "dV += P^T dO, dK += dS^T Q",
                  "dQ sum += dS K", "store dK and dV"},
        grid = {heads = "heads_kv", seq = "seq_k", rows = s.tile_k},
        needs = problem.deterministic and {"dk", "dv"} or {"dk", "dv", "dq"},
        walks = {over = "queries", own = s.tile_k, other = s.tile_q, parts = 1},
    }
end

function mma.backward_dq(problem, s)
    local d, dv = head_dims(problem)
    return {
        name = "backward_dq", template = "mma/backward_dq.cu", calls = {keys = true, slope = true, sides = "columns", whole = true}, title = "dQ = scale dS K, in the order of keys",
        threads = 32 * s.dq_warps, blocks_per_sm = 8 // s.dq_warps,
        constants = append({
            {"dim_qk", problem.d, "head dim of q and k"},
            {"dim_v", problem.dv, "head dim of v and o"},
            {"depth_qk", d, "dim_qk rounded up to one mma, zeros past dim_qk"},
            {"depth_v", dv, "the same of dim_v"},
            {"tile_q", 16 * s.dq_warps, "queries of a tile"},
            {"tile_k", s.dq_tile_k, "keys of a tile"},
            {"warps", s.dq_warps, "warps of a block"},
            {"threads", 32 * s.dq_warps, "threads of a block"},
            {"pitch_qk", pitch(d), "elements from row to row of q and k in shared memory: odd in 16-byte chunks"},
            {"pitch_v", pitch(dv), "the same of v and dO"},
            {"key_columns", s.dq_tile_k // MMA_N, "8-key columns of S"},
            {"qk_columns", d // MMA_N, "8-wide columns of dQ"},
        }, seen_constants(s.dq_tile_k // MMA_N)),
        shared = mma_shared.backward_dq(problem, s),
        phases = {"work and first loads", "S = Q K^T", "dP = dO V^T", "P, dS", "dQ += dS K", "store dQ"},
        grid = {heads = "heads_q", seq = "seq_q", rows = 16 * s.dq_warps},
        needs = {"dq"},
        walks = {over = "keys", own = 16 * s.dq_warps, other = s.dq_tile_k, parts = 1},
    }
end

function mma.backward_convert(problem, s)
    local rows = 32
    return {
        name = "backward_convert", template = "mma/backward_convert.cu", title = "dQ = scale * dQ sum",
        threads = 128,
        constants = {
            {"dim_qk", problem.d, "head dim of q and k"},
            {"depth_qk", (head_dims(problem)), "dim_qk rounded up to one mma"},
            {"tile_q", rows, "rows of a block"},
            {"threads", 128, "threads of a block"},
        },
        shared = {},
        phases = {"dQ of each row"},
        grid = {heads = "heads_q", seq = "seq_q", rows = rows},
        needs = {"dq"},
    }
end

-- -- hopper ------------------------------------------------------------------------------------------------

local hopper = {}

local WARPGROUP = 128                      -- threads
local PLAN_PLACES, WORK_PLACES = 8, 32     -- of queues
local HOPPER_LIST_HEADS = 8                -- of the backward, at most: whose works are taken together
local HOPPER_LIST_BYTES = 32 << 20         -- of their queries, dO and dQ, or keys and values, that the L2 cache keeps
local HOPPER_SMEM_BYTES = arch.get("sm_90").smem_block_bytes

-- Registers a thread of the planner's warpgroup and of a consumer, by the number of consumer warpgroups: they share out what
-- the block is launched with. Two consumers leave the planner more where they need not all.
local HOPPER_REGISTERS = {{40, 232}, {40, 232}, {32, 160}, {32, 112}}
local HOPPER_FULL_REGISTERS = {24, 240}

-- Boxes side by side that hold a row of `depth` columns.
local function chunks(depth) return (depth + BOX_COLUMNS - 1) // BOX_COLUMNS end

-- Of these, those that one copy moves: all, where none reaches past the head dim.
local function box_chunks(dim) return dim % BOX_COLUMNS == 0 and dim // BOX_COLUMNS or 1 end

-- f32 or pairs a consumer holds through the main loop: O, S, P of one or two tiles, queries.
local function hopper_accumulators(problem, s)
    local d, dv = head_dims(problem)
    return dv // 2 + s.tile_k // 2 + s.p_sets * (s.tile_k // 4) + (s.q_registers == 1 and d // 4 or 0)
end

-- Beside these: addresses, row statistics, exponents on their way where there are two sets of P. Read off the compiled kernels of tests/test_kernels.c.
local HOPPER_OTHER_REGISTERS, HOPPER_KEYS_A_REGISTER = 32, 10
local HOPPER_LOADS_REGISTERS = 24 -- of a score that loads for every element; others take no more than the plain kernel

local function loads_for_elements(score)
    return expression.any(score, function(node) return node.op == "load" and not interval.uniform(node) end)
end

-- Registers that a consumer needs in all.
function kernel.hopper_needed(problem, s)
    return hopper_accumulators(problem, s) + HOPPER_OTHER_REGISTERS + (loads_for_elements(problem.score) and HOPPER_LOADS_REGISTERS or 0)
        + (s.p_sets == 2 and s.tile_k // HOPPER_KEYS_A_REGISTER or 0)
end

function kernel.hopper_registers(problem, s)
    local usual = HOPPER_REGISTERS[s.tile_q // 64]
    return s.tile_q <= 128 and kernel.hopper_needed(problem, s) > usual[2] and HOPPER_FULL_REGISTERS or usual
end

-- Bytes of a kernel's regions of shared memory, and of O, which leaves through it where that has room.
local function hopper_bytes(problem, s)
    local d, dv = head_dims(problem)
    local uses, warpgroups = functions.uses(problem), s.tile_q // 64
    local spans = uses.listed and 0 or 1
    local bytes = {
        q = s.q_buffers * s.tile_q * BOX_ROW_BYTES * chunks(d),
        k = s.stages * s.tile_k * BOX_ROW_BYTES * chunks(d),
        v = s.stages * s.tile_k * BOX_ROW_BYTES * chunks(dv),
        barriers = 8 * ((problem.mask and 5 or 4) * s.stages + 2 * s.q_buffers + 2 * PLAN_PLACES),
        plans = 12 * PLAN_PLACES, tiles = 8 * s.stages, works = 32 * WORK_PLACES, spans = 16 * warpgroups * spans,
        values = problem.mask and (12 + 2 * 64) * s.stages or 0,
        far = uses.capped and 4 or 0,
        spoilt = problem.mask and s.p_sets == 2 and 4 * warpgroups * 32 or 0,
    }
    local total = 0
    for _, size in pairs(bytes) do total = total + round_up(size, 128) end
    local o = s.tile_q * BOX_ROW_BYTES * chunks(dv)
    if total + o > HOPPER_SMEM_BYTES then return bytes, total end
    bytes.o = o
    return bytes, total + o
end

local HOPPER_REGIONS = {
    {"q", "[q_buffers][chunks_qk][tile_q][64]"}, {"k", "[stages][chunks_qk][tile_k][64]"}, {"v", "[stages][chunks_v][tile_k][64]"},
    {"o", "[chunks_v][tile_q][64]"}, {"barriers", "of stages, of buffers of q, of plans"},
    {"plans", "[plan_places] tiles that the planner has found"}, {"tiles", "[stages] what the consumers are told of a tile"},
    {"works", "[work_places] what all are told of a work"}, {"spans", "[warpgroups] of tiles that a work visits"},
    {"values", "[stages] what is known of a tile's values"}, {"far", "whether tanh was taken of something not near 0"},
    {"spoilt", "[warps of consumers][8] columns of O that become NaN"},
}

local function hopper_shared(bytes)
    local shared = {}
    for _, region in ipairs(HOPPER_REGIONS) do
        local size = bytes[region[1]] or 0
        if size > 0 then shared[#shared + 1] = {region[1], size, region[2]} end
    end
    return shared
end

function kernel.hopper_o_shared(problem, s) return hopper_bytes(problem, s).o ~= nil end

function hopper.forward(problem, s)
    local d, dv = head_dims(problem)
    local registers = kernel.hopper_registers(problem, s)
    local bytes = hopper_bytes(problem, s)
    return {
        name = "forward", template = "hopper/forward.cu", calls = {keys = true, bounds = true, units = true, sides = "columns"}, title = "O = softmax(S) V, LSE = ln(sum exp S)",
        threads = WARPGROUP * (1 + s.tile_q // 64),
        constants = {
            {"depth_qk", d, "head dim of q and k rounded up to one wgmma"},
            {"depth_v", dv, "the same of v and o"},
            {"chunks_qk", chunks(d), "boxes of 64 columns of q and k"},
            {"chunks_v", chunks(dv), "the same of v and o"},
            {"head_dim_v", problem.dv, "of v and o as they are"},
            {"loads_qk", chunks(d) // box_chunks(problem.d), "copies that load a tile of q or k"},
            {"loads_v", chunks(dv) // box_chunks(problem.dv), "the same of v"},
            {"tile_q", s.tile_q, "queries of a tile"},
            {"tile_k", s.tile_k, "keys of a tile"},
            {"warpgroups", s.tile_q // 64, "consumers, with 64 queries each"},
            {"threads", WARPGROUP * (1 + s.tile_q // 64), "threads of a block"},
            {"stages", s.stages, "buffers of keys and values"},
            {"plan_places", PLAN_PLACES, "tiles that the planner may be ahead"},
            {"work_places", WORK_PLACES, "works that are told of at once"},
            {"q_buffers", s.q_buffers, "buffers of queries"},
            {"q_registers", s.q_registers, "1: queries stay in registers"},
            {"p_sets", s.p_sets, "2: P of neighbouring tiles in registers of their own"},
            {"ping_pong", s.ping_pong, "1: warpgroups take turns in starting products"},
            {"o_shared", bytes.o and 1 or 0, "1: o leaves through shared memory"},
            {"q_bytes", bytes.q // s.q_buffers, "of a buffer of queries"},
            {"k_bytes", bytes.k // s.stages, "of a tile of keys"},
            {"v_bytes", bytes.v // s.stages, "of a tile of values"},
            {"other_registers", registers[1], "a thread of the others"},
            {"consumer_registers", registers[2], "a thread"},
        },
        shared = hopper_shared(bytes),
        maps = append({{tensor = "q", rows = s.tile_q, chunks = box_chunks(problem.d)},
                       {tensor = "k", rows = s.tile_k, chunks = box_chunks(problem.d)},
                       {tensor = "v", rows = s.tile_k, chunks = box_chunks(problem.dv)}},
                      bytes.o and {{tensor = "o", rows = 16, chunks = 1}} or {}),
        phases = {"queries", "tiles of keys", "O and LSE"},
        grid = {heads = "heads_q", seq = "seq_q", rows = s.tile_q, persistent = 1},
        walks = {over = "keys", own = s.tile_q, other = s.tile_k, parts = s.tile_q // 64},
    }
end

-- Bytes of the regions of the backward's shared memory.
local function hopper_backward_shared(problem, s)
    local d, dv = hopper_backward_dims(problem)
    local shared = {
        {"k", s.tile_k * BOX_ROW_BYTES * chunks(d), "[chunks_qk][tile_k][64]"},
        {"v", s.tile_k * BOX_ROW_BYTES * chunks(dv), "[chunks_v][tile_k][64]"},
        {"q", s.stages * s.tile_q * BOX_ROW_BYTES * chunks(d), "[stages][chunks_qk][tile_q][64]"},
        {"dout", s.stages * s.tile_q * BOX_ROW_BYTES * chunks(dv), "[stages][chunks_v][tile_q][64]"},
    }
    if is_wide(problem) then
        shared[#shared + 1] = {"p", s.stages * s.tile_q * s.tile_k * HALF_BYTES, "[stages] P as accumulators lie"}
    else
        shared[#shared + 1] = {"out", s.tile_k * BOX_ROW_BYTES * math.max(chunks(d), chunks(dv)), "[chunks][tile_k][64] dV, then dK"}
    end
    if not has_own_dq(problem, s) then
        shared[#shared + 1] = {"ds", 2 * s.tile_q // 64 * s.tile_k * BOX_ROW_BYTES, "[2][tile_q / 64][tile_k][64] dS^T"}
    end
    append(shared, {
        -- behind the last stands what a wgmma might read of rows of 32 bytes
        {"statistics", s.stages * (36 * s.tile_q + 16) + 16 * s.tile_q, "[stages] LSE and D of the queries"},
        {"barriers", 8 * (4 * s.stages + 9), "of stages, of keys and values, of works, of dS"},
        {"tiles", 16 * s.stages, "[stages] what the consumers are told of a tile"},
        {"told", 2 * 48, "[2] what all are told of a work"},
        {"works", 3 * 32, "the work at hand of the loader of queries and of each teller"},
    })
    if problem.mask and not has_own_dq(problem, s) then
        shared[#shared + 1] = {"nonfinite", s.tile_k, "[2][warps of consumers] bit sets of keys that are not finite"}
    end
    return shared
end

function hopper.backward_delta(problem, s)
    local clears = not has_own_dq(problem, s)
        and (s.dq_turns == 1 and clears_turns(problem, s.tile_q) or clears_sum(select(2, hopper_dq(problem, s)), s.tile_q)) or nil
    local k = backward_delta(problem, clears)
    k.overlapped = true
    return k
end

function hopper.backward_dkv(problem, s)
    local d, dv = hopper_backward_dims(problem)
    local shared = hopper_backward_shared(problem, s)
    local warpgroups, own_dq = 2, has_own_dq(problem, s)
    return {
        name = "backward_dkv", template = is_wide(problem) and "hopper/backward_dkv_wide.cu" or "hopper/backward_dkv.cu", calls = {queries = true, slope = true},
        title = "dV = P^T dO, dK = scale dS^T Q" .. (own_dq and "" or s.dq_turns == 1 and ", dQ = scale dS K" or ", dQ sum += dS K"),
        threads = WARPGROUP * (1 + warpgroups), overlaps = true, overlapped = true,
        constants = {
            {"dim_qk", problem.d, "head dim of q and k"},
            {"depth_qk", d, "head dim of q and k rounded up to one wgmma"},
            {"depth_v", dv, "the same of v and o"},
            {"chunks_qk", chunks(d), "boxes of 64 columns of q and k"},
            {"chunks_v", chunks(dv), "the same of v and o"},
            {"loads_qk", chunks(d) // box_chunks(problem.d), "copies that load a tile of q or k"},
            {"loads_v", chunks(dv) // box_chunks(problem.dv), "the same of v or dO"},
            {"tile_q", s.tile_q, "queries of a tile"},
            {"tile_k", s.tile_k, "keys of a tile"},
            {"warpgroups", warpgroups, "consumers, with 64 keys each" .. (is_wide(problem) and ", the same" or "")},
            {"threads", WARPGROUP * (1 + warpgroups), "threads of a block"},
            {"stages", s.stages, "buffers of queries and dO"},
            {"own_dq", own_dq and 1 or 0, "1: dQ has a kernel of its own"},
            {"dq_turns", s.dq_turns, "1: blocks add to dQ in turns"},
            {"dq_columns", (hopper_dq(problem, s)), "of dQ that a warpgroup makes"},
            {"p_bytes", s.tile_q * s.tile_k * HALF_BYTES, "of P of a tile"},
            {"list_heads", HOPPER_LIST_HEADS, "heads whose works are taken together, at most"},
            {"list_rows", HOPPER_LIST_BYTES // (2 * (d + dv) + (own_dq and 0 or 4 * d)), "of their queries and dO" .. (own_dq and "" or ", and dQ,") .. " together stay in the L2 cache"},
            {"q_bytes", s.tile_q * BOX_ROW_BYTES * chunks(d), "of a tile of queries"},
            {"dout_bytes", s.tile_q * BOX_ROW_BYTES * chunks(dv), "of a tile of dO"},
            {"k_bytes", shared[1][2], "of the keys"},
            {"v_bytes", shared[2][2], "of the values"},
            {"ds_bytes", s.tile_q // 64 * s.tile_k * BOX_ROW_BYTES, "of dS of a tile"},
            {"other_registers", HOPPER_FULL_REGISTERS[1], "a thread of the others"},
            {"consumer_registers", HOPPER_FULL_REGISTERS[2], "a thread"},
        },
        shared = shared,
        maps = {{tensor = "q", rows = s.tile_q, chunks = box_chunks(problem.d)}, {tensor = "k", rows = s.tile_k, chunks = box_chunks(problem.d)},
                {tensor = "v", rows = s.tile_k, chunks = box_chunks(problem.dv)}, {tensor = "dout", rows = s.tile_q, chunks = box_chunks(problem.dv)},
                {tensor = "dk", rows = 16, chunks = 1}, {tensor = "dv", rows = 16, chunks = 1}},
        phases = is_wide(problem) and {"S^T or dP^T", "P^T or dS^T", "dV += P^T dO or dK += dS^T Q"} or own_dq and {"S^T and dP^T", "P^T", "dS^T", "dV += P^T dO, dK += dS^T Q", "dK and dV"}
            or {"S^T and dP^T", "P^T", "dQ of the tile before", "dS^T", "dV += P^T dO, dK += dS^T Q", "last dQ, dK and dV"},
        grid = {heads = "heads_kv", seq = "seq_k", rows = s.tile_k, persistent = 1},
        needs = own_dq and {"dk", "dv"} or {"dk", "dv", "dq"},
        walks = {over = "queries", own = s.tile_k, other = s.tile_q, parts = 1},
    }
end

-- The regions of backward_dq, {shared, stages of keys, of values}: as many tiles of keys and values, up to 4, as there is room for.
local DQ_TILE_Q, DQ_TILE_K, DQ_MOST_STAGES = 128, 64, 4
local function hopper_dq_shared(problem)
    local d, dv = hopper_backward_dims(problem)
    local function regions(k_stages, v_stages)
        return {
            {"q", DQ_TILE_Q * BOX_ROW_BYTES * chunks(d), "[chunks_qk][tile_q][64]"},
            {"dout", DQ_TILE_Q * BOX_ROW_BYTES * chunks(dv), "[chunks_v][tile_q][64]"},
            {"k", k_stages * DQ_TILE_K * BOX_ROW_BYTES * chunks(d), "[k_stages][chunks_qk][tile_k][64]"},
            {"v", v_stages * DQ_TILE_K * BOX_ROW_BYTES * chunks(dv), "[v_stages][chunks_v][tile_k][64]"},
            {"barriers", 8 * (2 * k_stages + 2 * v_stages + 3), "of stages, of queries and dO, of the first tile"},
            {"tiles", 8 * (k_stages + 1), "[k_stages + 1] what the consumers are told of a tile"},
            {"work", 32, "what all are told of the work"},
        }
    end
    local k_stages, v_stages = DQ_MOST_STAGES, DQ_MOST_STAGES
    while shared_total(regions(k_stages, v_stages)) > HOPPER_SMEM_BYTES do
        if v_stages == k_stages then v_stages = v_stages - 1 else k_stages = k_stages - 1 end
    end
    return regions(k_stages, v_stages), k_stages, v_stages
end

function hopper.backward_dq(problem)
    local d, dv = hopper_backward_dims(problem)
    local shared, k_stages, v_stages = hopper_dq_shared(problem)
    local warpgroups = DQ_TILE_Q // 64
    return {
        name = "backward_dq", template = "hopper/backward_dq.cu", calls = {keys = true, slope = true}, title = "dQ = scale dS K, in the order of keys",
        threads = WARPGROUP * (1 + warpgroups), overlaps = true,
        constants = {
            {"depth_qk", d, "head dim of q and k rounded up to one wgmma"},
            {"depth_v", dv, "the same of v and o"},
            {"chunks_qk", chunks(d), "boxes of 64 columns of q and k"},
            {"loads_qk", chunks(d) // box_chunks(problem.d), "copies that load a tile of q or k"},
            {"loads_v", chunks(dv) // box_chunks(problem.dv), "the same of v or dO"},
            {"tile_q", DQ_TILE_Q, "queries of a tile"},
            {"tile_k", DQ_TILE_K, "keys of a tile"},
            {"warpgroups", warpgroups, "consumers, with 64 queries each"},
            {"threads", WARPGROUP * (1 + warpgroups), "threads of a block"},
            {"k_stages", k_stages, "buffers of keys"},
            {"v_stages", v_stages, "buffers of values"},
            {"list_heads", HOPPER_LIST_HEADS, "heads whose works are taken together, at most"},
            {"list_rows", HOPPER_LIST_BYTES // (2 * (d + dv)), "of their keys and values together stay in the L2 cache"},
            {"q_bytes", shared[1][2], "of the queries"},
            {"dout_bytes", shared[2][2], "of dO"},
            {"k_bytes", shared[3][2] // k_stages, "of a tile of keys"},
            {"v_bytes", shared[4][2] // v_stages, "of a tile of values"},
            {"other_registers", HOPPER_FULL_REGISTERS[1], "a thread of the others"},
            {"consumer_registers", HOPPER_FULL_REGISTERS[2], "a thread"},
        },
        shared = shared,
        maps = {{tensor = "q", rows = DQ_TILE_Q, chunks = box_chunks(problem.d)}, {tensor = "k", rows = DQ_TILE_K, chunks = box_chunks(problem.d)},
                {tensor = "v", rows = DQ_TILE_K, chunks = box_chunks(problem.dv)}, {tensor = "dout", rows = DQ_TILE_Q, chunks = box_chunks(problem.dv)},
                {tensor = "dq", rows = 16, chunks = 1}},
        phases = {"S and dP", "P", "dS", "dQ += dS K", "store dQ"},
        grid = {heads = "heads_q", seq = "seq_q", rows = DQ_TILE_Q},
        needs = {"dq"},
        walks = {over = "keys", own = DQ_TILE_Q, other = DQ_TILE_K, parts = 1},
    }
end

function hopper.backward_convert(problem, s)
    return {
        name = "backward_convert", template = "hopper/backward_convert.cu", title = "dQ = scale * dQ sum",
        threads = 128, overlaps = true,
        constants = {
            {"dim_qk", problem.d, "head dim of q and k"},
            {"tile_q", s.tile_q, "queries of a tile"},
            {"dq_columns", (hopper_dq(problem, s)), "of dQ that a warpgroup made"},
            {"threads", 128, "threads of a block"},
        },
        shared = {},
        phases = {"dQ of a tile"},
        grid = {heads = "heads_q", seq = "seq_q", rows = s.tile_q},
        needs = {"dq"},
    }
end

-- Registers that a consumer of the backward needs: dK, dV, P, dP and a part of dQ, and what else there is; and how many it has.
function kernel.hopper_backward_registers(problem, s)
    local d, dv = hopper_backward_dims(problem)
    local sums = is_wide(problem) and math.max(d, dv) // 2 or (d + dv) // 2 + hopper_dq(problem, s) // 2
    return sums + s.tile_q // 4 + s.tile_q // 2 + HOPPER_OTHER_REGISTERS, HOPPER_FULL_REGISTERS[2]
end

-- Keys of a block of the hopper backward: 64 for each warpgroup, or for both together.
function kernel.hopper_backward_keys(problem) return is_wide(problem) and 64 or 128 end

-- -- host --------------------------------------------------------------------------------------------------

local host = {}

local BLOCK_ROWS, BLOCK_LANES = 8, 16   -- a block of a product kept in registers: 8 AVX-512 or 16 AVX2 accumulators

kernel.host_lanes = BLOCK_LANES         -- tiles are multiples of this

local function host_constants(problem, s)
    return {
        {"dim_qk", problem.d, "head dim of q and k"},
        {"dim_v", problem.dv, "head dim of v and o"},
        {"tile_q", s.tile_q, "queries of a tile"},
        {"tile_k", s.tile_k, "keys of a tile"},
        {"block_rows", BLOCK_ROWS, "rows of a product computed at once"},
        {"block_lanes", BLOCK_LANES, "columns of it"},
    }
end

-- Scratch regions are f32. Products read their right side by rows, so whatever stays for the whole block is stored
-- transposed once and what is loaded per tile needs no transposing.
local function region(name, rows, columns, comment)
    return {name, rows * columns * FLOAT_BYTES, comment}
end

function host.forward(problem, s)
    return {
        name = "forward", template = "host/forward.c", calls = {keys = true, classes = true, arrays = true}, title = "O = softmax(S) V, LSE = ln(sum exp S)",
        threads = 1, constants = host_constants(problem, s),
        shared = {
            region("q", problem.d, s.tile_q, "[dim_qk][tile_q]"),
            region("k", s.tile_k, problem.d, "[tile_k][dim_qk]"),
            region("v", s.tile_k, problem.dv, "[tile_k][dim_v]"),
            region("s", s.tile_k, s.tile_q, "[tile_k][tile_q] S^T, then P^T"),
            region("o", s.tile_q, problem.dv, "[tile_q][dim_v] sum of P V"),
        },
        phases = {"work and queries", "S^T = K Q^T", "scale, score and mask", "softmax", "O += P V", "store O and LSE"},
        grid = {heads = "heads_q", seq = "seq_q", rows = s.tile_q},
    }
end

function host.backward_delta(problem)
    local rows = 64
    return {
        name = "backward_delta", template = "host/backward_delta.c", title = "D = rowsum(dO * O) - dLSE",
        threads = 1,
        constants = {{"dim_v", problem.dv, "head dim of v and o"}, {"tile_q", rows, "rows of a block"}},
        shared = {},
        phases = {"D of each row"},
        grid = {heads = "heads_q", seq = "seq_q", rows = rows},
    }
end

function host.backward_dkv(problem, s)
    local shared = {
        region("k", problem.d, s.tile_k, "[dim_qk][tile_k]"),
        region("v", problem.dv, s.tile_k, "[dim_v][tile_k]"),
        region("q", s.tile_q, problem.d, "[tile_q][dim_qk]"),
        region("dout", s.tile_q, problem.dv, "[tile_q][dim_v]"),
        region("s", s.tile_q, s.tile_k, "[tile_q][tile_k] S, then P"),
        region("dp", s.tile_q, s.tile_k, "[tile_q][tile_k] dP, then dS"),
        region("dk", s.tile_k, problem.d, "[tile_k][dim_qk] sum of dS^T Q"),
        region("dv", s.tile_k, problem.dv, "[tile_k][dim_v] sum of P^T dO"),
    }
    if problem.score then shared[#shared + 1] = region("slope", s.tile_q, s.tile_k, "[tile_q][tile_k] of the score") end
    return {
        name = "backward_dkv", template = "host/backward_dkv.c", calls = {queries = true, slope = true, classes = true, arrays = true}, title = "dV = P^T dO, dK = scale dS^T Q",
        threads = 1, constants = host_constants(problem, s), shared = shared,
        phases = {"work, keys and values", "S = Q K^T, dP = dO V^T", "P and dS", "dV += P^T dO, dK += dS^T Q",
                  "store dK and dV"},
        grid = {heads = "heads_kv", seq = "seq_k", rows = s.tile_k},
        needs = {"dk", "dv"},
    }
end

function host.backward_dq(problem, s)
    local shared = {
        region("q", problem.d, s.tile_q, "[dim_qk][tile_q]"),
        region("dout", problem.dv, s.tile_q, "[dim_v][tile_q]"),
        region("k", s.tile_k, problem.d, "[tile_k][dim_qk]"),
        region("v", s.tile_k, problem.dv, "[tile_k][dim_v]"),
        region("s", s.tile_k, s.tile_q, "[tile_k][tile_q] S^T, then P^T"),
        region("dp", s.tile_k, s.tile_q, "[tile_k][tile_q] dP^T, then dS^T"),
        region("dq", s.tile_q, problem.d, "[tile_q][dim_qk] sum of dS K"),
    }
    if problem.score then shared[#shared + 1] = region("slope", s.tile_k, s.tile_q, "[tile_k][tile_q] of the score") end
    return {
        name = "backward_dq", template = "host/backward_dq.c", calls = {keys = true, slope = true, classes = true, arrays = true}, title = "dQ = scale dS K",
        threads = 1, constants = host_constants(problem, s), shared = shared,
        phases = {"work, queries and dO", "S^T = K Q^T, dP^T = V dO^T", "P and dS", "dQ += dS K", "store dQ"},
        grid = {heads = "heads_q", seq = "seq_q", rows = s.tile_q},
        needs = {"dq"},
    }
end

-- The lists of kernels per pass: the order of launches.
local LISTS = {
    mma = {
        forward = function() return {mma.forward} end,
        backward = function(problem)
            if problem.deterministic then return {mma.backward_delta, mma.backward_dkv, mma.backward_dq} end
            return {mma.backward_delta, mma.backward_dkv, mma.backward_convert}
        end,
    },
    hopper = {
        forward = function() return {hopper.forward} end,
        backward = function(problem, s)
            if has_own_dq(problem, s) then return {hopper.backward_delta, hopper.backward_dkv, hopper.backward_dq} end
            if s.dq_turns == 1 then return {hopper.backward_delta, hopper.backward_dkv} end
            return {hopper.backward_delta, hopper.backward_dkv, hopper.backward_convert}
        end,
    },
    host = {
        forward = function() return {host.forward} end,
        backward = function() return {host.backward_delta, host.backward_dkv, host.backward_dq} end,
    },
}

function kernel.list(problem, pass, target, s)
    local list = {}
    local listed = target ~= "host" and functions.uses(problem).listed
    local function add(k, workspace)
        k.pass, k.target, k.symbol = pass, target, "attnloom_" .. k.name
        k.grid.batch = k.grid.batch or "batch"
        k.smem_bytes = k.smem_bytes or shared_total(k.shared)
        k.workspace = workspace
        for _, region in ipairs(workspace) do region.place = region.place or region.name end
        list[#list + 1] = k
    end
    for _, make in ipairs(LISTS[target][pass](problem, s)) do
        local k = make(problem, s)
        local workspace = pass == "backward" and backward_workspace(problem, target, s) or {}
        if k.grid.persistent and (pass == "backward" or listed and not functions.uses(problem).even) then
            workspace[#workspace + 1] = {name = "taken", type = "unsigned long long", bytes = 8, dims = {},
                                         doc = "works that blocks have taken beside their first, see count_begin"}
        end
        if listed and k.walks then
            local regions = class_regions(problem, target, k.walks)
            add(class_kernel(problem, k), regions)
            k.listed = true
            if target == "mma" or pass == "backward" then k.calls.keys, k.calls.queries = nil, nil end
            append(k.constants, {{"class_chunk", CLASS_CHUNK, "bytes: rows of classes are multiples of it"}})
            append(workspace, regions)
        end
        add(k, workspace)
    end
    return list
end

function kernel.smem_bytes(problem, pass, target, s)
    if target == "hopper" and pass == "backward" then return shared_total(hopper_backward_shared(problem, s)) end
    if target == "hopper" then return (select(2, hopper_bytes(problem, s))) end
    if target == "mma" then
        if pass == "forward" then return shared_total(mma_shared.forward(problem, s)) end
        local dq = problem.deterministic and shared_total(mma_shared.backward_dq(problem, s)) or 0
        return math.max(dq, shared_total(mma_shared.backward_dkv(problem, s)))
    end
    local most = 0
    for _, k in ipairs(kernel.list(problem, pass, target, s)) do most = math.max(most, k.smem_bytes) end
    return most
end

-- Whether the score reads an array at the key: one value an element.
local function score_reads_keys(problem)
    local function is_key(node) return node.op == "var" and (node.name == "k" or node.name == "col") end
    return expression.any(problem.score, function(node) return node.op == "load" and expression.any(node, is_key) end)
end

function kernel.accumulators(problem, pass, s)
    local d, dv = head_dims(problem)
    -- O; S counts more than once for what is made of it: maxima, P, indices, values a score reads
    if pass == "forward" then
        return s.tile_q // s.warps * (5 * dv + (score_reads_keys(problem) and 12 or 8) * s.tile_k) // 160
    end
    -- dK and dV; beside them S^T and dP^T in the same way, then a part of dQ
    local query_tiles = s.tile_q // math.min(s.warps, s.tile_q // s.rows) // 16
    local dq = problem.deterministic and 0 or 5 * query_tiles * dq_step(problem, s)
    return s.rows * (d + dv) // s.split // 32 + math.max(5 * s.rows * s.tile_q // s.split // 64, dq)
end

return kernel
