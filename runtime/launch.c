/* launch.c - the fast path: checks the arguments of a launch, packs them and launches.
 *
 * Called through attnloom.h by any number of threads on one plan. What serves for the plan is asked for once
 * a call. Takes no lock on a GPU (on host runs take turns), allocates nothing, reads no environment and no
 * text; only a failure formats one. INVALID names the argument, its value and the rule.
 */
#include <math.h>
#include <string.h>

#include "plan.h"

enum { AXIS_BATCH, AXIS_SEQ, AXIS_HEAD, AXIS_DIM };
enum { WORKSPACE_ALIGNMENT = 256 };
/* CUlaunchAttributeID: the kernel may begin before the one before it has ended. */
enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

/* Positions stay within 2^31: |start| + seq <= 2^31 - 1. */
static const int64_t MAX_SEQ = (int64_t)1 << 30, MAX_START = ((int64_t)1 << 30) - 1;
static const int64_t MAX_COUNT = INT32_MAX, MAX_BLOCKS = INT32_MAX;

/* Kernels add byte offsets to addresses in 64 bits. */
static const int64_t MAX_OFFSET_BYTES = (int64_t)1 << 62;

/* -- Tensors --------------------------------------------------------------------------------------------- */

typedef enum use { UNUSED, READ, READ_IF_GIVEN, WRITE, WRITE_IF_GIVEN } use;

static const struct {
    const char *name;
    size_t offset; /* in loom_args */
    bool per_key;  /* seq_k and heads_kv, else seq_q and heads_q */
    bool is_float; /* one float per row: lse, dlse */
    bool is_value; /* dv wide, else d */
    use uses[2];   /* by loom_pass */
} TENSORS[LOOM__NUM_TENSORS] = {
    {"q", offsetof(loom_args, q), false, false, false, {READ, READ}},
    {"k", offsetof(loom_args, k), true, false, false, {READ, READ}},
    {"v", offsetof(loom_args, v), true, false, true, {READ, READ}},
    {"o", offsetof(loom_args, o), false, false, true, {WRITE, READ}},
    {"lse", offsetof(loom_args, lse), false, true, false, {WRITE_IF_GIVEN, READ}},
    {"dout", offsetof(loom_args, dout), false, false, true, {UNUSED, READ}},
    {"dlse", offsetof(loom_args, dlse), false, true, false, {UNUSED, READ_IF_GIVEN}},
    {"dq", offsetof(loom_args, dq), false, false, false, {UNUSED, WRITE_IF_GIVEN}},
    {"dk", offsetof(loom_args, dk), true, false, false, {UNUSED, WRITE_IF_GIVEN}},
    {"dv", offsetof(loom_args, dv), true, false, true, {UNUSED, WRITE_IF_GIVEN}},
};

static const loom_tensor *tensor_of(const loom_args *args, int32_t index) {
    return (const loom_tensor *)((const char *)args + TENSORS[index].offset);
}

static bool is_written(int32_t index, loom_pass pass) { return TENSORS[index].uses[pass] >= WRITE; }

static bool is_used(const loom_args *args, int32_t index, loom_pass pass) {
    return TENSORS[index].uses[pass] != UNUSED && tensor_of(args, index)->data;
}

static bool is_empty(const loom_shape *shape, int32_t index) {
    int64_t heads = TENSORS[index].per_key ? shape->heads_kv : shape->heads_q;
    int64_t seq = TENSORS[index].per_key ? shape->seq_k : shape->seq_q;
    return shape->batch == 0 || heads == 0 || seq == 0;
}

/* -- Checks ---------------------------------------------------------------------------------------------- */

static loom_status check_size(const char *name, int64_t value, int64_t limit, loom_error *error) {
    if (value >= 0 && value <= limit) return LOOM_OK;
    if (value < 0) {
        return loom__fail(error, LOOM_INVALID, "args.shape", "shape.%s is %lld, it must be 0 to %lld", name,
                          (long long)value, (long long)limit);
    }
    return loom__fail(error, LOOM_UNSUPPORTED, "args.shape",
                      "shape.%s is %lld, this library takes at most %lld", name, (long long)value,
                      (long long)limit);
}

static loom_status check_shape(const loom_shape *shape, loom_error *error) {
    LOOM_TRY(NULL, check_size("batch", shape->batch, MAX_COUNT, error));
    LOOM_TRY(NULL, check_size("heads_q", shape->heads_q, MAX_COUNT, error));
    LOOM_TRY(NULL, check_size("heads_kv", shape->heads_kv, MAX_COUNT, error));
    LOOM_TRY(NULL, check_size("seq_q", shape->seq_q, MAX_SEQ, error));
    LOOM_TRY(NULL, check_size("seq_k", shape->seq_k, MAX_SEQ, error));
    if (shape->heads_kv ? shape->heads_q % shape->heads_kv != 0 : shape->heads_q != 0) {
        return loom__fail(error, LOOM_INVALID, "args.shape",
                          "shape.heads_q is %lld, it must be a multiple of shape.heads_kv, which is %lld",
                          (long long)shape->heads_q, (long long)shape->heads_kv);
    }
    return LOOM_OK;
}

/* A start and the last position of its sequence: what kernels compute from positions must not wrap. */
static loom_status check_start(const char *field, int64_t start, int64_t seq, loom_error *error) {
    if (start == LOOM_DEFAULT_START || (start >= -MAX_START && start <= MAX_START - seq + 1)) return LOOM_OK;
    return loom__fail(error, LOOM_INVALID, field,
                      "%s is %lld, for a sequence of %lld it must be -%lld to %lld, or LOOM_DEFAULT_START",
                      field + 5, (long long)start, (long long)seq, (long long)MAX_START,
                      (long long)(MAX_START - seq + 1));
}

static loom_status fail_tensor(int32_t index, const char *member, loom_error *error, const char *format,
                               long long value) {
    char field[48] = "args.";
    strcat(strcat(strcat(field, TENSORS[index].name), "."), member);
    return loom__fail(error, LOOM_INVALID, field, format, TENSORS[index].name, value);
}

/* Strides of the axes that count: none negative, the last element within reach, and where the tensor is
 * written no two rows of `inner` elements on one another. */
static loom_status check_strides(const int64_t *strides, const int64_t *extents, int64_t inner,
                                 int64_t element_bytes, int32_t index, bool written, loom_error *error) {
    static const char *const AXES[] = {"batch", "seq", "head"};
    char field[48] = "args.";
    int sorted[AXIS_DIM], count = 0;
    int64_t last = inner - 1; /* element, counted from the first */
    for (int axis = AXIS_BATCH; axis < AXIS_DIM; axis++) {
        int64_t reach;
        if (extents[axis] < 2) continue;
        const char *rule = "strides may not be negative";
        if (strides[axis] < 0) goto refuse;
        rule = "the last element would lie 2^62 bytes or more from the first";
        if (__builtin_mul_overflow(extents[axis] - 1, strides[axis], &reach) ||
            __builtin_add_overflow(last, reach, &last) || last >= MAX_OFFSET_BYTES / element_bytes)
            goto refuse;
        rule = "the tensor is written, its elements must lie apart";
        if (written && strides[axis] == 0) goto refuse;
        int at = count++;
        for (; at && strides[sorted[at - 1]] > strides[axis]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = axis;
        continue;
    refuse:
        return loom__fail(error, LOOM_INVALID, strcat(strcat(field, TENSORS[index].name), ".stride"),
                          "%s.stride[%d] is %lld with %lld along %s: %s", TENSORS[index].name, axis,
                          (long long)strides[axis], (long long)extents[axis], AXES[axis], rule);
    }
    int64_t span = inner;
    for (int i = 0; written && i < count; i++) {
        int axis = sorted[i];
        if (strides[axis] < span) {
            return loom__fail(
                error, LOOM_INVALID, strcat(strcat(field, TENSORS[index].name), ".stride"),
                "%s.stride[%d] is %lld, but the axes of smaller strides span %lld elements: the tensor "
                "is written, its elements must lie apart",
                TENSORS[index].name, axis, (long long)strides[axis], (long long)span);
        }
        span += (extents[axis] - 1) * strides[axis];
    }
    return LOOM_OK;
}

/* *bits collects the low bits of the address and of the strides in bytes that count. */
static loom_status check_tensor(const loom_plan *plan, const loom_args *args, loom_pass pass, int32_t index,
                                uint64_t *bits, loom_error *error) {
    const loom_tensor *tensor = tensor_of(args, index);
    use u = TENSORS[index].uses[pass];
    if (u == UNUSED || is_empty(&args->shape, index)) return LOOM_OK;
    if (!tensor->data) {
        if (u == READ_IF_GIVEN || u == WRITE_IF_GIVEN) return LOOM_OK;
        return fail_tensor(index, "data", error,
                           pass == LOOM_FORWARD ? "%s.data is NULL, forward needs it"
                                                : "%s.data is NULL, backward needs it",
                           0);
    }
    bool is_float = TENSORS[index].is_float;
    int64_t element_bytes = is_float ? (int64_t)sizeof(float) : plan->element_bytes;
    if ((uintptr_t)tensor->data % (uintptr_t)element_bytes) {
        return fail_tensor(index, "data", error,
                           element_bytes == 4
                               ? "%s.data is 0x%llx, it must be a multiple of 4 bytes, one element"
                               : "%s.data is 0x%llx, it must be a multiple of 2 bytes, one element",
                           (long long)(uintptr_t)tensor->data);
    }
    if (!is_float && tensor->stride[AXIS_DIM] != 1) {
        return fail_tensor(index, "stride", error,
                           "%s.stride[3] is %lld, it must be 1: the head dim must be contiguous",
                           (long long)tensor->stride[AXIS_DIM]);
    }
    int64_t extents[] = {args->shape.batch, TENSORS[index].per_key ? args->shape.seq_k : args->shape.seq_q,
                         TENSORS[index].per_key ? args->shape.heads_kv : args->shape.heads_q};
    int64_t inner = is_float ? 1 : TENSORS[index].is_value ? plan->dv : plan->d;
    LOOM_TRY(NULL, check_strides(tensor->stride, extents, inner, element_bytes, index,
                                 is_written(index, pass), error));
    if (is_float) return LOOM_OK;
    *bits |= (uint64_t)(uintptr_t)tensor->data;
    for (int axis = AXIS_BATCH; axis < AXIS_DIM; axis++) {
        if (extents[axis] > 1) *bits |= (uint64_t)tensor->stride[axis] * (uint64_t)element_bytes;
    }
    return LOOM_OK;
}

static loom_status check_aliases(const loom_args *args, loom_pass pass, loom_error *error) {
    for (int32_t i = 0; i < LOOM__NUM_TENSORS; i++) {
        if (!is_written(i, pass) || !is_used(args, i, pass) || is_empty(&args->shape, i)) continue;
        for (int32_t j = 0; j < LOOM__NUM_TENSORS; j++) {
            if (i == j || !is_used(args, j, pass) || is_empty(&args->shape, j)) continue;
            if (tensor_of(args, i)->data != tensor_of(args, j)->data) continue;
            char field[48] = "args.";
            return loom__fail(error, LOOM_INVALID, strcat(strcat(field, TENSORS[i].name), ".data"),
                              "%s.data is also %s.data: an output may not share memory with another tensor",
                              TENSORS[i].name, TENSORS[j].name);
        }
    }
    return LOOM_OK;
}

static int64_t extent_of(const loom__dim *dim, const int64_t *values) {
    if (dim->value < 0) return dim->constant;
    return (values[dim->value] + dim->divisor - 1) / dim->divisor;
}

static loom_status check_array(const loom_plan *plan, int32_t slot, const loom_param *param,
                               const int64_t *values, loom_error *error) {
    const loom__plan_param *facts = &plan->params[slot];
    bool empty = false;
    for (int32_t axis = 0; axis < facts->num_dims; axis++)
        empty |= extent_of(&facts->dims[axis], values) == 0;
    if (!param->data && !empty) {
        return loom__fail(error, LOOM_INVALID, "args.params",
                          "params[%d] (%s): data is NULL, but it is an array", slot, facts->name);
    }
    if ((uintptr_t)param->data % (uintptr_t)facts->element_bytes) {
        return loom__fail(error, LOOM_INVALID, "args.params",
                          "params[%d] (%s): data is 0x%llx, it must be a multiple of %d bytes, one element",
                          slot, facts->name, (unsigned long long)(uintptr_t)param->data,
                          facts->element_bytes);
    }
    int64_t last = 0;
    for (int32_t axis = 0; axis < facts->num_dims && !empty; axis++) {
        int64_t extent = extent_of(&facts->dims[axis], values), reach;
        if (extent < 2) continue;
        bool over = __builtin_mul_overflow(extent - 1, param->stride[axis], &reach) ||
                    __builtin_add_overflow(last, reach, &last) ||
                    last >= MAX_OFFSET_BYTES / facts->element_bytes;
        if (param->stride[axis] >= 0 && !over) continue;
        return loom__fail(
            error, LOOM_INVALID, "args.params", "params[%d] (%s): stride[%d] is %lld with %lld along it: %s",
            slot, facts->name, axis, (long long)param->stride[axis], (long long)extent,
            over && param->stride[axis] > 0 ? "the last element would lie 2^62 bytes or more from the first"
                                            : "strides may not be negative");
    }
    return LOOM_OK;
}

static loom_status pack_params(const loom_plan *plan, const loom_args *args, int64_t *values,
                               loom_error *error) {
    if (args->num_params != plan->num_params) {
        return loom__fail(error, LOOM_INVALID, "args.num_params", "num_params is %d, the problem has %d",
                          args->num_params, plan->num_params);
    }
    if (plan->num_params && !args->params) {
        return loom__fail(error, LOOM_INVALID, "args.params", "params is NULL, the problem has %d",
                          plan->num_params);
    }
    for (int32_t slot = 0; slot < plan->num_params; slot++) {
        const loom_param *param = &args->params[slot];
        const loom__plan_param *facts = &plan->params[slot];
        int64_t *out = &values[LOOM__VALUE_PARAMS + slot * LOOM__PARAM_VALUES];
        if (param->gradient) {
            return loom__fail(error, LOOM_INVALID, "args.params",
                              "params[%d] (%s): gradient is given, but the problem has no grad={%s}", slot,
                              facts->name, facts->name);
        }
        if (facts->scalar == LOOM__SCALAR_NONE) {
            LOOM_TRY(NULL, check_array(plan, slot, param, values, error));
            out[0] = (int64_t)(uintptr_t)param->data;
            memcpy(&out[2], param->stride, sizeof param->stride);
        } else if (facts->scalar == LOOM__SCALAR_F32) {
            float value = (float)param->scalar;
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            out[1] = bits;
        } else {
            double value = param->scalar;
            if (!(value >= INT32_MIN && value <= INT32_MAX) || value != floor(value)) {
                return loom__fail(error, LOOM_INVALID, "args.params",
                                  "params[%d] (%s): scalar is %g, it must be an integer of 32 bits", slot,
                                  facts->name, value);
            }
            out[1] = (int64_t)value;
        }
    }
    return LOOM_OK;
}

/* -- Workspace ------------------------------------------------------------------------------------------- */

/* Adds the regions of a pass that are prepared, or those that are not, to *bytes; offsets[i] is where region
 * i begins. */
static loom_status lay_out(const loom__plan_pass *pass, bool prepared, const int64_t *values,
                           uint64_t *offsets, uint64_t *bytes, loom_error *error) {
    for (int32_t i = 0; i < pass->num_regions; i++) {
        const loom__region *region = &pass->regions[i];
        uint64_t size = (uint64_t)region->bytes;
        bool over = false;
        if (region->prepared != prepared) continue;
        for (int32_t axis = 0; axis < region->num_dims; axis++)
            over |= __builtin_mul_overflow(size, (uint64_t)extent_of(&region->dims[axis], values), &size);
        over |= size > INT64_MAX - WORKSPACE_ALIGNMENT;
        size = (size + WORKSPACE_ALIGNMENT - 1) / WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT;
        offsets[i] = *bytes;
        over |= __builtin_add_overflow(*bytes, size, bytes);
        if (!over && *bytes <= SIZE_MAX / 2) continue;
        return loom__fail(
            error, LOOM_UNSUPPORTED, "args.shape",
            "the %s of batch %lld, heads_q %lld, seq_q %lld, seq_k %lld is larger than memory can be",
            prepared ? "prepared memory" : "workspace", (long long)values[LOOM__VALUE_BATCH],
            (long long)values[LOOM__VALUE_HEADS_Q], (long long)values[LOOM__VALUE_SEQ_Q],
            (long long)values[LOOM__VALUE_SEQ_K]);
    }
    return LOOM_OK;
}

/* Where regions lie: those that are prepared in the caller's memory for that, forward's first, or, where it
 * has none, in the workspace behind the others. */
typedef struct layout {
    uint64_t offsets[LOOM__MAX_REGIONS];
    uint64_t workspace_bytes,
        prepared_bytes; /* needed; prepared_bytes of both passes, 0 without that memory */
} layout;

static loom_status lay_out_pass(const loom_plan *plan, loom_pass pass, bool has_prepared,
                                const int64_t *values, layout *out, loom_error *error) {
    uint64_t of_other[LOOM__MAX_REGIONS];
    out->workspace_bytes = out->prepared_bytes = 0;
    LOOM_TRY(NULL, lay_out(&plan->passes[pass], false, values, out->offsets, &out->workspace_bytes, error));
    if (!has_prepared)
        return lay_out(&plan->passes[pass], true, values, out->offsets, &out->workspace_bytes, error);
    for (int32_t i = LOOM_FORWARD; i <= LOOM_BACKWARD; i++) {
        LOOM_TRY(NULL, lay_out(&plan->passes[i], true, values, i == (int32_t)pass ? out->offsets : of_other,
                               &out->prepared_bytes, error));
    }
    return LOOM_OK;
}

/* Memory that the caller gives: enough, and aligned. */
static loom_status check_memory(const char *name, const void *memory, size_t bytes, uint64_t needed,
                                loom_error *error) {
    char field[48] = "args.";
    strcat(field, name);
    if (!needed) return LOOM_OK;
    if (!memory) {
        return loom__fail(error, LOOM_INVALID, field,
                          "%s is NULL, this launch needs %llu bytes (loom_%s_bytes)", name,
                          (unsigned long long)needed, name);
    }
    if ((uintptr_t)memory % WORKSPACE_ALIGNMENT) {
        return loom__fail(error, LOOM_INVALID, field, "%s is %p, it must be a multiple of %d", name, memory,
                          WORKSPACE_ALIGNMENT);
    }
    if (bytes >= needed) return LOOM_OK;
    return loom__fail(error, LOOM_INVALID, strcat(field, "_bytes"),
                      "%s_bytes is %zu, this launch needs %llu (loom_%s_bytes)", name, bytes,
                      (unsigned long long)needed, name);
}

static loom_status check_call(const loom_plan *plan, loom_pass pass, const loom_args *args,
                              loom_error *error) {
    if (!plan) return loom__fail(error, LOOM_INVALID, "plan", "plan is NULL");
    if (!args) return loom__fail(error, LOOM_INVALID, "args", "args is NULL");
    LOOM_TRY(NULL, loom__check_size(args, args->size, sizeof *args, "args.size", error));
    if (pass != LOOM_FORWARD && pass != LOOM_BACKWARD) {
        return loom__fail(error, LOOM_INVALID, "pass", "pass is %d, it must be LOOM_FORWARD or LOOM_BACKWARD",
                          (int)pass);
    }
    if (pass == LOOM_BACKWARD && !plan->backward) {
        return loom__fail(error, LOOM_INVALID, "problem", "the plan's problem has no word `backward`: %s",
                          plan->texts[LOOM_TEXT_PROBLEM]);
    }
    return LOOM_OK;
}

static void pack_shape(const loom_shape *shape, int64_t *values) {
    values[LOOM__VALUE_ONE] = 1;
    values[LOOM__VALUE_BATCH] = shape->batch;
    values[LOOM__VALUE_HEADS_Q] = shape->heads_q;
    values[LOOM__VALUE_HEADS_KV] = shape->heads_kv;
    values[LOOM__VALUE_GROUP] = shape->heads_kv ? shape->heads_q / shape->heads_kv : 0;
    values[LOOM__VALUE_SEQ_Q] = shape->seq_q;
    values[LOOM__VALUE_SEQ_K] = shape->seq_k;
}

static loom_status bytes_of(const loom_plan *plan, loom_pass pass, const loom_args *args, bool has_prepared,
                            size_t *bytes, layout *out, loom_error *error) {
    int64_t values[LOOM__NUM_VALUES];
    LOOM_TRY(NULL, check_call(plan, pass, args, error));
    if (!bytes) return loom__fail(error, LOOM_INVALID, "bytes", "bytes is NULL");
    LOOM_TRY(NULL, check_shape(&args->shape, error));
    pack_shape(&args->shape, values);
    return lay_out_pass(plan, pass, has_prepared, values, out, error);
}

loom_status loom_workspace_bytes(const loom_plan *plan, loom_pass pass, const loom_args *args, size_t *bytes,
                                 loom_error *error) {
    layout l;
    LOOM_TRY(NULL, bytes_of(loom__plan_serving(plan), pass, args, args && args->prepared, bytes, &l, error));
    *bytes = (size_t)l.workspace_bytes;
    return LOOM_OK;
}

loom_status loom_prepared_bytes(const loom_plan *plan, const loom_args *args, size_t *bytes,
                                loom_error *error) {
    layout l;
    LOOM_TRY(NULL, bytes_of(loom__plan_serving(plan), LOOM_FORWARD, args, true, bytes, &l, error));
    *bytes = (size_t)l.prepared_bytes;
    return LOOM_OK;
}

/* -- Packing and launching ------------------------------------------------------------------------------- */

static void pack_positions(const loom_args *args, int64_t *values) {
    const loom_shape *shape = &args->shape;
    pack_shape(shape, values);
    values[LOOM__VALUE_Q_START] =
        args->q_start == LOOM_DEFAULT_START ? shape->seq_k - shape->seq_q : args->q_start;
    values[LOOM__VALUE_K_START] = args->k_start == LOOM_DEFAULT_START ? 0 : args->k_start;
}

static void pack_values(const loom_plan *plan, const loom_args *args, loom_pass pass, int64_t *values) {
    for (int32_t i = 0; i < LOOM__NUM_TENSORS; i++) {
        if (TENSORS[i].uses[pass] == UNUSED) continue;
        const loom_tensor *tensor = tensor_of(args, i);
        int64_t *out = &values[LOOM__VALUE_TENSORS + 4 * i];
        out[0] = (int64_t)(uintptr_t)tensor->data;
        memcpy(&out[1], tensor->stride, 3 * sizeof tensor->stride[0]);
    }
    pack_positions(args, values);
    float scale = args->scale != 0.0f ? args->scale : (float)(1.0 / sqrt((double)plan->d));
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    values[LOOM__VALUE_SCALE] = bits;
}

/* Maps of the variant that a launch takes. */
typedef struct launch_maps {
    _Alignas(LOOM__MAP_ALIGNMENT) unsigned char bytes[LOOM__MAX_MAPS][LOOM__MAP_BYTES];
} launch_maps;

static int encode_map(const loom_plan *plan, const loom_args *args, const loom__plan_map *map, void *out) {
    const loom_tensor *tensor = tensor_of(args, map->tensor);
    const loom_shape *shape = &args->shape;
    bool per_key = TENSORS[map->tensor].per_key;
    uint64_t element_bytes = (uint64_t)plan->element_bytes;
    if (!tensor->data || is_empty(shape, map->tensor)) {
        memset(out, 0, LOOM__MAP_BYTES); /* no kernel reads it */
        return 0;
    }
    loom__map_view view = {.data = tensor->data,
                           .is_bf16 = plan->is_bf16,
                           .extents = {(uint64_t)(TENSORS[map->tensor].is_value ? plan->dv : plan->d),
                                       (uint64_t)(per_key ? shape->seq_k : shape->seq_q),
                                       (uint64_t)(per_key ? shape->heads_kv : shape->heads_q),
                                       (uint64_t)shape->batch},
                           .strides = {(uint64_t)tensor->stride[AXIS_SEQ] * element_bytes,
                                       (uint64_t)tensor->stride[AXIS_HEAD] * element_bytes,
                                       (uint64_t)tensor->stride[AXIS_BATCH] * element_bytes},
                           .box_rows = map->box_rows,
                           .box_chunks = map->box_chunks};
    return loom__map_encode(plan->driver, &view, out);
}

/* Encodes the maps of a variant. False: the driver refuses that of the tensor *refused with *result. */
static bool encode_maps(const loom_plan *plan, const loom_args *args, const loom__plan_variant *variant,
                        launch_maps *maps, int32_t *refused, int *result) {
    for (int32_t i = 0; i < variant->num_maps; i++) {
        int failed = encode_map(plan, args, &variant->maps[i], maps->bytes[i]);
        if (!failed) continue;
        *refused = variant->maps[i].tensor;
        *result = failed;
        return false;
    }
    return true;
}

static void pack_args(const loom__plan_kernel *kernel, const int64_t *values, const launch_maps *maps,
                      unsigned char *out) {
    memset(out, 0, (size_t)kernel->args_bytes);
    for (int32_t i = 0; i < kernel->num_rows; i++) {
        const loom__arg_row *row = &kernel->rows[i];
        if (row->bytes == 8) {
            memcpy(out + row->offset, &values[row->value], 8);
        } else if (row->bytes == LOOM__MAP_BYTES) {
            memcpy(out + row->offset, maps->bytes[row->value], LOOM__MAP_BYTES);
        } else {
            uint32_t narrow = (uint32_t)values[row->value];
            memcpy(out + row->offset, &narrow, 4);
        }
    }
}

/* Blocks of a kernel, -1 when its tiles are more than a grid holds, and more than kernels count. */
static int64_t count_blocks(const loom_plan *plan, const loom__plan_kernel *kernel, const int64_t *values) {
    int64_t tiles = (values[kernel->grid_seq] + kernel->grid_rows - 1) / kernel->grid_rows, blocks;
    if (__builtin_mul_overflow(values[kernel->grid_batch], values[kernel->grid_heads], &blocks) ||
        __builtin_mul_overflow(blocks, tiles, &blocks) || blocks > MAX_BLOCKS)
        return -1;
    if (!kernel->grid_persistent || plan->host) return blocks;
    int64_t resident = (int64_t)kernel->grid_persistent * plan->device->num_sms;
    return blocks < resident ? blocks : resident;
}

/* Launches a kernel that may begin before the one before it has ended. */
static int launch_overlapping(const loom__driver_api *driver, const loom__plan_kernel *kernel,
                              unsigned blocks, void *stream, void **parameters) {
    const loom__launch_attribute overlap = {.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value.number = 1};
    const loom__launch_config config = {{blocks, 1, 1},
                                        {(unsigned)kernel->facts.threads, 1, 1},
                                        (unsigned)kernel->facts.smem_bytes,
                                        stream,
                                        &overlap,
                                        1};
    return driver->launch_with(&config, kernel->module.function, parameters, NULL);
}

/* Launches a kernel; `follows` another one of the call that may end beside its beginning. */
static loom_status launch_kernel(const loom_plan *plan, const loom__plan_kernel *kernel, bool follows,
                                 const int64_t *values, const launch_maps *maps, int64_t blocks, void *stream,
                                 loom_error *error) {
    _Alignas(LOOM__MAP_ALIGNMENT) unsigned char packed[LOOM__MAX_ARGS_BYTES];
    pack_args(kernel, values, maps, packed);
    if (plan->host) {
        loom__pool_run(plan->context->pool, kernel->host_module.function, packed, blocks);
        return LOOM_OK;
    }
    void *parameters[] = {packed};
    int result = follows && kernel->overlaps && plan->driver->launch_with
                     ? launch_overlapping(plan->driver, kernel, (unsigned)blocks, stream, parameters)
                     : plan->driver->launch(kernel->module.function, (unsigned)blocks, 1, 1,
                                            (unsigned)kernel->facts.threads, 1, 1,
                                            (unsigned)kernel->facts.smem_bytes, stream, parameters, NULL);
    return result ? loom__driver_check(plan->driver, result, kernel->facts.symbol, error) : LOOM_OK;
}

/* Which kernels of a variant a launch is of. */
typedef enum role { ALL, ALL_BUT_PREPARING, PREPARING } role;

/* What is prepared for kernels that have no blocks is left out. */
static loom_status launch_all(const loom_plan *plan, const loom__plan_variant *variant, role which,
                              uint32_t wanted, const int64_t *values, const launch_maps *maps, void *stream,
                              loom_error *error) {
    const loom__plan_kernel *kernels = &plan->kernels[variant->first];
    int64_t blocks[LOOM__MAX_PASS_KERNELS];
    int32_t count = variant->count;
    bool any = which == PREPARING;
    for (int32_t i = 0; i < count; i++) {
        bool needed = (!kernels[i].needs || kernels[i].needs & wanted) &&
                      (which == ALL || kernels[i].prepares == (which == PREPARING));
        blocks[i] = needed ? count_blocks(plan, &kernels[i], values) : 0;
        if (blocks[i] < 0) {
            return loom__fail(error, LOOM_UNSUPPORTED, "args.shape",
                              "kernel %s needs a grid of batch %lld x heads %lld x ceil(%lld / %d) blocks, "
                              "at most 2147483647 are possible",
                              kernels[i].facts.name, (long long)values[kernels[i].grid_batch],
                              (long long)values[kernels[i].grid_heads],
                              (long long)values[kernels[i].grid_seq], kernels[i].grid_rows);
        }
        any |= blocks[i] && !kernels[i].prepares;
    }
    if (!any) return LOOM_OK;
    bool follows = false;
    for (int32_t i = 0; i < count; i++) {
        if (!blocks[i]) continue;
        loom__log(plan->context, LOOM__LOG_LAUNCH, "launch kernel=%s variant=%s blocks=%lld",
                  kernels[i].facts.name, kernels[i].facts.variant, (long long)blocks[i]);
        LOOM_TRY(plan->context,
                 launch_kernel(plan, &kernels[i], follows, values, maps, blocks[i], stream, error));
        follows = true;
    }
    return LOOM_OK;
}

static loom_status fail_alignment(const loom_plan *plan, const loom_args *args, loom_pass pass,
                                  int32_t alignment, loom_error *error) {
    for (int32_t i = 0; i < LOOM__NUM_TENSORS; i++) {
        uint64_t bits = 0;
        if (!is_used(args, i, pass) || check_tensor(plan, args, pass, i, &bits, NULL) ||
            bits % (uint64_t)alignment == 0)
            continue;
        char field[48] = "args.";
        return loom__fail(error, LOOM_INVALID, strcat(field, TENSORS[i].name),
                          "%s has an address (%p) or a stride that is not a multiple of %d bytes, which the "
                          "plan was promised (desc.alignment)",
                          TENSORS[i].name, tensor_of(args, i)->data, alignment);
    }
    return loom__fail(error, LOOM_INTERNAL, "plan", "no variant of the plan fits the tensors");
}

static loom_status fail_map(const loom_plan *plan, const loom_args *args, int32_t index, int result,
                            loom_error *error) {
    const loom_tensor *tensor = tensor_of(args, index);
    const char *name = NULL;
    char field[48] = "args.";
    if (plan->driver->error_name(result, &name) || !name) name = "an unknown error";
    return loom__fail(
        error, LOOM_UNSUPPORTED, strcat(strcat(field, TENSORS[index].name), ".stride"),
        "%s (data %p, stride %lld %lld %lld) has no tensor map, the driver says %s (%d), and the plan has no "
        "kernels that do without: make it without the promise of desc.alignment, or with target mma",
        TENSORS[index].name, tensor->data, (long long)tensor->stride[0], (long long)tensor->stride[1],
        (long long)tensor->stride[2], name, result);
}

/* Launches the first variant that the tensors fit. */
static loom_status launch_variant(const loom_plan *plan, loom_pass pass, const loom_args *args, uint64_t bits,
                                  uint32_t wanted, const int64_t *values, void *stream, loom_error *error) {
    const loom__plan_pass *kernels = &plan->passes[pass];
    launch_maps maps;
    int32_t refused = -1;
    int result = 0;
    for (int32_t i = 0; i < kernels->num_variants; i++) {
        const loom__plan_variant *variant = &kernels->variants[i];
        if (bits % (uint64_t)variant->alignment == 0 &&
            encode_maps(plan, args, variant, &maps, &refused, &result))
            return launch_all(plan, variant, args->prepared ? ALL_BUT_PREPARING : ALL, wanted, values, &maps,
                              stream, error);
    }
    if (refused >= 0) return fail_map(plan, args, refused, result, error);
    return fail_alignment(plan, args, pass, kernels->variants[0].alignment, error);
}

static loom_status check_launch(const loom_plan *plan, loom_pass pass, const loom_args *args,
                                loom_error *error) {
    LOOM_TRY(NULL, check_call(plan, pass, args, error));
    if (!plan->launchable) {
        return loom__fail(error, LOOM_INVALID, "plan",
                          "the plan was made with LOOM_DEVICE_NONE, it can be looked at but not launched");
    }
    if (!loom__plan_is_ready(plan)) return loom__plan_fail_unready(plan, error);
    LOOM_TRY(plan->context, check_shape(&args->shape, error));
    LOOM_TRY(plan->context, check_start("args.q_start", args->q_start, args->shape.seq_q, error));
    return check_start("args.k_start", args->k_start, args->shape.seq_k, error);
}

/* Checks the caller's memory and says where the regions of a pass lie; a call that prepares needs no
 * workspace. */
static loom_status place_regions(const loom_plan *plan, loom_pass pass, const loom_args *args, bool preparing,
                                 int64_t *values, loom_error *error) {
    layout l;
    const loom__plan_pass *kernels = &plan->passes[pass];
    bool has_prepared = preparing || args->prepared;
    LOOM_TRY(NULL, lay_out_pass(plan, pass, has_prepared, values, &l, error));
    if (!preparing)
        LOOM_TRY(NULL,
                 check_memory("workspace", args->workspace, args->workspace_bytes, l.workspace_bytes, error));
    if (has_prepared)
        LOOM_TRY(NULL,
                 check_memory("prepared", args->prepared, args->prepared_bytes, l.prepared_bytes, error));
    for (int32_t i = 0; i < kernels->num_regions; i++) {
        const void *memory = has_prepared && kernels->regions[i].prepared ? args->prepared : args->workspace;
        values[LOOM__VALUE_REGIONS + i] = memory ? (int64_t)((uintptr_t)memory + l.offsets[i]) : 0;
    }
    return LOOM_OK;
}

/* What a call packs, and then launches with the device's primary context current. */
typedef struct launch_job {
    const loom_plan *plan;
    loom_pass pass;
    const loom_args *args;
    uint64_t bits;
    uint32_t wanted;
    int64_t *values; /* elsewhere: an initialiser would clear them all */
    void *stream;
} launch_job;

static loom_status enter(launch_job *job, loom_status (*run)(launch_job *job, loom_error *error),
                         loom_error *error) {
    const loom_plan *plan = job->plan;
    if (plan->host) return run(job, error);
    loom__cuda_handle current = NULL;
    plan->driver->context_current(&current);
    bool other = current != plan->device->primary;
    if (other) LOOM_TRY(plan->context, loom__device_enter(plan->context, plan->device, error));
    loom_status status = run(job, error);
    if (other) loom__device_leave(plan->context);
    return status;
}

static loom_status run_pass(launch_job *job, loom_error *error) {
    return launch_variant(job->plan, job->pass, job->args, job->bits, job->wanted, job->values, job->stream,
                          error);
}

static loom_status launch(const loom_plan *plan, loom_pass pass, const loom_args *args, void *stream,
                          loom_error *error) {
    int64_t values[LOOM__NUM_VALUES];
    launch_job job = {.plan = plan, .pass = pass, .args = args, .values = values, .stream = stream};
    LOOM_TRY(NULL, check_launch(plan, pass, args, error));
    if (args->scale != 0.0f && !(args->scale >= 0x1p-64f && args->scale <= 0x1p64f)) {
        return loom__fail(error, LOOM_INVALID, "args.scale",
                          "scale is %g, it must be from 2^-64 to 2^64, or 0 for 1/sqrt(%d)",
                          (double)args->scale, plan->d);
    }
    for (int32_t i = 0; i < LOOM__NUM_TENSORS; i++) {
        LOOM_TRY(plan->context, check_tensor(plan, args, pass, i, &job.bits, error));
        if (is_written(i, pass) && tensor_of(args, i)->data) job.wanted |= 1u << i;
    }
    LOOM_TRY(plan->context, check_aliases(args, pass, error));
    pack_values(plan, args, pass, values);
    LOOM_TRY(plan->context, pack_params(plan, args, values, error));
    if (pass == LOOM_BACKWARD && !job.wanted) return LOOM_OK;
    LOOM_TRY(plan->context, place_regions(plan, pass, args, false, values, error));
    return enter(&job, run_pass, error);
}

loom_status loom_forward(const loom_plan *plan, const loom_args *args, void *stream, loom_error *error) {
    return launch(loom__plan_serving(plan), LOOM_FORWARD, args, stream, error);
}

loom_status loom_backward(const loom_plan *plan, const loom_args *args, void *stream, loom_error *error) {
    return launch(loom__plan_serving(plan), LOOM_BACKWARD, args, stream, error);
}

/* -- Preparing ------------------------------------------------------------------------------------------- */

/* Variants of one target read the same places: those that an earlier one has made are left out. */
static loom_status run_preparing(launch_job *job, loom_error *error) {
    const loom_plan *plan = job->plan;
    for (int32_t pass = LOOM_FORWARD; pass <= LOOM_BACKWARD; pass++) {
        const loom__plan_pass *kernels = &plan->passes[pass];
        uint32_t made = 0;
        LOOM_TRY(plan->context, place_regions(plan, (loom_pass)pass, job->args, true, job->values, error));
        for (int32_t i = 0; i < kernels->num_variants; i++) {
            const loom__plan_variant *variant = &kernels->variants[i];
            if (!(variant->prepares & ~made)) continue;
            made |= variant->prepares;
            LOOM_TRY(plan->context,
                     launch_all(plan, variant, PREPARING, UINT32_MAX, job->values, NULL, job->stream, error));
        }
    }
    return LOOM_OK;
}

loom_status loom_prepare(const loom_plan *plan, const loom_args *args, void *stream, loom_error *error) {
    plan = loom__plan_serving(plan);
    int64_t values[LOOM__NUM_VALUES] = {0}; /* no tensors, no scale */
    launch_job job = {.plan = plan, .args = args, .values = values, .stream = stream};
    LOOM_TRY(NULL, check_launch(plan, LOOM_FORWARD, args, error));
    pack_positions(args, values);
    LOOM_TRY(plan->context, pack_params(plan, args, values, error));
    return enter(&job, run_preparing, error);
}
