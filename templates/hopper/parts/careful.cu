//@ local zero_fma = dtype == "bf16" and "fma.rn.bf16x2" or "fma.rn.f16x2"
// A key that a row does not see may hold inf or NaN, yet its weight 0 would make NaN of it in a product of tiles. So
// where not all see a tile, two warps beside the planner search its values: what is not finite is noted and cleared, and
// rows that do see some get NaN in its columns.

constexpr int searchers = 2;  // warps
constexpr unsigned pass_by = 0, searching = 1, search_ends = 2;

// Bit sets of what one searcher has found in a tile.
typedef struct Nonfinite {
    unsigned rows[8], columns[8];
} Nonfinite;

// What goes with the values in a stage.
typedef struct Values {
    unsigned what;              // pass_by, searching or search_ends
    unsigned found[searchers];  // whether the searcher has found some, and where
    Nonfinite nonfinite[searchers];
} Values;

//@ part("nonfinite")

// One searcher's part of a tile.
static __device__ __forceinline__ void search_part(Values *values, unsigned smem, int searcher) {
    const int thread = 32 * searcher + threadIdx.x % 32;
    unsigned zeros[4] = {0, 0, 0, 0};  // stay zero with finite values alone: 0 x + 0
#pragma unroll 4
    for (int i = 0; i < v_bytes / 16; i += 32 * searchers) {
        unsigned x[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(smem + 16 * (i + thread)));
#pragma unroll
        for (int j = 0; j < 4; ++j) asm("${zero_fma} %0, %1, %2, %0;" : "+r"(zeros[j]) : "r"(x[j]), "r"(0));
    }
    const bool any = __any_sync(~0u, (zeros[0] | zeros[1] | zeros[2] | zeros[3]) & 0x7fff7fffu);
    if (threadIdx.x % 32 == 0) values->found[searcher] = any;
    Nonfinite *nonfinite = &values->nonfinite[searcher];
    if (threadIdx.x % 32 < 8) nonfinite->rows[threadIdx.x % 32] = nonfinite->columns[threadIdx.x % 32] = 0;
    if (!any) return;
    __syncwarp();
#pragma unroll 1
    for (int i = thread; i < v_bytes / 16; i += 32 * searchers) {
        const int row = i / 8 % tile_k, column = i / 8 / tile_k * 64 + (i % 8 ^ row % 8) * 8;
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
            unsigned pair;
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(smem + 16 * i + 4 * j));
            const unsigned halves = nonfinite_halves(pair);
            if (!halves) continue;
            atomicOr(&nonfinite->rows[row / 32], 1u << row % 32);
            atomicOr(&nonfinite->columns[column / 32], ((halves & 1) | (halves >> 16 & 1) << 1) << (column % 32 + 2 * j));
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + 16 * i + 4 * j), "r"(pair & ~halves) : "memory");
        }
    }
    publish_shared();
}

// A searcher's way through the stages: every tile passes by, as its turn to be emptied counts all.
static __device__ __forceinline__ void search(unsigned smem, Values *values) {
    const int searcher = threadIdx.x / 32 - 2;
    Stage stage = {0, 0};
    for (;;) {
        barrier_wait(bar_v_full(smem, stage.index), stage.parity);
        const unsigned what = from_lane_0(in_lane_0(&values[stage.index].what));
        if (what == search_ends) break;
        if (what == searching) search_part(&values[stage.index], smem + smem_v + stage.index * v_bytes, searcher);
        barrier_wait(bar_checked(smem, stage.index), stage.parity ^ 1);  // passes; consumers do not wait for every phase, but one must
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(bar_checked(smem, stage.index));
            barrier_arrive(bar_v_empty(smem, stage.index));
        }
        stage_next(&stage);
    }
}

// Which of this thread's rows, row and row + 8, see a key that holds such values, a bit each; column is the tile's first.
static __device__ __forceinline__ unsigned rows_that_see(const LoomArgs *args, const Work *work, int row, int column, const Values *values) {
    unsigned hit = 0;
#pragma unroll 1
    for (int i = 0; i < tile_k; ++i) {
        const unsigned rows = values->nonfinite[0].rows[i / 32] | values->nonfinite[1].rows[i / 32];
        if (!(rows >> i % 32 & 1) || column + i >= work->seq_k) continue;
        hit |= visible(args, work, work->q_start + row, work->k_start + column + i) ? 1 : 0;
        hit |= visible(args, work, work->q_start + row + 8, work->k_start + column + i) ? 2 : 0;
    }
    return hit;
}

// Makes NaN of the columns of two bit sets in this thread's rows of a third.
static __device__ __forceinline__ void spoil(float (&o)[depth_v / 2], const unsigned *columns_0, const unsigned *columns_1, unsigned rows) {
#pragma unroll
    for (int j = 0; j < depth_v / 8; ++j) {
        const unsigned columns = (columns_0[j / 4] | columns_1[j / 4]) >> (j % 4 * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (rows >> e / 2 & columns >> e % 2 & 1) o[4 * j + e] = __int_as_float(0x7fffffff);
        }
    }
}
