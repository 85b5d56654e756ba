/* train_step: one step of gradient descent through attention: forward, loss, backward, update. Every gradient
 * is compared with a central difference of a plain float64 loss. Exits 1 on an error or a wrong result. */
#include "attnloom.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SEQ = 24, DIM = 16, COUNT = SEQ * DIM };

static float x[3][COUNT];  /* q, k, v */
static float dx[3][COUNT]; /* their gradients */
static float o[COUNT], lse[SEQ], dout[COUNT], target[COUNT];

/* 1/2 sum (O - target)^2 by the formula; element `at` of tensor `which` is moved by `step`. */
static double naive_loss(int which, int at, double step) {
    double in[3][COUNT], loss = 0;
    for (int t = 0; t < 3; t++) {
        for (int i = 0; i < COUNT; i++) in[t][i] = x[t][i] + (t == which && i == at ? step : 0);
    }
    for (int row = 0; row < SEQ; row++) {
        double out[DIM] = {0}, sum = 0;
        for (int col = 0; col <= row; col++) {
            double s = 0;
            for (int d = 0; d < DIM; d++) s += in[0][row * DIM + d] * in[1][col * DIM + d];
            const double p = exp(s / sqrt(DIM));
            sum += p;
            for (int d = 0; d < DIM; d++) out[d] += p * in[2][col * DIM + d];
        }
        for (int d = 0; d < DIM; d++) loss += pow(out[d] / sum - target[row * DIM + d], 2) / 2;
    }
    return loss;
}

int main(void) {
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "fp32 d=16 causal backward";
    desc.device = LOOM_DEVICE_HOST;
    for (int i = 0; i < COUNT; i++) {
        for (int t = 0; t < 3; t++) x[t][i] = 2.0f * rand() / RAND_MAX - 1;
        target[i] = 2.0f * rand() / RAND_MAX - 1;
    }
    if (loom_context_create(NULL, &context, &error) || loom_plan_create(context, &desc, &plan, &error))
        goto failed;

    loom_args args = LOOM_ARGS_INIT;
    args.shape = (loom_shape){.batch = 1, .heads_q = 1, .heads_kv = 1, .seq_q = SEQ, .seq_k = SEQ};
    float *data[] = {x[0], x[1], x[2], o, dout, dx[0], dx[1], dx[2]};
    loom_tensor *tensors[] = {&args.q, &args.k, &args.v, &args.o, &args.dout, &args.dq, &args.dk, &args.dv};
    for (int i = 0; i < 8; i++) *tensors[i] = loom_dense(data[i], SEQ, 1, DIM);
    args.lse = loom_dense_lse(lse, 1, SEQ);
    if (loom_forward(plan, &args, NULL, &error)) goto failed;
    for (int i = 0; i < COUNT; i++) dout[i] = o[i] - target[i];
    if (loom_workspace_bytes(plan, LOOM_BACKWARD, &args, &args.workspace_bytes, &error)) goto failed;
    args.workspace = aligned_alloc(256, args.workspace_bytes / 256 * 256 + 256);
    if (loom_backward(plan, &args, NULL, &error)) goto failed;

    double largest = 0;
    for (int t = 0; t < 3; t++) {
        for (int i = 0; i < COUNT; i++) {
            const double slope = (naive_loss(t, i, 1e-4) - naive_loss(t, i, -1e-4)) / 2e-4;
            largest = fmax(largest, fabs(slope - dx[t][i]));
        }
    }
    const double before = naive_loss(0, 0, 0);
    for (int t = 0; t < 3; t++) {
        for (int i = 0; i < COUNT; i++) x[t][i] -= 0.1f * dx[t][i];
    }
    const double after = naive_loss(0, 0, 0);
    printf("largest error of a gradient %.1e; loss %.3f -> %.3f\n", largest, before, after);
    free(args.workspace), loom_plan_destroy(plan), loom_context_destroy(context);
    return largest < 1e-4 && after < before ? 0 : 1;
failed:
    fprintf(stderr, "train_step: %s: %s\n", error.field, error.text);
    return 1;
}
