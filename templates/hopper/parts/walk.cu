//@ -- A score made of positions is most often largest where they meet, as ALiBi: a walk that begins there need not move references.
//@ local from_diagonal = not listed and at_diagonal
//@ if from_diagonal then
// Which tiles of keys a work visits: from the one that has the position of the last query of its tile back to the first, then the
// others from the last back. A row's bits depend on its place in the tile, not on other rows.
//@ else
// Which tiles of keys a work visits, from the last back: always in this order, so that a row's bits are its own. Under a
// causal mask the one tile that it cuts comes first, where there is no product under way that it would have to wait for.
//@ end
//@ if not listed then
typedef struct Spans {  // in tiles, inclusive
    int outer_lo, outer_hi;  // some of the rows see some key
    int inner_lo, inner_hi;  // all see all
} Spans;

typedef struct Walk {
//@ if from_diagonal then
    int first, last;       // of keys that are seen
    int left;              // tiles still to be visited
//@ else
    int first;             // the last to be visited
//@ end
    int full_lo, full_hi;  // those that are full for all
    int tile;              // the next
    const Spans *spans;    // [warpgroups]
} Walk;
//@ else
// A warp walks together, 128 tiles at a time.
typedef struct Walk {
    unsigned chunk;  // of classes, that is at hand
    int base;        // its first tile
    unsigned four;   // classes of this lane's four
    unsigned left;   // lanes that have some to be visited
} Walk;
//@ end

typedef struct Visit {
    int tile;          // -1: none is left
    unsigned classes;  // 2 bits a warpgroup: 0 empty, 1 partial, 2 full; 3 partial by its spans alone, where the mask is more than these
} Visit;

constexpr unsigned all_full = ${tonumber(string.rep("2", c.warpgroups), 4)};  // of all warpgroups

//@ if not listed then
// The rows of a warpgroup. Those past the end of the sequence do as the last that has rows.
static __device__ __forceinline__ int first_row(const Work *work, int warpgroup) {
    const int first = work->tile * tile_q;
    return first + 64 * min(warpgroup, (work->seq_q - first - 1) / 64);
}
static __device__ __forceinline__ int last_row(const Work *work, int warpgroup) {
    return min(first_row(work, warpgroup) + 64, work->seq_q) - 1;
}

//@ end
//@ if listed then
static __device__ __forceinline__ void walk_read(const LoomArgs *args, Walk *walk) {
    walk->four = read_classes(args, walk->chunk);
    walk->left = __ballot_sync(~0u, walk->four != 0);
}

static __device__ __forceinline__ Walk walk_begin(const LoomArgs *args, const Work *work) {
    const int chunks = chunks_of(work);
    Walk walk = {first_chunk(args, work) + chunks - 1, class_chunk * (chunks - 1), 0, 0};
    if (chunks > 0) walk_read(args, &walk);
    return walk;
}

static __device__ __forceinline__ Visit walk_next(const LoomArgs *args, Walk *walk) {
    Visit visit = {-1, 0};
    while (!walk->left) {
        if (walk->base <= 0) return visit;
        walk->base -= class_chunk;
        --walk->chunk;
        walk_read(args, walk);
    }
    const int lane = 31 - __clz(walk->left);
    const unsigned four = __shfl_sync(~0u, walk->four, lane);
    const int byte = (31 - __clz(four)) / 8;
    const unsigned others = four & ((1u << 8 * byte) - 1);
    if (threadIdx.x % 32 == lane) walk->four = others;
    if (others == 0) walk->left ^= 1u << lane;
    visit.tile = walk->base + 4 * lane + byte;
    visit.classes = four >> 8 * byte & 0xff;
    return visit;
}
//@ else
// Lane w finds the spans of warpgroup w.
static __device__ __forceinline__ Walk walk_begin(const LoomArgs *args, const Work *work, Spans *spans) {
    const int lane = threadIdx.x % 32, row = first_row(work, lane % warpgroups), row_end = last_row(work, lane % warpgroups);
    Span outer[1], inner[1];
    visible_keys(args, work, work->q_start + row, work->q_start + row_end, outer, inner);
    const int lo = outer[0].lo - work->k_start, hi = outer[0].hi - work->k_start;
    const bool any = lo <= hi;
    Spans of_lane;
    of_lane.outer_lo = any ? lo / tile_k : 1;
    of_lane.outer_hi = any ? hi / tile_k : 0;
    of_lane.inner_lo = any ? (inner[0].lo - work->k_start + tile_k - 1) / tile_k : 1;
    of_lane.inner_hi = any ? (inner[0].hi - work->k_start + 1) / tile_k - 1 : 0;
    __syncwarp();  // all lanes are done with the spans of the work before
    if (lane < warpgroups) spans[lane] = of_lane;
    __syncwarp();
    Walk walk;
    walk.spans = spans;
    walk.first = __reduce_min_sync(~0u, any ? of_lane.outer_lo : 0x7fffffff);
    walk.tile = __reduce_max_sync(~0u, any ? of_lane.outer_hi : -1);
//@ if from_diagonal then
    walk.last = walk.tile;
    walk.left = walk.last - walk.first + 1;
    const long long diagonal = (long long)work->q_start + (work->tile + 1) * (long long)tile_q - 1 - work->k_start;
    walk.tile = (int)min(max(diagonal < 0 ? 0 : diagonal / tile_k, (long long)walk.first), (long long)walk.last);
//@ end
    walk.full_lo = __reduce_max_sync(~0u, of_lane.inner_lo);
    walk.full_hi = __reduce_min_sync(~0u, of_lane.inner_hi);
    return walk;
}

static __device__ __forceinline__ Visit walk_next(const LoomArgs *args, Walk *walk) {
    Visit visit = {-1, 0};
//@ if from_diagonal then
    if (walk->left <= 0) return visit;
    --walk->left;
    visit.tile = walk->tile;
    walk->tile = walk->tile == walk->first ? walk->last : walk->tile - 1;
//@ else
    if (walk->tile < walk->first) return visit;
    visit.tile = walk->tile--;
//@ end
    if (walk->full_lo <= visit.tile && visit.tile <= walk->full_hi) {
        visit.classes = all_full;
        return visit;
    }
#pragma unroll
    for (int w = 0; w < warpgroups; ++w) {
        const Spans spans = walk->spans[w];
        const bool some = spans.outer_lo <= visit.tile && visit.tile <= spans.outer_hi;
        const bool all = spans.inner_lo <= visit.tile && visit.tile <= spans.inner_hi;
        visit.classes |= (all ? 2u : some ? 1u : 0u) << 2 * w;
    }
    return visit;
}
//@ end
