/* pack.h - kernels built ahead, as one file or as bytes in the program: a container of cache entries.
 *
 *   attnloom pack 3
 *   digest 82c1...                     of the text that follows, up to the binaries
 *   library 0.1.0
 *   grammar 1                          of problem texts
 *   generator 5f2c...                  its digest: kernels and library agree on arguments
 *   toolkit 13.0                       that compiled the kernels
 *   driver 13.0                        least version of CUDA that a driver must take to load them
 *   archs sm_80 sm_90 sm_90a
 *   plans 12
 *   kernels 40
 *   plan 2301                          bytes of its record (record.h), which follows
 *   ...
 *   kernel 612 0 51384                 bytes of its meta.txt, certificate and binary; the first two follow
 *   ...
 *   (the binaries in the same order, each at a multiple of 16 bytes)
 *
 * Kernels are in the order of their keys, and what differs from run to run is left out, so that equal kernels
 * make equal bytes, but for certificates: those that the cache has when the pack is made (`attnloom check`
 * puts them there, on a GPU) come with the kernels; so are records. All are of NVRTC and for GPUs. Sources
 * are not in it: its generator emits them. A meta.txt is that of a cache entry, read by the same function,
 * and holds the digest of the binary, so that no byte goes unchecked. Plans look into the packs of their
 * context before the cache. Called through attnloom.h, by plan.c and the command line.
 */
#ifndef LOOM_PACK_H
#define LOOM_PACK_H

#include "cache.h"
#include "generator.h"

typedef struct loom__pack_kernel {
    const char *key;
    loom__entry entry; /* without source in a pack that was read */
} loom__pack_kernel;

struct loom__pack {
    const char *name; /* of its file, for messages */
    const char *library, *generator, *toolkit, *driver, *archs;
    int32_t grammar;
    int32_t num_plans;
    const char *const *plans; /* records */
    int32_t num_kernels;
    const loom__pack_kernel *kernels;
    loom__pack *next; /* of its context, in the order in which they were added */
};

/* A kernel of a plan as a pack takes it; points into the plan. */
loom__pack_kernel loom__pack_take(const loom_kernel *kernel);

/* The bytes of a pack, in the arena, from the records of plans and their kernels. Sorts both, of which there
 * is at least one each; of equal ones it takes one, and *num_kernels becomes how many it took. */
loom_status loom__pack_print(loom_context *context, const char **plans, int32_t num_plans,
                             loom__pack_kernel *kernels, int32_t *num_kernels, loom__arena *arena,
                             const char **bytes, size_t *num_bytes, loom_error *error);

/* Reads and verifies all of it. Binaries stay where they are, texts lie in the arena. INVALID with field
 * "pack" when it is none or damaged, UNSUPPORTED when its format is another. */
loom_status loom__pack_read(loom__arena *arena, const char *name, const void *bytes, size_t num_bytes,
                            loom__pack *pack, loom_error *error);

/* The entry of a manifest that asks for what a request asks for, on `target` (NULL: as the generator
 * chooses); NULL: out of memory. */
const char *loom__manifest_line(loom__arena *arena, const loom__request *request, const char *problem,
                                const char *target, const char *arch);

/* The kernel whose key begins with `start`, and its pack; NULL if no pack of the context has it. The lock is
 * held. */
const loom__pack_kernel *loom__pack_find(const loom_context *context, const char *start,
                                         const loom__pack **pack);

#endif
