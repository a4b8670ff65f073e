/* advantage.h - advantage estimators (algorithm.adv_estimator). Needs what the entry names; knows no batch. */
#ifndef VERLC_ALGO_ADVANTAGE_H
#define VERLC_ALGO_ADVANTAGE_H

#include "algo/ragged.h"

#include <jansson.h>

enum algo_adv_needs { /* inputs beyond rewards and mask */
                      ALGO_NEEDS_GROUP = 1,
                      ALGO_NEEDS_VALUES = 2,
                      ALGO_NEEDS_BASELINES = 4,
                      ALGO_NEEDS_SUM_PI = 8, /* old_logp and sum_pi_squared */
};
struct algo_adv_args {
    const struct algo_ragged *r;
    const double *rewards;          /* token_level_rewards, per token */
    const int64_t *group;           /* per sample: equal numbers are samples of one prompt (uid) */
    const int64_t *session;         /* per sample: equal numbers are outputs of one episode, in order; NULL: each is an episode */
    const double *values;           /* per token */
    const double *reward_baselines; /* per sample (remax) */
    const double *old_logp;         /* per token (optimal token baselines) */
    const double *sum_pi_squared;   /* per token */
    const double *is_weights;       /* rollout_is_weights, per token, may be NULL */
    /* gdpo: components[k * r->n + i] is reward k of sample i; none: row sums of rewards */
    const double *components;
    const double *component_weights; /* NULL: all 1 */
    int64_t n_components;
    const json_t *kwargs; /* of a user-defined estimator: an object, may be NULL */
    double gamma, lam;
    bool norm_by_std;      /* norm_adv_by_std_in_grpo; false is Dr.GRPO */
    bool handle_zero_tail; /* optimal token baselines; verl's default is true */
};
struct algo_adv_entry {
    const char *name;
    unsigned needs; /* enum algo_adv_needs */
    int (*run)(const struct algo_adv_args *a, double *adv, double *ret);
    int (*user)(void *ctx, const struct algo_adv_args *a, double *adv, double *ret); /* user-defined, instead of run */
    void *ctx;
};
struct algo_adv_args algo_adv_defaults(void);                 /* verl's defaults: gamma = lam = 1, flags true */
const struct algo_adv_entry *algo_adv_find(const char *name); /* NULL: unknown, message lists the names */
/* final[i]: the last of the samples 0 .. n - 1 with the session of sample i; session NULL: i. */
void algo_session_finals(int64_t n, const int64_t *session, int64_t *final);
/* adv and ret are per token, over the range of a->r.  ERR_INVAL: an input is
 * missing; ERR_INPUT: the estimator is undefined on this batch (it says why). */
int algo_advantage(const struct algo_adv_entry *e, const struct algo_adv_args *a, double *adv, double *ret);

#endif
