--[[ forms: named masks and scores, one line each, in the algebra of gen/expression.lua.

A line is `name = formula` or `name(arguments) = formula`. An argument stands for any expression, `argument[]` for an
array of the problem's params; two lines may share a name and differ in their arguments. A formula may use forms above
it. A form is only shorthand: the canonical text of a problem holds the formula.

To add one, add a line here and its row in the README's table. Called by problem. ]]

local definitions = {
    -- Masks: true where query position q may see key position k.
    "causal = k <= q",
    "prefix(n) = k < n | causal",                -- the first n keys are seen by all, the others causally
    "unbounded(n) = n < 0 ? 2147483647 : n",     -- a negative width is no limit
    "window(l, r) = q - k <= unbounded(l) & k - q <= unbounded(r)", -- l keys back to r keys ahead, both included
    "document(ids[]) = ids[q] == ids[k]",        -- only inside one document

    -- Scores: f32; s is the scaled logit.
    "softcap(c) = c * tanh(s / c)",              -- smoothly inside -c .. c
    "alibi(slope) = s - slope * abs(q - k)",
    "alibi(slopes[]) = s - slopes[h] * abs(q - k)", -- one slope per query head
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
