// Two weights in fp16, and back.
static __device__ __forceinline__ unsigned pack_weights(float lo, float hi) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}

static __device__ __forceinline__ void unpack_weights(unsigned pair, float *lo, float *hi) {
    float x, y;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(x), "=f"(y) : "r"(pair));
    *lo = x;
    *hi = y;
}

//@ if has_mask then
// 0xffff in each half of a pair of P that is not 0; P is not negative.
static __device__ __forceinline__ unsigned where_weighted(unsigned pair) {
    unsigned halves;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(halves) : "r"(pair + 0x7fff7fffu));  // each byte the sign of its half
    return halves;
}
//@ end
