/* clock.c - see clock.h.
 * Invariant: the awake clock is read at least every TICK_NS while the process runs, so a longer gap is a stop. */
#include "base/clock.h"

#include <limits.h>
#include <pthread.h>
#include <time.h>

enum { TICK_NS = 100000000 };

static double read_clock(clockid_t id) {
    struct timespec t;
    clock_gettime(id, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
double clock_now(void) { return read_clock(CLOCK_MONOTONIC); }
double clock_wall(void) { return read_clock(CLOCK_REALTIME); }

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double awake, last; /* last: clock_now at the last reading; 0: none yet */

static void *tick(void *arg) {
    for (;;) {
        clock_awake();
        nanosleep(&(struct timespec){0, TICK_NS}, NULL);
    }
    return arg;
}

static void start_ticking(void) {
    pthread_t t;
    pthread_attr_t a;
    pthread_attr_init(&a);
    pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
    (void)pthread_create(&t, &a, tick, NULL); /* without it deadlines come late, by time that is not counted */
    pthread_attr_destroy(&a);
}

double clock_awake(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start_ticking);
    pthread_mutex_lock(&lock);
    const double now = clock_now(), gap = last > 0 ? now - last : 0;
    awake += gap < CLOCK_GAP_S ? gap : CLOCK_GAP_S;
    last = now;
    const double t = awake;
    pthread_mutex_unlock(&lock);
    return t;
}

int clock_poll_ms(double deadline) {
    const double ms = (deadline - clock_awake()) * 1e3;
    if (!(ms > 0)) return 0;
    return ms > INT_MAX ? INT_MAX : (int)ms + 1;
}
