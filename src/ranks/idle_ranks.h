/* idle_ranks.h - forward passes over finished samples on idle ranks: those with nothing left to generate while others still do.
 *
 * The tail of a generation: a rank whose samples have all ended would wait for the longest of the others. No bit of a pass depends
 * on what it is batched with, so a later pass takes these results and computes the rest. The ranks' side is the call "forward".
 * Invariant: a rank that has begun a pass generates no more until the next generation, since both use one block. */
#ifndef VERLC_RANKS_IDLE_RANKS_H
#define VERLC_RANKS_IDLE_RANKS_H

#include "ranks/message_codec.h"
#include "ranks/rank_group.h"
#include "ranks/worker.h"

struct idle_ranks;
/* For the passes of a generation, of which there are some. */
struct idle_ranks *idle_ranks_open(struct rank_group *g, const struct worker_generation *of);
void idle_ranks_close(struct idle_ranks *s); /* NULL ok; none of its calls is under way */
/* A sample that has ended: prompt and response, copied. */
void idle_ranks_add(struct idle_ranks *s, const struct engine_sample *sample, int64_t tag);

/* ---- for dispatch.c ---- */
int idle_ranks_start(struct idle_ranks *s, int rank); /* 1: it has started a call; 0: there is nothing to do */
int idle_ranks_take(struct idle_ranks *s, int rank, const struct coordinator_reply *reply);

#endif
