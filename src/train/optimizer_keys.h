/* optimizer_keys.h - the keys of an optimizer and its schedule, the same ones in every
 * section that has an optimizer. */
#ifndef VERLC_TRAIN_OPTIMIZER_KEYS_H
#define VERLC_TRAIN_OPTIMIZER_KEYS_H

#include "conf/conf.h"
#include "model/optim/optimizer.h"

/* SECTION.* as they are written ("actor_rollout_ref.actor.optim"); filled by the rows OPTIM of shared_groups.def. */
struct train_optim_keys {
    enum optim_kind kind;
    double lr, weight_decay, betas[2], warmup_ratio, clip_grad, min_lr_ratio, init_lr_ratio, num_cycles;
    double min_lr, init_lr; /* over 0: in place of the ratios */
    int64_t n_betas, warmup_steps, decay_steps;
    const char *schedule;
    bool zero_indexed_step;
    const json_t *options; /* override_optimizer_config; NULL: none */
};
/* What the group of a training engine says. Offload to host memory: with param_offload the fp32 master, with optimizer_offload or
 * offload_policy the optimizer's state and the master, which is a part of it here. The weight buffer is read in every phase and
 * stays on the device. context: ranks that share a micro-batch's rows (context parallel). experts: ranks
 * that have experts of each layer. */
struct train_engine_keys {
    bool master, state;
    int64_t context, experts;
};
/* The optimizer that they describe. ERR_INVAL names the key below section. */
int train_make_optim(struct optim_config *o, const char *section, const struct train_optim_keys *k,
                     const struct train_engine_keys *engine);
/* The schedule's index in a step; first: the step of the first update. */
static inline int64_t train_lr_index(int64_t step, int64_t first, bool zero_indexed) {
    return step - first + (zero_indexed ? 0 : 1);
}
/* After the number of steps is known: lr_warmup_steps, else the ratio (verl: when it is not positive). */
void train_optim_steps(struct optim_config *o, int64_t total_steps);
/* A line where the warm-up would be as long as the run. */
void train_optim_check_steps(struct optim_config o, int64_t total_steps, const char *section,
                             void (*say)(void *arg, const char *line), void *arg);

#endif
