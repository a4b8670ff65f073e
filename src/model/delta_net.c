/* delta_net.c - what stands in the place of a layer's softmax attention in hybrids (Qwen3.5): a gated delta net; and the output
 * gate of their attention layers; forward and backward.
 *
 * A gated delta net has a state for a sequence: the last inputs of its convolution, and of the delta rule the state at the chunk's
 * start with the rows of the open chunk (device/ops.h). In training there is none: sequences are whole. Its first matrix gives all
 * that it reads, of which the ops take their columns. Norms around it, its last matrix, the first one's gradient and the residual
 * stream are forward.c's and backward.c's.
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
    if (a->keep.context > 1) {
        s->qkv = model__take2(m, act, all, own.channels);
        s->ba = model__take2(m, act, all, 2 * own.v_heads);
        s->z = model__take2(m, act, rows, v);
    } else {
        s->in = model__take2(m, act, rows, model_dim(c, MODEL_DELTA_IN));
    }
    s->u = model__take2(m, act, all, own.channels);
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
    if (!c->delta.v_heads) return;
    if (model_joint_delta(c)) a->delta.joint = model__take2(m, act, a->max_rows, model_dim(c, MODEL_DELTA_IN));
    if (a->keep.context > 1) a->delta.in = model__take2(m, act, a->max_rows, model_dim(c, MODEL_DELTA_IN));
}

void model__hybrid_backward_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act) {
    const int64_t rows = a->max_rows, v = model_dim(c, MODEL_DELTA_V);
    if (c->features & MODEL_OUTPUT_GATE) a->dgate = model__take2(m, act, rows, model_dim(c, MODEL_Q));
    if (!c->delta.v_heads) return;
    a->delta.dy = model__take2(m, act, rows, v);
    a->delta.dout = model__take2(m, act, a->all_rows, own_of(a, c).v);
    a->delta.din = model__take2(m, act, rows, model_dim(c, MODEL_DELTA_IN));
    a->delta.du = model__take2(m, act, a->all_rows, own_of(a, c).channels);
    if (a->keep.context <= 1) return;
    a->delta.dqkv = model__take2(m, act, rows, model_dim(c, MODEL_DELTA_QKV));
    a->delta.dba = model__take2(m, act, rows, model_dim(c, MODEL_DELTA_BA));
    a->delta.dz = model__take2(m, act, rows, v);
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
    const struct tensor in = m->tp ? model__tp_delta_rows(m, n) : model__top(s->in, n);
    const struct model_state *const state = b->kv && b->kv->states ? &b->kv->states[l] : NULL;
    const struct row_seqs seqs = b->state_seqs.n ? b->state_seqs
                                                 : (struct row_seqs){.n = b->seqs.n,
                                                                     .max_rows = b->seqs.max_q,
                                                                     .start = b->seqs.q_start,
                                                                     .pos0 = b->seqs.pos0,
                                                                     .slot = state ? b->state_slots : TENSOR_NONE};
    struct delta_ops o = {.conv = {.seqs = seqs, .x = in, .w = taps_of(y->delta_conv->vec), .y = model__top(s->u, n)},
                          .rule = {.n_k_heads = c->delta.k_heads,
                                   .n_v_heads = c->delta.v_heads,
                                   .k_dim = c->delta.k_dim,
                                   .v_dim = dim,
                                   .seqs = seqs,
                                   .qkv = model__top(s->u, n),
                                   .ba = model__top(s->in, n),
                                   .ba_at = model_dim(c, MODEL_DELTA_QKVZ),
                                   .a_log = y->delta_a_log->vec,
                                   .dt_bias = y->delta_dt_bias->vec,
                                   .out = model__top(s->o, n)},
                          .norm = {.x = heads_of(model__top(s->o, n), dim),
                                   .z = in,
                                   .z_at = model_dim(c, MODEL_DELTA_QKV),
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
    if (!b->context) return o;
    o.norm.z = model__top(s->z, n);
    o.norm.z_at = 0;
    model__context_delta_args(b, s, &o.conv, &o.rule);
    return o;
}

/* Where files have q, k, v and z of a key head together, and b and a (Qwen3-Next): columns of what the matrix gives, which the
 * ops read as those of `in`; the second is behind the first. */
struct joint {
    struct gate_split_args qkvz, ba;
};
static struct joint joint_of(const struct model *m, const struct model_acts *a, struct tensor in) {
    const struct model_config *c = &m->cfg;
    const int64_t each = c->delta.v_heads / c->delta.k_heads, k = c->delta.k_dim, v = each * c->delta.v_dim;
    const struct tensor joint = model__top(a->delta.joint, in.dim[0]);
    return (struct joint){{.n_heads = c->delta.k_heads, .n_parts = 4, .width = {k, k, v, v}, .joint = joint, .rest = in},
                          {.n_heads = c->delta.k_heads,
                           .n_parts = 2,
                           .width = {each, each},
                           .at = model_dim(c, MODEL_DELTA_QKVZ),
                           .joint = joint,
                           .rest = in}};
}

/* ---- forward ---- */

static int project(struct model *m, const struct model_batch *b, const struct model_acts *a, int64_t l) {
    const struct model_delta_stage *s = &a->stages[l].delta;
    const int64_t n = b->n_rows;
    const struct tensor in = model__top(b->context ? a->delta.in : s->in, n), joint = model__top(a->delta.joint, n);
    const struct linear_args linear = {m->layers[l].delta_in, joint.nd ? joint : in, model__top(a->stages[l].xn1, n),
                                       .base = b->no_adapter};
    if (m->tp) return model__tp_delta_in(m, &linear);
    TRY(model__linear(m, &linear));
    if (joint.nd) {
        const struct joint parts = joint_of(m, a, in);
        TRY(dev_gate_split(m->dev, &parts.qkvz));
        TRY(dev_gate_split(m->dev, &parts.ba));
    }
    return b->context ? model__context_delta_rows(b, in, model__top(s->z, n)) : 0;
}

int model__delta_forward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    struct dev *d = m->dev;
    struct delta_ops o = ops_of(m, b, &a->stages[l].delta, l);
    TRY(project(m, b, a, l));
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
static int norm_backward(struct model *m, const struct model_grads *g, const struct model_group *w,
                         const struct gated_norm_args *all, const struct gated_norm_bwd_args *of, int64_t n) {
    const int64_t heads = m->cfg.delta.v_heads;
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_range rows = model__part(g, i, n), r = {rows.lo * heads, rows.hi * heads};
        struct gated_norm_args x = *all;
        struct gated_norm_bwd_args dx = *of;
        const struct model_grads own = model__summand(g, i);
        dx.dw = model__vec_grad(m, &own, w);
        struct tensor *const by_head[] = {&x.x, &x.y, &x.rstd, &dx.dy, &dx.dx}, *const by_row[] = {&x.z, &dx.dz};
        for (size_t k = 0; k < sizeof by_head / sizeof *by_head; k++) *by_head[k] = model__range(*by_head[k], r);
        for (size_t k = 0; k < sizeof by_row / sizeof *by_row; k++) *by_row[k] = model__range(*by_row[k], rows);
        TRY(dev_gated_norm_bwd(m->dev, &x, &dx));
    }
    return 0;
}

static int put_columns(struct model *m, struct tensor y, int64_t at, struct tensor x) {
    return dev_copy_columns(m->dev, &(struct copy_columns_args){.y = y, .y_at = at, .x = x, .n = x.dim[1]});
}

/* From the gradient of what the delta rule gives to those of q, k, v, b and a in din: of all rows at once, by heads. */
static int heads_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l, const struct delta_ops *o,
                          const struct model_grads *g) {
    const struct model_layer *y = &m->layers[l];
    const int64_t n = b->n_rows;
    const struct tensor din = model__top(a->delta.din, n), dtaps = taps_of(model__vec_grad(m, g, y->delta_conv));
    const struct tensor da_log = model__vec_grad(m, g, y->delta_a_log), ddt_bias = model__vec_grad(m, g, y->delta_dt_bias);
    if (b->context) {
        const struct tensor dqkv = model__top(a->delta.dqkv, n), dba = model__top(a->delta.dba, n);
        const struct context_delta_bwd_args rows = {&o->conv, &o->rule, a->delta.dout, a->delta.du, dtaps,
                                                    da_log,   ddt_bias, dqkv,          dba};
        TRY(model__context_delta_bwd(b, &rows));
        TRY(put_columns(m, din, 0, dqkv));
        return put_columns(m, din, model_dim(&m->cfg, MODEL_DELTA_QKVZ), dba);
    }
    const struct tensor du = model__top(a->delta.du, n), dout = model__top(a->delta.dout, n);
    TRY(dev_delta_bwd(m->dev, &o->rule, &(struct delta_bwd_args){dout, du, din, da_log, ddt_bias}));
    return dev_causal_conv_bwd(m->dev, &o->conv, &(struct causal_conv_bwd_args){du, din, dtaps});
}

int model__delta_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l, struct tensor dy,
                          const struct model_grads *g) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const struct model_delta_stage *s = &a->stages[l].delta;
    const int64_t n = b->n_rows, dim = m->cfg.delta.v_dim;
    const struct delta_ops o = ops_of(m, b, s, l);
    const struct tensor dn = model__top(a->delta.dy, n), din = model__top(a->delta.din, n);
    const struct tensor dout = b->context ? model__context_delta_dout(b) : model__top(a->delta.dout, n);
    const struct tensor dz = b->context ? model__top(a->delta.dz, n) : din;
    const struct gated_norm_bwd_args norm = {heads_of(dn, dim), heads_of(dout, dim), dz, TENSOR_NONE};
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->o, dn, dy, model__top(s->y, n), g, false}));
    TRY(norm_backward(m, g, y->delta_norm, &o.norm, &norm, n));
    if (b->context) TRY(put_columns(m, din, model_dim(&m->cfg, MODEL_DELTA_QKV), dz));
    TRY(heads_backward(m, b, a, l, &o, g));
    if (!a->delta.joint.nd) return 0;
    const struct joint parts = joint_of(m, a, din);
    TRY(dev_gate_join(d, &parts.qkvz));
    return dev_gate_join(d, &parts.ba);
}
