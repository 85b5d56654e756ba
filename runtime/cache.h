/* cache.h - compiled kernels on disk, one folder each.
 *
 *   <cache>/<name>-<digest of key>/kernel.cu|kernel.c   the source
 *                                  kernel.cubin|kernel.so
 *                                  meta.txt             digests, sizes, facts, and the whole key
 *                                  certificate.txt      where one was stored
 *
 * A folder appears by one rename of a complete, synced staging folder, so readers need no lock and a killed
 * process blocks nobody. Damage is a miss: the folder is removed, a warning is given once, and the kernel is
 * built again. Nothing here fails a plan: where the disk does not serve, kernels stay in memory. Called by
 * plan.c, the command line, and pack.c, as packs hold entries too.
 */
#ifndef LOOM_CACHE_H
#define LOOM_CACHE_H

#include "common.h"

/* Chooses the folder; `dir` as in loom_options. Called by loom_context_create. */
loom_status loom__cache_open(loom_context *context, const char *dir, loom_error *error);

typedef struct loom__entry {
    const char *source;
    const void *binary;
    size_t binary_bytes;
    const char *compiler;    /* "nvrtc 13.0" */
    const char *certificate; /* "" if none */
    int32_t registers, spill_bytes, threads;
    double seconds;   /* of the compile */
    const char *path; /* folder, "" if not on disk */
    bool host;        /* names of the files */
} loom__entry;

/* The text of an entry's meta.txt: digests, sizes, facts, the key. */
char *loom__entry_print(loom__arena *arena, const loom__entry *entry, const char *key);
/* Fills *entry, but for path and certificate, from that text and the bytes that it describes; all of them
 * must stay where they are, and a 0 is put behind the compiler's name. `source` NULL: not held. *key points
 * into the text. Returns what is wrong, NULL if nothing. */
const char *loom__entry_read(char *text, const char *source, const void *binary, size_t binary_bytes,
                             loom__entry *entry, const char **key);
/* Value of the line "name value" of a key or certificate, up to its end; NULL if there is none. */
const char *loom__key_value(const char *key, const char *name, size_t *length);

/* True: *entry is filled, its texts in the arena. False: not there, or damaged and removed. */
bool loom__cache_load(loom_context *context, const char *name, const char *key, bool host, loom__arena *arena,
                      loom__entry *entry);
/* Publishes an entry and sets entry->path. A loser of the race leaves the winner's folder and keeps its own
 * bytes. */
void loom__cache_store(loom_context *context, const char *name, const char *key, loom__arena *arena,
                       loom__entry *entry);
/* Keys of the entries whose name has `part` in it, in the arena; those that cannot be read are left out.
 * Their kernels are not looked at. */
loom_status loom__cache_keys(loom_context *context, const char *part, loom__arena *arena,
                             const char *const **keys, int32_t *num_keys, loom_error *error);
/* Removes an entry that turned out not to load. */
void loom__cache_evict(loom_context *context, const char *path, const char *reason);
loom_status loom__cache_certify(loom_context *context, const char *path, const char *text, loom_error *error);

/* Waits until no other process builds the entry, and from then on keeps others waiting until the claim is
 * released; the system releases it with the process. Who finds it taken still at `end`, a time of loom__now,
 * as by a process that is stopped, goes on without: then two build the same, which does no harm. Of several
 * entries those whose key sorts first are to be claimed first, or processes could wait for each other. -1:
 * there is no claim. */
int loom__cache_claim(loom_context *context, const char *name, const char *key, double end);
void loom__cache_unclaim(loom_context *context, const char *name, const char *key, int claim);

/* -- A text beside the entries --------------------------------------------------------------------------- */

/* Which state of a text was read; starts zeroed. */
typedef struct loom__cache_stamp {
    uint64_t file, bytes;
    int64_t seconds, nanoseconds;
} loom__cache_stamp;

/* The text `name` of the folder, in the arena; NULL: there is none, or it is as when *stamp was set. */
const char *loom__cache_read_text(loom_context *context, const char *name, loom__arena *arena,
                                  loom__cache_stamp *stamp);

/* Makes a new text of the old one, "" where there is none; NULL: out of memory. */
typedef const char *(*loom__cache_edit)(void *user, const char *text);

/* Replaces the text by what `edit` makes of it, by one rename, so that readers need no lock. Who edits holds
 * a flock on `name`.lock, so edits of threads and processes follow each other, and the system frees what a
 * killed process held. IO with the reason when it cannot be written; OK and nothing done without a folder. */
loom_status loom__cache_edit_text(loom_context *context, const char *name, loom__arena *arena,
                                  loom__cache_edit edit, void *user, loom_error *error);

/* Names the layout of an entry, "attnloom cache 1": entries of another are damaged. */
const char *loom__cache_format(void);

/* -- For the command line -------------------------------------------------------------------------------- */

typedef struct loom__cache_row {
    const char *name; /* of the folder */
    const char *path;
    const char *key;    /* "" if it cannot be read */
    const char *damage; /* NULL: sound; else what is wrong */
    loom__entry entry;  /* where sound */
} loom__cache_row;

/* Reads and verifies every entry, sorted by name. Removes nothing. */
loom_status loom__cache_list(loom_context *context, loom__arena *arena, const loom__cache_row **rows,
                             int32_t *num_rows, loom_error *error);
/* Removes one folder of the list, or all: entries, and what killed processes left. */
loom_status loom__cache_remove(loom_context *context, const char *path, loom_error *error);
loom_status loom__cache_clear(loom_context *context, int32_t *num_removed, loom_error *error);

#endif
