/* stand_in.c - finds or compiles a stand-in, and exchanges it for the plan's own kernels. See stand_in.h.
 *
 * All through the functions of attnloom.h: a stand-in is a plan made with LOOM_NO_COMPILE of what the keys of
 * packs and of the cache say is there. Keys are read without the kernels; of several choices the one that the
 * generator's model takes for the cheapest comes first.
 */
#define _GNU_SOURCE
#include "stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "certify.h"
#include "pack.h"

/* -- What is there --------------------------------------------------------------------------------------- */

/* Plans that are tried: each takes about a millisecond, and kernels of one come and go together. */
enum { MOST_TRIES = 16 };

/* A schedule of a pass of which there are kernels. */
typedef struct choice {
    const char *problem, *target, *schedule;
    int32_t rank; /* by the model, 0 the cheapest */
} choice;

typedef struct choice_list {
    choice *items;
    int32_t num, capacity;
} choice_list;

typedef struct search {
    loom_context *context;
    const loom_plan_desc *desc;
    const char *problem; /* canonical */
    const char *arch;    /* of the device */
    char generator[33];
    loom__arena *arena;
    choice_list passes[2]; /* by loom_pass */
    bool out_of_memory;
} search;

static bool take_word(const char *text, size_t *length, const char *word) {
    size_t bytes = strlen(word);
    bool found = *length > bytes && strncmp(text + *length - bytes, word, bytes) == 0;
    if (found) *length -= bytes;
    return found;
}

/* Whether kernels of one canonical problem compute all of another's: these words come last in it. */
static bool covers(const char *wider, const char *problem) {
    size_t lengths[2] = {strlen(wider), strlen(problem)};
    bool deterministic[2] = {take_word(wider, &lengths[0], " deterministic"),
                             take_word(problem, &lengths[1], " deterministic")};
    bool backward[2] = {take_word(wider, &lengths[0], " backward"),
                        take_word(problem, &lengths[1], " backward")};
    return lengths[0] == lengths[1] && strncmp(wider, problem, lengths[0]) == 0 &&
           backward[0] >= backward[1] && deterministic[0] >= deterministic[1];
}

static bool has_backward(const char *problem) {
    size_t length = strlen(problem);
    take_word(problem, &length, " deterministic");
    return take_word(problem, &length, " backward");
}

/* A value of a key, in the arena; NULL: the key has none. */
static const char *value_of(search *s, const char *key, const char *name) {
    size_t length = 0;
    const char *value = loom__key_value(key, name, &length);
    if (!value) return NULL;
    const char *copy = loom__arena_copy(s->arena, value, length);
    s->out_of_memory |= !copy;
    return copy;
}

/* Whether code for an arch may run on the device; a plan of it says whether it does. */
static bool may_run(const char *arch, const char *device) {
    size_t common = strlen("sm_8"); /* up to the major, of sm_80 as of sm_100 */
    return strcmp(arch, device) == 0 ||
           (strncmp(device, "sm_", 3) == 0 && strncmp(arch, device, common) == 0);
}

static bool knows(const choice_list *list, const choice *wanted) {
    for (int32_t i = 0; i < list->num; i++) {
        const choice *c = &list->items[i];
        if (!strcmp(c->problem, wanted->problem) && !strcmp(c->target, wanted->target) &&
            !strcmp(c->schedule, wanted->schedule))
            return true;
    }
    return false;
}

static void add_choice(search *s, choice_list *list, const choice *added) {
    if (list->num == list->capacity) {
        int32_t capacity = list->capacity ? 2 * list->capacity : 32;
        choice *larger = loom__arena_alloc(s->arena, (size_t)capacity * sizeof *larger);
        s->out_of_memory |= !larger;
        if (!larger) return;
        if (list->num) memcpy(larger, list->items, (size_t)list->num * sizeof *larger);
        list->items = larger;
        list->capacity = capacity;
    }
    list->items[list->num++] = *added;
}

/* Notes what a kernel is of, if it is of this library's generator, of the problem and for the device. */
static void add_key(search *s, const char *key) {
    size_t length = 0;
    const char *digest = loom__key_value(key, "generator", &length);
    if (!digest || length != strlen(s->generator) || strncmp(digest, s->generator, length)) return;
    const choice added = {.problem = value_of(s, key, "problem"),
                          .target = value_of(s, key, "target"),
                          .schedule = value_of(s, key, "schedule")};
    const char *arch = value_of(s, key, "arch"), *kernel = value_of(s, key, "kernel");
    if (!added.problem || !added.target || !added.schedule || !arch || !kernel) return;
    if (!covers(added.problem, s->problem) || !may_run(arch, s->arch)) return;
    choice_list *list = &s->passes[strncmp(kernel, "backward", strlen("backward")) == 0];
    if (!knows(list, &added)) add_choice(s, list, &added);
}

static loom_status look_around(search *s, const loom__problem_info *info, loom_error *error) {
    const char *const *keys = NULL;
    int32_t num_keys = 0;
    char part[64];
    snprintf(part, sizeof part, "-%s-d%d-%d-", info->dtype, info->d, info->dv);
    loom__context_lock(s->context);
    for (const loom__pack *pack = s->context->packs; pack; pack = pack->next) {
        for (int32_t i = 0; i < pack->num_kernels; i++) add_key(s, pack->kernels[i].key);
    }
    loom__context_unlock(s->context);
    LOOM_TRY(s->context, loom__cache_keys(s->context, part, s->arena, &keys, &num_keys, error));
    for (int32_t i = 0; i < num_keys; i++) add_key(s, keys[i]);
    return s->out_of_memory ? loom__fail_memory(error) : LOOM_OK;
}

/* -- The order of choices -------------------------------------------------------------------------------- */

static int compare_choices(const void *a, const void *b) {
    const choice *x = a, *y = b;
    if (x->rank != y->rank) return (x->rank > y->rank) - (x->rank < y->rank);
    int order = strcmp(x->target, y->target);
    if (!order) order = strcmp(x->schedule, y->schedule);
    return order ? order : strcmp(x->problem, y->problem);
}

/* What the model does not list comes last: it does not fit the device, and a plan of it will say so. */
static void rank_choices(search *s, loom_pass pass) {
    choice_list *list = &s->passes[pass];
    for (int32_t i = 0; i < list->num; i++) list->items[i].rank = INT32_MAX;
    for (int32_t t = 0; t < LOOM__NUM_TARGETS; t++) {
        const char *target = loom__target_names[t];
        const loom__candidate *candidates = NULL;
        int32_t num = 0;
        const loom__request request = {.problem = list->num ? list->items[0].problem : s->problem,
                                       .target = target,
                                       .arch = s->arch,
                                       .alignment = s->desc->alignment,
                                       .hint = s->desc->hint};
        bool is_there = false;
        for (int32_t i = 0; i < list->num; i++) is_there |= strcmp(list->items[i].target, target) == 0;
        if (!is_there || loom__generator_candidates(s->context, &request, pass, s->arena, &candidates, &num,
                                                    NULL) != LOOM_OK)
            continue;
        for (int32_t i = 0; i < list->num; i++) {
            choice *c = &list->items[i];
            for (int32_t rank = 0; rank < num && !strcmp(c->target, target); rank++) {
                if (strcmp(candidates[rank].text, c->schedule)) continue;
                c->rank = rank;
                break;
            }
        }
    }
    if (list->num) qsort(list->items, (size_t)list->num, sizeof *list->items, compare_choices);
}

/* -- Finding --------------------------------------------------------------------------------------------- */

/* The plan of two choices, from what is there alone; NULL: something is missing or does not run here. */
static loom_plan *try_choices(const search *s, const choice *forward, const choice *backward) {
    loom_plan_desc desc = *s->desc;
    loom_plan *plan = NULL;
    desc.problem = forward->problem;
    desc.target = forward->target;
    desc.schedule = forward->schedule;
    desc.schedule_backward = backward ? backward->schedule : NULL;
    desc.rigor = LOOM_ESTIMATE;
    desc.flags = LOOM_NO_COMPILE;
    return loom_plan_create(s->context, &desc, &plan, NULL) == LOOM_OK ? plan : NULL;
}

static loom_plan *try_all(const search *s) {
    const choice_list *first = &s->passes[LOOM_FORWARD], *second = &s->passes[LOOM_BACKWARD];
    int32_t num_tries = 0;
    for (int32_t i = 0; i < first->num; i++) {
        const choice *forward = &first->items[i];
        bool alone = !has_backward(forward->problem);
        for (int32_t k = 0; k < (alone ? 1 : second->num) && num_tries < MOST_TRIES; k++) {
            const choice *backward = alone ? NULL : &second->items[k];
            if (backward &&
                (strcmp(backward->problem, forward->problem) || strcmp(backward->target, forward->target)))
                continue;
            loom_plan *plan = try_choices(s, forward, backward);
            if (plan) return plan;
            num_tries++;
        }
    }
    return NULL;
}

/* A stand-in of kernels that are there; *found NULL: there is none. */
static loom_status find(loom_context *context, const loom_plan_desc *desc, const char *problem,
                        loom_plan **found, loom_error *error) {
    loom__arena arena = {&context->memory, NULL};
    loom__problem_info info;
    const loom__device *device = NULL;
    search s = {.context = context, .desc = desc, .problem = problem, .arch = "host", .arena = &arena};
    loom_status status = LOOM_OK;
    if (desc->device != LOOM_DEVICE_HOST) {
        LOOM_TRY_OUT(context, loom__device_open(context, desc->device, &device, error));
        s.arch = device->arch;
    }
    LOOM_TRY_OUT(context, loom__problem_query(context, problem, &arena, &info, error));
    LOOM_TRY_OUT(context, loom__generator_digest(context, s.generator, error));
    LOOM_TRY_OUT(context, look_around(&s, &info, error));
    for (loom_pass pass = LOOM_FORWARD; pass <= LOOM_BACKWARD; pass++) rank_choices(&s, pass);
    *found = try_all(&s);
out:
    loom__arena_free(&arena);
    return status;
}

/* -- Compiling ------------------------------------------------------------------------------------------- */

static bool is_among(const char *key, const loom__survey *survey) {
    for (int32_t i = 0; i < survey->num_kernels; i++) {
        if (strcmp(survey->keys[i], key) == 0) return true;
    }
    return false;
}

/* Compiles the default schedules of target mma. *made NULL: that is no less than to compile the plan's own,
 * or no way to come by a plan; then the own one shall say what is wrong. */
static loom_status compile(loom_context *context, const loom_plan_desc *desc, const loom__survey *own,
                           loom__arena *arena, loom_plan **made, loom_error *error) {
    loom_plan_desc plain = *desc;
    loom__survey survey;
    loom_error failure = LOOM_ERROR_INIT;
    plain.target = desc->device == LOOM_DEVICE_HOST ? "host" : "mma";
    plain.schedule = plain.schedule_backward = NULL;
    plain.rigor = LOOM_ESTIMATE;
    plain.flags = 0;
    loom_status status = loom__plan_survey(context, &plain, arena, &survey, &failure);
    bool is_less = false;
    for (int32_t i = 0; status == LOOM_OK && i < own->num_kernels; i++)
        is_less |= !own->found[i] && !is_among(own->keys[i], &survey);
    if (status == LOOM_OK && is_less) status = loom_plan_create(context, &plain, made, &failure);
    if (status == LOOM_OK) return LOOM_OK;
    if (status == LOOM_MEMORY) return loom__fail_memory(error);
    loom__log(context, LOOM__LOG_COMPILE, "stand-in of target mma: %s: %s", failure.field, failure.text);
    return LOOM_OK;
}

/* -- Making ---------------------------------------------------------------------------------------------- */

static const char *origin_of(const loom_plan *plan) {
    const loom_kernel *first = &plan->kernels[0].facts;
    return *first->pack ? first->pack : first->cached ? "the cache" : "the compiler, at once";
}

/* The stand-in answers what it is for: the problem that was asked for, whose launches it takes, and why. */
static loom_status introduce(loom_plan *stand_in, const loom_plan *own, loom_error *error) {
    bool backward = own->backward;
    const char *const *mine = stand_in->texts, *const *its = own->texts;
    const char *why = loom__arena_print(
        &stand_in->arena,
        "A stand-in serves until loom_plan_upgrade: target %s schedule %s%s%s, from %s.\n"
        "The plan's own: target %s schedule %s%s%s.\n%s",
        mine[LOOM_TEXT_TARGET], mine[LOOM_TEXT_SCHEDULE], backward ? " / " : "",
        backward ? mine[LOOM_TEXT_SCHEDULE_BACKWARD] : "", origin_of(stand_in), its[LOOM_TEXT_TARGET],
        its[LOOM_TEXT_SCHEDULE], backward ? " / " : "", its[LOOM_TEXT_SCHEDULE_BACKWARD], its[LOOM_TEXT_WHY]);
    if (!why) return loom__fail_memory(error);
    stand_in->texts[LOOM_TEXT_PROBLEM] = its[LOOM_TEXT_PROBLEM];
    stand_in->texts[LOOM_TEXT_WHY] = why;
    if (!backward) stand_in->texts[LOOM_TEXT_SCHEDULE_BACKWARD] = "";
    stand_in->backward = backward;
    return LOOM_OK;
}

/* Takes over the stand-in, also where it fails. */
static loom_status join(loom_context *context, const loom_plan_desc *desc, loom_plan *stand_in,
                        loom_plan **plan, loom_error *error) {
    loom_plan_desc desc_of_own = *desc;
    loom_status status = LOOM_OK;
    loom_plan *made = context->memory.resize(context->memory.user, NULL, sizeof *made);
    if (!made) {
        loom_plan_destroy(stand_in);
        return loom__fail_memory(error);
    }
    memset(made, 0, sizeof *made);
    made->context = context;
    made->arena.memory = &context->memory;
    made->stand_in = stand_in;
    made->ordinal = desc->device;
    atomic_init(&made->serving, stand_in);
    if (pthread_mutex_init(&made->upgrading, NULL)) {
        loom_plan_destroy(stand_in);
        context->memory.resize(context->memory.user, made, 0);
        return loom__fail_memory(error);
    }
    desc_of_own.flags = LOOM_ASYNC;
    LOOM_TRY_OUT(context, loom_plan_create(context, &desc_of_own, &made->own, error));
    LOOM_TRY_OUT(context, introduce(stand_in, made->own, error));
    loom__log(context, LOOM__LOG_COMPILE, "stand-in problem=\"%s\" target=%s schedule=\"%s\" from=\"%s\"",
              stand_in->texts[LOOM_TEXT_PROBLEM], stand_in->texts[LOOM_TEXT_TARGET],
              stand_in->texts[LOOM_TEXT_SCHEDULE], origin_of(stand_in));
out:
    if (status == LOOM_OK)
        *plan = made;
    else
        loom_plan_destroy(made);
    return status;
}

loom_status loom__stand_in_create(loom_context *context, const loom_plan_desc *desc, loom_plan **plan,
                                  loom_error *error) {
    loom__arena arena = {&context->memory, NULL};
    loom__survey own;
    loom_plan_desc at_once = *desc;
    loom_plan *stand_in = NULL;
    at_once.flags = 0;
    loom_status status = loom__plan_survey(context, &at_once, &arena, &own, NULL);
    bool is_there = status == LOOM_OK;
    for (int32_t i = 0; is_there && i < own.num_kernels; i++) is_there = own.found[i];
    if (status == LOOM_OK && !is_there) {
        status = find(context, desc, own.problem, &stand_in, error);
        if (status == LOOM_OK && !stand_in) status = compile(context, desc, &own, &arena, &stand_in, error);
        if (status != LOOM_OK) goto out;
    }
    status = stand_in ? join(context, desc, stand_in, plan, error)
                      : loom_plan_create(context, &at_once, plan, error);
out:
    loom__arena_free(&arena);
    return status;
}

void loom__stand_in_destroy(loom_plan *plan) {
    if (!plan->stand_in) return;
    loom_plan_destroy(plan->own);
    loom_plan_destroy(plan->stand_in);
    pthread_mutex_destroy(&plan->upgrading);
}

/* -- Upgrading ------------------------------------------------------------------------------------------- */

loom_status loom_plan_upgrade(loom_plan *plan, loom_error *error) {
    LOOM_TRY(NULL, loom_plan_wait(plan, 0, error));
    if (!plan->stand_in || loom__plan_serving(plan) == plan->own) return LOOM_OK;
    pthread_mutex_lock(&plan->upgrading);
    loom_status status = LOOM_OK;
    if (loom__plan_serving(plan) != plan->own) {
        status = loom__certify(plan->context, plan->own, plan->ordinal, error);
        if (status == LOOM_OK) atomic_store_explicit(&plan->serving, plan->own, memory_order_release);
    }
    pthread_mutex_unlock(&plan->upgrading);
    return status;
}
