/* rank_group.h - the processes that have a program's devices, seen from its controller: their start, calls, results, checkpoints.
 *
 * What the programs with several ranks share; a program's own calls are in its files. The ranks' side is worker_calls.h.
 * Invariant: what all ranks computed is compared, and what differs is an error that names the rank. */
#ifndef VERLC_RANKS_RANK_GROUP_H
#define VERLC_RANKS_RANK_GROUP_H

#include "conf/conf.h"
#include "ranks/message_codec.h"
#include "ranks/start_workers.h"
#include "ranks/trainer_config.h"

/* For all ranks to join: a launcher may start some long after others. */
#define RANK_START_S 300.0
/* The longest wait before progress is shown and signals are checked. */
#define RANK_SLICE_S 0.2

struct worker_overlapped;
/* All ranks, or consecutive ones that share a task (a pool): ranks count from 0 in each. */
struct rank_group {           /* a zeroed one may be closed */
    struct workers *workers;  /* NULL: a part */
    struct rank_group *whole; /* all ranks: itself, or what it is a part of */
    struct coordinator *coordinator;
    int first, n;                                  /* of all ranks */
    struct run *run;                               /* borrowed; NULL: the program has none */
    double deadline_s;                             /* of a call */
    bool *busy;                                    /* (n) a call is under way */
    struct coordinator_reply *replies;             /* (n) that came while another part waited; result NULL: none */
    const struct worker_overlapped *while_waiting; /* stepped while this part waits for its ranks; NULL: nothing is */
    char isa[32];
    char device[192]; /* "2 ranks, each on ..." */
    bool own_memory;  /* the device has memory of its own */
    int64_t steps;    /* optimizer steps; -1: not known, since an update failed */
};

struct rank_group_args {
    const struct conf *conf; /* what the ranks load again; NULL: the call `open` has all that they need */
    int ranks;               /* where no launcher says how many there are */
    const char *dir;         /* under a launcher: where the ranks find the controller */
    const char *controller;  /* trainer.controller; NULL: by dir */
    double deadline_s;       /* trainer.deadline; <= 0: its default */
    struct run *run;         /* may be NULL */
    int ray_nodes;           /* of workers_args, like ray_gpus */
    bool ray_gpus;
    bool embedded; /* in a user's program, which is its own worker: workers_args.own_arguments */
};
/* As the configuration says. run: NULL: none. */
struct rank_group_args rank_group_args_of(const struct conf *c, const struct trainer_config *k, const struct rank_placement *p,
                                          struct run *run);
/* Starts the ranks, or under a launcher waits for them. They are one program's by the call `open`, which makes them load the
 * configuration and open their devices, all of one kind. more: further arguments of that call; taken, NULL: none. *results: a list
 * of each rank's, a new reference; NULL ok. */
int rank_group_open(struct rank_group *g, const struct rank_group_args *a, const char *open, json_t *more, json_t **results);
/* Ranks first..first + n - 1 of a group, with no call under way; nothing to close. */
void rank_group_part(struct rank_group *out, struct rank_group *whole, int first, int n);
/* ok: the run has ended well; else the processes are killed. */
void rank_group_close(struct rank_group *g, bool ok);

/* ---- calls ---- */
int rank_group_start(struct rank_group *g, int rank, const char *name, const struct message *m);
/* 1: a reply of *rank; 0: none came within wait_s. */
int rank_group_take(struct rank_group *g, double wait_s, int *rank, struct coordinator_reply *reply);
/* Waits for what is under way, and drops it: after a failure of this side, so that the ranks can be called again. */
void rank_group_drain(struct rank_group *g);
/* While calls are under way: reports rank 0's progress to the bar and the watchdog, and sends a signal on to the ranks. phase:
 * whose progress is shown; NULL: none. */
void rank_group_heartbeat(struct rank_group *g, const char *phase);
/* The same call on all ranks, to its end. *replies: (n), for rank_group_free, after an error too. */
int rank_group_call(struct rank_group *g, const char *name, const char *phase, const struct message *m,
                    struct coordinator_reply **replies);
/* The same in two parts. */
int rank_group_start_all(struct rank_group *g, const char *name, const struct message *m);
int rank_group_take_all(struct rank_group *g, const char *phase, struct coordinator_reply **replies);
void rank_group_free(struct rank_group *g, struct coordinator_reply *replies); /* NULL ok */
/* The same of a call without arrays; args: taken. *first, unless NULL: rank 0's result, a new reference. */
int rank_group_plain_call(struct rank_group *g, const char *name, json_t *args, json_t **first);
struct message_reader rank_group_reader(const struct rank_group *g, int rank, const struct coordinator_reply *reply);
/* The same field of every rank's reply; ERR_INPUT names the first rank that differs. */
int rank_group_same(struct rank_group *g, const struct coordinator_reply *replies, const char *field, const char *what);

/* ---- a trainer's ---- */
/* Takes the replies of an update (rank_update_end): compares the ranks, then the metrics go to the run, and a gradient that is
 * not finite to its directory. ERR_SIGNAL: they have stopped before anything was changed. */
int rank_group_updated(struct rank_group *g, const struct coordinator_reply *replies, struct batch *b);
/* train_memory_metrics of all ranks: the largest. */
int rank_group_memory(struct rank_group *g, struct metrics *m, const char *prefix);
/* The ranks' state in checkpoints, which rank 0 writes. */
void rank_group_checkpoints(struct rank_group *g, struct checkpoints *out);

#endif
