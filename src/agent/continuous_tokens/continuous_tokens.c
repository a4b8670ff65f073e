/* continuous_tokens.c - families, groups of appended messages, and the junction between a stream and what is appended.
 *
 * Rendering is in continuous_tokens_render.c, frames that save renders in continuous_tokens_frame.c.
 * Invariant: of the stream only tokens at its end that a family's rule names are taken off. */
#include "agent/continuous_tokens/continuous_tokens_int.h"
#include "base/err.h"
#include "base/log.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* ---- families ---- */

static const char *const FAMILY_NAMES[] = {"generic", "qwen", "minimax", "glm", "gemma4", "gpt_oss", "deepseek", "deepseek_v4"};

/* By config.json's model_type, exactly (continuous_token_wiring.py). */
static const struct {
    const char *model_type;
    enum continuous_tokens__family family;
} FAMILIES[] = {
    {"qwen2", CONTINUOUS_QWEN},
    {"qwen3", CONTINUOUS_QWEN},
    {"qwen3_moe", CONTINUOUS_QWEN},
    {"qwen3_5", CONTINUOUS_QWEN},
    {"qwen3_5_moe", CONTINUOUS_QWEN},
    {"minimax", CONTINUOUS_MINIMAX},
    {"minimax_text_01", CONTINUOUS_MINIMAX},
    {"minimax_m2", CONTINUOUS_MINIMAX},
    {"glm4_moe", CONTINUOUS_GLM},
    {"glm_moe_dsa", CONTINUOUS_GLM},
    {"gemma4", CONTINUOUS_GEMMA4},
    {"gpt_oss", CONTINUOUS_GPT_OSS},
    {"deepseek_v2", CONTINUOUS_DEEPSEEK},
    {"deepseek_v3", CONTINUOUS_DEEPSEEK},
    {"deepseek_v4", CONTINUOUS_DEEPSEEK_V4},
};
static const char *const VISION_TYPES[] = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl",  "qwen3_vl_moe",  "minimax_vl_01",
                                           "kimi_vl",  "glm4v",      "glm4v_moe", "deepseek_vl_v2"};

static int find_family(const char *model_type, enum continuous_tokens__family *out) {
    char name[64] = "";
    while (model_type && isspace((unsigned char)*model_type)) model_type++;
    for (size_t i = 0; model_type && model_type[i] && i + 1 < sizeof name; i++)
        name[i] = (char)tolower((unsigned char)model_type[i]);
    for (size_t n = strlen(name); n > 0 && isspace((unsigned char)name[n - 1]); n--) name[n - 1] = '\0';
    for (size_t i = 0; i < sizeof FAMILIES / sizeof *FAMILIES; i++)
        if (strcmp(name, FAMILIES[i].model_type) == 0) {
            *out = FAMILIES[i].family;
            return 0;
        }
    for (size_t i = 0; i < sizeof VISION_TYPES / sizeof *VISION_TYPES; i++)
        if (strcmp(name, VISION_TYPES[i]) == 0)
            FAIL(ERR_UNSUPPORTED, "continuous tokens: model_type %s is a vision-language model; several turns need a text model",
                 name);
    log_warn("continuous tokens: no rule for model_type \"%s\"; what is appended follows what was drawn as it is", name);
    *out = CONTINUOUS_GENERIC;
    return 0;
}

static int need_token(const struct continuous_tokens *c, const char *token, int32_t *id) {
    *id = tokenizer_id(c->tok, token);
    if (*id < 0)
        FAIL(ERR_INPUT, "continuous tokens: the tokenizer has no token %s, which a %s model needs", token,
             continuous_tokens_family(c));
    return 0;
}

static int need_text(const struct continuous_tokens *c, const char *text, struct text_ids *ids) {
    TRY(tokenizer_encode(c->tok, text, strlen(text), false, ids));
    if (ids->n == 0)
        FAIL(ERR_INPUT, "continuous tokens: the tokenizer makes nothing of the text that a %s model needs",
             continuous_tokens_family(c));
    return 0;
}

static int need_newline(struct continuous_tokens *c) {
    struct text_ids ids = {0};
    TRY(need_text(c, "\n", &ids));
    const int64_t n = ids.n;
    c->newline = ids.p[0];
    text_ids_free(&ids);
    if (n != 1)
        FAIL(ERR_INPUT, "continuous tokens: a newline is %lld tokens; a %s model needs it to be one", (long long)n,
             continuous_tokens_family(c));
    return 0;
}

static int find_tokens(struct continuous_tokens *c) {
    switch (c->family) {
    case CONTINUOUS_QWEN: TRY(need_newline(c)); return need_token(c, "<|im_end|>", &c->close);
    case CONTINUOUS_MINIMAX: TRY(need_newline(c)); return need_token(c, "[e~[", &c->close);
    case CONTINUOUS_GLM: TRY(need_token(c, "<|observation|>", &c->observation)); return need_token(c, "<|user|>", &c->user);
    case CONTINUOUS_GEMMA4:
        TRY(need_token(c, "<|tool_response>", &c->tool_response));
        TRY(need_text(c, "<turn|>\n", &c->separator));
        return need_text(c, "<|turn>model\n", &c->header);
    case CONTINUOUS_DEEPSEEK:
        TRY(need_token(c, "<｜end▁of▁sentence｜>", &c->close));
        return need_text(c, "<｜tool▁outputs▁end｜>", &c->separator);
    case CONTINUOUS_DEEPSEEK_V4: return need_token(c, "<｜end▁of▁sentence｜>", &c->close);
    default: return 0;
    }
}

int continuous_tokens_create(struct continuous_tokens **out, const struct tokenizer *tok, const char *model_type,
                             const json_t *template_kwargs) {
    struct continuous_tokens *c = xcalloc(1, sizeof *c);
    int rc;
    c->tok = tok;
    c->kwargs = template_kwargs ? json_deep_copy(template_kwargs) : NULL;
    TRYG(find_family(model_type, &c->family), fail);
    TRYG(find_tokens(c), fail);
    if (c->family != CONTINUOUS_DEEPSEEK_V4) TRYG(chat_template_create(&c->chat, tok), fail);
    *out = c;
    return 0;
fail:
    continuous_tokens_destroy(c);
    return rc;
}

void continuous_tokens_destroy(struct continuous_tokens *c) {
    if (!c) return;
    continuous_tokens__forget(c);
    continuous_tokens__frames_free(c->frames);
    free(c->prefix);
    map_free(&c->toolsets);
    json_decref(c->toolset);
    json_decref(c->kwargs);
    chat_template_destroy(c->chat);
    text_ids_free(&c->separator);
    text_ids_free(&c->header);
    free(c);
}

const char *continuous_tokens_family(const struct continuous_tokens *c) { return FAMILY_NAMES[c->family]; }

int continuous_tokens_begin(struct continuous_tokens *c, const json_t *messages, const json_t *tools, struct text_ids *ids) {
    if (c->family == CONTINUOUS_DEEPSEEK_V4) return continuous_tokens__v4_begin(c, messages, tools, ids);
    struct continuous_tokens__text t = {0};
    int rc;
    TRYG(continuous_tokens__render(c, &(struct continuous_tokens__request){messages, true}, 1, tools, &t), done);
    TRYG(continuous_tokens__ids(c, &t), done);
    text_ids_add(ids, t.ids.p, t.ids.n);
done:
    continuous_tokens__text_free(&t);
    return rc;
}

/* ---- groups ---- */

struct append {
    struct continuous_tokens *c;
    const json_t *messages, *tools;
    size_t n_old, n;
    struct text_ids ids; /* of the groups so far */
};

static bool is_role(const json_t *message, const char *role) { return strcmp(continuous_tokens__role(message), role) == 0; }

static bool ends_with(const int32_t *ids, int64_t n, const struct text_ids *tail) {
    return n >= tail->n && memcmp(ids + n - tail->n, tail->p, (size_t)tail->n * sizeof *ids) == 0;
}

/* Messages [lo, hi) as an array. */
static json_t *slice(const json_t *messages, size_t lo, size_t hi) {
    json_t *part = json_array();
    for (size_t i = lo; i < hi; i++) json_array_append(part, json_array_get(messages, i));
    return part;
}

static int add_delta(struct append *a, const json_t *group, bool calls, bool generation_prompt) {
    json_t *prefix = continuous_tokens__synthetic(a->c, calls ? group : NULL);
    const int rc = continuous_tokens__delta(a->c, &(struct continuous_tokens__delta){prefix, group, generation_prompt, true},
                                            a->tools, &a->ids);
    json_decref(prefix);
    return rc;
}

/* gpt-oss: no template, the results as its format has them. */
static int add_gpt_oss_results(struct append *a, const json_t *group, size_t at) {
    struct buf text = {0}, content = {0};
    int rc = 0;
    for (size_t i = 0; i < json_array_size(group); i++) {
        buf_reset(&content);
        TRYG(continuous_tokens__content(json_object_get(json_array_get(group, i), "content"), &content), done);
        buf_adds(&text, "<|start|>functions.");
        TRYG(continuous_tokens__tool_name(group, i, a->messages, at, &text), done);
        buf_adds(&text, " to=assistant<|channel|>commentary<|message|>");
        continuous_tokens__quote(content.p ? content.p : "", content.n, &text);
        buf_adds(&text, "<|end|>");
    }
    rc = tokenizer_encode(a->c->tok, text.p, text.n, false, &a->ids);
done:
    buf_free(&text);
    buf_free(&content);
    return rc;
}

/* gpt-oss: an assistant message that is no call, as a finished turn. */
static int add_gpt_oss_assistant(struct append *a, const json_t *message) {
    static const char *const names[] = {"thinking", "reasoning_content", "reasoning"};
    const json_t *thinking = NULL;
    struct buf text = {0};
    int rc;
    for (int i = 0; i < 3 && (!thinking || json_is_null(thinking)); i++) thinking = json_object_get(message, names[i]);
    if (continuous_tokens__truth(thinking)) {
        buf_adds(&text, "<|start|>assistant<|channel|>analysis<|message|>");
        TRYG(continuous_tokens__content(thinking, &text), done);
        buf_adds(&text, "<|end|>");
    }
    buf_adds(&text, "<|start|>assistant<|channel|>final<|message|>");
    TRYG(continuous_tokens__content(json_object_get(message, "content"), &text), done);
    buf_adds(&text, "<|end|>");
    rc = tokenizer_encode(a->c->tok, text.p, text.n, false, &a->ids);
done:
    buf_free(&text);
    return rc;
}

/* Gemma 4: results with names and ids, which its template needs. */
static int add_gemma_results(struct append *a, const json_t *group, size_t at) {
    json_t *named = json_array();
    struct buf name = {0};
    int rc = 0;
    for (size_t i = 0; i < json_array_size(group); i++) {
        json_t *m = json_copy(json_array_get(group, i));
        const json_t *id = json_object_get(m, "tool_call_id");
        json_array_append_new(named, m);
        buf_reset(&name);
        TRYG(continuous_tokens__tool_name(group, i, a->messages, at, &name), done);
        if (!id || json_is_null(id)) json_object_set_new(m, "tool_call_id", json_sprintf("continuous_token_call_%zu", i));
        if (!continuous_tokens__truth(json_object_get(m, "name")))
            json_object_set_new(m, "name", json_stringn(name.p ? name.p : "", name.n));
    }
    TRYG(continuous_tokens__frame(a->c, named, false, a->tools, &a->ids), done);
    if (rc == 0) rc = add_delta(a, named, true, false);
    else rc = 0;
done:
    buf_free(&name);
    json_decref(named);
    return rc;
}

/* Gemma 4: whether what stands before a user message lacks the end of its turn. at: the messages before. */
static int gemma_lacks_separator(struct append *a, size_t at, bool *lacks) {
    const struct text_ids *end = &a->c->separator;
    *lacks = false;
    if (a->ids.n > 0) {
        *lacks = !ends_with(a->ids.p, a->ids.n, end);
        return 0;
    }
    if (at == 0) return 0;
    json_t *before = slice(a->messages, 0, at);
    struct continuous_tokens__text t = {0};
    static const char text[] = "<turn|>\n";
    const size_t n = sizeof text - 1;
    int rc;
    TRYG(continuous_tokens__render(a->c, &(struct continuous_tokens__request){before, false}, 1, a->tools, &t), done);
    if (t.is_text && t.text.n > n && memcmp(t.text.p + t.text.n - n, text, n) == 0 &&
        tokenizer_splits_at(a->c->tok, t.text.p, t.text.n, t.text.n - n))
        goto done; /* its last ids are those of the separator */
    TRYG(continuous_tokens__ids(a->c, &t), done);
    *lacks = !ends_with(t.ids.p, t.ids.n, end);
done:
    continuous_tokens__text_free(&t);
    json_decref(before);
    return rc;
}

/* What a family does between the groups before and this one, whose ids begin at `from`. */
static int join_group(struct append *a, const json_t *group, size_t at, int64_t from) {
    struct text_ids own = {0};
    int rc = 0;
    bool lacks = false;
    if (!is_role(json_array_get(group, 0), "user")) return 0;
    text_ids_add(&own, a->ids.p + from, a->ids.n - from);
    a->ids.n = from;
    if (a->c->family == CONTINUOUS_GEMMA4) {
        TRYG(gemma_lacks_separator(a, at, &lacks), done);
        if (lacks) text_ids_add(&a->ids, a->c->separator.p, a->c->separator.n);
    } else if (a->c->family == CONTINUOUS_DEEPSEEK && ends_with(a->ids.p, a->ids.n, &a->c->separator)) {
        a->ids.n -= a->c->separator.n;
    }
    text_ids_add(&a->ids, own.p, own.n);
done:
    text_ids_free(&own);
    return rc;
}

static int add_group(struct append *a, size_t at, size_t end, bool generation_prompt) {
    const enum continuous_tokens__family family = a->c->family;
    const json_t *first = json_array_get(a->messages, at);
    const bool tool = is_role(first, "tool");
    json_t *group = slice(a->messages, at, end);
    const int64_t from = a->ids.n;
    int rc;
    if (is_role(first, "assistant") && end == a->n)
        FAILG(done, ERR_INPUT, "continuous tokens: what is appended cannot end with an assistant message");
    if (tool && family == CONTINUOUS_GPT_OSS) TRYG(add_gpt_oss_results(a, group, at), done);
    else if (tool && family == CONTINUOUS_GEMMA4) TRYG(add_gemma_results(a, group, at), done);
    else if (family == CONTINUOUS_GPT_OSS && is_role(first, "assistant") &&
             !continuous_tokens__truth(json_object_get(first, "tool_calls")))
        TRYG(add_gpt_oss_assistant(a, first), done);
    else {
        TRYG(continuous_tokens__frame(a->c, group, generation_prompt, a->tools, &a->ids), done);
        if (rc == 0) TRYG(add_delta(a, group, tool, generation_prompt), done);
    }
    rc = join_group(a, group, at, from);
done:
    json_decref(group);
    return rc;
}

/* The generation prompt alone, where a family's depends on more than the last group. */
static int add_generation_prompt(struct append *a) {
    const json_t *last = json_array_get(a->messages, a->n - 1);
    json_t *none = json_array(), *prefix = NULL;
    int rc = 0;
    if (a->c->family == CONTINUOUS_GPT_OSS) {
        rc = continuous_tokens__delta(a->c, &(struct continuous_tokens__delta){a->messages, none, true, false}, a->tools, &a->ids);
    } else if (is_role(last, "user") || is_role(last, "system")) {
        prefix = continuous_tokens__synthetic(a->c, NULL);
        json_array_append(prefix, (json_t *)(uintptr_t)last);
        rc = continuous_tokens__delta(a->c, &(struct continuous_tokens__delta){prefix, none, true, false}, a->tools, &a->ids);
    }
    json_decref(none);
    json_decref(prefix);
    return rc;
}

static int add_groups(struct append *a) {
    const bool fused = a->c->family != CONTINUOUS_GPT_OSS && a->c->family != CONTINUOUS_GEMMA4;
    for (size_t i = a->n_old, end; i < a->n; i = end) {
        end = i + 1;
        if (is_role(json_array_get(a->messages, i), "tool"))
            while (end < a->n && is_role(json_array_get(a->messages, end), "tool")) end++;
        TRY(add_group(a, i, end, fused && end == a->n));
    }
    return fused || a->n == a->n_old ? 0 : add_generation_prompt(a);
}

/* ---- the junction ---- */

static bool drawn_by_assistant(const json_t *messages, size_t n) {
    while (n-- > 0) {
        const json_t *m = json_array_get(messages, n);
        if (!is_role(m, "tool")) return is_role(m, "assistant");
    }
    return false;
}

/* Gemma 4: an assistant message behind an assistant's turn goes on with it; results open with their token. */
static void join_gemma(const struct append *a, const int32_t *ids, int64_t n, struct continuous_junction *out) {
    const struct continuous_tokens *c = a->c;
    const json_t *first = json_array_get(a->messages, a->n_old);
    struct text_ids appended = a->ids;
    if (is_role(first, "assistant") && drawn_by_assistant(a->messages, a->n_old)) {
        if (ends_with(ids, n, &c->separator)) out->n_removed = c->separator.n;
        if (appended.n >= c->header.n && ends_with(appended.p, c->header.n, &c->header)) {
            appended.p += c->header.n;
            appended.n -= c->header.n;
        }
    }
    n -= out->n_removed;
    if (is_role(first, "tool") && (n == 0 || ids[n - 1] != c->tool_response) &&
        (appended.n == 0 || appended.p[0] != c->tool_response))
        text_ids_add(&out->added, &c->tool_response, 1);
    text_ids_add(&out->added, appended.p, appended.n);
}

static void join(const struct append *a, const int32_t *ids, int64_t n, struct continuous_junction *out) {
    const struct continuous_tokens *c = a->c;
    const int32_t last = n > 0 ? ids[n - 1] : -1;
    const json_t *first = json_array_get(a->messages, a->n_old);
    switch (c->family) {
    case CONTINUOUS_QWEN:
    case CONTINUOUS_MINIMAX:
        if (last == c->close) text_ids_add(&out->added, &c->newline, 1);
        break;
    case CONTINUOUS_GLM: out->n_removed = n > 0 && (last == c->observation || last == c->user); break;
    case CONTINUOUS_GEMMA4: join_gemma(a, ids, n, out); return;
    case CONTINUOUS_DEEPSEEK:
        if (is_role(first, "user") && ends_with(ids, n, &c->separator)) out->n_removed = c->separator.n;
        break;
    case CONTINUOUS_DEEPSEEK_V4:
        if (a->ids.n > 0 && a->n_old > 0 && is_role(json_array_get(a->messages, a->n_old - 1), "assistant") && last != c->close)
            text_ids_add(&out->added, &c->close, 1);
        break;
    default: break;
    }
    text_ids_add(&out->added, a->ids.p, a->ids.n);
}

static int check_messages(const json_t *messages, int64_t n_old) {
    static const char *const roles[] = {"tool", "user", "system", "assistant"};
    if (!json_is_array(messages)) FAIL(ERR_INPUT, "continuous tokens: the messages are not a list");
    if (n_old < 0 || (int64_t)json_array_size(messages) < n_old)
        FAIL(ERR_INPUT, "continuous tokens: messages can only be appended; the conversation has become shorter");
    for (size_t i = (size_t)n_old; i < json_array_size(messages); i++) {
        const char *role = continuous_tokens__role(json_array_get(messages, i));
        bool known = false;
        for (int k = 0; k < 4; k++) known |= strcmp(role, roles[k]) == 0;
        if (!known)
            FAIL(ERR_INPUT, "continuous tokens: a message of role \"%s\" cannot be appended; tool, user, system and assistant can",
                 role);
    }
    return 0;
}

int continuous_tokens_append(struct continuous_tokens *c, const json_t *messages, int64_t n_old, const json_t *tools,
                             const struct text_ids *stream, struct continuous_junction *out) {
    *out = (struct continuous_junction){0};
    TRY(check_messages(messages, n_old));
    struct append a = {.c = c, .messages = messages, .tools = tools, .n_old = (size_t)n_old, .n = json_array_size(messages)};
    const int rc =
        c->family == CONTINUOUS_DEEPSEEK_V4 ? continuous_tokens__v4_append(c, messages, n_old, tools, &a.ids) : add_groups(&a);
    if (rc == 0) join(&a, stream->p, stream->n, out);
    text_ids_free(&a.ids);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}
