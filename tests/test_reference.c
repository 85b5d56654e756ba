/* test_reference.c - the reference itself: conversions, meaning of expressions, attention worked out by hand,
 * and gradients against difference quotients. Nothing here uses the generator. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../runtime/reference.h"

#define COUNT(x) (sizeof(x) / sizeof *(x))

/* -- Conversions ----------------------------------------------------------------------------------------- */

static void conversions_round_trip(void **state) {
    (void)state;
    for (int bits = 0; bits < 65536; bits++) {
        float half = loom__fp16_to_float((uint16_t)bits), brain = loom__bf16_to_float((uint16_t)bits);
        if (isnan(half))
            assert_true(isnan(loom__fp16_to_float(loom__float_to_fp16(half))));
        else
            assert_int_equal(loom__float_to_fp16(half), bits);
        if (isnan(brain))
            assert_true(isnan(loom__bf16_to_float(loom__float_to_bf16(brain))));
        else
            assert_int_equal(loom__float_to_bf16(brain), bits);
    }
}

static void conversions_round_to_even(void **state) {
    (void)state;
    const struct {
        float value;
        int bits;
    } fp16[] = {{1.0f, 0x3c00},         {65504.0f, 0x7bff},       {65519.996f, 0x7bff},
                {65520.0f, 0x7c00},     {-INFINITY, 0xfc00},      {0x1p-24f, 0x0001},
                {0x1p-25f, 0x0000},     {0x1.8p-25f, 0x0001},     {0x1.8p-24f, 0x0002},
                {-0.0f, 0x8000},        {1.00048828125f, 0x3c00}, {1.00146484375f, 0x3c02},
                {0x1.ff8p-15f, 0x03ff}, {0x1.ffcp-15f, 0x0400},   {0x1p-14f, 0x0400},
                {-2.5f, 0xc100}},
      bf16[] = {{1.0f, 0x3f80},    {133120.0f, 0x4802}, {1.00390625f, 0x3f80}, {1.01171875f, 0x3f82},
                {3.4e38f, 0x7f80}, {INFINITY, 0x7f80},  {-0.0f, 0x8000},       {0x1.02p-1f, 0x3f01}};
    for (size_t i = 0; i < COUNT(fp16); i++)
        assert_int_equal(loom__float_to_fp16(fp16[i].value), fp16[i].bits);
    for (size_t i = 0; i < COUNT(bf16); i++)
        assert_int_equal(loom__float_to_bf16(bf16[i].value), bf16[i].bits);
    assert_true(isnan(loom__bf16_to_float(loom__float_to_bf16(NAN))));
    assert_true(isnan(loom__fp16_to_float(loom__float_to_fp16(NAN))));
}

/* -- Expressions ----------------------------------------------------------------------------------------- */

static const loom__param_facts params[] = {{"doc", LOOM__I32, 1, {"seq_k"}},
                                           {"grid", LOOM__F32, 2, {"heads_q", "ceil(seq_k/4)"}},
                                           {"cap", LOOM__F32, 0, {""}},
                                           {"width", LOOM__I32, 0, {""}},
                                           {"open", LOOM__BOOL, 1, {"8"}}};
static const int32_t doc[10] = {0, 0, 1, 1, 1, 2, 2, 2, 2, -7};
static const float grid[6] = {0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f};
static const uint8_t open_flags[8] = {1, 0, 0, 1, 1, 1, 0, 1};
static const loom_shape shape = {1, 2, 1, 7, 10};
static const loom_param values[] = {{.data = doc, .stride = {1}},
                                    {.data = grid, .stride = {3, 1}},
                                    {.scalar = 20.0},
                                    {.scalar = 3},
                                    {.data = open_flags, .stride = {1}}};

static loom__value value_of(const char *text, loom__arithmetic arithmetic, int32_t q, int32_t k, double s) {
    loom__expression *expression = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom__point point = {&shape, values, q, k, (int32_t)((uint32_t)q - 3), k, 0, 1, 0, s};
    if (loom__expression_create(text, params, COUNT(params), &expression, &error))
        fail_msg("%s: %s", text, error.text);
    loom__value value = loom__expression_value(expression, arithmetic, &point);
    loom__expression_destroy(expression);
    return value;
}

static void whole_numbers_have_the_design_s_meaning(void **state) {
    (void)state;
    const struct {
        const char *text;
        int32_t q, k, expected;
    } rows[] = {
        {"k <= q", 3, 3, 1},
        {"k <= q", 3, 4, 0},
        {"q - 2 * 3 + k", 10, 1, 5},
        {"q / 4", -1, 0, -1},
        {"q / -4", 5, 0, -2},
        {"q / 0", 5, 0, 0},
        {"q % 4", -1, 0, 3},
        {"q % -4", 5, 0, -3},
        {"q % 0", 5, 0, 0},
        {"q / k", INT32_MIN, -1, INT32_MIN},
        {"q % k", INT32_MIN, -1, 0},
        {"q * k", 65536, 65536, 0},
        {"q * k", 65537, 65536, 65536},
        {"q + 1", INT32_MAX, 0, INT32_MIN},
        {"-q", INT32_MIN, 0, INT32_MIN},
        {"abs(q)", INT32_MIN, 0, INT32_MIN},
        {"abs(q)", -5, 0, 5},
        {"min(q, k)", 4, -2, -2},
        {"max(q, k)", 4, -2, 4},
        {"xor(q, k)", 12, 10, 6},
        {"popcount(q)", -1, 0, 32},
        {"q < k & k < 9 | q == 7", 7, 0, 1},
        {"!(q < k) & k < 9", 7, 9, 0},
        {"q < k ? 3 : q > 5 ? 4 : 5", 6, 2, 4},
        {"doc[k]", 0, 4, 1},
        {"doc[k]", 0, 10, 0},
        {"doc[k - 5]", 0, 4, 0},
        {"doc[q] == doc[k]", 5, 8, 1},
        {"open[k]", 0, 3, 1},
        {"open[k]", 0, 8, 0},
        {"k <= q + width", 3, 6, 1},
        {"k <= q + width", 3, 7, 0},
        {"seq_q * 100 + seq_k", 0, 0, 710},
        {"row * 10 + col", 5, 4, 24},
        {"h - hkv + b", 0, 0, 1},
        {"i32(2.9)", 0, 0, 2},
        {"i32(-2.9)", 0, 0, -2},
        {"i32(3e9)", 0, 0, INT32_MAX},
        {"i32(-3e9)", 0, 0, INT32_MIN},
        {"i32(0.0 / 0.0)", 0, 0, 0},
        {"0.0 / 0.0 != 1.0", 0, 0, 0},
        {"0.0 / 0.0 <= 1.0", 0, 0, 0},
        {"!(0.0 / 0.0 <= 1.0)", 0, 0, 1},
        {"f32(q) == f32(k)", 16777217, 16777216, 1},
        {"0.1 + 0.2 == 0.3", 0, 0, 1}, /* so in float, not so in double */
        {"f32(q) * 0.1 == 0.7", 7, 0, 1},
        {"min(0.0 / 0.0, 2.0) == 2.0 & max(2.0, 0.0 / 0.0) == 2.0", 0, 0, 1},
        {"-2147483648", 0, 0, INT32_MIN},
        {"true & !false", 0, 0, 1},
        {"q & k | 16", 12, 10, 24},
        {"popcount(xor(hash(q, k, 7), hash(q, k, 7)))", 3, 9, 0},
        {"hash(0, 0, 1640531527)", 0, 0, 0}, /* the seed cancels the constant, and 0 mixes to 0 */
        {"-inf < f32(q) & f32(q) < inf", 5, 0, 1},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        int32_t got = value_of(rows[i].text, LOOM__ROUNDED, rows[i].q, rows[i].k, 0).i;
        if (got != rows[i].expected)
            fail_msg("%s at q=%d k=%d: %d, not %d", rows[i].text, rows[i].q, rows[i].k, got,
                     rows[i].expected);
    }
}

static void reals_are_rounded_in_masks_only(void **state) {
    (void)state;
    float third = 1.0f / 3.0f, sum = third + 1e-9f;
    assert_true(value_of("1.0 / 3.0 + 1e-9", LOOM__ROUNDED, 0, 0, 0).f == (double)sum);
    assert_true(value_of("1.0 / 3.0 + 1e-9", LOOM__DOUBLE, 0, 0, 0).f != (double)sum);
    assert_true(value_of("grid[h, col / 4] + s", LOOM__DOUBLE, 0, 9, 0.25).f == 5.75);
    assert_true(value_of("grid[h, 3]", LOOM__DOUBLE, 0, 9, 0).f == 0);
    assert_true(value_of("floor(-1.5)", LOOM__DOUBLE, 0, 0, 0).f == -2);
}

static void slopes_match_difference_quotients(void **state) {
    (void)state;
    const char *const smooth[] = {"cap * tanh(s / cap)",
                                  "s * s - 3.0 * s",
                                  "exp(s) / (1.0 + exp(s))",
                                  "log(1.0 + s * s)",
                                  "sqrt(2.0 + s) * f32(q)",
                                  "sin(s) * cos(s / 2.0)",
                                  "s > 1.0 ? 2.0 * s : s",
                                  "max(s, 1.0) * min(s, 9.0)",
                                  "abs(s - 4.0)",
                                  "s - 0.125 * f32(abs(q - k))",
                                  "max(2.0 / s, s)"};
    const double step = 1e-5;
    for (size_t i = 0; i < COUNT(smooth); i++) {
        for (double s = 0.3; s < 6; s += 0.45) {
            double low = value_of(smooth[i], LOOM__DOUBLE, 5, 2, s - step).f;
            double high = value_of(smooth[i], LOOM__DOUBLE, 5, 2, s + step).f;
            double slope = value_of(smooth[i], LOOM__DOUBLE, 5, 2, s).slope,
                   quotient = (high - low) / (2 * step);
            if (fabs(slope - quotient) > 1e-6 * (1 + fabs(quotient)))
                fail_msg("d/ds of %s at %g: %.9g, not %.9g", smooth[i], s, slope, quotient);
        }
    }
}

static void slopes_at_ties_take_the_left(void **state) {
    (void)state;
    assert_true(value_of("abs(s)", LOOM__DOUBLE, 0, 0, 0).slope == 1);
    assert_true(value_of("max(s, 2.0)", LOOM__DOUBLE, 0, 0, 2).slope == 1);
    assert_true(value_of("max(2.0, s)", LOOM__DOUBLE, 0, 0, 2).slope == 0);
    assert_true(value_of("min(s, 2.0)", LOOM__DOUBLE, 0, 0, 2).slope == 1);
    assert_true(value_of("min(2.0, s)", LOOM__DOUBLE, 0, 0, 2).slope == 0);
    assert_true(value_of("floor(s)", LOOM__DOUBLE, 0, 0, 2.5).slope == 0);
    assert_true(value_of("s + log(f32(k))", LOOM__DOUBLE, 0, 0, 1).slope ==
                1); /* the constant is -inf, not s */
}

static void bad_expressions_are_refused(void **state) {
    (void)state;
    const char *const texts[] = {"",          "k <=",  "(k",       "foo + 1",   "min(k)", "doc",
                                 "doc[k, q]", "k ? 1", "k <= q q", "k & q < 3", "cap[0]", "99999999999"};
    for (size_t i = 0; i < COUNT(texts); i++) {
        loom__expression *expression = NULL;
        loom_error error = LOOM_ERROR_INIT;
        assert_int_equal(loom__expression_create(texts[i], params, COUNT(params), &expression, &error),
                         LOOM_INVALID);
        assert_string_equal(error.field, "reference.expression");
    }
}

/* -- Attention ------------------------------------------------------------------------------------------- */

static void problem_texts_are_read(void **state) {
    (void)state;
    loom__reference *r = NULL;
    assert_int_equal(loom__reference_create(
                         "fp16 d=192:128 mask={doc[q] == doc[k] & k <= q + w} score={s + bias[h, row, col]} "
                         "params={doc: i32[seq_k], w: i32, bias: bf16[heads_q, ceil(seq_q/64), 64]} "
                         "backward deterministic",
                         &r, NULL),
                     LOOM_OK);
    assert_int_equal(r->dtype, LOOM__F16);
    assert_int_equal(r->d, 192);
    assert_int_equal(r->dv, 128);
    assert_true(r->backward && r->deterministic && r->mask && r->score);
    assert_int_equal(r->num_params, 3);
    assert_int_equal(r->params[1].num_dims, 0);
    assert_int_equal(r->params[2].num_dims, 3);
    assert_int_equal(r->params[2].storage, LOOM__BF16);
    loom_shape s = {3, 5, 1, 65, 9};
    assert_int_equal(loom__param_dim(&r->params[0], 0, &s), 9);
    assert_int_equal(loom__param_dim(&r->params[2], 0, &s), 5);
    assert_int_equal(loom__param_dim(&r->params[2], 1, &s), 2);
    assert_int_equal(loom__param_dim(&r->params[2], 2, &s), 64);
    loom__reference_destroy(r);
    assert_int_equal(loom__reference_create("fp32 d=8 fast", &r, NULL), LOOM_INVALID);
    assert_int_equal(loom__reference_create("fp32 d=8 mask={k <= q", &r, NULL), LOOM_INVALID);
}

/* Two queries, three keys, causal, d = 8 with only the first channel used. Row 0 (q = 1) sees keys 0 and 1
 * with logits 0 and ln 3, so P = 1/4, 3/4; row 1 sees all three. */
static void attention_by_hand(void **state) {
    (void)state;
    float q[2 * 8] = {0}, k[3 * 8] = {0}, v[3 * 8] = {0}, dout[2 * 8] = {0}, dlse[2] = {0, 0};
    q[0] = 1, q[8] = 2;
    k[8] = logf(3);
    k[16] = NAN; /* row 0 must not see it; row 1 is spoiled */
    v[0] = 4, v[8] = 8, v[16] = 1;
    dout[0] = 1;
    loom__reference *r = NULL;
    loom_args args = LOOM_ARGS_INIT;
    loom__reference_result result;
    assert_int_equal(loom__reference_create("fp32 d=8 mask={k <= q} backward", &r, NULL), LOOM_OK);
    args.shape = (loom_shape){1, 1, 1, 2, 3};
    args.scale = 1;
    args.q = loom_dense(q, 2, 1, 8);
    args.k = loom_dense(k, 3, 1, 8);
    args.v = loom_dense(v, 3, 1, 8);
    args.dout = loom_dense(dout, 2, 1, 8);
    args.dlse = loom_dense_lse(dlse, 1, 2);
    assert_int_equal(loom__reference_run(r, &args, true, LOOM__FLOAT64, 1, &result, NULL), LOOM_OK);
    double ln3 = (double)logf(3);
    assert_true(fabs(result.o[0] - 7) < 1e-6);
    assert_true(fabs(result.lse[0] - log(4)) < 1e-6);
    assert_true(isnan(result.o[8]) && isnan(result.lse[1]));
    /* delta = 7, dS = {1/4 (4 - 7), 3/4 (8 - 7)} = {-3/4, 3/4}; dQ = 3/4 ln 3 */
    assert_true(fabs(result.dq[0] - 0.75 * ln3) < 1e-6);
    loom__reference_result_free(&result);
    /* Without row 1: keys get dS of row 0 alone, key 2 nothing. */
    args.shape.seq_q = 1;
    args.q_start = 1;
    dlse[0] = 4; /* adds P * 4 to dS: {1/4, 15/4} */
    assert_int_equal(loom__reference_run(r, &args, true, LOOM__FLOAT64, 1, &result, NULL), LOOM_OK);
    assert_true(fabs(result.dk[0] - 0.25) < 1e-6 && fabs(result.dk[8] - 3.75) < 1e-6 && result.dk[16] == 0);
    assert_true(fabs(result.dv[0] - 0.25) < 1e-6 && fabs(result.dv[8] - 0.75) < 1e-6 && result.dv[16] == 0);
    loom__reference_result_free(&result);
    /* A row before every key sees nothing. */
    args.q_start = -5;
    assert_int_equal(loom__reference_run(r, &args, true, LOOM__FLOAT64, 1, &result, NULL), LOOM_OK);
    assert_true(result.o[0] == 0 && isinf(result.lse[0]) && result.lse[0] < 0 && result.dq[0] == 0 &&
                result.dk[8] == 0);
    loom__reference_result_free(&result);
    loom__reference_destroy(r);
}

enum { BATCH = 2, HEADS_Q = 4, HEADS_KV = 2, SEQ_Q = 5, SEQ_K = 70, D = 8, DV = 16 };

static float noise(uint32_t *seed) {
    float sum = 0;
    for (int i = 0; i < 6; i++) sum += (float)((*seed = *seed * 1664525u + 1013904223u) >> 8) * 0x1p-24f;
    return (sum - 3) * 1.4f;
}

typedef struct tensors {
    float q[BATCH * SEQ_Q * HEADS_Q * D], k[BATCH * SEQ_K * HEADS_KV * D], v[BATCH * SEQ_K * HEADS_KV * DV];
    float dout[BATCH * SEQ_Q * HEADS_Q * DV], dlse[BATCH * HEADS_Q * SEQ_Q];
} tensors;

static void fill_tensors(tensors *t, loom_args *args) {
    uint32_t seed = 7;
    float *all = (float *)t;
    for (size_t i = 0; i < sizeof *t / sizeof(float); i++) all[i] = noise(&seed);
    args->shape = (loom_shape){BATCH, HEADS_Q, HEADS_KV, SEQ_Q, SEQ_K};
    args->q = loom_dense(t->q, SEQ_Q, HEADS_Q, D);
    args->k = loom_dense(t->k, SEQ_K, HEADS_KV, D);
    args->v = loom_dense(t->v, SEQ_K, HEADS_KV, DV);
    args->dout = loom_dense(t->dout, SEQ_Q, HEADS_Q, DV);
    args->dlse = loom_dense_lse(t->dlse, HEADS_Q, SEQ_Q);
}

static double loss(const loom__reference *r, const loom_args *args, const tensors *t) {
    loom__reference_result result;
    double sum = 0;
    assert_int_equal(loom__reference_run(r, args, false, LOOM__FLOAT64, 1, &result, NULL), LOOM_OK);
    for (size_t i = 0; i < COUNT(t->dout); i++) sum += result.o[i] * t->dout[i];
    for (size_t i = 0; i < COUNT(t->dlse); i++) sum += result.lse[i] * t->dlse[i];
    loom__reference_result_free(&result);
    return sum;
}

static void gradients_match_difference_quotients(void **state) {
    (void)state;
    static tensors t;
    loom__reference *r = NULL;
    loom_args args = LOOM_ARGS_INIT;
    loom__reference_result result;
    fill_tensors(&t, &args);
    assert_int_equal(
        loom__reference_create("fp32 d=8:16 mask={k <= q & q - k < 60} score={5.0 * tanh(s / 5.0)} backward",
                               &r, NULL),
        LOOM_OK);
    assert_int_equal(loom__reference_run(r, &args, true, LOOM__FLOAT64, 2, &result, NULL), LOOM_OK);
    const struct {
        float *input;
        const double *gradient;
        size_t size;
    } rows[] = {{t.q, result.dq, COUNT(t.q)}, {t.k, result.dk, COUNT(t.k)}, {t.v, result.dv, COUNT(t.v)}};
    const float step = 0x1p-10f;
    for (size_t i = 0; i < COUNT(rows); i++) {
        for (size_t j = 3; j < rows[i].size; j += rows[i].size / 23) {
            float before = rows[i].input[j], low = before - step, high = before + step;
            rows[i].input[j] = high;
            double above = loss(r, &args, &t);
            rows[i].input[j] = low;
            double below = loss(r, &args, &t);
            rows[i].input[j] = before;
            double quotient = (above - below) / ((double)high - (double)low);
            if (fabs(rows[i].gradient[j] - quotient) > 2e-5 * (1 + fabs(quotient)))
                fail_msg("gradient %zu element %zu: %.9g, not %.9g", i, j, rows[i].gradient[j], quotient);
        }
    }
    loom__reference_result_free(&result);
    loom__reference_destroy(r);
}

/* The yardstick: in fp32 it is near the reference but not equal to it, in bf16 a hundred times further off.
 */
static void same_dtype_has_the_dtype_s_error(void **state) {
    (void)state;
    static tensors t;
    static uint16_t q[COUNT(t.q)], k[COUNT(t.k)], v[COUNT(t.v)], dout[COUNT(t.dout)];
    loom_args args = LOOM_ARGS_INIT;
    double error[2] = {0, 0};
    fill_tensors(&t, &args);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        loom__reference *r = NULL;
        loom__reference_result exact, plain;
        assert_int_equal(
            loom__reference_create(bf16 ? "bf16 d=8:16 backward" : "fp32 d=8:16 backward", &r, NULL),
            LOOM_OK);
        if (bf16) {
            for (size_t i = 0; i < COUNT(t.q); i++) q[i] = loom__float_to_bf16(t.q[i]);
            for (size_t i = 0; i < COUNT(t.k); i++) k[i] = loom__float_to_bf16(t.k[i]);
            for (size_t i = 0; i < COUNT(t.v); i++) v[i] = loom__float_to_bf16(t.v[i]);
            for (size_t i = 0; i < COUNT(t.dout); i++) dout[i] = loom__float_to_bf16(t.dout[i]);
            args.q.data = q, args.k.data = k, args.v.data = v, args.dout.data = dout;
        }
        assert_int_equal(loom__reference_run(r, &args, true, LOOM__FLOAT64, 1, &exact, NULL), LOOM_OK);
        assert_int_equal(loom__reference_run(r, &args, true, LOOM__SAME_DTYPE, 1, &plain, NULL), LOOM_OK);
        const struct {
            const double *exact, *plain;
            size_t size;
        } rows[] = {{exact.o, plain.o, COUNT(t.dout)},
                    {exact.dq, plain.dq, COUNT(t.q)},
                    {exact.dk, plain.dk, COUNT(t.k)},
                    {exact.dv, plain.dv, COUNT(t.v)}};
        for (size_t i = 0; i < COUNT(rows); i++) {
            double difference = 0, norm = 0;
            for (size_t j = 0; j < rows[i].size; j++) {
                difference += pow(rows[i].plain[j] - rows[i].exact[j], 2);
                norm += pow(rows[i].exact[j], 2);
            }
            error[bf16] = fmax(error[bf16], sqrt(difference / norm));
        }
        loom__reference_result_free(&exact);
        loom__reference_result_free(&plain);
        loom__reference_destroy(r);
    }
    assert_true(error[0] > 1e-9 && error[0] < 2e-6);
    assert_true(error[1] > 5e-4 && error[1] < 1e-2);
}

static void empty_shapes_are_fine(void **state) {
    (void)state;
    static tensors t;
    loom__reference *r = NULL;
    loom_args args = LOOM_ARGS_INIT;
    loom__reference_result result;
    fill_tensors(&t, &args);
    assert_int_equal(loom__reference_create("fp32 d=8:16 backward", &r, NULL), LOOM_OK);
    args.shape.seq_k = 0;
    assert_int_equal(loom__reference_run(r, &args, true, LOOM__FLOAT64, 2, &result, NULL), LOOM_OK);
    assert_true(result.o[0] == 0 && isinf(result.lse[0]) && result.dq[0] == 0);
    loom__reference_result_free(&result);
    args.shape.seq_k = SEQ_K;
    args.shape.seq_q = 0;
    assert_int_equal(loom__reference_run(r, &args, true, LOOM__FLOAT64, 2, &result, NULL), LOOM_OK);
    assert_true(result.dk[0] == 0 && result.dv[0] == 0);
    loom__reference_result_free(&result);
    loom__reference_destroy(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conversions_round_trip),
        cmocka_unit_test(conversions_round_to_even),
        cmocka_unit_test(whole_numbers_have_the_design_s_meaning),
        cmocka_unit_test(reals_are_rounded_in_masks_only),
        cmocka_unit_test(slopes_match_difference_quotients),
        cmocka_unit_test(slopes_at_ties_take_the_left),
        cmocka_unit_test(bad_expressions_are_refused),
        cmocka_unit_test(problem_texts_are_read),
        cmocka_unit_test(attention_by_hand),
        cmocka_unit_test(gradients_match_difference_quotients),
        cmocka_unit_test(same_dtype_has_the_dtype_s_error),
        cmocka_unit_test(empty_shapes_are_fine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
