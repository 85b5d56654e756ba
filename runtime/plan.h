/* plan.h - the inside of a plan: made by plan.c, read by launch.c. Immutable once `state` is not COMPILING,
 * but for certificates and what serves. */
#ifndef LOOM_PLAN_H
#define LOOM_PLAN_H

#include <stdatomic.h>

#include "common.h"
#include "device.h"
#include "generator.h"
#include "threads.h"

/* Tensors of loom_args, in the order of TENSORS in launch.c. */
enum {
    LOOM__Q,
    LOOM__K,
    LOOM__V,
    LOOM__O,
    LOOM__LSE,
    LOOM__DOUT,
    LOOM__DLSE,
    LOOM__DQ,
    LOOM__DK,
    LOOM__DV,
    LOOM__NUM_TENSORS
};

enum {
    LOOM__MAX_REGIONS = 16, /* of a pass: those of all its variants */
    LOOM__MAX_PLAN_PARAMS = 32,
    LOOM__MAX_ARGS_BYTES = 2048, /* half of what a CUDA kernel takes */
    LOOM__MAX_VARIANTS = 4,
    LOOM__MAX_PASS_KERNELS = 16, /* of one variant */
    LOOM__MAX_MAPS = 12          /* of one variant */
};

/* Values a kernel's arguments are packed from: a launch fills the list once, each kernel's rows copy from it.
 */
enum {
    LOOM__VALUE_TENSORS = 0, /* per tensor: data, stride of batch, seq, head */
    LOOM__VALUE_ONE = 4 * LOOM__NUM_TENSORS,
    LOOM__VALUE_BATCH,
    LOOM__VALUE_HEADS_Q,
    LOOM__VALUE_HEADS_KV,
    LOOM__VALUE_GROUP,
    LOOM__VALUE_SEQ_Q,
    LOOM__VALUE_SEQ_K,
    LOOM__VALUE_Q_START,
    LOOM__VALUE_K_START,
    LOOM__VALUE_SCALE, /* bits of a float */
    LOOM__VALUE_REGIONS,
    LOOM__VALUE_PARAMS = LOOM__VALUE_REGIONS + LOOM__MAX_REGIONS, /* per slot: data, scalar, strides */
    LOOM__PARAM_VALUES = 2 + LOOM__PARAM_DIMS,
    LOOM__NUM_VALUES = LOOM__VALUE_PARAMS + LOOM__MAX_PLAN_PARAMS * LOOM__PARAM_VALUES
};

typedef struct loom__arg_row {
    uint16_t offset, bytes; /* in the argument struct; 4, 8 or LOOM__MAP_BYTES */
    uint16_t value;         /* index among the values, of a map among the variant's maps */
} loom__arg_row;

/* A tensor map that a variant's kernels take; a launch encodes it once. */
typedef struct loom__plan_map {
    uint16_t tensor, box_rows, box_chunks;
} loom__plan_map;

/* Size of a dimension of an array param: a constant, or a word of the shape divided by `divisor`, rounded up.
 */
typedef struct loom__dim {
    int32_t value; /* LOOM__VALUE_BATCH ..., -1: the constant */
    int64_t divisor, constant;
} loom__dim;

typedef enum loom__scalar { LOOM__SCALAR_NONE, LOOM__SCALAR_I32, LOOM__SCALAR_F32 } loom__scalar;

typedef struct loom__plan_param {
    const char *name;
    loom__scalar scalar; /* NONE: an array */
    int32_t element_bytes;
    int32_t num_dims;
    loom__dim dims[LOOM__PARAM_DIMS];
} loom__plan_param;

typedef struct loom__plan_kernel {
    loom_kernel facts;
    bool host_binary;
    const loom__arg_row *rows;
    int32_t num_rows;
    int32_t args_bytes;
    uint32_t needs;               /* bits of tensors, one of which must be wanted; 0: always */
    bool prepares;                /* makes what is prepared: not launched where the caller has that */
    bool overlaps;                /* begins before the kernel before it has ended, and waits for it itself */
    int32_t grid_batch, grid_heads, grid_seq; /* indices of values */
    int32_t grid_rows;
    int32_t grid_persistent;       /* blocks a multiprocessor that share out the tiles; 0: one block a tile */
    const char *arch;              /* for the compiler */
    loom__module module;           /* GPU */
    loom__host_module host_module; /* host */
} loom__plan_kernel;

/* A piece of the workspace, or of what is prepared: `bytes` for each of the dims. */
typedef struct loom__region {
    const char *place;
    int64_t bytes;
    int32_t num_dims;
    loom__dim dims[LOOM__REGION_DIMS];
    bool prepared;
} loom__region;

typedef struct loom__plan_variant {
    int32_t alignment; /* bytes; 1: none */
    int32_t first, count;
    int32_t num_maps;
    loom__plan_map maps[LOOM__MAX_MAPS];
    uint32_t prepares; /* bits of the pass's regions that some of its kernels make */
} loom__plan_variant;

/* Kernels of one pass. A launch takes the first variant whose alignment its tensors have and whose maps the
 * driver encodes. */
typedef struct loom__plan_pass {
    int32_t num_variants;
    loom__plan_variant variants[LOOM__MAX_VARIANTS];
    int32_t num_regions;
    loom__region regions[LOOM__MAX_REGIONS];
} loom__plan_pass;

/* What plan.c needs until the kernels are there. */
typedef struct loom__construction loom__construction;

enum { LOOM__PLAN_COMPILING, LOOM__PLAN_READY, LOOM__PLAN_FAILED };

struct loom_plan {
    /* What launches take: the plan itself, or one of these two, which are NULL without LOOM_STAND_IN. Such a
     * plan has nothing else than these, context and arena. */
    _Atomic(loom_plan *) serving;
    loom_plan *own, *stand_in;
    pthread_mutex_t upgrading;
    int32_t ordinal;  /* of the device on which the own kernels are checked, or LOOM_DEVICE_HOST */
    atomic_int state; /* last to be written, with release; all below is complete for who has read READY */
    loom__construction *construction;
    loom_context *context;
    loom__arena arena;
    const char *texts[LOOM_TEXT_WHY + 1];
    int32_t d, dv;
    int32_t element_bytes;
    bool is_bf16;
    bool backward;
    bool host;
    bool launchable;
    const loom__device *device; /* GPU */
    const loom__driver_api *driver;
    int32_t num_params;
    loom__plan_param params[LOOM__MAX_PLAN_PARAMS];
    int32_t num_kernels;
    loom__plan_kernel *kernels;
    loom__plan_pass passes[2]; /* by loom_pass */
};

/* The plan as a pack keeps it, see record.h; NULL: out of memory. */
const char *loom__plan_record(const loom_plan *plan, loom__arena *arena);

/* What a plan would find and what it would have to compile here. Texts in the arena. */
typedef struct loom__survey {
    const char *problem, *target, *arch;
    int32_t num_kernels;
    const char *const *keys;
    const bool *found; /* in packs or the cache */
} loom__survey;

/* Looks without compiling or loading; errors are those of loom_plan_create. */
loom_status loom__plan_survey(loom_context *context, const loom_plan_desc *desc, loom__arena *arena,
                              loom__survey *survey, loom_error *error);

/* What answers for a plan by now. NULL for NULL. */
static inline loom_plan *loom__plan_serving(const loom_plan *plan) {
    return plan ? atomic_load_explicit(&((loom_plan *)plan)->serving, memory_order_acquire) : NULL;
}

static inline bool loom__plan_is_ready(const loom_plan *plan) {
    return atomic_load_explicit(&plan->state, memory_order_acquire) == LOOM__PLAN_READY;
}

/* Why a plan is not ready: NOT_FOUND while it compiles, else the error of its compile. */
loom_status loom__plan_fail_unready(const loom_plan *plan, loom_error *error);

#endif
