/* memory.c - memory, copies and timing marks of the CPU or a GPU. Called by tune.c, harness.c and the command
 * line; one thread. On a GPU the device's primary context is current from open to close. Fails with MEMORY or
 * DRIVER. */
#include "memory.h"

#include <stdlib.h>
#include <string.h>

#include "device.h"

enum { ALIGN_BYTES = 256 };

typedef struct block {
    struct block *next;
    void *data;
} block;

struct loom__device_memory {
    loom_context *context;
    const loom__device *device; /* NULL: the CPU */
    loom__cuda_handle stream;   /* NULL: the default one */
    int capture_mode;           /* of the thread, before it was set apart */
    block *blocks;
    size_t held;                                             /* bytes of the blocks */
    loom__cuda_handle events[LOOM__DEVICE_MEMORY_MAX_MARKS]; /* NULL until used */
    double moments[LOOM__DEVICE_MEMORY_MAX_MARKS];
};

static loom__device_ptr pointer_of(const void *data) { return (loom__device_ptr)(uintptr_t)data; }

loom_status loom__device_memory_open(loom_context *context, int32_t device, loom__device_memory **memory,
                                     loom_error *error) {
    loom__device_memory *made = calloc(1, sizeof *made);
    loom_status status = LOOM_OK;
    if (!made) return loom__fail_memory(error);
    made->context = context;
    if (device != LOOM_DEVICE_HOST) status = loom__device_open(context, device, &made->device, error);
    if (!status && made->device) status = loom__device_enter(context, made->device, error);
    if (status)
        free(made);
    else
        *memory = made;
    return status;
}

loom_status loom__device_memory_set_apart(loom__device_memory *memory, loom_error *error) {
    enum { NON_BLOCKING = 1 };
    const loom__driver_api *driver = memory->context->driver;
    if (!memory->device) return LOOM_OK;
    memory->capture_mode = loom__device_relax(driver);
    loom_status status = loom__driver_check(driver, driver->stream_create(&memory->stream, NON_BLOCKING),
                                            "cuStreamCreate", error);
    if (status) loom__device_restore(driver, memory->capture_mode);
    return status;
}

void *loom__device_memory_stream(const loom__device_memory *memory) { return memory->stream; }

void loom__device_memory_close(loom__device_memory *memory) {
    if (!memory) return;
    const loom__driver_api *driver = memory->context->driver;
    while (memory->blocks) {
        block *first = memory->blocks;
        memory->blocks = first->next;
        if (memory->device)
            driver->memory_free(pointer_of(first->data));
        else
            free(first->data);
        free(first);
    }
    for (int32_t i = 0; i < LOOM__DEVICE_MEMORY_MAX_MARKS; i++)
        if (memory->events[i]) driver->event_destroy(memory->events[i]);
    if (memory->stream) {
        driver->stream_destroy(memory->stream);
        loom__device_restore(driver, memory->capture_mode);
    }
    if (memory->device) loom__device_leave(memory->context);
    free(memory);
}

loom_status loom__device_memory_alloc(loom__device_memory *memory, size_t bytes, void **data,
                                      loom_error *error) {
    size_t rounded = (bytes / ALIGN_BYTES + 1) * ALIGN_BYTES;
    block *made = calloc(1, sizeof *made);
    if (!made) return loom__fail_memory(error);
    if (memory->device) {
        const loom__driver_api *driver = memory->context->driver;
        loom__device_ptr pointer = 0;
        loom_status status =
            loom__driver_check(driver, driver->memory_alloc(&pointer, rounded), "cuMemAlloc", error);
        if (status) {
            free(made);
            return status;
        }
        made->data = (void *)(uintptr_t)pointer;
    } else {
        made->data = aligned_alloc(ALIGN_BYTES, rounded);
        if (!made->data) {
            free(made);
            return loom__fail_memory(error);
        }
    }
    made->next = memory->blocks;
    memory->blocks = made;
    memory->held += rounded;
    *data = made->data;
    return LOOM_OK;
}

size_t loom__device_memory_held(const loom__device_memory *memory) { return memory->held; }

loom_status loom__device_memory_upload(loom__device_memory *memory, void *to, const void *from, size_t bytes,
                                       loom_error *error) {
    const loom__driver_api *driver = memory->context->driver;
    if (!bytes) return LOOM_OK;
    if (memory->stream) {
        LOOM_TRY(NULL, loom__driver_check(
                           driver, driver->memory_upload_async(pointer_of(to), from, bytes, memory->stream),
                           "cuMemcpyHtoDAsync", error));
        return loom__device_memory_sync(memory, error); /* `from` is the caller's again */
    }
    if (memory->device)
        return loom__driver_check(driver, driver->memory_upload(pointer_of(to), from, bytes), "cuMemcpyHtoD",
                                  error);
    memcpy(to, from, bytes);
    return LOOM_OK;
}

loom_status loom__device_memory_download(loom__device_memory *memory, void *to, const void *from,
                                         size_t bytes, loom_error *error) {
    const loom__driver_api *driver = memory->context->driver;
    if (!bytes) return LOOM_OK;
    if (memory->stream) {
        LOOM_TRY(NULL, loom__driver_check(
                           driver, driver->memory_download_async(to, pointer_of(from), bytes, memory->stream),
                           "cuMemcpyDtoHAsync", error));
        return loom__device_memory_sync(memory, error);
    }
    if (memory->device)
        return loom__driver_check(driver, driver->memory_download(to, pointer_of(from), bytes),
                                  "cuMemcpyDtoH", error);
    memcpy(to, from, bytes);
    return LOOM_OK;
}

loom_status loom__device_memory_sync(loom__device_memory *memory, loom_error *error) {
    const loom__driver_api *driver = memory->context->driver;
    if (!memory->device) return LOOM_OK;
    if (memory->stream)
        return loom__driver_check(driver, driver->stream_synchronize(memory->stream), "cuStreamSynchronize",
                                  error);
    return loom__driver_check(driver, driver->context_synchronize(), "cuCtxSynchronize", error);
}

loom_status loom__device_memory_mark(loom__device_memory *memory, int32_t mark, loom_error *error) {
    const loom__driver_api *driver = memory->context->driver;
    if (!memory->device) {
        memory->moments[mark] = loom__now();
        return LOOM_OK;
    }
    if (!memory->events[mark])
        LOOM_TRY(NULL, loom__driver_check(driver, driver->event_create(&memory->events[mark], 0),
                                          "cuEventCreate", error));
    return loom__driver_check(driver, driver->event_record(memory->events[mark], memory->stream),
                              "cuEventRecord", error);
}

loom_status loom__device_memory_elapsed(loom__device_memory *memory, int32_t from, int32_t to, double *ms,
                                        loom_error *error) {
    const loom__driver_api *driver = memory->context->driver;
    float elapsed = 0;
    if (!memory->device) {
        *ms = (memory->moments[to] - memory->moments[from]) * 1e3;
        return LOOM_OK;
    }
    LOOM_TRY(NULL, loom__driver_check(
                       driver, driver->event_elapsed(&elapsed, memory->events[from], memory->events[to]),
                       "cuEventElapsedTime", error));
    *ms = elapsed;
    return LOOM_OK;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double loom__median(double *values, int32_t num) {
    qsort(values, (size_t)num, sizeof *values, compare_doubles);
    return values[num / 2];
}
