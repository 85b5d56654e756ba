/* memory.h - memory and time of a device for those who launch on tensors of their own: the CPU or a GPU
 * behind one set of calls. Called by tune.c, harness.c and the command line. On the CPU allocation is malloc,
 * a copy memcpy, and marks read the monotonic clock. */
#ifndef LOOM_MEMORY_H
#define LOOM_MEMORY_H

#include "common.h"

typedef struct loom__device_memory loom__device_memory;

/* device: an ordinal or LOOM_DEVICE_HOST. *memory is to be freed by loom__device_memory_close, which frees
 * what is left. */
loom_status loom__device_memory_open(loom_context *context, int32_t device, loom__device_memory **memory,
                                     loom_error *error);
void loom__device_memory_close(loom__device_memory *memory);

/* Makes all that follows run in a stream of its own, which waits for no other, and breaks no capture of
 * another thread; before anything is allocated. Without it the stream is the default one. */
loom_status loom__device_memory_set_apart(loom__device_memory *memory, loom_error *error);
/* The stream, for launches. */
void *loom__device_memory_stream(const loom__device_memory *memory);

/* Memory aligned to 256 bytes, freed by close at the latest. */
loom_status loom__device_memory_alloc(loom__device_memory *memory, size_t bytes, void **data,
                                      loom_error *error);

/* Bytes of all of it: none is freed before close, so this is the most there was at once. */
size_t loom__device_memory_held(const loom__device_memory *memory);

loom_status loom__device_memory_upload(loom__device_memory *memory, void *to, const void *from, size_t bytes,
                                       loom_error *error);
loom_status loom__device_memory_download(loom__device_memory *memory, void *to, const void *from,
                                         size_t bytes, loom_error *error);

/* Waits for all work, of one that is set apart for that in its stream. */
loom_status loom__device_memory_sync(loom__device_memory *memory, loom_error *error);

/* Marks a moment in the stream under a number below LOOM__DEVICE_MEMORY_MAX_MARKS; after a sync
 * loom__device_memory_elapsed gives the milliseconds between two. */
enum { LOOM__DEVICE_MEMORY_MAX_MARKS = 32 };
loom_status loom__device_memory_mark(loom__device_memory *memory, int32_t mark, loom_error *error);
loom_status loom__device_memory_elapsed(loom__device_memory *memory, int32_t from, int32_t to, double *ms,
                                        loom_error *error);

/* Sorts the values; num is odd, or the larger of the two in the middle is taken. */
double loom__median(double *values, int32_t num);

#endif
