/* scoring_ranks.h - ranks that have a reward model or a judge together: the first one has texts and clients and decides, the others
 * compute what it orders.
 *
 * Orders are collective: the others wait for them in scoring_ranks_next until one that ends. Knows neither prompts nor scores.
 * Invariant: all ranks of a group make the same passes; what they have drawn or computed is compared with each order. */
#ifndef VERLC_REWARD_MODEL_SCORING_RANKS_H
#define VERLC_REWARD_MODEL_SCORING_RANKS_H

#include "ranks/message_codec.h"
#include "ranks/split_model.h"

enum scoring_order { ORDER_END, ORDER_STEP, ORDER_SCORE, ORDERS };

struct scoring_ranks { /* a zeroed one: this process has all of it */
    struct split_model split;
    bool follows;         /* another rank leads */
    uint64_t drawn;       /* a fingerprint of what this rank has computed so far */
    struct message order; /* of the rank that follows: the last one, owned */
};
/* Collective. comm: ranks of which consecutive ones have a model together. For passes of so many rows. */
int scoring_ranks_open(struct scoring_ranks *g, struct comm *comm, const struct split_model_args *a, int64_t max_rows);
void scoring_ranks_leave(struct scoring_ranks *g); /* as split_model_leave and split_model_close */
void scoring_ranks_close(struct scoring_ranks *g);
static inline bool scoring_ranks_is_split(const struct scoring_ranks *g) { return g->split.part != NULL; }
void scoring_ranks_drew(struct scoring_ranks *g, const void *p, size_t n);
/* Of the first rank: to the others, with m's arrays (m NULL: none). Alone: nothing. */
int scoring_ranks_order(struct scoring_ranks *g, enum scoring_order order, const struct message *m);
/* Of the others: the next order, and its arrays, which last until the next one. ERR_INPUT: the first rank has computed other
 * results. */
int scoring_ranks_next(struct scoring_ranks *g, enum scoring_order *order, struct message_reader *in);

#endif
