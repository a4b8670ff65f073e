/* worker_calls.h - a rank's process: the part of its calls that the programs with several ranks share (rank_group.h).
 *
 * A process is a rank of one program, which its first call names. What it then holds lives until it ends. Knows no program: each
 * passes the table of its own calls.
 * Invariant: a rank writes no file but those that a call names, and decides nothing that another rank must know. */
#ifndef VERLC_RANKS_WORKER_CALLS_H
#define VERLC_RANKS_WORKER_CALLS_H

#include "conf/conf.h"
#include "ranks/message_codec.h"
#include "ranks/start_workers.h"
#include "run/run.h"
#include "ranks/worker.h"

struct rank {
    struct comm *comm; /* all ranks */
    struct comm *pool; /* those that do the same work: all, or a part, which is closed with this */
    struct conf *conf; /* the controller's, loaded again */
    struct run run;    /* without directory and tracker */
    struct bad_gradient bad;
    struct worker *worker;                      /* the program's, on this rank's device; set by its first call, when that is open */
    const struct worker_update *const *updates; /* those that it may be asked for, ended by NULL */
    void (*close)(void);                        /* what the program holds; the group has ended */
    struct sample_list samples;                 /* finished, not reported yet */
    uint64_t drawn;                             /* a fingerprint of those of this generation so far */
    bool passing;                               /* in a forward pass, which a stop ends on this rank alone */
    json_t *saving;                             /* the arguments of the checkpoint that is written */
};
/* This process'. */
struct rank *rank_self(void);

/* A rank of somebody else's run: serves the calls of rank_group.h and dispatch.h, and those of `tables` (ended by NULL; each
 * ends with a name NULL), until the controller ends the group; then rank_self is closed. A table is a program's: its first call,
 * and others. a: where a launcher's ranks find the controller; NULL: the environment says. */
int rank_serve(const struct launch *l, const char *dir, const char *controller, const struct worker_process_service *const *tables);

/* ---- opening: a program's first call, in this order ---- */
/* The configuration. ERR_INPUT: it is not the controller's. */
int rank_open_config(struct comm *comm, const struct comm_call *call);
int rank_open_pool(int first, int n); /* where this rank shares its work with these alone */
int rank_open_run(const struct run_config *k);
/* The GPU that is this rank's: one each of its host, or the one that it sees; with trainer.ranks in turn. ERR_INPUT: a launcher
 * has started more ranks on its host than that has GPUs. */
int rank_gpu(const struct comm *comm, int *gpu);
/* Collective. rank_gpu's, or what else `device` names; with the controller's instruction set, and with its part of the memory
 * where ranks share a device. */
int rank_open_device(const struct comm_call *call, struct dev *dev, const char *device, int threads);
/* What rank_group_open reads, into the result. */
void rank_describe(json_t *result, const struct dev *dev);

/* ---- traces of a rank's device (device/trace.h) ---- */
/* Collective. The ranks of rank 0's host have its time. */
int rank_trace_start(struct comm *comm, struct dev *dev);
/* Rank 0's is written to path, that of rank N next to it: x_rank_N.json for x.json. */
int rank_trace_stop(const struct comm *comm, struct dev *dev, const char *path);

#endif
