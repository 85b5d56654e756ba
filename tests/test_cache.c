/* test_cache.c - the cache on disk and everything that can be wrong with it. */
#include "runtime_rig.h"

#include <dirent.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "cache.h"

enum { NOBODY = 65534 };

/* One plan of one kernel: made, launched, destroyed. Returns whether it came from the cache; its folder goes
 * to `entry`. */
static const loom__hooks *weave_hooks;

static bool weave(char *entry) {
    loom_context *context = rig_context(weave_hooks);
    loom_plan *plan = rig_plan(context, "fp32");
    loom_kernel kernel = rig_kernel(plan, 0);
    if (entry) strcpy(entry, kernel.entry);
    assert_true(kernel.binary_bytes > 0);
    rig_launch(plan);
    bool cached = kernel.cached;
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return cached;
}

/* Names in a folder that begin with `prefix`. */
static int count_names(const char *folder, const char *prefix) {
    int count = 0;
    DIR *dir = opendir(folder);
    struct dirent *row;
    while (dir && (row = readdir(dir))) count += strncmp(row->d_name, prefix, strlen(prefix)) == 0;
    if (dir) closedir(dir);
    return count;
}

/* -- An entry -------------------------------------------------------------------------------------------- */

static void assert_mode(const char *path, mode_t mode) {
    struct stat facts;
    if (stat(path, &facts)) fail_msg("no %s", path);
    assert_int_equal(facts.st_mode & 0777, mode);
}

static void test_entry(void **state) {
    (void)state;
    char entry[600], path[700], again[600];
    umask(0);
    assert_false(weave(entry));
    umask(022);
    assert_non_null(strstr(entry, "/cache/forward-fp32-d16-8-any-host-"));
    assert_mode(rig_path("cache"), 0700);
    assert_mode(entry, 0700);
    static const char *const FILES[] = {"kernel.c", "kernel.so", "meta.txt"};
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", entry, FILES[i]);
        assert_mode(path, 0600);
    }
    assert_int_equal(count_names(entry, ""), 5);
    assert_int_equal(count_names(rig_path("cache"), ""), 3);
    assert_int_equal(count_names(rig_path(""), "attnloom-"), 0); /* no folder of the compiler is left */
    assert_true(weave(again));
    assert_string_equal(entry, again);
}

static void test_facts_come_back(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    loom_context *context = rig_context(NULL);
    loom_plan *plan = rig_plan(context, "fp32 backward");
    assert_int_equal(loom_plan_num_kernels(plan), 3);
    loom_kernel made = rig_kernel(plan, 2);
    assert_int_equal(made.cached, 0);
    assert_true(made.compile_seconds > 0);
    assert_string_equal(made.certificate, "");
    assert_ok(error, loom_plan_certify(plan, "o error 1e-3\n", &error));
    assert_string_equal(rig_kernel(plan, 1).certificate, "o error 1e-3\n");

    loom_plan *second = rig_plan(context, "backward fp32");
    loom_kernel read = rig_kernel(second, 2);
    assert_int_equal(read.cached, 1);
    assert_true(read.compile_seconds == 0);
    assert_string_equal(read.name, "keys");
    assert_string_equal(read.symbol, "fake_keys");
    assert_string_equal(read.source, made.source);
    assert_string_equal(read.key, made.key);
    assert_string_equal(read.compiler, made.compiler);
    assert_string_equal(read.certificate, "o error 1e-3\n");
    assert_int_equal(read.binary_bytes, made.binary_bytes);
    assert_memory_equal(read.binary, made.binary, made.binary_bytes);
    assert_int_equal(read.registers, -1);
    loom_plan_destroy(plan);
    loom_plan_destroy(second);
    loom_context_destroy(context);
}

static void test_no_compile(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_plan *plan = NULL;
    loom_error error;
    desc.problem = "fp32";
    desc.device = LOOM_DEVICE_HOST;
    desc.flags = LOOM_NO_COMPILE;
    assert_fails(error, LOOM_NOT_FOUND, "desc.flags",
                 "1 of 1|/cache)|LOOM_NO_COMPILE|forward-any, schedule 'tile=4'|\n    fp32",
                 loom_plan_create(context, &desc, &plan, &error));
    loom_plan_destroy(rig_plan(context, "fp32"));
    assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static void test_memory_only(void **state) {
    (void)state;
    loom_options options = LOOM_OPTIONS_INIT;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    options.cache_dir = "";
    assert_ok(error, loom_context_create(&options, &context, &error));
    loom_plan *first = rig_plan(context, "fp32"), *second = rig_plan(context, "bf16");
    assert_string_equal(rig_kernel(first, 0).entry, "");
    rig_launch(first);
    rig_launch(second);
    loom_plan_destroy(first);
    rig_launch(second);
    assert_ok(error, loom_plan_certify(second, "fine", &error));
    assert_string_equal(rig_kernel(second, 0).certificate, "fine");
    loom_plan_destroy(second);
    loom_context_destroy(context);
    assert_int_equal(access(rig_path("cache"), F_OK), -1);
    assert_int_equal(count_names(rig_path(""), "attnloom-"), 0);
}

/* -- Damage ---------------------------------------------------------------------------------------------- */

static void damage_truncate(const char *path) { assert_int_equal(truncate(path, 100), 0); }
static void damage_empty(const char *path) { assert_int_equal(truncate(path, 0), 0); }
static void damage_remove(const char *path) { assert_int_equal(unlink(path), 0); }

static void damage_flip(const char *path) {
    int fd = open(path, O_RDWR);
    char byte;
    assert_int_equal(pread(fd, &byte, 1, 70), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, 70), 1);
    close(fd);
}

static void damage_folder(const char *path) {
    damage_remove(path);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(symlink("/etc/passwd", path), 0);
}

static void test_damage(void **state) {
    (void)state;
    static void (*const DAMAGES[])(const char *) = {damage_truncate, damage_empty, damage_remove, damage_flip,
                                                    damage_folder};
    static const char *const FILES[] = {"kernel.c", "kernel.so", "meta.txt"};
    char entry[600], path[700];
    weave(entry);
    for (size_t f = 0; f < 3; f++) {
        for (size_t d = 0; d < sizeof DAMAGES / sizeof DAMAGES[0]; d++) {
            snprintf(path, sizeof path, "%s/%s", entry, FILES[f]);
            DAMAGES[d](path);
            rig_log_start();
            bool cached = weave(NULL);
            const char *log = rig_log_stop();
            if (cached) fail_msg("%s, damage %zu, was taken", FILES[f], d);
            assert_int_equal(rig_count(log, "attnloom: cache removes"), 1);
            assert_true(weave(NULL)); /* it was built anew */
            assert_int_equal(count_names(rig_path("cache"), ""), 3);
        }
    }
}

/* A sound entry of another key under this name, as a collision of digests would be. */
static void test_other_key(void **state) {
    (void)state;
    char entry[600], command[2000];
    weave(entry);
    snprintf(command, sizeof command, "sed -i 's/^variant any/variant odd/' '%s/meta.txt'", entry);
    assert_int_equal(system(command), 0);
    rig_log_start();
    bool cached = weave(NULL);
    rig_expect(rig_log_stop(), "another key");
    assert_false(cached);
}

/* Bytes that are as they were stored, but do not load. */
static void test_does_not_load(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom_plan *plan = rig_plan(context, "fp32");
    loom_kernel kernel = rig_kernel(plan, 0);
    char path[700], name[300];
    snprintf(path, sizeof path, "%s", kernel.entry);
    snprintf(name, sizeof name, "%s", strrchr(path, '/') + 1);
    name[strlen(name) - 33] = 0;
    loom__arena arena = {&context->memory, NULL};
    loom__entry bad = {
        .source = kernel.source, .binary = "no library", .binary_bytes = 10, .compiler = "cc", .host = true};
    rig_remove_tree(path);
    loom__cache_store(context, name, kernel.key, &arena, &bad);
    assert_string_equal(bad.path, path);
    loom_plan_destroy(plan);
    loom__arena_free(&arena);
    loom_context_destroy(context);

    rig_log_start();
    bool cached = weave(NULL);
    rig_expect(rig_log_stop(), "cache removes|does not load");
    assert_false(cached);
    assert_true(weave(NULL));
}

/* -- Processes ------------------------------------------------------------------------------------------- */

/* Waits for a child of ours and returns its exit status, 128 + signal if it was killed. */
static int status_of(pid_t child) {
    int state;
    assert_int_equal(waitpid(child, &state, 0), child);
    return WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
}

/* Runs in a child: any failed assertion would unwind into the parent's tests, so it only answers by its
 * status. */
static int weave_quietly(void) {
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    static rig_memory memory;
    desc.problem = "fp32";
    desc.device = LOOM_DEVICE_HOST;
    if (loom_context_create(NULL, &context, NULL)) return 1;
    if (loom_plan_create(context, &desc, &plan, NULL)) return 2;
    memset(&memory, 0, sizeof memory);
    loom_args args = rig_args(&memory);
    if (loom_forward(plan, &args, NULL, NULL)) return 3;
    if (memory.o[104] != 24) return 4;
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return 0;
}

static void test_race(void **state) {
    (void)state;
    enum { PROCESSES = 32 };
    pid_t children[PROCESSES];
    int gate[2];
    assert_int_equal(pipe(gate), 0);
    rig_log_start();
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            char byte;
            close(gate[1]);
            _exit(read(gate[0], &byte, 1) == 0 ? weave_quietly() : 9);
        }
    }
    close(gate[0]);
    close(gate[1]); /* all start at once */
    int failures = 0;
    for (int i = 0; i < PROCESSES; i++) failures += status_of(children[i]) != 0;
    const char *log = rig_log_stop();
    assert_int_equal(rig_count(log, "attnloom: "), rig_count(log, "attnloom: compile problem=")); /* no warning */
    assert_int_equal(failures, 0);
    assert_int_equal(count_names(rig_path("cache"), ""), 3);
    assert_true(weave(NULL));
}

/* A compiler that says that it runs, and does not end. */
static void stuck_compiler(void) {
    char script[1000];
    snprintf(script, sizeof script,
             "#!/bin/sh\n[ \"$1\" = -v ] && exec cc -v\necho > '%s'\nexec sleep 1000\n", rig_path("started"));
    rig_write(rig_path("stuck"), script);
    chmod(rig_path("stuck"), 0700);
    setenv("CC", rig_path("stuck"), 1);
}

/* A process in the middle of a compile of `problem`, which is stopped. */
static pid_t stop_while_compiling(const char *problem) {
    stuck_compiler();
    pid_t child = fork();
    if (child == 0) {
        setpgid(0, 0);
        loom_context *context = rig_context(NULL);
        rig_plan(context, problem);
        _exit(0);
    }
    setpgid(child, child);
    for (int i = 0; i < 1000 && access(rig_path("started"), F_OK); i++) usleep(10000);
    assert_int_equal(access(rig_path("started"), F_OK), 0);
    assert_int_equal(kill(-child, SIGSTOP), 0);
    unsetenv("CC");
    return child;
}

/* A process that is stopped and then killed in the middle of a compile holds up nobody. */
static void test_killed(void **state) {
    (void)state;
    pid_t child = stop_while_compiling("fp32");
    static const loom__hooks IMPATIENT = {.claim_seconds = 0.2};
    weave_hooks = &IMPATIENT;
    assert_false(weave(NULL));
    weave_hooks = NULL;
    assert_int_equal(kill(-child, SIGKILL), 0);
    assert_int_equal(status_of(child), 128 + SIGKILL);
    assert_true(weave(NULL));
}

/* A plan waits once for all kernels that a stopped process has claimed, not for each. */
static void test_claims_have_one_limit(void **state) {
    (void)state;
    enum { NUM_KERNELS = 3 };
    static const loom__hooks IMPATIENT = {.claim_seconds = 1.5};
    pid_t child = stop_while_compiling("fp32 backward");
    assert_int_equal(count_names(rig_path("cache"), ".claim-"), NUM_KERNELS);
    loom_context *context = rig_context(&IMPATIENT);
    double start = loom__now();
    loom_plan *plan = rig_plan(context, "fp32 backward");
    double seconds = loom__now() - start;
    assert_int_equal(loom_plan_num_kernels(plan), NUM_KERNELS);
    assert_true(seconds >= 1.5 && seconds < NUM_KERNELS * 1.5);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    assert_int_equal(kill(-child, SIGKILL), 0);
    assert_int_equal(status_of(child), 128 + SIGKILL);
}

/* A compiler that notes each kernel it compiles, and takes a while. */
static void counting_compiler(void) {
    char script[900];
    snprintf(script, sizeof script,
             "#!/bin/sh\ncase \"$*\" in *kernel.c*) echo x >>'%s'; sleep 0.3;; esac\nexec cc \"$@\"\n",
             rig_path("compiles"));
    rig_write(rig_path("counting-cc"), script);
    assert_int_equal(chmod(rig_path("counting-cc"), 0700), 0);
    setenv("CC", rig_path("counting-cc"), 1);
}

static int count_compiles(void) {
    char text[256] = "";
    FILE *file = fopen(rig_path("compiles"), "rb");
    if (!file) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    return rig_count(text, "x\n");
}

/* Processes that want one kernel at once: one compiles it, the others wait for that. Where it is killed while
 * it compiles another one does, at once. */
static void test_processes_compile_once(void **state) {
    (void)state;
    enum { PROCESSES = 6 };
    pid_t children[PROCESSES];
    counting_compiler();
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        if (children[i] == 0) _exit(weave_quietly());
    }
    for (int i = 0; i < PROCESSES; i++) assert_int_equal(status_of(children[i]), 0);
    assert_int_equal(count_compiles(), 1);
    assert_int_equal(count_names(rig_path("cache"), ".claim-"), 0);

    rig_remove_tree(rig_path("cache"));
    unlink(rig_path("compiles"));
    for (int i = 0; i < 2; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            setpgid(0, 0);
            _exit(weave_quietly());
        }
        setpgid(children[i], children[i]);
        for (int wait = 0; i == 0 && wait < 1000 && count_compiles() == 0; wait++) usleep(5000);
    }
    assert_int_equal(count_compiles(), 1);
    assert_int_equal(kill(-children[0], SIGKILL), 0);
    assert_int_equal(status_of(children[0]), 128 + SIGKILL);
    assert_int_equal(status_of(children[1]), 0);
    assert_int_equal(count_compiles(), 2);
    unsetenv("CC");
    assert_true(weave(NULL));
}

/* What a process that was killed while it wrote an entry leaves is removed with the next entry; what one that
 * lives is writing is not. */
static void test_leftovers(void **state) {
    (void)state;
    assert_int_equal(mkdir(rig_path("cache"), 0700), 0);
    assert_int_equal(mkdir(rig_path("cache/.staging-1-dead"), 0700), 0);
    rig_write(rig_path("cache/.staging-1-dead/kernel.so"), "half");
    rig_write(rig_path("cache/.claim-dead"), "");
    assert_int_equal(mkdir(rig_path("cache/.staging-2-alive"), 0700), 0);
    int alive = open(rig_path("cache/.staging-2-alive"), O_RDONLY | O_DIRECTORY);
    assert_int_equal(flock(alive, LOCK_EX), 0);
    assert_false(weave(NULL));
    assert_int_equal(access(rig_path("cache/.staging-1-dead"), F_OK), -1);
    assert_int_equal(access(rig_path("cache/.claim-dead"), F_OK), -1);
    assert_int_equal(access(rig_path("cache/.staging-2-alive"), F_OK), 0);
    close(alive);
}

/* -- Where the cache is ---------------------------------------------------------------------------------- */

/* Works, keeps nothing, and warns exactly once, with these words. */
static void assert_memory_only(const char *words) {
    char entry[600];
    rig_log_start();
    bool cached = weave(entry);
    const char *log = rig_log_stop();
    assert_false(cached);
    assert_string_equal(entry, "");
    rig_expect(log, words);
    assert_int_equal(rig_count(log, "attnloom: cache"), 1);
}

static void test_home(void **state) {
    (void)state;
    char *home = strdup(getenv("HOME") ? getenv("HOME") : "/"), entry[600];
    unsetenv("LOOM_CACHE_DIR");
    unsetenv("XDG_CACHE_HOME");

    unsetenv("HOME");
    assert_memory_only("HOME is not set|LOOM_CACHE_DIR");
    setenv("HOME", rig_path("nonexistent"), 1);
    assert_memory_only("nonexistent: No such file");
    assert_int_equal(access(rig_path("nonexistent"), F_OK), -1); /* a home is not made */
    setenv("HOME", "relative", 1);
    assert_memory_only("HOME is not an absolute path");
    assert_int_equal(symlink("loop", rig_path("loop")), 0);
    setenv("HOME", rig_path("loop"), 1);
    assert_memory_only("symbolic links");
    setenv("XDG_CACHE_HOME", "relative/is/ignored", 1);
    assert_memory_only("symbolic links");

    setenv("HOME", rig_folder, 1);
    assert_false(weave(entry));
    assert_non_null(strstr(entry, "/.cache/attnloom/forward-"));
    setenv("XDG_CACHE_HOME", rig_path("xdg/cache"), 1);
    assert_false(weave(entry));
    assert_non_null(strstr(entry, "/xdg/cache/attnloom/forward-"));
    setenv("LOOM_CACHE_DIR", "", 1); /* set to nothing is not set */
    assert_true(weave(entry));

    setenv("HOME", home, 1);
    unsetenv("XDG_CACHE_HOME");
    free(home);
}

static void test_unusable_folder(void **state) {
    (void)state;
    rig_write(rig_path("file"), "");
    setenv("LOOM_CACHE_DIR", rig_path("file"), 1);
    assert_memory_only("it is not a folder");
    setenv("LOOM_CACHE_DIR", rig_path("file/below"), 1);
    assert_memory_only("Not a directory");
    assert_int_equal(symlink("loop", rig_path("loop")), 0);
    setenv("LOOM_CACHE_DIR", rig_path("loop"), 1);
    assert_memory_only("symbolic links");
}

/* Read-only, in a child that is not root. */
static void test_read_only(void **state) {
    (void)state;
    weave(NULL); /* compiled as the user who runs the test */
    rig_log_start();
    pid_t child = fork();
    if (child == 0) {
        if (geteuid() == 0 && (chown(rig_folder, NOBODY, NOBODY) || setresuid(NOBODY, NOBODY, NOBODY)))
            _exit(10);
        if (mkdir(rig_path("readonly"), 0500)) _exit(11);
        setenv("LOOM_CACHE_DIR", rig_path("readonly"), 1);
        int first = weave_quietly();
        setenv("LOOM_CACHE_DIR", rig_path("readonly/below"), 1);
        int second = weave_quietly();
        _exit(first ? first : second);
    }
    int status = status_of(child);
    const char *log = rig_log_stop();
    assert_int_equal(status, 0);
    rig_expect(log, "cannot keep a kernel in|readonly, it stays in memory|Permission denied");
    assert_int_equal(rig_count(log, "\n"), 2); /* once a context */
}

static void test_relative(void **state) {
    (void)state;
    char before[4096], entry[600];
    assert_non_null(getcwd(before, sizeof before));
    setenv("LOOM_CACHE_DIR", "below/cache/", 1);
    char generator[5000];
    snprintf(generator, sizeof generator, "%s/tests/fixtures/gen", before);
    setenv("LOOM_GEN_DIR", generator, 1);
    assert_int_equal(chdir(rig_folder), 0);
    loom_context *context = rig_context(NULL);
    assert_int_equal(chdir("/"), 0); /* what counts is where the context was made */
    loom_plan *plan = rig_plan(context, "fp32");
    strcpy(entry, rig_kernel(plan, 0).entry);
    assert_int_equal(
        strncmp(entry, rig_path("below/cache/forward-"), strlen(rig_path("below/cache/forward-"))), 0);
    rig_launch(plan);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    assert_int_equal(chdir(before), 0);
}

static void test_odd_paths(void **state) {
    (void)state;
    static const char ODD[] = "Zo\xc3\xab \xe6\xb5\x8b\xe8\xaf\x95/a b'c\"$x";
    char path[900], part[251], entry[900];
    memset(part, 'x', 250);
    part[250] = 0;
    snprintf(path, sizeof path, "%s/%s/%s/", rig_folder, ODD, part);
    setenv("LOOM_CACHE_DIR", path, 1);
    snprintf(path, sizeof path, "%s/%s", rig_folder, ODD);
    char command[1200];
    snprintf(command, sizeof command, "mkdir -p \"$FOLDER\" && cp -r tests/fixtures/gen \"$FOLDER/gen\"");
    setenv("FOLDER", path, 1);
    assert_int_equal(system(command), 0);
    setenv("TMPDIR", path, 1);
    setenv("LC_ALL", "C", 1);
    snprintf(command, sizeof command, "%s/gen", path);
    setenv("LOOM_GEN_DIR", command, 1);
    loom_context *context = rig_context(NULL);
    loom_plan *plan = rig_plan(context, "fp32");
    snprintf(entry, sizeof entry, "%s", rig_kernel(plan, 0).entry);
    rig_expect(entry, ODD);
    rig_launch(plan);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    unsetenv("LC_ALL");
    context = rig_context(NULL);
    plan = rig_plan(context, "fp32");
    assert_int_equal(rig_kernel(plan, 0).cached, 1);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* -- Other users' files ---------------------------------------------------------------------------------- */

static void test_foreign(void **state) {
    (void)state;
    if (geteuid() != 0) skip(); /* only root can give files away */
    char entry[600], path[700];
    weave(entry);
    snprintf(path, sizeof path, "%s/kernel.so", entry);
    assert_int_equal(chown(path, NOBODY, NOBODY), 0);
    rig_log_start();
    bool cached = weave(NULL);
    rig_expect(rig_log_stop(), "belongs to another user");
    assert_false(cached);
    assert_true(weave(NULL));

    /* A folder of another user under the name of an entry is neither used nor touched. */
    assert_int_equal(chown(entry, NOBODY, NOBODY), 0);
    assert_memory_only("belongs to another user");
    assert_int_equal(count_names(entry, "kernel.so"), 1);
    assert_int_equal(chown(entry, 0, 0), 0);
    assert_true(weave(NULL));

    assert_int_equal(chown(rig_path("cache"), NOBODY, NOBODY), 0);
    assert_memory_only("it belongs to another user");
}

/* -- The key --------------------------------------------------------------------------------------------- */

/* What must not matter. */
static void test_key_is_stable(void **state) {
    (void)state;
    char before[4096], generator[5000], path[9000];
    assert_non_null(getcwd(before, sizeof before));
    snprintf(generator, sizeof generator, "%s/tests/fixtures/gen", before);
    assert_false(weave(NULL));

    char *old = strdup(getenv("PATH"));
    snprintf(path, sizeof path, "/bin:/nowhere:relative:%s:/usr/games", old);
    setenv("PATH", path, 1);
    setenv("LOOM_GEN_DIR", generator, 1);
    assert_int_equal(chdir("/"), 0);
    setenv("LC_ALL", "de_DE.UTF-8", 1);
    setenv("LANG", "C.UTF-8", 1);
    setenv("USER", "someone", 1);
    umask(077);
    assert_true(weave(NULL));
    assert_int_equal(chdir(before), 0);
    umask(022);

    assert_int_equal(symlink(generator, rig_path("link")), 0);
    setenv("LOOM_GEN_DIR", rig_path("link"), 1);
    setenv("CC", "/usr/bin/cc", 1); /* the same compiler by another name */
    assert_true(access("/usr/bin/cc", X_OK) != 0 || weave(NULL));
    unsetenv("CC");
    setenv("PATH", old, 1);
    unsetenv("LC_ALL");
    unsetenv("LANG");
    free(old);
}

/* What must matter: one byte of a template, an option of the compiler. */
static void test_key_changes(void **state) {
    (void)state;
    char command[2000], folder[400];
    assert_false(weave(NULL));
    snprintf(folder, sizeof folder, "%s/own", rig_folder);
    snprintf(command, sizeof command, "cp -rp tests/fixtures/gen '%s'", folder);
    assert_int_equal(system(command), 0);
    setenv("LOOM_GEN_DIR", folder, 1);
    assert_true(weave(NULL));
    snprintf(command, sizeof command,
             "f='%s/templates/fake/kernel.c' && touch -r \"$f\" '%s/time' && sed -i 's/Block 0 writes/Block "
             "0 Writes/' \"$f\" && "
             "touch -r '%s/time' \"$f\"",
             folder, folder, folder);
    assert_int_equal(system(command), 0);
    assert_false(weave(NULL));
    assert_true(weave(NULL));
    setenv("CC", "cc -g0", 1);
    assert_false(weave(NULL));
    assert_true(weave(NULL));
}

/* -- The disk -------------------------------------------------------------------------------------------- */

/* Writes fail in the middle, as on a full disk: the kernel stays in memory, nothing half is left. */
static void test_full_disk(void **state) {
    (void)state;
    rig_log_start();
    pid_t child = fork();
    if (child == 0) {
        loom_context *context = NULL;
        if (loom_context_create(NULL, &context, NULL)) _exit(1);
        static char binary[100000];
        loom__arena arena = {&context->memory, NULL};
        loom__entry entry = {.source = "text",
                             .binary = binary,
                             .binary_bytes = sizeof binary,
                             .compiler = "cc",
                             .host = true};
        struct rlimit limit = {5000, 5000};
        signal(SIGXFSZ, SIG_IGN);
        if (setrlimit(RLIMIT_FSIZE, &limit)) _exit(2);
        loom__cache_store(context, "name", "key", &arena, &entry);
        if (*entry.path) _exit(3);
        entry.binary_bytes = 100;
        loom__cache_store(context, "name", "key", &arena, &entry);
        if (!*entry.path) _exit(4);
        loom__arena_free(&arena);
        loom_context_destroy(context);
        _exit(0);
    }
    int status = status_of(child);
    rig_expect(rig_log_stop(), "it stays in memory: File too large");
    assert_int_equal(status, 0);
    assert_int_equal(count_names(rig_path("cache"), ""), 3);
}

/* -- List and clear -------------------------------------------------------------------------------------- */

static void test_list(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom__arena arena = {&context->memory, NULL};
    const loom__cache_row *rows = NULL;
    int32_t num_rows = -1;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__cache_list(context, &arena, &rows, &num_rows, &error)); /* no folder yet */
    assert_int_equal(num_rows, 0);

    loom_plan_destroy(rig_plan(context, "fp32 backward"));
    rig_write(rig_path("cache/mine.txt"), "not an entry");
    assert_int_equal(mkdir(rig_path("cache/my-folder"), 0700), 0);
    rig_write(rig_path("cache/my-folder/kernel.c"), "not an entry");
    assert_ok(error, loom__cache_list(context, &arena, &rows, &num_rows, &error));
    assert_int_equal(num_rows, 3);
    assert_true(strncmp(rows[0].name, "forward-", 8) == 0 && strncmp(rows[1].name, "keys-", 5) == 0);
    for (int32_t i = 0; i < 3; i++) {
        assert_null(rows[i].damage);
        rig_expect(rows[i].key, "problem backward fp32\n|generator |compiler |processor ");
        assert_true(rows[i].entry.binary_bytes > 0);
        assert_true(rows[i].entry.host);
    }
    char path[700];
    snprintf(path, sizeof path, "%s/kernel.so", rows[1].path);
    damage_flip(path);
    assert_ok(error, loom__cache_list(context, &arena, &rows, &num_rows, &error));
    assert_int_equal(num_rows, 3); /* listing removes nothing */
    assert_string_equal(rows[1].damage, "the binary is damaged");
    assert_null(rows[2].damage);
    assert_ok(error, loom__cache_remove(context, rows[1].path, &error));
    assert_fails(error, LOOM_IO, "cache", "keys-", loom__cache_remove(context, rows[1].path, &error));

    int32_t num_removed = 0;
    assert_ok(error, loom__cache_clear(context, &num_removed, &error));
    assert_int_equal(num_removed, 2);
    assert_int_equal(count_names(rig_path("cache"), ""), 4);
    assert_int_equal(access(rig_path("cache/mine.txt"), F_OK), 0);
    assert_int_equal(access(rig_path("cache/my-folder/kernel.c"), F_OK), 0);
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_entry, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_facts_come_back, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_no_compile, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_memory_only, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_damage, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_other_key, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_does_not_load, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_race, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_killed, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_claims_have_one_limit, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_processes_compile_once, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_leftovers, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_home, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_unusable_folder, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_read_only, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_relative, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_odd_paths, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_foreign, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_key_is_stable, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_key_changes, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_full_disk, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_list, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
