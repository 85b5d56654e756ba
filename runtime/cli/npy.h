/* npy.h - arrays in NumPy's .npy files, versions 1 to 3, C order, little endian.
 * Called by `attnloom run` and the tests. A file that is not such an array is refused by name and reason. */
#ifndef LOOM_CLI_NPY_H
#define LOOM_CLI_NPY_H

#include <stddef.h>
#include <stdint.h>

#include "reference.h"

typedef enum loom__npy_type {
    LOOM__NPY_F2,
    LOOM__NPY_F4,
    LOOM__NPY_F8,
    LOOM__NPY_I4,
    LOOM__NPY_I8,
    LOOM__NPY_U1,
    LOOM__NPY_B1
} loom__npy_type;

enum { LOOM__NPY_MAX_DIMS = 8 };

typedef struct loom__npy {
    loom__npy_type type;
    int32_t num_dims;
    int64_t dims[LOOM__NPY_MAX_DIMS];
    int64_t num_items;
    size_t num_bytes;
    void *data; /* from malloc; owned by the caller of read and parse */
} loom__npy;

/* "f4" and so on; bytes of one item. */
const char *loom__npy_type_name(loom__npy_type type);
size_t loom__npy_type_bytes(loom__npy_type type);

/* `name` stands for the bytes in messages. On success array->data is to be freed by loom__npy_free. */
loom_status loom__npy_parse(const char *name, const void *bytes, size_t size, loom__npy *array,
                            loom_error *error);
loom_status loom__npy_read(const char *path, loom__npy *array, loom_error *error);
loom_status loom__npy_write(const char *path, const loom__npy *array, loom_error *error);
void loom__npy_free(loom__npy *array);

/* -- Conversion ----------------------------------------------------------------------------------------- */

/* Converts all items into new memory of the given storage (floats round to nearest even). INVALID when kinds
 * do not mix (a float file for an integer param) or a whole number does not fit. *data is to be freed. */
loom_status loom__npy_convert(const char *name, const loom__npy *array, loom__storage storage, void **data,
                              loom_error *error);

#endif
