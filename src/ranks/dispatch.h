/* dispatch.h - dispatch of generation and forward passes to the ranks of a group, from its controller.
 *
 * A prompt's samples, or a piece of the sequences, go to the least loaded rank: no bit of them depends on what they are batched
 * with. A pass over sharded weights is collective: each rank gets its share of the sequences at once. The ranks' side is
 * worker_calls.h.
 * Invariant: results do not depend on which rank did what. */
#ifndef VERLC_RANKS_DISPATCH_H
#define VERLC_RANKS_DISPATCH_H

#include "ranks/idle_ranks.h"
#include "ranks/rank_group.h"
#include "train/trained_model.h"

struct rank_share;
/* Calls that a program makes between slices of generation. */
struct rank_between {
    void *arg;
    int (*start)(void *arg, int rank); /* 1: it has started a call (rank_group_start) */
    int (*take)(void *arg, int rank, const struct hub_reply *reply);
};
struct rank_dealing { /* a zeroed one may be freed */
    struct rank_group *g;
    struct rank_share *share;    /* of each rank */
    struct rank_between between; /* zeros: none */
    struct rank_spare *idle;     /* passes for ranks that have nothing left to generate; borrowed, NULL: none */
    bool interrupting;
    const struct rollout_config *to; /* receives the samples of the generation under way; borrowed; NULL: there is none */
};
void rank_dealing_init(struct rank_dealing *d, struct rank_group *g);
void rank_dealing_free(struct rank_dealing *d);

/* ---- generation, by the calls generate_begin, generate and generate_end; of c: done and its argument ---- */
int rank_generate_begin(struct rank_dealing *d, const struct rollout_config *c);
void rank_generate_add(struct rank_dealing *d, const struct rollout_request *q);
/* 1: work remains. wait: a little, for samples. Without a generation under way: only the calls of `between`. */
int rank_generate_step(struct rank_dealing *d, bool wait);
int rank_generate_interrupt(struct rank_dealing *d); /* as rollout_interrupt: unfinished samples are returned too */
struct rollout_stats rank_generate_stats(const struct rank_dealing *d);
void rank_generate_end(struct rank_dealing *d);

/* ---- forward passes, by the call forward ---- */
struct rank_forward_args {
    json_t *args;      /* of the call; borrowed, more are added */
    bool collective;   /* the weights are sharded */
    const char *phase; /* reported to `at` */
    const struct progress *at;
    const struct packed_seq *seqs; /* (n) */
    int64_t n;
    int64_t k; /* tokens of out's list */
    struct forward_out out;
};
int rank_forward(struct rank_dealing *d, const struct rank_forward_args *a); /* ERR_SIGNAL */

#endif
