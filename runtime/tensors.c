/* tensors.c - dense tensors and params of launches that are timed. See tensors.h. */
#include "tensors.h"

#include <math.h>
#include <stdlib.h>

/* -- Random numbers -------------------------------------------------------------------------------------- */

uint64_t loom__random_bits(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

double loom__random_uniform(uint64_t *state) {
    return (double)((loom__random_bits(state) >> 11) + 1) * 0x1p-53;
}

double loom__random_normal(uint64_t *state) {
    double radius = sqrt(-2 * log(loom__random_uniform(state)));
    return radius * cos(6.283185307179586 * loom__random_uniform(state));
}

/* -- Tensors --------------------------------------------------------------------------------------------- */

/* Normal numbers, made once and laid end to end in every tensor: the length is a prime, so that no row of a
 * tensor repeats at a distance that tiles or heads share. */
enum { NUM_NORMALS = 1000003 };

static void *make_normals(loom__storage storage) {
    char *block = malloc((size_t)NUM_NORMALS * loom__storage_bytes(storage));
    uint64_t state = 1;
    for (int64_t i = 0; block && i < NUM_NORMALS; i++)
        loom__element_set(block, storage, i, (float)loom__random_normal(&state));
    return block;
}

/* Fills device memory with the block, begun at item `start`. */
static loom_status fill(loom__device_memory *memory, void *data, int64_t num_items, const char *block,
                        int64_t start, size_t item_bytes, loom_error *error) {
    for (int64_t done = 0; done < num_items;) {
        int64_t count = NUM_NORMALS - start < num_items - done ? NUM_NORMALS - start : num_items - done;
        LOOM_TRY(NULL, loom__device_memory_upload(memory, (char *)data + (size_t)done * item_bytes,
                                                  block + (size_t)start * item_bytes,
                                                  (size_t)count * item_bytes, error));
        done += count;
        start = 0;
    }
    return LOOM_OK;
}

enum { NUM_TENSORS = 8 };

typedef struct tensor_row {
    loom_tensor *tensor;
    int64_t rows, seq, heads, dim;
    bool input, backward;
} tensor_row;

/* All but lse. */
static void list_tensors(const loom__reference *facts, const loom_shape *s, loom_args *args,
                         tensor_row list[NUM_TENSORS]) {
    int64_t d = facts->d, dv = facts->dv;
    int64_t rows_q = s->batch * s->seq_q * s->heads_q, rows_k = s->batch * s->seq_k * s->heads_kv;
    const tensor_row rows[NUM_TENSORS] = {{&args->q, rows_q, s->seq_q, s->heads_q, d, true, false},
                                          {&args->k, rows_k, s->seq_k, s->heads_kv, d, true, false},
                                          {&args->v, rows_k, s->seq_k, s->heads_kv, dv, true, false},
                                          {&args->o, rows_q, s->seq_q, s->heads_q, dv, false, false},
                                          {&args->dout, rows_q, s->seq_q, s->heads_q, dv, true, true},
                                          {&args->dq, rows_q, s->seq_q, s->heads_q, d, false, true},
                                          {&args->dk, rows_k, s->seq_k, s->heads_kv, d, false, true},
                                          {&args->dv, rows_k, s->seq_k, s->heads_kv, dv, false, true}};
    for (int i = 0; i < NUM_TENSORS; i++) list[i] = rows[i];
}

size_t loom__tensors_bytes(const loom__reference *facts, const loom_shape *shape) {
    tensor_row list[NUM_TENSORS];
    loom_args args = LOOM_ARGS_INIT;
    size_t bytes = 0;
    list_tensors(facts, shape, &args, list);
    for (int i = 0; i < NUM_TENSORS; i++) {
        if (!list[i].backward || facts->backward)
            bytes += (size_t)(list[i].rows * list[i].dim) * loom__storage_bytes(facts->dtype);
    }
    return bytes;
}

loom_status loom__tensors_make(loom__device_memory *memory, const loom__reference *facts, loom_args *args,
                               loom_error *error) {
    const loom_shape *s = &args->shape;
    size_t item_bytes = loom__storage_bytes(facts->dtype);
    tensor_row list[NUM_TENSORS];
    list_tensors(facts, s, args, list);
    char *block = make_normals(facts->dtype);
    loom_status status = LOOM_OK;
    void *data = NULL;
    if (!block) return loom__fail(error, LOOM_MEMORY, "tensors", "no memory for %d numbers", NUM_NORMALS);
    for (int i = 0; i < NUM_TENSORS && !status; i++) {
        int64_t items = list[i].rows * list[i].dim;
        if (list[i].backward && !facts->backward) continue;
        status = loom__device_memory_alloc(memory, (size_t)items * item_bytes, &data, error);
        *list[i].tensor = loom_dense(data, list[i].seq, list[i].heads, list[i].dim);
        if (!status && list[i].input)
            status = fill(memory, data, items, block, (int64_t)i * (NUM_NORMALS / 7), item_bytes, error);
    }
    free(block);
    size_t lse_bytes = (size_t)(s->batch * s->seq_q * s->heads_q) * sizeof(float);
    if (!status) status = loom__device_memory_alloc(memory, lse_bytes, &data, error);
    args->lse = loom_dense_lse(data, s->heads_q, s->seq_q);
    return status;
}

/* -- Params ---------------------------------------------------------------------------------------------- */

static double param_value(loom__storage storage, int64_t index, int64_t size, uint64_t *state) {
    switch (storage) {
    case LOOM__I32:
    case LOOM__I64: return (double)(index * 4 / (size ? size : 1));
    case LOOM__U8: return (double)(loom__random_bits(state) % 4);
    case LOOM__BOOL: return loom__random_bits(state) % 4 != 0;
    default: return loom__random_normal(state);
    }
}

static void store(void *data, loom__storage storage, int64_t index, double value) {
    switch (storage) {
    case LOOM__I32: ((int32_t *)data)[index] = (int32_t)value; break;
    case LOOM__I64: ((int64_t *)data)[index] = (int64_t)value; break;
    case LOOM__U8:
    case LOOM__BOOL: ((uint8_t *)data)[index] = (uint8_t)value; break;
    default: loom__element_set(data, storage, index, (float)value);
    }
}

int64_t loom__param_invent(const loom__param_facts *facts, const loom_shape *shape, uint64_t *state,
                           loom_param *param, void *data) {
    int64_t elements = 1, last = 1;
    if (!facts->num_dims) {
        param->scalar =
            facts->storage >= LOOM__I32 ? 1 + (double)(shape->seq_k / 3) : 0.5 + loom__random_uniform(state);
        return 0;
    }
    for (int axis = facts->num_dims - 1; axis >= 0; axis--) {
        param->stride[axis] = elements;
        elements *= loom__param_dim(facts, axis, shape);
        if (axis == facts->num_dims - 1) last = elements;
    }
    for (int64_t i = 0; data && i < elements; i++)
        store(data, facts->storage, i, param_value(facts->storage, i % (last ? last : 1), last, state));
    return elements;
}

loom_status loom__params_make(loom__device_memory *memory, const loom__reference *facts,
                              const loom_shape *shape, loom_param *params, loom_error *error) {
    uint64_t state = 1;
    for (int slot = 0; slot < facts->num_params; slot++) {
        const loom__param_facts *param = &facts->params[slot];
        if (!param->num_dims) {
            loom__param_invent(param, shape, &state, &params[slot], NULL);
            continue;
        }
        int64_t elements = loom__param_invent(param, shape, &state, &params[slot], NULL);
        size_t bytes = (size_t)elements * loom__storage_bytes(param->storage);
        void *host = malloc(bytes + 1), *data = NULL;
        if (!host) return loom__fail_memory(error);
        loom__param_invent(param, shape, &state, &params[slot], host);
        loom_status status = loom__device_memory_alloc(memory, bytes, &data, error);
        if (!status) status = loom__device_memory_upload(memory, data, host, bytes, error);
        params[slot].data = data;
        free(host);
        LOOM_TRY(NULL, status);
    }
    return LOOM_OK;
}
