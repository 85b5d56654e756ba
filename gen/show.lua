--[[ show: a mask as a picture, for a terminal or as SVG. A wrong pattern is seen at a glance.

  show.text(plan, shape)  -> the picture in characters, and what it stands for
  show.svg(plan, shape)   -> the same picture as an SVG file

Queries go down, keys to the right, of batch 0 and head 0. Up to MOST_CELLS positions either way every element is a cell,
seen or not; beyond, a cell is a box of whole tiles of the forward schedule and has the class of the box: empty, partial, full.
Values of params are not known here: what depends on them counts as partial. Called by main. ]]

local expression = require "expression"
local interval = require "interval"
local why = require "why"

local show = {}

local MOST_CELLS = 64
local SVG_CELL = 8
local COLORS = {partial = "#9ecae1", full = "#2171b5"}

-- {rows, of which each is a list of classes; cell_q, cell_k: positions of a cell; elements: whether these are 1}
local function picture(plan, shape)
    local values, mask = plan.passes[1].values, plan.problem.mask
    local elements = shape.seq_q <= MOST_CELLS and shape.seq_k <= MOST_CELLS
    local function cell(length, tile)
        local tiles = (length + tile - 1) // tile
        return (tiles + MOST_CELLS - 1) // MOST_CELLS * tile
    end
    local result = {rows = {}, elements = elements, cell_q = elements and 1 or cell(shape.seq_q, values.tile_q),
                    cell_k = elements and 1 or cell(shape.seq_k, values.tile_k)}
    local q_start = shape.seq_k - shape.seq_q
    local box = {b = 0, h = 0, hkv = 0, q_start = q_start, k_start = 0, seq_q = shape.seq_q, seq_k = shape.seq_k}
    for first_q = 0, shape.seq_q - 1, result.cell_q do
        local row = {}
        box.q_lo, box.q_hi = q_start + first_q, q_start + math.min(first_q + result.cell_q, shape.seq_q) - 1
        for first_k = 0, shape.seq_k - 1, result.cell_k do
            box.k_lo, box.k_hi = first_k, math.min(first_k + result.cell_k, shape.seq_k) - 1
            row[#row + 1] = mask and interval.class(mask, box, {params = {}}) or "full"
        end
        result.rows[#result.rows + 1] = row
    end
    return result
end

local HALVES = {["empty empty"] = " ", ["full empty"] = "▀", ["empty full"] = "▄", ["full full"] = "█"}
local WHOLE = {empty = "·", partial = "▒", full = "█"}

local function is_unknown(rows)
    for _, row in ipairs(rows) do
        for _, class in ipairs(row) do
            if class == "partial" then return true end
        end
    end
    return false
end

-- Two rows of elements are one line of half blocks; classes, or elements that are not known, have a line a row.
local function lines_of(p)
    local lines = {}
    local halves = p.elements and not is_unknown(p.rows)
    for i = 1, #p.rows, halves and 2 or 1 do
        local line = {}
        for j, class in ipairs(p.rows[i]) do
            local below = halves and p.rows[i + 1] and p.rows[i + 1][j] or "empty"
            line[j] = halves and HALVES[class .. " " .. below] or WHOLE[class]
        end
        lines[#lines + 1] = table.concat(line)
    end
    return lines, halves
end

function show.text(plan, shape)
    local p = picture(plan, shape)
    local lines, halves = lines_of(p)
    local values = plan.passes[1].values
    local tiles = why.tiles(plan.problem, "forward", values, shape)
    table.insert(lines, 1, plan.problem.mask and "mask     " .. expression.print(plan.problem.mask) or "no mask")
    lines[#lines + 1] = p.elements and ("queries down, keys to the right, %s"):format(
            halves and "two queries a line" or "a query a line; ▒ depends on params")
        or ("queries down, keys to the right, a cell is %d queries x %d keys: █ all seen, ▒ some or unknown, · none"):format(p.cell_q, p.cell_k)
    lines[#lines + 1] = ("tiles of %dx%d: visited %d of %d (full %d, partial %d), %.1f %% of those of a dense mask"):format(
        values.tile_q, values.tile_k, tiles.visited, tiles.counted, tiles.full, tiles.partial, 100 * tiles.visited / math.max(tiles.counted, 1))
    return table.concat(lines, "\n") .. "\n"
end

function show.svg(plan, shape)
    local p = picture(plan, shape)
    local columns = p.rows[1] and #p.rows[1] or 0
    local width, height = SVG_CELL * columns, SVG_CELL * #p.rows
    local lines = {('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d">'):format(width, height, width, height),
                   ('<rect width="%d" height="%d" fill="white" stroke="black"/>'):format(width, height)}
    for i, row in ipairs(p.rows) do
        local j = 1
        while j <= #row do -- neighbours of one class are one rectangle
            local first, class = j, row[j]
            while row[j] == class do j = j + 1 end
            if COLORS[class] then
                lines[#lines + 1] = ('<rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>'):format(
                    SVG_CELL * (first - 1), SVG_CELL * (i - 1), SVG_CELL * (j - first), SVG_CELL, COLORS[class])
            end
        end
    end
    lines[#lines + 1] = "</svg>"
    return table.concat(lines, "\n") .. "\n"
end

return show
