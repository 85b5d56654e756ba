/* options.c - parsing and help of a command, both made from its rows of options.
 * Called by every command. Fails with one line on stderr that names the option, the value and the rule. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { HELP_WIDTH = 100, NAME_WIDTH = 32, MAX_WORD = 63 };

static const loom__cli_option HELP_ROW = {"--help", NULL, LOOM__CLI_FLAG, 0, "print this help"};

/* -- Closest name --------------------------------------------------------------------------------------- */

/* Edits (insert, delete, replace) from a to b; both at most MAX_WORD long. */
static int32_t edit_distance(const char *a, const char *b) {
    size_t length_a = strlen(a), length_b = strlen(b);
    int32_t row[MAX_WORD + 1];
    for (size_t j = 0; j <= length_b; j++) row[j] = (int32_t)j;
    for (size_t i = 1; i <= length_a; i++) {
        int32_t diagonal = row[0];
        row[0] = (int32_t)i;
        for (size_t j = 1; j <= length_b; j++) {
            int32_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[length_b];
}

const char *loom__cli_closest(const char *word, const char *const *names, int32_t num_names) {
    const char *closest = NULL;
    int32_t least = 0;
    if (strlen(word) > MAX_WORD) return NULL;
    for (int32_t i = 0; i < num_names; i++) {
        if (strlen(names[i]) > MAX_WORD) continue;
        int32_t distance = edit_distance(word, names[i]);
        int32_t limit = (int32_t)strlen(names[i]) / 2;
        if (distance <= limit && (!closest || distance < least)) {
            closest = names[i];
            least = distance;
        }
    }
    return closest;
}

/* -- Help ----------------------------------------------------------------------------------------------- */

/* Prints text wrapped at HELP_WIDTH; the first begins at `column`, later ones at `indent`. */
static void print_wrapped(const char *text, int32_t column, int32_t indent) {
    const char *at = text;
    while (*at) {
        const char *end = at + strcspn(at, " \n");
        int32_t width = (int32_t)(end - at);
        bool first = at == text || at[-1] == '\n';
        if (!first && column + 1 + width > HELP_WIDTH) {
            printf("\n%*s", (int)indent, "");
            column = indent;
            first = true;
        }
        printf("%s%.*s", first ? "" : " ", (int)width, at);
        column += width + !first;
        at = end;
        if (*at == '\n') {
            printf("\n%*s", at[1] ? (int)indent : 0, "");
            column = indent;
        }
        if (*at) at++;
    }
    printf("\n");
}

static void print_option(const loom__cli_option *option) {
    int32_t width =
        printf("  %s%s%s", option->name, option->value ? " " : "", option->value ? option->value : "");
    if (width > NAME_WIDTH - 2) {
        printf("\n");
        width = 0;
    }
    printf("%*s", (int)(NAME_WIDTH - width), "");
    print_wrapped(option->help, NAME_WIDTH, NAME_WIDTH);
}

static void print_help(const loom__cli_command *command) {
    printf("usage: attnloom %s%s%s%s\n\n", command->name, *command->operands ? " " : "", command->operands,
           command->num_options ? " [options]" : "");
    print_wrapped(command->text, 0, 0);
    printf("\noptions:\n");
    for (int32_t i = 0; i < command->num_options; i++) print_option(&command->options[i]);
    print_option(&HELP_ROW);
    if (command->examples) printf("\nexamples:\n%s", command->examples);
}

/* -- Values --------------------------------------------------------------------------------------------- */

/* Whole number from 0 to 2^62 at the start of text; NULL when there is none. */
static const char *scan_whole(const char *text, int64_t *value) {
    const char *at = text;
    int64_t total = 0;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (total > (INT64_MAX / 2 - 9) / 10) return NULL;
        total = total * 10 + (*at - '0');
    }
    *value = total;
    return at == text ? NULL : at;
}

/* Index of the word text[0..length) among "a|b|c", -1 when it is none of them. */
static int32_t choice_index(const char *choices, const char *text, size_t length) {
    int32_t index = 0;
    for (const char *at = choices;; index++) {
        size_t width = strcspn(at, "|");
        if (width == length && memcmp(at, text, length) == 0) return index;
        at += width;
        if (!*at++) return -1;
    }
}

/* One part of a shape: first or first:second. */
static const char *scan_pair(const char *text, int64_t *first, int64_t *second) {
    const char *at = scan_whole(text, first);
    if (!at) return NULL;
    *second = *first;
    return *at == ':' ? scan_whole(at + 1, second) : at;
}

bool loom__cli_parse_shape(const char *text, loom_shape *shape, char *why, size_t capacity) {
    loom_shape result = *shape;
    for (const char *at = text + strspn(text, " ,"); *at; at += strspn(at, " ,")) {
        const char *word = at;
        size_t key = strcspn(at, "= ,");
        const char *value = at[key] == '=' ? at + key + 1 : NULL;
        if (!value)
            at = NULL;
        else if (key == 5 && !memcmp(word, "batch", 5))
            at = scan_whole(value, &result.batch);
        else if (key == 5 && !memcmp(word, "heads", 5))
            at = scan_pair(value, &result.heads_q, &result.heads_kv);
        else if (key == 3 && !memcmp(word, "seq", 3))
            at = scan_pair(value, &result.seq_q, &result.seq_k);
        else
            at = NULL;
        if (!at || (*at && *at != ' ' && *at != ',')) {
            snprintf(why, capacity, "'%.*s' is not batch=B, heads=Q[:KV] or seq=Q[:K]",
                     (int)strcspn(word, " ,"), word);
            return false;
        }
    }
    if (result.heads_kv ? result.heads_q % result.heads_kv != 0 : result.heads_q != 0) {
        snprintf(why, capacity, "'heads=%lld:%lld': heads of q must be a multiple of heads of k and v",
                 (long long)result.heads_q, (long long)result.heads_kv);
        return false;
    }
    *shape = result;
    return true;
}

static bool set_wholes(loom__cli_wholes *list, const char *text) {
    list->num = 0;
    for (;;) {
        if (list->num == LOOM__CLI_MAX_LIST) return false;
        text = scan_whole(text, &list->items[list->num++]);
        if (!text || (*text && *text != ',')) return false;
        if (!*text++) return true;
    }
}

static bool set_choices(uint32_t *bits, const char *choices, const char *text) {
    *bits = 0;
    for (;;) {
        size_t length = strcspn(text, ",");
        int32_t index = choice_index(choices, text, length);
        if (index < 0) return false;
        *bits |= 1u << index;
        text += length;
        if (!*text++) return true;
    }
}

/* Stores the value of an option; false and a rule when it is not one. */
static bool set_value(const loom__cli_option *option, void *values, const char *text, char *rule,
                      size_t capacity) {
    void *member = (char *)values + option->offset;
    const char *end = NULL;
    switch (option->kind) {
    case LOOM__CLI_FLAG: *(bool *)member = true; return true;
    case LOOM__CLI_TEXT: *(const char **)member = text; return true;
    case LOOM__CLI_TEXTS: {
        loom__cli_texts *list = member;
        snprintf(rule, capacity, "it may be given at most %d times", LOOM__CLI_MAX_LIST);
        if (list->num == LOOM__CLI_MAX_LIST) return false;
        list->items[list->num++] = text;
        return true;
    }
    case LOOM__CLI_WHOLE:
        snprintf(rule, capacity, "it takes a whole number, 0 or more");
        end = scan_whole(text, member);
        return end && !*end;
    case LOOM__CLI_MOST: {
        int64_t most = 0;
        snprintf(rule, capacity, "it takes all or a number from 1");
        *(int32_t *)member = INT32_MAX;
        if (strcmp(text, "all") == 0) return true;
        end = scan_whole(text, &most);
        *(int32_t *)member = (int32_t)most;
        return end && !*end && most > 0 && most <= INT32_MAX;
    }
    case LOOM__CLI_REAL: {
        char *stop = NULL;
        snprintf(rule, capacity, "it takes a number that is finite and above 0 as a float");
        *(double *)member = strtod(text, &stop);
        float narrow = (float)*(double *)member;
        return stop != text && !*stop && isfinite(narrow) && narrow > 0;
    }
    case LOOM__CLI_WHOLES:
        snprintf(rule, capacity, "it takes at most %d whole numbers with commas, like 64,128",
                 LOOM__CLI_MAX_LIST);
        return set_wholes(member, text);
    case LOOM__CLI_CHOICE:
        snprintf(rule, capacity, "it takes one of %s", option->value);
        *(int32_t *)member = choice_index(option->value, text, strlen(text));
        return *(int32_t *)member >= 0;
    case LOOM__CLI_CHOICES:
        snprintf(rule, capacity, "it takes words of %s with commas", option->value);
        return set_choices(member, option->value, text);
    case LOOM__CLI_DEVICE: {
        int64_t ordinal = 0;
        snprintf(rule, capacity, "it takes the number of a CUDA device or 'host'");
        *(int32_t *)member = LOOM_DEVICE_HOST;
        if (strcmp(text, "host") == 0) return true;
        end = scan_whole(text, &ordinal);
        *(int32_t *)member = (int32_t)ordinal;
        return end && !*end && ordinal < 1024;
    }
    case LOOM__CLI_SHAPE: return loom__cli_parse_shape(text, member, rule, capacity);
    }
    return false;
}

/* -- Parsing -------------------------------------------------------------------------------------------- */

static int usage_hint(const loom__cli_command *command) {
    loom__cli_say("`attnloom %s --help` says how it is used", command->name);
    return LOOM__CLI_USAGE;
}

static int unknown_option(const loom__cli_command *command, const char *word, size_t length) {
    const char *names[64] = {HELP_ROW.name};
    char name[MAX_WORD + 1] = "";
    int32_t num_names = 1;
    for (int32_t i = 0; i < command->num_options && num_names < 64; i++)
        names[num_names++] = command->options[i].name;
    if (length <= MAX_WORD) memcpy(name, word, length);
    const char *closest = loom__cli_closest(name, names, num_names);
    if (closest)
        loom__cli_say("%.*s: no such option; did you mean %s?", (int)length, word, closest);
    else
        loom__cli_say("%.*s: no such option", (int)length, word);
    return usage_hint(command);
}

static const loom__cli_option *find_option(const loom__cli_command *command, const char *word,
                                           size_t length) {
    for (int32_t i = 0; i < command->num_options; i++) {
        const loom__cli_option *option = &command->options[i];
        if (strlen(option->name) == length && memcmp(option->name, word, length) == 0) return option;
    }
    return NULL;
}

int loom__cli_parse(const loom__cli_command *command, int argc, char **argv, void *values,
                    const char **operands) {
    int32_t num_operands = 0;
    bool only_operands = false;
    for (int32_t i = 0; i < command->max_operands; i++) operands[i] = NULL;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (only_operands || word[0] != '-' || !word[1]) {
            if (num_operands == command->max_operands) {
                loom__cli_say(
                    "%s: unexpected operand '%s' (a problem text is one word of the shell: quote it)",
                    command->name, word);
                return usage_hint(command);
            }
            operands[num_operands++] = word;
            continue;
        }
        if (strcmp(word, "--") == 0) {
            only_operands = true;
            continue;
        }
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            print_help(command);
            return LOOM__CLI_FINE;
        }
        size_t length = strcspn(word, "=");
        const char *value = word[length] ? word + length + 1 : NULL;
        const loom__cli_option *option = find_option(command, word, length);
        char rule[256] = "";
        if (!option) return unknown_option(command, word, length);
        if (!option->value && value) {
            loom__cli_say("%s: it takes no value", option->name);
            return usage_hint(command);
        }
        if (option->value && !value) value = i + 1 < argc ? argv[++i] : NULL;
        if (option->value && !value) {
            loom__cli_say("%s: needs a value, %s", option->name, option->value);
            return usage_hint(command);
        }
        if (!set_value(option, values, value, rule, sizeof rule)) {
            if (option->kind == LOOM__CLI_SHAPE) // the rule quotes the word that is wrong
                loom__cli_say("%s: %s", option->name, rule);
            else
                loom__cli_say("%s: '%s': %s", option->name, value, rule);
            return usage_hint(command);
        }
    }
    if (num_operands < command->min_operands) {
        loom__cli_say("%s: %s is missing", command->name, command->operands);
        return usage_hint(command);
    }
    return -1;
}
