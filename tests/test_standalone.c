/* test_standalone.c - `emit --standalone`: nvcc alone builds what it prints, and on a GPU the ejected kernels
 * give the bits of the library's plan with the same schedule, and their own check passes.
 *
 * ctest: gpu
 *
 * Without a GPU (argument `gpu` or --device N) the files are built only. Skipped where there is no nvcc on
 * PATH.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include <cmocka.h>

#include "generator.h"
#include "rigs.h"

#define COUNT(x) (sizeof(x) / sizeof *(x))

/* The problems of examples/, as bf16 where the example is fp32 for the CPU, two more for the deterministic
 * backward and four of target hopper. Without that word dQ has no fixed bits and is left out of the
 * comparison. */
static const struct unit {
    const char *problem;
    loom_pass pass;
    const char *arch; /* where there is no device */
    const char *target;
} UNITS[] = {
    {"bf16 d=32 causal", LOOM_FORWARD, "sm_80", "mma"},           /* forward.c */
    {"fp16 d=64 causal", LOOM_FORWARD, "sm_75", "mma"},           /* gqa_decode.c */
    {"bf16 d=32 mask={k <= q & (q - k < near | k % stride == 0)}" /* new_mask.c */
     " score={s - slope * log(f32(1 + abs(q - k)))} params={near: i32, slope: f32, stride: i32}",
     LOOM_FORWARD, "sm_90", "mma"},
    {"bf16 d=16 causal backward", LOOM_BACKWARD, "sm_90", "mma"}, /* train_step.c */
    {"bf16 d=32 mask={document(doc)} params={doc: i32[seq_k]} backward", LOOM_FORWARD, "sm_90",
     "mma"}, /* minilm.c */
    {"bf16 d=32 mask={document(doc)} params={doc: i32[seq_k]} backward", LOOM_BACKWARD, "sm_120", "mma"},
    {"bf16 d=64 causal backward deterministic", LOOM_BACKWARD, "sm_90", "mma"},
    {"fp16 d=80:64 mask={window(40, 8)} score={softcap(20)} backward deterministic", LOOM_BACKWARD, "sm_90",
     "mma"},
    {"bf16 d=128 causal", LOOM_FORWARD, "sm_90", "hopper"},
    {"fp16 d=64:192 mask={document(doc)} score={softcap(20)} params={doc: i32[seq_k]}", LOOM_FORWARD, "sm_90",
     "hopper"},
    {"bf16 d=72", LOOM_FORWARD, "sm_90", "hopper"},
    {"bf16 d=80 causal backward", LOOM_BACKWARD, "sm_90", "hopper"},
};

typedef int (*ejected_launch)(const void *args, void *stream);

static char folder[] = "/tmp/attnloom-standalone-XXXXXX";

/* -- Launches in place of the library's -------------------------------------------------------------------- */

static const loom__driver_api *driver;
static ejected_launch ejected;        /* NULL: the library launches its own kernels */
static int num_launches, main_launch; /* from 1 */
static size_t taken_at;               /* 0, or where a pointer is put in that kernels of mma do not have */
static loom__device_ptr taken;

/* The launch of a pass whose kernel has all arguments hands them to the ejected launcher, which launches all kernels. */
static int launch(loom__cuda_handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                  unsigned block_y, unsigned block_z, unsigned smem_bytes, loom__cuda_handle stream,
                  void **parameters, void **extra) {
    num_launches++;
    if (!ejected)
        return driver->launch(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, smem_bytes, stream,
                              parameters, extra);
    if (num_launches != main_launch) return 0;
    unsigned char packed[1024];
    const unsigned char *from = parameters[0];
    if (!taken_at) return ejected(from, stream);
    memcpy(packed, from, taken_at);
    memcpy(packed + taken_at, &taken, sizeof taken);
    memcpy(packed + taken_at + sizeof taken, from + taken_at,
           256); /* more than is left of any unit's arguments */
    return ejected(packed, stream);
}

/* The place of a kernel among the launches of its pass, from 1. */
static int place_of(const loom_plan *plan, const char *name) {
    int place = 0;
    const char *variant = NULL;
    for (int32_t i = 0; i < loom_plan_num_kernels(plan); i++) {
        loom_kernel k = LOOM_KERNEL_INIT;
        loom_error error = LOOM_ERROR_INIT;
        assert_int_equal(loom_plan_kernel(plan, i, &k, &error), LOOM_OK);
        if (strncmp(k.name, name, strcspn(name, "_")) != 0) continue;
        if (!variant) variant = k.variant;
        if (strcmp(k.variant, variant) != 0) continue;
        place++;
        if (strcmp(k.name, name) == 0) return place;
    }
    fail_msg("no kernel %s", name);
    return 0;
}

/* A context whose launches pass through here. */
static loom_context *context_with_launch(void) {
    static loom__driver_api table;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    if (!on_gpu()) return rigs.context;
    driver = rigs.context->driver;
    table = *driver;
    table.launch = launch;
    loom__hooks hooks = {.driver = &table};
    if (loom__context_create(NULL, &hooks, &context, &error)) fail_msg("%s: %s", error.field, error.text);
    return context;
}

/* -- Building -------------------------------------------------------------------------------------------- */

/* Runs a command in the folder; fails with what it printed. */
static void run(const char *what, const char *command) {
    char line[512], log[4096] = "";
    snprintf(line, sizeof line, "cd %s && %s > log.txt 2>&1", folder, command);
    int status = system(line);
    if (status == 0) return;
    snprintf(line, sizeof line, "%s/log.txt", folder);
    FILE *file = fopen(line, "rb");
    if (file) {
        log[fread(log, 1, sizeof log - 1, file)] = 0;
        fclose(file);
    }
    fail_msg("\"%s\": `%s` ended with status %d:\n%s", what, command, status, log);
}

static bool is_hopper(const struct unit *unit) { return !strcmp(unit->target, "hopper"); }

/* nvcc's option for a unit, as the ejected file says it. */
static const char *arch_option(const struct unit *unit, const char *arch) {
    static char option[64];
    snprintf(option, sizeof option, is_hopper(unit) ? "-gencode arch=compute_%sa,code=sm_%sa" : "-arch=sm_%s", arch + 3,
             arch + 3);
    return option;
}

/* Writes the ejected file of a pass, with the schedule given or NULL. */
static void eject(loom_context *context, const struct unit *unit, const char *arch, const char *schedule) {
    loom__arena arena = {&context->memory, NULL};
    loom_error error = LOOM_ERROR_INIT;
    const char *text = NULL;
    char path[64];
    loom__request request = {.problem = unit->problem, .target = unit->target, .arch = arch};
    if (unit->pass == LOOM_FORWARD)
        request.schedule = schedule;
    else
        request.schedule_backward = schedule;
    if (loom__generator_standalone(context, &request, unit->pass, &arena, &text, &error))
        fail_msg("\"%s\": %s: %s", unit->problem, error.field, error.text);
    snprintf(path, sizeof path, "%s/unit.cu", folder);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
    loom__arena_free(&arena);
}

static void builds(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(UNITS); i++) {
        char command[128];
        eject(rigs.context, &UNITS[i], UNITS[i].arch, NULL);
        snprintf(command, sizeof command, "nvcc %s -Werror all-warnings -o check unit.cu",
                 arch_option(&UNITS[i], UNITS[i].arch));
        run(UNITS[i].problem, command);
    }
    const struct unit *last = &UNITS[COUNT(UNITS) - 1];
    char command[160];
    snprintf(command, sizeof command, "nvcc %s -DATTNLOOM_NO_MAIN -shared -Xcompiler -fPIC -o unit.so unit.cu",
             arch_option(last, last->arch));
    run(last->problem, command);
}

/* -- On a GPU -------------------------------------------------------------------------------------------- */

static ejected_launch load(const struct unit *unit, const char *arch, size_t number) {
    char command[160], path[64];
    snprintf(command, sizeof command,
             "nvcc %s -DATTNLOOM_NO_MAIN -shared -Xcompiler -fPIC -o unit%zu.so unit.cu", arch_option(unit, arch), number);
    run(unit->problem, command);
    snprintf(path, sizeof path, "%s/unit%zu.so", folder, number);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* stays open: its kernels belong to the CUDA runtime */
    if (!library) fail_msg("%s", dlerror());
    ejected_launch found;
    *(void **)&found =
        dlsym(library, unit->pass == LOOM_FORWARD ? "attnloom_forward_launch" : "attnloom_backward_launch");
    assert_non_null(found);
    return found;
}

static void run_pass(loom__rig *rig, const struct unit *unit, loom_pass pass) {
    loom_error error = LOOM_ERROR_INIT;
    num_launches = 0;
    if (loom__rig_run(rig, pass, &error)) fail_msg("\"%s\": %s: %s", unit->problem, error.field, error.text);
    assert_true(num_launches > 0);
}

/* NULL: the device is not of this target. */
static loom_plan *make_plan(loom_context *context, const struct unit *unit, const char *target) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    desc.problem = unit->problem;
    desc.target = target;
    desc.device = rigs.device;
    loom_status status = loom_plan_create(context, &desc, &plan, &error);
    if (status == LOOM_UNSUPPORTED && is_hopper(unit)) return NULL;
    if (status) fail_msg("%s: %s", error.field, error.text);
    return plan;
}

/* The bits of a pass: of the library's kernels, or of the ejected ones, which take their arguments as a plan of target mma
 * packs them: with pointers and strides, not maps. */
static uint64_t digest_of(loom_context *context, const struct unit *unit, loom_plan *plan, ejected_launch found) {
    loom__rig *rig = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom__rig_options options = options_of(2, 4, 2, 150, 213);
    if (!strstr(unit->problem, "deterministic")) options.unwanted = 1u << LOOM__RIG_DQ;
    if (loom__rig_create(context, plan, rigs.device, &options, &rig, &error))
        fail_msg("\"%s\": %s: %s", unit->problem, error.field, error.text);
    if (unit->pass == LOOM_BACKWARD) { /* the same O and LSE for both: those of two targets differ in bits */
        loom__rig_noise(rig, LOOM__RIG_Q, 1, 0.01);
        loom__rig_noise(rig, LOOM__RIG_O, 2, 1);
        loom__rig_fill(rig, LOOM__RIG_LSE, 0);
    }
    ejected = found;
    main_launch = found ? place_of(plan, unit->pass == LOOM_FORWARD ? "forward" : "backward_dkv") : 0;
    taken_at = !found || !is_hopper(unit) ? 0
               : unit->pass == LOOM_BACKWARD
                   ? 336 /* behind ten tensors, pointers and three strides, and two more pointers */
               : main_launch > 1 ? 160 /* behind q, k, v, o, lse */
                                 : 0;
    if (taken_at && driver->memory_alloc(&taken, 4)) fail_msg("no memory");
    run_pass(rig, unit, unit->pass);
    ejected = NULL;
    if (taken_at) driver->memory_free(taken);
    uint64_t digest = loom__rig_digest(rig, unit->pass);
    loom__rig_destroy(rig);
    return digest;
}

static void compare(loom_context *context, const struct unit *unit, size_t number) {
    loom_plan *plan = make_plan(context, unit, unit->target);
    if (!plan) {
        printf("SKIPPED: no GPU of sm_90: %s\n", unit->problem);
        return;
    }
    loom_plan *packs = is_hopper(unit) ? make_plan(context, unit, "mma") : plan;
    const char *arch = loom_plan_text(plan, LOOM_TEXT_ARCH);
    eject(context, unit, arch,
          loom_plan_text(plan, unit->pass == LOOM_FORWARD ? LOOM_TEXT_SCHEDULE : LOOM_TEXT_SCHEDULE_BACKWARD));
    char command[160];
    snprintf(command, sizeof command, "nvcc %s -Werror all-warnings -o check unit.cu && ./check", arch_option(unit, arch));
    run(unit->problem, command);
    ejected_launch found = load(unit, arch, number);
    if (digest_of(context, unit, plan, NULL) != digest_of(context, unit, packs, found))
        fail_msg("\"%s\": the ejected kernels give other bits than the plan", unit->problem);
    if (packs != plan) loom_plan_destroy(packs);
    loom_plan_destroy(plan);
    printf("equal bits: %s, %s\n", unit->problem, unit->pass == LOOM_FORWARD ? "forward" : "backward");
}

static void gives_the_same_bits(void **state) {
    (void)state;
    loom_context *context = context_with_launch();
    for (size_t i = 0; i < COUNT(UNITS); i++) compare(context, &UNITS[i], i);
    loom_context_destroy(context);
}

static int remove_one(const char *path, const struct stat *facts, int kind, struct FTW *walk) {
    (void)facts, (void)kind, (void)walk;
    return remove(path);
}

int main(int argc, char **argv) {
    if (system("nvcc --version > /dev/null 2>&1") != 0) {
        printf("SKIPPED: no nvcc on PATH\n");
        return RIGS_SKIP;
    }
    int status = rigs_start(argc, argv);
    if (status) return status;
    if (!mkdtemp(folder)) return 1;
    const struct CMUnitTest tests[] = {cmocka_unit_test(builds)};
    const struct CMUnitTest gpu_tests[] = {cmocka_unit_test(gives_the_same_bits)};
    status = on_gpu() ? cmocka_run_group_tests(gpu_tests, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    rigs_stop();
    return status;
}
