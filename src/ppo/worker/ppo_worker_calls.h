/* ppo_worker_calls.h - a rank of a ppo run: its own calls in addition to worker_calls.h's. */
#ifndef VERLC_PPO_WORKER_PPO_WORKER_CALLS_H
#define VERLC_PPO_WORKER_PPO_WORKER_CALLS_H

#include "conf/conf.h"
#include "ranks/start_workers.h"

extern const struct worker_process_service ppo_worker_services[]; /* they end with a name NULL */
/* A process that is a rank of somebody else's run: serves until the group ends. */
int ppo_worker_serve(const struct conf *c, const struct launch *l);

#endif
