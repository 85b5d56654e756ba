/* test_kernels.c - the CUDA kernels of a representative list of problems compile for every architecture,
 * without a GPU, and keep their values in registers: no spills, but for those listed in SPILLS.
 *
 * ctest: slow
 *
 * Without an argument one part of the list is compiled, always the same unless the environment variable
 * ATTNLOOM_ROTATION=I names another. `slow` compiles all of it, or with ATTNLOOM_TEST_PART=I/N part I of N.
 * Skipped where there is no NVRTC.
 */
#define _POSIX_C_SOURCE 200809L
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common.h"
#include "compile.h"

#define COUNT(x) (sizeof(x) / sizeof *(x))

/* NUM_ROTATIONS shares no factor with the number of machines, so that every part has some of each. */
enum { SKIPPED = 77, NUM_ROTATIONS = 35, MOST_SPILL_BYTES = 72, LEAST_HOPPER_D = 16 };

/* Of target hopper what has kernels of its own is compiled, for tensors that TMA takes: all else of such a
 * plan is of target mma. */
static const struct machine {
    const char *target, *arch;
} MACHINES[] = {
    {"mma", "sm_75"}, {"mma", "sm_80"},  {"mma", "sm_86"},  {"mma", "sm_89"},
    {"mma", "sm_90"}, {"mma", "sm_100"}, {"mma", "sm_120"}, {"hopper", "sm_90"},
};

/* bf16 stands for fp16 on sm_75, which has no bf16. */
static const char *const PROBLEMS[] = {
    /* every kind of head dim: under one mma, odd in 16 or 32, wide, d other than d of v */
    "bf16 d=8 causal backward",
    "fp16 d=8 mask={window(255, 0)} backward deterministic",
    "bf16 d=24 causal backward",
    "fp16 d=24 mask={window(255, 0)} backward deterministic",
    "bf16 d=32 causal backward",
    "fp16 d=32 mask={window(255, 0)} backward deterministic",
    "bf16 d=64 causal backward",
    "fp16 d=64 mask={window(255, 0)} backward deterministic",
    "bf16 d=72 causal backward",
    "fp16 d=72 mask={window(255, 0)} backward deterministic",
    "bf16 d=80 causal backward",
    "fp16 d=80 mask={window(255, 0)} backward deterministic",
    "bf16 d=96 causal backward",
    "fp16 d=96 mask={window(255, 0)} backward deterministic",
    "bf16 d=128 causal backward",
    "fp16 d=128 mask={window(255, 0)} backward deterministic",
    "bf16 d=160 causal backward",
    "fp16 d=160 mask={window(255, 0)} backward deterministic",
    "bf16 d=192 causal backward",
    "fp16 d=192 mask={window(255, 0)} backward deterministic",
    "bf16 d=256 causal backward",
    "fp16 d=256 mask={window(255, 0)} backward deterministic",
    "bf16 d=192:128 causal backward",
    "fp16 d=192:128 mask={window(255, 0)} backward deterministic",

    /* no mask */
    "bf16 d=64 backward",
    "bf16 d=112 backward",
    "fp16 d=64:96 backward",
    "fp16 d=80:96 mask={window(255, 0)} backward",
    "bf16 d=128 backward",
    "fp16 d=256 backward deterministic",

    /* masks */
    "bf16 d=64 mask={document(ids)} params={ids: i32[seq_k]} backward",
    "bf16 d=128 mask={causal & document(ids)} params={ids: i32[seq_k]} backward deterministic",
    "fp16 d=128 mask={prefix(n) & window(l, r)} params={l: i32, n: i32, r: i32} backward",
    "fp16 d=80 mask={causal & (q - k < near | k % 16 == 0)} params={near: i32} backward",
    "bf16 d=128 mask={(q / 64 + k / 64) % 3 != 1 & (causal | k < 4)} backward",
    "bf16 d=256 mask={causal & block[b, h, row / 64, col / 64]}"
    " params={block: bool[batch, heads_q, ceil(seq_q/64), ceil(seq_k/64)]} backward",

    /* scores */
    "bf16 d=64 causal score={softcap(50)} backward",
    "bf16 d=128 mask={window(4095, 0)} score={softcap(30)} backward",
    "bf16 d=256 causal score={softcap(50)} backward deterministic",
    "fp16 d=64 causal score={alibi(slopes)} params={slopes: f32[heads_q]} backward",
    "bf16 d=128 causal score={alibi(slopes)} params={slopes: f32[heads_q]} backward deterministic",
    "bf16 d=192:128 score={s + bias[h, row, col]} params={bias: bf16[heads_q, seq_q, seq_k]} backward",
    "fp16 d=32 mask={causal & (q - k < near | k % stride == 0)} score={s - slope * log(f32(1 + abs(q - k)))}"
    " params={near: i32, slope: f32, stride: i32} backward",
};

/* Kernels that spill, by target, name and the first words of their schedule, with the most bytes that any problem of
 * the list spills on any arch: at most MOST_SPILL_BYTES, where a sweep shows the schedule faster all the same, in TFLOP/s of
 * bench/results/h200-mma-schedules.csv or h200-hopper-schedules.csv unless said otherwise. A kernel that is not listed does not spill. All this is of
 * LISTED_COMPILER: another version shares out registers its own way, and there any kernel may spill MOST_SPILL_BYTES. */
static const char LISTED_COMPILER[] = "nvrtc 13.0";
static const struct spill {
    const char *target, *kernel, *schedule;
    int32_t most_bytes;
    const char *reason;
} SPILLS[] = {
    {"mma", "backward_dkv", "tile=32x128 warps=4 rows=32 split=1 ", 64,
     "d=64: 271 against 216 of 64x128 rows=16"},
    {"mma", "backward_dkv", "tile=64x128 warps=8 rows=32 split=2 ", 60,
     "d=128: 259 against 237 of 64x128 rows=16"},
    /* The default of cards with 99 KB of shared memory; an H200 with one block a multiprocessor stood for
       them. */
    {"mma", "backward_dkv", "tile=64x64 warps=4 rows=32 split=2 ", 32,
     "d=128 causal, 4096 keys: 184 against 179 of 32x128 rows=16 and 159 of 32x64 rows=16"},
    {"mma", "forward", "tile=128x32 warps=4 ", 44, "d=128: 316 against 289 of 64x64"},
    {"mma", "forward", "tile=128x64 warps=4 ", 64, "d=128: 338 against 316 of 128x32 and 289 of 64x64"},
    /* Of target hopper it is the planner's, which runs ahead of the others. */
    {"hopper", "forward", "tile=128x", 16, "d=256 causal, 512 keys: 340 against 333 with one set of P"},
    {"hopper", "backward_dkv", "tile=128x128 ", 72,
     "in tiles that a mask cuts, and of the warps that run ahead"},
    {"hopper", "backward_dkv", "tile=64x128 ", 64, "the same"},
    {"hopper", "backward_dkv", "tile=64x64 ", 32, "of the warps that run ahead"},
    {"hopper", "forward", "tile=256x64 ", 8, "d=64 causal, 512 keys: 271 against 221 of 192x128"},
};

static loom_context *context;
static size_t part, num_parts; /* of the list: every num_parts-th plan, from part on */
static bool used[COUNT(SPILLS)];
static bool other_compiler;

/* -- One plan -------------------------------------------------------------------------------------------- */

static const struct spill *spill_of(const char *target, const char *kernel, const char *schedule) {
    for (size_t i = 0; i < COUNT(SPILLS); i++) {
        const struct spill *s = &SPILLS[i];
        if (strcmp(target, s->target) || strcmp(kernel, s->kernel)) continue;
        if (strncmp(schedule, s->schedule, strlen(s->schedule)) != 0) continue;
        used[i] = true;
        return s;
    }
    return NULL;
}

/* Whether a target takes the head dims of a problem. */
static bool takes(const char *target, const char *problem) {
    return strcmp(target, "hopper") != 0 || atoi(strstr(problem, " d=") + 3) >= LEAST_HOPPER_D;
}

/* Compiles all kernels of a problem for a machine and sequences of that length, 0: any; returns how many spill what
 * they may not. */
static int check_plan(const char *text, const struct machine *machine, int64_t seq) {
    const char *target = machine->target, *arch = machine->arch;
    char problem[512];
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    snprintf(problem, sizeof problem, "%s", text);
    if (!strcmp(arch, "sm_75")) memcpy(problem, "fp16", 4);
    if (!strcmp(target, "hopper")) desc.alignment = 16;
    desc.problem = problem;
    desc.hint.seq_q = desc.hint.seq_k = seq;
    desc.target = target;
    desc.device = LOOM_DEVICE_NONE;
    desc.arch = arch;
    loom_status status = loom_plan_create(context, &desc, &plan, &error);
    if (status == LOOM_UNSUPPORTED && !strcmp(error.field, "desc.arch")) {
        printf("SKIPPED: %s: %s\n", arch, error.text);
        return 0;
    }
    if (status) {
        printf("FAILED: \"%s\" of %s for %s: %s: %s\n", problem, target, arch, error.field, error.text);
        return 1;
    }
    int num_failed = 0;
    for (int32_t i = 0; i < loom_plan_num_kernels(plan); i++) {
        loom_kernel kernel = LOOM_KERNEL_INIT;
        assert_int_equal(loom_plan_kernel(plan, i, &kernel, &error), LOOM_OK);
        assert_true(strcmp(target, "hopper") || !strcmp(kernel.variant, "tma"));
        bool forward = !strcmp(kernel.name, "forward");
        const char *schedule =
            loom_plan_text(plan, forward ? LOOM_TEXT_SCHEDULE : LOOM_TEXT_SCHEDULE_BACKWARD);
        assert_memory_equal(kernel.binary, "\177ELF", 4);
        assert_in_range(kernel.registers, 1, 255);
        assert_true(kernel.spill_bytes >= 0);
        if (kernel.spill_bytes == 0) continue;
        const struct spill *known = spill_of(target, kernel.name, schedule);
        bool fine = (known && kernel.spill_bytes <= known->most_bytes) ||
                    (other_compiler && kernel.spill_bytes <= MOST_SPILL_BYTES);
        printf("%s: %d spill bytes, %d registers: %s %s of %s, %s, %s%s%s\n"
               "  attnloom compile \"%s\" --target %s --arch %s%s\n",
               !fine ? "FAILED" : known ? "listed" : "unlisted", kernel.spill_bytes, kernel.registers, kernel.name,
               kernel.variant, target, arch, schedule, known ? "; " : "", known ? known->reason : "", problem, target,
               arch, forward ? "" : " --pass backward");
        num_failed += !fine;
    }
    loom_plan_destroy(plan);
    return num_failed;
}

/* -- The list -------------------------------------------------------------------------------------------- */

static void kernels_do_not_spill(void **state) {
    (void)state;
    int num_failed = 0;
    for (size_t i = part; i < COUNT(PROBLEMS) * COUNT(MACHINES); i += num_parts) {
        const char *problem = PROBLEMS[i / COUNT(MACHINES)];
        const struct machine *machine = &MACHINES[i % COUNT(MACHINES)];
        if (takes(machine->target, problem)) num_failed += check_plan(problem, machine, 0);
        fflush(stdout);
    }
    for (size_t i = 0; i < COUNT(SPILLS); i++) assert_in_range(SPILLS[i].most_bytes, 1, MOST_SPILL_BYTES);
    for (size_t i = 0; i < COUNT(SPILLS) && num_parts == 1 && !other_compiler; i++) {
        if (used[i]) continue;
        printf("FAILED: no kernel spills as SPILLS says of %s: %s %s\n", SPILLS[i].target, SPILLS[i].kernel, SPILLS[i].schedule);
        num_failed++;
    }
    if (num_failed) fail_msg("%d failures, listed above", num_failed);
}

/* Each schedule of target hopper that was measured to be the best, in every run of this test. */
static void measured_schedules_compile(void **state) {
    (void)state;
    static const struct {
        const char *problem;
        int64_t seq;
    } MEASURED[] = {
        {"bf16 d=64 backward", 2048},          {"bf16 d=64 backward", 8192},
        {"bf16 d=64 causal backward", 2048},   {"bf16 d=128 backward", 512},
        {"bf16 d=128 backward", 1024},         {"bf16 d=128 backward", 8192},
        {"bf16 d=128 causal backward", 2048},  {"bf16 d=128 causal backward", 8192},
        {"bf16 d=128 causal backward", 16384}, {"bf16 d=256 backward", 2048},
        {"bf16 d=256 backward", 16384},        {"bf16 d=256 causal backward", 2048},
        {"bf16 d=256 causal backward", 16384},
    };
    static const struct machine hopper = {"hopper", "sm_90"};
    int num_failed = 0;
    for (size_t i = 0; i < COUNT(MEASURED); i++) num_failed += check_plan(MEASURED[i].problem, &hopper, MEASURED[i].seq);
    if (num_failed) fail_msg("%d failures, listed above", num_failed);
}

/* A plan for tensors of any alignment has kernels of two targets, and lists of tiles and sums of both. */
static void plans_of_two_targets_have_room(void **state) {
    (void)state;
    static const char *const WIDEST[] = {
        "bf16 d=136 mask={longformer(40, 20)} backward",
        "bf16 d=64 mask={longformer(40, 20)} backward deterministic",
    };
    for (size_t i = 0; i < COUNT(WIDEST); i++) {
        loom_plan *plan = NULL;
        loom_error error = LOOM_ERROR_INIT;
        loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
        desc.problem = WIDEST[i];
        desc.target = "hopper";
        desc.arch = "sm_90";
        desc.device = LOOM_DEVICE_NONE;
        if (loom_plan_create(context, &desc, &plan, &error))
            fail_msg("%s: %s: %s", WIDEST[i], error.field, error.text);
        loom_plan_destroy(plan);
    }
}

/* Takes the part from the argument and the environment. Returns false where that is not well said. */
static bool choose_part(bool slow) {
    unsigned long at = 0, of = 1;
    const char *text = getenv(slow ? "ATTNLOOM_TEST_PART" : "ATTNLOOM_ROTATION");
    if (slow) {
        if (text && *text && (sscanf(text, "%lu/%lu", &at, &of) != 2 || at >= of)) return false;
    } else {
        of = NUM_ROTATIONS;
        if (text && *text && (sscanf(text, "%lu", &at) != 1 || at >= of)) return false;
        printf("part %lu of %lu\n", at, of);
    }
    part = at;
    num_parts = of;
    return true;
}

int main(int argc, char **argv) {
    loom_options options = LOOM_OPTIONS_INIT;
    loom_error error = LOOM_ERROR_INIT;
    const loom__toolchain *found = NULL;
    if (!choose_part(argc > 1 && !strcmp(argv[1], "slow"))) {
        fprintf(stderr, "ATTNLOOM_ROTATION is a number below %d, ATTNLOOM_TEST_PART is I/N with I below N\n",
                NUM_ROTATIONS);
        return 1;
    }
    options.cache_dir = "";
    if (loom_context_create(&options, &context, &error)) {
        fprintf(stderr, "%s: %s\n", error.field, error.text);
        return 1;
    }
    if (loom__nvrtc_find(context, &found, &error)) {
        printf("SKIPPED: %s\n", error.text);
        loom_context_destroy(context);
        return SKIPPED;
    }
    other_compiler = strcmp(found->name, LISTED_COMPILER) != 0;
    printf("%s%s%s\n", found->name, other_compiler ? ", the list of spills is of " : "",
           other_compiler ? LISTED_COMPILER : "");
    const struct CMUnitTest tests[] = {cmocka_unit_test(measured_schedules_compile),
                                       cmocka_unit_test(plans_of_two_targets_have_room),
                                       cmocka_unit_test(kernels_do_not_spill)};
    int status = cmocka_run_group_tests(tests, NULL, NULL);
    loom_context_destroy(context);
    return status;
}
