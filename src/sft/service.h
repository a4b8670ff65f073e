/* service.h - a rank of an sft run: its own calls in addition to worker_calls.h's. */
#ifndef VERLC_SFT_SERVICE_H
#define VERLC_SFT_SERVICE_H

#include "ranks/start_workers.h"

extern const struct ctl_service sft_services[]; /* they end with a name NULL */

#endif
