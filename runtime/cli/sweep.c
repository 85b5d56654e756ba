/* sweep.c - plans of many schedules of one problem, for `attnloom bench|compile --schedules`. */
#include <math.h>
#include <string.h>

#include "cli.h"
#include "threads.h"

enum { MAX_AT_ONCE = 16 };

loom_status loom__cli_sweep_list(loom_context *context, const loom_plan_desc *desc, const char *arch,
                                 loom_pass pass, int32_t most, loom__arena *arena, loom__cli_sweep *sweep,
                                 loom_error *error) {
    loom__request request = {.problem = desc->problem,
                             .target = desc->target,
                             .arch = arch,
                             .alignment = desc->alignment,
                             .hint = desc->hint};
    *sweep = (loom__cli_sweep){.desc = desc, .pass = pass};
    LOOM_TRY(context,
             loom__generator_candidates(context, &request, pass, arena, &sweep->list, &sweep->num, error));
    if (sweep->num > most) sweep->num = most;
    return LOOM_OK;
}

/* A plan on its way. */
typedef struct making {
    loom_plan *plan;
    loom_status status;
    loom_error error;
} making;

static void start(loom_context *context, const loom__cli_sweep *sweep, int32_t index, making *m) {
    loom_plan_desc desc = *sweep->desc;
    *(sweep->pass == LOOM_BACKWARD ? &desc.schedule_backward : &desc.schedule) = sweep->list[index].text;
    desc.flags |= LOOM_ASYNC;
    *m = (making){.error = LOOM_ERROR_INIT};
    m->status = loom_plan_create(context, &desc, &m->plan, &m->error);
}

/* Waits for a plan and hands it over. */
static loom_status finish(const loom__cli_sweep *sweep, int32_t index, making *m, loom__cli_use_plan use,
                          void *user, bool *fine, loom_error *error) {
    if (!m->status) m->status = loom_plan_wait(m->plan, INFINITY, &m->error);
    loom_plan *plan = m->plan;
    m->plan = NULL;
    if (!m->status) return use(user, index, plan, error);
    loom_plan_destroy(plan);
    if (m->status != LOOM_COMPILE && m->status != LOOM_UNSUPPORTED)
        return loom__fail(error, m->status, m->error.field, "%s", m->error.text);
    loom__cli_say("schedule \"%s\": %s: %s", sweep->list[index].text, m->error.field, m->error.text);
    *fine = false;
    return LOOM_OK;
}

loom_status loom__cli_sweep_plans(loom_context *context, const loom__cli_sweep *sweep, loom__cli_use_plan use,
                                  void *user, bool *fine, loom_error *error) {
    making window[MAX_AT_ONCE] = {{.plan = NULL}};
    int32_t at_once = loom__num_processors();
    loom_status status = LOOM_OK;
    if (at_once > MAX_AT_ONCE) at_once = MAX_AT_ONCE;
    loom__cli_progress *progress = loom__cli_progress_start("compiling");
    for (int32_t i = 0; i < sweep->num + at_once && !status; i++) {
        making *m = &window[i % at_once];
        int32_t done = i - at_once;
        if (done >= 0) {
            status = finish(sweep, done, m, use, user, fine, error);
            loom__cli_progress_step(progress, done + 1, sweep->num, sweep->list[done].text);
        }
        if (i < sweep->num && !status) start(context, sweep, i, m);
    }
    for (int32_t i = 0; i < at_once; i++) loom_plan_destroy(window[i].plan);
    loom__cli_progress_stop(progress);
    return status;
}
