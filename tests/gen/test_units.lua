-- units: scores as functions of S before the scale, in units that cost nothing.

local expression = require "expression"
local problem = require "problem"
local units = require "units"

local tests = {}

local PARAMS = {{"slopes", "slopes: f32[heads_q]"}, {"c", "c: f32"}, {"bias", "bias: f32[seq_k]"}}

local function score_of(score)
    local used = {}
    for _, param in ipairs(PARAMS) do
        if score:find("%f[%w]" .. param[1] .. "%f[%W]") then used[#used + 1] = param[2] end
    end
    local text = ("bf16 d=64 score={%s}%s"):format(score, #used > 0 and (" params={%s}"):format(table.concat(used, ", ")) or "")
    local p, errors = problem.parse(text)
    if not p then error(problem.format_errors(text, errors), 2) end
    return p.score
end

local function expect(score, inner, unit)
    local got, got_unit = units.of(score_of(score))
    local function same(a, b) if a ~= b then error(("%s: %s, not %s"):format(score, a, b), 3) end end
    same(expression.print(got), inner)
    same(got_unit and expression.print(got_unit) or "1", unit)
end

function tests.what_is_the_same_is_gathered()
    expect("softcap(30)", "tanh(s * (0.033333335 * args.scale))", "30.0")
    expect("alibi(slopes)", "s - slopes[h] / args.scale * f32(abs(q - k))", "args.scale")
    expect("f32(k) * c + s / 2", "c / (0.5 * args.scale) * f32(k) + s", "0.5 * args.scale")
    expect("s * c", "s * (args.scale * c)", "1")                 -- c may be below 0: the largest s may be the least
    expect("c * tanh(s / c)", "tanh(s * (args.scale * (1.0 / c))) * c", "1")
    expect("s + bias[k]", "s * args.scale + bias[k]", "1")       -- a division an element
    expect("s - 1e38 * f32(k > q)", "s * args.scale - 1e+38 * f32(q < k)", "1") -- 1e38 / scale is none
    expect("s * 1e-35 + f32(k)", "s * (1e-35 * args.scale) + f32(k)", "1")
    expect("s / 1e-39", "s * args.scale / 1e-39", "1")
    expect("5 - s", "5.0 - s * args.scale", "1")
    expect("2 * tanh(s) + 2 * s", "2.0 / (2.0 * args.scale) * tanh(s * args.scale) + s", "2.0 * args.scale")
    expect("exp(s) * 3", "exp(s * args.scale)", "3.0")
    expect("k < 4 ? s : 2 * s", "k < 4 ? s * args.scale : s * (2.0 * args.scale)", "1")
end

-- Values are those of the text, but for roundings.
function tests.values_stay()
    local scale = 0.125
    for _, score in ipairs {"softcap(30)", "s - 0.5 * f32(abs(q - k))", "s - (f32(q - k) / 3 - 2) * 0.25", "-s * 3 + f32(k)", "4 * (s + 0.1 * f32(k))",
                            "(f32(q) - s) / 2", "s + (q < k ? 1.0 : -1.0)", "max(s, 0.0) * 2 + s", "3 * (2 * tanh(s / 5))"} do
        local node = score_of(score)
        local inner, unit = units.of(node)
        for s = -40, 40, 7 do
            local env = {q = 11, k = 5, s = s}
            env["args.scale"] = scale
            local value = expression.evaluate(inner, env) * (unit and expression.evaluate(unit, env) or 1)
            env.s = s * scale
            local right = expression.evaluate(node, env)
            assert(math.abs(value - right) < 1e-5 * (1 + math.abs(right)), ("%s at %d: %g, not %g"):format(score, s, value, right))
        end
    end
end

function tests.caps()
    local function cap_of(score)
        local cap, factor = units.cap(score_of(score))
        return cap and expression.print(cap) .. ", " .. expression.print(factor)
    end
    assert(cap_of "softcap(30)" == "30.0, 0.033333335 * args.scale")
    assert(cap_of "tanh(2 * s)" == "1.0, 2.0 * args.scale")
    assert(not cap_of "tanh(s) + s" and not cap_of "c * tanh(s / c)" and not cap_of "-tanh(s)" and not cap_of "tanh(s + 1)")
end

return tests
