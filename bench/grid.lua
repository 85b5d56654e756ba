-- The grid of the FlashAttention papers for `attnloom tune` and `attnloom pack`: 16384 tokens, 2048 / d heads.
local list = {}
for _, d in ipairs {64, 128, 256} do
    for _, mask in ipairs {"", " causal"} do
        for _, ending in ipairs {"", " backward"} do
            for _, seq in ipairs {512, 1024, 2048, 4096, 8192, 16384} do
                list[#list + 1] = {("bf16 d=%d%s%s"):format(d, mask, ending),
                                   hint = {batch = 16384 // seq, heads_q = 2048 // d, heads_kv = 2048 // d, seq_q = seq, seq_k = seq}}
            end
        end
    end
end
return list
