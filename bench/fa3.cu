/* Times both passes of FlashAttention-3 on one GPU in the setting of its paper, without PyTorch: its kernels
 * are taken from its own templates, in the schedules that its own tables give. Writes what `attnloom bench
 * --grid paper` writes.
 *
 *   git clone --recursive https://github.com/Dao-AILab/flash-attention
 *   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr --use_fast_math \
 *        -DNDEBUG -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DCUTLASS_ENABLE_GDC_FOR_SM90 \
 *        -Iflash-attention/hopper -Iflash-attention/csrc/cutlass/include \
 *        bench/fa3.cu -o fa3 -lcuda
 *   ./fa3 OUT.csv --pass fwd,bwd --mode burst,sustained --hdim 64,128,256 \
 *         --seqlen 512,1024,2048,4096,8192,16384 --tokens 16384 --hidden 2048
 *
 * The compiler takes some minutes and 16 GB of memory. Two rows of each output of a cell are compared with
 * float64 before it is timed. A backward is the three kernels that its Python call launches: row sums and a
 * cleared f32 dQ, then the gradients, then dQ in bf16. What that call adds (tensors) is not in the time, nor
 * is the forward's counter set to zero. */

// Of the branches of its launcher of the backward the compiler sees those that the cells take: no windows, no
// lengths by batch entry, as many heads of keys as of queries, sums in any order.
#define FLASHATTENTION_DISABLE_LOCAL
#include "static_switch.h"
#undef BOOL_SWITCH
#define BOOL_SWITCH(condition, name, ...)                                                                    \
    [&] {                                                                                                    \
        constexpr static bool name = false;                                                                  \
        return __VA_ARGS__();                                                                                \
    }()

#include "flash_fwd_launch_template.h"
#include "flash_bwd_launch_template.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

static const int timed_launches = 15;
static int tokens = 16384, hidden = 2048;  // in all, and of all heads of a token

static void check(cudaError_t error) {
    if (error != cudaSuccess) {
        fprintf(stderr, "fa3: %s\n", cudaGetErrorString(error));
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
    double flop(bool backward) const {
        return 4.0 * batch() * heads() * seqlen * seqlen * hdim * (causal ? 0.5 : 1) * (backward ? 2.5 : 1);
    }
    // Queries of a tile of its backward, as run_mha_bwd_hdim* has them.
    int backward_tile() const { return hdim == 64 ? 128 : hdim == 128 && !causal ? 80 : 64; }
};

struct tensors {
    __nv_bfloat16 *q, *k, *v, *o, *d_o, *dq, *dk, *dv;
    float *lse, *lse_log2, *row_sums, *dq_sums;
    int *counter, *dq_counters;
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

static void launch_forward(const cell &c, const tensors &t) {
    Flash_fwd_params params = params_of(c, t);
    switch (c.hdim * 2 + c.causal) {
    case 128: return launch_kernel<64, false>(params);
    case 129: return launch_kernel<64, true>(params);
    case 256: return launch_kernel<128, false>(params);
    case 257: return launch_kernel<128, true>(params);
    case 512: return launch_kernel<256, false>(params);
    case 513: return launch_kernel<256, true>(params);
    }
}

static void launch_backward(const cell &c, const tensors &t) {
    using T = cutlass::bfloat16_t;
    Flash_bwd_params p = {};
    static_cast<Flash_fwd_params &>(p) = params_of(c, t);
    p.seqlen_q_rounded = cute::round_up(c.seqlen, c.backward_tile());
    p.do_ptr = t.d_o, p.dq_ptr = t.dq, p.dk_ptr = t.dk, p.dv_ptr = t.dv;
    p.do_row_stride = p.dq_row_stride = p.dk_row_stride = p.dv_row_stride = p.q_row_stride;
    p.do_head_stride = p.dq_head_stride = p.dk_head_stride = p.dv_head_stride = p.q_head_stride;
    p.do_batch_stride = p.dq_batch_stride = p.dk_batch_stride = p.dv_batch_stride = p.q_batch_stride;
    p.softmax_lse_log2_ptr = t.lse_log2, p.dsoftmax_sum = t.row_sums, p.dq_accum_ptr = t.dq_sums;
    p.dq_semaphore = t.dq_counters;
    switch (c.hdim) {
    case 64: return run_mha_bwd_hdim64<90, T, false>(p, nullptr);
    case 128: return run_mha_bwd_hdim128<90, T, false>(p, nullptr);
    case 256: return run_mha_bwd_hdim256<90, T, false>(p, nullptr);
    }
}

// Rows of the last head of the last batch entry, where a wrong stride shows.
struct head {
    int hdim;
    std::vector<__nv_bfloat16> x;
    head(const cell &c, const __nv_bfloat16 *from) : hdim(c.hdim), x((size_t)c.seqlen * hdim) {
        from += (size_t)(tokens - c.seqlen) * hidden + hidden - hdim;
        check(cudaMemcpy2D(x.data(), hdim * sizeof *from, from, hidden * sizeof *from, hdim * sizeof *from,
                           c.seqlen, cudaMemcpyDeviceToHost));
    }
    double at(int row, int i) const { return __bfloat162float(x[(size_t)row * hdim + i]); }
    double dot(int row, const head &other, int other_row) const {
        double sum = 0;
        for (int i = 0; i < hdim; i++) sum += at(row, i) * other.at(other_row, i);
        return sum;
    }
    void add_to(std::vector<double> &sum, double weight, int row) const {
        for (int i = 0; i < hdim; i++) sum[i] += weight * at(row, i);
    }
};

static std::vector<float> lse_of(const cell &c, const tensors &t) {
    std::vector<float> lse(c.seqlen);
    check(cudaMemcpy(lse.data(), t.lse + (size_t)tokens * c.heads() - c.seqlen, c.seqlen * sizeof(float),
                     cudaMemcpyDeviceToHost));
    return lse;
}

static void require(bool right, const cell &c, const char *name, int row, double error) {
    if (right) return;
    fprintf(stderr, "fa3: d=%d causal=%d seqlen=%d row %d of %s: error %g\n", c.hdim, c.causal, c.seqlen, row,
            name, error);
    exit(1);
}

// Exits where a row is off by more than bf16 rounds.
static void compare(const cell &c, const char *name, const head &result, int row,
                    const std::vector<double> &expected) {
    double error = 0, norm = 0;
    for (int i = 0; i < c.hdim; i++) {
        double difference = result.at(row, i) - expected[i];
        error += difference * difference, norm += expected[i] * expected[i];
    }
    require(sqrt(error / norm) < 8e-3, c, name, row, sqrt(error / norm));
}

static void check_forward(const cell &c, const tensors &t) {
    head q(c, t.q), k(c, t.k), v(c, t.v), o(c, t.o);
    std::vector<float> lse = lse_of(c, t);
    for (int row : {0, c.seqlen - 1}) {
        std::vector<double> s(c.causal ? row + 1 : c.seqlen), expected(c.hdim);
        for (int j = 0; j < (int)s.size(); j++) s[j] = q.dot(row, k, j) / sqrt(c.hdim);
        double largest = *std::max_element(s.begin(), s.end()), total = 0;
        for (double x : s) total += exp(x - largest);
        double row_lse = largest + log(total);
        for (int j = 0; j < (int)s.size(); j++) v.add_to(expected, exp(s[j] - row_lse), j);
        compare(c, "O", o, row, expected);
        require(fabs(lse[row] - row_lse) < 1e-3, c, "LSE", row, lse[row] - row_lse);
    }
}

// From the forward's O and LSE. The first row of dQ and the last of dK are left out: with a causal mask the
// one is 0, the other what a single query gives.
static void check_backward(const cell &c, const tensors &t) {
    head q(c, t.q), k(c, t.k), v(c, t.v), o(c, t.o), d_o(c, t.d_o), dq(c, t.dq), dk(c, t.dk), dv(c, t.dv);
    std::vector<float> lse = lse_of(c, t);
    double scale = 1 / sqrt(c.hdim);
    auto p = [&](int i, int j) { return c.causal && j > i ? 0 : exp(scale * q.dot(i, k, j) - lse[i]); };
    auto ds = [&](int i, int j) { return scale * p(i, j) * (d_o.dot(i, v, j) - d_o.dot(i, o, i)); };
    for (int row : {c.seqlen / 2 + 1, c.seqlen - 1}) {
        std::vector<double> expected(c.hdim);
        for (int j = 0; j < c.seqlen; j++) k.add_to(expected, ds(row, j), j);
        compare(c, "dQ", dq, row, expected);
    }
    for (int row : {0, c.seqlen / 2 + 1}) {
        std::vector<double> expected_dk(c.hdim), expected_dv(c.hdim);
        for (int i = 0; i < c.seqlen; i++) {
            q.add_to(expected_dk, ds(i, row), i);
            d_o.add_to(expected_dv, p(i, row), i);
        }
        compare(c, "dK", dk, row, expected_dk);
        compare(c, "dV", dv, row, expected_dv);
    }
}

// Milliseconds of a launch, the median: see `burst` and `sustained` in bench/README.md.
static double time_cell(const cell &c, const tensors &t, bool backward, bool sustained) {
    cudaEvent_t from[timed_launches], to[timed_launches];
    for (int i = 0; i < timed_launches; i++) check(cudaEventCreate(&from[i])), check(cudaEventCreate(&to[i]));
    auto timed = [&](int i) {
        check(cudaMemsetAsync(t.counter, 0, sizeof *t.counter));
        check(cudaEventRecord(from[i]));
        (backward ? launch_backward : launch_forward)(c, t);
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
    std::string passes = "fwd", modes = "burst,sustained", hdims = "64,128,256";
    std::string seqlens = "512,1024,2048,4096,8192,16384", all_tokens = "16384", all_heads = "2048";
    bool known = argc >= 2 && argc % 2 == 0;
    for (int i = 2; known && i + 1 < argc; i += 2) {
        std::string name = argv[i];
        (name == "--pass"     ? passes
         : name == "--mode"   ? modes
         : name == "--hdim"   ? hdims
         : name == "--seqlen" ? seqlens
         : name == "--tokens" ? all_tokens
         : name == "--hidden" ? all_heads
                              : name) = argv[i + 1];
        known = name == argv[i];
    }
    for (const std::string &pass : split(passes)) known = known && (pass == "fwd" || pass == "bwd");
    FILE *out = known ? fopen(argv[1], "w") : nullptr;
    if (!out) {
        fprintf(stderr, "usage: fa3 OUT.csv [--pass fwd,bwd] [--mode burst,sustained] [--hdim 64,128,256] "
                        "[--seqlen 512,...] [--tokens 16384] [--hidden 2048]\n");
        return 2;
    }
    tokens = atoi(all_tokens.c_str()), hidden = atoi(all_heads.c_str());
    if (tokens <= 0 || tokens % 256 || hidden <= 0 || hidden % 256) {
        fprintf(stderr, "fa3: --tokens %s and --hidden %s are not multiples of 256\n", all_tokens.c_str(), all_heads.c_str());
        return 2;
    }
    // 256 queries in tiles of 80 have the most padding.
    size_t num = (size_t)tokens * hidden, padded_num = num / 256 * 320;
    size_t rows = num / 64, padded_rows = padded_num / 64;
    tensors t;
    for (__nv_bfloat16 **x : {&t.q, &t.k, &t.v, &t.o, &t.d_o, &t.dq, &t.dk, &t.dv})
        check(cudaMalloc(x, num * sizeof **x));
    for (float **x : {&t.lse, &t.lse_log2, &t.row_sums}) check(cudaMalloc(x, padded_rows * sizeof **x));
    check(cudaMalloc(&t.dq_sums, padded_num * sizeof *t.dq_sums));
    check(cudaMalloc(&t.counter, sizeof *t.counter));
    check(cudaMalloc(&t.dq_counters, rows * sizeof *t.dq_counters));
    fill<<<1024, 256>>>(t.q, num, 1);
    fill<<<1024, 256>>>(t.k, num, 2);
    fill<<<1024, 256>>>(t.v, num, 3);
    fill<<<1024, 256>>>(t.d_o, num, 4);
    check(cudaDeviceSynchronize());
    fprintf(out, "pass,dtype,hdim,causal,seqlen,batch,heads,backend,mode,ms,tflops\n");
    for (const std::string &hdim : split(hdims))
        for (bool causal : {false, true})
            for (const std::string &seqlen : split(seqlens)) {
                cell c = {atoi(hdim.c_str()), causal, atoi(seqlen.c_str())};
                if (c.hdim != 64 && c.hdim != 128 && c.hdim != 256) {
                    fprintf(stderr, "fa3: --hdim %s is not one of 64, 128, 256\n", hdim.c_str());
                    return 2;
                }
                if (c.seqlen <= 0 || tokens % c.seqlen != 0 || c.seqlen % 256 != 0) {
                    fprintf(stderr, "fa3: --seqlen %s is not a multiple of 256 that divides %d\n",
                            seqlen.c_str(), tokens);
                    return 2;
                }
                // NaN in all that the kernels should write.
                for (__nv_bfloat16 *x : {t.o, t.dq, t.dk, t.dv}) check(cudaMemset(x, 0xff, num * sizeof *x));
                check(cudaMemset(t.dq_sums, 0xff, padded_num * sizeof *t.dq_sums));
                check(cudaMemset(t.counter, 0, sizeof *t.counter));
                launch_forward(c, t);
                check(cudaDeviceSynchronize());
                check_forward(c, t);
                for (const std::string &pass : split(passes)) {
                    bool backward = pass == "bwd";
                    if (backward) {
                        launch_backward(c, t);
                        check(cudaDeviceSynchronize());
                        check_backward(c, t);
                    }
                    for (const std::string &mode : split(modes)) {
                        double ms = time_cell(c, t, backward, mode == "sustained");
                        fprintf(out, "%s,bf16,%d,%d,%d,%d,%d,fa3,%s,%.5f,%.1f\n", pass.c_str(), c.hdim,
                                c.causal, c.seqlen, c.batch(), c.heads(), mode.c_str(), ms,
                                c.flop(backward) / ms / 1e9);
                    }
                }
            }
    return fclose(out) != 0;
}
