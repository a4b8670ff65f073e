/* value_loss.h - the critic's clipped loss. */
#ifndef VERLC_ALGO_VALUE_LOSS_H
#define VERLC_ALGO_VALUE_LOSS_H

#include "algo/loss_aggregation.h"

struct algo_value_args {
    const struct algo_ragged *r;
    const double *vpreds, *values, *returns;
    double cliprange_value;
    struct algo_agg agg;
};
/* Metrics critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean. */
int algo_value_loss(const struct algo_value_args *a, double *loss, double *dvpreds, struct algo_metrics *m);

#endif
