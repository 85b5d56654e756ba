-- forms: each against a definition of its own, at every pair of positions of a short sequence.

local expression = require "expression"
local problem = require "problem"

local tests = {}

local function parse(text)
    local p, errors = problem.parse("bf16 d=64 " .. text)
    if not p then error(problem.format_errors(text, errors), 2) end
    return p
end

-- Calls visit(q, k, value) for all positions below n; arrays: name -> function of indices.
local function each(node, n, arrays, visit)
    local env = {h = 0, b = 0, hkv = 0, seq_q = n, seq_k = n, q_start = 0, k_start = 0, s = 0.0, params = {},
                 load = function(name, indices) return arrays[name](table.unpack(indices)) end}
    for q = 0, n - 1 do
        for k = 0, n - 1 do
            env.q, env.k, env.row, env.col = q, k, q, k
            visit(q, k, expression.evaluate(node, env))
        end
    end
end

local function check_mask(text, n, right, arrays, params)
    local p = parse(("mask={%s}%s"):format(text, params and (" params={%s}"):format(params) or ""))
    local num_seen = 0
    each(p.mask, n, arrays or {}, function(q, k, seen)
        num_seen = num_seen + (seen and 1 or 0)
        if seen ~= right(q, k) then error(("%s: q=%d k=%d is %s"):format(text, q, k, seen), 3) end
    end)
    assert(num_seen > n / 2 and num_seen < n * n, text .. " tells nothing apart")
end

function tests.local_ones()
    check_mask("block_diagonal(7)", 40, function(q, k) return q - q % 7 == k - k % 7 end)
    check_mask("chunked(7)", 40, function(q, k) return k <= q and k >= q - q % 7 end)
    check_mask("dilated(3, 4)", 60, function(q, k)
        for i = -3, 3 do if k == q + 4 * i then return true end end
        return false
    end)
    check_mask("strided(8)", 60, function(q, k) return k <= q and (k >= q - 7 or math.fmod(q - k, 8) == 0) end)
    check_mask("fixed(8, 2)", 60, function(q, k) return k <= q and (k >= q - q % 8 or k % 8 == 6 or k % 8 == 7) end)
    check_mask("streaming(3, 10)", 60, function(q, k) return k <= q and (k <= 2 or k > q - 10) end)
    check_mask("longformer(5, 2)", 60, function(q, k) return q <= 1 or k <= 1 or k >= q - 5 and k <= q + 5 end)
end

function tests.butterfly()
    local partners = {} -- of a block: itself and those at a distance of a power of two inside the aligned pair of that size
    for a = 0, 7 do
        partners[a] = {[a] = true}
        for _, step in ipairs {1, 2, 4} do
            local upper = a // step % 2 == 1
            partners[a][upper and a - step or a + step] = true
        end
    end
    check_mask("butterfly(8)", 64, function(q, k) return partners[q // 8][k // 8] == true end)
end

function tests.bigbird()
    local p = parse "mask={bigbird(1, 1, 3, 5)}"
    local n, blocks, random = 64 * 40, {}, 0
    for q = 0, n - 1, 64 do
        for k = 0, n - 1, 64 do
            local env = {seq_q = n, seq_k = n, q = q, k = k, params = {}}
            local seen = expression.evaluate(p.mask, env)
            env.q, env.k = q + 63, k + 17
            assert(expression.evaluate(p.mask, env) == seen, "a block is seen as a whole")
            local a, b = q // 64, k // 64
            if a == 0 or b == 0 or math.abs(a - b) <= 1 then assert(seen) elseif seen then random = random + 1 end
            blocks[#blocks + 1] = seen
        end
    end
    assert(random > 60 and random < 180, random .. " random blocks of 40 rows with about 3 each")
end

function tests.by_arrays()
    local columns, slashes = {[0] = true, [5] = true, [20] = true}, {[0] = true, [3] = true, [11] = true}
    check_mask("vertical_slash(columns, slashes)", 40, function(q, k) return k <= q and (columns[k] or slashes[q - k]) == true end,
        {columns = function(i) return columns[i] == true end, slashes = function(i) return slashes[i] == true end},
        "columns: bool[seq_k], slashes: bool[seq_k]")
    -- A tree by parents, and the times at which a walk enters and leaves its nodes.
    local n, parent, children, enter, leave, clock = 30, {}, {}, {}, {}, 0
    for node = 0, n - 1 do children[node] = {} end
    for node = 1, n - 1 do
        parent[node] = (node * 7 + 3) % node
        table.insert(children[parent[node]], node)
    end
    local function walk(node)
        enter[node], clock = clock, clock + 1
        for _, child in ipairs(children[node]) do walk(child) end
        leave[node], clock = clock, clock + 1
    end
    walk(0)
    check_mask("tree(enter, leave)", n, function(q, k)
        while q and q ~= k do q = parent[q] end
        return q == k
    end, {enter = function(i) return enter[i] end, leave = function(i) return leave[i] end}, "enter: i32[seq_k], leave: i32[seq_k]")
end

function tests.neighbourhoods()
    check_mask("neighborhood_2d(6, 1)", 36, function(q, k)
        for dy = -1, 1 do
            for dx = -1, 1 do
                local y, x = q // 6 + dy, q % 6 + dx
                if x >= 0 and x < 6 and k == 6 * y + x then return true end
            end
        end
        return false
    end)
    check_mask("neighborhood_3d(3, 4, 1, 1)", 48, function(q, k)
        local function place(i) return i // 12, i // 4 % 3, i % 4 end
        local t, y, x = place(q)
        local u, v, w = place(k)
        return math.max(math.abs(t - u), math.abs(y - v), math.abs(x - w)) <= 1
    end)
end

local function check_score(text, declaration, n, right)
    local p = parse(("score={%s} params={table: %s}"):format(text, declaration))
    each(p.score, n, {table = function(_, i) return i + 0.0 end}, function(q, k, value)
        if value ~= right(q, k) then error(("%s: q=%d k=%d is %g, not %g"):format(text, q, k, value, right(q, k)), 3) end
    end)
end

-- The bucket of a distance as its definition goes: the largest whose first distance is not beyond it.
local function bucket(distance, own, num)
    if distance < own then return distance end
    local last = own
    for i = own, num - 1 do
        if own * (128 / own) ^ ((i - own) / (num - own)) <= distance * (1 + 1e-12) then last = i end
    end
    return last
end

function tests.positions_by_tables()
    check_score("relative(table, 5)", "f32[heads_q, 11]", 20, function(q, k) return math.max(-5, math.min(5, k - q)) + 5 end)
    check_score("t5(table)", "f32[heads_q, 32]", 200, function(q, k) return bucket(math.abs(k - q), 8, 16) + (k > q and 16 or 0) end)
    check_score("t5_causal(table)", "f32[heads_q, 32]", 200, function(q, k) return k > q and 0 or bucket(q - k, 16, 32) end)
end

return tests
