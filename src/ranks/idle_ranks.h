/* idle_ranks.h - forward passes over finished samples on idle ranks: those with nothing left to generate while others still do.
 *
 * The tail of a generation: a rank whose samples have all ended would wait for the longest of the others. No bit of a pass depends
 * on what it is batched with, so a later pass takes these results and computes the rest. The ranks' side is the call "forward".
 * Invariant: a rank that has begun a pass generates no more until the next generation, since both use one block. */
#ifndef VERLC_RANKS_IDLE_RANKS_H
#define VERLC_RANKS_IDLE_RANKS_H

#include "ranks/call_codec.h"
#include "ranks/rank_group.h"

struct rank_spare;
struct rank_spare_pass {
    const char *name; /* for messages */
    int role;         /* argument of the call */
    bool value;       /* values; else log-probs */
};
enum { RANK_SPARE_PASSES = 2 };
/* done gets the pass' number, the sequence's tag and its numbers, one a target. */
int rank_spare_open(struct rank_spare **out, struct rank_group *g, const struct rank_spare_pass *passes, int n,
                    int (*done)(void *arg, int pass, int64_t tag, const float *x, int64_t n), void *arg);
void rank_spare_close(struct rank_spare *s); /* NULL ok; none of its calls is under way */
/* A sample that has ended: prompt and response, copied. */
void rank_spare_add(struct rank_spare *s, const int32_t *prompt, int64_t n_prompt, const int32_t *response, int64_t n, int64_t tag);

/* ---- for dispatch.c ---- */
int rank_spare_start(struct rank_spare *s, int rank); /* 1: it has started a call; 0: there is nothing to do */
int rank_spare_take(struct rank_spare *s, int rank, const struct hub_reply *reply);

#endif
