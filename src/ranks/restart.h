/* restart.h - trainer.max_restarts: a run that has lost a rank begins again from its last checkpoint, or, where it saves none, from
 * the beginning.
 *
 * The process becomes the same program with the same arguments once more (execve), so that nothing of the failed run is left in
 * it; where the run resumes is added to them. The number of restarts and the first start are passed in the environment.
 * Invariant: a run that was restarted ends in the bits of one that was not. */
#ifndef VERLC_RANKS_RESTART_H
#define VERLC_RANKS_RESTART_H

#include "ranks/trainer_config.h"

struct restart {
    /* Set when they are known, after the beginning. */
    const struct trainer_config *k; /* borrowed; of a program that saves no checkpoints without run.default_local_dir */
    struct rank_placement ranks;    /* of the run */
    int64_t pool_ranks;             /* of these, those of other pools than the trainer's */
    /* restart.c's */
    double began;         /* clock_wall when the first of these runs began */
    int64_t done;         /* restarts so far */
    int suspect;          /* the lost rank that the last restart was for; -1: not known */
    int64_t suspect_step; /* where it went on */
};
void restart_begin(struct restart *r); /* before the run */
/* After a failure, with its message: returns rc where there is no restart. stopped: a signal has asked the run to stop; there is
 * none then. A rank of this host that is lost twice without a checkpoint in between is left out, and its GPU with it where no
 * other has that; with trainer.ranks, or on a CPU, the trainer's pool has one rank less. */
int restart_run(const struct restart *r, int rc, bool stopped);

#endif
