//@ local other, tile, seq, start = "keys", "tile_k", "seq_k", "k_start"
//@ local own_tile, own_seq, own_start = "tile_q", "seq_q", "q_start"
//@ if over == "queries" then
//@     other, tile, seq, start, own_tile, own_seq, own_start = "queries", "tile_q", "seq_q", "q_start", "tile_k", "seq_k", "k_start"
//@ end
// Which tiles of ${other} the work visits, and which of them need no mask.
//@ if walk == "range" then
typedef struct Walk {
    Span outer[num_spans];  // tiles where something is visible
    Span inner[num_spans];  // ${over == "queries" and "rows" or "columns"} where all is visible
    int end;                // one past the last tile there is
} Walk;

static __device__ __forceinline__ Walk walk_begin(const LoomArgs *args, const Work *work) {
    Walk walk;
    const int first = work->tile * ${own_tile}, last = min(first + ${own_tile}, work->${own_seq}) - 1;
    visible_${other}(args, work, work->${own_start} + first, work->${own_start} + last, walk.outer, walk.inner);
#pragma unroll
    for (int i = 0; i < num_spans; ++i) {
        const int start = work->${start}, end = start + work->${seq} - 1;
        const int lo = max(walk.outer[i].lo, start) - start, hi = min(walk.outer[i].hi, end) - start;
        walk.outer[i].lo = lo <= hi ? lo / ${tile} : 1;
        walk.outer[i].hi = lo <= hi ? hi / ${tile} : 0;
        walk.inner[i].lo = max(walk.inner[i].lo, start) - start;
        walk.inner[i].hi = min(walk.inner[i].hi, end) - start;
    }
    walk.end = (work->${seq} + ${tile} - 1) / ${tile};
    return walk;
}

// The first visited tile at or after `from`, walk->end if there is none.
static __device__ __forceinline__ int walk_next(const LoomArgs *args, const Work *work, Walk *walk, int from, bool *full) {
    int next = walk->end;
    *full = false;
#pragma unroll
    for (int i = 0; i < num_spans; ++i) {
        const int tile = max(from, walk->outer[i].lo);
        if (tile <= walk->outer[i].hi) next = min(next, tile);
    }
#pragma unroll
    for (int i = 0; i < num_spans; ++i) {
        *full = *full || (walk->inner[i].lo <= next * ${tile} && next * ${tile} + ${tile} - 1 <= walk->inner[i].hi);
    }
//@ if over == "queries" then
    *full = *full && (work->tile + 1) * ${own_tile} <= work->${own_seq};
//@ end
    return next;
}
//@ else
typedef struct Walk {
    unsigned visited, full;  // classes of the 32 tiles from base, one bit each
    int base, end;
} Walk;

// Each lane finds the class of one tile: a ballot gives 32 of them.
static __device__ __forceinline__ void walk_classify(const LoomArgs *args, const Work *work, Walk *walk, int base) {
    const int tile = base + threadIdx.x % 32;
    const int own_first = work->tile * ${own_tile}, own_last = min(own_first + ${own_tile}, work->${own_seq}) - 1;
    const int first = tile * ${tile}, last = min(first + ${tile}, work->${seq}) - 1;
    int what = 0;
    if (tile < walk->end) {
//@ if over == "queries" then
        what = tile_class(args, work, work->q_start + first, work->q_start + last, work->k_start + own_first, work->k_start + own_last);
//@ else
        what = tile_class(args, work, work->q_start + own_first, work->q_start + own_last, work->k_start + first, work->k_start + last);
//@ end
    }
    bool whole = first + ${tile} <= work->${seq};
//@ if over == "queries" then
    whole = whole && own_first + ${own_tile} <= work->${own_seq};
//@ end
    walk->base = base;
    walk->visited = __ballot_sync(~0u, what != 0);
    walk->full = __ballot_sync(~0u, what == 2 && whole);
}

static __device__ __forceinline__ Walk walk_begin(const LoomArgs *args, const Work *work) {
    Walk walk;
    walk.end = (work->${seq} + ${tile} - 1) / ${tile};
    walk_classify(args, work, &walk, 0);
    return walk;
}

// The first visited tile at or after `from`, walk->end if there is none.
static __device__ __forceinline__ int walk_next(const LoomArgs *args, const Work *work, Walk *walk, int from, bool *full) {
    while (from < walk->end) {
        if (from >= walk->base + 32) walk_classify(args, work, walk, from);
        const unsigned ahead = walk->visited >> (from - walk->base);
        if (ahead) {
            const int bit = from - walk->base + __ffs(ahead) - 1;
            *full = walk->full >> bit & 1;
            return walk->base + bit;
        }
        from = walk->base + 32;
    }
    *full = false;
    return walk->end;
}
//@ end
