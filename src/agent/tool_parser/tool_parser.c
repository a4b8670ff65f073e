/* tool_parser.c - the table of formats, what all of them do, and hermes.
 *
 * Invariant: a format's function reads the run's text and adds to the run's turn, nothing else. */
#include "agent/tool_parser/tool_parser.h"

#include "agent/tool_parser/tool_parser_int.h"
#include "base/err.h"

#include <stdlib.h>

struct tool_parser {
    const char *name;
    void (*parse)(struct tool_parser__run *r);
    bool drops_pad;      /* the pad token's text is no part of a turn */
    const char *stop[2]; /* tool_parser_stop_tokens */
};

static const struct tool_parser parsers[] = {
    {"hermes", tool_parser__hermes, false, {NULL}},
    {"qwen3_coder", tool_parser__qwen3_coder, false, {NULL}},
    {"gpt-oss", tool_parser__gpt_oss, true, {NULL}},
    {"glm", tool_parser__glm, false, {"<|observation|>"}},
    {"seed", tool_parser__seed, false, {NULL}},
    {"minimax", tool_parser__minimax, false, {NULL}},
    {"kimi", tool_parser__kimi, false, {"<|im_end|>"}},
    {"deepseek_v4", tool_parser__deepseek_v4, true, {NULL}},
    {"gemma4", tool_parser__gemma4, true, {"<tool_call|>"}},
    {"llama3_json", tool_parser__llama3_json, false, {"<|eom_id|>"}},
};
enum { N_PARSERS = sizeof parsers / sizeof parsers[0] };

const struct tool_parser *tool_parser_find(const char *format) {
    if (strcmp(format, "qwen") == 0) format = "hermes";
    for (int i = 0; i < N_PARSERS; i++)
        if (strcmp(parsers[i].name, format) == 0) return &parsers[i];
    return NULL;
}

const char *tool_parser_names(void) {
    return "hermes, qwen3_coder, gpt-oss, glm, seed, minimax, kimi, deepseek_v4, gemma4, llama3_json";
}

const char *tool_parser_name(const struct tool_parser *p) { return p->name; }
const char *const *tool_parser_stop_tokens(const struct tool_parser *p) { return p->stop; }

int tool_parser_text(const struct tool_parser *p, const struct tokenizer *tok, const int32_t *ids, int64_t n, struct buf *out) {
    const char *const pad = p->drops_pad && tokenizer_pad(tok) >= 0 ? tokenizer_token(tok, tokenizer_pad(tok)) : NULL;
    if (!pad || !*pad) return tokenizer_decode(tok, ids, n, false, out);
    struct buf all = {0};
    int rc = tokenizer_decode(tok, ids, n, false, &all);
    const struct tool_parser__span s = {all.p ? all.p : "", all.n}, what = {pad, strlen(pad)};
    if (rc == 0) tool_parser__add_without(out, s, what);
    buf_free(&all);
    return rc;
}

int tool_parser_parse(const struct tool_parser *p, const char *text, size_t n, const json_t *tools, struct tool_turn *out) {
    struct tool_parser__run r = {.text = {text ? text : "", n}, .tools = tools, .out = out};
    *out = (struct tool_turn){0};
    p->parse(&r);
    tool_parser__memory_free(&r.memory);
    return 0;
}

void tool_turn_free(struct tool_turn *t) {
    for (int64_t i = 0; i < t->n_calls; i++) {
        free(t->calls[i].id);
        free(t->calls[i].name);
        free(t->calls[i].arguments);
    }
    free(t->calls);
    buf_free(&t->content);
    *t = (struct tool_turn){0};
}

/* ---- what the formats add ---- */

char *tool_parser__c_string(struct tool_parser__span s) {
    struct buf b = {0};
    for (size_t i = 0, len; i < s.n; i += len) {
        const int32_t c = tool_parser__char(s.p + i, s.n - i, &len);
        if (c > 0) buf_add(&b, s.p + i, len);
        else buf_adds(&b, "\xef\xbf\xbd");
    }
    return buf_take(&b);
}

struct tool_call *tool_parser__add_text(struct tool_parser__run *r, struct tool_parser__span name,
                                        struct tool_parser__span arguments) {
    struct tool_turn *const t = r->out;
    xgrow((void **)&t->calls, &r->cap_calls, t->n_calls + 1, sizeof *t->calls);
    t->calls[t->n_calls] = (struct tool_call){.name = tool_parser__c_string(name), .arguments = tool_parser__c_string(arguments)};
    return &t->calls[t->n_calls++];
}

struct tool_call *tool_parser__add(struct tool_parser__run *r, struct tool_parser__span name,
                                   const struct tool_parser__value *arguments) {
    struct buf text = {0};
    struct tool_call *call = NULL;
    if (arguments && tool_parser__dumps(&text, arguments))
        call = tool_parser__add_text(r, name, (struct tool_parser__span){text.p, text.n});
    buf_free(&text);
    return call;
}

void tool_parser__drop(struct tool_parser__run *r, int64_t first) {
    while (r->out->n_calls > first) {
        struct tool_call *const c = &r->out->calls[--r->out->n_calls];
        free(c->id);
        free(c->name);
        free(c->arguments);
    }
}

void tool_parser__content(struct tool_parser__run *r, struct tool_parser__span s) { buf_add(&r->out->content, s.p, s.n); }

/* ---- hermes ---- */

/* {"name": text, "arguments": any}; false: none of that. */
static bool hermes_call(struct tool_parser__run *r, struct tool_parser__span json) {
    const struct tool_parser__value *const call = tool_parser__json(&r->memory, json), *name = NULL;
    if (call && call->kind == TOOL_DICT) name = tool_parser__dict_get(call, "name");
    if (!name || name->kind != TOOL_STRING) return false;
    return tool_parser__add(r, name->text, tool_parser__dict_get(call, "arguments"));
}

void tool_parser__hermes(struct tool_parser__run *r) {
    struct tool_parser__block b;
    size_t from = 0;
    while (tool_parser__block(r->text, from, TOOL_SPAN("<tool_call>"), TOOL_SPAN("</tool_call>"), &b)) {
        tool_parser__content(r, tool_parser__sub(r->text, from, b.at));
        if (!hermes_call(r, tool_parser__sub(r->text, b.lo, b.hi))) r->out->n_malformed++;
        tool_parser__memory_free(&r->memory);
        from = b.end;
    }
    r->out->n_malformed += b.at != TOOL_NONE; /* one that is not closed */
    tool_parser__content(r, tool_parser__sub(r->text, from, r->text.n));
}
