local list = {}
for _, d in ipairs {64, 128} do
    list[#list + 1] = ("bf16 d=%d causal"):format(d)
end
return list
