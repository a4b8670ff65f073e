/* moe.c - the CPU backend's mixture of experts: router, sort by expert, combination, and the grouped GEMM, which is the GEMM of
 * each expert's rows in turn.
 *
 * Invariant: a token's results are made by one thread in one order, and a row of a GEMM has the same bits for any number of rows
 * (gemm.c): the load of an expert changes no bit. */
#include "device/cpu/moe/token_rows.h"

#include <math.h>
#include <string.h>

/* n elements of t from i on as f32: in place, or in buf. */
static const float *values_at(struct tensor t, int64_t i, int64_t n, float *buf) {
    if (t.dt == DT_F32) return (const float *)t.data + i;
    const uint16_t *restrict x = (const uint16_t *)t.data + i;
    for (int64_t c = 0; c < n; c++) buf[c] = bf16_to_f32(x[c]);
    return buf;
}

/* ---- router ---- */

struct route_job {
    const struct route_args *a;
    struct tensor dlogits, dweight;
};

/* p (E) = softmax of row t; z: its logits, NaN as -infinity. */
static void row_softmax(struct tensor logits, int64_t t, float *p, float *z) {
    const int64_t n = logits.dim[1];
    float max = -INFINITY, sum = 0;
    for (int64_t e = 0; e < n; e++) {
        p[e] = value_at(logits, t * n + e);
        z[e] = isnan(p[e]) ? -INFINITY : p[e];
        max = z[e] > max ? z[e] : max;
    }
    for (int64_t e = 0; e < n; e++) sum += p[e] = expf(p[e] - max);
    for (int64_t e = 0; e < n; e++) p[e] /= sum;
}

/* id (k): the largest of z, by insertion; equal ones keep the lower id first. */
static void top_k(const float *z, int64_t n, int32_t *id, int64_t k) {
    int64_t have = 0;
    for (int64_t e = 0; e < n; e++) {
        if (have == k && !(z[e] > z[id[k - 1]])) continue;
        int64_t s = have < k ? have++ : k - 1;
        for (; s > 0 && z[e] > z[id[s - 1]]; s--) id[s] = id[s - 1];
        id[s] = (int32_t)e;
    }
}

/* The sum of the chosen, in their order; 1 where weights are not normalised. */
static float chosen_sum(const struct route_args *a, const float *p, const int32_t *id) {
    float sum = 0;
    for (int64_t s = 0; s < a->expert.dim[1]; s++) sum += p[id[s]];
    return a->normalize ? sum : 1;
}

static void route_fwd_part(void *arg, int64_t part, int thread) {
    const struct route_args *const a = ((const struct route_job *)arg)->a;
    const int64_t n = a->logits.dim[1], k = a->expert.dim[1], end = part_end(a->logits.dim[0], part);
    float p[DEV_MAX_EXPERTS], z[DEV_MAX_EXPERTS];
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++) {
        int32_t *const id = (int32_t *)a->expert.data + t * k;
        row_softmax(a->logits, t, p, z);
        const int32_t *const given = a->given.data ? (const int32_t *)a->given.data + t * k : NULL;
        if (given && given[0] >= 0) memcpy(id, given, (size_t)k * sizeof *id);
        else top_k(z, n, id, k);
        for (int64_t s = 0; s < k; s++) CHECK(id[s] >= 0 && id[s] < n);
        const float sum = chosen_sum(a, p, id);
        for (int64_t s = 0; s < k; s++) put(a->weight, t * k + s, p[id[s]] / sum);
    }
}

int cpu_route_fwd(struct dev *d, const struct route_args *a) {
    if (route_by_scores(a)) return cpu_score_route_fwd(d, a);
    struct route_job j = {.a = a};
    pool_run(cpu_of(d)->pool, parts_of(a->logits.dim[0]), route_fwd_part, &j);
    return 0;
}

static void route_bwd_part(void *arg, int64_t part, int thread) {
    const struct route_job *const j = arg;
    const struct route_args *const a = j->a;
    const int64_t n = a->logits.dim[1], k = a->expert.dim[1], end = part_end(a->logits.dim[0], part);
    float p[DEV_MAX_EXPERTS], dz[DEV_MAX_EXPERTS];
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++) {
        const int32_t *const id = (const int32_t *)a->expert.data + t * k;
        const float *const dw = (const float *)j->dweight.data + t * k;
        row_softmax(a->logits, t, p, dz);
        const float sum = chosen_sum(a, p, id);
        float dot = 0;
        for (int64_t s = 0; s < k; s++) dot += p[id[s]] / sum * dw[s];
        for (int64_t e = 0; e < n; e++) dz[e] = a->normalize ? 0 : -p[e] * dot;
        for (int64_t s = 0; s < k; s++) dz[id[s]] = p[id[s]] / sum * (dw[s] - dot);
        for (int64_t e = 0; e < n; e++) put(j->dlogits, t * n + e, dz[e]);
    }
}

int cpu_route_bwd(struct dev *d, const struct route_args *a, struct tensor dlogits, struct tensor dweight) {
    if (route_by_scores(a)) return cpu_score_route_bwd(d, a, dlogits, dweight);
    struct route_job j = {a, dlogits, dweight};
    pool_run(cpu_of(d)->pool, parts_of(a->logits.dim[0]), route_bwd_part, &j);
    return 0;
}

/* p (E) of a router of sigmoids, and s (E) = 1 - their sigmoids. */
static void row_sigmoids(struct tensor logits, int64_t t, float *p, float *s) {
    const int64_t n = logits.dim[1];
    float sum = 1e-20f;
    for (int64_t e = 0; e < n; e++) sum += p[e] = 1 / (1 + expf(-value_at(logits, t * n + e)));
    for (int64_t e = 0; e < n; e++) {
        s[e] = 1 - p[e];
        p[e] /= sum;
    }
}

/* += the z-loss' gradient of row t; returns the log-sum-exp. */
static float z_gradient(const struct balance_args *a, int64_t t, float *dz) {
    const int64_t n = a->logits.dim[1];
    float p[DEV_MAX_EXPERTS], z[DEV_MAX_EXPERTS], max = -INFINITY, sum = 0;
    row_softmax(a->logits, t, p, z);
    for (int64_t e = 0; e < n; e++) max = z[e] > max ? z[e] : max;
    for (int64_t e = 0; e < n; e++) sum += expf(z[e] - max);
    const float lse = max + logf(sum), by = 2 * a->z * lse;
    for (int64_t e = 0; e < n; e++) dz[e] += by * p[e];
    return lse;
}

static void balance_bwd_part(void *arg, int64_t part, int thread) {
    const struct balance_args *const a = arg;
    const int64_t n = a->logits.dim[1], end = part_end(a->logits.dim[0], part);
    const float *const load = a->load.data;
    float p[DEV_MAX_EXPERTS], z[DEV_MAX_EXPERTS], dz[DEV_MAX_EXPERTS];
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++) {
        float dot = 0;
        if (a->sigmoid) row_sigmoids(a->logits, t, p, z);
        else row_softmax(a->logits, t, p, z);
        for (int64_t e = 0; e < n; e++) dot += load[e] * p[e];
        for (int64_t e = 0; e < n; e++) dz[e] = p[e] * (load[e] - dot) * (a->sigmoid ? z[e] : 1);
        ((float *)a->loss.data)[t] = dot;
        if (a->z_loss.data) {
            const float lse = z_gradient(a, t, dz);
            ((float *)a->z_loss.data)[t] = a->z * lse * lse;
        }
        for (int64_t e = 0; e < n; e++) put(a->dlogits, t * n + e, value_at(a->dlogits, t * n + e) + dz[e]);
    }
}

int cpu_balance_bwd(struct dev *d, const struct balance_args *a) {
    struct balance_args job = *a;
    pool_run(cpu_of(d)->pool, parts_of(a->logits.dim[0]), balance_bwd_part, &job);
    return 0;
}

/* ---- rows by expert ---- */

int cpu_expert_sort(struct dev *d, struct tensor offset, struct tensor token, struct tensor row, struct tensor expert) {
    const int64_t n = offset.dim[0] - 1, k = expert.dim[1], slots = tensor_count(expert);
    const int32_t *const id = expert.data;
    int32_t *const at = offset.data, next[DEV_MAX_EXPERTS];
    (void)d;
    memset(at, 0, (size_t)(n + 1) * sizeof *at);
    for (int64_t i = 0; i < slots; i++) {
        CHECK(id[i] >= 0 && id[i] < n);
        at[id[i] + 1]++;
    }
    for (int64_t e = 0; e < n; e++) {
        next[e] = at[e];
        at[e + 1] += at[e];
    }
    for (int64_t i = 0; i < slots; i++) {
        const int32_t r = next[id[i]]++;
        ((int32_t *)token.data)[r] = (int32_t)(i / k);
        ((int32_t *)row.data)[i] = r;
    }
    return 0;
}

int cpu_clip_offsets(struct dev *d, struct tensor dst, struct tensor offset, int64_t lo, int64_t n) {
    (void)d;
    for (int64_t e = 0; e < offset.dim[0]; e++) {
        const int64_t at = ((const int32_t *)offset.data)[e] - lo;
        ((int32_t *)dst.data)[e] = (int32_t)(at < 0 ? 0 : at > n ? n : at);
    }
    return 0;
}

static struct tensor rows_of(struct tensor x, struct tensor offset, int64_t e) {
    const int32_t *const at = offset.data;
    CHECK(at[e] >= 0 && at[e] <= at[e + 1] && at[e + 1] <= x.dim[0]);
    return tensor_rows(x, at[e], at[e + 1] - at[e]);
}
static struct weight expert_of(struct dev *d, struct weight_stack w, int64_t e) {
    w.w.data = (char *)w.w.data + (size_t)e * cpu_weight_bytes(d, w.w.dt, w.w.n, w.w.k);
    return w.w;
}

int cpu_grouped_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight_stack w, struct tensor offset) {
    for (int64_t e = 0; e < w.count; e++) {
        const struct tensor rows = rows_of(x, offset, e);
        if (rows.dim[0]) TRY(cpu_matmul_fwd(d, rows_of(y, offset, e), rows, expert_of(d, w, e), TENSOR_NONE, false));
    }
    return 0;
}

int cpu_grouped_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight_stack w, struct tensor offset) {
    for (int64_t e = 0; e < w.count; e++) {
        const struct tensor rows = rows_of(dy, offset, e);
        if (rows.dim[0]) TRY(cpu_matmul_dx(d, rows_of(dx, offset, e), rows, expert_of(d, w, e), false));
    }
    return 0;
}

int cpu_grouped_dw(struct dev *d, struct tensor dw, struct tensor dy, struct tensor x, struct tensor offset, bool add) {
    const int64_t n = dw.dim[1], k = dw.dim[2];
    for (int64_t e = 0; e < dw.dim[0]; e++) {
        const struct tensor rows = rows_of(dy, offset, e), one = tensor_2d((float *)dw.data + e * n * k, DT_F32, n, k);
        if (rows.dim[0]) TRY(cpu_matmul_dw(d, one, TENSOR_NONE, rows, rows_of(x, offset, e), add));
        else if (!add) memset(one.data, 0, (size_t)(n * k) * sizeof(float));
    }
    return 0;
}

/* ---- combination ---- */

enum { COLS = 512 /* columns at a time */ };

struct combine_job {
    const struct combine_args *a;
    struct tensor dout, dy, dweight;
};

static void combine_fwd_part(void *arg, int64_t part, int thread) {
    const struct combine_args *const a = ((const struct combine_job *)arg)->a;
    const int64_t k = a->row.dim[1], h = a->y.dim[1], end = part_end(a->row.dim[0], part);
    const int32_t *const row = a->row.data;
    float sum[COLS], buf[COLS];
    (void)thread;
    for (int64_t t = part * ROWS; t < end; t++)
        for (int64_t c0 = 0; c0 < h; c0 += COLS) {
            const int64_t n = h - c0 < COLS ? h - c0 : COLS, at = t * h + c0;
            for (int64_t s = 0; s < k; s++) {
                const float w = a->weight.data ? value_at(a->weight, t * k + s) : 1;
                CHECK(row[t * k + s] >= 0 && row[t * k + s] < a->y.dim[0]);
                const float *const y = values_at(a->y, row[t * k + s] * h + c0, n, buf);
                for (int64_t c = 0; c < n; c++) sum[c] = s ? sum[c] + w * y[c] : w * y[c];
            }
            const float *const from = a->from.data ? (const float *)a->from.data + at : NULL;
            for (int64_t c = 0; c < n; c++) put(a->out, at + c, from ? from[c] + sum[c] : sum[c]);
        }
}

int cpu_combine_fwd(struct dev *d, const struct combine_args *a) {
    struct combine_job j = {.a = a};
    pool_run(cpu_of(d)->pool, parts_of(a->row.dim[0]), combine_fwd_part, &j);
    return 0;
}

enum { LANES = 16 /* sums of a dot product side by side, added in their order */ };

static void combine_bwd_part(void *arg, int64_t part, int thread) {
    const struct combine_job *const j = arg;
    const struct combine_args *const a = j->a;
    const int64_t k = a->row.dim[1], h = a->y.dim[1], end = part_end(a->row.dim[0], part);
    float out_buf[COLS], y_buf[COLS];
    (void)thread;
    for (int64_t i = part * ROWS * k; i < end * k; i++) {
        const int64_t row = ((const int32_t *)a->row.data)[i];
        const float w = value_at(a->weight, i);
        float lane[LANES] = {0}, dot = 0;
        CHECK(row >= 0 && row < a->y.dim[0]);
        for (int64_t c0 = 0; c0 < h; c0 += COLS) {
            const int64_t n = h - c0 < COLS ? h - c0 : COLS;
            const float *const g = values_at(j->dout, i / k * h + c0, n, out_buf);
            const float *const y = values_at(a->y, row * h + c0, n, y_buf);
            for (int64_t c = 0; c < n; c++) lane[c % LANES] += g[c] * y[c];
            for (int64_t c = 0; c < n; c++) put(j->dy, row * h + c0 + c, w * g[c]);
        }
        for (int l = 0; l < LANES; l++) dot += lane[l];
        ((float *)j->dweight.data)[i] = dot;
    }
}

int cpu_combine_bwd(struct dev *d, const struct combine_args *a, struct tensor dout, struct tensor dy, struct tensor dweight) {
    struct combine_job j = {a, dout, dy, dweight};
    pool_run(cpu_of(d)->pool, parts_of(a->row.dim[0]), combine_bwd_part, &j);
    return 0;
}
