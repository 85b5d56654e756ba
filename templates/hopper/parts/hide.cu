// Sets what is not seen to -inf.
static __device__ __forceinline__ void hide(float (&s)[4 * columns], const Seen *seen) {
#pragma unroll
    for (int i = 0; i < 4 * columns; ++i) {
        if (!is_seen(seen, i)) s[i] = __int_as_float(0xff800000);
    }
}
