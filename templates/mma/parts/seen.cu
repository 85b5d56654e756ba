//@ -- tiles, columns: of the accumulators [tiles][columns][4] the bits are for; along: what their columns are
//@ local bits = 4 * tiles
// Which elements of 16-row tiles of accumulators, ${columns} columns wide, are seen: bit ${bits} * j + 4 * i + e is element e of
// [i][j]. row and column are those of this thread's element 0 of [0][0]. A loop that is not unrolled to its end: this runs
// on partial tiles only, and unrolled it would hold the indices of all elements in registers.
static __device__ __forceinline__ unsigned long long seen_elements(const LoomArgs *args, const Work *work, int row, int column) {
    unsigned long long seen = 0;
#pragma unroll 1
    for (int j = 0; j < ${columns}; ++j) {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < ${tiles}; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
//@ if along == "keys" then
                const int at_column = column + 8 * j + e % 2;
                bool is_seen = at_column < work->seq_k;
//@     if has_mask then
                is_seen = is_seen && visible(args, work, work->q_start + row + 16 * i + e / 2 * 8, work->k_start + at_column);
//@     end
//@ else
                const int at_row = row + 8 * j + e % 2, at_column = column + 16 * i + e / 2 * 8;
                bool is_seen = at_row < work->seq_q && at_column < work->seq_k;
//@     if has_mask then
                is_seen = is_seen && visible(args, work, work->q_start + at_row, work->k_start + at_column);
//@     end
//@ end
                bits |= is_seen ? 1u << (4 * i + e) : 0;
            }
        seen |= (unsigned long long)bits << ${bits} * j;
    }
    return seen;
}

static __device__ __forceinline__ bool is_seen(unsigned long long seen, int i, int j, int e) {
    return seen >> (${bits} * j + 4 * i + e) & 1;
}
