/* pf_ppo.h - PF-PPO: samples drawn again by their scores (arXiv 2409.06957; verl compute_pf_ppo_reweight_data). */
#ifndef VERLC_ALGO_PF_PPO_H
#define VERLC_ALGO_PF_PPO_H

#include <stdint.h>

enum algo_pf_method { ALGO_PF_POW, ALGO_PF_MAX_MIN, ALGO_PF_MAX_RANDOM };
struct algo_pf_ppo { /* algorithm.pf_ppo */
    enum algo_pf_method method;
    double weight_pow;
};
int algo_pf_ppo_parse(struct algo_pf_ppo *c, const char *reweight_method, double weight_pow);
/* w[i] > 0, proportional to the chance of sample i: |score|^weight_pow; 1 for the best and the worst
 * score, else 0; 0.4 for the best, else 0.1; each plus 1e-8. */
void algo_pf_ppo_weights(const struct algo_pf_ppo *c, const double *score, int64_t n, double *w);

#endif
