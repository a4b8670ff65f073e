/* micro_batch_balance.h - the micro-batches of dynamic batching (verl.utils.seqlen_balancing.rearrange_micro_batches). */
#ifndef VERLC_ALGO_MICRO_BATCH_BALANCE_H
#define VERLC_ALGO_MICRO_BATCH_BALANCE_H

#include <stdint.h>

/* Rows of len[i] tokens each, assigned by Karmarkar-Karp so that the micro-batches have about the same work and none
 * more than max_tokens. row (n): their numbers, one micro-batch after the other; end (n): where each of the n_micro ends
 * in row. ERR_INVAL: a row that alone is longer. */
int algo_micro_batches(const int64_t *len, int64_t n, int64_t max_tokens, int64_t *row, int64_t *end, int64_t *n_micro);

#endif
