/* check.c - `attnloom check`: kernels on random inputs against the float64 reference. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cache.h"
#include "cli.h"
#include "harness.h"
#include "plan.h"
#include "problem.h"

enum { PASS_OF_PROBLEM = -1, CERTIFICATE_BYTES = 4096, NUM_RUNS = 2 };

typedef struct values {
    loom__cli_common common;
    const char *schedule_backward;
    int64_t seed;
    bool installed, stand_in;
} values;

static const loom__cli_option OPTIONS[] = {
    {"--pass", "forward|backward", LOOM__CLI_CHOICE, offsetof(values, common.pass),
     "check forward alone, or both passes (default: both if the problem has the word backward)"},
    {"--shape", "TEXT", LOOM__CLI_SHAPE, offsetof(values, common.shape),
     "run-time numbers, batch=B heads=Q[:KV] seq=Q[:K] (default batch=2 heads=4:2 seq=257:321)"},
    {"--seed", "N", LOOM__CLI_WHOLE, offsetof(values, seed), "seed of the inputs (default 1)"},
    LOOM__CLI_ROW_TARGET,
    LOOM__CLI_ROW_DEVICE,
    {"--schedule", "TEXT", LOOM__CLI_TEXT, offsetof(values, common.schedule),
     "force the forward schedule; `attnloom why` lists candidates"},
    {"--schedule-backward", "TEXT", LOOM__CLI_TEXT, offsetof(values, schedule_backward),
     "force the backward schedule"},
    {"--installed", NULL, LOOM__CLI_FLAG, offsetof(values, installed),
     "check every problem of the cache that this device can run, and store the certificates anew"},
    {"--stand-in", NULL, LOOM__CLI_FLAG, offsetof(values, stand_in),
     "check what stands in for the problem's kernels while these are compiled, then these"},
};

static const loom__cli_command COMMAND = {
    .name = "check",
    .operands = "[PROBLEM]",
    .max_operands = 1,
    .text =
        "Runs the kernels of a problem on normal random numbers and compares O, LSE, dQ, dK and dV with "
        "a float64 "
        "reference that shares no code with the generator. The error of an output is the relative L2 "
        "norm over its "
        "elements (of LSE the largest difference); the limit is twice the error of plain attention in "
        "the problem's data "
        "type. Memory around the tensors and the workspace holds NaN and must be left alone. Two runs "
        "must agree "
        "bit for bit, except a backward on the GPU that is not deterministic. An output without one finite "
        "element, which shows nothing, counts as wrong, unless no row sees a key.\n"
        "What was found is stored as a certificate beside each kernel in the cache. The exit status is 1 "
        "if anything "
        "is off; a line that repeats the failure is printed then.",
    .examples = "  attnloom check \"bf16 d=128 causal backward\"\n"
                "  attnloom check \"fp32 d=64 score={softcap(20)}\" --device host --shape \"batch=1 "
                "heads=8:2 seq=77:300\"\n"
                "  attnloom check \"bf16 d=128 causal\" --stand-in\n"
                "  attnloom check --installed\n",
    .options = OPTIONS,
    .num_options = sizeof OPTIONS / sizeof OPTIONS[0],
};

/* One check on its way. */
typedef struct check {
    const values *v;
    loom_context *context;
    const char *problem;
    loom_plan_desc desc;
    loom_pass pass;
    loom_plan *plan;
    bool fine;
    char certificate[CERTIFICATE_BYTES];
    size_t used;
} check;

LOOM__PRINTF(2, 3) static void certify(check *c, const char *format, ...) {
    va_list list;
    if (c->used >= sizeof c->certificate) return;
    va_start(list, format);
    int length = vsnprintf(c->certificate + c->used, sizeof c->certificate - c->used, format, list);
    va_end(list);
    c->used += length > 0 ? (size_t)length : 0;
}

static const char *pass_name(loom_pass pass) { return pass == LOOM_BACKWARD ? "backward" : "forward"; }

static void report_verdicts(check *c, const char *layout, const loom__rig_report *report) {
    for (int i = 0; i < report->num_verdicts; i++) {
        const loom__rig_verdict *v = &report->verdicts[i];
        char line[LOOM__RIG_LINE_BYTES];
        loom__rig_print_verdict(v, layout, line);
        fputs(line, stdout);
        certify(c, "%s", line);
        if (!v->fine)
            printf("     worst at batch %lld row %lld head %lld channel %lld: %.9g, float64 says %.9g\n",
                   (long long)v->at[0], (long long)v->at[1], (long long)v->at[2], (long long)v->at[3], v->got,
                   v->wanted);
    }
    c->fine = c->fine && report->fine;
}

/* Runs each pass again, with what can be prepared made before, and compares bits. */
static loom_status compare_runs(check *c, loom__rig *rig, const char *layout, loom_error *error) {
    for (loom_pass pass = LOOM_FORWARD; pass <= c->pass; pass++) {
        bool equal = true;
        bool must = pass == LOOM_FORWARD || rig->reference->deterministic || rig->on_host;
        uint64_t digest = loom__rig_digest(rig, pass);
        rig->options.prepared = true;
        for (int run = 1; run < NUM_RUNS; run++) {
            LOOM_TRY(c->context, loom__rig_run(rig, pass, error));
            equal = equal && loom__rig_digest(rig, pass) == digest;
        }
        rig->options.prepared = false;
        const char *outcome = equal  ? "equal"
                              : must ? "DIFFERENT"
                                     : "different, as a backward that is not deterministic may";
        printf("bits of %d %s runs %s: %s\n", NUM_RUNS, pass_name(pass), layout, outcome);
        certify(c, "bits of %d %s runs %s: %s\n", NUM_RUNS, pass_name(pass), layout, outcome);
        c->fine = c->fine && (equal || !must);
    }
    return LOOM_OK;
}

static loom_status check_layout(check *c, loom__layout layout, loom_error *error) {
    loom__rig_options options = LOOM__RIG_OPTIONS_INIT;
    loom__rig_report report;
    loom__rig *rig = NULL;
    const char *name = layout == LOOM__LAYOUT_ODD ? "odd" : "dense";
    loom_status status;
    options.shape = c->v->common.shape;
    options.layout = layout;
    options.seed = (uint64_t)c->v->seed;
    LOOM_TRY(c->context, loom__rig_create(c->context, c->plan, c->desc.device, &options, &rig, error));
    for (loom_pass pass = LOOM_FORWARD; pass <= c->pass; pass++)
        LOOM_TRY_OUT(c->context, loom__rig_run(rig, pass, error));
    LOOM_TRY_OUT(c->context, loom__rig_compare(rig, c->pass, &report, error));
    report_verdicts(c, name, &report);
    LOOM_TRY_OUT(c->context, compare_runs(c, rig, name, error));
out:
    loom__rig_destroy(rig);
    return status;
}

static loom_status report_kernels(check *c, loom_error *error) {
    for (int32_t i = 0; i < loom_plan_num_kernels(c->plan); i++) {
        loom_kernel kernel = LOOM_KERNEL_INIT;
        LOOM_TRY(c->context, loom_plan_kernel(c->plan, i, &kernel, error));
        certify(c, "kernel %s %s compiler %s", kernel.name, kernel.variant, kernel.compiler);
        if (kernel.registers >= 0)
            certify(c, " registers %d spill bytes %d", kernel.registers, kernel.spill_bytes);
        certify(c, "\n");
    }
    return LOOM_OK;
}

/* The command that repeats this check. */
static void print_command(const check *c, FILE *to) {
    const loom_shape *shape = &c->v->common.shape;
    fprintf(to,
            "attnloom check \"%s\" --pass %s --target %s --shape \"batch=%lld heads=%lld:%lld "
            "seq=%lld:%lld\" --seed %lld",
            c->problem, pass_name(c->pass), c->plan ? loom_plan_text(c->plan, LOOM_TEXT_TARGET) : "host",
            (long long)shape->batch, (long long)shape->heads_q, (long long)shape->heads_kv,
            (long long)shape->seq_q, (long long)shape->seq_k, (long long)c->v->seed);
    if (c->desc.device >= 0) fprintf(to, " --device %d", c->desc.device);
    if (c->desc.device == LOOM_DEVICE_HOST) fputs(" --device host", to);
    if (c->desc.schedule) fprintf(to, " --schedule \"%s\"", c->desc.schedule);
    if (c->desc.schedule_backward) fprintf(to, " --schedule-backward \"%s\"", c->desc.schedule_backward);
    fputc('\n', to);
}

/* Checks the kernels that launches of the plan take now. */
static loom_status check_serving(check *c, loom_error *error) {
    const loom_shape *shape = &c->v->common.shape;
    printf("problem %s\ntarget %s arch %s schedule %s%s%s\n", loom_plan_text(c->plan, LOOM_TEXT_PROBLEM),
           loom_plan_text(c->plan, LOOM_TEXT_TARGET), loom_plan_text(c->plan, LOOM_TEXT_ARCH),
           loom_plan_text(c->plan, LOOM_TEXT_SCHEDULE), c->pass == LOOM_BACKWARD ? " / " : "",
           c->pass == LOOM_BACKWARD ? loom_plan_text(c->plan, LOOM_TEXT_SCHEDULE_BACKWARD) : "");
    c->used = 0;
    LOOM_TRY(c->context, report_kernels(c, error));
    certify(c, "shape batch=%lld heads=%lld:%lld seq=%lld:%lld seed %lld\n", (long long)shape->batch,
            (long long)shape->heads_q, (long long)shape->heads_kv, (long long)shape->seq_q,
            (long long)shape->seq_k, (long long)c->v->seed);
    LOOM_TRY(c->context, check_layout(c, LOOM__LAYOUT_DENSE, error));
    LOOM_TRY(c->context, check_layout(c, LOOM__LAYOUT_ODD, error));
    certify(c, "result %s\n", c->fine ? "fine" : "wrong");
    return loom_plan_certify(c->plan, c->certificate, error);
}

/* Checks a stand-in, then what it stood in for. */
static loom_status check_upgrade(check *c, loom_error *error) {
    bool stands_in = c->plan->stand_in != NULL;
    LOOM_TRY(c->context, check_serving(c, error));
    puts(stands_in ? "this stands in" : "nothing stands in: the problem's own kernels were there at once");
    if (!stands_in) return LOOM_OK;
    LOOM_TRY(c->context, loom_plan_wait(c->plan, INFINITY, error));
    LOOM_TRY(c->context, loom_plan_upgrade(c->plan, error));
    return check_serving(c, error);
}

/* Checks one problem. *fine is false when an output is off; a status other than LOOM_OK means it could not
 * run. */
static loom_status check_problem(const values *v, loom_context *context, const loom_plan_desc *desc,
                                 bool *fine, loom_error *error) {
    check c = {.v = v, .context = context, .problem = desc->problem, .desc = *desc, .fine = true};
    loom__reference *facts = NULL;
    loom_status status;
    LOOM_TRY(context, loom__cli_problem_facts(context, desc->problem, &facts, error));
    c.pass = v->common.pass == PASS_OF_PROBLEM ? (facts->backward ? LOOM_BACKWARD : LOOM_FORWARD)
                                               : (loom_pass)v->common.pass;
    bool refuse = c.pass == LOOM_BACKWARD && !facts->backward;
    loom__reference_destroy(facts);
    if (refuse)
        return loom__fail(error, LOOM_INVALID, "problem",
                          "--pass backward needs the word 'backward' in the problem");
    if (v->stand_in) c.desc.flags |= LOOM_ASYNC | LOOM_STAND_IN;
    LOOM_TRY_OUT(context, loom__cli_plan_create(context, &c.desc, &c.plan, error));
    LOOM_TRY_OUT(context, v->stand_in ? check_upgrade(&c, error) : check_serving(&c, error));
out:
    if (status == LOOM_INTERNAL || !c.fine) {
        fflush(stdout);
        loom__cli_say("to repeat this:");
        print_command(&c, stderr);
    }
    *fine = *fine && c.fine;
    loom_plan_destroy(c.plan);
    return status;
}

/* -- Every problem of the cache ----------------------------------------------------------------------------
 */

typedef struct installed {
    const char *problem, *target, *arch, *schedule, *schedule_backward;
} installed;

/* One row per problem, target, arch and pair of schedules: forward and backward kernels are entries of their
 * own. */
static void add_entry(installed *rows, int32_t *num_rows, const char *key, loom__arena *arena) {
    installed row = {loom__cli_key_value(arena, key, "problem"), loom__cli_key_value(arena, key, "target"),
                     loom__cli_key_value(arena, key, "arch"), NULL, NULL};
    const char *schedule = loom__cli_key_value(arena, key, "schedule");
    bool backward = strncmp(loom__cli_key_value(arena, key, "kernel"), "backward", 8) == 0;
    for (int32_t i = 0; i < *num_rows; i++) {
        if (strcmp(rows[i].problem, row.problem) || strcmp(rows[i].target, row.target) ||
            strcmp(rows[i].arch, row.arch))
            continue;
        const char **held = backward ? &rows[i].schedule_backward : &rows[i].schedule;
        if (!*held) *held = schedule;
        if (strcmp(*held, schedule) == 0) return;
    }
    *(backward ? &row.schedule_backward : &row.schedule) = schedule;
    rows[(*num_rows)++] = row;
}

/* Whether kernels of an entry are for a device of `arch`: code for sm_90a runs on sm_90. */
static bool is_for(const char *entry, const char *arch) {
    size_t length = strlen(arch);
    return strncmp(entry, arch, length) == 0 && (!entry[length] || strcmp(entry + length, "a") == 0);
}

static loom_status check_installed(const values *v, loom_context *context, bool *fine, loom__arena *arena,
                                   loom_error *error) {
    const loom__cache_row *entries = NULL;
    int32_t num_entries = 0, num_rows = 0, num_skipped = 0;
    LOOM_TRY(context, loom__cache_list(context, arena, &entries, &num_entries, error));
    installed *rows = loom__arena_alloc(arena, (size_t)(num_entries + 1) * sizeof *rows);
    if (!rows) return loom__fail_memory(error);
    for (int32_t i = 0; i < num_entries; i++)
        if (!entries[i].damage) add_entry(rows, &num_rows, entries[i].key, arena);
    for (int32_t i = 0; i < num_rows; i++) {
        loom_plan_desc desc;
        loom_plan *plan = NULL;
        loom__cli_plan_desc(&v->common, rows[i].problem, &desc);
        desc.target = rows[i].target;
        desc.schedule = rows[i].schedule;
        desc.schedule_backward = rows[i].schedule_backward;
        if (strcmp(rows[i].target, "host") == 0) desc.device = LOOM_DEVICE_HOST;
        loom_status status = loom__cli_plan_create(context, &desc, &plan, error);
        const char *arch = plan ? loom_plan_text(plan, LOOM_TEXT_ARCH) : "no device";
        bool elsewhere =
            status == LOOM_DRIVER || (!status && strcmp(desc.target, "host") && !is_for(rows[i].arch, arch));
        if (elsewhere) {
            printf("problem %s\nskipped: it is for %s, here is %s\n", rows[i].problem, rows[i].arch, arch);
            num_skipped++;
        }
        loom_plan_destroy(plan);
        if (!elsewhere) LOOM_TRY(context, status);
        if (!elsewhere) LOOM_TRY(context, check_problem(v, context, &desc, fine, error));
    }
    loom__cli_say("%d problems checked, %d skipped", num_rows - num_skipped, num_skipped);
    return LOOM_OK;
}

int loom__cli_check(int argc, char **argv) {
    values v = {.common = LOOM__CLI_COMMON_INIT, .seed = 1};
    const char *problem = NULL;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    bool fine = true;
    v.common.pass = PASS_OF_PROBLEM;
    v.common.alignment = 0; /* both variants are launched */
    v.common.shape = (loom_shape){2, 4, 2, 257, 321};
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, &v, &problem);
    if (exit_status >= 0) return exit_status;
    if (!problem == !v.installed || (v.installed && v.stand_in)) {
        loom__cli_say("check: give a PROBLEM, or --installed alone");
        return LOOM__CLI_USAGE;
    }
    loom_status status = loom_context_create(NULL, &context, &error);
    if (!status && v.installed) {
        loom__arena arena = {&context->memory, NULL};
        status = check_installed(&v, context, &fine, &arena, &error);
        loom__arena_free(&arena);
    } else if (!status) {
        loom_plan_desc desc;
        loom__cli_plan_desc(&v.common, problem, &desc);
        desc.schedule = v.common.schedule;
        desc.schedule_backward = v.schedule_backward;
        status = check_problem(&v, context, &desc, &fine, &error);
    }
    loom_context_destroy(context);
    if (status) return loom__cli_fail(&error);
    return fine ? LOOM__CLI_FINE : LOOM__CLI_FAILED;
}
