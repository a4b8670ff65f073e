/* loss_aggregation.h - loss_agg_mode: a loss per token -> one number. */
#ifndef VERLC_ALGO_LOSS_AGGREGATION_H
#define VERLC_ALGO_LOSS_AGGREGATION_H

#include "algo/ragged.h"

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

#endif
