/* worker.h - the part of a run that has a device: its models, the decoder, the block that they use in turn.
 *
 * The one place where a stage reaches a device: each call names what is to be done, on which role, for which samples.
 * In one process a call is a function call; with several the same calls travel.
 * Knows nothing of data, text, rewards by rule, advantages or checkpoints' directories. */
#ifndef VERLC_TRAIN_PPO_WORKER_H
#define VERLC_TRAIN_PPO_WORKER_H

#include "ckpt/ckpt.h"
#include "rollout/rollout.h"
#include "train/ppo/memory_plan.h"
#include "train/run/phase_watchdog.h"
#include "train/run/update.h"

#include <verlc.h>

#define N_ROLES (VERLC_TEACHER + 1)

struct worker {
    struct ppo_config *k; /* borrowed */
    struct dev dev;
    struct memory_plan plan;
    json_t *plan_json;                 /* for run.db */
    struct tokenizer_files *tokenizer; /* of the policy, for checkpoints */
    void *block;                       /* shared by rollout, updates and the frozen models' passes */
    /* by role; NULL: a run without it. With an adapter the reference's model is the policy's, without a copy of its own */
    struct model *model[N_ROLES];
    struct trained_model *role[N_ROLES];
    struct rollout_decoder *decoder;
    struct rollout_engine *engine; /* of the generation under way */
    struct reward_model *rm;       /* NULL without one */
    struct judge_server *judge;    /* or this, and a scorer that asks it */
};

/* dev is open: sizes what k needs and prints it. ERR_NOMEM: it does not fit. */
int worker_plan(struct worker *w, struct ppo_config *k);
/* With a judge that is served: its address is known from here on, k->reward.router_address. */
int worker_listen(struct worker *w);
/* Opens all models as planned. tok: the policy's. */
int worker_open(struct worker *w, const struct tokenizer *tok);
void worker_close(struct worker *w); /* a zeroed one is fine */
/* The models of a checkpoint; how many. */
int worker_parts(struct worker *w, struct ckpt_part parts[2]);

/* ---- generation: between begin and end requests may be added at any time ---- */
int worker_generate_begin(struct worker *w, const struct rollout_config *c); /* its limits are the plan's */
int worker_generate_add(struct worker *w, const struct rollout_request *q);
int worker_generate_step(struct worker *w); /* 1: work remains */
struct rollout_stats worker_generate_stats(const struct worker *w);
void worker_generate_end(struct worker *w);

/* ---- passes and updates ---- */
/* Forward passes of a role over seqs[n]: log-probs, or the critic's values. ERR_SIGNAL between two pieces. */
int worker_forward(struct worker *w, enum verlc_role role, const struct progress *at, const struct packed_seq *seqs, int64_t n,
                   struct forward_out out);
/* u->model is the role's. r->flops as a share of the device's peak: MFU. */
int worker_update(struct worker *w, enum verlc_role role, struct update *u, struct update_result *r);

#endif
