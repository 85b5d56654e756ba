/* rigs.h - what the numerics tests share: one context, one device, plans kept by problem text, and a check
 * that ends a test with a line that repeats it. Included by one .c of a test program each; expects cmocka.h
 * before it.
 *
 * The first argument of the program chooses: none runs on the host target, `gpu` (or --device N, or the
 * environment variable ATTNLOOM_TEST_DEVICE=N) on a GPU, `slow` the long list on the host, `quick` a short
 * one for builds with sanitizers. `--only NAME` runs the tests of that name; * stands for any letters, ? for
 * one. ATTNLOOM_TEST_TARGET=hopper takes that target on the GPU instead of mma; a problem that it does not
 * take runs on mma, and a line says so.
 */
#ifndef LOOM_TEST_RIGS_H
#define LOOM_TEST_RIGS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "harness.h"
#include "part.h"

enum { RIGS_SKIP = 77, RIGS_MAX_PLANS = 32 };

static struct rigs {
    loom_context *context;
    int32_t device;
    bool slow, quick;
    int64_t num_cases, first_case, num_run; /* of slow tests: seen, seen before this test, run in this test */
    int num_plans;
    struct {
        char *problem;
        loom_plan *plan;
    } plans[RIGS_MAX_PLANS];
} rigs = {.device = LOOM_DEVICE_HOST};

static inline bool on_gpu(void) { return rigs.device != LOOM_DEVICE_HOST; }

static inline const char *target_of_rigs(void) {
    const char *wanted = getenv("ATTNLOOM_TEST_TARGET");
    return !on_gpu() ? "host" : wanted && *wanted ? wanted : "mma";
}

/* Opens the context and the device. Returns 0, or the status to exit with. */
static inline int rigs_start(int argc, char **argv) {
    loom_error error = LOOM_ERROR_INIT;
    const loom__device *device = NULL;
    const char *ordinal = getenv("ATTNLOOM_TEST_DEVICE");
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "gpu") && !ordinal) ordinal = "0";
        if (!strcmp(argv[i], "--device") && i + 1 < argc) ordinal = argv[++i];
        if (!strcmp(argv[i], "--only") && i + 1 < argc) cmocka_set_test_filter(argv[++i]);
        rigs.slow = rigs.slow || !strcmp(argv[i], "slow");
        rigs.quick = rigs.quick || !strcmp(argv[i], "quick");
    }
    if (loom_context_create(NULL, &rigs.context, &error)) {
        fprintf(stderr, "%s: %s\n", error.field, error.text);
        return 1;
    }
    if (!ordinal) return 0;
    rigs.device = (int32_t)strtol(ordinal, NULL, 10);
    loom_status status = loom__driver_open(rigs.context, &error);
    int32_t num_devices = 0;
    if (!status) status = loom__device_count(rigs.context, &num_devices, &error);
    if (status || num_devices == 0) {
        printf("SKIPPED: no GPU: %s\n", status ? error.text : "the driver lists none");
        loom_context_destroy(rigs.context);
        return RIGS_SKIP;
    }
    if (loom__device_open(rigs.context, rigs.device, &device, &error)) {
        fprintf(stderr, "%s: %s\n", error.field, error.text);
        return 1;
    }
    printf("device %d: %s, %s\n", rigs.device, device->name, device->arch);
    return 0;
}

static inline void rigs_drop_plans(void) {
    while (rigs.num_plans) {
        rigs.num_plans--;
        loom_plan_destroy(rigs.plans[rigs.num_plans].plan);
        free(rigs.plans[rigs.num_plans].problem);
    }
}

static inline void rigs_stop(void) {
    rigs_drop_plans();
    loom_context_destroy(rigs.context);
}

/* The plan of a problem text, made once. */
static inline loom_plan *plan_of(const char *problem) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_error error = LOOM_ERROR_INIT;
    for (int i = 0; i < rigs.num_plans; i++)
        if (!strcmp(rigs.plans[i].problem, problem)) return rigs.plans[i].plan;
    if (rigs.num_plans == RIGS_MAX_PLANS) rigs_drop_plans();
    desc.problem = problem;
    desc.device = rigs.device;
    desc.target = target_of_rigs();
    loom_plan *plan = NULL;
    loom_status status = loom_plan_create(rigs.context, &desc, &plan, &error);
    if (status == LOOM_UNSUPPORTED && !strcmp(desc.target, "hopper")) {
        printf("\"%s\": on target mma, hopper does not take it: %s: %s\n", problem, error.field, error.text);
        desc.target = "mma";
        status = loom_plan_create(rigs.context, &desc, &plan, &error);
    }
    if (status)
        fail_msg("\"%s\": %s: %s", problem, error.field, error.text);
    rigs.plans[rigs.num_plans].problem = strdup(problem);
    rigs.plans[rigs.num_plans++].plan = plan;
    return plan;
}

static inline loom__rig_options options_of(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seq_q,
                                    int64_t seq_k) {
    loom__rig_options options = LOOM__RIG_OPTIONS_INIT;
    options.shape = (loom_shape){batch, heads_q, heads_kv, seq_q, seq_k};
    return options;
}

static inline void fail_rig(const char *problem, const loom__rig_options *o, const char *what) {
    fail_msg("%s\n  attnloom check \"%s\" --target %s --shape \"batch=%lld heads=%lld:%lld seq=%lld:%lld\" "
             "--seed %llu"
             "   (layout %s, q_start %lld, k_start %lld, scale %g)",
             what, problem, loom_plan_text(plan_of(problem), LOOM_TEXT_TARGET), (long long)o->shape.batch,
             (long long)o->shape.heads_q, (long long)o->shape.heads_kv, (long long)o->shape.seq_q, (long long)o->shape.seq_k,
             (unsigned long long)o->seed, loom__layout_names[o->layout],
             o->q_start == LOOM_DEFAULT_START ? (long long)(o->shape.seq_k - o->shape.seq_q)
                                              : (long long)o->q_start,
             o->k_start == LOOM_DEFAULT_START ? 0 : (long long)o->k_start, (double)o->scale);
}

static inline loom__rig *rig_of(const char *problem, const loom__rig_options *options) {
    loom_error error = LOOM_ERROR_INIT;
    loom__rig *rig = NULL;
    if (loom__rig_create(rigs.context, plan_of(problem), rigs.device, options, &rig, &error))
        fail_rig(problem, options, error.text);
    return rig;
}

static inline bool has_backward(const loom__rig *rig) { return rig->reference->backward; }

/* Forward, and backward if the problem has it. */
static inline void run_rig(loom__rig *rig, const char *problem) {
    loom_error error = LOOM_ERROR_INIT;
    for (loom_pass pass = LOOM_FORWARD; pass <= (has_backward(rig) ? LOOM_BACKWARD : LOOM_FORWARD); pass++) {
        if (loom__rig_run(rig, pass, &error)) {
            loom__rig_options options = rig->options;
            loom__rig_destroy(rig);
            fail_rig(problem, &options, error.text);
        }
    }
}

/* The outputs of a rig that ran, against float64. */
static inline void compare_rig(loom__rig *rig, const char *problem) {
    loom_error error = LOOM_ERROR_INIT;
    loom__rig_report report = {.fine = false};
    char what[2048];
    loom__rig_options options = rig->options;
    if (loom__rig_compare(rig, has_backward(rig) ? LOOM_BACKWARD : LOOM_FORWARD, &report, &error)) {
        loom__rig_destroy(rig);
        fail_rig(problem, &options, error.text);
    }
    if (report.fine) return;
    loom__rig_explain(&report, what, sizeof what);
    loom__rig_destroy(rig);
    fail_rig(problem, &options, what);
}

/* Runs, compares, and runs once more, with what can be prepared made before, for equal bits where they are
 * promised. */
static inline void check_rig(loom__rig *rig, const char *problem) {
    loom__rig_options options = rig->options;
    run_rig(rig, problem);
    compare_rig(rig, problem);
    loom_pass last =
        has_backward(rig) && (rig->reference->deterministic || !on_gpu()) ? LOOM_BACKWARD : LOOM_FORWARD;
    uint64_t digests[2] = {loom__rig_digest(rig, LOOM_FORWARD), loom__rig_digest(rig, last)};
    rig->options.prepared = true;
    run_rig(rig, problem);
    bool equal =
        loom__rig_digest(rig, LOOM_FORWARD) == digests[0] && loom__rig_digest(rig, last) == digests[1];
    if (equal) return;
    loom__rig_destroy(rig);
    fail_rig(problem, &options, "a second run gave other bits");
}

/* A case; of a slow test only if it is in the part of this run. */
static inline void check(const char *problem, const loom__rig_options *options) {
    if (rigs.slow && !part_has(rigs.num_cases++)) return;
    loom__rig *rig = rig_of(problem, options);
    check_rig(rig, problem);
    loom__rig_destroy(rig);
    rigs.num_run++;
}

/* Around each slow test: says how much of it was run, and fails it if that is nothing although there is a case
 * for every part. */
static inline int begin_part(void **state) {
    (void)state;
    rigs.first_case = rigs.num_cases;
    rigs.num_run = 0;
    return 0;
}

static inline int end_part(void **state) {
    (void)state;
    int64_t num_cases = rigs.num_cases - rigs.first_case;
    printf("ran %lld of %lld cases\n", (long long)rigs.num_run, (long long)num_cases);
    return rigs.num_run == 0 && num_cases >= part_count() ? -1 : 0;
}

#define slow_test(f) cmocka_unit_test_setup_teardown(f, begin_part, end_part)

#endif
