//@ if aligned and arch.cp_async then
// Starts a copy of 16 bytes to shared memory, zeros when `inside` is false.
static __device__ __forceinline__ void copy_chunk(unsigned smem, const unsigned short *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
//@ else
// Copies 16 bytes to shared memory through registers, zeros when `inside` is false.
static __device__ __forceinline__ void copy_chunk(unsigned smem, const unsigned short *from, bool inside) {
    uint4 chunk = {0, 0, 0, 0};
    if (inside) {
//@ if aligned then
        chunk = *(const uint4 *)from;
//@ else
        chunk.x = from[0] | (unsigned)from[1] << 16;
        chunk.y = from[2] | (unsigned)from[3] << 16;
        chunk.z = from[4] | (unsigned)from[5] << 16;
        chunk.w = from[6] | (unsigned)from[7] << 16;
//@ end
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w) : "memory");
}
//@ end

// Waits for all copies this thread has started.
static __device__ __forceinline__ void copies_wait() {
//@ if arch.cp_async then
    asm volatile("cp.async.wait_all;" ::: "memory");
//@ end
}
//@ if k.name == "backward_dkv" then

// One f32 to shared memory, zero when `inside` is false.
static __device__ __forceinline__ void copy_word(unsigned smem, const float *from, bool inside) {
//@ if arch.cp_async then
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(from), "r"(inside ? 4 : 0) : "memory");
//@ else
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(inside ? *from : 0.0f) : "memory");
//@ end
}
//@ end
