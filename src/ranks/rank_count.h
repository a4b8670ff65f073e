/* rank_count.h - how many ranks a run has: by its keys, by what started it, and by the devices present; in every program that
 * opens a device.
 *
 * Invariant: results do not depend on the number of ranks, so fewer than requested are a line of the log and no error. */
#ifndef VERLC_RANKS_RANK_COUNT_H
#define VERLC_RANKS_RANK_COUNT_H

#include "conf/conf.h"

struct launch;         /* ranks/launcher.h */
struct trainer_config; /* ranks/trainer_config.h */

/* trainer.nnodes, trainer.n_gpus_per_node, trainer.ranks, trainer.controller and trainer.max_restarts as they are written; ranks
 * 0, controller NULL: null. */
struct train_devices_keys {
    int64_t nnodes, n_gpus_per_node, ranks;
    const char *controller; /* borrowed from the conf */
    int64_t max_restarts;
};

/* What a run or a plan finds out of its ranks, once its configuration is read. */
struct rank_placement {
    int64_t n, n_local;  /* ranks, and those of a host that has the most of them */
    int64_t host_memory; /* bytes that a host has; 0: as many as this one */
    int n_ray_nodes;     /* of a run: on which Ray starts them; 0: not Ray */
};

/* How many GPUs the user requests; 1 where no key is set. verl's default of n_gpus_per_node is 8, so only a number that was set
 * counts. */
int64_t rank_count_devices(const struct conf *c, const struct train_devices_keys *k);

/* How many of these share a mini-batch, as verl counts them: those that a model or a sequence is split over, by the keys of the
 * group ("actor_rollout_ref.actor", "critic", "engine"), count as one. >= 1. Of verl's rules about batch sizes alone. */
int64_t rank_count_data_parallel(const struct conf *c, const struct train_devices_keys *k, const char *group);

/* What keys of pools request in addition to trainer's: GPUs, and the hosts that they are on; ranks, which count on a CPU and with
 * trainer.ranks. */
struct train_pool_devices {
    int64_t gpus, nodes, ranks;
};
struct train_ranks_args {
    const struct conf *conf;
    const struct train_devices_keys *keys;
    struct train_pool_devices pools;
    const char *device;          /* trainer.device; NULL: auto */
    const struct launch *launch; /* what started this process */
    int (*n_gpus)(void);         /* of this host; called where several are requested */
    bool ray;                    /* there is a Ray cluster */
};
/* trainer.device is cpu or ref. */
bool rank_count_on_cpu(const char *device);
/* How many ranks the run has: the launcher's processes where there are several; else trainer.ranks; else on GPUs those
 * requested that this host has. Where that is another number than requested, one line of the log says why. >= 1.
 * *ray_nodes: on how many nodes Ray is to start them, as many on each; 0: they are this host's, or the launcher's. */
int64_t rank_count_asked(const struct train_ranks_args *a, int *ray_nodes);
/* The same of this process: its environment, its GPUs. pools NULL: none. ray: where there is a Ray cluster, it may start them.
 * n_local is 1, host_memory stays. ERR_INVAL: a launcher's variables make no sense. */
int rank_count_decide(const struct conf *c, const struct trainer_config *k, const struct train_pool_devices *pools, bool ray,
                      struct rank_placement *p);
/* Whether a launcher says how many ranks there are. */
bool rank_count_launched(void);

#endif
