/* policy_loss.c - policy losses that look at one token at a time, the table of all
 * policy losses, and the actor's whole loss.
 *
 * A loss fills a loss per token and its derivative by that token's log-prob;
 * importance weights and aggregation are applied once, here, for all of them.
 * Invariant: derivatives are torch autograd's of verl's functions, ties included
 * (maximum and minimum split evenly, clamp passes inside its bounds only). */
#include "algo/algo_int.h"

#include <stdlib.h>
#include <string.h>

/* One token's loss, and what the metrics count. */
struct token {
    double l, dl; /* loss; derivative by logp */
    double kl;    /* actor/ppo_kl is the mean of it */
    bool clipped, clipped_lower;
};
struct sample { /* the inputs of one token */
    double adv, old_logp, logp;
};

/* Ratio of new to old probability, with its derivative by logp: the exponent is
 * clamped, and a clamp that acts passes no gradient. */
struct ratio {
    double log, r, dr;
};
static struct ratio ratio_of(const struct sample *x) {
    const double d = x->logp - x->old_logp, c = algo__clamp(d, -ALGO__LOG_CLAMP, ALGO__LOG_CLAMP);
    const double r = exp(c);
    return (struct ratio){c, r, fabs(d) < ALGO__LOG_CLAMP ? r : 0};
}

struct algo__clip algo__clip(double adv, double ratio, const struct algo_policy_cfg *cfg) {
    const double lo = 1 - cfg->clip_ratio_low, hi = 1 + cfg->clip_ratio_high;
    struct algo__clip c = {.l1 = -adv * ratio, .l2 = -adv * algo__clamp(ratio, lo, hi)};
    const double d2 = ratio > lo && ratio < hi ? -adv : 0;
    c.l = c.l1 >= c.l2 ? c.l1 : c.l2;
    c.dl = c.l1 > c.l2 ? -adv : c.l1 < c.l2 ? d2 : (d2 - adv) / 2;
    return c;
}

/* ---- the losses ---- */

/* PPO's clipped surrogate (arXiv 1707.06347) with separate bounds (clip-higher,
 * arXiv 2503.14476) and dual clip (arXiv 1912.09729): for a negative advantage
 * the loss stops at -A c. */
static struct token vanilla(const struct algo_policy_cfg *cfg, const struct sample *x) {
    const struct ratio q = ratio_of(x);
    const struct algo__clip c = algo__clip(x->adv, q.r, cfg);
    struct token out = {.l = c.l, .dl = c.dl * q.dr, .kl = -q.log, .clipped = c.l2 > c.l1};
    if (x->adv >= 0) return out;
    const double l3 = -x->adv * cfg->clip_ratio_c;
    out.clipped_lower = c.l > l3;
    if (c.l > l3) {
        out.l = l3;
        out.dl = 0;
    } else if (c.l == l3) {
        out.dl /= 2;
    }
    return out;
}

/* SAPO (arXiv 2511.20347): a sigmoid gate in place of the clip. */
static struct token sapo(const struct algo_policy_cfg *cfg, const struct sample *x) {
    const struct ratio q = ratio_of(x);
    const double tau = x->adv > 0 ? cfg->tau_pos : cfg->tau_neg;
    const double s = 1 / (1 + exp(-tau * (q.r - 1)));
    return (struct token){.l = -s * (4 / tau) * x->adv, .dl = -4 * s * (1 - s) * x->adv * q.dr, .kl = -q.log};
}

static struct token gpg(const struct algo_policy_cfg *cfg, const struct sample *x) {
    (void)cfg;
    return (struct token){.l = -x->logp * x->adv, .dl = -x->adv, .kl = x->old_logp - x->logp};
}

/* CISPO (arXiv 2506.13585): the clipped ratio is a constant weight of logp. */
static struct token cispo(const struct algo_policy_cfg *cfg, const struct sample *x) {
    const struct ratio q = ratio_of(x);
    const double w = algo__clamp(q.r, 1 - cfg->clip_ratio_low, 1 + cfg->clip_ratio_high);
    return (struct token){.l = -w * x->adv * x->logp, .dl = -w * x->adv, .kl = -q.log, .clipped = q.r != w};
}

/* DPPO (arXiv 2602.04879): a truncated ratio as constant weight of logp, and a
 * token counts only while its probability has not moved too far in the direction
 * of its advantage.  The clip ratios are divergence thresholds here. */
static struct token dppo(const struct algo_policy_cfg *cfg, const struct sample *x, bool keep) {
    const struct ratio q = ratio_of(x);
    const double w = keep ? (q.r > cfg->clip_ratio_c ? cfg->clip_ratio_c : q.r) : 0;
    return (struct token){.l = -x->adv * w * x->logp,
                          .dl = -x->adv * w,
                          .kl = -q.log,
                          .clipped = !keep,
                          .clipped_lower = keep && q.r > cfg->clip_ratio_c};
}

static struct token dppo_tv(const struct algo_policy_cfg *cfg, const struct sample *x) {
    const double moved = exp(x->logp) - exp(x->old_logp);
    return dppo(cfg, x, x->adv > 0 ? moved <= cfg->clip_ratio_high : moved >= -cfg->clip_ratio_low);
}

static struct token dppo_kl(const struct algo_policy_cfg *cfg, const struct sample *x) {
    const double p = exp(x->logp), old = exp(x->old_logp);
    const double kl = old * (x->old_logp - x->logp) + (1 - old) * log((1 - old + 1e-8) / (1 - p + 1e-8));
    const bool keep = x->adv > 0 ? kl <= cfg->clip_ratio_high || p <= old : kl <= cfg->clip_ratio_low || p >= old;
    return dppo(cfg, x, keep);
}

/* DRO: reward times logp, with a quadratic penalty on the log-ratio. */
static struct token dro(const struct algo_policy_cfg *cfg, const struct sample *x) {
    const double d = x->logp - x->old_logp;
    return (struct token){.l = -(x->logp * x->adv - 0.5 * cfg->dro_beta * d * d), .dl = -(x->adv - cfg->dro_beta * d), .kl = -d};
}

/* ---- over the tokens of a batch ---- */

enum { KL_METRIC = 1, CLIP_METRICS = 2 };

static void each_token(const struct algo_policy_args *a, struct algo__policy_out *o,
                       struct token (*loss)(const struct algo_policy_cfg *, const struct sample *), unsigned metrics) {
    const struct algo_ragged r = {a->r->n, a->r->off, o->mask};
    double kl = 0, clipped = 0, lower = 0;
    ALGO__EACH_VALID(&r, i, t) {
        const struct token k = loss(&a->cfg, &(struct sample){a->advantages[t], a->old_logp[t], a->logp[t]});
        o->lmat[t] = k.l;
        o->dl[t] = k.dl;
        kl += k.kl;
        clipped += k.clipped;
        lower += k.clipped_lower;
    }
    const double n = (double)algo_n_valid(&r) + ALGO__EPS;
    if (metrics & KL_METRIC) algo_metrics_set(o->m, "actor/ppo_kl", kl / n);
    if (!(metrics & CLIP_METRICS)) return;
    algo_metrics_set(o->m, "actor/pg_clipfrac", clipped / n);
    algo_metrics_set(o->m, "actor/pg_clipfrac_lower", lower / n);
}

int algo__vanilla(const struct algo_policy_args *a, struct algo__policy_out *o) {
    if (!(a->cfg.clip_ratio_c > 1)) FAIL(ERR_INVAL, "clip_ratio_c is %g; dual clip needs a bound above 1", a->cfg.clip_ratio_c);
    each_token(a, o, vanilla, KL_METRIC | CLIP_METRICS);
    return 0;
}
static int run_sapo(const struct algo_policy_args *a, struct algo__policy_out *o) {
    if (!(a->cfg.tau_pos > 0 && a->cfg.tau_neg > 0)) FAIL(ERR_INVAL, "sapo: tau_pos and tau_neg must be positive");
    o->agg.mode = algo_agg_find("seq-mean-token-mean"); /* whatever loss_agg_mode says, as in verl */
    each_token(a, o, sapo, KL_METRIC | CLIP_METRICS);
    return 0;
}
static int run_gpg(const struct algo_policy_args *a, struct algo__policy_out *o) {
    each_token(a, o, gpg, 0);
    return 0;
}
int algo__reinforce(const struct algo_policy_args *a, struct algo__policy_out *o) {
    each_token(a, o, gpg, KL_METRIC);
    return 0;
}
static int run_cispo(const struct algo_policy_args *a, struct algo__policy_out *o) {
    each_token(a, o, cispo, KL_METRIC | CLIP_METRICS);
    return 0;
}
static int run_dppo_tv(const struct algo_policy_args *a, struct algo__policy_out *o) {
    each_token(a, o, dppo_tv, KL_METRIC | CLIP_METRICS);
    return 0;
}
static int run_dppo_kl(const struct algo_policy_args *a, struct algo__policy_out *o) {
    each_token(a, o, dppo_kl, KL_METRIC | CLIP_METRICS);
    return 0;
}
static int run_dro(const struct algo_policy_args *a, struct algo__policy_out *o) {
    if (!(a->cfg.dro_beta > 0)) FAIL(ERR_INVAL, "dro needs policy_loss.dro_beta, a positive number");
    each_token(a, o, dro, KL_METRIC);
    return 0;
}

/* ---- the table ---- */

#define ROW(id, function) \
    { .name = id, .run = function }
static const struct algo_policy_entry losses[] = {
    ROW("vanilla", algo__vanilla),
    ROW("gspo", algo__gspo),
    ROW("sapo", run_sapo),
    ROW("gpg", run_gpg),
    ROW("clip_cov", algo__clip_cov),
    ROW("kl_cov", algo__kl_cov),
    ROW("geo_mean", algo__geo_mean),
    ROW("cispo", run_cispo),
    ROW("dppo_tv", run_dppo_tv),
    ROW("dppo_kl", run_dppo_kl),
    ROW("dro", run_dro),
    ROW("bypass_mode", algo__bypass),
};
#undef ROW
enum { N_LOSSES = sizeof losses / sizeof losses[0] };

struct algo_policy_cfg algo_policy_defaults(void) {
    return (struct algo_policy_cfg){
        .clip_ratio_low = 0.2,
        .clip_ratio_high = 0.2,
        .clip_ratio_c = 3,
        .tau_pos = 1,
        .tau_neg = 1.05,
        .clip_cov_ratio = 0.0002,
        .clip_cov_lb = 1,
        .clip_cov_ub = 5,
        .kl_cov_ratio = 0.0002,
        .ppo_kl_coef = 0.1,
    };
}

const char *algo_policy_name(const struct algo_policy_entry *e) { return e->name; }

const struct algo_policy_entry *algo_policy_find(const char *name) {
    struct buf known = {0};
    for (int i = 0; i < N_LOSSES; i++) {
        if (strcmp(name, losses[i].name) == 0) return buf_free(&known), &losses[i];
        buf_addf(&known, "%s%s", i ? ", " : "", losses[i].name);
    }
    algo_unknown("loss_mode", name, &known);
    return NULL;
}

/* loss = sum w l rho, dlogp = w dl rho, over the tokens that the loss kept. */
static int finish(const struct algo_policy_args *a, const struct algo__policy_out *o, double *loss, double *dlogp) {
    const struct algo_ragged r = {a->r->n, a->r->off, o->mask};
    TRY(algo_agg_weights(&r, &o->agg, dlogp));
    double s = 0;
    ALGO__EACH_VALID(&r, i, t) {
        const double w = o->is_weights ? dlogp[t] * o->is_weights[t] : dlogp[t];
        s += w * o->lmat[t];
        dlogp[t] = w * o->dl[t];
    }
    *loss = s;
    if (algo_n_valid(&r) == 0) algo_metrics_set(o->m, "actor/no_valid_tokens", 1);
    return 0;
}

/* A user-defined loss: it differentiates its weighted sum itself. */
static int user_loss(const struct algo_policy_entry *e, const struct algo_policy_args *a, double *loss, double *dlogp,
                     struct algo_metrics *m) {
    double *w = algo__tokens(a->r), *lmat = algo__tokens(a->r), s = 0;
    int rc = algo_agg_weights(a->r, &a->agg, w);
    if (rc == 0) {
        ALGO__EACH_VALID(a->r, i, t) if (a->is_weights) w[t] *= a->is_weights[t];
        rc = e->user(e->ctx, a, a->logp, w, lmat, dlogp);
    }
    ALGO__EACH_VALID(a->r, i, t) s += w[t] * lmat[t];
    *loss = s;
    if (algo_n_valid(a->r) == 0) algo_metrics_set(m, "actor/no_valid_tokens", 1);
    free(w);
    free(lmat);
    return rc;
}

int algo_policy_loss(const struct algo_policy_entry *e, const struct algo_policy_args *a, double *loss, double *dlogp,
                     struct algo_metrics *m) {
    CHECK(a->r && a->old_logp && a->logp && a->advantages && a->agg.mode);
    if (e->user) return user_loss(e, a, loss, dlogp, m);
    const int64_t last = algo__last(a->r);
    struct algo__policy_out o = {
        .lmat = algo__tokens(a->r),
        .dl = algo__tokens(a->r),
        .mask = xmalloc((size_t)last + 1),
        .agg = a->agg,
        .is_weights = a->is_weights,
        .m = m,
    };
    memcpy(o.mask, a->r->mask, (size_t)last);
    int rc = e->run(a, &o);
    if (rc == 0) rc = finish(a, &o, loss, dlogp);
    free(o.lmat);
    free(o.dl);
    free(o.mask);
    return rc;
}

/* ---- the actor's whole loss (verl workers/utils/losses.py ppo_loss) ---- */

int algo_actor_loss(const struct algo_actor_args *a, double *loss, double *dlogp, double *dentropy, struct algo_metrics *m) {
    const struct algo_policy_args *p = &a->policy;
    double total;
    TRY(algo_policy_loss(a->loss_mode, p, &total, dlogp, m));
    algo_metrics_set(m, "actor/pg_loss", total);
    double *w = algo__tokens(p->r);
    int rc = algo_agg_weights(p->r, &p->agg, w);
    if (rc < 0) goto done;
    if (a->entropy) {
        double entropy = 0;
        ALGO__EACH_VALID(p->r, i, t) entropy += w[t] * a->entropy[t];
        for (int64_t t = algo__first(p->r); t < algo__last(p->r); t++) dentropy[t] = -a->entropy_coeff * w[t];
        total -= a->entropy_coeff * entropy;
        algo_metrics_set(m, "actor/entropy_loss", entropy);
    }
    if (a->ref_logp) {
        double kl = 0;
        ALGO__EACH_VALID(p->r, i, t) {
            double d;
            kl += w[t] * algo_kl(a->kl_loss_type, p->logp[t], a->ref_logp[t], &d);
            dlogp[t] += a->kl_loss_coef * w[t] * d;
        }
        total += a->kl_loss_coef * kl;
        algo_metrics_set(m, "actor/kl_loss", kl);
        algo_metrics_set(m, "actor/kl_coef", a->kl_loss_coef);
    }
    *loss = total;
done:
    free(w);
    return rc;
}
