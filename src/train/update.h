/* update.h - a stage of updates: epochs x mini-batches over the rows of a batch, one optimizer step each, and their
 * metrics as one number by verl's rules.
 *
 * Knows neither rows nor losses: a program gives the sequences of a mini-batch and the loss of a micro-batch.
 * Invariant: which rows are in a mini-batch together depends on their number, the seed and the step alone. */
#ifndef VERLC_TRAIN_UPDATE_H
#define VERLC_TRAIN_UPDATE_H

#include "track/track.h"
#include "train/trained_model.h"

/* ---- metrics ---- */
/* How the numbers of micro-batches become one: over those of a mini-batch, then over the optimizer steps
 * (verl workers/engine_workers.py train_mini_batch, utils/metric/utils.py). */
enum reduce {
    REDUCE_MEAN, /* mean, then mean */
    REDUCE_SUM,  /* sum, for each is a share of the mini-batch's loss; then mean */
    REDUCE_FLAT, /* mean over all micro-batches of the stage */
    REDUCE_MIN,  /* the least, the greatest of all */
    REDUCE_MAX,
};
struct update_metric {
    char name[112];
    enum reduce how;
    double mini, sum; /* of the open mini-batch; of what is closed, or the extreme */
    int64_t n_mini, n;
};
struct update_metrics { /* a zeroed struct is empty */
    struct update_metric *v;
    int64_t n, cap;
};
void update_metric_add(struct update_metrics *m, const char *name, enum reduce how, double value);
/* Reduces m into out, and empties m. */
void update_metrics_set(struct update_metrics *m, struct metrics *out);

/* ---- the stage ---- */
struct update {
    struct trained_model *model;
    const struct optim_config *optim;
    double lr;
    int64_t n, mini_batch, epochs; /* rows, rows of a mini-batch, passes over the rows */
    const int64_t *len;            /* (n) tokens of each row */
    struct micro_batch_limits cut;
    bool shuffle; /* another order each epoch, a function of seed and step */
    uint64_t seed;
    int64_t step;
    struct update_metrics *metrics;
    const char *router;     /* what names of the routers' metrics begin with: "actor/router" */
    const char *mtp_metric; /* of the MTP layer's loss, where it has one */
    void *ctx;
    /* Fills m, less its cut, for rows[n] in this order; drop frees what it took. */
    int (*take)(void *ctx, const int64_t *rows, int64_t n, struct mini_batch *m);
    void (*drop)(void *ctx);
};
struct update_result {
    int64_t n_steps, n_tokens; /* optimizer steps that changed the weights; tokens forwarded */
    double grad_norm;          /* mean over these steps */
    double flops;              /* a second, mean over these steps (perf_metrics.h) */
    bool bad;                  /* a gradient was not finite: nothing was changed by its mini-batch, and the stage ended there */
    struct optim_result why;   /* bad: what is not finite */
    int64_t *bad_rows, n_bad;  /* bad: the rows of that mini-batch, in the order of its micro-batches; the caller's to free */
};
int update_run(const struct update *u, struct update_result *r); /* r->bad_rows is NULL after an error */

#endif
