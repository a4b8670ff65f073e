/* training_pass.c - gradient accumulation and the optimizer step over the packed micro-batches of a mini-batch, on one rank or
 * several. The arithmetic of the loss is the caller's, that of the model model/forward.h's. */
#include "train/trained_model_int.h"

#include "run/phase_watchdog.h"

#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- a micro-batch ---- */

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
                                 .entropy = s->entropy ? t->entropy : NULL,
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
    struct model_batch b, next; /* next: with the token after each row */
    struct model_logp_args l, mtp;
    struct pack_targets own;       /* targets that are computed here */
    struct pack_targets predicted; /* of mtp, likewise */
    int64_t n_predicted;           /* of the whole micro-batch */
    bool finite;
};

/* ---- routers (router_balance.h) ---- */

/* v (n) of 8 bytes = its sum over the ranks, in their order. */
static int sum_ranks(struct trained_model *t, void *v, int64_t n, bool f64) {
    if (!t->group) return 0;
    const int size = collective_size(t->group);
    size_t *at = xmalloc((size_t)(size + 1) * sizeof *at);
    char *all = xmalloc((size_t)size * (size_t)n * 8);
    for (int r = 0; r <= size; r++) at[r] = (size_t)r * (size_t)n * 8;
    memcpy(all + at[collective_rank(t->group)], v, (size_t)n * 8);
    const int rc = comm_all_gather(collective_comm(t->group), all, at);
    memset(v, 0, (size_t)n * 8);
    for (int64_t i = 0; i < size * n && rc == 0; i++) {
        if (f64) ((double *)v)[i % n] += ((const double *)(const void *)all)[i];
        else ((int64_t *)v)[i % n] += ((const int64_t *)(const void *)all)[i];
    }
    free(all);
    free(at);
    return rc;
}

static int sum_load(struct trained_model *t) {
    const struct routers *const u = &t->routers;
    TRY(sum_ranks(t, u->count, u->n, false));
    return u->scored ? sum_ranks(t, u->scored, u->n, false) : 0;
}

/* Passes over the mini-batch that count the load of experts. */
static int count_load(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int64_t n) {
    const int64_t each = ranks_of_one(t), size = (t->group ? collective_size(t->group) : 1) / each,
                  place = (t->group ? collective_rank(t->group) : 0) / each;
    int64_t at[MODEL_MOST_PARTS + 1];
    struct model_batch b;
    struct pack_targets own;
    for (int64_t i = 0; i < n; i += size) { /* a round of the ranks: the same passes over sharded weights */
        if (i + place < n && place < size) {
            TRY(micro_batch_fill(&t->pack, s->seqs, &list[i + place], &b));
            TRY(trained_model__take_part(t, &list[i + place], t->context.parts, &b, &own, at));
            TRY(model_forward(t->model, &b, t->acts));
            TRY(model_router_load(t->model, t->acts, t->routers.count, t->routers.scored));
        } else if (t->collective) {
            TRY(model_idle(t->model, t->no_adapter));
        }
    }
    t->routers.counted = true;
    return sum_load(t);
}

/* n: micro-batches of the list, all of them with a target. */
static int begin_routers(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int64_t n,
                         struct step_result *r) {
    struct routers *const u = &t->routers;
    const struct router_losses *const c = &u->losses;
    r->router = (struct router_load){.layers = model_router_layers(&t->model->cfg),
                                     .experts = t->model->cfg.n_experts,
                                     .balanced = c->balance > 0,
                                     .has_z = c->z > 0};
    for (int64_t i = 0; i < n; i++) r->router.rows += list[i].n_rows;
    u->counted = u->read = false;
    if (u->n == 0) return 0;
    memset(u->count, 0, (size_t)u->n * sizeof *u->count);
    if (u->scored) memset(u->scored, 0, (size_t)u->n * sizeof *u->scored);
    u->loss = xcalloc((size_t)(r->n_micro * t->context.parts) + 1, 2 * sizeof *u->loss);
    return c->balance > 0 && (n > 1 || t->group) ? count_load(t, s, list, n) : 0;
}

/* After the forward pass of a micro-batch. */
static int read_routers(struct trained_model *t, const struct router_load *r) {
    struct routers *const u = &t->routers;
    const struct model_router_losses losses = {.load = u->load, .z = router_z(r, &u->losses)};
    if (u->n == 0) return 0;
    if (!u->counted) TRY(model_router_load(t->model, t->acts, u->count, u->scored));
    if ((!r->balanced && !r->has_z) || u->read) return 0;
    u->read = true;
    router_balance_load(r, u->scored ? u->scored : u->count, t->model->cfg.n_choices, &u->losses, u->load);
    return model_router_balance(t->model, t->acts, &losses);
}

static int end_routers(struct trained_model *t, int rc, struct step_result *r) {
    struct routers *const u = &t->routers;
    double *const loss = u->loss;
    u->loss = NULL;
    if (rc == 0 && u->n && !u->counted) rc = sum_load(t);
    const int64_t n = r->n_micro * t->context.parts;
    if (rc == 0 && u->n && (r->router.balanced || r->router.has_z)) rc = sum_ranks(t, loss, 2 * n, true);
    for (int64_t i = 0; loss && i < n; i++) {
        r->router.loss += loss[2 * i];
        r->router.z_loss += loss[2 * i + 1];
    }
    if (u->n) router_load_metrics(&r->router, u->count);
    free(loss);
    return rc;
}

/* ---- the MTP layer's loss ---- */

/* Tokens of s that it predicts: targets with two tokens before them. */
static int64_t mtp_targets(const struct packed_seq *s) {
    int64_t n = 0;
    for (int64_t i = 2; i < s->n; i++) n += s->mask ? s->mask[i] != 0 : i >= s->first;
    return n;
}

/* Fills next, row and target; returns how many are predicted. */
static int64_t mtp_fill(struct trained_model *t, const struct packed_seq *seqs, const struct pack_micro *m) {
    int64_t r = 0, k = 0;
    for (int64_t i = m->lo; i < m->hi; i++) {
        const struct packed_seq *const s = &seqs[i];
        for (int64_t at = 0; at < s->n; at++) {
            t->mtp.next[r + at] = at + 1 < s->n ? s->ids[at + 1] : 0; /* read by no row with a loss */
            if (at < 2 || (s->mask ? s->mask[at] == 0 : at < s->first)) continue;
            t->mtp.row[k] = (int32_t)(r + at - 2);
            t->mtp.target[k] = s->ids[at];
            t->mtp.dlogp[k++] = (float)(-t->mtp.weight / (double)t->mtp.n);
        }
        r += s->n;
    }
    return k;
}

/* Leaves c with what is this rank's; at: where the log-probs of each rank's begin. */
static void mtp_part(struct trained_model *t, struct computed *c, int64_t *at) {
    const struct model_parts *const cut = &t->context.cut;
    const int rank = collective_rank(t->context.group);
    int64_t k = at[0] = 0;
    for (int r = 0; r < cut->n; r++) {
        while (k < c->n_predicted && t->mtp.row[k] < cut->cut[r + 1]) k++;
        at[r + 1] = k;
    }
    c->predicted = (struct pack_targets){at[rank], at[rank + 1]};
    c->next.ids = tensor_rows(c->next.ids, cut->cut[rank], c->next.n_rows);
    for (k = at[rank]; k < at[rank + 1]; k++) t->mtp.row[k] -= (int32_t)cut->cut[rank];
}

/* Its pass over a micro-batch; the sum goes behind the record. */
static int mtp_forward(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, struct computed *c) {
    struct mtp_sum sum = {.n = mtp_fill(t, s->seqs, m)};
    const struct tensor next = tensor_1d(t->mtp.d_next, DT_I32, m->n_rows);
    int64_t at[MODEL_MOST_PARTS + 1];
    c->n_predicted = sum.n;
    c->predicted = (struct pack_targets){0, sum.n};
    c->next = c->b;
    c->next.ids = next;
    if (t->context.ranks) mtp_part(t, c, at);
    const int64_t lo = c->predicted.lo;
    c->mtp = (struct model_logp_args){.n = c->predicted.hi - lo,
                                      .row = t->mtp.row + lo,
                                      .target = t->mtp.target + lo,
                                      .inv_temp = t->mtp.ones,
                                      .logp = t->mtp.logp + lo};
    TRY(dev_copy_in(t->dev, t->mtp.d_next, t->mtp.next, (size_t)m->n_rows * sizeof *t->mtp.next));
    if (t->context.ranks) model_context_next(t->context.ranks, next);
    TRY(model_mtp_begin(t->model, t->acts));
    TRY(model_mtp_forward(t->model, &c->next, t->acts, TENSOR_NONE));
    TRY(model_mtp_logp(t->model, t->acts, &c->mtp));
    TRY(trained_model__gather(t, t->mtp.logp, at, 1));
    for (int64_t i = 0; i < sum.n; i++) sum.logp += (double)t->mtp.logp[i];
    return buf_add(&t->record, &sum, sizeof sum);
}

/* Forward and loss of a micro-batch with a target; the loss' statistics are in t->record. */
static int forward_loss(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, struct computed *c) {
    c->l = (struct model_logp_args){.entropy = s->entropy ? t->entropy : NULL, .train = true};
    int64_t at[MODEL_MOST_PARTS + 1];
    TRY(micro_batch_fill(&t->pack, s->seqs, m, &c->b));
    TRY(trained_model__take_part(t, m, t->context.parts, &c->b, &c->own, at));
    c->l.list = trained_model__list(t, s->list, m->t0 + c->own.lo);
    TRY(trained_model__forward(t, s->temperature, c->own, &c->b, &c->l));
    TRY(trained_model__gather(t, t->out, at, 1));
    TRY(trained_model__gather(t, s->entropy ? t->entropy : NULL, at, 1));
    TRY(trained_model__gather_lists(t, s->list, m->t0, at));
    trained_model__list(t, s->list, m->t0);
    const int finite = micro_loss(t, s, m, &c->l);
    TRY(finite);
    c->finite = finite;
    trained_model__list(t, s->list, m->t0 + c->own.lo);
    return t->mtp.weight > 0 ? mtp_forward(t, s, m, c) : 0;
}

/* Those of the parts that are here. */
static int router_losses_of(struct trained_model *t, const struct pack_micro *m, const struct model_batch *b) {
    const int first = b->context ? t->context.first : 0;
    for (int i = 0; i < (b->parts ? b->parts->n : 1); i++) {
        const struct model_range rows =
            b->parts ? (struct model_range){b->parts->cut[i], b->parts->cut[i + 1]} : (struct model_range){0, b->n_rows};
        double *const loss = t->routers.loss + 2 * (m->index * t->context.parts + first + i);
        TRY(model_router_balance_loss(t->model, t->acts, rows, loss, loss + 1));
    }
    return 0;
}

static int backward(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, struct computed *c,
                    const struct model_grad_sink *sink) {
    const struct model_value_backward_args value = {
        .batch = &c->b, .row = t->pack.row + c->own.lo, .n = c->own.hi - c->own.lo, .dvalue = t->dout + c->own.lo, .sink = sink};
    struct model_backward_args logp = {.batch = &c->b,
                                       .logp = &c->l,
                                       .dlogp = t->dout + c->own.lo,
                                       .dentropy = s->entropy_grad ? t->dentropy + c->own.lo : NULL,
                                       .sink = sink};
    if (t->mtp.weight > 0) {
        logp.mtp.batch = &c->next;
        logp.mtp.logp = c->n_predicted > 0 ? &c->mtp : NULL;
        logp.mtp.dlogp = t->mtp.dlogp + c->predicted.lo;
    }
    TRY(t->model->cfg.value ? model_value_backward(t->model, t->acts, &value) : model_backward(t->model, t->acts, &logp));
    return t->routers.read ? router_losses_of(t, m, &c->b) : 0;
}

static int report(const struct trained_model *t, const struct mini_batch *s, const struct pack_micro *m, const void *record,
                  size_t n, struct step_result *r) {
    r->n_rows += m->n_rows;
    if (t->mtp.weight > 0) {
        struct mtp_sum sum;
        CHECK(n >= sizeof sum);
        n -= sizeof sum;
        memcpy(&sum, (const char *)record + n, sizeof sum);
        r->mtp.logp += sum.logp;
        r->mtp.n += sum.n;
    }
    return s->on_record ? s->on_record(s->arg, m, record, n) : 0;
}

/* One rank: micro-batch after micro-batch, added in place; the first chunk where the sum is. */
static int all_micros(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int64_t n,
                      struct step_result *r) {
    const int64_t chunk = t->chunk ? t->grad_chunk : n; /* chunks of one: a sum in place has the bits of their fold */
    for (int64_t i = 0; i < n; i++) {
        const struct model_grad_sink sink = {.flat = i < chunk ? t->grads : t->chunk, .add = i % chunk > 0};
        struct computed c;
        TRY(forward_loss(t, s, &list[i], &c));
        TRY(read_routers(t, &r->router));
        TRY(report(t, s, &list[i], t->record.p, t->record.n, r));
        if (!c.finite) {
            loss_not_finite(t, &r->optim);
            return 0;
        }
        TRY(backward(t, s, &list[i], &c, &sink));
        if (i < chunk || (i % chunk < chunk - 1 && i < n - 1)) continue;
        const struct tensor x = tensor_1d(t->chunk, DT_F32, t->model->n_master);
        TRY(dev_fold(t->dev, tensor_1d(t->grads, DT_F32, t->model->n_master), &x, 1, true));
    }
    return 0;
}

/* ---- several ranks ---- */

/* The headers of a rank's message in a wave: of the message, whose micro-batches' records have `bytes`, and of each record. */
struct wave_head {
    uint64_t bytes;
    int64_t stop;
};
struct micro_head {
    uint64_t bytes; /* without what aligns the next one to 8 */
    int64_t finite;
};

/* Keeps the record of the current micro-batch until the wave ends. */
static int keep_record(struct trained_model *t, bool finite) {
    const struct micro_head w = {.bytes = t->record.n, .finite = finite};
    TRY(buf_add(&t->records, &w, sizeof w));
    TRY(buf_add(&t->records, t->record.p, t->record.n));
    return buf_add(&t->records, (char[8]){0}, (8 - t->record.n % 8) % 8);
}

/* Gathers all ranks' headers to *all, each followed by t->slot bytes for its records, as far as they fit. */
static int gather_records(struct trained_model *t, const struct wave_head *own, char **all) {
    const int size = collective_size(t->group);
    const size_t one = sizeof *own + t->slot, n = own->bytes < t->slot ? own->bytes : t->slot;
    size_t *at = xcalloc((size_t)size + 1, sizeof *at);
    char *const mine = (*all = xcalloc((size_t)size, one)) + (size_t)collective_rank(t->group) * one;
    for (int k = 0; k < size; k++) at[k + 1] = at[k] + one;
    memcpy(mine, own, sizeof *own);
    if (n > 0) memcpy(mine + sizeof *own, t->records.p, n);
    const int rc = comm_all_gather(collective_comm(t->group), *all, at);
    free(at);
    return rc;
}

/* *all: every rank's message. A stop request that reached one rank counts for all. */
static int gather_wave(struct trained_model *t, char **all) {
    const struct wave_head own = {.bytes = t->records.n, .stop = comm_stop_asked(collective_comm(t->group))};
    struct wave_head head;
    uint64_t most = 0;
    TRY(gather_records(t, &own, all));
    for (int k = 0; k < collective_size(t->group); k++) {
        memcpy(&head, *all + (size_t)k * (sizeof head + t->slot), sizeof head);
        if (head.bytes > most) most = head.bytes;
        if (head.stop) phase_ask_stop((int)head.stop);
    }
    if (most <= t->slot) return 0;
    free(*all); /* the longest message so far: gather again, with room for it from now on */
    t->slot = most;
    return gather_records(t, &own, all);
}

/* The passes of a mini-batch on several ranks. */
struct waves {
    const struct mini_batch *s;
    struct step_result *r;
    bool bad; /* a micro-batch had a loss that is not finite */
};

/* Reports the micro-batches of a wave, in the order of the list, which is that of ranks; none after a bad one. */
static int report_wave(struct trained_model *t, struct waves *w, const struct pack_micro *list, int64_t n) {
    struct micro_head head;
    char *all = NULL;
    const char *at = NULL;
    int rc = 0;
    TRYG(gather_wave(t, &all), out);
    for (int64_t i = 0; i < n && !w->bad; i++) {
        const size_t rank = (size_t)(i / t->grad_chunk) * (size_t)ranks_of_one(t);
        if (i % t->grad_chunk == 0) at = all + rank * (sizeof(struct wave_head) + t->slot) + sizeof(struct wave_head);
        memcpy(&head, at, sizeof head);
        TRYG(report(t, w->s, &list[i], at + sizeof head, head.bytes, w->r), out);
        w->bad = !head.finite;
        at += sizeof head + (head.bytes + 7) / 8 * 8;
    }
out:
    free(all);
    return rc;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* This rank's chunk of a wave of n micro-batches. Where a loss is not finite its gradients are folded like others, and discarded
 * afterwards. */
static int run_chunk(struct trained_model *t, const struct waves *w, const struct pack_micro *list, int64_t n) {
    const struct mini_batch *const s = w->s;
    const int64_t longest = least(n, t->grad_chunk), left = n - collective_rank(t->group) / ranks_of_one(t) * t->grad_chunk,
                  own = least(left, longest);
    buf_reset(&t->records);
    for (int64_t i = 0; i < own; i++) {
        const struct pack_micro *const m = &list[n - left + i];
        struct model_grad_sink sink;
        struct computed c;
        TRY(forward_loss(t, s, m, &c));
        TRY(read_routers(t, &w->r->router));
        TRY(keep_record(t, c.finite));
        TRY(all_reduce_sink(t->ranks, i > 0, i == longest - 1, &sink));
        TRY(backward(t, s, m, &c, &sink));
    }
    for (int64_t i = own > 0 ? own : 0; i < longest; i++) { /* others compute: the same passes over the sharded weights */
        TRY(model_idle(t->model, t->no_adapter));
        if (i + 1 < longest) TRY(model_idle_back(t->model));
    }
    return own == longest ? 0 : all_reduce_idle(t->ranks);
}

/* A wave of n micro-batches, a chunk on each of the first ranks. Gathering the records overlaps with backward on the devices. */
static int wave(struct trained_model *t, struct waves *w, const struct pack_micro *list, int64_t n, bool first) {
    const int chunks = (int)((n + t->grad_chunk - 1) / t->grad_chunk), each = ranks_of_one(t);
    int64_t *rows = xcalloc((size_t)collective_size(t->group), sizeof *rows);
    int rc = 0;
    for (int k = 0; k < chunks && t->grad_chunk == 1; k++) /* of those that share a micro-batch the last has its rows */
        rows[(k + 1) * each - 1] = model_embedded_rows(&t->model->cfg, list[k].n_rows);
    all_reduce_wave(t->ranks, &(struct all_reduce_wave){chunks * each, rows, t->context.times, first});
    TRYG(run_chunk(t, w, list, n), out);
    TRYG(report_wave(t, w, list, n), out);
out:
    free(rows);
    return rc;
}

static int all_waves(struct trained_model *t, const struct mini_batch *s, const struct pack_micro *list, int64_t n,
                     struct step_result *r) {
    const int64_t each = t->context.groups ? t->context.groups : t->grad_chunk * collective_size(t->group);
    struct waves w = {.s = s, .r = r};
    int rc = 0;
    for (int64_t i = 0; i < n && !w.bad && rc == 0; i += each) rc = wave(t, &w, list + i, least(n - i, each), i == 0);
    if (rc < 0 && rc != ERR_SIGNAL) return err_pass(rc, __FILE__, __LINE__);
    TRY(all_reduce_join(t->ranks)); /* after a stop as well, on which all agree: the ranks go on */
    TRY(model_stream_end(t->model));
    if (w.bad) loss_not_finite(t, &r->optim);
    return rc;
}

int trained_model_backward(struct trained_model *t, const struct mini_batch *s, struct step_result *r) {
    struct pack_micro *list;
    int64_t n = 0;
    CHECK(t->grads != NULL);
    *r = (struct step_result){0};
    TRY(micro_batch_list(&t->pack, s->seqs, s->n, s->cut, &list, &r->n_micro));
    t->mtp.n = 0;
    for (int64_t i = 0; i < s->n && t->mtp.weight > 0; i++) t->mtp.n += mtp_targets(&s->seqs[i]);
    model_stream_begin(t->model); /* the weights have changed, or others have used the block */
    for (int64_t i = 0; i < r->n_micro; i++) {
        if (list[i].n_targets > 0) list[n++] = list[i];
        else r->n_rows += list[i].n_rows;
    }
    int rc = begin_routers(t, s, list, n, r);
    if (rc == 0)
        rc = n == 0     ? dev_zero(t->dev, t->grads, trained_model__grads_bytes(t))
             : t->group ? all_waves(t, s, list, n, r)
                        : all_micros(t, s, list, n, r);
    rc = end_routers(t, rc, r);
    free(list);
    return rc;
}

int trained_model_step(struct trained_model *t, const struct mini_batch *m, const struct optim_config *optim, double lr,
                       struct step_result *r) {
    TRY(trained_model_backward(t, m, r));
    if (!isfinite(r->optim.grad_norm)) return 0;
    if (t->ranks) return all_reduce_step(t->ranks, t->optim, optim, lr, &r->optim);
    return optim_step(t->optim, t->model, t->grads, optim, lr, &r->optim);
}
