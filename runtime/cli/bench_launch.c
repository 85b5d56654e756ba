/* bench_launch.c - `attnloom bench --launch-cost`: CPU time of a launch through the library beside the driver
 * calls it makes, issued bare with the same packed arguments; kernels that overlap in the library are
 * launched bare like others. Called by bench.c; GPU only, one thread.
 *
 * The driver calls are learnt by running one launch with a driver table whose functions note their arguments.
 */
#include <stdio.h>
#include <string.h>

#include "bench.h"
#include "plan.h"

/* A batch of launches stays below the depth of the driver's queue, so that none of them waits for the GPU. */
enum { MAX_CALLS = 16, NUM_BATCHES = 21, BATCH_LAUNCHES = 50 };

typedef struct call {
    loom__cuda_handle function, stream;
    unsigned grid[3], block[3], smem_bytes;
    _Alignas(16) unsigned char arguments[LOOM__MAX_ARGS_BYTES];
    void *parameters[1];
} call;

/* The driver's functions take no user pointer, so what the noting one needs is static. */
static struct {
    const loom_plan *plan;
    call calls[MAX_CALLS];
    int32_t num_calls;
    bool failed; /* a call that cannot be noted */
} noted;

static int32_t args_bytes_of(const loom_plan *plan, loom__cuda_handle function) {
    for (int32_t i = 0; i < plan->num_kernels; i++)
        if (plan->kernels[i].module.function == function) return plan->kernels[i].args_bytes;
    return -1;
}

static int note_launch(loom__cuda_handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned smem_bytes,
                       loom__cuda_handle stream, void **parameters, void **extra) {
    int32_t bytes = args_bytes_of(noted.plan, function);
    if (noted.num_calls == MAX_CALLS || !parameters || extra || bytes < 0) {
        noted.failed = true;
        return 0;
    }
    call *c = &noted.calls[noted.num_calls++];
    *c = (call){.function = function,
                .stream = stream,
                .grid = {grid_x, grid_y, grid_z},
                .block = {block_x, block_y, block_z},
                .smem_bytes = smem_bytes};
    memcpy(c->arguments, parameters[0], (size_t)bytes);
    c->parameters[0] = c->arguments;
    return 0;
}

static loom_status note_calls(loom__cli_cell *cell, loom_pass pass, loom_error *error) {
    const loom__driver_api *driver = cell->plan->driver;
    loom__driver_api table = *driver;
    table.launch = note_launch;
    table.launch_with = NULL; /* overlapping launches are noted as others are */
    noted.plan = cell->plan;
    noted.num_calls = 0;
    noted.failed = false;
    cell->plan->driver = &table;
    loom_status status = loom__cli_cell_launch(cell, pass, error);
    cell->plan->driver = driver;
    if (!status && noted.failed)
        status = loom__fail(error, LOOM_INTERNAL, "--launch-cost",
                            "a driver call of the launch could not be noted");
    return status;
}

static loom_status launch_bare(const loom__driver_api *driver, loom_error *error) {
    for (int32_t i = 0; i < noted.num_calls; i++) {
        call *c = &noted.calls[i];
        int failed = driver->launch(c->function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1],
                                    c->block[2], c->smem_bytes, c->stream, c->parameters, NULL);
        if (failed) return loom__driver_check(driver, failed, "cuLaunchKernel", error);
    }
    return LOOM_OK;
}

/* Microseconds of one launch: the median of batches, the two ways alternating. */
static loom_status time_pass(loom__cli_cell *cell, loom_pass pass, double *library_us, double *bare_us,
                             loom_error *error) {
    double us[2][NUM_BATCHES];
    LOOM_TRY(NULL, note_calls(cell, pass, error));
    for (int32_t i = 0; i < 2 * NUM_BATCHES; i++) {
        bool bare = i % 2;
        LOOM_TRY(NULL, loom__device_memory_sync(cell->memory, error));
        double start = loom__now();
        for (int32_t j = 0; j < BATCH_LAUNCHES; j++) {
            loom_status status =
                bare ? launch_bare(cell->plan->driver, error) : loom__cli_cell_launch(cell, pass, error);
            if (status) return status;
        }
        us[bare][i / 2] = (loom__now() - start) * 1e6 / BATCH_LAUNCHES;
    }
    *library_us = loom__median(us[0], NUM_BATCHES);
    *bare_us = loom__median(us[1], NUM_BATCHES);
    return loom__device_memory_sync(cell->memory, error);
}

loom_status loom__cli_bench_launch(const loom__cli_bench_values *values, loom_context *context,
                                   const loom_plan_desc *desc, loom_error *error) {
    loom__cli_cell cell;
    loom_status status = loom__cli_cell_open(context, desc->problem, desc, &values->params, &cell, error);
    if (!status && cell.plan->host)
        status = loom__fail(error, LOOM_UNSUPPORTED, "--launch-cost",
                            "there is no cuLaunchKernel on the host; it needs a GPU");
    if (!status) printf("pass,library_us,bare_us,added_us,kernels\n");
    for (int32_t pass = LOOM_FORWARD;
         !status && pass <= (cell.facts->backward ? LOOM_BACKWARD : LOOM_FORWARD); pass++) {
        double library_us = 0, bare_us = 0;
        status = loom__cli_cell_workspace(&cell, (loom_pass)pass, error);
        if (!status) status = time_pass(&cell, (loom_pass)pass, &library_us, &bare_us, error);
        if (!status)
            printf("%s,%.3f,%.3f,%.3f,%d\n", pass == LOOM_FORWARD ? "forward" : "backward", library_us,
                   bare_us, library_us - bare_us, noted.num_calls);
    }
    loom__cli_cell_close(&cell);
    return status;
}
