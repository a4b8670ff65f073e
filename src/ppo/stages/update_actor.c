/* update_actor.c - the policy's updates: ppo_epochs over a batch in mini-batches.  Formulas live in algo.
 *
 * Until the first optimizer step its forward passes are the policy's that generated, so the log-probs of the rollout are
 * compared with them at no cost (DESIGN invariant 1). */
#include "ppo/stages/stages.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the rollout's probabilities against training's (verl utils/debug/metrics.py calculate_debug_metrics) ---- */

struct rollout_diff {
    int64_t n;
    double max, sum, squares;
    double a, b, aa, bb, ab;    /* sums of the two probabilities less PIVOT, of their squares and products */
    int64_t uid, sample, token; /* where the largest difference is, and the log-probs there */
    float rollout, training;
};
#define PIVOT 0.5

/* 1: the largest difference so far. */
static bool diff_add(struct rollout_diff *d, float rollout, float training) {
    const double a = exp((double)training) - PIVOT, b = exp((double)rollout) - PIVOT, diff = fabs(a - b);
    d->n++;
    d->sum += diff;
    d->squares += diff * diff;
    d->a += a;
    d->b += b;
    d->aa += a * a;
    d->bb += b * b;
    d->ab += a * b;
    if (diff <= d->max) return false;
    d->max = diff;
    d->rollout = rollout;
    d->training = training;
    return true;
}

/* The sums of a micro-batch to those before it. */
static void diff_merge(struct rollout_diff *d, const struct rollout_diff *x) {
    d->n += x->n;
    d->sum += x->sum;
    d->squares += x->squares;
    d->a += x->a;
    d->b += x->b;
    d->aa += x->aa;
    d->bb += x->bb;
    d->ab += x->ab;
    if (x->max <= d->max) return;
    d->max = x->max;
    d->uid = x->uid;
    d->sample = x->sample;
    d->token = x->token;
    d->rollout = x->rollout;
    d->training = x->training;
}

static void diff_metrics(const struct rollout_diff *d, struct metrics *m) {
    const double n = (double)d->n, mean = d->sum / n, spread = (d->aa - d->a * d->a / n) * (d->bb - d->b * d->b / n);
    if (d->n == 0) return;
    metrics_set_i64(m, 1, "training/rollout_probs_diff_valid");
    metrics_set(m, d->max, "training/rollout_probs_diff_max");
    metrics_set(m, mean, "training/rollout_probs_diff_mean");
    if (d->n > 1) metrics_set(m, sqrt(fmax(0, d->squares - n * mean * mean) / (n - 1)), "training/rollout_probs_diff_std");
    if (d->n > 1 && spread > 0)
        metrics_set(m, d->max == 0 ? 1 : (d->ab - d->a * d->b / n) / sqrt(spread), "training/rollout_actor_probs_pearson_corr");
}

/* ---- the loss ---- */

struct actor_update {
    struct ppo_mini mini; /* first: the argument of the loss */
    struct rollout_diff diff;
    float *entropy; /* of the whole batch's tokens, NaN: no forward pass yet */
};

/* d: of this micro-batch; it stays empty after the first optimizer step. */
static void compare_rollout(const struct actor_update *u, const struct micro_loss *x, struct rollout_diff *d) {
    const struct ppo_mini *mini = &u->mini;
    const struct batch *b = &mini->b;
    const struct batch_col *rollout = batch_find(b, "rollout_log_probs"), *uid = batch_find(b, "uid"),
                           *sample = batch_find(b, "sample_index");
    if (mini->result.n_steps > 0) return;
    for (int64_t i = x->lo; i < x->hi; i++)
        for (int64_t t = mini->off[i]; t < mini->off[i + 1]; t++) {
            if (!mini->policy[t] || !diff_add(d, rollout->f32[t], x->out[t - x->t0])) continue;
            d->uid = uid ? uid->i64[i] : -1;
            d->sample = sample ? sample->i64[i] : -1;
            d->token = t - mini->off[i];
        }
}

/* Keeps the entropy of a token's first forward pass. entropy: of the micro-batch's targets. */
static void keep_entropy(struct actor_update *u, const struct pack_micro *x, const float *entropy) {
    const struct batch_col *whole = batch_find(u->mini.whole, "responses");
    for (int64_t i = x->lo; i < x->hi; i++) {
        float *at = u->entropy + whole->off[u->mini.rows[i]];
        const size_t n = (size_t)(u->mini.off[i + 1] - u->mini.off[i]);
        if (n > 0 && isnan(at[0])) memcpy(at, entropy + u->mini.off[i] - x->t0, n * sizeof *at);
    }
}

/* Of its record: the differences, the entropies, the metrics. */
static int report_policy(void *arg, const struct pack_micro *x, const void *record, size_t n) {
    struct actor_update *u = arg;
    const char *const p = record;
    const size_t head = sizeof u->diff + (size_t)x->n_targets * sizeof(float);
    CHECK(n >= head);
    diff_merge(&u->diff, record);
    keep_entropy(u, x, (const float *)(const void *)(p + sizeof u->diff));
    return ppo_mini_reported(&u->mini, x, p + head, n - head);
}

static int policy_loss(void *arg, const struct micro_loss *x) {
    struct actor_update *u = arg;
    struct ppo_mini *const mini = &u->mini;
    const struct ppo_actor_config *k = &mini->k->actor;
    const struct ppo_distill_config *d = mini->k->distill;
    const struct algo_ragged r = {.n = x->hi - x->lo, .off = mini->off + x->lo, .mask = mini->mask};
    struct algo_metrics m = {0};
    double *const logp = mini->work, *const entropy = logp + mini->n_tokens, *const dlogp = entropy + mini->n_tokens,
                  *const dentropy = dlogp + mini->n_tokens, loss = 0;
    for (int64_t t = x->t0; t < x->t1; t++) {
        logp[t] = (double)x->out[t - x->t0];
        entropy[t] = (double)x->entropy[t - x->t0];
    }
    struct algo_actor_args a = {
        .policy = {.r = &r,
                   .old_logp = ppo_column(&mini->b, "old_log_probs"),
                   .logp = logp,
                   .advantages = ppo_column(&mini->b, "advantages"),
                   .is_weights = ppo_column(&mini->b, "rollout_is_weights"),
                   .agg = mini->agg,
                   .cfg = k->policy},
        .loss_mode = k->loss_mode,
        .entropy = k->entropy_coeff != 0 || k->calculate_entropy ? entropy : NULL,
        .entropy_coeff = k->entropy_coeff,
        .ref_logp = k->use_kl_loss ? ppo_column(&mini->b, "ref_log_prob") : NULL,
        .kl_loss_type = k->use_kl_loss ? &k->kl_loss_type : NULL,
        .kl_loss_coef = k->kl_loss_coef,
    };
    a.policy.cfg.step = (uint64_t)mini->s->run->step;
    if (!d->enable || d->use_task_rewards || d->loss.use_policy_gradient) /* as verl: in the last case for its metrics alone */
        TRY(algo_actor_loss(&a, &loss, dlogp, dentropy, &m));
    if (d->enable) {
        if (!d->use_task_rewards) loss = 0;
        for (int64_t t = x->t0; !d->use_task_rewards && t < x->t1; t++) dlogp[t] = dentropy[t] = 0;
        TRY(ppo_distillation_loss(&mini->distill, d, &a.policy, &loss, dlogp, &m));
    }
    algo_metrics_set(&m, "actor/loss", loss);
    for (int64_t t = x->t0; t < x->t1; t++) x->dout[t - x->t0] = (float)dlogp[t];
    for (int64_t t = x->t0; x->dentropy && t < x->t1; t++) x->dentropy[t - x->t0] = (float)dentropy[t];
    struct rollout_diff diff = {0};
    compare_rollout(u, x, &diff);
    TRY(buf_add(x->record, &diff, sizeof diff));
    TRY(buf_add(x->record, x->entropy, (size_t)(x->t1 - x->t0) * sizeof *x->entropy));
    return ppo_mini_record(x, &m);
}

/* actor/entropy, as verl has it: of the whole batch before rejection, aggregated without a mini-batch's counts. Tokens without a
 * forward pass (a mini-batch with a bad gradient ended the stage) are left out. */
static int entropy_metric(const struct stage *s, const struct ppo_worker_config *k, const struct batch *b, const float *entropy) {
    const struct batch_col *c = batch_find(b, "responses");
    const struct algo_agg agg = {
        .mode = k->actor.agg_mode, .loss_scale_factor = k->actor.loss_scale_factor, .width = k->data->max_response_length};
    uint8_t *mask = ppo_policy_mask(b);
    const struct algo_ragged r = {.n = b->n_rows, .off = c->off, .mask = mask};
    double *v = xmalloc((size_t)c->off[b->n_rows] * sizeof *v + 1), sum;
    for (int64_t t = 0; t < c->off[b->n_rows]; t++) {
        v[t] = (double)entropy[t];
        mask[t] = mask[t] && isfinite(v[t]);
    }
    const int rc = algo_agg_loss(&r, &agg, v, &sum, NULL);
    if (rc == 0 && algo_n_valid(&r) > 0) metrics_set(&s->run->metrics, sum, "actor/entropy");
    free(mask);
    free(v);
    return rc;
}

static int update(struct worker *w, struct run *run, struct batch *b) {
    const struct stage own = ppo_update_stage(w, run), *const s = &own;
    const struct ppo_worker_config *const slices = ppo_worker_slices(w);
    const struct ppo_actor_config *k = &slices->actor;
    /* the schedule begins with the first update, after trainer.critic_warmup */
    const int64_t first = slices->critic.actor_from > 1 && !run->probing ? slices->critic.actor_from : 1;
    const int64_t index = train_lr_index(s->run->step, first, k->optim.zero_indexed_step);
    struct actor_update u = {.mini = {.s = s,
                                      .role = VERLC_ACTOR,
                                      .k = slices,
                                      .whole = b,
                                      .loss = policy_loss,
                                      .report = report_policy,
                                      .n_work = 4,
                                      .agg = {.mode = k->agg_mode, .loss_scale_factor = k->loss_scale_factor}}};
    struct update a = {.optim = &k->optim,
                       .lr = optim_lr(&k->optim, index),
                       .mini_batch = slices->sizes->mini_batch,
                       .epochs = k->epochs,
                       .cut = k->update_cut,
                       .mtp_metric = "actor/mtp_losses/mtp_1_loss",
                       .shuffle = k->shuffle,
                       .seed = k->seed};
    const int64_t n_tokens = batch_find(b, "responses")->off[b->n_rows];
    u.entropy = xmalloc((size_t)n_tokens * sizeof *u.entropy);
    for (int64_t t = 0; t < n_tokens; t++) u.entropy[t] = NAN;
    int rc = ppo_mini_run(&u.mini, &a, optim_lr(&k->optim, index + 1));
    const int together = trained_model_context(w->role[VERLC_ACTOR].model);
    const int experts = trained_model_expert_ranks(w->role[VERLC_ACTOR].model);
    if (together > 1) metrics_set_i64(&run->metrics, together, "perf/context_parallel");
    if (experts > 1) metrics_set_i64(&run->metrics, experts, "perf/expert_parallel");
    batch_drop(b, "entropys");
    if (rc == 0) rc = entropy_metric(s, slices, b, u.entropy);
    if (rc == 0) rc = ppo_add_like(b, "entropys", BATCH_F32, "responses", 1, u.entropy);
    free(u.entropy);
    TRY(rc);
    diff_metrics(&u.diff, &s->run->metrics);
    if (u.diff.max > 0 && s->schedule == PPO_SYNC && slices->rollout.external.n_urls == 0 && ppo_on_policy(s, b))
        log_warn("step %lld: log-probs of the rollout are not training's; the largest difference is at prompt %lld, sample %lld, "
                 "token %lld: %.9g in the rollout, %.9g in training (training/rollout_probs_diff_max); please report this",
                 (long long)s->run->step, (long long)u.diff.uid, (long long)u.diff.sample, (long long)u.diff.token,
                 (double)u.diff.rollout, (double)u.diff.training);
    return 0;
}

const struct worker_update ppo_update_actor = {
    .name = "update_actor",
    .role = VERLC_ACTOR,
    .reads = (const char *const[]){PPO_MINI_READS, "rollout_log_probs", "rollout_is_weights", "teacher_ids", "teacher_logprobs",
                                   "sample_index", "param_versions", PPO_ROUTES, NULL},
    .writes = (const char *const[]){"entropys", NULL},
    .run = update};
