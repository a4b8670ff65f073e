/* test_serve.c - the server over real sockets with a backend that draws what the test says: calls of tools in pieces, characters
 * cut in the middle, stop strings, sessions, failures, clients that leave. */
#include "base/err.h"
#include "base/json.h"
#include "serve/serve.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cmocka.h>

struct world {
    struct tokenizer *tok;
    struct serve *serve;
    struct http_server *http;
    uint64_t ticket; /* of the last submission; 0 before */
    int64_t n_submitted, n_cancelled, max_tokens;
    int refuse;
    /* sessions */
    int64_t n_turns, n_drawn;
    int32_t drawn[256];
    char session[130], reward[64], said[64];
    float top_p, temperature;
    uint64_t seed;
    int n_dropped;
};

static int submit(void *ctx, const struct engine_request *r, uint64_t ticket) {
    struct world *w = ctx;
    if (w->refuse) FAIL(ERR_INVAL, "refused by the backend");
    w->ticket = ticket;
    w->n_submitted++;
    w->max_tokens = r->max_tokens;
    return 0;
}
static void cancel(void *ctx, uint64_t ticket) {
    struct world *w = ctx;
    (void)ticket;
    w->n_cancelled++;
}
static void stats(void *ctx, struct engine_stats *out) {
    (void)ctx;
    out->n_kv_blocks = 7;
}

static int session_prompt(void *ctx, const char *id, const json_t *messages, const json_t *tools, struct text_ids *ids,
                          int64_t *turn) {
    (void)ctx, (void)tools;
    assert_true(json_array_size(messages) > 0);
    if (strcmp(id, "closed") == 0) FAIL(ERR_INVAL, "the episode has ended");
    if (strcmp(id, "s-1") != 0) FAIL(ERR_INPUT, "there is no session %s", id);
    text_ids_add(ids, (const int32_t[]){1, 2, 3}, 3);
    *turn = 5;
    return 0;
}
static int session_enter(void *ctx, const char *id, const char *key) {
    (void)ctx;
    if (strcmp(id, "locked") != 0 || (key && strcmp(key, "its key") == 0)) return 0;
    err_set(ERR_INVAL, __FILE__, __LINE__, "this key is not the session's");
    return 401;
}
static int session_defaults(void *ctx, const char *id, struct engine_request *r) {
    (void)ctx, (void)id;
    r->top_p = 0.25f;
    r->seed = 9;
    return 0;
}
static void session_dropped(void *ctx, const char *id, int64_t turn) {
    struct world *w = ctx;
    assert_true(strcmp(id, "s-1") == 0 && turn == 5);
    w->n_dropped++;
}
static int session_sampling(void *ctx, const char *id, int64_t turn, struct engine_request *r) {
    struct world *w = ctx;
    (void)id;
    assert_true(turn == 5 || turn == -1);
    w->top_p = r->top_p;
    w->temperature = r->temperature;
    w->seed = r->seed;
    r->max_tokens = 77; /* the run owns it */
    return 0;
}
static int session_drawn(void *ctx, const struct serve_turn *t) {
    struct world *w = ctx;
    w->n_turns++;
    w->n_drawn = t->n;
    memcpy(w->drawn, t->ids, (size_t)t->n * sizeof *t->ids);
    snprintf(w->session, sizeof w->session, "%s", t->session);
    snprintf(w->said, sizeof w->said, "%s", json_string_value(json_object_get(t->message, "content")));
    assert_true(t->turn == 5 && t->request->n_prompt == 3 && t->request->max_tokens == 77);
    for (int64_t i = 0; i < t->n; i++) assert_true(t->logp[i] > -0.5f && t->logp[i] < 0);
    return 0;
}
static int session_reward(void *ctx, const char *id, const json_t *body) {
    struct world *w = ctx;
    if (strcmp(id, "s-1") != 0) FAIL(ERR_INPUT, "there is no session %s", id);
    snprintf(w->reward, sizeof w->reward, "%g", json_number_value(json_object_get(body, "reward")));
    return 0;
}

static void open_world(struct world *w, bool sessions, const char *format) {
    static struct serve_sessions s;
    *w = (struct world){0};
    s = (struct serve_sessions){.ctx = w,
                                .enter = session_enter,
                                .defaults = session_defaults,
                                .prompt = session_prompt,
                                .sampling = session_sampling,
                                .drawn = session_drawn,
                                .dropped = session_dropped,
                                .reward = session_reward};
    assert_int_equal(tokenizer_open(&w->tok, FIXTURES "/data/tok_plain"), 0);
    const struct serve_args a = {.backend = {w, submit, cancel, stats},
                                 .sessions = sessions ? &s : NULL,
                                 .tok = w->tok,
                                 .model = "m",
                                 .tool_format = format,
                                 .stop = {.id = {457}, .n = 1},
                                 .max_len = 512,
                                 .max_open = 2};
    assert_int_equal(serve_create(&w->serve, &a), 0);
    const struct http_server_args h = {.host = "127.0.0.1",
                                       .max_body = 1 << 20,
                                       .stepped = true,
                                       .serve = serve_request,
                                       .refused = serve_refused,
                                       .arg = w->serve};
    assert_int_equal(http_server_open(&w->http, &h), 0);
}
static void close_world(struct world *w) {
    http_server_close(w->http);
    serve_destroy(w->serve);
    tokenizer_close(w->tok);
}

/* ---- a client ---- */

static int connect_to(const struct http_server *http) {
    const char *port = strrchr(http_server_address(http), ':') + 1;
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof at), 0);
    return fd;
}

static void steps(const struct world *w, int n) {
    for (int i = 0; i < n; i++) {
        assert_int_equal(http_server_step(w->http), 0);
        usleep(200);
    }
}

static int post(struct world *w, const char *path, const char *body) {
    struct buf text = {0};
    const int fd = connect_to(w->http);
    buf_addf(&text, "%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %zu\r\n\r\n%s", body ? "POST" : "GET", path,
             body ? strlen(body) : 0, body ? body : "");
    assert_int_equal(send(fd, text.p, text.n, 0), (ssize_t)text.n);
    buf_free(&text);
    steps(w, 30);
    return fd;
}

/* All that has come; the connection stays. */
static void receive(struct world *w, int fd, struct buf *out) {
    char part[4096];
    steps(w, 10);
    for (struct pollfd p = {fd, POLLIN, 0}; poll(&p, 1, 20) > 0;) {
        const ssize_t n = recv(fd, part, sizeof part, 0);
        if (n <= 0) return;
        buf_add(out, part, (size_t)n);
        steps(w, 2);
    }
}

/* One answer, whole: its status; *body gets what follows the head. */
static int answer(struct world *w, int fd, struct buf *out) {
    buf_reset(out);
    receive(w, fd, out);
    close(fd);
    steps(w, 5);
    assert_true(out->n > 12 && strncmp(out->p, "HTTP/1.1 ", 9) == 0);
    return atoi(out->p + 9);
}
static bool has(const struct buf *b, const char *text) { return b->p && strstr(b->p, text); }

/* The backend draws a text's tokens, so many at a time. */
static void draw(struct world *w, const char *text, int64_t at_once, enum engine_finish finish, int64_t text_bytes) {
    struct text_ids ids = {0};
    float logp[256];
    assert_int_equal(tokenizer_encode(w->tok, text, strlen(text), false, &ids), 0);
    for (int i = 0; i < 256; i++) logp[i] = -0.25f;
    for (int64_t at = 0; at < ids.n; at += at_once) {
        const int64_t n = ids.n - at < at_once ? ids.n - at : at_once;
        const struct serve_drawn d = {.ticket = w->ticket,
                                      .n = n,
                                      .ids = ids.p + at,
                                      .logp = logp,
                                      .ended = at + n == ids.n,
                                      .finish = finish,
                                      .text_bytes = text_bytes};
        serve_drawn(w->serve, &d);
        steps(w, 1);
    }
    text_ids_free(&ids);
}

/* The texts of a stream's deltas, put together; no delta has a broken character, since each event is read as JSON. */
static void deltas(const struct buf *stream, const char *key, struct buf *out) {
    buf_reset(out);
    for (const char *p = stream->p; (p = strstr(p, "data: {")); p++) {
        json_t *o;
        assert_int_equal(json_parse(&o, p + 6, strcspn(p + 6, "\n"), "an event"), 0);
        const json_t *choice = json_array_get(json_object_get(o, "choices"), 0), *delta = json_object_get(choice, "delta");
        const json_t *text = json_object_get(delta ? delta : choice, key);
        if (json_is_string(text)) buf_add(out, json_string_value(text), json_string_length(text));
        json_decref(o);
    }
}

#define TOOLS "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]"
#define CHAT(more) "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]" more "}"

/* ---- tests ---- */

static void test_tools(void **state) {
    (void)state;
    static const char said[] = "So: <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"\xc3\xa4<b>\"}}\n</tool_call>";
    struct world w;
    struct buf out = {0}, text = {0};
    open_world(&w, true, "hermes");
    for (int64_t at_once = 1; at_once < 9; at_once += 3) {
        int fd = post(&w, "/sessions/s-1/v1/chat/completions", CHAT(", " TOOLS ", \"stream\": true"));
        draw(&w, said, at_once, ENGINE_STOP, -1);
        assert_int_equal(answer(&w, fd, &out), 200);
        deltas(&out, "content", &text);
        assert_string_equal(text.p, "So:");
        assert_true(has(&out, "\"name\":\"f\"") && has(&out, "{\\\"a\\\": \\\"\xc3\xa4<b>\\\"}") && has(&out, "\"tool_calls\"}"));
        assert_false(has(&out, "<tool"));
        fd = post(
            &w, "/sessions/s-1/v1/messages",
            "{\"model\": \"m\", \"max_tokens\": 9, \"stream\": true, \"messages\": [{\"role\": \"user\", \"content\": \"x\"}], "
            "\"tools\": [{\"name\": \"f\", \"input_schema\": {}}]}");
        draw(&w, said, at_once, ENGINE_STOP, -1);
        assert_int_equal(answer(&w, fd, &out), 200);
        assert_true(has(&out, "input_json_delta") && has(&out, "\"stop_reason\":\"tool_use\"") && has(&out, "event: message_stop"));
    }
    int fd = post(&w, "/sessions/s-1/v1/chat/completions", CHAT(", " TOOLS));
    draw(&w, "a <tool_call> that is none", 2, ENGINE_LENGTH, -1); /* unclosed: text */
    assert_int_equal(answer(&w, fd, &out), 200);
    assert_true(has(&out, "\"content\":\"a <tool_call> that is none\"") && has(&out, "\"finish_reason\":\"length\""));
    fd = post(&w, "/sessions/s-1/v1/chat/completions", CHAT(""));
    draw(&w, said, 2, ENGINE_STOP, -1); /* no tools were given: text */
    assert_int_equal(answer(&w, fd, &out), 200);
    assert_true(has(&out, "<tool_call>") && !has(&out, "tool_calls"));
    buf_free(&out);
    buf_free(&text);
    close_world(&w);
}

static void test_text(void **state) {
    (void)state;
    static const char said[] = "h\xc3\xa9llo \xe4\xbd\xa0\xf0\x9f\x98\x80 one two three";
    struct world w;
    struct buf out = {0}, text = {0};
    open_world(&w, false, NULL);
    for (int64_t at_once = 1; at_once < 4; at_once++) {
        int fd = post(&w, "/v1/completions", "{\"prompt\": \"1\", \"stream\": true, \"max_tokens\": 100}");
        draw(&w, said, at_once, ENGINE_STOP, -1);
        assert_int_equal(answer(&w, fd, &out), 200);
        deltas(&out, "text", &text);
        assert_string_equal(text.p, said);
        /* the engine ends it at the stop string; nothing of that is given out before */
        fd = post(&w, "/v1/completions", "{\"prompt\": \"1\", \"stream\": true, \"stop\": [\"two three\"], \"max_tokens\": 100}");
        draw(&w, said, at_once, ENGINE_STOP, (int64_t)(strstr(said, "two") - said));
        assert_int_equal(answer(&w, fd, &out), 200);
        deltas(&out, "text", &text);
        assert_int_equal(text.n, strstr(said, "two") - said);
        assert_true(has(&out, "\"stop_reason\":\"two three\""));
    }
    buf_free(&out);
    buf_free(&text);
    close_world(&w);
}

static void test_sessions(void **state) {
    (void)state;
    struct world w;
    struct buf out = {0};
    struct text_ids want = {0};
    open_world(&w, true, "hermes");
    int fd = post(&w, "/sessions/s-1/v1/chat/completions", CHAT(""));
    draw(&w, "one two", 1, ENGINE_STOP, -1);
    assert_int_equal(answer(&w, fd, &out), 200);
    assert_int_equal(tokenizer_encode(w.tok, "one two", 7, false, &want), 0);
    assert_true(w.n_turns == 1 && w.n_drawn == want.n && strcmp(w.session, "s-1") == 0 && w.max_tokens == 77);
    assert_memory_equal(w.drawn, want.p, (size_t)want.n * 4);
    assert_string_equal(w.said, "one two");
    assert_true(w.top_p == 0.25f && w.temperature == 1 && w.seed == 9 &&
                w.n_dropped == 0); /* the session's, where nothing is said */
    const int left =
        post(&w, "/sessions/s-1/v1/chat/completions", CHAT(", \"temperature\": 0.5, \"seed\": 3, \"max_tokens\": 100000"));
    close(left);
    while (w.n_dropped == 0) steps(&w, 1); /* its client has left */
    assert_true(w.top_p == 0.25f && w.temperature == 0.5f && w.seed == 3);
    assert_int_equal(answer(&w, post(&w, "/sessions/locked/reward", "{}"), &out), 401);
    assert_true(has(&out, "is not the session's"));
    assert_int_equal(
        answer(&w, post(&w, "/sessions/s-1/v1/chat/completions", CHAT(", \"chat_template_kwargs\": {\"a\": 1}")), &out), 400);
    assert_int_equal(answer(&w, post(&w, "/sessions/s-1/reward", "{\"reward\": 0.5}"), &out), 200);
    assert_string_equal(w.reward, "0.5");
    assert_int_equal(answer(&w, post(&w, "/sessions/closed/v1/chat/completions", CHAT("")), &out), 400);
    assert_true(has(&out, "the episode has ended"));
    assert_int_equal(answer(&w, post(&w, "/sessions/other/v1/chat/completions", CHAT("")), &out), 404);
    assert_int_equal(answer(&w, post(&w, "/sessions/other/reward", "{}"), &out), 404);
    assert_int_equal(answer(&w, post(&w, "/sessions/../v1/models", NULL), &out), 404);
    assert_int_equal(answer(&w, post(&w, "/sessions/s-1/metrics", NULL), &out), 404);
    assert_int_equal(w.n_turns, 1);
    text_ids_free(&want);
    buf_free(&out);
    close_world(&w);
}

static void test_failures(void **state) {
    (void)state;
    struct world w;
    struct buf out = {0};
    open_world(&w, false, NULL);
    static const char body[] = "{\"prompt\": \"1\"}", stream[] = "{\"prompt\": \"1\", \"stream\": true}";
    int fd = post(&w, "/v1/completions", body); /* its client leaves */
    close(fd);
    for (int i = 0; i < 300 && w.n_cancelled == 0; i++) steps(&w, 50); /* it is noticed within a second */
    assert_true(w.n_cancelled == 1 && serve_open(w.serve) == 0);
    draw(&w, "late", 1, ENGINE_STOP, -1); /* what comes for it is dropped */
    fd = post(&w, "/v1/completions", stream);
    draw(&w, "one two three", 1, ENGINE_INTERRUPTED, -1);
    assert_int_equal(answer(&w, fd, &out), 200);
    const int first = post(&w, "/v1/completions", body), second = post(&w, "/v1/completions", stream);
    assert_int_equal(answer(&w, post(&w, "/v1/completions", body), &out), 429); /* max_open is 2 */
    assert_true(has(&out, "Retry-After: 1"));
    err_set(ERR_NOMEM, __FILE__, __LINE__, "it does not fit");
    serve_failed(w.serve, w.ticket, ERR_NOMEM);
    assert_int_equal(answer(&w, second, &out), 400);
    assert_true(has(&out, "it does not fit"));
    serve_failed_all(w.serve);
    assert_int_equal(answer(&w, first, &out), 500);
    w.refuse = 1;
    assert_int_equal(answer(&w, post(&w, "/v1/completions", body), &out), 400);
    assert_true(has(&out, "refused by the backend") && serve_open(w.serve) == 0);
    w.refuse = 0;
    fd = post(&w, "/v1/completions", stream); /* an error after the stream has begun is its last event */
    const int32_t id = 5;
    const float logp = -1;
    serve_drawn(w.serve, &(struct serve_drawn){.ticket = w.ticket, .n = 1, .ids = &id, .logp = &logp});
    serve_failed_all(w.serve);
    assert_int_equal(answer(&w, fd, &out), 200);
    assert_true(has(&out, "\"error\"") && has(&out, "[DONE]"));
    serve_drain(w.serve);
    assert_int_equal(answer(&w, post(&w, "/v1/completions", body), &out), 503);
    assert_int_equal(answer(&w, post(&w, "/metrics", NULL), &out), 200);
    assert_true(has(&out, "verlc_requests_total{route=\"completions\",result=\"left\"} 1\n") && has(&out, "verlc_kv_blocks 7\n"));
    assert_int_equal(answer(&w, post(&w, "/health", NULL), &out), 503);
    buf_free(&out);
    close_world(&w);
}

/* A server at its limits closes connections of its own alone. */
static void test_other_sockets(void **state) {
    (void)state;
    struct world w;
    struct http_server *small;
    int pair[2], fds[100];
    open_world(&w, false, NULL);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    assert_int_equal(http_server_open(&small, &(struct http_server_args){.host = "127.0.0.1",
                                                                         .max_connections = 64,
                                                                         .max_of_peer = 64,
                                                                         .stepped = true,
                                                                         .serve = serve_request,
                                                                         .refused = serve_refused,
                                                                         .arg = w.serve}),
                     0);
    const int other = connect_to(w.http);
    for (int i = 0; i < 8; i++) assert_int_equal(http_server_step(w.http), 0);
    for (int i = 0; i < 100; i++) {
        fds[i] = connect_to(small);
        for (int k = 0; k < 4; k++) assert_int_equal(http_server_step(small), 0);
    }
    for (int i = 0; i < 2000 && recv(fds[0], &(char){0}, 1, MSG_DONTWAIT) != 0; i++) {
        assert_int_equal(http_server_step(small), 0);
        usleep(1000);
    }
    assert_int_equal(recv(fds[0], &(char){0}, 1, MSG_DONTWAIT), 0); /* closed: the oldest */
    assert_int_equal(recv(pair[0], &(char){0}, 1, MSG_DONTWAIT), -1);
    assert_int_equal(recv(other, &(char){0}, 1, MSG_DONTWAIT), -1);
    for (int i = 0; i < 100; i++) close(fds[i]);
    close(other);
    close(pair[0]);
    close(pair[1]);
    http_server_close(small);
    close_world(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),          cmocka_unit_test(test_tools),    cmocka_unit_test(test_sessions),
        cmocka_unit_test(test_other_sockets), cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
