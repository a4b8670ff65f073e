/* serve_tickets.c - see serve_tickets.h. */
#include "cmd/serve/serve_tickets.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

struct open_ticket { /* what the engine works on */
    uint64_t ticket;
    int64_t request, n_open;
    int64_t *reported; /* tokens that were reported of each sample */
    struct open_ticket *prev, *next;
};
struct report { /* its arrays follow it, each padded to 8 bytes */
    struct serve_drawn d;
    int64_t rc; /* < 0: the ticket has failed, and d.n bytes of message follow */
};
struct serve_tickets {
    struct engine *engine;
    struct buf reports;
    struct open_ticket *open;
    int (*part)(void *arg);
    void *part_arg;
};

/* ---- reports ---- */

static void add_bytes(struct buf *b, const void *p, size_t n) {
    static const char zero[8];
    if (n > 0) buf_add(b, p, n);
    buf_add(b, zero, (8 - n % 8) % 8);
}

static void add_report(struct serve_tickets *t, const struct engine_sample *s, bool ended) {
    struct open_ticket *const o = s->user;
    const int64_t from = o->reported[s->index], n = s->n - from;
    struct report r;
    memset(&r, 0, sizeof r); /* its padding too: ranks compare hashes */
    r.d.ticket = o->ticket;
    r.d.index = s->index;
    r.d.n = n;
    r.d.n_top = s->n_top;
    r.d.ended = ended;
    r.d.finish = ended ? s->finish : ENGINE_INTERRUPTED;
    r.d.text_bytes = s->text_bytes;
    r.d.n_cached = s->n_cached;
    const size_t n_top = (size_t)(n * r.d.n_top), first = (size_t)(from * r.d.n_top);
    o->reported[s->index] = s->n;
    add_bytes(&t->reports, &r, sizeof r);
    add_bytes(&t->reports, s->ids + from, (size_t)n * sizeof *s->ids);
    add_bytes(&t->reports, s->logp + from, (size_t)n * sizeof *s->logp);
    add_bytes(&t->reports, n_top ? s->top_id + first : NULL, n_top * sizeof *s->top_id);
    add_bytes(&t->reports, n_top ? s->top_logp + first : NULL, n_top * sizeof *s->top_logp);
}

struct bytes {
    const char *p;
    size_t n, at;
};
/* The next n of them; NULL: there are fewer. */
static const void *next_bytes(struct bytes *b, int64_t n) {
    const size_t padded = n >= 0 ? ((size_t)n + 7) / 8 * 8 : 0;
    if (n < 0 || padded > b->n - b->at) return NULL;
    b->at += padded;
    return b->p + b->at - padded;
}

static int cut_short(void) { FAIL(ERR_FORMAT, "what a rank has drawn comes without its tokens"); }

static int read_failure(struct bytes *b, const struct report *r, struct serve *s) {
    const char *const message = next_bytes(b, r->d.n);
    if (!message || r->d.n < 1 || message[r->d.n - 1]) return cut_short();
    if (!s) return 0;
    err_set((int)r->rc, __FILE__, __LINE__, "%s", message);
    serve_failed(s, r->d.ticket, (int)r->rc);
    return 0;
}

int serve_reports_read(const void *p, size_t n, struct serve *s) {
    struct bytes b = {.p = p, .n = n};
    while (b.at < b.n) {
        struct report r;
        const void *const head = next_bytes(&b, sizeof r);
        if (!head) return cut_short();
        memcpy(&r, head, sizeof r);
        if (r.rc < 0) {
            TRY(read_failure(&b, &r, s));
            continue;
        }
        if (r.d.n < 0 || r.d.n > INT32_MAX || r.d.n_top < 0 || r.d.n_top > ENGINE_MAX_TOP) return cut_short();
        r.d.ids = next_bytes(&b, r.d.n * 4);
        r.d.logp = next_bytes(&b, r.d.n * 4);
        r.d.top_id = next_bytes(&b, r.d.n * r.d.n_top * 4);
        r.d.top_logp = next_bytes(&b, r.d.n * r.d.n_top * 4);
        if (!r.d.ids || !r.d.logp || !r.d.top_id || !r.d.top_logp) return cut_short();
        if (s) serve_drawn(s, &r.d);
    }
    return 0;
}

struct buf *serve_tickets_reports(struct serve_tickets *t) {
    return &t->reports;
}

/* ---- the engine ---- */

static void ticket_free(struct serve_tickets *t, struct open_ticket *o) {
    if (o->prev) o->prev->next = o->next;
    else t->open = o->next;
    if (o->next) o->next->prev = o->prev;
    free(o->reported);
    free(o);
}

static int on_progress(void *arg, const struct engine_sample *s) {
    add_report(arg, s, false);
    return 0;
}

static int on_done(void *arg, const struct engine_sample *s) {
    struct open_ticket *const o = s->user;
    add_report(arg, s, true);
    if (--o->n_open == 0) ticket_free(arg, o);
    return 0;
}

static int on_part(void *arg) {
    const struct serve_tickets *const t = arg;
    return t->part(t->part_arg);
}

void serve_tickets_cancel(struct serve_tickets *t, uint64_t ticket) {
    for (struct open_ticket *o = t->open; o; o = o->next)
        if (o->ticket == ticket) {
            engine_cancel(t->engine, o->request);
            ticket_free(t, o);
            return;
        }
}

void serve_tickets_submit(struct serve_tickets *t, const struct engine_request *r, uint64_t ticket) {
    struct open_ticket *const o = xcalloc(1, sizeof *o);
    *o = (struct open_ticket){.ticket = ticket, .n_open = r->n, .next = t->open};
    o->reported = xcalloc((size_t)r->n, sizeof *o->reported);
    if (t->open) t->open->prev = o;
    t->open = o;
    struct engine_request own = *r;
    own.user = o;
    const int rc = engine_submit(t->engine, &own, &o->request);
    if (rc == 0) return;
    struct report failed;
    memset(&failed, 0, sizeof failed);
    failed.d.ticket = ticket;
    failed.d.n = (int64_t)strlen(err_msg()) + 1;
    failed.rc = rc;
    add_bytes(&t->reports, &failed, sizeof failed);
    add_bytes(&t->reports, err_msg(), (size_t)failed.d.n);
    ticket_free(t, o);
}

int serve_tickets_step(struct serve_tickets *t) { return engine_step(t->engine); }
struct engine_stats serve_tickets_stats(const struct serve_tickets *t) {
    return engine_stats(t->engine);
}

int serve_tickets_create(struct serve_tickets **out, struct decoder *d, const struct tokenizer *tok, int (*part)(void *arg),
                         void *arg) {
    struct serve_tickets *const t = xcalloc(1, sizeof *t);
    const struct engine_config c = {
        .tok = tok, .done = on_done, .progress = on_progress, .part = part ? on_part : NULL, .done_arg = t, .first_burst = 2};
    t->part = part;
    t->part_arg = arg;
    const int rc = decoder_engine(&t->engine, d, &c);
    if (rc < 0) serve_tickets_destroy(t);
    else *out = t;
    return rc;
}

void serve_tickets_destroy(struct serve_tickets *t) {
    if (!t) return;
    engine_destroy(t->engine);
    while (t->open) ticket_free(t, t->open);
    buf_free(&t->reports);
    free(t);
}
