/* policy_loss_sequence.c - policy losses that look at a whole sequence or batch: gspo,
 * geo_mean, clip_cov, kl_cov, bypass_mode.
 *
 * clip_cov and kl_cov rank tokens by a covariance over the tokens of this call,
 * as verl does: their gradient depends on the split into micro-batches, and they
 * alone are exempt from invariant 3 of the design.  So is the batch normalisation
 * of weights in bypass_mode. */
#include "algo/algo_int.h"
#include "base/rng.h"

#include <stdlib.h>
#include <string.h>

#define GSPO_LOG_MAX 10. /* verl's bound on the sequence log-ratio */

static double mean_kl(const struct algo_ragged *r, const struct algo_policy_args *a, bool absolute) {
    double s = 0;
    ALGO__EACH_VALID(r, i, t) {
        const double d = a->old_logp[t] - a->logp[t];
        s += absolute ? fabs(d) : d;
    }
    return s / ((double)algo_n_valid(r) + ALGO__EPS);
}

/* GSPO (arXiv 2507.18071): every token of a sequence has the ratio of the whole
 * sequence, the geometric mean of its tokens' ratios; each passes its own gradient. */
int algo__gspo(const struct algo_policy_args *a, struct algo__policy_out *o) {
    const struct algo_ragged *r = a->r;
    double clipped = 0;
    for (int64_t i = 0; i < r->n; i++) {
        double k = 0;
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++)
            if (r->mask[t]) k += a->logp[t] - a->old_logp[t];
        const int64_t n = algo__row_valid(r, i);
        k /= n > 1 ? (double)n : 1;
        const double ratio = exp(k > GSPO_LOG_MAX ? GSPO_LOG_MAX : k);
        const double dratio = k < GSPO_LOG_MAX ? ratio : 0;
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) {
            if (!r->mask[t]) continue;
            const struct algo__clip c = algo__clip(a->advantages[t], ratio, &a->cfg);
            o->lmat[t] = c.l;
            o->dl[t] = c.dl * dratio;
            clipped += c.l2 > c.l1;
        }
    }
    algo_metrics_set(o->m, "actor/ppo_kl", mean_kl(r, a, false));
    algo_metrics_set(o->m, "actor/pg_clipfrac", clipped / ((double)algo_n_valid(r) + ALGO__EPS));
    algo_metrics_set(o->m, "actor/pg_clipfrac_lower", 0);
    return 0;
}

/* GMPO (arXiv 2507.20673).  A sequence's loss is -mean(A) exp(mean of clipped
 * log-ratios), and the batch's loss the plain mean over its rows, empty ones too.
 * It is spread over the sequence's tokens, so that a weight of 1 / rows for each
 * token gives verl's number. */
int algo__geo_mean(const struct algo_policy_args *a, struct algo__policy_out *o) {
    const struct algo_ragged *r = a->r;
    const double lo = -a->cfg.clip_ratio_low, hi = a->cfg.clip_ratio_high;
    double clip_high = 0, clip_low = 0;
    for (int64_t i = 0; i < r->n; i++) {
        const double len = (double)algo__row_valid(r, i) + ALGO__EPS;
        double log_ratio = 0, log_w = 0;
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) {
            if (!r->mask[t]) continue;
            const double d = a->logp[t] - a->old_logp[t], c = algo__clamp(d, lo, hi), adv = a->advantages[t];
            /* sgn(A) min(sgn(A) d, sgn(A) c): the bound acts only in the direction of A */
            const bool beyond = (adv > 0 && d > hi) || (adv < 0 && d < lo);
            log_ratio += adv == 0 ? 0 : beyond ? c : d;
            o->dl[t] = adv == 0 || beyond ? 0 : d == lo || d == hi ? 0.5 / len : 1 / len;
            if (a->is_weights) log_w += log(a->is_weights[t] + 1e-10);
            clip_high += d != c && adv > 0;
            clip_low += d != c && adv < 0;
        }
        double l = -algo__row_mean(r, i, a->advantages) * exp(log_ratio / len);
        if (a->is_weights) l *= exp(log_w / len);
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) {
            if (!r->mask[t]) continue;
            o->dl[t] *= l;
            o->lmat[t] = l / (double)algo__row_valid(r, i);
        }
    }
    o->is_weights = NULL; /* already in l */
    const bool global = a->agg.batch_rows > 0;
    o->agg = (struct algo_agg){.mode = algo_agg_find("token-mean"),
                               .dp_size = global ? a->agg.dp_size : 1,
                               .batch_num_tokens = global ? a->agg.batch_rows : r->n};
    const double n = (double)algo_n_valid(r) + ALGO__EPS;
    algo_metrics_set(o->m, "actor/ppo_kl", mean_kl(r, a, false));
    algo_metrics_set(o->m, "actor/pg_clipfrac", clip_high / n);
    algo_metrics_set(o->m, "actor/pg_clipfrac_lower", clip_low / n);
    return 0;
}

/* ---- covariance of advantage and log-prob (arXiv 2505.22617) ---- */

struct cov {
    int64_t t;
    double cov;
};

/* (A - mean A)(logp - mean logp) of every valid token; caller frees.  eps is added to the number of
 * tokens: verl's masked_mean has it, its plain mean in kl_cov has not. */
static struct cov *covariances(const struct algo_policy_args *a, double eps, int64_t *n) {
    const struct algo_ragged *r = a->r;
    struct cov *c = xmalloc((size_t)(algo_n_valid(r) + 1) * sizeof *c);
    double mean_adv = 0, mean_logp = 0;
    *n = 0;
    ALGO__EACH_VALID(r, i, t) {
        mean_adv += a->advantages[t];
        mean_logp += a->logp[t];
        c[(*n)++].t = t;
    }
    mean_adv /= (double)*n + eps;
    mean_logp /= (double)*n + eps;
    for (int64_t k = 0; k < *n; k++) c[k].cov = (a->advantages[c[k].t] - mean_adv) * (a->logp[c[k].t] - mean_logp);
    return c;
}

/* Loss of a token without a bound on the exponent, as both losses have it. */
static struct algo__clip clip_unbounded(const struct algo_policy_args *a, int64_t t, double *ratio) {
    *ratio = exp(a->logp[t] - a->old_logp[t]);
    return algo__clip(a->advantages[t], *ratio, &a->cfg);
}

/* Clip-Cov: of the tokens whose covariance lies between the bounds and that PPO
 * does not clip, a few drawn at random lose their loss and gradient.  verl draws
 * by torch.randperm; here by (seed, step), so only the choice differs. */
int algo__clip_cov(const struct algo_policy_args *a, struct algo__policy_out *o) {
    const struct algo_policy_cfg *cfg = &a->cfg;
    if (!(cfg->clip_cov_ratio > 0)) FAIL(ERR_INVAL, "clip_cov needs policy_loss.clip_cov_ratio above 0");
    const struct algo_ragged *r = a->r;
    int64_t n, n_cand = 0;
    struct cov *c = covariances(a, ALGO__EPS, &n);
    for (int64_t k = 0; k < n; k++) {
        double ratio;
        const struct algo__clip s = clip_unbounded(a, c[k].t, &ratio);
        o->lmat[c[k].t] = s.l;
        o->dl[c[k].t] = s.dl * ratio;
        if (s.l2 <= s.l1 && c[k].cov > cfg->clip_cov_lb && c[k].cov < cfg->clip_cov_ub) c[n_cand++] = c[k];
    }
    int64_t n_drop = (int64_t)(cfg->clip_cov_ratio * (double)n);
    if (n_drop < 1) n_drop = 1;
    if (n_drop > n_cand) n_drop = n_cand;
    struct rng rng = {cfg->seed, RNG_MINIBATCH, cfg->step << 32};
    for (int64_t k = 0; k < n_drop; k++) { /* the first n_drop places of a shuffle */
        const int64_t j = k + (int64_t)rng_below(&rng, (uint64_t)(n_cand - k));
        const struct cov pick = c[j];
        c[j] = c[k];
        o->lmat[pick.t] = o->dl[pick.t] = 0;
    }
    free(c);
    algo_metrics_set(o->m, "actor/pg_clipfrac", (double)n_drop / ((double)n + ALGO__EPS));
    algo_metrics_set(o->m, "actor/ppo_kl", mean_kl(r, a, false));
    return 0;
}

static int by_cov_descending(const void *pa, const void *pb) {
    const struct cov *a = pa, *b = pb;
    if (a->cov != b->cov) return a->cov > b->cov ? -1 : 1;
    return (a->t > b->t) - (a->t < b->t);
}

/* KL-Cov: the tokens of highest covariance pay ppo_kl_coef |log-ratio|. */
int algo__kl_cov(const struct algo_policy_args *a, struct algo__policy_out *o) {
    const struct algo_policy_cfg *cfg = &a->cfg;
    if (!(cfg->kl_cov_ratio > 0 && cfg->kl_cov_ratio <= 1))
        FAIL(ERR_INVAL, "kl_cov needs policy_loss.kl_cov_ratio above 0 and at most 1");
    int64_t n;
    struct cov *c = covariances(a, 0, &n);
    qsort(c, (size_t)n, sizeof *c, by_cov_descending);
    int64_t n_top = (int64_t)((double)n * cfg->kl_cov_ratio);
    if (n_top < 1) n_top = 1;
    for (int64_t k = 0; k < n; k++) {
        const int64_t t = c[k].t;
        const double d = a->logp[t] - a->old_logp[t], l = -a->advantages[t] * exp(d);
        const bool top = k < n_top;
        o->lmat[t] = l + (top ? cfg->ppo_kl_coef * fabs(d) : 0);
        o->dl[t] = l + (top ? cfg->ppo_kl_coef * ((d > 0) - (d < 0)) : 0);
    }
    free(c);
    algo_metrics_set(o->m, "actor/ppo_kl", mean_kl(a->r, a, true));
    return 0;
}

/* Two policies instead of three: old_logp is the rollout's.  Rejection takes
 * tokens out of the mask; importance weights count in the REINFORCE form only,
 * since PPO's ratio already is the one to the rollout. */
int algo__bypass(const struct algo_policy_args *a, struct algo__policy_out *o) {
    const struct algo_corr *corr = a->cfg.corr;
    if (!corr) FAIL(ERR_INVAL, "bypass_mode needs policy_loss.rollout_correction");
    double *w = algo__tokens(a->r);
    const struct algo_corr_args c = {a->r, corr, a->logp, a->old_logp};
    int rc = algo_corr_run(&c, w, o->mask, o->m);
    o->is_weights = NULL;
    if (rc == 0) rc = corr->reinforce ? algo__reinforce(a, o) : algo__vanilla(a, o);
    if (rc == 0 && corr->reinforce && corr->is != ALGO_IS_NONE) {
        ALGO__EACH_VALID(a->r, i, t) {
            o->lmat[t] *= w[t];
            o->dl[t] *= w[t];
        }
    }
    free(w);
    return rc;
}
