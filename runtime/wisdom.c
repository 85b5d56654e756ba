/* wisdom.c - entries of wisdom: their text, what is wrong with it, and merging. See wisdom.h.
 *
 * Entries lie sorted by what they are for, one each, so that merging texts of any order gives the same list,
 * and that the same list prints the same text.
 */
#define _GNU_SOURCE
#include "wisdom.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cache.h"
#include "embedded.h"
#include "generator.h"

static const char FORMAT[] = "wisdom1", FILE_NAME[] = "wisdom1.txt";

enum { MAX_NAME = 127, MAX_SCHEDULE = 511, MAX_PROBLEM = 65535 };

/* Lists are sorted by compare_keys and have no two entries for the same. */
typedef struct entry_list {
    loom__arena *arena;
    const loom__wisdom_entry **items;
    int32_t num, capacity;
} entry_list;

struct loom__wisdom {
    entry_list list, shipped;
    loom__cache_stamp stamp;
};

/* -- Classes of shapes ----------------------------------------------------------------------------------- */

/* Beyond these, schedules do not differ any more. */
enum { MOST_ROWS = 1 << 18, MOST_QUERIES = 1 << 10, LEAST_KEYS = 1 << 6, MOST_KEYS = 1 << 17 };

/* The power of two that is nearest by ratio, within limits that are powers of two. */
static int64_t nearest_power(int64_t value, int64_t least, int64_t most) {
    int64_t power = least;
    if (value >= most) return most;
    while (2 * power <= value) power *= 2;
    if (value > power && (double)value * (double)value > 2.0 * (double)power * (double)power) power *= 2;
    return power;
}

/* The typical heads, sequences and queries make MOST_ROWS. */
loom_shape loom__shape_typical(const loom_shape *hint) {
    enum { BATCH = 4, HEADS = 32, LENGTH = 2048 };
    loom_shape s = *hint;
    if (!s.batch) s.batch = BATCH;
    if (!s.heads_q) s.heads_q = s.heads_kv ? s.heads_kv : HEADS;
    if (!s.heads_kv) s.heads_kv = s.heads_q;
    if (!s.seq_q) s.seq_q = s.seq_k ? s.seq_k : LENGTH;
    if (!s.seq_k) s.seq_k = s.seq_q;
    return s;
}

loom__shape_class loom__shape_class_of(const loom_shape *hint) {
    loom_shape s = loom__shape_typical(hint);
    double rows = (double)s.batch * (double)s.heads_q * (double)s.seq_q;
    return (loom__shape_class){.rows =
                                   rows >= MOST_ROWS ? MOST_ROWS : nearest_power((int64_t)rows, 1, MOST_ROWS),
                               .queries = nearest_power(s.seq_q, 1, MOST_QUERIES),
                               .keys = nearest_power(s.seq_k, LEAST_KEYS, MOST_KEYS)};
}

double loom__shape_class_share(const loom_shape *hint) {
    loom_shape s = loom__shape_typical(hint);
    loom__shape_class class = loom__shape_class_of(hint);
    double rows = (double)s.batch * (double)s.heads_q * (double)s.seq_q;
    return (double)class.rows * (double)class.keys / (rows * (double)s.seq_k);
}

static int32_t steps_between(int64_t a, int64_t b) {
    int32_t steps = 0;
    for (; a < b; a *= 2) steps++;
    for (; b < a; b *= 2) steps++;
    return steps;
}

/* Steps between two classes, in all; INT32_MAX where one number is more than `most` steps away. */
static int32_t class_steps(const loom__shape_class *a, const loom__shape_class *b, int32_t most) {
    int32_t steps[] = {steps_between(a->rows, b->rows), steps_between(a->queries, b->queries),
                       steps_between(a->keys, b->keys)};
    bool far = steps[0] > most || steps[1] > most || steps[2] > most;
    return far ? INT32_MAX : steps[0] + steps[1] + steps[2];
}

/* -- Devices --------------------------------------------------------------------------------------------- */

/* The processor's name as Linux tells it, "CPU" where it does not. */
static void read_processor(char name[MAX_NAME + 1]) {
    char text[4096];
    int fd = open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    text[length > 0 ? length : 0] = 0;
    const char *at = strstr(text, "model name");
    at = at ? strchr(at, ':') : NULL;
    if (at) at += 1 + strspn(at + 1, " \t");
    snprintf(name, MAX_NAME + 1, "%.*s", at ? (int)strcspn(at, "\n") : 3, at ? at : "CPU");
}

loom_status loom__wisdom_device(loom_context *context, const loom__device *device, loom__arena *arena,
                                loom__wisdom_entry *entry, loom_error *error) {
    char name[MAX_NAME + 1];
    if (device)
        snprintf(name, sizeof name, "%s", device->name);
    else
        read_processor(name);
    for (char *at = name; *at; at++) {
        if (*at == '"' || iscntrl((unsigned char)*at)) *at = '?';
    }
    entry->device = loom__arena_copy(arena, name, strlen(name));
    entry->units = device ? device->num_sms : context->num_threads;
    return entry->device ? LOOM_OK : loom__fail_memory(error);
}

/* -- Reading a line -------------------------------------------------------------------------------------- */

enum { FIELD_TEXT, FIELD_WORD, FIELD_NUMBER, FIELD_UNITS, FIELD_PASS, FIELD_DIGEST, FIELD_REST };

/* In the order in which they are printed. */
static const struct {
    const char *name;
    int kind;
    size_t offset;
    size_t most; /* bytes of a text */
} FIELDS[] = {{"device", FIELD_TEXT, offsetof(loom__wisdom_entry, device), MAX_NAME},
              {"units", FIELD_UNITS, offsetof(loom__wisdom_entry, units), 0},
              {"target", FIELD_WORD, offsetof(loom__wisdom_entry, target), MAX_NAME},
              {"pass", FIELD_PASS, offsetof(loom__wisdom_entry, pass), 0},
              {"rows", FIELD_NUMBER, offsetof(loom__wisdom_entry, class.rows), 0},
              {"queries", FIELD_NUMBER, offsetof(loom__wisdom_entry, class.queries), 0},
              {"keys", FIELD_NUMBER, offsetof(loom__wisdom_entry, class.keys), 0},
              {"ns", FIELD_NUMBER, offsetof(loom__wisdom_entry, ns), 0},
              {"generator", FIELD_DIGEST, offsetof(loom__wisdom_entry, generator), 32},
              {"schedule", FIELD_TEXT, offsetof(loom__wisdom_entry, schedule), MAX_SCHEDULE},
              {"problem", FIELD_REST, offsetof(loom__wisdom_entry, problem), MAX_PROBLEM}};
enum { NUM_FIELDS = sizeof FIELDS / sizeof FIELDS[0], DIGEST_DIGITS = 32 };

/* What is wrong with a line, for people. */
typedef struct refusal {
    bool out_of_memory;
    char text[256];
} refusal;

LOOM__PRINTF(2, 3) static bool refuse(refusal *why, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(why->text, sizeof why->text, format, list);
    va_end(list);
    return false;
}

/* How much of a text a message shows. */
static int shown_length(const char *text, const char *end) {
    enum { MOST_SHOWN = 60 };
    int length = (int)strcspn(text, " \n");
    if (length > end - text) length = (int)(end - text);
    return length < MOST_SHOWN ? length : MOST_SHOWN;
}

static bool read_number(const char *text, size_t length, int64_t most, int64_t *value) {
    int64_t number = 0;
    for (size_t i = 0; i < length; i++) {
        if (!isdigit((unsigned char)text[i]) || number > (most - (text[i] - '0')) / 10) return false;
        number = 10 * number + (text[i] - '0');
    }
    *value = number;
    return number > 0;
}

/* Stores the value of a field. */
static bool read_field(loom__arena *arena, int index, const char *text, size_t length,
                       loom__wisdom_entry *entry, refusal *why) {
    void *place = (char *)entry + FIELDS[index].offset;
    const char *name = FIELDS[index].name;
    int kind = FIELDS[index].kind, shown = shown_length(text, text + length);
    int64_t number = 0;
    if (kind == FIELD_PASS) {
        bool forward = length == 7 && !memcmp(text, "forward", 7);
        entry->pass = forward ? LOOM_FORWARD : LOOM_BACKWARD;
        return forward || (length == 8 && !memcmp(text, "backward", 8)) ||
               refuse(why, "%s: '%.*s' is not forward or backward", name, shown, text);
    }
    if (kind == FIELD_NUMBER || kind == FIELD_UNITS) {
        int64_t most = kind == FIELD_UNITS ? INT32_MAX : INT64_MAX / 4;
        if (!read_number(text, length, most, &number))
            return refuse(why, "%s: '%.*s' is not a whole number from 1 to %lld", name, shown, text,
                          (long long)most);
        if (kind == FIELD_UNITS)
            *(int32_t *)place = (int32_t)number;
        else
            *(int64_t *)place = number;
        return true;
    }
    if (!length) return refuse(why, "%s: it is empty", name);
    if (length > FIELDS[index].most)
        return refuse(why, "%s: it has %zu bytes, the limit is %zu", name, length, FIELDS[index].most);
    for (size_t i = 0; i < length; i++) {
        if (iscntrl((unsigned char)text[i]))
            return refuse(why, "%s: byte %zu is 0x%02x, which is not printable", name, i,
                          (unsigned char)text[i]);
    }
    if (kind == FIELD_DIGEST && (length != DIGEST_DIGITS || strspn(text, "0123456789abcdef") < length))
        return refuse(why, "%s: '%.*s' is not %d hex digits", name, shown, text, DIGEST_DIGITS);
    const char *copy = loom__arena_copy(arena, text, length);
    why->out_of_memory = !copy;
    *(const char **)place = copy;
    return copy != NULL;
}

/* Classes are those that loom__shape_class_of makes, or no shape would ever meet them. */
static bool check_class(const loom__shape_class *c, refusal *why) {
    const struct {
        const char *name;
        int64_t value, least, most;
    } rows[] = {{"rows", c->rows, 1, MOST_ROWS},
                {"queries", c->queries, 1, MOST_QUERIES},
                {"keys", c->keys, LEAST_KEYS, MOST_KEYS}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].value < rows[i].least || rows[i].value > rows[i].most ||
            (rows[i].value & (rows[i].value - 1)))
            return refuse(why, "%s: %lld is not a power of two from %lld to %lld", rows[i].name,
                          (long long)rows[i].value, (long long)rows[i].least, (long long)rows[i].most);
    }
    return true;
}

/* Value of a field at *text, which moves past it; NULL: it does not end. */
static const char *cut_value(const char **text, const char *end, int kind, size_t *length) {
    const char *value = *text;
    if (kind == FIELD_REST) {
        *length = (size_t)(end - value);
        *text = end;
        return value;
    }
    bool quoted = kind == FIELD_TEXT;
    if (quoted && (value == end || *value++ != '"')) return NULL;
    const char *stop = memchr(value, quoted ? '"' : ' ', (size_t)(end - value));
    if (!stop && quoted) return NULL;
    if (!stop) stop = end;
    *length = (size_t)(stop - value);
    *text = stop + (quoted ? 1 : 0);
    return value;
}

static bool read_line(loom__arena *arena, const char *line, const char *end, loom__wisdom_entry *entry,
                      refusal *why) {
    size_t format = strlen(FORMAT);
    uint32_t seen = 0;
    *entry = (loom__wisdom_entry){.units = 0};
    if ((size_t)(end - line) <= format || memcmp(line, FORMAT, format) || line[format] != ' ')
        return refuse(why, "format: '%.*s' is not %s", shown_length(line, end), line, FORMAT);
    for (const char *at = line + format; at < end;) {
        while (at < end && *at == ' ') at++;
        const char *name = at;
        while (at < end && islower((unsigned char)*at)) at++;
        int length = (int)(at - name), index = 0;
        if (name == end) break;
        while (index < NUM_FIELDS && ((size_t)length != strlen(FIELDS[index].name) ||
                                      memcmp(name, FIELDS[index].name, (size_t)length)))
            index++;
        if (index == NUM_FIELDS || at == end || *at++ != '=')
            return refuse(why, "field: '%.*s' is no field and value of this format", shown_length(name, end),
                          name);
        if (seen & 1u << index) return refuse(why, "%s: it is there twice", FIELDS[index].name);
        seen |= 1u << index;
        size_t bytes = 0;
        const char *value = cut_value(&at, end, FIELDS[index].kind, &bytes);
        if (!value) return refuse(why, "%s: its value is not between quotes", FIELDS[index].name);
        if (!read_field(arena, index, value, bytes, entry, why)) return false;
    }
    for (int i = 0; i < NUM_FIELDS; i++) {
        if (!(seen & 1u << i)) return refuse(why, "%s: it is missing", FIELDS[i].name);
    }
    return check_class(&entry->class, why);
}

/* -- Lists ----------------------------------------------------------------------------------------------- */

static int compare_numbers(int64_t a, int64_t b) { return (a > b) - (a < b); }

/* By all but time and schedule. */
static int compare_keys(const loom__wisdom_entry *a, const loom__wisdom_entry *b) {
    int order = strcmp(a->problem, b->problem);
    if (!order) order = strcmp(a->device, b->device);
    if (!order) order = compare_numbers(a->units, b->units);
    if (!order) order = strcmp(a->target, b->target);
    if (!order) order = compare_numbers(a->pass, b->pass);
    if (!order) order = compare_numbers(a->class.keys, b->class.keys);
    if (!order) order = compare_numbers(a->class.queries, b->class.queries);
    if (!order) order = compare_numbers(a->class.rows, b->class.rows);
    return order ? order : strcmp(a->generator, b->generator);
}

static bool copy_texts(loom__arena *arena, loom__wisdom_entry *entry) {
    const char **texts[] = {&entry->device, &entry->problem, &entry->target, &entry->generator,
                            &entry->schedule};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        *texts[i] = loom__arena_copy(arena, *texts[i], strlen(*texts[i]));
        if (!*texts[i]) return false;
    }
    return true;
}

static bool grow(entry_list *list) {
    if (list->num < list->capacity) return true;
    int32_t capacity = list->capacity ? 2 * list->capacity : 64;
    const loom__wisdom_entry **larger = loom__arena_alloc(list->arena, (size_t)capacity * sizeof *larger);
    if (!larger) return false;
    if (list->num) memcpy(larger, list->items, (size_t)list->num * sizeof *larger);
    list->items = larger;
    list->capacity = capacity;
    return true;
}

/* Keeps a copy of the entry, unless the list has one for the same that is as fast and whose schedule is not
 * `tried`. Of two as fast the first by its text stays, so that the order of merging does not matter. False:
 * out of memory. */
static bool merge(entry_list *list, const loom__wisdom_entry *entry, const char *tried) {
    int32_t low = 0, high = list->num;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (compare_keys(list->items[middle], entry) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    bool known = low < list->num && compare_keys(list->items[low], entry) == 0;
    if (known) {
        const loom__wisdom_entry *old = list->items[low];
        int order = compare_numbers(entry->ns, old->ns);
        bool stays = order > 0 || (order == 0 && strcmp(entry->schedule, old->schedule) >= 0);
        if (stays && (!tried || strcmp(old->schedule, tried))) return true;
    }
    loom__wisdom_entry *copy = loom__arena_alloc(list->arena, sizeof *copy);
    if (!copy) return false;
    *copy = *entry;
    if (!copy_texts(list->arena, copy)) return false;
    if (!known) {
        if (!grow(list)) return false;
        memmove(list->items + low + 1, list->items + low, (size_t)(list->num - low) * sizeof *list->items);
        list->num++;
    }
    list->items[low] = copy;
    return true;
}

/* What becomes of each line of a text; false ends the reading. */
typedef bool (*use_line)(void *user, int32_t line, const loom__wisdom_entry *entry, const refusal *why);

/* Reads a text line by line; empty lines and those that begin with # are none. False: ended early. */
static bool read_text(const char *text, const loom__memory *memory, use_line use, void *user) {
    bool going = true;
    int32_t number = 1;
    for (const char *line = text; *line && going; number++) {
        const char *end = line + strcspn(line, "\n"), *last = end > line && end[-1] == '\r' ? end - 1 : end;
        if (line < last && *line != '#') {
            loom__arena arena = {memory, NULL};
            loom__wisdom_entry entry;
            refusal why = {.out_of_memory = false, .text = ""};
            bool fine = read_line(&arena, line, last, &entry, &why);
            going = use(user, number, fine ? &entry : NULL, &why);
            loom__arena_free(&arena);
        }
        line = end + (*end == '\n');
    }
    return going;
}

static char *print_list(const entry_list *list, loom__arena *arena) {
    char *text = NULL;
    size_t num_bytes = 0;
    FILE *out = open_memstream(&text, &num_bytes);
    if (!out) return NULL;
    for (int32_t i = 0; i < list->num; i++) {
        const loom__wisdom_entry *e = list->items[i];
        fprintf(out,
                "%s device=\"%s\" units=%d target=%s pass=%s rows=%lld queries=%lld keys=%lld ns=%lld "
                "generator=%s schedule=\"%s\" problem=%s\n",
                FORMAT, e->device, e->units, e->target, e->pass == LOOM_BACKWARD ? "backward" : "forward",
                (long long)e->class.rows, (long long)e->class.queries, (long long)e->class.keys,
                (long long)e->ns, e->generator, e->schedule, e->problem);
    }
    bool failed = ferror(out);
    failed = fclose(out) || failed;
    char *copy = failed ? NULL : loom__arena_copy(arena, text, num_bytes);
    free(text);
    return copy;
}

/* -- The context's wisdom -------------------------------------------------------------------------------- */

typedef struct file_reading {
    loom_context *context;
    entry_list *list;
    bool out_of_memory;
} file_reading;

/* A damaged line of the file is told and left out; the next who writes drops it. */
static bool use_file_line(void *user, int32_t line, const loom__wisdom_entry *entry, const refusal *why) {
    file_reading *r = user;
    r->out_of_memory = entry ? !merge(r->list, entry, NULL) : why->out_of_memory;
    if (!entry && !r->out_of_memory)
        loom__cache_warn(r->context, "leaves out line %d of %s/%s: %s", line, r->context->cache_dir,
                         FILE_NAME, why->text);
    return !r->out_of_memory;
}

static bool merge_text(loom_context *context, entry_list *list, const char *text) {
    file_reading r = {context, list, false};
    read_text(text, &context->memory, use_file_line, &r);
    return !r.out_of_memory;
}

/* Tests see to it that all lines are good. */
static bool use_shipped_line(void *user, int32_t line, const loom__wisdom_entry *entry, const refusal *why) {
    (void)line;
    if (!entry) return !why->out_of_memory;
    loom__wisdom_entry own = *entry;
    own.shipped = true;
    return merge(user, &own, NULL);
}

static bool read_shipped(loom_context *context, entry_list *list) {
    const char *text = context->shipped_wisdom;
    bool fine = !text || read_text(text, &context->memory, use_shipped_line, list);
    for (int i = 0; !text && i < loom__num_wisdom_files && fine; i++)
        fine = read_text(loom__wisdom_files[i].bytes, &context->memory, use_shipped_line, list);
    return fine;
}

/* The context's list, with what the file has by now; NULL: out of memory. The lock is held. */
static entry_list *open_list(loom_context *context) {
    if (!context->wisdom) {
        loom__wisdom *made = loom__arena_alloc(&context->arena, sizeof *made);
        if (!made) return NULL;
        made->list.arena = made->shipped.arena = &context->arena;
        if (!read_shipped(context, &made->shipped)) return NULL;
        context->wisdom = made;
    }
    loom__wisdom *wisdom = context->wisdom;
    loom__arena arena = {&context->memory, NULL};
    const char *text = loom__cache_read_text(context, FILE_NAME, &arena, &wisdom->stamp);
    bool fine = !text || merge_text(context, &wisdom->list, text);
    loom__arena_free(&arena);
    if (!fine) wisdom->stamp = (loom__cache_stamp){0}; /* to be read again */
    return fine ? &wisdom->list : NULL;
}

static bool is_for(const loom__wisdom_entry *entry, const loom__wisdom_entry *wanted) {
    return entry->pass == wanted->pass && entry->units == wanted->units &&
           !strcmp(entry->problem, wanted->problem) && !strcmp(entry->device, wanted->device) &&
           !strcmp(entry->target, wanted->target) &&
           (!wanted->generator || !strcmp(entry->generator, wanted->generator));
}

/* The nearest entry of a list, at most *least steps away in all, which becomes how many; else NULL. */
static const loom__wisdom_entry *find_nearest(const entry_list *list, const loom__wisdom_entry *wanted,
                                              int32_t most_steps, int32_t *least) {
    const loom__wisdom_entry *best = NULL;
    for (int32_t i = 0; i < list->num; i++) {
        const loom__wisdom_entry *entry = list->items[i];
        if (!is_for(entry, wanted)) continue;
        int32_t steps = class_steps(&entry->class, &wanted->class, most_steps);
        bool same_class = best && class_steps(&entry->class, &best->class, 0) == 0;
        /* Larger classes come later in the list. */
        if (steps > *least || (same_class && entry->ns >= best->ns)) continue;
        best = entry;
        *least = steps;
    }
    return best;
}

const loom__wisdom_entry *loom__wisdom_find(loom_context *context, const loom__wisdom_entry *wanted,
                                            int32_t most_steps, bool foreign) {
    const loom__wisdom_entry *best = NULL;
    loom__wisdom_entry shipped = *wanted;
    int32_t least = INT32_MAX - 1;
    if (foreign) shipped.generator = NULL;
    loom__context_lock(context);
    const entry_list *list = open_list(context);
    if (list) best = find_nearest(list, wanted, most_steps, &least);
    if (best) least--;
    const loom__wisdom_entry *nearer =
        list ? find_nearest(&context->wisdom->shipped, &shipped, most_steps, &least) : NULL;
    loom__context_unlock(context);
    return nearer ? nearer : best;
}

const loom__wisdom_entry *loom__wisdom_find_own(loom_context *context, const loom__wisdom_entry *wanted,
                                                int32_t most_steps) {
    int32_t least = INT32_MAX - 1;
    loom__context_lock(context);
    const entry_list *list = open_list(context);
    const loom__wisdom_entry *best = list ? find_nearest(list, wanted, most_steps, &least) : NULL;
    loom__context_unlock(context);
    return best;
}

/* -- The file -------------------------------------------------------------------------------------------- */

typedef struct file_edit {
    loom_context *context;
    const entry_list *added;
    const char *tried; /* as for loom__wisdom_learn */
    loom__arena *arena;
} file_edit;

/* Bytes of the comment lines that a text begins with: a person put them there, and they stay. Others would be
 * torn from the entries that they are about, as these are sorted. */
static size_t comment_bytes(const char *text) {
    const char *at = text;
    while (*at == '#') {
        at += strcspn(at, "\n");
        at += *at == '\n';
    }
    return (size_t)(at - text);
}

static const char *add_to_text(void *user, const char *text) {
    file_edit *edit = user;
    entry_list list = {.arena = edit->arena};
    size_t kept = comment_bytes(text);
    bool fine = merge_text(edit->context, &list, text);
    const char *end = kept && text[kept - 1] != '\n' ? "\n" : "";
    for (int32_t i = 0; i < edit->added->num && fine; i++)
        fine = merge(&list, edit->added->items[i], edit->tried);
    const char *entries = fine ? print_list(&list, edit->arena) : NULL;
    char *all = entries ? loom__arena_alloc(edit->arena, kept + strlen(entries) + 2) : NULL;
    if (!all) return NULL;
    memcpy(all, text, kept);
    strcat(strcpy(all + kept, end), entries);
    return all;
}

static loom_status add_to_file(loom_context *context, const entry_list *added, const char *tried,
                               loom_error *error) {
    loom__arena arena = {&context->memory, NULL};
    file_edit edit = {context, added, tried, &arena};
    loom_status status = loom__cache_edit_text(context, FILE_NAME, &arena, add_to_text, &edit, error);
    loom__arena_free(&arena);
    return status;
}

loom_status loom__wisdom_learn(loom_context *context, const loom__wisdom_entry *entry, const char *tried,
                               loom_error *error) {
    const entry_list one = {.items = &entry, .num = 1};
    loom__context_lock(context);
    entry_list *list = open_list(context);
    bool fine = list && merge(list, entry, tried);
    loom__context_unlock(context);
    return fine ? add_to_file(context, &one, tried, error) : loom__fail_memory(error);
}

loom_status loom__wisdom_save(loom_context *context, loom_error *error) {
    loom__context_lock(context);
    const entry_list *list = open_list(context);
    loom_status status = list ? add_to_file(context, list, NULL, error) : loom__fail_memory(error);
    loom__context_unlock(context);
    return status;
}

/* -- Import and export ----------------------------------------------------------------------------------- */

typedef struct importing {
    loom_context *context;
    entry_list *list;
    int32_t num_taken, num_refused;
    bool out_of_memory;
    char text[sizeof((loom_error *)0)->text]; /* a line each, as many as there is room for */
    size_t used;
} importing;

static void note_refusal(importing *import, int32_t line, const char *why) {
    enum { LAST_LINE = 64 }; /* room for "and so many more" */
    size_t room = sizeof import->text - LAST_LINE - import->used;
    import->num_refused++;
    int length =
        snprintf(import->text + import->used, room, "%sline %d: %s", import->used ? "\n" : "", line, why);
    if (length > 0 && (size_t)length < room)
        import->used += (size_t)length;
    else
        import->text[import->used] = 0;
}

/* Its problem is made canonical, so that plans find it. */
static bool use_import_line(void *user, int32_t line, const loom__wisdom_entry *entry, const refusal *why) {
    importing *import = user;
    loom__arena arena = {&import->context->memory, NULL};
    loom_error failure = LOOM_ERROR_INIT;
    loom__problem_info info;
    import->out_of_memory = why->out_of_memory;
    if (!entry) {
        note_refusal(import, line, why->text);
        return !import->out_of_memory;
    }
    loom__wisdom_entry own = *entry;
    loom_status status = loom__problem_query(import->context, entry->problem, &arena, &info, &failure);
    if (status == LOOM_OK) {
        own.problem = info.text;
        import->out_of_memory = !merge(import->list, &own, NULL);
        import->num_taken++;
    } else {
        char text[256];
        snprintf(text, sizeof text, "problem: %.*s", (int)strcspn(failure.text, "\n"), failure.text);
        note_refusal(import, line, text);
        import->out_of_memory = status == LOOM_MEMORY;
    }
    loom__arena_free(&arena);
    return !import->out_of_memory;
}

/* Lines that the report had no room for, at its end. */
static void count_rest(importing *import) {
    int32_t num_told = import->used > 0;
    for (const char *at = import->text; (at = strchr(at, '\n')); at++) num_told++;
    if (num_told < import->num_refused)
        snprintf(import->text + import->used, sizeof import->text - import->used, "\nand %d more",
                 import->num_refused - num_told);
}

loom_status loom_wisdom_import(loom_context *context, const char *text, int32_t *num_taken,
                               loom_error *error) {
    if (!context) return loom__fail(error, LOOM_INVALID, "context", "context is NULL");
    if (!text) return loom__fail(error, LOOM_INVALID, "text", "the text of wisdom is NULL");
    importing import = {.context = context};
    loom__context_lock(context);
    import.list = open_list(context);
    if (import.list) read_text(text, &context->memory, use_import_line, &import);
    loom__context_unlock(context);
    if (num_taken) *num_taken = import.num_taken;
    if (!import.list || import.out_of_memory) return loom__fail_memory(error);
    if (!import.num_refused) return LOOM_OK;
    count_rest(&import);
    return loom__fail(error, LOOM_INVALID, "wisdom", "%s", import.text);
}

loom_status loom_wisdom_export(loom_context *context, char *text, size_t capacity, size_t *needed,
                               loom_error *error) {
    if (!context) return loom__fail(error, LOOM_INVALID, "context", "context is NULL");
    if (!text && capacity)
        return loom__fail(error, LOOM_INVALID, "text", "text is NULL with a capacity of %zu", capacity);
    loom__arena arena = {&context->memory, NULL};
    loom__context_lock(context);
    const entry_list *list = open_list(context);
    const char *printed = list ? print_list(list, &arena) : NULL;
    loom__context_unlock(context);
    size_t size = printed ? strlen(printed) + 1 : 0;
    loom_status status = LOOM_OK;
    if (!printed)
        status = loom__fail_memory(error);
    else if (size > capacity)
        status = loom__fail(error, LOOM_INVALID, "capacity", "capacity is %zu bytes, the text needs %zu",
                            capacity, size);
    else
        memcpy(text, printed, size);
    if (printed && needed) *needed = size;
    loom__arena_free(&arena);
    return status;
}
