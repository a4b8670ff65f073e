/* probed_steps.h - the time of a ppo run before it starts, for `verlc plan --probe`. */
#ifndef VERLC_PPO_PLAN_PROBED_STEPS_H
#define VERLC_PPO_PLAN_PROBED_STEPS_H

#include "base/buf.h"
#include "conf/conf.h"

struct time_probe;
/* A few real steps of such a run in its own directory (trainer.default_local_dir), which the caller removes, and what they took
 * (plan/time_probe.h). whole: with a step at full length, a validation pass and a checkpoint. */
int ppo_probe(const struct conf *c, bool whole, struct time_probe *out);
/* Changes of keys whose time a probe cannot know but by trying, as overrides, one a line, appended to out. own_memory: the
 * device has memory of its own. */
int ppo_choices(const struct conf *c, bool own_memory, struct buf *out);

#endif
