/* worker.h - the part of a run that has a device: its models, the decoder, the block that they use in turn.
 *
 * The one place where a stage reaches a device: each call names what is to be done, on which role, for which samples.
 * In one process a call is a function call; with several ranks the same calls travel to their processes (worker_ranks.h).
 * Knows nothing of data, text, rewards by rule, advantages or checkpoints' directories. */
#ifndef VERLC_PPO_WORKER_H
#define VERLC_PPO_WORKER_H

#include "engine/rollout.h"
#include "ppo/plan/memory_plan.h"
#include "run/checkpoints.h"
#include "run/phase_watchdog.h"
#include "train/update.h"

#include <verlc.h>

#define N_ROLES (VERLC_TEACHER + 1)

struct worker {
    struct ppo_config *k;       /* borrowed */
    struct worker_group *group; /* the ranks of a run with several, in its controller, which has no device; else NULL */
    bool embedded;              /* in a user's program, which a rank's process runs too */
    bool ok;                    /* its group may end by itself: the run has not failed */
    struct comm *comm;          /* of such a rank, to the others of its pool; borrowed; else NULL */
    struct comm *senders;       /* where ranks of their own generate: to those and the trainer's; borrowed; else NULL */
    struct dev dev;
    struct dev_group *devices;    /* with comm: the ranks' devices */
    struct rank_weights *weights; /* with senders: the policy's from the trainer's ranks to those that generate */
    struct memory_plan plan;
    json_t *plan_json;                 /* for run.db */
    char *plan_text;                   /* for people */
    const struct tokenizer *tok;       /* the policy's, from worker_open on; borrowed */
    struct tokenizer_files *tokenizer; /* of the policy, for checkpoints */
    void *block;                       /* shared by rollout, updates and the frozen models' passes */
    /* by role; NULL: a run without it. With an adapter the reference's model is the policy's, without a copy of its own */
    struct model *model[N_ROLES];
    struct trained_model *role[N_ROLES];
    struct rollout_decoder *decoder;
    struct rollout_engine *engine; /* of the generation under way */
    struct reward_model *rm;       /* NULL without one */
    struct judge_server *judge;    /* or this, and a scorer that calls it */
};

/* dev is open: sizes what k needs. ERR_NOMEM: it does not fit. */
int worker_plan(struct worker *w, struct ppo_config *k);
/* With a judge that is served: its address is known from here on, k->reward.router_address. */
int worker_listen(struct worker *w);
/* Opens all models as planned. tok: the policy's. */
int worker_open(struct worker *w, const struct tokenizer *tok);
void worker_close(struct worker *w); /* a zeroed one is fine */
/* Begins a trace of the device, or with a path ends it and writes it there; of several ranks each its own, with _rank_N in the
 * names of those after the first. */
int worker_trace(struct worker *w, const char *path);
/* Its models' state in checkpoints; closed before the worker. */
void worker_checkpoints(struct worker *w, struct checkpoints *out);
int worker_ranks(const struct worker *w); /* of the run */
bool worker_has(const struct worker *w, enum verlc_role role);
/* Its weights are sharded: a pass is all ranks' common work (trained_model_end). */
bool worker_collective(const struct worker *w, enum verlc_role role);
/* What the models are on, and whether it has memory of its own. */
const char *worker_device(const struct worker *w, bool *own_memory);
/* train_memory_metrics of the device; of several ranks the largest. */
int worker_memory_metrics(struct worker *w, struct metrics *m, const char *prefix, struct dev_memory *before);

/* Before a generation: those that generate get the trainer's weights of now, unless they are the same ranks or have them. */
int worker_send_weights(struct worker *w);
/* Whether generation is disaggregated: on ranks of its own, overlapped with passes and updates. */
bool worker_generates_apart(const struct worker *w);

/* What is called again and again while the trainer's ranks are waited for, where others generate; NULL: nothing. Its error is the
 * wait's. */
void worker_beside(struct worker *w, int (*step)(void *arg), void *arg);

/* ---- generation: between begin and end requests may be added at any time ---- */
int worker_generate_begin(struct worker *w, const struct rollout_config *c); /* its limits are the plan's */
int worker_generate_add(struct worker *w, const struct rollout_request *q);  /* its end tokens are the model's */
int worker_generate_step(struct worker *w, bool wait);                       /* 1: work remains. wait: for ranks, briefly */
int worker_generate_interrupt(struct worker *w); /* rollout_interrupt; in a process of its own, not with several ranks */
struct rollout_stats worker_generate_stats(const struct worker *w);
void worker_generate_end(struct worker *w);

/* ---- passes over finished samples by idle ranks, which have nothing left to generate; with one rank nothing ---- */
/* Of these roles, n <= 2; after begin. done: as rank_spare_open's. */
int worker_spare_open(struct worker *w, const enum verlc_role *roles, int n,
                      int (*done)(void *arg, int pass, int64_t tag, const float *x, int64_t n), void *arg);
void worker_spare_add(struct worker *w, const int32_t *prompt, int64_t n_prompt, const int32_t *response, int64_t n, int64_t tag);
void worker_spare_close(struct worker *w); /* after end */

/* ---- scores of finished samples by a model, during generation ---- */
/* The reward model's, as reward_model.h has them; without one there is never anything pending. */
bool worker_scores(const struct worker *w); /* whether the run has a reward model; a judge that is served is none */
int worker_score_submit(struct worker *w, const struct reward_model_sample *s, int64_t tag);
/* What it does now, or a judge that is served. 1: it did something. */
int worker_score_step(struct worker *w, bool flush);
int worker_score_poll(struct worker *w, int64_t *tag, struct reward_result *out);
int64_t worker_score_pending(const struct worker *w);
bool worker_has_judge(const struct worker *w); /* a scorer may wait for worker_score_step */
void worker_score_drop(struct worker *w);

/* ---- passes and updates ---- */
/* Forward passes of a role over seqs[n]: log-probs, or the critic's values. ERR_SIGNAL between two pieces. */
int worker_forward(struct worker *w, enum verlc_role role, const struct progress *at, const struct packed_seq *seqs, int64_t n,
                   struct forward_out out);
/* MFU of a forward pass of the policy over seqs[n] that took so long; 0: the device's peak is not known. */
double worker_forward_mfu(const struct worker *w, const struct packed_seq *seqs, int64_t n, double seconds);
/* u->model is the role's. r->flops as a share of the device's peak: MFU. */
int worker_update(struct worker *w, enum verlc_role role, struct update *u, struct update_result *r);
/* Waits for an update of the critic on ranks of its own, and takes its metrics. */
int worker_join(struct worker *w);

#endif
