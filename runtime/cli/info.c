/* info.c - `attnloom info`: what there is on this machine and what the library would use. Something missing
 * is printed with the reason and is no failure. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../cache.h"
#include "cli.h"
#include "compile.h"
#include "device.h"
#include "generator.h"

static const loom__cli_command COMMAND = {
    .name = "info",
    .operands = "",
    .text = "Prints versions, the compilers and GPUs found, the cache folder and the environment variables "
            "the library reads, one fact a line. A program's options (loom_options) win over variables.",
    .examples = "  attnloom info\n",
};

/* Read once at the creation of a context. */
static const struct {
    const char *name, *meaning;
} VARIABLES[] = {
    {"LOOM_LOG",
     "0 off, 1 warnings (default), 2 cache and compiles, 3 candidates, 4 sources and logs, 5 launches"},
    {"LOOM_CACHE_DIR", "folder of compiled kernels (default: $XDG_CACHE_HOME/attnloom or ~/.cache/attnloom)"},
    {"LOOM_NVRTC_DIR", "folder that is searched first for libnvrtc"},
    {"LOOM_NVRTC_OPTS", "further options of NVRTC, part of each cache key"},
    {"LOOM_SCHED", "schedules to force, FORWARD or FORWARD / BACKWARD"},
    {"LOOM_GEN_DIR", "folder with gen/ and templates/ used instead of the embedded ones"},
    {"CC", "C compiler of the host target (default: cc)"},
};

static void print_missing(const char *name, const loom_error *error) {
    printf("%-18snone: %s\n", name, error->text);
}

/* Architectures that NVRTC compiles for: the library is asked, for it is the only one to know. */
static void print_archs(loom_context *context, const loom__toolchain *nvrtc) {
    int (*count)(int *) = NULL;
    int (*list)(int *) = NULL;
    int archs[128], num_archs = 0;
    loom_error error = LOOM_ERROR_INIT;
    if (loom__nvrtc_load(context, &error) != LOOM_OK) {
        print_missing("nvrtc archs", &error);
        return;
    }
    *(void **)&count = dlsym(nvrtc->library, "nvrtcGetNumSupportedArchs");
    *(void **)&list = dlsym(nvrtc->library, "nvrtcGetSupportedArchs");
    if (!count || !list || count(&num_archs) != 0 || num_archs > 128 || list(archs) != 0) return;
    printf("%-18s", "nvrtc archs");
    for (int32_t i = 0; i < num_archs; i++) printf("%ssm_%d", i ? " " : "", archs[i]);
    printf("\n");
}

static void print_compilers(loom_context *context) {
    const loom__toolchain *toolchain = NULL;
    loom_error error = LOOM_ERROR_INIT;
    if (loom__nvrtc_find(context, &toolchain, &error) == LOOM_OK) {
        printf("%-18s%s, %s\n", "nvrtc", toolchain->name, toolchain->path);
        print_archs(context, toolchain);
    } else {
        print_missing("nvrtc", &error);
    }
    if (loom__cc_find(context, &toolchain, &error) == LOOM_OK)
        printf("%-18s%s, %s, %s\n", "c compiler", toolchain->name, toolchain->path, toolchain->triple);
    else
        print_missing("c compiler", &error);
}

static void print_devices(loom_context *context) {
    int32_t version = 0, count = 0;
    loom_error error = LOOM_ERROR_INIT;
    if (loom__driver_version(context, &version, &error) != LOOM_OK ||
        loom__device_count(context, &count, &error) != LOOM_OK) {
        print_missing("driver", &error);
        return;
    }
    printf("%-18sCUDA %d.%d, %d devices\n", "driver", version / 1000, version % 1000 / 10, count);
    for (int32_t i = 0; i < count && i < LOOM__MAX_DEVICES; i++) {
        const loom__device *device = NULL;
        char name[24];
        snprintf(name, sizeof name, "device %d", i);
        if (loom__device_open(context, i, &device, &error) != LOOM_OK) {
            print_missing(name, &error);
            continue;
        }
        printf("%-18s%s, %s, %d multiprocessors, %.1f GiB, %d bytes of shared memory a block\n", name,
               device->name, device->arch, device->num_sms, (double)device->memory_bytes / 0x1p30,
               device->smem_bytes);
    }
}

int loom__cli_info(int argc, char **argv) {
    loom_context *context = NULL;
    loom_error error = LOOM_ERROR_INIT;
    char digest[33];
    int exit_status = loom__cli_parse(&COMMAND, argc, argv, NULL, NULL);
    if (exit_status >= 0) return exit_status;
    if (loom_context_create(NULL, &context, &error) != LOOM_OK) return loom__cli_fail(&error);
    int32_t version = loom_version();
    printf("%-18s%d.%d.%d\n", "version", version / 10000, version / 100 % 100, version % 100);
    if (loom__generator_digest(context, digest, &error) == LOOM_OK)
        printf("%-18s%s\n", "generator digest", digest);
    else
        print_missing("generator digest", &error);
    printf("%-18s%s\n", "cache format", loom__cache_format());
    printf("%-18s%s\n", "cache folder",
           *context->cache_dir ? context->cache_dir : "none: nothing is kept on disk");
    printf("%-18s%d\n", "host threads", context->num_threads);
    print_compilers(context);
    print_devices(context);
    printf("\nenvironment variables\n");
    for (size_t i = 0; i < sizeof VARIABLES / sizeof VARIABLES[0]; i++) {
        const char *value = getenv(VARIABLES[i].name);
        printf("  %-16s%-24s %s\n", VARIABLES[i].name, value && *value ? value : "-", VARIABLES[i].meaning);
    }
    loom_context_destroy(context);
    return LOOM__CLI_FINE;
}
