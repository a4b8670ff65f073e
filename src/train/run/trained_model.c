/* trained_model.c - forward passes, gradient accumulation and the optimizer step over packed micro-batches.
 * The arithmetic of the loss is the caller's, that of the model model/forward.h's. */
#include "train/run/trained_model.h"

#include "comm/comm.h"
#include "model/weight_streaming.h"
#include "train/run/phase_watchdog.h"

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
    struct dev_group *group;      /* NULL: one rank */
    struct rank_gradients *ranks; /* with a group, in training */
    struct pack pack;
    struct model_list list; /* k 0: none */
    bool no_adapter;
    void *owned_block;
    size_t block_bytes;
    /* host, (max_rows); out: log-probs or values */
    float *inv_temp, *out, *entropy, *sum_pi_sq, *dout, *dentropy;
    struct buf record; /* of the micro-batch at hand */
    size_t slot;       /* the longest record that any rank has had */
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

/* Never 0, as of the master. */
static size_t grads_bytes(const struct trained_model *t) {
    return (size_t)(t->model->n_master > 0 ? t->model->n_master : 1) * sizeof *t->grads;
}

static int open_training(struct trained_model *t, const struct trained_model_args *a) {
    const struct optim_config adamw = {.kind = OPTIM_ADAMW};
    struct model *const m = t->model;
    void *g = NULL;
    CHECK(m->master != NULL);
    TRY(dev_alloc(t->dev, grads_bytes(t), &g));
    t->grads = g;
    if (t->group) TRY(rank_gradients_create(&t->ranks, t->group, m, a->max_rows, t->grads));
    return optim_create_part(&t->optim, m, a->optim ? a->optim : &adamw, m->own, m->n_own);
}

int trained_model_create(struct trained_model **out, const struct trained_model_args *a) {
    int rc = 0;
    struct model *m = a->model;
    struct trained_model *t = xcalloc(1, sizeof *t);
    t->dev = a->dev;
    t->model = m;
    t->no_adapter = a->no_adapter;
    t->group = a->group && dev_group_size(a->group) > 1 ? a->group : NULL;
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
    if (a->train) TRYG(open_training(t, a), fail);
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
    rank_gradients_destroy(t->ranks);
    if (t->grads) dev_free(t->dev, t->grads, grads_bytes(t));
    if (t->owned_block) dev_free(t->dev, t->owned_block, t->block_bytes);
    pack_free_host(&t->pack);
    free(t->inv_temp);
    free(t->out);
    free(t->entropy);
    free(t->sum_pi_sq);
    free(t->dout);
    free(t->dentropy);
    buf_free(&t->record);
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

/* The loss of a micro-batch to its record; 1: all its derivatives are finite. */
static int micro_loss(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m,
                      const struct model_logp_args *l) {
    const size_t bytes = (size_t)m->n_targets * 4;
    float *const dentropy = s->entropy_grad ? t->dentropy : NULL;
    const struct micro_loss x = {.lo = m->lo,
                                 .hi = m->hi,
                                 .t0 = m->t0,
                                 .t1 = m->t0 + m->n_targets,
                                 .out = t->out,
                                 .entropy = l->entropy,
                                 .dout = t->dout,
                                 .dentropy = dentropy,
                                 .record = &t->record};
    memset(t->dout, 0, bytes);
    memset(t->dentropy, 0, bytes);
    buf_reset(&t->record);
    TRY(s->loss(s->arg, &x));
    return all_finite(t->dout, m->n_targets) && (!dentropy || all_finite(dentropy, m->n_targets)) &&
           (!l->list || !l->list->dlogp || all_finite(l->list->dlogp, m->n_targets * l->list->k));
}

static void loss_not_finite(const struct trained_model *t, struct optim_result *r) {
    r->grad_norm = NAN;
    snprintf(r->bad_tensor, sizeof r->bad_tensor, "%s",
             t->model->cfg.value ? "the critic's loss (d loss / d value)" : "the loss (d loss / d log-prob)");
}

/* A micro-batch after its loss. */
struct computed {
    struct model_batch b;
    struct model_logp_args l;
    bool finite;
};

/* Forward and loss of a micro-batch with a target; what it tells is in t->record. */
static int forward_loss(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, struct computed *c) {
    c->l = (struct model_logp_args){.entropy = s->entropy ? t->entropy : NULL, .list = list_at(t, s->list, m->t0)};
    TRY(forward(t, s->seqs, m, s->temperature, &c->b, &c->l));
    const int finite = micro_loss(t, s, m, &c->l);
    TRY(finite);
    c->finite = finite;
    return 0;
}

static int backward(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, struct computed *c,
                    const struct model_grad_sink *sink) {
    if (t->model->cfg.value) return model_value_backward(t->model, &c->b, t->acts, t->pack.row, m->n_targets, t->dout, sink);
    return model_backward(t->model, &c->b, t->acts, &c->l, t->dout, s->entropy_grad ? t->dentropy : NULL, sink);
}

static int tell(const struct mini_batch *s, const struct pack_micro *m, const void *record, size_t n, struct step_result *r) {
    r->n_rows += m->n_rows;
    return s->told ? s->told(s->arg, m, record, n) : 0;
}

/* One rank: micro-batch after micro-batch, added in place. */
static int all_micros(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int64_t n,
                      struct step_result *r) {
    struct model_grad_sink sink = {.flat = t->grads}; /* the first micro-batch writes the gradients */
    for (int64_t i = 0; i < n; i++) {
        struct computed c;
        TRY(forward_loss(t, s, &list[i], &c));
        TRY(tell(s, &list[i], t->record.p, t->record.n, r));
        if (!c.finite) {
            loss_not_finite(t, &r->optim);
            return 0;
        }
        TRY(backward(t, s, &list[i], &c, &sink));
        sink.add = true;
    }
    return 0;
}

/* ---- several ranks ---- */

/* What a rank says of its micro-batch. */
struct wave_word {
    uint64_t record; /* bytes */
    int32_t finite, stop;
};

/* All ranks' words to *all, each with room for a record of t->slot bytes behind it, which is there as far as it fits. */
static int gather_words(struct trained_model *t, const struct wave_word *own, char **all) {
    const int size = dev_group_size(t->group);
    const size_t one = sizeof *own + t->slot, n = own->record < t->slot ? own->record : t->slot;
    size_t *at = xcalloc((size_t)size + 1, sizeof *at);
    char *const mine = (*all = xcalloc((size_t)size, one)) + (size_t)dev_group_rank(t->group) * one;
    for (int k = 0; k < size; k++) at[k + 1] = at[k] + one;
    memcpy(mine, own, sizeof *own);
    if (n > 0) memcpy(mine + sizeof *own, t->record.p, n);
    const int rc = comm_all_gather(dev_group_comm(t->group), *all, at);
    free(at);
    return rc;
}

/* The records of a wave's n micro-batches to everybody, then told in order. *bad: one had a loss that is not finite; those after
 * it are not told. A stop counts once a rank has met it, for all of them. */
static int tell_wave(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int n, bool finite,
                     bool *bad, struct step_result *r) {
    const int size = dev_group_size(t->group);
    const struct wave_word own = {.record = dev_group_rank(t->group) < n ? t->record.n : 0,
                                  .finite = finite,
                                  .stop = comm_stop_asked(dev_group_comm(t->group))};
    struct wave_word word;
    char *all = NULL;
    uint64_t most = 0;
    int rc = 0;
    TRYG(gather_words(t, &own, &all), out);
    for (int k = 0; k < size; k++) {
        memcpy(&word, all + (size_t)k * (sizeof word + t->slot), sizeof word);
        if (word.record > most) most = word.record;
        if (word.stop) stage_ask_stop(word.stop);
    }
    if (most > t->slot) { /* the longest so far: once more, with room for it from now on */
        free(all);
        t->slot = (most + 7) / 8 * 8;
        TRYG(gather_words(t, &own, &all), out);
    }
    for (int k = 0; k < n && !*bad; k++) {
        const char *const at = all + (size_t)k * (sizeof word + t->slot);
        memcpy(&word, at, sizeof word);
        TRYG(tell(s, &list[k], at + sizeof word, word.record, r), out);
        *bad = !word.finite;
    }
out:
    free(all);
    return rc;
}

/* A wave of n micro-batches, one on each of the first ranks. What they tell is gathered while devices go backward; where a loss
 * is not finite its gradients are folded like others, and given up afterwards. */
static int wave(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int n, bool first, bool *bad,
                struct step_result *r) {
    const int size = dev_group_size(t->group), rank = dev_group_rank(t->group);
    int64_t *rows = xcalloc((size_t)size, sizeof *rows);
    struct model_grad_sink sink;
    struct computed c = {.finite = true};
    int rc = 0;
    for (int k = 0; k < n; k++) rows[k] = list[k].n_rows;
    rank_gradients_wave(t->ranks, n, rows, first, &sink);
    if (rank < n) TRYG(forward_loss(t, s, &list[rank], &c), out);
    if (rank < n) TRYG(backward(t, s, &list[rank], &c, &sink), out);
    else TRYG(rank_gradients_idle(t->ranks), out);
    TRYG(tell_wave(t, s, list, n, c.finite, bad, r), out);
out:
    free(rows);
    return rc;
}

static int all_waves(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int64_t n,
                     struct step_result *r) {
    const int size = dev_group_size(t->group);
    bool bad = false;
    int rc = 0;
    for (int64_t i = 0; i < n && !bad && rc == 0; i += size)
        rc = wave(t, s, list + i, (int)(n - i < size ? n - i : size), i == 0, &bad, r);
    if (rc < 0 && rc != ERR_SIGNAL) return err_pass(rc, __FILE__, __LINE__);
    TRY(rank_gradients_join(t->ranks)); /* after a stop as well, on which all agree: the ranks go on */
    if (bad) loss_not_finite(t, &r->optim);
    return rc;
}

int trained_model_backward(struct trained_model *t, const struct mini_batch *s, struct step_result *r) {
    struct pack_micro *list;
    int64_t n = 0;
    CHECK(t->grads != NULL);
    *r = (struct step_result){0};
    TRY(pack_list(&t->pack, s->seqs, s->n, s->cut, &list, &r->n_micro));
    for (int64_t i = 0; i < r->n_micro; i++) {
        if (list[i].n_targets > 0) list[n++] = list[i];
        else r->n_rows += list[i].n_rows;
    }
    const int rc = n == 0     ? dev_zero(t->dev, t->grads, grads_bytes(t))
                   : t->group ? all_waves(t, s, list, n, r)
                              : all_micros(t, s, list, n, r);
    free(list);
    return rc;
}

int trained_model_step(struct trained_model *t, const struct mini_batch *m, const struct optim_config *optim, double lr,
                       struct step_result *r) {
    TRY(trained_model_backward(t, m, r));
    if (!isfinite(r->optim.grad_norm)) return 0;
    if (t->ranks) return rank_gradients_step(t->ranks, t->optim, optim, lr, &r->optim);
    return optim_step(t->optim, t->model, t->grads, optim, lr, &r->optim);
}
