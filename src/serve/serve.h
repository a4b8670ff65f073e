/* serve.h - a model behind HTTP: OpenAI's chat completions, completions and models, Anthropic's messages and count_tokens, with
 * /health and /metrics. Requests become ids, ids that a backend draws become answers, whole or as streams.
 *
 * It draws nothing itself: struct serve_backend is an engine, or a run's generation. One thread, the HTTP server's, calls all of
 * this. Routes below /sessions/ID are those of a session, where the caller has such.
 * Invariant: what is asked is done or refused by name; the ids that are reported to a session are those that were drawn. */
#ifndef VERLC_SERVE_H
#define VERLC_SERVE_H

#include "engine/engine.h"
#include "http/server.h"

#include <jansson.h>
#include <stdint.h>

/* Where tokens come from. Calls return at once; what is drawn comes back by serve_drawn, on the server's thread. */
struct serve_backend {
    void *ctx;
    /* r is borrowed for the call; ticket comes back with its tokens. ERR_INVAL: the request is refused (400). */
    int (*submit)(void *ctx, const struct engine_request *r, uint64_t ticket);
    void (*cancel)(void *ctx, uint64_t ticket); /* its client has left: nothing of it is wanted any more */
    void (*stats)(void *ctx, struct engine_stats *out);
};

/* Tokens of one sample: those since the last report. Arrays are borrowed for the call. */
struct serve_drawn {
    uint64_t ticket;
    int64_t index, n, n_top;
    const int32_t *ids;    /* (n) */
    const float *logp;     /* (n) */
    const int32_t *top_id; /* (n, n_top) */
    const float *top_logp;
    bool ended;
    enum engine_finish finish; /* with ended, as of struct engine_sample */
    int64_t text_bytes, n_cached;
};

/* One turn of a session, as it was drawn. Borrowed for the call. */
struct serve_turn {
    const char *session;
    int64_t turn;                         /* as `prompt` gave it; -1: it gave none */
    const json_t *messages, *tools;       /* as rendered; tools NULL: none. A completion has neither */
    const json_t *message;                /* the assistant message that the client gets, in a chat's form */
    const struct engine_request *request; /* prompt ids and the sampling that was used */
    const int32_t *ids;
    const float *logp;
    int64_t n, index, n_malformed; /* n_malformed: calls of tools in it that cannot be read */
    int64_t n_stop_asked;          /* as many of the first stop ids are the client's own: stop_token_ids */
    enum engine_finish finish;
};
/* What a session is: its caller knows. All return ERR_INPUT where there is none of that id (404), ERR_INVAL where it takes
 * nothing any more (400). */
struct serve_sessions {
    void *ctx;
    /* Whether a request with this API key (NULL: it has none) may use the session: 0, or the HTTP status of a refusal, with this
     * thread's error as its message. NULL: it may. */
    int (*enter)(void *ctx, const char *id, const char *key);
    int (*defaults)(void *ctx, const char *id,
                    struct engine_request *r); /* the sampling where a request says nothing; NULL: ours */
    /* The ids of a conversation, and a number for it; *ids left empty: those of the chat template. */
    int (*prompt)(void *ctx, const char *id, const json_t *messages, const json_t *tools, struct text_ids *ids, int64_t *turn);
    int (*prompt_ids)(void *ctx, const char *id, const struct text_ids *ids, int64_t *turn); /* of a completion; may be NULL */
    int (*sampling)(void *ctx, const char *id, int64_t turn, struct engine_request *r); /* may change what the request asks for */
    int (*drawn)(void *ctx, const struct serve_turn *turn);                             /* before its client has it */
    void (*dropped)(void *ctx, const char *id, int64_t turn);                           /* nothing comes of it; may be NULL */
    int (*reward)(void *ctx, const char *id, const json_t *body);                       /* POST .../reward */
};

struct serve_args {
    struct serve_backend backend;
    const struct serve_sessions *sessions; /* NULL: none */
    bool sessions_only;                    /* what is asked outside of one is refused; templates are the sessions' */
    const struct tokenizer *tok;           /* borrowed, as all here */
    const char *model;                     /* its name for clients */
    const char *tool_format;               /* of agent/tool_parser/tool_parser.h; NULL: by the chat template */
    struct engine_stop_ids stop;
    int64_t max_len, max_open; /* tokens of prompt and answer; samples at a time, waiting ones too: beyond them 429 */
};
struct serve;
/* ERR_INVAL: there is no such tool_format. */
int serve_create(struct serve **out, const struct serve_args *a);
void serve_destroy(struct serve *s); /* NULL ok; after the HTTP server is closed */

/* For struct http_server_args. */
void serve_request(void *serve, struct http_exchange *x);
void serve_refused(void *serve, struct http_exchange *x, int status, const char *message);
void serve_tick(void *serve); /* each second: streams that wait get a sign of life */

void serve_drawn(struct serve *s, const struct serve_drawn *d);
/* A ticket's request has failed, with this thread's error: 400 for ERR_INVAL and ERR_NOMEM, else 500. */
void serve_failed(struct serve *s, uint64_t ticket, int rc);
void serve_failed_all(struct serve *s);    /* the backend is lost */
void serve_drain(struct serve *s);         /* new requests are refused: 503 */
int64_t serve_open(const struct serve *s); /* requests that are not answered */
struct serve_counts {
    int64_t requests, refused, open, tokens; /* refused: with a status from 400 on */
};
struct serve_counts serve_counts(const struct serve *s);

#endif
