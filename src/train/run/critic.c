/* critic.c - values, gradient accumulation and the optimizer step of a critic.
 * The arithmetic of the loss is the caller's, that of the model model/forward.h's. */
#include "train/run/critic.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct critic {
    struct model *model;
    struct model_acts *acts;
    struct optim *optim;
    float *grads;
    struct pack pack;
    void *owned_block;
    size_t block_bytes;
    float *values, *dvalues; /* host, (max_rows) */
};

size_t critic_block_bytes(const struct model_config *c, enum dtype act, const struct critic_args *a) {
    struct pack p = {.max_rows = a->max_rows, .max_seqs = a->max_seqs};
    struct arena m = {0};
    pack_layout(&p, &m);
    arena_take(&m, model_acts_bytes(c, act, a->max_rows, a->keep));
    return m.used;
}

int critic_create(struct critic **out, const struct critic_args *args) {
    int rc = 0;
    void *block = args->block, *g = NULL;
    struct model *model = args->model;
    struct critic *c = xcalloc(1, sizeof *c);
    CHECK(model->cfg.value && model->master != NULL && args->keep.train);
    c->model = model;
    c->pack = (struct pack){.dev = args->dev, .max_rows = args->max_rows, .max_seqs = args->max_seqs};
    c->block_bytes = critic_block_bytes(&model->cfg, model->act, args);
    if (!block) {
        TRYG(dev_alloc(args->dev, c->block_bytes, &c->owned_block), fail);
        block = c->owned_block;
    }
    struct arena m = {.base = block, .cap = c->block_bytes};
    pack_layout(&c->pack, &m);
    void *acts = arena_take(&m, model_acts_bytes(&model->cfg, model->act, args->max_rows, args->keep));
    TRYG(model_acts_create(&c->acts, model, args->max_rows, args->keep, acts), fail);
    TRYG(dev_alloc(args->dev, (size_t)model->n_train * 4, &g), fail);
    c->grads = g;
    const struct optim_config adamw = {.kind = OPTIM_ADAMW};
    TRYG(optim_create(&c->optim, model, args->optim ? args->optim : &adamw), fail);
    pack_alloc_host(&c->pack);
    c->values = xmalloc((size_t)args->max_rows * 4);
    c->dvalues = xmalloc((size_t)args->max_rows * 4);
    *out = c;
    return 0;
fail:
    critic_destroy(c);
    return rc;
}

void critic_destroy(struct critic *c) {
    if (!c) return;
    model_acts_destroy(c->acts);
    optim_destroy(c->optim, c->model);
    if (c->grads) dev_free(c->pack.dev, c->grads, (size_t)c->model->n_train * 4);
    if (c->owned_block) dev_free(c->pack.dev, c->owned_block, c->block_bytes);
    pack_free_host(&c->pack);
    free(c->values);
    free(c->dvalues);
    free(c);
}

struct optim *critic_optim(struct critic *c) {
    return c->optim;
}
float *critic_grads(struct critic *c) { return c->grads; }

int critic_values(struct critic *c, const struct actor_seq *seqs, int64_t n, struct actor_cut cut, float *values) {
    struct model_batch b;
    struct pack_micro m;
    for (int64_t lo = 0; lo < n; lo = m.hi) {
        TRY(pack_next(&c->pack, seqs, n, lo, cut, &m));
        if (m.n_targets == 0) continue;
        TRY(pack_fill(&c->pack, seqs, &m, &b));
        TRY(model_forward(c->model, &b, c->acts));
        TRY(model_value(c->model, c->acts, c->pack.row, m.n_targets, values));
        values += m.n_targets;
    }
    return 0;
}

static bool all_finite(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return false;
    return true;
}

int critic_backward(struct critic *c, const struct critic_step_args *s, struct optim_result *r) {
    struct model_batch b;
    struct pack_micro m;
    int64_t at = 0;
    *r = (struct optim_result){0};
    bool add = false; /* the first micro-batch writes the gradients */
    for (int64_t lo = 0; lo < s->n; lo = m.hi) {
        TRY(pack_next(&c->pack, s->seqs, s->n, lo, s->cut, &m));
        if (m.n_targets == 0) continue;
        TRY(pack_fill(&c->pack, s->seqs, &m, &b));
        TRY(model_forward(c->model, &b, c->acts));
        TRY(model_value(c->model, c->acts, c->pack.row, m.n_targets, c->values));
        memset(c->dvalues, 0, (size_t)m.n_targets * 4);
        TRY(s->loss(s->loss_arg, m.lo, m.hi, at, at + m.n_targets, c->values, c->dvalues));
        at += m.n_targets;
        if (!all_finite(c->dvalues, m.n_targets)) {
            r->grad_norm = NAN;
            snprintf(r->bad_tensor, sizeof r->bad_tensor, "the critic's loss (d loss / d value)");
            return 0;
        }
        TRY(model_value_backward(c->model, &b, c->acts, c->pack.row, m.n_targets, c->dvalues, c->grads, add));
        add = true;
    }
    return add ? 0 : dev_zero(c->pack.dev, c->grads, (size_t)c->model->n_train * 4);
}

int critic_step(struct critic *c, const struct critic_step_args *s, struct optim_result *r) {
    TRY(critic_backward(c, s, r));
    if (!isfinite(r->grad_norm)) return 0;
    return optim_step(c->optim, c->model, c->grads, s->optim, s->lr, r);
}
