//@ local over_keys = other.name == "keys"
//@ -- Spans of keys, or of queries: the mask has nothing else, or a rest, see interval.bounds.
//@ local has_rest = walk ~= "range"
//@ local has_spans = not has_rest or bounds and k.calls.bounds
//@ text(header)

//@ text(constants)

//@ text(arguments)

//@ part("place", {of = own.name})

//@ text(functions)

//@ if has_spans and has_rest then
// Class of a tile: 0 empty, 1 partial, 2 full, 3 partial by its spans alone, where the mask is more than these.
//@ else
// Class of a tile: 0 empty, 1 partial, 2 full.
//@ end
// first, last: rows of the part of its own side; other: index of the tile on the other.
static __device__ __forceinline__ unsigned class_of(const LoomArgs *args, const Work *work, int first, int last, int other) {
    const int other_first = other * ${other.tile};
//@ if has_rest then
    const int other_last = min(other_first + ${other.tile}, work->${other.seq}) - 1;
//@ end
//@ if has_spans then
    Span outer[num_spans], inner[num_spans];
    visible_${other.name}(args, work, work->${own.start} + first, work->${own.start} + last, outer, inner);
    const int lo = work->${other.start} + other_first, hi = lo + ${other.tile} - 1;
    bool some = false, all = false;
#pragma unroll
    for (int i = 0; i < num_spans; ++i) {
        some = some || (outer[i].lo <= hi && lo <= outer[i].hi);
        all = all || (inner[i].lo <= lo && hi <= inner[i].hi);
    }
//@     if has_rest then
    if (!some) return 0;
    const unsigned rest = tile_class(args, work, work->q_start + first, work->q_start + last, lo, work->k_start + other_last);
    return rest < 2 ? rest : all ? 2 : 3;
//@     elseif over_keys then
    return all ? 2 : some;
//@     else
    return all && (work->tile + 1) * ${own.tile} <= work->${own.seq} ? 2 : some;
//@     end
//@ else
//@     if over_keys then
    const unsigned what = tile_class(args, work, work->q_start + first, work->q_start + last, work->k_start + other_first, work->k_start + other_last);
    const bool whole = other_first + ${other.tile} <= work->${other.seq};
//@     else
    const unsigned what = tile_class(args, work, work->q_start + other_first, work->q_start + other_last, work->k_start + first, work->k_start + last);
    const bool whole = other_first + ${other.tile} <= work->${other.seq} && (work->tile + 1) * ${own.tile} <= work->${own.seq};
//@     end
    return what == 2 && !whole ? 1 : what;
//@ end
}

extern "C" __global__ void __launch_bounds__(threads, 1) ${symbol}(const __grid_constant__ LoomArgs args) {
    // [1] classes of a row of tiles
    Work work = {0, 0, 0, 0, args.seq_q, args.seq_k, args.q_start, args.k_start};
    const int tiles = (work.${own.seq} + ${own.tile} - 1) / ${own.tile}, others = (work.${other.seq} + ${other.tile} - 1) / ${other.tile};
    const int mask = blockIdx.x / tiles;  // of those that differ
    work.tile = blockIdx.x - mask * tiles;
//@ if of_head then
    work.batch = mask / args.heads_q;
    work.head = mask - work.batch * args.heads_q;
    work.head_kv = work.head / args.group;
//@ elseif of_head_kv then
    work.batch = mask / args.heads_kv;
    work.head_kv = mask - work.batch * args.heads_kv;
//@ elseif of_batch then
    work.batch = mask;
//@ end
    const int end = (others + class_chunk - 1) / class_chunk * class_chunk, part = threadIdx.x % lanes;
    // A part past the end of the sequence does as the last that has rows.
    const int tile_first = work.tile * ${own.tile}, first = tile_first + part_rows * min(min(part, parts - 1), (work.${own.seq} - tile_first - 1) / part_rows);
    const int last = min(first + part_rows, work.${own.seq}) - 1;
    unsigned char *const classes = args.classes + (long long)blockIdx.x * end;
//@ if not even then
    int visited = 0;
//@ end
    for (int step = 0; step < end; step += threads / lanes) {
        const int other = step + threadIdx.x / lanes;
        unsigned what = 0;
        if (other < others && part < parts) what = class_of(&args, &work, first, last, other) << 2 * part;
#pragma unroll
        for (int distance = 1; distance < lanes; distance *= 2) what |= __shfl_xor_sync(~0u, what, distance);
        if (part == 0 && other < end) classes[other] = what;
//@ if not even then
        visited += __syncthreads_count(part == 0 && what != 0);
//@ end
    }
//@ if not even then
    if (threadIdx.x == 0) args.order[(2 * mask + 1) * (long long)tiles + work.tile] = visited;
//@ end
}
