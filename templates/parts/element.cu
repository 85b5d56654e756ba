// One ${dtype} as f32.
static __device__ __forceinline__ float to_float(unsigned short element) {
//@ if dtype == "bf16" then
    return __uint_as_float((unsigned)element << 16);
//@ else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(element));
    return value;
//@ end
}
