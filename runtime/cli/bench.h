/* bench.h - what the parts of `attnloom bench` share: options, and a cell, which is a plan with tensors to
 * launch on. */
#ifndef LOOM_CLI_BENCH_H
#define LOOM_CLI_BENCH_H

#include "cli.h"
#include "memory.h"
#include "problem.h"

typedef struct loom__cli_bench_values {
    loom__cli_common common;
    int32_t grid, dtype;           /* grid is -1 without --grid */
    uint32_t modes, passes, masks; /* bits */
    loom__cli_wholes hdims, seqlens;
    loom__cli_texts params;
    const char *pack; /* a file */
    bool launch_cost, cold, prepared, memory;
} loom__cli_bench_values;

typedef struct loom__cli_cell {
    loom__reference *facts;
    loom__cli_params params;
    loom_plan *plan;
    int32_t device; /* that the plan is for */
    loom__device_memory *memory;
    loom_shape shape;
    loom_args args;
} loom__cli_cell;

/* Compiles the problem for desc->device and makes tensors of desc->hint, inputs N(0,1). Close it also after a
 * failure. */
loom_status loom__cli_cell_open(loom_context *context, const char *problem, const loom_plan_desc *desc,
                                const loom__cli_texts *params, loom__cli_cell *cell, loom_error *error);
void loom__cli_cell_close(loom__cli_cell *cell);

/* The two parts of that, for who has a plan: facts and params before it, memory and tensors for cell->plan on
 * cell->device after it. */
loom_status loom__cli_cell_begin(loom_context *context, const char *problem, const loom_shape *shape,
                                 const loom__cli_texts *params, loom__cli_cell *cell, loom_error *error);
loom_status loom__cli_cell_fill(loom_context *context, loom__cli_cell *cell, loom_error *error);

/* Gives the cell the workspace of a pass, unless it has as much; then the pass can be launched on the default
 * stream. */
loom_status loom__cli_cell_workspace(loom__cli_cell *cell, loom_pass pass, loom_error *error);
loom_status loom__cli_cell_launch(const loom__cli_cell *cell, loom_pass pass, loom_error *error);

/* Gives the cell what the mask needs prepared, if anything, for all launches from then on. */
loom_status loom__cli_cell_prepare(loom__cli_cell *cell, loom_error *error);

/* --launch-cost, --cold and --pack: print their own lines. */
loom_status loom__cli_bench_launch(const loom__cli_bench_values *values, loom_context *context,
                                   const loom_plan_desc *desc, loom_error *error);
loom_status loom__cli_bench_cold(const loom_plan_desc *desc, loom_error *error);
loom_status loom__cli_bench_pack(const loom__cli_bench_values *values, const loom_plan_desc *desc,
                                 loom_error *error);

#endif
