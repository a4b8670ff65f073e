/* optimizer_keys.h - the keys of an optimizer and its schedule, the same ones in every
 * section that has an optimizer.  Private to train. */
#ifndef VERLC_TRAIN_OPTIM_H
#define VERLC_TRAIN_OPTIM_H

#include "conf/conf.h"
#include "model/optim/optimizer.h"

/* Reads SECTION.optimizer, lr, betas, ..., override_optimizer_config; the largest gradient norm
 * is the caller's.  warmup_ratio and zero_indexed_step keep their values where a section lacks the key. */
int train_read_optim(const struct conf *c, const char *section, struct optim_config *o, double *warmup_ratio,
                     bool *zero_indexed_step);
/* After the number of steps is known: lr_warmup_steps, else the ratio (verl: when it is not positive). */
void train_optim_steps(struct optim_config *o, int64_t total_steps, double warmup_ratio);

#endif
