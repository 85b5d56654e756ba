/* no_stall.c - launches while a plan compiles: kernels that are there stand in until the plan's own are
 * ready.
 *
 *     ./no_stall
 *
 * On the CPU. The plan asks for a schedule of its own; what serves meanwhile is of the default one.
 */
#include <attnloom.h>
#include <math.h>
#include <stdio.h>

enum { SEQ = 64, DIM = 32 };

/* Mean of O with V = 1, which is 1 whatever Q and K are. */
static double launch(const loom_plan *plan, loom_error *error) {
    static float q[SEQ * DIM], k[SEQ * DIM], v[SEQ * DIM], o[SEQ * DIM];
    loom_args args = LOOM_ARGS_INIT;
    double sum = 0;
    for (int i = 0; i < SEQ * DIM; i++) q[i] = sinf((float)i), k[i] = cosf((float)i), v[i] = 1;
    args.shape = (loom_shape){1, 1, 1, SEQ, SEQ};
    args.q = loom_dense(q, SEQ, 1, DIM);
    args.k = loom_dense(k, SEQ, 1, DIM);
    args.v = loom_dense(v, SEQ, 1, DIM);
    args.o = loom_dense(o, SEQ, 1, DIM);
    if (loom_forward(plan, &args, NULL, error)) return NAN;
    for (int i = 0; i < SEQ * DIM; i++) sum += o[i];
    return sum / (SEQ * DIM);
}

int main(void) {
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "fp32 d=32 causal";
    desc.schedule = "tile=32x32";
    desc.device = LOOM_DEVICE_HOST;
    desc.flags = LOOM_ASYNC | LOOM_STAND_IN;
    if (loom_context_create(NULL, &context, &error) || loom_plan_create(context, &desc, &plan, &error))
        goto failed;
    printf("%s: mean %.6f\n", loom_plan_text(plan, LOOM_TEXT_SCHEDULE), launch(plan, &error));

    /* A program that trains or serves asks now and then, loom_plan_wait(plan, 0, NULL) == LOOM_OK, and goes
     * on. */
    if (loom_plan_wait(plan, INFINITY, &error) || loom_plan_upgrade(plan, &error)) goto failed;
    double mean = launch(plan, &error);
    printf("%s: mean %.6f\n", loom_plan_text(plan, LOOM_TEXT_SCHEDULE), mean);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return fabs(mean - 1) < 1e-5 ? 0 : 1;
failed:
    fprintf(stderr, "%s: %s\n", error.field, error.text);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return 1;
}
