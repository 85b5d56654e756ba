/* common.h - what the runtime's files share: errors, logs, memory, the context.
 *
 * Memory comes from the context's allocator, so that tests can make any allocation fail. What lives as long
 * as a plan or a context lies in its arena and is freed with it.
 */
#ifndef LOOM_COMMON_H
#define LOOM_COMMON_H

#include <pthread.h>
#include <stdbool.h>

#include "attnloom.h"

#if defined(__GNUC__)
#define LOOM__PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define LOOM__PRINTF(text, first)
#endif

/* -- Errors ---------------------------------------------------------------------------------------------- */

/* Fills *error (may be NULL) and returns status. */
loom_status loom__fail(loom_error *error, loom_status status, const char *field, const char *format, ...)
    LOOM__PRINTF(4, 5);

/* The same for a failed allocation. */
loom_status loom__fail_memory(loom_error *error);

/* Forwards a failure, with its place in the log at level 4. `context` may be NULL. */
#define LOOM_TRY(context, call)                                                                              \
    do {                                                                                                     \
        loom_status loom__status = (call);                                                                   \
        if (loom__status != LOOM_OK) {                                                                       \
            loom__trace((context), loom__status, __FILE__, __LINE__);                                        \
            return loom__status;                                                                             \
        }                                                                                                    \
    } while (0)

/* The same for functions that free at a label `out` and return `status`. */
#define LOOM_TRY_OUT(context, call)                                                                          \
    do {                                                                                                     \
        status = (call);                                                                                     \
        if (status != LOOM_OK) {                                                                             \
            loom__trace((context), status, __FILE__, __LINE__);                                              \
            goto out;                                                                                        \
        }                                                                                                    \
    } while (0)

void loom__trace(const loom_context *context, loom_status status, const char *file, int line);

/* Checks the `size` member that opens a public struct: what a newer header appended must be zero. */
loom_status loom__check_size(const void *object, size_t size, size_t known, const char *field,
                             loom_error *error);

/* -- Log ------------------------------------------------------------------------------------------------- */

enum {
    LOOM__LOG_WARNING = 1,
    LOOM__LOG_COMPILE = 2,
    LOOM__LOG_CANDIDATE = 3,
    LOOM__LOG_SOURCE = 4,
    LOOM__LOG_LAUNCH = 5
};

/* One line `attnloom: phase key=value ...` on stderr, if the context's level is at least `level`. */
void loom__log(const loom_context *context, int32_t level, const char *format, ...) LOOM__PRINTF(3, 4);

/* -- Memory ---------------------------------------------------------------------------------------------- */

/* resize(user, NULL, n) allocates, resize(user, block, 0) frees, NULL means out of memory. Called by many
 * threads. */
typedef struct loom__memory {
    void *(*resize)(void *user, void *block, size_t bytes);
    void *user;
} loom__memory;

typedef struct loom__chunk loom__chunk;

/* Blocks that are freed together. Not for two threads at once. */
typedef struct loom__arena {
    const loom__memory *memory;
    loom__chunk *chunks;
} loom__arena;

void *loom__arena_alloc(loom__arena *arena, size_t bytes);                       /* zeroed; NULL: no memory */
char *loom__arena_copy(loom__arena *arena, const void *bytes, size_t num_bytes); /* with a 0 behind */
char *loom__arena_print(loom__arena *arena, const char *format, ...) LOOM__PRINTF(2, 3);
void loom__arena_adopt(loom__arena *arena, loom__arena *from); /* from becomes empty */
void loom__arena_free(loom__arena *arena);

/* -- Targets --------------------------------------------------------------------------------------------- */

enum { LOOM__NUM_TARGETS = 3 };
extern const char *const loom__target_names[LOOM__NUM_TARGETS];

/* -- Context --------------------------------------------------------------------------------------------- */

/* Environment variables, read once by loom_context_create; NULL where not set or empty. */
typedef struct loom__environment {
    const char *loom_gen_dir, *loom_nvrtc_opts, *loom_sched;
    const char *cc, *path, *home, *xdg_cache_home, *tmpdir;
    const char *cuda_home, *cuda_path, *ld_library_path, *virtual_env, *conda_prefix;
} loom__environment;

typedef struct loom__generator loom__generator;
typedef struct loom__pool loom__pool;
typedef struct loom__driver_api loom__driver_api;
typedef struct loom__device loom__device;
typedef struct loom__claim loom__claim;
typedef struct loom__pack loom__pack;
typedef struct loom__wisdom loom__wisdom;

enum { LOOM__MAX_DEVICES = 64 };

/* A compiler that was looked for: either found, or why not. Facts are owned by the context. */
typedef struct loom__toolchain {
    bool searched;
    loom_status status;
    loom_error failure;
    const char *path;     /* of the library or program */
    const char *name;     /* "nvrtc 13.0", "cc 12.2.0" */
    const char *identity; /* lines of the cache key: compiler, version, options */
    const char *triple;   /* host: "x86_64-linux-gnu" */
    int32_t major, minor; /* NVRTC */
    void *library;        /* NVRTC: NULL until the first compile */
} loom__toolchain;

struct loom_context {
    loom__memory memory;
    loom__arena arena;
    pthread_mutex_t lock; /* recursive; guards all below that changes after creation */
    int32_t log_level;
    int32_t num_threads;
    loom__environment environment;
    const char *nvrtc_dir; /* NULL: not given */
    const char *schedule;  /* LOOM_SCHED, split at '/': forward and backward, NULL: not given */
    const char *schedule_backward;
    const char *cache_dir; /* "": nothing is kept on disk */
    bool cache_warned;
    bool compile_reported; /* the first long compile was */
    loom__claim *claims;   /* kernels being compiled, see plan.c */
    pthread_cond_t claims_changed;
    double claim_seconds;            /* most to wait for another process to compile */
    loom__pack *packs;               /* in the order in which they were added; they stay */
    loom__wisdom *wisdom;            /* NULL until first asked for */
    const char *shipped_wisdom;      /* a text in the place of the library's own, NULL: none */
    pthread_mutex_t tuning;          /* recursive; held by who times schedules, taken before `lock` */
    uint64_t generator_instructions; /* limit of a visit to Lua files of LOOM_GEN_DIR */
    loom__generator *generator; /* NULL until first used */
    loom__toolchain nvrtc, cc;
    bool driver_searched;
    loom_status driver_status;
    loom_error driver_failure;
    const loom__driver_api *driver;
    void *driver_library;
    int32_t num_devices;
    loom__device *devices[LOOM__MAX_DEVICES]; /* NULL until first used */
    loom__pool *pool;                         /* NULL until the first host plan */
};

/* What tests put in place of the system's. Zero members keep the system's. */
typedef struct loom__hooks {
    loom__memory memory;
    const loom__driver_api *driver;
    uint64_t generator_instructions;
    double claim_seconds;
    const char *shipped_wisdom;
} loom__hooks;

loom_status loom__context_create(const loom_options *options, const loom__hooks *hooks,
                                 loom_context **context, loom_error *error);

void loom__context_lock(loom_context *context);
void loom__context_unlock(loom_context *context);

/* Warns once per context about the cache, whatever goes wrong later. */
void loom__cache_warn(loom_context *context, const char *format, ...) LOOM__PRINTF(2, 3);

/* Seconds of a monotonic clock. */
double loom__now(void);

/* 32 hex digits and a 0. */
void loom__digest(const void *bytes, size_t num_bytes, char text[33]);

/* Reads a whole file into the arena, with a 0 behind. */
loom_status loom__read_file(loom__arena *arena, const char *path, const char **bytes, size_t *num_bytes,
                            loom_error *error);

#endif
