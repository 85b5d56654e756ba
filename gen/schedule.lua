--[[ schedule: the free choices of a kernel, as text and as a table of integers.

  schedule.choose(problem, pass, target, arch, forced, hint) -> schedule, candidates
                                                       or nil, {status=, field=, offset=, text=}
  candidates: list of {values=, text=, cost=, rejected=reason or nil, measured=true or nil}; the schedule is the first if it
              was measured to be the best, else the cheapest that is not rejected
  forced: schedule text or nil; it may leave out keys, which then take the default's value
  hint: typical shape or nil; sizes that are 0 are not known

Text: `tile=128x64 warps=4 blocks=2`, tile is queries x keys. Keys, per pass, in KEYS below.
Example: choose(bf16 d=128, "forward", "mma", sm_90) -> tile=128x64 warps=4 blocks=2 ]]

local functions = require "functions"
local interval = require "interval"
local kernel = require "kernel"
local arch_facts = require "arch"

local schedule = {}

-- Keys after `tile`, in the order of the text, each with its meaning and its least and largest value,
-- 1 and MOST_VALUE where none are given.
local MOST_VALUE = 9999
local KEYS = {
    mma = {
        forward = {
            {"warps", "warps of a block; each has tile_q / warps rows, 16 or 32"},
            {"blocks", "blocks meant to share a multiprocessor: bounds registers"},
        },
        backward = {
            {"warps", "warps of a block"},
            {"rows", "keys of a warp, 16 or 32"},
            {"split", "warps that share these keys, each owning a part of the head dim of dK and dV"},
            {"stages", "buffers of q and dO"},
            {"blocks", "blocks meant to share a multiprocessor: bounds registers"},
            {"dq_tile_k", "keys of a tile of the dQ pass, where the problem is deterministic"},
            {"dq_warps", "warps of its blocks, 16 queries each"},
        },
    },
    hopper = {
        forward = {
            {"stages", "buffers of keys and values", 2},
            {"q_buffers", "buffers of queries", 1, 2},
            {"q_registers", "1: queries are kept in registers, 0: read from shared memory at each use", 0, 1},
            {"p_sets", "2: a product with P runs under the exponentials of the next tile, 1: before them", 1, 2},
            {"ping_pong", "1: warpgroups take turns in starting products, 0: each starts when it is ready", 0, 1},
        },
        backward = {
            {"stages", "buffers of queries and dO", 2},
            {"dq_turns", "1: blocks add to dQ in turns, 0: as they come, or not at all where that is not allowed", 0, 1},
        },
    },
    host = {forward = {}, backward = {}},
}

local function host_tiles()
    local list = {}
    for i, tile in ipairs {{64, 64}, {64, 128}, {128, 64}, {32, 64}, {32, 32}} do
        list[i] = {tile_q = tile[1], tile_k = tile[2]}
    end
    return list
end

-- As many stages as shared memory holds beside O, up to HOPPER_MOST_STAGES.
local HOPPER_MOST_STAGES = 6
local function most_stages(problem, s)
    for stages = HOPPER_MOST_STAGES, 3, -1 do
        s.stages = stages
        if kernel.hopper_o_shared(problem, s) then return stages end
    end
    return 2
end

-- Sets of choices to rank, in order of preference where the cost is equal.
local SPACE = {
    mma = {
        forward = function()
            local list = {}
            for _, row in ipairs {{128, 64, 4}, {128, 128, 4}, {128, 64, 8}, {128, 32, 4}, {64, 64, 4}, {64, 32, 4},
                                  {64, 16, 4}, {32, 32, 2}, {32, 16, 2}} do
                for blocks = 2, 1, -1 do
                    list[#list + 1] = {tile_q = row[1], tile_k = row[2], warps = row[3], blocks = blocks}
                end
            end
            return list
        end,
        backward = function(problem)
            local list = {}
            for _, row in ipairs {
                {64, 128, 8, 32, 2}, {128, 128, 8, 32, 2}, {32, 128, 4, 32, 1}, {64, 128, 8, 16, 1}, {32, 128, 8, 16, 1},
                {64, 64, 4, 32, 2}, {64, 64, 8, 16, 2}, {64, 64, 4, 16, 1}, {32, 64, 4, 16, 1}, {32, 64, 8, 16, 2},
                {32, 32, 4, 16, 2}, {32, 32, 2, 16, 1}, {16, 32, 2, 16, 1}, {32, 16, 2, 16, 2},
            } do
                for blocks = 2, 1, -1 do
                    for stages = 2, 1, -1 do
                        for _, dq in ipairs(problem.deterministic and {{64, 4}, {32, 4}, {16, 4}, {16, 2}} or {{}}) do
                            list[#list + 1] = {
                                tile_q = row[1], tile_k = row[2], warps = row[3], rows = row[4], split = row[5],
                                stages = stages, blocks = blocks, dq_tile_k = dq[1], dq_warps = dq[2],
                            }
                        end
                    end
                end
            end
            return list
        end,
    },
    hopper = {
        forward = function(problem)
            local list = {}
            for _, tile in ipairs {{128, 128}, {128, 96}, {128, 64}, {128, 80}, {192, 128}, {192, 96}, {192, 80}, {192, 64}, {256, 64}} do
                for _, queries in ipairs {{2, 0}, {1, 0}, {1, 1}} do
                    local stages = most_stages(problem, {tile_q = tile[1], tile_k = tile[2], q_buffers = queries[1], q_registers = queries[2]})
                    for p_sets = 2, 1, -1 do -- without turns up to 12 % are lost
                        list[#list + 1] = {tile_q = tile[1], tile_k = tile[2], stages = stages, q_buffers = queries[1],
                                           q_registers = queries[2], p_sets = p_sets, ping_pong = 1}
                    end
                end
            end
            return list
        end,
        backward = function(problem)
            local list, keys = {}, kernel.hopper_backward_keys(problem)
            for _, row in ipairs(keys == 128 and {{128, 3}, {128, 2}, {64, 2}, {64, 3}} or {{64, 2}}) do
                list[#list + 1] = {tile_q = row[1], tile_k = keys, stages = row[2], dq_turns = 0} -- turns only where asked for
            end
            return list
        end,
    },
    host = {forward = host_tiles, backward = host_tiles},
}

-- Registers a thread needs besides its accumulators: fragments in flight, addresses, row statistics. Read off the
-- compiled kernels of tests/test_kernels.c.
local OTHER_REGISTERS = {forward = 22, backward = 30}
local NARROW_REGISTERS = 26 -- more of a backward whose warps have 16 keys of their own: an operand serves one mma
local COPY_REGISTERS = 32   -- more of a backward where copies to shared memory pass through registers

local function registers(problem, pass, s, a)
    local needed = kernel.accumulators(problem, pass, s) + OTHER_REGISTERS[pass]
    if pass == "backward" and s.rows == 16 and s.split == 1 then needed = needed + NARROW_REGISTERS end
    if pass == "backward" and not a.cp_async then needed = needed + COPY_REGISTERS end
    return needed
end

local HOST_MOST_ROWS = 512              -- of a tile: bounds the scratch memory of a thread
local HOST_CACHE_BYTES = 512 * 1024     -- the part of a core's L2 cache that scratch memory may fill
local HOST_LANES = 16                   -- multiply-adds a cycle: AVX-512 on one port, AVX2 on two
local TYPICAL_KEYS = 1024

-- Checks of a choice: {pass or nil for both, function(s, problem, pass, arch) -> why it is out, or nil}.
local RULES = {
    mma = {
        {"forward", function(s)
            if s.tile_q == 16 * s.warps or s.tile_q == 32 * s.warps then return nil end
            return ("tile_q %d over %d warps is not 16 or 32 rows a warp"):format(s.tile_q, s.warps)
        end},
        {nil, function(s)
            if s.tile_k % 16 == 0 and s.tile_k <= 256 then return nil end
            return ("tile_k %d is not a multiple of 16 up to 256"):format(s.tile_k)
        end},
        {"backward", function(s)
            if (s.rows == 16 or s.rows == 32) and s.warps % s.split == 0 and s.tile_k == s.rows * s.warps // s.split then return nil end
            return ("tile_k %d is not rows (16 or 32) * warps / split"):format(s.tile_k)
        end},
        {"backward", function(s)
            if s.tile_q % (16 * s.split) == 0 and s.tile_q % s.rows == 0 and s.tile_q <= 256
                and s.warps % math.min(s.warps, s.tile_q // s.rows) == 0 then
                return nil
            end
            return ("tile_q %d does not share out over %d warps"):format(s.tile_q, s.warps)
        end},
        {"backward", function(s)
            if s.stages == 1 or s.stages == 2 then return nil end
            return ("stages %d is not 1 or 2"):format(s.stages)
        end},
        {nil, function(s, problem, pass, a)
            local needed = registers(problem, pass, s, a)
            local limit = math.min(arch_facts.registers_thread, arch_facts.registers_sm // (32 * s.warps * s.blocks))
            if needed <= limit then return nil end
            return ("needs about %d registers a thread, %d block(s) of %d threads leave %d"):format(
                needed, s.blocks, 32 * s.warps, limit)
        end},
        {"backward", function(s, problem)
            if not s.dq_warps or (problem.d + 4 * s.dq_tile_k) // 2 + OTHER_REGISTERS.backward <= arch_facts.registers_thread then return nil end
            return ("dQ of d=%d with tiles of %d keys leaves no registers"):format(problem.d, s.dq_tile_k)
        end},
        {nil, function(s, problem, pass, a)
            local bytes = kernel.smem_bytes(problem, pass, "mma", s)
            local limit = math.min(a.smem_block_bytes, a.smem_sm_bytes // s.blocks - 1024)
            if bytes <= limit then return nil end
            return ("d=%d:%d with this tile needs %d bytes of shared memory, %d block(s) of %s have %d"):format(
                problem.d, problem.dv, bytes, s.blocks, a.name, limit)
        end},
    },
    hopper = {
        {"forward", function(s)
            if s.tile_q % 64 == 0 and s.tile_q >= 64 and s.tile_q <= 256 then return nil end
            return ("tile_q %d is not 64 to 256 in steps of 64, the rows of a warpgroup"):format(s.tile_q)
        end},
        {"forward", function(s)
            if s.tile_k % 16 == 0 and s.tile_k >= 16 and s.tile_k <= 256 then return nil end
            return ("tile_k %d is not a multiple of 16 up to 256"):format(s.tile_k)
        end},
        {"forward", function(s)
            if s.ping_pong == 0 or s.tile_q > 64 then return nil end
            return "ping_pong: tile_q 64 has one warpgroup, which has nobody to take turns with"
        end},
        {"forward", function(s, problem)
            local limit = kernel.hopper_registers(problem, s)[2]
            local needed = kernel.hopper_needed(problem, s)
            if needed <= limit then return nil end
            return ("needs about %d registers a thread, %d consumer warpgroups leave %d"):format(needed, s.tile_q // 64, limit)
        end},
        {"backward", function(s, problem)
            local keys = kernel.hopper_backward_keys(problem)
            if s.tile_k == keys and (s.tile_q == 64 or s.tile_q == 128 and keys == 128) then return nil end
            return ("tile=%dx%d: with d=%d:%d a block has %d keys, and 64%s queries at a time"):format(s.tile_q, s.tile_k, problem.d, problem.dv,
                keys, keys == 128 and " or 128" or "")
        end},
        {"backward", function(s, problem)
            if s.dq_turns == 0 or kernel.may_take_turns(problem) then return nil end
            return "dq_turns: dQ has a kernel of its own beyond a head dim of 128 and with a score"
        end},
        {"backward", function(s, problem)
            if s.tile_q == 64 or problem.d <= 64 then return nil end
            return ("tile_q 128: with d=%d dQ of 64 rows and all columns leaves no registers"):format(problem.d)
        end},
        {"backward", function(s, problem)
            local needed, limit = kernel.hopper_backward_registers(problem, s)
            if needed <= limit then return nil end
            return ("needs about %d registers a thread, 2 consumer warpgroups leave %d"):format(needed, limit)
        end},
        {nil, function(s, problem, pass, a)
            local bytes = kernel.smem_bytes(problem, pass, "hopper", s)
            if bytes <= a.smem_block_bytes then return nil end
            return ("d=%d:%d with this tile needs %d bytes of shared memory, a block of %s has %d"):format(
                problem.d, problem.dv, bytes, a.name, a.smem_block_bytes)
        end},
    },
    host = {
        {nil, function(s)
            local lanes = kernel.host_lanes
            if s.tile_q % lanes == 0 and s.tile_k % lanes == 0 and s.tile_q >= lanes and s.tile_k >= lanes
                and s.tile_q <= HOST_MOST_ROWS and s.tile_k <= HOST_MOST_ROWS then
                return nil
            end
            return ("tile=%dx%d: queries and keys must be multiples of %d up to %d"):format(
                s.tile_q, s.tile_k, lanes, HOST_MOST_ROWS)
        end},
    },
}

-- Cost: cycles of a multiprocessor for 64 x 64 elements of S, to rank candidates: matrix work, shared memory traffic
-- of operands, and waits at barriers, once a tile. Weights fitted to the sweep of bench/results/h200-mma-schedules.csv.
local MULTIPLY_ADDS, SHARED_BYTES = 1270, 128 -- of a cycle
-- Fewer 16-row mma tiles than these under way on a multiprocessor leave it waiting. Against the cost, with blocks of d=128
-- alone on an H200's: 1.07 with 8 tiles, 1.24 with 4, 2.3 with 2.
local BUSY_TILES, WAITING = 8, 0.25

local function mma_cost(s, matrix, traffic, waits)
    return (matrix / MULTIPLY_ADDS + traffic / SHARED_BYTES + waits) * 4096 / (s.tile_q * s.tile_k)
end

local function mma_forward_cost(problem, s)
    local depth = problem.d + problem.dv
    local traffic = 2 * (s.tile_q * problem.d + s.warps * s.tile_k * depth)
    return mma_cost(s, 0.96 * s.tile_q * s.tile_k * depth, 0.7 * traffic, 100 + 60 * s.warps / s.blocks)
end

local function mma_backward_cost(problem, s, a)
    local depth = problem.d + problem.dv
    local query_warps = math.min(s.warps, s.tile_q // s.rows)
    local scores = (s.rows + s.tile_q // s.split) * depth                                          -- S and dP of a warp
    local sums = s.tile_q * depth // s.split + (s.split > 1 and 2 * s.rows * s.tile_q or 0)        -- dK and dV
    local dq = s.tile_q // query_warps * s.tile_k + s.tile_k * problem.d * query_warps // s.warps
    local writes = s.tile_q * s.tile_k * (s.split > 1 and 2 or 1)
    local cost = mma_cost(s, 0.77 * s.tile_q * s.tile_k * (3 * problem.d + 2 * problem.dv),
                          1.1 * 2 * (s.warps * (scores + sums + dq) + writes),
                          (s.stages == 2 and 80 or 510) + (s.split > 1 and 730 or 0))
    local blocks = math.min(arch_facts.registers_sm // (32 * s.warps * arch_facts.registers_thread),
                            a.smem_sm_bytes // (kernel.smem_bytes(problem, "backward", "mma", s) + 1024))
    local tiles = s.warps * s.rows // 16 * math.max(s.blocks, blocks)
    return cost * (1 + WAITING * math.max(BUSY_TILES / tiles - 1, 0))
end

-- The same of a core. The tile's other side is loaded and converted anew for each tile, about 4 steps a vector; sums are
-- fetched, rescaled and put back once a tile; half of the tiles at the edge of a mask is computed in vain; scratch memory
-- that does not stay in the cache costs a quarter.
local function host_cost(problem, pass, s)
    local d, dv = problem.d, problem.dv
    local products = pass == "forward" and d + dv or 4 * d + 3 * dv
    local loads = 4 * (d + dv) / s.tile_q + (pass == "forward" and 4 * dv or 4 * (d + dv)) / s.tile_k
    local edge = (s.tile_q + s.tile_k) / 2 / TYPICAL_KEYS * products
    local spilled = kernel.smem_bytes(problem, pass, "host", s) > HOST_CACHE_BYTES and products / 4 or 0
    return 4096 * (products + loads + edge + spilled) / HOST_LANES
end

-- Hopper: cycles of a multiprocessor for 64 x 64 elements that are seen: of its tiles, products and the exponentials that do
-- not run under them, and what a tile and a work cost besides. Fitted to bench/results/h200-hopper-schedules.csv.
local HOPPER_PRODUCTS, HOPPER_EXPONENTIALS = 2048, 16 -- of a cycle: multiply-adds, values
local HOPPER_HIDDEN = {0.1, 0.46, 0.73, 0.73}         -- cycles of exponentials under one of products, by the number of warpgroups
local HOPPER_TILE, HOPPER_ONE_SET = 250, 40           -- cycles of a tile; more where it has one set of P
local HOPPER_SHARED_QUERIES = 10                      -- more where it reads its queries from shared memory
local HOPPER_WORK, HOPPER_WORK_DIM = 2400, 18         -- cycles of a work, and for each column of the head dim
local HOPPER_ONE_BUFFER = 250                         -- more where its queries wait for those of the work before
local HOPPER_PARTIAL = 600                            -- more for each tile that a mask cuts
local TYPICAL_HOPPER_SEQ = 2048

-- Lengths of a hint, typical ones where it is nil or 0, and the keys that a query may see, the most of the first, the middle
-- and the last: all under a causal mask, as many as a window is wide; of several spans the middle, since few may see all; of
-- what is classified no more than MOST_CLASSIFIED, where a larger tile gains little and a smaller one may skip more. Once a
-- choice, not once a candidate.
local MOST_CLASSIFIED = 8192
local function lengths_of(problem, hint)
    local seq_q = hint and hint.seq_q > 0 and hint.seq_q or TYPICAL_HOPPER_SEQ
    local seq_k = hint and hint.seq_k > 0 and hint.seq_k or TYPICAL_HOPPER_SEQ
    local walk = interval.walk(problem.mask)
    if walk.kind ~= "range" then return {seq_q = seq_q, seq_k = seq_k, seen = math.min(seq_k, MOST_CLASSIFIED)} end
    local first, most = seq_k - seq_q, 1
    local middle = first + seq_q // 2
    for _, query in ipairs(#walk.spans > 1 and {middle} or {first, middle, seq_k - 1}) do
        local box = {b = 0, h = 0, hkv = 0, q_start = first, k_start = 0, seq_q = seq_q, seq_k = seq_k, q_lo = query, q_hi = query}
        local seen = 0
        for _, span in ipairs(interval.spans(problem.mask, box, "keys", {params = {}})) do
            seen = seen + math.max(span.outer[2] - span.outer[1] + 1, 0)
        end
        most = math.max(most, seen)
    end
    return {seq_q = seq_q, seq_k = seq_k, seen = math.min(most, seq_k)}
end

local function hopper_forward_cost(problem, s, _, lengths)
    local seq_q, seq_k = lengths.seq_q, lengths.seq_k
    local elements, warpgroups = s.tile_q * s.tile_k, s.tile_q // 64
    local products = elements * (problem.d + problem.dv) / HOPPER_PRODUCTS
    local exponentials = elements / HOPPER_EXPONENTIALS
    local tile = products + math.max(0, exponentials - HOPPER_HIDDEN[warpgroups] * products) + HOPPER_TILE
        + (s.p_sets == 1 and HOPPER_ONE_SET or 0) + (s.q_registers == 0 and HOPPER_SHARED_QUERIES or 0)
    local work = HOPPER_WORK + HOPPER_WORK_DIM * problem.d + (s.q_buffers == 1 and s.q_registers == 0 and HOPPER_ONE_BUFFER or 0)
    local seen, visited = seq_k, seq_k // -s.tile_k * -s.tile_k
    if problem.mask then -- on average half of the keys, as under a causal mask, or what fewer a query sees
        seen = math.min(seq_k / 2, lengths.seen)
        visited = seen + (s.tile_q + s.tile_k) / 2
        work = work + HOPPER_PARTIAL * (s.tile_q // s.tile_k + 1)
    end
    local rows = seq_q // -s.tile_q * -s.tile_q
    return (visited / s.tile_k * tile + work) * rows / seq_q / seen / s.tile_q * 4096
end

-- The same of the backward: five products, and what a tile costs besides.
local function hopper_backward_cost(problem, s)
    return 64 * 64 * (3 * problem.d + 2 * problem.dv) / HOPPER_PRODUCTS + HOPPER_TILE * 4096 / (s.tile_q * s.tile_k)
end

-- What was the best of a sweep on an H200, in bursts and sustained, for head dims that many have: {most keys that a query
-- sees, schedule}, without mask, with one, where it is classified (warpgroups whose tiles are partial in turn wait for turns), where
-- queries see half of the keys or fewer, that as several spans of keys, and where a second set of P did not pay: beside the
-- exponentials of a capped score. Kernels with two sets
-- of P take half as long again to compile, so a gain of a hundredth does not count for them.
-- Sources: bench/results/h200-hopper-schedules.csv, h200-forms.csv, of classified masks the table of docs/design.md section 8.
local FAST_64 = "tile=256x64 stages=6 q_buffers=2 q_registers=0 p_sets=1 ping_pong=1"
local FAST_128 = "tile=128x128 stages=2 q_buffers=1 q_registers=1 p_sets=1 ping_pong=1"
local TWO_SETS_128 = "tile=128x128 stages=2 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1"
local ONE_SET_128 = "tile=128x128 stages=2 q_buffers=2 q_registers=0 p_sets=1 ping_pong=1"
local WIDE_128 = "tile=192x80 stages=4 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1"
local NARROW_128 = "tile=192x64 stages=3 q_buffers=2 q_registers=0 p_sets=1 ping_pong=1"
local FAST_256 = "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1"
local TWO_SETS_256 = "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=2 ping_pong=1"
local LONG_256 = "tile=128x80 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1"
local HOPPER_MEASURED = {
    [64] = {
        full = {{4096, FAST_64}, {math.huge, "tile=192x128 stages=4 q_buffers=2 q_registers=0 p_sets=1 ping_pong=1"}},
        masked = {{math.huge, FAST_64}},
        classified = {{math.huge, "tile=256x64 stages=6 q_buffers=2 q_registers=0 p_sets=1 ping_pong=0"}},
        narrow_spans = {{math.huge, "tile=192x64 stages=6 q_buffers=1 q_registers=1 p_sets=2 ping_pong=1"}},
    },
    [128] = {
        full = {{512, FAST_128}, {8192, TWO_SETS_128}, {math.huge, WIDE_128}},
        masked = {{2048, FAST_128}, {8192, TWO_SETS_128}, {math.huge, WIDE_128}},
        narrow = {{math.huge, NARROW_128}},
        one_set = {{8192, ONE_SET_128}, {math.huge, WIDE_128}},
    },
    [256] = {
        full = {{8192, FAST_256}, {math.huge, LONG_256}},
        masked = {{512, TWO_SETS_256}, {8192, FAST_256}, {math.huge, LONG_256}},
        one_set = {{8192, FAST_256}, {math.huge, LONG_256}},
    },
}

-- Sizes of the blocks that a mask is made of, {queries, keys}; nil where there are none that a tile can fit.
local LEAST_BLOCK = 32
local function blocks_of(mask)
    local part = mask and interval.block_part(mask)
    local blocks = part and interval.blocks(part)
    local function size(side) return side and side.size >= LEAST_BLOCK and side.size or math.huge end
    return blocks and {size(blocks.q), size(blocks.k)}
end

-- How many blocks a tile meets: where few of them are seen, a tile is visited as many times as often as one that fits. A part
-- of a tile's queries, of a warpgroup, is skipped where it sees nothing, and neighbours are often alike: half of it, as a power.
local function met(blocks, s)
    if not blocks then return 1 end
    local function along(size, tile)
        if size == math.huge or size % tile == 0 then return 1 end
        return tile % size == 0 and tile // size or 1 + (tile - 1) / size
    end
    return math.sqrt(along(blocks[1], s.tile_q)) * along(blocks[2], s.tile_k)
end

local function measured(problem, pass, target, lengths)
    local rows = target == "hopper" and pass == "forward" and problem.d == problem.dv and HOPPER_MEASURED[problem.d]
    if not rows then return end
    local uses = functions.uses(problem)
    local narrow = problem.mask and uses.walk == "range" and 2 * lengths.seen <= lengths.seq_k
        and (rows.narrow or uses.listed and rows.narrow_spans)
    local one_set = uses.capped and rows.one_set
    local classified = uses.walk == "classify" and rows.classified
    for _, row in ipairs(narrow or one_set or classified or problem.mask and rows.masked or rows.full) do
        if lengths.seen <= row[1] then return row[2] end
    end
end

local COST = {
    mma = {forward = mma_forward_cost, backward = mma_backward_cost},
    hopper = {forward = hopper_forward_cost, backward = hopper_backward_cost},
    host = {
        forward = function(problem, s) return host_cost(problem, "forward", s) end,
        backward = function(problem, s) return host_cost(problem, "backward", s) end,
    },
}

function schedule.text(target, pass, s)
    local words = {("tile=%dx%d"):format(s.tile_q, s.tile_k)}
    for _, key in ipairs(KEYS[target][pass]) do
        if s[key[1]] then words[#words + 1] = ("%s=%d"):format(key[1], s[key[1]]) end
    end
    return table.concat(words, " ")
end

local function invalid(offset, format, ...)
    return nil, {status = "INVALID", field = "schedule", offset = offset, text = format:format(...)}
end

-- Reads a schedule text over the values of `base`.
local function parse(text, target, pass, base)
    local values, known = {}, {tile = true}
    for key, value in pairs(base) do values[key] = value end
    local names = {"tile"}
    for _, key in ipairs(KEYS[target][pass]) do
        if base[key[1]] then known[key[1]], names[#names + 1] = key, key[1] end
    end
    for at, word in text:gmatch("()(%S+)") do
        local key, value = word:match("^([%w_]+)=(%w+)$")
        if not key or not known[key] then
            return invalid(at - 1, "'%s' is not a choice of the %s %s schedule; choices: %s", word, target, pass,
                           table.concat(names, " "))
        end
        if key == "tile" then
            local q, k = value:match("^(%d%d?%d?%d?)x(%d%d?%d?%d?)$")
            if not q then return invalid(at - 1, "tile=%s is not QUERIESxKEYS, as in tile=128x64", value) end
            values.tile_q, values.tile_k = math.tointeger(q), math.tointeger(k)
        else
            values[key] = value:match("^%d%d?%d?%d?$") and math.tointeger(value)
            local least, most = known[key][3] or 1, known[key][4] or MOST_VALUE
            if not values[key] or values[key] < least or values[key] > most then
                return invalid(at - 1, "%s=%s is not an integer from %d to %d", key, value, least, most)
            end
        end
    end
    return values
end

-- Reason why `s` cannot be, or nil.
local function rejection(s, problem, pass, target, a)
    for _, rule in ipairs(RULES[target]) do
        local reason = (not rule[1] or rule[1] == pass) and rule[2](s, problem, pass, a)
        if reason then return reason end
    end
end

function schedule.choose(problem, pass, target, a, forced, hint)
    local candidates, best, lengths = {}, nil, target == "hopper" and lengths_of(problem, hint)
    local blocks = target ~= "host" and blocks_of(problem.mask)
    local function add(s, text, is_measured)
        local row = {values = s, text = text, rejected = rejection(s, problem, pass, target, a)}
        row.met = met(blocks, s)
        if is_measured and (row.rejected or row.met > 1) then return end
        if not row.rejected then
            row.cost, row.measured = COST[target][pass](problem, s, a, lengths) * row.met, is_measured
            if not best or (not best.measured and row.cost < best.cost) then best = row end
        end
        candidates[#candidates + 1] = row
    end
    local space, known = SPACE[target][pass](problem, a), measured(problem, pass, target, lengths)
    if known then add(parse(known, target, pass, space[1]), known, true) end
    for _, s in ipairs(space) do
        local text = schedule.text(target, pass, s)
        if not (best and best.measured and text == known) then add(s, text) end
    end
    if forced then
        local s, message = parse(forced, target, pass, best and best.values or candidates[1].values)
        if not s then return nil, message end
        local reason = rejection(s, problem, pass, target, a)
        if reason then return invalid(0, "schedule '%s': %s", forced, reason) end
        return s, candidates
    end
    if not best then
        return nil, {status = "UNSUPPORTED", field = "problem.d", offset = -1,
                     text = ("no %s schedule of d=%d:%d fits %s: %s"):format(pass, problem.d, problem.dv, a.name,
                                                                            candidates[#candidates].rejected)}
    end
    return best.values, candidates
end

return schedule
