//@ local zero_fma = dtype == "bf16" and "fma.rn.bf16x2" or "fma.rn.f16x2"
// A key that a row does not see may hold inf or NaN, yet its weight 0 would make NaN of it in a product of tiles. So where
// not all see a tile, each warpgroup looks through the values while it waits for S. If they are not all finite, the
// warpgroups meet: each notes where, the first clears them, and rows that do see some get NaN in its columns.

// Bit sets of what a tile of values holds; each warpgroup has its own.
typedef struct Nonfinite {
    unsigned rows[8], columns[8];
} Nonfinite;

//@ part("nonfinite")

// Whether a tile of values holds some: asks all threads of the warpgroup.
static __device__ __forceinline__ bool any_nonfinite(unsigned values, int warpgroup) {
    unsigned zeros = 0;  // stays zero with finite values alone: 0 x + 0
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < v_bytes / 16; i += 128) {
        unsigned x, y, z, w;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(values + 16 * i));
        asm("${zero_fma} %0, %1, %2, %0;" : "+r"(zeros) : "r"(x), "r"(0));
        asm("${zero_fma} %0, %1, %2, %0;" : "+r"(zeros) : "r"(y), "r"(0));
        asm("${zero_fma} %0, %1, %2, %0;" : "+r"(zeros) : "r"(z), "r"(0));
        asm("${zero_fma} %0, %1, %2, %0;" : "+r"(zeros) : "r"(w), "r"(0));
    }
    return warpgroup_any(warpgroup, zeros & 0x7fff7fffu);
}

// Clears what is not finite in a tile of values, or notes it.
static __device__ __forceinline__ void scan_nonfinite(Nonfinite *nonfinite, unsigned values, bool clears) {
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < v_bytes / 4; i += 128) {
        const int row = i / 32 % tile_k, column = i / 32 / tile_k * 64 + (i / 4 % 8 ^ row % 8) * 8 + i % 4 * 2;
        unsigned pair;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(values + 4 * i));
        const unsigned halves = nonfinite_halves(pair);
        if (!halves) continue;
        if (clears) {
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(values + 4 * i), "r"(pair & ~halves) : "memory");
        } else {
            atomicOr(&nonfinite->rows[row / 32], 1u << row % 32);
            atomicOr(&nonfinite->columns[column / 32], ((halves & 1) | (halves >> 16 & 1) << 1) << column % 32);
        }
    }
}

// All warpgroups come here.
static __device__ __forceinline__ void clear_nonfinite(Nonfinite *nonfinite, unsigned values, int warpgroup) {
    if (threadIdx.x % 128 < 8) nonfinite->rows[threadIdx.x % 128] = nonfinite->columns[threadIdx.x % 128] = 0;
    warpgroup_sync(warpgroup);
    scan_nonfinite(nonfinite, values, false);
    consumers_sync();  // all have looked and noted
    if (warpgroup == 0) {
        scan_nonfinite(nonfinite, values, true);
        publish_shared();
    }
    consumers_sync();
}

// Which of this thread's rows, row and row + 8, see a key that holds such values, a bit each; column is the tile's first.
static __device__ __forceinline__ unsigned rows_that_see(const LoomArgs *args, const Work *work, int row, int column, const Nonfinite *nonfinite) {
    unsigned hit = 0;
#pragma unroll 1
    for (int i = 0; i < tile_k; ++i) {
        if (!(nonfinite->rows[i / 32] >> i % 32 & 1) || column + i >= work->seq_k) continue;
        hit |= visible(args, work, work->q_start + row, work->k_start + column + i) ? 1 : 0;
        hit |= visible(args, work, work->q_start + row + 8, work->k_start + column + i) ? 2 : 0;
    }
    return hit;
}

// Makes NaN of the columns that hold such values in the rows that see one.
static __device__ __forceinline__ void spoil(float (&o)[depth_v / 2], const Nonfinite *nonfinite, unsigned rows) {
#pragma unroll
    for (int j = 0; j < depth_v / 8; ++j) {
        const unsigned columns = nonfinite->columns[j / 4] >> (j % 4 * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (rows >> e / 2 & columns >> e % 2 & 1) o[4 * j + e] = __int_as_float(0x7fffffff);
        }
    }
}
