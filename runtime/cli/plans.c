/* plans.c - lists of plans, of the schedules of a problem or of a manifest, and making them several at a
 * time. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <string.h>

#include "cli.h"
#include "threads.h"

enum { MAX_AT_ONCE = 16 };

/* -- Lists ---------------------------------------------------------------------------------------------- */

static loom_status new_list(loom__arena *arena, int32_t capacity, loom__cli_plans *list, loom_error *error) {
    *list = (loom__cli_plans){.descs = loom__arena_alloc(arena, (size_t)capacity * sizeof *list->descs),
                              .names = loom__arena_alloc(arena, (size_t)capacity * sizeof *list->names)};
    return list->descs && list->names ? LOOM_OK : loom__fail_memory(error);
}

loom_status loom__cli_list_schedules(loom_context *context, const loom_plan_desc *desc, const char *arch,
                                     loom_pass pass, int32_t most, loom__arena *arena, loom__cli_plans *list,
                                     const loom__candidate **schedules, loom_error *error) {
    loom__request request = {.problem = desc->problem,
                             .target = desc->target,
                             .arch = arch,
                             .alignment = desc->alignment,
                             .hint = desc->hint};
    int32_t num = 0;
    LOOM_TRY(context, loom__generator_candidates(context, &request, pass, arena, schedules, &num, error));
    if (num > most) num = most;
    LOOM_TRY(context, new_list(arena, num, list, error));
    for (; list->num < num; list->num++) {
        const char *schedule = (*schedules)[list->num].text;
        loom_plan_desc *own = &list->descs[list->num];
        *own = *desc;
        *(pass == LOOM_BACKWARD ? &own->schedule_backward : &own->schedule) = schedule;
        list->names[list->num] = loom__arena_print(arena, "schedule \"%s\"", schedule);
        if (!list->names[list->num]) return loom__fail_memory(error);
    }
    return LOOM_OK;
}

loom_status loom__cli_list_manifest(loom_context *context, const char *path, const char *archs,
                                    loom__arena *arena, loom__cli_plans *list, loom_error *error) {
    const char *text = NULL;
    size_t num_bytes = 0;
    loom__manifest manifest;
    LOOM_TRY(context, loom__read_file(arena, path, &text, &num_bytes, error));
    if (strlen(text) != num_bytes)
        return loom__fail(error, LOOM_INVALID, "manifest", "%s is no text: it has a byte 0", path);
    LOOM_TRY(context, loom__generator_manifest(context, text, path, archs, arena, &manifest, error));
    LOOM_TRY(context, new_list(arena, manifest.num, list, error));
    for (int32_t i = 0; i < manifest.num; i++) {
        const loom__manifest_entry *entry = &manifest.entries[i];
        if (!entry->arch) {
            loom__cli_say("%s: \"%s\": left out, it is for other archs than %s", entry->place, entry->problem,
                          archs);
            continue;
        }
        loom_plan_desc *desc = &list->descs[list->num];
        *desc = (loom_plan_desc)LOOM_PLAN_DESC_INIT;
        desc->problem = entry->problem;
        desc->target = entry->target;
        desc->arch = entry->arch;
        desc->device = LOOM_DEVICE_NONE;
        desc->schedule = entry->schedule;
        desc->schedule_backward = entry->schedule_backward;
        desc->hint = entry->hint;
        const char *name =
            loom__arena_print(arena, "%s: \"%s\" for %s", entry->place, entry->problem, entry->arch);
        if (!name) return loom__fail_memory(error);
        list->names[list->num++] = name;
    }
    if (list->num) return LOOM_OK;
    return loom__fail(error, LOOM_INVALID, "manifest", "%s: no entry is for any of the archs %s", path,
                      archs);
}

/* -- Making them ---------------------------------------------------------------------------------------- */

/* A plan on its way. */
typedef struct making {
    loom_plan *plan;
    loom_status status;
    loom_error error;
} making;

static void start(loom_context *context, const loom__cli_plans *list, int32_t index, making *m) {
    loom_plan_desc desc = list->descs[index];
    desc.flags |= LOOM_ASYNC;
    *m = (making){.error = LOOM_ERROR_INIT};
    m->status = loom_plan_create(context, &desc, &m->plan, &m->error);
}

/* Waits for a plan and hands it over. */
static loom_status finish(const loom__cli_plans *list, int32_t index, making *m, loom__cli_use_plan use,
                          void *user, bool *fine, loom_error *error) {
    if (!m->status) m->status = loom_plan_wait(m->plan, INFINITY, &m->error);
    loom_plan *plan = m->plan;
    m->plan = NULL;
    if (!m->status) return use(user, index, plan, error);
    loom_plan_destroy(plan);
    /* What is wrong with one plan alone does not keep the others. */
    bool alone = m->status == LOOM_COMPILE || m->status == LOOM_UNSUPPORTED || m->status == LOOM_INVALID;
    if (!alone || strcmp(m->error.field, "nvrtc") == 0)
        return loom__fail(error, m->status, m->error.field, "%s", m->error.text);
    loom__cli_say("%s: %s: %s", list->names[index], m->error.field, m->error.text);
    *fine = false;
    return LOOM_OK;
}

loom_status loom__cli_make_plans(loom_context *context, const loom__cli_plans *list, loom__cli_use_plan use,
                                 void *user, bool *fine, loom_error *error) {
    making window[MAX_AT_ONCE] = {{.plan = NULL}};
    int32_t at_once = loom__num_processors();
    loom_status status = LOOM_OK;
    if (at_once > MAX_AT_ONCE) at_once = MAX_AT_ONCE;
    loom__cli_progress *progress = loom__cli_progress_start("compiling");
    for (int32_t i = 0; i < list->num + at_once && !status; i++) {
        making *m = &window[i % at_once];
        int32_t done = i - at_once;
        if (done >= 0) {
            status = finish(list, done, m, use, user, fine, error);
            loom__cli_progress_step(progress, done + 1, list->num, list->names[done]);
        }
        if (i < list->num && !status) start(context, list, i, m);
    }
    for (int32_t i = 0; i < at_once; i++) loom_plan_destroy(window[i].plan);
    loom__cli_progress_stop(progress);
    return status;
}
