/* tune.c - `attnloom tune`: measures the schedules of problems on this machine and keeps the best as wisdom.
 */
#define _GNU_SOURCE
#include "../tune.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "problem.h"

typedef struct values {
    loom__cli_common common;
    loom__cli_texts params;
    const char *budget;
    double seconds;
} values;

static const loom__cli_option OPTIONS[] = {
    LOOM__CLI_ROW_SHAPE,
    {"--budget", "60s|5m", LOOM__CLI_TEXT, offsetof(values, budget),
     "most time for each problem, of which each pass gets its share (default 60s)"},
    {"--param", "NAME=FILE|NUMBER", LOOM__CLI_TEXTS, offsetof(values, params),
     "a parameter of the problem: an .npy file for an array, a number for a scalar; may be repeated "
     "(default: made-up "
     "values)"},
    LOOM__CLI_ROW_TARGET,
    LOOM__CLI_ROW_DEVICE,
    LOOM__CLI_ROW_ALIGNMENT,
};

static const loom__cli_command COMMAND = {
    .name = "tune",
    .operands = "PROBLEM|MANIFEST",
    .min_operands = 1,
    .max_operands = 1,
    .text = "Times the schedules of a problem's passes on the shape given, and keeps the fastest as wisdom "
            "in the cache "
            "folder, where plans for shapes of the same class find it: lengths within a factor of the square "
            "root of 2 "
            "share one (docs/design.md section 11). What the generator's model takes for hopeless is left "
            "out, the rest "
            "compiles while the device times; all are timed in turns, and who falls behind is dropped. The "
            "fastest is "
            "compared with the float64 reference before it is kept.\n"
            "Prints a line a schedule, the fastest first: its rank by the model, 1 its choice, and cost, the "
            "median of its "
            "launches, how "
            "much slower than the best it is, and what became of it. The operand is a MANIFEST if it is the "
            "name of a "
            "file; its entries are tuned one after another, each at its hint, sizes that this leaves out "
            "from --shape.\n"
            "Ctrl-C ends early: the fastest of what was timed is still checked and kept. The exit status is "
            "1 if a pass "
            "has no winner.",
    .examples = "  attnloom tune \"bf16 d=128 causal\" --shape \"batch=4 heads=32:8 seq=4096\"\n"
                "  attnloom tune kernels.lua --budget 30s\n"
                "  attnloom tune \"fp32 d=64 causal\" --target host --shape \"batch=1 heads=4 seq=512\"\n",
    .options = OPTIONS,
    .num_options = sizeof OPTIONS / sizeof OPTIONS[0],
};

/* -- Interrupts ------------------------------------------------------------------------------------------ */

static atomic_bool interrupted; /* a signal handler takes no pointer */

static void on_signal(int number) {
    (void)number;
    atomic_store(&interrupted, true);
}

/* The first one ends the tuning, the second the program. */
static void catch_signals(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* -- Progress -------------------------------------------------------------------------------------------- */

static const char *pass_name(loom_pass pass) { return pass == LOOM_BACKWARD ? "backward" : "forward"; }

/* Counts first looks and rounds of all trials; those that are dropped have had all of theirs. */
static void show_progress(void *user, const loom__tuning *tuning) {
    enum { STEPS = 1 + LOOM__TUNE_ROUNDS };
    char what[160];
    int32_t done = 0, total = 0;
    for (int32_t i = 0; i < tuning->num_trials; i++) {
        const loom__trial *trial = &tuning->trials[i];
        if (trial->state == LOOM__TRIAL_PRUNED) continue;
        total += STEPS;
        if (trial->state == LOOM__TRIAL_TIMED)
            done += 1 + trial->num_launches / LOOM__TUNE_ROUND_LAUNCHES;
        else if (trial->state != LOOM__TRIAL_LATE)
            done += STEPS;
    }
    const loom__trial *best = tuning->best < 0 ? NULL : &tuning->trials[tuning->best];
    if (best)
        snprintf(what, sizeof what, "tuning %s, best %.4f ms with %s,", pass_name(tuning->pass), best->ms,
                 best->schedule);
    else
        snprintf(what, sizeof what, "tuning %s", pass_name(tuning->pass));
    loom__cli_progress_step(user, done, total, what);
}

/* -- The table ------------------------------------------------------------------------------------------- */

static const char *const STATES[] = {"late", "pruned", "failed", "stopped", "timed"};

static int compare_trials(const void *a, const void *b) {
    const loom__trial *x = a, *y = b;
    if (x->state != y->state) return (x->state < y->state) - (x->state > y->state);
    if (x->ms != y->ms) return (x->ms > y->ms) - (x->ms < y->ms);
    return x->rank - y->rank;
}

static void print_table(const loom__tuning *tuning, double seconds) {
    const loom__wisdom_entry *e = &tuning->entry;
    const loom_shape *s = &tuning->shape;
    double best = tuning->best < 0 ? 0 : tuning->trials[tuning->best].ms;
    printf("problem %s\npass %s target %s device \"%s\" shape batch=%lld heads=%lld:%lld seq=%lld:%lld class "
           "rows=%lld "
           "queries=%lld keys=%lld seconds %.1f\n",
           e->problem, pass_name(tuning->pass), e->target, e->device, (long long)s->batch,
           (long long)s->heads_q, (long long)s->heads_kv, (long long)s->seq_q, (long long)s->seq_k,
           (long long)e->class.rows, (long long)e->class.queries, (long long)e->class.keys, seconds);
    qsort(tuning->trials, (size_t)tuning->num_trials, sizeof *tuning->trials, compare_trials);
    for (int32_t i = 0; i < tuning->num_trials; i++) {
        const loom__trial *trial = &tuning->trials[i];
        char rank[24] = "-", cost[32] = "-", ms[32] = "-", gap[32] = "-";
        if (trial->rank) {
            snprintf(rank, sizeof rank, "%d", trial->rank);
            snprintf(cost, sizeof cost, "%.0f", trial->cost);
        }
        if (trial->ms > 0) snprintf(ms, sizeof ms, "%.5f", trial->ms);
        if (trial->ms > 0 && best > 0) snprintf(gap, sizeof gap, "%+.1f%%", 100 * (trial->ms / best - 1));
        printf("rank %s cost %s ms %s gap %s launches %d %s schedule \"%s\"%s%s\n", rank, cost, ms, gap,
               trial->num_launches, STATES[trial->state], trial->schedule, *trial->reason ? " " : "",
               trial->reason);
    }
    fflush(stdout);
}

/* -- Tuning ---------------------------------------------------------------------------------------------- */

static loom_status tune_pass(loom_context *context, const loom_plan_desc *desc, loom_pass pass,
                             const loom_param *params, double seconds, bool *fine, loom_error *error) {
    loom__arena arena = {&context->memory, NULL};
    loom__tuning tuning;
    double start = loom__now();
    loom__cli_progress *progress = loom__cli_progress_start("tuning");
    loom__tune_options options = {.params = params,
                                  .seconds = seconds,
                                  .stop = &interrupted,
                                  .progress = show_progress,
                                  .user = progress};
    loom_status status = loom__tune(context, desc, pass, &options, &arena, &tuning, error);
    loom__cli_progress_stop(progress);
    if (!status) {
        bool won = tuning.best >= 0;
        double best_ms = won ? tuning.trials[tuning.best].ms : 0; /* the table is sorted anew */
        print_table(&tuning, loom__now() - start);
        if (won)
            loom__cli_say("%s: %s, %.4f ms, kept as wisdom", pass_name(pass), tuning.entry.schedule, best_ms);
        else
            loom__cli_say("%s: no schedule was timed and found right; nothing is kept", pass_name(pass));
        *fine = *fine && won;
    }
    loom__arena_free(&arena);
    return status;
}

/* All passes of a problem; params that are given are made once for them. */
static loom_status tune_problem(const values *v, loom_context *context, const loom_plan_desc *desc,
                                bool *fine, loom_error *error) {
    loom__reference *facts = NULL;
    loom__cli_params params = {.files = {{0}}};
    loom__device_memory *memory = NULL;
    double start = loom__now();
    loom_status status = loom__cli_problem_facts(context, desc->problem, &facts, error);
    if (!status && v->params.num)
        status = loom__cli_params_read(&params, facts, &desc->hint, &v->params, error);
    if (!status && v->params.num) status = loom__device_memory_open(context, desc->device, &memory, error);
    if (!status && v->params.num) status = loom__cli_params_upload(&params, facts, memory, error);
    loom_pass last = facts && facts->backward ? LOOM_BACKWARD : LOOM_FORWARD;
    for (loom_pass pass = LOOM_FORWARD; pass <= last && !status && !atomic_load(&interrupted); pass++) {
        double left = v->seconds - (loom__now() - start);
        status = tune_pass(context, desc, pass, v->params.num ? params.items : NULL,
                           left / (double)(last - pass + 1), fine, error);
    }
    loom__device_memory_close(memory);
    loom__cli_params_free(&params);
    loom__reference_destroy(facts);
    return status;
}

static loom_status tune_manifest(const values *v, loom_context *context, const loom_plan_desc *common,
                                 const char *path, bool *fine, loom_error *error) {
    loom__arena arena = {&context->memory, NULL};
    const loom__device *device = NULL;
    loom__cli_plans list = {.num = 0};
    loom_status status = LOOM_OK;
    if (common->device != LOOM_DEVICE_HOST)
        status = loom__device_open(context, common->device, &device, error);
    /* The CPU takes all entries, once each: those of one arch. */
    if (!status)
        status =
            loom__cli_list_manifest(context, path, device ? device->arch : "sm_90", &arena, &list, error);
    for (int32_t i = 0; i < list.num && !status && !atomic_load(&interrupted); i++) {
        loom_plan_desc desc = *common;
        const loom_plan_desc *entry = &list.descs[i];
        loom_error failure = LOOM_ERROR_INIT;
        desc.problem = entry->problem;
        if (device && entry->target) desc.target = entry->target;
        if (entry->hint.batch) desc.hint.batch = entry->hint.batch;
        if (entry->hint.heads_q) desc.hint.heads_q = entry->hint.heads_q;
        if (entry->hint.heads_kv) desc.hint.heads_kv = entry->hint.heads_kv;
        if (entry->hint.seq_q) desc.hint.seq_q = entry->hint.seq_q;
        if (entry->hint.seq_k) desc.hint.seq_k = entry->hint.seq_k;
        loom_status one = tune_problem(v, context, &desc, fine, &failure);
        /* What is wrong with one entry alone does not keep the others. */
        if (one == LOOM_UNSUPPORTED || one == LOOM_INVALID || one == LOOM_COMPILE) {
            loom__cli_say("%s: %s: %s", list.names[i], failure.field, failure.text);
            *fine = false;
        } else if (one) {
            status = loom__fail(error, one, failure.field, "%s", failure.text);
        }
    }
    loom__arena_free(&arena);
    return status;
}

/* -- The command ----------------------------------------------------------------------------------------- */

/* Reads "60", "60s" or "5m". */
static bool read_budget(values *v) {
    static const double MOST_SECONDS = 1e6;
    char *end = NULL;
    v->seconds = 60;
    if (!v->budget) return true;
    v->seconds = strtod(v->budget, &end);
    if (end != v->budget && *end == 'm')
        v->seconds *= 60, end++;
    else if (end != v->budget && *end == 's')
        end++;
    return end != v->budget && !*end && v->seconds > 0 && v->seconds <= MOST_SECONDS;
}

static loom_status tune(const values *v, const char *operand, bool *fine, loom_error *error) {
    loom_context *context = NULL;
    loom_plan_desc desc;
    int32_t count = 0;
    loom__cli_plan_desc(&v->common, operand, &desc);
    LOOM_TRY(NULL, loom_context_create(NULL, &context, error));
    if (desc.device == LOOM__CLI_DEVICE_AUTO) {
        bool host = desc.target && strcmp(desc.target, "host") == 0;
        bool gpu = !host && loom__device_count(context, &count, NULL) == LOOM_OK && count > 0;
        if (!desc.target && !gpu) loom__cli_say("no GPU here, so the CPU is used (--device host)");
        desc.device = gpu || (desc.target && !host) ? 0 : LOOM_DEVICE_HOST;
    }
    size_t length = strlen(operand);
    bool manifest = access(operand, R_OK) == 0 || (length > 4 && strcmp(operand + length - 4, ".lua") == 0);
    loom_status status = manifest ? tune_manifest(v, context, &desc, operand, fine, error)
                                  : tune_problem(v, context, &desc, fine, error);
    loom_context_destroy(context);
    return status;
}

int loom__cli_tune(int argc, char **argv) {
    values v = {.common = LOOM__CLI_COMMON_INIT};
    const char *operand = NULL;
    loom_error error = LOOM_ERROR_INIT;
    bool fine = true;
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, &v, &operand);
    if (exit_status >= 0) return exit_status;
    if (!read_budget(&v)) {
        loom__cli_say("--budget: '%s': it takes seconds or minutes above 0, like 60s or 5m", v.budget);
        return LOOM__CLI_USAGE;
    }
    catch_signals();
    loom_status status = tune(&v, operand, &fine, &error);
    if (status) return loom__cli_fail(&error);
    if (atomic_load(&interrupted)) loom__cli_say("interrupted: what was timed is kept");
    return fine ? LOOM__CLI_FINE : LOOM__CLI_FAILED;
}
