/* emulate.h - runs a block of threads of an emitted hopper kernel on the CPU, to test its protocol without a
 * GPU.
 *
 * The text is translated (translate.lua), compiled as C++ behind device.h, and calls what is at the end of
 * this file.
 *
 * Modelled: the threads of a block as fibers in a random order that a seed decides, with warps that are slow
 * for a while; instructions of a whole warp, which meet; mbarriers with arrivals, bytes and phases; named
 * barriers; copies by TMA, with their swizzle and bounds, some time after they are started (what a load will
 * overwrite is NaN from its start on); wgmma, which reads its operands and writes its sums at a random time
 * between commit and wait, so that what is overwritten too early or read too early shows. Found besides:
 * deadlocks, warps that diverge, operands outside of shared memory, arrivals that a barrier does not expect,
 * copies and products that nobody waits for.
 *
 * Not modelled: blocks beside each other (one runs after another), memory that becomes visible late or out of
 * order (fences do nothing), registers, banks, the rounding of the tensor cores and of the special function
 * unit, time.
 *
 * No thread safety: one launch at a time.
 */
#ifndef LOOM_TEST_EMULATE_H
#define LOOM_TEST_EMULATE_H

#ifdef __cplusplus
extern "C" {
#endif
#include <stdbool.h>
#include <stdint.h>

#define EMU_API __attribute__((visibility("default")))

enum { EMU_MAX_BLOCKS = 8 }; /* that run together */

typedef struct emu_launch {
    void (*kernel)(const void *args);
    const void *args;
    unsigned blocks, threads, smem_bytes;
    bool stays; /* blocks run together, as many as have room, else one after the other */
    uint64_t seed;
    uint64_t *loaded; /* [blocks]: bytes that each has loaded are added */
} emu_launch;

/* NULL, or what went wrong; valid until the next call. */
const char *emu_run(const emu_launch *launch);

/* What stands in a tensor map's 128 bytes. Axes: column, row, chunk, head, batch; the element is 2 bytes. */
typedef struct emu_map {
    unsigned char *data;
    uint64_t extents[5], strides[4]; /* strides in bytes, of all axes but the first */
    uint32_t box[5];
    uint32_t unused[7];
} emu_map;

/* -- For kernels: addresses are offsets in the shared memory ------------------------------------------ */

typedef struct emu_index {
    unsigned x;
} emu_index;

extern EMU_API emu_index emu_thread, emu_block, emu_grid;
extern EMU_API unsigned char *emu_shared;

EMU_API void emu_fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
EMU_API void emu_check_shared(unsigned at, unsigned bytes);

/* Waits, at least a turn of all, for what another block may do. */
EMU_API void emu_poll(void);
EMU_API void emu_block_sync(void);
EMU_API void emu_named_barrier(int id, int num_threads, int waits);
EMU_API void emu_barrier_init(unsigned barrier, int arrivals);
EMU_API void emu_barrier_arrive(unsigned barrier, int bytes);
EMU_API void emu_barrier_wait(unsigned barrier, int parity);

/* All lanes call; each is told the values of all 32. The text says what for. */
EMU_API const uint64_t *emu_exchange(const char *what, uint64_t value);

EMU_API void emu_load(unsigned to, const void *map, int column, int row, int chunk, int head, int batch,
                      unsigned barrier);
EMU_API void emu_store(const void *map, int column, int row, int chunk, int head, int batch, unsigned from);
EMU_API void emu_stores_wait(void);

/* sum: n / 2 floats of the lane. a: 4 registers of the lane, or NULL and a descriptor. */
EMU_API void emu_wgmma(int n, int is_bf16, int adds, float *sum, const unsigned *a, uint64_t a_descriptor,
                       uint64_t b_descriptor, int a_transposed, int b_transposed);
EMU_API void emu_wgmma_fence(void);
EMU_API void emu_wgmma_commit(void);
EMU_API void emu_wgmma_wait(int groups);

EMU_API unsigned emu_pack(float lo, float hi, int is_bf16);
EMU_API float emu_fp16(unsigned half);
EMU_API int emu_is_finite(unsigned half, int is_bf16);

#ifdef __cplusplus
}
#endif
#endif
