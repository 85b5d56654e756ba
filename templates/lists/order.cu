//@ text(header)

//@ text(constants)
constexpr int levels = 256;  // of how many tiles one visits

//@ text(arguments)

// 0 for a tile that visits all others, levels - 1 for one that visits none.
static __device__ __forceinline__ int level_of(int visited, int others) {
    return levels - 1 - (int)((long long)visited * (levels - 1) / others);
}

// Sorts by level; of one level about in the order from the last tile back.
extern "C" __global__ void __launch_bounds__(threads) ${symbol}(const __grid_constant__ LoomArgs args) {
    __shared__ int places[levels];  // how many are of a level, then the place of its next
    __shared__ int sums[levels / 32];
    __shared__ int longest, all;  // tiles that one visits, and all together
    const int tiles = (args.${own.seq} + ${own.tile} - 1) / ${own.tile}, others = max((args.${other.seq} + ${other.tile} - 1) / ${other.tile}, 1);
    int *const order = args.order + (long long)blockIdx.x * 2 * tiles;
    const int *const visited = order + tiles;

    // [1] how many tiles visit about as many
    if (threadIdx.x < levels) places[threadIdx.x] = 0;
    if (threadIdx.x == 0) longest = all = 0;
    __syncthreads();
    int most = 0, sum = 0;
    for (int i = threadIdx.x; i < tiles; i += threads) {
        atomicAdd(&places[level_of(visited[i], others)], 1);
        most = max(most, visited[i]);
        sum += visited[i];
    }
    atomicMax(&longest, most);
    atomicAdd(&all, sum);
    __syncthreads();
    if (threadIdx.x == 0) {
        args.loads[2 * blockIdx.x] = longest;
        args.loads[2 * blockIdx.x + 1] = all;
    }

    // [2] places
    int before = 0, count = 0;
    if (threadIdx.x < levels) {
        count = before = places[threadIdx.x];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int left = __shfl_up_sync(~0u, before, distance);
            if (threadIdx.x % 32 >= distance) before += left;
        }
        if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = before;
    }
    __syncthreads();
    if (threadIdx.x < levels) {
        for (int i = 0; i < (int)threadIdx.x / 32; ++i) before += sums[i];
        places[threadIdx.x] = before - count;
    }
    __syncthreads();
    for (int i = tiles - 1 - (int)threadIdx.x; i >= 0; i -= threads) order[atomicAdd(&places[level_of(visited[i], others)], 1)] = i;
}
