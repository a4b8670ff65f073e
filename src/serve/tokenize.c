/* tokenize.c - vLLM's /tokenize and /detokenize: a text or a conversation to ids, ids to a text.
 *
 * Invariant: the ids of a conversation are those that a chat with the same body is asked with. */
#include "serve/serve_int.h"

#include "base/err.h"
#include "text/text.h"

static int prompt_ids(struct serve_call *c, const json_t *body, struct text_ids *ids) {
    static const struct serve_keys keys = {.read = "model prompt add_special_tokens return_token_strs"};
    const json_t *prompt = json_object_get(body, "prompt");
    bool special = true;
    TRY(serve__check_keys(body, &keys));
    TRY(serve__bool(body, "add_special_tokens", &special));
    if (!json_is_string(prompt)) FAIL(ERR_INVAL, "prompt: a text is wanted, or messages");
    return tokenizer_encode(c->serve->a.tok, json_string_value(prompt), json_string_length(prompt), special, ids);
}

static int chat_ids(struct serve_call *c, const json_t *body, struct text_ids *ids) {
    static const struct serve_keys keys = {.read = "model messages tools add_generation_prompt continue_final_message "
                                                   "add_special_tokens return_token_strs chat_template_kwargs"};
    bool begins = true, goes_on = false, special = false;
    struct buf text = {0};
    json_t *request;
    TRY(serve__check_keys(body, &keys));
    TRY(serve__bool(body, "add_generation_prompt", &begins));
    TRY(serve__bool(body, "continue_final_message", &goes_on));
    TRY(serve__bool(body, "add_special_tokens", &special));
    if (begins && goes_on) FAIL(ERR_INVAL, "add_generation_prompt and continue_final_message: one of them is true");
    TRY(serve__messages(c, body));
    TRY(serve__check_tools(c, json_object_get(body, "tools")));
    TRY(serve__chat_request(c, json_object_get(body, "chat_template_kwargs"), begins, goes_on, &request));
    int rc = chat_template_render(c->serve->chat, request, &text);
    json_decref(request);
    if (rc == ERR_FORMAT) rc = err_wrap(ERR_INVAL, "the chat template");
    if (rc == 0) rc = tokenizer_encode(c->serve->a.tok, text.p ? text.p : "", text.n, special, ids);
    buf_free(&text);
    return rc;
}

int serve__tokenize(struct serve_call *c, const json_t *body, json_t **answer) {
    const struct serve *s = c->serve;
    struct text_ids ids = {0};
    bool names = false;
    int rc = serve__bool(body, "return_token_strs", &names);
    if (rc == 0) rc = json_object_get(body, "messages") ? chat_ids(c, body, &ids) : prompt_ids(c, body, &ids);
    if (rc == 0) {
        json_t *list = json_array(), *texts = names ? json_array() : json_null();
        for (int64_t i = 0; i < ids.n; i++) {
            const char *token = tokenizer_token(s->a.tok, ids.p[i]);
            json_array_append_new(list, json_integer(ids.p[i]));
            if (names) json_array_append_new(texts, json_string(token ? token : ""));
        }
        *answer = json_pack("{s:I, s:I, s:o, s:o}", "count", (json_int_t)ids.n, "max_model_len", (json_int_t)s->a.max_len, "tokens",
                            list, "token_strs", texts);
    }
    text_ids_free(&ids);
    return rc;
}

int serve__detokenize(struct serve_call *c, const json_t *body, json_t **answer) {
    static const struct serve_keys keys = {.read = "model tokens"};
    const struct tokenizer *tok = c->serve->a.tok;
    const json_t *tokens = json_object_get(body, "tokens"), *id;
    struct text_ids ids = {0};
    struct buf text = {0};
    size_t i;
    TRY(serve__check_keys(body, &keys));
    if (!json_is_array(tokens)) FAIL(ERR_INVAL, "tokens: a list of ids is wanted");
    json_array_foreach((json_t *)(uintptr_t)tokens, i, id) {
        const json_int_t x = json_is_integer(id) ? json_integer_value(id) : -1;
        const int32_t id32 = (int32_t)x;
        if (x < 0 || x >= tokenizer_vocab_size(tok)) {
            text_ids_free(&ids);
            FAIL(ERR_INVAL, "tokens: entry %zu is not a token id", i);
        }
        text_ids_add(&ids, &id32, 1);
    }
    const int rc = tokenizer_decode(tok, ids.p, ids.n, false, &text);
    if (rc == 0) *answer = json_pack("{s:o}", "prompt", serve__text(text.p, text.n));
    text_ids_free(&ids);
    buf_free(&text);
    return rc;
}
