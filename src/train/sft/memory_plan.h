/* memory_plan.h - the memory of an sft run before its weights are read: which micro-batches, what is recomputed; refused with
 * the nearest change that fits.  Private to train. */
#ifndef VERLC_TRAIN_SFT_MEMORY_PLAN_H
#define VERLC_TRAIN_SFT_MEMORY_PLAN_H

#include "train/run/trained_model.h"
#include "train/sft/config.h"

#include "base/buf.h"

/* Fills *a but its model, from the model's shape and the longest sample, prints what it chose, and reserves what the ops
 * need. Where the plan may choose, a GPU's free memory is used, and of a CPU no more than it must be. Turns offload off
 * in k where the device's memory is the host's. *plan_json: its rows for run.db; the caller owns it. ERR_NOMEM: it does not
 * fit. */
int sft_memory_plan(struct sft_config *k, struct dev *dev, const struct model_config *c, int64_t longest,
                    struct trained_model_args *a, json_t **plan_json);
/* The same as a table, appended to b, with data.max_length as the longest sample; *fits: ERR_NOMEM is no error here. */
int sft_memory_plan_print(struct sft_config *k, struct dev *dev, const struct model_config *c, struct buf *b, bool *fits);

#endif
