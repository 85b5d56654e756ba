/* test_emulate.c - the protocol of the emitted hopper kernels without a GPU: a driver of our own takes the
 * place of CUDA's, and its launches run on the CPU in the emulator of tests/emulate/. Outputs are held to
 * float64 with the limits of test_numerics, rows to equal bits whatever their neighbours and tile, and
 * kernels with a fault put in must be found. Of mma kernels, whose instructions it does not know, the walks
 * run: the tiles that they visit are held to the mask.
 *
 * ctest: slow
 *
 * NVRTC's stand-in of tests/fixtures/ "compiles"; what is emulated is compiled by the C++ compiler that CMake
 * found. Skipped where there is none.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <ftw.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

#include "device.h"
#include "emulate/emulate.h"
#include "harness.h"
#include "part.h"

#define COUNT(x) (sizeof(x) / sizeof *(x))

enum { SKIP = 77, PATH_BYTES = 512, NUM_SMS = 132, FAILED = 700 };

static char folder[] = "/tmp/attnloom-emulate-XXXXXX";
static loom_context *context;
static lua_State *lua;

/* -- A driver whose device is the emulator ------------------------------------------------------------ */

typedef struct module {
    char *text, symbol[64];
    void *library;
    void (*kernel)(const void *args);
} module;

static struct {
    unsigned max_blocks; /* of a launch: the kernels are persistent, any number will do */
    uint64_t seed;
    const char *from, *to; /* NULL, or what is replaced in the text of kernels that are compiled now */
    const char *faulty;    /* the kernel that must have it */
    bool walks;            /* kernels write down which tiles they visit, and do nothing else */
    int num_libraries, num_launches;
    uint64_t loaded[NUM_SMS]; /* bytes, by the blocks of the last launch */
    char failure[2048]; /* of the last launch */
} emulator;

/* Replaces every `from`; there must be one in the main kernel of a pass. */
static char *with_fault(const char *text, const char *symbol) {
    size_t from_bytes = strlen(emulator.from), to_bytes = strlen(emulator.to), num = 0;
    for (const char *at = text; (at = strstr(at, emulator.from)); at += from_bytes) num++;
    if (!num && strcmp(symbol, emulator.faulty) == 0) fail_msg("the kernel has no `%s`", emulator.from);
    char *made = calloc(1, strlen(text) + num * to_bytes + 1), *end = made;
    for (const char *at; (at = strstr(text, emulator.from)); text = at + from_bytes) {
        end = mempcpy(end, text, (size_t)(at - text));
        end = mempcpy(end, emulator.to, to_bytes);
    }
    strcpy(end, text);
    return made;
}

/* What a kernel's output is, and how many rows of WALK_DIM elements it has. */
enum { WALK_DIM = 64 };
static const struct written {
    const char *symbol, *name, *heads, *seq;
    bool of_keys;
} WRITTEN[] = {{"attnloom_forward", "o", "heads_q", "seq_q", false},
               {"attnloom_backward_dkv", "dk", "heads_kv", "seq_k", true},
               {"attnloom_backward_dq", "dq", "heads_q", "seq_q", false}};

/* The text up to the end of its walk, and a kernel that writes to its output, in ints: its tile, head and
 * batch, and for each head of the group, or the one that it has, how many tiles it visits and 2 * tile +
 * whether it is full of each. */
static char *with_walk_alone(const char *text, const char *symbol) {
    const struct written *w = WRITTEN;
    const char *walk = strstr(text, "int walk_next("), *end = walk ? strstr(walk, "\n}\n") : NULL;
    char *made = NULL;
    if (!end) return strdup(text);
    while (strcmp(w->symbol, symbol) != 0) w++;
    if (asprintf(
            &made,
            "%.*s\n}\nextern \"C\" __global__ void %s(const LoomArgs args) {\n"
            "    const Work first = work_of(&args, blockIdx.x);\n"
            "    const long long room = (long long)args.batch * args.%s * args.%s * %d / 2 / gridDim.x;\n"
            "    int *to = (int *)args.%s + blockIdx.x * room;\n"
            "    const bool writes = threadIdx.x == 0;\n"
            "    if (writes) *to++ = first.tile, *to++ = first.head, *to++ = first.batch;\n"
            "    for (int i = 0; i < (%d ? args.group : 1); ++i) {\n"
            "        Work work = first;\n"
            "        work.head += i;\n"
            "        Walk walk = walk_begin(&args, &work);\n"
            "        bool full = false;\n"
            "        int *const count = to++;\n"
            "        for (int tile; (tile = walk_next(&args, &work, &walk, &full)) < walk.end; ++to)\n"
            "            if (writes) *to = 2 * tile + full;\n"
            "        if (writes) *count = to - count - 1;\n"
            "    }\n"
            "}\n",
            (int)(end - text), text, symbol, w->heads, w->seq, WALK_DIM, w->name, w->of_keys) < 0)
        fail_msg("no memory");
    return made;
}

static void compile(module *m) {
    char path[PATH_BYTES], command[3 * PATH_BYTES];
    char *text = emulator.from    ? with_fault(m->text, m->symbol)
                 : emulator.walks ? with_walk_alone(m->text, m->symbol)
                                  : strdup(m->text);
    lua_getfield(lua, LUA_REGISTRYINDEX, "translate");
    lua_pushstring(lua, text);
    lua_pushstring(lua, m->symbol);
    if (lua_pcall(lua, 2, 1, 0) != LUA_OK) fail_msg("%s", lua_tostring(lua, -1));
    free(text);
    // A text is compiled once: of the kernels of a plan a fault changes one.
    lua_getfield(lua, LUA_REGISTRYINDEX, "libraries");
    lua_pushvalue(lua, -2);
    if (lua_rawget(lua, -2) == LUA_TNIL) {
        const int number = emulator.num_libraries++;
        snprintf(path, sizeof path, "%s/%d.cpp", folder, number);
        FILE *file = fopen(path, "wb");
        assert_non_null(file);
        fputs(lua_tostring(lua, 1), file);
        fclose(file);
        snprintf(command, sizeof command,
                 "%s -std=c++11 -O1 -w -Wno-psabi -fPIC -shared -Itests/emulate -o %s/%d.so %s", EMULATE_CXX,
                 folder, number, path);
        if (system(command) != 0) fail_msg("failed: %s", command);
        lua_pushvalue(lua, 1);
        lua_pushinteger(lua, number);
        lua_rawset(lua, 2);
        lua_pushinteger(lua, number);
    }
    snprintf(path, sizeof path, "%s/%d.so", folder, (int)lua_tointeger(lua, -1));
    lua_settop(lua, 0);
    m->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!m->library) fail_msg("%s", dlerror());
    *(void **)&m->kernel = dlsym(m->library, "emu_kernel");
    assert_non_null(m->kernel);
}

static int d_init(unsigned flags) { return (int)flags; }
static int d_version(int *version) { return *version = 12040, 0; }
static int d_count(int *count) { return *count = 1, 0; }
static int d_get(int *device, int ordinal) { return *device = ordinal, 0; }
static int d_name(char *name, int capacity, int device) {
    return (void)device, snprintf(name, (size_t)capacity, "emulator") < 0;
}
static int d_attribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75   ? 9
             : attribute == 76 ? 0
             : attribute == 16 ? NUM_SMS
             : attribute == 97 ? 232448
                               : 233472;
    return 0;
}
static int d_memory(size_t *bytes, int device) { return (void)device, *bytes = (size_t)1 << 36, 0; }
static int d_error(int result, const char **name) {
    return *name = result == FAILED ? "emulator" : "CUDA_ERROR", 0;
}
static int d_retain(loom__cuda_handle *primary, int device) { return (void)device, *primary = &emulator, 0; }
static int d_release(int device) { return (void)device, 0; }
static int d_push(loom__cuda_handle primary) { return primary != &emulator; }
static int d_pop(loom__cuda_handle *primary) { return *primary = &emulator, 0; }
static int d_current(loom__cuda_handle *primary) { return *primary = &emulator, 0; }
static int d_synchronize(void) { return 0; }

/* The stand-in's binary is the source. */
static int d_load(loom__cuda_handle *loaded, const void *image) {
    module *m = calloc(1, sizeof *m);
    m->text = strdup(image);
    return *loaded = m, 0;
}
static int d_unload(loom__cuda_handle loaded) {
    module *m = loaded;
    if (m->library) dlclose(m->library);
    free(m->text);
    free(m);
    return 0;
}
static int d_function(loom__cuda_handle *function, loom__cuda_handle loaded, const char *name) {
    module *m = loaded;
    snprintf(m->symbol, sizeof m->symbol, "%s", name);
    return *function = m, 0;
}
static int d_set(loom__cuda_handle function, int attribute, int value) {
    return (void)function, (void)attribute, (void)value, 0;
}

static int d_launch(loom__cuda_handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                    unsigned block_x, unsigned block_y, unsigned block_z, unsigned smem_bytes,
                    loom__cuda_handle stream, void **parameters, void **extra) {
    module *m = function;
    (void)grid_y, (void)grid_z, (void)block_y, (void)block_z, (void)stream, (void)extra;
    const bool forward = !emulator.walks && strcmp(m->symbol, "attnloom_forward") == 0;
    const bool classes = strstr(m->symbol, "_classes") != NULL;
    const bool persistent =
        classes || forward || (!emulator.walks && strcmp(m->symbol, "attnloom_backward_dkv") == 0);
    if (emulator.walks && !strstr(m->text, "int walk_next(") && !classes) return 0;
    if (!m->kernel) compile(m);
    const emu_launch launch = {.kernel = m->kernel,
                               .args = parameters[0],
                               .blocks =
                                   persistent && grid_x > emulator.max_blocks ? emulator.max_blocks : grid_x,
                               .threads = block_x,
                               .stays = persistent && !classes, /* the shared memory of those is static */
                               .smem_bytes = smem_bytes,
                               .seed = emulator.seed,
                               .loaded = emulator.loaded};
    memset(emulator.loaded, 0, sizeof emulator.loaded);
    emulator.num_launches += forward;
    const char *failure = emu_run(&launch);
    snprintf(emulator.failure, sizeof emulator.failure, "%s", failure ? failure : "");
    return failure ? FAILED : 0;
}

static int d_alloc(loom__device_ptr *pointer, size_t bytes) {
    return *pointer = (uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256), *pointer == 0;
}
static int d_free(loom__device_ptr pointer) { return free((void *)(uintptr_t)pointer), 0; }
static int d_upload(loom__device_ptr to, const void *from, size_t bytes) {
    return memcpy((void *)(uintptr_t)to, from, bytes), 0;
}
static int d_download(void *to, loom__device_ptr from, size_t bytes) {
    return memcpy(to, (void *)(uintptr_t)from, bytes), 0;
}

_Static_assert(sizeof(emu_map) == LOOM__MAP_BYTES, "a map");

static int d_encode(void *map, int type, unsigned rank, void *address, const uint64_t *extents,
                    const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                    int swizzle, int promotion, int fill) {
    enum { SWIZZLE_128B = 3 };
    (void)type, (void)steps, (void)promotion;
    emu_map made = {.data = address};
    if (rank != COUNT(made.extents) || swizzle != SWIZZLE_128B || interleave || fill ||
        (uintptr_t)address % 16)
        return 1;
    memcpy(made.extents, extents, sizeof made.extents);
    memcpy(made.strides, strides, sizeof made.strides);
    memcpy(made.box, box, sizeof made.box);
    memcpy(map, &made, sizeof made);
    return 0;
}

/* All streams are one: what is started has ended when the call returns. */
static int d_stream(loom__cuda_handle *stream, unsigned flags) {
    (void)flags;
    *stream = (loom__cuda_handle)(uintptr_t)1;
    return 0;
}
static int d_of_stream(loom__cuda_handle stream) { return !stream; }
static int d_upload_async(loom__device_ptr to, const void *from, size_t bytes, loom__cuda_handle stream) {
    return !stream || d_upload(to, from, bytes);
}
static int d_download_async(void *to, loom__device_ptr from, size_t bytes, loom__cuda_handle stream) {
    return !stream || d_download(to, from, bytes);
}

static const loom__driver_api DRIVER = {.init = d_init,
                                        .driver_version = d_version,
                                        .device_count = d_count,
                                        .device_get = d_get,
                                        .device_name = d_name,
                                        .device_attribute = d_attribute,
                                        .device_memory = d_memory,
                                        .error_name = d_error,
                                        .primary_retain = d_retain,
                                        .primary_release = d_release,
                                        .context_push = d_push,
                                        .context_pop = d_pop,
                                        .context_current = d_current,
                                        .context_synchronize = d_synchronize,
                                        .module_load = d_load,
                                        .module_unload = d_unload,
                                        .module_function = d_function,
                                        .function_set = d_set,
                                        .launch = d_launch,
                                        .memory_alloc = d_alloc,
                                        .memory_free = d_free,
                                        .memory_upload = d_upload,
                                        .memory_download = d_download,
                                        .memory_upload_async = d_upload_async,
                                        .memory_download_async = d_download_async,
                                        .stream_create = d_stream,
                                        .stream_destroy = d_of_stream,
                                        .stream_synchronize = d_of_stream,
                                        .map_encode = d_encode};

/* -- Launches ----------------------------------------------------------------------------------------- */

typedef struct run {
    loom_shape shape;
    unsigned blocks;
    uint64_t seed;      /* of the inputs and of the order of threads */
    double spread;      /* of q and of k; 0 means 1 */
    int num_not_finite; /* values of v that are NaN or infinite; of a backward: of hidden keys */
    loom__layout layout;
} run;
#define RUN(batch, heads_q, heads_kv, seq_q, seq_k, num_blocks, ...)                                         \
    { .shape = {batch, heads_q, heads_kv, seq_q, seq_k}, .blocks = num_blocks, .seed = __VA_ARGS__ }

typedef struct kernel {
    const char *problem, *schedule; /* NULL: the generator's choice */
    run runs[4];
} kernel;

/* Its kernel is compiled when it is first launched. */
static loom_plan *plan_of(const char *problem, const char *schedule) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    desc.problem = problem;
    desc.target = "hopper";
    *(strstr(problem, " backward") ? &desc.schedule_backward : &desc.schedule) = schedule;
    desc.alignment = 16;
    if (loom_plan_create(context, &desc, &plan, &error))
        fail_msg("\"%s\": %s: %s", problem, error.field, error.text);
    return plan;
}

static loom__rig *rig_of(const loom_plan *plan, const run *r, int64_t q_start) {
    loom__rig_options options = LOOM__RIG_OPTIONS_INIT;
    loom__rig *rig = NULL;
    loom_error error = LOOM_ERROR_INIT;
    options.shape = r->shape;
    options.seed = r->seed;
    options.layout = r->layout;
    options.q_start = q_start;
    if (loom__rig_create(context, plan, 0, &options, &rig, &error))
        fail_msg("%s: %s", error.field, error.text);
    loom__rig_noise(rig, LOOM__RIG_Q, r->seed, r->spread != 0 ? r->spread : 1);
    loom__rig_noise(rig, LOOM__RIG_K, r->seed, r->spread != 0 ? r->spread : 1);
    emulator.max_blocks = r->blocks;
    emulator.seed = r->seed;
    return rig;
}

static loom_pass last_pass(const loom__rig *rig) {
    return rig->reference->backward ? LOOM_BACKWARD : LOOM_FORWARD;
}

/* NULL, or what went wrong. */
static const char *launch(loom__rig *rig) {
    loom_error error = LOOM_ERROR_INIT;
    emulator.failure[0] = 0;
    emulator.num_launches = 0;
    loom_status status = loom__rig_run(rig, LOOM_FORWARD, &error);
    if (!status && emulator.num_launches > 1) return "more than one kernel was launched";
    if (!status && last_pass(rig) == LOOM_BACKWARD) status = loom__rig_run(rig, LOOM_BACKWARD, &error);
    if (!status) return NULL;
    if (!emulator.failure[0])
        snprintf(emulator.failure, sizeof emulator.failure, "%s: %.1900s", error.field, error.text);
    return emulator.failure;
}

/* A value that is not finite makes NaN of its column in rows that see some of them in the same tile; so in
 * one tile of a head they share a column. */
static void spoil(loom__rig *rig, const loom_plan *plan, int num) {
    int tile_q = 0, tile_k = 0;
    const loom_shape *shape = &rig->options.shape;
    sscanf(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=%dx%d", &tile_q, &tile_k);
    assert_true(tile_k > 0);
    for (int64_t i = 0; i < num; i++) {
        int64_t key = (i * 7919 + 41) % shape->seq_k, batch = i % shape->batch,
                head = i / 2 % shape->heads_kv;
        int64_t column = (key / tile_k * 29 + head * 13 + 5) % rig->reference->dv;
        loom__rig_set(rig, LOOM__RIG_V, batch, key, head, column,
                      i % 3 == 0   ? NAN
                      : i % 3 == 1 ? INFINITY
                                   : -INFINITY);
    }
}

static bool is_seen(const loom__rig *rig, int64_t batch, int64_t head, int64_t row, int64_t col) {
    const loom_shape *s = &rig->options.shape;
    const loom__point point = {.shape = s,
                               .params = rig->params,
                               .q = (int32_t)(s->seq_k - s->seq_q + row),
                               .k = (int32_t)col,
                               .row = (int32_t)row,
                               .col = (int32_t)col,
                               .b = (int32_t)batch,
                               .h = (int32_t)head,
                               .hkv = (int32_t)(head / (s->heads_q / s->heads_kv))};
    return loom__expression_value(rig->reference->mask, LOOM__ROUNDED, &point).i != 0;
}

/* Keys that no query sees, which are not finite: gradients are, all of them. */
static void spoil_hidden_keys(loom__rig *rig, int num) {
    const loom_shape *shape = &rig->options.shape;
    int left = rig->reference->mask ? num : 0;
    for (int64_t key = 0; key < shape->seq_k && left > 0; key++) {
        bool seen = false;
        for (int64_t head = 0; head < shape->heads_q; head++)
            for (int64_t row = 0; row < shape->seq_q; row++) seen = seen || is_seen(rig, 0, head, row, key);
        if (seen) continue;
        loom__rig_set(rig, LOOM__RIG_K, 0, key, left % shape->heads_kv, (key * 29) % rig->reference->d,
                      left % 2 ? NAN : INFINITY);
        left--;
    }
    if (left) fail_msg("%d keys are seen by a query", left);
}

/* Infinities count as NaN: kernels may answer either. */
static void infinities_to_nan(loom__rig *rig, loom__rig_name name) {
    const loom__rig_tensor *t = &rig->tensors[name];
    for (int64_t b = 0; b < t->dims[0]; b++)
        for (int64_t i = 0; i < t->dims[1]; i++)
            for (int64_t h = 0; h < t->dims[2]; h++)
                for (int64_t x = 0; x < t->dims[3]; x++)
                    if (isinf(loom__rig_get(rig, name, b, i, h, x)))
                        loom__rig_set(rig, name, b, i, h, x, NAN);
}

/* NULL, or how a launch failed or was wrong. Valid until the next call. */
static const char *failure_of(const loom_plan *plan, const run *r) {
    static char text[2048];
    loom_error error = LOOM_ERROR_INIT;
    loom__rig_report report = {.fine = false};
    loom__rig *rig = rig_of(plan, r, LOOM_DEFAULT_START);
    if (last_pass(rig) == LOOM_BACKWARD) {
        spoil_hidden_keys(rig, r->num_not_finite);
    } else {
        spoil(rig, plan, r->num_not_finite);
    }
    const char *failure = launch(rig);
    if (!failure) {
        if (r->num_not_finite) {
            infinities_to_nan(rig, LOOM__RIG_V);
            infinities_to_nan(rig, LOOM__RIG_O);
        }
        if (loom__rig_compare(rig, last_pass(rig), &report, &error))
            fail_msg("%s: %s", error.field, error.text);
        loom__rig_explain(&report, text, sizeof text);
        failure = report.fine ? NULL : text;
    }
    loom__rig_destroy(rig);
    return failure;
}

static void check_run(const kernel *k, const loom_plan *plan, const run *r) {
    const char *failure = failure_of(plan, r);
    if (!failure) return;
    fail_msg("\"%s\", \"%s\", batch=%lld heads=%lld:%lld seq=%lld:%lld, %u blocks, seed %llu, spread %g, %d "
             "values not finite, "
             "layout %s: %s",
             k->problem, loom_plan_text(plan, LOOM_TEXT_SCHEDULE), (long long)r->shape.batch,
             (long long)r->shape.heads_q, (long long)r->shape.heads_kv, (long long)r->shape.seq_q,
             (long long)r->shape.seq_k, r->blocks, (unsigned long long)r->seed, r->spread, r->num_not_finite,
             loom__layout_names[r->layout], failure);
}

/* -- Against float64 ---------------------------------------------------------------------------------- */

static const kernel KERNELS[] = {
    {"bf16 d=128",
     "tile=128x128 stages=2 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 300, 413, 2, 1), RUN(2, 2, 1, 64, 0, 2, 3), RUN(1, 1, 1, 128, 1, 1, 4)}},
    {"bf16 d=128 causal",
     "tile=128x128 stages=2 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 300, 413, 2, 1, .num_not_finite = 5, .layout = LOOM__LAYOUT_PADDED),
      RUN(1, 3, 1, 257, 500, 2, 4, .num_not_finite = 30)}},
    {"bf16 d=128 causal",
     "tile=128x64 stages=5 q_buffers=1 q_registers=1 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 300, 130, 2, 3), RUN(1, 2, 1, 257, 300, 2, 4, .spread = 3, .num_not_finite = 30),
      RUN(1, 1, 1, 257, 300, 2, 7, .spread = 30)}},
    {"bf16 d=64 causal",
     "tile=256x64 stages=6 q_buffers=2 q_registers=0 p_sets=1 ping_pong=1",
     {RUN(1, 2, 1, 500, 130, 2, 3),
      RUN(1, 3, 1, 257, 300, 2, 4, .spread = 3, .num_not_finite = 30, .layout = LOOM__LAYOUT_HEADS_FIRST)}},
    /* A warpgroup that skips a tile comes to the next of its stage before that one has been searched. */
    {"bf16 d=64 causal",
     "tile=256x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=0",
     {RUN(1, 2, 1, 300, 413, 1, 1002, .num_not_finite = 20)}},
    {"bf16 d=64 mask={(q + 3*k) % 5 != 0}",
     "tile=128x64 stages=3 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 130, 260, 2, 2, .num_not_finite = 9)}},
    {"bf16 d=64 mask={(q / 64 + k / 64) % 3 != 1 & (causal | k < 4)}",
     "tile=128x64 stages=2 q_buffers=1 q_registers=1 p_sets=2 ping_pong=1",
     {RUN(1, 1, 1, 300, 900, 2, 3, .num_not_finite = 30)}},
    {"fp16 d=72:40 causal score={softcap(20)}",
     "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=2 ping_pong=0",
     {RUN(1, 2, 1, 200, 213, 2, 1), RUN(2, 2, 2, 130, 260, 3, 2, .spread = 4)}},
    {"fp16 d=64 mask={causal & window(40, 0)} score={softcap(30)}", NULL, {RUN(1, 2, 2, 128, 128, 1, 1)}},
    {"bf16 d=64 causal score={softcap(5000)}", NULL, {RUN(1, 2, 1, 130, 200, 1, 1, .spread = 900)}},
    {"bf16 d=64 mask={doc[q] == doc[k]} params={doc: i32[seq_k]}",
     NULL,
     {RUN(1, 2, 1, 260, 260, 2, 3, .num_not_finite = 7)}},
    /* Spans that bound the tiles of another mask: one, two of them, and some that may wrap. */
    {"bf16 d=64 mask={causal & doc[q] == doc[k]} params={doc: i32[seq_k]}",
     "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 260, 260, 2, 3, .num_not_finite = 7), RUN(1, 1, 1, 200, 413, 1, 4, .num_not_finite = 20)}},
    {"bf16 d=64 mask={(q - k < 100 | k < 70) & causal & (q / 64 + k / 64) % 3 != 1}",
     "tile=192x64 stages=3 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1",
     {RUN(1, 2, 1, 300, 500, 2, 5, .num_not_finite = 9)}},
    {"bf16 d=64 mask={k <= q + n & (q + 3 * k) % 5 != 0} params={n: i32}",
     "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1",
     {RUN(1, 2, 1, 200, 300, 2, 6, .num_not_finite = 9)}},
    {"bf16 d=64 mask={causal & blk[b, h, row / 48, col / 16]} params={blk: bool[batch, heads_q, "
     "ceil(seq_q/48), ceil(seq_k/16)]}",
     "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1",
     {RUN(1, 2, 1, 200, 260, 2, 7, .num_not_finite = 9)}},
    /* More tiles than are read at once; rows of tiles that visit very unequal numbers; masks of two heads. */
    {"bf16 d=16 mask={k / 64 % 37 == q / 64 % 5 | row < 3 & h == 1}",
     "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1",
     {RUN(1, 2, 1, 300, 9000, 2, 8, .num_not_finite = 20)}},
    {"bf16 d=16 mask={abs(q - k) <= 70 | row < 5 | k < 5 & b == 1}",
     "tile=64x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=0",
     {RUN(2, 1, 1, 700, 700, 3, 9, .num_not_finite = 9)}},
    /* Indices up to the largest there is, which read 0: the class of a tile looks at all of them. */
    {"bf16 d=64 mask={ids[q + 2147483600] == 0 & k % 3 != 1} params={ids: i32[seq_q]}",
     NULL,
     {RUN(1, 1, 1, 48, 48, 1, 1)}},
    /* Constants that must not meet the scale: divided by it they would be infinite, and 0 times that is NaN.
     */
    {"bf16 d=64 score={s - 1e38 * f32(k > q)}", NULL, {RUN(1, 1, 1, 130, 150, 1, 1)}},
    /* Two tanh of the text are one of S. */
    {"bf16 d=64 score={tanh(2.0 * s) + 0.01 * f32(k) * tanh(s / 0.5)}", NULL, {RUN(1, 1, 1, 130, 150, 1, 1)}},
    /* One tanh with others around it; two. */
    {"bf16 d=64 causal score={0.1 * f32(k - q) + 3.0 * tanh(s + 0.01 * f32(q))}",
     "tile=128x80 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1",
     {RUN(1, 2, 1, 130, 200, 1, 1), RUN(1, 1, 1, 130, 200, 1, 2, .spread = 9)}},
    {"bf16 d=64 score={tanh(s) - tanh(f32(q - k))}", NULL, {RUN(1, 1, 1, 130, 150, 1, 1)}},
    /* Deep text, of which parts become locals, at the thread's first element and beside it. */
    {"bf16 d=64 score={f32(q - k) * 0.01 + s + s + s + s + s + s + s + s + s + s + s + s + s + f32((q - k) % "
     "7)}",
     NULL,
     {RUN(1, 1, 1, 130, 150, 1, 1)}},
    /* Every way in which a score meets positions. */
    {"bf16 d=64 score={s * (1.0 + f32(q % 3)) - 0.01 * f32(k) - 0.2 * f32(abs(row - col + 3)) + f32(k / 5 - "
     "q) * g[col]} "
     "params={g: f32[seq_k]}",
     NULL,
     {RUN(1, 2, 1, 130, 200, 1, 1)}},
    /* Backward. */
    {"bf16 d=128 backward",
     NULL,
     {RUN(1, 2, 1, 200, 130, 1, 1), RUN(1, 1, 1, 64, 0, 1, 2), RUN(1, 1, 1, 1, 1, 1, 3)}},
    /* Few keys, whose LSE are far below 0: those past the end would have a weight that is too large. */
    {"fp16 d=40 backward",
     NULL,
     {RUN(1, 2, 1, 15, 1, 1, 301), RUN(1, 4, 4, 60, 2, 1, 2, .spread = 6),
      RUN(1, 4, 4, 60, 3, 1, 2, .spread = 60)}},
    {"fp16 d=72:40 causal backward", NULL, {RUN(2, 2, 2, 130, 260, 1, 1, .layout = LOOM__LAYOUT_PADDED)}},
    {"bf16 d=128 causal backward",
     "tile=64x128 stages=2",
     {RUN(1, 4, 2, 150, 140, 1, 4), RUN(1, 1, 1, 200, 130, 1, 5, .spread = 20)}},
    {"bf16 d=64 mask={k % 7 != 3 & window(70, 9)} backward",
     "tile=128x128 stages=2",
     {RUN(1, 2, 1, 260, 260, 1, 6, .num_not_finite = 20)}},
    {"bf16 d=64 mask={k != 100 & k <= q} backward",
     NULL,
     {RUN(1, 2, 1, 260, 200, 1, 7, .num_not_finite = 1)}},
    {"bf16 d=48:128 mask={k % 50 != 9 & k <= q} backward",
     NULL,
     {RUN(1, 2, 1, 130, 200, 1, 9, .num_not_finite = 3)}},
    /* Blocks that take turns in adding to dQ. */
    {"bf16 d=128 backward deterministic",
     "tile=64x128 stages=2 dq_turns=1",
     {RUN(1, 2, 1, 200, 500, 3, 1), RUN(1, 2, 2, 70, 0, 2, 2), RUN(1, 1, 1, 70, 100, 2, 3),
      RUN(1, 2, 2, 64, 1300, 4, 4)}},
    {"bf16 d=64 causal backward",
     "tile=128x128 stages=2 dq_turns=1",
     {RUN(1, 4, 2, 400, 413, 3, 1), RUN(1, 2, 1, 500, 300, 2, 2, .spread = 30)}},
    /* Keys that no query sees, before and behind those that some see. */
    {"bf16 d=64 mask={k < 100} backward",
     "tile=64x128 stages=2 dq_turns=1",
     {RUN(1, 2, 1, 200, 200, 2, 1), RUN(1, 1, 1, 100, 300, 2, 1)}},
    {"bf16 d=64 mask={k < q} backward", "tile=64x128 stages=2 dq_turns=1", {RUN(1, 2, 1, 257, 257, 2, 1)}},
    {"bf16 d=64 mask={k >= 130} backward", "tile=64x128 stages=2 dq_turns=1", {RUN(1, 2, 1, 300, 300, 2, 1)}},
    {"fp16 d=72:40 mask={k % 50 != 9 & window(70, 200)} backward deterministic",
     "tile=64x128 stages=2 dq_turns=1",
     {RUN(2, 2, 1, 300, 700, 4, 4, .layout = LOOM__LAYOUT_PADDED, .num_not_finite = 3)}},
    {"bf16 d=16 mask={(q / 64 + k / 64) % 3 != 1 & k % 50 != 9 & q != 70} backward deterministic",
     "tile=128x128 stages=2 dq_turns=1",
     {RUN(1, 2, 1, 300, 1000, 3, 5, .num_not_finite = 3)}},
    {"bf16 d=128 backward deterministic",
     NULL,
     {RUN(1, 2, 1, 200, 150, 1, 1), RUN(1, 1, 1, 70, 0, 1, 2), RUN(1, 4, 4, 60, 2, 1, 2, .spread = 60)}},
    {"fp16 d=72:40 causal backward deterministic",
     NULL,
     {RUN(2, 2, 2, 130, 260, 1, 1, .layout = LOOM__LAYOUT_PADDED)}},
    {"bf16 d=64 mask={k % 7 != 3 & window(70, 9)} backward deterministic",
     NULL,
     {RUN(1, 2, 1, 260, 260, 1, 6, .num_not_finite = 20)}},
    {"bf16 d=256 causal backward", NULL, {RUN(1, 2, 1, 130, 150, 1, 1)}},
    {"fp16 d=192:72 backward",
     NULL,
     {RUN(1, 4, 4, 60, 2, 1, 2, .spread = 6), RUN(1, 1, 1, 1, 0, 1, 2),
      RUN(1, 2, 1, 70, 70, 1, 3, .spread = 60)}},
    {"bf16 d=40:136 mask={k % 7 != 3 & window(70, 9)} backward",
     NULL,
     {RUN(1, 2, 1, 130, 130, 1, 6, .num_not_finite = 9)}},
    {"bf16 d=16 mask={doc[q] == doc[k] & h != 1} params={doc: i32[seq_k]} backward deterministic",
     NULL,
     {RUN(1, 2, 1, 300, 300, 1, 8)}},
    {"bf16 d=16 mask={doc[q] == doc[k] & h != 1} params={doc: i32[seq_k]} backward",
     NULL,
     {RUN(1, 2, 1, 300, 300, 1, 8)}},
};

/* What takes longer, and other schedules. */
static const kernel SLOW_KERNELS[] = {
    {"bf16 d=128",
     "tile=128x128 stages=2 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 2, 130, 256, 1, 2), RUN(1, 2, 1, 700, 800, 3, 5, .spread = 6)}},
    {"bf16 d=128 causal",
     "tile=128x128 stages=2 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 400, 400, 3, 2), RUN(1, 2, 1, 300, 130, 2, 3, .num_not_finite = 4)}},
    {"fp16 d=128 causal",
     "tile=128x128 stages=2 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 300, 413, 2, 1, .spread = 3),
      RUN(1, 1, 1, 500, 500, 2, 9, .spread = 2, .num_not_finite = 4)}},
    {"bf16 d=128 causal",
     "tile=128x64 stages=5 q_buffers=1 q_registers=1 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 300, 413, 2, 1), RUN(1, 2, 1, 400, 400, 3, 2),
      RUN(1, 2, 1, 400, 400, 1, 7, .spread = 30)}},
    {"bf16 d=64 causal",
     "tile=256x64 stages=6 q_buffers=2 q_registers=0 p_sets=1 ping_pong=1",
     {RUN(1, 2, 1, 600, 600, 2, 1), RUN(1, 2, 1, 300, 413, 1, 2),
      RUN(1, 2, 1, 800, 800, 2, 8, .num_not_finite = 3)}},
    {"bf16 d=64 causal",
     "tile=256x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=0",
     {RUN(1, 2, 1, 600, 600, 2, 1), RUN(1, 2, 1, 300, 413, 1, 2, .num_not_finite = 20),
      RUN(1, 2, 1, 500, 130, 2, 3)}},
    {"bf16 d=64 mask={k >= q}",
     "tile=192x64 stages=6 q_buffers=2 q_registers=0 p_sets=1 ping_pong=0",
     {RUN(4, 2, 1, 192, 96, 2, 1), RUN(1, 2, 1, 500, 500, 2, 2, .num_not_finite = 11)}},
    {"bf16 d=256 causal",
     "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 200, 213, 2, 1), RUN(1, 1, 1, 130, 260, 1, 2, .num_not_finite = 9)}},
    {"bf16 d=64 mask={(q + 3*k) % 5 != 0}",
     "tile=128x64 stages=3 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 200, 213, 2, 1), RUN(1, 2, 1, 300, 413, 3, 2, .spread = 5, .num_not_finite = 9)}},
    {"bf16 d=64 mask={(q / 64 + k / 64) % 3 != 1 & (causal | k < 4)}",
     "tile=128x64 stages=2 q_buffers=1 q_registers=1 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 500, 500, 2, 1), RUN(1, 1, 1, 700, 700, 2, 2, .num_not_finite = 30),
      RUN(1, 1, 1, 700, 700, 2, 3, .spread = 40, .num_not_finite = 3)}},
    {"bf16 d=64 mask={k <= q & (q - k < 64 | k < 4)}",
     "tile=192x80 stages=4 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 600, 64, 2, 1), RUN(1, 2, 1, 500, 500, 2, 2, .num_not_finite = 30)}},
    {"bf16 d=64 mask={k < 130}",
     "tile=192x64 stages=2 q_buffers=2 q_registers=1 p_sets=1 ping_pong=0",
     {RUN(1, 2, 1, 300, 500, 2, 1), RUN(1, 2, 1, 300, 100, 2, 2)}},
    {"fp16 d=64",
     "tile=192x128 stages=4 q_buffers=2 q_registers=0 p_sets=1 ping_pong=0",
     {RUN(1, 2, 1, 200, 513, 2, 1, .spread = 6), RUN(1, 2, 1, 130, 260, 2, 2)}},
    {"bf16 d=40:96 mask={window(100, 20)}",
     "tile=128x96 stages=3 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1",
     {RUN(1, 2, 1, 400, 413, 2, 1), RUN(1, 2, 1, 430, 460, 2, 2, .spread = 3, .num_not_finite = 20)}},
    {"bf16 d=64",
     "tile=64x64 stages=3 q_buffers=2 q_registers=0 p_sets=2 ping_pong=0",
     {RUN(1, 2, 1, 200, 213, 2, 1, .spread = 30)}},
    {"bf16 d=128 causal", NULL, {RUN(2, 4, 2, 260, 260, 5, 11), RUN(1, 2, 1, 1000, 1000, 2, 12)}},
    {"bf16 d=64", NULL, {RUN(2, 4, 2, 260, 260, 3, 11), RUN(1, 2, 1, 1000, 1000, 2, 12, .spread = 20)}},
    {"bf16 d=192:128 mask={q / 64 % 2 == 0 & k <= q}",
     NULL,
     {RUN(3, 2, 1, 128, 128, 2, 1), RUN(1, 2, 1, 600, 600, 2, 2, .num_not_finite = 10)}},
    {"bf16 d=256", NULL, {RUN(1, 2, 1, 150, 333, 1, 1)}},
    {"fp16 d=64 score={alibi(slopes)} mask={causal} params={slopes: f32[heads_q]}",
     NULL,
     {RUN(2, 4, 2, 200, 230, 3, 5, .num_not_finite = 3)}},
    {"bf16 d=128 backward", NULL, {RUN(1, 2, 1, 400, 300, 1, 1), RUN(2, 2, 2, 130, 500, 1, 2, .spread = 6)}},
    {"bf16 d=64 causal backward",
     NULL,
     {RUN(1, 4, 2, 400, 413, 1, 1), RUN(1, 1, 1, 700, 300, 1, 2, .spread = 30)}},
    {"fp16 d=128 mask={longformer(40, 20)} backward", NULL, {RUN(1, 2, 1, 400, 413, 1, 1)}},
    {"bf16 d=64 mask={window(20, 0)} backward",
     NULL,
     {RUN(1, 2, 1, 60, 500, 1, 1)}}, /* most keys are seen by none */
    {"bf16 d=64 causal score={softcap(20)} backward", NULL, {RUN(1, 4, 2, 200, 230, 1, 1, .spread = 4)}},
    {"fp16 d=128 score={alibi(slopes)} params={slopes: f32[heads_q]} backward",
     NULL,
     {RUN(1, 4, 2, 150, 140, 1, 1)}},
    {"bf16 d=144 mask={window(70, 9)} score={relative(table, 30)} params={table: f32[heads_q, 61]} backward",
     NULL,
     {RUN(1, 2, 1, 200, 213, 1, 1)}},
    {"bf16 d=40:64 score={s + log(f32(k % 3))} backward",
     NULL,
     {RUN(1, 2, 1, 150, 140, 1, 1)}}, /* -inf is no key */
    {"fp16 d=32 causal score={s * s + 0.1 * s} backward deterministic", NULL, {RUN(1, 2, 2, 150, 140, 1, 1)}},
    {"bf16 d=144 mask={window(20, 0)} backward", NULL, {RUN(1, 2, 1, 60, 300, 1, 1)}},
    {"bf16 d=256 backward", NULL, {RUN(1, 4, 2, 200, 213, 1, 1)}},
    {"bf16 d=256 mask={longformer(40, 20)} backward", NULL, {RUN(1, 2, 1, 200, 213, 1, 1)}},
    {"bf16 d=128 causal backward deterministic",
     NULL,
     {RUN(1, 4, 2, 400, 413, 1, 1), RUN(1, 1, 1, 500, 300, 1, 2, .spread = 30)}},
    {"bf16 d=96 mask={(q / 64 + k / 32) % 3 != 1 & k % 50 != 9} backward",
     NULL,
     {RUN(1, 2, 1, 300, 413, 1, 1, .num_not_finite = 5)}},
};

static void check_kernel(const kernel *k, uint64_t more_seed) {
    loom_plan *plan = plan_of(k->problem, k->schedule);
    for (size_t i = 0; i < COUNT(k->runs) && k->runs[i].blocks; i++) {
        run r = k->runs[i];
        r.seed += more_seed;
        check_run(k, plan, &r);
    }
    loom_plan_destroy(plan);
}

static void gives_the_numbers(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(KERNELS); i++) check_kernel(&KERNELS[i], 0);
}

static void run_or_fail(loom__rig *rig, const char *problem) {
    const char *failure = launch(rig);
    if (failure) fail_msg("\"%s\": %s", problem, failure);
}

/* tanh of an infinite logit is 1 or -1, whether the row's first keys lie in a tile that is cut or in a full one. */
static void infinite_logits_are_capped(void **state) {
    (void)state;
    static const char *const SCHEDULES[] = {"tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1",
                                            "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=2 ping_pong=1"};
    const run r = RUN(1, 1, 1, 128, 191, 1, 1); /* row 0 sees one full tile alone */
    for (size_t i = 0; i < COUNT(SCHEDULES); i++) {
        static char text[2048];
        loom_error error = LOOM_ERROR_INIT;
        loom__rig_report report = {.fine = false};
        loom_plan *plan = plan_of("bf16 d=64 causal score={softcap(30)}", SCHEDULES[i]);
        loom__rig *rig = rig_of(plan, &r, LOOM_DEFAULT_START);
        for (int64_t key = 0; key < r.shape.seq_k; key++) loom__rig_set(rig, LOOM__RIG_K, 0, key, 0, 0, 1);
        for (int64_t row = 0; row < r.shape.seq_q; row += 50)
            for (int64_t x = 0; x < rig->reference->d; x++)
                loom__rig_set(rig, LOOM__RIG_Q, 0, row, 0, x, x > 0 ? 0 : row == 50 ? INFINITY : -INFINITY);
        run_or_fail(rig, SCHEDULES[i]);
        if (loom__rig_compare(rig, LOOM_FORWARD, &report, &error)) fail_msg("%s: %s", error.field, error.text);
        loom__rig_explain(&report, text, sizeof text);
        if (!report.fine) fail_msg("%s: %s", SCHEDULES[i], text);
        loom__rig_destroy(rig);
        loom_plan_destroy(plan);
    }
}

static void gives_the_numbers_longer(void **state) {
    (void)state;
    enum { NUM_SEEDS = 4 };
    int num_run = 0;
    for (int i = 0; i < NUM_SEEDS * (int)COUNT(SLOW_KERNELS); i++) {
        if (!part_has(i)) continue;
        check_kernel(&SLOW_KERNELS[i / NUM_SEEDS], (uint64_t)(i % NUM_SEEDS) * 1000);
        num_run++;
    }
    printf("ran %d of %d kernels\n", num_run, NUM_SEEDS * (int)COUNT(SLOW_KERNELS));
}

/* Every order of threads gives the same bits, and so do lists of tiles that were prepared. */
static void order_does_not_matter(void **state) {
    (void)state;
    static const struct {
        const char *problem, *schedule;
    } KERNELS[] = {
        {"bf16 d=64 causal", "tile=128x64 stages=3 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1"},
        {"bf16 d=64 mask={q / 64 % 3 != k / 64 | q - k < 9 & h < 2}",
         "tile=128x64 stages=3 q_buffers=2 q_registers=0 p_sets=1 ping_pong=1"},
        {"bf16 d=64 mask={k / 64 % 3 != 1}",
         "tile=64x64 stages=3 q_buffers=2 q_registers=0 p_sets=1 ping_pong=0"},
        {"bf16 d=64 mask={q / 64 % 3 != k / 64 | q - k < 9 & h < 2} backward deterministic", NULL},
        {"bf16 d=64 mask={q / 64 % 3 != k / 64 | q - k < 9 & h < 2} backward",
         "tile=128x128 stages=2 dq_turns=1"},
    };
    const run r = RUN(1, 3, 1, 257, 300, 2, 4, .spread = 3, .num_not_finite = 30);
    for (size_t i = 0; i < COUNT(KERNELS); i++) {
        loom_plan *plan = plan_of(KERNELS[i].problem, KERNELS[i].schedule);
        loom__rig *rig = rig_of(plan, &r, LOOM_DEFAULT_START);
        uint64_t first = 0;
        for (uint64_t order = 0; order < 5; order++) {
            emulator.seed = 1000 + order;
            emulator.max_blocks = 1 + (unsigned)order;
            rig->options.prepared = order % 2 == 1;
            const char *failure = launch(rig);
            if (failure) fail_msg("%s, order %d: %s", KERNELS[i].problem, (int)order, failure);
            uint64_t digest = loom__rig_digest(rig, last_pass(rig));
            if (order == 0) first = digest;
            if (digest != first)
                fail_msg("%s: order %d of the threads gives other bits", KERNELS[i].problem, (int)order);
        }
        loom__rig_destroy(rig);
        loom_plan_destroy(plan);
    }
}

/* -- Walks of mma ------------------------------------------------------------------------------------- */

typedef struct walk_case {
    const char *problem;
    bool exact; /* no tile is visited or partial that need not be */
} walk_case;

/* [batch, heads_q, seq_q, seq_k]: which keys a query sees. */
static bool *dense_mask(const loom__rig *rig) {
    const loom_shape *s = &rig->options.shape;
    bool *made = malloc((size_t)(s->batch * s->heads_q * s->seq_q * s->seq_k + 1)), *at = made;
    assert_non_null(made);
    for (int64_t batch = 0; batch < s->batch; batch++)
        for (int64_t head = 0; head < s->heads_q; head++)
            for (int64_t row = 0; row < s->seq_q; row++)
                for (int64_t col = 0; col < s->seq_k; col++) *at++ = is_seen(rig, batch, head, row, col);
    return made;
}

/* Holds what the blocks of a kernel wrote to the mask. own, other: rows of tiles on the kernel's side and on
 * the one it walks. */
static void check_walks(const loom__rig *rig, const bool *mask, const walk_case *c, const struct written *w,
                        loom__rig_name output, int own, int other) {
    const loom_shape *s = &rig->options.shape;
    const loom__rig_tensor *t = &rig->tensors[output];
    int64_t own_seq = w->of_keys ? s->seq_k : s->seq_q, other_seq = w->of_keys ? s->seq_q : s->seq_k;
    int64_t heads = w->of_keys ? s->heads_kv : s->heads_q, group = w->of_keys ? s->heads_q / s->heads_kv : 1;
    int64_t tiles = (own_seq + own - 1) / own, others = (other_seq + other - 1) / other,
            blocks = s->batch * heads * tiles;
    int64_t room = s->batch * heads * own_seq * WALK_DIM / 2 / blocks;
    char *met = calloc((size_t)blocks, 1);
    for (int64_t block = 0; block < blocks; block++) {
        const int32_t *from = (const int32_t *)(rig->buffers[t->buffer].host + t->first * 2) + block * room;
        int64_t tile = *from++, head = *from++, batch = *from++;
        if (tile < 0 || tile >= tiles || head < 0 || head % group || batch < 0 || batch >= s->batch ||
            met[(batch * heads + head / group) * tiles + tile]++)
            fail_msg("%s: block %d takes tile %d of head %d", c->problem, (int)block, (int)tile, (int)head);
        for (int64_t i = 0; i < group; i++, head++) {
            const int32_t *visits = from + 1, *end = visits + *from;
            from = end;
            const bool *const of_head = mask + (batch * s->heads_q + head) * s->seq_q * s->seq_k;
            for (int64_t n = 0; n < others; n++) {
                bool some = false, all = true;
                for (int64_t x = tile * own; x < (tile + 1) * own; x++) {
                    for (int64_t y = n * other; y < (n + 1) * other; y++) {
                        int64_t row = w->of_keys ? y : x, col = w->of_keys ? x : y;
                        /* Queries past the end: nothing of them is stored, but they must not count as seen by
                         * keys. */
                        if (row >= s->seq_q && !w->of_keys) continue;
                        bool seen = row < s->seq_q && col < s->seq_k && of_head[row * s->seq_k + col];
                        some |= seen;
                        all &= seen;
                    }
                }
                bool visited = visits < end && *visits / 2 == n, full = visited && *visits % 2;
                visits += visited;
                if ((some && !visited) || (full && !all) ||
                    (c->exact && ((visited && !some) || (visited && all && !full))))
                    fail_msg("%s: head %d, tile %d meets %d: visited %d, full %d; some are seen %d, all %d",
                             c->problem, (int)head, (int)tile, (int)n, visited, full, some, all);
            }
            assert_ptr_equal(visits, end); /* in order, and no others */
        }
    }
    free(met);
}

static void mma_visits_what_is_seen(void **state) {
    (void)state;
    static const walk_case CASES[] = {
        {"bf16 d=64 causal backward deterministic", true},
        {"bf16 d=64 mask={window(90, 7)} backward", true},
        {"fp16 d=64 mask={longformer(100, 20)} backward deterministic", false},
        {"bf16 d=64 mask={q / 64 % 3 != k / 64 | q - k < 9 & h < 2} backward", false},
        {"bf16 d=64 mask={(b + k / 64) % 3 != 1} backward", true},
        {"bf16 d=64 mask={causal & ids[q] == ids[k]} params={ids: i32[seq_k]} backward deterministic", false},
        {"bf16 d=64 mask={near[1, b, col] <= near[0, b, row] + 3} params={near: i64[2, batch, seq_k]} "
         "backward",
         false},
        {"bf16 d=64 mask={some[k, h] | some[q, 0] & q > k} params={some: bool[seq_k, heads_q]} backward",
         false},
        {"bf16 d=64 mask={blk[b, hkv, row / 64, col / 32]} params={blk: bool[batch, heads_kv, "
         "ceil(seq_q/64), ceil(seq_k/32)]} backward",
         true},
    };
    static const loom_shape SHAPES[] = {{1, 2, 2, 130, 260},
                                        {2, 4, 2, 65, 130},
                                        {1, 2, 1, 300, 9000},
                                        {1, 1, 1, 700, 700},
                                        {1, 1, 1, 9000, 100}};
    emulator.walks = true;
    for (size_t i = 0; i < COUNT(CASES); i++) {
        const walk_case *c = &CASES[i];
        loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
        loom_plan *plan = NULL;
        loom_error error = LOOM_ERROR_INIT;
        desc.problem = c->problem;
        desc.target = "mma";
        desc.alignment = 16;
        if (loom_plan_create(context, &desc, &plan, &error)) fail_msg("%s: %s", c->problem, error.text);
        int tile_q, tile_k, back_q, back_k, dq_warps = 0, dq_tile_k = 0;
        assert_int_equal(sscanf(loom_plan_text(plan, LOOM_TEXT_SCHEDULE), "tile=%dx%d", &tile_q, &tile_k), 2);
        const char *backward = loom_plan_text(plan, LOOM_TEXT_SCHEDULE_BACKWARD);
        assert_int_equal(sscanf(backward, "tile=%dx%d", &back_q, &back_k), 2);
        if (strstr(c->problem, "deterministic")) {
            assert_int_equal(sscanf(strstr(backward, "dq_warps="), "dq_warps=%d", &dq_warps), 1);
            assert_int_equal(sscanf(strstr(backward, "dq_tile_k="), "dq_tile_k=%d", &dq_tile_k), 1);
        }
        for (size_t j = 0; j < COUNT(SHAPES); j++) {
            const run r = {.shape = SHAPES[j], .blocks = 1 + j % 3, .seed = j + 1};
            loom__rig *rig = rig_of(plan, &r, LOOM_DEFAULT_START);
            bool *const mask = dense_mask(rig);
            for (loom_pass pass = LOOM_FORWARD; pass <= LOOM_BACKWARD; pass++) {
                rig->options.prepared = j % 2 == 1;
                if (loom__rig_run(rig, pass, &error))
                    fail_msg("%s: %s %s", c->problem, error.text, emulator.failure);
                if (pass == LOOM_FORWARD) check_walks(rig, mask, c, &WRITTEN[0], LOOM__RIG_O, tile_q, tile_k);
            }
            check_walks(rig, mask, c, &WRITTEN[1], LOOM__RIG_DK, back_k, back_q);
            if (dq_warps) check_walks(rig, mask, c, &WRITTEN[2], LOOM__RIG_DQ, 16 * dq_warps, dq_tile_k);
            free(mask);
            loom__rig_destroy(rig);
        }
        loom_plan_destroy(plan);
    }
    emulator.walks = false;
}

/* -- A row's bits ------------------------------------------------------------------------------------- */

static bool same_double(double a, double b) { return !memcmp(&a, &b, sizeof a); }

/* O and LSE of a row of one rig and a row of another. */
static bool is_same_row(const loom__rig *a, int64_t row_a, const loom__rig *b, int64_t row_b) {
    for (int64_t head = 0; head < a->options.shape.heads_q; head++) {
        if (!same_double(loom__rig_get(a, LOOM__RIG_LSE, 0, row_a, head, 0),
                         loom__rig_get(b, LOOM__RIG_LSE, 0, row_b, head, 0)))
            return false;
        for (int64_t x = 0; x < a->reference->dv; x++)
            if (!same_double(loom__rig_get(a, LOOM__RIG_O, 0, row_a, head, x),
                             loom__rig_get(b, LOOM__RIG_O, 0, row_b, head, x)))
                return false;
    }
    return true;
}

static void copy_queries(loom__rig *to, const loom__rig *from, int64_t first_row) {
    const loom__rig_tensor *t = &to->tensors[LOOM__RIG_Q];
    for (int64_t b = 0; b < t->dims[0]; b++)
        for (int64_t i = 0; i < t->dims[1]; i++)
            for (int64_t h = 0; h < t->dims[2]; h++)
                for (int64_t x = 0; x < t->dims[3]; x++)
                    loom__rig_set(to, LOOM__RIG_Q, b, i, h, x,
                                  loom__rig_get(from, LOOM__RIG_Q, b, first_row + i, h, x));
}

static const struct {
    const char *problem, *schedule;
    double spread;
    bool by_place; /* bits depend on a row's place in its tile */
} BITS[] = {
    {"bf16 d=128 causal", "tile=128x128 stages=2 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1", 1, false},
    {"bf16 d=64 mask={window(90, 10) | k < 5}",
     "tile=192x64 stages=4 q_buffers=1 q_registers=1 p_sets=1 ping_pong=0", 4, false},
    {"fp16 d=64 mask={(q / 64 + k / 64) % 3 != 1}",
     "tile=128x64 stages=3 q_buffers=2 q_registers=0 p_sets=2 ping_pong=1", 3, false},
    /* Elements near 0 have a tanh of their own, also beside large ones. */
    {"bf16 d=64 causal score={softcap(20)}", "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1", 1, false},
    {"bf16 d=64 causal score={0.01 * f32(k - q) + 20.0 * tanh(s / 20.0)}",
     "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1", 1, false},
    /* Walks that begin at the diagonal. */
    {"bf16 d=64 score={alibi(0.2)}", "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=1", 1, true},
};

/* The rows of a launch again in a smaller one, at other places of its tiles. */
static void rows_keep_their_bits_in_other_tiles(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(BITS); i++) {
        const run whole = RUN(1, 2, 1, 333, 350, 2, i + 1, .spread = BITS[i].spread);
        static const int firsts[] = {0, 37, 140}, nums[] = {70, 200, 193};
        loom_plan *plan = plan_of(BITS[i].problem, BITS[i].schedule);
        loom__rig *all = rig_of(plan, &whole, 17);
        run_or_fail(all, BITS[i].problem);
        for (size_t j = 0; j < (BITS[i].by_place ? 1 : COUNT(firsts)); j++) {
            run part = whole;
            part.shape.seq_q = nums[j];
            part.blocks = 1;
            loom__rig *some = rig_of(plan, &part, 17 + firsts[j]);
            copy_queries(some, all, firsts[j]);
            run_or_fail(some, BITS[i].problem);
            for (int row = 0; row < nums[j]; row++)
                if (!is_same_row(all, firsts[j] + row, some, row))
                    fail_msg("\"%s\": row %d has other bits as row %d of another launch", BITS[i].problem,
                             firsts[j] + row, row);
            loom__rig_destroy(some);
        }
        loom__rig_destroy(all);
        loom_plan_destroy(plan);
    }
}

/* Every fifth row grows to huge logits or NaN. Returns how many of the others notice. */
static int rows_that_notice(size_t i) {
    const run r = RUN(1, 2, 1, 200, 350, 2, i + 1, .spread = BITS[i].spread);
    int num = 0;
    loom_plan *plan = plan_of(BITS[i].problem, BITS[i].schedule);
    loom__rig *calm = rig_of(plan, &r, LOOM_DEFAULT_START), *wild = rig_of(plan, &r, LOOM_DEFAULT_START);
    for (int64_t row = 3; row < r.shape.seq_q; row += 5)
        for (int64_t head = 0; head < r.shape.heads_q; head++)
            for (int64_t x = 0; x < calm->reference->d; x++)
                loom__rig_set(wild, LOOM__RIG_Q, 0, row, head, x,
                              row % 2 ? NAN : 300 * loom__rig_get(calm, LOOM__RIG_Q, 0, row, head, x));
    run_or_fail(calm, BITS[i].problem);
    run_or_fail(wild, BITS[i].problem);
    for (int64_t row = 0; row < r.shape.seq_q; row++)
        if (row % 5 != 3) num += !is_same_row(calm, row, wild, row);
    loom__rig_destroy(calm);
    loom__rig_destroy(wild);
    loom_plan_destroy(plan);
    return num;
}

static void rows_keep_their_bits_beside_others(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(BITS); i++) {
        int num = rows_that_notice(i);
        if (num) fail_msg("\"%s\": %d rows have other bits beside rows of huge logits", BITS[i].problem, num);
    }
}

/* -- Faults ------------------------------------------------------------------------------------------- */

#define DOCUMENTS "bf16 d=64 mask={document(ids)} params={ids: i32[seq_k]}"
#define ALONE     "bf16 d=128 mask={k % 50 != 9 & k <= q} backward deterministic"
#define WIDE      "bf16 d=144 mask={k % 50 != 9 & k <= q} backward"
#define BACKWARD  "bf16 d=64 mask={k % 50 != 9 & k <= q} backward"
#define IN_TURNS  "bf16 d=16 causal backward"
static const struct {
    const char *what, *from, *to;
    const char *problem; /* NULL: a causal mask; of a backward, its kernel is the one */
} FAULTS[] = {
    {"keys are loaded before the stage is empty",
     "barrier_wait(bar_k_empty(smem, stage.index), stage.parity);", "", NULL},
    {"values are loaded before the stage is empty",
     "barrier_wait(bar_v_empty(smem, stage.index), stage.parity);", "", NULL},
    {"no product is waited for to the end", "wgmma_wait<0>();", "", NULL},
    {"S is read before its product is done", "wgmma_wait<1>();", "", NULL},
    {"keys are read before they have come", "barrier_wait(bar_k_full(smem, stage.index), stage.parity);", "",
     NULL},
    {"values are read before they have come", "barrier_wait(bar_v_full(smem, before.index), before.parity);",
     "", NULL},
    {"the stage of keys is never emptied", "barrier_arrive(bar_k_empty(", "(void)(bar_k_empty(", NULL},
    {"O is overwritten while it is read", "if (lane == 0) stores_read();  // those of the work before", "",
     NULL},
    {"a plan is read before it is made", "barrier_wait(bar_plan_full(smem, place), count / plan_places & 1);",
     "", NULL},
    {"a plan is overwritten before it is read",
     "barrier_wait(bar_plan_empty(smem, place), (count / plan_places & 1) ^ 1);", "", NULL},
    {"values are multiplied before they have been searched",
     "barrier_wait(bar_checked(consumer->smem, stage.index), stage.parity);", "", NULL},
    {"queries are overwritten while they are read",
     "barrier_wait(bar_q_empty(smem, buffer), (nth / q_buffers & 1) ^ 1);", "", NULL},
    {"a tile that is full for one warpgroup alone spoils nothing there",
     "note_spoilt(consumer, what_before, before);", "", NULL},
    {"the last tile that is full for one warpgroup alone spoils nothing",
     "note_spoilt(consumer, what, stage);", "", NULL},
    {"what a work spoils is spoilt in the next", "if (word < 8) consumer->spoilt[word] = 0;", "", NULL},
    {"two sets of P are one", "full_tile(o, p_other, p, ", "full_tile(o, p, p, ", NULL},
    {"tanh of what is not near 0 is taken as if it were", "bits >= cap->limit", "bits == 1",
     "bf16 d=64 score={softcap(3)}"},
    {"what a column is comes from another one", "terms->columns[of_k / 32]", "terms->columns[0]", DOCUMENTS},
    {"queries of the backward are overwritten while they are read",
     "barrier_wait(bar_q_empty(smem, stage.index), stage.parity);", "", BACKWARD},
    {"dO is overwritten while it is read", "barrier_wait(bar_dout_empty(smem, stage.index), stage.parity);",
     "", WIDE},
    {"D is overwritten while it is read", "barrier_wait(bar_dout_empty(smem, stage->index), stage->parity);",
     "", BACKWARD},
    {"queries of the backward are read before they have come",
     "barrier_wait(bar_q_full(smem, at), stage->parity);", ";", BACKWARD},
    {"dO is read before it has come", "barrier_wait(bar_dout_full(smem, at), stage->parity);", "", BACKWARD},
    {"dS is read before it is whole",
     "barrier_wait(bar_ds_full(consumer->smem, buffer_of(before->nth)), parity_of(before->nth));", "",
     BACKWARD},
    {"dS is overwritten while it is read", "int buffer_of(int nth) { return nth & 1; }",
     "int buffer_of(int nth) { return 0; }", BACKWARD},
    {"keys of the next work overwrite those that are read", "barrier_wait(bar_keys_empty(smem), slot ^ 1);",
     "", BACKWARD},
    {"keys are read before those of the work have come", "consumer.parity = slot;",
     "consumer.parity = slot ^ 1;", BACKWARD},
    {"what is told of a work is overwritten before all have heard",
     "barrier_wait(bar_heard(smem, slot), slot_parity(nth) ^ 1);", "",
     "bf16 d=64 mask={window(20, 0)} backward"},
    {"dK overwrites dV before it is stored", "    if (lane == 0) stores_read();\n    __syncwarp();\n", "",
     BACKWARD},
    {"keys past the end have a weight", "key < seq_k ? one : 0", "one", "fp16 d=64 backward"},
    {"D is not subtracted", "in_three(-x[i])", "in_three(0 * x[i])", BACKWARD},
    {"an infinite key meets a dS of 0", "if (!__any_sync(~0u, found.x | found.y)) return false;",
     "return false;", BACKWARD},
    {"keys of a tile that is passed by are taken for finite",
     "note_nonfinite(s, consumer);  // before dS is told to be there: who reads it may look",
     "if (threadIdx.x % 32 == 0) consumer->nonfinite[threadIdx.x / 32 - 4] = uint2{0, 0};",
     "bf16 d=128 mask={k <= q & k < 100} backward"},
    {"keys of dQ are loaded before their stage is empty",
     "barrier_wait(bar_k_empty(smem, k_stage), (nth / k_stages & 1) ^ 1);", "", ALONE},
    {"values of dQ are read before they have come", "barrier_wait(bar_v_full(smem, v_stage), v_parity);", "",
     ALONE},
    {"an infinite key meets a dS of 0 in dQ", "any_consumer(bad)", "false", ALONE},
    {"keys are cleared while another warpgroup makes S of them", "any_consumer(bad)", "bad", ALONE},
    {"dQ is added to before it is this work's turn", "return added == behind;", "return true;", IN_TURNS},
    {"the turn is passed before all lanes have added",
     "    __syncwarp();\n    if (threadIdx.x % 32 == 0 && !(before->turn",
     "    if (threadIdx.x % 32 == 0 && !(before->turn", IN_TURNS},
    {"the turn is never passed",
     "\"st.release.gpu.global.u32 [%0], %1;\" ::\"l\"(added_last(consumer, before))",
     "\"st.release.gpu.global.u32 [%0], %1;\" ::\"l\"(added_last(consumer, before) + 1)", IN_TURNS},
    {"P is read before it is whole", "meet();", "", WIDE},
    {"values of the next work overwrite dV before it is stored",
     "            stores_read();\n            barrier_arrive(bar_keys_empty(smem));",
     "            barrier_arrive(bar_keys_empty(smem));", WIDE},
    {"dO is released while dV is made of it", "wgmma_wait<1>();  // dV", "", WIDE},
    {"queries are released while dK is made of them", "wgmma_wait<1>();  // dK", "", WIDE},
    {"the slope of a score is left out", "score_slope(args, work, q, k, x)", "1.0f",
     "bf16 d=64 mask={k % 50 != 9 & k <= q} score={softcap(3)} backward"},
    {"a score is in other units", "consumer.to_log2 = score_unit(args) * log2_e;",
     "consumer.to_log2 = log2_e;", "bf16 d=64 score={alibi(0.1)}"},
};

static void faults_are_found(void **state) {
    (void)state;
    enum { NUM_TRIES = 12 };
    int num_not_found = 0;
    run runs[] = {RUN(1, 2, 1, 300, 600, 1, 1, .num_not_finite = 9),
                  RUN(1, 8, 1, 300, 20, 1, 1, .num_not_finite = 9),
                  RUN(1, 2, 1, 128, 128, 1, 1, .num_not_finite = 3)}; /* long works, short ones, one of each class */
    run backward_runs[] = {RUN(1, 2, 1, 520, 130, 1, 1, .num_not_finite = 1),
                           RUN(1, 1, 1, 300, 300, 1, 1, .num_not_finite = 3),
                           RUN(1, 4, 4, 60, 2, 1, 1, .spread = 6)};
    run window_run = RUN(1, 2, 1, 60, 500, 1, 1); /* most keys are seen by no query */
    run turns_run = RUN(1, 2, 1, 300, 700, 3, 1);
    for (size_t i = 0; i < COUNT(FAULTS); i++) {
        const char *problem = FAULTS[i].problem ? FAULTS[i].problem : "bf16 d=64 causal";
        loom_plan *plan =
            plan_of(problem, strstr(problem, " backward")
                                 ? (strstr(problem, "d=144")   ? "tile=64x64 stages=2"
                                    : strstr(problem, "d=16 ") ? "tile=64x128 stages=2 dq_turns=1"
                                    : strstr(problem, "d=128") ? "tile=64x128 stages=2"
                                                               : "tile=128x128 stages=2")
                                 : "tile=128x64 stages=2 q_buffers=1 q_registers=0 p_sets=2 ping_pong=1");
        emulator.faulty = strstr(problem, " deterministic") ? "attnloom_backward_dq"
                          : strstr(problem, " backward")    ? "attnloom_backward_dkv"
                                                            : "attnloom_forward";
        emulator.from = FAULTS[i].from;
        emulator.to = FAULTS[i].to;
        const char *failure = NULL;
        uint64_t seed = 0;
        while (!failure && seed++ < NUM_TRIES) {
            run *r = strstr(problem, "window")      ? &window_run
                     : strstr(problem, "d=16 ")     ? &turns_run
                     : strstr(problem, " backward") ? &backward_runs[seed % COUNT(backward_runs)]
                                                    : &runs[seed % COUNT(runs)];
            r->seed = seed;
            failure = failure_of(plan, r);
        }
        emulator.from = NULL;
        if (!failure) {
            print_error("not found: %s\n", FAULTS[i].what);
            num_not_found++;
        }
        if (failure) printf("found with seed %d: %s: %.100s\n", (int)seed, FAULTS[i].what, failure);
        loom_plan_destroy(plan);
    }
    assert_int_equal(num_not_found, 0);
}

/* References that move for all rows of a warp when those of one do; elements that have another tanh beside large ones. */
static void a_row_that_notices_is_found(void **state) {
    (void)state;
    static const struct {
        size_t problem; /* of BITS */
        const char *from, *to;
    } NOTICED[] = {
        {0, "return quad & 15;", "return true;"},
        {3, "bits < cap->limit ? near :", "false ? near :"},
        {4, "fabsf(x) < tanh_near ? tanh_of_near(x) : fast_tanh(x)", "fast_tanh(x)"},
    };
    for (size_t i = 0; i < COUNT(NOTICED); i++) {
        emulator.faulty = "attnloom_forward";
        emulator.from = NOTICED[i].from;
        emulator.to = NOTICED[i].to;
        int num = rows_that_notice(NOTICED[i].problem);
        emulator.from = NULL;
        if (num == 0) fail_msg("not found: %s", NOTICED[i].to);
    }
}

/* -- Shares of the blocks ------------------------------------------------------------------------------ */

/* Works are dealt in lists. If each began at the first block, the same blocks would have the short works of every list,
 * or none of its last round. */
static void blocks_get_as_much(void **state) {
    (void)state;
    static const struct {
        const char *problem;
        run run;
    } SHARES[] = {
        {"bf16 d=16 mask={window(127, 0)}", RUN(1, 10, 1, 256, 256, 5, 1)}, /* lists of 8 works for 5 blocks */
        {"bf16 d=16 causal", RUN(1, 10, 1, 256, 256, 5, 1)},
        {"bf16 d=16 causal", RUN(1, 6, 1, 512, 512, 3, 1)},
        {"bf16 d=16 mask={causal & window(127, 0)}", RUN(1, 2, 1, 768, 768, 7, 1)}, /* one list: queries see few keys */
        {"bf16 d=144 causal", RUN(1, 8, 1, 256, 256, 8, 1)},                        /* lists of one round */
    };
    for (size_t i = 0; i < COUNT(SHARES); i++) {
        const run *r = &SHARES[i].run;
        loom_plan *plan = plan_of(SHARES[i].problem, "tile=64x64 stages=2 q_buffers=1 q_registers=0 p_sets=1 ping_pong=0");
        const char *failure = failure_of(plan, r);
        if (failure) fail_msg("%s: %s", SHARES[i].problem, failure);
        uint64_t most = 0, all = 0;
        for (unsigned b = 0; b < r->blocks; b++) {
            all += emulator.loaded[b];
            if (emulator.loaded[b] > most) most = emulator.loaded[b];
        }
        double over = (double)most * r->blocks / (double)all;
        printf("%s, %u blocks: the busiest loads %.3f of the mean\n", SHARES[i].problem, r->blocks, over);
        assert_true(over < 1.1);
        loom_plan_destroy(plan);
    }
}

/* -- The program -------------------------------------------------------------------------------------- */

static int remove_one(const char *path, const struct stat *facts, int kind, struct FTW *walk) {
    (void)facts, (void)kind, (void)walk;
    return remove(path);
}

/* Folder of NVRTC's stand-in, beside this program. */
static const char *nvrtc_folder(void) {
    static char path[PATH_BYTES];
    ssize_t length = readlink("/proc/self/exe", path, PATH_BYTES - 20);
    if (length < 0) return NULL;
    path[length] = 0;
    strcpy(strrchr(path, '/'), "/nvrtc12");
    return path;
}

static bool start(void) {
    const loom__hooks hooks = {.driver = &DRIVER};
    loom_options options = LOOM_OPTIONS_INIT;
    loom_error error = LOOM_ERROR_INIT;
    options.cache_dir = "";
    options.nvrtc_dir = nvrtc_folder();
    options.log_level = 0;
    lua = luaL_newstate();
    if (!lua || !mkdtemp(folder)) return false;
    luaL_openlibs(lua);
    if (luaL_dofile(lua, "tests/emulate/translate.lua") != LUA_OK)
        return printf("%s\n", lua_tostring(lua, -1)), false;
    lua_setfield(lua, LUA_REGISTRYINDEX, "translate");
    lua_newtable(lua);
    lua_setfield(lua, LUA_REGISTRYINDEX, "libraries");
    if (loom__context_create(&options, &hooks, &context, &error))
        return printf("%s: %s\n", error.field, error.text), false;
    return true;
}

int main(int argc, char **argv) {
    if (!EMULATE_CXX[0]) {
        printf("SKIPPED: no C++ compiler\n");
        return SKIP;
    }
    if (!start()) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gives_the_numbers),
        cmocka_unit_test(infinite_logits_are_capped),
        cmocka_unit_test(order_does_not_matter),
        cmocka_unit_test(mma_visits_what_is_seen),
        cmocka_unit_test(rows_keep_their_bits_in_other_tiles),
        cmocka_unit_test(rows_keep_their_bits_beside_others),
        cmocka_unit_test(faults_are_found),
        cmocka_unit_test(a_row_that_notices_is_found),
        cmocka_unit_test(blocks_get_as_much),
    };
    const struct CMUnitTest slow_tests[] = {cmocka_unit_test(gives_the_numbers_longer)};
    int status = argc > 1 && !strcmp(argv[1], "slow") ? cmocka_run_group_tests(slow_tests, NULL, NULL)
                                                      : cmocka_run_group_tests(tests, NULL, NULL);
    loom_context_destroy(context);
    lua_close(lua);
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return status;
}
