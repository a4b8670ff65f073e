/* dispatch.h - the operations of a worker on ranks, from their controller: dispatch of generation and forward passes, updates.
 *
 * A prompt's samples, or a piece of the sequences, go to the least loaded rank: no bit of them depends on what they are batched
 * with. Ranks that generate together get the same calls, and count as one; so do ranks that share the rows of a pass. A pass of
 * these or over sharded weights is collective: each rank gets its share of the sequences at once. An update runs on all ranks of a
 * role with the whole batch, and each ends with the same weights. The ranks' side is worker_calls.h.
 * Invariant: results do not depend on which rank did what. */
#ifndef VERLC_RANKS_DISPATCH_H
#define VERLC_RANKS_DISPATCH_H

#include "ranks/idle_ranks.h"
#include "ranks/rank_group.h"
#include "ranks/worker.h"

#include "base/map.h"

struct rank_share;
/* Calls that a program makes between slices of generation. */
struct rank_interleaved {
    void *arg;
    int together; /* consecutive ranks that such a call takes at once, a multiple of those that generate as one; 0, 1: one */
    bool (*due)(void *arg, int rank);  /* rank: the first of them. Whether start would start a call */
    int (*start)(void *arg, int rank); /* 1: it has started a call on each of them (rank_group_start) */
    int (*take)(void *arg, int rank, const struct coordinator_reply *reply);
};
struct rank_dispatch { /* a zeroed one may be freed */
    struct rank_group *g;
    struct rank_share *share;            /* of each rank */
    struct rank_interleaved interleaved; /* zeros: none */
    struct idle_ranks *idle;             /* passes for ranks that have nothing left to generate; NULL: none */
    bool interrupting;
    int together;                /* consecutive ranks that generate as one (model/parallel/tensor_parallel.h); 0, 1: each alone */
    struct map home;             /* of each `user` of a request the rank that got it */
    struct worker_generation to; /* the generation under way; zeros: there is none */
};
void rank_dispatch_init(struct rank_dispatch *d, struct rank_group *g);
void rank_dispatch_free(struct rank_dispatch *d);
/* A step of generation, as worker_ops has it. Without one under way: only the calls of `interleaved`. */
int rank_dispatch_step(struct rank_dispatch *d, bool wait);

struct worker_ranks { /* a zeroed one may be closed */
    struct rank_group all;
    struct rank_dispatch dispatch;                       /* to all of them */
    struct rank_dispatch *generates, *has[WORKER_ROLES]; /* to those that generate, that have a role: all, or a pool of them */
    bool own[WORKER_ROLES];                              /* that pool does nothing else: updates of the role are overlapped */
    struct rank_group *weight_sync;       /* the trainer's ranks and those that only generate; NULL: there are none */
    bool stale;                           /* the latter do not have the trainer's weights */
    const struct worker_update *updating; /* overlapped; NULL: none */
};
/* Starts the ranks, or under a launcher waits for them (rank_group_open); w is on all of them then. r: borrowed. */
int dispatch_open(struct worker *w, struct worker_ranks *r, const struct rank_group_args *a, const char *open, json_t *more,
                  json_t **results);
void dispatch_close(struct worker_ranks *r, bool ok); /* ok: the run has ended well; else the processes are killed */

#endif
