//@ text(header)

//@ text(constants)

//@ text(arguments)

//@ part("work", {heads = "heads_q", tiles = "seq_q", last_first = false})

//@ part("pack")

//@ part("store")

extern "C" __global__ void __launch_bounds__(threads) ${symbol}(const __grid_constant__ LoomArgs args) {
    // [1] dQ of each row
    const Work work = work_of(&args, blockIdx.x);
    const long long head = (long long)work.batch * args.heads_q + work.head;
    const int first_row = work.tile * tile_q, rows = min(tile_q, work.seq_q - first_row);
    const float *from = args.dq_sum + (head * work.seq_q + first_row) * depth_qk;
    unsigned short *to = args.dq + work.batch * args.dq_stride_batch + first_row * args.dq_stride_seq + work.head * args.dq_stride_head;
    for (int i = threadIdx.x; i < rows * (depth_qk / 4); i += threads) {
        // Columns are summed in the order of an accumulator: 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.
        const int row = i / (depth_qk / 4), four = i % (depth_qk / 4), column = four / 4 * 16 + four % 4 * 2;
        const float4 x = *(const float4 *)(from + row * depth_qk + 4 * four);
        unsigned short *at = to + row * args.dq_stride_seq + column;
        store_pair(at, x.x * args.scale, x.y * args.scale);
//@ if c.dim_qk ~= c.depth_qk then
        if (column + 8 >= dim_qk) continue;
//@ end
        store_pair(at + 8, x.z * args.scale, x.w * args.scale);
    }
}
