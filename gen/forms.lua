--[[ forms: named masks and scores, one line each, in the algebra of gen/expression.lua.

A line is `name = formula` or `name(arguments) = formula`. An argument stands for any expression, `argument[]` for an
array of the problem's params; two lines may share a name and differ in their arguments. A formula may use forms above
it. A form is only shorthand: the canonical text of a problem holds the formula.

Sources are the papers that named them: Beltagy et al. 2020 (Longformer), Child et al. 2019 (Sparse Transformer), Xiao et al.
2023 (StreamingLLM), Zaheer et al. 2020 (Big Bird), Dao et al. 2021 (Pixelated Butterfly), Jiang et al. 2024 (MInference), Miao et
al. 2023 (SpecInfer), Hassani et al. 2022 (Neighborhood Attention), Press et al. 2021 (ALiBi), Raffel et al. 2019 (T5).

To add one, add a line here and its row in the README's table. Called by problem. ]]

local definitions = {
    -- Masks: true where query position q may see key position k.
    "causal = k <= q",
    "prefix(n) = k < n | causal",                -- the first n keys are seen by all, the others causally
    "unbounded(n) = n < 0 ? 2147483647 : n",     -- a negative width is no limit
    "window(l, r) = q - k <= unbounded(l) & k - q <= unbounded(r)", -- l keys back to r keys ahead, both included
    "document(ids[]) = ids[q] == ids[k]",        -- only inside one document
    "block_diagonal(n) = q / n == k / n",        -- only inside one block of n positions
    "chunked(n) = causal & block_diagonal(n)",   -- causal inside chunks of n positions: Llama 4
    "dilated(w, d) = abs(q - k) <= w * d & (q - k) % d == 0", -- every d-th of w * d keys on either side: Longformer, section 3.1
    "strided(n) = causal & (q - k < n | (q - k) % n == 0)", -- the last n keys, and every n-th: Sparse Transformer, section 4.2
    "fixed(n, c) = causal & (q / n == k / n | k % n >= n - c)", -- a chunk of n, and the last c keys of each: the same
    "streaming(n, w) = causal & (k < n | q - k < w)", -- n sinks and the last w keys: StreamingLLM, section 3
    "longformer(w, g) = abs(q - k) <= w | q < g | k < g", -- w keys on either side; the first g see all and are seen by all
    -- Blocks of 64: w on either side, the first g see all and are seen by all, about r more of a row: Big Bird, section 2
    "bigbird(w, g, r, seed) = abs(q / 64 - k / 64) <= w | q / 64 < g | k / 64 < g"
        .. " | hash(q / 64, k / 64, seed) % ((seq_k + 63) / 64) < r",
    "butterfly(n) = popcount(xor(q / n, k / n)) <= 1", -- blocks of n whose numbers differ in one bit: Pixelated Butterfly, section 3
    "vertical_slash(columns[], slashes[]) = causal & (columns[k] | slashes[q - k])", -- bools of keys and of distances: MInference
    "tree(enter[], leave[]) = enter[k] <= enter[q] & leave[q] <= leave[k]", -- the ancestors of a node, by times of a walk of the tree: SpecInfer
    "within(r, a, b) = abs(a - b) <= r",
    -- Positions y * width + x of an image, (t * height + y) * width + x of a video; no more than so many steps away in each
    -- direction: Neighborhood Attention, but cut at the borders instead of moved.
    "neighborhood_2d(width, r) = within(r, q / width, k / width) & within(r, q % width, k % width)",
    "neighborhood_3d(height, width, r_t, r) = within(r_t, q / (height * width), k / (height * width))"
        .. " & within(r, q / width % height, k / width % height) & within(r, q % width, k % width)",

    -- Scores: f32; s is the scaled logit.
    "softcap(c) = c * tanh(s / c)",              -- smoothly inside -c .. c: Gemma 2
    "alibi(slope) = s - slope * abs(q - k)",     -- ALiBi, section 3
    "alibi(slopes[]) = s - slopes[h] * abs(q - k)", -- one slope per query head
    "relative(table[], n) = s + table[h, min(max(k - q, -n), n) + n]", -- a bias for each distance up to n: Shaw et al. 2018, clipped
    -- Buckets of distances up to 128, each its own up to `own`, wider ones beyond, `num` in all: T5, section 2.1
    "t5_bucket(distance, own, num) = distance < own ? distance"
        .. " : min(own + i32(floor(log(f32(distance) / f32(own)) / log(128.0 / f32(own)) * f32(num - own))), num - 1)",
    "t5(table[]) = s + table[h, (k > q ? 16 : 0) + t5_bucket(abs(k - q), 8, 16)]", -- 32 buckets, half of them ahead
    "t5_causal(table[]) = s + table[h, t5_bucket(max(q - k, 0), 16, 32)]", -- 32 buckets, all of them back
}

local forms = {}

-- name -> list of {signature, names, arrays, body}; arrays[i] tells whether argument i is an array.
forms.by_name = {}

for _, line in ipairs(definitions) do
    local signature, body = line:match("^(.-) = (.+)$")
    local name, arguments = signature:match("^([%w_]+)%((.*)%)$")
    local form = {signature = signature, body = body, names = {}, arrays = {}}
    for argument, brackets in (arguments or ""):gmatch("([%w_]+)(%[?%]?)") do
        form.names[#form.names + 1] = argument
        form.arrays[#form.arrays + 1] = brackets == "[]"
    end
    name = name or signature
    forms.by_name[name] = forms.by_name[name] or {}
    table.insert(forms.by_name[name], form)
end

return forms
