// Copies by the TMA unit of boxes of 64 columns, which lie in shared memory as rows of 128 bytes: 16-byte chunk c of
// row r at chunk c ^ (r % 8). Rows and columns outside the tensor are read as zero and not written. Where the head dim is
// a multiple of 64 the maps that are read hold all its boxes, and one copy moves them, one behind the other.
static __device__ __forceinline__ void load_box(unsigned smem, const LoomMap *map, int column, int row, int head, int batch,
                                                unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
        ::"r"(smem), "l"(map), "r"(column), "r"(row), "r"(0), "r"(head), "r"(batch), "r"(barrier) : "memory");
}

//@ if c.o_shared == 1 or k.pass == "backward" then
static __device__ __forceinline__ void store_box(const LoomMap *map, unsigned smem, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];"
                 ::"l"(map), "r"(column), "r"(row), "r"(0), "r"(head), "r"(batch), "r"(smem) : "memory");
}

static __device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the stores of this thread have read what they store.
static __device__ __forceinline__ void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

//@ end
// Makes what this thread has written to shared memory visible to TMA and wgmma.
static __device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

static __device__ __forceinline__ void prefetch_map(const LoomMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
