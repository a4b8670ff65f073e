/* thread_pool.h - the program's one set of compute threads.
 *
 * pool_run cuts a job into `n_parts` parts and returns when all are done; the
 * caller's thread works too.  Which thread takes which part may vary, what a
 * part computes may not: parts never share an accumulator, so results do not
 * depend on the number of threads (invariant 2).
 * Every thread, the caller's included, runs with FTZ and DAZ set. */
#ifndef VERLC_BASE_POOL_H
#define VERLC_BASE_POOL_H

#include <stdint.h>

struct pool;

int pool_default_threads(void); /* VERLC_THREADS, or the CPUs that this process may use */
/* n_threads <= 0: pool_default_threads. ERR_NOMEM. */
int pool_create(struct pool **out, int n_threads);
void pool_destroy(struct pool *p); /* NULL ok */
int pool_threads(const struct pool *p);
/* fn(arg, part, thread): part in [0, n_parts), thread in [0, pool_threads). Not
 * reentrant: a part must not call pool_run on the same pool. */
void pool_run(struct pool *p, int64_t n_parts, void (*fn)(void *arg, int64_t part, int thread), void *arg);
/* The half-open range of part `part` when n items are cut into n_parts. */
static inline void pool_range(int64_t n, int64_t n_parts, int64_t part, int64_t *lo, int64_t *hi) {
    *lo = n * part / n_parts;
    *hi = n * (part + 1) / n_parts;
}
void pool_set_fp_mode(void); /* FTZ and DAZ on the calling thread */

#endif
