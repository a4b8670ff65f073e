/* lm_head.c - the ref backend's LM head with log-softmax, raw logits and
 * the sampler.
 * Invariant: one function computes a logit and one accumulates softmax
 * statistics, in chunks of DEV_VOCAB_CHUNK, so the log-prob of a sampled id and
 * that of a training row have equal bits. */
#include "device/ref/ref_int.h"

#include "base/buf.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- softmax statistics of one row of z = raw logit * inv_temp ---- */

struct stats {
    double max, sum, sum_z, sum_sq; /* sum e, sum e z, sum e^2 with e = exp(z - max) */
};
#define STATS_EMPTY ((struct stats){-INFINITY, 0, 0, 0})

/* The next chunk of the vocabulary, in id order. */
static void stats_add(struct stats *s, const float *raw, int64_t n, float inv_temp) {
    double max = s->max;
    for (int64_t j = 0; j < n; j++)
        if (raw[j] * inv_temp > max) max = raw[j] * inv_temp;
    const double correction = exp(s->max - max); /* 0 for the first chunk */
    s->max = max;
    s->sum *= correction;
    s->sum_z *= correction;
    s->sum_sq *= correction * correction;
    for (int64_t j = 0; j < n; j++) {
        const double z = raw[j] * inv_temp, e = exp(z - max);
        s->sum += e;
        s->sum_z += e * z;
        s->sum_sq += e * e;
    }
}
static double stats_lse(const struct stats *s) { return s->max + log(s->sum); }

/* ---- logits ---- */

/* Raw logits of row r for ids [lo, hi), always rounded to f32. */
static void logits_chunk(float *out, struct tensor x, int64_t r, struct weight w, int64_t lo, int64_t hi) {
    double *row = xcalloc((size_t)(w.k + hi - lo) + 1, sizeof *row), *sum = row + w.k;
    ref_row(row, x, r, w.k);
    ref_dots(sum, row, w, lo, hi);
    for (int64_t j = 0; j < hi - lo; j++) out[j] = (float)(w.softcap > 0 ? w.softcap * tanh(sum[j] / w.softcap) : sum[j]);
    free(row);
}
static int64_t chunk_end(int64_t lo, int64_t vocab) { return lo + DEV_VOCAB_CHUNK < vocab ? lo + DEV_VOCAB_CHUNK : vocab; }

int ref_logits(struct dev *d, struct tensor out, struct tensor x, struct weight w) {
    (void)d;
    for (int64_t r = 0; r < x.dim[0]; r++) logits_chunk(ref_f32(out) + r * w.n, x, r, w, 0, w.n);
    return 0;
}

/* ---- LM head ---- */

/* Raw logits of a row's listed entries among [lo, hi), at their places in out. */
static void list_take(float *out, const int32_t *id, int64_t n, const float *raw, int64_t lo, int64_t hi) {
    for (int64_t i = 0; i < n; i++)
        if (id[i] >= lo && id[i] < hi) out[i] = raw[id[i] - lo];
}

/* The k largest of entries [0, lo + n) from those of [0, lo): an entry goes behind all that are as large, so
 * equal ones stand by id. NaN is never larger. */
static void top_take(int32_t *id, float *top, int64_t k, const float *raw, int64_t lo, int64_t n) {
    for (int64_t j = 0; j < n; j++) {
        int64_t at = k;
        while (at > 0 && (id[at - 1] < 0 || raw[j] > top[at - 1])) at--;
        if (at == k || isnan(raw[j])) continue;
        for (int64_t i = k - 1; i > at; i--) id[i] = id[i - 1], top[i] = top[i - 1];
        id[at] = (int32_t)(lo + j);
        top[at] = raw[j];
    }
}

/* The place of row r's kept logits; NULL: none. */
static float *kept_row(const struct lmhead_args *a, int64_t r) {
    return dev_kept_rows(a, r, 1) ? ref_f32(a->kept) + (a->kept_at + r) * a->kept.dim[1] : NULL;
}

int ref_lmhead_fwd(struct dev *d, const struct lmhead_args *a) {
    (void)d;
    float *raw = xmalloc(DEV_VOCAB_CHUNK * sizeof *raw);
    const int64_t n_top = a->top_id.data ? a->top_id.dim[1] : 0, n_list = a->list_id.data ? a->list_id.dim[1] : 0;
    for (int64_t r = 0; r < a->x.dim[0]; r++) {
        const int64_t target = ref_index(a->target, r, a->w.n);
        int32_t *top_id = n_top ? (int32_t *)a->top_id.data + r * n_top : NULL;
        float *top = n_top ? ref_f32(a->top_logp) + r * n_top : NULL; /* raw logits until the row's end, as are the list's */
        const int32_t *list_id = n_list ? (const int32_t *)a->list_id.data + r * n_list : NULL;
        float *list = n_list ? ref_f32(a->list_logp) + r * n_list : NULL;
        for (int64_t i = 0; i < n_top; i++) top_id[i] = -1;
        const float inv_temp = ref_f32(a->inv_temp)[r];
        float *const kept = kept_row(a, r);
        struct stats s = STATS_EMPTY;
        float z_target = 0;
        for (int64_t lo = 0, hi; lo < a->w.n; lo = hi) {
            hi = chunk_end(lo, a->w.n);
            logits_chunk(raw, a->x, r, a->w, lo, hi);
            if (kept) memcpy(kept + lo, raw, (size_t)(hi - lo) * sizeof *raw);
            stats_add(&s, raw, hi - lo, inv_temp);
            if (target >= lo && target < hi) z_target = raw[target - lo] * inv_temp;
            list_take(list, list_id, n_list, raw, lo, hi);
            top_take(top_id, top, n_top, raw, lo, hi - lo);
        }
        const double lse = stats_lse(&s);
        ref_f32(a->logp)[r] = (float)(z_target - lse);
        if (a->lse.data) ref_f32(a->lse)[r] = (float)lse;
        if (a->entropy.data) ref_f32(a->entropy)[r] = (float)(lse - s.sum_z / s.sum);
        if (a->sum_pi_sq.data) ref_f32(a->sum_pi_sq)[r] = (float)(s.sum_sq / (s.sum * s.sum));
        for (int64_t i = 0; i < n_list; i++) list[i] = (float)(list[i] * inv_temp - lse);
        for (int64_t i = 0; i < n_top; i++) {
            top[i] = top_id[i] < 0 ? NAN : (float)(top[i] * inv_temp - lse);
            if (top_id[i] < 0) top_id[i] = 0;
        }
    }
    free(raw);
    return 0;
}

/* The derivative of the softcap where it gives `raw`. */
static float cap_slope(float raw, struct weight w) { return w.softcap > 0 ? 1 - raw / w.softcap * (raw / w.softcap) : 1; }

/* dz_j = inv_temp * (dlogp * (1[j = target] - p_j) - dentropy * p_j * (log p_j + H)), a list entry's dlist as the
 * target's dlogp, all times the slope of the softcap; then the two matmuls dx = dz . W and dw += dz^T . x, a chunk of dz at a
 * time. */
int ref_lmhead_bwd(struct dev *d, const struct lmhead_args *a, const struct lmhead_bwd_args *g) {
    (void)d;
    const struct weight w = a->w;
    const struct tensor dw = g->dw;
    float *dz = xmalloc(DEV_VOCAB_CHUNK * sizeof *dz), *slope = xmalloc(DEV_VOCAB_CHUNK * sizeof *slope);
    double *dxr = xmalloc((size_t)w.k * sizeof *dxr);
    float *own = dw.data && g->add ? xcalloc((size_t)(w.n * w.k), sizeof *own) : NULL, *sum = own ? own : ref_f32(dw); /* of dw */
    if (dw.data && !g->add) memset(dw.data, 0, (size_t)(w.n * w.k) * sizeof(float));
    const int64_t n_list = a->dlist.data ? a->dlist.dim[1] : 0;
    for (int64_t r = 0; r < a->x.dim[0]; r++) {
        const int64_t target = ref_index(a->target, r, w.n);
        const float inv_temp = ref_f32(a->inv_temp)[r], *const kept = kept_row(a, r);
        const double lse = ref_f32(a->lse)[r], dl = ref_f32(g->dlogp)[r];
        const int32_t *list_id = n_list ? (const int32_t *)a->list_id.data + r * n_list : NULL;
        const float *dlist = n_list ? ref_f32(a->dlist) + r * n_list : NULL;
        double all = dl;
        for (int64_t i = 0; i < n_list; i++) all += dlist[i];
        const double dh = g->dentropy.data ? ref_f32(g->dentropy)[r] : 0;
        const double entropy = g->dentropy.data ? ref_f32(a->entropy)[r] : 0;
        for (int64_t k = 0; k < w.k; k++) dxr[k] = 0;
        for (int64_t lo = 0, hi; lo < w.n; lo = hi) {
            hi = chunk_end(lo, w.n);
            if (kept) memcpy(dz, kept + lo, (size_t)(hi - lo) * sizeof *dz);
            else logits_chunk(dz, a->x, r, w, lo, hi);
            for (int64_t j = lo; j < hi; j++) {
                const double log_p = dz[j - lo] * inv_temp - lse, p = exp(log_p);
                slope[j - lo] = cap_slope(dz[j - lo], w);
                dz[j - lo] = (float)(inv_temp * slope[j - lo] * ((j == target ? dl : 0) - all * p - dh * p * (log_p + entropy)));
            }
            for (int64_t i = 0; i < n_list; i++)
                if (list_id[i] >= lo && list_id[i] < hi) dz[list_id[i] - lo] += inv_temp * slope[list_id[i] - lo] * dlist[i];
            for (int64_t j = lo; j < hi; j++) {
                ref_add_scaled(dxr, dz[j - lo], w.data, w.dt, j * w.k, w.k);
                for (int64_t k = 0; sum && k < w.k; k++) sum[j * w.k + k] += dz[j - lo] * ref_at(a->x, r * w.k + k);
            }
        }
        for (int64_t k = 0; k < w.k; k++) ref_put(g->dx.data, g->dx.dt, r * w.k + k, dxr[k]);
    }
    for (int64_t i = 0; own && i < w.n * w.k; i++) ref_f32(dw)[i] += own[i];
    free(own);
    free(dz);
    free(slope);
    free(dxr);
    return 0;
}

/* ---- sampler ---- */

struct entry { /* of the vocabulary */
    float z;
    int32_t id;
};

/* Largest first, equal ones by id; NaN ranks last. */
static int entry_order(const void *va, const void *vb) {
    const struct entry *a = va, *b = vb;
    if (a->z > b->z || (isnan(b->z) && !isnan(a->z))) return -1;
    if (a->z < b->z || (isnan(a->z) && !isnan(b->z))) return 1;
    return (a->id > b->id) - (a->id < b->id);
}
static int entry_by_id(const void *va, const void *vb) {
    const struct entry *a = va, *b = vb;
    return (a->id > b->id) - (a->id < b->id);
}

/* How many of the n entries, sorted by entry_order, the rule keeps: at least one. */
static int64_t truncate_entries(const struct entry *e, int64_t n, const struct sample_param *p) {
    if (p->top_k > 0 && p->top_k < n) n = p->top_k;
    if (p->top_p < 1) {
        double total = 0, sum = 0;
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) total += exp((double)e[i].z - e[0].z);
        while (kept < n && sum < (double)p->top_p * total) sum += exp((double)e[kept++].z - e[0].z);
        n = kept;
    }
    while (n > 1 && exp((double)e[n - 1].z - e[0].z) < p->min_p) n--;
    return n > 0 ? n : 1; /* 0: the logits were NaN */
}

/* Inverse CDF over n entries in id order: the first whose running sum passes u of the whole. */
static const struct entry *draw(const struct entry *e, int64_t n, float u, double *log_total) {
    double max = -INFINITY, total = 0, sum = 0;
    for (int64_t i = 0; i < n; i++)
        if (e[i].z > max) max = e[i].z;
    for (int64_t i = 0; i < n; i++) total += exp(e[i].z - max);
    *log_total = max + log(total);
    for (int64_t i = 0; i < n; i++) {
        sum += exp(e[i].z - max);
        if (sum > u * total) return &e[i];
    }
    return &e[n - 1]; /* rounding, or NaN logits: an id in range, whose logp tells */
}

/* The rule on one row; work (V) is scratch. */
static int32_t sample_row(const float *raw, int64_t vocab, const uint8_t *seen, const struct sample_param *p, struct entry *work,
                          float *logp_kept) {
    int64_t best = 0;
    for (int64_t j = 0; j < vocab; j++) {
        float z = raw[j];
        if (seen && (seen[j / 8] >> (j % 8) & 1)) z = z > 0 ? z / p->repetition_penalty : z * p->repetition_penalty;
        work[j] = (struct entry){p->greedy ? z : z * p->inv_temp, (int32_t)j};
        if (entry_order(&work[j], &work[best]) < 0) best = j;
    }
    *logp_kept = 0;
    if (p->greedy) return (int32_t)best;
    int64_t n = vocab;
    if (p->top_k > 0 || p->top_p < 1 || p->min_p > 0) {
        qsort(work, (size_t)vocab, sizeof *work, entry_order);
        n = truncate_entries(work, vocab, p);
        qsort(work, (size_t)n, sizeof *work, entry_by_id);
    }
    double log_total;
    const struct entry *e = draw(work, n, p->u, &log_total);
    *logp_kept = (float)(e->z - log_total);
    return e->id;
}

int ref_sample(struct dev *d, const struct sample_args *a) {
    (void)d;
    const int64_t vocab = a->logits.dim[1];
    struct entry *work = xmalloc((size_t)vocab * sizeof *work);
    for (int64_t r = 0; r < a->logits.dim[0]; r++) {
        const struct sample_param *p = &a->param[r];
        const float *raw = ref_f32(a->logits) + r * vocab, inv_temp = p->inv_temp;
        const uint8_t *seen = a->seen.data ? (const uint8_t *)a->seen.data + r * a->seen.dim[1] : NULL;
        float kept;
        const int32_t id = sample_row(raw, vocab, seen, p, work, &kept);
        struct stats s = STATS_EMPTY; /* of the raw logits: the penalty does not enter logp */
        for (int64_t lo = 0, hi; lo < vocab; lo = hi) {
            hi = chunk_end(lo, vocab);
            stats_add(&s, raw + lo, hi - lo, inv_temp);
        }
        ((int32_t *)a->id.data)[r] = id;
        ref_f32(a->logp)[r] = (float)(raw[id] * inv_temp - stats_lse(&s));
        if (a->logp_kept.data) ref_f32(a->logp_kept)[r] = kept;
    }
    free(work);
    return 0;
}
