-- schedule: whatever number a forced schedule has is taken or refused with a reason, for all targets and passes.

local arch = require "arch"
local functions = require "functions"
local interval = require "interval"
local problem_text = require "problem"
local schedule = require "schedule"

local tests = {}

local CASES = {
    {"host", "host", "fp32 d=64 backward"},
    {"mma", "sm_80", "bf16 d=128 causal backward deterministic"},
    {"hopper", "sm_90", "bf16 d=128 causal"},
    {"hopper", "sm_90", "fp16 d=72:40 mask={(q + 3*k) % 5 != 0}"},
}
local VALUES = {"0", "1", "2", "3", "7", "16", "9999", "10000", "x"}

-- Calls check(word, schedule, error) for forced texts of one word.
local function each_word(check)
    for _, case in ipairs(CASES) do
        local p = problem_text.parse(case[3])
        for _, pass in ipairs(p.backward and {"forward", "backward"} or {"forward"}) do
            local default = schedule.choose(p, pass, case[1], arch.get(case[2]))
            for key in ("tile=1 " .. schedule.text(case[1], pass, default)):gmatch("([%w_]+)=") do
                for _, value in ipairs(VALUES) do
                    local word = key .. "=" .. (key == "tile" and value .. "x64" or value)
                    check(word, schedule.choose(p, pass, case[1], arch.get(case[2]), word))
                end
            end
            check("tile=64x0", schedule.choose(p, pass, case[1], arch.get(case[2]), "tile=64x0"))
        end
    end
end

function tests.any_number_is_taken_or_refused()
    local num_taken, num_refused = 0, 0
    each_word(function(word, s, refusal)
        if s then
            num_taken = num_taken + 1
            return
        end
        num_refused = num_refused + 1
        assert(refusal.status == "INVALID" and refusal.field == "schedule" and #refusal.text > 0, word)
    end)
    assert(num_taken > 10 and num_refused > 50, num_taken .. " taken, " .. num_refused .. " refused")
end

function tests.the_limits_are_told()
    local p = problem_text.parse("bf16 d=128 causal")
    local function refusal(target, word)
        local _, message = schedule.choose(p, "forward", target, arch.get "sm_90", word)
        return message.text
    end
    assert(refusal("mma", "warps=0") == "warps=0 is not an integer from 1 to 9999")
    assert(refusal("hopper", "stages=1") == "stages=1 is not an integer from 2 to 9999")
    assert(refusal("hopper", "p_sets=3") == "p_sets=3 is not an integer from 1 to 2")
    assert(refusal("hopper", "ping_pong=2") == "ping_pong=2 is not an integer from 0 to 1")
end

-- Long sequences take another schedule than short ones, and an unknown length one of those.
function tests.lengths_choose()
    local p, seen = problem_text.parse("bf16 d=128"), {}
    for _, seq in ipairs {0, 1, 512, 2048, 8192, 1 << 30} do
        local hint = {batch = 0, heads_q = 0, heads_kv = 0, seq_q = seq, seq_k = seq}
        seen[seq] = schedule.text("hopper", "forward", schedule.choose(p, "forward", "hopper", arch.get "sm_90", nil, hint))
    end
    assert(seen[512] ~= seen[8192] and seen[0] == seen[2048] and seen[1] == seen[512] and seen[2048] == seen[8192])
    assert(seen[1 << 30] ~= seen[8192] and seen[1 << 30] ~= seen[512])
    local _, candidates = schedule.choose(p, "forward", "hopper", arch.get "sm_90")
    local times = {}
    for _, row in ipairs(candidates) do
        assert(not times[row.text], row.text)
        times[row.text] = true
    end
    assert(candidates[1].measured and candidates[1].text == seen[0])
end

-- Under a mask what counts is how many keys a query sees.
function tests.windows_choose_by_their_width()
    local function choice(text, seq)
        local p = problem_text.parse(text)
        return schedule.text("hopper", "forward", schedule.choose(p, "forward", "hopper", arch.get "sm_90", nil,
                                                                  {batch = 0, heads_q = 0, heads_kv = 0, seq_q = seq, seq_k = seq}))
    end
    local short, long = choice("bf16 d=128 causal", 1024), choice("bf16 d=128 causal", 32768)
    local narrow = choice("bf16 d=128 mask={window(1023, 0)}", 32768)
    assert(short ~= long and narrow ~= short and narrow ~= long)
    assert(choice("bf16 d=128 mask={window(1500, 0)}", 2048) == short)
    assert(choice("bf16 d=128 mask={window(1023, 0) | k < 4}", 32768) == narrow)
    assert(choice("bf16 d=128 mask={window(20000, 0)}", 32768) == long)
    assert(choice("bf16 d=128 mask={longformer(512, 64)}", 32768) == narrow)
    assert(choice("bf16 d=128 mask={prefix(n)} params={n: i32}", 32768) == long) -- n is not known
end

-- Where a second set of P does not pay.
function tests.some_have_one_set_of_p()
    for text, sets in pairs {["bf16 d=128"] = 2, ["bf16 d=128 score={softcap(30)}"] = 1, ["bf16 d=128 causal score={softcap(30)}"] = 1,
                             ["bf16 d=128 score={alibi(0.1)}"] = 2, ["bf16 d=128 mask={document(ids)} params={ids: i32[seq_k]}"] = 2} do
        local p = problem_text.parse(text)
        local s = schedule.choose(p, "forward", "hopper", arch.get "sm_90", nil, {batch = 0, heads_q = 0, heads_kv = 0, seq_q = 4096, seq_k = 4096})
        assert(s.p_sets == sets and s.tile_q == 128 and s.tile_k == 128 and s.q_buffers == 2, text)
    end
end

-- A tile that meets several blocks of a mask is visited for each of them.
function tests.tiles_fit_the_blocks_of_a_mask()
    local function tile(text, seq)
        local s = schedule.choose(problem_text.parse(text), "forward", "hopper", arch.get "sm_90", nil,
            {batch = 0, heads_q = 0, heads_kv = 0, seq_q = seq, seq_k = seq})
        return s.tile_q, s.tile_k
    end
    for _, d in ipairs {64, 128, 256} do
        for _, size in ipairs {64, 128} do
            for _, seq in ipairs {4096, 16384} do
                local _, keys = tile(("bf16 d=%d mask={butterfly(%d)}"):format(d, size), seq)
                assert(size % keys == 0, ("d=%d blocks of %d: %d keys"):format(d, size, keys))
            end
        end
    end
    assert(tile("bf16 d=64 mask={butterfly(128)}", 4096) == 128 and tile("bf16 d=64 mask={butterfly(256)}", 4096) == 256)
    local free = {tile("bf16 d=128 causal", 16384)} -- no blocks: the best of the sweep
    assert(free[1] == 192 and free[2] == 80)
    free = {tile("bf16 d=128 mask={dilated(256, 4)}", 16384)} -- not known how many keys are seen: a smaller one may skip more
    assert(free[1] == 128 and free[2] == 128)
end

-- A plan asks once a candidate: that must not cost it its few milliseconds.
function tests.what_a_plan_asks_for_is_found_once()
    local p = problem_text.parse("bf16 d=128 mask={(causal | k < 4) & k % 3 == 0} score={softcap(30)}")
    assert(interval.walk(p.mask) == interval.walk(p.mask))
    assert(interval.bounds(p.mask) == interval.bounds(p.mask))
    assert(functions.uses(p) == functions.uses(p))
end

return tests
