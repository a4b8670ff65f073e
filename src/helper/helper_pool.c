/* helper_pool.c - several helpers of one kind behind one queue, without threads.
 * A helper serves one request at a time, and the next one may wait in its socket while calls are short; or up to n_calls
 * at once, where the module keeps their deadlines itself.  Results come in the order of finishing.
 *
 * What a dead process was serving is sent again, to a new process.  Which request ended it is known of a helper that
 * serves one at a time: the oldest.  Where many were in flight they are sent again with fewer and fewer others in flight, until
 * the one that ends its process is alone.
 * Invariant: every ticket yields exactly one result, unless the pool is cancelled. */
#include "helper/helper_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WORKERS = 256, SLICE_MS = 100, SHRINK = 8, MAX_FAILED_STARTS = 10, QUEUED_IN_ADVANCE = 2 };
#define GRACE_S 5.   /* for a module that keeps deadlines itself to say that one has passed */
#define SHORT_S 0.01 /* a call after which the next is sent in advance: waiting behind one costs no more than this */
#define NO_MORE INT64_MAX

struct job {
    int64_t ticket;
    json_t *request;
    double timeout_s;
    int64_t lost;          /* processes that died with it and may have died of it */
    int64_t max_in_flight; /* most requests in flight in a process that serves it */
    int worker;            /* the only process that may serve it; -1: any */
};
struct queue { /* FIFO: job[head .. n) */
    struct job *job;
    int64_t head, n, cap;
};
struct call { /* a request in flight */
    struct job job;
    int64_t id;
};
struct worker {
    struct helper *h;
    struct call *calls; /* oldest first */
    int64_t n_calls, cap_calls;
    int64_t max_in_flight;    /* least of the calls' */
    bool again_calls;         /* its calls are those of processes that died */
    bool brief;               /* its last call was a short one */
    double timeout_s;         /* the longest of the calls' */
    double deadline;          /* for its next answer; 0: the helper is still starting */
    double since;             /* when the oldest call became the oldest */
    double polled_at;         /* when it was last stepped */
    struct queue jobs, again; /* that no other may serve; again: of processes that died */
};
struct helper_pool {
    int n;
    int64_t n_calls; /* most calls of a worker */
    int64_t n_tries; /* of one request */
    struct worker *w;
    struct queue jobs, again;   /* that any may serve */
    struct helper_result *done; /* done[done_head .. n_done) */
    int64_t done_head, n_done, cap_done;
    int64_t next_ticket, running;
    int64_t n_failed; /* starts that failed since the last reply */
};

static bool waits(const struct queue *q) { return q->head < q->n; }

static void push(struct queue *q, const struct job *j) {
    if (!waits(q)) q->head = q->n = 0;
    xgrow((void **)&q->job, &q->cap, q->n + 1, sizeof *q->job);
    q->job[q->n++] = *j;
}

static void push_again(struct helper_pool *p, const struct job *j) { push(j->worker < 0 ? &p->again : &p->w[j->worker].again, j); }

static void drop_jobs(struct queue *q) {
    for (; waits(q); q->head++) json_decref(q->job[q->head].request);
}

int helper_pool_create(struct helper_pool **out, const struct helper_args *args, const struct helper_pool_args *pool) {
    if (pool->n < 1 || pool->n > MAX_WORKERS)
        FAIL(ERR_INVAL, "helper %s: %d processes requested; 1 to %d are possible", args->module, pool->n, MAX_WORKERS);
    struct helper_pool *p = xcalloc(1, sizeof *p);
    p->n_calls = pool->n_calls > 0 ? pool->n_calls : 1;
    p->n_tries = pool->n_tries > 0 ? pool->n_tries : 1;
    p->w = xcalloc((size_t)pool->n, sizeof *p->w);
    for (; p->n < pool->n; p->n++) {
        const int rc = helper_create(&p->w[p->n].h, args);
        if (rc < 0) {
            helper_pool_destroy(p);
            return err_pass(rc, __FILE__, __LINE__);
        }
    }
    *out = p;
    return 0;
}

void helper_pool_cancel(struct helper_pool *p) {
    for (int i = 0; i < p->n; i++) {
        struct worker *w = &p->w[i];
        if (w->n_calls > 0) helper__kill(w->h);
        for (int64_t k = 0; k < w->n_calls; k++) json_decref(w->calls[k].job.request);
        w->n_calls = 0;
        drop_jobs(&w->jobs);
        drop_jobs(&w->again);
    }
    drop_jobs(&p->jobs);
    drop_jobs(&p->again);
    for (int64_t i = p->done_head; i < p->n_done; i++) helper_result_free(&p->done[i]);
    p->done_head = p->n_done = p->running = 0;
}

void helper_pool_destroy(struct helper_pool *p) {
    if (!p) return;
    helper_pool_cancel(p);
    for (int i = 0; i < p->n; i++) {
        helper_destroy(p->w[i].h);
        free(p->w[i].calls);
        free(p->w[i].jobs.job);
        free(p->w[i].again.job);
    }
    free(p->w);
    free(p->jobs.job);
    free(p->again.job);
    free(p->done);
    free(p);
}

void helper_result_free(struct helper_result *r) {
    json_decref(r->reply);
    free(r->error);
    *r = (struct helper_result){0};
}

/* rc 0 with the reply (taken over), or the thread's error. */
static void finish(struct helper_pool *p, const struct job *j, int rc, json_t *reply) {
    char *error = NULL;
    if (rc < 0)
        error =
            j->lost > 1 ? xasprintf("%s (so did %lld processes before it)", err_msg(), (long long)j->lost - 1) : xstrdup(err_msg());
    xgrow((void **)&p->done, &p->cap_done, p->n_done + 1, sizeof *p->done);
    p->done[p->n_done++] = (struct helper_result){.ticket = j->ticket, .rc = rc, .reply = rc == 0 ? reply : NULL, .error = error};
    json_decref(j->request);
}

/* ---- lost processes ---- */

/* One of n calls was in a process that died and may have died of it: another try, or the thread's error as its result. */
static void try_again(struct helper_pool *p, struct job *j, int64_t n) {
    if (++j->lost >= p->n_tries && n == 1) {
        finish(p, j, ERR_HELPER, NULL);
        return;
    }
    j->max_in_flight = n / SHRINK > 1 && j->lost < p->n_tries ? n / SHRINK : 1;
    push_again(p, j);
}

/* The process has exited (the thread's error says why), and its calls are lost. served: it had been up. */
static void lose_calls(struct helper_pool *p, struct worker *w, int rc, bool served) {
    const bool serial = p->n_calls == 1;
    const int64_t n = w->n_calls;
    const bool hopeless = !served && (rc != ERR_HELPER || ++p->n_failed >= MAX_FAILED_STARTS);
    w->n_calls = 0;
    p->running -= n;
    for (int64_t i = 0; i < n; i++) {
        struct job *j = &w->calls[i].job;
        if (p->n_tries == 1 || hopeless) {
            finish(p, j, rc, NULL);
        } else if (!served || (serial && i > 0)) { /* it was not looked at */
            push_again(p, j);
        } else if (rc == ERR_HELPER) {
            try_again(p, j, serial ? 1 : n);
        } else { /* it did not answer in time */
            finish(p, j, rc, NULL);
        }
    }
}

/* ---- to the helpers ---- */

static int64_t room(const struct helper_pool *p, const struct worker *w) {
    int64_t most = p->n_calls == 1 && w->brief && p->n_tries > 1 ? QUEUED_IN_ADVANCE : p->n_calls;
    if (w->n_calls > 0 && w->max_in_flight < most) most = w->max_in_flight;
    return most - w->n_calls;
}

/* The queue whose next job may go to w; NULL: none. Jobs of dead processes and others do not share one. */
static struct queue *queue_for(struct helper_pool *p, struct worker *w) {
    struct queue *again = waits(&w->again) ? &w->again : &p->again, *jobs = waits(&w->jobs) ? &w->jobs : &p->jobs;
    if (room(p, w) <= 0) return NULL;
    if (waits(again) && (w->n_calls == 0 || (w->again_calls && again->job[again->head].max_in_flight > w->n_calls))) return again;
    if (waits(jobs) && (w->n_calls == 0 || !w->again_calls)) return jobs;
    return NULL;
}

/* The worker with the fewest calls of those that can take one; NULL: none can. */
static struct worker *freest(struct helper_pool *p) {
    struct worker *best = NULL;
    for (int i = 0; i < p->n; i++)
        if ((!best || p->w[i].n_calls < best->n_calls) && queue_for(p, &p->w[i])) best = &p->w[i];
    return best;
}

/* Of a worker's next answer. */
static double timeout_of(const struct helper_pool *p, const struct worker *w) {
    return p->n_calls == 1 && w->n_calls > 0 ? w->calls[0].job.timeout_s : w->timeout_s;
}

/* A worker's next answer is due from now on. */
static void arm(const struct helper_pool *p, struct worker *w) {
    w->since = clock_awake();
    w->deadline = helper__ready(w->h) ? w->since + timeout_of(p, w) + (p->n_calls > 1 ? GRACE_S : 0) : 0;
}

static void dispatch_to(struct helper_pool *p, struct worker *w) {
    struct queue *q = queue_for(p, w);
    struct job *j = &q->job[q->head++];
    int64_t id;
    const int rc = helper__send(w->h, j->request, p->n_calls > 1 ? j->timeout_s : 0, &id);
    if (rc < 0) {
        finish(p, j, rc, NULL);
        if (helper_pending(w->h) == 0) lose_calls(p, w, rc, true);
        return;
    }
    if (w->n_calls == 0) {
        w->max_in_flight = NO_MORE;
        w->timeout_s = 0;
        w->again_calls = q == &p->again || q == &w->again;
    }
    if (j->max_in_flight < w->max_in_flight) w->max_in_flight = j->max_in_flight;
    if (j->timeout_s > w->timeout_s) w->timeout_s = j->timeout_s;
    xgrow((void **)&w->calls, &w->cap_calls, w->n_calls + 1, sizeof *w->calls);
    w->calls[w->n_calls++] = (struct call){*j, id};
    if (w->n_calls == 1) arm(p, w);
    p->running++;
}

static void dispatch(struct helper_pool *p) {
    for (struct worker *w; (w = freest(p));) dispatch_to(p, w);
}

/* ---- from the helpers ---- */

static void take(struct helper_pool *p, struct worker *w, const struct helper__reply *r) {
    int64_t i = 0;
    while (i < w->n_calls && w->calls[i].id != r->id) i++;
    CHECK(i < w->n_calls); /* helper__step gives answers to pending requests only */
    finish(p, &w->calls[i].job, r->rc, r->value);
    w->n_calls--;
    memmove(w->calls + i, w->calls + i + 1, (size_t)(w->n_calls - i) * sizeof *w->calls);
    p->running--;
    p->n_failed = 0;
    w->brief = clock_awake() - w->since < SHORT_S;
    arm(p, w);
}

/* The process ends because of a call that has its answer; the others go to a new one. */
static void replace(struct helper_pool *p, struct worker *w) {
    for (int64_t i = 0; i < w->n_calls; i++) push_again(p, &w->calls[i].job);
    p->running -= w->n_calls;
    w->n_calls = 0;
    helper__kill(w->h);
}

/* Steps one busy worker; it may become idle. */
static void advance(struct helper_pool *p, struct worker *w) {
    struct helper__reply r;
    w->polled_at = clock_now();
    while (w->n_calls > 0) {
        int rc = helper__step(w->h, &r);
        if (rc > 0) {
            take(p, w, &r);
            if (r.last) replace(p, w);
            continue;
        }
        if (rc == 0) {
            if (w->deadline == 0) arm(p, w);
            if (clock_poll_ms(w->deadline > 0 ? w->deadline : helper__start_deadline(w->h)) > 0) return;
            rc = helper__expire(w->h, timeout_of(p, w));
        }
        lose_calls(p, w, rc, w->deadline > 0);
    }
}

/* Waits at most ms until some helper is readable or writable, and steps those. */
static int advance_all(struct helper_pool *p, int ms) {
    struct pollfd *fds = xmalloc(sizeof *fds * HELPER__N_FDS * (size_t)p->n);
    nfds_t n = 0;
    for (int i = 0; i < p->n; i++) {
        const struct worker *w = &p->w[i];
        if (w->n_calls == 0) continue;
        helper__fds(w->h, fds + n);
        n += HELPER__N_FDS;
        const int left = clock_poll_ms(w->deadline > 0 ? w->deadline : helper__start_deadline(w->h));
        if (left < ms) ms = left;
    }
    const int rc = poll(fds, n, ms), e = errno;
    const double slice = clock_now() - SLICE_MS / 1e3; /* the end of a helper whose children hold the socket wakes nobody */
    n = 0;
    for (int i = 0; i < p->n; i++) {
        struct worker *w = &p->w[i];
        if (w->n_calls == 0) continue;
        short events = 0;
        for (int k = 0; k < HELPER__N_FDS; k++) events |= rc > 0 ? fds[n + (nfds_t)k].revents : 0;
        n += HELPER__N_FDS;
        if (events || w->polled_at < slice) advance(p, w);
    }
    free(fds);
    if (rc < 0 && e != EINTR) FAIL(ERR_INTERNAL, "poll: %s", strerror(e));
    dispatch(p);
    return 0;
}

int helper_pool_send(struct helper_pool *p, const json_t *request, double timeout_s, int64_t *ticket) {
    return helper_pool_send_to(p, -1, request, timeout_s, ticket);
}

int helper_pool_send_to(struct helper_pool *p, int worker, const json_t *request, double timeout_s, int64_t *ticket) {
    const struct job j = {p->next_ticket, json_incref((json_t *)(uintptr_t)request), timeout_s, 0, NO_MORE, worker};
    CHECK(worker >= -1 && worker < p->n);
    push(worker < 0 ? &p->jobs : &p->w[worker].jobs, &j);
    *ticket = p->next_ticket++;
    dispatch(p);
    return advance_all(p, 0);
}

int helper_pool_recv(struct helper_pool *p, double wait_s, struct helper_result *out) {
    const double deadline = clock_awake() + wait_s;
    int ms = 0;
    for (;;) {
        if (p->done_head == p->n_done) TRY(advance_all(p, ms));
        if (p->done_head < p->n_done) {
            *out = p->done[p->done_head++];
            if (p->done_head == p->n_done) p->done_head = p->n_done = 0;
            return 1;
        }
        ms = clock_poll_ms(deadline);
        if (p->running == 0 || ms == 0) return 0;
        if (ms > SLICE_MS) ms = SLICE_MS;
    }
}

static int64_t n_waiting(const struct queue *jobs, const struct queue *again) {
    return jobs->n - jobs->head + again->n - again->head;
}

int64_t helper_pool_pending(const struct helper_pool *p) {
    int64_t n = n_waiting(&p->jobs, &p->again) + p->running + p->n_done - p->done_head;
    for (int i = 0; i < p->n; i++) n += n_waiting(&p->w[i].jobs, &p->w[i].again);
    return n;
}
