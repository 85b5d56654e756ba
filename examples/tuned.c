/* tuned: a plan whose schedules are measured on this machine, once: what is found is kept as wisdom in the
 * cache folder, and the next program that asks for the problem at a like shape has it at once.
 *
 * Computes one attention with it and compares a row with a plain loop. Exits 1 on an error or a wrong result.
 */
#include "attnloom.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SEQ = 256, DIM = 32, COUNT = SEQ * DIM, ROW = 200 };

static float q[COUNT], k[COUNT], v[COUNT], o[COUNT];

static void fill(float *x) {
    for (int i = 0; i < COUNT; i++) x[i] = 2.0f * rand() / RAND_MAX - 1;
}

/* Largest difference in one row. */
static double error_of_row(int row) {
    double sum = 0, out[DIM] = {0}, largest = 0;
    for (int col = 0; col <= row; col++) {
        double s = 0;
        for (int d = 0; d < DIM; d++) s += q[row * DIM + d] * k[col * DIM + d];
        const double p = exp(s / sqrt(DIM));
        sum += p;
        for (int d = 0; d < DIM; d++) out[d] += p * v[col * DIM + d];
    }
    for (int d = 0; d < DIM; d++) largest = fmax(largest, fabs(out[d] / sum - o[row * DIM + d]));
    return largest;
}

int main(void) {
    fill(q), fill(k), fill(v);
    loom_context *context = NULL;
    loom_plan *plan = NULL, *again = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "fp32 d=32 causal";
    desc.device = LOOM_DEVICE_HOST;
    desc.hint = (loom_shape){.batch = 1, .heads_q = 1, .heads_kv = 1, .seq_q = SEQ, .seq_k = SEQ};
    desc.rigor = LOOM_MEASURE;
    desc.measure_seconds = 30; /* it takes what it needs, and no longer than this */
    if (loom_context_create(NULL, &context, &error) || loom_plan_create(context, &desc, &plan, &error))
        goto failed;
    printf("%s", loom_plan_text(plan, LOOM_TEXT_WHY));

    desc.rigor = LOOM_ESTIMATE; /* no timing: from wisdom, as the length is near */
    desc.hint.seq_q = desc.hint.seq_k = SEQ + 30;
    if (loom_plan_create(context, &desc, &again, &error)) goto failed;
    printf("at %d keys: %s\n", SEQ + 30, loom_plan_text(again, LOOM_TEXT_SCHEDULE));

    loom_args args = LOOM_ARGS_INIT;
    args.shape = (loom_shape){.batch = 1, .heads_q = 1, .heads_kv = 1, .seq_q = SEQ, .seq_k = SEQ};
    args.q = loom_dense(q, SEQ, 1, DIM);
    args.k = loom_dense(k, SEQ, 1, DIM);
    args.v = loom_dense(v, SEQ, 1, DIM);
    args.o = loom_dense(o, SEQ, 1, DIM);
    if (loom_forward(plan, &args, NULL, &error)) goto failed;
    const double largest = error_of_row(ROW);
    printf("largest difference in row %d: %.1e\n", ROW, largest);
    loom_plan_destroy(again);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return largest < 1e-5 ? 0 : 1;

failed:
    fprintf(stderr, "%s: %s\n", error.field, error.text);
    loom_plan_destroy(again);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return 1;
}
