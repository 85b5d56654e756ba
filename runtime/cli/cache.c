/* cache.c - `attnloom cache list|verify|clear`: the compiled kernels on disk. */
#define _POSIX_C_SOURCE 200809L
#include "../cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "cli.h"

static const loom__cli_command COMMAND = {
    .name = "cache",
    .operands = "list|verify|clear",
    .min_operands = 1,
    .max_operands = 1,
    .text = "list prints one line an entry: the problem in quotes, target, arch, kernel, variant, bytes, the "
            "result of its certificate (fine, wrong, or none: not checked yet) and its folder. verify reads "
            "every entry and compares it with its digest; damaged ones are named and the exit status is 1 "
            "(they do no harm: the next use builds them again). clear removes all entries, and nothing else "
            "in the folder.\n"
            "The folder is LOOM_CACHE_DIR, see `attnloom info`.",
    .examples = "  attnloom cache list\n"
                "  LOOM_CACHE_DIR=/tmp/kernels attnloom cache verify\n",
};

static void print_entry(const loom__cache_row *row, loom__arena *arena) {
    if (row->damage) {
        printf("%s damaged: %s\n", row->name, row->damage);
        return;
    }
    const char *outcome =
        *row->entry.certificate ? loom__cli_key_value(arena, row->entry.certificate, "result") : "none";
    printf("problem \"%s\" target %s arch %s kernel %s variant %s bytes %zu certificate %s entry %s\n",
           loom__cli_key_value(arena, row->key, "problem"), loom__cli_key_value(arena, row->key, "target"),
           loom__cli_key_value(arena, row->key, "arch"), loom__cli_key_value(arena, row->key, "kernel"),
           loom__cli_key_value(arena, row->key, "variant"), row->entry.binary_bytes, outcome, row->name);
}

/* Bytes of the files in a folder; an entry has no folders inside. */
static int64_t folder_bytes(const char *path) {
    DIR *folder = opendir(path);
    int64_t total = 0;
    for (struct dirent *item = folder ? readdir(folder) : NULL; item; item = readdir(folder)) {
        struct stat info;
        if (fstatat(dirfd(folder), item->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(info.st_mode))
            total += info.st_size;
    }
    if (folder) closedir(folder);
    return total;
}

static loom_status clear(loom_context *context, const loom__cache_row *rows, int32_t num_rows,
                         loom_error *error) {
    int64_t bytes = 0;
    int32_t num_removed = 0;
    for (int32_t i = 0; i < num_rows; i++) bytes += folder_bytes(rows[i].path);
    LOOM_TRY(context, loom__cache_clear(context, &num_removed, error));
    printf("removed %d entries, %lld bytes\n", num_removed, (long long)bytes);
    return LOOM_OK;
}

static loom_status cache(loom_context *context, const char *action, loom__arena *arena, loom_error *error) {
    const loom__cache_row *rows = NULL;
    int32_t num_rows = 0, num_damaged = 0;
    LOOM_TRY(context, loom__cache_list(context, arena, &rows, &num_rows, error));
    if (strcmp(action, "clear") == 0) return clear(context, rows, num_rows, error);
    bool list = strcmp(action, "list") == 0;
    for (int32_t i = 0; i < num_rows; i++) {
        num_damaged += rows[i].damage != NULL;
        if (list)
            print_entry(&rows[i], arena);
        else
            printf("%s %s%s\n", rows[i].name, rows[i].damage ? "damaged: " : "sound",
                   rows[i].damage ? rows[i].damage : "");
    }
    if (!list && num_damaged)
        return loom__fail(error, LOOM_IO, "cache", "%d of %d entries are damaged", num_damaged, num_rows);
    loom__cli_say("%d entries in %s", num_rows, context->cache_dir);
    return LOOM_OK;
}

int loom__cli_cache(int argc, char **argv) {
    static const char *const ACTIONS[] = {"list", "verify", "clear"};
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    const char *action = NULL;
    bool known = false;
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, NULL, &action);
    if (exit_status >= 0) return exit_status;
    for (int32_t i = 0; i < 3; i++) known = known || strcmp(action, ACTIONS[i]) == 0;
    if (!known) {
        const char *closest = loom__cli_closest(action, ACTIONS, 3);
        loom__cli_say("cache: '%s' is not one of list, verify, clear%s%s%s", action,
                      closest ? "; did you mean " : "", closest ? closest : "", closest ? "?" : "");
        return LOOM__CLI_USAGE;
    }
    loom_status status = loom_context_create(NULL, &context, &error);
    if (status) return loom__cli_fail(&error);
    if (!*context->cache_dir) {
        loom__cli_say("nothing is kept on disk: there is no cache folder");
    } else {
        loom__arena arena = {&context->memory, NULL};
        status = cache(context, action, &arena, &error);
        loom__arena_free(&arena);
    }
    loom_context_destroy(context);
    return status ? loom__cli_fail(&error) : LOOM__CLI_FINE;
}
