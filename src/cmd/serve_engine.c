/* serve_engine.c - see serve_engine.h. */
#include "cmd/serve_engine.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const double FLUSH_S = 0.004; /* a burst's parts are passed on as they come, but not more often */

struct order { /* to the engine: a request, or (prompt NULL) a ticket's cancellation */
    uint64_t ticket;
    struct engine_request r;
    int32_t *prompt, *stop_ids;
    char **stop;
    struct order *next;
};
struct open_ticket { /* what the engine works on */
    uint64_t ticket;
    int64_t request, n, n_open;
    int64_t *reported; /* (n) tokens that were reported of each sample */
    struct open_ticket *prev, *next;
};
struct report { /* to the server; its arrays follow it in the queue */
    struct serve_drawn d;
    int rc; /* < 0: the ticket has failed, and d.n bytes of message follow */
};
struct serve_engine {
    struct engine *engine;
    struct http_server *http;
    pthread_mutex_t lock;
    pthread_cond_t ordered;
    /* under the lock */
    struct order *first, **last;
    struct buf out; /* reports */
    struct engine_stats stats;
    bool stop, failed;
    /* the engine's thread */
    struct buf own; /* reports of this step */
    struct open_ticket *open;
    double flushed;
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

/* The n bytes at *at of the queue. */
static const void *next_bytes(const struct buf *b, size_t *at, size_t n) {
    const void *p = b->p + *at;
    *at += (n + 7) / 8 * 8;
    return p;
}

bool serve_engine_deliver(struct serve_engine *e, struct serve *s) {
    pthread_mutex_lock(&e->lock);
    const struct buf filled = e->out;
    e->out = e->in;
    e->in = filled;
    const bool failed = e->failed;
    pthread_mutex_unlock(&e->lock);
    for (size_t at = 0; at < e->in.n;) {
        struct report r;
        memcpy(&r, next_bytes(&e->in, &at, sizeof r), sizeof r);
        if (r.rc < 0) {
            const char *message = next_bytes(&e->in, &at, (size_t)r.d.n);
            err_set(r.rc, __FILE__, __LINE__, "%s", message);
            serve_failed(s, r.d.ticket, r.rc);
            continue;
        }
        r.d.ids = next_bytes(&e->in, &at, (size_t)r.d.n * sizeof *r.d.ids);
        r.d.logp = next_bytes(&e->in, &at, (size_t)r.d.n * sizeof *r.d.logp);
        r.d.top_id = next_bytes(&e->in, &at, (size_t)(r.d.n * r.d.n_top) * sizeof *r.d.top_id);
        r.d.top_logp = next_bytes(&e->in, &at, (size_t)(r.d.n * r.d.n_top) * sizeof *r.d.top_logp);
        serve_drawn(s, &r.d);
    }
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

static void flush(struct serve_engine *e) {
    e->flushed = clock_now();
    pthread_mutex_lock(&e->lock);
    e->stats = engine_stats(e->engine);
    if (e->own.n > 0) buf_add(&e->out, e->own.p, e->own.n);
    pthread_mutex_unlock(&e->lock);
    if (e->own.n > 0) http_server_wake(e->http);
    buf_reset(&e->own);
}

static void add_bytes(struct buf *b, const void *p, size_t n) {
    static const char zero[8];
    if (n > 0) buf_add(b, p, n);
    buf_add(b, zero, (8 - n % 8) % 8);
}

static void ticket_free(struct serve_engine *e, struct open_ticket *t) {
    if (t->prev) t->prev->next = t->next;
    else e->open = t->next;
    if (t->next) t->next->prev = t->prev;
    free(t->reported);
    free(t);
}

static void add_report(struct serve_engine *e, const struct engine_sample *s, bool ended) {
    struct open_ticket *t = s->user;
    const int64_t from = t->reported[s->index], n = s->n - from;
    const struct report r = {.d = {.ticket = t->ticket,
                                   .index = s->index,
                                   .n = n,
                                   .n_top = s->n_top,
                                   .ended = ended,
                                   .finish = s->finish,
                                   .text_bytes = s->text_bytes,
                                   .n_cached = s->n_cached}};
    const size_t n_top = (size_t)(n * r.d.n_top), first = (size_t)(from * r.d.n_top);
    t->reported[s->index] = s->n;
    add_bytes(&e->own, &r, sizeof r);
    add_bytes(&e->own, s->ids + from, (size_t)n * sizeof *s->ids);
    add_bytes(&e->own, s->logp + from, (size_t)n * sizeof *s->logp);
    add_bytes(&e->own, n_top ? s->top_id + first : NULL, n_top * sizeof *s->top_id);
    add_bytes(&e->own, n_top ? s->top_logp + first : NULL, n_top * sizeof *s->top_logp);
}

static int on_progress(void *arg, const struct engine_sample *s) {
    struct serve_engine *e = arg;
    add_report(e, s, false);
    return 0;
}

static int on_done(void *arg, const struct engine_sample *s) {
    struct serve_engine *e = arg;
    struct open_ticket *t = s->user;
    add_report(e, s, true);
    if (--t->n_open == 0) ticket_free(e, t);
    return 0;
}

static int on_part(void *arg) {
    struct serve_engine *e = arg;
    if (clock_now() - e->flushed > FLUSH_S) flush(e);
    return 0;
}

static void do_cancel(struct serve_engine *e, uint64_t ticket) {
    for (struct open_ticket *t = e->open; t; t = t->next)
        if (t->ticket == ticket) {
            engine_cancel(e->engine, t->request);
            ticket_free(e, t);
            return;
        }
}

static void do_submit(struct serve_engine *e, const struct order *o) {
    struct open_ticket *t = xcalloc(1, sizeof *t);
    *t = (struct open_ticket){.ticket = o->ticket, .n = o->r.n, .n_open = o->r.n, .next = e->open};
    t->reported = xcalloc((size_t)o->r.n, sizeof *t->reported);
    if (e->open) e->open->prev = t;
    e->open = t;
    struct engine_request r = o->r;
    r.user = t;
    const int rc = engine_submit(e->engine, &r, &t->request);
    if (rc == 0) return;
    const struct report failed = {.d = {.ticket = o->ticket, .n = (int64_t)strlen(err_msg()) + 1}, .rc = rc};
    add_bytes(&e->own, &failed, sizeof failed);
    add_bytes(&e->own, err_msg(), (size_t)failed.d.n);
    ticket_free(e, t);
}

/* Waits where the engine has nothing to do; false: it is to stop. */
static bool take_orders(struct serve_engine *e, bool busy, struct order **orders) {
    pthread_mutex_lock(&e->lock);
    while (!busy && !e->first && !e->stop) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec++;
        pthread_cond_timedwait(&e->ordered, &e->lock, &until);
    }
    *orders = e->first;
    e->first = NULL;
    e->last = &e->first;
    const bool stop = e->stop;
    pthread_mutex_unlock(&e->lock);
    return !stop;
}

static int run(struct serve_engine *e) {
    int more = 0;
    struct order *orders;
    while (take_orders(e, more > 0, &orders)) {
        while (orders) {
            struct order *o = orders;
            orders = o->next;
            if (o->prompt) do_submit(e, o);
            else do_cancel(e, o->ticket);
            order_free(o);
        }
        more = engine_step(e->engine);
        flush(e);
        TRY(more);
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

int serve_engine_run(struct serve_engine *e) {
    const int rc = run(e);
    if (rc < 0) serve_engine_fail(e);
    return rc;
}

int serve_engine_create(struct serve_engine **out, struct decoder *d, const struct tokenizer *tok) {
    struct serve_engine *e = xcalloc(1, sizeof *e);
    const struct engine_config c = {
        .tok = tok, .done = on_done, .progress = on_progress, .part = on_part, .done_arg = e, .first_burst = 2};
    e->last = &e->first;
    CHECK(pthread_mutex_init(&e->lock, NULL) == 0 && pthread_cond_init(&e->ordered, NULL) == 0);
    const int rc = decoder_engine(&e->engine, d, &c);
    if (rc < 0) serve_engine_destroy(e);
    else *out = e;
    return rc;
}

void serve_engine_destroy(struct serve_engine *e) {
    if (!e) return;
    engine_destroy(e->engine);
    while (e->open) ticket_free(e, e->open);
    for (struct order *o; (o = e->first);) {
        e->first = o->next;
        order_free(o);
    }
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->ordered);
    buf_free(&e->out);
    buf_free(&e->own);
    buf_free(&e->in);
    free(e);
}
