//@ local slope = has_score and k.pass == "backward"
//@ local pitch = lanes == "queries" and "tile_q" or "tile_k"
//@ local outer = lanes == "queries" and "k" or "q"
//@ local lane = lanes == "queries" and "q" or "k"
// s = mask(score(scale * s)) of a tile whose rows are ${lanes == "queries" and "keys" or "queries"} and whose columns are ${lanes}. Masked: -inf.
//@ if slope then
// slope = d(score)/d(scale * s)
static void logits(const LoomArgs *args, const Work *work, int q_first, int num_q, int k_first, int num_k,
                   bool full, float *s, float *restrict slope) {
//@ else
static void logits(const LoomArgs *args, const Work *work, int q_first, int num_q, int k_first, int num_k,
                   bool full, float *s) {
//@ end
//@ if has_mask or has_score then
    const int q_lo = work->q_start + q_first, k_lo = work->k_start + k_first;
//@ else
    (void)work;
    (void)q_first;
    (void)k_first;
//@ end
//@ if not has_mask then
    (void)full;
//@ end
    const float scale = args->scale;
    for (int ${outer} = 0; ${outer} < num_${outer}; ++${outer}) {
        float *restrict line = s + ${outer} * ${pitch};
        for (int ${lane} = 0; ${lane} < num_${lane}; ++${lane}) line[${lane}] *= scale;
//@ if has_score then
        for (int ${lane} = 0; ${lane} < num_${lane}; ++${lane}) {
//@     if slope then
            slope[${outer} * ${pitch} + ${lane}] = score_slope(args, work, q_lo + q, k_lo + k, line[${lane}]);
//@     end
            line[${lane}] = score(args, work, q_lo + q, k_lo + k, line[${lane}]);
        }
//@ end
//@ if has_mask then
        if (full) continue;
        for (int ${lane} = 0; ${lane} < num_${lane}; ++${lane}) {
            line[${lane}] = visible(args, work, q_lo + q, k_lo + k) ? line[${lane}] : -INFINITY;
        }
//@ end
    }
}
