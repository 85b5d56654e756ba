/* test_gen.c - runs the Lua tests of the generator, tests/gen/test_*.lua: each returns a table of functions that raise
 * an error to fail, and each function is one test here. Runs in the source folder. Lua's own print has no stream in
 * this build: messages are errors.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

#include "attnloom.h"

static const char *const FILES[] = {"expression", "problem",  "interval", "functions", "forms",
                                    "units",      "schedule", "plan",     "wgmma",     "manifest"};

enum { MAX_TESTS = 200, NAME_BYTES = 96 };

static lua_State *lua;
static char names[MAX_TESTS][NAME_BYTES];
static struct CMUnitTest tests[MAX_TESTS];

static int add_traceback(lua_State *state) {
    luaL_traceback(state, state, lua_tostring(state, 1), 1);
    return 1;
}

/* The test's function lies in the registry under its own name. */
static void run_function(void **state) {
    lua_pushcfunction(lua, add_traceback);
    lua_getfield(lua, LUA_REGISTRYINDEX, *state);
    int status = lua_pcall(lua, 0, 0, 1);
    if (status != LUA_OK)
        print_error("%s\n", lua_tostring(lua, -1));
    lua_settop(lua, 0);
    assert_int_equal(status, LUA_OK);
}

/* The library's embedded generator is the one of the source folder. */
static void canonical_text_of_the_library(void **state) {
    (void)state;
    static const char PROBLEM[] = "fp16 d=64 backward mask={window(l, 0) & document(doc)} params={l: i32, doc: i64[seq_k]}";
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_options options = LOOM_OPTIONS_INIT;
    char text[512] = "";
    options.cache_dir = "";
    assert_int_equal(loom_context_create(&options, &context, &error), LOOM_OK);
    assert_int_equal(loom_problem_canonical(context, PROBLEM, text, sizeof text, NULL, &error), LOOM_OK);
    loom_context_destroy(context);
    lua_pushfstring(lua, "return require('problem').parse('%s').text", PROBLEM);
    assert_int_equal(luaL_dostring(lua, lua_tostring(lua, 1)), LUA_OK);
    assert_string_equal(text, lua_tostring(lua, -1));
    lua_settop(lua, 0);
}

static void require_ok(int status) {
    if (status == LUA_OK)
        return;
    print_error("%s\n", lua_tostring(lua, -1));
    exit(1);
}

static int compare_tests(const void *a, const void *b) {
    return strcmp(((const struct CMUnitTest *)a)->name, ((const struct CMUnitTest *)b)->name);
}

/* Appends the functions of a file in the order of their names. */
static size_t collect(const char *file, size_t num_tests) {
    lua_settop(lua, 0);
    lua_pushfstring(lua, "return (require 'test_%s')", file);
    require_ok(luaL_dostring(lua, lua_tostring(lua, 1)));
    const size_t first = num_tests;
    for (lua_pushnil(lua); lua_next(lua, -2); num_tests++) {
        if (num_tests == MAX_TESTS - 1) {
            print_error("more tests than there is room for\n");
            exit(1);
        }
        char *name = names[num_tests];
        snprintf(name, NAME_BYTES, "%s.%s", file, lua_tostring(lua, -2));
        lua_setfield(lua, LUA_REGISTRYINDEX, name);
        tests[num_tests] = (struct CMUnitTest){.name = name, .test_func = run_function, .initial_state = name};
    }
    qsort(tests + first, num_tests - first, sizeof *tests, compare_tests);
    return num_tests;
}

int main(void) {
    size_t num_tests = 0;
    lua = luaL_newstate();
    if (!lua)
        return 1;
    luaL_openlibs(lua);
    require_ok(luaL_dostring(lua, "package.path = 'gen/?.lua;tests/gen/?.lua'"));
    for (size_t i = 0; i < sizeof FILES / sizeof *FILES; i++)
        num_tests = collect(FILES[i], num_tests);
    tests[num_tests++] = (struct CMUnitTest)cmocka_unit_test(canonical_text_of_the_library);
    int failed = _cmocka_run_group_tests("gen", tests, num_tests, NULL, NULL);
    lua_close(lua);
    return failed != 0;
}
