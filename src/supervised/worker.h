/* worker.h - what a supervised run has on devices: the model; its update is a stage of a worker (ranks/worker.h), whose operations
 * the learner calls. Here is how it is opened, in this process, which may be a rank, or (worker_ranks.c) on ranks.
 *
 * Knows nothing of datasets, steps' order or the run's directory. */
#ifndef VERLC_SUPERVISED_WORKER_H
#define VERLC_SUPERVISED_WORKER_H

#include "ranks/dispatch.h"
#include "supervised/memory_plan.h"
#include "supervised/supervised.h"
#include "text/text.h"

struct supervised_worker {
    struct worker base; /* first */
    const struct supervised_program *program;
    struct supervised_worker_config k; /* set before the rest */
    struct supervised_planned planned; /* after the model */
    /* ---- in this process ---- */
    struct collective *devices; /* with base.comm: the ranks' devices */
    struct model *model;
    struct tokenizer_files *tokenizer; /* for checkpoints */
    /* ---- on ranks ---- */
    struct worker_ranks ranks;
};
/* The device is open (worker_open_local): plans and opens the model. longest: tokens of the longest sample. ERR_NOMEM: it does not
 * fit. */
int supervised_worker_open(struct supervised_worker *w, int64_t total_steps, int64_t longest);
/* Starts the ranks; they plan and open the model. run: borrowed. */
int supervised_ranks_start(struct supervised_worker *w, struct run *run);
int supervised_ranks_open(struct supervised_worker *w, int64_t total_steps, int64_t longest);
void supervised_worker_close(struct supervised_worker *w, int rc); /* rc: how the run ended; a zeroed one is fine */

/* One optimizer step on all rows: input_ids, loss_mask (i32 ragged; 1: the token is a target), row (i64, in the training data).
 * run_bad_gradient, run_check_stop. */
extern const struct worker_update supervised_update;

#endif
