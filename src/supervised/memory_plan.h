/* memory_plan.h - the memory of a supervised run before its weights are read: which micro-batches, what is recomputed; refused with
 * the nearest change that fits. */
#ifndef VERLC_SUPERVISED_MEMORY_PLAN_H
#define VERLC_SUPERVISED_MEMORY_PLAN_H

#include "plan/run_plan.h"
#include "supervised/config.h"
#include "train/trained_model.h"

#include "base/buf.h"

/* What a plan decides for the run. */
struct supervised_planned {
    json_t *json;    /* its rows for run.db */
    char *text;      /* a line for people: what it chose */
    bool async_save; /* asynchronous checkpoints: written during the next steps */
};
void supervised_planned_free(struct supervised_planned *p); /* a zeroed one is fine */

/* Fills *a but its model, from the model's shape and the longest sample, and reserves what the ops need. Where the plan may
 * choose, a GPU's free memory is used, and of a CPU no more than it must be. Turns offload off in k where the device's memory is
 * the host's. ERR_NOMEM: it does not fit. */
int supervised_memory_plan(struct supervised_worker_config *k, struct dev *dev, const struct model_config *c, int64_t longest,
                           struct trained_model_args *a, struct supervised_planned *out);
/* The same as a table, with data.max_length as the longest sample, of one of k->ranks.n; that it does not fit is no error here. */
int supervised_memory_plan_print(struct supervised_worker_config *k, struct dev *dev, const struct model_config *c,
                                 struct run_plan *out);

#endif
