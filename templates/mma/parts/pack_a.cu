// The A operand of columns 16 * step ...: an accumulator has the layout of an A operand.
static __device__ __forceinline__ void pack_a(unsigned (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack(left[0], left[1]);
    a[1] = pack(left[2], left[3]);
    a[2] = pack(right[0], right[1]);
    a[3] = pack(right[2], right[3]);
}
