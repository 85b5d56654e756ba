// The block's place in the problem. Tiles of one head follow each other, so that they share its keys in the L2 cache.
//@ part("place", {of = tiles == "seq_q" and "queries" or "keys"})

//@ if listed then
//@ part("listed")

//@ end
static __device__ __forceinline__ Work work_of(const LoomArgs *args, unsigned block) {
    Work work;
    work.seq_q = args->seq_q;
    work.seq_k = args->seq_k;
    work.q_start = args->q_start;
    work.k_start = args->k_start;
//@ local size = tiles == "seq_q" and "tile_q" or "tile_k"
    const unsigned tiles = (work.${tiles} + ${size} - 1) / ${size};
    const unsigned place = block / tiles;
//@ if heads == "heads_q" then
    work.head = place % args->heads_q;
    work.head_kv = work.head / args->group;
    work.batch = place / args->heads_q;
//@ else
    work.head_kv = place % args->heads_kv;
    work.head = work.head_kv * args->group;  // the first of its group
    work.batch = place / args->heads_kv;
//@ end
//@ if listed and not even then
    work.tile = tile_at(args, mask_of(args, work.batch, work.head), block % tiles);
//@ elseif last_first then
    work.tile = tiles - 1 - block % tiles;  // under a causal mask the last rows take longest: they start first
//@ else
    work.tile = block % tiles;
//@ end
    return work;
}
