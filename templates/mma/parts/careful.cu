//@ local exponent, low = "0x7f807f80u", "0x00800080u"
//@ if dtype ~= "bf16" then exponent, low = "0x7c007c00u", "0x04000400u" end
// A key that a row does not see may hold inf or NaN, yet its weight 0 would make NaN of it in a product of tiles. So
// on partial tiles such values are found, cleared, and brought back as NaN to the rows that do see them.

// 0xffff in each half of a pair of ${dtype} that is inf or NaN (its exponent bits are all ones).
static __device__ __forceinline__ unsigned nonfinite_halves(unsigned pair) {
    return (((pair & ${exponent}) + ${low}) >> 15 & 0x00010001u) * 0xffffu;
}

// Bit sets of what is not finite in a tile.
typedef struct Nonfinite {
    unsigned rows[8], columns[8];
} Nonfinite;

static __device__ __forceinline__ bool has_bit(const unsigned *set, int i) { return set[i / 32] >> i % 32 & 1; }

// Finds the rows and columns of a tile in shared memory that hold inf or NaN. All threads of the block take part and
// get the answer whether there are any; if not, `found` is not written.
static __device__ __forceinline__ bool find_nonfinite(Nonfinite *found, unsigned smem, int rows, int pitch, int depth) {
    const int chunks = depth / 8;
    unsigned any = 0;
    for (int i = threadIdx.x; i < rows * chunks; i += threads) {
        uint4 chunk;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                     : "r"(smem + 2 * (i / chunks * pitch + i % chunks * 8)));
        any |= nonfinite_halves(chunk.x) | nonfinite_halves(chunk.y) | nonfinite_halves(chunk.z) | nonfinite_halves(chunk.w);
    }
    if (!__syncthreads_or(any != 0)) return false;
    if (threadIdx.x < 8) found->rows[threadIdx.x] = found->columns[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < rows * (depth / 2); i += threads) {
        const int row = i / (depth / 2), column = i % (depth / 2) * 2;
        unsigned pair;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(smem + 2 * (row * pitch + column)));
        const unsigned halves = nonfinite_halves(pair) & 0x00020001u;
        if (halves) {
            atomicOr(&found->rows[row / 32], 1u << row % 32);
            atomicOr(&found->columns[column / 32], (halves | halves >> 16) << column % 32);
        }
    }
    __syncthreads();
    return true;
}
//@ if k.name ~= "backward_dkv" then

// Sets the values of a tile that are not finite to zero.
static __device__ __forceinline__ void clear_nonfinite(unsigned smem, int rows, int pitch, int depth) {
    for (int i = threadIdx.x; i < rows * (depth / 2); i += threads) {
        const unsigned at = smem + 2 * (i / (depth / 2) * pitch + i % (depth / 2) * 2);
        unsigned pair;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(at));
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pair & ~nonfinite_halves(pair)) : "memory");
    }
    __syncthreads();
}

// NaN in the columns with such values, for the rows with a weight for such a key. weight: [row, key], sum: [row, column].
//@ local tiles = k.name == "forward" and "row_tiles" or "1"
//@ local columns = k.name == "forward" and "value_columns" or "qk_columns"
static __device__ __forceinline__ void spoil_rows(float (&sum)[${tiles}][${columns}][4], const float (&weight)[${tiles}][key_columns][4],
                                         const Nonfinite *found) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < ${tiles}; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            bool sees = false;
#pragma unroll
            for (int j = 0; j < key_columns; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    sees = sees || (weight[i][j][2 * half + e] != 0 && has_bit(found->rows, 8 * j + lane % 4 * 2 + e));
                }
            sees = __ballot_sync(~0u, sees) >> lane / 4 * 4 & 0xf;  // the four threads of the row
#pragma unroll
            for (int j = 0; j < ${columns}; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (sees && has_bit(found->columns, 8 * j + lane % 4 * 2 + e)) sum[i][j][2 * half + e] = __int_as_float(0x7fffffff);
                }
        }
}
//@ end
