/* clock.h - seconds since an arbitrary start, and deadlines.
 *
 * Deadlines are on clock_awake, which does not count time in which this process cannot run: stopped (SIGSTOP, a
 * frozen container), on a machine that is suspended, in a VM that is paused. Work that was stopped as well has its time
 * left afterwards. */
#ifndef VERLC_BASE_CLOCK_H
#define VERLC_BASE_CLOCK_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

double clock_now(void);  /* CLOCK_MONOTONIC, seconds */
double clock_wall(void); /* CLOCK_REALTIME, seconds since 1970 */
/* Seconds in which this process could run, since an arbitrary start. Of a stop at most CLOCK_GAP_S are counted. Any
 * thread; the first call starts one that ticks. */
double clock_awake(void);
#define CLOCK_GAP_S 0.5
/* Milliseconds left until `deadline`, of clock_awake, for poll(2): 0 when past, at most INT_MAX. Wait in slices: a stop
 * moves the deadline. */
int clock_poll_ms(double deadline);

#ifdef __cplusplus
}
#endif

#endif
