//@ text(header)

//@ text(constants)
constexpr float log2_e = 1.44269504f;

//@ text(arguments)

//@ part("work", {heads = "heads_q", tiles = "seq_q", last_first = has_mask})

//@ text(functions)

//@ part("walk_block")

//@ part("pack")

//@ part("exp2")

//@ part("copy")

//@ part("rows", {name = "qk", dim = "dim_qk", depth = "depth_qk", pitch = "pitch_qk"})

//@ part("rows", {name = "v", dim = "dim_v", depth = "depth_v", pitch = "pitch_v"})

//@ part("kv_tile")

//@ part("mma")

//@ part("seen", {tiles = 1, columns = c.seen_columns, along = "keys"})

//@ if has_mask then
//@ part("here")

//@ part("careful")

//@ end
//@ part("store")

//@ part("pack_a")

//@ part("clear", {tiles = 1, columns = "key_columns"})
//@ if c.key_columns ~= c.qk_columns then

//@ part("clear", {tiles = 1, columns = "qk_columns"})
//@ end

// S += Q K^T
//@ part("product", {name = "add_qk", tiles = 1, columns = "key_columns", steps = c.depth_qk // 16,
//@                  a = "rows", a_pitch = "pitch_qk", b = "rows", b_pitch = "pitch_qk"})

// dP += dO V^T
//@ part("product", {name = "add_dov", tiles = 1, columns = "key_columns", steps = c.depth_v // 16,
//@                  a = "rows", a_pitch = "pitch_v", b = "rows", b_pitch = "pitch_v"})

// dQ += dS K
//@ part("product", {name = "add_dsk", tiles = 1, columns = "qk_columns", steps = c.tile_k // 16,
//@                  a = "registers", a_columns = "key_columns", b = "columns", b_pitch = "pitch_qk"})

extern "C" __global__ void __launch_bounds__(threads, ${k.blocks_per_sm}) ${symbol}(const __grid_constant__ LoomArgs args) {
    extern __shared__ __align__(128) unsigned char shared[];
    const unsigned smem = (unsigned)__cvta_generic_to_shared(shared);

//@ if has_mask then
    Nonfinite *nonfinite = (Nonfinite *)(shared + smem_nonfinite);
//@ end

    // [1] work and first loads
    const Work work = work_of(&args, blockIdx.x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = work.tile * tile_q;
    Walk walk = walk_begin(&args, &work);
    bool full;
    int tile = walk_next(&args, &work, &walk, &full);
    load_qk_rows(smem + smem_q, args.q + work.batch * args.q_stride_batch + work.head * args.q_stride_head,
                 args.q_stride_seq, tile_q, first_row, work.seq_q);
    load_v_rows(smem + smem_dout, args.dout + work.batch * args.dout_stride_batch + work.head * args.dout_stride_head,
                args.dout_stride_seq, tile_q, first_row, work.seq_q);
    if (tile < walk.end) load_keys(smem + smem_k, &args, &work, tile * tile_k);

    const int row_0 = first_row + 16 * warp + lane / 4;  // this thread's rows: row_0, row_0 + 8
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = row_0 + 8 * half;
        const bool inside = row < work.seq_q;
        lse[half] = inside ? args.lse[work.batch * args.lse_stride_batch + row * args.lse_stride_seq + work.head * args.lse_stride_head] : 0;
        // A row that sees no key has LSE -inf: P is 0, as under +inf.
        if (!inside || lse[half] == __int_as_float(0xff800000)) lse[half] = __int_as_float(0x7f800000);
        delta[half] = inside ? args.delta[((long long)work.batch * args.heads_q + work.head) * work.seq_q + row] : 0;
    }
    const unsigned q_lane = smem + smem_q + 2 * (16 * warp * pitch_qk) + rows_first(pitch_qk);
    const unsigned dout_lane = smem + smem_dout + 2 * (16 * warp * pitch_v) + rows_first(pitch_v);
    const unsigned k_lane = smem + smem_k + columns_first(pitch_qk);
    const unsigned v_lane = smem + smem_v + columns_first(pitch_v);
    const unsigned k_columns = smem + smem_k + rows_first(pitch_qk);
    float dq[1][qk_columns][4];  // [row, column]
    clear(dq);

//@ if has_mask then
    bool careful = false;  // a partial tile had values that are not finite
    unsigned spoilt = 0;   // rows that see one, see parts/careful.cu
//@ end

    while (tile < walk.end) {
        load_values(smem + smem_v, &args, &work, tile * tile_k);
        copies_wait();
        __syncthreads();  // k and v are here

        // [2] S = Q K^T
        float p[1][key_columns][4];  // [row, key]: S, then P
        clear(p);
        add_qk(p, q_lane, k_lane);

        // [3] dP = dO V^T
        float ds[1][key_columns][4];  // [row, key]: dP, then dS
        clear(ds);
        add_dov(ds, dout_lane, v_lane);

        // [4] P, dS
#pragma unroll
        for (int j = 0; j < key_columns; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float x = p[0][j][e] * args.scale;
//@ if has_score then
                const int at_q = work.q_start + row_0 + e / 2 * 8;
                const int at_k = work.k_start + tile * tile_k + 8 * j + lane % 4 * 2 + e % 2;
                const float slope = score_slope(&args, &work, at_q, at_k, x);
                x = score(&args, &work, at_q, at_k, x);
//@ end
                ds[0][j][e] = exp2_approx((x - lse[e / 2]) * log2_e) * (ds[0][j][e] - delta[e / 2]);
//@ if has_score then
                ds[0][j][e] *= slope;
//@ end
            }
        unsigned long long seen[seen_words];
        if (!full) {  // by selection: what a row does not see may be NaN
#pragma unroll
            for (int w = 0; w < seen_words; ++w) {
                seen[w] = seen_elements(&args, &work, row_0, tile * tile_k + 8 * seen_columns * w + lane % 4 * 2);
#pragma unroll
                for (int j = 0; j < seen_columns; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        if (!is_seen(seen[w], 0, j, e)) ds[0][seen_columns * w + j][e] = 0;
                    }
            }
        }

        // [5] dQ += dS K
//@ if has_mask then
        if (!full && find_nonfinite(nonfinite, !careful, smem + smem_k, tile_k, pitch_qk, depth_qk)) {
            careful = true;
            spoilt |= rows_that_see(seen, nonfinite);
            clear_nonfinite(smem + smem_k, tile_k, pitch_qk, depth_qk);
        }
//@ end
        add_dsk(dq, ds, k_columns);
        __syncthreads();  // all warps are done with k and v
        tile = walk_next(&args, &work, &walk, &full);
        if (tile < walk.end) load_keys(smem + smem_k, &args, &work, tile * tile_k);
    }

    // [6] store dQ
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = row_0 + 8 * half;
        if (row >= work.seq_q) continue;
        unsigned short *to = args.dq + work.batch * args.dq_stride_batch + row * args.dq_stride_seq + work.head * args.dq_stride_head + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < dim_qk / 8; ++j) {
            store_pair(to + 8 * j, dq[0][j][2 * half] * args.scale, dq[0][j][2 * half + 1] * args.scale);
        }
//@ if has_mask then
        if (spoilt >> 2 * half & 3) store_nan(to - lane % 4 * 2, nonfinite, dim_qk);
//@ end
    }
}
