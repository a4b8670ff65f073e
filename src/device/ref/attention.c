/* attention.c - the ref backend's heads: split, per-head RMSNorm, RoPE and
 * the KV cache (qkv), and causal attention over it, each with its
 * backward.
 * Invariant: a row's result depends on its position and its keys, never on
 * where those keys are stored, so a paged and a contiguous KV cache give equal bits. */
#include "device/ref/ref_int.h"

#include "base/buf.h"

#include <math.h>
#include <stdlib.h>

/* First element of head `head` of slot `slot` of the KV cache (n_kv_blocks, H, block_len, D). */
static int64_t kv_offset(struct tensor cache, int64_t slot, int64_t head) {
    const int64_t n_heads = cache.dim[1], len = cache.dim[2], dim = cache.dim[3];
    CHECK(slot >= 0 && slot < cache.dim[0] * len);
    return ((slot / len * n_heads + head) * len + slot % len) * dim;
}

/* ---- qkv ---- */

/* 1 / rms of the head that starts at element `at`. */
static float head_rstd(struct tensor qkv, int64_t at, int64_t dim, float eps) {
    double sum = 0;
    for (int64_t i = 0; i < dim; i++) sum += (double)ref_at(qkv, at + i) * ref_at(qkv, at + i);
    return (float)(1.0 / sqrt(sum / (double)dim + eps));
}

/* out[0..D) of act = RoPE at p (Su et al. 2021) of the head at `at`, after the optional norm, which rounds as
 * dev_rmsnorm_fwd does. */
static void head_fwd(const struct qkv_args *a, struct tensor norm, int64_t at, int64_t p, void *out, int64_t out_at) {
    const int64_t dim = a->head_dim, half = dim / 2;
    const enum dtype act = a->qkv.dt;
    const float rs = norm.data ? head_rstd(a->qkv, at, dim, a->eps) : 1;
    const float *rope = ref_f32(a->rope) + p * dim; /* (D/2, 2) */
    for (int64_t i = 0; i < half; i++) {
        const int64_t i0 = dev_rope_source(a, i), i1 = dev_rope_source(a, i + half);
        float x0 = ref_at(a->qkv, at + i0), x1 = ref_at(a->qkv, at + i1);
        if (norm.data) {
            const enum dtype first = a->kind == NORM_CAST_SCALE ? act : DT_F32;
            x0 = ref_round(ref_round(x0 * rs, first) * ref_norm_weight(norm, a->kind, i0), act);
            x1 = ref_round(ref_round(x1 * rs, first) * ref_norm_weight(norm, a->kind, i1), act);
        }
        const float c = rope[2 * i], s = rope[2 * i + 1];
        ref_put(out, act, out_at + i, x0 * c - x1 * s);
        ref_put(out, act, out_at + i + half, x1 * c + x0 * s);
    }
}

int ref_qkv_fwd(struct dev *d, const struct qkv_args *a) {
    (void)d;
    const int64_t dim = a->head_dim, n_q = a->n_q_heads, n_k = a->n_kv_heads;
    for (int64_t t = 0; t < a->qkv.dim[0]; t++) {
        const int64_t p = ref_index(a->pos, t, a->rope.dim[0]), slot = ((int32_t *)a->slots.data)[t];
        const int64_t row = t * (n_q + 2 * n_k) * dim;
        for (int64_t h = 0; h < n_q; h++) head_fwd(a, a->q_norm, row + h * dim, p, a->q.data, (t * n_q + h) * dim);
        for (int64_t h = 0; h < n_k; h++) {
            const int64_t to = kv_offset(a->kv.k, slot, h);
            head_fwd(a, a->k_norm, row + (n_q + h) * dim, p, a->kv.k.data, to);
            for (int64_t i = 0; i < dim; i++)
                ref_put(a->kv.v.data, a->kv.v.dt, to + i, ref_at(a->qkv, row + (n_q + n_k + h) * dim + i));
        }
    }
    return 0;
}

struct head_grad {
    struct tensor norm; /* TENSOR_NONE: none, and no dnorm */
    double *dnorm, *dn; /* (D): +=; scratch */
    struct tensor dsrc; /* dy is dsrc[from..from+D) */
    int64_t from, at;   /* at: of the head in qkv and dqkv */
};

/* The transpose of head_fwd at position p: dy -> dqkv. Formulas of the norm as in ref_rmsnorm_bwd. */
static void head_bwd(const struct qkv_args *a, const struct head_grad *g, int64_t p, struct tensor dqkv) {
    const int64_t dim = a->head_dim, half = dim / 2, from = g->from, at = g->at;
    const struct tensor norm = g->norm, dsrc = g->dsrc;
    double *const dnorm = g->dnorm, *const dn = g->dn;
    const float *rope = ref_f32(a->rope) + p * dim;
    for (int64_t i = 0; i < half; i++) { /* rotate back */
        const double y0 = ref_at(dsrc, from + i), y1 = ref_at(dsrc, from + i + half);
        const double c = rope[2 * i], s = rope[2 * i + 1];
        dn[dev_rope_source(a, i)] = y0 * c + y1 * s;
        dn[dev_rope_source(a, i + half)] = y1 * c - y0 * s;
    }
    if (norm.data) {
        const double rs = head_rstd(a->qkv, at, dim, a->eps);
        double mean = 0;
        for (int64_t i = 0; i < dim; i++) {
            const double n = ref_at(a->qkv, at + i) * rs;
            dnorm[i] += dn[i] * n;
            dn[i] *= ref_norm_weight(norm, a->kind, i);
            mean += dn[i] * n / (double)dim;
        }
        for (int64_t i = 0; i < dim; i++) dn[i] = rs * (dn[i] - ref_at(a->qkv, at + i) * rs * mean);
    }
    for (int64_t i = 0; i < dim; i++) ref_put(dqkv.data, dqkv.dt, at + i, dn[i]);
}

int ref_qkv_bwd(struct dev *d, const struct qkv_args *a, const struct qkv_bwd_args *g) {
    (void)d;
    const struct tensor dk = g->dk, dqkv = g->dqkv;
    const int64_t dim = a->head_dim, n_q = a->n_q_heads, n_k = a->n_kv_heads;
    double *dn = xcalloc((size_t)dim, sizeof *dn);
    double *sum_q = xcalloc((size_t)dim, sizeof *sum_q), *sum_k = xcalloc((size_t)dim, sizeof *sum_k);
    for (int64_t t = 0; t < a->qkv.dim[0]; t++) {
        const int64_t p = ref_index(a->pos, t, a->rope.dim[0]), slot = ((int32_t *)a->slots.data)[t];
        const int64_t row = t * (n_q + 2 * n_k) * dim;
        for (int64_t h = 0; h < n_q; h++)
            head_bwd(a, &(struct head_grad){a->q_norm, sum_q, dn, g->dq, (t * n_q + h) * dim, row + h * dim}, p, dqkv);
        for (int64_t h = 0; h < n_k; h++) {
            const int64_t from = kv_offset(dk, slot, h);
            head_bwd(a, &(struct head_grad){a->k_norm, sum_k, dn, dk, from, row + (n_q + h) * dim}, p, dqkv);
            for (int64_t i = 0; i < dim; i++) ref_put(dqkv.data, dqkv.dt, row + (n_q + n_k + h) * dim + i, ref_at(g->dv, from + i));
        }
    }
    for (int64_t i = 0; i < dim; i++) {
        if (a->q_norm.data) ref_f32(g->dq_norm)[i] += (float)sum_q[i];
        if (a->k_norm.data) ref_f32(g->dk_norm)[i] += (float)sum_k[i];
    }
    free(dn);
    free(sum_q);
    free(sum_k);
    return 0;
}

/* ---- attention ---- */

/* Sequence i: rows [row0, row0 + n_rows), the first of them at position pos0. */
struct seq {
    int64_t i, row0, n_rows, pos0;
};

static struct seq seq_at(const struct attn_args *a, int64_t i) {
    const int32_t *start = a->seqs.q_start.data;
    CHECK(start[i] >= 0 && start[i] <= start[i + 1] && start[i + 1] <= a->q.dim[0]);
    return (struct seq){i, start[i], start[i + 1] - start[i], ref_index(a->seqs.pos0, i, INT32_MAX)};
}

static int64_t slot_of(const struct attn_args *a, const struct seq *s, int64_t j) {
    const struct attn_seqs *q = &a->seqs;
    if (q->block_table.data == NULL) return ((int32_t *)q->kv_start.data)[s->i] + j;
    const int64_t len = a->kv.k.dim[2], n = q->block_table.dim[1];
    CHECK(j / len < n);
    return ref_index(q->block_table, s->i * n + j / len, a->kv.k.dim[0]) * len + j % len;
}

/* First key that a query at position p sees; p is the last. */
static int64_t first_key(const struct attn_args *a, int64_t p) { return a->window > 0 && p >= a->window ? p - a->window + 1 : 0; }

static double dot(struct tensor x, int64_t i, struct tensor y, int64_t j, int64_t n) {
    double sum = 0;
    for (int64_t c = 0; c < n; c++) sum += (double)ref_at(x, i + c) * ref_at(y, j + c);
    return sum;
}

/* A scaled score under the softcap; *slope: its derivative. */
static double capped(const struct attn_args *a, double s, double *slope) {
    const double t = a->softcap > 0 ? tanh(s / a->softcap) : 0;
    *slope = 1 - t * t;
    return a->softcap > 0 ? a->softcap * t : s;
}

/* One query row of one head: online softmax (Milakov & Gimelshein 2018) over tiles of keys that
 * start at multiples of DEV_KEY_TILE. acc (D) is scratch. */
static void attend(const struct attn_args *a, const struct seq *s, int64_t row, int64_t head, double *acc) {
    const int64_t dim = a->head_dim, kv_head = head / (a->n_q_heads / a->n_kv_heads);
    const int64_t p = s->pos0 + row - s->row0, lo = first_key(a, p), q = (row * a->n_q_heads + head) * dim;
    double m = -INFINITY, sum = 0, score[DEV_KEY_TILE];
    for (int64_t c = 0; c < dim; c++) acc[c] = 0;
    for (int64_t tile = lo / DEV_KEY_TILE * DEV_KEY_TILE; tile <= p; tile += DEV_KEY_TILE) {
        const int64_t from = tile > lo ? tile : lo;
        const int64_t to = tile + DEV_KEY_TILE <= p ? tile + DEV_KEY_TILE : p + 1;
        double m_new = m;
        for (int64_t j = from; j < to; j++) {
            double slope;
            const double v =
                capped(a, a->scale * dot(a->q, q, a->kv.k, kv_offset(a->kv.k, slot_of(a, s, j), kv_head), dim), &slope);
            score[j - from] = v;
            if (v > m_new) m_new = v;
        }
        const double shrink = exp(m - m_new); /* 0 in the first tile */
        sum *= shrink;
        for (int64_t c = 0; c < dim; c++) acc[c] *= shrink;
        for (int64_t j = from; j < to; j++) {
            const double e = exp(score[j - from] - m_new);
            const int64_t v = kv_offset(a->kv.v, slot_of(a, s, j), kv_head);
            sum += e;
            for (int64_t c = 0; c < dim; c++) acc[c] += e * ref_at(a->kv.v, v + c);
        }
        m = m_new;
    }
    for (int64_t c = 0; c < dim; c++) ref_put(a->out.data, a->out.dt, q + c, acc[c] / sum);
    if (a->lse.data) ref_f32(a->lse)[row * a->n_q_heads + head] = (float)(m + log(sum));
}

int ref_attn_fwd(struct dev *d, const struct attn_args *a) {
    (void)d;
    double *acc = xcalloc((size_t)a->head_dim, sizeof *acc);
    for (int64_t i = 0; i < a->seqs.n; i++) {
        const struct seq s = seq_at(a, i);
        for (int64_t row = s.row0; row < s.row0 + s.n_rows; row++)
            for (int64_t h = 0; h < a->n_q_heads; h++) attend(a, &s, row, h, acc);
    }
    free(acc);
    return 0;
}

/* P and dS of one (query, key) pair, recomputed from the saved log-sum-exp:
 * p = exp(scale q.k - lse), ds = p (dout.v - delta), delta = dout.out (Dao et al. 2022, B.4); ds times the softcap's slope. */
struct pair {
    double p, ds;
};
static struct pair pair_at(const struct attn_args *a, struct tensor dout, int64_t row, int64_t head, int64_t kv, double delta) {
    const int64_t dim = a->head_dim, q = (row * a->n_q_heads + head) * dim;
    const double lse = ref_f32(a->lse)[row * a->n_q_heads + head];
    double slope;
    const double p = exp(capped(a, a->scale * dot(a->q, q, a->kv.k, kv, dim), &slope) - lse);
    return (struct pair){p, p * (dot(dout, q, a->kv.v, kv, dim) - delta) * slope};
}

struct attn_grads {
    struct tensor dout, dq, dk, dv;
    double *acc; /* (2 D) scratch */
};

/* One query row of one head. */
static void attend_dq(const struct attn_args *a, const struct attn_grads *g, const struct seq *s, int64_t row, int64_t head) {
    const struct tensor dout = g->dout, dq = g->dq;
    double *const dqr = g->acc;
    const int64_t dim = a->head_dim, kv_head = head / (a->n_q_heads / a->n_kv_heads);
    const int64_t p = s->pos0 + row - s->row0, q = (row * a->n_q_heads + head) * dim;
    const double delta = dot(dout, q, a->out, q, dim);
    for (int64_t c = 0; c < dim; c++) dqr[c] = 0;
    for (int64_t j = first_key(a, p); j <= p; j++) {
        const int64_t kv = kv_offset(a->kv.k, slot_of(a, s, j), kv_head);
        const struct pair e = pair_at(a, dout, row, head, kv, delta);
        for (int64_t c = 0; c < dim; c++) dqr[c] += e.ds * a->scale * ref_at(a->kv.k, kv + c);
    }
    for (int64_t c = 0; c < dim; c++) ref_put(dq.data, dq.dt, q + c, dqr[c]);
}

/* One key of one KV head: rows in order, within a row the heads of the group in order. */
static void attend_dkv(const struct attn_args *a, const struct attn_grads *g, const struct seq *s, int64_t j, int64_t kv_head) {
    const struct tensor dout = g->dout;
    double *const acc = g->acc;
    const int64_t dim = a->head_dim, group = a->n_q_heads / a->n_kv_heads;
    const int64_t kv = kv_offset(a->kv.k, slot_of(a, s, j), kv_head);
    double *dkr = acc, *dvr = acc + dim;
    for (int64_t c = 0; c < 2 * dim; c++) acc[c] = 0;
    for (int64_t p = j > s->pos0 ? j : s->pos0; p < s->pos0 + s->n_rows && first_key(a, p) <= j; p++)
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
            const int64_t row = s->row0 + p - s->pos0, q = (row * a->n_q_heads + h) * dim;
            const struct pair e = pair_at(a, dout, row, h, kv, dot(dout, q, a->out, q, dim));
            for (int64_t c = 0; c < dim; c++) {
                dkr[c] += e.ds * a->scale * ref_at(a->q, q + c);
                dvr[c] += e.p * ref_at(dout, q + c);
            }
        }
    for (int64_t c = 0; c < dim; c++) {
        ref_f32(g->dk)[kv + c] = (float)dkr[c];
        ref_f32(g->dv)[kv + c] = (float)dvr[c];
    }
}

int ref_attn_bwd(struct dev *d, const struct attn_args *a, struct tensor dout, struct tensor dq, struct tensor dk,
                 struct tensor dv) {
    (void)d;
    const struct attn_grads g = {dout, dq, dk, dv, xcalloc((size_t)a->head_dim * 2, sizeof *g.acc)};
    for (int64_t i = 0; i < a->seqs.n; i++) {
        const struct seq s = seq_at(a, i);
        for (int64_t row = s.row0; row < s.row0 + s.n_rows; row++)
            for (int64_t h = 0; h < a->n_q_heads; h++) attend_dq(a, &g, &s, row, h);
        for (int64_t j = 0; j < s.pos0 + s.n_rows; j++)
            for (int64_t h = 0; h < a->n_kv_heads; h++) attend_dkv(a, &g, &s, j, h);
    }
    free(g.acc);
    return 0;
}
