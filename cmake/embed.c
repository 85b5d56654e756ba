/* embed.c - build tool: writes files as a C table, the form in which generator, templates and wisdom lie in
 * the library. Lua files are there twice: as text, which is hashed, and compiled, which loads ten times as
 * fast. usage: embed OUT.c NAME FILE...   The table is loom__NAME, of loom__num_NAME files. Paths are kept as
 * given. Exit 1 and a line on stderr when a file cannot be used. */
#include <lauxlib.h>
#include <lua.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct array {
    FILE *out;
    long count;
} array;

static void put_byte(array *a, int byte) { fprintf(a->out, a->count++ % 32 ? "%d," : "\n    %d,", byte); }

static int put_code(lua_State *lua, const void *bytes, size_t size, void *user) {
    (void)lua;
    for (size_t i = 0; i < size; i++) put_byte(user, ((const unsigned char *)bytes)[i]);
    return 0;
}

static int embed_text(FILE *out, const char *path, int index, long *size) {
    FILE *in = fopen(path, "rb");
    array a = {out, 0};
    int byte;
    if (!in) return -1;
    fprintf(out, "static const unsigned char text_%d[] = {", index);
    while ((byte = getc(in)) != EOF) put_byte(&a, byte);
    fprintf(out, "0};\n");
    *size = a.count;
    int failed = ferror(in);
    fclose(in);
    return failed ? -1 : 0;
}

static int embed_code(FILE *out, const char *path, int index, long *size) {
    lua_State *lua = luaL_newstate();
    array a = {out, 0};
    int failed = !lua || luaL_loadfilex(lua, path, "t") != LUA_OK;
    if (failed && lua) fprintf(stderr, "embed: %s\n", lua_tostring(lua, -1));
    fprintf(out, "static const unsigned char code_%d[] = {", index);
    if (!failed) failed = lua_dump(lua, put_code, &a, 0);
    fprintf(out, "0};\n");
    *size = a.count;
    if (lua) lua_close(lua);
    return failed ? -1 : 0;
}

static int is_lua(const char *path) {
    size_t length = strlen(path);
    return length > 4 && strcmp(path + length - 4, ".lua") == 0;
}

int main(int argc, char **argv) {
    enum { MAX_FILES = 1024 };
    static long text_bytes[MAX_FILES], code_bytes[MAX_FILES];
    if (argc < 3 || argc - 3 > MAX_FILES) {
        fprintf(stderr, "usage: embed OUT.c NAME FILE..., at most %d files\n", MAX_FILES);
        return 1;
    }
    int num_files = argc - 3;
    char **files = argv + 3;
    FILE *out = fopen(argv[1], "wb");
    int failed = !out;
    if (out)
        fprintf(out,
                "/* Made by cmake/embed.c from files of the source tree. */\n#include \"embedded.h\"\n\n");
    for (int i = 0; i < num_files && !failed; i++) {
        const char *path = files[i];
        failed = embed_text(out, path, i, &text_bytes[i]) ||
                 (is_lua(path) && embed_code(out, path, i, &code_bytes[i]));
        if (failed) fprintf(stderr, "embed: cannot use %s\n", path);
    }
    if (out && !failed) {
        fprintf(out, "\nconst loom__file loom__%s[] = {\n", argv[2]);
        for (int i = 0; i < num_files; i++) {
            fprintf(out, "    {\"%s\", (const char *)text_%d, %ld, ", files[i], i, text_bytes[i]);
            if (is_lua(files[i]))
                fprintf(out, "(const char *)code_%d, %ld},\n", i, code_bytes[i]);
            else
                fprintf(out, "0, 0},\n");
        }
        fprintf(out, "    {0, 0, 0, 0, 0}};\nconst int loom__num_%s = %d;\n", argv[2], num_files);
    }
    if (out) failed |= fclose(out);
    if (failed) {
        fprintf(stderr, "embed: %s is not written\n", argv[1]);
        remove(argv[1]);
    }
    return failed ? 1 : 0;
}
