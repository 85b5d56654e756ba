/* minilm: attention of a real language model on real text, every step shown: problem, schedule, compile,
 * cache, launch, and the error of every output. On the GPU if there is one, else on the CPU; scripts/demo.sh
 * runs it twice.
 *
 *     minilm [FOLDER]     q k v o doc .npy, default examples/data
 *
 * Beside the public header it uses the command line's own npy files, device memory and float64 reference.
 * Exits 1 on an error, or when an output is further from the float64 reference than twice plain attention
 * that is computed in the same data type. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "attnloom.h"
#include "common.h"
#include "memory.h"
#include "npy.h"
#include "reference.h"

static const char PROBLEM[] = "bf16 d=32 mask={document(doc)} params={doc: i32[seq_k]} backward";

enum { NUM_TIMED = 20, DIM = 32 };

/* The first six are dense [batch, seq, head, dim] in bf16; LSE is float [batch, head, seq]. */
typedef enum tensor { Q, K, V, DOUT, O, DQ, DK, DV, LSE, NUM_TENSORS } tensor;
static const char *const NAMES[] = {"Q", "K", "V", "dO", "O", "dQ", "dK", "dV", "LSE"};

typedef struct demo {
    const char *folder;
    int64_t seq, heads;
    size_t num_items; /* of each tensor but LSE */
    void *host[NUM_TENSORS];
    void *doc;     /* i32[seq] */
    void *model_o; /* float: the model's own attention */
    loom_context *context;
    loom_plan *plan;
    double plan_seconds;
    int32_t device;
    loom__device_memory *memory;
} demo;

static loom_status fail(loom_error *error, loom_status status, const char *field, const char *text) {
    error->status = status;
    snprintf(error->field, sizeof error->field, "%s", field);
    snprintf(error->text, sizeof error->text, "%s", text);
    return status;
}

/* -- Input ---------------------------------------------------------------------------------------------- */

static loom_status read_array(demo *d, const char *name, loom__storage storage, void **data,
                              loom_error *error) {
    char path[4096];
    loom__npy file = {0};
    snprintf(path, sizeof path, "%s/%s.npy", d->folder, name);
    LOOM_TRY(NULL, loom__npy_read(path, &file, error));
    const int is_tensor = strcmp(name, "doc") != 0;
    if (is_tensor && !d->seq && file.num_dims == 4) d->seq = file.dims[1], d->heads = file.dims[2];
    const int64_t expected = is_tensor ? d->seq * d->heads * DIM : d->seq;
    loom_status status =
        file.num_items == expected && expected > 0
            ? loom__npy_convert(path, &file, storage, data, error)
            : fail(error, LOOM_INVALID, name, "the file does not have the shape of the first one");
    loom__npy_free(&file);
    return status;
}

static loom_status read_inputs(demo *d, loom_error *error) {
    LOOM_TRY(NULL, read_array(d, "q", LOOM__BF16, &d->host[Q], error));
    LOOM_TRY(NULL, read_array(d, "k", LOOM__BF16, &d->host[K], error));
    LOOM_TRY(NULL, read_array(d, "v", LOOM__BF16, &d->host[V], error));
    LOOM_TRY(NULL, read_array(d, "o", LOOM__F32, &d->model_o, error));
    LOOM_TRY(NULL, read_array(d, "doc", LOOM__I32, &d->doc, error));
    d->num_items = (size_t)(d->seq * d->heads * DIM);
    for (tensor t = DOUT; t < NUM_TENSORS; t++) {
        d->host[t] = calloc(d->num_items, sizeof(float));
        if (!d->host[t]) return fail(error, LOOM_MEMORY, NAMES[t], "no memory for the tensor");
    }
    uint32_t seed = 1;
    for (size_t i = 0; i < d->num_items; i++) {
        seed = seed * 1664525u + 1013904223u;
        loom__element_set(d->host[DOUT], LOOM__BF16, (int64_t)i, (float)(seed >> 8) / 8388608.0f - 1.0f);
    }
    printf("%-10s one layer of all-MiniLM-L6-v2 on real text, from %s\n", "input", d->folder);
    printf("%-10s %d documents packed into %lld tokens, %lld heads of %d; dO is random\n\n", "",
           (int)((int32_t *)d->doc)[d->seq - 1] + 1, (long long)d->seq, (long long)d->heads, DIM);
    return LOOM_OK;
}

/* -- Plan
 * ---------------------------------------------------------------------------------------------------- */

static size_t tensor_bytes(const demo *d, tensor t) {
    return t == LSE ? (size_t)(d->seq * d->heads) * sizeof(float) : d->num_items * sizeof(uint16_t);
}

static loom_shape shape_of(const demo *d) {
    return (loom_shape){
        .batch = 1, .heads_q = d->heads, .heads_kv = d->heads, .seq_q = d->seq, .seq_k = d->seq};
}

static double now(void) {
    struct timespec time;
    timespec_get(&time, TIME_UTC);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Plan for the first GPU; where that cannot be, for the CPU. */
static loom_status make_plan(demo *d, loom_error *error) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = PROBLEM;
    desc.hint = shape_of(d);
    desc.alignment = 16;
    desc.device = d->device = 0;
    double start = now();
    loom_status status = loom_plan_create(d->context, &desc, &d->plan, error);
    if (status == LOOM_DRIVER || status == LOOM_COMPILE || status == LOOM_UNSUPPORTED) {
        printf("%-10s not used: %s\n", "gpu", error->text);
        desc.device = d->device = LOOM_DEVICE_HOST;
        start = now();
        status = loom_plan_create(d->context, &desc, &d->plan, error);
    }
    d->plan_seconds = now() - start;
    return status;
}

/* The plan's reasons, without what was printed already and without the candidates that were not chosen. */
static void print_why(const char *why) {
    const char *label = "why";
    int num_others = 0;
    for (const char *end; (end = strchr(why, '\n')); why = end + 1) {
        const char *mark = strstr(why, "<- ");
        if (*why == ' ' && !(mark && mark < end)) num_others++;
        if (*why != ' ' && strncmp(why, "walk", 4) != 0) continue;
        if (*why == ' ' && !(mark && mark < end)) continue;
        printf("%-10s ", label);
        for (why += strspn(why, " "); why < end; why++)
            if (*why != ' ' || why[1] != ' ') putchar(*why);
        putchar('\n');
        label = "";
    }
    printf("%-10s %d other candidates, listed by `attnloom why`\n", "", num_others);
}

/* With `with_sources` also the file of each kernel in the cache. */
static loom_status print_kernels(const loom_plan *plan, const char *label, int with_sources,
                                 loom_error *error) {
    for (int32_t i = 0; i < loom_plan_num_kernels(plan); i++) {
        loom_kernel kernel = LOOM_KERNEL_INIT;
        LOOM_TRY(NULL, loom_plan_kernel(plan, i, &kernel, error));
        printf("%-10s %-16s %s: ", label, kernel.name, kernel.compiler);
        if (kernel.cached)
            printf("cache hit");
        else
            printf("%.2f s", kernel.compile_seconds);
        printf(", %zu bytes", kernel.binary_bytes);
        if (kernel.registers >= 0)
            printf(", %d registers, %d spill bytes", (int)kernel.registers, (int)kernel.spill_bytes);
        printf("\n");
        label = "";
        if (!with_sources) continue;
        if (*kernel.entry)
            printf("%-10s %s/kernel.%s\n", "", kernel.entry, kernel.registers >= 0 ? "cu" : "c");
        else
            printf("%-10s not kept on disk\n", "");
    }
    return LOOM_OK;
}

static loom_status print_plan(const demo *d, loom_error *error) {
    printf("%-10s %s\n", "problem", loom_plan_text(d->plan, LOOM_TEXT_PROBLEM));
    printf("%-10s %s on %s\n", "target", loom_plan_text(d->plan, LOOM_TEXT_TARGET),
           loom_plan_text(d->plan, LOOM_TEXT_ARCH));
    printf("%-10s forward   %s\n", "schedule", loom_plan_text(d->plan, LOOM_TEXT_SCHEDULE));
    printf("%-10s backward  %s\n", "", loom_plan_text(d->plan, LOOM_TEXT_SCHEDULE_BACKWARD));
    print_why(loom_plan_text(d->plan, LOOM_TEXT_WHY));
    LOOM_TRY(NULL, print_kernels(d->plan, "kernels", 1, error));
    printf("%-10s in %.3f s\n\n", "ready", d->plan_seconds);
    return LOOM_OK;
}

/* -- Launch
 * -------------------------------------------------------------------------------------------------- */

static void bind(const demo *d, void *const data[NUM_TENSORS], const loom_param *params, loom_args *args) {
    loom_tensor *const tensors[] = {&args->q, &args->k,  &args->v,  &args->dout,
                                    &args->o, &args->dq, &args->dk, &args->dv};
    for (tensor t = Q; t < LSE; t++) *tensors[t] = loom_dense(data[t], d->seq, d->heads, DIM);
    args->lse = loom_dense_lse(data[LSE], d->heads, d->seq);
    args->shape = shape_of(d);
    args->params = params;
    args->num_params = 1;
}

static loom_status run_pass(demo *d, loom_pass pass, loom_args *args, loom_error *error) {
    loom_status (*launch)(const loom_plan *, const loom_args *, void *, loom_error *) =
        pass == LOOM_FORWARD ? loom_forward : loom_backward;
    double ms = 0;
    LOOM_TRY(NULL, loom_workspace_bytes(d->plan, pass, args, &args->workspace_bytes, error));
    args->workspace = NULL;
    if (args->workspace_bytes)
        LOOM_TRY(NULL, loom__device_memory_alloc(d->memory, args->workspace_bytes, &args->workspace, error));
    LOOM_TRY(NULL, launch(d->plan, args, NULL, error));
    LOOM_TRY(NULL, loom__device_memory_sync(d->memory, error));
    LOOM_TRY(NULL, loom__device_memory_mark(d->memory, 0, error));
    for (int i = 0; i < NUM_TIMED; i++) LOOM_TRY(NULL, launch(d->plan, args, NULL, error));
    LOOM_TRY(NULL, loom__device_memory_mark(d->memory, 1, error));
    LOOM_TRY(NULL, loom__device_memory_sync(d->memory, error));
    LOOM_TRY(NULL, loom__device_memory_elapsed(d->memory, 0, 1, &ms, error));
    printf("%-10s %-9s %.3f ms, mean of %d; workspace %zu bytes\n", "launch",
           pass == LOOM_FORWARD ? "forward" : "backward", ms / NUM_TIMED, NUM_TIMED, args->workspace_bytes);
    return LOOM_OK;
}

static loom_status launch_all(demo *d, loom_error *error) {
    void *data[NUM_TENSORS], *doc;
    const size_t doc_bytes = (size_t)d->seq * sizeof(int32_t);
    loom_args args = LOOM_ARGS_INIT;
    LOOM_TRY(NULL, loom__device_memory_open(d->context, d->device, &d->memory, error));
    for (tensor t = Q; t < NUM_TENSORS; t++) {
        LOOM_TRY(NULL, loom__device_memory_alloc(d->memory, tensor_bytes(d, t), &data[t], error));
        if (t <= DOUT)
            LOOM_TRY(NULL,
                     loom__device_memory_upload(d->memory, data[t], d->host[t], tensor_bytes(d, t), error));
    }
    LOOM_TRY(NULL, loom__device_memory_alloc(d->memory, doc_bytes, &doc, error));
    LOOM_TRY(NULL, loom__device_memory_upload(d->memory, doc, d->doc, doc_bytes, error));
    const loom_param param = {.data = doc, .stride = {1}};
    bind(d, data, &param, &args);
    LOOM_TRY(NULL, run_pass(d, LOOM_FORWARD, &args, error));
    LOOM_TRY(NULL, run_pass(d, LOOM_BACKWARD, &args, error));
    for (tensor t = O; t < NUM_TENSORS; t++)
        LOOM_TRY(NULL,
                 loom__device_memory_download(d->memory, d->host[t], data[t], tensor_bytes(d, t), error));
    printf("\n");
    return LOOM_OK;
}

/* -- Errors
 * -------------------------------------------------------------------------------------------------- */

/* Value i of an output: `from_reference` is NULL for what the kernels gave. */
static double value_at(const demo *d, tensor t, const double *from_reference, size_t i) {
    if (from_reference) return from_reference[i];
    return loom__element_get(d->host[t], t == LSE ? LOOM__F32 : LOOM__BF16, (int64_t)i);
}

/* Prints one row and returns whether the kernel's error is within twice that of plain attention. LSE, whose
 * size says nothing, by its largest error, all others by the norm of the error over the norm of the truth. */
static int print_error(const demo *d, const char *label, tensor t, const double *plain, const double *truth) {
    const size_t num = t == LSE ? (size_t)(d->seq * d->heads) : d->num_items;
    double error[2] = {0, 0}, norm = 0;
    for (int which = 0; which < 2; which++) {
        norm = 0;
        for (size_t i = 0; i < num; i++) {
            const double value = truth ? truth[i] : (double)((float *)d->model_o)[i];
            const double off = fabs(value_at(d, t, which ? plain : NULL, i) - value);
            norm += value * value;
            if (t != LSE)
                error[which] += off * off;
            else if (!(off <= error[which]))
                error[which] = off; /* keeps a NaN */
        }
        if (t != LSE) error[which] = sqrt(error[which] / norm);
    }
    const double float_noise = 1e-5; /* of LSE: a few units in the last place of a float near 10 */
    const int is_right = error[0] <= 2 * error[1] + (t == LSE ? float_noise : 0);
    printf("%-10s %-4s %-22s %9.2e  %9.2e  %s\n", label, NAMES[t],
           t == LSE ? "largest difference" : "relative L2", error[0], error[1], is_right ? "right" : "WRONG");
    return is_right;
}

static loom_status compare(const demo *d, int *is_right, loom_error *error) {
    loom__reference *facts = NULL;
    loom__reference_result truth = {0}, plain = {0};
    loom_args args = LOOM_ARGS_INIT;
    const loom_param param = {.data = d->doc, .stride = {1}};
    bind(d, d->host, &param, &args);
    loom_status status = loom__reference_create(loom_plan_text(d->plan, LOOM_TEXT_PROBLEM), &facts, error);
    if (!status) status = loom__reference_run(facts, &args, true, LOOM__FLOAT64, 0, &truth, error);
    if (!status) status = loom__reference_run(facts, &args, true, LOOM__SAME_DTYPE, 0, &plain, error);
    if (!status) {
        printf("%-10s allowed: twice the error of plain attention in bf16\n", "error");
        printf("%-10s against float64              Attnloom  plain bf16\n", "");
        *is_right = print_error(d, "", O, plain.o, truth.o);
        *is_right &= print_error(d, "", LSE, plain.lse, truth.lse);
        *is_right &= print_error(d, "", DQ, plain.dq, truth.dq);
        *is_right &= print_error(d, "", DK, plain.dk, truth.dk);
        *is_right &= print_error(d, "", DV, plain.dv, truth.dv);
        printf("%-10s against the model's own attention (float32)\n", "");
        *is_right &= print_error(d, "", O, plain.o, NULL);
        printf("\n");
    }
    loom__reference_result_free(&truth);
    loom__reference_result_free(&plain);
    loom__reference_destroy(facts);
    return status;
}

/* -- Other GPUs
 * ---------------------------------------------------------------------------------------------- */

/* The same problem for architectures that need not be here. Without NVRTC that is said, and is no failure. */
static loom_status compile_elsewhere(const demo *d, loom_error *error) {
    static const char *const ARCHS[] = {"sm_80", "sm_90"};
    for (size_t i = 0; i < sizeof ARCHS / sizeof *ARCHS; i++) {
        loom_plan *plan = NULL;
        loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
        desc.problem = PROBLEM;
        desc.device = LOOM_DEVICE_NONE;
        desc.arch = ARCHS[i];
        desc.alignment = 16;
        const loom_status status = loom_plan_create(d->context, &desc, &plan, error);
        if (status == LOOM_COMPILE && !strncmp(error->field, "nvrtc", 5)) {
            printf("%-10s not compiled: %s\n", "cubins", error->text);
            return LOOM_OK;
        }
        if (status) return status;
        if (!i) printf("%-10s the same problem for other GPUs, which need not be here\n", "cubins");
        const loom_status printed = print_kernels(plan, ARCHS[i], 0, error);
        loom_plan_destroy(plan);
        if (printed) return printed;
    }
    return LOOM_OK;
}

/* -- All of it
 * ----------------------------------------------------------------------------------------------- */

static loom_status show(demo *d, int *is_right, loom_error *error) {
    LOOM_TRY(NULL, read_inputs(d, error));
    LOOM_TRY(NULL, loom_context_create(NULL, &d->context, error));
    LOOM_TRY(NULL, make_plan(d, error));
    LOOM_TRY(NULL, print_plan(d, error));
    LOOM_TRY(NULL, launch_all(d, error));
    LOOM_TRY(NULL, compare(d, is_right, error));
    return compile_elsewhere(d, error);
}

int main(int argc, char **argv) {
    demo d = {.folder = argc > 1 ? argv[1] : "examples/data"};
    loom_error error = LOOM_ERROR_INIT;
    int is_right = 0;
    const loom_status status = show(&d, &is_right, &error);
    if (status) fprintf(stderr, "minilm: %s: %s: %s\n", loom_status_name(status), error.field, error.text);
    loom__device_memory_close(d.memory);
    loom_plan_destroy(d.plan);
    loom_context_destroy(d.context);
    for (tensor t = Q; t < NUM_TENSORS; t++) free(d.host[t]);
    free(d.doc);
    free(d.model_o);
    return status || !is_right ? 1 : 0;
}
