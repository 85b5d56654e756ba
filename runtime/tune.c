/* tune.c - times the schedules of a pass. See tune.h for what it does; this is how:
 *
 *     candidates -> prune by cost -> compile ahead, first look at each -> rounds in turns -> wisdom
 *
 * A first look is a few launches: enough to drop what takes half as long again as the best. Launches go round
 * sets of tensors that are more than the L2 cache holds, or small shapes would be timed with inputs at hand.
 */
#define _GNU_SOURCE
#include "tune.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "generator.h"
#include "harness.h"
#include "plan.h"
#include "tensors.h"
#include "threads.h"

/* The model ranks within a few tenths (docs/design.md section 12): what it takes for this many times as dear
 * as the cheapest is not compiled, nor is more than so many. */
static const double PRUNED_COST = 1.6;
enum { MOST_TIMED = 32 };

/* Of the best: what a first look drops, and a round. */
static const double HOPELESS = 1.5, BEHIND = 1.1;
enum { FIRST_LAUNCHES = 3, ROUNDS_BEFORE_DROP = 2 };
enum { NUM_ROUNDS = LOOM__TUNE_ROUNDS, ROUND_LAUNCHES = LOOM__TUNE_ROUND_LAUNCHES };

static const double WARM_SECONDS = 0.3; /* of launches before the first is timed: clocks rise under load */
static const double WARM_SHARE = 0.05;  /* of the whole time, at most */

enum { MAX_AT_ONCE = 16, MAX_SETS = 32, L2_TIMES = 2 };

/* A candidate on its way. */
typedef struct run {
    loom_plan *plan;    /* NULL: not begun, or done with */
    loom_error failure; /* of its begin */
    bool checked;       /* its results are right */
    double ms[NUM_ROUNDS * ROUND_LAUNCHES];
    int32_t num_ms;
} run;

typedef struct tuner {
    loom_context *context;
    loom_plan_desc desc; /* of each candidate, but for its schedule */
    loom_pass pass;
    const loom__tune_options *options;
    loom__arena *arena;
    double deadline;
    loom__tuning *result;
    const char *known; /* what wisdom has for the same, NULL: nothing */
    run *runs;         /* one a trial */
    loom__reference *facts;
    loom__device_memory *memory;
    loom_param params[LOOM__MAX_PARAMS];
    loom_args sets[MAX_SETS];
    int32_t num_sets, next_set;
    void *workspace;
    size_t workspace_bytes;
    bool warm, has_forward;
} tuner;

static bool is_over(const tuner *t) {
    const atomic_bool *stop = t->options->stop;
    return loom__now() >= t->deadline || (stop && atomic_load(stop));
}

/* -- Outcomes -------------------------------------------------------------------------------------------- */

static void tell(const tuner *t) {
    if (t->options->progress) t->options->progress(t->options->user, t->result);
}

static bool is_better(const loom__trial *a, const loom__trial *b) {
    return a->state == LOOM__TRIAL_TIMED && a->ms > 0 && (!b || a->ms < b->ms);
}

static void find_best(tuner *t) {
    loom__tuning *r = t->result;
    const loom__trial *best = NULL;
    for (int32_t i = 0; i < r->num_trials; i++) {
        if (is_better(&r->trials[i], best)) best = &r->trials[i];
    }
    r->best = best ? (int32_t)(best - r->trials) : -1;
}

/* Sets what became of a trial, and drops its plan unless it goes on. */
LOOM__PRINTF(4, 5)
static loom_status settle(tuner *t, int32_t index, loom__trial_state state, const char *format, ...) {
    loom__trial *trial = &t->result->trials[index];
    char reason[512];
    va_list list;
    va_start(list, format);
    vsnprintf(reason, sizeof reason, format, list);
    va_end(list);
    trial->state = state;
    trial->reason = loom__arena_copy(t->arena, reason, strcspn(reason, "\n"));
    if (state != LOOM__TRIAL_TIMED) {
        loom_plan_destroy(t->runs[index].plan);
        t->runs[index].plan = NULL;
    }
    find_best(t);
    loom__log(t->context, LOOM__LOG_CANDIDATE, "tune schedule=\"%s\" ms=%.5f launches=%d %s", trial->schedule,
              trial->ms, trial->num_launches, reason);
    tell(t);
    return trial->reason ? LOOM_OK : loom__fail_memory(NULL);
}

/* Records a failure of one candidate alone; returns that of the device or of the host's memory, which end
 * all. */
static loom_status fail_trial(tuner *t, int32_t index, const loom_error *failure, loom_error *error) {
    if (failure->status == LOOM_MEMORY) return loom__fail_memory(error);
    loom_status status = settle(t, index, LOOM__TRIAL_FAILED, "%s: %s", failure->field, failure->text);
    if (status == LOOM_OK && t->memory) status = loom__device_memory_sync(t->memory, error);
    if (status == LOOM_DRIVER)
        return loom__fail(
            error, LOOM_DRIVER, "device",
            "the device is lost since schedule '%s' was launched (%s): this process can use it no more",
            t->result->trials[index].schedule, failure->text);
    return status;
}

/* -- Candidates ------------------------------------------------------------------------------------------ */

/* What wisdom has for the same, else for about this shape, of any generator. */
static const char *find_hint(tuner *t) {
    loom__wisdom_entry wanted = t->result->entry;
    const loom__wisdom_entry *found = loom__wisdom_find(t->context, &wanted, 0, false);
    t->known = found ? found->schedule : NULL;
    wanted.generator = NULL;
    if (!found) found = loom__wisdom_find(t->context, &wanted, LOOM__WISDOM_NEAR, true);
    return found ? found->schedule : NULL;
}

/* Whether wisdom has a candidate for the same: what the model does not list is unknown to this generator. */
static bool is_known(const tuner *t) { return t->known && t->result->trials[0].rank; }

static loom_status list_trials(tuner *t, loom_error *error) {
    loom__tuning *r = t->result;
    loom__request request = {
        .problem = t->desc.problem,
        .target = r->entry.target,
        .arch = t->desc.device == LOOM_DEVICE_HOST ? "host" : t->context->devices[t->desc.device]->arch,
        .alignment = t->desc.alignment,
        .hint = t->desc.hint};
    const loom__candidate *list = NULL;
    const char *hint = find_hint(t);
    int32_t num = 0, num_timed = 0;
    LOOM_TRY(t->context,
             loom__generator_candidates(t->context, &request, t->pass, t->arena, &list, &num, error));
    r->trials = loom__arena_alloc(t->arena, (size_t)(num + 1) * sizeof *r->trials);
    t->runs = loom__arena_alloc(t->arena, (size_t)(num + 1) * sizeof *t->runs);
    if (!r->trials || !t->runs) return loom__fail_memory(error);
    double least =
        num ? list[0].cost : 0; /* the choice need not be the cheapest: a sweep may have found it */
    for (int32_t i = 1; i < num; i++) least = fmin(least, list[i].cost);
    if (hint) r->trials[r->num_trials++] = (loom__trial){.schedule = hint, .reason = ""};
    for (int32_t i = 0; i < num; i++) {
        bool is_hint = hint && strcmp(list[i].text, hint) == 0;
        loom__trial *trial = is_hint ? &r->trials[0] : &r->trials[r->num_trials++];
        *trial = (loom__trial){.schedule = list[i].text, .rank = i + 1, .cost = list[i].cost, .reason = ""};
        bool pruned = !is_hint && (list[i].cost > PRUNED_COST * least || num_timed >= MOST_TIMED);
        num_timed += !pruned;
        if (!pruned) continue;
        trial->state = LOOM__TRIAL_PRUNED;
        trial->reason =
            num_timed >= MOST_TIMED
                ? loom__arena_print(t->arena, "beyond the %d cheapest by the model", MOST_TIMED)
                : loom__arena_print(t->arena, "%.2f times the cheapest by the model", list[i].cost / least);
        if (!trial->reason) return loom__fail_memory(error);
    }
    return LOOM_OK;
}

/* -- Launches -------------------------------------------------------------------------------------------- */

/* Whether the tensors of a shape have fewer bytes than any memory, so that no product of sizes overflows. */
static bool is_countable(const loom_shape *s, const loom__reference *facts) {
    double rows_q = (double)s->batch * (double)s->heads_q * (double)s->seq_q;
    double rows_k = (double)s->batch * (double)s->heads_kv * (double)s->seq_k;
    return (rows_q + rows_k) * (facts->d + facts->dv) < 0x1p46;
}

static loom_status make_sets(tuner *t, const loom__device *device, loom_error *error) {
    const loom_shape *shape = &t->desc.hint;
    if (!is_countable(shape, t->facts))
        return loom__fail(error, LOOM_MEMORY, "shape", "tensors of this shape are larger than any memory");
    size_t bytes = loom__tensors_bytes(t->facts, shape), l2 = device ? (size_t)device->l2_bytes : 0;
    size_t wanted = bytes ? (L2_TIMES * l2 + bytes - 1) / bytes : 1;
    t->num_sets = wanted < 1 ? 1 : wanted > MAX_SETS ? MAX_SETS : (int32_t)wanted;
    if (!t->options->params)
        LOOM_TRY(t->context, loom__params_make(t->memory, t->facts, shape, t->params, error));
    for (int32_t i = 0; i < t->num_sets; i++) {
        loom_args *args = &t->sets[i];
        *args = (loom_args)LOOM_ARGS_INIT;
        args->shape = *shape;
        args->params = t->options->params ? t->options->params : t->params;
        args->num_params = t->facts->num_params;
        LOOM_TRY(t->context, loom__tensors_make(t->memory, t->facts, args, error));
    }
    return LOOM_OK;
}

/* The largest that a plan asked for serves all. */
static loom_status reserve_workspace(tuner *t, const loom_plan *plan, loom_pass pass, loom_error *error) {
    size_t bytes = 0;
    LOOM_TRY(t->context, loom_workspace_bytes(plan, pass, &t->sets[0], &bytes, error));
    if (bytes > t->workspace_bytes) {
        LOOM_TRY(t->context, loom__device_memory_alloc(t->memory, bytes, &t->workspace, error));
        t->workspace_bytes = bytes;
    }
    for (int32_t i = 0; i < t->num_sets; i++) {
        t->sets[i].workspace = t->workspace;
        t->sets[i].workspace_bytes = t->workspace_bytes;
    }
    return LOOM_OK;
}

static loom_status launch(tuner *t, const loom_plan *plan, loom_error *error) {
    const loom_args *args = &t->sets[t->next_set++ % t->num_sets];
    void *stream = loom__device_memory_stream(t->memory);
    return t->pass == LOOM_FORWARD ? loom_forward(plan, args, stream, error)
                                   : loom_backward(plan, args, stream, error);
}

/* Makes the o and lse that the backward reads. */
static loom_status run_forward(tuner *t, const loom_plan *plan, loom_error *error) {
    LOOM_TRY(t->context, reserve_workspace(t, plan, LOOM_FORWARD, error));
    for (int32_t i = 0; i < t->num_sets; i++)
        LOOM_TRY(t->context, loom_forward(plan, &t->sets[i], loom__device_memory_stream(t->memory), error));
    t->has_forward = true;
    return loom__device_memory_sync(t->memory, error);
}

static loom_status warm_up(tuner *t, const loom_plan *plan, loom_error *error) {
    double share = WARM_SHARE * t->options->seconds, start = loom__now();
    double seconds = share < WARM_SECONDS ? share : WARM_SECONDS;
    t->warm = true;
    do {
        LOOM_TRY(t->context, launch(t, plan, error));
        LOOM_TRY(t->context, loom__device_memory_sync(t->memory, error));
    } while (loom__now() - start < seconds);
    return LOOM_OK;
}

/* Times launches behind one that was not timed, which has fetched the kernel's code. */
static loom_status time_launches(tuner *t, const loom_plan *plan, int32_t num, double *ms,
                                 loom_error *error) {
    for (int32_t i = 0; i < num; i++) {
        LOOM_TRY(t->context, loom__device_memory_mark(t->memory, 2 * i, error));
        LOOM_TRY(t->context, launch(t, plan, error));
        LOOM_TRY(t->context, loom__device_memory_mark(t->memory, 2 * i + 1, error));
    }
    LOOM_TRY(t->context, loom__device_memory_sync(t->memory, error));
    for (int32_t i = 0; i < num; i++)
        LOOM_TRY(t->context, loom__device_memory_elapsed(t->memory, 2 * i, 2 * i + 1, &ms[i], error));
    return LOOM_OK;
}

/* -- Checking -------------------------------------------------------------------------------------------- */

/* Compares a plan with the reference on a small shape; what is wrong goes to `failure`. */
static loom_status check_shape(tuner *t, const loom_plan *plan, const loom_shape *shape,
                               loom_error *failure) {
    loom__rig_options options = LOOM__RIG_OPTIONS_INIT;
    loom__rig_report report;
    loom__rig *rig = NULL;
    loom_status status = LOOM_OK;
    options.shape = *shape;
    LOOM_TRY(t->context, loom__rig_create(t->context, plan, t->desc.device, &options, &rig, failure));
    for (loom_pass pass = LOOM_FORWARD; pass <= t->pass; pass++)
        LOOM_TRY_OUT(t->context, loom__rig_run(rig, pass, failure));
    LOOM_TRY_OUT(t->context, loom__rig_compare(rig, t->pass, &report, failure));
    if (!report.fine) {
        char text[400];
        loom__rig_explain(&report, text, sizeof text);
        status = loom__fail(failure, LOOM_INTERNAL, "check", "its results are wrong: %s", text);
    }
out:
    loom__rig_destroy(rig);
    return status;
}

/* No tile fits the shapes; in one queries begin behind the first key, in the other keys end before the last
 * query. */
static loom_status check(tuner *t, const loom_plan *plan, loom_error *failure) {
    static const loom_shape shapes[] = {{2, 4, 2, 257, 321}, {1, 4, 2, 321, 257}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        LOOM_TRY(t->context, check_shape(t, plan, &shapes[i], failure));
    return LOOM_OK;
}

/* Makes sure that the best computes the right thing, before others are measured by it: a kernel that leaves
 * out work is fast. */
static loom_status trust_best(tuner *t, loom_error *error) {
    loom__tuning *r = t->result;
    for (find_best(t); r->best >= 0 && !t->runs[r->best].checked; find_best(t)) {
        loom_error failure = LOOM_ERROR_INIT;
        if (check(t, t->runs[r->best].plan, &failure))
            LOOM_TRY(t->context, fail_trial(t, r->best, &failure, error));
        else
            t->runs[r->best].checked = true;
    }
    return LOOM_OK;
}

/* -- First looks ----------------------------------------------------------------------------------------- */

static void start(tuner *t, int32_t index) {
    run *own = &t->runs[index];
    loom_plan_desc desc = t->desc;
    *(t->pass == LOOM_BACKWARD ? &desc.schedule_backward : &desc.schedule) =
        t->result->trials[index].schedule;
    own->failure = (loom_error)LOOM_ERROR_INIT;
    loom_plan_create(t->context, &desc, &own->plan, &own->failure);
}

/* Waits until a plan is ready, but no longer than there is time. */
static loom_status wait_for(const tuner *t, run *own) {
    static const double LOOK_SECONDS = 0.05;
    loom_status status = (loom_status)own->failure.status;
    if (status) return status;
    do {
        status = loom_plan_wait(own->plan, LOOK_SECONDS, &own->failure);
    } while (status == LOOM_NOT_FOUND && !is_over(t));
    return status;
}

/* Launches of so many seconds each that there is time for, at least one. */
static int32_t count_fitting(const tuner *t, double seconds) {
    double left = t->deadline - loom__now();
    if (left >= FIRST_LAUNCHES * seconds) return FIRST_LAUNCHES;
    return left < 2 * seconds ? 1 : (int32_t)(left / seconds);
}

/* *num becomes how many launches were timed; 0: the time was over before. */
static loom_status try_first(tuner *t, const loom_plan *plan, double ms[FIRST_LAUNCHES], int32_t *num,
                             loom_error *error) {
    *num = 0;
    if (t->pass == LOOM_BACKWARD && !t->has_forward) LOOM_TRY(t->context, run_forward(t, plan, error));
    LOOM_TRY(t->context, reserve_workspace(t, plan, t->pass, error));
    if (!t->warm && !is_over(t)) LOOM_TRY(t->context, warm_up(t, plan, error));
    if (is_over(t)) return LOOM_OK;
    double start = loom__now();
    LOOM_TRY(t->context, launch(t, plan, error));
    LOOM_TRY(t->context, loom__device_memory_sync(t->memory, error));
    if (is_over(t)) return LOOM_OK;
    *num = count_fitting(t, loom__now() - start);
    return time_launches(t, plan, *num, ms, error);
}

static loom_status look_first(tuner *t, int32_t index, loom_error *error) {
    loom__trial *trial = &t->result->trials[index];
    loom_error failure = LOOM_ERROR_INIT;
    double ms[FIRST_LAUNCHES];
    int32_t num = 0;
    if (try_first(t, t->runs[index].plan, ms, &num, &failure)) return fail_trial(t, index, &failure, error);
    if (!num) return LOOM_OK; /* it stays late */
    /* The least of them: so few are easily disturbed, and what is dropped is gone. */
    trial->ms = ms[0];
    for (int32_t i = 1; i < num; i++) trial->ms = ms[i] < trial->ms ? ms[i] : trial->ms;
    trial->num_launches = num;
    trial->state = LOOM__TRIAL_TIMED;
    LOOM_TRY(t->context, trust_best(t, error));
    const loom__trial *best = t->result->best < 0 ? NULL : &t->result->trials[t->result->best];
    loom_status status = LOOM_OK;
    if (best && trial->state == LOOM__TRIAL_TIMED)
        status = trial->ms > HOPELESS * best->ms
                     ? settle(t, index, LOOM__TRIAL_STOPPED, "%.2f times the best at first look",
                              trial->ms / best->ms)
                     : settle(t, index, LOOM__TRIAL_TIMED, "%s", "");
    return status ? loom__fail_memory(error) : LOOM_OK;
}

/* Compiles candidates, as many at a time as there are processors, and looks at each. On the host, where
 * compiles and launches would share the processors, all are compiled first. */
static loom_status look_at_all(tuner *t, loom_error *error) {
    loom__tuning *r = t->result;
    int32_t at_once = loom__num_processors(), ahead = 0, running = 0;
    bool on_host = t->desc.device == LOOM_DEVICE_HOST;
    if (at_once > MAX_AT_ONCE) at_once = MAX_AT_ONCE;
    for (int32_t i = 0; i < r->num_trials && !is_over(t); i++) {
        if (r->trials[i].state == LOOM__TRIAL_PRUNED) continue;
        for (; ahead < r->num_trials && running < at_once; ahead++) {
            if (r->trials[ahead].state == LOOM__TRIAL_PRUNED) continue;
            start(t, ahead);
            running++;
        }
        loom_status status = wait_for(t, &t->runs[i]);
        running--;
        if (status == LOOM_NOT_FOUND) break; /* the time is over */
        if (status)
            LOOM_TRY(t->context, fail_trial(t, i, &t->runs[i].failure, error));
        else if (!on_host)
            LOOM_TRY(t->context, look_first(t, i, error));
    }
    for (int32_t i = 0; on_host && i < r->num_trials && !is_over(t); i++) {
        if (t->runs[i].plan) LOOM_TRY(t->context, look_first(t, i, error));
    }
    return LOOM_OK;
}

/* -- Rounds ---------------------------------------------------------------------------------------------- */

static int32_t count_alive(const tuner *t) {
    int32_t num = 0;
    for (int32_t i = 0; i < t->result->num_trials; i++)
        num += t->result->trials[i].state == LOOM__TRIAL_TIMED;
    return num;
}

/* A turn of one candidate. Its first look does not count any more: the clock may have been another. */
static loom_status take_turn(tuner *t, int32_t index, loom_error *error) {
    run *own = &t->runs[index];
    loom__trial *trial = &t->result->trials[index];
    loom_error failure = LOOM_ERROR_INIT;
    double sorted[NUM_ROUNDS * ROUND_LAUNCHES];
    if (launch(t, own->plan, &failure) ||
        time_launches(t, own->plan, ROUND_LAUNCHES, own->ms + own->num_ms, &failure))
        return fail_trial(t, index, &failure, error);
    own->num_ms += ROUND_LAUNCHES;
    memcpy(sorted, own->ms, (size_t)own->num_ms * sizeof *sorted);
    trial->ms = loom__median(sorted, own->num_ms);
    trial->num_launches = own->num_ms;
    return LOOM_OK;
}

static loom_status drop_slow(tuner *t, loom_error *error) {
    LOOM_TRY(t->context, trust_best(t, error));
    if (t->result->best < 0) return LOOM_OK;
    double best = t->result->trials[t->result->best].ms;
    for (int32_t i = 0; i < t->result->num_trials; i++) {
        const loom__trial *trial = &t->result->trials[i];
        if (trial->state != LOOM__TRIAL_TIMED || trial->ms <= BEHIND * best) continue;
        if (settle(t, i, LOOM__TRIAL_STOPPED, "%.2f times the best after %d launches", trial->ms / best,
                   trial->num_launches))
            return loom__fail_memory(error);
    }
    return LOOM_OK;
}

static loom_status run_rounds(tuner *t, loom_error *error) {
    loom__tuning *r = t->result;
    for (int32_t round = 1; round <= NUM_ROUNDS && !is_over(t); round++) {
        /* A round that is begun is ended, so that times are of as many launches. */
        for (int32_t i = 0; i < r->num_trials; i++) {
            if (r->trials[i].state == LOOM__TRIAL_TIMED) LOOM_TRY(t->context, take_turn(t, i, error));
        }
        find_best(t);
        tell(t);
        if (round < ROUNDS_BEFORE_DROP) continue;
        LOOM_TRY(t->context, drop_slow(t, error));
        if (count_alive(t) <= 1) break;
    }
    return LOOM_OK;
}

/* -- The winner ------------------------------------------------------------------------------------------ */

/* The fastest becomes wisdom, in the place of what was known if that had its turn, which was the first. */
static loom_status keep_winner(tuner *t, loom_error *error) {
    loom__tuning *r = t->result;
    loom_error failure = LOOM_ERROR_INIT;
    const char *tried = r->trials[0].state != LOOM__TRIAL_LATE ? t->known : NULL;
    LOOM_TRY(t->context, trust_best(t, error));
    if (r->best < 0) return LOOM_OK;
    const loom__trial *winner = &r->trials[r->best];
    r->entry.schedule = winner->schedule;
    double ns = winner->ms * 1e6 * loom__shape_class_share(&t->desc.hint);
    r->entry.ns = ns < 1 ? 1 : (int64_t)ns;
    loom_status status = loom__wisdom_learn(t->context, &r->entry, tried, &failure);
    if (status == LOOM_MEMORY) return loom__fail_memory(error);
    if (status) loom__cache_warn(t->context, "does not keep wisdom, it stays in memory: %s", failure.text);
    return LOOM_OK;
}

/* -- Tuning ---------------------------------------------------------------------------------------------- */

/* A thread that captures a stream must not tune; the driver tells of captures of streams that wait for the
 * default one. What other threads capture from now on is no matter: memory and launches are set apart. */
static loom_status refuse_capture(tuner *t, loom_error *error) {
    enum { CAPTURE_IMPLICIT = 906 };
    const loom__driver_api *driver = t->context->driver;
    int capturing = 0;
    if (!driver->stream_capturing) return LOOM_OK;
    int result = driver->stream_capturing(NULL, &capturing);
    if (result == CAPTURE_IMPLICIT || (!result && capturing))
        return loom__fail(
            error, LOOM_INVALID, "desc.rigor",
            "a stream of the device is being captured: schedules cannot be timed before that ends");
    return loom__driver_check(driver, result, "cuStreamIsCapturing", error);
}

/* Problem, device and class, and what the problem has for the reference. */
static loom_status describe(tuner *t, const loom__device **device, loom_error *error) {
    loom__survey survey;
    loom__wisdom_entry *entry = &t->result->entry;
    char digest[33];
    LOOM_TRY(t->context, loom__plan_survey(t->context, &t->desc, t->arena, &survey, error));
    if (t->desc.device != LOOM_DEVICE_HOST)
        LOOM_TRY(t->context, loom__device_open(t->context, t->desc.device, device, error));
    LOOM_TRY(t->context, loom__wisdom_device(t->context, *device, t->arena, entry, error));
    LOOM_TRY(t->context, loom__generator_digest(t->context, digest, error));
    LOOM_TRY(t->context, loom__reference_create(survey.problem, &t->facts, error));
    if (t->pass == LOOM_BACKWARD && !t->facts->backward)
        return loom__fail(error, LOOM_INVALID, "pass",
                          "the problem has no backward pass: it lacks the word "
                          "'backward'");
    entry->generator = loom__arena_copy(t->arena, digest, strlen(digest));
    entry->problem = survey.problem;
    entry->target = survey.target;
    entry->pass = t->pass;
    entry->class = loom__shape_class_of(&t->desc.hint);
    return entry->generator ? LOOM_OK : loom__fail_memory(error);
}

static loom_status tune(tuner *t, loom_error *error) {
    const loom__device *device = NULL;
    loom_status status = describe(t, &device, error);
    if (!status && device) status = loom__device_enter(t->context, device, error);
    if (!status && device) {
        status = refuse_capture(t, error);
        loom__device_leave(t->context);
    }
    if (!status) status = list_trials(t, error);
    if (!status && t->options->only_unknown && is_known(t)) goto out;
    if (!status) status = loom__device_memory_open(t->context, t->desc.device, &t->memory, error);
    if (!status) status = loom__device_memory_set_apart(t->memory, error);
    if (!status) status = make_sets(t, device, error);
    if (!status) status = look_at_all(t, error);
    if (!status) status = run_rounds(t, error);
    if (!status) status = keep_winner(t, error);
out:
    for (int32_t i = 0; t->runs && i < t->result->num_trials; i++) loom_plan_destroy(t->runs[i].plan);
    loom__device_memory_close(t->memory);
    loom__reference_destroy(t->facts);
    return status;
}

loom_status loom__tune(loom_context *context, const loom_plan_desc *desc, loom_pass pass,
                       const loom__tune_options *options, loom__arena *arena, loom__tuning *tuning,
                       loom_error *error) {
    tuner *t = calloc(1, sizeof *t);
    if (!t) return loom__fail_memory(error);
    *tuning = (loom__tuning){.pass = pass, .best = -1, .shape = loom__shape_typical(&desc->hint)};
    t->context = context;
    t->desc = *desc;
    t->desc.rigor = LOOM_ESTIMATE;
    t->desc.flags = LOOM_ASYNC;
    t->desc.hint = tuning->shape;
    t->pass = pass;
    t->options = options;
    t->arena = arena;
    t->result = tuning;
    pthread_mutex_lock(&context->tuning);
    t->deadline = loom__now() + options->seconds;
    loom_status status = tune(t, error);
    pthread_mutex_unlock(&context->tuning);
    free(t);
    return status;
}
