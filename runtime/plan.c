/* plan.c - the slow path: from a problem text to loaded kernels.
 *
 *     wisdom -> generator -> argument tables -> each kernel, in parallel: pack, else cache, else compile ->
 * load
 *
 * Called through attnloom.h. Up to the tables the context's lock is held (describe); what follows (construct)
 * runs without it, on a thread of the plan with LOOM_ASYNC, and takes it for each visit to Lua. Plans compile
 * side by side, each with as many threads as it has missing kernels; what one plan compiles others wait for
 * (claims). Fails with the status of the step that failed; nothing stays behind.
 */
#define _GNU_SOURCE
#include "plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cache.h"
#include "compile.h"
#include "pack.h"
#include "record.h"
#include "stand_in.h"
#include "tune.h"
#include "wisdom.h"

static loom_status forward(const loom_error *failure, loom_error *error) {
    if (error && error->size >= sizeof *error) *error = *failure;
    return failure->status;
}

/* -- Checking the description ---------------------------------------------------------------------------- */

enum { MAX_ALIGNMENT = 4096 };

static loom_status check_desc(loom_context *context, const loom_plan_desc *desc, loom_plan **plan,
                              loom_error *error) {
    if (!plan) return loom__fail(error, LOOM_INVALID, "plan", "the place for the plan is NULL");
    *plan = NULL;
    if (!context) return loom__fail(error, LOOM_INVALID, "context", "context is NULL");
    if (!desc) return loom__fail(error, LOOM_INVALID, "desc", "desc is NULL");
    LOOM_TRY(context, loom__check_size(desc, desc->size, sizeof *desc, "desc.size", error));
    if (!desc->problem) return loom__fail(error, LOOM_INVALID, "desc.problem", "the problem text is NULL");
    if (desc->device < LOOM_DEVICE_NONE) {
        return loom__fail(
            error, LOOM_INVALID, "desc.device",
            "device is %d, it must be an ordinal from 0, LOOM_DEVICE_HOST (-1) or LOOM_DEVICE_NONE (-2)",
            desc->device);
    }
    if (desc->rigor != LOOM_ESTIMATE && desc->rigor != LOOM_MEASURE && desc->rigor != LOOM_WISDOM_ONLY) {
        return loom__fail(error, LOOM_INVALID, "desc.rigor", "rigor is %d, which is no loom_rigor",
                          desc->rigor);
    }
    if (desc->rigor != LOOM_ESTIMATE && desc->device == LOOM_DEVICE_NONE) {
        return loom__fail(
            error, LOOM_INVALID, "desc.rigor",
            "rigor %s needs a device, on which schedules are measured, and device is LOOM_DEVICE_NONE",
            desc->rigor == LOOM_MEASURE ? "LOOM_MEASURE" : "LOOM_WISDOM_ONLY");
    }
    if (!(desc->measure_seconds >= 0)) {
        return loom__fail(error, LOOM_INVALID, "desc.measure_seconds",
                          "measure_seconds is %g, it must be 0 or more", desc->measure_seconds);
    }
    if (desc->flags & ~(uint32_t)(LOOM_NO_COMPILE | LOOM_ASYNC | LOOM_STAND_IN)) {
        return loom__fail(
            error, LOOM_INVALID, "desc.flags",
            "flags are 0x%x, known are LOOM_NO_COMPILE (0x1), LOOM_ASYNC (0x2) and LOOM_STAND_IN (0x4)",
            desc->flags);
    }
    if (desc->rigor == LOOM_MEASURE && desc->flags) {
        return loom__fail(
            error, LOOM_INVALID, "desc.flags",
            "flags are 0x%x, but LOOM_MEASURE compiles and times before it answers: it takes neither "
            "LOOM_NO_COMPILE nor LOOM_ASYNC",
            desc->flags);
    }
    if (desc->flags & LOOM_STAND_IN && desc->flags != (LOOM_ASYNC | LOOM_STAND_IN)) {
        return loom__fail(error, LOOM_INVALID, "desc.flags",
                          "flags are 0x%x, but LOOM_STAND_IN (0x4) is for what LOOM_ASYNC (0x2) compiles: it "
                          "needs that flag, and not LOOM_NO_COMPILE",
                          desc->flags);
    }
    if (desc->flags & LOOM_STAND_IN && desc->device == LOOM_DEVICE_NONE) {
        return loom__fail(error, LOOM_INVALID, "desc.flags",
                          "LOOM_STAND_IN (0x4) is for launches, and device is LOOM_DEVICE_NONE");
    }
    int32_t alignment = desc->alignment;
    if (alignment < 0 || alignment > MAX_ALIGNMENT || (alignment & (alignment - 1))) {
        return loom__fail(error, LOOM_INVALID, "desc.alignment",
                          "alignment is %d, it must be 0 or a power of two up to %d", alignment,
                          MAX_ALIGNMENT);
    }
    const loom_shape *hint = &desc->hint;
    if (hint->batch < 0 || hint->heads_q < 0 || hint->heads_kv < 0 || hint->seq_q < 0 || hint->seq_k < 0) {
        return loom__fail(error, LOOM_INVALID, "desc.hint", "the hint has a negative size; 0 means unknown");
    }
    return LOOM_OK;
}

/* What the generator is asked, and the device to load on. */
static loom_status make_request(loom_context *context, const loom_plan_desc *desc, loom__request *request,
                                const loom__device **device, loom_error *error) {
    bool host_target = desc->target && strcmp(desc->target, "host") == 0;
    *device = NULL;
    if (desc->arch && desc->device != LOOM_DEVICE_NONE) {
        return loom__fail(
            error, LOOM_INVALID, "desc.arch",
            "arch is %s, but device is %d, which has its own: leave arch NULL, or take LOOM_DEVICE_NONE",
            desc->arch, desc->device);
    }
    *request = (loom__request){.problem = desc->problem,
                               .target = desc->target,
                               .schedule = desc->schedule ? desc->schedule : context->schedule,
                               .schedule_backward = desc->schedule_backward ? desc->schedule_backward
                                                                            : context->schedule_backward,
                               .alignment = desc->alignment,
                               .hint = desc->hint};
    if (desc->device == LOOM_DEVICE_HOST) {
        if (desc->target && !host_target) {
            return loom__fail(error, LOOM_INVALID, "desc.target",
                              "target '%s' needs a GPU; LOOM_DEVICE_HOST takes target host", desc->target);
        }
        request->target = request->arch = "host";
    } else if (desc->device == LOOM_DEVICE_NONE) {
        if (!desc->arch && !host_target) {
            return loom__fail(error, LOOM_INVALID, "desc.arch",
                              "LOOM_DEVICE_NONE needs an arch, for example sm_90");
        }
        request->arch = host_target ? "host" : desc->arch;
    } else {
        if (host_target) {
            return loom__fail(error, LOOM_INVALID, "desc.target",
                              "target host runs on LOOM_DEVICE_HOST, not on device %d", desc->device);
        }
        LOOM_TRY(context, loom__device_open(context, desc->device, device, error));
        request->arch = (*device)->arch;
        request->smem_bytes = (*device)->smem_bytes;
        request->num_sms = (*device)->num_sms;
        request->tensor_maps = context->driver->map_encode != NULL;
    }
    return LOOM_OK;
}

/* -- Words of the generator ------------------------------------------------------------------------------ */

static const char *const TENSOR_NAMES[LOOM__NUM_TENSORS] = {"q",    "k",    "v",  "o",  "lse",
                                                            "dout", "dlse", "dq", "dk", "dv"};

static const struct {
    const char *name;
    int32_t value;
} WORDS[] = {{"1", LOOM__VALUE_ONE},           {"batch", LOOM__VALUE_BATCH},
             {"heads_q", LOOM__VALUE_HEADS_Q}, {"heads_kv", LOOM__VALUE_HEADS_KV},
             {"group", LOOM__VALUE_GROUP},     {"seq_q", LOOM__VALUE_SEQ_Q},
             {"seq_k", LOOM__VALUE_SEQ_K},     {"q_start", LOOM__VALUE_Q_START},
             {"k_start", LOOM__VALUE_K_START}, {"scale", LOOM__VALUE_SCALE}};

static int32_t find_word(const char *name) {
    for (size_t i = 0; i < sizeof WORDS / sizeof WORDS[0]; i++) {
        if (strcmp(WORDS[i].name, name) == 0) return WORDS[i].value;
    }
    return -1;
}

static int32_t find_tensor(const char *name, size_t length) {
    for (int32_t i = 0; i < LOOM__NUM_TENSORS; i++) {
        if (strlen(TENSOR_NAMES[i]) == length && strncmp(TENSOR_NAMES[i], name, length) == 0) return i;
    }
    return -1;
}

/* Index of the value behind a `source` of gen/abi.lua, -1 if there is no such. */
static int32_t find_value(const loom_plan *plan, const loom__plan_pass *pass, const char *source) {
    static const char *const AXES[] = {".data", ".stride.batch", ".stride.seq", ".stride.head"};
    int32_t word = find_word(source);
    if (word >= 0) return word;
    if (strncmp(source, "workspace.", 10) == 0) {
        for (int32_t i = 0; i < pass->num_regions; i++) {
            if (strcmp(pass->regions[i].place, source + 10) == 0) return LOOM__VALUE_REGIONS + i;
        }
        return -1;
    }
    if (strncmp(source, "param.", 6) == 0) {
        char *rest;
        long slot = strtol(source + 6, &rest, 10), axis;
        if (rest == source + 6 || slot < 0 || slot >= plan->num_params) return -1;
        int32_t first = LOOM__VALUE_PARAMS + (int32_t)slot * LOOM__PARAM_VALUES;
        if (strcmp(rest, ".data") == 0) return first;
        if (strcmp(rest, ".scalar") == 0) return first + 1;
        if (strncmp(rest, ".stride.", 8)) return -1;
        axis = strtol(rest + 8, &rest, 10);
        return *rest || axis < 0 || axis >= LOOM__PARAM_DIMS ? -1 : first + 2 + (int32_t)axis;
    }
    size_t length = strcspn(source, ".");
    int32_t tensor = find_tensor(source, length);
    for (int32_t i = 0; tensor >= 0 && i < 4; i++) {
        if (strcmp(source + length, AXES[i]) == 0) return LOOM__VALUE_TENSORS + 4 * tensor + i;
    }
    return -1;
}

static loom_status bad_descriptor(const loom__kernel_text *text, const char *what, const char *value,
                                  loom_error *error) {
    return loom__fail(error, LOOM_INTERNAL, "generator", "kernel %s: the runtime does not know %s '%s'",
                      text->name, what, value);
}

/* -- Resolving what the generator said ------------------------------------------------------------------- */

static loom_status read_dim(const char *text, loom__dim *dim, const char *owner, loom_error *error) {
    char word[32];
    long long divisor;
    char *end;
    *dim = (loom__dim){.value = -1, .divisor = 1};
    dim->constant = strtoll(text, &end, 10);
    if (end != text && !*end && dim->constant >= 0 && dim->constant <= INT32_MAX) return LOOM_OK;
    if (sscanf(text, "ceil(%31[a-z_]/%lld)", word, &divisor) == 2 && divisor > 0 && divisor <= INT32_MAX) {
        dim->value = find_word(word);
        dim->divisor = divisor;
    } else {
        dim->value = find_word(text);
    }
    if (dim->value >= 0) return LOOM_OK;
    return loom__fail(error, LOOM_INTERNAL, "generator", "%s: the runtime does not know the dimension '%s'",
                      owner, text);
}

static loom_status read_params(loom_plan *plan, const loom__problem_info *info, loom_error *error) {
    static const struct {
        const char *name;
        int32_t bytes;
        loom__scalar scalar;
    } TYPES[] = {{"i32", 4, LOOM__SCALAR_I32}, {"f32", 4, LOOM__SCALAR_F32},  {"i64", 8, LOOM__SCALAR_I32},
                 {"u8", 1, LOOM__SCALAR_I32},  {"bool", 1, LOOM__SCALAR_I32}, {"f16", 2, LOOM__SCALAR_F32},
                 {"bf16", 2, LOOM__SCALAR_F32}};
    if (info->num_params > LOOM__MAX_PLAN_PARAMS) {
        return loom__fail(error, LOOM_UNSUPPORTED, "problem.params",
                          "the problem has %d params, at most %d are supported", info->num_params,
                          LOOM__MAX_PLAN_PARAMS);
    }
    plan->num_params = info->num_params;
    for (int32_t i = 0; i < info->num_params; i++) {
        const loom__param_info *from = &info->params[i];
        loom__plan_param *param = &plan->params[i];
        param->name = from->name;
        param->num_dims = from->num_dims;
        for (size_t t = 0; t < sizeof TYPES / sizeof TYPES[0]; t++) {
            if (strcmp(TYPES[t].name, from->dtype)) continue;
            param->element_bytes = TYPES[t].bytes;
            param->scalar = from->num_dims ? LOOM__SCALAR_NONE : TYPES[t].scalar;
        }
        if (!param->element_bytes) {
            return loom__fail(error, LOOM_INTERNAL, "generator",
                              "param %s: the runtime does not know the type '%s'", from->name, from->dtype);
        }
        for (int32_t axis = 0; axis < from->num_dims; axis++) {
            LOOM_TRY(plan->context, read_dim(from->dims[axis], &param->dims[axis], from->name, error));
        }
    }
    return LOOM_OK;
}

/* Regions of a pass, of all its kernels: the workspace does not depend on which of them run. Those of one
 * place are alike, but for how much they take of each of the dims. */
static loom_status read_regions(loom__plan_pass *pass, const loom__kernel_text *text, loom_error *error) {
    for (int32_t i = 0; i < text->num_regions; i++) {
        const loom__region_text *from = &text->regions[i];
        int32_t at = 0;
        while (at < pass->num_regions && strcmp(pass->regions[at].place, from->place)) at++;
        if (at == LOOM__MAX_REGIONS || from->bytes < 0)
            return bad_descriptor(text, "workspace region", from->place, error);
        loom__region *region = &pass->regions[at];
        if (at == pass->num_regions) {
            pass->num_regions++;
            *region =
                (loom__region){.place = from->place, .num_dims = from->num_dims, .prepared = from->prepared};
            for (int32_t axis = 0; axis < from->num_dims; axis++)
                LOOM_TRY(NULL, read_dim(from->dims[axis], &region->dims[axis], from->place, error));
        }
        if (from->bytes > region->bytes) region->bytes = from->bytes;
    }
    return LOOM_OK;
}

/* Index of a map among those of the variant, to which it is added; -1 if it cannot be. */
static int32_t add_map(loom__plan_variant *variant, const loom__arg_text *text) {
    enum { MAX_BOX = 256 }; /* of the TMA unit, in each direction */
    size_t length = strcspn(text->source, ".");
    int32_t tensor = strcmp(text->source + length, ".map") ? -1 : find_tensor(text->source, length);
    if (tensor < 0 || tensor == LOOM__LSE || tensor == LOOM__DLSE) return -1;
    if (text->box_rows < 1 || text->box_rows > MAX_BOX || text->box_chunks < 1 ||
        text->box_chunks > MAX_BOX || text->offset % LOOM__MAP_ALIGNMENT)
        return -1;
    for (int32_t i = 0; i < variant->num_maps; i++) {
        const loom__plan_map *map = &variant->maps[i];
        if (map->tensor == tensor && map->box_rows == text->box_rows && map->box_chunks == text->box_chunks) return i;
    }
    if (variant->num_maps == LOOM__MAX_MAPS) return -1;
    variant->maps[variant->num_maps] = (loom__plan_map){(uint16_t)tensor, (uint16_t)text->box_rows,
                                                           (uint16_t)text->box_chunks};
    return variant->num_maps++;
}

static loom__plan_variant *variant_of(loom__plan_pass *pass, int32_t kernel) {
    loom__plan_variant *variant = pass->variants;
    while (kernel < variant->first || kernel >= variant->first + variant->count) variant++;
    return variant;
}

static loom_status read_rows(loom_plan *plan, loom__plan_pass *pass, const loom__kernel_text *text,
                             loom__plan_kernel *kernel, loom_error *error) {
    if (text->args_bytes < 0 || text->args_bytes > LOOM__MAX_ARGS_BYTES) {
        return loom__fail(error, LOOM_UNSUPPORTED, "problem.params",
                          "kernel %s takes %d bytes of arguments, at most %d are supported: use fewer params",
                          text->name, text->args_bytes, LOOM__MAX_ARGS_BYTES);
    }
    loom__arg_row *rows = loom__arena_alloc(&plan->arena, (size_t)text->num_rows * sizeof *rows);
    loom__plan_variant *variant = variant_of(pass, (int32_t)(kernel - plan->kernels));
    if (!rows) return loom__fail_memory(error);
    for (int32_t i = 0; i < text->num_rows; i++) {
        const loom__arg_text *from = &text->rows[i];
        bool map = strcmp(from->type, "map") == 0;
        bool wide = strcmp(from->type, "ptr") == 0 || strcmp(from->type, "i64") == 0;
        if (!map && !wide && strcmp(from->type, "i32") && strcmp(from->type, "u32") &&
            strcmp(from->type, "f32")) {
            return bad_descriptor(text, "argument type", from->type, error);
        }
        int32_t value = map ? add_map(variant, from) : find_value(plan, pass, from->source);
        int32_t bytes = map ? LOOM__MAP_BYTES : wide ? 8 : 4;
        if (value < 0) return bad_descriptor(text, "argument source", from->source, error);
        if (kernel->prepares && !map && value >= LOOM__VALUE_REGIONS && value < LOOM__VALUE_PARAMS)
            variant->prepares |= 1u << (value - LOOM__VALUE_REGIONS);
        if (from->offset < 0 || from->offset > text->args_bytes - bytes) {
            return bad_descriptor(text, "argument outside its struct:", from->source, error);
        }
        rows[i] = (loom__arg_row){(uint16_t)from->offset, (uint16_t)bytes, (uint16_t)value};
    }
    kernel->rows = rows;
    kernel->num_rows = text->num_rows;
    kernel->args_bytes = text->args_bytes;
    return LOOM_OK;
}

/* Bytes of which every address and stride of the variant's tensors is a multiple; 0: there is no such
 * variant. */
static int32_t alignment_of(const char *variant) {
    static const struct {
        const char *name;
        int32_t alignment;
    } VARIANTS[] = {{"tma", 16}, {"aligned", 16}, {"any", 1}};
    for (size_t i = 0; i < sizeof VARIANTS / sizeof VARIANTS[0]; i++) {
        if (strcmp(VARIANTS[i].name, variant) == 0) return VARIANTS[i].alignment;
    }
    return 0;
}

static loom_status read_kernel(loom_plan *plan, const loom__kernel_text *text, int32_t index,
                               loom_error *error) {
    loom__plan_kernel *kernel = &plan->kernels[index];
    loom_pass which = strcmp(text->pass, "backward") == 0 ? LOOM_BACKWARD : LOOM_FORWARD;
    loom__plan_pass *pass = &plan->passes[which];
    kernel->prepares = text->prepares;
    kernel->overlaps = text->overlaps;
    kernel->grid_batch = find_word(text->grid_batch);
    kernel->grid_heads = find_word(text->grid_heads);
    kernel->grid_seq = find_word(text->grid_seq);
    kernel->grid_rows = text->grid_rows;
    if (kernel->grid_batch < 0) return bad_descriptor(text, "grid batch", text->grid_batch, error);
    if (kernel->grid_heads < 0) return bad_descriptor(text, "grid heads", text->grid_heads, error);
    kernel->grid_persistent = text->grid_persistent;
    kernel->arch = text->arch ? text->arch : plan->texts[LOOM_TEXT_ARCH];
    if (kernel->grid_seq < 0 || text->grid_rows <= 0 || text->grid_persistent < 0)
        return bad_descriptor(text, "grid seq", text->grid_seq, error);
    for (int32_t i = 0; i < text->num_needs; i++) {
        int32_t tensor = find_tensor(text->needs[i], strlen(text->needs[i]));
        if (tensor < 0) return bad_descriptor(text, "needed output", text->needs[i], error);
        kernel->needs |= 1u << tensor;
    }
    kernel->facts = (loom_kernel){.size = sizeof(loom_kernel),
                                  .name = text->name,
                                  .variant = text->variant,
                                  .symbol = text->symbol,
                                  .smem_bytes = text->smem_bytes,
                                  .threads = text->threads};
    int32_t alignment = alignment_of(text->variant);
    if (!alignment) return bad_descriptor(text, "variant", text->variant, error);
    int32_t last = pass->num_variants - 1;
    if (last < 0 || strcmp(plan->kernels[pass->variants[last].first].facts.variant, text->variant)) {
        if (++last == LOOM__MAX_VARIANTS)
            return bad_descriptor(text, "so many variants as", text->variant, error);
        pass->num_variants = last + 1;
        pass->variants[last].alignment = alignment;
        pass->variants[last].first = index;
    }
    if (pass->variants[last].first + pass->variants[last].count != index) {
        return bad_descriptor(text, "an order of kernels with", text->variant, error);
    }
    if (++pass->variants[last].count > LOOM__MAX_PASS_KERNELS)
        return bad_descriptor(text, "more kernels a pass than", text->pass, error);
    return LOOM_OK;
}

static loom_status resolve(loom_plan *plan, const loom__generated *generated, loom_error *error) {
    plan->kernels = loom__arena_alloc(&plan->arena, (size_t)generated->num_kernels * sizeof *plan->kernels);
    if (!plan->kernels) return loom__fail_memory(error);
    plan->num_kernels = generated->num_kernels;
    for (int32_t i = 0; i < generated->num_kernels; i++) plan->kernels[i].host_module.fd = -1;
    for (int32_t i = 0; i < generated->num_kernels; i++) {
        const loom__kernel_text *text = &generated->kernels[i];
        LOOM_TRY(plan->context, read_kernel(plan, text, i, error));
        LOOM_TRY(plan->context,
                 read_regions(&plan->passes[strcmp(text->pass, "backward") == 0], text, error));
    }
    for (int32_t i = 0; i < generated->num_kernels; i++) {
        const loom__kernel_text *text = &generated->kernels[i];
        LOOM_TRY(plan->context, read_rows(plan, &plan->passes[strcmp(text->pass, "backward") == 0], text,
                                          &plan->kernels[i], error));
    }
    return LOOM_OK;
}

/* -- Compiling ------------------------------------------------------------------------------------------- */

/* One kernel on its way from text to binary. */
typedef struct build {
    int32_t index; /* in the plan */
    const char *slug, *label, *source;
    const char *key;        /* up to the compiler until that is known */
    const loom__pack *pack; /* that has it, NULL: none */
    loom__entry entry;
    int process_claim; /* of the cache, -1: none */
    bool hit; /* found in a pack or the cache and, unless status says why not, loaded */
    /* Of the thread that works on it: */
    loom__arena arena;
    loom__compiled compiled;
    loom_status status;
    loom_error error;
} build;

typedef struct build_list {
    loom_plan *plan;
    void (*work)(struct build_list *list, build *b);
    build **jobs;
    int32_t num_jobs;
    atomic_int next;
} build_list;

static void *take_jobs(void *argument) {
    build_list *list = argument;
    for (;;) {
        int at = atomic_fetch_add(&list->next, 1);
        if (at >= list->num_jobs) return NULL;
        list->work(list, list->jobs[at]);
    }
}

/* Works on all jobs with at most `wanted` threads, the caller's among them. */
static void run_jobs(build_list *list, int32_t wanted) {
    enum { MAX_WORKERS = 16 };
    pthread_t threads[MAX_WORKERS];
    int32_t num_threads = 0, processors = loom__num_processors();
    if (wanted > MAX_WORKERS) wanted = MAX_WORKERS;
    if (wanted > processors) wanted = processors;
    for (int32_t i = 0; i < list->num_jobs; i++) {
        list->jobs[i]->arena.memory = &list->plan->context->memory;
        list->jobs[i]->error = (loom_error)LOOM_ERROR_INIT;
    }
    atomic_init(&list->next, 0);
    while (num_threads + 1 < wanted && pthread_create(&threads[num_threads], NULL, take_jobs, list) == 0)
        num_threads++;
    take_jobs(list);
    for (int32_t i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    for (int32_t i = 0; i < list->num_jobs; i++) loom__arena_adopt(&list->plan->arena, &list->jobs[i]->arena);
}

static void compile_kernel(build_list *list, build *b) {
    const loom_context *context = list->plan->context;
    b->status = list->plan->host
                    ? loom__compile_host(context, b->label, b->source, &b->arena, &b->compiled, &b->error)
                    : loom__compile_cuda(context, b->label, b->source, list->plan->kernels[b->index].arch,
                                         &b->arena, &b->compiled, &b->error);
}

static int compare_builds(const void *a, const void *b) {
    const build *x = *(build *const *)a, *y = *(build *const *)b;
    size_t x_length = strlen(x->source), y_length = strlen(y->source);
    return x_length != y_length ? (x_length < y_length) - (x_length > y_length) : x->index - y->index;
}

/* Compiles all jobs; every one is tried, and the first failure in the plan's order is reported. The longest texts
 * come first: the short ones then fill the threads that are done early. */
static loom_status compile_all(build_list *list, loom_error *error) {
    const build *failed = NULL;
    list->work = compile_kernel;
    qsort(list->jobs, (size_t)list->num_jobs, sizeof *list->jobs, compare_builds);
    run_jobs(list, list->num_jobs);
    for (int32_t i = 0; i < list->num_jobs; i++) {
        const build *b = list->jobs[i];
        if (b->status != LOOM_OK && (!failed || b->index < failed->index)) failed = b;
    }
    if (!failed) return LOOM_OK;
    return forward(&failed->error, error);
}

/* Who waits for the first time shall know for what. */
static void report_compile(loom_plan *plan, int32_t num_kernels, double seconds) {
    static const double LONG_SECONDS = 0.5;
    loom_context *context = plan->context;
    if (seconds <= LONG_SECONDS) return;
    loom__context_lock(context);
    bool first = !context->compile_reported;
    context->compile_reported = true;
    loom__context_unlock(context);
    if (!first) return;
    loom__log(context, LOOM__LOG_WARNING, "compile problem=\"%s\" kernels=%d seconds=%.1f",
              plan->texts[LOOM_TEXT_PROBLEM], num_kernels, seconds);
}

static loom_status build_missing(loom_plan *plan, build **jobs, int32_t num_jobs,
                                 const loom__generated *generated, const char *compiler, loom_error *error) {
    loom_context *context = plan->context;
    build_list list = {.plan = plan, .jobs = jobs, .num_jobs = num_jobs};
    loom_status status = LOOM_OK;
    double start = loom__now();
    if (!plan->host) LOOM_TRY(context, loom__nvrtc_load(context, error));
    for (int32_t i = 0; i < num_jobs; i++) {
        LOOM_TRY(context, loom__generator_source(context, generated, jobs[i]->index, &plan->arena,
                                                 &jobs[i]->source, error));
        loom__log(context, LOOM__LOG_SOURCE, "source kernel=%s text=\n%s", jobs[i]->label, jobs[i]->source);
    }
    status = compile_all(&list, error);
    for (int32_t i = 0; i < num_jobs; i++) {
        build *b = jobs[i];
        if (b->status != LOOM_OK) continue;
        b->entry = (loom__entry){.source = b->source,
                                 .binary = b->compiled.binary,
                                 .binary_bytes = b->compiled.binary_bytes,
                                 .compiler = compiler,
                                 .certificate = "",
                                 .registers = b->compiled.registers,
                                 .spill_bytes = b->compiled.spill_bytes,
                                 .threads = plan->kernels[b->index].facts.threads,
                                 .seconds = b->compiled.seconds,
                                 .host = plan->host};
        loom__cache_store(context, b->slug, b->key, &plan->arena, &b->entry);
        loom__log(context, LOOM__LOG_COMPILE,
                  "compile kernel=%s seconds=%.3f registers=%d spill_bytes=%d entry=%s", b->label,
                  b->compiled.seconds, b->entry.registers, b->entry.spill_bytes,
                  *b->entry.path ? b->entry.path : "memory");
        if (b->compiled.log && *b->compiled.log) {
            loom__log(context, LOOM__LOG_SOURCE, "compiler kernel=%s output=\n%s", b->label, b->compiled.log);
        }
    }
    report_compile(plan, num_jobs, loom__now() - start);
    return status;
}

/* -- Loading --------------------------------------------------------------------------------------------- */

static loom_status load_kernel(loom_plan *plan, const loom__entry *entry, loom__plan_kernel *kernel,
                               loom__arena *arena, loom_error *error) {
    if (!plan->launchable) return LOOM_OK;
    if (plan->host) {
        const char *path = "";
        if (*entry->path) path = loom__arena_print(arena, "%s/kernel.so", entry->path);
        if (!path) return loom__fail_memory(error);
        return loom__host_load(plan->context, path, entry->binary, entry->binary_bytes, kernel->facts.symbol,
                               &kernel->host_module, error);
    }
    LOOM_TRY(plan->context, loom__device_enter(plan->context, plan->device, error));
    loom_status status = loom__module_load(plan->context, plan->device, entry->binary, kernel->facts.symbol,
                                           kernel->facts.smem_bytes, &kernel->module, error);
    loom__device_leave(plan->context);
    return status;
}

static void set_facts(loom__plan_kernel *kernel, const build *b, bool cached) {
    loom_kernel *facts = &kernel->facts;
    facts->source = b->entry.source;
    facts->key = b->key;
    facts->entry = b->entry.path;
    facts->compiler = b->entry.compiler;
    facts->certificate = b->entry.certificate;
    facts->binary = b->entry.binary;
    facts->binary_bytes = b->entry.binary_bytes;
    facts->pack = b->pack ? b->pack->name : "";
    facts->cached = cached;
    facts->registers = b->entry.registers;
    facts->spill_bytes = b->entry.spill_bytes;
    facts->compile_seconds = cached ? 0 : b->entry.seconds;
}

static void find_kernel(build_list *list, build *b) {
    loom_plan *plan = list->plan;
    loom__plan_kernel *kernel = &plan->kernels[b->index];
    b->hit = b->pack || loom__cache_load(plan->context, b->slug, b->key, plan->host, &b->arena, &b->entry);
    if (!b->hit) return;
    set_facts(kernel, b, true);
    b->status = load_kernel(plan, &b->entry, kernel, &b->arena, &b->error);
}

/* Finds kernels in packs and the cache and loads them. */
static void find_all(loom_plan *plan, build **jobs, int32_t num_jobs) {
    enum { KERNELS_PER_THREAD = 2 }; /* for fewer a thread costs more than it saves */
    build_list list = {.plan = plan, .work = find_kernel, .jobs = jobs, .num_jobs = num_jobs};
    run_jobs(&list, num_jobs / KERNELS_PER_THREAD);
    for (int32_t i = 0; i < num_jobs; i++)
        loom__log(plan->context, LOOM__LOG_COMPILE, "%s %s kernel=%s", jobs[i]->pack ? "pack" : "cache",
                  jobs[i]->hit ? "hit" : "miss", jobs[i]->label);
}

/* A cached kernel that does not load is as good as none: it is built anew, once. */
static loom_status load_again(loom_plan *plan, build *b, const loom__generated *generated,
                              const char *compiler, const char *reason, loom_error *error) {
    loom__cache_evict(plan->context, b->entry.path, reason);
    LOOM_TRY(plan->context, build_missing(plan, &b, 1, generated, compiler, error));
    set_facts(&plan->kernels[b->index], b, false);
    return load_kernel(plan, &b->entry, &plan->kernels[b->index], &plan->arena, error);
}

/* -- Claims: no two plans, of a context or of several processes, compile one kernel at once ---------------
 */

struct loom__claim {
    build **jobs;
    int32_t num_jobs;
    loom__claim *next;
};

static bool is_claimed(const loom_context *context, const char *key) {
    for (const loom__claim *c = context->claims; c; c = c->next) {
        for (int32_t i = 0; i < c->num_jobs; i++) {
            if (strcmp(c->jobs[i]->key, key) == 0) return true;
        }
    }
    return false;
}

/* Waits until nobody compiles any of the jobs, then claims them all: no plan holds some and waits for others.
 */
static void claim_jobs(loom_context *context, loom__claim *claim) {
    loom__context_lock(context);
    for (int32_t i = 0; i < claim->num_jobs;) {
        if (!is_claimed(context, claim->jobs[i]->key)) {
            i++;
        } else {
            pthread_cond_wait(&context->claims_changed, &context->lock);
            i = 0;
        }
    }
    claim->next = context->claims;
    context->claims = claim;
    loom__context_unlock(context);
}

static void release_claim(loom_context *context, loom__claim *claim) {
    loom__context_lock(context);
    loom__claim **at = &context->claims;
    while (*at != claim) at = &(*at)->next;
    *at = claim->next;
    pthread_cond_broadcast(&context->claims_changed);
    loom__context_unlock(context);
}

static int compare_keys(const void *a, const void *b) {
    return strcmp((*(build *const *)a)->key, (*(build *const *)b)->key);
}

/* The same among processes that share the cache. The jobs are sorted by key, so that none waits in a circle.
 * They have one limit together: who is stopped holds all of them. */
static void claim_in_cache(loom_context *context, build **jobs, int32_t num_jobs) {
    double end = loom__now() + context->claim_seconds;
    for (int32_t i = 0; i < num_jobs; i++)
        jobs[i]->process_claim = loom__cache_claim(context, jobs[i]->slug, jobs[i]->key, end);
}

static void unclaim_in_cache(loom_context *context, build **jobs, int32_t num_jobs) {
    for (int32_t i = 0; i < num_jobs; i++)
        loom__cache_unclaim(context, jobs[i]->slug, jobs[i]->key, jobs[i]->process_claim);
}

/* -- Constructing ---------------------------------------------------------------------------------------- */

struct loom__construction {
    loom_plan *plan;
    loom__problem_info info;
    loom__generated generated;
    build *builds;                    /* one a kernel */
    int32_t num_missing;              /* in packs */
    const char *obstacle;             /* why kernels of an older arch do not serve, NULL: there are none */
    const char *manifest_line;        /* that asks for the same kernels */
    loom__record asked;               /* what was asked for: problem, schedules and hint as given */
    const loom__toolchain *toolchain; /* NULL while no kernel is missing */
    bool no_compile;
    enum { NO_WISDOM, OWN_WISDOM, ALL_WISDOM } wisdom; /* that may choose schedules */
    bool by_wisdom;                                    /* that has chosen one */
    bool by_shipped;                                   /* or may have, of what the library ships */
    double start;
    /* With LOOM_ASYNC: */
    bool async, has_thread;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t finished; /* state is not COMPILING any more */
    loom_status status;
    loom_error error;
};

/* Compiles and loads what is missing, but for what another plan compiled meanwhile. */
static loom_status build_claimed(loom__construction *c, build **missing, int32_t num_missing,
                                 loom_error *error) {
    loom_plan *plan = c->plan;
    loom_context *context = plan->context;
    int32_t num_jobs = 0;
    loom_status status = LOOM_OK;
    loom__claim claim = {.jobs = missing, .num_jobs = num_missing};
    bool shared = *context->cache_dir; /* else there is nowhere to find another's kernels */
    build **jobs = loom__arena_alloc(&plan->arena, (size_t)num_missing * sizeof *jobs);
    if (!jobs) return loom__fail_memory(error);
    if (shared) {
        qsort(missing, (size_t)num_missing, sizeof *missing, compare_keys); /* before others see it */
        claim_jobs(context, &claim);
        claim_in_cache(context, missing, num_missing);
        build_list list = {.plan = plan, .work = find_kernel, .jobs = missing, .num_jobs = num_missing};
        run_jobs(&list, 1);
    }
    for (int32_t i = 0; i < num_missing; i++) {
        if (!missing[i]->hit) jobs[num_jobs++] = missing[i];
    }
    if (num_jobs) status = build_missing(plan, jobs, num_jobs, &c->generated, c->toolchain->name, error);
    if (shared) {
        unclaim_in_cache(context, missing, num_missing);
        release_claim(context, &claim);
    }
    for (int32_t i = 0; i < num_jobs && status == LOOM_OK; i++) {
        loom__plan_kernel *kernel = &plan->kernels[jobs[i]->index];
        set_facts(kernel, jobs[i], false);
        status = load_kernel(plan, &jobs[i]->entry, kernel, &plan->arena, error);
    }
    return status;
}

/* Ends the text of an error with why packs do not help. */
static loom_status explain(const loom__construction *c, loom_status status, loom_error *error) {
    if (!c->obstacle || !error || error->size < sizeof *error) return status;
    size_t length = strlen(error->text);
    snprintf(error->text + length, sizeof error->text - length, "\n%s", c->obstacle);
    return status;
}

/* What is missing, and how to come by it. `cache`: its folder, or why it cannot be asked. The problem is in
 * the line of the manifest, and comes last, as it may be long. */
static loom_status fail_missing(const loom__construction *c, const build *first, int32_t num_missing,
                                const char *cache, loom_error *error) {
    const loom_plan *plan = c->plan;
    size_t length = 0;
    const char *schedule = loom__key_value(first->key, "schedule", &length);
    loom_status status = loom__fail(
        error, LOOM_NOT_FOUND, "desc.flags",
        "%d of %d kernels are in no pack and not in the cache (%.300s), and LOOM_NO_COMPILE forbids to build "
        "them; the first is %s, schedule '%.*s', for %s, of %s:\n    %s",
        num_missing, plan->num_kernels, cache, first->label, (int)length, schedule ? schedule : "",
        plan->kernels[first->index].arch,
        plan->host ? "the problem" : "what this entry of a manifest has built by `attnloom pack`",
        plan->host ? plan->texts[LOOM_TEXT_PROBLEM] : c->manifest_line);
    return explain(c, status, error);
}

static loom_status build_kernels(loom__construction *c, loom_error *error) {
    loom_plan *plan = c->plan;
    loom_context *context = plan->context;
    const loom__generated *generated = &c->generated;
    size_t count = (size_t)generated->num_kernels;
    build **all = loom__arena_alloc(&plan->arena, count * sizeof *all);
    build **missing = loom__arena_alloc(&plan->arena, count * sizeof *missing);
    int32_t num_missing = 0;
    if (!all || !missing) return loom__fail_memory(error);
    for (int32_t i = 0; i < generated->num_kernels; i++) all[i] = &c->builds[i];
    find_all(plan, all, generated->num_kernels);
    for (int32_t i = 0; i < generated->num_kernels; i++) {
        if (!all[i]->hit) missing[num_missing++] = all[i];
    }
    if (num_missing && c->no_compile) {
        return fail_missing(c, missing[0], num_missing,
                            *context->cache_dir ? context->cache_dir : "in memory", error);
    }
    if (num_missing) LOOM_TRY(context, build_claimed(c, missing, num_missing, error));
    for (int32_t i = 0; i < generated->num_kernels; i++) {
        build *b = all[i];
        if (!b->hit || b->status == LOOM_OK) continue;
        if (b->pack)
            return loom__fail(error, b->status, "pack", "%s: %s: %s", b->pack->name, b->label, b->error.text);
        if (b->status == LOOM_UNSUPPORTED || b->status == LOOM_MEMORY || c->no_compile) {
            return forward(&b->error, error);
        }
        LOOM_TRY(context, load_again(plan, b, generated, c->toolchain->name, "it does not load", error));
    }
    return LOOM_OK;
}

/* -- Packs ----------------------------------------------------------------------------------------------- */

/* Names and keys of the kernels, and what of them packs have: nothing where they are for the host. */
static loom_status look_into_packs(loom__construction *c, loom_error *error) {
    loom_plan *plan = c->plan;
    loom__arena *arena = &plan->arena;
    const loom__problem_info *info = &c->info;
    bool host = strcmp(c->generated.target, "host") == 0;
    char digest[33];
    LOOM_TRY(plan->context, loom__generator_digest(plan->context, digest, error));
    c->builds = loom__arena_alloc(arena, (size_t)c->generated.num_kernels * sizeof *c->builds);
    c->num_missing = 0;
    if (!c->builds) return loom__fail_memory(error);
    for (int32_t i = 0; i < c->generated.num_kernels; i++) {
        const loom__kernel_text *text = &c->generated.kernels[i];
        build *b = &c->builds[i];
        b->index = i;
        b->label = loom__arena_print(arena, "%s-%s", text->name, text->variant);
        b->slug = loom__arena_print(arena, "%s-%s-d%d-%d-%s-%s", text->name, info->dtype, info->d, info->dv,
                                    text->variant, text->arch ? text->arch : c->generated.arch);
        b->key = loom__arena_print(arena, "%sgenerator %s\n", text->key, digest);
        if (!b->label || !b->slug || !b->key) return loom__fail_memory(error);
        const loom__pack_kernel *found = host ? NULL : loom__pack_find(plan->context, b->key, &b->pack);
        if (found) {
            b->key = found->key;
            b->entry = found->entry;
        } else {
            c->num_missing++;
        }
    }
    return LOOM_OK;
}

/* Number of an arch, 86 of sm_86; 0: it has none. */
static int32_t arch_number(const char *arch) {
    return strncmp(arch, "sm_", 3) ? 0 : (int32_t)strtol(arch + 3, NULL, 10);
}

/* Systems on a chip: they run no code for a desktop GPU of their major, nor does one run theirs. */
static bool is_tegra(int32_t number) {
    return number == 72 || number == 87 || number == 88 || number == 101 || number == 110;
}

/* The largest number below `limit` of an arch of packs with the same major, whose code runs on it too; 0:
 * none. */
static int32_t older_arch(const loom_context *context, int32_t limit) {
    int32_t best = 0;
    if (is_tegra(limit)) return 0;
    for (const loom__pack *pack = context->packs; pack; pack = pack->next) {
        for (const char *at = pack->archs; (at = strstr(at, "sm_")); at += 3) {
            int32_t number = arch_number(at);
            if (number < limit && number / 10 == limit / 10 && number > best && !is_tegra(number))
                best = number;
        }
    }
    return best;
}

static loom_status try_load(loom_plan *plan, const build *b, const loom__kernel_text *text,
                            loom_error *error) {
    loom_context *context = plan->context;
    loom__module module;
    LOOM_TRY(context, loom__device_enter(context, plan->device, error));
    loom_status status = loom__module_load(context, plan->device, b->entry.binary, text->symbol,
                                           text->smem_bytes, &module, error);
    loom__module_unload(context, &module);
    loom__device_leave(context);
    return status;
}

/* Whether packs have all kernels for an older arch and the device takes them; c->obstacle says where it does
 * not. */
static loom_status runs_here(loom__construction *c, const char *arch, bool *runs, loom_error *error) {
    loom_plan *plan = c->plan;
    const char *obstacle = NULL;
    int32_t smem_bytes = 0;
    *runs = false;
    if (c->num_missing) return LOOM_OK;
    for (int32_t i = 0; i < c->generated.num_kernels; i++) {
        if (c->generated.kernels[i].smem_bytes > smem_bytes) smem_bytes = c->generated.kernels[i].smem_bytes;
    }
    if (smem_bytes > plan->device->smem_bytes) {
        obstacle = loom__arena_print(
            &plan->arena, "%s has %s kernels that need %d bytes of shared memory, this device has %d",
            c->builds[0].pack->name, arch, smem_bytes, plan->device->smem_bytes);
        if (!obstacle) return loom__fail_memory(error);
    }
    for (int32_t i = 0; i < c->generated.num_kernels && !obstacle; i++) {
        loom_error failure = LOOM_ERROR_INIT;
        if (try_load(plan, &c->builds[i], &c->generated.kernels[i], &failure) == LOOM_OK) continue;
        obstacle = loom__arena_print(&plan->arena, "%s has %s kernels that do not load: %s",
                                     c->builds[i].pack->name, arch, failure.text);
        if (!obstacle) return loom__fail_memory(error);
    }
    *runs = !obstacle;
    if (!c->obstacle) c->obstacle = obstacle;
    return LOOM_OK;
}

/* Where packs lack kernels of the device's own arch but have all of an older one that run there, these are
 * taken. */
static loom_status take_older_arch(loom__construction *c, const loom__request *request, loom_error *error) {
    loom_context *context = c->plan->context;
    loom__request older = *request;
    loom__generated own = c->generated;
    build *own_builds = c->builds;
    int32_t own_missing = c->num_missing;
    char name[16];
    older.tensor_maps = false; /* code that takes them runs on its own arch alone */
    for (int32_t number = older_arch(context, arch_number(request->arch)); number;
         number = older_arch(context, number)) {
        bool runs = false;
        snprintf(name, sizeof name, "sm_%d", number);
        older.arch = name;
        loom_status status = loom__generator_plan(context, &older, &c->plan->arena, &c->generated, NULL);
        if (status == LOOM_OK) status = look_into_packs(c, NULL);
        if (status == LOOM_OK) status = runs_here(c, name, &runs, NULL);
        loom__generator_release(context, runs ? &own : &c->generated);
        if (runs) return LOOM_OK;
        c->generated = own;
        c->builds = own_builds;
        c->num_missing = own_missing;
        if (status == LOOM_MEMORY) return loom__fail_memory(error);
    }
    return LOOM_OK;
}

/* The rest of the keys of what is to be looked for in the cache, and maybe compiled. */
static loom_status find_toolchain(loom__construction *c, loom_error *error) {
    loom_plan *plan = c->plan;
    loom_context *context = plan->context;
    const build *first = NULL;
    loom_status status = plan->host ? loom__cc_find(context, &c->toolchain, error)
                                    : loom__nvrtc_find(context, &c->toolchain, error);
    for (int32_t i = 0; i < plan->num_kernels && status == LOOM_OK; i++) {
        build *b = &c->builds[i];
        if (!b->pack) b->key = loom__arena_print(&plan->arena, "%s%s", b->key, c->toolchain->identity);
        if (!b->key) return loom__fail_memory(error);
    }
    if (status != LOOM_COMPILE || !c->no_compile || plan->host) return status;
    for (int32_t i = plan->num_kernels - 1; i >= 0; i--) {
        if (!c->builds[i].pack) first = &c->builds[i];
    }
    return fail_missing(c, first, c->num_missing, "which cannot be asked without NVRTC", error);
}

/* -- Wisdom ---------------------------------------------------------------------------------------------- */

/* Puts what was measured near the hint, with LOOM_MEASURE for its own class, into the request, for each
 * target that may be chosen. */
static loom_status ask_wisdom(loom__construction *c, const loom_plan_desc *desc, loom__request *request,
                              loom_error *error) {
    loom_plan *plan = c->plan;
    loom_context *context = plan->context;
    loom__wisdom_entry wanted = {.problem = c->info.text, .class = loom__shape_class_of(&desc->hint)};
    char digest[33];
    bool packs_only = desc->flags & LOOM_NO_COMPILE && desc->rigor == LOOM_ESTIMATE;
    if (desc->device == LOOM_DEVICE_NONE || packs_only || c->wisdom == NO_WISDOM) return LOOM_OK;
    LOOM_TRY(context, loom__wisdom_device(context, plan->device, &plan->arena, &wanted, error));
    LOOM_TRY(context, loom__generator_digest(context, digest, error));
    wanted.generator = digest;
    for (int32_t i = 0; i < LOOM__NUM_TARGETS; i++) {
        wanted.target = loom__target_names[i];
        if (request->target && strcmp(request->target, wanted.target)) continue;
        for (loom_pass pass = LOOM_FORWARD; pass <= (c->info.backward ? LOOM_BACKWARD : LOOM_FORWARD);
             pass++) {
            wanted.pass = pass;
            const loom__wisdom_entry *found =
                c->wisdom == OWN_WISDOM       ? loom__wisdom_find_own(context, &wanted, LOOM__WISDOM_NEAR)
                : desc->rigor == LOOM_MEASURE ? loom__wisdom_find(context, &wanted, 0, false)
                                              : loom__wisdom_find(context, &wanted, LOOM__WISDOM_NEAR, true);
            request->measured[i][pass] = found ? found->schedule : NULL;
            c->by_shipped |= found && found->shipped;
        }
    }
    return LOOM_OK;
}

static bool is_forced(const loom__request *request, loom_pass pass) {
    return (pass == LOOM_BACKWARD ? request->schedule_backward : request->schedule) != NULL;
}

/* Whether a pass has the schedule that wisdom said, where none was asked for. */
static bool is_measured(const loom__request *request, const loom__generated *generated, loom_pass pass) {
    const char *schedule = pass == LOOM_BACKWARD ? generated->schedule_backward : generated->schedule;
    const char *measured = NULL;
    for (int32_t i = 0; i < LOOM__NUM_TARGETS; i++) {
        if (strcmp(loom__target_names[i], generated->target) == 0) measured = request->measured[i][pass];
    }
    return !is_forced(request, pass) && measured && strcmp(measured, schedule) == 0;
}

static loom_status need_wisdom(const loom__construction *c, const loom__request *request, loom_error *error) {
    const loom__generated *g = &c->generated;
    bool forward = is_forced(request, LOOM_FORWARD) || is_measured(request, g, LOOM_FORWARD);
    bool backward =
        !c->info.backward || is_forced(request, LOOM_BACKWARD) || is_measured(request, g, LOOM_BACKWARD);
    if (forward && backward) return LOOM_OK;
    loom__shape_class class = loom__shape_class_of(&request->hint);
    return loom__fail(error, LOOM_NOT_FOUND, "desc.rigor",
                      "no wisdom near rows=%lld queries=%lld keys=%lld for the %s of target %s on %s, and "
                      "LOOM_WISDOM_ONLY takes nothing else; `attnloom tune` measures the problem\n    %s",
                      (long long)class.rows, (long long)class.queries, (long long)class.keys,
                      forward ? "backward" : "forward", g->target,
                      c->plan->device ? c->plan->device->name : "the host", g->problem);
}

/* -- Plans ----------------------------------------------------------------------------------------------- */

static const char *keep(loom__arena *arena, const char *text) {
    return text ? loom__arena_copy(arena, text, strlen(text)) : "";
}

static loom_status keep_text(loom_plan *plan, loom_text which, const char *text, loom_error *error) {
    plan->texts[which] = keep(&plan->arena, text);
    return plan->texts[which] ? LOOM_OK : loom__fail_memory(error);
}

static loom_status prepare_threads(loom_plan *plan, loom_error *error) {
    loom_context *context = plan->context;
    size_t scratch_bytes = 1;
    loom_status status = LOOM_OK;
    for (int32_t i = 0; i < plan->num_kernels; i++) {
        if ((size_t)plan->kernels[i].facts.smem_bytes > scratch_bytes)
            scratch_bytes = (size_t)plan->kernels[i].facts.smem_bytes;
    }
    loom__context_lock(context);
    if (!context->pool)
        status = loom__pool_create(&context->memory, context->num_threads, &context->pool, error);
    if (status == LOOM_OK) status = loom__pool_reserve(context->pool, scratch_bytes, error);
    loom__context_unlock(context);
    return status;
}

/* All that needs no kernel. */
static loom_status describe(loom__construction *c, const loom_plan_desc *desc, loom_error *error) {
    loom_plan *plan = c->plan;
    loom_context *context = plan->context;
    loom__generated *generated = &c->generated;
    loom__request request;
    loom_error refusal = LOOM_ERROR_INIT; /* that an older arch may make good */
    LOOM_TRY(context, make_request(context, desc, &request, &plan->device, error));
    loom_status known = loom__problem_query(context, desc->problem, &plan->arena, &c->info, error);
    if (known != LOOM_OK && known != LOOM_NOT_FOUND) return known;
    if (known == LOOM_OK) LOOM_TRY(context, ask_wisdom(c, desc, &request, error));
    /* Where no pack has the problem, this says what a manifest lacks for it. */
    loom_status found = loom__generator_plan(context, &request, &plan->arena, generated, &refusal);
    if (known == LOOM_NOT_FOUND) return forward(&refusal, error);
    if (found != LOOM_OK && found != LOOM_NOT_FOUND) return forward(&refusal, error);
    if (desc->rigor != LOOM_ESTIMATE && found == LOOM_OK) LOOM_TRY(context, need_wisdom(c, &request, error));
    if (found == LOOM_OK) {
        LOOM_TRY(context, look_into_packs(c, error));
        c->by_wisdom = is_measured(&request, generated, LOOM_FORWARD) ||
                       (c->info.backward && is_measured(&request, generated, LOOM_BACKWARD));
    }
    if ((found == LOOM_NOT_FOUND || c->num_missing) && plan->device)
        LOOM_TRY(context, take_older_arch(c, &request, error));
    if (!generated->num_kernels) return explain(c, forward(&refusal, error), error);
    c->manifest_line =
        loom__manifest_line(&plan->arena, &request, generated->problem, generated->target, generated->arch);
    c->asked = (loom__record){.written = keep(&plan->arena, desc->problem),
                              .schedule = keep(&plan->arena, request.schedule),
                              .schedule_backward = keep(&plan->arena, request.schedule_backward),
                              .hint = desc->hint};
    if (!c->manifest_line || !c->asked.written || !c->asked.schedule || !c->asked.schedule_backward)
        return loom__fail_memory(error);
    plan->driver = context->driver;
    plan->d = c->info.d;
    plan->dv = c->info.dv;
    plan->backward = c->info.backward;
    plan->element_bytes = strcmp(c->info.dtype, "fp32") == 0 ? 4 : 2;
    plan->is_bf16 = strcmp(c->info.dtype, "bf16") == 0;
    plan->host = strcmp(generated->target, "host") == 0;
    plan->launchable = desc->device != LOOM_DEVICE_NONE;
    LOOM_TRY(context, keep_text(plan, LOOM_TEXT_PROBLEM, generated->problem, error));
    LOOM_TRY(context, keep_text(plan, LOOM_TEXT_TARGET, generated->target, error));
    LOOM_TRY(context, keep_text(plan, LOOM_TEXT_ARCH, generated->arch, error));
    LOOM_TRY(context, keep_text(plan, LOOM_TEXT_SCHEDULE, generated->schedule, error));
    LOOM_TRY(context, keep_text(plan, LOOM_TEXT_SCHEDULE_BACKWARD, generated->schedule_backward, error));
    LOOM_TRY(context, keep_text(plan, LOOM_TEXT_WHY, generated->why, error));
    loom__log(context, LOOM__LOG_CANDIDATE, "plan why=\n%s", generated->why);
    LOOM_TRY(context, read_params(plan, &c->info, error));
    LOOM_TRY(context, resolve(plan, generated, error));
    if (c->num_missing) LOOM_TRY(context, find_toolchain(c, error));
    if (plan->host) plan->texts[LOOM_TEXT_ARCH] = c->toolchain->triple;
    return LOOM_OK;
}

static loom_status construct(loom__construction *c, loom_error *error) {
    loom_plan *plan = c->plan;
    loom_status status = build_kernels(c, error);
    if (status == LOOM_OK && plan->host && plan->launchable) status = prepare_threads(plan, error);
    loom__generator_release(plan->context, &c->generated);
    if (status != LOOM_OK) return status;
    loom__log(plan->context, LOOM__LOG_COMPILE,
              "plan problem=\"%s\" target=%s arch=%s kernels=%d seconds=%.4f", plan->texts[LOOM_TEXT_PROBLEM],
              plan->texts[LOOM_TEXT_TARGET], plan->texts[LOOM_TEXT_ARCH], plan->num_kernels,
              loom__now() - c->start);
    return LOOM_OK;
}

static void *construct_async(void *argument) {
    loom__construction *c = argument;
    loom_status status = construct(c, &c->error);
    pthread_mutex_lock(&c->lock);
    c->status = status;
    atomic_store_explicit(&c->plan->state, status == LOOM_OK ? LOOM__PLAN_READY : LOOM__PLAN_FAILED,
                          memory_order_release);
    pthread_cond_broadcast(&c->finished);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

static loom_status start_async(loom__construction *c, loom_error *error) {
    pthread_condattr_t attributes;
    c->error = (loom_error)LOOM_ERROR_INIT;
    if (pthread_mutex_init(&c->lock, NULL)) return loom__fail_memory(error);
    bool failed = pthread_condattr_init(&attributes) != 0;
    if (!failed) {
        failed = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) ||
                 pthread_cond_init(&c->finished, &attributes);
        pthread_condattr_destroy(&attributes);
    }
    if (failed) {
        pthread_mutex_destroy(&c->lock);
        return loom__fail_memory(error);
    }
    c->async = true;
    c->has_thread = pthread_create(&c->thread, NULL, construct_async, c) == 0;
    if (!c->has_thread) construct_async(c); /* a system that gives no thread makes the caller wait */
    return LOOM_OK;
}

/* A plan without kernels, with all that is known before these. Its construction holds on to the generator. */
static loom_status begin_with(loom_context *context, const loom_plan_desc *desc, int wisdom, loom_plan **plan,
                              loom_error *error) {
    LOOM_TRY(NULL, check_desc(context, desc, plan, error));
    loom_plan *made = context->memory.resize(context->memory.user, NULL, sizeof *made);
    if (!made) return loom__fail_memory(error);
    memset(made, 0, sizeof *made);
    atomic_init(&made->serving, made);
    made->context = context;
    made->arena.memory = &context->memory;
    loom__construction *c = loom__arena_alloc(&made->arena, sizeof *c);
    if (!c) {
        loom_plan_destroy(made);
        return loom__fail_memory(error);
    }
    made->construction = c;
    c->plan = made;
    c->generated.reference = -2; /* LUA_NOREF */
    c->no_compile = desc->flags & LOOM_NO_COMPILE;
    c->wisdom = wisdom;
    c->start = loom__now();
    loom__context_lock(context);
    loom_status status = describe(c, desc, error);
    if (status != LOOM_OK) loom__generator_release(context, &c->generated);
    loom__context_unlock(context);
    if (status == LOOM_OK)
        *plan = made;
    else
        loom_plan_destroy(made);
    return status;
}

static loom_status begin(loom_context *context, const loom_plan_desc *desc, loom_plan **plan,
                         loom_error *error) {
    return begin_with(context, desc, ALL_WISDOM, plan, error);
}

/* Gives up a plan that was begun. */
static void drop(loom_plan **plan) {
    loom__generator_release((*plan)->context, &(*plan)->construction->generated);
    loom_plan_destroy(*plan);
    *plan = NULL;
}

/* A plan without LOOM_MEASURE. What the library ships is no reason to compile where packs have all kernels
 * without it: they were made with the model's choice, as for any GPU of an arch. Where wisdom would have it
 * compiled and there is no compiler, packs may have what the model chooses, as with LOOM_NO_COMPILE. */
static loom_status begin_estimated(loom_context *context, const loom_plan_desc *desc, loom_plan **plan,
                                   loom_error *error) {
    loom_status status = begin(context, desc, plan, error);
    const loom__construction *c = status == LOOM_OK ? (*plan)->construction : NULL;
    if (c && c->by_shipped && c->num_missing && context->packs && desc->rigor == LOOM_ESTIMATE) {
        loom_plan *packed = NULL;
        if (begin_with(context, desc, OWN_WISDOM, &packed, NULL) == LOOM_OK) {
            loom_plan **worse = packed->construction->num_missing ? &packed : plan;
            drop(worse);
            if (packed) *plan = packed;
        }
        return LOOM_OK;
    }
    if (status != LOOM_COMPILE || desc->rigor != LOOM_ESTIMATE || !context->packs) return status;
    loom_plan_desc packed = *desc;
    packed.flags |= LOOM_NO_COMPILE;
    return begin(context, &packed, plan, NULL) == LOOM_OK ? LOOM_OK : status;
}

/* -- Measuring ------------------------------------------------------------------------------------------- */

/* Times the passes whose schedule is not asked for; `only_unknown`: of these those that have no wisdom yet.
 */
static loom_status measure(loom_context *context, const loom_plan_desc *desc, bool only_unknown,
                           loom_error *error) {
    loom__arena arena = {&context->memory, NULL};
    loom__problem_info info;
    loom__tune_options options = {.seconds =
                                      desc->measure_seconds > 0 ? desc->measure_seconds : LOOM__TUNE_SECONDS,
                                  .only_unknown = only_unknown};
    loom_status status = loom__problem_query(context, desc->problem, &arena, &info, error);
    for (loom_pass pass = LOOM_FORWARD; !status && pass <= (info.backward ? LOOM_BACKWARD : LOOM_FORWARD);
         pass++) {
        loom__tuning tuning;
        bool forced = pass == LOOM_BACKWARD ? desc->schedule_backward || context->schedule_backward
                                            : desc->schedule || context->schedule;
        if (!forced) status = loom__tune(context, desc, pass, &options, &arena, &tuning, error);
    }
    loom__arena_free(&arena);
    return status;
}

/* A plan with LOOM_MEASURE. Threads that ask for one at once follow each other, and the first measures for
 * all. */
static loom_status begin_measured(loom_context *context, const loom_plan_desc *desc, loom_plan **plan,
                                  loom_error *error) {
    loom_error missing = LOOM_ERROR_INIT;
    loom_plan_desc estimate = *desc;
    estimate.rigor = LOOM_ESTIMATE;
    pthread_mutex_lock(&context->tuning);
    loom_status status = begin(context, desc, plan, &missing);
    bool unknown = status == LOOM_NOT_FOUND && strcmp(missing.field, "desc.rigor") == 0;
    if (unknown) status = measure(context, desc, true, &missing);
    pthread_mutex_unlock(&context->tuning);
    if (unknown && (status == LOOM_MEMORY || status == LOOM_DRIVER)) {
        /* No room for tensors of its own; a lost device fails the estimate, too. */
        loom__cache_warn(context, "the schedules are not timed: %s", missing.text);
        status = LOOM_OK;
    }
    if (unknown && status == LOOM_OK) return begin(context, &estimate, plan, error);
    if (status != LOOM_OK && error && error->size >= sizeof *error) *error = missing;
    return status;
}

/* Once more, where what wisdom said does not compile or load: a line that was written by hand, or for another
 * compiler. LOOM_MEASURE replaces it by what can be used, LOOM_ESTIMATE does without. */
static loom_status construct_again(loom_context *context, const loom_plan_desc *desc, loom_plan **plan,
                                   loom_error *error) {
    loom_error failure = LOOM_ERROR_INIT;
    loom_plan_desc estimate = *desc;
    bool measures = desc->rigor == LOOM_MEASURE;
    estimate.rigor = LOOM_ESTIMATE;
    if (measures) {
        pthread_mutex_lock(&context->tuning);
        if (measure(context, desc, false, &failure))
            loom__cache_warn(context, "the schedules are not timed: %s", failure.text);
        pthread_mutex_unlock(&context->tuning);
    }
    LOOM_TRY(context, begin_with(context, &estimate, measures ? ALL_WISDOM : NO_WISDOM, plan, error));
    loom_status status = construct((*plan)->construction, error);
    if (status == LOOM_OK) return LOOM_OK;
    loom_plan_destroy(*plan);
    *plan = NULL;
    return status;
}

loom_status loom_plan_create(loom_context *context, const loom_plan_desc *given, loom_plan **plan,
                             loom_error *error) {
    static const size_t FIRST_BYTES = offsetof(loom_plan_desc, measure_seconds); /* of the first header */
    loom_plan_desc own = LOOM_PLAN_DESC_INIT;
    const loom_plan_desc *desc = given;
    loom_plan *made = NULL;
    loom_status status = LOOM_OK;
    if (plan) *plan = NULL;
    if (given && given->size >= FIRST_BYTES && given->size < sizeof own) {
        memcpy(&own, given, FIRST_BYTES);
        own.size = sizeof own;
        desc = &own;
    }
    if (desc && desc->size >= sizeof own && desc->flags & LOOM_STAND_IN) {
        LOOM_TRY(NULL, check_desc(context, desc, plan, error));
        return loom__stand_in_create(context, desc, plan, error);
    }
    if (desc && desc->size >= sizeof own && desc->rigor == LOOM_MEASURE && context && plan)
        LOOM_TRY(context, begin_measured(context, desc, &made, error));
    else
        LOOM_TRY(context, begin_estimated(context, desc, plan ? &made : NULL, error));
    loom__construction *c = made->construction;
    if (desc->flags & LOOM_ASYNC) {
        status = start_async(c, error);
        if (status != LOOM_OK) loom__generator_release(context, &c->generated);
    } else {
        status = construct(c, error);
        if (status != LOOM_OK && status != LOOM_MEMORY && desc->rigor != LOOM_WISDOM_ONLY && c->by_wisdom) {
            loom__log(context, LOOM__LOG_WARNING,
                      "wisdom is passed over, its schedule does not compile or load: problem=\"%s\" "
                      "schedule=\"%s\" backward=\"%s\"",
                      made->texts[LOOM_TEXT_PROBLEM], made->texts[LOOM_TEXT_SCHEDULE],
                      made->texts[LOOM_TEXT_SCHEDULE_BACKWARD]);
            loom_plan_destroy(made);
            made = NULL;
            status = construct_again(context, desc, &made, error);
        }
        if (status == LOOM_OK) atomic_store_explicit(&made->state, LOOM__PLAN_READY, memory_order_release);
    }
    if (status == LOOM_OK)
        *plan = made;
    else
        loom_plan_destroy(made);
    return status;
}

const char *loom__plan_record(const loom_plan *plan, loom__arena *arena) {
    const loom__construction *c = plan->construction;
    loom__record record = c->asked;
    record.info = c->info;
    record.generated = c->generated;
    return loom__record_print(arena, &record);
}

loom_status loom__plan_survey(loom_context *context, const loom_plan_desc *desc, loom__arena *arena,
                              loom__survey *survey, loom_error *error) {
    loom_plan *plan = NULL;
    LOOM_TRY(context, begin_estimated(context, desc, &plan, error));
    loom__construction *c = plan->construction;
    const char *problem = plan->texts[LOOM_TEXT_PROBLEM], *target = plan->texts[LOOM_TEXT_TARGET];
    const char *arch = plan->texts[LOOM_TEXT_ARCH];
    size_t count = (size_t)plan->num_kernels;
    const char **keys = loom__arena_alloc(arena, count * sizeof *keys);
    bool *found = loom__arena_alloc(arena, count * sizeof *found), copied = keys && found;
    *survey = (loom__survey){.problem = loom__arena_copy(arena, problem, strlen(problem)),
                             .target = loom__arena_copy(arena, target, strlen(target)),
                             .arch = loom__arena_copy(arena, arch, strlen(arch)),
                             .num_kernels = plan->num_kernels,
                             .keys = keys,
                             .found = found};
    for (int32_t i = 0; i < plan->num_kernels && copied; i++) {
        build *b = &c->builds[i];
        found[i] = b->pack || loom__cache_load(context, b->slug, b->key, plan->host, &plan->arena, &b->entry);
        keys[i] = loom__arena_copy(arena, b->key, strlen(b->key));
        copied = keys[i] != NULL;
    }
    drop(&plan);
    return copied && survey->problem && survey->target && survey->arch ? LOOM_OK : loom__fail_memory(error);
}

loom_status loom__plan_fail_unready(const loom_plan *plan, loom_error *error) {
    if (atomic_load_explicit(&plan->state, memory_order_acquire) == LOOM__PLAN_COMPILING) {
        return loom__fail(error, LOOM_NOT_FOUND, "plan",
                          "the plan's kernels are still compiling: loom_plan_wait waits for them");
    }
    const loom__construction *c = plan->construction;
    if (error && error->size >= sizeof *error) *error = c->error;
    return c->status;
}

loom_status loom_plan_wait(loom_plan *plan, double timeout_seconds, loom_error *error) {
    static const double LONGEST_SECONDS = 1e9;
    if (!plan) return loom__fail(error, LOOM_INVALID, "plan", "plan is NULL");
    if (!(timeout_seconds >= 0)) {
        return loom__fail(error, LOOM_INVALID, "timeout_seconds",
                          "timeout_seconds is %g, it must be 0 or more", timeout_seconds);
    }
    if (plan->own) plan = plan->own;
    if (loom__plan_is_ready(plan)) return LOOM_OK;
    loom__construction *c = plan->construction;
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds = floor(fmin(timeout_seconds, LONGEST_SECONDS));
    end.tv_sec += (time_t)seconds;
    end.tv_nsec += (long)(1e9 * (fmin(timeout_seconds, LONGEST_SECONDS) - seconds));
    if (end.tv_nsec >= 1000000000) end.tv_sec++, end.tv_nsec -= 1000000000;
    int over = timeout_seconds == 0;
    pthread_mutex_lock(&c->lock);
    while (!over && atomic_load_explicit(&plan->state, memory_order_relaxed) == LOOM__PLAN_COMPILING)
        over = pthread_cond_timedwait(&c->finished, &c->lock, &end);
    pthread_mutex_unlock(&c->lock);
    return loom__plan_is_ready(plan) ? LOOM_OK : loom__plan_fail_unready(plan, error);
}

void loom_plan_destroy(loom_plan *plan) {
    if (!plan) return;
    loom_context *context = plan->context;
    loom__construction *c = plan->construction;
    loom__stand_in_destroy(plan);
    if (c && c->async) {
        if (c->has_thread) pthread_join(c->thread, NULL);
        pthread_cond_destroy(&c->finished);
        pthread_mutex_destroy(&c->lock);
    }
    bool entered = plan->device && loom__device_enter(context, plan->device, NULL) == LOOM_OK;
    for (int32_t i = 0; i < plan->num_kernels; i++) {
        loom__host_unload(&plan->kernels[i].host_module);
        if (entered) loom__module_unload(context, &plan->kernels[i].module);
    }
    if (entered) loom__device_leave(context);
    loom__arena_free(&plan->arena);
    context->memory.resize(context->memory.user, plan, 0);
}

/* -- Introspection --------------------------------------------------------------------------------------- */

int32_t loom_plan_param(const loom_plan *plan, const char *name) {
    plan = loom__plan_serving(plan);
    for (int32_t i = 0; plan && name && i < plan->num_params; i++) {
        if (strcmp(plan->params[i].name, name) == 0) return i;
    }
    return -1;
}

const char *loom_plan_text(const loom_plan *plan, loom_text which) {
    if (!plan || which < LOOM_TEXT_PROBLEM || which > LOOM_TEXT_WHY) return "";
    return loom__plan_serving(plan)->texts[which];
}

int32_t loom_plan_num_kernels(const loom_plan *plan) {
    return plan ? loom__plan_serving(plan)->num_kernels : 0;
}

loom_status loom_plan_kernel(const loom_plan *plan, int32_t index, loom_kernel *kernel, loom_error *error) {
    if (!plan || !kernel)
        return loom__fail(error, LOOM_INVALID, plan ? "kernel" : "plan", "%s is NULL",
                          plan ? "kernel" : "plan");
    plan = loom__plan_serving(plan);
    const size_t first_bytes = offsetof(loom_kernel, pack); /* without what was appended later */
    if (kernel->size < first_bytes) {
        return loom__fail(error, LOOM_INVALID, "kernel.size",
                          "size is %zu, this library needs %zu: use LOOM_KERNEL_INIT", kernel->size,
                          first_bytes);
    }
    if (index < 0 || index >= plan->num_kernels) {
        return loom__fail(error, LOOM_INVALID, "index", "index is %d, the plan has %d kernels", index,
                          plan->num_kernels);
    }
    if (!loom__plan_is_ready(plan)) return loom__plan_fail_unready(plan, error);
    size_t size = kernel->size;
    memcpy(kernel, &plan->kernels[index].facts, size < sizeof *kernel ? size : sizeof *kernel);
    kernel->size = size;
    return LOOM_OK;
}

loom_status loom_plan_certify(loom_plan *plan, const char *text, loom_error *error) {
    if (!plan || !text)
        return loom__fail(error, LOOM_INVALID, plan ? "text" : "plan", "%s is NULL", plan ? "text" : "plan");
    plan = loom__plan_serving(plan);
    if (!loom__plan_is_ready(plan)) return loom__plan_fail_unready(plan, error);
    loom_context *context = plan->context;
    loom_status status = LOOM_OK;
    loom__context_lock(context);
    const char *copy = loom__arena_copy(&plan->arena, text, strlen(text));
    if (!copy) {
        status = loom__fail_memory(error);
        goto out;
    }
    for (int32_t i = 0; i < plan->num_kernels; i++) {
        loom_kernel *facts = &plan->kernels[i].facts;
        if (*facts->entry) LOOM_TRY_OUT(context, loom__cache_certify(context, facts->entry, text, error));
        facts->certificate = copy;
    }
out:
    loom__context_unlock(context);
    return status;
}
