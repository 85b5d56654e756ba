/* context.c - creation and destruction of contexts; the only reader of environment variables.
 *
 * Called through attnloom.h. A context is one lock, one generator, the compilers found, the cache folder and
 * the devices in use. Fails with INVALID for options, MEMORY, IO where LOOM_GEN_DIR cannot be read.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "compile.h"
#include "device.h"
#include "generator.h"
#include "threads.h"

enum { MAX_THREADS = 1024, MAX_LOG_LEVEL = LOOM__LOG_LAUNCH };

/* The largest problems take some 10^7. */
static const uint64_t GENERATOR_INSTRUCTIONS = 2000000000;

/* The kernels of a plan may take that long on two cores. */
static const double CLAIM_SECONDS = 60;

/* -- Memory and lock ------------------------------------------------------------------------------------- */

static void *system_resize(void *user, void *block, size_t bytes) {
    (void)user;
    if (bytes == 0) {
        free(block);
        return NULL;
    }
    return realloc(block, bytes);
}

void loom__context_lock(loom_context *context) { pthread_mutex_lock(&context->lock); }

void loom__context_unlock(loom_context *context) { pthread_mutex_unlock(&context->lock); }

static int create_lock(pthread_mutex_t *lock) {
    pthread_mutexattr_t attributes;
    int failed = pthread_mutexattr_init(&attributes);
    if (failed) return failed;
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    failed = pthread_mutex_init(lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    return failed;
}

/* -- Environment and options ----------------------------------------------------------------------------- */

/* A variable set to nothing counts as not set. */
static loom_status read_variable(loom__arena *arena, const char *name, const char **value,
                                 loom_error *error) {
    const char *text = getenv(name);
    *value = NULL;
    if (!text || !*text) return LOOM_OK;
    *value = loom__arena_copy(arena, text, strlen(text));
    return *value ? LOOM_OK : loom__fail_memory(error);
}

static loom_status read_environment(loom_context *context, loom_error *error) {
    loom__environment *e = &context->environment;
    const struct {
        const char *name;
        const char **value;
    } variables[] = {
        {"LOOM_GEN_DIR", &e->loom_gen_dir},
        {"LOOM_NVRTC_OPTS", &e->loom_nvrtc_opts},
        {"LOOM_SCHED", &e->loom_sched},
        {"CC", &e->cc},
        {"PATH", &e->path},
        {"HOME", &e->home},
        {"XDG_CACHE_HOME", &e->xdg_cache_home},
        {"TMPDIR", &e->tmpdir},
        {"CUDA_HOME", &e->cuda_home},
        {"CUDA_PATH", &e->cuda_path},
        {"LD_LIBRARY_PATH", &e->ld_library_path},
        {"VIRTUAL_ENV", &e->virtual_env},
        {"CONDA_PREFIX", &e->conda_prefix},
    };
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
        LOOM_TRY(NULL, read_variable(&context->arena, variables[i].name, variables[i].value, error));
    }
    return LOOM_OK;
}

static loom_status read_log_level(loom_context *context, int32_t option, loom_error *error) {
    if (option != LOOM_LOG_FROM_ENVIRONMENT) {
        if (option < 0 || option > MAX_LOG_LEVEL) {
            return loom__fail(error, LOOM_INVALID, "options.log_level",
                              "log_level is %d, it must be 0 to %d or LOOM_LOG_FROM_ENVIRONMENT", option,
                              MAX_LOG_LEVEL);
        }
        context->log_level = option;
        return LOOM_OK;
    }
    const char *text = NULL;
    LOOM_TRY(NULL, read_variable(&context->arena, "LOOM_LOG", &text, error));
    context->log_level = LOOM__LOG_WARNING;
    if (!text) return LOOM_OK;
    char *end;
    errno = 0;
    long level = strtol(text, &end, 10);
    if (*end || errno || level < 0 || level > MAX_LOG_LEVEL) {
        return loom__fail(error, LOOM_INVALID, "LOOM_LOG",
                          "environment variable LOOM_LOG is '%.40s', it must be 0 to %d", text,
                          MAX_LOG_LEVEL);
    }
    context->log_level = (int32_t)level;
    return LOOM_OK;
}

/* LOOM_SCHED is "FORWARD" or "FORWARD / BACKWARD"; either may be empty. */
static loom_status split_schedule(loom_context *context, loom_error *error) {
    const char *text = context->environment.loom_sched;
    if (!text) return LOOM_OK;
    const char *slash = strchr(text, '/');
    const char *parts[2] = {text, slash ? slash + 1 : ""};
    size_t lengths[2] = {slash ? (size_t)(slash - text) : strlen(text), strlen(parts[1])};
    const char **targets[2] = {&context->schedule, &context->schedule_backward};
    for (int i = 0; i < 2; i++) {
        while (lengths[i] && *parts[i] == ' ') parts[i]++, lengths[i]--;
        while (lengths[i] && parts[i][lengths[i] - 1] == ' ') lengths[i]--;
        if (!lengths[i]) continue;
        *targets[i] = loom__arena_copy(&context->arena, parts[i], lengths[i]);
        if (!*targets[i]) return loom__fail_memory(error);
    }
    return LOOM_OK;
}

static loom_status read_options(loom_context *context, const loom_options *options, loom_error *error) {
    LOOM_TRY(NULL, read_environment(context, error));
    LOOM_TRY(NULL, read_log_level(context, options->log_level, error));
    LOOM_TRY(NULL, split_schedule(context, error));
    if (options->num_threads < 0 || options->num_threads > MAX_THREADS) {
        return loom__fail(error, LOOM_INVALID, "options.num_threads", "num_threads is %d, it must be 0 to %d",
                          options->num_threads, MAX_THREADS);
    }
    context->num_threads = options->num_threads ? options->num_threads : loom__num_processors();
    if (context->num_threads > MAX_THREADS) context->num_threads = MAX_THREADS;
    if (options->nvrtc_dir && *options->nvrtc_dir) {
        context->nvrtc_dir =
            loom__arena_copy(&context->arena, options->nvrtc_dir, strlen(options->nvrtc_dir));
        if (!context->nvrtc_dir) return loom__fail_memory(error);
    } else {
        LOOM_TRY(NULL, read_variable(&context->arena, "LOOM_NVRTC_DIR", &context->nvrtc_dir, error));
    }
    const char *cache_dir = options->cache_dir;
    if (!cache_dir) LOOM_TRY(NULL, read_variable(&context->arena, "LOOM_CACHE_DIR", &cache_dir, error));
    return loom__cache_open(context, cache_dir, error);
}

/* -- Create and destroy ---------------------------------------------------------------------------------- */

loom_status loom__context_create(const loom_options *options, const loom__hooks *hooks,
                                 loom_context **context, loom_error *error) {
    static const loom_options DEFAULTS = LOOM_OPTIONS_INIT;
    if (!context) return loom__fail(error, LOOM_INVALID, "context", "the place for the context is NULL");
    *context = NULL;
    if (!options) options = &DEFAULTS;
    LOOM_TRY(NULL, loom__check_size(options, options->size, sizeof *options, "options.size", error));

    loom__memory memory = hooks && hooks->memory.resize ? hooks->memory : (loom__memory){system_resize, NULL};
    loom_context *made = memory.resize(memory.user, NULL, sizeof *made);
    if (!made) return loom__fail_memory(error);
    memset(made, 0, sizeof *made);
    made->memory = memory;
    made->arena.memory = &made->memory;
    made->cache_dir = "";
    if (create_lock(&made->lock)) {
        memory.resize(memory.user, made, 0);
        return loom__fail(error, LOOM_MEMORY, "context", "the system refused to make a mutex");
    }
    if (create_lock(&made->tuning)) {
        pthread_mutex_destroy(&made->lock);
        memory.resize(memory.user, made, 0);
        return loom__fail(error, LOOM_MEMORY, "context", "the system refused to make a mutex");
    }
    if (pthread_cond_init(&made->claims_changed, NULL)) {
        pthread_mutex_destroy(&made->tuning);
        pthread_mutex_destroy(&made->lock);
        memory.resize(memory.user, made, 0);
        return loom__fail(error, LOOM_MEMORY, "context", "the system refused to make a condition variable");
    }
    made->generator_instructions =
        hooks && hooks->generator_instructions ? hooks->generator_instructions : GENERATOR_INSTRUCTIONS;
    made->claim_seconds = hooks && hooks->claim_seconds > 0 ? hooks->claim_seconds : CLAIM_SECONDS;
    if (hooks && hooks->driver) made->driver = hooks->driver;
    if (hooks) made->shipped_wisdom = hooks->shipped_wisdom;
    loom_status status = read_options(made, options, error);
    if (status != LOOM_OK) {
        loom_context_destroy(made);
        return status;
    }
    *context = made;
    return LOOM_OK;
}

loom_status loom_context_create(const loom_options *options, loom_context **context, loom_error *error) {
    return loom__context_create(options, NULL, context, error);
}

void loom_context_destroy(loom_context *context) {
    if (!context) return;
    loom__pool_destroy(context->pool);
    loom__driver_close(context);
    loom__generator_destroy(context);
    loom__arena_free(&context->arena);
    pthread_cond_destroy(&context->claims_changed);
    pthread_mutex_destroy(&context->tuning);
    pthread_mutex_destroy(&context->lock);
    loom__memory memory = context->memory;
    memory.resize(memory.user, context, 0);
}

loom_status loom_problem_canonical(loom_context *context, const char *problem, char *text, size_t capacity,
                                   size_t *needed, loom_error *error) {
    if (!context) return loom__fail(error, LOOM_INVALID, "context", "context is NULL");
    if (!problem) return loom__fail(error, LOOM_INVALID, "problem", "the problem text is NULL");
    if (!text && capacity)
        return loom__fail(error, LOOM_INVALID, "text", "text is NULL with a capacity of %zu", capacity);
    loom__arena arena = {&context->memory, NULL};
    loom__problem_info info;
    loom_status status = LOOM_OK;
    LOOM_TRY_OUT(context, loom__problem_query(context, problem, &arena, &info, error));
    size_t size = strlen(info.text) + 1;
    if (needed) *needed = size;
    if (size > capacity) {
        status = loom__fail(error, LOOM_INVALID, "capacity", "capacity is %zu bytes, the text needs %zu",
                            capacity, size);
        goto out;
    }
    memcpy(text, info.text, size);
out:
    loom__arena_free(&arena);
    return status;
}
