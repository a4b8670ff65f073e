/* controller.h - the part of a ppo run that has no device: configuration, data, text, rewards, the run around the steps,
 * and the worker that it directs. */
#ifndef VERLC_PPO_CONTROLLER_H
#define VERLC_PPO_CONTROLLER_H

#include "algo/kl_controller.h"
#include "ppo/stages/stages.h"

#include <verlc.h>

struct controller {
    const struct ppo_config *k; /* owned */
    struct ppo_placement ranks;
    struct run run;
    struct agents *agents; /* of rows with several turns */
    struct tokenizer *tok;
    struct pool *threads; /* for text */
    struct chat_template *chat;
    struct rl_dataset *train_data, *val_data; /* val_data: NULL without */
    struct reward *reward;
    const char *rollout_dir, *validation_dir; /* where samples are written as JSONL; NULL: nowhere, or not any more */
    struct algo_kl_ctrl kl_ctrl;
    const struct batch *carry; /* samples that a later step trains, kept with each checkpoint; borrowed, NULL: none */
    json_t *async;             /* what fully_async.c keeps with a checkpoint; owned, NULL: nothing */
    struct batch carried;      /* those of the checkpoint that the run resumes from, until they are taken; n_cols 0: none */
    struct ppo_worker worker;
    struct external_engine *external; /* generates in the worker's place; NULL: the worker does */
    struct stage stage;               /* what the stages take */
    struct generation generation;
};
int controller_open(struct controller *c, const struct conf *conf); /* after a failure it may be closed all the same */
void controller_close(struct controller *c, int rc);                /* rc: how the run ended */
struct controller_rows {
    int64_t train, val;
};
/* Opens tokenizer and data as a run would, looks for the reward's file, and closes them: for a plan. rows: of the data, 0 where
 * they could not be read. */
int controller_try_data(const struct ppo_config *k, struct controller_rows *rows);

/* ---- the run as include/verlc.h has it (verlc_api.c) ---- */
struct verlc *verlc_open_conf(const struct conf *c); /* never NULL */
int verlc_end(struct verlc *v);                      /* closes; the code, with its message as the thread's */
bool verlc_resamples(const struct verlc *v);         /* algorithm.use_pf_ppo */
struct controller *verlc_controller(struct verlc *v);
struct batch *verlc_batch_data(struct verlc_batch *b);
/* fn as a stage of the step under this name in the timings. Its failure is the run's. */
int verlc_stage(struct verlc *v, const char *name, int (*fn)(void *arg, const struct stage *s, const struct generation *in),
                void *arg);

/* ---- ppo.c ---- */
/* One step; drawn: the resampled batch of algorithm.use_pf_ppo. */
int ppo_step(struct verlc *v, struct verlc_batch *b, struct verlc_batch *drawn);
/* The stages after the rollout, and the step's end. */
int ppo_update(struct verlc *v, struct verlc_batch *b, struct verlc_batch *drawn);

/* ---- one_step_off.c, fully_async.c: all steps of a run ---- */
void ppo_one_step_off(struct verlc *v);
void ppo_fully_async(struct verlc *v);
/* The steps of n_rows rows, where trainer.total_training_steps says nothing. batch: prompts of a step. */
int fully_async_steps(const struct ppo_async_config *a, const struct trainer_config *t, int64_t batch, int64_t n_rows,
                      int64_t *steps);

#endif
