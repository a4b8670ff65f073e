/* fuzz_serve.c - bodies of requests to `verlc serve`, and answers to them from arbitrary ids, without a model or a socket.
 * serve.c is included whole, for a request's life is its own. The first byte chooses the dialect (254, 255: /tokenize,
 * /detokenize), the second the format of tool calls, the third how the ids come; up to a NUL byte is the body, behind it are ids.
 * What is accepted has a prompt and room for an answer; what is written is JSON, and a stream's text is the whole answer's. */
#include "fuzz.h"

#include "serve/serve.c"

static int fake_submit(void *ctx, const struct engine_request *r, uint64_t ticket) {
    (void)ctx, (void)ticket;
    CHECK(r->n_prompt > 0 && r->max_tokens > 0 && r->n_prompt + r->max_tokens <= 4096 && r->n > 0 && r->n <= SERVE_MAX_N);
    CHECK(r->n_top >= 0 && r->n_top <= ENGINE_MAX_TOP && r->n_stop_ids <= SERVE_MAX_STOP + 24);
    for (int64_t i = 0; i < r->n_stop; i++) CHECK(r->stop[i][0] != '\0');
    return 0;
}
static void fake_cancel(void *ctx, uint64_t ticket) { (void)ctx, (void)ticket; }
static void fake_stats(void *ctx, struct engine_stats *out) { (void)ctx, (void)out; }
static int fake_prompt(void *ctx, const char *id, const json_t *messages, const json_t *tools, struct text_ids *ids,
                       int64_t *turn) {
    (void)ctx, (void)id, (void)tools;
    CHECK(json_array_size(messages) > 0);
    text_ids_add(ids, &(int32_t){1}, 1);
    *turn = 1;
    return 0;
}

static int fake_defaults(void *ctx, const char *id, struct engine_request *r) {
    (void)ctx, (void)id;
    *r = (struct engine_request){.temperature = 0.5f, .top_p = 1, .repetition_penalty = 1, .seed = 7};
    return 0;
}
static int64_t n_drawn, n_dropped;
/* What a session is told of a turn is an assistant's message. */
static int fake_drawn(void *ctx, const struct serve_turn *t) {
    (void)ctx;
    CHECK(t->session && (t->turn == 1 || t->turn == -1) &&
          strcmp(json_string_value(json_object_get(t->message, "role")), "assistant") == 0);
    CHECK(json_is_string(json_object_get(t->message, "content")));
    const json_t *calls = json_object_get(t->message, "tool_calls"), *call;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)calls, i, call) {
        const json_t *f = json_object_get(call, "function");
        CHECK(json_is_string(json_object_get(f, "name")) && json_is_string(json_object_get(f, "arguments")));
    }
    n_drawn++;
    return 0;
}
static void fake_dropped(void *ctx, const char *id, int64_t turn) {
    (void)ctx, (void)id;
    CHECK(turn == 1);
    n_dropped++;
}

/* Each event's data is JSON; whole: one value. */
static void check_json(const struct buf *out, bool stream) {
    CHECK(out->n == 0 || text_utf8_valid(out->p, out->n));
    json_t *v = NULL;
    if (!stream) {
        CHECK(json_parse(&v, out->p, out->n, "the answer") == 0);
        json_decref(v);
        return;
    }
    for (char *p = out->p, *end; p && (p = strstr(p, "data: ")); p = end) {
        p += strlen("data: ");
        end = strchr(p, '\n');
        CHECK(end != NULL);
        if (strncmp(p, "[DONE]", 6) == 0) continue;
        CHECK(json_parse(&v, p, (size_t)(end - p), "an event") == 0);
        json_decref(v);
    }
}

static void answer(struct serve_call *c, const uint8_t *data, size_t n, int step) {
    static float logp[64];
    int32_t ids[64], top[64 * ENGINE_MAX_TOP];
    static float top_logp[64 * ENGINE_MAX_TOP];
    const int64_t vocab = tokenizer_vocab_size(c->serve->a.tok);
    struct buf out = {0};
    int64_t total = n / 2 < 64 ? (int64_t)(n / 2) : 64;
    for (int64_t i = 0; i < total; i++) ids[i] = (int32_t)((data[2 * i] | data[2 * i + 1] << 8) % (vocab + 8)); /* some unknown */
    for (int64_t i = 0; i < total * c->r.n_top; i++) top[i] = ids[i % total];
    if (c->stream) c->dialect->begin(c, &out);
    for (int64_t k = 0; k < c->n_choices; k++) {
        struct serve_choice *h = &c->choices[k];
        for (int64_t at = 0, take_n; at < total || !h->ended; at += take_n) {
            take_n = total - at < 1 + step % 5 ? total - at : 1 + step % 5;
            const struct serve_drawn d = {.n = take_n,
                                          .n_top = c->r.n_top,
                                          .ids = ids + at,
                                          .logp = logp,
                                          .top_id = top + at * c->r.n_top,
                                          .top_logp = top_logp,
                                          .ended = at + take_n == total,
                                          .finish = step & 8 ? ENGINE_LENGTH : ENGINE_STOP,
                                          .text_bytes = -1};
            CHECK(take_drawn(c, h, &d) == 0);
            CHECK(h->text.sent <= h->text.visible.n);
            if (c->stream) tell(c, h, &out);
        }
        if (c->stream && !c->parses) CHECK(h->text.sent == h->content.n);
    }
    if (c->stream) c->dialect->finish(c, &out);
    else c->dialect->whole(c, &out);
    check_json(&out, c->stream);
    buf_free(&out);
}

/* A body of /tokenize or /detokenize. */
static void tokens_of(struct serve_call *c, const json_t *body, bool back) {
    json_t *out = NULL;
    const int rc = back ? serve__detokenize(c, body, &out) : serve__tokenize(c, body, &out);
    fuzz_check_rc(rc);
    CHECK((rc == 0) == json_is_object(out));
    if (rc == 0 && !back) {
        CHECK((size_t)json_integer_value(json_object_get(out, "count")) == json_array_size(json_object_get(out, "tokens")));
    }
    json_decref(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const char *const formats[] = {"hermes", "qwen3_coder", "glm",    "seed",    "minimax",
                                          "kimi",   "deepseek_v4", "gemma4", "gpt-oss", "llama3_json"};
    static const struct serve_dialect *const dialects[] = {&serve_chat, &serve_completions, &serve_messages};
    static const struct serve_sessions sessions = {
        .prompt = fake_prompt, .defaults = fake_defaults, .drawn = fake_drawn, .dropped = fake_dropped};
    static struct tokenizer *tok;
    if (n < 3) return 0;
    fuzz_quiet();
    if (!tok) CHECK(tokenizer_open(&tok, FIXTURES "/data/tok_plain") == 0);
    struct serve s = {.a = {.backend = {NULL, fake_submit, fake_cancel, fake_stats},
                            .sessions = &sessions,
                            .tok = tok,
                            .model = "m",
                            .max_len = 4096,
                            .max_open = 64},
                      .special = json_pack("[s]", "<|im_end|>")};
    s.a.tool_format = formats[data[1] % (sizeof formats / sizeof *formats)];
    CHECK(find_parser(&s) == 0);
    const char *text = (const char *)data + 3, *end = memchr(text, '\0', n - 3);
    const size_t n_text = end ? (size_t)(end - text) : n - 3;
    n_drawn = n_dropped = 0;
    struct serve_call *c = call_create(&s, NULL, dialects[data[0] % 3], "session");
    json_t *body = NULL;
    int rc = json_parse(&body, text, n_text, "the body");
    if (rc == 0 && data[0] >= 254) {
        tokens_of(c, body, data[0] == 255);
        rc = ERR_INVAL; /* nothing is drawn */
    } else if (rc == 0) rc = c->dialect->read(c, body);
    if (rc == 0) rc = submit(c);
    fuzz_check_rc(rc);
    json_decref(body);
    if (rc == 0) answer(c, (const uint8_t *)text + n_text, n - 3 - n_text, data[2]);
    const bool has_turn = c->turn >= 0;
    call_free(c);
    CHECK(n_dropped == (has_turn && n_drawn == 0)); /* a turn is drawn or dropped */
    CHECK(s.n_open == 0 && s.n_calls == 0);
    json_decref(s.special);
    free(s.slots);
    free(s.generation);
    free(s.prompt_of);
    return 0;
}
