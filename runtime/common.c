/* common.c - errors, log, arenas. Called by every file of the runtime; needs no lock. */
#define _GNU_SOURCE
#include "common.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* -- Errors ---------------------------------------------------------------------------------------------- */

const char *loom_status_name(loom_status status) {
    static const char *const NAMES[] = {"OK",     "INVALID", "UNSUPPORTED", "NOT_FOUND", "COMPILE",
                                        "DRIVER", "MEMORY",  "IO",          "INTERNAL"};
    if (status < 0 || (size_t)status >= sizeof NAMES / sizeof NAMES[0]) return "UNKNOWN";
    return NAMES[status];
}

int32_t loom_version(void) {
    return LOOM_VERSION_MAJOR * 10000 + LOOM_VERSION_MINOR * 100 + LOOM_VERSION_PATCH;
}

loom_status loom__fail(loom_error *error, loom_status status, const char *field, const char *format, ...) {
    if (!error || error->size < sizeof *error) return status;
    error->status = status;
    error->text_offset = -1;
    snprintf(error->field, sizeof error->field, "%s", field);
    va_list list;
    va_start(list, format);
    vsnprintf(error->text, sizeof error->text, format, list);
    va_end(list);
    return status;
}

loom_status loom__fail_memory(loom_error *error) {
    return loom__fail(error, LOOM_MEMORY, "memory", "out of host memory");
}

void loom__trace(const loom_context *context, loom_status status, const char *file, int line) {
    if (context)
        loom__log(context, LOOM__LOG_SOURCE, "error status=%s at=%s:%d", loom_status_name(status), file,
                  line);
}

loom_status loom__check_size(const void *object, size_t size, size_t known, const char *field,
                             loom_error *error) {
    enum { MAX_STRUCT_BYTES = 1 << 16 };
    if (size < known || size > MAX_STRUCT_BYTES) {
        return loom__fail(
            error, LOOM_INVALID, field,
            "size is %zu, this library needs %zu: initialise the struct with its LOOM_*_INIT macro", size,
            known);
    }
    const unsigned char *bytes = object;
    for (size_t i = known; i < size; i++) {
        if (bytes[i]) {
            return loom__fail(error, LOOM_UNSUPPORTED, field,
                              "the struct has %zu bytes and uses a member that a newer attnloom.h appended; "
                              "this library is %d.%d.%d",
                              size, LOOM_VERSION_MAJOR, LOOM_VERSION_MINOR, LOOM_VERSION_PATCH);
        }
    }
    return LOOM_OK;
}

/* -- Log ------------------------------------------------------------------------------------------------- */

static void write_stderr(const char *text, size_t length) {
    ssize_t written = write(STDERR_FILENO, text, length);
    (void)written; /* a log that cannot be written must not fail the work */
}

void loom__log(const loom_context *context, int32_t level, const char *format, ...) {
    if (context->log_level < level) return;
    /* One write per line, so that lines of threads and processes do not mix; sources may be longer. */
    static const char PREFIX[] = "attnloom: ";
    enum { PREFIX_LENGTH = sizeof PREFIX - 1, LINE_BYTES = 4096 };
    char line[LINE_BYTES];
    memcpy(line, PREFIX, PREFIX_LENGTH);
    va_list list, again;
    va_start(list, format);
    va_copy(again, list);
    int length = vsnprintf(line + PREFIX_LENGTH, sizeof line - PREFIX_LENGTH, format, list);
    va_end(list);
    if (length >= 0 && (size_t)length < sizeof line - PREFIX_LENGTH) {
        line[PREFIX_LENGTH + length] = '\n';
        write_stderr(line, (size_t)(PREFIX_LENGTH + length + 1));
    } else if (length >= 0) {
        write_stderr(PREFIX, PREFIX_LENGTH);
        vdprintf(STDERR_FILENO, format, again);
        write_stderr("\n", 1);
    }
    va_end(again);
}

double loom__now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* -- Targets --------------------------------------------------------------------------------------------- */

const char *const loom__target_names[LOOM__NUM_TARGETS] = {"host", "mma", "hopper"};

/* -- Memory ---------------------------------------------------------------------------------------------- */

struct loom__chunk {
    loom__chunk *next;
    size_t used, capacity;
    _Alignas(16) char bytes[];
};

enum { CHUNK_BYTES = 16 * 1024, ALIGNMENT = 16 };

void *loom__arena_alloc(loom__arena *arena, size_t bytes) {
    size_t rounded = (bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
    if (rounded < bytes) return NULL;
    loom__chunk *chunk = arena->chunks;
    if (!chunk || chunk->capacity - chunk->used < rounded) {
        size_t capacity = rounded > CHUNK_BYTES ? rounded : CHUNK_BYTES;
        chunk = arena->memory->resize(arena->memory->user, NULL, sizeof *chunk + capacity);
        if (!chunk) return NULL;
        chunk->used = 0;
        chunk->capacity = capacity;
        /* A chunk made for one large block goes behind the one that still has room. */
        if (arena->chunks && rounded > CHUNK_BYTES) {
            chunk->next = arena->chunks->next;
            arena->chunks->next = chunk;
        } else {
            chunk->next = arena->chunks;
            arena->chunks = chunk;
        }
    }
    void *block = chunk->bytes + chunk->used;
    chunk->used += rounded;
    return memset(block, 0, bytes);
}

char *loom__arena_copy(loom__arena *arena, const void *bytes, size_t num_bytes) {
    char *copy = num_bytes + 1 ? loom__arena_alloc(arena, num_bytes + 1) : NULL;
    if (copy && num_bytes) memcpy(copy, bytes, num_bytes);
    return copy;
}

char *loom__arena_print(loom__arena *arena, const char *format, ...) {
    va_list list, again;
    va_start(list, format);
    va_copy(again, list);
    int length = vsnprintf(NULL, 0, format, list);
    va_end(list);
    char *text = length < 0 ? NULL : loom__arena_alloc(arena, (size_t)length + 1);
    if (text) vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    return text;
}

void loom__arena_adopt(loom__arena *arena, loom__arena *from) {
    loom__chunk **end = &from->chunks;
    if (!*end) return;
    while (*end) end = &(*end)->next;
    *end = arena->chunks;
    arena->chunks = from->chunks;
    from->chunks = NULL;
}

void loom__arena_free(loom__arena *arena) {
    while (arena->chunks) {
        loom__chunk *next = arena->chunks->next;
        arena->memory->resize(arena->memory->user, arena->chunks, 0);
        arena->chunks = next;
    }
}

/* -- Files ----------------------------------------------------------------------------------------------- */

enum { MAX_FILE_BYTES = INT32_MAX };

loom_status loom__read_file(loom__arena *arena, const char *path, const char **bytes, size_t *num_bytes,
                            loom_error *error) {
    loom_status status = LOOM_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat facts;
    if (fd < 0 || fstat(fd, &facts)) {
        status = loom__fail(error, LOOM_IO, path, "cannot read %s: %s", path, strerror(errno));
        goto out;
    }
    if (!S_ISREG(facts.st_mode)) {
        status = loom__fail(error, LOOM_IO, path, "cannot read %s: it is not a regular file", path);
        goto out;
    }
    if (facts.st_size > MAX_FILE_BYTES) {
        status = loom__fail(error, LOOM_IO, path, "cannot read %s: it is larger than %d bytes", path,
                            MAX_FILE_BYTES);
        goto out;
    }
    char *text = loom__arena_alloc(arena, (size_t)facts.st_size + 1);
    if (!text) {
        status = loom__fail_memory(error);
        goto out;
    }
    size_t done = 0;
    while (done < (size_t)facts.st_size) {
        ssize_t got = read(fd, text + done, (size_t)facts.st_size - done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        done += (size_t)got;
    }
    text[done] = 0;
    *bytes = text;
    *num_bytes = done;
out:
    if (fd >= 0) close(fd);
    return status;
}
