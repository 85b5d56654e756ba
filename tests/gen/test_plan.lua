-- main and abi: targets, variants, keys and argument structs of plans. Schedules and kernels of target hopper are stood
-- in for here, as the tests are about what a plan makes of them.

local abi = require "abi"
local kernel = require "kernel"
local main = require "main"
local problem = require "problem"
local schedule = require "schedule"

local tests = {}

local MAPS = {{tensor = "q", rows = 64, chunks = 1}, {tensor = "k", rows = 128, chunks = 1}, {tensor = "v", rows = 96, chunks = 3},
              {tensor = "o", rows = 64, chunks = 1}}

-- Runs `body` with a hopper schedule and kernel of our own.
local function with_hopper(body)
    local list, choose, text = kernel.list, schedule.choose, schedule.text
    function kernel.list(p, pass, target, s, ...)
        if target ~= "hopper" then return list(p, pass, target, s, ...) end
        return {{name = pass, pass = pass, target = target, symbol = "attnloom_" .. pass, threads = 384, smem_bytes = 1, workspace = {}, maps = MAPS,
                 grid = {batch = "batch", heads = "heads_q", seq = "seq_q", rows = 128, persistent = 1}}}
    end
    function schedule.choose(p, pass, target, a, forced)
        if target ~= "hopper" then return choose(p, pass, target, a, forced) end
        if forced == "wrong" then return nil, {status = "INVALID", field = "schedule", offset = 0, text = "wrong"} end
        local values = {tile_q = 128, tile_k = 128}
        return values, {{values = values, text = "own", cost = 1, met = 1}}
    end
    function schedule.text(target, pass, s) return target == "hopper" and "own" or text(target, pass, s) end
    local ok, message = pcall(body)
    kernel.list, schedule.choose, schedule.text = list, choose, text
    if not ok then error(message, 0) end
end

-- What the runtime packs for a kernel is the struct that its text reads.
function tests.each_kernel_gets_its_own_arguments()
    for _, target in ipairs {"mma", "hopper"} do
        local plan = main.plan {problem = "bf16 d=64 mask={document(ids)} params={ids: i32[seq_k]} backward deterministic", target = target,
                                arch = "sm_90"}
        local prepared = 0
        for _, k in ipairs(plan.kernels) do
            local fields = abi.of_kernel(plan.inner.problem, k)
            assert(#fields == #k.args.rows and fields.size == k.args.size, k.name)
            for i, field in ipairs(fields) do assert(k.args.rows[i].source == field.source and k.args.rows[i].offset == field.offset) end
            prepared = prepared + (k.prepares and 1 or 0)
        end
        assert(prepared == 6) -- classes of forward, dkv and dq, in two variants
    end
end

local function must_plan(request)
    local plan, message = main.plan(request)
    if not plan then error(message.field .. ": " .. message.text, 2) end
    return plan
end

local function refuses(request, status, field, words)
    local plan, e = main.plan(request)
    assert(not plan, "it was not refused")
    if e.status ~= status or e.field ~= field or not e.text:find(words, 1, true) then
        error(("%s %s: %s\nis not %s %s: %s"):format(e.status, e.field, e.text, status, field, words), 2)
    end
end

-- "forward tma hopper sm_90a, ..." of a plan's kernels.
local function summary(plan)
    local list = {}
    for i, k in ipairs(plan.kernels) do list[i] = table.concat({k.name, k.variant, k.target, k.arch}, " ") end
    return table.concat(list, ", ")
end

local function equal(a, b)
    if a ~= b then error(("%s\nis not\n%s"):format(tostring(a), tostring(b)), 2) end
end

function tests.arguments_with_maps()
    local p = problem.parse "bf16 d=64 score={s + weight * bias[h]} params={bias: f32[heads_q], weight: f32}"
    local fields = abi.fields(p, "forward", {}, MAPS)
    equal(abi.struct(fields), [[
typedef struct __align__(64) LoomMap { unsigned long long words[16]; } LoomMap;  // a tensor map of the TMA unit

typedef struct LoomArgs {  // strides in elements
    LoomMap q_map;  // 1 box(es) of 64 x 64
    LoomMap k_map;  // 1 box(es) of 64 x 128
    LoomMap v_map;  // 3 box(es) of 64 x 96
    LoomMap o_map;  // 1 box(es) of 64 x 64
    unsigned short *o;
    float *lse;
    long long lse_stride_batch;
    long long lse_stride_seq;
    long long lse_stride_head;
    const float *p_bias;
    long long p_bias_stride_0;
    float p_weight;
    int batch;
    int heads_q;
    int heads_kv;
    int group;  // heads_q / heads_kv
    int seq_q;
    int seq_k;
    int q_start;
    int k_start;
    float scale;  // multiplies Q K^T
} LoomArgs;]])
    local rows = abi.rows(fields)
    equal(rows.size, 4 * 128 + 128)
    for i, map in ipairs(MAPS) do
        local row = rows.rows[i]
        equal(row.offset, 128 * (i - 1))
        equal(table.concat({row.type, row.source, row.rows, row.chunks}, " "),
            ("map %s.map %d %d"):format(map.tensor, map.rows, map.chunks))
    end
    equal(rows.rows[5].source, "o.data")
    equal(rows.rows[5].offset, 512)
    equal(rows.rows[5].rows, nil)
    equal(rows.rows[5].chunks, nil)
end

-- What a map replaces is a tensor's own; all else of a backward stays.
function tests.arguments_with_one_map()
    local fields = abi.fields(problem.parse "fp16 d=64 backward", "backward", {}, {{tensor = "dq", rows = 32, chunks = 2}})
    local text = abi.struct(fields)
    for _, word in ipairs {"LoomMap dq_map;", " *dq;", "*q;", "q_stride_seq", "dk_stride_seq"} do
        assert(text:find(word, 1, true), word)
    end
    assert(not text:find("dq_stride", 1, true))
    equal(fields.size % 64, 0)
end

function tests.arguments_without_maps()
    local p = problem.parse "fp16 d=64"
    local text = abi.struct(abi.fields(p, "forward", {}))
    assert(text:sub(1, 23) == "typedef struct LoomArgs")
    equal(text, abi.struct(abi.fields(p, "forward", {}, {})))
end

function tests.hopper_variants()
    with_hopper(function()
        local plan = must_plan {problem = "bf16 d=128 causal score={softcap(30)} backward", target = "hopper", arch = "sm_90", alignment = 0}
        equal(plan.target, "hopper")
        equal(plan.schedule, "own")
        equal(plan.schedule_backward, "own")
        equal(summary(plan), "forward tma hopper sm_90a, forward any mma sm_90, backward tma hopper sm_90a, "
            .. "backward_delta any mma sm_90, backward_dkv any mma sm_90, backward_convert any mma sm_90")
        equal(plan.kernels[1].args.rows[1].type, "map")
        equal(plan.kernels[2].args.rows[1].source, "q.data")
        assert(plan.kernels[1].key:find("variant tma\nschedule own\ntarget hopper\narch sm_90a\n", 1, true), plan.kernels[1].key)
    end)
end

-- The schedule of windows is for queries that see few keys, whichever of them.
function tests.why_names_the_bounds_of_a_walk()
    local request = {problem = "bf16 d=64 mask={causal & document(ids)} params={ids: i32[seq_k]}", arch = "sm_90"}
    for target, wanted in pairs {hopper = "walk classify inside the spans of `k <= q`: `ids", mma = "walk classify: `ids"} do
        request.target = target
        assert(assert(main.why(request)):find(wanted, 1, true), target)
    end
end

function tests.windows_have_a_schedule()
    for mask, narrow in pairs {["causal & window(1023, 0)"] = true, ["k == q"] = true, ["causal"] = false, ["q <= k"] = false,
                               ["causal & window(5000, 0)"] = false} do
        local plan = must_plan {problem = "bf16 d=128 mask={" .. mask .. "}", target = "hopper", arch = "sm_90", alignment = 16,
                                hint = {batch = 1, heads_q = 16, heads_kv = 16, seq_q = 8192, seq_k = 8192}}
        assert((plan.schedule:match "^tile=192x64 " ~= nil) == narrow, mask .. ": " .. plan.schedule)
    end
end

-- One copy moves all boxes of a row of q, k or v where none reaches past the head dim; O is stored by single boxes.
-- O of large head dims has no room in shared memory and so no map.
function tests.maps_of_hopper()
    for text, wanted in pairs {["d=64"] = "1 1 1 1", ["d=128 causal"] = "2 2 2 1", ["d=256"] = "4 4 4", ["d=192:128"] = "3 3 2",
                               ["d=64:72"] = "1 1 1 1", ["d=80:192"] = "1 1 3", ["d=16"] = "1 1 1 1"} do
        local plan = must_plan {problem = "bf16 " .. text, target = "hopper", arch = "sm_90", alignment = 16}
        local tile_q, tile_k = plan.schedule:match "^tile=(%d+)x(%d+) "
        local rows, found = {tile_q, tile_k, tile_k, "16"}, {}
        for i, tensor in ipairs {"q", "k", "v", "o"} do
            local row = plan.kernels[1].args.rows[i]
            if row.type ~= "map" then break end
            equal(row.source .. " " .. row.rows, tensor .. ".map " .. rows[i])
            found[i] = row.chunks
        end
        equal(text .. ": " .. table.concat(found, " "), text .. ": " .. wanted)
    end
end

-- A kernel of target mma is one entry of the cache, whatever plan has it.
function tests.hopper_shares_kernels_of_mma()
    with_hopper(function()
        local own = must_plan {problem = "bf16 d=128 score={softcap(30)} backward", target = "hopper", arch = "sm_90", alignment = 0}
        local mma = must_plan {problem = "bf16 d=128 score={softcap(30)} backward", target = "mma", arch = "sm_90", alignment = 0}
        local keys, shared = {}, 0
        for _, k in ipairs(mma.kernels) do keys[k.key] = true end
        for _, k in ipairs(own.kernels) do
            assert(k.target == "hopper" or keys[k.key], k.key)
            shared = shared + (k.target == "mma" and 1 or 0)
        end
        equal(shared, #mma.kernels // 2)
    end)
end

-- Kernels of the hopper backward begin beside the end of the one before, the first excepted: what is before a launch has to end.
function tests.kernels_that_overlap()
    local function of(text, target)
        local list = {}
        for _, k in ipairs(must_plan({problem = text, target = target, arch = "sm_90", alignment = 16}).kernels) do
            if k.overlaps then list[#list + 1] = k.name end
        end
        return table.concat(list, " ")
    end
    equal(of("bf16 d=128 causal backward", "hopper"), "backward_dkv backward_convert")
    equal(of("bf16 d=128 causal backward deterministic", "hopper"), "backward_dkv backward_dq")
    equal(of("bf16 d=128 causal backward", "mma"), "")
end

-- Where target hopper computes dQ beside dK and dV, and where by a kernel of its own.
function tests.hopper_backward()
    local function of(text)
        return summary(must_plan {problem = text .. " backward", target = "hopper", arch = "sm_90", alignment = 16}):match "backward.*"
    end
    equal(of "bf16 d=128 causal", "backward_delta tma hopper sm_90a, backward_dkv tma hopper sm_90a, backward_convert tma hopper sm_90a")
    equal(of "fp16 d=16 mask={(q + k) % 3 != 0}", "backward_delta tma hopper sm_90a, backward_dkv_classes tma hopper sm_90a, "
        .. "backward_dkv tma hopper sm_90a, backward_convert tma hopper sm_90a")
    equal(summary(must_plan {problem = "bf16 d=128 backward deterministic", target = "hopper", arch = "sm_90", alignment = 16}),
        "forward tma hopper sm_90a, backward_delta tma hopper sm_90a, backward_dkv tma hopper sm_90a, backward_dq tma hopper sm_90a")
    equal(of "bf16 d=192:128", "backward_delta tma hopper sm_90a, backward_dkv tma hopper sm_90a, backward_dq tma hopper sm_90a")
    equal(of "bf16 d=64 score={softcap(30)}", "backward_delta tma hopper sm_90a, backward_dkv tma hopper sm_90a, backward_dq tma hopper sm_90a")
    equal(must_plan({problem = "bf16 d=64:136 backward", target = "hopper", arch = "sm_90"}).schedule_backward, "tile=64x64 stages=2 dq_turns=0")
    equal(must_plan({problem = "bf16 d=64:128 backward", target = "hopper", arch = "sm_90"}).schedule_backward, "tile=64x128 stages=2 dq_turns=0")
    equal(must_plan({problem = "bf16 d=64 backward", target = "hopper", arch = "sm_90"}).schedule_backward, "tile=128x128 stages=3 dq_turns=0")
    equal(summary(must_plan {problem = "bf16 d=128 backward deterministic", target = "hopper", arch = "sm_90", alignment = 16,
                             schedule_backward = "tile=64x128 stages=2 dq_turns=1"}),
        "forward tma hopper sm_90a, backward_delta tma hopper sm_90a, backward_dkv tma hopper sm_90a")
    for _, text in ipairs {"bf16 d=136 backward", "bf16 d=64 score={softcap(30)} backward"} do
        refuses({problem = text, target = "hopper", arch = "sm_90", schedule_backward = "dq_turns=1"}, "INVALID", "schedule_backward",
            "dq_turns: dQ has a kernel of its own beyond a head dim of 128 and with a score")
    end
    for text, needed in pairs {["tile=128x128 stages=2"] = "tile_q 128: with d=128 dQ of 64 rows and all columns leaves no registers",
                               ["tile=64x64 stages=2"] = "tile=64x64: with d=128:128 a block has 128 keys, and 64 or 128 queries at a time",
                               ["tile=64x128 stages=9"] = "bytes of shared memory, a block of sm_90 has 232448", ["tile=64x128 stages=1"] = "stages=1 is not an integer from 2"} do
        refuses({problem = "bf16 d=128 backward", target = "hopper", arch = "sm_90", schedule_backward = text}, "INVALID", "schedule_backward", needed)
    end
end

function tests.promised_alignment()
    with_hopper(function()
        equal(summary(must_plan {problem = "fp16 d=64", target = "hopper", arch = "sm_90", alignment = 16}), "forward tma hopper sm_90a")
        equal(summary(must_plan {problem = "fp16 d=64", target = "hopper", arch = "sm_90", alignment = 8}),
            "forward tma hopper sm_90a, forward any mma sm_90")
        equal(summary(must_plan {problem = "fp16 d=64", target = "mma", arch = "sm_90", alignment = 32}), "forward aligned mma sm_90")
        equal(summary(must_plan {problem = "fp32 d=64", target = "host", arch = "host", alignment = 0}), "forward any host host")
    end)
end

-- A forced schedule is of the pass's own kernels, not of those that stand in.
function tests.forced_schedules()
    with_hopper(function()
        refuses({problem = "bf16 d=64", target = "hopper", arch = "sm_90", schedule = "wrong"}, "INVALID", "schedule", "wrong")
        local plan = must_plan {problem = "bf16 d=64 score={softcap(30)} backward", target = "hopper", arch = "sm_90", schedule = "own",
                                schedule_backward = "own", alignment = 0}
        for _, k in ipairs(plan.kernels) do assert((k.schedule == "own") == (k.target == "hopper")) end
        refuses({problem = "bf16 d=64 score={softcap(30)} backward", target = "hopper", arch = "sm_90", schedule_backward = "wrong"}, "INVALID",
            "schedule_backward", "wrong")
    end)
end

-- What was measured is taken where nothing is asked for and it fits, for the plan's target and the pass's own kernels.
function tests.measured_schedules()
    local request = {problem = "bf16 d=64 backward", target = "mma", arch = "sm_90", alignment = 16}
    local model = must_plan(request)
    local own = "tile=64x32 warps=4 blocks=1"
    assert(model.schedule ~= own)
    request.measured = {mma = {forward = own}, hopper = {forward = "wrong", backward = "wrong"}, host = {}}
    local plan = must_plan(request)
    equal(plan.schedule, own)
    equal(plan.schedule_backward, model.schedule_backward)
    assert(plan.why:find("forward: " .. own .. ", the best that was measured on this device\n", 1, true), plan.why)
    for _, unfit in ipairs {"tile=64x32 warps=3", "tile=64x", "nonsense", "tile=256x256 warps=16 blocks=9"} do
        request.measured.mma.forward = unfit
        plan = must_plan(request)
        equal(plan.schedule, model.schedule)
        equal(plan.why, model.why)
    end
    request.measured.mma.forward = own
    request.schedule = "tile=128x64 warps=8 blocks=1"
    equal(must_plan(request).schedule, request.schedule)
    with_hopper(function() -- a variant that stands in has its own choice
        plan = must_plan {problem = "bf16 d=64", target = "hopper", arch = "sm_90", alignment = 0,
                          measured = {hopper = {forward = "own"}, mma = {forward = own}, host = {}}}
        equal(plan.schedule, "own")
        assert(plan.kernels[2].target == "mma" and plan.kernels[2].schedule ~= own)
    end)
end

-- What people and build systems write for one arch.
function tests.names_of_archs()
    for _, name in ipairs {"sm_90", "sm_90a", "90", "90a"} do
        assert(must_plan({problem = "bf16 d=64", arch = name}).arch == "sm_90")
    end
    assert(must_plan({problem = "bf16 d=64", arch = "80"}).arch == "sm_80")
end

function tests.what_hopper_refuses()
    with_hopper(function()
        local function hopper(text, arch, device)
            return {problem = text, target = "hopper", arch = arch or "sm_90", device = device}
        end
        refuses(hopper("bf16 d=64", "sm_80"), "UNSUPPORTED", "arch", "target hopper is for sm_90, not sm_80; target mma takes it")
        refuses(hopper("bf16 d=64", "sm_100"), "UNSUPPORTED", "arch", "not sm_100")
        refuses(hopper("bf16 d=64", "sm_80a"), "INVALID", "arch", "arch 'sm_80a' is not known")
        refuses(hopper("fp32 d=64"), "UNSUPPORTED", "problem.dtype", "target hopper takes bf16 and fp16, not fp32; target host takes fp32")
        refuses(hopper("bf16 d=8"), "UNSUPPORTED", "problem.d", "d is 8, target hopper takes 16 to 256; target mma takes it")
        refuses(hopper("bf16 d=64:8"), "UNSUPPORTED", "problem.d", "dv is 8, target hopper takes 16 to 256")
        refuses(hopper("bf16 d=64", nil, {smem_bytes = 1, num_sms = 1, tensor_maps = false}), "UNSUPPORTED", "target",
            "cuTensorMapEncodeTiled (CUDA 12, driver 525 or newer)")
        must_plan(hopper("bf16 d=16:24", nil, {smem_bytes = 1, num_sms = 1, tensor_maps = true}))
        refuses({problem = "bf16 d=64", target = "hoper", arch = "sm_90"}, "INVALID", "target", "known: host mma hopper")
    end)
end

function tests.default_targets()
    equal(must_plan {problem = "bf16 d=64", arch = "sm_90"}.target, "hopper")
    equal(must_plan {problem = "bf16 d=8", arch = "sm_90"}.target, "mma")
    equal(must_plan {problem = "bf16 d=64", arch = "sm_90", device = {smem_bytes = 232448, num_sms = 132, tensor_maps = false}}.target, "mma")
    equal(must_plan {problem = "bf16 d=64", arch = "sm_80"}.target, "mma")
    equal(must_plan {problem = "bf16 d=64", arch = "host"}.target, "host")
    refuses({problem = "fp32 d=64", arch = "sm_90"}, "UNSUPPORTED", "problem.dtype", "target mma takes bf16 and fp16")
    refuses({problem = "fp32 d=64", arch = "sm_91"}, "INVALID", "arch", "sm_91")
end

function tests.why_names_the_targets_of_passes()
    with_hopper(function()
        local text = main.why {problem = "bf16 d=128 score={softcap(30)} backward", target = "hopper", arch = "sm_90", alignment = 0}
        for _, words in ipairs {"target   hopper on sm_90\n", "\nforward: own\n  tensors that TMA cannot describe take target mma, tile=",
                                "\nbackward: own\n  tensors that TMA cannot describe take target mma, tile="} do
            assert(text:find(words, 1, true), text)
        end
        local mma = main.why {problem = "bf16 d=128", target = "mma", arch = "sm_90", alignment = 0}
        assert(not mma:find("TMA", 1, true) and not mma:find("kernels of", 1, true))
    end)
end

-- Partial tiles that a closer class would have spared.
function tests.why_tells_what_could_be_spared()
    local function of(mask)
        local text = main.why {problem = ("bf16 d=64 mask={%s}"):format(mask), target = "mma", arch = "sm_90", schedule = "tile=64x64 warps=4",
                               shape = {batch = 1, heads_q = 1, heads_kv = 1, seq_q = 256, seq_k = 300}}
        return text:match "\n  of (.-)\n"
    end
    equal(of "dilated(16, 4)", "14 partial tiles, element by element, 0 see nothing and 0 all")
    equal(of "sin(f32(q + k)) < 2.0", "20 partial tiles, element by element, 0 see nothing and 20 all")
    equal(of "sin(f32(q + k)) > 2.0 | k == 299", "20 partial tiles, element by element, 16 see nothing and 0 all")
    equal(of "causal", nil) -- ranges are tight
end

-- What a sweep has found need not be what the model takes for the cheapest.
function tests.candidates_begin_with_the_choice()
    local num_dearer = 0
    for _, text in ipairs {"bf16 d=64", "bf16 d=64 causal", "bf16 d=128", "bf16 d=128 causal", "bf16 d=256", "bf16 d=256 causal"} do
        for seq = 9, 14 do
            local request = {problem = text, target = "hopper", arch = "sm_90", pass = "forward",
                             hint = {batch = 1, heads_q = 32, heads_kv = 32, seq_q = 1 << seq, seq_k = 1 << seq}}
            local list = main.candidates(request)
            equal(list[1].text, must_plan(request).schedule)
            for i = 3, #list do assert(list[i].cost >= list[i - 1].cost and list[i].text ~= list[1].text) end
            num_dearer = num_dearer + (list[2].cost < list[1].cost and 1 or 0)
        end
    end
    assert(num_dearer > 0)
end

function tests.candidates_are_those_that_fit_cheapest_first()
    local request = {problem = "bf16 d=256 backward", target = "mma", arch = "sm_86", pass = "backward"}
    local list, cost = main.candidates(request), 0
    local _, candidates = schedule.choose(problem.parse(request.problem), "backward", "mma", require("arch").get "sm_86")
    local num_fit, seen = 0, {}
    for _, row in ipairs(candidates) do num_fit = num_fit + (row.rejected and 0 or 1) end
    equal(#list, num_fit)
    assert(num_fit > 1 and num_fit < #candidates)
    for _, row in ipairs(list) do
        assert(row.cost >= cost and not seen[row.text])
        cost, seen[row.text] = row.cost, true
    end
    equal(list[1].text, must_plan(request).schedule_backward)
    local none, e = main.candidates {problem = "bf16 d=64", target = "mma", arch = "sm_86", pass = "backward"}
    assert(not none and e.status == "INVALID" and e.field == "pass")
    none, e = main.candidates {problem = "fp32 d=64", target = "mma", arch = "sm_86", pass = "forward"}
    assert(not none and e.status == "UNSUPPORTED")
    with_hopper(function()
        list = main.candidates {problem = "bf16 d=64", target = "hopper", arch = "sm_90", pass = "forward"}
        equal(#list, 1)
        equal(list[1].text, "own")
    end)
end

function tests.standalone_files()
    local text, e = main.standalone {problem = "bf16 d=128", target = "host"}
    assert(not text and e.status == "UNSUPPORTED" and e.field == "target" and e.text:find("a standalone file is CUDA", 1, true))
end

return tests
