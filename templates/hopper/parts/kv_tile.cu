// Starts copying a tile of keys, or of values, of the work's sequence into a stage; tile -1 stands for none. Packed and
// paged layouts differ from dense ones here alone.
//@ for _, row in ipairs {{"keys", "k", "qk"}, {"values", "v", "v"}} do
//@ local name, tensor, kind = row[1], row[2], row[3]
static __device__ __forceinline__ void load_${name}(unsigned smem, const LoomArgs *args, const Work *work, int tile, int stage) {
    const unsigned full = bar_${tensor}_full(smem, stage);
    barrier_expect(full, tile < 0 ? 0 : ${tensor}_bytes);
    if (tile < 0) return;
#pragma unroll
    for (int i = 0; i < loads_${kind}; ++i) {
        load_box(smem + smem_${tensor} + stage * ${tensor}_bytes + i * tile_k * 128, &args->${tensor}_map, 64 * i, tile * tile_k, work->head_kv,
                 work->batch, full);
    }
}
//@ end
