/* anthropic.c - Anthropic's messages: bodies read as a chat's, answers written as content blocks, whole and as streams.
 *
 * Blocks of an earlier turn become messages as chat templates know them: tool_result is a message of role tool, tool_use a call.
 * Invariant: of a request nothing is left out but thinking, which a template makes itself, and what changes no token. */
#include "serve/serve_int.h"

#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* ---- texts ---- */

static void add_text(struct buf *to, const json_t *text) {
    if (to->n > 0) buf_addc(to, '\n');
    buf_add(to, json_string_value(text), json_string_length(text));
}

/* A text or a list of text blocks. */
static int text_of(const json_t *content, const char *where, struct buf *out) {
    const json_t *block;
    size_t i;
    if (!content || json_is_null(content)) return 0;
    if (json_is_string(content)) {
        add_text(out, content);
        return 0;
    }
    if (!json_is_array(content)) FAIL(ERR_INVAL, "%s: a text or a list of blocks is wanted", where);
    json_array_foreach((json_t *)(uintptr_t)content, i, block) {
        const char *type = json_string_value(json_object_get(block, "type"));
        const json_t *text = json_object_get(block, "text");
        if (!type || strcmp(type, "text") != 0 || !json_is_string(text))
            FAIL(ERR_INVAL, "%s: blocks of type text are read, no %.40s", where, type ? type : "others");
        add_text(out, text);
    }
    return 0;
}

static json_t *take_text(struct buf *text) {
    json_t *v = serve__text(text->p, text->n);
    buf_free(text);
    return v;
}

/* Without a line that is another one in each request, which no prefix cache would survive. */
static void drop_billing(struct buf *text) {
    static const char name[] = "x-anthropic-billing-header:";
    char *at = text->n > 0 ? memmem(text->p, text->n, name, sizeof name - 1) : NULL;
    if (!at || (at != text->p && at[-1] != '\n')) return;
    const char *end = memchr(at, '\n', text->n - (size_t)(at - text->p));
    const size_t n = end ? (size_t)(end + 1 - at) : text->n - (size_t)(at - text->p);
    memmove(at, at + n, text->n - (size_t)(at - text->p) - n + 1);
    text->n -= n;
}

/* ---- messages ---- */

static int add_result(const json_t *block, json_t *list) {
    struct buf text = {0};
    const json_t *id = json_object_get(block, "tool_use_id");
    if (!json_is_string(id)) FAIL(ERR_INVAL, "tool_result: tool_use_id is missing");
    const int rc = text_of(json_object_get(block, "content"), "tool_result.content", &text);
    json_t *content = take_text(&text);
    if (rc == 0) json_array_append_new(list, json_pack("{s:s, s:o, s:O}", "role", "tool", "content", content, "tool_call_id", id));
    else json_decref(content);
    return rc;
}

static int add_use(const json_t *block, json_t *calls) {
    const json_t *id = json_object_get(block, "id"), *name = json_object_get(block, "name"), *in = json_object_get(block, "input");
    if (!json_is_string(id) || !json_is_string(name) || !json_is_object(in))
        FAIL(ERR_INVAL, "tool_use: {\"id\", \"name\", \"input\": {}} is wanted");
    json_array_append_new(
        calls, json_pack("{s:O, s:s, s:{s:O, s:O}}", "id", id, "type", "function", "function", "name", name, "arguments", in));
    return 0;
}

/* One block of a message: to its text, its calls, or a message of its own. */
static int add_block(const json_t *block, bool assistant, struct buf *text, json_t *calls, json_t *list) {
    const char *type = json_string_value(json_object_get(block, "type"));
    if (!type) FAIL(ERR_INVAL, "messages: a block has no type");
    if (strcmp(type, "text") == 0 && json_is_string(json_object_get(block, "text"))) {
        add_text(text, json_object_get(block, "text"));
        return 0;
    }
    if (!assistant && strcmp(type, "tool_result") == 0) return add_result(block, list);
    if (assistant && strcmp(type, "tool_use") == 0) return add_use(block, calls);
    if (assistant && strcmp(type, "thinking") == 0) return 0;
    FAIL(ERR_INVAL, "messages: a block of type %.40s is not supported", type);
}

/* A text of role system within the list, as Claude Code sends it, goes to the user. */
static int add_reminder(const json_t *content, json_t *list) {
    struct buf text = {0};
    buf_adds(&text, "<system-reminder>");
    const int rc = text_of(content, "messages", &text);
    buf_adds(&text, "\n</system-reminder>");
    json_t *v = take_text(&text);
    if (rc < 0) {
        json_decref(v);
        return rc;
    }
    json_t *last = json_array_get(list, json_array_size(list) - 1), *before = json_object_get(last, "content");
    const char *role = json_string_value(json_object_get(last, "role"));
    if (role && strcmp(role, "user") == 0) {
        add_text(&text, before);
        add_text(&text, v);
        json_object_set_new(last, "content", take_text(&text));
        json_decref(v);
    } else json_array_append_new(list, json_pack("{s:s, s:o}", "role", "user", "content", v));
    return 0;
}

static int add_message(const json_t *m, size_t i, json_t *list) {
    const char *role = json_string_value(json_object_get(m, "role"));
    const json_t *content = json_object_get(m, "content"), *block;
    const bool assistant = role && strcmp(role, "assistant") == 0;
    if (role && strcmp(role, "system") == 0) return add_reminder(content, list);
    if (!role || (!assistant && strcmp(role, "user") != 0)) FAIL(ERR_INVAL, "messages[%zu].role: user or assistant is wanted", i);
    if (!json_is_string(content) && !json_is_array(content))
        FAIL(ERR_INVAL, "messages[%zu].content: a text or a list of blocks is wanted", i);
    struct buf text = {0};
    json_t *calls = json_array();
    const size_t before = json_array_size(list);
    size_t k;
    int rc = 0;
    if (json_is_string(content)) add_text(&text, content);
    else json_array_foreach((json_t *)(uintptr_t)content, k, block) {
            rc = add_block(block, assistant, &text, calls, list);
            if (rc < 0) break;
        }
    if (rc == 0 && (assistant || text.n > 0 || json_array_size(list) == before)) {
        json_t *o = json_pack("{s:s, s:o}", "role", role, "content", take_text(&text));
        if (json_array_size(calls) > 0) json_object_set(o, "tool_calls", calls);
        json_array_append_new(list, o);
    }
    json_decref(calls);
    buf_free(&text);
    return rc;
}

static int read_messages(struct serve_call *c, const json_t *body) {
    const json_t *messages = json_object_get(body, "messages"), *system = json_object_get(body, "system"), *m;
    struct buf text = {0};
    size_t i;
    if (!json_is_array(messages) || json_array_size(messages) == 0) FAIL(ERR_INVAL, "messages: a list with a message is wanted");
    c->messages = json_array();
    const int rc = text_of(system, "system", &text);
    drop_billing(&text);
    json_t *v = take_text(&text);
    if (rc == 0 && json_string_length(v) > 0)
        json_array_append_new(c->messages, json_pack("{s:s, s:o}", "role", "system", "content", v));
    else json_decref(v);
    TRY(rc);
    json_array_foreach((json_t *)(uintptr_t)messages, i, m) TRY(add_message(m, i, c->messages));
    return 0;
}

static int read_tools(struct serve_call *c, const json_t *body) {
    const json_t *tools = json_object_get(body, "tools"), *choice = json_object_get(body, "tool_choice"), *tool;
    const char *how = json_string_value(json_object_get(choice, "type"));
    size_t i;
    if (choice && !json_is_null(choice) && (!how || (strcmp(how, "auto") != 0 && strcmp(how, "none") != 0)))
        FAIL(ERR_INVAL, "tool_choice: the types auto and none are supported; a call cannot be forced");
    if (!tools || json_is_null(tools) || (how && strcmp(how, "none") == 0)) return 0;
    if (!json_is_array(tools)) FAIL(ERR_INVAL, "tools: a list is wanted");
    json_t *list = json_array();
    json_array_foreach((json_t *)(uintptr_t)tools, i, tool) {
        const json_t *name = json_object_get(tool, "name"), *about = json_object_get(tool, "description");
        const json_t *schema = json_object_get(tool, "input_schema");
        json_t *f = json_object();
        if (name) json_object_set(f, "name", (json_t *)(uintptr_t)name);
        if (about) json_object_set(f, "description", (json_t *)(uintptr_t)about);
        if (schema) json_object_set(f, "parameters", (json_t *)(uintptr_t)schema);
        json_array_append_new(list, json_pack("{s:s, s:o}", "type", "function", "function", f));
    }
    const int rc = serve__check_tools(c, list);
    json_decref(list);
    return rc;
}

static int read_request(struct serve_call *c, const json_t *body) {
    static const struct serve_only only[] = {{"container", "[]"}, {"mcp_servers", "[[]]"}, {"output_format", "[]"}};
    static const struct serve_keys keys = {
        .read = "model messages system max_tokens tools tool_choice stop_sequences temperature top_p top_k stream",
        .ignored = "metadata thinking service_tier cache_control context_management output_config speed inference_geo betas",
        .only = only,
        .n_only = sizeof only / sizeof *only};
    double max_tokens = 0;
    TRY(serve__check_keys(body, &keys));
    TRY(serve__model(c, body));
    TRY(serve__sampling(c, body));
    TRY(serve__stop(c, body, "stop_sequences"));
    TRY(serve__number(body, "max_tokens", 1, INT32_MAX, true, &max_tokens));
    TRY(read_messages(c, body));
    TRY(read_tools(c, body));
    const json_t *last = json_array_get(c->messages, json_array_size(c->messages) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    TRY(serve__render(c, NULL, role && strcmp(role, "assistant") == 0 && !json_object_get(last, "tool_calls")));
    return serve__length(c, (int64_t)max_tokens, 0, true);
}

static int read_message(struct serve_call *c, const json_t *body) {
    const json_t *n = json_object_get(body, "max_tokens");
    if (json_is_object(body) && (!n || json_is_null(n))) FAIL(ERR_INVAL, "max_tokens: it is required");
    return read_request(c, body);
}

/* ---- answers ---- */

static const char *stop_reason(const struct serve_choice *h) {
    if (h->turn.n_calls > 0 && h->finish == ENGINE_STOP) return "tool_use";
    return h->finish == ENGINE_LENGTH ? "max_tokens" : h->stop_hit ? "stop_sequence" : "end_turn";
}

static json_t *stop_sequence(const struct serve_choice *h) { return h->stop_hit ? json_string(h->stop_hit) : json_null(); }

static json_t *use_json(const struct serve_call *c, const struct tool_call *call, bool with_input) {
    char id[40];
    json_t *in = with_input ? json_loads(call->arguments, JSON_DECODE_ANY, NULL) : NULL;
    if (!json_is_object(in)) {
        json_decref(in);
        in = json_object();
        if (with_input) json_object_set_new(in, "arguments", serve__text(call->arguments, strlen(call->arguments)));
    }
    if (!call->id) serve__new_id(c->serve, "toolu_", id);
    return json_pack("{s:s, s:o, s:o, s:o}", "type", "tool_use", "id",
                     call->id ? serve__text(call->id, strlen(call->id)) : json_string(id), "name",
                     serve__text(call->name, strlen(call->name)), "input", in);
}

static json_t *usage_of(const struct serve_call *c) {
    const json_int_t cached = serve__cached_tokens(c);
    return json_pack("{s:I, s:I, s:i, s:I}", "input_tokens", (json_int_t)serve__prompt_tokens(c) - cached,
                     "cache_read_input_tokens", cached, "cache_creation_input_tokens", 0, "output_tokens",
                     (json_int_t)serve__answer_tokens(c));
}

static json_t *message_json(const struct serve_call *c, json_t *content, json_t *reason, json_t *sequence) {
    return json_pack("{s:s, s:s, s:s, s:s, s:o, s:o, s:o, s:o}", "id", c->id, "type", "message", "role", "assistant", "model",
                     c->model, "content", content, "stop_reason", reason, "stop_sequence", sequence, "usage", usage_of(c));
}

static void message_whole(const struct serve_call *c, struct buf *out) {
    const struct serve_choice *h = &c->choices[0];
    json_t *content = json_array();
    if (h->content.n > 0 || h->turn.n_calls == 0)
        json_array_append_new(content, json_pack("{s:s, s:o}", "type", "text", "text", serve__text(h->content.p, h->content.n)));
    for (int64_t k = 0; k < h->turn.n_calls; k++) json_array_append_new(content, use_json(c, &h->turn.calls[k], true));
    serve__json(out, message_json(c, content, json_string(stop_reason(h)), stop_sequence(h)));
}

static void event(struct buf *out, const char *name, json_t *more) {
    json_t *o = json_pack("{s:s}", "type", name);
    json_object_update(o, more);
    json_decref(more);
    serve__event(out, name, o);
}

static void message_begin(struct serve_call *c, struct buf *out) {
    event(out, "message_start", json_pack("{s:o}", "message", message_json(c, json_array(), json_null(), json_null())));
    event(out, "ping", json_object());
}

static void block_start(const struct serve_call *c, json_t *block, struct buf *out) {
    event(out, "content_block_start", json_pack("{s:i, s:o}", "index", c->n_blocks, "content_block", block));
}
static void block_stop(struct serve_call *c, struct buf *out) {
    event(out, "content_block_stop", json_pack("{s:i}", "index", c->n_blocks++));
    c->in_text = false;
}
static void block_delta(const struct serve_call *c, json_t *delta, struct buf *out) {
    event(out, "content_block_delta", json_pack("{s:i, s:o}", "index", c->n_blocks, "delta", delta));
}

static void message_delta(struct serve_call *c, struct serve_choice *h, const char *text, size_t n, struct buf *out) {
    h->n_reported = h->ids.n;
    if (n == 0) return;
    if (!c->in_text) block_start(c, json_pack("{s:s, s:s}", "type", "text", "text", ""), out);
    c->in_text = true;
    block_delta(c, json_pack("{s:s, s:o}", "type", "text_delta", "text", serve__text(text, n)), out);
}

static void message_end(struct serve_call *c, struct serve_choice *h, struct buf *out) {
    if (c->in_text) block_stop(c, out);
    for (int64_t k = 0; k < h->turn.n_calls; k++) {
        json_t *whole = use_json(c, &h->turn.calls[k], true), *in = json_incref(json_object_get(whole, "input"));
        struct buf text = {0};
        json_object_set_new(whole, "input", json_object());
        CHECK(json_dump_line(&text, in) == 0);
        block_start(c, whole, out);
        block_delta(c, json_pack("{s:s, s:o}", "type", "input_json_delta", "partial_json", serve__text(text.p, text.n)), out);
        block_stop(c, out);
        json_decref(in);
        buf_free(&text);
    }
    event(out, "message_delta",
          json_pack("{s:{s:s, s:o}, s:o}", "delta", "stop_reason", stop_reason(h), "stop_sequence", stop_sequence(h), "usage",
                    usage_of(c)));
}

static void message_finish(struct serve_call *c, struct buf *out) {
    (void)c;
    event(out, "message_stop", json_object());
}

/* ---- errors ---- */

static json_t *error_json(int status, const char *message) {
    static const struct {
        int status;
        const char *type;
    } types[] = {{400, "invalid_request_error"}, {401, "authentication_error"},  {403, "permission_error"},
                 {404, "not_found_error"},       {405, "invalid_request_error"}, {413, "request_too_large"},
                 {429, "rate_limit_error"},      {503, "overloaded_error"}};
    const char *type = "api_error";
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].status == status) type = types[i].type;
    return json_pack("{s:s, s:{s:s, s:o}}", "type", "error", "error", "type", type, "message",
                     serve__text(message, strlen(message)));
}
static void write_error(struct buf *out, int status, const char *message) { serve__json(out, error_json(status, message)); }
static void write_stream_error(struct buf *out, const char *message) { serve__event(out, "error", error_json(500, message)); }
static void write_wait(struct buf *out) { event(out, "ping", json_object()); }

const struct serve_dialect serve_messages = {"messages",  read_message,   message_whole, message_begin,      message_delta,
                                             message_end, message_finish, write_error,   write_stream_error, write_wait};

/* The same without max_tokens and an answer. */
int serve__count_read(struct serve_call *c, const json_t *body) { return read_request(c, body); }
