// Starts copying rows [first_row, first_row + rows) of a tensor to shared memory, ${pitch} elements apart. Rows at or
// past end_row and columns past ${dim} become zero.
static __device__ __forceinline__ void load_${name}_rows(unsigned smem, const unsigned short *base, long long row_stride,
                                                int rows, int first_row, int end_row) {
    constexpr int chunks = ${depth} / 8;  // of a row, a thread each
//@ if aligned then
    const int chunk = threadIdx.x % chunks;
    const int row_step = threads / chunks;
    int row = threadIdx.x / chunks;
//@ else
    // As if not known before: else addresses are computed ahead of the loop of tiles and hold registers all the while.
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread), "+l"(base), "+l"(row_stride));
    const int chunk = thread % chunks;
    const int row_step = threads / chunks;
    int row = thread / chunks;
//@ end
//@ local whole = c.threads % (c[depth] // 8) == 0
//@ if not whole then
    if (row == row_step) return;  // threads too few for one more row
//@ end
    const unsigned short *from = base + (first_row + row) * row_stride + 8 * chunk;
    smem += 2 * (row * ${pitch} + 8 * chunk);
//@ if aligned then
#pragma unroll
//@ else
#pragma unroll 2  // 16 loads, of an element each; all steps at once are long to compile
//@ end
    for (int step = 0; step < (rows + row_step - 1) / row_step; ++step) {
        if (rows % row_step == 0 || row < rows) {
//@ if c[dim] == c[depth] then
            copy_chunk(smem, from, first_row + row < end_row);
//@ else
            copy_chunk(smem, from, first_row + row < end_row && 8 * chunk < ${dim});
//@ end
        }
        row += row_step;
        from += row_step * row_stride;
        smem += 2 * row_step * ${pitch};
    }
}
