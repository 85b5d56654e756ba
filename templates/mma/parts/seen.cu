//@ -- tiles, columns: of the accumulators [tiles][columns][4] the bits are for; along: what their columns are
//@ local bits = 4 * tiles
//@ local of_keys = along == "keys"
//@ -- What the mask makes of those along the columns, each by one lane, and of those down the rows; both where it makes something of them.
//@ local along_terms = has_mask and (of_keys and column_terms and {"ColumnTerms", "column_terms", "k_start"} or not of_keys and row_terms and {"RowTerms", "row_terms", "q_start"})
//@ local down_terms = has_mask and (of_keys and row_terms and {"RowTerms", "row_terms", "q_start"} or not of_keys and column_terms and {"ColumnTerms", "column_terms", "k_start"})
//@ local down_of, along_of = down_terms and "&down[2 * i + e / 2], " or "", along_terms and "&terms[e % 2], " or ""
//@ local call = (along_terms or down_terms) and "visible_of(args, work, " .. (of_keys and down_of .. along_of or along_of .. down_of) or "visible(args, work, "
// Which elements of 16-row tiles of accumulators, ${columns} columns wide, are seen: bit ${bits} * j + 4 * i + e is element e of
// [i][j]. row and column are those of this thread's element 0 of [0][0]. A loop that is not unrolled to its end: this runs
// on partial tiles only, and unrolled it would hold the indices of all elements in registers.
static __device__ __forceinline__ unsigned long long seen_elements(const LoomArgs *args, const Work *work, int row, int column) {
    unsigned long long seen = 0;
//@ if down_terms then
    ${down_terms[1]} down[${2 * tiles}];
#pragma unroll
    for (int i = 0; i < ${2 * tiles}; ++i) down[i] = ${down_terms[2]}(args, work, work->${down_terms[3]} + ${of_keys and "row" or "column"} + 8 * i);
//@ end
//@ if along_terms then
    const int lane = threadIdx.x % 32, first = work->${along_terms[3]} + ${of_keys and "column" or "row"} - lane % 4 * 2;
    ${along_terms[1]} of_lane[2];  // the lane-th, and the 32nd from there
#pragma unroll
    for (int i = 0; i < 2; ++i) of_lane[i] = ${along_terms[2]}(args, work, first + 32 * i + lane);
//@ end
#pragma unroll 1
    for (int j = 0; j < ${columns}; ++j) {
        unsigned bits = 0;
//@ if along_terms then
        const ${along_terms[1]} near = j < 4 ? of_lane[0] : of_lane[1];
        const ${along_terms[1]} terms[2] = {terms_of_lane(near, 8 * j + lane % 4 * 2 & 31), terms_of_lane(near, 8 * j + lane % 4 * 2 + 1 & 31)};
//@ end
#pragma unroll
        for (int i = 0; i < ${tiles}; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
//@ if of_keys then
                const int at_column = column + 8 * j + e % 2;
                bool is_seen = at_column < work->seq_k;
//@     if has_mask then
                //@ text("is_seen = is_seen && " .. call .. "work->q_start + row + 16 * i + e / 2 * 8, work->k_start + at_column);")
//@     end
//@ else
                const int at_row = row + 8 * j + e % 2, at_column = column + 16 * i + e / 2 * 8;
                bool is_seen = at_row < work->seq_q && at_column < work->seq_k;
//@     if has_mask then
                //@ text("is_seen = is_seen && " .. call .. "work->q_start + at_row, work->k_start + at_column);")
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
