//@ text(header)

//@ text(constants)
//@ if dtype == "bf16" then
constexpr float of_sums = 16384;  // dQ was summed up as many times as large
//@ else
constexpr float of_sums = 1;  // dQ was summed up as many times as large
//@ end

//@ text(arguments)

//@ part("pack")

//@ part("overlap")

// Sums lie in the order of accumulators: of each tile those of two warpgroups, of these 8 columns after 8 columns of all rows, of
// these rows r, columns 0 1 and row r + 8, the same, then columns 2 3 and so on: 16 numbers side by side are 8 columns of two rows.
extern "C" __global__ void __launch_bounds__(threads) ${symbol}(const __grid_constant__ LoomArgs args) {
    // [1] dQ of a tile
    await_kernels_before();
    const int tiles = (args.seq_q + tile_q - 1) / tile_q, tile = blockIdx.x % tiles, place = blockIdx.x / tiles;
    const int head = place % args.heads_q, batch = place / args.heads_q;
    const float scale = args.scale / of_sums;
    const float4 *from = (const float4 *)(args.dq_sum + (long long)blockIdx.x * (2 * 64 * dq_columns));
    unsigned short *to = args.dq + batch * args.dq_stride_batch + head * args.dq_stride_head;
    for (int i = threadIdx.x; i < 2 * 64 * dq_columns / 16; i += threads) {
        // Neighbours write neighbouring columns.
        const int columns = i % (dq_columns / 8), rows = i / (dq_columns / 8) % 32, warpgroup = i / (dq_columns / 8) / 32;
//@ if c.tile_q == 128 then
        const int row = tile * tile_q + 64 * warpgroup + rows / 8 * 16 + rows % 8, column = 8 * columns;
//@ else
        const int row = tile * tile_q + rows / 8 * 16 + rows % 8, column = dq_columns * warpgroup + 8 * columns;
//@ end
        if (column >= dim_qk) continue;
        float4 x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = from[((warpgroup * (dq_columns / 8) + columns) * 32 + rows) * 4 + j];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[j] = half ? pack(x[j].z * scale, x[j].w * scale) : pack(x[j].x * scale, x[j].y * scale);
            if (row + 8 * half < args.seq_q) {
                *(uint4 *)(to + (row + 8 * half) * args.dq_stride_seq + column) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
            }
        }
    }
}
