//@ part("count")

// Before a block asks first. What the word was is read here: these warps have few registers to keep it in.
static __device__ __forceinline__ void begin_taking(const LoomArgs *args, int times) {
    count_begin(args->taken, *(volatile unsigned long long *)args->taken, times);
}

// How many places were taken before, by a counter. All blocks together ask so many times.
static __device__ __forceinline__ unsigned taken_before(const LoomArgs *args, int times) {
    unsigned taken = 0;
    if (threadIdx.x % 32 == 0) {
        taken = (unsigned)(atomicAdd(args->taken, 1ull) - counting);
        if (taken + 1 == (unsigned)times) *args->taken = 0;
    }
    return __shfl_sync(~0u, taken, 0);
}
