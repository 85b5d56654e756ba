/* bench_start.c - `attnloom bench --cold` and `--pack`: time from a problem's text to loaded kernels, and to
 * the end of a first launch. Called by bench.c.
 *
 * cold: an empty cache; the context is there, its generator and compilers are not yet loaded. warm: the cache
 * holds the kernels; a new context is part of the time. With a pack nothing of the library is there before:
 * first is the sum of a context, the pack, a plan that may compile nothing, and a launch until it has ended;
 * again is the same once more, with all that the system and the process keep. process is the CPU time that
 * the process took before that, from its start. Tensors and workspace, which are the caller's, are in none.
 * In all of them the device's CUDA context exists already, as in a program that uses the GPU. */
#define _XOPEN_SOURCE 700
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../cache.h"
#include "bench.h"
#include "device.h"

enum { NUM_WARM = 9 };

/* Creates a context and a plan and destroys both; milliseconds of each. */
static loom_status start_once(const loom_options *options, loom_plan_desc *desc, double *context_ms,
                              double *plan_ms, loom_error *error) {
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    double start = loom__now();
    LOOM_TRY(NULL, loom_context_create(options, &context, error));
    double created = loom__now();
    loom_status status = loom__cli_plan_create_quietly(context, desc, &plan, error);
    double planned = loom__now();
    *context_ms = (created - start) * 1e3;
    *plan_ms = (planned - created) * 1e3;
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return status;
}

static loom_status time_starts(const char *folder, loom_plan_desc *desc, loom_error *error) {
    loom_options options = LOOM_OPTIONS_INIT;
    double context_ms = 0, plan_ms = 0, warm[NUM_WARM];
    options.cache_dir = folder;
    // NVRTC keeps results of its own where there is a driver: cold is without them. What the user set goes first.
    setenv("LOOM_NVRTC_OPTS", "--no-cache", 0);
    LOOM_TRY(NULL, start_once(&options, desc, &context_ms, &plan_ms, error));
    printf("what,ms\ncold,%.2f\n", plan_ms);
    for (int32_t i = 0; i < NUM_WARM; i++) {
        LOOM_TRY(NULL, start_once(&options, desc, &context_ms, &plan_ms, error));
        warm[i] = context_ms + plan_ms;
    }
    printf("warm,%.2f\n", loom__median(warm, NUM_WARM));
    return LOOM_OK;
}

/* Empties and removes the folder that the timing made. */
static void remove_folder(const char *folder) {
    loom_options options = LOOM_OPTIONS_INIT;
    loom_context *context = NULL;
    int32_t num_removed = 0;
    options.cache_dir = folder;
    if (loom_context_create(&options, &context, NULL) == LOOM_OK)
        loom__cache_clear(context, &num_removed, NULL);
    loom_context_destroy(context);
    rmdir(folder);
}

loom_status loom__cli_bench_cold(const loom_plan_desc *desc, loom_error *error) {
    const char *temporary = getenv("TMPDIR");
    char folder[512];
    loom_context *holder = NULL;
    loom__device_memory *memory = NULL;
    loom_plan_desc own = *desc;
    int32_t count = 0;
    snprintf(folder, sizeof folder, "%s/attnloom-bench-XXXXXX", temporary && *temporary ? temporary : "/tmp");
    if (!mkdtemp(folder)) return loom__fail(error, LOOM_IO, folder, "cannot be made: %s", strerror(errno));
    loom_status status = loom_context_create(NULL, &holder, error);
    bool host = own.device == LOOM_DEVICE_HOST || (own.target && strcmp(own.target, "host") == 0);
    if (!status && !host && loom__device_count(holder, &count, NULL) == LOOM_OK && count > 0) {
        // Holds the device's CUDA context, so that its creation is in neither time.
        status = loom__device_memory_open(holder, own.device >= 0 ? own.device : 0, &memory, error);
    }
    if (!status) status = time_starts(folder, &own, error);
    loom__device_memory_close(memory);
    loom_context_destroy(holder);
    remove_folder(folder);
    return status;
}

/* -- From a pack ----------------------------------------------------------------------------------------- */

enum { CONTEXT, PACK, PLAN, LAUNCH, NUM_STEPS };
static const char *const STEPS[NUM_STEPS] = {"context", "pack", "plan", "launch"};

static double ms_since(double *moment) {
    double before = *moment;
    *moment = loom__now();
    return (*moment - before) * 1e3;
}

/* One start. The cell, whose tensors the first start makes in the holder's memory, keeps no plan. */
static loom_status start_from_pack(const loom__cli_bench_values *values, const loom_plan_desc *desc,
                                   loom_context *holder, loom__cli_cell *cell, double ms[NUM_STEPS],
                                   loom_error *error) {
    const loom_options options = {
        .size = sizeof options, .cache_dir = "", .log_level = LOOM_LOG_FROM_ENVIRONMENT};
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    double moment = loom__now();
    LOOM_TRY(NULL, loom_context_create(&options, &context, error));
    ms[CONTEXT] = ms_since(&moment);
    loom_status status = loom_context_add_pack(context, values->pack, NULL, 0, error);
    ms[PACK] = ms_since(&moment);
    if (!status) status = loom_plan_create(context, desc, &plan, error);
    ms[PLAN] = ms_since(&moment);
    if (!status && !cell->facts)
        status = loom__cli_cell_begin(holder, desc->problem, &desc->hint, &values->params, cell, error);
    cell->device = desc->device;
    cell->plan = plan;
    if (!status && !cell->memory) status = loom__cli_cell_fill(holder, cell, error);
    if (!status) status = loom__cli_cell_workspace(cell, LOOM_FORWARD, error);
    if (!status) status = loom__device_memory_sync(cell->memory, error);
    moment = loom__now();
    if (!status) status = loom__cli_cell_launch(cell, LOOM_FORWARD, error);
    if (!status) status = loom__device_memory_sync(cell->memory, error);
    ms[LAUNCH] = ms_since(&moment);
    cell->plan = NULL;
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return status;
}

static double sum_of(const double ms[NUM_STEPS]) {
    double sum = 0;
    for (int i = 0; i < NUM_STEPS; i++) sum += ms[i];
    return sum;
}

loom_status loom__cli_bench_pack(const loom__cli_bench_values *values, const loom_plan_desc *desc,
                                 loom_error *error) {
    loom_plan_desc own = *desc;
    loom_context *holder = NULL;
    loom__device_memory *memory = NULL;
    loom__cli_cell cell = {.memory = NULL};
    double ms[NUM_STEPS], again[NUM_WARM], process_ms = (double)clock() * 1e3 / CLOCKS_PER_SEC;
    own.flags = LOOM_NO_COMPILE;
    if (own.device == LOOM__CLI_DEVICE_AUTO) own.device = 0;
    if (own.device == LOOM_DEVICE_HOST)
        return loom__fail(error, LOOM_INVALID, "device",
                          "packs hold no kernels for the CPU, --device host has none");
    LOOM_TRY(NULL, loom_context_create(NULL, &holder, error));
    loom_status status = loom__device_memory_open(holder, own.device, &memory, error);
    if (!status) status = start_from_pack(values, &own, holder, &cell, ms, error);
    if (!status) {
        printf("what,ms\nprocess,%.2f\n", process_ms);
        for (int i = 0; i < NUM_STEPS; i++) printf("%s,%.2f\n", STEPS[i], ms[i]);
        printf("first,%.2f\n", sum_of(ms));
    }
    for (int i = 0; i < NUM_WARM && !status; i++) {
        status = start_from_pack(values, &own, holder, &cell, ms, error);
        again[i] = sum_of(ms);
    }
    if (!status) printf("again,%.2f\n", loom__median(again, NUM_WARM));
    loom__cli_cell_close(&cell);
    loom__device_memory_close(memory);
    loom_context_destroy(holder);
    return status;
}
