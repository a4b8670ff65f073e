/* exchange.c - requests of any method that are answered later, whole or piece by piece. See server.h.
 *
 * Invariant: an exchange ends once, by its reply, by the end of its pieces or by its client's leaving, and is freed then. */
#include "http/http_int.h"

#include "base/err.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/keyvalq_struct.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

struct http_exchange {
    struct http_server *server;
    struct evhttp_request *request;
    struct http_exchange *prev, *next;
    char *path;
    struct evkeyvalq params;
    const char *body; /* of the request's buffer */
    size_t n_body;
    void (*closed)(void *arg);
    void *arg;
    bool begun;
};

static void exchange_free(struct http_exchange *x) {
    if (x->prev) x->prev->next = x->next;
    else x->server->exchanges = x->next;
    if (x->next) x->next->prev = x->prev;
    evhttp_clear_headers(&x->params);
    free(x->path);
    free(x);
}

/* Its client has left. */
static void on_close(struct evhttp_connection *c, void *arg) {
    struct http_exchange *x = arg;
    struct evhttp_request *r = x->request;
    void (*const closed)(void *) = x->closed;
    void *const closed_arg = x->arg;
    (void)c;
    exchange_free(x);
    if (!evhttp_request_get_connection(r)) evhttp_request_free(r); /* taken from its connection, so ours */
    if (closed) closed(closed_arg);
}

struct http_exchange *http__exchange_create(struct http_server *s, struct evhttp_request *r, const void *params) {
    const struct evkeyvalq *from = params;
    struct http_exchange *x = xcalloc(1, sizeof *x);
    struct evbuffer *in = evhttp_request_get_input_buffer(r);
    const char *path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(r));
    *x = (struct http_exchange){.server = s, .request = r, .next = s->exchanges, .path = xstrdup(path && *path ? path : "/")};
    x->n_body = in ? evbuffer_get_length(in) : 0;
    x->body = x->n_body ? (const char *)evbuffer_pullup(in, -1) : "";
    TAILQ_INIT(&x->params);
    for (const struct evkeyval *p = from->tqh_first; p; p = p->next.tqe_next) evhttp_add_header(&x->params, p->key, p->value);
    if (s->exchanges) s->exchanges->prev = x;
    s->exchanges = x;
    evhttp_connection_set_closecb(evhttp_request_get_connection(r), on_close, x);
    return x;
}

/* libevent does not read a connection whose request is being answered, and so does not see its end. */
void http__exchanges_tick(struct http_server *s) {
    for (struct http_exchange *x = s->exchanges, *next; x; x = next) {
        struct evhttp_connection *c = evhttp_request_get_connection(x->request);
        char byte;
        next = x->next;
        const ssize_t n = recv(bufferevent_getfd(evhttp_connection_get_bufferevent(c)), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) evhttp_connection_free(c); /* calls on_close */
    }
}

void http__exchanges_close(struct http_server *s) {
    while (s->exchanges) {
        evhttp_connection_set_closecb(evhttp_request_get_connection(s->exchanges->request), NULL, NULL);
        exchange_free(s->exchanges);
    }
}

const char *http_exchange_method(const struct http_exchange *x) {
    static const struct {
        enum evhttp_cmd_type type;
        const char *name;
    } names[] = {{EVHTTP_REQ_GET, "GET"},     {EVHTTP_REQ_POST, "POST"},       {EVHTTP_REQ_HEAD, "HEAD"},
                 {EVHTTP_REQ_PUT, "PUT"},     {EVHTTP_REQ_DELETE, "DELETE"},   {EVHTTP_REQ_OPTIONS, "OPTIONS"},
                 {EVHTTP_REQ_TRACE, "TRACE"}, {EVHTTP_REQ_CONNECT, "CONNECT"}, {EVHTTP_REQ_PATCH, "PATCH"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].type == evhttp_request_get_command(x->request)) return names[i].name;
    return "";
}
const char *http_exchange_path(const struct http_exchange *x) { return x->path; }
const char *http_exchange_param(const struct http_exchange *x, const char *name) { return evhttp_find_header(&x->params, name); }
const char *http_exchange_header(const struct http_exchange *x, const char *name) {
    return evhttp_find_header(evhttp_request_get_input_headers(x->request), name);
}
const char *http_exchange_body(const struct http_exchange *x, size_t *n) {
    *n = x->n_body;
    return x->body;
}

void http_exchange_on_close(struct http_exchange *x, void (*closed)(void *arg), void *arg) {
    x->closed = closed;
    x->arg = arg;
}

void http_exchange_add_header(struct http_exchange *x, const char *name, const char *value) {
    evhttp_add_header(evhttp_request_get_output_headers(x->request), name, value);
}

static void free_body(const void *data, size_t n, void *extra) {
    (void)n, (void)extra;
    free((void *)(uintptr_t)data);
}

/* The request, without its exchange. */
static struct evhttp_request *let_go(struct http_exchange *x) {
    struct evhttp_request *r = x->request;
    evhttp_connection_set_closecb(evhttp_request_get_connection(r), NULL, NULL);
    exchange_free(x);
    return r;
}

void http_exchange_reply(struct http_exchange *x, int status, const char *type, struct buf *body) {
    struct evbuffer *out = evbuffer_new();
    CHECK(out && !x->begun);
    if (body->p) evbuffer_add_reference(out, body->p, body->n, free_body, NULL);
    *body = (struct buf){0};
    if (x->server->draining) http_exchange_add_header(x, "Connection", "close");
    struct evhttp_request *r = let_go(x);
    http__add_headers(r, type);
    evhttp_send_reply(r, status, http__reason(status), out);
    evbuffer_free(out);
}

void http_exchange_begin(struct http_exchange *x, int status, const char *type) {
    CHECK(!x->begun);
    x->begun = true;
    if (x->server->draining) http_exchange_add_header(x, "Connection", "close");
    http__add_headers(x->request, type);
    evhttp_send_reply_start(x->request, status, http__reason(status));
}

void http_exchange_send(struct http_exchange *x, const char *p, size_t n) {
    CHECK(x->begun);
    if (n == 0) return; /* an empty chunk would be the end */
    struct evbuffer *out = evbuffer_new();
    CHECK(out && evbuffer_add(out, p, n) == 0);
    evhttp_send_reply_chunk(x->request, out);
    evbuffer_free(out);
}

void http_exchange_end(struct http_exchange *x) {
    CHECK(x->begun);
    evhttp_send_reply_end(let_go(x));
}
