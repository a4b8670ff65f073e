/* kl.h - KL estimators. */
#ifndef VERLC_ALGO_KL_H
#define VERLC_ALGO_KL_H

#include "algo/ragged.h"

struct algo_kl_type {
    const char *name;
    double (*value)(double logp, double ref_logp);
    double (*dlogp)(double logp, double ref_logp);
};
/* kl, k1, abs, mse, k2, low_var_kl, k3, each also with '+' (the gradient of k2). ERR_INVAL, ERR_UNSUPPORTED (full). */
int algo_kl_find(struct algo_kl_type *out, const char *name);
double algo_kl(const struct algo_kl_type *t, double logp, double ref_logp, double *dlogp);

#endif
