/* value_loss.c - the critic's clipped loss (verl compute_value_loss).
 * Invariant: its derivative is torch autograd's, ties at the clip included. */
#include "algo/value_loss.h"

#include "algo/algo_int.h"

/* Of max(min(v, hi), lo), by v, with v's share at ties. */
static double clip_derivative(double v, double lo, double hi) {
    const double upper = v < hi ? 1 : v == hi ? 0.5 : 0, x = v < hi ? v : hi;
    return x > lo ? upper : x == lo ? upper / 2 : 0;
}

int algo_value_loss(const struct algo_value_args *a, double *loss, double *dvpreds, struct algo_metrics *m) {
    const struct algo_ragged *r = a->r;
    TRY(algo_agg_weights(r, &a->agg, dvpreds));
    double s = 0, clipped = 0, sum = 0;
    ALGO__EACH_VALID(r, i, t) {
        const double v = a->vpreds[t], lo = a->values[t] - a->cliprange_value, hi = a->values[t] + a->cliprange_value;
        const double vc = fmax(fmin(v, hi), lo), e1 = v - a->returns[t], e2 = vc - a->returns[t];
        const double l1 = e1 * e1, l2 = e2 * e2;
        const double d1 = 2 * e1, d2 = 2 * e2 * clip_derivative(v, lo, hi);
        s += dvpreds[t] * (l1 > l2 ? l1 : l2);
        dvpreds[t] *= 0.5 * (l1 > l2 ? d1 : l1 < l2 ? d2 : (d1 + d2) / 2);
        clipped += l2 > l1;
        sum += v;
    }
    *loss = 0.5 * s;
    const int64_t valid = algo_n_valid(r);
    const double n = (double)valid + ALGO__EPS;
    algo_metrics_set(m, "critic/vf_loss", *loss);
    algo_metrics_set(m, "critic/vf_clipfrac", clipped / n);
    algo_metrics_set(m, "critic/vpred_mean", sum / n);
    if (valid == 0) algo_metrics_set(m, "critic/no_valid_tokens", 1);
    return 0;
}
