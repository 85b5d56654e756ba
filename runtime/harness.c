/* harness.c - tensors, poison, launch and comparison of one attention launch; see harness.h. */
#define _POSIX_C_SOURCE 200809L
#include "harness.h"

#include "tensors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GUARD_BYTES = 256, POISON = 0xff }; /* all bits set is NaN in f32, f16 and bf16 */

const char *const loom__rig_names[LOOM__RIG_NUM] = {"q", "k",   "v",  "dout", "dlse",
                                                    "o", "lse", "dq", "dk",   "dv"};
const char *const loom__layout_names[LOOM__LAYOUT_NUM] = {"dense",  "heads-first", "padded", "odd",
                                                          "packed", "broadcast",   "shared", "mixed"};

/* -- Layout ------------------------------------------------------------------------------------------------
 */

static bool is_output(loom__rig_name name) { return name >= LOOM__RIG_O; }

static bool belongs(loom__rig_name name, loom_pass pass) {
    return pass == LOOM_FORWARD ? name == LOOM__RIG_O || name == LOOM__RIG_LSE : name >= LOOM__RIG_DQ;
}

static loom_status new_buffer(loom__rig *rig, int64_t bytes, int *index, loom_error *error) {
    loom__rig_buffer *buffer = &rig->buffers[rig->num_buffers];
    buffer->bytes = ((size_t)bytes + 2 * GUARD_BYTES + 255) / 256 * 256;
    if (rig->on_host) {
        LOOM_TRY(rig->context, loom__device_memory_alloc(rig->memory, buffer->bytes, &buffer->device, error));
        buffer->host = buffer->device;
    } else {
        buffer->host = malloc(buffer->bytes);
        if (!buffer->host)
            return loom__fail(error, LOOM_MEMORY, "harness", "no memory for %zu bytes", buffer->bytes);
        LOOM_TRY(rig->context, loom__device_memory_alloc(rig->memory, buffer->bytes, &buffer->device, error));
    }
    memset(buffer->host, POISON, buffer->bytes);
    *index = rig->num_buffers++;
    return LOOM_OK;
}

/* Strides of [batch, seq, head, dim] for one of the plain layouts; returns the elements they span. */
static int64_t set_strides(loom__rig_tensor *t, loom__layout layout) {
    int64_t seq = t->dims[1] ? t->dims[1] : 1, heads = t->dims[2], dim = t->dims[3], gap = 0;
    int64_t rows = dim == 1; /* lse: heads outside seq, by contract the other way round */
    if (layout == LOOM__LAYOUT_PADDED) gap = 16 / (int64_t)loom__storage_bytes(t->storage);
    if (layout == LOOM__LAYOUT_ODD) gap = 1;
    if ((layout == LOOM__LAYOUT_HEADS_FIRST) != (rows == 1)) {
        t->stride[1] = dim + (dim == 1 ? 0 : gap);
        t->stride[2] = seq * t->stride[1] + gap;
        t->stride[0] = heads * t->stride[2] + gap;
    } else {
        t->stride[2] = dim + (dim == 1 ? 0 : gap);
        t->stride[1] = heads * t->stride[2] + (layout == LOOM__LAYOUT_PADDED ? gap : 0);
        t->stride[0] = seq * t->stride[1] + gap;
    }
    t->stride[3] = 1;
    return t->dims[0] * t->stride[0];
}

/* Stride 0 where the layout says so; what is left is dense. */
static int64_t set_broadcast(loom__rig_tensor *t, loom__rig_name name) {
    loom__rig_tensor one = *t;
    one.dims[0] = 1;
    if (name == LOOM__RIG_DOUT || name == LOOM__RIG_DLSE) one.dims[1] = 1;
    if (name != LOOM__RIG_Q) one.dims[2] = 1;
    int64_t elements = set_strides(&one, LOOM__LAYOUT_DENSE);
    for (int axis = 0; axis < 3; axis++)
        t->stride[axis] = one.dims[axis] < t->dims[axis] || one.dims[axis] == 1 ? 0 : one.stride[axis];
    t->stride[3] = 1;
    return elements;
}

static loom_status place(loom__rig *rig, loom__rig_name name, loom_error *error) {
    loom__rig_tensor *t = &rig->tensors[name];
    loom__layout layout = rig->options.layout;
    int64_t bytes = (int64_t)loom__storage_bytes(t->storage), elements;
    if (layout == LOOM__LAYOUT_MIXED) layout = (loom__layout)((name * 3 + 1) % 4);
    if (layout == LOOM__LAYOUT_BROADCAST && !is_output(name))
        elements = set_broadcast(t, name);
    else
        elements = set_strides(t, layout <= LOOM__LAYOUT_ODD ? layout : LOOM__LAYOUT_DENSE);
    t->first = GUARD_BYTES / bytes + (layout == LOOM__LAYOUT_ODD);
    return new_buffer(rig, (elements + 1) * bytes, &t->buffer, error);
}

/* Puts the heads of `second` behind those of `first` in one buffer [batch, seq, heads, dim], if they have
 * room. */
static loom_status place_beside(loom__rig *rig, const loom__rig_name *names, int num_names,
                                loom_error *error) {
    loom__rig_tensor all = rig->tensors[names[0]];
    int64_t bytes = (int64_t)loom__storage_bytes(all.storage), head = 0;
    int buffer = -1;
    for (int i = 1; i < num_names; i++) all.dims[2] += rig->tensors[names[i]].dims[2];
    int64_t elements = set_strides(&all, LOOM__LAYOUT_DENSE);
    LOOM_TRY(rig->context, new_buffer(rig, elements * bytes, &buffer, error));
    for (int i = 0; i < num_names; i++) {
        loom__rig_tensor *t = &rig->tensors[names[i]];
        memcpy(t->stride, all.stride, sizeof t->stride);
        t->buffer = buffer;
        t->first = GUARD_BYTES / bytes + head * all.dims[3];
        head += t->dims[2];
    }
    return LOOM_OK;
}

static loom_status place_packed(loom__rig *rig, const loom__rig_name *names, loom_error *error) {
    const loom__rig_tensor *q = &rig->tensors[names[0]], *k = &rig->tensors[names[1]],
                           *v = &rig->tensors[names[2]];
    if (k->buffer == -1 || v->buffer == -1 || k->dims[3] != v->dims[3]) return LOOM_OK;
    bool with_q = q->buffer != -1 && q->dims[1] == k->dims[1] && q->dims[3] == k->dims[3];
    return place_beside(rig, names + !with_q, 2 + with_q, error);
}

enum { ABSENT = -1, TO_PLACE = -2 };

static loom_status place_tensors(loom__rig *rig, loom_error *error) {
    const loom_shape *shape = &rig->options.shape;
    const loom__reference *r = rig->reference;
    const int64_t dims[LOOM__RIG_NUM][3] = {
        {shape->seq_q, shape->heads_q, r->d},   {shape->seq_k, shape->heads_kv, r->d},
        {shape->seq_k, shape->heads_kv, r->dv}, {shape->seq_q, shape->heads_q, r->dv},
        {shape->seq_q, shape->heads_q, 1},      {shape->seq_q, shape->heads_q, r->dv},
        {shape->seq_q, shape->heads_q, 1},      {shape->seq_q, shape->heads_q, r->d},
        {shape->seq_k, shape->heads_kv, r->d},  {shape->seq_k, shape->heads_kv, r->dv}};
    static const loom__rig_name inputs[] = {LOOM__RIG_Q, LOOM__RIG_K, LOOM__RIG_V};
    static const loom__rig_name gradients[] = {LOOM__RIG_DQ, LOOM__RIG_DK, LOOM__RIG_DV};
    for (loom__rig_name name = 0; name < LOOM__RIG_NUM; name++) {
        loom__rig_tensor *t = &rig->tensors[name];
        bool backward_only = name == LOOM__RIG_DOUT || name == LOOM__RIG_DLSE || name >= LOOM__RIG_DQ;
        t->storage = name == LOOM__RIG_LSE || name == LOOM__RIG_DLSE ? LOOM__F32 : r->dtype;
        t->dims[0] = shape->batch;
        memcpy(t->dims + 1, dims[name], sizeof dims[name]);
        t->buffer = TO_PLACE;
        if ((rig->options.unwanted >> name & 1) || (backward_only && !r->backward) ||
            (name == LOOM__RIG_DLSE && rig->options.without_dlse))
            t->buffer = ABSENT;
    }
    if (rig->options.layout == LOOM__LAYOUT_PACKED) {
        LOOM_TRY(rig->context, place_packed(rig, inputs, error));
        LOOM_TRY(rig->context, place_packed(rig, gradients, error));
    }
    for (loom__rig_name name = 0; name < LOOM__RIG_NUM; name++) {
        if (rig->tensors[name].buffer != TO_PLACE) continue;
        if (name == LOOM__RIG_V && rig->options.layout == LOOM__LAYOUT_SHARED && r->dv <= r->d) {
            int64_t dv = rig->tensors[name].dims[3];
            rig->tensors[name] = rig->tensors[LOOM__RIG_K];
            rig->tensors[name].dims[3] = dv;
        } else {
            LOOM_TRY(rig->context, place(rig, name, error));
        }
    }
    return LOOM_OK;
}

/* -- Values ------------------------------------------------------------------------------------------------
 */

static int64_t element_of(const loom__rig_tensor *t, int64_t batch, int64_t seq, int64_t head, int64_t dim) {
    return t->first + batch * t->stride[0] + seq * t->stride[1] + head * t->stride[2] + dim;
}

double loom__rig_get(const loom__rig *rig, loom__rig_name name, int64_t batch, int64_t seq, int64_t head,
                     int64_t dim) {
    const loom__rig_tensor *t = &rig->tensors[name];
    return loom__element_get(rig->buffers[t->buffer].host, t->storage, element_of(t, batch, seq, head, dim));
}

void loom__rig_set(loom__rig *rig, loom__rig_name name, int64_t batch, int64_t seq, int64_t head, int64_t dim,
                   double value) {
    const loom__rig_tensor *t = &rig->tensors[name];
    loom__element_set(rig->buffers[t->buffer].host, t->storage, element_of(t, batch, seq, head, dim),
                      (float)value);
}

static void fill(loom__rig *rig, loom__rig_name name, uint64_t *state, double value) {
    const loom__rig_tensor *t = &rig->tensors[name];
    if (t->buffer < 0) return;
    for (int64_t b = 0; b < t->dims[0]; b++)
        for (int64_t i = 0; i < t->dims[1]; i++)
            for (int64_t h = 0; h < t->dims[2]; h++)
                for (int64_t x = 0; x < t->dims[3]; x++)
                    loom__rig_set(rig, name, b, i, h, x, state ? value * loom__random_normal(state) : value);
}

void loom__rig_fill(loom__rig *rig, loom__rig_name name, double value) { fill(rig, name, NULL, value); }

void loom__rig_noise(loom__rig *rig, loom__rig_name name, uint64_t seed, double spread) {
    uint64_t state = seed * 1000003u + name;
    fill(rig, name, &state, spread);
}

static loom_status make_params(loom__rig *rig, loom_error *error) {
    uint64_t state = rig->options.seed * 77 + 5;
    for (int slot = 0; slot < rig->reference->num_params; slot++) {
        const loom__param_facts *facts = &rig->reference->params[slot];
        const loom_shape *shape = &rig->options.shape;
        loom_param *param = &rig->params[slot];
        rig->param_buffers[slot] = ABSENT;
        if (!facts->num_dims) {
            loom__param_invent(facts, shape, &state, param, NULL);
            continue;
        }
        int64_t elements = loom__param_invent(facts, shape, &state, param, NULL);
        LOOM_TRY(rig->context, new_buffer(rig, elements * (int64_t)loom__storage_bytes(facts->storage),
                                          &rig->param_buffers[slot], error));
        char *data = rig->buffers[rig->param_buffers[slot]].host + GUARD_BYTES;
        loom__param_invent(facts, shape, &state, param, data);
        param->data = data;
    }
    return LOOM_OK;
}

/* -- A rig -------------------------------------------------------------------------------------------------
 */

loom_status loom__rig_create(loom_context *context, const loom_plan *plan, int32_t device,
                             const loom__rig_options *options, loom__rig **out, loom_error *error) {
    loom__rig *rig = calloc(1, sizeof *rig);
    loom_status status;
    if (!rig) return loom__fail(error, LOOM_MEMORY, "harness", "no memory for a rig");
    rig->context = context;
    rig->plan = plan;
    rig->options = *options;
    rig->on_host = device == LOOM_DEVICE_HOST;
    status = loom__reference_create(loom_plan_text(plan, LOOM_TEXT_PROBLEM), &rig->reference, error);
    if (!status) status = loom__device_memory_open(context, device, &rig->memory, error);
    if (!status) status = loom__device_memory_set_apart(rig->memory, error);
    if (!status) status = place_tensors(rig, error);
    if (!status) status = make_params(rig, error);
    if (status) {
        loom__rig_destroy(rig);
        return status;
    }
    for (loom__rig_name name = 0; name < LOOM__RIG_O; name++)
        loom__rig_noise(rig, name, options->seed, options->spread != 0 ? options->spread : 1);
    *out = rig;
    return LOOM_OK;
}

void loom__rig_destroy(loom__rig *rig) {
    if (!rig) return;
    for (int i = 0; i < rig->num_buffers && !rig->on_host; i++) free(rig->buffers[i].host);
    if (!rig->on_host) free(rig->workspace.host), free(rig->prepared.host);
    loom__device_memory_close(rig->memory);
    loom__reference_destroy(rig->reference);
    free(rig);
}

static void make_args(const loom__rig *rig, bool on_device, loom_args *args) {
    loom_tensor *tensors[LOOM__RIG_NUM] = {&args->q, &args->k,   &args->v,  &args->dout, &args->dlse,
                                           &args->o, &args->lse, &args->dq, &args->dk,   &args->dv};
    *args = (loom_args)LOOM_ARGS_INIT;
    args->shape = rig->options.shape;
    args->scale = rig->options.scale;
    args->q_start = rig->options.q_start;
    args->k_start = rig->options.k_start;
    for (loom__rig_name name = 0; name < LOOM__RIG_NUM; name++) {
        const loom__rig_tensor *t = &rig->tensors[name];
        if (t->buffer < 0) continue;
        const loom__rig_buffer *buffer = &rig->buffers[t->buffer];
        tensors[name]->data = (char *)(on_device ? buffer->device : buffer->host) +
                              t->first * (int64_t)loom__storage_bytes(t->storage);
        memcpy(tensors[name]->stride, t->stride, sizeof t->stride);
    }
    args->params = rig->params;
    args->num_params = rig->reference->num_params;
}

void loom__rig_host_args(const loom__rig *rig, loom_args *args) { make_args(rig, false, args); }

/* -- Launch ------------------------------------------------------------------------------------------------
 */

static bool buffer_is_written(const loom__rig *rig, int buffer, loom_pass pass) {
    for (loom__rig_name name = LOOM__RIG_O; name < LOOM__RIG_NUM; name++)
        if (rig->tensors[name].buffer == buffer && belongs(name, pass)) return true;
    return false;
}

static loom_status move_in(loom__rig *rig, loom_pass pass, loom_error *error) {
    for (int i = 0; i < rig->num_buffers; i++) {
        loom__rig_buffer *buffer = &rig->buffers[i];
        if (buffer_is_written(rig, i, pass)) memset(buffer->host, POISON, buffer->bytes);
        if (!rig->on_host)
            LOOM_TRY(rig->context, loom__device_memory_upload(rig->memory, buffer->device, buffer->host,
                                                              buffer->bytes, error));
    }
    return LOOM_OK;
}

/* Makes memory of exactly the bytes asked for, with a guard behind, full of poison. */
static loom_status make_poisoned(loom__rig *rig, size_t bytes, loom__rig_buffer *memory, loom_error *error) {
    if (memory->bytes < bytes + GUARD_BYTES) {
        if (!rig->on_host) free(memory->host);
        *memory = (loom__rig_buffer){.bytes = bytes + GUARD_BYTES};
        LOOM_TRY(rig->context, loom__device_memory_alloc(rig->memory, memory->bytes, &memory->device, error));
        memory->host = rig->on_host ? memory->device : malloc(memory->bytes);
        if (!memory->host)
            return loom__fail(error, LOOM_MEMORY, "harness", "no memory for %zu bytes", memory->bytes);
    }
    memset(memory->host, POISON, memory->bytes);
    return rig->on_host
               ? LOOM_OK
               : loom__device_memory_upload(rig->memory, memory->device, memory->host, memory->bytes, error);
}

static loom_status make_workspace(loom__rig *rig, loom_pass pass, loom_args *args, loom_error *error) {
    size_t bytes = 0;
    if (rig->options.prepared) {
        LOOM_TRY(rig->context, loom_prepared_bytes(rig->plan, args, &bytes, error));
        LOOM_TRY(rig->context, make_poisoned(rig, bytes, &rig->prepared, error));
        args->prepared = bytes ? rig->prepared.device : NULL;
        args->prepared_bytes = bytes;
        for (int i = 0; bytes && i < 2; i++) /* on poison, and on what the first has left */
            LOOM_TRY(rig->context,
                     loom_prepare(rig->plan, args, loom__device_memory_stream(rig->memory), error));
    }
    LOOM_TRY(rig->context, loom_workspace_bytes(rig->plan, pass, args, &bytes, error));
    LOOM_TRY(rig->context, make_poisoned(rig, bytes, &rig->workspace, error));
    args->workspace = bytes ? rig->workspace.device : NULL;
    args->workspace_bytes = bytes;
    return LOOM_OK;
}

static int64_t first_change(const char *bytes, size_t from, size_t to) {
    for (size_t i = from; i < to; i++)
        if ((unsigned char)bytes[i] != POISON) return (int64_t)i;
    return -1;
}

/* Poison must be left wherever no output of the pass lies. */
static loom_status check_guards(loom__rig *rig, int index, loom_pass pass, loom_error *error) {
    const loom__rig_buffer *buffer = &rig->buffers[index];
    char *rest = malloc(buffer->bytes);
    const char *inside = "";
    if (!rest) return loom__fail(error, LOOM_MEMORY, "harness", "no memory for %zu bytes", buffer->bytes);
    memcpy(rest, buffer->host, buffer->bytes);
    for (loom__rig_name name = LOOM__RIG_O; name < LOOM__RIG_NUM; name++) {
        const loom__rig_tensor *t = &rig->tensors[name];
        size_t bytes = loom__storage_bytes(t->storage);
        if (t->buffer != index || !belongs(name, pass)) continue;
        inside = loom__rig_names[name];
        for (int64_t b = 0; b < t->dims[0]; b++)
            for (int64_t i = 0; i < t->dims[1]; i++)
                for (int64_t h = 0; h < t->dims[2]; h++)
                    memset(rest + (size_t)element_of(t, b, i, h, 0) * bytes, POISON,
                           (size_t)t->dims[3] * bytes);
    }
    int64_t at = first_change(rest, 0, buffer->bytes);
    free(rest);
    if (at < 0) return LOOM_OK;
    return loom__fail(error, LOOM_INTERNAL, "guard",
                      "byte %lld of the buffer of %s was written, outside the tensor", (long long)at, inside);
}

static uint64_t digest_bytes(uint64_t digest, const void *data, size_t bytes) {
    const unsigned char *from = data;
    for (size_t i = 0; i < bytes; i++) digest = (digest ^ from[i]) * 0x100000001b3u;
    return digest;
}

static uint64_t digest_inputs(const loom__rig *rig, loom_pass pass) {
    uint64_t digest = 0xcbf29ce484222325u;
    for (int i = 0; i < rig->num_buffers; i++)
        if (!buffer_is_written(rig, i, pass))
            digest = digest_bytes(digest, rig->buffers[i].host, rig->buffers[i].bytes);
    return digest;
}

static loom_status move_out(loom__rig *rig, loom_pass pass, loom_error *error) {
    for (int i = 0; i < rig->num_buffers; i++) {
        if (!buffer_is_written(rig, i, pass)) continue;
        loom__rig_buffer *buffer = &rig->buffers[i];
        if (!rig->on_host)
            LOOM_TRY(rig->context, loom__device_memory_download(rig->memory, buffer->host, buffer->device,
                                                                buffer->bytes, error));
        LOOM_TRY(rig->context, check_guards(rig, i, pass, error));
    }
    return LOOM_OK;
}

static loom_status check_behind(loom__rig *rig, const char *what, loom__rig_buffer *memory, size_t used,
                                loom_error *error) {
    if (!memory->bytes) return LOOM_OK;
    if (!rig->on_host)
        LOOM_TRY(rig->context, loom__device_memory_download(rig->memory, memory->host, memory->device,
                                                            memory->bytes, error));
    if (first_change(memory->host, used, memory->bytes) < 0) return LOOM_OK;
    return loom__fail(error, LOOM_INTERNAL, "guard", "memory behind the %s of %zu bytes was written", what,
                      used);
}

loom_status loom__rig_run(loom__rig *rig, loom_pass pass, loom_error *error) {
    loom_args args;
    loom_param params[LOOM__MAX_PARAMS];
    make_args(rig, true, &args);
    memcpy(params, rig->params, sizeof params);
    for (int slot = 0; slot < args.num_params; slot++)
        if (rig->param_buffers[slot] >= 0)
            params[slot].data = (char *)rig->buffers[rig->param_buffers[slot]].device + GUARD_BYTES;
    args.params = params;
    LOOM_TRY(rig->context, move_in(rig, pass, error));
    LOOM_TRY(rig->context, make_workspace(rig, pass, &args, error));
    uint64_t before = digest_inputs(rig, pass);
    void *stream = loom__device_memory_stream(rig->memory);
    LOOM_TRY(rig->context, pass == LOOM_FORWARD ? loom_forward(rig->plan, &args, stream, error)
                                                : loom_backward(rig->plan, &args, stream, error));
    LOOM_TRY(rig->context, loom__device_memory_sync(rig->memory, error));
    LOOM_TRY(rig->context, move_out(rig, pass, error));
    LOOM_TRY(rig->context, check_behind(rig, "workspace", &rig->workspace, args.workspace_bytes, error));
    if (args.prepared)
        LOOM_TRY(rig->context,
                 check_behind(rig, "prepared memory", &rig->prepared, args.prepared_bytes, error));
    if (digest_inputs(rig, pass) != before)
        return loom__fail(error, LOOM_INTERNAL, "guard", "the launch wrote to one of its inputs");
    return LOOM_OK;
}

uint64_t loom__rig_digest(const loom__rig *rig, loom_pass pass) {
    uint64_t digest = 0xcbf29ce484222325u;
    for (loom__rig_name name = LOOM__RIG_O; name < LOOM__RIG_NUM; name++) {
        const loom__rig_tensor *t = &rig->tensors[name];
        size_t bytes = loom__storage_bytes(t->storage);
        if (t->buffer < 0 || !belongs(name, pass)) continue;
        for (int64_t b = 0; b < t->dims[0]; b++)
            for (int64_t i = 0; i < t->dims[1]; i++)
                for (int64_t h = 0; h < t->dims[2]; h++)
                    digest = digest_bytes(
                        digest, rig->buffers[t->buffer].host + (size_t)element_of(t, b, i, h, 0) * bytes,
                        (size_t)t->dims[3] * bytes);
    }
    return digest;
}

/* -- Comparison --------------------------------------------------------------------------------------------
 */

/* Half the distance of neighbouring numbers at 1. */
static double half_ulp(loom__storage storage) {
    return storage == LOOM__BF16 ? 0x1p-9 : storage == LOOM__F16 ? 0x1p-12 : 0x1p-24;
}

static double *result_of(const loom__reference_result *result, loom__rig_name name) {
    switch (name) {
    case LOOM__RIG_O: return result->o;
    case LOOM__RIG_LSE: return result->lse;
    case LOOM__RIG_DQ: return result->dq;
    case LOOM__RIG_DK: return result->dk;
    default: return result->dv;
    }
}

/* Largest L2 norm of a row of an input. */
static double longest_row(const loom__rig *rig, loom__rig_name name) {
    const loom__rig_tensor *t = &rig->tensors[name];
    double longest = 0;
    for (int64_t b = 0; b < t->dims[0] && t->buffer >= 0; b++) {
        for (int64_t i = 0; i < t->dims[1]; i++) {
            for (int64_t h = 0; h < t->dims[2]; h++) {
                double sum = 0;
                for (int64_t x = 0; x < t->dims[3]; x++) sum += pow(loom__rig_get(rig, name, b, i, h, x), 2);
                longest = sum > longest ? sum : longest; /* NaN, in keys nobody sees, does not count */
            }
        }
    }
    return sqrt(longest);
}

/* What float32 rounding of dP - delta leaves in an element of dQ or dK even where the exact value is 0: a
 * quarter of a unit in the last place of |dout| |v|, times the typical element it is multiplied by, times the
 * root of the rows that add up. */
static double rounding_floor(const loom__rig *rig, loom__rig_name name) {
    const loom_shape *shape = &rig->options.shape;
    if (name != LOOM__RIG_DQ && name != LOOM__RIG_DK) return 0;
    double scale = rig->options.scale != 0 ? rig->options.scale : 1 / sqrt(rig->reference->d);
    double keys = (double)(shape->heads_kv * shape->seq_k),
           rows = (double)(shape->seq_q * shape->heads_q) / (keys > 0 ? keys : 1);
    double terms = name == LOOM__RIG_DK && rows > 1 ? sqrt(rows) : 1;
    double dp = longest_row(rig, LOOM__RIG_DOUT) * longest_row(rig, LOOM__RIG_V);
    double factor =
        longest_row(rig, name == LOOM__RIG_DQ ? LOOM__RIG_K : LOOM__RIG_Q) / sqrt(rig->reference->d);
    return 0x1p-26 * scale * dp * factor * terms;
}

static bool differs(double got, double wanted) {
    if (isnan(wanted) || isinf(wanted)) return isnan(wanted) ? !isnan(got) : got != wanted;
    return isnan(got) || isinf(got);
}

/* True if the mask leaves no row a key; scores do not count. */
static bool no_row_sees(const loom__rig *rig) {
    const loom_shape *shape = &rig->options.shape;
    loom_args args;
    loom__rig_host_args(rig, &args);
    int64_t group = shape->heads_kv ? shape->heads_q / shape->heads_kv : 1;
    int64_t q_start = args.q_start == LOOM_DEFAULT_START ? shape->seq_k - shape->seq_q : args.q_start;
    int64_t k_start = args.k_start == LOOM_DEFAULT_START ? 0 : args.k_start;
    loom__point at = {.shape = shape, .params = args.params};
    if (!rig->reference->mask) return shape->seq_k == 0;
    for (at.b = 0; at.b < shape->batch; at.b++) {
        for (at.h = 0; at.h < shape->heads_q; at.h++) {
            at.hkv = (int32_t)(at.h / group);
            for (at.row = 0; at.row < shape->seq_q; at.row++) {
                at.q = (int32_t)(q_start + at.row);
                for (at.col = 0; at.col < shape->seq_k; at.col++) {
                    at.k = (int32_t)(k_start + at.col);
                    if (loom__expression_value(rig->reference->mask, LOOM__ROUNDED, &at).i) return false;
                }
            }
        }
    }
    return true;
}

static void judge(const loom__rig *rig, loom__rig_name name, const double *exact, const double *plain,
                  loom__rig_verdict *verdict) {
    const loom__rig_tensor *t = &rig->tensors[name];
    bool is_lse = name == LOOM__RIG_LSE;
    double square = 0, plain_square = 0, norm = 0, worst = 0, plain_worst = 0, largest = is_lse ? 1 : 0;
    bool same_kind = true;
    *verdict = (loom__rig_verdict){.name = name};
    for (int64_t b = 0; b < t->dims[0]; b++) {
        for (int64_t i = 0; i < t->dims[1]; i++) {
            for (int64_t h = 0; h < t->dims[2]; h++) {
                for (int64_t x = 0; x < t->dims[3]; x++) {
                    int64_t dense = is_lse ? (b * t->dims[2] + h) * t->dims[1] + i
                                           : ((b * t->dims[1] + i) * t->dims[2] + h) * t->dims[3] + x;
                    double got = loom__rig_get(rig, name, b, i, h, x), wanted = exact[dense];
                    bool other = differs(got, wanted);
                    verdict->num_elements++;
                    double difference = other ? INFINITY : isfinite(wanted) ? fabs(got - wanted) : 0;
                    if (difference > worst || (verdict->num_finite == 0 && verdict->wanted == 0)) {
                        worst = difference;
                        verdict->got = got;
                        verdict->wanted = wanted;
                        memcpy(verdict->at, (int64_t[]){b, i, h, x}, sizeof verdict->at);
                    }
                    same_kind = same_kind && !other;
                    if (other || !isfinite(wanted)) continue;
                    double off = isfinite(plain[dense]) ? fabs(plain[dense] - wanted) : 0;
                    square += difference * difference;
                    plain_square += off * off;
                    norm += wanted * wanted;
                    plain_worst = fmax(plain_worst, off);
                    largest = fmax(largest, fabs(wanted));
                    verdict->num_finite++;
                }
            }
        }
    }
    /* The small terms: float32 rounding of the whole, and for tensors of a few numbers some roundings of the
     * output. */
    double floor = rounding_floor(rig, name), unit = half_ulp(t->storage), tiny = 2e-6;
    double count = (double)verdict->num_finite;
    double limit = 2 * sqrt(plain_square) + tiny * sqrt(norm) + 4 * unit * largest + floor * sqrt(count);
    double worst_limit = 4 * plain_worst + tiny * largest + 2 * unit * largest + 6 * floor;
    if (is_lse) {
        limit = 2 * plain_worst + tiny / 2 * largest;
        worst_limit = limit;
    }
    double by = sqrt(norm) > 0 ? sqrt(norm) : 1, by_largest = largest > 0 ? largest : 1;
    verdict->error = is_lse ? worst : sqrt(square) / by;
    verdict->limit = is_lse ? limit : limit / by;
    verdict->worst = worst / by_largest;
    verdict->worst_limit = worst_limit / by_largest;
    bool compared = verdict->num_finite > 0 || verdict->num_elements == 0 || (is_lse && no_row_sees(rig));
    verdict->fine =
        same_kind && compared && verdict->error <= verdict->limit && verdict->worst <= verdict->worst_limit;
}

loom_status loom__rig_compare(loom__rig *rig, loom_pass pass, loom__rig_report *report, loom_error *error) {
    loom__reference_result exact = {0}, plain = {0};
    loom_args args;
    bool backward = pass == LOOM_BACKWARD;
    int num_threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    loom__rig_host_args(rig, &args);
    *report = (loom__rig_report){.fine = true};
    loom_status status =
        loom__reference_run(rig->reference, &args, backward, LOOM__FLOAT64, num_threads, &exact, error);
    if (!status)
        status = loom__reference_run(rig->reference, &args, backward, LOOM__SAME_DTYPE, num_threads, &plain,
                                     error);
    for (loom__rig_name name = LOOM__RIG_O; !status && name < LOOM__RIG_NUM; name++) {
        if (rig->tensors[name].buffer < 0 || (!backward && name >= LOOM__RIG_DQ)) continue;
        loom__rig_verdict *verdict = &report->verdicts[report->num_verdicts++];
        judge(rig, name, result_of(&exact, name), result_of(&plain, name), verdict);
        report->fine = report->fine && verdict->fine;
    }
    loom__reference_result_free(&exact);
    loom__reference_result_free(&plain);
    return status;
}

void loom__rig_print_verdict(const loom__rig_verdict *verdict, const char *layout,
                             char line[LOOM__RIG_LINE_BYTES]) {
    char finite[96] = "";
    if (verdict->num_finite < verdict->num_elements)
        snprintf(finite, sizeof finite, ", %lld of %lld elements finite", (long long)verdict->num_finite,
                 (long long)verdict->num_elements);
    snprintf(line, LOOM__RIG_LINE_BYTES, "%-4s %-6s error %.3e limit %.3e worst %.3e limit %.3e %s%s\n",
             loom__rig_names[verdict->name], layout, verdict->error, verdict->limit, verdict->worst,
             verdict->worst_limit, verdict->fine ? "fine" : "WRONG", finite);
}

void loom__rig_explain(const loom__rig_report *report, char *text, size_t capacity) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < report->num_verdicts && used < capacity; i++) {
        const loom__rig_verdict *v = &report->verdicts[i];
        if (v->fine) continue;
        if (v->num_elements && !v->num_finite) {
            used += (size_t)snprintf(text + used, capacity - used, "%s: none of %lld elements is finite; ",
                                     loom__rig_names[v->name], (long long)v->num_elements);
            if (used >= capacity) break;
        }
        used += (size_t)snprintf(
            text + used, capacity - used,
            "%s: error %.3g limit %.3g, worst %.3g limit %.3g at [%lld, %lld, %lld, %lld]: %.9g, not "
            "%.9g; ",
            loom__rig_names[v->name], v->error, v->limit, v->worst, v->worst_limit, (long long)v->at[0],
            (long long)v->at[1], (long long)v->at[2], (long long)v->at[3], v->got, v->wanted);
    }
}
