//@ local other, tile, seq, start = "keys", "tile_k", "seq_k", "k_start"
//@ local own_tile, own_seq, own_start = "tile_q", "seq_q", "q_start"
//@ if over == "queries" then
//@     other, tile, seq, start, own_tile, own_seq, own_start = "queries", "tile_q", "seq_q", "q_start", "tile_k", "seq_k", "k_start"
//@ end
// Which tiles of ${other} the work visits, and which of them need no mask.
//@ if not listed then
typedef struct Walk {
    Span outer;  // tiles where something is visible
    Span inner;  // ${over == "queries" and "rows" or "columns"} where all is visible
    int end;     // one past the last tile there is
} Walk;

static __device__ __forceinline__ Walk walk_begin(const LoomArgs *args, const Work *work) {
    Walk walk;
    const int first = work->tile * ${own_tile}, last = min(first + ${own_tile}, work->${own_seq}) - 1;
    visible_${other}(args, work, work->${own_start} + first, work->${own_start} + last, &walk.outer, &walk.inner);
    const int start = work->${start}, end = start + work->${seq} - 1;
    const int lo = max(walk.outer.lo, start) - start, hi = min(walk.outer.hi, end) - start;
    walk.outer.lo = lo <= hi ? lo / ${tile} : 1;
    walk.outer.hi = lo <= hi ? hi / ${tile} : 0;
    walk.inner.lo = max(walk.inner.lo, start) - start;
    walk.inner.hi = min(walk.inner.hi, end) - start;
    walk.end = (work->${seq} + ${tile} - 1) / ${tile};
    return walk;
}

// The first visited tile at or after `from`, walk->end if there is none.
static __device__ __forceinline__ int walk_next(const LoomArgs *args, const Work *work, Walk *walk, int from, bool *full) {
    int next = walk->end;
    const int tile = max(from, walk->outer.lo);
    if (tile <= walk->outer.hi) next = min(next, tile);
    *full = walk->inner.lo <= next * ${tile} && next * ${tile} + ${tile} - 1 <= walk->inner.hi;
//@ if over == "queries" then
    *full = *full && (work->tile + 1) * ${own_tile} <= work->${own_seq};
//@ end
    return next;
}
//@ else
// Each lane has the classes of four tiles.
typedef struct Walk {
    int base, end;  // first of the tiles at hand; one past the last tile there is
    unsigned four;  // this lane's
} Walk;

static __device__ __forceinline__ void walk_read(const LoomArgs *args, const Work *work, Walk *walk, int base) {
    walk->base = base;
    walk->four = __ldg(classes_of(args, work) + base / 4 + threadIdx.x % 32);
}

static __device__ __forceinline__ Walk walk_begin(const LoomArgs *args, const Work *work) {
    Walk walk = {0, (work->${seq} + ${tile} - 1) / ${tile}, 0};
    if (walk.end > 0) walk_read(args, work, &walk, 0);
    return walk;
}

// The first visited tile at or after `from`, walk->end if there is none.
static __device__ __forceinline__ int walk_next(const LoomArgs *args, const Work *work, Walk *walk, int from, bool *full) {
    while (from < walk->end) {
        if (from >= walk->base + class_chunk) walk_read(args, work, walk, walk->base + class_chunk);
        const int passed = from - walk->base - 4 * (int)(threadIdx.x % 32);  // tiles of this lane that lie before
        const unsigned four = passed >= 4 ? 0 : passed <= 0 ? walk->four : walk->four >> 8 * passed << 8 * passed;
        const unsigned left = __ballot_sync(~0u, four != 0);
        if (left) {
            const int lane = __ffs(left) - 1;
            const unsigned found = __shfl_sync(~0u, four, lane);
            const int byte = (__ffs(found) - 1) / 8;
            *full = (found >> 8 * byte & 0xff) == 2;
            return walk->base + 4 * lane + byte;
        }
        from = walk->base + class_chunk;
    }
    *full = false;
    return walk->end;
}
//@ end
