/* cli.c - the program: table of commands, general help, printing, progress, and what commands share.
 * Called by main.c and the tests. */
#define _POSIX_C_SOURCE 200809L
#include "cli.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cache.h"
#include "device.h"

/* -- Commands ------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} COMMANDS[] = {
    {"emit", loom__cli_emit,
     "print the source of a kernel; --standalone ejects it as one .cu that nvcc builds"},
    {"why", loom__cli_why,
     "list the schedules considered, the choice and the reasons, and the tiles of a shape"},
    {"show", loom__cli_show,
     "draw the mask of a problem in the terminal, or as SVG, with the tiles it visits"},
    {"run", loom__cli_run, "compute attention of .npy files on the GPU or the CPU"},
    {"check", loom__cli_check, "compare kernels on random inputs with a float64 reference"},
    {"compile", loom__cli_compile, "compile to a binary for any GPU, without a GPU"},
    {"bench", loom__cli_bench, "time kernels; prints CSV"},
    {"tune", loom__cli_tune, "time the schedules of a problem here, and keep the best as wisdom for plans"},
    {"wisdom", loom__cli_wisdom, "print what was tuned here, or take over what was tuned elsewhere"},
    {"pack", loom__cli_pack, "build the kernels of a manifest ahead of time, without a GPU, into one file"},
    {"plan", loom__cli_plan, "compile the kernels of a manifest into the cache here, or say what is missing"},
    {"cache", loom__cli_cache, "list, verify or clear the compiled kernels on disk"},
    {"info", loom__cli_info, "versions, compilers, devices, cache folder and environment variables"},
};
enum { NUM_COMMANDS = sizeof COMMANDS / sizeof COMMANDS[0] };

static void print_help(void) {
    printf("usage: attnloom COMMAND [PROBLEM] [options]\n\n"
           "Turns one line of text that describes an attention problem into a kernel, compiles it, keeps it "
           "and runs it.\n"
           "A problem is a data type, the head dim and what else is wanted:\n\n"
           "  bf16 d=128 causal                                     causal attention\n"
           "  bf16 d=128 mask={causal & window(4095, 0)} backward   sliding window, and its gradients\n"
           "  fp16 d=64 mask={doc[q] == doc[k]} params={doc: i32[seq_k]}\n"
           "                                                        documents packed into one sequence\n"
           "  fp32 d=80 score={softcap(50)}                         a score function\n\n"
           "commands:\n");
    for (int32_t i = 0; i < NUM_COMMANDS; i++) printf("  %-10s%s\n", COMMANDS[i].name, COMMANDS[i].summary);
    printf("\nexamples:\n"
           "  attnloom emit \"bf16 d=128 causal\" --arch sm_90\n"
           "  attnloom check \"fp32 d=64 causal backward\" --device host\n"
           "  attnloom COMMAND --help\n\n"
           "Data is printed on stdout, everything else on stderr. The exit status is 0 if all went well, 1 "
           "if something\n"
           "failed, 2 if the command line is wrong.\n");
}

static int dispatch(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : NULL;
    const char *names[NUM_COMMANDS];
    if (!word) {
        loom__cli_say("a command is missing; `attnloom --help` lists them");
        return LOOM__CLI_USAGE;
    }
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0) {
        print_help();
        return LOOM__CLI_FINE;
    }
    if (strcmp(word, "--version") == 0) {
        printf("attnloom %d.%d.%d\n", LOOM_VERSION_MAJOR, LOOM_VERSION_MINOR, LOOM_VERSION_PATCH);
        return LOOM__CLI_FINE;
    }
    for (int32_t i = 0; i < NUM_COMMANDS; i++) {
        if (strcmp(word, COMMANDS[i].name) == 0) return COMMANDS[i].run(argc - 1, argv + 1);
        names[i] = COMMANDS[i].name;
    }
    const char *closest = loom__cli_closest(word, names, NUM_COMMANDS);
    if (closest)
        loom__cli_say("%s: no such command; did you mean %s?", word, closest);
    else
        loom__cli_say("%s: no such command; `attnloom --help` lists them", word);
    return LOOM__CLI_USAGE;
}

int loom__cli_main(int argc, char **argv) {
    int status = dispatch(argc, argv);
    // A full disk or a closed pipe shows only when the data leaves the buffer.
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == LOOM__CLI_FINE) {
        loom__cli_say("stdout: cannot be written: %s", strerror(errno));
        status = LOOM__CLI_FAILED;
    }
    return status;
}

/* -- Plans ---------------------------------------------------------------------------------------------- */

void loom__cli_plan_desc(const loom__cli_common *common, const char *problem, loom_plan_desc *desc) {
    *desc = (loom_plan_desc)LOOM_PLAN_DESC_INIT;
    desc->problem = problem;
    desc->target = common->target;
    desc->arch = common->arch;
    if (common->pass == LOOM_BACKWARD)
        desc->schedule_backward = common->schedule;
    else
        desc->schedule = common->schedule;
    desc->device = common->device;
    desc->alignment = (int32_t)common->alignment;
    desc->hint = common->shape;
}

loom_status loom__cli_plan_create_quietly(loom_context *context, loom_plan_desc *desc, loom_plan **plan,
                                          loom_error *error) {
    int32_t count = 0;
    if (desc->device != LOOM__CLI_DEVICE_AUTO) return loom_plan_create(context, desc, plan, error);
    // A GPU target that was asked for is never replaced: without a GPU the driver's error says what is
    // missing.
    bool free_choice = !desc->target;
    bool gpu = free_choice ? loom__device_count(context, &count, NULL) == LOOM_OK && count > 0
                           : strcmp(desc->target, "host") != 0;
    desc->device = gpu ? 0 : LOOM_DEVICE_HOST;
    if (free_choice && !gpu) loom__cli_say("no GPU here, so the CPU is used (--device host)");
    loom_status status = loom_plan_create(context, desc, plan, error);
    if (status != LOOM_UNSUPPORTED || !gpu || !free_choice) return status;
    loom__cli_say("%s: %s; so the CPU is used (--device host)", error->field, error->text);
    desc->device = LOOM_DEVICE_HOST;
    return loom_plan_create(context, desc, plan, error);
}

loom_status loom__cli_plan_create(loom_context *context, loom_plan_desc *desc, loom_plan **plan,
                                  loom_error *error) {
    loom__cli_progress *progress = loom__cli_progress_start("compiling");
    loom_status status = loom__cli_plan_create_quietly(context, desc, plan, error);
    loom__cli_progress_stop(progress);
    return status;
}

/* -- Printing ------------------------------------------------------------------------------------------- */

void loom__cli_say(const char *format, ...) {
    va_list list;
    va_start(list, format);
    fputs("attnloom: ", stderr);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    va_end(list);
}

int loom__cli_fail(const loom_error *error) {
    size_t length = strlen(error->text);
    bool ended = length && error->text[length - 1] == '\n';
    fprintf(stderr, "attnloom: %s: %s%s", error->field, error->text, ended ? "" : "\n");
    return LOOM__CLI_FAILED;
}

const char *loom__cli_key_value(loom__arena *arena, const char *key, const char *name) {
    size_t length = 0;
    const char *value = loom__key_value(key, name, &length);
    const char *copy = value ? loom__arena_copy(arena, value, length) : NULL;
    return copy ? copy : "?";
}

/* -- Progress ------------------------------------------------------------------------------------------- */

struct loom__cli_progress {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stop;
    char what[96];
    int64_t done, total;
    double start;
};

/* Sleeps until a moment of the monotonic clock or until it is told to stop; the lock is held. */
static bool stopped_before(loom__cli_progress *progress, double moment) {
    struct timespec until = {(time_t)moment, (long)((moment - (double)(time_t)moment) * 1e9)};
    while (!progress->stop && pthread_cond_timedwait(&progress->wake, &progress->lock, &until) != ETIMEDOUT)
        continue;
    return progress->stop;
}

static void *show_progress(void *argument) {
    loom__cli_progress *progress = argument;
    const double first_s = 2, every_s = 0.5;
    bool shown = false;
    pthread_mutex_lock(&progress->lock);
    double moment = progress->start + first_s;
    while (!stopped_before(progress, moment)) {
        char count[48] = "", left[48] = "";
        double seconds = loom__now() - progress->start;
        if (progress->total)
            snprintf(count, sizeof count, " %lld/%lld", (long long)progress->done,
                     (long long)progress->total);
        if (progress->done)
            snprintf(left, sizeof left, ", about %.0f s left",
                     seconds * (double)(progress->total - progress->done) / (double)progress->done);
        fprintf(stderr, "\r\033[Kattnloom: %s%s, %.0f s%s", progress->what, count, seconds, left);
        shown = true;
        moment = loom__now() + every_s;
    }
    if (shown) fputs("\r\033[K", stderr);
    pthread_mutex_unlock(&progress->lock);
    return NULL;
}

loom__cli_progress *loom__cli_progress_start(const char *what) {
    pthread_condattr_t attributes;
    if (!isatty(STDERR_FILENO)) return NULL;
    loom__cli_progress *progress = calloc(1, sizeof *progress);
    if (!progress) return NULL;
    snprintf(progress->what, sizeof progress->what, "%s", what);
    progress->start = loom__now();
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&progress->lock, NULL);
    pthread_cond_init(&progress->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    if (pthread_create(&progress->thread, NULL, show_progress, progress) != 0) {
        pthread_cond_destroy(&progress->wake);
        pthread_mutex_destroy(&progress->lock);
        free(progress);
        return NULL;
    }
    return progress;
}

void loom__cli_progress_step(loom__cli_progress *progress, int64_t done, int64_t total, const char *what) {
    if (!progress) return;
    pthread_mutex_lock(&progress->lock);
    progress->done = done;
    progress->total = total;
    snprintf(progress->what, sizeof progress->what, "%s", what);
    pthread_mutex_unlock(&progress->lock);
}

void loom__cli_progress_stop(loom__cli_progress *progress) {
    if (!progress) return;
    pthread_mutex_lock(&progress->lock);
    progress->stop = true;
    pthread_cond_signal(&progress->wake);
    pthread_mutex_unlock(&progress->lock);
    pthread_join(progress->thread, NULL);
    pthread_cond_destroy(&progress->wake);
    pthread_mutex_destroy(&progress->lock);
    free(progress);
}

/* -- Files ---------------------------------------------------------------------------------------------- */

loom_status loom__cli_write_file(const char *path, const void *bytes, size_t size, loom_error *error) {
    struct stat info;
    size_t length = strlen(path);
    // A pipe or /dev/null cannot be replaced by a rename; it is written in place.
    bool in_place = stat(path, &info) == 0 && !S_ISREG(info.st_mode);
    char *name = malloc(length + sizeof ".XXXXXX");
    FILE *file = NULL;
    loom_status status = LOOM_OK;
    if (!name) return loom__fail(error, LOOM_MEMORY, "memory", "%zu bytes for a file name", length);
    memcpy(name, path, length + 1);
    if (in_place) {
        file = fopen(path, "wb");
    } else {
        memcpy(name + length, ".XXXXXX", sizeof ".XXXXXX");
        int descriptor = mkstemp(name);
        if (descriptor >= 0) {
            mode_t mask = umask(0);
            umask(mask);
            fchmod(descriptor, 0666 & ~mask); // mkstemp makes a private file; the user asked for a plain one
            file = fdopen(descriptor, "wb");
        }
    }
    if (!file) {
        status = loom__fail(error, LOOM_IO, path, "cannot be written: %s", strerror(errno));
        goto out;
    }
    bool written = fwrite(bytes, 1, size, file) == size;
    written = fclose(file) == 0 && written;
    if (!written || (!in_place && rename(name, path) != 0)) {
        status = loom__fail(error, LOOM_IO, path, "cannot be written: %s", strerror(errno));
        if (!in_place) unlink(name);
    }
out:
    free(name);
    return status;
}
