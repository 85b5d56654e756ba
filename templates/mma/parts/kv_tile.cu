// Starts copying the tile of keys, or of values, from first_key on of the work's sequence. Packed and paged layouts
// differ from dense ones here alone.
//@ for _, row in ipairs {{"keys", "k", "qk"}, {"values", "v", "v"}} do
//@ local name, tensor, kind = row[1], row[2], row[3]
static __device__ __forceinline__ void load_${name}(unsigned smem, const LoomArgs *args, const Work *work, int first_key) {
    const unsigned short *base = args->${tensor} + work->batch * args->${tensor}_stride_batch + work->head_kv * args->${tensor}_stride_head;
    load_${kind}_rows(smem, base, args->${tensor}_stride_seq, tile_k, first_key, work->seq_k);
}
//@ end
