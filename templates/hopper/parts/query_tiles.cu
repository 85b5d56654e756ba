//@ -- Blocks add to dQ of a tile of queries in the order in which they take the tiles of keys that it sees: sums are the same in every
//@ -- run, the first needs no zeros and the last leaves dQ as it is wanted. Who waits waits for a work that a running block has taken.
//@ local takes_turns = c.dq_turns == 1
//@ part("lane_0")

// What is told of a tile of queries with it.
typedef struct Tile {
    unsigned what;
    unsigned place;  // among those of all heads
    unsigned index;  // among those of its head
    unsigned head;
} Tile;
constexpr unsigned is_full = 1, next_is_full = 2, is_last = 4, is_none = 8, is_over = 16;

// What is told of a work: its first tile before the queries have come, or that it has none, or that there are no more works.
typedef struct Told {
    Work work;
    Tile first;
} Told;

// What goes with the queries and dO of a stage: 16 bytes a row, of which wgmma reads the first three as bf16.
typedef struct Statistics {
    uint4 lse[tile_q], delta[tile_q];  // in units of S, and D; negative
    float exact_lse[tile_q];
    unsigned is_large;                 // an LSE is large: the scale multiplies before exact_lse is subtracted
//@ if takes_turns then
    unsigned turn, unused[2];          // of the work in adding to dQ: see turn_of
//@ else
    unsigned unused[3];
//@ end
} Statistics;
//@ if takes_turns then
constexpr unsigned is_last_turn = 0x80000000u;
//@ end

//@ part("stage", {what = "queries and dO"})

static __device__ __forceinline__ unsigned bar_q_full(unsigned smem, int stage) { return smem + smem_barriers + 8 * stage; }
static __device__ __forceinline__ unsigned bar_q_empty(unsigned smem, int stage) { return bar_q_full(smem, stage) + 8 * stages; }
static __device__ __forceinline__ unsigned bar_dout_full(unsigned smem, int stage) { return bar_q_full(smem, stage) + 16 * stages; }
static __device__ __forceinline__ unsigned bar_dout_empty(unsigned smem, int stage) { return bar_q_full(smem, stage) + 24 * stages; }
static __device__ __forceinline__ unsigned bar_k_full(unsigned smem) { return bar_q_full(smem, 4 * stages); }
static __device__ __forceinline__ unsigned bar_v_full(unsigned smem) { return bar_k_full(smem) + 8; }
static __device__ __forceinline__ unsigned bar_keys_empty(unsigned smem) { return bar_k_full(smem) + 16; }  // k and v
static __device__ __forceinline__ unsigned bar_told(unsigned smem, int slot) { return bar_k_full(smem) + 24 + 8 * slot; }
static __device__ __forceinline__ unsigned bar_heard(unsigned smem, int slot) { return bar_told(smem, 2 + slot); }  // all have heard, and are done with it
static __device__ __forceinline__ int slot_of(int nth) { return nth & 1; }  // of the block's works
static __device__ __forceinline__ int slot_parity(int nth) { return nth >> 1 & 1; }

//@ if even then
// The work of a place; a block takes the next when it has time. Tiles of one head follow each other, so that they share its queries in
// the L2 cache.
//@ else
// The work of a place; a block takes the next when it has time. Few heads at a time, so that their dQ stays in the L2 cache; of these the
// tiles that take longest first.
//@ end
static __device__ __forceinline__ Work work_of(const LoomArgs *args, int place) {
    const int tiles = (args->seq_k + tile_k - 1) / tile_k;
//@ if even then
    const int head = place / tiles, row = place - head * tiles;
//@ else
    const int heads = min(list_heads, max(list_rows / max(args->seq_q, 1), 1));  // of a list
    const int list = place / (heads * tiles), first = list * heads, present = min(heads, args->batch * args->heads_kv - first);
    const int of_list = place - first * tiles, row = of_list / present, head = first + of_list - row * present;
//@ end
    const int batch = head / args->heads_kv, head_kv = head - batch * args->heads_kv;
    Work work = {batch, head_kv * args->group, head_kv, row, args->seq_q, args->seq_k, args->q_start, args->k_start};
//@ if listed and not even and not takes_turns then
    work.tile = tile_at(args, mask_of(args, batch, work.head), row);
//@ end
    return work;
}

// Word after word: these warps have few registers.
static __device__ __forceinline__ void copy_work(Work *to, const Work *from) {
#pragma unroll
    for (int i = 0; i < (int)(sizeof(Work) / 4); ++i) ((volatile int *)to)[i] = ((const volatile int *)from)[i];
}

// -- Loaders and tellers: warps; that of queries and the tellers take the same way through the tiles -------------

// The tiles of queries that see the block's keys, of one head of the group after another.
typedef struct Way {
    Work *work;  // this warp's, of the head of `tile`, in shared memory
    Walk walk;
    int tile;
    bool full;  // all of the tile's queries see all keys
} Way;

// To the next tile; false: there is none.
static __device__ __forceinline__ bool way_next(const LoomArgs *args, Way *way) {
    way->tile = walk_next(args, way->work, &way->walk, &way->full);
    while (way->tile == way->walk.end) {
        const int head = way->work->head + 1;
        if (head == (way->work->head_kv + 1) * args->group) return false;
        __syncwarp();  // all lanes have read it
        way->work->head = head;
        __syncwarp();
        way->walk = walk_begin(args, way->work);
        way->tile = walk_next(args, way->work, &way->walk, &way->full);
    }
    return true;
}

static __device__ __forceinline__ Way way_of(const LoomArgs *args, Work *work) {
    Way way;
    way.work = work;
    way.walk = walk_begin(args, work);
    return way;
}

//@ part("taken")

// Tells the works, and loads their queries and dO.
static __device__ __forceinline__ void load_queries(const LoomArgs *args, Work *work, unsigned smem, Tile *tiles, Told *told) {
    const bool leader = threadIdx.x % 32 == 0;
    Stage stage = {0, 1};
    const int works = args->batch * args->heads_kv * ((args->seq_k + tile_k - 1) / tile_k);
//@ if takes_turns then
    // Also the first: a block that waits for a turn may only wait for one that has begun.
    const int times = works + gridDim.x;
    if (leader) begin_taking(args, times);
    unsigned place = taken_before(args, times);
//@ else
    if (leader) begin_taking(args, works);
    unsigned place = blockIdx.x;
//@ end
    int nth = 0;
    for (; place < (unsigned)works; ++nth) {
        const int slot = slot_of(nth);
        __syncwarp();  // all lanes are done with the work before
        if (leader) *work = work_of(args, place);
        __syncwarp();
        Way way = way_of(args, work);
        bool more = way_next(args, &way);
        barrier_wait(bar_heard(smem, slot), slot_parity(nth) ^ 1);
        if (leader) {
            const Tile first = {more ? 0 : is_none, 0, (unsigned)way.tile, (unsigned)work->head};
            copy_work(&told[slot].work, work);
            told[slot].first = first;
            barrier_arrive(bar_told(smem, slot));
        }
        for (; more; stage_next(&stage)) {
            const int tile = way.tile, head = work->head;
            const unsigned full = way.full ? is_full : 0;
            more = way_next(args, &way);
            if (!leader) continue;
            barrier_wait(bar_q_empty(smem, stage.index), stage.parity);
            const unsigned place_of_tile = (work->batch * args->heads_q + head) * way.walk.end + tile;
            const Tile now = {full | (!more ? is_last : way.full ? next_is_full : 0), place_of_tile, (unsigned)tile, (unsigned)head};
            tiles[stage.index] = now;
            barrier_expect(bar_q_full(smem, stage.index), q_bytes);
#pragma unroll
            for (int i = 0; i < loads_qk; ++i) {
                load_box(smem + smem_q + stage.index * q_bytes + i * tile_q * 128, &args->q_map, 64 * i, tile * tile_q, head, work->batch,
                         bar_q_full(smem, stage.index));
            }
            barrier_wait(bar_dout_empty(smem, stage.index), stage.parity);
            barrier_expect(bar_dout_full(smem, stage.index), dout_bytes);
#pragma unroll
            for (int i = 0; i < loads_v; ++i) {
                load_box(smem + smem_dout + stage.index * dout_bytes + i * tile_q * 128, &args->dout_map, 64 * i, tile * tile_q, head, work->batch,
                         bar_dout_full(smem, stage.index));
            }
        }
//@ if takes_turns then
        place = taken_before(args, times);
//@ else
        place = gridDim.x + taken_before(args, works);
//@ end
    }
    barrier_wait(bar_heard(smem, slot_of(nth)), slot_parity(nth) ^ 1);
    if (leader) {
        told[slot_of(nth)].first.what = is_over;
        barrier_arrive(bar_told(smem, slot_of(nth)));
    }
}

// Keys and values have one buffer.
static __device__ __forceinline__ void load_keys(const LoomArgs *args, unsigned smem, const Told *told) {
    for (int nth = 0;; ++nth) {
        const int slot = slot_of(nth);
        barrier_wait(bar_told(smem, slot), slot_parity(nth));
        if (told[slot].first.what & is_over) return;
        if (threadIdx.x % 32 == 0) {
            const Work *work = &told[slot].work;
            barrier_wait(bar_keys_empty(smem), slot ^ 1);
            barrier_expect(bar_k_full(smem), k_bytes);
#pragma unroll
            for (int i = 0; i < loads_qk; ++i) {
                load_box(smem + smem_k + i * tile_k * 128, &args->k_map, 64 * i, work->tile * tile_k, work->head_kv, work->batch, bar_k_full(smem));
            }
            barrier_expect(bar_v_full(smem), v_bytes);
#pragma unroll
            for (int i = 0; i < loads_v; ++i) {
                load_box(smem + smem_v + i * tile_k * 128, &args->v_map, 64 * i, work->tile * tile_k, work->head_kv, work->batch, bar_v_full(smem));
            }
        }
        barrier_arrive(bar_heard(smem, slot));
    }
}

//@ if takes_turns then
//@ if has_mask then
// Whether the work that has another tile of keys visits a tile of queries.
static __device__ __forceinline__ bool visits(const LoomArgs *args, const Work *work, int tile_of_keys, int tile) {
//@ if listed then
    return ((const unsigned char *)args->classes)[(first_chunk(args, work) + (tile_of_keys - work->tile) * chunks_of(work)) * (long long)class_chunk + tile] != 0;
//@ else
    const int first = tile_of_keys * tile_k, last = min(first + tile_k, work->seq_k) - 1, query = work->q_start + tile * tile_q;
    Span outer, inner;
    visible_queries(args, work, work->k_start + first, work->k_start + last, &outer, &inner);
    return outer.lo <= outer.hi && outer.lo < query + tile_q && outer.hi >= query;
//@ end
}

//@ end
// When a work adds to dQ of a tile of queries: behind the work with the tile of keys that is the result - 1, which is marked if no
// other work follows; 0: as the first.
static __device__ __forceinline__ unsigned turn_of(const LoomArgs *args, const Work *work, int tile) {
    const int tiles = (work->seq_k + tile_k - 1) / tile_k;
//@ if not has_mask then
    return work->tile + 1 < tiles ? work->tile : work->tile | is_last_turn;
//@ else
    const int lane = threadIdx.x % 32;
    unsigned turn = 0, found = 0;
    for (int other = work->tile - 1; other >= 0 && !found; other -= 32) {
        found = __ballot_sync(~0u, other - lane >= 0 && visits(args, work, other - lane, tile));
        if (found) turn = other - (__ffs(found) - 1) + 1;
    }
    found = 0;
    for (int other = work->tile + 1; other < tiles && !found; other += 32) {
        found = __ballot_sync(~0u, other + lane < tiles && visits(args, work, other + lane, tile));
    }
    return found ? turn : turn | is_last_turn;
//@ end
}

//@ end
// Three bf16 whose sum is x to 24 bits, and zeros.
static __device__ __forceinline__ uint4 in_three(float x) {
    const unsigned hi = __float_as_uint(x) & 0xffff0000;
    const float rest = x - __uint_as_float(hi);
    const unsigned mid = __float_as_uint(rest) & 0xffff0000;
    const float last = rest - __uint_as_float(mid);
    return uint4{hi >> 16 | mid, __float_as_uint(last) >> 16, 0, 0};
}

// Tells LSE of the rows of each tile of a work, or D: goes with the queries, or with dO.
template <bool of_lse> static __device__ __forceinline__ void tell_work(const LoomArgs *args, Work *work, unsigned smem, Statistics *statistics, Stage *stage) {
    constexpr int rows = tile_q / 32;  // of a lane
    const int lane = threadIdx.x % 32;
    const float unseen = __int_as_float(0xff800000);  // LSE of a row that sees no key
    const float per_scale = 1 / args->scale;
    Way way = way_of(args, work);
    bool more = way_next(args, &way);
    for (; more; stage_next(stage)) {
        const int head = work->head, first_row = way.tile * tile_q + lane;
        const float *from = of_lse ? args->lse + work->batch * args->lse_stride_batch + head * args->lse_stride_head
                                   : args->delta + ((long long)work->batch * args->heads_q + head) * args->seq_q;
        const long long step = of_lse ? args->lse_stride_seq : 1;
        float x[rows];
        bool large = false;
#pragma unroll
        for (int i = 0; i < rows; ++i) x[i] = first_row + 32 * i < args->seq_q ? from[(first_row + 32 * i) * step] : of_lse ? unseen : 0;
//@ if takes_turns then
        const unsigned turn = of_lse ? 0 : turn_of(args, work, way.tile);
//@ end
        more = way_next(args, &way);
        Statistics *to = &statistics[stage->index];
        if (of_lse) {
#pragma unroll
            for (int i = 0; i < rows; ++i) large = large || !(fabsf(x[i]) * log2_e <= most_exact || x[i] == unseen);
            large = __any_sync(~0u, large);
            barrier_wait(bar_q_empty(smem, stage->index), stage->parity);
            if (lane == 0) to->is_large = large;
        } else {
            barrier_wait(bar_dout_empty(smem, stage->index), stage->parity);
//@ if takes_turns then
            if (lane == 0) to->turn = turn;
//@ end
        }
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            if (of_lse) {  // -inf: P is 0, as under +inf
                to->lse[32 * i + lane] = large ? uint4{0, 0, 0, 0} : in_three(x[i] == unseen ? -3e38f : -x[i] * per_scale);
                to->exact_lse[32 * i + lane] = x[i] == unseen ? -unseen : x[i];
            } else {
                to->delta[32 * i + lane] = in_three(-x[i]);
            }
        }
        publish_shared();
        __syncwarp();
//@ if has_score then
        if (lane == 0 || of_lse) barrier_arrive(of_lse ? bar_q_full(smem, stage->index) : bar_dout_full(smem, stage->index));
//@ else
        if (lane == 0) barrier_arrive(of_lse ? bar_q_full(smem, stage->index) : bar_dout_full(smem, stage->index));
//@ end
    }
}

template <bool of_lse> static __device__ __forceinline__ void tell(const LoomArgs *args, Work *work, unsigned smem, Statistics *statistics, const Told *told) {
    Stage stage = {0, 1};
    if (!of_lse) await_kernels_before();  // D is there
    for (int nth = 0;; ++nth) {
        const int slot = slot_of(nth);
        barrier_wait(bar_told(smem, slot), slot_parity(nth));
        if (told[slot].first.what & is_over) return;
        if (threadIdx.x % 32 == 0) copy_work(work, &told[slot].work);
        barrier_arrive(bar_heard(smem, slot));
        __syncwarp();
        tell_work<of_lse>(args, work, smem, statistics, &stage);
        __syncwarp();  // all lanes are done with the work
    }
}

//@ if has_score then
// Each thread is done with the queries of a stage: it has read LSE of them.
static __device__ __forceinline__ void release_queries(unsigned smem, int stage) { barrier_arrive(bar_q_empty(smem, stage)); }
//@ else
// This warp is done with the queries of a stage.
static __device__ __forceinline__ void release_queries(unsigned smem, int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(bar_q_empty(smem, stage));
}
//@ end

// -- What is told is added by wgmma ------------------------------------------------------------------------------------------

// Operand A of add_of_columns: ones. 0 for keys past the end where nothing else hides them: their S and dP are 0, so P is finite and
// dS 0. key is this thread's first, the second is key + 8.
static __device__ __forceinline__ void make_ones(unsigned (&ones)[4], int key, int seq_k) {
    const int lane = threadIdx.x % 32;
    const unsigned one = lane % 4 == 0 ? 0x3f803f80 : lane % 4 == 1 ? 0x3f80 : 0;
//@ if has_mask then
    ones[0] = ones[1] = opaque(one);
//@ else
    ones[0] = opaque(key < seq_k ? one : 0);
    ones[1] = opaque(key + 8 < seq_k ? one : 0);
//@ end
    ones[2] = ones[3] = opaque(0);
}

// Starts sum += what is told of each query at `offset` in the statistics of a stage.
static __device__ __forceinline__ void add_to_columns(float (&sum)[tile_q / 2], const unsigned (&ones)[4], unsigned smem, unsigned offset, int stage) {
    add_of_columns(sum, ones, (smem + smem_statistics + stage * (int)sizeof(Statistics) + offset & 0x3ffff) >> 4);
}

// One thread's: of all barriers that are named above.
static __device__ __forceinline__ void begin_barriers(const LoomArgs *args, unsigned smem) {
    prefetch_map(&args->k_map);
    prefetch_map(&args->v_map);
    if (args->seq_q > 0) {
        prefetch_map(&args->q_map);
        prefetch_map(&args->dout_map);
    }
    if (args->dk) prefetch_map(&args->dk_map);
    if (args->dv) prefetch_map(&args->dv_map);
    for (int i = 0; i < stages; ++i) {
        barrier_init(bar_dout_full(smem, i), 2);
//@ if has_score then  -- all threads read LSE, which all lanes of a teller write
        barrier_init(bar_q_full(smem, i), 1 + 32);
        barrier_init(bar_q_empty(smem, i), 128 * warpgroups);
//@ else
        barrier_init(bar_q_full(smem, i), 2);
        barrier_init(bar_q_empty(smem, i), 4 * warpgroups);
//@ end
        barrier_init(bar_dout_empty(smem, i), 4 * warpgroups);
    }
    barrier_init(bar_k_full(smem), 1);
    barrier_init(bar_v_full(smem), 1);
    barrier_init(bar_keys_empty(smem), 4 * warpgroups);
    for (int i = 0; i < 2; ++i) {
        barrier_init(bar_told(smem, i), 1);
        barrier_init(bar_heard(smem, i), 3 * 32 + 128 * warpgroups);
    }
}
