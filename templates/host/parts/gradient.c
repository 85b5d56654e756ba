//@ local pitch = lanes == "queries" and "tile_q" or "tile_k"
//@ local outer = lanes == "queries" and "k" or "q"
//@ local lane = lanes == "queries" and "q" or "k"
// From logits s and dP = dO V^T of a tile to P = exp(s - LSE), in place of s, and dS, in place of dP. Where P
// is 0 dS is 0 by selection: dP may be NaN there. A masked s gives P = 0 whatever LSE is: a spoiled row must
// not spread.
//@ if has_score then
// dS = P (dP - D) slope
static void gradient(const float *restrict lse, const float *restrict delta, const float *restrict slope,
                     int num_q, int num_k, float *restrict s, float *restrict dp) {
//@ else
// dS = P (dP - D)
static void gradient(const float *restrict lse, const float *restrict delta, int num_q, int num_k,
                     float *restrict s, float *restrict dp) {
//@ end
    for (int ${outer} = 0; ${outer} < num_${outer}; ++${outer}) {
        float weight[${pitch}];  // in a loop of its own, so that the compiler finds no branch to keep
//@ if lanes == "keys" then
        const float lse_q = lse[q], delta_q = delta[q];
//@ end
        for (int ${lane} = 0; ${lane} < num_${lane}; ++${lane}) {
//@ if lanes == "queries" then
            const float lse_q = lse[q];
//@ end
            weight[${lane}] = exp_approx(s[${outer} * ${pitch} + ${lane}] - lse_q);
        }
        for (int ${lane} = 0; ${lane} < num_${lane}; ++${lane}) {
//@ if lanes == "queries" then
            const float delta_q = delta[q];
//@ end
            const int i = ${outer} * ${pitch} + ${lane};
            const float p = s[i] == -INFINITY ? 0 : weight[${lane}];
//@ if has_score then
            const float ds = p * (dp[i] - delta_q) * slope[i];
//@ else
            const float ds = p * (dp[i] - delta_q);
//@ end
            s[i] = p;
            dp[i] = p == 0 ? 0 : ds;
        }
    }
}
