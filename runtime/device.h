/* device.h - the CUDA driver, opened at run time with prototypes of our own: no CUDA header is needed to
 * build.
 *
 * The table can be replaced by tests. Called by plan.c, launch.c and the command line. Fails with DRIVER and
 * the driver's own name of the error.
 */
#ifndef LOOM_DEVICE_H
#define LOOM_DEVICE_H

#include "common.h"

typedef void *loom__cuda_handle; /* CUcontext, CUmodule, CUfunction, CUstream, CUevent */
typedef unsigned long long loom__device_ptr;

/* CUlaunchAttribute and CUlaunchConfig. */
typedef struct loom__launch_attribute {
    int id;
    _Alignas(8) union {
        char bytes[64];
        int number;
    } value;
} loom__launch_attribute;

typedef struct loom__launch_config {
    unsigned grid[3], block[3], smem_bytes;
    loom__cuda_handle stream;
    const loom__launch_attribute *attributes;
    unsigned num_attributes;
} loom__launch_config;

/* clang-format off */
/* X(result, member, symbol, parameters): all functions the library and the command line call. */
#define LOOM__DRIVER_FUNCTIONS(X)                                                                            \
    X(init, cuInit, (unsigned flags))                                                                        \
    X(driver_version, cuDriverGetVersion, (int *version))                                                    \
    X(device_count, cuDeviceGetCount, (int *count))                                                          \
    X(device_get, cuDeviceGet, (int *device, int ordinal))                                                   \
    X(device_name, cuDeviceGetName, (char *name, int capacity, int device))                                  \
    X(device_attribute, cuDeviceGetAttribute, (int *value, int attribute, int device))                       \
    X(device_memory, cuDeviceTotalMem_v2, (size_t *bytes, int device))                                       \
    X(error_name, cuGetErrorName, (int result, const char **name))                                           \
    X(primary_retain, cuDevicePrimaryCtxRetain, (loom__cuda_handle *context, int device))                    \
    X(primary_release, cuDevicePrimaryCtxRelease_v2, (int device))                                           \
    X(context_push, cuCtxPushCurrent_v2, (loom__cuda_handle context))                                        \
    X(context_pop, cuCtxPopCurrent_v2, (loom__cuda_handle *context))                                         \
    X(context_current, cuCtxGetCurrent, (loom__cuda_handle *context))                                        \
    X(context_synchronize, cuCtxSynchronize, (void))                                                         \
    X(module_load, cuModuleLoadData, (loom__cuda_handle *module, const void *image))                         \
    X(module_unload, cuModuleUnload, (loom__cuda_handle module))                                             \
    X(module_function, cuModuleGetFunction,                                                                  \
      (loom__cuda_handle *function, loom__cuda_handle module, const char *name))                             \
    X(function_set, cuFuncSetAttribute, (loom__cuda_handle function, int attribute, int value))              \
    X(launch, cuLaunchKernel,                                                                                \
      (loom__cuda_handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,      \
       unsigned block_y, unsigned block_z, unsigned smem_bytes, loom__cuda_handle stream, void **parameters, \
       void **extra))                                                                                        \
    X(memory_alloc, cuMemAlloc_v2, (loom__device_ptr *pointer, size_t bytes))                                \
    X(memory_free, cuMemFree_v2, (loom__device_ptr pointer))                                                 \
    X(memory_upload, cuMemcpyHtoD_v2, (loom__device_ptr to, const void *from, size_t bytes))                 \
    X(memory_download, cuMemcpyDtoH_v2, (void *to, loom__device_ptr from, size_t bytes))                     \
    X(memory_upload_async, cuMemcpyHtoDAsync_v2,                                                             \
      (loom__device_ptr to, const void *from, size_t bytes, loom__cuda_handle stream))                       \
    X(memory_download_async, cuMemcpyDtoHAsync_v2,                                                           \
      (void *to, loom__device_ptr from, size_t bytes, loom__cuda_handle stream))                             \
    X(stream_create, cuStreamCreate, (loom__cuda_handle *stream, unsigned flags))                            \
    X(stream_destroy, cuStreamDestroy_v2, (loom__cuda_handle stream))                                        \
    X(stream_synchronize, cuStreamSynchronize, (loom__cuda_handle stream))                                   \
    X(event_create, cuEventCreate, (loom__cuda_handle *event, unsigned flags))                               \
    X(event_destroy, cuEventDestroy_v2, (loom__cuda_handle event))                                           \
    X(event_record, cuEventRecord, (loom__cuda_handle event, loom__cuda_handle stream))                      \
    X(event_synchronize, cuEventSynchronize, (loom__cuda_handle event))                                      \
    X(event_elapsed, cuEventElapsedTime,                                                                     \
      (float *milliseconds, loom__cuda_handle start, loom__cuda_handle end))                                 \
    X(capture_begin, cuStreamBeginCapture_v2, (loom__cuda_handle stream, int mode))                          \
    X(capture_end, cuStreamEndCapture, (loom__cuda_handle stream, loom__cuda_handle * graph))                \
    X(graph_instantiate, cuGraphInstantiateWithFlags,                                                        \
      (loom__cuda_handle *instance, loom__cuda_handle graph, unsigned long long flags))                      \
    X(graph_launch, cuGraphLaunch, (loom__cuda_handle instance, loom__cuda_handle stream))

/* The same of those that old drivers lack; their members are NULL then. */
#define LOOM__DRIVER_NEWER_FUNCTIONS(X)                                                                      \
    X(launch_with, cuLaunchKernelEx,                                                                         \
      (const loom__launch_config *config, loom__cuda_handle function, void **parameters, void **extra))      \
    X(stream_capturing, cuStreamIsCapturing, (loom__cuda_handle stream, int *status))                        \
    X(capture_mode, cuThreadExchangeStreamCaptureMode, (int *mode))                                          \
    X(map_encode, cuTensorMapEncodeTiled,                                                                    \
      (void *map, int type, unsigned rank, void *address, const uint64_t *extents, const uint64_t *strides,  \
       const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill))
/* clang-format on */

#define LOOM__DRIVER_MEMBER(member, symbol, parameters) int(*member) parameters;
struct loom__driver_api {
    LOOM__DRIVER_FUNCTIONS(LOOM__DRIVER_MEMBER)
    LOOM__DRIVER_NEWER_FUNCTIONS(LOOM__DRIVER_MEMBER)
};
#undef LOOM__DRIVER_MEMBER

/* One device with its primary context retained. */
struct loom__device {
    int32_t ordinal;
    int handle;
    loom__cuda_handle primary;
    char arch[16]; /* "sm_90" */
    char name[128];
    int32_t smem_bytes;    /* most dynamic shared memory of a block */
    int32_t smem_sm_bytes; /* of a multiprocessor */
    int32_t num_sms;
    int32_t l2_bytes; /* of its second cache */
    size_t memory_bytes;
};

/* Opens libcuda. DRIVER when there is none, with the reason. Takes the lock, as the next. */
loom_status loom__driver_open(loom_context *context, loom_error *error);
/* Version of CUDA the driver takes, as major * 1000 + minor * 10. */
loom_status loom__driver_version(loom_context *context, int32_t *version, loom_error *error);
loom_status loom__device_count(loom_context *context, int32_t *count, loom_error *error);
loom_status loom__device_open(loom_context *context, int32_t ordinal, const loom__device **device,
                              loom_error *error);

/* Makes the device's context current, for calls of context->driver; leave undoes it. */
loom_status loom__device_enter(loom_context *context, const loom__device *device, loom_error *error);
void loom__device_leave(loom_context *context);

/* While any thread captures a stream into a graph, calls of others that allocate, load or wait fail, and
 * break the capture: such is CUDA's default, as they might be meant for the graph. Those of this library
 * never are: between these two, on one thread, they pass. Restore takes what relax returned. */
int loom__device_relax(const loom__driver_api *driver);
void loom__device_restore(const loom__driver_api *driver, int mode);

/* DRIVER with "what failed: CUDA_ERROR_X" unless result is 0. */
loom_status loom__driver_check(const loom__driver_api *driver, int result, const char *what,
                               loom_error *error);

typedef struct loom__module {
    loom__cuda_handle module, function;
} loom__module;

/* The device must be entered. */
loom_status loom__module_load(loom_context *context, const loom__device *device, const void *binary,
                              const char *symbol, int32_t smem_bytes, loom__module *module,
                              loom_error *error);
void loom__module_unload(loom_context *context, loom__module *module);

/* -- Tensor maps ----------------------------------------------------------------------------------------- */

enum { LOOM__MAP_BYTES = 128, LOOM__MAP_ALIGNMENT = 64, LOOM__MAP_DIMS = 4 };

/* A tensor as the TMA unit sees it, innermost axis first: dim, seq, head, batch. The innermost is contiguous.
 */
typedef struct loom__map_view {
    void *data;
    bool is_bf16;                         /* else fp16 */
    uint64_t extents[LOOM__MAP_DIMS];     /* none 0 */
    uint64_t strides[LOOM__MAP_DIMS - 1]; /* bytes, of seq, head and batch; of an extent of 1 anything */
    uint32_t box_rows;                    /* rows of seq that one copy moves, in boxes of 64 elements */
    uint32_t box_chunks;                  /* such boxes side by side in one copy; dim holds 64 times as many, unless 1 */
} loom__map_view;

/* Writes LOOM__MAP_BYTES to `map`, which is aligned to LOOM__MAP_ALIGNMENT. Copies swizzle by 128 bytes, read
 * zeros past the ends and write nothing there. Not 0, the driver's error, when TMA cannot describe the
 * tensor. Fast path. */
int loom__map_encode(const loom__driver_api *driver, const loom__map_view *view, void *map);

/* Frees what the functions above opened. */
void loom__driver_close(loom_context *context);

#endif
