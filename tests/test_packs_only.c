/* test_packs_only.c - the library without generator and compilers (ATTNLOOM_RUNTIME_ONLY), with packs that
 * the program `attnloom` makes of the real generator's kernels. A library with the interface of NVRTC stands
 * in for it, and a table of functions for the driver. */
#include "runtime_rig.h"

#include "device_rig.h"
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

static void test_missing(void **state) {
    (void)state;
    const char *path = make_pack("a.pack", "return {'bf16 d=64 causal'}", "80");
    loom_error error = LOOM_ERROR_INIT;
    loom_plan *plan = NULL;
    loom_context *context = context_for(9, 0);
    assert_fails(error, LOOM_NOT_FOUND, "problem", "bf16 d=64 causal",
                 plan_for(context, "bf16 d=64 causal", NULL, ANY, &plan, &error));
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
    assert_fails(error, LOOM_NOT_FOUND, "problem", "must be that of the manifest|    bf16 causal d=64",
                 plan_for(context, "bf16 causal d=64", NULL, ANY, &plan, &error));
    assert_fails(error, LOOM_NOT_FOUND, "desc.problem",
                 "the problem for sm_90, target hopper|{\"bf16 d=64 causal\", archs = {\"sm_90\"}, target = "
                 "\"hopper\"},",
                 plan_for(context, "bf16 d=64 causal", "hopper", ANY, &plan, &error));
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "bf16 d=64 causal";
    desc.device = LOOM_DEVICE_HOST;
    assert_fails(error, LOOM_COMPILE, "library", "ATTNLOOM_RUNTIME_ONLY",
                 loom_plan_create(context, &desc, &plan, &error));

    loom_context_destroy(context);

    /* Nothing is timed without compilers, and packs have no schedule by wisdom. */
    context = context_for(8, 0);
    assert_ok(error, loom_context_add_pack(context, path, NULL, 0, &error));
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
        cmocka_unit_test_setup_teardown(test_hints, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_launch, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_missing, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
