/* rank_dealing.h - generation and forward passes dealt to the ranks of a group, from its controller.
 *
 * A prompt's samples, or a piece of the sequences, go to the rank with the least to do, since no bit of theirs depends on what is
 * computed with them. A pass over sharded weights is all ranks' common work: each gets its share of the sequences at once. The
 * ranks' side is rank_service.h.  Private to train.
 * Invariant: results do not depend on which rank did what. */
#ifndef VERLC_TRAIN_RUN_RANK_DEALING_H
#define VERLC_TRAIN_RUN_RANK_DEALING_H

#include "train/run/rank_group.h"
#include "train/run/rank_spare.h"
#include "train/run/trained_model.h"

struct rank_share;
/* What a program does between slices of generation. */
struct rank_between {
    void *arg;
    int (*start)(void *arg, int rank); /* 1: it has started a call (rank_group_start) */
    int (*take)(void *arg, int rank, const struct hub_reply *reply);
};
struct rank_dealing { /* a zeroed one may be freed */
    struct rank_group *g;
    struct rank_share *share;    /* of each rank */
    struct rank_between between; /* zeros: nothing */
    struct rank_spare *spare;    /* what ranks do that have nothing to generate any more; borrowed, NULL: nothing */
    bool interrupting;
    const struct rollout_config *to; /* who gets the samples of the generation under way; borrowed; NULL: there is none */
};
void rank_dealing_init(struct rank_dealing *d, struct rank_group *g);
void rank_dealing_free(struct rank_dealing *d);

/* ---- generation, by the calls generate_begin, generate and generate_end; of c: done and its argument ---- */
int rank_generate_begin(struct rank_dealing *d, const struct rollout_config *c);
void rank_generate_add(struct rank_dealing *d, const struct rollout_request *q);
/* 1: work remains. wait: a little, for samples. Without a generation under way, what comes between alone. */
int rank_generate_step(struct rank_dealing *d, bool wait);
int rank_generate_interrupt(struct rank_dealing *d); /* as rollout_interrupt: all that has not ended is handed out */
struct rollout_stats rank_generate_stats(const struct rank_dealing *d);
void rank_generate_end(struct rank_dealing *d);

/* ---- forward passes, by the call forward with these arguments (an object that takes more) ---- */
/* Over seqs[n]; k: tokens of out's list; collective: the weights are sharded. ERR_SIGNAL. phase: what is told to `at`. */
int rank_forward(struct rank_dealing *d, json_t *args, bool collective, const char *phase, const struct progress *at,
                 const struct packed_seq *seqs, int64_t n, int64_t k, struct forward_out out);

#endif
