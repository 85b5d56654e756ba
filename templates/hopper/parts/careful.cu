//@ local exponent, low = "0x7f807f80u", "0x00800080u"
//@ if dtype ~= "bf16" then exponent, low = "0x7c007c00u", "0x04000400u" end
//@ local zero_fma = dtype == "bf16" and "fma.rn.bf16x2" or "fma.rn.f16x2"
// A key that a row does not see may hold inf or NaN, yet its weight 0 would make NaN of it in a product of tiles. So
// where not all see a tile such values are found and cleared, and rows that do see one get NaN in its columns.

// Bit sets of what is not finite in a tile of values.
typedef struct Nonfinite {
    unsigned rows[8], columns[8];
} Nonfinite;

// 0xffff in each half of a pair of ${dtype} that is inf or NaN (its exponent bits are all ones).
static __device__ __forceinline__ unsigned nonfinite_halves(unsigned pair) {
    return (((pair & ${exponent}) + ${low}) >> 15 & 0x00010001u) * 0xffffu;
}

// Finds and clears the values of a tile that are not finite. All consumers take part and get the answer whether there
// are any; if not, `found` is not written.
static __device__ __forceinline__ bool find_nonfinite(Nonfinite *found, unsigned smem, int warpgroup) {
    const int thread = threadIdx.x % 128;
    unsigned zeros = 0;  // stays zero with finite values alone: 0 x + 0
#pragma unroll 4
    for (int i = thread; i < v_bytes / 16; i += 128) {
        unsigned x, y, z, w;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(smem + 16 * i));
        asm("${zero_fma} %0, %1, %2, %0;" : "+r"(zeros) : "r"(x), "r"(0));
        asm("${zero_fma} %0, %1, %2, %0;" : "+r"(zeros) : "r"(y), "r"(0));
        asm("${zero_fma} %0, %1, %2, %0;" : "+r"(zeros) : "r"(z), "r"(0));
        asm("${zero_fma} %0, %1, %2, %0;" : "+r"(zeros) : "r"(w), "r"(0));
    }
    if (!meet_any(careful_barrier + warpgroup, 128, zeros & 0x7fff7fffu)) return false;
    constexpr int all = careful_barrier + warpgroups, count = 128 * warpgroups;
    meet(all, count);  // all have searched the tile and read what was found before
    if (warpgroup == 0 && thread < 8) found->rows[thread] = found->columns[thread] = 0;
    meet(all, count);
#pragma unroll 1
    for (int i = 128 * warpgroup + thread; i < v_bytes / 4; i += count) {
        unsigned pair;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(smem + 4 * i));
        const unsigned halves = nonfinite_halves(pair);
        if (!halves) continue;
        const int row = i / 32 % tile_k, column = i / 32 / tile_k * 64 + ((i / 4 % 8 ^ row % 8) * 8) + i % 4 * 2;
        atomicOr(&found->rows[row / 32], 1u << row % 32);
        atomicOr(&found->columns[column / 32], ((halves & 1) | (halves >> 16 & 1) << 1) << column % 32);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + 4 * i), "r"(pair & ~halves) : "memory");
    }
    publish_shared();
    meet(all, count);
    return true;
}

// Which of this thread's two rows see a key that holds such values, a bit each. `seen` is of the 8-key columns from
// `column` on.
static __device__ __forceinline__ unsigned rows_that_see(unsigned long long seen, const Nonfinite *found, int column) {
    unsigned hit = 0;
#pragma unroll 1
    for (int j = 0; j < seen_columns; ++j) {
        const int key = 8 * (column + j) + threadIdx.x % 4 * 2;
        const unsigned keys = found->rows[key / 32] >> key % 32 & 3, bits = (unsigned)(seen >> 4 * j);
        hit |= ((bits & keys) != 0) | ((bits >> 2 & keys) != 0) << 1;
    }
    hit |= __shfl_xor_sync(~0u, hit, 1);  // over the four threads of the row
    return hit | __shfl_xor_sync(~0u, hit, 2);
}

// Makes NaN of the columns that hold such values in the rows that see one.
static __device__ __forceinline__ void spoil(float (&o)[depth_v / 2], const Nonfinite *found, unsigned rows) {
#pragma unroll
    for (int j = 0; j < depth_v / 8; ++j) {
        const unsigned columns = found->columns[j / 4] >> (j % 4 * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (rows >> e / 2 & columns >> e % 2 & 1) o[4 * j + e] = __int_as_float(0x7fffffff);
        }
    }
}
