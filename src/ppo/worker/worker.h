/* worker.h - what a ppo run has on devices: its models, the decoder, the block that they use in turn; and what scores samples by a
 * model.
 *
 * A stage reaches a device by the operations of struct worker (ranks/worker.h), on roles by enum verlc_role, and by those of
 * struct ppo_scorer. Here is how they are opened: in this process, which may be a rank, or (worker_ranks.c) on ranks.
 * Knows nothing of data, text, rewards by rule, advantages or checkpoints' directories. */
#ifndef VERLC_PPO_WORKER_H
#define VERLC_PPO_WORKER_H

#include "ppo/plan/memory_plan.h"
#include "ppo/worker/reward_model_ranks.h"
#include "ranks/worker.h"

#include <verlc.h>

#define N_ROLES (VERLC_TEACHER + 1)

/* ---- the worker ---- */
struct ppo_worker {
    struct worker base;         /* first */
    struct ppo_worker_config k; /* set before the plan */
    struct ppo_scorer scorer;
    bool embedded;           /* in a user's program, which a rank's process runs too */
    bool ok;                 /* its ranks may end by themselves: the run has not failed */
    struct ppo_ranks *ranks; /* of a run with several, in its controller, which has no device; else NULL */
    struct memory_plan plan;
    json_t *plan_json;         /* for run.db */
    char *plan_text;           /* for people */
    const char *judge_address; /* where the judge is that this run serves, after the plan; NULL: none, or elsewhere */
    /* ---- in this process ---- */
    struct comm *senders;              /* where ranks of their own generate: to those and the trainer's; borrowed; else NULL */
    struct collective *devices;        /* with base.comm: the ranks' devices */
    struct weight_sync *weights;       /* with senders: the policy's from the trainer's ranks to those that generate */
    struct comm *together;             /* the ranks that generate with this one; NULL: it generates alone. Owned */
    struct collective *splits;         /* their devices */
    struct model *split;               /* the policy, split over them */
    struct tokenizer_files *tokenizer; /* of the policy, for checkpoints */
    void *block;                       /* shared by rollout, updates and the frozen models' passes */
    struct model *model[N_ROLES];      /* with an adapter the reference's is the policy's: NULL */
    struct reward_model *rm;           /* NULL without one */
    struct judge_server *judge;        /* or this, and a scorer that calls it */
};
static inline const struct ppo_worker_config *ppo_worker_slices(const struct worker *w) {
    return &((const struct ppo_worker *)w)->k;
}
/* base.dev and base.comm are there: sizes what w->k needs; a judge that is served listens from here on. ERR_NOMEM: it does not
 * fit. */
int ppo_worker_plan(struct ppo_worker *w);
/* Opens all models as planned. tok: the policy's; total_steps: of the run; validation_rows 0: there are none. */
int ppo_worker_open(struct ppo_worker *w, const struct tokenizer *tok, int64_t total_steps, int64_t validation_rows);
void ppo_worker_close(struct ppo_worker *w); /* a zeroed one is fine */

/* ---- on ranks: worker_ranks.c ---- */
/* Starts the workers, or under a launcher waits for them: they read the controller's configuration, open their devices and plan.
 * w->plan_json, plan_text and the plan's numbers are rank 0's then. run: borrowed. */
int ppo_ranks_plan(struct ppo_worker *w, struct run *run);
int ppo_ranks_open(struct ppo_worker *w, int64_t total_steps, int64_t validation_rows);
void ppo_ranks_close(struct ppo_ranks *r, bool ok); /* NULL ok */

#endif
