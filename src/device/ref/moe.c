/* moe.c - the ref backend's mixture of experts: router, sort by expert, grouped GEMM, combination; forward and backward.
 *
 * Invariant: a row of a result reads the inputs of its own token alone, whatever else its expert has to do; weight gradients
 * sum over an expert's rows in their order. */
#include "device/ref/ref_int.h"

#include <math.h>

/* ---- router ---- */

/* softmax of row t; p (E) */
static void row_softmax(struct tensor logits, int64_t t, double *p) {
    const int64_t n = logits.dim[1];
    double max = -INFINITY, sum = 0;
    for (int64_t e = 0; e < n; e++) max = fmax(max, ref_at(logits, t * n + e));
    for (int64_t e = 0; e < n; e++) sum += p[e] = exp(ref_at(logits, t * n + e) - max);
    for (int64_t e = 0; e < n; e++) p[e] /= sum;
}

/* Whether expert i is chosen before expert j by token t. */
static bool before(struct tensor logits, int64_t t, int64_t i, int64_t j) {
    const float zi = ref_at(logits, t * logits.dim[1] + i), zj = ref_at(logits, t * logits.dim[1] + j);
    const float a = isnan(zi) ? -INFINITY : zi, b = isnan(zj) ? -INFINITY : zj;
    return a > b || (a == b && i < j);
}

/* The first expert after `last` in that order; -1: of all. */
static int64_t next_choice(struct tensor logits, int64_t t, int64_t last) {
    int64_t at = -1;
    for (int64_t e = 0; e < logits.dim[1]; e++)
        if ((last < 0 || before(logits, t, last, e)) && (at < 0 || before(logits, t, e, at))) at = e;
    return at;
}

int ref_route_fwd(struct dev *d, const struct route_args *a) {
    const int64_t k = a->expert.dim[1];
    int32_t *const id = a->expert.data;
    double p[DEV_MAX_EXPERTS];
    if (route_by_scores(a)) return ref_score_route_fwd(a);
    (void)d;
    for (int64_t t = 0; t < a->logits.dim[0]; t++) {
        int64_t last = -1;
        double sum = 0;
        row_softmax(a->logits, t, p);
        const bool given = a->given.data && ((const int32_t *)a->given.data)[t * k] >= 0;
        for (int64_t s = 0; s < k; s++) {
            last = given ? ref_index(a->given, t * k + s, a->logits.dim[1]) : next_choice(a->logits, t, last);
            id[t * k + s] = (int32_t)last;
            sum += p[last];
        }
        for (int64_t s = 0; s < k; s++)
            ref_put(a->weight.data, a->weight.dt, t * k + s, a->normalize ? p[id[t * k + s]] / sum : p[id[t * k + s]]);
    }
    return 0;
}

int ref_route_bwd(struct dev *d, const struct route_args *a, struct tensor dlogits, struct tensor dweight) {
    const int64_t n = a->logits.dim[1], k = a->expert.dim[1];
    double p[DEV_MAX_EXPERTS], dz[DEV_MAX_EXPERTS];
    if (route_by_scores(a)) return ref_score_route_bwd(a, dlogits, dweight);
    (void)d;
    for (int64_t t = 0; t < a->logits.dim[0]; t++) {
        double sum = 0, dot = 0;
        row_softmax(a->logits, t, p);
        for (int64_t s = 0; s < k; s++) sum += p[ref_index(a->expert, t * k + s, n)];
        if (!a->normalize) sum = 1;
        for (int64_t s = 0; s < k; s++) dot += p[ref_index(a->expert, t * k + s, n)] / sum * ref_f32(dweight)[t * k + s];
        for (int64_t e = 0; e < n; e++) dz[e] = a->normalize ? 0 : -p[e] * dot;
        for (int64_t s = 0; s < k; s++) {
            const int64_t e = ref_index(a->expert, t * k + s, n);
            dz[e] = p[e] / sum * (ref_f32(dweight)[t * k + s] - dot);
        }
        for (int64_t e = 0; e < n; e++) ref_put(dlogits.data, dlogits.dt, t * n + e, dz[e]);
    }
    return 0;
}

/* p (E), and slope (E): dp_e/dz_e over p_e (1 - p_e), and dp_e/dz_j over -p_e p_j. */
static void row_shares(const struct balance_args *a, int64_t t, double *p, double *slope) {
    const int64_t n = a->logits.dim[1];
    double sum = 1e-20;
    if (!a->sigmoid) row_softmax(a->logits, t, p);
    for (int64_t e = 0; e < n; e++) slope[e] = 1;
    for (int64_t e = 0; e < n && a->sigmoid; e++) {
        p[e] = 1 / (1 + exp(-ref_at(a->logits, t * n + e)));
        slope[e] = 1 - p[e];
        sum += p[e];
    }
    for (int64_t e = 0; e < n && a->sigmoid; e++) p[e] /= sum;
}

static double row_lse(struct tensor logits, int64_t t) {
    const int64_t n = logits.dim[1];
    double max = -INFINITY, sum = 0;
    for (int64_t e = 0; e < n; e++) max = fmax(max, ref_at(logits, t * n + e));
    for (int64_t e = 0; e < n; e++) sum += exp(ref_at(logits, t * n + e) - max);
    return max + log(sum);
}

int ref_balance_bwd(struct dev *d, const struct balance_args *a) {
    const int64_t n = a->logits.dim[1];
    const float *const load = ref_f32(a->load);
    double p[DEV_MAX_EXPERTS], slope[DEV_MAX_EXPERTS], dz[DEV_MAX_EXPERTS];
    (void)d;
    for (int64_t t = 0; t < a->logits.dim[0]; t++) {
        double dot = 0;
        row_shares(a, t, p, slope);
        for (int64_t e = 0; e < n; e++) dot += load[e] * p[e];
        for (int64_t e = 0; e < n; e++) dz[e] = p[e] * slope[e] * (load[e] - dot);
        ref_f32(a->loss)[t] = (float)dot;
        if (a->z_loss.data) {
            const double lse = row_lse(a->logits, t), z = (double)a->z;
            row_softmax(a->logits, t, p);
            for (int64_t e = 0; e < n; e++) dz[e] += 2 * z * lse * p[e];
            ref_f32(a->z_loss)[t] = (float)(z * lse * lse);
        }
        for (int64_t e = 0; e < n; e++) ref_put(a->dlogits.data, a->dlogits.dt, t * n + e, ref_at(a->dlogits, t * n + e) + dz[e]);
    }
    return 0;
}

/* ---- rows by expert ---- */

int ref_expert_sort(struct dev *d, struct tensor offset, struct tensor token, struct tensor row, struct tensor expert) {
    const int64_t experts = offset.dim[0] - 1, k = expert.dim[1], slots = tensor_count(expert);
    int32_t at = 0;
    (void)d;
    for (int64_t e = 0; e < experts; e++) {
        ((int32_t *)offset.data)[e] = at;
        for (int64_t i = 0; i < slots; i++) {
            if (ref_index(expert, i, experts) != e) continue;
            ((int32_t *)token.data)[at] = (int32_t)(i / k);
            ((int32_t *)row.data)[i] = at++;
        }
    }
    ((int32_t *)offset.data)[experts] = at;
    return 0;
}

int ref_clip_offsets(struct dev *d, struct tensor dst, struct tensor offset, int64_t lo, int64_t n) {
    (void)d;
    for (int64_t e = 0; e < offset.dim[0]; e++) {
        const int64_t at = ((const int32_t *)offset.data)[e] - lo;
        ((int32_t *)dst.data)[e] = (int32_t)(at < 0 ? 0 : at > n ? n : at);
    }
    return 0;
}

/* Expert e's rows, and its matrix. */
static struct tensor rows_of(struct tensor x, struct tensor offset, int64_t e) {
    const int64_t lo = ref_index(offset, e, x.dim[0] + 1), hi = ref_index(offset, e + 1, x.dim[0] + 1);
    CHECK(lo <= hi);
    return tensor_rows(x, lo, hi - lo);
}
static struct weight expert_of(struct weight_stack w, int64_t e) {
    w.w.data = (char *)w.w.data + (size_t)(e * w.w.n * w.w.k) * dtype_size(w.w.dt);
    return w.w;
}

int ref_grouped_fwd(struct dev *d, struct tensor y, struct tensor x, struct weight_stack w, struct tensor offset) {
    for (int64_t e = 0; e < w.count; e++)
        TRY(ref_matmul_fwd(d, rows_of(y, offset, e), rows_of(x, offset, e), expert_of(w, e), TENSOR_NONE, false));
    return 0;
}

int ref_grouped_dx(struct dev *d, struct tensor dx, struct tensor dy, struct weight_stack w, struct tensor offset) {
    for (int64_t e = 0; e < w.count; e++)
        TRY(ref_matmul_dx(d, rows_of(dx, offset, e), rows_of(dy, offset, e), expert_of(w, e), false));
    return 0;
}

int ref_grouped_dw(struct dev *d, struct tensor dw, struct tensor dy, struct tensor x, struct tensor offset, bool add) {
    for (int64_t e = 0; e < dw.dim[0]; e++) {
        const struct tensor one = tensor_2d(ref_f32(dw) + e * dw.dim[1] * dw.dim[2], DT_F32, dw.dim[1], dw.dim[2]);
        TRY(ref_matmul_dw(d, one, TENSOR_NONE, rows_of(dy, offset, e), rows_of(x, offset, e), add));
    }
    return 0;
}

/* ---- combination ---- */

int ref_combine_fwd(struct dev *d, const struct combine_args *a) {
    const int64_t k = a->row.dim[1], h = a->y.dim[1];
    (void)d;
    for (int64_t t = 0; t < a->row.dim[0]; t++)
        for (int64_t c = 0; c < h; c++) {
            double sum = 0;
            for (int64_t s = 0; s < k; s++)
                sum += (double)(a->weight.data ? ref_at(a->weight, t * k + s) : 1.0f) *
                       ref_at(a->y, ref_index(a->row, t * k + s, a->y.dim[0]) * h + c);
            ref_put(a->out.data, a->out.dt, t * h + c, a->from.data ? ref_f32(a->from)[t * h + c] + (float)sum : sum);
        }
    return 0;
}

int ref_combine_bwd(struct dev *d, const struct combine_args *a, struct tensor dout, struct tensor dy, struct tensor dweight) {
    const int64_t k = a->row.dim[1], h = a->y.dim[1];
    (void)d;
    for (int64_t i = 0; i < a->row.dim[0] * k; i++) {
        const int64_t at = ref_index(a->row, i, a->y.dim[0]) * h, from = i / k * h;
        double dot = 0;
        for (int64_t c = 0; c < h; c++) {
            dot += (double)ref_at(dout, from + c) * ref_at(a->y, at + c);
            ref_put(dy.data, dy.dt, at + c, (double)ref_at(a->weight, i) * ref_at(dout, from + c));
        }
        ref_f32(dweight)[i] = (float)dot;
    }
    return 0;
}
