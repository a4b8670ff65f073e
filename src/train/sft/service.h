/* service.h - a rank of an sft run: its own calls in addition to rank_service.h's.  Private to train and cmd. */
#ifndef VERLC_TRAIN_SFT_SERVICE_H
#define VERLC_TRAIN_SFT_SERVICE_H

#include "ctl/ctl.h"

extern const struct ctl_service sft_services[]; /* they end with a name NULL */

#endif
