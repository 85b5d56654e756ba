/* test_compile.c - finding the compilers, what they are asked, and what is said when they refuse. A library
 * with the interface of NVRTC stands in for it, but for the last test. */
#include "runtime_rig.h"

#include <math.h>

#include <signal.h>

#include "cache.h"
#include "compile.h"
#include "device.h"

static int driver_version = 12040;

static int version_of_driver(int *version) {
    *version = driver_version;
    return 0;
}

static int name_of_error(int result, const char **name) {
    (void)result;
    *name = "CUDA_ERROR_TEST";
    return 0;
}

/* A driver that only tells its version. */
static const loom__driver_api DRIVER = {.driver_version = version_of_driver, .error_name = name_of_error};
static const loom__hooks HOOKS = {.driver = &DRIVER};

/* A folder with the stand-in as libnvrtc.so.MAJOR and builtins of that version. */
static const char *make_nvrtc(const char *folder, int major, int minor) {
    char command[4000], path[700];
    snprintf(path, sizeof path, "%s", rig_path(folder));
    snprintf(command, sizeof command,
             "mkdir -p '%s' && cp '%s/libnvrtc.so.12' '%s/libnvrtc.so.%d' && touch "
             "'%s/libnvrtc-builtins.so.%d.%d'",
             path, rig_nvrtc(), path, major, path, major, minor);
    assert_int_equal(system(command), 0);
    return rig_path(folder);
}

static loom_status plan_for(loom_context *context, const char *problem, const char *arch, loom_plan **plan,
                            loom_error *error) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = problem;
    desc.device = LOOM_DEVICE_NONE;
    desc.arch = arch;
    return loom_plan_create(context, &desc, plan, error);
}

/* -- Finding NVRTC --------------------------------------------------------------------------------------- */

static void test_given_folder(void **state) {
    (void)state;
    setenv("LOOM_NVRTC_DIR", rig_nvrtc(), 1);
    loom_context *context = rig_context(&HOOKS);
    const loom__toolchain *found = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__nvrtc_find(context, &found, &error));
    assert_string_equal(found->name, "nvrtc 12.4"); /* no builtins beside: it was asked */
    assert_null(found->library);                    /* and closed again */
    rig_expect(found->identity, "compiler nvrtc 12.4, |options --ptxas-options=-v\n");
    loom_context_destroy(context);
}

/* The newest that the driver takes, wherever it lies. */
static void test_newest_that_fits(void **state) {
    (void)state;
    const loom__toolchain *found = NULL;
    loom_error error = LOOM_ERROR_INIT;
    make_nvrtc("toolkit/lib64", 12, 1);
    make_nvrtc("venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib", 12, 9);
    make_nvrtc("venv/lib/python3.11/site-packages/nvidia/cu13/lib", 13, 2);
    make_nvrtc("conda/lib", 12, 6);
    setenv("CUDA_HOME", rig_path("toolkit"), 1);
    setenv("VIRTUAL_ENV", rig_path("venv"), 1);
    setenv("CONDA_PREFIX", rig_path("conda"), 1);
    driver_version = 12020;
    loom_context *context = rig_context(&HOOKS);
    assert_ok(error, loom__nvrtc_find(context, &found, &error));
    assert_string_equal(found->name, "nvrtc 12.9");
    rig_expect(found->path, "venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    loom_context_destroy(context);

    driver_version = 13020;
    context = rig_context(&HOOKS);
    assert_ok(error, loom__nvrtc_find(context, &found, &error));
    assert_string_equal(found->name, "nvrtc 13.2");
    /* The builtins say 13.2, the library 12.4: caught when it is loaded. */
    assert_fails(error, LOOM_COMPILE, "nvrtc", "is version 12.4|is 13.2|of one version",
                 loom__nvrtc_load(context, &error));
    loom_context_destroy(context);
    unsetenv("CUDA_HOME");
    unsetenv("VIRTUAL_ENV");
    unsetenv("CONDA_PREFIX");
}

/* A folder that was named is taken before a newer one elsewhere, but not against the driver. */
static void test_named_folder_first(void **state) {
    (void)state;
    const loom__toolchain *found = NULL;
    loom_error error = LOOM_ERROR_INIT;
    make_nvrtc("conda/lib", 12, 9);
    setenv("CONDA_PREFIX", rig_path("conda"), 1);
    setenv("LOOM_NVRTC_DIR", make_nvrtc("named", 12, 1), 1);
    driver_version = 12020;
    loom_context *context = rig_context(&HOOKS);
    assert_ok(error, loom__nvrtc_find(context, &found, &error));
    assert_string_equal(found->name, "nvrtc 12.1");
    loom_context_destroy(context);
    setenv("LOOM_NVRTC_DIR", make_nvrtc("later", 17, 1), 1);
    context = rig_context(&HOOKS);
    assert_ok(error, loom__nvrtc_find(context, &found, &error));
    assert_string_equal(found->name, "nvrtc 12.9");
    loom_context_destroy(context);
    unsetenv("CONDA_PREFIX");
}

/* Nothing that a driver of CUDA 11 takes: both versions and what to install. */
static void test_nothing_fits(void **state) {
    (void)state;
    const loom__toolchain *found = NULL;
    loom_plan *plan = NULL;
    loom_error error;
    setenv("LOOM_NVRTC_DIR", make_nvrtc("named", 19, 3), 1);
    driver_version = 11080;
    loom_context *context = rig_context(&HOOKS);
    assert_fails(error, LOOM_COMPILE, "nvrtc",
                 "NVRTC 19.3|named/libnvrtc.so.19|CUDA 11.8|pip install|LOOM_NVRTC_DIR",
                 loom__nvrtc_find(context, &found, &error));
    assert_fails(error, LOOM_COMPILE, "nvrtc", "NVRTC 19.3",
                 plan_for(context, "bf16", "sm_90", &plan, &error));
    assert_null(plan);
    loom_context_destroy(context);
    driver_version = 12040;
}

/* -- CUDA ------------------------------------------------------------------------------------------------ */

static void test_cuda_plan(void **state) {
    (void)state;
    setenv("LOOM_NVRTC_DIR", rig_nvrtc(), 1);
    loom_context *context = rig_context(&HOOKS);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, plan_for(context, "bf16 aligned", "sm_90", &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_ARCH), "sm_90");
    assert_int_equal(loom_plan_num_kernels(plan), 2);
    loom_kernel kernel = rig_kernel(plan, 1);
    assert_int_equal(kernel.registers, 40);
    assert_int_equal(kernel.spill_bytes, 24);
    assert_int_equal(kernel.threads, 64);
    assert_string_equal(kernel.compiler, "nvrtc 12.4");
    assert_string_equal((const char *)kernel.binary, kernel.source); /* the stand-in compiles to itself */
    rig_expect(kernel.entry, "/cache/forward-bf16-d16-8-any-sm_90-");
    loom_plan_destroy(plan);

    assert_ok(error, plan_for(context, "bf16 aligned", "sm_90", &plan, &error));
    kernel = rig_kernel(plan, 0);
    assert_int_equal(kernel.cached, 1);
    assert_int_equal(kernel.registers, 40);
    loom_plan_destroy(plan);
    loom_context_destroy(context);

    /* Options are part of the key. */
    setenv("LOOM_NVRTC_OPTS", "--more=1 --and=2", 1);
    context = rig_context(&HOOKS);
    assert_ok(error, plan_for(context, "bf16 aligned", "sm_90", &plan, &error));
    assert_int_equal(rig_kernel(plan, 0).cached, 0);
    rig_expect(rig_kernel(plan, 0).key, "options --ptxas-options=-v --more=1 --and=2\n");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* The compiler is told the kernel's arch, where it has one. */
static void test_kernel_arch(void **state) {
    (void)state;
    setenv("LOOM_NVRTC_DIR", rig_nvrtc(), 1);
    loom_context *context = rig_context(&HOOKS);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    context->log_level = 4;
    rig_log_start();
    loom_status status = plan_for(context, "bf16 maps", "sm_90", &plan, &error);
    const char *log = rig_log_stop();
    assert_ok(error, status);
    rig_expect(log, "compiler kernel=forward-tma output=\n--gpu-architecture=sm_90a\n|"
                    "compiler kernel=forward-any output=\n--gpu-architecture=sm_90\n");
    rig_expect(rig_kernel(plan, 0).entry, "/cache/forward-bf16-d16-8-tma-sm_90a-");
    rig_expect(rig_kernel(plan, 1).entry, "/cache/forward-bf16-d16-8-any-sm_90-");
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_ARCH), "sm_90");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static void test_cuda_refusals(void **state) {
    (void)state;
    setenv("LOOM_NVRTC_DIR", rig_nvrtc(), 1);
    loom_context *context = rig_context(&HOOKS);
    loom_plan *plan = NULL;
    loom_error error;
    assert_fails(error, LOOM_UNSUPPORTED, "desc.arch", "NVRTC 12.4|sm_75|it knows sm_80 sm_86 sm_87 sm_90",
                 plan_for(context, "bf16", "sm_75", &plan, &error));
    assert_fails(error, LOOM_COMPILE, "kernel", "nvrtc 12.4|forward-any|forward.cu(20): error|attnloom-",
                 plan_for(context, "bf16 broken", "sm_90", &plan, &error));
    /* The folder that the message names holds source and log. */
    char folder[300], path[400];
    assert_int_equal(sscanf(strstr(error.text, "output: "), "output: %299[^)]", folder), 1);
    snprintf(path, sizeof path, "%s/kernel.cu", folder);
    assert_int_equal(access(path, R_OK), 0);
    snprintf(path, sizeof path, "%s/log.txt", folder);
    assert_int_equal(access(path, R_OK), 0);
    /* What runs, but at half the speed, is refused too. */
    assert_fails(
        error, LOOM_COMPILE, "kernel",
        "nvrtc 12.4 serialises the wgmma of the kernel forward-any|:\nptxas info    : (C7512) Potential|"
        "in the function 'forward'\n(source and whole output: ",
        plan_for(context, "bf16 serialised", "sm_90", &plan, &error));
    assert_int_equal(rmdir(rig_path("cache")), 0); /* it is empty: nothing was stored */
    loom_context_destroy(context);

    setenv("LOOM_NVRTC_OPTS", "nonsense", 1);
    context = rig_context(&HOOKS);
    assert_fails(error, LOOM_COMPILE, "kernel", "INVALID_OPTION",
                 plan_for(context, "bf16", "sm_90", &plan, &error));
    loom_context_destroy(context);
}

/* -- Host ------------------------------------------------------------------------------------------------ */

static loom_status host_plan(loom_context *context, const char *problem, loom_plan **plan,
                             loom_error *error) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = problem;
    desc.device = LOOM_DEVICE_HOST;
    return loom_plan_create(context, &desc, plan, error);
}

static void test_host_refusals(void **state) {
    (void)state;
    loom_plan *plan = NULL;
    loom_error error;
    loom_context *context = rig_context(NULL);
    assert_fails(error, LOOM_COMPILE, "kernel", "cc |forward-any|error:|attnloom-",
                 host_plan(context, "fp32 broken", &plan, &error));
    loom_context_destroy(context);

    setenv("CC", "no-such-compiler -O1", 1);
    context = rig_context(NULL);
    assert_fails(error, LOOM_COMPILE, "cc", "'no-such-compiler'|install gcc or clang|CC",
                 host_plan(context, "fp32", &plan, &error));
    loom_context_destroy(context);

    rig_write(rig_path("false"), "#!/bin/sh\nexit 1\n");
    chmod(rig_path("false"), 0700);
    setenv("CC", rig_path("false"), 1);
    context = rig_context(NULL);
    assert_fails(error, LOOM_COMPILE, "cc", "/false|does not run", host_plan(context, "fp32", &plan, &error));
    loom_context_destroy(context);

    setenv("CC", " ", 1);
    context = rig_context(NULL);
    assert_fails(error, LOOM_COMPILE, "cc", "no command", host_plan(context, "fp32", &plan, &error));
    loom_context_destroy(context);
}

/* A compiler that says it succeeded and left nothing, or an empty file. */
static void test_host_lies(void **state) {
    (void)state;
    loom_plan *plan = NULL;
    loom_error error;
    static const char *const LIES[] = {"exit 0", ": > kernel.so"};
    for (size_t i = 0; i < 2; i++) {
        char script[300];
        snprintf(script, sizeof script,
                 "#!/bin/sh\n[ \"$1\" = -v ] && echo 'lying version 1.0' && exit\n%s\n", LIES[i]);
        rig_write(rig_path("liar"), script);
        chmod(rig_path("liar"), 0700);
        setenv("CC", rig_path("liar"), 1);
        loom_context *context = rig_context(NULL);
        assert_fails(error, LOOM_COMPILE, "kernel", "cc 1.0|forward-any",
                     host_plan(context, "fp32", &plan, &error));
        loom_context_destroy(context);
    }
    assert_int_equal(rmdir(rig_path("cache")), 0); /* it is empty */
}

static void test_host_facts(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    const loom__toolchain *found = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__cc_find(context, &found, &error));
    assert_int_equal(found->path[0], '/');
    rig_expect(found->name, "cc ");
    rig_expect(found->identity, "compiler |, for |command |-march=native|processor ");
    loom_plan *plan = NULL;
    assert_ok(error, host_plan(context, "fp32", &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_ARCH), found->triple);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* A host that does not wait for children (SIGCHLD ignored) still gets its kernel. */
static void test_ignored_children(void **state) {
    (void)state;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    struct sigaction ignore = {.sa_handler = SIG_IGN}, before;
    sigaction(SIGCHLD, &ignore, &before);
    loom_context *context = rig_context(NULL);
    loom_status status = host_plan(context, "fp32", &plan, &error);
    sigaction(SIGCHLD, &before, NULL);
    if (status) fail_msg("%s", error.text);
    rig_launch(plan);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* Without PATH, as in a bare container. */
static void test_no_path(void **state) {
    (void)state;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    char *path = strdup(getenv("PATH"));
    unsetenv("PATH");
    loom_context *context = rig_context(NULL);
    loom_status status = host_plan(context, "fp32", &plan, &error);
    setenv("PATH", path, 1);
    free(path);
    if (status) fail_msg("%s", error.text);
    rig_launch(plan);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* -- The real one ---------------------------------------------------------------------------------------- */

static void test_real_nvrtc(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    const loom__toolchain *found = NULL;
    if (loom__nvrtc_find(context, &found, &error) != LOOM_OK) {
        print_message("no NVRTC here: %s\n", error.text);
        loom_context_destroy(context);
        skip();
    }
    assert_ok(error, plan_for(context, "bf16 backward", "sm_90", &plan, &error));
    for (int32_t i = 0; i < loom_plan_num_kernels(plan); i++) {
        loom_kernel kernel = rig_kernel(plan, i);
        assert_memory_equal(kernel.binary, "\177ELF", 4);
        assert_in_range(kernel.registers, 1, 255);
        assert_int_equal(kernel.spill_bytes, 0);
    }
    loom_plan_destroy(plan);
    assert_fails(error, LOOM_UNSUPPORTED, "desc.arch", "sm_61|it knows sm_",
                 plan_for(context, "bf16", "sm_61", &plan, &error));
    assert_fails(error, LOOM_COMPILE, "kernel", "nvrtc|error",
                 plan_for(context, "bf16 broken", "sm_90", &plan, &error));
    loom_context_destroy(context);
}

/* -- In the background ----------------------------------------------------------------------------------- */

/* A C compiler that waits until the file `gate` is there. */
static void gated_compiler(const char *then) {
    char script[2000];
    snprintf(script, sizeof script,
             "#!/bin/sh\n[ \"$1\" = -v ] && exec cc -v\necho >> '%s'\n"
             "while [ ! -e '%s' ]; do sleep 0.01; done\n%s\n",
             rig_path("started"), rig_path("gate"), then);
    rig_write(rig_path("gated"), script);
    chmod(rig_path("gated"), 0700);
    setenv("CC", rig_path("gated"), 1);
}

static loom_plan *async_plan(loom_context *context, const char *problem) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    desc.problem = problem;
    desc.device = LOOM_DEVICE_HOST;
    desc.flags = LOOM_ASYNC;
    assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
    return plan;
}

static void test_async(void **state) {
    (void)state;
    static rig_memory memory;
    loom_error error = LOOM_ERROR_INIT;
    gated_compiler("exec cc \"$@\"");
    loom_context *context = rig_context(NULL);
    loom_plan *plan = async_plan(context, "fp32 params");
    /* What needs no kernel is there. */
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_PROBLEM), "fp32 params");
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=4");
    assert_true(*loom_plan_text(plan, LOOM_TEXT_ARCH));
    assert_int_equal(loom_plan_num_kernels(plan), 1);
    assert_int_equal(loom_plan_param(plan, "n"), 1);
    loom_args args = rig_args(&memory);
    size_t bytes = 1;
    assert_ok(error, loom_workspace_bytes(plan, LOOM_FORWARD, &args, &bytes, &error));
    assert_int_equal(bytes, 0);
    /* What needs one says so. */
    loom_kernel kernel = LOOM_KERNEL_INIT;
    assert_fails(error, LOOM_NOT_FOUND, "plan", "still compiling|loom_plan_wait",
                 loom_forward(plan, &args, NULL, &error));
    assert_fails(error, LOOM_NOT_FOUND, "plan", "still compiling",
                 loom_plan_kernel(plan, 0, &kernel, &error));
    assert_fails(error, LOOM_NOT_FOUND, "plan", "still compiling", loom_plan_certify(plan, "text", &error));
    assert_fails(error, LOOM_NOT_FOUND, "plan", "still compiling", loom_plan_wait(plan, 0, &error));
    double start = loom__now();
    assert_fails(error, LOOM_NOT_FOUND, "plan", "still compiling", loom_plan_wait(plan, 0.05, &error));
    assert_true(loom__now() - start >= 0.05);
    assert_fails(error, LOOM_INVALID, "timeout_seconds", "-1", loom_plan_wait(plan, -1, &error));
    assert_fails(error, LOOM_INVALID, "timeout_seconds", "nan", loom_plan_wait(plan, NAN, &error));
    assert_fails(error, LOOM_INVALID, "plan", "NULL", loom_plan_wait(NULL, 1, &error));

    /* Others go on meanwhile; who wants the same kernel waits for it and does not compile it again. */
    char canonical[64];
    assert_ok(error, loom_problem_canonical(context, "fp32", canonical, sizeof canonical, NULL, &error));
    loom_plan *other = async_plan(context, "bf16 params"), *same = async_plan(context, "fp32 params");
    rig_write(rig_path("gate"), "");
    assert_ok(error, loom_plan_wait(plan, INFINITY, &error));
    assert_ok(error, loom_plan_wait(same, 1e300, &error));
    assert_ok(error, loom_plan_wait(other, 600, &error));
    assert_ok(error, loom_plan_wait(other, 0, &error));
    assert_int_equal(rig_kernel(plan, 0).cached + rig_kernel(same, 0).cached, 1);
    struct stat facts;
    assert_int_equal(stat(rig_path("started"), &facts), 0);
    assert_int_equal(facts.st_size, 2); /* compiles */

    loom_param params[3] = {{.scalar = 1}, {.scalar = 2}, {.data = &memory}};
    args.params = params;
    args.num_params = 3;
    assert_ok(error, loom_forward(plan, &args, NULL, &error));
    loom_plan_destroy(plan);
    loom_plan_destroy(other);
    loom_plan_destroy(same);
    plan = rig_plan(context, "fp32 params");
    assert_ok(error, loom_plan_wait(plan, 0, &error)); /* made without LOOM_ASYNC */
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static void test_async_failure(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    gated_compiler("echo 'error: no such thing' >&2; exit 1");
    loom_context *context = rig_context(NULL);
    loom_plan *plan = NULL;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "a refused";
    desc.device = LOOM_DEVICE_HOST;
    desc.flags = LOOM_ASYNC;
    assert_fails(error, LOOM_INVALID, "problem.words", "refused",
                 loom_plan_create(context, &desc, &plan, &error));
    assert_null(plan);

    plan = async_plan(context, "fp32");
    rig_write(rig_path("gate"), "");
    assert_fails(error, LOOM_COMPILE, "kernel", "no such thing", loom_plan_wait(plan, 600, &error));
    assert_fails(error, LOOM_COMPILE, "kernel", "no such thing", loom_plan_wait(plan, 0, &error));
    static rig_memory memory;
    loom_args args = rig_args(&memory);
    loom_kernel kernel = LOOM_KERNEL_INIT;
    assert_fails(error, LOOM_COMPILE, "kernel", "no such thing", loom_forward(plan, &args, NULL, &error));
    assert_fails(error, LOOM_COMPILE, "kernel", "no such thing", loom_plan_kernel(plan, 0, &kernel, &error));
    assert_int_equal(loom_plan_wait(plan, 0, NULL), LOOM_COMPILE);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_PROBLEM), "fp32");
    loom_plan_destroy(plan);

    desc.problem = "bf16";
    desc.flags = LOOM_ASYNC | LOOM_NO_COMPILE;
    assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
    assert_fails(error, LOOM_NOT_FOUND, "desc.flags", "LOOM_NO_COMPILE", loom_plan_wait(plan, 600, &error));
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static void *open_gate(void *path) {
    usleep(100000);
    rig_write(path, "");
    return NULL;
}

/* Destroying waits for the compile and leaves a complete entry. */
static void test_async_destroy(void **state) {
    (void)state;
    gated_compiler("exec cc \"$@\"");
    loom_context *context = rig_context(NULL);
    loom_plan *plan = async_plan(context, "fp32");
    pthread_t thread;
    char gate[600];
    strcpy(gate, rig_path("gate"));
    assert_int_equal(pthread_create(&thread, NULL, open_gate, gate), 0);
    loom_plan_destroy(plan);
    pthread_join(thread, NULL);
    loom_plan_destroy(async_plan(context, "fp32")); /* at once */
    plan = rig_plan(context, "fp32");
    assert_int_equal(rig_kernel(plan, 0).cached, 1);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* The stand-in for NVRTC too. */
static void test_async_cuda(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    setenv("LOOM_NVRTC_DIR", rig_nvrtc(), 1);
    loom_context *context = rig_context(NULL);
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_plan *plan = NULL;
    desc.problem = "bf16 backward aligned";
    desc.device = LOOM_DEVICE_NONE;
    desc.arch = "sm_90";
    desc.flags = LOOM_ASYNC;
    assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
    assert_ok(error, loom_plan_wait(plan, 600, &error));
    assert_true(rig_kernel(plan, 0).binary_bytes > 0);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* -- The first long compile ------------------------------------------------------------------------------ */

static void test_report(void **state) {
    (void)state;
    gated_compiler("sleep 0.6; exec cc \"$@\"");
    rig_write(rig_path("gate"), "");
    loom_context *context = rig_context(NULL);
    rig_log_start();
    loom_plan *first = rig_plan(context, "fp32"), *second = rig_plan(context, "bf16");
    const char *log = rig_log_stop();
    rig_expect(log, "attnloom: compile problem=\"fp32\" kernels=1 seconds=");
    assert_int_equal(rig_count(log, "attnloom: "), 1);
    loom_plan_destroy(first);
    loom_plan_destroy(second);
    loom_context_destroy(context);

    setenv("LOOM_LOG", "0", 1);
    context = rig_context(NULL);
    rig_log_start();
    loom_plan_destroy(rig_plan(context, "fp32 backward"));
    assert_string_equal(rig_log_stop(), "");
    loom_context_destroy(context);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_given_folder, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_newest_that_fits, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_named_folder_first, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_nothing_fits, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_cuda_plan, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_kernel_arch, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_cuda_refusals, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_host_refusals, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_host_lies, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_host_facts, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_ignored_children, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_no_path, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_real_nvrtc, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async_failure, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async_destroy, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_async_cuda, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_report, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
