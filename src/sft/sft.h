/* sft.h - the program `verlc sft`, and for `verlc plan` its memory plan and its time. */
#ifndef VERLC_SFT_H
#define VERLC_SFT_H

#include "supervised/supervised.h"

/* As those of ppo/ppo.h. */
int sft_train(const struct conf *c);
int sft_plan(const struct conf *c, const struct train_plan_args *a, struct run_plan *out);

/* As those of ppo/plan/probed_steps.h. */
int sft_probe(const struct conf *c, bool whole, struct time_probe *out);
int sft_choices(const struct conf *c, bool own_memory, struct buf *out);

extern const struct supervised_program sft_program;
extern const struct worker_process_service sft_services[]; /* a rank's first call; they end with a name NULL */

#endif
