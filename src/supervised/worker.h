/* worker.h - the part of a supervised run that has a device: the model, its updates and forward passes; and the calls that the
 * learner makes of it, with two implementations: in this process, and on ranks that each have one.
 *
 * Knows nothing of datasets, steps' order or the run's directory. */
#ifndef VERLC_SUPERVISED_WORKER_H
#define VERLC_SUPERVISED_WORKER_H

#include "ranks/dispatch.h"
#include "run/run.h"
#include "supervised/memory_plan.h"
#include "supervised/supervised.h"
#include "text/text.h"

struct supervised_worker {
    const struct supervised_program *program;
    /* Borrowed; n_ranks is how many share an update; the optimizer's steps are set before the first one. */
    struct supervised_config *k;
    struct comm *comm;         /* of a rank among several, to the others; borrowed; else NULL */
    struct dev_group *devices; /* with comm: the ranks' devices */
    struct dev dev;            /* opened before supervised_worker_open; of a controller of ranks: none */
    struct supervised_planned planned;
    struct model *model;
    struct trained_model *policy;
    struct tokenizer_files *tokenizer; /* for checkpoints */
};
/* Plans and opens the model. longest: tokens of the longest sample. ERR_NOMEM: it does not fit. */
int supervised_worker_open(struct supervised_worker *w, int64_t longest);
void supervised_worker_close(struct supervised_worker *w); /* a zeroed one is fine */
void supervised_worker_checkpoints(struct supervised_worker *w, struct checkpoints *out);
/* One optimizer step on all rows, into run's metrics; run_bad_gradient, run_check_stop. */
int supervised_worker_update(struct supervised_worker *w, struct run *run, const struct supervised_rows *rows);
/* logp: one a target. ERR_SIGNAL between two pieces. */
int supervised_worker_forward(struct supervised_worker *w, const struct progress *at, const struct packed_seq *seqs, int64_t n,
                              float *logp);

/* ---- the learner's calls ---- */
struct supervised_workers {
    const struct supervised_ops *ops; /* supervised_local_ops, or supervised_ranks_ops where k->n_ranks > 1 */
    struct run *run;                  /* borrowed */
    struct supervised_worker own;     /* ranks: its program, configuration and plan alone */
    struct rank_group ranks;          /* zeros: this process is the only one */
    struct rank_dealing dispatch;     /* of validations, to them */
};
struct supervised_ops {
    int (*open_device)(struct supervised_workers *w);
    int (*open_model)(struct supervised_workers *w, int64_t longest, struct checkpoints *out); /* fills own.planned */
    int (*ready)(struct supervised_workers *w);                                                /* all is open */
    const char *(*device)(const struct supervised_workers *w, bool *own_memory);
    void (*phase)(struct supervised_workers *w, const char *name); /* a stage begins, for the trace of a device */
    int (*update)(struct supervised_workers *w, const struct supervised_rows *rows);
    int (*forward)(struct supervised_workers *w, const struct packed_seq *seqs, int64_t n, float *logp);
    int (*memory)(struct supervised_workers *w); /* the device's memory, into the run's metrics */
};
extern const struct supervised_ops supervised_local_ops, supervised_ranks_ops;

#endif
