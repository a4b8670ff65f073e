/* test_agent_tool_agent.c - the state machine of an episode: what comes after each turn, which tokens the response has and who
 * wrote them, what a limit drops, against verl's ToolAgentLoop as it is written. */
#include "agent/tool_agent.h"

#include "base/err.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define CALL(args) "<tool_call>{\"name\": \"add\", \"arguments\": " args "}</tool_call>"

/* An episode that is driven by hand; a turn's ids are consecutive numbers. */
static struct tool_agent *a;
static struct tool_agent_rules rules;
static int32_t next_id;

/* What follows is of an episode that was kept with a checkpoint, as text, and goes on. */
static void keep(void) {
    int64_t n;
    const enum tool_agent_next waits = tool_agent_waits_for(a);
    const int32_t *ids = tool_agent_ids(a, &n);
    json_t *state = tool_agent_state(a), *read;
    char *text = json_dumps(state, 0);
    struct tool_agent *b;
    assert_non_null(text);
    read = json_loads(text, JSON_ALLOW_NUL, NULL);
    assert_int_equal(tool_agent_restore(&b, &rules, read, tool_agent_tools(a), ids, n), 0);
    tool_agent_destroy(a);
    a = b;
    assert_int_equal(tool_agent_waits_for(a), waits);
    json_t *again = tool_agent_state(a);
    assert_true(json_equal(again, state));
    json_decref(again);
    json_decref(state);
    json_decref(read);
    free(text);
}

static void begin(struct tool_agent_rules r) {
    json_t *messages = json_pack("[{s:s, s:s}]", "role", "user", "content", "?");
    r.parser = tool_parser_find("hermes");
    if (r.max_parallel_calls == 0) r.max_parallel_calls = 1;
    tool_agent_create(&a, &r, messages, NULL);
    rules = r;
    json_decref(messages);
    next_id = 100;
}

static enum tool_agent_next draw(const char *text, int64_t n) {
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    enum tool_agent_next next;
    for (int64_t i = 0; i < n; i++) ids[i] = next_id++;
    const struct tool_agent_turn t = {ids, n, text, strlen(text), "plain", 5};
    assert_int_equal(tool_agent_drawn(a, &t, &next), 0);
    free(ids);
    keep();
    return next;
}

static enum tool_agent_next result(int64_t k, const char *text) {
    const struct tool_agent_result r = {
        .text = text, .n_text = strlen(text), .status = "ok", .seconds = 1 + (double)k, .reward = 0.5, .has_reward = k == 0};
    const enum tool_agent_next next = tool_agent_result(a, k, &r);
    if (next != TOOL_AGENT_JOIN) keep(); /* else it is joined at once */
    return next;
}

static enum tool_agent_next joined(int64_t removed, int64_t n) {
    int32_t ids[64];
    for (int64_t i = 0; i < n; i++) ids[i] = -1 - (int32_t)i;
    const enum tool_agent_next next = tool_agent_join(a, removed, ids, n);
    keep();
    return next;
}

/* The response's segments, "3p 2e": tokens of the policy, of an environment. */
static void expect(enum tool_agent_end end, int64_t turns, const char *segments) {
    char said[256] = "";
    int64_t n, n_ids, sum = 0;
    const int32_t *s = tool_agent_segments(a, &n), *ids = tool_agent_ids(a, &n_ids);
    for (int64_t k = 0; k < n; k++) {
        snprintf(said + strlen(said), sizeof said - strlen(said), "%s%d%c", k ? " " : "", s[2 * k], s[2 * k + 1] ? 'e' : 'p');
        for (int64_t t = sum; t < sum + s[2 * k]; t++) assert_int_equal(ids[t] < 0, s[2 * k + 1] == SEGMENT_ENVIRONMENT);
        sum += s[2 * k];
    }
    assert_string_equal(said, segments);
    assert_int_equal(sum, n_ids);
    assert_string_equal(tool_agent_end_name(tool_agent_ended(a)), tool_agent_end_name(end));
    assert_int_equal(tool_agent_num_turns(a), turns);
    tool_agent_destroy(a);
    a = NULL;
}

static void two_turns(void **state) {
    (void)state;
    int64_t n, n_old;
    begin((struct tool_agent_rules){.response_length = 50});
    assert_int_equal(draw("hm " CALL("{\"x\": 1}") "<|im_end|>", 5), TOOL_AGENT_TOOLS);
    const struct tool_call *calls = tool_agent_calls(a, &n);
    assert_int_equal(n, 1);
    assert_string_equal(calls[0].name, "add");
    assert_string_equal(calls[0].arguments, "{\"x\": 1}");
    assert_int_equal(result(0, "4\xFF"), TOOL_AGENT_JOIN); /* bytes that are no text */
    json_t *expected = json_pack("[{s:s, s:s}, {s:s, s:s, s:[{s:s, s:{s:s, s:{s:i}}}]}, {s:s, s:s}]", "role", "user", "content",
                                 "?", "role", "assistant", "content", "hm <|im_end|>", "tool_calls", "type", "function", "function",
                                 "name", "add", "arguments", "x", 1, "role", "tool", "content", "4\xEF\xBF\xBD");
    assert_true(json_equal(tool_agent_messages(a, &n_old), expected));
    assert_int_equal(n_old, 2);
    json_decref(expected);
    assert_int_equal(joined(0, 7), TOOL_AGENT_GENERATE);
    assert_int_equal(draw("4<|im_end|>", 2), TOOL_AGENT_END);
    json_t *episode = tool_agent_episode(a),
           *as = json_pack("{s:i, s:s, s:i, s:i, s:[{s:i, s:s, s:s, s:s, s:s, s:f, s:f, s:b}]}", "turns", 4, "end", "stop",
                           "malformed", 0, "dropped", 0, "calls", "segment", 0, "name", "add", "arguments", "{\"x\": 1}", "result",
                           "4\xEF\xBF\xBD", "status", "ok", "seconds", 1., "reward", 0.5, "truncated", 0);
    assert_true(json_equal(episode, as));
    json_decref(episode);
    json_decref(as);
    assert_int_equal(json_array_size(tool_agent_tool_rewards(a)), 1);
    expect(TOOL_AGENT_STOP, 4, "5p 7e 2p");
}

/* Results come in any order and are appended in the calls'; calls beyond the limit are not run. */
static void parallel(void **state) {
    (void)state;
    int64_t n;
    begin((struct tool_agent_rules){.response_length = 50, .max_parallel_calls = 2});
    assert_int_equal(draw(CALL("{}") CALL("[1]") CALL("{}") "<tool_call>{</tool_call>", 4), TOOL_AGENT_TOOLS);
    assert_int_equal(result(1, "second"), TOOL_AGENT_TOOLS);
    assert_int_equal(result(0, "first"), TOOL_AGENT_JOIN);
    const json_t *messages = tool_agent_messages(a, &n);
    assert_int_equal(json_array_size(messages), 4);
    assert_string_equal(json_string_value(json_object_get(json_array_get(messages, 2), "content")), "first");
    assert_string_equal(json_string_value(json_object_get(json_array_get(messages, 3), "content")), "second");
    /* arguments that are no object stay text */
    const json_t *f = json_object_get(json_array_get(json_object_get(json_array_get(messages, 1), "tool_calls"), 1), "function");
    assert_string_equal(json_string_value(json_object_get(f, "arguments")), "[1]");
    assert_true(tool_agent_tool_seconds(a) == 2); /* the slowest */
    json_t *episode = tool_agent_episode(a);
    assert_int_equal(json_integer_value(json_object_get(episode, "malformed")), 1);
    assert_int_equal(json_integer_value(json_object_get(episode, "dropped")), 1);
    assert_int_equal(json_array_size(json_object_get(episode, "calls")), 2);
    json_decref(episode);
    assert_int_equal(joined(1, 3), TOOL_AGENT_GENERATE); /* a family's rule takes the stop token away */
    assert_int_equal(draw("done", 1), TOOL_AGENT_END);
    expect(TOOL_AGENT_STOP, 4, "3p 3e 1p");
}

static void limits(void **state) {
    (void)state;
    begin((struct tool_agent_rules){.response_length = 5}); /* a turn at the limit is not parsed, and what is beyond it is cut */
    assert_int_equal(draw(CALL("{}"), 6), TOOL_AGENT_END);
    expect(TOOL_AGENT_LENGTH, 2, "5p");
    begin((struct tool_agent_rules){.response_length = 50, .max_assistant_turns = 1}); /* no tool ever runs */
    assert_int_equal(draw(CALL("{}"), 6), TOOL_AGENT_END);
    expect(TOOL_AGENT_ASSISTANT_TURNS, 2, "6p");
    begin((struct tool_agent_rules){.response_length = 50, .max_user_turns = 1}); /* the last output is not parsed */
    assert_int_equal(draw(CALL("{}"), 6), TOOL_AGENT_TOOLS);
    result(0, "x");
    assert_int_equal(joined(0, 2), TOOL_AGENT_GENERATE);
    assert_int_equal(draw(CALL("{}"), 1), TOOL_AGENT_END);
    expect(TOOL_AGENT_USER_TURNS, 4, "6p 2e 1p");
    begin((struct tool_agent_rules){.response_length = 10}); /* results that reach the limit are dropped; their rewards count */
    assert_int_equal(draw(CALL("{}"), 6), TOOL_AGENT_TOOLS);
    result(0, "x");
    assert_int_equal(joined(1, 5), TOOL_AGENT_END);
    assert_int_equal(json_array_size(tool_agent_tool_rewards(a)), 1);
    expect(TOOL_AGENT_LENGTH, 2, "6p");
    begin((struct tool_agent_rules){.response_length = 10}); /* a later turn may be drawn beyond it */
    draw(CALL("{}"), 6);
    result(0, "x");
    assert_int_equal(joined(0, 3), TOOL_AGENT_GENERATE);
    assert_int_equal(draw("y", 8), TOOL_AGENT_END);
    expect(TOOL_AGENT_LENGTH, 4, "6p 3e 1p");
    begin((struct tool_agent_rules){.response_length = 10});
    draw(CALL("{}"), 6);
    result(0, "x");
    tool_agent_fail(a, TOOL_AGENT_REFUSED, "two results");
    assert_string_equal(tool_agent_reason(a), "two results");
    expect(TOOL_AGENT_REFUSED, 2, "6p");
}

static void interactions(void **state) {
    (void)state;
    int64_t n;
    begin((struct tool_agent_rules){.response_length = 20, .interacts = true});
    assert_int_equal(draw("4<|im_end|>", 3), TOOL_AGENT_INTERACT);
    const struct tool_agent_reply wrong = {"wrong", 5, .has_score = true, .score = 0.25}, right = {"right", 5, .stop = true};
    assert_int_equal(tool_agent_replied(a, &wrong), TOOL_AGENT_JOIN);
    const json_t *messages = tool_agent_messages(a, &n);
    assert_string_equal(json_string_value(json_object_get(json_array_get(messages, 1), "content")), "plain");
    assert_string_equal(json_string_value(json_object_get(json_array_get(messages, 2), "role")), "user");
    assert_int_equal(joined(0, 4), TOOL_AGENT_GENERATE);
    assert_int_equal(draw("5<|im_end|>", 3), TOOL_AGENT_INTERACT);
    assert_int_equal(tool_agent_replied(a, &right), TOOL_AGENT_JOIN);
    assert_int_equal(joined(0, 12), TOOL_AGENT_END); /* appended though it stops, and cut */
    assert_int_equal(json_array_size(tool_agent_turn_scores(a)), 1);
    expect(TOOL_AGENT_STOP, 5, "3p 4e 3p 10e");
    begin((struct tool_agent_rules){.response_length = 6, .interacts = true});
    draw("4", 3);
    tool_agent_replied(a, &wrong);
    assert_int_equal(joined(0, 3), TOOL_AGENT_END);
    expect(TOOL_AGENT_LENGTH, 3, "3p 3e");
}

/* A state that lacks a member, or has another in its place, is refused by name. */
static void damaged(void **unused) {
    (void)unused;
    int64_t n;
    const char *key;
    json_t *v;
    begin((struct tool_agent_rules){.response_length = 50, .max_parallel_calls = 2});
    draw(CALL("{}") CALL("{}"), 4);
    assert_false(tool_agent_answered(a, 1));
    result(1, "second");
    assert_true(tool_agent_answered(a, 1) && !tool_agent_answered(a, 0));
    const int32_t *ids = tool_agent_ids(a, &n);
    json_t *state = tool_agent_state(a);
    json_object_foreach(state, key, v) {
        struct tool_agent *b;
        json_t *less = json_copy(state);
        json_object_set_new(less, key, json_string("no"));
        if (strcmp(key, "calls") != 0) assert_int_equal(tool_agent_restore(&b, &rules, less, NULL, ids, n), ERR_FORMAT);
        json_decref(less);
    }
    struct tool_agent *b;
    assert_int_equal(tool_agent_restore(&b, &rules, state, NULL, ids, n - 1), ERR_FORMAT); /* fewer ids than it had */
    json_array_append_new(json_object_get(state, "calls"), json_array());
    assert_int_equal(tool_agent_restore(&b, &rules, state, NULL, ids, n), ERR_FORMAT);
    json_decref(state);
    assert_int_equal(result(0, "first"), TOOL_AGENT_JOIN);
    assert_int_equal(joined(0, 3), TOOL_AGENT_GENERATE);
    expect(TOOL_AGENT_OPEN, 3, "4p 3e");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(two_turns), cmocka_unit_test(parallel), cmocka_unit_test(limits),
                                       cmocka_unit_test(interactions), cmocka_unit_test(damaged)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
