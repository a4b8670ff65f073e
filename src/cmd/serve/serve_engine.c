/* serve_engine.c - see serve_engine.h. */
#include "cmd/serve/serve_engine.h"

#include "base/buf.h"
#include "base/err.h"
#include "cmd/serve/serve_tickets.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct order { /* to the source: a request, or (prompt NULL) a ticket's cancellation */
    uint64_t ticket;
    struct engine_request r;
    int32_t *prompt, *stop_ids;
    char **stop;
    struct order *next;
};
struct serve_engine {
    struct http_server *http;
    pthread_mutex_t lock;
    pthread_cond_t ordered;
    /* under the lock */
    struct order *first, **last;
    struct buf out; /* reports */
    struct engine_stats stats;
    bool stop, failed;
    /* the server's thread */
    struct buf in;
};

/* ---- the server's side ---- */

static void order_free(struct order *o) {
    for (int64_t i = 0; o->stop && i < o->r.n_stop; i++) free(o->stop[i]);
    free(o->stop);
    free(o->stop_ids);
    free(o->prompt);
    free(o);
}

static void give_order(struct serve_engine *e, struct order *o) {
    pthread_mutex_lock(&e->lock);
    *e->last = o;
    e->last = &o->next;
    pthread_cond_signal(&e->ordered);
    pthread_mutex_unlock(&e->lock);
}

static int submit(void *ctx, const struct engine_request *r, uint64_t ticket) {
    struct order *o = xcalloc(1, sizeof *o);
    const size_t n_prompt = (size_t)r->n_prompt * sizeof *o->prompt, n_ids = (size_t)r->n_stop_ids * sizeof *o->stop_ids;
    *o = (struct order){.ticket = ticket, .r = *r, .prompt = xmalloc(n_prompt), .stop_ids = xmalloc(n_ids)};
    memcpy(o->prompt, r->prompt, n_prompt);
    if (n_ids > 0) memcpy(o->stop_ids, r->stop_ids, n_ids);
    o->stop = xcalloc((size_t)r->n_stop, sizeof *o->stop);
    for (int64_t i = 0; i < r->n_stop; i++) o->stop[i] = xstrdup(r->stop[i]);
    o->r.prompt = o->prompt;
    o->r.stop_ids = o->stop_ids;
    o->r.stop = (const char *const *)o->stop;
    give_order(ctx, o);
    return 0;
}

static void cancel(void *ctx, uint64_t ticket) {
    struct order *o = xcalloc(1, sizeof *o);
    o->ticket = ticket;
    give_order(ctx, o);
}

static void stats(void *ctx, struct engine_stats *out) {
    struct serve_engine *e = ctx;
    pthread_mutex_lock(&e->lock);
    *out = e->stats;
    pthread_mutex_unlock(&e->lock);
}

struct serve_backend serve_engine_backend(struct serve_engine *e) {
    return (struct serve_backend){.ctx = e, .submit = submit, .cancel = cancel, .stats = stats};
}

void serve_engine_attach(struct serve_engine *e, struct http_server *http) { e->http = http; }

bool serve_engine_deliver(struct serve_engine *e, struct serve *s) {
    pthread_mutex_lock(&e->lock);
    const struct buf filled = e->out;
    e->out = e->in;
    e->in = filled;
    const bool failed = e->failed;
    pthread_mutex_unlock(&e->lock);
    CHECK(serve_reports_read(e->in.p, e->in.n, s) == 0); /* made here, or looked at */
    buf_reset(&e->in);
    if (failed) serve_failed_all(s);
    return !failed;
}

void serve_engine_stop(struct serve_engine *e) {
    pthread_mutex_lock(&e->lock);
    e->stop = true;
    pthread_cond_signal(&e->ordered);
    pthread_mutex_unlock(&e->lock);
}

/* ---- the engine's side ---- */

void serve_engine_report(struct serve_engine *e, const void *reports, size_t n, const struct engine_stats *stats) {
    pthread_mutex_lock(&e->lock);
    e->stats = *stats;
    if (n > 0) buf_add(&e->out, reports, n);
    pthread_mutex_unlock(&e->lock);
    if (n > 0) http_server_wake(e->http);
}

/* Waits, a second at most, where the source has nothing to do; false: it is to stop. */
static bool take_orders(struct serve_engine *e, bool busy, struct order **orders) {
    struct timespec until;
    pthread_mutex_lock(&e->lock);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    for (int rc = 0; !busy && !e->first && !e->stop && rc == 0;) rc = pthread_cond_timedwait(&e->ordered, &e->lock, &until);
    *orders = e->first;
    e->first = NULL;
    e->last = &e->first;
    const bool stop = e->stop;
    pthread_mutex_unlock(&e->lock);
    return !stop;
}

static int run(struct serve_engine *e, const struct serve_source *source) {
    int more = 0;
    struct order *orders;
    while (take_orders(e, more > 0, &orders)) {
        while (orders) {
            struct order *o = orders;
            orders = o->next;
            if (o->prompt) source->submit(source->ctx, &o->r, o->ticket);
            else source->cancel(source->ctx, o->ticket);
            order_free(o);
        }
        TRY(more = source->step(source->ctx));
    }
    for (struct order *o; (o = orders);) {
        orders = o->next;
        order_free(o);
    }
    return 0;
}

void serve_engine_fail(struct serve_engine *e) {
    pthread_mutex_lock(&e->lock);
    e->failed = true;
    pthread_mutex_unlock(&e->lock);
    http_server_wake(e->http);
}

int serve_engine_run(struct serve_engine *e, const struct serve_source *source) {
    const int rc = run(e, source);
    if (rc < 0) serve_engine_fail(e);
    return rc;
}

struct serve_engine *serve_engine_create(void) {
    struct serve_engine *e = xcalloc(1, sizeof *e);
    e->last = &e->first;
    CHECK(pthread_mutex_init(&e->lock, NULL) == 0 && pthread_cond_init(&e->ordered, NULL) == 0);
    return e;
}

void serve_engine_destroy(struct serve_engine *e) {
    if (!e) return;
    for (struct order *o; (o = e->first);) {
        e->first = o->next;
        order_free(o);
    }
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->ordered);
    buf_free(&e->out);
    buf_free(&e->in);
    free(e);
}
