//@ text(header)

//@ part("prologue")

//@ text(functions)

//@ part("walk", {over = "keys"})

//@ part("vector")

//@ part("kv_tile", {layout = "rows"})

//@ part("matrix", {widths = {c.dim_v}})

//@ part("logits", {lanes = "queries"})

// From logits s [keys][tile_q] to P = exp(s - highest) in their place, where highest, the maximum of each
// query so far, takes in the tile. sum: of P so far; rescale: what the older part of it was multiplied by.
static void softmax(int num_q, int num_k, float *restrict s, float *restrict highest, float *restrict sum,
                    float *restrict rescale) {
    float base[tile_q];  // highest, or 0 for a query that has seen no key yet: then P = exp(-inf) = 0
    for (int q = 0; q < num_q; ++q) rescale[q] = highest[q];
    for (int k = 0; k < num_k; ++k) {
        for (int q = 0; q < num_q; ++q) {
            const float x = s[k * tile_q + q];
            highest[q] = x > highest[q] ? x : highest[q];
        }
    }
    for (int q = 0; q < num_q; ++q) {
        base[q] = highest[q] == -INFINITY ? 0 : highest[q];
        rescale[q] = exp_approx(rescale[q] - base[q]);
        sum[q] *= rescale[q];
    }
    for (int k = 0; k < num_k; ++k) {
        for (int q = 0; q < num_q; ++q) {
            const float p = exp_approx(s[k * tile_q + q] - base[q]);
            s[k * tile_q + q] = p;
            sum[q] += p;
        }
    }
}

void ${symbol}(const LoomArgs *args, long long block, void *scratch) {
    // [1] work and queries
    float *q = (float *)((char *)scratch + smem_q);
    float *k = (float *)((char *)scratch + smem_k);
    float *v = (float *)((char *)scratch + smem_v);
    float *s = (float *)((char *)scratch + smem_s);
    float *o = (float *)((char *)scratch + smem_o);
    float highest[tile_q], sum[tile_q], rescale[tile_q];  // of each query
    const Work work = work_of(args, block);
    const int q_first = work.tile * tile_q;
    const int num_q = work.seq_q - q_first < tile_q ? work.seq_q - q_first : tile_q;
    load_columns(args->q + work.batch * args->q_stride_batch + work.head * args->q_stride_head +
                     q_first * args->q_stride_seq,
                 args->q_stride_seq, num_q, dim_qk, tile_q, q);
    for (int i = 0; i < tile_q * dim_v; ++i) o[i] = 0;
    for (int i = 0; i < tile_q; ++i) highest[i] = -INFINITY, sum[i] = 0;

    const Walk walk = walk_begin(args, &work);
    bool full;
    for (int tile = walk_next(args, &work, &walk, 0, &full); tile < walk.end;
         tile = walk_next(args, &work, &walk, tile + 1, &full)) {
        // [2] S^T = K Q^T
        const int k_first = tile * tile_k;
        const int num_k = work.seq_k - k_first < tile_k ? work.seq_k - k_first : tile_k;
        load_keys(args, &work, k_first, num_k, k);
        multiply(k, q, dim_qk, num_k, num_q, tile_q, s);

        // [3] scale, score and mask
        logits(args, &work, q_first, num_q, k_first, num_k, full, s);

        // [4] softmax
        softmax(num_q, num_k, s, highest, sum, rescale);
        for (int row = 0; row < num_q; ++row) {
            if (rescale[row] == 1) continue;
            for (int x = 0; x < dim_v; ++x) o[row * dim_v + x] *= rescale[row];
        }

        // [5] O += P V
        if (load_values(args, &work, k_first, num_k, v)) {
            accumulate(s, tile_q, v, num_k, num_q, dim_v, o);
        } else {
            accumulate_seen(s, s, tile_q, v, num_k, num_q, dim_v, o);
        }
    }

    // [6] store O and LSE; a query that sees no key has sum 0
    for (int row = 0; row < num_q; ++row) {
        if (args->o) {
            store_row(args->o + work.batch * args->o_stride_batch + work.head * args->o_stride_head +
                          (q_first + row) * args->o_stride_seq,
                      o + row * dim_v, dim_v, 1, sum[row] == 0 ? 1 : sum[row]);
        }
        if (args->lse) {
            args->lse[work.batch * args->lse_stride_batch + work.head * args->lse_stride_head +
                      (q_first + row) * args->lse_stride_seq] =
                sum[row] == 0 ? -INFINITY : highest[row] + logf(sum[row]);
        }
    }
}
