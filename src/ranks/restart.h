/* restart.h - trainer.max_restarts: a run that has lost a rank begins again from its last checkpoint, or, where it saves none, from
 * the beginning.
 *
 * The process becomes the same program with the same arguments once more (execve), so that nothing of the failed run is left in
 * it; where the run resumes is added to them. The number of restarts and the first start are passed in the environment.
 * Invariant: a run that was restarted ends in the bits of one that was not. */
#ifndef VERLC_RANKS_RESTART_H
#define VERLC_RANKS_RESTART_H

#include <stdbool.h>
#include <stdint.h>

struct restart {
    int64_t most;    /* trainer.max_restarts */
    const char *dir; /* of its checkpoints: trainer.default_local_dir; NULL: it saves none */
    const char *device;
    int64_t ranks, pool_ranks; /* of the run; of these, of pools other than the trainer's */
    bool ray;
    bool by_ranks;        /* trainer.ranks says how many */
    double began;         /* clock_wall when the first of these runs began */
    int64_t done;         /* restarts so far */
    int suspect;          /* the lost rank that the last restart was for; -1: not known */
    int64_t suspect_step; /* where it went on */
};
/* Before the run; ranks, pool_ranks, ray and by_ranks are set when they are known. */
void restart_begin(struct restart *r, const char *dir, const char *device, int64_t most);
/* After a failure, with its message: returns rc where there is no restart. stopped: a signal has asked the run to stop; there is
 * none then. A rank of this host that is lost twice without a checkpoint in between is left out, and its GPU with it where no
 * other has that; with trainer.ranks, or on a CPU, the trainer's pool has one rank less. */
int restart_run(const struct restart *r, int rc, bool stopped);

#endif
