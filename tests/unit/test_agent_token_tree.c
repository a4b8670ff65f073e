/* test_agent_token_tree.c - samples of an episode whose agent sends its conversation with each request. */
#include "agent/token_tree.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct tokenizer *tok;
static struct continuous_tokens *tokens;

static int open_model(void **state) {
    (void)state;
    char *path = file_join(FIXTURES "/agent/continuous", "chatml");
    const int rc = tokenizer_open(&tok, path);
    free(path);
    return rc < 0 ? rc : continuous_tokens_create(&tokens, tok, "qwen2", NULL);
}

static int close_model(void **state) {
    (void)state;
    continuous_tokens_destroy(tokens);
    tokenizer_close(tok);
    return 0;
}

/* JSON in single quotes. */
static json_t *read_json(const char *text) {
    char *copy = xstrdup(text);
    json_t *v;
    for (char *p = copy; *p; p++)
        if (*p == '\'') *p = '"';
    if (json_parse(&v, copy, strlen(copy), "test") < 0) fail_msg("%s: %s", text, err_msg());
    free(copy);
    return v;
}

/* The ids of a request, as text; its number. */
static int64_t ask(struct token_tree *t, const char *messages, const char *tools, struct buf *text) {
    json_t *m = read_json(messages), *s = tools ? read_json(tools) : NULL;
    struct text_ids ids = {0};
    int64_t request;
    if (token_tree_prompt(t, m, s, &ids, &request) < 0) fail_msg("%s", err_msg());
    if (text) {
        buf_reset(text);
        tokenizer_decode(tok, ids.p, ids.n, false, text);
    }
    text_ids_free(&ids);
    json_decref(m);
    json_decref(s);
    return request;
}

static int32_t n_drawn; /* log-probs and versions count up: each token is told from all others */

static void draw(struct token_tree *t, int64_t request, const char *text, const char *message) {
    json_t *m = read_json(message);
    struct text_ids ids = {0};
    float logp[256];
    int32_t version[256];
    tokenizer_encode(tok, text, strlen(text), false, &ids);
    for (int64_t i = 0; i < ids.n; i++) {
        logp[i] = -1 - (float)n_drawn;
        version[i] = n_drawn++;
    }
    token_tree_drawn(t, request,
                     &(struct token_tree_turn){
                         .ids = ids.p, .logp = logp, .n = ids.n, .version = version, .message = json_is_null(m) ? NULL : m});
    text_ids_free(&ids);
    json_decref(m);
}

/* Prompt | response, what is trained in brackets. */
static void describe(const struct token_tree_sample *s, struct buf *out) {
    buf_addf(out, "%s: ", token_tree_start_name(s->start));
    tokenizer_decode(tok, s->prompt.p, s->prompt.n, false, out);
    buf_adds(out, "|");
    int64_t end = 0;
    for (int64_t k = 0; k < s->n_segments; k++) {
        const struct segment g = s->segments[k];
        assert_int_equal(g.begin, end);
        end += g.n;
        if (g.kind == SEGMENT_POLICY) buf_addc(out, '[');
        tokenizer_decode(tok, s->response.p + g.begin, g.n, false, out);
        if (g.kind == SEGMENT_POLICY) buf_addc(out, ']');
        for (int64_t i = g.begin; i < end; i++)
            assert_true((s->logp[i] < 0) == (g.kind == SEGMENT_POLICY) && (s->version[i] >= 0) == (g.kind == SEGMENT_POLICY));
    }
    assert_int_equal(end, s->response.n);
    for (size_t i = 0; i < out->n; i++)
        if (out->p[i] == '\n') out->p[i] = '/';
}

/* The samples are these; no drawn token is trained twice. */
static void check(const struct token_tree *t, const char *const *want, int64_t n_want) {
    struct token_tree_sample *s;
    const int64_t n = token_tree_samples(t, &s);
    struct buf got = {0};
    uint8_t *seen = calloc((size_t)n_drawn + 1, 1);
    for (int64_t i = 0; i < n; i++) {
        buf_reset(&got);
        describe(&s[i], &got);
        if (i < n_want) assert_string_equal(got.p, want[i]);
        else fail_msg("one more: %s", got.p);
        for (int64_t k = 0; k < s[i].response.n; k++)
            if (s[i].version[k] >= 0 && seen[s[i].version[k]]++) fail_msg("%s: token %lld is trained twice", got.p, (long long)k);
    }
    assert_int_equal(n, n_want);
    token_tree_samples_free(s, n);
    buf_free(&got);
    free(seen);
}
#define CHECK_SAMPLES(t, ...) \
    check(t, (const char *const[]){__VA_ARGS__}, sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

#define Q "{'role': 'user', 'content': 'q'}"
#define CALL(id, arguments)                                             \
    "{'role': 'assistant', 'content': null, 'tool_calls': [{'id': '" id \
    "', 'type': 'function', 'function': {'name': 'f', 'arguments': " arguments "}}]}"
#define RESULT(id) "{'role': 'tool', 'content': '4', 'tool_call_id': '" id "'}"
#define SAID(text) "{'role': 'assistant', 'content': '" text "'}"
#define USER(text) "{'role': 'user', 'content': '" text "'}"
#define PROMPT "<|im_start|>user/q<|im_end|>/<|im_start|>assistant/"

static void a_conversation_that_goes_on_is_one_sample(void **state) {
    (void)state;
    struct token_tree *t;
    struct buf text = {0};
    token_tree_create(&t, tokens);
    draw(t, ask(t, "[" Q "]", NULL, NULL), "<tool_call>x<|im_end|>", CALL("a1", "'{\\u0022x\\u0022: 1, \\u0022y\\u0022: [2]}'"));
    /* the client spells it otherwise: ids, arguments, no content, a text part */
    int64_t r = ask(
        t, "[{'role': 'user', 'content': [{'type': 'text', 'text': 'q'}]}, " CALL("b7", "{'y': [2], 'x': 1}") ", " RESULT("b7") "]",
        NULL, &text);
    assert_string_equal(text.p, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<tool_call>x<|im_end|>\n<|im_start|>user\n"
                                "<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n");
    draw(t, r, "<think>h</think>four<|im_end|>", "{'role': 'assistant', 'content': 'four', 'reasoning_content': 'h'}");
    CHECK_SAMPLES(t, "first: " PROMPT "|[<tool_call>x<|im_end|>]/<|im_start|>user/<tool_response>/4/</tool_response><|im_end|>/"
                     "<|im_start|>assistant/[<think>h</think>four<|im_end|>]");
    /* reasoning is not sent back, and a request that nothing came of changes nothing */
    static const char more[] = "[" Q ", " CALL("c", "{'x': 1, 'y': [2]}") ", " RESULT("c") ", " SAID("four") ", " USER("sure?") "]";
    token_tree_dropped(t, ask(t, more, NULL, NULL));
    draw(t, ask(t, more, NULL, &text), "yes", SAID("yes"));
    assert_non_null(strstr(text.p, "<think>h</think>four<|im_end|>\n<|im_start|>user\nsure?"));
    CHECK_SAMPLES(t, "first: " PROMPT "|[<tool_call>x<|im_end|>]/<|im_start|>user/<tool_response>/4/</tool_response><|im_end|>/"
                     "<|im_start|>assistant/[<think>h</think>four<|im_end|>]"
                     "/<|im_start|>user/sure?<|im_end|>/<|im_start|>assistant/[yes]");
    assert_int_equal(token_tree_counts(t).n_requests, 4);
    assert_int_equal(token_tree_counts(t).n_turns, 3);
    token_tree_destroy(t);
    buf_free(&text);
}

/* A request of a text's ids. */
static int64_t ask_ids(struct token_tree *t, const char *text) {
    struct text_ids ids = {0};
    int64_t request;
    tokenizer_encode(tok, text, strlen(text), false, &ids);
    token_tree_prompt_ids(t, ids.p, ids.n, &request);
    text_ids_free(&ids);
    return request;
}

static void ids_that_begin_with_a_sample_go_on_with_it(void **state) {
    (void)state;
    struct token_tree *t;
    token_tree_create(&t, tokens);
    draw(t, ask_ids(t, "one "), "two<|im_end|>", "null");
    const int64_t r = ask_ids(t, "one two<|im_end|>\nthree ");
    assert_int_equal(token_tree_prompt_length(t, r), token_tree_prompt_length(t, r - 1));
    draw(t, ask_ids(t, "one two<|im_end|>\nfive "), "six", "null"); /* while that is drawn: another one */
    draw(t, r, "four<|im_end|>", "null");
    token_tree_dropped(t, ask_ids(t, "one two<|im_end|>\nthree four<|im_end|>\nlast"));
    draw(t, ask_ids(t, "one two<|im_end|>\nthree four<|im_end|>\nlast "), "end", "null");
    draw(t, ask_ids(t, "on"), "other", "null");
    CHECK_SAMPLES(t, "first: one |[two<|im_end|>]/three [four<|im_end|>]/last [end]", "sub_agent: one two<|im_end|>/five |[six]",
                  "sub_agent: on|[other]");
    token_tree_destroy(t);
}

static void what_is_asked_again_is_a_sample_of_its_own(void **state) {
    (void)state;
    struct token_tree *t;
    token_tree_create(&t, tokens);
    const int64_t a = ask(t, "[" Q "]", NULL, NULL), b = ask(t, "[" Q "]", NULL, NULL); /* both under way */
    draw(t, b, "B<|im_end|>", SAID("B"));
    draw(t, a, "A<|im_end|>", SAID("A"));
    draw(t, ask(t, "[" Q ", " SAID("B") ", " USER("u") "]", NULL, NULL), "C<|im_end|>", SAID("C"));
    /* two that go on behind one turn at a time */
    const int64_t c = ask(t, "[" Q ", " SAID("A") ", " USER("v") "]", NULL, NULL),
                  d = ask(t, "[" Q ", " SAID("A") ", " USER("w") "]", NULL, NULL);
    draw(t, c, "D", SAID("D"));
    draw(t, d, "E", SAID("E"));
    CHECK_SAMPLES(t, "first: " PROMPT "|[A<|im_end|>]/<|im_start|>user/v<|im_end|>/<|im_start|>assistant/[D]",
                  "again: " PROMPT "|[B<|im_end|>]/<|im_start|>user/u<|im_end|>/<|im_start|>assistant/[C<|im_end|>]",
                  "rewritten: " PROMPT "|A<|im_end|>/<|im_start|>user/w<|im_end|>/<|im_start|>assistant/[E]");
    token_tree_destroy(t);
}

static void a_turn_that_the_agent_replaces_is_rolled_back(void **state) {
    (void)state;
    struct token_tree *t;
    token_tree_create(&t, tokens);
    draw(t, ask(t, "[" Q "]", NULL, NULL), "one<|im_end|>", SAID("one"));
    draw(t, ask(t, "[" Q ", " SAID("one") ", " USER("u") "]", NULL, NULL), "  two <|im_end|>", SAID("  two "));
    draw(t, ask(t, "[" Q ", " SAID("one") ", " USER("u") ", " SAID("two") ", " USER("v") "]", NULL, NULL), "three", SAID("three"));
    CHECK_SAMPLES(t,
                  "first: " PROMPT
                  "|[one<|im_end|>]/<|im_start|>user/u<|im_end|>/<|im_start|>assistant/two<|im_end|>/<|im_start|>user/v<|im_end|>"
                  "/<|im_start|>assistant/[three]");
    assert_true(token_tree_counts(t).n_rolled_back > 0);
    /* an older turn is another one: a sample of its own, in which what is shared is not trained */
    draw(t, ask(t, "[" Q ", " SAID("one") ", " USER("w") ", " SAID("TWO") ", " USER("v") "]", NULL, NULL), "four", SAID("four"));
    CHECK_SAMPLES(t,
                  "first: " PROMPT
                  "|[one<|im_end|>]/<|im_start|>user/u<|im_end|>/<|im_start|>assistant/two<|im_end|>/<|im_start|>user/v<|im_end|>"
                  "/<|im_start|>assistant/[three]",
                  "rewritten: " PROMPT
                  "|one<|im_end|>/<|im_start|>user/w<|im_end|>/<|im_start|>assistant/TWO<|im_end|>/<|im_start|>user/v<|im_end|>"
                  "/<|im_start|>assistant/[four]");
    token_tree_destroy(t);
}

static void the_first_turn_replaced(void **state) {
    (void)state;
    struct token_tree *t;
    token_tree_create(&t, tokens);
    draw(t, ask(t, "[" Q "]", NULL, NULL), "one<|im_end|>", SAID("one"));
    draw(t, ask(t, "[" Q ", " SAID("ONE") ", " USER("u") "]", NULL, NULL), "two", SAID("two"));
    CHECK_SAMPLES(t, "first: "
                     "<|im_start|>user/q<|im_end|>/<|im_start|>assistant/ONE<|im_end|>/<|im_start|>user/u<|im_end|>/"
                     "<|im_start|>assistant/|[two]");
    token_tree_destroy(t);
}

static void each_sample_says_why_it_began(void **state) {
    (void)state;
    struct token_tree *t;
    token_tree_create(&t, tokens);
    static const char *const requests[] = {
        "[" USER("s") ", " SAID("a") ", " USER("b") ", " SAID("c") ", " USER("d") "]", /* a history that was not drawn here */
        "[" USER("s") ", " USER("all of it in short") "]",
        "[" USER("s") ", " USER("1") ", " USER("2") ", " USER("3") "]",
        "[" USER("title?") "]",
    };
    for (int i = 0; i < 4; i++) draw(t, ask(t, requests[i], NULL, NULL), "x", SAID("x"));
    draw(t, ask(t, requests[0], "[{'type': 'function', 'function': {'name': 'f'}}]", NULL), "y", SAID("y"));
    static const enum token_tree_start want[] = {TOKEN_TREE_FIRST, TOKEN_TREE_COMPACTED, TOKEN_TREE_REWRITTEN, TOKEN_TREE_SUB_AGENT,
                                                 TOKEN_TREE_SUB_AGENT};
    struct token_tree_sample *s;
    const int64_t n = token_tree_samples(t, &s);
    assert_int_equal(n, 5);
    for (int i = 0; i < 5; i++) assert_int_equal(s[i].start, want[i]);
    token_tree_samples_free(s, n);
    token_tree_destroy(t);
}

static void refusals_leave_no_sample(void **state) {
    (void)state;
    struct token_tree *t;
    struct text_ids ids = {0};
    int64_t request;
    json_t *bad = read_json("[{'role': 'user'}, 7]"), *none = json_array();
    token_tree_create(&t, tokens);
    assert_int_equal(token_tree_prompt(t, none, NULL, &ids, &request), ERR_INPUT);
    assert_true(token_tree_prompt(t, bad, NULL, &ids, &request) < 0);
    assert_int_equal(ids.n, 0);
    draw(t, ask(t, "[" Q "]", NULL, NULL), "one", SAID("one"));
    CHECK_SAMPLES(t, "first: " PROMPT "|[one]");
    json_decref(bad);
    json_decref(none);
    token_tree_destroy(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_conversation_that_goes_on_is_one_sample),
        cmocka_unit_test(ids_that_begin_with_a_sample_go_on_with_it),
        cmocka_unit_test(what_is_asked_again_is_a_sample_of_its_own),
        cmocka_unit_test(a_turn_that_the_agent_replaces_is_rolled_back),
        cmocka_unit_test(the_first_turn_replaced),
        cmocka_unit_test(each_sample_says_why_it_began),
        cmocka_unit_test(refusals_leave_no_sample),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
