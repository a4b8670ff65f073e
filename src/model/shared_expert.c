/* shared_expert.c - the expert that all tokens have next to those that their router chose: an MLP, in some families behind a gate
 * of its own; forward and backward. What it gives is added to the residual stream after the others' outputs.
 *
 * Its matrices are linear layers like a dense MLP's: they have adapters.
 * Invariant: one order of every sum, in rollout and training alike. */
#include "model/model_int.h"

#include "base/err.h"

/* ---- buffers ---- */

void model__shared_stage_layout(struct model_shared_stage *s, struct arena *m, const struct model_config *c, enum dtype act,
                                int64_t rows) {
    if (!model_has_group(c, offsetof(struct model_layer, shared_down))) return;
    s->gate_up = model__take2(m, act, rows, 2 * c->shared_ffn);
    s->mlp = model__take2(m, act, rows, c->shared_ffn);
    if (!model_has_group(c, offsetof(struct model_layer, shared_gate))) return;
    s->y = model__take2(m, act, rows, c->hidden);
    s->gate = model__take2(m, act, rows, 1);
}

void model__shared_backward_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act) {
    if (!model_has_group(c, offsetof(struct model_layer, shared_down))) return;
    a->shared.dmlp = model__take2(m, act, a->max_rows, c->shared_ffn);
    a->shared.dgate_up = model__take2(m, act, a->max_rows, 2 * c->shared_ffn);
    if (model_has_group(c, offsetof(struct model_layer, shared_gate))) a->shared.dgate = model__take2(m, act, a->max_rows, 1);
}

static struct model_shared_stage stage_of(const struct model_acts *a, int64_t l, int64_t n) {
    const struct model_shared_stage *const s = &a->stages[l].shared;
    return (struct model_shared_stage){model__top(s->gate_up, n), model__top(s->mlp, n), model__top(s->y, n),
                                       model__top(s->gate, n)};
}

/* ---- forward ---- */

/* The last matrix. */
static int down(struct model *m, const struct linear_args *a) {
    struct linear_args all = *a;
    if (!m->tp) return model__linear(m, a);
    TRY(model__tp_gather(m, MODEL_TP_SHARED, a->y.dim[0], &all.x));
    return model__tp_linear(m, &all);
}

int model__shared_stage(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    const struct model_layer *y = &m->layers[l];
    const struct model_shared_stage s = stage_of(a, l, b->n_rows);
    const struct tensor xn = model__top(a->stages[l].xn2, b->n_rows);
    if (!y->shared_down) return 0;
    const struct linear_args gate_up = {y->shared_gate_up, s.gate_up, xn, .base = b->no_adapter};
    if (a->keep.train) { /* backward reads gate_up */
        TRY(model__linear(m, &gate_up));
        TRY(model__gated(m, s.mlp, s.gate_up));
    } else {
        TRY(model__linear_gated(m, &gate_up, m->tp ? model__tp_part(m, MODEL_TP_SHARED, b->n_rows) : s.mlp));
    }
    if (!y->shared_gate) return 0;
    TRY(dev_matmul_fwd(m->dev, s.gate, xn, y->shared_gate->mat, TENSOR_NONE, false));
    return down(m, &(struct linear_args){y->shared_down, s.y, s.mlp, .base = b->no_adapter});
}

int model__shared_output(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    const struct model_layer *y = &m->layers[l];
    const struct model_shared_stage s = stage_of(a, l, b->n_rows);
    const struct tensor x = model__top(a->x[l + 1], b->n_rows);
    if (!y->shared_down) return 0;
    if (y->shared_gate) return dev_row_gate_fwd(m->dev, &(struct row_gate_args){x, x, s.y, s.gate});
    return down(m, &(struct linear_args){y->shared_down, x, s.mlp, true, b->no_adapter, x});
}

/* ---- backward ---- */

int model__shared_backward(struct model *m, struct model_acts *a, int64_t l, struct tensor dy, struct tensor dx,
                           const struct model_grads *g) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const int64_t n = dy.dim[0];
    const struct model_shared_stage s = stage_of(a, l, n);
    const struct tensor xn = model__top(a->stages[l].xn2, n), dmlp = model__top(a->shared.dmlp, n);
    const struct tensor dgate_up = model__top(a->shared.dgate_up, n), dgate = model__top(a->shared.dgate, n);
    if (!y->shared_down) return 0;
    if (y->shared_gate) { /* the gradient of y in its place */
        TRY(dev_row_gate_bwd(d, &(struct row_gate_args){.y = s.y, .gate = s.gate}, dy, s.y, dgate));
        if (!m->lora) TRY(model__router_dw(m, g, y->shared_gate, dgate, xn));
        TRY(dev_matmul_dx(d, dx, dgate, y->shared_gate->mat, true));
        dy = s.y;
    }
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->shared_down, dmlp, dy, s.mlp, g, false}));
    TRY((m->cfg.family->gelu ? dev_geglu_bwd : dev_swiglu_bwd)(d, dgate_up, dmlp, s.gate_up));
    return model__linear_bwd(m, &(struct linear_bwd_args){y->shared_gate_up, dx, dgate_up, xn, g, true});
}
