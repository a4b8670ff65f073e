/* start_workers_int.h - how workers find the controller: variables of their environment, in addition to struct launch's. */
#ifndef VERLC_RANKS_START_WORKERS_INT_H
#define VERLC_RANKS_START_WORKERS_INT_H

#include "helper/helper.h"
#include "ranks/start_workers.h"

/* Whether the launcher that started this process has left it the CPUs that it has itself. */
bool worker_process__unbound(void);

/* a->ranks workers below a helper process, *out, which the caller ends (after an error too). argv: theirs. ERR_HELPER;
 * ERR_INPUT: Ray's error. */
int ray_placement__start(struct helper **out, const struct coordinator *h, const struct workers_args *a, char *const *argv);

#define WORKERS__CONTROLLER "VERLC_CONTROLLER" /* HOST:PORT */
#define WORKERS__KEY "VERLC_GROUP_KEY"
#define CTL__VARIABLES \
    "VERLC_RANK", "VERLC_RANKS", "VERLC_LOCAL_RANK", "VERLC_LOCAL_RANKS", "VERLC_NODE", WORKERS__CONTROLLER, WORKERS__KEY

#endif
