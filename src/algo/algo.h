/* algo.h - the algorithms of reinforcement learning as pure functions.
 *
 * Advantage estimators, policy losses, KL penalties, loss aggregation, value
 * loss, rollout correction.  Names, formulas and metrics are verl's; a loss
 * gives its value and its derivative by each input that a model produced.
 * Nothing here knows of models, devices or batches, and only algo_user*.c of files.
 *
 * Arrays are double and so is the arithmetic: a caller widens its fp32 log-probs,
 * which costs nothing beside a forward pass.
 *
 * Invariants: a token whose mask is 0 is never read (NaN there cannot leak),
 * except by the row sums of rewards, which verl takes over whole rows; a loss
 * is linear in its tokens with weights fixed by the global mini-batch, so the
 * losses of its micro-batches sum to it (DESIGN 2, invariant 3). */
#ifndef VERLC_ALGO_H
#define VERLC_ALGO_H

#include "base/buf.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* Samples x tokens without padding: sample i owns tokens [off[i], off[i + 1])
 * of every flat array.  off[0] need not be 0: a micro-batch is a range of the
 * mini-batch's offsets over the same arrays.  Borrowed for the call only. */
struct algo_ragged {
    int64_t n;           /* samples */
    const int64_t *off;  /* n + 1, not decreasing */
    const uint8_t *mask; /* response_mask: 1 for a token of the policy, else 0 */
};

/* ---- metrics, under verl's names ---- */
struct algo_metric {
    char name[80];
    double value;
};
struct algo_metrics { /* a zeroed struct is empty; every function below adds to it */
    struct algo_metric *v;
    int64_t n, cap;
};
void algo_metrics_set(struct algo_metrics *m, const char *name, double value); /* m may be NULL */
bool algo_metrics_get(const struct algo_metrics *m, const char *name, double *value);
void algo_metrics_free(struct algo_metrics *m);

/* ---- masked statistics over all tokens of a ragged array ---- */
int64_t algo_n_valid(const struct algo_ragged *r);
double algo_masked_mean(const struct algo_ragged *r, const double *x); /* 0 when nothing is valid */

/* ---- advantages ---- */
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
    const double *values;           /* per token */
    const double *reward_baselines; /* per sample (remax) */
    const double *old_logp;         /* per token (optimal token baselines) */
    const double *sum_pi_squared;   /* per token */
    const double *is_weights;       /* rollout_is_weights, per token, may be NULL */
    /* gdpo: components[k * r->n + i] is reward k of sample i; none: row sums of rewards */
    const double *components;
    const double *component_weights; /* NULL: all 1 */
    int64_t n_components;
    const json_t *kwargs; /* of a user's own estimator: an object, may be NULL */
    double gamma, lam;
    bool norm_by_std;      /* norm_adv_by_std_in_grpo; false is Dr.GRPO */
    bool handle_zero_tail; /* optimal token baselines; verl's default is true */
};
struct algo_adv_entry {
    const char *name;
    unsigned needs; /* enum algo_adv_needs */
    int (*run)(const struct algo_adv_args *a, double *adv, double *ret);
    int (*user)(void *ctx, const struct algo_adv_args *a, double *adv, double *ret); /* a user's own, instead of run */
    void *ctx;
};
struct algo_adv_args algo_adv_defaults(void);                 /* verl's defaults: gamma = lam = 1, flags true */
const struct algo_adv_entry *algo_adv_find(const char *name); /* NULL: unknown, message lists the names */
/* adv and ret are per token, over the range of a->r.  ERR_INVAL: an input is
 * missing; ERR_INPUT: the estimator is undefined on this batch (it says why). */
int algo_advantage(const struct algo_adv_entry *e, const struct algo_adv_args *a, double *adv, double *ret);

/* ---- PF-PPO: samples drawn again by their scores (arXiv 2409.06957; verl compute_pf_ppo_reweight_data) ---- */
enum algo_pf_method { ALGO_PF_POW, ALGO_PF_MAX_MIN, ALGO_PF_MAX_RANDOM };
struct algo_pf_ppo { /* algorithm.pf_ppo */
    enum algo_pf_method method;
    double weight_pow;
};
int algo_pf_ppo_parse(struct algo_pf_ppo *c, const char *reweight_method, double weight_pow);
/* w[i] > 0, proportional to the chance of sample i: |score|^weight_pow; 1 for the best and the worst
 * score, else 0; 0.4 for the best, else 0.1; each plus 1e-8. */
void algo_pf_ppo_weights(const struct algo_pf_ppo *c, const double *score, int64_t n, double *w);

/* ---- KL estimators ---- */
struct algo_kl_type {
    const char *name;
    bool straight_through; /* a name with '+': the value of the base, the gradient of k2 */
    double (*value)(double logp, double ref_logp);
    double (*dlogp)(double logp, double ref_logp);
};
/* kl, k1, abs, mse, k2, low_var_kl, k3, each also with '+'. ERR_INVAL, ERR_UNSUPPORTED (full). */
int algo_kl_find(struct algo_kl_type *out, const char *name);
double algo_kl(const struct algo_kl_type *t, double logp, double ref_logp, double *dlogp);

struct algo_kl_ctrl { /* algorithm.kl_ctrl */
    bool adaptive;
    double value; /* the coefficient now; starts at kl_coef */
    double target_kl, horizon;
};
int algo_kl_ctrl_init(struct algo_kl_ctrl *c, const char *type, double kl_coef, double target_kl, double horizon);
void algo_kl_ctrl_update(struct algo_kl_ctrl *c, double current_kl, int64_t n_steps);
/* rewards = scores - c->value * kl(old, ref) on valid tokens (algorithm.use_kl_in_reward);
 * then updates c with the batch's mean KL.  rewards may be scores.  Metrics
 * actor/reward_kl_penalty and actor/reward_kl_penalty_coeff (the one used). */
struct algo_kl_reward_args {
    const struct algo_ragged *r;
    const double *scores, *old_logp, *ref_logp;
    const struct algo_kl_type *type; /* algorithm.kl_penalty */
};
void algo_kl_in_reward(struct algo_kl_ctrl *c, const struct algo_kl_reward_args *a, double *rewards, struct algo_metrics *m);

/* ---- aggregation: a loss per token -> one number ---- */
struct algo_agg_mode;
struct algo_agg {
    const struct algo_agg_mode *mode; /* from algo_agg_find */
    /* Of the global mini-batch, over all micro-batches and ranks; 0: count in this call. */
    int64_t dp_size;           /* 0 is 1; the loss is scaled so that the mean over ranks is right */
    int64_t batch_num_tokens;  /* valid tokens */
    int64_t global_batch_size; /* samples */
    double loss_scale_factor;  /* seq-mean-token-sum-norm; 0: width */
    int64_t width;             /* padded response width T of verl; 0: longest sample here */
    int64_t batch_rows;        /* samples, empty ones too: the divisor of geo_mean, which has no mode */
};
/* token-mean, token-sum, seq-mean-token-sum, seq-mean-token-sum-norm, seq-mean-token-mean.
 * NULL: unknown, message lists the names. */
const struct algo_agg_mode *algo_agg_find(const char *name);
/* w[t] such that the loss is the sum of w[t] * loss_mat[t]; 0 where masked.
 * No valid token: all 0. ERR_INVAL: dp_size > 1 without the global count. */
int algo_agg_weights(const struct algo_ragged *r, const struct algo_agg *agg, double *w);
/* The aggregated loss; dloss_mat (may be NULL) gets w. */
int algo_agg_loss(const struct algo_ragged *r, const struct algo_agg *agg, const double *loss_mat, double *loss, double *dloss_mat);

/* ---- rollout correction: importance weights and rejection (verl 2.8) ---- */
enum algo_is_level { ALGO_IS_NONE, ALGO_IS_TOKEN, ALGO_IS_SEQUENCE };
enum { ALGO_RS_MAX = 11 };
struct algo_rs {         /* one rejection option */
    int option;          /* index into the table of options */
    double lower, upper; /* k1: ratio bounds; k2, k3: upper only */
};
struct algo_corr {
    enum algo_is_level is;
    double is_upper;
    double is_lower; /* > 0: weights outside [lower, upper] become 0; 0: cut at upper */
    bool is_batch_normalize;
    int n_rs;
    struct algo_rs rs[ALGO_RS_MAX];
    bool reinforce; /* bypass_mode: loss_type=reinforce instead of ppo_clip */
};
/* From the texts of algorithm.rollout_correction; NULL or "" where a key is null.
 * is_threshold "2.0" or "lower_upper"; rs "token_k1,seq_mean_k3"; rs_threshold one or one each. */
struct algo_corr_spec {
    const char *rollout_is, *rollout_is_threshold, *rollout_rs, *rollout_rs_threshold, *loss_type;
    bool rollout_is_batch_normalize;
};
int algo_corr_parse(struct algo_corr *out, const struct algo_corr_spec *spec);
/* is_weights (per token; untouched when c->is is NONE) and mask_out, the mask
 * with rejected tokens taken out (may be r->mask itself).  Metrics rollout_corr/... */
struct algo_corr_args {
    const struct algo_ragged *r;
    const struct algo_corr *c;
    const double *old_logp, *rollout_logp;
};
int algo_corr_run(const struct algo_corr_args *a, double *is_weights, uint8_t *mask_out, struct algo_metrics *m);

/* ---- policy losses ---- */
struct algo_policy_cfg { /* actor.* and actor.policy_loss.*; start from algo_policy_defaults */
    double clip_ratio_low, clip_ratio_high, clip_ratio_c;
    double tau_pos, tau_neg;                         /* sapo */
    double clip_cov_ratio, clip_cov_lb, clip_cov_ub; /* clip_cov */
    double kl_cov_ratio, ppo_kl_coef;                /* kl_cov */
    double dro_beta;                                 /* dro; must be set */
    uint64_t seed, step;                             /* clip_cov picks its tokens by (seed, step) */
    const struct algo_corr *corr;                    /* bypass_mode */
    const json_t *kwargs;                            /* of a user's own loss: an object, may be NULL */
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
const char *algo_policy_name(const struct algo_policy_entry *e);    /* a user's own: its spec */
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

/* ---- on-policy distillation (verl trainer/distillation; distillation.distillation_loss) ---- */
struct algo_distill {
    const char *name;
    int list;                  /* not 0: a loss over the teacher's k most probable tokens (..._topk); 0: an estimator */
    struct algo_kl_type kl;    /* of an estimator; the student is logp, the teacher ref */
    double loss_max_clamp;     /* a token's loss lies within -+ this; INFINITY: anywhere */
    double log_prob_min_clamp; /* of the lists' log-probs; -INFINITY: none */
    bool use_policy_gradient;  /* the negative loss is the advantage of a vanilla policy loss */
    struct algo_policy_cfg policy;
};
/* k1 and its kin, forward_kl_topk, reverse_kl_topk, jsd_topk; nothing clamped. ERR_INVAL lists the names. */
int algo_distill_find(struct algo_distill *d, const char *loss_mode);

struct algo_distill_args {
    const struct algo_ragged *r;
    const struct algo_distill *d;
    struct algo_agg agg;
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
int algo_distill_loss(const struct algo_distill_args *a, double coef, double *loss, double *dlogp, double *dlist,
                      struct algo_distill_sums *s, struct algo_metrics *m);
/* distillation/loss, loss_min, loss_max; abs_loss, or student_mass, teacher_mass (each with _min, _max),
 * overlap_ratio, overlap_token_advantage: exact over the tokens of s, where verl averages micro-batches. */
void algo_distill_metrics(const struct algo_distill_sums *s, struct algo_metrics *m);

/* ---- value loss ---- */
struct algo_value_args {
    const struct algo_ragged *r;
    const double *vpreds, *values, *returns;
    double cliprange_value;
    struct algo_agg agg;
};
/* Metrics critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean. */
int algo_value_loss(const struct algo_value_args *a, double *loss, double *dvpreds, struct algo_metrics *m);

/* ---- micro-batches of dynamic batching (verl.utils.seqlen_balancing.rearrange_micro_batches) ----
 * Rows of len[i] tokens each, dealt out by Karmarkar-Karp so that the micro-batches have about the same work and none
 * more than max_tokens. row (n): their numbers, one micro-batch after the other; end (n): where each of the n_micro ends
 * in row. ERR_INVAL: a row that alone is longer. */
int algo_micro_batches(const int64_t *len, int64_t n, int64_t max_tokens, int64_t *row, int64_t *end, int64_t *n_micro);

/* ---- a user's own estimator or loss: a function of a C or Python file (docs/extending.md) ---- */
struct algo_user;
struct algo_user_args {
    const char *key;      /* what named it, for messages: "algorithm.adv_estimator" */
    const char *spec;     /* "./my_adv.c:name" or "./my_adv.py:name" */
    bool loss;            /* a policy loss, else an estimator */
    const char *dir;      /* a C file is compiled here; NULL: in a directory that is gone afterwards */
    double timeout_s;     /* of one call of a Python function; 0: 60 */
    const json_t *kwargs; /* its parameters in the check at load, may be NULL; copied */
};
bool algo_user_named(const char *spec); /* has the form of a file, so is no name of the tables */
/* Compiles and opens, or starts the helper. ERR_INVAL: the name; ERR_INPUT: the file, with the compiler's or
 * Python's first word on it; ERR_TIMEOUT. */
int algo_user_open(struct algo_user **out, const struct algo_user_args *a);
/* Calls it on a small batch: ERR_NUMERIC where a number is not finite, ERR_INPUT where a loss has another derivative
 * than finite differences find. NULL: 0. */
int algo_user_check(struct algo_user *u);
void algo_user_close(struct algo_user *u); /* NULL ok */
const struct algo_adv_entry *algo_user_adv(const struct algo_user *u);
const struct algo_policy_entry *algo_user_policy(const struct algo_user *u);

/* ERR_INVAL: an unknown name of this kind; known: "a, b, c". Frees known. */
int algo_unknown(const char *kind, const char *name, struct buf *known);

#endif
