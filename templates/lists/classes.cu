//@ local over_keys = other.name == "keys"
//@ -- Spans of keys, or of queries: the mask has nothing else, or a rest, see interval.bounds.
//@ local has_rest = walk ~= "range"
//@ local has_spans = not has_rest or bounds and k.calls.bounds
//@ -- What the two sides of a tile read of arrays, see functions.reads.
//@ local READS = {queries = {type = "QueryReads", call = "query_reads"}, keys = {type = "KeyReads", call = "key_reads"}}
//@ local own_reads, other_reads = k.reads[own.name] and READS[own.name], k.reads[other.name] and READS[other.name]
//@ local parameters = (k.reads.queries and ", const QueryReads *queries" or "") .. (k.reads.keys and ", const KeyReads *keys" or "")
//@ local passed = (k.reads.queries and ", queries" or "") .. (k.reads.keys and ", keys" or "")
//@ text(header)

//@ text(constants)
//@ if not even then
constexpr int levels = 256;  // of how many tiles one visits
//@ end

//@ text(arguments)

//@ part("place", {of = own.name})

//@ text(functions)

//@ if has_spans and has_rest then
// Class of a tile: 0 empty, 1 partial, 2 full, 3 partial by its spans alone, where the mask is more than these.
//@ else
// Class of a tile: 0 empty, 1 partial, 2 full.
//@ end
// first, last: rows of the part of its own side; other: index of the tile on the other.
//@ text("static __device__ __forceinline__ unsigned class_of(const LoomArgs *args, const Work *work, int first, int last, int other" .. parameters .. ") {")
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
    //@ text("const unsigned rest = tile_class(args, work, work->q_start + first, work->q_start + last, lo, work->k_start + other_last" .. passed .. ");")
    return rest < 2 ? rest : all ? 2 : 3;
//@     elseif over_keys then
    return all ? 2 : some;
//@     else
    return all && (work->tile + 1) * ${own.tile} <= work->${own.seq} ? 2 : some;
//@     end
//@ else
//@     if over_keys then
    //@ text("const unsigned what = tile_class(args, work, work->q_start + first, work->q_start + last, work->k_start + other_first, work->k_start + other_last" .. passed .. ");")
    const bool whole = other_first + ${other.tile} <= work->${other.seq};
//@     else
    //@ text("const unsigned what = tile_class(args, work, work->q_start + other_first, work->q_start + other_last, work->k_start + first, work->k_start + last" .. passed .. ");")
    const bool whole = other_first + ${other.tile} <= work->${other.seq} && (work->tile + 1) * ${own.tile} <= work->${own.seq};
//@     end
    return what == 2 && !whole ? 1 : what;
//@ end
}

// First row of a part of a tile. A part past the end of the sequence does as the last that has rows.
static __device__ __forceinline__ int first_of(const Work *work, int tile, int part) {
    const int first = tile * ${own.tile};
    return first + part_rows * min(min(part, parts - 1), (work->${own.seq} - first - 1) / part_rows);
}

//@ if not even then
//@ part("count")

// 0 for tiles that visit the most, levels - 1 for those that visit none.
static __device__ __forceinline__ int level_of(int visited, int of_level) { return levels - 1 - visited / of_level; }

// Puts the tiles of a mask into their order: by level, those of one about from the last back. Other blocks have written how many
// each visits, so that is read past the L1 cache.
static __device__ __forceinline__ void put_in_order(int *order, int *loads, int tiles, int others) {
    __shared__ int places[levels];  // how many are of a level, then the place of its next
    __shared__ int sums[levels / 32];
    __shared__ int longest, all;  // tiles that one visits, and all together
    const int *const visited = order + tiles;
    const int of_level = (others + levels - 2) / (levels - 1);
    if (threadIdx.x < levels) places[threadIdx.x] = 0;
    if (threadIdx.x == 0) longest = all = 0;
    __syncthreads();
    int most = 0, sum = 0;
    for (int i = threadIdx.x; i < tiles; i += threads) {
        const int num = __ldcg(visited + i);
        atomicAdd(&places[level_of(num, of_level)], 1);
        most = max(most, num);
        sum += num;
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        most = max(most, __shfl_xor_sync(~0u, most, distance));
        sum += __shfl_xor_sync(~0u, sum, distance);
    }
    if (threadIdx.x % 32 == 0) {
        atomicMax(&longest, most);
        atomicAdd(&all, sum);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        loads[0] = longest;
        loads[1] = all;
    }
    int before = 0, count = 0;
    if (threadIdx.x < levels) {
        count = before = places[threadIdx.x];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int left = __shfl_up_sync(~0u, before, distance);
            if (threadIdx.x % 32 >= distance) before += left;
        }
        if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = before;
    }
    __syncthreads();
    if (threadIdx.x < levels) {
        for (int i = 0; i < (int)threadIdx.x / 32; ++i) before += sums[i];
        places[threadIdx.x] = before - count;
    }
    __syncthreads();
    for (int i = tiles - 1 - (int)threadIdx.x; i >= 0; i -= threads) order[atomicAdd(&places[level_of(__ldcg(visited + i), of_level)], 1)] = i;
}

//@ end
extern "C" __global__ void __launch_bounds__(threads, fit) ${symbol}(const __grid_constant__ LoomArgs args) {
//@ if own_reads then
    __shared__ ${own_reads.type} reads_of_own[most_own * parts];
//@ end
//@ if not even then
    __shared__ int visited[most_own];
    __shared__ bool is_last;
//@ end
    Work work = {0, 0, 0, 0, args.seq_q, args.seq_k, args.q_start, args.k_start};
    const int tiles = (work.${own.seq} + ${own.tile} - 1) / ${own.tile}, others = (work.${other.seq} + ${other.tile} - 1) / ${other.tile};
    const int end = (others + class_chunk - 1) / class_chunk * class_chunk, part = threadIdx.x % lanes;
//@ local heads = of_head and "args.heads_q" or of_head_kv and "args.heads_kv"
    //@ text(("const int masks = %s;"):format(of_batch and heads and "args.batch * " .. heads or of_batch and "args.batch" or heads or "1"))
    // [1] work, and what its own tiles read; a work is neighbouring tiles of a mask, as many as make a work for each block
    const int about = min((masks * tiles + (int)gridDim.x - 1) / (int)gridDim.x, most_own), works_of_mask = (tiles + about - 1) / about;
    for (int place = blockIdx.x; place < masks * works_of_mask; place += gridDim.x) {
        const int mask = place / works_of_mask;  // of those that differ
        const int first_tile = (place - mask * works_of_mask) * about, num = min(about, tiles - first_tile);
//@ if of_head and of_batch then
        work.batch = mask / args.heads_q;
        work.head = mask - work.batch * args.heads_q;
        work.head_kv = work.head / args.group;
//@ elseif of_head then
        work.head = mask;
        work.head_kv = work.head / args.group;
//@ elseif of_head_kv and of_batch then
        work.batch = mask / args.heads_kv;
        work.head_kv = mask - work.batch * args.heads_kv;
//@ elseif of_head_kv then
        work.head_kv = mask;
//@ elseif of_batch then
        work.batch = mask;
//@ end
//@ if not even then
        int *const loads = args.loads + 4ll * mask;
        unsigned long long *const word = (unsigned long long *)(loads + 2);
        const unsigned long long found = *(volatile unsigned long long *)word;  // nobody waits for it here
        if (threadIdx.x < most_own) visited[threadIdx.x] = 0;
//@ end

//@ if own_reads then
        for (int i = threadIdx.x / lanes; i - (int)threadIdx.x / lanes < num * parts; i += threads / lanes) {
            const int of = min(i, num * parts - 1), tile = first_tile + of / parts, first = first_of(&work, tile, of % parts);
            const int start = work.${own.start}, last = min(first + part_rows, work.${own.seq}) - 1;
            const ${own_reads.type} reads = ${own_reads.call}(&args, &work, start + first, start + last, part_rows);
            if (part == 0) reads_of_own[of] = reads;
        }
//@ end
//@ if own_reads or not even then
        __syncthreads();
//@ end
//@ if not even then
        if (threadIdx.x == 0) count_begin(word, found, tiles);
//@ end

        // [2] classes
        for (int step = 0; step < end; step += threads / lanes) {
            const int other = step + threadIdx.x / lanes;
//@ if other_reads then
            const int other_first = work.${other.start} + other * ${other.tile};
            bool read = other < others;
//@     if has_spans then
            if (read) {  // some span of the work's tiles meets it
                Span outer[num_spans], inner[num_spans];
                visible_${other.name}(&args, &work, work.${own.start} + first_tile * ${own.tile},
                               work.${own.start} + min((first_tile + num) * ${own.tile}, work.${own.seq}) - 1, outer, inner);
                read = false;
#pragma unroll
                for (int i = 0; i < num_spans; ++i) read = read || (outer[i].lo < other_first + ${other.tile} && other_first <= outer[i].hi);
            }
//@     end
            const int num_read = read ? min(${other.tile}, work.${other.seq} - other * ${other.tile}) : 0;
            const ${other_reads.type} reads = ${other_reads.call}(&args, &work, other_first, other_first + num_read - 1, ${other.tile});
//@ end
#pragma unroll 1
            for (int i = 0; i < num; ++i) {
                work.tile = first_tile + i;
                unsigned what = 0;
                if (other < others && part < parts) {
                    const int first = first_of(&work, work.tile, part), last = min(first + part_rows, work.${own.seq}) - 1;
//@ local of_own, of_other = own_reads and ", &reads_of_own[i * parts + part]" or "", other_reads and ", &reads" or ""
                    //@ text("what = class_of(&args, &work, first, last, other" .. (over_keys and of_own .. of_other or of_other .. of_own) .. ") << 2 * part;")
                }
#pragma unroll
                for (int distance = 1; distance < lanes; distance *= 2) what |= __shfl_xor_sync(~0u, what, distance);
                if (part == 0 && other < end) args.classes[((long long)mask * tiles + work.tile) * end + other] = what;
//@ if not even then
                const unsigned seen = __ballot_sync(~0u, part == 0 && what != 0);
                if (threadIdx.x % 32 == 0 && seen) atomicAdd(&visited[i], __popc(seen));
//@ end
            }
        }
//@ if not even then

        // [3] order, by the block that finds the last classes of a mask
        __syncthreads();
        int *const order = args.order + 2ll * mask * tiles;
        if (threadIdx.x == 0) {
            for (int i = 0; i < num; ++i) order[tiles + first_tile + i] = visited[i];
            __threadfence();
            is_last = atomicAdd(word, (unsigned long long)num) == counting + tiles - num;
            __threadfence();
        }
        __syncthreads();
        if (is_last) {
            if (threadIdx.x == 0) *word = 0;
            put_in_order(order, loads, tiles, max(others, 1));
        }
//@ elseif own_reads then
        __syncthreads();  // before the next work overwrites what they read
//@ end
    }
}
