/* fuzz_conversation.c - any requests of an agent that owns its history: messages, tools, and what is drawn for them.
 *
 * The first byte chooses DeepSeek V4's variables (its encoder needs no helper) and what is drawn; each line behind it is a request:
 * {"messages", "tools"}.  A request is answered, dropped or left open.  Same requests give the same ids, no drawn token is in
 * two samples, and segments cover a response. Each line is taken for a program's last one, too. */
#include "fuzz.h"

#include "agent/child_program.h"
#include "agent/continuous_tokens/continuous_tokens_int.h"
#include "agent/token_tree.h"
#include "base/json.h"

enum { MAX_REQUESTS = 24, MAX_DRAWN = 4096 };

static struct continuous_tokens *open_tokens(int variant) {
    static struct tokenizer *tok;
    static struct continuous_tokens *all[4];
    static const char *const kwargs[] = {"{}", "{\"enable_thinking\":true}", "{\"thinking\":true,\"drop_thinking\":false}",
                                         "{\"enable_thinking\":true,\"reasoning_effort\":\"max\"}"};
    if (!tok) CHECK(tokenizer_open(&tok, FIXTURES "/agent/continuous/deepseek_v4") == 0);
    if (!all[variant]) {
        json_t *k = json_loads(kwargs[variant], 0, NULL);
        CHECK(continuous_tokens_create(&all[variant], tok, "deepseek_v4", k) == 0);
        json_decref(k);
    }
    return all[variant];
}

/* What other families read of messages. */
static void read_messages(const struct continuous_tokens *c, const json_t *messages) {
    struct buf text = {0};
    for (size_t i = 0; i < json_array_size(messages) && i < 8; i++) {
        fuzz_check_rc(continuous_tokens__content(json_object_get(json_array_get(messages, i), "content"), &text));
        fuzz_check_rc(continuous_tokens__tool_name(messages, i, messages, i, &text));
    }
    json_decref(continuous_tokens__synthetic(c, json_is_array(messages) ? messages : NULL));
    buf_free(&text);
}

static void draw(struct token_tree *t, int64_t request, const json_t *messages, int n, int32_t *n_drawn) {
    int32_t ids[8], version[8];
    float logp[8];
    for (int i = 0; i < n; i++) {
        ids[i] = 60 + i;
        logp[i] = -1;
        version[i] = (*n_drawn)++;
    }
    json_t *message = json_pack("{s:s, s:s}", "role", "assistant", "content", n & 1 ? "a" : "b");
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    token_tree_drawn(t, request,
                     &(struct token_tree_turn){
                         .ids = ids, .logp = logp, .kept = logp, .n = n, .version = version, .message = n == 3 ? last : message});
    json_decref(message);
}

static void check_samples(const struct token_tree *t, int32_t n_drawn) {
    struct token_tree_sample *s;
    uint8_t *seen = calloc((size_t)n_drawn + 1, 1);
    const int64_t n = token_tree_samples(t, &s);
    for (int64_t i = 0; i < n; i++) {
        int64_t end = 0;
        for (int64_t k = 0; k < s[i].n_segments; k++) {
            CHECK(s[i].segments[k].begin == end && s[i].segments[k].n > 0);
            end += s[i].segments[k].n;
        }
        CHECK(end == s[i].response.n);
        for (int64_t k = 0; k < end; k++) CHECK(s[i].version[k] < 0 || (s[i].version[k] < n_drawn && !seen[s[i].version[k]]++));
    }
    token_tree_samples_free(s, n);
    free(seen);
}

static void one_request(struct token_tree *t, struct continuous_tokens *c, const json_t *q, int what, int32_t *n_drawn) {
    const json_t *messages = json_object_get(q, "messages"), *tools = json_object_get(q, "tools");
    struct text_ids ids = {0}, again = {0};
    int64_t request;
    read_messages(c, messages);
    const int rc = token_tree_prompt(t, messages, tools, &ids, &request);
    fuzz_check_rc(rc);
    if (rc == 0 && what % 7 == 0) { /* the same as ids, which go on with whatever they begin with */
        token_tree_dropped(t, request);
        token_tree_prompt_ids(t, ids.p, ids.n, &request);
    }
    if (rc == 0) {
        CHECK(token_tree_prompt_length(t, request) > 0);
        CHECK(ids.n > 0 && (json_array_size(messages) > 1 || continuous_tokens_begin(c, messages, tools, &again) == 0));
        if (what % 3 == 0) token_tree_dropped(t, request);
        else if (what % 3 == 1) draw(t, request, messages, what % 8, n_drawn);
    }
    text_ids_free(&ids);
    text_ids_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    fuzz_quiet();
    if (n == 0) return 0;
    struct continuous_tokens *c = open_tokens(data[0] % 4);
    struct token_tree *t;
    int32_t n_drawn = 0;
    int what = data[0] / 4;
    const char *p = (const char *)data + 1, *end = (const char *)data + n;
    CHECK(token_tree_create(&t, c) == 0);
    for (int i = 0; i < MAX_REQUESTS && p < end && n_drawn < MAX_DRAWN; i++, what += 5) {
        const char *line = memchr(p, '\n', (size_t)(end - p));
        if (!line) line = end;
        json_t *q, *reward = child_program_reward_line(p, (size_t)(line - p)); /* a program's last line */
        CHECK(!reward || json_is_number(json_object_get(reward, "reward")));
        json_decref(reward);
        if (json_parse(&q, p, (size_t)(line - p), "request") == 0) {
            one_request(t, c, q, what, &n_drawn);
            json_decref(q);
        }
        p = line + 1;
    }
    check_samples(t, n_drawn);
    token_tree_destroy(t);
    return 0;
}
