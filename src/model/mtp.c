/* mtp.c - the layer for multi-token prediction around its layer (families.h: struct model_mtp_row): its input, its head, and
 * backward. What it has in common with a layer of the model is forward.c's and backward.c's.
 *
 * Of a row t it reads the state that the head reads, and the embedding of token t + 1; both are normalised, put side by side and
 * projected. Its log-probs are those of token t + 2. Its loss leaves the head's weights alone, as verl's does.
 * Invariant: as in the rest of the model, a row depends on its own sequence alone. */
#include "model/model_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "model/forward.h"

#include <stdlib.h>

void model__mtp_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act) {
    const int64_t rows = a->max_rows, h = c->hidden;
    const bool train = a->keep.train;
    struct model_mtp_acts *const t = &a->mtp;
    t->hidden = model__take2(m, act, rows, h);
    t->in = model__take2(m, DT_F32, train ? 2 * rows : rows, h);
    t->normed = model__take2(m, act, 2 * rows, h);
    t->joined = model__take2(m, act, rows, 2 * h);
    t->pair = model__take1(m, DT_I32, 2 * rows);
    t->logp = model__take1(m, DT_F32, rows);
    t->lse = model__take1(m, DT_F32, rows);
    if (!train) return;
    t->hidden_rstd = model__take1(m, DT_F32, rows);
    t->in_rstd = model__take1(m, DT_F32, 2 * rows);
    t->djoined = model__take2(m, act, rows, 2 * h);
    t->unpair = model__take1(m, DT_I32, 2 * rows);
    t->dnormed = model__take2(m, act, 2 * rows, h);
    t->din = model__take2(m, DT_F32, 2 * rows, h);
    t->rows = model__take2(m, DT_F32, 2 * rows, h);
    t->ids = model__take1(m, DT_I32, 2 * rows);
}

void model__mtp_free(struct model_acts *a) { free(a->mtp.host); }

int model_mtp_begin(struct model *m, struct model_acts *a) {
    const int64_t rows = a->max_rows;
    const int token = m->cfg.family->mtp->token_first ? 0 : 1;
    struct model_mtp_acts *const t = &a->mtp;
    const size_t bytes = (size_t)(2 * rows) * sizeof *t->host;
    if (!t->host) {
        t->host = xmalloc(2 * bytes);
        int32_t *const pair = t->host, *const unpair = t->host + 2 * rows;
        for (int64_t i = 0; i < rows; i++) {
            unpair[i] = (int32_t)(2 * i + !token);
            unpair[rows + i] = (int32_t)(2 * i + token);
            pair[unpair[i]] = (int32_t)i;
            pair[unpair[rows + i]] = (int32_t)(rows + i);
        }
    }
    TRY(dev_copy_in(m->dev, t->pair.data, t->host, bytes));
    return a->keep.train ? dev_copy_in(m->dev, t->unpair.data, t->host + 2 * rows, bytes) : 0;
}

/* One of the two inputs, from row `at` of in and normed on. */
static int normalise(struct model *m, struct model_acts *a, int64_t n, bool token) {
    struct model_mtp_acts *const t = &a->mtp;
    const int64_t at = token ? a->max_rows : 0;
    const struct tensor in = tensor_rows(t->in, a->keep.train ? at : 0, n);
    const struct tensor rstd = a->keep.train ? tensor_rows(t->in_rstd, at, n) : TENSOR_NONE;
    return model__norm(m, tensor_rows(t->normed, at, n), rstd, in, (token ? m->mtp.token_norm : m->mtp.hidden_norm)->vec,
                       TENSOR_NONE);
}

int model_mtp_forward(struct model *m, const struct model_batch *of, struct model_acts *a, struct tensor hidden) {
    struct dev *const d = m->dev;
    struct model_batch own = *of;
    const struct model_batch *const b = &own;
    own.routes = TENSOR_NONE; /* they are of the model's layers */
    own.routes_kept = false;
    struct model_mtp_acts *const t = &a->mtp;
    const int64_t n = b->n_rows, h = m->cfg.hidden, l = model_mtp_layer(&m->cfg);
    const bool train = a->keep.train;
    CHECK(m->cfg.mtp && (n == a->n_rows || !train));
    if (!hidden.data) {
        CHECK(n == a->n_rows);
        hidden = model__top(t->hidden, n);
        TRY(model__norm(m, hidden, train ? model__top(t->hidden_rstd, n) : TENSOR_NONE, model__top(a->x[a->n_layers], n),
                        m->final_norm, TENSOR_NONE));
    }
    a->n_rows = n;
    TRY(dev_cast(d, model__top(t->in, n), hidden));
    TRY(normalise(m, a, n, false));
    const struct tensor e = tensor_rows(t->in, train ? a->max_rows : 0, n);
    TRY(dev_embed_fwd(d, e, b->ids, m->embed));
    if (m->cfg.embed_scale != 1.0f) TRY(dev_axpby(d, e, model__embed_scale(m), e, 0));
    TRY(normalise(m, a, n, true));
    TRY(dev_gather_rows(d, tensor_2d(t->joined.data, m->act, 2 * n, h), t->normed, model__top(t->pair, 2 * n)));
    const struct linear_args proj = {m->mtp.proj, model__top(a->x[l], n), model__top(t->joined, n), .base = b->no_adapter};
    TRY(model__linear(m, &proj));
    TRY(model__attention_stage(m, b, a, l));
    TRY(model__mlp_stage(m, b, a, l));
    return model__mlp_output(m, b, a, l);
}

/* Norm of rows idx after the layer; rstd may be absent. */
static int out_norm(struct model *m, struct model_acts *a, struct tensor idx, struct tensor out, struct tensor rstd) {
    const struct tensor x = a->x[model_mtp_layer(&m->cfg) + 1];
    for (int64_t lo = 0; lo < idx.dim[0]; lo += a->head_rows) {
        const int64_t n = idx.dim[0] - lo < a->head_rows ? idx.dim[0] - lo : a->head_rows;
        TRY(model__norm_rows(m, a,
                             &(struct norm_rows){x, m->mtp.norm->vec, tensor_rows(idx, lo, n), tensor_rows(out, lo, n),
                                                 rstd.data ? tensor_rows(rstd, lo, n) : TENSOR_NONE}));
    }
    return 0;
}

int model_mtp_hidden(struct model *m, struct model_acts *a, struct tensor idx, struct tensor out) {
    return out_norm(m, a, idx, out, TENSOR_NONE);
}

/* ---- its head ---- */

/* The n rows of head.row, normalised into head.xn. */
static int head_norm(struct model *m, struct model_acts *a, int64_t n) {
    return out_norm(m, a, model__top(a->head.row, n), model__top(a->head.xn, n), model__top(a->head.rstd, n));
}

static struct lmhead_args head_args(const struct model *m, const struct model_acts *a, int64_t lo, int64_t n) {
    struct lmhead_args h = model__head_args(m, a, lo, n, false);
    h.logp = tensor_rows(a->mtp.logp, lo, n);
    h.lse = tensor_rows(a->mtp.lse, lo, n);
    return h;
}

int model_mtp_logp(struct model *m, struct model_acts *a, const struct model_logp_args *l) {
    CHECK(!l->entropy && !l->sum_pi_sq && !l->list);
    TRY(model__check_logp(m, a, l));
    for (int64_t lo = 0; lo < l->n; lo += a->head_rows) {
        const int64_t n = l->n - lo < a->head_rows ? l->n - lo : a->head_rows;
        const struct lmhead_args h = head_args(m, a, lo, n);
        TRY(model__head_copy(m, a, l, lo, n));
        TRY(head_norm(m, a, n));
        TRY(dev_lmhead_fwd(m->dev, &h));
    }
    return dev_copy_out(m->dev, l->logp, a->mtp.logp.data, (size_t)l->n * sizeof(float));
}

/* ---- backward ---- */

/* a->dx: of the residual stream after the layer. */
static int head_backward(struct model *m, struct model_acts *a, const struct model_logp_args *l, const float *dlogp,
                         const struct model_grads *g) {
    struct dev *const d = m->dev;
    const int64_t n = l->n;
    const struct tensor dxn = model__top(a->dxn, n), d_logp = model__top(a->head.dlogp, n), dx = model__top(a->dx, a->n_rows);
    TRY(dev_zero(d, dx.data, (size_t)tensor_count(dx) * sizeof(float)));
    if (n == 0) return 0; /* other ranks have rows with a loss */
    TRY(model__head_copy(m, a, l, 0, n));
    TRY(head_norm(m, a, n));
    const struct lmhead_args h = head_args(m, a, 0, n);
    TRY(dev_copy_in(d, d_logp.data, dlogp, (size_t)n * sizeof(float)));
    TRY(dev_lmhead_bwd(d, &h, &(struct lmhead_bwd_args){d_logp, TENSOR_NONE, dxn, TENSOR_NONE, false}));
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_grads own = model__summand(g, i);
        const struct model_range r = model__part_outputs(g, i, l->row, n);
        TRY(model__norm_rows_backward(m, a,
                                      &(struct norm_rows_backward){.x = a->x[model_mtp_layer(&m->cfg) + 1],
                                                                   .w = m->mtp.norm->vec,
                                                                   .idx = model__range(a->head.row, r),
                                                                   .rstd = model__range(a->head.rstd, r),
                                                                   .dy = model__range(dxn, r),
                                                                   .dx_all = dx,
                                                                   .dw = model__vec_grad(m, &own, m->mtp.norm)}));
    }
    return 0;
}

/* From the gradient of joined to those of the states and the embeddings. */
static int input_backward(struct model *m, struct model_acts *a, const struct model_grads *g) {
    struct model_mtp_acts *const t = &a->mtp;
    const int64_t n = a->n_rows, h = m->cfg.hidden;
    for (int token = 0; token < 2; token++) {
        const int64_t at = token ? a->max_rows : 0;
        const struct model_group *const norm = token ? m->mtp.token_norm : m->mtp.hidden_norm;
        const struct tensor dy = tensor_rows(t->dnormed, at, n), dx = tensor_rows(t->din, at, n);
        TRY(dev_gather_rows(m->dev, dy, tensor_2d(t->djoined.data, m->act, 2 * n, h), tensor_rows(t->unpair, at, n)));
        TRY(dev_zero(m->dev, dx.data, (size_t)tensor_count(dx) * sizeof(float)));
        TRY(model__norm_backward(m, g, norm,
                                 &(struct rmsnorm_bwd_args){.dx = dx,
                                                            .dy = dy,
                                                            .x = tensor_rows(t->in, at, n),
                                                            .rstd = tensor_rows(t->in_rstd, at, n),
                                                            .kind = m->cfg.family->norm}));
    }
    return 0;
}

/* No token has a loss here. */
static int no_loss(struct model *m, struct model_acts *a, const struct model_grads *g) {
    const struct tensor din = a->mtp.din;
    for (int i = 0; i < (g->stride ? model__n_parts(g) : 1) && !g->add; i++) {
        const struct model_grads own = model__summand(g, i);
        for (const struct model_group *x = m->mtp.first; x <= m->mtp.last; x++)
            TRY(dev_zero(m->dev, model__grad(m, &own, x).data, (size_t)model__group_count(x) * sizeof(float)));
    }
    return dev_zero(m->dev, din.data, (size_t)tensor_count(din) * sizeof(float));
}

int model__mtp_backward(struct model *m, struct model_acts *a, const struct model_backward_args *args, struct model_grads *g) {
    const struct model_logp_args *const l = args->mtp.logp;
    const int64_t layer = model_mtp_layer(&m->cfg), n = a->n_rows;
    if (!m->cfg.mtp) return 0;
    CHECK(!m->lora);
    a->mtp.live = l && (l->n > 0 || args->batch->context);
    TRY(model__bucket_begin(m, g, m->mtp.first, m->mtp.last));
    if (!a->mtp.live) {
        TRY(no_loss(m, a, g));
    } else {
        TRY(model__zero_norms(m, g, m->mtp.first, m->mtp.last));
        TRY(head_backward(m, a, l, args->mtp.dlogp, g));
        if (m->act != DT_F32 && !m->layers[layer].mlp_post_norm)
            TRY(dev_cast(m->dev, model__top(a->dx_act, n), model__top(a->dx, n)));
        TRY(model__layer_backward(m, args->mtp.batch, a, layer, g));
        TRY(model__linear_bwd(m, &(struct linear_bwd_args){m->mtp.proj, model__top(a->mtp.djoined, n), model__top(a->dx_act, n),
                                                           model__top(a->mtp.joined, n), g, false}));
        TRY(input_backward(m, a, g));
    }
    if (!m->cfg.mtp_detached) /* the model's own come later */
        TRY(dev_copy(m->dev, (int32_t *)a->mtp.ids.data + n, args->mtp.batch ? args->mtp.batch->ids.data : args->batch->ids.data,
                     (size_t)n * sizeof(int32_t)));
    return model__bucket_end(g);
}

int model__mtp_norm_backward(struct model *m, struct model_acts *a, struct model_range rows, struct tensor dnorm) {
    struct model_mtp_acts *const t = &a->mtp;
    if (!m->cfg.mtp || m->cfg.mtp_detached || !t->live) return 0;
    const struct tensor dy = model__range(t->dnormed, rows);
    TRY(dev_cast(m->dev, dy, model__range(t->din, rows))); /* rounded, as every gradient that an op reads */
    return dev_rmsnorm_bwd(m->dev, &(struct rmsnorm_bwd_args){.dx = model__range(a->dx, rows),
                                                              .dw = dnorm,
                                                              .dy = dy,
                                                              .x = model__range(a->x[a->n_layers], rows),
                                                              .w = m->final_norm,
                                                              .rstd = model__range(t->hidden_rstd, rows),
                                                              .kind = m->cfg.family->norm});
}

int model__mtp_rows(struct model *m, struct model_acts *a, struct tensor *ids, struct tensor *rows) {
    struct model_mtp_acts *const t = &a->mtp;
    const int64_t n = a->n_rows, h = m->cfg.hidden;
    const size_t bytes = (size_t)(n * h) * sizeof(float);
    if (!m->cfg.mtp || m->cfg.mtp_detached) return 0;
    TRY(dev_copy(m->dev, t->rows.data, rows->data, bytes));
    TRY(dev_copy(m->dev, (char *)t->rows.data + bytes, tensor_rows(t->din, a->max_rows, n).data, bytes));
    TRY(dev_copy(m->dev, t->ids.data, ids->data, (size_t)n * sizeof(int32_t)));
    *ids = model__top(t->ids, 2 * n);
    *rows = model__top(t->rows, 2 * n);
    return 0;
}
