--[[ why: for people, what the generator chose for a problem and what a launch of a shape will visit.

  why.choice(plan, pass)          -> text: walk, schedules, candidates and reasons; of both passes without pass
  why.tiles(problem, pass, schedule, shape) -> {visited=, full=, partial=, skipped=, counted=, of=} for one head
  why.avoidable(problem, schedule, shape, partial) -> {looked=, empty=, partial=, full=}: how many of some partial tiles, looked at element by
                                     element, see nothing or all, so that a closer class would have spared them mask code or all
  why.text(plan, shape, pass)     -> all of it as text

Values of params are not known here, so tiles that depend on them count as partial. Called by main. ]]

local expression = require "expression"
local functions = require "functions"
local interval = require "interval"

local why = {}

local MOST_ROWS, MOST_TILES = 4096, 200000 -- counted of a shape, evenly spread; the text says when it is not all
local MOST_LOOKED = 32                     -- partial tiles that are looked at, evenly spread

local function walk_text(problem, target)
    local walk, bounds = interval.walk(problem.mask), target == "hopper" and interval.bounds(problem.mask)
    if not problem.mask then return "walk range: no mask, every tile is full but for the last" end
    local listed = target ~= "host" and functions.uses(problem).listed and "; tiles in lists, that a launch makes first or loom_prepare once" or ""
    if walk.kind == "range" then
        return ("walk range: %d span(s) of tiles for each row of tiles%s"):format(#walk.spans, listed)
    end
    return ("walk classify%s: %s%s"):format(bounds and (" inside the spans of `%s`"):format(expression.print(bounds)) or "", walk.reason, listed)
end

function why.choice(plan, only)
    local lines = {"problem  " .. plan.problem.text, ("target   %s on %s"):format(plan.target, plan.arch.name), walk_text(plan.problem, plan.target)}
    for _, pass in ipairs(plan.passes) do
        local shown = not only or pass.name == only
        if shown then
            lines[#lines + 1] = ("%s: %s%s"):format(pass.name, pass.text,
                pass.forced and ", as asked for" or pass.measured and ", the best that was measured on this device" or "")
            local other = pass.fallback
            if other then
                lines[#lines + 1] = ("  tensors that TMA cannot describe take target %s, %s"):format(other.target, other.text)
            end
        end
        for _, row in ipairs(shown and pass.candidates or {}) do
            local chosen = not pass.forced and not pass.measured and row.text == pass.text
            local verdict = row.rejected and "no: " .. row.rejected or ("cost %.0f%s%s"):format(row.cost,
                row.met > 1 and (", %.2f times what it is without blocks of the mask that do not fit"):format(row.met) or "",
                row.measured and ", the best of a sweep" or chosen and not pass.candidates[1].measured and ", the least" or "")
            lines[#lines + 1] = ("  %-60s %s"):format(row.text, verdict)
        end
    end
    return table.concat(lines, "\n") .. "\n"
end

-- Tiles in a union of intervals {lo, hi}.
local function union_size(intervals)
    table.sort(intervals, function(a, b) return a[1] < b[1] end)
    local size, done = 0, -1
    for _, span in ipairs(intervals) do
        local lo = math.max(span[1], done + 1)
        if lo <= span[2] then size, done = size + span[2] - lo + 1, span[2] end
    end
    return size
end

-- Counts of one row of tiles (forward: a tile of queries; backward: of keys): visited, full, counted.
local function count_range(problem, box, direction, first, length, tile)
    local outer, inner = {}, {}
    for _, span in ipairs(interval.spans(problem.mask, box, direction, {params = {}})) do
        local lo, hi = math.max(span.outer[1] - first, 0), math.min(span.outer[2] - first, length - 1)
        if lo <= hi then outer[#outer + 1] = {lo // tile, hi // tile} end
        lo, hi = math.max(span.inner[1] - first, 0), math.min(span.inner[2] - first, length - 1)
        inner[#inner + 1] = {(lo + tile - 1) // tile, (hi + 1) // tile - 1}
    end
    return union_size(outer), union_size(inner), (length + tile - 1) // tile
end

local function count_classes(problem, box, direction, first, length, tile)
    local visited, full, counted = 0, 0, 0
    local tiles = (length + tile - 1) // tile
    for t = 0, tiles - 1, math.max(1, tiles // MOST_TILES) do
        local lo, hi = first + t * tile, math.min(first + (t + 1) * tile, first + length) - 1
        if direction == "keys" then box.k_lo, box.k_hi = lo, hi else box.q_lo, box.q_hi = lo, hi end
        local class = interval.class(problem.mask, box, {params = {}})
        if class ~= "empty" then visited = visited + 1 end
        if class == "full" and hi - lo + 1 == tile then full = full + 1 end
        counted = counted + 1
    end
    return visited, full, counted
end

-- Positions of a shape whose sequences end together, as a class reads them.
local function whole(shape)
    local q_start = shape.seq_k - shape.seq_q
    return {b = 0, h = 0, hkv = 0, q_start = q_start, k_start = 0, seq_q = shape.seq_q, seq_k = shape.seq_k,
            q_lo = q_start, q_hi = q_start + shape.seq_q - 1, k_lo = 0, k_hi = shape.seq_k - 1}
end

-- Class of a box by all of its elements, some of which are looked at first: most boxes that are partial show it there.
local function exact_class(mask, box)
    local env = {b = 0, h = 0, hkv = 0, q_start = box.q_start, k_start = box.k_start, seq_q = box.seq_q, seq_k = box.seq_k}
    local seen, unseen = false, false
    for _, step in ipairs {{13, 7}, {1, 1}} do
        for q = box.q_lo, box.q_hi, step[1] do
            env.q, env.row = q, q - box.q_start
            for k = box.k_lo, box.k_hi, step[2] do
                env.k, env.col = k, k - box.k_start
                if expression.evaluate(mask, env) then seen = true else unseen = true end
                if seen and unseen then return "partial" end
            end
        end
    end
    return seen and "full" or "empty"
end

function why.avoidable(problem, schedule, shape, partial)
    local result, met = {looked = 0, empty = 0, partial = 0, full = 0}, 0
    local step = math.max(1, partial // MOST_LOOKED)
    local box = whole(shape)
    local first_q, last_q, first_k, last_k = box.q_lo, box.q_hi, box.k_lo, box.k_hi
    for q = first_q, last_q, schedule.tile_q do
        for k = first_k, last_k, schedule.tile_k do
            box.q_lo, box.q_hi = q, math.min(q + schedule.tile_q - 1, last_q)
            box.k_lo, box.k_hi = k, math.min(k + schedule.tile_k - 1, last_k)
            if interval.class(problem.mask, box, {params = {}}) == "partial" then
                met = met + 1
                if met % step == 0 then
                    local class = exact_class(problem.mask, box)
                    result.looked, result[class] = result.looked + 1, result[class] + 1
                    if result.looked == MOST_LOOKED then return result end
                end
            end
        end
    end
    return result
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
    local classify = interval.walk(problem.mask).kind == "classify"
    local count = classify and count_classes or count_range
    local step = math.max(1, rows // MOST_ROWS, classify and rows * columns // MOST_TILES or 1)
    local visited, full, counted = 0, 0, 0
    for row = 0, rows - 1, step do
        local lo, hi = own_start + row * own_tile, own_start + math.min((row + 1) * own_tile, own) - 1
        local box = whole(shape)
        if forward then box.q_lo, box.q_hi = lo, hi else box.k_lo, box.k_hi = lo, hi end
        local v, f, n = count(problem, box, forward and "keys" or "queries", other_start, other, other_tile)
        if not forward and hi - lo + 1 < own_tile then f = 0 end -- keys past the end are masked
        visited, full, counted = visited + v, full + f, counted + n
    end
    return {visited = visited, full = full, partial = visited - full, skipped = counted - visited, counted = counted,
            of = rows * columns}
end

local function reads_params(mask)
    return expression.any(mask, function(node) return node.op == "param" or node.op == "load" end)
end

function why.text(plan, shape, pass)
    local text = why.choice(plan, pass)
    for _, row in ipairs(plan.passes) do
        if shape and (not pass or row.name == pass) then
            local tiles = why.tiles(plan.problem, row.name, row.values, shape)
            text = text .. ("%s tiles of %dx%d at seq=%d:%d, per head: visited %d (full %d, partial %d), skipped %d%s\n"):format(
                row.name, row.values.tile_q, row.values.tile_k, shape.seq_q, shape.seq_k, tiles.visited, tiles.full, tiles.partial,
                tiles.skipped, tiles.counted < tiles.of and (", counted %d of %d"):format(tiles.counted, tiles.of) or "")
            if tiles.partial > 0 and tiles.counted == tiles.of and interval.walk(plan.problem.mask).kind == "classify"
                and not reads_params(plan.problem.mask) then
                local found = why.avoidable(plan.problem, row.values, shape, tiles.partial)
                text = text .. ("  of %d partial tiles, element by element, %d see nothing and %d all\n"):format(
                    found.looked, found.empty, found.full)
            end
        end
    end
    if shape and reads_params(plan.problem.mask) then
        text = text .. "the mask reads params, whose values are not known here: tiles that depend on them count as partial\n"
    end
    return text
end

return why
