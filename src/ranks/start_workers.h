/* start_workers.h - the controller's worker processes: one a rank.
 *
 * By hand, the controller starts them on this host, or has a Ray cluster start them on its nodes. Under srun, mpirun or torchrun
 * the same command has been started once a rank: the first process is the controller and starts rank 0's worker, the others
 * are workers themselves (ctl_is_worker).
 * A worker serves calls by name until the controller ends the group. No device, no model: what a call does is its service's.
 * Invariant: the end of any of these processes, by SIGKILL too, ends all of them within 10 s; none is left, and no file. */
#ifndef VERLC_RANKS_START_WORKERS_H
#define VERLC_RANKS_START_WORKERS_H

#include "comm/comm.h"

struct ctl;
struct launch; /* ranks/launcher.h */

struct ctl_args {
    int ranks;              /* on this host, where no launcher says how many there are */
    const char *dir;        /* under a launcher: a directory that all hosts share */
    const char *controller; /* HOST:PORT where the controller listens; NULL: any port, written to dir */
    double start_s;         /* for all ranks to join */
    /* The workers that are started run this program again. false: with one argument, "worker"; true: with this process' own
     * arguments, for a program that embeds libverlc: a worker comes to the same place in it and serves there. */
    bool own_arguments;
    int ray_nodes; /* > 0: a Ray cluster starts the workers, ranks / ray_nodes on each of so many nodes */
    bool ray_gpus; /* and gives each a GPU */
};
/* Whether this process is a rank of somebody else's group. */
bool ctl_is_worker(const struct launch *l);

/* ---- the controller ---- */

int ctl_open(struct ctl **out, const struct ctl_args *a, const struct launch *l);
/* end: the work is done, the workers end by themselves. Else they are killed. NULL ok. */
void ctl_close(struct ctl *c, bool end);
int ctl_size(const struct ctl *c);
/* Of the group that this process closed last: the rank whose failure ended it; -1: it ended well, or not known. */
int ctl_failed_rank(void);
struct hub *ctl_hub(struct ctl *c);
/* The same call on every rank; replies[rank], in order. ERR_RANK, ERR_TIMEOUT, a worker's own error: as hub_collect. */
int ctl_call_all(struct ctl *c, const struct hub_call_args *a, struct hub_reply *replies);

/* ---- a worker ---- */

struct ctl_result {
    json_t *value; /* an object; NULL: {} */
    struct comm_bytes *arrays;
    int n_arrays;
};
struct ctl_service {
    const char *name;
    /* comm: the group, for operations that all ranks make. The result's memory is taken. < 0: the error goes to the controller. */
    int (*run)(struct comm *comm, const struct comm_call *call, struct ctl_result *out);
};
/* Joins the group of the environment and serves; services end with a name NULL. 0: the controller has ended the group. When the
 * controller is lost the process ends. */
int ctl_serve(const struct ctl_args *a, const struct launch *l, const struct ctl_service *services);

#endif
