/* device.h - what an emitted kernel finds in CUDA, and one function for each instruction that it writes in
 * PTX (translate.lua names them), on top of emulate.h. C++. */
#ifndef LOOM_TEST_DEVICE_H
#define LOOM_TEST_DEVICE_H

#include <math.h>
#include <string.h>

#include "emulate.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__    static  // blocks of kernels that have some run one after another
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx    emu_thread
#define blockIdx     emu_block
#define gridDim      emu_grid

// -- Numbers
// -----------------------------------------------------------------------------------------------------

template <class To, class From> static inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __int_as_float(int x) { return bits_as<float>(x); }
static inline int __float_as_int(float x) { return bits_as<int>(x); }
static inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdividef(float a, float b) { return a / b; }
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
struct longlong2 { long long x, y; };
struct uchar4 { unsigned char x, y, z, w; };
template <class T> static inline T __ldg(const T *at) { return *at; }
template <class T> static inline T __ldcg(const T *at) { return *at; }
static inline void __threadfence() {}
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline unsigned long long atomicCAS(unsigned long long *at, unsigned long long wanted,
                                           unsigned long long x) {
    const unsigned long long before = *at;
    if (before == wanted) *at = x;
    return before;
}
static inline unsigned atomicExch(unsigned *at, unsigned x) {
    const unsigned before = *at;
    *at = x;
    return before;
}
template <class T> static inline T atomicAdd(T *at, T x) {
    const T before = *at;
    *at += x;
    return before;
}
static inline int atomicMax(int *at, int x) {
    const int before = *at;
    if (x > before) *at = x;
    return before;
}
static inline unsigned atomicOr(unsigned *at, unsigned bits) {
    const unsigned before = *at;
    *at |= bits;
    return before;
}
template <class A, class B> static inline auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class A, class B> static inline auto max(A a, B b) -> decltype(a + b) { return a < b ? b : a; }

static inline float flushed(float x) { return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x; }
static inline void ptx_ex2(float &y, float x) { y = flushed(exp2f(flushed(x))); }
static inline void ptx_lg2(float &y, float x) { y = log2f(flushed(x)); }
static inline void ptx_rcp(float &y, float x) { y = flushed(1 / flushed(x)); }
static inline void ptx_tanh(float &y, float x) { y = tanhf(x); }
static inline void ptx_pack_bf16(unsigned &pair, float hi, float lo) { pair = emu_pack(lo, hi, 1); }
static inline void ptx_pack_fp16(unsigned &pair, float hi, float lo) { pair = emu_pack(lo, hi, 0); }
static inline void ptx_fp16_to_float(float &x, unsigned short half) { x = emu_fp16(half); }
static inline void ptx_unpack_fp16(float &lo, float &hi, unsigned pair) {
    lo = emu_fp16(pair & 0xffff);
    hi = emu_fp16(pair >> 16);
}
// 0xffff in place of each half that is negative.
static inline void ptx_signs_of_halves(unsigned &signs, unsigned pair) {
    signs = (pair & 0x8000 ? 0xffffu : 0) | (pair & 0x80000000u ? 0xffff0000u : 0);
}
static inline unsigned long long ptx_words(unsigned lo, unsigned hi) { return (unsigned long long)hi << 32 | lo; }

// x * 0 + sum of two halves, where sum is zero or NaN: NaN from the first x on that is not finite.
static inline void zero_fma(unsigned &sum, unsigned x, int is_bf16) {
    for (int shift = 0; shift < 32; shift += 16)
        if (!emu_is_finite(x >> shift, is_bf16)) sum |= 0x7fffu << shift;
}
static inline void ptx_zero_fma_bf16(unsigned &sum, unsigned x, unsigned) { zero_fma(sum, x, 1); }
static inline void ptx_zero_fma_fp16(unsigned &sum, unsigned x, unsigned) { zero_fma(sum, x, 0); }

// -- Warps
// -------------------------------------------------------------------------------------------------------

static inline unsigned __cvta_generic_to_shared(const void *at) {
    return (unsigned)((const unsigned char *)at - emu_shared);
}
static inline void __syncthreads() { emu_block_sync(); }
static inline int __syncthreads_count(bool x) {
    static int count;
    count += x;
    emu_block_sync();
    const int all = count;
    emu_block_sync();
    count = 0;
    emu_block_sync();
    return all;
}
static inline void ptx_any_of_256(unsigned &any, unsigned x, unsigned barrier) {
    static unsigned said[16];
    said[barrier] |= x;
    emu_named_barrier((int)barrier, 256, 1);
    any = said[barrier];
    emu_named_barrier((int)barrier, 256, 1);
    said[barrier] = 0;
    emu_named_barrier((int)barrier, 256, 1);
}
static inline void __syncwarp() { emu_exchange("__syncwarp", 0); }

template <class T> static inline T __shfl_sync(unsigned, T x, int lane) {
    return bits_as<T>((unsigned)emu_exchange("__shfl_sync", bits_as<unsigned>(x))[lane % 32]);
}
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int distance) {
    const int lane = threadIdx.x % 32;
    return bits_as<T>((unsigned)emu_exchange("__shfl_xor_sync", bits_as<unsigned>(x))[lane ^ distance]);
}
static inline int __shfl_up_sync(unsigned, int x, int distance) {
    const int lane = threadIdx.x % 32;
    const uint64_t *all = emu_exchange("__shfl_up_sync", (uint64_t)(int64_t)x);
    return lane < distance ? x : (int)all[lane - distance];
}
static inline unsigned __ballot_sync(unsigned, bool x) {
    const uint64_t *all = emu_exchange("__ballot_sync", x);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (unsigned)all[i] << i;
    return bits;
}
static inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
static inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }
template <class T> static inline T __reduce_max_sync(unsigned, T x) {
    const uint64_t *all = emu_exchange("__reduce_max_sync", (uint64_t)(int64_t)x);
    for (int i = 0; i < 32; ++i) x = max(x, (T)all[i]);
    return x;
}
template <class T> static inline T __reduce_min_sync(unsigned, T x) {
    const uint64_t *all = emu_exchange("__reduce_min_sync", (uint64_t)(int64_t)x);
    for (int i = 0; i < 32; ++i) x = min(x, (T)all[i]);
    return x;
}
static inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned __reduce_or_sync(unsigned, unsigned x) {
    const uint64_t *all = emu_exchange("__reduce_or_sync", x);
    for (int i = 0; i < 32; ++i) x |= (unsigned)all[i];
    return x;
}

// -- Shared memory
// -----------------------------------------------------------------------------------------------

static inline void ptx_load_word(unsigned &x, unsigned at) {
    emu_check_shared(at, 4);
    memcpy(&x, emu_shared + at, 4);
}
static inline void ptx_store_word(unsigned at, unsigned x) {
    emu_check_shared(at, 4);
    memcpy(emu_shared + at, &x, 4);
}
static inline void ptx_or_word(unsigned at, unsigned x) {
    unsigned before;
    emu_check_shared(at, 4);
    memcpy(&before, emu_shared + at, 4);
    ptx_store_word(at, before | x);
}
static inline void ptx_load_4_words(unsigned &x, unsigned &y, unsigned &z, unsigned &w, unsigned at) {
    emu_check_shared(at, 16);
    ptx_load_word(x, at);
    ptx_load_word(y, at + 4);
    ptx_load_word(z, at + 8);
    ptx_load_word(w, at + 12);
}

static inline void ptx_store_4_words_shared(unsigned at, unsigned x, unsigned y, unsigned z, unsigned w) {
    const unsigned words[4] = {x, y, z, w};
    emu_check_shared(at, 16);
    memcpy(emu_shared + at, words, 16);
}

// Four matrices of 8 x 8 halves; lane 8 m + r has the address of row r of matrix m.
static inline void ptx_ldmatrix(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned at) {
    const unsigned lane = threadIdx.x % 32;
    const uint64_t *rows = emu_exchange("ldmatrix", at);
    unsigned *const to[4] = {&a, &b, &c, &d};
    for (int m = 0; m < 4; ++m) ptx_load_word(*to[m], (unsigned)rows[8 * m + lane / 4] + lane % 4 * 4);
    emu_exchange("ldmatrix's end", 0);
}
static inline void ptx_stmatrix(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned lane = threadIdx.x % 32;
    const uint64_t *rows = emu_exchange("stmatrix", at);
    const unsigned from[4] = {a, b, c, d};
    for (int m = 0; m < 4; ++m) ptx_store_word((unsigned)rows[8 * m + lane / 4] + lane % 4 * 4, from[m]);
    emu_exchange("stmatrix's end", 0);
}

static inline void ptx_store_4_words(unsigned short *to, unsigned x, unsigned y, unsigned z, unsigned w) {
    const unsigned words[4] = {x, y, z, w};
    if ((uintptr_t)to % 16) emu_fail("16 bytes are stored at %p", (void *)to);
    memcpy(to, words, 16);
}

static inline void ptx_put_4_floats(float *to, float x, float y, float z, float w) {
    const float four[4] = {x, y, z, w};
    if ((uintptr_t)to % 16) emu_fail("16 bytes are stored at %p", (void *)to);
    memcpy(to, four, sizeof four);
}
static inline void ptx_get_4_floats(float &x, float &y, float &z, float &w, const float *from) {
    if ((uintptr_t)from % 16) emu_fail("16 bytes are read at %p", (const void *)from);
    x = from[0], y = from[1], z = from[2], w = from[3];
}
static inline void ptx_add_4_floats(float *to, float x, float y, float z, float w) {
    const float more[4] = {x, y, z, w};
    if ((uintptr_t)to % 16) emu_fail("16 bytes are added to at %p", (void *)to);
    for (int i = 0; i < 4; ++i) to[i] += more[i];
}

static inline void ptx_arrive(unsigned barrier) { emu_barrier_arrive(barrier, 0); }

#endif
