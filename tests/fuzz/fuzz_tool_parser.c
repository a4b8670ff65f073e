/* fuzz_tool_parser.c - any turn in each format of tool calls, with and without schemas of tools.
 *
 * The first byte chooses the format, and whether a line of JSON with the tools follows; the rest is the turn.  The content is never
 * longer than the turn, every call has a name and arguments, a turn read twice is the same, and what UTF-8 goes in comes out. */
#include "fuzz.h"

#include "agent/tool_parser/tool_parser.h"
#include "base/json.h"

static const char *const names[] = {"hermes",  "qwen3_coder", "gpt-oss",     "glm",    "seed",
                                    "minimax", "kimi",        "deepseek_v4", "gemma4", "llama3_json"};
enum { N_NAMES = sizeof names / sizeof *names };

static void check(const struct tool_turn *t, const struct tool_turn *again, size_t n, bool utf8) {
    CHECK(t->content.n <= n && t->n_calls >= 0 && t->n_malformed >= 0);
    CHECK(t->n_calls == again->n_calls && t->n_malformed == again->n_malformed && t->content.n == again->content.n);
    CHECK(!utf8 || text_utf8_valid(t->content.p ? t->content.p : "", t->content.n));
    for (int64_t i = 0; i < t->n_calls; i++) {
        const struct tool_call *const c = &t->calls[i], *const other = &again->calls[i];
        CHECK(c->name && c->arguments && strcmp(c->name, other->name) == 0 && strcmp(c->arguments, other->arguments) == 0);
        CHECK(text_utf8_valid(c->name, strlen(c->name)) && (!c->id || text_utf8_valid(c->id, strlen(c->id))));
        CHECK(!utf8 || text_utf8_valid(c->arguments, strlen(c->arguments)));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    fuzz_quiet();
    if (n == 0) return 0;
    const struct tool_parser *const p = tool_parser_find(names[data[0] % 16 % N_NAMES]);
    const char *text = (const char *)data + 1, *line = n > 1 && data[0] & 16 ? memchr(text, '\n', n - 1) : NULL;
    json_t *tools = NULL;
    struct tool_turn t, again;
    if (line) {
        (void)!json_parse(&tools, text, (size_t)(line - text), "tools");
        text = line + 1;
    }
    n -= (size_t)(text - (const char *)data);
    CHECK(tool_parser_parse(p, text, n, tools, &t) == 0 && tool_parser_parse(p, text, n, tools, &again) == 0);
    check(&t, &again, n, text_utf8_valid(text, n));
    tool_turn_free(&t);
    tool_turn_free(&again);
    json_decref(tools);
    return 0;
}
