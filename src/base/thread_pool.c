/* thread_pool.c - threads that spin briefly, then sleep on a futex.
 *
 * One 64-bit word holds the job's number (odd while it is open) and how many
 * workers are inside.  A worker enters by a compare-and-swap on an open job; the
 * caller closes the job when all parts are dispatched and waits only for those
 * that are inside.  So a worker that sleeps, or that the system does not run,
 * costs nothing: the caller does its parts. */
#include "base/thread_pool.h"

#include "base/buf.h"
#include "base/err.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { SPINS = 4000, YIELD_AFTER = 500, MAX_THREADS = 256 };
#define JOB ((uint64_t)1 << 32) /* the job's number is in the upper half of `state` */

struct pool {
    _Alignas(64) _Atomic uint64_t state;
    _Alignas(64) _Atomic int64_t next;    /* next part to hand out */
    _Alignas(64) _Atomic uint32_t opened; /* bumped with every job; sleepers wait on it */
    _Alignas(64) _Atomic int sleepers;
    _Atomic int stop;
    void (*fn)(void *, int64_t, int); /* these three change only while closed and empty */
    void *arg;
    int64_t n_parts;
    int n_threads;
    pthread_t threads[MAX_THREADS];
    struct pool_worker {
        struct pool *pool;
        int id;
    } workers[MAX_THREADS];
};

static inline void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

void pool_set_fp_mode(void) {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040u);
#endif
}

static void take_parts(struct pool *p, int thread) {
    for (;;) {
        const int64_t i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (i >= p->n_parts) return;
        p->fn(p->arg, i, thread);
    }
}

/* Enters the open job, if there is one that this worker has not been in. */
static bool enter(struct pool *p, uint64_t *seen) {
    uint64_t s = atomic_load_explicit(&p->state, memory_order_acquire);
    while ((s / JOB) % 2 == 1 && s / JOB != *seen) {
        if (atomic_compare_exchange_weak_explicit(&p->state, &s, s + 1, memory_order_acquire, memory_order_acquire)) {
            *seen = s / JOB;
            return true;
        }
    }
    return false;
}

static void *worker_main(void *v) {
    struct pool_worker *w = v;
    struct pool *p = w->pool;
    uint64_t seen = 0;
    pool_set_fp_mode();
    for (int idle = 0;;) {
        const uint32_t opened = atomic_load(&p->opened);
        if (atomic_load_explicit(&p->stop, memory_order_acquire)) return NULL;
        if (enter(p, &seen)) {
            take_parts(p, w->id);
            atomic_fetch_sub_explicit(&p->state, 1, memory_order_release);
            idle = 0;
        } else if (++idle < SPINS) {
            relax();
        } else {
            atomic_fetch_add(&p->sleepers, 1);
            syscall(SYS_futex, &p->opened, FUTEX_WAIT_PRIVATE, opened, NULL, NULL, 0);
            atomic_fetch_sub(&p->sleepers, 1);
            idle = 0;
        }
    }
}

int pool_default_threads(void) {
    const char *s = getenv("VERLC_THREADS");
    if (s && atoi(s) > 0) return atoi(s);
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

int pool_create(struct pool **out, int n_threads) {
    if (n_threads <= 0) n_threads = pool_default_threads();
    if (n_threads > MAX_THREADS) n_threads = MAX_THREADS;
    struct pool *p = aligned_alloc(64, (sizeof *p + 63) & ~(size_t)63);
    if (!p) FAIL(ERR_NOMEM, "thread pool: out of memory");
    memset(p, 0, sizeof *p);
    p->n_threads = 1;
    pool_set_fp_mode();
    for (int i = 1; i < n_threads; i++) {
        p->workers[i] = (struct pool_worker){p, i};
        const int e = pthread_create(&p->threads[i], NULL, worker_main, &p->workers[i]);
        if (e != 0) {
            pool_destroy(p);
            FAIL(ERR_NOMEM, "cannot start thread %d of %d: %s", i, n_threads, strerror(e));
        }
        p->n_threads = i + 1;
    }
    *out = p;
    return 0;
}

static void wake(struct pool *p) {
    atomic_fetch_add(&p->opened, 1);
    if (atomic_load(&p->sleepers) > 0) syscall(SYS_futex, &p->opened, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void pool_destroy(struct pool *p) {
    if (!p) return;
    atomic_store(&p->stop, 1);
    wake(p);
    for (int i = 1; i < p->n_threads; i++) pthread_join(p->threads[i], NULL);
    free(p);
}

int pool_threads(const struct pool *p) { return p->n_threads; }

/* No worker may enter any more; waits for those inside. */
static void close_job(struct pool *p) {
    atomic_fetch_add_explicit(&p->state, JOB, memory_order_acq_rel);
    for (int k = 0; atomic_load_explicit(&p->state, memory_order_acquire) % JOB != 0; k++) {
        if (k < YIELD_AFTER) relax();
        else sched_yield(); /* more threads than processors: let the worker finish */
    }
}

void pool_run(struct pool *p, int64_t n_parts, void (*fn)(void *, int64_t, int), void *arg) {
    if (p->n_threads == 1 || n_parts <= 1) {
        for (int64_t i = 0; i < n_parts; i++) fn(arg, i, 0);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    p->n_parts = n_parts;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&p->state, JOB, memory_order_release); /* opens */
    wake(p);
    take_parts(p, 0);
    close_job(p);
}
