//@ text(header)

//@ text(constants)
constexpr float log2_e = 1.44269504f;
constexpr float ln_2 = 0.693147181f;
constexpr float slack = 8;  // a row's reference may lie this far (in powers of 2) below its maximum: spares rescaling

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

//@ part("seen", {tiles = c.row_tiles, columns = c.seen_columns, along = "keys"})

//@ if has_mask then
//@ part("here")

//@ part("careful")

//@ end
//@ part("store")

//@ part("pack_a")

//@ part("clear", {tiles = "row_tiles", columns = "key_columns"})
//@ if c.key_columns ~= c.value_columns then

//@ part("clear", {tiles = "row_tiles", columns = "value_columns"})
//@ end

// S += Q K^T, the warp's rows of queries
//@ part("product", {name = "add_qk", tiles = "row_tiles", columns = "key_columns", steps = c.depth_qk // 16,
//@                  a = "rows", a_pitch = "pitch_qk", b = "rows", b_pitch = "pitch_qk"})

// O += P V
//@ part("product", {name = "add_pv", tiles = "row_tiles", columns = "value_columns", steps = c.tile_k // 16,
//@                  a = "registers", a_columns = "key_columns", b = "columns", b_pitch = "pitch_v"})

//@ part("log2")

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
    if (tile < walk.end) load_keys(smem + smem_k, &args, &work, tile * tile_k);

    const unsigned q_lane = smem + smem_q + 2 * (16 * row_tiles * warp * pitch_qk) + rows_first(pitch_qk);
    const unsigned k_lane = smem + smem_k + columns_first(pitch_qk);
    const unsigned v_lane = smem + smem_v + rows_first(pitch_v);
    const int row_0 = first_row + 16 * row_tiles * warp + lane / 4;  // this thread's rows: row_0 + 16 * i + 8 * half
//@ if has_score then
    const float to_log2 = log2_e;  // from logits to powers of 2
//@ else
    const float to_log2 = args.scale * log2_e;  // from q.k to powers of 2
//@ end
    float o[row_tiles][value_columns][4];  // sum of p v, [row, value]
    float reference[row_tiles][2];         // what P's exponents are relative to
    float sum[row_tiles][2];               // this thread's part of the row's sum of P
    clear(o);
#pragma unroll
    for (int i = 0; i < row_tiles; ++i) {
        reference[i][0] = reference[i][1] = __int_as_float(0xff800000);
        sum[i][0] = sum[i][1] = 0;
    }

//@ if has_mask then
    bool careful = false;  // a partial tile had values that are not finite
    unsigned spoilt = 0;   // rows that see one, see parts/careful.cu
//@ end

    while (tile < walk.end) {
        // [2] S = Q K^T
        copies_wait();
        __syncthreads();  // k is here; all warps are done with the last v
        load_values(smem + smem_v, &args, &work, tile * tile_k);
        float s[row_tiles][key_columns][4];  // [row, key]: S, then P
        clear(s);
        add_qk(s, q_lane, k_lane);

        // [3] score and mask: what the score makes of a key serves all rows of its column
//@ if has_score then
#pragma unroll
        for (int j = 0; j < key_columns; ++j)
#pragma unroll
            for (int i = 0; i < row_tiles; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int q = work.q_start + row_0 + 16 * i + e / 2 * 8;
                    const int k = work.k_start + tile * tile_k + 8 * j + lane % 4 * 2 + e % 2;
                    s[i][j][e] = score(&args, &work, q, k, s[i][j][e] * args.scale);
                }
//@ end
        unsigned long long seen[seen_words];
        if (!full) {
#pragma unroll
            for (int w = 0; w < seen_words; ++w) {
                seen[w] = seen_elements(&args, &work, row_0, tile * tile_k + 8 * seen_columns * w + lane % 4 * 2);
#pragma unroll
                for (int i = 0; i < row_tiles; ++i)
#pragma unroll
                    for (int j = 0; j < seen_columns; ++j)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            if (!is_seen(seen[w], i, j, e)) s[i][seen_columns * w + j][e] = __int_as_float(0xff800000);
                        }
            }
        }

        // [4] softmax
        float rescale[row_tiles][2];
        bool moved = false;
#pragma unroll
        for (int i = 0; i < row_tiles; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float highest = s[i][0][2 * half];
#pragma unroll
                for (int j = 0; j < key_columns; ++j) {
                    highest = fmaxf(highest, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
                }
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
                const float before = reference[i][half];
                if ((highest - before) * to_log2 > slack) reference[i][half] = highest;
                // A row that has seen no key yet: any finite reference gives P = 0.
                const float base = reference[i][half] == __int_as_float(0xff800000) ? 0 : reference[i][half];
                rescale[i][half] = exp2_approx((before - base) * to_log2);
                moved = moved || before != reference[i][half];
                // Subtracted before it is scaled: at 1e11 a rounded product would no longer cancel.
                float part = 0;
#pragma unroll
                for (int j = 0; j < key_columns; ++j)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        s[i][j][e] = exp2_approx((s[i][j][e] - base) * to_log2);
                        part += s[i][j][e];
                    }
                sum[i][half] = sum[i][half] * rescale[i][half] + part;
            }
        if (__any_sync(~0u, moved)) {  // else every rescale is 1, or o is still 0
#pragma unroll
            for (int i = 0; i < row_tiles; ++i)
#pragma unroll
                for (int j = 0; j < value_columns; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[i][j][e] *= rescale[i][e / 2];
        }

        // [5] O += P V
        copies_wait();
        __syncthreads();  // v is here; all warps are done with k
//@ if has_mask then
        const bool whole = full;
//@ end
        tile = walk_next(&args, &work, &walk, &full);
        if (tile < walk.end) load_keys(smem + smem_k, &args, &work, tile * tile_k);
//@ if has_mask then
        if (!whole && find_nonfinite(nonfinite, !careful, smem + smem_v, tile_k, pitch_v, depth_v)) {
            careful = true;
            spoilt |= rows_that_see(seen, nonfinite);
            clear_nonfinite(smem + smem_v, tile_k, pitch_v, depth_v);
        }
//@ end
        add_pv(o, s, v_lane);
    }

    // [6] store O and LSE
    unsigned short *out = args.o + work.batch * args.o_stride_batch + work.head * args.o_stride_head + lane % 4 * 2;
    float *lse = args.lse + work.batch * args.lse_stride_batch + work.head * args.lse_stride_head;
#pragma unroll
    for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = sum[i][half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const int row = row_0 + 16 * i + 8 * half;
            if (row >= work.seq_q) continue;
            const float inverse = total == 0 ? 0 : 1 / total;
            if (args.o) {
#pragma unroll
                for (int j = 0; j < dim_v / 8; ++j) {
                    store_pair(out + row * args.o_stride_seq + 8 * j, o[i][j][2 * half] * inverse, o[i][j][2 * half + 1] * inverse);
                }
//@ if has_mask then
                if (spoilt >> (4 * i + 2 * half) & 3) store_nan(out + row * args.o_stride_seq - lane % 4 * 2, nonfinite, dim_v);
//@ end
            }
            if (args.lse && lane % 4 == 0) {
                // a row that sees no key: -inf + -inf
//@ if has_score then
                lse[row * args.lse_stride_seq] = reference[i][half] + log2_approx(total) * ln_2;
//@ else
                lse[row * args.lse_stride_seq] = __fmul_rn(reference[i][half], args.scale) + log2_approx(total) * ln_2;
//@ end
            }
        }
}
