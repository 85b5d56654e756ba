/* test_context.c - options, environment, errors of creation, and failing memory. */
#include "runtime_rig.h"

static void test_defaults(void **state) {
    (void)state;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_context_create(NULL, &context, &error));
    assert_int_equal(context->log_level, 1);
    assert_true(context->num_threads >= 1);
    assert_string_equal(context->cache_dir, rig_path("cache"));
    loom_context_destroy(context);
    loom_context_destroy(NULL);
    assert_int_equal(loom_version(), 100);
    assert_string_equal(loom_status_name(LOOM_NOT_FOUND), "NOT_FOUND");
    assert_string_equal(loom_status_name((loom_status)99), "UNKNOWN");
}

static void test_refusals(void **state) {
    (void)state;
    loom_context *context = (loom_context *)1;
    loom_error error;
    loom_options options = LOOM_OPTIONS_INIT;
    assert_fails(error, LOOM_INVALID, "context", "NULL", loom_context_create(NULL, NULL, &error));

    options.log_level = 6;
    assert_fails(error, LOOM_INVALID, "options.log_level", "6|0 to 5",
                 loom_context_create(&options, &context, &error));
    assert_null(context);
    options = (loom_options)LOOM_OPTIONS_INIT;
    options.num_threads = -2;
    assert_fails(error, LOOM_INVALID, "options.num_threads", "-2|0 to 1024",
                 loom_context_create(&options, &context, &error));
    options = (loom_options)LOOM_OPTIONS_INIT;
    options.size = 3;
    assert_fails(error, LOOM_INVALID, "options.size", "size is 3|LOOM_*_INIT",
                 loom_context_create(&options, &context, &error));
    assert_int_equal(loom_context_create(&options, &context, NULL), LOOM_INVALID);

    setenv("LOOM_LOG", "loud", 1);
    assert_fails(error, LOOM_INVALID, "LOOM_LOG", "'loud'|0 to 5",
                 loom_context_create(NULL, &context, &error));
    options = (loom_options)LOOM_OPTIONS_INIT;
    options.log_level = 0;
    assert_ok(error, loom_context_create(&options, &context, &error)); /* the option wins */
    loom_context_destroy(context);
}

/* A struct of a newer header is taken as long as what it appended is zero. */
static void test_newer_struct(void **state) {
    (void)state;
    struct {
        loom_options options;
        int64_t appended;
    } newer = {LOOM_OPTIONS_INIT, 0};
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    newer.options.size = sizeof newer;
    assert_ok(error, loom_context_create(&newer.options, &context, &error));
    loom_context_destroy(context);
    newer.appended = 1;
    assert_fails(error, LOOM_UNSUPPORTED, "options.size", "newer|0.1.0",
                 loom_context_create(&newer.options, &context, &error));
}

static void test_options_win(void **state) {
    (void)state;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_options options = LOOM_OPTIONS_INIT;
    setenv("LOOM_LOG", "3", 1);
    setenv("LOOM_NVRTC_DIR", "/from/environment", 1);
    setenv("LOOM_SCHED", " tile=1x2 warps=4 / tile=3 ", 1);
    assert_ok(error, loom_context_create(NULL, &context, &error));
    assert_int_equal(context->log_level, 3);
    assert_string_equal(context->nvrtc_dir, "/from/environment");
    assert_string_equal(context->schedule, "tile=1x2 warps=4");
    assert_string_equal(context->schedule_backward, "tile=3");
    loom_context_destroy(context);

    options.cache_dir = "";
    options.nvrtc_dir = "/from/options";
    options.log_level = 0;
    options.num_threads = 3;
    assert_ok(error, loom_context_create(&options, &context, &error));
    assert_int_equal(context->log_level, 0);
    assert_int_equal(context->num_threads, 3);
    assert_string_equal(context->nvrtc_dir, "/from/options");
    assert_string_equal(context->cache_dir, "");
    loom_context_destroy(context);
}

static void test_schedule_from_environment(void **state) {
    (void)state;
    setenv("LOOM_SCHED", "/ tile=9", 1);
    loom_context *context = rig_context(NULL);
    loom_plan *plan = rig_plan(context, "fp32 backward");
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=4");
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE_BACKWARD), "tile=9");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static void test_canonical(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom_error error = LOOM_ERROR_INIT;
    char text[16];
    size_t needed = 0;
    assert_ok(error, loom_problem_canonical(context, "fp32 b a", text, sizeof text, &needed, &error));
    assert_string_equal(text, "a b fp32");
    assert_int_equal(needed, 9);
    assert_ok(error, loom_problem_canonical(context, "fp32 b a", text, 9, NULL, &error));
    assert_fails(error, LOOM_INVALID, "capacity", "capacity is 8|needs 9",
                 loom_problem_canonical(context, "fp32 b a", text, 8, &needed, &error));
    needed = 0;
    assert_fails(error, LOOM_INVALID, "capacity", "needs 9",
                 loom_problem_canonical(context, "fp32 b a", NULL, 0, &needed, &error));
    assert_int_equal(needed, 9);
    assert_fails(error, LOOM_INVALID, "problem", "NULL",
                 loom_problem_canonical(context, NULL, text, 8, &needed, &error));
    assert_fails(error, LOOM_INVALID, "context", "NULL",
                 loom_problem_canonical(NULL, "a", text, 8, &needed, &error));
    loom_context_destroy(context);
}

/* -- Failing memory -------------------------------------------------------------------------------------- */

typedef struct counter {
    pthread_mutex_t lock;
    long left; /* allocations until one fails; negative: never */
    long live;
} counter;

static void *counted_resize(void *user, void *block, size_t bytes) {
    counter *c = user;
    pthread_mutex_lock(&c->lock);
    void *result = NULL;
    if (bytes == 0) {
        c->live -= block != NULL;
        free(block);
    } else if (c->left != 0) {
        if (c->left > 0) c->left--;
        c->live += block == NULL;
        result = realloc(block, bytes);
    }
    pthread_mutex_unlock(&c->lock);
    return result;
}

/* Makes a context and a plan, launches nothing; true if all went well. */
static bool make_plan(counter *c, const char *cache_dir, bool *memory_error) {
    loom__hooks hooks = {.memory = {counted_resize, c}};
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_options options = LOOM_OPTIONS_INIT;
    options.log_level = 0;
    options.num_threads = 2;
    options.cache_dir = cache_dir;
    desc.problem = "fp32 backward params";
    desc.device = LOOM_DEVICE_HOST;
    loom_error error = LOOM_ERROR_INIT;
    loom_status status = loom__context_create(&options, &hooks, &context, &error);
    if (status == LOOM_OK) status = loom_plan_create(context, &desc, &plan, &error);
    if (status != LOOM_OK) {
        *memory_error = status == LOOM_MEMORY;
        if (!*memory_error) print_message("%s: %s: %s\n", loom_status_name(status), error.field, error.text);
        assert_null(plan);
    }
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return status == LOOM_OK;
}

/* Every allocation in turn fails: the call answers MEMORY, or does without, and nothing leaks. */
static void fail_each(counter *c, const char *cache_dir, int least) {
    int failures = 0;
    bool memory_error = false;
    for (long n = 0;; n++) {
        c->left = n;
        bool done = make_plan(c, cache_dir, &memory_error);
        assert_int_equal(c->live, 0);
        if (done && c->left > 0) break;
        if (!done) {
            assert_true(memory_error);
            failures++;
        }
    }
    assert_true(failures >= least);
}

static void test_failing_memory(void **state) {
    (void)state;
    counter c = {.lock = PTHREAD_MUTEX_INITIALIZER, .left = -1};
    bool memory_error = false;
    assert_true(make_plan(&c, NULL, &memory_error)); /* fills the cache */
    assert_int_equal(c.live, 0);
    fail_each(&c, NULL, 30);

    /* The same where each plan is compiled, by a compiler that has the answers ready. */
    char script[2048];
    snprintf(
        script, sizeof script,
        "#!/bin/sh\n[ \"$1\" = -v ] && echo 'fake version 1.0' && exit\n"
        "for f in '%s'/*/kernel.c; do cmp -s \"$f\" kernel.c && cp \"${f%%.c}.so\" kernel.so; done; exit 0\n",
        rig_path("cache"));
    rig_write(rig_path("cc"), script);
    chmod(rig_path("cc"), 0700);
    setenv("CC", rig_path("cc"), 1);
    fail_each(&c, "", 30);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_defaults, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_refusals, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_newer_struct, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_options_win, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_schedule_from_environment, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_canonical, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_failing_memory, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
