/* npy.c - reads and writes .npy files and converts number formats. Called by run.c. Every length is checked
 * against what is there before it is used; a damaged file gives INVALID with its name and the reason. */
#include "npy.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { PREFIX_BYTES = 6, ALIGN_BYTES = 64 };
static const char MAGIC[PREFIX_BYTES + 1] = "\x93NUMPY";

static const struct {
    const char *name;
    size_t bytes;
} TYPES[] = {{"f2", 2}, {"f4", 4}, {"f8", 8}, {"i4", 4}, {"i8", 8}, {"u1", 1}, {"b1", 1}};
enum { NUM_TYPES = sizeof TYPES / sizeof TYPES[0] };

const char *loom__npy_type_name(loom__npy_type type) { return TYPES[type].name; }

size_t loom__npy_type_bytes(loom__npy_type type) { return TYPES[type].bytes; }

void loom__npy_free(loom__npy *array) {
    free(array->data);
    array->data = NULL;
}

/* -- Header --------------------------------------------------------------------------------------------- */

/* The header is a Python dict of three known keys; `at` never passes `end`. */
typedef struct cursor {
    const char *at, *end;
} cursor;

static void skip_blanks(cursor *c) {
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t')) c->at++;
}

static bool take(cursor *c, char wanted) {
    skip_blanks(c);
    if (c->at == c->end || *c->at != wanted) return false;
    c->at++;
    return true;
}

static bool take_word(cursor *c, const char *word) {
    size_t length = strlen(word);
    skip_blanks(c);
    if ((size_t)(c->end - c->at) < length || memcmp(c->at, word, length) != 0) return false;
    c->at += length;
    return true;
}

/* Text between quotes into out[capacity]. */
static bool take_string(cursor *c, char *out, size_t capacity) {
    skip_blanks(c);
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"')) return false;
    char quote = *c->at++;
    size_t length = 0;
    while (c->at < c->end && *c->at != quote) {
        if (length + 1 == capacity) return false;
        out[length++] = *c->at++;
    }
    out[length] = 0;
    return take(c, quote);
}

static bool take_whole(cursor *c, int64_t *value) {
    skip_blanks(c);
    const char *start = c->at;
    int64_t total = 0;
    while (c->at < c->end && *c->at >= '0' && *c->at <= '9') {
        if (total > (INT64_MAX - 9) / 10) return false;
        total = total * 10 + (*c->at++ - '0');
    }
    *value = total;
    return c->at != start;
}

static bool take_dims(cursor *c, loom__npy *array) {
    array->num_dims = 0;
    if (!take(c, '(')) return false;
    while (!take(c, ')')) {
        if (array->num_dims == LOOM__NPY_MAX_DIMS || !take_whole(c, &array->dims[array->num_dims++]))
            return false;
        if (!take(c, ',')) return take(c, ')');
    }
    return true;
}

/* Keys of the dict, in any order. */
static bool take_header(cursor *c, char *type, size_t capacity, bool *fortran, loom__npy *array) {
    bool has_type = false, has_order = false, has_dims = false;
    if (!take(c, '{')) return false;
    while (!take(c, '}')) {
        char key[32];
        if (!take_string(c, key, sizeof key) || !take(c, ':')) return false;
        if (strcmp(key, "descr") == 0 && !has_type) {
            has_type = take_string(c, type, capacity);
            if (!has_type) return false;
        } else if (strcmp(key, "fortran_order") == 0 && !has_order) {
            has_order = true;
            *fortran = take_word(c, "True");
            if (!*fortran && !take_word(c, "False")) return false;
        } else if (strcmp(key, "shape") == 0 && !has_dims) {
            has_dims = take_dims(c, array);
            if (!has_dims) return false;
        } else {
            return false;
        }
        if (!take(c, ',')) {
            if (!take(c, '}')) return false;
            break;
        }
    }
    skip_blanks(c);
    return c->at == c->end && has_type && has_order && has_dims;
}

static loom_status find_type(const char *name, const char *text, loom__npy_type *type, loom_error *error) {
    bool plain = text[0] == '<' || text[0] == '|' || text[0] == '=';
    if (text[0] == '>')
        return loom__fail(error, LOOM_INVALID, name, "type '%s' is big endian; save it in little endian",
                          text);
    for (int32_t i = 0; plain && i < NUM_TYPES; i++) {
        if (strcmp(text + 1, TYPES[i].name) == 0) {
            *type = (loom__npy_type)i;
            return LOOM_OK;
        }
    }
    return loom__fail(error, LOOM_INVALID, name, "type '%s' is not one of f2 f4 f8 i4 i8 u1 b1", text);
}

loom_status loom__npy_parse(const char *name, const void *bytes, size_t size, loom__npy *array,
                            loom_error *error) {
    const unsigned char *file = bytes;
    size_t start = 0, header_bytes = 0;
    char type[32];
    bool fortran = false;
    memset(array, 0, sizeof *array);
    if (size < PREFIX_BYTES + 4 || memcmp(file, MAGIC, PREFIX_BYTES) != 0)
        return loom__fail(error, LOOM_INVALID, name, "is not a .npy file: it does not begin with \\x93NUMPY");
    if (file[6] < 1 || file[6] > 3)
        return loom__fail(error, LOOM_INVALID, name, ".npy version %d is not 1, 2 or 3", file[6]);
    start = file[6] == 1 ? PREFIX_BYTES + 4 : PREFIX_BYTES + 6;
    header_bytes = (size_t)file[8] | (size_t)file[9] << 8;
    if (file[6] > 1 && size >= start) header_bytes |= (size_t)file[10] << 16 | (size_t)file[11] << 24;
    if (size < start || header_bytes > size - start)
        return loom__fail(error, LOOM_INVALID, name,
                          "is cut off: the header needs %zu bytes, the file has %zu", start + header_bytes,
                          size);
    cursor c = {(const char *)file + start, (const char *)file + start + header_bytes};
    if (!take_header(&c, type, sizeof type, &fortran, array))
        return loom__fail(error, LOOM_INVALID, name, "the header of the .npy file is damaged at byte %zu",
                          (size_t)(c.at - (const char *)file));
    LOOM_TRY(NULL, find_type(name, type, &array->type, error));
    if (fortran)
        return loom__fail(error, LOOM_INVALID, name,
                          "is in Fortran order; save it with numpy.ascontiguousarray");
    size_t data_bytes = TYPES[array->type].bytes;
    array->num_items = 1;
    for (int32_t i = 0; i < array->num_dims; i++) {
        if (data_bytes && (size_t)array->dims[i] > SIZE_MAX / 4 / data_bytes)
            return loom__fail(error, LOOM_INVALID, name, "its dimensions exceed the address space");
        data_bytes *= (size_t)array->dims[i];
        array->num_items *= array->dims[i];
    }
    size_t there = size - start - header_bytes;
    if (there != data_bytes)
        return loom__fail(error, LOOM_INVALID, name, "holds %zu bytes of data, its header says %zu", there,
                          data_bytes);
    array->num_bytes = data_bytes;
    array->data = malloc(data_bytes ? data_bytes : 1);
    if (!array->data) return loom__fail(error, LOOM_MEMORY, name, "no memory for %zu bytes", data_bytes);
    memcpy(array->data, file + start + header_bytes, data_bytes);
    return LOOM_OK;
}

/* -- Files ---------------------------------------------------------------------------------------------- */

loom_status loom__npy_read(const char *path, loom__npy *array, loom_error *error) {
    FILE *file = fopen(path, "rb");
    unsigned char *bytes = NULL;
    size_t size = 0, capacity = 0;
    loom_status status = LOOM_OK;
    memset(array, 0, sizeof *array);
    if (!file) return loom__fail(error, LOOM_IO, path, "cannot be read: %s", strerror(errno));
    do {
        if (size == capacity) {
            size_t larger = capacity ? capacity * 2 : 1u << 16;
            void *moved = realloc(bytes, larger);
            if (!moved) {
                status = loom__fail(error, LOOM_MEMORY, path, "no memory for %zu bytes", larger);
                goto out;
            }
            bytes = moved;
            capacity = larger;
        }
        size += fread(bytes + size, 1, capacity - size, file);
    } while (size == capacity);
    if (ferror(file)) {
        status = loom__fail(error, LOOM_IO, path, "cannot be read: %s", strerror(errno));
        goto out;
    }
    status = loom__npy_parse(path, bytes, size, array, error);
out:
    free(bytes);
    fclose(file);
    return status;
}

loom_status loom__npy_write(const char *path, const loom__npy *array, loom_error *error) {
    char header[512];
    char *file = NULL;
    size_t length = 0, start = PREFIX_BYTES + 4;
    const char *order = TYPES[array->type].bytes == 1 ? "|" : "<";
    length = (size_t)snprintf(header, sizeof header, "{'descr': '%s%s', 'fortran_order': False, 'shape': (",
                              order, TYPES[array->type].name);
    for (int32_t i = 0; i < array->num_dims; i++)
        length += (size_t)snprintf(header + length, sizeof header - length, "%lld,%s",
                                   (long long)array->dims[i], i + 1 < array->num_dims ? " " : "");
    length += (size_t)snprintf(header + length, sizeof header - length, "), }");
    // The data begins at a multiple of 64, and the header ends with a line feed.
    size_t header_bytes = (start + length + 1 + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES - start;
    size_t size = start + header_bytes + array->num_bytes;
    file = malloc(size);
    if (!file) return loom__fail(error, LOOM_MEMORY, path, "no memory for %zu bytes", size);
    memcpy(file, MAGIC, PREFIX_BYTES);
    file[6] = 1;
    file[7] = 0;
    file[8] = (char)(header_bytes & 255);
    file[9] = (char)(header_bytes >> 8);
    memcpy(file + start, header, length);
    memset(file + start + length, ' ', header_bytes - length - 1);
    file[start + header_bytes - 1] = '\n';
    memcpy(file + start + header_bytes, array->data, array->num_bytes);
    loom_status status = loom__cli_write_file(path, file, size, error);
    free(file);
    return status;
}

/* -- Conversion ----------------------------------------------------------------------------------------- */

/* What a storage holds, in the order of loom__storage; limits of whole numbers. */
static const struct {
    const char *name;
    bool floating;
    int64_t least, most;
} STORAGES[] = {{"f32", true, 0, 0},
                {"f16", true, 0, 0},
                {"bf16", true, 0, 0},
                {"i32", false, INT32_MIN, INT32_MAX},
                {"i64", false, INT64_MIN, INT64_MAX},
                {"u8", false, 0, UINT8_MAX},
                {"bool", false, INT64_MIN, INT64_MAX}};

/* Item of a float file. f8 is rounded to float first. */
static float item_f32(const loom__npy *array, int64_t i) {
    switch (array->type) {
    case LOOM__NPY_F2: return loom__fp16_to_float(((const uint16_t *)array->data)[i]);
    case LOOM__NPY_F4: return ((const float *)array->data)[i];
    default: return (float)((const double *)array->data)[i];
    }
}

static int64_t item_whole(const loom__npy *array, int64_t i) {
    switch (array->type) {
    case LOOM__NPY_I4: return ((const int32_t *)array->data)[i];
    case LOOM__NPY_I8: return ((const int64_t *)array->data)[i];
    default: return ((const uint8_t *)array->data)[i];
    }
}

static void store_whole(loom__storage storage, void *data, int64_t i, int64_t value) {
    switch (storage) {
    case LOOM__I32: ((int32_t *)data)[i] = (int32_t)value; break;
    case LOOM__I64: ((int64_t *)data)[i] = value; break;
    case LOOM__BOOL: ((uint8_t *)data)[i] = value != 0; break;
    default: ((uint8_t *)data)[i] = (uint8_t)value; break;
    }
}

loom_status loom__npy_convert(const char *name, const loom__npy *array, loom__storage storage, void **data,
                              loom_error *error) {
    bool floating = STORAGES[storage].floating;
    bool float_file =
        array->type == LOOM__NPY_F2 || array->type == LOOM__NPY_F4 || array->type == LOOM__NPY_F8;
    if (floating != float_file)
        return loom__fail(error, LOOM_INVALID, name, "holds %s, but %s is wanted", TYPES[array->type].name,
                          STORAGES[storage].name);
    size_t size = (size_t)array->num_items * loom__storage_bytes(storage);
    void *out = malloc(size ? size : 1);
    if (!out) return loom__fail(error, LOOM_MEMORY, name, "no memory for %zu bytes", size);
    for (int64_t i = 0; i < array->num_items; i++) {
        if (floating) {
            loom__element_set(out, storage, i, item_f32(array, i));
            continue;
        }
        int64_t value = item_whole(array, i);
        if (value < STORAGES[storage].least || value > STORAGES[storage].most) {
            free(out);
            return loom__fail(error, LOOM_INVALID, name, "item %lld is %lld, which %s does not hold",
                              (long long)i, (long long)value, STORAGES[storage].name);
        }
        store_whole(storage, out, i, value);
    }
    *data = out;
    return LOOM_OK;
}
