/* phase_watchdog.h - named, timed phases of a step; signals; the watchdog.
 *
 * Invariant: no wait without a deadline.  A run is always inside a named stage;
 * whoever makes progress calls stage_beat.  When no beat comes for the deadline
 * the watchdog names the stage and ends the program with the deadline's exit
 * status: the state of the last checkpoint is what a resume continues from. */
#ifndef VERLC_RUN_PHASE_WATCHDOG_H
#define VERLC_RUN_PHASE_WATCHDOG_H

#include "track/track.h"

#include <stdbool.h>

struct stages; /* one run's clock; create one at a time */

/* deadline_s: longest silence (of clock_awake); <= 0: 600. SIGINT, SIGTERM and SIGHUP request a stop
 * (stage_stop_signal); a second SIGINT or SIGTERM ends at once. An ignored SIGHUP stays so (nohup). */
int stages_create(struct stages **out, double deadline_s);
void stages_destroy(struct stages *s); /* restores the handlers; NULL ok */
/* Stages do not nest in time keeping: begin ends the one before. seconds add up
 * per name until stages_metrics. */
void stage_begin(struct stages *s, const char *name);
void stage_end(struct stages *s);
/* fn(arg, name) at each beginning of a stage, fn(arg, NULL) at each end, by the thread that begins or ends it. One at a time. */
void stages_follow(struct stages *s, void (*fn)(void *arg, const char *name), void *arg);
/* fn(arg, name, done, total) of each progress_report, by the thread that reports it. One at a time. */
void stages_tell(struct stages *s, void (*fn)(void *arg, const char *name, int64_t done, int64_t total), void *arg);
void stage_beat(struct stages *s);            /* any thread */
double stage_seconds(const struct stages *s); /* since the stage began */
/* timing_s/NAME of everything since the last call, and resets. */
void stages_metrics(struct stages *s, struct metrics *m);
/* Where a stage reports its progress; borrowed. */
struct progress {
    struct stages *stages;
    struct track *track; /* NULL: a worker's, which has none */
    int64_t step;
};
/* done of total samples: a beat for the watchdog, and the bar's progress. */
void progress_report(const struct progress *p, const char *phase, int64_t done, int64_t total, double tok_s);
/* ERR_SIGNAL where a signal has requested a stop that is not held. */
int stage_check_stop(void);
int stage_stop_signal(void);     /* 0, or the signal that requested a stop */
int stage_stop_due(void);        /* the same; 0 while it is held */
void stage_hold_stop(bool held); /* work under way goes on to its end */
bool stage_stop_held(void);
void stage_ask_stop(int sig);           /* as that signal would: another process has received it */
const char *stage_signal_name(int sig); /* "SIGINT", "SIGTERM", "SIGHUP" */

#endif
