/* test_pack.c - packs: their bytes, what is refused, and plans that take kernels from them, on a GPU that is
 * a table of functions. A library with the interface of NVRTC stands in for it. */
#include "runtime_rig.h"

#include "device_rig.h"
#include "generator.h"
#include "pack.h"
#include "plan.h"
#include "record.h"
#include "wisdom.h"

static loom_status plan_on_device(loom_context *context, const char *problem, uint32_t flags,
                                  loom_plan **plan, loom_error *error) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = problem;
    desc.flags = flags;
    return loom_plan_create(context, &desc, plan, error);
}

/* -- Making packs ---------------------------------------------------------------------------------------- */

typedef struct wanted {
    const char *problem, *arch;
} wanted;

enum { MAX_WANTED = 8, MAX_PACK_KERNELS = 64 };

/* Bytes of a pack with the kernels of these, to be freed; `num` of them or up to one without problem. */
static char *make_pack(const wanted *list, size_t *num_bytes) {
    loom_context *context = context_for(9, 0);
    loom__arena arena = {&context->memory, NULL};
    loom_plan *plans[MAX_WANTED] = {NULL};
    const char *records[MAX_WANTED];
    loom__pack_kernel kernels[MAX_PACK_KERNELS];
    int32_t num_records = 0, num_kernels = 0;
    loom_error error = LOOM_ERROR_INIT;
    for (int i = 0; list[i].problem; i++) {
        loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
        desc.problem = list[i].problem;
        desc.arch = list[i].arch;
        desc.device = LOOM_DEVICE_NONE;
        assert_ok(error, loom_plan_create(context, &desc, &plans[i], &error));
        records[num_records++] = loom__plan_record(plans[i], &arena);
        for (int32_t k = 0; k < loom_plan_num_kernels(plans[i]); k++) {
            loom_kernel kernel = rig_kernel(plans[i], k);
            kernels[num_kernels++] = loom__pack_take(&kernel);
        }
    }
    const char *bytes = NULL;
    assert_ok(error, loom__pack_print(context, records, num_records, kernels, &num_kernels, &arena, &bytes,
                                      num_bytes, &error));
    char *copy = malloc(*num_bytes);
    memcpy(copy, bytes, *num_bytes);
    for (int i = 0; i < MAX_WANTED; i++) loom_plan_destroy(plans[i]);
    loom__arena_free(&arena);
    loom_context_destroy(context);
    return copy;
}

static void write_bytes(const char *path, const char *bytes, size_t num_bytes) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, num_bytes, file), num_bytes);
    fclose(file);
}

/* A pack as a file; the kernels it was made from are in the cache no more. */
static const char *pack_file(const wanted *list) {
    size_t num_bytes = 0;
    char *bytes = make_pack(list, &num_bytes);
    const char *path = rig_path("kernels.pack");
    write_bytes(path, bytes, num_bytes);
    free(bytes);
    rig_remove_tree(rig_path("cache"));
    return path;
}

/* -- Bytes ----------------------------------------------------------------------------------------------- */

static void test_what_is_written_is_read(void **state) {
    (void)state;
    static const wanted LIST[] = {
        {"bf16 aligned backward", "sm_90"}, {"bf16 aligned", "sm_80"}, {NULL, NULL}};
    size_t num_bytes = 0;
    char *bytes = make_pack(LIST, &num_bytes), digest[33];
    loom_context *context = context_for(9, 0);
    loom__arena arena = {&context->memory, NULL};
    loom__pack pack;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__pack_read(&arena, "a.pack", bytes, num_bytes, &pack, &error));
    assert_ok(error, loom__generator_digest(context, digest, &error));
    assert_string_equal(pack.name, "a.pack");
    assert_string_equal(pack.library, "0.1.0");
    assert_string_equal(pack.generator, digest);
    assert_string_equal(pack.toolkit, "12.4");
    assert_string_equal(pack.driver, "12.0");
    assert_string_equal(pack.archs, "sm_80 sm_90");
    assert_int_equal(pack.num_plans, 2);
    assert_int_equal(pack.num_kernels, 4 + 2);
    for (int32_t i = 0; i < pack.num_kernels; i++) {
        const loom__pack_kernel *k = &pack.kernels[i];
        assert_true(!i || strcmp(k[-1].key, k->key) < 0);
        rig_expect(k->key,
                   "problem |kernel |variant |schedule |arch sm_|generator |compiler nvrtc 12.4|options ");
        assert_int_equal((uintptr_t)((const char *)k->entry.binary - bytes) % 16, 0);
        assert_non_null(strstr(k->entry.binary, "fake_"));
        assert_string_equal(k->entry.compiler, "nvrtc 12.4");
        assert_true(k->entry.registers == 40 && k->entry.spill_bytes == 24 && k->entry.threads == 64);
        assert_true(k->entry.seconds == 0);
        assert_string_equal(k->entry.source, "");
        assert_string_equal(k->entry.certificate, "");
    }
    loom__arena_free(&arena);
    loom_context_destroy(context);
    free(bytes);
}

/* Neither order, nor repetition, nor whether it was compiled just now shows. */
static void test_bytes_are_stable(void **state) {
    (void)state;
    static const wanted ONE[] = {{"bf16 backward", "sm_90"}, {"bf16 aligned", "sm_80"}, {NULL, NULL}};
    static const wanted OTHER[] = {
        {"bf16 aligned", "sm_80"}, {"bf16 backward", "sm_90"}, {"bf16 aligned", "sm_80"}, {NULL, NULL}};
    size_t num_bytes = 0, num_again = 0, num_fresh = 0;
    char *bytes = make_pack(ONE, &num_bytes), *again = make_pack(OTHER, &num_again);
    rig_remove_tree(rig_path("cache"));
    char *fresh = make_pack(OTHER, &num_fresh);
    assert_int_equal(num_bytes, num_again);
    assert_int_equal(num_bytes, num_fresh);
    assert_memory_equal(bytes, again, num_bytes);
    assert_memory_equal(bytes, fresh, num_bytes);
    free(bytes);
    free(again);
    free(fresh);
}

static bool same_text(const char *a, const char *b) { return a == b || (a && b && strcmp(a, b) == 0); }

/* What a library without generator reads of a plan is what the generator said. */
static void test_records(void **state) {
    (void)state;
    static const char *const PROBLEMS[] = {"bf16", "bf16 params backward aligned", "bf16 maps listed"};
    loom_context *context = context_for(9, 0);
    loom__arena arena = {&context->memory, NULL};
    loom_error error = LOOM_ERROR_INIT;
    for (size_t i = 0; i < sizeof PROBLEMS / sizeof PROBLEMS[0]; i++) {
        loom__record made = {.written = PROBLEMS[i],
                             .schedule = "tile=4",
                             .schedule_backward = "",
                             .hint = {1, 2, 3, 4, 1LL << 40}},
                     read;
        loom__request request = {.problem = PROBLEMS[i], .arch = "sm_90"};
        assert_ok(error, loom__problem_query(context, PROBLEMS[i], &arena, &made.info, &error));
        assert_ok(error, loom__generator_plan(context, &request, &arena, &made.generated, &error));
        const char *text = loom__record_print(&arena, &made);
        size_t length = strlen(text);
        assert_ok(error, loom__record_read(&arena, loom__arena_copy(&arena, text, length), &read, &error));
        assert_string_equal(loom__record_print(&arena, &read), text);
        assert_string_equal(read.written, PROBLEMS[i]);
        assert_string_equal(read.schedule, "tile=4");
        assert_string_equal(read.schedule_backward, "");
        assert_memory_equal(&read.hint, &made.hint, sizeof made.hint);
        const loom__generated *g = &made.generated, *r = &read.generated;
        assert_string_equal(r->problem, g->problem);
        assert_string_equal(r->schedule, g->schedule);
        assert_string_equal(r->schedule_backward, g->schedule_backward);
        assert_int_equal(read.info.num_params, made.info.num_params);
        for (int32_t p = 0; p < read.info.num_params; p++) {
            assert_string_equal(read.info.params[p].name, made.info.params[p].name);
            assert_int_equal(read.info.params[p].num_dims, made.info.params[p].num_dims);
        }
        assert_int_equal(r->num_kernels, g->num_kernels);
        for (int32_t k = 0; k < r->num_kernels; k++) {
            const loom__kernel_text *a = &g->kernels[k], *b = &r->kernels[k];
            assert_string_equal(a->key, b->key);
            assert_string_equal(a->symbol, b->symbol);
            assert_true(same_text(a->arch, b->arch));
            assert_true(a->grid_rows == b->grid_rows && a->grid_persistent == b->grid_persistent);
            assert_true(a->prepares == b->prepares && a->overlaps == b->overlaps &&
                        a->num_needs == b->num_needs && a->num_regions == b->num_regions);
            for (int32_t n = 0; n < a->num_needs; n++) assert_string_equal(a->needs[n], b->needs[n]);
            for (int32_t n = 0; n < a->num_regions; n++) {
                assert_string_equal(a->regions[n].place, b->regions[n].place);
                assert_true(a->regions[n].bytes == b->regions[n].bytes);
            }
            assert_int_equal(a->num_rows, b->num_rows);
            for (int32_t n = 0; n < a->num_rows; n++) {
                assert_string_equal(a->rows[n].source, b->rows[n].source);
                assert_true(a->rows[n].offset == b->rows[n].offset &&
                            a->rows[n].box_rows == b->rows[n].box_rows);
            }
        }
        loom__generator_release(context, &made.generated);
        for (size_t at = 0; at < 3 * length;
             at++) { /* damage that no digest finds is read or refused, not more */
            loom__arena own = {&context->memory, NULL};
            char *damaged = loom__arena_copy(&own, text, length);
            damaged[at / 3] = " 9\n"[at % 3];
            loom_status status = loom__record_read(&own, damaged, &read, &error);
            assert_true(status == LOOM_OK || status == LOOM_INTERNAL);
            loom__arena_free(&own);
        }
        for (size_t cut = 0; cut < length; cut += 7) { /* no end of it is mistaken for the whole */
            assert_fails(error, LOOM_INTERNAL, "pack", "cannot be read",
                         loom__record_read(&arena, loom__arena_copy(&arena, text, cut), &read, &error));
        }
    }
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

/* What was certified on a GPU is so in the pack. */
static void test_certificate(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16", "sm_90"}, {NULL, NULL}};
    loom_context *context = context_for(9, 0);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, plan_on_device(context, "bf16", 0, &plan, &error));
    assert_ok(error, loom_plan_certify(plan, "result fine\n", &error));
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    const char *path = pack_file(LIST);
    context = context_for(9, 0);
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    assert_ok(error, plan_on_device(context, "bf16", LOOM_NO_COMPILE, &plan, &error));
    assert_string_equal(rig_kernel(plan, 0).certificate, "result fine\n");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* -- What is refused ------------------------------------------------------------------------------------- */

#define assert_refused(words, bytes, num_bytes)                                                              \
    do {                                                                                                     \
        assert_fails(error, LOOM_INVALID, "pack", words,                                                     \
                     loom_context_add_pack(context, "a.pack", bytes, num_bytes, &error));                    \
        assert_null(context->packs);                                                                         \
    } while (0)

/* Every byte counts, and so does the end. */
static void test_damage(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16 aligned", "sm_90"}, {NULL, NULL}};
    size_t num_bytes = 0;
    char *bytes = make_pack(LIST, &num_bytes), *longer = calloc(1, num_bytes + 16);
    loom_context *context = context_for(9, 0);
    loom_error error = LOOM_ERROR_INIT;
    for (size_t i = 0; i < num_bytes; i++) {
        bytes[i] ^= 0x15;
        loom_status status = loom_context_add_pack(context, "a.pack", bytes, num_bytes, &error);
        if (status != LOOM_INVALID && status != LOOM_UNSUPPORTED)
            fail_msg("byte %zu damaged: %s", i, loom_status_name(status));
        rig_expect(error.text, "a.pack: ");
        assert_string_equal(error.field, "pack");
        assert_null(context->packs);
        bytes[i] ^= 0x15;
    }
    for (size_t i = 0; i < num_bytes; i += i < 1500 ? 1 : 97) {
        char *cut = malloc(i + 1); /* so that reading past the end is seen by sanitizers */
        memcpy(cut, bytes, i);
        assert_refused("a.pack: ", cut, i);
        free(cut);
    }
    memcpy(longer, bytes, num_bytes);
    assert_refused("a.pack: the pack is not where it should end", longer, num_bytes + 16);
    bytes[num_bytes - 40] ^= 1;
    assert_refused("a.pack: kernel 2 of 2: the binary is damaged", bytes, num_bytes);
    bytes[num_bytes - 40] ^= 1;
    assert_ok(error, loom_context_add_pack(context, "a.pack", bytes, num_bytes, &error));
    assert_non_null(context->packs);
    loom_context_destroy(context);
    free(bytes);
    free(longer);
}

/* Puts `to` in place of `from`, which is as long, wherever the text of a pack has it, and makes its digest
 * right again. */
static void change_text(loom_context *context, char *bytes, size_t num_bytes, const char *from,
                        const char *to) {
    loom__arena arena = {&context->memory, NULL};
    loom__pack pack;
    loom_error error = LOOM_ERROR_INIT;
    char digest[33];
    assert_int_equal(strlen(from), strlen(to));
    assert_ok(error, loom__pack_read(&arena, "a.pack", bytes, num_bytes, &pack, &error));
    char *end = bytes + ((const char *)pack.kernels[0].entry.binary - bytes);
    loom__arena_free(&arena);
    while (!end[-1]) end--;
    char *value = strstr(bytes, "\ndigest ") + strlen("\ndigest "), *text = value + 33;
    assert_non_null(memmem(text, (size_t)(end - text), from, strlen(from)));
    for (char *at = text; (at = memmem(at, (size_t)(end - at), from, strlen(from)));)
        memcpy(at, to, strlen(to));
    loom__digest(text, (size_t)(end - text), digest);
    memcpy(value, digest, 32);
}

/* Code for the processor is neither taken nor written nor, were it in a pack, looked for there. */
static void test_no_host_code(void **state) {
    (void)state;
    static const char *const CHANGES[][2] = {{"compiler nvrtc 12.4", "compiler clang 12.4"},
                                             {"=4\narch sm_90\n", "=4 \narch host\n"},
                                             {"=4\narch sm_90\n", "\ntarget host\n "}};
    static const wanted LIST[] = {{"bf16", "sm_90"}, {NULL, NULL}};
    loom_context *context = context_for(9, 0);
    loom_error error = LOOM_ERROR_INIT;
    size_t num_bytes = 0;
    for (size_t i = 0; i < sizeof CHANGES / sizeof CHANGES[0]; i++) {
        char *bytes = make_pack(LIST, &num_bytes);
        change_text(context, bytes, num_bytes, CHANGES[i][0], CHANGES[i][1]);
        assert_refused("kernel 1 of 1: it is no kernel of NVRTC for a GPU", bytes, num_bytes);
        free(bytes);
    }

    loom_plan *plan = rig_plan(context, "bf16");
    loom_kernel host = rig_kernel(plan, 0), gpu = host;
    gpu.key = "arch sm_90\n";
    gpu.compiler = "nvrtc 12.4";
    loom__pack_kernel kernels[] = {loom__pack_take(&gpu), loom__pack_take(&host)};
    loom__arena arena = {&context->memory, NULL};
    const char *record = "", *made;
    assert_fails(
        error, LOOM_INVALID, "pack", "a pack holds kernels of NVRTC for GPUs",
        loom__pack_print(context, &record, 1, kernels, &(int32_t){2}, &arena, &made, &num_bytes, &error));
    loom__pack pack = {
        .name = "a.pack", .num_kernels = 1, .kernels = (loom__pack_kernel[]){loom__pack_take(&host)}};
    context->packs = &pack;
    loom_plan *again = rig_plan(context, "bf16");
    assert_string_equal(rig_kernel(again, 0).pack, "");
    context->packs = NULL;
    loom_plan_destroy(again);
    loom_plan_destroy(plan);
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

static void test_no_pack(void **state) {
    (void)state;
    loom_context *context = context_for(9, 0);
    loom_error error = LOOM_ERROR_INIT;
    static const char OTHER[] = "attnloom pack 1\ndigest x\n";
    assert_refused("a.pack: it is no pack: it does not begin with 'attnloom pack'", "#!/bin/sh\n", 10);
    assert_refused("a.pack: it is no pack", "", 0 + 1);
    assert_fails(error, LOOM_UNSUPPORTED, "pack",
                 "a.pack: its format is 'attnloom pack 1', this library reads 'attnloom pack 3'",
                 loom_context_add_pack(context, "a.pack", OTHER, sizeof OTHER - 1, &error));
    rig_write(rig_path("empty.pack"), "");
    assert_fails(error, LOOM_INVALID, "pack", "empty.pack: it is no pack",
                 loom_context_add_pack(context, rig_path("empty.pack"), NULL, 0, &error));
    for (int is_pack = 0; is_pack < 2; is_pack++) { /* what is long is refused before it is read */
        const char *path = rig_path("long.pack");
        rig_write(path, is_pack ? "attnloom pack 3\n" : "something else\n");
        assert_int_equal(truncate(path, 3LL << 30), 0);
        error = (loom_error)LOOM_ERROR_INIT;
        assert_int_equal(loom_context_add_pack(context, path, NULL, 0, &error),
                         is_pack ? LOOM_IO : LOOM_INVALID);
        rig_expect(error.text, is_pack ? "larger than 2147483647 bytes" : "it is no pack");
    }
    const char *missing = rig_path("missing.pack");
    error = (loom_error)LOOM_ERROR_INIT;
    assert_int_equal(loom_context_add_pack(context, missing, NULL, 0, &error), LOOM_IO);
    rig_expect(error.text, "missing.pack: No such file");
    assert_fails(error, LOOM_INVALID, "bytes", "num_bytes is 7",
                 loom_context_add_pack(context, "a", NULL, 7, &error));
    assert_fails(error, LOOM_INVALID, "name", "NULL", loom_context_add_pack(context, NULL, "a", 1, &error));
    assert_fails(error, LOOM_INVALID, "context", "NULL", loom_context_add_pack(NULL, "a", "a", 1, &error));
    loom_context_destroy(context);
}

/* Of another generator, or of a toolkit that the driver does not know. */
static void test_foreign(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16", "sm_90"}, {NULL, NULL}};
    char command[1000];
    const char *path = pack_file(LIST);
    loom_error error = LOOM_ERROR_INIT;
    loom_context *context = context_for(9, 0);
    fake.version = 11080;
    assert_fails(error, LOOM_UNSUPPORTED, "pack",
                 "kernels.pack: its kernels are of CUDA 12.4|12.0 (525 or newer)|11.8",
                 loom_context_add_pack(context, path, NULL, 0, &error));
    assert_null(context->packs);
    loom_context_destroy(context);

    snprintf(command, sizeof command, "cp -r tests/fixtures/gen '%s' && echo >>'%s'", rig_path("own"),
             rig_path("own/gen/words.lua"));
    assert_int_equal(system(command), 0);
    path = rig_path("kernels.pack");
    setenv("LOOM_GEN_DIR", rig_path("own"), 1);
    context = context_for(9, 0);
    assert_fails(error, LOOM_INVALID, "pack",
                 "kernels.pack: its kernels are of library 0.1.0, generator |make the pack again",
                 loom_context_add_pack(context, path, NULL, 0, &error));
    assert_null(context->packs);
    loom_context_destroy(context);
}

/* What a pack says of its size is believed as far as it has bytes. */
static size_t largest_bytes;

static void *watched_resize(void *user, void *block, size_t bytes) {
    (void)user;
    if (bytes > largest_bytes) largest_bytes = bytes;
    if (!bytes) return free(block), NULL;
    return realloc(block, bytes);
}

static void test_false_counts(void **state) {
    (void)state;
    static const char *const COUNTS[] = {"plans 1\nkernels 1048576\n", "plans 1048576\nkernels 1\n",
                                         "plans 1\nkernels 1\nplan 1048576\n"};
    const loom__hooks hooks = {.driver = &DRIVER, .memory = {watched_resize, NULL}};
    loom_context *context = rig_context(&hooks);
    loom_error error = LOOM_ERROR_INIT;
    char text[512];
    largest_bytes = 0;
    for (size_t i = 0; i < sizeof COUNTS / sizeof COUNTS[0]; i++) {
        int length = snprintf(text, sizeof text,
                              "attnloom pack 3\ndigest 0\nlibrary 0\ngrammar 1\ngenerator 0\ntoolkit 1\n"
                              "driver 1\narchs sm_80\n%s%200s",
                              COUNTS[i], "");
        assert_refused("damaged", text, (size_t)length);
    }
    assert_true(largest_bytes && largest_bytes < 1 << 18);
    loom_context_destroy(context);
}

/* Any allocation may fail, and those after it or not. */
static int allocations_left = INT32_MAX;
static bool fails_once;

static void *scarce_resize(void *user, void *block, size_t bytes) {
    (void)user;
    if (!bytes) return free(block), NULL;
    int left = allocations_left--;
    return left > 0 || (fails_once && left < 0) ? realloc(block, bytes) : NULL;
}

static void test_record_no_memory(void **state) {
    (void)state;
    const loom__memory memory = {scarce_resize, NULL};
    static char written[1 << 20]; /* longer than what an arena has at hand */
    memset(written, 'x', sizeof written - 1);
    const loom__param_info param = {.name = written, .dtype = ""};
    const loom__record record = {
        .written = written,
        .schedule = "",
        .schedule_backward = "",
        .info = {.text = "", .dtype = "", .num_params = 1, .params = &param},
        .generated = {.target = "", .arch = "", .schedule = "", .schedule_backward = ""}};
    const char *text = NULL;
    int failures = 0;
    for (fails_once = true; !text; failures++) {
        loom__arena arena = {&memory, NULL};
        allocations_left = failures;
        text = loom__record_print(&arena, &record);
        assert_true(!text || strlen(text) > 2 * strlen(written));
        loom__arena_free(&arena);
    }
    assert_true(failures > 2);
    fails_once = false;
    allocations_left = INT32_MAX;
}

static void test_no_memory(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16 aligned", "sm_90"}, {NULL, NULL}};
    const char *path = pack_file(LIST);
    const loom__hooks hooks = {.driver = &DRIVER, .memory = {scarce_resize, NULL}};
    loom_status status = LOOM_MEMORY;
    int failures = 0;
    for (; status == LOOM_MEMORY; failures++) {
        allocations_left = INT32_MAX;
        loom_context *context = rig_context(&hooks);
        allocations_left = failures;
        status = loom_context_add_pack(context, path, NULL, 0, NULL);
        assert_true(status == LOOM_OK || !context->packs);
        allocations_left = INT32_MAX;
        loom_context_destroy(context);
    }
    assert_int_equal(status, LOOM_OK);
    assert_true(failures > 3);
}

/* -- Plans ----------------------------------------------------------------------------------------------- */

/* With a pack there is nothing to compile, nor to look for a compiler. */
static void test_plan(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16 aligned backward", "sm_90"}, {"bf16", "sm_80"}, {NULL, NULL}};
    const char *path = pack_file(LIST);
    loom_context *context = context_for(9, 0);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    assert_ok(error, plan_on_device(context, "bf16 aligned backward", LOOM_NO_COMPILE, &plan, &error));
    assert_int_equal(loom_plan_num_kernels(plan), 4);
    assert_int_equal(fake.loaded, 4);
    assert_false(context->nvrtc.searched);
    for (int32_t i = 0; i < 4; i++) {
        loom_kernel kernel = rig_kernel(plan, i);
        assert_string_equal(kernel.pack, path);
        assert_string_equal(kernel.entry, "");
        assert_string_equal(kernel.source, "");
        assert_string_equal(kernel.compiler, "nvrtc 12.4");
        assert_int_equal(kernel.cached, 1);
        assert_int_equal(kernel.registers, 40);
    }
    assert_ok(error, loom_plan_certify(plan, "result fine\n", &error));
    assert_string_equal(rig_kernel(plan, 0).certificate, "result fine\n");
    loom_plan_destroy(plan);
    assert_int_equal(fake.loaded, 0);
    assert_int_equal(access(rig_path("cache"), F_OK), -1);
    loom_context_destroy(context);
}

/* A pack in memory is used where it lies; a caller with an older loom_kernel gets what it knows. */
static void test_bytes_in_memory(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16", "sm_90"}, {NULL, NULL}};
    size_t num_bytes = 0;
    char *bytes = make_pack(LIST, &num_bytes);
    rig_remove_tree(rig_path("cache"));
    loom_context *context = context_for(9, 0);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_context_add_pack(context, "built in", bytes, num_bytes, &error));
    assert_ok(error, plan_on_device(context, "bf16", LOOM_NO_COMPILE | LOOM_ASYNC, &plan, &error));
    assert_ok(error, loom_plan_wait(plan, 60, &error));
    loom_kernel kernel = rig_kernel(plan, 0);
    assert_string_equal(kernel.pack, "built in");
    assert_true((const char *)kernel.binary > bytes && (const char *)kernel.binary < bytes + num_bytes);
    loom_kernel old = {.size = offsetof(loom_kernel, pack), .pack = "untouched"};
    assert_ok(error, loom_plan_kernel(plan, 0, &old, &error));
    assert_string_equal(old.pack, "untouched");
    assert_string_equal(old.name, "forward");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    free(bytes);
}

/* Packs come before the cache, the first added before the second. */
static void test_order(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16", "sm_90"}, {NULL, NULL}};
    size_t num_bytes = 0;
    char *bytes = make_pack(LIST, &num_bytes); /* in the cache too */
    loom_context *context = context_for(9, 0);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, plan_on_device(context, "bf16", 0, &plan, &error));
    assert_string_equal(rig_kernel(plan, 0).pack, "");
    assert_int_equal(rig_kernel(plan, 0).cached, 1);
    loom_plan_destroy(plan);
    assert_ok(error, loom_context_add_pack(context, "first", bytes, num_bytes, &error));
    assert_ok(error, loom_context_add_pack(context, "second", bytes, num_bytes, &error));
    assert_ok(error, plan_on_device(context, "bf16", 0, &plan, &error));
    assert_string_equal(rig_kernel(plan, 0).pack, "first");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    free(bytes);
}

/* What a pack lacks is compiled beside what it has. */
static void test_rest_is_compiled(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16 maps", "sm_90"}, {NULL, NULL}};
    const char *path = pack_file(LIST);
    loom_context *context = context_for(9, 0);
    loom_plan *plan = NULL;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    desc.problem = "bf16 maps";
    desc.arch = "sm_90";
    desc.device = LOOM_DEVICE_NONE;
    desc.schedule = "tile=9";
    assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
    assert_string_equal(rig_kernel(plan, 0).pack, "");
    assert_int_equal(rig_kernel(plan, 0).cached, 0);
    loom_plan_destroy(plan);
    desc.schedule = NULL;
    assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
    assert_string_equal(rig_kernel(plan, 1).pack, path);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* What is missing is named, and the line that has it built. */
static void test_missing(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16 backward", "sm_80"}, {NULL, NULL}};
    const char *path = pack_file(LIST);
    loom_context *context = context_for(9, 0);
    loom_plan *plan = NULL;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    assert_fails(
        error, LOOM_NOT_FOUND, "desc.flags",
        "3 of 3 kernels are in no pack and not in the cache (|forward-any, schedule 'tile=4', for sm_90|"
        "{\"backward bf16\", archs = {\"sm_90\"}, target = \"mma\"},",
        plan_on_device(context, "bf16 backward", LOOM_NO_COMPILE, &plan, &error));
    assert_null(plan);
    desc.problem = "bf16 backward";
    desc.target = "mma";
    desc.schedule_backward = "tile=16";
    desc.flags = LOOM_NO_COMPILE;
    desc.hint = (loom_shape){.heads_q = 8, .seq_k = 4096};
    assert_fails(
        error, LOOM_NOT_FOUND, "desc.flags",
        "{\"backward bf16\", archs = {\"sm_90\"}, target = \"mma\", schedule_backward = \"tile=16\", "
        "hint = {heads_q = 8, seq_k = 4096}},",
        loom_plan_create(context, &desc, &plan, &error));

    char problem[1600], line[1700]; /* a long problem does not push the rest of its line out */
    memset(problem, 'x', sizeof problem);
    memcpy(problem + sizeof problem - sizeof " zbf16", " zbf16", sizeof " zbf16");
    snprintf(line, sizeof line, "    {\"%s\", archs = {\"sm_90\"}, target = \"mma\"},", problem);
    error = (loom_error)LOOM_ERROR_INIT;
    assert_int_equal(plan_on_device(context, problem, LOOM_NO_COMPILE, &plan, &error), LOOM_NOT_FOUND);
    if (!strstr(error.text, line)) fail_msg("%s", error.text);
    loom_context_destroy(context);

    /* Without NVRTC, too. */
    setenv("LOOM_NVRTC_DIR", rig_path("nowhere"), 1);
    context = context_for(9, 0);
    context->nvrtc = (loom__toolchain){.searched = true, .status = LOOM_COMPILE, .failure = LOOM_ERROR_INIT};
    assert_fails(error, LOOM_NOT_FOUND, "desc.flags",
                 "3 of 3|cannot be asked without NVRTC|{\"backward bf16\"",
                 plan_on_device(context, "bf16 backward", LOOM_NO_COMPILE, &plan, &error));
    loom_context_destroy(context);
}

/* sm_86 takes sm_80 where the pack has nothing closer and it has room; sm_90 and sm_100 take neither, sm_87
 * is of a family of its own, and what runs on its own arch alone is not taken. */
static void test_older_arch(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16", "sm_80"},         {"bf16 aligned", "sm_80"},
                                  {"bf16 aligned", "sm_86"}, {"bf16 maps", "sm_90"},
                                  {"bf16 listed", "sm_87"},  {NULL, NULL}};
    static const struct {
        int major, minor, smem_bytes;
        const char *problem, *arch; /* NULL: not found */
    } CASES[] = {{8, 0, 100000, "bf16", "sm_80"},
                 {8, 6, 100000, "bf16", "sm_80"},
                 {8, 9, 100000, "bf16", "sm_80"},
                 {8, 6, 100000, "bf16 aligned", "sm_86"},
                 {8, 9, 100000, "bf16 aligned", "sm_86"},
                 {8, 6, 255, "bf16", NULL},
                 {8, 7, 100000, "bf16", NULL},
                 {8, 8, 100000, "bf16", NULL},
                 {8, 7, 100000, "bf16 listed", "sm_87"},
                 {8, 9, 100000, "bf16 listed", NULL},
                 {9, 0, 100000, "bf16", NULL},
                 {10, 0, 100000, "bf16", NULL},
                 {7, 5, 100000, "bf16", NULL},
                 {8, 6, 100000, "bf16 backward", NULL}};
    size_t num_bytes = 0;
    char *bytes = make_pack(LIST, &num_bytes);
    rig_remove_tree(rig_path("cache"));
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        loom_context *context = context_for(CASES[i].major, CASES[i].minor);
        loom_plan *plan = NULL;
        loom_error error = LOOM_ERROR_INIT;
        fake.smem_bytes = CASES[i].smem_bytes;
        assert_ok(error, loom_context_add_pack(context, "a.pack", bytes, num_bytes, &error));
        loom_status status = plan_on_device(context, CASES[i].problem, LOOM_NO_COMPILE, &plan, &error);
        if (status != (CASES[i].arch ? LOOM_OK : LOOM_NOT_FOUND))
            fail_msg("case %zu: %s: %s", i, loom_status_name(status), error.text);
        if (plan) assert_string_equal(loom_plan_text(plan, LOOM_TEXT_ARCH), CASES[i].arch);
        if (CASES[i].smem_bytes < 256)
            rig_expect(error.text, "\na.pack has sm_80 kernels that need 256 bytes of shared memory, this "
                                   "device has 255");
        loom_plan_destroy(plan);
        loom_context_destroy(context);
    }

    /* What does not load is as good as missing, but it is told. */
    for (int refusals = 1; refusals <= 3; refusals += 2) {
        loom_context *context = context_for(8, 9);
        loom_plan *plan = NULL;
        loom_error error = LOOM_ERROR_INIT;
        fake.refusals = refusals;
        assert_ok(error, loom_context_add_pack(context, "a.pack", bytes, num_bytes, &error));
        loom_status status = plan_on_device(context, "bf16 aligned", LOOM_NO_COMPILE, &plan, &error);
        assert_int_equal(status, refusals == 1 ? LOOM_OK : LOOM_NOT_FOUND);
        if (plan) assert_string_equal(loom_plan_text(plan, LOOM_TEXT_ARCH), "sm_80");
        if (!plan) rig_expect(error.text, "\na.pack has sm_86 kernels that do not load: |INVALID_IMAGE");
        loom_plan_destroy(plan);
        assert_int_equal(fake.loaded, 0);
        loom_context_destroy(context);
    }
    free(bytes);
}

/* A kernel that the driver does not take is not replaced in silence. */
static void test_does_not_load(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16", "sm_90"}, {NULL, NULL}};
    const char *path = pack_file(LIST);
    loom_context *context = context_for(9, 0);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    fake.refusals = 1;
    assert_fails(error, LOOM_DRIVER, "pack", "kernels.pack: forward-any: |CUDA_ERROR_INVALID_IMAGE",
                 plan_on_device(context, "bf16", 0, &plan, &error));
    assert_ok(error, plan_on_device(context, "bf16", 0, &plan, &error));
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* Wisdom does not take from a machine without a compiler what its packs have. */
static void test_wisdom_without_compiler(void **state) {
    (void)state;
    static const wanted LIST[] = {{"bf16", "sm_90"}, {NULL, NULL}};
    const char *path = pack_file(LIST);
    loom_context *context = context_for(9, 0);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    char digest[33];
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    assert_ok(error, loom__generator_digest(context, digest, &error));
    const loom__wisdom_entry entry = {.device = "Test 0",
                                      .units = 100,
                                      .problem = "bf16",
                                      .target = "mma",
                                      .class = {1 << 18, 1024, 2048},
                                      .generator = digest,
                                      .ns = 1,
                                      .schedule = "tile=40"};
    assert_ok(error, loom__wisdom_learn(context, &entry, NULL, &error));
    assert_ok(error, plan_on_device(context, "bf16", 0, &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=40");
    loom_plan_destroy(plan);
    rig_remove_tree(rig_path("cache"));
    context->nvrtc.status = LOOM_COMPILE; /* as if the search had found none */
    loom__fail(&context->nvrtc.failure, LOOM_COMPILE, "nvrtc", "there is no NVRTC");
    assert_ok(error, plan_on_device(context, "bf16", 0, &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=4");
    assert_true(rig_kernel(plan, 0).pack[0] != 0);
    loom_plan_destroy(plan);
    assert_fails(error, LOOM_COMPILE, "nvrtc", "there is no NVRTC",
                 plan_on_device(context, "bf16 backward", 0, &plan, &error));
    loom_context_destroy(context);
}

/* Nor does what the library ships, on any machine: packs were made without it. */
static void test_shipped_wisdom(void **state) {
    (void)state;
    static const char SHIPPED[] =
        "wisdom1 device=\"Test 0\" units=100 target=mma pass=forward rows=262144 queries=1024 keys=2048 ns=7 "
        "generator=0123456789abcdef0123456789abcdef schedule=\"tile=40\" problem=bf16\n";
    static const loom__hooks HOOKS = {.driver = &DRIVER, .shipped_wisdom = SHIPPED};
    static const wanted LIST[] = {{"bf16", "sm_90"}, {NULL, NULL}};
    const char *path = pack_file(LIST);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_context_destroy(context_for(9, 0));
    loom_context *context = rig_context(&HOOKS);
    assert_ok(error, plan_on_device(context, "bf16", 0, &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=40");
    loom_plan_destroy(plan);
    rig_remove_tree(rig_path("cache"));
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    assert_ok(error, plan_on_device(context, "bf16", 0, &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=4");
    assert_string_not_equal(rig_kernel(plan, 0).pack, "");
    loom_plan_destroy(plan);
    assert_int_equal(fake.loaded, 0);
    loom_context_destroy(context);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_what_is_written_is_read, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_bytes_are_stable, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_records, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_certificate, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_damage, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_no_host_code, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_no_pack, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_false_counts, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_foreign, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_record_no_memory, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_no_memory, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_plan, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_bytes_in_memory, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_order, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_rest_is_compiled, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_missing, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_older_arch, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_does_not_load, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_wisdom_without_compiler, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_shipped_wisdom, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
