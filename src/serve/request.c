/* request.c - what bodies of all dialects have in common: keys, numbers, sampling, stop strings, tools; a conversation to ids.
 *
 * Invariant: a key is read, or named in a refusal, or is one that changes no token. */
#include "serve/serve_int.h"

#include "base/err.h"
#include "base/json.h"
#include "text/text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ---- values ---- */

/* Whether v is one of the JSON values in `only`, an array's text; numbers by value. */
static bool is_one_of(const json_t *v, const char *only) {
    json_t *list = json_loads(only, 0, NULL), *one;
    bool found = false;
    size_t i;
    CHECK(list != NULL);
    json_array_foreach(list, i, one) {
        found |= json_equal(v, one) != 0;
        found |= json_is_number(v) && json_is_number(one) && !(json_number_value(v) < json_number_value(one)) &&
                 !(json_number_value(v) > json_number_value(one));
    }
    json_decref(list);
    return found;
}

/* Whether `name` stands between blanks of the list; NULL: it has none. */
static bool has_name(const char *list, const char *name) {
    const size_t n = strlen(name);
    if (!list || strchr(name, ' ')) return false;
    for (const char *p = list; n > 0 && (p = strstr(p, name)); p += n)
        if ((p == list || p[-1] == ' ') && (p[n] == ' ' || p[n] == '\0')) return true;
    return false;
}

int serve__check_keys(const json_t *body, const struct serve_keys *k) {
    const char *key;
    json_t *value;
    if (!json_is_object(body)) FAIL(ERR_INVAL, "the body is not a JSON object");
    json_object_foreach((json_t *)(uintptr_t)body, key, value) {
        size_t i = 0;
        if (json_is_null(value) || has_name(k->read, key) || has_name(k->ignored, key)) continue;
        while (i < k->n_only && strcmp(key, k->only[i].name) != 0) i++;
        if (i == k->n_only) FAIL(ERR_INVAL, "%.80s: no such parameter", key);
        if (!is_one_of(value, k->only[i].values)) FAIL(ERR_INVAL, "%s: this value is not supported; leave it out", key);
    }
    return 0;
}

int serve__number(const json_t *body, const char *key, double lo, double hi, bool whole, double *out) {
    const json_t *v = json_object_get(body, key);
    if (!v || json_is_null(v)) return 0;
    const double x = json_number_value(v);
    if (!(whole ? json_is_integer(v) : json_is_number(v)) || !(x >= lo && x <= hi))
        FAIL(ERR_INVAL, "%s: a %snumber from %g to %g is wanted", key, whole ? "whole " : "", lo, hi);
    *out = x;
    return 0;
}

int serve__bool(const json_t *body, const char *key, bool *out) {
    const json_t *v = json_object_get(body, key);
    if (!v || json_is_null(v)) return 0;
    if (!json_is_boolean(v)) FAIL(ERR_INVAL, "%s: true or false is wanted", key);
    *out = json_is_true(v);
    return 0;
}

int serve__model(struct serve_call *c, const json_t *body) {
    const json_t *v = json_object_get(body, "model");
    if (v && !json_is_null(v) && !json_is_string(v)) FAIL(ERR_INVAL, "model: a text is wanted");
    c->model = xstrdup(v && json_is_string(v) ? json_string_value(v) : c->serve->a.model);
    return 0;
}

/* ---- sampling ---- */

static int read_seed(struct serve_call *c, const json_t *body, bool given) {
    const json_t *seed = json_object_get(body, "seed");
    if (seed && !json_is_null(seed)) {
        if (!json_is_integer(seed)) FAIL(ERR_INVAL, "seed: a whole number is wanted");
        c->r.seed = (uint64_t)json_integer_value(seed);
    } else if (!given && getrandom(&c->r.seed, sizeof c->r.seed, 0) != sizeof c->r.seed)
        FAIL(ERR_INTERNAL, "no random numbers for a seed: %s", strerror(errno));
    return 0;
}

int serve__sampling(struct serve_call *c, const json_t *body) {
    const struct serve_sessions *sessions = c->serve->a.sessions;
    const bool given = c->session && sessions->defaults;
    c->r = (struct engine_request){.temperature = 1, .top_p = 1, .top_k = -1, .repetition_penalty = 1};
    if (given) TRY(sessions->defaults(sessions->ctx, c->session, &c->r));
    double temperature = c->r.temperature, top_p = c->r.top_p, top_k = c->r.top_k, min_p = c->r.min_p,
           penalty = c->r.repetition_penalty, n = 1;
    TRY(serve__number(body, "temperature", 0, 1e6, false, &temperature));
    TRY(serve__number(body, "top_p", 1e-6, 1, false, &top_p));
    TRY(serve__number(body, "top_k", -1, 1 << 24, true, &top_k));
    TRY(serve__number(body, "min_p", 0, 1, false, &min_p));
    TRY(serve__number(body, "repetition_penalty", 1e-3, 1e3, false, &penalty));
    TRY(serve__number(body, "n", 1, SERVE_MAX_N, true, &n));
    TRY(serve__bool(body, "stream", &c->stream));
    TRY(serve__bool(body, "ignore_eos", &c->r.ignore_eos));
    TRY(serve__bool(body, "return_token_ids", &c->token_ids));
    TRY(read_seed(c, body, given));
    c->r.temperature = temperature < 1e-6 ? 0 : (float)temperature;
    c->r.top_p = (float)top_p;
    c->r.min_p = (float)min_p;
    c->r.top_k = (int32_t)top_k;
    c->r.repetition_penalty = (float)penalty;
    c->r.n = (int64_t)n;
    return 0;
}

int serve__stop(struct serve_call *c, const json_t *body, const char *key) {
    const json_t *stop = json_object_get(body, key);
    if (!stop || json_is_null(stop)) return 0;
    const bool one = json_is_string(stop);
    const size_t n = one ? 1 : json_array_size(stop);
    if ((!one && !json_is_array(stop)) || n > SERVE_MAX_STOP)
        FAIL(ERR_INVAL, "%s: a text or a list of up to %d is wanted", key, SERVE_MAX_STOP);
    for (size_t i = 0; i < n; i++) {
        const json_t *s = one ? stop : json_array_get(stop, i);
        const char *text = json_string_value(s);
        if (!text || !*text || strlen(text) != json_string_length(s) || strlen(text) > 1024)
            FAIL(ERR_INVAL, "%s: each is a text of 1 to 1024 bytes", key);
        c->stop[c->r.n_stop++] = xstrdup(text);
    }
    c->r.stop = (const char *const *)c->stop;
    return 0;
}

int serve__stop_ids(struct serve_call *c, const json_t *body) {
    const json_t *list = json_object_get(body, "stop_token_ids"), *id;
    size_t i;
    if (!list || json_is_null(list)) return 0;
    if (!json_is_array(list) || json_array_size(list) > SERVE_MAX_STOP)
        FAIL(ERR_INVAL, "stop_token_ids: a list of up to %d ids is wanted", SERVE_MAX_STOP);
    json_array_foreach((json_t *)(uintptr_t)list, i, id) {
        const json_int_t x = json_is_integer(id) ? json_integer_value(id) : -1;
        if (x < 0 || x >= tokenizer_vocab_size(c->serve->a.tok)) FAIL(ERR_INVAL, "stop_token_ids: entry %zu is not a token id", i);
        c->stop_ids[c->r.n_stop_ids++] = (int32_t)x;
    }
    c->n_stop_asked = c->r.n_stop_ids;
    return 0;
}

int serve__length(struct serve_call *c, int64_t asked, int64_t otherwise, bool cut) {
    const int64_t most = c->serve->a.max_len;
    int64_t longest = 0;
    for (int64_t i = 0; i < c->n_prompts; i++) {
        if (c->prompts[i].n == 0) FAIL(ERR_INVAL, "the prompt has no tokens");
        longest = c->prompts[i].n > longest ? c->prompts[i].n : longest;
    }
    const int64_t left = most - longest;
    cut |= c->session != NULL; /* how long an answer may be is the session's */
    if (left < 1 || (asked > left && !cut))
        FAIL(ERR_INVAL,
             "this model's maximum context length is %lld tokens, and %lld of the prompt and %lld of the answer are asked for",
             (long long)most, (long long)longest, (long long)(asked > 0 ? asked : 1));
    c->r.max_tokens = asked > 0 ? asked : otherwise;
    if (c->r.max_tokens == 0 || c->r.max_tokens > left) c->r.max_tokens = left;
    return 0;
}

/* ---- tools ---- */

static int check_tool(const json_t *tool, size_t i) {
    const json_t *f = json_object_get(tool, "function"), *type = json_object_get(tool, "type");
    const char *name = json_string_value(json_object_get(f, "name"));
    const json_t *parameters = json_object_get(f, "parameters"), *about = json_object_get(f, "description");
    if (!json_is_string(type) || strcmp(json_string_value(type), "function") != 0 || !name || !*name || strlen(name) > 128)
        FAIL(ERR_INVAL, "tools[%zu]: {\"type\": \"function\", \"function\": {\"name\", ...}} is wanted", i);
    if ((parameters && !json_is_null(parameters) && !json_is_object(parameters)) ||
        (about && !json_is_null(about) && !json_is_string(about)))
        FAIL(ERR_INVAL, "tools[%zu]: parameters is a JSON schema, description a text", i);
    return 0;
}

int serve__check_tools(struct serve_call *c, const json_t *tools) {
    const json_t *tool;
    size_t i;
    if (!tools || json_is_null(tools)) return 0;
    if (!json_is_array(tools)) FAIL(ERR_INVAL, "tools: a list is wanted");
    json_array_foreach((json_t *)(uintptr_t)tools, i, tool) TRY(check_tool(tool, i));
    if (json_array_size(tools) == 0) return 0;
    if (!c->serve->parser)
        FAIL(ERR_INVAL,
             "tools: the model's chat template shows no known format of calls; start the server with --tool-parser, one of %s",
             tool_parser_names());
    c->tools = json_incref((json_t *)(uintptr_t)tools);
    c->parses = true;
    return 0;
}

/* ---- a conversation to ids ---- */

/* Variables that would take the place of what the server fills in. */
static int add_variables(json_t *request, const json_t *more) {
    static const char *const ours[] = {
        "messages", "tools", "chat_template", "documents", "add_generation_prompt", "continue_final_message"};
    const char *key;
    json_t *value;
    if (!more || json_is_null(more)) return 0;
    if (!json_is_object(more)) FAIL(ERR_INVAL, "chat_template_kwargs: an object is wanted");
    json_object_foreach((json_t *)(uintptr_t)more, key, value) {
        for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
            if (strcmp(key, ours[i]) == 0) FAIL(ERR_INVAL, "chat_template_kwargs: %s is not for it", key);
        json_object_set(request, key, value);
    }
    return 0;
}

int serve__chat_request(const struct serve_call *c, const json_t *more, bool begins, bool goes_on, json_t **out) {
    if (!c->serve->chat) FAIL(ERR_INVAL, "the model has no chat template: completions alone are served");
    json_t *request =
        json_pack("{s:O, s:b, s:b}", "messages", c->messages, "add_generation_prompt", begins, "continue_final_message", goes_on);
    if (c->tools) json_object_set(request, "tools", c->tools);
    const int rc = add_variables(request, more);
    if (rc < 0) json_decref(request);
    else *out = request;
    return rc;
}

int serve__render(struct serve_call *c, const json_t *more, bool goes_on) {
    const struct serve_sessions *sessions = c->serve->a.sessions;
    c->prompts = xcalloc(1, sizeof *c->prompts);
    c->n_prompts = 1;
    if (c->session && sessions->prompt) {
        if (json_object_size(more) > 0) FAIL(ERR_INVAL, "chat_template_kwargs: a session has those of its run");
        if (goes_on) FAIL(ERR_INVAL, "messages: a session does not continue an assistant's message; the last one is another's");
        TRY(sessions->prompt(sessions->ctx, c->session, c->messages, c->tools, c->prompts, &c->turn));
        if (c->prompts->n > 0) return 0;
    }
    json_t *request;
    TRY(serve__chat_request(c, more, !goes_on, goes_on, &request));
    const int rc = chat_template_encode(c->serve->chat, request, NULL, c->prompts);
    json_decref(request);
    return rc == ERR_FORMAT ? err_wrap(ERR_INVAL, "the chat template") : rc;
}
