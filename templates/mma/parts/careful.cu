// A key that a row does not see may hold inf or NaN, yet its weight 0 would make NaN of it in a product of tiles. So
// on partial tiles such values are found and cleared; a row that does see one gets NaN in every column that holds one in
// some partial tile of the block. Loops that run only then are not unrolled: they would be a tenth of the time to compile.

//@ part("nonfinite")

// Bit sets of what is not finite in a tile.
typedef struct Nonfinite {
    unsigned rows[8], columns[8];
} Nonfinite;

static __device__ __forceinline__ bool has_bit(const unsigned *set, int i) { return set[i / 32] >> i % 32 & 1; }

// Finds the rows and columns of a tile in shared memory that hold inf or NaN. All threads of the block take part and
// get the answer whether there are any; if not, `found` is not written. Columns are kept from tile to tile, from the
// first with such values on.
static __device__ __forceinline__ bool find_nonfinite(Nonfinite *found, bool first, unsigned smem, int rows, int pitch, int depth) {
    const int chunks = depth / 8, thread = here(threadIdx.x);
    unsigned any = 0;
    for (int i = thread; i < rows * chunks; i += threads) {
        uint4 chunk;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                     : "r"(smem + 2 * (i / chunks * pitch + i % chunks * 8)));
        any |= nonfinite_halves(chunk.x) | nonfinite_halves(chunk.y) | nonfinite_halves(chunk.z) | nonfinite_halves(chunk.w);
    }
    if (!__syncthreads_or(any != 0)) return false;
    if (thread < 8) {
        found->rows[thread] = 0;
        if (first) found->columns[thread] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < rows * (depth / 2); i += threads) {
        const int row = i / (depth / 2), column = i % (depth / 2) * 2;
        unsigned pair;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(smem + 2 * (row * pitch + column)));
        const unsigned halves = nonfinite_halves(pair) & 0x00020001u;
        if (halves) {
            atomicOr(&found->rows[row / 32], 1u << row % 32);
            atomicOr(&found->columns[column / 32], ((halves | halves >> 16) & 3u) << column % 32);
        }
    }
    __syncthreads();
    return true;
}
//@ if k.name ~= "backward_dkv" then

// Sets the values of a tile that are not finite to zero.
static __device__ __forceinline__ void clear_nonfinite(unsigned smem, int rows, int pitch, int depth) {
#pragma unroll 1
    for (int i = here(threadIdx.x); i < rows * (depth / 2); i += threads) {
        const unsigned at = smem + 2 * (i / (depth / 2) * pitch + i % (depth / 2) * 2);
        unsigned pair;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(at));
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pair & ~nonfinite_halves(pair)) : "memory");
    }
    __syncthreads();
}

// Which rows of this thread see a key that holds such values: bits 4 * i + 2 * half and + 1.
//@ local tiles = k.name == "forward" and c.row_tiles or 1
//@ local bits, every_row = 4 * tiles, tiles == 2 and "0x55u" or "0x5u"
static __device__ __forceinline__ unsigned rows_that_see(const unsigned long long (&seen)[seen_words], const Nonfinite *found) {
    unsigned long long hit = 0;
#pragma unroll
    for (int w = 0; w < seen_words; ++w) {
        unsigned long long keys = 0;  // those that hold such values, in the bits of `seen`
#pragma unroll 1
        for (int j = 0; j < seen_columns; ++j) {
            const int key = 8 * (seen_columns * w + j) + threadIdx.x % 4 * 2;
            keys |= (unsigned long long)((found->rows[key / 32] >> key % 32 & 3u) * ${every_row}) << ${bits} * j;
        }
        hit |= seen[w] & keys;
    }
#pragma unroll
    for (int shift = 32; shift >= ${bits}; shift /= 2) hit |= hit >> shift;  // over all keys
    unsigned rows = (unsigned)hit;
    rows |= __shfl_xor_sync(~0u, rows, 1);  // over the four threads of the row
    return rows | __shfl_xor_sync(~0u, rows, 2);
}

// Overwrites what this thread has stored of a row with NaN, in the columns that hold such values.
static __device__ __forceinline__ void store_nan(unsigned short *row, const Nonfinite *found, int dim) {
#pragma unroll 1
    for (int column = threadIdx.x % 4 * 2; column < dim; column += 8) {
        if (has_bit(found->columns, column)) row[column] = 0x7fff;
        if (has_bit(found->columns, column + 1)) row[column + 1] = 0x7fff;
    }
}
//@ end
