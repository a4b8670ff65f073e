/* judge_server.c - see judge_server.h. The server of http/server.h reads requests and writes answers. */
#include "reward_model/judge_server.h"

#include "base/err.h"
#include "base/hash.h"
#include "base/json.h"
#include "http/server.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_BODY_BYTES = 16 << 20, MAX_CONNECTIONS = 4096, REQUEST_S = 3600, ANSWER_S = 24 * 3600 };

struct open_request { /* a request that the judge works on */
    struct judge_server *server;
    struct http_exchange *exchange; /* NULL: its client has left */
    char *model;                    /* as the request names it */
    uint64_t uid;
    struct open_request *next;
};
struct judge_server {
    struct judge_args a;
    struct judge *judge;
    struct http_server *http;
    struct open_request *open;
};

/* ---- answers ---- */

static void reply(struct http_exchange *x, int status, json_t *value) {
    struct buf text = {0};
    CHECK(value && json_dump_line(&text, value) == 0);
    json_decref(value);
    http_exchange_add_header(x, "Connection", "close"); /* nothing is read between two generations */
    http_exchange_reply(x, status, "application/json", &text);
}

static void reply_error(struct http_exchange *x, int status, const char *message) {
    json_t *text = json_string(message);
    reply(x, status,
          json_pack("{s:{s:o, s:s, s:i}}", "error", "message", text ? text : json_string("the message is not UTF-8"), "type",
                    status < 500 ? "invalid_request_error" : "server_error", "code", status));
}
static void refused(void *arg, struct http_exchange *x, int status, const char *message) {
    (void)arg;
    reply_error(x, status, message);
}

static void open_request_free(struct open_request *q) {
    for (struct open_request **p = &q->server->open; *p; p = &(*p)->next)
        if (*p == q) {
            *p = q->next;
            break;
        }
    free(q->model);
    free(q);
}

static void on_answer(void *arg, int64_t tag, const struct judge_answer *a) {
    (void)arg;
    struct open_request *q = (struct open_request *)(intptr_t)tag;
    struct http_exchange *x = q->exchange;
    if (x) {
        char id[32];
        snprintf(id, sizeof id, "chatcmpl-%016llx", (unsigned long long)q->uid);
        json_t *message = json_pack("{s:s, s:s%}", "role", "assistant", "content", a->text, a->n_text);
        reply(x, 200,
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

static void on_close(void *arg) { ((struct open_request *)arg)->exchange = NULL; } /* the client has left; its answer is dropped */

static int submit(struct judge_server *s, struct http_exchange *x, const json_t *body) {
    struct judge_question q;
    TRY(read_question(s, body, &q));
    const char *model = json_string_value(json_object_get(body, "model"));
    struct open_request *one = xcalloc(1, sizeof *one);
    *one = (struct open_request){
        .server = s, .exchange = x, .model = xstrdup(model ? model : s->a.dir), .uid = q.uid, .next = s->open};
    s->open = one;
    const int rc = judge_ask(s->judge, &q, (int64_t)(intptr_t)one);
    if (rc < 0) open_request_free(one);
    else http_exchange_on_close(x, on_close, one);
    return rc;
}

static void complete(struct judge_server *s, struct http_exchange *x) {
    size_t n;
    const char *text = http_exchange_body(x, &n);
    json_t *body = NULL;
    int rc = json_parse(&body, text, n, "the request");
    if (rc == 0) rc = submit(s, x, body);
    json_decref(body);
    if (rc < 0) reply_error(x, rc == ERR_NOMEM || rc == ERR_INTERNAL ? 500 : 400, err_msg());
}

static void list_models(const struct judge_server *s, struct http_exchange *x) {
    reply(
        x, 200,
        json_pack("{s:s, s:[{s:s, s:s, s:s}]}", "object", "list", "data", "id", s->a.dir, "object", "model", "owned_by", "verlc"));
}

static void on_request(void *arg, struct http_exchange *x) {
    struct judge_server *s = arg;
    const char *path = http_exchange_path(x), *how = http_exchange_method(x);
    const bool chat = strcmp(path, "/v1/chat/completions") == 0, models = strcmp(path, "/v1/models") == 0;
    if (!chat && !models) reply_error(x, 404, "there are POST /v1/chat/completions and GET /v1/models");
    else if (strcmp(how, chat ? "POST" : "GET") != 0) reply_error(x, 405, chat ? "POST is wanted" : "GET is wanted");
    else if (chat) complete(s, x);
    else list_models(s, x);
}

/* ---- listening ---- */

int judge_server_listen(struct judge_server **out) {
    struct judge_server *s = xcalloc(1, sizeof *s);
    const struct http_server_args a = {.host = "127.0.0.1",
                                       .max_connections = MAX_CONNECTIONS,
                                       .max_of_peer = MAX_CONNECTIONS,
                                       .max_body = MAX_BODY_BYTES,
                                       .request_s = REQUEST_S, /* of which an update of the policy may be a part */
                                       .answer_s = ANSWER_S,
                                       .stepped = true,
                                       .serve = on_request,
                                       .refused = refused,
                                       .arg = s};
    const int rc = http_server_open(&s->http, &a);
    if (rc < 0) judge_server_close(s);
    else *out = s;
    return rc < 0 ? err_wrap(rc, "the judge's server") : 0;
}

const char *judge_server_address(const struct judge_server *s) { return http_server_address(s->http) + strlen("http://"); }

int judge_server_load(struct judge_server *s, const struct judge_args *a) {
    s->a = *a;
    s->a.answered = on_answer;
    return judge_create(&s->judge, &s->a);
}

int judge_server_step(struct judge_server *s) {
    TRY(http_server_step(s->http));
    return judge_step(s->judge);
}

int judge_server_pause(struct judge_server *s) { return s->judge ? judge_pause(s->judge) : 0; }

void judge_server_drop(struct judge_server *s) {
    if (s->judge) judge_drop(s->judge);
    while (s->open) {
        if (s->open->exchange) reply_error(s->open->exchange, 503, "the samples were given up");
        open_request_free(s->open);
    }
}

void judge_server_close(struct judge_server *s) {
    if (!s) return;
    judge_server_drop(s);
    judge_destroy(s->judge);
    http_server_close(s->http);
    free(s);
}
