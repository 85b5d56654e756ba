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

//@ if c.p_sets == 2 then
// Passes at once: of a phase that has been waited for and cannot end again yet. The compiler moves nothing over the loop.
static __device__ __forceinline__ void keep_order(unsigned barrier, int parity) { barrier_wait(barrier, parity); }

//@ end
static __device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for so many bytes of copies.
static __device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
//@ if c.ping_pong == 1 then

// Warpgroups take turns in starting products, so that the exponentials of one run under the products of another.
static __device__ __forceinline__ void turn_take(int warpgroup) {
    asm volatile("barrier.cta.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
}

static __device__ __forceinline__ void turn_give(int warpgroup) {
    asm volatile("barrier.cta.arrive %0, 256;" ::"r"(1 + (warpgroup + 1 == warpgroups ? 0 : warpgroup + 1)) : "memory");
}
//@ end
