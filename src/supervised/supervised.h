/* supervised.h - a trainer of sequences and a loss over their log-probs: epochs, mini-batches, gradient accumulation, ranks,
 * validation, save and resume, metrics, memory plan and time probe.
 *
 * A program brings its keys, its data and its loss as struct supervised_program. Knows no dataset and no loss.
 * Invariant: as ppo - a resumed run ends in the bits of an unbroken one, on any number of ranks. */
#ifndef VERLC_SUPERVISED_H
#define VERLC_SUPERVISED_H

#include "plan/run_plan.h"
#include "ranks/start_workers.h"
#include "supervised/config.h"
#include "text/text.h"
#include "train/update.h"

/* Rows of a dataset, or of a step. */
struct supervised_rows {
    const struct packed_seq *seqs; /* (n); their targets are what the loss reads */
    const int64_t *row;            /* (n) of a step: their rows in the training data; else NULL */
    int64_t n;
    const double *keys; /* (n) of the order of training data (data.sampler); NULL: it has none */
};
/* The data of the controller; n 0: there is none. What `own` points to is the program's. */
struct supervised_data {
    const struct tokenizer *tok; /* set before open */
    struct chat_template *chat;
    struct supervised_rows train, val;
    void *own;
};

/* The sequences of an optimizer step, in the order of its micro-batches. */
struct supervised_batch {
    const struct packed_seq *seqs;
    int64_t n, targets; /* of all micro-batches: a loss is defined over the whole */
};
enum { SUPERVISED_MAX_STATS = 16 };
struct supervised_stat {
    const char *name; /* of the metric; NULL ends the list */
    enum reduce how;
};

struct supervised_program {
    const char *name;                              /* of the command */
    const char *open;                              /* a rank's first call, of `services`: supervised_open_rank */
    const struct worker_process_service *services; /* end with a name NULL */
    int (*read)(struct supervised_config *k);      /* what else follows from keys; into k->data */
    /* Reads the data by k->data. close: after a failure too. */
    int (*open_data)(struct supervised_data *d, const struct supervised_config *k);
    void (*close_data)(struct supervised_data *d);
    /* The loss of a micro-batch (train/trained_model.h), on the rank that computes it, and its statistics: (of `stats`), zeros. */
    int (*loss)(const struct supervised_batch *b, const struct micro_loss *m, double *stats);
    const struct supervised_stat *stats;
    /* The metrics of a validation. logp: of the targets of val, in order. */
    void (*validate)(const struct supervised_rows *val, const float *logp, struct metrics *out);
};

/* Serves the program's first call on a rank; those that follow are supervised_services. */
int supervised_open_rank(const struct supervised_program *p, struct comm *comm, const struct comm_call *call,
                         struct ctl_result *out);
extern const struct worker_process_service supervised_services[]; /* end with a name NULL */

/* As those of ppo/ppo.h and ppo/plan/probed_steps.h. */
struct time_probe;
int supervised_train(const struct supervised_program *p, const struct conf *c);
int supervised_plan(const struct supervised_program *p, const struct conf *c, const struct train_plan_args *a,
                    struct run_plan *out);
int supervised_probe(const struct supervised_program *p, const struct conf *c, bool whole, struct time_probe *out);
int supervised_choices(const struct supervised_program *p, const struct conf *c, bool own_memory, struct buf *out);

#endif
