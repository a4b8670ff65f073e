/* advantage.c - from scores to advantages: rewards per token, the KL penalty in
 * them, rollout correction, the estimator with what it needs, PF-PPO's resampling.
 * The one place that knows which estimator reads what; formulas live in algo. */
#include "ppo/stages/stages.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/rng.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void set_metrics(const struct stage *s, struct algo_metrics *m) {
    for (int64_t i = 0; i < m->n; i++) metrics_set(&s->run->metrics, m->v[i].value, "%s", m->v[i].name);
    algo_metrics_free(m);
}

/* token_level_rewards: the scores, less the KL penalty. */
static int add_rewards(const struct stage *s, const struct ppo_algorithm_config *k, struct algo_kl_ctrl *kl, struct batch *b,
                       const struct algo_ragged *r) {
    double *rewards;
    TRY(ppo_add_f64(b, "token_level_rewards", "responses", &rewards));
    const double *level = ppo_column(b, "token_level_scores");
    memcpy(rewards, level, (size_t)r->off[b->n_rows] * sizeof *rewards);
    if (!k->use_kl_in_reward) return 0;
    struct algo_metrics m = {0};
    const struct algo_kl_reward_args a = {.r = r,
                                          .scores = level,
                                          .old_logp = ppo_column(b, "old_log_probs"),
                                          .ref_logp = ppo_column(b, "ref_log_prob"),
                                          .type = &k->kl_penalty};
    algo_kl_in_reward(kl, &a, rewards, &m);
    set_metrics(s, &m);
    return 0;
}

/* Importance weights, and the mask less what is rejected (verl's decoupled mode). */
static int correct(const struct stage *s, const struct ppo_algorithm_config *k, struct batch *b, const struct algo_ragged *r,
                   uint8_t *mask) {
    const int64_t n = r->off[b->n_rows];
    struct algo_metrics m = {0};
    double *w;
    TRY(ppo_add_f64(b, "rollout_is_weights", "responses", &w));
    const struct batch_col *rollout = ppo_sampling_log_probs(b);
    double *rollout_logp = xmalloc((size_t)n * sizeof *rollout_logp);
    for (int64_t t = 0; t < n; t++) rollout_logp[t] = (double)rollout->f32[t];
    const struct algo_corr_args a = {r, &k->corr, ppo_column(b, "old_log_probs"), rollout_logp};
    const int rc = algo_corr_run(&a, w, mask, &m);
    free(rollout_logp);
    if (k->corr.is == ALGO_IS_NONE) batch_drop(b, "rollout_is_weights");
    set_metrics(s, &m);
    return rc;
}

static int add_mask(struct batch *b, const char *name, const uint8_t *mask) {
    TRY(ppo_add_like(b, name, BATCH_I32, "responses", 1, NULL));
    const struct batch_col *c = batch_find(b, name);
    for (int64_t t = 0; t < c->off[b->n_rows]; t++) c->i32[t] = mask[t];
    return 0;
}

/* gdpo: reward k of every sample, one after the other; NULL for the other estimators. Caller frees. */
static int components(const struct ppo_algorithm_config *c, const struct batch *b, double **out) {
    const struct batch_col *extra = batch_find(b, "reward_extra_info");
    *out = NULL;
    if (c->n_gdpo == 0) return 0;
    double *v = xmalloc((size_t)(c->n_gdpo * b->n_rows) * sizeof *v);
    for (int64_t k = 0; k < c->n_gdpo; k++) {
        for (int64_t i = 0; i < b->n_rows; i++) {
            const json_t *x = json_object_get(extra->json[i], c->gdpo_keys[k]);
            if (!json_is_number(x) && !json_is_boolean(x)) {
                free(v);
                FAIL(ERR_INPUT,
                     "algorithm.gdpo_reward_keys: the scorer gave no number \"%s\" for a sample; it must be in the dict "
                     "that compute_score returns",
                     c->gdpo_keys[k]);
            }
            const double value = json_is_boolean(x) ? (double)json_is_true(x) : json_number_value(x);
            if (!(fabs(value) <= (double)FLT_MAX)) {
                free(v);
                FAIL(ERR_NUMERIC, "algorithm.gdpo_reward_keys: \"%s\" of a sample is %g, beyond what float32 holds",
                     c->gdpo_keys[k], value);
            }
            v[k * b->n_rows + i] = value;
        }
    }
    *out = v;
    return 0;
}

static int estimate(const struct ppo_algorithm_config *k, struct batch *b, const struct algo_ragged *r) {
    struct batch_col *group;
    double *adv, *ret, *comp;
    TRY(ppo_add_f64(b, "advantages", "responses", &adv));
    TRY(ppo_add_f64(b, "returns", "responses", &ret));
    TRY(batch_get(b, "group", BATCH_I64, &group));
    const struct batch_col *session = batch_find(b, BATCH_SESSION);
    TRY(components(k, b, &comp));
    struct algo_adv_args a = algo_adv_defaults();
    a.r = r;
    a.rewards = ppo_column(b, "token_level_rewards");
    a.group = group->i64;
    a.session = session ? session->i64 : NULL;
    a.values = ppo_column(b, "values");
    a.reward_baselines = ppo_column(b, "reward_baselines");
    a.old_logp = ppo_column(b, "old_log_probs");
    a.sum_pi_squared = ppo_column(b, "sum_pi_squared");
    a.is_weights = ppo_column(b, "rollout_is_weights");
    a.components = comp;
    a.component_weights = k->gdpo_weights;
    a.n_components = k->n_gdpo;
    a.gamma = k->gamma;
    a.lam = k->lam;
    a.norm_by_std = k->norm_adv_by_std;
    a.kwargs = k->adv_kwargs;
    const int rc = algo_advantage(k->adv, &a, ppo_column(b, "advantages"), ret);
    free(comp);
    return rc;
}

int ppo_advantage(const struct stage *s, const struct ppo_algorithm_config *k, struct algo_kl_ctrl *kl, struct batch *b) {
    struct batch_col *responses;
    TRY(batch_get(b, "responses", BATCH_I32, &responses));
    /* the columns are added to b while r is in use: its offsets are a copy */
    const size_t bytes = (size_t)(b->n_rows + 1) * sizeof *responses->off;
    int64_t *off = xmalloc(bytes);
    memcpy(off, responses->off, bytes);
    uint8_t *mask = ppo_mask(b, "response_mask");
    const struct algo_ragged r = {.n = b->n_rows, .off = off, .mask = mask};
    int rc = add_rewards(s, k, kl, b, &r);
    if (rc == 0 && k->correct && k->corr.n_rs > 0) rc = add_mask(b, "loss_mask", mask);
    if (rc == 0 && k->correct) rc = correct(s, k, b, &r, mask);
    if (rc == 0) rc = add_mask(b, "response_mask", mask);
    if (rc == 0) rc = estimate(k, b, &r);
    free(mask);
    free(off);
    return rc;
}

/* ---- PF-PPO ---- */

/* The sample whose share of [0, total) u falls into. */
static int64_t pick(const double *sum, int64_t n, double u) {
    int64_t lo = 0, hi = n - 1;
    while (lo < hi) {
        const int64_t mid = (lo + hi) / 2;
        if (sum[mid] > u) hi = mid;
        else lo = mid + 1;
    }
    return lo;
}

int ppo_pf_resample(const struct stage *s, const struct ppo_algorithm_config *k, const struct batch *b, struct batch *out) {
    const int64_t n = b->n_rows;
    struct batch_col *score;
    TRY(batch_get(b, "score", BATCH_F64, &score));
    double *sum = xmalloc((size_t)n * sizeof *sum);
    int64_t *rows = xmalloc((size_t)n * sizeof *rows), distinct = 0;
    bool *seen = xcalloc((size_t)n, sizeof *seen);
    algo_pf_ppo_weights(&k->pf_ppo, score->f64, n, sum);
    for (int64_t i = 1; i < n; i++) sum[i] += sum[i - 1];
    struct rng r = {.seed = s->seed, .stream = RNG_RESAMPLE, .n = (uint64_t)s->run->step << 24};
    for (int64_t i = 0; i < n; i++) {
        rows[i] = pick(sum, n, rng_unit(&r) * sum[n - 1]);
        distinct += !seen[rows[i]];
        seen[rows[i]] = true;
    }
    const int rc = batch_select(out, b, rows, n);
    metrics_set(&s->run->metrics, (double)distinct / (double)n, "training/pf_ppo/distinct_fraction");
    free(sum);
    free(rows);
    free(seen);
    return rc;
}
