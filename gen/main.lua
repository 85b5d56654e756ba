--[[ main: what the C runtime calls, and the only generator file that reads files (through read_template, which the
runtime provides). Everything it returns is a plain table or text.

  main.problem(text)   -> table with the canonical text and facts of a problem, or nil, error
  main.plan(request)   -> {problem=, target=, arch=, schedule=, schedule_backward=, why=, kernels={descriptor...}} or nil, error
  main.source(plan, i) -> source text of kernel i of a plan
  main.why(request)    -> text for people, or nil, error
  main.standalone(request) -> one .cu with the kernels of a pass, a launcher and a self-check, or nil, error

  request: {problem=, target=, arch=, schedule=, schedule_backward=, hint=, alignment=, shape=, pass=}
  error:   {status=, field=, offset=, text=} ]]

local abi = require "abi"
local arch = require "arch"
local emit = require "emit"
local expression = require "expression"
local kernel = require "kernel"
local problem_text = require "problem"
local schedule = require "schedule"
local why = require "why"

local main = {version = "0.1"}

local MOST_SEQ = 1 << 30 -- as in runtime/launch.c: positions stay inside i32

local MMA_DTYPES = {bf16 = true, fp16 = true}

local function fail(status, field, format, ...)
    return nil, {status = status, field = field, offset = -1, text = format:format(...)}
end

local function parse(text)
    local p, errors = problem_text.parse(text)
    if p then return p end
    local status = "UNSUPPORTED" -- when nothing is wrong with the text but what is not built yet
    for _, e in ipairs(errors) do
        if e.status ~= "UNSUPPORTED" then status = "INVALID" end
    end
    return nil, {status = status, field = errors[1].field, offset = errors[1].offset,
                 text = problem_text.format_errors(text, errors)}
end

function main.problem(text)
    local p, message = parse(text)
    if not p then return nil, message end
    local params = {}
    for i, param in ipairs(p.params) do
        local dims
        if param.dims then
            dims = {}
            for axis, dim in ipairs(param.dims) do
                dims[axis] = type(dim) == "table" and (dim.div and ("ceil(%s/%d)"):format(dim.word, dim.div) or dim.word)
                    or tostring(dim)
            end
        end
        params[i] = {name = param.name, dtype = param.dtype, dims = dims}
    end
    return {text = p.text, dtype = p.dtype, d = p.d, dv = p.dv, backward = p.backward, deterministic = p.deterministic,
            mask = p.mask and expression.print(p.mask), score = p.score and expression.print(p.score), params = params}
end

-- Checks that a target takes a problem on an arch.
local function supported(p, target, a)
    if target == "host" then return true end
    if not MMA_DTYPES[p.dtype] then
        return fail("UNSUPPORTED", "problem.dtype", "target mma takes bf16 and fp16, not %s; target host takes %s", p.dtype, p.dtype)
    end
    if p.dtype == "bf16" and not a.bf16 then
        return fail("UNSUPPORTED", "problem.dtype", "bf16 needs sm_80 or newer, this is %s; fp16 works there", a.name)
    end
    return true
end

-- The variants of a plan: tensors that are all aligned take the first.
local function variants(target, alignment)
    if target == "host" then return {"any"} end
    if alignment and alignment >= 16 and alignment % 16 == 0 then return {"aligned"} end
    return {"aligned", "any"}
end

local function make_plan(request)
    local p, message = parse(request.problem)
    if not p then return nil, message end
    local target = request.target or (request.arch == "host" and "host" or "mma")
    if target ~= "host" and target ~= "mma" then
        return fail("INVALID", "target", "target '%s' is not known; known: host mma", target)
    end
    local a, reason = arch.get(target == "host" and "host" or request.arch)
    if not a then return fail("INVALID", "arch", "%s", reason) end
    local ok, refusal = supported(p, target, a)
    if not ok then return nil, refusal end
    local plan = {problem = p, target = target, arch = a, version = main.version, kernels = {}, passes = {}}
    for _, pass in ipairs(p.backward and {"forward", "backward"} or {"forward"}) do
        local forced = pass == "forward" and request.schedule or pass == "backward" and request.schedule_backward or nil
        local s, candidates = schedule.choose(p, pass, target, a, forced)
        if not s then
            if pass == "backward" and candidates.field == "schedule" then candidates.field = "schedule_backward" end
            return nil, candidates
        end
        local text = schedule.text(target, pass, s)
        plan.passes[#plan.passes + 1] = {name = pass, text = text, values = s, candidates = candidates, forced = forced ~= nil}
        local args
        for _, variant in ipairs(variants(target, request.alignment)) do
            for _, k in ipairs(kernel.list(p, pass, target, s)) do
                k.variant, k.schedule = variant, text
                args = args or abi.rows(abi.fields(p, pass, k.workspace)) -- one struct for all kernels of a pass
                k.args = args
                k.key = table.concat({"problem " .. p.text, "kernel " .. k.name, "variant " .. variant,
                                      "schedule " .. text, "target " .. target, "arch " .. a.name}, "\n") .. "\n"
                plan.kernels[#plan.kernels + 1] = k
            end
        end
    end
    return plan
end

-- The plan as the runtime sees it; the generator's own view stays reachable for main.source.
function main.plan(request)
    local plan, message = make_plan(request)
    if not plan then return nil, message end
    return {
        problem = plan.problem.text, target = plan.target, arch = plan.arch.name,
        schedule = plan.passes[1].text, schedule_backward = plan.passes[2] and plan.passes[2].text or "",
        why = why.choice(plan), kernels = plan.kernels, inner = plan,
    }
end

function main.source(plan, i)
    return emit.source(plan.inner, plan.kernels[i], read_template)
end

function main.why(request)
    local plan, message = make_plan(request)
    if not plan then return nil, message end
    if request.pass == "backward" and not plan.problem.backward then
        return fail("INVALID", "pass", "the problem has no backward pass: it lacks the word 'backward'")
    end
    local shape = request.shape or request.hint
    for _, name in ipairs(shape and {"seq_q", "seq_k"} or {}) do
        if shape[name] > MOST_SEQ then
            return fail("INVALID", "shape." .. name, "%s is %d, the limit is %d", name, shape[name], MOST_SEQ)
        end
    end
    return why.text(plan, shape, request.pass)
end

function main.standalone(request)
    local plan, message = make_plan(request)
    if not plan then return nil, message end
    local pass, list = request.pass or "forward", {}
    if plan.target ~= "mma" then
        return fail("UNSUPPORTED", "target", "a standalone file is CUDA; target %s is compiled by the library alone", plan.target)
    end
    if pass == "backward" and not plan.problem.backward then
        return fail("INVALID", "pass", "the problem has no word 'backward'")
    end
    local variant = plan.kernels[1].variant
    for _, k in ipairs(plan.kernels) do
        if k.pass == pass and k.variant == variant then list[#list + 1] = k end
    end
    return emit.standalone(plan, list, pass, read_template)
end

return main
