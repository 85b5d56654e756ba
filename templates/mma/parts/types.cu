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

// 2^x and log2 x of the special function unit: relative error 2^-22, absolute error 2^-22.
static __device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
//@ if k.name == "forward" then
static __device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
//@ end
