// x, which is the same in all lanes, in a register of the uniform datapath. An operand there costs no read of the register
// file, which products under way use too.
static __device__ __forceinline__ int uniform(int x) { return __reduce_max_sync(~0u, x); }
