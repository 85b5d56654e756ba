/* attnloom.h - the public contract of Attnloom.
 *
 * Attnloom turns one line of text that describes an attention problem into a specialised kernel, compiles it,
 * caches it and launches it, forward and backward.
 *
 *     loom_context *context = NULL;
 *     loom_plan *plan = NULL;
 *     loom_error error = LOOM_ERROR_INIT;
 *     loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
 *     desc.problem = "bf16 d=128 mask={causal} backward";
 *     if (loom_context_create(NULL, &context, &error) || loom_plan_create(context, &desc, &plan, &error)) {
 *         fprintf(stderr, "%s: %s\n", error.field, error.text);
 *         return 1;
 *     }
 *     loom_args args = LOOM_ARGS_INIT;
 *     args.shape = (loom_shape){.batch = 2, .heads_q = 32, .heads_kv = 8, .seq_q = 4096, .seq_k = 4096};
 *     args.q = loom_dense(q, 4096, 32, 128);         // [batch, seq, head, dim], elements
 *     args.k = loom_dense(k, 4096, 8, 128);
 *     args.v = loom_dense(v, 4096, 8, 128);
 *     args.o = loom_dense(o, 4096, 32, 128);
 *     args.lse = loom_dense_lse(lse, 32, 4096);      // [batch, head, seq], float
 *     loom_forward(plan, &args, stream, &error);
 *     loom_plan_destroy(plan);
 *     loom_context_destroy(context);
 *
 * Meaning. S = score(scale * Q K^T), then the mask sets S to -inf, P = softmax(S) over keys, O = P V,
 * LSE = ln(sum exp S), natural logarithm. Query head h reads key/value head h / (heads_q / heads_kv).
 * Masks and scores speak of positions q = q_start + row and k = k_start + col; q_start defaults to seq_k - seq_q
 * and k_start to 0, so that causal (k <= q) is aligned to the bottom right. A row that sees no key has O = 0,
 * LSE = -inf and zero gradients.
 *
 * Errors. Every call that can fail returns a loom_status and, if `error` is not NULL, fills the caller's
 * loom_error; no call prints (but for the log, see loom_options), exits or aborts. INVALID means the caller is
 * wrong, UNSUPPORTED that the library or device cannot do it.
 *
 * Threads. A context may be shared by threads: what they share is locked inside, and a plan that compiles keeps
 * no other plan waiting, unless both want the same kernel. A plan is immutable, but for loom_plan_upgrade: any
 * number of threads may launch one plan at once, on any streams. Destroying is the caller's to order: plans before their context.
 *
 * ABI. Structs that may grow begin with `size`, set by the LOOM_*_INIT macros; fields are only ever appended, and
 * a zero in an appended field keeps the old behaviour. Enum values never change.
 */
#ifndef ATTNLOOM_H
#define ATTNLOOM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define LOOM_API
#elif defined(__GNUC__)
#define LOOM_API __attribute__((visibility("default")))
#else
#define LOOM_API
#endif

#define LOOM_VERSION_MAJOR 0
#define LOOM_VERSION_MINOR 1
#define LOOM_VERSION_PATCH 0

/* Version of the library at run time: major * 10000 + minor * 100 + patch. */
LOOM_API int32_t loom_version(void);

/* -- Status and errors ------------------------------------------------------------------------------------- */

typedef enum loom_status {
    LOOM_OK = 0,
    LOOM_INVALID = 1,     /* an argument is wrong: field names it */
    LOOM_UNSUPPORTED = 2, /* right, but this library, target or device cannot do it */
    LOOM_NOT_FOUND = 3,   /* no such kernel and compiling was forbidden, or no such name */
    LOOM_COMPILE = 4,     /* the compiler refused the emitted source, or there is no compiler */
    LOOM_DRIVER = 5,      /* the CUDA driver reported an error, or there is no driver */
    LOOM_MEMORY = 6,      /* out of host memory */
    LOOM_IO = 7,          /* a file could not be read or written */
    LOOM_INTERNAL = 8     /* a fault of the library */
} loom_status;

/* Short constant name of a status, "INVALID" for LOOM_INVALID. Never NULL. */
LOOM_API const char *loom_status_name(loom_status status);

/* What went wrong. Owned by the caller; filled on failure, untouched on success. */
typedef struct loom_error {
    size_t size;
    int32_t status;      /* a loom_status */
    int32_t text_offset; /* byte offset into the problem or schedule text, -1 when the error is not about a text */
    char field[48];      /* what is wrong: "problem.mask", "args.q.stride", "nvrtc" ... */
    char text[2048];     /* value, limit and rule; for texts every error with its line and a caret */
} loom_error;
#define LOOM_ERROR_INIT {sizeof(loom_error), 0, -1, "", ""}

/* -- Context ----------------------------------------------------------------------------------------------- */

typedef struct loom_context loom_context; /* generator, compilers, cache; thread-safe by one lock */
typedef struct loom_plan loom_plan;       /* compiled kernels of one problem on one device; immutable */

#define LOOM_LOG_FROM_ENVIRONMENT (-1)

/* Options win over environment variables, which are read once, here. NULL strings and LOOM_LOG_FROM_ENVIRONMENT
 * mean: LOOM_CACHE_DIR, LOOM_NVRTC_DIR, LOOM_LOG, and where those are unset the defaults of the README. */
typedef struct loom_options {
    size_t size;
    const char *cache_dir;  /* folder of the kernel cache; "" keeps nothing on disk */
    const char *nvrtc_dir;  /* folder searched first for libnvrtc */
    int32_t log_level;      /* 0 off, 1 warnings and the first long compile, 2 cache and compiles, 3 candidates,
                               4 sources and logs, 5 launches */
    int32_t num_threads;    /* threads of the host target, 0 = one per core */
} loom_options;
#define LOOM_OPTIONS_INIT {sizeof(loom_options), NULL, NULL, LOOM_LOG_FROM_ENVIRONMENT, 0}

/* options may be NULL. *context receives an object to be freed by loom_context_destroy. Neither a GPU nor NVRTC
 * is needed; plans that need them say so. */
LOOM_API loom_status loom_context_create(const loom_options *options, loom_context **context, loom_error *error);
LOOM_API void loom_context_destroy(loom_context *context); /* NULL is a no-op */

/* Adds the kernels of a pack, which `attnloom pack` makes on a machine without a GPU. Plans that are created later take what
 * they need of it and compile only the rest, or nothing with LOOM_NO_COMPILE; packs are asked in the order in which they were
 * added, before the cache. What counts is the schedule: a hint with which the generator chooses another than for the manifest's
 * entry is another kernel. A GPU takes code for its own arch and, where packs have all of a plan's kernels for it, for an older
 * one of the same major: sm_86 takes sm_80. Then the schedule is that for the older arch, and where one of the kernels needs more
 * shared memory than the device has (163 KiB a block on sm_80, 99 on sm_86 and sm_89) none is taken: ask for each arch whose GPUs
 * shall be sure to find theirs. Code for sm_90a runs on 9.0 alone, and systems on a chip (sm_87) share nothing with other GPUs.
 *
 * `bytes` NULL (num_bytes 0): the file `name`, which is read whole. Else the pack in memory, as `attnloom pack --embed` puts it
 * into a program; it is not copied and must stay until the context is destroyed. `name` then only names it in messages.
 *
 * It is taken whole or not at all. IO: the file cannot be read. INVALID with field "pack": it is no pack, it is damaged, or its
 * kernels are of another generator than this library's. UNSUPPORTED with field "pack": its format is of another version, or the
 * driver is too old for its kernels. The text names the pack and what is wrong.
 *
 * A library built with ATTNLOOM_RUNTIME_ONLY has no generator and no compilers: packs are all it knows, plans for what they lack
 * answer NOT_FOUND, those of LOOM_DEVICE_HOST COMPILE whatever the problem, and a problem or schedule is found by its text in the
 * manifest or by the text that the generator gives it. */
LOOM_API loom_status loom_context_add_pack(loom_context *context, const char *name, const void *bytes, size_t num_bytes,
                                           loom_error *error);

/* Writes the canonical form of a problem text: named forms expanded, constants folded, words in fixed order, so
 * that equal problems print equally. Writes at most capacity bytes with the final 0; *needed (may be NULL) receives
 * the full size with the final 0. INVALID when the text has errors or capacity is too small. */
LOOM_API loom_status loom_problem_canonical(loom_context *context, const char *problem, char *text, size_t capacity,
                                            size_t *needed, loom_error *error);

/* -- Wisdom ------------------------------------------------------------------------------------------------ */

/* Wisdom is what was measured: the best schedule of each pass of a problem, for a device and a class of shapes. It is text, one
 * line an entry; texts are merged by writing one behind the other, and of two entries for the same the faster one stays. A
 * context knows that of the file wisdom1.txt in its cache folder, to which `attnloom tune` and plans with LOOM_MEASURE write, and
 * what is imported. Plans use an entry whose shape is near their hint, of this library's generator; one of another is only tried
 * first when a problem is measured. Beside these the library ships entries for some GPUs, which are never exported: plans use
 * them, of whatever generator, where none that was measured here is as near. docs/design.md section 11 has the fields and the classes. */

/* Adds the lines of a text to what the context knows, not to the file. *num_taken (may be NULL) receives how many were good.
 * INVALID with field "wisdom" when others were not: the text has the number of each such line, the field and what is wrong with
 * its value; the good lines are taken all the same. */
LOOM_API loom_status loom_wisdom_import(loom_context *context, const char *text, int32_t *num_taken, loom_error *error);

/* Writes all that the context knows, sorted, as loom_problem_canonical writes its text. */
LOOM_API loom_status loom_wisdom_export(loom_context *context, char *text, size_t capacity, size_t *needed,
                                        loom_error *error);

/* -- Plans --------------------------------------------------------------------------------------------------*/

#define LOOM_DEVICE_HOST (-1) /* the CPU */
#define LOOM_DEVICE_NONE (-2) /* compile for `arch` only: such a plan can be looked at but not launched */

typedef enum loom_rigor {
    LOOM_ESTIMATE = 0,   /* schedule from wisdom near the hint, else from the model; no timing. With LOOM_NO_COMPILE the
                            model's alone, which are the kernels that packs have */
    LOOM_MEASURE = 1,    /* schedule from wisdom for the hint's own class of shapes; where there is none candidates are timed
                            on the device, on tensors made for it, and the best becomes wisdom. Takes up to measure_seconds
                            for each pass, and what was begun is ended; where not one could be timed, as LOOM_ESTIMATE. The
                            thread must not be capturing a stream; others may begin to meanwhile */
    LOOM_WISDOM_ONLY = 2 /* schedule from wisdom near the hint, else NOT_FOUND */
} loom_rigor;

/* Flags of a plan. */
enum {
    LOOM_NO_COMPILE = 1u, /* answer NOT_FOUND instead of compiling: problem, schedule and arch of what neither packs nor
                             the cache have, and the line of a manifest that has it built */
    LOOM_ASYNC = 2u,      /* compile and load on a thread of the plan: see loom_plan_wait */
    LOOM_STAND_IN = 4u    /* with LOOM_ASYNC: launches work at once, see loom_plan_upgrade */
};

/* Run-time numbers. In a plan's hint 0 means unknown. */
typedef struct loom_shape {
    int64_t batch, heads_q, heads_kv, seq_q, seq_k;
} loom_shape;

typedef struct loom_plan_desc {
    size_t size;
    const char *problem;           /* problem text */
    const char *target;            /* "host", "mma", "hopper", or NULL: the best one for the device */
    const char *arch;              /* with LOOM_DEVICE_NONE: "sm_75" ... ; else NULL, as the device has its own */
    const char *schedule;          /* forward schedule text, NULL: the generator's choice */
    const char *schedule_backward; /* the same for backward */
    int32_t device;                /* CUDA device ordinal, LOOM_DEVICE_HOST or LOOM_DEVICE_NONE */
    int32_t rigor;                 /* a loom_rigor */
    uint32_t flags;                /* LOOM_NO_COMPILE, LOOM_ASYNC, LOOM_STAND_IN */
    int32_t alignment;             /* promise: every pointer and every stride in bytes is a multiple of this; 0: none.
                                      16 spares the kernels for unaligned tensors */
    loom_shape hint;               /* typical shape, helps the choice; any shape still launches */
    double measure_seconds;        /* with LOOM_MEASURE: most time for a pass that has no wisdom, 0: 10 */
} loom_plan_desc;
#define LOOM_PLAN_DESC_INIT {sizeof(loom_plan_desc), NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0, {0, 0, 0, 0, 0}, 0.0}

/* Slow path: generates, compiles or loads from packs or the cache; may take seconds. *plan is to be freed by
 * loom_plan_destroy. Uses the device's primary CUDA context and leaves the caller's current context as it was. */
LOOM_API loom_status loom_plan_create(loom_context *context, const loom_plan_desc *desc, loom_plan **plan,
                                      loom_error *error);
/* NULL is a no-op; launches in flight must have ended. Waits for a compile that is not finished. */
LOOM_API void loom_plan_destroy(loom_plan *plan);

/* With LOOM_ASYNC loom_plan_create checks everything, answers what is wrong with problem, target, device and
 * schedules, and returns a plan whose texts, params and workspace can be asked for at once, while its kernels are
 * still compiled. Until then launches, loom_plan_kernel and loom_plan_certify answer NOT_FOUND with field "plan";
 * if the compile fails they answer its error.
 *
 * Waits until the kernels are there, at most timeout_seconds (0: only asks; INFINITY: without end). OK when they
 * are, at once for plans without LOOM_ASYNC; NOT_FOUND with field "plan" when the time is over; else the error of
 * the compile, each time it is asked. Any number of threads may wait. */
LOOM_API loom_status loom_plan_wait(loom_plan *plan, double timeout_seconds, loom_error *error);

/* With LOOM_ASYNC | LOOM_STAND_IN the plan can be launched as soon as loom_plan_create returns it. Until its own
 * kernels are compiled others serve that are there: those of any plan for the problem on this device, of whatever
 * schedule and target, whose kernels packs or the cache have all (also of a plan with `backward` or `deterministic`
 * where the problem lacks these words); else the default schedules of target mma, which loom_plan_create then
 * compiles, and waits for. Where packs or the cache have the plan's own kernels, and where these take no longer to
 * compile than a stand-in, loom_plan_create takes them at once, and there is nothing to upgrade.
 *
 * The plan's own kernels are taken when this is called and not before. It answers NOT_FOUND with field "plan" while
 * they are compiled (loom_plan_wait waits for them; its errors are answered too). Then it sees to their certificates:
 * where one is missing it runs them as `attnloom check` does, on memory, inputs and a stream of its own, for some
 * tenths of a second, compares the results with the float64 reference and stores the certificate as loom_plan_certify
 * does. INTERNAL with field "certificate" when results are wrong, DRIVER or MEMORY when that cannot be found out. On
 * every failure the stand-in goes on serving. OK when the plan's own kernels serve, now or already; at once for a plan
 * without a stand-in that is ready.
 *
 * May be called while other threads launch: a launch takes the one or the other, and what has begun, or was captured
 * into a graph, stays as it is. The results of both are within the error that `attnloom check` allows, their bits
 * differ. What loom_workspace_bytes, loom_prepared_bytes, loom_plan_text, loom_plan_kernel and loom_plan_certify say
 * and do is of what launches take now: after an upgrade ask for both sizes again, and prepare again what
 * loom_prepare made before. LOOM_TEXT_WHY says what stands in for what. A thread that captures a stream must not
 * call this; others may. */
LOOM_API loom_status loom_plan_upgrade(loom_plan *plan, loom_error *error);

/* Slot of a parameter of the problem by its name, -1 if it has none of that name. */
LOOM_API int32_t loom_plan_param(const loom_plan *plan, const char *name);

typedef enum loom_text {
    LOOM_TEXT_PROBLEM = 0,           /* canonical problem */
    LOOM_TEXT_TARGET = 1,            /* "mma" */
    LOOM_TEXT_ARCH = 2,              /* "sm_90", of the kernels; the CPU's triple on host */
    LOOM_TEXT_SCHEDULE = 3,          /* forward schedule */
    LOOM_TEXT_SCHEDULE_BACKWARD = 4, /* "" without backward */
    LOOM_TEXT_WHY = 5                /* candidates, the choice and the reasons */
} loom_text;

/* Text about a plan, owned by the plan. Never NULL. */
LOOM_API const char *loom_plan_text(const loom_plan *plan, loom_text which);

/* One compiled kernel of a plan. All pointers are owned by the plan. */
typedef struct loom_kernel {
    size_t size;
    const char *name;        /* "forward", "backward_dkv" ... */
    const char *variant;     /* "tma", "aligned", "any" */
    const char *symbol;      /* entry point in the binary */
    const char *source;      /* emitted text; "" of a kernel from a pack, which has none */
    const char *key;         /* what the cache entry is made from */
    const char *entry;       /* folder of the cache entry, "" when nothing is kept on disk */
    const char *compiler;    /* "nvrtc 13.0", "cc 12.2.0" */
    const char *certificate; /* "" when the kernel has none yet */
    const void *binary;
    size_t binary_bytes;
    int32_t cached;          /* 1: came from a pack or the cache */
    int32_t registers;       /* per thread, -1 on host */
    int32_t spill_bytes;     /* per thread, stored to local memory for want of registers, -1 on host */
    int32_t smem_bytes;      /* dynamic shared memory of a block; on host scratch of a thread */
    int32_t threads;         /* per block, 1 on host */
    double compile_seconds;  /* 0 when cached */
    const char *pack;        /* name of the pack it came from, "" when from none */
} loom_kernel;
#define LOOM_KERNEL_INIT \
    {sizeof(loom_kernel), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, 0.0, NULL}

LOOM_API int32_t loom_plan_num_kernels(const loom_plan *plan);
LOOM_API loom_status loom_plan_kernel(const loom_plan *plan, int32_t index, loom_kernel *kernel, loom_error *error);

/* Stores `text` (the outcome of a check against a reference) beside each kernel of the plan in the cache. */
LOOM_API loom_status loom_plan_certify(loom_plan *plan, const char *text, loom_error *error);

/* -- Launch ------------------------------------------------------------------------------------------------ */

/* A tensor [batch, seq, head, dim]; strides in elements in that order, 0 = broadcast where the tensor is only read.
 * stride[3] must be 1 (the head dim is contiguous) and is ignored for lse and dlse, which have no dim; the stride of
 * an axis of size 1 is ignored too. Strides may not be negative, the last element must lie within 2^62 bytes, and the
 * rows of a written tensor must lie apart: in the order of strides, each axis steps over all that those before span.
 */
typedef struct loom_tensor {
    void *data;
    int64_t stride[4];
} loom_tensor;

/* Strides of a dense [batch, seq, head, dim] tensor. */
static inline loom_tensor loom_dense(const void *data, int64_t seq, int64_t heads, int64_t dim) {
    loom_tensor t = {(void *)data, {seq * heads * dim, heads * dim, dim, 1}};
    return t;
}

/* Strides of a dense [batch, head, seq] tensor of log-sum-exp values. */
static inline loom_tensor loom_dense_lse(const void *data, int64_t heads, int64_t seq) {
    loom_tensor t = {(void *)data, {heads * seq, 1, seq, 1}};
    return t;
}

/* A parameter of the problem: an array (data, strides in elements, one per declared dimension, 0 = broadcast, not
 * negative) or a scalar. gradient is for problems with grad={...}. */
typedef struct loom_param {
    const void *data;
    double scalar;
    int64_t stride[4];
    void *gradient;
    int64_t gradient_stride[4];
} loom_param;

#define LOOM_DEFAULT_START INT64_MIN

/* Arguments of a launch. All device pointers (host pointers on host). What is not wanted is left NULL.
 * Forward reads q k v params, writes o and, where given, lse; o is always needed. Backward reads q k v o lse dout
 * params and, where given, dlse; it writes those of dq dk dv that are given.
 * Outputs are written completely and may not share an element with inputs or each other; k and v may alias. */
typedef struct loom_args {
    size_t size;
    loom_shape shape;
    float scale;              /* 2^-64 to 2^64; 0 means 1/sqrt(d) of q and k */
    int64_t q_start, k_start; /* LOOM_DEFAULT_START: seq_k - seq_q and 0 */
    loom_tensor q, k, v;
    loom_tensor o, lse;          /* lse: float; required by backward */
    loom_tensor dout, dlse;      /* dlse: float, the gradient of lse; NULL means zero */
    loom_tensor dq, dk, dv;
    const loom_param *params;    /* one per slot of the plan */
    int32_t num_params;
    void *workspace;             /* loom_workspace_bytes() of device memory, aligned to 256; any content */
    size_t workspace_bytes;
    void *prepared;              /* NULL, or loom_prepared_bytes() of device memory that loom_prepare has filled */
    size_t prepared_bytes;
} loom_args;
#define LOOM__TENSOR_INIT {NULL, {0, 0, 0, 0}}
#define LOOM_ARGS_INIT \
    {sizeof(loom_args), {0, 0, 0, 0, 0}, 0.0f, LOOM_DEFAULT_START, LOOM_DEFAULT_START, \
     LOOM__TENSOR_INIT, LOOM__TENSOR_INIT, LOOM__TENSOR_INIT, LOOM__TENSOR_INIT, LOOM__TENSOR_INIT, \
     LOOM__TENSOR_INIT, LOOM__TENSOR_INIT, LOOM__TENSOR_INIT, LOOM__TENSOR_INIT, LOOM__TENSOR_INIT, \
     NULL, 0, NULL, 0, NULL, 0}

typedef enum loom_pass { LOOM_FORWARD = 0, LOOM_BACKWARD = 1 } loom_pass;

/* Bytes of workspace a launch with args->shape needs; 0 is common. Only shape is read, and whether prepared is given,
 * which spares the workspace for the same. */
LOOM_API loom_status loom_workspace_bytes(const loom_plan *plan, loom_pass pass, const loom_args *args, size_t *bytes,
                                          loom_error *error);

/* Enqueue on a CUDA stream (a CUstream or cudaStream_t as void*, NULL = the legacy default stream); on host run to
 * completion. No lock, no allocation, no compile; may be captured into a CUDA graph. Workspace and tensors must stay
 * alive until the stream has passed the launch; two launches in flight need two workspaces.
 * INVALID: a null or misaligned tensor, a bad stride, heads_q not a multiple of heads_kv, too little workspace ...
 * UNSUPPORTED: a sequence over 2^30, another size over 2^31 - 1, more blocks than a grid holds. NOT_FOUND: still
 * compiling, see loom_plan_wait. DRIVER: the launch failed. */
LOOM_API loom_status loom_forward(const loom_plan *plan, const loom_args *args, void *stream, loom_error *error);
LOOM_API loom_status loom_backward(const loom_plan *plan, const loom_args *args, void *stream, loom_error *error);

/* What a launch makes of the mask before it reads a tensor, made once for many launches: which tiles are visited, and in
 * which order, for all kernels of the plan, forward and backward. It depends on shape, q_start, k_start and the params that
 * the mask reads, and holds for every launch that has the same: all layers of a model, and their backward. Optional: a
 * launch without it does the same in its workspace.
 *
 * Bytes that it takes for args->shape; 0, where the mask needs none of it: then there is nothing to prepare. A launch may need
 * some workspace all the same: ask loom_workspace_bytes with `prepared` set. */
LOOM_API loom_status loom_prepared_bytes(const loom_plan *plan, const loom_args *args, size_t *bytes, loom_error *error);

/* Enqueues it: fills args->prepared, of args->prepared_bytes, aligned to 256, any content. Tensors are not looked at, params are
 * checked as for a launch. As for launches: no lock, no allocation, no host round trip, may be captured into a CUDA graph. */
LOOM_API loom_status loom_prepare(const loom_plan *plan, const loom_args *args, void *stream, loom_error *error);

#ifdef __cplusplus
}
#endif

#endif
