/* run.c - `attnloom run`: .npy files in, attention, .npy files out.
 * Everything about a tensor is one row of TENSORS; a wrong file is refused by its option's name, the value
 * and the rule. */
#include <stdio.h>
#include <stdlib.h>

#include "cli.h"
#include "memory.h"
#include "problem.h"

/* -- Command line --------------------------------------------------------------------------------------- */

typedef struct values {
    loom__cli_common common;
    const char *q, *k, *v, *dout, *dlse;
    const char *o, *lse, *dq, *dk, *dv;
    loom__cli_texts params;
    double scale;
} values;

#define FILE_ROW(name, text)                                                                                 \
    { "--" #name, "FILE", LOOM__CLI_TEXT, offsetof(values, name), text }

static const loom__cli_option OPTIONS[] = {
    FILE_ROW(q, "in: [batch, seq_q, heads_q, d]"),
    FILE_ROW(k, "in: [batch, seq_k, heads_kv, d]"),
    FILE_ROW(v, "in: [batch, seq_k, heads_kv, d_v]"),
    FILE_ROW(o, "out: [batch, seq_q, heads_q, d_v]"),
    FILE_ROW(lse, "out: [batch, heads_q, seq_q], natural logarithm"),
    FILE_ROW(dout, "in: gradient of o; with it the backward runs"),
    FILE_ROW(dlse, "in: gradient of lse (default 0)"),
    FILE_ROW(dq, "out: gradient of q"),
    FILE_ROW(dk, "out: gradient of k"),
    FILE_ROW(dv, "out: gradient of v"),
    {"--param", "NAME=FILE|NUMBER", LOOM__CLI_TEXTS, offsetof(values, params),
     "a parameter of the problem: an .npy file for an array, a number for a scalar; may be repeated"},
    {"--scale", "X", LOOM__CLI_REAL, offsetof(values, scale), "multiplies Q K^T (default 1/sqrt(d))"},
    LOOM__CLI_ROW_TARGET,
    LOOM__CLI_ROW_DEVICE,
    LOOM__CLI_ROW_SCHEDULE,
};

static const loom__cli_command COMMAND = {
    .name = "run",
    .operands = "PROBLEM",
    .min_operands = 1,
    .max_operands = 1,
    .text = "Computes attention of tensors in .npy files (little endian, C order, f2 f4 or f8) and writes "
            "the results as f4. Files are converted to the problem's data type, which is said on stderr. "
            "Batch, heads and lengths are taken from the files. The compiled kernel is kept, so a second "
            "run starts at once.",
    .examples =
        "  attnloom run \"fp32 d=64 causal\" --q q.npy --k k.npy --v v.npy --o o.npy --lse lse.npy\n"
        "  attnloom run \"bf16 d=128 causal backward\" --q q.npy --k k.npy --v v.npy --dout dout.npy \\\n"
        "      --dq dq.npy --dk dk.npy --dv dv.npy\n"
        "  attnloom run \"fp32 d=64 mask={doc[q] == doc[k]} params={doc: i32[seq_k]}\" \\\n"
        "      --q q.npy --k k.npy --v v.npy --param doc=doc.npy --o o.npy\n",
    .options = OPTIONS,
    .num_options = sizeof OPTIONS / sizeof OPTIONS[0],
};

/* -- Tensors -------------------------------------------------------------------------------------------- */

/* Sizes a dimension can have; BATCH to SEQ_K are found in q and k, and must hold in the rest. */
typedef enum dim { BATCH, HEADS_Q, HEADS_KV, SEQ_Q, SEQ_K, DIM, DIM_V, NUM_SIZES, NO_DIM = NUM_SIZES } dim;
static const char *const SIZE_NAMES[] = {"batch", "heads_q", "heads_kv", "seq_q", "seq_k", "d", "d_v"};

typedef enum tensor_name {
    Q,
    K,
    V,
    DOUT,
    DLSE,
    NUM_INPUTS,
    O = NUM_INPUTS,
    LSE,
    DQ,
    DK,
    DV,
    NUM_TENSORS
} tensor_name;

static const struct {
    const char *name;
    dim dims[4]; /* NO_DIM ends a list of three: those are log-sum-exp values, f32 */
    size_t path;
    size_t argument;
} TENSORS[NUM_TENSORS] = {
    {"q", {BATCH, SEQ_Q, HEADS_Q, DIM}, offsetof(values, q), offsetof(loom_args, q)},
    {"k", {BATCH, SEQ_K, HEADS_KV, DIM}, offsetof(values, k), offsetof(loom_args, k)},
    {"v", {BATCH, SEQ_K, HEADS_KV, DIM_V}, offsetof(values, v), offsetof(loom_args, v)},
    {"dout", {BATCH, SEQ_Q, HEADS_Q, DIM_V}, offsetof(values, dout), offsetof(loom_args, dout)},
    {"dlse", {BATCH, HEADS_Q, SEQ_Q, NO_DIM}, offsetof(values, dlse), offsetof(loom_args, dlse)},
    {"o", {BATCH, SEQ_Q, HEADS_Q, DIM_V}, offsetof(values, o), offsetof(loom_args, o)},
    {"lse", {BATCH, HEADS_Q, SEQ_Q, NO_DIM}, offsetof(values, lse), offsetof(loom_args, lse)},
    {"dq", {BATCH, SEQ_Q, HEADS_Q, DIM}, offsetof(values, dq), offsetof(loom_args, dq)},
    {"dk", {BATCH, SEQ_K, HEADS_KV, DIM}, offsetof(values, dk), offsetof(loom_args, dk)},
    {"dv", {BATCH, SEQ_K, HEADS_KV, DIM_V}, offsetof(values, dv), offsetof(loom_args, dv)},
};

typedef struct run {
    values options;
    bool backward;
    int64_t sizes[NUM_SIZES];
    loom__reference *facts;
    loom__npy inputs[NUM_INPUTS];
    loom__cli_params params;
    loom_args args;
    loom__device_memory *memory;
} run;

static const char *path_of(const run *r, tensor_name t) {
    return *(const char *const *)((const char *)&r->options + TENSORS[t].path);
}

static int32_t num_dims(tensor_name t) { return TENSORS[t].dims[3] == NO_DIM ? 3 : 4; }

static loom__storage storage_of(const run *r, tensor_name t) {
    return num_dims(t) == 3 ? LOOM__F32 : r->facts->dtype;
}

/* -- Reading -------------------------------------------------------------------------------------------- */

static const char *storage_name(loom__storage storage) {
    return storage == LOOM__BF16 ? "bf16" : storage == LOOM__F16 ? "fp16" : "fp32";
}

/* Reads one tensor and compares its dimensions with the sizes known so far; unknown ones (-1) are taken from
 * it. */
static loom_status read_tensor(run *r, tensor_name t, loom_error *error) {
    const char *path = path_of(r, t);
    char field[48], wanted[128] = "";
    loom__npy *file = &r->inputs[t];
    LOOM_TRY(NULL, loom__npy_read(path, file, error));
    snprintf(field, sizeof field, "--%s", TENSORS[t].name);
    for (int32_t i = 0, at = 0; i < num_dims(t); i++)
        at += snprintf(wanted + at, sizeof wanted - (size_t)at, "%s%s", i ? ", " : "",
                       SIZE_NAMES[TENSORS[t].dims[i]]);
    if (file->num_dims != num_dims(t))
        return loom__fail(error, LOOM_INVALID, field, "%s has %d dimensions; wanted are %d: [%s]", path,
                          file->num_dims, num_dims(t), wanted);
    for (int32_t i = 0; i < num_dims(t); i++) {
        int64_t *size = &r->sizes[TENSORS[t].dims[i]];
        if (*size < 0) *size = file->dims[i];
        if (*size != file->dims[i])
            return loom__fail(
                error, LOOM_INVALID, field, "dimension %d of %s is %lld, but %s is %lld; wanted is [%s]", i,
                path, (long long)file->dims[i], SIZE_NAMES[TENSORS[t].dims[i]], (long long)*size, wanted);
    }
    if (file->type != LOOM__NPY_F2 && file->type != LOOM__NPY_F4 && file->type != LOOM__NPY_F8)
        return loom__fail(error, LOOM_INVALID, field, "%s holds %s; wanted is f2, f4 or f8", path,
                          loom__npy_type_name(file->type));
    return LOOM_OK;
}

static void say_conversion(const run *r, tensor_name t) {
    loom__npy_type type = r->inputs[t].type;
    loom__storage storage = storage_of(r, t);
    if (storage != LOOM__F32 || type != LOOM__NPY_F4)
        loom__cli_say("%s: converted from %s to %s", path_of(r, t), loom__npy_type_name(type),
                      storage_name(storage));
}

/* -- Launch --------------------------------------------------------------------------------------------- */

static int64_t num_items(const run *r, tensor_name t) {
    int64_t items = 1;
    for (int32_t i = 0; i < num_dims(t); i++) items *= r->sizes[TENSORS[t].dims[i]];
    return items;
}

/* Gives a tensor of the arguments its memory and dense strides. */
static void bind(run *r, tensor_name t, void *data) {
    loom_tensor *tensor = (loom_tensor *)((char *)&r->args + TENSORS[t].argument);
    const dim *dims = TENSORS[t].dims;
    if (num_dims(t) == 3)
        *tensor = loom_dense_lse(data, r->sizes[dims[1]], r->sizes[dims[2]]);
    else
        *tensor = loom_dense(data, r->sizes[dims[1]], r->sizes[dims[2]], r->sizes[dims[3]]);
}

static bool is_wanted(const run *r, tensor_name t) {
    return path_of(r, t) || (r->backward && (t == O || t == LSE)); // the backward reads o and lse
}

static loom_status launch(run *r, const loom_plan *plan, loom_pass pass, loom_error *error) {
    size_t bytes = 0;
    LOOM_TRY(NULL, loom_workspace_bytes(plan, pass, &r->args, &bytes, error));
    r->args.workspace = NULL;
    if (bytes) LOOM_TRY(NULL, loom__device_memory_alloc(r->memory, bytes, &r->args.workspace, error));
    r->args.workspace_bytes = bytes;
    return pass == LOOM_FORWARD ? loom_forward(plan, &r->args, NULL, error)
                                : loom_backward(plan, &r->args, NULL, error);
}

static loom_status compute(run *r, const loom_plan *plan, loom_error *error) {
    for (tensor_name t = Q; t < NUM_TENSORS; t++) {
        void *data = NULL;
        if (t < NUM_INPUTS) {
            if (!path_of(r, t)) continue;
            LOOM_TRY(NULL, loom__cli_upload_npy(r->memory, TENSORS[t].name, &r->inputs[t], storage_of(r, t),
                                                &data, error));
        } else {
            if (!is_wanted(r, t)) continue;
            size_t bytes = (size_t)num_items(r, t) * loom__storage_bytes(storage_of(r, t));
            LOOM_TRY(NULL, loom__device_memory_alloc(r->memory, bytes, &data, error));
        }
        bind(r, t, data);
    }
    LOOM_TRY(NULL, loom__cli_params_upload(&r->params, r->facts, r->memory, error));
    r->args.params = r->params.items;
    r->args.num_params = r->facts->num_params;
    LOOM_TRY(NULL, launch(r, plan, LOOM_FORWARD, error));
    if (r->backward) LOOM_TRY(NULL, launch(r, plan, LOOM_BACKWARD, error));
    return loom__device_memory_sync(r->memory, error);
}

static loom_status write_tensor(run *r, tensor_name t, loom_error *error) {
    loom__storage storage = storage_of(r, t);
    const loom_tensor *tensor = (const loom_tensor *)((const char *)&r->args + TENSORS[t].argument);
    loom__npy file = {.type = LOOM__NPY_F4, .num_dims = num_dims(t), .num_items = num_items(r, t)};
    size_t bytes = (size_t)file.num_items * loom__storage_bytes(storage);
    void *held = malloc(bytes + 1);
    float *floats = malloc((size_t)file.num_items * sizeof *floats + 1);
    loom_status status = LOOM_OK;
    if (!held || !floats) {
        status = loom__fail(error, LOOM_MEMORY, TENSORS[t].name, "no memory for %zu bytes", bytes);
        goto out;
    }
    status = loom__device_memory_download(r->memory, held, tensor->data, bytes, error);
    if (status) goto out;
    for (int64_t i = 0; i < file.num_items; i++) floats[i] = loom__element_get(held, storage, i);
    for (int32_t i = 0; i < file.num_dims; i++) file.dims[i] = r->sizes[TENSORS[t].dims[i]];
    file.num_bytes = (size_t)file.num_items * sizeof *floats;
    file.data = floats;
    status = loom__npy_write(path_of(r, t), &file, error);
    if (status) goto out;
    printf("%s %s f4 [", TENSORS[t].name, path_of(r, t));
    for (int32_t i = 0; i < file.num_dims; i++) printf("%s%lld", i ? ", " : "", (long long)file.dims[i]);
    printf("]\n");
out:
    free(held);
    free(floats);
    return status;
}

/* -- The command ---------------------------------------------------------------------------------------- */

static loom_status read_inputs(run *r, loom_error *error) {
    for (dim i = 0; i < NUM_SIZES; i++) r->sizes[i] = -1;
    r->sizes[DIM] = r->facts->d;
    r->sizes[DIM_V] = r->facts->dv;
    for (tensor_name t = Q; t < NUM_INPUTS; t++)
        if (path_of(r, t)) LOOM_TRY(NULL, read_tensor(r, t, error));
    r->args.shape = (loom_shape){.batch = r->sizes[BATCH],
                                 .heads_q = r->sizes[HEADS_Q],
                                 .heads_kv = r->sizes[HEADS_KV],
                                 .seq_q = r->sizes[SEQ_Q],
                                 .seq_k = r->sizes[SEQ_K]};
    LOOM_TRY(NULL, loom__cli_params_read(&r->params, r->facts, &r->args.shape, &r->options.params, error));
    for (tensor_name t = Q; t < NUM_INPUTS; t++)
        if (path_of(r, t)) say_conversion(r, t);
    return LOOM_OK;
}

static loom_status run_problem(run *r, loom_context *context, const char *problem, loom_error *error) {
    loom_plan_desc desc;
    loom_plan *plan = NULL;
    LOOM_TRY(NULL, loom__cli_problem_facts(context, problem, &r->facts, error));
    if (r->backward && !r->facts->backward)
        return loom__fail(error, LOOM_INVALID, "problem",
                          "gradients are asked for, but the problem lacks the word 'backward'");
    LOOM_TRY(NULL, read_inputs(r, error));
    loom__cli_plan_desc(&r->options.common, problem, &desc);
    desc.hint = r->args.shape;
    LOOM_TRY(context, loom__cli_plan_create(context, &desc, &plan, error));
    loom__cli_say("%s on %s, schedule %s", loom_plan_text(plan, LOOM_TEXT_TARGET),
                  loom_plan_text(plan, LOOM_TEXT_ARCH),
                  loom_plan_text(plan, r->backward ? LOOM_TEXT_SCHEDULE_BACKWARD : LOOM_TEXT_SCHEDULE));
    loom__cli_progress *progress = loom__cli_progress_start("running");
    loom_status status = loom__device_memory_open(context, desc.device, &r->memory, error);
    if (!status) status = compute(r, plan, error);
    loom__cli_progress_stop(progress);
    for (tensor_name t = O; t < NUM_TENSORS && !status; t++)
        if (path_of(r, t)) status = write_tensor(r, t, error);
    loom__device_memory_close(r->memory);
    loom_plan_destroy(plan);
    return status;
}

int loom__cli_run(int argc, char **argv) {
    run r = {.options = {.common = LOOM__CLI_COMMON_INIT}, .args = LOOM_ARGS_INIT};
    const char *problem = NULL;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, &r.options, &problem);
    if (exit_status >= 0) return exit_status;
    const values *given = &r.options;
    r.backward = given->dout || given->dlse || given->dq || given->dk || given->dv;
    r.args.scale = (float)given->scale;
    if (!given->q || !given->k || !given->v || (r.backward && !given->dout)) {
        loom__cli_say("run: needs --q, --k and --v, and for gradients --dout");
        return LOOM__CLI_USAGE;
    }
    if (!given->o && !given->lse && !given->dq && !given->dk && !given->dv) {
        loom__cli_say("run: nothing to write; give --o, --lse, --dq, --dk or --dv");
        return LOOM__CLI_USAGE;
    }
    loom_status status = loom_context_create(NULL, &context, &error);
    if (!status) status = run_problem(&r, context, problem, &error);
    for (int32_t i = 0; i < NUM_INPUTS; i++) loom__npy_free(&r.inputs[i]);
    loom__cli_params_free(&r.params);
    loom__reference_destroy(r.facts);
    loom_context_destroy(context);
    return status ? loom__cli_fail(&error) : LOOM__CLI_FINE;
}
