// Descriptors of operands in shared memory, 128-byte swizzle: address and offsets in units of 16 bytes. `outer` is the
// distance of 64-column chunks where columns are contiguous in the operand; 8 rows are 1024 bytes.
static __device__ __forceinline__ unsigned long long operand(unsigned smem, int outer) {
    return (unsigned long long)((smem & 0x3ffff) >> 4 | outer << 16) | (unsigned long long)(1024 >> 4 | 1 << 30) << 32;
}

static __device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most so many committed groups are unfinished.
template <int groups> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}
