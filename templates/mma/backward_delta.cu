//@ text(header)

//@ text(constants)
constexpr int lanes = 8;  // threads of a row

//@ text(arguments)

//@ part("work", {heads = "heads_q", tiles = "seq_q", last_first = false})

//@ part("element")

//@ if k.overlapped then
//@ part("overlap")

//@ end
// Eight elements of a row as f32.
static __device__ __forceinline__ void load_eight(float (&x)[8], const unsigned short *from) {
//@ if aligned then
    const uint4 chunk = *(const uint4 *)from;
    const unsigned pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float((unsigned short)(pairs[i / 2] >> i % 2 * 16));
//@ else
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(from[i]);
//@ end
}

extern "C" __global__ void __launch_bounds__(threads) ${symbol}(const __grid_constant__ LoomArgs args) {
//@ if k.overlapped then
    let_next_begin();
//@ end
    const Work work = work_of(&args, blockIdx.x);
    const int row = work.tile * tile_q + threadIdx.x / lanes, lane = threadIdx.x % lanes;
    const long long head = (long long)work.batch * args.heads_q + work.head;

    // [1] D of each row
    float sum = 0;
    if (row < work.seq_q) {
        const unsigned short *o = args.o + work.batch * args.o_stride_batch + row * args.o_stride_seq + work.head * args.o_stride_head;
        const unsigned short *dout = args.dout + work.batch * args.dout_stride_batch + row * args.dout_stride_seq + work.head * args.dout_stride_head;
        for (int column = 8 * lane; column < dim_v; column += 8 * lanes) {
            float x[8], y[8];
            load_eight(x, o + column);
            load_eight(y, dout + column);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
        }
    }
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (row < work.seq_q && lane == 0) {
        if (args.dlse) sum -= args.dlse[work.batch * args.dlse_stride_batch + row * args.dlse_stride_seq + work.head * args.dlse_stride_head];
        args.delta[head * work.seq_q + row] = sum;
    }
//@ if c.sum_columns then

    // [2] clear the sum of dQ
    if (!args.dq) return;
    const int first = work.tile * tile_q, end = (work.seq_q + sum_tile - 1) / sum_tile * sum_tile;
    const int rows = first + tile_q < work.seq_q ? tile_q : end - first;
    float4 *to = (float4 *)(args.dq_sum + (head * end + first) * sum_columns);
    for (int i = threadIdx.x; i < rows * sum_columns / 4; i += threads) to[i] = float4{0, 0, 0, 0};
//@ elseif c.turns then

    // [2] clear turns, and dQ that nobody may add to
    if (!args.dq) return;
    const int first = work.tile * tile_q, tiles = (work.seq_q + dq_tile - 1) / dq_tile;
    if (first % dq_tile == 0 && threadIdx.x < turns) args.turns[(head * tiles + first / dq_tile) * turns + threadIdx.x] = 0;
//@ if not has_mask then
    if (args.seq_k > 0) return;
//@ end
    for (int i = threadIdx.x; i < tile_q * dim_qk / 8; i += threads) {
        const int of_row = first + i / (dim_qk / 8), column = i % (dim_qk / 8) * 8;
        unsigned short *to = args.dq + work.batch * args.dq_stride_batch + of_row * args.dq_stride_seq + work.head * args.dq_stride_head + column;
        if (of_row < work.seq_q) *(uint4 *)to = uint4{0, 0, 0, 0};
    }
//@ end
}
