-- expression: reading, folding, printing and slopes, against values that random.lua computes by itself.

local expression = require "expression"
local forms = require "forms"
local problem = require "problem"
local random = require "random"

local tests = {}

local PARAMS = {}
for _, param in ipairs(problem.parse("fp32 d=8 mask={l == 0 & f32(doc[q]) == x & on & pick[h] & ramp[k] == x} params={"
    .. random.declarations .. "}").params) do
    PARAMS[param.name] = param
end

local function parse(text, score)
    local errors = {}
    local node = expression.parse(text, {params = PARAMS, forms = forms.by_name, score = score, field = "field", errors = errors, used = {}})
    return node, errors
end

local function must_parse(text, score)
    local node, errors = parse(text, score)
    if not node then error(problem.format_errors(text, errors), 2) end
    return node
end

local function same(a, b)
    if a == b then return true end
    if a ~= a and b ~= b then return true end
    return false
end

local function environment(env)
    local values = {params = {l = env.l, x = env.x, on = env.on}, load = function(name, indices)
        local value = env[name][indices[1] + 1]
        if value == nil then return ({doc = 0, ramp = 0.0, pick = false})[name] end
        return value
    end}
    for _, name in ipairs {"q", "k", "b", "h", "hkv", "seq_q", "seq_k", "s"} do values[name] = env[name] end
    values.row, values.col = env.q - env.q_start, env.k - env.k_start
    return values
end

local function equal(a, b)
    if a.op ~= b.op or a.type ~= b.type or a.name ~= b.name or a.value ~= b.value then return false end
    if #(a.args or {}) ~= #(b.args or {}) then return false end
    for i, arg in ipairs(a.args or {}) do
        if not equal(arg, b.args[i]) then return false end
    end
    return true
end

function tests.random_expressions_keep_their_value_and_their_text()
    random.seed(7)
    local types = {"i32", "f32", "bool"}
    for i = 1, 3000 do
        local text, f = random.expression(types[i % 3 + 1], i % 5, true)
        local node = must_parse(text, true)
        local printed = expression.print(node)
        local again = must_parse(printed, true)
        assert(equal(node, again), "printed and read again it is another: " .. printed .. " -> " .. expression.print(again))
        for _ = 1, 4 do
            local env = random.launch()
            env.q = env.q_start + random.pick(0, env.seq_q - 1)
            env.k = env.k_start + random.pick(0, env.seq_k - 1)
            local value, wanted = expression.evaluate(node, environment(env)), f(env)
            if not same(value, wanted) then
                error(("%s\n%s\nis %s, not %s at q=%d k=%d l=%d"):format(text, printed, value, wanted, env.q, env.k, env.l))
            end
        end
    end
end

local function prints(text, wanted, score)
    local printed = expression.print(must_parse(text, score))
    if printed ~= wanted then error(("%s prints as %s, not %s"):format(text, printed, wanted), 2) end
end

function tests.meaning_of_constants()
    prints("-7 / 2", "-4")
    prints("-7 % 2", "1")
    prints("7 % -2", "-1")
    prints("5 / 0 + 5 % 0", "0")
    prints("2147483647 + 1", "-2147483648")
    prints("-2147483648 / -1", "-2147483648")
    prints("65536 * 65536", "0")
    prints("abs(-2147483648)", "-2147483648")
    prints("i32(-2.75)", "-2")
    prints("i32(3e9)", "2147483647")
    prints("i32(0.0 / 0.0)", "i32(0.0 / 0.0)")
    prints("0.1 + 0.2", "0.3")
    prints("16777216.0 + 1.0", "16777216.0")
    prints("1e38 * 10.0", "inf")
    prints("f32(2147483647)", "2147483648.0")
    prints("min(3, 4.5)", "3.0")
    prints("floor(-1.5)", "-2.0")
    prints("xor(6, 3)", "5")
    prints("popcount(-1)", "32")
    prints("6 & 3", "2")
    prints("6 | 3", "7")
    prints("hash(1, 2, 3)", tostring(expression.evaluate(must_parse("hash(b, 2, 3)"), {b = 1})))
    prints("hash(1, 2, 3) == hash(2, 1, 3)", "false")
    prints("1 < 2 ? 3 : 4", "3")
end

function tests.canonical_text()
    prints("q >= k", "k <= q")
    prints("q > k", "k < q")
    prints("4 > k", "k < 4")
    prints("k - q <= 0", "k <= q")
    prints("0 <= q - k", "k <= q")
    prints("(q) + (k * (2))", "q + 2 * k")
    prints("q - (k - 1)", "q - (k - 1)")
    prints("q + 1 + 2 - 3", "q")
    prints("q - -5", "q + 5")
    prints("--q", "q")
    prints("q * 1 + 0 * k", "q")
    prints("!(k < q)", "q <= k")
    prints("!(x < 1.0)", "!(x < 1.0)")
    prints("!!on", "on")
    prints("on == true", "on")
    prints("on & true", "on")
    prints("on | true", "true")
    prints("k <= q & on & k <= q", "on & k <= q")
    prints("(on & k <= q) & q < 9", "on & k <= q & q < 9")
    prints("on & (k <= q | q < 9)", "on & (k <= q | q < 9)")
    prints("(on ? q : k) + 1", "(on ? q : k) + 1")
    prints("on ? q : (k < 3 ? 1 : 2)", "on ? q : k < 3 ? 1 : 2")
    prints("!on ? 1 : 2", "on ? 2 : 1")
    prints("x + -0.0", "x")
    prints("x + 0.0", "x + 0.0")
    prints("q + x", "f32(q) + x")
    prints("s * 1", "s", true)
    prints("2 * s", "2.0 * s", true)
    prints("-(q + 1)", "-(q + 1)")
    prints("q <= 2147483647", "true")
    prints("1e10 + x", "x + 1e+10")
end

function tests.named_forms()
    prints("causal", "k <= q")
    prints("window(4095, 0)", "k <= q & q - k <= 4095")
    prints("window(4095, 0) & causal", "k <= q & q - k <= 4095")
    prints("window(-1, 3)", "k - q <= 3")
    prints("window(-1, -1)", "true")
    prints("window(l, -1)", "q - k <= (l < 0 ? 2147483647 : l)")
    prints("prefix(7)", "k < 7 | k <= q")
    prints("document(doc)", "doc[q] == doc[k]")
    prints("softcap(50)", "50.0 * tanh(s / 50.0)", true)
    prints("alibi(0.5)", "s - 0.5 * f32(abs(q - k))", true)
    prints("alibi(ramp)", "s - ramp[h] * f32(abs(q - k))", true)
    prints("softcap(30) - x", "30.0 * tanh(s / 30.0) - x", true)
end

local function refuses(text, wanted, offset, score)
    local node, errors = parse(text, score)
    if node then error(text .. " is accepted", 2) end
    for _, err in ipairs(errors) do
        if err.message:find(wanted, 1, true) and err.offset == offset then return end
    end
    error(("%.80s gives %q at %d"):format(text, errors[1].message, errors[1].offset), 2)
end

function tests.errors()
    refuses("", "expected a value, found the end", 0)
    refuses("q +", "expected a value, found the end", 3)
    refuses("(q", "expected ) to close", 2)
    refuses("q k", 'expected an operator, found "k"', 2)
    refuses("q = k", "write == to compare", 2)
    refuses("on && on", "write & for and", 3)
    refuses("on || on", "write | for or", 3)
    refuses("0 <= k <= q", "do not chain", 7)
    refuses("on + 1", "+ takes i32 or f32, not bool and i32", 3)
    refuses("q & on", "& takes two bools or two i32, not i32 and bool", 2)
    refuses("!q", "! takes bool, not i32", 0)
    refuses("q % x", "% takes i32, not i32 and f32", 2)
    refuses("q ? 1 : 2", "the condition of ?: must be bool", 2)
    refuses("on ? 1 : on", "both results of ?:", 3)
    refuses("exp(on)", "exp takes f32 or i32, not bool", 0)
    refuses("min(q)", "min takes 2 arguments, not 1", 0)
    refuses("min", "min is a function", 0)
    refuses("s < 1.0", "a mask may not read s", 0)
    refuses("sek_q + 1", 'did you mean "seq_q"?', 0)
    refuses("casual", 'did you mean "causal"?', 0)
    refuses("nonsense[q]", '"nonsense" is neither declared', 0)
    refuses("doc + 1", "doc is an array: write doc[...] with 1 index", 0)
    refuses("doc[q, k]", "doc has 1 dimension, not 2", 0)
    refuses("doc[x]", "an index must be i32, not f32", 4)
    refuses("q[k]", '"q" is not an array', 0)
    refuses("window(3)", "window is used as window(l, r)", 0)
    refuses("document(3)", "document is used as document(ids[])", 0)
    refuses("window(on, 0)", "in window(l, r): in unbounded(n): < takes", 0)
    refuses("2147483648", "does not fit i32", 0)
    refuses("1e39", "does not fit f32", 0)
    refuses("12abc", '"12abc" is not a number', 0)
    refuses("q $ k", 'expected an operator, found "$"', 2)
    refuses("q \xff k", 'found "\\xff"', 2)
    refuses(("("):rep(70) .. "q" .. (")"):rep(70), "nesting is deeper than 64", 64)
    refuses(("-"):rep(70) .. "q", "nesting is deeper than 64", 64)
    refuses("q" .. (" + k * q"):rep(400), "more than 1024", 2042)
    local _, errors = parse("sek_q + on < kk & (q & on)")
    assert(#errors >= 3, "only " .. #errors .. " of the errors are reported at once")
end

-- Derivative of f at s by differences of doubles.
local function by_differences(f, s)
    local h = 2 ^ -7
    return (f(s + h) - f(s - h)) / (2 * h)
end

function tests.slope_agrees_with_differences()
    local scores = {
        "s", "3 * s - x", "s * s", "softcap(5)", "alibi(0.5)", "s / (s * s + 2)", "exp(s / 4)", "log(s * s + 1)", "sqrt(s * s + 3)",
        "sin(s) * cos(s)", "tanh(s) / 3", "-s", "max(s, 0.25)", "min(s * 2, s + 0.3)", "abs(s - 0.1)", "q > 3 ? s * s : -s",
        "floor(s) + s", "f32(i32(s)) + 2 * s", "s > 0.2 ? s * s : s", "1.5", "exp(-s * s) * (s + x)", "softcap(3) + ramp[h] * s",
    }
    for _, text in ipairs(scores) do
        local node = must_parse(text, true)
        local slope = expression.slope(node)
        assert(slope.type == "f32")
        for _, s in ipairs {-1.7, -0.6, 0.4, 0.7, 1.45} do
            local env = {q = 5, k = 2, h = 1, s = s, params = {x = 0.75}, load = function() return 0.5 end}
            local function f(at)
                env.s = at
                return expression.evaluate(node, env)
            end
            local wanted = by_differences(f, s)
            env.s = s
            local value = expression.evaluate(slope, env)
            assert(math.abs(value - wanted) <= 2e-3 * (1 + math.abs(wanted)),
                ("%s at s=%g: slope %s is %.6f, differences give %.6f"):format(text, s, expression.print(slope), value, wanted))
        end
    end
end

function tests.slope_at_ties_and_beside_nan()
    local function slope(text, s)
        return expression.evaluate(expression.slope(must_parse(text, true)), {s = s, q = 0, k = 0, params = {x = 0 / 0}})
    end
    assert(slope("abs(s)", 0.0) == 1)
    assert(slope("min(2 * s, 3 * s)", 0.0) == 2)
    assert(slope("max(2 * s, 3 * s)", 0.0) == 2)
    assert(slope("min(s, x)", 1.0) == 1, "min returns the number, and so does its slope")
    assert(slope("max(x, s)", 1.0) == 1)
    assert(slope("k < q ? s / (s - 1) : 4 * s", 1.0) == 4, "the side not chosen leaves no NaN")
    assert(slope("q > k ? s : -inf", 1.0) == 0)
    assert(expression.print(expression.slope(must_parse("softcap(50)", true))) == "1.0 - tanh(s / 50.0) * tanh(s / 50.0)")
end

return tests
