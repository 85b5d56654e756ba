--[[ why: for people, what the generator chose for a problem and what a launch of a shape will visit.

  why.choice(plan)                -> text: walk, schedules, candidates and reasons
  why.tiles(problem, pass, schedule, shape) -> {visited=, full=, partial=, skipped=, counted=, of=} for one head
  why.text(plan, shape, pass)     -> both as text

Array values are not known here, so tiles that depend on them count as partial. Called by main. ]]

local interval = require "interval"

local why = {}

local MOST_TILES = 200000 -- classified one by one; beyond it every n-th row of tiles is counted

local function walk_text(problem)
    local walk = interval.walk(problem.mask)
    if not problem.mask then return "walk range: no mask, every tile is full but for the last" end
    if walk.kind == "range" then
        return ("walk range: %d span(s) of tiles for each row of tiles"):format(#walk.spans)
    end
    return ("walk classify: %s"):format(walk.reason)
end

function why.choice(plan)
    local lines = {"problem  " .. plan.problem.text, ("target   %s on %s"):format(plan.target, plan.arch.name), walk_text(plan.problem)}
    for _, pass in ipairs(plan.passes) do
        lines[#lines + 1] = ("%s: %s%s"):format(pass.name, pass.text, pass.forced and ", as asked for" or "")
        for _, row in ipairs(pass.candidates) do
            local verdict = row.rejected and "no: " .. row.rejected or ("cost %.0f%s"):format(row.cost,
                not pass.forced and row.text == pass.text and ", the least" or "")
            lines[#lines + 1] = ("  %-60s %s"):format(row.text, verdict)
        end
    end
    return table.concat(lines, "\n") .. "\n"
end

-- Classes of the tiles in one row of tiles (forward: queries; backward: keys), given as counts.
local function count_range(problem, box, direction, first, length, tile)
    local spans = interval.spans(problem.mask, box, direction, {params = {}})
    local visited, full = 0, 0
    local last = first + length - 1
    for t = 0, (length + tile - 1) // tile - 1 do
        local lo, hi = first + t * tile, math.min(first + (t + 1) * tile - 1, last)
        local meets, inside = false, false
        for _, span in ipairs(spans) do
            meets = meets or (span.outer[1] <= hi and lo <= span.outer[2])
            inside = inside or (span.inner[1] <= lo and lo + tile - 1 <= math.min(span.inner[2], last))
        end
        if meets then visited = visited + 1 end
        if meets and inside then full = full + 1 end
    end
    return visited, full
end

local function count_classes(problem, box, direction, first, length, tile)
    local visited, full = 0, 0
    for t = 0, (length + tile - 1) // tile - 1 do
        local lo, hi = first + t * tile, math.min(first + (t + 1) * tile, first + length) - 1
        if direction == "keys" then box.k_lo, box.k_hi = lo, hi else box.q_lo, box.q_hi = lo, hi end
        local class = interval.class(problem.mask, box, {params = {}})
        if class ~= "empty" then visited = visited + 1 end
        if class == "full" and hi - lo + 1 == tile then full = full + 1 end
    end
    return visited, full
end

function why.tiles(problem, pass, schedule, shape)
    local q_start, k_start = shape.seq_k - shape.seq_q, 0
    local forward = pass == "forward"
    local own, own_tile, own_start = shape.seq_q, schedule.tile_q, q_start
    local other, other_tile, other_start = shape.seq_k, schedule.tile_k, k_start
    if not forward then
        own, own_tile, own_start, other, other_tile, other_start = other, other_tile, other_start, own, own_tile, own_start
    end
    local rows, columns = (own + own_tile - 1) // own_tile, (other + other_tile - 1) // other_tile
    local step = math.max(1, rows * columns // MOST_TILES)
    local count = problem.mask and interval.walk(problem.mask).kind == "classify" and count_classes or count_range
    local visited, full, counted = 0, 0, 0
    for row = 0, rows - 1, step do
        local lo, hi = own_start + row * own_tile, own_start + math.min((row + 1) * own_tile, own) - 1
        local box = {b = 0, h = 0, hkv = 0, q_start = q_start, k_start = k_start, seq_q = shape.seq_q, seq_k = shape.seq_k,
                     q_lo = q_start, q_hi = q_start + shape.seq_q - 1, k_lo = k_start, k_hi = k_start + shape.seq_k - 1}
        if forward then box.q_lo, box.q_hi = lo, hi else box.k_lo, box.k_hi = lo, hi end
        local v, f = count(problem, box, forward and "keys" or "queries", other_start, other, other_tile)
        if not forward and hi - lo + 1 < own_tile then f = 0 end -- keys past the end are masked
        visited, full, counted = visited + v, full + f, counted + columns
    end
    return {visited = visited, full = full, partial = visited - full, skipped = counted - visited, counted = counted,
            of = rows * columns}
end

function why.text(plan, shape, pass)
    local text = why.choice(plan)
    for _, row in ipairs(plan.passes) do
        if shape and (not pass or row.name == pass) then
            local tiles = why.tiles(plan.problem, row.name, row.values, shape)
            text = text .. ("%s tiles of %dx%d at seq=%d:%d, per head: visited %d (full %d, partial %d), skipped %d%s\n"):format(
                row.name, row.values.tile_q, row.values.tile_k, shape.seq_q, shape.seq_k, tiles.visited, tiles.full, tiles.partial,
                tiles.skipped, tiles.counted < tiles.of and (", counted %d of %d"):format(tiles.counted, tiles.of) or "")
        end
    end
    return text
end

return why
