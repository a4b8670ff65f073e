/* continuous_tokens_selftest.c - tries at start what a run will do with the model's template, and compares a stream with a
 * render of the whole conversation (verl's tokenization_sanity_check_mode).
 *
 * Invariant: a case that is reported as working is one that append did. */
#include "agent/continuous_tokens/continuous_tokens_int.h"
#include "base/buf.h"
#include "base/err.h"

#include <string.h>

static const char CONVERSATION[] = "[{\"role\":\"user\",\"content\":\"What is 2 + 2, and 2 + 3?\"},"
                                   "{\"role\":\"assistant\",\"content\":\"Let me see.\",\"tool_calls\":[]}]";
static const char TOOL[] = "[{\"type\":\"function\",\"function\":{\"name\":\"add\",\"description\":\"Adds two "
                           "numbers.\",\"parameters\":{\"type\":\"object\","
                           "\"properties\":{\"a\":{\"type\":\"integer\",\"description\":\"the "
                           "first\"},\"b\":{\"type\":\"integer\",\"description\":\"the second\"}},"
                           "\"required\":[\"a\",\"b\"]}}}]";

struct test_case {
    const char *name, *role;
    int n; /* messages that are appended; tool: as many calls before */
};
static const struct test_case CASES[] = {
    {"tool", "tool", 1}, {"two_tools", "tool", 2}, {"user", "user", 1}, {"system", "system", 1}};

/* The conversation up to the assistant's turn, with its calls where tools answer. */
static json_t *old_messages(const struct test_case *t) {
    json_t *messages = json_loads(CONVERSATION, 0, NULL), *turn = json_array_get(messages, 1);
    json_t *calls = json_object_get(turn, "tool_calls");
    for (int i = 0; strcmp(t->role, "tool") == 0 && i < t->n; i++)
        json_array_append_new(calls, json_pack("{s:s, s:s, s:{s:s, s:{s:i, s:i}}}", "id", i ? "call00002" : "call00001", "type",
                                               "function", "function", "name", "add", "arguments", "a", 2, "b", 2 + i));
    if (json_array_size(calls) == 0) json_object_del(turn, "tool_calls");
    return messages;
}

static void add_messages(json_t *messages, const struct test_case *t) {
    for (int i = 0; i < t->n; i++) {
        json_t *m = json_pack("{s:s, s:s}", "role", t->role, "content", t->role[0] == 't' ? (i ? "5" : "4") : "Are you sure?");
        if (t->role[0] == 't') json_object_set_new(m, "tool_call_id", json_string(i ? "call00002" : "call00001"));
        json_array_append_new(messages, m);
    }
}

static bool ends_with(const struct text_ids *all, const struct text_ids *tail) {
    return tail->n > 0 && all->n >= tail->n && memcmp(all->p + all->n - tail->n, tail->p, (size_t)tail->n * sizeof *tail->p) == 0;
}

/* A failure that is the template's process's, not the template's. */
static bool is_fault(int rc) { return rc < 0 && rc != ERR_INPUT && rc != ERR_FORMAT; }

static json_t *refused(void) { return json_pack("{s:b, s:s}", "ok", 0, "reason", err_msg()); }

static int try_case(struct continuous_tokens *c, const struct test_case *t, const json_t *tools, json_t **out) {
    json_t *messages = old_messages(t);
    const int64_t n_old = (int64_t)json_array_size(messages);
    struct text_ids full = {0}, stream = {0};
    struct continuous_junction j = {0};
    add_messages(messages, t);
    /* a turn that ended as the family's turns end, or was cut where they have no token of their own */
    const int32_t end = c->family == CONTINUOUS_GLM ? (t->role[0] == 't' ? c->observation : c->user) : c->close;
    if (end > 0) text_ids_add(&stream, &end, 1);
    int rc = continuous_tokens_append(c, messages, n_old, tools, &stream, &j);
    if (rc < 0) {
        *out = is_fault(rc) ? NULL : refused();
        rc = is_fault(rc) ? rc : 0;
        goto done;
    }
    rc = continuous_tokens_begin(c, messages, tools, &full);
    *out = is_fault(rc) ? NULL
                        : json_pack("{s:b, s:I, s:b}", "ok", 1, "tokens", (json_int_t)j.added.n, "exact",
                                    rc == 0 && ends_with(&full, &j.added));
    rc = is_fault(rc) ? rc : 0;
done:
    text_ids_free(&full);
    text_ids_free(&stream);
    text_ids_free(&j.added);
    json_decref(messages);
    return rc;
}

int continuous_tokens_selftest(struct continuous_tokens *c, json_t **report) {
    json_t *tools = json_loads(TOOL, 0, NULL), *cases = json_object();
    int rc = 0;
    CHECK(tools);
    for (size_t i = 0; rc == 0 && i < sizeof CASES / sizeof *CASES; i++) {
        json_t *one = NULL;
        rc = try_case(c, &CASES[i], tools, &one);
        if (rc == 0) json_object_set_new(cases, CASES[i].name, one);
    }
    json_decref(tools);
    if (rc < 0) {
        json_decref(cases);
        return err_pass(rc, __FILE__, __LINE__);
    }
    *report = json_pack("{s:s, s:o}", "family", continuous_tokens_family(c), "cases", cases);
    return 0;
}

/* ---- a whole conversation ---- */

static bool is_space(char x) { return x == ' ' || x == '\t' || x == '\n' || x == '\r'; }

/* The text of ids without white space. */
static int squeezed(const struct continuous_tokens *c, const int32_t *ids, int64_t n, struct buf *out) {
    size_t to = 0;
    TRY(tokenizer_decode(c->tok, ids, n, false, out));
    for (size_t i = 0; i < out->n; i++)
        if (!is_space(out->p[i])) out->p[to++] = out->p[i];
    out->n = to;
    return 0;
}

static int compare(const struct continuous_tokens *c, const struct text_ids *stream, const struct text_ids *again,
                   enum continuous_again *out) {
    struct buf a = {0}, b = {0};
    int64_t same = 0;
    int rc;
    while (same < stream->n && same < again->n && stream->p[same] == again->p[same]) same++;
    TRYG(squeezed(c, stream->p + same, stream->n - same, &a), done);
    TRYG(squeezed(c, again->p + same, again->n - same, &b), done);
    *out = a.n != b.n || (a.n > 0 && memcmp(a.p, b.p, a.n) != 0) ? CONTINUOUS_OTHER
           : same < stream->n                                    ? CONTINUOUS_SPACE
                                                                 : CONTINUOUS_SAME;
done:
    buf_free(&a);
    buf_free(&b);
    return rc;
}

int continuous_tokens_again(struct continuous_tokens *c, const json_t *messages, const json_t *tools, const struct text_ids *stream,
                            enum continuous_again *out) {
    struct continuous_tokens__text t = {0};
    int rc;
    if (!c->chat) FAIL(ERR_UNSUPPORTED, "%s renders no whole conversation", continuous_tokens_family(c));
    TRYG(continuous_tokens__render(c, &(struct continuous_tokens__request){messages, false}, 1, tools, &t), done);
    TRYG(continuous_tokens__ids(c, &t), done);
    rc = compare(c, stream, &t.ids, out);
done:
    continuous_tokens__text_free(&t);
    return rc;
}
