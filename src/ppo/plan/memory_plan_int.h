/* memory_plan_int.h - for the memory plan's files: memory_plan.c sizes, memory_plan_layout.c chooses,
 * memory_plan_print.c shows, memory_plan_refuse.c refuses. */
#ifndef VERLC_PPO_PLAN_MEMORY_PLAN_INT_H
#define VERLC_PPO_PLAN_MEMORY_PLAN_INT_H

#include "plan/rank_plan.h"
#include "ppo/plan/memory_plan.h"

/* Bytes of the block for an update that keeps so many activations. */
size_t plan_update_bytes(const struct memory_plan *p, const struct ppo_worker_config *k, const struct model_config *m,
                         struct dev *dev, struct model_keep keep);
size_t plan_fixed_bytes(const struct memory_plan *p); /* all but the block */
/* Host memory of the samples of a validation of so many rows. */
size_t plan_validation_bytes(const struct ppo_worker_config *k, int64_t rows);
/* A rank's share of what a host has. */
size_t plan_rank_share(const struct ppo_worker_config *k, const struct memory_plan *p, size_t all);
/* How the ranks share the policy. */
struct split {
    enum weight_layout layout;
    int64_t tensor_parallel;
    bool experts; /* updates have them on ranks */
};
/* The plan with this split. */
int plan_layout(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev,
                struct split split);
/* Ranks of a pool that only generates that do so together: as many as a key says, as the ranks that train have to know it too. */
int64_t plan_pool_together(const struct ppo_worker_config *k, const struct memory_plan_shapes *s);
bool plan_has_ref(const struct ppo_worker_config *k); /* a reference with weights of its own */
bool plan_fits_limits(const struct memory_plan *p);
struct rank_plan plan_ranks(const struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                            struct dev *dev);

#endif
