/* test_cli.c - the program `attnloom` as a user meets it: help, errors, exit codes, texts, files. Each run is
 * a child process that calls the program's main with its streams in files.
 *
 * ctest: gpu
 *
 * Golden files lie in tests/golden; `test_cli --update`, run in the source folder, writes them anew. */
#define _XOPEN_SOURCE 700
#include <ftw.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli.h"
#include "compile.h"
#include "device.h"
#include "harness.h"
#include "npy.h"

enum { MAX_ARGUMENTS = 40, MAX_PATH = 512 };

static char folder[MAX_PATH - 64]; /* of this program: cache, files */
static bool update;                /* write the golden files */

/* -- Running the program -------------------------------------------------------------------------------- */

typedef struct outcome {
    int status;
    char *out, *err;
} outcome;

/* Texts of tests stay reachable, so that a test that fails half way leaks nothing into the children that
 * follow. */
static char *keep(char *text) {
    static char *kept[64];
    static size_t num_kept;
    char **place = &kept[num_kept++ % 64];
    free(*place);
    return *place = text;
}

static char *read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    long size = 0;
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    size = ftell(file);
    rewind(file);
    text = calloc(1, (size_t)size + 1);
    if (fread(text, 1, (size_t)size, file) != (size_t)size) text[0] = 0;
    fclose(file);
    return keep(text);
}

static void path_in(char *path, const char *name) { snprintf(path, MAX_PATH, "%s/%s", folder, name); }

/* A child that crashes must die: cmocka's handlers would go on with the tests in it. */
static void become_plain(void) {
    const int signals[] = {SIGSEGV, SIGABRT, SIGFPE, SIGILL, SIGBUS};
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) signal(signals[i], SIG_DFL);
}

/* Runs `attnloom` with the words given, NULL after the last. */
static outcome run_words(char **words, int num_words) {
    outcome last;
    char out[MAX_PATH + 8], err[MAX_PATH + 8];
    int status = 0;
    path_in(out, "stdout");
    path_in(err, "stderr");
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        become_plain();
        if (!freopen(out, "wb", stdout) || !freopen(err, "wb", stderr)) _exit(99);
        exit(loom__cli_main(num_words, words));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    last.out = read_file(out);
    last.err = read_file(err);
    last.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return last;
}

#define RUN(...)                                                                                             \
    run_words((char *[]){"attnloom", __VA_ARGS__, NULL},                                                     \
              (int)(sizeof((char *[]){"attnloom", __VA_ARGS__}) / sizeof(char *)))

/* Fails with the texts of the run, which say more than the number. */
static outcome expect(outcome got, int status) {
    if (got.status != status) fail_msg("exit status %d, not %d\n%s%s", got.status, status, got.out, got.err);
    return got;
}

static void expect_text(const char *text, const char *part) {
    if (!strstr(text, part)) fail_msg("'%s' is not in:\n%s", part, text);
}

/* -- Help and errors ------------------------------------------------------------------------------------ */

static const char *const COMMANDS[] = {"emit", "why",    "show", "run",  "check", "compile", "bench",
                                       "tune", "wisdom", "pack", "plan", "cache", "info"};

static void help_is_printed(void **state) {
    (void)state;
    outcome got = expect(RUN("--help"), 0);
    for (size_t i = 0; i < sizeof COMMANDS / sizeof COMMANDS[0]; i++) {
        char word[32];
        snprintf(word, sizeof word, "\n  %s ", COMMANDS[i]);
        expect_text(got.out, word);
    }
    assert_string_equal(got.err, "");
}

static void each_command_has_help(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof COMMANDS / sizeof COMMANDS[0]; i++) {
        char usage[48];
        outcome got = expect(RUN((char *)COMMANDS[i], "--help"), 0);
        snprintf(usage, sizeof usage, "usage: attnloom %s", COMMANDS[i]);
        expect_text(got.out, usage);
        expect_text(got.out, "--help");
        expect_text(got.out, "examples:");
        assert_string_equal(got.err, "");
        for (const char *line = got.out; *line; line += strcspn(line, "\n"), line += *line == '\n')
            assert_in_range(strcspn(line, "\n"), 0, 110);
    }
}

static void wrong_usage_is_said(void **state) {
    (void)state;
    const struct {
        char *words[6];
        int num;
        const char *said;
    } list[] = {
        {{"attnloom"}, 1, "a command is missing"},
        {{"attnloom", "emti"}, 2, "emti: no such command; did you mean emit?"},
        {{"attnloom", "qqqqqqqqqq"}, 2, "no such command; `attnloom --help` lists them"},
        {{"attnloom", "emit"}, 2, "emit: PROBLEM is missing"},
        {{"attnloom", "emit", "bf16 d=64", "causal"}, 4, "unexpected operand 'causal'"},
        {{"attnloom", "emit", "bf16 d=64", "--pas", "backward"},
         5,
         "--pas: no such option; did you mean --pass?"},
        {{"attnloom", "emit", "bf16 d=64", "--zzzzzzzz"}, 4, "--zzzzzzzz: no such option\n"},
        {{"attnloom", "emit", "bf16 d=64", "--pass"}, 4, "--pass: needs a value, forward|backward"},
        {{"attnloom", "emit", "bf16 d=64", "--pass=sideways"},
         4,
         "--pass: 'sideways': it takes one of forward|backward"},
        {{"attnloom", "emit", "bf16 d=64", "--standalone=1"}, 4, "--standalone: it takes no value"},
        {{"attnloom", "why", "bf16 d=64", "--shape", "batch=x"}, 5, "--shape: 'batch=x' is not batch=B"},
        {{"attnloom", "why", "bf16 d=64", "--shape", "seq=3:"}, 5, "'seq=3:' is not batch=B"},
        {{"attnloom", "run", "bf16 d=64", "--device", "gpu"},
         5,
         "--device: 'gpu': it takes the number of a CUDA device or 'host'"},
        {{"attnloom", "why", "bf16 d=64", "--shape", "seq=9 heads=3:2"},
         5,
         "--shape: 'heads=3:2': heads of q must be a multiple"},
        {{"attnloom", "why", "bf16 d=64", "--shape", "heads=5:0"}, 5, "'heads=5:0': heads of q"},
        {{"attnloom", "run", "bf16 d=64", "--scale", "nan"},
         5,
         "--scale: 'nan': it takes a number that is finite and above 0 as a float"},
        {{"attnloom", "run", "bf16 d=64", "--scale", "0"}, 5, "--scale: '0': it takes a number"},
        {{"attnloom", "run", "bf16 d=64", "--scale", "-1"}, 5, "--scale: '-1': it takes a number"},
        {{"attnloom", "run", "bf16 d=64", "--scale", "1e-50"}, 5, "--scale: '1e-50': it takes a number"},
        {{"attnloom", "run", "bf16 d=64", "--scale", "1e50"}, 5, "--scale: '1e50': it takes a number"},
        {{"attnloom", "run", "bf16 d=64"}, 3, "run: needs --q, --k and --v"},
        {{"attnloom", "bench"}, 2, "give either PROBLEM or --grid paper"},
        {{"attnloom", "bench", "--hdim", "64,,128"}, 4, "--hdim: '64,,128': it takes at most"},
        {{"attnloom", "bench", "--mode", "burst,slow"},
         4,
         "--mode: 'burst,slow': it takes words of burst|sustained"},
        {{"attnloom", "tune"}, 2, "tune: PROBLEM|MANIFEST is missing"},
        {{"attnloom", "tune", "bf16 d=64", "--budget", "soon"},
         5,
         "--budget: 'soon': it takes seconds or minutes"},
        {{"attnloom", "tune", "bf16 d=64", "--budget", "0s"},
         5,
         "--budget: '0s': it takes seconds or minutes"},
        {{"attnloom", "tune", "bf16 d=64", "--budget", "5h"},
         5,
         "--budget: '5h': it takes seconds or minutes"},
        {{"attnloom", "wisdom", "print"}, 3, "wisdom: 'print' is not export or import FILE"},
        {{"attnloom", "wisdom", "import"}, 3, "wisdom: import takes a FILE"},
        {{"attnloom", "wisdom", "export", "file"}, 4, "wisdom: export takes no FILE"},
        {{"attnloom", "cache"}, 2, "cache: list|verify|clear is missing"},
        {{"attnloom", "cache", "lst"}, 3, "'lst' is not one of list, verify, clear; did you mean list?"},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        outcome got = expect(run_words((char **)list[i].words, list[i].num), 2);
        expect_text(got.err, list[i].said);
        assert_string_equal(got.out, "");
    }
}

static void problem_errors_are_printed(void **state) {
    (void)state;
    outcome got = expect(RUN("emit", "bf16 d=64 mask={k <= qq}"), 1);
    expect_text(got.err, "attnloom: problem.mask: \"qq\" is neither declared");
    expect_text(got.err, "^");
    assert_string_equal(got.out, "");
    got = expect(RUN("emit", "bf16 d=6 mask={k <= qq}"), 1);
    expect_text(got.err, "attnloom: problem.d: head dim 6: ");
    expect_text(got.err, "\nproblem.mask: \"qq\" is");
    got = expect(RUN("emit", "fp32 d=64", "--target", "mma"), 1);
    expect_text(got.err, "attnloom: problem.dtype: ");
    got = expect(RUN("emit", "bf16 d=64 causal", "--pass", "backward"), 1);
    expect_text(got.err, "lacks the word 'backward'");
    got = expect(RUN("emit", "bf16 d=64 causal", "--kernel", "sideways"), 1);
    expect_text(got.err, "has no kernel 'sideways' of variant '*'; it has: forward (tma)");
    got = expect(RUN("emit", "bf16 d=64 causal", "--variant", "any"), 0);
    expect_text(got.out, ", variant any\n");
}

static void full_disk_is_a_failure(void **state) {
    (void)state;
    if (access("/dev/full", W_OK) != 0) skip();
    fflush(NULL);
    pid_t child = fork();
    int status = 0;
    if (child == 0) {
        become_plain();
        char *words[] = {"attnloom", "--help", NULL};
        if (!freopen("/dev/full", "wb", stdout) || !freopen("/dev/null", "wb", stderr)) _exit(99);
        _exit(loom__cli_main(2, words));
    }
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 1);
}

/* -- Emitted texts -------------------------------------------------------------------------------------- */

static const struct {
    const char *file;
    char *words[10];
} GOLDENS[] = {
    {"bf16_d128_causal.cu", {"bf16 d=128 causal", "--target", "mma", "--arch", "sm_90"}},
    {"fp16_d64_window_backward.cu",
     {"fp16 d=64 mask={causal & window(255, 0)} backward", "--arch", "sm_75", "--pass", "backward"}},
    {"bf16_d96_64_softcap_deterministic.cu",
     {"bf16 d=96:64 score={softcap(50)} backward deterministic", "--arch", "sm_80", "--pass", "backward"}},
    {"fp16_d64_document.cu",
     {"fp16 d=64 mask={doc[q] == doc[k]} params={doc: i32[seq_k]}", "--arch", "sm_86"}},
    {"bf16_d128_causal_hopper.cu", {"bf16 d=128 causal", "--target", "hopper", "--arch", "sm_90"}},
    {"bf16_d128_causal_backward_hopper.cu",
     {"bf16 d=128 causal backward", "--target", "hopper", "--arch", "sm_90", "--pass", "backward", "--kernel",
      "backward_dkv"}},
    {"bf16_d64_causal_standalone.cu", {"bf16 d=64 causal", "--arch", "sm_80", "--standalone"}},
    {"fp32_d40_causal.c", {"fp32 d=40 causal backward", "--target", "host"}},
    {"bf16_d64_alibi_backward.c",
     {"bf16 d=64 mask={causal} score={alibi(slopes[h])} params={slopes: f32[heads_q]} backward", "--target",
      "host", "--pass", "backward"}},
};

static outcome emit_golden(size_t i) {
    char *words[14] = {"attnloom", "emit"};
    int num = 2;
    for (int j = 0; GOLDENS[i].words[j]; j++) words[num++] = GOLDENS[i].words[j];
    return expect(run_words(words, num), 0);
}

static void emitted_text_is_golden(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof GOLDENS / sizeof GOLDENS[0]; i++) {
        char path[MAX_PATH];
        snprintf(path, sizeof path, "tests/golden/%s", GOLDENS[i].file);
        outcome got = emit_golden(i);
        if (update) {
            FILE *file = fopen(path, "wb");
            assert_non_null(file);
            assert_int_equal(fwrite(got.out, 1, strlen(got.out), file), strlen(got.out));
            assert_int_equal(fclose(file), 0);
        }
        char *wanted = read_file(path);
        if (!wanted) fail_msg("%s is missing; test_cli --update writes it", path);
        if (strcmp(wanted, got.out) != 0) {
            size_t at = 0, line = 1;
            for (; wanted[at] == got.out[at]; at++) line += wanted[at] == '\n';
            fail_msg("%s: line %zu differs; test_cli --update takes the new text", path, line);
        }
    }
}

static void second_emit_is_equal(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof GOLDENS / sizeof GOLDENS[0]; i++) {
        outcome first = emit_golden(i);
        assert_string_equal(first.out, emit_golden(i).out);
    }
}

static void emit_writes_a_file(void **state) {
    (void)state;
    char path[MAX_PATH], wrong[MAX_PATH];
    path_in(path, "forward.cu");
    path_in(wrong, "no/such/folder.cu");
    outcome printed = expect(RUN("emit", "bf16 d=64 causal"), 0);
    outcome got = expect(RUN("emit", "bf16 d=64 causal", "-o", path), 0);
    assert_string_equal(got.out, "");
    assert_string_equal(read_file(path), printed.out);
    got = expect(RUN("emit", "bf16 d=64 causal", "-o", wrong), 1);
    expect_text(got.err, "cannot be written");
}

static void show_draws_masks(void **state) {
    (void)state;
    outcome got = expect(RUN("show", "bf16 d=64 causal", "--shape", "batch=1 heads=1 seq=4"), 0);
    expect_text(got.out, "\n█▄  \n███▄\n");
    got = expect(RUN("show", "bf16 d=128 causal", "--shape", "seq=512", "--schedule", "tile=128x128"), 0);
    expect_text(got.out, "\n▒···\n█▒··\n██▒·\n███▒\n");
    expect_text(got.out, "visited 10 of 16 (full 6, partial 4), 62.5 % of those of a dense mask");
    got = expect(RUN("show", "bf16 d=64 mask={document(ids)} params={ids: i32[seq_k]}", "--shape", "seq=2"), 0);
    expect_text(got.out, "\n▒▒\n▒▒\n");
    expect_text(got.out, "depends on params");
    got = expect(RUN("show", "bf16 d=64 causal", "--shape", "seq=3", "--svg"), 0);
    expect_text(got.out, "<svg xmlns");
    expect_text(got.out, "<rect x=\"0\" y=\"16\" width=\"24\" height=\"8\" fill=");
    got = expect(RUN("show", "bf16 d=64 causal", "--shape", "seq=2000000000"), 1);
    expect_text(got.err, "shape.seq_q");
}

static void why_tells_tiles(void **state) {
    (void)state;
    // 8 tiles of 128 queries; tile i sees 2 (i + 1) of the 16 tiles of 64 keys, the last two of them in part.
    outcome got = expect(RUN("why", "bf16 d=128 causal", "--shape", "batch=1 heads=8:2 seq=1024",
                             "--schedule", "tile=128x64"),
                         0);
    expect_text(got.out, "bf16 d=128 mask={k <= q}");
    expect_text(got.out, "visited 72 (full 56, partial 16), skipped 56");
    got = expect(RUN("why", "bf16 d=64 causal backward", "--pass", "backward", "--arch", "sm_86"), 0);
    expect_text(got.out, "sm_86");
    expect_text(got.out, "\nbackward: ");
    assert_null(strstr(got.out, "\nforward: "));
    got = expect(RUN("why", "bf16 d=64 causal backward"), 0);
    expect_text(got.out, "\nforward: ");
    assert_null(strstr(got.out, "\nbackward: "));
    got = expect(RUN("why", "bf16 d=64 causal", "--pass", "backward"), 1);
    expect_text(got.err, "attnloom: pass: the problem has no backward pass");
    got = expect(RUN("why", "bf16 d=64 mask={k <= q + w} params={w: i32}"), 0);
    expect_text(got.out, "the mask reads params, whose values are not known here");
    assert_null(strstr(expect(RUN("why", "bf16 d=64 causal"), 0).out, "not known"));
    got = expect(RUN("why", "bf16 d=64", "--schedule", "tile=1x1"), 1);
    expect_text(got.err, "attnloom: schedule: ");
}

/* -- Run ------------------------------------------------------------------------------------------------ */

static void write_array(const char *path, loom__npy_type type, int num_dims, const int64_t *dims,
                        void *data) {
    loom__npy array = {.type = type, .num_dims = num_dims, .num_items = 1, .data = data};
    loom_error error = LOOM_ERROR_INIT;
    for (int i = 0; i < num_dims; i++) array.num_items *= array.dims[i] = dims[i];
    array.num_bytes = (size_t)array.num_items * loom__npy_type_bytes(type);
    if (loom__npy_write(path, &array, &error)) fail_msg("%s: %s", error.field, error.text);
}

static loom__npy read_array(const char *path) {
    loom__npy array;
    loom_error error = LOOM_ERROR_INIT;
    if (loom__npy_read(path, &array, &error)) fail_msg("%s: %s", error.field, error.text);
    return array;
}

/* A small causal case with grouped heads: d = 8, so that it can be computed in the plainest way. */
enum {
    BATCH = 2,
    HEADS = 4,
    HEADS_KV = 2,
    SEQ_Q = 5,
    SEQ_K = 9,
    DIM = 8,
    ITEMS_Q = BATCH * SEQ_Q * HEADS * DIM,
    ITEMS_K = BATCH * SEQ_K * HEADS_KV * DIM
};
static const int64_t DIMS_Q[] = {BATCH, SEQ_Q, HEADS, DIM}, DIMS_K[] = {BATCH, SEQ_K, HEADS_KV, DIM};
static char path_q[MAX_PATH], path_k[MAX_PATH], path_v[MAX_PATH], path_o[MAX_PATH], path_lse[MAX_PATH];
static float data_q[ITEMS_Q], data_k[ITEMS_K], data_v[ITEMS_K];

static void make_inputs(void) {
    path_in(path_q, "q.npy");
    path_in(path_k, "k.npy");
    path_in(path_v, "v.npy");
    path_in(path_o, "o.npy");
    path_in(path_lse, "lse.npy");
    for (int i = 0; i < ITEMS_Q; i++) data_q[i] = (float)(i * 7 % 13 - 6) / 8;
    for (int i = 0; i < ITEMS_K; i++)
        data_k[i] = (float)(i * 5 % 11 - 5) / 8, data_v[i] = (float)(i * 3 % 17 - 8) / 8;
    write_array(path_q, LOOM__NPY_F4, 4, DIMS_Q, data_q);
    write_array(path_k, LOOM__NPY_F4, 4, DIMS_K, data_k);
    write_array(path_v, LOOM__NPY_F4, 4, DIMS_K, data_v);
}

/* Causal attention of one row in double; returns its log-sum-exp. */
static double plain_row(int b, int row, int h, double out[DIM]) {
    double weights[SEQ_K], sum = 0;
    int hkv = h / (HEADS / HEADS_KV);
    for (int i = 0; i < DIM; i++) out[i] = 0;
    for (int col = 0; col <= row + SEQ_K - SEQ_Q; col++) {
        double s = 0;
        for (int i = 0; i < DIM; i++)
            s += (double)data_q[((b * SEQ_Q + row) * HEADS + h) * DIM + i] *
                 (double)data_k[((b * SEQ_K + col) * HEADS_KV + hkv) * DIM + i];
        sum += weights[col] = exp(s / sqrt(DIM));
    }
    for (int col = 0; col <= row + SEQ_K - SEQ_Q; col++)
        for (int i = 0; i < DIM; i++)
            out[i] += weights[col] / sum * (double)data_v[((b * SEQ_K + col) * HEADS_KV + hkv) * DIM + i];
    return log(sum);
}

static void compare_outputs(double tolerance) {
    loom__npy o = read_array(path_o), lse = read_array(path_lse);
    assert_int_equal(o.num_dims, 4);
    assert_int_equal(lse.num_dims, 3);
    for (int i = 0; i < 4; i++) assert_int_equal(o.dims[i], DIMS_Q[i]);
    for (int b = 0; b < BATCH; b++) {
        for (int row = 0; row < SEQ_Q; row++) {
            for (int h = 0; h < HEADS; h++) {
                double wanted[DIM], sum = plain_row(b, row, h, wanted);
                double got = ((float *)lse.data)[(b * HEADS + h) * SEQ_Q + row];
                if (!(fabs(got - sum) <= tolerance)) fail_msg("lse %g is not %g", got, sum);
                for (int i = 0; i < DIM; i++) {
                    got = ((float *)o.data)[((b * SEQ_Q + row) * HEADS + h) * DIM + i];
                    if (!(fabs(got - wanted[i]) <= tolerance)) fail_msg("o %g is not %g", got, wanted[i]);
                }
            }
        }
    }
    loom__npy_free(&o);
    loom__npy_free(&lse);
}

static void run_computes(void **state) {
    (void)state;
    make_inputs();
    outcome got = expect(RUN("run", "fp32 d=8 causal", "--device", "host", "--q", path_q, "--k", path_k,
                             "--v", path_v, "--o", path_o, "--lse", path_lse),
                         0);
    expect_text(got.out, "o.npy f4 [2, 5, 4, 8]");
    expect_text(got.out, "lse.npy f4 [2, 4, 5]");
    compare_outputs(1e-5);
    got = expect(RUN("run", "bf16 d=8 causal", "--device", "host", "--q", path_q, "--k", path_k, "--v",
                     path_v, "--o", path_o, "--lse", path_lse),
                 0);
    expect_text(got.err, "q.npy: converted from f4 to bf16");
    compare_outputs(1e-2);
}

static void run_computes_gradients(void **state) {
    (void)state;
    char dout[MAX_PATH], dv[MAX_PATH];
    float ones[ITEMS_Q];
    make_inputs();
    path_in(dout, "dout.npy");
    path_in(dv, "dv.npy");
    for (int i = 0; i < ITEMS_Q; i++) ones[i] = 1;
    write_array(dout, LOOM__NPY_F4, 4, DIMS_Q, ones);
    expect(RUN("run", "fp32 d=8 causal backward", "--device", "host", "--q", path_q, "--k", path_k, "--v",
               path_v, "--dout", dout, "--dv", dv),
           0);
    // With dO = 1 the gradient of v, summed over keys, is the number of query rows of its heads.
    loom__npy array = read_array(dv);
    for (int b = 0; b < BATCH; b++) {
        for (int h = 0; h < HEADS_KV; h++) {
            double sum = 0;
            for (int col = 0; col < SEQ_K; col++)
                sum += ((float *)array.data)[((b * SEQ_K + col) * HEADS_KV + h) * DIM];
            assert_true(fabs(sum - SEQ_Q * HEADS / HEADS_KV) < 1e-4);
        }
    }
    loom__npy_free(&array);
    outcome got = expect(RUN("run", "fp32 d=8 causal", "--device", "host", "--q", path_q, "--k", path_k,
                             "--v", path_v, "--dout", dout, "--dv", dv),
                         1);
    expect_text(got.err, "attnloom: problem: gradients are asked for");
}

static void run_takes_params(void **state) {
    (void)state;
    char doc[MAX_PATH], param[MAX_PATH + 8];
    int32_t same[SEQ_K];
    int64_t dims[] = {SEQ_K};
    char *problem =
        "fp32 d=8 mask={k <= q & doc[q] == doc[k] & k >= q - width} params={doc: i32[seq_k], width: i32}";
    make_inputs();
    path_in(doc, "doc.npy");
    snprintf(param, sizeof param, "doc=%s", doc);
    for (int i = 0; i < SEQ_K; i++) same[i] = 3;
    write_array(doc, LOOM__NPY_I4, 1, dims, same);
    expect(RUN("run", problem, "--device", "host", "--q", path_q, "--k", path_k, "--v", path_v, "--o", path_o,
               "--lse", path_lse, "--param", param, "--param", "width=100"),
           0);
    compare_outputs(1e-5); // one document and a window wider than the sequence: plain causal
    outcome got = expect(RUN("run", problem, "--device", "host", "--q", path_q, "--k", path_k, "--v", path_v,
                             "--o", path_o, "--param", param),
                         1);
    expect_text(got.err, "attnloom: --param: the problem has a parameter width; give --param width=NUMBER");
    got = expect(RUN("run", problem, "--device", "host", "--q", path_q, "--k", path_k, "--v", path_v, "--o",
                     path_o, "--param", param, "--param", "width=1.5"),
                 1);
    expect_text(got.err, "width=1.5 is not a number of type i32");
    got = expect(RUN("run", problem, "--device", "host", "--q", path_q, "--k", path_k, "--v", path_v, "--o",
                     path_o, "--param", "depth=1"),
                 1);
    expect_text(got.err, "'depth=1' is not NAME=FILE or NAME=NUMBER");
    dims[0] = SEQ_K - 1;
    write_array(doc, LOOM__NPY_I4, 1, dims, same);
    got = expect(RUN("run", problem, "--device", "host", "--q", path_q, "--k", path_k, "--v", path_v, "--o",
                     path_o, "--param", param, "--param", "width=100"),
                 1);
    expect_text(got.err, "seq_k is 9");
}

static void run_refuses_wrong_files(void **state) {
    (void)state;
    char wrong[MAX_PATH];
    int64_t dims[] = {BATCH, SEQ_K, HEADS_KV, DIM / 2}, flat[] = {ITEMS_K};
    int32_t wholes[ITEMS_K] = {0};
    make_inputs();
    path_in(wrong, "wrong.npy");
    write_array(wrong, LOOM__NPY_F4, 4, dims, data_k);
    outcome got =
        expect(RUN("run", "fp32 d=8", "--q", path_q, "--k", wrong, "--v", path_v, "--o", path_o), 1);
    expect_text(got.err, "attnloom: --k: dimension 3 of ");
    expect_text(got.err, "is 4, but d is 8; wanted is [batch, seq_k, heads_kv, d]");
    got = expect(RUN("run", "bf16 d=8", "--q", path_q, "--k", wrong, "--v", path_v, "--o", path_o), 1);
    assert_null(strstr(got.err, "converted"));
    write_array(wrong, LOOM__NPY_I4, 4, DIMS_K, wholes);
    got = expect(RUN("run", "bf16 d=8", "--q", path_q, "--k", wrong, "--v", path_v, "--o", path_o), 1);
    expect_text(got.err, "attnloom: --k: ");
    expect_text(got.err, "wrong.npy holds i4; wanted is f2, f4 or f8");
    assert_null(strstr(got.err, "converted"));
    write_array(wrong, LOOM__NPY_F4, 1, flat, data_k);
    got = expect(RUN("run", "fp32 d=8", "--q", path_q, "--k", wrong, "--v", path_v, "--o", path_o), 1);
    expect_text(got.err, "has 1 dimensions; wanted are 4");
    got =
        expect(RUN("run", "fp32 d=8", "--q", path_q, "--k", "missing.npy", "--v", path_v, "--o", path_o), 1);
    expect_text(got.err, "attnloom: missing.npy: cannot be read");
    got = expect(RUN("run", "fp32 d=8", "--q", path_q, "--k", path_k, "--v", path_v), 2);
    expect_text(got.err, "nothing to write");
}

/* -- Files in .npy format ------------------------------------------------------------------------------- */

static void npy_headers_are_checked(void **state) {
    (void)state;
    const struct {
        const char *header, *said; /* said is NULL where the file is fine */
    } list[] = {
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", NULL},
        {"{\"shape\":(6,),\"descr\":\"<f4\",\"fortran_order\":False}", NULL},
        {"{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", "Fortran order"},
        {"{'descr': '>f4', 'fortran_order': False, 'shape': (2, 3), }", "big endian"},
        {"{'descr': '<c8', 'fortran_order': False, 'shape': (3,), }", "not one of f2 f4"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 4), }",
         "holds 24 bytes of data, its header says 32"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4611686018427387904), }",
         "exceed the address space"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 900000000000000000), }", "its header says 0"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)", "damaged"},
        {"{'descr': '<f4', 'fortran_order': False}", "damaged"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,6), }", "damaged"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (-6,), }", "damaged"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }", "damaged"},
        {"", "damaged"},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        for (int version = 1; version <= 2; version++) {
            unsigned char file[512] = "\x93NUMPY";
            size_t start = version == 1 ? 10 : 12, length = strlen(list[i].header);
            loom__npy array;
            loom_error error = LOOM_ERROR_INIT;
            file[6] = (unsigned char)version;
            file[8] = (unsigned char)length;
            memcpy(file + start, list[i].header, length);
            loom_status status = loom__npy_parse("x.npy", file, start + length + 24, &array, &error);
            if (!list[i].said) {
                assert_int_equal(status, LOOM_OK);
                assert_int_equal(array.num_items, 6);
                loom__npy_free(&array);
            } else {
                assert_int_equal(status, LOOM_INVALID);
                assert_string_equal(error.field, "x.npy");
                expect_text(error.text, list[i].said);
            }
        }
    }
}

/* Every prefix of a file and every single changed byte of its header is refused or read, never overrun: the
 * copy has no byte to spare, so that a sanitizer sees it. */
static void npy_survives_damage(void **state) {
    (void)state;
    char path[MAX_PATH];
    float data[6] = {1, 2, 3, 4, 5, 6};
    int64_t dims[] = {2, 3};
    int num_refused = 0;
    path_in(path, "damage.npy");
    write_array(path, LOOM__NPY_F4, 2, dims, data);
    unsigned char *whole = (unsigned char *)read_file(path);
    const size_t size = 128 + sizeof data;
    for (size_t length = 0; length < size; length++) {
        unsigned char *copy = malloc(length ? length : 1);
        loom__npy array;
        loom_error error = LOOM_ERROR_INIT;
        memcpy(copy, whole, length);
        assert_int_equal(loom__npy_parse(path, copy, length, &array, &error), LOOM_INVALID);
        free(copy);
    }
    for (size_t at = 0; at < 128; at++) {
        for (int byte = 0; byte < 256; byte++) {
            unsigned char *copy = malloc(size);
            loom__npy array;
            loom_error error = LOOM_ERROR_INIT;
            memcpy(copy, whole, size);
            copy[at] = (unsigned char)byte;
            if (loom__npy_parse(path, copy, size, &array, &error) == LOOM_OK)
                loom__npy_free(&array);
            else
                num_refused++;
            free(copy);
        }
    }
    assert_true(num_refused > 10000);
}

static void npy_numbers_convert(void **state) {
    (void)state;
    float values[] = {1.0f, -2.5f, 65504.0f};
    int64_t wholes[] = {-1, 0, 1};
    loom__npy floats = {.type = LOOM__NPY_F4, .num_items = 3, .data = values};
    loom__npy integers = {.type = LOOM__NPY_I8, .num_items = 3, .data = wholes};
    loom_error error = LOOM_ERROR_INIT;
    void *data = NULL;
    assert_int_equal(loom__npy_convert("x", &floats, LOOM__F16, &data, &error), LOOM_OK);
    assert_int_equal(((uint16_t *)data)[2], 0x7bff);
    free(data);
    assert_int_equal(loom__npy_convert("x", &floats, LOOM__I32, &data, &error), LOOM_INVALID);
    expect_text(error.text, "holds f4, but i32 is wanted");
    assert_int_equal(loom__npy_convert("x", &integers, LOOM__BOOL, &data, &error), LOOM_OK);
    assert_int_equal(((uint8_t *)data)[0], 1);
    free(data);
    assert_int_equal(loom__npy_convert("x", &integers, LOOM__U8, &data, &error), LOOM_INVALID);
    expect_text(error.text, "item 0 is -1, which u8 does not hold");
}

/* -- Compile -------------------------------------------------------------------------------------------- */

static bool has_nvrtc(void) {
    loom_context *context = NULL;
    const loom__toolchain *toolchain = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_int_equal(loom_context_create(NULL, &context, &error), LOOM_OK);
    bool found = loom__nvrtc_find(context, &toolchain, &error) == LOOM_OK;
    if (!found) print_message("no NVRTC: %s\n", error.text);
    loom_context_destroy(context);
    return found;
}

static void compile_needs_no_gpu(void **state) {
    (void)state;
    if (!has_nvrtc()) skip();
    outcome got = expect(RUN("compile", "bf16 d=64 causal", "--arch", "sm_80"), 0);
    expect_text(got.out, "kernel forward variant aligned registers ");
    expect_text(got.out, "spill bytes ");
    expect_text(got.out, "cached no entry ");
    got = expect(RUN("compile", "bf16 d=64 causal", "--arch", "sm_80"), 0);
    expect_text(got.out, "cached yes entry ");
    got = expect(RUN("compile", "bf16 d=64 causal", "--arch", "sm_7"), 1);
    expect_text(got.err, "sm_7");
}

static bool is_elf(const char *path) {
    const char *bytes = read_file(path);
    return bytes && strncmp(bytes, "\177ELF", 4) == 0;
}

static void compile_writes_files(void **state) {
    (void)state;
    char path[MAX_PATH], said[MAX_PATH + 32], file[MAX_PATH + 32];
    char *problem = "fp32 d=8 causal backward";
    path_in(path, "forward.so");
    outcome got = expect(RUN("compile", problem, "--target", "host", "-o", path), 0);
    snprintf(said, sizeof said, " file %s\n", path);
    expect_text(got.out, said);
    assert_true(is_elf(path));
    path_in(path, "backward.so");
    got = expect(RUN("compile", problem, "--target", "host", "--pass", "backward", "-o", path), 0);
    assert_null(read_file(path));
    static const char *const NAMES[] = {"backward_delta", "backward_dkv", "backward_dq"};
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) {
        snprintf(file, sizeof file, "%s.%s", path, NAMES[i]);
        snprintf(said, sizeof said, " file %s.%s\n", path, NAMES[i]);
        expect_text(got.out, said);
        assert_true(is_elf(file));
    }
    path_in(path, "no/such/folder.so");
    got = expect(RUN("compile", problem, "--target", "host", "-o", path), 1);
    expect_text(got.err, "cannot be written");
}

/* -- Packs ---------------------------------------------------------------------------------------------- */

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

/* A library with NVRTC's interface, beside this program, in place of NVRTC. It knows sm_80, sm_86 and sm_90.
 */
static void take_stand_in(void) {
    char path[MAX_PATH];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 16);
    assert_true(length > 0);
    path[length] = 0;
    strcpy(strrchr(path, '/'), "/nvrtc12");
    setenv("LOOM_NVRTC_DIR", path, 1);
}

static bool same_files(const char *a, const char *b) {
    char command[2 * MAX_PATH + 32];
    snprintf(command, sizeof command, "cmp -s '%s' '%s'", a, b);
    return system(command) == 0;
}

/* A kernel of two problems is one. */
static void kernels_count_once(void **state) {
    (void)state;
    char manifest[MAX_PATH], pack[MAX_PATH];
    path_in(manifest, "twice.lua");
    path_in(pack, "twice.pack");
    take_stand_in();
    write_file(manifest, "return {'bf16 d=72 causal', 'bf16 causal d=72'}");
    expect_text(expect(RUN("plan", manifest, "--arch", "80", "--dry-run"), 0).out,
                "\nkernels 2 cached 0 missing 2 ");
    expect_text(expect(RUN("plan", manifest, "--arch", "80"), 0).out, "\nkernels 2 cached 0 missing 2\n");
    expect_text(expect(RUN("plan", manifest, "--arch", "80"), 0).out, "\nkernels 2 cached 2 missing 0\n");
    expect_text(expect(RUN("pack", manifest, "--arch", "80", "-o", pack), 0).err,
                ": 2 kernels of 2 problems and archs, 0 compiled");
}

static void pack_is_made(void **state) {
    (void)state;
    char manifest[MAX_PATH], pack[MAX_PATH], again[MAX_PATH];
    path_in(manifest, "kernels.lua");
    path_in(pack, "kernels.pack");
    path_in(again, "again.pack");
    take_stand_in();
    write_file(manifest,
               "local list = {{'bf16 d=64 causal', archs = {'sm_80'}}}\n"
               "for _, d in ipairs {64, 96} do list[#list + 1] = ('fp16 d=%d backward'):format(d) end\n"
               "return list\n");
    outcome got = expect(RUN("plan", manifest, "--dry-run", "--arch", "sm_80,sm_90a"), 0);
    expect_text(got.out,
                "problem \"bf16 d=64 mask={k <= q}\" target mma arch sm_80 kernels 2 cached 0 missing 2\n");
    expect_text(got.out,
                "problem \"fp16 d=96 backward\" target hopper arch sm_90 kernels 8 cached 0 missing 8\n");
    expect_text(got.out, "kernels 34 cached 0 missing 34 seconds ");
    got = expect(RUN("pack", manifest, "--arch", "sm_80,sm_90a", "-o", pack), 0);
    expect_text(got.err, "34 kernels of 5 problems and archs, 34 compiled");
    got = expect(RUN("pack", "list", pack), 0);
    expect_text(got.out, " toolkit 12.4 driver 12.0 archs \"sm_80 sm_90 sm_90a\" plans 5 kernels 34 bytes ");
    expect_text(got.out, "problem \"bf16 d=64 mask={k <= q}\" target mma arch sm_80 kernel forward variant "
                         "aligned schedule \"tile=");
    assert_null(strstr(got.out, "bf16 d=64 mask={k <= q}\" target hopper"));
    expect_text(expect(RUN("pack", "verify", pack), 0).out, "kernels.pack sound\n");
    expect_text(expect(RUN("plan", manifest, "--dry-run", "--arch", "80,90"), 0).out,
                "kernels 34 cached 34 missing 0 seconds 0\n");

    /* From the cache, and from an empty one: the same bytes. */
    got = expect(RUN("pack", manifest, "--arch", "90a,80", "-o", again), 0);
    expect_text(got.err, " 0 compiled");
    assert_true(same_files(pack, again));
    expect(RUN("cache", "clear"), 0);
    expect_text(expect(RUN("plan", manifest, "--arch", "80"), 0).out, "kernels 18 cached 0 missing 18\n");
    expect(RUN("pack", manifest, "--arch", "sm_80,sm_90a", "-o", again), 0);
    assert_true(same_files(pack, again));

    got = expect(RUN("pack", manifest, "--arch", "sm_90", "-o", again), 0);
    expect_text(got.err, "kernels.lua:1: \"bf16 d=64 causal\": left out, it is for other archs than sm_90\n");
    unsetenv("LOOM_NVRTC_DIR");
}

/* Two at once on a cold cache make one and the same pack; a third, stopped in its midst, leaves nothing in
 * its way. */
static void packs_are_made_at_once(void **state) {
    (void)state;
    enum { NUM = 3 };
    char manifest[MAX_PATH], packs[NUM][MAX_PATH];
    pid_t children[NUM];
    path_in(manifest, "kernels.lua");
    take_stand_in();
    write_file(manifest, "return {'bf16 d=64 causal backward', 'bf16 d=80 backward', 'fp16 d=96'}");
    expect(RUN("cache", "clear"), 0);
    fflush(NULL);
    for (int i = 0; i < NUM; i++) {
        char name[32];
        snprintf(name, sizeof name, "at-once-%d.pack", i);
        path_in(packs[i], name);
        char *words[] = {"attnloom", "pack", manifest, "--arch", "sm_80,sm_90a", "-o", packs[i]};
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            become_plain();
            if (!freopen("/dev/null", "wb", stderr)) _exit(99);
            exit(loom__cli_main(7, words));
        }
    }
    nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
    kill(children[NUM - 1], SIGKILL);
    for (int i = 0; i < NUM; i++) {
        int status = 0;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        if (i < NUM - 1) assert_int_equal(status, 0);
    }
    assert_true(same_files(packs[0], packs[1]));
    expect_text(expect(RUN("cache", "verify"), 0).out, " sound\n");
    outcome got = expect(RUN("pack", manifest, "--arch", "sm_80,sm_90a", "-o", packs[NUM - 1]), 0);
    expect_text(got.err, " 0 compiled");
    assert_true(same_files(packs[0], packs[NUM - 1]));
    if (access("/dev/full", W_OK) == 0)
        expect_text(expect(RUN("pack", manifest, "--arch", "80", "-o", "/dev/full"), 1).err,
                    "/dev/full: cannot be written");
    unsetenv("LOOM_NVRTC_DIR");
}

/* The C file holds the bytes of the pack, and compilers have nothing to say about it. */
static void pack_is_embedded(void **state) {
    (void)state;
    char manifest[MAX_PATH], pack[MAX_PATH], source[MAX_PATH], command[4 * MAX_PATH];
    path_in(manifest, "kernels.lua");
    path_in(pack, "kernels.pack");
    path_in(source, "2 kernels.c");
    take_stand_in();
    write_file(manifest, "return {'bf16 d=64 causal'}");
    expect(RUN("pack", manifest, "--arch", "80", "-o", pack), 0);
    expect(RUN("pack", manifest, "--arch", "80", "--embed", "-o", source), 0);
    expect_text(
        read_file(source),
        "loom_context_add_pack(context, \"_2_kernels\", _2_kernels_pack, _2_kernels_pack_bytes, &error)");
    path_in(command, "main.c");
    write_file(command,
               "#include <stdio.h>\nextern const unsigned char _2_kernels_pack[];\nextern const size_t "
               "_2_kernels_pack_bytes;\n"
               "int main(void) { return fwrite(_2_kernels_pack, 1, _2_kernels_pack_bytes, stdout) == 0; }\n");
    snprintf(command, sizeof command,
             "cd '%s' && ${CC:-cc} -std=c11 -Wall -Wextra -pedantic -Werror main.c '2 kernels.c' -o main && "
             "./main > main.out && "
             "cmp main.out kernels.pack",
             folder);
    assert_int_equal(system(command), 0);
    unsetenv("LOOM_NVRTC_DIR");
}

/* What LOOM_NO_COMPILE says is missing is what a manifest takes. */
static void missing_line_is_an_entry(void **state) {
    (void)state;
    char manifest[MAX_PATH], pack[MAX_PATH], text[4096];
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_error error = LOOM_ERROR_INIT;
    path_in(manifest, "missing.lua");
    path_in(pack, "missing.pack");
    take_stand_in();
    desc.problem = "bf16 d=96 score={softcap(50)} causal";
    desc.arch = "sm_90a";
    desc.device = LOOM_DEVICE_NONE;
    desc.flags = LOOM_NO_COMPILE;
    desc.hint = (loom_shape){.seq_q = 512, .seq_k = 512};
    assert_int_equal(loom_context_create(NULL, &context, &error), LOOM_OK);
    assert_int_equal(loom_plan_create(context, &desc, &plan, &error), LOOM_NOT_FOUND);
    snprintf(text, sizeof text, "return {\n%s\n}\n", strrchr(error.text, '\n') + 1);
    expect_text(
        text,
        "\n    {\"bf16 d=96 mask={k <= q} score={50.0 * tanh(s / 50.0)}\", archs = {\"sm_90\"}, target = "
        "\"hopper\", hint = {");
    write_file(manifest, text);
    expect(RUN("pack", manifest, "--arch", "sm_90a", "-o", pack), 0);
    expect(RUN("cache", "clear"), 0);
    assert_int_equal(loom_context_add_pack(context, pack, NULL, 0, &error), LOOM_OK);
    assert_int_equal(loom_plan_create(context, &desc, &plan, &error), LOOM_OK);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    unsetenv("LOOM_NVRTC_DIR");
}

static void wrong_packs_are_refused(void **state) {
    (void)state;
    char manifest[MAX_PATH], pack[MAX_PATH];
    path_in(manifest, "wrong.lua");
    path_in(pack, "wrong.pack");
    take_stand_in();
    write_file(manifest, "return {'bf16 d=64',\n'bf16 d=7'}");
    outcome got = expect(RUN("pack", manifest, "--arch", "80", "-o", pack), 1);
    expect_text(got.err, "attnloom: manifest: ");
    expect_text(got.err, "wrong.lua:2: entry 2, \"bf16 d=7\": problem.d: ");
    /* One that no target takes is named, the rest is compiled, nothing is written. */
    write_file(manifest, "return {'bf16 d=64',\n{'fp32 d=64'}}");
    got = expect(RUN("pack", manifest, "--arch", "80", "-o", pack), 1);
    expect_text(got.err, "wrong.lua:2: \"fp32 d=64\" for sm_80: problem.dtype: ");
    expect_text(got.err, "wrong.pack is not written");
    assert_null(read_file(pack));
    expect_text(expect(RUN("plan", manifest, "--arch", "80", "--dry-run"), 1).out,
                "kernels 2 cached 2 missing 0");
    expect_text(expect(RUN("pack", manifest, "--arch", "80,81", "-o", pack), 1).err,
                "arch: arch '81' is not known");
    expect_text(expect(RUN("pack", manifest, "--arch", "host", "-o", pack), 1).err,
                "compiled where they run");
    expect_text(expect(RUN("pack", "nowhere.lua", "--arch", "80", "-o", pack), 1).err,
                "nowhere.lua: No such file");
    expect_text(expect(RUN("pack", manifest, "--arch", "80"), 2).err, "-o FILE is missing");
    expect_text(expect(RUN("pack", manifest, "-o", pack), 2).err, "--arch LIST is missing");
    expect_text(expect(RUN("pack", "verify"), 2).err, "verify takes a FILE");
    expect_text(expect(RUN("pack", "lst", pack), 2).err, "'lst ");
    expect_text(expect(RUN("pack", "verify", manifest), 1).err, "wrong.lua: it is no pack");
    expect_text(expect(RUN("pack", "list", manifest), 1).err, "wrong.lua: it is no pack");
    write_file(manifest, "return {{'bf16 d=64', archs = {'sm_120'}}}");
    expect_text(expect(RUN("pack", manifest, "--arch", "80", "-o", pack), 1).err,
                "no entry is for any of the archs 80");
    unsetenv("LOOM_NVRTC_DIR");
}

/* -- Check ---------------------------------------------------------------------------------------------- */

static void check_needs_something_finite(void **state) {
    (void)state;
    char *shape = "batch=1 heads=2:1 seq=9:5";
    outcome got = expect(RUN("check", "fp32 d=8 causal", "--device", "host", "--shape", shape), 0);
    expect_text(got.out, " fine, 10 of 18 elements finite\n"); // rows 0 to 3 see nothing: lse is -inf there
    got = expect(RUN("check", "fp32 d=8 mask={q < -99}", "--device", "host", "--shape", shape), 0);
    expect_text(got.out, " fine, 0 of 18 elements finite\n");
    got = expect(RUN("cache", "list"), 0);
    assert_null(strstr(got.out, "certificate wrong"));
    got = expect(RUN("check", "fp32 d=8 score={log(-1.0 - s * s)}", "--device", "host", "--shape", shape), 1);
    expect_text(got.out, " WRONG, 0 of 144 elements finite\n");
    expect_text(got.err, "to repeat this:");
    got = expect(RUN("cache", "list"), 0);
    expect_text(got.out, "certificate wrong");
    expect(RUN("check", "fp32 d=8", "--device", "host", "--shape", "batch=1 heads=1 seq=0"), 0);
}

/* What serves first and what it stood in for are both checked; then there is nothing to stand in for. */
static void check_of_a_stand_in(void **state) {
    (void)state;
    char *schedule = "tile=32x32";
    outcome got =
        expect(RUN("check", "fp32 d=24", "--device", "host", "--schedule", schedule, "--stand-in"), 0);
    assert_non_null(strstr(got.out, "\nthis stands in\nproblem fp32 d=24\n"));
    assert_true(strstr(got.out, "schedule tile=32x32") > strstr(got.out, "this stands in"));
    assert_null(strstr(got.out, "WRONG"));
    got = expect(RUN("check", "fp32 d=24", "--device", "host", "--schedule", schedule, "--stand-in"), 0);
    expect_text(got.out, "nothing stands in");
    expect(RUN("check", "--installed", "--stand-in"), 2);
}

/* -- Cache ---------------------------------------------------------------------------------------------- */

static void empty_cache(void) { expect(RUN("cache", "clear"), 0); }

static void cache_lists_and_clears(void **state) {
    (void)state;
    empty_cache();
    outcome got = expect(RUN("cache", "list"), 0);
    assert_string_equal(got.out, "");
    expect(RUN("compile", "fp32 d=8 causal", "--target", "host"), 0);
    got = expect(RUN("cache", "list"), 0);
    expect_text(got.out, "problem \"fp32 d=8 mask={k <= q}\" target host ");
    expect_text(got.out, "kernel forward");
    expect_text(got.out, "certificate none ");
    got = expect(RUN("cache", "verify"), 0);
    expect_text(got.out, " sound\n");
    got = expect(RUN("cache", "clear"), 0);
    expect_text(got.out, "removed 1 entries, ");
    got = expect(RUN("cache", "list"), 0);
    assert_string_equal(got.out, "");
}

static int damage_one(const char *path, const struct stat *info, int kind, struct FTW *place) {
    (void)info;
    (void)place;
    const char *name = strrchr(path, '/');
    if (kind != FTW_F || !name || strcmp(name, "/kernel.so") != 0) return 0;
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    fseek(file, 100, SEEK_SET);
    int byte = fgetc(file);
    fseek(file, 100, SEEK_SET);
    fputc(byte ^ 1, file);
    return fclose(file);
}

static void cache_finds_damage(void **state) {
    (void)state;
    empty_cache();
    expect(RUN("compile", "fp32 d=8 causal", "--target", "host"), 0);
    assert_int_equal(nftw(getenv("LOOM_CACHE_DIR"), damage_one, 16, FTW_PHYS), 0);
    outcome got = expect(RUN("cache", "verify"), 1);
    expect_text(got.out, " damaged: ");
    expect_text(got.err, "attnloom: cache: 1 of 1 entries are damaged");
    got = expect(RUN("cache", "list"), 0);
    expect_text(got.out, " damaged: ");
    got = expect(RUN("compile", "fp32 d=8 causal", "--target", "host"), 0);
    expect_text(got.out, "cached no");
    expect(RUN("cache", "verify"), 0);
}

static void clear_spares_other_files(void **state) {
    (void)state;
    char path[MAX_PATH + 32];
    expect(RUN("compile", "fp32 d=8 causal", "--target", "host"), 0);
    snprintf(path, sizeof path, "%s/notes", getenv("LOOM_CACHE_DIR"));
    assert_int_equal(mkdir(path, 0700), 0);
    empty_cache();
    assert_int_equal(rmdir(path), 0); // fails if it is gone
}

/* -- Info and bench ------------------------------------------------------------------------------------- */

static void info_tells_what_is_there(void **state) {
    (void)state;
    outcome got = expect(RUN("info"), 0);
    const char *const facts[] = {"version ",        "generator digest ", "cache folder ", "nvrtc ",
                                 "c compiler ",     "driver ",           "LOOM_LOG ",     "LOOM_CACHE_DIR ",
                                 "LOOM_NVRTC_DIR ", "LOOM_SCHED "};
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) expect_text(got.out, facts[i]);
    expect_text(got.out, folder);
}

static const char BENCH_HEADER[] =
    "pass,dtype,hdim,causal,seqlen,batch,heads,backend,mode,ms,tflops,target,schedule\n";

static void bench_prints_csv(void **state) {
    (void)state;
    outcome got = expect(RUN("bench", "fp32 d=8 causal backward", "--device", "host", "--shape",
                             "batch=1 heads=2 seq=16", "--mode", "burst", "--pass", "forward,backward"),
                         0);
    assert_memory_equal(got.out, BENCH_HEADER, strlen(BENCH_HEADER));
    expect_text(got.out, "\nfwd,fp32,8,1,16,1,2,ours,burst,");
    expect_text(got.out, "\nbwd,fp32,8,1,16,1,2,ours,burst,");
    expect_text(got.out, ",host,");
    got = expect(RUN("bench", "--grid", "paper", "--device", "host", "--dtype", "fp32", "--hdim", "4096"), 1);
    expect_text(got.err, "head dim 4096");
}

static int occurrences(const char *text, const char *word) {
    int num = 0;
    for (const char *at = text; (at = strstr(at, word)); at++) num++;
    return num;
}

/* All schedules, or the cheapest: compiled beforehand, then each timed. */
static void schedules_are_swept(void **state) {
    (void)state;
    static char PROBLEM[] = "fp32 d=8 mask={causal & window(3, 0)} backward";
    outcome got =
        expect(RUN("compile", PROBLEM, "--target", "host", "--pass", "backward", "--schedules", "2"), 0);
    expect_text(got.out, "schedule \"tile=");
    expect_text(got.out, "kernel backward_dkv variant any ");
    assert_int_equal(occurrences(got.out, "\n"), 2 * 3);
    got = expect(RUN("bench", PROBLEM, "--device", "host", "--shape", "batch=1 heads=2 seq=16", "--pass",
                     "forward,backward", "--schedules", "2"),
                 0);
    assert_memory_equal(got.out, BENCH_HEADER, strlen(BENCH_HEADER) - 1);
    expect_text(got.out, ",target,schedule,cost,problem\nfwd,fp32,8,0,16,1,2,ours,burst,");
    expect_text(got.out,
                ",\"fp32 d=8 mask={k <= q & q - k <= 3} backward\"\nbwd,fp32,8,0,16,1,2,ours,burst,");
    assert_int_equal(occurrences(got.out, "\n"), 1 + 2 * 2);
    got = expect(RUN("why", PROBLEM, "--target", "host"), 0);
    int num_candidates = occurrences(got.out, "\n  tile=");
    got = expect(RUN("compile", PROBLEM, "--target", "host", "--schedules", "all"), 0);
    assert_int_equal(occurrences(got.out, "\n"), num_candidates);

    got = expect(RUN("bench", PROBLEM, "--schedules", "some"), 2);
    expect_text(got.err, "--schedules: 'some': it takes all or a number from 1");
    got = expect(RUN("bench", PROBLEM, "--schedules", "all", "--cold"), 2);
    expect_text(got.err, "--schedules takes neither");
    got = expect(RUN("bench", PROBLEM, "--schedules", "all", "--prepared"), 2);
    expect_text(got.err, "--schedules takes neither");
    got = expect(RUN("bench", PROBLEM, "--prepared", "--cold"), 2);
    expect_text(got.err, "--prepared takes neither");
    got = expect(RUN("bench", "fp32 d=8 mask={longformer(9, 2)}", "--device", "host", "--prepared"), 0);
    assert_null(strstr(got.out, "prepare,")); /* the host has nothing to prepare */
    got = expect(RUN("bench", PROBLEM, "--memory", "--cold"), 2);
    expect_text(got.err, "--memory takes neither");
    got = expect(RUN("bench", "fp32 d=8 mask={longformer(9, 2)}", "--device", "host", "--memory", "--shape",
                     "batch=1 heads=1 seq=1000"),
                 0);
    /* q, k, v and o of 32256 bytes, lse of 4096 */
    expect_text(got.err, "bench: seq=1000:1000: 133120 bytes of the device, 0 of them workspace, 0 prepared");
    got = expect(RUN("compile", PROBLEM, "--schedules", "all", "-o", "x"), 2);
    expect_text(got.err, "--schedules takes neither");
    got =
        expect(RUN("compile", "fp32 d=8", "--target", "host", "--pass", "backward", "--schedules", "all"), 1);
    expect_text(got.err, "pass: the problem has no pass 'backward'");
}

static void cold_is_timed(void **state) {
    (void)state;
    outcome got = expect(RUN("bench", "fp32 d=8 causal backward", "--device", "host", "--cold"), 0);
    expect_text(got.out, "cold,");
    expect_text(got.out, "warm,");
}

static void starts_from_packs_are_timed(void **state) {
    (void)state;
    outcome got = expect(RUN("bench", "bf16 d=64", "--pack", "no.pack", "--device", "host"), 1);
    expect_text(got.err, "packs hold no kernels for the CPU");
    got = expect(RUN("bench", "bf16 d=64", "--pack", "no.pack", "--cold"), 2);
    expect_text(got.err, "are one each");
    got = expect(RUN("bench", "--grid", "paper", "--pack", "no.pack"), 2);
    expect_text(got.err, "take a PROBLEM");
    expect(RUN("bench", "bf16 d=64", "--pack", "no.pack"), 1); /* for want of a GPU or of the file */
}

/* -- Tuning --------------------------------------------------------------------------------------------- */

/* The wisdom of the cache folder, "" if there is none. */
static char *read_wisdom(void) {
    char path[MAX_PATH];
    path_in(path, "cache/wisdom1.txt");
    char *text = read_file(path);
    return text ? text : "";
}

static void remove_wisdom(void) {
    char path[MAX_PATH];
    path_in(path, "cache/wisdom1.txt");
    unlink(path);
}

/* What stands in the first quotes behind `before`. */
static void quoted_after(const char *text, const char *before, char word[64]) {
    const char *at = strstr(text, before);
    if (!at) fail_msg("'%s' is not in:\n%s", before, text);
    at += strlen(before);
    snprintf(word, 64, "%.*s", (int)strcspn(at, "\""), at);
}

/* Forward schedule of a plan from wisdom alone; where there is none "", and stderr says why. */
static void plan_from_wisdom(const char *problem, int32_t device, loom_shape hint, char schedule[64]) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    desc.problem = problem;
    desc.device = device;
    desc.rigor = LOOM_WISDOM_ONLY;
    desc.hint = hint;
    loom_status status = loom_context_create(NULL, &context, &error);
    if (!status) status = loom_plan_create(context, &desc, &plan, &error);
    if (status) fprintf(stderr, "%s: %s\n", error.field, error.text);
    bool told = strstr(loom_plan_text(plan, LOOM_TEXT_WHY), "the best that was measured on this device");
    snprintf(schedule, 64, "%s", told ? loom_plan_text(plan, LOOM_TEXT_SCHEDULE) : "");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static void expect_wisdom(int64_t length, const char *schedule) {
    char planned[64];
    plan_from_wisdom("fp32 d=16 causal", LOOM_DEVICE_HOST, (loom_shape){1, 2, 2, length, length}, planned);
    assert_string_equal(planned, schedule);
}

#define TUNE(problem, ...)                                                                                   \
    RUN("tune", problem, "--device", "host", "--shape", "batch=1 heads=2 seq=128", __VA_ARGS__)

static void tune_keeps_the_best(void **state) {
    (void)state;
    char best[64], kept[64];
    remove_wisdom();
    outcome got = expect(TUNE("fp32 d=16 causal", "--budget", "2m"), 0);
    expect_text(got.out, "problem fp32 d=16 mask={k <= q}\npass forward target host device \"");
    expect_text(got.out, " shape batch=1 heads=2:2 seq=128:128 class rows=256 queries=128 keys=128 ");
    for (int rank = 1; rank <= 5; rank++) {
        char line[32];
        snprintf(line, sizeof line, "\nrank %d cost ", rank);
        assert_int_equal(occurrences(got.out, line), 1);
    }
    const char *first = strstr(got.out, "\nrank ");
    expect_text(first, " gap +0.0% launches ");
    assert_true(strstr(first, " timed schedule") < strchr(first + 1, '\n'));
    quoted_after(first, " schedule \"", best);
    quoted_after(read_wisdom(), " schedule=\"", kept);
    assert_string_equal(kept, best);
    expect_text(got.err, "kept as wisdom");
    expect_text(got.err, best);

    /* Other lengths of the class, near classes, and one that is far. */
    expect_wisdom(100, best);
    expect_wisdom(70, best);
    expect_wisdom(4096, "");

    /* Wisdom of another generator is tried first, though the model has no such candidate. */
    char foreign[1024], path[MAX_PATH];
    snprintf(foreign, sizeof foreign, "%s", read_wisdom());
    memset(strstr(foreign, "generator=") + strlen("generator="), '0', 32);
    char *schedule = strstr(foreign, "schedule=");
    snprintf(schedule, sizeof foreign - (size_t)(schedule - foreign),
             "schedule=\"tile=48x48\" problem=fp32 d=16 mask={k <= q}\n");
    path_in(path, "cache/wisdom1.txt");
    write_file(path, foreign);
    expect_wisdom(128, "");
    got = expect(TUNE("fp32 d=16 causal", "--budget", "2m"), 0);
    expect_text(got.out, "\nrank - cost - ms 0.");
    expect_text(got.out, "schedule \"tile=48x48\"");
    assert_int_equal(occurrences(read_wisdom(), "\n"), 2);
}

/* A generator some of whose kernels do not compile, and one of which computes nothing, the fastest of all. */
static void tune_passes_over_faults(void **state) {
    (void)state;
    char command[4 * MAX_PATH], own[MAX_PATH], kept[64];
    path_in(own, "gen");
    snprintf(command, sizeof command,
             "mkdir '%s' && cp -r gen templates '%s' && sed -i 's|^void \\${symbol}(.*|"
             "_Static_assert(tile_q != 32 \\|\\| tile_k != 32, \"on purpose\");\\n&\\n    if (tile_q == 128) "
             "return;|' "
             "'%s/templates/host/forward.c'",
             own, own, own);
    assert_int_equal(system(command), 0);
    setenv("LOOM_GEN_DIR", own, 1);
    remove_wisdom();
    outcome got = TUNE("fp32 d=16", "--budget", "2m");
    unsetenv("LOOM_GEN_DIR");
    expect(got, 0);
    const char *wrong = strstr(got.out, "failed schedule \"tile=128x64\" check: its results are wrong: o: ");
    if (!wrong) fail_msg("no wrong results in:\n%s", got.out);
    expect_text(got.out, "failed schedule \"tile=32x32\" kernel: cc");
    assert_int_equal(occurrences(got.out, " failed "), 2);
    quoted_after(read_wisdom(), " schedule=\"", kept);
    assert_true(strcmp(kept, "tile=128x64") && strcmp(kept, "tile=32x32"));
    assert_int_equal(occurrences(read_wisdom(), "\n"), 1);

    /* Without time nothing is timed, and nothing is kept. */
    remove_wisdom();
    got = expect(TUNE("fp32 d=16", "--budget", "0.001"), 1);
    expect_text(got.out, " late schedule ");
    expect_text(got.err, "nothing is kept");
    assert_string_equal(read_wisdom(), "");
}

/* Ctrl-C while it times: what was timed is kept. */
static void tune_can_be_interrupted(void **state) {
    (void)state;
    char err[MAX_PATH];
    char *words[] = {
        "attnloom", "tune", "fp32 d=64", "--device", "host", "--shape", "batch=1 heads=8 seq=1024"};
    int status = 0;
    path_in(err, "tune-stderr");
    remove_wisdom();
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        char out[MAX_PATH];
        become_plain();
        path_in(out, "tune-stdout");
        setenv("LOOM_LOG", "3", 1);
        if (!freopen(out, "wb", stdout) || !freopen(err, "wb", stderr)) _exit(99);
        exit(loom__cli_main(7, words));
    }
    for (int i = 0; i < 6000; i++) {
        char *text = read_file(err);
        if (text && strstr(text, "tune schedule=")) break;
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    kill(child, SIGINT);
    assert_int_equal(waitpid(child, &status, 0), child);
    char *text = read_file(err);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) fail_msg("status %x\n%s", status, text);
    expect_text(text, "interrupted: what was timed is kept");
    path_in(err, "tune-stdout");
    text = read_file(err);
    assert_int_equal(occurrences(text, "launches 30 "), 0);
    assert_int_equal(occurrences(read_wisdom(), "\n"), 1);
    expect_text(read_wisdom(), " problem=fp32 d=64\n");
}

#define WISDOM_LINE(ns, schedule)                                                                            \
    "wisdom1 device=\"Elsewhere\" units=8 target=mma pass=forward rows=4 queries=4 keys=64 ns=" ns           \
    " generator=0123456789abcdef0123456789abcdef schedule=\"" schedule "\" problem=bf16 d=64\n"

static void wisdom_is_merged(void **state) {
    (void)state;
    char path[MAX_PATH], said[MAX_PATH + 64];
    path_in(path, "some.wisdom");
    remove_wisdom();
    assert_string_equal(expect(RUN("wisdom", "export"), 0).out, "");
    write_file(path, "# elsewhere\n" WISDOM_LINE("50", "tile=2") WISDOM_LINE("40", "tile=1"));
    outcome got = expect(RUN("wisdom", "import", path), 0);
    expect_text(got.err, "2 entries taken, 0 lines refused");
    got = expect(RUN("wisdom", "export"), 0);
    assert_string_equal(got.out, WISDOM_LINE("40", "tile=1"));
    assert_string_equal(read_wisdom(), got.out);
    /* Each of many refused lines is told, and the good one behind them is taken. */
    FILE *file = fopen(path, "wb");
    for (int i = 0; i < 200; i++) fputs("wisdom1 pass=sideways\n", file);
    fputs(WISDOM_LINE("30", "tile=3"), file);
    fclose(file);
    got = expect(RUN("wisdom", "import", path), 1);
    assert_int_equal(occurrences(got.err, ": pass: 'sideways' is not forward or backward\n"), 200);
    snprintf(said, sizeof said, "%s:200: pass:", path);
    expect_text(got.err, said);
    expect_text(got.err, "1 entries taken, 200 lines refused");
    assert_string_equal(expect(RUN("wisdom", "export"), 0).out, WISDOM_LINE("30", "tile=3"));
    expect_text(expect(RUN("wisdom", "import", "/nowhere"), 1).err, "/nowhere");
}

static void tune_takes_a_manifest(void **state) {
    (void)state;
    char manifest[MAX_PATH];
    path_in(manifest, "tune.lua");
    write_file(manifest, "return {{'fp32 d=16 causal', hint = {seq_q = 64, seq_k = 64}},\n"
                         "        'fp32 d=16 mask={ids[q] == ids[k]} params={ids: i32[seq_k]}'}\n");
    remove_wisdom();
    outcome got = expect(TUNE(manifest, "--budget", "60"), 0);
    expect_text(got.out, "shape batch=1 heads=2:2 seq=64:64 class rows=128 queries=64 keys=64 ");
    expect_text(got.out, "problem fp32 d=16 mask={ids[q] == ids[k]} params={ids: i32[seq_k]}\n");
    assert_int_equal(occurrences(read_wisdom(), "\n"), 2);
    assert_int_equal(occurrences(read_wisdom(), "keys=128 "), 1);
    expect_text(expect(TUNE("/nowhere/kernels.lua", "--budget", "60"), 1).err, "/nowhere/kernels.lua");
}

/* -- On a GPU ------------------------------------------------------------------------------------------- */

static void gpu_run_computes(void **state) {
    (void)state;
    make_inputs();
    expect(RUN("run", "bf16 d=8 causal", "--device", "0", "--q", path_q, "--k", path_k, "--v", path_v, "--o",
               path_o, "--lse", path_lse),
           0);
    compare_outputs(1e-2);
}

static void gpu_bench(void **state) {
    (void)state;
    outcome got = expect(RUN("bench", "--grid", "paper", "--device", "0", "--hdim", "64", "--seqlen", "512",
                             "--mode", "burst,sustained", "--pass", "forward,backward"),
                         0);
    expect_text(got.out, "\nfwd,bf16,64,0,512,32,32,ours,burst,");
    expect_text(got.out, "\nbwd,bf16,64,1,512,32,32,ours,sustained,");
    got = expect(RUN("bench", "bf16 d=64 causal backward", "--device", "0", "--launch-cost"), 0);
    expect_text(got.out, "forward,");
    got = expect(RUN("bench", "bf16 d=64 mask={longformer(9, 2)} backward", "--device", "0", "--launch-cost"),
                 0);
    expect_text(got.out, "forward,");
    got = expect(RUN("bench", "bf16 d=64 mask={longformer(9, 2)} backward", "--device", "0", "--pass",
                     "forward,backward", "--prepared"),
                 0);
    expect_text(got.out, "\nprepare,bf16,64,");
    expect_text(got.out, "\nbwd,bf16,64,");
    got = expect(RUN("bench", "bf16 d=64 causal backward", "--device", "0", "--cold"), 0);
    expect_text(got.out, "warm,");
}

/* Makes a pack for the device and computes with its kernels alone. Returns an exit status, and says what is
 * wrong. */
static int compute_from_pack(void) {
    static const char PROBLEM[] = "bf16 d=64 causal backward";
    char manifest[MAX_PATH], pack[MAX_PATH];
    loom_context *context = NULL;
    const loom__device *device = NULL;
    loom_plan *plan = NULL;
    loom__rig *rig = NULL;
    loom__rig_report report = {.fine = false};
    loom__rig_options rig_options = LOOM__RIG_OPTIONS_INIT;
    loom_options options = LOOM_OPTIONS_INIT;
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_error error = LOOM_ERROR_INIT;
    path_in(manifest, "gpu.lua");
    path_in(pack, "gpu.pack");
    write_file(manifest, "return {'bf16 d=64 causal backward'}");
    options.cache_dir = ""; /* the pack is all there is */
    rig_options.shape = (loom_shape){2, 4, 2, 257, 321};
    desc.problem = PROBLEM;
    desc.flags = LOOM_NO_COMPILE;
    loom_status status = loom_context_create(&options, &context, &error);
    if (!status) status = loom__device_open(context, 0, &device, &error);
    if (!status) {
        char *words[] = {"attnloom", "pack", manifest, "--arch", (char *)device->arch, "-o", pack};
        if (loom__cli_main(7, words)) return 1;
    }
    if (!status) status = loom_context_add_pack(context, pack, NULL, 0, &error);
    if (!status) status = loom_plan_create(context, &desc, &plan, &error);
    if (!status) status = loom__rig_create(context, plan, 0, &rig_options, &rig, &error);
    for (loom_pass pass = LOOM_FORWARD; pass <= LOOM_BACKWARD && !status; pass++)
        status = loom__rig_run(rig, pass, &error);
    if (!status) status = loom__rig_compare(rig, LOOM_BACKWARD, &report, &error);
    if (status) loom__cli_fail(&error);
    loom__rig_destroy(rig);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return status || !report.fine;
}

static void gpu_takes_a_pack(void **state) {
    (void)state;
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        become_plain();
        exit(compute_from_pack());
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static void gpu_starts_from_a_pack(void **state) {
    (void)state;
    char pack[MAX_PATH], manifest[MAX_PATH];
    path_in(pack, "start.pack");
    path_in(manifest, "start.lua");
    write_file(manifest, "return {'bf16 d=64 causal'}\n");
    expect(RUN("pack", manifest, "--arch", "80,90,90a", "-o", pack), 0);
    outcome got = expect(RUN("bench", "bf16 d=64 causal", "--pack", pack), 0);
    expect_text(got.out, "what,ms\nprocess,");
    expect_text(got.out, "\nfirst,");
    expect_text(got.out, "\nagain,");
    got = expect(RUN("bench", "bf16 d=96 causal", "--pack", pack), 1);
    expect_text(got.err, "in no pack");
}

static void gpu_tunes(void **state) {
    (void)state;
    remove_wisdom();
    double start = loom__now();
    outcome got = expect(RUN("tune", "bf16 d=64 causal backward", "--device", "0", "--shape",
                             "batch=4 heads=16:4 seq=2048", "--budget", "60s"),
                         0);
    printf("%stuned in %.1f s\n", got.out, loom__now() - start);
    assert_true(loom__now() - start < 70); /* what has begun is not cut short */
    assert_true(occurrences(got.out, " gap +0.0% ") >= 2);
    assert_int_equal(occurrences(read_wisdom(), "\n"), 2);
    expect_text(read_wisdom(), " pass=backward rows=131072 queries=1024 keys=2048 ");
    char kept[64];
    int status = -1;
    quoted_after(strstr(read_wisdom(), " pass=forward "), " schedule=\"", kept);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        char planned[64];
        become_plain();
        plan_from_wisdom("bf16 d=64 causal backward", 0, (loom_shape){4, 16, 4, 1500, 1500}, planned);
        _exit(strcmp(planned, kept) != 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/* Asked in a child: CUDA, once started, is of no use in what is forked after, and every test forks. */
static bool has_gpu(void) {
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        loom_context *context = NULL;
        int32_t count = 0;
        become_plain();
        if (loom_context_create(NULL, &context, NULL) != LOOM_OK) _exit(1);
        _exit(loom__device_count(context, &count, NULL) != LOOM_OK || count == 0);
    }
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* -- Main ----------------------------------------------------------------------------------------------- */

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *place) {
    (void)info;
    (void)kind;
    (void)place;
    return remove(path);
}

int main(int argc, char **argv) {
    const struct CMUnitTest host[] = {
        cmocka_unit_test(help_is_printed),
        cmocka_unit_test(each_command_has_help),
        cmocka_unit_test(wrong_usage_is_said),
        cmocka_unit_test(problem_errors_are_printed),
        cmocka_unit_test(full_disk_is_a_failure),
        cmocka_unit_test(emitted_text_is_golden),
        cmocka_unit_test(second_emit_is_equal),
        cmocka_unit_test(emit_writes_a_file),
        cmocka_unit_test(show_draws_masks),
        cmocka_unit_test(why_tells_tiles),
        cmocka_unit_test(npy_headers_are_checked),
        cmocka_unit_test(npy_survives_damage),
        cmocka_unit_test(npy_numbers_convert),
        cmocka_unit_test(run_computes),
        cmocka_unit_test(run_computes_gradients),
        cmocka_unit_test(run_takes_params),
        cmocka_unit_test(run_refuses_wrong_files),
        cmocka_unit_test(compile_needs_no_gpu),
        cmocka_unit_test(compile_writes_files),
        cmocka_unit_test(kernels_count_once),
        cmocka_unit_test(pack_is_made),
        cmocka_unit_test(packs_are_made_at_once),
        cmocka_unit_test(pack_is_embedded),
        cmocka_unit_test(missing_line_is_an_entry),
        cmocka_unit_test(wrong_packs_are_refused),
        cmocka_unit_test(check_needs_something_finite),
        cmocka_unit_test(check_of_a_stand_in),
        cmocka_unit_test(cache_lists_and_clears),
        cmocka_unit_test(cache_finds_damage),
        cmocka_unit_test(clear_spares_other_files),
        cmocka_unit_test(info_tells_what_is_there),
        cmocka_unit_test(bench_prints_csv),
        cmocka_unit_test(schedules_are_swept),
        cmocka_unit_test(cold_is_timed),
        cmocka_unit_test(starts_from_packs_are_timed),
        cmocka_unit_test(tune_keeps_the_best),
        cmocka_unit_test(tune_passes_over_faults),
        cmocka_unit_test(tune_can_be_interrupted),
        cmocka_unit_test(tune_takes_a_manifest),
        cmocka_unit_test(wisdom_is_merged),
    };
    const struct CMUnitTest gpu[] = {cmocka_unit_test(gpu_run_computes), cmocka_unit_test(gpu_bench),
                                     cmocka_unit_test(gpu_takes_a_pack), cmocka_unit_test(gpu_tunes),
                                     cmocka_unit_test(gpu_starts_from_a_pack)};
    char cache[MAX_PATH + 8];
    const char *temporary = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/attnloom-cli-XXXXXX", temporary && *temporary ? temporary : "/tmp");
    if (!mkdtemp(folder)) return 1;
    path_in(cache, "cache");
    setenv("LOOM_CACHE_DIR", cache, 1);
    const struct CMUnitTest goldens[] = {cmocka_unit_test(emitted_text_is_golden)};
    int failed = 77;
    update = argc > 1 && strcmp(argv[1], "--update") == 0;
    if (argc > 1 && strcmp(argv[1], "gpu") == 0) {
        if (has_gpu())
            failed = cmocka_run_group_tests_name("cli gpu", gpu, NULL, NULL);
        else
            printf("skipped: no GPU\n");
    } else if (update) {
        failed = cmocka_run_group_tests_name("goldens", goldens, NULL, NULL);
    } else {
        failed = cmocka_run_group_tests_name("cli", host, NULL, NULL);
    }
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return failed;
}
