/* distillation.h - on-policy distillation (verl trainer/distillation; distillation.distillation_loss). */
#ifndef VERLC_ALGO_DISTILLATION_H
#define VERLC_ALGO_DISTILLATION_H

#include "algo/policy_loss.h"

struct algo_distill {
    const char *name;
    int list;                  /* not 0: a loss over the teacher's k most probable tokens (..._topk); 0: an estimator */
    struct algo_kl_type kl;    /* of an estimator; the student is logp, the teacher ref */
    double loss_max_clamp;     /* a token's loss lies within -+ this; INFINITY: anywhere */
    double log_prob_min_clamp; /* of the lists' log-probs; -INFINITY: none */
    bool use_policy_gradient;  /* the negative loss is the advantage of a vanilla policy loss */
    struct algo_policy_cfg policy;
};
/* k1 and the other estimators, forward_kl_topk, reverse_kl_topk, jsd_topk; nothing clamped. ERR_INVAL lists the names. */
int algo_distill_find(struct algo_distill *d, const char *loss_mode);

struct algo_distill_args {
    const struct algo_ragged *r;
    const struct algo_distill *d;
    struct algo_agg agg;
    double coef;                         /* the weight of the loss's derivative in dlogp and dlist */
    const double *logp;                  /* per token: of the student; needed by an estimator, a policy gradient */
    const double *teacher_logp;          /* per token: an estimator */
    const double *old_logp, *is_weights; /* per token: a policy gradient; is_weights may be NULL */
    /* lists: k entries for each token, indexed t * k */
    int64_t k, vocab;
    const double *list_logp, *list_teacher; /* the student's and the teacher's log-probs of list_id */
    const int32_t *list_id, *student_top;   /* the teacher's k most probable tokens, the student's */
};
struct algo_range {
    double sum, min, max;
};
struct algo_distill_sums { /* over the tokens of all calls; a zeroed one is empty */
    bool list;
    int64_t n, n_overlap;
    struct algo_range token_loss, student_mass, teacher_mass;
    double abs_loss, overlap, overlap_advantage, loss;
};
/* The aggregated loss. Adds coef times its derivative to dlogp (per token) and, for a list, puts that by list_logp
 * into dlist (k for each token). Adds to s; m gets a policy gradient's distillation/pg_clipfrac, ... */
int algo_distill_loss(const struct algo_distill_args *a, double *loss, double *dlogp, double *dlist, struct algo_distill_sums *s,
                      struct algo_metrics *m);
/* distillation/loss, loss_min, loss_max; abs_loss, or student_mass, teacher_mass (each with _min, _max),
 * overlap_ratio, overlap_token_advantage, over the tokens of s. */
void algo_distill_metrics(const struct algo_distill_sums *s, struct algo_metrics *m);

#endif
