/* mla.c - multi-head latent attention (DeepSeek-V2, section 2.1) in the place of a layer's q, k and v; forward and backward.
 *
 * In the absorbed form, the one there is: W_uk, of kv_b_proj, multiplies queries and not the latent, W_uv what attention gives. So
 * attention is that of H query heads and one key head of rope + kv_rank elements, [what RoPE turns | latent], which are the values
 * as well: they alone are cached, and training computes with them as rollout does. Norms around it, its last matrix and the
 * residual stream are forward.c's and backward.c's.
 * Invariant: a row reads its own latent alone but for attention, whatever rows come together. */
#include "model/model_int.h"

#include "base/err.h"
#include "model/lora/lora_int.h"

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
    s->q = model__take2(m, act, rows, model_dim(c, MODEL_MLA_Q));
    s->latent = model__take2(m, DT_F32, rows, r + c->mla.rope);
    s->c = model__take2(m, DT_F32, rows, r);
    s->cn = model__take2(m, act, rows, r);
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
    a->mla.dq = model__take2(m, act, rows, model_dim(c, MODEL_MLA_Q));
    a->mla.dlatent = model__take2(m, act, rows, r + c->mla.rope);
    a->mla.dc = model__take2(m, DT_F32, rows, r);
    a->mla.dcn = model__take2(m, act, rows, r);
    a->mla.dy = model__take2(m, act, rows, model_dim(c, MODEL_MLA_V));
    a->mla.dx = model__take2(m, DT_F32, rows, c->hidden);
    if (a->keep.parts <= 1 || a->keep.context > 1) return;
    struct tensor *const part[] = {&a->mla.dk, &a->mla.dv};
    for (int i = 0; i < 2; i++) {
        *part[i] = (struct tensor){NULL, DT_F32, 4, {1, 1, rows, c->head_dim}};
        part[i]->data = arena_take(m, SIZE_OF(rows, c->head_dim, (int64_t)sizeof(float)));
    }
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
                                    .y = model__top(s->y, n)};
}

static struct mla_join_args join_of(const struct model *m, const struct qkv_args *of) {
    return (struct mla_join_args){.n_heads = m->cfg.n_q_heads,
                                  .nope = m->cfg.mla.nope,
                                  .rope = m->cfg.mla.rope,
                                  .table = of->rope,
                                  .pos = of->pos,
                                  .slots = of->slots,
                                  .interleaved = of->interleaved};
}

/* ---- kv_b_proj: of each head the rows of W_uk, then those of W_uv ---- */

/* One of the two matrices, rows [row, row + rows) of each head, and what it is between. */
struct half {
    struct tensor per_row; /* (T, H *): a head's first columns, one for each row */
    struct tensor latent;  /* (T, H (rope + r)): a head's last r columns */
    int64_t row, rows;
};
static struct half half_of(const struct model *m, bool values, struct tensor per_row, struct tensor latent) {
    return values ? (struct half){per_row, latent, m->cfg.mla.nope, m->cfg.mla.v}
                  : (struct half){per_row, latent, 0, m->cfg.mla.nope};
}

/* per_row (+)= latent W^T; to_latent: latent (+)= per_row W. */
static int multiply(struct model *m, const struct half *x, struct weight w, bool to_latent, bool add) {
    return dev_heads_fwd(m->dev, &(struct heads_args){.n_heads = m->cfg.n_q_heads,
                                                      .x = to_latent ? x->per_row : x->latent,
                                                      .x_at = to_latent ? 0 : m->cfg.mla.rope,
                                                      .y = to_latent ? x->latent : x->per_row,
                                                      .y_at = to_latent ? m->cfg.mla.rope : 0,
                                                      .w = w,
                                                      .row = x->row,
                                                      .rows = x->rows,
                                                      .transposed = to_latent,
                                                      .add = add});
}

/* The same of an adapter, whose A all heads share: by way of z (T, H width), of which A makes the latent. */
struct adapter_half {
    const struct lora_group *g;
    struct half x;
    struct tensor z;
    int64_t rope, n_heads;
};
static struct tensor by_head(struct tensor t, int64_t n_heads) {
    return tensor_2d(t.data, t.dt, t.dim[0] * n_heads, t.dim[1] / n_heads);
}
/* z = latent A^T; to_latent: latent += z A. */
static int multiply_a(struct model *m, const struct adapter_half *p, bool to_latent) {
    const struct tensor z = by_head(p->z, p->n_heads), latent = by_head(p->x.latent, p->n_heads);
    return dev_heads_fwd(m->dev, &(struct heads_args){.n_heads = 1,
                                                      .x = to_latent ? z : latent,
                                                      .x_at = to_latent ? 0 : p->rope,
                                                      .y = to_latent ? latent : z,
                                                      .y_at = to_latent ? p->rope : 0,
                                                      .w = p->g->a,
                                                      .rows = p->g->width,
                                                      .transposed = to_latent,
                                                      .add = to_latent});
}
/* z = per_row B; from_z: per_row += z B^T. */
static int multiply_b(struct model *m, const struct adapter_half *p, bool from_z) {
    return dev_heads_fwd(m->dev, &(struct heads_args){.n_heads = p->n_heads,
                                                      .x = from_z ? p->z : p->x.per_row,
                                                      .y = from_z ? p->x.per_row : p->z,
                                                      .w = p->g->b,
                                                      .row = p->x.row,
                                                      .rows = p->x.rows,
                                                      .transposed = !from_z,
                                                      .add = from_z});
}

/* Rows that go together where there is an adapter: z has the room of LORA_ROWS rows of one head. */
static int64_t block_rows(const struct model *m) { return m->cfg.n_q_heads < LORA_ROWS ? LORA_ROWS / m->cfg.n_q_heads : 1; }

static struct adapter_half adapter_rows(const struct model *m, const struct lora_group *g, const struct half *x, void *z,
                                        int64_t lo, int64_t hi) {
    const int64_t n = hi - lo < block_rows(m) ? hi - lo : block_rows(m), h = m->cfg.n_q_heads;
    struct adapter_half p = {g, *x, tensor_2d(z, m->act, n, h * g->width), m->cfg.mla.rope, h};
    p.x.per_row = tensor_rows(x->per_row, lo, n);
    p.x.latent = tensor_rows(x->latent, lo, n);
    return p;
}

/* per_row = latent W^T, or latent = per_row W, with what an adapter adds. */
static int half_product(struct model *m, const struct model_group *kv_b, const struct half *x, bool to_latent, bool base) {
    struct weight w;
    TRY(model__weight(m, kv_b, &w));
    TRY(multiply(m, x, w, to_latent, false));
    for (int64_t lo = 0, n = x->latent.dim[0]; kv_b->lora && !base && lo < n; lo += block_rows(m)) {
        const struct adapter_half p = adapter_rows(m, kv_b->lora, x, m->lora->z, lo, n);
        if (to_latent) TRY(multiply_b(m, &p, false));
        TRY(multiply_a(m, &p, to_latent));
        if (!to_latent) TRY(multiply_b(m, &p, true));
    }
    return 0;
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
    const struct tensor att = model__att_rows(&a->stages[l], b->n_rows);
    if (y->mla_q_a) {
        TRY(model__linear(m, &(struct linear_args){y->mla_q_a, s.qa, xn, .base = base}));
        TRY(latent_norm(m, s.qan, s.qa_rstd, s.qa, y->mla_q_norm));
    }
    TRY(model__linear(m, &(struct linear_args){y->mla_q, s.q, y->mla_q_a ? s.qan : xn, .base = base}));
    TRY(model__linear(m, &(struct linear_args){y->mla_kv_a, s.latent, xn, .base = base}));
    TRY(dev_resize_heads(d, s.c, s.latent, 1, false));
    TRY(latent_norm(m, s.cn, s.c_rstd, s.c, y->mla_kv_norm));
    struct mla_join_args join = join_of(m, &qkv);
    join.heads = s.q;
    join.latent = s.latent;
    join.cn = s.cn;
    join.q = qkv.q;
    join.k = qkv.kv.k;
    const struct half queries = half_of(m, false, s.q, qkv.q);
    TRY(half_product(m, y->mla_kv, &queries, true, base));
    TRY(dev_mla_join_fwd(d, &join));
    TRY(b->context ? model__context_latent_fwd(b, &attn) : dev_attn_fwd(d, &attn));
    const struct half values = half_of(m, true, m->tp ? model__tp_part(m, MODEL_TP_HEADS, b->n_rows) : s.y, att);
    return half_product(m, y->mla_kv, &values, false, base);
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

/* What the gradients of W_uk and W_uv are products of. */
struct halves {
    struct half q; /* q_nope, and the gradient of q_nope W_uk */
    struct half v; /* the gradient of the output, and what attention gives */
};

static int half_dw(struct model *m, const struct half *x, struct tensor dw, bool add) {
    return dev_heads_dw(m->dev, &(struct heads_dw_args){.n_heads = m->cfg.n_q_heads,
                                                        .x = x->per_row,
                                                        .y = x->latent,
                                                        .y_at = m->cfg.mla.rope,
                                                        .dw = dw,
                                                        .row = x->row,
                                                        .rows = x->rows,
                                                        .add = add});
}

/* Of an adapter, both halves alike: with z = per_row B and z' = latent A^T, dA = z^T latent and dB = per_row^T z'. */
static int adapter_dw(struct model *m, const struct lora_group *g, const struct half *x, struct model_range r, bool add) {
    const struct model_lora *const l = m->lora;
    const struct tensor da = tensor_2d(l->mat_a, DT_F32, g->width, g->k), db = tensor_2d(l->mat_b, DT_F32, g->n, g->width);
    for (int64_t lo = r.lo; lo < r.hi; lo += block_rows(m)) {
        const struct adapter_half z = adapter_rows(m, g, x, l->z, lo, r.hi), from = adapter_rows(m, g, x, l->dz, lo, r.hi);
        TRY(multiply_b(m, &z, false));
        TRY(multiply_a(m, &from, false));
        TRY(dev_heads_dw(m->dev, &(struct heads_dw_args){.n_heads = 1,
                                                         .x = by_head(z.z, z.n_heads),
                                                         .y = by_head(z.x.latent, z.n_heads),
                                                         .y_at = z.rope,
                                                         .dw = da,
                                                         .rows = g->width,
                                                         .add = add || lo > r.lo}));
        TRY(dev_heads_dw(m->dev, &(struct heads_dw_args){.n_heads = z.n_heads,
                                                         .x = from.x.per_row,
                                                         .y = from.z,
                                                         .dw = db,
                                                         .row = x->row,
                                                         .rows = x->rows,
                                                         .add = lo > r.lo}));
    }
    return 0;
}

/* The gradient of kv_b_proj, or of its adapter, a part of the rows after the other. */
static int kv_b_backward(struct model *m, const struct model_group *kv_b, const struct halves *x, const struct model_grads *g) {
    for (int i = 0; i < model__n_parts(g); i++) {
        const struct model_grads own = model__summand(g, i);
        const struct model_range r = model__part(g, i, x->q.latent.dim[0]);
        struct halves p = *x;
        struct tensor *const rows[] = {&p.q.per_row, &p.q.latent, &p.v.per_row, &p.v.latent};
        if (!m->lora) {
            for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) *rows[k] = model__range(*rows[k], r);
            TRY(half_dw(m, &p.q, model__grad(m, &own, kv_b), own.add));
            TRY(half_dw(m, &p.v, model__grad(m, &own, kv_b), own.add));
        } else if (kv_b->lora && r.hi > r.lo) {
            TRY(adapter_dw(m, kv_b->lora, &p.q, r, false));
            TRY(adapter_dw(m, kv_b->lora, &p.v, r, true));
            TRY(model__add_adapter_grads(m, kv_b->lora, &own));
        }
    }
    return 0;
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

/* On one rank: the parts' dk and dv, added one after the other. */
static int attention_backward(struct model *m, const struct model_batch *b, const struct model_acts *a,
                              const struct attn_args *attn, struct tensor datt, const struct qkv_bwd_args *out) {
    const int parts = b->parts ? b->parts->n : 1;
    if (b->context) return model__context_latent_bwd(b, attn, datt, out);
    if (parts == 1) return dev_attn_bwd(m->dev, attn, datt, out->dq, out->dk, out->dv);
    TRY(model__latent_part_bwd(m, b, 0, attn, datt, out));
    for (int i = 1; i < parts; i++) {
        const struct qkv_bwd_args part = {.dq = out->dq, .dk = a->mla.dk, .dv = a->mla.dv};
        TRY(model__latent_part_bwd(m, b, i, attn, datt, &part));
        TRY(dev_axpby(m->dev, out->dk, 1, part.dk, 1));
        TRY(dev_axpby(m->dev, out->dv, 1, part.dv, 1));
    }
    return 0;
}

int model__mla_backward(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l, struct tensor dy,
                        const struct model_grads *g) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const int64_t n = b->n_rows;
    const struct model_mla_stage s = stage_of(a, l, n);
    const struct tensor datt = model__top(a->datt, n), dq = model__top(a->dq, n);
    const struct tensor dcn = model__top(a->mla.dcn, n), dc = model__top(a->mla.dc, n), dout = model__top(a->mla.dy, n);
    struct qkv_bwd_args dqkv = {.dq = dq, .dk = a->dk, .dv = a->dv};
    struct qkv_args qkv;
    struct attn_args attn;
    model__attn_args(m, b, a, l, &qkv, &attn);
    TRY(model__linear_bwd(m, &(struct linear_bwd_args){y->o, dout, dy, s.y, g, false}));
    const struct half values = half_of(m, true, dout, datt);
    TRY(dev_zero(d, datt.data, (size_t)tensor_count(datt) * dtype_size(datt.dt))); /* what is turned of a value is read by nobody */
    TRY(half_product(m, y->mla_kv, &values, true, false));
    if (b->context) dqkv.dk.dim[2] = dqkv.dv.dim[2] = n;
    TRY(attention_backward(m, b, a, &attn, datt, &dqkv));
    struct mla_join_args join = join_of(m, &qkv);
    join.heads = model__top(a->mla.dq, n);
    join.latent = model__top(a->mla.dlatent, n);
    join.cn = dcn;
    join.q = dq;
    join.k = dqkv.dk;
    join.v = dqkv.dv;
    const struct half queries = half_of(m, false, join.heads, dq);
    TRY(half_product(m, y->mla_kv, &queries, false, false));
    TRY(dev_mla_join_bwd(d, &join));
    TRY(kv_b_backward(m, y->mla_kv,
                      &(struct halves){half_of(m, false, s.q, dq), half_of(m, true, dout, model__att_rows(&a->stages[l], n))}, g));
    TRY(latent_norm_backward(m, g, &(struct normed){s.c, s.c_rstd, y->mla_kv_norm}, dc, dcn));
    TRY(dev_resize_heads(d, join.latent, dc, 1, true)); /* in front of what join wrote */
    return projections_backward(m, a, l, n, g);
}
