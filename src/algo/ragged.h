/* ragged.h - what every algorithm reads and writes: arrays of samples x tokens without padding, their masks, and named
 * metrics.
 *
 * algo is pure functions: no models, devices, batches or files (algo/user excepted). Names, formulas and metrics are
 * verl's; a loss gives its value and its derivative by each input that a model produced. Arrays are double and so is the
 * arithmetic: a caller widens its fp32 log-probs, whose cost is negligible against a forward pass.
 *
 * Invariants: a token whose mask is 0 is never read (NaN there cannot leak), except by the row sums of rewards, which verl
 * takes over whole rows; a loss is linear in its tokens with weights fixed by the global mini-batch, so the losses of its
 * micro-batches sum to it (DESIGN 1, invariant 3). */
#ifndef VERLC_ALGO_RAGGED_H
#define VERLC_ALGO_RAGGED_H

#include <stdbool.h>
#include <stdint.h>

/* Samples x tokens without padding: sample i owns tokens [off[i], off[i + 1])
 * of every flat array.  off[0] need not be 0: a micro-batch is a range of the
 * mini-batch's offsets over the same arrays.  Borrowed for the call only. */
struct algo_ragged {
    int64_t n;           /* samples */
    const int64_t *off;  /* n + 1, not decreasing */
    const uint8_t *mask; /* response_mask: 1 for a token of the policy, else 0 */
};

/* ---- metrics, under verl's names ---- */
struct algo_metric {
    char name[80];
    double value;
};
struct algo_metrics { /* a zeroed struct is empty; every function below adds to it */
    struct algo_metric *v;
    int64_t n, cap;
};
void algo_metrics_set(struct algo_metrics *m, const char *name, double value); /* m may be NULL */
bool algo_metrics_get(const struct algo_metrics *m, const char *name, double *value);
void algo_metrics_free(struct algo_metrics *m);

/* ---- masked statistics over all tokens of a ragged array ---- */
int64_t algo_n_valid(const struct algo_ragged *r);
double algo_masked_mean(const struct algo_ragged *r, const double *x); /* 0 when nothing is valid */

struct buf;
/* ERR_INVAL: an unknown name of this kind; known: "a, b, c". Frees known. */
int algo_unknown(const char *kind, const char *name, struct buf *known);

#endif
