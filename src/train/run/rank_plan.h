/* rank_plan.h - what a memory plan says of several ranks: how they share the work, and what one of them alone or another layout of
 * the weights would need.  Private to train. */
#ifndef VERLC_TRAIN_RUN_RANK_PLAN_H
#define VERLC_TRAIN_RUN_RANK_PLAN_H

#include "base/buf.h"

#include <jansson.h>
#include <stdint.h>

struct rank_plan {
    int64_t n, local; /* ranks, and those of a host */
    int64_t micro;    /* micro-batches of an optimizer step at full length */
    int64_t chunk;    /* consecutive ones that a rank computes in a wave */
    double uneven;    /* the largest shard over the mean, as a share of it */
    /* Bytes. The least that a rank needs with whole weights, as they are; that one rank alone needs; with the reference's weights
     * sharded; with all of them. 0: there is no such */
    size_t limit, least, one, ref, sharded;
};
/* Lines of the table; returns the same as an object, which the caller owns. */
json_t *rank_plan_print(const struct rank_plan *r, struct buf *out);

#endif
