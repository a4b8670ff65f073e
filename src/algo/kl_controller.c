/* kl_controller.c - the KL penalty in the reward and the controller of its coefficient. */
#include "algo/algo_int.h"
#include "algo/kl_controller.h"

#include <string.h>

int algo_kl_ctrl_init(struct algo_kl_ctrl *c, const char *type, double kl_coef, double target_kl, double horizon) {
    const bool adaptive = strcmp(type, "adaptive") == 0;
    if (!adaptive && strcmp(type, "fixed") != 0) FAIL(ERR_INVAL, "kl_ctrl.type '%s' is unknown; use fixed or adaptive", type);
    if (adaptive && !(horizon > 0)) FAIL(ERR_INVAL, "kl_ctrl.horizon must be positive, not %g", horizon);
    if (adaptive && target_kl == 0) FAIL(ERR_INVAL, "kl_ctrl.target_kl must not be 0");
    *c = (struct algo_kl_ctrl){adaptive, kl_coef, target_kl, horizon};
    return 0;
}

/* Proportional control (Ziegler et al., arXiv 1909.08593, section 2.2). */
void algo_kl_ctrl_update(struct algo_kl_ctrl *c, double current_kl, int64_t n_steps) {
    if (!c->adaptive) return;
    const double error = algo__clamp(current_kl / c->target_kl - 1, -0.2, 0.2);
    c->value *= 1 + error * (double)n_steps / c->horizon;
}

void algo_kl_in_reward(struct algo_kl_ctrl *c, const struct algo_kl_reward_args *a, double *rewards, struct algo_metrics *m) {
    const struct algo_ragged *r = a->r;
    const double beta = c->value;
    double mean_of_rows = 0;
    for (int64_t i = 0; i < r->n; i++) {
        double row = 0;
        for (int64_t t = r->off[i]; t < r->off[i + 1]; t++) {
            rewards[t] = a->scores[t];
            if (!r->mask[t]) continue;
            double unused;
            const double kl = algo_kl(a->type, a->old_logp[t], a->ref_logp[t], &unused);
            rewards[t] -= beta * kl;
            row += kl;
        }
        mean_of_rows += row / ((double)algo__row_valid(r, i) + ALGO__EPS);
    }
    if (r->n > 0) mean_of_rows /= (double)r->n;
    algo_kl_ctrl_update(c, mean_of_rows, r->n);
    algo_metrics_set(m, "actor/reward_kl_penalty", mean_of_rows);
    algo_metrics_set(m, "actor/reward_kl_penalty_coeff", beta);
}
