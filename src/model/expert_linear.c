/* expert_linear.c - the grouped GEMMs of experts' matrices with what an adapter adds, and over a quantised base: what linear.c is
 * for the other layers.
 *
 * With adapters rows go in blocks of LORA_ROWS. They are sorted by expert, so a block meets few experts.
 * Invariant: as linear.c - a row's result depends neither on the load of its expert nor on the blocks; without an adapter it has
 * the bits of the plain grouped GEMM. */
#include "model/model_int.h"

#include "base/err.h"
#include "model/lora/lora_int.h"

/* The rows [lo, lo + n) of a call. */
struct block {
    struct weight_stack a, b; /* A and scale B */
    struct tensor sum, more, z, dz, offset;
    int64_t lo, n;
};

/* Of rows as wide as `wide`. */
static int block_at(struct model *m, const struct model_group *g, struct tensor offset, int64_t lo, struct tensor wide,
                    struct block *b) {
    const struct model_lora *l = m->lora;
    const struct lora_group *const x = g->lora;
    const int64_t rows = wide.dim[0], cols = wide.dim[1], n = rows - lo < LORA_ROWS ? rows - lo : LORA_ROWS;
    *b = (struct block){.a = {x->a, g->count},
                        .b = {x->b, g->count},
                        .sum = tensor_2d(l->sum[0], DT_F32, n, cols),
                        .more = tensor_2d(l->sum[1], DT_F32, n, cols),
                        .z = tensor_2d(l->z, m->act, n, x->width),
                        .dz = tensor_2d(l->dz, m->act, n, x->width),
                        .offset = tensor_1d(l->offset, DT_I32, g->count + 1),
                        .lo = lo,
                        .n = n};
    return dev_clip_offsets(m->dev, b->offset, offset, lo, n);
}

int model__expert_linear(struct model *m, const struct model_group *g, struct tensor y, struct tensor x, struct tensor offset,
                         bool base) {
    struct weight w;
    struct block b;
    TRY(model__weight(m, g, &w));
    const struct weight_stack all = {w, g->count};
    if (base || !g->lora) return dev_grouped_fwd(m->dev, y, x, all, offset);
    for (int64_t lo = 0, rows = x.dim[0]; lo < rows; lo += b.n) {
        TRY(block_at(m, g, offset, lo, y, &b));
        const struct tensor own = tensor_rows(x, lo, b.n);
        TRY(dev_grouped_fwd(m->dev, b.sum, own, all, b.offset));
        TRY(dev_grouped_fwd(m->dev, b.z, own, b.a, b.offset));
        TRY(dev_grouped_fwd(m->dev, b.more, b.z, b.b, b.offset));
        TRY(dev_axpby(m->dev, b.sum, 1, b.more, 1));
        TRY(dev_cast(m->dev, tensor_rows(y, lo, b.n), b.sum));
    }
    return 0;
}

int model__expert_linear_bwd(struct model *m, const struct expert_linear_bwd_args *a) {
    const struct lora_group *const g = a->group->lora;
    const struct model_lora *l = m->lora;
    const int64_t rows = a->dy.dim[0];
    struct weight w;
    struct block b;
    TRY(model__weight(m, a->group, &w));
    const struct weight_stack all = {w, a->group->count};
    if (!g) return dev_grouped_dx(m->dev, a->dx, a->dy, all, a->offset);
    if (rows == 0) return 0;
    const struct tensor mat_a = {l->mat_a, DT_F32, 3, {g->count, g->width, g->k, 1}};
    const struct tensor mat_b = {l->mat_b, DT_F32, 3, {g->count, g->n, g->width, 1}};
    for (int64_t lo = 0; lo < rows; lo += b.n) {
        TRY(block_at(m, a->group, a->offset, lo, a->dx, &b));
        const struct tensor x = tensor_rows(a->x, lo, b.n), dy = tensor_rows(a->dy, lo, b.n);
        TRY(dev_grouped_dx(m->dev, b.sum, dy, all, b.offset));
        TRY(dev_grouped_dx(m->dev, b.dz, dy, b.b, b.offset));
        TRY(dev_grouped_dx(m->dev, b.more, b.dz, b.a, b.offset));
        TRY(dev_axpby(m->dev, b.sum, 1, b.more, 1));
        TRY(dev_grouped_fwd(m->dev, b.z, x, b.a, b.offset));
        TRY(dev_grouped_dw(m->dev, mat_a, b.dz, x, b.offset, lo > 0));
        TRY(dev_grouped_dw(m->dev, mat_b, dy, b.z, b.offset, lo > 0));
        TRY(dev_cast(m->dev, tensor_rows(a->dx, lo, b.n), b.sum)); /* last: it may be x */
    }
    return model__add_adapter_grads(m, g, a->grads);
}

/* y (P, n): of each row its expert's matrix, and bias. */
static int experts_linear(struct model *m, bool no_adapter, struct tensor y, struct tensor x, const struct model_group *g,
                          struct tensor offset) {
    TRY(model__expert_linear(m, g, y, x, offset, no_adapter));
    return g->bias ? dev_expert_bias_fwd(m->dev, y, g->bias->vec, offset) : 0;
}

static int gate(struct model *m, struct tensor mlp, struct tensor gate_up) {
    if (!m->cfg.family->experts.clamped) return dev_swiglu_fwd(m->dev, mlp, gate_up);
    return dev_clamped_swiglu_fwd(
        m->dev, &(struct clamped_swiglu_args){mlp, gate_up, (float)m->cfg.swiglu_alpha, (float)m->cfg.swiglu_limit});
}

int model__experts_gate_bwd(struct model *m, struct tensor dgate_up, struct tensor dmlp, struct tensor gate_up) {
    const struct clamped_swiglu_args clamped = {
        .gate_up = gate_up, .alpha = (float)m->cfg.swiglu_alpha, .limit = (float)m->cfg.swiglu_limit};
    if (!m->cfg.family->experts.clamped) return dev_swiglu_bwd(m->dev, dgate_up, dmlp, gate_up);
    return dev_clamped_swiglu_bwd(m->dev, &clamped, dgate_up, dmlp);
}

int model__experts_inner(struct model *m, const struct model_group *g, struct tensor x, struct tensor gate_up, struct tensor mlp,
                         struct tensor offset) {
    TRY(experts_linear(m, false, gate_up, x, g, offset));
    return gate(m, mlp, gate_up);
}

int model__experts_mlp(struct model *m, bool no_adapter, const struct model_experts *e, const struct model_expert_rows *r) {
    TRY(experts_linear(m, no_adapter, r->gate_up, r->x, e->gate_up, r->offset));
    TRY(gate(m, r->mlp, r->gate_up));
    return experts_linear(m, no_adapter, r->y, r->mlp, e->down, r->offset);
}
