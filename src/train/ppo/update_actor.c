/* update_actor.c - old and reference log-probs and the policy update: the stages of
 * the policy between a scored batch and a new policy.  Formulas live in algo. */
#include "train/ppo/ppo_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int ppo_sequences(const struct batch *b, struct actor_seq **out) {
    struct batch_col *prompts, *responses;
    TRY(batch_get(b, "prompts", BATCH_I32, &prompts));
    TRY(batch_get(b, "responses", BATCH_I32, &responses));
    /* one block: the sequences, then their ids */
    const int64_t tokens = prompts->off[b->n_rows] + responses->off[b->n_rows];
    char *block = xmalloc((size_t)b->n_rows * sizeof(struct actor_seq) + (size_t)tokens * 4);
    struct actor_seq *seqs = (struct actor_seq *)block;
    int32_t *ids = (int32_t *)(block + (size_t)b->n_rows * sizeof *seqs);
    for (int64_t i = 0; i < b->n_rows; i++) {
        const int64_t np = batch_len(prompts, i), nr = batch_len(responses, i);
        memcpy(ids, prompts->i32 + prompts->off[i], (size_t)np * 4);
        memcpy(ids + np, responses->i32 + responses->off[i], (size_t)nr * 4);
        seqs[i] = (struct actor_seq){.ids = ids, .n = np + nr, .first = np};
        ids += np + nr;
    }
    *out = seqs;
    return 0;
}

int ppo_add_f64(struct batch *b, const char *name, const char *like, double **out) {
    const struct batch_col *shape = batch_find(b, like);
    int64_t *lens = xmalloc((size_t)b->n_rows * sizeof *lens);
    struct batch_col *c;
    for (int64_t i = 0; i < b->n_rows; i++) lens[i] = batch_len(shape, i);
    const int rc = batch_add(b, name, BATCH_F64, lens, NULL, &c);
    free(lens);
    TRY(rc);
    *out = c->f64;
    return 0;
}

uint8_t *ppo_mask(const struct batch *b) {
    const struct batch_col *c = batch_find(b, "response_mask");
    const int64_t n = batch_find(b, "responses")->off[b->n_rows];
    uint8_t *mask = xmalloc((size_t)n + 1);
    for (int64_t t = 0; t < n; t++) mask[t] = !c || c->i32[t] != 0;
    return mask;
}

/* A new column from one number for each response token; ERR_NUMERIC where one is not finite. */
static int put_column(struct batch *b, const char *name, const float *v) {
    double *col;
    TRY(ppo_add_f64(b, name, "responses", &col));
    const int64_t n = batch_find(b, "responses")->off[b->n_rows];
    for (int64_t t = 0; t < n; t++) {
        if (!isfinite(v[t])) FAIL(ERR_NUMERIC, "%s: not finite at token %lld of the batch", name, (long long)t);
        col[t] = (double)v[t];
    }
    return 0;
}

/* Log-probs of all responses by `a` into a new column; with sum_pi the sums of squared probabilities as well. */
static int logp_column(struct ppo *p, struct batch *b, struct actor *a, struct actor_cut cut, const char *name, bool sum_pi) {
    struct actor_seq *seqs;
    struct batch_col *responses;
    TRY(batch_get(b, "responses", BATCH_I32, &responses));
    TRY(ppo_sequences(b, &seqs));
    const int64_t n = responses->off[b->n_rows];
    float *logp = xmalloc((size_t)n * 2 * sizeof *logp), *squares = logp + n;
    int rc = 0;
    for (int64_t lo = 0, hi; lo < b->n_rows; lo = hi) { /* in pieces, for the watchdog and the progress */
        hi = lo + (cut.max_seqs > 0 ? cut.max_seqs : 16);
        if (hi > b->n_rows) hi = b->n_rows;
        const int64_t at = responses->off[lo];
        TRYG(actor_logp(a, seqs + lo, hi - lo, cut, (float)p->k.train.temperature,
                        (struct actor_out){.logp = logp + at, .sum_pi_sq = sum_pi ? squares + at : NULL}),
             out);
        stage_beat(p->stages);
        track_progress(p->track, p->step, name, hi, b->n_rows, 0);
        if (stage_stop_signal()) FAILG(out, ERR_SIGNAL, "stopped by %s", stage_signal_name(stage_stop_signal()));
    }
    TRYG(put_column(b, name, logp), out);
    if (sum_pi) TRYG(put_column(b, "sum_pi_squared", squares), out);
out:
    free(logp);
    free(seqs);
    return rc;
}

int ppo_old_log_probs(struct ppo *p, struct batch *b) {
    struct batch_col *rollout;
    double *old;
    TRY(batch_get(b, "rollout_log_probs", BATCH_F32, &rollout));
    /* The policy has not moved since the rollout and both use one forward pass, so the rollout's log-probs are the
     * policy's (invariant 1); the pass is for estimators that need more from it, and can be forced. */
    const bool sum_pi = p->k.adv->needs & ALGO_NEEDS_SUM_PI;
    if (p->k.force_old_log_prob || sum_pi) {
        stage_begin(p->stages, "old_log_prob");
        TRY(logp_column(p, b, p->actor, p->k.logp_cut, "old_log_probs", sum_pi));
        const double *forced = batch_find(b, "old_log_probs")->f64;
        double worst = 0;
        rollout = batch_find(b, "rollout_log_probs");
        for (int64_t t = 0; t < rollout->off[b->n_rows]; t++)
            worst = fmax(worst, fabs(exp(forced[t]) - exp((double)rollout->f32[t])));
        metrics_set(&p->metrics, worst, "training/rollout_probs_diff_max");
    } else {
        TRY(ppo_add_f64(b, "old_log_probs", "responses", &old));
        rollout = batch_find(b, "rollout_log_probs");
        for (int64_t t = 0; t < rollout->off[b->n_rows]; t++) old[t] = (double)rollout->f32[t];
    }
    return 0;
}

int ppo_reference(struct ppo *p, struct batch *b) {
    actor_begin(p->ref_actor);
    return logp_column(p, b, p->ref_actor, p->k.ref_cut, "ref_log_prob", false);
}

/* ---- the update ---- */

struct update {
    struct ppo *p;
    const int64_t *off; /* of the mini-batch's rows */
    const uint8_t *mask;
    const double *old, *ref, *adv, *is_weights; /* per token of the mini-batch; is_weights may be NULL */
    double *logp, *entropy, *dlogp, *dentropy;
    struct algo_agg agg;
    struct algo_metrics sums; /* over micro-batches */
    struct ppo_distill distill;
    int64_t n_micro;
    double entropy_sum;
    int64_t done, total;
};

static bool summed(const char *name) {
    return strcmp(name, "actor/pg_loss") == 0 || strcmp(name, "actor/kl_loss") == 0 || strcmp(name, "actor/entropy_loss") == 0;
}

void ppo_add_metrics(struct algo_metrics *sum, const struct algo_metrics *m) {
    for (int64_t i = 0; i < m->n; i++) {
        double v = 0;
        algo_metrics_get(sum, m->v[i].name, &v);
        algo_metrics_set(sum, m->v[i].name, v + m->v[i].value);
    }
}

static int update_loss(void *arg, int64_t lo, int64_t hi, int64_t t0, int64_t t1, const float *logp, const float *entropy,
                       float *dlogp, float *dentropy) {
    struct update *u = arg;
    const struct ppo_config *k = &u->p->k;
    const struct algo_ragged r = {.n = hi - lo, .off = u->off + lo, .mask = u->mask};
    for (int64_t t = t0; t < t1; t++) u->logp[t] = (double)logp[t - t0];
    for (int64_t t = t0; t < t1; t++) u->entropy[t] = (double)entropy[t - t0];
    struct algo_actor_args a = {
        .policy = {.r = &r,
                   .old_logp = u->old,
                   .logp = u->logp,
                   .advantages = u->adv,
                   .is_weights = u->is_weights,
                   .agg = u->agg,
                   .cfg = k->policy},
        .loss_mode = k->loss_mode,
        .entropy = u->entropy,
        .entropy_coeff = k->entropy_coeff,
        .ref_logp = k->use_kl_loss ? u->ref : NULL,
        .kl_loss_type = k->use_kl_loss ? &k->kl_loss_type : NULL,
        .kl_loss_coef = k->kl_loss_coef,
    };
    a.policy.cfg.step = (uint64_t)u->p->step;
    double loss, entropy_loss;
    struct algo_metrics m = {0};
    const struct ppo_distill_config *d = &k->distill;
    if (!d->enable || d->use_task_rewards || d->loss.use_policy_gradient) /* as verl: in the last case for its metrics alone */
        TRY(algo_actor_loss(&a, &loss, u->dlogp, u->dentropy, &m));
    if (d->enable) {
        for (int64_t t = t0; !d->use_task_rewards && t < t1; t++) u->dlogp[t] = u->dentropy[t] = 0;
        TRY(ppo_distill_loss(&u->distill, u->p, &a.policy, u->dlogp, &m));
    }
    TRY(algo_agg_loss(&r, &u->agg, u->entropy, &entropy_loss, NULL));
    u->entropy_sum += entropy_loss;
    for (int64_t t = t0; t < t1; t++) dlogp[t - t0] = (float)u->dlogp[t];
    if (dentropy)
        for (int64_t t = t0; t < t1; t++) dentropy[t - t0] = (float)u->dentropy[t];
    ppo_add_metrics(&u->sums, &m);
    algo_metrics_free(&m);
    u->n_micro++;
    u->done += hi - lo;
    stage_beat(u->p->stages);
    track_progress(u->p->track, u->p->step, "update_actor", u->done, u->total, 0);
    return 0;
}

static json_t *numbers(const double *x, int64_t n) { /* NaN and Inf as null */
    json_t *a = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(a, isfinite(x[i]) ? json_real(x[i]) : json_null());
    return a;
}
static json_t *ids_json(const struct batch_col *c, int64_t row) {
    json_t *a = json_array();
    for (int64_t t = c->off[row]; t < c->off[row + 1]; t++) json_array_append_new(a, json_integer(c->i32[t]));
    return a;
}

/* A mini-batch whose gradient is not finite, with all that its update read: one line a sample. */
static int dump_bad_batch(const struct ppo *p, const struct batch *b, const char *path) {
    static const char *const per_token[] = {"old_log_probs", "ref_log_prob", "advantages", "values", "returns"};
    const struct batch_col *prompts = batch_find(b, "prompts"), *responses = batch_find(b, "responses"),
                           *score = batch_find(b, "score"), *uid = batch_find(b, "uid");
    struct buf out = {0};
    int rc = 0;
    for (int64_t i = 0; i < b->n_rows && rc == 0; i++) {
        json_t *o = json_pack("{s:I, s:I, s:o, s:o, s:o}", "step", (json_int_t)p->step, "uid", (json_int_t)uid->i64[i],
                              "prompt_ids", ids_json(prompts, i), "response_ids", ids_json(responses, i), "score",
                              isfinite(score->f64[i]) ? json_real(score->f64[i]) : json_null());
        for (int k = 0; k < 5; k++) {
            const struct batch_col *c = batch_find(b, per_token[k]);
            if (c) json_object_set_new(o, per_token[k], numbers(c->f64 + c->off[i], batch_len(c, i)));
        }
        rc = json_dump_line(&out, o);
        json_decref(o);
        if (rc == 0) rc = buf_addc(&out, '\n');
    }
    if (rc == 0) rc = file_write_atomic(path, out.p ? out.p : "", out.n);
    buf_free(&out);
    return rc;
}

static void save_bad_batch(const struct ppo *p, const struct batch *b, const char *what) {
    char *dir = xasprintf("%s/bad_batches", p->k.default_local_dir), *path = xasprintf("%s/%lld.jsonl", dir, (long long)p->step);
    int rc = file_mkdirs(dir);
    if (rc == 0) rc = dump_bad_batch(p, b, path);
    if (rc < 0)
        log_warn("step %lld: %s is not finite; nothing was changed; its batch could not be saved: %s", (long long)p->step, what,
                 err_msg());
    else log_warn("step %lld: %s is not finite; nothing was changed; its batch is in %s", (long long)p->step, what, path);
    free(path);
    free(dir);
}

/* What was not finite, for a message. */
static const char *bad_name(const struct optim_result *r, char text[128]) {
    if (!r->bad_tensor[0]) return "the gradient norm";
    if (strchr(r->bad_tensor, ' ')) return r->bad_tensor; /* the loss: not a tensor of the model */
    snprintf(text, 128, "the gradient of %s", r->bad_tensor);
    return text;
}

int ppo_bad_gradient(struct ppo *p, const struct batch *mini, const struct optim_result *r) {
    char text[128];
    const char *what = bad_name(r, text);
    save_bad_batch(p, mini, what);
    if (!p->step_bad) p->bad_steps++;
    p->step_bad = true;
    if (p->bad_steps >= p->k.max_bad_steps)
        FAIL(ERR_NUMERIC,
             "step %lld: %s is not finite, %lld steps in a row (trainer.max_bad_steps); their batches are in "
             "bad_batches/; lower the learning rate, or look at the rewards",
             (long long)p->step, what, (long long)p->bad_steps);
    return 0;
}

/* One optimizer step over the rows of mini. */
static int update_mini(struct ppo *p, struct batch *mini, struct actor_cut cut, struct update *u, double lr,
                       struct actor_step_result *r) {
    struct batch_col *responses;
    struct actor_seq *seqs;
    TRY(batch_get(mini, "responses", BATCH_I32, &responses));
    const int64_t n = responses->off[mini->n_rows];
    u->off = responses->off;
    u->old = batch_find(mini, "old_log_probs")->f64;
    u->adv = batch_find(mini, "advantages")->f64;
    u->ref = p->k.use_kl_loss ? batch_find(mini, "ref_log_prob")->f64 : NULL;
    u->is_weights = batch_find(mini, "rollout_is_weights") ? batch_find(mini, "rollout_is_weights")->f64 : NULL;
    uint8_t *mask = ppo_mask(mini);
    u->mask = mask;
    const struct algo_ragged whole = {.n = mini->n_rows, .off = u->off, .mask = mask};
    u->agg = (struct algo_agg){.mode = p->k.agg_mode,
                               .batch_num_tokens = algo_n_valid(&whole),
                               .global_batch_size = mini->n_rows,
                               .batch_rows = mini->n_rows,
                               .loss_scale_factor = p->k.loss_scale_factor,
                               .width = p->k.max_response_length};
    double *work = xcalloc((size_t)n * 4, sizeof *work);
    u->logp = work;
    u->entropy = work + n;
    u->dlogp = work + 2 * n;
    u->dentropy = work + 3 * n;
    int rc = ppo_sequences(mini, &seqs);
    if (p->k.distill.enable) ppo_distill_begin(&u->distill, p, mini);
    if (rc == 0) {
        const struct actor_step_args a = {.seqs = seqs,
                                          .n = mini->n_rows,
                                          .cut = cut,
                                          .list = u->distill.k > 0 ? &u->distill.list : NULL,
                                          .temperature = (float)p->k.train.temperature,
                                          .entropy = true,
                                          .entropy_grad = p->k.entropy_coeff != 0,
                                          .loss = update_loss,
                                          .loss_arg = u,
                                          .optim = &p->k.optim,
                                          .lr = lr};
        rc = actor_step(p->actor, &a, r);
        free(seqs);
    }
    ppo_distill_end(&u->distill);
    free(mask);
    free(work);
    return rc;
}

void ppo_epoch_order(const struct ppo *p, bool shuffle, uint64_t seed, int64_t n, int64_t epoch, int64_t *order) {
    for (int64_t i = 0; i < n; i++) order[i] = i;
    if (!shuffle) return;
    struct rng r = {.seed = seed, .stream = RNG_MINIBATCH, .n = (uint64_t)(p->step * 1000 + epoch) << 24};
    rng_shuffle(&r, order, n);
}

int ppo_mini_batch(struct batch *mini, struct actor_cut *cut, const struct batch *b, int64_t *order, int64_t n) {
    const struct batch_col *prompts = batch_find(b, "prompts"), *responses = batch_find(b, "responses");
    int64_t *len = xmalloc((size_t)n * sizeof *len);
    for (int64_t i = 0; i < n; i++) len[i] = batch_len(prompts, order[i]) + batch_len(responses, order[i]);
    int rc = pack_balance(cut, len, order, n);
    free(len);
    if (rc == 0 && (rc = batch_select(mini, b, order, n)) < 0) free(cut->ends);
    return rc;
}

int ppo_update(struct ppo *p, struct batch *b) {
    const int64_t size = p->k.ppo_mini_batch_size * p->k.train.n;
    /* the schedule begins with the first update, after trainer.critic_warmup */
    const int64_t first = p->k.critic.actor_from > 1 ? p->k.critic.actor_from : 1;
    const double lr = optim_lr(&p->k.optim, p->step - first + (p->k.zero_indexed_step ? 0 : 1));
    struct update u = {.p = p, .total = b->n_rows * p->k.ppo_epochs};
    int64_t n_steps = 0;
    double norm_sum = 0;
    bool bad = false;
    int64_t *order = xmalloc((size_t)b->n_rows * sizeof *order);
    int rc = 0;
    for (int64_t epoch = 0; epoch < p->k.ppo_epochs && rc == 0 && !bad; epoch++) {
        ppo_epoch_order(p, p->k.mini_shuffle, p->k.mini_seed, b->n_rows, epoch, order);
        for (int64_t lo = 0; lo < b->n_rows && rc == 0 && !bad; lo += size) {
            const int64_t n = b->n_rows - lo < size ? b->n_rows - lo : size;
            struct batch mini;
            struct actor_cut cut = p->k.update_cut;
            struct actor_step_result r;
            TRYG(ppo_mini_batch(&mini, &cut, b, order + lo, n), out);
            rc = update_mini(p, &mini, cut, &u, lr, &r);
            if (rc == 0 && !isfinite(r.optim.grad_norm)) {
                bad = true;
                rc = ppo_bad_gradient(p, &mini, &r.optim);
            } else if (rc == 0) {
                norm_sum += r.optim.grad_norm;
                n_steps++;
            }
            free(cut.ends);
            batch_free(&mini);
        }
    }
    for (int64_t i = 0; i < u.sums.n; i++) {
        const double v = u.sums.v[i].value;
        metrics_set(&p->metrics, summed(u.sums.v[i].name) ? v : v / (double)u.n_micro, "%s", u.sums.v[i].name);
    }
    if (p->k.distill.enable) {
        struct algo_metrics m = {0};
        algo_distill_metrics(&u.distill.sums, &m);
        for (int64_t i = 0; i < m.n; i++) metrics_set(&p->metrics, m.v[i].value, "%s", m.v[i].name);
        algo_metrics_free(&m);
    }
    if (n_steps > 0) {
        metrics_set(&p->metrics, u.entropy_sum / (double)n_steps, "actor/entropy");
        metrics_set(&p->metrics, norm_sum / (double)n_steps, "actor/grad_norm");
    }
    metrics_set(&p->metrics, lr, "actor/lr");
    metrics_set_i64(&p->metrics, bad ? 1 : 0, "actor/skipped_steps");
out:
    algo_metrics_free(&u.sums);
    free(order);
    return rc;
}
