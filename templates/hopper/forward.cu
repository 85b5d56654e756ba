//@ -- With two sets of P a tile that is full for a warpgroup is one for its loop of full tiles even if it is not full for all.
//@ -- With one nothing would hide the question, in each tile, whether the one before was such a tile.
//@ local own_class = has_mask and c.p_sets == 2
//@ -- What ends the rows of a work runs beside its last product where P has two sets; with one that was no gain.
//@ local rows_end_early = c.p_sets == 2
//@ -- Spans of keys bound the walk, and where they alone cut a tile its rows compare with their ends.
//@ local has_spans = walk == "range" or bounds
//@ text(header)

//@ text(constants)
constexpr float log2_e = 1.44269504f;
constexpr float ln_2 = 0.693147181f;
//@ if dtype == "bf16" then
constexpr float headroom = 32, unit = 4294967296.0f;  // P is 1 / unit = 2^-headroom at the reference
//@ else
constexpr float headroom = 0, unit = 1;  // P is 1 / unit = 2^-headroom at the reference
//@ end
constexpr float most_p = 32768;   // larger sums of P of a thread and tile move the reference
//@ if not capped then
constexpr float most_exact = 4096;  // of a reference in powers of 2; above, it is subtracted before the scale multiplies
//@ end
constexpr float unset = -3.40282347e38f;  // reference of a row that has seen no key

//@ text(arguments)

//@ part("work")

//@ part("uniform")
//@ if capped then
static __device__ __forceinline__ float uniform_float(float x) { return __int_as_float(uniform(__float_as_int(x))); }
//@ end

//@ text(functions)

//@ part("barrier")

//@ part("tma")

//@ part("walk")

//@ part("wgmma")

//@ text(wgmma.text{name = "multiply_qk", comment = "Starts s = Q K^T of a warpgroup.", columns = c.tile_k, dtype = dtype, first = true,
//@            a = c.q_registers == 1 and {"registers"} or {"shared", wgmma.steps(c.depth_qk, c.tile_q)},
//@            b = wgmma.steps(c.depth_qk, c.tile_k)})

//@ text(wgmma.text{name = "multiply_pv", comment = "Starts o += P V of a warpgroup.", columns = c.depth_v, dtype = dtype, transposed = true,
//@            a = {"registers"}, b = wgmma.steps(c.tile_k)})

//@ part("pack")

//@ part("exp2")

//@ part("log2")

//@ if capped then
//@ part("cap")

//@ end
//@ part("lane_0")

// What is told of a tile: by the planner to the loader, and with the keys in a stage to the consumers.
typedef struct Tile {
    int index;
    unsigned what;  // classes, 2 bits a warpgroup, those of the next tile of the work above them, and where it is in the work
} Tile;
constexpr int next_class = 8;  // where the classes of the next begin
constexpr unsigned is_last = 1u << 16, is_first = 1u << 17;
//@ if capped then
constexpr unsigned maybe_far = 1u << 18;  // tanh was taken of something not near 0 lately
//@ end

// What the planner tells the loader; a queue of plan_places.
typedef struct Plan {
    Tile tile;
    int nth;  // work of the block that the tile is of; -1: there are no more
} Plan;

//@ part("stage", {what = "keys and values"})

static __device__ __forceinline__ Stage stage_before(Stage stage) {
    stage.parity ^= stage.index == 0;
    stage.index = stage.index == 0 ? stages - 1 : stage.index - 1;
    return stage;
}

static __device__ __forceinline__ unsigned bar_k_full(unsigned smem, int stage) { return smem + smem_barriers + 8 * stage; }
static __device__ __forceinline__ unsigned bar_v_full(unsigned smem, int stage) { return bar_k_full(smem, stage) + 8 * stages; }
static __device__ __forceinline__ unsigned bar_k_empty(unsigned smem, int stage) { return bar_k_full(smem, stage) + 16 * stages; }
static __device__ __forceinline__ unsigned bar_v_empty(unsigned smem, int stage) { return bar_k_full(smem, stage) + 24 * stages; }
static __device__ __forceinline__ unsigned bar_q_full(unsigned smem, int buffer) { return smem + smem_barriers + 32 * stages + 8 * buffer; }
static __device__ __forceinline__ unsigned bar_q_empty(unsigned smem, int buffer) { return bar_q_full(smem, buffer) + 8 * q_buffers; }
static __device__ __forceinline__ unsigned bar_plan_full(unsigned smem, int place) { return bar_q_full(smem, 2 * q_buffers) + 8 * place; }
static __device__ __forceinline__ unsigned bar_plan_empty(unsigned smem, int place) { return bar_plan_full(smem, place) + 8 * plan_places; }
//@ if has_mask then
static __device__ __forceinline__ unsigned bar_checked(unsigned smem, int stage) { return bar_plan_empty(smem, plan_places) + 8 * stage; }

//@ part("careful")
//@ end

// -- Planner: one warp finds the works of the block and the tiles that they visit --------------------------------

//@ if not even and not listed then
// Keys that a query of the first head sees, at most, of the first, the middle and the last.
static __device__ __forceinline__ int keys_seen(const LoomArgs *args) {
    const Work work = {0, 0, 0, 0, args->seq_q, args->seq_k, args->q_start, args->k_start};
    int most = 0;
#pragma unroll 1
    for (int i = 0; i < 3; ++i) {
        const int query = args->q_start + (i == 2 ? args->seq_q - 1 : args->seq_q / 2 * i);
        Span outer[1], inner[1];
        visible_keys(args, &work, query, query, outer, inner);
        most = max(most, outer[0].hi - outer[0].lo + 1);
    }
    return most;
}

//@ end
static __device__ __forceinline__ void push_plan(unsigned smem, Plan *plans, unsigned count, int tile, unsigned what, int nth) {
    const int place = count % plan_places;
    barrier_wait(bar_plan_empty(smem, place), (count / plan_places & 1) ^ 1);
    plans[place].tile.index = tile;
    plans[place].tile.what = what;
    plans[place].nth = nth;
    barrier_arrive(bar_plan_full(smem, place));
}

//@ local spans = not listed and ", Spans *spans" or ""
//@ text("static __device__ __forceinline__ void plan_tiles(const LoomArgs *args, unsigned smem, Plan *plans, Work *works" .. spans .. ") {")
    const bool leader = threadIdx.x % 32 == 0;
//@ local dealt = listed and not even
//@ if dealt then
    const Lists lists = lists_of(args);
//@ elseif not even then
    const Rounds rounds = rounds_of(args, keys_seen(args));
//@ else
    const Rounds rounds = rounds_of(args);
//@ end
    unsigned count = 0;
    int nth = 0;
//@ if dealt then
    const int num_works = lists.heads * lists.tiles;  // each block asks once more than it finds one
    Work found;
    for (unsigned place = blockIdx.x; work_of(args, &lists, place, &found); place = gridDim.x + taken_before(args, num_works)) {
//@ else
    for (int round = 0; round < rounds.count; ++round) {
        Work found;
        if (!work_of(args, &rounds, round, &found)) continue;
//@ end
        // Free: at most plan_places + 2 works lie between the last one whose queries are being loaded and this one, and
        // those are loaded when all consumers are within q_buffers works of them.
        Work *work = &works[nth % work_places];
        if (leader) *work = found;
        __syncwarp();
//@ if not listed then
        Walk walk = walk_begin(args, work, spans);
//@ else
        Walk walk = walk_begin(args, work);
//@ end
        Visit visit = walk_next(args, &walk);  // if there is none, tile -1 is visited: it is empty for all, and not loaded
        unsigned first = is_first;
        do {
            Visit next = visit;
            if (visit.tile >= 0) next = walk_next(args, &walk);
            const unsigned what = visit.classes | first | (next.tile < 0 ? is_last : next.classes << next_class);
            if (leader) push_plan(smem, plans, count, visit.tile, what, nth);
            ++count;
            first = 0;
            visit = next;
        } while (visit.tile >= 0);
//@ if dealt then
        if (nth == 0 && leader) begin_taking(args, num_works);
//@ end
        ++nth;
    }
    if (leader) push_plan(smem, plans, count, -1, 0, -1);
}

// -- Loader: one thread starts all loads --------------------------------------------------------------------------

static __device__ __forceinline__ void load_q(const LoomArgs *args, const Work *work, unsigned smem, int nth) {
    const int buffer = nth % q_buffers;
    barrier_wait(bar_q_empty(smem, buffer), (nth / q_buffers & 1) ^ 1);
    barrier_expect(bar_q_full(smem, buffer), chunks_qk * tile_q * 128);
#pragma unroll
    for (int i = 0; i < loads_qk; ++i) {
        load_box(smem + smem_q + buffer * q_bytes + i * tile_q * 128, &args->q_map, 64 * i, work->tile * tile_q, work->head, work->batch,
                 bar_q_full(smem, buffer));
    }
}

// Tells the consumers that there is no further work.
static __device__ __forceinline__ void end_works(unsigned smem, Work *works, int nth) {
    const int buffer = nth % q_buffers;
    barrier_wait(bar_q_empty(smem, buffer), (nth / q_buffers & 1) ^ 1);
    works[nth % work_places].tile = -1;
    barrier_arrive(bar_q_full(smem, buffer));
}

//@ part("kv_tile")

//@ local values = has_mask and ", values" or ""
//@ local values_of_type = has_mask and ", Values *values" or ""
//@ text("static __device__ __forceinline__ void load_values_of(unsigned smem, const LoomArgs *args, const Work *work, const Tile *tiles, Stage stage" .. values_of_type .. ") {")
    barrier_wait(bar_v_empty(smem, stage.index), stage.parity);
//@ if has_mask then
    const unsigned classes = tiles[stage.index].what & 0xff;
    values[stage.index].what = classes == 0 || classes == all_full ? pass_by : searching;
//@ end
    load_values(smem, args, work, tiles[stage.index].index, stage.index);
}

//@ text("static __device__ __forceinline__ void load(const LoomArgs *args, unsigned smem, const Plan *plans, Tile *tiles, Work *works" .. values_of_type .. (capped and ", unsigned *far" or "") .. ") {")
    Stage stage = {0, 1};
    int nth = -1;
    for (unsigned count = 0;; ++count) {
        const int place = count % plan_places;
        barrier_wait(bar_plan_full(smem, place), count / plan_places & 1);
        const Plan plan = plans[place];
        barrier_arrive(bar_plan_empty(smem, place));
        if (plan.nth < 0) break;
        nth = plan.nth;
        const Work *work = &works[nth % work_places];
        barrier_wait(bar_k_empty(smem, stage.index), stage.parity);
        tiles[stage.index] = plan.tile;
//@ if capped then
        if (atomicExch(far, 0u)) tiles[stage.index].what |= maybe_far;
//@ end
        load_keys(smem, args, work, plan.tile.index, stage.index);
        // values are needed a tile later
        if (plan.tile.what & is_first) {
            load_q(args, work, smem, nth);
        } else {
            //@ text("load_values_of(smem, args, work, tiles, stage_before(stage)" .. values .. ");")
        }
        if (plan.tile.what & is_last) {
            //@ text("load_values_of(smem, args, work, tiles, stage" .. values .. ");")
        }
        stage_next(&stage);
    }
    end_works(smem, works, nth + 1);
//@ if has_mask then
    barrier_wait(bar_v_empty(smem, stage.index), stage.parity);
    values[stage.index].what = search_ends;
    barrier_arrive(bar_v_full(smem, stage.index));
//@ end
}

// -- Consumers: a warpgroup has 64 queries ----------------------------------------------------------------------

// What stays the same for a consumer, but for `row`.
typedef struct Consumer {
    const LoomArgs *args;
    const Tile *tiles;
//@ if has_mask then
    const Values *values;
//@ end
//@ if own_class then
    unsigned *spoilt;         // this warp's
//@ end
    unsigned smem;
    unsigned k, v;            // operands in stage 0
    float to_log2;            // from units of S to powers of 2
    int warpgroup;
    int row;                  // of the sequence, this thread's first; the second is row + 8
//@ if capped then
    Cap cap;
//@ elseif has_score then
    Terms terms;              // of the score, for the present work
//@ end
} Consumer;

//@ local q_type = c.q_registers == 1 and "const unsigned (&q)[depth_qk / 4]" or "unsigned q"
//@ text("static __device__ __forceinline__ void start_qk(float (&s)[tile_k / 2], " .. q_type .. ", unsigned k) {")
    wgmma_fence();
    multiply_qk(s, q, k);
    wgmma_commit();
}

static __device__ __forceinline__ void start_pv(float (&o)[depth_v / 2], const unsigned (&p)[tile_k / 4], unsigned v) {
    wgmma_fence();
    multiply_pv(o, p, v);
    wgmma_commit();
}

static __device__ __forceinline__ unsigned keys_in(const Consumer *consumer, Stage stage) { return consumer->k + stage.index * (k_bytes / 16); }
static __device__ __forceinline__ unsigned values_in(const Consumer *consumer, Stage stage) { return consumer->v + stage.index * (v_bytes / 16); }

static __device__ __forceinline__ unsigned class_of(const Consumer *consumer, unsigned what) { return what >> 2 * consumer->warpgroup & 3; }

// Whether a tile is full for all warpgroups.
static __device__ __forceinline__ bool is_full(unsigned what) { return (what & 0xff) == all_full; }

//@ if has_mask then
// Whether the searchers have found something in the values of a tile, if they have looked.
static __device__ __forceinline__ bool search_found(const Consumer *consumer, bool searched, Stage stage) {
    unsigned found = 0;
    if (searched) {
        barrier_wait(bar_v_full(consumer->smem, stage.index), stage.parity);  // so the stage's search before has ended: not all wait for it
        barrier_wait(bar_checked(consumer->smem, stage.index), stage.parity);
#pragma unroll
        for (int i = 0; i < searchers; ++i) found |= in_lane_0(&consumer->values[stage.index].found[i]);
    }
    // A vote: the compiler knows that warps stay together, and keeps operands in uniform registers.
    return __any_sync(~0u, found);
}

//@ end
//@ if own_class then
// After O += P V of a tile that is full for this warpgroup but not for all: what was not finite in V may have been cleared
// before the product read it. All rows have seen it: the warp notes the columns until the work ends.
static __device__ __forceinline__ void note_spoilt(const Consumer *consumer, unsigned what, Stage stage) {
    if (!search_found(consumer, class_of(consumer, what) == 2 && !is_full(what), stage)) return;
    const Values *values = &consumer->values[stage.index];
    const int word = threadIdx.x % 32;
    if (word < 8) consumer->spoilt[word] |= values->nonfinite[0].columns[word] | values->nonfinite[1].columns[word];
    __syncwarp();
}

// At the end of a work: spoils what was noted.
static __device__ __forceinline__ void spoil_noted(float (&o)[depth_v / 2], const Consumer *consumer) {
    const int word = threadIdx.x % 32;
    if (!__any_sync(~0u, word < 8 && consumer->spoilt[word])) return;
    spoil(o, consumer->spoilt, consumer->spoilt, 3);
    __syncwarp();
    if (word < 8) consumer->spoilt[word] = 0;
    __syncwarp();
}

//@ end
//@ if capped then
// Scores are powers of 2.
static __device__ __forceinline__ float score_unit(const LoomArgs *args) { return ln_2; }

//@ elseif not has_score then
// Scores are S as it is.
static __device__ __forceinline__ float score_unit(const LoomArgs *args) { return args->scale; }

//@ end
//@ if capped then
// Tells the loader, which tells it with the tiles that it loads next: a guess, by which they are taken one way or the other with
// the same result. By `asm`: with a pointer operands leave the uniform datapath (nvrtc 13.0).
static __device__ __forceinline__ void expect_far(const Consumer *consumer) {
    if (threadIdx.x % 32 == 0) asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(consumer->smem + smem_far), "r"(1) : "memory");
}

//@ end
// What a thread keeps of its two rows.
typedef struct Rows {
    float reference[2];  // in units of S, or of the score: exponents of P are relative to it
    float base[2];       // the same as a part of exponents, see exponent_base
    float sum[2];        // this thread's part of the sum of P
} Rows;

// Ends the rows of a work: writes LSE; what O is to be multiplied by.
static __device__ __forceinline__ void end_rows(const LoomArgs *args, const Work *work, const Rows *rows, int row, float (&inverse)[2]) {
    float *lse = args->lse + work->batch * args->lse_stride_batch + work->head * args->lse_stride_head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total = rows->sum[half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        inverse[half] = total == 0 ? 0 : __fdividef(1, total);
        if (args->lse && threadIdx.x % 4 == 0 && row + 8 * half < work->seq_q) {
            const float reference = __fmul_rn(rows->reference[half], score_unit(args));
            lse[(row + 8 * half) * args->lse_stride_seq] =
                total == 0 ? __int_as_float(0xff800000) : reference + log2_approx(total * unit) * ln_2;
        }
    }
}

//@ if rows_end_early then
// O += P V of a tile that no full one follows; with the last of a work runs what ends its rows.
static __device__ __forceinline__ void finish_pv(float (&o)[depth_v / 2], const unsigned (&p)[tile_k / 4], const Consumer *consumer, unsigned what, Stage stage,
                                                 const Work *work, const Rows *rows, float (&inverse)[2]) {
//@ else
// O += P V of a tile that no full one follows.
static __device__ __forceinline__ void finish_pv(float (&o)[depth_v / 2], const unsigned (&p)[tile_k / 4], const Consumer *consumer, Stage stage) {
//@ end
    barrier_wait(bar_v_full(consumer->smem, stage.index), stage.parity);
    start_pv(o, p, values_in(consumer, stage));
//@ if rows_end_early then
    if (what & is_last) end_rows(consumer->args, work, rows, consumer->row, inverse);
//@ end
    wgmma_wait<0>();
//@ if own_class then
    note_spoilt(consumer, what, stage);
//@ end
    if (threadIdx.x % 32 == 0) barrier_arrive(bar_v_empty(consumer->smem, stage.index));
}

//@ local asks_elements = has_mask and (not exact_rows or bounds)
//@ local terms = asks_elements and (row_terms or column_terms)
//@ if asks_elements then
//@ if terms then
// What the mask makes of the rows and columns of a tile. A column's terms are made by one lane, while S is computed.
typedef struct SideTerms {
//@ if row_terms then
    RowTerms rows[2];  // of this thread's
//@ end
//@ if column_terms then
    ColumnTerms columns[(tile_k + 31) / 32];  // the lane-th of the tile, and every 32nd from there
//@ end
} SideTerms;

// `first` is the tile's first column.
static __device__ __forceinline__ SideTerms side_terms(const LoomArgs *args, const Work *work, int row, int first) {
    SideTerms terms;
//@ if row_terms then
    terms.rows[0] = row_terms(args, work, work->q_start + row);
    terms.rows[1] = row_terms(args, work, work->q_start + row + 8);
//@ end
//@ if column_terms then
#pragma unroll
    for (int i = 0; i < (tile_k + 31) / 32; ++i) terms.columns[i] = column_terms(args, work, work->k_start + first + 32 * i + (int)threadIdx.x % 32);
//@ end
    return terms;
}

//@ end
//@ if exact_rows then
// Sets what the mask hides of a partial tile, beside the ends of the rows' spans, to -inf. row and column are those of this
// thread's first element.
//@ else
// Sets what is not seen of a partial tile to -inf. row and column are those of this thread's first element.
//@ end
//@ text("static __device__ __forceinline__ void hide_by_mask(float (&s)[tile_k / 2], const LoomArgs *args, const Work *work, int row, int column" .. (terms and ", const SideTerms *terms" or "") .. ") {")
    const int q = work->q_start + row, k = work->k_start + column;
//@ if not exact_rows then
    const int end = work->seq_k - column;
//@ end
//@ local of_element = (row_terms and "&terms->rows[half], " or "") .. (column_terms and "&columns, " or "")
#pragma unroll
    for (int i = 0; i < tile_k / 4; ++i) {
        const int of_k = i / 2 * 8 + i % 2;
//@ if column_terms then
        const ColumnTerms columns = terms_of_lane(terms->columns[of_k / 32], of_k % 32 + threadIdx.x % 4 * 2);
//@ end
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            //@ text("const bool seen = " .. (exact_rows and "" or "of_k < end & ") .. "visible_of(args, work, " .. of_element .. "q + 8 * half, k + of_k);")
            if (!seen) s[i / 2 * 4 + 2 * half + i % 2] = __int_as_float(0xff800000);
        }
    }
}

//@ end
//@ if has_spans then
//@ if exact_rows then
// The columns that one row sees.
static __device__ __forceinline__ void keys_of_row(const LoomArgs *args, const Work *work, int row, Span (&keys)[num_spans]) {
//@ else
// The columns that one row sees; false where they are not known to be all.
static __device__ __forceinline__ bool keys_of_row(const LoomArgs *args, const Work *work, int row, Span (&keys)[num_spans]) {
//@ end
    Span inner[num_spans];
    visible_keys(args, work, work->q_start + row, work->q_start + row, keys, inner);
//@ if not exact_rows then
    bool exact = true;
//@ end
#pragma unroll
    for (int i = 0; i < num_spans; ++i) {
//@ if not exact_rows then
        exact = exact && (keys[i].lo > keys[i].hi || (keys[i].lo == inner[i].lo && keys[i].hi == inner[i].hi));
//@ end
        keys[i].lo -= work->k_start;
        keys[i].hi -= work->k_start;
    }
//@ if not exact_rows then
    return exact;
//@ end
}

// The same for rows that see one span of columns: compares with constants, with those ends that lie in the tile.
static __device__ __forceinline__ void hide_by_span(float (&s)[tile_k / 2], const Span (&keys)[2], int column) {
    const bool from_first = __all_sync(~0u, keys[0].lo <= column && keys[1].lo <= column);
    const bool to_last = __all_sync(~0u, keys[0].hi - column >= tile_k - 7 && keys[1].hi - column >= tile_k - 7);
    if (!to_last) {
#pragma unroll
        for (int i = 0; i < tile_k / 2; ++i) {
            const int k = i / 4 * 8 + i % 2;
            if (k > keys[i / 2 % 2].hi - column) s[i] = __int_as_float(0xff800000);
        }
    }
    if (from_first) return;
#pragma unroll
    for (int i = 0; i < tile_k / 2; ++i) {
        const int k = i / 4 * 8 + i % 2;
        if (k < keys[i / 2 % 2].lo - column) s[i] = __int_as_float(0xff800000);
    }
}

static __device__ __forceinline__ void hide_by_spans(float (&s)[tile_k / 2], const Span (&keys)[2][num_spans], int column) {
//@ if num_spans == 1 then
    const Span of_rows[2] = {keys[0][0], keys[1][0]};
    hide_by_span(s, of_rows, column);
//@ else
    Span met[2] = {{1, 0}, {1, 0}};  // most rows meet one span in a tile
    bool one = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        bool some = false;
#pragma unroll
        for (int n = 0; n < num_spans; ++n) {
            if (keys[half][n].lo >= column + tile_k || keys[half][n].hi < column) continue;
            one = one && !some;
            some = true;
            met[half] = keys[half][n];
        }
    }
    if (__all_sync(~0u, one)) {
        hide_by_span(s, met, column);
        return;
    }
#pragma unroll
    for (int i = 0; i < tile_k / 2; ++i) {
        const int k = i / 4 * 8 + i % 2;
        bool seen = false;
#pragma unroll
        for (int n = 0; n < num_spans; ++n) seen = seen || (keys[i / 2 % 2][n].lo - column <= k && k <= keys[i / 2 % 2][n].hi - column);
        if (!seen) s[i] = __int_as_float(0xff800000);
    }
//@ end
}

//@ end
//@ if has_score and not capped then
// The score of all elements, in place of S; q and k are the positions of this thread's first.
static __device__ __forceinline__ void score_tile(float (&s)[tile_k / 2], const Consumer *consumer, const Work *work, int q, int k) {
    const LoomArgs *args = consumer->args;
    const Terms *terms = &consumer->terms;
//@ if one_tanh then
    float farthest = 0;  // of what tanh is taken of; an element that is near 0 has the same bits whether all are or not
#pragma unroll
    for (int i = 0; i < tile_k / 2; ++i) {
        farthest = fmaxf(farthest, fabsf(tanh_argument(args, work, terms, q, k, i / 2 % 2 * 8, i / 4 * 8 + i % 2, s[i])));
    }
    if (__any_sync(~0u, farthest >= tanh_near)) {
#pragma unroll
        for (int i = 0; i < tile_k / 2; ++i) {
            const float x = tanh_argument(args, work, terms, q, k, i / 2 % 2 * 8, i / 4 * 8 + i % 2, s[i]);
            s[i] = score(args, work, terms, q, k, i / 2 % 2 * 8, i / 4 * 8 + i % 2, s[i], any_tanh(x));
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < tile_k / 2; ++i) {
        const float x = tanh_argument(args, work, terms, q, k, i / 2 % 2 * 8, i / 4 * 8 + i % 2, s[i]);
        s[i] = score(args, work, terms, q, k, i / 2 % 2 * 8, i / 4 * 8 + i % 2, s[i], tanh_of_near(x));
    }
//@ else
#pragma unroll
    for (int i = 0; i < tile_k / 2; ++i) s[i] = score(args, work, terms, q, k, i / 2 % 2 * 8, i / 4 * 8 + i % 2, s[i]);
//@ end
}

//@ end
//@ local of_cap, cap = capped and ", const Cap *cap, bool near, bool hidden" or "", capped and ", cap, near, hidden" or ""
//@ if capped then
// What is added to a score to make an exponent of P. Where it is rounded, so it is for the whole row.
static __device__ __forceinline__ float exponent_base(float reference, float to_log2) { return -reference * to_log2 - headroom; }
//@ else
// What is added to a scaled S to make an exponent of P; NaN where that is not exact enough, so that the row's sum tells.
static __device__ __forceinline__ float exponent_base(float reference, float to_log2) {
    const float scaled = __fmul_rn(reference, to_log2);
    return fabsf(scaled) < most_exact ? -scaled - headroom : __int_as_float(0x7fc00000);
}
//@ end

// Moves the references of the rows that may to their maximum in this tile, if that is larger. O is to be multiplied by
// `rescale` where the warp is told that one moved.
//@ text("static __device__ __forceinline__ bool move_references(const float (&s)[tile_k / 2], Rows *rows, const bool (&may_move)[2], float (&rescale)[2],")
//@ text("                                                       float to_log2" .. (capped and ", const Cap *cap, bool hidden" or "") .. ") {")
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float highest = s[2 * half];
#pragma unroll
        for (int j = 0; j < tile_k / 8; ++j) highest = fmaxf(highest, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
//@ if capped then
        if (!hidden || highest > __int_as_float(0xff800000)) highest = any_exponent(cap, highest, 0);
//@ end
        const float before = rows->reference[half];
        const bool moves = may_move[half] && highest > before;
        if (moves) {
            rows->reference[half] = highest;
            rows->base[half] = exponent_base(highest, to_log2);
        }
        rescale[half] = moves ? exp2_approx((before - highest) * to_log2) : 1;
        rows->sum[half] = __fmul_rn(rows->sum[half], rescale[half]);
        moved = moved || (moves && before != unset);  // before: O is still 0
    }
    return __any_sync(~0u, moved);
}

static __device__ __forceinline__ void rescale_o(float (&o)[depth_v / 2], const float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < depth_v / 2; ++i) o[i] *= rescale[i / 2 % 2];
}

//@ if capped then
// P of a tile and this thread's part of its row sums. `near`: all elements are near, or `bits` tells; `hidden`: an S of -inf
// stands for what a mask hides.
static __device__ __forceinline__ void exponentials(const float (&s)[tile_k / 2], unsigned (&p)[tile_k / 4], const Rows *rows, const Cap *cap, bool near,
                                                    bool hidden, float (&part)[2], unsigned *bits) {
//@ else
// P of a tile and this thread's part of its row sums. An exact row's reference is subtracted before the scale multiplies: at
// 1e11 a rounded product would no longer cancel. The others get the same bits as the first time.
static __device__ __forceinline__ void exponentials(const float (&s)[tile_k / 2], unsigned (&p)[tile_k / 4], const Rows *rows, float to_log2,
                                                    const bool (&exact)[2], float (&part)[2]) {
//@ end
#pragma unroll
    for (int half = 0; half < 2; ++half) {
//@ if not capped then
        const float subtracted = exact[half] ? rows->reference[half] : 0, base = exact[half] ? -headroom : rows->base[half];
//@ end
        part[half] = 0;
#pragma unroll
        for (int j = 0; j < tile_k / 8; ++j) {
            float e[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float x = s[4 * j + 2 * half + i];
//@ if capped then
                e[i] = near ? near_exponent(cap, x, rows->base[half], bits) : any_exponent(cap, x, rows->base[half]);
                if (!near && hidden && x == __int_as_float(0xff800000)) e[i] = x;
//@ else
                e[i] = fmaf(x - subtracted, to_log2, base);
//@ end
            }
            const float a = exp2_approx(e[0]), b = exp2_approx(e[1]);
            part[half] += a + b;
            p[2 * j + half] = pack(a, b);
        }
    }
}

// Whether a row's condition holds in one of its four threads.
static __device__ __forceinline__ bool any_of_row(bool condition) {
    const unsigned quad = __ballot_sync(~0u, condition) >> (threadIdx.x % 32 & 28);
    return quad & 15;
}

// Exponentials of a tile after those of `may_move` moved, or, where none may yet, those of rows whose sums then tell that
// they have to. Other rows keep what they have, bit by bit.
//@ text("static __device__ __forceinline__ void settle(float (&o)[depth_v / 2], float (&s)[tile_k / 2], unsigned (&p)[tile_k / 4], Rows *rows,")
//@ text("                                              float to_log2, bool moves, bool (&may_move)[2], float (&part)[2]" .. of_cap .. ") {")
//@ if capped then
    unsigned bits = 0;  // not asked for
//@ end
#pragma unroll 1  // the compiler is to see the exponentials once
    for (;;) {
//@ if capped then
        renew(s);
//@ end
        float rescale[2];
        //@ text("if (moves && move_references(s, rows, may_move, rescale, to_log2" .. (capped and ", cap, hidden" or "") .. ")) rescale_o(o, rescale);")
        //@ text("exponentials(s, p, rows" .. (capped and cap .. ", part, &bits" or ", to_log2, may_move, part") .. ");")
        const bool over[2] = {!(part[0] < most_p), !(part[1] < most_p)};
        if (moves || !__any_sync(~0u, over[0] || over[1])) break;
        moves = true;
        may_move[0] = any_of_row(over[0]);
        may_move[1] = any_of_row(over[1]);
    }
}

// Waits for the keys of a tile; what is told of it.
static __device__ __forceinline__ unsigned await_tile(const Consumer *consumer, Stage stage) {
    barrier_wait(bar_k_full(consumer->smem, stage.index), stage.parity);
    return from_lane_0(in_lane_0(&consumer->tiles[stage.index].what));
}

static __device__ __forceinline__ int index_of_tile(const Consumer *consumer, Stage stage) {
    return from_lane_0(in_lane_0((const unsigned *)&consumer->tiles[stage.index].index));
}

// A tile that no row of the warpgroup sees.
static __device__ __forceinline__ void skip_tile(const Consumer *consumer, Stage stage) {
//@ if c.ping_pong == 1 then
    turn_take(consumer->warpgroup);
    turn_give(consumer->warpgroup);
//@ end
    barrier_wait(bar_v_full(consumer->smem, stage.index), stage.parity);
    __syncwarp();  // a lane that still waited would miss the phase once others go on
    if (threadIdx.x % 32 == 0) {
        barrier_arrive(bar_k_empty(consumer->smem, stage.index));
        barrier_arrive(bar_v_empty(consumer->smem, stage.index));
    }
}

// Mask of a tile of class 1 or 3.
//@ text("static __device__ __forceinline__ void hide_unseen(float (&s)[tile_k / 2], const Consumer *consumer, const Work *work, int column, unsigned of_class" .. (terms and ", const SideTerms *terms" or "") .. ") {")
//@ local by_mask = "hide_by_mask(s, consumer->args, work, consumer->row, column" .. (terms and ", terms" or "") .. ");"
//@ if not has_spans then
    //@ text(by_mask)
//@ else
//@     if bounds and exact_rows then
    //@ text("if (of_class == 1) " .. by_mask)
//@     elseif bounds then
    if (of_class == 1) {
        //@ text(by_mask)
        return;
    }
//@     end
    Span keys[2][num_spans];
//@     if exact_rows then
    keys_of_row(consumer->args, work, consumer->row, keys[0]);
    keys_of_row(consumer->args, work, consumer->row + 8, keys[1]);
//@     else
    const bool exact = keys_of_row(consumer->args, work, consumer->row, keys[0]) & keys_of_row(consumer->args, work, consumer->row + 8, keys[1]);
    if (!__all_sync(~0u, exact)) {
        //@ text(by_mask)
        return;
    }
//@     end
    hide_by_spans(s, keys, column);
//@ end
}

//@ for _, alone in ipairs {true, false} do
//@ local overlap = not alone and c.p_sets == 2
//@ if alone then
// A tile with no product pending: the first that the warpgroup sees of a work, and every one that is not full. All that
// concerns a row is the same as in full_tile, so that its bits do not depend on which of them it meets.
//@ text("static __device__ __forceinline__ void lone_tile(float (&o)[depth_v / 2], unsigned (&p)[tile_k / 4],")
//@ elseif overlap then
// A full tile after another tile: starts S of this one and O += P V of the one before, which runs under the exponentials.
// Returns what is told of it; moves on to the next stage.
//@ text((capped and "template <bool far> " or "") .. "static __device__ __forceinline__ unsigned full_tile(float (&o)[depth_v / 2], unsigned (&p)[tile_k / 4], const unsigned (&p_before)[tile_k / 4],")
//@ else
// A full tile after another tile: S of this one and O += P V of the one before, then the exponentials. Returns what is
// told of it; moves on to the next stage.
//@ text((capped and "template <bool far> " or "") .. "static __device__ __forceinline__ unsigned full_tile(float (&o)[depth_v / 2], unsigned (&p)[tile_k / 4],")
//@ end
//@ text("                                                 Rows *rows, " .. q_type .. ", const Consumer *consumer, const Work *work, " .. (alone and "unsigned what, Stage stage" or own_class and "unsigned what_before, Stage *next" or "Stage *next") .. ") {")
    const unsigned smem = consumer->smem;
    const float to_log2 = consumer->to_log2;
//@ if not alone then
    const Stage stage = *next, before = stage_before(stage);
    barrier_wait(bar_k_full(smem, stage.index), stage.parity);
//@ end
    float s[tile_k / 2];
//@ if c.ping_pong == 1 then
    turn_take(consumer->warpgroup);
//@ end
    start_qk(s, q, keys_in(consumer, stage));
//@ if not alone then
    barrier_wait(bar_v_full(smem, before.index), before.parity);
//@     if overlap then
    start_pv(o, p_before, values_in(consumer, before));
//@     else
    start_pv(o, p, values_in(consumer, before));
//@     end
//@ end
//@ if c.ping_pong == 1 then
    turn_give(consumer->warpgroup);
//@ end
//@ if not alone then
    const unsigned told = in_lane_0(&consumer->tiles[stage.index].what);
//@ end
//@ if alone or has_score and not capped then
    const int tile = index_of_tile(consumer, stage);
    const int column = tile * tile_k + threadIdx.x % 4 * 2;
//@ end
//@ if has_score and not capped then
    const int of_q = work->q_start + consumer->row, of_k = work->k_start + column;  // positions of this thread's first element
//@ end
//@ if alone and terms then
    SideTerms terms;
    //@ text("if (class_of(consumer, what) " .. (exact_rows and "==" or "&") .. " 1) terms = side_terms(consumer->args, work, consumer->row, tile * tile_k);")
//@ end
//@ if overlap then
    wgmma_wait<1>();
    if (threadIdx.x % 32 == 0) barrier_arrive(bar_k_empty(smem, stage.index));
//@ else
    wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) {
        barrier_arrive(bar_k_empty(smem, stage.index));
//@     if not alone then
        barrier_arrive(bar_v_empty(smem, before.index));
//@     end
    }
//@ end
//@ if not alone then
    const unsigned what = from_lane_0(told);
    stage_next(next);
    next->index = uniform(next->index);
//@ end
//@ if capped then
    const Cap *cap = &consumer->cap;
//@     if alone then
    const bool far = has_far(cap, s);
    if (far) {
        unhide(s);
        expect_far(consumer);
    }
//@     end
//@ elseif has_score then
    score_tile(s, consumer, work, of_q, of_k);
//@ end
    float part[2];
//@ if alone then
    //@ text("if (class_of(consumer, what) & 1) hide_unseen(s, consumer, work, column, class_of(consumer, what)" .. (terms and ", &terms" or "") .. ");")
    bool moves = __all_sync(~0u, rows->reference[0] == unset && rows->reference[1] == unset);  // of a work's first tile
    bool may_move[2] = {moves, moves};
//@     if capped then
    if (far) {
        settle(o, s, p, rows, to_log2, moves, may_move, part, cap, false, true);
    } else {
        settle(o, s, p, rows, to_log2, moves, may_move, part, cap, true, true);
    }
//@     else
    settle(o, s, p, rows, to_log2, moves, may_move, part);
//@     end
//@ else
    bool may_move[2] = {false, false};
//@     if capped then
    bool again = far;
    if (!far) {
        unsigned bits = 0;
        exponentials(s, p, rows, cap, true, false, part, &bits);
        again = __any_sync(~0u, bits >= cap->limit || !(part[0] < most_p) || !(part[1] < most_p));
    }
//@     else
    exponentials(s, p, rows, to_log2, may_move, part);
    const bool over[2] = {!(part[0] < most_p), !(part[1] < most_p)};
    const bool again = __any_sync(~0u, over[0] || over[1]);
//@     end
//@     if overlap then
    keep_order(bar_v_full(smem, before.index), before.parity);
    wgmma_wait<0>();
//@         if own_class then
    note_spoilt(consumer, what_before, before);
//@         end
    if (threadIdx.x % 32 == 0) barrier_arrive(bar_v_empty(smem, before.index));
//@     end
    if (again) {
//@     if capped then
        if (!far || has_far(cap, s)) expect_far(consumer);
        settle(o, s, p, rows, to_log2, false, may_move, part, cap, false, false);
//@     else
        may_move[0] = any_of_row(over[0]);
        may_move[1] = any_of_row(over[1]);
        settle(o, s, p, rows, to_log2, true, may_move, part);
//@     end
    }
//@ end
    rows->sum[0] += part[0];
    rows->sum[1] += part[1];
//@ if alone and has_mask then
//@     if own_class then
    const bool searched = class_of(consumer, what) & 1;
//@     else
    const bool searched = !is_full(what);
//@     end
    if (search_found(consumer, searched, stage)) {
        const Values *values = &consumer->values[stage.index];
        spoil(o, values->nonfinite[0].columns, values->nonfinite[1].columns,
              rows_that_see(consumer->args, work, consumer->row, tile * tile_k, values));
    }
//@ end
//@ if not alone then
    return what;
//@ end
}

//@ end
//@ if c.o_shared == 1 then
// Writes O through shared memory: each warp copies its 16 rows, in the swizzle of boxes.
static __device__ __forceinline__ void store_o(const float (&o)[depth_v / 2], const float (&inverse)[2], const Consumer *consumer, const Work *work) {
    const int lane = threadIdx.x % 32, first_row = 64 * consumer->warpgroup + 16 * (threadIdx.x / 32 % 4);
    const unsigned boxes = consumer->smem + smem_o + first_row * 128;
    if (lane == 0) stores_read();  // those of the work before
    __syncwarp();
#pragma unroll
    for (int j = 0; j < depth_v / 8; j += 2) {  // 16 columns
        const unsigned at = boxes + j / 8 * (tile_q * 128) + lane % 16 * 128 + (((j + lane / 16) % 8 ^ lane % 8) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(at), "r"(pack(o[4 * j] * inverse[0], o[4 * j + 1] * inverse[0])),
                     "r"(pack(o[4 * j + 2] * inverse[1], o[4 * j + 3] * inverse[1])),
                     "r"(pack(o[4 * j + 4] * inverse[0], o[4 * j + 5] * inverse[0])),
                     "r"(pack(o[4 * j + 6] * inverse[1], o[4 * j + 7] * inverse[1])) : "memory");
    }
    publish_shared();
    __syncwarp();
    if (lane > 0) return;
#pragma unroll
    for (int i = 0; i < chunks_v; ++i) {
        store_box(&consumer->args->o_map, boxes + i * tile_q * 128, 64 * i, work->tile * tile_q + first_row, work->head, work->batch);
    }
    stores_commit();
}
//@ else
// Writes O. The four threads of a row exchange what they have of 32 columns, so that each writes 8 that lie side by side.
static __device__ __forceinline__ void store_o(const float (&o)[depth_v / 2], const float (&inverse)[2], const Consumer *consumer, const Work *work) {
    const LoomArgs *args = consumer->args;
    const int part = threadIdx.x % 4, row = consumer->row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned short *to = args->o + work->batch * args->o_stride_batch + work->head * args->o_stride_head + (row + 8 * half) * args->o_stride_seq + 8 * part;
        unsigned pairs[(depth_v + 31) / 32 * 4] = {0};
#pragma unroll
        for (int i = 0; i < depth_v / 8; ++i) pairs[i] = pack(o[4 * i + 2 * half] * inverse[half], o[4 * i + 2 * half + 1] * inverse[half]);
#pragma unroll
        for (int step = 1; step <= 2; step *= 2)
#pragma unroll
            for (int i = 0; i < depth_v / 8; ++i) {
                if (i & step) continue;
                const unsigned theirs = __shfl_xor_sync(~0u, part & step ? pairs[i] : pairs[i + step], step);
                if (part & step) {
                    pairs[i] = theirs;
                } else {
                    pairs[i + step] = theirs;
                }
            }
#pragma unroll
        for (int i = 0; i < depth_v / 8; i += 4) {
            if (row + 8 * half >= work->seq_q || 8 * (i + part) >= head_dim_v) continue;
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                         ::"l"(to + 8 * i), "r"(pairs[i]), "r"(pairs[i + 1]), "r"(pairs[i + 2]), "r"(pairs[i + 3]) : "memory");
        }
    }
}
//@ end

//@ text("static __device__ __forceinline__ void consume(const LoomArgs *args, unsigned smem, const Tile *tiles, const Work *works" .. (has_mask and ", const Values *values" or "") .. (own_class and ", unsigned *spoilt" or "") .. ") {")
    const int warpgroup = uniform(threadIdx.x / 128) - 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    Consumer consumer;
    consumer.args = args;
    consumer.tiles = tiles;
    consumer.smem = smem;
    consumer.k = operand(smem + smem_k, 1);
    consumer.v = operand(smem + smem_v, tile_k * 8);
//@ if capped then
    consumer.to_log2 = 1;
    consumer.cap = cap_of(args);
//@ else
    consumer.to_log2 = score_unit(args) * log2_e;
//@ end
    consumer.warpgroup = warpgroup;
//@ if has_mask then
    consumer.values = values;
//@ end
//@ if own_class then
    consumer.spoilt = spoilt + 8 * (4 * warpgroup + warp);
    if (lane < 8) consumer.spoilt[lane] = 0;
    __syncwarp();
//@ end
    Stage stage = {0, 0};
//@ if c.ping_pong == 1 then
    if (warpgroup == warpgroups - 1) turn_give(warpgroup);  // the first warpgroup begins
//@ end
    for (int nth = 0;; ++nth) {
        // [1] queries
        const int buffer = uniform(nth % q_buffers);
        barrier_wait(bar_q_full(smem, buffer), nth / q_buffers & 1);
        const int tile_of_q = works[nth % work_places].tile;
        if (uniform(tile_of_q) < 0) break;
        consumer.row = tile_of_q * tile_q + 64 * warpgroup + 16 * warp + lane / 4;
        stage.index = uniform(stage.index);
//@ if c.q_registers == 1 then
        unsigned q[depth_qk / 4];
#pragma unroll
        for (int i = 0; i < depth_qk / 16; ++i) {
            const unsigned at = smem + smem_q + buffer * q_bytes + 8192 * warpgroup + i / 4 * (tile_q * 128) + (16 * warp + lane % 16) * 128 +
                                ((i % 4 * 2 + lane / 16 ^ lane % 8) << 4);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(q[4 * i]), "=r"(q[4 * i + 1]), "=r"(q[4 * i + 2]), "=r"(q[4 * i + 3]) : "r"(at) : "memory");
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(bar_q_empty(smem, buffer));
//@ else
        const unsigned q = uniform(operand(smem + smem_q + buffer * q_bytes + 8192 * warpgroup, 1));
//@ end
        float o[depth_v / 2];    // sum of P V: [4 * j + 2 * half + e] is row + 8 * half, column 8 * j + lane % 4 * 2 + e
        unsigned p[tile_k / 4];  // P of the tile before, in pairs
        const float base = exponent_base(unset, consumer.to_log2);
        Rows rows = {{unset, unset}, {base, base}, {0, 0}};
#pragma unroll
        for (int i = 0; i < depth_v / 2; ++i) o[i] = 0;

        // [2] tiles from the last key back
        const Work *of_work = &works[nth % work_places];
//@ if has_score and not capped then
        consumer.terms = score_terms(args, of_work);
//@ end
        unsigned what;
        float inverse[2];  // what O is to be multiplied by
//@ if c.p_sets == 2 then
        unsigned p_other[tile_k / 4];  // P of neighbours has places of its own, since one is read while the other is made
//@ end
        do {
            what = await_tile(&consumer, stage);
            const bool unseen = class_of(&consumer, what) == 0;
            if (unseen) {
                skip_tile(&consumer, stage);
//@ if c.q_registers == 0 then
                if (what & is_last && lane == 0) barrier_arrive(bar_q_empty(smem, buffer));
//@ end
//@ if rows_end_early then
                if (what & is_last) end_rows(args, of_work, &rows, consumer.row, inverse);
//@ end
            } else {
                lone_tile(o, p, &rows, q, &consumer, of_work, what, stage);
            }
            stage_next(&stage);
            stage.index = uniform(stage.index);
            if (unseen) continue;
            for (;;) {  // full tiles that follow
//@ for _, names in ipairs(c.p_sets == 2 and {{"p", "p_other, p"}, {"p_other", "p, p_other"}} or {{"p", "p"}}) do
//@ local next_is_full = own_class and "class_of(&consumer, what >> next_class) == 2" or "is_full(what >> next_class)"
//@ local arguments = "(o, " .. names[2] .. ", &rows, q, &consumer, of_work, " .. (own_class and "what, " or "") .. "&stage);"
//@ if capped then
//@ if c.p_sets == 1 then
                //@ text("while (" .. next_is_full .. " && !(what & maybe_far)) what = full_tile<false>" .. arguments)
                //@ text("if (" .. next_is_full .. ") {")
//@ else
                //@ text("if (" .. next_is_full .. " && !(what & maybe_far)) {")
                    //@ text("what = full_tile<false>" .. arguments)
                //@ text("} else if (" .. next_is_full .. ") {")
//@ end
                    //@ text("what = full_tile<true>" .. arguments)
//@ else
                //@ text("if (" .. next_is_full .. ") {")
                    //@ text("what = full_tile" .. arguments)
//@ end
                } else {
//@ if c.q_registers == 0 then
                    if (what & is_last && lane == 0) barrier_arrive(bar_q_empty(smem, buffer));
//@ end
                    //@ text("finish_pv(o, " .. names[1] .. ", &consumer, " .. (rows_end_early and "what, stage_before(stage), of_work, &rows, inverse" or "stage_before(stage)") .. ");")
                    break;
                }
//@ end
            }
        } while (!(what & is_last));

        // [3] O and LSE
//@ if own_class then
        spoil_noted(o, &consumer);
//@ end
//@ if not rows_end_early then
        end_rows(args, of_work, &rows, consumer.row, inverse);
//@ end
        store_o(o, inverse, &consumer, of_work);
    }
//@ if c.o_shared == 1 then
    if (lane == 0) stores_read();
//@ end
}

extern "C" __global__ void __launch_bounds__(threads, 1) ${symbol}(const __grid_constant__ LoomArgs args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned smem = (unsigned)__cvta_generic_to_shared(shared);
    Tile *tiles = (Tile *)(shared + smem_tiles);
    Work *works = (Work *)(shared + smem_works);
    if (threadIdx.x == 0) {
        prefetch_map(&args.q_map);
        if (args.seq_k > 0) {
            prefetch_map(&args.k_map);
            prefetch_map(&args.v_map);
        }
//@ if c.o_shared == 1 then
        prefetch_map(&args.o_map);
//@ end
        for (int i = 0; i < stages; ++i) {
            barrier_init(bar_k_full(smem, i), 1);
            barrier_init(bar_v_full(smem, i), 1);
            barrier_init(bar_k_empty(smem, i), 4 * warpgroups);
//@ if has_mask then
            barrier_init(bar_v_empty(smem, i), 4 * warpgroups + searchers);
            barrier_init(bar_checked(smem, i), searchers);
//@ else
            barrier_init(bar_v_empty(smem, i), 4 * warpgroups);
//@ end
        }
        for (int i = 0; i < q_buffers; ++i) {
            barrier_init(bar_q_full(smem, i), 1);
            barrier_init(bar_q_empty(smem, i), 4 * warpgroups);
        }
        for (int i = 0; i < plan_places; ++i) {
            barrier_init(bar_plan_full(smem, i), 1);
            barrier_init(bar_plan_empty(smem, i), 1);
        }
//@ if capped then
        *(unsigned *)(shared + smem_far) = 0;
//@ end
        publish_shared();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 ${c.other_registers};");
//@ if has_mask then
        Values *values = (Values *)(shared + smem_values);
//@ end
        Plan *plans = (Plan *)(shared + smem_plans);
        if (threadIdx.x == 0) {
            //@ text("load(&args, smem, plans, tiles, works" .. values .. (capped and ", (unsigned *)(shared + smem_far)" or "") .. ");")
        }
//@ if not listed then
        if (threadIdx.x / 32 == 1) plan_tiles(&args, smem, plans, works, (Spans *)(shared + smem_spans));
//@ else
        if (threadIdx.x / 32 == 1) plan_tiles(&args, smem, plans, works);
//@ end
//@ if has_mask then
        if (threadIdx.x >= 64) search(smem, values);
//@ end
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 ${c.consumer_registers};");
        //@ text("consume(&args, smem, tiles, works" .. (has_mask and ", (const Values *)(shared + smem_values)" or "") .. (own_class and ", (unsigned *)(shared + smem_spoilt)" or "") .. ");")
    }
}
