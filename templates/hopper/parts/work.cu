// A block's place in the problem.
//@ part("place", {of = "queries"})

//@ if listed then
//@ part("listed")

//@ end
// The work of a head, of all those of the batch; its tile is still to be told.
static __device__ __forceinline__ Work work_of_head(const LoomArgs *args, int head) {
    const int batch = head / args->heads_q, of_batch = head - batch * args->heads_q;
    const Work work = {batch, of_batch, of_batch / args->group, 0, args->seq_q, args->seq_k, args->q_start, args->k_start};
    return work;
}

//@ if listed and not even then
// Works are in lists, those of each with the longest first; a block takes the next when it has time. A list has the tiles of so
// many heads that each block gets about one work of it: few heads at once, so that their keys stay in the L2 cache; and of as
// many that its longest work is no longer than what the other blocks have to do meanwhile.
typedef struct Lists {
    int list_heads;  // heads of a list
    int heads, tiles;
} Lists;

static __device__ __forceinline__ Lists lists_of(const LoomArgs *args) {
    Lists lists = {0, args->batch * args->heads_q, (args->seq_q + tile_q - 1) / tile_q};
    const int longest = args->loads[0], all = max(args->loads[1], 1);  // of the first mask
    const long long even = ((long long)longest * gridDim.x + all - 1) / all;
    lists.list_heads = (int)min(max((long long)(gridDim.x / lists.tiles), max(even, 1ll)), (long long)lists.heads);
    return lists;
}

// The work of a place; false: there are no more.
static __device__ __forceinline__ bool work_of(const LoomArgs *args, const Lists *lists, unsigned place, Work *work) {
    if (place >= (unsigned)lists->heads * lists->tiles) return false;
    const int of_list = lists->list_heads * lists->tiles, list = place / of_list;
    const int first = list * lists->list_heads, present = min(lists->list_heads, lists->heads - first);
    const int row = (place - list * of_list) / present, head = first + (place - list * of_list) - row * present;
    *work = work_of_head(args, head);
    work->tile = tile_at(args, mask_of(args, work->batch, work->head), row);
    return true;
}

//@ part("taken")

//@ else
//@ if not even then
// Works are dealt out to the blocks list by list, round by round. Under a causal mask works get shorter along a list, so
// every other round runs backward and all blocks get as much. A list has the tiles of so many heads that it takes about
// two rounds, the last rows of all its heads first: few heads at once, so that their keys stay in the L2 cache. Where a
// head has many tiles and its keys are not too wide, four even out better; where it has few and they are wide, one keeps
// more keys. In a window a query sees few of them, so that as many more heads have theirs in the cache. A list starts
// behind the block that the one before has ended with: else the same blocks would get the short works of every list, and
// nothing in its last round.
typedef struct Rounds {
    int count;       // of all lists
    int of_list;     // rounds of one
    int list_heads;  // heads of one
} Rounds;

// `seen`: keys that a query sees, at most.
static __device__ __forceinline__ Rounds rounds_of(const LoomArgs *args, int seen) {
    const int heads = args->batch * args->heads_q, tiles = (args->seq_q + tile_q - 1) / tile_q;
    Rounds rounds;
    const bool wide = depth_qk + depth_v > 256;
    const int about = (!wide && tiles >= 16 ? 4 : wide && tiles <= 4 ? 1 : 2) * min(max(args->seq_k / max(seen, 1), 1), 1024);
    rounds.list_heads = min(max((int)(about * gridDim.x) / tiles, 1), heads);
    rounds.of_list = ((unsigned)(rounds.list_heads * tiles) + gridDim.x - 1) / gridDim.x;
    rounds.count = rounds.of_list * (((unsigned)heads + rounds.list_heads - 1) / rounds.list_heads);
    return rounds;
}
//@ else
// Tiles of one head follow each other, so that they share its keys in the L2 cache; each round deals one to every block.
typedef struct Rounds {
    int count;
} Rounds;

static __device__ __forceinline__ Rounds rounds_of(const LoomArgs *args) {
    Rounds rounds;
    const int works = args->batch * args->heads_q * ((args->seq_q + tile_q - 1) / tile_q);
    rounds.count = ((unsigned)works + gridDim.x - 1) / gridDim.x;
    return rounds;
}
//@ end

// The work of this block in a round; false: it has none.
static __device__ __forceinline__ bool work_of(const LoomArgs *args, const Rounds *rounds, int round, Work *work) {
    const int heads = args->batch * args->heads_q, tiles = (args->seq_q + tile_q - 1) / tile_q;
//@ if not even then
    const int list = round / rounds->of_list, round_of_list = round - list * rounds->of_list;
    const unsigned first = list * rounds->list_heads, present = min(rounds->list_heads, heads - (int)first);
    const unsigned start = first * tiles % gridDim.x, turn = blockIdx.x < start ? blockIdx.x + gridDim.x - start : blockIdx.x - start;
    const unsigned place = round_of_list * gridDim.x + (round & 1 ? gridDim.x - 1 - turn : turn);
    if (place >= present * tiles) return false;
    const unsigned row = place / present;
    const int head = first + place - row * present;
    *work = work_of_head(args, head);
    work->tile = tiles - 1 - row;
//@ else
    const unsigned place = round * gridDim.x + blockIdx.x;
    if (place >= (unsigned)(heads * tiles)) return false;
    const int head = place / tiles;
    *work = work_of_head(args, head);
    work->tile = place - head * tiles;
//@ end
    return true;
}
//@ end
