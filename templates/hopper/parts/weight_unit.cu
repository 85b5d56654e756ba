constexpr float log2_e = 1.44269504f;
constexpr float weight_log2 = 14, weight_unit = 16384;  // P is kept in fp16 and 2^14 times as large: also small weights are exact there
//@ if dtype == "bf16" then
constexpr float of_sums = weight_unit;  // dK, dV and dQ are summed up as many times as large
//@ else
constexpr float of_sums = 1;  // dK, dV and dQ are summed up as many times as large: in fp16 dS has no room
//@ end
//@ if has_score then
//@ text("constexpr float slope_unit = " .. (dtype == "bf16" and 16 or 1) .. ";  // P with d(score)/ds, which is not more than 4000, is kept as many times as large, and dK summed up")
//@ end
constexpr float most_exact = 4096;  // |LSE| in powers of 2; above, it is subtracted from S after the scale has multiplied
