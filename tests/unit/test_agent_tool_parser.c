/* test_agent_tool_parser.c - calls of tools in a turn's text, by hand; tests/golden/test_agent_tool_parser_verl.c has verl's answers. */
#include "agent/tool_parser.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static struct tool_turn parse(const char *format, const char *text) {
    struct tool_turn t;
    assert_int_equal(tool_parser_parse(tool_parser_find(format), text, strlen(text), NULL, &t), 0);
    return t;
}

static void formats_have_names(void **state) {
    (void)state;
    assert_null(tool_parser_find("pythonic"));
    assert_string_equal(tool_parser_name(tool_parser_find("qwen")), "hermes");
    assert_null(tool_parser_stop_tokens(tool_parser_find("hermes"))[0]);
}

static void hermes_calls_and_what_is_broken(void **state) {
    (void)state;
    struct tool_turn t =
        parse("hermes", "a<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1.50,\"y\":\"\\u00e9\"}}\n</tool_call>b"
                        "<tool_call>{\"name\": \"g\"}</tool_call><tool_call>nothing</tool_call><tool_call>{");
    assert_int_equal(t.n_calls, 1);
    assert_string_equal(t.calls[0].name, "f");
    assert_string_equal(t.calls[0].arguments, "{\"x\": 1.5, \"y\": \"\xc3\xa9\"}");
    assert_null(t.calls[0].id);
    assert_string_equal(t.content.p, "ab<tool_call>{");
    assert_int_equal(t.n_malformed, 3);
    tool_turn_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formats_have_names),
        cmocka_unit_test(hermes_calls_and_what_is_broken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
