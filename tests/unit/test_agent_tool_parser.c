/* test_agent_tool_parser.c - calls of tools by hand: Llama's format, what is counted as malformed, names, hostile turns.
 * tests/golden/test_agent_tool_parser_verl.c has verl's own answers. */
#include "agent/tool_parser/tool_parser.h"
#include "base/err.h"
#include "base/file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static const char *const names[] = {"hermes",  "qwen3_coder", "gpt-oss",     "glm",    "seed",
                                    "minimax", "kimi",        "deepseek_v4", "gemma4", "llama3_json"};
enum { N_NAMES = sizeof names / sizeof *names };

static struct tool_turn parse(const char *format, const char *text) {
    struct tool_turn t;
    assert_int_equal(tool_parser_parse(tool_parser_find(format), text, strlen(text), NULL, &t), 0);
    return t;
}

/* "content|name arguments id|...|malformed" */
static void expect(const char *format, const char *text, const char *want) {
    struct tool_turn t = parse(format, text);
    struct buf got = {0};
    buf_add(&got, t.content.p, t.content.n);
    for (int64_t i = 0; i < t.n_calls; i++)
        buf_addf(&got, "|%s %s %s", t.calls[i].name, t.calls[i].arguments, t.calls[i].id ? t.calls[i].id : "-");
    buf_addf(&got, "|%d", (int)t.n_malformed);
    assert_string_equal(got.p, want);
    buf_free(&got);
    tool_turn_free(&t);
}

static void formats_have_names(void **state) {
    (void)state;
    struct buf all = {0};
    assert_null(tool_parser_find("pythonic"));
    assert_string_equal(tool_parser_name(tool_parser_find("qwen")), "hermes");
    for (int i = 0; i < N_NAMES; i++) {
        assert_string_equal(tool_parser_name(tool_parser_find(names[i])), names[i]);
        buf_addf(&all, "%s%s", i ? ", " : "", names[i]);
    }
    assert_string_equal(tool_parser_names(), all.p);
    buf_free(&all);
    assert_null(tool_parser_stop_tokens(tool_parser_find("hermes"))[0]);
    assert_string_equal(tool_parser_stop_tokens(tool_parser_find("kimi"))[0], "<|im_end|>");
    assert_string_equal(tool_parser_stop_tokens(tool_parser_find("gemma4"))[0], "<tool_call|>");
    assert_null(tool_parser_stop_tokens(tool_parser_find("gemma4"))[1]);
}

static void lost_calls_are_counted(void **state) {
    (void)state;
    expect("hermes",
           "a<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1.50,\"y\":\"\\u00e9\"}}\n</tool_call>b"
           "<tool_call>{\"name\": \"g\"}</tool_call><tool_call>nothing</tool_call><tool_call>{",
           "ab<tool_call>{|f {\"x\": 1.5, \"y\": \"\xc3\xa9\"} -|3");
    expect("qwen3_coder", "<tool_call><function=f><parameter=x>1</parameter>", "|f {\"x\": \"1\"} -|0");
    expect("qwen3_coder", "<tool_call><function=f</tool_call><tool_call></tool_call>", "|2");
    expect("gpt-oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
           "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>|1");
    expect("glm", "<tool_call>f</tool_call><tool_call>g", "|f {} -|1");
    expect("glm", "<tool_call>f", "<tool_call>f|1");
    expect("seed", "<seed:tool_call>f</seed:tool_call>", "|1");
    expect("minimax", "<minimax:tool_call><invoke name=\"f\"></invoke></minimax:tool_call><minimax:tool_call>x</minimax:tool_call>",
           "|f {} -|1");
    expect("kimi", "a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[1]<|tool_call_end|>",
           "a|functions.f:0 {} functions.f:0|1");
    expect("gemma4", "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{", "|f {\"a\": 1} -|1");
    expect("llama3_json", "{\"name\": 1}", "{\"name\": 1}|1");
}

static void llama_calls(void **state) {
    (void)state;
    expect("llama3_json", "{\"name\": \"f\", \"parameters\": {\"x\": [1, null]}}<|eom_id|>", "|f {\"x\": [1, null]} -|0");
    expect("llama3_json", "\n {\"type\": \"function\", \"name\": \"f\", \"arguments\": {}}<|eot_id|>", "|f {} -|0");
    expect("llama3_json", "so:<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}<|eom_id|>",
           "so:|f {} -|g {} -|0");
    expect("llama3_json", "<|python_tag|>brave_search.call(query=\"a (b)\", k=\"2\")<|eom_id|>",
           "|brave_search {\"query\": \"a (b)\", \"k\": \"2\"} -|0");
    expect("llama3_json", "<|python_tag|>print(1)<|eom_id|>", "<|python_tag|>print(1)<|eom_id|>|1");
    expect("llama3_json", "{\"name\": \"f\", \"parameters\": {}} and more", "{\"name\": \"f\", \"parameters\": {}} and more|1");
    expect("llama3_json", "It is {\"name\": \"f\", \"parameters\": {}}<|eot_id|>",
           "It is {\"name\": \"f\", \"parameters\": {}}<|eot_id|>|0");
    expect("llama3_json", "", "|0");
}

static void differences_from_verl(void **state) {
    (void)state;
    json_t *const tools =
        json_loads("[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"properties\": {\"x\": "
                   "{\"type\": \"array\"}}}}}]",
                   0, NULL);
    const char named[] = "<tool_call><function=f><parameter=x>['\\N{BULLET}']</parameter></function></tool_call>";
    struct tool_turn t;
    tool_parser_parse(tool_parser_find("qwen3_coder"), named, sizeof named - 1, tools, &t);
    assert_string_equal(t.calls[0].arguments, "{\"x\": \"['\\\\N{BULLET}']\"}");
    tool_turn_free(&t);
    json_decref(tools);
    for (int depth = 940; depth <= 960; depth += 20) {
        struct buf text = {0};
        buf_adds(&text, "<tool_call>{\"name\": \"f\", \"arguments\": ");
        for (int i = 0; i < depth; i++) buf_addc(&text, '[');
        for (int i = 0; i < depth; i++) buf_addc(&text, ']');
        buf_adds(&text, "}</tool_call>");
        t = parse("hermes", text.p);
        assert_int_equal(t.n_calls, depth == 940);
        tool_turn_free(&t);
        buf_free(&text);
    }
}

/* A turn of ids: special tokens stay, the pad token goes where verl takes it out. */
static void turns_of_ids(void **state) {
    (void)state;
    static const char json[] =
        "{\"added_tokens\": [{\"id\": 1, \"content\": \"<pad>\", \"special\": true}, {\"id\": 2, \"content\": \"<|call|>\", "
        "\"special\": true}],"
        "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}, \"decoder\": {\"type\": \"ByteLevel\"},"
        "\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}, \"merges\": []}}";
    static const int32_t ids[] = {0, 1, 0, 2};
    char dir[] = "/tmp/verlc_tool_parser_XXXXXX";
    assert_non_null(mkdtemp(dir));
    char *const file = file_join(dir, "tokenizer.json"), *const config = file_join(dir, "tokenizer_config.json");
    assert_int_equal(file_write_atomic(file, json, sizeof json - 1), 0);
    assert_int_equal(file_write_atomic(config, "{\"pad_token\": \"<pad>\"}", 22), 0);
    struct tokenizer *tok;
    if (tokenizer_open(&tok, dir) < 0) fail_msg("%s", err_msg());
    for (int i = 0; i < N_NAMES; i++) {
        const bool drops =
            strcmp(names[i], "gpt-oss") == 0 || strcmp(names[i], "deepseek_v4") == 0 || strcmp(names[i], "gemma4") == 0;
        struct buf text = {0};
        assert_int_equal(tool_parser_text(tool_parser_find(names[i]), tok, ids, 4, &text), 0);
        assert_string_equal(text.p, drops ? "aa<|call|>" : "a<pad>a<|call|>");
        buf_free(&text);
    }
    tokenizer_close(tok);
    file_remove_tree(dir);
    free(file);
    free(config);
}

/* ---- hostile turns ---- */

#define DSML       \
    "\xef\xbd\x9c" \
    "DSML"         \
    "\xef\xbd\x9c"
static const struct hostile {
    const char *format, *head, *unit, *tail; /* head, as many units as there is room for, tail */
} hostile[] = {
    {"hermes", "", "<tool_call>", ""},
    {"hermes", "</tool_call>", "<tool_call>{", ""},
    {"hermes", "", "<tool_call>{\"name\": \"f\", \"arguments\": 1}</tool_call>", ""},
    {"hermes", "<tool_call>{\"name\": \"f\", \"arguments\": [", "1.1,", "1]}</tool_call>"},
    {"hermes", "<tool_call>{\"name\": \"f\", \"arguments\": [", "1.2345678901234567e-5,", "1]}</tool_call>"},
    {"hermes", "<tool_call>{\"name\": \"f\", \"arguments\": \"", "\\u00e9", "\"}</tool_call>"},
    {"hermes", "<tool_call>{\"name\": \"f\", \"arguments\": [", "{\"a\": {}},", "1]}</tool_call>"},
    {"hermes", "<tool_call>{\"name\": \"f\", \"arguments\": ", "[[[{\"a\":", "</tool_call>"},
    {"qwen3_coder", "", "<tool_call><function=", ""},
    {"qwen3_coder", "<tool_call>", "<function=f><parameter=", ""},
    {"qwen3_coder", "<tool_call><function=f>", "<parameter=x>", ""},
    {"qwen3_coder", "<tool_call><function=f>", "<parameter=x>null</parameter>", ""},
    {"qwen3_coder", "<tool_call><function=f><parameter=a>[", "'\\x41' \"b\",", "]"},
    {"qwen3_coder", "<tool_call><function=f><parameter=a>", "[", ""},
    {"qwen3_coder", "<tool_call><function=f><parameter=a>[", "((((((", "]"},
    {"qwen3_coder", "<tool_call><function=f><parameter=a>((((((((((((((((((((", " ", "1"},
    {"qwen3_coder", "<tool_call><function=f><parameter=a>[", "-1.5e10,", "]"},
    {"qwen3_coder", "<tool_call><function=f><parameter=a>{", "1:2,", "}"},
    {"qwen3_coder", "<tool_call><function=f><parameter=a>[", "{1,(2,3)},", "]"},
    {"qwen3_coder", "<tool_call><function=f><parameter=a>", "\\\n", "1"},
    {"qwen3_coder", "<tool_call><function=f><parameter=a>", "# c\n", "1"},
    {"qwen3_coder", "<tool_call><function=f><parameter=a>0x", "ffffffff", ""},
    {"qwen3_coder", "<tool_call><function=f><parameter=i>", "99999999", ""},
    {"qwen3_coder", "<tool_call><function=f><parameter=n>", "9_9", ""},
    {"qwen3_coder", "<tool_call><function=f>", "<parameter=n>1e308</parameter>", ""},
    {"gpt-oss", "", "<|start|>assistant<|channel|> to=functions.", ""},
    {"gpt-oss", "<|start|>assistant<|channel|>", " to=functions.", " <|constrain|>json<|message|>{}<|call|>"},
    {"gpt-oss", "", "<|start|>assistant<|channel|> to=functions.f <|constrain|>json<|message|>", ""},
    {"gpt-oss", "", "<|channel|>analysis<|message|>", ""},
    {"glm", "</tool_call><tool_call>f", "<arg_key>", "</tool_call>"},
    {"glm", "<tool_call>f<arg_key>", "</arg_key>   ", "<arg_value></arg_value></tool_call>"},
    {"glm", "<tool_call>f", "<arg_key>k</arg_key><arg_value>1</arg_value>", "</tool_call>"},
    {"glm", "<tool_call>f", "<arg_key>k</arg_key><arg_value>", "</tool_call>"},
    {"seed", "<seed:tool_call>", "<function=", "</seed:tool_call>"},
    {"seed", "<seed:tool_call>", "<function=f>", "</seed:tool_call>"},
    {"seed", "<seed:tool_call><function=f>", "<parameter=", "</function></seed:tool_call>"},
    {"minimax", "<minimax:tool_call>", "<invoke name=", "</minimax:tool_call>"},
    {"minimax", "<minimax:tool_call>", "<invoke name=\"f\">", "</minimax:tool_call>"},
    {"minimax", "<minimax:tool_call>", "<invoke name=\"f\"></invoke>", "</minimax:tool_call>"},
    {"minimax", "</minimax:tool_call>", "<minimax:tool_call>", ""},
    {"kimi", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", ""},
    {"kimi", "<|tool_calls_section_begin|>", "<|tool_call_begin|><|tool_call_argument_begin|>", ""},
    {"kimi", "<|tool_calls_section_begin|>", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", ""},
    {"deepseek_v4", "<" DSML "tool_calls>", "<" DSML "invoke name=\"", "</" DSML "tool_calls>"},
    {"deepseek_v4", "<" DSML "tool_calls>", "<" DSML "invoke name=\"f\">", "</" DSML "tool_calls>"},
    {"deepseek_v4", "<" DSML "tool_calls><" DSML "invoke name=\"f\"><" DSML "parameter name=\"", "\" string=\"",
     "</" DSML "invoke></" DSML "tool_calls>"},
    {"deepseek_v4", "", "</think>", ""},
    {"gemma4", "", "<|tool_call>call:f{", ""},
    {"gemma4", "<|tool_call>call:f{", "a:<|\"|>\n", "}<tool_call|>"},
    {"gemma4", "<|tool_call>call:f{", "a", "}<tool_call|>"},
    {"gemma4", "<|tool_call>call:f{", "a:1,", "}<tool_call|>"},
    {"gemma4", "<|tool_call>call:f{", "\xc3\xa9:<|\"|>x<|\"|>", "}<tool_call|>"},
    {"llama3_json", "", "{\"name\":", ""},
    {"llama3_json", "", "{\"name\": \"f\", \"parameters\": {}};", "x"},
    {"llama3_json", "", "<|python_tag|>", ""},
    {"llama3_json", "<|python_tag|>f.call(", "a=\"\", ", ")"},
};

/* Seconds of this thread for n bytes. */
static double seconds_of(const struct hostile *h, size_t n, const json_t *tools) {
    struct buf text = {0};
    struct tool_turn t;
    struct timespec a, b;
    buf_adds(&text, h->head);
    while (text.n + strlen(h->unit) + strlen(h->tail) < n) buf_adds(&text, h->unit);
    buf_adds(&text, h->tail);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    assert_int_equal(tool_parser_parse(tool_parser_find(h->format), text.p, text.n, tools, &t), 0);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    tool_turn_free(&t);
    buf_free(&text);
    return (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
}

/* A megabyte takes less than 0.1 s on an idle machine; what is tried again from each place takes minutes. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MOST_SECONDS 10.
#else
#define MOST_SECONDS 1.
#endif
static void hostile_turns_take_linear_time(void **state) {
    (void)state;
    json_t *const tools = json_loads(
        "[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"properties\": {\"a\": "
        "{\"type\": \"array\"}, \"i\": {\"type\": \"integer\"}, \"n\": {\"type\": \"number\"}}, \"required\": [\"a\"]}}}]",
        0, NULL);
    double most = 0;
    const struct hostile *slowest = hostile;
    assert_non_null(tools);
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
        const double s = seconds_of(&hostile[i], 1 << 20, tools);
        if (s > MOST_SECONDS) fail_msg("%s: 1 MB of %s takes %.1f s", hostile[i].format, hostile[i].unit, s);
        if (s > most) most = s, slowest = &hostile[i];
    }
    print_message("the slowest megabyte: %.3f s, %s, %s\n", most, slowest->format, slowest->unit);
    json_decref(tools);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formats_have_names), cmocka_unit_test(lost_calls_are_counted),
        cmocka_unit_test(llama_calls),        cmocka_unit_test(differences_from_verl),
        cmocka_unit_test(turns_of_ids),       cmocka_unit_test(hostile_turns_take_linear_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
