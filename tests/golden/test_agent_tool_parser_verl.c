/* test_agent_tool_parser_verl.c - the tool parsers beside verl 0.9.1's on generated turns (tools/oracle_tool_parser.py).
 * With an argument it reads that file instead. */
#include "agent/tool_parser/tool_parser.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/map.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SHOWN = 5 };
static const char *path = FIXTURES "/agent/tool_parser.jsonl";
static struct map formats; /* name -> turns */
static int n_calls, n_differ;

static json_t *text_or_null(const char *s) { return s ? json_string(s) : json_null(); }

/* As the file has it: {"content", "calls": [[name, arguments, id]]}. */
static json_t *answer(const json_t *line) {
    const json_t *const text = json_object_get(line, "text");
    const struct tool_parser *const p = tool_parser_find(json_string_value(json_object_get(line, "format")));
    struct tool_turn t;
    assert_int_equal(tool_parser_parse(p, json_string_value(text), json_string_length(text), json_object_get(line, "tools"), &t),
                     0);
    json_t *const calls = json_array();
    for (int64_t i = 0; i < t.n_calls; i++)
        json_array_append_new(calls, json_pack("[o,o,o]", text_or_null(t.calls[i].name), text_or_null(t.calls[i].arguments),
                                               text_or_null(t.calls[i].id)));
    json_t *const out =
        json_pack("{s:o,s:o}", "content", json_stringn(t.content.p ? t.content.p : "", t.content.n), "calls", calls);
    n_calls += (int)t.n_calls;
    tool_turn_free(&t);
    return out;
}

static int one_turn(void *arg, char *raw, size_t n, int64_t no) {
    (void)arg;
    json_t *line;
    int64_t lines = 0;
    TRY(json_parse(&line, raw, n, path));
    json_t *const ours = answer(line), *const theirs = json_object_get(line, "verl");
    if (!json_equal(ours, theirs) && n_differ++ < SHOWN)
        fprintf(stderr, "line %d %s\n ours %s\n verl %s\n", (int)no, json_dumps(line, 0), json_dumps(ours, 0),
                json_dumps(theirs, 0));
    const char *const name = json_string_value(json_object_get(line, "format"));
    map_gets(&formats, name, &lines);
    map_set(&formats, name, strlen(name), lines + 1);
    json_decref(ours);
    json_decref(line);
    return 0;
}

static void turns_are_verls(void **state) {
    (void)state;
    if (file_each_line(path, one_turn, NULL) < 0) fail_msg("%s", err_msg());
    for (int64_t i = 0; i < formats.n; i++) print_message("%s %d, ", formats.entries[i].key, (int)formats.entries[i].value);
    print_message("turns, %d calls, %d differ\n", n_calls, n_differ);
    assert_int_equal(formats.n, 9);
    assert_int_equal(n_differ, 0);
    map_free(&formats);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(turns_are_verls)};
    if (argc > 1) path = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
