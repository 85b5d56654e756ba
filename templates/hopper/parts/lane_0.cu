// A word of shared memory in lane 0, the lane that tells when the word may be overwritten; 0 in the others. from_lane_0 gives
// it to all, by another instruction than uniform: with one for both, operands leave the uniform datapath (nvrtc 13.0).
static __device__ __forceinline__ unsigned in_lane_0(const volatile unsigned *word) { return threadIdx.x % 32 == 0 ? *word : 0; }
static __device__ __forceinline__ unsigned from_lane_0(unsigned x) { return __reduce_or_sync(~0u, x); }
