//@ text(header)

//@ part("prologue")

//@ text(functions)

//@ part("walk", {over = "keys"})

//@ part("vector")

//@ part("kv_tile", {layout = "rows"})

//@ part("stats")

//@ part("matrix", {widths = {c.dim_qk}})

//@ part("logits", {lanes = "queries"})

//@ part("gradient", {lanes = "queries"})

void ${symbol}(const LoomArgs *args, long long block, void *scratch) {
    // [1] work, queries and dO
    float *q = (float *)((char *)scratch + smem_q);
    float *dout = (float *)((char *)scratch + smem_dout);
    float *k = (float *)((char *)scratch + smem_k);
    float *v = (float *)((char *)scratch + smem_v);
    float *s = (float *)((char *)scratch + smem_s);
    float *dp = (float *)((char *)scratch + smem_dp);
    float *dq = (float *)((char *)scratch + smem_dq);
//@ if has_score then
    float *slope = (float *)((char *)scratch + smem_slope);
//@ end
    float lse[tile_q], delta[tile_q];
    const Work work = work_of(args, block);
    const int q_first = work.tile * tile_q;
    const int num_q = work.seq_q - q_first < tile_q ? work.seq_q - q_first : tile_q;
    load_columns(args->q + work.batch * args->q_stride_batch + work.head * args->q_stride_head +
                     q_first * args->q_stride_seq,
                 args->q_stride_seq, num_q, dim_qk, tile_q, q);
    load_columns(args->dout + work.batch * args->dout_stride_batch + work.head * args->dout_stride_head +
                     q_first * args->dout_stride_seq,
                 args->dout_stride_seq, num_q, dim_v, tile_q, dout);
    load_stats(args, &work, q_first, num_q, lse, delta);
    for (int i = 0; i < tile_q * dim_qk; ++i) dq[i] = 0;

    const Walk walk = walk_begin(args, &work);
    bool full;
    for (int tile = walk_next(args, &work, &walk, 0, &full); tile < walk.end;
         tile = walk_next(args, &work, &walk, tile + 1, &full)) {
        // [2] S^T = K Q^T and dP^T = V dO^T
        const int k_first = tile * tile_k;
        const int num_k = work.seq_k - k_first < tile_k ? work.seq_k - k_first : tile_k;
        const bool finite_k = load_keys(args, &work, k_first, num_k, k);
        load_values(args, &work, k_first, num_k, v);
        multiply(k, q, dim_qk, num_k, num_q, tile_q, s);
        multiply(v, dout, dim_v, num_k, num_q, tile_q, dp);

        // [3] P and dS
//@ if has_score then
        logits(args, &work, q_first, num_q, k_first, num_k, full, s, slope);
        gradient(lse, delta, slope, num_q, num_k, s, dp);
//@ else
        logits(args, &work, q_first, num_q, k_first, num_k, full, s);
        gradient(lse, delta, num_q, num_k, s, dp);
//@ end

        // [4] dQ += dS K
        if (finite_k) {
            accumulate(dp, tile_q, k, num_k, num_q, dim_qk, dq);
        } else {
            accumulate_seen(s, dp, tile_q, k, num_k, num_q, dim_qk, dq);
        }
    }

    // [5] store dQ
    for (int row = 0; row < num_q; ++row) {
        store_row(args->dq + work.batch * args->dq_stride_batch + work.head * args->dq_stride_head +
                      (q_first + row) * args->dq_stride_seq,
                  dq + row * dim_qk, dim_qk, args->scale, 1);
    }
}
