/* rank_plan.h - a memory plan's part about several ranks: how they share the work, which weights each has whole, and the memory
 * that one rank alone or another layout would need. */
#ifndef VERLC_PLAN_RANK_PLAN_H
#define VERLC_PLAN_RANK_PLAN_H

#include "train/micro_batch.h"

#include "base/buf.h"

#include <jansson.h>
#include <stdint.h>

/* trainer.layout: which of the weights that it computes with each of several ranks has whole. In the order of choice. */
enum weight_layout {
    LAYOUT_AUTO,
    LAYOUT_WHOLE,   /* all */
    LAYOUT_REF,     /* all but the reference's and a teacher's, which are sharded */
    LAYOUT_SHARDED, /* the policy's while it generates */
    LAYOUTS
};
const char *rank_plan_layout_name(enum weight_layout l);

struct rank_plan {
    int64_t n, local;  /* ranks, and those of a host */
    int64_t micro;     /* micro-batches of an optimizer step at full length */
    int64_t chunk;     /* consecutive ones that a rank computes in a wave */
    int64_t context;   /* ranks that compute a micro-batch together, each a part of its rows; 0, 1: each its own */
    int64_t key_heads; /* of its attention, whole on one of these ranks; 0: rows are, of latent attention */
    int64_t parts;     /* that it is cut into, where they are more than those ranks */
    double uneven;     /* the largest shard over the mean, as a share of it */
    enum weight_layout layout;
    const char *why;          /* it, for people; NULL: there is no choice */
    int64_t together;         /* ranks that generate together, each with its part of the layers' matrices; 1: each alone; 0: none */
    bool experts;             /* and of its experts */
    const char *why_together; /* that, for people; NULL: there is no choice */
    int64_t expert_ranks;     /* of updates, each with its experts of every layer; 0, 1: none */
    const char *why_experts;  /* that, for people; NULL: there is no choice */
    /* Bytes. The least that a rank needs in each layout, that one rank alone needs; 0: there is no such */
    size_t limit, least[LAYOUTS], one;
};
/* Micro-batches of so many samples of the full length, where one has at most max_rows tokens. */
int64_t rank_plan_micro_batches(struct micro_batch_limits cut, int64_t max_rows, int64_t longest, int64_t samples);
/* Lines of the table; returns the same as an object, which the caller owns. */
json_t *rank_plan_print(const struct rank_plan *r, struct buf *out);

#endif
