/* generate.h - verl's main_generation, and its memory plan. */
#ifndef VERLC_GENERATE_H
#define VERLC_GENERATE_H

#include "conf/conf.h"
#include "plan/run_plan.h"

/* data.n_samples responses for each prompt of data.path, to data.output_path. */
int train_generate(const struct conf *c);
/* As train_plan_ppo. */
int train_plan_generate(const struct conf *c, const struct train_plan_args *a, struct train_plan *out);

#endif
