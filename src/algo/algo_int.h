/* algo_int.h - what the files of algo share: masked sums, groups, the last step
 * of every policy loss.  Masked tokens are skipped, never multiplied by 0.
 * Sums run in token order, so a result does not depend on threads. */
#ifndef VERLC_ALGO_INT_H
#define VERLC_ALGO_INT_H

#include "algo/advantage.h"
#include "algo/policy_loss.h"
#include "base/buf.h"
#include "base/err.h"

#include <math.h>

#define ALGO__EPS 1e-8      /* verl_F.masked_mean's and masked_whiten's */
#define ALGO__LOG_CLAMP 20. /* bound on log-ratios before exp */

/* for each token t of sample i of r, valid ones only */
#define ALGO__EACH_VALID(r, i, t)                               \
    for (int64_t i = 0; i < (r)->n; i++)                        \
        for (int64_t t = (r)->off[i]; t < (r)->off[i + 1]; t++) \
            if ((r)->mask[t])

static inline int64_t algo__first(const struct algo_ragged *r) { return r->off[0]; }
static inline int64_t algo__last(const struct algo_ragged *r) { return r->off[r->n]; }
static inline double algo__clamp(double x, double lo, double hi) {
    return x < lo ? lo : x > hi ? hi : x; /* NaN stays NaN, as torch.clamp */
}

int64_t algo__row_valid(const struct algo_ragged *r, int64_t i);
double algo__row_sum(const struct algo_ragged *r, int64_t i, const double *x);  /* valid tokens */
double algo__row_mean(const struct algo_ragged *r, int64_t i, const double *x); /* verl_F.masked_mean */
int64_t algo__max_row(const struct algo_ragged *r);                             /* longest row, masked tokens counted */

/* A zeroed array that the offsets of r can index; free() it. */
double *algo__tokens(const struct algo_ragged *r);

/* Rows of equal group id: members of group g are row[first[g] .. first[g + 1]), ascending. */
struct algo__groups {
    int64_t n;
    int64_t *first, *row;
};
void algo__groups_init(struct algo__groups *g, int64_t n, const int64_t *id);
void algo__groups_free(struct algo__groups *g);

/* Optimal token baselines, in their own file. */
int algo__otb(const struct algo_adv_args *a, double *adv, double *ret);
int algo__otb_tir(const struct algo_adv_args *a, double *adv, double *ret);

/* What a policy loss computes: a loss for each token and its derivative.  run()
 * fills it; importance weights, aggregation and sums are common to all. */
struct algo__policy_out {
    double *lmat;             /* per token, zeroed */
    double *dl;               /* d lmat[t] / d logp[t], zeroed */
    struct algo_agg agg;      /* a copy of the caller's; sapo replaces the mode */
    const double *is_weights; /* the caller's; a loss may bring its own, or none */
    uint8_t *mask;            /* a copy of response_mask; bypass_mode rejects tokens in it */
    struct algo_metrics *m;
};
struct algo_policy_entry {
    const char *name;
    int (*run)(const struct algo_policy_args *a, struct algo__policy_out *o);
    /* A user-defined loss instead: with the weights w it fills the loss of each token and the derivative of
     * their weighted sum by each log-prob; fixed: the log-probs where they are constants. */
    int (*user)(void *ctx, const struct algo_policy_args *a, const double *fixed, const double *w, double *loss, double *dlogp);
    void *ctx;
};

/* The clipped surrogate of one ratio: max(-A r, -A clamp(r, lo, hi)).  Derivatives
 * follow torch 2.15 at ties: maximum splits evenly, clamp passes nothing at its bounds. */
struct algo__clip {
    double l1, l2; /* unclipped, clipped */
    double l, dl;  /* their maximum, and its derivative by r */
};
struct algo__clip algo__clip(double adv, double ratio, const struct algo_policy_cfg *cfg);

/* The losses over sequences and batches (policy_loss_sequence.c), and the token-wise
 * ones (policy_loss.c) that another one calls. */
int algo__gspo(const struct algo_policy_args *a, struct algo__policy_out *o);
int algo__geo_mean(const struct algo_policy_args *a, struct algo__policy_out *o);
int algo__clip_cov(const struct algo_policy_args *a, struct algo__policy_out *o);
int algo__kl_cov(const struct algo_policy_args *a, struct algo__policy_out *o);
int algo__bypass(const struct algo_policy_args *a, struct algo__policy_out *o);
int algo__vanilla(const struct algo_policy_args *a, struct algo__policy_out *o);
int algo__reinforce(const struct algo_policy_args *a, struct algo__policy_out *o);

#endif
