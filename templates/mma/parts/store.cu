// Writes two neighbouring elements of a row.
static __device__ __forceinline__ void store_pair(unsigned short *to, float first, float second) {
//@ if aligned then
    *(unsigned *)to = pack(first, second);
//@ else
    const unsigned pair = pack(first, second);
    to[0] = (unsigned short)pair;
    to[1] = (unsigned short)(pair >> 16);
//@ end
}
//@ if k.name == "backward_dkv" and (c.split > 1 or not deterministic) then

static __device__ __forceinline__ void store_shared(unsigned smem, unsigned value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(value) : "memory");
}
//@ if not deterministic then

// Adds to two neighbouring f32 in global memory.
static __device__ __forceinline__ void add_pair(float *to, float first, float second) {
//@ if arch.vector_red then
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(first), "f"(second) : "memory");
//@ else
    atomicAdd(to, first);
    atomicAdd(to + 1, second);
//@ end
}
//@ end
//@ end
