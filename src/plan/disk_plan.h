/* disk_plan.h - the disk of a run before its first step: the size of a checkpoint, how many there will be at a time, the size that
 * run.db and logs may grow to, and whether there is space.
 *
 * Knows shapes, no device and no weights. Sizes are those of files; run.db's is of responses at full length, so that a run hardly
 * passes it. A file system's quotas are not seen, only its free space.
 * Invariant: a run whose one checkpoint does not fit is refused; one that may fill the disk later is warned with the numbers. */
#ifndef VERLC_PLAN_DISK_PLAN_H
#define VERLC_PLAN_DISK_PLAN_H

#include "base/buf.h"
#include "model/optim/optimizer.h"
#include "run/run.h"
#include "train/lora_keys.h"

/* A model that is trained. */
struct disk_model {
    const struct model_config *config; /* of a critic as model_config_make_value leaves it; json NULL: there is none */
    const char *dir;                   /* whose tokenizer files are copied */
    const struct train_lora *lora;
    const struct optim_config *optim;
};
struct disk_plan_args {
    const struct run_config *run; /* of a run's check: filled, as from, steps and n_clients */
    const char *keep_key;         /* trainer.max_actor_ckpt_to_keep, sft's trainer.max_ckpt_to_keep */
    const struct disk_model *models;
    int n_models;
    int64_t from, steps;               /* the step that the run goes on from, 0: from scratch; its last one, 0: not known */
    int64_t samples, val_samples;      /* of a step, of a validation; 0: none are recorded */
    int64_t prompt_tokens, new_tokens; /* of a sample, the most */
    int n_clients;                     /* trackers whose unsent records are kept */
    bool sends;                        /* the first model's weights are written for servers, below the run's directory */
};
/* Both read config.json's shapes as given, the sizes of tokenizer files, and what lies in the run's directory. */
/* Before the first step. ERR_IO: not even one checkpoint fits. Where the run may fill the disk, it is warned early. */
int disk_plan_check(struct disk_plan_args *a, struct run *r);
/* A line for people, appended; returns the same as an object, which the caller owns. NULL: not known. */
json_t *disk_plan_print(const struct disk_plan_args *a, struct buf *out);

#endif
