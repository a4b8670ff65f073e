/* ops_mla.h - multi-head latent attention for the harness: what RoPE turns, joined with the rest; heads times their own rows of
 * a matrix.
 *
 * A case of the former has `hq` heads of `n` elements without rope and `k` with, and keys of `dim`, rope included. One of the
 * latter has `hq` heads with rows from row `k` on, `n` of them, in a matrix of `dim` columns. */
#ifndef VERLC_OPS_MLA_H
#define VERLC_OPS_MLA_H

#include "ops/ops_test.h"

enum { MLA_BLOCK = 16, MLA_POSITIONS = 40 };

static inline int64_t mla_pages(const struct run *r) { return (r->s->rows + MLA_BLOCK - 1) / MLA_BLOCK + 2; }
static inline int64_t mla_rank(const struct run *r) { return r->s->dim - r->s->k; }

static inline void mla_setup(struct run *r) {
    const struct op_shape *s = r->s;
    add_in(r, "heads", shape_2d(r->act, r->rows, s->hq * (s->n + s->k)), true, 1, 0);
    add_in(r, "latent", shape_2d(DT_F32, r->rows, s->dim), true, 1, 0);
    add_in(r, "cn", shape_2d(r->act, r->rows, mla_rank(r)), true, 1, 0);
    add_ids(r, "pos", MLA_POSITIONS, false);
    add_ids(r, "slots", mla_pages(r) * MLA_BLOCK, true);
    add_gout(r, "dq", shape_2d(r->act, r->rows, s->hq * s->dim), true);
    add_gout(r, "dk", shape_2d(DT_F32, r->rows, s->dim), true);
}
static inline struct mla_join_args mla_args(struct run *r) {
    const struct op_shape *s = r->s;
    struct tensor table = {NULL, DT_F32, 3, {MLA_POSITIONS, s->k / 2, 2, 1}};
    float *f = xcalloc((size_t)tensor_count(table), sizeof *f);
    for (int64_t i = 0; i < tensor_count(table); i += 2) {
        const double angle = (double)(i / s->k) * pow(10000, -(double)(i % s->k) / (double)s->k);
        f[i] = (float)cos(angle);
        f[i + 1] = (float)sin(angle);
    }
    table = up_values(r, table, false, f, NULL);
    free(f);
    return (struct mla_join_args){.n_heads = s->hq,
                                  .nope = s->n,
                                  .rope = s->k,
                                  .table = table,
                                  .pos = up(r, &r->in[3]),
                                  .slots = up(r, &r->in[4]),
                                  .interleaved = s->flags & S_PAIRS};
}
/* Rows of keys in the order of tokens, or, to_cache, where their slots are. */
static inline void mla_rows(const struct run *r, float *rows, float *cache, bool to_cache) {
    const int64_t dim = r->s->dim;
    for (int64_t t = 0; t < r->rows; t++)
        memcpy(to_cache ? cache + r->in[4].i[t] * dim : rows + t * dim, to_cache ? rows + t * dim : cache + r->in[4].i[t] * dim,
               (size_t)dim * sizeof *rows);
}
static inline struct tensor mla_cache(const struct run *r, enum dtype dt) {
    return shape_4d(dt, mla_pages(r), 1, MLA_BLOCK, r->s->dim);
}
static inline int mla_fwd(struct run *r) {
    struct mla_join_args a = mla_args(r);
    const int64_t h = r->s->hq, dim = r->s->dim;
    a.heads = up(r, &r->in[0]);
    a.latent = up(r, &r->in[1]);
    a.cn = up(r, &r->in[2]);
    a.q = dev_new(r, shape_2d(r->act, r->rows, h * dim), true);
    a.k = dev_new(r, mla_cache(r, r->act), false);
    TRY(dev_zero(r->d, a.q.data, (size_t)tensor_count(a.q) * dtype_size(r->act)));
    const struct tensor less = dev_new(r, shape_2d(DT_F32, r->rows, h * a.nope), true),
                        more = dev_new(r, shape_2d(r->act, r->rows, h * (a.nope + a.rope + 3)), true);
    const struct tensor kept = up(r, &r->in[0]);
    TRY(dev_mla_join_fwd(r->d, &a));
    TRY(dev_resize_heads(r->d, less, a.heads, h, false));
    TRY(dev_resize_heads(r->d, more, a.heads, h, false));
    TRY(dev_resize_heads(r->d, kept, less, h, true));
    down(r, "q", a.q, true, TOL_SUM);
    float *values = down_values(r, a.k);
    struct slot *keys = slot_new(r->out, &r->n_out, "k", shape_2d(r->act, r->rows, dim), true);
    keys->tol = TOL_SUM;
    keys->f = xcalloc((size_t)slot_count(keys), sizeof *keys->f);
    mla_rows(r, keys->f, values, false);
    free(values);
    down(r, "shorter heads", less, true, TOL_EXACT);
    down(r, "longer heads", more, true, TOL_EXACT);
    down(r, "kept", kept, true, TOL_EXACT);
    return 0;
}
static inline int mla_bwd(struct run *r) {
    struct mla_join_args a = mla_args(r);
    const struct tensor cache = mla_cache(r, DT_F32);
    a.heads = dev_new(r, slot_shape(&r->in[0]), true);
    a.latent = dev_new(r, shape_2d(r->act, r->rows, r->s->dim), true);
    a.cn = dev_new(r, slot_shape(&r->in[2]), true);
    a.q = up(r, &r->gout[0]);
    TRY(dev_zero(r->d, a.heads.data, (size_t)tensor_count(a.heads) * dtype_size(r->act)));
    TRY(dev_zero(r->d, a.latent.data, (size_t)tensor_count(a.latent) * dtype_size(r->act)));
    float *f = xcalloc((size_t)tensor_count(cache), sizeof *f), *half = xcalloc((size_t)(r->rows * r->s->dim), sizeof *half);
    /* the gradient of a key comes in two parts, but for what is turned of it */
    mla_rows(r, r->gout[1].f, f, true);
    for (int64_t i = 0; i < r->rows * r->s->dim; i++) half[i] = i % r->s->dim < a.rope ? 0 : 0.25f * r->gout[1].f[i];
    float *rest = xcalloc((size_t)tensor_count(cache), sizeof *rest);
    mla_rows(r, half, rest, true);
    for (int64_t i = 0; i < tensor_count(cache); i++) f[i] -= rest[i];
    a.k = up_values(r, cache, false, f, NULL);
    a.v = up_values(r, cache, false, rest, NULL);
    free(f);
    free(half);
    free(rest);
    TRY(dev_mla_join_bwd(r->d, &a));
    down_grad(r, 0, a.heads, TOL_SUM);
    down_grad(r, 1, a.latent, TOL_SUM);
    down_grad(r, 2, a.cn, TOL_SUM);
    return 0;
}

/* ---- heads ---- */

enum { HEADS_BEFORE = 8, HEADS_BEHIND = 8 }; /* columns of a head of x and of y around those that are multiplied */

/* W of a head has some rows behind those that are multiplied. */
static inline int64_t heads_step(const struct op_shape *s) { return s->k + s->n + 3 * (s->k % 8 != 0); }
static inline void heads_setup(struct run *r) {
    const struct op_shape *s = r->s;
    add_in(r, "x", shape_2d(r->act, r->rows, s->hq * (HEADS_BEFORE + s->dim)), true, 1, 0);
    add_in(r, "x of rows", shape_2d(r->act, r->rows, s->hq * (s->n + HEADS_BEHIND)), true, 1, 0);
    add_in(r, "w", shape_2d(r->act, s->hq * heads_step(s), s->dim), false, 0.5f, 0);
    add_gout(r, "dy", shape_2d(r->act, r->rows, s->hq * s->n), true);
    add_gout(r, "dy of rows", shape_2d(r->act, r->rows, s->hq * s->dim), true);
}
static inline struct heads_args heads_args(const struct run *r, struct weight w) {
    return (struct heads_args){.n_heads = r->s->hq, .w = w, .row = r->s->k, .rows = r->s->n};
}
static inline int heads_fwd(struct run *r) {
    const struct op_shape *s = r->s;
    struct weight w;
    TRY(up_weight(r, &r->in[2], &w));
    struct heads_args a = heads_args(r, w), b = a;
    a.x = up(r, &r->in[0]);
    a.x_at = HEADS_BEFORE;
    a.y = dev_new(r, shape_2d(r->act, r->rows, s->hq * s->n), true);
    b.x = up(r, &r->in[1]);
    b.transposed = true;
    b.y = up_acc(r, shape_2d(r->act, r->rows, s->hq * s->dim), true);
    b.add = true;
    TRY(dev_heads_fwd(r->d, &a));
    TRY(dev_heads_fwd(r->d, &b));
    down(r, "y", a.y, true, TOL_SUM);
    down(r, "y of rows", b.y, true, TOL_SUM);
    struct heads_args c = a; /* among columns of others, in f32 */
    c.y = dev_new(r, shape_2d(DT_F32, r->rows, s->hq * (s->n + HEADS_BEHIND)), true);
    TRY(dev_zero(r->d, c.y.data, (size_t)tensor_count(c.y) * sizeof(float)));
    TRY(dev_heads_fwd(r->d, &c));
    down(r, "y in f32", c.y, true, TOL_SUM);
    return 0;
}
static inline int heads_bwd(struct run *r) {
    const struct op_shape *s = r->s;
    struct weight w;
    TRY(up_weight(r, &r->in[2], &w));
    struct heads_args a = heads_args(r, w), b = a;
    a.x = up(r, &r->gout[0]);
    a.y = dev_new(r, slot_shape(&r->in[0]), true);
    a.y_at = HEADS_BEFORE;
    a.transposed = true;
    b.x = up(r, &r->gout[1]);
    b.y = dev_new(r, slot_shape(&r->in[1]), true);
    TRY(dev_zero(r->d, a.y.data, (size_t)tensor_count(a.y) * dtype_size(r->act)));
    TRY(dev_zero(r->d, b.y.data, (size_t)tensor_count(b.y) * dtype_size(r->act)));
    TRY(dev_heads_fwd(r->d, &a));
    TRY(dev_heads_fwd(r->d, &b));
    down_grad(r, 0, a.y, TOL_SUM);
    down_grad(r, 1, b.y, TOL_SUM);
    const struct tensor dw = dev_new(r, shape_2d(DT_F32, s->hq * heads_step(s), s->dim), false);
    struct heads_dw_args g = {.n_heads = s->hq, .dw = dw, .row = s->k, .rows = s->n, .add = true};
    g.x = a.x;
    g.y = up(r, &r->in[0]);
    g.y_at = HEADS_BEFORE;
    TRY(dev_zero(r->d, dw.data, (size_t)tensor_count(dw) * sizeof(float)));
    TRY(dev_heads_dw(r->d, &g));
    g.x = up(r, &r->in[1]);
    g.y = b.x;
    g.y_at = 0;
    TRY(dev_heads_dw(r->d, &g));
    down_grad(r, 2, dw, TOL_SUM);
    g.dw = up_acc(r, shape_2d(DT_F32, s->hq * heads_step(s), s->dim), false);
    TRY(dev_heads_dw(r->d, &g));
    down(r, "dw added", g.dw, false, TOL_SUM);
    g.dw = dev_new(r, shape_2d(DT_F32, s->hq * heads_step(s), s->dim), false);
    g.add = false;
    TRY(dev_zero(r->d, g.dw.data, (size_t)tensor_count(g.dw) * sizeof(float)));
    TRY(dev_heads_dw(r->d, &g));
    down(r, "dw alone", g.dw, false, TOL_SUM);
    return 0;
}

static const struct op_shape shapes_mla[] = {{.rows = 1, .hq = 1, .n = 1, .k = 2, .dim = 3},
                                             {.rows = 7, .hq = 3, .n = 6, .k = 4, .dim = 9, .flags = S_PAIRS},
                                             {.rows = 33, .hq = 4, .n = 16, .k = 8, .dim = 40},
                                             {.rows = 65, .hq = 2, .n = 128, .k = 64, .dim = 576, .flags = S_PAIRS}};
static const struct op_shape shapes_heads[] = {{.rows = 1, .hq = 1, .n = 1, .k = 1, .dim = 1},
                                               {.rows = 7, .hq = 3, .n = 5, .k = 2, .dim = 9},
                                               {.rows = 40, .hq = 2, .n = 16, .k = 8, .dim = 24},
                                               {.rows = 1, .hq = 3, .n = 64, .k = 32, .dim = 128},
                                               {.rows = 133, .hq = 2, .n = 128, .k = 128, .dim = 512}};

#endif
