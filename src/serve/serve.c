/* serve.c - routes, requests under way and what is drawn for them. See serve.h.
 *
 * A request is read whole, becomes one submission a prompt, and is answered when its samples have ended, or as they come. A
 * ticket is a slot and a count of its uses, so that what comes late for a request that has ended is known as such.
 * Invariant: each exchange is answered once; a request whose client has left is cancelled. */
#include "serve/serve_int.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/encoding/number.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <time.h>

enum { SILENCE_S = 15 }; /* a stream that has nothing to say gives a sign of life */

/* ---- small things for the dialects ---- */

void serve__new_id(struct serve *s, const char *prefix, char out[40]) {
    const uint64_t v[2] = {s->salt, ++s->drawn_ids};
    char hex[33];
    hash_hex(v, sizeof v, hex);
    snprintf(out, 40, "%s%.24s", prefix, hex);
}

json_t *serve__text(const char *p, size_t n) {
    json_t *v = json_stringn(p ? p : "", p ? n : 0);
    if (v) return v;
    struct buf fixed = {0};
    CHECK(text_utf8_repair(&fixed, p, n) == 0);
    v = json_stringn(fixed.p ? fixed.p : "", fixed.n);
    buf_free(&fixed);
    return v ? v : json_string("");
}

void serve__json(struct buf *out, json_t *o) {
    CHECK(o && json_dump_line(out, o) == 0);
    json_decref(o);
}

void serve__event(struct buf *out, const char *name, json_t *data) {
    if (name) buf_addf(out, "event: %s\n", name);
    buf_adds(out, "data: ");
    serve__json(out, data);
    buf_adds(out, "\n\n");
}

double serve__logp(float logp) { return isfinite(logp) ? number_of_f32(logp) : -9999; }

int64_t serve__prompt_tokens(const struct serve_call *c) {
    int64_t n = 0;
    for (int64_t i = 0; i < c->n_prompts; i++) n += c->prompts[i].n;
    return n;
}
int64_t serve__answer_tokens(const struct serve_call *c) {
    int64_t n = 0;
    for (int64_t i = 0; i < c->n_choices; i++) n += c->choices[i].ids.n;
    return n;
}
int64_t serve__cached_tokens(const struct serve_call *c) {
    int64_t n = 0;
    for (int64_t i = 0; i < c->n_choices; i += c->r.n) n += c->choices[i].n_cached; /* of each prompt's first sample */
    return n;
}

/* ---- tickets ---- */

static uint64_t ticket_of(const struct serve *s, int64_t slot) { return (uint64_t)s->generation[slot] << 32 | (uint64_t)slot; }

static uint64_t take_ticket(struct serve *s, struct serve_call *c, int64_t prompt) {
    int64_t slot = s->free_slot;
    while (slot < s->n_slots && s->slots[slot]) slot++;
    if (slot == s->n_slots) {
        xgrow((void **)&s->slots, &s->cap_slots, slot + 1, sizeof *s->slots);
        xgrow((void **)&s->generation, &s->cap_generation, slot + 1, sizeof *s->generation);
        xgrow((void **)&s->prompt_of, &s->cap_prompt_of, slot + 1, sizeof *s->prompt_of);
        s->generation[slot] = 0;
        s->n_slots++;
    }
    s->slots[slot] = c;
    s->prompt_of[slot] = (uint32_t)prompt;
    s->free_slot = slot + 1;
    return ticket_of(s, slot);
}

static void give_ticket(struct serve *s, uint64_t ticket) {
    const int64_t slot = (int64_t)(uint32_t)ticket;
    s->slots[slot] = NULL;
    s->generation[slot]++;
    if (slot < s->free_slot) s->free_slot = slot;
}

/* NULL: its request has ended. */
static struct serve_call *call_of(const struct serve *s, uint64_t ticket, int64_t *prompt) {
    const int64_t slot = (int64_t)(uint32_t)ticket;
    if (slot >= s->n_slots || !s->slots[slot] || ticket_of(s, slot) != ticket) return NULL;
    *prompt = s->prompt_of[slot];
    return s->slots[slot];
}

/* ---- a request's life ---- */

static struct serve_call *call_create(struct serve *s, struct http_exchange *x, const struct serve_dialect *d,
                                      const char *session) {
    struct serve_call *c = xcalloc(1, sizeof *c);
    *c = (struct serve_call){.serve = s,
                             .x = x,
                             .dialect = d,
                             .next = s->calls,
                             .session = session ? xstrdup(session) : NULL,
                             .turn = -1,
                             .created = (int64_t)time(NULL),
                             .start = clock_now(),
                             .last = clock_now()};
    const char *prefix = d == &serve_chat ? "chatcmpl-" : d == &serve_completions ? "cmpl-" : "msg_";
    serve__new_id(s, prefix, c->id);
    if (s->calls) s->calls->prev = c;
    s->calls = c;
    s->n_calls++;
    return c;
}

static void choice_free(struct serve_choice *h) {
    serve__text_close(&h->text);
    text_ids_free(&h->ids);
    tool_turn_free(&h->turn);
    buf_free(&h->content);
    free(h->logp);
    free(h->top_id);
    free(h->top_logp);
}

static void call_free(struct serve_call *c) {
    struct serve *s = c->serve;
    if (c->prev) c->prev->next = c->next;
    else s->calls = c->next;
    if (c->next) c->next->prev = c->prev;
    const struct serve_sessions *sessions = s->a.sessions;
    if (c->turn >= 0 && !c->recorded && sessions->dropped) sessions->dropped(sessions->ctx, c->session, c->turn);
    s->n_calls--;
    s->n_open -= c->n_open;
    for (int64_t i = 0; c->tickets && i < c->n_prompts; i++) give_ticket(s, c->tickets[i]);
    for (int64_t i = 0; i < c->n_choices; i++) choice_free(&c->choices[i]);
    for (int64_t i = 0; c->prompts && i < c->n_prompts; i++) text_ids_free(&c->prompts[i]);
    for (int64_t i = 0; i < c->r.n_stop; i++) free(c->stop[i]);
    json_decref(c->messages);
    json_decref(c->tools);
    free(c->choices);
    free(c->prompts);
    free(c->tickets);
    free(c->session);
    free(c->model);
    free(c);
}

static void cancel(struct serve_call *c) {
    const struct serve_backend *b = &c->serve->a.backend;
    if (c->n_open == 0) return;
    for (int64_t i = 0; c->tickets && i < c->n_prompts; i++) b->cancel(b->ctx, c->tickets[i]);
}

static void on_left(void *arg) {
    struct serve_call *c = arg;
    serve__count(c->serve, c->dialect, 0);
    cancel(c);
    call_free(c);
}

static void reply_error(struct serve *s, struct http_exchange *x, const struct serve_dialect *d, int status, const char *message) {
    struct buf out = {0};
    serve__count(s, d, status);
    if (status == 429 || status == 503) http_exchange_add_header(x, "Retry-After", status == 429 ? "1" : "5");
    if (status == 401) http_exchange_add_header(x, "WWW-Authenticate", "Bearer");
    d->error(&out, status, message);
    http_exchange_reply(x, status, "application/json", &out);
}

static int status_of(int rc) {
    if (rc == ERR_INPUT) return 404;
    return rc == ERR_INVAL || rc == ERR_FORMAT || rc == ERR_NOMEM ? 400 : 500;
}

/* Ends a request by an error: its status, or the last event of a stream that has begun. */
static void fail(struct serve_call *c, int status, const char *message) {
    struct http_exchange *x = c->x;
    cancel(c);
    if (!c->begun) reply_error(c->serve, x, c->dialect, status, message);
    else {
        struct buf out = {0};
        serve__count(c->serve, c->dialect, status);
        c->dialect->stream_error(&out, message);
        http_exchange_send(x, out.p, out.n);
        http_exchange_end(x);
        buf_free(&out);
    }
    call_free(c);
}

/* ---- beginning one ---- */

static void fill_stop_ids(struct serve_call *c) {
    const struct serve *s = c->serve;
    const int64_t room = (int64_t)(sizeof c->stop_ids / sizeof *c->stop_ids);
    c->r.stop_ids = c->stop_ids;
    if (c->r.ignore_eos &&
        c->r.n_stop_ids > 0) { /* the request's own ids end it still, as in vLLM; the engine would skip them too */
        c->r.ignore_eos = false;
        return;
    }
    for (int64_t i = 0; i < s->a.stop.n; i++) c->stop_ids[c->r.n_stop_ids++] = s->a.stop.id[i];
    const char *const *more = c->parses ? tool_parser_stop_tokens(s->parser) : NULL;
    for (; more && *more && c->r.n_stop_ids < room; more++) {
        const int32_t id = tokenizer_id(s->a.tok, *more);
        if (id >= 0) c->stop_ids[c->r.n_stop_ids++] = id;
    }
}

static int submit(struct serve_call *c) {
    struct serve *s = c->serve;
    const struct serve_sessions *sessions = s->a.sessions;
    fill_stop_ids(c);
    if (c->session && sessions->sampling) TRY(sessions->sampling(sessions->ctx, c->session, c->turn, &c->r));
    c->n_choices = c->n_open = c->n_prompts * c->r.n;
    s->n_open += c->n_open;
    c->choices = xcalloc((size_t)c->n_choices, sizeof *c->choices);
    for (int64_t i = 0; i < c->n_choices; i++) {
        c->choices[i].index = i;
        TRY(serve__text_open(&c->choices[i].text, s->a.tok));
    }
    c->tickets = xcalloc((size_t)c->n_prompts, sizeof *c->tickets);
    for (int64_t i = 0; i < c->n_prompts; i++) c->tickets[i] = take_ticket(s, c, i);
    for (int64_t i = 0; i < c->n_prompts; i++) {
        c->r.prompt = c->prompts[i].p;
        c->r.n_prompt = c->prompts[i].n;
        TRY(s->a.backend.submit(s->a.backend.ctx, &c->r, c->tickets[i]));
        s->metrics.prompt_tokens += c->r.n_prompt;
    }
    return 0;
}

static int read_body(struct http_exchange *x, json_t **body) {
    size_t n;
    const char *text = http_exchange_body(x, &n);
    if (json_parse(body, text, n, "the body") < 0) return err_wrap(ERR_INVAL, "not JSON");
    return 0;
}

static void ask(struct serve *s, struct http_exchange *x, const struct serve_dialect *d, const char *session) {
    json_t *body = NULL;
    if (s->draining) {
        reply_error(s, x, d, 503, "the server is about to end");
        return;
    }
    if (s->n_open >= s->a.max_open) {
        reply_error(s, x, d, 429, "the server is full; try again later");
        return;
    }
    struct serve_call *c = call_create(s, x, d, session);
    http_exchange_on_close(x, on_left, c);
    int rc = read_body(x, &body);
    if (rc == 0) rc = d->read(c, body);
    if (rc == 0) rc = submit(c);
    json_decref(body);
    if (rc < 0) fail(c, status_of(rc), err_msg());
}

/* The prompt's tokens alone: count_tokens. */
static void count(struct serve *s, struct http_exchange *x, const char *session) {
    json_t *body = NULL;
    struct serve_call *c = call_create(s, x, &serve_messages, session);
    int rc = read_body(x, &body);
    if (rc == 0) rc = serve__count_read(c, body);
    json_decref(body);
    if (rc < 0) {
        fail(c, status_of(rc), err_msg());
        return;
    }
    struct buf out = {0};
    serve__json(&out, json_pack("{s:I}", "input_tokens", (json_int_t)serve__prompt_tokens(c)));
    serve__count(s, &serve_messages, 200);
    call_free(c);
    http_exchange_reply(x, 200, "application/json", &out);
}

static void answer_tokens(struct serve *s, struct http_exchange *x, int (*read)(struct serve_call *, const json_t *, json_t **)) {
    json_t *body = NULL, *answer = NULL;
    struct serve_call *c = call_create(s, x, &serve_chat, NULL);
    int rc = read_body(x, &body);
    if (rc == 0) rc = read(c, body, &answer);
    json_decref(body);
    if (rc < 0) {
        fail(c, status_of(rc), err_msg());
        return;
    }
    struct buf out = {0};
    serve__json(&out, answer);
    serve__count(s, NULL, 200);
    call_free(c);
    http_exchange_reply(x, 200, "application/json", &out);
}

/* ---- what is drawn ---- */

static struct answer_holds holds_of(const struct serve_call *c) {
    return (struct answer_holds){.stop = c->stop,
                                 .n_stop = c->r.n_stop,
                                 .markers = c->parses ? c->serve->markers : NULL,
                                 .marker_ids = c->serve->marker_ids};
}

static int take(struct serve_call *c, struct serve_choice *h, const struct serve_drawn *d) {
    const struct answer_holds holds = holds_of(c);
    const int64_t had = h->ids.n, all = had + d->n, n_top = c->r.n_top;
    if (d->n == 0) return 0;
    text_ids_add(&h->ids, d->ids, d->n);
    xgrow((void **)&h->logp, &h->cap_logp, all, sizeof *h->logp);
    memcpy(h->logp + had, d->logp, (size_t)d->n * sizeof *h->logp);
    if (n_top > 0) {
        CHECK(d->n_top == n_top);
        xgrow((void **)&h->top_id, &h->cap_top_id, all * n_top, sizeof *h->top_id);
        xgrow((void **)&h->top_logp, &h->cap_top_logp, all * n_top, sizeof *h->top_logp);
        memcpy(h->top_id + had * n_top, d->top_id, (size_t)(d->n * n_top) * sizeof *h->top_id);
        memcpy(h->top_logp + had * n_top, d->top_logp, (size_t)(d->n * n_top) * sizeof *h->top_logp);
    }
    for (int64_t i = 0; i < d->n; i++) TRY(serve__text_push(&h->text, d->ids[i], &holds));
    return 0;
}

/* The stop string that begins at text_bytes. */
static const char *stop_at(const struct serve_call *c, const struct buf *text, int64_t at) {
    for (int64_t i = 0; at >= 0 && i < c->r.n_stop; i++) {
        const size_t n = strlen(c->stop[i]);
        if ((size_t)at + n <= text->n && memcmp(text->p + at, c->stop[i], n) == 0) return c->stop[i];
    }
    return NULL;
}

/* Special tokens that the parser's text has are no part of what is said. */
static void add_without_special(const struct serve *s, const char *p, size_t n, struct buf *out) {
    const json_t *token;
    size_t i;
    for (size_t at = 0; at < n;) {
        size_t skip = 0;
        json_array_foreach(s->special, i, token) {
            const size_t len = json_string_length(token);
            if (len > skip && len <= n - at && memcmp(p + at, json_string_value(token), len) == 0) skip = len;
        }
        if (skip == 0) buf_addc(out, p[at++]);
        else at += skip;
    }
}

static int parse_calls(struct serve_call *c, struct serve_choice *h) {
    const struct serve *s = c->serve;
    struct buf text = {0};
    int rc = 0;
    if (h->stop_hit) rc = buf_add(&text, h->text.visible.p, h->text.visible.n);
    else rc = tool_parser_text(s->parser, s->a.tok, h->ids.p, h->ids.n, &text);
    if (rc == 0) rc = tool_parser_parse(s->parser, text.p ? text.p : "", text.n, c->tools, &h->turn);
    buf_free(&text);
    TRY(rc);
    if (h->turn.n_calls == 0 && h->turn.n_malformed == 0) return 0;
    add_without_special(s, h->turn.content.p, h->turn.content.n, &h->content);
    while (h->content.n > 0 && strchr(" \n\r\t", h->content.p[h->content.n - 1])) h->content.p[--h->content.n] = '\0';
    return 1;
}

/* Its whole text, and its calls. */
static int end_choice(struct serve_call *c, struct serve_choice *h, const struct serve_drawn *d) {
    TRY(serve__text_finish(&h->text));
    struct buf *text = &h->text.visible;
    h->ended = true;
    h->finish = d->finish;
    h->n_cached = d->n_cached;
    h->stop_hit = stop_at(c, text, d->text_bytes);
    if (d->text_bytes >= 0 && (size_t)d->text_bytes < text->n) text->n = (size_t)d->text_bytes;
    int parsed = 0;
    if (c->parses) parsed = parse_calls(c, h);
    TRY(parsed);
    if (!parsed) buf_add(&h->content, text->p ? text->p : "", text->n);
    return 0;
}

/* To a stream: what may be given out, and at its end the rest, the calls and the reason. */
static void tell(struct serve_call *c, struct serve_choice *h, struct buf *out) {
    const struct answer_holds holds = holds_of(c);
    const struct buf *text = h->ended ? &h->content : &h->text.visible;
    size_t upto = h->ended ? text->n : serve__text_ready(&h->text, &holds);
    /* what was given out stays, also where the parser sees the text otherwise */
    if (h->ended && (upto < h->text.sent || (h->text.sent > 0 && memcmp(text->p, h->text.visible.p, h->text.sent) != 0)))
        upto = h->text.sent;
    const size_t n = upto - h->text.sent;
    if (n > 0 || ((c->logprobs || c->token_ids) && h->ids.n > h->n_reported))
        c->dialect->delta(c, h, n > 0 ? text->p + h->text.sent : "", n, out);
    h->text.sent = upto;
    if (h->ended) c->dialect->end(c, h, out);
}

static void begin_stream(struct serve_call *c, struct buf *out) {
    if (c->begun) return;
    c->begun = true;
    http_exchange_add_header(c->x, "X-Accel-Buffering", "no");
    http_exchange_begin(c->x, 200, "text/event-stream; charset=utf-8");
    c->dialect->begin(c, out);
}

/* The assistant message that the client gets, in a chat's form. */
static json_t *message_of(const struct serve_choice *h) {
    json_t *calls = json_array(),
           *m = json_pack("{s:s, s:o}", "role", "assistant", "content", serve__text(h->content.p, h->content.n));
    for (int64_t k = 0; k < h->turn.n_calls; k++) {
        const struct tool_call *call = &h->turn.calls[k];
        json_array_append_new(calls, json_pack("{s:s, s:{s:o, s:o}}", "type", "function", "function", "name",
                                               serve__text(call->name, strlen(call->name)), "arguments",
                                               serve__text(call->arguments, strlen(call->arguments))));
    }
    if (h->turn.n_calls > 0) json_object_set(m, "tool_calls", calls);
    json_decref(calls);
    return m;
}

static int record(struct serve_call *c, const struct serve_choice *h) {
    const struct serve_sessions *sessions = c->serve->a.sessions;
    if (!c->session || !sessions->drawn) return 0;
    json_t *message = message_of(h);
    const int64_t prompt = h->index / c->r.n;
    struct engine_request r = c->r;
    r.prompt = c->prompts[prompt].p;
    r.n_prompt = c->prompts[prompt].n;
    const struct serve_turn turn = {.session = c->session,
                                    .turn = c->turn,
                                    .message = message,
                                    .messages = c->messages,
                                    .tools = c->tools,
                                    .request = &r,
                                    .ids = h->ids.p,
                                    .logp = h->logp,
                                    .n = h->ids.n,
                                    .n_malformed = h->turn.n_malformed,
                                    .n_stop_asked = c->n_stop_asked,
                                    .index = h->index % c->r.n,
                                    .finish = h->finish};
    c->recorded = true;
    const int rc = sessions->drawn(sessions->ctx, &turn);
    json_decref(message);
    return rc;
}

static void first_token(struct serve *s, const struct serve_call *c) {
    static const double bounds[] = {.005, .01, .02, .04, .06, .1, .2, .5, 1, 2, 5};
    const double t = clock_now() - c->start;
    size_t i = 0;
    while (i < sizeof bounds / sizeof *bounds && t > bounds[i]) i++;
    s->metrics.first_token[i]++;
    s->metrics.n_first_token++;
    s->metrics.first_token_sum += t;
}

static int take_drawn(struct serve_call *c, struct serve_choice *h, const struct serve_drawn *d) {
    struct serve *s = c->serve;
    if (d->n > 0 && h->ids.n == 0) first_token(s, c);
    s->metrics.tokens += d->n;
    TRY(take(c, h, d));
    if (!d->ended) return 0;
    s->metrics.cached_tokens += d->n_cached;
    TRY(end_choice(c, h, d));
    TRY(record(c, h));
    c->n_open--;
    s->n_open--;
    return 0;
}

void serve_drawn(struct serve *s, const struct serve_drawn *d) {
    int64_t prompt;
    struct serve_call *c = call_of(s, d->ticket, &prompt);
    if (!c || d->index < 0 || d->index >= c->r.n) return;
    struct serve_choice *h = &c->choices[prompt * c->r.n + d->index];
    if (h->ended) return;
    const int rc = take_drawn(c, h, d);
    if (rc < 0) {
        fail(c, status_of(rc), err_msg());
        return;
    }
    struct buf out = {0};
    const bool all = c->n_open == 0;
    struct http_exchange *x = c->x;
    if (!c->stream && !all) return;
    if (c->stream) {
        begin_stream(c, &out);
        tell(c, h, &out);
        if (all) c->dialect->finish(c, &out);
        c->last = clock_now();
        http_exchange_send(x, out.p, out.n);
    } else c->dialect->whole(c, &out);
    if (all) {
        serve__count(s, c->dialect, 200);
        const bool stream = c->stream;
        call_free(c);
        if (stream) http_exchange_end(x);
        else http_exchange_reply(x, 200, "application/json", &out);
    }
    buf_free(&out);
}

void serve_failed(struct serve *s, uint64_t ticket, int rc) {
    int64_t prompt;
    struct serve_call *c = call_of(s, ticket, &prompt);
    if (c) fail(c, rc == ERR_INVAL || rc == ERR_NOMEM ? 400 : 500, err_msg());
}

void serve_failed_all(struct serve *s) {
    while (s->calls) fail(s->calls, 500, "the model has failed");
}

void serve_tick(void *serve) {
    struct serve *s = serve;
    for (struct serve_call *c = s->calls; c; c = c->next) {
        struct buf out = {0};
        if (!c->stream || clock_now() - c->last < SILENCE_S) continue;
        c->last = clock_now();
        begin_stream(c, &out);
        c->dialect->wait(&out);
        http_exchange_send(c->x, out.p, out.n);
        buf_free(&out);
    }
}

/* ---- routes ---- */

static json_t *model_json(const struct serve *s) {
    return json_pack("{s:s, s:s, s:I, s:s, s:I}", "id", s->a.model, "object", "model", "created", (json_int_t)time(NULL),
                     "owned_by", "verlc", "max_model_len", (json_int_t)s->a.max_len);
}

static void reply_json(struct serve *s, struct http_exchange *x, json_t *o) {
    struct buf out = {0};
    serve__json(&out, o);
    serve__count(s, NULL, 200);
    http_exchange_reply(x, 200, "application/json", &out);
}

static void list_models(struct serve *s, struct http_exchange *x) {
    reply_json(s, x, json_pack("{s:s, s:[o]}", "object", "list", "data", model_json(s)));
}

static void health(struct serve *s, struct http_exchange *x) {
    if (s->draining) reply_error(s, x, &serve_chat, 503, "the server is about to end");
    else reply_json(s, x, json_pack("{s:s}", "status", "ok"));
}

static void metrics(struct serve *s, struct http_exchange *x) {
    struct buf out = {0};
    serve__metrics_text(s, &out);
    http_exchange_reply(x, 200, "text/plain; version=0.0.4; charset=utf-8", &out);
}

static void reward(struct serve *s, struct http_exchange *x, const char *session) {
    const struct serve_sessions *sessions = s->a.sessions;
    json_t *body = NULL;
    int rc = read_body(x, &body);
    if (rc == 0 && !sessions->reward) rc = err_set(ERR_INPUT, __FILE__, __LINE__, "sessions take no reward here");
    if (rc == 0) rc = sessions->reward(sessions->ctx, session, body);
    json_decref(body);
    if (rc < 0) reply_error(s, x, &serve_chat, status_of(rc), err_msg());
    else reply_json(s, x, json_pack("{s:s}", "status", "ok"));
}

enum route { CHAT, COMPLETIONS, MESSAGES, COUNT, MODELS, MODEL, HEALTH, METRICS, TOKENIZE, DETOKENIZE, REWARD, NO_ROUTE };
static const struct {
    const char *path, *method;
} routes[] = {[CHAT] = {"/v1/chat/completions", "POST"},
              [COMPLETIONS] = {"/v1/completions", "POST"},
              [MESSAGES] = {"/v1/messages", "POST"},
              [COUNT] = {"/v1/messages/count_tokens", "POST"},
              [MODELS] = {"/v1/models", "GET"},
              [MODEL] = {"/v1/models/", "GET"},
              [HEALTH] = {"/health", "GET"},
              [METRICS] = {"/metrics", "GET"},
              [TOKENIZE] = {"/tokenize", "POST"},
              [DETOKENIZE] = {"/detokenize", "POST"},
              [REWARD] = {"/reward", "POST"}};

static enum route route_of(const char *path) {
    for (int i = 0; i < NO_ROUTE; i++)
        if (i == MODEL ? strncmp(path, routes[i].path, strlen(routes[i].path)) == 0 : strcmp(path, routes[i].path) == 0)
            return (enum route)i;
    return NO_ROUTE;
}

/* Takes "/sessions/ID" off the path: 0 none, 1 with its id (129 bytes), ERR_INPUT. */
static int take_session(const struct serve *s, const char **path, char *id) {
    static const char prefix[] = "/sessions/";
    if (strncmp(*path, prefix, sizeof prefix - 1) != 0) return 0;
    const char *from = *path + sizeof prefix - 1;
    const size_t n = strspn(from, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-");
    if (!s->a.sessions || n == 0 || n > 128 || from[n] != '/') FAIL(ERR_INPUT, "there is no such session");
    memcpy(id, from, n);
    id[n] = '\0';
    *path = from + n;
    return 1;
}

/* Whether the request may use the session; else it is answered. */
static bool may_enter(struct serve *s, struct http_exchange *x, const struct serve_dialect *d, const char *session) {
    const struct serve_sessions *sessions = s->a.sessions;
    const char *bearer = http_exchange_header(x, "Authorization"), *key = http_exchange_header(x, "x-api-key");
    if (!sessions->enter) return true;
    if (bearer && strncasecmp(bearer, "Bearer ", 7) == 0) key = bearer + 7;
    const int status = sessions->enter(sessions->ctx, session, key);
    if (status != 0) reply_error(s, x, d, status, err_msg());
    return status == 0;
}

static bool is_messages(const char *path) {
    const char *v1 = strstr(path, "/v1/messages");
    return v1 && (v1 == path || strncmp(path, "/sessions/", 10) == 0);
}

void serve_request(void *serve, struct http_exchange *x) {
    struct serve *s = serve;
    const char *path = http_exchange_path(x);
    const struct serve_dialect *d = is_messages(path) ? &serve_messages : &serve_chat;
    char id[129];
    const int found = take_session(s, &path, id);
    const char *session = found > 0 ? id : NULL;
    enum route r = found < 0 ? NO_ROUTE : route_of(path);
    if (r == REWARD ? !session : session && (r == HEALTH || r == METRICS || r == TOKENIZE || r == DETOKENIZE)) r = NO_ROUTE;
    if (s->a.sessions_only && !session && r != HEALTH && r != METRICS) r = NO_ROUTE;
    if (session && !may_enter(s, x, d, session)) return;
    if (r == NO_ROUTE || (r == MODEL && strcmp(path + strlen(routes[MODEL].path), s->a.model) != 0)) {
        reply_error(s, x, d, 404, found < 0 ? err_msg() : r == MODEL ? "there is no such model" : "there is no such route");
        return;
    }
    if (strcmp(http_exchange_method(x), routes[r].method) != 0) {
        http_exchange_add_header(x, "Allow", routes[r].method);
        reply_error(s, x, d, 405, strcmp(routes[r].method, "GET") == 0 ? "GET is wanted" : "POST is wanted");
        return;
    }
    switch (r) {
    case CHAT: ask(s, x, &serve_chat, session); break;
    case COMPLETIONS: ask(s, x, &serve_completions, session); break;
    case MESSAGES: ask(s, x, &serve_messages, session); break;
    case COUNT: count(s, x, session); break;
    case MODELS: list_models(s, x); break;
    case MODEL: reply_json(s, x, model_json(s)); break;
    case HEALTH: health(s, x); break;
    case METRICS: metrics(s, x); break;
    case TOKENIZE: answer_tokens(s, x, serve__tokenize); break;
    case DETOKENIZE: answer_tokens(s, x, serve__detokenize); break;
    case REWARD: reward(s, x, session); break;
    case NO_ROUTE: break;
    }
}

void serve_refused(void *serve, struct http_exchange *x, int status, const char *message) {
    reply_error(serve, x, is_messages(http_exchange_path(x)) ? &serve_messages : &serve_chat, status, message);
}

/* ---- creating ---- */

static int find_parser(struct serve *s) {
    const char *format = s->a.tool_format ? s->a.tool_format : serve__tool_format(s->a.tok);
    s->parser = format ? tool_parser_find(format) : NULL;
    if (s->a.tool_format && !s->parser)
        FAIL(ERR_INVAL, "--tool-parser %s: there is no such format; one of %s", s->a.tool_format, tool_parser_names());
    if (!s->parser) return 0;
    s->markers = serve__tool_markers(tool_parser_name(s->parser));
    for (int i = 0; s->markers[i]; i++) s->marker_ids[i] = s->markers[i][0] ? tokenizer_id(s->a.tok, s->markers[i]) : -1;
    return 0;
}

static int open_all(struct serve *s) {
    const char *key;
    json_t *token, *special = tokenizer_special_tokens(s->a.tok);
    s->special = json_array();
    json_object_foreach(special, key, token) json_array_append(s->special, token);
    json_decref(special);
    if (getrandom(&s->salt, sizeof s->salt, 0) != sizeof s->salt) FAIL(ERR_INTERNAL, "no random numbers: %s", strerror(errno));
    if (!s->a.sessions_only && (tokenizer_chat_template(s->a.tok, false) || tokenizer_chat_template(s->a.tok, true)))
        TRY(chat_template_create(&s->chat, s->a.tok));
    return find_parser(s);
}

int serve_create(struct serve **out, const struct serve_args *a) {
    struct serve *s = xcalloc(1, sizeof *s);
    s->a = *a;
    const int rc = open_all(s);
    if (rc < 0) serve_destroy(s);
    else *out = s;
    return rc;
}

void serve_destroy(struct serve *s) {
    if (!s) return;
    while (s->calls) call_free(s->calls);
    chat_template_destroy(s->chat);
    json_decref(s->special);
    free(s->slots);
    free(s->generation);
    free(s->prompt_of);
    free(s);
}

void serve_drain(struct serve *s) { s->draining = true; }
int64_t serve_open(const struct serve *s) { return s->n_calls; }
