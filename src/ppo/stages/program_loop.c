/* program_loop.c - see program_loop.h: sessions as serve sees them, their turns in the engine, their processes and deadlines.
 *
 * Invariant: what an episode draws depends on weights, data, seed and its own requests, in their order, alone; a session's tokens
 * are those that its program was given. */
#include "ppo/stages/program_loop.h"
#include "ppo/stages/generation.h"
#include "ppo/stages/program_journal.h"

#include "agent/child_program.h"
#include "agent/token_tree.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "base/map.h"
#include "base/utf8.h"
#include "serve/serve.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define LOOK_S 0.005     /* between two looks at the processes */
#define LOOK_EACH_S 4e-5 /* and of many: a tenth of the time */
#define WAIT_NS 1000000L /* of a step without work */
enum {
    ID_BYTES = 16,
    MAX_BODY = 8 << 20,
    MAX_ROW_BYTES = 96 << 10, /* of a variable; the kernel takes 128 KiB */
    MAX_DRAWING = 256,        /* turns of one session that are drawn at a time */
    MAX_REQUESTS = 10000,     /* of one session */
    TOKEN_BYTES = 32,         /* a text of more bytes for each token of the context is not looked at */
    MORE_BYTES = 64 << 10,
    MAX_EXTRA_BYTES = 1 << 16,
    MAX_RESULT_BYTES = 1 << 14, /* of a tool's text that the record has */
    MAX_SAMPLES = 256,          /* of an episode that are trained: the first ones and the last */
    MAX_FILES = 1024,           /* of a process of a program, and so connections: fewer than the server has */
    OTHER_FILES = 1024          /* of this process, besides those of programs */
};

enum state { QUEUED, RUNNING, OVER };
struct session {
    int64_t sample;
    enum state state;
    char id[2 * ID_BYTES + 1], key[2 * ID_BYTES + 1];
    struct child_program *program;
    struct http_listener *listener; /* in its sandbox; NULL: it has none, or not yet */
    struct token_tree *tree;
    int64_t n_restarts;     /* runs that were killed while it ran */
    bool held;              /* no generation draws for it now, since */
    double held_at;         /* http_server_clock */
    int32_t oldest_version; /* of its first token; -1: it has none */
    double begun, active, drawing;
    int64_t n_asked, n_open, n_drawing, room; /* open: not answered. room: tokens that the turn just asked for may have */
    double oldest;                            /* clock_awake: since then a turn is open */
    int64_t n_turns, n_preempted, n_other_temperature, n_malformed;
    const char *cut;  /* its last request was refused: "length", "max_assistant_turns"; NULL: it was not */
    char *said;       /* text of the last turn */
    json_t *log;      /* of its turns */
    json_t *calls;    /* of each turn: an array of calls, as in BATCH_EPISODE */
    double *answered; /* (n_turns) clock_awake */
    int64_t cap_answered;
    bool has_reward;
    double reward;
    json_t *extra; /* what came with the reward */
};
struct call {                /* one turn that is being drawn */
    struct session *session; /* NULL: it is over, or nobody waits for it */
    uint64_t ticket;
    bool left; /* its client has */
    /* where new weights may interrupt it: the request, its arrays owned, and what it has */
    struct engine_request q;
    int32_t *prompt, *stop_ids, *ids, *versions;
    char **stop;
    float *logp, *kept;
    int64_t n;
};
struct later { /* a request of a held session */
    struct session *session;
    struct http_exchange *x; /* NULL: its client has left */
};
struct program_loops {
    struct program_loops_args a;
    struct serve_sessions hooks;
    struct serve *serve;
    struct http_server *http;
    struct generation_state *g;                                   /* whose episodes these are */
    struct session **sessions;                                    /* in the order in which they began */
    int64_t n_sessions, cap_sessions, n_running, n_waiting, next; /* running, not over: of those not held. next: may be QUEUED */
    struct map ids;                                               /* id -> session */
    struct call *calls;                                           /* by their number */
    int64_t n_calls, cap_calls;
    struct later **later; /* in the order in which they came */
    int64_t n_later, cap_later;
    const struct engine_sample *drawn; /* within program_loop_drawn, with */
    const struct call *call;
    int64_t max_files; /* of a process of a program */
    const char **dirs; /* for sandboxes; ends with NULL */
    char *dir;
    double looked;
    int rc; /* of a call to the engine within a callback, which ends the run */
};

/* ---- sessions, as serve sees them ---- */

/* One that runs. ERR_INPUT: there is none of that id; ERR_INVAL: it is over. */
static int find_session(const struct program_loops *p, const char *id, struct session **out) {
    int64_t at;
    if (!map_gets(&p->ids, id, &at)) FAIL(ERR_INPUT, "there is no such session");
    if (p->sessions[at]->state != RUNNING) FAIL(ERR_INVAL, "the episode is over");
    *out = p->sessions[at];
    return 0;
}

static int on_enter(void *ctx, const char *id, const char *key) {
    const struct program_loops *p = ctx;
    struct session *s;
    const int rc = find_session(p, id, &s);
    unsigned char differ = 0;
    if (rc < 0) return rc == ERR_INPUT ? 404 : 400;
    if (!key || strlen(key) != strlen(s->key)) differ = 1;
    for (size_t i = 0; !differ && s->key[i]; i++) differ |= (unsigned char)(s->key[i] ^ key[i]);
    if (differ)
        err_set(ERR_INVAL, __FILE__, __LINE__, "the API key is not this session's: OPENAI_API_KEY and ANTHROPIC_API_KEY have it");
    else s->active = http_server_clock(p->http);
    return differ ? 401 : 0;
}

/* The seed of the turn that is asked for next. */
static uint64_t turn_seed(const struct session *s, const struct engine_request *q) {
    return q->seed ^ (uint64_t)s->n_asked * 0xD1B54A32D192ED03u;
}

static int on_defaults(void *ctx, const char *id, struct engine_request *r) {
    struct program_loops *p = ctx;
    struct session *s;
    struct engine_request q;
    TRY(find_session(p, id, &s));
    TRY(generation_request(p->g, s->sample, &q));
    *r = (struct engine_request){.temperature = q.temperature,
                                 .top_p = q.top_p,
                                 .top_k = q.top_k,
                                 .min_p = q.min_p,
                                 .repetition_penalty = q.repetition_penalty,
                                 .ignore_eos = q.ignore_eos,
                                 .seed = turn_seed(s, &q)};
    return 0;
}

/* Tokens that a turn after a conversation of n may have, n_prompt of which are its sample's prompt. */
static int find_room(const struct program_loops *p, struct session *s, int64_t n_prompt, int64_t n) {
    const int64_t most = p->a.rows->max_response_length;
    if (n_prompt > p->a.rows->max_prompt_length)
        FAIL(ERR_INVAL,
             "this model's maximum context length: a conversation begins with at most %lld tokens (data.max_prompt_length), "
             "and this one has %lld",
             (long long)p->a.rows->max_prompt_length, (long long)n_prompt);
    s->room = most - (n - n_prompt);
    if (s->room < 1)
        FAIL(ERR_INVAL,
             "this model's maximum context length: all that follows a conversation's beginning has at most %lld tokens "
             "(data.max_response_length), and here it has %lld already",
             (long long)most, (long long)(n - n_prompt));
    return 0;
}

/* What is asked at all: no text is made tokens that cannot fit, and a session's memory is bounded. bytes: of the messages; or
 * tokens. */
static int check_size(const struct program_loops *p, const struct session *s, size_t bytes, int64_t tokens) {
    const int64_t context = p->a.rows->max_prompt_length + p->a.rows->max_response_length;
    if (bytes > (size_t)context * TOKEN_BYTES + MORE_BYTES)
        FAIL(ERR_INVAL, "this model's maximum context length: %lld tokens, and the messages have %zu bytes", (long long)context,
             bytes);
    if (tokens >= context)
        FAIL(ERR_INVAL, "this model's maximum context length: %lld tokens, and the prompt has %lld", (long long)context,
             (long long)tokens);
    if (token_tree_counts(s->tree).n_requests >= MAX_REQUESTS) FAIL(ERR_INVAL, "an episode has at most %d requests", MAX_REQUESTS);
    return 0;
}

/* Before a request's place is found. */
static int check_turn(const struct program_loops *p, struct session *s, size_t bytes, int64_t tokens) {
    const int64_t most = p->a.k->max_assistant_turns;
    if (s->n_drawing >= MAX_DRAWING) FAIL(ERR_INVAL, "a session asks for at most %d turns at a time", MAX_DRAWING);
    s->cut = "max_assistant_turns";
    if (most > 0 && s->n_turns + s->n_open >= most)
        FAIL(ERR_INVAL, "the episode has had its turns: multi_turn.max_assistant_turns=%lld", (long long)most);
    s->cut = "length";
    TRY(check_size(p, s, bytes, tokens));
    s->cut = NULL;
    return 0;
}

static bool has_role(const json_t *message, const char *role) {
    const char *own = json_string_value(json_object_get(message, "role"));
    return own && strcmp(own, role) == 0;
}

/* What the program says of a turn's calls: its messages of tools, in their order. */
static void take_results(struct session *s, int64_t turn, const json_t *messages) {
    const json_t *calls = json_array_get(s->calls, (size_t)turn);
    size_t i = json_array_size(messages), k = 0;
    while (i > 0 && !has_role(json_array_get(messages, i - 1), "assistant")) i--;
    for (; i < json_array_size(messages); i++) {
        const json_t *m = json_array_get(messages, i);
        if (!has_role(m, "tool")) continue;
        json_t *call = json_array_get(calls, k++);
        if (!call || json_is_number(json_object_get(call, "seconds"))) continue;
        const char *text = json_string_value(json_object_get(m, "content"));
        const size_t n = text ? strlen(text) : 0;
        char *cut = xstrndup(text ? text : "", n > MAX_RESULT_BYTES ? utf8_cut(text, MAX_RESULT_BYTES) : n);
        json_object_set_new(call, "result", json_string(cut));
        json_object_set_new(call, "seconds", json_real(clock_awake() - s->answered[turn]));
        free(cut);
    }
}

/* Request t of n tokens is a turn, if there is room for one. */
static int open_turn(struct program_loops *p, struct session *s, int64_t t, int64_t n) {
    const int fits = find_room(p, s, token_tree_prompt_length(s->tree, t), n);
    if (fits < 0) {
        s->cut = "length";
        token_tree_dropped(s->tree, t);
        return fits;
    }
    if (s->n_open++ == 0) s->oldest = http_server_clock(p->http);
    phase_beat(p->g->s->run->stages);
    return 0;
}

static int on_prompt(void *ctx, const char *id, const json_t *messages, const json_t *tools, struct text_ids *ids, int64_t *turn) {
    const size_t bytes = json_dumpb(messages, NULL, 0, JSON_COMPACT) + (tools ? json_dumpb(tools, NULL, 0, JSON_COMPACT) : 0);
    struct session *s;
    int64_t t;
    TRY(find_session(ctx, id, &s));
    TRY(check_turn(ctx, s, bytes, 0));
    const int rc = token_tree_prompt(s->tree, messages, tools, ids, &t);
    if (rc == ERR_INPUT || rc == ERR_FORMAT) return err_wrap(ERR_INVAL, "the chat template");
    TRY(rc);
    const int64_t behind = token_tree_behind(s->tree, t);
    if (behind >= 0) take_results(s, behind, messages);
    TRY(open_turn(ctx, s, t, ids->n));
    *turn = t;
    return 0;
}

static int on_prompt_ids(void *ctx, const char *id, const struct text_ids *ids, int64_t *turn) {
    struct program_loops *p = ctx;
    struct session *s;
    int64_t t;
    TRY(find_session(p, id, &s));
    TRY(check_turn(p, s, 0, ids->n));
    for (int64_t i = 0; i < ids->n; i++)
        if (ids->p[i] < 0 || ids->p[i] >= p->a.vocab)
            FAIL(ERR_INVAL, "prompt: token %lld is none of the model's %lld", (long long)i, (long long)p->a.vocab);
    token_tree_prompt_ids(s->tree, ids->p, ids->n, &t);
    TRY(open_turn(ctx, s, t, ids->n));
    *turn = t;
    return 0;
}

static int on_sampling(void *ctx, const char *id, int64_t turn, struct engine_request *r) {
    struct program_loops *p = ctx;
    struct session *s;
    struct engine_request q;
    int64_t at = 0;
    TRY(find_session(p, id, &s));
    CHECK(turn >= 0);
    if (r->n != 1) FAIL(ERR_INVAL, "n: one answer to a request is drawn in a run; ask again for another");
    if (r->n_top > 0) FAIL(ERR_INVAL, "top_logprobs: not in a run");
    TRY(generation_request(p->g, s->sample, &q));
    if (r->max_tokens > s->room) r->max_tokens = s->room;
    r->uid = q.uid;
    r->first_index = q.first_index; /* samples of a prompt draw differently, also with one seed */
    map_gets(&p->ids, id, &at);
    r->user = (void *)(intptr_t)at;
    s->n_asked++;
    return 0;
}

/* The calls of a turn, without what becomes of them. */
static json_t *calls_of(const json_t *message) {
    const json_t *calls = json_object_get(message, "tool_calls"), *call;
    json_t *out = json_array();
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)calls, i, call) {
        const json_t *f = json_object_get(call, "function");
        json_array_append_new(out, json_pack("{s:O, s:O, s:s, s:s, s:b}", "name", json_object_get(f, "name"), "arguments",
                                             json_object_get(f, "arguments"), "result", "", "status", "ok", "truncated", 0));
    }
    return out;
}

/* The names of the tools that a turn calls; NULL: none. */
static json_t *names_of(const json_t *message) {
    const json_t *calls = json_object_get(message, "tool_calls"), *call;
    json_t *names = json_array_size(calls) > 0 ? json_array() : NULL;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)calls, i, call)
        json_array_append(names, json_object_get(json_object_get(call, "function"), "name"));
    return names;
}

/* What of a turn's sampling is not the run's, and what it calls. */
static json_t *turn_record(const struct engine_request *q, const struct serve_turn *t) {
    const struct engine_request *r = t->request;
    json_t *o = json_pack("{s:I, s:s}", "tokens", (json_int_t)t->n, "finish", engine_finish_name(t->finish));
    const struct {
        const char *name;
        float own, run;
    } numbers[] = {{"temperature", r->temperature, q->temperature},
                   {"top_p", r->top_p, q->top_p},
                   {"min_p", r->min_p, q->min_p},
                   {"top_k", (float)r->top_k, (float)q->top_k},
                   {"repetition_penalty", r->repetition_penalty, q->repetition_penalty}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (memcmp(&numbers[i].own, &numbers[i].run, sizeof(float)) != 0)
            json_object_set_new(o, numbers[i].name, json_real(numbers[i].own));
    json_object_set_new(o, "max_tokens", json_integer((json_int_t)r->max_tokens));
    json_t *names = names_of(t->message);
    if (names) json_object_set_new(o, "calls", names);
    for (int64_t i = 0; i < r->n_stop; i++) {
        if (i == 0) json_object_set_new(o, "stop", json_array());
        json_array_append_new(json_object_get(o, "stop"), json_string(r->stop[i]));
    }
    for (int64_t i = 0; i < t->n_stop_asked; i++) {
        if (i == 0) json_object_set_new(o, "stop_token_ids", json_array());
        json_array_append_new(json_object_get(o, "stop_token_ids"), json_integer(r->stop_ids[i]));
    }
    return o;
}

static int on_drawn(void *ctx, const struct serve_turn *t) {
    struct program_loops *p = ctx;
    struct session *s;
    struct engine_request q;
    TRY(find_session(p, t->session, &s));
    TRY(generation_request(p->g, s->sample, &q));
    int32_t *version = xmalloc((size_t)t->n * sizeof *version + 1);
    for (int64_t i = 0; i < t->n; i++) version[i] = i < p->call->n ? p->call->versions[i] : ppo_version(p->g->s);
    token_tree_drawn(s->tree, t->turn,
                     &(struct token_tree_turn){.tag = s->n_turns,
                                               .ids = t->ids,
                                               .logp = t->logp,
                                               .kept = p->drawn->logp_kept,
                                               .n = t->n,
                                               .version = version,
                                               .message = t->messages ? t->message : NULL});
    free(version);
    const char *text = json_string_value(json_object_get(t->message, "content"));
    free(s->said);
    s->said = xstrdup(text ? text : "");
    json_array_append_new(s->log, turn_record(&q, t));
    json_array_append_new(s->calls, calls_of(t->message));
    xgrow((void **)&s->answered, &s->cap_answered, s->n_turns + 1, sizeof *s->answered);
    s->answered[s->n_turns] = clock_awake();
    if (memcmp(&t->request->temperature, &q.temperature, sizeof q.temperature) != 0) s->n_other_temperature += t->n;
    s->n_malformed += t->n_malformed;
    s->n_turns++;
    s->n_open--;
    s->oldest = s->active = http_server_clock(p->http);
    return 0;
}

static void on_dropped(void *ctx, const char *id, int64_t turn) {
    struct program_loops *p = ctx;
    struct session *s;
    if (find_session(p, id, &s) < 0) return; /* it has no tree any more */
    token_tree_dropped(s->tree, turn);
    s->n_open--;
    s->oldest = s->active = http_server_clock(p->http);
}

/* A reward, and what comes with it: {"reward": x, ...}. */
static int take_reward(struct session *s, const json_t *o) {
    const json_t *x = json_object_get(o, "reward");
    json_t *extra = NULL;
    char *text;
    if (!json_is_number(x)) FAIL(ERR_INVAL, "{\"reward\": a number} is wanted");
    extra = json_deep_copy(o);
    json_object_del(extra, "reward");
    text = json_dumps(extra, JSON_COMPACT);
    const size_t n = text ? strlen(text) : 0;
    free(text);
    if (n > MAX_EXTRA_BYTES) {
        json_decref(extra);
        FAIL(ERR_INVAL, "what comes with a reward has at most %d bytes", MAX_EXTRA_BYTES);
    }
    json_decref(s->extra);
    s->extra = extra;
    s->reward = json_number_value(x);
    s->has_reward = true;
    return 0;
}

/* verl's uni-agent sends {"reward_info": {"reward": x, ...}}. */
static int on_reward(void *ctx, const char *id, const json_t *body) {
    struct session *s;
    const json_t *inner = json_object_get(body, "reward_info");
    TRY(find_session(ctx, id, &s));
    return take_reward(s, inner ? inner : body);
}

/* ---- turns in the engine ---- */

/* So that it can go on after an interruption. */
static void keep_request(struct call *c, const struct engine_request *r) {
    c->q = *r;
    c->q.prompt = c->prompt = xcopy(r->prompt, r->n_prompt, sizeof *c->prompt);
    c->q.stop_ids = c->stop_ids = xcopy(r->stop_ids, r->n_stop_ids, sizeof *c->stop_ids);
    c->stop = xcalloc((size_t)r->n_stop + 1, sizeof *c->stop);
    for (int64_t i = 0; i < r->n_stop; i++) c->stop[i] = xstrdup(r->stop[i]);
    c->q.stop = (const char *const *)c->stop;
}

static void call_free(struct call *c) {
    for (int64_t i = 0; c->stop && i < c->q.n_stop; i++) free(c->stop[i]);
    free(c->stop);
    free(c->prompt);
    free(c->stop_ids);
    free(c->ids);
    free(c->versions);
    free(c->logp);
    free(c->kept);
    *c = (struct call){0};
}

static int submit(void *ctx, const struct engine_request *r, uint64_t ticket) {
    struct program_loops *p = ctx;
    const int64_t at = (int64_t)(intptr_t)r->user;
    struct engine_request q = *r;
    q.user = (void *)(intptr_t)user_loop_user(p->n_calls, true);
    const int rc = p->g->s->worker->ops->generate_add(p->g->s->worker, &q);
    if (rc < 0 && rc != ERR_INVAL && rc != ERR_NOMEM) p->rc = rc;
    TRY(rc);
    xgrow((void **)&p->calls, &p->cap_calls, p->n_calls + 1, sizeof *p->calls);
    struct call *c = &p->calls[p->n_calls++];
    *c = (struct call){.session = p->sessions[at], .ticket = ticket};
    if (p->g->partial) keep_request(c, r);
    p->sessions[at]->n_drawing++;
    return 0;
}

/* What is under way is drawn to its end, or until it is interrupted, and then of no ticket. */
static void cancel(void *ctx, uint64_t ticket) {
    struct program_loops *p = ctx;
    for (int64_t k = 0; k < p->n_calls; k++) p->calls[k].left |= p->calls[k].session && p->calls[k].ticket == ticket;
}

static void stats(void *ctx, struct engine_stats *out) {
    const struct program_loops *p = ctx;
    *out = p->g ? p->g->s->worker->ops->generate_stats(p->g->s->worker) : (struct engine_stats){0};
}

/* What an interrupted turn has. */
static void take_part(const struct generation_state *g, struct call *c, const struct engine_sample *s) {
    c->versions = xrealloc(c->versions, (size_t)s->n * sizeof *c->versions + 1);
    for (int64_t i = c->n; i < s->n; i++) c->versions[i] = ppo_version(g->s);
    free(c->ids);
    free(c->logp);
    free(c->kept);
    c->ids = xcopy(s->ids, s->n, sizeof *s->ids);
    c->logp = xcopy(s->logp, s->n, sizeof *s->logp);
    c->kept = xcopy(s->logp_kept, s->n, sizeof *s->logp_kept);
    c->n = s->n;
}

void program_loop_drawn(struct generation_state *g, struct program_loops *p, int64_t call, const struct engine_sample *s) {
    struct call *const c = p && call < p->n_calls ? &p->calls[call] : NULL;
    if (!c || !c->session) return; /* of a generation that was dropped */
    struct session *x = c->session;
    x->drawing += s->seconds;
    x->n_preempted += s->n_preempted;
    if (s->n > 0 && x->oldest_version < 0) x->oldest_version = ppo_version(g->s);
    if (s->finish == ENGINE_INTERRUPTED) {
        take_part(g, c, s);
        return;
    }
    x->n_drawing--;
    p->drawn = s;
    p->call = c;
    serve_drawn(p->serve, &(struct serve_drawn){.ticket = c->ticket,
                                                .n = s->n,
                                                .ids = s->ids,
                                                .logp = s->logp,
                                                .ended = true,
                                                .finish = s->finish,
                                                .text_bytes = s->text_bytes,
                                                .n_cached = s->n_cached});
    p->drawn = NULL;
    p->call = NULL;
    call_free(c);
}

/* ---- an episode's sample ---- */

/* The calls of a sample's turns. */
static void add_calls(struct loop_output *o, const struct session *s, const struct token_tree_sample *t) {
    o->calls = json_array();
    for (int64_t k = 0; k < t->n_turns; k++) {
        json_t *call;
        size_t i;
        json_array_foreach(json_array_get(s->calls, (size_t)t->tags[k]), i, call) {
            json_t *one = json_deep_copy(call);
            o->tool_seconds += json_number_value(json_object_get(one, "seconds"));
            if (!json_object_get(one, "seconds")) json_object_set_new(one, "seconds", json_real(0));
            json_object_set_new(one, "segment", json_integer((json_int_t)t->turn_segments[k]));
            json_array_append_new(o->calls, one);
        }
    }
}

static void fill_output(struct loop_output *o, const struct token_tree_sample *t) {
    *o = (struct loop_output){.prompt = xcopy(t->prompt.p, t->prompt.n, sizeof *o->prompt),
                              .ids = xcopy(t->response.p, t->response.n, sizeof *o->ids),
                              .logp = xcopy(t->logp, t->response.n, sizeof *o->logp),
                              .kept = xcopy(t->kept, t->response.n, sizeof *o->kept),
                              .versions = xcopy(t->version, t->response.n, sizeof *o->versions),
                              .n_prompt = t->prompt.n,
                              .n = t->response.n,
                              .segments = xmalloc((size_t)t->n_segments * 2 * sizeof *o->segments + 1),
                              .n_segments = t->n_segments,
                              .num_turns = 2 * t->n_turns,
                              .extra_fields = json_object()};
    loop_output_spread_versions(o);
    for (int64_t k = 0; k < t->n_segments; k++) {
        o->segments[2 * k] = (int32_t)t->segments[k].n;
        o->segments[2 * k + 1] = (int32_t)t->segments[k].kind;
    }
}

/* The session's part of the record of its episode; of[n]: its samples. */
static json_t *record_of(const struct session *s, bool failed, const struct token_tree_sample *of, int64_t n) {
    const struct token_tree_counts c = token_tree_counts(s->tree);
    json_t *o = json_pack("{s:O, s:I}", "turn_log", s->log, "requests", (json_int_t)c.n_requests), *starts = json_object();
    for (int64_t i = 0; i < n; i++) {
        const char *name = token_tree_start_name(of[i].start);
        json_object_set_new(starts, name, json_integer(json_integer_value(json_object_get(starts, name)) + 1));
    }
    json_object_set_new(o, "samples", starts);
    if (n > MAX_SAMPLES) json_object_set_new(o, "samples_left_out", json_integer(n - MAX_SAMPLES));
    if (s->cut && !failed) json_object_set_new(o, "end", json_string(s->cut));
    if (s->n_malformed > 0) json_object_set_new(o, "malformed", json_integer(s->n_malformed));
    if (c.n_rolled_back > 0) json_object_set_new(o, "rolled_back_tokens", json_integer(c.n_rolled_back));
    if (s->n_restarts > 0) json_object_set_new(o, "restarted", json_integer(s->n_restarts));
    return o;
}

static void take_sample(struct generation_state *g, struct session *s, struct user_episode *x) {
    struct token_tree_sample *all;
    const int64_t n = token_tree_samples(s->tree, &all);
    for (int64_t i = 0; i < n; i++) {
        struct loop_output o;
        if (n > MAX_SAMPLES && i >= MAX_SAMPLES - 1 && i < n - 1) continue;
        fill_output(&o, &all[i]);
        add_calls(&o, s, &all[i]);
        user_episode_add(g, &g->samples[s->sample], &o);
    }
    if (n == 0 && !x->failure) x->failure = xstrdup("it ended without a turn of the model");
    x->record = record_of(s, x->failure != NULL, all, n);
    token_tree_samples_free(all, n);
    if (n == 0) user_episode_take_output(g, &g->samples[s->sample], &x->out);
}

static struct program_journal journal_of(const struct program_loops *p) {
    return (struct program_journal){.g = p->g, .journal = p->a.journal, .command = p->a.k->command};
}

/* The sample is there, or it has failed. */
static void close_session(struct program_loops *p, struct session *s) {
    if (s->listener) http_server_remove_listener(p->http, s->listener);
    s->listener = NULL;
    struct generation_sample *const sample = &p->g->samples[s->sample];
    sample->finish = s->cut && strcmp(s->cut, "length") == 0 ? ENGINE_LENGTH : ENGINE_STOP;
    sample->ended = clock_wall();
    token_tree_destroy(s->tree);
    s->tree = NULL;
    p->n_running -= s->state == RUNNING;
    p->n_waiting--;
    s->state = OVER;
    phase_beat(p->g->s->run->stages);
    generation_ended(p->g, s->sample);
}

/* The program is over; failure (taken over): why it has no score, or NULL. */
static int end_session(struct program_loops *p, struct session *s, char *failure, bool timed_out) {
    struct generation_sample *const sample = &p->g->samples[s->sample];
    struct user_episode *const x = sample->user;
    const struct program_journal journal = journal_of(p);
    x->failure = failure;
    x->timed_out = timed_out;
    x->n_other_temperature = s->n_other_temperature;
    take_sample(p->g, s, x);
    x->out.has_reward = s->has_reward;
    x->out.reward = s->reward;
    x->reward_extra = s->extra;
    x->solution = s->said;
    s->extra = NULL;
    s->said = NULL;
    sample->seconds += s->drawing;
    sample->n_preempted += s->n_preempted;
    close_session(p, s);
    return program_journal_end(&journal, s->sample);
}

/* ---- processes ---- */

struct variables {
    char *v[20];
    int n;
};
__attribute__((format(printf, 2, 3))) static void set(struct variables *e, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    CHECK(e->n + 1 < (int)(sizeof e->v / sizeof *e->v));
    e->v[e->n++] = xvasprintf(fmt, ap);
    va_end(ap);
}

/* Loopback is reached without a proxy. */
static void set_no_proxy(struct variables *e, const char *name) {
    const char *now = getenv(name);
    set(e, "%s=%s%s127.0.0.1,localhost", name, now ? now : "", now && *now ? "," : "");
}

static void set_variables(const struct program_loops *p, const struct session *s, const char *row, struct variables *e) {
    const struct generation_state *g = p->g;
    const char *url = http_server_address(p->http);
    set(e, "OPENAI_BASE_URL=%s/sessions/%s/v1", url, s->id);
    set(e, "OPENAI_API_KEY=%s", s->key);
    set(e, "ANTHROPIC_BASE_URL=%s/sessions/%s", url, s->id);
    set(e, "ANTHROPIC_API_KEY=%s", s->key);
    set(e, "VERLC_SESSION=%s", s->id);
    set(e, "VERLC_REWARD_URL=%s/sessions/%s/reward", url, s->id);
    set(e, "VERLC_MODEL=%s", p->a.model);
    set(e, "VERLC_STEP=%lld", (long long)g->s->run->step);
    set(e, "VERLC_SAMPLE=%lld", (long long)(s->sample % g->per));
    set(e, "VERLC_VALIDATION=%d", g->validation);
    set(e, "VERLC_RESTARTED=%lld", (long long)s->n_restarts);
    set_no_proxy(e, "NO_PROXY");
    set_no_proxy(e, "no_proxy");
    if (strlen(row) <= MAX_ROW_BYTES) set(e, "VERLC_ROW=%s", row);
}

static int start_program(struct program_loops *p, struct session *s) {
    static const char *const without[] = {"VERLC_ROW", "ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", NULL};
    const struct generation_group *group = &p->g->groups[s->sample / p->g->per];
    char *row = json_dumps(batch_find(group->prompts, "row")->json[group->row], JSON_COMPACT);
    const char *url = http_server_address(p->http);
    struct variables e = {0};
    CHECK(row != NULL);
    set_variables(p, s, row, &e);
    const struct child_program_args a = {.command = p->a.k->command,
                                         .env = (const char *const *)e.v,
                                         .without = without,
                                         .input = row,
                                         .n_input = strlen(row),
                                         .max_files = p->max_files,
                                         .sandbox = p->a.k->sandbox,
                                         .dirs = p->dirs,
                                         .port = atoi(strrchr(url, ':') + 1),
                                         .wall_s = p->a.k->episode_timeout};
    const int rc = child_program_start(&s->program, &a);
    for (int i = 0; i < e.n; i++) free(e.v[i]);
    free(row);
    TRY(rc);
    TRY(token_tree_create(&s->tree, p->a.join));
    s->begun = s->active = s->oldest = http_server_clock(p->http);
    s->log = json_array();
    s->calls = json_array();
    s->state = RUNNING;
    p->n_running++;
    return 0;
}

/* Starts those for which there is room, after their beginning is on disk. */
static int start_programs(struct program_loops *p) {
    const struct program_journal journal = journal_of(p);
    int64_t from = p->next, n = 0;
    for (; p->next < p->n_sessions && p->n_running + n < p->a.k->max_concurrent; p->next++) {
        struct session *s = p->sessions[p->next];
        if (s->state != QUEUED) continue;
        TRY(program_journal_start(&journal, s->sample, s->n_restarts));
        n++;
    }
    if (*p->a.journal) TRY(tool_journal_sync(*p->a.journal)); /* ends of others too */
    for (; from < p->next; from++)
        if (p->sessions[from]->state == QUEUED) TRY(start_program(p, p->sessions[from]));
    return 0;
}

/* Why the run ends a program; NULL: it does not. */
static char *overdue(const struct program_loops *p, const struct session *s) {
    const struct ppo_agent_config *k = p->a.k;
    const double now = http_server_clock(p->http);
    if (now - s->begun > k->episode_timeout) return xasprintf("it took more than agent.episode_timeout=%g s", k->episode_timeout);
    if (s->n_open > 0 && now - s->oldest > k->turn_timeout)
        return xasprintf("a turn took more than agent.turn_timeout=%g s", k->turn_timeout);
    if (s->n_open == 0 && now - s->active > k->idle_timeout)
        return xasprintf("it asked for nothing in agent.idle_timeout=%g s", k->idle_timeout);
    return NULL;
}

/* The program has ended: how, and what it printed last. One that was refused a turn for its length ends so, whatever it makes of
 * the refusal. */
static int take_end(struct program_loops *p, struct session *s) {
    size_t n;
    const char *line = child_program_last_line(s->program, &n);
    json_t *reward = s->has_reward ? NULL : child_program_reward_line(line, n);
    char *last = child_program_last_error(s->program), *how, *failure = NULL;
    child_program_stop(s->program, &how);
    s->program = NULL;
    if (reward && take_reward(s, reward) < 0) failure = xasprintf("its last line: %s", err_msg());
    if (strcmp(how, "exit code 0") != 0 && !s->cut) {
        free(failure);
        failure = xasprintf("%s%s%s", how, *last ? ": " : "", last);
    }
    json_decref(reward);
    free(last);
    free(how);
    return end_session(p, s, failure, false);
}

static int look_at(struct program_loops *p, struct session *s) {
    const int listener = child_program_listener(s->program);
    if (listener >= 0) s->listener = http_server_add_listener(p->http, listener);
    if (child_program_ended(s->program)) return take_end(p, s);
    char *why = overdue(p, s);
    if (!why) return 0;
    child_program_stop(s->program, NULL);
    s->program = NULL;
    return end_session(p, s, why, true);
}

/* ---- a run ---- */

/* Whose request waits; NULL: it does not. */
static struct session *held_session(const struct program_loops *p, const char *path) {
    static const char head[] = "/sessions/";
    char id[2 * ID_BYTES + 1] = "";
    int64_t at;
    if (strncmp(path, head, sizeof head - 1) != 0) return NULL;
    strncat(id, path + sizeof head - 1, sizeof id - 1);
    if (!map_gets(&p->ids, id, &at) || p->sessions[at]->state != RUNNING) return NULL;
    return p->sessions[at]->held || (p->g && p->g->interrupted) ? p->sessions[at] : NULL;
}

static void left(void *arg) { ((struct later *)arg)->x = NULL; }

static void on_request(void *arg, struct http_exchange *x) {
    struct program_loops *p = arg;
    struct session *s = held_session(p, http_exchange_path(x));
    if (!s) {
        serve_request(p->serve, x);
        return;
    }
    struct later *l = xcalloc(1, sizeof *l);
    *l = (struct later){s, x};
    http_exchange_on_close(x, left, l);
    xgrow((void **)&p->later, &p->cap_later, p->n_later + 1, sizeof *p->later);
    p->later[p->n_later++] = l;
}

/* The requests of s that wait are made, or (why) refused. */
static void end_later(struct program_loops *p, const struct session *s, const char *why) {
    for (int64_t k = 0; k < p->n_later; k++) {
        struct later *l = p->later[k];
        if (!l || l->session != s) continue;
        struct http_exchange *const x = l->x;
        p->later[k] = NULL;
        free(l);
        if (!x) continue;
        http_exchange_on_close(x, NULL, NULL);
        if (why) serve_refused(p->serve, x, 400, why);
        else serve_request(p->serve, x);
    }
}

static void on_refused(void *arg, struct http_exchange *x, int status, const char *message) {
    serve_refused(((struct program_loops *)arg)->serve, x, status, message);
}
static void on_tick(void *arg) { serve_tick(((struct program_loops *)arg)->serve); }

/* How many connections there may be: so many that one process does not take those of the others, as far as this process may have
 * descriptors. */
static int64_t choose_connections(const struct program_loops *p) {
    const int64_t wanted = 16 * MAX_FILES + 16 * p->a.k->max_concurrent, other = OTHER_FILES + 4 * p->a.k->max_concurrent;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return wanted;
    const rlim_t want = (rlim_t)(wanted + other), now = files.rlim_cur;
    if (now != RLIM_INFINITY && now < want) {
        files.rlim_cur = files.rlim_max == RLIM_INFINITY || files.rlim_max > want ? want : files.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &files) != 0) files.rlim_cur = now;
    }
    const int64_t left = files.rlim_cur == RLIM_INFINITY ? wanted : (int64_t)files.rlim_cur - other;
    return left > wanted ? wanted : left > 64 ? left : 64;
}

/* What a sandbox may read: where this run was started, and what the key names. */
static int open_sandbox(struct program_loops *p) {
    const struct ppo_agent_config *k = p->a.k;
    int64_t n = 0;
    TRY(child_program_check_sandbox());
    p->dirs = xcalloc((size_t)k->n_sandbox_dirs + 2, sizeof *p->dirs);
    p->dir = getcwd(NULL, 0);
    if (p->dir && strcmp(p->dir, "/") != 0) p->dirs[n++] = p->dir;
    for (int64_t i = 0; i < k->n_sandbox_dirs; i++) {
        if (!file_is_dir(k->sandbox_dirs[i]) || k->sandbox_dirs[i][0] != '/' || strcmp(k->sandbox_dirs[i], "/") == 0)
            FAIL(ERR_INVAL, "actor_rollout_ref.rollout.agent.sandbox_read: %s is no directory with an absolute path below /",
                 k->sandbox_dirs[i]);
        p->dirs[n++] = k->sandbox_dirs[i];
    }
    return 0;
}

static int open_all(struct program_loops *p) {
    const struct ppo_data_config *rows = p->a.rows;
    const int64_t connections = choose_connections(p);
    p->max_files = connections / 4 < MAX_FILES ? connections / 4 : MAX_FILES;
    if (p->max_files < 64)
        log_warn("ulimit -n lets this process open few files, and a process of an agent's program %lld", (long long)p->max_files);
    if (p->a.k->sandbox) TRY(open_sandbox(p));
    p->hooks = (struct serve_sessions){.ctx = p,
                                       .enter = on_enter,
                                       .defaults = on_defaults,
                                       .prompt = on_prompt,
                                       .prompt_ids = on_prompt_ids,
                                       .sampling = on_sampling,
                                       .drawn = on_drawn,
                                       .dropped = on_dropped,
                                       .reward = on_reward};
    TRY(serve_create(&p->serve, &(struct serve_args){.backend = {.ctx = p, .submit = submit, .cancel = cancel, .stats = stats},
                                                     .sessions = &p->hooks,
                                                     .sessions_only = true,
                                                     .tok = p->a.tok,
                                                     .model = p->a.model,
                                                     .tool_format = tool_parser_name(p->a.k->parser),
                                                     .max_len = rows->max_prompt_length + rows->max_response_length,
                                                     .max_open = INT32_MAX}));
    return http_server_open(&p->http, &(struct http_server_args){.host = "127.0.0.1",
                                                                 .max_connections = connections,
                                                                 .max_of_peer = connections,
                                                                 .max_body = MAX_BODY,
                                                                 .request_s = 60,
                                                                 .answer_s = 7 * 86400,
                                                                 .stepped = true,
                                                                 .serve = on_request,
                                                                 .refused = on_refused,
                                                                 .tick = on_tick,
                                                                 .arg = p});
}

int program_loops_open(struct program_loops **out, const struct program_loops_args *a) {
    struct program_loops *p = xcalloc(1, sizeof *p);
    p->a = *a;
    const int rc = open_all(p);
    if (rc < 0) program_loops_close(p);
    else *out = p;
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

void program_loops_close(struct program_loops *p) {
    if (!p) return;
    for (int64_t k = 0; k < p->n_sessions; k++) p->sessions[k]->held = false;
    program_loop_end(p);
    http_server_close(p->http);
    serve_destroy(p->serve);
    free(p->dirs);
    free(p->dir);
    free(p->sessions);
    free(p->calls);
    free(p->later);
    free(p);
}

/* ---- a generation ---- */

/* What a run that was killed left of it: all of it, or that it ran. */
static int resume(struct program_loops *p, struct session *s) {
    struct generation_sample *const sample = &p->g->samples[s->sample];
    const struct program_journal journal = journal_of(p);
    bool over;
    TRY(program_journal_find(&journal, s->sample, &over, &s->n_restarts));
    if (s->n_restarts < sample->user->n_starts) s->n_restarts = sample->user->n_starts; /* the checkpoint's */
    const bool dropped = !over && s->n_restarts > 0 && !p->a.k->run_again;
    if (!over && !dropped) return 0;
    if (dropped) {
        sample->user->failure = xstrdup("the run was killed while it ran (agent.on_restart=drop)");
        sample->user->record = json_pack("{s:I}", "restarted", (json_int_t)s->n_restarts);
    }
    if (!sample->ids) user_episode_take_output(p->g, sample, &sample->user->out);
    close_session(p, s);
    return 0;
}

int program_loop_begin(struct generation_state *g, struct program_loops *p, int64_t i) {
    char id[2 * ID_BYTES + 1], key[sizeof id];
    TRY(random_hex(id, ID_BYTES));
    TRY(random_hex(key, ID_BYTES));
    struct session *s = xcalloc(1, sizeof *s);
    s->sample = i;
    s->oldest_version = -1;
    memcpy(s->id, id, sizeof id);
    memcpy(s->key, key, sizeof key);
    p->g = g;
    xgrow((void **)&p->sessions, &p->cap_sessions, p->n_sessions + 1, sizeof *p->sessions);
    map_set(&p->ids, s->id, strlen(s->id), p->n_sessions);
    p->sessions[p->n_sessions++] = s;
    p->n_waiting++;
    return resume(p, s);
}

int program_loop_step(struct generation_state *g, struct program_loops *p, bool wait) {
    p->g = g;
    TRY(http_server_step(p->http));
    if (p->rc < 0) return err_pass(p->rc, __FILE__, __LINE__);
    if (wait && p->n_waiting > 0) nanosleep(&(struct timespec){0, WAIT_NS}, NULL);
    const double now = clock_now();
    if (now - p->looked < fmax(LOOK_S, LOOK_EACH_S * (double)p->n_running)) return 0;
    p->looked = now;
    for (int64_t k = 0; k < p->n_sessions; k++)
        if (p->sessions[k]->state == RUNNING && !p->sessions[k]->held) TRY(look_at(p, p->sessions[k]));
    return g->interrupted ? 0 : start_programs(p);
}

bool program_loop_waits(const struct program_loops *p) { return p && p->n_waiting > 0; }

static void session_free(struct program_loops *p, struct session *s) {
    end_later(p, s, "the episode is over");
    if (s->listener) http_server_remove_listener(p->http, s->listener);
    if (s->program) child_program_stop(s->program, NULL);
    token_tree_destroy(s->tree);
    json_decref(s->log);
    json_decref(s->calls);
    free(s->answered);
    json_decref(s->extra);
    free(s->said);
    free(s);
}

/* The turns of s, or (NULL) of all that are not held, will not be drawn. */
static void fail_calls(struct program_loops *p, const struct session *s) {
    struct err_saved why;
    err_save(&why);
    err_set(ERR_INTERNAL, __FILE__, __LINE__, "the generation has ended");
    for (int64_t k = 0; k < p->n_calls; k++) {
        struct call *c = &p->calls[k];
        if (!c->session || (s ? c->session != s : c->session->held)) continue;
        if (p->serve) serve_failed(p->serve, c->ticket, ERR_INTERNAL);
        call_free(c);
    }
    err_restore(&why);
}

void program_loop_end(struct program_loops *p) {
    int64_t n = 0, n_calls = 0, n_later = 0;
    fail_calls(p, NULL);
    for (int64_t k = 0; k < p->n_calls; k++)
        if (p->calls[k].session) p->calls[n_calls++] = p->calls[k];
    map_free(&p->ids);
    p->ids = (struct map){0};
    for (int64_t k = 0; k < p->n_sessions; k++) {
        struct session *s = p->sessions[k];
        if (!s->held) {
            session_free(p, s);
            continue;
        }
        map_set(&p->ids, s->id, strlen(s->id), n);
        p->sessions[n++] = s;
    }
    for (int64_t k = 0; k < p->n_later; k++)
        if (p->later[k]) p->later[n_later++] = p->later[k];
    p->n_sessions = n;
    p->n_calls = n_calls;
    p->n_later = n_later;
    p->n_running = p->n_waiting = p->next = 0;
    p->g = NULL;
    p->rc = 0;
    if (n == 0 && p->serve) serve_failed_all(p->serve);
}

/* ---- episodes that new weights interrupt ---- */

void program_loop_hold(struct program_loops *p) {
    for (int64_t k = 0; k < p->n_sessions; k++) {
        struct session *s = p->sessions[k];
        if (s->held || s->state == OVER) continue;
        struct generation_sample *const sample = &p->g->samples[s->sample];
        if (s->state == QUEUED) { /* it begins in a later generation */
            user_episode_free(sample->user);
            sample->user = NULL;
            continue;
        }
        sample->user->held = xstrdup(s->id);
        sample->user->oldest = s->oldest_version;
        sample->user->n_starts = s->n_restarts + 1;
        s->held = true;
        s->held_at = http_server_clock(p->http);
    }
}

static struct session *find_held(const struct program_loops *p, const struct user_episode *x) {
    int64_t at;
    CHECK(map_gets(&p->ids, x->held, &at));
    return p->sessions[at];
}

/* Its turns under way go on, then what it has asked since is read. */
int program_loop_resume(struct generation_state *g, struct program_loops *p, int64_t i) {
    struct user_episode *const x = g->samples[i].user;
    struct session *s = find_held(p, x);
    const double held_s = http_server_clock(p->http) - s->held_at;
    p->g = g;
    p->n_running++;
    p->n_waiting++;
    s->sample = i;
    s->held = false;
    s->begun += held_s;
    s->active += held_s;
    s->oldest += held_s;
    free(x->held);
    x->held = NULL;
    for (int64_t k = 0; k < p->n_calls; k++) {
        struct call *c = &p->calls[k];
        if (c->session != s) continue;
        struct engine_request q = c->q;
        q.begun = c->ids;
        q.begun_logp = c->logp;
        q.begun_logp_kept = c->kept;
        q.n_begun = c->n;
        q.user = (void *)(intptr_t)user_loop_user(k, true);
        if (!c->left) TRY(g->s->worker->ops->generate_add(g->s->worker, &q));
        s->n_drawing -= c->left;
        if (c->left) call_free(c);
    }
    end_later(p, s, NULL);
    return 0;
}

void program_loop_forget(struct program_loops *p, const struct user_episode *x) {
    struct session *s = find_held(p, x);
    fail_calls(p, s);
    end_later(p, s, "the episode was dropped");
    child_program_stop(s->program, NULL);
    s->program = NULL;
    s->state = OVER;
    s->held = false; /* it goes with the next generation */
}
