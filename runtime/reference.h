/* reference.h - attention in float64, and the meaning of mask and score text, without the generator.
 *
 * Owns: conversions of the storage types, an evaluator of canonical expressions, plain attention forward and
 * backward in double, and the same computed at the problem's own precision as a yardstick of error. Nothing
 * here looks at gen/, so that a fault there cannot hide. Called by the command line and by tests; no global
 * state, any thread. Fails by loom_status with the field "reference.*".
 */
#ifndef LOOM_REFERENCE_H
#define LOOM_REFERENCE_H

#include <stdbool.h>

#include "attnloom.h"

/* -- Storage types --------------------------------------------------------------------------------------- */

typedef enum loom__storage {
    LOOM__F32,
    LOOM__F16,
    LOOM__BF16,
    LOOM__I32,
    LOOM__I64,
    LOOM__U8,
    LOOM__BOOL
} loom__storage;

size_t loom__storage_bytes(loom__storage storage);

/* Exact towards float; round to nearest even towards 16 bits, overflow to infinity, NaN stays NaN. */
float loom__bf16_to_float(uint16_t bits);
uint16_t loom__float_to_bf16(float value);
float loom__fp16_to_float(uint16_t bits);
uint16_t loom__float_to_fp16(float value);

/* Element `index` of an array of F32, F16 or BF16. */
float loom__element_get(const void *data, loom__storage storage, int64_t index);
void loom__element_set(void *data, loom__storage storage, int64_t index, float value);

/* -- Expressions ----------------------------------------------------------------------------------------- */

enum { LOOM__MAX_PARAMS = 32, LOOM__MAX_DIMS = 4 };

typedef struct loom__param_facts {
    char name[64];
    loom__storage storage;
    int num_dims; /* 0: a scalar */
    char dims[LOOM__MAX_DIMS][48];
} loom__param_facts;

typedef enum loom__type { LOOM__TYPE_I32, LOOM__TYPE_F32, LOOM__TYPE_BOOL } loom__type;

/* How f32 operations are done: rounded to float one by one (masks), or in double (scores of the reference). Slopes
 * likewise: where the two differ, cancellation leaves a kernel no digits to be held to. */
typedef enum loom__arithmetic { LOOM__ROUNDED, LOOM__DOUBLE } loom__arithmetic;

typedef struct loom__expression loom__expression;

loom_status loom__expression_create(const char *text, const loom__param_facts *params, int num_params,
                                    loom__expression **expression, loom_error *error);
void loom__expression_destroy(loom__expression *expression);
loom__type loom__expression_type(const loom__expression *expression);

/* Where an expression is evaluated. `params` has one row per name given at creation. */
typedef struct loom__point {
    const loom_shape *shape;
    const loom_param *params;
    int32_t q, k, row, col, b, h, hkv;
    double s;
} loom__point;

typedef struct loom__value {
    int32_t i;    /* i32 and bool */
    double f;     /* f32 */
    double slope; /* d/ds, 0 for i32 and bool */
} loom__value;

loom__value loom__expression_value(const loom__expression *expression, loom__arithmetic arithmetic,
                                   const loom__point *point);

/* -- Problems and attention ------------------------------------------------------------------------------ */

/* What the reference read from a canonical problem text. */
typedef struct loom__reference {
    loom__storage dtype;
    int d, dv;
    bool backward, deterministic;
    loom__expression *mask, *score; /* NULL: none */
    int num_params;
    loom__param_facts params[LOOM__MAX_PARAMS];
} loom__reference;

loom_status loom__reference_create(const char *canonical, loom__reference **reference, loom_error *error);
void loom__reference_destroy(loom__reference *reference);

/* Size of one dimension of a param for a shape. */
int64_t loom__param_dim(const loom__param_facts *param, int axis, const loom_shape *shape);

/* Dense double: o dq [batch, seq_q, heads_q, .], dk dv [batch, seq_k, heads_kv, .], lse [batch, heads_q,
 * seq_q]. */
typedef struct loom__reference_result {
    double *o, *lse, *dq, *dk, *dv;
} loom__reference_result;

typedef enum loom__precision {
    LOOM__FLOAT64,   /* the reference */
    LOOM__SAME_DTYPE /* float accumulation; P, dS and the outputs rounded to the problem's dtype */
} loom__precision;

/* Reads q k v, params and with `backward` dout and dlse of args, all host memory; o and lse of args are not
 * read: backward starts from its own. result is allocated here; free it by loom__reference_result_free. */
loom_status loom__reference_run(const loom__reference *reference, const loom_args *args, bool backward,
                                loom__precision precision, int num_threads, loom__reference_result *result,
                                loom_error *error);
void loom__reference_result_free(loom__reference_result *result);

#endif
