//@ local has_spans, one_span = walk == "range" or bounds, walk == "range" and num_spans == 1
//@ -- A score made of positions is most often largest where they meet, as ALiBi: a walk that begins there need not move references.
//@ local from_diagonal = one_span and at_diagonal
//@ if from_diagonal then
// Which tiles of keys a work visits: from the one that has the position of the last query of its tile back to the first, then the
// others from the last back. A row's bits depend on its place in the tile, not on other rows.
//@ else
// Which tiles of keys a work visits, from the last back: always in this order, so that a row's bits are its own. Under a
// causal mask the one tile that it cuts comes first, where there is no product under way that it would have to wait for.
//@ end
//@ if has_spans then
typedef struct Spans {  // in tiles, inclusive
    int outer_lo, outer_hi;  // some of the rows see some key
    int inner_lo, inner_hi;  // all see all
} Spans;

//@ end
//@ if one_span then
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
// A warp walks together; each lane knows one of 32 tiles.
typedef struct Walk {
    int first;          // the last that may be visited
    int base;           // first of the 32 tiles at hand, below 0 for the last of them
    unsigned classes;   // of this lane's tile, as in a visit
    unsigned left;      // of the 32, those still to be visited
//@ if has_spans then
    const Spans *spans; // [warpgroups][num_spans]
//@ end
} Walk;
//@ end

typedef struct Visit {
    int tile;          // -1: none is left
    unsigned classes;  // 2 bits a warpgroup: 0 empty, 1 partial, 2 full; 3 partial by its spans alone, where the mask is more than these
} Visit;

constexpr unsigned all_full = ${tonumber(string.rep("2", c.warpgroups), 4)};  // of all warpgroups

// The rows of a warpgroup. Those past the end of the sequence do as the last that has rows.
static __device__ __forceinline__ int first_row(const Work *work, int warpgroup) {
    const int first = work->tile * tile_q;
    return first + 64 * min(warpgroup, (work->seq_q - first - 1) / 64);
}
static __device__ __forceinline__ int last_row(const Work *work, int warpgroup) {
    return min(first_row(work, warpgroup) + 64, work->seq_q) - 1;
}

//@ if not one_span then
static __device__ __forceinline__ void walk_classify(const LoomArgs *args, const Work *work, Walk *walk) {
    const int tile = walk->base + threadIdx.x % 32;
    walk->classes = 0;
#pragma unroll 1  // the planner has few registers
    for (int w = 0; w < warpgroups; ++w) {
        unsigned what = 0;
//@ if has_spans then
        bool some = false, all = false;
#pragma unroll
        for (int i = 0; i < num_spans; ++i) {
            const Spans *spans = walk->spans + w * num_spans + i;
            some = some || (spans->outer_lo <= tile && tile <= spans->outer_hi);
            all = all || (spans->inner_lo <= tile && tile <= spans->inner_hi);
        }
        what = all ? 2 : some ? 1 : 0;
//@ end
//@ if walk ~= "range" then
        const int row = first_row(work, w), row_end = last_row(work, w);
        const int first = tile * tile_k, last = min(first + tile_k, work->seq_k) - 1;
//@     if bounds then
        if (what != 0) {
            const unsigned rest = tile_class(args, work, work->q_start + row, work->q_start + row_end, work->k_start + first, work->k_start + last);
            what = rest < 2 ? rest : what == 2 ? 2 : 3;
        }
//@     else
        if (tile >= 0) {
            what = tile_class(args, work, work->q_start + row, work->q_start + row_end, work->k_start + first, work->k_start + last);
            if (what == 2 && first + tile_k > work->seq_k) what = 1;
        }
//@     end
//@ end
        walk->classes |= what << 2 * w;
    }
    walk->left = __ballot_sync(~0u, walk->classes != 0);
}

//@ end
//@ if has_spans then
// Lane w finds the spans of warpgroup w.
static __device__ __forceinline__ Walk walk_begin(const LoomArgs *args, const Work *work, Spans *spans) {
    const int lane = threadIdx.x % 32, row = first_row(work, lane % warpgroups), row_end = last_row(work, lane % warpgroups);
    Span outer[num_spans], inner[num_spans];
    visible_keys(args, work, work->q_start + row, work->q_start + row_end, outer, inner);
    int first = 0x7fffffff, last = -1;
    __syncwarp();  // all lanes are done with the spans of the work before
    Spans of_lane;
#pragma unroll
    for (int i = 0; i < num_spans; ++i) {
        const int lo = outer[i].lo - work->k_start, hi = outer[i].hi - work->k_start;
        const bool any = lo <= hi;
        of_lane.outer_lo = any ? lo / tile_k : 1;
        of_lane.outer_hi = any ? hi / tile_k : 0;
        of_lane.inner_lo = any ? (inner[i].lo - work->k_start + tile_k - 1) / tile_k : 1;
        of_lane.inner_hi = any ? (inner[i].hi - work->k_start + 1) / tile_k - 1 : 0;
        if (lane < warpgroups) spans[lane * num_spans + i] = of_lane;
        if (any) {
            first = min(first, of_lane.outer_lo);
            last = max(last, of_lane.outer_hi);
        }
    }
    __syncwarp();
    Walk walk;
    walk.spans = spans;
//@ if one_span then
    walk.first = __reduce_min_sync(~0u, first);
    walk.tile = __reduce_max_sync(~0u, last);
//@ if from_diagonal then
    walk.last = walk.tile;
    walk.left = walk.last - walk.first + 1;
    const long long diagonal = (long long)work->q_start + (work->tile + 1) * (long long)tile_q - 1 - work->k_start;
    walk.tile = (int)min(max(diagonal < 0 ? 0 : diagonal / tile_k, (long long)walk.first), (long long)walk.last);
//@ end
    walk.full_lo = __reduce_max_sync(~0u, of_lane.inner_lo);
    walk.full_hi = __reduce_min_sync(~0u, of_lane.inner_hi);
//@ else
    walk.first = __reduce_min_sync(~0u, first);
    walk.base = __reduce_max_sync(~0u, last) - 31;
    walk.left = 0;
    if (walk.base + 31 >= walk.first) walk_classify(args, work, &walk);
//@ end
    return walk;
}

//@ end
//@ if one_span then
static __device__ __forceinline__ Visit walk_next(const LoomArgs *args, const Work *work, Walk *walk) {
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
//@ else
//@ if not has_spans then
static __device__ __forceinline__ Walk walk_begin(const LoomArgs *args, const Work *work) {
    Walk walk;
    walk.first = 0;
    walk.base = (work->seq_k + tile_k - 1) / tile_k - 32;
    walk.left = 0;
    if (work->seq_k > 0) walk_classify(args, work, &walk);
    return walk;
}

//@ end
static __device__ __forceinline__ Visit walk_next(const LoomArgs *args, const Work *work, Walk *walk) {
    Visit visit = {-1, 0};
    while (!walk->left) {
        if (walk->base <= walk->first) return visit;
        walk->base -= 32;
        walk_classify(args, work, walk);
    }
    const int bit = 31 - __clz(walk->left);
    walk->left ^= 1u << bit;
    visit.tile = walk->base + bit;
    visit.classes = __shfl_sync(~0u, walk->classes, bit);
    return visit;
}
//@ end
