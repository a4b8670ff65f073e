/* test_agent_tools.c - tools in their processes: schemas, texts, state of an episode, and calls that fail, hang and end their
 * process beside others (tests/fault/faulty_tools.py). */
#include "agent/tools.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define DIR SOURCE_DIR "/tests/fault/"
#define LATEST_S 60.

static struct tools *make(const struct tools_config *c) {
    struct tools *t = NULL;
    setenv("PYTHONPATH", DIR, 1);
    if (tools_open(&t, c) < 0) fail_msg("%s", err_msg());
    return t;
}

static const struct tools_config FAULTY = {
    .function_tool_path = DIR "faulty_tools.py", .tool_config_path = DIR "faulty_tools.yaml", .timeout_s = 20};

static int64_t call(struct tools *t, const char *episode, const char *name, const char *arguments, const json_t *state) {
    int64_t ticket = -1;
    const struct tool_request r = {
        .episode = episode, .name = name, .arguments = arguments, .n_arguments = strlen(arguments), .extra_fields = state};
    if (tools_call(t, &r, &ticket) < 0) fail_msg("%s", err_msg());
    return ticket;
}

static struct tool_result receive(struct tools *t) {
    struct tool_result r = {0};
    if (tools_recv(t, LATEST_S, &r) != 1) fail_msg("no result: %s", err_msg());
    return r;
}

static void answers(struct tools *t, const char *name, const char *arguments, enum tool_status status, const char *text) {
    const int64_t ticket = call(t, "e", name, arguments, NULL);
    struct tool_result r = receive(t);
    assert_int_equal(r.ticket, ticket);
    if (r.status != status || strcmp(r.text, text) != 0)
        fail_msg("%s(%s): %s %s", name, arguments, tool_status_name(r.status), r.text);
    tool_result_free(&r);
}

static void prints(const json_t *v, const char *want) {
    char *s = json_dumps(v, JSON_COMPACT);
    assert_string_equal(s, want);
    free(s);
}

static void schemas_are_in_verls_order(void **state) {
    (void)state;
    struct tools *t = make(&FAULTY);
    const json_t *all = tools_schemas(t);
    prints(json_array_get(all, 0), "{\"type\":\"function\",\"function\":{\"name\":\"count\",\"description\":\"Counts.\"}}");
    prints(json_array_get(all, 1),
           "{\"type\":\"function\",\"function\":{\"name\":\"add\",\"description\":\"Adds two numbers.\",\"parameters\":{\"type\":"
           "\"object\",\"properties\":{\"a\":{\"type\":\"integer\",\"description\":\"One\"},\"b\":{\"type\":\"integer\","
           "\"description\":\"Another\"}},\"required\":[\"a\",\"b\"]}}}");
    json_t *names = json_pack("[s, s, i, s, s]", "where", "nothing", 3, "count", "where"), *got = tools_select(t, names);
    assert_int_equal(json_array_size(got), 2);
    assert_ptr_equal(json_array_get(got, 1), json_array_get(all, 0));
    json_decref(got);
    json_array_clear(names);
    assert_ptr_equal(got = tools_select(t, names), all);
    json_decref(got);
    json_array_append_new(names, json_string("nothing"));
    assert_int_equal(json_array_size(got = tools_select(t, names)), 0);
    json_decref(got);
    json_decref(names);
    assert_true(tools_want_agent_data(t, "count")); /* a class; `add` is a function */
    assert_false(tools_want_agent_data(t, "add") || tools_want_agent_data(t, "nothing"));
    tools_close(t);
}

static void results_are_texts(void **state) {
    (void)state;
    struct tools_config c = FAULTY;
    c.max_response_length = 8;
    struct tools *t = make(&c);
    const int64_t ticket = call(t, "e", "add", "{\"a\": 40, \"b\": 2}", NULL);
    struct tool_result r = receive(t);
    assert_int_equal(r.ticket, ticket);
    assert_string_equal(r.text, "42");
    assert_true(r.status == TOOL_OK && r.has_reward && r.reward == 0.5 && !r.truncated && r.seconds >= 0 && !r.set && !r.removed);
    tool_result_free(&r);
    answers(t, "fail", "{}", TOOL_ERROR, "Error executing tool 'fail': no such thing");
    answers(t, "fail", "{\"a\": 1}", TOOL_ERROR, "Error executing tool 'fail': fail() got an unexpected keyword argument 'a'");
    answers(t, "add", "{", TOOL_ARGUMENTS,
            "Invalid JSON in arguments for 'add': Expecting property name enclosed in double quotes: line 1 column 2 (char 1)");
    answers(t, "add", "\xff", TOOL_ARGUMENTS, "Invalid JSON in arguments for 'add': Expecting value: line 1 column 1 (char 0)");
    answers(t, "leave_politely", "{}", TOOL_ERROR, "Error executing tool 'leave_politely': it called exit(4)");
    answers(t, "odd", "{\"kind\": \"none\"}", TOOL_OK, "None");
    answers(t, "odd", "{\"kind\": \"dict\"}", TOOL_OK, "{\"\xc3\xbc\": 1}");
    answers(t, "odd", "{\"kind\": \"surrogate\"}", TOOL_OK, "a?b");
    answers(t, "odd", "{\"kind\": \"reward\"}", TOOL_ERROR, "Error executing tool 'odd': could not convert string to float: 'b'");
    answers(t, "odd", "{\"kind\": \"set\"}", TOOL_ERROR, "Error executing tool 'odd': Object of type set is not JSON serializable");
    answers(t, "odd", "{\"kind\": \"image\"}", TOOL_ERROR,
            "Error executing tool 'odd': it answered with images or video, and the model reads text");
    answers(t, "odd", "{\"kind\": \"text\"}", TOOL_ERROR, "Error executing tool 'odd': object of type 'int' has no len()");
    answers(t, "long", "{\"n\": 10000000}", TOOL_OK, "\xc3\xa4xxx...(truncated)...xxxz");
    answers(t, "long", "{\"n\": 8}", TOOL_OK, "\xc3\xa4xxxxxxz");
    answers(t, "flood", "{}", TOOL_OK, "dry");
    call(t, "e", "odd", "{\"kind\": \"nul\"}", NULL);
    r = receive(t);
    assert_true(r.n_text == 3 && memcmp(r.text, "a\0b", 4) == 0);
    tool_result_free(&r);
    call(t, "e", "odd", "{\"kind\": \"nan\"}", NULL);
    r = receive(t);
    assert_true(r.status == TOOL_OK && !r.has_reward);
    tool_result_free(&r);
    call(t, "e", "nothing", "{}", NULL);
    r = receive(t);
    assert_int_equal(r.status, TOOL_UNKNOWN);
    assert_memory_equal(r.text, "Unknown function 'nothing'. Available tools: ['count', 'add', 'block', ", 68);
    tool_result_free(&r);
    tools_close(t);
}

/* Rows' arguments reach create; calls of an episode share their state, and another episode has its own. */
static void an_episode_has_a_state(void **state) {
    (void)state;
    struct tools_config c = FAULTY;
    c.n_processes = 2;
    struct tools *t = make(&c);
    json_t *fields = json_pack("{s:i, s:i}", "n", 5, "once", 1);
    static const char *const texts[] = {"a 6 0", "a 7 0"};
    for (int i = 0; i < 2; i++) {
        call(t, "a", "count", "{}", fields);
        struct tool_result r = receive(t);
        assert_string_equal(r.text, texts[i]);
        assert_true(r.has_reward && r.reward == 1);
        tool_result_apply(&r, fields);
        tool_result_free(&r);
    }
    prints(fields, "{\"n\":7}");
    call(t, "b", "count", "{}", NULL);
    struct tool_result r = receive(t);
    assert_string_equal(r.text, "b 1 0");
    tool_result_free(&r);
    /* the process of a ends, and its state comes along with the next request */
    answers(t, "leave", "{}", TOOL_ERROR, "Error executing tool 'leave': it ended its process");
    call(t, "a", "leave", "{}", NULL);
    r = receive(t);
    tool_result_free(&r);
    call(t, "a", "count", "{\"fail\": true}", fields);
    r = receive(t);
    assert_int_equal(r.status, TOOL_ERROR);
    tool_result_apply(&r, fields);
    tool_result_free(&r);
    prints(fields, "{\"n\":8}");
    assert_int_equal(tools_end_episode(t, "a"), 0);
    assert_int_equal(tools_pending(t), 0);
    call(t, "a", "count", "{}", NULL);
    r = receive(t);
    assert_string_equal(r.text, "a 1 0");
    tool_result_free(&r);
    json_decref(fields);
    tools_close(t);
}

static void create_execute_release(void **state) {
    (void)state;
    struct tools *t = make(&FAULTY);
    json_t *kwargs = json_pack("{s:{s:{s:i}}}", "count", "create_kwargs", "x", 1);
    int64_t ticket;
    const struct tool_request q = {
        .episode = "a", .name = "count", .arguments = "{\"fail\": 1}", .n_arguments = 11, .tools_kwargs = kwargs};
    assert_int_equal(tools_call(t, &q, &ticket), 0);
    struct tool_result r = receive(t);
    assert_string_equal(r.text, "Error executing tool 'count': counted and failed");
    assert_true(r.has_reward && r.reward == 0);
    tool_result_free(&r);
    answers(t, "count", "{\"lives\": 1}", TOOL_OK, "create{'create_kwargs': {'x': 1}} release create{'create_kwargs': {}}");
    for (int i = 0; i < 4; i++) answers(t, "add", "{\"a\": 1, \"b\": 1}", TOOL_OK, "2");
    for (int i = 0; i < 4; i++) { /* release raises at last: the result stays */
        call(t, "a", "count", "{}", NULL);
        r = receive(t);
        assert_int_equal(r.status, TOOL_OK);
        tool_result_free(&r);
    }
    json_decref(kwargs);
    tools_close(t);
}

/* Calls that hang, one that ends its process, and others beside them in the same two processes. */
static void a_hung_call_costs_no_other(void **state) {
    (void)state;
    struct tools_config c = FAULTY;
    c.n_processes = 2;
    c.timeout_s = 1;
    struct tools *t = make(&c);
    static const char *const hung[][2] = {{"hang", "{}"},       {"hang", "{\"c\": true}"},
                                          {"hang_async", "{}"}, {"count", "{\"wait\": 1}"},
                                          {"block", "{}"},      {"leave", "{}"}};
    enum { HUNG = sizeof hung / sizeof *hung, OTHERS = 40 };
    const double begun = clock_now();
    for (int i = 0; i < HUNG; i++) {
        char *episode = xasprintf("hung %d", i);
        call(t, episode, hung[i][0], hung[i][1], NULL);
        free(episode);
    }
    for (int i = 0; i < OTHERS; i++) {
        char *episode = xasprintf("other %d", i);
        call(t, episode, "nap", "{\"s\": 0.1}", NULL);
        free(episode);
    }
    int n[TOOL_N_STATUS] = {0};
    while (tools_pending(t) > 0) {
        struct tool_result r = receive(t);
        n[r.status]++;
        if (r.status == TOOL_TIMEOUT) assert_non_null(strstr(r.text, "': it had no answer within 1 s"));
        if (r.status == TOOL_ERROR) assert_string_equal(r.text, "Error executing tool 'leave': it ended its process");
        assert_true((r.status == TOOL_OK) == (strcmp(r.text, "rested") == 0));
        tool_result_free(&r);
    }
    assert_int_equal(n[TOOL_OK], OTHERS);
    assert_int_equal(n[TOOL_TIMEOUT], HUNG - 1);
    assert_int_equal(n[TOOL_ERROR], 1);
    assert_true(clock_now() - begun < 30);
    answers(t, "add", "{\"a\": 1, \"b\": 1}", TOOL_OK, "2");
    tools_close(t);
}

static void thousands_are_under_way(void **state) {
    (void)state;
    struct tools_config c = FAULTY;
    c.n_processes = 2;
    struct tools *t = make(&c);
    enum { N = 1000 };
    const double begun = clock_now();
    for (int i = 0; i < N; i++) {
        char *episode = xasprintf("%d", i);
        call(t, episode, "nap", "{\"s\": 0.3}", NULL);
        free(episode);
    }
    for (int i = 0; i < N; i++) {
        struct tool_result r = receive(t);
        assert_string_equal(r.text, "rested");
        tool_result_free(&r);
    }
    assert_int_equal(tools_pending(t), 0);
    assert_true(clock_now() - begun < 20); /* one after another: 300 s */
    struct tool_result none;
    assert_int_equal(tools_recv(t, 0, &none), 0);
    call(t, "a", "nap", "{\"s\": 100}", NULL);
    tools_cancel(t);
    assert_int_equal(tools_pending(t), 0);
    answers(t, "add", "{\"a\": 1, \"b\": 1}", TOOL_OK, "2");
    tools_close(t);
}

static struct tool_result said(struct tools *t, const char *episode, const char *name, const char *role, const char *content) {
    json_t *kwargs = json_pack("{s:s, s:s}", "name", name, "ground_truth", "72");
    json_t *messages = json_pack("[{s:s, s:s}, {s:s, s:s}]", "role", "user", "content", "?", "role", role, "content", content);
    int64_t ticket;
    assert_int_equal(tools_check_interaction(t, kwargs), 0);
    const struct interaction_request q = {.episode = episode, .messages = messages, .interaction_kwargs = kwargs};
    assert_int_equal(tools_interact(t, &q, &ticket), 0);
    json_decref(kwargs);
    json_decref(messages);
    struct tool_result r = receive(t);
    assert_int_equal(r.ticket, ticket);
    return r;
}

static void interactions_answer(void **state) {
    (void)state;
    struct tools *t = make(&(struct tools_config){.interaction_config_path = DIR "faulty_interactions.yaml"});
    prints(tools_interactions(t), "[\"gsm8k\",\"weather\"]");
    struct tool_result r;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    /* the grader is this program, which with a sanitizer needs more than a helper's address space */
    r = said(t, "a", "gsm8k", "assistant", "#### 71");
    assert_string_equal(r.text, "Your response is incorrect! You need to reflect on your answer and try again.");
    assert_true(!r.stop && r.has_reward && r.reward == 0);
    tool_result_free(&r);
    r = said(t, "a", "gsm8k", "assistant", "#### 72");
    assert_string_equal(r.text, "Your response is correct!");
    assert_true(r.stop && r.reward == 1);
    tool_result_free(&r);
    assert_int_equal(tools_end_episode(t, "a"), 0);
#endif
    r = said(t, "b", "weather", "tool", "sunny");
    assert_string_equal(r.text, "Thank you for your weather query!");
    tool_result_free(&r);
    json_t *kwargs = json_pack("{s:s}", "name", "other");
    assert_int_equal(tools_check_interaction(t, kwargs), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "[\"gsm8k\", \"weather\"]"));
    assert_int_equal(tools_check_interaction(t, NULL), ERR_INPUT);
    json_decref(kwargs);
    tools_close(t);
}

static void refused(const struct tools_config *c, const char *why) {
    struct tools *t = NULL;
    assert_int_equal(tools_open(&t, c), ERR_INPUT);
    if (!strstr(err_msg(), why)) fail_msg("%s", err_msg());
}

static void what_does_not_load_is_refused(void **state) {
    (void)state;
    refused(&(struct tools_config){.function_tool_path = "nowhere.py"}, "function_tool_path=nowhere.py: the file does not exist");
    refused(&(struct tools_config){.tool_config_path = DIR "faulty_interactions.yaml"}, "has no list 'tools'");
    refused(&(struct tools_config){.function_tool_path = DIR "faulty_tools.yaml"}, "function_tool_path=" DIR "faulty_tools.yaml: ");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schemas_are_in_verls_order), cmocka_unit_test(results_are_texts),
        cmocka_unit_test(an_episode_has_a_state),     cmocka_unit_test(create_execute_release),
        cmocka_unit_test(a_hung_call_costs_no_other), cmocka_unit_test(thousands_are_under_way),
        cmocka_unit_test(interactions_answer),        cmocka_unit_test(what_does_not_load_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
