//@ text(header)

//@ part("prologue")

//@ text(functions)

//@ part("walk", {over = "queries"})

//@ part("vector")

//@ part("kv_tile", {layout = "columns"})

//@ part("stats")

//@ part("matrix", {widths = {c.dim_qk, c.dim_v}})

//@ part("logits", {lanes = "keys"})

//@ part("gradient", {lanes = "keys"})

void ${symbol}(const LoomArgs *args, long long block, void *scratch) {
    // [1] work, keys and values
    float *k = (float *)((char *)scratch + smem_k);
    float *v = (float *)((char *)scratch + smem_v);
    float *q = (float *)((char *)scratch + smem_q);
    float *dout = (float *)((char *)scratch + smem_dout);
    float *s = (float *)((char *)scratch + smem_s);
    float *dp = (float *)((char *)scratch + smem_dp);
    float *dk = (float *)((char *)scratch + smem_dk);
    float *dv = (float *)((char *)scratch + smem_dv);
//@ if has_score then
    float *slope = (float *)((char *)scratch + smem_slope);
//@ end
    float lse[tile_q], delta[tile_q];
    Work work = work_of(args, block);
    const int k_first = work.tile * tile_k;
    const int num_k = work.seq_k - k_first < tile_k ? work.seq_k - k_first : tile_k;
    load_keys(args, &work, k_first, num_k, k);
    load_values(args, &work, k_first, num_k, v);
    for (int i = 0; i < tile_k * dim_qk; ++i) dk[i] = 0;
    for (int i = 0; i < tile_k * dim_v; ++i) dv[i] = 0;

    for (const int end = work.head + args->group; work.head < end; ++work.head) {
        const Walk walk = walk_begin(args, &work);
        bool full;
        for (int tile = walk_next(args, &work, &walk, 0, &full); tile < walk.end;
             tile = walk_next(args, &work, &walk, tile + 1, &full)) {
            // [2] S = Q K^T and dP = dO V^T
            const int q_first = tile * tile_q;
            const int num_q = work.seq_q - q_first < tile_q ? work.seq_q - q_first : tile_q;
            const Element *q_from = args->q + work.batch * args->q_stride_batch +
                                    work.head * args->q_stride_head + q_first * args->q_stride_seq;
            const Element *dout_from = args->dout + work.batch * args->dout_stride_batch +
                                       work.head * args->dout_stride_head + q_first * args->dout_stride_seq;
            const bool finite_q = load_rows(q_from, args->q_stride_seq, num_q, dim_qk, q);
            const bool finite_dout = load_rows(dout_from, args->dout_stride_seq, num_q, dim_v, dout);
            load_stats(args, &work, q_first, num_q, lse, delta);
            multiply(q, k, dim_qk, num_q, num_k, tile_k, s);
            multiply(dout, v, dim_v, num_q, num_k, tile_k, dp);

            // [3] P and dS
//@ if has_score then
            logits(args, &work, q_first, num_q, k_first, num_k, full, s, slope);
            gradient(lse, delta, slope, num_q, num_k, s, dp);
//@ else
            logits(args, &work, q_first, num_q, k_first, num_k, full, s);
            gradient(lse, delta, num_q, num_k, s, dp);
//@ end

            // [4] dV += P^T dO, dK += dS^T Q
            if (finite_dout) {
                accumulate(s, tile_k, dout, num_q, num_k, dim_v, dv);
            } else {
                accumulate_seen(s, s, tile_k, dout, num_q, num_k, dim_v, dv);
            }
            if (finite_q) {
                accumulate(dp, tile_k, q, num_q, num_k, dim_qk, dk);
            } else {
                accumulate_seen(s, dp, tile_k, q, num_q, num_k, dim_qk, dk);
            }
        }
    }

    // [5] store dK and dV
    for (int row = 0; row < num_k; ++row) {
        if (args->dk) {
            store_row(args->dk + work.batch * args->dk_stride_batch + work.head_kv * args->dk_stride_head +
                          (k_first + row) * args->dk_stride_seq,
                      dk + row * dim_qk, dim_qk, args->scale, 1);
        }
        if (args->dv) {
            store_row(args->dv + work.batch * args->dv_stride_batch + work.head_kv * args->dv_stride_head +
                          (k_first + row) * args->dv_stride_seq,
                      dv + row * dim_v, dim_v, 1, 1);
        }
    }
}
