/* controller.h - the part of a ppo run that has no device: configuration, data, text, rewards, the run around the steps,
 * and the worker that it directs.  Private to train. */
#ifndef VERLC_TRAIN_PPO_CONTROLLER_H
#define VERLC_TRAIN_PPO_CONTROLLER_H

#include "algo/kl_controller.h"
#include "train/ppo/stages.h"

#include <verlc.h>

struct controller {
    struct ppo_config k;
    struct run run;
    struct tokenizer *tok;
    struct chat_template *chat;
    struct rl_dataset *train_data, *val_data; /* val_data: NULL without */
    struct reward *reward;
    struct algo_kl_ctrl kl_ctrl;
    struct worker worker;
};
int controller_open(struct controller *c, const struct conf *conf); /* after a failure it may be closed all the same */
void controller_close(struct controller *c, int rc);                /* rc: how the run ended */
/* Opens tokenizer and data as a run would, looks for the reward's file, and closes them: for a plan. */
int controller_try_data(const struct ppo_config *k);
struct stage controller_stage(struct controller *c);
struct generation controller_generation(const struct controller *c);
int controller_validate(void *controller); /* into the run's metrics */

/* ---- the run as include/verlc.h has it (verlc_api.c) ---- */
struct verlc *verlc_open_conf(const struct conf *c); /* never NULL */
int verlc_end(struct verlc *v);                      /* closes; the code, with its message as the thread's */
bool verlc_resamples(const struct verlc *v);         /* algorithm.use_pf_ppo */
struct controller *verlc_controller(struct verlc *v);

/* ---- ppo.c ---- */
/* One step; drawn: of algorithm.use_pf_ppo. */
int ppo_step(struct verlc *v, struct verlc_batch *b, struct verlc_batch *drawn);

#endif
