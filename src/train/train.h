/* train.h - a rank's process. */
#ifndef VERLC_TRAIN_H
#define VERLC_TRAIN_H

#include "ctl/ctl.h"

/* A rank of somebody else's run: serves its controller's calls, and those of `more` (NULL, or ended by a name NULL), until the
 * controller ends the group. a: where a launcher's ranks find the controller; NULL: the environment says. */
int train_worker(const struct launch *l, const struct ctl_args *a, const struct ctl_service *more);

#endif
