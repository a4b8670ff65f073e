/* test_agent_continuous.c - what is appended behind a turn, by hand; tests/golden/test_agent_continuous_verl.c has verl's. */
#include "agent/continuous_tokens/continuous_tokens.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct model {
    struct tokenizer *tok;
    struct continuous_tokens *c;
};

static struct model open_model(const char *name, const char *model_type) {
    struct model m;
    char *path = file_join(FIXTURES "/agent/continuous", name);
    if (tokenizer_open(&m.tok, path) < 0 || continuous_tokens_create(&m.c, m.tok, model_type, NULL) < 0) fail_msg("%s", err_msg());
    free(path);
    return m;
}

static void close_model(struct model *m) {
    continuous_tokens_destroy(m->c);
    tokenizer_close(m->tok);
}

static const char QUESTION[] = "{'role': 'user', 'content': 'two and two?'}";
static const char CALL[] = "{'role': 'assistant', 'content': '', 'tool_calls': [{'type': 'function', 'id': 'a1', 'function': "
                           "{'name': 'add', 'arguments': {}}}]}";

/* The messages of a list in single quotes. */
static json_t *read_messages(const char *old, const char *new) {
    char *text = xasprintf("[%s%s%s%s%s]", QUESTION, *old ? ", " : "", old, *new ? ", " : "", new);
    for (char *p = text; *p; p++)
        if (*p == '\'') *p = '"';
    json_t *messages;
    if (json_parse(&messages, text, strlen(text), "messages") < 0) fail_msg("%s", err_msg());
    free(text);
    return messages;
}

/* Appends `new` behind the question, `old` and a stream that ends in the token `last`; what is added as text. */
static int append(struct model *m, const char *old, const char *new, const char *last, int64_t *n_removed, struct buf *added) {
    json_t *messages = read_messages(old, new);
    const int32_t id = last ? tokenizer_id(m->tok, last) : 65;
    struct text_ids stream = {0};
    struct continuous_junction j;
    text_ids_add(&stream, &id, 1);
    const int rc = continuous_tokens_append(m->c, messages, 2, NULL, &stream, &j);
    buf_reset(added);
    if (rc == 0) tokenizer_decode(m->tok, j.added.p, j.added.n, false, added);
    *n_removed = j.n_removed;
    text_ids_free(&stream);
    text_ids_free(&j.added);
    json_decref(messages);
    return rc;
}

struct worked {
    const char *model, *model_type, *old, *new, *last;
    int64_t n_removed;
    const char *added; /* NULL: refused */
};
#define FOUR "{'role': 'tool', 'content': '4'}"
#define FIVE "{'role': 'tool', 'content': '5'}"
#define SURE "{'role': 'user', 'content': 'Sure?'}"
#define SAID "{'role': 'assistant', 'content': '4'}"

static const struct worked WORKED[] = {
    {"chatml", "qwen2", CALL, FOUR, "<|im_end|>", 0,
     "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"},
    {"chatml", "qwen2", CALL, FOUR, NULL, 0,
     "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"}, /* a turn that was cut */
    {"chatml", " Qwen3", CALL, FOUR ", " FIVE, "<|im_end|>", 0,
     "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</"
     "tool_response><|im_end|>\n<|im_start|>assistant\n"},
    {"chatml", "qwen2", SAID, SURE, "<|im_end|>", 0, "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"},
    {"chatml", "llama", SAID, SURE, "<|im_end|>", 0, "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"},
    {"chatml", "qwen2", SAID, "", "<|im_end|>", 0, "\n"},
    {"minimax", "minimax", SAID, SURE, "[e~[", 0, "\n]~b]user\nSure?[e~[\n]~b]ai\n"},
    {"glm", "glm4_moe", CALL, FOUR, "<|observation|>", 1, "<|observation|>\n<tool_response>\n4\n</tool_response><|assistant|>"},
    {"glm", "glm4_moe", SAID, SURE, "<|user|>", 1, "<|user|>\nSure?<|assistant|>"},
    {"gpt_oss", "gpt_oss", CALL, "{'role': 'tool', 'content': '4\\n\\u0022'}", "<|call|>", 0,
     "<|start|>functions.add to=assistant<|channel|>commentary<|message|>\"4\\n\\\"\"<|end|><|start|>assistant"},
    {"gpt_oss", "gpt_oss", CALL, "{'role': 'tool', 'content': '4', 'name': 'sub'}", "<|call|>", 0,
     "<|start|>functions.sub to=assistant<|channel|>commentary<|message|>\"4\"<|end|><|start|>assistant"},
    {"gpt_oss", "gpt_oss", CALL, FOUR ", " FIVE, "<|call|>", 0, NULL}, /* two results of one call: whose? */
    {"gpt_oss", "gpt_oss", SAID, FOUR, "<|return|>", 0, NULL},
    {"gemma4", "gemma4", CALL, FOUR, "<tool_call|>", 0, "<|tool_response>response:add{value:4}<tool_response|>"},
    {"gemma4", "gemma4", CALL, FOUR, "<|tool_response>", 0, "response:add{value:4}<tool_response|>"},
    {"gemma4", "gemma4", SAID, SURE, "<turn|>", 0, "<|turn>user\nSure?<turn|>\n<|turn>model\n"}, /* verl's: no newline */
    {"deepseek", "deepseek_v3", SAID, SURE, "<｜tool▁outputs▁end｜>", 1, "<｜User｜>Sure?<｜Assistant｜>"},
    {"deepseek", "deepseek_v3", CALL, FOUR, "<｜end▁of▁sentence｜>", 0,
     "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"},
    {"deepseek_v4", "deepseek_v4", CALL, FOUR, "<｜end▁of▁sentence｜>", 0,
     "<｜User｜><tool_result>4</tool_result><｜Assistant｜></think>"},
    {"deepseek_v4", "deepseek_v4", CALL, FOUR, NULL, 0,
     "<｜end▁of▁sentence｜><｜User｜><tool_result>4</tool_result><｜Assistant｜></think>"},
    {"json_one_call", "llama", CALL, FOUR, "<|end|>", 0,
     "<|start|>ipython<|message|>\n\"4\"<|end|><|start|>assistant<|message|>\n"},
    {"json_one_call", "llama", CALL, FOUR ", " FIVE, "<|end|>", 0, NULL},
    {"rewriting", "mistral", SAID, SURE, NULL, 0, NULL},
    {"chatml", "qwen2", SAID, SURE ", " SAID, "<|im_end|>", 0, NULL},
    {"chatml", "qwen2", SAID, "{'role': 'critic', 'content': ''}", "<|im_end|>", 0, NULL},
    {"chatml", "qwen2", SAID, "'text'", "<|im_end|>", 0, NULL},
    {"deepseek_v4", "deepseek_v4", CALL, "{'role': 'tool', 'content': {'a': 1}}", NULL, 0, NULL},
};

static bool same_model(const struct worked *a, const struct worked *b) {
    return strcmp(a->model, b->model) == 0 && strcmp(a->model_type, b->model_type) == 0;
}

static void check_worked(struct model *m, const struct worked *w) {
    struct buf added = {0};
    int64_t n_removed;
    for (int k = 0; k < (w->added ? 20 : 1); k++) { /* what comes often is a frame later */
        const int rc = append(m, w->old, w->new, w->last, &n_removed, &added);
        if (!w->added) {
            if (rc != ERR_INPUT && rc != ERR_FORMAT) fail_msg("%s, %s: %d, %s", w->model, w->new, rc, added.p);
            continue;
        }
        if (rc < 0) fail_msg("%s, %s: %s", w->model, w->new, err_msg());
        assert_int_equal(n_removed, w->n_removed);
        assert_string_equal(added.p, w->added);
    }
    buf_free(&added);
}

static void worked_examples(void **state) {
    (void)state;
    enum { N = sizeof WORKED / sizeof *WORKED };
    bool done[N] = {false};
    for (int i = 0; i < N; i++) {
        if (done[i]) continue;
        struct model m = open_model(WORKED[i].model, WORKED[i].model_type);
        for (int k = i; k < N; k++) {
            if (!same_model(&WORKED[i], &WORKED[k])) continue;
            check_worked(&m, &WORKED[k]);
            done[k] = true;
        }
        close_model(&m);
    }
}

/* What templates do to a tool's text m.content: some of it no frame can have. */
static const char *const WRITTEN[] = {
    "{{ m.content | trim }}",
    "{{ m.content | tojson }}",
    "{{ m.content.split('</think>')[-1] }}",
    "{{ m.content | replace('rare words', 'X') }}",
    "{% if m.content.startswith('<r>') and m.content.endswith('</r>') %}R{% else %}{{ m.content }}{% endif %}",
    "{% if 'needle' in m.content %}N{% else %}{{ m.content }}{% endif %}",
    "{{ m.tool_call_id }}:{{ m.content[:300] }}:{{ m.name }}:{{ m.content }}",
    "{% if m.name == 'special' %}S{% endif %}{{ m.content }}",
};
static const char *const CONTENTS[] = {
    "4",          " 4 \n",    "a\"b\\c",    "<r>x</r>", "rare words", "exactly this",        "a needle",
    "x</think>y", "\xc3\xa9", "<|im_end|>", "",         "{\"a\": 1}", "longer than the rest"};

static struct continuous_tokens *open_written(const struct tokenizer *tok, const char *template) {
    struct continuous_tokens *c;
    json_t *kwargs = template ? json_pack("{s:s}", "chat_template", template) : NULL;
    if (continuous_tokens_create(&c, tok, "generic", kwargs) < 0) fail_msg("%s", err_msg());
    json_decref(kwargs);
    return c;
}

/* Frames beside renders: a template that comes with each request has no frame. */
static void a_frame_gives_what_the_template_does(void **state) {
    (void)state;
    char dir[] = "/tmp/verlc_frame_XXXXXX";
    assert_non_null(mkdtemp(dir));
    char *from = file_join(FIXTURES "/agent/continuous/chatml", "tokenizer.json"), *to = file_join(dir, "tokenizer.json");
    struct buf tokenizer = {0};
    assert_int_equal(file_read(&tokenizer, from, 1 << 20), 0);
    assert_int_equal(file_write_atomic(to, tokenizer.p, tokenizer.n), 0);
    char *path = file_join(dir, "chat_template.jinja");
    for (size_t i = 0; i < sizeof WRITTEN / sizeof *WRITTEN; i++) {
        char *text =
            xasprintf("{%% for m in messages %%}<|im_start|>{{ m.role }}: {%% if m.role == 'tool' %%}%s{%% else %%}{{ m.content }}"
                      "{%% endif %%}<|im_end|>{%% endfor %%}",
                      WRITTEN[i]);
        assert_int_equal(file_write_atomic(path, text, strlen(text)), 0);
        struct tokenizer *tok;
        assert_int_equal(tokenizer_open(&tok, dir), 0);
        struct continuous_tokens *c = open_written(tok, NULL), *rendered = open_written(tok, text);
        for (int k = 0; k < 40; k++) {
            const char *content = CONTENTS[(size_t)k % (sizeof CONTENTS / sizeof *CONTENTS)], *name = k % 3 ? "f" : "special";
            json_t *messages = json_pack("[{s:s, s:s}, {s:s, s:s, s:s, s:s}]", "role", "user", "content", "q", "role", "tool",
                                         "content", content, "tool_call_id", k % 2 ? "a1" : "call_2", "name", name);
            struct continuous_junction a, b;
            const struct text_ids stream = {0};
            if (continuous_tokens_append(c, messages, 1, NULL, &stream, &a) < 0) fail_msg("%s", err_msg());
            assert_int_equal(continuous_tokens_append(rendered, messages, 1, NULL, &stream, &b), 0);
            if (a.added.n != b.added.n || memcmp(a.added.p, b.added.p, (size_t)a.added.n * sizeof *a.added.p) != 0)
                fail_msg("%s of \"%s\"", WRITTEN[i], content);
            text_ids_free(&a.added);
            text_ids_free(&b.added);
            json_decref(messages);
        }
        continuous_tokens_destroy(c);
        continuous_tokens_destroy(rendered);
        tokenizer_close(tok);
        free(text);
    }
    buf_free(&tokenizer);
    free(from);
    free(to);
    free(path);
    assert_int_equal(file_remove_tree(dir), 0);
}

static void what_cannot_be_opened(void **state) {
    (void)state;
    struct continuous_tokens *c;
    struct tokenizer *tok;
    static const char bare[] = "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}, \"merges\": []}}";
    assert_int_equal(tokenizer_open_bytes(&tok, bare, sizeof bare - 1, "bare"), 0);
    assert_int_equal(continuous_tokens_create(&c, tok, "qwen2_vl", NULL), ERR_UNSUPPORTED);
    assert_int_equal(continuous_tokens_create(&c, tok, "gemma4", NULL), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "<|tool_response>"));
    assert_int_equal(continuous_tokens_create(&c, tok, "llama", NULL), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "chat template"));
    tokenizer_close(tok);
}

static bool says(const json_t *report, const char *name, const char *key) {
    return json_is_true(json_object_get(json_object_get(json_object_get(report, "cases"), name), key));
}

static void the_start_says_what_works(void **state) {
    (void)state;
    json_t *report;
    struct model m = open_model("chatml", "qwen2");
    assert_int_equal(continuous_tokens_selftest(m.c, &report), 0);
    static const char *const all[] = {"tool", "two_tools", "user", "system"};
    for (int i = 0; i < 4; i++) assert_true(says(report, all[i], "ok") && says(report, all[i], "exact"));
    json_decref(report);
    close_model(&m);
    m = open_model("json_one_call", "llama");
    assert_int_equal(continuous_tokens_selftest(m.c, &report), 0);
    assert_true(says(report, "tool", "ok") && says(report, "tool", "exact") && !says(report, "two_tools", "ok"));
    assert_non_null(
        strstr(json_string_value(json_object_get(json_object_get(json_object_get(report, "cases"), "two_tools"), "reason")),
               "one call at a time"));
    json_decref(report);
    close_model(&m);
}

/* A stream of this text behind the question and a turn of a call, against the render of the conversation. */
static enum continuous_again again(struct model *m, const char *turn, int cut) {
    json_t *messages = read_messages("{'role': 'assistant', 'content': 'It is four.'}", "");
    json_t *prompt = read_messages("", "");
    struct text_ids stream = {0};
    enum continuous_again how;
    assert_int_equal(continuous_tokens_begin(m->c, prompt, NULL, &stream), 0);
    assert_int_equal(tokenizer_encode(m->tok, turn, strlen(turn), false, &stream), 0);
    stream.n -= cut;
    assert_int_equal(continuous_tokens_again(m->c, messages, NULL, &stream, &how), 0);
    text_ids_free(&stream);
    json_decref(messages);
    json_decref(prompt);
    return how;
}

static void a_conversation_rendered_again(void **state) {
    (void)state;
    struct model m = open_model("chatml", "qwen2");
    assert_int_equal(again(&m, "It is four.<|im_end|>", 0), CONTINUOUS_SAME);
    assert_int_equal(again(&m, "It is four.<|im_end|>\n", 0), CONTINUOUS_SAME);
    assert_int_equal(again(&m, "It is four. <|im_end|>", 0), CONTINUOUS_SPACE);
    assert_int_equal(again(&m, "It  is four.<|im_end|>", 0), CONTINUOUS_SPACE);
    assert_int_equal(again(&m, "It is five.<|im_end|>", 0), CONTINUOUS_OTHER);
    assert_int_equal(again(&m, "It is four.<|im_end|>", 1), CONTINUOUS_OTHER); /* without its end */
    close_model(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(worked_examples),
        cmocka_unit_test(a_frame_gives_what_the_template_does),
        cmocka_unit_test(what_cannot_be_opened),
        cmocka_unit_test(the_start_says_what_works),
        cmocka_unit_test(a_conversation_rendered_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
