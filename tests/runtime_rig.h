/* runtime_rig.h - what tests of the runtime alone share: folders of their own, contexts with the generator of
 * tests/fixtures/gen, and checks of errors. Included by one .c of a test program each, before anything else.
 */
#ifndef LOOM_RUNTIME_RIG_H
#define LOOM_RUNTIME_RIG_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common.h"

static char rig_folder[256];

#define RIG_UNUSED __attribute__((unused))

/* Fails with the library's own words. */
#define assert_ok(error, call)                                                                               \
    do {                                                                                                     \
        if ((call) != LOOM_OK) fail_msg("%s: %s: %s", #call, (error).field, (error).text);                   \
    } while (0)

/* The call must fail with this status and field, and its text must hold all these words. */
#define assert_fails(error, wanted, wanted_field, words, call)                                               \
    do {                                                                                                     \
        (error) = (loom_error)LOOM_ERROR_INIT;                                                               \
        loom_status rig_status = (call);                                                                     \
        if (rig_status != (wanted)) {                                                                        \
            fail_msg("%s gave %s, not %s: %s: %s", #call, loom_status_name(rig_status),                      \
                     loom_status_name(wanted), (error).field, (error).text);                                 \
        }                                                                                                    \
        assert_int_equal((error).status, wanted);                                                            \
        assert_string_equal((error).field, wanted_field);                                                    \
        rig_expect((error).text, words);                                                                     \
    } while (0)

/* `words` is a list divided by '|'. */
RIG_UNUSED static void rig_expect(const char *text, const char *words) {
    while (*words) {
        char word[256];
        size_t length = strcspn(words, "|");
        assert_true(length < sizeof word);
        memcpy(word, words, length);
        word[length] = 0;
        if (!strstr(text, word)) fail_msg("'%s' is not in: %s", word, text);
        words += length + (words[length] == '|');
    }
}

static int rig_remove_one(const char *path, const struct stat *facts, int kind, struct FTW *walk) {
    (void)facts, (void)kind, (void)walk;
    return remove(path);
}

RIG_UNUSED static void rig_remove_tree(const char *path) {
    nftw(path, rig_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* A fresh folder per test; the environment names its cache and the test generator. */
RIG_UNUSED static int rig_setup(void **state) {
    (void)state;
    snprintf(rig_folder, sizeof rig_folder, "/tmp/attnloom-test-XXXXXX");
    if (!mkdtemp(rig_folder)) return -1;
    char cache[300];
    snprintf(cache, sizeof cache, "%s/cache", rig_folder);
    setenv("LOOM_CACHE_DIR", cache, 1);
    setenv("LOOM_GEN_DIR", "tests/fixtures/gen", 1);
    setenv("TMPDIR", rig_folder, 1);
    static const char *const OTHERS[] = {"LOOM_LOG", "LOOM_NVRTC_DIR", "LOOM_NVRTC_OPTS", "LOOM_SCHED", "CC"};
    for (size_t i = 0; i < sizeof OTHERS / sizeof OTHERS[0]; i++) unsetenv(OTHERS[i]);
    return 0;
}

RIG_UNUSED static int rig_teardown(void **state) {
    (void)state;
    rig_remove_tree(rig_folder);
    return 0;
}

/* A path below the test's folder; valid until the fourth next call. */
RIG_UNUSED static const char *rig_path(const char *name) {
    static char paths[4][600];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", rig_folder, name);
    return path;
}

/* Folder of the stand-in for NVRTC, beside this program. */
RIG_UNUSED static const char *rig_nvrtc(void) {
    static char path[600];
    ssize_t length = readlink("/proc/self/exe", path, 500);
    assert_true(length > 0);
    path[length] = 0;
    strcpy(strrchr(path, '/'), "/nvrtc12");
    return path;
}

RIG_UNUSED static void rig_write(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    if (!file) fail_msg("cannot write %s: %s", path, strerror(errno));
    fputs(text, file);
    fclose(file);
}

RIG_UNUSED static loom_context *rig_context(const loom__hooks *hooks) {
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__context_create(NULL, hooks, &context, &error));
    return context;
}

RIG_UNUSED static loom_plan *rig_plan_of(loom_context *context, const loom_plan_desc *desc) {
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_plan_create(context, desc, &plan, &error));
    return plan;
}

/* A plan on the host. */
RIG_UNUSED static loom_plan *rig_plan(loom_context *context, const char *problem) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = problem;
    desc.device = LOOM_DEVICE_HOST;
    return rig_plan_of(context, &desc);
}

RIG_UNUSED static loom_kernel rig_kernel(const loom_plan *plan, int32_t index) {
    loom_kernel kernel = LOOM_KERNEL_INIT;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_plan_kernel(plan, index, &kernel, &error));
    return kernel;
}

/* Arguments of a launch of the test generator's kernels on host memory: batch 2, heads 4:2, seq 10:6.
 * `memory` has room for every tensor; o is its first KiB, which the kernel overwrites. */
typedef struct rig_memory {
    _Alignas(256) unsigned char o[1024];
    _Alignas(16) unsigned char read[4096];
    _Alignas(16) unsigned char dq[1024], dk[1024], dv[1024];
    _Alignas(256) unsigned char workspace[4096];
    float lse[128];
} rig_memory;

RIG_UNUSED static loom_args rig_args(rig_memory *memory) {
    loom_args args = LOOM_ARGS_INIT;
    args.shape = (loom_shape){2, 4, 2, 10, 6};
    args.q = loom_dense(memory->read, 10, 4, 16);
    args.k = loom_dense(memory->read, 6, 2, 16);
    args.v = loom_dense(memory->read, 6, 2, 8);
    args.o = loom_dense(memory->o, 10, 4, 8);
    args.lse = loom_dense_lse(memory->lse, 4, 10);
    args.workspace = memory->workspace;
    args.workspace_bytes = sizeof memory->workspace;
    return args;
}

/* Launches forward of a plan without params and checks that every block ran. */
RIG_UNUSED static void rig_launch(const loom_plan *plan) {
    static rig_memory memory;
    memset(&memory, 0, sizeof memory);
    loom_args args = rig_args(&memory);
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_forward(plan, &args, NULL, &error));
    void *o;
    memcpy(&o, memory.o, sizeof o);
    assert_ptr_equal(o, memory.o);
    assert_int_equal(memory.o[104], 2 * 4 * 3);
}

/* Reads what the library logs: stderr goes to a file between start and stop. */
static int rig_stderr = -1;

RIG_UNUSED static void rig_log_start(void) {
    fflush(stderr);
    rig_stderr = dup(STDERR_FILENO);
    int fd = open(rig_path("log.txt"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(fd, STDERR_FILENO);
    close(fd);
}

/* Valid until the next call. */
RIG_UNUSED static const char *rig_log_stop(void) {
    static char text[65536];
    fflush(stderr);
    dup2(rig_stderr, STDERR_FILENO);
    close(rig_stderr);
    int fd = open(rig_path("log.txt"), O_RDONLY);
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    return text;
}

RIG_UNUSED static int rig_count(const char *text, const char *word) {
    int count = 0;
    while ((text = strstr(text, word))) text += strlen(word), count++;
    return count;
}

#endif
