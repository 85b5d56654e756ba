/* cli.h - what the commands of `attnloom` share: the table of commands, options as rows, printing, progress.
 *
 * Every command is `int loom__cli_NAME(int argc, char **argv)`, argv[0] being the command's word, and returns
 * the exit status: LOOM__CLI_FINE, LOOM__CLI_FAILED or LOOM__CLI_USAGE. Data goes to stdout, all else to
 * stderr. A command describes itself by one loom__cli_command; parsing and `--help` are both made from it.
 */
#ifndef LOOM_CLI_H
#define LOOM_CLI_H

#include <stddef.h>

#include "common.h"
#include "generator.h"

enum { LOOM__CLI_FINE = 0, LOOM__CLI_FAILED = 1, LOOM__CLI_USAGE = 2 };

/* -- Options -------------------------------------------------------------------------------------------- */

typedef enum loom__cli_kind {
    LOOM__CLI_FLAG,    /* bool */
    LOOM__CLI_TEXT,    /* const char * */
    LOOM__CLI_TEXTS,   /* loom__cli_texts: may be given several times */
    LOOM__CLI_WHOLE,   /* int64_t, not negative */
    LOOM__CLI_MOST,    /* int32_t, above 0; the word `all` is INT32_MAX */
    LOOM__CLI_REAL,    /* double; finite and above 0 as a float, so that 0 can stand for "not given" */
    LOOM__CLI_WHOLES,  /* loom__cli_wholes: 64,128,256 */
    LOOM__CLI_CHOICE,  /* int32_t: index among the words of `value`, "a|b|c" */
    LOOM__CLI_CHOICES, /* uint32_t: bit per word, given as a,b */
    LOOM__CLI_DEVICE,  /* int32_t: ordinal or LOOM_DEVICE_HOST */
    LOOM__CLI_SHAPE    /* loom_shape */
} loom__cli_kind;

enum { LOOM__CLI_MAX_LIST = 32 };

typedef struct loom__cli_texts {
    int32_t num;
    const char *items[LOOM__CLI_MAX_LIST];
} loom__cli_texts;

typedef struct loom__cli_wholes {
    int32_t num;
    int64_t items[LOOM__CLI_MAX_LIST];
} loom__cli_wholes;

typedef struct loom__cli_option {
    const char *name;  /* "--shape", or "-o" */
    const char *value; /* what stands for the value in the help; the words of a choice; NULL for a flag */
    loom__cli_kind kind;
    size_t offset; /* of the member in the struct of values that loom__cli_parse fills */
    const char *help;
} loom__cli_option;

typedef struct loom__cli_command {
    const char *name;
    const char *operands; /* "PROBLEM", "[PROBLEM]", "" */
    int32_t min_operands, max_operands;
    const char *text;     /* paragraphs of the help, each one line; it is wrapped when printed */
    const char *examples; /* lines, printed as they are */
    const loom__cli_option *options;
    int32_t num_options;
} loom__cli_command;

/* Fills `values`, which holds the defaults, and `operands` (max_operands of them, NULL where not given).
 * Returns -1 to go on, else the exit status: help was printed, or the usage was wrong and has been said. */
int loom__cli_parse(const loom__cli_command *command, int argc, char **argv, void *values,
                    const char **operands);

/* Name among `names` that is nearest to `word` by edits, NULL when none is near. */
const char *loom__cli_closest(const char *word, const char *const *names, int32_t num_names);

/* Reads "batch=2 heads=32:8 seq=4096:4096" into *shape; keys that are not given keep their value. False: *why
 * says what is wrong (capacity bytes). */
bool loom__cli_parse_shape(const char *text, loom_shape *shape, char *why, size_t capacity);

/* -- Options that several commands take ----------------------------------------------------------------- */

#define LOOM__CLI_DEVICE_AUTO (-3)

/* First member of a command's struct of values, so that the rows below fit each of them. */
typedef struct loom__cli_common {
    int32_t pass; /* a loom_pass */
    const char *target, *arch, *schedule;
    int32_t most_schedules; /* of a sweep, 0: none */
    int32_t device;
    int64_t alignment;
    loom_shape shape;
} loom__cli_common;
#define LOOM__CLI_COMMON_INIT                                                                                \
    {                                                                                                        \
        LOOM_FORWARD, NULL, NULL, NULL, 0, LOOM__CLI_DEVICE_AUTO, 16, { 2, 8, 8, 1024, 1024 }                \
    }

#define LOOM__CLI_ROW_PASS                                                                                   \
    {                                                                                                        \
        "--pass", "forward|backward", LOOM__CLI_CHOICE, offsetof(loom__cli_common, pass),                    \
            "pass (default forward)"                                                                         \
    }
#define LOOM__CLI_ROW_TARGET                                                                                 \
    {                                                                                                        \
        "--target", "host|mma|hopper", LOOM__CLI_TEXT, offsetof(loom__cli_common, target),                   \
            "family of kernels (default: the best one for the device or arch)"                               \
    }
#define LOOM__CLI_ROW_ARCH                                                                                   \
    {                                                                                                        \
        "--arch", "sm_90", LOOM__CLI_TEXT, offsetof(loom__cli_common, arch),                                 \
            "GPU architecture, sm_75 and up; needs no GPU (default sm_90)"                                   \
    }
#define LOOM__CLI_ROW_DEVICE                                                                                 \
    {                                                                                                        \
        "--device", "N|host", LOOM__CLI_DEVICE, offsetof(loom__cli_common, device),                          \
            "CUDA device or the CPU (default: device 0 if there is a GPU, else host)"                        \
    }
#define LOOM__CLI_ROW_SHAPE                                                                                  \
    {                                                                                                        \
        "--shape", "TEXT", LOOM__CLI_SHAPE, offsetof(loom__cli_common, shape),                               \
            "run-time numbers, batch=B heads=Q[:KV] seq=Q[:K] (default batch=2 heads=8 seq=1024)"            \
    }
#define LOOM__CLI_ROW_SCHEDULE                                                                               \
    {                                                                                                        \
        "--schedule", "TEXT", LOOM__CLI_TEXT, offsetof(loom__cli_common, schedule),                          \
            "force the schedule of the pass, e.g. \"tile=128x64 warps=4\"; `attnloom why` lists candidates"  \
    }
#define LOOM__CLI_ROW_SCHEDULES                                                                              \
    {                                                                                                        \
        "--schedules", "all|N", LOOM__CLI_MOST, offsetof(loom__cli_common, most_schedules),                  \
            "instead of one schedule of the pass all that fit, or the N cheapest by the generator's model"   \
    }
#define LOOM__CLI_ROW_ALIGNMENT                                                                              \
    {                                                                                                        \
        "--alignment", "0|16", LOOM__CLI_WHOLE, offsetof(loom__cli_common, alignment),                       \
            "promise that pointers and strides are multiples of so many bytes (default 16)"                  \
    }

/* Plan description from the options: problem, target, arch, schedule of the pass, device, alignment, hint. */
void loom__cli_plan_desc(const loom__cli_common *common, const char *problem, loom_plan_desc *desc);

/* loom_plan_create, but resolves desc->device LOOM__CLI_DEVICE_AUTO first: the first GPU if there is one; the
 * host if there is none, if the target is host, or if no GPU target takes the problem (which it says on
 * stderr). Shows progress. */
loom_status loom__cli_plan_create(loom_context *context, loom_plan_desc *desc, loom_plan **plan,
                                  loom_error *error);

/* The same without progress, for those who show their own or measure the time. */
loom_status loom__cli_plan_create_quietly(loom_context *context, loom_plan_desc *desc, loom_plan **plan,
                                          loom_error *error);

/* -- Many plans ----------------------------------------------------------------------------------------- */

typedef struct loom__cli_plans {
    int32_t num;
    loom_plan_desc *descs;
    const char **names; /* of each plan, for messages */
} loom__cli_plans;

/* The plans of desc with the `most` cheapest schedules of a pass, which --schedules asks for. `arch` is that
 * of desc's device. All is in the arena. */
loom_status loom__cli_list_schedules(loom_context *context, const loom_plan_desc *desc, const char *arch,
                                     loom_pass pass, int32_t most, loom__arena *arena, loom__cli_plans *list,
                                     const loom__candidate **schedules, loom_error *error);

/* The plans of a manifest for each of the archs, "sm_80,sm_90a", without a device. Says which entries are for
 * none of them. */
loom_status loom__cli_list_manifest(loom_context *context, const char *path, const char *archs,
                                    loom__arena *arena, loom__cli_plans *list, loom_error *error);

/* A plan that is ready, of the list's `index`; the callee owns it. */
typedef loom_status (*loom__cli_use_plan)(void *user, int32_t index, loom_plan *plan, loom_error *error);

/* Makes the plans, a few at a time, and hands them over in their order. One that cannot be made is said on
 * stderr and left out, and *fine becomes false. */
loom_status loom__cli_make_plans(loom_context *context, const loom__cli_plans *list, loom__cli_use_plan use,
                                 void *user, bool *fine, loom_error *error);

/* -- Printing ------------------------------------------------------------------------------------------- */

/* Line on stderr with the prefix "attnloom: ". */
void loom__cli_say(const char *format, ...) LOOM__PRINTF(1, 2);

/* Prints `attnloom: FIELD: text` on stderr; returns LOOM__CLI_FAILED. */
int loom__cli_fail(const loom_error *error);

/* Value of a line "name value" of the key or certificate of a cache entry, in the arena; "?" where there is
 * none. */
const char *loom__cli_key_value(loom__arena *arena, const char *key, const char *name);

/* -- Progress ------------------------------------------------------------------------------------------- */

/* One line on stderr, rewritten in place, shown only on a terminal and only once 2 s have passed. */
typedef struct loom__cli_progress loom__cli_progress;
loom__cli_progress *
loom__cli_progress_start(const char *what); /* NULL when it will never show: accepted by the rest */
void loom__cli_progress_step(loom__cli_progress *progress, int64_t done, int64_t total, const char *what);
void loom__cli_progress_stop(loom__cli_progress *progress);

/* -- Files ---------------------------------------------------------------------------------------------- */

/* Writes a file under a temporary name beside it and renames it, so that it is there whole or not at all. */
loom_status loom__cli_write_file(const char *path, const void *bytes, size_t size, loom_error *error);

/* -- Commands ------------------------------------------------------------------------------------------- */

/* The program: everything but main(). */
int loom__cli_main(int argc, char **argv);

int loom__cli_emit(int argc, char **argv);
int loom__cli_why(int argc, char **argv);
int loom__cli_show(int argc, char **argv);
int loom__cli_run(int argc, char **argv);
int loom__cli_check(int argc, char **argv);
int loom__cli_compile(int argc, char **argv);
int loom__cli_bench(int argc, char **argv);
int loom__cli_tune(int argc, char **argv);
int loom__cli_wisdom(int argc, char **argv);
int loom__cli_cache(int argc, char **argv);
int loom__cli_pack(int argc, char **argv);
int loom__cli_plan(int argc, char **argv);
int loom__cli_info(int argc, char **argv);

#endif
