/* problem.c - facts of a problem and its params from options --param. Called by run.c and bench.c. */
#include "problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

loom_status loom__cli_problem_facts(loom_context *context, const char *problem, loom__reference **facts,
                                    loom_error *error) {
    size_t needed = 0;
    loom_problem_canonical(context, problem, NULL, 0, &needed,
                           NULL); // fails for want of room, or again below
    char *text = malloc(needed + 1);
    if (!text) return loom__fail(error, LOOM_MEMORY, "problem", "no memory for %zu bytes", needed);
    loom_status status = loom_problem_canonical(context, problem, text, needed + 1, NULL, error);
    if (!status) status = loom__reference_create(text, facts, error);
    free(text);
    return status;
}

/* -- Params --------------------------------------------------------------------------------------------- */

/* What stands after NAME= in an option --param, NULL when the name is not given. */
static const char *param_value(const loom__cli_texts *given, const char *name) {
    size_t length = strlen(name);
    for (int32_t i = 0; i < given->num; i++) {
        const char *item = given->items[i];
        if (strncmp(item, name, length) == 0 && item[length] == '=') return item + length + 1;
    }
    return NULL;
}

static loom_status read_scalar(const loom__param_facts *facts, const char *text, loom_param *param,
                               loom_error *error) {
    char *end = NULL;
    param->scalar = strtod(text, &end);
    bool whole = facts->storage != LOOM__F32;
    if (end == text || *end ||
        (whole && (param->scalar != floor(param->scalar) || fabs(param->scalar) > 0x1p31)))
        return loom__fail(error, LOOM_INVALID, "--param", "%s=%s is not a number of type %s", facts->name,
                          text, whole ? "i32" : "f32");
    return LOOM_OK;
}

static loom_status read_array(const loom__param_facts *facts, const loom_shape *shape, const char *path,
                              loom__npy *file, loom_param *param, loom_error *error) {
    LOOM_TRY(NULL, loom__npy_read(path, file, error));
    if (file->num_dims != facts->num_dims)
        return loom__fail(error, LOOM_INVALID, "--param", "%s: %s has %d dimensions, the problem says %d",
                          facts->name, path, file->num_dims, facts->num_dims);
    int64_t stride = 1;
    for (int32_t i = facts->num_dims - 1; i >= 0; i--) {
        int64_t wanted = loom__param_dim(facts, i, shape);
        if (file->dims[i] != wanted)
            return loom__fail(error, LOOM_INVALID, "--param", "%s: dimension %d of %s is %lld, %s is %lld",
                              facts->name, i, path, (long long)file->dims[i], facts->dims[i],
                              (long long)wanted);
        param->stride[i] = stride;
        stride *= wanted;
    }
    return LOOM_OK;
}

loom_status loom__cli_params_read(loom__cli_params *params, const loom__reference *facts,
                                  const loom_shape *shape, const loom__cli_texts *given, loom_error *error) {
    for (int32_t i = 0; i < given->num; i++) {
        const char *item = given->items[i];
        size_t length = strcspn(item, "=");
        bool known = false;
        for (int32_t slot = 0; slot < facts->num_params; slot++) {
            const char *name = facts->params[slot].name;
            known = known || (strlen(name) == length && strncmp(name, item, length) == 0);
        }
        if (!known || !item[length])
            return loom__fail(error, LOOM_INVALID, "--param",
                              "'%s' is not NAME=FILE or NAME=NUMBER with a NAME of "
                              "the problem's params",
                              item);
    }
    for (int32_t slot = 0; slot < facts->num_params; slot++) {
        const loom__param_facts *param = &facts->params[slot];
        const char *value = param_value(given, param->name);
        if (!value)
            return loom__fail(error, LOOM_INVALID, "--param",
                              "the problem has a parameter %s; give --param %s=%s", param->name, param->name,
                              param->num_dims ? "FILE" : "NUMBER");
        if (param->num_dims)
            LOOM_TRY(NULL,
                     read_array(param, shape, value, &params->files[slot], &params->items[slot], error));
        else
            LOOM_TRY(NULL, read_scalar(param, value, &params->items[slot], error));
    }
    return LOOM_OK;
}

loom_status loom__cli_upload_npy(loom__device_memory *memory, const char *field, loom__npy *file,
                                 loom__storage storage, void **data, loom_error *error) {
    size_t bytes = (size_t)file->num_items * loom__storage_bytes(storage);
    void *host = NULL;
    LOOM_TRY(NULL, loom__npy_convert(field, file, storage, &host, error));
    loom_status status = loom__device_memory_alloc(memory, bytes, data, error);
    if (!status) status = loom__device_memory_upload(memory, *data, host, bytes, error);
    free(host);
    loom__npy_free(file);
    return status;
}

loom_status loom__cli_params_upload(loom__cli_params *params, const loom__reference *facts,
                                    loom__device_memory *memory, loom_error *error) {
    for (int32_t slot = 0; slot < facts->num_params; slot++) {
        const loom__param_facts *param = &facts->params[slot];
        void *data = NULL;
        if (!param->num_dims) continue;
        LOOM_TRY(NULL, loom__cli_upload_npy(memory, param->name, &params->files[slot], param->storage, &data,
                                            error));
        params->items[slot].data = data;
    }
    return loom__device_memory_sync(memory, error); /* launches may be in another stream */
}

void loom__cli_params_free(loom__cli_params *params) {
    for (int32_t i = 0; i < LOOM__MAX_PARAMS; i++) loom__npy_free(&params->files[i]);
}
