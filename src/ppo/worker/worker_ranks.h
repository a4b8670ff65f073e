/* worker_ranks.h - the ranks of a run, from its controller: worker.h's calls to the processes that have the devices.
 *
 * Generation and forward passes are dispatched in parts (dispatch.h). An update runs on all ranks with the whole batch, and
 * each ends with the same weights. The workers' side is ppo_worker_calls.c.
 * Invariant: results do not depend on the number of ranks, nor on which rank did what; what all ranks computed is compared. */
#ifndef VERLC_PPO_WORKER_RANKS_H
#define VERLC_PPO_WORKER_RANKS_H

#include "ppo/stages/stages.h"
#include "ranks/dispatch.h"

struct worker_group;

/* Starts the workers, or under a launcher waits for them: they read the controller's configuration, open their devices and plan.
 * w->plan_json, plan_text and the plan's numbers are rank 0's then. run: borrowed. */
int worker_group_open(struct worker *w, struct ppo_config *k, int ranks, struct run *run);
/* ok: the run has ended well; else the processes are killed. NULL ok. */
void worker_group_close(struct worker_group *g, bool ok);
int worker_group_size(const struct worker_group *g);
/* The ranks' device, for people; borrowed. *own_memory: it is not the host's. */
const char *worker_group_device(const struct worker_group *g, bool *own_memory);

/* Opens the models. validation_rows 0: there are none. */
int worker_group_models(struct worker_group *g, int64_t total_steps, int64_t validation_rows);
bool worker_group_has(const struct worker_group *g, enum verlc_role role);
bool worker_group_collective(const struct worker_group *g, enum verlc_role role); /* worker_collective */

int worker_group_send_weights(struct worker_group *g); /* worker_send_weights */
/* What is called while the trainer's ranks are waited for; NULL: nothing any more. */
void worker_group_beside(struct worker_group *g, int (*step)(void *arg), void *arg);

/* ---- as worker_generate_begin to worker_generate_end ---- */
int worker_group_generate_begin(struct worker_group *g, const struct rollout_config *c);
int worker_group_generate_add(struct worker_group *g, const struct rollout_request *q);
int worker_group_generate_interrupt(struct worker_group *g);
int worker_group_generate_step(struct worker_group *g, bool wait); /* 1: work remains. wait: briefly, for samples */
struct rollout_stats worker_group_generate_stats(const struct worker_group *g);
void worker_group_generate_end(struct worker_group *g);

/* ---- as worker_spare_open to worker_spare_close ---- */
int worker_group_spare_open(struct worker_group *g, const enum verlc_role *roles, int n,
                            int (*done)(void *arg, int pass, int64_t tag, const float *x, int64_t n), void *arg);
void worker_group_spare_add(struct worker_group *g, const int32_t *prompt, int64_t n_prompt, const int32_t *response, int64_t n,
                            int64_t tag);
void worker_group_spare_close(struct worker_group *g);

/* ---- worker_reward_model.c: the reward model of each rank; a judge that is served is rank 0's ---- */
struct worker_scores;
/* alone: d's ranks do nothing else. */
int worker_scores_open(struct worker_scores **out, const struct ppo_config *k, struct rank_dealing *d, bool alone);
void worker_scores_close(struct worker_scores *s); /* NULL ok */
struct worker_scores *worker_group_scores(const struct worker_group *g);
int worker_scores_submit(struct worker_scores *s, const struct reward_model_sample *x, int64_t tag);
int worker_scores_step(struct worker_scores *s, bool flush); /* 1: a judge that is served has more to do */
int worker_scores_poll(struct worker_scores *s, int64_t *tag, struct reward_result *out);
int64_t worker_scores_pending(const struct worker_scores *s);
void worker_scores_rest(struct worker_scores *s); /* no call is under way on ranks that do nothing else, until the next step */
void worker_scores_drop(struct worker_scores *s);
/* A rank's side of the call "score". */
int worker_scores_answer(struct worker *w, const struct comm_call *call, struct ctl_result *out);

struct worker_group_pass {
    enum verlc_role role;
    const struct progress *at;
    const struct packed_seq *seqs;
    int64_t n, k; /* sequences; tokens of a list */
};
/* As worker_forward. */
int worker_group_forward(struct worker_group *g, const struct worker_group_pass *p, struct forward_out out);
/* ppo_update_actor or ppo_update_critic on all ranks of theirs. A critic's own ranks still run when it returns. */
int worker_group_update(struct worker_group *g, enum verlc_role role, const struct stage *s, struct batch *b);
int worker_group_join(struct worker_group *g); /* worker_join */
/* The ranks' state in checkpoints, which rank 0 writes. */
void worker_group_checkpoints(struct worker_group *g, struct checkpoints *out);
int worker_group_trace(struct worker_group *g, const char *path); /* worker_trace */
int worker_group_memory_metrics(struct worker_group *g, struct metrics *m, const char *prefix);

#endif
