/* device_rig.h - a CUDA driver with one device, whose facts a test sets. Included after runtime_rig.h. */
#ifndef LOOM_DEVICE_RIG_H
#define LOOM_DEVICE_RIG_H

#include "device.h"

static struct fake {
    int version, major, minor, smem_bytes;
    int loaded; /* modules */
    int launches;
    int refusals; /* modules that are not loaded, before others are */
} fake;

static int f_init(unsigned flags) { return (int)flags; }
static int f_version(int *version) { return *version = fake.version, 0; }
static int f_count(int *count) { return *count = 1, 0; }
static int f_get(int *device, int ordinal) { return *device = ordinal, 0; }
static int f_name(char *name, int capacity, int device) {
    return snprintf(name, (size_t)capacity, "Test %d", device) < 0;
}
static int f_attribute(int *value, int attribute, int device) {
    *value = attribute == 75   ? fake.major
             : attribute == 76 ? fake.minor
             : attribute == 97 ? fake.smem_bytes
                               : 100;
    return device;
}
static int f_memory(size_t *bytes, int device) { return *bytes = 1 << 30, device; }
static int f_error(int result, const char **name) { return *name = "CUDA_ERROR_INVALID_IMAGE", result < 0; }
static int f_retain(loom__cuda_handle *context, int device) { return *context = &fake, device; }
static int f_release(int device) { return device; }
static int f_push(loom__cuda_handle context) { return context != &fake; }
static int f_pop(loom__cuda_handle *context) { return *context = &fake, 0; }
static int f_current(loom__cuda_handle *context) { return *context = &fake, 0; }
static int f_load(loom__cuda_handle *module, const void *image) {
    if (fake.refusals && fake.refusals--) return 200;
    fake.loaded++;
    return *module = (loom__cuda_handle)(uintptr_t)image, 0;
}
static int f_unload(loom__cuda_handle module) { return fake.loaded--, module == NULL; }
static int f_function(loom__cuda_handle *function, loom__cuda_handle module, const char *name) {
    *function = (loom__cuda_handle)(uintptr_t)name;
    return !strstr(module, name); /* the stand-in's binary is its source */
}
static int f_launch(loom__cuda_handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                    unsigned block_x, unsigned block_y, unsigned block_z, unsigned smem_bytes,
                    loom__cuda_handle stream, void **parameters, void **extra) {
    (void)function, (void)smem_bytes, (void)stream, (void)parameters;
    fake.launches++;
    return !grid_x || grid_y != 1 || grid_z != 1 || !block_x || block_y != 1 || block_z != 1 || extra;
}
static int f_encode(void *map, int type, unsigned rank, void *address, const uint64_t *extents,
                    const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                    int swizzle, int promotion, int fill) {
    (void)type, (void)rank, (void)extents, (void)strides, (void)box, (void)steps, (void)interleave,
        (void)swizzle;
    (void)promotion, (void)fill;
    return !map || !address;
}
static int f_set(loom__cuda_handle function, int attribute, int value) {
    return !function || attribute < 0 || value < 0;
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

/* A context with a device of that compute capability and with the stand-in for NVRTC. */
static loom_context *context_for(int major, int minor) {
    static const loom__hooks HOOKS = {.driver = &DRIVER};
    fake = (struct fake){.version = 12040, .major = major, .minor = minor, .smem_bytes = 232448};
    setenv("LOOM_NVRTC_DIR", rig_nvrtc(), 1);
    return rig_context(&HOOKS);
}

#endif
