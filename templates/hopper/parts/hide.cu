//@ -- word: as of seen_of
// Sets what is not seen to -inf.
static __device__ __forceinline__ void hide(float (&s)[4 * columns], ${word} seen) {
#pragma unroll
    for (int i = 0; i < 4 * columns; ++i) {
        if (!(seen >> (i % 4 * columns + i / 4) & 1)) s[i] = __int_as_float(0xff800000);
    }
}
