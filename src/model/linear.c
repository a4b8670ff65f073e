/* linear.c - forward and backward of a linear layer, with or without adapters: the one place with the
 * GEMMs of the decoder's layers, quantised ones included.
 *
 * With adapters, rows go in blocks of LORA_ROWS, so that the f32 sum that is not rounded yet needs little
 * memory.
 * Invariant: a row's result is batch-invariant, and does not depend on the blocks either; without an
 * adapter it has the bits of the plain GEMM. */
#include "model/model_int.h"

#include "base/err.h"
#include "model/lora/lora_int.h"

static struct tensor scratch(void *p, enum dtype dt, int64_t rows, int64_t cols) { return tensor_2d(p, dt, rows, cols); }

/* The f32 form of `t`, itself where it is f32. */
static struct tensor wide_of(const struct model_lora *l, struct tensor t) {
    return t.dt == DT_F32 ? t : scratch(l->wide, DT_F32, t.dim[0], t.dim[1]);
}

static int linear_block(struct model *m, const struct linear_args *a, struct weight w, int64_t lo, int64_t n) {
    const struct lora_group *g = a->group->lora;
    const struct tensor x = tensor_rows(a->x, lo, n), y = tensor_rows(a->y, lo, n), wide = wide_of(m->lora, y);
    const struct tensor z = scratch(m->lora->z, m->act, n, g->width);
    TRY(dev_matmul_fwd(m->dev, wide, x, w, model__vec(a->group->bias), a->add));
    TRY(dev_matmul_fwd(m->dev, z, x, g->a, TENSOR_NONE, false));
    TRY(dev_matmul_fwd(m->dev, wide, z, g->b, TENSOR_NONE, true));
    return wide.data == y.data ? 0 : dev_cast(m->dev, y, wide);
}

int model__linear(struct model *m, const struct linear_args *a) {
    struct weight w;
    TRY(model__weight(m, a->group, &w));
    if (a->base || !a->group->lora)
        return a->add ? dev_matmul_add(m->dev, a->y, a->from, a->x, w, model__vec(a->group->bias))
                      : dev_matmul_fwd(m->dev, a->y, a->x, w, model__vec(a->group->bias), false);
    if (a->add && a->from.data != a->y.data)
        TRY(dev_copy(m->dev, a->y.data, a->from.data, (size_t)tensor_count(a->y) * sizeof(float)));
    for (int64_t lo = 0, rows = a->x.dim[0]; lo < rows; lo += LORA_ROWS)
        TRY(linear_block(m, a, w, lo, rows - lo < LORA_ROWS ? rows - lo : LORA_ROWS));
    return 0;
}

int model__lora_linear(struct model *m, const struct linear_args *a) {
    const struct lora_group *g = a->group->lora;
    for (int64_t lo = 0, rows = a->x.dim[0]; lo < rows; lo += LORA_ROWS) {
        const int64_t n = rows - lo < LORA_ROWS ? rows - lo : LORA_ROWS;
        const struct tensor z = scratch(m->lora->z, m->act, n, g->width);
        TRY(dev_matmul_fwd(m->dev, z, tensor_rows(a->x, lo, n), g->a, TENSOR_NONE, false));
        TRY(dev_matmul_fwd(m->dev, tensor_rows(a->y, lo, n), z, g->b, TENSOR_NONE, false));
    }
    return 0;
}

int model__gated(struct model *m, struct tensor out, struct tensor gate_up) {
    return (m->cfg.family->gelu ? dev_geglu_fwd : dev_swiglu_fwd)(m->dev, out, gate_up);
}

int model__linear_gated(struct model *m, const struct linear_args *a, struct tensor out) {
    struct weight w;
    if ((!a->base && a->group->lora) || m->cfg.family->gelu) {
        TRY(model__linear(m, a));
        return model__gated(m, out, a->y);
    }
    TRY(model__weight(m, a->group, &w));
    return dev_matmul_swiglu(m->dev, out, a->y, a->x, w, model__vec(a->group->bias));
}

/* dx, and the sums of the adapters' gradients in mat_a and mat_b:
 * dz = dy (scale B), dx = dy W + dz A, dA = dz^T x, dB = scale dy^T (A x). */
static int linear_bwd_block(struct model *m, const struct linear_bwd_args *a, struct weight w, int64_t lo, int64_t n, bool add) {
    const struct lora_group *g = a->group->lora;
    const struct model_lora *l = m->lora;
    const struct tensor x = tensor_rows(a->x, lo, n), dy = tensor_rows(a->dy, lo, n), dx = tensor_rows(a->dx, lo, n);
    const struct tensor wide = wide_of(l, dx), z = scratch(l->z, m->act, n, g->width), dz = scratch(l->dz, m->act, n, g->width);
    TRY(dev_matmul_dx(m->dev, wide, dy, w, a->add));
    TRY(dev_matmul_dx(m->dev, dz, dy, g->b, false));
    TRY(dev_matmul_dx(m->dev, wide, dz, g->a, true));
    if (wide.data != dx.data) TRY(dev_cast(m->dev, dx, wide));
    TRY(dev_matmul_fwd(m->dev, z, x, g->a, TENSOR_NONE, false));
    TRY(dev_matmul_dw(m->dev, scratch(l->mat_a, DT_F32, g->width, g->k), TENSOR_NONE, dz, x, add));
    return dev_matmul_dw(m->dev, scratch(l->mat_b, DT_F32, g->n, g->width), TENSOR_NONE, dy, z, add);
}

int model__add_adapter_grads(struct model *m, const struct lora_group *g, const struct model_grads *grads) {
    const struct model_lora *l = m->lora;
    const int64_t r = l->cfg.rank;
    for (int64_t i = 0; i < g->n_parts; i++) {
        const struct lora_part *p = &g->part[i];
        const struct add_block_args da = {.dst = tensor_2d(grads->at + model__place_in(grads, p->a), DT_F32, r, g->k),
                                          .src = tensor_2d(l->mat_a, DT_F32, g->width, g->k),
                                          .src_row = i * r,
                                          .rows = r,
                                          .cols = g->k,
                                          .scale = 1,
                                          .count = g->count,
                                          .dst_next = g->stride,
                                          .src_next = g->width * g->k};
        const struct add_block_args db = {.dst = tensor_2d(grads->at + model__place_in(grads, p->b), DT_F32, p->n, r),
                                          .src = tensor_2d(l->mat_b, DT_F32, g->n, g->width),
                                          .src_row = p->row,
                                          .src_col = i * r,
                                          .rows = p->n,
                                          .cols = r,
                                          .scale = l->scale,
                                          .count = g->count,
                                          .dst_next = g->stride,
                                          .src_next = g->n * g->width};
        TRY(dev_add_block(m->dev, &da));
        TRY(dev_add_block(m->dev, &db));
    }
    return 0;
}

int model__linear_bwd(struct model *m, const struct linear_bwd_args *a) {
    const struct lora_group *g = a->group->lora;
    struct weight w;
    const int parts = model__n_parts(a->grads);
    for (int i = 0; i < parts && !m->lora; i++) {
        const struct model_grads own = model__summand(a->grads, i);
        const struct model_range r = model__part(a->grads, i, a->x.dim[0]);
        TRY(dev_matmul_dw(m->dev, model__grad(m, &own, a->group), model__grad(m, &own, a->group->bias), model__range(a->dy, r),
                          model__range(a->x, r), own.add));
    }
    TRY(model__weight(m, a->group, &w));
    if (!g) return dev_matmul_dx(m->dev, a->dx, a->dy, w, a->add);
    for (int i = 0; i < parts; i++) {
        const struct model_grads own = model__summand(a->grads, i);
        const struct model_range r = model__part(a->grads, i, a->x.dim[0]);
        for (int64_t lo = r.lo; lo < r.hi; lo += LORA_ROWS)
            TRY(linear_bwd_block(m, a, w, lo, r.hi - lo < LORA_ROWS ? r.hi - lo : LORA_ROWS, lo > r.lo));
        if (r.hi > r.lo) TRY(model__add_adapter_grads(m, g, &own));
    }
    return 0;
}

static struct tensor shaped(float *at, const struct model_group *g) {
    return g->k ? tensor_2d(at, DT_F32, g->n, g->k) : tensor_1d(at, DT_F32, g->n);
}

/* Where a value head's group is in the flat arrays. */
static int64_t head_offset(const struct model *m, const struct model_group *g) {
    return m->lora ? m->lora->params[m->lora->n_sides + (g == m->g_head_bias)].offset : g->offset;
}

struct tensor model__grad(const struct model *m, const struct model_grads *g, const struct model_group *group) {
    if (!group) return TENSOR_NONE;
    const int64_t offset = m->lora ? head_offset(m, group) : group->offset;
    CHECK(offset >= g->bucket.lo && offset + model__group_count(group) <= g->bucket.hi);
    return shaped(g->at + model__place_in(g, offset), group);
}

struct tensor model__vec_grad(const struct model *m, const struct model_grads *g, const struct model_group *group) {
    if (!group || !m->lora) return model__grad(m, g, group);
    return tensor_1d(m->lora->vec, DT_F32, group->n);
}
