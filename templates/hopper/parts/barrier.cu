// Barriers in shared memory that count arrivals and bytes; their phases alternate in parity.
static __device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Waits for the end of the phase of this parity.
static __device__ __forceinline__ void barrier_wait(unsigned barrier, int parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}"
        ::"r"(barrier), "r"(parity) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for so many bytes of copies.
static __device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until `count` threads have come to one of the numbered barriers of the block.
static __device__ __forceinline__ void meet(int number, int count) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(number), "r"(count) : "memory");
}

// The same, and tells all of them whether the condition holds for one.
static __device__ __forceinline__ bool meet_any(int number, int count, bool condition) {
    int any;
    asm volatile(
        "{.reg .pred p, q; setp.ne.b32 p, %3, 0;\n"
        "barrier.cta.red.or.pred q, %1, %2, p; selp.b32 %0, 1, 0, q;}"
        : "=r"(any) : "r"(number), "r"(count), "r"((int)condition) : "memory");
    return any;
}
