/* Times the forward of FlashAttention-3 on one GPU in the setting of its paper, without PyTorch: its kernels
 * are taken from its own templates, in the schedules that its own tables give. Writes what `attnloom bench
 * --grid paper` writes.
 *
 *   git clone --recursive https://github.com/Dao-AILab/flash-attention
 *   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr --use_fast_math \
 *        -DNDEBUG -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DCUTLASS_ENABLE_GDC_FOR_SM90 \
 *        -Iflash-attention/hopper -Iflash-attention/csrc/cutlass/include \
 *        bench/fa3_forward.cu -o fa3_forward -lcuda
 *   ./fa3_forward OUT.csv --mode burst,sustained --hdim 64,128,256 --seqlen 512,1024,2048,4096,8192,16384
 *
 * The compiler takes some minutes. Two rows of the output of each cell are compared with float64 before it is
 * timed. What its Python call adds (an output tensor, a counter set to zero) is not in the time. */

#include "flash_fwd_launch_template.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

static const int tokens = 16384, hidden = 2048, timed_launches = 15;

static void check(cudaError_t error) {
    if (error != cudaSuccess) {
        fprintf(stderr, "fa3_forward: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

// Fills `x` with N(0, 1): Box and Muller's transform of two hashed counters.
__global__ void fill(__nv_bfloat16 *x, size_t num, unsigned seed) {
    auto uniform = [](unsigned long long n) {
        n = (n ^ (n >> 30)) * 0xbf58476d1ce4e5b9ull;
        n = (n ^ (n >> 27)) * 0x94d049bb133111ebull;
        return ((unsigned)((n ^ (n >> 31)) >> 40) + 0.5f) * 0x1p-24f;
    };
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < num;
         i += (size_t)gridDim.x * blockDim.x) {
        unsigned long long n = (2 * i + 1 + ((unsigned long long)seed << 40)) * 0x9e3779b97f4a7c15ull;
        x[i] =
            __float2bfloat16(sqrtf(-2 * logf(uniform(n))) * cospif(2 * uniform(n + 0x9e3779b97f4a7c15ull)));
    }
}

struct cell {
    int hdim;
    bool causal;
    int seqlen;
    int batch() const { return tokens / seqlen; }
    int heads() const { return hidden / hdim; }
    double flop() const { return 4.0 * batch() * heads() * seqlen * seqlen * hdim * (causal ? 0.5 : 1); }
};

struct tensors {
    __nv_bfloat16 *q, *k, *v, *o;
    float *lse;
    int *counter;
};

// Two CTAs share loads of keys where its launcher would have them do so: full masks from d=128 on, as an even
// number of its tiles of queries makes a length here.
template <int hdim, bool causal> static void launch_kernel(Flash_fwd_params &params) {
    using T = cutlass::bfloat16_t;
    constexpr int cluster = hdim >= 128 && !causal ? 2 : 1;
    run_flash_fwd<90, hdim, hdim, cluster, T, T, causal, false, false, false, false, false, false, false,
                  false, false>(params, nullptr);
}

static Flash_fwd_params params_of(const cell &c, const tensors &t) {
    Flash_fwd_params p = {};
    p.q_ptr = t.q, p.k_ptr = t.k, p.v_ptr = t.v, p.o_ptr = t.o, p.softmax_lse_ptr = t.lse;
    p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = hidden;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = c.hdim;
    p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = p.o_batch_stride = (int64_t)c.seqlen * hidden;
    p.v_dim_stride = 1;
    p.b = p.b_k = c.batch(), p.h = p.h_k = c.heads();
    p.seqlen_q = p.seqlen_k = p.seqlen_q_rounded = p.seqlen_k_rounded = c.seqlen;
    p.d = p.dv = p.d_rounded = p.dv_rounded = c.hdim;
    p.scale_softmax = 1 / sqrtf((float)c.hdim);
    p.window_size_left = -1, p.window_size_right = c.causal ? 0 : -1;
    p.is_bf16 = true, p.is_causal = c.causal;
    p.num_splits = 1;
    p.tile_count_semaphore = t.counter;
    p.arch = 90;
    check(cudaDeviceGetAttribute(&p.num_sm, cudaDevAttrMultiProcessorCount, 0));
    return p;
}

static void launch(const cell &c, const tensors &t) {
    Flash_fwd_params params = params_of(c, t);
    switch (c.hdim * 2 + c.causal) {
    case 128: return launch_kernel<64, false>(params);
    case 129: return launch_kernel<64, true>(params);
    case 256: return launch_kernel<128, false>(params);
    case 257: return launch_kernel<128, true>(params);
    case 512: return launch_kernel<256, false>(params);
    case 513: return launch_kernel<256, true>(params);
    }
    fprintf(stderr, "fa3_forward: --hdim %d is not one of 64, 128, 256\n", c.hdim);
    exit(1);
}

// Compares row `row` of the last head of the last batch entry with float64; exits where it is off by more
// than bf16 rounds.
static void check_row(const cell &c, const tensors &t, int row) {
    size_t entry = (size_t)c.seqlen * hidden, first = (c.batch() - 1) * entry;
    int column = (c.heads() - 1) * c.hdim;
    std::vector<__nv_bfloat16> q(entry), k(entry), v(entry), o(entry);
    auto copy = [&](std::vector<__nv_bfloat16> &to, const __nv_bfloat16 *from) {
        check(cudaMemcpy(to.data(), from + first, entry * sizeof *from, cudaMemcpyDeviceToHost));
    };
    copy(q, t.q), copy(k, t.k), copy(v, t.v), copy(o, t.o);
    int keys = c.causal ? row + 1 : c.seqlen;
    std::vector<double> s(keys), sum(c.hdim);
    auto at = [&](const std::vector<__nv_bfloat16> &x, int r, int i) {
        return (double)__bfloat162float(x[(size_t)r * hidden + column + i]);
    };
    double largest = -INFINITY, total = 0;
    for (int j = 0; j < keys; j++) {
        for (int i = 0; i < c.hdim; i++) s[j] += at(q, row, i) * at(k, j, i) / sqrt((double)c.hdim);
        largest = std::max(largest, s[j]);
    }
    for (int j = 0; j < keys; j++) {
        double p = exp(s[j] - largest);
        total += p;
        for (int i = 0; i < c.hdim; i++) sum[i] += p * at(v, j, i);
    }
    double error = 0, norm = 0;
    for (int i = 0; i < c.hdim; i++) {
        double difference = at(o, row, i) - sum[i] / total;
        error += difference * difference, norm += sum[i] * sum[i] / (total * total);
    }
    if (!(sqrt(error / norm) < 8e-3)) {
        fprintf(stderr, "fa3_forward: d=%d causal=%d seqlen=%d row %d: relative error %g\n", c.hdim, c.causal,
                c.seqlen, row, sqrt(error / norm));
        exit(1);
    }
}

// Milliseconds of a launch, the median: see `burst` and `sustained` in bench/README.md.
static double time_cell(const cell &c, const tensors &t, bool sustained) {
    cudaEvent_t from[timed_launches], to[timed_launches];
    for (int i = 0; i < timed_launches; i++) check(cudaEventCreate(&from[i])), check(cudaEventCreate(&to[i]));
    auto timed = [&](int i) {
        check(cudaMemsetAsync(t.counter, 0, sizeof *t.counter));
        check(cudaEventRecord(from[i]));
        launch(c, t);
        check(cudaEventRecord(to[i]));
    };
    auto elapsed = [&](int i) {
        float ms;
        check(cudaEventElapsedTime(&ms, from[i], to[i]));
        return ms;
    };
    timed(0);
    check(cudaDeviceSynchronize());
    int warm_ups = 4;
    if (sustained) {
        timed(0);
        check(cudaDeviceSynchronize());
        warm_ups = std::max(4, (int)(300 / elapsed(0)));
    } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    for (int i = 0; i < warm_ups; i++) timed(0);
    for (int i = 0; i < timed_launches; i++) timed(i);
    check(cudaDeviceSynchronize());
    std::vector<float> times;
    for (int i = 0; i < timed_launches; i++) {
        times.push_back(elapsed(i));
        check(cudaEventDestroy(from[i])), check(cudaEventDestroy(to[i]));
    }
    std::sort(times.begin(), times.end());
    return times[timed_launches / 2];
}

static std::vector<std::string> split(const std::string &list) {
    std::vector<std::string> words;
    for (size_t at = 0; at <= list.size();) {
        size_t end = std::min(list.find(',', at), list.size());
        words.push_back(list.substr(at, end - at));
        at = end + 1;
    }
    return words;
}

int main(int argc, char **argv) {
    std::string modes = "burst,sustained", hdims = "64,128,256", seqlens = "512,1024,2048,4096,8192,16384";
    bool known = argc >= 2 && argc % 2 == 0;
    for (int i = 2; known && i + 1 < argc; i += 2) {
        std::string name = argv[i];
        (name == "--mode"     ? modes
         : name == "--hdim"   ? hdims
         : name == "--seqlen" ? seqlens
                              : name) = argv[i + 1];
        known = name == argv[i];
    }
    FILE *out = known ? fopen(argv[1], "w") : nullptr;
    if (!out) {
        fprintf(
            stderr,
            "usage: fa3_forward OUT.csv [--mode burst,sustained] [--hdim 64,128,256] [--seqlen 512,...]\n");
        return 2;
    }
    size_t num = (size_t)tokens * hidden;
    tensors t;
    for (__nv_bfloat16 **x : {&t.q, &t.k, &t.v, &t.o}) check(cudaMalloc(x, num * sizeof **x));
    check(cudaMalloc(&t.lse, (size_t)tokens * hidden / 64 * sizeof *t.lse));
    check(cudaMalloc(&t.counter, sizeof *t.counter));
    fill<<<1024, 256>>>(t.q, num, 1);
    fill<<<1024, 256>>>(t.k, num, 2);
    fill<<<1024, 256>>>(t.v, num, 3);
    check(cudaDeviceSynchronize());
    fprintf(out, "pass,dtype,hdim,causal,seqlen,batch,heads,backend,mode,ms,tflops\n");
    for (const std::string &hdim : split(hdims))
        for (bool causal : {false, true})
            for (const std::string &seqlen : split(seqlens)) {
                cell c = {atoi(hdim.c_str()), causal, atoi(seqlen.c_str())};
                if (c.seqlen <= 0 || tokens % c.seqlen != 0 || c.seqlen % 256 != 0) {
                    fprintf(stderr, "fa3_forward: --seqlen %s is not a multiple of 256 that divides %d\n",
                            seqlen.c_str(), tokens);
                    return 2;
                }
                check(cudaMemset(t.o, 0xff, num * sizeof *t.o));
                check(cudaMemset(t.counter, 0, sizeof *t.counter));
                launch(c, t);
                check(cudaDeviceSynchronize());
                check_row(c, t, 0);
                check_row(c, t, c.seqlen - 1);
                for (const std::string &mode : split(modes)) {
                    double ms = time_cell(c, t, mode == "sustained");
                    fprintf(out, "fwd,bf16,%d,%d,%d,%d,%d,fa3,%s,%.5f,%.1f\n", c.hdim, c.causal, c.seqlen,
                            c.batch(), c.heads(), mode.c_str(), ms, c.flop() / ms / 1e9);
                }
            }
    return fclose(out) != 0;
}
