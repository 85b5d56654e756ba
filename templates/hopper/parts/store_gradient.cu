//@ -- name: of the gradient; region: whose shared memory it takes; kind: qk or v, of its head dim; tile: rows of the block; head
// Starts writing ${name} through the shared memory of ${region}, which nobody reads any more but this warp's last stores: each warp 16
// rows from first_row on, in the swizzle of boxes.
static __device__ __forceinline__ void store_${name}(const float (&x)[depth_${kind} / 2], float scale, const LoomArgs *args, const Work *work, unsigned smem, int first_row) {
    const int lane = threadIdx.x % 32;
    const unsigned boxes = smem + smem_${region} + first_row * 128;
    if (lane == 0) stores_read();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < depth_${kind} / 8; j += 2) {  // 16 columns
        const unsigned at = boxes + j / 8 * (${tile} * 128) + lane % 16 * 128 + (((j + lane / 16) % 8 ^ lane % 8) << 4);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(at), "r"(pack(x[4 * j] * scale, x[4 * j + 1] * scale)), "r"(pack(x[4 * j + 2] * scale, x[4 * j + 3] * scale)),
                     "r"(pack(x[4 * j + 4] * scale, x[4 * j + 5] * scale)), "r"(pack(x[4 * j + 6] * scale, x[4 * j + 7] * scale)) : "memory");
    }
    publish_shared();
    __syncwarp();
    if (lane > 0) return;
#pragma unroll
    for (int i = 0; i < chunks_${kind}; ++i) {
        store_box(&args->${name}_map, boxes + i * ${tile} * 128, 64 * i, work->tile * ${tile} + first_row, work->${head}, work->batch);
    }
    stores_commit();
}
