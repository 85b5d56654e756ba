/* Launches beside each other on a GPU: streams, threads, CUDA graphs, and whatever context is current.
 *
 * ctest: gpu
 */
#define _XOPEN_SOURCE 700
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include "rigs.h"

static const char PROBLEM[] = "bf16 d=64 mask={causal} backward deterministic";
enum { BATCH = 2, HEADS_Q = 4, HEADS_KV = 2, SEQ = 333, DIM = 64, NUM_JOBS = 4, NUM_OUTPUTS = 5 };
enum { NON_BLOCKING = 1, CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1 };

/* Tensors, workspace and stream of one launch of both passes. */
typedef struct job {
    loom_args args;
    struct {
        void *data;
        size_t bytes;
    } outputs[NUM_OUTPUTS];
    loom__cuda_handle stream;
} job;

static struct {
    const loom_plan *plan;
    const loom__driver_api *driver;
    const loom__device *device;
    loom__device_memory *memory;
    job jobs[NUM_JOBS];
    uint64_t expected[NUM_JOBS]; /* digests of a launch that ran alone */
} all;

static void driver_ok(int result) {
    if (result) fail_msg("the driver answered %d", result);
}

static void check_status(loom_status status, const loom_error *error) {
    if (status) fail_msg("%s: %s", error->field, error->text);
}

static void *device_memory(size_t bytes) {
    loom_error error = LOOM_ERROR_INIT;
    void *data = NULL;
    check_status(loom__device_memory_alloc(all.memory, bytes, &data, &error), &error);
    return data;
}

/* bf16 noise between -2 and 2 on the device. */
static void *noise(size_t count, uint32_t seed) {
    loom_error error = LOOM_ERROR_INIT;
    void *data = device_memory(2 * count);
    uint16_t *host = malloc(2 * count);
    assert_non_null(host);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        host[i] = (uint16_t)((seed >> 31) << 15 | (0x3e00 + (seed >> 16) % 0x200));
    }
    check_status(loom__device_memory_upload(all.memory, data, host, 2 * count, &error), &error);
    free(host);
    return data;
}

static void make_job(job *j, uint32_t seed) {
    loom_error error = LOOM_ERROR_INIT;
    const size_t count_q = (size_t)BATCH * SEQ * HEADS_Q * DIM, count_kv = (size_t)BATCH * SEQ * HEADS_KV * DIM;
    loom_args *args = &j->args;
    *args = (loom_args)LOOM_ARGS_INIT;
    args->shape = (loom_shape){BATCH, HEADS_Q, HEADS_KV, SEQ, SEQ};
    args->q = loom_dense(noise(count_q, seed), SEQ, HEADS_Q, DIM);
    args->k = loom_dense(noise(count_kv, seed + 1), SEQ, HEADS_KV, DIM);
    args->v = loom_dense(noise(count_kv, seed + 2), SEQ, HEADS_KV, DIM);
    args->dout = loom_dense(noise(count_q, seed + 3), SEQ, HEADS_Q, DIM);
    args->o = loom_dense(device_memory(2 * count_q), SEQ, HEADS_Q, DIM);
    args->dq = loom_dense(device_memory(2 * count_q), SEQ, HEADS_Q, DIM);
    args->dk = loom_dense(device_memory(2 * count_kv), SEQ, HEADS_KV, DIM);
    args->dv = loom_dense(device_memory(2 * count_kv), SEQ, HEADS_KV, DIM);
    const size_t lse_bytes = sizeof(float) * BATCH * HEADS_Q * SEQ;
    args->lse = loom_dense_lse(device_memory(lse_bytes), HEADS_Q, SEQ);
    check_status(loom_workspace_bytes(all.plan, LOOM_BACKWARD, args, &args->workspace_bytes, &error), &error);
    args->workspace = device_memory(args->workspace_bytes);
    void *const data[NUM_OUTPUTS] = {args->o.data, args->lse.data, args->dq.data, args->dk.data, args->dv.data};
    const size_t bytes[NUM_OUTPUTS] = {2 * count_q, lse_bytes, 2 * count_q, 2 * count_kv, 2 * count_kv};
    for (int i = 0; i < NUM_OUTPUTS; i++) {
        j->outputs[i].data = data[i];
        j->outputs[i].bytes = bytes[i];
    }
    check_status(loom__device_enter(rigs.context, all.device, &error), &error);
    driver_ok(all.driver->stream_create(&j->stream, NON_BLOCKING));
    loom__device_leave(rigs.context);
}

static loom_status launch(job *j, loom_error *error) {
    loom_status status = loom_forward(all.plan, &j->args, j->stream, error);
    return status ? status : loom_backward(all.plan, &j->args, j->stream, error);
}

/* FNV-1a over all outputs. */
static uint64_t digest(const job *j) {
    loom_error error = LOOM_ERROR_INIT;
    uint64_t sum = 1469598103934665603u;
    for (int i = 0; i < NUM_OUTPUTS; i++) {
        unsigned char *host = malloc(j->outputs[i].bytes);
        assert_non_null(host);
        check_status(
            loom__device_memory_download(all.memory, host, j->outputs[i].data, j->outputs[i].bytes, &error),
            &error);
        for (size_t at = 0; at < j->outputs[i].bytes; at++) sum = (sum ^ host[at]) * 1099511628211u;
        free(host);
    }
    return sum;
}

static void synchronize(void) {
    loom_error error = LOOM_ERROR_INIT;
    check_status(loom__device_memory_sync(all.memory, &error), &error);
}

/* Fills the outputs with 0xff, so that a launch that writes nothing is seen. */
static void spoil(const job *j) {
    loom_error error = LOOM_ERROR_INIT;
    synchronize();
    for (int i = 0; i < NUM_OUTPUTS; i++) {
        unsigned char *host = malloc(j->outputs[i].bytes);
        assert_non_null(host);
        memset(host, 0xff, j->outputs[i].bytes);
        check_status(
            loom__device_memory_upload(all.memory, j->outputs[i].data, host, j->outputs[i].bytes, &error),
            &error);
        free(host);
    }
    synchronize();
}

static void expect_all(void) {
    synchronize();
    for (int i = 0; i < NUM_JOBS; i++) {
        if (digest(&all.jobs[i]) != all.expected[i]) fail_msg("job %d has other bits than alone", i);
    }
}

/* Case J16: shared scratch memory of two streams. Here each launch brings its own. */
static void streams_do_not_disturb_each_other(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < NUM_JOBS; i++) spoil(&all.jobs[i]);
        for (int i = 0; i < 250; i++) check_status(launch(&all.jobs[i % NUM_JOBS], &error), &error);
        expect_all();
    }
}

static void *launch_often(void *argument) {
    job *j = argument;
    loom_error error = LOOM_ERROR_INIT;
    for (int i = 0; i < 100; i++)
        if (launch(j, &error)) return "a launch failed";
    loom__cuda_handle current = NULL;
    if (all.driver->context_current(&current) || current) return "the thread has a current context that it did not set";
    return NULL;
}

/* Each thread has no current context, and none afterwards. */
static void threads_share_a_plan(void **state) {
    (void)state;
    pthread_t threads[NUM_JOBS];
    for (int i = 0; i < NUM_JOBS; i++) spoil(&all.jobs[i]);
    for (int i = 0; i < NUM_JOBS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, launch_often, &all.jobs[i]), 0);
    for (int i = 0; i < NUM_JOBS; i++) {
        void *failure = NULL;
        assert_int_equal(pthread_join(threads[i], &failure), 0);
        if (failure) fail_msg("%s", (const char *)failure);
    }
    expect_all();
}

static void a_graph_replays_a_launch(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    job *j = &all.jobs[0];
    loom__cuda_handle graph = NULL, instance = NULL;
    check_status(loom__device_enter(rigs.context, all.device, &error), &error);
    driver_ok(all.driver->capture_begin(j->stream, CAPTURE_THREAD_LOCAL));
    loom_status status = launch(j, &error);
    driver_ok(all.driver->capture_end(j->stream, &graph));
    check_status(status, &error);
    driver_ok(all.driver->graph_instantiate(&instance, graph, 0));
    loom__device_leave(rigs.context);
    for (int replay = 0; replay < 3; replay++) {
        spoil(j);
        check_status(loom__device_enter(rigs.context, all.device, &error), &error);
        driver_ok(all.driver->graph_launch(instance, j->stream));
        loom__device_leave(rigs.context);
        synchronize();
        if (digest(j) != all.expected[0]) fail_msg("replay %d has other bits than the launch", replay);
    }
}

static atomic_bool tuned;

/* Captures a launch and replays the graph, over and over, in the mode in which careless calls of other
 * threads break a capture. */
static void *capture_often(void *argument) {
    job *j = argument;
    loom_error error = LOOM_ERROR_INIT;
    const char *failure = loom__device_enter(rigs.context, all.device, &error) ? "no context" : NULL;
    for (int i = 0; !failure && (!atomic_load(&tuned) || i < 10); i++) {
        loom__cuda_handle graph = NULL, instance = NULL;
        if (all.driver->capture_begin(j->stream, CAPTURE_GLOBAL)) failure = "a capture did not begin";
        nanosleep(&(struct timespec){0, 2000000}, NULL); /* so that most calls of the tuning fall into one */
        if (!failure && launch(j, &error)) failure = "a launch was not captured";
        if (all.driver->capture_end(j->stream, &graph) && !failure) failure = "a capture was broken";
        if (!failure &&
            (all.driver->graph_instantiate(&instance, graph, 0) ||
             all.driver->graph_launch(instance, j->stream) || all.driver->stream_synchronize(j->stream)))
            failure = "a graph did not run";
    }
    loom__device_leave(rigs.context);
    return (void *)failure;
}

/* A plan that measures beside captures of another thread: neither disturbs the other. */
static void tuning_spares_captures(void **state) {
    (void)state;
    loom_context *context = NULL;
    loom_options options = LOOM_OPTIONS_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_error error = LOOM_ERROR_INIT;
    const loom__device *device = NULL;
    loom_plan *plan = NULL;
    pthread_t thread;
    char wisdom[4096];
    options.cache_dir = ""; /* what is learnt is not for other tests */
    check_status(loom_context_create(&options, &context, &error), &error);
    check_status(loom__device_open(context, rigs.device, &device, &error), &error);
    desc.problem = "fp16 d=32";
    desc.target = "mma";
    desc.device = rigs.device;
    desc.alignment = 16;
    desc.hint = (loom_shape){1, 4, 4, 512, 512};
    desc.rigor = LOOM_MEASURE;
    desc.measure_seconds = 20;
    spoil(&all.jobs[0]);
    atomic_store(&tuned, false);
    assert_int_equal(pthread_create(&thread, NULL, capture_often, &all.jobs[0]), 0);
    loom_status status = loom_plan_create(context, &desc, &plan, &error);
    atomic_store(&tuned, true);
    void *failure = NULL;
    pthread_join(thread, &failure);
    if (failure) fail_msg("%s", (const char *)failure);
    check_status(status, &error);
    check_status(loom_wisdom_export(context, wisdom, sizeof wisdom, NULL, &error), &error);
    assert_non_null(strstr(wisdom, "problem=fp16 d=32\n"));
    if (digest(&all.jobs[0]) != all.expected[0]) fail_msg("a replay has other bits than the launch");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static int set_up(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    all.plan = plan_of(PROBLEM);
    all.driver = rigs.context->driver;
    check_status(loom__device_open(rigs.context, rigs.device, &all.device, &error), &error);
    check_status(loom__device_memory_open(rigs.context, rigs.device, &all.memory, &error), &error);
    for (int i = 0; i < NUM_JOBS; i++) {
        make_job(&all.jobs[i], 77u * (uint32_t)i);
        spoil(&all.jobs[i]);
        check_status(launch(&all.jobs[i], &error), &error);
        synchronize();
        all.expected[i] = digest(&all.jobs[i]);
        for (int other = 0; other < i; other++) assert_true(all.expected[i] != all.expected[other]);
    }
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    check_status(loom__device_enter(rigs.context, all.device, &error), &error);
    for (int i = 0; i < NUM_JOBS; i++) driver_ok(all.driver->stream_destroy(all.jobs[i].stream));
    loom__device_leave(rigs.context);
    loom__device_memory_close(all.memory);
    return 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_do_not_disturb_each_other),
        cmocka_unit_test(threads_share_a_plan),
        cmocka_unit_test(a_graph_replays_a_launch),
        cmocka_unit_test(tuning_spares_captures),
    };
    int status = rigs_start(argc, argv);
    if (status) return status;
    if (!on_gpu()) {
        printf("SKIPPED: streams are a GPU's; run with the argument gpu\n");
        rigs_stop();
        return RIGS_SKIP;
    }
    status = cmocka_run_group_tests(tests, set_up, tear_down);
    rigs_stop();
    return status;
}
