/* test_stand_in.c - plans with LOOM_STAND_IN: what serves until a plan's own kernels are compiled, and the
 * exchange. Kernels of the library's own generator on the CPU; packs, and what is chosen of them, on a GPU
 * that is a table of functions.
 *
 * ctest: gpu
 */
#include "runtime_rig.h"

#include <math.h>

#include "device_rig.h"
#include "harness.h"
#include "pack.h"
#include "plan.h"

static const char OWN[] = "tile=32x32", CACHED[] = "tile=16x64";

static int setup_real(void **state) {
    int failed = rig_setup(state);
    unsetenv("LOOM_GEN_DIR");
    return failed;
}

/* -- A compiler that waits ------------------------------------------------------------------------------- */

/* Compiles when the file `gate` is there; `then` is how. */
static void use_compiler(const char *then) {
    char script[2000], path[600];
    strcpy(path, rig_path("gate"));
    snprintf(script, sizeof script,
             "#!/bin/sh\n[ \"$1\" = -v ] && exec cc -v\nwhile [ ! -e '%s' ]; do sleep 0.01; done\n%s\n", path,
             then);
    rig_write(rig_path("gated"), script);
    chmod(rig_path("gated"), 0700);
    setenv("CC", rig_path("gated"), 1);
}

static void open_gate(void) { rig_write(rig_path("gate"), ""); }
static void close_gate(void) { unlink(rig_path("gate")); }

static loom_plan_desc on_host(const char *problem, const char *schedule, uint32_t flags) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = problem;
    desc.schedule = schedule;
    desc.device = LOOM_DEVICE_HOST;
    desc.flags = flags;
    return desc;
}

static loom_plan *make_asking(loom_context *context, const char *problem, const char *schedule) {
    loom_plan_desc desc = on_host(problem, schedule, LOOM_ASYNC | LOOM_STAND_IN);
    return rig_plan_of(context, &desc);
}

/* Leaves the kernels of a plan in the cache. */
static void cache_plan(loom_context *context, const char *problem, const char *schedule) {
    loom_plan_desc desc = on_host(problem, schedule, 0);
    open_gate();
    loom_plan_destroy(rig_plan_of(context, &desc));
    close_gate();
}

/* Launches forward and compares with the reference. */
static void expect_right(loom_context *context, const loom_plan *plan) {
    loom__rig_options options = LOOM__RIG_OPTIONS_INIT;
    loom__rig_report report;
    loom__rig *rig = NULL;
    loom_error error = LOOM_ERROR_INIT;
    options.shape = (loom_shape){1, 2, 1, 70, 90};
    assert_ok(error, loom__rig_create(context, plan, LOOM_DEVICE_HOST, &options, &rig, &error));
    assert_ok(error, loom__rig_run(rig, LOOM_FORWARD, &error));
    assert_ok(error, loom__rig_compare(rig, LOOM_FORWARD, &report, &error));
    assert_true(report.fine);
    loom__rig_destroy(rig);
}

/* -- Serving and exchanging ------------------------------------------------------------------------------ */

static void test_cached_kernels_serve(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    use_compiler("exec cc \"$@\"");
    loom_context *context = rig_context(NULL);
    cache_plan(context, "fp32 d=8 causal", CACHED);
    loom_plan *plan = make_asking(context, "fp32 d=8 causal", OWN);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_PROBLEM), "fp32 d=8 mask={k <= q}");
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), CACHED);
    assert_int_equal(loom_plan_num_kernels(plan), 1);
    assert_int_equal(rig_kernel(plan, 0).cached, 1);
    rig_expect(loom_plan_text(plan, LOOM_TEXT_WHY),
               "A stand-in serves until loom_plan_upgrade: target host schedule tile=16x64, from the cache.|"
               "The plan's own: target host schedule tile=32x32.");
    expect_right(context, plan);
    assert_fails(error, LOOM_NOT_FOUND, "plan", "still compiling", loom_plan_wait(plan, 0.02, &error));
    assert_fails(error, LOOM_NOT_FOUND, "plan", "still compiling", loom_plan_upgrade(plan, &error));
    assert_ok(error, loom_plan_certify(plan, "of the stand-in\n", &error));
    assert_string_equal(rig_kernel(plan, 0).certificate, "of the stand-in\n");

    /* Nothing changes before it is asked for. */
    open_gate();
    assert_ok(error, loom_plan_wait(plan, 600, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), CACHED);
    const char *older = loom_plan_text(plan, LOOM_TEXT_SCHEDULE);
    assert_ok(error, loom_plan_upgrade(plan, &error));
    assert_string_equal(older, CACHED); /* texts stay */
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), OWN);
    assert_null(strstr(loom_plan_text(plan, LOOM_TEXT_WHY), "stand-in"));
    rig_expect(rig_kernel(plan, 0).certificate, "o    dense  error|lse  odd    error|result fine\n");
    expect_right(context, plan);
    assert_ok(error, loom_plan_upgrade(plan, &error));
    loom_plan_destroy(plan);

    /* The certificate is in the cache, and the kernels are there: nothing stands in for them. */
    close_gate();
    plan = make_asking(context, "fp32 d=8 causal", OWN);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), OWN);
    rig_expect(rig_kernel(plan, 0).certificate, "result fine\n");
    assert_ok(error, loom_plan_wait(plan, 0, &error));
    assert_ok(error, loom_plan_upgrade(plan, &error));
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* Kernels for more than the problem asks for serve; what the problem lacks is refused as ever. */
static void test_wider_problem(void **state) {
    (void)state;
    static float memory[4096];
    loom_error error = LOOM_ERROR_INIT;
    use_compiler("exec cc \"$@\"");
    loom_context *context = rig_context(NULL);
    cache_plan(context, "fp32 d=8 backward deterministic", NULL);
    cache_plan(context, "fp32 d=16 backward", NULL); /* another problem */
    cache_plan(context, "fp32 d=8 causal backward", NULL);
    loom_plan *plan = make_asking(context, "fp32 d=8", OWN);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_PROBLEM), "fp32 d=8");
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE_BACKWARD), "");
    assert_string_not_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), OWN);
    expect_right(context, plan);
    loom_args args = LOOM_ARGS_INIT;
    args.shape = (loom_shape){1, 1, 1, 4, 4};
    args.q = args.k = args.v = args.dout = loom_dense(memory, 4, 1, 8);
    assert_fails(error, LOOM_INVALID, "problem", "no word `backward`: fp32 d=8",
                 loom_backward(plan, &args, NULL, &error));
    open_gate();
    loom_plan_destroy(plan);

    /* The other way round they do not: the default is compiled. */
    plan = make_asking(context, "fp32 d=16 backward deterministic", OWN);
    rig_expect(loom_plan_text(plan, LOOM_TEXT_WHY), "from the compiler, at once.");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* Of several that are there the one that the model takes for the cheapest, whatever the order of the cache.
 */
static void test_cheapest_serves(void **state) {
    (void)state;
    use_compiler("exec cc \"$@\"");
    loom_context *context = rig_context(NULL);
    loom__arena arena = {&context->memory, NULL};
    loom_error error = LOOM_ERROR_INIT;
    const loom__candidate *list = NULL;
    int32_t num = 0;
    loom__request request = {.problem = "fp32 d=8", .target = "host", .arch = "host"};
    assert_ok(error,
              loom__generator_candidates(context, &request, LOOM_FORWARD, &arena, &list, &num, &error));
    assert_true(num >= 4);
    for (int i = 3; i > 0; i--) cache_plan(context, "fp32 d=8", list[i].text);
    loom_plan *plan = make_asking(context, "fp32 d=8", list[0].text);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), list[1].text);
    open_gate();
    loom_plan_destroy(plan);
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

/* Where nothing is there the default is compiled, unless that is what the plan itself is made of. */
static void test_default_is_compiled(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom_plan *plan = make_asking(context, "fp32 d=8", OWN);
    rig_expect(loom_plan_text(plan, LOOM_TEXT_WHY), "A stand-in serves|from the compiler, at once.");
    expect_right(context, plan);
    loom_plan_destroy(plan);
    plan = make_asking(context, "fp32 d=16", NULL);
    assert_null(strstr(loom_plan_text(plan, LOOM_TEXT_WHY), "stand-in"));
    assert_int_equal(rig_kernel(plan, 0).cached, 0);
    expect_right(context, plan);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static void expect_still_serving(loom_context *context, loom_plan *plan) {
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), CACHED);
    expect_right(context, plan);
    loom_plan_destroy(plan);
}

/* Own kernels that do not compile, or compute the wrong thing, do not take over. */
static void test_bad_kernels_do_not_serve(void **state) {
    (void)state;
    char how[1500];
    loom_error error = LOOM_ERROR_INIT;
    snprintf(how, sizeof how,
             "[ -e '%s' ] && { echo 'error: no such thing' >&2; exit 1; }\n"
             "[ -e '%s' ] && sed -i 's/^static inline float exp_approx(float x) {/& x *= 0.5f;/' kernel.c\n"
             "exec cc \"$@\"",
             rig_path("refuse"), rig_path("spoil"));
    use_compiler(how);
    loom_context *context = rig_context(NULL);
    cache_plan(context, "fp32 d=8", CACHED);
    rig_write(rig_path("refuse"), "");
    open_gate();
    loom_plan *plan = make_asking(context, "fp32 d=8", OWN);
    assert_fails(error, LOOM_COMPILE, "kernel", "no such thing", loom_plan_wait(plan, 600, &error));
    assert_fails(error, LOOM_COMPILE, "kernel", "no such thing", loom_plan_upgrade(plan, &error));
    expect_still_serving(context, plan);

    unlink(rig_path("refuse"));
    rig_write(rig_path("spoil"), "");
    plan = make_asking(context, "fp32 d=8", OWN);
    assert_ok(error, loom_plan_wait(plan, 600, &error));
    for (int i = 0; i < 2; i++) /* found out, then known by the certificate */
        assert_fails(error, LOOM_INTERNAL, "certificate", "schedule tile=32x32|WRONG|result wrong",
                     loom_plan_upgrade(plan, &error));
    expect_still_serving(context, plan);
    loom_context_destroy(context);
}

/* -- Threads --------------------------------------------------------------------------------------------- */

typedef struct launching {
    loom_context *context;
    loom_plan *plan;
    int32_t device;
    atomic_bool *done;
    loom_error error;
    int64_t num_launches;
    bool fine;
} launching;

static void *launch_until_done(void *argument) {
    launching *l = argument;
    loom__rig_options options = LOOM__RIG_OPTIONS_INIT;
    loom__rig_report report = {.fine = false};
    loom__rig *rig = NULL;
    options.shape = (loom_shape){1, 2, 1, 33, 65};
    l->error = (loom_error)LOOM_ERROR_INIT;
    if (loom__rig_create(l->context, l->plan, l->device, &options, &rig, &l->error)) return NULL;
    l->fine = true;
    loom_pass last = rig->reference->backward ? LOOM_BACKWARD : LOOM_FORWARD;
    while (l->fine && (!atomic_load(l->done) || l->num_launches < 2)) {
        for (loom_pass pass = LOOM_FORWARD; pass <= last && l->fine; pass++)
            l->fine = loom__rig_run(rig, pass, &l->error) == LOOM_OK;
        l->fine = l->fine && loom__rig_compare(rig, last, &report, &l->error) == LOOM_OK && report.fine;
        l->num_launches++;
    }
    loom__rig_destroy(rig);
    return NULL;
}

typedef struct upgrading {
    loom_plan *plan;
    loom_error error;
} upgrading;

static void *upgrade(void *argument) {
    upgrading *u = argument;
    if (loom_plan_wait(u->plan, 600, &u->error) == LOOM_OK) loom_plan_upgrade(u->plan, &u->error);
    return NULL;
}

/* Launches go on through the exchange, which several threads ask for at once. */
static void test_threads(void **state) {
    (void)state;
    enum { NUM_LAUNCHING = 3, NUM_UPGRADING = 3 };
    pthread_t launchers[NUM_LAUNCHING], upgraders[NUM_UPGRADING];
    launching jobs[NUM_LAUNCHING];
    upgrading upgrades[NUM_UPGRADING];
    atomic_bool done = false;
    use_compiler("exec cc \"$@\"");
    loom_context *context = rig_context(NULL);
    cache_plan(context, "fp32 d=8", CACHED);
    loom_plan *plan = make_asking(context, "fp32 d=8", OWN);
    for (int i = 0; i < NUM_LAUNCHING; i++) {
        jobs[i] = (launching){.context = context, .plan = plan, .device = LOOM_DEVICE_HOST, .done = &done};
        assert_int_equal(pthread_create(&launchers[i], NULL, launch_until_done, &jobs[i]), 0);
    }
    for (int i = 0; i < NUM_UPGRADING; i++) {
        upgrades[i] = (upgrading){.plan = plan, .error = LOOM_ERROR_INIT};
        assert_int_equal(pthread_create(&upgraders[i], NULL, upgrade, &upgrades[i]), 0);
    }
    open_gate();
    for (int i = 0; i < NUM_UPGRADING; i++) {
        pthread_join(upgraders[i], NULL);
        if (upgrades[i].error.status) fail_msg("%s: %s", upgrades[i].error.field, upgrades[i].error.text);
    }
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), OWN);
    atomic_store(&done, true);
    for (int i = 0; i < NUM_LAUNCHING; i++) {
        pthread_join(launchers[i], NULL);
        if (!jobs[i].fine) fail_msg("launch %lld: %s", (long long)jobs[i].num_launches, jobs[i].error.text);
    }
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* -- Packs ----------------------------------------------------------------------------------------------- */

/* A pack of target mma serves a plan that prefers hopper. */
static void test_pack_serves(void **state) {
    (void)state;
    enum { MAX_KERNELS = 16 };
    loom_error error = LOOM_ERROR_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_context *context = context_for(9, 0);
    loom__arena arena = {&context->memory, NULL};
    loom__pack_kernel kernels[MAX_KERNELS];
    size_t num_bytes = 0;
    const char *bytes = NULL;
    desc.problem = "bf16 d=64";
    desc.target = "mma";
    desc.arch = "sm_90";
    desc.device = LOOM_DEVICE_NONE;
    loom_plan *plan = rig_plan_of(context, &desc);
    int32_t num_kernels = loom_plan_num_kernels(plan);
    const char *record = loom__plan_record(plan, &arena);
    assert_in_range(num_kernels, 1, MAX_KERNELS);
    for (int32_t i = 0; i < num_kernels; i++) {
        loom_kernel kernel = rig_kernel(plan, i);
        kernels[i] = loom__pack_take(&kernel);
    }
    assert_ok(error, loom__pack_print(context, &record, 1, kernels, &num_kernels, &arena, &bytes, &num_bytes,
                                      &error));
    char *copy = malloc(num_bytes);
    memcpy(copy, bytes, num_bytes);
    loom_plan_destroy(plan);
    loom__arena_free(&arena);
    loom_context_destroy(context);
    rig_remove_tree(rig_path("cache"));

    context = context_for(9, 0);
    assert_ok(error, loom_context_add_pack(context, "a.pack", copy, num_bytes, &error));
    desc = (loom_plan_desc)LOOM_PLAN_DESC_INIT;
    desc.problem = "bf16 d=64";
    desc.flags = LOOM_ASYNC | LOOM_STAND_IN;
    plan = rig_plan_of(context, &desc);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_TARGET), "mma");
    assert_string_equal(rig_kernel(plan, 0).pack, "a.pack");
    rig_expect(loom_plan_text(plan, LOOM_TEXT_WHY),
               "target mma |from a.pack.|The plan's own: target hopper ");
    assert_ok(error, loom_plan_wait(plan, 600, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_TARGET), "mma");
    loom_plan_destroy(plan);
    assert_int_equal(fake.loaded, 0);
    loom_context_destroy(context);
    free(copy);
}

/* -- What is refused ------------------------------------------------------------------------------------- */

static void test_refusals(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    loom_plan *plan = NULL;
    loom_context *context = rig_context(NULL);
    loom_plan_desc desc = on_host("fp32 d=8", NULL, LOOM_STAND_IN);
    assert_fails(error, LOOM_INVALID, "desc.flags", "flags are 0x4|needs that flag",
                 loom_plan_create(context, &desc, &plan, &error));
    desc.flags = LOOM_STAND_IN | LOOM_ASYNC | LOOM_NO_COMPILE;
    assert_fails(error, LOOM_INVALID, "desc.flags", "flags are 0x7|not LOOM_NO_COMPILE",
                 loom_plan_create(context, &desc, &plan, &error));
    desc.flags = LOOM_STAND_IN | LOOM_ASYNC;
    desc.rigor = LOOM_MEASURE;
    assert_fails(error, LOOM_INVALID, "desc.flags", "flags are 0x6|LOOM_MEASURE",
                 loom_plan_create(context, &desc, &plan, &error));
    desc.rigor = LOOM_ESTIMATE;
    desc.device = LOOM_DEVICE_NONE;
    desc.arch = "sm_90";
    assert_fails(error, LOOM_INVALID, "desc.flags", "LOOM_DEVICE_NONE",
                 loom_plan_create(context, &desc, &plan, &error));
    desc = on_host("fp32 d=8 mask={k <= }", NULL, LOOM_STAND_IN | LOOM_ASYNC);
    assert_fails(error, LOOM_INVALID, "problem.mask", "", loom_plan_create(context, &desc, &plan, &error));
    assert_null(plan);
    assert_fails(error, LOOM_INVALID, "plan", "NULL", loom_plan_upgrade(NULL, &error));

    /* A plan without stand-in has nothing to upgrade. */
    desc = on_host("fp32 d=8", NULL, 0);
    plan = rig_plan_of(context, &desc);
    assert_ok(error, loom_plan_upgrade(plan, &error));
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* -- On a GPU -------------------------------------------------------------------------------------------- */

/* Launches of both passes go on through the exchange. A rig takes its workspace before each launch, so a
 * launch whose workspace is of the other side of the exchange is the one that may be refused. */
static void test_gpu(void **state) {
    (void)state;
    static const char PROBLEM[] = "bf16 d=64 causal backward";
    loom_context *context = rig_context(NULL);
    loom__arena arena = {&context->memory, NULL};
    loom_error error = LOOM_ERROR_INIT;
    const loom__device *device = NULL;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    atomic_bool done = false;
    pthread_t thread;
    desc.problem = PROBLEM;
    desc.flags = LOOM_ASYNC | LOOM_STAND_IN;
    assert_ok(error, loom__device_open(context, 0, &device, &error));
    if (strcmp(device->arch, "sm_90")) { /* the default is mma: only another schedule needs a stand-in */
        const loom__candidate *list = NULL;
        int32_t num = 0;
        loom__request request = {.problem = PROBLEM, .target = "mma", .arch = device->arch};
        assert_ok(error,
                  loom__generator_candidates(context, &request, LOOM_FORWARD, &arena, &list, &num, &error));
        assert_true(num > 1);
        desc.schedule = list[1].text;
    }
    double start = loom__now();
    loom_plan *plan = rig_plan_of(context, &desc);
    printf("%s\n%.2f s until it can be launched\n", loom_plan_text(plan, LOOM_TEXT_WHY), loom__now() - start);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_TARGET), "mma");
    launching before = {.context = context, .plan = plan, .done = &done}, after = before;
    atomic_store(&done, true);
    launch_until_done(&before); /* twice */
    if (!before.fine) fail_msg("the stand-in: %s", before.error.text);
    assert_ok(error, loom_plan_wait(plan, 600, &error));
    printf("%.2f s until the plan's own kernels are compiled\n", loom__now() - start);
    atomic_store(&done, false);
    assert_int_equal(pthread_create(&thread, NULL, launch_until_done, &after), 0);
    start = loom__now();
    assert_ok(error, loom_plan_upgrade(plan, &error));
    printf("%.2f s for the upgrade\n", loom__now() - start);
    if (!desc.schedule) assert_string_equal(loom_plan_text(plan, LOOM_TEXT_TARGET), "hopper");
    if (desc.schedule) assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), desc.schedule);
    for (int32_t i = 0; i < loom_plan_num_kernels(plan); i++)
        rig_expect(rig_kernel(plan, i).certificate, "result fine\n");
    atomic_store(&done, true);
    pthread_join(thread, NULL);
    if (!after.fine && strncmp(after.error.field, "args.workspace", strlen("args.workspace")))
        fail_msg("launch %lld: %s: %s", (long long)after.num_launches, after.error.field, after.error.text);
    launching last = {.context = context, .plan = plan, .done = &done};
    launch_until_done(&last);
    if (!last.fine) fail_msg("the plan's own kernels: %s", last.error.text);
    loom_plan_destroy(plan);
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

/* With the NVRTC that the environment names. */
static int setup_gpu(void **state) {
    const char *given = getenv("LOOM_NVRTC_DIR");
    char *kept = given ? strdup(given) : NULL;
    int failed = setup_real(state);
    if (kept) setenv("LOOM_NVRTC_DIR", kept, 1);
    free(kept);
    return failed;
}

static int run_gpu(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_gpu, setup_gpu, rig_teardown)};
    loom_error error = LOOM_ERROR_INIT;
    loom_context *context = rig_context(NULL);
    int32_t num_devices = 0;
    loom_status status = loom__driver_open(context, &error);
    if (!status) status = loom__device_count(context, &num_devices, &error);
    loom_context_destroy(context);
    if (status || !num_devices) {
        printf("SKIPPED: no GPU: %s\n", status ? error.text : "the driver lists none");
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_cached_kernels_serve, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_wider_problem, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_cheapest_serves, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_default_is_compiled, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_bad_kernels_do_not_serve, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_threads, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_pack_serves, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_refusals, setup_real, rig_teardown),
    };
    if (argc > 1 && strcmp(argv[1], "gpu") == 0) return run_gpu();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
