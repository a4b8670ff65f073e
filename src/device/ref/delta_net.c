/* delta_net.c - the ref backend's ops of a gated delta net layer: causal convolution, gated delta rule, gated
 * norm, and the output gate of gated attention; each forward with its backward.
 *
 * The delta rule's forward is the chunk form of ops.h row by row; its backward is that of the plain recurrence, token by token,
 * and reads nothing that forward kept.
 * Invariant: row t of a forward reads rows of its sequence up to t alone, from the batch or from the state, with the same bits. */
#include "base/buf.h"
#include "device/ref/ref_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TAPS = DEV_CONV_TAPS, CHUNK = DEV_DELTA_CHUNK, DIM = DEV_DELTA_DIM };

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double silu_slope(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }

/* A sequence of the call. */
struct seq {
    int64_t row0, n_rows, pos0, slot; /* slot: -1 without a state */
};
static struct seq seq_at(const struct row_seqs *s, int64_t i) {
    const int32_t *start = s->start.data, *pos0 = s->pos0.data;
    const struct seq q = {start[i], start[i + 1] - start[i], pos0[i], s->slot.data ? ((const int32_t *)s->slot.data)[i] : -1};
    CHECK(q.row0 >= 0 && q.n_rows >= 0 && q.pos0 >= 0 && (q.pos0 == 0 || q.slot >= 0));
    return q;
}

/* ---- causal convolution ---- */

/* Element c of row r's place in the state. */
static int64_t conv_place(const struct causal_conv_args *a, const struct seq *s, int64_t r, int64_t c) {
    const int64_t rows = a->state.dim[1];
    return (s->slot * rows + (s->pos0 + r) % rows) * a->w.dim[0] + c;
}
/* Element c of row t of the batch, in x. */
static int64_t conv_x(const struct causal_conv_args *a, int64_t t, int64_t c) { return t * a->x.dim[1] + a->x_at + c; }
/* Element c of the sequence's input `back` rows before row r. */
static float conv_input(const struct causal_conv_args *a, const struct seq *s, int64_t r, int64_t back, int64_t c) {
    const int64_t at = r - back;
    if (at >= 0) return ref_at(a->x, conv_x(a, s->row0 + at, c));
    return s->pos0 + at < 0 ? 0 : ref_at(a->state, conv_place(a, s, at, c));
}
static float conv_sum(const struct causal_conv_args *a, const struct seq *s, int64_t r, int64_t c) {
    double sum = 0;
    for (int64_t i = 0; i < TAPS; i++) sum += (double)ref_at(a->w, c * TAPS + i) * conv_input(a, s, r, TAPS - 1 - i, c);
    return ref_round((float)sum, a->x.dt);
}

int ref_causal_conv_fwd(struct dev *d, const struct causal_conv_args *a) {
    const int64_t n = a->w.dim[0];
    (void)d;
    for (int64_t i = 0; i < a->seqs.n; i++) {
        const struct seq s = seq_at(&a->seqs, i);
        CHECK(s.slot < a->state.dim[0] || s.slot == -1);
        for (int64_t c = 0; c < n; c++) {
            for (int64_t r = 0; r < s.n_rows; r++) {
                const double u = conv_sum(a, &s, r, c);
                ref_put(a->y.data, a->y.dt, (s.row0 + r) * n + c, u * sigmoid(u));
            }
            for (int64_t r = 0; r < s.n_rows && s.slot >= 0; r++)
                ref_put(a->state.data, a->state.dt, conv_place(a, &s, r, c), ref_at(a->x, conv_x(a, s.row0 + r, c)));
        }
    }
    return 0;
}

int ref_causal_conv_bwd(struct dev *d, const struct causal_conv_args *a, const struct causal_conv_bwd_args *g) {
    const int64_t n = a->w.dim[0];
    (void)d;
    for (int64_t c = 0; c < n; c++) {
        double dw[TAPS] = {0};
        for (int64_t i = 0; i < a->seqs.n; i++) {
            const struct seq s = seq_at(&a->seqs, i);
            for (int64_t r = 0; r < s.n_rows; r++) {
                double dx = 0;
                const double du = (double)ref_at(g->dy, (s.row0 + r) * n + c) * silu_slope(conv_sum(a, &s, r, c));
                for (int64_t k = 0; k < TAPS; k++) {
                    const int64_t to = r + TAPS - 1 - k; /* the row that reads this one by tap k */
                    dw[k] += du * conv_input(a, &s, r, TAPS - 1 - k, c);
                    if (to < s.n_rows)
                        dx += (double)ref_at(g->dy, (s.row0 + to) * n + c) * silu_slope(conv_sum(a, &s, to, c)) *
                              ref_at(a->w, c * TAPS + k);
                }
                ref_put(g->dx.data, g->dx.dt, conv_x(a, s.row0 + r, c), dx);
            }
        }
        for (int64_t k = 0; k < TAPS; k++) ref_f32(g->dw)[c * TAPS + k] += (float)dw[k];
    }
    return 0;
}

/* ---- gated delta rule ---- */

/* out (dim) = head `head` of row t of qkv, counted in heads of the same size from element `from`. */
static void head_row(const struct delta_args *a, int64_t t, int64_t from, int64_t head, int64_t dim, double *out) {
    for (int64_t i = 0; i < dim; i++) out[i] = ref_at(a->qkv, t * a->qkv.dim[1] + from + head * dim + i);
}
/* x = x / |x| * by; returns 1 / |x|, which is f32: a state has it. */
static double normalize(double *x, int64_t dim, double by) {
    double sum = 0;
    for (int64_t i = 0; i < dim; i++) sum += x[i] * x[i];
    const double r = (float)(1 / sqrt(sum + DEV_DELTA_EPS));
    for (int64_t i = 0; i < dim; i++) x[i] *= r * by;
    return r;
}
static double softplus(double x) { return x > 20 ? x : log1p(exp(x)); }

/* A token of a value head. */
struct token {
    double q[DIM], k[DIM], v[DIM], rq, rk; /* q, k: normalised, q scaled; rq, rk: 1 / |q|, 1 / |k| */
    double beta, g, a;                     /* a: what softplus takes */
};
/* Where b, or a, of value head n is in row t. */
static int64_t gate_at(const struct delta_args *a, int64_t t, bool is_a, int64_t n) {
    return t * a->ba.dim[1] + a->ba_at + (is_a ? a->n_v_heads : 0) + n;
}
static void token_at(const struct delta_args *a, int64_t t, int64_t n, struct token *x) {
    const int64_t hk = a->n_k_heads, hv = a->n_v_heads, m = n / (hv / hk);
    head_row(a, t, 0, m, a->k_dim, x->q);
    head_row(a, t, hk * a->k_dim, m, a->k_dim, x->k);
    head_row(a, t, 2 * hk * a->k_dim, n, a->v_dim, x->v);
    x->rq = normalize(x->q, a->k_dim, 1 / sqrt((double)a->k_dim));
    x->rk = normalize(x->k, a->k_dim, 1);
    x->beta = ref_round((float)sigmoid(ref_at(a->ba, gate_at(a, t, false, n))), a->ba.dt);
    x->a = (double)ref_at(a->ba, gate_at(a, t, true, n)) + ref_at(a->dt_bias, n);
    x->g = -exp(ref_at(a->a_log, n)) * softplus(x->a);
}

/* The state of a value head, in a slot or in memory of the call. */
struct head {
    float *s, *k, *e, *g; /* (Dk, Dv), (Dk, CHUNK), (CHUNK, Dv), (CHUNK) */
};

/* Element d of row i of the open chunk's keys in a slot, h: slot * Hk + key head. */
static int64_t open_key(const struct delta_args *a, int64_t h, int64_t i, int64_t d) { return (h * CHUNK + i) * a->k_dim + d; }
/* k (Dk, CHUNK): the first `rows` rows of those. */
static void open_keys(const struct delta_args *a, int64_t h, int64_t rows, float *k) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < a->k_dim; d++)
            k[d * CHUNK + i] = (float)((double)ref_at(a->state.k, open_key(a, h, i, d)) * ref_f32(a->state.r)[h * CHUNK + i]);
}
/* Row t of the batch, as row i of those. */
static void put_open_key(const struct delta_args *a, int64_t h, int64_t t, int64_t i) {
    double k[DIM];
    head_row(a, t, a->n_k_heads * a->k_dim, h % a->n_k_heads, a->k_dim, k);
    for (int64_t d = 0; d < a->k_dim; d++) ref_put(a->state.k.data, a->state.k.dt, open_key(a, h, i, d), k[d]);
    ref_f32(a->state.r)[h * CHUNK + i] = (float)normalize(k, a->k_dim, 1);
}

/* Row i of a chunk; first: of the sequence's first one, whose start state is 0. */
static void delta_row(const struct delta_args *a, const struct token *x, const struct head *h, int64_t i, bool first, int64_t out) {
    const int64_t dk = a->k_dim, dv = a->v_dim;
    double kk[CHUNK], qk[CHUNK];
    for (int64_t d = 0; d < dk; d++) h->k[d * CHUNK + i] = (float)x->k[d];
    h->g[i] = (float)x->g + (i ? h->g[i - 1] : 0);
    for (int64_t j = 0; j <= i; j++) {
        const double decay = exp((double)h->g[i] - h->g[j]);
        kk[j] = qk[j] = 0;
        for (int64_t d = 0; d < dk; d++) {
            kk[j] += (double)h->k[d * CHUNK + i] * h->k[d * CHUNK + j];
            qk[j] += x->q[d] * h->k[d * CHUNK + j];
        }
        kk[j] *= decay;
        qk[j] *= decay;
    }
    const double by = exp((double)h->g[i]);
    for (int64_t c = 0; c < dv; c++) {
        double u = 0, o = 0, sum = 0;
        for (int64_t d = 0; d < dk && !first; d++) {
            u += (double)h->k[d * CHUNK + i] * h->s[d * dv + c];
            o += x->q[d] * h->s[d * dv + c];
        }
        for (int64_t j = 0; j < i; j++) sum += kk[j] * h->e[j * dv + c];
        h->e[i * dv + c] = (float)(x->beta * (x->v[c] - by * u - sum));
        o *= by;
        for (int64_t j = 0; j <= i; j++) o += qk[j] * h->e[j * dv + c];
        ref_put(a->out.data, a->out.dt, out + c, o);
    }
}
static void delta_state(const struct delta_args *a, const struct head *h, bool first) {
    const int64_t dk = a->k_dim, dv = a->v_dim;
    const double last = h->g[CHUNK - 1];
    for (int64_t d = 0; d < dk; d++)
        for (int64_t c = 0; c < dv; c++) {
            double sum = first ? 0 : exp(last) * h->s[d * dv + c];
            for (int64_t j = 0; j < CHUNK; j++) sum += exp(last - h->g[j]) * h->k[d * CHUNK + j] * h->e[j * dv + c];
            h->s[d * dv + c] = (float)sum;
        }
}

int ref_delta_fwd(struct dev *d, const struct delta_args *a) {
    const int64_t hk = a->n_k_heads, hv = a->n_v_heads, dk = a->k_dim, dv = a->v_dim;
    float *own = xcalloc((size_t)(dk * dv + dk * CHUNK + CHUNK * dv + CHUNK), sizeof *own);
    struct token *x = xmalloc(sizeof *x);
    (void)d;
    for (int64_t i = 0; i < a->seqs.n; i++) {
        const struct seq s = seq_at(&a->seqs, i);
        CHECK(s.slot < a->state.s.dim[0] || s.slot == -1);
        for (int64_t n = 0; n < hv; n++) {
            const int64_t at = s.slot * hv + n, m = s.slot * hk + n / (hv / hk);
            struct head h = {own, own + dk * dv, own + dk * dv + dk * CHUNK, own + dk * dv + dk * CHUNK + CHUNK * dv};
            if (s.slot >= 0) {
                h.s = ref_f32(a->state.s) + at * dk * dv;
                h.e = ref_f32(a->state.e) + at * CHUNK * dv;
                h.g = ref_f32(a->state.g) + at * CHUNK;
                open_keys(a, m, s.pos0 % CHUNK, h.k);
            }
            for (int64_t r = 0; r < s.n_rows; r++) {
                const int64_t p = s.pos0 + r, t = s.row0 + r, entry = s.row0 / CHUNK + p / CHUNK;
                token_at(a, t, n, x);
                delta_row(a, x, &h, p % CHUNK, p < CHUNK, (t * hv + n) * dv);
                if (a->e.data) memcpy(ref_f32(a->e) + (t * hv + n) * dv, h.e + p % CHUNK * dv, (size_t)dv * sizeof(float));
                if (p % CHUNK != CHUNK - 1) continue;
                delta_state(a, &h, p < CHUNK);
                if (a->states.data && r + 1 < s.n_rows)
                    memcpy(ref_f32(a->states) + (entry * hv + n) * dk * dv, h.s, (size_t)(dk * dv) * sizeof(float));
            }
            if (s.slot < 0 || (n + 1) % (hv / hk) != 0) continue; /* the key head's other value heads read them as they were */
            for (int64_t r = 0; r < s.n_rows; r++)
                if ((s.pos0 + r) / CHUNK == (s.pos0 + s.n_rows) / CHUNK) put_open_key(a, m, s.row0 + r, (s.pos0 + r) % CHUNK);
        }
    }
    free(own);
    free(x);
    return 0;
}

/* Backward of y = x r by, r = 1 / |x|, in place: dx = r by (dy - n (n.dy)), n = y / by. */
static void normalize_back(double *dy, const double *y, int64_t dim, double r, double by) {
    double dot = 0;
    for (int64_t i = 0; i < dim; i++) dot += dy[i] * y[i] / by;
    for (int64_t i = 0; i < dim; i++) dy[i] = r * by * (dy[i] - y[i] / by * dot);
}

/* One token back: ds (Dk, Dv) is the gradient of the state after it, then of the state before it, which is s.
 * dq, dk += ; dv, dbeta, dg are set. */
struct token_grad {
    int64_t nk, nv; /* Dk, Dv */
    double *ds, *dq, *dk, dout[DIM], dv[DIM], dbeta, dg;
};
static void token_back(const struct token *x, const double *s, struct token_grad *g) {
    const int64_t nk = g->nk, nv = g->nv;
    const double by = exp(x->g), *const dout = g->dout;
    double *const ds = g->ds;
    double r[DIM], e[DIM], dr[DIM], dby = 0;
    g->dbeta = 0;
    for (int64_t c = 0; c < nv; c++) {
        double u = 0, de = 0;
        for (int64_t d = 0; d < nk; d++) {
            ds[d * nv + c] += x->q[d] * dout[c];
            u += by * s[d * nv + c] * x->k[d];
            de += ds[d * nv + c] * x->k[d];
        }
        r[c] = x->v[c] - u;
        e[c] = x->beta * r[c];
        g->dbeta += de * r[c];
        g->dv[c] = dr[c] = x->beta * de;
    }
    for (int64_t d = 0; d < nk; d++)
        for (int64_t c = 0; c < nv; c++) {
            const double old = s[d * nv + c], next = by * old + x->k[d] * e[c];
            g->dq[d] += next * dout[c];
            g->dk[d] += ds[d * nv + c] * e[c] - by * old * dr[c];
            ds[d * nv + c] -= x->k[d] * dr[c];
            dby += ds[d * nv + c] * old;
            ds[d * nv + c] *= by;
        }
    g->dg = dby * by;
}

/* The states before each token of a sequence, (n_rows, Dk, Dv). */
static void states_before(const struct delta_args *a, const struct seq *s, int64_t n, struct token *x, double *states) {
    const int64_t nk = a->k_dim, nv = a->v_dim;
    memset(states, 0, (size_t)(nk * nv) * sizeof *states);
    for (int64_t r = 0; r + 1 < s->n_rows; r++) {
        const double *const old = states + r * nk * nv;
        double *const next = states + (r + 1) * nk * nv;
        token_at(a, s->row0 + r, n, x);
        for (int64_t c = 0; c < nv; c++) {
            double u = 0;
            for (int64_t d = 0; d < nk; d++) u += exp(x->g) * old[d * nv + c] * x->k[d];
            for (int64_t d = 0; d < nk; d++) next[d * nv + c] = exp(x->g) * old[d * nv + c] + x->k[d] * (x->beta * (x->v[c] - u));
        }
    }
}

/* A value head of a sequence: dqk (q, then k, each (n_rows, Dk)) +=; the rest of its gradients. sums: those of a_log of all
 * heads over rows, then those of dt_bias. */
static void delta_back(const struct delta_args *a, const struct delta_bwd_args *b, const struct seq *s, int64_t n, double *dqk,
                       double *sums) {
    const int64_t nk = a->k_dim, nv = a->v_dim, hk = a->n_k_heads, hv = a->n_v_heads;
    double *states = xmalloc((size_t)(s->n_rows * nk * nv + 1) * sizeof *states);
    double *ds = xcalloc((size_t)(nk * nv), sizeof *ds);
    struct token *x = xmalloc(sizeof *x);
    states_before(a, s, n, x, states);
    for (int64_t r = s->n_rows - 1; r >= 0; r--) {
        const int64_t t = s->row0 + r;
        struct token_grad g = {.nk = nk, .nv = nv, .ds = ds, .dq = dqk + r * nk, .dk = dqk + (s->n_rows + r) * nk};
        token_at(a, t, n, x);
        for (int64_t c = 0; c < nv; c++) g.dout[c] = ref_at(b->dout, (t * hv + n) * nv + c);
        token_back(x, states + r * nk * nv, &g);
        for (int64_t c = 0; c < nv; c++) ref_put(b->dqkv.data, b->dqkv.dt, t * b->dqkv.dim[1] + 2 * hk * nk + n * nv + c, g.dv[c]);
        const double decay = exp(ref_at(a->a_log, n)), da = -g.dg * decay * sigmoid(x->a);
        ref_put(b->dba.data, b->dba.dt, gate_at(a, t, false, n), g.dbeta * x->beta * (1 - x->beta));
        ref_put(b->dba.data, b->dba.dt, gate_at(a, t, true, n), da);
        sums[n] += g.dg * x->g;
        sums[hv + n] += da;
    }
    free(states);
    free(ds);
    free(x);
}

int ref_delta_bwd(struct dev *d, const struct delta_args *a, const struct delta_bwd_args *b) {
    const int64_t nk = a->k_dim, hk = a->n_k_heads, hv = a->n_v_heads, group = hv / hk;
    struct token *x = xmalloc(sizeof *x);
    double *sums = xcalloc((size_t)(2 * hv), sizeof *sums);
    (void)d;
    for (int64_t i = 0; i < a->seqs.n; i++) {
        const struct seq s = seq_at(&a->seqs, i);
        for (int64_t m = 0; m < hk; m++) {
            double *dq = xcalloc((size_t)(2 * s.n_rows * nk + 1), sizeof *dq), *dk = dq + s.n_rows * nk;
            for (int64_t n = m * group; n < (m + 1) * group; n++) delta_back(a, b, &s, n, dq, sums);
            for (int64_t r = 0; r < s.n_rows; r++) {
                const int64_t row = (s.row0 + r) * b->dqkv.dim[1];
                token_at(a, s.row0 + r, m * group, x);
                normalize_back(dq + r * nk, x->q, nk, x->rq, 1 / sqrt((double)nk));
                normalize_back(dk + r * nk, x->k, nk, x->rk, 1);
                for (int64_t k = 0; k < nk; k++) {
                    ref_put(b->dqkv.data, b->dqkv.dt, row + m * nk + k, dq[r * nk + k]);
                    ref_put(b->dqkv.data, b->dqkv.dt, row + (hk + m) * nk + k, dk[r * nk + k]);
                }
            }
            free(dq);
        }
    }
    for (int64_t n = 0; n < hv; n++) {
        ref_f32(b->da_log)[n] += (float)sums[n];
        ref_f32(b->ddt_bias)[n] += (float)sums[hv + n];
    }
    free(sums);
    free(x);
    return 0;
}

/* ---- gated norm ---- */

/* Element c of head row t in z. */
static int64_t norm_z(const struct gated_norm_args *a, int64_t t, int64_t c) {
    const int64_t heads = a->x.dim[0] / a->z.dim[0];
    return t / heads * a->z.dim[1] + a->z_at + t % heads * a->x.dim[1] + c;
}

int ref_gated_norm_fwd(struct dev *d, const struct gated_norm_args *a) {
    const int64_t n = a->x.dim[1];
    (void)d;
    for (int64_t t = 0; t < a->x.dim[0]; t++) {
        double sum = 0;
        for (int64_t c = 0; c < n; c++) sum += (double)ref_at(a->x, t * n + c) * ref_at(a->x, t * n + c);
        const float rs = (float)(1.0 / sqrt(sum / (double)n + a->eps));
        for (int64_t c = 0; c < n; c++) {
            const float u = ref_round(ref_round(ref_at(a->x, t * n + c) * rs, a->x.dt) * ref_at(a->w, c), a->x.dt);
            const double z = ref_at(a->z, norm_z(a, t, c));
            ref_put(a->y.data, a->y.dt, t * n + c, u * z * sigmoid(z));
        }
        if (a->rstd.data) ref_f32(a->rstd)[t] = rs;
    }
    return 0;
}

/* With n = x rstd and g = dy silu(z) w: dx = rstd (g - n mean(g n)), dz = dy n w silu'(z), dw = sum of dy silu(z) n. The
 * roundings of forward are passed straight through. */
int ref_gated_norm_bwd(struct dev *d, const struct gated_norm_args *a, const struct gated_norm_bwd_args *b) {
    const int64_t n = a->x.dim[1];
    double *dw = xcalloc((size_t)n, sizeof *dw);
    (void)d;
    for (int64_t t = 0; t < a->x.dim[0]; t++) {
        const double rs = ref_f32(a->rstd)[t];
        double mean = 0;
        for (int64_t c = 0; c < n; c++) {
            const int64_t i = t * n + c;
            const double z = ref_at(a->z, norm_z(a, t, c)), g = ref_at(b->dy, i) * z * sigmoid(z), v = ref_at(a->x, i) * rs;
            mean += g * ref_at(a->w, c) * v;
            dw[c] += g * v;
        }
        mean /= (double)n;
        for (int64_t c = 0; c < n; c++) {
            const int64_t i = t * n + c;
            const double z = ref_at(a->z, norm_z(a, t, c)), dy = ref_at(b->dy, i), w = ref_at(a->w, c), v = ref_at(a->x, i) * rs;
            ref_put(b->dx.data, b->dx.dt, i, rs * (dy * z * sigmoid(z) * w - v * mean));
            ref_put(b->dz.data, b->dz.dt, norm_z(a, t, c), dy * v * w * silu_slope(z));
        }
    }
    for (int64_t c = 0; c < n; c++) ref_f32(b->dw)[c] += (float)dw[c];
    free(dw);
    return 0;
}

/* ---- output gate ---- */

int ref_output_gate_fwd(struct dev *d, struct tensor y, struct tensor x, struct tensor gate) {
    (void)d;
    for (int64_t i = 0; i < tensor_count(x); i++)
        ref_put(y.data, y.dt, i, ref_at(x, i) * ref_round((float)sigmoid(ref_at(gate, i)), x.dt));
    return 0;
}
int ref_output_gate_bwd(struct dev *d, const struct output_gate_bwd_args *a) {
    (void)d;
    for (int64_t i = 0; i < tensor_count(a->dy); i++) {
        const double dy = ref_at(a->dy, i), x = ref_at(a->x, i), s = sigmoid(ref_at(a->gate, i));
        ref_put(a->dx.data, a->dx.dt, i, dy * s);
        ref_put(a->dgate.data, a->dgate.dt, i, dy * x * s * (1 - s));
    }
    return 0;
}

/* Every element of joint from column `at` on, to or from rest and gate. */
static void move_split(const struct gate_split_args *a, bool join) {
    const int64_t cols = a->joint.dim[1] - a->at, n_rest = a->rest.dim[1] - a->at;
    const size_t size = dtype_size(a->joint.dt);
    int64_t head = 0;
    for (int64_t p = 0; p < a->n_parts; p++) head += a->width[p];
    for (int64_t t = 0; t < a->joint.dim[0]; t++)
        for (int64_t c = 0; c < cols; c++) {
            char *const joint = (char *)a->joint.data + (size_t)(t * a->joint.dim[1] + a->at + c) * size;
            int64_t p = 0, before = 0, in = c % head;
            while (c < a->n_heads * head && in >= a->width[p]) before += a->n_heads * a->width[p], in -= a->width[p++];
            int64_t to = before + c / head * a->width[p] + in;
            if (c >= a->n_heads * head) to = n_rest - (cols - c);
            const bool gate = c < a->n_heads * head && p == a->n_parts - 1 && a->gate.data;
            char *const other = gate ? (char *)a->gate.data + (size_t)(t * a->gate.dim[1] + to - before) * size
                                     : (char *)a->rest.data + (size_t)(t * a->rest.dim[1] + a->at + to) * size;
            memcpy(join ? joint : other, join ? other : joint, size);
        }
}
int ref_gate_split(struct dev *d, const struct gate_split_args *a) {
    (void)d;
    move_split(a, false);
    return 0;
}
int ref_gate_join(struct dev *d, const struct gate_split_args *a) {
    (void)d;
    move_split(a, true);
    return 0;
}
