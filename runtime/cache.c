/* cache.c - compiled kernels on disk. See cache.h for the layout and the rules.
 *
 * Folders and files are made with modes 0700 and 0600; a folder or file of another user is not read. Staging
 * folders are held by a flock, which the system releases with the process, so that what a killed process left
 * is recognised and removed. All names are looked up below an open folder, so links cannot lead elsewhere.
 */
#define _GNU_SOURCE
#include "cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char FORMAT[] = "attnloom cache 1";
static const char STAGING[] = ".staging-", TRASH[] = ".trash-", TEMPORARY[] = ".certificate-";
static const char CLAIM[] = ".claim-"; /* and the name of an entry that is being built */

enum { MAX_META_BYTES = 1 << 20, MAX_FILE_BYTES = 1 << 28, NAME_BYTES = 256, SLUG_BYTES = 120 };

const char *loom__cache_format(void) { return FORMAT; }

void loom__cache_warn(loom_context *context, const char *format, ...) {
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    loom__context_lock(context);
    bool first = !context->cache_warned;
    context->cache_warned = true;
    loom__context_unlock(context);
    loom__log(context, first ? LOOM__LOG_WARNING : LOOM__LOG_COMPILE, "cache %s", text);
}

/* -- Choosing the folder --------------------------------------------------------------------------------- */

static loom_status set_folder(loom_context *context, char *path, loom_error *error) {
    if (!path) return loom__fail_memory(error);
    for (size_t length = strlen(path); length > 1 && path[length - 1] == '/'; length--) path[length - 1] = 0;
    context->cache_dir = path;
    return LOOM_OK;
}

/* The folder may be absent, but what is there must be a folder of ours. */
static const char *folder_fault(const char *path) {
    struct stat facts;
    if (stat(path, &facts)) return errno == ENOENT ? NULL : strerror(errno);
    if (!S_ISDIR(facts.st_mode)) return "it is not a folder";
    if (facts.st_uid != geteuid()) return "it belongs to another user";
    return NULL;
}

loom_status loom__cache_open(loom_context *context, const char *dir, loom_error *error) {
    const loom__environment *e = &context->environment;
    loom__arena *arena = &context->arena;
    context->cache_dir = "";
    if (dir && !*dir) return LOOM_OK;
    if (dir && *dir != '/') {
        char current[4096];
        if (!getcwd(current, sizeof current)) {
            loom__cache_warn(context, "off: the current folder is not known, so '%s' is not either: %s", dir,
                             strerror(errno));
            return LOOM_OK;
        }
        LOOM_TRY(context, set_folder(context, loom__arena_print(arena, "%s/%s", current, dir), error));
    } else if (dir) {
        LOOM_TRY(context, set_folder(context, loom__arena_copy(arena, dir, strlen(dir)), error));
    } else if (e->xdg_cache_home && *e->xdg_cache_home == '/') {
        LOOM_TRY(context,
                 set_folder(context, loom__arena_print(arena, "%s/attnloom", e->xdg_cache_home), error));
    } else if (e->home && *e->home == '/') {
        /* Only a home that is there and ours: one must not be made by writing a cache. */
        struct stat facts;
        const char *fault = stat(e->home, &facts) ? strerror(errno) : folder_fault(e->home);
        if (fault) {
            loom__cache_warn(context, "off, kernels stay in memory: HOME is %s: %s; set LOOM_CACHE_DIR",
                             e->home, fault);
            return LOOM_OK;
        }
        LOOM_TRY(context,
                 set_folder(context, loom__arena_print(arena, "%s/.cache/attnloom", e->home), error));
    } else {
        loom__cache_warn(context, "off, kernels stay in memory: HOME is %s; set LOOM_CACHE_DIR",
                         e->home ? "not an absolute path" : "not set");
        return LOOM_OK;
    }
    const char *fault = folder_fault(context->cache_dir);
    if (fault) {
        loom__cache_warn(context, "off, kernels stay in memory: %s: %s", context->cache_dir, fault);
        context->cache_dir = "";
    }
    return LOOM_OK;
}

/* Makes the folder and those above it. */
static int make_folders(loom_context *context) {
    char path[4096];
    size_t length = strlen(context->cache_dir);
    if (length >= sizeof path) return ENAMETOOLONG;
    memcpy(path, context->cache_dir, length + 1);
    for (char *at = path + 1;; at++) {
        if (*at && *at != '/') continue;
        char rest = *at;
        *at = 0;
        /* The system may refuse to make what is there already, for other reasons than that. */
        if (mkdir(path, 0700) && errno != EEXIST) {
            int reason = errno;
            if (!rest || access(path, X_OK)) return reason;
        }
        *at = rest;
        if (!rest) return 0;
    }
}

/* An open folder of ours, -1 and errno otherwise. */
static int open_folder(int parent, const char *name) {
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | (parent == AT_FDCWD ? 0 : O_NOFOLLOW));
    struct stat facts;
    if (fd >= 0 && (fstat(fd, &facts) || facts.st_uid != geteuid())) {
        close(fd);
        errno = EPERM;
        return -1;
    }
    return fd;
}

/* -- Names ----------------------------------------------------------------------------------------------- */

static void entry_name(char name[NAME_BYTES], const char *slug, const char *key) {
    char digest[33];
    loom__digest(key, strlen(key), digest);
    int length = 0;
    for (; slug[length] && length < SLUG_BYTES; length++) {
        char c = slug[length];
        bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
                     c == '-';
        name[length] = plain ? c : '-';
    }
    snprintf(name + length, NAME_BYTES - (size_t)length, "-%s", digest);
}

static void random_name(char name[NAME_BYTES], const char *prefix) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, GRND_NONBLOCK) != (ssize_t)sizeof number) {
        number = (uint64_t)(loom__now() * 1e9) ^ (uint64_t)(uintptr_t)name; /* uniqueness, not secrecy */
    }
    snprintf(name, NAME_BYTES, "%s%ld-%016llx", prefix, (long)getpid(), (unsigned long long)number);
}

/* Nothing else in the folder is ever touched: it may be one that serves other ends too. */
static bool is_entry_name(const char *name) {
    size_t length = strlen(name), digits = 32;
    return length > digits + 1 && name[length - digits - 1] == '-' &&
           strspn(name + length - digits, "0123456789abcdef") == digits;
}

static bool is_entry_file(const char *name) {
    static const char *const NAMES[] = {"kernel.c",     "kernel.cu", "kernel.so",
                                        "kernel.cubin", "meta.txt",  "certificate.txt"};
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) {
        if (strcmp(name, NAMES[i]) == 0) return true;
    }
    return strncmp(name, TEMPORARY, strlen(TEMPORARY)) == 0;
}

static const char *source_file(bool host) { return host ? "kernel.c" : "kernel.cu"; }
static const char *binary_file(bool host) { return host ? "kernel.so" : "kernel.cubin"; }

/* -- Removing -------------------------------------------------------------------------------------------- */

/* Names of an open folder, from the first on, which stays open; NULL: none. */
static DIR *list_folder(int fd) {
    int copy = dup(fd);
    DIR *dir = copy < 0 ? NULL : fdopendir(copy);
    if (dir) rewinddir(dir);
    if (!dir && copy >= 0) close(copy);
    return dir;
}

static void remove_contents(int fd) {
    DIR *dir = list_folder(fd);
    if (!dir) return;
    struct dirent *row;
    while ((row = readdir(dir))) {
        if (is_entry_file(row->d_name)) unlinkat(fd, row->d_name, 0);
    }
    closedir(dir);
}

/* Out of the way by one rename, then emptied: nobody sees half an entry. */
static bool remove_entry(int cache, const char *name) {
    char trash[NAME_BYTES];
    random_name(trash, TRASH);
    if (renameat(cache, name, cache, trash)) return false;
    int fd = open_folder(cache, trash);
    if (fd >= 0) {
        remove_contents(fd);
        close(fd);
    }
    return unlinkat(cache, trash, fd >= 0 ? AT_REMOVEDIR : 0) == 0;
}

static bool begins_with(const char *text, const char *prefix) {
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* Staging, trash and claims whose process is gone: the lock on them is free. */
static void remove_leftovers(int cache) {
    DIR *dir = list_folder(cache);
    if (!dir) return;
    struct dirent *row;
    while ((row = readdir(dir))) {
        bool claim = begins_with(row->d_name, CLAIM);
        if (!claim && !begins_with(row->d_name, STAGING) && !begins_with(row->d_name, TRASH)) continue;
        int fd = claim ? openat(cache, row->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)
                       : open_folder(cache, row->d_name);
        if (fd < 0) continue;
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
            if (!claim) remove_contents(fd);
            unlinkat(cache, row->d_name, claim ? 0 : AT_REMOVEDIR);
        }
        close(fd);
    }
    closedir(dir);
}

/* -- Reading --------------------------------------------------------------------------------------------- */

/* A whole file of ours below an open folder, with a 0 behind; NULL with the reason in *fault. */
static char *read_below(loom__arena *arena, int folder, const char *name, size_t limit, size_t *num_bytes,
                        const char **fault) {
    char *bytes = NULL;
    struct stat facts;
    int fd = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) {
        *fault = strerror(errno);
        return NULL;
    }
    if (fstat(fd, &facts) || !S_ISREG(facts.st_mode)) {
        *fault = "not a regular file";
    } else if (facts.st_uid != geteuid()) {
        *fault = "belongs to another user";
    } else if ((uint64_t)facts.st_size > limit) {
        *fault = "too large";
    } else if (!(bytes = loom__arena_alloc(arena, (size_t)facts.st_size + 1))) {
        *fault = "out of memory";
    } else {
        size_t done = 0;
        ssize_t got = 1;
        while (done < (size_t)facts.st_size && got > 0) {
            got = read(fd, bytes + done, (size_t)facts.st_size - done);
            if (got < 0 && errno == EINTR)
                got = 1;
            else if (got > 0)
                done += (size_t)got;
        }
        *num_bytes = done;
        if (done < (size_t)facts.st_size) {
            *fault = "cannot be read to its end";
            bytes = NULL;
        }
    }
    close(fd);
    return bytes;
}

typedef struct meta {
    char source_digest[33], binary_digest[33];
    size_t binary_bytes;
    int registers, spill_bytes, threads, milliseconds;
    int compiler, compiler_end; /* offsets */
    const char *key;
} meta;

/* meta.txt is lines `name value` in the order of `loom__entry_print`, then `key` and the key to the end of
 * the file. */
static bool parse_meta(const char *text, meta *m) {
    char format[64];
    int used = 0;
    int got = sscanf(
        text,
        "%63[^\n]\nsource_digest %32[0-9a-f]\nbinary_digest %32[0-9a-f]\nbinary_bytes %zu\nregisters %d\n"
        "spill_bytes %d\nthreads %d\nmilliseconds %d\ncompiler %n%*127[^\n]%n\nkey%n",
        format, m->source_digest, m->binary_digest, &m->binary_bytes, &m->registers, &m->spill_bytes,
        &m->threads, &m->milliseconds, &m->compiler, &m->compiler_end, &used);
    if (got != 8 || !used || text[used] != '\n' || strcmp(format, FORMAT)) return false;
    m->key = text + used + 1;
    return true;
}

char *loom__entry_print(loom__arena *arena, const loom__entry *entry, const char *key) {
    char source_digest[33], binary_digest[33];
    loom__digest(entry->source, strlen(entry->source), source_digest);
    loom__digest(entry->binary, entry->binary_bytes, binary_digest);
    /* Milliseconds as integers: the decimal point depends on the locale. */
    int milliseconds = (int)(entry->seconds * 1e3);
    return loom__arena_print(
        arena,
        "%s\nsource_digest %s\nbinary_digest %s\nbinary_bytes %zu\nregisters %d\nspill_bytes %d\n"
        "threads %d\nmilliseconds %d\ncompiler %s\nkey\n%s",
        FORMAT, source_digest, binary_digest, entry->binary_bytes, entry->registers, entry->spill_bytes,
        entry->threads, milliseconds, entry->compiler, key);
}

const char *loom__entry_read(char *text, const char *source, const void *binary, size_t binary_bytes,
                             loom__entry *entry, const char **key) {
    char digest[33];
    meta m;
    if (!parse_meta(text, &m)) return "meta.txt is damaged";
    *key = m.key;
    if (source) loom__digest(source, strlen(source), digest);
    if (source && strcmp(digest, m.source_digest)) return "the source is damaged";
    if (binary_bytes != m.binary_bytes) return "the binary is truncated";
    loom__digest(binary, binary_bytes, digest);
    if (strcmp(digest, m.binary_digest)) return "the binary is damaged";
    text[m.compiler_end] = 0;
    *entry = (loom__entry){.source = source ? source : "",
                           .binary = binary,
                           .binary_bytes = binary_bytes,
                           .compiler = text + m.compiler,
                           .certificate = "",
                           .registers = m.registers,
                           .spill_bytes = m.spill_bytes,
                           .threads = m.threads,
                           .seconds = 1e-3 * m.milliseconds,
                           .path = ""};
    return NULL;
}

const char *loom__key_value(const char *key, const char *name, size_t *length) {
    size_t name_length = strlen(name);
    for (const char *line = key; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        if (strncmp(line, name, name_length) || line[name_length] != ' ') continue;
        *length = strcspn(line, "\n") - name_length - 1;
        return line + name_length + 1;
    }
    return NULL;
}

/* Fills *entry from an open folder; returns what is wrong, NULL if nothing. `key` NULL: any, and *found gets
 * it. */
static const char *read_entry(loom__arena *arena, int folder, const char *key, bool host, loom__entry *entry,
                              const char **found) {
    const char *fault = NULL, *held = "";
    size_t num_bytes = 0, binary_bytes = 0;
    char *text = read_below(arena, folder, "meta.txt", MAX_META_BYTES, &num_bytes, &fault);
    const char *source =
        text ? read_below(arena, folder, source_file(host), MAX_FILE_BYTES, &num_bytes, &fault) : NULL;
    const char *binary =
        source ? read_below(arena, folder, binary_file(host), MAX_FILE_BYTES, &binary_bytes, &fault) : NULL;
    if (!binary) return fault;
    fault = loom__entry_read(text, source, binary, binary_bytes, entry, &held);
    if (found) *found = held;
    if (fault) return fault;
    if (key && strcmp(key, held)) return "meta.txt has another key";
    const char *certificate =
        read_below(arena, folder, "certificate.txt", MAX_META_BYTES, &num_bytes, &fault);
    if (certificate) entry->certificate = certificate;
    entry->host = host;
    return NULL;
}

bool loom__cache_load(loom_context *context, const char *slug, const char *key, bool host, loom__arena *arena,
                      loom__entry *entry) {
    char name[NAME_BYTES];
    if (!*context->cache_dir) return false;
    int cache = open_folder(AT_FDCWD, context->cache_dir);
    if (cache < 0) return false;
    entry_name(name, slug, key);
    bool hit = false;
    int folder = open_folder(cache, name);
    if (folder >= 0) {
        const char *fault = read_entry(arena, folder, key, host, entry, NULL);
        if (!fault) {
            entry->path = loom__arena_print(arena, "%s/%s", context->cache_dir, name);
            if (!entry->path) entry->path = "";
            hit = true;
        } else {
            loom__cache_warn(context, "removes %s/%s and builds it again: %s", context->cache_dir, name,
                             fault);
            remove_entry(cache, name);
        }
        close(folder);
    } else if (errno != ENOENT) {
        /* Another user's folder, a link, a file: left alone, and nothing is stored there. */
        loom__cache_warn(context, "does not use %s/%s: %s", context->cache_dir, name,
                         errno == EPERM ? "it belongs to another user" : strerror(errno));
    }
    close(cache);
    return hit;
}

/* The key of an open entry, NULL if it has none that can be read. */
static const char *read_key(loom__arena *arena, int folder) {
    const char *fault = NULL;
    size_t num_bytes = 0;
    meta m;
    char *text = read_below(arena, folder, "meta.txt", MAX_META_BYTES, &num_bytes, &fault);
    return text && parse_meta(text, &m) ? m.key : NULL;
}

loom_status loom__cache_keys(loom_context *context, const char *part, loom__arena *arena,
                             const char *const **keys, int32_t *num_keys, loom_error *error) {
    int cache = *context->cache_dir ? open_folder(AT_FDCWD, context->cache_dir) : -1;
    DIR *dir = cache < 0 ? NULL : list_folder(cache);
    const char **list = NULL;
    int32_t num = 0, capacity = 0;
    struct dirent *row;
    bool fits = true;
    while (dir && fits && (row = readdir(dir))) {
        if (!is_entry_name(row->d_name) || !strstr(row->d_name, part)) continue;
        int folder = open_folder(cache, row->d_name);
        const char *key = folder < 0 ? NULL : read_key(arena, folder);
        if (folder >= 0) close(folder);
        if (!key) continue;
        if (num == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            const char **larger = loom__arena_alloc(arena, (size_t)capacity * sizeof *larger);
            fits = larger != NULL;
            if (!fits) break;
            if (num) memcpy(larger, list, (size_t)num * sizeof *larger);
            list = larger;
        }
        list[num++] = key;
    }
    if (dir) closedir(dir);
    if (cache >= 0) close(cache);
    *keys = list;
    *num_keys = num;
    return fits ? LOOM_OK : loom__fail_memory(error);
}

void loom__cache_evict(loom_context *context, const char *path, const char *reason) {
    const char *name = strrchr(path, '/');
    int cache = *context->cache_dir && name ? open_folder(AT_FDCWD, context->cache_dir) : -1;
    if (cache < 0) return;
    loom__cache_warn(context, "removes %s and builds it again: %s", path, reason);
    remove_entry(cache, name + 1);
    close(cache);
}

/* -- Writing --------------------------------------------------------------------------------------------- */

static int write_below(int folder, const char *name, const void *bytes, size_t num_bytes) {
    int fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return errno;
    const char *at = bytes;
    int failed = 0;
    while (num_bytes && !failed) {
        ssize_t done = write(fd, at, num_bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) {
            failed = done < 0 ? errno : EIO;
        } else {
            at += done;
            num_bytes -= (size_t)done;
        }
    }
    if (!failed && fsync(fd)) failed = errno;
    if (close(fd) && !failed) failed = errno;
    return failed;
}

static int fill_staging(int staging, const loom__entry *entry, const char *text) {
    int failed = write_below(staging, source_file(entry->host), entry->source, strlen(entry->source));
    if (!failed) failed = write_below(staging, binary_file(entry->host), entry->binary, entry->binary_bytes);
    if (!failed) failed = write_below(staging, "meta.txt", text, strlen(text));
    if (!failed && fsync(staging)) failed = errno;
    return failed;
}

/* One try. *taken: the name has an entry already. */
static int publish(int cache, const char *name, const loom__entry *entry, const char *text, bool *taken) {
    char staging_name[NAME_BYTES];
    random_name(staging_name, STAGING);
    if (mkdirat(cache, staging_name, 0700)) return errno;
    int failed = 0;
    bool published = false;
    int staging = open_folder(cache, staging_name);
    if (staging < 0) {
        failed = errno;
    } else {
        flock(staging, LOCK_EX | LOCK_NB);
        failed = fill_staging(staging, entry, text);
        if (!failed) {
            published = renameat(cache, staging_name, cache, name) == 0;
            *taken = !published && (errno == EEXIST || errno == ENOTEMPTY || errno == ENOTDIR);
            if (!published && !*taken) failed = errno;
        }
        if (published)
            fsync(cache);
        else
            remove_contents(staging);
        close(staging);
    }
    if (!published) unlinkat(cache, staging_name, AT_REMOVEDIR);
    return failed;
}

/* Whether the winner of a race, or who ever was there first, left a sound entry of ours. */
static bool is_sound(loom_context *context, int cache, const char *name, const char *key, bool host) {
    loom__arena arena = {&context->memory, NULL};
    loom__entry entry;
    int folder = open_folder(cache, name);
    bool sound = folder >= 0 && !read_entry(&arena, folder, key, host, &entry, NULL);
    if (folder >= 0) close(folder);
    loom__arena_free(&arena);
    return sound;
}

void loom__cache_store(loom_context *context, const char *slug, const char *key, loom__arena *arena,
                       loom__entry *entry) {
    enum { MAX_TRIES = 3 };
    char name[NAME_BYTES];
    entry->path = "";
    if (!*context->cache_dir) return;
    int failed = make_folders(context);
    int cache = failed ? -1 : open_folder(AT_FDCWD, context->cache_dir);
    if (!failed && cache < 0) failed = errno;
    const char *text = failed ? NULL : loom__entry_print(arena, entry, key);
    if (!failed && !text) failed = ENOMEM;
    bool kept = false;
    if (!failed) {
        bool taken = false;
        entry_name(name, slug, key);
        failed = publish(cache, name, entry, text, &taken);
        /* Who cleans up may have met the staging folder before it was locked. */
        for (int i = 1; failed == ENOENT && i < MAX_TRIES; i++)
            failed = publish(cache, name, entry, text, &taken);
        kept = !failed && (!taken || is_sound(context, cache, name, key, entry->host));
        remove_leftovers(cache);
    }
    if (cache >= 0) close(cache);
    const char *path = kept ? loom__arena_print(arena, "%s/%s", context->cache_dir, name) : NULL;
    if (path) entry->path = path;
    if (failed)
        loom__cache_warn(context, "cannot keep a kernel in %s, it stays in memory: %s", context->cache_dir,
                         strerror(failed));
}

loom_status loom__cache_certify(loom_context *context, const char *path, const char *text,
                                loom_error *error) {
    char temporary[NAME_BYTES];
    (void)context;
    random_name(temporary, TEMPORARY);
    int folder = open_folder(AT_FDCWD, path);
    if (folder < 0)
        return loom__fail(error, LOOM_IO, "certificate", "cannot open %s: %s", path, strerror(errno));
    int failed = write_below(folder, temporary, text, strlen(text));
    if (!failed && renameat(folder, temporary, folder, "certificate.txt")) failed = errno;
    if (failed) unlinkat(folder, temporary, 0);
    close(folder);
    if (failed)
        return loom__fail(error, LOOM_IO, "certificate", "cannot write the certificate into %s: %s", path,
                          strerror(failed));
    return LOOM_OK;
}

/* -- Claims ---------------------------------------------------------------------------------------------- */

static void claim_name(char name[NAME_BYTES + sizeof CLAIM], const char *slug, const char *key) {
    memcpy(name, CLAIM, sizeof CLAIM);
    entry_name(name + sizeof CLAIM - 1, slug, key);
}

/* Whether a file is still the one of that name: who held it before has removed it with his claim. */
static bool is_named(int cache, const char *name, int fd) {
    struct stat own, named;
    return fstat(fd, &own) == 0 && fstatat(cache, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
           own.st_ino == named.st_ino && own.st_dev == named.st_dev;
}

/* One try: the claim, or -1 with errno EWOULDBLOCK while another process has it. */
static int try_claim(int cache, const char *name) {
    int fd = openat(cache, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (fd < 0) return -1;
    int failed = flock(fd, LOCK_EX | LOCK_NB) ? errno : 0;
    if (!failed && is_named(cache, name, fd)) return fd;
    close(fd);
    errno = failed ? failed : EWOULDBLOCK;
    return -1;
}

static const struct timespec PAUSE = {0, 5000000}; /* between two tries */

int loom__cache_claim(loom_context *context, const char *slug, const char *key, double end) {
    char name[NAME_BYTES + sizeof CLAIM];
    int cache =
        *context->cache_dir && !make_folders(context) ? open_folder(AT_FDCWD, context->cache_dir) : -1;
    if (cache < 0) return -1;
    claim_name(name, slug, key);
    int claim = try_claim(cache, name);
    while (claim < 0 && errno == EWOULDBLOCK && loom__now() < end) {
        nanosleep(&PAUSE, NULL);
        claim = try_claim(cache, name);
    }
    close(cache);
    return claim;
}

void loom__cache_unclaim(loom_context *context, const char *slug, const char *key, int claim) {
    char name[NAME_BYTES + sizeof CLAIM];
    if (claim < 0) return;
    int cache = open_folder(AT_FDCWD, context->cache_dir);
    claim_name(name, slug, key);
    /* Removed while it is held, so that nobody else's is. */
    if (cache >= 0 && is_named(cache, name, claim)) unlinkat(cache, name, 0);
    if (cache >= 0) close(cache);
    close(claim);
}

/* -- A text beside the entries --------------------------------------------------------------------------- */

static void warn_text(loom_context *context, const char *name, const char *fault) {
    loom__cache_warn(context, "does not read %s/%s: %s", context->cache_dir, name, fault);
}

/* A byte 0 would end the text before its end, and with it what the next edit keeps: it becomes one that no
 * line takes. */
static const char *read_text_below(loom__arena *arena, int cache, const char *name, const char **fault) {
    size_t num_bytes = 0;
    char *text = read_below(arena, cache, name, MAX_FILE_BYTES, &num_bytes, fault);
    for (size_t i = 0; text && i < num_bytes; i++) {
        if (!text[i]) text[i] = 1;
    }
    return text;
}

const char *loom__cache_read_text(loom_context *context, const char *name, loom__arena *arena,
                                  loom__cache_stamp *stamp) {
    struct stat facts;
    const char *fault = NULL, *text = NULL;
    int cache = *context->cache_dir ? open_folder(AT_FDCWD, context->cache_dir) : -1;
    if (cache < 0) return NULL;
    if (fstatat(cache, name, &facts, AT_SYMLINK_NOFOLLOW) == 0) {
        loom__cache_stamp now = {(uint64_t)facts.st_ino, (uint64_t)facts.st_size, facts.st_mtim.tv_sec,
                                 facts.st_mtim.tv_nsec};
        if (memcmp(&now, stamp, sizeof now)) {
            text = read_text_below(arena, cache, name, &fault);
            if (text) *stamp = now;
        }
        if (fault) warn_text(context, name, fault);
    }
    close(cache);
    return text;
}

/* With the lock held, so the new file's name can be always the same: a killed process leaves one file at
 * most. */
static int replace_text(int cache, const char *name, const char *text) {
    char temporary[NAME_BYTES];
    snprintf(temporary, sizeof temporary, ".new-%s", name);
    unlinkat(cache, temporary, 0);
    int failed = write_below(cache, temporary, text, strlen(text));
    if (!failed && renameat(cache, temporary, cache, name)) failed = errno;
    if (failed)
        unlinkat(cache, temporary, 0);
    else
        fsync(cache);
    return failed;
}

/* A process that is stopped while it has the lock must not stop the others. */
static int wait_for_lock(const loom_context *context, int fd) {
    double end = loom__now() + context->claim_seconds;
    while (flock(fd, LOCK_EX | LOCK_NB)) {
        if (errno != EINTR && (errno != EWOULDBLOCK || loom__now() > end)) return errno;
        nanosleep(&PAUSE, NULL);
    }
    return 0;
}

loom_status loom__cache_edit_text(loom_context *context, const char *name, loom__arena *arena,
                                  loom__cache_edit edit, void *user, loom_error *error) {
    char lock_name[NAME_BYTES];
    const char *fault = NULL, *text = NULL;
    int lock = -1;
    if (!*context->cache_dir) return LOOM_OK;
    snprintf(lock_name, sizeof lock_name, "%s.lock", name);
    int failed = make_folders(context);
    int cache = failed ? -1 : open_folder(AT_FDCWD, context->cache_dir);
    if (!failed && cache < 0) failed = errno;
    if (!failed) {
        lock = openat(cache, lock_name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        failed = lock < 0 ? errno : wait_for_lock(context, lock);
    }
    if (!failed) {
        const char *old = read_text_below(arena, cache, name, &fault);
        /* What is there and cannot be read, as another user's file, is not replaced. */
        if (!old && faccessat(cache, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
            failed = EPERM;
        else
            text = edit(user, old ? old : "");
        if (!failed) failed = text ? replace_text(cache, name, text) : ENOMEM;
    }
    if (lock >= 0) {
        flock(lock, LOCK_UN); /* a child that was forked meanwhile has the file too, and may live long */
        close(lock);
    }
    if (cache >= 0) close(cache);
    if (!failed) return LOOM_OK;
    if (failed == ENOMEM) return loom__fail_memory(error);
    return loom__fail(error, LOOM_IO, "cache_dir", "cannot write %s/%s: %s", context->cache_dir, name,
                      failed == EPERM && fault ? fault : strerror(failed));
}

/* -- For the command line -------------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b) {
    return strcmp(((const loom__cache_row *)a)->name, ((const loom__cache_row *)b)->name);
}

static loom_status open_for_list(loom_context *context, int *cache, loom_error *error) {
    *cache = -1;
    if (!*context->cache_dir) return LOOM_OK;
    *cache = open_folder(AT_FDCWD, context->cache_dir);
    if (*cache < 0 && errno != ENOENT) {
        return loom__fail(error, LOOM_IO, "cache_dir", "cannot open %s: %s", context->cache_dir,
                          strerror(errno));
    }
    return LOOM_OK;
}

static void fill_row(loom_context *context, loom__arena *arena, int cache, const char *name,
                     loom__cache_row *row) {
    row->name = loom__arena_copy(arena, name, strlen(name));
    row->path = loom__arena_print(arena, "%s/%s", context->cache_dir, name);
    row->key = "";
    int folder = open_folder(cache, name);
    if (folder < 0) {
        row->damage = strerror(errno);
        return;
    }
    bool host = faccessat(folder, binary_file(true), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
    row->damage = read_entry(arena, folder, NULL, host, &row->entry, &row->key);
    row->entry.path = row->path ? row->path : "";
    close(folder);
}

loom_status loom__cache_list(loom_context *context, loom__arena *arena, const loom__cache_row **rows,
                             int32_t *num_rows, loom_error *error) {
    int cache;
    *rows = NULL;
    *num_rows = 0;
    LOOM_TRY(context, open_for_list(context, &cache, error));
    if (cache < 0) return LOOM_OK;
    DIR *dir = fdopendir(cache);
    if (!dir) {
        close(cache);
        return loom__fail(error, LOOM_IO, "cache_dir", "cannot read %s: %s", context->cache_dir,
                          strerror(errno));
    }
    loom_status status = LOOM_OK;
    loom__cache_row *list = NULL;
    int32_t count = 0, capacity = 0;
    struct dirent *row;
    while ((row = readdir(dir))) {
        if (!is_entry_name(row->d_name)) continue;
        if (count == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            loom__cache_row *larger = loom__arena_alloc(arena, (size_t)capacity * sizeof *larger);
            if (!larger) {
                status = loom__fail_memory(error);
                goto out;
            }
            if (count) memcpy(larger, list, (size_t)count * sizeof *larger);
            list = larger;
        }
        fill_row(context, arena, cache, row->d_name, &list[count]);
        if (!list[count].name || !list[count].path) {
            status = loom__fail_memory(error);
            goto out;
        }
        count++;
    }
    if (count) qsort(list, (size_t)count, sizeof *list, by_name);
    *rows = list;
    *num_rows = count;
out:
    closedir(dir);
    return status;
}

loom_status loom__cache_remove(loom_context *context, const char *path, loom_error *error) {
    int cache;
    const char *name = strrchr(path, '/');
    LOOM_TRY(context, open_for_list(context, &cache, error));
    if (cache < 0 || !name) return loom__fail(error, LOOM_NOT_FOUND, "cache", "there is no entry %s", path);
    bool removed = remove_entry(cache, name + 1);
    int reason = errno;
    close(cache);
    if (!removed) return loom__fail(error, LOOM_IO, "cache", "cannot remove %s: %s", path, strerror(reason));
    return LOOM_OK;
}

loom_status loom__cache_clear(loom_context *context, int32_t *num_removed, loom_error *error) {
    loom__arena arena = {&context->memory, NULL};
    const loom__cache_row *rows = NULL;
    int32_t num_rows = 0;
    loom_status status = LOOM_OK;
    *num_removed = 0;
    LOOM_TRY_OUT(context, loom__cache_list(context, &arena, &rows, &num_rows, error));
    for (int32_t i = 0; i < num_rows; i++) {
        LOOM_TRY_OUT(context, loom__cache_remove(context, rows[i].path, error));
        ++*num_removed;
    }
    int cache;
    LOOM_TRY_OUT(context, open_for_list(context, &cache, error));
    if (cache >= 0) {
        remove_leftovers(cache);
        close(cache);
    }
out:
    loom__arena_free(&arena);
    return status;
}
