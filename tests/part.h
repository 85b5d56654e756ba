/* part.h - the rotation of what takes long: with the environment variable ATTNLOOM_TEST_PART=I/N a slow test
 * does case I of every N (counted from 0), without it all of them. scripts/test.sh sets it; a malformed value
 * stops the test. */
#ifndef ATTNLOOM_PART_H
#define ATTNLOOM_PART_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static inline void read_part(int *part, int *num_parts) {
    const char *text = getenv("ATTNLOOM_TEST_PART");
    *part = 0;
    *num_parts = 1;
    if (!text || !*text) return;
    if (sscanf(text, "%d/%d", part, num_parts) != 2 || *part < 0 || *part >= *num_parts) {
        fprintf(stderr, "ATTNLOOM_TEST_PART is '%s', not I/N with 0 <= I < N\n", text);
        exit(1);
    }
}

static inline bool part_has(int64_t index) {
    int part, num_parts;
    read_part(&part, &num_parts);
    return index % num_parts == part;
}

static inline int part_count(void) {
    int part, num_parts;
    read_part(&part, &num_parts);
    return num_parts;
}

#endif
