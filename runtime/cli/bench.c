/* bench.c - `attnloom bench`: times kernels of one problem or of the grid of the FlashAttention papers;
 * prints CSV.
 *
 * A cell is a problem and a shape. Its plan is compiled before anything is timed. Two protocols, since a
 * card's clock differs between them: burst is 20 ms idle, 4 warm-ups, the median of 15 launches; sustained is
 * 300 ms of the same launch first, then the median of 15. Launches are timed by events on a GPU and by the
 * monotonic clock on the CPU. */
#define _POSIX_C_SOURCE 200809L
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tensors.h"

enum { NUM_RUNS = 15, NUM_WARM_UPS = 4, IDLE_MS = 20, SUSTAINED_MS = 300 };
enum { BURST = 1u, SUSTAINED = 2u };
enum { FULL = 1u, CAUSAL = 2u };
enum { PAPER_TOKENS = 16384, PAPER_HIDDEN = 2048 };
static const char *const DTYPES[] = {"bf16", "fp16", "fp32"};
enum { PREPARING = LOOM_BACKWARD + 1 }; /* what is timed: it, or a loom_pass */
static const char *const PASSES[] = {"fwd", "bwd", "prepare"};

/* -- Command line --------------------------------------------------------------------------------------- */

static const loom__cli_option OPTIONS[] = {
    {"--grid", "paper", LOOM__CLI_CHOICE, offsetof(loom__cli_bench_values, grid),
     "instead of PROBLEM: d 64,128,256 x full,causal x length 512..16384, batch = 16384/length, heads = "
     "2048/d"},
    {"--mode", "burst|sustained", LOOM__CLI_CHOICES, offsetof(loom__cli_bench_values, modes),
     "with commas (default burst)"},
    {"--pass", "forward|backward", LOOM__CLI_CHOICES, offsetof(loom__cli_bench_values, passes),
     "with commas (default forward)"},
    {"--hdim", "LIST", LOOM__CLI_WHOLES, offsetof(loom__cli_bench_values, hdims),
     "of the grid: head dims (default 64,128,256)"},
    {"--seqlen", "LIST", LOOM__CLI_WHOLES, offsetof(loom__cli_bench_values, seqlens),
     "of the grid: lengths (default 512,1024,2048,4096,8192,16384)"},
    {"--mask", "full|causal", LOOM__CLI_CHOICES, offsetof(loom__cli_bench_values, masks),
     "of the grid, with commas (default full,causal)"},
    {"--dtype", "bf16|fp16|fp32", LOOM__CLI_CHOICE, offsetof(loom__cli_bench_values, dtype),
     "of the grid (default bf16)"},
    LOOM__CLI_ROW_SHAPE,
    {"--param", "NAME=FILE|NUMBER", LOOM__CLI_TEXTS, offsetof(loom__cli_bench_values, params),
     "a parameter of the problem: an .npy file for an array, a number for a scalar; may be repeated"},
    {"--prepared", NULL, LOOM__CLI_FLAG, offsetof(loom__cli_bench_values, prepared),
     "what launches make of the mask is made once before they are timed; that is timed too, in rows of pass "
     "prepare, where the mask "
     "needs it"},
    {"--memory", NULL, LOOM__CLI_FLAG, offsetof(loom__cli_bench_values, memory),
     "says on stderr how many bytes of the device each cell took in all: tensors, params, workspace, and "
     "what "
     "is prepared"},
    {"--launch-cost", NULL, LOOM__CLI_FLAG, offsetof(loom__cli_bench_values, launch_cost),
     "instead: CPU time of a launch through the library beside a bare cuLaunchKernel of the same kernels "
     "(us)"},
    {"--cold", NULL, LOOM__CLI_FLAG, offsetof(loom__cli_bench_values, cold),
     "instead: time from problem text to loaded kernels, with an empty cache and with a filled one (ms)"},
    {"--pack", "FILE", LOOM__CLI_TEXT, offsetof(loom__cli_bench_values, pack),
     "instead: time until a first forward launch with kernels of that pack has ended, in a process that has "
     "a CUDA "
     "context and nothing of this library (ms)"},
    LOOM__CLI_ROW_TARGET,
    LOOM__CLI_ROW_DEVICE,
    LOOM__CLI_ROW_SCHEDULE,
    LOOM__CLI_ROW_SCHEDULES,
    LOOM__CLI_ROW_ALIGNMENT,
};

static const loom__cli_command COMMAND = {
    .name = "bench",
    .operands = "[PROBLEM]",
    .min_operands = 0,
    .max_operands = 1,
    .text = "Times the kernels of a problem on the shape given, or a grid of problems, and prints CSV with "
            "the columns pass,dtype,hdim,causal,seqlen,batch,heads,backend,mode,ms,tflops,target,schedule. "
            "Inputs are N(0,1), layout [batch, seq, head, dim]. The forward counts "
            "2*batch*heads*seq_q*seq_k*(d+d_v) operations, the backward 2.5 times that; a causal problem "
            "counts half, any other mask counts in full.\n"
            "Mode burst is 20 ms idle, 4 warm-ups, the median of 15 launches. Mode sustained is 300 ms of "
            "the same launch first, then the median of 15.\n"
            "With --schedules each row is of one schedule and has two columns more, cost, the generator's "
            "estimate, and "
            "problem. All are compiled before the first is timed, those in the cache excepted; one that does "
            "not compile "
            "is said on stderr, the rest goes on, and the exit status is 1.",
    .examples =
        "  attnloom bench \"bf16 d=128 causal\" --shape \"batch=4 heads=32:8 seq=4096\" --mode "
        "burst,sustained\n"
        "  attnloom bench --grid paper --pass forward,backward --hdim 128 > grid.csv\n"
        "  attnloom bench \"bf16 d=128 causal backward\" --cold\n"
        "  attnloom bench \"bf16 d=128 causal\" --pack kernels.pack\n"
        "  attnloom bench \"bf16 d=128 causal\" --target hopper --schedules all --mode burst,sustained\n",
    .options = OPTIONS,
    .num_options = sizeof OPTIONS / sizeof OPTIONS[0],
};

/* -- A cell --------------------------------------------------------------------------------------------- */

loom_status loom__cli_cell_begin(loom_context *context, const char *problem, const loom_shape *shape,
                                 const loom__cli_texts *params, loom__cli_cell *cell, loom_error *error) {
    *cell = (loom__cli_cell){.args = LOOM_ARGS_INIT, .shape = *shape};
    cell->args.shape = *shape;
    LOOM_TRY(NULL, loom__cli_problem_facts(context, problem, &cell->facts, error));
    return loom__cli_params_read(&cell->params, cell->facts, &cell->shape, params, error);
}

loom_status loom__cli_cell_fill(loom_context *context, loom__cli_cell *cell, loom_error *error) {
    LOOM_TRY(NULL, loom__device_memory_open(context, cell->device, &cell->memory, error));
    LOOM_TRY(NULL, loom__cli_params_upload(&cell->params, cell->facts, cell->memory, error));
    cell->args.params = cell->params.items;
    cell->args.num_params = cell->facts->num_params;
    return loom__tensors_make(cell->memory, cell->facts, &cell->args, error);
}

loom_status loom__cli_cell_open(loom_context *context, const char *problem, const loom_plan_desc *desc,
                                const loom__cli_texts *params, loom__cli_cell *cell, loom_error *error) {
    loom_plan_desc own = *desc;
    own.problem = problem;
    LOOM_TRY(NULL, loom__cli_cell_begin(context, problem, &desc->hint, params, cell, error));
    LOOM_TRY(NULL, loom__cli_plan_create_quietly(context, &own, &cell->plan, error));
    cell->device = own.device;
    return loom__cli_cell_fill(context, cell, error);
}

void loom__cli_cell_close(loom__cli_cell *cell) {
    loom__device_memory_close(cell->memory);
    loom_plan_destroy(cell->plan);
    loom__cli_params_free(&cell->params);
    loom__reference_destroy(cell->facts);
    *cell = (loom__cli_cell){.memory = NULL};
}

/* -- Timing --------------------------------------------------------------------------------------------- */

loom_status loom__cli_cell_workspace(loom__cli_cell *cell, loom_pass pass, loom_error *error) {
    size_t bytes = 0;
    LOOM_TRY(NULL, loom_workspace_bytes(cell->plan, pass, &cell->args, &bytes, error));
    if (bytes <= cell->args.workspace_bytes) return LOOM_OK;
    cell->args.workspace = NULL;
    cell->args.workspace_bytes = bytes;
    return bytes ? loom__device_memory_alloc(cell->memory, bytes, &cell->args.workspace, error) : LOOM_OK;
}

loom_status loom__cli_cell_prepare(loom__cli_cell *cell, loom_error *error) {
    size_t bytes = 0;
    LOOM_TRY(NULL, loom_prepared_bytes(cell->plan, &cell->args, &bytes, error));
    if (!bytes) return LOOM_OK;
    LOOM_TRY(NULL, loom__device_memory_alloc(cell->memory, bytes, &cell->args.prepared, error));
    cell->args.prepared_bytes = bytes;
    return loom_prepare(cell->plan, &cell->args, NULL, error);
}

loom_status loom__cli_cell_launch(const loom__cli_cell *cell, loom_pass pass, loom_error *error) {
    return pass == LOOM_FORWARD ? loom_forward(cell->plan, &cell->args, NULL, error)
                                : loom_backward(cell->plan, &cell->args, NULL, error);
}

static loom_status run_timed(const loom__cli_cell *cell, int32_t what, loom_error *error) {
    return what == PREPARING ? loom_prepare(cell->plan, &cell->args, NULL, error)
                             : loom__cli_cell_launch(cell, (loom_pass)what, error);
}

static void idle(int32_t ms) {
    struct timespec rest = {0, ms * 1000000L};
    nanosleep(&rest, NULL);
}

/* Milliseconds of num launches, one by one. */
static loom_status time_launches(loom__cli_cell *cell, int32_t what, int32_t num, double *ms,
                                 loom_error *error) {
    for (int32_t i = 0; i < num; i++) {
        LOOM_TRY(NULL, loom__device_memory_mark(cell->memory, 2 * i, error));
        LOOM_TRY(NULL, run_timed(cell, what, error));
        LOOM_TRY(NULL, loom__device_memory_mark(cell->memory, 2 * i + 1, error));
    }
    LOOM_TRY(NULL, loom__device_memory_sync(cell->memory, error));
    for (int32_t i = 0; i < num; i++)
        LOOM_TRY(NULL, loom__device_memory_elapsed(cell->memory, 2 * i, 2 * i + 1, &ms[i], error));
    return LOOM_OK;
}

static loom_status time_cell(loom__cli_cell *cell, int32_t what, uint32_t mode, double *median,
                             loom_error *error) {
    double ms[NUM_RUNS];
    int32_t warm_ups = NUM_WARM_UPS;
    LOOM_TRY(NULL, run_timed(cell, what, error));
    LOOM_TRY(NULL, loom__device_memory_sync(cell->memory, error));
    if (mode == BURST) {
        idle(IDLE_MS);
    } else {
        LOOM_TRY(NULL, time_launches(cell, what, 1, ms, error));
        double wanted = SUSTAINED_MS / fmax(ms[0], 1e-3);
        if (wanted > warm_ups) warm_ups = (int32_t)wanted;
    }
    for (int32_t i = 0; i < warm_ups; i++) LOOM_TRY(NULL, run_timed(cell, what, error));
    LOOM_TRY(NULL, time_launches(cell, what, NUM_RUNS, ms, error));
    *median = loom__median(ms, NUM_RUNS);
    return LOOM_OK;
}

/* -- Cells ---------------------------------------------------------------------------------------------- */

static bool is_causal(const loom_plan *plan) {
    return strstr(loom_plan_text(plan, LOOM_TEXT_PROBLEM), "mask={k <= q}") != NULL;
}

/* `candidate` is NULL without --schedules. */
static void print_row(const loom__cli_cell *cell, int32_t what, const char *mode, double ms,
                      const loom__candidate *candidate) {
    const loom_shape *s = &cell->shape;
    bool causal = is_causal(cell->plan);
    double work = 2.0 * (double)s->batch * (double)s->heads_q * (double)s->seq_q * (double)s->seq_k *
                  (cell->facts->d + cell->facts->dv) * (causal ? 0.5 : 1) * (what == LOOM_BACKWARD ? 2.5 : 1);
    loom_text schedule = what == LOOM_BACKWARD ? LOOM_TEXT_SCHEDULE_BACKWARD : LOOM_TEXT_SCHEDULE;
    const char *dtype = cell->facts->dtype == LOOM__BF16  ? "bf16"
                        : cell->facts->dtype == LOOM__F16 ? "fp16"
                                                          : "fp32";
    double rate = what == PREPARING ? 0 : work / ms / 1e9;
    printf("%s,%s,%d,%d,%lld,%lld,%lld,ours,%s,%.5f,%.*f,%s,%s", PASSES[what], dtype, cell->facts->d, causal,
           (long long)s->seq_k, (long long)s->batch, (long long)s->heads_q, mode, ms, rate < 10 ? 3 : 1, rate,
           loom_plan_text(cell->plan, LOOM_TEXT_TARGET), loom_plan_text(cell->plan, schedule));
    if (candidate) printf(",%.0f,\"%s\"", candidate->cost, loom_plan_text(cell->plan, LOOM_TEXT_PROBLEM));
    printf("\n");
    fflush(stdout);
}

/* Times a pass of the cell's plan, or its preparing, in each mode. */
static loom_status bench_pass(const loom__cli_bench_values *values, loom__cli_cell *cell, int32_t what,
                              const loom__candidate *candidate, loom_error *error) {
    if (what != PREPARING) LOOM_TRY(NULL, loom__cli_cell_workspace(cell, (loom_pass)what, error));
    for (uint32_t mode = BURST; mode <= SUSTAINED; mode++) {
        double ms = 0;
        if (!(values->modes & mode)) continue;
        LOOM_TRY(NULL, time_cell(cell, what, mode, &ms, error));
        print_row(cell, what, mode == BURST ? "burst" : "sustained", ms, candidate);
    }
    return LOOM_OK;
}

/* -- Sweeps --------------------------------------------------------------------------------------------- */

static loom_status keep_plan(void *user, int32_t index, loom_plan *plan, loom_error *error) {
    loom_plan **plans = user;
    (void)error;
    plans[index] = plan;
    return LOOM_OK;
}

/* Times a pass with each of the schedules asked for, on the tensors of the cell. */
static loom_status sweep_pass(const loom__cli_bench_values *values, loom_context *context,
                              const loom_plan_desc *desc, loom__cli_cell *cell, loom_pass pass, bool *fine,
                              loom_error *error) {
    loom__arena arena = {&context->memory, NULL};
    loom_plan_desc own = *desc;
    loom_plan *chosen = cell->plan, **plans = NULL;
    loom__cli_plans list;
    const loom__candidate *schedules = NULL;
    bool host = cell->device == LOOM_DEVICE_HOST;
    own.problem = loom_plan_text(chosen, LOOM_TEXT_PROBLEM);
    own.target = loom_plan_text(chosen, LOOM_TEXT_TARGET);
    own.device = cell->device;
    loom_status status =
        loom__cli_list_schedules(context, &own, host ? "host" : loom_plan_text(chosen, LOOM_TEXT_ARCH), pass,
                                 values->common.most_schedules, &arena, &list, &schedules, error);
    if (!status) {
        plans = loom__arena_alloc(&arena, (size_t)list.num * sizeof *plans);
        status = plans ? loom__cli_make_plans(context, &list, keep_plan, plans, fine, error)
                       : loom__fail(error, LOOM_MEMORY, "bench", "no memory for %d plans", list.num);
    }
    for (int32_t i = 0; plans && i < list.num; i++) {
        cell->plan = plans[i];
        if (plans[i] && !status) status = bench_pass(values, cell, pass, &schedules[i], error);
        loom_plan_destroy(plans[i]);
    }
    cell->plan = chosen;
    loom__arena_free(&arena);
    return status;
}

/* -- Cells --------------------------------------------------------------------------------------------- */

static loom_status bench_cell(const loom__cli_bench_values *values, loom_context *context,
                              const char *problem, const loom_plan_desc *desc, bool *fine,
                              loom_error *error) {
    loom__cli_cell cell;
    loom_status status = loom__cli_cell_open(context, problem, desc, &values->params, &cell, error);
    bool backward = values->passes & 1u << LOOM_BACKWARD;
    if (!status && values->prepared) status = loom__cli_cell_prepare(&cell, error);
    if (!status && cell.args.prepared) status = bench_pass(values, &cell, PREPARING, NULL, error);
    // The backward reads o and lse, so the forward runs in any case.
    for (int32_t pass = LOOM_FORWARD; pass <= (backward ? LOOM_BACKWARD : LOOM_FORWARD) && !status; pass++) {
        bool timed = values->passes & 1u << pass, sweep = values->common.most_schedules > 0;
        if (!timed || (sweep && backward)) {
            status = loom__cli_cell_workspace(&cell, (loom_pass)pass, error);
            if (!status) status = loom__cli_cell_launch(&cell, (loom_pass)pass, error);
        }
        if (timed && !status)
            status = sweep ? sweep_pass(values, context, desc, &cell, (loom_pass)pass, fine, error)
                           : bench_pass(values, &cell, pass, NULL, error);
    }
    if (!status && values->memory) {
        const loom_shape *s = &cell.shape;
        loom__cli_say("bench: seq=%lld:%lld: %zu bytes of the device, %zu of them workspace, %zu prepared",
                      (long long)s->seq_q, (long long)s->seq_k, loom__device_memory_held(cell.memory),
                      cell.args.workspace_bytes, cell.args.prepared_bytes);
    }
    loom__cli_cell_close(&cell);
    return status;
}

static loom_status bench_grid(const loom__cli_bench_values *values, loom_context *context,
                              const loom_plan_desc *desc, loom__cli_progress *progress, bool *fine,
                              loom_error *error) {
    int64_t done = 0, total = (int64_t)values->hdims.num * values->seqlens.num *
                              ((values->masks == (FULL | CAUSAL)) + 1);
    for (int32_t i = 0; i < values->hdims.num; i++) {
        for (uint32_t mask = FULL; mask <= CAUSAL; mask++) {
            char problem[128];
            if (!(values->masks & mask)) continue;
            snprintf(problem, sizeof problem, "%s d=%lld%s%s", DTYPES[values->dtype],
                     (long long)values->hdims.items[i], mask == CAUSAL ? " causal" : "",
                     values->passes & 1u << LOOM_BACKWARD ? " backward" : "");
            for (int32_t j = 0; j < values->seqlens.num; j++) {
                int64_t d = values->hdims.items[i], seq = values->seqlens.items[j];
                loom_plan_desc cell = *desc;
                char what[192];
                if (d < 1 || seq < 1 || d > PAPER_HIDDEN || seq > PAPER_TOKENS)
                    return loom__fail(error, LOOM_INVALID, "--grid",
                                      "head dim %lld and length %lld are not within "
                                      "1 to %d and 1 to %d",
                                      (long long)d, (long long)seq, PAPER_HIDDEN, PAPER_TOKENS);
                cell.hint = (loom_shape){PAPER_TOKENS / seq, PAPER_HIDDEN / d, PAPER_HIDDEN / d, seq, seq};
                snprintf(what, sizeof what, "%s length %lld", problem, (long long)seq);
                loom__cli_progress_step(progress, ++done, total, what);
                LOOM_TRY(NULL, bench_cell(values, context, problem, &cell, fine, error));
            }
        }
    }
    return LOOM_OK;
}

/* -- The command ---------------------------------------------------------------------------------------- */

static loom_status bench(const loom__cli_bench_values *values, const char *problem, bool *fine,
                         loom_error *error) {
    loom_plan_desc desc;
    loom_context *context = NULL;
    loom__cli_plan_desc(&values->common, problem, &desc);
    desc.schedule = values->passes == 1u << LOOM_BACKWARD ? NULL : values->common.schedule;
    desc.schedule_backward = values->passes == 1u << LOOM_BACKWARD ? values->common.schedule : NULL;
    if (values->cold) return loom__cli_bench_cold(&desc, error);
    if (values->pack) return loom__cli_bench_pack(values, &desc, error);
    LOOM_TRY(NULL, loom_context_create(NULL, &context, error));
    if (values->launch_cost) {
        loom_status status = loom__cli_bench_launch(values, context, &desc, error);
        loom_context_destroy(context);
        return status;
    }
    printf("pass,dtype,hdim,causal,seqlen,batch,heads,backend,mode,ms,tflops,target,schedule%s\n",
           values->common.most_schedules ? ",cost,problem" : "");
    loom__cli_progress *progress = values->common.most_schedules ? NULL : loom__cli_progress_start("timing");
    loom_status status = problem ? bench_cell(values, context, problem, &desc, fine, error)
                                 : bench_grid(values, context, &desc, progress, fine, error);
    loom__cli_progress_stop(progress);
    loom_context_destroy(context);
    return status;
}

int loom__cli_bench(int argc, char **argv) {
    loom__cli_bench_values values = {.common = LOOM__CLI_COMMON_INIT,
                                     .grid = -1,
                                     .modes = BURST,
                                     .passes = 1u << LOOM_FORWARD,
                                     .masks = FULL | CAUSAL,
                                     .hdims = {3, {64, 128, 256}},
                                     .seqlens = {6, {512, 1024, 2048, 4096, 8192, 16384}}};
    const char *problem = NULL;
    loom_error error = LOOM_ERROR_INIT;
    bool fine = true;
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, &values, &problem);
    if (exit_status >= 0) return exit_status;
    if (!problem == (values.grid < 0)) {
        loom__cli_say("bench: give either PROBLEM or --grid paper");
        return LOOM__CLI_USAGE;
    }
    int num_others = values.cold + values.launch_cost + (values.pack != NULL);
    if (num_others > 1) {
        loom__cli_say("bench: --cold, --launch-cost and --pack are one each");
        return LOOM__CLI_USAGE;
    }
    if (!problem && num_others) {
        loom__cli_say("bench: --cold, --launch-cost and --pack take a PROBLEM");
        return LOOM__CLI_USAGE;
    }
    if ((values.prepared || values.memory) && num_others) {
        loom__cli_say("bench: %s takes neither --cold, --launch-cost nor --pack",
                      values.prepared ? "--prepared" : "--memory");
        return LOOM__CLI_USAGE;
    }
    if (values.common.most_schedules && (num_others || values.common.schedule || values.prepared)) {
        loom__cli_say(
            "bench: --schedules takes neither --schedule, --cold, --launch-cost, --pack nor --prepared");
        return LOOM__CLI_USAGE;
    }
    if (bench(&values, problem, &fine, &error)) return loom__cli_fail(&error);
    return fine ? LOOM__CLI_FINE : LOOM__CLI_FAILED;
}
