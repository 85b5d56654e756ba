//@ -- Kernels of one launch overlap: see programmatic dependent launch in the CUDA programming guide.
//@ if k.overlapped then
// Lets the next kernel begin where multiprocessors have room for it, when all blocks have come here.
static __device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

//@ end
//@ if k.overlaps then
// Waits until the kernels before have ended: for what they have written.
static __device__ __forceinline__ void await_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
//@ end
