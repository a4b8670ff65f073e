/* backward.c - the mirror of forward.c: from d loss / d log-prob to the
 * gradient of every parameter that is trained, bucket by bucket where the sink of
 * the call says: in place, in a flat f32 array that the first call of a step
 * writes and the others add to, or elsewhere.
 *
 * The gradient of the residual stream (a->dx, f32) is carried in place from the
 * last layer to the first; each block adds its own part to it.
 * Invariant: nothing here divides or normalises; splitting a batch into several
 * calls changes the sums by f32 rounding only. */
#include "model/model_int.h"

#include "base/err.h"
#include "model/forward.h"
#include "model/parallel/parameter_segments.h"
#include "model/parallel/weight_streaming.h"

/* ---- buckets ---- */

/* hole: elements of it that are not there. */
static int open_bucket(struct model *m, struct model_grads *g, struct model_range bucket, struct model_range hole) {
    const struct model_grad_sink *s = g->sink;
    g->bucket = bucket;
    g->hole = hole;
    g->add = s->add;
    g->stride = s->begin && s->separate ? model_summand_stride(bucket) : 0;
    if (bucket.lo == bucket.hi) return 0; /* without an adapter */
    if (s->begin) TRY(s->begin(s->ctx, bucket, &g->at));
    else g->at = s->flat + bucket.lo;
    const int64_t n = bucket.hi - bucket.lo - (hole.hi - hole.lo);
    const size_t bytes = (size_t)(n + (g->stride ? (model__n_parts(g) - 1) * g->stride : 0)) * sizeof(float);
    return m->lora && !g->add && n > 0 ? dev_zero(m->dev, g->at, bytes) : 0;
}

int model__bucket_begin(struct model *m, struct model_grads *g, const struct model_group *from, const struct model_group *to) {
    return open_bucket(m, g, model__trained(m, from, to), (struct model_range){0});
}

/* Of a layer: where ranks have its experts, their gradients are no part of it. */
static int layer_begin(struct model *m, struct model_grads *g, int64_t l) {
    struct model_range of[MODEL_LAYER_BUCKETS], hole = {0};
    if (model_layer_buckets(m, m->shard, l, of) > 1) hole = (struct model_range){of[0].hi, of[1].lo};
    return open_bucket(m, g, model__trained(m, m->layers[l].first, m->layers[l].last), hole);
}

int model__bucket_end(struct model_grads *g) {
    if (!g->sink->end || g->bucket.lo == g->bucket.hi) return 0;
    return g->sink->end(g->sink->ctx, g->bucket);
}

int model__zero_norms(struct model *m, const struct model_grads *g, const struct model_group *first,
                      const struct model_group *last) {
    for (int i = 0; i < (g->stride ? model__n_parts(g) : 1) && !g->add && !m->lora; i++) {
        const struct model_grads own = model__summand(g, i);
        for (const struct model_group *x = first; x <= last; x++)
            if (model_role_adds(x->role)) TRY(dev_zero(m->dev, model__grad(m, &own, x).data, (size_t)x->n * sizeof(float)));
    }
    return 0;
}

struct model_range model__part_outputs(const struct model_grads *g, int i, const int32_t *row, int64_t n) {
    struct model_range r = {0, 0};
    if (!g->parts) return (struct model_range){0, n};
    while (r.lo < n && row[r.lo] < g->parts->cut[i]) r.lo++;
    for (r.hi = r.lo; r.hi < n && row[r.hi] < g->parts->cut[i + 1]; r.hi++) CHECK(r.hi == 0 || row[r.hi - 1] < row[r.hi]);
    return r;
}

/* The rows of the token embedding, of all parts together: onto the table in place, or to the sink. */
static int embedding_backward(struct model *m, const struct model_batch *b, struct model_acts *a, const struct model_grad_sink *s) {
    struct tensor ids = b->ids, dx = model__top(a->dx, b->n_rows);
    TRY(model__mtp_rows(m, a, &ids, &dx));
    if (m->cfg.embed_scale != 1.0f) TRY(dev_axpby(m->dev, dx, model__embed_scale(m), dx, 0));
    if (b->context) TRY(model__context_rows(b, &ids, &dx));
    const struct model_range table = {m->g_embed->offset, m->g_embed->offset + model__group_count(m->g_embed)};
    if (s->begin) return s->rows(s->ctx, table, ids, dx);
    const struct tensor dw = model__flat(s->flat, m->g_embed);
    if (!s->add && m->g_embed != m->g_head) TRY(dev_zero(m->dev, dw.data, (size_t)tensor_count(dw) * sizeof(float)));
    return dev_embed_bwd(m->dev, dw, ids, dx);
}

/* ---- the pass ---- */

int model__norm_rows_backward(struct model *m, struct model_acts *a, const struct norm_rows_backward *r) {
    struct dev *d = m->dev;
    for (int64_t lo = 0, n = r->idx.dim[0]; lo < n; lo += a->head_rows) {
        const int64_t k = n - lo < a->head_rows ? n - lo : a->head_rows;
        const struct tensor x = model__top(a->head.x, k), dx = model__top(a->head.dx, k), row = tensor_rows(r->idx, lo, k);
        TRY(dev_gather_rows(d, x, model__top(r->x, a->n_rows), row));
        TRY(dev_zero(d, dx.data, (size_t)tensor_count(dx) * sizeof(float)));
        const struct rmsnorm_bwd_args norm = {.dx = dx,
                                              .dw = r->dw,
                                              .dy = tensor_rows(r->dy, lo, k),
                                              .x = x,
                                              .w = r->w,
                                              .rstd = tensor_rows(r->rstd, lo, k),
                                              .kind = m->cfg.family->norm};
        TRY(dev_rmsnorm_bwd(d, &norm));
        TRY(dev_scatter_rows_add(d, r->dx_all, dx, row));
    }
    return 0;
}

int model__head_norm_backward(struct model *m, struct model_acts *a, const int32_t *row, struct tensor dxn, struct model_grads *g) {
    struct dev *d = m->dev;
    const struct tensor dx_all = model__top(a->dx, a->n_rows), dnorm = a->head.dnorm;
    TRY(dev_zero(d, dx_all.data, (size_t)tensor_count(dx_all) * sizeof(float)));
    TRY(model__bucket_begin(m, g, m->g_norm, m->g_norm));
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_grads own = model__summand(g, i);
        const struct model_range r = model__part_outputs(g, i, row, dxn.dim[0]);
        TRY(dev_zero(d, dnorm.data, (size_t)tensor_count(dnorm) * sizeof(float)));
        TRY(model__norm_rows_backward(m, a,
                                      &(struct norm_rows_backward){.x = a->x[a->n_layers],
                                                                   .w = m->final_norm,
                                                                   .idx = model__range(a->head.row, r),
                                                                   .rstd = model__range(a->head.rstd, r),
                                                                   .dy = model__range(dxn, r),
                                                                   .dx_all = dx_all,
                                                                   .dw = dnorm}));
        TRY(model__mtp_norm_backward(m, a, model__part(g, i, a->n_rows), dnorm));
        TRY(dev_fold(d, model__vec_grad(m, &own, m->g_norm), &dnorm, 1, own.add));
    }
    return model__bucket_end(g);
}

/* The head's gradient of outputs r, which are one part's, with its summand. */
static int head_part(struct model *m, const struct lmhead_args *of, const struct lmhead_bwd_args *all, struct model_range r,
                     const struct model_grads *own) {
    struct lmhead_args h = *of;
    struct lmhead_bwd_args g = *all;
    struct tensor *const rows[] = {&h.x,       &h.inv_temp,  &h.target, &h.logp,  &h.entropy,  &h.lse,
                                   &h.list_id, &h.list_logp, &h.dlist,  &g.dlogp, &g.dentropy, &g.dx};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) *rows[i] = model__range(*rows[i], r);
    h.kept_at += r.lo;
    if (!m->lora) g.dw = model__grad(m, own, m->g_head);
    g.add = own->add;
    return dev_lmhead_bwd(m->dev, &h, &g);
}

/* dx of the last residual, d embed or d lm_head, d final norm. */
static int head_backward(struct model *m, struct model_acts *a, const struct model_logp_args *l, const float *dlogp,
                         const float *dentropy, struct model_grads *g) {
    struct dev *d = m->dev;
    const int64_t n = l->n;
    const size_t bytes = (size_t)n * sizeof(float);
    const struct tensor dxn = model__top(a->dxn, n), d_logp = model__top(a->head.dlogp, n);
    const struct tensor d_entropy = dentropy ? model__top(a->head.dentropy, n) : TENSOR_NONE;
    TRY(model__head_input(m, a, l, 0, n));
    struct lmhead_args h = model__head_args(m, a, 0, n, dentropy != NULL);
    if (a->head_kept) h.kept = a->head.kept;
    if (l->list && l->list->dlogp) {
        TRY(model__list_input(m, l->list, 0, n, &h));
        h.dlist = h.list_logp;
        TRY(dev_copy_in(d, h.dlist.data, l->list->dlogp, (size_t)(n * l->list->k) * sizeof(float)));
    }
    TRY(dev_copy_in(d, d_logp.data, dlogp, bytes));
    if (dentropy) TRY(dev_copy_in(d, d_entropy.data, dentropy, bytes));
    TRY(model__bucket_begin(m, g, m->g_head, m->g_head));
    const struct lmhead_bwd_args dh = {d_logp, d_entropy, dxn, TENSOR_NONE, false};
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_grads own = model__summand(g, i);
        TRY(head_part(m, &h, &dh, model__part_outputs(g, i, l->row, n), &own));
    }
    TRY(model__bucket_end(g));
    return model__head_norm_backward(m, a, l->row, dxn, g);
}

/* dx_act = dx, rounded, where that is read. */
static int round_dx(struct model *m, struct model_acts *a, int64_t rows, bool needed) {
    return needed && m->act != DT_F32 ? dev_cast(m->dev, model__top(a->dx_act, rows), model__top(a->dx, rows)) : 0;
}

/* What attention and the MLP have in common around their own operations. */
struct stage_backward {
    const struct model_group *pre, *post; /* norms of the input and the output, NULL: none */
    const struct model_group *first;      /* matrix that reads the input */
    struct tensor x, xn, rstd;            /* residual stream; the input, pre's 1/rms */
    struct tensor dxn;                    /* of the input; absent: acts' dxn */
    struct tensor out, out_rstd;          /* post's input and its 1/rms */
    bool needs_dx_act;                    /* of x, dx_act is read later */
};

int model__norm_backward(struct model *m, const struct model_grads *g, const struct model_group *w,
                         const struct rmsnorm_bwd_args *all) {
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_grads own = model__summand(g, i);
        const struct model_range r = model__part(g, i, all->x.dim[0]);
        struct rmsnorm_bwd_args a = *all;
        a.w = w->vec;
        a.dw = model__vec_grad(m, &own, w);
        struct tensor *const rows[] = {&a.dx, &a.rounded, &a.dy, &a.x, &a.rstd};
        for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) *rows[k] = model__range(*rows[k], r);
        TRY(dev_rmsnorm_bwd(m->dev, &a));
    }
    return 0;
}

/* *dy: the gradient, rounded, of what the last matrix gives: of the residual stream, or through post that of its input. */
static int stage_output_backward(struct model *m, struct model_acts *a, const struct stage_backward *s, const struct model_grads *g,
                                 struct tensor *dy) {
    const int64_t rows = s->x.dim[0];
    const struct tensor dx_act = model__top(a->dx_act, rows), dout = model__top(a->dout, rows);
    *dy = dx_act;
    if (!s->post) return 0;
    if (m->act == DT_F32) *dy = dout;
    TRY(dev_zero(m->dev, dout.data, (size_t)tensor_count(dout) * sizeof(float)));
    return model__norm_backward(m, g, s->post,
                                &(struct rmsnorm_bwd_args){.dx = dout,
                                                           .rounded = m->act == DT_F32 ? TENSOR_NONE : dx_act,
                                                           .dy = model__top(a->dx, rows),
                                                           .x = s->out,
                                                           .rstd = s->out_rstd,
                                                           .kind = m->cfg.family->norm});
}

/* dx += what comes through pre, whose output has the gradient dxn; dx_act with it where that is read. */
static int stage_norm_backward(struct model *m, struct model_acts *a, const struct stage_backward *s, const struct model_grads *g) {
    const int64_t rows = s->x.dim[0];
    const bool round = m->act != DT_F32 && s->needs_dx_act;
    return model__norm_backward(m, g, s->pre,
                                &(struct rmsnorm_bwd_args){.dx = model__top(a->dx, rows),
                                                           .rounded = round ? model__top(a->dx_act, rows) : TENSOR_NONE,
                                                           .dy = s->dxn.nd ? s->dxn : model__top(a->dxn, rows),
                                                           .x = s->x,
                                                           .rstd = s->rstd,
                                                           .kind = m->cfg.family->norm});
}

/* dx += what comes through the first matrix, whose output has the gradient dy; dx_act with it where that is read. */
static int stage_input_backward(struct model *m, struct model_acts *a, const struct stage_backward *s, struct tensor dy,
                                const struct model_grads *g) {
    const int64_t rows = s->x.dim[0];
    const struct tensor dx = model__top(a->dx, rows), dxn = model__top(a->dxn, rows);
    if (!s->pre) {
        TRY(model__linear_bwd(m, &(struct linear_bwd_args){s->first, dx, dy, s->xn, g, true}));
        return round_dx(m, a, rows, s->needs_dx_act);
    }
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){s->first, dxn, dy, s->xn, g, false}));
    return stage_norm_backward(m, a, s, g);
}

/* x_next = x_mid + down(silu(gate) * up), of norms as the layer has them. */
static int mlp_backward(struct model *m, struct model_acts *a, int64_t l, int64_t n, const struct model_grads *g) {
    const struct model_layer *y = &m->layers[l];
    const struct model_stage *s = &a->stages[l];
    const struct tensor dmlp = model__top(a->dmlp, n), dgate_up = model__top(a->dgate_up, n);
    const struct stage_backward stage = {.pre = y->mlp_norm,
                                         .post = y->mlp_post_norm,
                                         .first = y->gate_up,
                                         .x = model__top(s->x_mid, n),
                                         .xn = model__top(s->xn2, n),
                                         .rstd = model__top(s->rstd2, n),
                                         .out = model__top(s->mlp_out, n),
                                         .out_rstd = model__top(s->mlp_out_rstd, n),
                                         .needs_dx_act = !y->attn_post_norm};
    struct tensor dy;
    TRY(stage_output_backward(m, a, &stage, g, &dy));
    if (y->router) {
        TRY(model__experts_backward(m, a, l, dy, g));
        return stage_norm_backward(m, a, &stage, g);
    }
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->down, dmlp, dy, model__top(s->mlp, n), g, false}));
    TRY((m->cfg.family->gelu ? dev_geglu_bwd : dev_swiglu_bwd)(m->dev, dgate_up, dmlp, model__top(s->gate_up, n)));
    return stage_input_backward(m, a, &stage, dgate_up, g);
}

struct qkv_norms {
    struct qkv_args heads;
    const struct model_stage *stage;
};
/* From the gradients of queries, K and V to that of what the matrix gives, through norms of heads or rows, a part after the
 * other. */
static int qkv_backward(struct model *m, const struct model_batch *b, int64_t l, const struct qkv_norms *of,
                        const struct qkv_bwd_args *all, const struct model_grads *g) {
    const struct model_layer *y = &m->layers[l];
    const int64_t n = b->n_rows;
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_grads own = model__summand(g, i);
        const struct model_range r = model__part(g, i, n);
        struct qkv_args x = of->heads;
        struct qkv_bwd_args dx = *all;
        dx.dq_norm = model__vec_grad(m, &own, y->q_norm);
        dx.dk_norm = model__vec_grad(m, &own, y->k_norm);
        struct tensor *const rows[] = {&x.qkv, &x.pos, &x.slots, &x.q, &dx.dq, &dx.dqkv};
        for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) *rows[k] = model__range(*rows[k], r);
        TRY(dev_qkv_bwd(m->dev, &x, &dx));
        if (y->q_row_norm) {
            struct qk_norm_args norms = model__qk_norm_args(m, of->stage, l, n);
            const struct qk_norm_bwd_args dnorms = {dx.dqkv, model__vec_grad(m, &own, y->q_row_norm),
                                                    model__vec_grad(m, &own, y->k_row_norm)};
            struct tensor *const parts[] = {&norms.x, &norms.y, &norms.rstd};
            for (size_t k = 0; k < sizeof parts / sizeof *parts; k++) *parts[k] = model__range(*parts[k], r);
            TRY(dev_qk_norm_bwd(m->dev, &norms, &dnorms));
        }
        if (y->q_rope_norm) {
            struct rope_norm_args norms = model__rope_norm_args(m, b, of->stage, l);
            const struct qk_norm_bwd_args dnorms = {dx.dqkv, model__vec_grad(m, &own, y->q_rope_norm),
                                                    model__vec_grad(m, &own, y->k_rope_norm)};
            struct tensor *const parts[] = {&norms.x, &norms.pos, &norms.y, &norms.rstd};
            for (size_t k = 0; k < sizeof parts / sizeof *parts; k++) *parts[k] = model__range(*parts[k], r);
            TRY(dev_rope_norm_bwd(m->dev, &norms, &dnorms));
        }
    }
    return 0;
}

/* x_mid = x + o(attn(norm(x))), likewise; of layer 0's x nobody reads dx_act. */
static int attention_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l,
                              const struct model_grads *g) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const struct model_stage *s = &a->stages[l];
    const int64_t n = b->n_rows;
    const struct tensor datt = b->context ? model__context_datt(b) : model__top(a->datt, n), dq = model__top(a->dq, n),
                        dqkv = model__top(a->dqkv, n);
    const struct tensor dgate = model__top(a->dgate, n), joint = model__top(a->joint, n);
    const struct stage_backward stage = {.pre = y->attn_norm,
                                         .post = y->attn_post_norm,
                                         .first = y->delta_in ? y->delta_in : y->qkv,
                                         .x = model__top(a->x[l], n),
                                         .xn = model__top(s->xn1, n),
                                         .rstd = model__top(s->rstd1, n),
                                         .dxn = y->mla_kv ? model__top(a->mla.dx, n) : TENSOR_NONE,
                                         .out = model__top(s->att_out, n),
                                         .out_rstd = model__top(s->att_out_rstd, n),
                                         .needs_dx_act = l > 0 && !m->layers[l - 1].mlp_post_norm};
    struct qkv_args qkv;
    struct attn_args attn;
    struct tensor dy;
    TRY(stage_output_backward(m, a, &stage, g, &dy));
    if (y->mla_kv) {
        TRY(model__mla_backward(m, b, a, l, dy, g));
        return stage_norm_backward(m, a, &stage, g);
    }
    if (y->delta_in) {
        TRY(model__delta_backward(m, b, a, l, dy, g));
        return stage_input_backward(m, a, &stage, model__top(a->delta.joint.nd ? a->delta.joint : a->delta.din, n), g);
    }
    model__attn_args(m, b, a, l, &qkv, &attn);
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->o, datt, dy, model__top(s->att, n), g, false}));
    if (joint.nd)
        TRY(dev_output_gate_bwd(
            d, &(struct output_gate_bwd_args){datt, model__att_rows(s, n), model__top(s->gate.gate, n), datt, dgate}));
    if (y->sinks && !b->context)
        TRY(dev_attn_sink_bwd(d, &(struct attn_sink_args){attn.out, attn.lse, y->sinks->vec}, datt,
                              model__vec_grad(m, g, y->sinks)));
    struct qkv_bwd_args dqkv_args = {.dq = dq, .dk = a->dk, .dv = a->dv, .dqkv = dqkv};
    if (b->context) dqkv_args.dk.dim[2] = dqkv_args.dv.dim[2] = n; /* their keys lie next to each other */
    const struct context_bwd_args rows = {&attn, y->sinks, model__vec_grad(m, g, y->sinks), a->datt, &dqkv_args};
    TRY(b->context ? model__context_attn_bwd(b, &rows) : dev_attn_bwd(d, &attn, datt, dq, a->dk, a->dv));
    if (m->query_scale.data) TRY(dev_scale_rows(d, dq, m->query_scale, b->pos));
    TRY(qkv_backward(m, b, l, &(struct qkv_norms){qkv, s}, &dqkv_args, g));
    const struct gate_split_args gates = model__gate_args(m, joint, dqkv, dgate);
    if (joint.nd) TRY(dev_gate_join(d, &gates));
    return stage_input_backward(m, a, &stage, joint.nd ? joint : dqkv, g);
}

int model__layer_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l,
                          const struct model_grads *g) {
    TRY(mlp_backward(m, a, l, b->n_rows, g));
    return attention_backward(m, b, a, l, g);
}

int model__body_backward(struct model *m, const struct model_batch *b, struct model_acts *a, struct model_grads *g) {
    TRY(round_dx(m, a, b->n_rows, !m->layers[m->cfg.n_layers - 1].mlp_post_norm));
    for (int64_t i = m->cfg.n_layers - 1; i >= 0; i--) {
        const bool there = i == m->cfg.n_layers - 1; /* the last layer's stage, from the forward pass */
        TRY(model_stream_layer(m, i, i - 1));
        if (!there && i >= a->keep.all + a->keep.attention) TRY(model__attention_stage(m, b, a, i));
        if (!there && i >= a->keep.all) {
            TRY(model__mlp_stage(m, b, a, i));
            if (m->layers[i].mlp_post_norm) TRY(model__mlp_output(m, b, a, i));
        }
        TRY(layer_begin(m, g, i));
        TRY(model__zero_norms(m, g, m->layers[i].first, m->layers[i].last));
        TRY(model__layer_backward(m, b, a, i, g));
        TRY(model__bucket_end(g));
    }
    a->n_head = 0; /* the stages are consumed */
    return m->lora ? 0 : embedding_backward(m, b, a, g->sink);
}

int model_backward(struct model *m, struct model_acts *a, const struct model_backward_args *args) {
    const struct model_batch *const b = args->batch;
    const struct model_logp_args *const l = args->logp;
    struct model_grads g = {.sink = args->sink, .parts = b->parts};
    CHECK(a->keep.train && b->kv == NULL);              /* it was a training forward */
    CHECK(a->n_rows == b->n_rows && a->n_head == l->n); /* the forward was of this batch */
    CHECK(args->dentropy == NULL || a->head_entropy);
    TRY(model__mtp_backward(m, a, args, &g));
    TRY(head_backward(m, a, l, args->dlogp, args->dentropy, &g));
    return model__body_backward(m, b, a, &g);
}
