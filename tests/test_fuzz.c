/* test_fuzz.c - hostile problem texts: no crash, every refusal names a field, a canonical text is its own
 * canonical text and the reference can read it.
 *
 * ctest: slow
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

#include "part.h"
#include "reference.h"

enum { TEXT_BYTES = 16384 };

static const char *const corpus[] = {
    "bf16 d=128 causal backward deterministic",
    "fp16 d=64",
    "fp32 d=192:128 mask={causal & window(4095, 0)} score={softcap(50)} backward",
    "fp16 d=64 mask={doc[q] == doc[k]} params={doc: i32[seq_k]}",
    "bf16 d=192:128 score={s + bias[h, row, col]} params={bias: f32[heads_q, seq_q, seq_k]} backward",
    "bf16 d=64 mask={blk[b, h, row / 64, col / 64] & causal} params={blk: bool[batch, heads_q, "
    "ceil(seq_q/64), ceil(seq_k/64)]}",
    "fp32 d=8 mask={prefix(n) | k == 0} score={alibi(slopes)} params={n: i32, slopes: f32[heads_q]}",
    "fp32 d=8 score={k % 5 == 0 ? -inf : max(min(s, 1.5e2), -1.0) * tanh(s / 3.0) + sin(f32(q)) - "
    "cos(exp(log(sqrt(abs(s)))))}",
    "bf16 d=16 mask={hash(q, k, 7) % 4 != 0 & !(popcount(xor(q, k)) < 3) & i32(floor(f32(q) / 2.0)) <= hkv + "
    "seq_q - seq_k}",
};

static const char *const tokens[] = {
    "mask={",
    "score={",
    "params={",
    "grad={",
    "}",
    "{",
    "(",
    ")",
    "[",
    "]",
    ",",
    ":",
    "=",
    "==",
    "!=",
    "<=",
    "<",
    "&",
    "|",
    "!",
    "?",
    "+",
    "-",
    "*",
    "/",
    "%",
    "q",
    "k",
    "s",
    "row",
    "col",
    "b",
    "h",
    "hkv",
    "seq_q",
    "seq_k",
    "causal",
    "window(1, 2)",
    "softcap(",
    "alibi(",
    "document(",
    "prefix(",
    "true",
    "false",
    "inf",
    "0",
    "1",
    "-1",
    "2147483647",
    "2147483648",
    "-2147483648",
    "99999999999999999999",
    "1e38",
    "1e39",
    "1e-46",
    "0.0",
    ".5",
    "1.",
    "1e",
    "0x10",
    "d=",
    "d=8",
    "d=264",
    "d=-8",
    "d=8:16",
    "bf16",
    "fp16",
    "fp32",
    "e4m3",
    "backward",
    "deterministic",
    "dropout",
    "sink",
    "varlen",
    "paged=64",
    "out=bf16",
    "kv=",
    "lse=",
    "rope=",
    "i32",
    "f32",
    "i32(",
    "f32(",
    "i32[seq_k]",
    "bool[8]",
    "ceil(seq_q/64)",
    "ceil(seq_q/0)",
    "min(",
    "hash(",
    "a",
    "doc",
    " ",
    "\n",
    "\t",
    "\"",
    "'",
    "\\",
    "%s",
    "%n",
    "$",
    "#",
    "--",
    "]]",
    "\x01",
    "\x7f",
    "\xff",
    "\xc3\xa9",
};

#define COUNT(x) ((int)(sizeof(x) / sizeof *(x)))

static loom_context *context;

static int start(void **state) {
    (void)state;
    loom_options options = LOOM_OPTIONS_INIT;
    options.cache_dir = "";
    return loom_context_create(&options, &context, NULL);
}

static int stop(void **state) {
    (void)state;
    loom_context_destroy(context);
    return 0;
}

static uint64_t random_bits(uint64_t *state) { /* splitmix64 */
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static size_t below(uint64_t *state, size_t num) { return num ? (size_t)(random_bits(state) % num) : 0; }

/* Puts `part` in place of `removed` bytes at `at`. */
static void splice(char *text, size_t at, size_t removed, const char *part, size_t length) {
    size_t size = strlen(text);
    if (at > size || removed > size - at || size - removed + length + 1 > TEXT_BYTES) return;
    memmove(text + at + length, text + at + removed, size - at - removed + 1);
    memcpy(text + at, part, length);
}

static void mutate(char *text, uint64_t *state) {
    size_t size = strlen(text), at = below(state, size + 1), length = below(state, size - at + 1);
    const char *token = tokens[below(state, COUNT(tokens))];
    char byte = (char)(1 + below(state, 255)), part[256];
    switch (below(state, 7)) {
    case 0: splice(text, at, length < 12 ? length : 12, "", 0); break;
    case 1: splice(text, at, at < size, &byte, 1); break;
    case 2: splice(text, at, 0, token, strlen(token)); break;
    case 3: splice(text, at, length < 6 ? length : 6, token, strlen(token)); break;
    case 4: /* a part of itself once more */
        length = length < sizeof part ? length : sizeof part;
        memcpy(part, text + at, length);
        splice(text, below(state, size + 1), 0, part, length);
        break;
    case 5: {
        const char *other = corpus[below(state, COUNT(corpus))];
        size_t from = below(state, strlen(other));
        splice(text, at, length, other + from, strlen(other + from));
        break;
    }
    default: /* nesting */
        for (size_t i = below(state, 100); i > 0; i--) splice(text, at, 0, token, strlen(token));
    }
}

static void fail_text(uint64_t seed, const char *text, const char *what) {
    printf("seed %llu: %s\n  text: ", (unsigned long long)seed, what);
    for (const char *c = text; *c; c++) printf(*c >= 32 && *c < 127 ? "%c" : "\\x%02x", (unsigned char)*c);
    printf("\n");
    fail_msg("%s", what);
}

/* Returns whether the text is a problem. */
static bool check_text(uint64_t seed, const char *text) {
    static char canonical[4 * TEXT_BYTES], again[4 * TEXT_BYTES];
    loom_error error = LOOM_ERROR_INIT;
    loom__reference *reference = NULL;
    size_t needed = 0;
    loom_status status = loom_problem_canonical(context, text, canonical, sizeof canonical, &needed, &error);
    if (status) {
        if (status != LOOM_INVALID && status != LOOM_UNSUPPORTED) fail_text(seed, text, error.text);
        if (error.status != (int32_t)status || strncmp(error.field, "problem", 7) || !error.text[0])
            fail_text(seed, text, "a refusal without status, field or text");
        if (error.text_offset < 0 || (size_t)error.text_offset > strlen(text))
            fail_text(seed, text, "an offset outside the text");
        return false;
    }
    if (needed != strlen(canonical) + 1) fail_text(seed, text, "the size needed is not the size written");
    if (loom_problem_canonical(context, canonical, again, sizeof again, NULL, &error))
        fail_text(seed, text, error.text);
    if (strcmp(canonical, again)) {
        printf("  once:  %s\n  twice: %s\n", canonical, again);
        fail_text(seed, text, "the canonical text has another canonical text");
    }
    if (loom__reference_create(canonical, &reference, &error)) fail_text(seed, canonical, error.text);
    loom__reference_destroy(reference);
    return true;
}

static void fuzz(uint64_t first_seed, int num, bool slow) {
    static char text[TEXT_BYTES];
    int num_texts = 0, num_good = 0;
    for (int i = 0; i < num; i++) {
        if (slow && !part_has(i)) continue;
        uint64_t seed = first_seed + (uint64_t)i, state = seed;
        strcpy(text, corpus[below(&state, COUNT(corpus))]);
        for (size_t n = below(&state, 5); n > 0; n--) mutate(text, &state);
        num_good += check_text(seed, text);
        num_texts++;
    }
    printf("%d texts, %d of them problems\n", num_texts, num_good);
    assert_in_range(num_good, num_texts / 50, num_texts - num_texts / 50);
}

static void the_corpus_itself_is_good(void **state) {
    (void)state;
    for (int i = 0; i < COUNT(corpus); i++)
        if (!check_text(0, corpus[i])) fail_msg("refused: %s", corpus[i]);
}

static void mutated_texts(void **state) {
    (void)state;
    fuzz(1, 10000, false);
}

static void many_mutated_texts(void **state) {
    (void)state;
    fuzz(1000000, 300000, true);
}

static void long_texts(void **state) {
    (void)state;
    static char text[TEXT_BYTES];
    const char *const parts[] = {"(",    "!",        "-",       "q + ", "true ? ", "k < q & ",
                                 "doc[", "a: i32, ", "window(", "{",    "mask={"};
    for (int i = 0; i < COUNT(parts); i++) {
        strcpy(text, "fp32 d=8 mask={");
        while (strlen(text) + strlen(parts[i]) + 8 < TEXT_BYTES) strcat(text, parts[i]);
        assert_false(check_text((uint64_t)i, text));
    }
    loom_error error = LOOM_ERROR_INIT;
    char small[4];
    assert_int_equal(loom_problem_canonical(context, "fp32 d=8", small, sizeof small, NULL, &error),
                     LOOM_INVALID);
    assert_int_not_equal(loom_problem_canonical(context, NULL, text, sizeof text, NULL, &error), LOOM_OK);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_corpus_itself_is_good),
        cmocka_unit_test(mutated_texts),
        cmocka_unit_test(long_texts),
    };
    const struct CMUnitTest slow_tests[] = {
        cmocka_unit_test(many_mutated_texts),
    };
    if (argc > 1 && !strcmp(argv[1], "slow")) return cmocka_run_group_tests(slow_tests, start, stop);
    return cmocka_run_group_tests(tests, start, stop);
}
