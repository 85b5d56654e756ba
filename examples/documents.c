/* documents: sequences of different lengths laid end to end, each seeing itself alone, causally: one line of
 * text and an array of ids, no padding and no mask tensor. What the mask needs is made once for all layers
 * (loom_prepare; on the CPU there is nothing to make). Each document must come out as if it were alone. Exits
 * 1 on an error or a wrong result. */
#include "attnloom.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { NUM_DOCUMENTS = 5, HEADS = 4, DIM = 32, LAYERS = 2, MOST = 512 };
static const int LENGTHS[NUM_DOCUMENTS] = {70, 1, 200, 33, 150};

static float q[MOST * HEADS * DIM], k[MOST * HEADS * DIM], v[MOST * HEADS * DIM], o[MOST * HEADS * DIM],
    alone[MOST * HEADS * DIM];
static int32_t ids[MOST];

static void fill(float *x) {
    for (int i = 0; i < MOST * HEADS * DIM; i++) x[i] = 2.0f * rand() / RAND_MAX - 1;
}

/* Arguments for `seq` tokens from token `first` on. */
static loom_args arguments(int first, int seq, float *out) {
    const int at = first * HEADS * DIM;
    loom_args args = LOOM_ARGS_INIT;
    args.shape = (loom_shape){.batch = 1, .heads_q = HEADS, .heads_kv = HEADS, .seq_q = seq, .seq_k = seq};
    args.q = loom_dense(q + at, seq, HEADS, DIM);
    args.k = loom_dense(k + at, seq, HEADS, DIM);
    args.v = loom_dense(v + at, seq, HEADS, DIM);
    args.o = loom_dense(out + at, seq, HEADS, DIM);
    return args;
}

int main(void) {
    loom_context *context = NULL;
    loom_plan *packed = NULL, *causal = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    double largest = 0;
    int seq = 0;
    for (int i = 0; i < NUM_DOCUMENTS; i++)
        for (int n = 0; n < LENGTHS[i]; n++) ids[seq++] = i;

    desc.device = LOOM_DEVICE_HOST;
    if (loom_context_create(NULL, &context, &error)) goto failed;
    desc.problem = "fp32 d=32 mask={causal & document(ids)} params={ids: i32[seq_k]}";
    if (loom_plan_create(context, &desc, &packed, &error)) goto failed;
    desc.problem = "fp32 d=32 causal";
    if (loom_plan_create(context, &desc, &causal, &error)) goto failed;

    loom_args args = arguments(0, seq, o);
    loom_param params[1] = {{.data = ids, .stride = {1}}};
    args.params = params;
    args.num_params = 1;
    if (loom_prepared_bytes(packed, &args, &args.prepared_bytes, &error)) goto failed;
    if (args.prepared_bytes) args.prepared = aligned_alloc(256, (args.prepared_bytes + 255) / 256 * 256);
    if (args.prepared && loom_prepare(packed, &args, NULL, &error)) goto failed;
    if (loom_workspace_bytes(packed, LOOM_FORWARD, &args, &args.workspace_bytes, &error)) goto failed;
    if (args.workspace_bytes) args.workspace = aligned_alloc(256, (args.workspace_bytes + 255) / 256 * 256);
    for (int layer = 0; layer < LAYERS; layer++) {
        fill(q), fill(k), fill(v);
        if (loom_forward(packed, &args, NULL, &error)) goto failed;
        for (int i = 0, first = 0; i < NUM_DOCUMENTS; first += LENGTHS[i++]) {
            loom_args one = arguments(first, LENGTHS[i], alone);
            if (loom_forward(causal, &one, NULL, &error)) goto failed;
        }
        for (int i = 0; i < seq * HEADS * DIM; i++) largest = fmax(largest, fabs(o[i] - alone[i]));
    }
    printf("%s\n%d documents, %d tokens, %d layers, prepared %zu bytes: largest difference from each alone "
           "%.1e\n",
           loom_plan_text(packed, LOOM_TEXT_PROBLEM), NUM_DOCUMENTS, seq, LAYERS, args.prepared_bytes,
           largest);
    free(args.workspace), free(args.prepared);
    loom_plan_destroy(causal), loom_plan_destroy(packed), loom_context_destroy(context);
    return largest < 1e-6 ? 0 : 1;
failed:
    fprintf(stderr, "documents: %s: %s\n", error.field, error.text);
    return 1;
}
