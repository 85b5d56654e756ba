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

// Adds to four neighbouring f32 in global memory.
static __device__ __forceinline__ void add_four(float *to, float x, float y, float z, float w) {
//@ if arch.vector_red then
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
//@ else
    atomicAdd(to, x);
    atomicAdd(to + 1, y);
    atomicAdd(to + 2, z);
    atomicAdd(to + 3, w);
//@ end
}
//@ end
//@ end
