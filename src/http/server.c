/* server.c - see server.h. evhttp of libevent reads requests and writes answers; here are listening, access control and the
 * answers of handlers. connections.c has the limits, exchange.c the requests that are answered later.
 *
 * It knows nothing of runs or models. One thread: a handler is short or answers with a stream. */
#include "http/http_int.h"

#include "base/err.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/keyvalq_struct.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/queue.h>
#include <sys/random.h>
#include <unistd.h>

enum {
    N_PORTS = 20,
    MAX_HEADER_BYTES = 16 << 10,
    IDLE_S = 20, /* of silence */
    STEPPED_IDLE_S = 30 * 86400,
    BACKLOG = 4096, /* connections that are not accepted yet; libevent has 128 */
};

#ifdef STATIC_LIBEVENT
/* For libevent's archive of Debian 12, which has these from glibc 2.36; `make dist` links it and is to run on 2.35. */
void arc4random_buf(void *out, size_t n) {
    for (size_t at = 0; at < n;) {
        const ssize_t got = getrandom((char *)out + at, n - at, 0);
        CHECK(got > 0 || errno == EINTR);
        if (got > 0) at += (size_t)got;
    }
}
uint32_t arc4random(void) {
    uint32_t v;
    arc4random_buf(&v, sizeof v);
    return v;
}
#endif

/* ---- requests ---- */

const char *http_param(const struct http_get *g, const char *name) { return evhttp_find_header(g->params, name); }

int http_param_i64(const struct http_get *g, const char *name, int64_t lo, int64_t hi, int64_t *out) {
    const char *text = http_param(g, name);
    char *end;
    if (!text) return 0;
    errno = 0;
    const long long v = strtoll(text, &end, 10);
    if (errno || end == text || *end || v < lo || v > hi)
        FAIL(ERR_INVAL, "%s: a whole number from %lld to %lld is wanted", name, (long long)lo, (long long)hi);
    *out = v;
    return 0;
}

int http_params(const struct http_get *g, const char *name, const char **out, int max) {
    const struct evkeyvalq *params = g->params;
    int n = 0;
    for (const struct evkeyval *p = params->tqh_first; p && n < max; p = p->next.tqe_next)
        if (strcmp(p->key, name) == 0) out[n++] = p->value;
    return n;
}

/* ---- who may ask ---- */

static int make_token(struct http_server *s) {
    char text[2 * HTTP_TOKEN_BYTES + 1];
    if (s->a.key) {
        s->token = xstrdup(s->a.key);
        return 0;
    }
    TRY(random_hex(text, HTTP_TOKEN_BYTES));
    s->token = xstrdup(text);
    return 0;
}

/* In a time that does not depend on where they differ. */
static bool same_token(const char *token, const char *got, size_t n) {
    unsigned char differ = 0;
    if (n != strlen(token)) return false;
    for (size_t i = 0; i < n; i++) differ |= (unsigned char)(token[i] ^ got[i]);
    return differ == 0;
}

static bool cookie_is_right(const struct http_server *s, const char *cookies) {
    const size_t n = strlen(s->cookie);
    for (const char *p = cookies; p && *p; p += strcspn(p, ";"), p += *p == ';') {
        p += strspn(p, " ");
        if (strncmp(p, s->cookie, n) == 0 && p[n] == '=' && same_token(s->token, p + n + 1, strcspn(p + n + 1, "; "))) return true;
    }
    return false;
}

/* On loopback: a page of another site whose name was made to lead here (DNS rebinding) sends its own name. */
static bool host_is_ours(const struct http_server *s, const char *host) {
    static const char *const names[] = {"127.0.0.1", "localhost", "[::1]"};
    if (!s->loopback) return true; /* the token says it: a cookie is not sent under another name */
    for (size_t i = 0; host && i < sizeof names / sizeof *names; i++) {
        const size_t n = strlen(names[i]);
        if (strncasecmp(host, names[i], n) == 0 && (host[n] == '\0' || host[n] == ':')) return true;
    }
    /* the address that --host gave, one of loopback */
    const size_t n = strlen(s->a.host);
    return host && strncasecmp(host, s->a.host, n) == 0 && (host[n] == '\0' || host[n] == ':');
}

/* ---- answers ---- */

void http__add_headers(struct evhttp_request *r, const char *type) {
    static const char *const fixed[][2] = {
        {"Content-Security-Policy",
         "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
        {"X-Content-Type-Options", "nosniff"},
        {"Referrer-Policy", "no-referrer"},
        {"Cross-Origin-Resource-Policy", "same-origin"},
        {"Cache-Control", "no-store"}};
    struct evkeyvalq *h = evhttp_request_get_output_headers(r);
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) evhttp_add_header(h, fixed[i][0], fixed[i][1]);
    evhttp_add_header(h, "Content-Type", type);
}

const char *http__reason(int status) {
    static const struct {
        int status;
        const char *reason;
    } names[] = {{200, "OK"},
                 {400, "Bad Request"},
                 {401, "Unauthorized"},
                 {403, "Forbidden"},
                 {404, "Not Found"},
                 {405, "Method Not Allowed"},
                 {409, "Conflict"},
                 {413, "Content Too Large"},
                 {429, "Too Many Requests"},
                 {500, "Internal Server Error"},
                 {503, "Service Unavailable"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].status == status) return names[i].reason;
    return "Error";
}

static void reply_error(struct evhttp_request *r, int status, const char *message) {
    struct buf text = {0};
    json_t *o = json_object();
    struct evbuffer *body = evbuffer_new();
    json_t *value = json_string(message);
    json_object_set_new(o, "error", value ? value : json_string("the message is not UTF-8"));
    if (json_dump_line(&text, o) == 0 && body) evbuffer_add(body, text.p, text.n);
    http__add_headers(r, "application/json");
    if (status == 405) evhttp_add_header(evhttp_request_get_output_headers(r), "Allow", "GET");
    evhttp_send_reply(r, status, http__reason(status), body);
    if (body) evbuffer_free(body);
    json_decref(o);
    buf_free(&text);
}

static void reply_failed(struct evhttp_request *r, int rc) {
    if (rc == ERR_INPUT) reply_error(r, 404, err_msg());
    else if (rc == ERR_INVAL) reply_error(r, 400, err_msg());
    else reply_error(r, 500, err_msg());
}

static void free_body(const void *data, size_t n, void *extra) {
    (void)n, (void)extra;
    free((void *)(uintptr_t)data);
}

/* ---- streams ---- */

struct stream {
    struct http_server *server;
    struct evhttp_request *request;
    struct http_stream from;
    struct event *turn;
    struct stream *next;
};

static void stream_end(struct stream *t) {
    for (struct stream **p = &t->server->streams; *p; p = &(*p)->next)
        if (*p == t) {
            *p = t->next;
            break;
        }
    event_free(t->turn);
    t->from.close(t->from.state);
    free(t);
}

static void stream_dropped(struct evhttp_connection *c, void *arg) { /* the browser has left */
    struct evhttp_request *r = ((struct stream *)arg)->request;
    (void)c;
    stream_end(arg);
    if (!evhttp_request_get_connection(r)) evhttp_request_free(r); /* taken from its connection, so ours */
}

static void stream_go_on(struct stream *t) { event_add(t->turn, &(struct timeval){0, 0}); }
static void stream_sent(struct evhttp_connection *c, void *arg) {
    (void)c;
    stream_go_on(arg);
}

static void stream_turn(evutil_socket_t fd, short what, void *arg) {
    (void)fd, (void)what;
    struct stream *t = arg;
    struct buf out = {0};
    const int rc = t->from.next(t->from.state, &out);
    if (rc < 0) {
        json_t *o = json_pack("{s:s}", "error", err_msg());
        if (o && json_dump_line(&out, o) == 0) buf_addc(&out, '\n');
        json_decref(o);
    }
    struct evbuffer *chunk = evbuffer_new();
    if (out.n > 0) evbuffer_add(chunk, out.p, out.n);
    if (rc > 0 && out.n > 0) evhttp_send_reply_chunk_with_cb(t->request, chunk, stream_sent, t);
    else if (rc > 0) stream_go_on(t);
    else {
        struct evhttp_request *r = t->request;
        evhttp_connection_set_closecb(evhttp_request_get_connection(r), NULL, NULL);
        stream_end(t);
        if (out.n > 0) evhttp_send_reply_chunk(r, chunk);
        evhttp_send_reply_end(r);
    }
    evbuffer_free(chunk);
    buf_free(&out);
}

static void stream_start(struct http_server *s, struct evhttp_request *r, const struct http_reply *reply) {
    struct stream *t = xcalloc(1, sizeof *t);
    *t = (struct stream){.server = s, .request = r, .from = reply->stream, .next = s->streams};
    s->streams = t;
    t->turn = event_new(s->base, -1, 0, stream_turn, t);
    CHECK(t->turn);
    evhttp_connection_set_closecb(evhttp_request_get_connection(r), stream_dropped, t);
    evhttp_send_reply_start(r, 200, "OK");
    stream_go_on(t);
}

/* ---- one request ---- */

/* ?token=...: from now on a cookie has it, and the address bar does not. */
static void admit(const struct http_server *s, struct evhttp_request *r) {
    struct evkeyvalq *h = evhttp_request_get_output_headers(r);
    char *cookie = xasprintf("%s=%s; HttpOnly; SameSite=Lax; Path=/", s->cookie, s->token);
    http__add_headers(r, "text/plain");
    evhttp_add_header(h, "Set-Cookie", cookie);
    evhttp_add_header(h, "Location", "/");
    evhttp_send_reply(r, 303, "See Other", NULL);
    free(cookie);
}

/* Whether it may be answered; else it has been refused. */
static bool allowed(const struct http_server *s, struct evhttp_request *r, const struct http_get *get) {
    const struct evkeyvalq *h = evhttp_request_get_input_headers(r);
    const char *token = http_param(get, "token");
    if (!host_is_ours(s, evhttp_find_header(h, "Host"))) {
        reply_error(r, 403, "the request is for another host; open the address that verlc view printed");
        return false;
    }
    if (!s->token[0] || cookie_is_right(s, evhttp_find_header(h, "Cookie"))) return true;
    if (token && strcmp(get->path, "/") == 0 && same_token(s->token, token, strlen(token))) admit(s, r);
    else reply_error(r, 403, "a token is needed; open the address that verlc view printed");
    return false;
}

/* As clients of APIs send it: Authorization: Bearer TOKEN, or x-api-key: TOKEN. */
static bool key_is_right(const struct http_server *s, const struct evkeyvalq *h) {
    const char *bearer = evhttp_find_header(h, "Authorization"), *key = evhttp_find_header(h, "x-api-key");
    if (bearer && strncasecmp(bearer, "Bearer ", 7) == 0 && same_token(s->token, bearer + 7, strlen(bearer + 7))) return true;
    return key && same_token(s->token, key, strlen(key));
}

/* A request of an exchange: a page of a browser is another site's, for this server has none. */
static void exchange(struct http_server *s, struct evhttp_request *r, const struct http_get *get) {
    const struct evkeyvalq *h = evhttp_request_get_input_headers(r);
    struct http_exchange *x = http__exchange_create(s, r, get->params);
    const bool open = s->a.open_path && strcmp(get->path, s->a.open_path) == 0;
    if (!host_is_ours(s, evhttp_find_header(h, "Host"))) s->a.refused(s->a.arg, x, 403, "the request is for another host");
    else if (s->token[0] && !open && !key_is_right(s, h))
        s->a.refused(s->a.arg, x, 401, "the API key is missing or wrong: Authorization: Bearer KEY, or x-api-key: KEY");
    else if (!s->token[0] && evhttp_find_header(h, "Origin"))
        s->a.refused(s->a.arg, x, 403, "a browser's page is not answered without an API key");
    else s->a.serve(s->a.arg, x);
}

static void answer(struct http_server *s, struct evhttp_request *r, const struct http_get *get) {
    struct http_reply reply = {.type = "application/json"};
    const int rc = s->a.handle(s->a.arg, get, &reply);
    if (rc < 0) {
        buf_free(&reply.body);
        reply_failed(r, rc);
        return;
    }
    http__add_headers(r, reply.type);
    if (reply.stream.next) {
        stream_start(s, r, &reply);
        return;
    }
    struct evbuffer *body = evbuffer_new();
    CHECK(body);
    if (reply.file) evbuffer_add_reference(body, reply.file, reply.file_bytes, NULL, NULL);
    else if (reply.body.p) evbuffer_add_reference(body, reply.body.p, reply.body.n, free_body, NULL);
    evhttp_send_reply(r, 200, "OK", body);
    evbuffer_free(body);
}

static void on_request(struct evhttp_request *r, void *arg) {
    struct http_server *s = arg;
    http__asked(s, r);
    const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(r);
    const char *path = uri ? evhttp_uri_get_path(uri) : NULL, *query = uri ? evhttp_uri_get_query(uri) : NULL;
    struct evkeyvalq params = {0};
    TAILQ_INIT(&params);
    if (!s->a.serve && evhttp_request_get_command(r) != EVHTTP_REQ_GET) reply_error(r, 405, "only GET is answered");
    else if (!path || evhttp_uri_get_host(uri) || (query && evhttp_parse_query_str(query, &params) < 0))
        reply_error(r, 400, "the address is not valid; a proxy is not served");
    else {
        const struct http_get get = {.path = *path ? path : "/", .params = &params};
        if (s->a.serve) exchange(s, r, &get);
        else if (allowed(s, r, &get)) answer(s, r, &get);
    }
    evhttp_clear_headers(&params);
}

/* ---- listening ---- */

static void on_signal(evutil_socket_t fd, short what, void *arg) {
    (void)fd, (void)what;
    struct http_server *s = arg;
    if (s->a.signalled) s->a.signalled(s->a.arg);
    else event_base_loopbreak(s->base);
}

static void on_tick(evutil_socket_t fd, short what, void *arg) {
    (void)fd, (void)what;
    struct http_server *s = arg;
    http__connections_tick(s);
    http__exchanges_tick(s);
    if (s->a.tick) s->a.tick(s->a.arg);
}

static void on_woken(evutil_socket_t fd, short what, void *arg) {
    struct http_server *s = arg;
    uint64_t n;
    (void)what;
    if (read(fd, &n, sizeof n) == sizeof n && s->a.woken) s->a.woken(s->a.arg);
}

static void on_log(int severity, const char *text) {
    if (severity >= EVENT_LOG_WARN) log_debug("libevent: %s", text);
}

static bool is_loopback(const struct sockaddr_storage *at) {
    if (at->ss_family == AF_INET) return ntohl(((const struct sockaddr_in *)at)->sin_addr.s_addr) >> 24 == 127;
    return at->ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)at)->sin6_addr);
}

static struct evhttp_bound_socket *bind_port(const struct http_server *s) {
    if (s->a.port > 0) return evhttp_bind_socket_with_handle(s->http, s->a.host, (ev_uint16_t)s->a.port);
    struct evhttp_bound_socket *b = NULL;
    for (int64_t i = 0; s->a.first_port > 0 && i < N_PORTS && !b; i++)
        b = evhttp_bind_socket_with_handle(s->http, s->a.host, (ev_uint16_t)(s->a.first_port + i));
    return b ? b : evhttp_bind_socket_with_handle(s->http, s->a.host, 0);
}

static int listen_on(struct http_server *s) {
    struct sockaddr_storage at = {0};
    socklen_t n = sizeof at;
    struct evhttp_bound_socket *b = bind_port(s);
    if (!b) {
        if (s->a.port > 0)
            FAIL(ERR_IO, "cannot listen on %s port %lld: %s; another --port, or none for a free one", s->a.host,
                 (long long)s->a.port, strerror(errno));
        FAIL(ERR_IO, "cannot listen on %s: %s; --host is to be an address of this machine", s->a.host, strerror(errno));
    }
    s->listener = evhttp_bound_socket_get_listener(b);
    if (listen(evhttp_bound_socket_get_fd(b), BACKLOG) < 0) log_debug("a longer queue of connections: %s", strerror(errno));
    if (getsockname(evhttp_bound_socket_get_fd(b), (struct sockaddr *)&at, &n) < 0)
        FAIL(ERR_IO, "the address of a socket: %s", strerror(errno));
    s->port = ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&at)->sin6_port : ((struct sockaddr_in *)&at)->sin_port);
    s->connections.port = s->port;
    s->loopback = is_loopback(&at);
    return 0;
}

/* 0.0.0.0 is no address to open: the machine's name stands for it. */
static void make_url(struct http_server *s) {
    char name[256] = "";
    const char *host = s->a.host;
    if (strcmp(host, "0.0.0.0") == 0 || strcmp(host, "::") == 0)
        if (gethostname(name, sizeof name - 1) == 0) host = name;
    const bool bare6 = strchr(host, ':') != NULL;
    s->address = xasprintf("http://%s%s%s:%d", bare6 ? "[" : "", host, bare6 ? "]" : "", s->port);
    s->url = xasprintf("%s/%s%s", s->address, s->token[0] ? "?token=" : "", s->token);
}

static int add_events(struct http_server *s) {
    s->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    s->tick = event_new(s->base, -1, EV_PERSIST, on_tick, s);
    s->woken = s->wake_fd >= 0 ? event_new(s->base, s->wake_fd, EV_READ | EV_PERSIST, on_woken, s) : NULL;
    if (!s->tick || !s->woken || event_add(s->tick, &(struct timeval){1, 0}) < 0 || event_add(s->woken, NULL) < 0)
        FAIL(ERR_NOMEM, "no memory for the server");
    if (s->a.stepped) return 0;
    s->on_int = evsignal_new(s->base, SIGINT, on_signal, s);
    s->on_term = evsignal_new(s->base, SIGTERM, on_signal, s);
    if (!s->on_int || !s->on_term || event_add(s->on_int, NULL) < 0 || event_add(s->on_term, NULL) < 0)
        FAIL(ERR_NOMEM, "no memory for the server");
    return 0;
}

static int open_server(struct http_server *s) {
    s->base = event_base_new();
    s->http = s->base ? evhttp_new(s->base) : NULL;
    if (!s->http) FAIL(ERR_NOMEM, "no memory for the server");
    evhttp_set_allowed_methods(s->http, (ev_uint16_t)~0u); /* refused in on_request, with a message */
    evhttp_set_max_headers_size(s->http, MAX_HEADER_BYTES);
    evhttp_set_max_body_size(s->http, s->a.max_body);
    /* libevent's own limit of silence counts time between steps: there connections.c has the limits alone */
    evhttp_set_timeout(s->http, s->a.stepped ? STEPPED_IDLE_S : s->a.request_s > IDLE_S ? (int)s->a.request_s : IDLE_S);
    evhttp_set_gencb(s->http, on_request, s);
    TRY(http__connections_open(s));
    TRY(add_events(s));
    TRY(listen_on(s));
    if (!s->loopback || s->a.token || s->a.key) TRY(make_token(s));
    else s->token = xstrdup("");
    snprintf(s->cookie, sizeof s->cookie, "verlc_view_%d", s->port); /* cookies of one host are those of all its ports */
    make_url(s);
    return 0;
}

int http_server_open(struct http_server **out, const struct http_server_args *a) {
    struct http_server *s = xcalloc(1, sizeof *s);
    s->a = *a;
    s->wake_fd = -1;
    event_set_log_callback(on_log);
    const int rc = open_server(s);
    if (rc < 0) http_server_close(s);
    else *out = s;
    return rc;
}

void http_server_close(struct http_server *s) {
    if (!s) return;
    while (s->streams) {
        evhttp_connection_set_closecb(evhttp_request_get_connection(s->streams->request), NULL, NULL);
        stream_end(s->streams);
    }
    http__exchanges_close(s);
    if (s->http) evhttp_free(s->http);
    http__connections_close(s);
    struct event *const events[] = {s->on_int, s->on_term, s->tick, s->woken};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (events[i]) event_free(events[i]);
    if (s->base) event_base_free(s->base);
    if (s->wake_fd >= 0) close(s->wake_fd);
    free(s->token);
    free(s->url);
    free(s->address);
    free(s);
}

const char *http_server_url(const struct http_server *s) { return s->url; }
const char *http_server_address(const struct http_server *s) { return s->address; }
const char *http_server_token(const struct http_server *s) { return s->token; }

int http_server_run(struct http_server *s) {
    event_base_dispatch(s->base);
    return 0;
}

void http_server_stop(struct http_server *s) { event_base_loopbreak(s->base); }

void http_server_wake(struct http_server *s) { (void)!write(s->wake_fd, &(uint64_t){1}, sizeof(uint64_t)); }

int http_server_step(struct http_server *s) {
    http__connections_step(s, false);
    const int rc = event_base_loop(s->base, EVLOOP_NONBLOCK);
    http__connections_step(s, true);
    if (rc < 0) FAIL(ERR_IO, "the HTTP server cannot wait for requests");
    return 0;
}

struct http_listener *http_server_add_listener(struct http_server *s, int fd) {
    evutil_make_socket_nonblocking(fd);
    struct evhttp_bound_socket *b = evhttp_accept_socket_with_handle(s->http, fd);
    CHECK(b != NULL);
    return (struct http_listener *)b;
}

void http_server_remove_listener(struct http_server *s, struct http_listener *l) {
    evhttp_del_accept_socket(s->http, (struct evhttp_bound_socket *)l);
}

void http_server_drain(struct http_server *s) {
    s->draining = true;
    evconnlistener_disable(s->listener);
    http__connections_drop_idle(s);
    event_add(s->tick, &(struct timeval){0, 20000}); /* for whoever waits for the end */
}

bool http_server_is_busy(struct http_server *s) { return http__connections_busy(s); }
