/* tool_agent.c - see tool_agent.h. Where verl's loop has a quirk that decides which tokens are trained, a comment says so. */
#include "agent/tool_agent.h"

#include "base/encoding/base64.h"
#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

struct tool_agent {
    struct tool_agent_rules rules;
    json_t *messages, *tools;
    struct text_ids ids; /* the response */
    int32_t *segments;   /* (n_segments, 2) */
    int64_t n_segments, cap_segments;
    int64_t n_turn; /* tokens of the turn drawn last */
    int64_t n_old;  /* messages whose tokens are in ids */
    int64_t n_prompt;
    int64_t assistant, user;
    int64_t n_malformed, n_dropped, n_asked;
    struct tool_turn turn; /* the turn drawn last, as parsed; its first n_run calls are run */
    int64_t n_run, n_results;
    json_t *record, *tool_rewards, *turn_scores, *extra_fields; /* record: all calls that were run */
    double tool_seconds, slowest;                               /* slowest: of the round under way */
    bool replied, stop;                                         /* the new message is an interaction's; it stops */
    bool interacting;                                           /* the turn waits for one */
    enum tool_agent_end end;
    char *reason;
};

const char *tool_agent_end_name(enum tool_agent_end e) {
    static const char *const names[] = {"stop",    "length", "max_assistant_turns", "max_user_turns", "refused", "error",
                                        "timeout", "open"};
    return names[e];
}

void tool_agent_create(struct tool_agent **out, const struct tool_agent_rules *rules, const json_t *messages, const json_t *tools) {
    struct tool_agent *a = xcalloc(1, sizeof *a);
    CHECK(rules->response_length >= 1);
    a->rules = *rules;
    a->messages = json_deep_copy(messages);
    a->tools = json_array_size(tools) > 0 ? json_incref((json_t *)(uintptr_t)tools) : NULL; /* renders are kept by its address */
    a->n_old = a->n_prompt = (int64_t)json_array_size(messages);
    a->record = json_array();
    a->tool_rewards = json_array();
    a->turn_scores = json_array();
    a->extra_fields = json_object();
    a->end = TOOL_AGENT_OPEN;
    *out = a;
}

void tool_agent_destroy(struct tool_agent *a) {
    if (!a) return;
    json_decref(a->messages);
    json_decref(a->tools);
    json_decref(a->record);
    json_decref(a->tool_rewards);
    json_decref(a->turn_scores);
    json_decref(a->extra_fields);
    tool_turn_free(&a->turn);
    text_ids_free(&a->ids);
    free(a->segments);
    free(a->reason);
    free(a);
}

/* ---- the response ---- */

static void add_segment(struct tool_agent *a, enum segment_kind kind, const int32_t *ids, int64_t n) {
    if (n == 0) return;
    xgrow((void **)&a->segments, &a->cap_segments, 2 * (a->n_segments + 1), sizeof *a->segments);
    a->segments[2 * a->n_segments] = (int32_t)n;
    a->segments[2 * a->n_segments++ + 1] = kind;
    text_ids_add(&a->ids, ids, n);
}

/* The last tokens go. A segment that loses all of its tokens stays, so that a call still names it. */
static void cut_end(struct tool_agent *a, int64_t n) {
    a->ids.n -= n;
    for (int64_t k = a->n_segments; n > 0; k--) {
        int32_t *len = &a->segments[2 * (k - 1)];
        const int64_t take = n < *len ? n : *len;
        *len -= (int32_t)take;
        n -= take;
    }
}

static enum tool_agent_next end_as(struct tool_agent *a, enum tool_agent_end why) {
    const int64_t most = a->rules.response_length;
    if (a->ids.n > most)
        cut_end(a, a->ids.n - most); /* a later turn may be drawn beyond it (verl's limit is of the whole stream) */
    while (a->n_segments > 1 && a->segments[2 * (a->n_segments - 1)] == 0) a->n_segments--;
    a->end = why;
    return TOOL_AGENT_END;
}

/* A text of the model's or of a tool's: of bytes that are no UTF-8 each becomes U+FFFD. */
static json_t *text_json(const char *p, size_t n) {
    json_t *text = json_stringn(p, n);
    struct buf repaired = {0};
    if (text) return text;
    if (text_utf8_repair(&repaired, p, n) == 0 && repaired.p) text = json_stringn(repaired.p, repaired.n);
    buf_free(&repaired);
    return text ? text : json_string("");
}

/* ---- a turn ---- */

/* {type, function: {name, arguments}, id}: arguments are an object, or as they are where they are none. */
static json_t *call_json(const struct tool_call *c) {
    json_t *arguments = json_loads(c->arguments, JSON_ALLOW_NUL, NULL);
    if (!json_is_object(arguments)) {
        json_decref(arguments);
        arguments = text_json(c->arguments, strlen(c->arguments));
    }
    json_t *call = json_pack("{s:s, s:{s:o, s:o}}", "type", "function", "function", "name", text_json(c->name, strlen(c->name)),
                             "arguments", arguments);
    CHECK(call != NULL);
    if (c->id) json_object_set_new(call, "id", text_json(c->id, strlen(c->id)));
    return call;
}

/* The policy's message, and the record of the calls that are run. */
static void add_assistant(struct tool_agent *a, const struct tool_agent_turn *t) {
    json_t *message = json_pack("{s:s}", "role", "assistant");
    const bool plain = a->rules.interacts && t->plain; /* verl 0.7.1: the decoded turn, with its calls as text */
    const char *content = plain ? t->plain : a->turn.content.p ? a->turn.content.p : "";
    json_object_set_new(message, "content", text_json(content, plain ? t->n_plain : a->turn.content.n));
    json_t *calls = json_array();
    for (int64_t k = 0; k < a->n_run; k++) {
        const struct tool_call *c = &a->turn.calls[k];
        json_array_append_new(calls, call_json(c));
        json_array_append_new(a->record, json_pack("{s:I, s:o, s:o}", "segment", (json_int_t)(a->n_segments - 1), "name",
                                                   text_json(c->name, strlen(c->name)), "arguments",
                                                   text_json(c->arguments, strlen(c->arguments))));
    }
    if (a->n_run > 0) json_object_set(message, "tool_calls", calls);
    json_decref(calls);
    json_array_append_new(a->messages, message);
    a->n_old++;
}

int tool_agent_drawn(struct tool_agent *a, const struct tool_agent_turn *t, enum tool_agent_next *next) {
    const struct tool_agent_rules *r = &a->rules;
    CHECK(a->end == TOOL_AGENT_OPEN);
    add_segment(a, SEGMENT_POLICY, t->ids, t->n);
    a->n_turn = t->n;
    a->assistant++;
    *next = TOOL_AGENT_END;
    tool_turn_free(&a->turn);
    a->n_run = a->n_results = 0;
    if (a->ids.n >= r->response_length) return end_as(a, TOOL_AGENT_LENGTH), 0;
    if (r->max_assistant_turns > 0 && a->assistant >= r->max_assistant_turns) return end_as(a, TOOL_AGENT_ASSISTANT_TURNS), 0;
    if (r->max_user_turns > 0 && a->user >= r->max_user_turns) return end_as(a, TOOL_AGENT_USER_TURNS), 0;
    TRY(tool_parser_parse(r->parser, t->text, t->n_text, a->tools, &a->turn));
    a->n_malformed += a->turn.n_malformed;
    a->n_run = a->turn.n_calls < r->max_parallel_calls ? a->turn.n_calls : r->max_parallel_calls;
    a->n_dropped += a->turn.n_calls - a->n_run;
    add_assistant(a, t);
    a->n_asked += a->n_run > 0 || r->interacts;
    if (a->n_run > 0) *next = TOOL_AGENT_TOOLS;
    else if (r->interacts) *next = TOOL_AGENT_INTERACT;
    else end_as(a, TOOL_AGENT_STOP);
    a->interacting = *next == TOOL_AGENT_INTERACT;
    a->replied = a->stop = false;
    a->slowest = 0;
    return 0;
}

const struct tool_call *tool_agent_calls(const struct tool_agent *a, int64_t *n) {
    *n = a->n_run;
    return a->turn.calls;
}

/* ---- what answers it ---- */

static json_t *record_of(const struct tool_agent *a, int64_t k) {
    return json_array_get(a->record, json_array_size(a->record) - (size_t)(a->n_run - k));
}

/* The results' messages and rewards, in the order of the calls. */
static void add_results(struct tool_agent *a) {
    for (int64_t k = 0; k < a->n_run; k++) {
        json_t *call = record_of(a, k), *reward = json_object_get(call, "reward");
        json_t *message = json_pack("{s:s, s:O}", "role", "tool", "content", json_object_get(call, "result"));
        CHECK(message != NULL);
        if (a->turn.calls[k].id)
            json_object_set_new(message, "tool_call_id", text_json(a->turn.calls[k].id, strlen(a->turn.calls[k].id)));
        json_array_append_new(a->messages, message);
        if (reward) json_array_append(a->tool_rewards, reward);
    }
    a->tool_seconds += a->slowest;
}

enum tool_agent_next tool_agent_result(struct tool_agent *a, int64_t k, const struct tool_agent_result *r) {
    CHECK(a->end == TOOL_AGENT_OPEN && k >= 0 && k < a->n_run && a->n_results < a->n_run);
    json_t *call = record_of(a, k);
    CHECK(!json_object_get(call, "result"));
    json_object_set_new(call, "result", text_json(r->text, r->n_text));
    json_object_set_new(call, "status", json_string(r->status));
    json_object_set_new(call, "seconds", json_real(r->seconds));
    if (r->has_reward) json_object_set_new(call, "reward", json_real(r->reward));
    json_object_set_new(call, "truncated", json_boolean(r->truncated));
    if (r->seconds > a->slowest) a->slowest = r->seconds;
    if (++a->n_results < a->n_run) return TOOL_AGENT_TOOLS;
    add_results(a);
    return TOOL_AGENT_JOIN;
}

enum tool_agent_next tool_agent_replied(struct tool_agent *a, const struct tool_agent_reply *r) {
    CHECK(a->end == TOOL_AGENT_OPEN);
    json_array_append_new(a->messages, json_pack("{s:s, s:o}", "role", "user", "content", text_json(r->text, r->n_text)));
    if (r->has_score) json_array_append_new(a->turn_scores, json_real(r->score));
    a->user++;
    a->tool_seconds += r->seconds;
    a->replied = true;
    a->interacting = false;
    a->stop = r->stop;
    return TOOL_AGENT_JOIN;
}

const json_t *tool_agent_messages(const struct tool_agent *a, int64_t *n_old) {
    *n_old = a->n_old;
    return a->messages;
}

/* The bytes of a text without the special tokens at its end. */
static size_t without_end(const struct tokenizer *tok, const char *p, size_t n) {
    struct text_ids ids = {0};
    bool cut = tokenizer_encode(tok, p, n, false, &ids) == 0;
    for (int64_t k = ids.n; cut && k > 0; k--) {
        struct buf plain = {0}, whole = {0};
        cut = tokenizer_decode(tok, &ids.p[k - 1], 1, true, &plain) == 0 && plain.n == 0;
        cut = cut && tokenizer_decode(tok, &ids.p[k - 1], 1, false, &whole) == 0 && whole.n > 0 && whole.n <= n;
        cut = cut && memcmp(p + n - whole.n, whole.p, whole.n) == 0;
        if (cut) n -= whole.n;
        buf_free(&plain);
        buf_free(&whole);
    }
    text_ids_free(&ids);
    return n;
}

json_t *tool_agent_plain_messages(const struct tool_agent *a, const struct tokenizer *tok, int64_t from) {
    json_t *out = json_array();
    for (int64_t i = from; i < a->n_old; i++) {
        json_t *m = json_deep_copy(json_array_get(a->messages, (size_t)i)), *content = json_object_get(m, "content");
        const char *role = json_string_value(json_object_get(m, "role")), *text = json_string_value(content);
        if (i >= a->n_prompt && role && text && strcmp(role, "assistant") == 0)
            json_object_set_new(m, "content", text_json(text, without_end(tok, text, json_string_length(content))));
        json_array_append_new(out, m);
    }
    return out;
}

const json_t *tool_agent_tools(const struct tool_agent *a) { return a->tools; }

enum tool_agent_next tool_agent_join(struct tool_agent *a, int64_t n_removed, const int32_t *added, int64_t n_added) {
    CHECK(a->end == TOOL_AGENT_OPEN && n_removed >= 0 && n_removed <= a->n_turn);
    if (!a->replied &&
        a->ids.n - n_removed + n_added >= a->rules.response_length) /* verl drops the results, not an interaction's */
        return end_as(a, TOOL_AGENT_LENGTH);
    cut_end(a, n_removed);
    add_segment(a, SEGMENT_ENVIRONMENT, added, n_added);
    a->n_old = (int64_t)json_array_size(a->messages);
    a->n_turn = 0;
    if (!a->replied) a->user++;
    if (a->stop) return end_as(a, TOOL_AGENT_STOP);
    /* verl 0.7.1 draws one more turn here, which the cut at the end takes away */
    return a->ids.n >= a->rules.response_length ? end_as(a, TOOL_AGENT_LENGTH) : TOOL_AGENT_GENERATE;
}

void tool_agent_fail(struct tool_agent *a, enum tool_agent_end end, const char *why) {
    CHECK(a->end == TOOL_AGENT_OPEN && end >= TOOL_AGENT_REFUSED && end < TOOL_AGENT_OPEN);
    a->reason = xstrdup(why);
    end_as(a, end);
}

/* ---- what it was ---- */

const int32_t *tool_agent_ids(const struct tool_agent *a, int64_t *n) {
    *n = a->ids.n;
    return a->ids.p;
}

const int32_t *tool_agent_segments(const struct tool_agent *a, int64_t *n) {
    *n = a->n_segments;
    return a->segments;
}

enum tool_agent_end tool_agent_ended(const struct tool_agent *a) { return a->end; }
const char *tool_agent_reason(const struct tool_agent *a) { return a->reason; }
int64_t tool_agent_num_turns(const struct tool_agent *a) { return a->user + a->assistant + 1; }
int64_t tool_agent_num_calls(const struct tool_agent *a) { return (int64_t)json_array_size(a->record); }
double tool_agent_tool_seconds(const struct tool_agent *a) { return a->tool_seconds; }
const json_t *tool_agent_tool_rewards(const struct tool_agent *a) { return a->tool_rewards; }
const json_t *tool_agent_turn_scores(const struct tool_agent *a) { return a->turn_scores; }

bool tool_agent_asked(const struct tool_agent *a) { return a->n_asked > 0; }
json_t *tool_agent_extra_fields(const struct tool_agent *a) { return a->extra_fields; }

json_t *tool_agent_data(const struct tool_agent *a) {
    return json_pack("{s:O, s:I, s:I, s:O, s:O}", "messages", a->messages, "user_turns", (json_int_t)a->user, "assistant_turns",
                     (json_int_t)a->assistant, "tool_rewards", a->tool_rewards, "turn_scores", a->turn_scores);
}

json_t *tool_agent_episode(const struct tool_agent *a) {
    json_t *e =
        json_pack("{s:I, s:s, s:I, s:I, s:o}", "turns", (json_int_t)tool_agent_num_turns(a), "end", tool_agent_end_name(a->end),
                  "malformed", (json_int_t)a->n_malformed, "dropped", (json_int_t)a->n_dropped, "calls", json_deep_copy(a->record));
    if (a->reason) json_object_set_new(e, "reason", json_string(a->reason));
    return e;
}

/* ---- an episode that goes on later ---- */

enum tool_agent_next tool_agent_waits_for(const struct tool_agent *a) {
    if (a->end != TOOL_AGENT_OPEN) return TOOL_AGENT_END;
    if (a->n_results < a->n_run) return TOOL_AGENT_TOOLS;
    return a->interacting ? TOOL_AGENT_INTERACT : TOOL_AGENT_GENERATE;
}

bool tool_agent_answered(const struct tool_agent *a, int64_t k) { return json_object_get(record_of(a, k), "result") != NULL; }

/* Bytes that the model wrote, which may be no UTF-8. */
static json_t *bytes_json(const char *p) {
    if (!p) return json_null();
    char *text = base64_text(p, strlen(p));
    json_t *v = json_pack("[I, s]", (json_int_t)strlen(p), text);
    free(text);
    return v;
}

static char *bytes_of(const json_t *v) {
    const json_int_t n = json_integer_value(json_array_get(v, 0));
    const json_t *text = json_array_get(v, 1);
    if (!json_is_string(text) || n < 0 || n > (json_int_t)json_string_length(text)) return NULL;
    char *p = xcalloc((size_t)n + 1, 1);
    if (base64_read(p, (size_t)n, json_string_value(text), json_string_length(text))) return p;
    free(p);
    return NULL;
}

json_t *tool_agent_state(const struct tool_agent *a) {
    const int64_t n_turn = a->n_turn < a->ids.n ? a->n_turn : a->ids.n; /* at the end it may have been cut */
    json_t *calls = json_array();
    for (int64_t k = 0; k < a->n_run; k++)
        json_array_append_new(calls, json_pack("[o, o, o]", bytes_json(a->turn.calls[k].name),
                                               bytes_json(a->turn.calls[k].arguments), bytes_json(a->turn.calls[k].id)));
    json_t *o =
        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "n", (json_int_t)a->ids.n, "n_turn", (json_int_t)n_turn, "n_old",
                  (json_int_t)a->n_old, "assistant", (json_int_t)a->assistant, "user", (json_int_t)a->user, "malformed",
                  (json_int_t)a->n_malformed, "dropped", (json_int_t)a->n_dropped, "asked", (json_int_t)a->n_asked);
    CHECK(o != NULL);
    json_object_set_new(o, "n_prompt", json_integer((json_int_t)a->n_prompt));
    json_object_set_new(o, "end", json_integer(a->end));
    json_object_set_new(o, "interacting", json_boolean(a->interacting));
    json_object_set_new(o, "tool_seconds", json_real(a->tool_seconds));
    json_object_set_new(o, "slowest", json_real(a->slowest));
    json_object_set_new(o, "segments", json_i32_array(a->segments, 2 * a->n_segments));
    json_object_set_new(o, "calls", calls);
    json_object_set_new(o, "messages", json_deep_copy(a->messages));
    json_object_set_new(o, "record", json_deep_copy(a->record));
    json_object_set_new(o, "tool_rewards", json_deep_copy(a->tool_rewards));
    json_object_set_new(o, "turn_scores", json_deep_copy(a->turn_scores));
    json_object_set_new(o, "extra_fields", json_deep_copy(a->extra_fields));
    if (a->reason) json_object_set_new(o, "reason", json_string(a->reason));
    return o;
}

/* *out: a copy of member `key`, which is of that type. */
static int member(const json_t *o, const char *key, json_type type, json_t **out) {
    const json_t *v = json_object_get(o, key);
    if (!v || json_typeof(v) != type) FAIL(ERR_FORMAT, "an episode's '%s' is missing or damaged", key);
    json_decref(*out);
    *out = json_deep_copy(v);
    return 0;
}

static int restore_calls(struct tool_agent *a, const json_t *calls) {
    const json_t *v;
    size_t i;
    a->n_run = (int64_t)json_array_size(calls);
    if (a->n_run > (int64_t)json_array_size(a->record)) FAIL(ERR_FORMAT, "an episode has more open calls than calls");
    a->turn.calls = xcalloc((size_t)a->n_run + 1, sizeof *a->turn.calls);
    a->turn.n_calls = a->n_run;
    json_array_foreach(calls, i, v) {
        struct tool_call *c = &a->turn.calls[i];
        c->name = bytes_of(json_array_get(v, 0));
        c->arguments = bytes_of(json_array_get(v, 1));
        c->id = bytes_of(json_array_get(v, 2));
        if (!c->name || !c->arguments) FAIL(ERR_FORMAT, "an episode's call %zu is damaged", i);
    }
    for (int64_t k = 0; k < a->n_run; k++) a->n_results += tool_agent_answered(a, k);
    return 0;
}

/* The response, and who wrote what of it. */
static int restore_response(struct tool_agent *a, const json_t *segments, const int32_t *ids, int64_t n) {
    int64_t at = 0;
    for (size_t k = 0; k + 1 < json_array_size(segments); k += 2) {
        const json_int_t len = json_integer_value(json_array_get(segments, k)),
                         kind = json_integer_value(json_array_get(segments, k + 1));
        if (len < 0 || len > n - at || (kind != SEGMENT_POLICY && kind != SEGMENT_ENVIRONMENT))
            FAIL(ERR_FORMAT, "an episode's segments do not cover its %lld tokens", (long long)n);
        xgrow((void **)&a->segments, &a->cap_segments, 2 * (a->n_segments + 1), sizeof *a->segments);
        a->segments[2 * a->n_segments] = (int32_t)len;
        a->segments[2 * a->n_segments++ + 1] = (int32_t)kind;
        at += len;
    }
    if (at != n) FAIL(ERR_FORMAT, "an episode's segments do not cover its %lld tokens", (long long)n);
    text_ids_add(&a->ids, ids, n);
    return 0;
}

static int restore(struct tool_agent *a, const json_t *o, const int32_t *ids, int64_t n) {
    const char *where = "an episode", *reason = NULL;
    int64_t had, end;
    TRY(json_i64(o, "n", &had, where));
    TRY(json_i64(o, "n_turn", &a->n_turn, where));
    TRY(json_i64(o, "n_old", &a->n_old, where));
    TRY(json_i64(o, "n_prompt", &a->n_prompt, where));
    TRY(json_i64(o, "assistant", &a->assistant, where));
    TRY(json_i64(o, "user", &a->user, where));
    TRY(json_i64(o, "malformed", &a->n_malformed, where));
    TRY(json_i64(o, "dropped", &a->n_dropped, where));
    TRY(json_i64(o, "asked", &a->n_asked, where));
    TRY(json_i64(o, "end", &end, where));
    TRY(json_bool(o, "interacting", &a->interacting, where));
    TRY(json_f64(o, "tool_seconds", &a->tool_seconds, where));
    TRY(json_f64(o, "slowest", &a->slowest, where));
    TRY(json_str_opt(o, "reason", &reason, where));
    TRY(member(o, "messages", JSON_ARRAY, &a->messages));
    TRY(member(o, "record", JSON_ARRAY, &a->record));
    TRY(member(o, "tool_rewards", JSON_ARRAY, &a->tool_rewards));
    TRY(member(o, "turn_scores", JSON_ARRAY, &a->turn_scores));
    TRY(member(o, "extra_fields", JSON_OBJECT, &a->extra_fields));
    if (had < 0 || had > n || a->n_turn < 0 || a->n_turn > had || a->n_old < 0 ||
        a->n_old > (int64_t)json_array_size(a->messages) || end < 0 || end > TOOL_AGENT_OPEN)
        FAIL(ERR_FORMAT, "an episode has invalid values");
    a->end = (enum tool_agent_end)end;
    a->reason = reason ? xstrdup(reason) : NULL;
    TRY(restore_response(a, json_object_get(o, "segments"), ids, had));
    return restore_calls(a, json_object_get(o, "calls"));
}

int tool_agent_restore(struct tool_agent **out, const struct tool_agent_rules *rules, const json_t *state, const json_t *tools,
                       const int32_t *ids, int64_t n) {
    struct tool_agent *a;
    tool_agent_create(&a, rules, NULL, tools);
    const int rc = restore(a, state, ids, n);
    if (rc < 0) tool_agent_destroy(a);
    else *out = a;
    return rc;
}
