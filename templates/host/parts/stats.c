// LSE and D of queries [first, first + count). A query that has seen nothing, and the rest of the tile, gets
// LSE = inf for its -inf: then P = exp(s - LSE) = 0.
static void load_stats(const LoomArgs *args, const Work *work, int first, int count, float *lse,
                       float *delta) {
    const float *lse_from =
        args->lse + work->batch * args->lse_stride_batch + work->head * args->lse_stride_head;
    const float *delta_from =
        args->delta + ((long long)work->batch * args->heads_q + work->head) * work->seq_q;
    for (int q = 0; q < tile_q; ++q) {
        lse[q] = q < count ? lse_from[(first + q) * args->lse_stride_seq] : -INFINITY;
        lse[q] = lse[q] == -INFINITY ? INFINITY : lse[q];
        delta[q] = q < count ? delta_from[first + q] : 0;
    }
}
