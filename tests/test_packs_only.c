/* test_packs_only.c - the library without generator and compilers (ATTNLOOM_RUNTIME_ONLY), with packs that
 * the program `attnloom` makes of the real generator's kernels. A library with the interface of NVRTC stands
 * in for it, and a table of functions for the driver. */
#include "runtime_rig.h"

#include "device_rig.h"
#include "pack.h"
#include "plan.h"

/* Has `attnloom pack`, which lies beside the folder of this program, make a pack. */
static const char *make_pack(const char *name, const char *manifest, const char *archs) {
    char program[600], command[3000];
    ssize_t length = readlink("/proc/self/exe", program, 500);
    assert_true(length > 0);
    program[length] = 0;
    *strrchr(program, '/') = 0;
    strcpy(strrchr(program, '/'), "/attnloom");
    rig_write(rig_path("kernels.lua"), manifest);
    setenv("LOOM_NVRTC_DIR", rig_nvrtc(), 1);
    snprintf(command, sizeof command, "env -u LOOM_GEN_DIR '%s' pack '%s' --arch %s -o '%s' 2>'%s'", program,
             rig_path("kernels.lua"), archs, rig_path(name), rig_path("pack.log"));
    if (system(command) != 0) {
        snprintf(command, sizeof command, "cat '%s'", rig_path("pack.log"));
        fail_msg("attnloom pack failed: %d", system(command));
    }
    return rig_path(name);
}

static loom_status plan_for(loom_context *context, const char *problem, const char *target, loom_shape hint,
                            loom_plan **plan, loom_error *error) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = problem;
    desc.target = target;
    desc.hint = hint;
    *error = (loom_error)LOOM_ERROR_INIT;
    return loom_plan_create(context, &desc, plan, error);
}

static const loom_shape ANY;

/* Expects a plan of that target, arch and schedule (NULL: any). */
static void expect_plan(loom_context *context, const char *problem, const char *target, loom_shape hint,
                        const char *found_target, const char *arch, const char *schedule) {
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, plan_for(context, problem, target, hint, &plan, &error));
    assert_int_equal(error.status, LOOM_OK);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_TARGET), found_target);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_ARCH), arch);
    if (schedule) assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), schedule);
    assert_int_equal(fake.loaded, loom_plan_num_kernels(plan));
    for (int32_t i = 0; i < loom_plan_num_kernels(plan); i++)
        assert_string_not_equal(rig_kernel(plan, i).pack, "");
    loom_plan_destroy(plan);
}

static void test_plans(void **state) {
    (void)state;
    static const char MANIFEST[] =
        "return {'bf16 d=64 causal backward', {'bf16 d=64 causal backward', target = 'mma'}}";
    const char *path = make_pack("a.pack", MANIFEST, "sm_80,sm_90a");
    loom_error error = LOOM_ERROR_INIT;
    char text[256];
    size_t needed = 0;
    loom_context *context = context_for(9, 0);
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    expect_plan(context, "bf16 d=64 causal backward", NULL, ANY, "hopper", "sm_90", NULL);
    expect_plan(context, "bf16 d=64 mask={k <= q} backward", NULL, ANY, "hopper", "sm_90", NULL);
    expect_plan(context, "bf16 d=64 causal backward", "mma", ANY, "mma", "sm_90", NULL);
    assert_ok(error, loom_problem_canonical(context, "bf16 d=64 causal backward", text, sizeof text, &needed,
                                            &error));
    assert_string_equal(text, "bf16 d=64 mask={k <= q} backward");
    loom_context_destroy(context);

    context = context_for(8, 6);
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    expect_plan(context, "bf16 d=64 causal backward", NULL, ANY, "mma", "sm_80", NULL);
    loom_context_destroy(context);

    context = context_for(9, 1); /* code for sm_90a runs on 9.0 alone */
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    expect_plan(context, "bf16 d=64 causal backward", NULL, ANY, "mma", "sm_90", NULL);
    loom_context_destroy(context);

    context = context_for(8, 6);
    loom_plan *plan = NULL;
    fake.smem_bytes = 1000;
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    assert_fails(error, LOOM_NOT_FOUND, "desc.problem",
                 "a.pack has sm_80 kernels that need |this device has 1000",
                 plan_for(context, "bf16 d=64 causal backward", NULL, ANY, &plan, &error));
    loom_context_destroy(context);
}

/* An old driver that encodes no tensor maps gets mma. */
static void test_driver_without_maps(void **state) {
    (void)state;
    static const char MANIFEST[] = "return {'bf16 d=64', {'bf16 d=64', target = 'mma'}}";
    loom__driver_api old = DRIVER;
    old.map_encode = NULL;
    const loom__hooks hooks = {.driver = &old};
    const char *path = make_pack("a.pack", MANIFEST, "90");
    loom_error error = LOOM_ERROR_INIT;
    loom_context_destroy(context_for(9, 0));
    loom_context *context = rig_context(&hooks);
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    expect_plan(context, "bf16 d=64", NULL, ANY, "mma", "sm_90", NULL);
    loom_context_destroy(context);
}

/* Archs and schedules have the names that a manifest gives them. */
static void test_names(void **state) {
    (void)state;
    static const char MANIFEST[] =
        "return {{'bf16 d=64 backward', target = 'mma', schedule = 'warps=4  tile=64x64',"
        " schedule_backward = 'warps=4  tile=32x128'}}";
    static const char *const ARCHS[] = {"80", "sm_80", "90", "90a", "sm_90", "sm_90a"};
    const char *path = make_pack("a.pack", MANIFEST, "80,90a");
    loom_error error = LOOM_ERROR_INIT;
    loom_context *context = context_for(8, 0);
    loom_plan *plan = NULL;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    desc.problem = "bf16 d=64 backward";
    desc.device = LOOM_DEVICE_NONE;
    desc.schedule = "warps=4  tile=64x64";
    desc.schedule_backward = "warps=4  tile=32x128";
    for (size_t i = 0; i < sizeof ARCHS / sizeof ARCHS[0]; i++) {
        desc.arch = ARCHS[i];
        assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
        assert_string_equal(loom_plan_text(plan, LOOM_TEXT_ARCH), strstr(ARCHS[i], "80") ? "sm_80" : "sm_90");
        loom_plan_destroy(plan);
    }
    desc.arch = "80a";
    assert_fails(error, LOOM_NOT_FOUND, "desc.problem", "for 80a",
                 loom_plan_create(context, &desc, &plan, &error));
    desc.arch = "80";
    desc.schedule = "warps=4 tile=64x64";
    assert_fails(error, LOOM_NOT_FOUND, "desc.problem", "schedule warps=4 tile=64x64",
                 loom_plan_create(context, &desc, &plan, &error));
    loom_context_destroy(context);
}

/* Of several records that of the hint, else that without. */
static void test_hints(void **state) {
    (void)state;
    static const char MANIFEST[] =
        "return {{'bf16 d=64', target = 'mma', schedule = 'tile=64x64 warps=4', hint = {seq_k = 512}},"
        "{'bf16 d=64', target = 'mma', schedule = 'tile=128x64 warps=4'}}";
    const char *path = make_pack("a.pack", MANIFEST, "80");
    loom_error error = LOOM_ERROR_INIT;
    loom_plan *plan = NULL;
    loom_context *context = context_for(8, 0);
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    assert_ok(error, plan_for(context, "bf16 d=64", NULL, (loom_shape){.seq_k = 512}, &plan, &error));
    rig_expect(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=64x64 ");
    loom_plan_destroy(plan);
    assert_ok(error, plan_for(context, "bf16 d=64", NULL, (loom_shape){.seq_k = 1024}, &plan, &error));
    rig_expect(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=128x64 ");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

enum { MAX_PACK_KERNELS = 64 };

/* Adds a pack with this record and the kernels of `from`; its digest is right. */
static loom_status add_record(loom_context *context, loom_context *from, const char *record,
                              loom__arena *arena, loom_error *error) {
    const loom__pack *pack = from->packs;
    loom__pack_kernel kernels[MAX_PACK_KERNELS];
    const char *bytes = NULL;
    size_t num_bytes = 0;
    int32_t num_kernels = pack->num_kernels;
    assert_true(num_kernels <= MAX_PACK_KERNELS);
    memcpy(kernels, pack->kernels, (size_t)pack->num_kernels * sizeof *kernels);
    assert_ok(*error,
              loom__pack_print(from, &record, 1, kernels, &num_kernels, arena, &bytes, &num_bytes, error));
    return loom_context_add_pack(context, "changed", bytes, num_bytes, error);
}

static const char DOCUMENTS[] =
    "fp16 d=64 mask={doc[0, q] == doc[0, k]} params={doc: i32[4, ceil(seq_k/2)]} backward";

/* Launches both passes of a plan of DOCUMENTS, of any record. */
static void launch_documents(loom_plan *plan) {
    static _Alignas(256) unsigned char memory[1 << 20];
    loom_param doc = {.data = memory, .stride = {16, 1}};
    loom_args args = LOOM_ARGS_INIT;
    args.shape = (loom_shape){1, 1, 1, 32, 32};
    args.q = args.k = args.v = args.dout = loom_dense(memory, 32, 1, 64);
    args.o = args.dq = args.dk = args.dv = loom_dense(memory + 8192, 32, 1, 64);
    args.lse = loom_dense_lse(memory + 16384, 1, 32);
    args.params = &doc;
    args.num_params = 1;
    args.workspace = memory + sizeof memory / 2;
    args.workspace_bytes = sizeof memory / 2;
    loom_forward(plan, &args, &fake, NULL);
    loom_backward(plan, &args, &fake, NULL);
}

/* Any number of a record may be any other, under a right digest: it is refused, or launches stay inside of
 * their buffers. */
static void test_changed_records(void **state) {
    (void)state;
    static const char *const NUMBERS[] = {"0", "65535", "2147483647", "9223372036854775807"};
    char manifest[256], changed[1 << 16];
    snprintf(manifest, sizeof manifest, "return {'%s'}", DOCUMENTS);
    const char *path = make_pack("a.pack", manifest, "90a");
    loom_error error = LOOM_ERROR_INIT;
    loom_plan *plan = NULL;
    loom_context *from = context_for(9, 0);
    assert_ok(error, loom_context_add_pack(from, path, NULL, 0, &error));
    const char *record = from->packs->plans[0];
    assert_true(strlen(record) + 32 < sizeof changed);
    loom__arena arena = {&from->memory, NULL};
    for (const char *at = record; (at = strpbrk(at, " /"));) {
        size_t digits = strspn(++at, "0123456789");
        for (size_t n = 0; digits && n < sizeof NUMBERS / sizeof NUMBERS[0]; n++) {
            loom_context *context = context_for(9, 0);
            bool is_offset = strncmp(at - 5, "\nrow ", 5) == 0;
            snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - record), record, NUMBERS[n],
                     at + digits);
            assert_ok(error, add_record(context, from, changed, &arena, &error));
            loom_status status = plan_for(context, DOCUMENTS, NULL, ANY, &plan, &error);
            if (is_offset && n) assert_int_equal(status, LOOM_INTERNAL);
            if (status == LOOM_OK) launch_documents(plan);
            loom_plan_destroy(plan);
            loom_context_destroy(context);
            loom__arena_free(&arena);
        }
    }
    const char *end = strstr(record, "\nkernels ");
    loom_context *context = context_for(9, 0);
    snprintf(changed, sizeof changed, "%.*s\nkernels 0\n", (int)(end - record), record);
    assert_ok(error, add_record(context, from, changed, &arena, &error));
    assert_fails(error, LOOM_INTERNAL, "pack", "cannot be read",
                 plan_for(context, DOCUMENTS, NULL, ANY, &plan, &error));
    loom_context_destroy(context);
    loom__arena_free(&arena);
    loom_context_destroy(from);
}

/* What a launch packs comes from the record: arguments, grid, workspace. */
static void test_launch(void **state) {
    (void)state;
    static _Alignas(256) unsigned char memory[1 << 16];
    const char *path = make_pack(
        "a.pack", "return {'fp16 d=64 mask={doc[q] == doc[k]} params={doc: i32[seq_k]} backward'}", "80");
    loom_error error = LOOM_ERROR_INIT;
    loom_plan *plan = NULL;
    loom_context *context = context_for(8, 0);
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    assert_ok(error, plan_for(context, "fp16 d=64 mask={doc[q] == doc[k]} params={doc: i32[seq_k]} backward",
                              NULL, ANY, &plan, &error));
    assert_int_equal(loom_plan_param(plan, "doc"), 0);
    loom_param doc = {.data = memory, .stride = {1}};
    loom_args args = LOOM_ARGS_INIT;
    args.shape = (loom_shape){1, 1, 1, 32, 32};
    args.q = args.k = args.v = loom_dense(memory, 32, 1, 64);
    args.o = loom_dense(memory + 8192, 32, 1, 64);
    args.params = &doc;
    args.num_params = 1;
    size_t forward_bytes = 0, backward_bytes = 0;
    assert_ok(error, loom_workspace_bytes(plan, LOOM_FORWARD, &args, &forward_bytes, &error));
    assert_ok(error, loom_workspace_bytes(plan, LOOM_BACKWARD, &args, &backward_bytes, &error));
    assert_true(forward_bytes > 0 && backward_bytes >= 32 * 64 * sizeof(float) &&
                backward_bytes < sizeof memory / 2);
    args.workspace = memory + sizeof memory / 2;
    args.workspace_bytes = sizeof memory / 2;
    assert_ok(error, loom_forward(plan, &args, &fake, &error));
    assert_true(fake.launches >= 2); /* lists of tiles, and the kernel */
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* Kernels of packs are there at once: nothing stands in for them, and nothing is left to upgrade to. */
static void test_stand_in(void **state) {
    (void)state;
    const char *path = make_pack("a.pack", "return {'bf16 d=64 causal'}", "80");
    loom_error error = LOOM_ERROR_INIT;
    loom_plan *plan = NULL;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_context *context = context_for(8, 0);
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    desc.problem = "bf16 d=64 causal";
    desc.flags = LOOM_ASYNC | LOOM_STAND_IN;
    assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
    assert_string_not_equal(rig_kernel(plan, 0).pack, "");
    assert_ok(error, loom_plan_wait(plan, 0, &error));
    assert_ok(error, loom_plan_upgrade(plan, &error));
    loom_plan_destroy(plan);
    desc.problem = "bf16 d=64";
    assert_fails(error, LOOM_NOT_FOUND, "desc.problem", "no pack of the context has this problem",
                 loom_plan_create(context, &desc, &plan, &error));
    assert_null(plan);
    loom_context_destroy(context);
}

static void test_missing(void **state) {
    (void)state;
    const char *path = make_pack("a.pack", "return {'bf16 d=64 causal'}", "80");
    loom_error error = LOOM_ERROR_INIT;
    loom_plan *plan = NULL;
    loom_context *context = context_for(9, 0);
    assert_fails(error, LOOM_NOT_FOUND, "desc.problem",
                 "no pack of the context has this problem|{\"bf16 d=64 causal\", archs = {\"sm_90\"}},",
                 plan_for(context, "bf16 d=64 causal", NULL, ANY, &plan, &error));
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    assert_fails(error, LOOM_NOT_FOUND, "desc.problem",
                 "must be that of the manifest or canonical, for sm_90|    {\"bf16 causal d=64\", archs = "
                 "{\"sm_90\"}},",
                 plan_for(context, "bf16 causal d=64", NULL, ANY, &plan, &error));
    assert_fails(error, LOOM_NOT_FOUND, "desc.problem",
                 "the problem for sm_90, target hopper|{\"bf16 d=64 causal\", archs = {\"sm_90\"}, target = "
                 "\"hopper\"},",
                 plan_for(context, "bf16 d=64 causal", "hopper", ANY, &plan, &error));
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "bf16 d=64 causal";
    desc.device = LOOM_DEVICE_HOST;
    for (int i = 0; i < 2; i++) {
        assert_fails(error, LOOM_COMPILE, "library", "ATTNLOOM_RUNTIME_ONLY",
                     loom_plan_create(context, &desc, &plan, &error));
        desc.problem = "bf16 d=80"; /* that no pack has */
    }
    loom_context_destroy(context);

    /* Nothing is timed without compilers, and packs have no schedule by wisdom. */
    context = context_for(8, 0);
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    desc.problem = "bf16 d=64 causal";
    desc.device = 0;
    desc.rigor = LOOM_MEASURE;
    assert_fails(error, LOOM_COMPILE, "library", "ATTNLOOM_RUNTIME_ONLY",
                 loom_plan_create(context, &desc, &plan, &error));
    desc.rigor = LOOM_WISDOM_ONLY;
    assert_fails(error, LOOM_NOT_FOUND, "desc.rigor", "no wisdom near",
                 loom_plan_create(context, &desc, &plan, &error));
    assert_null(plan);
    loom_context_destroy(context);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_plans, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_driver_without_maps, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_names, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_hints, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_changed_records, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_launch, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_stand_in, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_missing, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
