/* phase_watchdog.h - named, timed phases of a step; signals; the watchdog.
 *
 * Invariant: no wait without a deadline.  A run is always inside a named stage;
 * whoever makes progress calls phase_beat.  When no beat comes for the deadline
 * the watchdog names the stage and ends the program with the deadline's exit
 * status: the state of the last checkpoint is what a resume continues from. */
#ifndef VERLC_RUN_PHASE_WATCHDOG_H
#define VERLC_RUN_PHASE_WATCHDOG_H

#include "track/track.h"

#include <stdbool.h>

struct phases; /* one run's clock; create one at a time */

/* deadline_s: longest silence (of clock_awake); <= 0: 600. SIGINT, SIGTERM and SIGHUP request a stop
 * (phase_stop_signal); a second SIGINT or SIGTERM ends at once. An ignored SIGHUP stays so (nohup). */
int phases_create(struct phases **out, double deadline_s);
void phases_destroy(struct phases *s); /* restores the handlers; NULL ok */
void phases_stateless(void);           /* this program saves no state: what people read of a stop promises none */
/* Stages do not nest in time keeping: begin ends the one before. seconds add up
 * per name until phases_metrics. */
void phase_begin(struct phases *s, const char *name);
void phase_end(struct phases *s);
/* fn(arg, name) at each beginning of a stage, fn(arg, NULL) at each end, by the thread that begins or ends it. One at a time. */
void phases_follow(struct phases *s, void (*fn)(void *arg, const char *name), void *arg);
/* fn(arg, name, done, total) of each phase_progress, by the thread that reports it. One at a time. */
void phases_report(struct phases *s, void (*fn)(void *arg, const char *name, int64_t done, int64_t total), void *arg);
void phase_beat(struct phases *s);            /* any thread */
double phase_seconds(const struct phases *s); /* since the stage began */
/* timing_s/NAME of everything since the last call, and resets. */
void phases_metrics(struct phases *s, struct metrics *m);
/* Where a stage reports its progress; borrowed. */
struct progress {
    struct phases *stages;
    struct track *track; /* NULL: a worker's, which has none */
    int64_t step;
};
/* done of total samples: a beat for the watchdog, and the bar's progress. */
void phase_progress(const struct progress *p, const char *phase, int64_t done, int64_t total, double tok_s);
/* ERR_SIGNAL where a signal has requested a stop that is not held. */
int phase_check_stop(void);
int phase_stop_signal(void);     /* 0, or the signal that requested a stop */
int phase_stop_due(void);        /* the same; 0 while it is held */
void phase_hold_stop(bool held); /* work under way goes on to its end */
bool phase_stop_held(void);
void phase_ask_stop(int sig);           /* as that signal would: another process has received it */
const char *phase_signal_name(int sig); /* "SIGINT", "SIGTERM", "SIGHUP" */

#endif
