--[[ schedule: the free choices of a kernel, as text and as a table of integers.

  schedule.choose(problem, pass, target, arch, forced) -> schedule, candidates
                                                       or nil, {status=, field=, offset=, text=}
  candidates: list of {values=, text=, cost=, rejected=reason or nil}; the schedule is the cheapest that is not rejected
  forced: schedule text or nil; it may leave out keys, which then take the default's value

Text: `tile=128x64 warps=4 blocks=2`, tile is queries x keys. Keys, per pass, in KEYS below.
Example: choose(bf16 d=128, "forward", "mma", sm_90) -> tile=128x64 warps=4 blocks=2 ]]

local kernel = require "kernel"
local arch_facts = require "arch"

local schedule = {}

-- Keys after `tile`, in the order of the text, each with its meaning.
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
            {"dq_tile_k", "keys of a tile of the separate dQ pass (deterministic)"},
            {"dq_warps", "warps of its blocks, 16 queries each"},
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

-- Sets of choices to rank, in order of preference where the cost is equal.
local SPACE = {
    mma = {
        forward = function(problem)
            local list = {}
            for _, tile in ipairs {{128, 64, 4}, {128, 128, 4}, {128, 64, 8}, {128, 32, 4}, {64, 64, 4}, {64, 32, 4},
                                   {64, 16, 4}, {32, 32, 2}, {32, 16, 2}} do
                for _, blocks in ipairs {1, 2} do
                    list[#list + 1] = {tile_q = tile[1], tile_k = tile[2], warps = tile[3], blocks = blocks}
                end
            end
            return list
        end,
        backward = function(problem)
            local list = {}
            for _, row in ipairs {
                {64, 128, 8, 32, 2}, {128, 128, 8, 32, 2}, {64, 128, 8, 16, 1}, {32, 128, 8, 16, 1}, {64, 64, 8, 16, 2},
                {64, 64, 4, 16, 1}, {32, 64, 4, 16, 1}, {32, 64, 8, 16, 2}, {32, 32, 4, 16, 2}, {32, 32, 2, 16, 1},
                {16, 32, 2, 16, 1},
            } do
                for stages = 2, 1, -1 do
                    list[#list + 1] = {tile_q = row[1], tile_k = row[2], warps = row[3], rows = row[4], split = row[5],
                                       stages = stages, blocks = 1, dq_tile_k = problem.d > 128 and 32 or 64, dq_warps = 4}
                end
            end
            return list
        end,
    },
    host = {forward = host_tiles, backward = host_tiles},
}

-- Registers a thread needs besides its accumulators: fragments in flight, addresses, row statistics. Read off the
-- compiled kernels of bench/results.
local OTHER_REGISTERS = 30

local HOST_MOST_ROWS = 512              -- of a tile: bounds the scratch memory of a thread
local HOST_CACHE_BYTES = 512 * 1024     -- the part of a core's L2 cache that scratch memory may fill
local HOST_LANES = 16                   -- multiply-adds a cycle: AVX-512 on one port, AVX2 on two
local TYPICAL_KEYS = 1024

-- A choice is out if a test fails: {name, targets' pass or nil for both, test, message}.
local RULES = {
    mma = {
        {"tile_q is 16 or 32 rows a warp", "forward",
            function(s) return s.tile_q == 16 * s.warps or s.tile_q == 32 * s.warps end,
            function(s) return ("tile_q %d over %d warps is not 16 or 32 rows a warp"):format(s.tile_q, s.warps) end},
        {"tile_k is a multiple of 16", nil,
            function(s) return s.tile_k % 16 == 0 and s.tile_k <= 256 end,
            function(s) return ("tile_k %d is not a multiple of 16 up to 256"):format(s.tile_k) end},
        {"keys fit the warps", "backward",
            function(s)
                return (s.rows == 16 or s.rows == 32) and s.warps % s.split == 0 and s.tile_k == s.rows * s.warps // s.split
            end,
            function(s) return ("tile_k %d is not rows (16 or 32) * warps / split"):format(s.tile_k) end},
        {"queries fit the warps", "backward",
            function(s)
                return s.tile_q % (16 * s.split) == 0 and s.tile_q % s.rows == 0 and s.warps % math.min(s.warps, s.tile_q // s.rows) == 0
            end,
            function(s) return ("tile_q %d does not share out over %d warps"):format(s.tile_q, s.warps) end},
        {"stages", "backward",
            function(s) return s.stages == 1 or s.stages == 2 end,
            function(s) return ("stages %d is not 1 or 2"):format(s.stages) end},
        {"registers", nil,
            function(s, problem, pass)
                local limit = math.min(arch_facts.registers_thread,
                                       arch_facts.registers_sm // (32 * s.warps * s.blocks))
                return kernel.accumulators(problem, pass, s) + OTHER_REGISTERS <= limit
            end,
            function(s, problem, pass)
                return ("needs about %d registers a thread, %d blocks of %d threads leave %d"):format(
                    kernel.accumulators(problem, pass, s) + OTHER_REGISTERS, s.blocks, 32 * s.warps,
                    math.min(arch_facts.registers_thread, arch_facts.registers_sm // (32 * s.warps * s.blocks)))
            end},
        {"shared memory", nil,
            function(s, problem, pass, a)
                local bytes = kernel.smem_bytes(problem, pass, "mma", s)
                return bytes <= a.smem_block_bytes and s.blocks * (bytes + 1024) <= a.smem_sm_bytes
            end,
            function(s, problem, pass, a)
                return ("d=%d:%d with this tile needs %d bytes of shared memory, %d block(s) of %s have %d"):format(
                    problem.d, problem.dv, kernel.smem_bytes(problem, pass, "mma", s), s.blocks, a.name,
                    math.min(a.smem_block_bytes, a.smem_sm_bytes // s.blocks - 1024))
            end},
    },
    host = {
        {"tile sizes", nil,
            function(s)
                return s.tile_q % kernel.host_lanes == 0 and s.tile_k % kernel.host_lanes == 0
                    and s.tile_q >= kernel.host_lanes and s.tile_k >= kernel.host_lanes
                    and s.tile_q <= HOST_MOST_ROWS and s.tile_k <= HOST_MOST_ROWS
            end,
            function(s)
                return ("tile=%dx%d: queries and keys must be multiples of %d up to %d"):format(
                    s.tile_q, s.tile_k, kernel.host_lanes, HOST_MOST_ROWS)
            end},
    },
}

-- Cost in cycles of a multiprocessor per 1024 elements of S, to rank candidates: matrix work and shared-memory traffic
-- overlap in part, idle time falls with the warps in flight.
local COST = {
    mma = function(problem, pass, s)
        local d, dv = problem.d, problem.dv
        local rows = pass == "forward" and s.tile_q // s.warps or s.rows
        local products = pass == "forward" and d + dv or 3 * d + 2 * dv
        local matrix = 1024 * products / 1024                        -- 1024 multiply-adds a cycle
        local traffic = 1024 * products * 2 / rows / 128             -- each warp reads each B operand: 128 bytes a cycle
        local columns = pass == "forward" and s.tile_k or s.tile_q   -- barriers and waits: once a tile
        local idle = 1024 * 600 / (s.tile_q * s.tile_k) / s.blocks * (s.stages == 1 and 2 or 1)
        local warps = s.warps * s.blocks
        return math.max(matrix, traffic) + 0.5 * math.min(matrix, traffic) + idle + 1024 / (columns * warps)
    end,
    -- Cycles of a core per 1024 elements of S. Each tile loads and converts K and V (forward, dQ) or Q and dO (dK, dV) anew,
    -- about 4 steps a vector, and rescales O; half of the tiles on the edge of a mask is computed in vain.
    host = function(problem, pass, s)
        local d, dv = problem.d, problem.dv
        local products = pass == "forward" and d + dv or 4 * d + 3 * dv
        local matrix = 1024 * products / HOST_LANES
        local loads = 1024 * 4 * (d + dv) / HOST_LANES / s.tile_q
        if pass == "forward" then
            loads = loads + 1024 * 2 * dv / HOST_LANES / s.tile_k
        else
            loads = loads + 1024 * 4 * (d + dv) / HOST_LANES / s.tile_k
        end
        local edge = (s.tile_q + s.tile_k) / 2 / TYPICAL_KEYS * matrix
        local spilled = kernel.smem_bytes(problem, pass, "host", s) > HOST_CACHE_BYTES and matrix / 4 or 0
        return matrix + loads + edge + spilled
    end,
}

function schedule.text(target, pass, s)
    local words = {("tile=%dx%d"):format(s.tile_q, s.tile_k)}
    for _, key in ipairs(KEYS[target][pass]) do words[#words + 1] = ("%s=%d"):format(key[1], s[key[1]]) end
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
    for i, key in ipairs(KEYS[target][pass]) do known[key[1]], names[i + 1] = true, key[1] end
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
            if not values[key] or values[key] < 1 then
                return invalid(at - 1, "%s=%s is not an integer from 1 to 9999", key, value)
            end
        end
    end
    return values
end

-- Reason why `s` cannot be, or nil.
local function rejection(s, problem, pass, target, a)
    for _, rule in ipairs(RULES[target]) do
        if (not rule[2] or rule[2] == pass) and not rule[3](s, problem, pass, a) then
            return rule[4](s, problem, pass, a)
        end
    end
end

function schedule.choose(problem, pass, target, a, forced)
    local candidates, best = {}, nil
    for i, s in ipairs(SPACE[target][pass](problem)) do
        local row = {values = s, text = schedule.text(target, pass, s), rejected = rejection(s, problem, pass, target, a)}
        if not row.rejected then
            row.cost = COST[target](problem, pass, s)
            if not best or row.cost < best.cost then best = row end
        end
        candidates[i] = row
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
