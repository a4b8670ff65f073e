/* update_critic.c - the critic's two stages of a step: values before the advantages,
 * its own updates after them.  The mirror of update_actor.c; the loss lives in algo. */
#include "train/ppo/ppo_int.h"

#include "base/buf.h"
#include "base/err.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int ppo_values(struct ppo *p, struct batch *b) {
    const struct actor_cut cut = p->k.critic.values_cut;
    struct actor_seq *seqs;
    struct batch_col *responses;
    double *col;
    TRY(batch_get(b, "responses", BATCH_I32, &responses));
    TRY(ppo_sequences(b, &seqs));
    const int64_t n = responses->off[b->n_rows];
    float *values = xmalloc((size_t)n * sizeof *values);
    int rc = 0;
    for (int64_t lo = 0, hi; lo < b->n_rows; lo = hi) { /* in pieces, for the watchdog and the progress */
        hi = lo + (cut.max_seqs > 0 ? cut.max_seqs : 16);
        if (hi > b->n_rows) hi = b->n_rows;
        TRYG(critic_values(p->critic, seqs + lo, hi - lo, cut, values + responses->off[lo]), out);
        stage_beat(p->stages);
        track_progress(p->track, p->step, "values", hi, b->n_rows, 0);
        if (stage_stop_signal()) FAILG(out, ERR_SIGNAL, "stopped by %s", stage_signal_name(stage_stop_signal()));
    }
    TRYG(ppo_add_f64(b, "values", "responses", &col), out);
    for (int64_t t = 0; t < n; t++) {
        if (!isfinite(values[t])) FAILG(out, ERR_NUMERIC, "values: not finite at token %lld of the batch", (long long)t);
        col[t] = (double)values[t];
    }
out:
    free(values);
    free(seqs);
    return rc;
}

/* ---- the update ---- */

struct update {
    struct ppo *p;
    const int64_t *off; /* of the mini-batch's rows */
    const uint8_t *mask;
    const double *values, *returns; /* per token of the mini-batch */
    double *vpreds, *dvpreds;
    struct algo_agg agg;
    struct algo_metrics sums; /* over micro-batches */
    int64_t n_micro, done, total;
};

static int value_loss(void *arg, int64_t lo, int64_t hi, int64_t t0, int64_t t1, const float *vpreds, float *dvpreds) {
    struct update *u = arg;
    const struct algo_ragged r = {.n = hi - lo, .off = u->off + lo, .mask = u->mask};
    for (int64_t t = t0; t < t1; t++) u->vpreds[t] = (double)vpreds[t - t0];
    const struct algo_value_args a = {.r = &r,
                                      .vpreds = u->vpreds,
                                      .values = u->values,
                                      .returns = u->returns,
                                      .cliprange_value = u->p->k.critic.cliprange,
                                      .agg = u->agg};
    struct algo_metrics m = {0};
    double loss;
    TRY(algo_value_loss(&a, &loss, u->dvpreds, &m));
    for (int64_t t = t0; t < t1; t++) dvpreds[t - t0] = (float)u->dvpreds[t];
    ppo_add_metrics(&u->sums, &m);
    algo_metrics_free(&m);
    u->n_micro++;
    u->done += hi - lo;
    stage_beat(u->p->stages);
    track_progress(u->p->track, u->p->step, "update_critic", u->done, u->total, 0);
    return 0;
}

/* One optimizer step over the rows of mini. */
static int update_mini(struct ppo *p, struct batch *mini, struct actor_cut cut, struct update *u, double lr,
                       struct optim_result *r) {
    const struct ppo_critic_config *k = &p->k.critic;
    struct batch_col *responses;
    struct actor_seq *seqs;
    TRY(batch_get(mini, "responses", BATCH_I32, &responses));
    const int64_t n = responses->off[mini->n_rows];
    uint8_t *mask = ppo_mask(mini);
    double *work = xcalloc((size_t)n * 2, sizeof *work);
    u->off = responses->off;
    u->mask = mask;
    u->values = batch_find(mini, "values")->f64;
    u->returns = batch_find(mini, "returns")->f64;
    u->vpreds = work;
    u->dvpreds = work + n;
    const struct algo_ragged whole = {.n = mini->n_rows, .off = u->off, .mask = mask};
    u->agg = (struct algo_agg){.mode = k->agg_mode,
                               .batch_num_tokens = algo_n_valid(&whole),
                               .global_batch_size = mini->n_rows,
                               .loss_scale_factor = k->loss_scale_factor,
                               .width = p->k.max_response_length};
    int rc = ppo_sequences(mini, &seqs);
    if (rc == 0) {
        const struct critic_step_args a = {
            .seqs = seqs, .n = mini->n_rows, .cut = cut, .loss = value_loss, .loss_arg = u, .optim = &k->optim, .lr = lr};
        rc = critic_step(p->critic, &a, r);
        free(seqs);
    }
    free(mask);
    free(work);
    return rc;
}

int ppo_update_critic(struct ppo *p, struct batch *b) {
    const struct ppo_critic_config *k = &p->k.critic;
    const int64_t size = k->mini_batch_size * p->k.train.n;
    const double lr = optim_lr(&k->optim, p->step - (k->zero_indexed_step ? 1 : 0));
    struct update u = {.p = p, .total = b->n_rows * k->epochs};
    int64_t n_steps = 0, *order = xmalloc((size_t)b->n_rows * sizeof *order);
    double norm_sum = 0;
    bool bad = false;
    int rc = 0;
    for (int64_t epoch = 0; epoch < k->epochs && rc == 0 && !bad; epoch++) {
        ppo_epoch_order(p, k->shuffle, k->seed, b->n_rows, epoch, order);
        for (int64_t lo = 0; lo < b->n_rows && rc == 0 && !bad; lo += size) {
            struct batch mini;
            struct actor_cut cut = k->update_cut;
            struct optim_result r;
            TRYG(ppo_mini_batch(&mini, &cut, b, order + lo, b->n_rows - lo < size ? b->n_rows - lo : size), out);
            rc = update_mini(p, &mini, cut, &u, lr, &r);
            if (rc == 0 && !isfinite(r.grad_norm)) {
                bad = true;
                rc = ppo_bad_gradient(p, &mini, &r);
            } else if (rc == 0) {
                norm_sum += r.grad_norm;
                n_steps++;
            }
            free(cut.ends);
            batch_free(&mini);
        }
    }
    for (int64_t i = 0; i < u.sums.n; i++) {
        const struct algo_metric *v = &u.sums.v[i]; /* the loss sums over micro-batches, the rest averages */
        metrics_set(&p->metrics, strcmp(v->name, "critic/vf_loss") == 0 ? v->value : v->value / (double)u.n_micro, "%s", v->name);
    }
    if (n_steps > 0) metrics_set(&p->metrics, norm_sum / (double)n_steps, "critic/grad_norm");
    metrics_set(&p->metrics, lr, "critic/lr");
    metrics_set_i64(&p->metrics, bad ? 1 : 0, "critic/skipped_steps");
out:
    algo_metrics_free(&u.sums);
    free(order);
    return rc;
}
