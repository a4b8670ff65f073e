/* clock.h - seconds since an arbitrary start, and deadlines on them. */
#ifndef VERLC_BASE_CLOCK_H
#define VERLC_BASE_CLOCK_H

#include <stdbool.h>

double clock_now(void);  /* CLOCK_MONOTONIC, seconds */
double clock_wall(void); /* CLOCK_REALTIME, seconds since 1970 */
/* Milliseconds left until `deadline` for poll(2): 0 when past, at most INT_MAX. */
int clock_poll_ms(double deadline);

#endif
