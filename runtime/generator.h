/* generator.h - the Lua generator, seen from C. generator.c is the only file that touches Lua.
 *
 * Called by plan.c and by the command line. All take the context's lock themselves. Texts are allocated in
 * the arena given. Errors of problem and schedule texts are INVALID or UNSUPPORTED as the generator says; a
 * fault of the generator's own code is INTERNAL with Lua's message.
 */
#ifndef LOOM_GENERATOR_H
#define LOOM_GENERATOR_H

#include "common.h"

/* -- Problems -------------------------------------------------------------------------------------------- */

enum { LOOM__PARAM_DIMS = 4, LOOM__REGION_DIMS = 4 };

typedef struct loom__param_info {
    const char *name;
    const char *dtype;                  /* i32 i64 u8 bool f32 f16 bf16 */
    int32_t num_dims;                   /* 0: a scalar */
    const char *dims[LOOM__PARAM_DIMS]; /* "seq_k", "64", "ceil(seq_q/64)" */
} loom__param_info;

typedef struct loom__problem_info {
    const char *text;  /* canonical */
    const char *dtype; /* bf16 fp16 fp32 */
    int32_t d, dv;
    bool backward, deterministic;
    const char *mask, *score; /* canonical expressions, NULL: none */
    int32_t num_params;
    const loom__param_info *params; /* in the order of slots */
} loom__problem_info;

loom_status loom__problem_query(loom_context *context, const char *problem, loom__arena *arena,
                                loom__problem_info *info, loom_error *error);

/* -- Plans ----------------------------------------------------------------------------------------------- */

typedef struct loom__request {
    const char *problem;
    const char *target;                       /* NULL: the generator's choice for arch */
    const char *arch;                         /* "sm_90", "host" */
    const char *schedule, *schedule_backward; /* NULL: the generator's choice */
    const char *measured[LOOM__NUM_TARGETS][2]; /* by target and pass: wisdom for where none is asked for */
    int32_t smem_bytes, num_sms;              /* of the device, 0: not known */
    bool tensor_maps;                         /* its driver encodes them */
    int32_t alignment;
    loom_shape hint;
} loom__request;

/* What a descriptor of docs/design.md section 5 says, as text; plan.c resolves it. */
typedef struct loom__arg_text {
    int32_t offset;
    const char *type;   /* map ptr i64 i32 u32 f32 */
    const char *source; /* "q.stride.seq" */
    int32_t box_rows, box_chunks; /* of a map */
} loom__arg_text;

/* A piece of memory beside the tensors: `bytes` for each of the dims, which are texts like those of a param.
 */
typedef struct loom__region_text {
    const char *place; /* kernels that name the same share it */
    int64_t bytes;
    int32_t num_dims;
    const char *dims[LOOM__REGION_DIMS];
    bool prepared; /* depends on the mask alone */
} loom__region_text;

typedef struct loom__kernel_text {
    const char *name, *pass, *variant, *symbol, *key;
    const char *arch; /* that the compiler is told: "sm_90a"; NULL: the plan's */
    const char *grid_batch, *grid_heads, *grid_seq;
    int32_t grid_rows;
    int32_t grid_persistent; /* blocks a multiprocessor that share out the tiles; 0: one block a tile */
    int32_t threads, smem_bytes;
    bool prepares; /* makes what is prepared */
    bool overlaps; /* begins before the kernel before it has ended, and waits for it itself */
    int32_t num_needs;
    const char *const *needs; /* outputs; none: always launched */
    int32_t num_regions;
    const loom__region_text *regions;
    int32_t args_bytes;
    int32_t num_rows;
    const loom__arg_text *rows;
} loom__kernel_text;

typedef struct loom__generated {
    const char *problem, *target, *arch, *schedule, *schedule_backward, *why;
    int32_t num_kernels;
    const loom__kernel_text *kernels;
    int reference; /* of the plan's table in Lua */
} loom__generated;

/* Chooses schedules and lists kernels; emits nothing yet. Ends with loom__generator_release. */
loom_status loom__generator_plan(loom_context *context, const loom__request *request, loom__arena *arena,
                                 loom__generated *generated, loom_error *error);
/* Emits kernel `index` (from 0). */
loom_status loom__generator_source(loom_context *context, const loom__generated *generated, int32_t index,
                                   loom__arena *arena, const char **source, loom_error *error);
void loom__generator_release(loom_context *context, loom__generated *generated);

typedef struct loom__candidate {
    const char *text; /* of a schedule */
    double cost;      /* by the generator's model */
} loom__candidate;

/* Schedules of a pass that the generator does not reject: its choice first, the others from the cheapest on. */
loom_status loom__generator_candidates(loom_context *context, const loom__request *request, loom_pass pass,
                                       loom__arena *arena, const loom__candidate **list, int32_t *num,
                                       loom_error *error);

/* -- Manifests ------------------------------------------------------------------------------------------- */

/* A problem of a manifest for an arch, as gen/manifest.lua reads it. */
typedef struct loom__manifest_entry {
    const char *place;                        /* "kernels.lua:4", for messages */
    const char *problem;                      /* as written, without errors */
    const char *arch;                         /* NULL: it is for none that was asked for */
    const char *target;                       /* NULL: the best one for the arch */
    const char *schedule, *schedule_backward; /* NULL: the generator's choice */
    loom_shape hint;
} loom__manifest_entry;

typedef struct loom__manifest {
    int32_t num;
    const loom__manifest_entry *entries;
} loom__manifest;

/* Runs the text of a manifest within limits, for archs as in "sm_80,sm_90a"; `name` is that of its file in
 * messages. INVALID with field "manifest" and all that is wrong, a line each, or with field "arch". */
loom_status loom__generator_manifest(loom_context *context, const char *text, const char *name,
                                     const char *archs, loom__arena *arena, loom__manifest *manifest,
                                     loom_error *error);

/* -- Texts for people ------------------------------------------------------------------------------------ */

/* One self-contained .cu with the pass's kernels, a launcher and a self-check. */
loom_status loom__generator_standalone(loom_context *context, const loom__request *request, loom_pass pass,
                                       loom__arena *arena, const char **text, loom_error *error);
/* A picture of the mask at request->hint as the shape, in characters (UTF-8) or as SVG. */
loom_status loom__generator_show(loom_context *context, const loom__request *request, bool svg,
                                 loom__arena *arena, const char **text, loom_error *error);
/* Candidates, choice and reasons of a pass; counts tiles of request->hint as the shape. */
loom_status loom__generator_why(loom_context *context, const loom__request *request, loom_pass pass,
                                loom__arena *arena, const char **text, loom_error *error);

/* -- The generator itself -------------------------------------------------------------------------------- */

/* 32 hex digits over every path and byte of gen/ and templates/: part of each cache key. */
loom_status loom__generator_digest(loom_context *context, char digest[33], loom_error *error);
/* Version of the problem text. */
loom_status loom__generator_grammar(loom_context *context, int32_t *grammar, loom_error *error);
void loom__generator_destroy(loom_context *context);

#endif
