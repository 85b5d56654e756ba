/* packs_only.c - in place of generator.c, compile.c, certify.c and tune.c in a library without Lua and
 * without compilers (CMake option ATTNLOOM_RUNTIME_ONLY): plans come from the records of the context's packs,
 * or not at all.
 *
 * Called by plan.c and context.c. A problem is known by its text as the manifest has it or by its canonical
 * text, and schedules likewise. Of several records that fit a plan, target hopper comes before mma, then the
 * hint that is asked for, then none.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "certify.h"
#include "compile.h"
#include "embedded.h"
#include "generator.h"
#include "pack.h"
#include "record.h"
#include "tune.h"

/* -- Records --------------------------------------------------------------------------------------------- */

/* Whether a record begins with this problem, written or canonical. */
static bool has_problem(const char *record, const char *problem) {
    static const char WRITTEN[] = "written ", CANONICAL[] = "\nproblem ";
    if (strncmp(record, WRITTEN, strlen(WRITTEN))) return false;
    size_t length = strlen(problem), bytes = strtoul(record + strlen(WRITTEN), NULL, 10);
    const char *written = strchr(record, '\n');
    if (!written || strlen(++written) <= bytes) return false;
    if (bytes == length && memcmp(written, problem, length) == 0) return true;
    const char *canonical = written + bytes;
    if (strncmp(canonical, CANONICAL, strlen(CANONICAL))) return false;
    canonical += strlen(CANONICAL);
    return strncmp(canonical, problem, length) == 0 && canonical[length] == '\n';
}

static loom_status read_record(loom_context *context, const char *text, loom__arena *arena,
                               loom__record *record, loom_error *error) {
    char *copy = loom__arena_copy(arena, text, strlen(text));
    if (!copy) return loom__fail_memory(error);
    LOOM_TRY(context, loom__record_read(arena, copy, record, error));
    return LOOM_OK;
}

static loom_status fail_without(loom_error *error) {
    return loom__fail(
        error, LOOM_COMPILE, "library",
        "this library was built with ATTNLOOM_RUNTIME_ONLY: it has neither generator nor compilers");
}

/* The problem is in the line alone, and comes last, as it may be long. */
static loom_status fail_missing(const char *what, const loom__request *request, loom__arena *arena,
                                loom_error *error) {
    if (strcmp(request->arch, "host") == 0) return fail_without(error);
    const char *line = loom__manifest_line(arena, request, request->problem, request->target, request->arch);
    if (!line) return loom__fail_memory(error);
    return loom__fail(error, LOOM_NOT_FOUND, "desc.problem",
                      "no pack of the context has %s for %s%s%s%s%.200s, and this library takes kernels from "
                      "packs alone; this entry of a manifest has it built by `attnloom pack`:\n    %s",
                      what, request->arch, request->target ? ", target " : "",
                      request->target ? request->target : "", request->schedule ? ", schedule " : "",
                      request->schedule ? request->schedule : "", line);
}

static loom_status find_problem(loom_context *context, const char *problem, loom__arena *arena,
                                loom__problem_info *info, loom_error *error) {
    for (const loom__pack *pack = context->packs; pack; pack = pack->next) {
        for (int32_t i = 0; i < pack->num_plans; i++) {
            loom__record record;
            if (!has_problem(pack->plans[i], problem)) continue;
            LOOM_TRY(context, read_record(context, pack->plans[i], arena, &record, error));
            *info = record.info;
            return LOOM_OK;
        }
    }
    return loom__fail(error, LOOM_NOT_FOUND, "problem",
                      "no pack of the context has this problem, and this library takes kernels from packs "
                      "alone; its text must be that of the manifest, or canonical:\n    %s",
                      problem);
}

loom_status loom__problem_query(loom_context *context, const char *problem, loom__arena *arena,
                                loom__problem_info *info, loom_error *error) {
    loom__context_lock(context);
    loom_status status = find_problem(context, problem, arena, info, error);
    loom__context_unlock(context);
    return status;
}

/* -- Plans ----------------------------------------------------------------------------------------------- */

/* The names that gen/arch.lua knows an arch by: "80" of sm_80, and "90a" too of sm_90. */
static bool is_arch(const char *name, const char *arch) {
    if (strcmp(name, arch) == 0) return true;
    if (strncmp(name, "sm_", 3) == 0) name += 3;
    if (strcmp(name, "90a") == 0) name = "90";
    return strncmp(arch, "sm_", 3) == 0 && strcmp(name, arch + 3) == 0;
}

/* Whether a choice is the one that is wanted, by its own text or as it was written; NULL: any is. */
static bool fits(const char *wanted, const char *held, const char *written) {
    return !wanted || strcmp(wanted, held) == 0 || strcmp(wanted, written) == 0;
}

/* How well a record serves a request; 0: not at all. */
static int fitness(const loom__request *request, const loom__record *record) {
    static const loom_shape NO_HINT;
    const loom__generated *g = &record->generated;
    bool hopper = strcmp(g->target, "hopper") == 0, on_device = request->smem_bytes > 0;
    if (!is_arch(request->arch, g->arch) || !fits(request->target, g->target, g->target) ||
        !fits(request->schedule, g->schedule, record->schedule) ||
        !fits(request->schedule_backward, g->schedule_backward, record->schedule_backward) ||
        (hopper && on_device && !request->tensor_maps))
        return 0;
    bool same_hint = memcmp(&request->hint, &record->hint, sizeof request->hint) == 0;
    bool no_hint = memcmp(&NO_HINT, &record->hint, sizeof NO_HINT) == 0;
    return 1 + 4 * hopper + (same_hint ? 2 : no_hint);
}

loom_status loom__generator_plan(loom_context *context, const loom__request *request, loom__arena *arena,
                                 loom__generated *generated, loom_error *error) { /* the lock is held */
    int best = 0;
    bool known = false;
    *generated = (loom__generated){.reference = -2};
    for (const loom__pack *pack = context->packs; pack; pack = pack->next) {
        for (int32_t i = 0; i < pack->num_plans; i++) {
            loom__record record;
            if (!has_problem(pack->plans[i], request->problem)) continue;
            known = true;
            LOOM_TRY(context, read_record(context, pack->plans[i], arena, &record, error));
            int fit = fitness(request, &record);
            if (fit > best) *generated = record.generated;
            if (fit > best) best = fit;
        }
    }
    if (best) return LOOM_OK;
    return fail_missing(known ? "the problem"
                              : "this problem, whose text must be that of the manifest or canonical,",
                        request, arena, error);
}

void loom__generator_release(loom_context *context, loom__generated *generated) {
    (void)context, (void)generated;
}

/* That of the packs: all of a context are of one. */
loom_status loom__generator_digest(loom_context *context, char digest[33], loom_error *error) {
    (void)error;
    loom__context_lock(context);
    snprintf(digest, 33, "%s", context->packs ? context->packs->generator : "");
    loom__context_unlock(context);
    return LOOM_OK;
}

loom_status loom__generator_grammar(loom_context *context, int32_t *grammar, loom_error *error) {
    (void)error;
    loom__context_lock(context);
    *grammar = context->packs ? context->packs->grammar : 0;
    loom__context_unlock(context);
    return LOOM_OK;
}

void loom__generator_destroy(loom_context *context) { (void)context; }

/* Schedules are those of packs. */
const loom__file loom__wisdom_files[] = {{0}};
const int loom__num_wisdom_files = 0;

/* -- What is not here ------------------------------------------------------------------------------------ */

loom_status loom__generator_source(loom_context *context, const loom__generated *generated, int32_t index,
                                   loom__arena *arena, const char **source, loom_error *error) {
    (void)context, (void)generated, (void)index, (void)arena, (void)source;
    return fail_without(error);
}

loom_status loom__nvrtc_find(loom_context *context, const loom__toolchain **toolchain, loom_error *error) {
    (void)context, (void)toolchain;
    return fail_without(error);
}

loom_status loom__cc_find(loom_context *context, const loom__toolchain **toolchain, loom_error *error) {
    (void)context, (void)toolchain;
    return fail_without(error);
}

loom_status loom__nvrtc_load(loom_context *context, loom_error *error) {
    (void)context;
    return fail_without(error);
}

loom_status loom__compile_cuda(const loom_context *context, const char *label, const char *source,
                               const char *arch, loom__arena *arena, loom__compiled *compiled,
                               loom_error *error) {
    (void)context, (void)label, (void)source, (void)arch, (void)arena, (void)compiled;
    return fail_without(error);
}

loom_status loom__compile_host(const loom_context *context, const char *label, const char *source,
                               loom__arena *arena, loom__compiled *compiled, loom_error *error) {
    (void)context, (void)label, (void)source, (void)arena, (void)compiled;
    return fail_without(error);
}

loom_status loom__generator_candidates(loom_context *context, const loom__request *request, loom_pass pass,
                                       loom__arena *arena, const loom__candidate **list, int32_t *num,
                                       loom_error *error) {
    (void)context, (void)request, (void)pass, (void)arena, (void)list, (void)num;
    return fail_without(error);
}

/* Never asked: kernels of packs are there at once, and nothing stands in for them. */
loom_status loom__certify(loom_context *context, loom_plan *plan, int32_t device, loom_error *error) {
    (void)context, (void)plan, (void)device;
    return fail_without(error);
}

loom_status loom__tune(loom_context *context, const loom_plan_desc *desc, loom_pass pass,
                       const loom__tune_options *options, loom__arena *arena, loom__tuning *tuning,
                       loom_error *error) {
    (void)context, (void)desc, (void)pass, (void)options, (void)arena, (void)tuning;
    return fail_without(error);
}
