/* gqa_decode: decoding with a key/value cache that grows: one query a step, 8 query heads share 2 key/value
 * heads. One plan serves every length; the strides are those of the cache's capacity. Slots that hold no key
 * yet are NaN: nothing past seq_k is read. Compared with a plain loop. Exits 1 on an error or a wrong result.
 */
#include "attnloom.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 2, HEADS_Q = 8, HEADS_KV = 2, CAPACITY = 256, DIM = 64 };

static float q[BATCH][1][HEADS_Q][DIM], o[BATCH][1][HEADS_Q][DIM];
static float k[BATCH][CAPACITY][HEADS_KV][DIM], v[BATCH][CAPACITY][HEADS_KV][DIM];

static void fill(void *to, size_t bytes) {
    for (float *x = to; x < (float *)to + bytes / sizeof *x; x++) *x = 2.0f * rand() / RAND_MAX - 1;
}

static double naive_error(int b, int h, int length) {
    const int hkv = h / (HEADS_Q / HEADS_KV);
    double out[DIM] = {0}, sum = 0, largest = 0;
    for (int col = 0; col < length; col++) {
        double s = 0;
        for (int d = 0; d < DIM; d++) s += q[b][0][h][d] * k[b][col][hkv][d];
        const double p = exp(s / sqrt(DIM));
        sum += p;
        for (int d = 0; d < DIM; d++) out[d] += p * v[b][col][hkv][d];
    }
    for (int d = 0; d < DIM; d++) {
        const double error = fabs(out[d] / sum - o[b][0][h][d]);
        if (!(error <= largest)) largest = error; /* keeps a NaN */
    }
    return largest;
}

int main(void) {
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "fp32 d=64 causal";
    desc.device = LOOM_DEVICE_HOST;
    desc.hint = (loom_shape){.heads_q = HEADS_Q, .heads_kv = HEADS_KV, .seq_q = 1};
    if (loom_context_create(NULL, &context, &error) || loom_plan_create(context, &desc, &plan, &error))
        goto failed;

    loom_args args = LOOM_ARGS_INIT;
    args.shape = (loom_shape){.batch = BATCH, .heads_q = HEADS_Q, .heads_kv = HEADS_KV, .seq_q = 1};
    args.q = loom_dense(q, 1, HEADS_Q, DIM);
    args.k = loom_dense(k, CAPACITY, HEADS_KV, DIM);
    args.v = loom_dense(v, CAPACITY, HEADS_KV, DIM);
    args.o = loom_dense(o, 1, HEADS_Q, DIM);
    memset(k, 0xff, sizeof k); /* all bits set is a NaN */
    memset(v, 0xff, sizeof v);

    int wrong = 0;
    for (int length = 1; length <= CAPACITY; length++) {
        for (int b = 0; b < BATCH; b++) {
            fill(q[b], sizeof q[b]);
            fill(k[b][length - 1], sizeof k[b][0]);
            fill(v[b][length - 1], sizeof v[b][0]);
        }
        args.shape.seq_k = length;
        if (loom_forward(plan, &args, NULL, &error)) goto failed;
        for (int b = 0; b < BATCH; b++) {
            for (int h = 0; h < HEADS_Q; h++) wrong += !(naive_error(b, h, length) < 1e-5);
        }
    }
    printf("%d steps, %d of %d rows wrong\n", CAPACITY, wrong, CAPACITY * BATCH * HEADS_Q);
    loom_plan_destroy(plan), loom_context_destroy(context);
    return wrong ? 1 : 0;
failed:
    fprintf(stderr, "gqa_decode: %s: %s\n", error.field, error.text);
    return 1;
}
