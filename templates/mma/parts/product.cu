//@ -- name, tiles, columns: of the function, and of the sum it adds to; steps: of 16 along the common dimension
//@ -- a: "rows" [16 * tiles][common] or "columns" [common][16 * tiles] in shared memory, or "registers", an accumulator
//@ -- b: "rows" [8 * columns][common] or "columns" [common][8 * columns] in shared memory
//@ -- a_pitch, b_pitch: elements from row to row; a, b: byte addresses with the lane's offset
//@ if a == "registers" then
static __device__ __forceinline__ void ${name}(float (&sum)[${tiles}][${columns}][4], const float (&a)[${tiles}][${a_columns}][4], unsigned b) {
//@ else
static __device__ __forceinline__ void ${name}(float (&sum)[${tiles}][${columns}][4], unsigned a, unsigned b) {
//@ end
//@ if aligned or a == "registers" or k.name == "forward" then
#pragma unroll
//@ else
#pragma unroll 2  // a rare path: shorter to compile
//@ end
    for (int step = 0; step < ${steps}; ++step) {
        unsigned operand_a[${tiles}][4];
#pragma unroll
        for (int i = 0; i < ${tiles}; ++i) {
//@ if a == "rows" then
            load_fragments(operand_a[i], a + 2 * (16 * i * ${a_pitch} + 16 * step));
//@ elseif a == "columns" then
            load_transposed(operand_a[i], a + 2 * (16 * step * ${a_pitch} + 16 * i));
//@ else
            pack_a(operand_a[i], a[i][2 * step], a[i][2 * step + 1]);
//@ end
        }
#pragma unroll
        for (int j = 0; j < ${columns}; j += 2) {
            unsigned operand_b[4];  // of two 8-wide columns
//@ if b == "rows" then
            load_fragments(operand_b, b + 2 * (8 * j * ${b_pitch} + 16 * step));
//@ else
            load_transposed(operand_b, b + 2 * (16 * step * ${b_pitch} + 8 * j));
//@ end
#pragma unroll
            for (int i = 0; i < ${tiles}; ++i) {
                mma(sum[i][j], operand_a[i], operand_b[0], operand_b[1]);
                mma(sum[i][j + 1], operand_a[i], operand_b[2], operand_b[3]);
            }
        }
    }
}
