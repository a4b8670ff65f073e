/* token_tree_message.c - when two messages are the same: their canonical text, and keys of conversations.
 *
 * Clients write what they were given in their own way: with null or "" or no content, texts as parts, arguments as an object or
 * in other spelling, new ids of calls, reasoning left out.
 * Invariant: messages have one key exactly if they say the same to a model. */
#include "agent/token_tree_int.h"
#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

static void add_field(struct buf *out, char tag, const char *p, size_t n) {
    buf_addf(out, "%c%zu:", tag, n);
    buf_add(out, p, n);
}

/* A value's text, in which an object's keys are sorted. */
static void add_value(struct buf *out, char tag, const json_t *v) {
    char *text = json_dumps(v, JSON_SORT_KEYS | JSON_COMPACT | JSON_ENCODE_ANY);
    add_field(out, tag, text ? text : "", text ? strlen(text) : 0);
    free(text);
}

static const json_t *text_of_part(const json_t *part) {
    static const char *const types[] = {"text", "input_text", "output_text"};
    const char *type = json_string_value(json_object_get(part, "type"));
    const json_t *text = json_object_get(part, "text");
    for (int i = 0; type && i < 3; i++)
        if (strcmp(type, types[i]) == 0 && json_is_string(text)) return text;
    return NULL;
}

static void add_content(struct buf *out, const json_t *content) {
    struct buf text = {0};
    size_t i;
    const json_t *part;
    if (json_is_string(content)) buf_add(&text, json_string_value(content), json_string_length(content));
    json_array_foreach((json_t *)(uintptr_t)content, i, part) {
        const json_t *of = text_of_part(part);
        if (of) buf_add(&text, json_string_value(of), json_string_length(of));
        else add_value(out, 'p', part);
    }
    if (content && !json_is_string(content) && !json_is_array(content) && !json_is_null(content)) add_value(out, 'o', content);
    add_field(out, 'c', text.p ? text.p : "", text.n);
    buf_free(&text);
}

static void add_call(struct buf *out, const json_t *call) {
    const json_t *function = json_object_get(call, "function"), *name = json_object_get(function, "name");
    const json_t *arguments = json_object_get(function, "arguments");
    add_field(out, 'f', json_is_string(name) ? json_string_value(name) : "", json_string_length(name));
    json_t *parsed = json_is_string(arguments) ? json_loadb(json_string_value(arguments), json_string_length(arguments),
                                                            JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL)
                                               : NULL;
    if (parsed || arguments) add_value(out, 'a', parsed ? parsed : arguments);
    json_decref(parsed);
}

static void add_message(struct buf *out, const json_t *m, bool reasoning) {
    static const char *const fields[] = {"reasoning_content", "reasoning", "thinking"};
    const char *role = continuous_tokens__role(m);
    const json_t *calls = json_object_get(m, "tool_calls"), *name = json_object_get(m, "name"), *call;
    size_t i;
    add_field(out, 'r', role, strlen(role));
    add_content(out, json_object_get(m, "content"));
    json_array_foreach((json_t *)(uintptr_t)calls, i, call) add_call(out, call);
    if (json_is_string(name) && json_string_length(name)) add_field(out, 'n', json_string_value(name), json_string_length(name));
    for (i = 0; reasoning && i < 3; i++) {
        const json_t *text = json_object_get(m, fields[i]);
        if (!json_is_string(text) || json_string_length(text) == 0) continue;
        add_field(out, 't', json_string_value(text), json_string_length(text));
        break;
    }
}

static void next_key(const char *before, const json_t *message, bool reasoning, char out[TOKEN_TREE_KEY]) {
    struct buf text = {0};
    buf_adds(&text, before);
    add_message(&text, message, reasoning);
    hash_hex(text.p, text.n, out);
    buf_free(&text);
}

char (*token_tree__keys(const json_t *messages, const json_t *tools))[TOKEN_TREE_KEY] {
    const size_t n = json_array_size(messages);
    char(*keys)[TOKEN_TREE_KEY] = xcalloc(n + 1, TOKEN_TREE_KEY);
    struct buf text = {0};
    if (continuous_tokens__truth(tools)) add_value(&text, 's', tools);
    hash_hex(text.p ? text.p : "", text.n, keys[0]);
    buf_free(&text);
    for (size_t i = 0; i < n; i++) next_key(keys[i], json_array_get(messages, i), true, keys[i + 1]);
    return keys;
}

void token_tree__turn_keys(const char *before, const json_t *message, char out[2][TOKEN_TREE_KEY]) {
    next_key(before, message, true, out[0]);
    next_key(before, message, false, out[1]);
}
