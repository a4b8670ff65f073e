/* ppo.h - the program `verlc ppo`, and its memory plan for `verlc plan`. */
#ifndef VERLC_PPO_H
#define VERLC_PPO_H

#include "conf/conf.h"
#include "plan/run_plan.h"

/* Runs the trainer of a resolved configuration to its end. 0; ERR_SIGNAL after
 * SIGINT, SIGTERM or SIGHUP with the state saved (phase_stop_signal says which). */
int ppo_train(const struct conf *c);
/* The memory plan of a run, of one of its ranks, with sequences of the full length. Reads config.json of the model, no weights. */
int ppo_plan(const struct conf *c, const struct train_plan_args *a, struct run_plan *out);

#endif
