-- The kernels of results/host-pack.csv: 15 problems, 30 plans for two archs.
local list = {}
for _, d in ipairs {"64", "80", "96", "128", "192:128"} do
    for _, mask in ipairs {"", " causal", " mask={causal & window(1023, 0)}"} do
        list[#list + 1] = ("bf16 d=%s%s backward"):format(d, mask)
    end
end
return list
