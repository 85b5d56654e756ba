/* problem.h - a problem of the command line: its facts, and values for its params from options --param.
 * Called by run.c and bench.c. Fails with the option, the value and the rule. */
#ifndef LOOM_CLI_PROBLEM_H
#define LOOM_CLI_PROBLEM_H

#include "cli.h"
#include "memory.h"
#include "npy.h"
#include "reference.h"

/* *facts is to be freed by loom__reference_destroy. */
loom_status loom__cli_problem_facts(loom_context *context, const char *problem, loom__reference **facts,
                                    loom_error *error);

/* items has one row per slot; files holds the arrays until they are uploaded. Starts zeroed. */
typedef struct loom__cli_params {
    loom__npy files[LOOM__MAX_PARAMS];
    loom_param items[LOOM__MAX_PARAMS];
} loom__cli_params;

/* Reads texts NAME=FILE or NAME=NUMBER: each param of the problem must be given, and nothing else. */
loom_status loom__cli_params_read(loom__cli_params *params, const loom__reference *facts,
                                  const loom_shape *shape, const loom__cli_texts *given, loom_error *error);
loom_status loom__cli_params_upload(loom__cli_params *params, const loom__reference *facts,
                                    loom__device_memory *memory, loom_error *error);
void loom__cli_params_free(loom__cli_params *params);

/* Converts a file to the storage wanted, moves it to new memory of the device, and frees the file's data. */
loom_status loom__cli_upload_npy(loom__device_memory *memory, const char *field, loom__npy *file,
                                 loom__storage storage, void **data, loom_error *error);

#endif
