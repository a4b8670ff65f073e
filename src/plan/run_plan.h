/* run_plan.h - what `verlc plan` asks for and gets: the memory plan of a run that is not started, and the device and the ranks that
 * it is made for. The plans themselves are the programs'.
 *
 * Invariant: it needs no GPU where the bytes of one are given. */
#ifndef VERLC_PLAN_RUN_PLAN_H
#define VERLC_PLAN_RUN_PLAN_H

#include "base/buf.h"
#include "ranks/rank_count.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct dev;

/* What is planned for, be it there or not; 0: what is. */
struct train_plan_args {
    int64_t gpu, host; /* bytes of a GPU, of a host's memory */
    int64_t gpus;      /* ranks, one a GPU; without it those that the keys ask for, of what is there where gpu is 0 */
};
struct run_plan {
    struct buf text; /* a table */
    json_t *json;    /* the same: total, limit, parts (track/run_db_schema.c has their form), fits, of several ranks "ranks" */
    bool fits;
};
void run_plan_free(struct run_plan *p);

/* For a plan: its device and its ranks. pools NULL: none. ERR_INVAL: GPUs of unknown size, since there is none. */
int run_plan_ranks(const struct conf *c, const struct trainer_config *k, const struct train_pool_devices *pools,
                   const struct train_plan_args *a, struct dev *dev, struct rank_placement *out);

#endif
