/* ops_delta_net.h - the ops of a gated delta net layer, described for the harness as in ops_table.h. Sequences start at
 * their first token; those that go on from a state are test_device_delta_net's. */
#ifndef VERLC_OPS_DELTA_NET_H
#define VERLC_OPS_DELTA_NET_H

#include "ops/ops_test.h"

/* The packed sequences of a shape. */
static inline struct row_seqs row_seqs(struct run *r) {
    const struct op_shape *s = r->s;
    int32_t start[COUNT(s->lens) + 1] = {0}, zero[COUNT(s->lens)] = {0};
    struct row_seqs q = {0};
    while (q.n < COUNT(s->lens) && s->lens[q.n]) {
        start[q.n + 1] = (int32_t)(start[q.n] + s->lens[q.n]);
        if (s->lens[q.n] > q.max_rows) q.max_rows = s->lens[q.n];
        q.n++;
    }
    CHECK(start[q.n] == r->rows);
    q.start = up_i32(r, shape_1d(DT_I32, q.n + 1), start);
    q.pos0 = up_i32(r, shape_1d(DT_I32, q.n), zero);
    return q;
}

/* A matrix's columns among others, which are NaN: from column `at` on in rows of `width`. */
static inline struct tensor up_columns(struct run *r, const struct slot *s, int64_t at, int64_t width) {
    const int64_t rows = s->dim[0], n = s->dim[1];
    float *f = xmalloc((size_t)(rows * width) * sizeof *f);
    for (int64_t i = 0; i < rows * width; i++) {
        const int64_t c = i % width - at;
        f[i] = c >= 0 && c < n ? s->f[i / width * n + c] : NAN;
    }
    const struct tensor t = up_values(r, shape_2d(s->dt, rows, width), s->per_row, f, NULL);
    free(f);
    return t;
}
/* Room for such columns of a result, and them alone once they are there; nothing else may have been written. */
static inline struct tensor new_columns(struct run *r, const struct slot *s, int64_t width) {
    return dev_new(r, shape_2d(s->dt, s->dim[0], width), s->per_row);
}
static inline struct tensor own_columns(struct run *r, const struct slot *s, int64_t at, struct tensor wide) {
    const int64_t rows = s->dim[0], n = s->dim[1], width = wide.dim[1];
    float *all = down_values(r, wide), *f = xmalloc((size_t)(rows * n) * sizeof *f);
    for (int64_t i = 0; i < rows * width; i++) {
        const int64_t c = i % width - at;
        if (c >= 0 && c < n) f[i / width * n + c] = all[i];
        else if (!isnan(all[i]))
            fail_msg("%s: column %lld of row %lld is not its own", s->name, (long long)(i % width), (long long)(i / width));
    }
    const struct tensor t = up_values(r, slot_shape(s), s->per_row, f, NULL);
    free(all);
    free(f);
    return t;
}

/* ---- causal convolution: n columns, k others before and behind ---- */

static inline void conv_setup(struct run *r) {
    add_in(r, "x", shape_2d(r->act, r->rows, r->s->n), true, 1.5f, 0);
    add_in(r, "w", shape_2d(r->act, r->s->n, DEV_CONV_TAPS), false, 0.5f, 0);
    add_gout(r, "dy", shape_2d(r->act, r->rows, r->s->n), true);
}
static inline struct causal_conv_args conv_args(struct run *r) {
    return (struct causal_conv_args){.seqs = row_seqs(r),
                                     .x = up_columns(r, &r->in[0], r->s->k, r->s->n + 2 * r->s->k),
                                     .x_at = r->s->k,
                                     .w = up(r, &r->in[1]),
                                     .y = dev_new(r, slot_shape(&r->in[0]), true)};
}
static inline int conv_fwd(struct run *r) {
    const struct causal_conv_args a = conv_args(r);
    TRY(dev_causal_conv_fwd(r->d, &a));
    down(r, "y", a.y, true, TOL_INNER); /* bf16: the sum is rounded before SiLU */
    return 0;
}
static inline int conv_bwd(struct run *r) {
    const struct causal_conv_args a = conv_args(r);
    const struct causal_conv_bwd_args g = {up(r, &r->gout[0]), new_columns(r, &r->in[0], a.x.dim[1]),
                                           up_acc(r, shape_2d(DT_F32, r->s->n, DEV_CONV_TAPS), false)};
    TRY(dev_causal_conv_bwd(r->d, &a, &g));
    down_grad(r, 0, own_columns(r, &r->in[0], a.x_at, g.dx), TOL_INNER);
    down_grad(r, 1, g.dw, TOL_INNER);
    return 0;
}

/* ---- gated delta rule: hk key heads of dim, hq value heads of k; n other columns before and behind b and a ---- */

static inline void delta_setup(struct run *r) {
    const struct op_shape *s = r->s;
    add_in(r, "qkv", shape_2d(r->act, r->rows, 2 * s->hk * s->dim + s->hq * s->k), true, 1, 0.1f);
    add_in(r, "ba", shape_2d(r->act, r->rows, 2 * s->hq), true, 1, -0.5f);
    add_in(r, "a_log", shape_1d(r->act, s->hq), false, 0.5f, 0);
    add_in(r, "dt_bias", shape_1d(r->act, s->hq), false, 0.5f, -0.5f);
    add_gout(r, "dout", shape_2d(r->act, r->rows, s->hq * s->k), true);
}
static inline struct delta_args delta_args(struct run *r) {
    const struct op_shape *s = r->s;
    struct delta_args a = {.n_k_heads = s->hk,
                           .n_v_heads = s->hq,
                           .k_dim = s->dim,
                           .v_dim = s->k,
                           .seqs = row_seqs(r),
                           .qkv = up(r, &r->in[0]),
                           .ba = up_columns(r, &r->in[1], s->n, 2 * (s->hq + s->n)),
                           .ba_at = s->n,
                           .a_log = up(r, &r->in[2]),
                           .dt_bias = up(r, &r->in[3]),
                           .out = dev_new(r, shape_2d(r->act, r->rows, s->hq * s->k), true)};
    a.states = dev_new(r, shape_4d(DT_F32, r->rows / DEV_DELTA_CHUNK + 1, s->hq, s->dim, s->k), false);
    a.e = dev_new(r, shape_2d(DT_F32, r->rows, s->hq * s->k), true);
    return a;
}
static inline int delta_fwd(struct run *r) {
    struct delta_args a = delta_args(r);
    TRY(dev_delta_fwd(r->d, &a));
    /* bf16: beta is rounded; q.k may cancel, and what is left is rounding of terms near |v| / sqrt(Dk) */
    down(r, "out", a.out, true, TOL_INNER)->floor = 0.1;
    down(r, "e", a.e, true, TOL_INNER);
    float *kept = down_values(r, a.out);
    a.states = a.e = TENSOR_NONE; /* what is kept changes no bit */
    TRY(dev_delta_fwd(r->d, &a));
    float *alone = down_values(r, a.out);
    const int64_t at = first_diff(kept, alone, tensor_count(a.out));
    free(kept);
    free(alone);
    if (at >= 0) fail_msg("delta: element %lld of out depends on what is kept", (long long)at);
    return 0;
}
static inline int delta_bwd(struct run *r) {
    const struct delta_args a = delta_args(r);
    const struct delta_bwd_args g = {up(r, &r->gout[0]), dev_new(r, slot_shape(&r->in[0]), true),
                                     new_columns(r, &r->in[1], a.ba.dim[1]), up_acc(r, shape_1d(DT_F32, r->s->hq), false),
                                     up_acc(r, shape_1d(DT_F32, r->s->hq), false)};
    TRY(dev_delta_fwd(r->d, &a));
    TRY(dev_delta_bwd(r->d, &a, &g));
    down_grad(r, 0, g.dqkv, TOL_INNER);
    /* the gates' vanish where no state is before the row; what is left there is rounding of terms near |dout| |v| beta */
    down_grad(r, 1, own_columns(r, &r->in[1], a.ba_at, g.dba), TOL_INNER)->floor = 0.1;
    down_grad(r, 2, g.da_log, TOL_INNER)->floor = 0.1;
    down_grad(r, 3, g.ddt_bias, TOL_INNER)->floor = 0.1;
    return 0;
}

/* ---- gated norm, output gate: n columns; z: k others before and behind those of hq heads, or of one, in a row ---- */

static inline void gated_norm_setup(struct run *r) {
    add_in(r, "x", shape_2d(r->act, r->rows, r->s->n), true, 0.5f, 0.1f);
    add_in(r, "z", shape_2d(r->act, r->rows, r->s->n), true, 2, 0);
    add_in(r, "w", shape_1d(r->act, r->s->n), false, 0.2f, 1);
    add_gout(r, "dy", shape_2d(r->act, r->rows, r->s->n), true);
}
/* z as rows of all heads. */
static inline struct slot gated_norm_z(const struct run *r) {
    const struct op_shape *const s = r->s;
    const int64_t heads = s->hq && r->rows % s->hq == 0 ? s->hq : 1; /* a part of the rows may be none of whole tokens */
    struct slot z = r->in[1];
    z.dim[0] = r->rows / heads, z.dim[1] = s->n * heads;
    return z;
}
static inline struct gated_norm_args gated_norm_args(struct run *r) {
    const struct slot z = gated_norm_z(r);
    return (struct gated_norm_args){.x = up(r, &r->in[0]),
                                    .z = up_columns(r, &z, r->s->k, z.dim[1] + 2 * r->s->k),
                                    .z_at = r->s->k,
                                    .y = dev_new(r, slot_shape(&r->in[0]), true),
                                    .w = up(r, &r->in[2]),
                                    .rstd = dev_new(r, shape_1d(DT_F32, r->rows), true),
                                    .eps = 1e-6f};
}
static inline int gated_norm_fwd(struct run *r) {
    const struct gated_norm_args a = gated_norm_args(r);
    TRY(dev_gated_norm_fwd(r->d, &a));
    down(r, "y", a.y, true, TOL_INNER); /* bf16: two roundings before the gate */
    down(r, "rstd", a.rstd, true, TOL_SUM);
    return 0;
}
static inline int gated_norm_bwd(struct run *r) {
    const struct gated_norm_args a = gated_norm_args(r);
    const struct slot z = gated_norm_z(r);
    const struct gated_norm_bwd_args g = {up(r, &r->gout[0]), dev_new(r, slot_shape(&r->in[0]), true),
                                          new_columns(r, &z, a.z.dim[1]), up_acc(r, shape_1d(DT_F32, r->s->n), false)};
    TRY(dev_gated_norm_fwd(r->d, &a));
    TRY(dev_gated_norm_bwd(r->d, &a, &g));
    down_grad(r, 0, g.dx, TOL_SUM)->floor = 0.1; /* a row of one column has no gradient, only rounding */
    struct tensor dz = own_columns(r, &z, a.z_at, g.dz);
    dz.dim[0] = r->rows, dz.dim[1] = r->s->n;
    down_grad(r, 1, dz, TOL_SUM);
    down_grad(r, 2, g.dw, TOL_SUM);
    return 0;
}

static inline void gate_setup(struct run *r) {
    add_in(r, "x", shape_2d(r->act, r->rows, r->s->n), true, 1, 0);
    add_in(r, "gate", shape_2d(r->act, r->rows, r->s->n), true, 2, 0);
    add_gout(r, "dy", shape_2d(r->act, r->rows, r->s->n), true);
}
static inline int gate_fwd(struct run *r) {
    const struct tensor x = up(r, &r->in[0]);
    TRY(dev_output_gate_fwd(r->d, x, x, up(r, &r->in[1])));
    down(r, "y", x, true, TOL_INNER); /* bf16: the sigmoid is rounded */
    return 0;
}
static inline int gate_bwd(struct run *r) {
    const struct output_gate_bwd_args a = {up(r, &r->gout[0]), up(r, &r->in[0]), up(r, &r->in[1]),
                                           dev_new(r, slot_shape(&r->in[0]), true), dev_new(r, slot_shape(&r->in[0]), true)};
    TRY(dev_output_gate_bwd(r->d, &a));
    down_grad(r, 0, a.dx, TOL_SUM);
    down_grad(r, 1, a.dgate, TOL_SUM);
    return 0;
}

/* hq heads of dim columns with gates from column `window` on, k other columns; with n of parts of dim, dim, n and n columns; with
 * hk of dim and dim, without a gate of their own. */
static inline struct gate_split_args split_args(const struct run *r) {
    const struct op_shape *const s = r->s;
    if (s->n)
        return (struct gate_split_args){.n_heads = s->hq, .n_parts = 4, .width = {s->dim, s->dim, s->n, s->n}, .at = s->window};
    return (struct gate_split_args){.n_heads = s->hq, .n_parts = 2, .width = {s->dim, s->dim}, .at = s->window};
}
static inline void split_setup(struct run *r) {
    const struct gate_split_args a = split_args(r);
    const int64_t gate = r->s->hk ? 0 : a.n_heads * a.width[a.n_parts - 1];
    int64_t cols = a.at + r->s->k;
    for (int64_t p = 0; p < a.n_parts; p++) cols += a.n_heads * a.width[p];
    add_in(r, "joint", shape_2d(r->act, r->rows, cols), true, 1, 0);
    add_gout(r, "drest", shape_2d(r->act, r->rows, cols - gate), true);
    if (gate) add_gout(r, "dgate", shape_2d(r->act, r->rows, gate), true);
}
static inline int split_fwd(struct run *r) {
    struct gate_split_args a = split_args(r);
    a.joint = up(r, &r->in[0]);
    a.rest = dev_new(r, slot_shape(&r->gout[0]), true);
    if (!r->s->hk) a.gate = dev_new(r, slot_shape(&r->gout[1]), true);
    TRY(dev_gate_split(r->d, &a));
    down(r, "rest", a.rest, true, TOL_EXACT);
    if (!r->s->hk) down(r, "gate", a.gate, true, TOL_EXACT);
    return 0;
}
static inline int split_bwd(struct run *r) {
    struct gate_split_args a = split_args(r);
    a.joint = dev_new(r, slot_shape(&r->in[0]), true);
    a.rest = up(r, &r->gout[0]);
    if (!r->s->hk) a.gate = up(r, &r->gout[1]);
    TRY(dev_gate_join(r->d, &a));
    down_grad(r, 0, a.joint, TOL_EXACT);
    return 0;
}

static const struct op_shape shapes_split[] = {
    {.rows = 1, .hq = 1, .dim = 1, .k = 1},
    {.rows = 7, .hq = 3, .dim = 5, .k = 0},
    {.rows = 33, .hq = 4, .dim = 16, .k = 32},
    {.rows = 20, .hq = 2, .dim = 256, .k = 256},
    {.rows = 9, .hq = 2, .dim = 16, .n = 48},
    {.rows = 5, .hq = 3, .dim = 7, .n = 2, .k = 3},
    {.rows = 6, .hq = 4, .dim = 3, .hk = 1},
    {.rows = 8, .hq = 3, .dim = 8, .hk = 1, .window = 16},
    {.rows = 6, .hq = 4, .dim = 3, .window = 5, .k = 2},
};
static const struct op_shape shapes_gated_norm[] = {
    {.rows = 1, .n = 1},
    {.rows = 7, .n = 17},
    {.rows = 130, .n = 128},
    {.rows = 24, .n = 64, .k = 16, .hq = 4},
    {.rows = 33, .n = 40, .k = 3, .hq = 3},
};
static const struct op_shape shapes_conv[] = {
    {.rows = 1, .n = 1, .lens = {1}},
    {.rows = 7, .n = 17, .lens = {7}},
    {.rows = 58, .n = 33, .k = 3, .lens = {1, 7, 17, 2, 31}},
    {.rows = 200, .n = 100, .lens = {63, 1, 136}},
    {.rows = 129, .n = 1040, .lens = {3, 126}},
    {.rows = 70, .n = 64, .k = 8, .lens = {3, 67}},
};
static const struct op_shape shapes_delta[] = {
    {.rows = 1, .hk = 1, .hq = 1, .dim = 16, .k = 16, .lens = {1}},
    {.rows = 7, .hk = 1, .hq = 2, .dim = 32, .k = 16, .lens = {7}},
    {.rows = 65, .hk = 2, .hq = 2, .dim = 16, .k = 48, .n = 5, .lens = {65}},
    {.rows = 128, .hk = 1, .hq = 1, .dim = 64, .k = 64, .lens = {128}},
    {.rows = 210, .hk = 2, .hq = 4, .dim = 32, .k = 32, .lens = {1, 64, 130, 15}},
    {.rows = 150, .hk = 1, .hq = 3, .dim = 128, .k = 128, .lens = {139, 11}},
};

#endif
