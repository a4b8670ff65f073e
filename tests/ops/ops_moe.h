/* ops_moe.h - mixture of experts for the harness: the router, and the experts of a layer from tokens to their combination.
 *
 * A case has `rows` tokens, `n` outputs and `k` inputs of an expert, `hq` experts of which a token has `hk`. */
#ifndef VERLC_OPS_MOE_H
#define VERLC_OPS_MOE_H

#include "ops/ops_test.h"

/* ---- router ---- */

static inline void route_setup(struct run *r) {
    add_in(r, "logits", shape_2d(r->act, r->rows, r->s->hq), true, 1.5f, 0);
    add_gout(r, "dweight", shape_2d(DT_F32, r->rows, r->s->hk), true);
}
static inline struct route_args route_args(struct run *r) {
    return (struct route_args){.logits = up(r, &r->in[0]),
                               .expert = dev_new(r, shape_2d(DT_I32, r->rows, r->s->hk), true),
                               .weight = dev_new(r, shape_2d(DT_F32, r->rows, r->s->hk), true),
                               .normalize = r->s->flags & S_NORM};
}
static inline int route_fwd(struct run *r) {
    struct route_args a = route_args(r);
    TRY(dev_route_fwd(r->d, &a));
    down(r, "weight", a.weight, true, TOL_SUM);
    down(r, "expert", a.expert, true, TOL_EXACT);
    a.weight = dev_new(r, shape_2d(r->act, r->rows, r->s->hk), true);
    TRY(dev_route_fwd(r->d, &a));
    down(r, "weight in act", a.weight, true, TOL_SUM);
    return 0;
}
static inline int route_bwd(struct run *r) {
    const struct route_args a = route_args(r);
    const struct tensor wide = dev_new(r, shape_2d(DT_F32, r->rows, r->s->hq), true), dz = dev_new(r, slot_shape(&r->in[0]), true);
    TRY(dev_route_fwd(r->d, &a));
    TRY(dev_route_bwd(r->d, &a, wide, up(r, &r->gout[0])));
    TRY(dev_route_bwd(r->d, &a, dz, up(r, &r->gout[0])));
    down_grad(r, 0, dz, TOL_SUM)->floor = 0.01; /* one choice, normalised: no gradient, only rounding */
    down(r, "dlogits in f32", wide, true, TOL_SUM)->floor = 0.01;
    return 0;
}

/* ---- router by scores: S_SOFTCAP sigmoids, n groups of which k are kept ---- */

static inline void score_route_setup(struct run *r) {
    route_setup(r);
    add_in(r, "bias", shape_1d(DT_F32, r->s->hq), false, 0.2f, 0);
}
static inline struct route_args score_route_args(struct run *r) {
    struct route_args a = route_args(r);
    a.sigmoid = r->s->flags & S_SOFTCAP;
    if (r->s->flags & S_ADD) a.bias = up(r, &r->in[1]);
    a.groups = r->s->n;
    a.top_groups = r->s->k;
    a.scale = 2.5f;
    return a;
}
static inline int score_route_fwd(struct run *r) {
    const struct route_args a = score_route_args(r);
    TRY(dev_route_fwd(r->d, &a));
    down(r, "weight", a.weight, true, TOL_SUM);
    down(r, "expert", a.expert, true, TOL_EXACT);
    return 0;
}
static inline int score_route_bwd(struct run *r) {
    const struct route_args a = score_route_args(r);
    const struct tensor dz = dev_new(r, slot_shape(&r->in[0]), true);
    TRY(dev_route_fwd(r->d, &a));
    TRY(dev_route_bwd(r->d, &a, dz, up(r, &r->gout[0])));
    down_grad(r, 0, dz, TOL_SUM)->floor = 0.01;
    return 0;
}

/* ---- load-balancing loss: its value of each token is the result whose gradient is dlogits ---- */

static inline void balance_setup(struct run *r) {
    add_in(r, "logits", shape_2d(r->act, r->rows, r->s->hq), true, 1.5f, 0);
    add_in(r, "load", shape_1d(DT_F32, r->s->hq), false, 1, 0);
    add_gout(r, "dloss", shape_1d(DT_F32, r->rows), true);
    for (int64_t t = 0; t < r->rows; t++) r->gout[0].f[t] = 1; /* the op's own: the loss is a sum */
}
static inline struct balance_args balance_args(struct run *r, enum dtype dt, bool from) {
    const struct slot *z = &r->in[0];
    return (struct balance_args){.logits = up(r, z),
                                 .load = up(r, &r->in[1]),
                                 .dlogits = from ? up(r, z) : dev_new(r, shape_2d(dt, r->rows, r->s->hq), true),
                                 .loss = dev_new(r, shape_1d(DT_F32, r->rows), true)};
}
static inline int balance_fwd(struct run *r) {
    const struct balance_args a = balance_args(r, DT_F32, false);
    TRY(dev_balance_bwd(r->d, &a));
    down(r, "loss", a.loss, true, TOL_SUM);
    return 0;
}
static inline int balance_bwd(struct run *r) {
    const struct balance_args a = balance_args(r, r->act, false), onto = balance_args(r, r->act, true);
    TRY(dev_zero(r->d, a.dlogits.data, (size_t)tensor_count(a.dlogits) * dtype_size(a.dlogits.dt)));
    TRY(dev_balance_bwd(r->d, &a));
    TRY(dev_balance_bwd(r->d, &onto));
    down_grad(r, 0, a.dlogits, TOL_SUM)->floor = 0.01;
    down(r, "onto", onto.dlogits, true, TOL_SUM);
    return 0;
}

/* The same of softmax or sigmoids (S_SOFTCAP), with a z-loss, which is a second result. */
static inline void router_losses_setup(struct run *r) {
    balance_setup(r);
    add_gout(r, "dz_loss", shape_1d(DT_F32, r->rows), true);
    for (int64_t t = 0; t < r->rows; t++) r->gout[1].f[t] = 1;
}
static inline struct balance_args router_losses_args(struct run *r, enum dtype dt) {
    struct balance_args a = balance_args(r, dt, false);
    a.sigmoid = r->s->flags & S_SOFTCAP;
    a.z = 0.125f;
    a.z_loss = dev_new(r, shape_1d(DT_F32, r->rows), true);
    return a;
}
static inline int router_losses_fwd(struct run *r) {
    const struct balance_args a = router_losses_args(r, DT_F32);
    TRY(dev_balance_bwd(r->d, &a));
    down(r, "loss", a.loss, true, TOL_SUM);
    down(r, "z_loss", a.z_loss, true, TOL_SUM);
    return 0;
}
static inline int router_losses_bwd(struct run *r) {
    const struct balance_args a = router_losses_args(r, r->act);
    TRY(dev_zero(r->d, a.dlogits.data, (size_t)tensor_count(a.dlogits) * dtype_size(a.dlogits.dt)));
    TRY(dev_balance_bwd(r->d, &a));
    down_grad(r, 0, a.dlogits, TOL_SUM)->floor = 0.01;
    return 0;
}

/* ---- experts: sort, gather, grouped GEMM, combine ---- */

/* Ids distinct in a row. S_ADD: most tokens choose the same few experts, and some experts have no row. */
static inline void experts_setup(struct run *r) {
    const struct op_shape *s = r->s;
    struct rng g = {.seed = 17, .stream = RNG_TEST};
    add_in(r, "x", shape_2d(r->act, r->rows, s->k), true, 1, 0);
    add_in(r, "w", shape_2d(r->act, s->hq * s->n, s->k), false, 0.5f, 0);
    add_in(r, "weight", shape_2d(DT_F32, r->rows, s->hk), true, 0.3f, 0.5f);
    add_in(r, "from", shape_2d(DT_F32, r->rows, s->n), true, 1, 0);
    struct slot *id = slot_new(r->in, &r->n_in, "expert", shape_2d(DT_I32, r->rows, s->hk), true);
    id->i = xcalloc((size_t)(r->rows * s->hk), sizeof *id->i);
    for (int64_t t = 0; t < r->rows; t++) {
        int64_t e[DEV_MAX_EXPERTS];
        for (int64_t i = 0; i < s->hq; i++) e[i] = i;
        if (!(s->flags & S_ADD) || t % 16 == 5) rng_shuffle(&g, e, s->hq);
        for (int64_t c = 0; c < s->hk; c++) id->i[t * s->hk + c] = (int32_t)e[c];
    }
    add_gout(r, "dout", shape_2d(r->act, r->rows, s->n), true);
}

struct experts {
    struct weight_stack w;
    struct tensor offset, token, x, y;
    struct combine_args combine;
};

/* The experts' matrices, one below the other in `w`, each packed. */
static inline int up_experts(struct run *r, const struct slot *w, int64_t count, struct weight_stack *out) {
    const int64_t n = w->dim[0] / count, k = w->dim[1];
    const size_t bytes = dev_weight_bytes(r->d, r->act, n, k);
    const struct tensor rows = up(r, w);
    *out = (struct weight_stack){{.data = run_block(r, bytes * (size_t)count), .dt = r->act, .n = n, .k = k}, count};
    for (int64_t e = 0; e < count; e++) {
        struct weight one = out->w;
        one.data = (char *)one.data + bytes * (size_t)e;
        TRY(dev_weight_pack(r->d, one, tensor_rows(rows, e * n, n)));
    }
    return 0;
}
static inline int experts_run(struct run *r, struct experts *e) {
    const struct op_shape *s = r->s;
    const int64_t slots = r->rows * s->hk;
    const struct tensor expert = up(r, &r->in[4]), row = dev_new(r, slot_shape(&r->in[4]), true);
    *e = (struct experts){.offset = dev_new(r, shape_1d(DT_I32, s->hq + 1), false),
                          .token = dev_new(r, shape_1d(DT_I32, slots), true),
                          .x = dev_new(r, shape_2d(r->act, slots, s->k), true),
                          .y = dev_new(r, shape_2d(r->act, slots, s->n), true)};
    TRY(up_experts(r, &r->in[1], s->hq, &e->w));
    TRY(dev_expert_sort(r->d, e->offset, e->token, row, expert));
    TRY(dev_gather_rows(r->d, e->x, up(r, &r->in[0]), e->token));
    TRY(dev_grouped_fwd(r->d, e->y, e->x, e->w, e->offset));
    e->combine = (struct combine_args){.out = dev_new(r, shape_2d(DT_F32, r->rows, s->n), true),
                                       .from = up(r, &r->in[3]),
                                       .y = e->y,
                                       .row = row,
                                       .weight = up(r, &r->in[2])};
    return dev_combine_fwd(r->d, &e->combine);
}
static inline int experts_fwd(struct run *r) {
    struct experts e;
    TRY(experts_run(r, &e));
    const struct tensor out = e.combine.out;
    down(r, "out", out, true, TOL_INNER);
    e.combine.out = dev_new(r, shape_2d(r->act, r->rows, r->s->n), true);
    e.combine.from = e.combine.weight = TENSOR_NONE;
    TRY(dev_combine_fwd(r->d, &e.combine));
    down(r, "sum", e.combine.out, true, TOL_INNER);
    const struct tensor wide = dev_new(r, shape_2d(DT_F32, r->rows * r->s->hk, r->s->n), true);
    TRY(dev_grouped_fwd(r->d, wide, e.x, e.w, e.offset));
    e.combine.out = out;
    e.combine.from = out; /* in place */
    TRY(dev_combine_fwd(r->d, &e.combine));
    down(r, "out twice", out, true, TOL_INNER);
    down(r, "y in f32", wide, false, TOL_SUM);
    return 0;
}
static inline int experts_bwd(struct run *r) {
    const struct op_shape *s = r->s;
    const int64_t slots = r->rows * s->hk;
    const struct tensor dout = up(r, &r->gout[0]), dweight = dev_new(r, shape_2d(DT_F32, r->rows, s->hk), true);
    const struct tensor dxs = dev_new(r, shape_2d(r->act, slots, s->k), true),
                        wide = dev_new(r, shape_2d(DT_F32, slots, s->k), true);
    const struct tensor dy = dev_new(r, shape_2d(r->act, slots, s->n), true), dx = dev_new(r, slot_shape(&r->in[0]), true);
    const struct tensor flat = up_acc(r, shape_2d(DT_F32, s->hq * s->n, s->k), false);
    struct tensor dw = flat;
    struct experts e;
    TRY(experts_run(r, &e));
    TRY(dev_combine_bwd(r->d, &e.combine, dout, dy, dweight));
    dw.nd = 3, dw.dim[0] = s->hq, dw.dim[1] = s->n, dw.dim[2] = s->k;
    TRY(dev_grouped_dw(r->d, dw, dy, e.x, e.offset, true));
    TRY(dev_grouped_dx(r->d, dxs, dy, e.w, e.offset));
    TRY(dev_grouped_dx(r->d, wide, dy, e.w, e.offset));
    const struct combine_args back = {.out = dx, .y = dxs, .row = e.combine.row};
    TRY(dev_combine_fwd(r->d, &back));
    down_grad(r, 0, dx, TOL_INNER);
    down_grad(r, 1, flat, TOL_INNER);
    down_grad(r, 2, dweight, TOL_INNER);
    const struct tensor alone = dev_new(r, shape_2d(DT_F32, s->hq * s->n, s->k), false); /* written, whatever was there */
    dw.data = alone.data;
    TRY(dev_grouped_dw(r->d, dw, dy, e.x, e.offset, false));
    down(r, "dw alone", alone, false, TOL_INNER);
    down(r, "dx in f32", wide, false, TOL_INNER);
    TRY(dev_combine_bwd(r->d, &e.combine, dout, e.y, dweight)); /* in place */
    down(r, "dy", e.y, false, TOL_INNER);
    return 0;
}

/* ---- the gate of a shared expert ---- */

static inline void row_gate_setup(struct run *r) {
    add_in(r, "y", shape_2d(r->act, r->rows, r->s->n), true, 1, 0);
    add_in(r, "gate", shape_2d(r->act, r->rows, 1), true, 2, 0);
    add_in(r, "from", shape_2d(DT_F32, r->rows, r->s->n), true, 1, 0);
    add_gout(r, "dout", shape_2d(r->act, r->rows, r->s->n), true);
}
static inline int row_gate_fwd(struct run *r) {
    const struct tensor from = up(r, &r->in[2]), y = up(r, &r->in[0]), gate = up(r, &r->in[1]);
    const struct tensor out = dev_new(r, slot_shape(&r->in[2]), true);
    TRY(dev_row_gate_fwd(r->d, &(struct row_gate_args){out, from, y, gate}));
    TRY(dev_row_gate_fwd(r->d, &(struct row_gate_args){from, from, y, gate}));
    down(r, "out", out, true, TOL_SUM);
    down(r, "in place", from, true, TOL_SUM);
    return 0;
}
static inline int row_gate_bwd(struct run *r) {
    const struct tensor y = up(r, &r->in[0]), gate = up(r, &r->in[1]), dout = up(r, &r->gout[0]);
    const struct tensor dgate = dev_new(r, slot_shape(&r->in[1]), true);
    TRY(dev_row_gate_bwd(r->d, &(struct row_gate_args){.y = y, .gate = gate}, dout, y, dgate)); /* in place */
    down_grad(r, 0, y, TOL_SUM);
    down_grad(r, 1, dgate, TOL_SUM);
    return 0;
}

/* ---- biases of experts: hq of them, whose rows are of no one length ---- */

static inline struct tensor uneven_offset(struct run *r) {
    int32_t at[DEV_MAX_EXPERTS + 1] = {0};
    for (int64_t e = 1; e <= r->s->hq; e++) at[e] = (int32_t)(r->rows * e * e / (r->s->hq * r->s->hq));
    return up_i32(r, shape_1d(DT_I32, r->s->hq + 1), at);
}
static inline void expert_bias_setup(struct run *r) {
    add_in(r, "y", shape_2d(r->act, r->rows, r->s->n), false, 1, 0);
    add_in(r, "bias", shape_1d(r->act, r->s->hq * r->s->n), false, 1, 0);
    add_gout(r, "dy", shape_2d(r->act, r->rows, r->s->n), false);
}
static inline int expert_bias_fwd(struct run *r) {
    const struct tensor y = up(r, &r->in[0]);
    TRY(dev_expert_bias_fwd(r->d, y, up(r, &r->in[1]), uneven_offset(r)));
    down(r, "y", y, false, TOL_SUM);
    return 0;
}
static inline int expert_bias_bwd(struct run *r) {
    const struct tensor dy = up(r, &r->gout[0]), offset = uneven_offset(r);
    const struct tensor db = up_acc(r, shape_1d(DT_F32, r->s->hq * r->s->n), false),
                        alone = dev_new(r, shape_1d(DT_F32, r->s->hq * r->s->n), false);
    TRY(dev_expert_bias_bwd(r->d, db, dy, offset, true));
    TRY(dev_expert_bias_bwd(r->d, alone, dy, offset, false));
    down_grad(r, 0, dy, TOL_EXACT);
    down_grad(r, 1, db, TOL_SUM);
    down(r, "db alone", alone, false, TOL_SUM);
    return 0;
}

/* ---- SwiGLU with limits ---- */

static inline void clamped_setup(struct run *r) {
    add_in(r, "gate_up", shape_2d(r->act, r->rows, 2 * r->s->n), true, 2, 0);
    add_gout(r, "dy", shape_2d(r->act, r->rows, r->s->n), true);
}
static inline struct clamped_swiglu_args clamped_args(struct run *r) {
    return (struct clamped_swiglu_args){.gate_up = up(r, &r->in[0]), .alpha = 1.702f, .limit = 2.5f};
}
static inline int clamped_fwd(struct run *r) {
    struct clamped_swiglu_args a = clamped_args(r);
    a.y = dev_new(r, shape_2d(r->act, r->rows, r->s->n), true);
    TRY(dev_clamped_swiglu_fwd(r->d, &a));
    down(r, "y", a.y, true, TOL_SUM);
    return 0;
}
static inline int clamped_bwd(struct run *r) {
    const struct clamped_swiglu_args a = clamped_args(r);
    const struct tensor dx = dev_new(r, slot_shape(&r->in[0]), true);
    TRY(dev_clamped_swiglu_bwd(r->d, &a, dx, up(r, &r->gout[0])));
    down_grad(r, 0, dx, TOL_SUM);
    return 0;
}

/* ---- sinks of attention: the sum over keys is lse's, the value out's ---- */

static inline void sink_setup(struct run *r) {
    add_in(r, "sink", shape_1d(r->act, r->s->hq), false, 1, 0);
    add_in(r, "out", shape_2d(r->act, r->rows, r->s->hq * r->s->dim), true, 1, 0);
    add_in(r, "lse", shape_2d(DT_F32, r->rows, r->s->hq), true, 2, 0);
    add_gout(r, "dout", shape_2d(r->act, r->rows, r->s->hq * r->s->dim), true);
}
static inline int sink_run(struct run *r, struct attn_sink_args *a) {
    *a = (struct attn_sink_args){.out = up(r, &r->in[1]), .lse = up(r, &r->in[2]), .sink = up(r, &r->in[0])};
    return dev_attn_sink_fwd(r->d, a);
}
static inline int sink_fwd(struct run *r) {
    struct attn_sink_args a;
    TRY(sink_run(r, &a));
    down(r, "out", a.out, true, TOL_SUM);
    down(r, "lse", a.lse, true, TOL_SUM);
    return 0;
}
static inline int sink_bwd(struct run *r) {
    const struct tensor dsink = up_acc(r, shape_1d(DT_F32, r->s->hq), false);
    struct attn_sink_args a;
    TRY(sink_run(r, &a));
    TRY(dev_attn_sink_bwd(r->d, &a, up(r, &r->gout[0]), dsink));
    down_grad(r, 0, dsink, TOL_INNER);
    return 0;
}

/* ---- shapes ---- */

static const struct op_shape shapes_route[] = {
    {.rows = 1, .hq = 1, .hk = 1},
    {.rows = 7, .hq = 4, .hk = 2, .flags = S_NORM},
    {.rows = 33, .hq = 8, .hk = 8, .flags = S_NORM},
    {.rows = 65, .hq = 60, .hk = 4},
    {.rows = 40, .hq = 128, .hk = 8, .flags = S_NORM},
    {.rows = 17, .hq = 384, .hk = 6},
    {.rows = 5, .hq = 1024, .hk = 32, .flags = S_NORM},
};
static const struct op_shape shapes_expert_bias[] = {
    {.rows = 1, .n = 1, .hq = 1}, {.rows = 7, .n = 17, .hq = 3}, {.rows = 65, .n = 100, .hq = 8}, {.rows = 200, .n = 72, .hq = 32}};
static const struct op_shape shapes_sink[] = {{.rows = 1, .hq = 1, .dim = 8},
                                              {.rows = 7, .hq = 4, .dim = 16},
                                              {.rows = 65, .hq = 3, .dim = 64},
                                              {.rows = 33, .hq = 8, .dim = 80}};
static const struct op_shape shapes_score_route[] = {
    {.rows = 1, .hq = 1, .hk = 1, .flags = S_SOFTCAP},
    {.rows = 7, .hq = 8, .hk = 3, .n = 4, .k = 2, .flags = S_NORM | S_SOFTCAP | S_ADD},
    {.rows = 33, .hq = 64, .hk = 6, .flags = S_NORM | S_SOFTCAP | S_ADD},
    {.rows = 40, .hq = 256, .hk = 8, .n = 8, .k = 4, .flags = S_NORM | S_SOFTCAP | S_ADD},
    {.rows = 65, .hq = 160, .hk = 6, .n = 8, .k = 3},
    {.rows = 17, .hq = 384, .hk = 8, .flags = S_SOFTCAP | S_ADD},
    {.rows = 5, .hq = 1024, .hk = 32, .n = 32, .k = 7, .flags = S_NORM},
};
static const struct op_shape shapes_router_losses[] = {
    {.rows = 1, .hq = 1, .hk = 1},    {.rows = 7, .hq = 8, .hk = 3, .flags = S_SOFTCAP},
    {.rows = 33, .hq = 60, .hk = 4},  {.rows = 40, .hq = 256, .hk = 8, .flags = S_SOFTCAP},
    {.rows = 17, .hq = 384, .hk = 8}, {.rows = 5, .hq = 1024, .hk = 32, .flags = S_SOFTCAP},
};
static const struct op_shape shapes_experts[] = {
    {.rows = 1, .n = 1, .k = 1, .hq = 1, .hk = 1},
    {.rows = 5, .n = 17, .k = 9, .hq = 3, .hk = 2},
    {.rows = 33, .n = 40, .k = 48, .hq = 8, .hk = 2},
    {.rows = 65, .n = 64, .k = 32, .hq = 16, .hk = 4},
    {.rows = 150, .n = 72, .k = 136, .hq = 4, .hk = 2},
    {.rows = 129, .n = 48, .k = 64, .hq = 9, .hk = 3, .flags = S_ADD},
    {.rows = 300, .n = 136, .k = 72, .hq = 5, .hk = 1, .flags = S_ADD},
    {.rows = 450, .n = 264, .k = 136, .hq = 3, .hk = 1, .flags = S_ADD},
    {.rows = 150, .n = 136, .k = 584, .hq = 3, .hk = 1, .flags = S_ADD},
    {.rows = 150, .n = 488, .k = 328, .hq = 2, .hk = 1, .flags = S_ADD},
};

#endif
