/* openai.c - OpenAI's chat completions and completions: bodies read, answers written, whole and as streams.
 *
 * Invariant: a stream's pieces, put together, are the whole answer; arguments of calls are the model's, as JSON text. */
#include "serve/serve_int.h"

#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* ---- messages ---- */

/* A text, null, or a list of texts, which lines join. */
static int content_of(const json_t *content, size_t i, json_t **out) {
    struct buf text = {0};
    const json_t *part;
    size_t k;
    if (!content || json_is_null(content) || json_is_string(content)) {
        *out = json_is_string(content) ? json_incref((json_t *)(uintptr_t)content) : json_string("");
        return 0;
    }
    if (!json_is_array(content)) FAIL(ERR_INVAL, "messages[%zu].content: a text or a list of parts is wanted", i);
    json_array_foreach((json_t *)(uintptr_t)content, k, part) {
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *t = json_object_get(part, type && strcmp(type, "refusal") == 0 ? "refusal" : "text");
        if (!type || (strcmp(type, "text") != 0 && strcmp(type, "refusal") != 0) || !json_is_string(t)) {
            buf_free(&text);
            FAIL(ERR_INVAL, "messages[%zu].content[%zu]: parts of type text are read, no %.40s", i, k, type ? type : "others");
        }
        if (k > 0) buf_addc(&text, '\n');
        buf_add(&text, json_string_value(t), json_string_length(t));
    }
    *out = serve__text(text.p, text.n);
    buf_free(&text);
    return 0;
}

/* A call of an earlier turn, with its arguments as an object where they are one: what templates want. */
static int call_of(const json_t *call, size_t i, json_t **out) {
    const json_t *f = json_object_get(call, "function"), *args = json_object_get(f, "arguments"), *id = json_object_get(call, "id");
    const char *name = json_string_value(json_object_get(f, "name"));
    json_t *value = NULL;
    if (!name || !(json_is_string(args) || json_is_object(args)))
        FAIL(ERR_INVAL, "messages[%zu].tool_calls: {\"id\", \"type\", \"function\": {\"name\", \"arguments\"}} is wanted", i);
    if (json_is_string(args)) value = json_loadb(json_string_value(args), json_string_length(args), JSON_DECODE_ANY, NULL);
    if (!json_is_object(value)) {
        json_decref(value);
        value = json_incref((json_t *)(uintptr_t)args);
    }
    *out = json_pack("{s:s, s:{s:s, s:o}}", "type", "function", "function", "name", name, "arguments", value);
    if (json_is_string(id)) json_object_set(*out, "id", (json_t *)(uintptr_t)id);
    return 0;
}

static int calls_of(const json_t *calls, size_t i, json_t *message) {
    const json_t *call;
    size_t k;
    if (!calls || json_is_null(calls)) return 0;
    if (!json_is_array(calls)) FAIL(ERR_INVAL, "messages[%zu].tool_calls: a list is wanted", i);
    json_t *list = json_array();
    json_object_set_new(message, "tool_calls", list);
    json_array_foreach((json_t *)(uintptr_t)calls, k, call) {
        json_t *one;
        TRY(call_of(call, i, &one));
        json_array_append_new(list, one);
    }
    return 0;
}

static int message_of(const json_t *m, size_t i, json_t *list) {
    static const char *const roles[] = {"system", "user", "assistant", "tool", "developer"};
    static const char *const texts[] = {"name", "tool_call_id", "reasoning_content", "reasoning"};
    const char *role = json_string_value(json_object_get(m, "role"));
    json_t *content, *out;
    size_t k = 0;
    while (role && k < sizeof roles / sizeof *roles && strcmp(role, roles[k]) != 0) k++;
    if (!role || k == sizeof roles / sizeof *roles)
        FAIL(ERR_INVAL, "messages[%zu].role: system, developer, user, assistant or tool is wanted", i);
    TRY(content_of(json_object_get(m, "content"), i, &content));
    out = json_pack("{s:s, s:o}", "role", strcmp(role, "developer") == 0 ? "system" : role, "content", content);
    json_array_append_new(list, out);
    for (k = 0; k < sizeof texts / sizeof *texts; k++) {
        json_t *v = json_object_get(m, texts[k]);
        if (json_is_string(v)) json_object_set(out, texts[k], v);
    }
    if (strcmp(role, "assistant") == 0) TRY(calls_of(json_object_get(m, "tool_calls"), i, out));
    return 0;
}

int serve__messages(struct serve_call *c, const json_t *body) {
    const json_t *messages = json_object_get(body, "messages"), *m;
    size_t i;
    if (!json_is_array(messages) || json_array_size(messages) == 0) FAIL(ERR_INVAL, "messages: a list with a message is wanted");
    c->messages = json_array();
    json_array_foreach((json_t *)(uintptr_t)messages, i, m) TRY(message_of(m, i, c->messages));
    return 0;
}

/* ---- reading a chat ---- */

#define SAMPLING_KEYS                                                                                                       \
    "model temperature top_p top_k min_p repetition_penalty n stream ignore_eos return_token_ids seed stop stream_options " \
    "max_tokens logprobs stop_token_ids "
#define IGNORED_KEYS "user metadata service_tier request_id priority cache_salt spaces_between_special_tokens "
#define ONLY_KEYS                                                                                                             \
    {"skip_special_tokens", "[true]"}, {"frequency_penalty", "[0]"}, {"presence_penalty", "[0]"}, {"logit_bias", "[{}]"},     \
        {"use_beam_search", "[false]"}, {"best_of", "[1]"}, {"min_tokens", "[0]"}, {"include_stop_str_in_output", "[false]"}, \
        {"response_format", "[{\"type\": \"text\"}]"}, {"echo", "[false]"}, {                                                 \
        "length_penalty", "[1]"                                                                                               \
    }

static int read_options(struct serve_call *c, const json_t *body) {
    static const struct serve_keys keys = {.read = "include_usage continuous_usage_stats", .ignored = "include_obfuscation"};
    const json_t *options = json_object_get(body, "stream_options");
    if (!options || json_is_null(options)) return 0;
    if (!json_is_object(options)) FAIL(ERR_INVAL, "stream_options: an object is wanted");
    if (!c->stream) FAIL(ERR_INVAL, "stream_options: with stream=true alone");
    TRY(serve__check_keys(options, &keys));
    TRY(serve__bool(options, "include_usage", &c->usage));
    TRY(serve__bool(options, "continuous_usage_stats", &c->usage_each));
    c->usage_each &= c->usage;
    return 0;
}

static int read_tools(struct serve_call *c, const json_t *body) {
    const json_t *choice = json_object_get(body, "tool_choice");
    const char *text = json_string_value(choice);
    if (choice && !json_is_null(choice) && (!text || (strcmp(text, "auto") != 0 && strcmp(text, "none") != 0)))
        FAIL(ERR_INVAL, "tool_choice: auto and none are supported; a call cannot be forced");
    if (text && strcmp(text, "none") == 0) return 0;
    return serve__check_tools(c, json_object_get(body, "tools"));
}

/* To the ids of a new answer, or with continue_final_message of one that has begun. */
static int read_render(struct serve_call *c, const json_t *body) {
    bool goes_on = false, begins = true;
    TRY(serve__bool(body, "continue_final_message", &goes_on));
    begins = !goes_on;
    TRY(serve__bool(body, "add_generation_prompt", &begins));
    if (begins == goes_on) FAIL(ERR_INVAL, "add_generation_prompt and continue_final_message: one of them is true");
    return serve__render(c, json_object_get(body, "chat_template_kwargs"), goes_on);
}

static int read_chat(struct serve_call *c, const json_t *body) {
    static const struct serve_only only[] = {
        ONLY_KEYS, {"modalities", "[[\"text\"]]"}, {"functions", "[[]]"}, {"function_call", "[\"none\", \"auto\"]"}};
    static const struct serve_keys keys = {
        .read = SAMPLING_KEYS
        "messages tools tool_choice max_completion_tokens top_logprobs chat_template_kwargs add_generation_prompt "
        "continue_final_message",
        .ignored = IGNORED_KEYS "parallel_tool_calls store reasoning_effort verbosity prompt_cache_key safety_identifier",
        .only = only,
        .n_only = sizeof only / sizeof *only};
    double max_tokens = 0, n_top = 0;
    TRY(serve__check_keys(body, &keys));
    TRY(serve__model(c, body));
    TRY(serve__sampling(c, body));
    TRY(serve__stop(c, body, "stop"));
    TRY(serve__stop_ids(c, body));
    TRY(read_options(c, body));
    TRY(serve__bool(body, "logprobs", &c->logprobs));
    TRY(serve__number(body, "top_logprobs", 0, ENGINE_MAX_TOP, true, &n_top));
    if (n_top > 0 && !c->logprobs) FAIL(ERR_INVAL, "top_logprobs: with logprobs=true alone");
    TRY(serve__number(body, "max_tokens", 1, INT32_MAX, true, &max_tokens));
    TRY(serve__number(body, "max_completion_tokens", 1, INT32_MAX, true, &max_tokens));
    TRY(serve__messages(c, body));
    TRY(read_tools(c, body));
    TRY(read_render(c, body));
    c->r.n_top = (int64_t)n_top;
    return serve__length(c, (int64_t)max_tokens, 0, false);
}

/* ---- reading a completion ---- */

static int add_prompt(struct serve_call *c, const json_t *v) {
    struct text_ids *ids = &c->prompts[c->n_prompts++];
    const json_t *id;
    size_t i;
    if (c->session && json_string_length(v) > (size_t)c->serve->a.max_len * 32 + (1 << 16)) /* no text that cannot fit */
        FAIL(ERR_INVAL, "this model's maximum context length is %lld tokens, and the prompt has %zu bytes",
             (long long)c->serve->a.max_len, json_string_length(v));
    if (json_is_string(v)) return tokenizer_encode(c->serve->a.tok, json_string_value(v), json_string_length(v), true, ids);
    if (!json_is_array(v)) FAIL(ERR_INVAL, "prompt: a text, a list of ids, or a list of those is wanted");
    json_array_foreach((json_t *)(uintptr_t)v, i, id) {
        const json_int_t x = json_is_integer(id) ? json_integer_value(id) : -1;
        const int32_t id32 = (int32_t)x;
        if (x < 0 || x > INT32_MAX) FAIL(ERR_INVAL, "prompt: entry %zu is not a token id", i);
        text_ids_add(ids, &id32, 1);
    }
    return 0;
}

static int read_prompts(struct serve_call *c, const json_t *body) {
    const json_t *prompt = json_object_get(body, "prompt"), *one;
    const bool many = json_is_array(prompt) && !json_is_integer(json_array_get(prompt, 0));
    const size_t n = many ? json_array_size(prompt) : 1;
    size_t i;
    if (!prompt || n == 0 || n > SERVE_MAX_N) FAIL(ERR_INVAL, "prompt: 1 to %d prompts are wanted", SERVE_MAX_N);
    c->prompts = xcalloc(n, sizeof *c->prompts);
    if (!many) return add_prompt(c, prompt);
    json_array_foreach((json_t *)(uintptr_t)prompt, i, one) TRY(add_prompt(c, one));
    return 0;
}

static int read_completion(struct serve_call *c, const json_t *body) {
    static const struct serve_only only[] = {ONLY_KEYS, {"suffix", "[\"\"]"}};
    static const struct serve_keys keys = {
        .read = SAMPLING_KEYS "prompt", .ignored = IGNORED_KEYS, .only = only, .n_only = sizeof only / sizeof *only};
    const json_t *logprobs = json_object_get(body, "logprobs");
    const struct serve_sessions *sessions = c->serve->a.sessions;
    double max_tokens = 16, n_top = 0;
    TRY(serve__check_keys(body, &keys));
    TRY(serve__model(c, body));
    TRY(serve__sampling(c, body));
    TRY(serve__stop(c, body, "stop"));
    TRY(serve__stop_ids(c, body));
    TRY(read_options(c, body));
    TRY(serve__number(body, "logprobs", 0, ENGINE_MAX_TOP, true, &n_top));
    TRY(serve__number(body, "max_tokens", 1, INT32_MAX, true, &max_tokens));
    c->logprobs = logprobs && !json_is_null(logprobs);
    c->r.n_top = (int64_t)n_top;
    TRY(read_prompts(c, body));
    if (c->session && sessions->prompt_ids) {
        if (c->n_prompts != 1) FAIL(ERR_INVAL, "prompt: a session takes one at a time");
        if (c->prompts[0].n == 0) FAIL(ERR_INVAL, "the prompt has no tokens");
        TRY(sessions->prompt_ids(sessions->ctx, c->session, &c->prompts[0], &c->turn));
    }
    if (c->n_prompts * c->r.n > SERVE_MAX_N) FAIL(ERR_INVAL, "n: at most %d answers in all", SERVE_MAX_N);
    return serve__length(c, (int64_t)max_tokens, 0, false);
}

/* ---- log-probs ---- */

/* The token's text; null bytes for a part of a character. */
static json_t *token_text(const struct serve *s, int32_t id, json_t **bytes) {
    struct buf text = {0};
    CHECK(tokenizer_decode(s->a.tok, &id, 1, false, &text) == 0);
    json_t *v = serve__text(text.p, text.n);
    if (bytes) {
        *bytes = text.n && strstr(text.p, "\xef\xbf\xbd") ? json_null() : json_array();
        for (size_t i = 0; json_is_array(*bytes) && i < text.n; i++)
            json_array_append_new(*bytes, json_integer((unsigned char)text.p[i]));
    }
    buf_free(&text);
    return v;
}

static json_t *one_token(const struct serve *s, int32_t id, float logp) {
    json_t *bytes, *text = token_text(s, id, &bytes);
    return json_pack("{s:o, s:f, s:o}", "token", text, "logprob", serve__logp(logp), "bytes", bytes);
}

/* Of tokens [lo, hi), in a chat's form. */
static json_t *chat_logprobs(const struct serve_call *c, const struct serve_choice *h, int64_t lo, int64_t hi) {
    json_t *list = json_array();
    const int64_t n = c->r.n_top;
    for (int64_t t = lo; t < hi; t++) {
        json_t *one = one_token(c->serve, h->ids.p[t], h->logp[t]), *top = json_array();
        for (int64_t k = 0; k < n; k++)
            json_array_append_new(top, one_token(c->serve, h->top_id[t * n + k], h->top_logp[t * n + k]));
        json_object_set_new(one, "top_logprobs", top);
        json_array_append_new(list, one);
    }
    return json_pack("{s:o, s:n}", "content", list, "refusal");
}

static int64_t characters(const json_t *text) {
    const char *p = json_string_value(text);
    int64_t n = 0;
    for (size_t i = 0; i < json_string_length(text); i++) n += ((unsigned char)p[i] & 0xC0) != 0x80;
    return n;
}

/* A token as a key; not every reader of JSON takes a NUL there: it is U+2400. */
static const char *key_of(const json_t *text) {
    return strlen(json_string_value(text)) == json_string_length(text) ? json_string_value(text) : "\xe2\x90\x80";
}

/* Of tokens [lo, hi), in a completion's form; *at: characters of the tokens before. */
static json_t *completion_logprobs(const struct serve_call *c, const struct serve_choice *h, int64_t lo, int64_t hi, int64_t *at) {
    json_t *tokens = json_array(), *logps = json_array(), *tops = json_array(), *offsets = json_array();
    const int64_t n = c->r.n_top;
    for (int64_t t = lo; t < hi; t++) {
        json_t *text = token_text(c->serve, h->ids.p[t], NULL), *top = json_object();
        json_array_append_new(offsets, json_integer(*at));
        *at += characters(text);
        for (int64_t k = 0; k < n; k++) {
            json_t *name = token_text(c->serve, h->top_id[t * n + k], NULL);
            json_object_set_new(top, key_of(name), json_real(serve__logp(h->top_logp[t * n + k])));
            json_decref(name);
        }
        json_object_set_new(top, key_of(text), json_real(serve__logp(h->logp[t])));
        json_array_append_new(tops, top);
        json_array_append_new(tokens, text);
        json_array_append_new(logps, json_real(serve__logp(h->logp[t])));
    }
    return json_pack("{s:o, s:o, s:o, s:o}", "tokens", tokens, "token_logprobs", logps, "top_logprobs", tops, "text_offset",
                     offsets);
}

/* ---- whole answers ---- */

static json_t *usage_of(const struct serve_call *c) {
    const json_int_t prompt = serve__prompt_tokens(c), n = serve__answer_tokens(c);
    return json_pack("{s:I, s:I, s:I, s:{s:I}}", "prompt_tokens", prompt, "completion_tokens", n, "total_tokens", prompt + n,
                     "prompt_tokens_details", "cached_tokens", (json_int_t)serve__cached_tokens(c));
}

static const char *finish_of(const struct serve_choice *h) {
    if (h->turn.n_calls > 0 && h->finish == ENGINE_STOP) return "tool_calls";
    return h->finish == ENGINE_LENGTH ? "length" : "stop";
}

/* index < 0: without it, as a whole answer has them. */
static json_t *call_json(const struct serve_call *c, const struct tool_call *call, int64_t index) {
    char id[40];
    if (!call->id) serve__new_id(c->serve, "call_", id);
    json_t *o = index < 0 ? json_object() : json_pack("{s:I}", "index", (json_int_t)index);
    json_object_set_new(o, "id", call->id ? serve__text(call->id, strlen(call->id)) : json_string(id));
    json_object_set_new(o, "type", json_string("function"));
    json_object_set_new(o, "function",
                        json_pack("{s:o, s:o}", "name", serve__text(call->name, strlen(call->name)), "arguments",
                                  serve__text(call->arguments, strlen(call->arguments))));
    return o;
}

static json_t *head(const struct serve_call *c, const char *object) {
    return json_pack("{s:s, s:s, s:I, s:s}", "id", c->id, "object", object, "created", (json_int_t)c->created, "model", c->model);
}

static void add_prompt_ids(const struct serve_call *c, const struct text_ids *ids, json_t *o) {
    if (c->token_ids) json_object_set_new(o, "prompt_token_ids", json_i32_array(ids->p, ids->n));
}

static void chat_whole(const struct serve_call *c, struct buf *out) {
    json_t *o = head(c, "chat.completion"), *choices = json_array();
    for (int64_t i = 0; i < c->n_choices; i++) {
        const struct serve_choice *h = &c->choices[i];
        json_t *calls = h->turn.n_calls > 0 ? json_array() : NULL;
        for (int64_t k = 0; k < h->turn.n_calls; k++) json_array_append_new(calls, call_json(c, &h->turn.calls[k], -1));
        json_t *message = json_pack("{s:s, s:o, s:n, s:o*}", "role", "assistant", "content",
                                    calls && h->content.n == 0 ? json_null() : serve__text(h->content.p, h->content.n), "refusal",
                                    "tool_calls", calls);
        json_t *one = json_pack("{s:I, s:o, s:o, s:s, s:o}", "index", (json_int_t)i, "message", message, "logprobs",
                                c->logprobs ? chat_logprobs(c, h, 0, h->ids.n) : json_null(), "finish_reason", finish_of(h),
                                "stop_reason", h->stop_hit ? json_string(h->stop_hit) : json_null());
        if (c->token_ids) json_object_set_new(one, "token_ids", json_i32_array(h->ids.p, h->ids.n));
        json_array_append_new(choices, one);
    }
    json_object_set_new(o, "choices", choices);
    json_object_set_new(o, "usage", usage_of(c));
    add_prompt_ids(c, &c->prompts[0], o);
    serve__json(out, o);
}

static void completion_whole(const struct serve_call *c, struct buf *out) {
    json_t *o = head(c, "text_completion"), *choices = json_array();
    for (int64_t i = 0; i < c->n_choices; i++) {
        const struct serve_choice *h = &c->choices[i];
        int64_t at = 0;
        json_t *one =
            json_pack("{s:I, s:o, s:o, s:s, s:o}", "index", (json_int_t)i, "text", serve__text(h->content.p, h->content.n),
                      "logprobs", c->logprobs ? completion_logprobs(c, h, 0, h->ids.n, &at) : json_null(), "finish_reason",
                      finish_of(h), "stop_reason", h->stop_hit ? json_string(h->stop_hit) : json_null());
        if (c->token_ids) json_object_set_new(one, "token_ids", json_i32_array(h->ids.p, h->ids.n));
        add_prompt_ids(c, &c->prompts[i / c->r.n], one);
        json_array_append_new(choices, one);
    }
    json_object_set_new(o, "choices", choices);
    json_object_set_new(o, "usage", usage_of(c));
    serve__json(out, o);
}

/* ---- streams ---- */

/* choice: taken over; NULL: the piece with the usage. */
static void chunk(const struct serve_call *c, const char *object, json_t *choice, struct buf *out) {
    json_t *o = head(c, object), *choices = json_array();
    if (choice) json_array_append_new(choices, choice);
    json_object_set_new(o, "choices", choices);
    if (c->usage) json_object_set_new(o, "usage", choice && !c->usage_each ? json_null() : usage_of(c));
    serve__event(out, NULL, o);
}

static void chat_chunk(const struct serve_call *c, const struct serve_choice *h, json_t *delta, const char *finish,
                       struct buf *out) {
    json_t *one = json_pack("{s:I, s:o, s:n, s:o}", "index", (json_int_t)h->index, "delta", delta, "logprobs", "finish_reason",
                            finish ? json_string(finish) : json_null());
    chunk(c, "chat.completion.chunk", one, out);
}

static void chat_begin(struct serve_call *c, struct buf *out) {
    for (int64_t i = 0; i < c->n_choices; i++)
        chat_chunk(c, &c->choices[i], json_pack("{s:s, s:s}", "role", "assistant", "content", ""), NULL, out);
}

/* The tokens that this piece tells of. */
static void add_token_ids(const struct serve_call *c, const struct serve_choice *h, json_t *one) {
    if (c->token_ids) json_object_set_new(one, "token_ids", json_i32_array(h->ids.p + h->n_reported, h->ids.n - h->n_reported));
}

static void chat_delta(struct serve_call *c, struct serve_choice *h, const char *text, size_t n, struct buf *out) {
    json_t *one = json_pack("{s:I, s:{s:o}, s:o, s:n}", "index", (json_int_t)h->index, "delta", "content", serve__text(text, n),
                            "logprobs", c->logprobs ? chat_logprobs(c, h, h->n_reported, h->ids.n) : json_null(), "finish_reason");
    add_token_ids(c, h, one);
    h->n_reported = h->ids.n;
    chunk(c, "chat.completion.chunk", one, out);
}

static void chat_end(struct serve_call *c, struct serve_choice *h, struct buf *out) {
    for (int64_t k = 0; k < h->turn.n_calls; k++)
        chat_chunk(c, h, json_pack("{s:[o]}", "tool_calls", call_json(c, &h->turn.calls[k], k)), NULL, out);
    chat_chunk(c, h, json_object(), finish_of(h), out);
}

static void stream_finish(struct serve_call *c, const char *object, struct buf *out) {
    if (c->usage) chunk(c, object, NULL, out);
    buf_adds(out, "data: [DONE]\n\n");
}
static void chat_finish(struct serve_call *c, struct buf *out) { stream_finish(c, "chat.completion.chunk", out); }
static void completion_finish(struct serve_call *c, struct buf *out) { stream_finish(c, "text_completion", out); }

static void completion_begin(struct serve_call *c, struct buf *out) { (void)c, (void)out; }

static void completion_delta(struct serve_call *c, struct serve_choice *h, const char *text, size_t n, struct buf *out) {
    json_t *logprobs = c->logprobs ? completion_logprobs(c, h, h->n_reported, h->ids.n, &h->n_chars) : json_null();
    json_t *one = json_pack("{s:I, s:o, s:o, s:n}", "index", (json_int_t)h->index, "text", serve__text(text, n), "logprobs",
                            logprobs, "finish_reason");
    add_token_ids(c, h, one);
    h->n_reported = h->ids.n;
    chunk(c, "text_completion", one, out);
}

static void completion_end(struct serve_call *c, struct serve_choice *h, struct buf *out) {
    json_t *one = json_pack("{s:I, s:s, s:n, s:s, s:o}", "index", (json_int_t)h->index, "text", "", "logprobs", "finish_reason",
                            finish_of(h), "stop_reason", h->stop_hit ? json_string(h->stop_hit) : json_null());
    chunk(c, "text_completion", one, out);
}

/* ---- errors ---- */

static json_t *error_json(int status, const char *message) {
    const char *type = status == 401   ? "authentication_error"
                       : status == 404 ? "not_found_error"
                       : status == 429 ? "rate_limit_error"
                       : status < 500  ? "invalid_request_error"
                                       : "server_error";
    return json_pack("{s:{s:o, s:s, s:n, s:i}}", "error", "message", serve__text(message, strlen(message)), "type", type, "param",
                     "code", status);
}

static void write_error(struct buf *out, int status, const char *message) { serve__json(out, error_json(status, message)); }
static void write_stream_error(struct buf *out, const char *message) {
    serve__event(out, NULL, error_json(500, message));
    buf_adds(out, "data: [DONE]\n\n");
}
static void write_wait(struct buf *out) { buf_adds(out, ": the answer is being made\n\n"); }

const struct serve_dialect serve_chat = {"chat",   read_chat,   chat_whole,  chat_begin,         chat_delta,
                                         chat_end, chat_finish, write_error, write_stream_error, write_wait};
const struct serve_dialect serve_completions = {"completions",      read_completion, completion_whole,  completion_begin,
                                                completion_delta,   completion_end,  completion_finish, write_error,
                                                write_stream_error, write_wait};
