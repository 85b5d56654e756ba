/* test_launch.c - checks of arguments, packing, variants and grids: on the host target, and on a GPU that is
 * a table of functions. */
#include "runtime_rig.h"

#include <float.h>
#include <math.h>
#include <sys/wait.h>

#include "compile.h"
#include "device.h"

/* -- A driver that remembers ----------------------------------------------------------------------------- */

typedef struct launched {
    char symbol[64];
    unsigned grid, threads, smem_bytes;
    loom__cuda_handle stream, context;
    unsigned char args[1024];
} launched;

/* What the driver was told of a tensor, kept in place of its map. */
typedef struct map_text {
    uint64_t address, extents[5], strides[4]; /* columns of a box, seq, boxes side by side, head, batch */
    uint32_t box[5];
    int type, interleave, swizzle, promotion, fill;
    int unused[2];
} map_text;
_Static_assert(sizeof(map_text) == LOOM__MAP_BYTES, "a map");

static struct fake {
    launched launches[64];
    int num_launches;
    int modules, retained;
    int attributes[64]; /* set on functions, in order: attribute, value */
    int num_attributes;
    int failing_launch; /* what cuLaunchKernel answers */
    int failing_load;
    bool quiet; /* launches are not recorded */
    bool refuses_broadcast;
    int num_maps;
} fake;

/* Contexts that are current belong to a thread; all else above is under the lock where threads load kernels.
 */
static _Thread_local struct {
    loom__cuda_handle stack[8];
    int depth;
} current;
static pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;

/* Handles of functions: their names. */
static char symbols[64][64];
static int num_symbols;

static int f_init(unsigned flags) { return (int)flags; }
static int f_version(int *version) { return *version = 12040, 0; }
static int f_count(int *count) { return *count = 2, 0; }
static int f_get(int *device, int ordinal) { return *device = 100 + ordinal, 0; }
static int f_name(char *name, int capacity, int device) {
    return snprintf(name, (size_t)capacity, "Test %d", device) < 0;
}
static int f_attribute(int *value, int attribute, int device) {
    *value = attribute == 75   ? 9
             : attribute == 76 ? 0
             : attribute == 97 ? 100000
             : attribute == 16 ? 132
                               : 102400;
    return device < 100;
}
static int f_memory(size_t *bytes, int device) { return *bytes = 1 << 30, device < 100; }
static int f_error(int result, const char **name) {
    *name = result == 1     ? "CUDA_ERROR_INVALID_VALUE"
            : result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                            : "CUDA_ERROR_INVALID_IMAGE";
    return 0;
}
static int f_retain(loom__cuda_handle *context, int device) {
    fake.retained++;
    *context = (loom__cuda_handle)(uintptr_t)(0x1000 + device);
    return 0;
}
static int f_release(int device) { return fake.retained--, device < 100; }
static int f_push(loom__cuda_handle context) { return current.stack[current.depth++] = context, 0; }
static int f_pop(loom__cuda_handle *context) { return *context = current.stack[--current.depth], 0; }
static int f_current(loom__cuda_handle *context) {
    return *context = current.depth ? current.stack[current.depth - 1] : NULL, 0;
}
static int f_load(loom__cuda_handle *module, const void *image) {
    pthread_mutex_lock(&fake_lock);
    bool failing = fake.failing_load && fake.failing_load--;
    if (!failing) fake.modules++;
    pthread_mutex_unlock(&fake_lock);
    if (failing) return 200;
    *module = (loom__cuda_handle)(uintptr_t)image;
    return 0;
}
static int f_unload(loom__cuda_handle module) { return fake.modules--, module == NULL; }
static int f_function(loom__cuda_handle *function, loom__cuda_handle module, const char *name) {
    assert_non_null(strstr((const char *)module, name)); /* the stand-in's binary is its source */
    pthread_mutex_lock(&fake_lock);
    strcpy(symbols[num_symbols % 64], name);
    *function = symbols[num_symbols++ % 64];
    pthread_mutex_unlock(&fake_lock);
    return 0;
}
static int f_set(loom__cuda_handle function, int attribute, int value) {
    (void)function;
    pthread_mutex_lock(&fake_lock);
    fake.attributes[fake.num_attributes++] = attribute;
    fake.attributes[fake.num_attributes++] = value;
    pthread_mutex_unlock(&fake_lock);
    return 0;
}
static int f_launch(loom__cuda_handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                    unsigned block_x, unsigned block_y, unsigned block_z, unsigned smem_bytes,
                    loom__cuda_handle stream, void **parameters, void **extra) {
    if (fake.failing_launch) return fake.failing_launch;
    if (fake.quiet) return 0;
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || extra) return 1;
    launched *l = &fake.launches[fake.num_launches++];
    strcpy(l->symbol, function);
    l->grid = grid_x;
    l->threads = block_x;
    l->smem_bytes = smem_bytes;
    l->stream = stream;
    l->context = current.depth ? current.stack[current.depth - 1] : NULL;
    memcpy(l->args, parameters[0], sizeof l->args);
    return 0;
}

static int f_encode(void *map, int type, unsigned rank, void *address, const uint64_t *extents,
                    const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                    int swizzle, int promotion, int fill) {
    map_text text = {.address = (uintptr_t)address,
                     .type = type,
                     .interleave = interleave,
                     .swizzle = swizzle,
                     .promotion = promotion,
                     .fill = fill};
    bool wrong = rank != 5 || (uintptr_t)map % 64 || !address || (uintptr_t)address % 16;
    for (int i = 0; i < 5; i++) {
        wrong = wrong || !extents[i] || !box[i] || box[i] > 256 || steps[i] != 1;
        text.extents[i] = extents[i];
        text.box[i] = box[i];
    }
    for (int i = 0; i < 4; i++) {
        wrong = wrong || strides[i] % 16 || strides[i] >> 40 || (!strides[i] && fake.refuses_broadcast);
        text.strides[i] = strides[i];
    }
    if (wrong) return 1;
    fake.num_maps++;
    memcpy(map, &text, sizeof text);
    return 0;
}

static const loom__driver_api DRIVER = {.init = f_init,
                                        .driver_version = f_version,
                                        .device_count = f_count,
                                        .device_get = f_get,
                                        .device_name = f_name,
                                        .device_attribute = f_attribute,
                                        .device_memory = f_memory,
                                        .error_name = f_error,
                                        .primary_retain = f_retain,
                                        .primary_release = f_release,
                                        .context_push = f_push,
                                        .context_pop = f_pop,
                                        .context_current = f_current,
                                        .module_load = f_load,
                                        .module_unload = f_unload,
                                        .module_function = f_function,
                                        .function_set = f_set,
                                        .launch = f_launch,
                                        .map_encode = f_encode};
static const loom__hooks HOOKS = {.driver = &DRIVER};

static loom_status gpu_plan(loom_context *context, const char *problem, int32_t device, int32_t alignment,
                            loom_plan **plan, loom_error *error) {
    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = problem;
    desc.device = device;
    desc.alignment = alignment;
    return loom_plan_create(context, &desc, plan, error);
}

static loom_context *gpu_context(void) {
    memset(&fake, 0, sizeof fake);
    memset(&current, 0, sizeof current);
    setenv("LOOM_NVRTC_DIR", rig_nvrtc(), 1);
    return rig_context(&HOOKS);
}

/* Values of the argument struct of gen/main.lua, read back. */
static int64_t wide(const unsigned char *args, int index) {
    int64_t value;
    memcpy(&value, args + 8 * index, sizeof value);
    return value;
}

static int32_t narrow(const unsigned char *args, int num_wide, int index) {
    int32_t value;
    memcpy(&value, args + 8 * num_wide + 4 * index, sizeof value);
    return value;
}

static float real(const unsigned char *args, int num_wide, int index) {
    float value;
    memcpy(&value, args + 8 * num_wide + 4 * index, sizeof value);
    return value;
}

/* -- Packing --------------------------------------------------------------------------------------------- */

static void test_packing(void **state) {
    (void)state;
    static rig_memory memory;
    static int32_t ids[64];
    loom_context *context = rig_context(NULL);
    loom_plan *plan = rig_plan(context, "fp32 params");
    loom_error error = LOOM_ERROR_INIT;
    assert_int_equal(loom_plan_param(plan, "x"), 0);
    assert_int_equal(loom_plan_param(plan, "ids"), 2);
    assert_int_equal(loom_plan_param(plan, "y"), -1);
    assert_int_equal(loom_plan_param(NULL, "x"), -1);

    loom_param params[3] = {{.scalar = 0.25}, {.scalar = -7}, {.data = ids, .stride = {11, 1}}};
    loom_args args = rig_args(&memory);
    args.params = params;
    args.num_params = 3;
    args.q.stride[0] = 77;
    args.q_start = -3;
    args.scale = 0.5f;
    assert_ok(error, loom_forward(plan, &args, NULL, &error));
    const unsigned char *o = memory.o;
    assert_ptr_equal((void *)(uintptr_t)wide(o, 0), memory.o);
    assert_int_equal(wide(o, 1), 10 * 4 * 8);
    assert_int_equal(wide(o, 2), 4 * 8);
    assert_int_equal(wide(o, 3), 8);
    assert_ptr_equal((void *)(uintptr_t)wide(o, 4), memory.read);
    assert_int_equal(wide(o, 5), 77);
    assert_ptr_equal((void *)(uintptr_t)wide(o, 8), ids);
    assert_int_equal(wide(o, 9), 11);
    static const int32_t NARROW[] = {2, 4, 2, 2, 10, 6, -3, 0};
    for (int i = 0; i < 8; i++) assert_int_equal(narrow(o, 10, i), NARROW[i]);
    assert_true(real(o, 10, 8) == 0.5f);
    assert_true(real(o, 10, 9) == 0.25f);
    assert_int_equal(narrow(o, 10, 10), -7);

    /* Defaults: bottom-right alignment, 1/sqrt(d). */
    args.q_start = LOOM_DEFAULT_START;
    args.k_start = 5;
    args.scale = 0;
    assert_ok(error, loom_forward(plan, &args, NULL, &error));
    assert_int_equal(narrow(o, 10, 6), 6 - 10);
    assert_int_equal(narrow(o, 10, 7), 5);
    assert_true(real(o, 10, 8) == 0.25f);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* -- Checks ---------------------------------------------------------------------------------------------- */

typedef struct bench {
    loom_context *context;
    loom_plan *plan;
    rig_memory memory;
    loom_args args;
    loom_param params[3];
} bench;

static void reset(bench *b) {
    static int32_t ids[64];
    b->args = rig_args(&b->memory);
    b->params[0] = (loom_param){.scalar = 1};
    b->params[1] = (loom_param){.scalar = 2};
    b->params[2] = (loom_param){.data = ids, .stride = {1, 0}};
    b->args.params = b->params;
    b->args.num_params = 3;
    b->args.dout = loom_dense(b->memory.read, 10, 4, 8);
    b->args.dlse = (loom_tensor){b->memory.read, {40, 1, 10, 0}};
    b->args.dq = loom_dense(b->memory.dq, 10, 4, 16);
    b->args.dk = loom_dense(b->memory.dk, 6, 2, 16);
    b->args.dv = loom_dense(b->memory.dv, 6, 2, 8);
}

#define REFUSED(change, pass, status, field, words)                                                          \
    do {                                                                                                     \
        change;                                                                                              \
        assert_fails(error, status, field, words, pass(b->plan, &b->args, NULL, &error));                    \
        reset(b);                                                                                            \
    } while (0)

static void test_checks(void **state) {
    (void)state;
    static bench storage;
    bench *b = &storage;
    loom_error error;
    b->context = rig_context(NULL);
    b->plan = rig_plan(b->context, "fp32 params backward");
    reset(b);
    assert_ok(error, loom_forward(b->plan, &b->args, NULL, &error));
    assert_ok(error, loom_backward(b->plan, &b->args, NULL, &error));

    assert_fails(error, LOOM_INVALID, "plan", "NULL", loom_forward(NULL, &b->args, NULL, &error));
    assert_fails(error, LOOM_INVALID, "args", "NULL", loom_forward(b->plan, NULL, NULL, &error));
    REFUSED(b->args.size = 0, loom_forward, LOOM_INVALID, "args.size", "size is 0|LOOM_*_INIT");

    /* Tensors that are missing. */
    REFUSED(b->args.q.data = NULL, loom_forward, LOOM_INVALID, "args.q.data",
            "q.data is NULL, forward needs it");
    REFUSED(b->args.k.data = NULL, loom_forward, LOOM_INVALID, "args.k.data", "k.data is NULL");
    REFUSED(b->args.v.data = NULL, loom_forward, LOOM_INVALID, "args.v.data", "v.data is NULL");
    REFUSED(b->args.o.data = NULL, loom_forward, LOOM_INVALID, "args.o.data", "o.data is NULL");
    REFUSED(b->args.o.data = NULL, loom_backward, LOOM_INVALID, "args.o.data", "backward needs it");
    REFUSED(b->args.lse.data = NULL, loom_backward, LOOM_INVALID, "args.lse.data",
            "lse.data is NULL, backward needs it");
    REFUSED(b->args.dout.data = NULL, loom_backward, LOOM_INVALID, "args.dout.data", "dout.data is NULL");
    b->args.lse.data = NULL;
    assert_ok(error, loom_forward(b->plan, &b->args, NULL, &error)); /* not wanted */
    reset(b);
    b->args.dlse.data = NULL, b->args.dq.data = NULL;
    assert_ok(error, loom_backward(b->plan, &b->args, NULL, &error));
    reset(b);

    /* Strides and addresses. */
    REFUSED(b->args.q.stride[3] = 2, loom_forward, LOOM_INVALID, "args.q.stride",
            "q.stride[3] is 2, it must be 1|contiguous");
    REFUSED(b->args.v.stride[3] = 0, loom_forward, LOOM_INVALID, "args.v.stride", "v.stride[3] is 0");
    REFUSED(b->args.dk.stride[3] = -1, loom_backward, LOOM_INVALID, "args.dk.stride", "dk.stride[3] is -1");
    REFUSED(b->args.o.stride[1] = 0, loom_forward, LOOM_INVALID, "args.o.stride",
            "o.stride[1] is 0 with 10 along seq|written");
    REFUSED(b->args.lse.stride[2] = 0, loom_forward, LOOM_INVALID, "args.lse.stride",
            "lse.stride[2] is 0 with 4 along head");
    REFUSED(b->args.dv.stride[0] = 0, loom_backward, LOOM_INVALID, "args.dv.stride",
            "dv.stride[0] is 0 with 2 along batch");
    b->args.k.stride[0] = 0, b->args.k.stride[1] = 0, b->args.lse.stride[3] = 9;
    assert_ok(error, loom_forward(b->plan, &b->args, NULL, &error)); /* broadcast where read */
    reset(b);

    /* What strides span. */
    REFUSED(b->args.q.stride[0] = (int64_t)1 << 61, loom_forward, LOOM_INVALID, "args.q.stride",
            "q.stride[0] is 2305843009213693952 with 2 along batch: the last element|2^62 bytes");
    REFUSED(b->args.k.stride[1] = INT64_MAX, loom_forward, LOOM_INVALID, "args.k.stride",
            "k.stride[1] is 9223372036854775807");
    REFUSED((b->args.v.stride[0] = (int64_t)1 << 59, b->args.v.stride[2] = (int64_t)1 << 59), loom_forward,
            LOOM_INVALID, "args.v.stride", "v.stride[2] is 576460752303423488|2^62 bytes");
    REFUSED(b->args.q.stride[1] = -64, loom_forward, LOOM_INVALID, "args.q.stride",
            "q.stride[1] is -64 with 10 along seq: strides may not be negative");
    REFUSED(b->args.lse.stride[1] = INT64_MIN, loom_forward, LOOM_INVALID, "args.lse.stride", "negative");
    REFUSED(b->params[2].stride[0] = (int64_t)1 << 60, loom_forward, LOOM_INVALID, "args.params",
            "params[2] (ids): stride[0] is 1152921504606846976 with 6 along it|2^62 bytes");
    REFUSED(b->params[2].stride[0] = -1, loom_forward, LOOM_INVALID, "args.params",
            "stride[0] is -1|negative");
    /* o is [2, 10, 4, 8]. */
    REFUSED(b->args.o.stride[1] = 8, loom_forward, LOOM_INVALID, "args.o.stride",
            "o.stride[2] is 8|span 80 elements: the tensor is written, its elements must lie apart");
    REFUSED(b->args.o.stride[1] = 31, loom_forward, LOOM_INVALID, "args.o.stride",
            "o.stride[1] is 31, but the axes of smaller strides span 32 elements");
    REFUSED(b->args.o.stride[0] = 319, loom_forward, LOOM_INVALID, "args.o.stride",
            "stride[0] is 319|span 320");
    REFUSED(b->args.o.stride[2] = 7, loom_forward, LOOM_INVALID, "args.o.stride", "stride[2] is 7|span 8");
    REFUSED(b->args.lse.stride[2] = 9, loom_forward, LOOM_INVALID, "args.lse.stride",
            "lse.stride[2] is 9|span 10");
    REFUSED(b->args.dq.stride[2] = 15, loom_backward, LOOM_INVALID, "args.dq.stride",
            "dq.stride[2] is 15|span 16");
    REFUSED(b->args.dv.stride[1] = 15, loom_backward, LOOM_INVALID, "args.dv.stride",
            "dv.stride[1] is 15|span 16");
    /* Apart in any order: [batch, head, seq, dim], lse as [batch, seq, head], an axis of one. */
    b->args.o = (loom_tensor){b->args.o.data, {320, 8, 80, 1}};
    b->args.lse = (loom_tensor){b->args.lse.data, {40, 4, 1, 0}};
    assert_ok(error, loom_forward(b->plan, &b->args, NULL, &error));
    b->args.shape.batch = 1, b->args.o.stride[0] = -5, b->args.q.stride[0] = INT64_MAX;
    assert_ok(error, loom_forward(b->plan, &b->args, NULL, &error));
    reset(b);
    REFUSED(b->args.k.data = b->memory.read + 2, loom_forward, LOOM_INVALID, "args.k.data",
            "k.data is 0x|multiple of 4 bytes");
    REFUSED(b->args.lse.data = (char *)b->memory.lse + 1, loom_forward, LOOM_INVALID, "args.lse.data",
            "multiple of 4 bytes");

    /* Shape. */
    REFUSED(b->args.shape.heads_kv = 3, loom_forward, LOOM_INVALID, "args.shape",
            "heads_q is 4|multiple of shape.heads_kv|3");
    REFUSED(b->args.shape.heads_kv = 0, loom_forward, LOOM_INVALID, "args.shape", "heads_q is 4|which is 0");
    REFUSED(b->args.shape.batch = -1, loom_forward, LOOM_INVALID, "args.shape",
            "shape.batch is -1, it must be 0 to 2147483647");
    REFUSED(b->args.shape.seq_k = -5, loom_forward, LOOM_INVALID, "args.shape", "shape.seq_k is -5");
    b->args.shape.seq_q = ((int64_t)1 << 30) + 1;
    REFUSED((void)0, loom_forward, LOOM_UNSUPPORTED, "args.shape",
            "shape.seq_q is 1073741825, this library takes at most 1073741824");
    REFUSED(b->args.shape.batch = (int64_t)1 << 31, loom_forward, LOOM_UNSUPPORTED, "args.shape",
            "shape.batch is 2147483648|at most 2147483647");

    /* Numbers. */
    static const float SCALES[] = {-1.0f, NAN, INFINITY, -INFINITY, 1e-20f, 2e19f};
    static const char *const SCALE_WORDS[] = {"-1", "nan", "inf", "-inf", "1e-20", "2e+19"};
    for (int i = 0; i < 6; i++) {
        b->args.scale = SCALES[i];
        assert_fails(error, LOOM_INVALID, "args.scale", SCALE_WORDS[i],
                     loom_forward(b->plan, &b->args, NULL, &error));
        REFUSED((void)0, loom_forward, LOOM_INVALID, "args.scale", "scale is |from 2^-64 to 2^64|1/sqrt(16)");
    }
    REFUSED(b->args.q_start = (int64_t)1 << 30, loom_forward, LOOM_INVALID, "args.q_start",
            "q_start is 1073741824|-1073741823 to 1073741814");
    REFUSED(b->args.k_start = -((int64_t)1 << 40), loom_forward, LOOM_INVALID, "args.k_start",
            "k_start is -1099511627776");

    /* Params. */
    REFUSED(b->args.num_params = 2, loom_forward, LOOM_INVALID, "args.num_params",
            "num_params is 2, the problem has 3");
    REFUSED(b->args.params = NULL, loom_forward, LOOM_INVALID, "args.params",
            "params is NULL, the problem has 3");
    REFUSED(b->params[2].data = NULL, loom_forward, LOOM_INVALID, "args.params",
            "params[2] (ids): data is NULL");
    REFUSED(b->params[2].data = b->memory.read + 1, loom_forward, LOOM_INVALID, "args.params",
            "params[2] (ids)|multiple of 4 bytes");
    REFUSED(b->params[1].scalar = 1.5, loom_forward, LOOM_INVALID, "args.params",
            "params[1] (n): scalar is 1.5|integer");
    REFUSED(b->params[1].scalar = 2147483648.0, loom_forward, LOOM_INVALID, "args.params",
            "params[1] (n)|32 bits");
    REFUSED(b->params[1].scalar = NAN, loom_forward, LOOM_INVALID, "args.params",
            "params[1] (n): scalar is nan");
    REFUSED(b->params[0].gradient = b->memory.dq, loom_backward, LOOM_INVALID, "args.params",
            "params[0] (x)|grad={x}");

    /* Outputs on other tensors. */
    REFUSED(b->args.o.data = b->args.q.data, loom_forward, LOOM_INVALID, "args.o.data",
            "o.data is also q.data");
    REFUSED(b->args.lse.data = b->args.o.data, loom_forward, LOOM_INVALID, "args.o.data",
            "o.data is also lse.data");
    REFUSED(b->args.dk.data = b->args.dv.data, loom_backward, LOOM_INVALID, "args.dk.data",
            "dk.data is also dv.data");
    REFUSED(b->args.dq.data = b->args.dout.data, loom_backward, LOOM_INVALID, "args.dq.data",
            "dq.data is also ");

    /* Workspace. */
    size_t bytes = 0;
    assert_ok(error, loom_workspace_bytes(b->plan, LOOM_FORWARD, &b->args, &bytes, &error));
    assert_int_equal(bytes, 0);
    assert_ok(error, loom_workspace_bytes(b->plan, LOOM_BACKWARD, &b->args, &bytes, &error));
    assert_int_equal(bytes, 1024); /* 2 * 4 * 10 rows of 12 bytes, rounded up */
    REFUSED(b->args.workspace = NULL, loom_backward, LOOM_INVALID, "args.workspace",
            "workspace is NULL, this launch needs 1024");
    REFUSED(b->args.workspace_bytes = 1023, loom_backward, LOOM_INVALID, "args.workspace_bytes",
            "is 1023, this launch needs 1024");
    REFUSED(b->args.workspace = b->memory.workspace + 16, loom_backward, LOOM_INVALID, "args.workspace",
            "multiple of 256");
    assert_fails(error, LOOM_INVALID, "pass", "pass is 7",
                 loom_workspace_bytes(b->plan, (loom_pass)7, &b->args, &bytes, &error));
    assert_fails(error, LOOM_INVALID, "bytes", "NULL",
                 loom_workspace_bytes(b->plan, LOOM_FORWARD, &b->args, NULL, &error));
    b->args.shape = (loom_shape){INT32_MAX, INT32_MAX, INT32_MAX, 1 << 30, 1};
    assert_fails(error, LOOM_UNSUPPORTED, "args.shape", "workspace|larger than memory",
                 loom_workspace_bytes(b->plan, LOOM_BACKWARD, &b->args, &bytes, &error));
    reset(b);
    b->args.shape = (loom_shape){INT32_MAX, 2, 2, 4, 1};
    b->args.o = loom_dense(b->memory.o, 4, 2, 8), b->args.lse.data = NULL;
    REFUSED((void)0, loom_forward, LOOM_UNSUPPORTED, "args.shape",
            "kernel forward needs a grid of batch 2147483647|at most 2147483647");
    b->args.shape = (loom_shape){65536, 32768, 32768, 4, 1}; /* 2^31 blocks */
    b->args.o = loom_dense(b->memory.o, 4, 32768, 8), b->args.lse.data = NULL;
    REFUSED((void)0, loom_forward, LOOM_UNSUPPORTED, "args.shape", "kernel forward");

    loom_plan_destroy(b->plan);
    b->plan = rig_plan(b->context, "fp32 params");
    REFUSED((void)0, loom_backward, LOOM_INVALID, "problem", "no word `backward`");
    loom_plan_destroy(b->plan);
    loom_context_destroy(b->context);
}

/* No output is touched when a check fails, and an error may be NULL. */
static void test_refused_writes_nothing(void **state) {
    (void)state;
    static rig_memory memory;
    loom_context *context = rig_context(NULL);
    loom_plan *plan = rig_plan(context, "fp32");
    loom_args args = rig_args(&memory);
    args.k.stride[3] = 2;
    assert_int_equal(loom_forward(plan, &args, NULL, NULL), LOOM_INVALID);
    for (size_t i = 0; i < sizeof memory.o; i++) assert_int_equal(memory.o[i], 0);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* -- Plans ----------------------------------------------------------------------------------------------- */

static void test_descriptions(void **state) {
    (void)state;
    loom_context *context = gpu_context();
    loom_plan_desc desc;
    loom_plan *plan = NULL;
    loom_error error;
#define BAD(change, status, field, words)                                                                    \
    desc = (loom_plan_desc)LOOM_PLAN_DESC_INIT, desc.problem = "bf16", change;                               \
    assert_fails(error, status, field, words, loom_plan_create(context, &desc, &plan, &error));              \
    assert_null(plan)
    BAD(desc.size = 8, LOOM_INVALID, "desc.size", "size is 8");
    BAD(desc.problem = NULL, LOOM_INVALID, "desc.problem", "NULL");
    BAD(desc.problem = "refused", LOOM_INVALID, "problem.words", "refused");
    BAD(desc.device = 2, LOOM_INVALID, "desc.device", "device is 2|2 device(s)");
    BAD(desc.device = -3, LOOM_INVALID, "desc.device", "device is -3");
    BAD((desc.rigor = LOOM_MEASURE, desc.flags = LOOM_ASYNC), LOOM_INVALID, "desc.flags",
        "flags are 0x2|LOOM_MEASURE");
    BAD((desc.rigor = LOOM_MEASURE, desc.flags = LOOM_NO_COMPILE), LOOM_INVALID, "desc.flags",
        "flags are 0x1");
    BAD((desc.rigor = LOOM_MEASURE, desc.device = LOOM_DEVICE_NONE, desc.arch = "sm_80"), LOOM_INVALID,
        "desc.rigor", "LOOM_MEASURE needs a device");
    BAD(desc.measure_seconds = -1, LOOM_INVALID, "desc.measure_seconds", "measure_seconds is -1");
    BAD(desc.measure_seconds = NAN, LOOM_INVALID, "desc.measure_seconds", "0 or more");
    BAD(desc.rigor = LOOM_WISDOM_ONLY, LOOM_NOT_FOUND, "desc.rigor", "no wisdom near");
    BAD(desc.rigor = 9, LOOM_INVALID, "desc.rigor", "rigor is 9");
    BAD(desc.flags = 10, LOOM_INVALID, "desc.flags", "0xa");
    BAD(desc.alignment = 12, LOOM_INVALID, "desc.alignment", "alignment is 12|power of two");
    BAD(desc.hint.seq_q = -1, LOOM_INVALID, "desc.hint", "negative");
    BAD(desc.device = LOOM_DEVICE_NONE, LOOM_INVALID, "desc.arch", "LOOM_DEVICE_NONE needs an arch");
    BAD(desc.arch = "sm_80", LOOM_INVALID, "desc.arch", "arch is sm_80|device is 0|leave arch NULL");
    BAD(desc.arch = "sm_90", LOOM_INVALID, "desc.arch", "arch is sm_90|device is 0");
    BAD((desc.arch = "host", desc.device = LOOM_DEVICE_HOST), LOOM_INVALID, "desc.arch", "device is -1");
    BAD(desc.target = "host", LOOM_INVALID, "desc.target", "LOOM_DEVICE_HOST");
    BAD((desc.target = "mma", desc.device = LOOM_DEVICE_HOST), LOOM_INVALID, "desc.target",
        "'mma' needs a GPU");
    BAD(desc.problem = "unsupported", LOOM_UNSUPPORTED, "problem.dtype", "not on sm_90");
#undef BAD
    assert_fails(error, LOOM_INVALID, "desc", "NULL", loom_plan_create(context, NULL, &plan, &error));
    assert_fails(error, LOOM_INVALID, "plan", "NULL", loom_plan_create(context, &desc, NULL, &error));
    assert_fails(error, LOOM_INVALID, "context", "NULL", loom_plan_create(NULL, &desc, &plan, &error));
    loom_plan_destroy(NULL);

    desc = (loom_plan_desc)LOOM_PLAN_DESC_INIT;
    desc.problem = "bf16 backward";
    desc.device = LOOM_DEVICE_NONE;
    desc.arch = "sm_80";
    assert_ok(error, loom_plan_create(context, &desc, &plan, &error));
    static rig_memory memory;
    loom_args args = rig_args(&memory);
    assert_fails(error, LOOM_INVALID, "plan", "LOOM_DEVICE_NONE", loom_forward(plan, &args, NULL, &error));
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_PROBLEM), "backward bf16");
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_TARGET), "mma");
    assert_string_equal(loom_plan_text(plan, LOOM_TEXT_WHY), "the only one\n");
    assert_string_equal(loom_plan_text(plan, (loom_text)44), "");
    assert_string_equal(loom_plan_text(NULL, LOOM_TEXT_WHY), "");
    loom_kernel kernel = LOOM_KERNEL_INIT;
    assert_fails(error, LOOM_INVALID, "index", "index is 3, the plan has 3",
                 loom_plan_kernel(plan, 3, &kernel, &error));
    kernel.size = 4;
    assert_fails(error, LOOM_INVALID, "kernel.size", "size is 4", loom_plan_kernel(plan, 0, &kernel, &error));
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    assert_int_equal(fake.retained, 0);
}

static void test_no_driver(void **state) {
    (void)state;
    loom_context *context = rig_context(NULL);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    int32_t count = 0;
    if (loom__device_count(context, &count, &error) == LOOM_OK) {
        print_message("there is a driver here\n");
        loom_context_destroy(context);
        skip();
    }
    assert_fails(error, LOOM_DRIVER, "driver", "driver", gpu_plan(context, "bf16", 0, 0, &plan, &error));
    loom_context_destroy(context);
}

/* -- On the GPU that is none ----------------------------------------------------------------------------- */

static void test_gpu(void **state) {
    (void)state;
    static bench storage;
    bench *b = &storage;
    loom_context *context = gpu_context();
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, gpu_plan(context, "bf16 backward", 1, 0, &plan, &error));
    assert_int_equal(fake.modules, 3);
    assert_int_equal(current.depth, 0);
    assert_int_equal(fake.num_attributes, 0); /* 256 bytes of shared memory need none */
    reset(b);
    b->args.num_params = 0;
    void *stream = (void *)(uintptr_t)0x5;

    /* Another context is current: the plan's is pushed for the launch and popped. */
    current.stack[current.depth++] = (void *)(uintptr_t)0x77;
    assert_ok(error, loom_forward(plan, &b->args, stream, &error));
    assert_int_equal(current.depth, 1);
    assert_int_equal(fake.num_launches, 1);
    launched *l = &fake.launches[0];
    assert_string_equal(l->symbol, "fake_forward");
    assert_int_equal(l->grid, 2 * 4 * 3);
    assert_int_equal(l->threads, 64);
    assert_int_equal(l->smem_bytes, 256);
    assert_ptr_equal(l->stream, stream);
    assert_ptr_equal(l->context, (void *)(uintptr_t)(0x1000 + 101));
    assert_ptr_equal((void *)(uintptr_t)wide(l->args, 0), b->memory.o);
    assert_int_equal(narrow(l->args, 8, 4), 10);

    /* All kernels of a pass, in order, those that are needed. */
    fake.num_launches = 0;
    assert_ok(error, loom_backward(plan, &b->args, stream, &error));
    assert_int_equal(fake.num_launches, 2);
    assert_string_equal(fake.launches[0].symbol, "fake_sum");
    assert_ptr_equal((void *)(uintptr_t)wide(fake.launches[0].args, 8), b->memory.workspace);
    assert_string_equal(fake.launches[1].symbol, "fake_keys");
    assert_int_equal(fake.launches[1].grid, 2 * 2 * 1);
    fake.num_launches = 0;
    b->args.dk.data = b->args.dv.data = NULL;
    assert_ok(error, loom_backward(plan, &b->args, stream, &error));
    assert_int_equal(fake.num_launches, 1);
    b->args.dq.data = NULL;
    fake.num_launches = 0;
    assert_ok(error, loom_backward(plan, &b->args, stream, &error));
    assert_int_equal(fake.num_launches, 0); /* nothing is wanted */

    fake.failing_launch = 700;
    assert_fails(error, LOOM_DRIVER, "driver", "fake_forward: CUDA_ERROR_ILLEGAL_ADDRESS (700)",
                 loom_forward(plan, &b->args, stream, &error));
    assert_int_equal(current.depth, 1);
    fake.failing_launch = 0;
    loom_plan_destroy(plan);
    assert_int_equal(current.depth, 1);
    assert_int_equal(fake.modules, 0);
    loom_context_destroy(context);
    assert_int_equal(fake.retained, 0);
}

/* What launches make of the mask, in their workspace or once before. */
static void test_prepared(void **state) {
    (void)state;
    static bench storage;
    bench *b = &storage;
    static _Alignas(256) unsigned char prepared[512];
    void *stream = (void *)(uintptr_t)0xabc;
    loom_context *context = gpu_context();
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    size_t bytes = 0;
    assert_ok(error, gpu_plan(context, "bf16 listed", 0, 0, &plan, &error));
    reset(b);
    b->args.num_params = 0;

    /* 10 queries: 2 entries of 4 bytes; 12 bytes of the launch's own. Each region begins at a multiple of
     * 256. */
    assert_ok(error, loom_prepared_bytes(plan, &b->args, &bytes, &error));
    assert_int_equal(bytes, 256);
    assert_ok(error, loom_workspace_bytes(plan, LOOM_FORWARD, &b->args, &bytes, &error));
    assert_int_equal(bytes, 512);
    assert_ok(error, loom_forward(plan, &b->args, stream, &error));
    assert_int_equal(fake.num_launches, 2);
    assert_string_equal(fake.launches[0].symbol, "fake_list");
    assert_int_equal(fake.launches[0].grid, 2); /* whatever the batch and heads */
    assert_ptr_equal((void *)(uintptr_t)wide(fake.launches[0].args, 0), b->memory.workspace + 256);
    assert_string_equal(fake.launches[1].symbol, "fake_forward");
    assert_ptr_equal((void *)(uintptr_t)wide(fake.launches[1].args, 0), b->memory.workspace + 256);
    assert_ptr_equal((void *)(uintptr_t)wide(fake.launches[1].args, 1), b->memory.workspace);

    fake.num_launches = 0;
    b->args.prepared = prepared;
    b->args.prepared_bytes = 256;
    b->args.q.data = NULL; /* tensors are not looked at */
    assert_ok(error, loom_prepare(plan, &b->args, stream, &error));
    assert_int_equal(fake.num_launches, 1); /* both variants read the same place */
    assert_string_equal(fake.launches[0].symbol, "fake_list");
    assert_ptr_equal(fake.launches[0].stream, stream);
    assert_ptr_equal((void *)(uintptr_t)wide(fake.launches[0].args, 0), prepared);
    reset(b);
    b->args.num_params = 0;
    b->args.prepared = prepared;
    b->args.prepared_bytes = 256;

    fake.num_launches = 0;
    assert_ok(error, loom_workspace_bytes(plan, LOOM_FORWARD, &b->args, &bytes, &error));
    assert_int_equal(bytes, 256);
    b->args.workspace_bytes = 256;
    assert_ok(error, loom_forward(plan, &b->args, stream, &error));
    assert_int_equal(fake.num_launches, 1);
    assert_ptr_equal((void *)(uintptr_t)wide(fake.launches[0].args, 0), prepared);
    assert_ptr_equal((void *)(uintptr_t)wide(fake.launches[0].args, 1), b->memory.workspace);

    /* Without heads nothing is launched or prepared. */
    fake.num_launches = 0;
    b->args.prepared = NULL;
    b->args.workspace_bytes = sizeof b->memory.workspace;
    b->args.shape.heads_q = b->args.shape.heads_kv = 0;
    assert_ok(error, loom_forward(plan, &b->args, stream, &error));
    assert_int_equal(fake.num_launches, 0);
    reset(b);
    b->args.num_params = 0;
    b->args.prepared = prepared;
    fake.num_launches = 1;

    b->args.prepared_bytes = 255;
    assert_fails(error, LOOM_INVALID, "args.prepared_bytes",
                 "prepared_bytes is 255, this launch needs 256 (loom_prepared_bytes)",
                 loom_forward(plan, &b->args, stream, &error));
    assert_fails(error, LOOM_INVALID, "args.prepared_bytes", "is 255",
                 loom_prepare(plan, &b->args, stream, &error));
    b->args.prepared = prepared + 16, b->args.prepared_bytes = 256;
    assert_fails(error, LOOM_INVALID, "args.prepared", "multiple of 256",
                 loom_prepare(plan, &b->args, stream, &error));
    b->args.prepared = NULL;
    assert_fails(error, LOOM_INVALID, "args.prepared", "prepared is NULL",
                 loom_prepare(plan, &b->args, stream, &error));
    assert_fails(error, LOOM_INVALID, "args", "NULL", loom_prepare(plan, NULL, stream, &error));
    assert_fails(error, LOOM_INVALID, "bytes", "NULL", loom_prepared_bytes(plan, &b->args, NULL, &error));
    assert_int_equal(fake.num_launches, 1);
    loom_plan_destroy(plan);

    /* Nothing to prepare: nothing is needed or launched. */
    fake.num_launches = 0;
    assert_ok(error, gpu_plan(context, "bf16", 0, 0, &plan, &error));
    assert_ok(error, loom_prepared_bytes(plan, &b->args, &bytes, &error));
    assert_int_equal(bytes, 0);
    assert_ok(error, loom_prepare(plan, &b->args, stream, &error));
    assert_int_equal(fake.num_launches, 0);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* Batch, heads or lengths of 0: what must be written still is, the rest launches nothing. */
static void test_empty(void **state) {
    (void)state;
    static bench storage;
    bench *b = &storage;
    loom_context *context = gpu_context();
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, gpu_plan(context, "bf16 backward", 0, 0, &plan, &error));
    static const struct {
        loom_shape shape;
        int forward, backward;
    } cases[] = {
        {{0, 4, 2, 10, 6}, 0, 0}, {{2, 0, 0, 10, 6}, 0, 0}, {{2, 0, 2, 10, 6}, 0, 1},
        {{2, 4, 2, 0, 6}, 0, 1},  {{2, 4, 2, 10, 0}, 1, 1}, {{2, 4, 2, 0, 0}, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        reset(b);
        b->args.num_params = 0;
        b->args.shape = cases[i].shape;
        /* What has no element may have no address. */
        const loom_shape *s = &b->args.shape;
        if (s->batch * s->heads_q * s->seq_q == 0) {
            b->args.q.data = b->args.o.data = b->args.lse.data = b->args.dout.data = NULL;
            b->args.workspace = NULL;
        }
        if (s->batch * s->heads_kv * s->seq_k == 0) b->args.k.data = b->args.v.data = NULL;
        fake.num_launches = 0;
        assert_ok(error, loom_forward(plan, &b->args, NULL, &error));
        assert_int_equal(fake.num_launches, cases[i].forward);
        fake.num_launches = 0;
        assert_ok(error, loom_backward(plan, &b->args, NULL, &error));
        assert_int_equal(fake.num_launches, cases[i].backward);
    }
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* The first variant that the tensors fit; strides of dimensions of one element do not count. */
static void test_variants(void **state) {
    (void)state;
    static bench storage;
    bench *b = &storage;
    loom_context *context = gpu_context();
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, gpu_plan(context, "bf16 aligned", 0, 0, &plan, &error));
    /* In the stand-in's plan both variants have one symbol: tell them by their function's place. */
    assert_int_equal(loom_plan_num_kernels(plan), 2);
    assert_string_equal(rig_kernel(plan, 0).variant, "aligned");
    context->log_level = 5;
#define LAUNCHES(words)                                                                                      \
    rig_log_start();                                                                                         \
    status = loom_forward(plan, &b->args, NULL, &error);                                                     \
    rig_expect(rig_log_stop(), words);                                                                       \
    assert_int_equal(status, LOOM_OK);                                                                       \
    reset(b), b->args.num_params = 0
    loom_status status;
    reset(b), b->args.num_params = 0;
    LAUNCHES("launch kernel=forward variant=aligned blocks=24");
    b->args.v.data = b->memory.read + 2;
    LAUNCHES("variant=any");
    b->args.k.stride[1] = 33;
    LAUNCHES("variant=any");
    b->args.lse.data = &b->memory.lse[1]; /* lse does not count */
    LAUNCHES("variant=aligned");
    b->args.shape.batch = 1, b->args.q.stride[0] = 7;
    LAUNCHES("variant=aligned");
    b->args.q.stride[0] = 16;
    LAUNCHES("variant=aligned");
    b->args.q.stride[0] = 7;
    LAUNCHES("variant=any");
#undef LAUNCHES
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static map_text map_of(const launched *l, int index) {
    map_text text;
    memcpy(&text, l->args + index * (int)sizeof text, sizeof text);
    return text;
}

/* Maps are encoded per launch, from the tensors as they are. */
static void test_maps(void **state) {
    (void)state;
    static bench storage;
    bench *b = &storage;
    loom_context *context = gpu_context();
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, gpu_plan(context, "bf16 maps", 0, 0, &plan, &error));
    assert_int_equal(loom_plan_num_kernels(plan), 2);
    assert_string_equal(rig_kernel(plan, 0).variant, "tma");
    reset(b), b->args.num_params = 0;
    assert_ok(error, loom_forward(plan, &b->args, NULL, &error));
    assert_int_equal(fake.num_maps, 4);
    const launched *l = &fake.launches[0];
    assert_int_equal(l->grid, 2 * 4 * 3);
    map_text q = map_of(l, 0), k = map_of(l, 1), v = map_of(l, 2), o = map_of(l, 3);
    assert_int_equal(q.address, (uintptr_t)b->memory.read);
    assert_int_equal(q.type, 9); /* bf16 */
    assert_int_equal(q.interleave | q.fill, 0);
    assert_int_equal(q.swizzle, 3);   /* 128 bytes */
    assert_int_equal(q.promotion, 3); /* 256 bytes */
    static const uint64_t EXTENTS[] = {16, 10, 1, 4, 2},
                          STRIDES[] = {4 * 16 * 2, 128, 16 * 2, 10 * 4 * 16 * 2};
    static const uint32_t BOX[] = {64, 64, 1, 1, 1};
    assert_memory_equal(q.extents, EXTENTS, sizeof EXTENTS);
    assert_memory_equal(q.strides, STRIDES, sizeof STRIDES);
    assert_memory_equal(q.box, BOX, sizeof BOX);
    static const uint64_t K_EXTENTS[] = {64, 6, 2, 2, 2}; /* its map asks for two boxes */
    static const uint32_t K_BOX[] = {64, 128, 2, 1, 1};
    assert_memory_equal(k.extents, K_EXTENTS, sizeof K_EXTENTS);
    assert_memory_equal(k.box, K_BOX, sizeof K_BOX);
    static const uint64_t V_EXTENTS[] = {8, 6, 1, 2, 2}, V_STRIDES[] = {2 * 8 * 2, 128, 8 * 2, 6 * 2 * 8 * 2};
    static const uint32_t V_BOX[] = {64, 128, 1, 1, 1};
    assert_memory_equal(v.extents, V_EXTENTS, sizeof V_EXTENTS);
    assert_memory_equal(v.strides, V_STRIDES, sizeof V_STRIDES);
    assert_memory_equal(v.box, V_BOX, sizeof V_BOX);
    assert_int_equal(o.address, (uintptr_t)b->memory.o);
    assert_ptr_equal((void *)(uintptr_t)wide(l->args, 64), b->memory.o); /* behind the maps */
    assert_int_equal(wide(l->args, 65), 10 * 4 * 8);

    /* Strides of an axis of one are not taken as they are. */
    fake.num_launches = 0;
    b->args.shape = (loom_shape){1, 1, 1, 10, 1};
    b->args.q.stride[0] = b->args.k.stride[0] = b->args.v.stride[0] = b->args.o.stride[0] = -5;
    b->args.q.stride[2] = b->args.k.stride[2] = b->args.v.stride[2] = b->args.o.stride[2] = INT64_MAX;
    b->args.k.stride[1] = 3;
    assert_ok(error, loom_forward(plan, &b->args, NULL, &error));
    q = map_of(l, 0), k = map_of(l, 1);
    static const uint64_t ONE_HEAD[] = {4 * 16 * 2, 128, 16 * 2, 16 * 2},
                          ONE_KEY[] = {16 * 2, 128, 16 * 2, 16 * 2};
    assert_memory_equal(q.strides, ONE_HEAD, sizeof ONE_HEAD);
    assert_memory_equal(k.strides, ONE_KEY, sizeof ONE_KEY);

    /* Without keys there is nothing to describe. */
    fake.num_launches = fake.num_maps = 0;
    reset(b), b->args.num_params = 0;
    b->args.shape.seq_k = 0;
    b->args.k.data = b->args.v.data = NULL;
    assert_ok(error, loom_forward(plan, &b->args, NULL, &error));
    assert_int_equal(fake.num_maps, 2);
    static const map_text NONE;
    v = map_of(l, 2);
    assert_memory_equal(&v, &NONE, sizeof v);

    /* No more blocks than stay on the device: here two for each of 132 multiprocessors. */
    fake.num_launches = 0;
    reset(b), b->args.num_params = 0;
    b->args.shape.seq_q = 4 * 33;
    b->args.q.stride[0] = b->args.o.stride[0] = 1 << 14;
    b->args.lse.data = NULL;
    assert_ok(error, loom_forward(plan, &b->args, NULL, &error));
    assert_int_equal(l->grid, 2 * 4 * 33);
    b->args.shape.seq_q++;
    fake.num_launches = 0;
    assert_ok(error, loom_forward(plan, &b->args, NULL, &error));
    assert_int_equal(l->grid, 2 * 132);
    loom_plan_destroy(plan);

    assert_ok(error,
              gpu_plan(context, "fp32 maps", 0, 0, &plan, &error)); /* what is not bf16 is told as fp16 */
    fake.num_launches = 0;
    reset(b), b->args.num_params = 0;
    assert_ok(error, loom_forward(plan, &b->args, NULL, &error));
    assert_int_equal(map_of(l, 0).type, 6);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* A map of several boxes side by side splits the head dim; one of a single box holds all of it, and columns
 * past its end are the TMA unit's to leave out. */
static void test_map_of_boxes(void **state) {
    (void)state;
    _Alignas(LOOM__MAP_ALIGNMENT) map_text map;
    static _Alignas(16) float data[4];
    loom__map_view view = {.data = data, /* [batch 3, seq 100, head 5, dim 192] */
                           .extents = {192, 100, 5, 3},
                           .strides = {5 * 192 * 2, 192 * 2, 100 * 5 * 192 * 2},
                           .box_rows = 80,
                           .box_chunks = 3};
    assert_int_equal(loom__map_encode(&DRIVER, &view, &map), 0);
    static const uint64_t EXTENTS[] = {64, 100, 3, 5, 3}, STRIDES[] = {1920, 128, 384, 192000};
    static const uint32_t BOX[] = {64, 80, 3, 1, 1};
    assert_int_equal(map.address, (uintptr_t)data);
    assert_int_equal(map.type, 6); /* fp16 */
    assert_memory_equal(map.extents, EXTENTS, sizeof EXTENTS);
    assert_memory_equal(map.strides, STRIDES, sizeof STRIDES);
    assert_memory_equal(map.box, BOX, sizeof BOX);

    view.is_bf16 = true;
    view.extents[0] = 72;
    view.box_chunks = 1;
    assert_int_equal(loom__map_encode(&DRIVER, &view, &map), 0);
    static const uint64_t WHOLE[] = {72, 100, 1, 5, 3};
    static const uint32_t ONE_BOX[] = {64, 80, 1, 1, 1};
    assert_int_equal(map.type, 9);
    assert_memory_equal(map.extents, WHOLE, sizeof WHOLE);
    assert_memory_equal(map.strides, STRIDES, sizeof STRIDES);
    assert_memory_equal(map.box, ONE_BOX, sizeof ONE_BOX);
}

/* A tensor that has no map takes the next variant, and without one is refused by name. */
static void test_maps_refused(void **state) {
    (void)state;
    static bench storage;
    bench *b = &storage;
    loom_context *context = gpu_context();
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, gpu_plan(context, "bf16 maps", 0, 0, &plan, &error));
    loom_status status;
    context->log_level = 5;
#define LAUNCHES(words)                                                                                      \
    rig_log_start();                                                                                         \
    status = loom_forward(plan, &b->args, NULL, &error);                                                     \
    rig_expect(rig_log_stop(), words);                                                                       \
    assert_int_equal(status, LOOM_OK);                                                                       \
    reset(b), b->args.num_params = 0
    reset(b), b->args.num_params = 0;
    LAUNCHES("launch kernel=forward variant=tma blocks=24");
    b->args.v.data = b->memory.read + 2;
    LAUNCHES("variant=any");
    b->args.k.stride[0] = (int64_t)1 << 39; /* 2^40 bytes */
    LAUNCHES("variant=any");
    b->args.k.stride[0] = 0;
    LAUNCHES("variant=tma"); /* the driver decides about broadcasts */
    fake.refuses_broadcast = true;
    b->args.k.stride[0] = 0;
    LAUNCHES("variant=any");
#undef LAUNCHES
    context->log_level = 0;
    loom_plan_destroy(plan);
    assert_ok(error, gpu_plan(context, "bf16 maps", 0, 16, &plan, &error));
    assert_int_equal(loom_plan_num_kernels(plan), 1);
    b->args.k.stride[0] = 0;
    fake.num_launches = 0;
    assert_fails(
        error, LOOM_UNSUPPORTED, "args.k.stride",
        "k (data 0x|stride 0 32 16) has no tensor map|CUDA_ERROR_INVALID_VALUE (1)|desc.alignment|target mma",
        loom_forward(plan, &b->args, NULL, &error));
    reset(b), b->args.num_params = 0;
    b->args.k.data = b->memory.read + 2;
    assert_fails(error, LOOM_INVALID, "args.k", "k has an address|promised",
                 loom_forward(plan, &b->args, NULL, &error));
    assert_int_equal(fake.num_launches, 0);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* A driver that is too old to encode maps: the generator knows before it chooses. */
static void test_maps_missing(void **state) {
    (void)state;
    loom__driver_api old = DRIVER;
    const loom__hooks hooks = {.driver = &old};
    old.map_encode = NULL;
    loom_context_destroy(gpu_context());
    loom_context *context = rig_context(&hooks);
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, gpu_plan(context, "bf16 maps", 0, 0, &plan, &error));
    assert_int_equal(loom_plan_num_kernels(plan), 1);
    assert_string_equal(rig_kernel(plan, 0).variant, "any");
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

/* A promise that is not kept is refused by name. */
static void test_promise(void **state) {
    (void)state;
    static bench storage;
    bench *b = &storage;
    loom_error error = LOOM_ERROR_INIT;
    b->context = gpu_context();
    assert_ok(error, gpu_plan(b->context, "bf16 aligned", 0, 16, &b->plan, &error));
    assert_int_equal(loom_plan_num_kernels(b->plan), 1);
    reset(b), b->args.num_params = 0;
    assert_ok(error, loom_forward(b->plan, &b->args, NULL, &error));
    b->args.v.data = b->memory.read + 4;
    assert_fails(error, LOOM_INVALID, "args.v", "v has an address|multiple of 16 bytes|promised",
                 loom_forward(b->plan, &b->args, NULL, &error));
    reset(b), b->args.num_params = 0;
    b->args.o.stride[0] = 321;
    assert_fails(error, LOOM_INVALID, "args.o", "o has an address",
                 loom_forward(b->plan, &b->args, NULL, &error));
    assert_int_equal(fake.num_launches, 1);
    loom_plan_destroy(b->plan);
    loom_context_destroy(b->context);
}

/* A cached binary that the driver does not take is built again, once. */
static void test_cached_does_not_load(void **state) {
    (void)state;
    loom_context *context = gpu_context();
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, gpu_plan(context, "bf16", 0, 0, &plan, &error));
    loom_plan_destroy(plan);
    fake.failing_load = 1;
    rig_log_start();
    loom_status status = gpu_plan(context, "bf16", 0, 0, &plan, &error);
    rig_expect(rig_log_stop(), "cache removes|does not load");
    assert_int_equal(status, LOOM_OK);
    assert_int_equal(rig_kernel(plan, 0).cached, 0);
    loom_plan_destroy(plan);
    fake.failing_load = 2;
    rig_log_start();
    status = gpu_plan(context, "bf16", 0, 0, &plan, &error);
    rig_log_stop();
    assert_int_equal(status, LOOM_DRIVER);
    rig_expect(error.text, "the driver does not take the kernel: CUDA_ERROR_INVALID_IMAGE");
    assert_int_equal(fake.modules, 0);
    assert_int_equal(current.depth, 0);
    loom_context_destroy(context);
}

/* What sanitizers add is not the launch's: there the figure is printed, and held to nothing. */
#if defined(__SANITIZE_ADDRESS__)
enum { IS_SANITIZED = 1 };
#else
enum { IS_SANITIZED = 0 };
#endif

/* What a launch costs beside the driver's own work. */
static void measure_overhead(const char *problem, double limit_us) {
    static bench storage;
    bench *b = &storage;
    enum { BATCHES = 200, LAUNCHES = 100 };
    loom_context *context = gpu_context();
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    assert_ok(error, gpu_plan(context, problem, 0, 0, &plan, &error));
    reset(b);
    fake.quiet = true;
    double best = 1e9;
    for (int i = 0; i < BATCHES; i++) {
        double start = loom__now();
        for (int j = 0; j < LAUNCHES; j++)
            assert_int_equal(loom_forward(plan, &b->args, NULL, &error), LOOM_OK);
        double us = (loom__now() - start) / LAUNCHES * 1e6;
        if (us < best) best = us;
    }
    print_message("a launch of '%s' adds %.3f us%s\n", problem, best,
                  IS_SANITIZED ? " (under sanitizers, no limit)" : "");
    assert_true(IS_SANITIZED || best < limit_us);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static void test_overhead(void **state) {
    (void)state;
    measure_overhead("bf16 params aligned", 2.0);
    measure_overhead("bf16 params maps", 2.0 + 4 * 0.5);
}

/* -- Threads --------------------------------------------------------------------------------------------- */

static void *launch_many(void *argument) {
    const loom_plan *plan = argument;
    rig_memory *memory = calloc(1, sizeof *memory);
    int wrong = 0;
    for (int i = 0; i < 50; i++) {
        memset(memory->o, 0, sizeof memory->o);
        loom_args args = rig_args(memory);
        wrong += loom_forward(plan, &args, NULL, NULL) != LOOM_OK || memory->o[104] != 24;
    }
    free(memory);
    return (void *)(intptr_t)wrong;
}

static void test_threads(void **state) {
    (void)state;
    enum { THREADS = 6 };
    loom_options options = LOOM_OPTIONS_INIT;
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    pthread_t threads[THREADS];
    options.num_threads = 5;
    assert_ok(error, loom_context_create(&options, &context, &error));
    loom_plan *plan = rig_plan(context, "fp32");
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, launch_many, plan), 0);
    for (int i = 0; i < THREADS; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        assert_null(wrong);
    }
    /* A forked child has no workers, and computes the same. */
    pid_t child = fork();
    if (child == 0) _exit(launch_many(plan) != NULL);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    loom_plan_destroy(plan);
    loom_context_destroy(context);
}

static void *create_many(void *argument) {
    loom_context *context = argument;
    static const char *const PROBLEMS[] = {"fp32", "fp32 backward", "bf16"};
    int wrong = 0;
    for (int i = 0; i < 6; i++) {
        loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
        loom_plan *plan = NULL;
        desc.problem = PROBLEMS[i % 3];
        desc.device = LOOM_DEVICE_HOST;
        wrong += loom_plan_create(context, &desc, &plan, NULL) != LOOM_OK;
        loom_plan_destroy(plan);
    }
    return (void *)(intptr_t)wrong;
}

static void test_plans_of_threads(void **state) {
    (void)state;
    pthread_t threads[4];
    loom_context *context = rig_context(NULL);
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, create_many, context), 0);
    for (int i = 0; i < 4; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        assert_null(wrong);
    }
    loom_context_destroy(context);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_packing, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_checks, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_refused_writes_nothing, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_descriptions, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_no_driver, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_gpu, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_prepared, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_empty, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_variants, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_maps, rig_setup, rig_teardown),
        cmocka_unit_test(test_map_of_boxes),
        cmocka_unit_test_setup_teardown(test_maps_refused, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_maps_missing, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_promise, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_cached_does_not_load, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_overhead, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_threads, rig_setup, rig_teardown),
        cmocka_unit_test_setup_teardown(test_plans_of_threads, rig_setup, rig_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
