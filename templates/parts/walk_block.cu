// Which tiles of ${other.name} the work visits, and which of them need no mask.
//@ if not listed then
typedef struct Walk {
    Span outer;  // tiles where something is visible, still to be visited
    Span inner;  // ${other.name == "queries" and "rows" or "columns"} where all is visible
    int end;     // one past the last tile there is
} Walk;

static __device__ __forceinline__ Walk walk_begin(const LoomArgs *args, const Work *work) {
    Walk walk;
    const int first = work->tile * ${own.tile}, last = min(first + ${own.tile}, work->${own.seq}) - 1;
    visible_${other.name}(args, work, work->${own.start} + first, work->${own.start} + last, &walk.outer, &walk.inner);
    const int start = work->${other.start}, end = start + work->${other.seq} - 1;
    const int lo = max(walk.outer.lo, start) - start, hi = min(walk.outer.hi, end) - start;
    walk.outer.lo = lo <= hi ? lo / ${other.tile} : 1;
    walk.outer.hi = lo <= hi ? hi / ${other.tile} : 0;
    walk.inner.lo = max(walk.inner.lo, start) - start;
    walk.inner.hi = max(min(walk.inner.hi, end) - start, -1);
    walk.end = (work->${other.seq} + ${other.tile} - 1) / ${other.tile};
    return walk;
}

// The next visited tile, walk->end if there is none.
static __device__ __forceinline__ int walk_next(const LoomArgs *args, const Work *work, Walk *walk, bool *full) {
    const int next = walk->outer.lo <= walk->outer.hi ? walk->outer.lo : walk->end;
    walk->outer.lo = next + 1;
    const int first = next * ${other.tile};
    *full = first >= walk->inner.lo && first <= walk->inner.hi - (${other.tile} - 1);
//@ if other.name == "queries" then
    *full = *full && (work->tile + 1) * ${own.tile} <= work->${own.seq};
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
    Walk walk = {first_chunk(args, work), 0, (work->${other.seq} + ${other.tile} - 1) / ${other.tile}, 0};
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
