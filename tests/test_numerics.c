/* test_numerics.c - kernels against float64: dtypes, head dims, lengths, groups, masks, scores, params,
 * layouts.
 *
 * ctest: gpu slow quick
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "rigs.h"

#define COUNT(x) (sizeof(x) / sizeof *(x))

/* The dtypes of a target, in turn. The mma target has no fp32. */
static const char *dtype_of(size_t i) {
    static const char *const all[] = {"fp32", "bf16", "fp16"};
    return on_gpu() ? all[1 + i % 2] : all[i % 3];
}

static const char *print(char *text, size_t capacity, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(text, capacity, format, list);
    va_end(list);
    return text;
}

#define TEXT(...) print((char[512]){0}, 512, __VA_ARGS__)

/* -- Head dims ------------------------------------------------------------------------------------------- */

static void head_dims(void **state) {
    (void)state;
    static const int dims[][2] = {{8, 8},     {16, 16},   {24, 24},   {40, 40},   {64, 64},   {72, 72},
                                  {80, 80},   {96, 96},   {104, 104}, {128, 128}, {160, 160}, {200, 200},
                                  {256, 256}, {192, 128}, {64, 128},  {8, 256},   {256, 8},   {72, 40}};
    loom__rig_options options = options_of(2, 4, 2, 70, 97);
    for (size_t i = 0; i < COUNT(dims); i++)
        check(TEXT("%s d=%d:%d causal backward", dtype_of(i), dims[i][0], dims[i][1]), &options);
}

static void every_head_dim(void **state) {
    (void)state;
    loom__rig_options options = options_of(2, 2, 1, 150, 131);
    for (int64_t i = 0; i < 96; i++) {
        int dtype = (int)(i % 3), d = (int)(i / 3 + 1) * 8, dv = dtype ? d : 264 - d;
        check(TEXT("%s d=%d:%d %s backward", dtype_of((size_t)dtype), d, dv, d % 16 ? "causal" : ""),
              &options);
    }
}

/* -- Lengths --------------------------------------------------------------------------------------------- */

static void lengths(void **state) {
    (void)state;
    static const int few[] = {0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 129};
    static const int many[] = {0,  1,  2,  7,  8,   9,   15,  16,  17,  31,  32,  33, 47,
                               63, 64, 65, 95, 127, 128, 129, 191, 255, 256, 257, 401};
    const int *list = rigs.slow ? many : few;
    size_t num = rigs.slow ? COUNT(many) : COUNT(few);
    static const char *const bodies[] = {"d=64 causal backward", "d=40 backward",
                                         "d=32:16 mask={window(20, 5)} backward deterministic"};
    for (size_t body = 0; body < COUNT(bodies); body++) {
        const char *problem = TEXT("%s %s", dtype_of(body), bodies[body]);
        for (size_t i = 0; i < num; i++) {
            for (size_t j = 0; j < num; j++) {
                loom__rig_options options = options_of(1, 2, 1, list[i], list[j]);
                options.seed = i * 100 + j;
                check(problem, &options);
            }
        }
    }
}

static void empty_batches_and_heads(void **state) {
    (void)state;
    const char *problem = TEXT("%s d=64 causal backward", dtype_of(1));
    for (int i = 0; i < 3; i++) {
        loom__rig_options options =
            options_of(i != 0, i == 1 ? 0 : 2, i == 1 ? 0 : 1, i == 2 ? 0 : 5, i == 2 ? 0 : 7);
        check(problem, &options);
    }
}

/* -- Heads ----------------------------------------------------------------------------------------------- */

static void groups(void **state) {
    (void)state;
    static const int heads[][2] = {{1, 1}, {5, 5}, {6, 2}, {8, 1}, {12, 4}, {14, 2}, {71, 1}};
    for (size_t i = 0; i < COUNT(heads); i++) {
        loom__rig_options options = options_of(2, heads[i][0], heads[i][1], 37, 53);
        check(TEXT("%s d=64 causal backward", dtype_of(i)), &options);
    }
}

/* -- Masks, scores, params ------------------------------------------------------------------------------- */

static const char *const bodies[] = {
    /* walk range */
    "mask={causal & window(16, 0)}",
    "mask={window(7, 9)}",
    "mask={window(-1, 3)}",
    "mask={prefix(20)}",
    "mask={window(10, 10) | k < 4}",
    "mask={k > q}",
    "mask={q - k <= 30 & q - k >= 12}",
    "mask={causal & k >= 7 & q < 90}",
    "mask={k == q}",
    "mask={k != q}",
    "mask={q < 40 ? k <= q : k >= 20}",
    "mask={k <= q + w} params={w: i32}",
    "mask={h == 0 ? causal : k >= q}",
    "mask={b == 1 | k < 33}",
    "mask={false}",
    "mask={k < seq_k - 5 & col > 2}",
    /* walk classify */
    "mask={(q + k) % 3 == 0}",
    "mask={q / 16 == k / 16}",
    "mask={q / 16 >= k / 16 & (q - k) % 2 == 0}",
    "mask={popcount(xor(q, k)) < 3}",
    "mask={hash(q, k, 5) % 4 != 0 & causal}",
    "mask={doc[q] == doc[k]} params={doc: i32[seq_k]}",
    "mask={document(ids) & causal} params={ids: i64[seq_k]}",
    "mask={keep[b, k]} params={keep: bool[batch, seq_k]}",
    "mask={causal & blk[b, h, row / 16, col / 16]} params={blk: bool[batch, heads_q, ceil(seq_q/16), "
    "ceil(seq_k/16)]}",
    "mask={level[q] >= level[k]} params={level: u8[seq_k]}",
    "mask={f32(abs(q - k)) * slope < 20.0} params={slope: f32}",
    "mask={a[q] * a[k] > -0.5 & causal} params={a: f32[seq_k]}",
    "mask={sqrt(f32(q + 200)) - f32(k) / 8.0 > 3.5}",
    /* scores */
    "score={softcap(5)}",
    "mask={causal} score={softcap(c)} params={c: f32}",
    "score={alibi(0.25)} mask={causal}",
    "score={alibi(slopes)} params={slopes: f32[heads_q]}",
    "score={s + bias[h, row, col]} params={bias: f32[heads_q, seq_q, seq_k]}",
    "score={s + bias[row, col]} params={bias: bf16[seq_q, seq_k]} mask={causal}",
    "score={s * (1.0 + f32(q % 3)) - 0.01 * f32(k)}",
    "score={s > 0.0 ? s : 0.2 * s}",
    "score={max(min(s, 1.5), -1.0) + 0.1 * s}",
    "score={abs(s) + sin(s)}",
    "score={log(1.0 + exp(s)) + cos(f32(q - k))}",
    "score={sqrt(s * s + 1.0) / (1.0 + g[k])} params={g: f16[seq_k]}",
    "score={k % 5 == 0 ? -inf : s} mask={causal}",
    "score={floor(s * 2.0) + s}",
    /* further forms */
    "mask={chunked(24)}",
    "mask={dilated(3, 4)}",
    "mask={strided(16)}",
    "mask={fixed(16, 2)}",
    "mask={streaming(4, 20)}",
    "mask={longformer(9, 2)}",
    "mask={bigbird(0, 1, 1, 7)}",
    "mask={butterfly(16)}",
    "mask={vertical_slash(of_key, of_distance)} params={of_key: bool[seq_k], of_distance: bool[seq_k]}",
    "mask={tree(enter, leave)} params={enter: i32[seq_k], leave: i32[seq_k]}",
    "mask={neighborhood_2d(8, 2)}",
    "mask={neighborhood_3d(4, 5, 1, 2)}",
    "score={relative(bias, 20)} params={bias: f32[heads_q, 41]}",
    "score={t5(bias)} params={bias: f16[heads_q, 32]}",
    "mask={causal} score={t5_causal(bias)} params={bias: f32[heads_q, 32]}",
};

/* The text of row i; on the host every dtype in turn. */
static const char *problem_of(size_t i, char *text, size_t capacity) {
    return print(text, capacity, "%s d=%d %s backward", dtype_of(i), i % 2 ? 32 : 64, bodies[i]);
}

static void sweep_bodies(size_t from, size_t to, int num_shapes) {
    static const int shapes[][5] = {
        {2, 4, 2, 65, 130}, {1, 2, 1, 140, 70}, {2, 3, 3, 1, 65}, {1, 2, 2, 200, 333}};
    char problem[512];
    for (size_t i = from; i < to; i++) {
        for (int j = 0; j < num_shapes; j++) {
            const int *s = shapes[j];
            loom__rig_options options = options_of(s[0], s[1], s[2], s[3], s[4]);
            options.seed = i + 1;
            check(problem_of(i, problem, sizeof problem), &options);
        }
    }
}

enum { FIRST_CLASSIFY = 16, FIRST_SCORE = 29, FIRST_FORM = 43 };

static void range_masks(void **state) {
    (void)state;
    assert_string_equal(bodies[FIRST_CLASSIFY], "mask={(q + k) % 3 == 0}");
    sweep_bodies(0, FIRST_CLASSIFY, 3);
}

static void classified_masks(void **state) {
    (void)state;
    assert_string_equal(bodies[FIRST_SCORE], "score={softcap(5)}");
    sweep_bodies(FIRST_CLASSIFY, FIRST_SCORE, 3);
}

static void scores(void **state) {
    (void)state;
    assert_string_equal(bodies[FIRST_FORM], "mask={chunked(24)}");
    sweep_bodies(FIRST_SCORE, FIRST_FORM, 3);
}

static void named_forms(void **state) {
    (void)state;
    sweep_bodies(FIRST_FORM, COUNT(bodies), 2);
}

static void all_bodies_longer(void **state) {
    (void)state;
    sweep_bodies(0, COUNT(bodies), 4);
}

static void starts(void **state) {
    (void)state;
    static const struct {
        int64_t q_start, k_start;
    } rows[] = {{0, 0}, {-40, 0}, {100, 30}, {-100, -70}, {1000000000, 999999990}, {7, LOOM_DEFAULT_START}};
    static const char *const masks[] = {"causal", "mask={causal & window(20, 0)}", "mask={q / 16 == k / 16}"};
    for (size_t i = 0; i < COUNT(masks); i++) {
        for (size_t j = 0; j < COUNT(rows); j++) {
            loom__rig_options options = options_of(1, 2, 1, 75, 66);
            options.q_start = rows[j].q_start;
            options.k_start = rows[j].k_start;
            check(TEXT("%s d=64 %s backward", dtype_of(i), masks[i]), &options);
        }
    }
}

/* A window's edges at every place of a tile. */
static void every_offset(void **state) {
    (void)state;
    static const char *const masks[] = {"mask={window(20, 5)}", "mask={k >= q & k - q < 40 | k == 3}"};
    for (size_t i = 0; i < COUNT(masks); i++) {
        const char *problem = TEXT("%s d=32 %s backward deterministic", dtype_of(i + 1), masks[i]);
        for (int64_t start = -70; start < 200; start++) {
            loom__rig_options options = options_of(1, 1, 1, 70, 140);
            options.q_start = start;
            check(problem, &options);
        }
    }
}

static void scales(void **state) {
    (void)state;
    static const float list[] = {1.0f, 0.01f, 0.3f};
    for (size_t i = 0; i < COUNT(list); i++) {
        loom__rig_options options = options_of(1, 2, 1, 50, 60);
        options.scale = list[i];
        check(TEXT("%s d=64 causal backward", dtype_of(i)), &options);
    }
}

/* -- Tensors --------------------------------------------------------------------------------------------- */

static void layouts(void **state) {
    (void)state;
    static const int shapes[][5] = {{2, 4, 2, 65, 65}, {3, 2, 2, 33, 66}, {1, 4, 1, 1, 40}};
    for (loom__layout layout = LOOM__LAYOUT_DENSE; layout < LOOM__LAYOUT_NUM; layout++) {
        for (size_t i = 0; i < COUNT(shapes); i++) {
            for (size_t dtype = 0; dtype < 3; dtype++) {
                const int *s = shapes[i];
                loom__rig_options options = options_of(s[0], s[1], s[2], s[3], s[4]);
                options.layout = layout;
                check(TEXT("%s d=64 causal backward", dtype_of(dtype)), &options);
            }
        }
        loom__rig_options options = options_of(2, 4, 2, 65, 65);
        options.layout = layout;
        check(TEXT("%s d=72:40 backward", dtype_of(layout)), &options);
    }
}

/* The same values under every layout give the same forward bits, where one kernel takes them: target hopper leaves
 * strides that TMA cannot describe to the kernels of mma. */
static void layouts_give_equal_bits(void **state) {
    (void)state;
    const char *problem = TEXT("%s d=64 causal backward", dtype_of(1));
    uint64_t first = 0;
    for (loom__layout layout = LOOM__LAYOUT_DENSE; layout <= LOOM__LAYOUT_PACKED; layout++) {
        loom__rig_options options = options_of(2, 4, 4, 65, 65);
        options.layout = layout;
        loom__rig *rig = rig_of(problem, &options);
        run_rig(rig, problem);
        if (layout == LOOM__LAYOUT_ODD && !strcmp(target_of_rigs(), "hopper")) {
            compare_rig(rig, problem);
            loom__rig_destroy(rig);
            printf("layout odd runs on mma: compared with float64, not bit by bit\n");
            continue;
        }
        uint64_t digest = loom__rig_digest(rig, LOOM_FORWARD);
        loom__rig_destroy(rig);
        if (layout == LOOM__LAYOUT_DENSE) first = digest;
        if (digest != first) fail_rig(problem, &options, "another layout gave other bits than the dense one");
    }
}

static void params_may_be_broadcast(void **state) {
    (void)state;
    const char *problem = TEXT("%s d=32 score={s + bias[b, h, row, col]} mask={causal} "
                               "params={bias: f32[batch, heads_q, seq_q, seq_k]} backward",
                               dtype_of(0));
    for (int axis = 0; axis < 4; axis++) {
        loom__rig_options options = options_of(2, 4, 2, 33, 70);
        loom__rig *rig = rig_of(problem, &options);
        rig->params[0].stride[axis] = 0;
        check_rig(rig, problem);
        loom__rig_destroy(rig);
    }
}

static void unwanted_outputs(void **state) {
    (void)state;
    static const uint32_t lists[] = {1u << LOOM__RIG_DQ,
                                     1u << LOOM__RIG_DK,
                                     1u << LOOM__RIG_DV,
                                     1u << LOOM__RIG_DQ | 1u << LOOM__RIG_DK,
                                     1u << LOOM__RIG_DK | 1u << LOOM__RIG_DV,
                                     1u << LOOM__RIG_DQ | 1u << LOOM__RIG_DK | 1u << LOOM__RIG_DV};
    static const char *const ends[] = {"backward", "backward deterministic"};
    for (size_t i = 0; i < COUNT(lists) * 2; i++) {
        loom__rig_options options = options_of(1, 4, 2, 70, 66);
        options.unwanted = lists[i % COUNT(lists)];
        check(TEXT("%s d=64 causal %s", dtype_of(i), ends[i / COUNT(lists)]), &options);
    }
    loom__rig_options options = options_of(1, 4, 2, 70, 66);
    options.unwanted = 1u << LOOM__RIG_LSE;
    check(TEXT("%s d=64 causal", dtype_of(1)), &options);
}

static void without_dlse(void **state) {
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        loom__rig_options options = options_of(2, 4, 2, 40, 66);
        options.without_dlse = true;
        check(TEXT("%s d=64 causal backward", dtype_of(i)), &options);
    }
}

static void deterministic_backward(void **state) {
    (void)state;
    static const char *const masks[] = {"causal", "", "mask={(q + k) % 3 == 0}"};
    for (size_t i = 0; i < COUNT(masks); i++) {
        loom__rig_options options = options_of(2, 4, 2, 150, 170);
        check(TEXT("%s d=64 %s backward deterministic", dtype_of(i), masks[i]), &options);
    }
}

/* Keys that no row sees hold NaN and infinities; so do dout and dlse of rows that see nothing. */
static void unseen_values_do_not_matter(void **state) {
    (void)state;
    static const char *const masks[] = {"causal", "mask={causal & window(20, 0)}",
                                        "mask={(q - k) % 2 == 0 & causal}"};
    for (size_t i = 0; i < COUNT(masks) * 2; i++) {
        const char *problem = TEXT("%s d=64 %s backward", dtype_of(i), masks[i % COUNT(masks)]);
        loom__rig_options options = options_of(1, 2, 1, 60, 140);
        options.q_start = -10; /* rows 0 to 9 see nothing; keys from 50 on are seen by none */
        loom__rig *rig = rig_of(problem, &options);
        for (int64_t j = 50; j < 140; j++) {
            for (int64_t x = 0; x < 64; x++) {
                loom__rig_set(rig, LOOM__RIG_K, 0, j, 0, x, i < COUNT(masks) ? NAN : INFINITY);
                loom__rig_set(rig, LOOM__RIG_V, 0, j, 0, x, i < COUNT(masks) ? NAN : -INFINITY);
            }
        }
        for (int64_t row = 0; row < 10; row++) {
            for (int64_t x = 0; x < 64; x++) loom__rig_set(rig, LOOM__RIG_DOUT, 0, row, 1, x, 3e4);
            loom__rig_set(rig, LOOM__RIG_DLSE, 0, row, 1, 0, 1e30);
        }
        check_rig(rig, problem);
        for (int64_t row = 0; row < 10; row++)
            assert_true(loom__rig_get(rig, LOOM__RIG_DQ, 0, row, 1, 0) == 0);
        assert_true(loom__rig_get(rig, LOOM__RIG_DK, 0, 139, 0, 63) == 0);
        loom__rig_destroy(rig);
    }
}

/* A NaN in one row of q spoils that row of o and dq and no other row. */
static void nan_spoils_its_own_row(void **state) {
    (void)state;
    const char *problem = TEXT("%s d=64 causal", dtype_of(0));
    loom__rig_options options = options_of(1, 2, 1, 70, 70);
    loom__rig *rig = rig_of(problem, &options);
    loom__rig_set(rig, LOOM__RIG_Q, 0, 33, 1, 5, NAN);
    check_rig(rig, problem);
    assert_true(isnan(loom__rig_get(rig, LOOM__RIG_O, 0, 33, 1, 0)));
    loom__rig_destroy(rig);
}

int main(int argc, char **argv) {
    int status = rigs_start(argc, argv);
    if (status) return status;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(head_dims),
        cmocka_unit_test(lengths),
        cmocka_unit_test(empty_batches_and_heads),
        cmocka_unit_test(groups),
        cmocka_unit_test(range_masks),
        cmocka_unit_test(classified_masks),
        cmocka_unit_test(scores),
        cmocka_unit_test(named_forms),
        cmocka_unit_test(starts),
        cmocka_unit_test(every_offset),
        cmocka_unit_test(scales),
        cmocka_unit_test(layouts),
        cmocka_unit_test(layouts_give_equal_bits),
        cmocka_unit_test(params_may_be_broadcast),
        cmocka_unit_test(unwanted_outputs),
        cmocka_unit_test(without_dlse),
        cmocka_unit_test(deterministic_backward),
        cmocka_unit_test(unseen_values_do_not_matter),
        cmocka_unit_test(nan_spoils_its_own_row),
    };
    const struct CMUnitTest slow_tests[] = {
        slow_test(every_head_dim),
        slow_test(lengths),
        slow_test(all_bodies_longer),
    };
    const struct CMUnitTest quick_tests[] = {
        cmocka_unit_test(empty_batches_and_heads), cmocka_unit_test(groups),
        cmocka_unit_test(layouts_give_equal_bits), cmocka_unit_test(params_may_be_broadcast),
        cmocka_unit_test(unwanted_outputs),        cmocka_unit_test(nan_spoils_its_own_row),
    };
    status = rigs.slow    ? cmocka_run_group_tests(slow_tests, NULL, NULL)
             : rigs.quick ? cmocka_run_group_tests(quick_tests, NULL, NULL)
                          : cmocka_run_group_tests(tests, NULL, NULL);
    rigs_stop();
    return status;
}
