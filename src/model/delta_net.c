/* delta_net.c - what stands in the place of a layer's softmax attention in hybrids (Qwen3.5): a gated delta net; and the output
 * gate of their attention layers; forward and backward.
 *
 * A gated delta net has a state for a sequence: the last inputs of its convolution, and of the delta rule the state at the chunk's
 * start with the rows of the open chunk (device/ops.h). In training there is none: sequences are whole. Norms around it, its last
 * matrix and the residual stream are forward.c's and backward.c's.
 * Invariant: chunks are counted from a sequence's first token, and a row reads rows before it alone, so rollout and training give
 * the same bits, whatever rows come together. */
#include "model/model_int.h"

#include "base/err.h"

/* ---- buffers ---- */

/* The heads, and their channels, of which a rank has all rows. */
struct own {
    int64_t v_heads, channels, v;
};
static struct own own_of(const struct model_acts *a, const struct model_config *c) {
    int64_t k = c->delta.k_heads, v = c->delta.v_heads;
    if (a->keep.context > 1) model_context_delta(c, a->keep.context, &k, &v);
    return (struct own){v, 2 * k * c->delta.k_dim + v * c->delta.v_dim, v * c->delta.v_dim};
}

void model__delta_layout(struct model_delta_stage *s, const struct model_acts *a, struct arena *m, const struct model_config *c,
                         enum dtype act) {
    const int64_t hv = c->delta.v_heads, v = model_dim(c, MODEL_DELTA_V), rows = a->max_rows, all = a->all_rows;
    const int64_t entries = all / DEV_DELTA_CHUNK + 1;
    const struct own own = own_of(a, c);
    if (!hv) return;
    s->qkv = model__take2(m, act, all, own.channels);
    s->u = model__take2(m, act, all, own.channels);
    s->z = model__take2(m, act, rows, v);
    s->ba = model__take2(m, act, all, 2 * own.v_heads);
    s->o = model__take2(m, act, rows, v);
    s->y = model__take2(m, act, rows, v);
    if (!a->keep.train) return;
    s->rstd = model__take1(m, DT_F32, rows * hv);
    s->e = model__take2(m, DT_F32, all, own.v);
    s->states = (struct tensor){NULL, DT_F32, 4, {entries, own.v_heads, c->delta.k_dim, c->delta.v_dim}};
    s->states.data = arena_take(m, SIZE_OF(entries, own.v, c->delta.k_dim, (int64_t)sizeof(float)));
}

void model__gate_layout(struct model_gate_stage *s, struct arena *m, const struct model_config *c, enum dtype act, int64_t rows,
                        bool train) {
    const int64_t q = model_dim(c, MODEL_Q);
    if (!(c->features & MODEL_OUTPUT_GATE)) return;
    s->gate = model__take2(m, act, rows, q);
    if (train) s->att = model__take2(m, act, rows, q);
}

void model__hybrid_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act) {
    if (c->features & MODEL_OUTPUT_GATE)
        a->joint = model__take2(m, act, a->max_rows, model_dim(c, MODEL_QKV) + model_dim(c, MODEL_Q));
    if (!c->delta.v_heads || model_has_group(c, offsetof(struct model_layer, delta_z))) return;
    a->delta.qkvz = model__take2(m, act, a->max_rows, model_dim(c, MODEL_DELTA_QKVZ));
    a->delta.joint_ba = model__take2(m, act, a->max_rows, model_dim(c, MODEL_DELTA_BA));
}

void model__hybrid_backward_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act) {
    const int64_t rows = a->max_rows, qkv = model_dim(c, MODEL_DELTA_QKV), v = model_dim(c, MODEL_DELTA_V);
    if (c->features & MODEL_OUTPUT_GATE) a->dgate = model__take2(m, act, rows, model_dim(c, MODEL_Q));
    if (!c->delta.v_heads) return;
    a->delta.dy = model__take2(m, act, rows, v);
    a->delta.dout = model__take2(m, act, a->all_rows, own_of(a, c).v);
    a->delta.dz = model__take2(m, act, rows, v);
    a->delta.dba = model__take2(m, act, rows, 2 * c->delta.v_heads);
    a->delta.du = model__take2(m, act, a->all_rows, own_of(a, c).channels);
    a->delta.dqkv = model__take2(m, act, rows, qkv);
    a->delta.dx = model__take2(m, DT_F32, rows, c->hidden);
}

/* ---- arguments of the ops ---- */

struct delta_ops {
    struct causal_conv_args conv;
    struct delta_args rule;
    struct gated_norm_args norm;
};

static struct tensor heads_of(struct tensor t, int64_t dim) { return tensor_2d(t.data, t.dt, tensor_count(t) / dim, dim); }
static struct tensor taps_of(struct tensor t) { return tensor_2d(t.data, t.dt, tensor_count(t) / DEV_CONV_TAPS, DEV_CONV_TAPS); }

static struct delta_ops ops_of(const struct model *m, const struct model_batch *b, const struct model_delta_stage *s, int64_t l) {
    const struct model_config *c = &m->cfg;
    const struct model_layer *y = &m->layers[l];
    const int64_t n = b->n_rows, dim = c->delta.v_dim;
    const struct model_state *const state = b->kv && b->kv->states ? &b->kv->states[l] : NULL;
    const struct row_seqs seqs = b->state_seqs.n ? b->state_seqs
                                                 : (struct row_seqs){.n = b->seqs.n,
                                                                     .max_rows = b->seqs.max_q,
                                                                     .start = b->seqs.q_start,
                                                                     .pos0 = b->seqs.pos0,
                                                                     .slot = state ? b->state_slots : TENSOR_NONE};
    struct delta_ops o = {
        .conv = {.seqs = seqs, .x = model__top(s->qkv, n), .w = taps_of(y->delta_conv->vec), .y = model__top(s->u, n)},
        .rule = {.n_k_heads = c->delta.k_heads,
                 .n_v_heads = c->delta.v_heads,
                 .k_dim = c->delta.k_dim,
                 .v_dim = dim,
                 .seqs = seqs,
                 .qkv = model__top(s->u, n),
                 .ba = model__top(s->ba, n),
                 .a_log = y->delta_a_log->vec,
                 .dt_bias = y->delta_dt_bias->vec,
                 .out = model__top(s->o, n)},
        .norm = {.x = heads_of(model__top(s->o, n), dim),
                 .z = heads_of(model__top(s->z, n), dim),
                 .y = heads_of(model__top(s->y, n), dim),
                 .w = y->delta_norm->vec,
                 .rstd = model__top(s->rstd, n * c->delta.v_heads),
                 .eps = c->rms_eps}};
    if (state) {
        o.conv.state = state->conv;
        o.rule.state = state->delta;
    } else if (s->e.data) {
        o.rule.states = s->states;
        o.rule.states.dim[0] = n / DEV_DELTA_CHUNK + 1;
        o.rule.e = model__top(s->e, n);
    }
    if (b->context) model__context_delta_args(b, s, &o.conv, &o.rule);
    return o;
}

/* Where files have q, k, v and z of a key head together, and b and a (Qwen3-Next): what the matrices give, and its parts. */
static struct gate_split_args joint_qkvz(const struct model *m, const struct model_acts *a, struct tensor qkv, struct tensor z) {
    const struct model_config *c = &m->cfg;
    const int64_t v = c->delta.v_heads / c->delta.k_heads * c->delta.v_dim;
    return (struct gate_split_args){.n_heads = c->delta.k_heads,
                                    .n_parts = 4,
                                    .width = {c->delta.k_dim, c->delta.k_dim, v, v},
                                    .joint = model__top(a->delta.qkvz, qkv.dim[0]),
                                    .rest = qkv,
                                    .gate = z};
}
static struct gate_split_args joint_ba(const struct model *m, const struct model_acts *a, struct tensor ba) {
    const struct model_config *c = &m->cfg;
    const int64_t each = c->delta.v_heads / c->delta.k_heads;
    return (struct gate_split_args){.n_heads = c->delta.k_heads,
                                    .n_parts = 2,
                                    .width = {each, each},
                                    .joint = model__top(a->delta.joint_ba, ba.dim[0]),
                                    .rest = ba};
}

/* ---- forward ---- */

static int project(struct model *m, const struct model_batch *b, const struct model_acts *a, int64_t l, const struct delta_ops *o) {
    const struct model_layer *y = &m->layers[l];
    struct tensor own_qkv = o->conv.x, own_ba = o->rule.ba; /* of the rows that are here */
    if (b->context) model__context_delta_rows(b, &own_qkv, &own_ba);
    const struct tensor xn = model__top(a->stages[l].xn1, b->n_rows), z = model__top(a->stages[l].delta.z, b->n_rows);
    if (y->delta_z) {
        TRY(model__linear(m, &(struct linear_args){y->delta_qkv, own_qkv, xn, .base = b->no_adapter}));
        TRY(model__linear(m, &(struct linear_args){y->delta_z, z, xn, .base = b->no_adapter}));
        return (m->tp ? model__tp_delta_ba : model__linear)(m,
                                                            &(struct linear_args){y->delta_ba, own_ba, xn, .base = b->no_adapter});
    }
    const struct gate_split_args qkvz = joint_qkvz(m, a, own_qkv, z), ba = joint_ba(m, a, own_ba);
    TRY(model__linear(m, &(struct linear_args){y->delta_qkv, qkvz.joint, xn, .base = b->no_adapter}));
    TRY(dev_gate_split(m->dev, &qkvz));
    TRY(model__linear(m, &(struct linear_args){y->delta_ba, ba.joint, xn, .base = b->no_adapter}));
    return dev_gate_split(m->dev, &ba);
}

int model__delta_forward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    struct dev *d = m->dev;
    struct delta_ops o = ops_of(m, b, &a->stages[l].delta, l);
    TRY(project(m, b, a, l, &o));
    if (b->context) {
        TRY(model__context_delta_fwd(b, &o.conv, &o.rule, o.norm.x));
    } else {
        TRY(dev_causal_conv_fwd(d, &o.conv));
        TRY(dev_delta_fwd(d, &o.rule));
    }
    if (m->tp) o.norm.y = heads_of(model__tp_part(m, MODEL_TP_DELTA, b->n_rows), m->cfg.delta.v_dim);
    return dev_gated_norm_fwd(d, &o.norm);
}

struct gate_split_args model__gate_args(const struct model *m, struct tensor joint, struct tensor rest, struct tensor gate) {
    const int64_t dim = m->cfg.head_dim;
    return (struct gate_split_args){
        .n_heads = m->cfg.n_q_heads, .n_parts = 2, .width = {dim, dim}, .joint = joint, .rest = rest, .gate = gate};
}

/* ---- backward ---- */

/* dev_gated_norm_bwd of n rows, a part after the other. */
static int norm_backward(struct model *m, const struct model_grads *g, const struct gated_norm_args *all,
                         const struct gated_norm_bwd_args *of, int64_t n) {
    const int64_t heads = m->cfg.delta.v_heads;
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_range rows = model__part(g, i, n), r = {rows.lo * heads, rows.hi * heads};
        struct gated_norm_args x = *all;
        struct gated_norm_bwd_args dx = *of;
        struct tensor *const parts[] = {&x.x, &x.z, &x.y, &x.rstd, &dx.dy, &dx.dx, &dx.dz};
        for (size_t k = 0; k < sizeof parts / sizeof *parts; k++) *parts[k] = model__range(*parts[k], r);
        TRY(dev_gated_norm_bwd(m->dev, &x, &dx));
    }
    return 0;
}

/* From the gradient of what the delta rule gives to a->delta.dqkv and dba: of all rows at once, by heads. */
static int heads_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l, const struct delta_ops *o,
                          const struct model_grads *g) {
    const struct model_layer *y = &m->layers[l];
    const struct tensor dba = model__top(a->delta.dba, b->n_rows), dqkv = model__top(a->delta.dqkv, b->n_rows);
    const struct tensor dtaps = taps_of(model__vec_grad(m, g, y->delta_conv));
    const struct tensor da_log = model__vec_grad(m, g, y->delta_a_log), ddt_bias = model__vec_grad(m, g, y->delta_dt_bias);
    const struct context_delta_bwd_args rows = {&o->conv, &o->rule, a->delta.dout, a->delta.du, dtaps, da_log, ddt_bias, dqkv, dba};
    if (b->context) return model__context_delta_bwd(b, &rows);
    const struct tensor du = model__top(a->delta.du, b->n_rows), dout = model__top(a->delta.dout, b->n_rows);
    TRY(dev_delta_bwd(m->dev, &o->rule, &(struct delta_bwd_args){dout, du, dba, da_log, ddt_bias}));
    return dev_causal_conv_bwd(m->dev, &o->conv, &(struct causal_conv_bwd_args){du, dqkv, dtaps});
}

int model__delta_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l, struct tensor dy,
                          const struct model_grads *g) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const struct model_delta_stage *s = &a->stages[l].delta;
    const int64_t n = b->n_rows, dim = m->cfg.delta.v_dim;
    const struct delta_ops o = ops_of(m, b, s, l);
    const struct tensor xn = model__top(a->stages[l].xn1, n), dx = model__top(a->delta.dx, n), dba = model__top(a->delta.dba, n);
    const struct tensor dn = model__top(a->delta.dy, n), dz = model__top(a->delta.dz, n), dqkv = model__top(a->delta.dqkv, n);
    const struct tensor dout = b->context ? model__context_delta_dout(b) : model__top(a->delta.dout, n);
    const struct gated_norm_bwd_args norm = {heads_of(dn, dim), heads_of(dout, dim), heads_of(dz, dim),
                                             model__vec_grad(m, g, y->delta_norm)};
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->o, dn, dy, model__top(s->y, n), g, false}));
    TRY(norm_backward(m, g, &o.norm, &norm, n));
    TRY(heads_backward(m, b, a, l, &o, g));
    if (!y->delta_z) {
        const struct gate_split_args qkvz = joint_qkvz(m, a, dqkv, dz), ba = joint_ba(m, a, dba);
        TRY(dev_gate_join(d, &qkvz));
        TRY(dev_gate_join(d, &ba));
        TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->delta_qkv, dx, qkvz.joint, xn, g, false}));
        return model__linear_bwd(m, &(struct linear_bwd_args){y->delta_ba, dx, ba.joint, xn, g, true});
    }
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->delta_qkv, dx, dqkv, xn, g, false}));
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->delta_z, dx, dz, xn, g, true}));
    return model__linear_bwd(m, &(struct linear_bwd_args){y->delta_ba, dx, dba, xn, g, true});
}
