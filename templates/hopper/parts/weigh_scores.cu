// P, times weight_unit, and P with d(score)/ds, times slope_unit. `query` and `key` are this thread's first, of the sequences. What is not
// seen, or -inf by its score, has 0 of both.
//@ if has_mask then
template <bool masked>
//@ text("static __device__ __forceinline__ void weigh_scores(unsigned (&p)[tile_q / 4], unsigned (&sloped)[tile_q / 4], const float (&s)[tile_q / 2], const LoomArgs *args, const Work *work, int query, int key, const float *exact_lse, const Seen *seen) {")
//@ else
//@ text("static __device__ __forceinline__ void weigh_scores(unsigned (&p)[tile_q / 4], unsigned (&sloped)[tile_q / 4], const float (&s)[tile_q / 2], const LoomArgs *args, const Work *work, int query, int key, const float *exact_lse) {")
//@ end
#pragma unroll
    for (int i = 0; i < tile_q / 2; i += 2) {
        float weight[2], slope[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int of_query = i / 4 * 8 + e, of_key = i / 2 % 2 * 8;
            const int q = work->q_start + query + of_query, k = work->k_start + key + of_key;
            const float x = s[i + e] * args->scale;
            float exponent = fmaf(score(args, work, q, k, x) - exact_lse[threadIdx.x % 4 * 2 + of_query], log2_e, weight_log2);
//@ if has_mask then
            if (masked && !is_seen(seen, i + e)) exponent = __int_as_float(0xff800000);
//@ else
            if (key + of_key >= args->seq_k) exponent = __int_as_float(0xff800000);
//@ end
            weight[e] = exp2_approx(exponent);
            slope[e] = weight[e] == 0 ? 0 : weight[e] * (score_slope(args, work, q, k, x) * (slope_unit / weight_unit));
        }
        p[i / 2] = pack_weights(weight[0], weight[1]);
        sloped[i / 2] = pack_weights(slope[0], slope[1]);
    }
}
