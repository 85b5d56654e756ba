/* pack.c - writing, reading and adding of packs. See pack.h for the layout and the rules. */
#define _GNU_SOURCE
#include "pack.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

static const char FAMILY[] = "attnloom pack", FORMAT_VERSION[] = "3";
static const char NO_PACK[] = "it is no pack: it does not begin with 'attnloom pack'";

enum { ALIGNMENT = 16 };
enum { LEAST_PLAN_BYTES = 64, LEAST_KERNEL_BYTES = 128 }; /* of their texts; there are at least two digests */

static size_t aligned(size_t bytes) { return (bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1); }

/* Packs hold what NVRTC made for GPUs: code for the processor would run as soon as a plan loads it. */
static bool is_for_gpu(const loom__pack_kernel *kernel) {
    size_t length = 0;
    const char *const texts[] = {loom__key_value(kernel->key, "target", &length),
                                 loom__key_value(kernel->key, "arch", &length)};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (texts[i] && strncmp(texts[i], "host\n", 5) == 0) return false;
    }
    return texts[1] && strncmp(kernel->entry.compiler, "nvrtc ", 6) == 0;
}

/* -- Writing --------------------------------------------------------------------------------------------- */

static int by_key(const void *a, const void *b) {
    return strcmp(((const loom__pack_kernel *)a)->key, ((const loom__pack_kernel *)b)->key);
}

static int by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* " sm_80 sm_90": each arch of the kernels once. */
static const char *list_archs(loom__arena *arena, const loom__pack_kernel *kernels, int32_t num_kernels) {
    const char **archs = loom__arena_alloc(arena, (size_t)num_kernels * sizeof *archs);
    const char *list = "";
    for (int32_t i = 0; archs && i < num_kernels; i++) {
        size_t length = 0;
        const char *arch = loom__key_value(kernels[i].key, "arch", &length);
        archs[i] = loom__arena_copy(arena, arch ? arch : "", length);
        if (!archs[i]) return NULL;
    }
    if (!archs) return NULL;
    qsort(archs, (size_t)num_kernels, sizeof *archs, by_text);
    for (int32_t i = 0; list && i < num_kernels; i++) {
        if (i && strcmp(archs[i], archs[i - 1]) == 0) continue;
        list = loom__arena_print(arena, "%s %s", list, archs[i]);
    }
    return list;
}

/* The lines before plans and kernels, but for the format and the digest. */
static loom_status print_head(loom_context *context, int32_t num_plans, const loom__pack_kernel *kernels,
                              int32_t num_kernels, loom__arena *arena, const char **head, loom_error *error) {
    int32_t grammar = 0, major = 0, minor = 0;
    char generator[33];
    LOOM_TRY(context, loom__generator_digest(context, generator, error));
    LOOM_TRY(context, loom__generator_grammar(context, &grammar, error));
    for (int32_t i = 0; i < num_kernels; i++) {
        if (is_for_gpu(&kernels[i]) && sscanf(kernels[i].entry.compiler, "nvrtc %d.%d", &major, &minor) == 2)
            continue;
        return loom__fail(error, LOOM_INVALID, "pack", "a pack holds kernels of NVRTC for GPUs, not of %s",
                          kernels[i].entry.compiler);
    }
    const char *archs = list_archs(arena, kernels, num_kernels);
    if (!archs) return loom__fail_memory(error);
    *head = loom__arena_print(arena,
                              "library %d.%d.%d\ngrammar %d\ngenerator %s\ntoolkit %d.%d\ndriver %d.0\n"
                              "archs%s\nplans %d\nkernels %d\n",
                              LOOM_VERSION_MAJOR, LOOM_VERSION_MINOR, LOOM_VERSION_PATCH, grammar, generator,
                              major, minor, major, archs, num_plans, num_kernels);
    return *head ? LOOM_OK : loom__fail_memory(error);
}

/* The text of a kernel: its sizes, its meta.txt, its certificate. */
static const char *print_kernel(loom__arena *arena, const loom__pack_kernel *kernel) {
    const char *meta = loom__entry_print(arena, &kernel->entry, kernel->key);
    if (!meta) return NULL;
    return loom__arena_print(arena, "kernel %zu %zu %zu\n%s%s", strlen(meta),
                             strlen(kernel->entry.certificate), kernel->entry.binary_bytes, meta,
                             kernel->entry.certificate);
}

loom__pack_kernel loom__pack_take(const loom_kernel *kernel) {
    return (loom__pack_kernel){.key = kernel->key,
                               .entry = {.source = kernel->source,
                                         .binary = kernel->binary,
                                         .binary_bytes = kernel->binary_bytes,
                                         .compiler = kernel->compiler,
                                         .certificate = kernel->certificate,
                                         .registers = kernel->registers,
                                         .spill_bytes = kernel->spill_bytes,
                                         .threads = kernel->threads}};
}

/* All text behind the digest, as a list of pieces: the head, plans, kernels. */
static loom_status print_text(loom_context *context, const char *const *plans, int32_t num_plans,
                              const loom__pack_kernel *kernels, int32_t num_kernels, loom__arena *arena,
                              const char ***pieces, int32_t *num_pieces, loom_error *error) {
    const char **list = loom__arena_alloc(arena, (size_t)(1 + num_plans + num_kernels) * sizeof *list);
    int32_t num = 0;
    if (!list) return loom__fail_memory(error);
    LOOM_TRY(context, print_head(context, num_plans, kernels, num_kernels, arena, &list[num++], error));
    for (int32_t i = 0; i < num_plans; i++) {
        list[num] = loom__arena_print(arena, "plan %zu\n%s", strlen(plans[i]), plans[i]);
        if (!list[num++]) return loom__fail_memory(error);
    }
    for (int32_t i = 0; i < num_kernels; i++) {
        list[num] = print_kernel(arena, &kernels[i]);
        if (!list[num++]) return loom__fail_memory(error);
    }
    *pieces = list;
    *num_pieces = num;
    return LOOM_OK;
}

loom_status loom__pack_print(loom_context *context, const char **plans, int32_t num_plans,
                             loom__pack_kernel *kernels, int32_t *num_kernels, loom__arena *arena,
                             const char **bytes, size_t *num_bytes, loom_error *error) {
    int32_t num = 0, unique_plans = 0, num_pieces = 0;
    const char **pieces = NULL;
    qsort(kernels, (size_t)*num_kernels, sizeof *kernels, by_key);
    for (int32_t i = 0; i < *num_kernels; i++) {
        if (!num || strcmp(kernels[i].key, kernels[num - 1].key)) kernels[num++] = kernels[i];
    }
    *num_kernels = num;
    qsort(plans, (size_t)num_plans, sizeof *plans, by_text);
    for (int32_t i = 0; i < num_plans; i++) {
        if (!unique_plans || strcmp(plans[i], plans[unique_plans - 1])) plans[unique_plans++] = plans[i];
    }
    LOOM_TRY(context,
             print_text(context, plans, unique_plans, kernels, num, arena, &pieces, &num_pieces, error));
    size_t text_bytes = 0, binary_bytes = 0;
    for (int32_t i = 0; i < num_pieces; i++) text_bytes += strlen(pieces[i]);
    for (int32_t i = 0; i < num; i++) binary_bytes += aligned(kernels[i].entry.binary_bytes);
    enum { DIGEST_LINE = sizeof "digest \n" - 1 + 32 };
    size_t front_bytes = strlen(FAMILY) + 1 + strlen(FORMAT_VERSION) + 1 + DIGEST_LINE;
    *num_bytes = aligned(front_bytes + text_bytes) + binary_bytes;
    char *made = loom__arena_alloc(arena, *num_bytes + 1), digest[33];
    if (!made) return loom__fail_memory(error);
    char *end = made + front_bytes;
    for (int32_t i = 0; i < num_pieces; i++) end = stpcpy(end, pieces[i]);
    loom__digest(made + front_bytes, text_bytes, digest);
    const char *front = loom__arena_print(arena, "%s %s\ndigest %s\n", FAMILY, FORMAT_VERSION, digest);
    if (!front) return loom__fail_memory(error);
    memcpy(made, front, front_bytes);
    size_t at = aligned(front_bytes + text_bytes);
    for (int32_t i = 0; i < num; i++) {
        memcpy(made + at, kernels[i].entry.binary, kernels[i].entry.binary_bytes);
        at += aligned(kernels[i].entry.binary_bytes);
    }
    *bytes = made;
    return LOOM_OK;
}

/* -- Reading --------------------------------------------------------------------------------------------- */

/* What is left to read. */
typedef struct rest {
    const char *at;
    size_t bytes;
    const char *name; /* of the pack */
    loom__arena *arena;
    bool no_memory;
} rest;

static char *copy(rest *r, const char *bytes, size_t num_bytes) {
    char *made = loom__arena_copy(r->arena, bytes, num_bytes);
    r->no_memory = r->no_memory || !made;
    return made;
}

/* The value of the line "name value" that must come next, copied; NULL: it does not. */
static const char *take_line(rest *r, const char *name) {
    const char *end = r->bytes ? memchr(r->at, '\n', r->bytes) : NULL;
    size_t length = strlen(name);
    if (!end || (size_t)(end - r->at) <= length || memcmp(r->at, name, length) || r->at[length] != ' ')
        return NULL;
    const char *value = copy(r, r->at + length + 1, (size_t)(end - r->at) - length - 1);
    r->bytes -= (size_t)(end - r->at) + 1;
    r->at = end + 1;
    return value;
}

static const char *take_bytes(rest *r, size_t bytes) {
    const char *taken = r->at;
    if (bytes > r->bytes) return NULL;
    r->at += bytes;
    r->bytes -= bytes;
    return taken;
}

/* Zeros up to the next multiple of ALIGNMENT. */
static bool take_padding(rest *r, const char *start) {
    size_t place = (size_t)(r->at - start), bytes = aligned(place) - place;
    const char *padding = take_bytes(r, bytes);
    for (size_t i = 0; padding && i < bytes; i++) {
        if (padding[i]) return false;
    }
    return padding != NULL;
}

static loom_status refuse(const rest *r, const char *fault, loom_error *error) {
    if (r->no_memory) return loom__fail_memory(error);
    return loom__fail(error, LOOM_INVALID, "pack", "%s: %s", r->name, fault);
}

/* The number on the line "name number", from 1 to as many pieces of so many bytes as there is room for; 0: it
 * does not come next. */
static int32_t take_count(rest *r, const char *name, size_t least_bytes) {
    const char *value = take_line(r, name);
    long number = value ? strtol(value, NULL, 10) : 0;
    return number < 1 || number > INT32_MAX || (size_t)number > r->bytes / least_bytes ? 0 : (int32_t)number;
}

static loom_status read_head(rest *r, loom__pack *pack, loom_error *error) {
    pack->library = take_line(r, "library");
    const char *grammar = take_line(r, "grammar");
    pack->generator = take_line(r, "generator");
    pack->toolkit = take_line(r, "toolkit");
    pack->driver = take_line(r, "driver");
    pack->archs = take_line(r, "archs");
    pack->num_plans = take_count(r, "plans", LEAST_PLAN_BYTES);
    pack->num_kernels = take_count(r, "kernels", LEAST_KERNEL_BYTES);
    if (!pack->library || !grammar || !pack->generator || !pack->toolkit || !pack->driver || !pack->archs ||
        !pack->num_plans || !pack->num_kernels)
        return refuse(r, "the pack is damaged: its first lines cannot be read", error);
    pack->grammar = (int32_t)strtol(grammar, NULL, 10);
    return LOOM_OK;
}

static loom_status read_plans(rest *r, loom__pack *pack, loom_error *error) {
    const char **plans = loom__arena_alloc(r->arena, (size_t)pack->num_plans * sizeof *plans);
    if (!plans) return loom__fail_memory(error);
    for (int32_t i = 0; i < pack->num_plans; i++) {
        size_t bytes = (size_t)take_count(r, "plan", 1);
        const char *record = bytes ? take_bytes(r, bytes) : NULL;
        plans[i] = record ? copy(r, record, bytes) : NULL;
        if (!plans[i]) return refuse(r, "the pack is cut short or damaged", error);
    }
    pack->plans = plans;
    return LOOM_OK;
}

/* The texts of a kernel. */
typedef struct texts {
    char *meta;
    const char *certificate;
    size_t binary_bytes;
} texts;

static bool take_texts(rest *r, texts *t) {
    size_t meta_bytes, certificate_bytes;
    const char *sizes = take_line(r, "kernel");
    if (!sizes || sscanf(sizes, "%zu %zu %zu", &meta_bytes, &certificate_bytes, &t->binary_bytes) != 3)
        return false;
    const char *meta = take_bytes(r, meta_bytes), *certificate = take_bytes(r, certificate_bytes);
    if (!meta || !certificate) return false;
    t->meta = copy(r, meta, meta_bytes);
    t->certificate = copy(r, certificate, certificate_bytes);
    return t->meta && t->certificate;
}

/* All texts and, once the digest vouches for them, the binaries. */
static loom_status read_kernels(rest *r, const char *start, const char *text, const char *digest,
                                loom__pack *pack, loom_error *error) {
    char found[33];
    size_t count = (size_t)pack->num_kernels;
    texts *list = loom__arena_alloc(r->arena, count * sizeof *list);
    loom__pack_kernel *kernels = loom__arena_alloc(r->arena, count * sizeof *kernels);
    if (!list || !kernels) return loom__fail_memory(error);
    for (size_t i = 0; i < count; i++) {
        if (!take_texts(r, &list[i])) return refuse(r, "the pack is cut short or damaged", error);
    }
    loom__digest(text, (size_t)(r->at - text), found);
    if (strcmp(found, digest)) return refuse(r, "the text of the pack is damaged", error);
    for (size_t i = 0; i < count; i++) {
        const char *binary = take_padding(r, start) ? take_bytes(r, list[i].binary_bytes) : NULL;
        if (!binary) return refuse(r, "the pack is cut short or damaged", error);
        const char *fault = loom__entry_read(list[i].meta, NULL, binary, list[i].binary_bytes,
                                             &kernels[i].entry, &kernels[i].key);
        if (!fault && !is_for_gpu(&kernels[i])) fault = "it is no kernel of NVRTC for a GPU";
        if (fault) {
            return loom__fail(error, LOOM_INVALID, "pack", "%s: kernel %zu of %zu: %s", r->name, i + 1, count,
                              fault);
        }
        kernels[i].entry.certificate = list[i].certificate;
    }
    if (!take_padding(r, start) || r->bytes) return refuse(r, "the pack is not where it should end", error);
    pack->kernels = kernels;
    return LOOM_OK;
}

loom_status loom__pack_read(loom__arena *arena, const char *name, const void *bytes, size_t num_bytes,
                            loom__pack *pack, loom_error *error) {
    rest r = {.at = bytes, .bytes = num_bytes, .name = name, .arena = arena};
    *pack = (loom__pack){.name = loom__arena_copy(arena, name, strlen(name))};
    if (!pack->name) return loom__fail_memory(error);
    const char *version = take_line(&r, FAMILY);
    if (!version) return refuse(&r, NO_PACK, error);
    if (strcmp(version, FORMAT_VERSION)) {
        return loom__fail(error, LOOM_UNSUPPORTED, "pack",
                          "%s: its format is '%s %.20s', this library reads '%s %s'", name, FAMILY, version,
                          FAMILY, FORMAT_VERSION);
    }
    const char *digest = take_line(&r, "digest"), *text = r.at;
    if (!digest) return refuse(&r, "the pack is damaged: its first lines cannot be read", error);
    LOOM_TRY(NULL, read_head(&r, pack, error));
    LOOM_TRY(NULL, read_plans(&r, pack, error));
    return read_kernels(&r, bytes, text, digest, pack, error);
}

/* -- In a context ---------------------------------------------------------------------------------------- */

/* Whether this library, and the driver if there is one, take the kernels. */
static loom_status check_fit(loom_context *context, const loom__pack *pack, loom_error *error) {
    static const struct { int32_t cuda, driver; } DRIVERS[] = {{12, 525}, {13, 580}};
    char generator[33], library[32], needs[32] = "";
    int32_t version = 0, major = (int32_t)strtol(pack->driver, NULL, 10);
    LOOM_TRY(context, loom__generator_digest(context, generator, error));
    snprintf(library, sizeof library, "%d.%d.%d", LOOM_VERSION_MAJOR, LOOM_VERSION_MINOR, LOOM_VERSION_PATCH);
    if ((*generator && strcmp(generator, pack->generator)) || strcmp(library, pack->library)) {
        return loom__fail(error, LOOM_INVALID, "pack",
                          "%s: its kernels are of library %s, generator %s; this library is %s, its "
                          "generator %s: make the pack again with "
                          "the `attnloom pack` of this library",
                          pack->name, pack->library, pack->generator, library,
                          *generator ? generator : "any");
    }
    if (loom__driver_version(context, &version, NULL) != LOOM_OK || version / 1000 >= major) return LOOM_OK;
    for (size_t i = 0; i < sizeof DRIVERS / sizeof DRIVERS[0]; i++) {
        if (DRIVERS[i].cuda == major) snprintf(needs, sizeof needs, " (%d or newer)", DRIVERS[i].driver);
    }
    return loom__fail(
        error, LOOM_UNSUPPORTED, "pack",
        "%s: its kernels are of CUDA %s and need a driver that takes CUDA %s%s, this one takes %d.%d",
        pack->name, pack->toolkit, pack->driver, needs, version / 1000, version % 1000 / 10);
}

/* A file that begins otherwise is not read, be it ever so long. */
static loom_status read_pack_file(loom__arena *arena, const char *name, const char **bytes, size_t *num_bytes,
                                  loom_error *error) {
    char start[sizeof FAMILY - 1];
    FILE *file = fopen(name, "rbe");
    bool is_other = file && fread(start, 1, sizeof start, file) == sizeof start &&
                    memcmp(start, FAMILY, sizeof start) != 0;
    if (file) fclose(file);
    if (is_other) return refuse(&(rest){.name = name}, NO_PACK, error);
    return loom__read_file(arena, name, bytes, num_bytes, error);
}

static void add(loom_context *context, loom__pack *pack, loom__arena *arena) {
    loom__arena_adopt(&context->arena, arena);
    loom__pack **at = &context->packs;
    while (*at) at = &(*at)->next;
    *at = pack;
    loom__log(context, LOOM__LOG_COMPILE, "pack name=%s kernels=%d archs=\"%s\" toolkit=%s", pack->name,
              pack->num_kernels, pack->archs, pack->toolkit);
}

loom_status loom_context_add_pack(loom_context *context, const char *name, const void *bytes,
                                  size_t num_bytes, loom_error *error) {
    if (!context) return loom__fail(error, LOOM_INVALID, "context", "context is NULL");
    if (!name) return loom__fail(error, LOOM_INVALID, "name", "the name of the pack is NULL");
    if (!bytes && num_bytes) {
        return loom__fail(error, LOOM_INVALID, "bytes",
                          "bytes is NULL, but num_bytes is %zu; it is 0 for a file", num_bytes);
    }
    loom__arena arena = {&context->memory, NULL};
    loom_status status = LOOM_OK;
    const char *content = bytes;
    loom__pack *pack = loom__arena_alloc(&arena, sizeof *pack);
    if (!pack) {
        status = loom__fail_memory(error);
        goto out;
    }
    if (!bytes) LOOM_TRY_OUT(context, read_pack_file(&arena, name, &content, &num_bytes, error));
    LOOM_TRY_OUT(context, loom__pack_read(&arena, name, content, num_bytes, pack, error));
    loom__context_lock(context);
    status = check_fit(context, pack, error);
    if (status == LOOM_OK) add(context, pack, &arena);
    loom__context_unlock(context);
out:
    loom__arena_free(&arena);
    return status;
}

const loom__pack_kernel *loom__pack_find(const loom_context *context, const char *start,
                                         const loom__pack **pack) {
    size_t length = strlen(start);
    for (const loom__pack *p = context->packs; p; p = p->next) {
        for (int32_t i = 0; i < p->num_kernels; i++) {
            if (strncmp(p->kernels[i].key, start, length)) continue;
            *pack = p;
            return &p->kernels[i];
        }
    }
    return NULL;
}

const char *loom__manifest_line(loom__arena *arena, const loom__request *request, const char *problem,
                                const char *target, const char *arch) {
    const struct {
        const char *name, *value;
    } texts[] = {{"target", target},
                 {"schedule", request->schedule},
                 {"schedule_backward", request->schedule_backward}};
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {{"batch", request->hint.batch},
                 {"heads_q", request->hint.heads_q},
                 {"heads_kv", request->hint.heads_kv},
                 {"seq_q", request->hint.seq_q},
                 {"seq_k", request->hint.seq_k}};
    const char *line = loom__arena_print(arena, "{\"%s\", archs = {\"%s\"}", problem, arch), *hint = "";
    for (size_t i = 0; line && i < sizeof texts / sizeof texts[0]; i++) {
        if (texts[i].value)
            line = loom__arena_print(arena, "%s, %s = \"%s\"", line, texts[i].name, texts[i].value);
    }
    for (size_t i = 0; hint && i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].value)
            hint = loom__arena_print(arena, "%s%s%s = %lld", hint, *hint ? ", " : "", sizes[i].name,
                                     (long long)sizes[i].value);
    }
    if (!line || !hint) return NULL;
    return loom__arena_print(arena, *hint ? "%s, hint = {%s}}," : "%s%s},", line, hint);
}
