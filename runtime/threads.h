/* threads.h - the host target: its worker threads, and loading of its kernels. Called by plan.c and launch.c.
 */
#ifndef LOOM_THREADS_H
#define LOOM_THREADS_H

#include "common.h"

/* A host kernel: computes block `block` of the grid. */
typedef void (*loom__host_function)(const void *args, long long block, void *scratch);

/* num_threads workers, the caller of loom__pool_run among them. */
loom_status loom__pool_create(const loom__memory *memory, int32_t num_threads, loom__pool **pool,
                              loom_error *error);
void loom__pool_destroy(loom__pool *pool);
/* Gives each worker at least so much scratch; waits for a run in progress. */
loom_status loom__pool_reserve(loom__pool *pool, size_t scratch_bytes, loom_error *error);
/* Runs all blocks and returns when they are done. Runs of several threads follow one another. */
void loom__pool_run(loom__pool *pool, loom__host_function function, const void *args, int64_t num_blocks);

/* A loaded host kernel. */
typedef struct loom__host_module {
    void *library;
    loom__host_function function;
    int fd; /* of the memory it was loaded from, -1 if from a file */
} loom__host_module;

/* Loads `path` if that is not "", else the bytes. IO when the binary does not load. */
loom_status loom__host_load(const loom_context *context, const char *path, const void *binary,
                            size_t binary_bytes, const char *symbol, loom__host_module *module,
                            loom_error *error);
void loom__host_unload(loom__host_module *module);

/* Processors this process may use. */
int32_t loom__num_processors(void);

#endif
