/* worker.h - the part of a supervised run that has a device: the model, its updates and forward passes. Its calls have two
 * implementations: in this process, and on ranks, each of which makes the first one's.
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
    /* Borrowed; n_ranks is how many share an update; the optimizer's steps are set before open_model. */
    struct supervised_config *k;
    struct run *run; /* borrowed; its metrics, progress and stop */
    const struct supervised_ops *ops;
    /* after open_device */
    const char *device; /* what the model is on, for people; borrowed */
    bool own_memory;    /* the device has memory of its own */
    /* after open_model */
    struct supervised_planned planned;
    /* ---- in this process ---- */
    struct comm *comm;         /* of a rank among several, to the others; borrowed; else NULL */
    struct dev_group *devices; /* with comm: the ranks' devices */
    struct dev dev;
    struct model *model;
    struct trained_model *policy;
    struct tokenizer_files *tokenizer; /* for checkpoints */
    /* ---- on ranks ---- */
    struct rank_group ranks;      /* n 0: this process is the only one */
    struct rank_dealing dispatch; /* of validations, to them */
};
struct supervised_ops {
    int (*open_device)(struct supervised_worker *w);
    /* Plans and opens the model: planned, and its part of checkpoints. longest: tokens of the longest sample. ERR_NOMEM: it does
     * not fit. */
    int (*open_model)(struct supervised_worker *w, int64_t longest, struct checkpoints *out);
    int (*ready)(struct supervised_worker *w); /* all is open */
    /* One optimizer step on all rows; run_bad_gradient, run_check_stop. */
    int (*update)(struct supervised_worker *w, const struct supervised_rows *rows);
    /* logp: one a target. ERR_SIGNAL between two pieces. */
    int (*forward)(struct supervised_worker *w, const struct packed_seq *seqs, int64_t n, float *logp);
    int (*memory)(struct supervised_worker *w); /* the device's memory, into the run's metrics */
};
extern const struct supervised_ops supervised_local, supervised_on_ranks;
void supervised_worker_close(struct supervised_worker *w, int rc); /* rc: how the run ended; a zeroed one is fine */

#endif
