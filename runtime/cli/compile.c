/* compile.c - `attnloom compile`: problem to binaries, for any GPU without a GPU, kept in the cache. */
#include <stdio.h>
#include <string.h>

#include "cli.h"

typedef struct values {
    loom__cli_common common;
} values;

static const loom__cli_option OPTIONS[] = {
    LOOM__CLI_ROW_ARCH,     LOOM__CLI_ROW_TARGET,    LOOM__CLI_ROW_PASS,
    LOOM__CLI_ROW_SCHEDULE, LOOM__CLI_ROW_ALIGNMENT,
};

static const loom__cli_command COMMAND = {
    .name = "compile",
    .operands = "PROBLEM",
    .min_operands = 1,
    .max_operands = 1,
    .text = "Compiles the kernels of a problem to a cubin for the GPU architecture given (NVRTC is needed, "
            "a GPU is not), or with --target host to a shared object for this CPU, and keeps them in the "
            "cache. Prints one line a kernel with registers per thread, spill bytes (stored for want of "
            "registers), shared memory, seconds, whether it came from the cache, and the folder of its entry. Backward kernels are "
            "listed with --pass backward.",
    .examples = "  attnloom compile \"bf16 d=128 causal\" --arch sm_80\n"
                "  attnloom compile \"fp16 d=64 causal backward\" --arch sm_75 --pass backward\n"
                "  attnloom compile \"fp32 d=64 causal\" --target host\n",
    .options = OPTIONS,
    .num_options = sizeof OPTIONS / sizeof OPTIONS[0],
};

static void print_kernel(const loom_kernel *kernel) {
    printf("kernel %s variant %s", kernel->name, kernel->variant);
    if (kernel->registers >= 0)
        printf(" registers %d spill bytes %d", kernel->registers, kernel->spill_bytes);
    printf(" shared bytes %d seconds %.3f cached %s entry %s\n", kernel->smem_bytes, kernel->compile_seconds,
           kernel->cached ? "yes" : "no", *kernel->entry ? kernel->entry : "-");
}

static loom_status compile(const values *v, loom_context *context, const char *problem, loom_error *error) {
    loom_plan_desc desc;
    loom_plan *plan = NULL;
    int32_t num_printed = 0;
    loom__cli_plan_desc(&v->common, problem, &desc);
    bool host = desc.target && strcmp(desc.target, "host") == 0;
    desc.device = host ? LOOM_DEVICE_HOST : LOOM_DEVICE_NONE;
    if (!host && !desc.arch) desc.arch = "sm_90";
    LOOM_TRY(context, loom__cli_plan_create(context, &desc, &plan, error));
    loom_status status = LOOM_OK;
    const char *pass = v->common.pass == LOOM_BACKWARD ? "backward" : "forward";
    for (int32_t i = 0; i < loom_plan_num_kernels(plan) && !status; i++) {
        loom_kernel kernel = LOOM_KERNEL_INIT;
        status = loom_plan_kernel(plan, i, &kernel, error);
        if (status || strncmp(kernel.name, pass, strlen(pass)) != 0) continue;
        print_kernel(&kernel);
        num_printed++;
    }
    if (!status && !num_printed)
        status = loom__fail(error, LOOM_NOT_FOUND, "pass",
                            "the problem has no %s pass: it lacks the word '%s'", pass, pass);
    loom_plan_destroy(plan);
    return status;
}

int loom__cli_compile(int argc, char **argv) {
    values v = {.common = LOOM__CLI_COMMON_INIT};
    const char *problem = NULL;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, &v, &problem);
    if (exit_status >= 0) return exit_status;
    loom_status status = loom_context_create(NULL, &context, &error);
    if (!status) status = compile(&v, context, problem, &error);
    loom_context_destroy(context);
    return status ? loom__cli_fail(&error) : LOOM__CLI_FINE;
}
