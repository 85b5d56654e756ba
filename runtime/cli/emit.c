/* emit.c - `attnloom emit`, `why` and `show`: texts of the generator. None needs a GPU or a compiler. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "device.h"
#include "generator.h"

typedef struct values {
    loom__cli_common common;
    bool standalone, svg;
    const char *kernel, *variant, *out;
} values;

static const loom__cli_option EMIT_OPTIONS[] = {
    LOOM__CLI_ROW_PASS,
    {"--standalone", NULL, LOOM__CLI_FLAG, offsetof(values, standalone),
     "one .cu with the pass's kernels, a C launcher and a self-check; nvcc alone builds it"},
    {"--kernel", "NAME", LOOM__CLI_TEXT, offsetof(values, kernel), "only this kernel of the pass"},
    {"--variant", "tma|aligned|any", LOOM__CLI_TEXT, offsetof(values, variant),
     "only the kernels for tensors that TMA can describe (target hopper), of 16-byte alignment, or of any"},
    {"-o", "FILE", LOOM__CLI_TEXT, offsetof(values, out), "write to FILE instead of stdout"},
    LOOM__CLI_ROW_TARGET,
    LOOM__CLI_ROW_ARCH,
    LOOM__CLI_ROW_SCHEDULE,
};

static const loom__cli_command EMIT = {
    .name = "emit",
    .operands = "PROBLEM",
    .min_operands = 1,
    .max_operands = 1,
    .text = "Prints the source text of the forward kernel, or with --pass backward of all backward "
            "kernels. Same problem, same bytes. It is the kernel for tensors of 16-byte alignment; "
            "--variant any gives that for other tensors.",
    .examples =
        "  attnloom emit \"bf16 d=128 causal\"\n"
        "  attnloom emit \"fp32 d=64 causal\" --target host -o forward.c\n"
        "  attnloom emit \"fp16 d=64 causal backward\" --pass backward --kernel backward_dkv --arch sm_75\n"
        "  attnloom emit \"bf16 d=128 causal\" --standalone -o causal.cu && nvcc -arch=sm_90 causal.cu\n",
    .options = EMIT_OPTIONS,
    .num_options = sizeof EMIT_OPTIONS / sizeof EMIT_OPTIONS[0],
};

static const loom__cli_option WHY_OPTIONS[] = {
    LOOM__CLI_ROW_PASS,
    LOOM__CLI_ROW_SHAPE,
    LOOM__CLI_ROW_TARGET,
    LOOM__CLI_ROW_ARCH,
    LOOM__CLI_ROW_SCHEDULE,
    LOOM__CLI_ROW_ALIGNMENT,
    {"--device", "N|host", LOOM__CLI_DEVICE, offsetof(loom__cli_common, device),
     "choose for this device instead of --arch"},
};

static const loom__cli_command WHY = {
    .name = "why",
    .operands = "PROBLEM",
    .min_operands = 1,
    .max_operands = 1,
    .text = "Lists the schedules that were considered for a pass, the reason against each that was "
            "refused, and the choice; and for the shape how many tiles of the score matrix are visited, "
            "full, partial and skipped.",
    .examples =
        "  attnloom why \"bf16 d=128 causal\" --shape \"batch=1 heads=32:8 seq=4096\"\n"
        "  attnloom why \"fp16 d=64 mask={causal & window(255, 0)}\" --arch sm_86 --shape \"seq=1:8192\"\n",
    .options = WHY_OPTIONS,
    .num_options = sizeof WHY_OPTIONS / sizeof WHY_OPTIONS[0],
};

static const loom__cli_option SHOW_OPTIONS[] = {
    LOOM__CLI_ROW_SHAPE,
    {"--svg", NULL, LOOM__CLI_FLAG, offsetof(values, svg), "draw an SVG file instead of characters"},
    {"-o", "FILE", LOOM__CLI_TEXT, offsetof(values, out), "write to FILE instead of stdout"},
    LOOM__CLI_ROW_TARGET,
    LOOM__CLI_ROW_ARCH,
    LOOM__CLI_ROW_SCHEDULE,
};

static const loom__cli_command SHOW = {
    .name = "show",
    .operands = "PROBLEM",
    .min_operands = 1,
    .max_operands = 1,
    .text = "Draws which keys the queries of the first head see: element by element up to 64 positions, beyond as classes "
            "of tiles, and says how many of them are visited. What depends on params is drawn as seen in part.",
    .examples =
        "  attnloom show \"bf16 d=64 mask={longformer(6, 2)}\" --shape \"seq=48\"\n"
        "  attnloom show \"bf16 d=128 mask={bigbird(1, 1, 3, 7)}\" --shape \"seq=16384\"\n"
        "  attnloom show \"bf16 d=64 mask={butterfly(64)}\" --shape \"seq=4096\" --svg -o butterfly.svg\n",
    .options = SHOW_OPTIONS,
    .num_options = sizeof SHOW_OPTIONS / sizeof SHOW_OPTIONS[0],
};

/* What is asked of the generator; device facts only where a device was named. */
static loom_status make_request(loom_context *context, const loom__cli_common *common, const char *problem,
                                loom__request *request, loom_error *error) {
    bool host = (common->target && strcmp(common->target, "host") == 0) || common->device == LOOM_DEVICE_HOST;
    const char *arch = common->arch ? common->arch : host ? "host" : "sm_90";
    *request = (loom__request){.problem = problem,
                               .target = common->target,
                               .arch = arch,
                               .alignment = (int32_t)common->alignment,
                               .hint = common->shape};
    if (common->pass == LOOM_BACKWARD)
        request->schedule_backward = common->schedule;
    else
        request->schedule = common->schedule;
    if (common->device >= 0) {
        const loom__device *device = NULL;
        LOOM_TRY(context, loom__device_open(context, common->device, &device, error));
        request->arch = device->arch;
        request->smem_bytes = device->smem_bytes;
        request->num_sms = device->num_sms;
        request->tensor_maps = context->driver->map_encode != NULL;
    }
    return LOOM_OK;
}

static const char *pass_name(int32_t pass) { return pass == LOOM_BACKWARD ? "backward" : "forward"; }

/* Texts of the kernels of a pass, one after the other. */
static loom_status kernel_texts(loom_context *context, const loom__request *request, const values *v,
                                loom__arena *arena, const char **text, loom_error *error) {
    loom__generated generated = {.num_kernels = 0};
    char names[256] = "";
    const char *pass = pass_name(v->common.pass);
    int32_t num_found = 0;
    *text = "";
    LOOM_TRY(context, loom__generator_plan(context, request, arena, &generated, error));
    loom_status status = LOOM_OK;
    for (int32_t i = 0; i < generated.num_kernels && !status; i++) {
        const loom__kernel_text *kernel = &generated.kernels[i];
        const char *source = NULL;
        size_t length = strlen(names);
        if (strcmp(kernel->pass, pass) != 0) continue;
        snprintf(names + length, sizeof names - length, "%s%s (%s)", length ? ", " : "", kernel->name,
                 kernel->variant);
        if (v->kernel && strcmp(v->kernel, kernel->name) != 0) continue;
        if (v->variant && strcmp(v->variant, kernel->variant) != 0) continue;
        status = loom__generator_source(context, &generated, i, arena, &source, error);
        if (!status) *text = loom__arena_print(arena, "%s%s%s", *text, num_found ? "\n" : "", source);
        if (!status && !*text) status = loom__fail_memory(error);
        num_found++;
    }
    loom__generator_release(context, &generated);
    if (status) return status;
    if (!*names)
        return loom__fail(error, LOOM_NOT_FOUND, "pass", "the problem has no %s pass: it lacks the word '%s'",
                          pass, pass);
    if (!num_found)
        return loom__fail(error, LOOM_NOT_FOUND, "kernel",
                          "the %s pass has no kernel '%s' of variant '%s'; it has: %s", pass,
                          v->kernel ? v->kernel : "*", v->variant ? v->variant : "*", names);
    return LOOM_OK;
}

/* To the file that is asked for, or to stdout. */
static loom_status put(const values *v, const char *text, loom_error *error) {
    if (v->out) return loom__cli_write_file(v->out, text, strlen(text), error);
    fputs(text, stdout);
    return LOOM_OK;
}

static loom_status emit(loom_context *context, const values *v, const char *problem, loom__arena *arena,
                        loom_error *error) {
    loom__request request;
    const char *text = NULL;
    LOOM_TRY(context, make_request(context, &v->common, problem, &request, error));
    if (v->variant) request.alignment = 0; // then the generator lists every variant
    if (v->standalone)
        LOOM_TRY(context, loom__generator_standalone(context, &request, (loom_pass)v->common.pass, arena,
                                                     &text, error));
    else
        LOOM_TRY(context, kernel_texts(context, &request, v, arena, &text, error));
    return put(v, text, error);
}

static loom_status show(loom_context *context, const values *v, const char *problem, loom__arena *arena,
                        loom_error *error) {
    loom__request request;
    const char *text = NULL;
    LOOM_TRY(context, make_request(context, &v->common, problem, &request, error));
    LOOM_TRY(context, loom__generator_show(context, &request, v->svg, arena, &text, error));
    return put(v, text, error);
}

static loom_status why(loom_context *context, const values *v, const char *problem, loom__arena *arena,
                       loom_error *error) {
    loom__request request;
    const char *text = NULL;
    LOOM_TRY(context, make_request(context, &v->common, problem, &request, error));
    LOOM_TRY(context, loom__generator_why(context, &request, (loom_pass)v->common.pass, arena, &text, error));
    fputs(text, stdout);
    return LOOM_OK;
}

static int run_text(const loom__cli_command *command, int argc, char **argv,
                    loom_status (*make)(loom_context *, const values *, const char *, loom__arena *,
                                        loom_error *)) {
    values v = {.common = LOOM__CLI_COMMON_INIT};
    const char *problem = NULL;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    int exit_status = loom__cli_parse(command, argc, argv, &v, &problem);
    if (exit_status >= 0) return exit_status;
    if (v.standalone && (v.kernel || v.variant)) {
        loom__cli_say(
            "emit: --standalone holds all kernels of the pass; give it without --kernel and --variant");
        return LOOM__CLI_USAGE;
    }
    loom_status status = loom_context_create(NULL, &context, &error);
    if (status) return loom__cli_fail(&error);
    loom__arena arena = {&context->memory, NULL};
    status = make(context, &v, problem, &arena, &error);
    loom__arena_free(&arena);
    loom_context_destroy(context);
    return status ? loom__cli_fail(&error) : LOOM__CLI_FINE;
}

int loom__cli_emit(int argc, char **argv) { return run_text(&EMIT, argc, argv, emit); }

int loom__cli_show(int argc, char **argv) { return run_text(&SHOW, argc, argv, show); }

int loom__cli_why(int argc, char **argv) { return run_text(&WHY, argc, argv, why); }
