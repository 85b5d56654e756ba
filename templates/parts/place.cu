typedef struct Work {
    int batch, head, head_kv;  // head: of q; head_kv: of k and v
    int tile;                  // index of the tile of ${of}
    int seq_q, seq_k;          // lengths of this sequence
    int q_start, k_start;      // positions of row 0 and column 0
} Work;
