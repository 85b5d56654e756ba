/* compile.c - finding and running the two compilers. See compile.h.
 *
 * NVRTC: of all libraries found, the newest whose major version is not above the driver's, as code of a newer
 * major does not load. Its version is read from the name of the libnvrtc-builtins beside it; only where that
 * does not tell is the library loaded to ask. Host: $CC, else cc, started without a shell in a folder of its
 * own, so that no path of the user ever reaches its command line. Fails with COMPILE, the compiler's first
 * lines and where its whole output is.
 */
#define _GNU_SOURCE
#include "compile.h"

#include <ctype.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device.h"

extern char **environ;

/* -- NVRTC: finding -------------------------------------------------------------------------------------- */

/* Options every CUDA kernel is compiled with, behind --gpu-architecture. */
static const char CUDA_OPTIONS[] = "--ptxas-options=-v";

/* CUDA 11 named its library by minor versions and lacks what kernels use. */
enum { OLDEST_MAJOR = 12, NEWEST_MAJOR = 20, MAX_MINOR = 9, OLDEST_PYTHON = 8, NEWEST_PYTHON = 20 };

enum { MAX_FOLDERS = 64 };

typedef struct search {
    loom_context *context;
    loom__arena *arena; /* for paths that are only tried */
    int32_t max_major;  /* the driver's, NEWEST_MAJOR without a driver */
    loom__toolchain *best;
    int32_t refused_major, refused_minor; /* newest that the driver does not take, 0: none */
    const char *refused_path;
    bool no_memory;
    struct stat seen[MAX_FOLDERS]; /* folders looked into */
    int num_seen;
} search;

typedef int (*nvrtc_version)(int *major, int *minor);

static bool ask_version(const char *path, int32_t *major, int32_t *minor) {
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (!library) return false;
    nvrtc_version version;
    *(void **)&version = dlsym(library, "nvrtcVersion");
    int found_major = 0, found_minor = 0;
    bool known = version && version(&found_major, &found_minor) == 0;
    *major = found_major;
    *minor = found_minor;
    dlclose(library);
    return known;
}

/* Minor version by the name of the builtins library beside, which NVRTC needs to be of its own version; -1
 * when there is not exactly one. */
static int32_t minor_beside(search *s, const char *folder, int32_t major) {
    int32_t minor = -1;
    for (int32_t m = 0; m <= MAX_MINOR; m++) {
        const char *path = loom__arena_print(s->arena, "%s/libnvrtc-builtins.so.%d.%d", folder, major, m);
        if (!path) {
            s->no_memory = true;
            return -1;
        }
        if (access(path, R_OK)) continue;
        if (minor >= 0) return -1;
        minor = m;
    }
    return minor;
}

static void consider(search *s, const char *path, int32_t major, int32_t minor) {
    if (major > s->max_major) {
        if (major > s->refused_major || (major == s->refused_major && minor > s->refused_minor)) {
            s->refused_major = major;
            s->refused_minor = minor;
            s->refused_path = path;
        }
        return;
    }
    loom__toolchain *best = s->best;
    if (best->path && (major < best->major || (major == best->major && minor <= best->minor))) return;
    best->path = path;
    best->major = major;
    best->minor = minor;
}

static void look_in(search *s, const char *folder) {
    /* Most of the folders are not there, and some are links to one another: each name looked up costs. */
    struct stat facts;
    if (!folder || !*folder || stat(folder, &facts)) return;
    for (int i = 0; i < s->num_seen; i++) {
        if (s->seen[i].st_dev == facts.st_dev && s->seen[i].st_ino == facts.st_ino) return;
    }
    if (s->num_seen < MAX_FOLDERS) s->seen[s->num_seen++] = facts;
    for (int32_t major = OLDEST_MAJOR; major <= NEWEST_MAJOR; major++) {
        const char *path = loom__arena_print(s->arena, "%s/libnvrtc.so.%d", folder, major);
        if (!path) {
            s->no_memory = true;
            return;
        }
        if (access(path, R_OK)) continue;
        int32_t real_major = major, minor = minor_beside(s, folder, major);
        if (minor >= 0 || (ask_version(path, &real_major, &minor) && real_major >= OLDEST_MAJOR)) {
            consider(s, path, real_major, minor);
        }
    }
}

static void look_below(search *s, const char *root, const char *folder) {
    if (!root || !*root) return;
    const char *path = loom__arena_print(s->arena, "%s/%s", root, folder);
    if (!path) s->no_memory = true;
    look_in(s, path);
}

/* Folders of a list as in LD_LIBRARY_PATH. */
static void look_along(search *s, const char *list) {
    while (list && *list) {
        size_t length = strcspn(list, ":;");
        if (length) {
            const char *folder = loom__arena_copy(s->arena, list, length);
            if (!folder) s->no_memory = true;
            look_in(s, folder);
        }
        list += length + (list[length] != 0);
    }
}

/* The wheels nvidia-cuda-nvrtc and nvidia-cuda-nvrtc-cu12 of every Python below a prefix; Python is not run.
 */
static void look_in_wheels(search *s, const char *prefix) {
    static const char *const SITES[] = {"site-packages", "dist-packages"};
    static const char *const WHEELS[] = {"cu13", "cu12", "cuda_nvrtc"};
    if (!prefix || !*prefix) return;
    for (int32_t minor = OLDEST_PYTHON; minor <= NEWEST_PYTHON + 1; minor++) {
        /* Debian keeps packages of all versions in python3. */
        const char *python = minor > NEWEST_PYTHON
                                 ? loom__arena_print(s->arena, "%s/lib/python3", prefix)
                                 : loom__arena_print(s->arena, "%s/lib/python3.%d", prefix, minor);
        if (!python) {
            s->no_memory = true;
            return;
        }
        if (access(python, X_OK)) continue;
        for (size_t site = 0; site < sizeof SITES / sizeof SITES[0]; site++) {
            for (size_t wheel = 0; wheel < sizeof WHEELS / sizeof WHEELS[0]; wheel++) {
                const char *folder =
                    loom__arena_print(s->arena, "%s/%s/nvidia/%s/lib", python, SITES[site], WHEELS[wheel]);
                if (!folder) s->no_memory = true;
                look_in(s, folder);
            }
        }
    }
}

static void look_in_toolkits(search *s) {
    DIR *dir = opendir("/usr/local");
    struct dirent *row;
    while (dir && (row = readdir(dir))) {
        if (strncmp(row->d_name, "cuda", 4) != 0) continue;
        const char *root = loom__arena_print(s->arena, "/usr/local/%s", row->d_name);
        if (!root) s->no_memory = true;
        look_below(s, root, "lib64");
        look_below(s, root, "targets/x86_64-linux/lib");
        look_below(s, root, "targets/sbsa-linux/lib");
    }
    if (dir) closedir(dir);
}

static void look_everywhere(search *s) {
    static const char *const SYSTEM[] = {"/usr/lib/x86_64-linux-gnu",
                                         "/usr/lib/aarch64-linux-gnu",
                                         "/usr/lib64",
                                         "/usr/lib",
                                         "/lib64",
                                         "/usr/local/lib",
                                         "/opt/cuda/lib64"};
    const loom__environment *e = &s->context->environment;
    look_below(s, e->cuda_home, "lib64");
    look_below(s, e->cuda_home, "lib");
    look_below(s, e->cuda_path, "lib64");
    look_below(s, e->cuda_path, "lib");
    look_along(s, e->ld_library_path);
    for (size_t i = 0; i < sizeof SYSTEM / sizeof SYSTEM[0]; i++) look_in(s, SYSTEM[i]);
    look_in_toolkits(s);
    look_below(s, e->conda_prefix, "lib");
    look_in_wheels(s, e->virtual_env);
    look_in_wheels(s, e->conda_prefix);
    if (e->home) look_in_wheels(s, loom__arena_print(s->arena, "%s/.local", e->home));
    look_in_wheels(s, "/usr/local");
    look_in_wheels(s, "/usr");
}

/* Whatever the dynamic linker finds by name, for systems with other folders. */
static void look_by_name(search *s) {
    for (int32_t major = s->max_major; major >= OLDEST_MAJOR && !s->best->path; major--) {
        const char *name = loom__arena_print(s->arena, "libnvrtc.so.%d", major);
        int32_t real_major, minor;
        if (!name) {
            s->no_memory = true;
            return;
        }
        if (ask_version(name, &real_major, &minor)) consider(s, name, real_major, minor);
    }
}

static loom_status describe_nvrtc(loom_context *context, loom__toolchain *t, loom_error *error) {
    struct stat facts;
    long long bytes = stat(t->path, &facts) ? 0 : (long long)facts.st_size;
    t->path = loom__arena_copy(&context->arena, t->path, strlen(t->path));
    t->name = loom__arena_print(&context->arena, "nvrtc %d.%d", t->major, t->minor);
    /* Updates of one version differ in size. */
    const char *more = context->environment.loom_nvrtc_opts;
    t->identity =
        loom__arena_print(&context->arena, "compiler nvrtc %d.%d, %lld bytes\noptions %s%s%s\n", t->major,
                          t->minor, bytes, CUDA_OPTIONS, more ? " " : "", more ? more : "");
    return t->path && t->name && t->identity ? LOOM_OK : loom__fail_memory(error);
}

static loom_status search_nvrtc(loom_context *context, loom__toolchain *t, loom_error *error) {
    static const char INSTALL[] = "install it with the CUDA toolkit, or `pip install nvidia-cuda-nvrtc%s` "
                                  "and set LOOM_NVRTC_DIR to the folder of libnvrtc.so";
    loom__arena arena = {&context->memory, NULL};
    loom_status status = LOOM_OK;
    int32_t version = 0;
    bool have_driver = loom__driver_version(context, &version, NULL) == LOOM_OK && version >= 1000;
    search s = {.context = context,
                .arena = &arena,
                .max_major = have_driver ? version / 1000 : NEWEST_MAJOR,
                .best = t};
    if (s.max_major > NEWEST_MAJOR) s.max_major = NEWEST_MAJOR;
    look_in(&s, context->nvrtc_dir);
    if (!t->path) look_everywhere(&s);
    if (!t->path) look_by_name(&s);
    char install[256];
    snprintf(install, sizeof install, INSTALL, have_driver && version / 1000 == 12 ? "-cu12" : "");
    if (s.no_memory) {
        status = loom__fail_memory(error);
    } else if (t->path) {
        status = describe_nvrtc(context, t, error);
    } else if (s.refused_path) {
        status = loom__fail(error, LOOM_COMPILE, "nvrtc",
                            "NVRTC %d.%d (%s) is too new for the driver, which takes CUDA %d.%d: install "
                            "NVRTC %d (%s), or a newer driver (CUDA 13 needs 580)",
                            s.refused_major, s.refused_minor, s.refused_path, version / 1000,
                            version % 1000 / 10, version / 1000, install);
    } else if (have_driver) {
        status = loom__fail(error, LOOM_COMPILE, "nvrtc",
                            "no NVRTC of CUDA 12 to %d was found; the driver takes CUDA %d.%d: %s",
                            s.max_major, version / 1000, version % 1000 / 10, install);
    } else {
        status = loom__fail(error, LOOM_COMPILE, "nvrtc",
                            "no NVRTC of CUDA 12 or newer was found, and no driver: %s", install);
    }
    if (status != LOOM_OK) t->path = NULL;
    loom__arena_free(&arena);
    return status;
}

/* -- The C compiler: finding ----------------------------------------------------------------------------- */

enum { MAX_WORDS = 32, MAX_OUTPUT = 64 * 1024 };

/* Splits a command at spaces; `field` names the variable it is from. The words live in the arena. */
static loom_status split_words(loom__arena *arena, const char *text, const char *field, const char **words,
                               int *num_words, loom_error *error) {
    while (text && *text) {
        text += strspn(text, " \t\n");
        size_t length = strcspn(text, " \t\n");
        if (!length) break;
        if (*num_words == MAX_WORDS)
            return loom__fail(error, LOOM_INVALID, field, "%s has more than %d words", field, MAX_WORDS);
        words[*num_words] = loom__arena_copy(arena, text, length);
        if (!words[*num_words]) return loom__fail_memory(error);
        ++*num_words;
        text += length;
    }
    return LOOM_OK;
}

static bool is_program(const char *path) {
    struct stat facts;
    return access(path, X_OK) == 0 && stat(path, &facts) == 0 && S_ISREG(facts.st_mode);
}

/* What shells take where PATH is not set. */
#define DEFAULT_PATH "/usr/local/bin:/usr/bin:/bin"

/* Full path of a program as a shell would find it, but for folders of PATH that are not absolute. */
static loom_status find_program(loom__arena *arena, const char *path, const char *name, const char **found,
                                loom_error *error) {
    char folder[4096];
    *found = NULL;
    if (!path) path = DEFAULT_PATH;
    if (*name == '/') {
        if (is_program(name)) *found = name;
    } else if (strchr(name, '/')) {
        if (is_program(name) && getcwd(folder, sizeof folder))
            *found = loom__arena_print(arena, "%s/%s", folder, name);
    }
    while (!strchr(name, '/') && path && *path && !*found) {
        size_t length = strcspn(path, ":");
        if (length && *path == '/') {
            const char *full = loom__arena_print(arena, "%.*s/%s", (int)length, path, name);
            if (!full) return loom__fail_memory(error);
            if (is_program(full)) *found = full;
        }
        path += length + (path[length] != 0);
    }
    if (*found) {
        *found = loom__arena_copy(arena, *found, strlen(*found));
        return *found ? LOOM_OK : loom__fail_memory(error);
    }
    return loom__fail(error, LOOM_COMPILE, "cc",
                      "no C compiler: there is no program '%s' in PATH; install gcc or clang, or set CC",
                      name);
}

/* Environment of a child: the caller's, with messages in English and temporary files in the folder it runs
 * in. */
static char **child_environment(loom__arena *arena) {
    static char *const OWN[] = {"LC_ALL=C", "TMPDIR=.", "PATH=" DEFAULT_PATH};
    enum { NUM_OWN = sizeof OWN / sizeof OWN[0] };
    size_t count = 0, kept = 0, num_own = getenv("PATH") ? NUM_OWN - 1 : NUM_OWN;
    while (environ && environ[count]) count++;
    char **list = loom__arena_alloc(arena, (count + NUM_OWN + 1) * sizeof *list);
    if (!list) return NULL;
    for (size_t i = 0; i < count; i++) {
        const char *row = environ[i];
        if (strncmp(row, "LC_ALL=", 7) && strncmp(row, "LANGUAGE=", 9) && strncmp(row, "TMPDIR=", 7)) {
            list[kept++] = environ[i];
        }
    }
    for (size_t i = 0; i < num_own; i++) list[kept++] = OWN[i];
    list[kept] = NULL;
    return list;
}

/* Starts words[0] in `folder` with its output in the file `log` there, and waits. *exit_status is -1 when the
 * system does not tell, as where the caller ignores SIGCHLD. Returns an errno. */
static int run_program(loom__arena *arena, const char *const *words, const char *folder, const char *log,
                       int *exit_status) {
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none, reset;
    char **environment = child_environment(arena);
    if (!environment || posix_spawn_file_actions_init(&actions)) return ENOMEM;
    if (posix_spawnattr_init(&attributes)) {
        posix_spawn_file_actions_destroy(&actions);
        return ENOMEM;
    }
    sigemptyset(&none);
    sigemptyset(&reset);
    sigaddset(&reset, SIGCHLD);
    sigaddset(&reset, SIGPIPE);
    int failed = posix_spawnattr_setsigmask(&attributes, &none);
    if (!failed) failed = posix_spawnattr_setsigdefault(&attributes, &reset);
    if (!failed)
        failed = posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    if (!failed) failed = posix_spawn_file_actions_addchdir_np(&actions, folder);
    if (!failed) failed = posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    if (!failed)
        failed = posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log, O_WRONLY | O_CREAT | O_TRUNC,
                                                  0600);
    if (!failed) failed = posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    pid_t child = -1;
    if (!failed)
        failed = posix_spawn(&child, words[0], &actions, &attributes, (char *const *)words, environment);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    if (failed) return failed;
    int state;
    pid_t ended;
    do ended = waitpid(child, &state, 0);
    while (ended < 0 && errno == EINTR);
    *exit_status = ended < 0 ? -1 : WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
    return 0;
}

/* A folder for one run of the compiler, removed afterwards. */
static loom_status make_folder(const loom_context *context, loom__arena *arena, const char **folder,
                               loom_error *error) {
    const char *roots[] = {context->environment.tmpdir, "/tmp"};
    for (size_t i = 0; i < sizeof roots / sizeof roots[0]; i++) {
        char *path = roots[i] ? loom__arena_print(arena, "%s/attnloom-XXXXXX", roots[i]) : NULL;
        if (roots[i] && !path) return loom__fail_memory(error);
        if (!path || !mkdtemp(path)) continue;
        *folder = path;
        return LOOM_OK;
    }
    return loom__fail(error, LOOM_IO, "TMPDIR", "cannot make a folder for the compiler in %s: %s",
                      roots[0] ? roots[0] : roots[1], strerror(errno));
}

static void remove_folder(const char *folder) {
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *row;
    while (dir && (row = readdir(dir))) {
        if (strcmp(row->d_name, ".") && strcmp(row->d_name, "..")) unlinkat(fd, row->d_name, 0);
    }
    if (dir)
        closedir(dir);
    else if (fd >= 0)
        close(fd);
    rmdir(folder);
}

/* Lines of /proc/cpuinfo that decide what -march=native means, of the first processor. */
static const char *processor_text(loom__arena *arena) {
    static const char *const NAMES[] = {"vendor_id", "cpu family",      "model",    "flags",
                                        "Features",  "CPU implementer", "CPU part", "isa"};
    enum { FIRST_PROCESSOR_BYTES = 16 * 1024 };
    char *text = loom__arena_alloc(arena, FIRST_PROCESSOR_BYTES + 1);
    char *kept = loom__arena_alloc(arena, FIRST_PROCESSOR_BYTES + 1), *end = kept;
    int fd = open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC);
    size_t used = 0;
    while (text && fd >= 0 && used < FIRST_PROCESSOR_BYTES) {
        ssize_t got = read(fd, text + used, FIRST_PROCESSOR_BYTES - used);
        if (got <= 0) break;
        used += (size_t)got;
    }
    if (fd >= 0) close(fd);
    if (!text || !kept) return NULL;
    char *line = text;
    while (*line && *line != '\n') {
        size_t length = strcspn(line, "\n"), name = strcspn(line, "\t:\n");
        for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) {
            if (strlen(NAMES[i]) == name && strncmp(line, NAMES[i], name) == 0) {
                memcpy(end, line, length);
                end += length;
                *end++ = '\n';
            }
        }
        line += length + (line[length] == '\n');
    }
    *end = 0;
    return kept;
}

/* What follows `name` on the first line that holds it. */
static const char *text_after(loom__arena *arena, const char *output, const char *name) {
    const char *at = strstr(output, name);
    if (!at) return "";
    at += strlen(name);
    return loom__arena_copy(arena, at, strcspn(at, "\n"));
}

static const char HOST_OPTIONS[] =
    "-std=c11 -O3 -march=native -ffp-contract=off -fno-math-errno -fPIC -shared";

static loom_status search_cc(loom_context *context, loom__toolchain *t, loom_error *error) {
    loom__arena *arena = &context->arena, scratch = {&context->memory, NULL};
    const char *words[MAX_WORDS + 2] = {NULL};
    int num_words = 0, exit_status = -1;
    const char *command = context->environment.cc ? context->environment.cc : "cc";
    const char *folder = NULL, *output = "";
    size_t output_bytes = 0;
    loom_status status = LOOM_OK;
    LOOM_TRY_OUT(context, split_words(&scratch, command, "CC", words, &num_words, error));
    if (!num_words) {
        status = loom__fail(error, LOOM_COMPILE, "cc", "CC is '%.200s', which is no command", command);
        goto out;
    }
    LOOM_TRY_OUT(context, find_program(arena, context->environment.path, words[0], &t->path, error));
    words[0] = t->path;
    words[num_words] = "-v";
    LOOM_TRY_OUT(context, make_folder(context, &scratch, &folder, error));
    const char *log = loom__arena_print(&scratch, "%s/log.txt", folder);
    int failed = log ? run_program(&scratch, words, folder, "log.txt", &exit_status) : ENOMEM;
    if (!failed && loom__read_file(&scratch, log, &output, &output_bytes, NULL) == LOOM_MEMORY)
        failed = ENOMEM;
    if (failed == ENOMEM) {
        status = loom__fail_memory(error);
        goto out;
    }
    if (failed || exit_status > 0 || !output_bytes) {
        status = loom__fail(error, LOOM_COMPILE, "cc", "the C compiler %s does not run (%s)", t->path,
                            failed ? strerror(failed) : "exit status not 0");
        goto out;
    }
    /* gcc: "gcc version 12.2.0 (Debian 12.2.0-14)"; clang: "Debian clang version 14.0.6". */
    const char *version = text_after(arena, output, " version ");
    const char *processor = processor_text(&scratch);
    t->triple = text_after(arena, output, "Target: ");
    if (!version || !t->triple || !processor) {
        status = loom__fail_memory(error);
        goto out;
    }
    if (!*t->triple) t->triple = "host";
    char digest[33];
    loom__digest(processor, strlen(processor), digest);
    t->name = loom__arena_print(arena, "cc %.*s", (int)strcspn(version, " "), version);
    t->identity =
        loom__arena_print(arena, "compiler %s%s, for %s\ncommand %s %s\nprocessor %s\n",
                          strstr(output, "clang") ? "clang " : "", version, t->triple,
                          strchr(command, ' ') ? strchr(command, ' ') + 1 : "", HOST_OPTIONS, digest);
    if (!t->name || !t->identity) status = loom__fail_memory(error);
out:
    if (folder) remove_folder(folder);
    loom__arena_free(&scratch);
    return status;
}

/* -- Toolchains ------------------------------------------------------------------------------------------ */

static loom_status find_toolchain(loom_context *context, loom__toolchain *t,
                                  loom_status (*search_for)(loom_context *, loom__toolchain *, loom_error *),
                                  const loom__toolchain **found, loom_error *error) {
    loom__context_lock(context);
    if (!t->searched) {
        t->failure = (loom_error)LOOM_ERROR_INIT;
        t->status = search_for(context, t, &t->failure);
        t->searched = t->status != LOOM_MEMORY;
    }
    loom_status status = t->status;
    if (status == LOOM_OK)
        *found = t;
    else
        loom__fail(error, status, t->failure.field, "%s", t->failure.text);
    loom__context_unlock(context);
    return status;
}

loom_status loom__nvrtc_find(loom_context *context, const loom__toolchain **toolchain, loom_error *error) {
    return find_toolchain(context, &context->nvrtc, search_nvrtc, toolchain, error);
}

loom_status loom__cc_find(loom_context *context, const loom__toolchain **toolchain, loom_error *error) {
    return find_toolchain(context, &context->cc, search_cc, toolchain, error);
}

/* -- Failures -------------------------------------------------------------------------------------------- */

enum { ERROR_LINES = 12 };

/* Length of the first lines of a compiler's output, for a message. */
static int first_lines(const char *log) {
    const char *end = log;
    for (int line = 0; line < ERROR_LINES && *end; line++) {
        end += strcspn(end, "\n");
        end += *end == '\n';
    }
    while (end > log && isspace((unsigned char)end[-1])) end--;
    return (int)(end - log);
}

static bool write_text(loom__arena *arena, const char *folder, const char *name, const char *text) {
    const char *path = loom__arena_print(arena, "%s/%s", folder, name);
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600) : -1;
    if (fd < 0) return false;
    size_t left = strlen(text);
    while (left) {
        ssize_t done = write(fd, text, left);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) break;
        text += done;
        left -= (size_t)done;
    }
    return close(fd) == 0 && left == 0;
}

/* Says what the compiler said; `folder` has the source and log.txt and stays for the user to look at. */
static loom_status fail_compile(const char *label, const char *compiler, const char *folder, const char *log,
                                loom_error *error) {
    return loom__fail(error, LOOM_COMPILE, "kernel",
                      "%s refused the kernel %s:\n%.*s\n(source and whole output: %s)", compiler, label,
                      first_lines(log), log, folder ? folder : "not kept");
}

/* -- CUDA ------------------------------------------------------------------------------------------------ */

typedef void *nvrtc_program;

typedef struct nvrtc_api {
    int (*version)(int *major, int *minor);
    int (*num_archs)(int *count);
    int (*archs)(int *list);
    int (*create)(nvrtc_program *program, const char *source, const char *name, int num_headers,
                  const char *const *headers, const char *const *names);
    int (*destroy)(nvrtc_program *program);
    int (*compile)(nvrtc_program program, int num_options, const char *const *options);
    int (*log_size)(nvrtc_program program, size_t *bytes);
    int (*log)(nvrtc_program program, char *text);
    int (*cubin_size)(nvrtc_program program, size_t *bytes);
    int (*cubin)(nvrtc_program program, char *bytes);
    const char *(*error_text)(int result);
} nvrtc_api;

static const char *load_symbols(void *library, nvrtc_api *api) {
    const struct {
        const char *name;
        void *place;
    } symbols[] = {{"nvrtcVersion", &api->version},
                   {"nvrtcGetNumSupportedArchs", &api->num_archs},
                   {"nvrtcGetSupportedArchs", &api->archs},
                   {"nvrtcCreateProgram", &api->create},
                   {"nvrtcDestroyProgram", &api->destroy},
                   {"nvrtcCompileProgram", &api->compile},
                   {"nvrtcGetProgramLogSize", &api->log_size},
                   {"nvrtcGetProgramLog", &api->log},
                   {"nvrtcGetCUBINSize", &api->cubin_size},
                   {"nvrtcGetCUBIN", &api->cubin},
                   {"nvrtcGetErrorString", &api->error_text}};
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        if (!symbol) return symbols[i].name;
        memcpy(symbols[i].place, &symbol, sizeof symbol);
    }
    return NULL;
}

static loom_status open_nvrtc(loom__toolchain *t, loom_error *error) {
    if (t->library) return LOOM_OK;
    void *library = dlopen(t->path, RTLD_LAZY | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        return loom__fail(error, LOOM_COMPILE, "nvrtc", "%s does not load: %s", t->path,
                          reason ? reason : "no reason given");
    }
    nvrtc_api api;
    const char *missing = load_symbols(library, &api);
    int major = 0, minor = 0;
    if (missing) {
        loom__fail(error, LOOM_COMPILE, "nvrtc", "%s has no %s", t->path, missing);
    } else if (api.version(&major, &minor) || major != t->major || minor != t->minor) {
        loom__fail(
            error, LOOM_COMPILE, "nvrtc",
            "%s is version %d.%d, but the libnvrtc-builtins beside it is %d.%d: install both of one version",
            t->path, major, minor, t->major, t->minor);
    } else {
        /* Never closed: NVRTC keeps threads and exit handlers. */
        t->library = library;
        return LOOM_OK;
    }
    dlclose(library);
    return LOOM_COMPILE;
}

loom_status loom__nvrtc_load(loom_context *context, loom_error *error) {
    const loom__toolchain *found = NULL;
    LOOM_TRY(context, loom__nvrtc_find(context, &found, error));
    loom__context_lock(context);
    loom_status status = open_nvrtc(&context->nvrtc, error);
    loom__context_unlock(context);
    return status;
}

static loom_status check_arch(const loom__toolchain *t, const nvrtc_api *api, const char *arch,
                              loom_error *error) {
    enum { MAX_ARCHS = 256 };
    int list[MAX_ARCHS], count = 0;
    char known[512] = "";
    int wanted = strncmp(arch, "sm_", 3) ? 0 : atoi(arch + 3);
    if (api->num_archs(&count) || count < 0 || count > MAX_ARCHS || api->archs(list))
        return LOOM_OK; /* the compile will tell */
    for (int i = 0; i < count; i++) {
        if (list[i] == wanted) return LOOM_OK;
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%ssm_%d", i ? " " : "", list[i]);
    }
    return loom__fail(error, LOOM_UNSUPPORTED, "desc.arch", "NVRTC %d.%d does not know %s; it knows %s",
                      t->major, t->minor, arch, known);
}

/* The number in front of `text`, summed over its occurrences; -1 if there is none. */
static int32_t sum_before(const char *log, const char *text) {
    int32_t sum = -1;
    for (const char *at = log; (at = strstr(at, text)); at += strlen(text)) {
        const char *digit = at;
        while (digit > log && isdigit((unsigned char)digit[-1])) digit--;
        if (digit < at) sum = (sum < 0 ? 0 : sum) + (int32_t)strtol(digit, NULL, 10);
    }
    return sum;
}

/* The first line of the log where ptxas says that it serialises wgmma, or that it puts arrivals or waits
 * between (C7510 to C7520); NULL: there is none. Such a kernel computes the right thing at half the speed. */
static const char *find_serialised(const char *log, int *length) {
    enum { FIRST_CODE = 7510, LAST_CODE = 7520 };
    for (const char *at = log; (at = strstr(at, "(C")); at++) {
        long code = strtol(at + 2, NULL, 10);
        if (code < FIRST_CODE || code > LAST_CODE) continue;
        while (at > log && at[-1] != '\n') at--;
        *length = (int)strcspn(at, "\n");
        return at;
    }
    return NULL;
}

/* Folder with the source and the log, for the user to look at; NULL when it cannot be written. */
static const char *keep_output(const loom_context *context, loom__arena *arena, const char *source,
                               const char *log) {
    const char *folder = NULL;
    make_folder(context, arena, &folder, NULL);
    if (!folder || !write_text(arena, folder, "kernel.cu", source) ||
        !write_text(arena, folder, "log.txt", log))
        return NULL;
    return folder;
}

static loom_status build_cuda(const loom_context *context, const nvrtc_api *api, nvrtc_program program,
                              const char *label, const char *source, const char *arch, loom__arena *arena,
                              loom__compiled *compiled, loom_error *error) {
    const char *options[MAX_WORDS + 2];
    int num_options = 2;
    options[0] = loom__arena_print(arena, "--gpu-architecture=%s", arch);
    options[1] = CUDA_OPTIONS;
    const char *words[MAX_WORDS];
    int num_words = 0;
    if (!options[0]) return loom__fail_memory(error);
    LOOM_TRY(context, split_words(arena, context->environment.loom_nvrtc_opts, "LOOM_NVRTC_OPTS", words,
                                  &num_words, error));
    for (int i = 0; i < num_words; i++) options[num_options++] = words[i];

    double start = loom__now();
    int result = api->compile(program, num_options, options);
    compiled->seconds = loom__now() - start;
    size_t log_bytes = 0;
    char *log = NULL;
    if (api->log_size(program, &log_bytes) == 0) log = loom__arena_alloc(arena, log_bytes + 1);
    if (!log) return loom__fail_memory(error);
    if (log_bytes && api->log(program, log)) *log = 0;
    compiled->log = log;
    if (result) {
        const char *folder = keep_output(context, arena, source, log);
        if (!*log)
            return loom__fail(error, LOOM_COMPILE, "kernel", "NVRTC failed on %s: %s", label,
                              api->error_text(result));
        return fail_compile(label, context->nvrtc.name, folder, log, error);
    }
    int line_length = 0;
    const char *serialised = find_serialised(log, &line_length);
    if (serialised) {
        const char *folder = keep_output(context, arena, source, log);
        return loom__fail(error, LOOM_COMPILE, "kernel",
                          "%s serialises the wgmma of the kernel %s, which is taken for an error:\n%.*s\n"
                          "(source and whole output: %s)",
                          context->nvrtc.name, label, line_length, serialised, folder ? folder : "not kept");
    }
    size_t bytes = 0;
    if (api->cubin_size(program, &bytes) || !bytes) {
        return loom__fail(error, LOOM_COMPILE, "kernel", "NVRTC gave no binary for %s on %s", label, arch);
    }
    char *binary = loom__arena_alloc(arena, bytes);
    if (!binary) return loom__fail_memory(error);
    if (api->cubin(program, binary))
        return loom__fail(error, LOOM_COMPILE, "kernel", "NVRTC lost the binary of %s", label);
    compiled->binary = binary;
    compiled->binary_bytes = bytes;
    compiled->registers = -1;
    const char *used = strstr(log, "Used ");
    if (used) compiled->registers = (int32_t)strtol(used + strlen("Used "), NULL, 10);
    compiled->spill_bytes = sum_before(log, " bytes spill stores");
    return LOOM_OK;
}

loom_status loom__compile_cuda(const loom_context *context, const char *label, const char *source,
                               const char *arch, loom__arena *arena, loom__compiled *compiled,
                               loom_error *error) {
    const loom__toolchain *t = &context->nvrtc;
    nvrtc_api api;
    nvrtc_program program = NULL;
    load_symbols(t->library, &api);
    LOOM_TRY(context, check_arch(t, &api, arch, error));
    const char *name = loom__arena_print(arena, "%s.cu", label);
    if (!name) return loom__fail_memory(error);
    int result = api.create(&program, source, name, 0, NULL, NULL);
    if (result)
        return loom__fail(error, LOOM_COMPILE, "nvrtc", "NVRTC does not start: %s", api.error_text(result));
    loom_status status = build_cuda(context, &api, program, label, source, arch, arena, compiled, error);
    api.destroy(&program);
    return status;
}

/* -- Host ------------------------------------------------------------------------------------------------ */

loom_status loom__compile_host(const loom_context *context, const char *label, const char *source,
                               loom__arena *arena, loom__compiled *compiled, loom_error *error) {
    const loom__toolchain *t = &context->cc;
    const char *words[2 * MAX_WORDS] = {NULL};
    int num_words = 0, exit_status = -1;
    const char *command = context->environment.cc ? context->environment.cc : "cc";
    LOOM_TRY(context, split_words(arena, command, "CC", words, &num_words, error));
    LOOM_TRY(context, split_words(arena, HOST_OPTIONS, "CC", words, &num_words, error));
    words[0] = t->path;
    static const char *const FILES[] = {"-o", "kernel.so", "kernel.c", "-lm"};
    for (size_t i = 0; i < sizeof FILES / sizeof FILES[0]; i++) words[num_words++] = FILES[i];

    const char *folder = NULL;
    LOOM_TRY(context, make_folder(context, arena, &folder, error));
    loom_status status = LOOM_OK;
    bool keep = false;
    compiled->log = "";
    const char *log = "", *path = loom__arena_print(arena, "%s/kernel.so", folder);
    const char *log_path = loom__arena_print(arena, "%s/log.txt", folder);
    size_t log_bytes = 0;
    if (!path || !log_path) {
        status = loom__fail_memory(error);
        goto out;
    }
    if (!write_text(arena, folder, "kernel.c", source)) {
        status = loom__fail(error, LOOM_IO, "TMPDIR", "cannot write the kernel's source into %s: %s", folder,
                            strerror(errno));
        goto out;
    }
    double start = loom__now();
    int failed = run_program(arena, words, folder, "log.txt", &exit_status);
    compiled->seconds = loom__now() - start;
    if (failed) {
        status = loom__fail(error, LOOM_COMPILE, "cc", "the C compiler %s does not start: %s", t->path,
                            strerror(failed));
        goto out;
    }
    loom_status read = loom__read_file(arena, log_path, &log, &log_bytes, error);
    if (read == LOOM_OK) compiled->log = log;
    const char *binary = NULL;
    if (read != LOOM_MEMORY && exit_status <= 0)
        read = loom__read_file(arena, path, &binary, &compiled->binary_bytes, error);
    if (read == LOOM_MEMORY) {
        status = read;
        goto out;
    }
    if (read != LOOM_OK || exit_status > 0 || !compiled->binary_bytes) {
        keep = true;
        status = fail_compile(label, t->name, folder, *log ? log : "(no output)", error);
        goto out;
    }
    compiled->binary = binary;
    compiled->registers = -1;
    compiled->spill_bytes = -1;
out:
    if (!keep) remove_folder(folder);
    return status;
}
