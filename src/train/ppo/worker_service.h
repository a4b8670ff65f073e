/* worker_service.h - a rank of a ppo run: its own calls in addition to rank_service.h's.  Private to train. */
#ifndef VERLC_TRAIN_PPO_WORKER_SERVICE_H
#define VERLC_TRAIN_PPO_WORKER_SERVICE_H

#include "ctl/ctl.h"

extern const struct ctl_service ppo_worker_services[]; /* they end with a name NULL */

#endif
