/* netcheck.h - what the files of `verlc netcheck` share. */
#ifndef VERLC_CMD_NETCHECK_H
#define VERLC_CMD_NETCHECK_H

#include "ctl/ctl.h"

/* Calls of the ranks; each has `rounds` repetitions between two barriers and gives {"seconds": of all}.
 *  netcheck_pair: "a", "b", "bytes", "back": a sends b so many bytes; back: and b the same to a, one after the other.
 *  netcheck_operation: "operation": a name of netcheck_operations, "bytes": what a rank holds. */
#define NETCHECK_SERVICES \
    {"netcheck_pair", netcheck_pair}, { "netcheck_operation", netcheck_operation }
int netcheck_pair(struct comm *c, const struct comm_call *call, struct ctl_result *out);
int netcheck_operation(struct comm *c, const struct comm_call *call, struct ctl_result *out);

enum { NETCHECK_OPERATIONS = 5 };
extern const char *const netcheck_operations[NETCHECK_OPERATIONS]; /* barrier first */

#endif
