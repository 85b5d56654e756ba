/* reference_pass.h - plain attention at one precision. Included twice by reference.c, which sets
 *   REAL        double or float: the arithmetic
 *   NAME(x)     name of a function of this precision
 *   ARITHMETIC  how scores are evaluated
 *   EXP, LOG    of REAL
 *   ROUND(r, x) x as the problem's dtype stores it; x itself in double
 *
 * Rows are computed by one task per (batch, head, ROWS rows): O, LSE, dQ. Keys by one task per (batch, kv
 * head, block of keys): dK, dV. P is computed anew there from the row's maximum and sum, so no row needs more
 * than its own scores.
 */

/* k and v of one (batch, kv head): as rows [seq_k][dim], and by blocks of `width` keys, transposed:
 * [block][dim][width]. */
typedef struct NAME(side) {
    REAL *k, *v, *k_blocks, *v_blocks;
} NAME(side);

typedef struct NAME(work) {
    const job *job;
    NAME(side) * sides; /* [batch * heads_kv] */
    REAL *maximum, *sum, *delta; /* [batch, head, row]; sum is 0 on a row that sees nothing */
} NAME(work);

static bool NAME(prepare_dim)(const job *job, const loom_tensor *tensor, int dim, int64_t batch, int64_t head,
                              REAL **rows, REAL **blocks) {
    int64_t seq = job->shape.seq_k, width = job->width, padded = (seq + width - 1) / width * width;
    *rows = calloc((size_t)(padded * dim) + 1, sizeof(REAL));
    *blocks = calloc((size_t)(padded * dim) + 1, sizeof(REAL));
    if (!*rows || !*blocks) return false;
    for (int64_t j = 0; j < seq; j++) {
        int64_t from = batch * tensor->stride[0] + j * tensor->stride[1] + head * tensor->stride[2];
        for (int x = 0; x < dim; x++) {
            REAL value = loom__element_get(tensor->data, job->reference->dtype, from + x);
            (*rows)[j * dim + x] = value;
            (*blocks)[(j / width * dim + x) * width + j % width] = value;
        }
    }
    return true;
}

static void NAME(dots)(const REAL *row, const REAL *block, int dim, int width, REAL *sums) {
    for (int c = 0; c < width; c++) sums[c] = 0;
    for (int x = 0; x < dim; x++)
        for (int c = 0; c < width; c++) sums[c] += row[x] * block[(int64_t)x * width + c];
}

/* Final logits of one row and one block of keys, with d(score)/ds. seen[c] is false on masked keys and past
 * the end. Returns how many are seen. */
static int NAME(logits)(const NAME(work) * work, place *place, int64_t head_kv, int64_t block, const REAL *q,
                        REAL *score, REAL *slope, bool *seen) {
    const job *job = work->job;
    const loom__reference *r = job->reference;
    int width = job->width, dim = r->d, count = 0;
    int64_t first = block * width;
    lanes out;
    double s[LANES];
    place->num_lanes = (int)(job->shape.seq_k - first < width ? job->shape.seq_k - first : width);
    place->col = (int32_t)first;
    place->k = wrap(job->k_start + first);
    for (int c = 0; c < width; c++) seen[c] = c < place->num_lanes;
    if (r->mask) {
        place->arithmetic = LOOM__ROUNDED;
        place->expression = r->mask;
        evaluate(r->mask->root, place, &out);
        for (int c = 0; c < place->num_lanes; c++) seen[c] = out.i[c];
    }
    for (int c = 0; c < width; c++) count += seen[c];
    if (!count) return 0;
    const NAME(side) *side = &work->sides[place->b * job->shape.heads_kv + head_kv];
    NAME(dots)(q, side->k_blocks + block * dim * width, dim, width, score);
    for (int c = 0; c < width; c++) {
        score[c] *= (REAL)job->scale;
        slope[c] = 1;
    }
    if (r->score) {
        for (int c = 0; c < width; c++) s[c] = (double)score[c];
        place->arithmetic = ARITHMETIC;
        place->expression = r->score;
        place->s = s;
        evaluate(r->score->root, place, &out);
        for (int c = 0; c < place->num_lanes; c++) {
            score[c] = (REAL)(r->score->root->type == LOOM__TYPE_F32 ? out.f[c] : out.i[c]);
            slope[c] = r->score->root->type == LOOM__TYPE_F32 ? (REAL)out.slope[c] : 0;
        }
    }
    for (int c = 0; c < width; c++) {
        if (seen[c] && score[c] == -(REAL)INFINITY) {
            seen[c] = false;
            count--;
        }
    }
    return count;
}

static void NAME(read_row)(const job *job, const loom_tensor *tensor, int64_t batch, int64_t row,
                           int64_t head, int dim, REAL *out) {
    int64_t from = batch * tensor->stride[0] + row * tensor->stride[1] + head * tensor->stride[2];
    for (int x = 0; x < dim; x++) out[x] = loom__element_get(tensor->data, job->reference->dtype, from + x);
}

/* O, LSE and dQ of one row. scratch holds 3 * padded seq_k + 2 * d + 2 * dv values, flags padded seq_k. */
static void NAME(row)(const NAME(work) * work, int64_t batch, int64_t head, int64_t row, REAL *scratch,
                      bool *flags) {
    const job *job = work->job;
    const loom__reference *r = job->reference;
    const loom_shape *shape = &job->shape;
    int64_t width = job->width, blocks = (shape->seq_k + width - 1) / width, padded = blocks * width;
    int64_t head_kv = head / (shape->heads_q / shape->heads_kv);
    const NAME(side) *side = &work->sides[batch * shape->heads_kv + head_kv];
    REAL *score = scratch, *slope = score + padded, *dp = slope + padded, *q = dp + padded, *dq = q + r->d;
    REAL *o = dq + r->d, *dout = o + r->dv;
    int64_t index = (batch * shape->heads_q + head) * shape->seq_q + row;
    int64_t dense = (batch * shape->seq_q + row) * shape->heads_q + head;
    place place = make_place(job, batch, head, head_kv, row);
    REAL maximum = -(REAL)INFINITY, sum = 0, lse = -(REAL)INFINITY, delta = 0;
    bool spoiled = false;
    NAME(read_row)(job, &job->args->q, batch, row, head, r->d, q);
    for (int64_t t = 0; t < blocks; t++) {
        bool *seen = flags + t * width;
        int count = NAME(logits)(work, &place, head_kv, t, q, score + t * width, slope + t * width, seen);
        for (int c = 0; c < width && count; c++) {
            if (!seen[c]) continue;
            spoiled = spoiled || isnan(score[t * width + c]);
            if (score[t * width + c] > maximum)
                maximum = score[t * width + c];
        }
    }
    if (spoiled)
        maximum = (REAL)NAN;
    for (int64_t j = 0; j < padded; j++) {
        if (!flags[j]) continue;
        score[j] = EXP(score[j] - maximum);
        sum += score[j];
    }
    memset(o, 0, (size_t)r->dv * sizeof *o);
    for (int64_t j = 0; j < padded && sum != 0; j++) {
        if (!flags[j]) continue;
        score[j] /= sum;
        REAL p = ROUND(r, score[j]);
        for (int x = 0; x < r->dv; x++) o[x] += p * side->v[j * r->dv + x];
    }
    if (sum != 0)
        lse = maximum + LOG(sum);
    for (int x = 0; x < r->dv; x++) {
        o[x] = ROUND(r, o[x]);
        job->result->o[dense * r->dv + x] = (double)o[x];
    }
    job->result->lse[index] = (double)lse;
    if (!job->backward) return;
    work->maximum[index] = maximum;
    work->sum[index] = sum;
    memset(dq, 0, (size_t)r->d * sizeof *dq);
    if (sum != 0) {
        NAME(read_row)(job, &job->args->dout, batch, row, head, r->dv, dout);
        for (int x = 0; x < r->dv; x++) delta += dout[x] * o[x];
        delta -= (REAL)read_dlse(job, batch, head, row);
        work->delta[index] = delta;
        for (int64_t t = 0; t < blocks; t++) {
            if (!memchr(flags + t * width, true, (size_t)width)) continue;
            NAME(dots)(dout, side->v_blocks + t * r->dv * width, r->dv, (int)width, dp + t * width);
            for (int64_t j = t * width; j < (t + 1) * width; j++) {
                if (!flags[j]) continue;
                REAL ds = ROUND(r, score[j] * (dp[j] - delta) * slope[j]);
                for (int x = 0; x < r->d; x++) dq[x] += ds * side->k[j * r->d + x];
            }
        }
    }
    for (int x = 0; x < r->d; x++)
        job->result->dq[dense * r->d + x] = (double)ROUND(r, dq[x] * (REAL)job->scale);
}

/* dK and dV of one block of keys. scratch holds width * (d + dv) + 3 * width + d + dv values. */
static void NAME(keys)(const NAME(work) * work, int64_t batch, int64_t head_kv, int64_t block,
                       REAL *scratch) {
    const job *job = work->job;
    const loom__reference *r = job->reference;
    const loom_shape *shape = &job->shape;
    int width = job->width, group = (int)(shape->heads_q / shape->heads_kv);
    const NAME(side) *side = &work->sides[batch * shape->heads_kv + head_kv];
    REAL *dk = scratch, *dv = dk + (int64_t)width * r->d, *score = dv + (int64_t)width * r->dv;
    REAL *slope = score + width, *dp = slope + width, *q = dp + width, *dout = q + r->d;
    bool seen[LANES];
    memset(dk, 0, (size_t)width * (size_t)(r->d + r->dv) * sizeof *dk);
    for (int64_t head = head_kv * group; head < (head_kv + 1) * group; head++) {
        for (int64_t row = 0; row < shape->seq_q; row++) {
            int64_t index = (batch * shape->heads_q + head) * shape->seq_q + row;
            place place = make_place(job, batch, head, head_kv, row);
            if (work->sum[index] == 0) continue;
            NAME(read_row)(job, &job->args->q, batch, row, head, r->d, q);
            if (!NAME(logits)(work, &place, head_kv, block, q, score, slope, seen)) continue;
            NAME(read_row)(job, &job->args->dout, batch, row, head, r->dv, dout);
            NAME(dots)(dout, side->v_blocks + block * r->dv * width, r->dv, width, dp);
            for (int c = 0; c < width; c++) {
                if (!seen[c]) continue;
                REAL p = EXP(score[c] - work->maximum[index]) / work->sum[index];
                REAL ds = ROUND(r, p * (dp[c] - work->delta[index]) * slope[c]);
                p = ROUND(r, p);
                for (int x = 0; x < r->dv; x++) dv[c * r->dv + x] += p * dout[x];
                for (int x = 0; x < r->d; x++) dk[c * r->d + x] += ds * q[x];
            }
        }
    }
    for (int64_t c = 0; c < width && block * width + c < shape->seq_k; c++) {
        int64_t dense = (batch * shape->seq_k + block * width + c) * shape->heads_kv + head_kv;
        for (int x = 0; x < r->d; x++)
            job->result->dk[dense * r->d + x] = (double)ROUND(r, dk[c * r->d + x] * (REAL)job->scale);
        for (int x = 0; x < r->dv; x++)
            job->result->dv[dense * r->dv + x] = (double)ROUND(r, dv[c * r->dv + x]);
    }
}

static bool NAME(prepare_task)(void *context, int64_t task) {
    NAME(work) *work = context;
    const job *job = work->job;
    int64_t heads = job->shape.heads_kv;
    NAME(side) *side = &work->sides[task];
    return NAME(prepare_dim)(job, &job->args->k, job->reference->d, task / heads, task % heads, &side->k,
                             &side->k_blocks) &&
           NAME(prepare_dim)(job, &job->args->v, job->reference->dv, task / heads, task % heads, &side->v,
                             &side->v_blocks);
}

static bool NAME(rows_task)(void *context, int64_t task) {
    NAME(work) *work = context;
    const job *job = work->job;
    int64_t groups = (job->shape.seq_q + ROWS - 1) / ROWS, padded = job->shape.seq_k + job->width;
    int64_t head = task / groups % job->shape.heads_q, batch = task / groups / job->shape.heads_q;
    int64_t dims = job->reference->d + job->reference->dv;
    REAL *scratch = malloc((size_t)(3 * padded + 2 * dims) * sizeof *scratch);
    bool *flags = malloc((size_t)padded);
    for (int64_t row = task % groups * ROWS; scratch && flags && row < (task % groups + 1) * ROWS; row++)
        if (row < job->shape.seq_q)
            NAME(row)(work, batch, head, row, scratch, flags);
    bool done = scratch && flags;
    free(scratch);
    free(flags);
    return done;
}

static bool NAME(keys_task)(void *context, int64_t task) {
    NAME(work) *work = context;
    const job *job = work->job;
    int64_t blocks = (job->shape.seq_k + job->width - 1) / job->width, heads = job->shape.heads_kv;
    int64_t dims = job->reference->d + job->reference->dv;
    REAL *scratch = malloc((size_t)((job->width + 1) * dims + 3 * job->width) * sizeof *scratch);
    if (scratch)
        NAME(keys)(work, task / blocks / heads, task / blocks % heads, task % blocks, scratch);
    free(scratch);
    return scratch != NULL;
}

static bool NAME(attention)(const job *job) {
    const loom_shape *shape = &job->shape;
    int64_t rows = shape->batch * shape->heads_q * shape->seq_q, sides = shape->batch * shape->heads_kv;
    int64_t row_tasks = shape->batch * shape->heads_q * ((shape->seq_q + ROWS - 1) / ROWS);
    int64_t key_tasks = sides * ((shape->seq_k + job->width - 1) / job->width);
    NAME(work) work = {job, calloc((size_t)sides + 1, sizeof(NAME(side))), NULL, NULL, NULL};
    work.maximum = malloc((size_t)(rows + 1) * sizeof(REAL));
    work.sum = malloc((size_t)(rows + 1) * sizeof(REAL));
    work.delta = malloc((size_t)(rows + 1) * sizeof(REAL));
    bool done = work.sides && work.maximum && work.sum && work.delta;
    done = done && run_tasks(NAME(prepare_task), &work, sides, job->num_threads);
    done = done && run_tasks(NAME(rows_task), &work, row_tasks, job->num_threads);
    if (job->backward) done = done && run_tasks(NAME(keys_task), &work, key_tasks, job->num_threads);
    for (int64_t i = 0; work.sides && i < sides; i++) {
        free(work.sides[i].k);
        free(work.sides[i].v);
        free(work.sides[i].k_blocks);
        free(work.sides[i].v_blocks);
    }
    free(work.sides);
    free(work.maximum);
    free(work.sum);
    free(work.delta);
    return done;
}

#undef REAL
#undef NAME
#undef ARITHMETIC
#undef EXP
#undef LOG
#undef ROUND
