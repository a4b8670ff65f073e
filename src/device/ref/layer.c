/* layer.c - the ref backend's RMSNorm and SwiGLU, forward and backward.
 * Attention is in attention.c, matmul in matmul.c.
 * Invariant: row t of a result reads row t of its inputs alone; weight
 * gradients sum over rows in row order. */
#include "device/ref/ref_int.h"

#include "base/buf.h"

#include <math.h>
#include <stdlib.h>

/* ---- RMSNorm (Zhang & Sennrich 2019), rounded as Hugging Face does ---- */

int ref_rmsnorm_fwd(struct dev *d, const struct rmsnorm_args *a) {
    (void)d;
    const struct tensor x = a->x, y = a->y;
    const int64_t n = x.dim[1];
    for (int64_t t = 0; t < x.dim[0]; t++) {
        const float *row = ref_f32(x) + t * n;
        double sum = 0;
        for (int64_t c = 0; c < n; c++) sum += (double)row[c] * row[c];
        const float rs = (float)(1.0 / sqrt(sum / (double)n + a->eps));
        for (int64_t c = 0; c < n; c++) {
            const float v = a->kind == NORM_CAST_SCALE && !a->from.data ? ref_round(row[c] * rs, a->w.dt) : row[c] * rs;
            const float out = v * ref_norm_weight(a->w, a->kind, c);
            ref_put(y.data, y.dt, t * n + c, a->from.data ? ref_f32(a->from)[t * n + c] + out : out);
        }
        if (a->rstd.data) ref_f32(a->rstd)[t] = rs;
    }
    return 0;
}

/* With n = x * rstd and g = dy * w: dx = rstd * (g - n * mean(g * n)), dw = sum_t dy * n.
 * The rounding of n in forward is passed straight through. */
int ref_rmsnorm_bwd(struct dev *d, const struct rmsnorm_bwd_args *a) {
    const struct tensor dy = a->dy, x = a->x, w = a->w, rstd = a->rstd;
    const int64_t n = x.dim[1];
    for (int64_t t = 0; t < x.dim[0]; t++) {
        const float *row = ref_f32(x) + t * n;
        const double rs = ref_f32(rstd)[t];
        double mean = 0;
        for (int64_t c = 0; c < n; c++) mean += (double)ref_at(dy, t * n + c) * ref_norm_weight(w, a->kind, c) * (row[c] * rs);
        mean /= (double)n;
        for (int64_t c = 0; c < n; c++) {
            const double g = (double)ref_at(dy, t * n + c) * ref_norm_weight(w, a->kind, c);
            ref_f32(a->dx)[t * n + c] += (float)(rs * (g - row[c] * rs * mean));
        }
    }
    for (int64_t c = 0; c < n; c++) {
        double sum = 0;
        for (int64_t t = 0; t < x.dim[0]; t++) sum += (double)ref_at(dy, t * n + c) * ref_f32(x)[t * n + c] * ref_f32(rstd)[t];
        ref_f32(a->dw)[c] += (float)sum;
    }
    return a->rounded.data ? ref_cast(d, a->rounded, a->dx) : 0;
}

/* ---- the same of all queries and all keys of a row ---- */

/* Queries (0) or keys (1) of row t: from element *at on, *n of them. */
static struct tensor qk_part(const struct qk_norm_args *a, int which, int64_t t, int64_t *at, int64_t *n) {
    *at = t * a->x.dim[1] + (which ? a->q_norm.dim[0] : 0);
    *n = which ? a->k_norm.dim[0] : a->q_norm.dim[0];
    return which ? a->k_norm : a->q_norm;
}

int ref_qk_norm_fwd(struct dev *d, const struct qk_norm_args *a) {
    (void)d;
    for (int64_t t = 0; t < a->x.dim[0]; t++) {
        for (int i = 0; i < 2; i++) {
            int64_t at, n;
            double sum = 0;
            const struct tensor w = qk_part(a, i, t, &at, &n);
            for (int64_t c = 0; c < n; c++) sum += (double)ref_at(a->x, at + c) * ref_at(a->x, at + c);
            const float rs = (float)(1.0 / sqrt(sum / (double)n + a->eps));
            for (int64_t c = 0; c < n; c++) {
                const float x = ref_at(a->x, at + c) * rs, v = a->kind == NORM_CAST_SCALE ? ref_round(x, w.dt) : x;
                ref_put(a->y.data, a->y.dt, at + c, v * ref_norm_weight(w, a->kind, c));
            }
            if (a->rstd.data) ref_f32(a->rstd)[2 * t + i] = rs;
        }
        for (int64_t c = a->q_norm.dim[0] + a->k_norm.dim[0]; c < a->x.dim[1]; c++)
            ref_put(a->y.data, a->y.dt, t * a->x.dim[1] + c, ref_at(a->x, t * a->x.dim[1] + c));
    }
    return 0;
}

int ref_qk_norm_bwd(struct dev *d, const struct qk_norm_args *a, const struct qk_norm_bwd_args *g) {
    (void)d;
    const struct tensor dw[2] = {g->dq_norm, g->dk_norm};
    for (int i = 0; i < 2; i++)
        for (int64_t c = 0; c < dw[i].dim[0]; c++) {
            double sum = 0;
            for (int64_t t = 0; t < a->x.dim[0]; t++) {
                const int64_t at = t * a->x.dim[1] + (i ? a->q_norm.dim[0] : 0) + c;
                sum += (double)ref_at(g->dy, at) * ref_at(a->x, at) * ref_f32(a->rstd)[2 * t + i];
            }
            ref_f32(dw[i])[c] += (float)sum;
        }
    for (int64_t t = 0; t < a->x.dim[0]; t++)
        for (int i = 0; i < 2; i++) {
            int64_t at, n;
            double mean = 0;
            const struct tensor w = qk_part(a, i, t, &at, &n);
            const double rs = ref_f32(a->rstd)[2 * t + i];
            for (int64_t c = 0; c < n; c++)
                mean += (double)ref_at(g->dy, at + c) * ref_norm_weight(w, a->kind, c) * (ref_at(a->x, at + c) * rs) / (double)n;
            for (int64_t c = 0; c < n; c++) {
                const double dn = (double)ref_at(g->dy, at + c) * ref_norm_weight(w, a->kind, c);
                ref_put(g->dy.data, g->dy.dt, at + c, rs * (dn - ref_at(a->x, at + c) * rs * mean));
            }
        }
    return 0;
}

/* ---- RoPE, then the norm of each head ---- */

/* x (D) = the head from element `at` of row t, turned and rounded. */
static void turned_head(const struct rope_norm_args *a, int64_t t, int64_t at, float *x) {
    const int64_t half = a->head_dim / 2;
    const float *rope = ref_f32(a->rope) + ref_index(a->pos, t, a->rope.dim[0]) * a->head_dim;
    for (int64_t i = 0; i < half; i++) {
        const float x0 = ref_at(a->x, at + i), x1 = ref_at(a->x, at + half + i), c = rope[2 * i], s = rope[2 * i + 1];
        x[i] = ref_round(x0 * c - x1 * s, a->x.dt);
        x[half + i] = ref_round(x1 * c + x0 * s, a->x.dt);
    }
}

int ref_rope_norm_fwd(struct dev *d, const struct rope_norm_args *a) {
    (void)d;
    const int64_t dim = a->head_dim, heads = a->n_q_heads + a->n_kv_heads;
    float *x = xmalloc((size_t)dim * sizeof *x);
    for (int64_t t = 0; t < a->x.dim[0]; t++) {
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = t * a->x.dim[1] + h * dim;
            const struct tensor w = h < a->n_q_heads ? a->q_norm : a->k_norm;
            double sum = 0;
            turned_head(a, t, at, x);
            for (int64_t c = 0; c < dim; c++) sum += (double)x[c] * x[c];
            const float rs = (float)(1.0 / sqrt(sum / (double)dim + a->eps));
            for (int64_t c = 0; c < dim; c++) {
                const float v = a->kind == NORM_CAST_SCALE ? ref_round(x[c] * rs, w.dt) : x[c] * rs;
                ref_put(a->y.data, a->y.dt, at + c, v * ref_norm_weight(w, a->kind, c));
            }
            if (a->rstd.data) ref_f32(a->rstd)[t * heads + h] = rs;
        }
        for (int64_t c = t * a->x.dim[1] + heads * dim; c < (t + 1) * a->x.dim[1]; c++)
            ref_put(a->y.data, a->y.dt, c, ref_at(a->x, c));
    }
    free(x);
    return 0;
}

int ref_rope_norm_bwd(struct dev *d, const struct rope_norm_args *a, const struct qk_norm_bwd_args *g) {
    (void)d;
    const int64_t dim = a->head_dim, half = dim / 2, heads = a->n_q_heads + a->n_kv_heads;
    float *x = xmalloc((size_t)dim * sizeof *x);
    double *dn = xcalloc((size_t)dim, sizeof *dn), *dw = xcalloc((size_t)(2 * dim), sizeof *dw);
    for (int64_t t = 0; t < a->x.dim[0]; t++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = t * a->x.dim[1] + h * dim;
            const struct tensor w = h < a->n_q_heads ? a->q_norm : a->k_norm;
            const float *rope = ref_f32(a->rope) + ref_index(a->pos, t, a->rope.dim[0]) * dim;
            const double rs = ref_f32(a->rstd)[t * heads + h];
            double mean = 0;
            turned_head(a, t, at, x);
            for (int64_t c = 0; c < dim; c++) {
                const double dy = ref_at(g->dy, at + c);
                dw[(h < a->n_q_heads ? 0 : dim) + c] += dy * x[c] * rs;
                dn[c] = dy * ref_norm_weight(w, a->kind, c);
                mean += dn[c] * x[c] * rs / (double)dim;
            }
            for (int64_t c = 0; c < dim; c++) dn[c] = rs * (dn[c] - x[c] * rs * mean);
            for (int64_t i = 0; i < half; i++) {
                const double c = rope[2 * i], s = rope[2 * i + 1];
                ref_put(g->dy.data, g->dy.dt, at + i, dn[i] * c + dn[half + i] * s);
                ref_put(g->dy.data, g->dy.dt, at + half + i, dn[half + i] * c - dn[i] * s);
            }
        }
    for (int64_t c = 0; c < dim; c++) {
        ref_f32(g->dq_norm)[c] += (float)dw[c];
        ref_f32(g->dk_norm)[c] += (float)dw[dim + c];
    }
    free(x);
    free(dn);
    free(dw);
    return 0;
}

/* ---- SwiGLU (Shazeer 2020): silu(g) * u, silu(g) = g * sigmoid(g) ---- */

int ref_swiglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up) {
    (void)d;
    const int64_t f = y.dim[1];
    for (int64_t t = 0; t < y.dim[0]; t++)
        for (int64_t c = 0; c < f; c++) {
            const double g = ref_at(gate_up, t * 2 * f + c), u = ref_at(gate_up, t * 2 * f + f + c);
            ref_put(y.data, y.dt, t * f + c, g / (1.0 + exp(-g)) * u);
        }
    return 0;
}

/* gelu(g) = g/2 (1 + tanh(u)) = g sigmoid(2u), u = sqrt(2/pi) (g + 0.044715 g^3); *slope: its derivative. */
static double gelu(double g, double *slope) {
    const double k = sqrt(2 / M_PI), t = tanh(k * (g + 0.044715 * g * g * g));
    *slope = 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * k * (1 + 3 * 0.044715 * g * g);
    return 0.5 * g * (1 + t);
}

int ref_geglu_fwd(struct dev *d, struct tensor y, struct tensor gate_up) {
    (void)d;
    const int64_t f = y.dim[1];
    for (int64_t i = 0; i < y.dim[0] * f; i++) {
        const int64_t ig = i / f * 2 * f + i % f;
        double slope;
        ref_put(y.data, y.dt, i, gelu(ref_at(gate_up, ig), &slope) * ref_at(gate_up, ig + f));
    }
    return 0;
}

int ref_geglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up) {
    (void)d;
    const int64_t f = dy.dim[1];
    for (int64_t i = 0; i < dy.dim[0] * f; i++) {
        const int64_t ig = i / f * 2 * f + i % f;
        double slope;
        const double v = gelu(ref_at(gate_up, ig), &slope), u = ref_at(gate_up, ig + f), dyv = ref_at(dy, i);
        ref_put(dgate_up.data, dgate_up.dt, ig, dyv * u * slope);
        ref_put(dgate_up.data, dgate_up.dt, ig + f, dyv * v);
    }
    return 0;
}

int ref_swiglu_bwd(struct dev *d, struct tensor dgate_up, struct tensor dy, struct tensor gate_up) {
    (void)d;
    const int64_t f = dy.dim[1];
    for (int64_t t = 0; t < dy.dim[0]; t++)
        for (int64_t c = 0; c < f; c++) {
            const int64_t ig = t * 2 * f + c, iu = ig + f;
            const double g = ref_at(gate_up, ig), u = ref_at(gate_up, iu), dyv = ref_at(dy, t * f + c);
            const double sig = 1.0 / (1.0 + exp(-g));
            ref_put(dgate_up.data, dgate_up.dt, ig, dyv * u * sig * (1.0 + g * (1.0 - sig)));
            ref_put(dgate_up.data, dgate_up.dt, iu, dyv * g * sig);
        }
    return 0;
}
