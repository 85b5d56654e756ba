/* compile.c - `attnloom compile`: problem to binaries, for any GPU without a GPU, kept in the cache. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

typedef struct values {
    loom__cli_common common;
    const char *out;
} values;

static const loom__cli_option OPTIONS[] = {
    LOOM__CLI_ROW_ARCH,
    LOOM__CLI_ROW_TARGET,
    LOOM__CLI_ROW_PASS,
    {"-o", "FILE", LOOM__CLI_TEXT, offsetof(values, out),
     "write the binary to FILE too; of several kernels each to FILE.KERNEL, or to FILE.KERNEL.VARIANT if "
     "they are of several variants"},
    LOOM__CLI_ROW_SCHEDULE,
    LOOM__CLI_ROW_SCHEDULES,
    LOOM__CLI_ROW_ALIGNMENT,
};

static const loom__cli_command COMMAND = {
    .name = "compile",
    .operands = "PROBLEM",
    .min_operands = 1,
    .max_operands = 1,
    .text =
        "Compiles the kernels of a problem to a cubin for the GPU architecture given (NVRTC is needed, "
        "a GPU is not), or with --target host to a shared object for this CPU, and keeps them in the "
        "cache. Prints one line a kernel with registers per thread, spill bytes (stored for want of "
        "registers), shared memory, seconds, whether it came from the cache, the folder of its entry, "
        "and the file written with -o. Backward kernels are listed with --pass backward.\n"
        "With --schedules several schedules are compiled, as many at a time as there are processors, so that "
        "`attnloom bench` on another machine with the same cache finds them; each line then begins with the "
        "schedule. One that does not compile is said on stderr, the rest goes on, and the exit status is 1.",
    .examples = "  attnloom compile \"bf16 d=128 causal\" --arch sm_80 -o forward.cubin\n"
                "  attnloom compile \"fp16 d=64 causal backward\" --arch sm_75 --pass backward\n"
                "  attnloom compile \"fp32 d=64 causal\" --target host\n"
                "  attnloom compile \"bf16 d=128 causal\" --target hopper --schedules all\n",
    .options = OPTIONS,
    .num_options = sizeof OPTIONS / sizeof OPTIONS[0],
};

static void print_kernel(const loom_kernel *kernel, const char *file) {
    printf("kernel %s variant %s", kernel->name, kernel->variant);
    if (kernel->registers >= 0)
        printf(" registers %d spill bytes %d", kernel->registers, kernel->spill_bytes);
    printf(" shared bytes %d seconds %.3f cached %s entry %s", kernel->smem_bytes, kernel->compile_seconds,
           kernel->cached ? "yes" : "no", *kernel->entry ? kernel->entry : "-");
    if (file) printf(" file %s", file);
    printf("\n");
}

/* The kernels of a pass, and whether they are of several variants. */
typedef struct kernels {
    loom_kernel *list;
    int32_t num;
    bool variants;
} kernels;

static loom_status list_kernels(const loom_plan *plan, const char *pass, kernels *found, loom_error *error) {
    int32_t num_kernels = loom_plan_num_kernels(plan);
    *found = (kernels){.list = calloc((size_t)num_kernels + 1, sizeof *found->list)};
    if (!found->list) return loom__fail_memory(error);
    for (int32_t i = 0; i < num_kernels; i++) {
        loom_kernel *kernel = &found->list[found->num];
        *kernel = (loom_kernel)LOOM_KERNEL_INIT;
        LOOM_TRY(NULL, loom_plan_kernel(plan, i, kernel, error));
        if (strncmp(kernel->name, pass, strlen(pass)) != 0) continue;
        found->variants = found->variants || strcmp(kernel->variant, found->list[0].variant) != 0;
        found->num++;
    }
    if (found->num) return LOOM_OK;
    return loom__fail(error, LOOM_NOT_FOUND, "pass", "the problem has no %s pass: it lacks the word '%s'",
                      pass, pass);
}

/* Writes a kernel to the file of -o, under a name of its own where there are several, and prints it. */
static loom_status put_kernel(const char *out, const kernels *all, const loom_kernel *kernel,
                              loom_error *error) {
    size_t capacity = out ? strlen(out) + strlen(kernel->name) + strlen(kernel->variant) + sizeof ".." : 1;
    char *path = malloc(capacity);
    loom_status status = LOOM_OK;
    if (!path) return loom__fail_memory(error);
    if (out) {
        bool several = all->num > 1;
        snprintf(path, capacity, "%s%s%s%s%s", out, several ? "." : "", several ? kernel->name : "",
                 all->variants ? "." : "", all->variants ? kernel->variant : "");
        status = loom__cli_write_file(path, kernel->binary, kernel->binary_bytes, error);
    }
    if (!status) print_kernel(kernel, out ? path : NULL);
    free(path);
    return status;
}

/* Prints the kernels of a plan's pass, each line behind `prefix`. */
static loom_status put_kernels(const values *v, const loom_plan *plan, const char *prefix,
                               loom_error *error) {
    kernels found = {NULL, 0, false};
    loom_status status =
        list_kernels(plan, v->common.pass == LOOM_BACKWARD ? "backward" : "forward", &found, error);
    for (int32_t i = 0; i < found.num && !status; i++) {
        fputs(prefix, stdout);
        status = put_kernel(v->out, &found, &found.list[i], error);
    }
    free(found.list);
    return status;
}

typedef struct compiling {
    const values *v;
    const loom__candidate *schedules;
} compiling;

static loom_status use_plan(void *user, int32_t index, loom_plan *plan, loom_error *error) {
    compiling *c = user;
    char prefix[192];
    snprintf(prefix, sizeof prefix, "schedule \"%s\" ", c->schedules[index].text);
    loom_status status = put_kernels(c->v, plan, prefix, error);
    loom_plan_destroy(plan);
    fflush(stdout);
    return status;
}

static loom_status compile_all(const values *v, loom_context *context, const loom_plan_desc *desc, bool *fine,
                               loom_error *error) {
    loom__arena arena = {&context->memory, NULL};
    loom__cli_plans list;
    compiling c = {v, NULL};
    loom_status status =
        loom__cli_list_schedules(context, desc, desc->arch ? desc->arch : "host", (loom_pass)v->common.pass,
                                 v->common.most_schedules, &arena, &list, &c.schedules, error);
    if (!status) status = loom__cli_make_plans(context, &list, use_plan, &c, fine, error);
    loom__arena_free(&arena);
    return status;
}

static loom_status compile(const values *v, loom_context *context, const char *problem, bool *fine,
                           loom_error *error) {
    loom_plan_desc desc;
    loom_plan *plan = NULL;
    loom__cli_plan_desc(&v->common, problem, &desc);
    bool host = desc.target && strcmp(desc.target, "host") == 0;
    desc.device = host ? LOOM_DEVICE_HOST : LOOM_DEVICE_NONE;
    if (!host && !desc.arch) desc.arch = "sm_90";
    if (v->common.most_schedules) return compile_all(v, context, &desc, fine, error);
    LOOM_TRY(context, loom__cli_plan_create(context, &desc, &plan, error));
    loom_status status = put_kernels(v, plan, "", error);
    loom_plan_destroy(plan);
    return status;
}

int loom__cli_compile(int argc, char **argv) {
    values v = {.common = LOOM__CLI_COMMON_INIT};
    const char *problem = NULL;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, &v, &problem);
    bool fine = true;
    if (exit_status >= 0) return exit_status;
    if (v.common.most_schedules && (v.out || v.common.schedule)) {
        loom__cli_say("compile: --schedules takes neither -o nor --schedule");
        return LOOM__CLI_USAGE;
    }
    loom_status status = loom_context_create(NULL, &context, &error);
    if (!status) status = compile(&v, context, problem, &fine, &error);
    loom_context_destroy(context);
    if (status) return loom__cli_fail(&error);
    return fine ? LOOM__CLI_FINE : LOOM__CLI_FAILED;
}
