/* mla.c - multi-head latent attention (DeepSeek-V2, section 2.1) in the place of a layer's q, k and v; forward and backward.
 *
 * K and V are made of a latent of each token by the same GEMMs in training and in rollout, and cached as they are, values with
 * zeros behind them up to the size of a key: attention itself is that of other families. Norms around it, its last matrix and the
 * residual stream are forward.c's and backward.c's.
 * Invariant: a row reads its own latent alone, whatever rows come together. */
#include "model/model_int.h"

#include "base/err.h"

static const float EPS = 1e-6f; /* of the norms of both latents, whatever config.json says of others */

/* ---- buffers ---- */

void model__mla_layout(struct model_mla_stage *s, struct arena *m, const struct model_config *c, enum dtype act, int64_t rows,
                       bool train) {
    const int64_t rq = c->mla.q_rank, r = c->mla.kv_rank;
    if (!r) return;
    if (rq) {
        s->qa = model__take2(m, DT_F32, rows, rq);
        s->qan = model__take2(m, act, rows, rq);
    }
    s->q = model__take2(m, act, rows, model_dim(c, MODEL_Q));
    s->latent = model__take2(m, DT_F32, rows, r + c->mla.rope);
    s->c = model__take2(m, DT_F32, rows, r);
    s->cn = model__take2(m, act, rows, r);
    s->kv = model__take2(m, act, rows, model_dim(c, MODEL_MLA_KV));
    s->y = model__take2(m, act, rows, model_dim(c, MODEL_MLA_V));
    if (!train) return;
    if (rq) s->qa_rstd = model__take1(m, DT_F32, rows);
    s->c_rstd = model__take1(m, DT_F32, rows);
}

void model__mla_backward_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act) {
    const int64_t rows = a->max_rows, rq = c->mla.q_rank, r = c->mla.kv_rank;
    if (!r) return;
    if (rq) {
        a->mla.dqan = model__take2(m, act, rows, rq);
        a->mla.dqa = model__take2(m, DT_F32, rows, rq);
    }
    a->mla.dq = model__take2(m, act, rows, model_dim(c, MODEL_Q));
    a->mla.dlatent = model__take2(m, act, rows, r + c->mla.rope);
    a->mla.dc = model__take2(m, DT_F32, rows, r);
    a->mla.dcn = model__take2(m, act, rows, r);
    a->mla.dkv = model__take2(m, act, rows, model_dim(c, MODEL_MLA_KV));
    a->mla.dy = model__take2(m, act, rows, model_dim(c, MODEL_MLA_V));
    a->mla.dx = model__take2(m, DT_F32, rows, c->hidden);
}

static struct model_mla_stage stage_of(const struct model_acts *a, int64_t l, int64_t n) {
    const struct model_mla_stage *const s = &a->stages[l].mla;
    return (struct model_mla_stage){.qa = model__top(s->qa, n),
                                    .qa_rstd = model__top(s->qa_rstd, n),
                                    .qan = model__top(s->qan, n),
                                    .q = model__top(s->q, n),
                                    .latent = model__top(s->latent, n),
                                    .c = model__top(s->c, n),
                                    .c_rstd = model__top(s->c_rstd, n),
                                    .cn = model__top(s->cn, n),
                                    .kv = model__top(s->kv, n),
                                    .y = model__top(s->y, n)};
}

static struct mla_join_args join_of(const struct model *m, struct tensor q, struct tensor latent, struct tensor kv,
                                    struct tensor qkv) {
    const struct model_config *const c = &m->cfg;
    return (struct mla_join_args){c->n_q_heads, c->mla.nope, c->mla.rope, c->mla.v, q, latent, kv, qkv};
}

/* ---- forward ---- */

static int latent_norm(struct model *m, struct tensor y, struct tensor rstd, struct tensor x, const struct model_group *w) {
    return dev_rmsnorm_fwd(
        m->dev, &(struct rmsnorm_args){.y = y, .rstd = rstd, .x = x, .w = w->vec, .eps = EPS, .kind = m->cfg.family->norm});
}

int model__mla_forward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const bool base = b->no_adapter;
    const struct model_mla_stage s = stage_of(a, l, b->n_rows);
    const struct tensor xn = model__top(a->stages[l].xn1, b->n_rows);
    struct qkv_args qkv;
    struct attn_args attn;
    model__attn_args(m, b, a, l, &qkv, &attn);
    const struct mla_join_args join = join_of(m, s.q, s.latent, s.kv, qkv.qkv);
    const struct tensor att = b->context ? model__att_rows(&a->stages[l], b->n_rows) : attn.out;
    if (y->mla_q_a) {
        TRY(model__linear(m, &(struct linear_args){y->mla_q_a, s.qa, xn, .base = base}));
        TRY(latent_norm(m, s.qan, s.qa_rstd, s.qa, y->mla_q_norm));
    }
    TRY(model__linear(m, &(struct linear_args){y->mla_q, s.q, y->mla_q_a ? s.qan : xn, .base = base}));
    TRY(model__linear(m, &(struct linear_args){y->mla_kv_a, s.latent, xn, .base = base}));
    TRY(dev_resize_heads(d, s.c, s.latent, 1, false));
    TRY(latent_norm(m, s.cn, s.c_rstd, s.c, y->mla_kv_norm));
    TRY(model__linear(m, &(struct linear_args){y->mla_kv, s.kv, s.cn, .base = base}));
    TRY(dev_mla_join_fwd(d, &join));
    if (b->own_keys && !a->keep.train) {
        TRY(dev_qkv_attn_fwd(d, &qkv, &attn));
    } else {
        TRY(dev_qkv_fwd(d, &qkv));
        TRY(b->context ? model__context_attn_fwd(b, &attn, NULL, att) : dev_attn_fwd(d, &attn));
    }
    const struct tensor out = m->tp ? model__tp_part(m, MODEL_TP_HEADS, b->n_rows) : s.y;
    return dev_resize_heads(d, out, att, m->cfg.n_q_heads, false);
}

/* ---- backward ---- */

/* A latent before its norm, 1/rms, the norm's weight. */
struct normed {
    struct tensor x, rstd;
    const struct model_group *w;
};
/* dx (T, r) f32 = gradient of the latent. */
static int latent_norm_backward(struct model *m, const struct model_grads *g, const struct normed *x, struct tensor dx,
                                struct tensor dy) {
    TRY(dev_zero(m->dev, dx.data, (size_t)tensor_count(dx) * sizeof(float)));
    return model__norm_backward(
        m, g, x->w, &(struct rmsnorm_bwd_args){.dx = dx, .dy = dy, .x = x->x, .rstd = x->rstd, .kind = m->cfg.family->norm});
}

/* From the gradients of latent and queries to a->mla.dx. */
static int projections_backward(struct model *m, struct model_acts *a, int64_t l, int64_t n, const struct model_grads *g) {
    const struct model_layer *y = &m->layers[l];
    const struct model_mla_stage s = stage_of(a, l, n);
    const struct tensor xn = model__top(a->stages[l].xn1, n), dx = model__top(a->mla.dx, n), dq = model__top(a->mla.dq, n);
    const struct tensor dqa = model__top(a->mla.dqa, n), dqan = model__top(a->mla.dqan, n);
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->mla_kv_a, dx, model__top(a->mla.dlatent, n), xn, g, false}));
    if (!y->mla_q_a) return model__linear_bwd(m, &(struct linear_bwd_args){y->mla_q, dx, dq, xn, g, true});
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->mla_q, dqan, dq, s.qan, g, false}));
    TRY(latent_norm_backward(m, g, &(struct normed){s.qa, s.qa_rstd, y->mla_q_norm}, dqa, dqan));
    TRY(dev_resize_heads(m->dev, dqan, dqa, 1, false)); /* rounded */
    return model__linear_bwd(m, &(struct linear_bwd_args){y->mla_q_a, dx, dqan, xn, g, true});
}

int model__mla_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l, struct tensor dy,
                        const struct model_grads *g) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const int64_t n = b->n_rows;
    const struct model_mla_stage s = stage_of(a, l, n);
    const struct tensor datt = b->context ? model__context_datt(b) : model__top(a->datt, n), dq = model__top(a->dq, n),
                        dqkv = model__top(a->dqkv, n);
    const struct tensor dkv = model__top(a->mla.dkv, n), dcn = model__top(a->mla.dcn, n), dc = model__top(a->mla.dc, n);
    const struct tensor dlatent = model__top(a->mla.dlatent, n), dout = model__top(a->mla.dy, n);
    const struct mla_join_args join = join_of(m, model__top(a->mla.dq, n), dlatent, dkv, dqkv);
    struct qkv_bwd_args dqkv_args = {.dq = dq, .dk = a->dk, .dv = a->dv, .dqkv = dqkv};
    struct qkv_args qkv;
    struct attn_args attn;
    model__attn_args(m, b, a, l, &qkv, &attn);
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->o, dout, dy, s.y, g, false}));
    TRY(dev_resize_heads(d, datt, dout, m->cfg.n_q_heads, false));
    if (b->context) dqkv_args.dk.dim[2] = dqkv_args.dv.dim[2] = n;
    const struct context_bwd_args rows = {&attn, NULL, TENSOR_NONE, a->datt, &dqkv_args};
    TRY(b->context ? model__context_attn_bwd(b, &rows) : dev_attn_bwd(d, &attn, datt, dq, a->dk, a->dv));
    TRY(dev_qkv_bwd(d, &qkv, &dqkv_args));
    TRY(dev_mla_join_bwd(d, &join));
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->mla_kv, dcn, dkv, s.cn, g, false}));
    TRY(latent_norm_backward(m, g, &(struct normed){s.c, s.c_rstd, y->mla_kv_norm}, dc, dcn));
    TRY(dev_resize_heads(d, dlatent, dc, 1, true)); /* in front of what join wrote */
    return projections_backward(m, a, l, n, g);
}
