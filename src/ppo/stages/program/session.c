/* session.c - sessions of agent programs as serve sees them: who may ask, what a request continues, how its turn is sampled, what
 * became of it, and the reward that a program says.
 *
 * Invariant: a session's tokens are those that its program was given; what does not fit the context or the limits of an episode is
 * refused before anything is kept of it. */
#include "ppo/stages/program/program_loop_int.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/encoding/utf8.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_DRAWING = 256,    /* turns of one session that are drawn at a time */
    MAX_REQUESTS = 10000, /* of one session */
    TOKEN_BYTES = 32,     /* a text of more bytes for each token of the context is not looked at */
    MORE_BYTES = 64 << 10,
    MAX_EXTRA_BYTES = 1 << 16,
    MAX_RESULT_BYTES = 1 << 14 /* of a tool's text that the record has */
};

/* One that runs. ERR_INPUT: there is none of that id; ERR_INVAL: it is over. */
static int find_session(const struct program_loops *p, const char *id, struct program_session **out) {
    int64_t at;
    if (!map_gets(&p->ids, id, &at)) FAIL(ERR_INPUT, "there is no such session");
    if (p->sessions[at]->state != RUNNING) FAIL(ERR_INVAL, "the episode is over");
    *out = p->sessions[at];
    return 0;
}

static int on_enter(void *ctx, const char *id, const char *key) {
    const struct program_loops *p = ctx;
    struct program_session *s;
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
static uint64_t turn_seed(const struct program_session *s, const struct engine_request *q) {
    return q->seed ^ (uint64_t)s->n_asked * 0xD1B54A32D192ED03u;
}

static int on_defaults(void *ctx, const char *id, struct engine_request *r) {
    struct program_loops *p = ctx;
    struct program_session *s;
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
static int find_room(const struct program_loops *p, struct program_session *s, int64_t n_prompt, int64_t n) {
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
static int check_size(const struct program_loops *p, const struct program_session *s, size_t bytes, int64_t tokens) {
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
static int check_turn(const struct program_loops *p, struct program_session *s, size_t bytes, int64_t tokens) {
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
static void take_results(struct program_session *s, int64_t turn, const json_t *messages) {
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
static int open_turn(struct program_loops *p, struct program_session *s, int64_t t, int64_t n) {
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
    struct program_session *s;
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
    struct program_session *s;
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
    struct program_session *s;
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
    struct program_session *s;
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
    struct program_session *s;
    if (find_session(p, id, &s) < 0) return; /* it has no tree any more */
    token_tree_dropped(s->tree, turn);
    s->n_open--;
    s->oldest = s->active = http_server_clock(p->http);
}

/* A reward, and what comes with it: {"reward": x, ...}. */
int program_session_take_reward(struct program_session *s, const json_t *o) {
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
    struct program_session *s;
    const json_t *inner = json_object_get(body, "reward_info");
    TRY(find_session(ctx, id, &s));
    return program_session_take_reward(s, inner ? inner : body);
}

struct serve_sessions program_session_hooks(struct program_loops *p) {
    return (struct serve_sessions){.ctx = p,
                                   .enter = on_enter,
                                   .defaults = on_defaults,
                                   .prompt = on_prompt,
                                   .prompt_ids = on_prompt_ids,
                                   .sampling = on_sampling,
                                   .drawn = on_drawn,
                                   .dropped = on_dropped,
                                   .reward = on_reward};
}
