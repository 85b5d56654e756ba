// A score cap tanh(factor S), in powers of 2: exponents are made of S itself, by a polynomial where tanh is taken of something
// near 0 and by the special function unit elsewhere. Which of both depends on the element alone.
typedef struct Cap {
    float most, to_exponent;  // the cap in powers of 2; what makes log2(e^2x) of S, where tanh is taken of x
    float square;            // power of 2: an element is near where S^2 < square
    unsigned limit;          // bits of S^2 + square are below it there
    float odd_1, odd_3, odd_5;  // value = S (odd_1 + w (odd_3 + w odd_5)), w = S^2 + square
} Cap;

// Minimax polynomial for |x| < 0.27: absolute error 2^-23.5 of tanh x, of a score 2^-23.5 times the cap.
static __device__ __forceinline__ Cap cap_of(const LoomArgs *args) {
    constexpr float near = 0.27f, c1 = 0.99999785f, c3 = -0.33309523f, c5 = 0.12670795f;
    Cap cap;
    const float factor = score_factor(args);
    cap.most = score_cap(args) * log2_e;
    cap.to_exponent = 2 * log2_e * factor;
    const float x2 = factor * factor, c = cap.most * factor, highest = c5 * c * x2 * x2;
    const float square = __int_as_float(__float_as_int(near * near / x2) & 0x7f800000);
    // Where powers of the factor leave f32, as at a scale of 2^-40, nothing is near.
    const bool fits = highest > 1e-36f && highest < 1e36f && c < 1e36f && square > 1e-36f && square < 1e36f;
    // An instruction takes one operand from a uniform register.
    cap.square = uniform_float(square);
    cap.limit = fits ? __float_as_uint(2 * square) : 0;
    cap.odd_5 = uniform_float(highest);
    cap.odd_3 = c3 * c * x2 - 2 * highest * square;
    cap.odd_1 = uniform_float(c1 * c - c3 * c * x2 * square + highest * square * square);
    return cap;
}

// base + value of an element that is near; `bits` of several tell by their `or` whether all are. Of what is hidden, -inf, it makes -inf.
static __device__ __forceinline__ float near_exponent(const Cap *cap, float s, float base, unsigned *bits) {
    const float w = fmaf(s, s, cap->square);  // in square .. 2 square where it is near: all such w have the same exponent bits
    *bits |= __float_as_uint(w);
    return fmaf(s, fmaf(fmaf(cap->odd_5, w, cap->odd_3), w, cap->odd_1), base);
}

static __device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The same of any element: tanh x = 1 - 2 / (1 + e^2x), with an absolute error below 2^-21. Here -inf is an S like others.
static __device__ __forceinline__ float any_exponent(const Cap *cap, float s, float base) {
    unsigned bits = 0;
    const float near = near_exponent(cap, s, base, &bits);
    const float far = fmaf(-2 * cap->most, reciprocal_approx(exp2_approx(s * cap->to_exponent) + 1), base + cap->most);
    return bits < cap->limit ? near : far;
}

// Whether some element of the warp is not near.
static __device__ __forceinline__ bool has_far(const Cap *cap, const float (&s)[tile_k / 2]) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < tile_k / 2; ++i) near_exponent(cap, s[i], 0, &bits);
    return __any_sync(~0u, bits >= cap->limit);
}

// What is made of S from here on the compiler makes anew, instead of keeping it from before.
static __device__ __forceinline__ void renew(float (&s)[tile_k / 2]) {
#pragma unroll
    for (int i = 0; i < tile_k / 2; ++i) asm volatile("" : "+f"(s[i]));
}

// Before a mask hides: an S of -inf is then told from what is hidden.
static __device__ __forceinline__ void unhide(float (&s)[tile_k / 2]) {
#pragma unroll
    for (int i = 0; i < tile_k / 2; ++i) {
        if (s[i] == __int_as_float(0xff800000)) s[i] = unset;
    }
}
