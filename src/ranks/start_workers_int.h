/* start_workers_int.h - how workers find the controller: variables of their environment, in addition to struct launch's. */
#ifndef VERLC_RANKS_START_WORKERS_INT_H
#define VERLC_RANKS_START_WORKERS_INT_H

#include "helper/helper.h"
#include "ranks/start_workers.h"

/* Whether the launcher that started this process has left it the CPUs that it has itself. */
bool ctl__unbound(void);

/* a->ranks workers below a helper process, *out, which the caller ends (after an error too). argv: theirs. ERR_HELPER;
 * ERR_INPUT: Ray's error. */
int ctl__ray_start(struct helper **out, const struct hub *h, const struct ctl_args *a, char *const *argv);

#define CTL__CONTROLLER "VERLC_CONTROLLER" /* HOST:PORT */
#define CTL__KEY "VERLC_GROUP_KEY"
#define CTL__VARIABLES "VERLC_RANK", "VERLC_RANKS", "VERLC_LOCAL_RANK", "VERLC_LOCAL_RANKS", "VERLC_NODE", CTL__CONTROLLER, CTL__KEY

#endif
