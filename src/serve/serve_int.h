/* serve_int.h - private to serve: a request under way, and what the dialects give the routes. */
#ifndef VERLC_SERVE_SERVE_INT_H
#define VERLC_SERVE_SERVE_INT_H

#include "serve/serve.h"

#include "agent/tool_parser/tool_parser.h"
#include "base/buf.h"

enum { SERVE_MAX_N = 128, SERVE_MAX_STOP = 16, SERVE_MARKERS = 2 };

/* ---- the text of an answer as its ids come (answer_text.c) ---- */
struct answer_text {
    struct tokenizer_stream *stream;
    struct buf visible; /* decoded, without special tokens */
    size_t sent;        /* bytes that a stream has */
    size_t limit;       /* a call may begin here: nothing beyond it is given out before the end */
    size_t searched;
};
/* What is held back: texts that may end the answer, texts and tokens with which a call begins. */
struct answer_holds {
    char *const *stop;
    int64_t n_stop;
    const char *const *markers; /* NULL-terminated; NULL: no tools. "" holds everything */
    const int32_t *marker_ids;  /* as many; -1: no single token */
};
int serve__text_open(struct answer_text *t, const struct tokenizer *tok);
void serve__text_close(struct answer_text *t);
int serve__text_push(struct answer_text *t, int32_t id, const struct answer_holds *h);
int serve__text_finish(struct answer_text *t);                                       /* no more ids */
size_t serve__text_ready(const struct answer_text *t, const struct answer_holds *h); /* bytes that may be given out */

/* ---- a request under way ---- */
struct serve_choice {
    struct answer_text text;
    struct text_ids ids;
    float *logp, *top_logp;
    int32_t *top_id;
    int64_t cap_logp, cap_top_id, cap_top_logp;
    int64_t n_reported; /* tokens whose log-probs a stream has */
    int64_t n_chars;    /* characters of the tokens before n_reported: text_offset */
    int64_t n_cached;   /* prompt tokens found in the cache */
    bool ended;
    enum engine_finish finish;
    const char *stop_hit;  /* the stop string that ended it; NULL: none */
    struct buf content;    /* the whole text, once it has ended */
    struct tool_turn turn; /* its calls */
    int64_t index;
};
struct serve_call {
    struct serve *serve;
    struct http_exchange *x;
    const struct serve_dialect *dialect;
    struct serve_call *prev, *next;
    char id[40], *model, *session;
    int64_t turn;  /* of its session; -1: none */
    bool recorded; /* the session has what was drawn for it */
    int64_t created;
    /* what was asked */
    struct engine_request r; /* prompt, stop_ids and stop point to what follows */
    struct text_ids *prompts;
    int64_t n_prompts, n_stop_asked;
    int32_t stop_ids[SERVE_MAX_STOP + 24];
    char *stop[SERVE_MAX_STOP];
    bool stream, usage, usage_each, logprobs, token_ids; /* usage: at a stream's end; usage_each: with each piece too */
    json_t *messages, *tools;                            /* as rendered; NULL: none */
    bool parses;                                         /* calls are looked for */
    /* what has come */
    uint64_t *tickets; /* (n_prompts) */
    struct serve_choice *choices;
    int64_t n_choices, n_open;
    bool begun;         /* a stream's first event is sent */
    int n_blocks;       /* messages: content blocks so far */
    bool in_text;       /* messages: a text block is open */
    double start, last; /* clock_now: of the request, of the last piece sent */
};

/* An API: how a request is read, how an answer is written. Writers append to out. */
struct serve_dialect {
    const char *route;                                          /* for metrics */
    int (*read)(struct serve_call *c, const json_t *body);      /* ERR_*: 400 */
    void (*whole)(const struct serve_call *c, struct buf *out); /* all choices have ended */
    void (*begin)(struct serve_call *c, struct buf *out);       /* a stream: once */
    void (*delta)(struct serve_call *c, struct serve_choice *h, const char *text, size_t n, struct buf *out);
    void (*end)(struct serve_call *c, struct serve_choice *h, struct buf *out); /* calls, why it ended */
    void (*finish)(struct serve_call *c, struct buf *out);                      /* once, after all choices */
    void (*error)(struct buf *out, int status, const char *message);            /* a whole answer */
    void (*stream_error)(struct buf *out, const char *message);                 /* the last event of a stream */
    void (*wait)(struct buf *out);                                              /* a sign of life */
};
extern const struct serve_dialect serve_chat, serve_completions, serve_messages;
int serve__count_read(struct serve_call *c, const json_t *body); /* anthropic.c: a request of count_tokens */
/* Answered at once (tokenize.c). *answer is the caller's. */
int serve__tokenize(struct serve_call *c, const json_t *body, json_t **answer);
int serve__detokenize(struct serve_call *c, const json_t *body, json_t **answer);

struct serve_metrics {
    int64_t requests[4][6]; /* by route (chat, completions, messages, other) and status (2xx, 400, 4xx, 429, 5xx, left) */
    int64_t prompt_tokens, cached_tokens, tokens;
    int64_t first_token[12], n_first_token;
    double first_token_sum;
};

struct serve {
    struct serve_args a;
    struct chat_template *chat; /* NULL: the model has none */
    const struct tool_parser *parser;
    const char *const *markers;
    int32_t marker_ids[SERVE_MARKERS];
    json_t *special; /* texts of special tokens, an array */
    struct serve_call *calls;
    struct serve_call **slots; /* of tickets; NULL: free */
    uint32_t *generation, *prompt_of;
    int64_t n_slots, cap_slots, cap_generation, cap_prompt_of, free_slot;
    int64_t n_open, n_calls; /* samples, requests */
    uint64_t drawn_ids;      /* counts random ids */
    uint64_t salt;
    bool draining;
    struct serve_metrics metrics;
};

/* ---- reading (request.c) ---- */
/* The keys of a body. read, ignored: names between blanks. */
struct serve_only {
    const char *name, *values; /* the JSON values that say nothing new, as null, as an array's text */
};
struct serve_keys {
    const char *read, *ignored;
    const struct serve_only *only;
    size_t n_only;
};
int serve__check_keys(const json_t *body, const struct serve_keys *k); /* ERR_INVAL: another key, or another value of `only` */
/* A number from lo to hi; absent or null: *out stays. ERR_INVAL. */
int serve__number(const json_t *body, const char *key, double lo, double hi, bool whole, double *out);
int serve__bool(const json_t *body, const char *key, bool *out);
int serve__sampling(struct serve_call *c, const json_t *body); /* temperature, top_p, top_k, min_p, ..., seed, n, stream */
int serve__stop(struct serve_call *c, const json_t *body, const char *key);
int serve__stop_ids(struct serve_call *c, const json_t *body); /* stop_token_ids; before those of the model */
int serve__model(struct serve_call *c, const json_t *body);
/* c->messages and c->tools (a chat's form) to ids; more: further variables of the template or NULL; goes_on: the last message is
 * the beginning of the answer. */
int serve__render(struct serve_call *c, const json_t *more, bool goes_on);
/* What the chat template is given: c->messages, c->tools and `more`. *out is the caller's. */
int serve__chat_request(const struct serve_call *c, const json_t *more, bool begins, bool goes_on, json_t **out);
int serve__messages(struct serve_call *c, const json_t *body); /* OpenAI's messages to c->messages (openai.c) */
/* Tokens of the answer: asked (0: not said) within the model's length; or, with cut, as many as there is room for. */
int serve__length(struct serve_call *c, int64_t asked, int64_t otherwise, bool cut);
int serve__check_tools(struct serve_call *c, const json_t *tools); /* OpenAI's form; takes a reference */

/* ---- of serve.c, for the dialects ---- */
void serve__new_id(struct serve *s, const char *prefix, char out[40]);
void serve__json(struct buf *out, json_t *o);                       /* appends it, takes it over */
void serve__event(struct buf *out, const char *name, json_t *data); /* one of a stream; name NULL: none */
json_t *serve__text(const char *p, size_t n);
double serve__logp(float logp); /* as a JSON number; not finite: -9999 */
void serve__metrics_text(const struct serve *s, struct buf *out);
void serve__count(struct serve *s, const struct serve_dialect *d, int status); /* 0: the client has left */
int64_t serve__prompt_tokens(const struct serve_call *c);
int64_t serve__answer_tokens(const struct serve_call *c);
int64_t serve__cached_tokens(const struct serve_call *c);

/* ---- tools (tool_format.c) ---- */
const char *serve__tool_format(const struct tokenizer *tok); /* by the chat template; NULL: not known */
/* Texts with which a call may begin in this format, NULL-terminated. */
const char *const *serve__tool_markers(const char *format);

#endif
