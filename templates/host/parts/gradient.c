//@ local pitch = lanes == "queries" and "tile_q" or "tile_k"
//@ local outer = lanes == "queries" and "k" or "q"
//@ local lane = lanes == "queries" and "q" or "k"
// From logits s and dP = dO V^T of a tile to P = exp(s - LSE), in place of s, and dS, in place of dP. Where P is 0 dS is 0
// by selection: dP may be NaN there.
//@ if has_score then
// dS = P (dP - D) slope
static void gradient(const float *restrict lse, const float *restrict delta, const float *restrict slope, int num_q,
                     int num_k, float *restrict s, float *restrict dp) {
//@ else
// dS = P (dP - D)
static void gradient(const float *restrict lse, const float *restrict delta, int num_q, int num_k, float *restrict s,
                     float *restrict dp) {
//@ end
    for (int ${outer} = 0; ${outer} < num_${outer}; ++${outer}) {
        for (int ${lane} = 0; ${lane} < num_${lane}; ++${lane}) {
            const int i = ${outer} * ${pitch} + ${lane};
            const float p = exp_approx(s[i] - lse[q]);
//@ if has_score then
            const float ds = p * (dp[i] - delta[q]) * slope[i];
//@ else
            const float ds = p * (dp[i] - delta[q]);
//@ end
            s[i] = p;
            dp[i] = p == 0 ? 0 : ds;
        }
    }
}
