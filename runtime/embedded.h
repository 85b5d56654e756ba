/* embedded.h - the files of gen/ and templates/ in the library; the table is made by cmake/embed.c. */
#ifndef LOOM_EMBEDDED_H
#define LOOM_EMBEDDED_H

typedef struct loom__file {
    const char *path;  /* "gen/main.lua", sorted */
    const char *bytes; /* with a 0 behind that `size` does not count */
    long size;
    const char *code; /* Lua files: compiled by the same Lua at build time, NULL otherwise */
    long code_size;
} loom__file;

extern const loom__file loom__files[];
extern const int loom__num_files;

#endif
