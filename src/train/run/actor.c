/* actor.c - log-probs and gradient accumulation over packed micro-batches.
 * The arithmetic of the loss is the caller's, that of the model model/forward.h's. */
#include "train/run/actor.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "model/weight_streaming.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct actor {
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
    /* host, (max_rows) */
    float *inv_temp, *logp, *entropy, *sum_pi_sq, *dlogp, *dentropy;
};

static struct model_keep keep_of(const struct actor_args *a) { return a->train ? a->keep : MODEL_KEEP_NONE; }

size_t actor_block_bytes(const struct model_config *c, enum dtype act, const struct actor_args *a) {
    struct pack p = {.max_rows = a->max_rows, .max_seqs = a->max_seqs};
    struct arena m = {0};
    struct model_list list;
    pack_layout(&p, &m);
    if (a->list > 0) model_list_layout(&list, a->list, a->max_rows, &m);
    arena_take(&m, model_acts_bytes(c, act, a->max_rows, keep_of(a)));
    if (a->stream) arena_take(&m, model_stream_bytes(c, a->dev, act));
    return m.used;
}

int actor_create(struct actor **out, const struct actor_args *args) {
    int rc = 0;
    struct actor *a = xcalloc(1, sizeof *a);
    a->dev = args->dev;
    a->model = args->model;
    a->no_adapter = args->no_adapter;
    a->pack = (struct pack){.dev = args->dev, .max_rows = args->max_rows, .max_seqs = args->max_seqs};
    a->block_bytes = actor_block_bytes(&args->model->cfg, args->model->act, args);
    void *block = args->block;
    if (!block) {
        TRYG(dev_alloc(a->dev, a->block_bytes, &a->owned_block), fail);
        block = a->owned_block;
    }
    struct arena m = {.base = block, .cap = a->block_bytes};
    pack_layout(&a->pack, &m);
    if (args->list > 0) model_list_layout(&a->list, args->list, args->max_rows, &m);
    void *acts = arena_take(&m, model_acts_bytes(&args->model->cfg, args->model->act, args->max_rows, keep_of(args)));
    if (args->stream) model_stream_bind(a->model, arena_take(&m, model_stream_bytes(&args->model->cfg, a->dev, args->model->act)));
    TRYG(model_acts_create(&a->acts, a->model, args->max_rows, keep_of(args), acts), fail);
    if (args->train) {
        void *g = NULL;
        CHECK(a->model->master != NULL);
        TRYG(dev_alloc(a->dev, (size_t)a->model->n_train * 4, &g), fail);
        a->grads = g;
        const struct optim_config adamw = {.kind = OPTIM_ADAMW};
        TRYG(optim_create(&a->optim, a->model, args->optim ? args->optim : &adamw), fail);
    }
    const size_t rows = (size_t)args->max_rows;
    pack_alloc_host(&a->pack);
    a->inv_temp = xmalloc(rows * 4);
    a->logp = xmalloc(rows * 4);
    a->entropy = xmalloc(rows * 4);
    a->sum_pi_sq = xmalloc(rows * 4);
    a->dlogp = xmalloc(rows * 4);
    a->dentropy = xmalloc(rows * 4);
    *out = a;
    return 0;
fail:
    actor_destroy(a);
    return rc;
}

void actor_destroy(struct actor *a) {
    if (!a) return;
    model_acts_destroy(a->acts);
    optim_destroy(a->optim, a->model);
    if (a->grads) dev_free(a->dev, a->grads, (size_t)a->model->n_train * 4);
    if (a->owned_block) dev_free(a->dev, a->owned_block, a->block_bytes);
    pack_free_host(&a->pack);
    free(a->inv_temp);
    free(a->logp);
    free(a->entropy);
    free(a->sum_pi_sq);
    free(a->dlogp);
    free(a->dentropy);
    free(a);
}

struct optim *actor_optim(struct actor *a) {
    return a->optim;
}
float *actor_grads(struct actor *a) { return a->grads; }

/* The micro-batch on the device, and its targets as the head wants them. */
static int fill(struct actor *a, const struct actor_seq *seqs, const struct pack_micro *m, float temperature, struct model_batch *b,
                struct model_logp_args *l) {
    TRY(pack_fill(&a->pack, seqs, m, b));
    b->no_adapter = a->no_adapter;
    for (int64_t k = 0; k < m->n_targets; k++) a->inv_temp[k] = 1.0f / temperature;
    *l = (struct model_logp_args){
        .n = m->n_targets, .row = a->pack.row, .target = a->pack.target, .inv_temp = a->inv_temp, .logp = a->logp};
    return 0;
}

/* The lists of the targets from `at` on; NULL where there are none. */
static struct model_list *list_at(struct actor *a, const struct actor_list *s, int64_t at) {
    const int64_t k = a->list.k;
    if (!s) return NULL;
    CHECK(k > 0);
    a->list.id = s->id ? s->id + at * k : NULL;
    a->list.logp = s->logp ? s->logp + at * k : NULL;
    a->list.top_id = s->top_id ? s->top_id + at * k : NULL;
    a->list.top_logp = s->top_logp ? s->top_logp + at * k : NULL;
    a->list.dlogp = s->dlogp ? s->dlogp + at * k : NULL;
    return &a->list;
}

/* ---- log-probs ---- */

void actor_begin(struct actor *a) { model_stream_begin(a->model); }

int actor_logp(struct actor *a, const struct actor_seq *seqs, int64_t n, struct actor_cut cut, float temperature,
               struct actor_out out) {
    struct model_batch b;
    struct model_logp_args l;
    struct pack_micro m;
    int64_t at = 0;
    for (int64_t lo = 0; lo < n; lo = m.hi) {
        TRY(pack_next(&a->pack, seqs, n, lo, cut, &m));
        TRY(fill(a, seqs, &m, temperature, &b, &l));
        l.entropy = out.entropy ? a->entropy : NULL;
        l.sum_pi_sq = out.sum_pi_sq ? a->sum_pi_sq : NULL;
        l.list = list_at(a, out.list, at);
        if (m.n_targets > 0) {
            TRY(model_forward(a->model, &b, a->acts));
            TRY(model_logp(a->model, a->acts, &l));
        }
        const size_t bytes = (size_t)m.n_targets * 4;
        if (out.logp) memcpy(out.logp + at, a->logp, bytes);
        if (out.entropy) memcpy(out.entropy + at, a->entropy, bytes);
        if (out.sum_pi_sq) memcpy(out.sum_pi_sq + at, a->sum_pi_sq, bytes);
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

int actor_backward(struct actor *a, const struct actor_step_args *s, struct actor_step_result *r) {
    struct model_batch b;
    struct model_logp_args l;
    struct pack_micro m;
    int64_t at = 0;
    CHECK(a->grads != NULL);
    *r = (struct actor_step_result){0};
    bool add = false; /* the first micro-batch writes the gradients */
    for (int64_t lo = 0; lo < s->n; lo = m.hi) {
        TRY(pack_next(&a->pack, s->seqs, s->n, lo, s->cut, &m));
        TRY(fill(a, s->seqs, &m, s->temperature, &b, &l));
        l.entropy = s->entropy ? a->entropy : NULL;
        l.list = list_at(a, s->list, at);
        r->n_micro++;
        r->n_rows += m.n_rows;
        if (m.n_targets == 0) continue;
        TRY(model_forward(a->model, &b, a->acts));
        TRY(model_logp(a->model, a->acts, &l));
        memset(a->dlogp, 0, (size_t)m.n_targets * 4);
        memset(a->dentropy, 0, (size_t)m.n_targets * 4);
        TRY(s->loss(s->loss_arg, m.lo, m.hi, at, at + m.n_targets, a->logp, l.entropy, a->dlogp,
                    s->entropy_grad ? a->dentropy : NULL));
        at += m.n_targets;
        if (!all_finite(a->dlogp, m.n_targets) || (s->entropy_grad && !all_finite(a->dentropy, m.n_targets)) ||
            (l.list && l.list->dlogp && !all_finite(l.list->dlogp, m.n_targets * l.list->k))) {
            r->optim.grad_norm = NAN;
            snprintf(r->optim.bad_tensor, sizeof r->optim.bad_tensor, "the loss (d loss / d log-prob)");
            return 0;
        }
        TRY(model_backward(a->model, &b, a->acts, &l, a->dlogp, s->entropy_grad ? a->dentropy : NULL, a->grads, add));
        add = true;
    }
    return add ? 0 : dev_zero(a->dev, a->grads, (size_t)a->model->n_train * 4);
}

int actor_step(struct actor *a, const struct actor_step_args *s, struct actor_step_result *r) {
    TRY(actor_backward(a, s, r));
    if (!isfinite(r->optim.grad_norm)) return 0;
    return optim_step(a->optim, a->model, a->grads, s->optim, s->lr, &r->optim);
}
