/* longformer: 65536 tokens, each seeing 256 keys on either side and 16 global tokens: the mask is one word of
 * the problem, only tiles with something to see are computed, and memory is that of the tensors. Rows are
 * compared with a plain loop. Exits 1 on an error or a wrong result. */
#include "attnloom.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { SEQ = 65536, DIM = 16, WIDTH = 256, GLOBAL = 16, COUNT = SEQ * DIM };

static float q[COUNT], k[COUNT], v[COUNT], o[COUNT];

static void fill(float *x) {
    for (int i = 0; i < COUNT; i++) x[i] = 2.0f * rand() / RAND_MAX - 1;
}

static double largest_error(int row) {
    double sum = 0, out[DIM] = {0}, largest = 0;
    for (int col = 0; col < SEQ; col++) {
        if (!(abs(row - col) <= WIDTH || row < GLOBAL || col < GLOBAL)) continue;
        double s = 0;
        for (int d = 0; d < DIM; d++) s += q[row * DIM + d] * k[col * DIM + d];
        const double p = exp(s / sqrt(DIM));
        sum += p;
        for (int d = 0; d < DIM; d++) out[d] += p * v[col * DIM + d];
    }
    for (int d = 0; d < DIM; d++) largest = fmax(largest, fabs(o[row * DIM + d] - out[d] / sum));
    return largest;
}

int main(void) {
    static const int ROWS[] = {0, GLOBAL - 1, GLOBAL, 300, SEQ / 2, SEQ - 1};
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    fill(q), fill(k), fill(v);
    desc.problem = "fp32 d=16 mask={longformer(256, 16)}";
    desc.device = LOOM_DEVICE_HOST;
    desc.hint = (loom_shape){.batch = 1, .heads_q = 1, .heads_kv = 1, .seq_q = SEQ, .seq_k = SEQ};
    if (loom_context_create(NULL, &context, &error) || loom_plan_create(context, &desc, &plan, &error))
        goto failed;

    loom_args args = LOOM_ARGS_INIT;
    args.shape = desc.hint;
    args.q = loom_dense(q, SEQ, 1, DIM);
    args.k = loom_dense(k, SEQ, 1, DIM);
    args.v = loom_dense(v, SEQ, 1, DIM);
    args.o = loom_dense(o, SEQ, 1, DIM);
    size_t workspace = 0;
    if (loom_workspace_bytes(plan, LOOM_FORWARD, &args, &workspace, &error)) goto failed;
    struct timespec start, end;
    timespec_get(&start, TIME_UTC);
    if (loom_forward(plan, &args, NULL, &error)) goto failed;
    timespec_get(&end, TIME_UTC);

    double largest = 0;
    for (size_t i = 0; i < sizeof ROWS / sizeof ROWS[0]; i++) largest = fmax(largest, largest_error(ROWS[i]));
    printf("%s\n%d tokens in %.2f s, workspace %zu bytes, largest error of O %.1e\n",
           loom_plan_text(plan, LOOM_TEXT_PROBLEM), SEQ,
           (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec), workspace,
           largest);
    loom_plan_destroy(plan), loom_context_destroy(context);
    return largest < 1e-5 && workspace == 0 ? 0 : 1;
failed:
    fprintf(stderr, "longformer: %s: %s\n", error.field, error.text);
    return 1;
}
