/* run.h - what every trainer has around its steps: directories, phases and the watchdog, tracker, checkpoints, resume,
 * early stopping, step counters, and the one way in which a run ends.
 *
 * Knows no models, no device and no data but its cursor; what differs between trainers comes as struct run_program, and
 * what a checkpoint holds in addition to the run's own as struct checkpoints.
 * Invariant: what the next step computes is a function of what a checkpoint holds, so a run that was killed and resumed
 * ends in the same bits; and only a whole step is ever saved. */
#ifndef VERLC_RUN_H
#define VERLC_RUN_H

#include "conf/conf.h"
#include "data/data.h"
#include "run/checkpoints.h"
#include "run/early_stopping.h"
#include "run/early_warnings.h"
#include "run/phase_watchdog.h"
#include "run/remote_checkpoints.h"
#include "run/resume_changes.h"
#include "track/run_lock.h"
#include "track/track.h"

/* Rollouts as traces (actor_rollout_ref.rollout.trace). */
struct run_trace {
    const char *backend, *project, *experiment; /* backend NULL: none */
    bool token2text;
    int64_t max_prompts; /* of a step; 0: all */
};

enum { RUN_EVERY_EPOCH = -2 }; /* save_freq, test_freq = after_each_epoch; the program's to replace by the steps of one */

/* The keys of a run, those of trainer.*, which the programs' tables fill; strings are borrowed from the conf. */
struct run_config {
    const char *title;            /* in front of the progress bar */
    const char *default_hdfs_dir; /* NULL: checkpoints are local alone */
    const char *project, *experiment, *default_local_dir, *resume_mode, *resume_from, *device;
    const char *const *loggers, *const *save_contents; /* of the latter hf_model alone counts */
    const char *wandb_proxy;
    int64_t n_loggers, n_save_contents, save_freq, test_freq, keep_ckpts, max_bad_steps;
    struct run_trace trace;
    int threads;
    double deadline_s;
    struct early_stop_keys early_stop;
    const char *stop_metric; /* of early stopping, where its key is not set; NULL: it must be */
    bool early_warnings;     /* warn of common failures (early_warning_rules.def) */
    bool val_before_train;   /* the program validates before the first step */
    bool val_only;           /* no steps are made, nothing is saved */
    bool validates;          /* there is something to validate on, now and then */
    bool other_model;        /* a resumed run may go on from another model than it began from */
    bool async_save;         /* writing checkpoints overlaps with the next steps: the key, then the program's plan */
    struct run_lock *lock;   /* of default_local_dir, once run_config_lock has it */
};
/* Whether a checkpoint may be saved that is not the last. */
static inline bool run_saves_midway(const struct run_config *k) {
    return k->save_freq > 0 || k->save_freq == RUN_EVERY_EPOCH || k->early_stop.enable;
}
/* The lock of the run's directory, unless k has it already; then removes what a killed run left there. Whoever writes there
 * before run_open calls this first. ERR_IO names the run that has it. */
int run_config_lock(struct run_config *k);

/* What a program brings along. Calls get ctx. */
struct run_program {
    void *ctx;
    /* Its own fields of trainer.json, in addition to the run's. */
    void (*state)(const void *ctx, json_t *trainer);
    int (*restore)(void *ctx, const json_t *trainer, const char *where);
    int (*validate)(void *ctx);                 /* into the run's metrics */
    void (*phase)(void *ctx, const char *name); /* a stage begins, for the trace of a device; NULL: none */
    const json_t *(*plan)(const void *ctx);     /* the memory plan for run.db, borrowed; NULL: none */
    json_t *(*special_tokens)(const void *ctx); /* by id, for run.db, a new reference; NULL: none */
    const char *const (*headlines)[2];          /* metrics that the bar shows, with their labels; ends with NULL */
};

/* A gradient that is not finite, kept for whoever has the run's directory. */
struct bad_gradient {
    bool met;
    struct optim_result what;
    struct buf dump;
};

struct run {
    struct run_config k; /* save_freq, test_freq and async_save are the program's to replace */
    struct run_program program;
    struct checkpoints checkpoints; /* owned; close NULL until run_ready */
    struct phases *stages;
    struct track_loggers loggers;
    struct track *track;
    struct metrics metrics; /* of the step being made */
    struct early_stop early;
    struct early_warnings warnings; /* samples and n are the program's to set, after run_open */
    struct data_sampler sampler;
    struct resume from;
    struct remote *remote;    /* NULL: none */
    struct dev_memory memory; /* at the end of the step before; the program's to set, after run_ready */
    enum { SAVE_FOREGROUND, SAVE_IDLE, SAVE_COPIED, SAVE_WRITING } saving; /* the latter three: overlapped with the next steps */
    int64_t step, total_steps, bad_steps;
    int64_t saved_step, begun_step;           /* of the newest checkpoint that is published, and that was begun */
    int64_t optim_done;                       /* optimizer steps of all parts at the end of the last whole step */
    int64_t first_step, optim_first, all_bad; /* where this process began; its steps that have met a bad gradient */
    bool begun, in_step, step_bad;            /* step_bad: it has met a gradient that is not finite */
    bool logged_stop;
    bool probing;             /* time_probe.h, or a generation of its own (generate/episodes.h): its state is discarded, so it is
                               * saved only where the probe does so */
    struct bad_gradient *bad; /* of a worker's run, which writes nothing; NULL: bad_batches/ */
    const char *program_name; /* the configuration's; borrowed */
    char *config_yaml;
    json_t *odd;   /* lines about unusual values, for run.db */
    json_t *state; /* trainer.json at the end of the last whole step, data cursor and all */
};

/* ---- opening, in this order; run_close takes a run at any of them ---- */
/* The directory and its lock (r->k.lock, k's or a new one, which the caller releases after run_close), watchdog, early stopping;
 * finds what to resume from. Stage "start" until run_ready. */
int run_open(struct run *r, const struct conf *c, const struct run_config *k, const struct run_program *p);
/* Logs what a resumed run changes, and takes the fingerprints of any run's models for its checkpoints (resume_changes.h).
 * ERR_INPUT: a model has changed that may not. */
int run_tell_changes(struct run *r, const struct conf *c, const struct resume_model *models, int n);
/* A warning before run_ready: logged now, and in run.db once there is one. run: a struct run, after run_open. */
void run_warn_early(void *run, const char *line);
int run_open_device(struct run *r, struct dev *dev); /* by the keys and the checkpoint; not kept */
/* The order of n_rows training rows, and with it the number of steps: total_training_steps, or where that is <= 0 epochs. */
int run_open_sampler(struct run *r, const struct data_sampler_args *a, int64_t epochs, int64_t total_training_steps);
/* The tracker, then the state of the checkpoint. models: of what is open now; becomes the run's, after a failure too. */
int run_ready(struct run *r, const struct conf *c, const struct checkpoints *models);
/* rc: how the run ended, or 0. Logs what it did, and closes; the error's message stays. */
void run_close(struct run *r, int rc);

/* ---- steps ---- */
/* The next step; false: there is none. */
bool run_begin_step(struct run *r);
/* A validation before the first step. */
int run_validate_first(struct run *r);
/* In an update, after a micro-batch: done of total samples. ERR_SIGNAL where a stop was requested and the weights are
 * those of the last whole step. Where an optimizer step has been taken, the update goes on to its end, and a line says so. */
int run_check_stop(struct run *r, int64_t done, int64_t total);
/* After an update: in a step that has changed a model no stage is given up for a signal, until the step has ended. */
void run_updated(struct run *r);
/* The step's metrics are complete: cursor, validation, checkpoint, record. After a failure run_fail has been called. */
int run_end_step(struct run *r);
/* After any failure in or after a step: a step half made is not counted; the last whole one is saved where it is not
 * on disk yet and may be; the message says where to go on from. Returns rc. */
int run_fail(struct run *r, int rc);
/* A checkpoint of the last whole step, where there is none of it yet. */
int run_save(struct run *r);
/* One of this step; *waits: the seconds before the next step could begin, while it is written (ckpt/async_save.h). */
int run_save_timed(struct run *r, double *waits);
/* A gradient that is not finite, so that nothing was changed: the lines that dump writes go to bad_batches/STEP.jsonl.
 * ERR_NUMERIC after trainer.max_bad_steps steps in a row. */
int run_bad_gradient(struct run *r, const struct optim_result *o, int (*dump)(void *arg, struct buf *out), void *arg);

/* Where a stage reports its progress. */
static inline struct progress run_progress(const struct run *r) { return (struct progress){r->stages, r->track, r->step}; }

#endif
