/* pack.c - `attnloom pack`: kernels of a manifest ahead of time, as a file or as C; and what is in such a
 * file. */
#define _GNU_SOURCE
#include "../pack.h"
#include "../plan.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

typedef struct values {
    const char *archs, *out;
    bool embed;
} values;

static const loom__cli_option OPTIONS[] = {
    {"--arch", "LIST", LOOM__CLI_TEXT, offsetof(values, archs),
     "GPU architectures, with commas: sm_80,sm_90a (80 and 90a are the same); kernels of target hopper are "
     "in "
     "what sm_90 or sm_90a asks for"},
    {"-o", "FILE", LOOM__CLI_TEXT, offsetof(values, out), "the file to write"},
    {"--embed", NULL, LOOM__CLI_FLAG, offsetof(values, embed),
     "write a C file with the bytes instead, named after FILE: kernels.c defines kernels_pack and "
     "kernels_pack_bytes"},
};

static const loom__cli_command COMMAND = {
    .name = "pack",
    .operands = "MANIFEST | list FILE | verify FILE",
    .min_operands = 1,
    .max_operands = 2,
    .text = "Compiles the kernels of a manifest for each arch (NVRTC is needed, a GPU is not) and writes "
            "them as one "
            "pack, which programs add with loom_context_add_pack and then need no compiler. Kernels go "
            "through the cache: "
            "what was compiled before is taken from there, so a run that was stopped goes on. The same "
            "kernels give "
            "the same bytes. Where an entry fails it is named, the rest goes on, nothing is written and the "
            "exit status "
            "is 1.\n"
            "A manifest is a Lua file that returns a list. An entry is a problem text, or a table with the "
            "problem text "
            "first and any of target, schedule, schedule_backward, archs (a list: only those of --arch that "
            "are in it) and "
            "hint (a typical shape, {seq_q = 8192, seq_k = 8192}, that helps to choose the schedule).\n"
            "list prints what a pack was made by and for, and one line a kernel. verify reads all of it, and "
            "tells whether it is sound and whether this library and the driver here take it.",
    .examples = "  attnloom pack kernels.lua --arch sm_80,sm_90a -o kernels.pack\n"
                "  attnloom pack kernels.lua --arch sm_90a --embed -o kernels.c\n"
                "  attnloom pack verify kernels.pack\n",
    .options = OPTIONS,
    .num_options = sizeof OPTIONS / sizeof OPTIONS[0],
};

/* -- Making --------------------------------------------------------------------------------------------- */

/* Plans stay until the pack is printed: their kernels are not copied. */
typedef struct packing {
    loom_context *context;
    loom__arena *arena;
    loom_plan **plans;
    const char **records; /* of the plans, those that were made */
    loom__pack_kernel *kernels;
    int32_t num_records, num_kernels, capacity;
    int32_t num_compiled;
    double seconds; /* that these took */
} packing;

static loom_status add_kernel(packing *p, const loom_kernel *kernel, loom_error *error) {
    if (p->num_kernels == p->capacity) {
        int32_t capacity = p->capacity ? 2 * p->capacity : 64;
        loom__pack_kernel *larger = loom__arena_alloc(p->arena, (size_t)capacity * sizeof *larger);
        if (!larger) return loom__fail_memory(error);
        if (p->num_kernels) memcpy(larger, p->kernels, (size_t)p->num_kernels * sizeof *larger);
        p->kernels = larger;
        p->capacity = capacity;
    }
    p->kernels[p->num_kernels++] = loom__pack_take(kernel);
    p->num_compiled += !kernel->cached;
    p->seconds += kernel->compile_seconds;
    return LOOM_OK;
}

static loom_status use_plan(void *user, int32_t index, loom_plan *plan, loom_error *error) {
    packing *p = user;
    p->plans[index] = plan;
    p->records[p->num_records] = loom__plan_record(plan, p->arena);
    if (!p->records[p->num_records++]) return loom__fail_memory(error);
    for (int32_t i = 0; i < loom_plan_num_kernels(plan); i++) {
        loom_kernel kernel = LOOM_KERNEL_INIT;
        LOOM_TRY(p->context, loom_plan_kernel(plan, i, &kernel, error));
        LOOM_TRY(p->context, add_kernel(p, &kernel, error));
    }
    return LOOM_OK;
}

/* The name that C has for a file: kernels of out/kernels.c. */
static void name_of(const char *path, char *name, size_t capacity) {
    const char *base = strrchr(path, '/');
    base = base ? base + 1 : path;
    snprintf(name, capacity, "%s%.*s", isdigit((unsigned char)*base) ? "_" : "", (int)strcspn(base, "."),
             base);
    for (char *at = name; *at; at++) {
        if (!isalnum((unsigned char)*at)) *at = '_';
    }
}

/* Bytes as string literals, which compilers read many times as fast as lists of numbers. Escapes have three
 * digits, so that none swallows a digit behind it; what would make a trigraph has one too. */
static loom_status print_c(const char *path, const char *bytes, size_t num_bytes, char **text,
                           size_t *text_bytes, loom_error *error) {
    enum { BYTES_PER_LINE = 32 };
    char name[128];
    name_of(path, name, sizeof name);
    FILE *out = open_memstream(text, text_bytes);
    if (!out) return loom__fail_memory(error);
    fprintf(out,
            "/* Made by `attnloom pack --embed`. The kernels are added to a context by\n"
            " *     loom_context_add_pack(context, \"%s\", %s_pack, %s_pack_bytes, &error);\n */\n"
            "#include <stddef.h>\n\n"
            "#ifdef __GNUC__\n#pragma GCC diagnostic ignored \"-Woverlength-strings\"\n"
            "#define ALIGNED __attribute__((aligned(16)))\n#else\n#define ALIGNED _Alignas(16)\n#endif\n\n"
            "extern const unsigned char %s_pack[];\nextern const size_t %s_pack_bytes;\n\n"
            "const size_t %s_pack_bytes = %zu;\nALIGNED const unsigned char %s_pack[] =",
            name, name, name, name, name, name, num_bytes, name);
    for (size_t i = 0; i < num_bytes; i++) {
        unsigned char byte = (unsigned char)bytes[i];
        if (i % BYTES_PER_LINE == 0) fputs(i ? "\"\n    \"" : "\n    \"", out);
        if (byte < ' ' || byte > '~' || byte == '"' || byte == '\\' || byte == '?')
            fprintf(out, "\\%03o", byte);
        else
            putc(byte, out);
    }
    fputs("\";\n", out);
    bool failed = ferror(out);
    if (fclose(out) || failed) return loom__fail_memory(error);
    return LOOM_OK;
}

static loom_status write_pack(packing *p, const values *v, loom_error *error) {
    const char *bytes = NULL;
    char *text = NULL;
    size_t num_bytes = 0, text_bytes = 0;
    LOOM_TRY(p->context, loom__pack_print(p->context, p->records, p->num_records, p->kernels, &p->num_kernels,
                                          p->arena, &bytes, &num_bytes, error));
    if (!v->embed) return loom__cli_write_file(v->out, bytes, num_bytes, error);
    loom_status status = print_c(v->out, bytes, num_bytes, &text, &text_bytes, error);
    if (!status) status = loom__cli_write_file(v->out, text, text_bytes, error);
    free(text);
    return status;
}

static loom_status make(const values *v, loom_context *context, const char *manifest, bool *fine,
                        loom__arena *arena, loom_error *error) {
    loom__cli_plans list;
    packing p = {.context = context, .arena = arena};
    double start = loom__now();
    LOOM_TRY(context, loom__cli_list_manifest(context, manifest, v->archs, arena, &list, error));
    p.plans = loom__arena_alloc(arena, (size_t)list.num * sizeof *p.plans);
    p.records = loom__arena_alloc(arena, (size_t)list.num * sizeof *p.records);
    if (!p.plans || !p.records) return loom__fail_memory(error);
    loom_status status = loom__cli_make_plans(context, &list, use_plan, &p, fine, error);
    if (!status && *fine) status = write_pack(&p, v, error);
    if (!status && *fine) {
        loom__cli_say("%s: %d kernels of %d problems and archs, %d compiled (%.1f s of compiling), in %.1f s",
                      v->out, p.num_kernels, list.num, p.num_compiled, p.seconds, loom__now() - start);
    } else if (!status) {
        loom__cli_say("%s is not written; what was compiled is in the cache", v->out);
    }
    for (int32_t i = 0; i < list.num; i++) loom_plan_destroy(p.plans[i]);
    return status;
}

/* -- Looking -------------------------------------------------------------------------------------------- */

static void print_kernel(const loom__pack_kernel *kernel, loom__arena *arena) {
    const char *certificate = kernel->entry.certificate;
    printf("problem \"%s\" target %s arch %s kernel %s variant %s schedule \"%s\" bytes %zu certificate %s\n",
           loom__cli_key_value(arena, kernel->key, "problem"),
           loom__cli_key_value(arena, kernel->key, "target"), loom__cli_key_value(arena, kernel->key, "arch"),
           loom__cli_key_value(arena, kernel->key, "kernel"),
           loom__cli_key_value(arena, kernel->key, "variant"),
           loom__cli_key_value(arena, kernel->key, "schedule"), kernel->entry.binary_bytes,
           *certificate ? loom__cli_key_value(arena, certificate, "result") : "none");
}

static loom_status list(const char *path, loom__arena *arena, loom_error *error) {
    const char *bytes = NULL;
    size_t num_bytes = 0;
    loom__pack pack;
    LOOM_TRY(NULL, loom__read_file(arena, path, &bytes, &num_bytes, error));
    LOOM_TRY(NULL, loom__pack_read(arena, path, bytes, num_bytes, &pack, error));
    printf("pack %s library %s grammar %d generator %s toolkit %s driver %s archs \"%s\" plans %d kernels %d "
           "bytes %zu\n",
           path, pack.library, pack.grammar, pack.generator, pack.toolkit, pack.driver, pack.archs,
           pack.num_plans, pack.num_kernels, num_bytes);
    for (int32_t i = 0; i < pack.num_kernels; i++) print_kernel(&pack.kernels[i], arena);
    return LOOM_OK;
}

static loom_status verify(loom_context *context, const char *path, loom_error *error) {
    LOOM_TRY(context, loom_context_add_pack(context, path, NULL, 0, error));
    printf("%s sound\n", path);
    return LOOM_OK;
}

/* -- The command ---------------------------------------------------------------------------------------- */

int loom__cli_pack(int argc, char **argv) {
    values v = {NULL, NULL, false};
    const char *operands[2] = {NULL, NULL};
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    bool fine = true;
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, &v, operands);
    if (exit_status >= 0) return exit_status;
    const char *word = operands[0], *file = operands[1];
    bool lists = strcmp(word, "list") == 0, verifies = strcmp(word, "verify") == 0;
    if ((lists || verifies) ? !file || v.archs || v.out || v.embed : file || !v.archs || !v.out) {
        if (lists || verifies)
            loom__cli_say("pack: %s takes a FILE and no options", word);
        else if (file)
            loom__cli_say("pack: '%s %s': it takes one MANIFEST, or list FILE, or verify FILE", word, file);
        else
            loom__cli_say("pack: %s is missing", v.archs ? "-o FILE" : "--arch LIST");
        return LOOM__CLI_USAGE;
    }
    loom_status status = loom_context_create(NULL, &context, &error);
    if (status) return loom__cli_fail(&error);
    loom__arena arena = {&context->memory, NULL};
    if (lists)
        status = list(file, &arena, &error);
    else if (verifies)
        status = verify(context, file, &error);
    else
        status = make(&v, context, word, &fine, &arena, &error);
    loom__arena_free(&arena);
    loom_context_destroy(context);
    if (status) return loom__cli_fail(&error);
    return fine ? LOOM__CLI_FINE : LOOM__CLI_FAILED;
}
