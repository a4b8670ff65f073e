/* worker.h - the part of an sft run that has a device: the model, its updates and forward passes.
 *
 * In one process a call is a function call; with several ranks each has one of these (service.c), and the controller none.
 * Knows nothing of datasets, steps' order or the run's directory. */
#ifndef VERLC_SFT_WORKER_H
#define VERLC_SFT_WORKER_H

#include "run/run.h"
#include "sft/memory_plan.h"
#include "text/text.h"

struct sft_worker {
    /* Borrowed; n_ranks is how many share an update; the optimizer's steps are set before the first one. */
    struct sft_config *k;
    struct comm *comm;         /* of a rank among several, to the others; borrowed; else NULL */
    struct dev_group *devices; /* with comm: the ranks' devices */
    struct dev dev;            /* opened before sft_worker_open */
    struct sft_planned planned;
    struct model *model;
    struct trained_model *policy;
    struct tokenizer_files *tokenizer; /* for checkpoints */
};
/* Plans and opens the model. longest: tokens of the longest sample. ERR_NOMEM: it does not fit. */
int sft_worker_open(struct sft_worker *w, int64_t longest);
void sft_worker_close(struct sft_worker *w); /* a zeroed one is fine */
void sft_worker_checkpoints(struct sft_worker *w, struct checkpoints *out);

/* Samples of a step. */
struct sft_rows {
    const struct packed_seq *seqs; /* (n) */
    const int64_t *row;            /* (n) their rows in the training data, for messages */
    int64_t n;
};
/* One optimizer step on all of them, into run's metrics; run_bad_gradient, run_check_stop. */
int sft_worker_update(struct sft_worker *w, struct run *run, const struct sft_rows *rows);
/* logp: one a target. ERR_SIGNAL between two pieces. */
int sft_worker_forward(struct sft_worker *w, const struct progress *at, const struct packed_seq *seqs, int64_t n, float *logp);

#endif
