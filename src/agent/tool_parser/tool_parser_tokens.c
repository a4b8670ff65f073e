/* tool_parser_tokens.c - the formats that mark a call by special tokens: gpt-oss, kimi, gemma4, llama3_json.
 *
 * Invariant: as tool_parser_xml.c's. */
#include "agent/tool_parser/tool_parser_int.h"

#include <utf8proc.h>

/* ---- gpt-oss ---- */

/* Appends s without open(.*?)<|end|>. */
static void add_without_messages(struct buf *out, struct tool_parser__span s, struct tool_parser__span open) {
    struct tool_parser__block b;
    size_t from = 0;
    while (tool_parser__block(s, from, open, TOOL_SPAN("<|end|>"), &b)) {
        buf_add(out, s.p + from, b.at - from);
        from = b.end;
    }
    buf_add(out, s.p + from, s.n - from);
}

/* "... to=functions.NAME " up to a special token: NAME is as short as it can be. */
static bool recipient(struct tool_parser__span s, struct tool_parser__span *name) {
    const struct tool_parser__span to = TOOL_SPAN(" to=functions.");
    if (s.n < to.n + 2 || s.p[s.n - 1] != ' ') return false;
    for (size_t at = s.n - 2 - to.n + 1; at-- > 0;)
        if (tool_parser__at(s, at, to)) {
            *name = tool_parser__sub(s, at + to.n, s.n - 1);
            return true;
        }
    return false;
}

/* The next call from `from` on; false: none, *end: where the rest begins that has none. */
static bool next_gpt_oss(struct tool_parser__span s, size_t from, struct tool_parser__block *call, struct tool_parser__span *name) {
    const struct tool_parser__span open = TOOL_SPAN("<|start|>assistant<|channel|>"),
                                   json = TOOL_SPAN("<|constrain|>json<|message|>"), close = TOOL_SPAN("<|call|>");
    for (;; from = call->at + 1) {
        call->at = tool_parser__find(s, from, open);
        if (call->at == TOOL_NONE) return false;
        const size_t lo = call->at + open.n;
        const char *const mark = lo < s.n ? memchr(s.p + lo, '<', s.n - lo) : NULL;
        const size_t hi = mark ? (size_t)(mark - s.p) : s.n;
        if (!tool_parser__at(s, hi, json) || !recipient(tool_parser__sub(s, lo, hi), name)) continue;
        call->lo = hi + json.n;
        call->hi = tool_parser__find(s, call->lo, close);
        if (call->hi == TOOL_NONE) return false;
        call->end = call->hi + close.n;
        return true;
    }
}

void tool_parser__gpt_oss(struct tool_parser__run *r) {
    struct buf one = {0}, two = {0};
    struct tool_parser__block call;
    struct tool_parser__span name;
    size_t from = 0;
    add_without_messages(&one, r->text, TOOL_SPAN("<|start|>assistant<|channel|>analysis<|message|>"));
    add_without_messages(&two, (struct tool_parser__span){one.p, one.n}, TOOL_SPAN("<|channel|>analysis<|message|>"));
    const struct tool_parser__span s = {two.p, two.n};
    for (; next_gpt_oss(s, from, &call, &name); from = call.end) {
        tool_parser__content(r, tool_parser__sub(s, from, call.at));
        tool_parser__add_text(r, name, tool_parser__sub(s, call.lo, call.hi));
    }
    const struct tool_parser__span rest = tool_parser__sub(s, from, s.n);
    tool_parser__content(r, rest);
    r->out->n_malformed =
        tool_parser__count((struct tool_parser__span){r->out->content.p, r->out->content.n}, TOOL_SPAN("to=functions."));
    buf_free(&one);
    buf_free(&two);
}

/* ---- kimi ---- */

/* Appends s.lower(), but for the sigma at a word's end. */
static void add_lower(struct buf *out, struct tool_parser__span s) {
    for (size_t i = 0, len; i < s.n; i += len) {
        const int32_t c = tool_parser__char(s.p + i, s.n - i, &len);
        if (c < 0) buf_add(out, s.p + i, len);
        else tool_parser__put_char(out, c == 0x130 ? 'i' : utf8proc_tolower(c));
        if (c == 0x130) tool_parser__put_char(out, 0x307);
    }
}

static struct tool_parser__span function_name(const json_t *tool) {
    const json_t *const type = json_object_get(tool, "type"), *const name =
                                                                  json_object_get(json_object_get(tool, "function"), "name");
    if (!json_is_string(type) || strcmp(json_string_value(type), "function") != 0 || !json_is_string(name))
        return (struct tool_parser__span){NULL, 0};
    return (struct tool_parser__span){json_string_value(name), json_string_length(name)};
}

/* Whether the tool has required arguments, and these are there. */
static bool fits(const json_t *tool, const struct tool_parser__value *arguments) {
    const json_t *const required = json_object_get(json_object_get(json_object_get(tool, "function"), "parameters"), "required");
    for (size_t i = 0; i < json_array_size(required); i++) {
        const json_t *const key = json_array_get(required, i);
        if (!json_is_string(key) || !tool_parser__dict_has(arguments, json_string_value(key), json_string_length(key)))
            return false;
    }
    return json_array_size(required) > 0;
}

/* Whether the tool's name, in lower case, is inside of id. */
static bool is_inside(struct tool_parser__span name, const struct buf *id) {
    struct buf lower = {0};
    add_lower(&lower, name);
    const bool is = tool_parser__find((struct tool_parser__span){id->p, id->n}, 0,
                                      (struct tool_parser__span){lower.p ? lower.p : "", lower.n}) != TOOL_NONE;
    buf_free(&lower);
    return is;
}

/* The tool that an id means: its name, the one name inside of it, the one tool whose required arguments are there. */
static struct tool_parser__span kimi_name(const struct tool_parser__run *r, struct tool_parser__span id,
                                          const struct tool_parser__value *arguments) {
    struct tool_parser__span inside = id, fitting = id, name;
    int64_t n_inside = 0, n_fitting = 0;
    struct buf lower = {0};
    buf_add(&lower, "", 0);
    add_lower(&lower, id);
    for (size_t i = 0; i < lower.n; i++) lower.p[i] = (char)(lower.p[i] == '-' ? '_' : lower.p[i]);
    for (size_t i = 0; i < json_array_size(r->tools); i++) {
        const json_t *const tool = json_array_get(r->tools, i);
        name = function_name(tool);
        if (!name.p) continue;
        if (tool_parser__is(name, id)) {
            inside = id, n_inside = 1;
            break;
        }
        if (is_inside(name, &lower)) inside = name, n_inside++;
        if (fits(tool, arguments)) fitting = name, n_fitting++;
    }
    buf_free(&lower);
    return n_inside == 1 ? inside : n_fitting == 1 ? fitting : id;
}

static void kimi_call(struct tool_parser__run *r, struct tool_parser__span id, struct tool_parser__span json) {
    const struct tool_parser__value *arguments = tool_parser__json(&r->memory, tool_parser__strip(json));
    struct buf text = {0};
    id = tool_parser__strip(id);
    if (!arguments || arguments->kind != TOOL_DICT || !tool_parser__dumps(&text, arguments)) {
        r->out->n_malformed++;
        arguments = tool_parser__value(&r->memory, TOOL_DICT);
        buf_reset(&text);
        buf_adds(&text, "{}");
    }
    struct tool_call *const call =
        tool_parser__add_text(r, kimi_name(r, id, arguments), (struct tool_parser__span){text.p, text.n});
    call->id = tool_parser__c_string(id);
    buf_free(&text);
    tool_parser__memory_free(&r->memory);
}

void tool_parser__kimi(struct tool_parser__run *r) {
    const struct tool_parser__span section = TOOL_SPAN("<|tool_calls_section_begin|>"), open = TOOL_SPAN("<|tool_call_begin|>"),
                                   middle = TOOL_SPAN("<|tool_call_argument_begin|>"), close = TOOL_SPAN("<|tool_call_end|>");
    const size_t at = tool_parser__find(r->text, 0, section);
    struct tool_parser__block id = {.end = 0};
    tool_parser__content(r, tool_parser__sub(r->text, 0, at == TOOL_NONE ? r->text.n : at));
    if (at == TOOL_NONE) return;
    while (tool_parser__block(r->text, id.end, open, middle, &id)) {
        const size_t hi = tool_parser__find(r->text, id.end, close);
        if (hi == TOOL_NONE) break;
        kimi_call(r, tool_parser__sub(r->text, id.lo, id.hi), tool_parser__sub(r->text, id.end, hi));
        id.end = hi + close.n;
    }
    r->out->n_malformed += id.at != TOOL_NONE;
}

/* ---- gemma4 ---- */

/* \w of the package regex: letters, marks, digits, connectors, and letters in circles and squares. */
static bool is_word(int32_t c) {
    if (c < 0) return false;
    if (c < 0x80) return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    case UTF8PROC_CATEGORY_SO:
        return (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) || (c >= 0x1f150 && c <= 0x1f169) ||
               (c >= 0x1f170 && c <= 0x1f189);
    default: return false;
    }
}

/* Behind \w* at `at`. */
static size_t skip_word(struct tool_parser__span s, size_t at) {
    size_t len;
    while (at < s.n && is_word(tool_parser__char(s.p + at, s.n - at, &len))) at += len;
    return at;
}

/* A value without quotes. */
static struct tool_parser__value *gemma_bare(struct tool_parser__run *r, struct tool_parser__span s) {
    s = tool_parser__strip(s);
    struct tool_parser__value *v = NULL;
    if (tool_parser__is_nocase(s, "true") || tool_parser__is_nocase(s, "false")) {
        v = tool_parser__value(&r->memory, TOOL_BOOL);
        v->truth = s.n == 4;
    } else if (tool_parser__is_nocase(s, "null")) {
        v = tool_parser__value(&r->memory, TOOL_NULL);
    }
    if (!v) v = tool_parser__int_of(&r->memory, s);
    if (!v) v = tool_parser__float_of(&r->memory, s);
    return v ? v : tool_parser__string(&r->memory, s.p, s.n);
}

/* KEY:<|"|>text<|"|> on one line, or KEY:anything up to a comma or brace; what is between them is nothing. */
static struct tool_parser__value *gemma_arguments(struct tool_parser__run *r, struct tool_parser__span s) {
    const struct tool_parser__span quote = TOOL_SPAN("<|\"|>");
    struct tool_parser__value *dict = tool_parser__value(&r->memory, TOOL_DICT), *v;
    for (size_t at = 0, len; at < s.n;) {
        const size_t colon = skip_word(s, at);
        if (colon == s.n) break;
        if (colon == at || s.p[colon] != ':') {
            tool_parser__char(s.p + colon, s.n - colon, &len);
            at = colon + len;
            continue;
        }
        const size_t lo = colon + 1, text = lo + quote.n;
        size_t hi = tool_parser__at(s, lo, quote) ? tool_parser__find(s, text, quote) : TOOL_NONE;
        if (hi != TOOL_NONE && memchr(s.p + text, '\n', hi - text)) hi = TOOL_NONE; /* one line */
        if (hi != TOOL_NONE) {
            v = tool_parser__string(&r->memory, s.p + text, hi - text);
            len = hi + quote.n;
        } else {
            for (len = lo; len < s.n && s.p[len] != ',' && s.p[len] != '}';) len++;
            v = gemma_bare(r, tool_parser__sub(s, lo, len));
        }
        tool_parser__dict_set(&r->memory, dict, tool_parser__string(&r->memory, s.p + at, colon - at), v);
        at = len;
    }
    return dict;
}

void tool_parser__gemma4(struct tool_parser__run *r) {
    const struct tool_parser__span open = TOOL_SPAN("<|tool_call>"), call = TOOL_SPAN("<|tool_call>call:"),
                                   close = TOOL_SPAN("}<tool_call|>");
    size_t at = 0, end = 0;
    int64_t n_begun = tool_parser__count(r->text, open);
    while ((at = tool_parser__find(r->text, end, call)) != TOOL_NONE) {
        const size_t lo = at + call.n, brace = skip_word(r->text, lo);
        end = at + 1;
        if (brace == lo || brace == r->text.n || r->text.p[brace] != '{') continue;
        const size_t hi = tool_parser__find(r->text, brace + 1, close);
        if (hi == TOOL_NONE) break;
        n_begun -= tool_parser__count(tool_parser__sub(r->text, at, hi), open);
        tool_parser__add(r, tool_parser__sub(r->text, lo, brace), gemma_arguments(r, tool_parser__sub(r->text, brace + 1, hi)));
        tool_parser__memory_free(&r->memory);
        end = hi + close.n;
    }
    r->out->n_malformed = n_begun;
    at = tool_parser__find(r->text, 0, open);
    tool_parser__content(r, tool_parser__sub(r->text, 0, r->out->n_calls ? at : r->text.n));
}

/* ---- llama3_json ---- */

static struct tool_parser__span without_end(struct tool_parser__span s) {
    static const struct tool_parser__span ends[] = {TOOL_INIT("<|eom_id|>"), TOOL_INIT("<|eot_id|>"), TOOL_INIT("<|end_of_text|>")};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        const size_t at = s.n >= ends[i].n ? s.n - ends[i].n : TOOL_NONE;
        if (at != TOOL_NONE && tool_parser__at(s, at, ends[i])) return tool_parser__sub(s, 0, at);
    }
    return s;
}

/* {"name": text, "parameters" or "arguments": any}. */
static bool llama_call(struct tool_parser__run *r, const struct tool_parser__value *call) {
    if (!call || call->kind != TOOL_DICT) return false;
    const struct tool_parser__value *const name = tool_parser__dict_get(call, "name");
    const struct tool_parser__value *arguments = tool_parser__dict_get(call, "parameters");
    if (!arguments) arguments = tool_parser__dict_get(call, "arguments");
    if (!name || name->kind != TOOL_STRING) return false;
    return tool_parser__add(r, name->text, arguments) != NULL;
}

/* NAME.call(KEY="text", KEY="text"): what the template writes for the tools that the model was made with. */
static bool llama_builtin(struct tool_parser__run *r, struct tool_parser__span s) {
    const struct tool_parser__span call = TOOL_SPAN(".call("), equals = TOOL_SPAN("=\"");
    const size_t dot = skip_word(s, 0);
    struct tool_parser__value *dict = tool_parser__value(&r->memory, TOOL_DICT);
    if (dot == 0 || !tool_parser__at(s, dot, call)) return false;
    for (size_t at = dot + call.n; !tool_parser__is(tool_parser__sub(s, at, s.n), TOOL_SPAN(")"));) {
        if (dict->n && !tool_parser__at(s, at, TOOL_SPAN(", "))) return false;
        if (dict->n) at += 2;
        const size_t key = skip_word(s, at), text = key + equals.n;
        if (key == at || !tool_parser__at(s, key, equals)) return false;
        const size_t hi = tool_parser__find(s, text, TOOL_SPAN("\""));
        if (hi == TOOL_NONE) return false;
        tool_parser__dict_set(&r->memory, dict, tool_parser__string(&r->memory, s.p + at, key - at),
                              tool_parser__string(&r->memory, s.p + text, hi - text));
        at = hi + 1;
    }
    return tool_parser__add(r, tool_parser__sub(s, 0, dot), dict) != NULL;
}

/* One call, or several with ; between them. */
static bool llama_calls(struct tool_parser__run *r, struct tool_parser__span s) {
    for (;;) {
        size_t n;
        if (!llama_call(r, tool_parser__json_prefix(&r->memory, s, &n))) return false;
        tool_parser__memory_free(&r->memory);
        s = tool_parser__strip(tool_parser__sub(s, n, s.n));
        if (s.n && s.p[0] == ';') s = tool_parser__strip(tool_parser__sub(s, 1, s.n));
        if (s.n == 0) return true;
    }
}

void tool_parser__llama3_json(struct tool_parser__run *r) {
    const struct tool_parser__span tag = TOOL_SPAN("<|python_tag|>");
    const struct tool_parser__span text = without_end(r->text);
    const size_t at = tool_parser__find(text, 0, tag), from = at == TOOL_NONE ? 0 : at + tag.n;
    const struct tool_parser__span calls = tool_parser__strip(tool_parser__sub(text, from, text.n));
    const bool begun = at != TOOL_NONE || (calls.n && calls.p[0] == '{');
    bool ok = begun && llama_calls(r, calls);
    if (!ok && at != TOOL_NONE && r->out->n_calls == 0) ok = llama_builtin(r, calls);
    if (!ok) tool_parser__drop(r, 0);
    r->out->n_malformed = begun && !ok;
    tool_parser__content(r, ok ? tool_parser__sub(text, 0, at == TOOL_NONE ? 0 : at) : r->text);
}
