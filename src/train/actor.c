/* actor.c - packing, micro-batches, log-probs, gradient accumulation.
 * The arithmetic of the loss is the caller's, that of the model model.h's. */
#include "train/actor.h"

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct actor {
    struct dev *dev;
    struct model *model;
    struct model_acts *acts;
    struct optim *optim;
    float *grads;
    int64_t max_rows, max_seqs;
    bool no_adapter;
    void *block, *owned_block;
    size_t block_bytes;
    /* device arrays of a packed micro-batch */
    int32_t *d_ids, *d_pos, *d_slots, *d_q_start, *d_pos0, *d_kv_start;
    /* host: the same, and the targets */
    int32_t *ids, *pos, *q_start, *zeros;
    int32_t *row, *target;
    float *inv_temp, *logp, *entropy, *sum_pi_sq, *dlogp, *dentropy;
    int64_t cap_seqs, cap_targets;
};

int64_t actor_seq_targets(const struct actor_seq *s) {
    if (!s->mask) return s->n > s->first ? s->n - s->first : 0;
    int64_t k = 0;
    for (int64_t t = 1; t < s->n; t++) k += s->mask[t] != 0;
    return k;
}

static void actor_layout(struct actor *a, struct arena *m) {
    const size_t rows = (size_t)a->max_rows * 4, seqs = (size_t)a->max_seqs * 4;
    a->d_ids = arena_take(m, rows);
    a->d_pos = arena_take(m, rows);
    a->d_slots = arena_take(m, rows);
    a->d_q_start = arena_take(m, seqs + 4);
    a->d_pos0 = arena_take(m, seqs);
    a->d_kv_start = arena_take(m, seqs);
}

static enum model_keep keep_of(const struct actor_args *a) { return a->train ? a->keep : MODEL_KEEP_NONE; }

size_t actor_block_bytes(const struct model_config *c, enum dtype act, const struct actor_args *a) {
    struct actor t = {.max_rows = a->max_rows, .max_seqs = a->max_seqs};
    struct arena m = {0};
    actor_layout(&t, &m);
    arena_take(&m, model_acts_bytes(c, act, a->max_rows, keep_of(a)));
    return m.used;
}

int actor_create(struct actor **out, const struct actor_args *args) {
    int rc = 0;
    struct actor *a = xcalloc(1, sizeof *a);
    a->dev = args->dev;
    a->model = args->model;
    a->max_rows = args->max_rows;
    a->max_seqs = args->max_seqs;
    a->no_adapter = args->no_adapter;
    a->block_bytes = actor_block_bytes(&args->model->cfg, args->model->act, args);
    a->block = args->block;
    if (!a->block) {
        TRYG(dev_alloc(a->dev, a->block_bytes, &a->owned_block), fail);
        a->block = a->owned_block;
    }
    struct arena m = {.base = a->block, .cap = a->block_bytes};
    actor_layout(a, &m);
    void *acts = arena_take(&m, model_acts_bytes(&args->model->cfg, args->model->act, a->max_rows, keep_of(args)));
    TRYG(model_acts_create(&a->acts, a->model, a->max_rows, keep_of(args), acts), fail);
    if (args->train) {
        void *g = NULL;
        CHECK(a->model->master != NULL);
        TRYG(dev_alloc(a->dev, (size_t)a->model->n_train * 4, &g), fail);
        a->grads = g;
        const struct optim_config adamw = {.kind = OPTIM_ADAMW};
        TRYG(optim_create(&a->optim, a->model, args->optim ? args->optim : &adamw), fail);
    }
    const size_t rows = (size_t)a->max_rows;
    a->ids = xmalloc(rows * 4);
    a->pos = xmalloc(rows * 4);
    a->row = xmalloc(rows * 4);
    a->target = xmalloc(rows * 4);
    a->inv_temp = xmalloc(rows * 4);
    a->logp = xmalloc(rows * 4);
    a->entropy = xmalloc(rows * 4);
    a->sum_pi_sq = xmalloc(rows * 4);
    a->dlogp = xmalloc(rows * 4);
    a->dentropy = xmalloc(rows * 4);
    a->q_start = xmalloc(((size_t)a->max_seqs + 1) * 4);
    a->zeros = xcalloc((size_t)a->max_seqs, 4);
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
    free(a->ids);
    free(a->pos);
    free(a->row);
    free(a->target);
    free(a->inv_temp);
    free(a->logp);
    free(a->entropy);
    free(a->sum_pi_sq);
    free(a->dlogp);
    free(a->dentropy);
    free(a->q_start);
    free(a->zeros);
    free(a);
}

struct optim *actor_optim(struct actor *a) { return a->optim; }
float *actor_grads(struct actor *a) { return a->grads; }

/* ---- packing ---- */

/* One micro-batch: sequences [lo, hi), rows and targets counted. */
struct micro {
    int64_t lo, hi, n_rows, n_targets;
};

/* The next micro-batch from lo on under the cut; at least one sequence. */
static int next_micro(const struct actor *a, const struct actor_seq *seqs, int64_t n, int64_t lo, struct actor_cut cut,
                      struct micro *m) {
    *m = (struct micro){.lo = lo, .hi = lo};
    while (m->hi < n) {
        const struct actor_seq *s = &seqs[m->hi];
        const bool full = (cut.max_seqs > 0 && m->hi - lo >= cut.max_seqs) ||
                          (cut.max_rows > 0 && m->n_rows + s->n > cut.max_rows) || m->n_rows + s->n > a->max_rows ||
                          m->hi - lo >= a->max_seqs;
        if (full && m->hi > lo) break;
        if (s->n > a->max_rows)
            FAIL(ERR_INVAL, "a sequence of %lld tokens is longer than the %lld planned for a micro-batch", (long long)s->n,
                 (long long)a->max_rows);
        m->n_rows += s->n;
        m->n_targets += actor_seq_targets(s);
        m->hi++;
    }
    return 0;
}

static int pack(struct actor *a, const struct actor_seq *seqs, const struct micro *m, float temperature,
                struct model_batch *b, struct model_logp_args *l) {
    int64_t r = 0, k = 0, longest = 0;
    for (int64_t i = m->lo; i < m->hi; i++) {
        const struct actor_seq *s = &seqs[i];
        a->q_start[i - m->lo] = (int32_t)r;
        if (s->n > longest) longest = s->n;
        for (int64_t t = 0; t < s->n; t++) {
            a->ids[r + t] = s->ids[t];
            a->pos[r + t] = (int32_t)t;
            if (t == 0 || (s->mask ? s->mask[t] == 0 : t < s->first)) continue;
            a->row[k] = (int32_t)(r + t - 1);
            a->target[k] = s->ids[t];
            a->inv_temp[k++] = 1.0f / temperature;
        }
        r += s->n;
    }
    const int64_t n_seqs = m->hi - m->lo;
    a->q_start[n_seqs] = (int32_t)r;
    CHECK(r == m->n_rows && k == m->n_targets);
    TRY(dev_copy_in(a->dev, a->d_ids, a->ids, (size_t)r * 4));
    TRY(dev_copy_in(a->dev, a->d_pos, a->pos, (size_t)r * 4));
    TRY(dev_copy_in(a->dev, a->d_q_start, a->q_start, (size_t)(n_seqs + 1) * 4));
    TRY(dev_copy_in(a->dev, a->d_kv_start, a->q_start, (size_t)n_seqs * 4));
    TRY(dev_copy_in(a->dev, a->d_pos0, a->zeros, (size_t)n_seqs * 4));
    for (int64_t t = 0; t < r; t++) a->pos[t] = (int32_t)t; /* slots: the row itself */
    TRY(dev_copy_in(a->dev, a->d_slots, a->pos, (size_t)r * 4));
    *b = (struct model_batch){
        .n_rows = r,
        .no_adapter = a->no_adapter,
        .ids = tensor_1d(a->d_ids, DT_I32, r),
        .pos = tensor_1d(a->d_pos, DT_I32, r),
        .slots = tensor_1d(a->d_slots, DT_I32, r),
        .seqs = {.n = n_seqs,
                 .max_q = longest,
                 .max_kv = longest,
                 .q_start = tensor_1d(a->d_q_start, DT_I32, n_seqs + 1),
                 .pos0 = tensor_1d(a->d_pos0, DT_I32, n_seqs),
                 .kv_start = tensor_1d(a->d_kv_start, DT_I32, n_seqs)},
    };
    *l = (struct model_logp_args){.n = k, .row = a->row, .target = a->target, .inv_temp = a->inv_temp, .logp = a->logp};
    return 0;
}

/* ---- log-probs ---- */

int actor_logp(struct actor *a, const struct actor_seq *seqs, int64_t n, struct actor_cut cut, float temperature,
               struct actor_out out) {
    struct model_batch b;
    struct model_logp_args l;
    struct micro m;
    int64_t at = 0;
    for (int64_t lo = 0; lo < n; lo = m.hi) {
        TRY(next_micro(a, seqs, n, lo, cut, &m));
        TRY(pack(a, seqs, &m, temperature, &b, &l));
        l.entropy = out.entropy ? a->entropy : NULL;
        l.sum_pi_sq = out.sum_pi_sq ? a->sum_pi_sq : NULL;
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
    struct micro m;
    int64_t at = 0;
    CHECK(a->grads != NULL);
    *r = (struct actor_step_result){0};
    TRY(dev_zero(a->dev, a->grads, (size_t)a->model->n_train * 4));
    for (int64_t lo = 0; lo < s->n; lo = m.hi) {
        TRY(next_micro(a, s->seqs, s->n, lo, s->cut, &m));
        TRY(pack(a, s->seqs, &m, s->temperature, &b, &l));
        l.entropy = s->entropy ? a->entropy : NULL;
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
        if (!all_finite(a->dlogp, m.n_targets) || (s->entropy_grad && !all_finite(a->dentropy, m.n_targets))) {
            r->optim.grad_norm = NAN;
            snprintf(r->optim.bad_tensor, sizeof r->optim.bad_tensor, "the loss (d loss / d log-prob)");
            return 0;
        }
        TRY(model_backward(a->model, &b, a->acts, &l, a->dlogp, s->entropy_grad ? a->dentropy : NULL, a->grads));
    }
    return 0;
}

int actor_step(struct actor *a, const struct actor_step_args *s, struct actor_step_result *r) {
    TRY(actor_backward(a, s, r));
    if (!isfinite(r->optim.grad_norm)) return 0;
    return optim_step(a->optim, a->model, a->grads, s->optim, s->lr, &r->optim);
}
