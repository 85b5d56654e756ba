static __device__ __forceinline__ void clear(float (&sum)[${tiles}][${columns}][4]) {
#pragma unroll
    for (int i = 0; i < ${tiles}; ++i)
#pragma unroll
        for (int j = 0; j < ${columns}; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[i][j][e] = 0;
}
