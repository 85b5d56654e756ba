//@ -- Of dQ a warpgroup makes one of two tiles of 64 queries; or half of the columns, a chunk of 64 where there are two.
//@ local two_tiles, two_chunks = c.tile_q == 128, c.chunks_qk == 2
//@ local adds_dq = c.own_dq == 0  -- else it is made by hopper/backward_dq.cu
//@ local takes_turns = c.dq_turns == 1
//@ local turn_batch = math.min(4, c.dq_columns // 8)  -- reads under way at once
//@ local finds_nonfinite = has_mask and adds_dq
//@ -- where tiles are no longer than the keys of a warpgroup, and registers suffice
//@ local may_pass_first = has_mask and adds_dq and not listed and c.tile_q == 64 and c.loads_qk == 1 and c.loads_v == 1
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

//@ if adds_dq then
//@ text(wgmma.text{name = "multiply_dsk", comment = "Starts dq = dS K, a warpgroup's part.", columns = c.dq_columns, dtype = dtype, transposed = true, first = true,
//@            a = {"shared", wgmma.steps(c.tile_k), transposed = true}, b = wgmma.steps(c.tile_k)})

//@ end
//@ part("pack")

//@ part("overlap")

//@ part("opaque")

//@ part("exp2")

//@ part("weights")

//@ if finds_nonfinite then
//@ part("element")

//@ end
//@ part("query_tiles")

// -- Consumers: a warpgroup has 64 keys --------------------------------------------------------------------------

//@ if adds_dq then
static __device__ __forceinline__ unsigned bar_ds_full(unsigned smem, int buffer) { return bar_heard(smem, 2 + buffer); }

//@ end
// What stays the same for a consumer.
typedef struct Consumer {
    const LoomArgs *args;
    const Told *told;     // of the work
    const Tile *tiles;
    const Statistics *statistics;
    unsigned smem;
    unsigned k, v;        // operands, this warpgroup's rows
//@ if adds_dq then
    unsigned k_of_dq;     // operand of dQ, this warpgroup's columns
//@ end
    float to_log2;        // from S to powers of 2
    unsigned ones[4];     // see make_ones
    int warpgroup;
    int parity;           // of the barriers of keys and values
//@ if finds_nonfinite then
    uint2 *nonfinite;     // [warps]: bit 4 * i is set if key i of the warp is not finite, or key 8 + i
//@ end
} Consumer;

// This thread's first key, of the sequence; the second is 8 behind. Found where it is needed.
static __device__ __forceinline__ int key_of(const Work *work) {
    const int thread = opaque(threadIdx.x);
    return work->tile * tile_k + 16 * (thread / 32 - 4) + thread % 32 / 4;
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
//@ if finds_nonfinite then
// Notes which keys are not finite: their S are not, whatever the query. That S may overflow otherwise does no harm.
static __device__ __forceinline__ void note_nonfinite(const float (&s)[tile_q / 2], const Consumer *consumer) {
    const float most = 3.40282347e38f;
    const unsigned lo = __ballot_sync(~0u, !(fabsf(s[0]) <= most)), hi = __ballot_sync(~0u, !(fabsf(s[2]) <= most));
    if (threadIdx.x % 32 == 0) consumer->nonfinite[threadIdx.x / 32 - 4] = uint2{lo, hi};
}

//@ end
//@ if adds_dq then
// What is left to do of the tile before.
typedef struct Before {
    int nth;         // of the tiles of all works
    unsigned place;  // see Tile
//@ if has_mask then
    unsigned what;
//@ end
//@ if takes_turns then
    unsigned turn;   // see turn_of
    bool has_come;   // it was this work's turn when the warp's first lane last looked; other lanes have no say
//@ end
} Before;

static __device__ __forceinline__ int buffer_of(int nth) { return nth & 1; }  // of dS
static __device__ __forceinline__ int parity_of(int nth) { return nth >> 1 & 1; }

// Where this thread adds its part of dQ.
static __device__ __forceinline__ float *dq_of(const Consumer *consumer, const Before *before) {
    return consumer->args->dq_sum + before->place * (2ll * 64 * dq_columns) + consumer->warpgroup * (64 * dq_columns) + threadIdx.x % 128 * 4;
}

static __device__ __forceinline__ void add_four(float *to, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

//@ if takes_turns then
// Which work has added last to what this warp has of dQ: its tile of keys + 1.
static __device__ __forceinline__ unsigned *added_last(const Consumer *consumer, const Before *before) {
    return consumer->args->turns + before->place * (4ull * warpgroups) + (threadIdx.x / 32 - 4);
}

static __device__ __forceinline__ bool turn_has_come(const Consumer *consumer, const Before *before) {
    const unsigned behind = before->turn & ~is_last_turn;
    if (threadIdx.x % 32 != 0 || !behind) return true;
    unsigned added;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(added) : "l"(added_last(consumer, before)) : "memory");
    return added == behind;
}

// Waits until it is this work's turn.
static __device__ __forceinline__ void await_turn(const Consumer *consumer, const Before *before) {
    if (!before->has_come) {
        while (!turn_has_come(consumer, before)) {}
    }
    __syncwarp();
}

// It is the next one's, if there is one.
static __device__ __forceinline__ void pass_turn(const Consumer *consumer, const Before *before) {
    __syncwarp();
    if (threadIdx.x % 32 == 0 && !(before->turn & is_last_turn) && consumer->args->dq) {
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(added_last(consumer, before)), "r"(consumer->told->work.tile + 1) : "memory");
    }
}

static __device__ __forceinline__ void put_four(float *to, float x, float y, float z, float w) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

static __device__ __forceinline__ float4 read_four(const float *from) {
    float4 x;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
    return x;
}

// Where this thread's first row of dQ begins, at its first column, and how many rows there are from it on.
typedef struct Rows {
    unsigned short *first;
    int count, columns;  // columns: as many are there from the first on
} Rows;

static __device__ __forceinline__ Rows rows_of_dq(const Consumer *consumer, const Before *before) {
    const LoomArgs *args = consumer->args;
    const int thread = opaque(threadIdx.x), tiles = (args->seq_q + tile_q - 1) / tile_q, place = before->place / tiles;
    const int batch = place / args->heads_q, head = place - batch * args->heads_q;
//@ if two_tiles then
    const int row = (before->place - place * tiles) * tile_q + 64 * consumer->warpgroup + 16 * (thread / 32 % 4) + thread % 32 / 4, column = thread % 4 * 2;
//@ else
    const int row = (before->place - place * tiles) * tile_q + 16 * (thread / 32 % 4) + thread % 32 / 4, column = dq_columns * consumer->warpgroup + thread % 4 * 2;
//@ end
    return Rows{args->dq + batch * args->dq_stride_batch + row * args->dq_stride_seq + head * args->dq_stride_head + column, args->seq_q - row, dim_qk - column};
}

// dQ is whole: a thread's four numbers of 8 columns, of two rows.
static __device__ __forceinline__ void finish_four(const Rows *rows, const LoomArgs *args, int column, float x, float y, float z, float w) {
    const float scale = args->scale / of_sums;
    if (column >= rows->columns) return;
    if (rows->count > 0) *(unsigned *)(rows->first + column) = pack(x * scale, y * scale);
    if (rows->count > 8) *(unsigned *)(rows->first + 8 * args->dq_stride_seq + column) = pack(z * scale, w * scale);
}

//@ end
// Adds dQ, in the order of accumulators: a thread's four numbers lie side by side.
//@ if takes_turns then
// Who is the first puts it there, who is the last takes the sum and writes dQ.
//@ end
static __device__ __forceinline__ void add_dq(const float (&dq)[dq_columns / 2], const Consumer *consumer, const Before *before) {
    if (!consumer->args->dq) return;
    float *to = dq_of(consumer, before);
//@ if takes_turns then
    await_turn(consumer, before);
    if (__all_sync(~0u, before->turn & is_last_turn)) {
        const bool alone = before->turn == is_last_turn;
        const Rows rows = rows_of_dq(consumer, before);
#pragma unroll
        for (int first = 0; first < dq_columns / 8; first += ${turn_batch}) {
            float4 sum[${turn_batch}];
#pragma unroll
            for (int i = 0; i < ${turn_batch}; ++i) sum[i] = alone ? float4{0, 0, 0, 0} : read_four(to + (first + i) * (4 * 128));
#pragma unroll
            for (int i = 0; i < ${turn_batch}; ++i) {
                const float *x = &dq[4 * (first + i)];
                finish_four(&rows, consumer->args, 8 * (first + i), sum[i].x + x[0], sum[i].y + x[1], sum[i].z + x[2], sum[i].w + x[3]);
            }
        }
        return;
    }
    if (__all_sync(~0u, before->turn == 0)) {
#pragma unroll
        for (int j = 0; j < dq_columns / 8; ++j) put_four(to + j * (4 * 128), dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
        return;
    }
//@ end
#pragma unroll
    for (int j = 0; j < dq_columns / 8; ++j) add_four(to + j * (4 * 128), dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
}

//@ if has_mask then
// Adds dQ of a tile some of whose keys are not finite, this thread's part 4 numbers at a time.
//@ if takes_turns then
static __device__ __forceinline__ void add_dq_with_care(float *to, const Consumer *consumer, const Before *before, const Work *work, unsigned ds, int index) {
    await_turn(consumer, before);
    const Rows rows = rows_of_dq(consumer, before);
//@ else
static __device__ __forceinline__ void add_dq_with_care(float *to, const Consumer *consumer, const Work *work, unsigned ds, int index) {
//@ end
    const int thread = opaque(threadIdx.x), lane = thread % 32, row = 16 * (thread / 32 % 4) + lane / 4;
//@ if two_tiles then
    const int first_query = index * tile_q + 64 * consumer->warpgroup + row, first_column = lane % 4 * 2;
    ds += consumer->warpgroup * (tile_k * 128);
//@ else
    const int first_query = index * tile_q + row, first_column = dq_columns * consumer->warpgroup + lane % 4 * 2;
//@ end
#pragma unroll 1
    for (int j = 0; j < dq_columns / 8; ++j) {
        const int column = first_column + 8 * j;
        const unsigned k_at = consumer->smem + smem_k + column / 64 * (tile_k * 128) + column % 8 * 2;
        float sum[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int key = 0; key < tile_k; ++key) {
            const uint2 of_warp = consumer->nonfinite[key / 16];
            const bool bad = (key & 8 ? of_warp.y : of_warp.x) >> 4 * (key & 7) & 1;
            const int col = work->tile * tile_k + key;
            unsigned pair;
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(k_at + key * 128 + ((column % 64 / 8 ^ key % 8) << 4)));
            const float k[2] = {to_float((unsigned short)pair), to_float((unsigned short)(pair >> 16))};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int query = first_query + 8 * half;
                if (bad && !(query < work->seq_q && col < work->seq_k && visible(consumer->args, work, work->q_start + query, work->k_start + col))) continue;
                asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(ds + key * 128 + (((row + 8 * half) / 8 ^ key % 8) << 4) + row % 8 / 2 * 4));
                const float weight = to_float((unsigned short)(row % 2 ? pair >> 16 : pair));
                sum[2 * half] += weight * k[0];
                sum[2 * half + 1] += weight * k[1];
            }
        }
//@ if takes_turns then
        float *at = to + j * (4 * 128);
        if (before->turn & is_last_turn) {
            const float4 others = before->turn == is_last_turn ? float4{0, 0, 0, 0} : read_four(at);
            finish_four(&rows, consumer->args, 8 * j, others.x + sum[0], others.y + sum[1], others.z + sum[2], others.w + sum[3]);
        } else if (before->turn == 0) {
            put_four(at, sum[0], sum[1], sum[2], sum[3]);
        } else {
            add_four(at, sum[0], sum[1], sum[2], sum[3]);
        }
//@ else
        add_four(to + j * (4 * 128), sum[0], sum[1], sum[2], sum[3]);
//@ end
    }
}

//@ end
static __device__ __forceinline__ void start_dq(float (&dq)[dq_columns / 2], const Consumer *consumer, const Before *before) {
    const unsigned ds = consumer->smem + smem_ds + buffer_of(before->nth) * ds_bytes;
    wgmma_fence();
//@ if two_tiles then
    multiply_dsk(dq, operand(ds + consumer->warpgroup * (tile_k * 128), 1), consumer->k_of_dq);
//@ else
    multiply_dsk(dq, operand(ds, 1), consumer->k_of_dq);
//@ end
    wgmma_commit();
}

// dQ of the tile before: waits for the dS of both warpgroups.
static __device__ __forceinline__ void await_ds(const Consumer *consumer, const Before *before) {
    barrier_wait(bar_ds_full(consumer->smem, buffer_of(before->nth)), parity_of(before->nth));
}

//@ if has_mask then
// A key that a row does not see may hold inf or NaN, yet its dS of 0 would make NaN of it in dQ. So where a key is not finite, dQ of
// tiles that the mask cuts is summed up by multiplications that leave it out.
// Whether dQ of the tile before needs that; it has been added then.
static __device__ __forceinline__ bool cared_for(const Consumer *consumer, const Before *before) {
    if (__all_sync(~0u, before->what & is_full)) return false;
    const uint2 found = consumer->nonfinite[threadIdx.x % (4 * warpgroups)];
    if (!__any_sync(~0u, found.x | found.y)) return false;
    Work work = consumer->told->work;
    const unsigned tiles_q = (work.seq_q + tile_q - 1) / tile_q, head = before->place / tiles_q;
    work.head = head % consumer->args->heads_q;
    if (consumer->args->dq) {
        //@ text("add_dq_with_care(dq_of(consumer, before), consumer, " .. (takes_turns and "before, " or "") .. "&work, consumer->smem + smem_ds + buffer_of(before->nth) * ds_bytes, before->place - head * tiles_q);")
    }
    return true;
}

//@ end
// Writes this warpgroup's rows of dS^T, [key][query]: rows of 128 bytes, in the swizzle of boxes.
static __device__ __forceinline__ void store_ds(const unsigned (&ds)[tile_q / 4], const Consumer *consumer, int buffer) {
    const int lane = threadIdx.x % 32, row = 64 * consumer->warpgroup + 16 * (threadIdx.x / 32 % 4) + lane % 16;
    const unsigned to = consumer->smem + smem_ds + buffer * ds_bytes + row * 128;
#pragma unroll
    for (int j = 0; j < tile_q / 8; j += 2) {
        const unsigned at = to + j / 8 * (tile_k * 128) + (((j + lane / 16) % 8 ^ lane % 8) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(at), "r"(ds[2 * j]), "r"(ds[2 * j + 1]), "r"(ds[2 * j + 2]), "r"(ds[2 * j + 3]) : "memory");
    }
}

//@ end
//@ if adds_dq then
// A tile of queries; dQ of the one before runs beside it. Returns what is told of it; moves on to the next stage.
//@ else
// A tile of queries. Returns what is told of it; moves on to the next stage.
//@ end
//@ if has_mask then
template <bool first, bool masked>
//@ else
template <bool first>
//@ end
//@ text("static __device__ __forceinline__ unsigned step(float (&dk)[depth_qk / 2], float (&dv)[depth_v / 2], const Consumer *consumer, " .. (adds_dq and "Before *before, " or "") .. "Stage *stage) {")
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

    // [1] S^T and dP^T
    float s[tile_q / 2], dp[tile_q / 2];  // [4 * j + 2 * half + e] is key + 8 * half, query 8 * j + lane % 4 * 2 + e
    barrier_wait(bar_q_full(smem, at), stage->parity);
    if (first) barrier_wait(bar_k_full(smem), consumer->parity);
    wgmma_fence();
    multiply_kq(s, consumer->k, operand(smem + smem_q + at * q_bytes, 1));
//@ if not has_score then
    add_to_columns(s, consumer->ones, smem, 0, at);
//@ end
    wgmma_commit();
    barrier_wait(bar_dout_full(smem, at), stage->parity);
    if (first) barrier_wait(bar_v_full(smem), consumer->parity);
    wgmma_fence();
    multiply_vdo(dp, consumer->v, operand(smem + smem_dout + at * dout_bytes, 1));
    add_to_columns(dp, consumer->ones, smem, 16 * tile_q, at);
    wgmma_commit();
//@ if takes_turns then
    if (!first) before->has_come = turn_has_come(consumer, before);  // most often it has: nobody waits for memory later
//@ end
//@ if takes_turns then
    const unsigned told[4] = {in_lane_0(&tile->what), in_lane_0(&consumer->statistics[at].is_large), in_lane_0(&tile->place), in_lane_0(&consumer->statistics[at].turn)};
    const unsigned what = from_lane_0(told[0]), is_large = from_lane_0(told[1]), place = from_lane_0(told[2]), turn = from_lane_0(told[3]);
//@ elseif adds_dq then
    const unsigned told[3] = {in_lane_0(&tile->what), in_lane_0(&consumer->statistics[at].is_large), in_lane_0(&tile->place)};
    const unsigned what = from_lane_0(told[0]), is_large = from_lane_0(told[1]), place = from_lane_0(told[2]);
//@ elseif has_score then
    const unsigned told[3] = {in_lane_0(&tile->what), in_lane_0(&tile->index), in_lane_0(&tile->head)};
    const unsigned what = from_lane_0(told[0]), index = from_lane_0(told[1]), head = from_lane_0(told[2]);
//@ else
    const unsigned told[2] = {in_lane_0(&tile->what), in_lane_0(&consumer->statistics[at].is_large)};
    const unsigned what = from_lane_0(told[0]), is_large = from_lane_0(told[1]);
//@ end

    // [2] P^T
    wgmma_wait<1>();
//@ if finds_nonfinite then
    if (first) note_nonfinite(s, consumer);
//@ end
//@ if has_score then
    Work of_tile = consumer->told->work;
    of_tile.head = head;
    unsigned p[tile_q / 4], sloped[tile_q / 4];  // pairs of queries
//@ if has_mask then
    weigh_scores<masked>(p, sloped, s, consumer->args, &of_tile, index * tile_q + lane % 4 * 2, key_of(&of_tile), consumer->statistics[at].exact_lse, &seen);
//@ else
    weigh_scores(p, sloped, s, consumer->args, &of_tile, index * tile_q + lane % 4 * 2, key_of(&of_tile), consumer->statistics[at].exact_lse);
//@ end
//@ else
    float to_log2 = consumer->to_log2;
    if (__any_sync(~0u, is_large)) {
        subtract_lse(s, consumer->statistics[at].exact_lse, consumer->args, key_of(&consumer->told->work));
        to_log2 = log2_e;
    }
//@ if has_mask then
    if (masked) hide(s, &seen);
//@ end
    unsigned p[tile_q / 4];  // pairs of queries
    make_weights(p, s, to_log2);
//@ end

//@ if adds_dq then
    // [3] dQ of the tile before
    float dq[dq_columns / 2];
    if (!first) {
        await_ds(consumer, before);
        start_dq(dq, consumer, before);
        wgmma_wait<1>();
    } else {
        wgmma_wait<0>();
    }

    // [4] dS^T
//@ else
    // [3] dS^T
    wgmma_wait<0>();
//@ end
    unsigned ds[tile_q / 4];
#pragma unroll
    for (int i = 0; i < tile_q / 4; ++i) {
        float x, y;
        unpack_weights(p[i], &x, &y);
//@ if dtype == "bf16" then
        p[i] = pack(x, y);
//@ else
        x *= 1 / weight_unit;
        y *= 1 / weight_unit;
        p[i] = pack(x, y);
//@ end
//@ if has_score then
        unpack_weights(sloped[i], &x, &y);
//@ end
        ds[i] = pack(x * dp[2 * i], y * dp[2 * i + 1]);
//@ if has_mask then
        if (masked) ds[i] &= where_weighted(p[i]);  // what a row does not see may be NaN
//@ end
    }
//@ if adds_dq then
    const int nth = before->nth + 1;
    store_ds(ds, consumer, buffer_of(nth));
//@ if not two_tiles then  -- costs 4 % there
    publish_shared();
//@ end
//@ if has_mask then
    bool cared = false;
//@ end
    if (!first) {
        wgmma_wait<0>();  // dQ: nobody reads the other buffer any more
//@ if has_mask then
        cared = cared_for(consumer, before);
//@ end
    }
//@ if two_tiles then
    publish_shared();
//@ end
    __syncwarp();
    if (lane == 0) barrier_arrive(bar_ds_full(smem, buffer_of(nth)));
//@ end

    //@ text("// [" .. (adds_dq and 5 or 4) .. "] dV += P^T dO, dK += dS^T Q")
    wgmma_fence();
    multiply_pdo(dv, p, operand(smem + smem_dout + at * dout_bytes, tile_q * 8));
    wgmma_commit();
//@ if adds_dq then
    //@ text("if (!first" .. (has_mask and " && !cared" or "") .. ") add_dq(dq, consumer, before);")
//@ end
    wgmma_fence();
    multiply_dsq(dk, ds, operand(smem + smem_q + at * q_bytes, tile_q * 8));
    wgmma_commit();
//@ if takes_turns then
    if (!first) pass_turn(consumer, before);
    before->turn = turn;
    before->has_come = false;
//@ end
//@ if adds_dq then
    before->nth = nth;
    before->place = place;
//@ if has_mask then
    before->what = what;
//@ end
//@ end
    wgmma_wait<1>();
    if (lane == 0) barrier_arrive(bar_dout_empty(smem, at));
    wgmma_wait<0>();
    release_queries(smem, at);
    stage_next(stage);
    return what;
}

//@ if may_pass_first then
// Whether some query of the work's first tile may see a key of this warpgroup.
static __device__ __forceinline__ bool sees_first(const Consumer *consumer) {
    Work work = consumer->told->work;
    work.head = from_lane_0(in_lane_0(&consumer->told->first.head));
    const int first = work.tile * tile_k + 64 * consumer->warpgroup, last = min(first + 64, work.seq_k) - 1;
    const int query = work.q_start + from_lane_0(in_lane_0(&consumer->told->first.index)) * tile_q;
    Span outer, inner;
    visible_queries(consumer->args, &work, work.k_start + first, work.k_start + last, &outer, &inner);
    return first <= last && outer.lo < query + tile_q && outer.hi >= query;
}

// The first tile of queries of a work that see no key of this warpgroup, as under a causal mask: a dS of 0, and S for note_nonfinite.
static __device__ __forceinline__ unsigned pass_first(const Consumer *consumer, Before *before, Stage *stage) {
    const unsigned smem = consumer->smem;
    const int at = uniform(stage->index), nth = before->nth + 1;
    float s[tile_q / 2];
    barrier_wait(bar_q_full(smem, at), stage->parity);
    barrier_wait(bar_k_full(smem), consumer->parity);
    wgmma_fence();
    multiply_kq(s, consumer->k, operand(smem + smem_q + at * q_bytes, 1));
    wgmma_commit();
    unsigned ds[tile_q / 4];
#pragma unroll
    for (int i = 0; i < tile_q / 4; ++i) ds[i] = 0;
    store_ds(ds, consumer, buffer_of(nth));
    publish_shared();
    const Tile *tile = &consumer->tiles[at];
    const unsigned told[2] = {in_lane_0(&tile->what), in_lane_0(&tile->place)};
    before->nth = nth;
    before->what = from_lane_0(told[0]);
    before->place = from_lane_0(told[1]);
    barrier_wait(bar_dout_full(smem, at), stage->parity);
    barrier_wait(bar_v_full(smem), consumer->parity);
//@ if takes_turns then
    before->turn = from_lane_0(in_lane_0(&consumer->statistics[at].turn));
    before->has_come = false;
//@ end
    if (threadIdx.x % 32 == 0) barrier_arrive(bar_dout_empty(smem, at));
    wgmma_wait<0>();
    note_nonfinite(s, consumer);  // before dS is told to be there: who reads it may look
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(bar_ds_full(smem, buffer_of(nth)));
    release_queries(smem, at);
    stage_next(stage);
    return before->what;
}

//@ end
//@ part("store_gradient", {name = "dk", region = "out", kind = "qk", tile = "tile_k", head = "head_kv"})

//@ part("store_gradient", {name = "dv", region = "out", kind = "v", tile = "tile_k", head = "head_kv"})

//@ local arguments = "(dk, dv, &consumer, " .. (adds_dq and "&before, " or "") .. "&stage);"
//@ text("static __device__ __forceinline__ void consume(const LoomArgs *args, unsigned smem, const Tile *tiles, const Statistics *statistics, const Told *told" .. (finds_nonfinite and ", uint2 *nonfinite" or "") .. ") {")
    const int warpgroup = uniform(threadIdx.x / 128) - 1, lane = threadIdx.x % 32;
    const int first_row = 64 * warpgroup + 16 * (threadIdx.x / 32 % 4);  // of this warp
    Consumer consumer;
    consumer.args = args;
    consumer.tiles = tiles;
    consumer.statistics = statistics;
    consumer.smem = smem;
    consumer.k = operand(smem + smem_k + 8192 * warpgroup, 1);
    consumer.v = operand(smem + smem_v + 8192 * warpgroup, 1);
//@ if adds_dq then
//@ if two_tiles then
    consumer.k_of_dq = operand(smem + smem_k, tile_k * 8);
//@ elseif two_chunks then
    consumer.k_of_dq = operand(smem + smem_k + warpgroup * (tile_k * 128), tile_k * 8);
//@ else
    consumer.k_of_dq = operand(smem + smem_k + warpgroup * (dq_columns * 2), tile_k * 8);
//@ end
//@ end
    consumer.to_log2 = args->scale * log2_e;
    consumer.warpgroup = warpgroup;
    Stage stage = {0, 0};
//@ if adds_dq then
    Before before;
    before.nth = -1;
    await_kernels_before();  // the sum of dQ is cleared
//@ end
    for (int nth = 0;; ++nth) {
        const int slot = slot_of(nth);
        barrier_wait(bar_told(smem, slot), slot_parity(nth));
        const unsigned about = from_lane_0(in_lane_0(&told[slot].first.what));
        if (__any_sync(~0u, about & is_over)) break;
        consumer.told = &told[slot];
        consumer.parity = slot;
//@ if finds_nonfinite then
        consumer.nonfinite = nonfinite + 4 * warpgroups * slot;
//@ end
        const Work *work = &told[slot].work;
        make_ones(consumer.ones, key_of(work), args->seq_k);
        float dk[depth_qk / 2], dv[depth_v / 2];  // [4 * j + 2 * half + e] is key + 8 * half, column 8 * j + lane % 4 * 2 + e
#pragma unroll
        for (int i = 0; i < depth_qk / 2; ++i) dk[i] = 0;
#pragma unroll
        for (int i = 0; i < depth_v / 2; ++i) dv[i] = 0;
//@ if adds_dq then
        float dq[dq_columns / 2];
//@ end
        const bool none = __any_sync(~0u, about & is_none);
        if (!none) {
//@ if has_mask then
//@ if may_pass_first then
            unsigned what;
            if (__any_sync(~0u, sees_first(&consumer))) {
                //@ text("what = step<true, true>" .. arguments)
            } else {
                what = pass_first(&consumer, &before, &stage);
            }
//@ else
            //@ text("unsigned what = step<true, true>" .. arguments)
//@ end
            for (;;) {  // votes: operands stay in the uniform datapath; full tiles have a loop of their own
                while (__any_sync(~0u, what & next_is_full)) {
                    //@ text("what = step<false, false>" .. arguments)
                }
                if (__any_sync(~0u, what & is_last)) break;
                //@ text("what = step<false, true>" .. arguments)
            }
//@ else
            //@ text("unsigned what = step<true>" .. arguments)
            //@ text("while (!(what & is_last)) what = step<false>" .. arguments)
//@ end
//@ if adds_dq then

            // [6] dQ of the last tile
            await_ds(&consumer, &before);
            start_dq(dq, &consumer, &before);
//@ end
        } else {  // keys and values have been loaded all the same
            barrier_wait(bar_k_full(smem), slot);
            barrier_wait(bar_v_full(smem), slot);
        }

        //@ text("// [" .. (adds_dq and 7 or 5) .. "] dK and dV")
        if (args->dv) store_dv(dv, 1 / of_sums, args, work, smem, first_row);
//@ if adds_dq then
        wgmma_wait<0>();
//@ if has_mask then
        if (!none && !cared_for(&consumer, &before)) add_dq(dq, &consumer, &before);
//@ else
        if (!none) add_dq(dq, &consumer, &before);
//@ end
//@ if takes_turns then
        if (!none) pass_turn(&consumer, &before);
//@ end
//@ end
        __syncwarp();
        if (lane == 0) barrier_arrive(bar_keys_empty(smem));
        //@ text("if (args->dk) store_dk(dk, args->scale / " .. (has_score and "slope_unit" or "of_sums") .. ", args, work, smem, first_row);")
        barrier_arrive(bar_heard(smem, slot));
    }
    if (lane == 0) stores_read();
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
//@ if adds_dq then
        barrier_init(bar_ds_full(smem, 0), 4 * warpgroups);
        barrier_init(bar_ds_full(smem, 1), 4 * warpgroups);
//@ end
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
        //@ text("consume(&args, smem, tiles, statistics, told" .. (finds_nonfinite and ", (uint2 *)(shared + smem_nonfinite)" or "") .. ");")
    }
}
