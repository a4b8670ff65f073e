/* continuous_tokens_message.c - what continuous tokens read of messages, and the synthetic ones they render around them.
 *
 * Invariant: messages are only read. */
#include "agent/continuous_tokens/continuous_tokens_int.h"
#include "base/err.h"
#include "base/encoding/number.h"

#include <string.h>

bool continuous_tokens__truth(const json_t *v) {
    if (!v) return false;
    switch (json_typeof(v)) {
    case JSON_OBJECT: return json_object_size(v) > 0;
    case JSON_ARRAY: return json_array_size(v) > 0;
    case JSON_STRING: return json_string_length(v) > 0;
    case JSON_INTEGER: return json_integer_value(v) != 0;
    case JSON_REAL: return json_real_value(v) != 0;
    case JSON_TRUE: return true;
    default: return false;
    }
}

int continuous_tokens__str(const json_t *v, struct buf *out) {
    char number[NUMBER_TEXT];
    switch (json_typeof(v)) {
    case JSON_STRING: return buf_add(out, json_string_value(v), json_string_length(v));
    case JSON_INTEGER: return buf_addf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
    case JSON_REAL: number_text(json_real_value(v), number); return buf_adds(out, number);
    case JSON_TRUE: return buf_adds(out, "True");
    case JSON_FALSE: return buf_adds(out, "False");
    case JSON_NULL: return buf_adds(out, "None");
    default: FAIL(ERR_INPUT, "continuous tokens: a list or object stands where a message needs a text");
    }
}

int continuous_tokens__content(const json_t *v, struct buf *out) {
    if (!v || json_is_null(v)) return 0;
    if (!json_is_array(v)) return continuous_tokens__str(v, out);
    size_t i;
    const json_t *part;
    json_array_foreach((json_t *)(uintptr_t)v, i, part) {
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *text = json_object_get(part, "text");
        if (!type || strcmp(type, "text") != 0 || !text) continue;
        if (!json_is_string(text)) FAIL(ERR_INPUT, "continuous tokens: a text part whose \"text\" is no text");
        TRY(buf_add(out, json_string_value(text), json_string_length(text)));
    }
    return 0;
}

void continuous_tokens__quote(const char *p, size_t n, struct buf *out) {
    static const char named[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    buf_addc(out, '"');
    for (size_t i = 0; i < n; i++) {
        const unsigned char ch = (unsigned char)p[i];
        const char *name = ch ? strchr(named, ch) : NULL;
        if (name) buf_addf(out, "\\%c", letters[name - named]);
        else if (ch < 0x20) buf_addf(out, "\\u%04x", ch);
        else buf_addc(out, p[i]);
    }
    buf_addc(out, '"');
}

const char *continuous_tokens__role(const json_t *message) {
    const char *role = json_string_value(json_object_get(message, "role"));
    return role ? role : "";
}

/* ---- synthetic messages ---- */

static json_t *calls_of(const struct continuous_tokens *c, const json_t *tool_messages) {
    json_t *calls = json_array();
    for (size_t i = 0; i < json_array_size(tool_messages); i++) {
        const json_t *m = json_array_get(tool_messages, i), *id = json_object_get(m, "tool_call_id");
        const json_t *name = json_object_get(m, "name");
        struct buf text = {0};
        if (!continuous_tokens__truth(name) || continuous_tokens__str(name, &text) < 0) {
            buf_reset(&text);
            buf_adds(&text, "continuous_token_tool");
        }
        json_t *call_id = id && !json_is_null(id) ? json_deep_copy(id) : json_sprintf("continuous_token_call_%zu", i);
        json_t *arguments = c->family == CONTINUOUS_DEEPSEEK ? json_string("{}") : json_object();
        json_t *call = json_pack("{s:o, s:s, s:{s:s%, s:o}}", "id", call_id, "type", "function", "function", "name", text.p, text.n,
                                 "arguments", arguments);
        CHECK(call);
        json_array_append_new(calls, call);
        buf_free(&text);
    }
    return calls;
}

json_t *continuous_tokens__synthetic(const struct continuous_tokens *c, const json_t *tool_messages) {
    json_t *all = json_pack("[{s:s, s:s}, {s:s, s:s}]", "role", "system", "content", "continuous token synthetic system", "role",
                            "user", "content", "continuous token synthetic user");
    if (tool_messages)
        json_array_append_new(all, json_pack("{s:s, s:s, s:s, s:o}", "role", "assistant", "content", "", "reasoning_content",
                                             "reasoning", "tool_calls", calls_of(c, tool_messages)));
    CHECK(all);
    return all;
}

/* ---- names of tools ---- */

/* The calls of the last assistant message before messages[n]; NULL: none, or no list. */
static const json_t *latest_calls(const json_t *messages, size_t n) {
    while (n-- > 0) {
        const json_t *m = json_array_get(messages, n);
        if (strcmp(continuous_tokens__role(m), "assistant") == 0) {
            const json_t *calls = json_object_get(m, "tool_calls");
            return json_is_array(calls) ? calls : NULL;
        }
    }
    return NULL;
}

static const json_t *call_name(const json_t *call) {
    const json_t *name = json_object_get(json_object_get(call, "function"), "name");
    return json_is_null(name) ? NULL : name;
}

/* The first call of that id with a name. */
static int name_by_id(const json_t *calls, const json_t *id, const json_t **name) {
    struct buf want = {0}, have = {0};
    int rc = continuous_tokens__str(id, &want);
    *name = NULL;
    for (size_t i = 0; rc == 0 && !*name && i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(calls, i), *call_id = json_object_get(call, "id");
        if (!call_id || json_is_null(call_id) || !call_name(call)) continue;
        buf_reset(&have);
        rc = continuous_tokens__str(call_id, &have);
        if (rc == 0 && have.n == want.n && memcmp(have.p ? have.p : "", want.p ? want.p : "", have.n) == 0) *name = call_name(call);
    }
    buf_free(&want);
    buf_free(&have);
    return rc;
}

int continuous_tokens__tool_name(const json_t *group, size_t i, const json_t *messages, size_t n_before, struct buf *out) {
    const json_t *m = json_array_get(group, i), *own = json_object_get(m, "name"), *id = json_object_get(m, "tool_call_id");
    if (continuous_tokens__truth(own)) return continuous_tokens__str(own, out);
    const json_t *calls = latest_calls(messages, n_before), *name = NULL;
    if (id && !json_is_null(id)) TRY(name_by_id(calls, id, &name));
    if (name) return continuous_tokens__str(name, out);
    if (json_array_size(group) != json_array_size(calls))
        FAIL(ERR_INPUT,
             "continuous tokens: the name of a tool is not known: %zu tool messages without names follow an assistant message "
             "with %zu tool calls; give them \"name\" or \"tool_call_id\"",
             json_array_size(group), json_array_size(calls));
    name = call_name(json_array_get(calls, i));
    if (!name) FAIL(ERR_INPUT, "continuous tokens: the name of a tool is not known: tool call %zu has none", i);
    return continuous_tokens__str(name, out);
}
