//@ -- columns: 8-wide columns of a thread's accumulators
// Which elements of a thread are seen: of[half], bit e * columns + j is row + 8 * half of ${own.name}, column + 8 * j + e of ${other.name}.
// They are found before the products start, when there are registers for what a mask may need; in a loop that is not unrolled.
typedef struct Seen {
    unsigned of[2];
} Seen;
constexpr int columns = ${columns};

static __device__ __forceinline__ Seen seen_of(const LoomArgs *args, const Work *work, int row, int column) {
    Seen seen = {{0, 0}};
//@ if not listed then
    bool exact = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (row + 8 * half >= work->${own.seq}) continue;
        const int at = work->${own.start} + row + 8 * half;
        Span outer, inner;
        visible_${other.name}(args, work, at, at, &outer, &inner);
        exact = exact && (outer.lo > outer.hi || (outer.lo == inner.lo && outer.hi == inner.hi));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int first = work->${other.start} + column + e, lo = max(outer.lo - first + 7, 0) / 8, hi = outer.hi < first ? -1 : min((outer.hi - first) / 8, columns - 1);
            if (lo <= hi) seen.of[half] |= ((2u << hi) - (1u << lo)) << e * columns;
        }
    }
    if (__all_sync(~0u, exact)) return seen;
    seen.of[0] = seen.of[1] = 0;
//@ end
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
        for (int j = 0; j < columns; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int of_${own.name} = row + half * 8, of_${other.name} = column + 8 * j + e;
                bool is_seen = of_queries < work->seq_q && of_keys < work->seq_k;
//@ if has_mask then
                is_seen = is_seen && visible(args, work, work->q_start + of_queries, work->k_start + of_keys);
//@ end
                if (is_seen) seen.of[half] |= (1u << e * columns) << j;
            }
        }
    }
    return seen;
}

// Whether element i of the accumulators is seen.
static __device__ __forceinline__ bool is_seen(const Seen *seen, int i) { return seen->of[i / 2 % 2] >> (i % 2 * columns + i / 4) & 1; }
