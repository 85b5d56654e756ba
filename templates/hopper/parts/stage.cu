// A stage of the ring of ${what}, and the parity of the present round.
typedef struct Stage {
    int index, parity;
} Stage;

static __device__ __forceinline__ void stage_next(Stage *stage) {
    stage->index = stage->index + 1 == stages ? 0 : stage->index + 1;
    stage->parity ^= stage->index == 0;
}
