/* kl.c - KL estimators (Schulman, joschu.net/blog/kl-approx.html).
 * Invariant: derivatives are torch autograd's, ties at clamps included. */
#include "algo/algo_int.h"

#include <stdlib.h>
#include <string.h>

#define K3_LOG_MAX 20. /* bound on ref - logp before exp */
#define K3_MAX 10.     /* bound on the estimate itself */

static double k1(double lp, double ref) { return lp - ref; }
static double dk1(double lp, double ref) {
    (void)lp;
    (void)ref;
    return 1;
}
static double kabs(double lp, double ref) { return fabs(lp - ref); }
static double dkabs(double lp, double ref) { return (lp > ref) - (lp < ref); }
static double k2(double lp, double ref) { return 0.5 * (lp - ref) * (lp - ref); }
static double dk2(double lp, double ref) { return lp - ref; }

static double k3(double lp, double ref) {
    const double x = algo__clamp(ref - lp, -K3_LOG_MAX, K3_LOG_MAX);
    return algo__clamp(exp(x) - x - 1, -K3_MAX, K3_MAX);
}
static double dk3(double lp, double ref) {
    const double x = ref - lp;
    if (fabs(x) >= K3_LOG_MAX || exp(x) - x - 1 >= K3_MAX) return 0; /* a clamp acts */
    return 1 - exp(x);
}

static const struct algo_kl_type kl_types[] = {
    {"kl", k1, dk1}, {"k1", k1, dk1},         {"abs", kabs, dkabs}, {"mse", k2, dk2},
    {"k2", k2, dk2}, {"low_var_kl", k3, dk3}, {"k3", k3, dk3},
};
enum { N_KL = sizeof kl_types / sizeof kl_types[0] };

int algo_kl_find(struct algo_kl_type *out, const char *name) {
    size_t n = strlen(name);
    const bool plus = n > 0 && name[n - 1] == '+';
    n -= plus;
    for (int i = 0; i < N_KL; i++) {
        if (strlen(kl_types[i].name) != n || memcmp(kl_types[i].name, name, n) != 0) continue;
        *out = kl_types[i];
        if (plus) out->dlogp = dk2; /* unbiased gradient, whatever the value estimates */
        return 0;
    }
    if (n == 4 && memcmp(name, "full", 4) == 0)
        FAIL(ERR_UNSUPPORTED, "KL type 'full' is unsupported: it needs the whole distribution of each token");
    FAIL(ERR_INVAL,
         "KL type '%s' is unknown; use kl, k1, abs, mse, k2, low_var_kl or k3, with '+' for the "
         "gradient of k2",
         name);
}

double algo_kl(const struct algo_kl_type *t, double logp, double ref_logp, double *dlogp) {
    *dlogp = t->dlogp(logp, ref_logp);
    return t->value(logp, ref_logp);
}
