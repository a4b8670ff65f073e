/* verlc_algo.h - an advantage estimator or a policy loss of your own, in one C file.
 *
 *   algorithm.adv_estimator=./my_adv.c:NAME
 *   actor_rollout_ref.actor.policy_loss.loss_mode=./my_loss.c:NAME
 *
 * NAME is a function of the type verlc_adv_fn or verlc_loss_fn below.  The file is compiled
 * when the run starts ($CC, cc, gcc or clang) and runs inside verlc, so it is trusted as
 * verlc is.  docs/extending.md has complete examples.
 *
 * Arrays are ragged: sample i owns the tokens off[i] .. off[i + 1) of every per-token
 * array; off[0] is 0.  mask is response_mask; what a function writes for a
 * token whose mask is 0 is not read.  Everything is borrowed for the call.
 *
 * A function gives 0, or another number to refuse the batch, which ends the run. */
#ifndef VERLC_OWN_ALGO_H
#define VERLC_OWN_ALGO_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* A number of algorithm.adv_kwargs or policy_loss.kwargs. */
struct verlc_param {
    const char *name;
    double value;
};

/* ---- advantages ---- */
struct verlc_adv {
    int64_t n;                      /* samples */
    const int64_t *off;             /* n + 1 */
    const uint8_t *mask;            /* per token */
    const double *rewards;          /* per token: token_level_rewards; a score is on the last token */
    const int64_t *group;           /* per sample: equal numbers are samples of one prompt */
    const double *old_logp;         /* per token; the rollout's log-probs; NULL: not there */
    const double *values;           /* per token; NULL without a critic (VERLC_VALUES) */
    const double *reward_baselines; /* per sample: the reward of a greedy response; NULL without VERLC_BASELINES */
    const double *sum_pi_squared;   /* per token: sum over the vocabulary of p^2; NULL without VERLC_SUM_PI_SQUARED */
    const double *is_weights;       /* per token: rollout_is_weights; NULL without rollout correction */
    double gamma, lam;              /* algorithm.gamma, .lam */
    int64_t n_params;
    const struct verlc_param *params;
};
/* Fills advantages and returns, per token; both start as 0. */
typedef int verlc_adv_fn(const struct verlc_adv *a, double *advantages, double *returns);

/* What an estimator needs beyond rewards and groups, said in its file:
 *   VERLC_NEEDS(my_adv, VERLC_VALUES | VERLC_SUM_PI_SQUARED) */
enum {
    VERLC_VALUES = 2,         /* a critic is trained, and gives values */
    VERLC_BASELINES = 4,      /* a greedy response to each prompt is generated and scored */
    VERLC_SUM_PI_SQUARED = 8, /* a forward pass more, for sum_pi_squared */
};
#define VERLC_NEEDS(name, what) const unsigned name##_verlc_needs = (what);

/* ---- policy losses ---- */
struct verlc_loss {
    int64_t n;                /* samples: a micro-batch, never a part of a sample */
    const int64_t *off;       /* n + 1 */
    const uint8_t *mask;      /* per token */
    const double *logp;       /* per token: log-probs of the policy; the loss is differentiated by these */
    const double *old_logp;   /* per token: before the step's updates */
    const double *advantages; /* per token */
    /* The same numbers as logp, as constants: read these where your formula stops the
     * gradient (torch's detach).  The check of dlogp moves logp alone. */
    const double *logp_fixed;
    /* The loss of the mini-batch is the sum of weight[t] * loss[t] over its tokens: loss_agg_mode
     * and rollout_is_weights as one number for each token, 0 where masked. */
    const double *weight;
    double clip_ratio_low, clip_ratio_high, clip_ratio_c; /* actor.clip_ratio... */
    int64_t n_params;
    const struct verlc_param *params;
};
/* Fills loss, per token, and dlogp[t], the derivative of the sum of weight * loss by logp[t]:
 * for a loss that looks at one token at a time weight[t] times the derivative of loss[t].
 * Both start as 0.  At load dlogp is compared with finite differences on a small batch. */
typedef int verlc_loss_fn(const struct verlc_loss *a, double *loss, double *dlogp);

/* The parameter of that name, or what it is by default. */
static inline double verlc_param(const struct verlc_param *p, int64_t n, const char *name, double otherwise) {
    for (int64_t i = 0; i < n; i++)
        if (strcmp(p[i].name, name) == 0) return p[i].value;
    return otherwise;
}

#endif
