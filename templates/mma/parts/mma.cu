// Fragments of mma.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"). Lane l holds of an accumulator
// rows l/4 and l/4 + 8, columns 2*(l%4) and + 1: c[2*i + j] is row l/4 + 8*i, column 2*(l%4) + j.

// c += a b, a is 16 x 16 by rows, b is 16 x 8 by columns.
static __device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
//@ local type = dtype == "bf16" and "bf16" or "f16"
//@ if arch.mma_k16 then
    asm("mma.sync.aligned.m16n8k16.row.col.f32.${type}.${type}.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
//@ else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.${type}.${type}.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.${type}.${type}.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
//@ end
}

// Four 8 x 8 matrices from shared memory; lane l gives the address of row l%8 of matrix l/8.
static __device__ __forceinline__ void load_fragments(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// The same, each matrix transposed.
static __device__ __forceinline__ void load_transposed(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Byte offsets of a lane into a 16 x 16 block whose rows are `pitch` elements apart.
//   rows_first: matrices (0,0) (8,0) (0,8) (8,8) in (row, column): an A operand, or a transposed B operand
//   columns_first: (0,0) (0,8) (8,0) (8,8): a B operand of two 8-column groups, or a transposed A operand
static __device__ __forceinline__ unsigned rows_first(int pitch) {
    const unsigned lane = threadIdx.x % 32;
    return 2 * (lane % 16 * pitch + lane / 16 * 8);
}
static __device__ __forceinline__ unsigned columns_first(int pitch) {
    const unsigned lane = threadIdx.x % 32;
    return 2 * ((lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}
