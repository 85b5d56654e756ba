/* wisdom.h - remembers what was measured: the best schedule of a problem's pass on a device, for a class of
 * shapes.
 *
 * A text, one line an entry, that lines may be added to and taken from by hand:
 *
 *     wisdom1 device="NVIDIA H200" units=132 target=hopper pass=forward rows=262144 queries=1024 keys=4096
 *     ns=181234 generator=<32 hex digits> schedule="tile=128x128 stages=2" problem=bf16 d=128 mask={k <= q}
 *
 * (on one line; the problem comes last and goes to the end). Of two entries for the same the faster one
 * stays. A context knows the entries of the file wisdom1.txt of its cache folder, which it reads again when
 * another process has changed it, and what was imported; these are its own. Beside them it has the shipped
 * ones, of the folder wisdom/, which lie in the library and are never exported. Called by plan.c, tune.c and
 * the command line; takes the context's lock itself.
 */
#ifndef LOOM_WISDOM_H
#define LOOM_WISDOM_H

#include "common.h"
#include "device.h"

/* Shapes that share a schedule. Powers of two; docs/design.md section 11 says why these. */
typedef struct loom__shape_class {
    int64_t rows;          /* of queries, of all heads and sequences: how much work there is to share out */
    int64_t queries, keys; /* of a sequence */
} loom__shape_class;

/* A hint with typical sizes for those that are not known. */
loom_shape loom__shape_typical(const loom_shape *hint);
loom__shape_class loom__shape_class_of(const loom_shape *hint);
/* The work of a launch of the class's own size, as a part of that of a launch of the hint's: pairs of rows
 * and keys. */
double loom__shape_class_share(const loom_shape *hint);

typedef struct loom__wisdom_entry {
    const char *device;  /* name of the GPU or CPU */
    int32_t units;       /* its multiprocessors, or the context's threads */
    const char *problem; /* canonical */
    const char *target;
    loom_pass pass;
    loom__shape_class class;
    const char *generator; /* digest: another generator's schedule may be of other kernels */
    int64_t ns;            /* of a launch of the class's own size: what a shape took, times its share */
    const char *schedule;
    bool shipped; /* with the library */
} loom__wisdom_entry;

/* Sets device and units of an entry; `device` NULL: the host. The name is in the arena. */
loom_status loom__wisdom_device(loom_context *context, const loom__device *device, loom__arena *arena,
                                loom__wisdom_entry *entry, loom_error *error);

/* Steps of a power of two that each number of a class may be away from the one asked for and still serve. */
enum { LOOM__WISDOM_NEAR = 2 };

/* The entry whose class is nearest to that of `wanted`, whose schedule and ns are not read, by steps in all,
 * and at most `most_steps` away in each number; of several as near the one of the larger class. Generator
 * NULL: of any, and of several the faster. Own entries come before shipped ones that are as near; `foreign`:
 * shipped ones count whatever their generator. NULL: there is none. The entry stays as long as the context.
 */
const loom__wisdom_entry *loom__wisdom_find(loom_context *context, const loom__wisdom_entry *wanted,
                                            int32_t most_steps, bool foreign);

/* Only among the own ones. */
const loom__wisdom_entry *loom__wisdom_find_own(loom_context *context, const loom__wisdom_entry *wanted,
                                                int32_t most_steps);

/* Adds an entry to the context and to the file. Of one for the same that is there the faster stays, unless
 * its schedule is `tried` (NULL: none), which was measured, or failed, beside the new one. IO when the file
 * cannot be written; the context knows it all the same. */
loom_status loom__wisdom_learn(loom_context *context, const loom__wisdom_entry *entry, const char *tried,
                               loom_error *error);

/* Adds all the context knows to the file. */
loom_status loom__wisdom_save(loom_context *context, loom_error *error);

#endif
