//@ text(header)

//@ text(constants)

//@ text(arguments)

//@ part("work", {heads = "heads_q", tiles = "seq_q", last_first = false})

//@ part("pack")

extern "C" __global__ void __launch_bounds__(threads) ${symbol}(const __grid_constant__ LoomArgs args) {
    // [1] dQ of each row
    const Work work = work_of(&args, blockIdx.x);
    const long long head = (long long)work.batch * args.heads_q + work.head;
    const int first_row = work.tile * tile_q, rows = min(tile_q, work.seq_q - first_row);
    const float *from = args.dq_sum + (head * work.seq_q + first_row) * dim_qk;
    unsigned short *to = args.dq + work.batch * args.dq_stride_batch + first_row * args.dq_stride_seq + work.head * args.dq_stride_head;
    for (int i = threadIdx.x; i < rows * (dim_qk / 4); i += threads) {
        const int row = i / (dim_qk / 4), column = i % (dim_qk / 4) * 4;
        const float4 x = *(const float4 *)(from + row * dim_qk + column);
        unsigned short *at = to + row * args.dq_stride_seq + column;
        const uint2 pairs = {pack(x.x * args.scale, x.y * args.scale), pack(x.z * args.scale, x.w * args.scale)};
//@ if aligned then
        *(uint2 *)at = pairs;
//@ else
        at[0] = (unsigned short)pairs.x;
        at[1] = (unsigned short)(pairs.x >> 16);
        at[2] = (unsigned short)pairs.y;
        at[3] = (unsigned short)(pairs.y >> 16);
//@ end
    }
}
