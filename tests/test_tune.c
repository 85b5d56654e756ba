/* test_tune.c - plans with LOOM_MEASURE: on the host with the library's own generator, and what they refuse
 * on a GPU that is a table of functions. `attnloom tune` is tested in test_cli.c. */
#include "runtime_rig.h"

#include <stdatomic.h>

#include "device_rig.h"
#include "generator.h"
#include "wisdom.h"

static const loom_shape SMALL = {1, 2, 2, 128, 128};

static int setup_real(void **state) {
    int failed = rig_setup(state);
    unsetenv("LOOM_GEN_DIR");
    return failed;
}

static loom_plan_desc measured(const char *problem) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = problem;
    desc.device = LOOM_DEVICE_HOST;
    desc.rigor = LOOM_MEASURE;
    desc.hint = SMALL;
    desc.measure_seconds = 60;
    return desc;
}

static const char *exported(loom_context *context) {
    static char text[1 << 14];
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_wisdom_export(context, text, sizeof text, NULL, &error));
    return text;
}

/* The schedule that wisdom has for a pass; valid until the next call. */
static const char *known(loom_context *context, const char *pass) {
    static char schedule[64];
    char word[32];
    snprintf(word, sizeof word, " pass=%s ", pass);
    const char *line = strstr(exported(context), word);
    if (!line) return "";
    line = strstr(line, "schedule=\"") + strlen("schedule=\"");
    snprintf(schedule, sizeof schedule, "%.*s", (int)strcspn(line, "\""), line);
    return schedule;
}

static void test_measured_once(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom_plan_desc desc = measured("fp32 d=8 causal backward");
    loom_plan *plan = rig_plan_of(context, &desc);
    assert_int_equal(rig_count(exported(context), "\n"), 2);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), known(context, "forward"));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE_BACKWARD), known(context, "backward"));
    loom_plan_destroy(plan);
    loom_context_destroy(context);

    /* Again, in another process and for another length of the class: nothing is timed. */
    context = rig_context(NULL);
    context->log_level = LOOM__LOG_CANDIDATE;
    desc.hint.seq_q = desc.hint.seq_k = 120;
    rig_log_start();
    plan = rig_plan_of(context, &desc);
    const char *log = rig_log_stop();
    assert_null(strstr(log, "tune schedule="));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), known(context, "forward"));
    loom_plan_destroy(plan);

    /* A class of its own is measured, though a near one is known; of the forward alone where the backward's
     * schedule is asked for. */
    desc.hint.seq_q = desc.hint.seq_k = 250;
    desc.schedule_backward = "tile=32x32";
    rig_log_start();
    plan = rig_plan_of(context, &desc);
    log = rig_log_stop();
    assert_non_null(strstr(log, "tune schedule="));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE_BACKWARD), "tile=32x32");
    assert_int_equal(rig_count(exported(context), " pass=forward "), 2);
    assert_int_equal(rig_count(exported(context), " pass=backward "), 1);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* Wisdom for the class that is faster than anything can be, with this schedule. */
static void learn_wrong(loom_context *context, const char *schedule) {
    loom_error error = LOOM_ERROR_INIT;
    loom__arena arena = {&context->memory, NULL};
    char digest[33];
    loom__wisdom_entry entry = {.problem = "fp32 d=8",
                                .target = "host",
                                .class = loom__shape_class_of(&SMALL),
                                .generator = digest,
                                .ns = 1,
                                .schedule = schedule};
    assert_ok(error, loom__generator_digest(context, digest, &error));
    assert_ok(error, loom__wisdom_device(context, NULL, &arena, &entry, &error));
    assert_ok(error, loom__wisdom_learn(context, &entry, NULL, &error));
    loom__arena_free(&arena);
}

/* What wisdom has and no plan can use does not fail one, and does not keep its class from being measured, now
 * and later. */
static void test_useless_wisdom(void **state) {
    (void)state;
    static const char *const SCHEDULES[] = {"tile=99x99", "tile=16x64"};
    char script[1000];
    snprintf(script, sizeof script,
             "#!/bin/sh\ngrep -q 'Schedule *tile=16x64' kernel.c 2>/dev/null && { echo 'error: refused' >&2; "
             "exit 1; }\n"
             "exec cc \"$@\"\n");
    rig_write(rig_path("picky"), script);
    chmod(rig_path("picky"), 0700);
    setenv("CC", rig_path("picky"), 1);
    for (size_t i = 0; i < sizeof SCHEDULES / sizeof SCHEDULES[0]; i++) {
        rig_remove_tree(rig_path("cache"));
        loom_context *context = rig_context(NULL);
        learn_wrong(context, SCHEDULES[i]);
        assert_string_equal(known(context, "forward"), SCHEDULES[i]);
        loom_plan_desc desc = measured("fp32 d=8");
        desc.rigor = LOOM_ESTIMATE;
        loom_plan *plan = rig_plan_of(context, &desc);
        assert_string_not_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), SCHEDULES[i]);
        loom_plan_destroy(plan);
        desc.rigor = LOOM_MEASURE;
        plan = rig_plan_of(context, &desc);
        assert_string_not_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), SCHEDULES[i]);
        assert_string_equal(known(context, "forward"), loom_plan_text(plan, LOOM_TEXT_SCHEDULE));
        assert_null(strstr(exported(context), " ns=1 "));
        loom_plan_destroy(plan);
        loom_context_destroy(context);

        context = rig_context(NULL);
        context->log_level = LOOM__LOG_CANDIDATE;
        rig_log_start();
        loom_plan_destroy(rig_plan_of(context, &desc));
        assert_null(strstr(rig_log_stop(), "tune schedule="));
        loom_context_destroy(context);
    }
}

/* Where there is no time the plan is that of the model, and nothing is remembered. */
static void test_no_time(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom_plan_desc desc = measured("fp32 d=8");
    desc.measure_seconds = 1e-6;
    loom_plan *plan = rig_plan_of(context, &desc);
    desc.rigor = LOOM_ESTIMATE;
    loom_plan *model = rig_plan_of(context, &desc);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), loom_plan_text(model, LOOM_TEXT_SCHEDULE));
    assert_string_equal(exported(context), "");
    loom_plan_destroy(plan);
    loom_plan_destroy(model);
    loom_context_destroy(context);
}

/* The least of some launches, as others use the processors too. */
static double seconds_of_launch(const loom_plan *plan, const loom_shape *shape) {
    loom_error error = LOOM_ERROR_INIT;
    loom_args args = LOOM_ARGS_INIT;
    size_t count = (size_t)shape->heads_q * (size_t)shape->seq_q * 8;
    float *memory = calloc(4 * count, sizeof *memory);
    double least = 1e9;
    args.shape = *shape;
    args.q = loom_dense(memory, shape->seq_q, shape->heads_q, 8);
    args.k = loom_dense(memory + count, shape->seq_q, shape->heads_q, 8);
    args.v = loom_dense(memory + 2 * count, shape->seq_q, shape->heads_q, 8);
    args.o = loom_dense(memory + 3 * count, shape->seq_q, shape->heads_q, 8);
    for (int i = 0; i < 3; i++) {
        double start = loom__now();
        assert_ok(error, loom_forward(plan, &args, NULL, &error));
        double seconds = loom__now() - start;
        least = seconds < least ? seconds : least;
    }
    free(memory);
    return least;
}

/* Launches of a first look end with the time there is: that for warming, the one that is not timed, and half
 * of a third one fit. */
static void test_first_look_ends(void **state) {
    (void)state;
    static const loom_shape LONG = {1, 2, 2, 8192, 8192};
    loom_context *context = rig_context(NULL);
    loom_plan_desc desc = measured("fp32 d=8");
    loom_plan_destroy(rig_plan_of(context, &desc)); /* compiles all candidates */
    desc.hint = LONG;
    desc.rigor = LOOM_ESTIMATE;
    loom_plan *plan = rig_plan_of(context, &desc);
    desc.measure_seconds = 2.5 * seconds_of_launch(plan, &LONG);
    loom_plan_destroy(plan);
    desc.rigor = LOOM_MEASURE;
    context->log_level = LOOM__LOG_CANDIDATE;
    rig_log_start();
    loom_plan_destroy(rig_plan_of(context, &desc));
    assert_null(strstr(rig_log_stop(), "launches=3 "));
    loom_context_destroy(context);
}

static void *make_in_thread(void *context) {
    loom_plan_desc desc = measured("fp32 d=8");
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    if (loom_plan_create(context, &desc, &plan, &error)) fprintf(stderr, "%s: %s\n", error.field, error.text);
    return plan;
}

/* Threads that want one plan at once: the first measures, all have its schedule. */
static void test_threads(void **state) {
    (void)state;
    enum { NUM_THREADS = 4, NUM_CANDIDATES = 5 };
    loom_context *context = rig_context(NULL);
    pthread_t threads[NUM_THREADS];
    void *plans[NUM_THREADS];
    context->log_level = LOOM__LOG_CANDIDATE;
    rig_log_start();
    for (int i = 0; i < NUM_THREADS; i++) pthread_create(&threads[i], NULL, make_in_thread, context);
    for (int i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], &plans[i]);
    const char *log = rig_log_stop();
    assert_in_range(rig_count(log, "launches=3 "), 1, NUM_CANDIDATES);
    for (int i = 0; i < NUM_THREADS; i++) {
        assert_non_null(plans[i]);
        assert_string_equal(loom_plan_text(plans[i], LOOM_TEXT_SCHEDULE), known(context, "forward"));
        loom_plan_destroy(plans[i]);
    }
    loom_context_destroy(context);
}

static void test_wrong_problem(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom_plan_desc desc = measured("fp32 d=8 mask={k <= }");
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_fails(error, LOOM_INVALID, "problem.mask", "", loom_plan_create(context, &desc, &plan, &error));
    assert_null(plan);
    loom_context_destroy(context);
}

/* A caller whose header has no measure_seconds yet. */
static void test_older_header(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom_plan_desc desc = measured("fp32 d=8");
    desc.size = offsetof(loom_plan_desc, measure_seconds);
    desc.measure_seconds = -1; /* not the caller's */
    desc.rigor = LOOM_ESTIMATE;
    loom_plan_destroy(rig_plan_of(context, &desc));
    desc.size--;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_fails(error, LOOM_INVALID, "desc.size", "size is ",
                 loom_plan_create(context, &desc, &plan, &error));
    loom_context_destroy(context);
}

static int capture_result;
static int f_capturing(loom__cuda_handle stream, int *status) {
    *status = 0;
    return stream ? 1 : capture_result;
}

/* While a stream is captured nothing is launched, allocated or synchronised. */
static void test_capture(void **state) {
    (void)state;
    enum { CAPTURE_IMPLICIT = 906 };
    loom__driver_api driver = DRIVER; /* has no functions that allocate: to call one would end the program */
    const loom__hooks hooks = {.driver = &driver};
    driver.stream_capturing = f_capturing;
    setenv("LOOM_GEN_DIR", "tests/fixtures/gen", 1);
    loom_context_destroy(context_for(9, 0));
    loom_context *context = rig_context(&hooks);
    loom_plan_desc desc = measured("bf16");
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    desc.device = 0;
    capture_result = CAPTURE_IMPLICIT;
    assert_fails(error, LOOM_INVALID, "desc.rigor", "a stream of the device is being captured",
                 loom_plan_create(context, &desc, &plan, &error));
    assert_null(plan);
    assert_int_equal(fake.launches, 0);
    loom_context_destroy(context);
}

/* -- Beside captures ------------------------------------------------------------------------------------- */

/* A driver whose memory is the host's and whose kernels do nothing. Calls that would break the capture of
 * another thread are counted, unless the thread said before that they are not meant for that. */
static struct apart { _Atomic int num_breaking, num_on_default_stream, num_launches, num_streams; } apart;
static _Thread_local int own_mode;

static void may_break(void) { apart.num_breaking += own_mode != 2; }

static int a_mode(int *mode) {
    int old = own_mode;
    own_mode = *mode;
    *mode = old;
    return 0;
}
static int a_load(loom__cuda_handle *module, const void *image) {
    may_break();
    return f_load(module, image);
}
static int a_unload(loom__cuda_handle module) {
    may_break();
    return f_unload(module);
}
static int a_alloc(loom__device_ptr *pointer, size_t bytes) {
    may_break();
    *pointer = (loom__device_ptr)(uintptr_t)calloc(1, bytes);
    return *pointer == 0;
}
static int a_free(loom__device_ptr pointer) {
    may_break();
    free((void *)(uintptr_t)pointer);
    return 0;
}
static int a_upload(loom__device_ptr to, const void *from, size_t bytes, loom__cuda_handle stream) {
    apart.num_on_default_stream += !stream;
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}
static int a_download(void *to, loom__device_ptr from, size_t bytes, loom__cuda_handle stream) {
    apart.num_on_default_stream += !stream;
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return 0;
}
static int a_create(loom__cuda_handle *stream, unsigned flags) {
    may_break();
    apart.num_streams++;
    return *stream = &apart, flags != 1;
}
static int a_destroy(loom__cuda_handle stream) {
    may_break();
    apart.num_streams--;
    return !stream;
}
static int a_synchronize(loom__cuda_handle stream) {
    may_break();
    apart.num_on_default_stream += !stream;
    return 0;
}
static int a_event(loom__cuda_handle *event, unsigned flags) { return *event = &apart, (int)flags; }
static int a_event_destroy(loom__cuda_handle event) { return !event; }
static int a_record(loom__cuda_handle event, loom__cuda_handle stream) {
    apart.num_on_default_stream += !stream;
    return !event;
}
static int a_elapsed(float *ms, loom__cuda_handle start, loom__cuda_handle end) {
    return *ms = 1, !start || !end;
}
static int a_launch(loom__cuda_handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                    unsigned block_x, unsigned block_y, unsigned block_z, unsigned smem_bytes,
                    loom__cuda_handle stream, void **parameters, void **extra) {
    apart.num_launches++;
    apart.num_on_default_stream += !stream;
    return f_launch(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, smem_bytes, stream,
                    parameters, extra);
}

/* Tuning has memory and a stream of its own, and nothing of it is a call that breaks what another thread
 * captures. */
static void test_beside_captures(void **state) {
    (void)state;
    loom__driver_api driver = DRIVER;
    const loom__hooks hooks = {.driver = &driver};
    driver.capture_mode = a_mode;
    driver.module_load = a_load;
    driver.module_unload = a_unload;
    driver.memory_alloc = a_alloc;
    driver.memory_free = a_free;
    driver.memory_upload_async = a_upload;
    driver.memory_download_async = a_download;
    driver.stream_create = a_create;
    driver.stream_destroy = a_destroy;
    driver.stream_synchronize = a_synchronize;
    driver.event_create = a_event;
    driver.event_destroy = a_event_destroy;
    driver.event_record = a_record;
    driver.event_elapsed = a_elapsed;
    driver.launch = a_launch;
    loom_context_destroy(context_for(8, 0));
    loom_context *context = rig_context(&hooks);
    loom_plan_desc desc = measured("bf16 d=16");
    desc.device = 0;
    desc.alignment = 16;
    desc.measure_seconds = 1;
    loom_plan_destroy(
        rig_plan_of(context, &desc)); /* of the model's schedule, as nothing computes the right thing */
    assert_true(apart.num_launches > 0);
    assert_int_equal(apart.num_breaking, 0);
    assert_int_equal(apart.num_on_default_stream, 0);
    assert_int_equal(apart.num_streams, 0);
    assert_int_equal(own_mode, 0);
    assert_string_equal(exported(context), "");
    loom_context_destroy(context);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_measured_once, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_useless_wisdom, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_no_time, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_first_look_ends, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_threads, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_wrong_problem, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_older_header, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_beside_captures, setup_real, rig_teardown),
        cmocka_unit_test_setup_teardown(test_capture, setup_real, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
