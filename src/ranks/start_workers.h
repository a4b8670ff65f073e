/* start_workers.h - the controller's worker processes: one a rank.
 *
 * By hand, the controller starts them on this host, or has a Ray cluster start them on its nodes. Under srun, mpirun or torchrun
 * the same command has been started once a rank: the first process is the controller and starts rank 0's worker, the others
 * are workers themselves (workers_started_this).
 * A worker serves calls by name until the controller ends the group. No device, no model: what a call does is its service's.
 * Invariant: the end of any of these processes, by SIGKILL too, ends all of them within 10 s; none is left, and no file. */
#ifndef VERLC_RANKS_START_WORKERS_H
#define VERLC_RANKS_START_WORKERS_H

#include "comm/comm.h"

struct workers;
struct launch; /* ranks/launcher.h */

struct workers_args {
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
bool workers_started_this(const struct launch *l);

/* ---- the controller ---- */

int workers_open(struct workers **out, const struct workers_args *a, const struct launch *l);
/* end: the work is done, the workers end by themselves. Else they are killed. NULL ok. */
void workers_close(struct workers *c, bool end);
int workers_size(const struct workers *c);
/* Of the group that this process closed last: the rank whose failure ended it; -1: it ended well, or not known. */
int workers_failed_rank(void);
struct coordinator *workers_coordinator(struct workers *c);
/* The same call on every rank; replies[rank], in order. ERR_RANK, ERR_TIMEOUT, a worker's own error: as coordinator_collect. */
int workers_call_all(struct workers *c, const struct coordinator_call_args *a, struct coordinator_reply *replies);

/* ---- a worker ---- */

struct ctl_result {
    json_t *value; /* an object; NULL: {} */
    struct comm_bytes *arrays;
    int n_arrays;
};
struct worker_process_service {
    const char *name;
    /* comm: the group, for operations that all ranks make. The result's memory is taken. < 0: the error goes to the controller. */
    int (*run)(struct comm *comm, const struct comm_call *call, struct ctl_result *out);
};
/* Joins the group of the environment and serves; services end with a name NULL. 0: the controller has ended the group. When the
 * controller is lost the process ends. */
int worker_process_serve(const struct workers_args *a, const struct launch *l, const struct worker_process_service *services);

#endif
