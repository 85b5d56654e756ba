/* compile.h - the two compilers: NVRTC for CUDA, the system's C compiler for host.
 *
 * Finding is lazy and once per context; NVRTC is not loaded before the first compile, as that alone takes
 * longer than a warm plan may. Called by plan.c and the command line.
 */
#ifndef LOOM_COMPILE_H
#define LOOM_COMPILE_H

#include "common.h"

/* *toolchain points into the context. COMPILE when there is none, with what to install; takes the lock. */
loom_status loom__nvrtc_find(loom_context *context, const loom__toolchain **toolchain, loom_error *error);
loom_status loom__cc_find(loom_context *context, const loom__toolchain **toolchain, loom_error *error);

typedef struct loom__compiled {
    const void *binary;
    size_t binary_bytes;
    const char *log;     /* of the compiler, "" if it said nothing */
    int32_t registers;   /* per thread, -1 on host */
    int32_t spill_bytes; /* "spill stores" of ptxas per thread, -1 on host */
    double seconds;
} loom__compiled;

/* Both may run in several threads at once, each with its own arena; the lock is not taken. `label` names the
 * kernel in messages and folders. The failing source and the compiler's output are kept where the error says.
 */
loom_status loom__compile_cuda(const loom_context *context, const char *label, const char *source,
                               const char *arch, loom__arena *arena, loom__compiled *compiled,
                               loom_error *error);
loom_status loom__compile_host(const loom_context *context, const char *label, const char *source,
                               loom__arena *arena, loom__compiled *compiled, loom_error *error);

/* Loads NVRTC, so that compiles may start; takes the lock. */
loom_status loom__nvrtc_load(loom_context *context, loom_error *error);

#endif
