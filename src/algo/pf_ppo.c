/* pf_ppo.c - the weights of PF-PPO (policy filtration, arXiv 2409.06957) as verl's
 * compute_pf_ppo_reweight_data has them.  Drawing by them is the trainer's. */
#include "algo/pf_ppo.h"

#include "base/err.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

int algo_pf_ppo_parse(struct algo_pf_ppo *c, const char *method, double weight_pow) {
    static const char *const names[] = {[ALGO_PF_POW] = "pow", [ALGO_PF_MAX_MIN] = "max_min", [ALGO_PF_MAX_RANDOM] = "max_random"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(method, names[i]) != 0) continue;
        *c = (struct algo_pf_ppo){(enum algo_pf_method)i, weight_pow};
        return 0;
    }
    FAIL(ERR_INVAL, "pf_ppo.reweight_method '%s' is unknown; use pow, max_min or max_random", method);
}

void algo_pf_ppo_weights(const struct algo_pf_ppo *c, const double *score, int64_t n, double *w) {
    double max = -INFINITY, min = INFINITY;
    for (int64_t i = 0; i < n; i++) {
        max = fmax(max, score[i]);
        min = fmin(min, score[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        const bool best = score[i] == max, worst = score[i] == min;
        w[i] = c->method == ALGO_PF_POW       ? pow(fabs(score[i]), c->weight_pow)
               : c->method == ALGO_PF_MAX_MIN ? (best || worst ? 1 : 0)
                                              : (best ? 0.4 : 0.1);
        w[i] = fmin(w[i] + 1e-8, DBL_MAX / (2 * (double)n)); /* their sum is finite */
    }
}
