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

//@ if not has_score then
// Takes LSE off S where one of the tile is large: after the scale has multiplied. What it makes is in powers of e.
static __device__ __forceinline__ void subtract_lse(float (&s)[tile_q / 2], const float *exact_lse, const LoomArgs *args, int key) {
    const int first = opaque(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int i = 0; i < tile_q / 2; ++i) {
        s[i] = s[i] * args->scale - exact_lse[first + i / 4 * 8 + i % 2];
//@ if not has_mask then
        if (key + i / 2 % 2 * 8 >= args->seq_k) s[i] = __int_as_float(0xff800000);
//@ end
    }
}

// P of what is left of S, times weight_unit.
static __device__ __forceinline__ void make_weights(unsigned (&p)[tile_q / 4], const float (&s)[tile_q / 2], float to_log2) {
#pragma unroll
    for (int i = 0; i < tile_q / 4; ++i) {
        p[i] = pack_weights(exp2_approx(fmaf(s[2 * i], to_log2, weight_log2)), exp2_approx(fmaf(s[2 * i + 1], to_log2, weight_log2)));
    }
}
//@ end
