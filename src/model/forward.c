/* forward.c - the decoder's forward pass, and log-probs from its last state.
 *
 * One straight function over layers; what differs between generation and training is only where the KV
 * cache lives and which buffers are shared. The buffers' shapes are in model_int.h.
 * Invariant: the forward is batch-invariant: a row's numbers depend on its own sequence alone; the
 * recompute of backward goes through the same lines and gives the same bits. */
#include "model/forward.h"

#include "base/buf.h"
#include "base/err.h"
#include "model/model_int.h"
#include "model/parallel/weight_streaming.h"

#include <stdlib.h>

/* Rows of one call of the head: many, since small GEMMs leave a GPU idle; backends cut them further. */
enum { HEAD_ROWS = 8192 };

/* ---- buffers ---- */

static struct tensor take_kv(struct arena *m, enum dtype dt, const struct model_config *c, int64_t heads, int64_t rows) {
    struct tensor t = {NULL, dt, 4, {1, heads, rows, c->head_dim}};
    t.data = arena_take(m, SIZE_OF(heads, rows, c->head_dim, (int64_t)dtype_size(dt)));
    return t;
}

/* Of softmax attention alone. */
static void softmax_layout(struct model_stage *s, const struct model_acts *a, struct arena *m, const struct model_config *c,
                           enum dtype act) {
    const int64_t q = c->n_q_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim, rows = a->max_rows;
    const bool train = a->keep.train, shared = a->keep.context > 1;
    const int64_t attending = model_is_latent(c) ? rows : a->all_rows;
    int64_t heads = c->n_q_heads, keys = c->n_kv_heads; /* that attend here */
    if (shared) model_context_heads(c, a->keep.context, &heads, &keys);
    if (model_kv_sides(c) == 2) s->qkv = model__take2(m, act, rows, q + 2 * kv);
    const bool row_norms = model_has_group(c, offsetof(struct model_layer, q_row_norm));
    const bool rope_norms = model_has_group(c, offsetof(struct model_layer, q_rope_norm));
    if (row_norms || rope_norms) s->raw = model__take2(m, act, rows, q + 2 * kv);
    if (row_norms && train) s->qk_rstd = model__take2(m, DT_F32, rows, 2);
    if (rope_norms && train) s->qk_rstd = model__take2(m, DT_F32, rows, c->n_q_heads + c->n_kv_heads);
    s->q = model__take2(m, act, attending, heads * c->head_dim);
    s->kv.k = take_kv(m, act, c, keys, a->all_rows);
    s->kv.v = model_kv_sides(c) == 2 ? take_kv(m, act, c, keys, a->all_rows) : s->kv.k;
    s->att = model__take2(m, act, rows, q);
    if (shared && !model_is_latent(c)) s->context_att = model__take2(m, act, a->all_rows, heads * c->head_dim);
    if (train || model_has_group(c, offsetof(struct model_layer, sinks))) s->lse = model__take2(m, DT_F32, attending, heads);
    model__gate_layout(&s->gate, m, c, act, rows, train);
    model__mla_layout(&s->mla, m, c, act, rows, train);
}
/* What backward reads of a layer up to x_mid, and of the MLP after it (the larger part). kinds: of what attends there. */
static void attention_layout(struct model_stage *s, const struct model_acts *a, struct arena *m, const struct model_config *c,
                             enum dtype act, int kinds) {
    const int64_t h = c->hidden, rows = a->max_rows;
    const bool train = a->keep.train;
    s->xn1 = model__take2(m, act, rows, h);
    if (kinds & MODEL_ATTENTION) softmax_layout(s, a, m, c, act);
    if (kinds & MODEL_DELTA_NET) model__delta_layout(&s->delta, a, m, c, act);
    const bool post = model_has_group(c, offsetof(struct model_layer, attn_post_norm));
    if (post) s->att_out = model__take2(m, DT_F32, rows, h);
    if (!train) return;
    if (post) s->att_out_rstd = model__take1(m, DT_F32, rows);
    s->x_mid = model__take2(m, DT_F32, rows, h);
    s->rstd1 = model__take1(m, DT_F32, rows);
}
static void mlp_layout(struct model_stage *s, struct arena *m, const struct model_config *c, enum dtype act, int64_t rows,
                       bool train) {
    s->xn2 = model__take2(m, act, rows, c->hidden);
    if (model_has_group(c, offsetof(struct model_layer, gate_up))) {
        s->gate_up = model__take2(m, act, rows, 2 * c->ffn);
        s->mlp = model__take2(m, act, rows, c->ffn);
    }
    const bool post = model_has_group(c, offsetof(struct model_layer, mlp_post_norm));
    if (post) s->mlp_out = model__take2(m, DT_F32, rows, c->hidden);
    if (!train) return;
    s->rstd2 = model__take1(m, DT_F32, rows);
    if (post) s->mlp_out_rstd = model__take1(m, DT_F32, rows);
}

static int64_t kept_rows(int64_t n) { return (n + DEV_KEPT_ROWS - 1) / DEV_KEPT_ROWS * DEV_KEPT_ROWS; }
size_t model_kept_bytes(const struct model_config *c, int64_t n) {
    return SIZE_OF(kept_rows(n), dev_kept_cols(c->vocab), (int64_t)sizeof(float));
}

static void head_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act, bool train) {
    const int64_t h = c->hidden, r = train ? a->max_rows : a->head_rows;
    a->head.x = model__take2(m, DT_F32, a->head_rows, h);
    a->head.xn = model__take2(m, act, r, h);
    a->head.row = model__take1(m, DT_I32, r);
    a->head.target = model__take1(m, DT_I32, r);
    a->head.inv_temp = model__take1(m, DT_F32, r);
    a->head.logp = model__take1(m, DT_F32, a->max_rows);
    a->head.entropy = model__take1(m, DT_F32, a->max_rows);
    a->head.lse = model__take1(m, DT_F32, a->max_rows);
    a->head.sum_pi_sq = model__take1(m, DT_F32, a->max_rows);
    if (!train) return;
    a->head.rstd = model__take1(m, DT_F32, r);
    a->head.dlogp = model__take1(m, DT_F32, r);
    a->head.dentropy = model__take1(m, DT_F32, r);
    a->head.dvalue = model__take2(m, act, r, 1);
    a->head.dx = model__take2(m, DT_F32, a->head_rows, h);
    a->head.dnorm = model__take1(m, DT_F32, h);
    if (a->keep.logits > 0) a->head.kept = model__take2(m, DT_F32, kept_rows(a->keep.logits), dev_kept_cols(c->vocab));
}

static void backward_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act) {
    const int64_t rows = a->max_rows, h = c->hidden, q = c->n_q_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
    a->dx = model__take2(m, DT_F32, rows, h);
    a->dx_act = act == DT_F32 ? a->dx : model__take2(m, act, rows, h);
    a->dxn = model__take2(m, act, rows, h);
    if (model_has_group(c, offsetof(struct model_layer, attn_post_norm)) ||
        model_has_group(c, offsetof(struct model_layer, mlp_post_norm)))
        a->dout = model__take2(m, DT_F32, rows, h);
    if (model_has_group(c, offsetof(struct model_layer, gate_up))) {
        a->dmlp = model__take2(m, act, rows, c->ffn);
        a->dgate_up = model__take2(m, act, rows, 2 * c->ffn);
    }
    model__experts_backward_layout(a, m, c, act);
    model__shared_backward_layout(a, m, c, act);
    model__mla_backward_layout(a, m, c, act);
    model__hybrid_backward_layout(a, m, c, act);
    int64_t heads = c->n_q_heads, keys;
    if (a->keep.context > 1) model_context_heads(c, a->keep.context, &heads, &keys);
    a->datt = model__take2(m, act, model_is_latent(c) ? rows : a->all_rows, heads * c->head_dim);
    a->dq = model__take2(m, act, rows, q);
    a->dk = take_kv(m, DT_F32, c, c->n_kv_heads, rows);
    a->dv = take_kv(m, DT_F32, c, c->n_kv_heads, rows);
    if (model_kv_sides(c) == 2) a->dqkv = model__take2(m, act, rows, q + 2 * kv);
}

/* Measures, then binds: see arena.h.  Needs x and stages allocated. */
static void acts_layout(struct model_acts *a, struct arena *m, const struct model_config *c, enum dtype act) {
    const bool train = a->keep.train;
    struct model_stage shared = {0};
    for (int64_t l = 0; l <= model_layer_places(c); l++)
        a->x[l] = l == 0 || train ? model__take2(m, DT_F32, a->max_rows, c->hidden) : a->x[0];
    attention_layout(&shared, a, m, c, act, MODEL_ATTENTION | MODEL_DELTA_NET);
    model__hybrid_layout(a, m, c, act);
    mlp_layout(&shared, m, c, act, a->max_rows, train);
    model__experts_layout(a, m, c, act);
    model__experts_stage_layout(&shared.experts, a, m, c, act);
    model__shared_stage_layout(&shared.shared, m, c, act, a->max_rows);
    if (!train) shared.x_mid = a->x[0];
    for (int64_t l = 0; l < c->n_layers; l++) {
        a->stages[l] = shared;
        if (l < a->keep.all + a->keep.attention) attention_layout(&a->stages[l], a, m, c, act, model_layer_features(c, l));
        if (l >= a->keep.all) continue;
        mlp_layout(&a->stages[l], m, c, act, a->max_rows, train);
        model__experts_stage_layout(&a->stages[l].experts, a, m, c, act);
        model__shared_stage_layout(&a->stages[l].shared, m, c, act, a->max_rows);
    }
    if (c->mtp) { /* its own in training: the last layer's are still read after it */
        struct model_stage *const s = &a->stages[model_mtp_layer(c)];
        *s = shared;
        if (train) {
            attention_layout(s, a, m, c, act, model_layer_features(c, model_mtp_layer(c)));
            mlp_layout(s, m, c, act, a->max_rows, train);
            model__experts_stage_layout(&s->experts, a, m, c, act);
            model__shared_stage_layout(&s->shared, m, c, act, a->max_rows);
        }
        model__mtp_layout(a, m, c, act);
    }
    head_layout(a, m, c, act, train);
    if (train) backward_layout(a, m, c, act);
}

static struct model_keep bounded(struct model_keep k, int64_t layers) {
    if (k.all > layers) k.all = layers;
    if (k.attention > layers - k.all) k.attention = layers - k.all;
    return k;
}

static int64_t own_rows(int64_t max_rows, struct model_keep keep) {
    const struct model_context_shape shape = {keep.context, keep.parts};
    return keep.context > 1 ? model_context_rows(max_rows, shape) : max_rows;
}
int64_t model_kept_most(const struct model_config *c, int64_t max_rows, struct model_keep keep) {
    return keep.train && !c->value ? kept_rows(own_rows(max_rows, keep)) : 0;
}

static struct model_acts *acts_new(const struct model_config *c, int64_t max_rows, struct model_keep keep) {
    struct model_acts *a = xcalloc(1, sizeof *a);
    CHECK(max_rows > 0);
    a->keep = bounded(keep, c->n_layers - 1); /* the last layer has the shared buffers to itself */
    a->all_rows = max_rows;
    a->max_rows = own_rows(max_rows, keep);
    if (a->keep.logits > model_kept_most(c, max_rows, keep)) a->keep.logits = model_kept_most(c, max_rows, keep);
    a->n_layers = c->n_layers;
    a->head_rows = a->max_rows < HEAD_ROWS ? a->max_rows : HEAD_ROWS;
    a->x = xcalloc((size_t)model_layer_places(c) + 1, sizeof *a->x);
    a->stages = xcalloc((size_t)model_layer_places(c), sizeof *a->stages);
    return a;
}

size_t model_acts_bytes(const struct model_config *c, enum dtype act, int64_t max_rows, struct model_keep keep) {
    struct model_acts *a = acts_new(c, max_rows, keep);
    struct arena m = {0};
    acts_layout(a, &m, c, act);
    model_acts_destroy(a);
    return m.used;
}

struct model_keep model_keep_fit(const struct model_config *c, enum dtype act, int64_t max_rows, struct model_keep like,
                                 size_t extra) {
    const int64_t layers = c->n_layers - 1;
    struct model_keep k = {.train = true, .context = like.context, .parts = like.parts, .experts = like.experts}, more = k;
    const size_t limit = model_acts_bytes(c, act, max_rows, k) + extra;
    while (more.attention++ < layers) {
        if (model_acts_bytes(c, act, max_rows, more) > limit) break;
        k = more;
    }
    for (more = k; more.attention-- > 0;) {
        more.all++;
        if (model_acts_bytes(c, act, max_rows, more) > limit) break;
        k = more;
    }
    return k;
}

int model_acts_create(struct model_acts **out, const struct model *m, int64_t max_rows, struct model_keep keep, void *block) {
    struct model_acts *a = acts_new(&m->cfg, max_rows, keep);
    a->dev = m->dev;
    a->bytes = model_acts_bytes(&m->cfg, m->act, max_rows, keep);
    if (!block) {
        const int rc = dev_alloc(m->dev, a->bytes, &a->owned);
        if (rc < 0) {
            model_acts_destroy(a);
            TRY(rc);
        }
        block = a->owned;
    }
    struct arena ar = {.base = block, .cap = a->bytes};
    acts_layout(a, &ar, &m->cfg, m->act);
    *out = a;
    return 0;
}

void model_acts_destroy(struct model_acts *a) {
    if (!a) return;
    if (a->owned) dev_free(a->dev, a->owned, a->bytes);
    free(a->x);
    free(a->stages);
    model__mtp_free(a);
    free(a);
}

/* ---- the decoder ---- */

void model__attn_args(const struct model *m, const struct model_batch *b, const struct model_acts *a, int64_t l,
                      struct qkv_args *qkv, struct attn_args *attn) {
    const struct model_config *c = &m->cfg;
    const struct model_layer *y = &m->layers[l];
    const struct model_stage *s = &a->stages[l];
    const struct model_rope *rope = y->rope == MODEL_ROPE_LOCAL ? &c->local_rope : &c->rope;
    const int64_t n = b->n_rows;
    *qkv = (struct qkv_args){
        .n_q_heads = c->n_q_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .qkv = model__top(s->qkv, n),
        .q_norm = model__vec(y->q_norm),
        .k_norm = model__vec(y->k_norm),
        .kind = c->family->norm,
        .eps = c->rms_eps,
        .rope = m->rope[y->q_rope_norm ? MODEL_ROPE_NONE : y->rope],
        .rotary = rope->dim,
        .interleaved = c->family->interleaved,
        .pos = b->pos,
        .slots = b->slots,
        .q = model__top(s->q, n),
        .kv = b->kv ? b->kv->layers[l] : s->kv,
    };
    if (model_kv_sides(c) == 1) qkv->kv.v = qkv->kv.k;
    *attn = (struct attn_args){
        .n_q_heads = c->n_q_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .scale = c->attn_scale,
        .softcap = c->attn_softcap,
        .window = y->window,
        .seqs = b->seqs,
        .q = qkv->q,
        .kv = qkv->kv,
        .out = model__top(s->gate.att.nd ? s->gate.att : s->att, n),
        .lse = model__top(s->lse, n),
    };
    if (b->context) model__context_args(b, s, qkv, attn);
}

struct qk_norm_args model__qk_norm_args(const struct model *m, const struct model_stage *s, int64_t l, int64_t n) {
    const struct model_layer *y = &m->layers[l];
    return (struct qk_norm_args){.x = model__top(s->raw, n),
                                 .q_norm = model__vec(y->q_row_norm),
                                 .k_norm = model__vec(y->k_row_norm),
                                 .y = model__top(s->qkv, n),
                                 .rstd = model__top(s->qk_rstd, n),
                                 .eps = m->cfg.rms_eps,
                                 .kind = m->cfg.family->norm};
}

struct rope_norm_args model__rope_norm_args(const struct model *m, const struct model_batch *b, const struct model_stage *s,
                                            int64_t l) {
    const struct model_layer *y = &m->layers[l];
    return (struct rope_norm_args){.n_q_heads = m->cfg.n_q_heads,
                                   .n_kv_heads = m->cfg.n_kv_heads,
                                   .head_dim = m->cfg.head_dim,
                                   .x = model__top(s->raw, b->n_rows),
                                   .q_norm = model__vec(y->q_rope_norm),
                                   .k_norm = model__vec(y->k_rope_norm),
                                   .rope = m->rope[y->rope],
                                   .pos = b->pos,
                                   .y = model__top(s->qkv, b->n_rows),
                                   .rstd = model__top(s->qk_rstd, b->n_rows),
                                   .eps = m->cfg.rms_eps,
                                   .kind = m->cfg.family->norm};
}

int model__norm(struct model *m, struct tensor out, struct tensor rstd, struct tensor x, struct tensor w, struct tensor from) {
    return dev_rmsnorm_fwd(m->dev, &(struct rmsnorm_args){.y = out,
                                                          .rstd = rstd,
                                                          .x = x,
                                                          .w = w,
                                                          .eps = from.data ? m->cfg.rms_eps : m->cfg.stream_eps,
                                                          .kind = m->cfg.family->norm,
                                                          .from = from});
}

/* out: the input of a layer's attention or MLP, rounded: the norm of the residual stream, or that itself. */
static int stage_input(struct model *m, const struct model_group *norm, struct tensor out, struct tensor rstd, struct tensor x) {
    return norm ? model__norm(m, out, rstd, x, norm->vec, TENSOR_NONE) : dev_cast(m->dev, out, x);
}

/* What comes out of attention or MLP. */
struct stage_output {
    const struct model_group *linear, *norm; /* its last matrix; norm: NULL: none */
    struct tensor in, out, rstd;             /* in: of the matrix; out, rstd: of the norm's input */
    struct tensor from, to;                  /* residual stream: to = from + it */
    enum model_tp_dim columns;               /* of in, which ranks have */
};
static int stage_output(struct model *m, const struct model_batch *b, const struct stage_output *o) {
    int (*const linear)(struct model *, const struct linear_args *) = m->tp ? model__tp_linear : model__linear;
    struct tensor in = o->in;
    if (m->tp) TRY(model__tp_gather(m, o->columns, b->n_rows, &in));
    if (!o->norm) return linear(m, &(struct linear_args){o->linear, o->to, in, true, b->no_adapter, o->from});
    TRY(linear(m, &(struct linear_args){o->linear, o->out, in, .base = b->no_adapter}));
    return model__norm(m, o->to, o->rstd, o->out, o->norm->vec, o->from);
}

/* From xn1 to att. */
static int softmax_attention(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    struct dev *d = m->dev;
    const struct model_layer *y = &m->layers[l];
    const struct model_stage *s = &a->stages[l];
    const int64_t n = b->n_rows;
    const struct tensor xn1 = model__top(s->xn1, n);
    struct qkv_args qkv;
    struct attn_args attn;
    model__attn_args(m, b, a, l, &qkv, &attn);
    const struct tensor out = m->tp ? model__tp_part(m, MODEL_TP_HEADS, n) : model__top(s->att, n); /* behind gates, if any */
    if (m->tp && !a->joint.nd) attn.out = out;
    const struct tensor att = b->context ? model__att_rows(s, n) : attn.out;
    const struct tensor projected = a->joint.nd ? model__top(a->joint, n) : s->raw.nd ? model__top(s->raw, n) : qkv.qkv;
    TRY(model__linear(m, &(struct linear_args){y->qkv, projected, xn1, .base = b->no_adapter}));
    if (a->joint.nd) {
        const struct gate_split_args split = model__gate_args(m, projected, qkv.qkv, model__top(s->gate.gate, n));
        TRY(dev_gate_split(d, &split));
    }
    if (y->q_row_norm) {
        const struct qk_norm_args norms = model__qk_norm_args(m, s, l, n);
        TRY(m->tp ? model__tp_qk_norm(m, &norms) : dev_qk_norm_fwd(d, &norms));
    }
    if (y->q_rope_norm) {
        const struct rope_norm_args norms = model__rope_norm_args(m, b, s, l);
        TRY(dev_rope_norm_fwd(d, &norms));
    }
    if (b->own_keys && !a->keep.train && !m->query_scale.data) TRY(dev_qkv_attn_fwd(d, &qkv, &attn));
    else {
        TRY(dev_qkv_fwd(d, &qkv));
        if (m->query_scale.data) TRY(dev_scale_rows(d, qkv.q, m->query_scale, b->pos));
        TRY(b->context ? model__context_attn_fwd(b, &attn, y->sinks, att) : dev_attn_fwd(d, &attn));
    }
    if (y->sinks && !b->context) TRY(dev_attn_sink_fwd(d, &(struct attn_sink_args){attn.out, attn.lse, y->sinks->vec}));
    return a->joint.nd ? dev_output_gate_fwd(d, out, att, model__top(s->gate.gate, n)) : 0;
}

int model__attention_stage(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    const struct model_layer *y = &m->layers[l];
    const struct model_stage *s = &a->stages[l];
    const int64_t n = b->n_rows;
    const struct tensor x = model__top(a->x[l], n), x_mid = model__top(s->x_mid, n);
    TRY(stage_input(m, y->attn_norm, model__top(s->xn1, n), model__top(s->rstd1, n), x));
    TRY((y->delta_in ? model__delta_forward : y->mla_kv ? model__mla_forward : softmax_attention)(m, b, a, l));
    return stage_output(m, b,
                        &(struct stage_output){.linear = y->o,
                                               .norm = y->attn_post_norm,
                                               .in = model__top(y->delta_in ? s->delta.y
                                                                : y->mla_kv ? s->mla.y
                                                                            : s->att,
                                                                n),
                                               .out = model__top(s->att_out, n),
                                               .rstd = model__top(s->att_out_rstd, n),
                                               .from = x,
                                               .to = x_mid,
                                               .columns = y->delta_in ? MODEL_TP_DELTA : MODEL_TP_HEADS});
}

int model__mlp_stage(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    const struct model_layer *y = &m->layers[l];
    const struct model_stage *s = &a->stages[l];
    const int64_t n = b->n_rows;
    const struct tensor x_mid = model__top(s->x_mid, n), xn2 = model__top(s->xn2, n);
    const struct tensor mlp = m->tp ? model__tp_part(m, MODEL_TP_FFN, n) : model__top(s->mlp, n);
    const struct linear_args gate_up = {y->gate_up, model__top(s->gate_up, n), xn2, .base = b->no_adapter};
    TRY(stage_input(m, y->mlp_norm, xn2, model__top(s->rstd2, n), x_mid));
    if (y->router) return model__experts_stage(m, b, a, l);
    if (!a->keep.train) return model__linear_gated(m, &gate_up, mlp);
    TRY(model__linear(m, &gate_up)); /* backward reads it */
    return model__gated(m, mlp, gate_up.y);
}

int model__mlp_output(struct model *m, const struct model_batch *b, struct model_acts *a, int64_t l) {
    const struct model_layer *y = &m->layers[l];
    const struct model_stage *s = &a->stages[l];
    const int64_t n = b->n_rows;
    if (y->router) return model__experts_output(m, b, a, l);
    return stage_output(m, b,
                        &(struct stage_output){.linear = y->down,
                                               .norm = y->mlp_post_norm,
                                               .in = model__top(s->mlp, n),
                                               .out = model__top(s->mlp_out, n),
                                               .rstd = model__top(s->mlp_out_rstd, n),
                                               .from = model__top(s->x_mid, n),
                                               .to = model__top(a->x[l + 1], n),
                                               .columns = MODEL_TP_FFN});
}

int model_forward(struct model *m, const struct model_batch *b, struct model_acts *a) {
    struct dev *d = m->dev;
    const int64_t n = b->n_rows;
    if (n < 0 || n > a->max_rows)
        FAIL(ERR_INVAL, "model_forward: %lld rows, planned for %lld", (long long)n, (long long)a->max_rows);
    CHECK(a->n_layers == m->cfg.n_layers && (b->context != NULL) == (a->keep.context > 1));
    a->n_rows = n;
    a->n_head = 0;
    TRY(model__stream_start(m));
    TRY(m->tp ? model__tp_embed(m, model__top(a->x[0], n), b->ids) : dev_embed_fwd(d, model__top(a->x[0], n), b->ids, m->embed));
    if (m->cfg.embed_scale != 1.0f) TRY(dev_axpby(d, model__top(a->x[0], n), model__embed_scale(m), model__top(a->x[0], n), 0));
    for (int64_t l = 0; l < m->cfg.n_layers; l++) {
        TRY(model_stream_layer(m, l, l + 1));
        TRY(model__attention_stage(m, b, a, l));
        TRY(model__mlp_stage(m, b, a, l));
        TRY(model__mlp_output(m, b, a, l));
    }
    return model__stream_head(m);
}

/* ---- the head ---- */

int model__norm_rows(struct model *m, struct model_acts *a, const struct norm_rows *r) {
    const struct tensor gathered = model__top(a->head.x, r->idx.dim[0]);
    TRY(dev_gather_rows(m->dev, gathered, model__top(r->x, a->n_rows), r->idx));
    return model__norm(m, r->out, r->rstd, gathered, r->w, TENSOR_NONE);
}

/* Final norm of rows idx (R) of the last forward; rstd may be absent. */
static int final_norm(struct model *m, struct model_acts *a, struct tensor idx, struct tensor out, struct tensor rstd) {
    return model__norm_rows(m, a, &(struct norm_rows){a->x[a->n_layers], m->final_norm, idx, out, rstd});
}

int model_hidden(struct model *m, struct model_acts *a, struct tensor idx, struct tensor out) {
    if (!idx.nd) return model__norm(m, out, TENSOR_NONE, model__top(a->x[a->n_layers], out.dim[0]), m->final_norm, TENSOR_NONE);
    for (int64_t lo = 0; lo < idx.dim[0]; lo += a->head_rows) {
        const int64_t n = idx.dim[0] - lo < a->head_rows ? idx.dim[0] - lo : a->head_rows;
        TRY(final_norm(m, a, tensor_rows(idx, lo, n), tensor_rows(out, lo, n), TENSOR_NONE));
    }
    return 0;
}

int model_logits(struct model *m, struct tensor logits, struct tensor x) {
    return m->tp ? model__tp_logits(m, logits, x) : dev_logits(m->dev, logits, x, m->head);
}

int model__check_logp(const struct model *m, const struct model_acts *a, const struct model_logp_args *l) {
    if (l->n < 0 || l->n > a->max_rows)
        FAIL(ERR_INVAL, "log-probs of %lld rows, planned for %lld", (long long)l->n, (long long)a->max_rows);
    for (int64_t i = 0; i < l->n; i++) {
        if (l->row[i] < 0 || l->row[i] >= a->n_rows)
            FAIL(ERR_INVAL, "log-prob %lld: row %d of a batch of %lld", (long long)i, l->row[i], (long long)a->n_rows);
        if (l->target[i] < 0 || l->target[i] >= m->cfg.vocab)
            FAIL(ERR_INVAL, "log-prob %lld: token id %d is outside the vocabulary of %lld", (long long)i, l->target[i],
                 (long long)m->cfg.vocab);
    }
    for (int64_t i = 0; l->list && l->list->id && i < l->n * l->list->k; i++)
        if (l->list->id[i] < 0 || l->list->id[i] >= m->cfg.vocab)
            FAIL(ERR_INVAL, "log-prob %lld: listed token id %d is outside the vocabulary of %lld", (long long)(i / l->list->k),
                 l->list->id[i], (long long)m->cfg.vocab);
    return 0;
}

int model__head_copy(struct model *m, struct model_acts *a, const struct model_logp_args *l, int64_t lo, int64_t n) {
    const size_t bytes = (size_t)n * sizeof(int32_t);
    TRY(dev_copy_in(m->dev, a->head.row.data, l->row + lo, bytes));
    TRY(dev_copy_in(m->dev, a->head.target.data, l->target + lo, bytes));
    TRY(dev_copy_in(m->dev, a->head.inv_temp.data, l->inv_temp + lo, bytes));
    const struct tensor inv_temp = model__top(a->head.inv_temp, n);
    return m->cfg.logit_scale != 1.0f ? dev_axpby(m->dev, inv_temp, m->cfg.logit_scale, inv_temp, 0) : 0;
}

int model__head_input(struct model *m, struct model_acts *a, const struct model_logp_args *l, int64_t lo, int64_t n) {
    TRY(model__head_copy(m, a, l, lo, n));
    return model__head_norm(m, a, n);
}

int model__head_norm(struct model *m, struct model_acts *a, int64_t n) {
    for (int64_t lo = 0; lo < n; lo += a->head_rows) {
        const int64_t k = n - lo < a->head_rows ? n - lo : a->head_rows;
        const struct tensor rstd = a->head.rstd.nd ? tensor_rows(a->head.rstd, lo, k) : TENSOR_NONE;
        TRY(final_norm(m, a, tensor_rows(a->head.row, lo, k), tensor_rows(a->head.xn, lo, k), rstd));
    }
    return 0;
}

struct lmhead_args model__head_args(const struct model *m, const struct model_acts *a, int64_t lo, int64_t n, bool entropy) {
    return (struct lmhead_args){
        .x = model__top(a->head.xn, n),
        .w = m->head,
        .inv_temp = model__top(a->head.inv_temp, n),
        .target = model__top(a->head.target, n),
        .logp = tensor_rows(a->head.logp, lo, n),
        .entropy = entropy ? tensor_rows(a->head.entropy, lo, n) : TENSOR_NONE,
        .lse = tensor_rows(a->head.lse, lo, n),
    };
}

void model_list_layout(struct model_list *l, int64_t k, int64_t max_rows, struct arena *a) {
    const int64_t rows = max_rows < HEAD_ROWS ? max_rows : HEAD_ROWS;
    *l = (struct model_list){.k = k};
    l->d_id = model__take2(a, DT_I32, max_rows, k);
    l->d_logp = model__take2(a, DT_F32, max_rows, k);
    l->d_top_id = model__take2(a, DT_I32, rows, k);
    l->d_top_logp = model__take2(a, DT_F32, rows, k);
}

int model__list_input(struct model *m, const struct model_list *list, int64_t lo, int64_t n, struct lmhead_args *h) {
    if (list->id) {
        h->list_id = model__top(list->d_id, n);
        h->list_logp = model__top(list->d_logp, n);
        TRY(dev_copy_in(m->dev, h->list_id.data, list->id + lo * list->k, (size_t)(n * list->k) * sizeof(int32_t)));
    }
    if (list->top_id) {
        h->top_id = model__top(list->d_top_id, n);
        h->top_logp = model__top(list->d_top_logp, n);
    }
    return 0;
}

/* Rows [lo, lo + n) of the lists' results to the host. */
static int list_output(struct model *m, const struct model_list *list, int64_t lo, int64_t n, const struct lmhead_args *h) {
    const size_t bytes = (size_t)(n * list->k) * 4;
    if (list->id) TRY(dev_copy_out(m->dev, list->logp + lo * list->k, h->list_logp.data, bytes));
    if (!list->top_id) return 0;
    TRY(dev_copy_out(m->dev, list->top_id + lo * list->k, h->top_id.data, bytes));
    return list->top_logp ? dev_copy_out(m->dev, list->top_logp + lo * list->k, h->top_logp.data, bytes) : 0;
}

int model_logp(struct model *m, struct model_acts *a, const struct model_logp_args *l) {
    CHECK(!m->cfg.value);
    TRY(model__check_logp(m, a, l));
    a->head_kept = l->train && !l->list;
    for (int64_t lo = 0; lo < l->n; lo += a->head_rows) {
        const int64_t n = l->n - lo < a->head_rows ? l->n - lo : a->head_rows;
        TRY(model__head_input(m, a, l, lo, n));
        struct lmhead_args h = model__head_args(m, a, lo, n, l->entropy != NULL);
        if (l->sum_pi_sq) h.sum_pi_sq = tensor_rows(a->head.sum_pi_sq, lo, n);
        if (l->list) TRY(model__list_input(m, l->list, lo, n, &h));
        if (a->head_kept) h.kept = a->head.kept, h.kept_at = lo;
        TRY(dev_lmhead_fwd(m->dev, &h));
        if (l->list) TRY(list_output(m, l->list, lo, n, &h));
    }
    const size_t bytes = (size_t)l->n * sizeof(float);
    TRY(dev_copy_out(m->dev, l->logp, a->head.logp.data, bytes));
    if (l->entropy) TRY(dev_copy_out(m->dev, l->entropy, a->head.entropy.data, bytes));
    if (l->sum_pi_sq) TRY(dev_copy_out(m->dev, l->sum_pi_sq, a->head.sum_pi_sq.data, bytes));
    a->n_head = l->n;
    a->head_entropy = l->entropy != NULL;
    return 0;
}
