/* embedded.h - the files of gen/ and templates/, and those of wisdom/, in the library; the tables are made by
 * cmake/embed.c. */
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
extern const loom__file loom__wisdom_files[];
extern const int loom__num_wisdom_files;

#endif
