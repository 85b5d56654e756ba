//@ text(header)

//@ part("prologue")

//@ part("vector")

void ${symbol}(const LoomArgs *args, long long block, void *scratch) {
    // [1] D of each row, summed in 8 lanes
    (void)scratch;
    const Work work = work_of(args, block);
    const int first = work.tile * tile_q;
    const int end = work.seq_q - first < tile_q ? work.seq_q : first + tile_q;
    for (int row = first; row < end; ++row) {
        const Element *o = args->o + work.batch * args->o_stride_batch + work.head * args->o_stride_head +
                           row * args->o_stride_seq;
        const Element *dout = args->dout + work.batch * args->dout_stride_batch +
                              work.head * args->dout_stride_head + row * args->dout_stride_seq;
        float lanes[8] = {0};
        for (int x = 0; x < dim_v; x += 8) {
            for (int i = 0; i < 8; ++i) lanes[i] = fused(to_float(o[x + i]), to_float(dout[x + i]), lanes[i]);
        }
        float delta = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
                      ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
        if (args->dlse) {
            delta -= args->dlse[work.batch * args->dlse_stride_batch + work.head * args->dlse_stride_head +
                                row * args->dlse_stride_seq];
        }
        args->delta[((long long)work.batch * args->heads_q + work.head) * work.seq_q + row] = delta;
    }
}
