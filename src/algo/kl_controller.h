/* kl_controller.h - the KL penalty in the reward and the controller of its coefficient. */
#ifndef VERLC_ALGO_KL_CONTROLLER_H
#define VERLC_ALGO_KL_CONTROLLER_H

#include "algo/kl.h"

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

#endif
