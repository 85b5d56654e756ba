//@ text(header)

//@ text(constants)
//@ part("weight_unit")

//@ text(arguments)

//@ part("place", {of = "keys"})

//@ if listed then
//@ part("listed")

//@ end
//@ part("uniform")

//@ text(functions)

//@ part("barrier")

//@ part("tma")

//@ part("walk_block")

//@ part("wgmma")

//@ part("backward_products")

//@ part("pack")

//@ part("overlap")

//@ part("opaque")

//@ part("exp2")

//@ part("weights")

//@ part("query_tiles")

// -- Consumers: both warpgroups have the same 64 keys; dK and dV would not fit the registers of one ---------------------
// The first makes S^T, P^T and dV, the second dP^T, dS^T and dK. P goes from one to the other as accumulators lie: what a thread has
// is what the same thread of the other needs.

// Both warpgroups meet where P of a tile is whole. The second has then read P of the tile before, which is overwritten next.
static __device__ __forceinline__ void meet() { asm volatile("barrier.cta.sync %0, 256;" ::"r"(2) : "memory"); }

// What stays the same for a consumer.
typedef struct Consumer {
    const LoomArgs *args;
    const Told *told;  // of the work
    const Tile *tiles;
    const Statistics *statistics;
    unsigned smem;
    unsigned keys;     // operand: K of the first warpgroup, V of the second
    float to_log2;     // from S to powers of 2
    unsigned ones[4];  // see make_ones
    int parity;        // of the barriers of keys and values
} Consumer;

static __device__ __forceinline__ int stage_before(int stage) { return stage == 0 ? stages - 1 : stage - 1; }

// Where this thread's weights of a tile lie; those of a thread 2048 bytes apart.
static __device__ __forceinline__ unsigned weights_at(unsigned smem, int stage) {
    return smem + smem_p + stage * p_bytes + threadIdx.x % 128 * 16;
}

static __device__ __forceinline__ void pass_weights(const unsigned (&p)[tile_q / 4], unsigned smem, int stage) {
#pragma unroll
    for (int i = 0; i < tile_q / 4; i += 4) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                     ::"r"(weights_at(smem, stage) + i / 4 * 2048), "r"(p[i]), "r"(p[i + 1]), "r"(p[i + 2]), "r"(p[i + 3]) : "memory");
    }
}

// This thread's first key, of the sequence; the second is 8 behind. Found where it is needed.
static __device__ __forceinline__ int key_of(const Work *work) {
    const int thread = opaque(threadIdx.x);
    return work->tile * tile_k + 16 * (thread / 32 % 4) + thread % 32 / 4;
}

//@ if has_mask then
//@ part("seen_of", {columns = c.tile_q // 8})

//@ if not has_score then
//@ part("hide")

//@ end
//@ end
//@ if has_score then
//@ part("weigh_scores")

//@ end
// The first warpgroup's part of a tile of queries; the product of the one before ends beside it. Returns what is told of it.
//@ if has_mask then
template <bool first, bool masked>
//@ else
template <bool first>
//@ end
static __device__ __forceinline__ unsigned weigh(float (&dv)[depth_v / 2], unsigned (&p)[tile_q / 4], const Consumer *consumer, Stage *stage) {
    const unsigned smem = consumer->smem;
    const int lane = threadIdx.x % 32;
    const int at = uniform(stage->index);
    const Tile *tile = &consumer->tiles[at];
//@ if has_mask then
    Seen seen;
    if (masked) {
        if (!first) barrier_wait(bar_q_full(smem, at), stage->parity);
        const Tile *known = first ? &consumer->told->first : tile;
        Work work = consumer->told->work;
        work.head = from_lane_0(in_lane_0(&known->head));
        seen = seen_of(consumer->args, &work, key_of(&work), from_lane_0(in_lane_0(&known->index)) * tile_q + lane % 4 * 2);
    }
//@ end

    // [1] S^T
    float s[tile_q / 2];  // [4 * j + 2 * half + e] is key + 8 * half, query 8 * j + lane % 4 * 2 + e
    barrier_wait(bar_q_full(smem, at), stage->parity);
    if (first) barrier_wait(bar_k_full(smem), consumer->parity);
    wgmma_fence();
    multiply_kq(s, consumer->keys, operand(smem + smem_q + at * q_bytes, 1));
//@ if has_score then
    wgmma_commit();
    const unsigned told[3] = {in_lane_0(&tile->what), in_lane_0(&tile->index), in_lane_0(&tile->head)};
    const unsigned what = from_lane_0(told[0]), index = from_lane_0(told[1]), head = from_lane_0(told[2]);
//@ else
    add_to_columns(s, consumer->ones, smem, 0, at);
    wgmma_commit();
    const unsigned told[2] = {in_lane_0(&tile->what), in_lane_0(&consumer->statistics[at].is_large)};
    const unsigned what = from_lane_0(told[0]), is_large = from_lane_0(told[1]);
//@ end
    if (!first) {
        wgmma_wait<1>();  // dV
        if (lane == 0) barrier_arrive(bar_dout_empty(smem, stage_before(at)));
    }
    wgmma_wait<0>();

    // [2] P^T
//@ if has_score then
    Work of_tile = consumer->told->work;
    of_tile.head = head;
    unsigned sloped[tile_q / 4];
//@ if has_mask then
    weigh_scores<masked>(p, sloped, s, consumer->args, &of_tile, index * tile_q + lane % 4 * 2, key_of(&of_tile), consumer->statistics[at].exact_lse, &seen);
//@ else
    weigh_scores(p, sloped, s, consumer->args, &of_tile, index * tile_q + lane % 4 * 2, key_of(&of_tile), consumer->statistics[at].exact_lse);
//@ end
    release_queries(smem, at);
    pass_weights(sloped, smem, at);
//@ else
    float to_log2 = consumer->to_log2;
    if (__any_sync(~0u, is_large)) {
        subtract_lse(s, consumer->statistics[at].exact_lse, consumer->args, key_of(&consumer->told->work));
        to_log2 = log2_e;
    }
    __syncwarp();
    release_queries(smem, at);
//@ if has_mask then
    if (masked) hide(s, &seen);
//@ end
    make_weights(p, s, to_log2);
    pass_weights(p, smem, at);
//@ end
    meet();

    // [3] dV += P^T dO
#pragma unroll
    for (int i = 0; i < tile_q / 4; ++i) {
        float x, y;
        unpack_weights(p[i], &x, &y);
//@ if dtype == "bf16" then
        p[i] = pack(x, y);
//@ else
        p[i] = pack(x * (1 / weight_unit), y * (1 / weight_unit));
//@ end
    }
    barrier_wait(bar_dout_full(smem, at), stage->parity);
    wgmma_fence();
    multiply_pdo(dv, p, operand(smem + smem_dout + at * dout_bytes, tile_q * 8));
    wgmma_commit();
    stage_next(stage);
    return what;
}

// The second warpgroup's part, the same way.
template <bool first>
static __device__ __forceinline__ unsigned slope(float (&dk)[depth_qk / 2], unsigned (&ds)[tile_q / 4], const Consumer *consumer, Stage *stage) {
    const unsigned smem = consumer->smem;
    const int lane = threadIdx.x % 32;
    const int at = uniform(stage->index);

    // [1] dP^T
    float dp[tile_q / 2];
    barrier_wait(bar_dout_full(smem, at), stage->parity);
    if (first) barrier_wait(bar_v_full(smem), consumer->parity);
    wgmma_fence();
    multiply_vdo(dp, consumer->keys, operand(smem + smem_dout + at * dout_bytes, 1));
    add_to_columns(dp, consumer->ones, smem, 16 * tile_q, at);
    wgmma_commit();
    barrier_wait(bar_q_full(smem, at), stage->parity);
    const unsigned what = from_lane_0(in_lane_0(&consumer->tiles[at].what));
    if (!first) {
        wgmma_wait<1>();  // dK
        release_queries(smem, stage_before(at));
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(bar_dout_empty(smem, at));

    // [2] dS^T
    meet();
    unsigned weights[tile_q / 4];
#pragma unroll
    for (int i = 0; i < tile_q / 4; i += 4) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(weights[i]), "=r"(weights[i + 1]), "=r"(weights[i + 2]), "=r"(weights[i + 3]) : "r"(weights_at(smem, at) + i / 4 * 2048));
    }
#pragma unroll
    for (int i = 0; i < tile_q / 4; ++i) {
        float x, y;
        unpack_weights(weights[i], &x, &y);
//@ if dtype == "bf16" or has_score then
        ds[i] = pack(x * dp[2 * i], y * dp[2 * i + 1]);
//@ else
        ds[i] = pack(x * (1 / weight_unit) * dp[2 * i], y * (1 / weight_unit) * dp[2 * i + 1]);
//@ end
//@ if has_mask then
        ds[i] &= where_weighted(weights[i] & 0x7fff7fff);  // what a row does not see may be NaN
//@ end
    }

    // [3] dK += dS^T Q
    wgmma_fence();
    multiply_dsq(dk, ds, operand(smem + smem_q + at * q_bytes, tile_q * 8));
    wgmma_commit();
    stage_next(stage);
    return what;
}

//@ part("store_gradient", {name = "dk", region = "k", kind = "qk", tile = "tile_k", head = "head_kv"})

//@ part("store_gradient", {name = "dv", region = "v", kind = "v", tile = "tile_k", head = "head_kv"})

static __device__ __forceinline__ void consume(const LoomArgs *args, unsigned smem, const Tile *tiles, const Statistics *statistics, const Told *told) {
    const int warpgroup = uniform(threadIdx.x / 128) - 1, lane = threadIdx.x % 32;
    const int first_row = 16 * (threadIdx.x / 32 % 4);  // of this warp
    Consumer consumer;
    consumer.args = args;
    consumer.tiles = tiles;
    consumer.statistics = statistics;
    consumer.smem = smem;
    consumer.keys = operand(smem + (warpgroup == 0 ? smem_k : smem_v), 1);
    consumer.to_log2 = args->scale * log2_e;
    Stage stage = {0, 0};
    for (int nth = 0;; ++nth) {
        const int slot = slot_of(nth);
        barrier_wait(bar_told(smem, slot), slot_parity(nth));
        const unsigned about = from_lane_0(in_lane_0(&told[slot].first.what));
        if (__any_sync(~0u, about & is_over)) break;
        const bool none = __any_sync(~0u, about & is_none);
        consumer.told = &told[slot];
        consumer.parity = slot;
        const Work *work = &told[slot].work;
        make_ones(consumer.ones, key_of(work), args->seq_k);
        if (none) {  // keys and values have been loaded all the same
            barrier_wait(bar_k_full(smem), slot);
            barrier_wait(bar_v_full(smem), slot);
        }
        // Where P of the last tile has been met for, nobody reads the values any more, nor, once it has been read, the keys.
        if (warpgroup == 0) {
            float dv[depth_v / 2];  // [4 * j + 2 * half + e] is key + 8 * half, column 8 * j + lane % 4 * 2 + e
#pragma unroll
            for (int i = 0; i < depth_v / 2; ++i) dv[i] = 0;
            if (!none) {
                unsigned p[tile_q / 4];  // of the tile before, while its product is under way
//@ if has_mask then
                unsigned what = weigh<true, true>(dv, p, &consumer, &stage);
                for (;;) {  // votes: operands stay in the uniform datapath; full tiles have a loop of their own
                    while (__any_sync(~0u, what & next_is_full)) what = weigh<false, false>(dv, p, &consumer, &stage);
                    if (__any_sync(~0u, what & is_last)) break;
                    what = weigh<false, true>(dv, p, &consumer, &stage);
                }
//@ else
                unsigned what = weigh<true>(dv, p, &consumer, &stage);
                while (!__any_sync(~0u, what & is_last)) what = weigh<false>(dv, p, &consumer, &stage);
//@ end
                wgmma_wait<0>();
                if (lane == 0) barrier_arrive(bar_dout_empty(smem, stage_before(stage.index)));
            }
            if (args->dv) store_dv(dv, 1 / of_sums, args, work, smem, first_row);
        } else {
            float dk[depth_qk / 2];
#pragma unroll
            for (int i = 0; i < depth_qk / 2; ++i) dk[i] = 0;
            if (!none) {
                unsigned ds[tile_q / 4];
                unsigned what = slope<true>(dk, ds, &consumer, &stage);
                while (!__any_sync(~0u, what & is_last)) what = slope<false>(dk, ds, &consumer, &stage);
                wgmma_wait<0>();
                release_queries(smem, stage_before(stage.index));
            }
            //@ text("if (args->dk) store_dk(dk, args->scale / " .. (has_score and "slope_unit" or "of_sums") .. ", args, work, smem, first_row);")
        }
        if (lane == 0) {
            stores_read();
            barrier_arrive(bar_keys_empty(smem));
        }
        barrier_arrive(bar_heard(smem, slot));
    }
}

extern "C" __global__ void __launch_bounds__(threads, 1) ${symbol}(const __grid_constant__ LoomArgs args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned smem = (unsigned)__cvta_generic_to_shared(shared);
    Tile *tiles = (Tile *)(shared + smem_tiles);
    Work *works = (Work *)(shared + smem_works);  // at hand of the loader of queries and of each teller
    Told *told = (Told *)(shared + smem_told);
    Statistics *statistics = (Statistics *)(shared + smem_statistics);
    let_next_begin();
//@ if listed then
    await_kernels_before();
//@ end
    if (threadIdx.x == 0) {
        begin_barriers(&args, smem);
        publish_shared();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 ${c.other_registers};");
        if (threadIdx.x < 32) load_queries(&args, &works[0], smem, tiles, told);
        if (threadIdx.x / 32 == 1) tell<true>(&args, &works[1], smem, statistics, told);
        if (threadIdx.x / 32 == 2) tell<false>(&args, &works[2], smem, statistics, told);
        if (threadIdx.x / 32 == 3) load_keys(&args, smem, told);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 ${c.consumer_registers};");
        consume(&args, smem, tiles, statistics, told);
    }
}
