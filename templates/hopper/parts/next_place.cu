// The place that this block takes next, the first apart.
static __device__ __forceinline__ unsigned next_place(const LoomArgs *args) {
    unsigned place = 0;
    if (threadIdx.x % 32 == 0) place = gridDim.x + atomicAdd(args->taken, 1u);
    return __shfl_sync(~0u, place, 0);
}
