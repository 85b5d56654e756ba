/* memory.h - memory and time of the device that a command runs on: the CPU or a GPU behind one set of calls.
 * Called by run.c, bench.c and harness.c. On the CPU allocation is malloc, a copy memcpy, and marks read the
 * monotonic clock. */
#ifndef LOOM_CLI_MEMORY_H
#define LOOM_CLI_MEMORY_H

#include "common.h"

typedef struct loom__cli_memory loom__cli_memory;

/* device: an ordinal or LOOM_DEVICE_HOST. *memory is to be freed by loom__cli_memory_close, which frees what
 * is left. */
loom_status loom__cli_memory_open(loom_context *context, int32_t device, loom__cli_memory **memory,
                                  loom_error *error);
void loom__cli_memory_close(loom__cli_memory *memory);

/* Memory aligned to 256 bytes, freed by close at the latest. */
loom_status loom__cli_memory_alloc(loom__cli_memory *memory, size_t bytes, void **data, loom_error *error);

loom_status loom__cli_memory_upload(loom__cli_memory *memory, void *to, const void *from, size_t bytes,
                                    loom_error *error);
loom_status loom__cli_memory_download(loom__cli_memory *memory, void *to, const void *from, size_t bytes,
                                      loom_error *error);

/* Waits for all work. */
loom_status loom__cli_memory_sync(loom__cli_memory *memory, loom_error *error);

/* Marks a moment in the default stream under a number below LOOM__CLI_MEMORY_MAX_MARKS; after a sync
 * loom__cli_memory_elapsed gives the milliseconds between two. */
enum { LOOM__CLI_MEMORY_MAX_MARKS = 32 };
loom_status loom__cli_memory_mark(loom__cli_memory *memory, int32_t mark, loom_error *error);
loom_status loom__cli_memory_elapsed(loom__cli_memory *memory, int32_t from, int32_t to, double *ms,
                                     loom_error *error);

#endif
