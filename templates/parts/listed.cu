// Of the masks that differ between heads and batches, which one a work has.
static __device__ __forceinline__ int mask_of(const LoomArgs *args, int batch, int head) {
//@ if of_batch and of_head then
    return batch * args->heads_q + head;
//@ elseif of_batch and of_head_kv then
    return batch * args->heads_kv + head / args->group;
//@ elseif of_batch then
    return batch;
//@ elseif of_head then
    return head;
//@ elseif of_head_kv then
    return head / args->group;
//@ else
    return 0;
//@ end
}

//@ if not even and c.dq_turns ~= 1 then
// The tile that is taken as the n-th of a mask, as ${k.name}_classes has sorted them.
static __device__ __forceinline__ int tile_at(const LoomArgs *args, int mask, int n) {
    const int tiles = (args->${own.seq} + ${own.tile} - 1) / ${own.tile};
    return args->order[mask * 2ll * tiles + n];
}

//@ end
// Chunks of classes that a work has, as ${k.name}_classes has found them, and the first of them.
static __device__ __forceinline__ int chunks_of(const Work *work) {
    return ((work->${other.seq} + ${other.tile} - 1) / ${other.tile} + class_chunk - 1) / class_chunk;
}
static __device__ __forceinline__ unsigned first_chunk(const LoomArgs *args, const Work *work) {
    const unsigned tiles = (args->${own.seq} + ${own.tile} - 1) / ${own.tile};
    return (mask_of(args, work->batch, work->head) * tiles + work->tile) * chunks_of(work);
}

// Classes of the four tiles of ${other.name} that a lane has of a chunk, a byte each.
static __device__ __forceinline__ unsigned read_classes(const LoomArgs *args, unsigned chunk) {
    return __ldg((const unsigned *)args->classes + chunk * (class_chunk / 4ull) + threadIdx.x % 32);
}
