// Two f32 as a pair of ${dtype}, lo in the lower half.
static __device__ __forceinline__ unsigned pack(float lo, float hi) {
    unsigned pair;
//@ if dtype == "bf16" then
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
//@ elseif arch.sm >= 80 then
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
//@ else
    asm("{.reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(pair) : "f"(lo), "f"(hi));
//@ end
    return pair;
}
