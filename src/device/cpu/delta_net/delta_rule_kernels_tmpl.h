/* delta_rule_kernels_tmpl.h - the gated delta rule on the rows of one chunk of one value head, forward and
 * backward; compiled by each kernels_ISA.c.
 *
 * The chunk form of ops.h (struct delta_args): S is the state at the chunk's start, G the running sum of g, D_ij = exp(G_i - G_j),
 *   e_i = beta_i ((v_i - exp(G_i) S^T k_i) - sum_{j<i} D_ij (k_i.k_j) e_j)
 *   o_i = exp(G_i) S^T q_i + sum_{j<=i} D_ij (q_i.k_j) e_j
 *   S'  = exp(G_C) S + sum_j exp(G_C - G_j) k_j e_j^T
 * All sums are mm's: one chain of multiply-adds an element, its index ascending.
 * Invariant: what is written for row i reads rows <= i alone, by the same chains whether rows come one by one or all at once;
 * what lies in the buffers beyond the last row is not read into a result. */

enum { DELTA_C = DEV_DELTA_CHUNK, DELTA_ROWS = 8 }; /* DELTA_ROWS: rows that go through the sums over earlier blocks together */

/* y (dim) f32 = x / sqrt(x.x + eps) * by; returns 1 / that root. */
VEC_FN float l2_row(float *y, const void *x, int64_t dim, float by, enum dtype dt) {
    vec s = vset1(0);
    for (int64_t i = 0; i < dim; i += VEC) {
        const vec v = vload_act(x, dt, i);
        s = vfma(v, v, s);
    }
    const float r = 1.0f / sqrtf(vsum(s) + DEV_DELTA_EPS);
    for (int64_t i = 0; i < dim; i += VEC) vstore(y + i, vmul(vmul(vload_act(x, dt, i), vset1(r)), vset1(by)));
    return r;
}
static float kern_l2_fwd(float *y, const void *x, enum dtype dt, int64_t dim, float by) {
    return dt == DT_BF16 ? l2_row(y, x, dim, by, DT_BF16) : l2_row(y, x, dim, by, DT_F32);
}
/* dx (dim) act from dy (dim), with y = x r by, r = 1 / |x|: dx = r by (dy - n (n.dy)), n = y / by. */
static void kern_l2_bwd(void *dx, enum dtype dt, const float *dy, const struct cpu_l2 *p) {
    vec s = vset1(0);
    const float *const y = p->y;
    const int64_t dim = p->dim;
    const vec inv = vset1(1.0f / p->by);
    for (int64_t i = 0; i < dim; i += VEC) s = vfma(vload(dy + i), vmul(vload(y + i), inv), s);
    const vec dot = vset1(vsum(s)), scale = vset1(p->r * p->by);
    for (int64_t i = 0; i < dim; i += VEC) {
        const vec d = vsub(vload(dy + i), vmul(vmul(vload(y + i), inv), dot));
        vstore_act_n(dx, dt, i, vmul(scale, d), VEC);
    }
}

/* kk, qk (rows, C) of rows [n0, n1): k_i.k_j and q_i.k_j for all j <= i, and what comes with them. */
static void kern_delta_dots(const struct cpu_delta *p) {
    for (int64_t i = p->n0, n; i < p->n1; i += n) {
        n = VEC - i % VEC < p->n1 - i ? VEC - i % VEC : p->n1 - i;
        const int64_t r = i - p->n0;
        struct mm m = {n, i + n, p->dk, p->kt + i, 1, DELTA_C, p->kt, DELTA_C, p->kk + r * DELTA_C, DELTA_C, false, 0};
        mm(&m);
        m.a = p->q + r * p->dk, m.row = p->dk, m.col = 1, m.c = p->qk + r * DELTA_C;
        mm(&m);
    }
}

/* a, p (rows, C) of row i: its dots times D_ij for j < i and j <= i; zeros behind. */
VEC_FN void decay_row(const struct cpu_delta *p, int64_t i) {
    const int64_t r = (i - p->n0) * DELTA_C;
    const vec gi = vset1(p->g[i]);
    for (int64_t j = 0; j < DELTA_C; j += VEC) {
        if (j > i) {
            vstore(p->a + r + j, vset1(0));
            vstore(p->p + r + j, vset1(0));
            continue;
        }
        const vec d = vexp(vsub(gi, vload(p->g + j)));
        vstore(p->a + r + j, vkeep(vmul(vload(p->kk + r + j), d), 0, i - j < VEC ? i - j : VEC, 0));
        vstore(p->p + r + j, vkeep(vmul(vload(p->qk + r + j), d), 0, i - j + 1 < VEC ? i - j + 1 : VEC, 0));
    }
}
static float exp1(float x) {
    float t[VEC];
    vstore(t, vexp(vset1(x)));
    return t[0];
}

/* e and o of rows [n0, n1). */
static void kern_delta_fwd(const struct cpu_delta *p) {
    const int64_t dv = p->dv, rows = p->n1 - p->n0;
    if (p->s) {
        struct mm m = {rows, dv, p->dk, p->kt + p->n0, 1, DELTA_C, p->s, dv, p->u, dv, false, 0};
        mm(&m);
        m.a = p->q, m.row = p->dk, m.col = 1, m.c = p->o;
        mm(&m);
    }
    for (int64_t i = p->n0; i < p->n1; i++) {
        const int64_t r = i - p->n0;
        const vec by = vset1(exp1(p->g[i]));
        decay_row(p, i);
        for (int64_t c = 0; c < dv; c += VEC) {
            float *const u = p->u + r * dv + c, *const o = p->o + r * dv + c;
            const vec v = vload(p->v + r * dv + c);
            vstore(u, p->s ? vsub(v, vmul(by, vload(u))) : v);
            vstore(o, p->s ? vmul(by, vload(o)) : vset1(0));
        }
    }
    for (int64_t i0 = p->n0, n; i0 < p->n1; i0 += n) {
        n = DELTA_ROWS - i0 % DELTA_ROWS < p->n1 - i0 ? DELTA_ROWS - i0 % DELTA_ROWS : p->n1 - i0;
        const int64_t r0 = i0 - p->n0;
        struct mm t = {n, dv, i0, p->a + r0 * DELTA_C, DELTA_C, 1, p->e, dv, p->t, dv, false, 0};
        mm(&t);
        struct mm o = {n, dv, i0, p->p + r0 * DELTA_C, DELTA_C, 1, p->e, dv, p->o + r0 * dv, dv, true, 0};
        mm(&o);
        for (int64_t i = i0; i < i0 + n; i++) {
            const int64_t r = i - p->n0;
            struct mm rest = {1, dv, i - i0, p->a + r * DELTA_C + i0, 0, 1, p->e + i0 * dv, dv, p->t + (i - i0) * dv, dv, true, 0};
            mm(&rest);
            const vec beta = vset1(p->beta[r]);
            for (int64_t c = 0; c < dv; c += VEC)
                vstore(p->e + i * dv + c, vmul(beta, vsub(vload(p->u + r * dv + c), vload(p->t + (i - i0) * dv + c))));
            rest.k++, rest.a = p->p + r * DELTA_C + i0, rest.c = p->o + r * dv;
            mm(&rest);
        }
    }
}

/* w (dk, C) = kt, column j times exp(G_last - G_j), last = n1 - 1. */
static void decayed_keys(const struct cpu_delta *p, float *w) {
    const vec last = vset1(p->g[p->n1 - 1]);
    for (int64_t j = 0; j < p->n1; j += VEC) {
        const vec by = vexp(vsub(last, vload(p->g + j)));
        for (int64_t d = 0; d < p->dk; d++) vstore(w + d * DELTA_C + j, vmul(vload(p->kt + d * DELTA_C + j), by));
    }
}
/* next (dk, dv), which may be s: the state after a whole chunk. w: (dk, C) scratch. */
static void kern_delta_state(const struct cpu_delta *p, float *next, float *w) {
    const vec by = vset1(exp1(p->g[p->n1 - 1]));
    decayed_keys(p, w);
    for (int64_t x = 0; x < p->dk * p->dv && p->s; x += VEC) vstore(next + x, vmul(by, vload(p->s + x)));
    mm(&(struct mm){p->dk, p->dv, p->n1, w, DELTA_C, 1, p->e, p->dv, next, p->dv, p->s != NULL, 0});
}

/* dst (cols, ldd) = src (rows, lds), transposed; both counts multiples of 16. */
static void transpose(float *dst, int64_t ldd, const float *src, int64_t lds, int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; i += VEC)
        for (int64_t j = 0; j < cols; j += VEC) {
            vec r[VEC];
            VEC_UNROLL for (int k = 0; k < VEC; k++) r[k] = vload(src + (i + k) * lds + j);
            vtranspose(r);
            VEC_UNROLL for (int k = 0; k < VEC; k++) vstore(dst + (j + k) * ldd + i, r[k]);
        }
}
static void kern_delta_keys(float *kt, const float *k, int64_t dk) { transpose(kt, DELTA_C, k, dk, DELTA_C, dk); }

VEC_FN void open_keys(float *kt, const struct cpu_open_keys *p, enum dtype dt) {
    for (int64_t i = 0; i < p->rows; i += VEC)
        for (int64_t d = 0; d < p->dk; d += VEC) {
            vec r[VEC]; /* rows that are not there become columns that nothing reads */
            VEC_UNROLL for (int k = 0; k < VEC; k++) r[k] = vmul(vload_act(p->k, dt, (i + k) * p->dk + d), vset1(p->r[i + k]));
            vtranspose(r);
            VEC_UNROLL for (int k = 0; k < VEC; k++) vstore(kt + (d + k) * DELTA_C + i, r[k]);
        }
}
static void kern_delta_open_keys(float *kt, const struct cpu_open_keys *p, enum dtype dt) {
    if (dt == DT_BF16) open_keys(kt, p, DT_BF16);
    else open_keys(kt, p, DT_F32);
}

VEC_FN float dot_row(const float *a, const float *b, int64_t n) {
    vec s = vset1(0);
    for (int64_t i = 0; i < n; i += VEC) s = vfma(vload(a + i), vload(b + i), s);
    return vsum(s);
}
/* dst (n) = a times by, or += with add. */
VEC_FN void scale_row(float *dst, const float *a, float by, int64_t n, bool add) {
    for (int64_t i = 0; i < n; i += VEC)
        vstore(dst + i, add ? vfma(vset1(by), vload(a + i), vload(dst + i)) : vmul(vset1(by), vload(a + i)));
}

/* From the last row up: r_j = beta_j x_j, x_j = de_j - sum_{i>j} A_ij r_i, the whole gradient of e_j; x_j.e_j is
 * dbeta_j beta_j. */
static void delta_solve_back(const struct cpu_delta_grad *g) {
    const struct cpu_delta *f = g->f;
    const int64_t n = f->n1, dv = f->dv;
    for (int64_t j = n - 1; j >= 0; j--) {
        float *const x = g->dv + j * dv;
        mm(&(struct mm){1, dv, n - 1 - j, f->a + (j + 1) * DELTA_C + j, 0, DELTA_C, x + dv, dv, f->t, dv, false, 0});
        for (int64_t c = 0; c < dv; c += VEC) vstore(x + c, vsub(vload(g->de + j * dv + c), vload(f->t + c)));
        g->dbeta_beta[j] = dot_row(x, f->e + j * dv, dv);
        scale_row(x, x, f->beta[j], dv, false);
    }
}

/* x (n, C) becomes x_ij D_ij for j < i + diagonal, else 0; pairs += x_ij D_ij dots_ij for j < i, the gradient of G_i - G_j. */
static void decay_back(const struct cpu_delta_grad *g, float *x, const float *dots, int64_t diagonal) {
    const struct cpu_delta *f = g->f;
    for (int64_t i = 0; i < f->n1; i++)
        for (int64_t j = 0; j < DELTA_C; j += VEC) {
            const int64_t at = i * DELTA_C + j, last = i + diagonal - j, keep = last < VEC ? last : VEC;
            if (last <= 0) {
                vstore(x + at, vset1(0));
                continue;
            }
            const vec y = vkeep(vmul(vload(x + at), vexp(vsub(vset1(f->g[i]), vload(f->g + j)))), 0, keep, 0);
            const vec z = vmul(y, vload(dots + at));
            vstore(x + at, y);
            vstore(g->pairs + at, vadd(vload(g->pairs + at), vkeep(z, 0, i - j <= 0 ? 0 : i - j < VEC ? i - j : VEC, 0)));
        }
}

/* dg (of g, not G): dg_t = start_t + ... + start_last + after_0 + ... + after_{t-1} + whole + the sum of pairs_ij over
 * j < t <= i. No term is added that another one takes away again. */
static void delta_gates_back(const struct cpu_delta_grad *g, float whole) {
    float *const by_j = g->pairs + DELTA_C * DELTA_C; /* by_j[j][i] */
    const int64_t n = g->f->n1;
    vec sum[DELTA_C / VEC]; /* lanes are i: sums over j < t */
    for (int64_t k = 0; k < DELTA_C / VEC; k++) sum[k] = vset1(0);
    transpose(by_j, DELTA_C, g->pairs, DELTA_C, DELTA_C, DELTA_C);
    for (int64_t i = n - 2; i >= 0; i--) g->start[i] += g->start[i + 1];
    for (int64_t t = 0; t < n; t++) {
        vec all = vset1(0);
        for (int64_t k = t / VEC; k < DELTA_C / VEC; k++) all = vadd(all, vkeep(sum[k], t - k * VEC > 0 ? t - k * VEC : 0, VEC, 0));
        g->dg[t] = (g->start[t] + whole) + vsum(all);
        whole += g->after[t];
        for (int64_t k = 0; k < DELTA_C / VEC; k++) sum[k] = vadd(sum[k], vload(by_j + t * DELTA_C + k * VEC));
    }
}

/* What passes through the state at the chunk's start: S^T k and S^T q. */
static void delta_start_back(const struct cpu_delta_grad *g) {
    const struct cpu_delta *f = g->f;
    const int64_t n = f->n1, dk = f->dk, dv = f->dv;
    struct mm m = {n, dv, dk, f->kt, 1, DELTA_C, f->s, dv, g->x, dv, false, 0};
    mm(&m);
    for (int64_t i = 0; i < n; i++) {
        const float by = exp1(f->g[i]);
        g->start[i] = -by * dot_row(g->dv + i * dv, g->x + i * dv, dv);
        scale_row(g->rs + i * dv, g->dv + i * dv, -by, dv, false);
        scale_row(g->os + i * dv, g->dout + i * dv, by, dv, false);
    }
    m.a = f->q, m.row = dk, m.col = 1;
    mm(&m);
    for (int64_t i = 0; i < n; i++) g->start[i] += dot_row(g->os + i * dv, g->x + i * dv, dv);
    transpose(g->st, dk, f->s, dv, dk, dv);
    mm(&(struct mm){n, dk, dv, g->rs, dv, 1, g->st, dk, g->dk, dk, true, 0});
    mm(&(struct mm){n, dk, dv, g->os, dv, 1, g->st, dk, g->dq, dk, true, 0});
}

/* The backward of a chunk of one value head (rows [0, n1)), its e, dots and, with s, start state given. */
static void kern_delta_bwd(const struct cpu_delta_grad *g) {
    const struct cpu_delta *f = g->f;
    const int64_t n = f->n1, dk = f->dk, dv = f->dv, last = n - 1;
    const float by = exp1(f->g[last]);
    float whole = 0; /* of the whole chunk's decay */
    for (int64_t i = 0; i < DELTA_C * DELTA_C; i += VEC) vstore(g->pairs + i, vset1(0));
    for (int64_t i = 0; i < n; i++) {
        g->start[i] = g->after[i] = 0;
        decay_row(f, i);
    }
    mm(&(struct mm){n, dv, n, f->p, 1, DELTA_C, g->dout, dv, g->de, dv, false, 0});
    if (g->ds) {
        mm(&(struct mm){n, dv, dk, f->kt, 1, DELTA_C, g->ds, dv, g->x, dv, false, 0});
        for (int64_t j = 0; j < n; j++) {
            const float left = exp1(f->g[last] - f->g[j]);
            g->after[j] = left * dot_row(g->x + j * dv, f->e + j * dv, dv);
            scale_row(g->de + j * dv, g->x + j * dv, left, dv, true);
        }
        if (f->s) whole = by * dot_row(f->s, g->ds, dk * dv);
    }
    delta_solve_back(g);
    if (f->s) delta_start_back(g);
    transpose(g->et, DELTA_C, f->e, dv, (n + VEC - 1) / VEC * VEC, dv);
    mm(&(struct mm){n, n, dv, g->dout, dv, 1, g->et, DELTA_C, f->p, DELTA_C, false, 0});
    decay_back(g, f->p, f->qk, 1);
    mm(&(struct mm){n, dk, n, f->p, DELTA_C, 1, g->k, dk, g->dq, dk, true, 0});
    mm(&(struct mm){n, dk, n, f->p, 1, DELTA_C, f->q, dk, g->dk, dk, true, 0});
    mm(&(struct mm){n, n, dv, g->dv, dv, 1, g->et, DELTA_C, f->a, DELTA_C, false, 0});
    for (int64_t i = 0; i < n * DELTA_C; i += VEC) vstore(f->a + i, vsub(vset1(0), vload(f->a + i)));
    decay_back(g, f->a, f->kk, 0);
    mm(&(struct mm){n, dk, n, f->a, DELTA_C, 1, g->k, dk, g->dk, dk, true, 0});
    mm(&(struct mm){n, dk, n, f->a, 1, DELTA_C, g->k, dk, g->dk, dk, true, 0});
    if (g->ds) {
        transpose(g->st, dk, g->ds, dv, dk, dv);
        for (int64_t j = 0; j < n; j++) scale_row(g->x + j * dv, f->e + j * dv, exp1(f->g[last] - f->g[j]), dv, false);
        mm(&(struct mm){n, dk, dv, g->x, dv, 1, g->st, dk, g->dk, dk, true, 0});
    }
    if (f->s) {
        for (int64_t x = 0; x < dk * dv && g->ds; x += VEC) vstore(g->ds0 + x, vmul(vset1(by), vload(g->ds + x)));
        mm(&(struct mm){dk, dv, n, f->kt, DELTA_C, 1, g->rs, dv, g->ds0, dv, g->ds != NULL, 0});
        mm(&(struct mm){dk, dv, n, f->q, 1, dk, g->os, dv, g->ds0, dv, true, 0});
    }
    delta_gates_back(g, whole);
}
