/* ops_mla.h - multi-head latent attention for the harness: its parts joined into heads.
 *
 * A case has `hq` heads of `n` elements without rope and `k` with, values of `dim`. */
#ifndef VERLC_OPS_MLA_H
#define VERLC_OPS_MLA_H

#include "ops/ops_test.h"

enum { MLA_RANK = 5 /* columns of the latent in front of those with rope */ };

static inline void mla_setup(struct run *r) {
    const struct op_shape *s = r->s;
    add_in(r, "q", shape_2d(r->act, r->rows, s->hq * (s->n + s->k)), true, 1, 0);
    add_in(r, "latent", shape_2d(DT_F32, r->rows, MLA_RANK + s->k), true, 1, 0);
    add_in(r, "kv", shape_2d(r->act, r->rows, s->hq * (s->n + s->dim)), true, 1, 0);
    add_gout(r, "dqkv", shape_2d(r->act, r->rows, 3 * s->hq * (s->n + s->k)), true);
}
static inline struct mla_join_args mla_args(struct run *r) {
    return (struct mla_join_args){.n_heads = r->s->hq, .nope = r->s->n, .rope = r->s->k, .v = r->s->dim};
}
static inline int mla_fwd(struct run *r) {
    struct mla_join_args a = mla_args(r);
    const int64_t h = r->s->hq;
    a.q = up(r, &r->in[0]);
    a.latent = up(r, &r->in[1]);
    a.kv = up(r, &r->in[2]);
    a.qkv = dev_new(r, shape_2d(r->act, r->rows, 3 * h * (a.nope + a.rope)), true);
    const struct tensor less = dev_new(r, shape_2d(DT_F32, r->rows, h * a.nope), true),
                        more = dev_new(r, shape_2d(r->act, r->rows, h * (a.nope + a.rope + 3)), true);
    const struct tensor kept = up(r, &r->in[0]);
    TRY(dev_mla_join_fwd(r->d, &a));
    TRY(dev_resize_heads(r->d, less, a.q, h, false));
    TRY(dev_resize_heads(r->d, more, a.q, h, false));
    TRY(dev_resize_heads(r->d, kept, less, h, true));
    down(r, "qkv", a.qkv, true, TOL_EXACT);
    down(r, "shorter heads", less, true, TOL_EXACT);
    down(r, "longer heads", more, true, TOL_EXACT);
    down(r, "kept", kept, true, TOL_EXACT);
    return 0;
}
static inline int mla_bwd(struct run *r) {
    struct mla_join_args a = mla_args(r);
    a.q = dev_new(r, slot_shape(&r->in[0]), true);
    a.kv = dev_new(r, slot_shape(&r->in[2]), true);
    a.qkv = up(r, &r->gout[0]);
    a.latent = dev_new(r, shape_2d(r->act, r->rows, MLA_RANK + a.rope), true);
    TRY(dev_zero(r->d, a.latent.data, (size_t)tensor_count(a.latent) * dtype_size(r->act)));
    TRY(dev_mla_join_bwd(r->d, &a));
    down_grad(r, 0, a.q, TOL_EXACT);
    down_grad(r, 1, a.latent, TOL_SUM);
    down_grad(r, 2, a.kv, TOL_EXACT);
    return 0;
}

static const struct op_shape shapes_mla[] = {{.rows = 1, .hq = 1, .n = 1, .k = 2, .dim = 1},
                                             {.rows = 7, .hq = 3, .n = 6, .k = 4, .dim = 5},
                                             {.rows = 33, .hq = 4, .n = 16, .k = 8, .dim = 24},
                                             {.rows = 65, .hq = 2, .n = 128, .k = 64, .dim = 128}};

#endif
