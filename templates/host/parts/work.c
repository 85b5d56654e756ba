// The block's place in the problem. Tiles of one head follow each other.
typedef struct Work {
    int batch, head, head_kv;  // head: of q; head_kv: of k and v
    int tile;                  // index of the tile of ${k.grid.seq == "seq_q" and "queries" or "keys"}
    int seq_q, seq_k;          // lengths of this sequence
    int q_start, k_start;      // positions of row 0 and column 0
} Work;

static Work work_of(const LoomArgs *args, long long block) {
    Work work;
    work.seq_q = args->seq_q;
    work.seq_k = args->seq_k;
    work.q_start = args->q_start;
    work.k_start = args->k_start;
//@ local size = k.grid.seq == "seq_q" and "tile_q" or "tile_k"
    const long long tiles = ((long long)work.${k.grid.seq} + ${size} - 1) / ${size};
    const long long place = block / tiles;
    work.tile = (int)(block % tiles);
//@ if k.grid.heads == "heads_q" then
    work.head = (int)(place % args->heads_q);
    work.head_kv = work.head / args->group;
    work.batch = (int)(place / args->heads_q);
//@ else
    work.head_kv = (int)(place % args->heads_kv);
    work.head = work.head_kv * args->group;  // the first of its group
    work.batch = (int)(place / args->heads_kv);
//@ end
    return work;
}
