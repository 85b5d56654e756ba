//@ local other, tile, seq, start = "keys", "tile_k", "seq_k", "k_start"
//@ local own_tile, own_seq, own_start = "tile_q", "seq_q", "q_start"
//@ if over == "queries" then
//@     other, tile, seq, start, own_tile, own_seq, own_start = "queries", "tile_q", "seq_q", "q_start", "tile_k", "seq_k", "k_start"
//@ end
// Which tiles of ${other} the work visits, and which of them need no mask.
//@ if not listed then
typedef struct Walk {
    Span outer;  // tiles where something is visible, still to be visited
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
    walk.inner.hi = max(min(walk.inner.hi, end) - start, -1);
    walk.end = (work->${seq} + ${tile} - 1) / ${tile};
    return walk;
}

// The next visited tile, walk->end if there is none.
static __device__ __forceinline__ int walk_next(const LoomArgs *args, const Work *work, Walk *walk, bool *full) {
    const int next = walk->outer.lo <= walk->outer.hi ? walk->outer.lo : walk->end;
    walk->outer.lo = next + 1;
    const int first = next * ${tile};
    *full = first >= walk->inner.lo && first <= walk->inner.hi - (${tile} - 1);
//@ if over == "queries" then
    *full = *full && (work->tile + 1) * ${own_tile} <= work->${own_seq};
//@ end
    return next;
}
//@ else
// Each lane has the classes of four tiles.
typedef struct Walk {
    unsigned chunk;  // of classes, that is at hand
    int base, end;   // its first tile; one past the last tile there is
    unsigned four;   // this lane's, still to be visited
} Walk;

static __device__ __forceinline__ Walk walk_begin(const LoomArgs *args, const Work *work) {
    Walk walk = {first_chunk(args, work), 0, (work->${seq} + ${tile} - 1) / ${tile}, 0};
    if (walk.end > 0) walk.four = read_classes(args, walk.chunk);
    return walk;
}

// The next visited tile, walk->end if there is none.
static __device__ __forceinline__ int walk_next(const LoomArgs *args, const Work *work, Walk *walk, bool *full) {
    *full = false;
    for (;;) {
        const unsigned left = __ballot_sync(~0u, walk->four != 0);
        if (left) {
            const int lane = __ffs(left) - 1;
            const unsigned four = __shfl_sync(~0u, walk->four, lane);
            const int shift = (__ffs(four) - 1) & ~7;
            if (threadIdx.x % 32 == lane) walk->four = four & ~(0xffu << shift);
            *full = (four >> shift & 0xff) == 2;
            return walk->base + 4 * lane + shift / 8;
        }
        walk->base += class_chunk;
        if (walk->base >= walk->end) return walk->end;
        walk->four = read_classes(args, ++walk->chunk);
    }
}
//@ end
