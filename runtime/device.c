/* device.c - opening libcuda, devices and modules. See device.h.
 *
 * cuInit may take a second, so that the driver's version is asked without it. Primary contexts are retained
 * at first use and released with the loom_context.
 */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* CUdevice_attribute, CUfunction_attribute: values fixed by the driver's ABI. */
enum {
    ATTRIBUTE_NUM_SMS = 16,
    ATTRIBUTE_L2_BYTES = 38,
    ATTRIBUTE_MAJOR = 75,
    ATTRIBUTE_MINOR = 76,
    ATTRIBUTE_SMEM_SM = 81,
    ATTRIBUTE_SMEM_BLOCK_OPTIN = 97,
    FUNCTION_MAX_DYNAMIC_SMEM = 8,
    FUNCTION_SMEM_CARVEOUT = 9
};
/* From here on dynamic shared memory must be asked for, and is worth taking from L1. */
enum { SMEM_OPTIN_BYTES = 48 * 1024, CARVEOUT_ALL_PERCENT = 100 };
/* From here on graphs capture launches that overlap. */
enum { OVERLAP_VERSION = 12030 };

/* -- Driver ---------------------------------------------------------------------------------------------- */

loom_status loom__driver_check(const loom__driver_api *driver, int result, const char *what,
                               loom_error *error) {
    if (result == 0) return LOOM_OK;
    const char *name = NULL;
    if (driver->error_name(result, &name) || !name) name = "an unknown error";
    return loom__fail(error, LOOM_DRIVER, "driver", "%s: %s (%d)", what, name, result);
}

static loom_status load_driver(loom_context *context, loom_error *error) {
    context->driver_library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!context->driver_library) {
        const char *reason = dlerror();
        return loom__fail(error, LOOM_DRIVER, "driver", "there is no CUDA driver: %s",
                          reason ? reason : "libcuda.so.1");
    }
    loom__driver_api *api = loom__arena_alloc(&context->arena, sizeof *api);
    if (!api) return loom__fail_memory(error);
    const char *missing = NULL;
#define LOAD(member, symbol, parameters)                                                                     \
    *(void **)&api->member = dlsym(context->driver_library, #symbol);                                        \
    if (!api->member) missing = #symbol;
    LOOM__DRIVER_FUNCTIONS(LOAD)
    const char *needed = missing;
    LOOM__DRIVER_NEWER_FUNCTIONS(LOAD)
#undef LOAD
    if (needed) {
        return loom__fail(error, LOOM_DRIVER, "driver",
                          "the CUDA driver has no %s: it is too old, CUDA 12 (driver 525) or newer is needed",
                          needed);
    }
    int version = 0;
    if (api->driver_version(&version) || version < OVERLAP_VERSION) api->launch_with = NULL;
    context->driver = api;
    return LOOM_OK;
}

static loom_status forward_failure(const loom_error *failure, loom_error *error) {
    return loom__fail(error, failure->status, failure->field, "%s", failure->text);
}

loom_status loom__driver_open(loom_context *context, loom_error *error) {
    loom__context_lock(context);
    loom_status status = context->driver_status;
    if (!context->driver && !context->driver_searched) {
        context->driver_failure = (loom_error)LOOM_ERROR_INIT;
        status = context->driver_status = load_driver(context, &context->driver_failure);
        context->driver_searched = true;
    }
    loom__context_unlock(context);
    return status == LOOM_OK ? LOOM_OK : forward_failure(&context->driver_failure, error);
}

loom_status loom__driver_version(loom_context *context, int32_t *version, loom_error *error) {
    int value = 0;
    LOOM_TRY(context, loom__driver_open(context, error));
    LOOM_TRY(context, loom__driver_check(context->driver, context->driver->driver_version(&value),
                                         "the driver does not tell its version", error));
    *version = value;
    return LOOM_OK;
}

loom_status loom__device_count(loom_context *context, int32_t *count, loom_error *error) {
    int value = 0;
    LOOM_TRY(context, loom__driver_open(context, error));
    const loom__driver_api *driver = context->driver;
    LOOM_TRY(context, loom__driver_check(driver, driver->init(0), "the CUDA driver does not start", error));
    LOOM_TRY(context,
             loom__driver_check(driver, driver->device_count(&value), "cannot count devices", error));
    *count = value;
    return LOOM_OK;
}

/* -- Devices --------------------------------------------------------------------------------------------- */

static loom_status read_device(const loom__driver_api *driver, loom__device *device, loom_error *error) {
    int major = 0, minor = 0, smem_block = 0, smem_sm = 0, num_sms = 0, l2_bytes = 0;
    const struct {
        int attribute;
        int *value;
    } rows[] = {{ATTRIBUTE_MAJOR, &major},
                {ATTRIBUTE_MINOR, &minor},
                {ATTRIBUTE_SMEM_BLOCK_OPTIN, &smem_block},
                {ATTRIBUTE_SMEM_SM, &smem_sm},
                {ATTRIBUTE_NUM_SMS, &num_sms},
                {ATTRIBUTE_L2_BYTES, &l2_bytes}};
    LOOM_TRY(NULL, loom__driver_check(driver, driver->device_get(&device->handle, device->ordinal),
                                      "cannot open the device", error));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        LOOM_TRY(NULL, loom__driver_check(
                           driver, driver->device_attribute(rows[i].value, rows[i].attribute, device->handle),
                           "cannot read a device attribute", error));
    }
    LOOM_TRY(NULL, loom__driver_check(driver,
                                      driver->device_name(device->name, sizeof device->name, device->handle),
                                      "cannot read the device's name", error));
    LOOM_TRY(NULL, loom__driver_check(driver, driver->device_memory(&device->memory_bytes, device->handle),
                                      "cannot read the device's memory", error));
    snprintf(device->arch, sizeof device->arch, "sm_%d%d", major, minor);
    device->smem_bytes = smem_block;
    device->smem_sm_bytes = smem_sm;
    device->num_sms = num_sms;
    device->l2_bytes = l2_bytes;
    return loom__driver_check(driver, driver->primary_retain(&device->primary, device->handle),
                              "cannot retain the device's primary context", error);
}

static loom_status open_device(loom_context *context, int32_t ordinal, loom_error *error) {
    int32_t count = 0;
    LOOM_TRY(context, loom__device_count(context, &count, error));
    if (ordinal < 0 || ordinal >= count || ordinal >= LOOM__MAX_DEVICES) {
        return loom__fail(error, LOOM_INVALID, "desc.device",
                          "device is %d, the driver knows %d device(s), counted from 0", ordinal, count);
    }
    if (context->devices[ordinal]) return LOOM_OK;
    loom__device *device = loom__arena_alloc(&context->arena, sizeof *device);
    if (!device) return loom__fail_memory(error);
    device->ordinal = ordinal;
    LOOM_TRY(context, read_device(context->driver, device, error));
    context->devices[ordinal] = device;
    return LOOM_OK;
}

loom_status loom__device_open(loom_context *context, int32_t ordinal, const loom__device **device,
                              loom_error *error) {
    loom__context_lock(context);
    loom_status status = open_device(context, ordinal, error);
    if (status == LOOM_OK) *device = context->devices[ordinal];
    loom__context_unlock(context);
    return status;
}

loom_status loom__device_enter(loom_context *context, const loom__device *device, loom_error *error) {
    return loom__driver_check(context->driver, context->driver->context_push(device->primary),
                              "cannot make the device's context current", error);
}

void loom__device_leave(loom_context *context) {
    loom__cuda_handle popped;
    context->driver->context_pop(&popped);
}

enum { CAPTURE_MODE_UNKNOWN = -1, CAPTURE_MODE_RELAXED = 2 };

int loom__device_relax(const loom__driver_api *driver) {
    int mode = CAPTURE_MODE_RELAXED;
    if (!driver->capture_mode || driver->capture_mode(&mode)) return CAPTURE_MODE_UNKNOWN;
    return mode;
}

void loom__device_restore(const loom__driver_api *driver, int mode) {
    if (mode != CAPTURE_MODE_UNKNOWN) driver->capture_mode(&mode);
}

void loom__driver_close(loom_context *context) {
    for (int32_t i = 0; i < LOOM__MAX_DEVICES; i++) {
        if (context->devices[i]) context->driver->primary_release(context->devices[i]->handle);
    }
    if (context->driver_library) dlclose(context->driver_library);
}

/* -- Tensor maps ----------------------------------------------------------------------------------------- */

/* CUtensorMapDataType and its like: values fixed by the driver's ABI. */
enum {
    MAP_FLOAT16 = 6,
    MAP_BFLOAT16 = 9,
    MAP_INTERLEAVE_NONE = 0,
    MAP_SWIZZLE_128B = 3,
    MAP_L2_PROMOTION_256B = 3,
    MAP_OOB_FILL_NONE = 0
};
enum { MAP_COLUMNS = 64, MAP_ELEMENT_BYTES = 2, MAP_STRIDE_UNIT = 16 };

int loom__map_encode(const loom__driver_api *driver, const loom__map_view *view, void *map) {
    enum { RANK = LOOM__MAP_DIMS + 1 }; /* columns of a box, seq, boxes, head, batch */
    static const uint32_t STEPS[RANK] = {1, 1, 1, 1, 1};
    const uint32_t box[RANK] = {MAP_COLUMNS, view->box_rows, view->box_chunks, 1, 1};
    const uint64_t row_bytes =
        (view->extents[0] * MAP_ELEMENT_BYTES + MAP_STRIDE_UNIT - 1) / MAP_STRIDE_UNIT * MAP_STRIDE_UNIT;
    const uint64_t extents[RANK] = {view->box_chunks > 1 ? MAP_COLUMNS : view->extents[0], view->extents[1],
                                    view->box_chunks, view->extents[2], view->extents[3]};
    const uint64_t strides[RANK - 1] = {view->extents[1] > 1 ? view->strides[0] : row_bytes,
                                        MAP_COLUMNS * MAP_ELEMENT_BYTES,
                                        view->extents[2] > 1 ? view->strides[1] : row_bytes,
                                        view->extents[3] > 1 ? view->strides[2] : row_bytes};
    return driver->map_encode(map, view->is_bf16 ? MAP_BFLOAT16 : MAP_FLOAT16, RANK, view->data, extents, strides,
                              box, STEPS, MAP_INTERLEAVE_NONE, MAP_SWIZZLE_128B, MAP_L2_PROMOTION_256B,
                              MAP_OOB_FILL_NONE);
}

/* -- Modules --------------------------------------------------------------------------------------------- */

static loom_status load_module(loom_context *context, const void *binary, const char *symbol,
                               int32_t smem_bytes, loom__module *module, loom_error *error) {
    const loom__driver_api *driver = context->driver;
    loom_status status;
    LOOM_TRY(context, loom__driver_check(driver, driver->module_load(&module->module, binary),
                                         "the driver does not take the kernel", error));
    LOOM_TRY_OUT(context, loom__driver_check(
                              driver, driver->module_function(&module->function, module->module, symbol),
                              "the kernel is not in its binary", error));
    if (smem_bytes > SMEM_OPTIN_BYTES) {
        LOOM_TRY_OUT(context, loom__driver_check(driver,
                                                 driver->function_set(module->function,
                                                                      FUNCTION_MAX_DYNAMIC_SMEM, smem_bytes),
                                                 "the driver refuses the kernel's shared memory", error));
    }
    if (smem_bytes >= SMEM_OPTIN_BYTES) {
        LOOM_TRY_OUT(context,
                     loom__driver_check(
                         driver,
                         driver->function_set(module->function, FUNCTION_SMEM_CARVEOUT, CARVEOUT_ALL_PERCENT),
                         "the driver refuses the kernel's share of shared memory", error));
    }
    return LOOM_OK;
out:
    driver->module_unload(module->module);
    *module = (loom__module){NULL, NULL};
    return status;
}

loom_status loom__module_load(loom_context *context, const loom__device *device, const void *binary,
                              const char *symbol, int32_t smem_bytes, loom__module *module,
                              loom_error *error) {
    *module = (loom__module){NULL, NULL};
    if (smem_bytes > device->smem_bytes) {
        return loom__fail(error, LOOM_UNSUPPORTED, "schedule",
                          "%s needs %d bytes of shared memory a block, %s has %d", symbol, smem_bytes,
                          device->name, device->smem_bytes);
    }
    int mode = loom__device_relax(context->driver);
    loom_status status = load_module(context, binary, symbol, smem_bytes, module, error);
    loom__device_restore(context->driver, mode);
    return status;
}

void loom__module_unload(loom_context *context, loom__module *module) {
    if (!module->module) return;
    int mode = loom__device_relax(context->driver);
    context->driver->module_unload(module->module);
    loom__device_restore(context->driver, mode);
    *module = (loom__module){NULL, NULL};
}
