/* resource_pools.h - resource pools (verl's ResourcePoolManager): which ranks of a run do which part of its work.
 *
 * A pool is consecutive ranks. A part without ranks of its own is done by the trainer's; scores of a reward model, by those that
 * generate. Knows nothing of how it is done.
 * Invariant: no result but a fully asynchronous schedule depends on the pools. */
#ifndef VERLC_PPO_WORKER_RESOURCE_POOLS_H
#define VERLC_PPO_WORKER_RESOURCE_POOLS_H

#include "ranks/rank_count.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* Also the parts of the work. The first two are neighbours, since weights go from one to the other. */
enum ppo_pool { PPO_TRAIN, PPO_ROLLOUT, PPO_CRITIC, PPO_TEACHER, PPO_REWARD, PPO_POOLS };

/* What keys request; ranks: on a CPU. 0: no pool. */
struct ppo_pool_keys {
    bool enable; /* reward.reward_model.enable_resource_pool */
    int64_t nnodes, n_gpus_per_node, ranks;
};
struct ppo_pools {
    int64_t n[PPO_POOLS]; /* ranks of each; but the trainer's 0: it has none of its own */
};
/* What a run or a plan finds out of its ranks, once its configuration is read. */
struct ppo_placement {
    struct rank_placement all; /* of all pools */
    struct ppo_pools pools;
    enum ppo_pool pool; /* of this process, or that is planned; the trainer's in a run of one */
};
const char *ppo_pool_name(enum ppo_pool pool); /* "train" */
/* The ranks that do this part of the work. */
enum ppo_pool ppo_pool_of(const struct ppo_pools *p, enum ppo_pool part);
int64_t ppo_pool_first(const struct ppo_pools *p, enum ppo_pool pool); /* its first rank */
int64_t ppo_pool_ranks(const struct ppo_pools *p);                     /* of all */
json_t *ppo_pools_json(const struct ppo_pools *p);
/* Whether this process does that part of the work. */
static inline bool ppo_does(const struct ppo_placement *p, enum ppo_pool part) { return ppo_pool_of(&p->pools, part) == p->pool; }
int ppo_pools_read(struct ppo_pools *p, const json_t *list, int64_t ranks); /* ERR_FORMAT: not as many ranks */

#endif
