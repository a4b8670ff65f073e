/* ctl_int.h - how the controller tells its workers where it is: variables of their environment, beside struct launch's. */
#ifndef VERLC_CTL_INT_H
#define VERLC_CTL_INT_H

#include "ctl/ctl.h"

#define CTL__CONTROLLER "VERLC_CONTROLLER" /* HOST:PORT */
#define CTL__KEY "VERLC_GROUP_KEY"
#define CTL__VARIABLES "VERLC_RANK", "VERLC_RANKS", "VERLC_LOCAL_RANK", "VERLC_LOCAL_RANKS", "VERLC_NODE", CTL__CONTROLLER, CTL__KEY

#endif
