/* digest.c - 128-bit content digests as text. Not cryptographic: they find damage and name entries; keys are
 * compared in full. Called by generator.c and cache.c. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "common.h"

void loom__digest(const void *bytes, size_t num_bytes, char text[33]) {
    static const char DIGITS[] = "0123456789abcdef";
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes, num_bytes));
    for (int i = 0; i < 16; i++) {
        text[2 * i] = DIGITS[canonical.digest[i] >> 4];
        text[2 * i + 1] = DIGITS[canonical.digest[i] & 15];
    }
    text[32] = 0;
}
