/* rollout_correction.h - algorithm.rollout_correction: importance weights and rejection of tokens and sequences (verl
 * trainer/ppo/rollout_corr_helper.py). */
#ifndef VERLC_ALGO_ROLLOUT_CORRECTION_H
#define VERLC_ALGO_ROLLOUT_CORRECTION_H

#include "algo/ragged.h"

enum algo_is_level { ALGO_IS_NONE, ALGO_IS_TOKEN, ALGO_IS_SEQUENCE };
enum { ALGO_RS_MAX = 11 };
struct algo_rs {         /* one rejection option */
    int option;          /* index into the table of options */
    double lower, upper; /* k1: ratio bounds; k2, k3: upper only */
};
struct algo_corr {
    enum algo_is_level is;
    double is_upper;
    double is_lower; /* > 0: weights outside [lower, upper] become 0; 0: truncated at upper */
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

#endif
