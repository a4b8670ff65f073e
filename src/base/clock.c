/* clock.c - see clock.h. */
#include "base/clock.h"

#include <limits.h>
#include <time.h>

static double read_clock(clockid_t id) {
    struct timespec t;
    clock_gettime(id, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
double clock_now(void) { return read_clock(CLOCK_MONOTONIC); }
double clock_wall(void) { return read_clock(CLOCK_REALTIME); }
int clock_poll_ms(double deadline) {
    const double ms = (deadline - clock_now()) * 1e3;
    if (!(ms > 0)) return 0;
    return ms > INT_MAX ? INT_MAX : (int)ms + 1;
}
