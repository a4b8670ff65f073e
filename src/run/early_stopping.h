/* early_stopping.h - early stopping: which validation is the best so far, and whether to go
 * on (trainer.early_stopping). */
#ifndef VERLC_RUN_EARLY_STOPPING_H
#define VERLC_RUN_EARLY_STOPPING_H

#include "track/track.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* trainer.early_stopping.*; filled by the rows EARLY_STOPPING of shared_groups.def. */
struct early_stop_keys {
    bool enable;
    const char *metric;                               /* NULL: the caller's default, else the one val-core/.../mean@N */
    enum { STOP_BY_METRIC, STOP_MAX, STOP_MIN } mode; /* by metric: low is good for a loss, else high */
    int64_t patience;
    double min_delta, threshold; /* threshold NaN: none */
};

struct early_stop {
    bool enable, maximize;
    int mode;           /* of the keys */
    const char *metric; /* borrowed from the conf, or chosen; NULL until a validation has shown the names */
    char *chosen;
    int64_t patience; /* validations in a row without a new best before the run ends */
    double min_delta; /* a new best is better by more than this */
    bool has_threshold;
    double threshold; /* a validation at least this good ends the run */
    /* state */
    double best;
    int64_t best_step; /* -1: none yet */
    int64_t waited;    /* validations since then */
};

/* default_metric may be NULL: then without the key the metric is chosen at the first validation. validates: whether the run
 * has validations at all; without them early stopping is refused. */
int early_stop_read(struct early_stop *e, const struct early_stop_keys *k, const char *default_metric, bool validates);
void early_stop_free(struct early_stop *e);
/* Before any validation, what is known of its names: n samples a prompt of these data sources. ERR_INVAL: the metric names
 * another source or number of samples, or none and there are several sources. */
int early_stop_expect(const struct early_stop *e, const char *const *sources, int64_t n_sources, int64_t n);
/* With the metrics of a validation: chooses the metric where none is named. ERR_INVAL: there is none such, or several. */
int early_stop_find(struct early_stop *e, const struct metrics *m);
/* Takes the validation of a step. 1: a new best, whose checkpoint must be kept; 0: none.
 * ERR_INVAL: there is no such metric (some that exist are named), ERR_NUMERIC never: NaN is no best. */
int early_stop_look(struct early_stop *e, const struct metrics *m, int64_t step);
bool early_stop_done(const struct early_stop *e);
/* Where it is done: why the run ends after this step, to log_info. */
void early_stop_say(const struct early_stop *e, int64_t step);
/* For trainer.json. A state of another metric or mode is dropped with a note. */
json_t *early_stop_state(const struct early_stop *e);
int early_stop_restore(struct early_stop *e, const json_t *state, const char *where);
/* ROOT/best_checkpoint.json: {"step", "metric", "mode", "value", "checkpoint"}. Nothing before the first best. */
int early_stop_publish(const struct early_stop *e, const char *root);
/* The closing line's words about the best checkpoint, to log_info. */
void early_stop_report(const struct early_stop *e, const char *root, const char *part);

#endif
