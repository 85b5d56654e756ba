/* forward: the smallest use of the library. Causal attention on the CPU, compared with a plain loop.
 *
 * On a GPU the same program sets desc.device = 0 (the default) and passes device pointers.
 * Exits 1 on an error or a wrong result. */
#include "attnloom.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SEQ = 100, HEADS = 2, DIM = 32, COUNT = SEQ * HEADS * DIM };

static float q[COUNT], k[COUNT], v[COUNT], o[COUNT], lse[HEADS * SEQ];

static void fill(float *x) {
    for (int i = 0; i < COUNT; i++) x[i] = 2.0f * rand() / RAND_MAX - 1;
}

/* The row's output by the formula: softmax of q.k / sqrt(DIM) over the keys up to `row`, times v. */
static void naive_row(int row, int head, double *out) {
    double sum = 0;
    for (int d = 0; d < DIM; d++) out[d] = 0;
    for (int col = 0; col <= row; col++) {
        double s = 0;
        for (int d = 0; d < DIM; d++)
            s += q[(row * HEADS + head) * DIM + d] * k[(col * HEADS + head) * DIM + d];
        const double p = exp(s / sqrt(DIM));
        sum += p;
        for (int d = 0; d < DIM; d++) out[d] += p * v[(col * HEADS + head) * DIM + d];
    }
    for (int d = 0; d < DIM; d++) out[d] /= sum;
}

int main(void) {
    fill(q), fill(k), fill(v);
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "fp32 d=32 causal";
    desc.device = LOOM_DEVICE_HOST;
    if (loom_context_create(NULL, &context, &error) || loom_plan_create(context, &desc, &plan, &error))
        goto failed;

    loom_args args = LOOM_ARGS_INIT;
    args.shape = (loom_shape){.batch = 1, .heads_q = HEADS, .heads_kv = HEADS, .seq_q = SEQ, .seq_k = SEQ};
    args.q = loom_dense(q, SEQ, HEADS, DIM);
    args.k = loom_dense(k, SEQ, HEADS, DIM);
    args.v = loom_dense(v, SEQ, HEADS, DIM);
    args.o = loom_dense(o, SEQ, HEADS, DIM);
    args.lse = loom_dense_lse(lse, HEADS, SEQ);
    if (loom_forward(plan, &args, NULL, &error)) goto failed;

    double largest = 0, row_o[DIM];
    for (int row = 0; row < SEQ; row++) {
        for (int head = 0; head < HEADS; head++) {
            naive_row(row, head, row_o);
            for (int d = 0; d < DIM; d++) {
                largest = fmax(largest, fabs(o[(row * HEADS + head) * DIM + d] - row_o[d]));
            }
        }
    }
    printf("%s: largest error of O %.1e\n", loom_plan_text(plan, LOOM_TEXT_PROBLEM), largest);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return largest < 1e-5 ? 0 : 1;
failed:
    fprintf(stderr, "forward: %s: %s\n", error.field, error.text);
    return 1;
}
