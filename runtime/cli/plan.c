/* plan.c - `attnloom plan`: the kernels of a manifest into the cache of this machine, or what that would
 * take. */
#include "../plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* Of a processor, to compile a kernel. NVRTC 13.0 took 0.35 s for the mean of 240 kernels of d = 64 to 192,
 * forward and backward, and does not fill all processors. */
static const double KERNEL_SECONDS = 0.5;

typedef struct values {
    const char *archs;
    bool dry_run;
} values;

static const loom__cli_option OPTIONS[] = {
    {"--dry-run", NULL, LOOM__CLI_FLAG, offsetof(values, dry_run),
     "compile nothing: say what is missing, and about how long it takes"},
    {"--arch", "LIST", LOOM__CLI_TEXT, offsetof(values, archs),
     "GPU architectures, with commas: sm_80,sm_90a (default: that of device 0)"},
};

static const loom__cli_command COMMAND = {
    .name = "plan",
    .operands = "MANIFEST",
    .min_operands = 1,
    .max_operands = 1,
    .text = "Compiles what the cache lacks of the kernels of a manifest (`attnloom pack --help` says what "
            "that is), so that "
            "programs here find them. Prints one line a problem and arch: its kernels, how many are cached, "
            "and how "
            "many were missing, then the sum, in which kernels of several problems count once.\n"
            "With --dry-run it only looks, and tells about how many seconds the missing ones would take.",
    .examples = "  attnloom plan kernels.lua --dry-run\n"
                "  attnloom plan kernels.lua --arch sm_80\n",
    .options = OPTIONS,
    .num_options = sizeof OPTIONS / sizeof OPTIONS[0],
};

/* A kernel of some plan, which other plans may have too. */
typedef struct counted {
    const char *key;
    bool cached;
} counted;

/* Over the plans of a manifest. */
typedef struct sums {
    const loom__cli_plans *list;
    loom__arena *arena;
    counted *kernels;
    int32_t num_kernels, capacity;
} sums;

static loom_status count_kernel(sums *s, const char *key, bool cached, loom_error *error) {
    if (s->num_kernels == s->capacity) {
        int32_t capacity = s->capacity ? 2 * s->capacity : 64;
        counted *larger = loom__arena_alloc(s->arena, (size_t)capacity * sizeof *larger);
        if (!larger) return loom__fail_memory(error);
        if (s->num_kernels) memcpy(larger, s->kernels, (size_t)s->num_kernels * sizeof *larger);
        s->kernels = larger;
        s->capacity = capacity;
    }
    s->kernels[s->num_kernels++] =
        (counted){.key = loom__arena_copy(s->arena, key, strlen(key)), .cached = cached};
    return s->kernels[s->num_kernels - 1].key ? LOOM_OK : loom__fail_memory(error);
}

/* By key, and first what was missing: the plans after that found it. */
static int by_key(const void *a, const void *b) {
    const counted *x = a, *y = b;
    int order = strcmp(x->key, y->key);
    return order ? order : x->cached - y->cached;
}

/* Each kernel once. */
static void count_all(sums *s, int32_t *num_kernels, int32_t *num_missing) {
    *num_kernels = *num_missing = 0;
    if (s->num_kernels) qsort(s->kernels, (size_t)s->num_kernels, sizeof *s->kernels, by_key);
    for (int32_t i = 0; i < s->num_kernels; i++) {
        if (i && strcmp(s->kernels[i].key, s->kernels[i - 1].key) == 0) continue;
        *num_kernels += 1;
        *num_missing += !s->kernels[i].cached;
    }
}

static void print_row(const char *problem, const char *target, const char *arch, int32_t num_kernels,
                      int32_t num_cached) {
    printf("problem \"%s\" target %s arch %s kernels %d cached %d missing %d\n", problem, target, arch,
           num_kernels, num_cached, num_kernels - num_cached);
}

static loom_status use_plan(void *user, int32_t index, loom_plan *plan, loom_error *error) {
    int32_t num_kernels = loom_plan_num_kernels(plan), num_cached = 0;
    loom_status status = LOOM_OK;
    (void)index;
    for (int32_t i = 0; i < num_kernels && !status; i++) {
        loom_kernel kernel = LOOM_KERNEL_INIT;
        status = loom_plan_kernel(plan, i, &kernel, error);
        if (!status) status = count_kernel(user, kernel.key, kernel.cached, error);
        num_cached += kernel.cached;
    }
    if (!status)
        print_row(loom_plan_text(plan, LOOM_TEXT_PROBLEM), loom_plan_text(plan, LOOM_TEXT_TARGET),
                  loom_plan_text(plan, LOOM_TEXT_ARCH), num_kernels, num_cached);
    loom_plan_destroy(plan);
    return status;
}

static loom_status look(loom_context *context, sums *s, bool *fine, loom__arena *arena, loom_error *error) {
    for (int32_t i = 0; i < s->list->num; i++) {
        loom__survey survey;
        loom_status status = loom__plan_survey(context, &s->list->descs[i], arena, &survey, error);
        if (status == LOOM_INVALID || status == LOOM_UNSUPPORTED) {
            loom__cli_say("%s: %s: %s", s->list->names[i], error->field, error->text);
            *fine = false;
            continue;
        }
        LOOM_TRY(context, status);
        int32_t num_found = 0;
        for (int32_t k = 0; k < survey.num_kernels; k++) {
            LOOM_TRY(context, count_kernel(s, survey.keys[k], survey.found[k], error));
            num_found += survey.found[k];
        }
        print_row(survey.problem, survey.target, survey.arch, survey.num_kernels, num_found);
    }
    return LOOM_OK;
}

static loom_status plan(const values *v, loom_context *context, const char *manifest, bool *fine,
                        loom__arena *arena, loom_error *error) {
    const loom__device *device = NULL;
    loom__cli_plans list;
    sums s = {.list = &list, .arena = arena};
    int32_t num_kernels, num_missing;
    if (!v->archs && loom__device_open(context, 0, &device, error) != LOOM_OK) {
        char reason[512];
        snprintf(reason, sizeof reason, "%.500s", error->text);
        return loom__fail(error, LOOM_DRIVER, "device",
                          "there is no GPU whose arch to plan for, give --arch: %s", reason);
    }
    const char *archs = v->archs ? v->archs : device->arch;
    LOOM_TRY(context, loom__cli_list_manifest(context, manifest, archs, arena, &list, error));
    if (v->dry_run)
        LOOM_TRY(context, look(context, &s, fine, arena, error));
    else
        LOOM_TRY(context, loom__cli_make_plans(context, &list, use_plan, &s, fine, error));
    count_all(&s, &num_kernels, &num_missing);
    printf("kernels %d cached %d missing %d", num_kernels, num_kernels - num_missing, num_missing);
    if (v->dry_run) printf(" seconds %.0f", ceil(KERNEL_SECONDS * num_missing / loom__num_processors()));
    printf("\n");
    return LOOM_OK;
}

int loom__cli_plan(int argc, char **argv) {
    values v = {NULL, false};
    const char *manifest = NULL;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    bool fine = true;
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, &v, &manifest);
    if (exit_status >= 0) return exit_status;
    loom_status status = loom_context_create(NULL, &context, &error);
    if (status) return loom__cli_fail(&error);
    loom__arena arena = {&context->memory, NULL};
    status = plan(&v, context, manifest, &fine, &arena, &error);
    loom__arena_free(&arena);
    loom_context_destroy(context);
    if (status) return loom__cli_fail(&error);
    return fine ? LOOM__CLI_FINE : LOOM__CLI_FAILED;
}
