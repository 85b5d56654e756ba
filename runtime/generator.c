/* generator.c - one Lua state per context, and all traffic between Lua and C.
 *
 * Called by plan.c and the command line; every function holds the context's lock while Lua runs. The
 * generator's files come from the table embedded in the library, or from LOOM_GEN_DIR, a folder with gen/ and
 * templates/. They run without io, os, debug, package, coroutine, string.dump, binary chunks and finalizers:
 * `require` finds files of gen/ alone, `read_template` files of templates/ alone. Memory is limited, and so
 * are the instructions of files from LOOM_GEN_DIR; to count them would slow our own. Manifests have closer
 * limits, of time too (`run_limited`). Lua errors never leave this file: what the generator refuses becomes
 * its status, its own faults INTERNAL.
 */
#define _GNU_SOURCE
#include "generator.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "embedded.h"

/* The names that the Lua archive has for the C library's streams, see CMakeLists.txt. Only parts of Lua that
 * the generator is not given would use them. */
FILE *const loom__lua_stdin = NULL;
FILE *const loom__lua_stdout = NULL;
FILE *const loom__lua_stderr = NULL;

enum { MAX_LUA_BYTES = 512 << 20, HOOK_INSTRUCTIONS = 100000 };
enum { MAX_MANIFEST_BYTES = 64 << 20, MAX_MANIFEST_INSTRUCTIONS = 100000000, MAX_MANIFEST_SECONDS = 10 };
enum { MANIFEST_HOOK_INSTRUCTIONS = 100 }; /* each may copy all the memory there is */

struct loom__generator {
    lua_State *lua;
    const loom__memory *memory;
    size_t used_bytes, max_bytes;
    bool over_bytes;                         /* in this visit */
    bool no_memory;                          /* likewise: the system gave none */
    uint64_t max_instructions, instructions; /* of a visit, and run in it so far */
    double end_seconds;                      /* of the thread's processor time; INFINITY: no manifest runs */
    loom__arena arena;                       /* files of LOOM_GEN_DIR */
    const loom__file *files;
    int num_files;
    int main; /* registry reference of the table main.lua returns */
    int32_t grammar;
    char digest[33];
};

/* -- Files ----------------------------------------------------------------------------------------------- */

static const loom__file *find_file(const loom__generator *generator, const char *path) {
    for (int i = 0; i < generator->num_files; i++) {
        if (strcmp(generator->files[i].path, path) == 0) return &generator->files[i];
    }
    return NULL;
}

static bool has_suffix(const char *name, const char *suffix) {
    size_t length = strlen(name), tail = strlen(suffix);
    return length > tail && strcmp(name + length - tail, suffix) == 0;
}

typedef struct folder_files {
    loom__arena *arena;
    loom__file *list;
    int count, capacity;
} folder_files;

static loom_status add_file(folder_files *files, const char *path, const char *name, loom_error *error) {
    if (files->count == files->capacity) {
        int capacity = files->capacity ? 2 * files->capacity : 32;
        loom__file *list = loom__arena_alloc(files->arena, (size_t)capacity * sizeof *list);
        if (!list) return loom__fail_memory(error);
        if (files->count) memcpy(list, files->list, (size_t)files->count * sizeof *list);
        files->list = list;
        files->capacity = capacity;
    }
    const char *bytes;
    size_t size;
    LOOM_TRY(NULL, loom__read_file(files->arena, path, &bytes, &size, error));
    files->list[files->count++] = (loom__file){name, bytes, (long)size, NULL, 0};
    return LOOM_OK;
}

/* Adds the generator's files below root/folder; `folder` is also the start of their names. */
static loom_status add_folder(folder_files *files, const char *root, const char *folder, loom_error *error) {
    loom_status status = LOOM_OK;
    const char *path = loom__arena_print(files->arena, "%s/%s", root, folder);
    if (!path) return loom__fail_memory(error);
    DIR *dir = opendir(path);
    if (!dir)
        return loom__fail(error, LOOM_IO, "LOOM_GEN_DIR", "cannot read the folder %s: %s", path,
                          strerror(errno));
    bool lua = strcmp(folder, "gen") == 0;
    struct dirent *row;
    while ((row = readdir(dir))) {
        if (row->d_name[0] == '.') continue;
        const char *name = loom__arena_print(files->arena, "%s/%s", folder, row->d_name);
        const char *full = loom__arena_print(files->arena, "%s/%s", root, name ? name : "");
        struct stat facts;
        if (!name || !full) {
            status = loom__fail_memory(error);
            goto out;
        }
        if (stat(full, &facts)) continue;
        if (S_ISDIR(facts.st_mode)) {
            if (!lua) LOOM_TRY_OUT(NULL, add_folder(files, root, name, error));
        } else if (lua ? has_suffix(name, ".lua") : has_suffix(name, ".c") || has_suffix(name, ".cu")) {
            LOOM_TRY_OUT(NULL, add_file(files, full, name, error));
        }
    }
out:
    closedir(dir);
    return status;
}

static int by_path(const void *a, const void *b) {
    return strcmp(((const loom__file *)a)->path, ((const loom__file *)b)->path);
}

static loom_status load_files(loom_context *context, loom__generator *generator, loom_error *error) {
    const char *root = context->environment.loom_gen_dir;
    generator->files = loom__files;
    generator->num_files = loom__num_files;
    if (root) {
        folder_files files = {&generator->arena, NULL, 0, 0};
        LOOM_TRY(context, add_folder(&files, root, "gen", error));
        LOOM_TRY(context, add_folder(&files, root, "templates", error));
        if (files.count) qsort(files.list, (size_t)files.count, sizeof *files.list, by_path);
        generator->files = files.list;
        generator->num_files = files.count;
    }
    /* The digest of a list of digests: names and borders of files count too. */
    enum { LINE_BYTES = 33 };
    loom__arena scratch = {&context->memory, NULL};
    loom_status status = LOOM_OK;
    size_t bytes = 0;
    for (int i = 0; i < generator->num_files; i++) bytes += LINE_BYTES + strlen(generator->files[i].path) + 1;
    char *list = loom__arena_alloc(&scratch, bytes + 1), *end = list;
    if (!list) {
        status = loom__fail_memory(error);
        goto out;
    }
    for (int i = 0; i < generator->num_files; i++) {
        const loom__file *file = &generator->files[i];
        loom__digest(file->bytes, (size_t)file->size, end);
        end += LINE_BYTES;
        end = stpcpy(end, file->path) + 1;
    }
    loom__digest(list, bytes, generator->digest);
out:
    loom__arena_free(&scratch);
    return status;
}

/* -- Lua state ------------------------------------------------------------------------------------------- */

static void *lua_resize(void *user, void *block, size_t old_bytes, size_t bytes) {
    loom__generator *generator = user;
    const loom__memory *memory = generator->memory;
    if (!block) old_bytes = 0; /* then it is the kind of object */
    if (bytes == 0) {
        if (block) memory->resize(memory->user, block, 0);
        generator->used_bytes -= old_bytes;
        return NULL;
    }
    size_t room =
        generator->max_bytes > generator->used_bytes ? generator->max_bytes - generator->used_bytes : 0;
    if (bytes > old_bytes && bytes - old_bytes > room) {
        generator->over_bytes = true;
        return NULL;
    }
    void *resized = memory->resize(memory->user, block, bytes);
    if (resized)
        generator->used_bytes = generator->used_bytes - old_bytes + bytes;
    else
        generator->no_memory = true;
    return resized;
}

static loom__generator *generator_of(lua_State *lua) { return lua_touserdata(lua, lua_upvalueindex(1)); }

static double thread_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Beyond the limit every instruction raises, so that no pcall keeps the loop alive. */
static void count_instructions(lua_State *lua, lua_Debug *activation) {
    void *user;
    (void)activation;
    lua_getallocf(lua, &user);
    loom__generator *generator = user;
    generator->instructions += (uint64_t)lua_gethookcount(lua);
    bool late = isfinite(generator->end_seconds) && thread_seconds() > generator->end_seconds;
    if (generator->instructions < generator->max_instructions && !late) return;
    lua_sethook(lua, count_instructions, LUA_MASKCOUNT, 1);
    luaL_where(lua, 0); /* a hook has no level of its own */
    if (late) {
        lua_pushfstring(lua, "it ran longer than %d seconds, the limit of manifests", MAX_MANIFEST_SECONDS);
    } else {
        lua_pushfstring(
            lua, "it ran more than %I instructions, the limit of manifests and of Lua files of LOOM_GEN_DIR",
            (LUAI_UACINT)generator->max_instructions);
    }
    lua_concat(lua, 2);
    lua_error(lua);
}

/* run_limited(chunk): calls it with the limits of a manifest, and returns what pcall does. */
static int lua_run_limited(lua_State *lua) {
    loom__generator *generator = generator_of(lua);
    uint64_t max_instructions = generator->max_instructions, instructions = generator->instructions;
    lua_Hook hook = lua_gethook(lua);
    if (max_instructions > MAX_MANIFEST_INSTRUCTIONS) generator->max_instructions = MAX_MANIFEST_INSTRUCTIONS;
    generator->instructions = 0;
    generator->max_bytes = generator->used_bytes + MAX_MANIFEST_BYTES;
    generator->end_seconds = thread_seconds() + MAX_MANIFEST_SECONDS;
    lua_sethook(lua, count_instructions, LUA_MASKCOUNT, MANIFEST_HOOK_INSTRUCTIONS);
    int failed = lua_pcall(lua, 0, 1, 0);
    generator->end_seconds = INFINITY;
    lua_sethook(lua, hook, hook ? LUA_MASKCOUNT : 0, HOOK_INSTRUCTIONS);
    generator->max_instructions = max_instructions;
    generator->instructions = instructions;
    generator->max_bytes = MAX_LUA_BYTES;
    if (failed == LUA_ERRMEM && generator->over_bytes)
        lua_pushfstring(lua, "it used more than %d bytes of memory, the limit of manifests",
                        MAX_MANIFEST_BYTES);
    lua_pushboolean(lua, !failed);
    lua_insert(lua, -2);
    return 2;
}

/* load(chunk, name, mode, env) with mode "t": binary chunks could do anything. */
static int lua_load_text(lua_State *lua) {
    if (lua_gettop(lua) < 3) lua_settop(lua, 3);
    lua_pushliteral(lua, "t");
    lua_replace(lua, 3);
    lua_pushvalue(lua, lua_upvalueindex(1));
    lua_insert(lua, 1);
    lua_call(lua, lua_gettop(lua) - 1, LUA_MULTRET);
    return lua_gettop(lua);
}

/* setmetatable without finalizers, which Lua runs outside of all limits. */
static int lua_set_metatable(lua_State *lua) {
    lua_settop(lua, 2);
    if (lua_istable(lua, 2)) {
        lua_pushliteral(lua, "__gc");
        if (lua_rawget(lua, 2) != LUA_TNIL) return luaL_error(lua, "a metatable may not have __gc");
        lua_pop(lua, 1);
    }
    lua_pushvalue(lua, lua_upvalueindex(1));
    lua_insert(lua, 1);
    lua_call(lua, 2, 1);
    return 1;
}

/* Puts `function`, with the original as its upvalue, in place of globals[name]; the globals are on the top.
 */
static void wrap_global(lua_State *lua, const char *name, lua_CFunction function) {
    lua_getfield(lua, -1, name);
    lua_pushcclosure(lua, function, 1);
    lua_setfield(lua, -2, name);
}

/* require(name): the value of gen/name.lua, run once. */
static int lua_require(lua_State *lua) {
    const char *name = luaL_checkstring(lua, 1);
    luaL_getsubtable(lua, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    if (lua_getfield(lua, -1, name) != LUA_TNIL) {
        if (lua_islightuserdata(lua, -1)) return luaL_error(lua, "gen/%s.lua requires itself", name);
        return 1;
    }
    lua_pop(lua, 1);
    const char *path = lua_pushfstring(lua, "gen/%s.lua", name);
    const loom__file *file = find_file(generator_of(lua), path);
    if (!file) return luaL_error(lua, "%s does not exist", path);
    const char *chunk = lua_pushfstring(lua, "@%s", path);
    int failed = file->code ? luaL_loadbufferx(lua, file->code, (size_t)file->code_size, chunk, "b")
                            : luaL_loadbufferx(lua, file->bytes, (size_t)file->size, chunk, "t");
    if (failed) return lua_error(lua);
    lua_pushlightuserdata(lua, generator_of(lua));
    lua_setfield(lua, 2, name);
    lua_pushvalue(lua, 1);
    lua_call(lua, 1, 1);
    if (lua_isnil(lua, -1)) return luaL_error(lua, "%s returns nothing", path);
    lua_pushvalue(lua, -1);
    lua_setfield(lua, 2, name);
    return 1;
}

/* read_template(name): text of templates/name, nil if there is none. */
static int lua_read_template(lua_State *lua) {
    const char *path = lua_pushfstring(lua, "templates/%s", luaL_checkstring(lua, 1));
    const loom__file *file = find_file(generator_of(lua), path);
    if (!file) return 0;
    lua_pushlstring(lua, file->bytes, (size_t)file->size);
    return 1;
}

static int lua_refuse_global(lua_State *lua) {
    return luaL_error(lua, "global name '%s' is not defined", luaL_tolstring(lua, 2, NULL));
}

static lua_Integer integer_field(lua_State *lua, int table, const char *name) {
    int is_integer;
    lua_getfield(lua, table, name);
    lua_Integer value = lua_tointegerx(lua, -1, &is_integer);
    if (!is_integer) luaL_error(lua, "'%s' is not an integer", name);
    lua_pop(lua, 1);
    return value;
}

static int32_t int_field(lua_State *lua, int table, const char *name) {
    lua_Integer value = integer_field(lua, table, name);
    if (value < INT32_MIN || value > INT32_MAX) luaL_error(lua, "'%s' is out of range", name);
    return (int32_t)value;
}

/* 0 where it is left out. */
static int32_t optional_int(lua_State *lua, int table, const char *name) {
    bool absent = lua_getfield(lua, table, name) == LUA_TNIL;
    lua_pop(lua, 1);
    return absent ? 0 : int_field(lua, table, name);
}

static int open_state(lua_State *lua) {
    loom__generator *generator = lua_touserdata(lua, 1);
    static const luaL_Reg LIBRARIES[] = {{LUA_GNAME, luaopen_base},
                                         {LUA_TABLIBNAME, luaopen_table},
                                         {LUA_STRLIBNAME, luaopen_string},
                                         {LUA_MATHLIBNAME, luaopen_math},
                                         {LUA_UTF8LIBNAME, luaopen_utf8}};
    static const char *const REMOVED[] = {"dofile", "loadfile", "print", "warn"};
    lua_gc(lua, LUA_GCSTOP); /* what is loaded here stays */
    for (size_t i = 0; i < sizeof LIBRARIES / sizeof LIBRARIES[0]; i++) {
        luaL_requiref(lua, LIBRARIES[i].name, LIBRARIES[i].func, 1);
        lua_pop(lua, 1);
    }
    lua_pushglobaltable(lua);
    for (size_t i = 0; i < sizeof REMOVED / sizeof REMOVED[0]; i++) {
        lua_pushnil(lua);
        lua_setfield(lua, -2, REMOVED[i]);
    }
    wrap_global(lua, "load", lua_load_text);
    wrap_global(lua, "setmetatable", lua_set_metatable);
    lua_getfield(lua, -1, LUA_STRLIBNAME);
    lua_pushnil(lua);
    lua_setfield(lua, -2, "dump");
    lua_pop(lua, 1);
    lua_pushlightuserdata(lua, generator);
    lua_pushcclosure(lua, lua_require, 1);
    lua_setfield(lua, -2, "require");
    lua_pushlightuserdata(lua, generator);
    lua_pushcclosure(lua, lua_read_template, 1);
    lua_setfield(lua, -2, "read_template");
    lua_pushlightuserdata(lua, generator);
    lua_pushcclosure(lua, lua_run_limited, 1);
    lua_setfield(lua, -2, "run_limited");
    lua_newtable(lua);
    lua_pushcfunction(lua, lua_refuse_global);
    lua_setfield(lua, -2, "__index");
    lua_pushcfunction(lua, lua_refuse_global);
    lua_setfield(lua, -2, "__newindex");
    lua_setmetatable(lua, -2);

    lua_getfield(lua, -1, "require");
    lua_pushliteral(lua, "main");
    lua_call(lua, 1, 1);
    luaL_checktype(lua, -1, LUA_TTABLE);
    generator->grammar = optional_int(lua, lua_gettop(lua), "grammar");
    generator->main = luaL_ref(lua, LUA_REGISTRYINDEX);
    lua_gc(lua, LUA_GCRESTART);
    return 0;
}

/* -- Protected calls ------------------------------------------------------------------------------------- */

/* One visit to Lua. `body` runs protected with the job on the stack and may raise; it fills the results. */
typedef struct job {
    loom_context *context;
    loom__arena *arena;
    loom_error *error;
    loom_status status; /* of the answer; a raised error gives INTERNAL or MEMORY */
    const char *function;
    const char *text, *name, *archs;
    const loom__request *request;
    loom_pass pass;
    int reference, index;
    void *result;
} job;

static int add_traceback(lua_State *lua) {
    const char *message = lua_tostring(lua, 1);
    if (message) luaL_traceback(lua, lua, message, 1);
    return 1;
}

static loom_status visit(loom_context *context, lua_State *lua, lua_CFunction body, void *argument,
                         loom_error *error) {
    loom__generator *generator = context->generator;
    generator->max_bytes = MAX_LUA_BYTES;
    generator->over_bytes = generator->no_memory = false;
    generator->instructions = 0;
    generator->end_seconds = INFINITY;
    if (context->environment.loom_gen_dir)
        lua_sethook(lua, count_instructions, LUA_MASKCOUNT, HOOK_INSTRUCTIONS);
    lua_settop(lua, 0);
    lua_pushcfunction(lua, add_traceback);
    lua_pushcfunction(lua, body);
    lua_pushlightuserdata(lua, argument);
    int failed = lua_pcall(lua, 1, 0, 1);
    if (!failed) return LOOM_OK;
    lua_sethook(lua, NULL, 0, 0);
    if (failed == LUA_ERRMEM) {
        lua_settop(lua, 0);
        if (!generator->over_bytes) return loom__fail_memory(error);
        return loom__fail(error, LOOM_INTERNAL, "generator",
                          "the generator failed: it used more than %d bytes of memory, "
                          "the limit of Lua",
                          MAX_LUA_BYTES);
    }
    const char *message = lua_tostring(lua, -1);
    if (!message) message = "an error that is not a text";
    loom__log(context, LOOM__LOG_SOURCE, "generator error=\"%s\"", message);
    size_t first_line = strcspn(message, "\n");
    loom_status status =
        loom__fail(error, LOOM_INTERNAL, "generator", "the generator failed: %.*s", (int)first_line, message);
    lua_settop(lua, 0);
    return status;
}

static loom_status create_generator(loom_context *context, loom_error *error) {
    loom__generator *generator = context->memory.resize(context->memory.user, NULL, sizeof *generator);
    if (!generator) return loom__fail_memory(error);
    memset(generator, 0, sizeof *generator);
    generator->arena.memory = &context->memory;
    generator->memory = &context->memory;
    generator->max_bytes = MAX_LUA_BYTES;
    generator->max_instructions = context->generator_instructions;
    context->generator = generator;
    loom_status status = load_files(context, generator, error);
    if (status == LOOM_OK) {
        generator->lua = lua_newstate(lua_resize, generator);
        status = generator->lua ? visit(context, generator->lua, open_state, generator, error)
                                : loom__fail_memory(error);
    }
    if (status != LOOM_OK) loom__generator_destroy(context);
    return status;
}

void loom__generator_destroy(loom_context *context) {
    loom__generator *generator = context->generator;
    if (!generator) return;
    if (generator->lua) lua_close(generator->lua);
    loom__arena_free(&generator->arena);
    context->memory.resize(context->memory.user, generator, 0);
    context->generator = NULL;
}

/* Locks, makes sure that there is a generator, and visits it. */
static loom_status run_job(loom_context *context, lua_CFunction body, job *j) {
    loom__context_lock(context);
    loom_status status = context->generator ? LOOM_OK : create_generator(context, j->error);
    if (status == LOOM_OK) {
        status = visit(context, context->generator->lua, body, j, j->error);
        if (status == LOOM_OK) status = j->status;
        if (j->status == LOOM_MEMORY || (status != LOOM_OK && context->generator->no_memory))
            status = loom__fail_memory(j->error);
    }
    loom__context_unlock(context);
    return status;
}

loom_status loom__generator_digest(loom_context *context, char digest[33], loom_error *error) {
    loom_status status = LOOM_OK;
    loom__context_lock(context);
    if (!context->generator) status = create_generator(context, error);
    if (status == LOOM_OK) memcpy(digest, context->generator->digest, 33);
    loom__context_unlock(context);
    return status;
}

loom_status loom__generator_grammar(loom_context *context, int32_t *grammar, loom_error *error) {
    loom_status status = LOOM_OK;
    loom__context_lock(context);
    if (!context->generator) status = create_generator(context, error);
    if (status == LOOM_OK) *grammar = context->generator->grammar;
    loom__context_unlock(context);
    return status;
}

/* -- Reading tables (inside a visit) --------------------------------------------------------------------- */

static void *keep_bytes(lua_State *lua, job *j, size_t bytes) {
    void *block = loom__arena_alloc(j->arena, bytes);
    if (!block) {
        j->status = loom__fail_memory(j->error);
        lua_pushliteral(lua, "out of memory");
        lua_error(lua);
    }
    return block;
}

/* Text at the top of the stack, copied and popped; NULL for nil. */
static const char *take_text(lua_State *lua, job *j, const char *what) {
    if (lua_isnil(lua, -1)) {
        lua_pop(lua, 1);
        return NULL;
    }
    size_t length;
    const char *text = lua_tolstring(lua, -1, &length);
    if (!text) luaL_error(lua, "%s is a %s, not a text", what, luaL_typename(lua, -1));
    char *copy = keep_bytes(lua, j, length + 1);
    memcpy(copy, text, length);
    lua_pop(lua, 1);
    return copy;
}

static const char *optional_text(lua_State *lua, job *j, int table, const char *name) {
    lua_getfield(lua, table, name);
    return take_text(lua, j, name);
}

static const char *text_field(lua_State *lua, job *j, int table, const char *name) {
    const char *text = optional_text(lua, j, table, name);
    if (!text) luaL_error(lua, "the generator left out '%s'", name);
    return text;
}

static bool bool_field(lua_State *lua, int table, const char *name) {
    lua_getfield(lua, table, name);
    bool value = lua_toboolean(lua, -1);
    lua_pop(lua, 1);
    return value;
}

/* Pushes table[name], nil counts as empty, and returns its length. */
static int32_t list_field(lua_State *lua, int table, const char *name) {
    if (lua_getfield(lua, table, name) == LUA_TNIL) {
        lua_pop(lua, 1);
        lua_newtable(lua);
    }
    luaL_checktype(lua, -1, LUA_TTABLE);
    return (int32_t)luaL_len(lua, -1);
}

/* Pushes list[index] and returns its place. */
static int push_row(lua_State *lua, int list, int32_t index) {
    list = lua_absindex(lua, list);
    if (lua_geti(lua, list, index + 1) != LUA_TTABLE)
        luaL_error(lua, "row %d is not a table", (int)index + 1);
    return lua_gettop(lua);
}

/* -- Calling main ---------------------------------------------------------------------------------------- */

static void push_main(lua_State *lua, loom_context *context, const char *function) {
    lua_rawgeti(lua, LUA_REGISTRYINDEX, context->generator->main);
    if (lua_getfield(lua, -1, function) != LUA_TFUNCTION) luaL_error(lua, "main.%s does not exist", function);
    lua_remove(lua, -2);
}

/* The error table that main returned behind a nil, as loom_error. */
static void take_error(lua_State *lua, job *j, int table) {
    static const loom_status STATUSES[] = {LOOM_INVALID, LOOM_UNSUPPORTED, LOOM_NOT_FOUND};
    luaL_checktype(lua, table, LUA_TTABLE);
    lua_getfield(lua, table, "status");
    lua_getfield(lua, table, "field");
    lua_getfield(lua, table, "text");
    lua_getfield(lua, table, "offset");
    const char *name = luaL_checkstring(lua, -4);
    j->status = LOOM_INTERNAL;
    for (size_t i = 0; i < sizeof STATUSES / sizeof STATUSES[0]; i++) {
        if (strcmp(name, loom_status_name(STATUSES[i])) == 0) j->status = STATUSES[i];
    }
    loom__fail(j->error, j->status, luaL_checkstring(lua, -3), "%s", luaL_checkstring(lua, -2));
    if (j->error && j->error->size >= sizeof *j->error) {
        j->error->text_offset = lua_isinteger(lua, -1) ? (int32_t)lua_tointeger(lua, -1) : -1;
    }
}

/* Calls the function below its arguments; true if it returned a value, which is then on the top. */
static bool call_main(lua_State *lua, job *j, int num_arguments) {
    lua_call(lua, num_arguments, 2);
    if (!lua_isnil(lua, -2)) {
        lua_pop(lua, 1);
        return true;
    }
    take_error(lua, j, lua_gettop(lua));
    return false;
}

static void set_text(lua_State *lua, const char *name, const char *text) {
    if (!text) return;
    lua_pushstring(lua, text);
    lua_setfield(lua, -2, name);
}

static void set_integer(lua_State *lua, const char *name, int64_t value) {
    lua_pushinteger(lua, value);
    lua_setfield(lua, -2, name);
}

static void push_shape(lua_State *lua, const char *name, const loom_shape *shape) {
    lua_newtable(lua);
    set_integer(lua, "batch", shape->batch);
    set_integer(lua, "heads_q", shape->heads_q);
    set_integer(lua, "heads_kv", shape->heads_kv);
    set_integer(lua, "seq_q", shape->seq_q);
    set_integer(lua, "seq_k", shape->seq_k);
    lua_setfield(lua, -2, name);
}

/* measured = {target = {forward = text, backward = text}}. */
static void push_measured(lua_State *lua, const loom__request *request) {
    lua_newtable(lua);
    for (int32_t i = 0; i < LOOM__NUM_TARGETS; i++) {
        lua_newtable(lua);
        set_text(lua, "forward", request->measured[i][LOOM_FORWARD]);
        set_text(lua, "backward", request->measured[i][LOOM_BACKWARD]);
        lua_setfield(lua, -2, loom__target_names[i]);
    }
    lua_setfield(lua, -2, "measured");
}

static void push_request(lua_State *lua, const loom__request *request) {
    lua_newtable(lua);
    set_text(lua, "problem", request->problem);
    set_text(lua, "target", request->target);
    set_text(lua, "arch", request->arch);
    set_text(lua, "schedule", request->schedule);
    set_text(lua, "schedule_backward", request->schedule_backward);
    set_integer(lua, "alignment", request->alignment);
    push_measured(lua, request);
    push_shape(lua, "hint", &request->hint);
    if (request->smem_bytes) {
        lua_newtable(lua);
        set_integer(lua, "smem_bytes", request->smem_bytes);
        set_integer(lua, "num_sms", request->num_sms);
        lua_pushboolean(lua, request->tensor_maps);
        lua_setfield(lua, -2, "tensor_maps");
        lua_setfield(lua, -2, "device");
    }
}

/* -- Problems -------------------------------------------------------------------------------------------- */

static int query_problem(lua_State *lua) {
    job *j = lua_touserdata(lua, 1);
    loom__problem_info *info = j->result;
    push_main(lua, j->context, "problem");
    lua_pushstring(lua, j->text);
    if (!call_main(lua, j, 1)) return 0;
    int table = lua_gettop(lua);
    *info = (loom__problem_info){.text = text_field(lua, j, table, "text"),
                                 .dtype = text_field(lua, j, table, "dtype"),
                                 .d = int_field(lua, table, "d"),
                                 .dv = int_field(lua, table, "dv"),
                                 .backward = bool_field(lua, table, "backward"),
                                 .deterministic = bool_field(lua, table, "deterministic"),
                                 .mask = optional_text(lua, j, table, "mask"),
                                 .score = optional_text(lua, j, table, "score")};
    info->num_params = list_field(lua, table, "params");
    loom__param_info *params = keep_bytes(lua, j, (size_t)info->num_params * sizeof *params);
    for (int32_t i = 0; i < info->num_params; i++) {
        int row = push_row(lua, table + 1, i);
        params[i].name = text_field(lua, j, row, "name");
        params[i].dtype = text_field(lua, j, row, "dtype");
        params[i].num_dims = list_field(lua, row, "dims");
        if (params[i].num_dims > LOOM__PARAM_DIMS)
            luaL_error(lua, "param %s has too many dimensions", params[i].name);
        for (int32_t axis = 0; axis < params[i].num_dims; axis++) {
            lua_geti(lua, row + 1, axis + 1);
            params[i].dims[axis] = take_text(lua, j, "dims");
        }
        lua_settop(lua, table + 1);
    }
    info->params = params;
    return 0;
}

loom_status loom__problem_query(loom_context *context, const char *problem, loom__arena *arena,
                                loom__problem_info *info, loom_error *error) {
    job j = {.context = context, .arena = arena, .error = error, .text = problem, .result = info};
    return run_job(context, query_problem, &j);
}

/* -- Plans ----------------------------------------------------------------------------------------------- */

static void take_kernel(lua_State *lua, job *j, int table, loom__kernel_text *k) {
    *k = (loom__kernel_text){.name = text_field(lua, j, table, "name"),
                             .pass = text_field(lua, j, table, "pass"),
                             .variant = text_field(lua, j, table, "variant"),
                             .symbol = text_field(lua, j, table, "symbol"),
                             .key = text_field(lua, j, table, "key"),
                             .arch = optional_text(lua, j, table, "arch"),
                             .threads = int_field(lua, table, "threads"),
                             .smem_bytes = int_field(lua, table, "smem_bytes")};
    lua_getfield(lua, table, "grid");
    int grid = lua_gettop(lua);
    luaL_checktype(lua, grid, LUA_TTABLE);
    k->grid_batch = text_field(lua, j, grid, "batch");
    k->grid_heads = text_field(lua, j, grid, "heads");
    k->grid_seq = text_field(lua, j, grid, "seq");
    k->grid_rows = int_field(lua, grid, "rows");
    k->grid_persistent = optional_int(lua, grid, "persistent");
    k->prepares = bool_field(lua, table, "prepares");
    k->overlaps = bool_field(lua, table, "overlaps");
    lua_settop(lua, table);

    k->num_needs = list_field(lua, table, "needs");
    const char **needs = keep_bytes(lua, j, (size_t)k->num_needs * sizeof *needs);
    for (int32_t i = 0; i < k->num_needs; i++) {
        lua_geti(lua, table + 1, i + 1);
        needs[i] = take_text(lua, j, "needs");
    }
    k->needs = needs;
    lua_settop(lua, table);

    k->num_regions = list_field(lua, table, "workspace");
    loom__region_text *regions = keep_bytes(lua, j, (size_t)k->num_regions * sizeof *regions);
    for (int32_t i = 0; i < k->num_regions; i++) {
        int row = push_row(lua, table + 1, i);
        regions[i].place = text_field(lua, j, row, "place");
        regions[i].bytes = integer_field(lua, row, "bytes");
        regions[i].prepared = bool_field(lua, row, "prepared");
        regions[i].num_dims = list_field(lua, row, "dims");
        if (regions[i].num_dims > LOOM__REGION_DIMS) luaL_error(lua, "a region has too many dims");
        for (int32_t axis = 0; axis < regions[i].num_dims; axis++) {
            lua_geti(lua, row + 1, axis + 1);
            regions[i].dims[axis] = take_text(lua, j, "dims");
        }
        lua_settop(lua, table + 1);
    }
    k->regions = regions;
    lua_settop(lua, table);

    lua_getfield(lua, table, "args");
    int args = lua_gettop(lua);
    luaL_checktype(lua, args, LUA_TTABLE);
    k->args_bytes = int_field(lua, args, "size");
    k->num_rows = list_field(lua, args, "rows");
    loom__arg_text *rows = keep_bytes(lua, j, (size_t)k->num_rows * sizeof *rows);
    for (int32_t i = 0; i < k->num_rows; i++) {
        int row = push_row(lua, args + 1, i);
        rows[i].offset = int_field(lua, row, "offset");
        rows[i].type = text_field(lua, j, row, "type");
        rows[i].source = text_field(lua, j, row, "source");
        rows[i].box_rows = optional_int(lua, row, "rows");
        rows[i].box_chunks = optional_int(lua, row, "chunks");
        lua_settop(lua, args + 1);
    }
    k->rows = rows;
    lua_settop(lua, table);
}

static int make_plan(lua_State *lua) {
    job *j = lua_touserdata(lua, 1);
    loom__generated *generated = j->result;
    push_main(lua, j->context, "plan");
    push_request(lua, j->request);
    if (!call_main(lua, j, 1)) return 0;
    int table = lua_gettop(lua);
    generated->problem = text_field(lua, j, table, "problem");
    generated->target = text_field(lua, j, table, "target");
    generated->arch = text_field(lua, j, table, "arch");
    generated->schedule = text_field(lua, j, table, "schedule");
    generated->schedule_backward = text_field(lua, j, table, "schedule_backward");
    generated->why = text_field(lua, j, table, "why");
    generated->num_kernels = list_field(lua, table, "kernels");
    loom__kernel_text *kernels = keep_bytes(lua, j, (size_t)generated->num_kernels * sizeof *kernels);
    for (int32_t i = 0; i < generated->num_kernels; i++) {
        take_kernel(lua, j, push_row(lua, table + 1, i), &kernels[i]);
        lua_settop(lua, table + 1);
    }
    generated->kernels = kernels;
    lua_settop(lua, table);
    generated->reference = luaL_ref(lua, LUA_REGISTRYINDEX);
    return 0;
}

loom_status loom__generator_plan(loom_context *context, const loom__request *request, loom__arena *arena,
                                 loom__generated *generated, loom_error *error) {
    *generated = (loom__generated){.reference = LUA_NOREF};
    job j = {.context = context, .arena = arena, .error = error, .request = request, .result = generated};
    return run_job(context, make_plan, &j);
}

static int emit_source(lua_State *lua) {
    job *j = lua_touserdata(lua, 1);
    push_main(lua, j->context, "source");
    lua_rawgeti(lua, LUA_REGISTRYINDEX, j->reference);
    lua_pushinteger(lua, j->index + 1);
    if (call_main(lua, j, 2)) *(const char **)j->result = take_text(lua, j, "source");
    return 0;
}

loom_status loom__generator_source(loom_context *context, const loom__generated *generated, int32_t index,
                                   loom__arena *arena, const char **source, loom_error *error) {
    job j = {.context = context,
             .arena = arena,
             .error = error,
             .reference = generated->reference,
             .index = index,
             .result = source};
    return run_job(context, emit_source, &j);
}

void loom__generator_release(loom_context *context, loom__generated *generated) {
    loom__context_lock(context);
    /* Freeing a reference only writes to slots that exist, so it needs no protection. */
    if (context->generator) luaL_unref(context->generator->lua, LUA_REGISTRYINDEX, generated->reference);
    generated->reference = LUA_NOREF;
    loom__context_unlock(context);
}

/* -- Candidates ------------------------------------------------------------------------------------------ */

typedef struct candidates {
    const loom__candidate *list;
    int32_t num;
} candidates;

static int list_candidates(lua_State *lua) {
    job *j = lua_touserdata(lua, 1);
    candidates *found = j->result;
    push_main(lua, j->context, "candidates");
    push_request(lua, j->request);
    set_text(lua, "pass", j->pass == LOOM_BACKWARD ? "backward" : "forward");
    if (!call_main(lua, j, 1)) return 0;
    int table = lua_gettop(lua);
    luaL_checktype(lua, table, LUA_TTABLE);
    found->num = (int32_t)luaL_len(lua, table);
    loom__candidate *list = keep_bytes(lua, j, (size_t)found->num * sizeof *list);
    for (int32_t i = 0; i < found->num; i++) {
        int row = push_row(lua, table, i);
        list[i].text = text_field(lua, j, row, "text");
        lua_getfield(lua, row, "cost");
        list[i].cost = luaL_checknumber(lua, -1);
        lua_settop(lua, table);
    }
    found->list = list;
    return 0;
}

loom_status loom__generator_candidates(loom_context *context, const loom__request *request, loom_pass pass,
                                       loom__arena *arena, const loom__candidate **list, int32_t *num,
                                       loom_error *error) {
    candidates found = {NULL, 0};
    job j = {.context = context,
             .arena = arena,
             .error = error,
             .request = request,
             .pass = pass,
             .result = &found};
    LOOM_TRY(context, run_job(context, list_candidates, &j));
    *list = found.list;
    *num = found.num;
    return LOOM_OK;
}

/* -- Manifests ------------------------------------------------------------------------------------------- */

static loom_shape take_shape(lua_State *lua, int table) {
    return (loom_shape){.batch = integer_field(lua, table, "batch"),
                        .heads_q = integer_field(lua, table, "heads_q"),
                        .heads_kv = integer_field(lua, table, "heads_kv"),
                        .seq_q = integer_field(lua, table, "seq_q"),
                        .seq_k = integer_field(lua, table, "seq_k")};
}

static int read_manifest(lua_State *lua) {
    job *j = lua_touserdata(lua, 1);
    loom__manifest *manifest = j->result;
    push_main(lua, j->context, "manifest");
    lua_pushstring(lua, j->text);
    lua_pushstring(lua, j->name);
    lua_pushstring(lua, j->archs);
    if (!call_main(lua, j, 3)) return 0;
    int table = lua_gettop(lua);
    luaL_checktype(lua, table, LUA_TTABLE);
    manifest->num = (int32_t)luaL_len(lua, table);
    loom__manifest_entry *entries = keep_bytes(lua, j, (size_t)manifest->num * sizeof *entries);
    for (int32_t i = 0; i < manifest->num; i++) {
        loom__manifest_entry *e = &entries[i];
        int row = push_row(lua, table, i);
        *e = (loom__manifest_entry){.place = text_field(lua, j, row, "place"),
                                    .problem = text_field(lua, j, row, "problem"),
                                    .arch = optional_text(lua, j, row, "arch"),
                                    .target = optional_text(lua, j, row, "target"),
                                    .schedule = optional_text(lua, j, row, "schedule"),
                                    .schedule_backward = optional_text(lua, j, row, "schedule_backward")};
        if (lua_getfield(lua, row, "hint") != LUA_TNIL) e->hint = take_shape(lua, lua_gettop(lua));
        lua_settop(lua, table);
    }
    manifest->entries = entries;
    return 0;
}

loom_status loom__generator_manifest(loom_context *context, const char *text, const char *name,
                                     const char *archs, loom__arena *arena, loom__manifest *manifest,
                                     loom_error *error) {
    job j = {.context = context,
             .arena = arena,
             .error = error,
             .text = text,
             .name = name,
             .archs = archs,
             .result = manifest};
    return run_job(context, read_manifest, &j);
}

/* -- Texts for people ------------------------------------------------------------------------------------ */

static int make_text(lua_State *lua) {
    job *j = lua_touserdata(lua, 1);
    push_main(lua, j->context, j->function);
    push_request(lua, j->request);
    push_shape(lua, "shape", &j->request->hint);
    set_text(lua, "pass", j->pass == LOOM_BACKWARD ? "backward" : "forward");
    if (call_main(lua, j, 1)) *(const char **)j->result = take_text(lua, j, j->function);
    return 0;
}

static loom_status run_text(loom_context *context, const char *function, const loom__request *request,
                            loom_pass pass, loom__arena *arena, const char **text, loom_error *error) {
    job j = {.context = context,
             .arena = arena,
             .error = error,
             .request = request,
             .pass = pass,
             .function = function,
             .result = text};
    return run_job(context, make_text, &j);
}

loom_status loom__generator_standalone(loom_context *context, const loom__request *request, loom_pass pass,
                                       loom__arena *arena, const char **text, loom_error *error) {
    return run_text(context, "standalone", request, pass, arena, text, error);
}

loom_status loom__generator_show(loom_context *context, const loom__request *request, bool svg,
                                 loom__arena *arena, const char **text, loom_error *error) {
    return run_text(context, svg ? "show_svg" : "show", request, LOOM_FORWARD, arena, text, error);
}

loom_status loom__generator_why(loom_context *context, const loom__request *request, loom_pass pass,
                                loom__arena *arena, const char **text, loom_error *error) {
    return run_text(context, "why", request, pass, arena, text, error);
}
