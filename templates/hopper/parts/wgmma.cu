// Lower word of the descriptor of an operand in shared memory, 128-byte swizzle: address in units of 16 bytes, and the
// distance of 64-column chunks in the same, used where columns are contiguous in the operand. Offsets are added to it.
static __device__ __forceinline__ unsigned operand(unsigned smem, int chunk_distance) { return (smem & 0x3ffff) >> 4 | chunk_distance << 16; }

// Upper word: 8 rows are 1024 bytes. The words are put together by an instruction of its own: as a sum of 64 bits each use
// would take an addition with carry.
constexpr unsigned operand_high = 1024 >> 4 | 1 << 30;

static __device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most so many committed groups are unfinished.
template <int groups> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}
