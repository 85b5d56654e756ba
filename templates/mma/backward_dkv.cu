//@ local through_shared = c.split > 1
//@ text(header)

//@ text(constants)
constexpr float log2_e = 1.44269504f;

//@ text(arguments)

//@ part("work", {heads = "heads_kv", tiles = "seq_k", last_first = false})

//@ text(functions)

//@ part("walk_block")

//@ part("pack")

//@ part("exp2")

//@ part("copy")

//@ part("rows", {name = "qk", dim = "dim_qk", depth = "depth_qk", pitch = "pitch_qk"})

//@ part("rows", {name = "v", dim = "dim_v", depth = "depth_v", pitch = "pitch_v"})

//@ part("kv_tile")

//@ part("mma")

//@ part("seen", {tiles = c.key_tiles, columns = c.seen_columns, along = "queries"})

//@ if has_mask and not deterministic then
//@ part("here")

//@ part("careful")

//@ end
//@ part("store")

//@ if not through_shared then
//@ part("pack_a")

//@ end
//@ local sizes = {c.query_columns}
//@ for _, size in ipairs {c.qk_columns, c.value_columns} do
//@     if size ~= sizes[1] and size ~= sizes[2] then sizes[#sizes + 1] = size end
//@ end
//@ for _, size in ipairs(sizes) do
//@ part("clear", {tiles = "key_tiles", columns = size})

//@ end
// S^T += K Q^T, the warp's keys
//@ part("product", {name = "add_kq", tiles = "key_tiles", columns = "query_columns", steps = c.depth_qk // 16,
//@                  a = "rows", a_pitch = "pitch_qk", b = "rows", b_pitch = "pitch_qk"})

// dP^T += V dO^T
//@ part("product", {name = "add_vdo", tiles = "key_tiles", columns = "query_columns", steps = c.depth_v // 16,
//@                  a = "rows", a_pitch = "pitch_v", b = "rows", b_pitch = "pitch_v"})

//@ local a_kind = through_shared and "rows" or "registers"
// dV += P^T dO
//@ part("product", {name = "add_pdo", tiles = "key_tiles", columns = "value_columns", steps = c.tile_q // 16,
//@                  a = a_kind, a_pitch = "pitch_ds", a_columns = "query_columns", b = "columns", b_pitch = "pitch_v"})

// dK += dS^T Q
//@ part("product", {name = "add_dsq", tiles = "key_tiles", columns = "qk_columns", steps = c.tile_q // 16,
//@                  a = a_kind, a_pitch = "pitch_ds", a_columns = "query_columns", b = "columns", b_pitch = "pitch_qk"})

//@ if not deterministic then
// dQ = dS K
//@ part("product", {name = "add_dsk", tiles = "query_tiles", columns = "dq_step", steps = c.tile_k // 16,
//@                  a = "columns", a_pitch = "pitch_ds", b = "columns", b_pitch = "pitch_qk"})

//@ end
//@ if through_shared or not deterministic then
// Writes this warp's part of P^T or dS^T to shared memory, [key][query].
static __device__ __forceinline__ void store_tile(unsigned to, const float (&s)[key_tiles][query_columns][4]) {
#pragma unroll
    for (int i = 0; i < key_tiles; ++i)
#pragma unroll
        for (int j = 0; j < query_columns; ++j) {
            store_shared(to + 2 * (16 * i * pitch_ds + 8 * j), pack(s[i][j][0], s[i][j][1]));
            store_shared(to + 2 * ((16 * i + 8) * pitch_ds + 8 * j), pack(s[i][j][2], s[i][j][3]));
        }
}

//@ end
//@ if has_mask and not deterministic then
// Marks the queries that see a key that is not finite.
static __device__ __forceinline__ void mark_spoilt(unsigned *queries, const Nonfinite *found, const unsigned long long (&seen)[seen_words],
                                          int key, int query) {
#pragma unroll
    for (int w = 0; w < seen_words; ++w) {
#pragma unroll 1
        for (int n = 0; n < 4 * key_tiles * seen_columns; ++n) {
            const int j = n / (4 * key_tiles), i = n / 4 % key_tiles, e = n % 4;
            const int at = query + 8 * (seen_columns * w + j) + e % 2;
            if (seen[w] >> n & 1 && has_bit(found->rows, key + 16 * i + e / 2 * 8)) atomicOr(&queries[at / 32], 1u << at % 32);
        }
    }
}

// NaN where a marked query meets a column with a value that is not finite; c starts at (row, column).
static __device__ __forceinline__ void spoil(float (&c)[4], const unsigned *queries, const unsigned *columns, int row, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        if (has_bit(queries, row + lane / 4 + e / 2 * 8) && has_bit(columns, column + lane % 4 * 2 + e % 2)) c[e] = __int_as_float(0x7fffffff);
    }
}

//@ end
extern "C" __global__ void __launch_bounds__(threads, ${k.blocks_per_sm}) ${symbol}(const __grid_constant__ LoomArgs args) {
    extern __shared__ __align__(128) unsigned char shared[];
    const unsigned smem = (unsigned)__cvta_generic_to_shared(shared);

//@ if has_mask and not deterministic then
    Nonfinite *nonfinite = (Nonfinite *)(shared + smem_nonfinite);
    unsigned *spoilt_queries = (unsigned *)(nonfinite + 1);  // bit set of the tile's queries that see such a key
//@ end

    // [1] work, k and v
    Work work = work_of(&args, blockIdx.x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
//@ if through_shared then
    const int key_warp = warp / split, part = warp % split;
//@ else
    const int key_warp = warp;
//@ end
    const int first_key = work.tile * tile_k;
    const int head_end = work.head + args.group;
    load_keys(smem + smem_k, &args, &work, first_key);
    load_values(smem + smem_v, &args, &work, first_key);

    // What is loaded runs one step ahead of what is computed: a head of the group and a tile of its queries.
    Work ahead = work;
    Walk walk = walk_begin(&args, &ahead);
    bool ahead_full;
    int ahead_tile = walk_next(&args, &ahead, &walk, &ahead_full);
    int buffer = 0;
    const auto skip_heads = [&] {  // to the next head that sees these keys, or to head_end
        while (ahead_tile == walk.end && ++ahead.head < head_end) {
            walk = walk_begin(&args, &ahead);
            ahead_tile = walk_next(&args, &ahead, &walk, &ahead_full);
        }
    };
    const auto load_ahead = [&] {  // its q, dO, LSE and D
        const int first_row = ahead_tile * tile_q;
        load_qk_rows(smem + smem_q + buffer * (2 * tile_q * pitch_qk),
                     args.q + work.batch * args.q_stride_batch + ahead.head * args.q_stride_head,
                     args.q_stride_seq, tile_q, first_row, work.seq_q);
        load_v_rows(smem + smem_dout + buffer * (2 * tile_q * pitch_v),
                    args.dout + work.batch * args.dout_stride_batch + ahead.head * args.dout_stride_head,
                    args.dout_stride_seq, tile_q, first_row, work.seq_q);
        for (int i = threadIdx.x; i < 2 * tile_q; i += threads) {
            const int row = first_row + i % tile_q;
            const float *from = i < tile_q
                ? args.lse + work.batch * args.lse_stride_batch + row * args.lse_stride_seq + ahead.head * args.lse_stride_head
                : args.delta + ((long long)work.batch * args.heads_q + ahead.head) * work.seq_q + row;
            copy_word(smem + smem_stats + buffer * (2 * tile_q * 4) + 4 * i, from, row < work.seq_q);
        }
    };
    skip_heads();
    if (ahead.head < head_end) load_ahead();

    float dk[key_tiles][qk_columns][4], dv[key_tiles][value_columns][4];  // [key, column]
    clear(dk);
    clear(dv);
    const unsigned k_lane = smem + smem_k + 2 * (16 * key_tiles * key_warp * pitch_qk) + rows_first(pitch_qk);
    const unsigned v_lane = smem + smem_v + 2 * (16 * key_tiles * key_warp * pitch_v) + rows_first(pitch_v);
//@ if through_shared then
    const int first_query = part * 8 * query_columns;  // of the columns of S^T this warp computes
//@ else
    const int first_query = 0;
//@ end
    const int key = 16 * key_tiles * key_warp + lane / 4;  // this thread's keys in the tile: key + 16 * i, + 8
    const int query = first_query + lane % 4 * 2;          // and queries: query + 8 * j, + 1
//@ if through_shared or not deterministic then
    const unsigned tile_lane = 2 * (key * pitch_ds + query);
//@ end
//@ if has_mask and not deterministic then
    bool careful = false;  // these keys have values that are not finite
    if (ahead.head < head_end) {
        copies_wait();
        __syncthreads();  // k is here
        careful = find_nonfinite(nonfinite, true, smem + smem_k, tile_k, pitch_qk, depth_qk);
    }
//@ end

    while (ahead.head < head_end) {
        work.head = ahead.head;
        const int first_row = ahead_tile * tile_q;
        const bool full = ahead_full;
//@ if c.stages == 2 then
        const unsigned q = smem + smem_q + buffer * (2 * tile_q * pitch_qk);
        const unsigned dout = smem + smem_dout + buffer * (2 * tile_q * pitch_v);
        const float *stats = (const float *)(shared + smem_stats) + buffer * (2 * tile_q);
//@ else
        const unsigned q = smem + smem_q;
        const unsigned dout = smem + smem_dout;
        const float *stats = (const float *)(shared + smem_stats);
//@ end
        copies_wait();
        __syncthreads();  // this step's tiles are here; all warps are done with the last step's
        ahead_tile = walk_next(&args, &ahead, &walk, &ahead_full);
        skip_heads();
//@ if c.stages == 2 then
        buffer ^= 1;
        if (ahead.head < head_end) load_ahead();
//@ end
//@ if has_mask and not deterministic then
        if (careful) {
            if (threadIdx.x < 8) spoilt_queries[threadIdx.x] = 0;
            __syncthreads();  // before any warp marks one
        }
//@ end

        // [2] S^T = K Q^T
        float p[key_tiles][query_columns][4];  // [key, query]: S^T, then P^T
        clear(p);
        add_kq(p, k_lane, q + 2 * (first_query * pitch_qk) + columns_first(pitch_qk));

        // [3] P^T
//@ if has_score then
        float slope[key_tiles][query_columns][4];  // d(score)/ds
//@ end
#pragma unroll
        for (int j = 0; j < query_columns; ++j) {
            float2 lse = *(const float2 *)(stats + query + 8 * j);
            // A row that sees no key has LSE -inf: P is 0, as under +inf.
            if (lse.x == __int_as_float(0xff800000)) lse.x = __int_as_float(0x7f800000);
            if (lse.y == __int_as_float(0xff800000)) lse.y = __int_as_float(0x7f800000);
#pragma unroll
            for (int i = 0; i < key_tiles; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float x = p[i][j][e] * args.scale;
//@ if has_score then
                    const int at_q = work.q_start + first_row + query + 8 * j + e % 2;
                    const int at_k = work.k_start + first_key + key + 16 * i + e / 2 * 8;
                    slope[i][j][e] = score_slope(&args, &work, at_q, at_k, x);
                    x = score(&args, &work, at_q, at_k, x);
//@ end
                    p[i][j][e] = exp2_approx((x - (e % 2 ? lse.y : lse.x)) * log2_e);
                }
        }
        unsigned long long seen[seen_words];
        if (!full) {
#pragma unroll
            for (int w = 0; w < seen_words; ++w) {
                seen[w] = seen_elements(&args, &work, first_row + query + 8 * seen_columns * w, first_key + key);
#pragma unroll
                for (int i = 0; i < key_tiles; ++i)
#pragma unroll
                    for (int j = 0; j < seen_columns; ++j)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            if (!is_seen(seen[w], i, j, e)) p[i][seen_columns * w + j][e] = 0;
                        }
            }
        }
//@ if through_shared then
        store_tile(smem + smem_p + tile_lane, p);
//@ else
        add_pdo(dv, p, dout + rows_first(pitch_v));
//@ end

        // [4] dP^T = V dO^T, dS^T
        float ds[key_tiles][query_columns][4];  // [key, query]: dP^T, then dS^T
        clear(ds);
        add_vdo(ds, v_lane, dout + 2 * (first_query * pitch_v) + columns_first(pitch_v));
#pragma unroll
        for (int j = 0; j < query_columns; ++j) {
            const float2 delta = *(const float2 *)(stats + tile_q + query + 8 * j);
#pragma unroll
            for (int i = 0; i < key_tiles; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    ds[i][j][e] = p[i][j][e] * (ds[i][j][e] - (e % 2 ? delta.y : delta.x));
//@ if has_score then
                    ds[i][j][e] *= slope[i][j][e];
//@ end
                }
        }
        if (!full) {  // by selection: what a row does not see may be NaN
#pragma unroll
            for (int i = 0; i < key_tiles; ++i)
#pragma unroll
                for (int j = 0; j < query_columns; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) ds[i][j][e] = p[i][j][e] == 0 ? 0 : ds[i][j][e];
        }

        // [5] dV += P^T dO, dK += dS^T Q
//@ if through_shared or not deterministic then
        store_tile(smem + smem_ds + tile_lane, ds);
//@ end
//@ if has_mask and not deterministic then
        if (careful && !full) mark_spoilt(spoilt_queries, nonfinite, seen, key, query);
//@ end
//@ if through_shared then
        __syncthreads();  // P^T and dS^T are whole
        const unsigned a_lane = 2 * (16 * key_tiles * key_warp * pitch_ds) + rows_first(pitch_ds);
        add_pdo(dv, smem + smem_p + a_lane, dout + 2 * (8 * value_columns * part) + rows_first(pitch_v));
        add_dsq(dk, smem + smem_ds + a_lane, q + 2 * (8 * qk_columns * part) + rows_first(pitch_qk));
//@ else
        add_dsq(dk, ds, q + rows_first(pitch_qk));
//@ end
//@ if not deterministic then

        // [6] dQ sum += dS K
//@ if not through_shared then
        __syncthreads();  // dS^T is whole
//@ end
        if (args.dq) {
            const int query_warp = warp % query_warps, dq_part = warp / query_warps;
            const unsigned ds_lane = smem + smem_ds + 2 * (16 * query_tiles * query_warp) + columns_first(pitch_ds);
            const unsigned k_columns = smem + smem_k + 2 * (8 * dq_columns * dq_part) + rows_first(pitch_qk);
            float *sum = args.dq_sum + (((long long)work.batch * args.heads_q + work.head) * work.seq_q + first_row) * depth_qk;
            const auto add_dq = [&](const float (&left)[4], const float (&right)[4], int i, int j) {  // 16 columns of row tile i
                const int row = 16 * (query_tiles * query_warp + i) + lane / 4, column = 8 * (dq_columns * dq_part + j);
//@ if c.depth_qk ~= 8 * c.dq_columns * (c.warps // c.query_warps) then
                if (column >= depth_qk) return;
//@ end
                float *to = sum + row * depth_qk + column + 4 * (lane % 4);
                if (first_row + row < work.seq_q) add_four(to, left[0], left[1], right[0], right[1]);
                if (first_row + row + 8 < work.seq_q) add_four(to + 8 * depth_qk, left[2], left[3], right[2], right[3]);
            };
//@ if has_mask then
            if (careful && !full) {
                for (int i = 0; i < query_tiles; ++i)
                    for (int j = 0; j < dq_columns; j += 2) {
                        float left[4] = {0, 0, 0, 0}, right[4] = {0, 0, 0, 0};
//@     if not aligned then
#pragma unroll 1  // shorter to compile; where registers are scarcer, as in the aligned variant, it makes them spill
//@     end
                        for (int step = 0; step < tile_k / 16; ++step) {
                            unsigned a[4], b[4];
                            load_transposed(a, ds_lane + 2 * (16 * step * pitch_ds + 16 * i));
                            load_transposed(b, k_columns + 2 * (16 * step * pitch_qk + 8 * j));
#pragma unroll
                            for (int e = 0; e < 4; ++e) b[e] &= ~nonfinite_halves(b[e]);
                            mma(left, a, b[0], b[1]);
                            mma(right, a, b[2], b[3]);
                        }
                        spoil(left, spoilt_queries, nonfinite->columns, 16 * (query_tiles * query_warp + i), 8 * (dq_columns * dq_part + j));
                        spoil(right, spoilt_queries, nonfinite->columns, 16 * (query_tiles * query_warp + i), 8 * (dq_columns * dq_part + j + 1));
                        add_dq(left, right, i, j);
                    }
            } else
//@ end
#pragma unroll 1
            for (int first = 0; first < dq_columns; first += dq_step) {
                float dq[query_tiles][dq_step][4];  // [query, column]
#pragma unroll
                for (int i = 0; i < query_tiles; ++i)
#pragma unroll
                    for (int j = 0; j < dq_step; ++j)
#pragma unroll
                        for (int e = 0; e < 4; ++e) dq[i][j][e] = 0;
                add_dsk(dq, ds_lane, k_columns + 2 * 8 * first);
#pragma unroll
                for (int i = 0; i < query_tiles; ++i)
#pragma unroll
                    for (int j = 0; j < dq_step; j += 2) add_dq(dq[i][j], dq[i][j + 1], i, first + j);
            }
        }
//@ end
//@ if c.stages == 1 then
        __syncthreads();  // all warps are done with q and dO
        if (ahead.head < head_end) load_ahead();
//@ end
    }

    // [7] store dK and dV
//@ for _, row in ipairs {{"dk", "qk_columns", "dim_qk"}, {"dv", "value_columns", "dim_v"}} do
//@ local name, columns, dim = row[1], row[2], row[3]
    if (args.${name}) {
        unsigned short *to = args.${name} + work.batch * args.${name}_stride_batch + work.head_kv * args.${name}_stride_head;
#pragma unroll
        for (int i = 0; i < key_tiles; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_key + key + 16 * i + 8 * half;
                if (row >= work.seq_k) continue;
#pragma unroll
                for (int j = 0; j < ${columns}; ++j) {
//@ if through_shared then
                    const int column = 8 * (part * ${columns} + j) + lane % 4 * 2;
//@ else
                    const int column = 8 * j + lane % 4 * 2;
//@ end
//@ if c[dim] ~= 8 * c[columns] * c.split then
                    if (column >= ${dim}) continue;
//@ end
//@ if name == "dk" then
                    store_pair(to + row * args.dk_stride_seq + column, dk[i][j][2 * half] * args.scale, dk[i][j][2 * half + 1] * args.scale);
//@ else
                    store_pair(to + row * args.dv_stride_seq + column, dv[i][j][2 * half], dv[i][j][2 * half + 1]);
//@ end
                }
            }
    }
//@ end
}
