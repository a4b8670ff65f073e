/* helper_pool.c - several helpers of one kind behind one queue, without threads.
 * A helper has up to n_calls requests in flight: one, so that a crash or a hang costs that
 * request only; or many, where the module serves them concurrently and keeps their deadlines
 * itself.  Results come in the order of finishing.
 * Invariant: every ticket yields exactly one result, unless the pool is cancelled. */
#include "helper/helper_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WORKERS = 256, SLICE_MS = 100 };
#define GRACE_S 5. /* for a module that keeps deadlines itself to say that one has passed */

struct job {
    int64_t ticket;
    json_t *request;
    double timeout_s;
};
struct call { /* a request in flight */
    int64_t ticket, id;
};
struct worker {
    struct helper *h;
    struct call *calls;
    int64_t n_calls, cap_calls;
    double timeout_s; /* the longest of the calls' */
    double deadline;  /* for its next answer; 0: the helper is still starting */
};
struct helper_pool {
    int n;
    int64_t n_calls; /* most calls of a worker */
    struct worker *w;
    /* two queues as arrays with a head; compacted when empty */
    struct job *jobs;
    int64_t job_head, n_jobs, cap_jobs;
    struct helper_result *done;
    int64_t done_head, n_done, cap_done;
    int64_t next_ticket, running;
};

int helper_pool_create(struct helper_pool **out, const struct helper_args *args, int n, int64_t n_calls) {
    if (n < 1 || n > MAX_WORKERS)
        FAIL(ERR_INVAL, "helper %s: %d processes asked for; 1 to %d are possible", args->module, n, MAX_WORKERS);
    CHECK(n_calls >= 1);
    struct helper_pool *p = xcalloc(1, sizeof *p);
    p->n_calls = n_calls;
    p->w = xcalloc((size_t)n, sizeof *p->w);
    for (; p->n < n; p->n++) {
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
        if (p->w[i].n_calls > 0) helper__kill(p->w[i].h);
        p->w[i].n_calls = 0;
    }
    for (int64_t i = p->job_head; i < p->n_jobs; i++) json_decref(p->jobs[i].request);
    for (int64_t i = p->done_head; i < p->n_done; i++) helper_result_free(&p->done[i]);
    p->job_head = p->n_jobs = p->done_head = p->n_done = p->running = 0;
}

void helper_pool_destroy(struct helper_pool *p) {
    if (!p) return;
    helper_pool_cancel(p);
    for (int i = 0; i < p->n; i++) {
        helper_destroy(p->w[i].h);
        free(p->w[i].calls);
    }
    free(p->w);
    free(p->jobs);
    free(p->done);
    free(p);
}

void helper_result_free(struct helper_result *r) {
    json_decref(r->reply);
    free(r->error);
    *r = (struct helper_result){0};
}

/* rc 0 with the reply (taken over), or the thread's error. */
static void finish(struct helper_pool *p, int64_t ticket, int rc, json_t *reply) {
    xgrow((void **)&p->done, &p->cap_done, p->n_done + 1, sizeof *p->done);
    p->done[p->n_done++] = (struct helper_result){
        .ticket = ticket, .rc = rc, .reply = rc == 0 ? reply : NULL, .error = rc < 0 ? xstrdup(err_msg()) : NULL};
}

/* The process is gone (the thread's error says why): its calls with it. */
static void lose_calls(struct helper_pool *p, struct worker *w, int rc) {
    for (int64_t i = 0; i < w->n_calls; i++) finish(p, w->calls[i].ticket, rc, NULL);
    p->running -= w->n_calls;
    w->n_calls = 0;
}

/* The worker with the fewest calls; NULL: all are full. */
static struct worker *freest(struct helper_pool *p) {
    struct worker *best = &p->w[0];
    for (int i = 1; i < p->n; i++)
        if (p->w[i].n_calls < best->n_calls) best = &p->w[i];
    return best->n_calls < p->n_calls ? best : NULL;
}

/* A worker's next answer is due from now on. */
static void arm(const struct helper_pool *p, struct worker *w) {
    w->deadline = helper__ready(w->h) ? clock_awake() + w->timeout_s + (p->n_calls > 1 ? GRACE_S : 0) : 0;
}

static void hand_out(struct helper_pool *p) {
    struct worker *w;
    while (p->job_head < p->n_jobs && (w = freest(p))) {
        struct job *j = &p->jobs[p->job_head++];
        int64_t id;
        const int rc = helper__send(w->h, j->request, p->n_calls > 1 ? j->timeout_s : 0, &id);
        json_decref(j->request);
        if (rc < 0) {
            finish(p, j->ticket, rc, NULL);
            if (helper_pending(w->h) == 0) lose_calls(p, w, rc);
            continue;
        }
        if (w->n_calls == 0 || j->timeout_s > w->timeout_s) w->timeout_s = j->timeout_s;
        xgrow((void **)&w->calls, &w->cap_calls, w->n_calls + 1, sizeof *w->calls);
        w->calls[w->n_calls++] = (struct call){j->ticket, id};
        if (w->n_calls == 1) arm(p, w);
        p->running++;
    }
    if (p->job_head == p->n_jobs) p->job_head = p->n_jobs = 0;
}

static void take(struct helper_pool *p, struct worker *w, const struct helper__reply *r) {
    int64_t i = 0;
    while (i < w->n_calls && w->calls[i].id != r->id) i++;
    CHECK(i < w->n_calls); /* helper__step gives answers to pending requests only */
    finish(p, w->calls[i].ticket, r->rc, r->value);
    w->calls[i] = w->calls[--w->n_calls];
    p->running--;
    arm(p, w);
}

/* Moves one busy worker on; it may become idle. */
static void advance(struct helper_pool *p, struct worker *w) {
    struct helper__reply r;
    while (w->n_calls > 0) {
        int rc = helper__step(w->h, &r);
        if (rc > 0) {
            take(p, w, &r);
            continue;
        }
        if (rc == 0) {
            if (w->deadline == 0) arm(p, w);
            if (clock_poll_ms(w->deadline > 0 ? w->deadline : helper__start_deadline(w->h)) > 0) return;
            rc = helper__expire(w->h, w->timeout_s);
        }
        lose_calls(p, w, rc);
    }
}

static void advance_all(struct helper_pool *p) {
    for (int i = 0; i < p->n; i++) advance(p, &p->w[i]);
    hand_out(p);
}

/* Until some helper has something for us, at most ms. */
static int wait_any(const struct helper_pool *p, int ms) {
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
    const int rc = poll(fds, n, ms);
    const int e = errno;
    free(fds);
    if (rc < 0 && e != EINTR) FAIL(ERR_INTERNAL, "poll: %s", strerror(e));
    return 0;
}

int helper_pool_send(struct helper_pool *p, const json_t *request, double timeout_s, int64_t *ticket) {
    xgrow((void **)&p->jobs, &p->cap_jobs, p->n_jobs + 1, sizeof *p->jobs);
    p->jobs[p->n_jobs++] = (struct job){p->next_ticket, json_incref((json_t *)(uintptr_t)request), timeout_s};
    *ticket = p->next_ticket++;
    advance_all(p);
    return 0;
}

int helper_pool_recv(struct helper_pool *p, double wait_s, struct helper_result *out) {
    const double deadline = clock_awake() + wait_s;
    for (;;) {
        advance_all(p);
        if (p->done_head < p->n_done) {
            *out = p->done[p->done_head++];
            if (p->done_head == p->n_done) p->done_head = p->n_done = 0;
            return 1;
        }
        const int ms = clock_poll_ms(deadline);
        if (p->running == 0 || ms == 0) return 0;
        TRY(wait_any(p, ms < SLICE_MS ? ms : SLICE_MS));
    }
}

int64_t helper_pool_pending(const struct helper_pool *p) { return p->n_jobs - p->job_head + p->running + p->n_done - p->done_head; }
