/* judge_server.c - see judge_server.h. evhttp of libevent reads requests and writes answers. */
#include "reward_model/judge_server.h"

#include "base/err.h"
#include "base/hash.h"
#include "base/json.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/buffer.h>
#include <event2/event.h>
#include <event2/http.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>

enum { MAX_HEADER_BYTES = 16 << 10, MAX_BODY_BYTES = 16 << 20, IDLE_S = 60 };

struct open_request { /* a request that the judge works on */
    struct judge_server *server;
    struct evhttp_request *request; /* NULL: its client has left */
    char *model;                    /* as the request names it */
    uint64_t uid;
    struct open_request *next;
};
struct judge_server {
    struct judge_args a;
    struct judge *judge;
    struct event_base *base;
    struct evhttp *http;
    struct open_request *open;
    char *address;
};

/* ---- answers ---- */

static void reply(struct evhttp_request *r, int status, const char *reason, json_t *value) {
    struct buf text = {0};
    struct evbuffer *body = evbuffer_new();
    struct evkeyvalq *h = evhttp_request_get_output_headers(r);
    CHECK(value && body && json_dump_line(&text, value) == 0 && evbuffer_add(body, text.p, text.n) == 0);
    evhttp_add_header(h, "Content-Type", "application/json");
    evhttp_add_header(h, "Connection", "close"); /* nothing is read between two generations */
    evhttp_send_reply(r, status, reason, body);
    evbuffer_free(body);
    buf_free(&text);
    json_decref(value);
}

static void reply_error(struct evhttp_request *r, int status, const char *reason, const char *message) {
    json_t *text = json_string(message);
    reply(r, status, reason,
          json_pack("{s:{s:o, s:s, s:i}}", "error", "message", text ? text : json_string("the message is not UTF-8"), "type",
                    status < 500 ? "invalid_request_error" : "server_error", "code", status));
}

static void open_request_free(struct open_request *q) {
    for (struct open_request **p = &q->server->open; *p; p = &(*p)->next)
        if (*p == q) {
            *p = q->next;
            break;
        }
    if (q->request) evhttp_connection_set_closecb(evhttp_request_get_connection(q->request), NULL, NULL);
    free(q->model);
    free(q);
}

static void on_answer(void *arg, int64_t tag, const struct judge_answer *a) {
    (void)arg;
    struct open_request *q = (struct open_request *)(intptr_t)tag;
    struct evhttp_request *r = q->request;
    if (r) {
        char id[32];
        snprintf(id, sizeof id, "chatcmpl-%016llx", (unsigned long long)q->uid);
        json_t *message = json_pack("{s:s, s:s%}", "role", "assistant", "content", a->text, a->n_text);
        evhttp_connection_set_closecb(evhttp_request_get_connection(r), NULL, NULL);
        q->request = NULL;
        reply(r, 200, "OK",
              json_pack("{s:s, s:s, s:I, s:s, s:[{s:i, s:o, s:s}], s:{s:I, s:I, s:I}}", "id", id, "object", "chat.completion",
                        "created", (json_int_t)time(NULL), "model", q->model, "choices", "index", 0, "message", message,
                        "finish_reason", engine_finish_name(a->finish), "usage", "prompt_tokens", (json_int_t)a->n_prompt,
                        "completion_tokens", (json_int_t)a->n, "total_tokens", (json_int_t)(a->n_prompt + a->n)));
    }
    open_request_free(q);
}

/* ---- requests ---- */

static int check_keys(const json_t *body) {
    static const char *const known[] = {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
                                        "seed",  "n",        "stream"};
    const char *key;
    json_t *value;
    if (!json_is_object(body)) FAIL(ERR_INVAL, "the body is not a JSON object");
    json_object_foreach((json_t *)(uintptr_t)body, key, value) {
        size_t i = 0;
        while (i < sizeof known / sizeof *known && strcmp(key, known[i]) != 0) i++;
        if (i == sizeof known / sizeof *known && !json_is_null(value))
            FAIL(ERR_INVAL,
                 "%s is not supported: the judge reads model, messages, max_tokens, max_completion_tokens, temperature, top_p, "
                 "top_k, seed, n=1 and stream=false",
                 key);
    }
    return 0;
}

static int check_messages(const json_t *messages) {
    size_t i;
    const json_t *m;
    if (!json_is_array(messages) || json_array_size(messages) == 0) FAIL(ERR_INVAL, "messages: a list with a message is wanted");
    json_array_foreach((json_t *)(uintptr_t)messages, i,
                       m) if (!json_is_string(json_object_get(m, "role")) || !json_is_string(json_object_get(m, "content")))
        FAIL(ERR_INVAL, "messages[%zu]: an object with the texts role and content is wanted", i);
    return 0;
}

/* A number from lo to hi; absent or null: *out stays. */
static int number(const json_t *body, const char *key, double lo, double hi, bool whole, double *out) {
    const json_t *v = json_object_get(body, key);
    if (!v || json_is_null(v)) return 0;
    const double x = json_number_value(v);
    if (!(whole ? json_is_integer(v) : json_is_number(v)) || x < lo || x > hi)
        FAIL(ERR_INVAL, "%s: a %snumber from %g to %g is wanted", key, whole ? "whole " : "", lo, hi);
    *out = x;
    return 0;
}

static int read_question(const struct judge_server *s, const json_t *body, struct judge_question *q) {
    double max_tokens = 0, temperature = (double)s->a.temperature, top_p = (double)s->a.top_p, top_k = s->a.top_k, n = 1;
    const json_t *seed = json_object_get(body, "seed"), *stream = json_object_get(body, "stream");
    TRY(check_keys(body));
    TRY(check_messages(json_object_get(body, "messages")));
    TRY(number(body, "max_tokens", 1, INT32_MAX, true, &max_tokens));
    TRY(number(body, "max_completion_tokens", 1, INT32_MAX, true, &max_tokens));
    TRY(number(body, "temperature", 0, 1e6, false, &temperature));
    TRY(number(body, "top_p", 1e-6, 1, false, &top_p));
    TRY(number(body, "top_k", -1, 1 << 24, true, &top_k));
    TRY(number(body, "n", 1, 1, true, &n));
    if (seed && !json_is_null(seed) && !json_is_integer(seed)) FAIL(ERR_INVAL, "seed: a whole number is wanted");
    if (json_is_true(stream)) FAIL(ERR_INVAL, "stream=true is not supported: an answer comes whole");
    *q = (struct judge_question){.messages = json_object_get(body, "messages"),
                                 .max_tokens = (int64_t)max_tokens,
                                 .temperature = temperature < 1e-6 ? 0 : (float)temperature,
                                 .top_p = (float)top_p,
                                 .top_k = (int32_t)top_k,
                                 .seed = (uint64_t)json_integer_value(seed)};
    char *text = json_dumps(q->messages, JSON_SORT_KEYS | JSON_COMPACT);
    CHECK(text != NULL); /* it was read from JSON */
    q->uid = hash64(text, strlen(text));
    free(text);
    return 0;
}

static void on_close(struct evhttp_connection *c, void *arg) { /* the client has left; its answer is dropped */
    (void)c;
    struct open_request *q = arg;
    if (!evhttp_request_get_connection(q->request)) evhttp_request_free(q->request); /* taken from its connection, so ours */
    q->request = NULL;
}

static int submit(struct judge_server *s, struct evhttp_request *r, const json_t *body) {
    struct judge_question q;
    TRY(read_question(s, body, &q));
    const char *model = json_string_value(json_object_get(body, "model"));
    struct open_request *one = xcalloc(1, sizeof *one);
    *one =
        (struct open_request){.server = s, .request = r, .model = xstrdup(model ? model : s->a.dir), .uid = q.uid, .next = s->open};
    s->open = one;
    const int rc = judge_ask(s->judge, &q, (int64_t)(intptr_t)one);
    if (rc < 0) open_request_free(one);
    else evhttp_connection_set_closecb(evhttp_request_get_connection(r), on_close, one);
    return rc;
}

static void complete(struct judge_server *s, struct evhttp_request *r) {
    struct evbuffer *in = evhttp_request_get_input_buffer(r);
    const size_t n = evbuffer_get_length(in);
    const char *text = n ? (const char *)evbuffer_pullup(in, -1) : "";
    json_t *body = NULL;
    int rc = json_parse(&body, text, n, "the request");
    if (rc == 0) rc = submit(s, r, body);
    json_decref(body);
    if (rc == ERR_NOMEM || rc == ERR_INTERNAL) reply_error(r, 500, "Internal Server Error", err_msg());
    else if (rc < 0) reply_error(r, 400, "Bad Request", err_msg());
}

static void list_models(const struct judge_server *s, struct evhttp_request *r) {
    reply(
        r, 200, "OK",
        json_pack("{s:s, s:[{s:s, s:s, s:s}]}", "object", "list", "data", "id", s->a.dir, "object", "model", "owned_by", "verlc"));
}

/* A page of a browser whose name was made to lead here (DNS rebinding) sends its own name. */
static bool host_is_ours(const struct judge_server *s, const char *host) {
    const char *port = strchr(s->address, ':');
    return host && (strcmp(host, s->address) == 0 || (strncasecmp(host, "localhost", 9) == 0 && strcmp(host + 9, port) == 0));
}

static void on_request(struct evhttp_request *r, void *arg) {
    struct judge_server *s = arg;
    const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(r);
    const char *path = uri ? evhttp_uri_get_path(uri) : NULL;
    const enum evhttp_cmd_type how = evhttp_request_get_command(r);
    const struct evkeyvalq *h = evhttp_request_get_input_headers(r);
    const bool chat = path && strcmp(path, "/v1/chat/completions") == 0, models = path && strcmp(path, "/v1/models") == 0;
    if (!host_is_ours(s, evhttp_find_header(h, "Host"))) reply_error(r, 403, "Forbidden", "the request is for another host");
    else if (evhttp_find_header(h, "Origin")) reply_error(r, 403, "Forbidden", "a browser's page is not answered");
    else if (!chat && !models) reply_error(r, 404, "Not Found", "there are POST /v1/chat/completions and GET /v1/models");
    else if (how != (chat ? EVHTTP_REQ_POST : EVHTTP_REQ_GET))
        reply_error(r, 405, "Method Not Allowed", chat ? "POST is wanted" : "GET is wanted");
    else if (chat) complete(s, r);
    else list_models(s, r);
}

/* ---- listening ---- */

static int open_server(struct judge_server *s) {
    struct sockaddr_in at = {0};
    socklen_t n = sizeof at;
    s->base = event_base_new();
    s->http = s->base ? evhttp_new(s->base) : NULL;
    if (!s->http) FAIL(ERR_NOMEM, "no memory for the judge's server");
    evhttp_set_allowed_methods(s->http, (ev_uint16_t)~0u); /* refused in on_request, with a message */
    evhttp_set_max_headers_size(s->http, MAX_HEADER_BYTES);
    evhttp_set_max_body_size(s->http, MAX_BODY_BYTES);
    evhttp_set_timeout(s->http, IDLE_S);
    evhttp_set_gencb(s->http, on_request, s);
    struct evhttp_bound_socket *b = evhttp_bind_socket_with_handle(s->http, "127.0.0.1", 0);
    if (!b || getsockname(evhttp_bound_socket_get_fd(b), (struct sockaddr *)&at, &n) < 0)
        FAIL(ERR_IO, "the judge cannot listen on 127.0.0.1: %s", strerror(errno));
    s->address = xasprintf("127.0.0.1:%d", ntohs(at.sin_port));
    return 0;
}

int judge_server_listen(struct judge_server **out) {
    struct judge_server *s = xcalloc(1, sizeof *s);
    const int rc = open_server(s);
    if (rc < 0) judge_server_close(s);
    else *out = s;
    return rc;
}

const char *judge_server_address(const struct judge_server *s) { return s->address; }

int judge_server_load(struct judge_server *s, const struct judge_args *a) {
    s->a = *a;
    s->a.answered = on_answer;
    return judge_create(&s->judge, &s->a);
}

int judge_server_step(struct judge_server *s) {
    if (event_base_loop(s->base, EVLOOP_NONBLOCK) < 0) FAIL(ERR_IO, "the judge's server cannot wait for requests");
    return judge_step(s->judge);
}

void judge_server_drop(struct judge_server *s) {
    if (s->judge) judge_drop(s->judge);
    while (s->open) {
        if (s->open->request) reply_error(s->open->request, 503, "Service Unavailable", "the samples were given up");
        open_request_free(s->open);
    }
}

void judge_server_close(struct judge_server *s) {
    if (!s) return;
    judge_server_drop(s);
    judge_destroy(s->judge);
    if (s->http) evhttp_free(s->http);
    if (s->base) event_base_free(s->base);
    free(s->address);
    free(s);
}
