/* trained_model.c - forward passes, gradient accumulation and the optimizer step over packed micro-batches.
 * The arithmetic of the loss is the caller's, that of the model model/forward.h's. */
#include "train/run/trained_model.h"
#include "model/weight_streaming.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct trained_model {
    struct dev *dev;
    struct model *model;
    struct model_acts *acts;
    struct optim *optim;
    float *grads;
    struct pack pack;
    struct model_list list; /* k 0: none */
    bool no_adapter;
    void *owned_block;
    size_t block_bytes;
    /* host, (max_rows); out: log-probs or values */
    float *inv_temp, *out, *entropy, *sum_pi_sq, *dout, *dentropy;
};

static struct model_keep keep_of(const struct trained_model_args *a) { return a->train ? a->keep : MODEL_KEEP_NONE; }

size_t trained_model_block_bytes(const struct model_config *c, enum dtype act, const struct trained_model_args *a) {
    struct pack p = {.max_rows = a->max_rows, .max_seqs = a->max_seqs};
    struct arena m = {0};
    struct model_list list;
    pack_layout(&p, &m);
    if (a->list > 0) model_list_layout(&list, a->list, a->max_rows, &m);
    arena_take(&m, model_acts_bytes(c, act, a->max_rows, keep_of(a)));
    if (a->stream) arena_take(&m, model_stream_bytes(c, a->dev, act));
    return m.used;
}

static int open_training(struct trained_model *t, const struct optim_config *optim) {
    const struct optim_config adamw = {.kind = OPTIM_ADAMW};
    void *g = NULL;
    CHECK(t->model->master != NULL);
    TRY(dev_alloc(t->dev, (size_t)t->model->n_train * 4, &g));
    t->grads = g;
    return optim_create(&t->optim, t->model, optim ? optim : &adamw);
}

int trained_model_create(struct trained_model **out, const struct trained_model_args *a) {
    int rc = 0;
    struct model *m = a->model;
    struct trained_model *t = xcalloc(1, sizeof *t);
    t->dev = a->dev;
    t->model = m;
    t->no_adapter = a->no_adapter;
    t->pack = (struct pack){.dev = a->dev, .max_rows = a->max_rows, .max_seqs = a->max_seqs};
    t->block_bytes = trained_model_block_bytes(&m->cfg, m->act, a);
    void *block = a->block;
    if (!block) {
        TRYG(dev_alloc(t->dev, t->block_bytes, &t->owned_block), fail);
        block = t->owned_block;
    }
    struct arena arena = {.base = block, .cap = t->block_bytes};
    pack_layout(&t->pack, &arena);
    if (a->list > 0) model_list_layout(&t->list, a->list, a->max_rows, &arena);
    void *acts = arena_take(&arena, model_acts_bytes(&m->cfg, m->act, a->max_rows, keep_of(a)));
    if (a->stream) model_stream_bind(m, arena_take(&arena, model_stream_bytes(&m->cfg, t->dev, m->act)));
    TRYG(model_acts_create(&t->acts, m, a->max_rows, keep_of(a), acts), fail);
    if (a->train) TRYG(open_training(t, a->optim), fail);
    pack_alloc_host(&t->pack);
    float **const host[] = {&t->inv_temp, &t->out, &t->entropy, &t->sum_pi_sq, &t->dout, &t->dentropy};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) *host[i] = xmalloc((size_t)a->max_rows * 4);
    *out = t;
    return 0;
fail:
    trained_model_destroy(t);
    return rc;
}

void trained_model_destroy(struct trained_model *t) {
    if (!t) return;
    model_acts_destroy(t->acts);
    optim_destroy(t->optim, t->model);
    if (t->grads) dev_free(t->dev, t->grads, (size_t)t->model->n_train * 4);
    if (t->owned_block) dev_free(t->dev, t->owned_block, t->block_bytes);
    pack_free_host(&t->pack);
    free(t->inv_temp);
    free(t->out);
    free(t->entropy);
    free(t->sum_pi_sq);
    free(t->dout);
    free(t->dentropy);
    free(t);
}

struct model *trained_model_model(struct trained_model *t) {
    return t->model;
}
struct optim *trained_model_optim(struct trained_model *t) {
    return t->optim;
}
float *trained_model_grads(struct trained_model *t) { return t->grads; }

void trained_model_begin(struct trained_model *t) { model_stream_begin(t->model); }

/* The lists of the targets from `at` on; NULL where there are none. */
static struct model_list *list_at(struct trained_model *t, const struct token_lists *s, int64_t at) {
    const int64_t k = t->list.k;
    if (!s) return NULL;
    CHECK(k > 0);
    t->list.id = s->id ? s->id + at * k : NULL;
    t->list.logp = s->logp ? s->logp + at * k : NULL;
    t->list.top_id = s->top_id ? s->top_id + at * k : NULL;
    t->list.top_logp = s->top_logp ? s->top_logp + at * k : NULL;
    t->list.dlogp = s->dlogp ? s->dlogp + at * k : NULL;
    return &t->list;
}

/* A micro-batch with a target through model and head: t->out. l: what the head is asked beside log-probs; completed here. */
static int forward(struct trained_model *t, const struct packed_seq *seqs, const struct pack_micro *m, float temperature,
                   struct model_batch *b, struct model_logp_args *l) {
    TRY(pack_fill(&t->pack, seqs, m, b));
    b->no_adapter = t->no_adapter;
    TRY(model_forward(t->model, b, t->acts));
    if (t->model->cfg.value) return model_value(t->model, t->acts, t->pack.row, m->n_targets, t->out);
    for (int64_t k = 0; k < m->n_targets; k++) t->inv_temp[k] = 1.0f / temperature;
    l->n = m->n_targets;
    l->row = t->pack.row;
    l->target = t->pack.target;
    l->inv_temp = t->inv_temp;
    l->logp = t->out;
    return model_logp(t->model, t->acts, l);
}

int trained_model_forward(struct trained_model *t, const struct packed_seq *seqs, int64_t n, struct micro_batch_limits cut,
                          float temperature, struct forward_out out) {
    struct model_batch b;
    struct pack_micro m;
    float *const to = t->model->cfg.value ? out.value : out.logp;
    int64_t at = 0;
    for (int64_t lo = 0; lo < n; lo = m.hi) {
        struct model_logp_args l = {.entropy = out.entropy ? t->entropy : NULL,
                                    .sum_pi_sq = out.sum_pi_sq ? t->sum_pi_sq : NULL,
                                    .list = list_at(t, out.list, at)};
        TRY(pack_next(&t->pack, seqs, n, lo, cut, &m));
        if (m.n_targets > 0) TRY(forward(t, seqs, &m, temperature, &b, &l));
        const size_t bytes = (size_t)m.n_targets * 4;
        if (to) memcpy(to + at, t->out, bytes);
        if (out.entropy) memcpy(out.entropy + at, t->entropy, bytes);
        if (out.sum_pi_sq) memcpy(out.sum_pi_sq + at, t->sum_pi_sq, bytes);
        at += m.n_targets;
    }
    return 0;
}

/* ---- training ---- */

static bool all_finite(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return false;
    return true;
}

/* The loss of a micro-batch; 1: all its derivatives are finite. */
static int micro_loss(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, int64_t at,
                      const struct model_logp_args *l) {
    const size_t bytes = (size_t)m->n_targets * 4;
    float *const dentropy = s->entropy_grad ? t->dentropy : NULL;
    const struct micro_loss x = {.lo = m->lo,
                                 .hi = m->hi,
                                 .t0 = at,
                                 .t1 = at + m->n_targets,
                                 .out = t->out,
                                 .entropy = l->entropy,
                                 .dout = t->dout,
                                 .dentropy = dentropy};
    memset(t->dout, 0, bytes);
    memset(t->dentropy, 0, bytes);
    TRY(s->loss(s->loss_arg, &x));
    return all_finite(t->dout, m->n_targets) && (!dentropy || all_finite(dentropy, m->n_targets)) &&
           (!l->list || !l->list->dlogp || all_finite(l->list->dlogp, m->n_targets * l->list->k));
}

int trained_model_backward(struct trained_model *t, const struct mini_batch *s, struct step_result *r) {
    const bool value = t->model->cfg.value;
    struct model_batch b;
    struct pack_micro m;
    int64_t at = 0;
    CHECK(t->grads != NULL);
    *r = (struct step_result){0};
    struct model_grad_sink sink = {.flat = t->grads}; /* the first micro-batch writes the gradients */
    for (int64_t lo = 0; lo < s->n; lo = m.hi) {
        struct model_logp_args l = {.entropy = s->entropy ? t->entropy : NULL, .list = list_at(t, s->list, at)};
        TRY(pack_next(&t->pack, s->seqs, s->n, lo, s->cut, &m));
        r->n_micro++;
        r->n_rows += m.n_rows;
        if (m.n_targets == 0) continue;
        TRY(forward(t, s->seqs, &m, s->temperature, &b, &l));
        const int finite = micro_loss(t, s, &m, at, &l);
        TRY(finite);
        at += m.n_targets;
        if (!finite) {
            r->optim.grad_norm = NAN;
            snprintf(r->optim.bad_tensor, sizeof r->optim.bad_tensor, "%s",
                     value ? "the critic's loss (d loss / d value)" : "the loss (d loss / d log-prob)");
            return 0;
        }
        if (value) TRY(model_value_backward(t->model, &b, t->acts, t->pack.row, m.n_targets, t->dout, &sink));
        else TRY(model_backward(t->model, &b, t->acts, &l, t->dout, s->entropy_grad ? t->dentropy : NULL, &sink));
        sink.add = true;
    }
    return sink.add ? 0 : dev_zero(t->dev, t->grads, (size_t)t->model->n_train * 4);
}

int trained_model_step(struct trained_model *t, const struct mini_batch *m, const struct optim_config *optim, double lr,
                       struct step_result *r) {
    TRY(trained_model_backward(t, m, r));
    if (!isfinite(r->optim.grad_norm)) return 0;
    return optim_step(t->optim, t->model, t->grads, optim, lr, &r->optim);
}
