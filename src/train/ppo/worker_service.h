/* worker_service.h - a rank of a ppo run: its own calls in addition to rank_service.h's.  Private to train and cmd. */
#ifndef VERLC_TRAIN_PPO_WORKER_SERVICE_H
#define VERLC_TRAIN_PPO_WORKER_SERVICE_H

#include "conf/conf.h"
#include "ctl/ctl.h"

extern const struct ctl_service ppo_worker_services[]; /* they end with a name NULL */
/* A process that is a rank of somebody else's run: serves until the group ends. */
int ppo_worker_serve(const struct conf *c, const struct launch *l);

#endif
