/* micro_batch_balance.h - rows assigned to micro-batches of about the same work: those of an update, and verl's of dynamic
 * batching (verl.utils.seqlen_balancing.rearrange_micro_batches). */
#ifndef VERLC_ALGO_MICRO_BATCH_BALANCE_H
#define VERLC_ALGO_MICRO_BATCH_BALANCE_H

#include <stdint.h>

/* Rows of len[i] tokens each. row (n): their numbers, one micro-batch after the other, those of one ascending; end (n): where
 * each of the n_micro ends in row. ERR_INVAL: a row that alone is longer than max_tokens. */
int algo_micro_batches(const int64_t *len, int64_t n, int64_t max_tokens, int64_t *row, int64_t *end, int64_t *n_micro);

struct algo_update_rows {
    const int64_t *len; /* (n): tokens of each row */
    int64_t n, max_rows, max_tokens;
};
/* The micro-batches of an update: at most max_rows rows or max_tokens tokens each (one of them is 0: no limit), and as many as
 * that takes, rounded up to a power of two, above 8 to a multiple of 8, so that 2, 4 or 8 ranks share them evenly; never more
 * than rows. The one with the most work is first. A function of the lengths alone. */
int algo_update_micro_batches(const struct algo_update_rows *u, int64_t *row, int64_t *end, int64_t *n_micro);
/* How many those are of so many rows of one length, of which `each` are within the limits. */
int64_t algo_update_micro_batch_count(int64_t rows, int64_t each);

#endif
