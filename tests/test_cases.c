/* test_cases.c - failures that users met in other attention libraries, one test each, and identities that
 * need no reference. The names are those of the project's list of cases; sizes that would take seconds on a
 * CPU are smaller there.
 *
 * ctest: gpu quick
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "rigs.h"
#include "tensors.h"

#define COUNT(x) (sizeof(x) / sizeof *(x))

/* The reported size on a GPU, a smaller one on the host. */
static int64_t size(int64_t reported, int64_t on_host) { return on_gpu() ? reported : on_host; }

static const char *print(char *text, size_t capacity, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(text, capacity, format, list);
    va_end(list);
    return text;
}

#define TEXT(...) print((char[512]){0}, 512, __VA_ARGS__)

static double get(const loom__rig *rig, loom__rig_name name, int64_t b, int64_t i, int64_t h, int64_t x) {
    return loom__rig_get(rig, name, b, i, h, x);
}

/* True if every element of a row of a tensor is the value. */
static bool row_is(const loom__rig *rig, loom__rig_name name, int64_t b, int64_t i, int64_t h, double value) {
    for (int64_t x = 0; x < rig->tensors[name].dims[3]; x++)
        if (get(rig, name, b, i, h, x) != value) return false;
    return true;
}

static void assert_sees_nothing(const loom__rig *rig, int64_t b, int64_t i, int64_t h) {
    assert_true(row_is(rig, LOOM__RIG_O, b, i, h, 0));
    assert_true(get(rig, LOOM__RIG_LSE, b, i, h, 0) == -INFINITY);
    if (has_backward(rig)) assert_true(row_is(rig, LOOM__RIG_DQ, b, i, h, 0));
}

static void assert_finite(const loom__rig *rig, loom__rig_name name) {
    const loom__rig_tensor *t = &rig->tensors[name];
    for (int64_t b = 0; b < t->dims[0]; b++)
        for (int64_t i = 0; i < t->dims[1]; i++)
            for (int64_t h = 0; h < t->dims[2]; h++)
                for (int64_t x = 0; x < t->dims[3]; x++)
                    if (!isfinite(get(rig, name, b, i, h, x)))
                        fail_msg("%s[%d, %d, %d, %d] is %g", loom__rig_names[name], (int)b, (int)i, (int)h,
                                 (int)x, get(rig, name, b, i, h, x));
}

static void assert_near(double got, double wanted, double tolerance) {
    if (!(fabs(got - wanted) <= tolerance)) fail_msg("%.9g is not within %g of %.9g", got, tolerance, wanted);
}

static loom__rig *check_and_keep(const char *problem, const loom__rig_options *options) {
    loom__rig *rig = rig_of(problem, options);
    check_rig(rig, problem);
    return rig;
}

/* -- 1. Wrong values, NaN, inf --------------------------------------------------------------------------- */

static void w01_causal_with_more_queries_than_keys(void **state) {
    (void)state;
    static const char problem[] = "bf16 d=64 causal backward";
    const int64_t lengths[][2] = {{size(2048, 300), size(1024, 150)}, {5, 2}, {2, 5}, {1, 5}, {129, 128}};
    for (size_t n = 0; n < COUNT(lengths); n++) {
        loom__rig_options options = options_of(2, 4, 4, lengths[n][0], lengths[n][1]);
        loom__rig *rig = rig_of(problem, &options);
        int64_t empty = lengths[n][0] > lengths[n][1] ? lengths[n][0] - lengths[n][1] : 0;
        for (int64_t i = 0; i < empty; i++)
            for (int64_t x = 0; x < 64; x++) loom__rig_set(rig, LOOM__RIG_DOUT, 1, i, 3, x, 1e30);
        check_rig(rig, problem);
        for (int64_t i = 0; i < empty; i++) assert_sees_nothing(rig, 1, i, 3);
        if (empty < lengths[n][0]) assert_true(isfinite(get(rig, LOOM__RIG_LSE, 1, empty, 3, 0)));
        if (empty) /* the first row that sees a key sees exactly key 0 */
            assert_true(get(rig, LOOM__RIG_O, 1, empty, 3, 7) == get(rig, LOOM__RIG_V, 1, 0, 3, 7));
        loom__rig_destroy(rig);
    }
}

static void w02_one_key_and_many_queries(void **state) {
    (void)state;
    static const int64_t queries[] = {76, 34, 146};
    for (size_t n = 0; n < COUNT(queries); n++) {
        static const char problem[] = "fp16 d=32 causal backward";
        loom__rig_options options = options_of(1, 1, 1, queries[n], 1);
        options.spread = 3;
        options.seed = n;
        options.without_dlse = true;
        loom__rig *rig = rig_of(problem, &options);
        loom__rig_fill(rig, LOOM__RIG_DOUT, 1);
        check_rig(rig, problem);
        int64_t last = queries[n] - 1;
        for (int64_t i = 0; i < last; i++) assert_sees_nothing(rig, 0, i, 0);
        for (int64_t x = 0; x < 32; x++) {
            assert_true(get(rig, LOOM__RIG_O, 0, last, 0, x) == get(rig, LOOM__RIG_V, 0, 0, 0, x));
            assert_near(get(rig, LOOM__RIG_DQ, 0, last, 0, x), 0, 1e-4);
            assert_near(get(rig, LOOM__RIG_DK, 0, 0, 0, x), 0, 1e-4);
        }
        assert_true(row_is(rig, LOOM__RIG_DV, 0, 0, 0, 1));
        loom__rig_destroy(rig);
    }
}

static void w04_logits_below_a_finite_sentinel(void **state) {
    (void)state;
    static const double levels[] = {-2e4, -4e4, -6e4, -1e5, -2.5e5};
    for (size_t n = 0; n < COUNT(levels) * 4; n++) {
        const char *problem = n % 2 ? "bf16 d=128 causal" : "bf16 d=128";
        double level = levels[n / 4];
        loom__rig_options options = options_of(1, 16, 1, 1, n / 2 % 2 ? 65 : 64);
        loom__rig *rig = rig_of(problem, &options);
        loom__rig_fill(rig, LOOM__RIG_Q, 1);
        loom__rig_fill(rig, LOOM__RIG_K, level / 128);
        for (int64_t x = 0; x < 128; x++) loom__rig_set(rig, LOOM__RIG_K, 0, 0, 0, x, (level + 5000) / 128);
        check_rig(rig, problem);
        for (int64_t x = 0; x < 128; x++)
            assert_true(get(rig, LOOM__RIG_O, 0, 0, 15, x) == get(rig, LOOM__RIG_V, 0, 0, 0, x));
        loom__rig_destroy(rig);
    }
}

static void w06_huge_values(void **state) {
    (void)state;
    static const char problem[] = "bf16 d=64 backward";
    for (int n = 0; n < 4; n++) {
        loom__rig_options options = options_of(1, 1, 1, n % 2 ? 130 : 1, n % 2 ? 130 : 1);
        loom__rig *rig = rig_of(problem, &options);
        loom__rig_fill(rig, LOOM__RIG_Q, 133120);
        loom__rig_fill(rig, LOOM__RIG_K, n < 2 ? 133120 : -133120);
        loom__rig_fill(rig, LOOM__RIG_V, 133120);
        run_rig(rig, problem);
        double lse = n < 2 ? 1.41767475e11 : -1.41767475e11;
        for (int64_t i = 0; i < options.shape.seq_q; i++) {
            assert_true(row_is(rig, LOOM__RIG_O, 0, i, 0, 133120));
            assert_near(get(rig, LOOM__RIG_LSE, 0, i, 0, 0), lse, fabs(lse) * 2e-7);
        }
        for (loom__rig_name name = LOOM__RIG_DQ; name < LOOM__RIG_NUM; name++) assert_finite(rig, name);
        if (n % 2 == 0)
            for (int64_t x = 0; x < 64; x++)
                assert_true(get(rig, LOOM__RIG_DV, 0, 0, 0, x) == get(rig, LOOM__RIG_DOUT, 0, 0, 0, x));
        loom__rig_destroy(rig);
    }
}

/* Sets the params of a boolean mask [seq_q, seq_k]. */
static void set_mask(loom__rig *rig, bool lower_triangle) {
    uint8_t *mask = (uint8_t *)(uintptr_t)rig->params[0].data;
    for (int64_t i = 0; i < rig->options.shape.seq_q; i++)
        for (int64_t j = 0; j < rig->options.shape.seq_k; j++)
            mask[i * rig->params[0].stride[0] + j] = !lower_triangle || j <= i;
}

static void w07_very_negative_lse(void **state) {
    (void)state;
    static const char array[] = "mask={seen[row, col]} params={seen: bool[seq_q, seq_k]}";
    static const char *const masks[] = {array, array, "causal", "mask={causal & window(100, 0)}",
                                        "mask={q / 64 >= k / 64}"};
    static const int64_t lengths[] = {704, 64, 192, 832, 640, 768};
    for (size_t n = 0; n < COUNT(masks); n++) {
        for (size_t l = 0; l < (on_gpu() ? COUNT(lengths) : 3); l++) {
            const char *problem = TEXT("%s d=64 %s backward", (n + l) % 2 ? "bf16" : "fp16", masks[n]);
            loom__rig_options options = options_of(1, 1, 1, lengths[l], lengths[l]);
            options.spread = 0.1f;
            loom__rig *rig = rig_of(problem, &options);
            loom__rig_noise(rig, LOOM__RIG_V, 3, 1);
            loom__rig_noise(rig, LOOM__RIG_DOUT, 4, 1);
            for (int64_t i = 0; i < lengths[l]; i++) {
                loom__rig_set(rig, LOOM__RIG_Q, 0, i, 0, 0, 1);
                loom__rig_set(rig, LOOM__RIG_K, 0, i, 0, 0, -120 * 8);
            }
            if (n < 2) set_mask(rig, n == 0);
            check_rig(rig, problem);
            assert_true(get(rig, LOOM__RIG_LSE, 0, 0, 0, 0) < -88.7);
            assert_finite(rig, LOOM__RIG_DQ);
            loom__rig_destroy(rig);
        }
    }
}

/* With q = 0 all seen keys weigh the same, so LSE is the logarithm of their number. */
static void w09_windows_are_inclusive(void **state) {
    (void)state;
    int64_t length = size(4096, 400), left = size(2047, 127);
    const struct {
        int64_t left, right;
        bool causal;
    } rows[] = {{left, 0, true}, {left + 1, 0, true}, {0, 0, true},
                {64, 64, false}, {-1, 0, false},      {3, -1, false}};
    for (size_t n = 0; n < COUNT(rows); n++) {
        const char *problem = TEXT("fp16 d=64 mask={%swindow(%d, %d)}", rows[n].causal ? "causal & " : "",
                                   (int)rows[n].left, (int)rows[n].right);
        loom__rig_options options = options_of(1, 2, 2, length, length);
        loom__rig *rig = rig_of(problem, &options);
        loom__rig_fill(rig, LOOM__RIG_Q, 0);
        run_rig(rig, problem);
        for (int64_t i = 0; i < length; i++) {
            int64_t first = rows[n].left < 0 || i < rows[n].left ? 0 : i - rows[n].left;
            int64_t last = rows[n].right < 0 || i + rows[n].right >= length ? length - 1 : i + rows[n].right;
            assert_near(get(rig, LOOM__RIG_LSE, 0, i, 1, 0), log((double)(last - first + 1)), 2e-6);
            for (int64_t x = 0; x < 64 && first == last; x++)
                assert_true(get(rig, LOOM__RIG_O, 0, i, 1, x) == get(rig, LOOM__RIG_V, 0, i, 1, x));
        }
        loom__rig_destroy(rig);
    }
}

static void w10_window_with_more_queries_than_keys(void **state) {
    (void)state;
    static const char problem[] = "bf16 d=64 mask={window(32, 64)} backward";
    static const int64_t lengths[][3] = {{129, 33, 32}, {257, 65, 128}};
    for (size_t n = 0; n < COUNT(lengths); n++) {
        loom__rig_options options = options_of(1, 4, 2, lengths[n][0], lengths[n][1]);
        loom__rig *rig = check_and_keep(problem, &options);
        for (int64_t i = 0; i < lengths[n][0]; i++) {
            bool empty = get(rig, LOOM__RIG_LSE, 0, i, 2, 0) == -INFINITY;
            assert_int_equal(empty, i < lengths[n][2]);
            if (empty) assert_sees_nothing(rig, 0, i, 2);
        }
        loom__rig_destroy(rig);
    }
}

static void w13_softcap_before_the_mask(void **state) {
    (void)state;
    static const int caps[] = {1, 30, 50};
    static const char *const masks[] = {"causal", "causal & window(40, 0)", "q / 16 >= k / 16 & causal"};
    for (size_t n = 0; n < COUNT(caps); n++) {
        const char *problem = TEXT("fp16 d=64 mask={%s} score={softcap(%d)}", masks[n], caps[n]);
        loom__rig_options options = options_of(1, 2, 2, 128, 128);
        loom__rig *one = check_and_keep(problem, &options), *other = rig_of(problem, &options);
        for (int64_t x = 0; x < 64; x++) {
            loom__rig_set(other, LOOM__RIG_K, 0, 100, 1, x, 17);
            loom__rig_set(other, LOOM__RIG_V, 0, 100, 1, x, -300);
        }
        run_rig(other, problem);
        for (int64_t i = 0; i < 128; i++) {
            bool same = true;
            for (int64_t x = 0; x < 64; x++)
                same = same && get(one, LOOM__RIG_O, 0, i, 1, x) == get(other, LOOM__RIG_O, 0, i, 1, x);
            assert_int_equal(same, i < 100);
        }
        loom__rig_destroy(one);
        loom__rig_destroy(other);
        options = options_of(1, 2, 2, 128, 100); /* rows 0 to 27 are empty */
        one = check_and_keep(problem, &options);
        assert_true(get(one, LOOM__RIG_LSE, 0, 0, 0, 0) == -INFINITY);
        loom__rig_destroy(one);
    }
}

/* Copies the last rows of q, and all of k and v, from one rig to another. */
static void copy_inputs(const loom__rig *from, loom__rig *to) {
    const loom__rig_tensor *q = &to->tensors[LOOM__RIG_Q];
    int64_t skipped = from->tensors[LOOM__RIG_Q].dims[1] - q->dims[1];
    for (int64_t b = 0; b < q->dims[0]; b++) {
        for (int64_t i = 0; i < q->dims[1]; i++)
            for (int64_t h = 0; h < q->dims[2]; h++)
                for (int64_t x = 0; x < q->dims[3]; x++)
                    loom__rig_set(to, LOOM__RIG_Q, b, i, h, x, get(from, LOOM__RIG_Q, b, i + skipped, h, x));
        for (loom__rig_name name = LOOM__RIG_K; name <= LOOM__RIG_V; name++)
            for (int64_t j = 0; j < to->tensors[name].dims[1]; j++)
                for (int64_t h = 0; h < to->tensors[name].dims[2]; h++)
                    for (int64_t x = 0; x < to->tensors[name].dims[3]; x++)
                        loom__rig_set(to, name, b, j, h, x, get(from, name, b, j, h, x));
    }
}

static void set_slopes(loom__rig *rig) {
    float *slopes = (float *)(uintptr_t)rig->params[0].data;
    for (int64_t h = 0; h < rig->options.shape.heads_q; h++) slopes[h] = exp2f(-(float)(h + 1));
}

static void w16_alibi_in_prefill_and_decode(void **state) {
    (void)state;
    static const char problem[] = "fp16 d=64 causal score={alibi(slopes)} params={slopes: f32[heads_q]}";
    static const char cross[] = "fp16 d=64 score={alibi(slopes)} params={slopes: f32[heads_q]}";
    static const int64_t lengths[] = {7, 33, 200}, rows[] = {1, 5};
    for (size_t n = 0; n < COUNT(lengths); n++) {
        loom__rig_options options = options_of(1, 8, 8, lengths[n], lengths[n]);
        loom__rig *all = rig_of(problem, &options);
        set_slopes(all);
        check_rig(all, problem);
        for (size_t m = 0; m < COUNT(rows); m++) {
            options.shape.seq_q = rows[m];
            loom__rig *last = rig_of(problem, &options);
            set_slopes(last);
            copy_inputs(all, last);
            check_rig(last, problem);
            for (int64_t i = 0; i < rows[m]; i++) {
                int64_t same = lengths[n] - rows[m] + i;
                for (int64_t h = 0; h < 8; h++) {
                    assert_true(get(last, LOOM__RIG_LSE, 0, i, h, 0) ==
                                get(all, LOOM__RIG_LSE, 0, same, h, 0));
                    for (int64_t x = 0; x < 64; x++)
                        assert_true(get(last, LOOM__RIG_O, 0, i, h, x) ==
                                    get(all, LOOM__RIG_O, 0, same, h, x));
                }
            }
            loom__rig_destroy(last);
        }
        loom__rig_destroy(all);
        options.shape.seq_q = 11;
        loom__rig *rig = rig_of(cross, &options);
        set_slopes(rig);
        check_rig(rig, cross);
        loom__rig_destroy(rig);
    }
}

static void w18_gradient_through_lse(void **state) {
    (void)state;
    int64_t length = size(2048, 120), heads = size(16, 2);
    loom__rig_options options = options_of(size(4, 2), heads, heads, length, length);
    static const char problem[] = "bf16 d=64 backward";
    loom__rig *rig = rig_of(problem, &options);
    loom__rig_fill(rig, LOOM__RIG_DOUT, 0);
    loom__rig_fill(rig, LOOM__RIG_DLSE, 1 / (double)(options.shape.batch * heads * length));
    check_rig(rig, problem);
    assert_true(row_is(rig, LOOM__RIG_DV, 1, 3, 1, 0));
    assert_false(row_is(rig, LOOM__RIG_DQ, 1, 3, 1, 0));
    assert_false(row_is(rig, LOOM__RIG_DK, 1, 3, 1, 0));
    loom__rig_destroy(rig);
    options = options_of(2, 8, 2, size(700, 90), size(600, 70)); /* some rows are empty */
    check("bf16 d=64 causal backward", &options);
    check("bf16 d=64 causal score={softcap(20)} backward", &options);
}

/* Weights of two partial results of one row, by their LSE. */
static void assert_merges(const loom__rig *one, const loom__rig *two, const loom__rig *whole,
                          double tolerance) {
    const loom__rig_tensor *o = &whole->tensors[LOOM__RIG_O];
    for (int64_t i = 0; i < o->dims[1]; i++) {
        for (int64_t h = 0; h < o->dims[2]; h++) {
            double a = get(one, LOOM__RIG_LSE, 0, i, h, 0), b = get(two, LOOM__RIG_LSE, 0, i, h, 0);
            double lse = fmax(a, b) + log1p(exp(-fabs(a - b)));
            assert_near(get(whole, LOOM__RIG_LSE, 0, i, h, 0), lse, 3e-6 * fmax(1, fabs(lse)));
            for (int64_t x = 0; x < o->dims[3]; x++) {
                double merged = exp(a - lse) * get(one, LOOM__RIG_O, 0, i, h, x) +
                                exp(b - lse) * get(two, LOOM__RIG_O, 0, i, h, x);
                assert_near(get(whole, LOOM__RIG_O, 0, i, h, x), merged, tolerance);
            }
        }
    }
}

/* Copies q and the keys [from, from + seq_k of `to`) of one rig to another. */
static void copy_keys(const loom__rig *whole, loom__rig *to, int64_t from) {
    copy_inputs(whole, to);
    for (loom__rig_name name = LOOM__RIG_K; name <= LOOM__RIG_V; name++)
        for (int64_t j = 0; j < to->tensors[name].dims[1]; j++)
            for (int64_t h = 0; h < to->tensors[name].dims[2]; h++)
                for (int64_t x = 0; x < to->tensors[name].dims[3]; x++)
                    loom__rig_set(to, name, 0, j, h, x, get(whole, name, 0, from + j, h, x));
}

static void w19_lse_is_natural_and_merges(void **state) {
    (void)state;
    int64_t heads = size(16, 2), rows = size(64, 8), prefix = 3072, suffix = 64;
    for (int n = 0; n < 3; n++) {
        const char *problem = n == 2 ? "bf16 d=192:128 causal" : "bf16 d=192:128";
        loom__rig_options options = options_of(1, heads, heads, rows, prefix + suffix);
        loom__rig *whole = rig_of(problem, &options);
        options.q_start = prefix + suffix - rows; /* where the rows stand, whichever keys are given */
        options.shape.seq_k = prefix;
        loom__rig *one = rig_of(problem, &options);
        options.shape.seq_k = suffix;
        options.k_start = prefix;
        loom__rig *two = rig_of(problem, &options);
        if (n == 0) loom__rig_fill(whole, LOOM__RIG_Q, 0);
        copy_keys(whole, one, 0);
        copy_keys(whole, two, prefix);
        check_rig(whole, problem);
        run_rig(one, problem);
        run_rig(two, problem);
        assert_merges(one, two, whole, 0x1p-8);
        if (n == 0) {
            assert_near(get(one, LOOM__RIG_LSE, 0, 0, 0, 0), log(3072), 1e-5);
            assert_near(get(two, LOOM__RIG_LSE, 0, 0, 0, 0), log(64), 1e-5);
        }
        loom__rig_destroy(whole);
        loom__rig_destroy(one);
        loom__rig_destroy(two);
    }
}

static void w21_groups_in_backward(void **state) {
    (void)state;
    static const int heads[][2] = {{6, 2}, {8, 1}, {12, 4}, {14, 2}, {96, 8}, {71, 1}, {5, 5}};
    for (size_t n = 0; n < COUNT(heads); n++) {
        int64_t length = heads[n][0] == 96 ? size(64, 20) : size(200, 40);
        loom__rig_options options = options_of(1, heads[n][0], heads[n][1], length, length);
        check("bf16 d=64 causal backward", &options);
    }
}

static void w22_the_causal_limit_of_a_group(void **state) {
    (void)state;
    static const int heads[][2] = {{8, 2}, {12, 1}, {96, 8}}, lengths[] = {1, 2, 127, 128, 129, 513};
    static const char *const problems[] = {"bf16 d=128 causal", "bf16 d=128 mask={causal & window(100, 0)}"};
    for (size_t n = 0; n < COUNT(heads); n++) {
        for (size_t p = 0; p < COUNT(problems); p++) {
            size_t num = on_gpu() ? COUNT(lengths) : n == 2 ? 2 : 5;
            for (size_t l = 0; l < num; l++) {
                loom__rig_options options = options_of(1, heads[n][0], heads[n][1], lengths[l], lengths[l]);
                check(problems[p], &options);
            }
            loom__rig_options options = options_of(1, heads[n][0], heads[n][1], 5, size(700, 150));
            check(problems[p], &options);
        }
    }
}

/* Rows past the last sequence of a packed batch: outside every launch, they keep what they held. */
static void w30_memory_past_the_sequences(void **state) {
    (void)state;
    for (int n = 0; n < 2; n++) {
        loom__rig_options options = options_of(2, 8, 2, size(100, 60), size(100, 60));
        options.layout = n ? LOOM__LAYOUT_PADDED : LOOM__LAYOUT_PACKED;
        check("bf16 d=64 causal backward", &options);
    }
}

static void w31_queries_without_keys_and_keys_without_queries(void **state) {
    (void)state;
    const int64_t scale = size(1, 16),
                  lengths[][2] = {{0, 2538}, {1208, 1742}, {840, 840}, {0, 3072}, {0, 0}};
    for (size_t n = 0; n < COUNT(lengths) * 8; n++) {
        int64_t a = lengths[n / 8][0] / scale, b = lengths[n / 8][1] / scale;
        bool swapped = n % 2;
        loom__rig_options options = options_of(1, 4, 1, swapped ? b : a, swapped ? a : b);
        const char *problem = TEXT("bf16 d=%d %s backward", n / 2 % 2 ? 256 : 128, n / 4 % 2 ? "causal" : "");
        loom__rig *rig = check_and_keep(problem, &options);
        for (int64_t j = 0; j < options.shape.seq_k && options.shape.seq_q == 0; j++)
            assert_true(row_is(rig, LOOM__RIG_DK, 0, j, 0, 0) && row_is(rig, LOOM__RIG_DV, 0, j, 0, 0));
        for (int64_t i = 0; i < options.shape.seq_q && options.shape.seq_k == 0; i++)
            assert_sees_nothing(rig, 0, i, 3);
        loom__rig_destroy(rig);
    }
}

static void w32_length_one(void **state) {
    (void)state;
    static const int dims[] = {8, 16, 64, 128};
    for (size_t n = 0; n < COUNT(dims); n++) {
        const char *problem = TEXT("fp16 d=%d backward", dims[n]);
        loom__rig_options options = options_of(1, 1, 1, 1, 1);
        options.spread = 3;
        options.without_dlse = true;
        loom__rig *rig = rig_of(problem, &options);
        loom__rig_fill(rig, LOOM__RIG_DOUT, 1);
        check_rig(rig, problem);
        double dot = 0;
        for (int64_t x = 0; x < dims[n]; x++) {
            dot += get(rig, LOOM__RIG_Q, 0, 0, 0, x) * get(rig, LOOM__RIG_K, 0, 0, 0, x);
            assert_true(get(rig, LOOM__RIG_O, 0, 0, 0, x) == get(rig, LOOM__RIG_V, 0, 0, 0, x));
        }
        assert_near(get(rig, LOOM__RIG_LSE, 0, 0, 0, 0), dot / sqrt(dims[n]), 1e-5 * fmax(1, fabs(dot)));
        assert_true(row_is(rig, LOOM__RIG_DV, 0, 0, 0, 1));
        loom__rig_destroy(rig);
    }
}

static void w37_products_above_the_fp16_range(void **state) {
    (void)state;
    for (int d = 80; d <= 128; d += 48) {
        const char *problem = TEXT("fp16 d=%d backward", d);
        loom__rig_options options = options_of(1, 2, 2, 77, 77);
        loom__rig *rig = rig_of(problem, &options);
        loom__rig_fill(rig, LOOM__RIG_Q, 32);
        loom__rig_fill(rig, LOOM__RIG_K, -32);
        for (int64_t x = 0; x < d; x++)
            for (int64_t h = 0; h < 2; h++) loom__rig_set(rig, LOOM__RIG_K, 0, 50, h, x, 32);
        check_rig(rig, problem);
        for (int64_t x = 0; x < d; x++)
            assert_true(get(rig, LOOM__RIG_O, 0, 20, 1, x) == get(rig, LOOM__RIG_V, 0, 50, 1, x));
        for (loom__rig_name name = LOOM__RIG_DQ; name < LOOM__RIG_NUM; name++) assert_finite(rig, name);
        loom__rig_destroy(rig);
    }
}

static void w38_k_and_v_are_one_tensor(void **state) {
    (void)state;
    static const char *const problems[] = {"bf16 d=256 causal backward", "bf16 d=192:128 causal backward"};
    for (size_t n = 0; n < COUNT(problems); n++) {
        loom__rig_options options = options_of(1, size(32, 8), size(4, 1), size(300, 70), size(300, 70));
        options.layout = LOOM__LAYOUT_SHARED;
        check(problems[n], &options);
    }
}

/* -- 2. Index overflow, strides, alignment --------------------------------------------------------------- */

static void o01_many_sequences_of_length_one(void **state) {
    (void)state;
    static const char problem[] = "bf16 d=128 backward";
    const int64_t batches[] = {size(8300, 300), size(15000, 1)};
    for (size_t n = 0; n < COUNT(batches); n++) {
        loom__rig_options options = options_of(batches[n], size(16, 4), size(16, 4), 1, 1);
        options.without_dlse = true;
        loom__rig *rig = rig_of(problem, &options);
        run_rig(rig, problem);
        for (int64_t b = 0; b < batches[n]; b++) {
            for (int64_t h = 0; h < options.shape.heads_q; h++) {
                for (int64_t x = 0; x < 128; x++) {
                    assert_true(get(rig, LOOM__RIG_O, b, 0, h, x) == get(rig, LOOM__RIG_V, b, 0, h, x));
                    assert_true(get(rig, LOOM__RIG_DV, b, 0, h, x) == get(rig, LOOM__RIG_DOUT, b, 0, h, x));
                    assert_near(get(rig, LOOM__RIG_DQ, b, 0, h, x), 0, 1e-4);
                    assert_near(get(rig, LOOM__RIG_DK, b, 0, h, x), 0, 1e-4);
                }
            }
        }
        loom__rig_destroy(rig);
    }
    loom__rig_options options = options_of(size(100, 2), 729, 729, 16, 16);
    check("bf16 d=72 backward", &options);
}

/* Runs both passes; reads o, dq, dk and dv, which are cleared before, one behind the other. */
static void run_and_read(loom__device_memory *memory, const loom_plan *plan, loom_args args, uint16_t *read) {
    enum { DIM = 64 };
    loom_error error = LOOM_ERROR_INIT;
    const loom_tensor *outputs[] = {&args.o, &args.dq, &args.dk, &args.dv};
    loom_status status = LOOM_OK;
    for (size_t i = 0; i < COUNT(outputs); i++) {
        size_t bytes = (size_t)(i < 2 ? args.shape.seq_q : args.shape.seq_k) * DIM * sizeof *read;
        memset(read, 0, bytes);
        if (!status) status = loom__device_memory_upload(memory, outputs[i]->data, read, bytes, &error);
    }
    for (loom_pass pass = LOOM_FORWARD; pass <= LOOM_BACKWARD && !status; pass++) {
        status = loom_workspace_bytes(plan, pass, &args, &args.workspace_bytes, &error);
        if (!status)
            status = loom__device_memory_alloc(memory, args.workspace_bytes, &args.workspace, &error);
        if (!status)
            status = pass == LOOM_FORWARD ? loom_forward(plan, &args, NULL, &error)
                                          : loom_backward(plan, &args, NULL, &error);
    }
    if (!status) status = loom__device_memory_sync(memory, &error);
    for (size_t i = 0; i < COUNT(outputs) && !status; i++) {
        int64_t items = (i < 2 ? args.shape.seq_q : args.shape.seq_k) * DIM;
        status = loom__device_memory_download(memory, read, outputs[i]->data, (size_t)items * sizeof *read,
                                              &error);
        read += items;
    }
    if (status) fail_msg("%s: %s", error.field, error.text);
}

/* An array that says for each pair of positions what causal says. On the host only the last rows of it. */
static void o03_dense_masks_past_2_32_entries(void **state) {
    (void)state;
    static const int64_t LENGTHS[] = {46400, 65537, 73728};
    static const char problem[] = "bf16 d=64 causal backward",
                      spelled[] =
                          "bf16 d=64 mask={allowed[q, k]} params={allowed: bool[seq_k, seq_k]} backward";
    const loom__rig_options small = options_of(1, 1, 1, 8, 8);
    loom__rig *rig = rig_of(problem, &small); /* for its facts */
    for (size_t n = 0; n < COUNT(LENGTHS); n++) {
        int64_t length = LENGTHS[n], rows = size(length, 40), items = 2 * (rows + length) * 64;
        loom__device_memory *memory = NULL;
        loom_error error = LOOM_ERROR_INIT;
        loom_args args = LOOM_ARGS_INIT;
        loom_param allowed = {.stride = {length, 1}};
        void *mask = NULL;
        args.shape = (loom_shape){1, 1, 1, rows, length};
        uint16_t *read = malloc((size_t)items * 2 * sizeof *read);
        char *row = calloc((size_t)length, 1);
        assert_true(read && row);
        loom_status status = loom__device_memory_open(rigs.context, rigs.device, &memory, &error);
        if (!status) status = loom__tensors_make(memory, rig->reference, &args, &error);
        if (!status) status = loom__device_memory_alloc(memory, (size_t)(length * length), &mask, &error);
        allowed.data = mask;
        memset(row, 1, (size_t)(length - rows));
        for (int64_t q = length - rows; q < length && !status; q++) {
            row[q] = 1;
            status =
                loom__device_memory_upload(memory, (char *)mask + q * length, row, (size_t)length, &error);
        }
        if (status) fail_msg("%s: %s", error.field, error.text);
        run_and_read(memory, plan_of(problem), args, read);
        args.params = &allowed;
        args.num_params = 1;
        run_and_read(memory, plan_of(spelled), args, read + items);
        double largest = 0;
        for (int64_t i = 0; i < items; i++) largest = fmax(largest, fabs(loom__bf16_to_float(read[i])));
        assert_true(largest > 0.01);
        for (int64_t i = 0; i < items; i++) {
            double wanted = loom__bf16_to_float(read[i]), got = loom__bf16_to_float(read[items + i]);
            if (!(fabs(got - wanted) <= 0.01 * largest)) /* roundings of bf16, in another order */
                fail_msg("%lld keys: number %lld is %g, causal gives %g", (long long)length, (long long)i,
                         got, wanted);
        }
        loom__device_memory_close(memory);
        free(row);
        free(read);
    }
    loom__rig_destroy(rig);
}

static void o05_more_batches_and_heads_than_a_grid_axis(void **state) {
    (void)state;
    const int64_t shapes[][4] = {{65536, size(8, 1), size(8, 1), size(4, 2)},
                                 {65535, 1, 1, 4},
                                 {1, 65536, 65536, size(10, 2)},
                                 {65536, 2, 1, 1}};
    for (size_t n = 0; n < COUNT(shapes); n++) {
        loom__rig_options options =
            options_of(shapes[n][0], shapes[n][1], shapes[n][2], shapes[n][3], shapes[n][3]);
        check("fp16 d=16 backward", &options);
    }
}

static loom_status launch_with(const loom__rig *rig, const loom_args *args, loom_pass pass,
                               loom_error *error) {
    return pass == LOOM_FORWARD ? loom_forward(rig->plan, args, NULL, error)
                                : loom_backward(rig->plan, args, NULL, error);
}

static void o07_dout_of_any_stride(void **state) {
    (void)state;
    static const char problem[] = "fp16 d=128 backward";
    static const loom__layout layouts[] = {LOOM__LAYOUT_HEADS_FIRST, LOOM__LAYOUT_BROADCAST,
                                           LOOM__LAYOUT_ODD};
    loom__rig_options options = options_of(2, 4, 1, 32, 32);
    for (size_t n = 0; n < COUNT(layouts); n++) {
        options.layout = layouts[n];
        check(problem, &options);
    }
    options.layout = LOOM__LAYOUT_DENSE;
    loom__rig *rig = check_and_keep(problem, &options);
    loom_args args;
    loom_error error = LOOM_ERROR_INIT;
    loom__rig_host_args(rig, &args);
    args.dout.stride[3] = 2;
    assert_int_equal(launch_with(rig, &args, LOOM_BACKWARD, &error), LOOM_INVALID);
    assert_non_null(strstr(error.field, "dout"));
    assert_non_null(strchr(error.text, '2'));
    loom__rig_destroy(rig);
}

/* Leaves every second token of a tensor out. */
static void take_every_second_token(loom__rig *rig, loom__rig_name name) {
    rig->tensors[name].stride[1] *= 2;
}

static void o08_k_and_v_of_different_layouts(void **state) {
    (void)state;
    static const char *const problems[] = {"bf16 d=64 backward", "bf16 d=64 causal backward"};
    for (size_t n = 0; n < 4; n++) {
        int64_t length = size(513, 65);
        loom__rig_options options = options_of(2, size(16, 2), size(16, 2), length, 2 * length);
        loom__rig *rig = rig_of(problems[n % 2], &options);
        rig->options.shape.seq_k = length;
        for (loom__rig_name name = LOOM__RIG_K; name < LOOM__RIG_NUM; name++)
            if (name == LOOM__RIG_K || name == LOOM__RIG_V || name == LOOM__RIG_DK || name == LOOM__RIG_DV)
                rig->tensors[name].dims[1] = length;
        take_every_second_token(rig, n < 2 ? LOOM__RIG_K : LOOM__RIG_V);
        take_every_second_token(rig, n < 2 ? LOOM__RIG_DV : LOOM__RIG_DK);
        check_rig(rig, problems[n % 2]);
        loom__rig_destroy(rig);
    }
    for (size_t n = 0; n < COUNT(problems); n++) {
        loom__rig_options options = options_of(2, 4, 2, 65, 80);
        options.layout = LOOM__LAYOUT_MIXED;
        check(problems[n], &options);
    }
}

static void o10_unaligned_rows(void **state) {
    (void)state;
    static const char by_head[] =
        "fp16 d=64 score={s + bias[h, row, col]} params={bias: f16[heads_q, seq_q, seq_k]} backward";
    static const char by_batch[] = "fp16 d=32 score={s + bias[b, h, row, col]} params={bias: f16[batch, "
                                   "heads_q, seq_q, seq_k]} backward";
    loom__rig_options options = options_of(1, size(16, 3), size(16, 3), 43, 43);
    options.layout = LOOM__LAYOUT_ODD;
    check(by_head, &options);
    options.shape = (loom_shape){size(133, 2), size(8, 2), size(8, 2), 77, 77};
    check(by_batch, &options);
    loom_error error = LOOM_ERROR_INIT;
    char text[64];
    assert_int_not_equal(loom_problem_canonical(rigs.context, "fp16 d=63", text, sizeof text, NULL, &error),
                         LOOM_OK);
    assert_non_null(strstr(error.text, "63"));
    assert_non_null(strstr(error.text, "8"));
}

/* -- 4. Determinism and races ---------------------------------------------------------------------------- */

static void d01_deterministic_backward(void **state) {
    (void)state;
    const struct {
        const char *problem;
        loom_shape shape;
        int runs;
    } rows[] = {{"fp16 d=64 backward deterministic",
                 {2, size(12, 2), size(12, 2), size(1024, 90), size(1024, 90)},
                 (int)size(200, 5)},
                {"fp16 d=64 backward deterministic",
                 {2, size(8, 2), size(8, 2), size(512, 70), size(512, 70)},
                 (int)size(50, 3)},
                {"bf16 d=128 causal backward deterministic",
                 {2, size(4, 2), size(4, 2), size(2048, 80), size(2048, 80)},
                 (int)size(20, 3)},
                {"fp16 d=64 backward deterministic",
                 {2, size(16, 8), size(2, 1), size(1024, 70), size(1024, 70)},
                 (int)size(20, 3)},
                {"bf16 d=64 mask={causal & window(99, 0)} backward deterministic",
                 {2, 4, 2, size(1500, 150), size(1500, 150)},
                 (int)size(20, 3)}};
    loom_error error = LOOM_ERROR_INIT;
    for (size_t n = 0; n < COUNT(rows); n++) {
        loom__rig_options options = LOOM__RIG_OPTIONS_INIT;
        options.shape = rows[n].shape;
        loom__rig *rig = rig_of(rows[n].problem, &options);
        check_rig(rig, rows[n].problem);
        uint64_t digest = loom__rig_digest(rig, LOOM_BACKWARD);
        for (int run = 0; run < rows[n].runs; run++) {
            assert_int_equal(loom__rig_run(rig, LOOM_BACKWARD, &error), LOOM_OK);
            assert_true(loom__rig_digest(rig, LOOM_BACKWARD) == digest);
        }
        loom__rig_destroy(rig);
    }
}

/* A rig poisons its workspace before each launch; here each launch of a batch of ragged sequences reuses one.
 */
static void d03_poisoned_workspace(void **state) {
    (void)state;
    static const char problem[] = "bf16 d=128 causal backward deterministic";
    static const int64_t queries[] = {33, 11, 11, 11, 11, 11, 11, 12},
                         keys[] = {272, 192, 240, 64, 288, 288, 544, 448};
    loom_error error = LOOM_ERROR_INIT;
    for (size_t n = 0; n < COUNT(queries); n++) {
        loom__rig_options options =
            options_of(1, size(64, 4), size(16, 1), queries[n], size(keys[n], keys[n] / 4));
        loom__rig *rig = check_and_keep(problem, &options);
        uint64_t digest = loom__rig_digest(rig, LOOM_BACKWARD);
        for (int run = 0; run < size(100, 3); run++) {
            assert_int_equal(loom__rig_run(rig, LOOM_BACKWARD, &error), LOOM_OK);
            assert_true(loom__rig_digest(rig, LOOM_BACKWARD) == digest);
        }
        loom__rig_destroy(rig);
    }
}

/* -- 5. Head dimensions ---------------------------------------------------------------------------------- */

static void h01_every_head_dim_with_gradients(void **state) {
    (void)state;
    static const int all[] = {8,  16, 24,  32,  40,  48,  56,  64,  72,  80,
                              88, 96, 104, 112, 120, 128, 160, 192, 224, 256};
    static const int few[] = {48, 72, 88, 104, 120, 224};
    const int *dims = on_gpu() ? all : few;
    for (size_t n = 0; n < (on_gpu() ? COUNT(all) * 2 : COUNT(few)); n++) {
        loom__rig_options options = options_of(1, size(8, 2), size(8, 2), size(512, 96), size(512, 96));
        const char *mask = n % 2 ? "causal" : "";
        check(TEXT("bf16 d=%d %s backward", dims[on_gpu() ? n / 2 : n], mask), &options);
    }
}

/* 99 KiB of shared memory, as sm_86, 89 and 120 have. */
static void h03_little_shared_memory(void **state) {
    (void)state;
    static const int dims[] = {160, 256};
    for (size_t n = 0; n < COUNT(dims); n++) {
        loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
        loom_error error = LOOM_ERROR_INIT;
        loom_plan *plan = NULL;
        const char *problem = TEXT("bf16 d=%d causal backward", dims[n]);
        desc.problem = problem;
        desc.device = LOOM_DEVICE_NONE;
        desc.target = "mma";
        desc.arch = "sm_86";
        loom_status status = loom_plan_create(rigs.context, &desc, &plan, &error);
        if (status == LOOM_COMPILE && !strcmp(error.field, "nvrtc")) {
            printf("SKIPPED the compile for sm_86: %s\n", error.text);
        } else {
            if (status) fail_msg("%s: %s", error.field, error.text);
            for (int32_t i = 0; i < loom_plan_num_kernels(plan); i++) {
                loom_kernel kernel = LOOM_KERNEL_INIT;
                assert_int_equal(loom_plan_kernel(plan, i, &kernel, &error), LOOM_OK);
                assert_in_range(kernel.smem_bytes, 0, 99 * 1024);
            }
            loom_plan_destroy(plan);
        }
        loom__rig_options options = options_of(1, 2, 2, size(256, 80), size(256, 80));
        check(problem, &options);
    }
}

static void h05_head_dims_above_256_are_refused(void **state) {
    (void)state;
    loom_error error = LOOM_ERROR_INIT;
    char text[64];
    assert_int_not_equal(
        loom_problem_canonical(rigs.context, "bf16 d=512 causal backward", text, sizeof text, NULL, &error),
        LOOM_OK);
    assert_string_equal(error.field, "problem.d");
    assert_non_null(strstr(error.text, "512"));
    assert_non_null(strstr(error.text, "256"));
}

/* -- 9. Error messages ----------------------------------------------------------------------------------- */

static void e01_one_query_and_an_empty_sequence(void **state) {
    (void)state;
    static const int64_t lengths[][2] = {{1, 3}, {0, 0}, {1, 5}};
    for (size_t n = 0; n < COUNT(lengths); n++) {
        loom__rig_options options = options_of(1, 9, 3, lengths[n][0], lengths[n][1]);
        check("bf16 d=64 causal", &options);
    }
}

static void e03_empty_dimensions(void **state) {
    (void)state;
    static const int64_t shapes[][5] = {
        {0, 10, 10, 3952, 16}, {2, 10, 10, 0, 16}, {2, 10, 10, 52, 0}, {2, 0, 0, 52, 16}, {0, 0, 0, 0, 0}};
    for (size_t n = 0; n < COUNT(shapes) * 2; n++) {
        const int64_t *s = shapes[n / 2];
        loom__rig_options options = options_of(s[0], s[1], s[2], s[3], s[4]);
        check(n % 2 ? "fp16 d=64 causal backward" : "fp16 d=64 backward deterministic", &options);
    }
}

static void e05_refusals_name_field_value_and_rule(void **state) {
    (void)state;
    static const struct {
        const char *problem, *field, *value, *rule;
    } texts[] = {{"fp64 d=64", "problem", "fp64", "fp32"},
                 {"int8 d=64", "problem", "int8", "bf16"},
                 {"bf16 d=300", "problem.d", "300", "256"},
                 {"bf16", "problem.d", "missing", "d=128"},
                 {"bf16 d=64 mask={k + q}", "problem.mask", "i32", "bool"},
                 {"bf16 d=64 mask={s > 1.0}", "problem.mask", "s", "mask"},
                 {"bf16 d=64 mask={seen[q]}", "problem.mask", "seen", "params"},
                 {"bf16 d=64 mask={seen[q]} params={seen: bool[seq_q, seq_k]}", "problem.mask", "seen", "2"},
                 {"bf16 d=64 score={k <= q}", "problem.score", "bool", "f32"},
                 {"bf16 d=64 dropout", "problem.dropout", "dropout", "not"}};
    loom_error error = LOOM_ERROR_INIT;
    char text[256];
    for (size_t n = 0; n < COUNT(texts); n++) {
        if (!loom_problem_canonical(rigs.context, texts[n].problem, text, sizeof text, NULL, &error))
            fail_msg("\"%s\" was accepted", texts[n].problem);
        if (strncmp(error.field, texts[n].field, strlen(texts[n].field)) ||
            !strstr(error.text, texts[n].value) || !strstr(error.text, texts[n].rule))
            fail_msg("\"%s\": field %s text %s", texts[n].problem, error.field, error.text);
    }
    loom__rig_options options = options_of(1, 4, 2, 8, 8);
    loom__rig *rig = rig_of("bf16 d=64 mask={k <= q + w} params={w: i32}", &options);
    loom_args good, args;
    loom__rig_host_args(rig, &good);
    args = good, args.q.data = NULL;
    assert_int_equal(launch_with(rig, &args, LOOM_FORWARD, &error), LOOM_INVALID);
    assert_non_null(strstr(error.field, "q"));
    args = good, args.shape.heads_q = 3;
    assert_int_equal(launch_with(rig, &args, LOOM_FORWARD, &error), LOOM_INVALID);
    assert_non_null(strstr(error.text, "3"));
    args = good, args.num_params = 0;
    assert_int_equal(launch_with(rig, &args, LOOM_FORWARD, &error), LOOM_INVALID);
    assert_non_null(strstr(error.field, "param"));
    args = good, args.scale = -1;
    assert_int_equal(launch_with(rig, &args, LOOM_FORWARD, &error), LOOM_INVALID);
    assert_non_null(strstr(error.field, "scale"));
    assert_int_equal(launch_with(rig, &good, LOOM_BACKWARD, &error), LOOM_INVALID);
    loom__rig_destroy(rig);
}

static void e07_any_length(void **state) {
    (void)state;
    const int64_t lengths[][2] = {
        {size(4250, 425), size(4250, 425)}, {137, 137}, {1, 1}, {1, 4250}, {size(4250, 600), 1}};
    for (size_t n = 0; n < COUNT(lengths); n++) {
        loom__rig_options options = options_of(1, 2, 1, lengths[n][0], lengths[n][1]);
        check("bf16 d=64 causal backward", &options);
    }
}

/* -- Identities ------------------------------------------------------------------------------------------ */

static double dot(const loom__rig *rig, loom__rig_name a, loom__rig_name b, double *squares) {
    const loom__rig_tensor *t = &rig->tensors[a];
    double sum = 0;
    for (int64_t n = 0; n < t->dims[0]; n++) {
        for (int64_t i = 0; i < t->dims[1]; i++) {
            for (int64_t h = 0; h < t->dims[2]; h++) {
                for (int64_t x = 0; x < t->dims[3]; x++) {
                    double product = get(rig, a, n, i, h, x) * get(rig, b, n, i, h, x);
                    sum += product;
                    *squares += product * product;
                }
            }
        }
    }
    return sum;
}

static const struct {
    const char *dtype;
    double half_ulp;
} types[] = {{"bf16", 0x1p-9}, {"fp16", 0x1p-12}};

static loom__rig_options long_options(void) {
    loom__rig_options options =
        options_of(size(2, 1), size(16, 4), size(4, 2), size(4096, 300), size(5000, 411));
    options.seed = 11;
    return options;
}

static const char *const identity_bodies[] = {"causal", "mask={causal & window(255, 0)}",
                                              "mask={q / 64 >= k / 64} score={softcap(8)}",
                                              "score={alibi(0.125)}"};

static void i1_i2_inner_products_agree(void **state) {
    (void)state;
    for (size_t n = 0; n < COUNT(identity_bodies); n++) {
        const char *problem = TEXT("%s d=64 %s backward", types[n % 2].dtype, identity_bodies[n]);
        loom__rig_options options = long_options();
        loom__rig *rig = rig_of(problem, &options);
        double squares_qk = 0, squares_vo = 0;
        run_rig(rig, problem);
        double by_q = dot(rig, LOOM__RIG_DQ, LOOM__RIG_Q, &squares_qk),
               by_k = dot(rig, LOOM__RIG_DK, LOOM__RIG_K, &squares_qk);
        double by_v = dot(rig, LOOM__RIG_DV, LOOM__RIG_V, &squares_vo),
               by_o = dot(rig, LOOM__RIG_DOUT, LOOM__RIG_O, &squares_vo);
        /* Roundings of single elements are independent: their sum grows with the root of the sum of squares.
         */
        assert_near(by_q, by_k, 8 * types[n % 2].half_ulp * sqrt(squares_qk));
        assert_near(by_v, by_o, 8 * types[n % 2].half_ulp * sqrt(squares_vo));
        loom__rig_destroy(rig);
    }
}

static void i3_outputs_lie_in_the_hull_of_v(void **state) {
    (void)state;
    for (size_t n = 0; n < 2; n++) {
        const char *problem = TEXT("%s d=64 causal", types[n].dtype);
        loom__rig_options options = long_options();
        options.shape.seq_k = options.shape.seq_q;
        loom__rig *rig = rig_of(problem, &options);
        run_rig(rig, problem);
        for (int64_t x = 0; x < 64; x++) {
            double low = INFINITY, high = -INFINITY;
            for (int64_t i = 0; i < options.shape.seq_q; i++) {
                low = fmin(low, get(rig, LOOM__RIG_V, 0, i, 0, x));
                high = fmax(high, get(rig, LOOM__RIG_V, 0, i, 0, x));
                double o = get(rig, LOOM__RIG_O, 0, i, 0, x),
                       slack = 2 * types[n].half_ulp * fmax(fabs(low), fabs(high));
                if (!(o >= low - slack && o <= high + slack))
                    fail_msg("row %d channel %d: %g is outside %g .. %g", (int)i, (int)x, o, low, high);
            }
        }
        loom__rig_destroy(rig);
    }
}

static void i4_ones_give_ones(void **state) {
    (void)state;
    for (size_t n = 0; n < COUNT(identity_bodies); n++) {
        const char *problem = TEXT("%s d=64 %s", types[n % 2].dtype, identity_bodies[n]);
        loom__rig_options options = long_options();
        loom__rig *rig = rig_of(problem, &options);
        loom__rig_fill(rig, LOOM__RIG_V, 1);
        run_rig(rig, problem);
        for (int64_t i = 0; i < options.shape.seq_q; i++)
            for (int64_t h = 0; h < options.shape.heads_q; h++)
                assert_near(get(rig, LOOM__RIG_O, 0, i, h, i % 64), 1, 2 * types[n % 2].half_ulp);
        loom__rig_destroy(rig);
    }
}

/* Keys a row cannot see may change without changing a bit of the row. */
static void i5_unseen_keys_change_nothing(void **state) {
    (void)state;
    static const char problem[] = "bf16 d=64 mask={causal & window(100, 0)}";
    loom__rig_options options = long_options();
    options.shape.seq_k = options.shape.seq_q;
    int64_t length = options.shape.seq_q, cut = length / 2;
    loom__rig *one = rig_of(problem, &options), *other = rig_of(problem, &options);
    for (int64_t j = cut; j < length; j++) {
        for (int64_t x = 0; x < 64; x++) {
            loom__rig_set(other, LOOM__RIG_K, 0, j, 1, x, j % 2 ? NAN : INFINITY);
            loom__rig_set(other, LOOM__RIG_V, 0, j, 1, x, j % 2 ? NAN : INFINITY);
        }
    }
    run_rig(one, problem);
    run_rig(other, problem);
    for (int64_t i = 0; i < cut; i++)
        for (int64_t h = 0; h < options.shape.heads_q; h++)
            for (int64_t x = 0; x < 64; x++)
                assert_true(get(one, LOOM__RIG_O, 0, i, h, x) == get(other, LOOM__RIG_O, 0, i, h, x));
    loom__rig_destroy(one);
    loom__rig_destroy(other);
}

/* A row's bits do not depend on the batch, the other rows or the layout (I7 is test_numerics'
 * layouts_give_equal_bits). */
static void rows_stand_alone(void **state) {
    (void)state;
    static const char *const problems[] = {"bf16 d=64 causal", "fp16 d=128 mask={causal & window(70, 0)}"};
    for (size_t n = 0; n < COUNT(problems); n++) {
        loom__rig_options options = options_of(3, 4, 2, size(1000, 200), size(1000, 200));
        loom__rig *all = rig_of(problems[n], &options);
        run_rig(all, problems[n]);
        options.shape.batch = 1;
        options.shape.seq_q = 13;
        loom__rig *last = rig_of(problems[n], &options);
        copy_inputs(all, last);
        run_rig(last, problems[n]);
        for (int64_t i = 0; i < 13; i++)
            for (int64_t h = 0; h < 4; h++)
                for (int64_t x = 0; x < last->tensors[LOOM__RIG_O].dims[3]; x++)
                    assert_true(get(last, LOOM__RIG_O, 0, i, h, x) ==
                                get(all, LOOM__RIG_O, 0, options.shape.seq_k - 13 + i, h, x));
        loom__rig_destroy(all);
        loom__rig_destroy(last);
    }
}

/* -- Blocks ---------------------------------------------------------------------------------------------- */

/* Sets bools of a param [.., rows, columns] of a rig's only array, in all that lies before these axes. */
static void set_blocks(loom__rig *rig, bool (*of)(int64_t outer, int64_t row, int64_t column)) {
    const loom__param_facts *facts = &rig->reference->params[0];
    const loom_param *param = &rig->params[0];
    int64_t dims[4] = {1, 1, 1, 1};
    for (int axis = 0; axis < facts->num_dims; axis++)
        dims[4 - facts->num_dims + axis] = loom__param_dim(facts, axis, &rig->options.shape);
    unsigned char *to = (unsigned char *)param->data; /* dense */
    for (int64_t outer = 0; outer < dims[0] * dims[1]; outer++)
        for (int64_t i = 0; i < dims[2]; i++)
            for (int64_t j = 0; j < dims[3]; j++) *to++ = of(outer, i, j);
}

static bool block_at_or_before(int64_t outer, int64_t row, int64_t column) {
    return (void)outer, column <= row;
}
static bool block_any(int64_t outer, int64_t row, int64_t column) {
    return (void)outer, (void)row, (void)column, true;
}
static bool block_none(int64_t outer, int64_t row, int64_t column) {
    return (void)outer, (void)row, (void)column, false;
}
static bool block_cross(int64_t outer, int64_t row, int64_t column) {
    return (void)outer, row != 3 && column != 5;
}
static bool block_corner(int64_t outer, int64_t row, int64_t column) {
    return (void)outer, row == 7 && column == 0;
}
static bool block_by_head(int64_t outer, int64_t row, int64_t column) {
    return (row + column + outer) % 3 != 0;
}
static bool block_scattered(int64_t outer, int64_t row, int64_t column) {
    return ((uint64_t)(outer * 7919 + row * 104729 + column * 1299709 + 1) * 0x9e3779b97f4a7c15u >> 60) < 7;
}

/* Blocks that spell causal, full ones below the diagonal and cut ones on it, give what causal gives; all
 * blocks what no mask. */
static void b01_blocks_that_spell_causal(void **state) {
    (void)state;
    static const int dims[] = {64, 96, 128, 192}, sizes[] = {64, 128, 256};
    int64_t length = size(1024, 260);
    for (size_t n = 0; n < COUNT(dims) * COUNT(sizes); n++) {
        int d = dims[n % COUNT(dims)], block = sizes[n / COUNT(dims)];
        if (!on_gpu() && n % COUNT(dims) != n / COUNT(dims)) continue; /* one size a head dim */
        loom__rig_options options = options_of(1, 2, 2, length, length);
        const char *causal = TEXT("bf16 d=%d causal backward", d), *full = TEXT("bf16 d=%d backward", d);
        const char *problem = TEXT("bf16 d=%d mask={blk[row/%d, col/%d] & (q / %d != k / %d | causal)} "
                                   "params={blk: bool[ceil(seq_q/%d), ceil(seq_k/%d)]} backward",
                                   d, block, block, block, block, block, block);
        const char *plain = TEXT("bf16 d=%d mask={blk[row/%d, col/%d]} params={blk: bool[ceil(seq_q/%d), "
                                 "ceil(seq_k/%d)]} backward",
                                 d, block, block, block, block);
        for (int which = 0; which < 2; which++) {
            const char *wanted = which ? full : causal, *spelled = which ? plain : problem;
            loom__rig *one = rig_of(wanted, &options), *other = rig_of(spelled, &options);
            set_blocks(other, which ? block_any : block_at_or_before);
            run_rig(one, wanted);
            check_rig(other, spelled);
            for (loom__rig_name name = LOOM__RIG_O; name < LOOM__RIG_NUM; name++) {
                const loom__rig_tensor *t = &one->tensors[name];
                double largest = 0, difference = 0;
                if (t->buffer < 0 || other->tensors[name].buffer < 0 || name == LOOM__RIG_DOUT ||
                    name == LOOM__RIG_DLSE)
                    continue;
                for (int64_t i = 0; i < t->dims[1]; i++)
                    for (int64_t h = 0; h < t->dims[2]; h++)
                        for (int64_t x = 0; x < t->dims[3]; x++) {
                            largest = fmax(largest, fabs(get(one, name, 0, i, h, x)));
                            difference = fmax(
                                difference, fabs(get(one, name, 0, i, h, x) - get(other, name, 0, i, h, x)));
                        }
                if (!(difference <= 0.02 * largest)) /* roundings of bf16, in another order */
                    fail_msg("%s: %s differs by %g of %g", spelled, loom__rig_names[name], difference,
                             largest);
            }
            loom__rig_destroy(one);
            loom__rig_destroy(other);
        }
    }
}

static void b02_blocks_that_nobody_sees(void **state) {
    (void)state;
    static const char problem[] = "bf16 d=64 mask={blk[h, row/128, col/128]} "
                                  "params={blk: bool[heads_q, ceil(seq_q/128), ceil(seq_k/128)]} backward";
    bool (*const patterns[])(int64_t, int64_t, int64_t) = {block_cross, block_none, block_corner,
                                                           block_by_head};
    for (size_t n = 0; n < COUNT(patterns); n++) {
        loom__rig_options options = options_of(1, 2, 1, 1000, 1000); /* 8 x 8 blocks, the last ones short */
        loom__rig *rig = rig_of(problem, &options);
        set_blocks(rig, patterns[n]);
        check_rig(rig, problem);
        for (int64_t i = 0; i < 8; i++) {
            bool sees = false, seen = false;
            for (int64_t j = 0; j < 8; j++) {
                sees |= patterns[n](1, i, j);
                seen |= patterns[n](0, j, i) || patterns[n](1, j, i);
            }
            if (!sees) assert_sees_nothing(rig, 0, 128 * i + 9, 1);
            if (!seen)
                assert_true(row_is(rig, LOOM__RIG_DK, 0, 128 * i + 9, 0, 0) &&
                            row_is(rig, LOOM__RIG_DV, 0, 128 * i + 9, 0, 0));
        }
        loom__rig_destroy(rig);
    }
}

/* What a mask needs beside the tensors at 96000 tokens and at 2^20: a byte a tile, whatever the heads. */
static void b04_memory_of_a_mask(void **state) {
    (void)state;
    static const char problem[] = "bf16 d=128 mask={document(ids)} params={ids: i32[seq_k]}";
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    desc.problem = problem;
    desc.device = LOOM_DEVICE_NONE;
    desc.target = "hopper";
    desc.arch = "sm_90";
    desc.alignment = 16;
    desc.flags = LOOM_ASYNC; /* no kernel is needed */
    if (loom_plan_create(rigs.context, &desc, &plan, &error)) fail_msg("%s: %s", error.field, error.text);
    static const struct {
        int64_t length;
        size_t most;
    } rows[] = {{96000, 750 * 768 + 8192}, {1 << 20, (size_t)8192 * 8192 + 131072}};
    for (size_t n = 0; n < COUNT(rows); n++) {
        loom_args args = LOOM_ARGS_INIT;
        size_t bytes = 0;
        args.shape = (loom_shape){4, 64, 8, rows[n].length, rows[n].length};
        assert_int_equal(loom_prepared_bytes(plan, &args, &bytes, &error), LOOM_OK);
        if (bytes == 0 || bytes > rows[n].most)
            fail_msg("%zu bytes for %lld tokens", bytes, (long long)rows[n].length);
        assert_int_equal(loom_workspace_bytes(plan, LOOM_FORWARD, &args, &bytes, &error), LOOM_OK);
        assert_true(bytes <= rows[n].most);
    }
    loom_plan_destroy(plan);
}

static void b07_sequences_shorter_than_a_block(void **state) {
    (void)state;
    static const int sizes[][2] = {{64, 256}, {16, 16}, {128, 64}};
    static const int64_t lengths[][2] = {{1, 64}, {3, 131}, {77, 77}, {100, 227}};
    for (size_t n = 0; n < COUNT(sizes) * COUNT(lengths); n++) {
        const int *block = sizes[n % COUNT(sizes)];
        const int64_t *length = lengths[n / COUNT(sizes)];
        const char *problem =
            TEXT("bf16 d=16 mask={causal & blk[b, h, row/%d, col/%d]} "
                 "params={blk: bool[batch, heads_q, ceil(seq_q/%d), ceil(seq_k/%d)]} backward",
                 block[0], block[1], block[0], block[1]);
        loom__rig_options options = options_of(2, 2, 1, length[0], length[1]);
        loom__rig *rig = rig_of(problem, &options);
        set_blocks(rig, block_scattered);
        check_rig(rig, problem);
        loom__rig_destroy(rig);
    }
}

static void b08_blocks_at_other_head_dims_than_tiles(void **state) {
    (void)state;
    static const char problem[] =
        "bf16 d=192:128 mask={causal & blk[b, h, row/128, col/128]} "
        "params={blk: bool[batch, heads_q, ceil(seq_q/128), ceil(seq_k/128)]} backward";
    static const int64_t lengths[] = {512, 257};
    for (size_t n = 0; n < COUNT(lengths); n++) {
        loom__rig_options options = options_of(size(2, 1), size(4, 2), size(4, 2), lengths[n], lengths[n]);
        loom__rig *rig = rig_of(problem, &options);
        set_blocks(rig, block_scattered);
        check_rig(rig, problem);
        loom__rig_destroy(rig);
    }
}

/* Rows see everything or nothing, by blocks far larger than a tile. */
static void b09_large_blocks_of_rows(void **state) {
    (void)state;
    int64_t half = size(46848, 300), seen = half / 4;
    const char *problem = TEXT("bf16 d=128 mask={row %% %d < %d}", (int)half, (int)seen);
    const char *plain = "bf16 d=128";
    loom__rig_options options = options_of(1, 2, 2, 2 * half, 2 * half);
    loom__rig *rig = rig_of(problem, &options), *all = rig_of(plain, &options);
    run_rig(rig, problem);
    run_rig(all, plain);
    for (int64_t i = 0; i < 2 * half; i++) {
        if (i % half >= seen) {
            assert_sees_nothing(rig, 0, i, 1);
            continue;
        }
        for (int64_t x = 0; x < 128; x++)
            assert_near(get(rig, LOOM__RIG_O, 0, i, 1, x), get(all, LOOM__RIG_O, 0, i, 1, x), 2e-3);
    }
    loom__rig_destroy(rig);
    loom__rig_destroy(all);
}

/* -- Options -------------------------------------------------------------------------------------------- */

/* Each option, and each pair, changes the result as float64 says, and none gives the bits of another. */
static void w15_options_change_the_result(void **state) {
    (void)state;
    static const struct {
        const char *mask, *score, *params;
        float scale;
    } cases[] = {
        {"", "", "", 0},
        {"", "", "", 0.3f},
        {"", "score={softcap(5)}", "", 0},
        {"", "score={softcap(50)}", "", 0},
        {"", "score={alibi(0.5)}", "", 0},
        {"", "score={s + bias[h, row, col]}", "params={bias: f32[heads_q, seq_q, seq_k]}", 0},
        {"mask={window(20, 5)}", "", "", 0},
        {"causal", "", "", 0},
        {"mask={causal & document(ids)}", "", "params={ids: i32[seq_k]}", 0},
        {"mask={window(20, 5)}", "score={softcap(5)}", "", 0},
        {"causal", "score={alibi(0.5)}", "", 0},
        {"causal", "score={softcap(5)}", "", 0.3f},
        {"mask={window(20, 5)}", "score={alibi(0.5)}", "", 0},
        {"", "score={5.0 * tanh((s - 0.5 * abs(q - k)) / 5.0)}", "", 0},
    };
    uint64_t digests[COUNT(cases)];
    for (size_t n = 0; n < COUNT(cases); n++) {
        const char *problem =
            TEXT("bf16 d=64 %s %s %s backward", cases[n].mask, cases[n].score, cases[n].params);
        loom__rig_options options = options_of(1, 2, 1, 100, 130);
        options.scale = cases[n].scale;
        options.spread = 3; /* so that a cap of 50 matters */
        loom__rig *rig = check_and_keep(problem, &options);
        digests[n] = loom__rig_digest(rig, LOOM_FORWARD);
        for (size_t m = 0; m < n; m++)
            if (digests[m] == digests[n]) fail_msg("%s gives the bits of case %zu", problem, m);
        loom__rig_destroy(rig);
    }
}

/* Keys past the end are hidden after the score, whatever it makes of them. */
static void w28_a_score_and_blocks_at_odd_lengths(void **state) {
    (void)state;
    static const int64_t lengths[] = {1025, 1, 127, 129, 1000};
    static const char *const scores[] = {"s + f32(q - k)", "s / (k < seq_k ? 1.0 : 0.0) + f32(q - k)"};
    for (size_t n = 0; n < COUNT(lengths) * COUNT(scores); n++) {
        const char *problem = TEXT("bf16 d=64 mask={causal & blk[row/128, col/128]} score={%s} "
                                   "params={blk: bool[ceil(seq_q/128), ceil(seq_k/128)]} backward",
                                   scores[n % COUNT(scores)]);
        loom__rig_options options =
            options_of(1, 1, 1, lengths[n / COUNT(scores)], lengths[n / COUNT(scores)]);
        loom__rig *rig = rig_of(problem, &options);
        set_blocks(rig, block_at_or_before);
        check_rig(rig, problem);
        assert_finite(rig, LOOM__RIG_O);
        assert_finite(rig, LOOM__RIG_DQ);
        assert_finite(rig, LOOM__RIG_DK);
        loom__rig_destroy(rig);
    }
}

/* Ragged causal lengths end, and are right. */
static void f06_causal_lengths_that_fit_no_tile(void **state) {
    (void)state;
    static const int64_t lengths[] = {1743, 1559};
    for (size_t n = 0; n < COUNT(lengths); n++) {
        loom__rig_options options = options_of(1, size(8, 1), size(8, 1), size(lengths[n], lengths[n] / 4),
                                               size(lengths[n], lengths[n] / 4));
        check("bf16 d=128 causal", &options);
    }
}

int main(int argc, char **argv) {
    int status = rigs_start(argc, argv);
    if (status) return status;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(w01_causal_with_more_queries_than_keys),
        cmocka_unit_test(w02_one_key_and_many_queries),
        cmocka_unit_test(w04_logits_below_a_finite_sentinel),
        cmocka_unit_test(w06_huge_values),
        cmocka_unit_test(w07_very_negative_lse),
        cmocka_unit_test(w09_windows_are_inclusive),
        cmocka_unit_test(w10_window_with_more_queries_than_keys),
        cmocka_unit_test(w13_softcap_before_the_mask),
        cmocka_unit_test(w16_alibi_in_prefill_and_decode),
        cmocka_unit_test(w18_gradient_through_lse),
        cmocka_unit_test(w19_lse_is_natural_and_merges),
        cmocka_unit_test(w21_groups_in_backward),
        cmocka_unit_test(w22_the_causal_limit_of_a_group),
        cmocka_unit_test(w30_memory_past_the_sequences),
        cmocka_unit_test(w31_queries_without_keys_and_keys_without_queries),
        cmocka_unit_test(w32_length_one),
        cmocka_unit_test(w37_products_above_the_fp16_range),
        cmocka_unit_test(w38_k_and_v_are_one_tensor),
        cmocka_unit_test(o01_many_sequences_of_length_one),
        cmocka_unit_test(o03_dense_masks_past_2_32_entries),
        cmocka_unit_test(o05_more_batches_and_heads_than_a_grid_axis),
        cmocka_unit_test(o07_dout_of_any_stride),
        cmocka_unit_test(o08_k_and_v_of_different_layouts),
        cmocka_unit_test(o10_unaligned_rows),
        cmocka_unit_test(d01_deterministic_backward),
        cmocka_unit_test(d03_poisoned_workspace),
        cmocka_unit_test(h01_every_head_dim_with_gradients),
        cmocka_unit_test(h03_little_shared_memory),
        cmocka_unit_test(h05_head_dims_above_256_are_refused),
        cmocka_unit_test(e01_one_query_and_an_empty_sequence),
        cmocka_unit_test(e03_empty_dimensions),
        cmocka_unit_test(e05_refusals_name_field_value_and_rule),
        cmocka_unit_test(e07_any_length),
        cmocka_unit_test(i1_i2_inner_products_agree),
        cmocka_unit_test(i3_outputs_lie_in_the_hull_of_v),
        cmocka_unit_test(i4_ones_give_ones),
        cmocka_unit_test(i5_unseen_keys_change_nothing),
        cmocka_unit_test(rows_stand_alone),
        cmocka_unit_test(b01_blocks_that_spell_causal),
        cmocka_unit_test(b02_blocks_that_nobody_sees),
        cmocka_unit_test(b04_memory_of_a_mask),
        cmocka_unit_test(b07_sequences_shorter_than_a_block),
        cmocka_unit_test(b08_blocks_at_other_head_dims_than_tiles),
        cmocka_unit_test(b09_large_blocks_of_rows),
        cmocka_unit_test(w15_options_change_the_result),
        cmocka_unit_test(w28_a_score_and_blocks_at_odd_lengths),
        cmocka_unit_test(f06_causal_lengths_that_fit_no_tile),
    };
    const struct CMUnitTest quick_tests[] = {
        cmocka_unit_test(w02_one_key_and_many_queries),
        cmocka_unit_test(w38_k_and_v_are_one_tensor),
        cmocka_unit_test(o07_dout_of_any_stride),
        cmocka_unit_test(o10_unaligned_rows),
        cmocka_unit_test(d03_poisoned_workspace),
        cmocka_unit_test(e03_empty_dimensions),
        cmocka_unit_test(e05_refusals_name_field_value_and_rule),
    };
    status = rigs.quick ? cmocka_run_group_tests(quick_tests, NULL, NULL)
                        : cmocka_run_group_tests(tests, NULL, NULL);
    rigs_stop();
    return status;
}
