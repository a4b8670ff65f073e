/* sft_loss.h - the loss of sft: the mean of -log p over the batch's target tokens (verl sft_loss), defined over the whole batch, so
 * that micro-batches do not change it. */
#ifndef VERLC_SFT_SFT_LOSS_H
#define VERLC_SFT_SFT_LOSS_H

#include "supervised/supervised.h"

/* As the members loss and validate of struct supervised_program: train/loss into stats[0], val/loss into out. */
int sft_loss(const struct supervised_batch *b, const struct micro_loss *m, double *stats);
void sft_loss_validate(const struct supervised_rows *val, const float *logp, struct metrics *out);

#endif
