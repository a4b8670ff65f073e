/* netcheck.h - what the files of `verlc netcheck` share. */
#ifndef VERLC_CMD_NETCHECK_H
#define VERLC_CMD_NETCHECK_H

#include "ranks/start_workers.h"

/* Calls of the ranks; each has `rounds` repetitions between two barriers and gives {"seconds": of all}.
 *  netcheck_pair: "a", "b", "bytes", "back": a sends b so many bytes; back: and b the same to a, one after the other.
 *  netcheck_operation: "operation": a name of netcheck_operations, "bytes": what a rank holds.
 * And netcheck_call: reads the call's arrays, and answers with an array of "bytes".
 *
 * netcheck_has_gpu: {"has", "why"} of this rank. netcheck_devices: "device" ("cuda": the GPU of each rank on its host), "bytes"
 * that a rank holds, "seconds" for each measurement: {"device": its description, "way": collective_way's, "fold", "all_gather":
 * seconds of one (device/collective/collective.h)}. */
#define NETCHECK_SERVICES                                                                                           \
    {"netcheck_pair", netcheck_pair}, {"netcheck_operation", netcheck_operation}, {"netcheck_call", netcheck_call}, \
        {"netcheck_has_gpu", netcheck_has_gpu}, {                                                                   \
        "netcheck_devices", netcheck_devices                                                                        \
    }
int netcheck_pair(struct comm *c, const struct comm_call *call, struct ctl_result *out);
int netcheck_operation(struct comm *c, const struct comm_call *call, struct ctl_result *out);
int netcheck_call(struct comm *c, const struct comm_call *call, struct ctl_result *out);
int netcheck_has_gpu(struct comm *c, const struct comm_call *call, struct ctl_result *out);
int netcheck_devices(struct comm *c, const struct comm_call *call, struct ctl_result *out);

enum { NETCHECK_OPERATIONS = 5, NETCHECK_CALLS = 2 };
/* barrier first; then what the controller measures: arrays of a call to all ranks, and of all ranks' results. */
extern const char *const netcheck_operations[NETCHECK_OPERATIONS + NETCHECK_CALLS];

#endif
