/* wisdom.c - `attnloom wisdom`: what was measured here as text, and what was measured elsewhere into the file
 * of this machine. */
#define _GNU_SOURCE
#include "../wisdom.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static const loom__cli_command COMMAND = {
    .name = "wisdom",
    .operands = "export | import FILE",
    .min_operands = 1,
    .max_operands = 2,
    .text = "Wisdom is what `attnloom tune` and plans with LOOM_MEASURE found: the best schedule of a "
            "problem's pass on "
            "a device for a class of shapes, an entry a line, in the file wisdom1.txt of the cache folder. "
            "export prints "
            "it. import merges the lines of FILE into it: of two entries for the same the faster one stays. "
            "A line that "
            "is refused is said on stderr with its number and the reason, the others are taken, and the exit "
            "status is "
            "1.",
    .examples = "  attnloom wisdom export > h200.wisdom\n"
                "  attnloom wisdom import h200.wisdom\n",
};

static loom_status export(loom_context *context, loom__arena *arena, loom_error *error) {
    size_t needed = 0;
    loom_wisdom_export(context, NULL, 0, &needed, NULL); /* fails for want of room, or again below */
    char *text = loom__arena_alloc(arena, needed + 1);
    if (!text) return loom__fail_memory(error);
    LOOM_TRY(context, loom_wisdom_export(context, text, needed + 1, NULL, error));
    fputs(text, stdout);
    return LOOM_OK;
}

/* Line by line, so that each refusal is told: an error has room for some. */
static loom_status import(loom_context *context, const char *path, bool *fine, loom__arena *arena,
                          loom_error *error) {
    static const char FIRST[] = "line 1: ";
    const char *text = NULL;
    size_t num_bytes = 0;
    int32_t number = 1, num_taken = 0, num_refused = 0;
    LOOM_TRY(context, loom__read_file(arena, path, &text, &num_bytes, error));
    if (strlen(text) != num_bytes)
        return loom__fail(error, LOOM_INVALID, "wisdom", "%s is no text: it has a byte 0", path);
    for (const char *at = text; *at; number++) {
        size_t length = strcspn(at, "\n");
        char *line = loom__arena_copy(arena, at, length);
        loom_error failure = LOOM_ERROR_INIT;
        int32_t taken = 0;
        if (!line) return loom__fail_memory(error);
        loom_status status = loom_wisdom_import(context, line, &taken, &failure);
        num_taken += taken;
        num_refused += status == LOOM_INVALID;
        if (status == LOOM_INVALID)
            loom__cli_say("%s:%d: %s", path, number, failure.text + strlen(FIRST));
        else if (status)
            return loom__fail(error, status, failure.field, "%s", failure.text);
        at += length + (at[length] == '\n');
    }
    if (num_taken) LOOM_TRY(context, loom__wisdom_save(context, error));
    loom__cli_say("%s: %d entries taken, %d lines refused", path, num_taken, num_refused);
    *fine = num_refused == 0;
    return LOOM_OK;
}

int loom__cli_wisdom(int argc, char **argv) {
    const char *operands[2] = {NULL, NULL};
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    bool fine = true;
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, NULL, operands);
    if (exit_status >= 0) return exit_status;
    bool imports = strcmp(operands[0], "import") == 0;
    if (!imports && strcmp(operands[0], "export")) {
        loom__cli_say("wisdom: '%s' is not export or import FILE", operands[0]);
        return LOOM__CLI_USAGE;
    }
    if (imports != (operands[1] != NULL)) {
        loom__cli_say("wisdom: %s", imports ? "import takes a FILE" : "export takes no FILE, it prints");
        return LOOM__CLI_USAGE;
    }
    loom_status status = loom_context_create(NULL, &context, &error);
    if (status) return loom__cli_fail(&error);
    loom__arena arena = {&context->memory, NULL};
    if (imports && !*context->cache_dir)
        status = loom__fail(&error, LOOM_IO, "cache_dir", "there is no cache folder to keep wisdom in");
    else
        status =
            imports ? import(context, operands[1], &fine, &arena, &error) : export(context, &arena, &error);
    loom__arena_free(&arena);
    loom_context_destroy(context);
    if (status) return loom__cli_fail(&error);
    return fine ? LOOM__CLI_FINE : LOOM__CLI_FAILED;
}
