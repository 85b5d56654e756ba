/* record.h - what the generator said of a plan, as text: packs keep it, and a library without the generator
 * (CMake option ATTNLOOM_RUNTIME_ONLY) reads it there in place of asking.
 *
 * Lines `name value`, in the order of record.c; what may hold a line's end is a block, `name BYTES` and as
 * many bytes. Called by plan.c, packs_only.c and the command line.
 */
#ifndef LOOM_RECORD_H
#define LOOM_RECORD_H

#include "generator.h"

typedef struct loom__record {
    const char *written; /* the problem as it was asked for */
    const char *schedule, *schedule_backward; /* likewise; "" where none was */
    loom_shape hint;
    loom__problem_info info;   /* but for mask and score, which no launch needs */
    loom__generated generated; /* but for why */
} loom__record;

/* NULL: out of memory. */
const char *loom__record_print(loom__arena *arena, const loom__record *record);

/* Takes the text apart where it is; *record points into it. INTERNAL when it is not what is printed. */
loom_status loom__record_read(loom__arena *arena, char *text, loom__record *record, loom_error *error);

#endif
