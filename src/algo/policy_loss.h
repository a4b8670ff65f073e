/* policy_loss.h - policy losses (actor.policy_loss.loss_mode), and the actor's whole loss. */
#ifndef VERLC_ALGO_POLICY_LOSS_H
#define VERLC_ALGO_POLICY_LOSS_H

#include "algo/kl.h"
#include "algo/loss_aggregation.h"
#include "algo/rollout_correction.h"

#include <jansson.h>

struct algo_policy_cfg { /* actor.* and actor.policy_loss.*; start from algo_policy_defaults */
    double clip_ratio_low, clip_ratio_high, clip_ratio_c;
    double tau_pos, tau_neg;                         /* sapo */
    double clip_cov_ratio, clip_cov_lb, clip_cov_ub; /* clip_cov */
    double kl_cov_ratio, ppo_kl_coef;                /* kl_cov */
    double dro_beta;                                 /* dro; must be set */
    uint64_t seed, step;                             /* clip_cov picks its tokens by (seed, step) */
    const struct algo_corr *corr;                    /* bypass_mode */
    const json_t *kwargs;                            /* of a user-defined loss: an object, may be NULL */
};
struct algo_policy_args {
    const struct algo_ragged *r;
    const double *old_logp, *logp, *advantages; /* per token */
    const double *is_weights;                   /* rollout_is_weights, may be NULL */
    struct algo_agg agg;
    struct algo_policy_cfg cfg;
};
struct algo_policy_entry; /* a row of the table */
struct algo_policy_cfg algo_policy_defaults(void);
const struct algo_policy_entry *algo_policy_find(const char *name); /* NULL: unknown, message lists the names */
const char *algo_policy_name(const struct algo_policy_entry *e);    /* user-defined: its spec */
/* The loss, and dlogp[t] = d loss / d logp[t] (0 where masked).  Metrics
 * actor/pg_clipfrac, actor/ppo_kl, ... over this call's tokens; where no token
 * is valid the loss is 0 and the metric actor/no_valid_tokens is 1. */
int algo_policy_loss(const struct algo_policy_entry *e, const struct algo_policy_args *a, double *loss, double *dlogp,
                     struct algo_metrics *m);

/* ---- the actor's whole loss: policy - entropy_coeff * entropy + kl_loss_coef * KL ---- */
struct algo_actor_args {
    struct algo_policy_args policy;
    const struct algo_policy_entry *loss_mode;
    const double *entropy; /* per token; NULL: no entropy term */
    double entropy_coeff;
    const double *ref_logp; /* NULL: no KL term (actor.use_kl_loss=False) */
    const struct algo_kl_type *kl_loss_type;
    double kl_loss_coef;
};
/* dlogp, and dentropy where entropy is given.  Adds actor/pg_loss,
 * actor/entropy_loss, actor/kl_loss, actor/kl_coef; the losses among them sum
 * over micro-batches, the other metrics average. */
int algo_actor_loss(const struct algo_actor_args *a, double *loss, double *dlogp, double *dentropy, struct algo_metrics *m);

#endif
