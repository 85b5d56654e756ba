/* harness.h - one attention launch set up to be judged: tensors of any layout, poison around and inside them,
 * and the comparison with the float64 reference.
 *
 * A rig holds the tensors of one launch in host memory, mirrored on the device when there is one. Outputs,
 * workspace, and every byte of a buffer that no tensor owns hold NaN before a launch; what no output owns
 * must hold it afterwards. Called by tune.c, certify.c, `attnloom check` and the tests.
 */
#ifndef LOOM_HARNESS_H
#define LOOM_HARNESS_H

#include "memory.h"
#include "reference.h"

typedef enum loom__rig_name {
    LOOM__RIG_Q,
    LOOM__RIG_K,
    LOOM__RIG_V,
    LOOM__RIG_DOUT,
    LOOM__RIG_DLSE,
    LOOM__RIG_O,
    LOOM__RIG_LSE,
    LOOM__RIG_DQ,
    LOOM__RIG_DK,
    LOOM__RIG_DV,
    LOOM__RIG_NUM
} loom__rig_name;

extern const char *const loom__rig_names[LOOM__RIG_NUM];

typedef enum loom__layout {
    LOOM__LAYOUT_DENSE,       /* [batch, seq, head, dim] */
    LOOM__LAYOUT_HEADS_FIRST, /* [batch, head, seq, dim] */
    LOOM__LAYOUT_PADDED,      /* gaps of 16 bytes after each row, token and sequence */
    LOOM__LAYOUT_ODD,         /* starts one element off alignment, rows of dim + 1 elements */
    LOOM__LAYOUT_PACKED,    /* q, k and v side by side in one buffer, as far as their shapes allow; dq, dk, dv
                               too */
    LOOM__LAYOUT_BROADCAST, /* stride 0: batch of q, batch and head of k and v, all but dim of dout, all of
                               dlse */
    LOOM__LAYOUT_SHARED,    /* v is k */
    LOOM__LAYOUT_MIXED,     /* each tensor another of the first four */
    LOOM__LAYOUT_NUM
} loom__layout;

extern const char *const loom__layout_names[LOOM__LAYOUT_NUM];

typedef struct loom__rig_options {
    loom_shape shape;
    float scale;              /* as in loom_args */
    int64_t q_start, k_start; /* as in loom_args */
    loom__layout layout;
    uint64_t seed;
    float spread;      /* standard deviation of q, k, v, dout; 0 means 1 */
    bool without_dlse; /* the launch gets no dlse */
    uint32_t unwanted; /* bit per loom__rig_name: an output that is left NULL */
    bool prepared;     /* loom_prepare makes what the mask needs, before each run */
} loom__rig_options;
#define LOOM__RIG_OPTIONS_INIT                                                                               \
    { .q_start = LOOM_DEFAULT_START, .k_start = LOOM_DEFAULT_START, .seed = 1 }

typedef struct loom__rig_tensor {
    int buffer; /* -1: the tensor is not there */
    loom__storage storage;
    int64_t dims[4]; /* batch, seq, head, dim (1 for lse and dlse) */
    int64_t stride[4];
    int64_t first; /* element of the buffer */
} loom__rig_tensor;

typedef struct loom__rig_buffer {
    size_t bytes;
    char *host;
    void *device; /* host itself on the host target */
} loom__rig_buffer;

enum { LOOM__RIG_BUFFERS = LOOM__RIG_NUM + LOOM__MAX_PARAMS };

typedef struct loom__rig {
    loom_context *context;
    const loom_plan *plan;
    loom__rig_options options;
    loom__reference *reference;
    loom__device_memory *memory;
    bool on_host;
    int num_buffers;
    loom__rig_buffer buffers[LOOM__RIG_BUFFERS];
    loom__rig_tensor tensors[LOOM__RIG_NUM];
    int param_buffers[LOOM__MAX_PARAMS]; /* -1: a scalar */
    loom_param params[LOOM__MAX_PARAMS]; /* host memory; tests may change values before a run */
    loom__rig_buffer workspace, prepared;
} loom__rig;

/* Random tensors and params for a plan on a device (an ordinal or LOOM_DEVICE_HOST). The plan must outlive
 * the rig. */
loom_status loom__rig_create(loom_context *context, const loom_plan *plan, int32_t device,
                             const loom__rig_options *options, loom__rig **rig, loom_error *error);
void loom__rig_destroy(loom__rig *rig);

/* One element; dim is 0 for lse and dlse. */
double loom__rig_get(const loom__rig *rig, loom__rig_name name, int64_t batch, int64_t seq, int64_t head,
                     int64_t dim);
void loom__rig_set(loom__rig *rig, loom__rig_name name, int64_t batch, int64_t seq, int64_t head, int64_t dim,
                   double value);
/* All elements: the same value, or normal noise of a seed. */
void loom__rig_fill(loom__rig *rig, loom__rig_name name, double value);
void loom__rig_noise(loom__rig *rig, loom__rig_name name, uint64_t seed, double spread);

/* Poisons what the pass writes, launches, waits, and reads the outputs back. Backward reads o and lse as they
 * are in host memory, so run forward before it. INTERNAL with the field "guard" when memory outside the
 * outputs changed. */
loom_status loom__rig_run(loom__rig *rig, loom_pass pass, loom_error *error);

/* Digest of the bits of the pass's outputs. */
uint64_t loom__rig_digest(const loom__rig *rig, loom_pass pass);

/* Arguments of the launch, in host memory, for the reference. */
void loom__rig_host_args(const loom__rig *rig, loom_args *args);

/* How far one output is from float64. Error is the relative L2 norm over all elements (lse: the largest
 * difference); its limit is twice the error of plain attention at the same dtype, plus a small term. An
 * output without one finite element is not fine, except the lse of a launch in which no row sees a key. */
typedef struct loom__rig_verdict {
    loom__rig_name name;
    bool fine;
    int64_t num_elements, num_finite; /* finite on both sides: the others only have to be of the same kind */
    double error, limit;
    double worst, worst_limit; /* largest difference of one element, relative to the largest element */
    int64_t at[4];             /* where it is */
    double got, wanted;
} loom__rig_verdict;

typedef struct loom__rig_report {
    bool fine;
    int num_verdicts;
    loom__rig_verdict verdicts[5];
} loom__rig_report;

/* Compares the outputs of forward, and with LOOM_BACKWARD of both passes. */
loom_status loom__rig_compare(loom__rig *rig, loom_pass pass, loom__rig_report *report, loom_error *error);

/* The line of a verdict, as reports and certificates have it. */
enum { LOOM__RIG_LINE_BYTES = 256 };
void loom__rig_print_verdict(const loom__rig_verdict *verdict, const char *layout,
                             char line[LOOM__RIG_LINE_BYTES]);

/* Writes the report's failures as text, "" when all is fine. */
void loom__rig_explain(const loom__rig_report *report, char *text, size_t capacity);

#endif
