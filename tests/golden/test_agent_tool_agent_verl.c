/* test_agent_tool_agent_verl.c - conversations with tools beside verl 0.9.1's own ToolAgentLoop: the prompt, ids, mask, turns,
 * calls and rewards that the state machine, continuous tokens and the parsers give together.
 *
 * The policy's turns and the tools' answers come from conversations.jsonl (tools/oracle_tool_agent.py), with the tokenizers beside
 * it; an argument names another directory. */
#include "agent/continuous_tokens/continuous_tokens.h"
#include "agent/tool_agent.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SHOWN = 20 };
static const char *dir = FIXTURES "/agent/tool_agent";
static int n_conversations, n_turns, n_calls, n_refused, n_differ;

/* The model of the line before, opened; continuous tokens of its template's variables. */
static struct {
    char *name;
    json_t *kwargs;
    struct tokenizer *tok;
    struct continuous_tokens *ct;
} model;

static void close_model(void) {
    continuous_tokens_destroy(model.ct);
    tokenizer_close(model.tok);
    json_decref(model.kwargs);
    free(model.name);
}

static void open_model(const json_t *row) {
    const char *const name = json_string_value(json_object_get(row, "model"));
    json_t *const kwargs = json_object_get(row, "kwargs");
    if (model.name && strcmp(model.name, name) == 0 && json_equal(model.kwargs, kwargs)) return;
    close_model();
    char *const path = file_join(dir, name);
    if (tokenizer_open(&model.tok, path) < 0 ||
        continuous_tokens_create(&model.ct, model.tok, json_string_value(json_object_get(row, "model_type")), kwargs) < 0)
        fail_msg("%s", err_msg());
    model.name = xstrdup(name);
    model.kwargs = json_incref(kwargs);
    free(path);
}

static struct text_ids ids_of(const json_t *list) {
    struct text_ids ids = {0};
    for (size_t i = 0; i < json_array_size(list); i++) {
        const int32_t id = (int32_t)json_integer_value(json_array_get(list, i));
        text_ids_add(&ids, &id, 1);
    }
    return ids;
}

static int64_t rule(const json_t *row, const char *key) {
    return json_integer_value(json_object_get(json_object_get(row, "rules"), key)); /* null: 0, no limit */
}

/* One conversation under way. */
struct episode {
    const json_t *row, *tools;
    struct tool_agent *agent;
    struct text_ids prompt;
    json_t *calls; /* of all turns: [name, arguments, id] */
    int64_t turn;
};

static enum tool_agent_next draw(struct episode *e) {
    const json_t *const turn = json_array_get(json_object_get(e->row, "turns"), (size_t)e->turn++);
    struct text_ids ids = ids_of(json_object_get(turn, "ids"));
    struct buf text = {0};
    enum tool_agent_next next;
    const struct tool_parser *const parser = tool_parser_find(json_string_value(json_object_get(e->row, "format")));
    if (!turn) return TOOL_AGENT_END; /* verl drew no further one: the numbers of turns differ */
    assert_int_equal(tool_parser_text(parser, model.tok, ids.p, ids.n, &text), 0);
    const struct tool_agent_turn t = {.ids = ids.p, .n = ids.n, .text = text.p ? text.p : "", .n_text = text.n};
    if (tool_agent_drawn(e->agent, &t, &next) < 0) fail_msg("%s", err_msg());
    text_ids_free(&ids);
    buf_free(&text);
    return next;
}

/* The tools' answers as verl had them; a call that verl did not make has none. */
static enum tool_agent_next answer(struct episode *e) {
    const json_t *const theirs = json_object_get(json_array_get(json_object_get(e->row, "turns"), (size_t)(e->turn - 1)), "calls");
    enum tool_agent_next next = TOOL_AGENT_END;
    int64_t n;
    const struct tool_call *const calls = tool_agent_calls(e->agent, &n);
    for (int64_t k = 0; k < n; k++)
        json_array_append_new(e->calls, json_pack("[s,s,s?]", calls[k].name, calls[k].arguments, calls[k].id));
    for (int64_t k = 0; k < n; k++) {
        const json_t *const call = json_array_get(theirs, (size_t)k), *const text = json_array_get(call, 3),
                            *const reward = json_array_get(call, 4);
        next = tool_agent_result(e->agent, k,
                                 &(struct tool_agent_result){.text = text ? json_string_value(text) : "",
                                                             .n_text = json_string_length(text),
                                                             .status = "ok",
                                                             .has_reward = json_is_number(reward),
                                                             .reward = json_number_value(reward)});
    }
    return next;
}

static enum tool_agent_next join(struct episode *e) {
    struct text_ids stream = {0};
    struct continuous_junction j = {0};
    int64_t n_old, n;
    const json_t *const messages = tool_agent_messages(e->agent, &n_old);
    const int32_t *const ids = tool_agent_ids(e->agent, &n);
    enum tool_agent_next next = TOOL_AGENT_END;
    text_ids_add(&stream, e->prompt.p, e->prompt.n);
    text_ids_add(&stream, ids, n);
    if (continuous_tokens_append(model.ct, messages, n_old, e->tools, &stream, &j) < 0)
        tool_agent_fail(e->agent, TOOL_AGENT_REFUSED, err_msg());
    else next = tool_agent_join(e->agent, j.n_removed, j.added.p, j.added.n);
    text_ids_free(&j.added);
    text_ids_free(&stream);
    return next;
}

static void play(struct episode *e) {
    const struct tool_agent_rules rules = {.response_length = rule(e->row, "response_length"),
                                           .max_assistant_turns = rule(e->row, "max_assistant_turns"),
                                           .max_user_turns = rule(e->row, "max_user_turns"),
                                           .max_parallel_calls = rule(e->row, "max_parallel_calls"),
                                           .parser = tool_parser_find(json_string_value(json_object_get(e->row, "format")))};
    const json_t *const messages = json_object_get(e->row, "messages");
    enum tool_agent_next next = TOOL_AGENT_GENERATE;
    if (continuous_tokens_begin(model.ct, messages, e->tools, &e->prompt) < 0) fail_msg("%s", err_msg());
    const int64_t over = e->prompt.n - rule(e->row, "prompt_length");
    if (over > 0) { /* cut on the left */
        e->prompt.n -= over;
        memmove(e->prompt.p, e->prompt.p + over, (size_t)e->prompt.n * sizeof *e->prompt.p);
    }
    tool_agent_create(&e->agent, &rules, messages, e->tools);
    while (next != TOOL_AGENT_END) next = next == TOOL_AGENT_GENERATE ? draw(e) : next == TOOL_AGENT_TOOLS ? answer(e) : join(e);
}

/* ---- what came of it ---- */

static json_t *mask_of(const struct tool_agent *a) {
    json_t *const mask = json_array();
    int64_t n;
    const int32_t *const segments = tool_agent_segments(a, &n);
    for (int64_t i = 0; i < n; i++)
        for (int32_t k = 0; k < segments[2 * i]; k++)
            json_array_append_new(mask, json_integer(segments[2 * i + 1] == SEGMENT_POLICY));
    return mask;
}

/* verl's answer in ours' form: calls that it did run, in their order. */
static json_t *verl_calls(const json_t *row) {
    json_t *const out = json_array(), *turn, *call;
    size_t i, k;
    json_array_foreach(json_object_get(row, "turns"), i, turn) json_array_foreach(json_object_get(turn, "calls"), k, call)
        json_array_append_new(out, json_pack("[O,O,O]", json_array_get(call, 0), json_array_get(call, 1), json_array_get(call, 2)));
    return out;
}

static json_t *result(const struct episode *e) {
    int64_t n;
    const int32_t *const ids = tool_agent_ids(e->agent, &n);
    if (tool_agent_ended(e->agent) == TOOL_AGENT_REFUSED) return json_pack("{s:s}", "refused", tool_agent_reason(e->agent));
    return json_pack("{s:o,s:o,s:o,s:I,s:O}", "prompt", json_i32_array(e->prompt.p, e->prompt.n), "ids", json_i32_array(ids, n),
                     "mask", mask_of(e->agent), "num_turns", (json_int_t)tool_agent_num_turns(e->agent), "tool_rewards",
                     tool_agent_tool_rewards(e->agent));
}

/* The parts that differ, and where the ids do. */
static void show(const struct episode *e, const json_t *ours, const json_t *theirs, int64_t no) {
    const json_t *const a = json_object_get(ours, "ids"), *const b = json_object_get(theirs, "ids"), *v;
    const char *key;
    size_t at = 0;
    if (n_differ++ >= SHOWN) return;
    while (at < json_array_size(a) && json_equal(json_array_get(a, at), json_array_get(b, at))) at++;
    fprintf(stderr, "line %d, %s, %s: %d turns, %d calls; ids differ from %d of %d on, verl %d;", (int)no, model.name,
            json_string_value(json_object_get(e->row, "format")), (int)e->turn, (int)json_array_size(e->calls), (int)at,
            (int)json_array_size(a), (int)json_array_size(b));
    json_object_foreach((json_t *)(uintptr_t)theirs, key, v) if (!json_equal(json_object_get(ours, key), v))
        fprintf(stderr, " %s", key);
    fprintf(stderr, "\n");
}

static bool same(const struct episode *e, const json_t *ours, const json_t *theirs) {
    json_t *const calls = verl_calls(e->row);
    bool is = json_equal(calls, e->calls) && e->turn == (int64_t)json_array_size(json_object_get(e->row, "turns"));
    is = is && (json_object_get(theirs, "refused") ? json_object_get(ours, "refused") != NULL : json_equal(ours, theirs));
    json_decref(calls);
    return is;
}

static int one_conversation(void *arg, char *raw, size_t n, int64_t no) {
    (void)arg;
    json_t *row;
    TRY(json_parse(&row, raw, n, dir));
    struct episode e = {.row = row, .tools = json_object_get(row, "tools"), .calls = json_array()};
    open_model(row);
    if (json_array_size(e.tools) == 0) e.tools = NULL;
    play(&e);
    json_t *const ours = result(&e), *const theirs = json_object_get(row, "verl");
    n_conversations++;
    n_turns += (int)e.turn;
    n_calls += (int)json_array_size(e.calls);
    n_refused += json_object_get(theirs, "refused") != NULL;
    if (!same(&e, ours, theirs)) show(&e, ours, theirs, no);
    json_decref(ours);
    json_decref(e.calls);
    tool_agent_destroy(e.agent);
    text_ids_free(&e.prompt);
    json_decref(row);
    return 0;
}

static void conversations_are_verls(void **state) {
    (void)state;
    char *const path = file_join(dir, "conversations.jsonl");
    log_set_level(LOG_ERROR); /* Llama has no rule of its own */
    if (file_each_line(path, one_conversation, NULL) < 0) fail_msg("%s", err_msg());
    print_message("%d conversations, %d turns, %d calls, %d refused; %d differ\n", n_conversations, n_turns, n_calls, n_refused,
                  n_differ);
    close_model();
    free(path);
    assert_true(n_conversations >= 30 && n_calls >= 20);
    assert_int_equal(n_differ, 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(conversations_are_verls)};
    if (argc > 1) dir = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
