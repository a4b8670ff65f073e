/* trainer_config.h - the group trainer.* of a configuration, as all trainers have it.
 *
 * The rows of conf/keys/shared_groups.def fill it, so a trainer's struct has it as its member `trainer`. */
#ifndef VERLC_RANKS_TRAINER_CONFIG_H
#define VERLC_RANKS_TRAINER_CONFIG_H

#include "ranks/rank_count.h"
#include "run/run.h"

struct trainer_config {
    struct run_config run;
    struct train_devices_keys devices; /* as requested */
    uint64_t seed;                     /* of all that has no seed of its own */
    int64_t total_epochs, total_training_steps;
    int64_t memory_limit; /* bytes of a device; 0: all */
};

#endif
