/* record.c - printing and reading of records. See record.h. */
#define _GNU_SOURCE
#include "record.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- Printing -------------------------------------------------------------------------------------------- */

typedef struct printer {
    loom__arena *arena;
    char *text;
    size_t bytes, capacity;
    bool no_memory;
} printer;

LOOM__PRINTF(2, 3) static void print(printer *p, const char *format, ...) {
    va_list list;
    if (p->no_memory) return;
    va_start(list, format);
    char *piece = NULL;
    int length = vasprintf(&piece, format, list);
    va_end(list);
    if (length >= 0 && p->bytes + (size_t)length + 1 > p->capacity) {
        size_t capacity = 2 * (p->bytes + (size_t)length + 1);
        char *larger = loom__arena_alloc(p->arena, capacity);
        if (larger && p->bytes) memcpy(larger, p->text, p->bytes);
        p->no_memory = !larger;
        p->text = larger;
        p->capacity = capacity;
    }
    p->no_memory = p->no_memory || length < 0;
    if (!p->no_memory) {
        memcpy(p->text + p->bytes, piece, (size_t)length + 1);
        p->bytes += (size_t)length;
    }
    if (length >= 0) free(piece);
}

static void print_block(printer *p, const char *name, const char *text) {
    print(p, "%s %zu\n%s\n", name, strlen(text), text);
}

static void print_words(printer *p, const char *const *words, int32_t num_words) {
    for (int32_t i = 0; i < num_words; i++) print(p, " %s", words[i]);
    print(p, "\n");
}

static void print_kernel(printer *p, const loom__kernel_text *k) {
    print(p, "kernel %s %s %s %s %s %s %s %s %d %d %d %d %d %d %d\n", k->name, k->pass, k->variant, k->symbol,
          k->arch ? k->arch : "-", k->grid_batch, k->grid_heads, k->grid_seq, k->grid_rows,
          k->grid_persistent, k->threads, k->smem_bytes, k->prepares, k->overlaps, k->args_bytes);
    print_block(p, "key", k->key);
    print(p, "needs %d", k->num_needs);
    print_words(p, k->needs, k->num_needs);
    print(p, "regions %d\n", k->num_regions);
    for (int32_t i = 0; i < k->num_regions; i++) {
        const loom__region_text *r = &k->regions[i];
        print(p, "region %s %lld %d %d", r->place, (long long)r->bytes, r->prepared, r->num_dims);
        print_words(p, r->dims, r->num_dims);
    }
    print(p, "rows %d\n", k->num_rows);
    for (int32_t i = 0; i < k->num_rows; i++) {
        const loom__arg_text *r = &k->rows[i];
        print(p, "row %d %s %s %d %d\n", r->offset, r->type, r->source, r->box_rows, r->box_chunks);
    }
}

const char *loom__record_print(loom__arena *arena, const loom__record *record) {
    printer p = {.arena = arena};
    const loom__problem_info *info = &record->info;
    const loom__generated *g = &record->generated;
    const loom_shape *h = &record->hint;
    print_block(&p, "written", record->written);
    print(&p, "problem %s\ndtype %s %d %d %d %d\n", info->text, info->dtype, info->d, info->dv,
          info->backward, info->deterministic);
    print_block(&p, "written_schedule", record->schedule);
    print_block(&p, "written_schedule_backward", record->schedule_backward);
    print(&p, "hint %lld %lld %lld %lld %lld\n", (long long)h->batch, (long long)h->heads_q,
          (long long)h->heads_kv, (long long)h->seq_q, (long long)h->seq_k);
    print(&p, "params %d\n", info->num_params);
    for (int32_t i = 0; i < info->num_params; i++) {
        const loom__param_info *param = &info->params[i];
        print(&p, "param %s %s %d", param->name, param->dtype, param->num_dims);
        print_words(&p, param->dims, param->num_dims);
    }
    print(&p, "target %s\narch %s\nschedule %s\nschedule_backward %s\nkernels %d\n", g->target, g->arch,
          g->schedule, g->schedule_backward, g->num_kernels);
    for (int32_t i = 0; i < g->num_kernels; i++) print_kernel(&p, &g->kernels[i]);
    return p.no_memory ? NULL : p.text;
}

/* -- Reading --------------------------------------------------------------------------------------------- */

/* What is left of a text, and whether it was as expected so far. Once it was not, all else is "" and 0. */
typedef struct reader {
    char *at;
    loom__arena *arena;
    bool damaged, no_memory;
    char *words; /* left of the line */
    char empty[1];
} reader;

/* The value of the line that must come next. */
static char *take_line(reader *r, const char *name) {
    size_t length = strlen(name);
    char *end = r->damaged ? NULL : strchr(r->at, '\n');
    if (!end || strncmp(r->at, name, length) || r->at[length] != ' ') {
        r->damaged = true;
        return r->empty;
    }
    char *value = r->at + length + 1;
    *end = 0;
    r->at = end + 1;
    return value;
}

static char *take_word(reader *r) {
    char *word = r->words;
    if (!*word) {
        r->damaged = true;
        return r->empty;
    }
    r->words += strcspn(word, " ");
    if (*r->words) *r->words++ = 0;
    return word;
}

static int64_t take_number(reader *r, int64_t least, int64_t most) {
    char *word = take_word(r), *end;
    long long number = strtoll(word, &end, 10);
    if (!*word || *end || number < least || number > most) r->damaged = true;
    return r->damaged ? 0 : number;
}

static int32_t take_int(reader *r) { return (int32_t)take_number(r, 0, INT32_MAX); }

static void start_line(reader *r, const char *name) { r->words = take_line(r, name); }

static int32_t take_count(reader *r, int32_t most) { return (int32_t)take_number(r, 0, most); }

static char *take_block(reader *r, const char *name) {
    start_line(r, name);
    size_t bytes = (size_t)take_int(r);
    if (r->damaged || strlen(r->at) <= bytes || r->at[bytes] != '\n') {
        r->damaged = true;
        return r->empty;
    }
    char *block = r->at;
    r->at[bytes] = 0;
    r->at += bytes + 1;
    return block;
}

static void *take_room(reader *r, int32_t count, size_t bytes) {
    void *room = loom__arena_alloc(r->arena, (size_t)count * bytes);
    if (!room) r->damaged = r->no_memory = true;
    return room;
}

enum { MAX_PARAMS = 64, MAX_KERNELS = 256, MAX_NEEDS = 16, MAX_REGIONS = 64, MAX_ROWS = 1024 };

static void take_kernel(reader *r, loom__kernel_text *k) {
    start_line(r, "kernel");
    k->name = take_word(r);
    k->pass = take_word(r);
    k->variant = take_word(r);
    k->symbol = take_word(r);
    k->arch = take_word(r);
    if (strcmp(k->arch, "-") == 0) k->arch = NULL;
    k->grid_batch = take_word(r);
    k->grid_heads = take_word(r);
    k->grid_seq = take_word(r);
    k->grid_rows = take_int(r);
    k->grid_persistent = take_int(r);
    k->threads = take_int(r);
    k->smem_bytes = take_int(r);
    k->prepares = take_int(r);
    k->overlaps = take_int(r);
    k->args_bytes = take_int(r);
    k->key = take_block(r, "key");
    start_line(r, "needs");
    k->num_needs = take_count(r, MAX_NEEDS);
    const char **needs = take_room(r, k->num_needs, sizeof *needs);
    for (int32_t i = 0; !r->damaged && i < k->num_needs; i++) needs[i] = take_word(r);
    k->needs = needs;
    start_line(r, "regions");
    k->num_regions = take_count(r, MAX_REGIONS);
    loom__region_text *regions = take_room(r, k->num_regions, sizeof *regions);
    for (int32_t i = 0; !r->damaged && i < k->num_regions; i++) {
        start_line(r, "region");
        regions[i].place = take_word(r);
        regions[i].bytes = take_number(r, 0, INT64_MAX);
        regions[i].prepared = take_int(r);
        regions[i].num_dims = take_count(r, LOOM__REGION_DIMS);
        for (int32_t axis = 0; axis < regions[i].num_dims; axis++) regions[i].dims[axis] = take_word(r);
    }
    k->regions = regions;
    start_line(r, "rows");
    k->num_rows = take_count(r, MAX_ROWS);
    loom__arg_text *rows = take_room(r, k->num_rows, sizeof *rows);
    for (int32_t i = 0; !r->damaged && i < k->num_rows; i++) {
        start_line(r, "row");
        rows[i].offset = take_int(r);
        rows[i].type = take_word(r);
        rows[i].source = take_word(r);
        rows[i].box_rows = take_int(r);
        rows[i].box_chunks = take_int(r);
    }
    k->rows = rows;
}

loom_status loom__record_read(loom__arena *arena, char *text, loom__record *record, loom_error *error) {
    reader r = {.at = text, .arena = arena};
    loom__problem_info *info = &record->info;
    loom__generated *g = &record->generated;
    *record = (loom__record){.written = take_block(&r, "written")};
    g->reference = -2; /* LUA_NOREF */
    g->why = "";
    g->problem = info->text = take_line(&r, "problem");
    start_line(&r, "dtype");
    info->dtype = take_word(&r);
    info->d = take_int(&r);
    info->dv = take_int(&r);
    info->backward = take_int(&r);
    info->deterministic = take_int(&r);
    record->schedule = take_block(&r, "written_schedule");
    record->schedule_backward = take_block(&r, "written_schedule_backward");
    start_line(&r, "hint");
    int64_t *const sizes[] = {&record->hint.batch, &record->hint.heads_q, &record->hint.heads_kv,
                              &record->hint.seq_q, &record->hint.seq_k};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) *sizes[i] = take_number(&r, 0, INT64_MAX);
    start_line(&r, "params");
    info->num_params = take_count(&r, MAX_PARAMS);
    loom__param_info *params = take_room(&r, info->num_params, sizeof *params);
    for (int32_t i = 0; !r.damaged && i < info->num_params; i++) {
        start_line(&r, "param");
        params[i].name = take_word(&r);
        params[i].dtype = take_word(&r);
        params[i].num_dims = take_count(&r, LOOM__PARAM_DIMS);
        for (int32_t axis = 0; axis < params[i].num_dims; axis++) params[i].dims[axis] = take_word(&r);
    }
    info->params = params;
    g->target = take_line(&r, "target");
    g->arch = take_line(&r, "arch");
    g->schedule = take_line(&r, "schedule");
    g->schedule_backward = take_line(&r, "schedule_backward");
    start_line(&r, "kernels");
    g->num_kernels = (int32_t)take_number(&r, 1, MAX_KERNELS);
    loom__kernel_text *kernels = take_room(&r, g->num_kernels, sizeof *kernels);
    for (int32_t i = 0; !r.damaged && i < g->num_kernels; i++) take_kernel(&r, &kernels[i]);
    g->kernels = kernels;
    if (r.no_memory) return loom__fail_memory(error);
    if (!r.damaged && !*r.at) return LOOM_OK;
    return loom__fail(error, LOOM_INTERNAL, "pack",
                      "the pack's record of the problem '%.200s' cannot be read", info->text);
}
