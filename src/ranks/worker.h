/* worker.h - what a program has on devices, and the one place where a stage reaches a device: the table of a worker's operations.
 *
 * It has two implementations: the device of this process (local_worker.c), and ranks, seen from their controller (dispatch.c).
 * Which one is chosen once, when the worker is opened. A rank's process has a local worker too, and does the controller's calls by
 * its operations (worker_calls.h), so a stage is written once, for one rank and many. Knows neither losses nor data.
 * Invariant: results depend neither on the implementation nor on the number of ranks. */
#ifndef VERLC_RANKS_WORKER_H
#define VERLC_RANKS_WORKER_H

#include "data/data.h"
#include "engine/engine.h"
#include "run/checkpoints.h"
#include "run/run.h"
#include "train/perf_metrics.h"
#include "train/trained_model.h"
#include "train/update.h"

/* Models of a worker by role; the first is the policy, which generates. Of a reinforcement learner: enum verlc_role. */
enum { WORKER_ROLES = 4, WORKER_POLICY = 0, WORKER_IDLE_PASSES = 2 };

struct worker;

/* ---- arguments ---- */
/* A generation. */
struct worker_generation {
    int (*done)(void *arg, const struct engine_sample *s); /* as engine_config's: each sample that ends */
    void *arg;                                             /* of done, and of pass_done */
    /* Forward passes over samples of this generation by idle ranks, which have nothing left to generate (idle_ranks.h). */
    struct worker_idle_pass {
        int role;
        const char *phase; /* as worker_pass' */
        bool value;        /* values; else log-probs */
    } passes[WORKER_IDLE_PASSES];
    int n_passes;
    int (*pass_done)(void *arg, int pass, int64_t tag, const float *x, int64_t n); /* x: one a target of the sequence */
};

/* A forward pass of a role. */
struct worker_pass {
    int role;
    const char *phase; /* under which progress is reported to `at` */
    const struct progress *at;
    const struct packed_seq *seqs; /* (n) */
    int64_t n;
    int64_t k;     /* tokens of out's list */
    int64_t words; /* of a token's routes: router_replay_words */
    struct forward_out out;
};

/* An update of a model: a stage that runs where the device is; of several ranks on each, with the same batch. */
struct worker_update {
    const char *name; /* of the stage, "update_actor" */
    int role;
    /* Columns that it may read, of numbers, and those that it adds; each ends with NULL. It sees no other ones, on one rank as on
     * several. */
    const char *const *reads, *const *writes;
    /* In the process that has the device: metrics go to run's, a stop is run_check_stop's. */
    int (*run)(struct worker *w, struct run *run, struct batch *b);
};

/* ---- the table ---- */
struct worker_ops {
    /* Before a generation: ranks that only generate get the trainer's weights, unless they have them. */
    int (*send_weights)(struct worker *w);
    /* Generation: between begin and end requests may be added at any time. The model's end tokens end them, too. A response that
     * continues goes to the rank that had the request of its `user` before, where its K and V are. */
    int (*generate_begin)(struct worker *w, const struct worker_generation *g); /* g: copied */
    int (*generate_add)(struct worker *w, const struct engine_request *q);
    int (*generate_step)(struct worker *w, bool wait); /* 1: work remains. wait: for ranks, briefly */
    int (*generate_interrupt)(struct worker *w);       /* engine_interrupt */
    struct engine_stats (*generate_stats)(struct worker *w);
    void (*generate_end)(struct worker *w); /* none is under way: nothing happens */
    /* A sample that has ended (its tokens, copied), for the generation's passes. Where no rank becomes idle nothing happens. */
    void (*idle_add)(struct worker *w, const struct engine_sample *s, int64_t tag);

    int (*forward)(struct worker *w, const struct worker_pass *p); /* ERR_SIGNAL between two pieces */
    /* The columns that u writes replace b's. With ranks of its own (overlapped) it still runs when this returns. */
    int (*update)(struct worker *w, const struct worker_update *u, struct run *run, struct batch *b);
    int (*join)(struct worker *w); /* waits for such an update, and takes its metrics */

    int (*ready)(struct worker *w, struct run *run); /* all is open: from here on perf/device_allocations counts */
    int (*memory)(struct worker *w, struct run *run, const char *prefix); /* train_memory_metrics; of several ranks the largest */
    void (*checkpoints)(struct worker *w, struct checkpoints *out);       /* its models' state; closed before the worker */
    /* The policy as a model directory, which is there and empty; an adapter is merged. Of several ranks the first writes it. */
    int (*export_policy)(struct worker *w, const char *dir);
    /* Begins a trace of the device, or with a path ends it and writes it there; rank N's next to it, as _rank_N. */
    int (*trace)(struct worker *w, const char *path);
};
extern const struct worker_ops worker_local;

/* ---- the worker ---- */
struct worker_ranks;
struct external_engine;
struct worker { /* the first member of a program's own */
    const struct worker_ops *ops;
    struct worker_ranks *ranks;       /* of dispatch.c; else NULL */
    struct external_engine *external; /* generates in this worker's place; NULL: nothing does */

    /* what it is */
    int n_ranks;        /* of a rank: of its pool */
    const char *device; /* what the models are on, for people; borrowed */
    bool own_memory;    /* the device has memory of its own */
    bool has[WORKER_ROLES];
    bool collective[WORKER_ROLES]; /* a pass is all ranks' common work (trained_model_end) */
    int context[WORKER_ROLES];     /* consecutive ranks that share the rows of a pass (context_parallel.h); 0, 1: none */
    bool disaggregated;            /* generation has ranks of its own, and is overlapped with passes and updates */
    int64_t vocab;                 /* of the policy; of a local worker */
    int64_t tensor_parallel;       /* ranks that generate together; 0, 1: each alone */
    struct model_flops flops;      /* of the policy; peak: of a device */
    /* Overlapped work: called again and again while the trainer's ranks are waited for; NULL: none. Its error is the wait's. */
    struct worker_overlapped {
        void *arg;
        int (*step)(void *arg);
    } overlapped;

    /* a local worker's: all that its operations need */
    struct dev dev;
    struct comm *comm; /* of a rank, to the others of its pool; borrowed; else NULL */
    struct worker_role {
        struct trained_model *model;   /* NULL: a worker without it */
        struct micro_batch_limits cut; /* of its passes */
        float temperature;
    } role[WORKER_ROLES];
    struct ckpt_part parts[CHECKPOINTS_MAX_PARTS];
    int n_parts;
    struct {
        struct model *model;
        const struct tokenizer *tok;
        struct decoder *decoder;
        void *gather;        /* where a sharded policy becomes whole; NULL: it is, or never becomes so */
        struct model *split; /* the policy split over ranks that generate together (tensor_parallel.h); NULL: each has it whole */
        bool reports;        /* of such ranks the first: its samples count, those of the others are compared */
        bool no_prefix_cache, longest_first;
        struct engine *engine; /* of the generation under way */
    } generator;
};
/* The device is open: a worker of this process, alone or (comm) a rank of several. What is opened later is set by the program. */
void worker_open_local(struct worker *w, struct comm *comm);
/* A local worker has this role; r: copied, its model is the program's. */
void worker_set_role(struct worker *w, int role, const struct worker_role *r);
/* By a stage that runs where the device is: u->model is the role's. r->flops as a share of the device's peak: MFU. */
int worker_update_model(struct worker *w, int role, struct update *u, struct update_result *r);

#endif
