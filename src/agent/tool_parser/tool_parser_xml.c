/* tool_parser_xml.c - the formats that write a call as elements with a name: qwen3_coder, glm, seed, minimax, deepseek_v4.
 *
 * What verl reads with regular expressions that try again is read here by cursors that only move on.
 * Invariant: after a place without a closing text no later place is searched for it. */
#include "agent/tool_parser/tool_parser_int.h"

#include <math.h>

/* ---- values ---- */

/* json.loads(s), else the text. */
static struct tool_parser__value *json_or_text(struct tool_parser__run *r, struct tool_parser__span s) {
    struct tool_parser__value *v = tool_parser__json(&r->memory, s);
    return v ? v : tool_parser__string(&r->memory, s.p, s.n);
}

static void set(struct tool_parser__run *r, struct tool_parser__value *dict, struct tool_parser__span key,
                struct tool_parser__value *v) {
    tool_parser__dict_set(&r->memory, dict, tool_parser__string(&r->memory, key.p, key.n), v);
}

/* A call is added, or counted as malformed; its values are freed. */
static bool finish(struct tool_parser__run *r, struct tool_parser__span name, const struct tool_parser__value *arguments) {
    const bool ok = tool_parser__add(r, name, arguments) != NULL;
    if (!ok) r->out->n_malformed++;
    tool_parser__memory_free(&r->memory);
    return ok;
}

/* ---- elements with a header ---- */

/* Where headers end, kept while the place stands before it. */
struct header {
    struct tool_parser__span open, stop; /* open, one or more characters that are none of stop, then end */
    struct tool_parser__span end, close;
};
struct element {
    struct tool_parser__span name, body;
    size_t at, end; /* at TOOL_NONE: there is no more */
};

/* The next open NAME end BODY close, from `from` on: NAME is not empty and has no character of stop. */
static bool next_element(struct tool_parser__span s, size_t from, const struct header *h, struct element *e) {
    size_t stop = from; /* the first character of stop from here on */
    e->at = TOOL_NONE;
    for (;; from = e->at + 1) {
        e->at = tool_parser__find(s, from, h->open);
        if (e->at == TOOL_NONE) return false;
        const size_t lo = e->at + h->open.n;
        if (stop < lo) stop = lo;
        while (stop < s.n && !memchr(h->stop.p, s.p[stop], h->stop.n)) stop++;
        if (stop == lo || !tool_parser__at(s, stop, h->end)) continue;
        const size_t body = stop + h->end.n, hi = tool_parser__find(s, body, h->close);
        if (hi == TOOL_NONE) return false;
        e->name = tool_parser__sub(s, lo, stop);
        e->body = tool_parser__sub(s, body, hi);
        e->end = hi + h->close.n;
        return true;
    }
}

/* The arguments that the elements of body are. */
static struct tool_parser__value *stripped_arguments(struct tool_parser__run *r, struct tool_parser__span body,
                                                     const struct header *h) {
    struct tool_parser__value *dict = tool_parser__value(&r->memory, TOOL_DICT);
    struct element e = {.end = 0};
    while (next_element(body, e.end, h, &e)) set(r, dict, tool_parser__strip(e.name), json_or_text(r, tool_parser__strip(e.body)));
    return dict;
}

/* The content is what is before the first opening text; without an opening or a closing one all of it, and there is no call. */
static bool begin(struct tool_parser__run *r, struct tool_parser__span open, struct tool_parser__span close) {
    const size_t at = tool_parser__find(r->text, 0, open);
    if (at != TOOL_NONE && tool_parser__find(r->text, 0, close) != TOOL_NONE) return true;
    tool_parser__content(r, r->text);
    r->out->n_malformed += at != TOOL_NONE;
    return false;
}

static struct tool_parser__span before(struct tool_parser__span s, struct tool_parser__span open) {
    return tool_parser__sub(s, 0, tool_parser__find(s, 0, open));
}

/* ---- seed ---- */

void tool_parser__seed(struct tool_parser__run *r) {
    static const struct header function = {TOOL_INIT("<function="), TOOL_INIT(">\n"), TOOL_INIT(">"), TOOL_INIT("</function>")},
                               parameter = {TOOL_INIT("<parameter="), TOOL_INIT(">\n"), TOOL_INIT(">"), TOOL_INIT("</parameter>")};
    const struct tool_parser__span open = TOOL_SPAN("<seed:tool_call>"), close = TOOL_SPAN("</seed:tool_call>");
    struct tool_parser__block b = {.end = 0};
    struct element e;
    if (!begin(r, open, close)) return;
    while (tool_parser__block(r->text, b.end, open, close, &b)) {
        if (next_element(tool_parser__sub(r->text, b.lo, b.hi), 0, &function, &e))
            finish(r, tool_parser__strip(e.name), stripped_arguments(r, e.body, &parameter));
        else r->out->n_malformed++;
    }
    r->out->n_malformed += b.at != TOOL_NONE;
    tool_parser__content(r, before(r->text, open));
}

/* ---- minimax ---- */

void tool_parser__minimax(struct tool_parser__run *r) {
    static const struct header invoke = {TOOL_INIT("<invoke name=\""), TOOL_INIT("\""), TOOL_INIT("\">"), TOOL_INIT("</invoke>")},
                               parameter = {TOOL_INIT("<parameter name=\""), TOOL_INIT("\""), TOOL_INIT("\">"),
                                            TOOL_INIT("</parameter>")};
    const struct tool_parser__span open = TOOL_SPAN("<minimax:tool_call>"), close = TOOL_SPAN("</minimax:tool_call>");
    struct tool_parser__block b = {.end = 0};
    if (!begin(r, open, close)) return;
    while (tool_parser__block(r->text, b.end, open, close, &b)) {
        const struct tool_parser__span block = tool_parser__sub(r->text, b.lo, b.hi);
        const int64_t first = r->out->n_calls;
        struct element e = {.end = 0};
        bool ok = true;
        while (ok && next_element(block, e.end, &invoke, &e))
            ok = finish(r, tool_parser__strip(e.name), stripped_arguments(r, e.body, &parameter));
        if (!ok) tool_parser__drop(r, first); /* verl loses the block */
        r->out->n_malformed += ok && r->out->n_calls == first;
    }
    r->out->n_malformed += b.at != TOOL_NONE;
    tool_parser__content(r, before(r->text, open));
}

/* ---- glm ---- */

/* The next <arg_key>KEY</arg_key> blanks <arg_value>VALUE</arg_value>: a key goes on until a value follows it. */
static bool next_pair(struct tool_parser__span s, size_t from, struct element *e) {
    const struct tool_parser__span key = TOOL_SPAN("<arg_key>"), key_end = TOOL_SPAN("</arg_key>"),
                                   value = TOOL_SPAN("<arg_value>"), value_end = TOOL_SPAN("</arg_value>");
    e->at = tool_parser__find(s, from, key);
    if (e->at == TOOL_NONE) return false;
    size_t hi = e->at + key.n;
    for (;; hi++) {
        hi = tool_parser__find(s, hi, key_end);
        if (hi == TOOL_NONE) return false;
        const size_t body = tool_parser__skip_space(s, hi + key_end.n);
        if (!tool_parser__at(s, body, value)) continue;
        const size_t end = tool_parser__find(s, body + value.n, value_end);
        if (end == TOOL_NONE) return false;
        e->name = tool_parser__sub(s, e->at + key.n, hi);
        e->body = tool_parser__sub(s, body + value.n, end);
        e->end = end + value_end.n;
        return true;
    }
}

static bool glm_call(struct tool_parser__run *r, struct tool_parser__span s) {
    const size_t first = tool_parser__find(s, 0, TOOL_SPAN("<arg_key>"));
    struct tool_parser__value *dict = tool_parser__value(&r->memory, TOOL_DICT);
    struct element e = {.end = first == TOOL_NONE ? s.n : first};
    const struct tool_parser__span name = tool_parser__strip(tool_parser__sub(s, 0, e.end));
    while (next_pair(s, e.end, &e)) set(r, dict, tool_parser__strip(e.name), json_or_text(r, tool_parser__strip(e.body)));
    return finish(r, name, dict);
}

/* Without <think>...</think>, or the rest of one, at the start. */
static struct tool_parser__span without_think(struct tool_parser__span s) {
    const struct tool_parser__span think = TOOL_SPAN("<think>"), end = TOOL_SPAN("</think>");
    size_t at = tool_parser__skip_space(s, 0);
    if (tool_parser__at(s, at, think)) {
        const size_t hi = tool_parser__find(s, at + think.n, end);
        if (hi != TOOL_NONE) s = tool_parser__sub(s, hi + end.n, s.n);
    }
    at = tool_parser__skip_space(s, 0);
    return tool_parser__at(s, at, end) ? tool_parser__sub(s, at + end.n, s.n) : s;
}

void tool_parser__glm(struct tool_parser__run *r) {
    const struct tool_parser__span open = TOOL_SPAN("<tool_call>"), close = TOOL_SPAN("</tool_call>");
    struct tool_parser__block b = {.end = 0};
    if (!begin(r, open, close)) return;
    while (tool_parser__block(r->text, b.end, open, close, &b)) glm_call(r, tool_parser__sub(r->text, b.lo, b.hi));
    r->out->n_malformed += b.at != TOOL_NONE;
    tool_parser__content(r, without_think(before(r->text, open)));
}

/* ---- deepseek_v4 ---- */

#define DSML       \
    "\xef\xbd\x9c" \
    "DSML"         \
    "\xef\xbd\x9c"

/* The next parameter; *string: its text is the value. */
static bool next_dsml_parameter(struct tool_parser__span s, size_t from, struct element *e, bool *string) {
    const struct tool_parser__span open = TOOL_SPAN("<" DSML "parameter name=\""), middle = TOOL_SPAN("\" string=\""),
                                   close = TOOL_SPAN("</" DSML "parameter>"), yes = TOOL_SPAN("true\">"),
                                   no = TOOL_SPAN("false\">");
    e->at = tool_parser__find(s, from, open);
    if (e->at == TOOL_NONE) return false;
    size_t hi = e->at + open.n;
    for (;; hi++) {
        hi = tool_parser__find(s, hi, middle);
        if (hi == TOOL_NONE) return false;
        *string = tool_parser__at(s, hi + middle.n, yes);
        if (!*string && !tool_parser__at(s, hi + middle.n, no)) continue;
        const size_t body = hi + middle.n + (*string ? yes.n : no.n), end = tool_parser__find(s, body, close);
        if (end == TOOL_NONE) return false;
        e->name = tool_parser__sub(s, e->at + open.n, hi);
        e->body = tool_parser__sub(s, body, end);
        e->end = end + close.n;
        return true;
    }
}

static bool dsml_call(struct tool_parser__run *r, struct tool_parser__span name, struct tool_parser__span body) {
    struct tool_parser__value *dict = tool_parser__value(&r->memory, TOOL_DICT);
    struct element e = {.end = 0};
    bool string;
    while (next_dsml_parameter(body, e.end, &e, &string))
        set(r, dict, e.name, string ? tool_parser__string(&r->memory, e.body.p, e.body.n) : json_or_text(r, e.body));
    return finish(r, name, dict);
}

static bool next_dsml_invoke(struct tool_parser__span s, size_t from, struct element *e) {
    const struct tool_parser__span close = TOOL_SPAN("</" DSML "invoke>");
    struct tool_parser__block header;
    if (!tool_parser__block(s, from, TOOL_SPAN("<" DSML "invoke name=\""), TOOL_SPAN("\">"), &header)) return false;
    const size_t hi = tool_parser__find(s, header.end, close);
    if (hi == TOOL_NONE) return false;
    e->name = tool_parser__sub(s, header.lo, header.hi);
    e->body = tool_parser__sub(s, header.end, hi);
    e->end = hi + close.n;
    return true;
}

/* Behind the last </think>. */
static struct tool_parser__span after_think(struct tool_parser__span s) {
    const struct tool_parser__span end = TOOL_SPAN("</think>");
    size_t from = 0;
    for (size_t at; (at = tool_parser__find(s, from, end)) != TOOL_NONE;) from = at + end.n;
    return tool_parser__sub(s, from, s.n);
}

static void dsml_blocks(struct tool_parser__run *r, struct tool_parser__span text) {
    const struct tool_parser__span open = TOOL_SPAN("<" DSML "tool_calls>"), close = TOOL_SPAN("</" DSML "tool_calls>"),
                                   blank = TOOL_SPAN("\n\n");
    struct tool_parser__block b = {.end = 0};
    while (tool_parser__block(text, b.end, open, close, &b)) {
        const struct tool_parser__span block = tool_parser__sub(text, b.lo, b.hi);
        const int64_t first = r->out->n_calls;
        struct element e = {.end = 0};
        bool ok = true;
        while (ok && next_dsml_invoke(block, e.end, &e)) ok = dsml_call(r, e.name, e.body);
        if (!ok) tool_parser__drop(r, first);
        r->out->n_malformed += ok && r->out->n_calls == first;
    }
    r->out->n_malformed += b.at != TOOL_NONE;
    struct tool_parser__span content = text;
    if (tool_parser__find(text, 0, open) == TOOL_NONE) {
        tool_parser__content(r, after_think(text));
        return;
    }
    content = after_think(before(text, open));
    if (content.n >= blank.n && tool_parser__at(content, content.n - blank.n, blank)) content.n -= blank.n;
    tool_parser__content(r, content);
}

void tool_parser__deepseek_v4(struct tool_parser__run *r) {
    const struct tool_parser__span end = TOOL_SPAN("<\xef\xbd\x9c"
                                                   "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>");
    struct buf text = {0};
    tool_parser__add_without(&text, r->text, end);
    dsml_blocks(r, (struct tool_parser__span){text.p ? text.p : "", text.n});
    buf_free(&text);
}

/* ---- qwen3_coder ---- */

/* Properties of the tool of that name. NULL: no such tool. */
static const json_t *properties_of(const json_t *tools, struct tool_parser__span name) {
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *const tool = json_array_get(tools, i), *const function = json_object_get(tool, "function");
        const json_t *const type = json_object_get(tool, "type"), *const own = json_object_get(function, "name");
        if (!json_is_string(type) || strcmp(json_string_value(type), "function") != 0 || !json_is_string(own)) continue;
        if (tool_parser__is(name, (struct tool_parser__span){json_string_value(own), json_string_length(own)}))
            return json_object_get(json_object_get(function, "parameters"), "properties");
    }
    return NULL;
}

enum schema { SCHEMA_TEXT, SCHEMA_INT, SCHEMA_FLOAT, SCHEMA_BOOL, SCHEMA_OBJECT, SCHEMA_OTHER };

static bool starts(struct tool_parser__span s, const char *lower) {
    const size_t n = strlen(lower);
    return s.n >= n && tool_parser__is_nocase((struct tool_parser__span){s.p, n}, lower);
}

/* verl's kinds of the "type" of a property; a list of types is none of them. */
static enum schema schema_of(const json_t *property) {
    static const char *const text[] = {"string", "str", "text", "varchar", "char", "enum"};
    static const char *const whole[] = {"int", "uint", "long", "short", "unsigned"};
    static const char *const truth[] = {"boolean", "bool", "binary"};
    const json_t *const type = json_object_get(property, "type");
    if (!type) return SCHEMA_TEXT;
    if (!json_is_string(type)) return SCHEMA_OTHER;
    const struct tool_parser__span s =
        tool_parser__strip((struct tool_parser__span){json_string_value(type), json_string_length(type)});
    for (size_t i = 0; i < sizeof text / sizeof *text; i++)
        if (tool_parser__is_nocase(s, text[i])) return SCHEMA_TEXT;
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        if (starts(s, whole[i])) return SCHEMA_INT;
    if (starts(s, "num") || starts(s, "float")) return SCHEMA_FLOAT;
    for (size_t i = 0; i < sizeof truth / sizeof *truth; i++)
        if (tool_parser__is_nocase(s, truth[i])) return SCHEMA_BOOL;
    return tool_parser__is_nocase(s, "object") || starts(s, "dict") ? SCHEMA_OBJECT : SCHEMA_OTHER;
}

/* A real number; an int where it is whole. NULL: the text stays. */
static struct tool_parser__value *number(struct tool_parser__run *r, struct tool_parser__span s) {
    struct tool_parser__value *const v = tool_parser__float_of(&r->memory, s);
    if (!v || !isfinite(v->re)) return NULL;
    return v->re == trunc(v->re) ? tool_parser__whole(&r->memory, v->re) : v;
}

static struct tool_parser__value *convert(struct tool_parser__run *r, struct tool_parser__span s, enum schema schema) {
    struct tool_parser__value *v = NULL;
    switch (schema) {
    case SCHEMA_TEXT: break;
    case SCHEMA_INT: v = tool_parser__int_of(&r->memory, s); break;
    case SCHEMA_FLOAT: v = number(r, s); break;
    case SCHEMA_BOOL:
        v = tool_parser__value(&r->memory, TOOL_BOOL);
        v->truth = tool_parser__is_nocase(s, "true");
        break;
    case SCHEMA_OBJECT: v = tool_parser__json(&r->memory, s); /* fall through */
    case SCHEMA_OTHER:
        if (!v) v = tool_parser__literal(&r->memory, s);
    }
    return v ? v : tool_parser__string(&r->memory, s.p, s.n);
}

/* <parameter=NAME>VALUE, without its ends. */
static void coder_parameter(struct tool_parser__run *r, struct tool_parser__span s, const json_t *properties,
                            struct tool_parser__value *dict) {
    const size_t head = tool_parser__find(s, 0, TOOL_SPAN(">"));
    if (head == TOOL_NONE) return;
    const struct tool_parser__span name = tool_parser__sub(s, 0, head);
    struct tool_parser__span v = tool_parser__sub(s, head + 1, s.n);
    if (v.n && v.p[0] == '\n') v = tool_parser__sub(v, 1, v.n);
    if (v.n && v.p[v.n - 1] == '\n') v.n--;
    const json_t *const property = json_object_getn(properties, name.p, name.n);
    if (tool_parser__is_nocase(v, "null")) set(r, dict, name, tool_parser__value(&r->memory, TOOL_NULL));
    else set(r, dict, name, property ? convert(r, v, schema_of(property)) : tool_parser__string(&r->memory, v.p, v.n));
}

/* A text that is not closed ends before the last newline: what $ means to a pattern that takes as little as it can. */
static struct tool_parser__span unclosed(struct tool_parser__span s, size_t lo) {
    return tool_parser__sub(s, lo, s.n > lo && s.p[s.n - 1] == '\n' ? s.n - 1 : s.n);
}

/* false: json.dumps raises; verl then takes no call of the turn. */
static bool coder_call(struct tool_parser__run *r, struct tool_parser__span s) {
    const size_t head = tool_parser__find(s, 0, TOOL_SPAN(">"));
    if (head == TOOL_NONE) {
        r->out->n_malformed++;
        return true;
    }
    const struct tool_parser__span body = tool_parser__sub(s, head + 1, s.n), name = tool_parser__sub(s, 0, head);
    const json_t *const properties = properties_of(r->tools, name);
    struct tool_parser__value *dict = tool_parser__value(&r->memory, TOOL_DICT);
    struct tool_parser__block b = {.end = 0};
    while (tool_parser__block(body, b.end, TOOL_SPAN("<parameter="), TOOL_SPAN("</parameter>"), &b))
        coder_parameter(r, tool_parser__sub(body, b.lo, b.hi), properties, dict);
    if (b.at != TOOL_NONE) coder_parameter(r, unclosed(body, b.lo), properties, dict);
    return finish(r, name, dict);
}

/* The calls of one <tool_call>; *n: functions in it. */
static bool coder_calls(struct tool_parser__run *r, struct tool_parser__span s, int64_t *n) {
    struct tool_parser__block b = {.end = 0};
    for (;; ++*n) {
        const bool closed = tool_parser__block(s, b.end, TOOL_SPAN("<function="), TOOL_SPAN("</function>"), &b);
        if (b.at == TOOL_NONE) return true;
        if (!coder_call(r, closed ? tool_parser__sub(s, b.lo, b.hi) : tool_parser__sub(s, b.lo, s.n))) return false;
        if (!closed) {
            ++*n;
            return true;
        }
    }
}

void tool_parser__qwen3_coder(struct tool_parser__run *r) {
    const struct tool_parser__span open = TOOL_SPAN("<tool_call>");
    struct tool_parser__block b = {.end = 0};
    int64_t n = 0;
    bool ok = true, closed = true;
    while (ok && closed) {
        const int64_t functions = n;
        closed = tool_parser__block(r->text, b.end, open, TOOL_SPAN("</tool_call>"), &b);
        if (b.at == TOOL_NONE) break;
        ok = coder_calls(r, closed ? tool_parser__sub(r->text, b.lo, b.hi) : unclosed(r->text, b.lo), &n);
        r->out->n_malformed += ok && n == functions; /* a block without a function */
    }
    if (!ok) tool_parser__drop(r, 0);
    tool_parser__content(r, ok && n ? before(r->text, open) : r->text);
}
