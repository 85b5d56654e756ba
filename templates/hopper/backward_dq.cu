//@ text(header)

//@ text(constants)
constexpr float log2_e = 1.44269504f;
constexpr float most_exact = 4096;  // |LSE| in powers of 2; above, it is subtracted from S after the scale has multiplied
//@ if has_mask then
constexpr float most = 3.40282347e38f;
//@ end

//@ text(arguments)

//@ part("place", {of = "queries"})

//@ if listed then
//@ part("listed")

//@ end
//@ part("uniform")

//@ text(functions)

//@ part("barrier")

//@ part("tma")

//@ part("walk_block")

//@ part("wgmma")

//@ text(wgmma.text{name = "multiply_qk", comment = "Starts s = Q K^T of a warpgroup.", columns = c.tile_k, dtype = dtype, first = true,
//@            a = {"shared", wgmma.steps(c.depth_qk, c.tile_q)}, b = wgmma.steps(c.depth_qk, c.tile_k)})

//@ text(wgmma.text{name = "multiply_dov", comment = "Starts dp = dO V^T of a warpgroup.", columns = c.tile_k, dtype = dtype, first = true,
//@            a = {"shared", wgmma.steps(c.depth_v, c.tile_q)}, b = wgmma.steps(c.depth_v, c.tile_k)})

//@ text(wgmma.text{name = "multiply_dsk", comment = "Starts dq += dS K of a warpgroup.", columns = c.depth_qk, dtype = dtype, transposed = true,
//@            a = {"registers"}, b = wgmma.steps(c.tile_k)})

//@ part("pack")

//@ part("overlap")

//@ part("exp2")

//@ part("seen_of", {columns = c.tile_k // 8})

//@ if has_mask then
//@ part("nonfinite")

//@ end
//@ part("lane_0")

// What is told of a tile of keys with it.
typedef struct Tile {
    unsigned what, index;
} Tile;
constexpr int told_ahead = k_stages;  // place of the first tile, as it is told before its keys have come
constexpr unsigned is_full = 1, next_is_full = 2, is_last = 4, is_none = 8;

static __device__ __forceinline__ unsigned bar_k_full(unsigned smem, int stage) { return smem + smem_barriers + 8 * stage; }
static __device__ __forceinline__ unsigned bar_k_empty(unsigned smem, int stage) { return bar_k_full(smem, k_stages) + 8 * stage; }
static __device__ __forceinline__ unsigned bar_v_full(unsigned smem, int stage) { return bar_k_full(smem, 2 * k_stages) + 8 * stage; }
static __device__ __forceinline__ unsigned bar_v_empty(unsigned smem, int stage) { return bar_v_full(smem, v_stages) + 8 * stage; }
static __device__ __forceinline__ unsigned bar_q_full(unsigned smem) { return bar_v_full(smem, 2 * v_stages); }
static __device__ __forceinline__ unsigned bar_dout_full(unsigned smem) { return bar_q_full(smem) + 8; }
static __device__ __forceinline__ unsigned bar_told(unsigned smem) { return bar_q_full(smem) + 16; }  // the first tile

//@ part("kv_tile")

// The work of a block: a tile of queries of a head. Few heads at a time, so that their keys stay in the L2 cache; of these the last
// rows first, which see most under a causal mask.
static __device__ __forceinline__ Work work_of(const LoomArgs *args, unsigned block) {
    const int tiles = (args->seq_q + tile_q - 1) / tile_q;
    const int heads = min(list_heads, max(list_rows / max(args->seq_k, 1), 1));  // of a list
    const int list = block / (heads * tiles), first = list * heads, present = min(heads, args->batch * args->heads_q - first);
    const int place = block - first * tiles, row = place / present, all = first + place - row * present;
    const int batch = all / args->heads_q, head = all - batch * args->heads_q;
    Work work = {batch, head, head / args->group, tiles - 1 - row, args->seq_q, args->seq_k, args->q_start, args->k_start};
//@ if listed and not even then
    work.tile = tile_at(args, mask_of(args, batch, head), row);
//@ end
    return work;
}

// -- Loader: a warp ---------------------------------------------------------------------------------------------

static __device__ __forceinline__ void load(const LoomArgs *args, const Work *work, unsigned smem, Tile *tiles) {
    const bool leader = threadIdx.x % 32 == 0;
    Walk walk = walk_begin(args, work);
    bool full;
    int tile = walk_next(args, work, &walk, &full);
    if (leader) {
        const Tile ahead = {tile == walk.end ? is_none : 0, (unsigned)tile};
        tiles[told_ahead] = ahead;
        barrier_arrive(bar_told(smem));
    }
    if (leader && tile < walk.end) {
        barrier_expect(bar_q_full(smem), q_bytes);
#pragma unroll
        for (int i = 0; i < loads_qk; ++i) {
            load_box(smem + smem_q + i * tile_q * 128, &args->q_map, 64 * i, work->tile * tile_q, work->head, work->batch, bar_q_full(smem));
        }
        barrier_expect(bar_dout_full(smem), dout_bytes);
#pragma unroll
        for (int i = 0; i < loads_v; ++i) {
            load_box(smem + smem_dout + i * tile_q * 128, &args->dout_map, 64 * i, work->tile * tile_q, work->head, work->batch, bar_dout_full(smem));
        }
    }
    for (int nth = 0; tile < walk.end; ++nth) {
        const int now = tile;
        const unsigned what = full ? is_full : 0;
        tile = walk_next(args, work, &walk, &full);
        if (!leader) continue;
        const int k_stage = nth % k_stages, v_stage = nth % v_stages;
        const Tile told = {what | (tile == walk.end ? is_last : full ? next_is_full : 0), (unsigned)now};
        barrier_wait(bar_k_empty(smem, k_stage), (nth / k_stages & 1) ^ 1);
        tiles[k_stage] = told;
        load_keys(smem, args, work, now, k_stage);
        barrier_wait(bar_v_empty(smem, v_stage), (nth / v_stages & 1) ^ 1);
        load_values(smem, args, work, now, v_stage);
    }
}

// -- Consumers: a warpgroup has 64 queries ----------------------------------------------------------------------

// What stays the same for a consumer; of what has two, this thread's rows are row and row + 8.
typedef struct Consumer {
    const LoomArgs *args;
    const Work *work;
    const Tile *tiles;
    unsigned smem;
    unsigned q, dout;      // operands, this warpgroup's rows
    float to_log2;         // from S to powers of 2
    float lse[2];          // +inf: the row sees no key, or there is none
    float less[2];         // the same in powers of 2
    float delta[2];        // D
    bool large;            // an LSE of the warp's rows is large
    int row;
} Consumer;

//@ if has_mask then
// Whether any consumer says so. All come.
static __device__ __forceinline__ bool any_consumer(bool x) {
    unsigned any;
    asm volatile("{.reg .pred in, out; setp.ne.b32 in, %1, 0; barrier.cta.red.or.pred out, %2, 256, in; selp.b32 %0, 1, 0, out;}"
                 : "=r"(any) : "r"((unsigned)x), "r"(1) : "memory");
    return __any_sync(~0u, any);
}

// A key that a row does not see may hold inf or NaN, yet its dS of 0 would make NaN of it in dQ. So what is not finite in a tile that
// the mask cuts is cleared once its S have been made. Rows that see it have S that are not finite: NaN or inf makes NaN of dS, -inf
// counts as masked.
static __device__ __forceinline__ void clear_nonfinite(const Consumer *consumer, int stage) {
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < k_bytes / 4; i += 256) {
        const unsigned at = consumer->smem + smem_k + stage * k_bytes + 4 * i;
        unsigned pair;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(at));
        const unsigned halves = nonfinite_halves(pair);
        if (halves) asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pair & ~halves) : "memory");
    }
    publish_shared();
    asm volatile("barrier.cta.sync %0, 256;" ::"r"(1) : "memory");
}

//@ end
// A tile of keys; dQ of the one before ends beside it. Returns what is told of it.
template <bool first, bool masked>
static __device__ __forceinline__ unsigned step(float (&dq)[depth_qk / 2], unsigned (&ds)[tile_k / 4], const Consumer *consumer, int nth) {
    const unsigned smem = consumer->smem;
    const int lane = threadIdx.x % 32;
    const int k_stage = uniform(nth % k_stages), v_stage = uniform(nth % v_stages);
    const int k_parity = nth / k_stages & 1, v_parity = nth / v_stages & 1;
    const Tile *tile = &consumer->tiles[k_stage];
    Seen seen;
    if (masked) {
        if (!first) barrier_wait(bar_k_full(smem, k_stage), k_parity);
        const Tile *known = first ? &consumer->tiles[told_ahead] : tile;
        seen = seen_of(consumer->args, consumer->work, consumer->row, from_lane_0(in_lane_0(&known->index)) * tile_k + lane % 4 * 2);
    }

    // [1] S and dP
    float s[tile_k / 2], dp[tile_k / 2];  // [4 * j + 2 * half + e] is row + 8 * half, key 8 * j + lane % 4 * 2 + e
    barrier_wait(bar_k_full(smem, k_stage), k_parity);
    if (first) barrier_wait(bar_q_full(smem), 0);
    wgmma_fence();
    multiply_qk(s, consumer->q, operand(smem + smem_k + k_stage * k_bytes, 1));
    wgmma_commit();
    barrier_wait(bar_v_full(smem, v_stage), v_parity);
    if (first) barrier_wait(bar_dout_full(smem), 0);
    wgmma_fence();
    multiply_dov(dp, consumer->dout, operand(smem + smem_v + v_stage * v_bytes, 1));
    wgmma_commit();
//@ if has_score then
    const unsigned told_index = in_lane_0(&tile->index);
//@ end
    const unsigned what = from_lane_0(in_lane_0(&tile->what));
    if (!first) {
        wgmma_wait<2>();  // dQ
        if (lane == 0) barrier_arrive(bar_k_empty(smem, (nth - 1) % k_stages));
    }

    // [2] P
    wgmma_wait<1>();
//@ if has_mask then
    bool bad = false;
    if (masked) {
#pragma unroll
        for (int i = 0; i < tile_k / 2; ++i) bad = bad || !(fabsf(s[i]) <= most);
    }
//@ end
//@ if has_score then
    // with d(score)/ds; 0 of what is -inf by its score
    const int first_key = from_lane_0(told_index) * tile_k + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < tile_k / 2; ++i) {
        const int q = consumer->work->q_start + consumer->row + i / 2 % 2 * 8, k = consumer->work->k_start + first_key + i / 4 * 8 + i % 2;
        const float x = s[i] * consumer->args->scale;
        s[i] = exp2_approx((score(consumer->args, consumer->work, q, k, x) - consumer->lse[i / 2 % 2]) * log2_e);
        s[i] = s[i] == 0 ? 0 : s[i] * score_slope(consumer->args, consumer->work, q, k, x);
    }
//@ else
    if (consumer->large) {
#pragma unroll
        for (int i = 0; i < tile_k / 2; ++i) s[i] = exp2_approx((s[i] * consumer->args->scale - consumer->lse[i / 2 % 2]) * log2_e);
    } else {
#pragma unroll
        for (int i = 0; i < tile_k / 2; ++i) s[i] = exp2_approx(fmaf(s[i], consumer->to_log2, -consumer->less[i / 2 % 2]));
    }
//@ end
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(bar_v_empty(smem, v_stage));

    // [3] dS
#pragma unroll
    for (int i = 0; i < tile_k / 2; ++i) {
        s[i] *= dp[i] - consumer->delta[i / 2 % 2];
        if (masked && !is_seen(&seen, i)) s[i] = 0;  // by selection: what a row does not see may be NaN
    }
#pragma unroll
    for (int i = 0; i < tile_k / 4; ++i) ds[i] = pack(s[2 * i], s[2 * i + 1]);
//@ if has_mask then
    if (masked && any_consumer(bad)) clear_nonfinite(consumer, k_stage);
//@ end

    // [4] dQ += dS K
    wgmma_fence();
    multiply_dsk(dq, ds, operand(smem + smem_k + k_stage * k_bytes, tile_k * 8));
    wgmma_commit();
    return what;
}

//@ part("store_gradient", {name = "dq", region = "q", kind = "qk", tile = "tile_q", head = "head"})

static __device__ __forceinline__ void consume(const LoomArgs *args, const Work *work, unsigned smem, const Tile *tiles) {
    const int warpgroup = uniform(threadIdx.x / 128) - 1, lane = threadIdx.x % 32;
    Consumer consumer;
    consumer.args = args;
    consumer.work = work;
    consumer.tiles = tiles;
    consumer.smem = smem;
    consumer.q = operand(smem + smem_q + 8192 * warpgroup, 1);
    consumer.dout = operand(smem + smem_dout + 8192 * warpgroup, 1);
    consumer.to_log2 = args->scale * log2_e;
    consumer.row = work->tile * tile_q + 64 * warpgroup + 16 * (threadIdx.x / 32 % 4) + lane / 4;
    bool large = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = consumer.row + 8 * half;
        float lse = __int_as_float(0x7f800000), delta = 0;
        if (row < work->seq_q) {
            const float *from = args->lse + work->batch * args->lse_stride_batch + work->head * args->lse_stride_head;
            lse = from[row * args->lse_stride_seq];
            delta = args->delta[((long long)work->batch * args->heads_q + work->head) * work->seq_q + row];
        }
        // A row that sees no key has LSE -inf: P is 0, as under +inf.
        if (lse == __int_as_float(0xff800000)) lse = __int_as_float(0x7f800000);
        consumer.lse[half] = lse;
        consumer.less[half] = lse * log2_e;
        consumer.delta[half] = delta;
        large = large || !(fabsf(lse) * log2_e <= most_exact || lse == __int_as_float(0x7f800000));
    }
    consumer.large = __any_sync(~0u, large);
    float dq[depth_qk / 2];  // [4 * j + 2 * half + e] is row + 8 * half, column 8 * j + lane % 4 * 2 + e
#pragma unroll
    for (int i = 0; i < depth_qk / 2; ++i) dq[i] = 0;

    barrier_wait(bar_told(smem), 0);
    if (!(from_lane_0(in_lane_0(&tiles[told_ahead].what)) & is_none)) {
        unsigned ds[tile_k / 4];  // pairs of keys; the product with those of the tile before may be under way
        int nth = 0;
        unsigned what = step<true, true>(dq, ds, &consumer, nth);
        for (;;) {  // votes: operands stay in the uniform datapath; full tiles have a loop of their own
            while (__any_sync(~0u, what & next_is_full)) what = step<false, false>(dq, ds, &consumer, ++nth);
            if (__any_sync(~0u, what & is_last)) break;
            what = step<false, true>(dq, ds, &consumer, ++nth);
        }
        wgmma_wait<0>();
    }

    // [5] dQ
    asm volatile("barrier.cta.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");  // all warps of the warpgroup are done with its queries
    store_dq(dq, args->scale, args, work, smem, 64 * warpgroup + 16 * (threadIdx.x / 32 % 4));
    if (lane == 0) stores_read();
}

extern "C" __global__ void __launch_bounds__(threads, 1) ${symbol}(const __grid_constant__ LoomArgs args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned smem = (unsigned)__cvta_generic_to_shared(shared);
    Tile *tiles = (Tile *)(shared + smem_tiles);
    Work *work = (Work *)(shared + smem_work);
    await_kernels_before();
    if (threadIdx.x == 0) {
        prefetch_map(&args.q_map);
        prefetch_map(&args.dout_map);
        if (args.seq_k > 0) {
            prefetch_map(&args.k_map);
            prefetch_map(&args.v_map);
        }
        prefetch_map(&args.dq_map);
        for (int i = 0; i < k_stages; ++i) {
            barrier_init(bar_k_full(smem, i), 1);
            barrier_init(bar_k_empty(smem, i), 4 * warpgroups);
        }
        for (int i = 0; i < v_stages; ++i) {
            barrier_init(bar_v_full(smem, i), 1);
            barrier_init(bar_v_empty(smem, i), 4 * warpgroups);
        }
        barrier_init(bar_q_full(smem), 1);
        barrier_init(bar_dout_full(smem), 1);
        barrier_init(bar_told(smem), 1);
        publish_shared();
        *work = work_of(&args, blockIdx.x);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 ${c.other_registers};");
        if (threadIdx.x < 32) load(&args, work, smem, tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 ${c.consumer_registers};");
        consume(&args, work, smem, tiles);
    }
}
