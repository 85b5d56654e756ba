/* new_mask: a mask and a score nobody has written a kernel for, in one line of text with run-time parameters.
 *
 * A token sees its last `near` keys and every `stride`-th key before them; a logit falls with the logarithm
 * of the distance. Compared with a plain loop. Exits 1 on an error or a wrong result. */
#include "attnloom.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SEQ = 200, DIM = 32, COUNT = SEQ * DIM, NEAR = 24, STRIDE = 16 };
static const float SLOPE = 0.5f;

static const char PROBLEM[] = "fp32 d=32"
                              " mask={k <= q & (q - k < near | k % stride == 0)}"
                              " score={s - slope * log(f32(1 + abs(q - k)))}"
                              " params={near: i32, stride: i32, slope: f32}";

static float q[COUNT], k[COUNT], v[COUNT], o[COUNT];

static void fill(float *x) {
    for (int i = 0; i < COUNT; i++) x[i] = 2.0f * rand() / RAND_MAX - 1;
}

static void naive_row(int row, double *out) {
    double sum = 0;
    for (int d = 0; d < DIM; d++) out[d] = 0;
    for (int col = 0; col < SEQ; col++) {
        if (!(col <= row && (row - col < NEAR || col % STRIDE == 0))) continue;
        double s = 0;
        for (int d = 0; d < DIM; d++) s += q[row * DIM + d] * k[col * DIM + d];
        const double p = exp(s / sqrt(DIM) - SLOPE * log(1 + abs(row - col)));
        sum += p;
        for (int d = 0; d < DIM; d++) out[d] += p * v[col * DIM + d];
    }
    for (int d = 0; d < DIM; d++) out[d] /= sum;
}

int main(void) {
    fill(q), fill(k), fill(v);
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = PROBLEM;
    desc.device = LOOM_DEVICE_HOST;
    if (loom_context_create(NULL, &context, &error) || loom_plan_create(context, &desc, &plan, &error))
        goto failed;

    loom_param params[3] = {0};
    params[loom_plan_param(plan, "near")].scalar = NEAR;
    params[loom_plan_param(plan, "stride")].scalar = STRIDE;
    params[loom_plan_param(plan, "slope")].scalar = SLOPE;
    loom_args args = LOOM_ARGS_INIT;
    args.shape = (loom_shape){.batch = 1, .heads_q = 1, .heads_kv = 1, .seq_q = SEQ, .seq_k = SEQ};
    args.q = loom_dense(q, SEQ, 1, DIM);
    args.k = loom_dense(k, SEQ, 1, DIM);
    args.v = loom_dense(v, SEQ, 1, DIM);
    args.o = loom_dense(o, SEQ, 1, DIM);
    args.params = params;
    args.num_params = 3;
    if (loom_forward(plan, &args, NULL, &error)) goto failed;

    double largest = 0, row_o[DIM];
    for (int row = 0; row < SEQ; row++) {
        naive_row(row, row_o);
        for (int d = 0; d < DIM; d++) largest = fmax(largest, fabs(o[row * DIM + d] - row_o[d]));
    }
    printf("%s\nlargest error of O %.1e\n", loom_plan_text(plan, LOOM_TEXT_PROBLEM), largest);
    loom_plan_destroy(plan), loom_context_destroy(context);
    return largest < 1e-5 ? 0 : 1;
failed:
    fprintf(stderr, "new_mask: %s: %s\n", error.field, error.text);
    return 1;
}
