//@ local one_span = walk == "range" and num_spans == 1
// Which tiles of keys a work visits, from the last back: always in this order, so that a row's bits are its own. Under a
// causal mask the one tile that it cuts comes first, where there is no product under way that it would have to wait for.
//@ if walk == "range" then
typedef struct Spans {  // in tiles, inclusive
    int outer_lo, outer_hi;  // some of the rows see some key
    int inner_lo, inner_hi;  // all see all
} Spans;

//@ end
//@ if one_span then
typedef struct Walk {
    int first;             // the last to be visited
    int full_lo, full_hi;  // those that are full for all
    int tile;              // the next
    const Spans *spans;    // [warpgroups]
} Walk;
//@ else
// A warp walks together; each lane knows one of 32 tiles.
typedef struct Walk {
    int first;          // the last that may be visited
    int base;           // first of the 32 tiles at hand, below 0 for the last of them
    unsigned classes;   // of this lane's tile: 2 bits a warpgroup, 0 empty, 1 partial, 2 full
    unsigned left;      // of the 32, those still to be visited
//@ if walk == "range" then
    const Spans *spans; // [warpgroups][num_spans]
//@ end
} Walk;
//@ end

typedef struct Visit {
    int tile;          // -1: none is left
    unsigned classes;  // 2 bits a warpgroup: 0 empty, 1 partial, 2 full
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
//@ if walk == "range" then
        bool some = false, all = false;
#pragma unroll
        for (int i = 0; i < num_spans; ++i) {
            const Spans *spans = walk->spans + w * num_spans + i;
            some = some || (spans->outer_lo <= tile && tile <= spans->outer_hi);
            all = all || (spans->inner_lo <= tile && tile <= spans->inner_hi);
        }
        walk->classes |= (all ? 2u : some ? 1u : 0u) << 2 * w;
//@ else
        const int row = first_row(work, w), row_end = last_row(work, w);
        const int first = tile * tile_k, last = min(first + tile_k, work->seq_k) - 1;
        unsigned what = 0;
        if (tile >= 0 && row <= row_end) {
            what = tile_class(args, work, work->q_start + row, work->q_start + row_end, work->k_start + first, work->k_start + last);
            if (what == 2 && first + tile_k > work->seq_k) what = 1;
        }
        walk->classes |= what << 2 * w;
//@ end
    }
    walk->left = __ballot_sync(~0u, walk->classes != 0);
}

//@ end
//@ if walk == "range" then
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
    if (walk->tile < walk->first) return visit;
    visit.tile = walk->tile--;
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
//@ if walk ~= "range" then
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
