/* test_wisdom.c - wisdom: its lines and what is refused, merging, the file that processes share, classes of
 * shapes, and plans that take schedules from it, on the host and on a GPU that is a table of functions. */
#include "runtime_rig.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>

#include "device_rig.h"
#include "cache.h"
#include "embedded.h"
#include "generator.h"
#include "wisdom.h"

static const char DIGEST[] = "0123456789abcdef0123456789abcdef";

/* An entry of the fake device, for the library's own generator unless that is changed. */
static loom__wisdom_entry entry_of(loom_context *context, const char *problem, int64_t ns,
                                   const char *schedule) {
    static char digest[33];
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__generator_digest(context, digest, &error));
    return (loom__wisdom_entry){.device = "Test 0",
                                .units = 100,
                                .problem = problem,
                                .target = "mma",
                                .pass = LOOM_FORWARD,
                                .class = {1 << 18, 1024, 2048},
                                .generator = digest,
                                .ns = ns,
                                .schedule = schedule};
}

static void learn(loom_context *context, const loom__wisdom_entry *entry) {
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom__wisdom_learn(context, entry, NULL, &error));
}

/* All that a context knows; valid until the fourth next call. */
static const char *exported(loom_context *context) {
    static char texts[4][1 << 17];
    static int next;
    char *text = texts[next++ % 4];
    size_t needed = 0;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, loom_wisdom_export(context, text, sizeof texts[0], &needed, &error));
    assert_int_equal(needed, strlen(text) + 1);
    return text;
}

/* A context that shares no file with others. */
static loom_context *context_without_file(void) {
    setenv("LOOM_CACHE_DIR", rig_path("other"), 1);
    rig_remove_tree(rig_path("other"));
    loom_context *context = context_for(9, 0);
    setenv("LOOM_CACHE_DIR", rig_path("cache"), 1);
    return context;
}

/* -- Lines ----------------------------------------------------------------------------------------------- */

static void test_what_is_written_is_read(void **state) {
    (void)state;
    loom_context *context = context_for(9, 0), *other = context_without_file();
    loom_error error = LOOM_ERROR_INIT;
    int32_t num_taken = -1;
    size_t needed = 0;
    char small[8];
    assert_string_equal(exported(context), "");
    loom__wisdom_entry entry = entry_of(context, "bf16", 7000, "tile=16x32 stages=2");
    entry.generator = DIGEST;
    learn(context, &entry);
    static const char LINE[] =
        "wisdom1 device=\"Test 0\" units=100 target=mma pass=forward rows=262144 queries=1024 keys=2048 "
        "ns=7000 "
        "generator=0123456789abcdef0123456789abcdef schedule=\"tile=16x32 stages=2\" problem=bf16\n";
    assert_string_equal(exported(context), LINE);
    assert_fails(error, LOOM_INVALID, "capacity", "capacity is 8 bytes",
                 loom_wisdom_export(context, small, sizeof small, &needed, &error));
    assert_int_equal(needed, sizeof LINE);

    /* In any order of fields, the problem as people write it, without the last end of line. */
    assert_ok(error,
              loom_wisdom_import(other,
                                 "# a remark\n\nwisdom1 ns=7000 units=100 device=\"Test 0\" pass=forward "
                                 "target=mma  queries=1024 rows=262144 keys=2048 "
                                 "schedule=\"tile=16x32 stages=2\" generator="
                                 "0123456789abcdef0123456789abcdef problem=bf16 \r\n",
                                 &num_taken, &error));
    assert_int_equal(num_taken, 1);
    assert_string_equal(exported(other), LINE);
    assert_ok(error, loom_wisdom_import(other, LINE, NULL, &error));
    assert_string_equal(exported(other), LINE);
    loom_context_destroy(context);
    loom_context_destroy(other);
}

#define GOOD_HEAD "wisdom1 device=\"Test 0\" units=100 target=mma pass=forward "
#define GOOD_TAIL " generator=0123456789abcdef0123456789abcdef schedule=\"tile=1\" problem=bf16"

static void test_refused_lines(void **state) {
    (void)state;
    static const struct {
        const char *line, *why;
    } LINES[] = {
        {"wisdom2 device=\"x\"", "line 1: format: 'wisdom2' is not wisdom1"},
        {"wisdom1", "line 1: format: 'wisdom1' is not wisdom1"},
        {"garbage", "line 1: format: 'garbage'"},
        {GOOD_HEAD "rows=4 queries=4 keys=64 ns=0" GOOD_TAIL, "line 1: ns: '0' is not a whole number from 1"},
        {GOOD_HEAD "rows=4 queries=4 keys=64 ns=1.5" GOOD_TAIL, "line 1: ns: '1.5' is not a whole number"},
        {GOOD_HEAD "rows=4 queries=4 keys=64 ns=99999999999999999999" GOOD_TAIL, "line 1: ns: '9999999999"},
        {GOOD_HEAD "rows=5 queries=4 keys=64 ns=1" GOOD_TAIL,
         "line 1: rows: 5 is not a power of two from 1 to 262144"},
        {GOOD_HEAD "rows=4 queries=2048 keys=64 ns=1" GOOD_TAIL,
         "line 1: queries: 2048 is not a power of two from 1 to 1024"},
        {GOOD_HEAD "rows=4 queries=4 keys=32 ns=1" GOOD_TAIL,
         "line 1: keys: 32 is not a power of two from 64"},
        {GOOD_HEAD "rows=4 queries=4 ns=1" GOOD_TAIL, "line 1: keys: it is missing"},
        {GOOD_HEAD "rows=4 rows=4 queries=4 keys=64 ns=1" GOOD_TAIL, "line 1: rows: it is there twice"},
        {GOOD_HEAD "lines=4 rows=4 queries=4 keys=64 ns=1" GOOD_TAIL, "line 1: field: 'lines=4' is no field"},
        {GOOD_HEAD "rows", "line 1: field: 'rows' is no field"},
        {"wisdom1 device=\"Test 0\" units=3000000000", "line 1: units: '3000000000' is not a whole number"},
        {"wisdom1 pass=sideways", "line 1: pass: 'sideways' is not forward or backward"},
        {"wisdom1 device=Test", "line 1: device: its value is not between quotes"},
        {"wisdom1 device=\"Test", "line 1: device: its value is not between quotes"},
        {"wisdom1 device=\"\"", "line 1: device: it is empty"},
        {"wisdom1 device=\"a\tb\"", "line 1: device: byte 1 is 0x09"},
        {"wisdom1 generator=12345678", "line 1: generator: '12345678' is not 32 hex digits"},
        {"wisdom1 generator=0123456789ABCDEF0123456789abcdef", "is not 32 hex digits"},
        {"wisdom1 problem=", "line 1: problem: it is empty"},
        {GOOD_HEAD "rows=4 queries=4 keys=64 ns=1" GOOD_TAIL " refused",
         "line 1: problem: 1: 'refused' is refused"},
    };
    loom_context *context = context_for(9, 0);
    loom_error error = LOOM_ERROR_INIT;
    for (size_t i = 0; i < sizeof LINES / sizeof LINES[0]; i++) {
        int32_t num_taken = -1;
        assert_fails(error, LOOM_INVALID, "wisdom", LINES[i].why,
                     loom_wisdom_import(context, LINES[i].line, &num_taken, &error));
        assert_int_equal(num_taken, 0);
    }
    assert_string_equal(exported(context), "");

    char longer[1200];
    snprintf(longer, sizeof longer, "wisdom1 schedule=\"%0600d\"", 1);
    assert_fails(error, LOOM_INVALID, "wisdom", "line 1: schedule: it has 600 bytes, the limit is 511",
                 loom_wisdom_import(context, longer, NULL, &error));

    /* The good lines between bad ones are taken. */
    int32_t num_taken = -1;
    assert_fails(error, LOOM_INVALID, "wisdom", "line 1: format: 'a'|\nline 4: pass: 'x'",
                 loom_wisdom_import(context,
                                    "a\n" GOOD_HEAD "rows=4 queries=4 keys=64 ns=1" GOOD_TAIL
                                    "\n\nwisdom1 pass=x\n" GOOD_HEAD
                                    "rows=8 queries=4 keys=64 ns=1" GOOD_TAIL,
                                    &num_taken, &error));
    assert_int_equal(num_taken, 2);
    assert_int_equal(rig_count(exported(context), "\n"), 2);

    /* Lines that the error has no room for are counted. */
    char many[4 * 300 + 1] = "";
    for (int i = 0; i < 300; i++) strcat(many, "bad\n");
    assert_fails(error, LOOM_INVALID, "wisdom", "line 1: format|\nand ",
                 loom_wisdom_import(context, many, NULL, &error));
    int told = rig_count(error.text, "line "), rest = atoi(strstr(error.text, "\nand ") + 5);
    assert_int_equal(told + rest, 300);

    assert_fails(error, LOOM_INVALID, "text", "NULL", loom_wisdom_import(context, NULL, NULL, &error));
    assert_fails(error, LOOM_INVALID, "context", "NULL", loom_wisdom_import(NULL, "", NULL, &error));
    assert_fails(error, LOOM_INVALID, "context", "NULL", loom_wisdom_export(NULL, NULL, 0, NULL, &error));
    assert_fails(error, LOOM_INVALID, "text", "NULL", loom_wisdom_export(context, NULL, 9, NULL, &error));
    loom_context_destroy(context);
}

/* Texts with damage anywhere are refused or taken, and nothing else happens. */
static void test_damage(void **state) {
    (void)state;
    static const char GOOD[] = GOOD_HEAD "rows=4 queries=4 keys=64 ns=1" GOOD_TAIL "\n";
    loom_context *context = context_for(9, 0);
    char text[sizeof GOOD];
    for (size_t at = 0; at + 1 < sizeof GOOD; at++) {
        static const char BYTES[] = {0, '\n', '"', ' ', '=', '9', '\xff'};
        for (size_t i = 0; i < sizeof BYTES; i++) {
            memcpy(text, GOOD, sizeof GOOD);
            text[at] = BYTES[i];
            loom_error error = LOOM_ERROR_INIT;
            loom_status status = loom_wisdom_import(context, text, NULL, &error);
            if (status) assert_string_equal(error.field, "wisdom");
        }
    }
    loom_context_destroy(context);
}

/* -- Merging --------------------------------------------------------------------------------------------- */

static void test_the_faster_stays(void **state) {
    (void)state;
    loom_context *context = context_for(9, 0);
    loom__wisdom_entry list[] = {
        entry_of(context, "bf16", 500, "tile=1"), entry_of(context, "bf16", 400, "tile=2"),
        entry_of(context, "bf16", 600, "tile=3"), entry_of(context, "fp32", 9, "tile=4"),
        entry_of(context, "bf16", 400, "tile=22")};
    enum { NUM = sizeof list / sizeof list[0] };
    list[3].class.keys = 64;
    const char *first = NULL;
    for (int start = 0; start < NUM; start++) {
        loom_context *other = context_without_file();
        for (int i = 0; i < NUM; i++) learn(other, &list[(start + i) % NUM]);
        const char *text = exported(other);
        assert_int_equal(rig_count(text, "\n"), 2);
        rig_expect(text, "ns=400 |schedule=\"tile=2\"|ns=9 ");
        if (!first) first = strdup(text);
        assert_string_equal(text, first);
        loom_context_destroy(other);
    }
    free((char *)first);

    /* What an entry is for: each of these is another. */
    loom__wisdom_entry own[] = {list[0], list[0], list[0], list[0], list[0], list[0], list[0]};
    own[0].device = "Test 1";
    own[1].units = 99;
    own[2].target = "hopper";
    own[3].pass = LOOM_BACKWARD;
    own[4].class.rows = 1;
    own[5].generator = DIGEST;
    for (int i = 0; i < 7; i++) learn(context, &own[i]);
    assert_int_equal(rig_count(exported(context), "\n"), 7);
    loom_context_destroy(context);
}

/* What was measured beside the old entry, or instead of it, has the last word; in the file too. */
static void test_what_was_tried_is_replaced(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    loom_context *context = context_for(9, 0);
    loom__wisdom_entry fast = entry_of(context, "bf16", 1, "tile=1"), slow = fast, other = fast;
    slow.ns = 500;
    slow.schedule = "tile=2";
    other.ns = 600;
    other.schedule = "tile=3";
    learn(context, &fast);
    assert_ok(error, loom__wisdom_learn(context, &slow, "tile=9", &error));
    rig_expect(exported(context), "ns=1 |schedule=\"tile=1\"");
    assert_ok(error, loom__wisdom_learn(context, &slow, "tile=1", &error));
    rig_expect(exported(context), "ns=500 |schedule=\"tile=2\"");
    assert_ok(error,
              loom__wisdom_learn(context, &other, "tile=1", &error)); /* what another process found since */
    rig_expect(exported(context), "ns=500 |schedule=\"tile=2\"");
    loom_context_destroy(context);
    context = context_for(9, 0);
    assert_int_equal(rig_count(exported(context), "\n"), 1);
    rig_expect(exported(context), "ns=500 |schedule=\"tile=2\"");
    loom_context_destroy(context);
}

/* -- The file -------------------------------------------------------------------------------------------- */

static void test_file(void **state) {
    (void)state;
    loom_context *context = context_for(9, 0), *other = context_for(9, 0);
    struct stat facts;
    loom__wisdom_entry entry = entry_of(context, "bf16", 500, "tile=1");
    assert_string_equal(exported(other), "");
    learn(context, &entry);
    assert_int_equal(stat(rig_path("cache/wisdom1.txt"), &facts), 0);
    assert_int_equal(facts.st_mode & 0777, 0600);
    /* Another process, which has read the file before, sees what was added. */
    assert_string_equal(exported(other), exported(context));
    entry.ns = 300;
    learn(other, &entry);
    rig_expect(exported(context), "ns=300 ");

    /* What is imported stays out of the file until it is saved. */
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error,
              loom_wisdom_import(context, GOOD_HEAD "rows=4 queries=4 keys=64 ns=1" GOOD_TAIL, NULL, &error));
    assert_int_equal(rig_count(exported(context), "\n"), 2);
    assert_int_equal(rig_count(exported(other), "\n"), 1);
    assert_ok(error, loom__wisdom_save(context, &error));
    assert_int_equal(rig_count(exported(other), "\n"), 2);
    loom_context_destroy(context);
    loom_context_destroy(other);

    /* A damaged line is told once and left out; the rest is there, and the next writer drops it. */
    FILE *file = fopen(rig_path("cache/wisdom1.txt"), "ab");
    fputs("wisdom1 device=\"Te", file);
    fclose(file);
    context = context_for(9, 0);
    rig_log_start();
    const char *text = exported(context);
    const char *log = rig_log_stop();
    assert_int_equal(rig_count(text, "\n"), 2);
    rig_expect(log, "leaves out line 3 of |wisdom1.txt: device: its value is not between quotes");
    entry.ns = 200;
    rig_log_start();
    learn(context, &entry);
    rig_log_stop();
    loom_context_destroy(context);
    context = context_for(9, 0);
    rig_log_start();
    assert_int_equal(rig_count(exported(context), "\n"), 2);
    assert_string_equal(rig_log_stop(), "");

    /* What is no file of ours is neither read nor replaced. */
    assert_int_equal(unlink(rig_path("cache/wisdom1.txt")), 0);
    rig_write(rig_path("elsewhere"), "precious");
    assert_int_equal(symlink(rig_path("elsewhere"), rig_path("cache/wisdom1.txt")), 0);
    assert_fails(error, LOOM_IO, "cache_dir",
                 "cannot write |wisdom1.txt: ", loom__wisdom_learn(context, &entry, NULL, &error));
    assert_int_equal(stat(rig_path("elsewhere"), &facts), 0);
    assert_int_equal(facts.st_size, strlen("precious"));
    loom_context_destroy(context);

    /* Without a folder wisdom stays in memory. */
    setenv("LOOM_CACHE_DIR", rig_path("none"), 1);
    loom_options options = LOOM_OPTIONS_INIT;
    options.cache_dir = "";
    assert_ok(error, loom_context_create(&options, &context, &error));
    learn(context, &entry);
    assert_int_equal(rig_count(exported(context), "\n"), 1);
    assert_int_equal(stat(rig_path("none"), &facts), -1);
    loom_context_destroy(context);
}

/* Learns entries of its own, one write each. */
static void learn_many(int process, int num) {
    loom_context *context = context_for(9, 0);
    for (int i = 0; i < num; i++) {
        char schedule[64];
        snprintf(schedule, sizeof schedule, "tile=%d", 1000 * process + i);
        loom__wisdom_entry entry = entry_of(context, "bf16", 100, schedule);
        entry.units = 1 + 1000 * process + i;
        loom_error error = LOOM_ERROR_INIT;
        if (loom__wisdom_learn(context, &entry, NULL, &error)) _exit(1);
    }
    loom_context_destroy(context);
}

/* Processes that write at once lose nothing, and one that is killed while it writes blocks nobody. */
/* The comments that the file begins with stay; those between entries go. */
static void test_comments(void **state) {
    (void)state;
    char line[600], text[1400], path[300];
    loom_context *context = context_for(9, 0);
    loom__wisdom_entry entry = entry_of(context, "bf16", 500, "tile=1"),
                       other = entry_of(context, "fp32", 9, "tile=2");
    learn(context, &entry);
    snprintf(line, sizeof line, "%s", exported(context));
    snprintf(path, sizeof path, "%s", rig_path("cache/wisdom1.txt"));
    snprintf(text, sizeof text, "# of the machine in the corner\n#\n%s# about nothing\n", line);
    rig_write(path, text);
    learn(context, &other);
    loom_context_destroy(context);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    assert_ptr_equal(strstr(text, "# of the machine in the corner\n#\nwisdom1 "), text);
    assert_int_equal(rig_count(text, "\n"), 4);
    assert_int_equal(rig_count(text, "#"), 2);

    rig_write(path, "# without an end");
    context = context_for(9, 0);
    learn(context, &entry);
    loom_context_destroy(context);
    file = fopen(path, "rb");
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    assert_ptr_equal(strstr(text, "# without an end\nwisdom1 "), text);
    assert_int_equal(rig_count(text, "\n"), 2);
}

static void test_processes(void **state) {
    (void)state;
    enum { NUM_PROCESSES = 4, NUM_ENTRIES = 25 };
    pid_t children[NUM_PROCESSES], victims[3];
    for (int i = 0; i < 3; i++) {
        victims[i] = fork();
        assert_true(victims[i] >= 0);
        if (victims[i] == 0) {
            for (int round = 0;; round++) learn_many(NUM_PROCESSES + i, 1 + round % 40);
        }
    }
    for (int i = 0; i < NUM_PROCESSES; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            learn_many(i, NUM_ENTRIES);
            _exit(0);
        }
    }
    for (int i = 0; i < 3; i++) {
        usleep(30000);
        kill(victims[i], SIGKILL);
        waitpid(victims[i], NULL, 0);
    }
    for (int i = 0; i < NUM_PROCESSES; i++) {
        int status = -1;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    loom_context *context = context_for(9, 0);
    rig_log_start();
    const char *text = exported(context);
    assert_string_equal(rig_log_stop(), "");
    for (int process = 0; process < NUM_PROCESSES; process++) {
        for (int i = 0; i < NUM_ENTRIES; i++) {
            char schedule[64];
            snprintf(schedule, sizeof schedule, " schedule=\"tile=%d\" ", 1000 * process + i);
            rig_expect(text, schedule);
        }
    }
    loom_context_destroy(context);
}

/* Any allocation may fail; what was there before stays. */
static int allocations_left = INT32_MAX;

static void *scarce_resize(void *user, void *block, size_t bytes) {
    (void)user;
    if (!bytes) return free(block), NULL;
    return allocations_left-- > 0 ? realloc(block, bytes) : NULL;
}

static const char *fork_while_editing(void *user, const char *text) {
    pid_t *child = user;
    (void)text;
    *child = fork();
    if (*child == 0) {
        pause();
        _exit(0);
    }
    return "";
}

/* A child that is forked while the file is edited has the lock's file, too, and may live long. */
static void test_a_child_keeps_no_lock(void **state) {
    (void)state;
    loom_context *context = context_for(9, 0);
    loom__arena arena = {&context->memory, NULL};
    loom_error error = LOOM_ERROR_INIT;
    pid_t child = -1;
    context->claim_seconds = 10;
    assert_ok(error,
              loom__cache_edit_text(context, "wisdom1.txt", &arena, fork_while_editing, &child, &error));
    assert_true(child > 0);
    double start = loom__now();
    loom__wisdom_entry entry = entry_of(context, "bf16", 500, "tile=1");
    learn(context, &entry);
    assert_true(loom__now() - start < 5);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

/* Nor does one that holds it for good stop the others: they give up, and say so. */
static void test_a_lock_that_is_held(void **state) {
    (void)state;
    loom_context *context = context_for(9, 0);
    loom_error error = LOOM_ERROR_INIT;
    loom__wisdom_entry entry = entry_of(context, "bf16", 500, "tile=1");
    learn(context, &entry);
    int lock = open(rig_path("cache/wisdom1.txt.lock"), O_RDWR);
    assert_int_equal(flock(lock, LOCK_EX), 0);
    context->claim_seconds = 0.1;
    entry.ns = 300;
    assert_fails(error, LOOM_IO, "cache_dir",
                 "cannot write |wisdom1.txt: ", loom__wisdom_learn(context, &entry, NULL, &error));
    close(lock);
    learn(context, &entry);
    rig_expect(exported(context), "ns=300 ");
    loom_context_destroy(context);
}

/* Zeros, as a crash may leave, are the loss of their line alone. */
static void test_zeros_in_the_file(void **state) {
    (void)state;
    loom_context *context = context_for(9, 0);
    loom__wisdom_entry entry = entry_of(context, "bf16", 500, "tile=1");
    learn(context, &entry);
    FILE *file = fopen(rig_path("cache/wisdom1.txt"), "ab");
    fwrite("wisdom1 \0\0\n", 1, 11, file);
    fputs(GOOD_HEAD "rows=4 queries=4 keys=64 ns=1" GOOD_TAIL "\n", file);
    fclose(file);
    rig_log_start();
    entry.ns = 300;
    learn(context, &entry);
    rig_log_stop();
    loom_context_destroy(context);
    context = context_for(9, 0);
    assert_int_equal(rig_count(exported(context), "\n"), 2);
    loom_context_destroy(context);
}

static void test_no_memory(void **state) {
    (void)state;
    static const loom__hooks HOOKS = {.memory = {scarce_resize, NULL}, .driver = &DRIVER};
    loom_error error = LOOM_ERROR_INIT;
    loom_context *context = context_for(9, 0);
    loom__wisdom_entry entry = entry_of(context, "bf16", 500, "tile=1");
    learn(context, &entry);
    loom_context_destroy(context);
    loom_status status = LOOM_MEMORY;
    for (int limit = 0; status; limit++) {
        assert_true(limit < 1000);
        context = rig_context(&HOOKS);
        allocations_left = limit;
        status =
            loom_wisdom_import(context, GOOD_HEAD "rows=4 queries=4 keys=64 ns=1" GOOD_TAIL, NULL, &error);
        if (!status) status = loom__wisdom_save(context, &error);
        allocations_left = INT32_MAX;
        if (status == LOOM_IO)
            rig_expect(error.text, "memory"); /* told as what the file could not be made for */
        else if (status)
            assert_int_equal(status, LOOM_MEMORY);
        loom_context_destroy(context);
    }
    context = context_for(9, 0);
    assert_int_equal(rig_count(exported(context), "\n"), 2);
    loom_context_destroy(context);
}

/* -- Classes --------------------------------------------------------------------------------------------- */

static void test_classes(void **state) {
    (void)state;
    static const struct {
        loom_shape hint;
        int64_t rows, queries, keys;
    } CASES[] = {
        {{0, 0, 0, 0, 0}, 1 << 18, 1024, 2048},
        {{4, 32, 8, 4096, 4096}, 1 << 18, 1024, 4096},
        {{4, 32, 8, 4500, 4500}, 1 << 18, 1024, 4096},
        {{4, 32, 8, 5792, 5792}, 1 << 18, 1024, 4096},
        {{4, 32, 8, 5793, 5793}, 1 << 18, 1024, 8192},
        {{1, 32, 8, 1, 8192}, 32, 1, 8192},
        {{1, 24, 8, 1, 8192}, 32, 1, 8192},
        {{1, 1, 1, 300, 10}, 256, 256, 64},
        {{1, 1, 1, 0, 512}, 512, 512, 512},
        {{1, 1, 1, 512, 0}, 512, 512, 512},
        {{0, 8, 8, 64, 64}, 2048, 64, 64},
        {{INT64_C(1) << 40, INT64_C(1) << 40, 1, INT64_C(1) << 40, INT64_C(1) << 40}, 1 << 18, 1024, 1 << 17},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        loom__shape_class class = loom__shape_class_of(&CASES[i].hint);
        if (class.rows != CASES[i].rows || class.queries != CASES[i].queries || class.keys != CASES[i].keys)
            fail_msg("case %zu: rows=%lld queries=%lld keys=%lld", i, (long long)class.rows,
                     (long long)class.queries, (long long)class.keys);
    }
}

/* Times of two shapes of one class are compared as of one size. */
static void test_shares(void **state) {
    (void)state;
    static const struct {
        loom_shape hint;
        double share;
    } CASES[] = {{{4, 32, 8, 2048, 2048}, 1},    {{4, 32, 8, 2048, 2560}, 0.8},
                 {{8, 32, 8, 2048, 2048}, 0.5},  {{4, 32, 8, 2560, 1600}, 1.024},
                 {{1, 32, 8, 1, 6144}, 8.0 / 6}, {{0, 0, 0, 0, 0}, 1}};
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        double share = loom__shape_class_share(&CASES[i].hint);
        if (share < 0.999 * CASES[i].share || share > 1.001 * CASES[i].share)
            fail_msg("case %zu: %g, not %g", i, share, CASES[i].share);
    }
}

/* -- Plans ----------------------------------------------------------------------------------------------- */

static loom_status plan_near(loom_context *context, int32_t rigor, uint32_t flags, int64_t length,
                             loom_plan **plan, loom_error *error) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "bf16 backward";
    desc.rigor = rigor;
    desc.flags = flags;
    desc.hint = (loom_shape){16, 32, 32, length, length};
    return loom_plan_create(context, &desc, plan, error);
}

static void expect_schedules(loom_context *context, int32_t rigor, int64_t length, const char *forward,
                             const char *backward) {
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, plan_near(context, rigor, 0, length, &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), forward);
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE_BACKWARD), backward);
    loom_plan_destroy(plan);
}

static void test_plans_take_it(void **state) {
    (void)state;
    loom_context *context = context_for(9, 0);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom__wisdom_entry entry = entry_of(context, "backward bf16", 500, "tile=40");
    expect_schedules(context, LOOM_ESTIMATE, 2048, "tile=4", "tile=8");
    assert_fails(error, LOOM_NOT_FOUND, "desc.rigor",
                 "no wisdom near rows=262144 queries=1024 keys=2048|forward|target mma|Test 0|attnloom "
                 "tune|backward bf16",
                 plan_near(context, LOOM_WISDOM_ONLY, 0, 2048, &plan, &error));
    assert_null(plan);

    /* Another device, another problem, another generator: not for this plan. */
    loom__wisdom_entry other = entry;
    other.device = "Test 1";
    learn(context, &other);
    other = entry, other.problem = "bf16";
    learn(context, &other);
    other = entry, other.generator = DIGEST;
    learn(context, &other);
    other = entry, other.target = "hopper";
    learn(context, &other);
    expect_schedules(context, LOOM_ESTIMATE, 2048, "tile=4", "tile=8");

    learn(context, &entry);
    expect_schedules(context, LOOM_ESTIMATE, 2048, "tile=40", "tile=8");
    assert_fails(error, LOOM_NOT_FOUND, "desc.rigor", "for the backward of target mma",
                 plan_near(context, LOOM_WISDOM_ONLY, 0, 2048, &plan, &error));
    entry.pass = LOOM_BACKWARD;
    entry.schedule = "tile=80";
    learn(context, &entry);
    expect_schedules(context, LOOM_WISDOM_ONLY, 2048, "tile=40", "tile=80");

    /* The nearest class, up to two steps away. */
    expect_schedules(context, LOOM_WISDOM_ONLY, 8192, "tile=40", "tile=80");
    expect_schedules(context, LOOM_WISDOM_ONLY, 0, "tile=40", "tile=80");
    expect_schedules(context, LOOM_ESTIMATE, 16384, "tile=4", "tile=8");
    entry.class.keys = 16384;
    entry.schedule = "tile=81";
    learn(context, &entry);
    expect_schedules(context, LOOM_ESTIMATE, 16384, "tile=4", "tile=81");
    expect_schedules(context, LOOM_ESTIMATE, 4096, "tile=40", "tile=80");
    expect_schedules(context, LOOM_ESTIMATE, 8192, "tile=40", "tile=81");

    /* What is asked for comes first. */
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "bf16 backward";
    desc.schedule = "tile=5";
    desc.rigor = LOOM_WISDOM_ONLY;
    assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=5");
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE_BACKWARD), "tile=80");
    loom_plan_destroy(plan);

    /* Packs have the model's schedule, so who may not compile gets that; unless wisdom is asked for. */
    assert_ok(error, plan_near(context, LOOM_ESTIMATE, LOOM_NO_COMPILE, 2048, &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=4");
    loom_plan_destroy(plan);
    assert_ok(error, plan_near(context, LOOM_WISDOM_ONLY, LOOM_NO_COMPILE, 2048, &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=40");
    loom_plan_destroy(plan);

    desc.device = LOOM_DEVICE_NONE;
    desc.arch = "sm_90";
    assert_fails(error, LOOM_INVALID, "desc.rigor", "LOOM_WISDOM_ONLY needs a device",
                 loom_plan_create(context, &desc, &plan, &error));
    desc.rigor = LOOM_ESTIMATE;
    desc.schedule = NULL;
    assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=4");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* On the host entries are of its processor and the context's threads. */
/* -- What is shipped ------------------------------------------------------------------------------------- */

/* A line of the fake device, of another generator. */
#define SHIPPED(keys, schedule)                                                                              \
    "wisdom1 device=\"Test 0\" units=100 target=mma pass=forward rows=262144 queries=1024 keys=" keys        \
    " ns=7 generator=0123456789abcdef0123456789abcdef schedule=\"" schedule "\" problem=backward bf16\n"

/* A context that the library ships this to. */
static loom_context *context_with(const char *shipped) {
    const loom__hooks hooks = {.driver = &DRIVER, .shipped_wisdom = shipped};
    loom_context_destroy(context_for(9, 0));
    return rig_context(&hooks);
}

/* It chooses schedules though its generator is another, is not the context's to export, and no answer for who
 * measures. What was measured here comes first, unless it is further away. */
static void test_shipped(void **state) {
    (void)state;
    loom_context *context =
        context_with("# for tests\n" SHIPPED("2048", "tile=41") SHIPPED("8192", "tile=42"));
    loom__wisdom_entry entry = entry_of(context, "backward bf16", 500, "tile=40");
    expect_schedules(context, LOOM_ESTIMATE, 2048, "tile=41", "tile=8");
    expect_schedules(context, LOOM_ESTIMATE, 8192, "tile=42", "tile=8");
    expect_schedules(context, LOOM_ESTIMATE, 65536, "tile=4", "tile=8");
    assert_string_equal(exported(context), "");
    assert_null(loom__wisdom_find(context, &entry, 0, false));
    entry.pass = LOOM_BACKWARD;
    entry.schedule = "tile=80";
    learn(context, &entry);
    expect_schedules(context, LOOM_WISDOM_ONLY, 2048, "tile=41", "tile=80");
    entry.pass = LOOM_FORWARD;
    entry.schedule = "tile=40";
    learn(context, &entry);
    expect_schedules(context, LOOM_ESTIMATE, 2048, "tile=40", "tile=80");
    expect_schedules(context, LOOM_ESTIMATE, 8192, "tile=42", "tile=80");
    assert_int_equal(rig_count(exported(context), "\n"), 2);
    loom_context_destroy(context);

    /* One of this generator is an answer. */
    char line[400], digest[33];
    loom_error error = LOOM_ERROR_INIT;
    rig_remove_tree(rig_path("cache"));
    context = context_for(9, 0);
    assert_ok(error, loom__generator_digest(context, digest, &error));
    loom_context_destroy(context);
    snprintf(line, sizeof line, "%s", SHIPPED("2048", "tile=41"));
    memcpy(strstr(line, DIGEST), digest, 32);
    context = context_with(line);
    const loom__wisdom_entry *found = loom__wisdom_find(context, &entry, 0, false);
    assert_non_null(found);
    assert_string_equal(found->schedule, "tile=41");
    loom_context_destroy(context);
}

/* The lines in the library are as an export prints them. */
static void test_shipped_files(void **state) {
    (void)state;
    unsetenv("LOOM_GEN_DIR");
    loom_error error = LOOM_ERROR_INIT;
    assert_true(loom__num_wisdom_files > 0);
    for (int i = 0; i < loom__num_wisdom_files; i++) {
        loom_context *context = context_without_file();
        const char *text = loom__wisdom_files[i].bytes;
        size_t needed = 0;
        assert_ok(error, loom_wisdom_import(context, text, NULL, &error));
        while (*text == '#') text += strcspn(text, "\n") + 1;
        loom_wisdom_export(context, NULL, 0, &needed, NULL);
        char *all = malloc(needed);
        assert_ok(error, loom_wisdom_export(context, all, needed, NULL, &error));
        if (strcmp(all, text)) fail_msg("%s is not sorted, or has lines twice", loom__wisdom_files[i].path);
        free(all);
        loom_context_destroy(context);
    }
}

static void test_host(void **state) {
    (void)state;
    loom_context *context = context_for(9, 0);
    loom__arena arena = {&context->memory, NULL};
    loom_error error = LOOM_ERROR_INIT;
    loom__wisdom_entry entry = entry_of(context, "bf16", 500, "tile=40");
    assert_ok(error, loom__wisdom_device(context, NULL, &arena, &entry, &error));
    assert_true(strlen(entry.device) >= 3 && !strpbrk(entry.device, "\"\n"));
    assert_int_equal(entry.units, context->num_threads);
    entry.target = "host";
    learn(context, &entry);
    loom_plan *plan = rig_plan(context, "bf16");
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=40");
    loom_plan_destroy(plan);
    loom__arena_free(&arena);
    loom_context_destroy(context);
}

/* A plan whose schedule a file of many entries has, kernels cached. */
static void test_it_is_fast(void **state) {
    (void)state;
    enum { NUM_ENTRIES = 500, NUM_RUNS = 7 };
    static const double MOST_SECONDS = 5e-3;
    loom_context *context = context_for(9, 0);
    char *text = calloc(NUM_ENTRIES, 400);
    size_t used = 0;
    loom_error error = LOOM_ERROR_INIT;
    loom__wisdom_entry entry = entry_of(context, "backward bf16", 500, "tile=40");
    learn(context, &entry);
    for (int i = 0; i < NUM_ENTRIES; i++)
        used += (size_t)sprintf(
            text + used,
            "wisdom1 device=\"Test 0\" units=%d target=mma pass=forward rows=4 queries=4 keys=64 "
            "ns=5" GOOD_TAIL "\n",
            1000 + i);
    assert_ok(error, loom_wisdom_import(context, text, NULL, &error));
    assert_ok(error, loom__wisdom_save(context, &error));
    free(text);
    expect_schedules(context, LOOM_ESTIMATE, 2048, "tile=40", "tile=8");
    double best = 1;
    for (int i = 0; i < NUM_RUNS; i++) {
        double start = loom__now();
        expect_schedules(context, LOOM_ESTIMATE, 2048, "tile=40", "tile=8");
        double seconds = loom__now() - start;
        best = seconds < best ? seconds : best;
    }
    printf("a plan from wisdom of %d entries: %.2f ms\n", NUM_ENTRIES + 1, 1e3 * best);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(best < MOST_SECONDS);
#endif
    (void)MOST_SECONDS;
    loom_context_destroy(context);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_what_is_written_is_read, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_refused_lines, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_damage, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_the_faster_stays, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_what_was_tried_is_replaced, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_file, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_comments, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_processes, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_a_child_keeps_no_lock, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_a_lock_that_is_held, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_zeros_in_the_file, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_no_memory, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_shares, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_classes, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_plans_take_it, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_shipped, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_shipped_files, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_host, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_it_is_fast, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
