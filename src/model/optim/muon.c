/* muon.c - Muon: the momentum of a weight matrix, made orthogonal by Newton-Schulz iterations, is its
 * update (K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks", 2024;
 * torch.optim.Muon). All GEMMs are the device's, in the compute dtype with f32 sums, so
 * nothing here is a kernel.
 * Invariant: the update of a matrix depends on that matrix alone. */
#include "model/optim/optimizer_int.h"

#include "base/err.h"

#include <math.h>

static int64_t short_side(const struct optim_run *r) { return r->rows < r->cols ? r->rows : r->cols; }
static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

void optim__muon_layout(struct optim *o, struct dev *dev, enum dtype act, struct arena *a) {
    int64_t n = 0, side = 0;
    o->s.pack_bytes = 0;
    for (int64_t i = 0; i < o->n_runs; i++) {
        const struct optim_run *r = &o->runs[i];
        if (r->rule != OPTIM_MUON) continue;
        const int64_t k = short_side(r);
        if (r->n > n) n = r->n;
        if (k > side) side = k;
        o->s.pack_bytes = larger(o->s.pack_bytes, dev_weight_bytes(dev, act, r->rows, r->cols));
        o->s.pack_bytes = larger(o->s.pack_bytes, dev_weight_bytes(dev, act, k, k));
    }
    if (n == 0) return;
    const size_t gram = (size_t)(side * side);
    o->s.x = arena_take(a, (size_t)n * 4);
    o->s.act = arena_take(a, (size_t)n * dtype_size(act));
    o->s.pack = arena_take(a, o->s.pack_bytes);
    o->s.gram = arena_take(a, gram * 4);
    o->s.gram2 = arena_take(a, gram * 4);
    o->s.gram_act = arena_take(a, gram * dtype_size(act));
}

/* One iteration: X = a X + (b G + c G^2) X with G = X X^T, or from the right with G = X^T X where X is tall. */
static int iterate(struct optim *o, const struct optim_run *r, struct model *m) {
    static const float a = 3.4445f, b = -4.7750f, c = 2.0315f; /* Jordan's quintic */
    struct dev *d = m->dev;
    const bool wide = r->rows <= r->cols;
    const int64_t k = short_side(r);
    const struct tensor x = tensor_2d(o->s.x, DT_F32, r->rows, r->cols), xa = tensor_2d(o->s.act, m->act, r->rows, r->cols);
    const struct tensor g = tensor_2d(o->s.gram, DT_F32, k, k), g2 = tensor_2d(o->s.gram2, DT_F32, k, k),
                        ga = tensor_2d(o->s.gram_act, m->act, k, k);
    const struct weight wx = {o->s.pack, m->act, r->rows, r->cols, 0, 0}, wg = {o->s.pack, m->act, k, k, 0, 0};
    TRY(dev_cast(d, xa, x));
    if (wide) {
        TRY(dev_weight_pack(d, wx, xa));
        TRY(dev_matmul_fwd(d, g, xa, wx, TENSOR_NONE, false));
    } else {
        TRY(dev_matmul_dw(d, g, TENSOR_NONE, xa, xa, false));
    }
    TRY(dev_cast(d, ga, g));
    TRY(dev_weight_pack(d, wg, ga));
    TRY(dev_matmul_fwd(d, g2, ga, wg, TENSOR_NONE, false)); /* G is symmetric */
    TRY(dev_axpby(d, g, c, g2, b));
    TRY(dev_cast(d, ga, g));
    TRY(dev_axpby(d, x, a, x, 0));
    if (wide) return dev_matmul_dw(d, x, TENSOR_NONE, ga, xa, true);
    TRY(dev_weight_pack(d, wg, ga));
    return dev_matmul_fwd(d, x, xa, wg, TENSOR_NONE, true);
}

/* o->s.x becomes close to U V^T of its singular value decomposition. */
static int orthogonalize(struct optim *o, const struct optim_run *r, const struct optim_run_args *a) {
    const struct tensor x = tensor_1d(o->s.x, DT_F32, r->n);
    double sum = 0;
    TRY(optim__sumsq(o, a->m, r, x));
    for (int64_t i = 0; i < r->n_seg; i++) sum += o->sums[r->seg + i];
    TRY(dev_axpby(a->m->dev, x, (float)(1 / fmax(sqrt(sum), 1e-7)), x, 0)); /* singular values to at most 1 */
    for (int64_t i = 0; i < a->c->ns_steps; i++) TRY(iterate(o, r, a->m));
    return 0;
}

int optim__muon_run(struct optim *o, const struct optim_run *r, const struct optim_run_args *a) {
    struct dev *d = a->m->dev;
    const double rows = (double)r->rows, cols = (double)r->cols, mu = a->c->momentum;
    const struct tensor p = tensor_1d(a->m->master + r->at, DT_F32, r->n), g = tensor_1d(a->grads + r->at, DT_F32, r->n),
                        buf = tensor_1d(o->m + r->m_at, DT_F32, r->n), x = tensor_1d(o->s.x, DT_F32, r->n);
    const float take = (float)(1 - mu) * a->scale;
    TRY(dev_axpby(d, buf, take, g, (float)mu));
    TRY(dev_axpby(d, x, 1, a->c->nesterov ? g : buf, 0));
    if (a->c->nesterov) TRY(dev_axpby(d, x, (float)mu, buf, take));
    TRY(orthogonalize(o, r, a));
    /* the update's root mean square: Moonlight's (Liu et al., 2025) is that of AdamW, so one lr serves both */
    const double size = a->c->muon_original_lr ? sqrt(fmax(1, rows / cols)) : 0.2 * sqrt(fmax(rows, cols));
    return dev_axpby(d, p, (float)(-a->lr * size), x, (float)(1 - a->lr * a->c->weight_decay));
}
