// x, as if it were not known before: what follows from it is computed where it is used. Otherwise the compiler does so ahead
// of the loop of tiles, and rare paths hold registers all the while.
static __device__ __forceinline__ int here(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
