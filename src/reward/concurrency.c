/* concurrency.c - how many calls of a scorer run at once. A def runs one call in each process, an async def max_concurrent of them
 * (reward__pool_size); with a limit over all processes (max_in_flight, and the rates of rate_limit.c) calls wait here until
 * they may be sent.
 * Knows nothing of replies.
 * Invariant: a call that waits is sent once, in order, or dropped. */
#include "reward/reward_int.h"

#include "helper/helper.h"

#include <math.h>
#include <stdlib.h>

enum { DEFAULT_CONCURRENT = 256, TRIES = 8 }; /* TRIES: processes that a sample may end before it is a crash */

struct helper_pool_args reward__pool_size(const struct reward_args *a, bool is_async) {
    const int64_t concurrent = a->max_concurrent > 0 ? a->max_concurrent : DEFAULT_CONCURRENT;
    return (struct helper_pool_args){
        .n = a->n_workers > 0 ? a->n_workers : 1, .n_calls = is_async ? concurrent : 1, .n_tries = TRIES};
}

void reward__limit_open(struct reward__limit *l, const struct reward_args *a) {
    l->max_in_flight = a->max_in_flight;
    l->rate.bucket[0] = (struct reward__bucket){.rate = a->max_rpm / 60, .cost = 1};
    l->rate.bucket[1] = (struct reward__bucket){.rate = a->max_tpm / 60, .cost = a->tokens_per_request};
}

void reward__limit_hold(struct reward__limit *l, json_t *call, struct reward__sample s) {
    if (l->head == l->n) l->head = l->n = 0;
    xgrow((void **)&l->held, &l->cap, l->n + 1, sizeof *l->held);
    l->held[l->n++] = (struct reward__held){call, s};
}

bool reward__limit_next(struct reward__limit *l, int64_t in_flight, double now, struct reward__held *next, double *wait_s) {
    *wait_s = INFINITY;
    if (l->head == l->n) return false;
    const double wait = reward__rate_wait(&l->rate, now);
    if (wait > 0) *wait_s = wait;
    if (wait > 0 || in_flight >= l->max_in_flight) return false;
    reward__rate_sent(&l->rate);
    *next = l->held[l->head++];
    return true;
}

void reward__limit_drop(struct reward__limit *l) {
    for (; l->head < l->n; l->head++) json_decref(l->held[l->head].call);
    reward__rate_sent(&l->rate);
}
