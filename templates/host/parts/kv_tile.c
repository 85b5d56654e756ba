//@ for _, row in ipairs {{"keys", "k", "dim_qk"}, {"values", "v", "dim_v"}} do
//@     local what, tensor, dim = row[1], row[2], row[3]
//@     if layout == "columns" then
// ${what} [first, first + count) of the work's sequence as f32 [${dim}][tile_k].
static void load_${what}(const LoomArgs *args, const Work *work, int first, int count, float *tile) {
    const Element *from = args->${tensor} + work->batch * args->${tensor}_stride_batch +
                          work->head_kv * args->${tensor}_stride_head + first * args->${tensor}_stride_seq;
    load_columns(from, args->${tensor}_stride_seq, count, ${dim}, tile_k, tile);
}
//@     else
// ${what} [first, first + count) of the work's sequence as f32 [tile_k][${dim}]. Returns whether all is finite.
static bool load_${what}(const LoomArgs *args, const Work *work, int first, int count, float *tile) {
    const Element *from = args->${tensor} + work->batch * args->${tensor}_stride_batch +
                          work->head_kv * args->${tensor}_stride_head + first * args->${tensor}_stride_seq;
    return load_rows(from, args->${tensor}_stride_seq, count, ${dim}, tile);
}
//@     end
//@     if tensor == "k" then

//@     end
//@ end
