/* test_generator.c - the traffic with Lua: results, errors of every kind, the sandbox, sources and digests.
 */
#include "runtime_rig.h"

#include "generator.h"

static loom__arena arena_of(loom_context *context) { return (loom__arena){&context->memory, NULL}; }

static void test_problem(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom__arena arena = arena_of(context);
    loom__problem_info info;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__problem_query(context, "fp32 params backward", &arena, &info, &error));
    assert_string_equal(info.text, "backward fp32 params");
    assert_string_equal(info.dtype, "fp32");
    assert_int_equal(info.d, 16);
    assert_int_equal(info.dv, 8);
    assert_true(info.backward);
    assert_false(info.deterministic);
    assert_null(info.mask);
    assert_int_equal(info.num_params, 3);
    assert_string_equal(info.params[1].name, "n");
    assert_int_equal(info.params[1].num_dims, 0);
    assert_string_equal(info.params[2].dtype, "i32");
    assert_int_equal(info.params[2].num_dims, 2);
    assert_string_equal(info.params[2].dims[0], "seq_k");
    assert_string_equal(info.params[2].dims[1], "ceil(seq_q/64)");
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

/* What the generator refuses comes through whole; what it does wrong is INTERNAL; it is usable after either.
 */
static void test_errors(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom__arena arena = arena_of(context);
    loom__problem_info info;
    loom_error error;
    assert_fails(error, LOOM_INVALID, "problem.words", "1: 'refused' is refused",
                 loom__problem_query(context, "a refused", &arena, &info, &error));
    assert_int_equal(error.text_offset, 2);
    assert_fails(error, LOOM_INTERNAL, "generator", "gen/main.lua:|raised on purpose",
                 loom__problem_query(context, "raise", &arena, &info, &error));
    assert_int_equal(error.text_offset, -1);
    assert_fails(error, LOOM_INTERNAL, "generator", "'no_such_name' is not defined",
                 loom__problem_query(context, "undefined", &arena, &info, &error));
    assert_fails(error, LOOM_INTERNAL, "generator", "'io' is not defined",
                 loom__problem_query(context, "escape", &arena, &info, &error));
    assert_ok(error, loom__problem_query(context, "fine", &arena, &info, &error));

    loom__request request = {.problem = "fp32 unsupported", .arch = "sm_75"};
    loom__generated generated;
    assert_fails(error, LOOM_UNSUPPORTED, "problem.dtype", "not on sm_75",
                 loom__generator_plan(context, &request, &arena, &generated, &error));
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

static void test_plan(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom__arena arena = arena_of(context);
    loom_error error = LOOM_ERROR_INIT;
    loom__generated generated;
    loom__request request = {.problem = "backward aligned", .arch = "sm_90", .schedule = "tile=5"};
    assert_ok(error, loom__generator_plan(context, &request, &arena, &generated, &error));
    assert_string_equal(generated.target, "mma");
    assert_string_equal(generated.schedule, "tile=5");
    assert_string_equal(generated.schedule_backward, "tile=8");
    assert_int_equal(generated.num_kernels, 4);
    assert_string_equal(generated.kernels[0].variant, "aligned");
    const loom__kernel_text *keys = &generated.kernels[3];
    assert_string_equal(keys->name, "keys");
    assert_string_equal(keys->symbol, "fake_keys");
    assert_string_equal(keys->grid_heads, "heads_kv");
    assert_int_equal(keys->grid_rows, 8);
    assert_int_equal(keys->num_needs, 2);
    assert_string_equal(keys->needs[1], "dv");
    assert_int_equal(keys->num_regions, 1);
    assert_int_equal(keys->regions[0].bytes, 12);
    assert_string_equal(keys->regions[0].dims[2], "seq_q");
    assert_int_equal(keys->num_rows, 18);
    assert_string_equal(keys->rows[8].source, "workspace.sums");
    assert_string_equal(keys->rows[8].type, "ptr");
    assert_int_equal(keys->rows[8].offset, 64);
    const char *source = NULL;
    assert_ok(error, loom__generator_source(context, &generated, 3, &arena, &source, &error));
    rig_expect(source, "void fake_keys(|rest[112 - sizeof");
    loom__generator_release(context, &generated);

    const char *text = NULL;
    request.hint = (loom_shape){.batch = 2, .seq_k = 77};
    assert_ok(error, loom__generator_standalone(context, &request, LOOM_BACKWARD, &arena, &text, &error));
    assert_string_equal(text, "// standalone backward aligned backward\n");
    assert_ok(error, loom__generator_why(context, &request, LOOM_FORWARD, &arena, &text, &error));
    assert_string_equal(text, "backward aligned forward batch 2 seq_k 77\n");
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

static void test_candidates(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom__arena arena = arena_of(context);
    loom_error error = LOOM_ERROR_INIT;
    const loom__candidate *list = NULL;
    int32_t num = 0;
    loom__request request = {.problem = "backward", .arch = "sm_90"};
    assert_ok(error,
              loom__generator_candidates(context, &request, LOOM_BACKWARD, &arena, &list, &num, &error));
    assert_int_equal(num, 2);
    assert_string_equal(list[0].text, "tile=4");
    assert_string_equal(list[1].text, "backward sm_90");
    assert_true(list[0].cost == 1 && list[1].cost == 2.5);
    request.problem = "refused";
    assert_fails(error, LOOM_INVALID, "problem.words", "refused",
                 loom__generator_candidates(context, &request, LOOM_FORWARD, &arena, &list, &num, &error));
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

/* Copies the test generator and returns where it is. */
static const char *copy_generator(void) {
    static char folder[400];
    char command[1200];
    snprintf(folder, sizeof folder, "%s/own", rig_folder);
    snprintf(command, sizeof command, "cp -r tests/fixtures/gen '%s'", folder);
    assert_int_equal(system(command), 0);
    return folder;
}

static void digest_of(char digest[33]) {
    loom_context *context = rig_context(NULL);
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__generator_digest(context, digest, &error));
    loom_context_destroy(context);
}

static void test_digest(void **state) {
    (void)state;
    char first[33], copied[33], changed[33], embedded[33], tree[33];
    digest_of(first);
    setenv("LOOM_GEN_DIR", copy_generator(), 1);
    digest_of(copied);
    assert_string_equal(first, copied);
    rig_write(rig_path("own/templates/fake/more.c"), "");
    digest_of(changed);
    assert_string_not_equal(first, changed);

    unsetenv("LOOM_GEN_DIR");
    digest_of(embedded);
    setenv("LOOM_GEN_DIR", ".", 1);
    digest_of(tree);
    if (strcmp(embedded, tree)) fail_msg("gen/ or templates/ changed after the build: build again");
}

static void test_missing_folder(void **state) {
    (void)state;
    setenv("LOOM_GEN_DIR", rig_path("nowhere"), 1);
    loom_context *context = rig_context(NULL);
    loom__arena arena = arena_of(context);
    loom__problem_info info;
    loom_error error;
    assert_fails(error, LOOM_IO, "LOOM_GEN_DIR", "nowhere/gen|No such file",
                 loom__problem_query(context, "a", &arena, &info, &error));
    assert_fails(error, LOOM_IO, "LOOM_GEN_DIR", "nowhere/gen",
                 loom__problem_query(context, "a", &arena, &info, &error));
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

/* A generator that does not parse, lacks a function or answers nonsense. */
static void test_broken_generator(void **state) {
    (void)state;
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"return {", "gen/main.lua:1:"},
        {"local x = 1", "gen/main.lua returns nothing"},
        {"return {}", "main.problem does not exist"},
        {"return {problem = function() return {text = 'a', dtype = 'fp32', d = 'wide'} end}",
         "'d' is not an integer"},
        {"return {problem = function() return {dtype = 'fp32'} end}", "left out 'text'"},
        {"return {problem = function() return nil, 'no' end}", "table expected"},
        {"return {problem = function() return require 'nothing' end}", "gen/nothing.lua does not exist"},
        {"return {problem = function() return require 'main' end}", "left out 'text'"},
        {"require 'main' return {}", "requires itself"},
        {"leak = 1 return {}", "'leak' is not defined"},
        {"return {problem = function() return {text = ('x'):rep(1 << 40)} end}",
         "resulting string too large"},
        {"return {problem = function() local t = {} while true do t[#t + 1] = ('x'):rep(#t) end end}",
         "more than 536870912 bytes of memory"},
        {"return {problem = function() while true do end end}",
         "more than 3000000 instructions|LOOM_GEN_DIR"},
        {"return {problem = function() while true do pcall(function() while true do end end) end end}",
         "more than 3000000 instructions"},
        {"while true do end", "more than 3000000 instructions"},
        {"return {problem = function() return {text = string.dump(error)} end}",
         "a nil value (field 'dump')"},
        {"return {problem = function() return assert(load('\\27Lua', 'x', 'b')) end}",
         "attempt to load a binary chunk"},
        {"return {problem = function() error(load('return x', 'c', 'b', {x = 'seven'})()) end}", "seven"},
        {"return {problem = function() setmetatable({}, {__gc = function() end}) end}", "may not have __gc"},
        {"return {problem = function() return {text = getmetatable(setmetatable({}, {__metatable = "
         "'left'}))} end}",
         "left out 'dtype'"},
        {"local function f() return f() + 1 end return {problem = f}", "stack overflow"},
    };
    setenv("LOOM_GEN_DIR", copy_generator(), 1);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        rig_write(rig_path("own/gen/main.lua"), cases[i].text);
        loom__hooks hooks = {.generator_instructions = 3000000};
        loom_context *context = rig_context(&hooks);
        loom__arena arena = arena_of(context);
        loom__problem_info info;
        loom_error error = LOOM_ERROR_INIT;
        loom_status status = loom__problem_query(context, "a", &arena, &info, &error);
        if (status != LOOM_INTERNAL) fail_msg("case %zu gave %s", i, loom_status_name(status));
        rig_expect(error.text, cases[i].words);
        loom__arena_free(&arena);
        loom_context_destroy(context);
    }
}

/* The embedded generator answers, from a folder without any of its files. */
static void test_embedded(void **state) {
    (void)state;
    char before[4096];
    unsetenv("LOOM_GEN_DIR");
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir("/"), 0);
    loom_context *context = rig_context(NULL);
    loom__arena arena = arena_of(context);
    loom__problem_info info;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__problem_query(context, "bf16 d=128 causal", &arena, &info, &error));
    assert_string_equal(info.text, "bf16 d=128 mask={k <= q}");
    assert_fails(error, LOOM_UNSUPPORTED, "problem.d", "7",
                 loom__problem_query(context, "bf16 d=7", &arena, &info, &error));
    assert_fails(error, LOOM_INVALID, "problem.d", "seven",
                 loom__problem_query(context, "bf16 d=seven", &arena, &info, &error));
    loom__arena_free(&arena);
    loom_context_destroy(context);
    assert_int_equal(chdir(before), 0);
}

/* Manifests come through whole and have limits that no other Lua has; the generator is usable after any. */
static void test_manifest(void **state) {
    (void)state;
    unsetenv("LOOM_GEN_DIR");
    loom_context *context = rig_context(NULL);
    loom__arena arena = arena_of(context);
    loom__manifest manifest;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__generator_manifest(
                         context,
                         "return {'bf16 d=64', {'fp16 d=80 causal backward', target = 'mma',"
                         " archs = {'sm_75', '90a'}, schedule_backward = 'x', hint = {seq_k = 9}}}",
                         "k.lua", "sm_80,sm_90a", &arena, &manifest, &error));
    assert_int_equal(manifest.num, 3);
    assert_string_equal(manifest.entries[0].problem, "bf16 d=64");
    assert_string_equal(manifest.entries[0].arch, "sm_80");
    assert_null(manifest.entries[0].target);
    assert_string_equal(manifest.entries[1].arch, "sm_90");
    const loom__manifest_entry *e = &manifest.entries[2];
    assert_string_equal(e->place, "k.lua:1");
    assert_string_equal(e->problem, "fp16 d=80 causal backward"); /* as written */
    assert_string_equal(e->arch, "sm_90");
    assert_string_equal(e->target, "mma");
    assert_null(e->schedule);
    assert_string_equal(e->schedule_backward, "x");
    assert_true(e->hint.seq_k == 9 && e->hint.batch == 0);

    static const struct {
        const char *text, *words;
    } CASES[] = {{"return {\n'bf16 d=seven'}", "k.lua:2: entry 1|problem.d"},
                 {"\nwhile true do end", "k.lua:2: it ran more than 100000000 instructions"},
                 {"local s = ('x'):rep(5e6) s = s .. s .. s\nfor i = 1, 1e7 do local t = s .. i end",
                  "k.lua:2: it ran longer than 10 seconds, the limit of manifests"},
                 {"local t = {} while true do t[#t + 1] = ('x'):rep(#t) end",
                  "k.lua: it used more than 67108864 bytes of memory"}};
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        assert_fails(
            error, LOOM_INVALID, "manifest", CASES[i].words,
            loom__generator_manifest(context, CASES[i].text, "k.lua", "90", &arena, &manifest, &error));
    }
    static const char FINE[] = "return {{'bf16 d=64', archs = {'sm_80'}}}";
    assert_fails(error, LOOM_INVALID, "arch", "arch 'sm_8' is not known",
                 loom__generator_manifest(context, FINE, "k.lua", "sm_8", &arena, &manifest, &error));
    assert_ok(error, loom__generator_manifest(context, FINE, "k.lua", "90", &arena, &manifest, &error));
    assert_null(manifest.entries[0].arch);
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_problem, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_errors, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_plan, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_candidates, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_digest, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_missing_folder, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_broken_generator, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_embedded, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_manifest, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
