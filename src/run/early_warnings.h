/* early_warnings.h - common failures of a run, detected in its metrics while they can still be fixed: one line when a
 * condition begins, and again only after it has cleared.
 *
 * Knows metrics alone: no batch, no clock, no tracker.
 * Invariant: what is said is a function of the metrics of the steps so far. After a resume the history starts empty. */
#ifndef VERLC_RUN_EARLY_WARNINGS_H
#define VERLC_RUN_EARLY_WARNINGS_H

#include "base/buf.h"
#include "track/track.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum early_warning_kind {
    EARLY_ABOVE,     /* the metric is above limit */
    EARLY_ABOVE_ABS, /* its absolute value is */
    EARLY_SHARE,     /* it is a count: its share of the step's samples is */
    EARLY_SAME,      /* METRIC/max is METRIC/min */
    EARLY_FALL,      /* below limit x the mean of its first values */
    EARLY_JUMP,      /* above limit x the median of its last values */
    EARLY_RISE       /* above limit x the least of its values */
};
struct early_warning { /* a row of early_warning_rules.def, which says what the members are */
    const char *name, *metric;
    enum early_warning_kind kind;
    double limit, over, least;
    int steps;
    double gain;
    const char *unless, *what, *reason, *helps;
};
/* All rows; *n: how many. */
const struct early_warning *early_warning_rows(size_t *n);
const struct early_warning *early_warning_of(const char *name);          /* NULL: none */
void early_warning_when(const struct early_warning *w, struct buf *out); /* the condition in words, appended */

enum { EARLY_FIRST = 3, EARLY_WINDOW = 10, EARLY_OVER_STEPS = 10, EARLY_MAX = 32 };
/* The history. Zeroed with its two members set it has none. */
struct early_warnings {
    int64_t samples, n; /* samples of a step, of a prompt; 0: not known */
    struct early_watch {
        double last[EARLY_WINDOW], first, lowest; /* first: sum of the first EARLY_FIRST */
        int64_t seen;
        int held, cleared; /* steps in a row in which it held; in which it did not */
        bool active;
    } watch[EARLY_MAX];
    struct early_score {
        double last[5], first, low, high;
        int64_t seen;
    } score;
};
/* Takes the metrics of the next step; calls say for each condition that begins, with its line. */
void early_warnings_add(struct early_warnings *e, const struct metrics *m,
                        void (*say)(void *arg, const struct early_warning *w, const char *line), void *arg);

#endif
