--[[ main: what the C runtime calls, and the only generator file that reads files (through read_template, which the
runtime provides, as run_limited). Everything it returns is a plain table or text.

  main.problem(text)   -> table with the canonical text and facts of a problem, or nil, error
  main.plan(request)   -> {problem=, target=, arch=, schedule=, schedule_backward=, why=, kernels={descriptor...}} or nil, error
  main.source(plan, i) -> source text of kernel i of a plan
  main.candidates(request) -> {{text=, cost=}, ...} of request.pass: the schedules that are not rejected, the one that a plan
                         takes first, the others from the cheapest on, or nil, error
  main.why(request)    -> text for people, or nil, error
  main.show(request), main.show_svg(request) -> a picture of the mask in characters, or as SVG, or nil, error
  main.manifest(text, name, archs) -> the entries of a manifest for archs, "sm_80,sm_90a", see manifest.lua, or nil, error
  main.standalone(request) -> one .cu with the kernels of a pass, a launcher and a self-check, or nil, error

  request: {problem=, target=, arch=, schedule=, schedule_backward=, hint=, alignment=, shape=, pass=,
            measured = {[target] = {[pass] = schedule that was the best where it was timed}} or nil,
            device = {smem_bytes=, num_sms=, tensor_maps=} or nil}
  A pass of a plan: {name=, target=, text=, values=, candidates=, forced=, measured=, fallback=}; its target is that of its kernels, and
  fallback is the same of the variant for tensors that this target cannot take.
  error:   {status=, field=, offset=, text=} ]]

local abi = require "abi"
local arch = require "arch"
local emit = require "emit"
local expression = require "expression"
local kernel = require "kernel"
local manifest = require "manifest"
local problem_text = require "problem"
local schedule = require "schedule"
local show = require "show"
local why = require "why"

-- grammar: of problem texts; it rises when a text that was right before comes to mean something else.
local main = {version = "0.1", grammar = 1}

local MOST_SEQ = 1 << 30 -- as in runtime/launch.c: positions stay inside i32

local TARGETS = {host = true, mma = true, hopper = true}
local PREFERRED = {"hopper", "mma"} -- GPU targets where none is asked for, the best first
local GPU_DTYPES = {bf16 = true, fp16 = true}
local HOPPER_LEAST_DIM = 16 -- columns of one wgmma step

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

-- Checks that a target takes a problem on an arch. `device` tells what the driver of a device can do, nil: not known.
local function supported(p, target, a, device)
    if target == "host" then return true end
    if target == "hopper" and not a.wgmma then
        return fail("UNSUPPORTED", "arch", "target hopper is for sm_90, not %s; target mma takes it", a.name)
    end
    if target == "hopper" and device and not device.tensor_maps then
        return fail("UNSUPPORTED", "target", "target hopper needs a driver with cuTensorMapEncodeTiled (CUDA 12, driver 525 or "
            .. "newer), which this one lacks; target mma works there")
    end
    if not GPU_DTYPES[p.dtype] then
        return fail("UNSUPPORTED", "problem.dtype", "target %s takes bf16 and fp16, not %s; target host takes %s", target, p.dtype,
                    p.dtype)
    end
    if p.dtype == "bf16" and not a.bf16 then
        return fail("UNSUPPORTED", "problem.dtype", "bf16 needs sm_80 or newer, this is %s; fp16 works there", a.name)
    end
    for _, name in ipairs(target == "hopper" and {"d", "dv"} or {}) do
        if p[name] < HOPPER_LEAST_DIM then
            return fail("UNSUPPORTED", "problem.d", "%s is %d, target hopper takes %d to 256; target mma takes it", name, p[name],
                        HOPPER_LEAST_DIM)
        end
    end
    return true
end

-- The target where none is asked for: the first preferred one that takes the problem, else the last, whose refusal is told.
local function default_target(p, a, device)
    if a.name == "host" then return "host" end
    for _, target in ipairs(PREFERRED) do
        if supported(p, target, a, device) then return target end
    end
    return PREFERRED[#PREFERRED]
end

-- The variants of kernels, in the order in which a launch tries them, each with the target whose kernels it has. Tensors
-- promised to be aligned need the first alone.
local function variants(target, alignment)
    local list = {{name = "aligned", target = "mma"}, {name = "any", target = "mma"}}
    if target == "host" then list = {{name = "any", target = "host"}} end
    if target == "hopper" then list[1] = {name = "tma", target = "hopper"} end
    if alignment and alignment >= 16 and alignment % 16 == 0 then list[2] = nil end
    return list
end

-- The schedule of a pass's kernels of one target: the one asked for, else what was measured, unless it does not fit here, else
-- the model's choice.
local function choose(p, pass, target, a, forced, measured, hint)
    local s, candidates
    if measured and not forced then s, candidates = schedule.choose(p, pass, target, a, measured, hint) end
    local is_measured = s ~= nil
    if not s then s, candidates = schedule.choose(p, pass, target, a, forced, hint) end
    if not s then
        if pass == "backward" and candidates.field == "schedule" then candidates.field = "schedule_backward" end
        return nil, candidates
    end
    return {name = pass, target = target, text = schedule.text(target, pass, s), values = s, candidates = candidates,
            forced = forced ~= nil, measured = is_measured}
end

-- Adds the kernels of a variant to a plan.
local function add_kernels(plan, part, variant)
    local p = plan.problem
    for _, k in ipairs(kernel.list(p, part.name, part.target, part.values)) do
        k.variant, k.schedule = variant, part.text
        k.arch = plan.arch.name .. (k.target == "hopper" and "a" or "")
        k.args = abi.rows(abi.of_kernel(p, k))
        k.key = table.concat({"problem " .. p.text, "kernel " .. k.name, "variant " .. variant, "schedule " .. part.text,
                              "target " .. k.target, "arch " .. k.arch}, "\n") .. "\n"
        plan.kernels[#plan.kernels + 1] = k
    end
end

local function make_plan(request)
    local p, message = parse(request.problem)
    if not p then return nil, message end
    local target = request.target
    if target and not TARGETS[target] then
        return fail("INVALID", "target", "target '%s' is not known; known: host mma hopper", target)
    end
    local a, reason = arch.get(target == "host" and "host" or request.arch)
    if not a then return fail("INVALID", "arch", "%s", reason) end
    target = target or default_target(p, a, request.device)
    local ok, refusal = supported(p, target, a, request.device)
    if not ok then return nil, refusal end
    local plan = {problem = p, target = target, arch = a, version = main.version, kernels = {}, passes = {}}
    for _, pass in ipairs(p.backward and {"forward", "backward"} or {"forward"}) do
        local forced = pass == "forward" and request.schedule or pass == "backward" and request.schedule_backward or nil
        local first, part
        for i, variant in ipairs(variants(target, request.alignment)) do
            if not part or part.target ~= variant.target then
                local measured = i == 1 and request.measured and request.measured[target][pass] or nil
                part, message = choose(p, pass, variant.target, a, i == 1 and forced or nil, measured, request.hint)
                if not part then return nil, message end
                if first then first.fallback = part end
                first = first or part
            end
            add_kernels(plan, part, variant.name)
        end
        plan.passes[#plan.passes + 1] = first
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

function main.candidates(request)
    local plan, message = make_plan(request)
    if not plan then return nil, message end
    local list = {}
    for _, pass in ipairs(plan.passes) do
        for i, row in ipairs(pass.name == request.pass and pass.candidates or {}) do
            if not row.rejected then list[#list + 1] = {text = row.text, cost = row.cost, place = row.measured and 0 or i, first = row.measured and 0 or 1} end
        end
    end
    if not list[1] then return fail("INVALID", "pass", "the problem has no pass '%s'", request.pass) end
    table.sort(list, function(a, b)
        if a.first ~= b.first then return a.first < b.first end
        if a.cost ~= b.cost then return a.cost < b.cost end
        return a.place < b.place
    end)
    return list
end

-- The shape of a request; error where its lengths leave i32.
local function shape_of(request)
    local shape = request.shape or request.hint
    for _, name in ipairs(shape and {"seq_q", "seq_k"} or {}) do
        if shape[name] > MOST_SEQ then
            return fail("INVALID", "shape." .. name, "%s is %d, the limit is %d", name, shape[name], MOST_SEQ)
        end
    end
    return shape
end

function main.why(request)
    local plan, message = make_plan(request)
    if not plan then return nil, message end
    if request.pass == "backward" and not plan.problem.backward then
        return fail("INVALID", "pass", "the problem has no backward pass: it lacks the word 'backward'")
    end
    local shape
    shape, message = shape_of(request)
    if message then return nil, message end
    return why.text(plan, shape, request.pass)
end

local function shown(request, draw)
    local plan, message = make_plan(request)
    if not plan then return nil, message end
    local shape
    shape, message = shape_of(request)
    if message then return nil, message end
    return draw(plan, shape)
end

function main.show(request) return shown(request, show.text) end
function main.show_svg(request) return shown(request, show.svg) end

function main.manifest(text, name, archs)
    local rows, message = manifest.rows(archs)
    if not rows then return fail("INVALID", "arch", "%s", message) end
    local entries, messages = manifest.read(text, name, run_limited)
    if not entries then return fail("INVALID", "manifest", "%s", messages) end
    return manifest.expand(entries, rows)
end

function main.standalone(request)
    local plan, message = make_plan(request)
    if not plan then return nil, message end
    local pass, list = request.pass or "forward", {}
    if plan.target == "host" then
        return fail("UNSUPPORTED", "target", "a standalone file is CUDA; target host is compiled by the library alone")
    end
    if pass == "backward" and not plan.problem.backward then
        return fail("INVALID", "pass", "the problem has no word 'backward'")
    end
    for _, k in ipairs(plan.kernels) do
        if k.pass == pass and k.variant == (list[1] or k).variant then list[#list + 1] = k end
    end
    return emit.standalone(plan, list, pass, read_template)
end

return main
