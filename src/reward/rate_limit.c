/* rate_limit.c - when the next call may be sent: verl's rate_limited manager. A token bucket of requests, and one of an
 * estimate of their tokens, each filled at a steady rate up to what one second brings, as verl's AsyncTokenBucket.
 *
 * verl limits each of its workers; here one place sends for all processes, so the limits are those of the run.
 * Invariant: in t seconds at most rate x (t + 1 s) leave a bucket, or one request where that is more. */
#include "reward/reward_int.h"

#include <math.h>

/* Seconds until n can be taken, or *taken: they are, and the caller waits so long. What is more than the bucket ever
 * holds is taken at once as a debt. */
static double take(struct reward__bucket *b, double n, double now, bool *taken) {
    const double most = b->rate;
    b->level = b->started ? fmin(most, b->level + (now - b->at) * b->rate) : most;
    b->started = true;
    b->at = now;
    *taken = b->level >= n || n > most;
    const double wait = fmax(0, (n - b->level) / b->rate);
    if (*taken) b->level -= n;
    return wait;
}

double reward__rate_wait(struct reward__rate *r, double now) {
    while (r->passed < REWARD__N_BUCKETS && now >= r->not_before) {
        struct reward__bucket *b = &r->bucket[r->passed];
        bool taken = true;
        if (b->rate > 0) r->not_before = now + take(b, b->cost, now, &taken);
        r->passed += taken;
    }
    return fmax(0, r->not_before - now);
}

void reward__rate_sent(struct reward__rate *r) { r->passed = 0; }
