//@ part("count")

// The place that this block takes next, the first apart; a counter has how many were taken. Each block takes one more than it finds
// works for, so all together as many as there are works.
static __device__ __forceinline__ unsigned next_place(const LoomArgs *args, int works) {
    unsigned taken = 0;
    if (threadIdx.x % 32 == 0) {
        taken = (unsigned)(atomicAdd(args->taken, 1ull) - counting);
        if (taken + 1 == (unsigned)works) *args->taken = 0;
    }
    return gridDim.x + __shfl_sync(~0u, taken, 0);
}
