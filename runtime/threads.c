/* threads.c - the host target: worker threads and loading of host kernels. See threads.h.
 *
 * Workers sleep on a condition between runs and take blocks from one atomic counter during a run, so that
 * uneven blocks balance. `turn` keeps runs apart; `lock` guards the fields below it. After a fork the child
 * has no workers: its runs go through the calling thread alone.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct worker {
    loom__pool *pool;
    pthread_t thread;
    void *scratch;
} worker;

struct loom__pool {
    const loom__memory *memory;
    pid_t process;
    int32_t num_workers; /* worker 0 is the caller of a run */
    int32_t num_started;
    size_t scratch_bytes;
    pthread_mutex_t turn;
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    uint64_t run; /* counts runs, so that a worker sees a new one */
    int32_t num_busy;
    bool ending;
    loom__host_function function;
    const void *args;
    int64_t num_blocks;
    atomic_llong next_block;
    worker workers[];
};

enum { SCRATCH_ALIGNMENT = 64 };

int32_t loom__num_processors(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int32_t)online : 1;
}

/* -- Runs ------------------------------------------------------------------------------------------------ */

static void *aligned_scratch(void *scratch) {
    return (void *)(((uintptr_t)scratch + SCRATCH_ALIGNMENT - 1) & ~(uintptr_t)(SCRATCH_ALIGNMENT - 1));
}

static void take_blocks(worker *w) {
    loom__pool *pool = w->pool;
    void *scratch = aligned_scratch(w->scratch);
    for (;;) {
        long long block = atomic_fetch_add_explicit(&pool->next_block, 1, memory_order_relaxed);
        if (block >= pool->num_blocks) return;
        pool->function(pool->args, block, scratch);
    }
}

static void *work(void *argument) {
    worker *w = argument;
    loom__pool *pool = w->pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->run == seen && !pool->ending) pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->ending) break;
        seen = pool->run;
        pthread_mutex_unlock(&pool->lock);
        take_blocks(w);
        pthread_mutex_lock(&pool->lock);
        if (--pool->num_busy == 0) pthread_cond_signal(&pool->idle);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

void loom__pool_run(loom__pool *pool, loom__host_function function, const void *args, int64_t num_blocks) {
    bool alone = num_blocks == 1 || pool->num_started == 0 || pool->process != getpid();
    pthread_mutex_lock(&pool->turn);
    pool->function = function;
    pool->args = args;
    pool->num_blocks = num_blocks;
    atomic_store_explicit(&pool->next_block, 0, memory_order_relaxed);
    if (!alone) {
        pthread_mutex_lock(&pool->lock);
        pool->num_busy = pool->num_started;
        pool->run++;
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
    }
    take_blocks(&pool->workers[0]);
    if (!alone) {
        pthread_mutex_lock(&pool->lock);
        while (pool->num_busy) pthread_cond_wait(&pool->idle, &pool->lock);
        pthread_mutex_unlock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->turn);
}

/* -- Pool ------------------------------------------------------------------------------------------------ */

loom_status loom__pool_create(const loom__memory *memory, int32_t num_threads, loom__pool **pool,
                              loom_error *error) {
    size_t bytes = sizeof **pool + (size_t)num_threads * sizeof(worker);
    loom__pool *made = memory->resize(memory->user, NULL, bytes);
    if (!made) return loom__fail_memory(error);
    memset(made, 0, bytes);
    made->memory = memory;
    made->process = getpid();
    made->num_workers = num_threads;
    pthread_mutex_init(&made->turn, NULL);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->work, NULL);
    pthread_cond_init(&made->idle, NULL);
    for (int32_t i = 0; i < num_threads; i++) made->workers[i].pool = made;
    /* The caller's signals are not for these threads. Fewer threads than asked for compute the same. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int32_t i = 1; i < num_threads; i++) {
        if (pthread_create(&made->workers[i].thread, NULL, work, &made->workers[i])) break;
        made->num_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    *pool = made;
    return LOOM_OK;
}

void loom__pool_destroy(loom__pool *pool) {
    if (!pool) return;
    if (pool->process == getpid()) {
        pthread_mutex_lock(&pool->lock);
        pool->ending = true;
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
        for (int32_t i = 1; i <= pool->num_started; i++) pthread_join(pool->workers[i].thread, NULL);
        pthread_cond_destroy(&pool->work);
        pthread_cond_destroy(&pool->idle);
        pthread_mutex_destroy(&pool->lock);
        pthread_mutex_destroy(&pool->turn);
    }
    const loom__memory *memory = pool->memory;
    for (int32_t i = 0; i < pool->num_workers; i++) {
        if (pool->workers[i].scratch) memory->resize(memory->user, pool->workers[i].scratch, 0);
    }
    memory->resize(memory->user, pool, 0);
}

loom_status loom__pool_reserve(loom__pool *pool, size_t scratch_bytes, loom_error *error) {
    loom_status status = LOOM_OK;
    pthread_mutex_lock(&pool->turn);
    if (scratch_bytes > pool->scratch_bytes) {
        for (int32_t i = 0; i < pool->num_workers; i++) {
            void *larger = pool->memory->resize(pool->memory->user, NULL, scratch_bytes + SCRATCH_ALIGNMENT);
            if (!larger) {
                status = loom__fail_memory(error);
                goto out;
            }
            if (pool->workers[i].scratch)
                pool->memory->resize(pool->memory->user, pool->workers[i].scratch, 0);
            pool->workers[i].scratch = larger;
        }
        pool->scratch_bytes = scratch_bytes;
    }
out:
    pthread_mutex_unlock(&pool->turn);
    return status;
}

/* -- Kernels --------------------------------------------------------------------------------------------- */

static bool write_all(int fd, const void *bytes, size_t num_bytes) {
    const char *at = bytes;
    while (num_bytes) {
        ssize_t done = write(fd, at, num_bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        at += done;
        num_bytes -= (size_t)done;
    }
    return true;
}

/* The descriptor stays open as long as the library: its number is the library's name to the dynamic linker,
 * and a second library of the same name would be taken for the first. */
static void open_from_memory(const void *binary, size_t binary_bytes, loom__host_module *module) {
    char path[64];
    module->fd = memfd_create("attnloom", MFD_CLOEXEC);
    if (module->fd < 0) return;
    snprintf(path, sizeof path, "/proc/self/fd/%d", module->fd);
    if (write_all(module->fd, binary, binary_bytes)) module->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!module->library) {
        close(module->fd);
        module->fd = -1;
    }
}

static void open_from_temporary(const char *tmpdir, const void *binary, size_t binary_bytes,
                                loom__host_module *module) {
    char path[4096];
    int length = snprintf(path, sizeof path, "%s/attnloom-XXXXXX", tmpdir ? tmpdir : "/tmp");
    if (length < 0 || (size_t)length >= sizeof path) return;
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0) return;
    if (write_all(fd, binary, binary_bytes)) module->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    close(fd);
    unlink(path);
}

loom_status loom__host_load(const loom_context *context, const char *path, const void *binary,
                            size_t binary_bytes, const char *symbol, loom__host_module *module,
                            loom_error *error) {
    *module = (loom__host_module){NULL, NULL, -1};
    if (*path) module->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!module->library) open_from_memory(binary, binary_bytes, module);
    if (!module->library) open_from_temporary(context->environment.tmpdir, binary, binary_bytes, module);
    if (!module->library) {
        const char *reason = dlerror();
        return loom__fail(error, LOOM_IO, "kernel", "the host kernel cannot be loaded: %s",
                          reason ? reason : "no reason given");
    }
    *(void **)&module->function = dlsym(module->library, symbol);
    if (!module->function) {
        loom__host_unload(module);
        return loom__fail(error, LOOM_IO, "kernel", "the host kernel's binary has no %s", symbol);
    }
    return LOOM_OK;
}

void loom__host_unload(loom__host_module *module) {
    if (module->library) dlclose(module->library);
    if (module->fd >= 0) close(module->fd);
    *module = (loom__host_module){NULL, NULL, -1};
}
