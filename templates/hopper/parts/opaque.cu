// x, of which the compiler knows nothing: it neither makes it anew before each use, nor keeps what is made of it, for a path that is
// rarely taken, in registers through a loop.
static __device__ __forceinline__ unsigned opaque(unsigned x) {
    unsigned y;
    asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
