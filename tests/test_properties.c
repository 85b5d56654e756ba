/* test_properties.c - the algebra on random expressions: the C text that the generator emits agrees with the
 * reference's own evaluator, and tile classes and spans never contradict the elements, over shapes with q <
 * 0, more queries than keys, products past 2^31 and divisors 0.
 *
 * A failure prints the line that repeats it. Put it into tests/seeds.txt: every run begins with those lines.
 *
 * ctest: slow
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

#include "part.h"
#include "reference.h"

/* The Lua archive of the build names the C library's streams so; see CMakeLists.txt. */
FILE *const loom__lua_stdin = NULL;
FILE *const loom__lua_stdout = NULL;
FILE *const loom__lua_stderr = NULL;

enum { BATCH = 400, TEXT_BYTES = 4096, POSITION = (1 << 30) - 1, MAX_SEQ = 48 };

static const char SEEDS[] = "tests/seeds.txt";

/* -- Random numbers and texts ---------------------------------------------------------------------------- */

static uint64_t random_bits(uint64_t *state) { /* splitmix64 */
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static int below(uint64_t *state, int num) { return (int)(random_bits(state) % (uint64_t)num); }

typedef struct writer {
    uint64_t *state;
    char *text;
    size_t used;
    bool score; /* s may be read */
} writer;

static void put(writer *w, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int length = vsnprintf(w->text + w->used, TEXT_BYTES - w->used, format, list);
    va_end(list);
    w->used += (size_t)length;
    if (w->used >= TEXT_BYTES) w->used = TEXT_BYTES - 1;
}

static void put_whole(writer *w, int depth);
static void put_real(writer *w, int depth);
static void put_bool(writer *w, int depth);

#define PICK(w, list) (list)[below((w)->state, (int)(sizeof(list) / sizeof *(list)))]

static void put_number(writer *w) {
    static const char *const odd[] = {"0",          "1",          "-1",          "2",     "3",
                                      "-7",         "16",         "64",          "65536", "46341",
                                      "1073741823", "2147483647", "-2147483648", "-65537"};
    if (below(w->state, 3))
        put(w, "%d", below(w->state, 61) - 20);
    else
        put(w, "%s", PICK(w, odd));
}

static void put_load(writer *w, const char *name, int num_indices, int depth) {
    put(w, "%s[", name);
    for (int i = 0; i < num_indices; i++) {
        if (i) put(w, ", ");
        put_whole(w, depth - 1);
    }
    put(w, "]");
}

static void put_binary(writer *w, const char *const *ops, int num_ops, void (*side)(writer *, int),
                       int depth) {
    put(w, "(");
    side(w, depth - 1);
    put(w, " %s ", ops[below(w->state, num_ops)]);
    side(w, depth - 1);
    put(w, ")");
}

static void put_call(writer *w, const char *name, void (*side)(writer *, int), int num_args, int depth) {
    put(w, "%s(", name);
    for (int i = 0; i < num_args; i++) {
        if (i) put(w, ", ");
        side(w, depth - 1);
    }
    put(w, ")");
}

static void put_choice(writer *w, void (*side)(writer *, int), int depth) {
    put(w, "(");
    put_bool(w, depth - 1);
    put(w, " ? ");
    side(w, depth - 1);
    put(w, " : ");
    side(w, depth - 1);
    put(w, ")");
}

static void put_whole(writer *w, int depth) {
    static const char *const names[] = {"q", "k", "q",   "k",     "row",   "col",
                                        "b", "h", "hkv", "seq_q", "seq_k", "n"};
    static const char *const sums[] = {"+", "-"}, *const products[] = {"*", "/", "%"},
                             *const bits[] = {"&", "|"};
    static const char *const functions[] = {"min", "max", "xor"};
    int what = depth > 0 ? below(w->state, 18) : below(w->state, 4);
    if (what < 3)
        put(w, "%s", PICK(w, names));
    else if (what == 3)
        put_number(w);
    else if (what < 7)
        put_binary(w, sums, 2, put_whole, depth);
    else if (what < 10)
        put_binary(w, products, 3, put_whole, depth);
    else if (what == 10)
        put_call(w, PICK(w, functions), put_whole, 2, depth);
    else if (what == 11)
        put_call(w, below(w->state, 2) ? "abs" : "popcount", put_whole, 1, depth);
    else if (what == 12)
        put_binary(w, bits, 2, put_whole, depth);
    else if (what == 13)
        put_choice(w, put_whole, depth);
    else if (what == 14)
        put_call(w, "i32", below(w->state, 2) ? put_real : put_bool, 1, depth);
    else if (what == 15)
        put_call(w, "hash", put_whole, 3, depth);
    else if (what == 16)
        put_load(w, below(w->state, 2) ? "ids" : "wide", 1, depth);
    else if (below(w->state, 2))
        put_load(w, "lev", 1, depth);
    else
        put(w, "-"), put_whole(w, depth - 1);
}

static void put_real(writer *w, int depth) {
    static const char *const ops[] = {"+", "-", "*", "/"};
    static const char *const numbers[] = {"0.5", "1.0", "-2.0", "0.0", "3.25", "1e-3", "100.0", "0.1", "1e9"};
    static const char *const smooth[] = {"exp", "log", "tanh", "sin", "cos"};
    int what = depth > 0 ? below(w->state, 14) : below(w->state, 4);
    if (what < 2 && w->score)
        put(w, "s");
    else if (what < 2)
        put(w, "f32(%s)", below(w->state, 2) ? "q" : "k");
    else if (what == 2)
        put(w, "c");
    else if (what == 3)
        put(w, "%s", PICK(w, numbers));
    else if (what < 7)
        put_binary(w, ops, 4, put_real, depth);
    else if (what == 7)
        put_call(w, below(w->state, 2) ? "min" : "max", put_real, 2, depth);
    else if (what == 8)
        put_call(w, below(w->state, 3) ? "abs" : "floor", put_real, 1, depth);
    else if (what == 9)
        put_call(w, below(w->state, 3) ? PICK(w, smooth) : "sqrt", put_real, 1, depth);
    else if (what == 10)
        put_choice(w, put_real, depth);
    else if (what == 11)
        put_call(w, "f32", below(w->state, 3) ? put_whole : put_bool, 1, depth);
    else if (what == 12)
        put_load(w, below(w->state, 2) ? "fx" : "hx", below(w->state, 1) + 1, depth);
    else
        put_load(w, "bx", 2, depth);
}

/* A sum in which q and k have the slopes -1, 0 or 1: what the walk `range` takes. */
static void put_affine(writer *w) {
    static const char *const sides[] = {"q", "k", "row", "col", "q - k", "k - q", "col - row", "q + k", "k"};
    static const char *const rest[] = {"n", "seq_k", "seq_q", "h", "b", "seq_k - seq_q", "n / 2", "lev[h]"};
    put(w, "%s", PICK(w, sides));
    if (below(w->state, 2)) put(w, " + %s", PICK(w, rest));
    if (below(w->state, 2)) put(w, " - %d", below(w->state, 50) - 20);
    if (below(w->state, 40) == 0) put(w, " + 2147483600");
}

/* Whole operations around a sum, beside a number they are likely to reach: what the walk `classify` can
 * decide. */
static void put_decidable(writer *w) {
    static const char *const compares[] = {"<", "<=", ">", ">=", "==", "!="};
    static const int numbers[] = {0, 1, 2, 3, 5, 8, 16, -3, -16, 64};
    int what = below(w->state, 8), c = PICK(w, numbers);
    put(w, "(");
    if (what < 4) {
        put(w, "("), put_affine(w), put(w, ") %s %d", what < 2 ? "%" : "/", c);
    } else if (what == 4) {
        put(w, "abs("), put_affine(w), put(w, ")");
    } else if (what == 5) {
        put(w, "%s(", below(w->state, 2) ? "min" : "max");
        put_affine(w), put(w, ", "), put_affine(w), put(w, ")");
    } else if (what == 6) {
        put(w, "("), put_affine(w), put(w, ") * ("), put_affine(w), put(w, ")");
    } else {
        put(w, "f32("), put_affine(w), put(w, ") %s %d.5", below(w->state, 2) ? "*" : "/", c);
    }
    put(w, " %s ", PICK(w, compares));
    if (below(w->state, 3))
        put(w, "%d)", below(w->state, 2) ? c - 1 : below(w->state, 40) - 10);
    else
        put(w, "("), put_affine(w), put(w, ") / %d)", c);
}

static void put_bool(writer *w, int depth) {
    static const char *const compares[] = {"<", "<=", ">", ">=", "==", "!="}, *const logic[] = {"&", "|"};
    int what = below(w->state, depth > 0 ? 18 : 5);
    if (what > 15 || (what == 3 && depth < 2)) {
        put_decidable(w);
    } else if (what < 4) {
        put(w, "(");
        put_affine(w);
        put(w, " %s ", PICK(w, compares));
        if (below(w->state, 3))
            put_number(w);
        else
            put_affine(w);
        put(w, ")");
    } else if (what == 4) {
        put(w, "%s", below(w->state, 8) ? "yes" : below(w->state, 2) ? "true" : "false");
    } else if (what < 9) {
        put_binary(w, logic, 2, put_bool, depth);
    } else if (what == 9) {
        put(w, "!"), put_bool(w, depth - 1);
    } else if (what == 10) {
        put_choice(w, put_bool, depth);
    } else if (what < 13) {
        put_binary(w, compares, 6, put_whole, depth);
    } else if (what == 13) {
        put_binary(w, compares, 6, put_real, depth);
    } else if (what == 14) {
        put_load(w, "on", 2, depth);
    } else {
        put_binary(w, compares + 4, 2, put_bool, depth);
    }
}

/* -- Params: the same for all expressions, whichever of them a text reads -------------------------------- */

static const loom__param_facts all_params[] = {
    {"bx", LOOM__BF16, 2, {"heads_q", "ceil(seq_k/4)"}},
    {"c", LOOM__F32, 0, {""}},
    {"fx", LOOM__F32, 1, {"seq_k"}},
    {"hx", LOOM__F16, 1, {"16"}},
    {"ids", LOOM__I32, 1, {"seq_k"}},
    {"lev", LOOM__U8, 1, {"16"}},
    {"n", LOOM__I32, 0, {""}},
    {"on", LOOM__BOOL, 2, {"batch", "ceil(seq_q/8)"}},
    {"wide", LOOM__I64, 1, {"seq_q"}},
    {"yes", LOOM__BOOL, 0, {""}},
};
enum { NUM_PARAMS = sizeof all_params / sizeof *all_params };

/* What stands before the emitted text. The members have the names the text uses; their order is this test's
 * own. */
static const char PREAMBLE[] =
    "#include <math.h>\n#include <stdbool.h>\n#include <stdint.h>\n"
    "typedef struct Work { int batch, head, head_kv, tile, seq_q, seq_k, q_start, k_start; } Work;\n"
    "typedef struct LoomArgs {\n"
    "    const unsigned short *p_bx; long long p_bx_stride_0, p_bx_stride_1;\n"
    "    const float *p_fx; long long p_fx_stride_0;\n"
    "    const unsigned short *p_hx; long long p_hx_stride_0;\n"
    "    const int *p_ids; long long p_ids_stride_0;\n"
    "    const unsigned char *p_lev; long long p_lev_stride_0;\n"
    "    const unsigned char *p_on; long long p_on_stride_0, p_on_stride_1;\n"
    "    const long long *p_wide; long long p_wide_stride_0;\n"
    "    float p_c; int p_n, p_yes;\n"
    "    int batch, heads_q, heads_kv, group, seq_q, seq_k, q_start, k_start;\n"
    "} LoomArgs;\n"
    "typedef struct Span { int lo, hi; } Span;\n";

typedef struct work {
    int batch, head, head_kv, tile, seq_q, seq_k, q_start, k_start;
} work;

typedef struct emitted_args {
    const uint16_t *bx;
    long long bx_stride[2];
    const float *fx;
    long long fx_stride;
    const uint16_t *hx;
    long long hx_stride;
    const int32_t *ids;
    long long ids_stride;
    const uint8_t *lev;
    long long lev_stride;
    const uint8_t *on;
    long long on_stride[2];
    const int64_t *wide;
    long long wide_stride;
    float c;
    int n, yes;
    int batch, heads_q, heads_kv, group, seq_q, seq_k, q_start, k_start;
} emitted_args;

typedef struct span {
    int lo, hi;
} span;

/* What one expression became; NULL where there is no such function. */
typedef struct emitted {
    bool (*visible)(const emitted_args *, const work *, int, int);
    float (*score)(const emitted_args *, const work *, int, int, float);
    float (*slope)(const emitted_args *, const work *, int, int, float);
    void (*keys)(const emitted_args *, const work *, int, int, span[], span[]);
    void (*queries)(const emitted_args *, const work *, int, int, span[], span[]);
    int (*tile_class)(const emitted_args *, const work *, int, int, int, int);
    int num_spans;
} emitted;

/* -- Generator: many texts to one C file ----------------------------------------------------------------- */

/* Where folding drops a param, which the language refuses, an empty problem takes the place. */
static const char GLUE[] =
    "package.path = 'gen/?.lua'\n"
    "local problem, functions, expression = require 'problem', require 'functions', require 'expression'\n"
    "local own = {visible = 1, visible_by_blocks = 1, score = 1, score_slope = 1, visible_keys = 1, "
    "visible_queries = 1, tile_class = 1, num_spans = 1}\n"
    "return function(texts)\n"
    "    local shared, list, rows, masks = {}, {}, {}, {}\n"
    "    for i, text in ipairs(texts) do\n"
    "        local p, errors = problem.parse(text)\n"
    "        if not p and errors[1].message:find 'fold away' then p = problem.parse 'fp32 d=8 backward' end\n"
    "        if not p then return nil, i, problem.format_errors(text, errors) end\n"
    "        masks[i] = (p.mask or p.score) and expression.print(p.mask or p.score) or 'true'\n"
    "        local defined, names = {}, {}\n"
    "        for block in (functions.text(p, 'c') .. '\\n\\n'):gmatch('(.-)\\n\\n') do\n"
    "            local head = block:gsub('^//[^\\n]*\\n', '')\n"
    "            local name = head:match('^static inline [%w_ ]-([%w_]+)%(') or head:match('^enum { "
    "([%w_]+)') or head:match('^typedef struct ([%w_]+)')\n"
    "            if own[name] or name:find('^param_') then\n"
    "                defined[name], names[#names + 1] = true, name\n"
    "                list[#list + 1] = ('#define %s %s_%d\\n%s\\n'):format(name, name, i, block)\n"
    "            elseif name ~= 'Span' and shared[name] ~= head then\n"
    "                if shared[name] then return nil, i, 'two texts of ' .. name end\n"
    "                shared[name] = head\n"
    "                list[#list + 1] = block\n"
    "            end\n"
    "        end\n"
    "        local function at(name) return defined[name] and ('%s_%d'):format(name, i) or '0' end\n"
    "        rows[i] = ('{(void *)%s, (void *)%s, (void *)%s, (void *)%s, (void *)%s, (void *)%s, "
    "%s},'):format(at 'visible', at 'score',\n"
    "            at 'score_slope', at 'visible_keys', at 'visible_queries', at 'tile_class', at "
    "'num_spans')\n"
    "        for _, name in ipairs(names) do list[#list + 1] = '#undef ' .. name end\n"
    "    end\n"
    "    list[#list + 1] = 'const struct { void *f[6]; int num_spans; } table[] = {\\n' .. "
    "table.concat(rows, '\\n') .. '\\n};'\n"
    "    return table.concat(list, '\\n') .. '\\n', masks\n"
    "end\n";

static lua_State *lua;
static char folder[512];

static void run_lua(int num_args, int num_results) {
    if (lua_pcall(lua, num_args, num_results, 0) != LUA_OK) fail_msg("%s", lua_tostring(lua, -1));
}

static int start_lua(void **state) {
    (void)state;
    static const luaL_Reg libraries[] = {{"_G", luaopen_base},
                                         {"package", luaopen_package},
                                         {"string", luaopen_string},
                                         {"table", luaopen_table},
                                         {"math", luaopen_math}};
    lua = luaL_newstate();
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        luaL_requiref(lua, libraries[i].name, libraries[i].func, 1);
        lua_pop(lua, 1);
    }
    if (luaL_loadstring(lua, GLUE)) return -1;
    run_lua(0, 1); /* the function stays at index 1 */
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/attnloom-properties-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

static int stop_lua(void **state) {
    (void)state;
    lua_close(lua);
    return rmdir(folder);
}

typedef struct batch {
    int num;
    char *texts[BATCH]; /* problem texts */
    char *masks[BATCH]; /* canonical expressions */
    uint64_t seeds[BATCH];
    void *library;
    const emitted *table;
} batch;

static void path_in(char *path, size_t capacity, const char *name) {
    snprintf(path, capacity, "%s/%s", folder, name);
}

static void compile(batch *b, const char *source) {
    char c_path[600], so_path[600];
    path_in(c_path, sizeof c_path, "batch.c");
    path_in(so_path, sizeof so_path, "batch.so");
    FILE *file = fopen(c_path, "w");
    assert_non_null(file);
    fprintf(file, "%s%s", PREAMBLE, source);
    assert_int_equal(fclose(file), 0);
    const char *cc = getenv("CC");
    pid_t child = fork();
    if (child == 0) {
        execlp(cc && *cc ? cc : "cc", "cc", "-std=c11", "-O1", "-ffp-contract=off", "-fno-math-errno",
               "-fPIC", "-shared", "-w", "-o", so_path, c_path, "-lm", (char *)NULL);
        _exit(127);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (status) fail_msg("the compiler refused %s (kept)", c_path);
    b->library = dlopen(so_path, RTLD_NOW | RTLD_LOCAL);
    if (!b->library) fail_msg("%s", dlerror());
    b->table = dlsym(b->library, "table");
    assert_non_null(b->table);
    unlink(c_path);
    unlink(so_path);
}

static void report(const batch *b, int i, const char *format, ...) {
    char what[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(what, sizeof what, format, list);
    va_end(list);
    fail_msg("%s\n  %s\n  line for %s:\n%" PRIu64 " %s", what, b->masks[i] ? b->masks[i] : "", SEEDS,
             b->seeds[i], b->texts[i]);
}

static void emit(batch *b) {
    lua_pushvalue(lua, 1);
    lua_newtable(lua);
    for (int i = 0; i < b->num; i++) {
        lua_pushstring(lua, b->texts[i]);
        lua_rawseti(lua, -2, i + 1);
    }
    run_lua(1, 3);
    if (lua_isnil(lua, -3))
        report(b, (int)lua_tointeger(lua, -2) - 1, "the generator refused: %s", lua_tostring(lua, -1));
    lua_pop(lua, 1);
    for (int i = 0; i < b->num; i++) {
        lua_rawgeti(lua, -1, i + 1);
        b->masks[i] = strdup(lua_tostring(lua, -1));
        lua_pop(lua, 1);
    }
    compile(b, lua_tostring(lua, -2));
    lua_pop(lua, 2);
}

static void free_batch(batch *b) {
    for (int i = 0; i < b->num; i++) {
        free(b->texts[i]);
        free(b->masks[i]);
    }
    if (b->library) dlclose(b->library);
    *b = (batch){0};
}

/* -- One shape ------------------------------------------------------------------------------------------- */

typedef struct scene {
    loom_shape shape;
    loom_param params[NUM_PARAMS];
    emitted_args args;
    int q_start, k_start;
    uint16_t bx[6 * MAX_SEQ], hx[16];
    float fx[MAX_SEQ];
    int32_t ids[MAX_SEQ];
    int64_t wide[MAX_SEQ];
    uint8_t lev[16], on[3 * MAX_SEQ];
} scene;

static int position(uint64_t *state, int length) {
    switch (below(state, 6)) {
    case 0: return 0;
    case 1: return below(state, 200) - 100;
    case 2: return -below(state, POSITION);
    case 3: return POSITION - length - below(state, 20);
    case 4: return -POSITION + below(state, 20);
    default: return below(state, 100000) - 50000;
    }
}

static void make_scene(scene *s, uint64_t *state) {
    memset(s, 0, sizeof *s);
    int group = 1 + below(state, 2);
    s->shape = (loom_shape){1 + below(state, 3), 0, 1 + below(state, 3), 1 + below(state, MAX_SEQ),
                            1 + below(state, MAX_SEQ)};
    s->shape.heads_q = s->shape.heads_kv * group;
    s->k_start = below(state, 2) ? 0 : position(state, MAX_SEQ);
    s->q_start = below(state, 2) ? (int)(s->shape.seq_k - s->shape.seq_q) : position(state, MAX_SEQ);
    for (int i = 0; i < MAX_SEQ; i++) {
        s->fx[i] = (float)(below(state, 4001) - 2000) / 256;
        s->ids[i] = below(state, 10) ? i / 7 : (int32_t)random_bits(state);
        s->wide[i] = below(state, 10) ? i / 5 : (int64_t)random_bits(state);
    }
    for (int i = 0; i < 16; i++) {
        s->hx[i] = (uint16_t)(random_bits(state) % 0x7c00);
        s->lev[i] = (uint8_t)random_bits(state);
    }
    for (int i = 0; i < 6 * MAX_SEQ; i++)
        s->bx[i] = loom__float_to_bf16((float)(below(state, 2001) - 1000) / 100);
    for (int i = 0; i < 3 * MAX_SEQ; i++)
        s->on[i] = (uint8_t)(below(state, 3) * 128); /* any byte but 0 is true */
    double c = (below(state, 401) - 200) / 8.0;
    int n = below(state, 5) ? below(state, 60) - 20 : (int32_t)random_bits(state), yes = below(state, 2);
    int row = (int)((s->shape.seq_k + 3) / 4), on_row = (int)((s->shape.seq_q + 7) / 8);
    const loom_param params[NUM_PARAMS] = {{.data = s->bx, .stride = {row, 1}},
                                           {.scalar = c},
                                           {.data = s->fx, .stride = {1}},
                                           {.data = s->hx, .stride = {1}},
                                           {.data = s->ids, .stride = {1}},
                                           {.data = s->lev, .stride = {1}},
                                           {.scalar = n},
                                           {.data = s->on, .stride = {on_row, 1}},
                                           {.data = s->wide, .stride = {1}},
                                           {.scalar = yes}};
    memcpy(s->params, params, sizeof params);
    s->args = (emitted_args){.bx = s->bx,
                             .bx_stride = {row, 1},
                             .fx = s->fx,
                             .fx_stride = 1,
                             .hx = s->hx,
                             .hx_stride = 1,
                             .ids = s->ids,
                             .ids_stride = 1,
                             .lev = s->lev,
                             .lev_stride = 1,
                             .on = s->on,
                             .on_stride = {on_row, 1},
                             .wide = s->wide,
                             .wide_stride = 1,
                             .c = (float)c,
                             .n = n,
                             .yes = yes,
                             .batch = (int)s->shape.batch,
                             .heads_q = (int)s->shape.heads_q,
                             .heads_kv = (int)s->shape.heads_kv,
                             .group = group,
                             .seq_q = (int)s->shape.seq_q,
                             .seq_k = (int)s->shape.seq_k,
                             .q_start = s->q_start,
                             .k_start = s->k_start};
}

static work make_work(const scene *s, uint64_t *state) {
    int head = below(state, (int)s->shape.heads_q);
    return (work){below(state, (int)s->shape.batch),
                  head,
                  head / s->args.group,
                  0,
                  (int)s->shape.seq_q,
                  (int)s->shape.seq_k,
                  s->q_start,
                  s->k_start};
}

/* -- Checks ---------------------------------------------------------------------------------------------- */

/* How much was really compared, so that the test cannot pass by skipping. */
static struct {
    long elements, exact_elements, slopes, tiles, empty_tiles, full_tiles;
    long expressions, range_walks;
} counts;

/* Whether the text only has operations that IEEE rounds; the others may differ by a unit in the last place.
 */
static bool is_exact(const char *text) {
    static const char *const loose[] = {"exp(", "log(", "tanh(", "sin(", "cos("};
    for (size_t i = 0; i < sizeof loose / sizeof *loose; i++)
        if (strstr(text, loose[i])) return false;
    return true;
}

static bool same_number(double a, double b) { return a == b || (isnan(a) && isnan(b)); }

static bool is_close(double a, double b, double tolerance) {
    return same_number(a, b) || fabs(a - b) <= tolerance * (1 + fabs(a));
}

static loom__point point_of(const scene *s, const work *w, int row, int col, double score) {
    return (loom__point){&s->shape, s->params, s->q_start + row, s->k_start + col, row,
                         col,       w->batch,  w->head,          w->head_kv,       score};
}

static void check_element(const batch *b, int i, const loom__expression *e, bool exact, const scene *s,
                          const work *w, uint64_t *state) {
    const emitted *f = &b->table[i];
    int row = below(state, (int)s->shape.seq_q), col = below(state, (int)s->shape.seq_k);
    float score = (float)(below(state, 2001) - 1000) / 128;
    loom__point point = point_of(s, w, row, col, score);
    loom__value rounded = loom__expression_value(e, LOOM__ROUNDED, &point);
    counts.elements++;
    if (f->visible && exact) {
        bool got = f->visible(&s->args, w, point.q, point.k);
        counts.exact_elements++;
        if (got != (rounded.i != 0))
            report(b, i, "q=%d k=%d b=%d h=%d: visible is %d, not %d", point.q, point.k, w->batch, w->head,
                   got, rounded.i);
        return;
    }
    if (!f->score) return;
    double value = loom__expression_type(e) == LOOM__TYPE_F32 ? rounded.f : rounded.i;
    loom__value in_double = loom__expression_value(e, LOOM__DOUBLE, &point);
    float got = f->score(&s->args, w, point.q, point.k, score);
    bool stable = is_close(value, in_double.f, 1e-4);
    if (exact ? !same_number(got, value) : stable && !is_close(value, got, 1e-3))
        report(b, i, "q=%d k=%d b=%d h=%d s=%.9g: score is %.9g, not %.9g", point.q, point.k, w->batch,
               w->head, (double)score, (double)got, value);
    counts.exact_elements += exact;
    /* Beside an infinite score the slope is never used. */
    if (!f->slope || !stable || !isfinite(value) || !isfinite(rounded.slope) ||
        !is_close(rounded.slope, in_double.slope, 1e-4) || fabs(rounded.slope) > 1e6)
        return;
    float slope = f->slope(&s->args, w, point.q, point.k, score);
    counts.slopes++;
    if (!is_close(rounded.slope, slope, 2e-3))
        report(b, i, "q=%d k=%d b=%d h=%d s=%.9g: d(score)/ds is %.9g, not %.9g", point.q, point.k, w->batch,
               w->head, (double)score, (double)slope, rounded.slope);
}

static bool in_spans(const span *spans, int num, int x) {
    for (int i = 0; i < num; i++)
        if (spans[i].lo <= x && x <= spans[i].hi) return true;
    return false;
}

/* A box of rows, or of columns, of a sequence. */
static void random_box(uint64_t *state, int length, int *lo, int *hi) {
    *lo = below(state, length);
    int most = below(state, 2) ? 20 : 3;
    if (most > length - *lo) most = length - *lo;
    *hi = *lo + below(state, most);
}

static void check_class(const batch *b, int i, const scene *s, const work *w, uint64_t *state) {
    const emitted *f = &b->table[i];
    int row_lo, row_hi, col_lo, col_hi;
    random_box(state, w->seq_q, &row_lo, &row_hi);
    random_box(state, w->seq_k, &col_lo, &col_hi);
    int q_lo = s->q_start + row_lo, q_hi = s->q_start + row_hi, k_lo = s->k_start + col_lo,
        k_hi = s->k_start + col_hi;
    int class = f->tile_class(&s->args, w, q_lo, q_hi, k_lo, k_hi);
    counts.tiles++;
    counts.empty_tiles += class == 0;
    counts.full_tiles += class == 2;
    if (class == 1) return;
    for (int q = q_lo; q <= q_hi; q++)
        for (int k = k_lo; k <= k_hi; k++)
            if (f->visible(&s->args, w, q, k) != (class == 2))
                report(b, i, "tile q %d..%d k %d..%d h=%d b=%d is %s, but not at q=%d k=%d", q_lo, q_hi, k_lo,
                       k_hi, w->head, w->batch, class ? "full" : "empty", q, k);
}

/* Spans of keys for a box of queries, or transposed. */
static void check_spans(const batch *b, int i, const scene *s, const work *w, uint64_t *state,
                        bool transposed) {
    const emitted *f = &b->table[i];
    int lo, hi, own_start = transposed ? s->k_start : s->q_start,
                start = transposed ? s->q_start : s->k_start;
    int length = transposed ? w->seq_q : w->seq_k;
    span outer[8], inner[8];
    random_box(state, transposed ? w->seq_k : w->seq_q, &lo, &hi);
    lo += own_start, hi += own_start;
    (transposed ? f->queries : f->keys)(&s->args, w, lo, hi, outer, inner);
    for (int n = 0; n < f->num_spans; n++) {
        const span *both[] = {&outer[n], &inner[n]};
        for (int j = 0; j < 2; j++)
            if (both[j]->lo <= both[j]->hi && (both[j]->lo < start || both[j]->hi >= start + length))
                report(b, i, "a span %d..%d of the box %d..%d leaves the sequence", both[j]->lo, both[j]->hi,
                       lo, hi);
    }
    for (int x = start; x < start + length; x++) {
        bool some = false, all = true, outside = !in_spans(outer, f->num_spans, x),
             sure = in_spans(inner, f->num_spans, x);
        for (int own = lo; own <= hi; own++) {
            bool seen = !f->visible ||
                        (transposed ? f->visible(&s->args, w, x, own) : f->visible(&s->args, w, own, x));
            some = some || seen;
            all = all && seen;
        }
        counts.tiles++;
        counts.empty_tiles += outside;
        counts.full_tiles += sure;
        if ((outside && some) || (sure && !all))
            report(b, i, "%s %d..%d, %s %d, h=%d b=%d q_start=%d k_start=%d seq_q=%d seq_k=%d n=%d: %s",
                   transposed ? "keys" : "queries", lo, hi, transposed ? "query" : "key", x, w->head,
                   w->batch, s->q_start, s->k_start, w->seq_q, w->seq_k, s->args.n,
                   sure ? "called full" : "called empty");
    }
}

static void check_expression(const batch *b, int i, bool slow) {
    loom__expression *e = NULL;
    loom_error error = LOOM_ERROR_INIT;
    uint64_t state = b->seeds[i] ^ 0x5eed;
    static scene s;
    const emitted *f = &b->table[i];
    if (loom__expression_create(b->masks[i], all_params, NUM_PARAMS, &e, &error))
        report(b, i, "the reference cannot read it: %s", error.text);
    bool exact = is_exact(b->masks[i]);
    counts.expressions++;
    counts.range_walks += f->keys != NULL;
    for (int shape = 0; shape < (slow ? 3 : 4); shape++) {
        make_scene(&s, &state);
        for (int n = 0; n < 12; n++) {
            work w = make_work(&s, &state);
            for (int m = 0; m < 3; m++) check_element(b, i, e, exact, &s, &w, &state);
            if (f->tile_class) {
                check_class(b, i, &s, &w, &state);
            } else if (n < (f->visible ? 6 : 1)) {
                check_spans(b, i, &s, &w, &state, false);
                check_spans(b, i, &s, &w, &state, true);
            }
        }
    }
    loom__expression_destroy(e);
}

static void run_batch(batch *b, bool slow) {
    if (!b->num) return;
    emit(b);
    for (int i = 0; i < b->num; i++) check_expression(b, i, slow);
    free_batch(b);
}

/* -- Random problems ------------------------------------------------------------------------------------- */

/* The params that an expression mentions. */
static void put_params(writer *w, const char *expression) {
    static const char *const types[NUM_PARAMS] = {
        "bf16[heads_q, ceil(seq_k/4)]", "f32",        "f32[seq_k]", "f16[16]", "i32[seq_k]", "u8[16]", "i32",
        "bool[batch, ceil(seq_q/8)]",   "i64[seq_q]", "bool"};
    bool any = false;
    for (int i = 0; i < NUM_PARAMS; i++) {
        const char *name = all_params[i].name;
        size_t length = strlen(name);
        bool found = false;
        for (const char *at = strstr(expression, name); at && !found; at = strstr(at + 1, name)) {
            bool starts = at == expression || !strchr("abcdefghijklmnopqrstuvwxyz0123456789_", at[-1]);
            found = starts && (!at[length] || !strchr("abcdefghijklmnopqrstuvwxyz0123456789_(", at[length]));
        }
        if (!found) continue;
        put(w, "%s%s: %s", any ? ", " : " params={", name, types[i]);
        any = true;
    }
    if (any) put(w, "}");
}

static void random_problem(uint64_t seed, char *text) {
    static char expression[TEXT_BYTES];
    uint64_t state = seed;
    writer w = {.state = &state, .text = expression, .score = below(&state, 4) == 0};
    expression[0] = 0;
    if (w.score)
        put_real(&w, 2 + below(&state, 3));
    else
        put_bool(&w, 1 + below(&state, 3));
    writer out = {.state = &state, .text = text};
    put(&out, "fp32 d=8 %s={%s}", w.score ? "score" : "mask", expression);
    put_params(&out, expression);
    put(&out, " backward");
}

static void run_random(uint64_t first_seed, int num, bool slow) {
    static batch b;
    static char text[TEXT_BYTES + 256];
    memset(&counts, 0, sizeof counts);
    for (int i = 0; i < num; i++) {
        if (slow && !part_has(i)) continue;
        random_problem(first_seed + (uint64_t)i, text);
        b.seeds[b.num] = first_seed + (uint64_t)i;
        b.texts[b.num++] = strdup(text);
        if (b.num == BATCH) run_batch(&b, slow);
    }
    run_batch(&b, slow);
    printf("%ld expressions (%ld range walks): %ld elements, %ld of them bit for bit, %ld slopes; %ld tiles, "
           "%ld empty, %ld full\n",
           counts.expressions, counts.range_walks, counts.elements, counts.exact_elements, counts.slopes,
           counts.tiles, counts.empty_tiles, counts.full_tiles);
    assert_true(counts.exact_elements * 2 > counts.elements);
    assert_true(counts.slopes * 20 > counts.elements);
    assert_true(counts.empty_tiles * 20 > counts.tiles && counts.full_tiles * 20 > counts.tiles);
    assert_true(counts.range_walks * 10 > counts.expressions);
}

/* -- Tests ----------------------------------------------------------------------------------------------- */

static void failures_of_the_past(void **state) {
    (void)state;
    static batch b;
    static char line[TEXT_BYTES + 512];
    FILE *file = fopen(SEEDS, "r");
    if (!file) fail_msg("%s cannot be read", SEEDS);
    while (fgets(line, sizeof line, file)) {
        char *end = NULL;
        line[strcspn(line, "\n")] = 0;
        if (line[0] == '#' || !line[0]) continue;
        b.seeds[b.num] = strtoull(line, &end, 10);
        b.texts[b.num++] = strdup(end + strspn(end, " "));
        if (b.num == BATCH) run_batch(&b, false);
    }
    fclose(file);
    run_batch(&b, false);
}

static void random_expressions(void **state) {
    (void)state;
    run_random(1, 3000, false);
}

static void a_hundred_thousand_expressions(void **state) {
    (void)state;
    run_random(1000000, 100000, true);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(failures_of_the_past),
        cmocka_unit_test(random_expressions),
    };
    const struct CMUnitTest slow_tests[] = {
        cmocka_unit_test(a_hundred_thousand_expressions),
    };
    if (argc > 1 && !strcmp(argv[1], "slow")) return cmocka_run_group_tests(slow_tests, start_lua, stop_lua);
    return cmocka_run_group_tests(tests, start_lua, stop_lua);
}
