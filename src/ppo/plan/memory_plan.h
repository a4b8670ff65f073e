/* memory_plan.h - the memory of a run before it starts: what every block takes, what updates recompute, how many KV blocks
 * there are; refused with the nearest change that fits. */
#ifndef VERLC_PPO_PLAN_MEMORY_PLAN_H
#define VERLC_PPO_PLAN_MEMORY_PLAN_H

#include "model/forward.h"
#include "plan/model_memory.h"
#include "ppo/config.h"
#include "reward_model/judge_server.h"
#include "reward_model/reward_model.h"
#include "train/perf_metrics.h"
#include "train/trained_model.h"

/* The shapes of a run's models; json is NULL of those that it does not have. */
struct memory_plan_shapes {
    struct model_config policy, critic, teacher;
};
int memory_plan_shapes_load(struct memory_plan_shapes *s, const struct ppo_worker_config *k); /* reads config.json files alone */
void memory_plan_shapes_free(struct memory_plan_shapes *s);

struct memory_plan {
    struct model_memory policy;
    size_t ref, teacher, critic, rm;                             /* bytes; critic: weights, master and moments */
    size_t critic_grads, critic_chunk;                           /* of critic_pass, as policy.grads and policy.chunk of update */
    size_t offload, host_limit;                                  /* bytes offloaded to host memory, and the limit of those */
    size_t rollout, update, ref_pass, teacher_pass, critic_pass; /* share one block */
    size_t gathered;                                             /* of rollout: the policy's weights, where they are sharded */
    size_t split_room; /* of ranks that generate together: of the passes that begin a generation; the decoder has it afterwards */
    int64_t tensor_parallel; /* ranks that generate together, each with its part of the layers (tensor_parallel.h); 1: each alone */
    struct model_dispatch_shape experts; /* of the policy's layers on ranks (expert_dispatch.h); ranks 0: each has all it reads */
    char why_experts[160];               /* that; "": there is no choice */
    size_t split_at;                     /* of such ranks: where in the block gathered begins, behind the decoder; 0: in front */
    char why_split[160];                 /* that number; "": there is no choice */
    int64_t pool_together; /* the same of ranks that only generate, in the plans of those that send them weights too; 1, 0 */
    size_t block, working, system, host, total, limit; /* working: the backend's; system: the driver's */
    size_t copy;                                       /* host memory for asynchronous checkpoints; 0: they are synchronous */
    size_t batch, validation, host_all; /* samples of a step, of a validation; host_all: as host, on a GPU too, where host is 0 */
    size_t controller;                  /* with several ranks, the host memory of the process without one; else 0 */
    /* With as little kept as the keys allow, and one sample generated at a time: those of the block, the total. */
    size_t least_passes, least_rollout, least;
    struct dev_sizes sizes;              /* of what the backend takes */
    struct model_keep keep, critic_keep; /* of the updates' activations; chosen where ppo_config leaves it to the plan */
    int64_t parts, critic_parts;         /* of a micro-batch (context_parallel.h); keep says whether ranks share them */
    int teacher_context;                 /* ranks that share the rows of its passes; 0: none. Of the reference's as of keep */
    int64_t n_train_critic;              /* elements of the critic's adapter with its head; 0: none */
    int64_t n_kv_blocks, max_seqs, max_rows_roll, max_rows_update, max_seqs_update, max_rows_ref, max_seqs_ref, max_rows_critic,
        max_seqs_critic, max_rows_teacher, max_seqs_teacher, max_len;
    struct reward_model_args rm_args; /* its sizes */
    int64_t rm_together;              /* ranks that have it together; 1: each has it whole; 0: it is not here */
    char why_rm[160];                 /* that number; "": there is no choice */
    enum weight_layout layout;        /* of several ranks; one has all weights whole */
    struct model_flops flops;         /* the policy's, for MFU */
    char why[160];                    /* that one; "": there is no choice */
};
/* Where the weights are that a pass of the reference reads, of a teacher, a critic, or of the policy; generation has the policy's
 * in the block's first memory_plan.gathered bytes where they are sharded; or its part of them from split_at on. */
enum model_stream_from memory_plan_ref_from(const struct memory_plan *p, const struct ppo_worker_config *k);
enum model_stream_from memory_plan_teacher_from(const struct memory_plan *p, const struct ppo_worker_config *k);
enum model_stream_from memory_plan_critic_from(const struct memory_plan *p, const struct ppo_worker_config *k);
/* Tokens that the MTP layer drafts at a time; 0: none. */
int64_t memory_plan_draft(const struct memory_plan *p, const struct ppo_worker_config *k);
enum model_stream_from memory_plan_policy_from(const struct memory_plan *p);
/* Where the experts are that a pass of the reference reads. */
struct model_dispatch_shape memory_plan_ref_experts(const struct memory_plan *p, const struct ppo_worker_config *k);
/* Turns offload off where the device's memory is the host's, with a note. Before the plan. */
void memory_plan_offload(struct ppo_worker_config *k, const struct dev *dev);
/* Sizes everything that a rank of k->ranks.pool allocates. Limits are a rank's share of what a host has.
 * The layout is k's, or the first that fits; where none does, the last. A layout that the run cannot have is replaced by the one
 * before it. */
int memory_plan_make(struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s, struct dev *dev);
/* ERR_NOMEM with the nearest change that fits when it does not. */
int memory_plan_check(const struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                      struct dev *dev);
/* The same once the rows of the validation data are counted. ERR_NOMEM: their samples do not fit. */
int memory_plan_validation(const struct memory_plan *p, const struct ppo_worker_config *k, const struct dev *dev, int64_t rows);
/* The table, appended; returns the same as an object, which the caller owns (run_db_schema.c has its form). Of several ranks with
 * "ranks": how they share the work, and what one rank or another layout of the weights would need. */
json_t *memory_plan_print(const struct memory_plan *p, const struct ppo_worker_config *k, const struct memory_plan_shapes *s,
                          struct dev *dev, struct buf *out);
/* ---- disk_rows.c ---- */
/* disk_plan_check of the run: its models, samples and records. */
int ppo_disk_check(const struct ppo_worker_config *k, struct run *r, int64_t val_rows);
/* steps: 0: not known. NULL: the plan is not. */
json_t *ppo_disk_print(const struct ppo_worker_config *k, int64_t steps, int64_t val_rows, struct buf *out);

/* Tokens of the teacher's lists; 0: it has none. */
int64_t memory_plan_distill_list(const struct ppo_distill_config *k);

#endif
