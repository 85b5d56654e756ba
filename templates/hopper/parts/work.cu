// A block's place in the problem.
typedef struct Work {
    int batch, head, head_kv;  // head: of q; head_kv: of k and v
    int tile;                  // index of the tile of queries
    int seq_q, seq_k;          // lengths of this sequence
    int q_start, k_start;      // positions of row 0 and column 0
} Work;

static __device__ __forceinline__ int num_works(const LoomArgs *args) {
    return args->batch * args->heads_q * ((args->seq_q + tile_q - 1) / tile_q);
}

// Works of a block: one of each round of gridDim.x. Every other round runs backward, which evens out works that get
// shorter along the list.
static __device__ __forceinline__ int work_index(int round) {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

//@ if has_mask then
// Order of the list: groups of heads whose keys and values fit the L2 cache together; in a group the last rows first,
// which take longest under a causal mask.
//@ else
// Order of the list: tiles of one head follow each other, so that they share its keys in the L2 cache.
//@ end
static __device__ __forceinline__ Work work_of(const LoomArgs *args, int index) {
    Work work;
    work.seq_q = args->seq_q;
    work.seq_k = args->seq_k;
    work.q_start = args->q_start;
    work.k_start = args->k_start;
    const int tiles = (work.seq_q + tile_q - 1) / tile_q;
//@ if has_mask then
    constexpr int l2_keys = (1 << 25) / (2 * (depth_qk + depth_v));  // of all heads of a group
    const int heads = args->batch * args->heads_q;
    const int wanted = max(l2_keys / max(work.seq_k, 1), 1024 / tiles);
    const int size = min(max(wanted, 1), heads);
    const int group = index / (size * tiles), first = group * size;
    const int in_group = index - first * tiles, present = min(size, heads - first);
    const int place = first + in_group % present;
    work.tile = tiles - 1 - in_group / present;
//@ else
    const int place = index / tiles;
    work.tile = index % tiles;
//@ end
    work.batch = place / args->heads_q;
    work.head = place % args->heads_q;
    work.head_kv = work.head / args->group;
    return work;
}
