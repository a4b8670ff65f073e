/* ops_table.h - every differentiable or row-wise op of device.h, described for the
 * harness: inputs, forward, backward and awkward shapes.
 * The sampler, the optimizer and attention over a paged KV cache have programs of their own. */
#ifndef VERLC_OPS_TABLE_H
#define VERLC_OPS_TABLE_H

#include "ops/ops_delta_net.h"
#include "ops/ops_mla.h"
#include "ops/ops_moe.h"
#include "ops/ops_test.h"

/* ---- cast, weights, rows ---- */

static inline void cast_setup(struct run *r) { add_in(r, "x", shape_2d(DT_F32, r->rows, r->s->n), true, 3, 0); }
static inline int cast_fwd(struct run *r) {
    const struct tensor y = dev_new(r, shape_2d(r->act, r->rows, r->s->n), true);
    const struct tensor z = dev_new(r, shape_2d(DT_F32, r->rows, r->s->n), true);
    TRY(dev_cast(r->d, y, up(r, &r->in[0])));
    TRY(dev_cast(r->d, z, y));
    down(r, "y", y, true, TOL_EXACT);
    down(r, "back", z, true, TOL_EXACT);
    return 0;
}

static inline void weight_setup(struct run *r) { add_in(r, "w", shape_2d(DT_F32, r->s->n, r->s->k), false, 1, 0); }
static inline int weight_fwd(struct run *r) {
    struct weight w;
    const struct tensor same = dev_new(r, shape_2d(r->act, r->s->n, r->s->k), false);
    const struct tensor wide = dev_new(r, shape_2d(DT_F32, r->s->n, r->s->k), false);
    TRY(up_weight(r, &r->in[0], &w));
    TRY(dev_weight_unpack(r->d, same, w));
    TRY(dev_weight_unpack(r->d, wide, w));
    TRY(dev_weight_pack(r->d, w, same)); /* from act too */
    TRY(dev_weight_unpack(r->d, wide, w));
    down(r, "same", same, false, TOL_EXACT);
    down(r, "wide", wide, false, TOL_EXACT);
    return 0;
}

static inline void embed_setup(struct run *r) {
    add_in(r, "w", shape_2d(r->act, r->s->n, r->s->k), false, 1, 0);
    add_ids(r, "ids", r->s->n, false);
    add_gout(r, "dx", shape_2d(DT_F32, r->rows, r->s->k), true);
}
static inline int embed_fwd(struct run *r) {
    struct weight w;
    const struct tensor x = dev_new(r, shape_2d(DT_F32, r->rows, r->s->k), true);
    TRY(up_weight(r, &r->in[0], &w));
    TRY(dev_embed_fwd(r->d, x, up(r, &r->in[1]), w));
    down(r, "x", x, true, TOL_EXACT);
    return 0;
}
static inline int embed_bwd(struct run *r) {
    const struct tensor dw = up_acc(r, shape_2d(DT_F32, r->s->n, r->s->k), false);
    TRY(dev_embed_bwd(r->d, dw, up(r, &r->in[1]), up(r, &r->gout[0])));
    down_grad(r, 0, dw, TOL_EXACT); /* f32 additions in row order: nothing is left open */
    return 0;
}

/* gather and, as its backward, scatter_rows_add. */
static inline void gather_setup(struct run *r) {
    add_in(r, "src", shape_2d(r->s->flags & S_F32 ? DT_F32 : r->act, r->s->n, r->s->k), false, 1, 0);
    add_ids(r, "idx", r->s->n, true);
    add_gout(r, "dy", shape_2d(r->act, r->rows, r->s->k), true);
}
static inline int gather_fwd(struct run *r) {
    const struct tensor y = dev_new(r, shape_2d(r->in[0].dt, r->rows, r->s->k), true);
    TRY(dev_gather_rows(r->d, y, up(r, &r->in[0]), up(r, &r->in[1])));
    down(r, "y", y, true, TOL_EXACT);
    return 0;
}
static inline int gather_bwd(struct run *r) {
    const struct tensor dst = up_acc(r, shape_2d(DT_F32, r->s->n, r->s->k), false);
    TRY(dev_scatter_rows_add(r->d, dst, up(r, &r->gout[0]), up(r, &r->in[1])));
    down_grad(r, 0, dst, TOL_EXACT);
    return 0;
}

/* Rows times a number of their position; its own transpose. */
static inline void scale_setup(struct run *r) {
    add_in(r, "x", shape_2d(r->act, r->rows, r->s->k), true, 1, 0);
    add_in(r, "factor", shape_1d(DT_F32, r->s->n), false, 0.3f, 1);
    add_ids(r, "pos", r->s->n, false);
}
static inline int scale_fwd(struct run *r) {
    const struct tensor x = up(r, &r->in[0]);
    TRY(dev_scale_rows(r->d, x, up(r, &r->in[1]), up(r, &r->in[2])));
    down(r, "x", x, true, TOL_EXACT);
    return 0;
}

/* Columns of three ranks, one of them with none where a row is short; with S_F32 added to `from`. */
static inline void join_setup(struct run *r) {
    add_in(r, "x", shape_1d(r->s->flags & S_F32 ? DT_F32 : r->act, r->rows * r->s->n), false, 1, 0);
    add_in(r, "from", shape_2d(DT_F32, r->rows, r->s->n), true, 1, 0);
}
static inline int join_fwd(struct run *r) {
    const int64_t n = r->s->n, unit = r->s->k;
    const bool add = r->s->flags & S_F32;
    const struct tensor y = dev_new(r, shape_2d(r->in[0].dt, r->rows, n), true);
    struct join_columns_args a = {
        .y = y, .x = up(r, &r->in[0]), .n = 3, .cut = {0, n / 3 / unit * unit, n * 2 / 3 / unit * unit, n}};
    if (add) a.from = up(r, &r->in[1]);
    TRY(dev_join_columns(r->d, &a));
    down(r, "y", y, true, TOL_EXACT);
    return 0;
}

/* Columns from k of an input to window of an output with n, whose others stay. */
static inline void copy_columns_setup(struct run *r) {
    add_in(r, "x", shape_2d(r->act, r->rows, r->s->k + r->s->n / 2), true, 1, 0);
    add_in(r, "y", shape_2d(r->act, r->rows, r->s->n), true, 1, 0);
}
static inline int copy_columns_fwd(struct run *r) {
    const struct tensor y = up(r, &r->in[1]);
    const struct copy_columns_args a = {
        .y = y, .y_at = r->s->window, .x = up(r, &r->in[0]), .x_at = r->s->k, .n = r->s->n / 2 - r->s->window};
    TRY(dev_copy_columns(r->d, &a));
    down(r, "y", y, true, TOL_EXACT);
    return 0;
}

/* The first rows, half of them, to the last ones, from the last one on. */
static inline void copy_rows_setup(struct run *r) { add_in(r, "x", shape_2d(r->act, r->s->n, r->s->k), false, 1, 0); }
static inline int copy_rows_fwd(struct run *r) {
    enum { MOST = 512 };
    int32_t from[MOST], to[MOST];
    const struct tensor x = up(r, &r->in[0]);
    const int64_t n = r->s->n / 2 < MOST ? r->s->n / 2 : MOST;
    for (int64_t i = 0; i < n; i++) from[i] = (int32_t)(n - 1 - i), to[i] = (int32_t)(r->s->n - 1 - i);
    TRY(dev_copy_rows(r->d, &(struct copy_rows_args){x, n, from, to}));
    down(r, "x", x, false, TOL_EXACT);
    return 0;
}

/* ---- RMSNorm ---- */

#define NORM_EPS 1e-5f
static inline void rmsnorm_setup(struct run *r) {
    add_in(r, "x", shape_2d(DT_F32, r->rows, r->s->n), true, 2, 0.3f);
    add_in(r, "w", shape_1d(r->act, r->s->n), false, 0.2f, 1);
    add_gout(r, "dy", shape_2d(r->s->flags & S_F32 ? DT_F32 : r->act, r->rows, r->s->n), true);
}
static inline enum norm_kind norm_kind_of(const struct run *r) { return (enum norm_kind)r->s->k; }
static inline int rmsnorm_fwd(struct run *r) {
    const struct tensor y = dev_new(r, shape_2d(r->act, r->rows, r->s->n), true);
    const struct tensor rstd = dev_new(r, shape_1d(DT_F32, r->rows), true);
    struct rmsnorm_args a = {
        .y = y, .rstd = rstd, .x = up(r, &r->in[0]), .w = up(r, &r->in[1]), .eps = NORM_EPS, .kind = norm_kind_of(r)};
    TRY(dev_rmsnorm_fwd(r->d, &a));
    down(r, "y", y, true, TOL_SUM);
    down(r, "rstd", rstd, true, TOL_SUM);
    a.y = dev_new(r, shape_2d(DT_F32, r->rows, r->s->n), true);
    a.from = up_acc(r, shape_2d(DT_F32, r->rows, r->s->n), true);
    TRY(dev_rmsnorm_fwd(r->d, &a));
    down(r, "from + y", a.y, true, TOL_SUM);
    a.y = a.from; /* in place */
    TRY(dev_rmsnorm_fwd(r->d, &a));
    down(r, "+= y", a.y, true, TOL_SUM);
    return 0;
}
static inline int rmsnorm_bwd(struct run *r) {
    const struct tensor x = up(r, &r->in[0]), w = up(r, &r->in[1]);
    const struct tensor y = dev_new(r, shape_2d(r->act, r->rows, r->s->n), true);
    const struct tensor rstd = dev_new(r, shape_1d(DT_F32, r->rows), true);
    const struct tensor dx = up_acc(r, shape_2d(DT_F32, r->rows, r->s->n), true);
    const struct tensor dw = up_acc(r, shape_1d(DT_F32, r->s->n), false);
    const enum norm_kind kind = norm_kind_of(r);
    TRY(dev_rmsnorm_fwd(r->d, &(struct rmsnorm_args){.y = y, .rstd = rstd, .x = x, .w = w, .eps = NORM_EPS, .kind = kind}));
    struct rmsnorm_bwd_args a = {.dx = dx, .dw = dw, .dy = up(r, &r->gout[0]), .x = x, .w = w, .rstd = rstd, .kind = kind};
    TRY(dev_rmsnorm_bwd(r->d, &a));
    down_grad(r, 0, dx, TOL_SUM)->floor = 0.1; /* a row of one column has no gradient, only rounding */
    down_grad(r, 1, dw, TOL_SUM);
    a.dx = up_acc(r, shape_2d(DT_F32, r->rows, r->s->n), true);
    a.dw = up_acc(r, shape_1d(DT_F32, r->s->n), false);
    a.rounded = dev_new(r, shape_2d(r->act, r->rows, r->s->n), true);
    TRY(dev_rmsnorm_bwd(r->d, &a));
    down(r, "dx beside its rounding", a.dx, true, TOL_SUM)->floor = 0.1;
    down(r, "dx rounded", a.rounded, true, TOL_SUM)->floor = 0.1;
    return 0;
}

/* The same of all queries (n columns) and of all keys (k) of a row; hq: the kind. */
static inline void qk_norm_setup(struct run *r) {
    add_in(r, "x", shape_2d(r->act, r->rows, r->s->n + 2 * r->s->k), true, 2, 0.3f);
    add_in(r, "q_norm", shape_1d(r->act, r->s->n), false, 0.2f, 1);
    add_in(r, "k_norm", shape_1d(r->act, r->s->k), false, 0.2f, 1);
    add_gout(r, "dy", shape_2d(r->act, r->rows, r->s->n + 2 * r->s->k), true);
}
static inline int qk_norm_run(struct run *r, struct qk_norm_args *a) {
    *a = (struct qk_norm_args){.x = up(r, &r->in[0]),
                               .q_norm = up(r, &r->in[1]),
                               .k_norm = up(r, &r->in[2]),
                               .y = dev_new(r, shape_2d(r->act, r->rows, r->s->n + 2 * r->s->k), true),
                               .rstd = dev_new(r, shape_2d(DT_F32, r->rows, 2), true),
                               .eps = NORM_EPS,
                               .kind = (enum norm_kind)r->s->hq};
    return dev_qk_norm_fwd(r->d, a);
}
static inline int qk_norm_fwd(struct run *r) {
    struct qk_norm_args a;
    TRY(qk_norm_run(r, &a));
    down(r, "y", a.y, true, TOL_SUM);
    down(r, "rstd", a.rstd, true, TOL_SUM);
    return 0;
}
static inline int qk_norm_bwd(struct run *r) {
    struct qk_norm_args a;
    TRY(qk_norm_run(r, &a));
    const struct qk_norm_bwd_args g = {.dy = up(r, &r->gout[0]),
                                       .dq_norm = up_acc(r, shape_1d(DT_F32, r->s->n), false),
                                       .dk_norm = up_acc(r, shape_1d(DT_F32, r->s->k), false)};
    TRY(dev_qk_norm_bwd(r->d, &a, &g));
    down_grad(r, 0, g.dy, TOL_SUM)->floor = 0.1;
    down_grad(r, 1, g.dq_norm, TOL_SUM);
    down_grad(r, 2, g.dk_norm, TOL_SUM);
    return 0;
}

/* RoPE, then the norm of each head; n: the kind. */
static inline void rope_norm_setup(struct run *r) {
    add_in(r, "x", shape_2d(r->act, r->rows, (r->s->hq + 2 * r->s->hk) * r->s->dim), true, 2, 0.3f);
    add_in(r, "q_norm", shape_1d(r->act, r->s->dim), false, 0.2f, 1);
    add_in(r, "k_norm", shape_1d(r->act, r->s->dim), false, 0.2f, 1);
    add_in(r, "rope", (struct tensor){NULL, DT_F32, 3, {19, r->s->dim / 2, 2, 1}}, false, 0.7f, 0);
    add_ids(r, "pos", 19, false);
    add_gout(r, "dy", shape_2d(r->act, r->rows, (r->s->hq + 2 * r->s->hk) * r->s->dim), true);
}
static inline int rope_norm_run(struct run *r, struct rope_norm_args *a) {
    *a = (struct rope_norm_args){.n_q_heads = r->s->hq,
                                 .n_kv_heads = r->s->hk,
                                 .head_dim = r->s->dim,
                                 .x = up(r, &r->in[0]),
                                 .q_norm = up(r, &r->in[1]),
                                 .k_norm = up(r, &r->in[2]),
                                 .rope = up(r, &r->in[3]),
                                 .pos = up(r, &r->in[4]),
                                 .y = dev_new(r, shape_2d(r->act, r->rows, (r->s->hq + 2 * r->s->hk) * r->s->dim), true),
                                 .rstd = dev_new(r, shape_2d(DT_F32, r->rows, r->s->hq + r->s->hk), true),
                                 .eps = NORM_EPS,
                                 .kind = (enum norm_kind)r->s->n};
    return dev_rope_norm_fwd(r->d, a);
}
static inline int rope_norm_fwd(struct run *r) {
    struct rope_norm_args a;
    TRY(rope_norm_run(r, &a));
    down(r, "y", a.y, true, TOL_SUM);
    down(r, "rstd", a.rstd, true, TOL_SUM);
    return 0;
}
static inline int rope_norm_bwd(struct run *r) {
    struct rope_norm_args a;
    TRY(rope_norm_run(r, &a));
    const struct qk_norm_bwd_args g = {.dy = up(r, &r->gout[0]),
                                       .dq_norm = up_acc(r, shape_1d(DT_F32, r->s->dim), false),
                                       .dk_norm = up_acc(r, shape_1d(DT_F32, r->s->dim), false)};
    TRY(dev_rope_norm_bwd(r->d, &a, &g));
    down_grad(r, 0, g.dy, TOL_SUM)->floor = 0.1;
    down_grad(r, 1, g.dq_norm, TOL_SUM);
    down_grad(r, 2, g.dk_norm, TOL_SUM);
    return 0;
}

/* ---- matmul: y = x W^T + bias; S_ADD adds to an f32 y ---- */

static inline void matmul_setup(struct run *r) {
    add_in(r, "x", shape_2d(r->act, r->rows, r->s->k), true, 1, 0);
    add_in(r, "w", shape_2d(r->act, r->s->n, r->s->k), false, 0.5f, 0);
    add_in(r, "bias", shape_1d(r->act, r->s->n), false, 1, 0);
    add_gout(r, "dy", shape_2d(r->act, r->rows, r->s->n), true);
}
static inline int matmul_fwd(struct run *r) {
    struct weight w;
    const bool add = r->s->flags & S_ADD;
    const struct tensor shape = shape_2d(r->s->flags & (S_F32 | S_ADD) ? DT_F32 : r->act, r->rows, r->s->n);
    const struct tensor y = add ? up_acc(r, shape, true) : dev_new(r, shape, true);
    const struct tensor bias = r->s->flags & S_BIAS ? up(r, &r->in[2]) : TENSOR_NONE;
    TRY(up_weight(r, &r->in[1], &w));
    if (add) { /* from another tensor, twice: a backend may know more the second time */
        const struct tensor from = up_acc(r, shape, true), sum = dev_new(r, shape, true);
        TRY(dev_matmul_add(r->d, sum, from, up(r, &r->in[0]), w, bias));
        TRY(dev_matmul_add(r->d, sum, from, up(r, &r->in[0]), w, bias));
        down(r, "from + y", sum, true, TOL_SUM);
    }
    TRY(dev_matmul_fwd(r->d, y, up(r, &r->in[0]), w, bias, add));
    down(r, "y", y, true, TOL_SUM);
    return 0;
}
static inline int matmul_bwd(struct run *r) {
    struct weight w;
    const bool add = r->s->flags & S_ADD, bias = r->s->flags & S_BIAS;
    const struct tensor x = up(r, &r->in[0]), dy = up(r, &r->gout[0]);
    const struct tensor shape = shape_2d(r->s->flags & (S_F32 | S_ADD) ? DT_F32 : r->act, r->rows, r->s->k);
    const struct tensor dx = add ? up_acc(r, shape, true) : dev_new(r, shape, true);
    const struct tensor dw = up_acc(r, shape_2d(DT_F32, r->s->n, r->s->k), false);
    const struct tensor db = bias ? up_acc(r, shape_1d(DT_F32, r->s->n), false) : TENSOR_NONE;
    TRY(up_weight(r, &r->in[1], &w));
    TRY(dev_matmul_dx(r->d, dx, dy, w, add));
    TRY(dev_matmul_dw(r->d, dw, db, dy, x, true));
    down_grad(r, 0, dx, TOL_SUM);
    down_grad(r, 1, dw, TOL_SUM);
    if (bias) down_grad(r, 2, db, TOL_SUM);
    const struct tensor dw2 = dev_new(r, shape_2d(DT_F32, r->s->n, r->s->k), false); /* written, whatever was there */
    const struct tensor db2 = bias ? dev_new(r, shape_1d(DT_F32, r->s->n), false) : TENSOR_NONE;
    TRY(dev_matmul_dw(r->d, dw2, db2, dy, x, false));
    down(r, "dw alone", dw2, false, TOL_SUM);
    if (bias) down(r, "db alone", db2, false, TOL_SUM);
    return 0;
}

/* ---- matmul with SwiGLU: s->n is f ---- */

static inline void mlp_setup(struct run *r) {
    add_in(r, "x", shape_2d(r->act, r->rows, r->s->k), true, 1, 0);
    add_in(r, "w", shape_2d(r->act, 2 * r->s->n, r->s->k), false, 0.5f, 0);
    add_in(r, "bias", shape_1d(r->act, 2 * r->s->n), false, 1, 0);
}
static inline int mlp_fwd(struct run *r) {
    struct weight w;
    const struct tensor gate_up = dev_new(r, shape_2d(r->act, r->rows, 2 * r->s->n), true);
    const struct tensor y = dev_new(r, shape_2d(r->act, r->rows, r->s->n), true);
    const struct tensor bias = r->s->flags & S_BIAS ? up(r, &r->in[2]) : TENSOR_NONE;
    TRY(up_weight(r, &r->in[1], &w));
    for (int i = 0; i < 2; i++) TRY(dev_matmul_swiglu(r->d, y, gate_up, up(r, &r->in[0]), w, bias)); /* it may know more then */
    down(r, "y", y, true, TOL_SUM);
    return 0;
}

/* ---- SwiGLU, GeGLU ---- */

static inline void swiglu_setup(struct run *r) {
    add_in(r, "gate_up", shape_2d(r->act, r->rows, 2 * r->s->n), true, 2, 0);
    add_gout(r, "dy", shape_2d(r->act, r->rows, r->s->n), true);
}
static inline int swiglu_fwd(struct run *r) {
    const struct tensor y = dev_new(r, shape_2d(r->act, r->rows, r->s->n), true);
    TRY(dev_swiglu_fwd(r->d, y, up(r, &r->in[0])));
    down(r, "y", y, true, TOL_SUM);
    return 0;
}
static inline int geglu_fwd(struct run *r) {
    const struct tensor y = dev_new(r, shape_2d(r->act, r->rows, r->s->n), true);
    TRY(dev_geglu_fwd(r->d, y, up(r, &r->in[0])));
    down(r, "y", y, true, TOL_SUM);
    return 0;
}
static inline int geglu_bwd(struct run *r) {
    const struct tensor dgu = dev_new(r, shape_2d(r->act, r->rows, 2 * r->s->n), true);
    TRY(dev_geglu_bwd(r->d, dgu, up(r, &r->gout[0]), up(r, &r->in[0])));
    down_grad(r, 0, dgu, TOL_SUM);
    return 0;
}
static inline int swiglu_bwd(struct run *r) {
    const struct tensor dgu = dev_new(r, shape_2d(r->act, r->rows, 2 * r->s->n), true);
    TRY(dev_swiglu_bwd(r->d, dgu, up(r, &r->gout[0]), up(r, &r->in[0])));
    down_grad(r, 0, dgu, TOL_SUM);
    return 0;
}

/* ---- qkv: K and V go to scattered slots of KV blocks of 16 ---- */

enum { ROPE_LEN = 300, BLOCK_LEN = 16 };
static inline int64_t qkv_pages(const struct run *r) { return (r->s->rows + BLOCK_LEN - 1) / BLOCK_LEN + 2; }

static inline void qkv_setup(struct run *r) {
    const struct op_shape *s = r->s;
    add_in(r, "qkv", shape_2d(r->act, r->rows, (s->hq + 2 * s->hk) * s->dim), true, 1.5f, 0);
    add_in(r, "q_norm", shape_1d(r->act, s->dim), false, 0.2f, 1);
    add_in(r, "k_norm", shape_1d(r->act, s->dim), false, 0.2f, 1);
    add_ids(r, "pos", ROPE_LEN, false);
    add_ids(r, "slots", qkv_pages(r) * BLOCK_LEN, true);
    add_gout(r, "dq", shape_2d(r->act, r->rows, s->hq * s->dim), true);
    add_gout(r, "dk", shape_2d(DT_F32, r->rows, s->hk * s->dim), true);
    add_gout(r, "dv", shape_2d(DT_F32, r->rows, s->hk * s->dim), true);
}
static inline struct qkv_args qkv_args(struct run *r) {
    const struct op_shape *s = r->s;
    const int64_t rotary = s->flags & S_PARTIAL ? s->dim / 2 : s->dim;
    struct tensor rope = {NULL, DT_F32, 3, {ROPE_LEN, s->dim / 2, 2, 1}};
    float *f = xcalloc((size_t)tensor_count(rope), sizeof *f);
    for (int64_t p = 0; p < ROPE_LEN; p++)
        for (int64_t i = 0; i < s->dim / 2; i++) {
            const double angle = 2 * i < rotary ? (double)p * pow(10000, -2.0 * (double)i / (double)rotary) : 0;
            f[(p * s->dim / 2 + i) * 2] = (float)cos(angle);
            f[(p * s->dim / 2 + i) * 2 + 1] = (float)sin(angle);
        }
    rope = up_values(r, rope, false, f, NULL);
    free(f);
    struct qkv_args a = {.n_q_heads = s->hq,
                         .n_kv_heads = s->hk,
                         .head_dim = s->dim,
                         .eps = 1e-6f,
                         .kind = s->flags & S_ONE_PLUS ? NORM_ONE_PLUS : NORM_CAST_SCALE,
                         .qkv = up(r, &r->in[0]),
                         .rope = rope,
                         .rotary = s->flags & S_PARTIAL ? rotary : 0,
                         .interleaved = s->flags & S_PAIRS,
                         .pos = up(r, &r->in[3]),
                         .slots = up(r, &r->in[4])};
    if (s->flags & S_NORM) {
        a.q_norm = up(r, &r->in[1]);
        a.k_norm = up(r, &r->in[2]);
    }
    return a;
}
/* Rows (T, Hk*D) of a KV cache (n_kv_blocks, Hk, BLOCK_LEN, D), or the other way round. */
static inline void cache_rows(const struct run *r, float *rows, float *cache, bool to_cache) {
    const int64_t hk = r->s->hk, dim = r->s->dim;
    for (int64_t t = 0; t < r->rows; t++)
        for (int64_t h = 0; h < hk; h++)
            for (int64_t i = 0; i < dim; i++) {
                const int64_t slot = r->in[4].i[t];
                const int64_t at = ((slot / BLOCK_LEN * hk + h) * BLOCK_LEN + slot % BLOCK_LEN) * dim + i;
                if (to_cache) cache[at] = rows[(t * hk + h) * dim + i];
                else rows[(t * hk + h) * dim + i] = cache[at];
            }
}
static inline void down_cache(struct run *r, const char *name, struct tensor cache, enum tol tol) {
    float *values = down_values(r, cache);
    struct slot *s = slot_new(r->out, &r->n_out, name, shape_2d(cache.dt, r->rows, r->s->hk * r->s->dim), true);
    s->tol = tol;
    s->f = xcalloc((size_t)slot_count(s), sizeof *s->f);
    cache_rows(r, s->f, values, false);
    free(values);
}
static inline int qkv_fwd(struct run *r) {
    struct qkv_args a = qkv_args(r);
    const struct tensor kv = shape_4d(r->act, qkv_pages(r), r->s->hk, BLOCK_LEN, r->s->dim);
    a.q = dev_new(r, shape_2d(r->act, r->rows, r->s->hq * r->s->dim), true);
    a.kv = (struct kv){dev_new(r, kv, false), dev_new(r, kv, false)};
    TRY(dev_qkv_fwd(r->d, &a));
    /* bf16: whether the normalised head is rounded before the rotation is left open */
    down(r, "q", a.q, true, TOL_INNER);
    down_cache(r, "k", a.kv.k, TOL_INNER);
    down_cache(r, "v", a.kv.v, TOL_EXACT);
    return 0;
}
static inline int qkv_bwd(struct run *r) {
    const struct qkv_args a = qkv_args(r);
    const struct tensor kv = shape_4d(DT_F32, qkv_pages(r), r->s->hk, BLOCK_LEN, r->s->dim);
    struct tensor dkv[2], dnorm[2];
    for (int i = 0; i < 2; i++) {
        float *f = xcalloc((size_t)tensor_count(kv), sizeof *f);
        cache_rows(r, r->gout[1 + i].f, f, true);
        dkv[i] = up_values(r, kv, false, f, NULL);
        free(f);
        dnorm[i] = r->s->flags & S_NORM ? up_acc(r, shape_1d(DT_F32, r->s->dim), false) : TENSOR_NONE;
    }
    const struct tensor dqkv = dev_new(r, slot_shape(&r->in[0]), true);
    const struct qkv_bwd_args g = {up(r, &r->gout[0]), dkv[0], dkv[1], dqkv, dnorm[0], dnorm[1]};
    TRY(dev_qkv_bwd(r->d, &a, &g));
    down_grad(r, 0, dqkv, TOL_INNER);
    for (int i = 0; i < 2 && dnorm[i].data; i++) down_grad(r, 1 + i, dnorm[i], TOL_INNER);
    return 0;
}

/* ---- attention over packed sequences, one KV block as long as the batch ---- */

/* k: keys that each sequence has before the first of its rows. */
static inline int64_t attn_keys(const struct run *r) {
    int64_t n = r->rows;
    for (int64_t i = 0; i < COUNT(r->s->lens) && r->s->lens[i]; i++) n += r->s->k;
    return n;
}
static inline void attn_setup(struct run *r) {
    const struct op_shape *s = r->s;
    add_in(r, "q", shape_2d(r->act, r->rows, s->hq * s->dim), true, 1.5f, 0);
    add_in(r, "k", shape_4d(r->act, 1, s->hk, attn_keys(r), s->dim), false, 1.5f, 0);
    add_in(r, "v", shape_4d(r->act, 1, s->hk, attn_keys(r), s->dim), false, 1, 0);
    add_gout(r, "dout", shape_2d(r->act, r->rows, s->hq * s->dim), true);
}
static inline struct attn_args attn_args(struct run *r) {
    const struct op_shape *s = r->s;
    int32_t start[COUNT(s->lens) + 1] = {0}, kv_start[COUNT(s->lens)] = {0}, pos0[COUNT(s->lens)] = {0};
    struct attn_args a = {.n_q_heads = s->hq,
                          .n_kv_heads = s->hk,
                          .head_dim = s->dim,
                          .window = s->window,
                          .scale = 1.0f / sqrtf((float)s->dim),
                          .softcap = s->flags & S_SOFTCAP ? 1.5f : 0,
                          .q = up(r, &r->in[0]),
                          .kv = {up(r, &r->in[1]), up(r, &r->in[2])}};
    if (s->flags & S_LATENT) a.kv.v = a.kv.k;
    while (a.seqs.n < COUNT(s->lens) && s->lens[a.seqs.n]) {
        const int64_t n = s->lens[a.seqs.n];
        kv_start[a.seqs.n] = (int32_t)(start[a.seqs.n] + a.seqs.n * s->k);
        pos0[a.seqs.n] = (int32_t)s->k;
        start[a.seqs.n + 1] = (int32_t)(start[a.seqs.n] + n);
        a.seqs.n++;
        if (n > a.seqs.max_q) a.seqs.max_q = n;
        if (n + s->k > a.seqs.max_kv) a.seqs.max_kv = n + s->k;
    }
    CHECK(start[a.seqs.n] == r->rows);
    a.seqs.q_start = up_i32(r, shape_1d(DT_I32, a.seqs.n + 1), start);
    a.seqs.pos0 = up_i32(r, shape_1d(DT_I32, a.seqs.n), pos0);
    a.seqs.kv_start = up_i32(r, shape_1d(DT_I32, a.seqs.n), kv_start);
    a.out = dev_new(r, slot_shape(&r->in[0]), true);
    a.lse = dev_new(r, shape_2d(DT_F32, r->rows, s->hq), true);
    return a;
}
static inline int attn_fwd(struct run *r) {
    const struct attn_args a = attn_args(r);
    TRY(dev_attn_fwd(r->d, &a));
    down(r, "out", a.out, true, TOL_INNER);
    down(r, "lse", a.lse, true, TOL_SUM);
    return 0;
}
static inline int attn_bwd(struct run *r) {
    const struct attn_args a = attn_args(r);
    struct tensor kv = slot_shape(&r->in[1]);
    kv.dt = DT_F32;
    const struct tensor dq = dev_new(r, slot_shape(&r->in[0]), true);
    const struct tensor dk = dev_new(r, kv, false), dv = dev_new(r, kv, false);
    TRY(dev_attn_fwd(r->d, &a));
    TRY(dev_attn_bwd(r->d, &a, up(r, &r->gout[0]), dq, dk, dv));
    /* dq and dk vanish where a query sees one key; what is left there is rounding of terms near 1 */
    down_grad(r, 0, dq, TOL_INNER)->floor = 0.1;
    down_grad(r, 1, dk, TOL_INNER)->floor = 0.1;
    down_grad(r, 2, dv, TOL_INNER);
    return 0;
}

/* ---- LM head ---- */

static inline void lmhead_setup(struct run *r) {
    add_in(r, "x", shape_2d(r->act, r->rows, r->s->k), true, 1, 0);
    add_in(r, "w", shape_2d(r->act, r->s->n, r->s->k), false, 0.3f, 0);
    add_in(r, "inv_temp", shape_1d(DT_F32, r->rows), true, 0.1f, 1);
    add_ids(r, "target", r->s->n, false);
    add_gout(r, "dlogp", shape_1d(DT_F32, r->rows), true);
    if (r->s->flags & S_ENTROPY) add_gout(r, "dentropy", shape_1d(DT_F32, r->rows), true);
}
/* The same with lists; window: their length. */
static inline void lists_setup(struct run *r) {
    const int64_t n = r->s->window, vocab = r->s->n;
    struct rng g = {.seed = 13, .stream = RNG_TEST};
    lmhead_setup(r);
    struct slot *s = slot_new(r->in, &r->n_in, "list_id", shape_2d(DT_I32, r->rows, n), true);
    s->i = xcalloc((size_t)(r->rows * n), sizeof *s->i);
    /* distinct: a prime above the vocabulary apart; every other row lists its target */
    for (int64_t row = 0; row < r->rows; row++) {
        const int64_t start = row % 2 ? (int64_t)rng_below(&g, (uint64_t)vocab) : r->in[3].i[row];
        for (int64_t i = 0; i < n; i++) s->i[row * n + i] = (int32_t)((start + i * 104729) % vocab);
    }
    add_gout(r, "dlist", shape_2d(DT_F32, r->rows, n), true);
}
static inline int lmhead_args(struct run *r, struct lmhead_args *a) {
    const struct tensor shape = shape_1d(DT_F32, r->rows);
    *a = (struct lmhead_args){.x = up(r, &r->in[0]),
                              .inv_temp = up(r, &r->in[2]),
                              .target = up(r, &r->in[3]),
                              .logp = dev_new(r, shape, true),
                              .lse = dev_new(r, shape, true)};
    if (r->s->flags & S_ENTROPY) {
        a->entropy = dev_new(r, shape, true);
        a->sum_pi_sq = dev_new(r, shape, true);
    }
    TRY(up_weight(r, &r->in[1], &a->w));
    if (r->s->flags & S_SOFTCAP) a->w.softcap = 1.5f;
    if (r->n_in > 4) {
        const struct tensor ids = shape_2d(DT_I32, r->rows, r->s->window), logps = shape_2d(DT_F32, r->rows, r->s->window);
        a->list_id = up(r, &r->in[4]);
        a->list_logp = dev_new(r, logps, true);
        a->top_id = dev_new(r, ids, true);
        a->top_logp = dev_new(r, logps, true);
    }
    return dev_lmhead_fwd(r->d, a);
}
static inline int lmhead_fwd(struct run *r) {
    struct lmhead_args a;
    TRY(lmhead_args(r, &a));
    down(r, "logp", a.logp, true, TOL_SUM);
    if (a.entropy.data) down(r, "entropy", a.entropy, true, TOL_SUM);
    down(r, "lse", a.lse, true, TOL_SUM);
    if (a.sum_pi_sq.data) down(r, "sum_pi_sq", a.sum_pi_sq, true, TOL_SUM);
    return 0;
}
/* The results with a gradient first, in the order of gout. */
static inline int lists_fwd(struct run *r) {
    struct lmhead_args a;
    TRY(lmhead_args(r, &a));
    down(r, "logp", a.logp, true, TOL_SUM);
    if (a.entropy.data) down(r, "entropy", a.entropy, true, TOL_SUM);
    down(r, "list_logp", a.list_logp, true, TOL_SUM);
    down(r, "top_logp", a.top_logp, true, TOL_SUM);
    return 0;
}
static inline int lmhead_bwd(struct run *r) {
    struct lmhead_args a;
    TRY(lmhead_args(r, &a));
    const struct tensor dx = dev_new(r, slot_shape(&r->in[0]), true);
    const struct tensor dw = up_acc(r, shape_2d(DT_F32, r->s->n, r->s->k), false);
    const struct tensor dh = a.entropy.data ? up(r, &r->gout[1]) : TENSOR_NONE;
    if (a.list_id.data) a.dlist = up(r, &r->gout[r->n_gout - 1]);
    struct lmhead_bwd_args g = {up(r, &r->gout[0]), dh, dx, dw, true};
    TRY(dev_lmhead_bwd(r->d, &a, &g));
    down_grad(r, 0, dx, TOL_INNER);
    down_grad(r, 1, dw, TOL_INNER);
    g.dw = dev_new(r, shape_2d(DT_F32, r->s->n, r->s->k), false); /* written, whatever was there */
    g.add = false;
    TRY(dev_lmhead_bwd(r->d, &a, &g));
    down(r, "dw alone", g.dw, false, TOL_INNER);
    return 0;
}

static inline int logits_fwd(struct run *r) { /* inputs of lmhead */
    struct weight w;
    const struct tensor z = dev_new(r, shape_2d(DT_F32, r->rows, r->s->n), true);
    TRY(up_weight(r, &r->in[1], &w));
    if (r->s->flags & S_SOFTCAP) w.softcap = 1.5f;
    TRY(dev_logits(r->d, z, up(r, &r->in[0]), w));
    down(r, "logits", z, true, TOL_SUM);
    return 0;
}

/* ---- shapes ---- */

static const struct op_shape shapes_rows[] = {
    /* n columns */
    {.rows = 1, .n = 1},    {.rows = 1, .n = 64},   {.rows = 7, .n = 17},    {.rows = 17, .n = 33},
    {.rows = 33, .n = 100}, {.rows = 65, .n = 896}, {.rows = 100, .n = 129}, {.rows = 129, .n = 48, .flags = S_F32},
};
static const struct op_shape shapes_norm[] = {
    /* n columns, k the kind */
    {.rows = 1, .n = 1},
    {.rows = 1, .n = 64},
    {.rows = 7, .n = 17},
    {.rows = 17, .n = 33},
    {.rows = 33, .n = 100},
    {.rows = 65, .n = 896},
    {.rows = 100, .n = 129},
    {.rows = 129, .n = 48, .flags = S_F32},
    {.rows = 17, .n = 33, .k = NORM_SCALE_CAST},
    {.rows = 65, .n = 896, .k = NORM_SCALE_CAST},
    {.rows = 17, .n = 33, .k = NORM_ONE_PLUS},
    {.rows = 65, .n = 896, .k = NORM_ONE_PLUS},
};
static const struct op_shape shapes_qk_norm[] = {
    {.rows = 1, .n = 8, .k = 8},
    {.rows = 7, .n = 34, .k = 6, .hq = NORM_SCALE_CAST},
    {.rows = 65, .n = 896, .k = 128, .hq = NORM_SCALE_CAST},
    {.rows = 100, .n = 129, .k = 43},
    {.rows = 33, .n = 64, .k = 64, .hq = NORM_ONE_PLUS},
};
static const struct op_shape shapes_rope_norm[] = {
    {.rows = 1, .hq = 1, .hk = 1, .dim = 8},
    {.rows = 7, .hq = 3, .hk = 1, .dim = 18},
    {.rows = 65, .hq = 4, .hk = 2, .dim = 128},
    {.rows = 40, .hq = 2, .hk = 2, .dim = 64, .n = NORM_ONE_PLUS},
    {.rows = 3, .hq = 2, .hk = 1, .dim = 256, .n = NORM_SCALE_CAST},
};
static const struct op_shape shapes_table[] = {
    /* a table of n rows, k columns */
    {.rows = 1, .n = 1, .k = 16},
    {.rows = 7, .n = 50, .k = 33},
    {.rows = 33, .n = 257, .k = 80},
    {.rows = 129, .n = 150, .k = 17},
    {.rows = 65, .n = 70, .k = 64, .flags = S_F32},
};
static const struct op_shape shapes_matmul[] = {
    {.rows = 1, .n = 1, .k = 1},
    {.rows = 1, .n = 100, .k = 64},
    {.rows = 1, .n = 257, .k = 130},
    {.rows = 7, .n = 33, .k = 17, .flags = S_BIAS},
    {.rows = 17, .n = 48, .k = 80, .flags = S_F32},
    {.rows = 33, .n = 100, .k = 129, .flags = S_ADD},
    {.rows = 65, .n = 130, .k = 257, .flags = S_BIAS},
    {.rows = 100, .n = 65, .k = 33, .flags = S_F32 | S_BIAS},
    {.rows = 129, .n = 64, .k = 96},
    {.rows = 129, .n = 31, .k = 2, .flags = S_ADD | S_BIAS},
    {.rows = 16, .n = 32, .k = 64},
    {.rows = 5, .n = 40, .k = 4864},
    {.rows = 3, .n = 4864, .k = 40},
};
static const struct op_shape shapes_qkv[] = {
    {.rows = 1, .hq = 1, .hk = 1, .dim = 16},
    {.rows = 7, .hq = 2, .hk = 1, .dim = 32, .flags = S_NORM},
    {.rows = 17, .hq = 14, .hk = 2, .dim = 64},
    {.rows = 33, .hq = 4, .hk = 4, .dim = 80, .flags = S_NORM},
    {.rows = 65, .hq = 2, .hk = 1, .dim = 128, .flags = S_NORM},
    {.rows = 100, .hq = 7, .hk = 1, .dim = 64},
    {.rows = 129, .hq = 2, .hk = 2, .dim = 80},
    {.rows = 33, .hq = 2, .hk = 1, .dim = 64, .flags = S_NORM | S_ONE_PLUS},
    {.rows = 9, .hq = 2, .hk = 1, .dim = 18, .flags = S_NORM | S_ONE_PLUS},
    {.rows = 9, .hq = 2, .hk = 1, .dim = 64, .flags = S_PARTIAL},
    {.rows = 17, .hq = 3, .hk = 1, .dim = 24, .flags = S_PARTIAL | S_NORM},
    {.rows = 17, .hq = 2, .hk = 1, .dim = 64, .flags = S_PARTIAL | S_NORM | S_ONE_PLUS},
    {.rows = 9, .hq = 2, .hk = 1, .dim = 64, .flags = S_PARTIAL | S_PAIRS},
    {.rows = 33, .hq = 2, .hk = 2, .dim = 32, .flags = S_PAIRS | S_NORM},
    {.rows = 18, .hq = 2, .hk = 1, .dim = 12, .flags = S_PARTIAL | S_PAIRS | S_NORM},
};
static const struct op_shape shapes_latent[] = {
    {.rows = 70, .hq = 3, .hk = 1, .dim = 576, .lens = {3, 67}, .flags = S_LATENT},
    {.rows = 45, .hq = 16, .hk = 1, .dim = 264, .window = 20, .lens = {44, 1}, .flags = S_LATENT},
    {.rows = 23, .hq = 3, .hk = 1, .dim = 576, .lens = {20, 3}, .k = 41, .flags = S_LATENT},
    {.rows = 33, .hq = 16, .hk = 1, .dim = 264, .window = 20, .lens = {30, 3}, .k = 37, .flags = S_LATENT},
};
static const struct op_shape shapes_attn[] = {
    {.rows = 1, .hq = 1, .hk = 1, .dim = 16, .lens = {1}},
    {.rows = 7, .hq = 2, .hk = 1, .dim = 32, .lens = {7}},
    {.rows = 17, .hq = 7, .hk = 1, .dim = 64, .lens = {17}},
    {.rows = 19, .hq = 2, .hk = 1, .dim = 24, .lens = {12, 7}, .k = 70, .flags = S_LATENT},
    {.rows = 33, .hq = 14, .hk = 2, .dim = 64, .lens = {33}},
    {.rows = 65, .hq = 2, .hk = 2, .dim = 80, .lens = {65}},
    {.rows = 100, .hq = 2, .hk = 1, .dim = 128, .lens = {100}},
    {.rows = 129, .hq = 4, .hk = 2, .dim = 64, .lens = {129}},
    {.rows = 58, .hq = 4, .hk = 2, .dim = 32, .lens = {1, 7, 17, 33}},
    {.rows = 193, .hq = 2, .hk = 1, .dim = 64, .lens = {65, 1, 64, 63}},
    {.rows = 100, .hq = 2, .hk = 1, .dim = 64, .window = 1, .lens = {33, 67}},
    {.rows = 129, .hq = 2, .hk = 1, .dim = 16, .window = 5, .lens = {129}},
    {.rows = 200, .hq = 2, .hk = 2, .dim = 64, .window = 64, .lens = {129, 71}},
    {.rows = 200, .hq = 7, .hk = 1, .dim = 32, .window = 70, .lens = {200}},
    {.rows = 96, .hq = 3, .hk = 1, .dim = 96, .lens = {90, 6}},
    {.rows = 290, .hq = 3, .hk = 1, .dim = 64, .window = 100, .lens = {1, 226, 63}},
    {.rows = 205, .hq = 4, .hk = 2, .dim = 128, .window = 70, .lens = {140, 65}},
    {.rows = 260, .hq = 2, .hk = 2, .dim = 128, .lens = {192, 68}},
    {.rows = 80, .hq = 2, .hk = 1, .dim = 192, .window = 33, .lens = {80}},
    {.rows = 70, .hq = 1, .hk = 1, .dim = 256, .lens = {3, 67}},
    {.rows = 209, .hq = 8, .hk = 2, .dim = 256, .lens = {1, 143, 65}},
    {.rows = 205, .hq = 3, .hk = 1, .dim = 256, .window = 70, .lens = {140, 65}},
    {.rows = 40, .hq = 2, .hk = 1, .dim = 18, .window = 20, .lens = {40}},
    {.rows = 100, .hq = 2, .hk = 1, .dim = 64, .lens = {33, 67}, .flags = S_SOFTCAP},
    {.rows = 140, .hq = 4, .hk = 2, .dim = 256, .window = 30, .lens = {1, 139}, .flags = S_SOFTCAP},
    {.rows = 40, .hq = 2, .hk = 1, .dim = 18, .lens = {40}, .flags = S_SOFTCAP},
};
static const struct op_shape shapes_head[] = {
    /* n: vocabulary, k: hidden */
    {.rows = 1, .n = 2, .k = 16, .flags = S_ENTROPY},
    {.rows = 7, .n = 300, .k = 33},
    {.rows = 33, .n = 1000, .k = 64, .flags = S_ENTROPY},
    {.rows = 129, .n = 257, .k = 48, .flags = S_ENTROPY},
    {.rows = 1, .n = 4096, .k = 64},
    {.rows = 17, .n = 4097, .k = 17, .flags = S_ENTROPY},
    {.rows = 5, .n = 8192 + 300, .k = 32, .flags = S_ENTROPY},
    {.rows = 65, .n = 5000, .k = 16},
    {.rows = 33, .n = 4300, .k = 64, .flags = S_ENTROPY | S_SOFTCAP},
    {.rows = 1030, .n = 24, .k = 16, .flags = S_ENTROPY}, /* more than a backend may take at a time */
};

static const struct op_shape shapes_join[] = {
    /* k: what the columns of a rank are a multiple of */
    {.rows = 1, .n = 24, .k = 8},
    {.rows = 7, .n = 2, .k = 1},
    {.rows = 33, .n = 300, .k = 4, .flags = S_F32},
    {.rows = 5, .n = 4096, .k = 64},
    {.rows = 65, .n = 4096, .k = 64, .flags = S_F32},
};
static const struct op_shape shapes_columns[] = {
    {.rows = 1, .n = 2, .k = 1},
    {.rows = 7, .n = 300, .k = 5, .window = 3},
    {.rows = 5, .n = 8, .k = 4, .window = 4}, /* none */
    {.rows = 65, .n = 4096, .k = 64, .window = 128},
};
static const struct op_shape shapes_lists[] = {
    /* window: entries of a list */
    {.rows = 1, .n = 2, .k = 16, .window = 2, .flags = S_ENTROPY},
    {.rows = 7, .n = 300, .k = 33, .window = 1},
    {.rows = 33, .n = 1000, .k = 64, .window = 32, .flags = S_ENTROPY},
    {.rows = 9, .n = 24, .k = 16, .window = 24},
    {.rows = 17, .n = 4097, .k = 17, .window = 300, .flags = S_ENTROPY},
    {.rows = 5, .n = 8192 + 300, .k = 32, .window = 129},
    {.rows = 3, .n = 20000, .k = 16, .window = 1024},
    {.rows = 9, .n = 300, .k = 16, .window = 7, .flags = S_ENTROPY | S_SOFTCAP},
    {.rows = 1030, .n = 24, .k = 16, .window = 5, .flags = S_ENTROPY},
};

#define SHAPES(list) .shapes = (list), .n_shapes = COUNT(list)
static const struct op_def ops_table[] = {
    {"cast", cast_setup, cast_fwd, NULL, SHAPES(shapes_rows), true},
    {"weight", weight_setup, weight_fwd, NULL, SHAPES(shapes_matmul), false},
    {"embed", embed_setup, embed_fwd, embed_bwd, SHAPES(shapes_table), true},
    {"gather", gather_setup, gather_fwd, gather_bwd, SHAPES(shapes_table), true},
    {"scale_rows", scale_setup, scale_fwd, NULL, SHAPES(shapes_table), true},
    {"join_columns", join_setup, join_fwd, NULL, SHAPES(shapes_join), false},
    {"copy_columns", copy_columns_setup, copy_columns_fwd, NULL, SHAPES(shapes_columns), true},
    {"copy_rows", copy_rows_setup, copy_rows_fwd, NULL, SHAPES(shapes_table), true},
    {"rmsnorm", rmsnorm_setup, rmsnorm_fwd, rmsnorm_bwd, SHAPES(shapes_norm), true},
    {"qk_norm", qk_norm_setup, qk_norm_fwd, qk_norm_bwd, SHAPES(shapes_qk_norm), true},
    {"rope_norm", rope_norm_setup, rope_norm_fwd, rope_norm_bwd, SHAPES(shapes_rope_norm), true},
    {"matmul", matmul_setup, matmul_fwd, matmul_bwd, SHAPES(shapes_matmul), true},
    {"matmul swiglu", mlp_setup, mlp_fwd, NULL, SHAPES(shapes_matmul), true},
    {"swiglu", swiglu_setup, swiglu_fwd, swiglu_bwd, SHAPES(shapes_rows), true},
    {"geglu", swiglu_setup, geglu_fwd, geglu_bwd, SHAPES(shapes_rows), true},
    {"qkv", qkv_setup, qkv_fwd, qkv_bwd, SHAPES(shapes_qkv), true},
    {"attn", attn_setup, attn_fwd, attn_bwd, SHAPES(shapes_attn), false},
    {"latent attn", attn_setup, attn_fwd, attn_bwd, SHAPES(shapes_latent), false},
    {"conv", conv_setup, conv_fwd, conv_bwd, SHAPES(shapes_conv), false},
    {"delta", delta_setup, delta_fwd, delta_bwd, SHAPES(shapes_delta), false},
    {"gated norm", gated_norm_setup, gated_norm_fwd, gated_norm_bwd, SHAPES(shapes_gated_norm), true},
    {"output gate", gate_setup, gate_fwd, gate_bwd, SHAPES(shapes_rows), true},
    {"gate split", split_setup, split_fwd, split_bwd, SHAPES(shapes_split), true},
    {"lmhead", lmhead_setup, lmhead_fwd, lmhead_bwd, SHAPES(shapes_head), true},
    {"lmhead lists", lists_setup, lists_fwd, lmhead_bwd, SHAPES(shapes_lists), true},
    {"route", route_setup, route_fwd, route_bwd, SHAPES(shapes_route), true},
    {"score route", score_route_setup, score_route_fwd, score_route_bwd, SHAPES(shapes_score_route), true},
    {"balance", balance_setup, balance_fwd, balance_bwd, SHAPES(shapes_route), true},
    {"router losses", router_losses_setup, router_losses_fwd, router_losses_bwd, SHAPES(shapes_router_losses), true},
    {"experts", experts_setup, experts_fwd, experts_bwd, SHAPES(shapes_experts), true},
    {"expert bias", expert_bias_setup, expert_bias_fwd, expert_bias_bwd, SHAPES(shapes_expert_bias), false},
    {"clamped swiglu", clamped_setup, clamped_fwd, clamped_bwd, SHAPES(shapes_rows), true},
    {"sink", sink_setup, sink_fwd, sink_bwd, SHAPES(shapes_sink), true},
    {"mla", mla_setup, mla_fwd, mla_bwd, SHAPES(shapes_mla), true},
    {"heads", heads_setup, heads_fwd, heads_bwd, SHAPES(shapes_heads), true},
    {"row gate", row_gate_setup, row_gate_fwd, row_gate_bwd, SHAPES(shapes_rows), true},
    {"logits", lmhead_setup, logits_fwd, NULL, SHAPES(shapes_head), true},
};
#define N_OPS COUNT(ops_table)

#endif
