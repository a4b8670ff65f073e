/* generate.h - verl's main_generation, and its memory plan. */
#ifndef VERLC_GENERATE_H
#define VERLC_GENERATE_H

#include "conf/conf.h"
#include "plan/run_plan.h"

/* data.n_samples responses for each prompt of data.path, to data.output_path. */
int generate_run(const struct conf *c);
/* As ppo_plan. */
int generate_plan(const struct conf *c, const struct train_plan_args *a, struct run_plan *out);

#endif
