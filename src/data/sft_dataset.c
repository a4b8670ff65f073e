/* sft_dataset.c - supervised examples: token ids with a mask over the tokens to learn.
 * Rows with prompt and completion and ShareGPT's conversations become messages first.
 * Prompt/response rows follow verl's SFTDataset, conversations its
 * MultiTurnSFTDataset (every assistant turn is learned, its header is not).
 * Invariant: loss_mask[t] says whether token t is a target; token 0 never is.
 *
 * verl's SFTDataset keeps the untruncated prompt length in its mask when it cuts
 * on the left; here the mask is cut with the ids. */
#include "data/data_int.h"

#include "base/buf.h"
#include "base/log.h"
#include "text/text.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = 512 }; /* read together */

struct opening {
    const struct sft_dataset_args *a;
    struct data__table t;
    const char *prompt_key, *response_key, *tools_key, *thinking_key;
    /* multi-turn: what the template puts before a first message, and before an assistant's */
    struct text_ids system, header;
    int64_t n_empty;    /* samples without any target left */
    int64_t n_mismatch; /* conversations that render differently as a whole */
};

static int render(const struct opening *o, json_t *messages, json_t *extra, bool generate, struct text_ids *ids) {
    json_t *q = o->a->chat_kwargs ? json_copy((json_t *)(uintptr_t)o->a->chat_kwargs) : json_object();
    json_object_set(q, "messages", messages);
    json_object_set_new(q, "add_generation_prompt", json_boolean(generate));
    if (extra) json_object_update(q, extra);
    const int rc = chat_template_encode(o->a->chat, q, NULL, ids);
    json_decref(q);
    return rc;
}

/* --- growing sample --- */

struct draft {
    struct text_ids ids;
    struct buf mask;
};

static void draft_add(struct draft *s, const int32_t *ids, int64_t n, int64_t n_quiet) {
    text_ids_add(&s->ids, ids, n);
    for (int64_t i = 0; i < n; i++) buf_addc(&s->mask, i >= n_quiet);
}
static void draft_free(struct draft *s) {
    text_ids_free(&s->ids);
    buf_free(&s->mask);
}

/* --- prompt and response --- */

/* row[key][k0][k1]...; NULL with the error set when a level is missing. */
static int dig(json_t *row, const char *key, const char *const *keys, int64_t n, json_t **out) {
    json_t *v = json_object_get(row, key);
    for (; v && n > 0; keys++, n--) {
        v = json_object_get(v, *keys);
        if (!v) FAIL(ERR_INPUT, "column '%s' has no member '%s'", key, *keys);
    }
    *out = v;
    return 0;
}

/* The prompt as the one request of a row. */
static int pair_ask(const struct opening *o, json_t *row, json_t *each) {
    json_t *prompt, *response;
    TRY(dig(row, o->prompt_key, o->a->prompt_dict_keys, o->a->n_prompt_dict_keys, &prompt));
    TRY(dig(row, o->response_key, o->a->response_dict_keys, o->a->n_response_dict_keys, &response));
    if (!json_is_string(prompt) && !json_array_size(prompt))
        FAIL(ERR_INPUT, "column '%s' is neither text nor a list of messages", o->prompt_key);
    if (!json_is_string(response)) FAIL(ERR_INPUT, "column '%s' is not text", o->response_key);
    json_t *messages = json_is_array(prompt) ? json_incref(prompt) : json_pack("[{s:s, s:O}]", "role", "user", "content", prompt);
    json_array_append_new(each, json_pack("{s:o, s:b}", "messages", messages, "add_generation_prompt", 1));
    return 0;
}

static int pair_draft(const struct opening *o, json_t *row, const struct text_ids *ids, struct draft *s) {
    json_t *response;
    struct text_ids r = {0};
    TRY(dig(row, o->response_key, o->a->response_dict_keys, o->a->n_response_dict_keys, &response));
    draft_add(s, ids->p, ids->n, ids->n);
    /* verl appends eos_token as text; its id is the same, and stays one token in every tokenizer */
    const int rc = tokenizer_encode(o->a->tok, json_string_value(response), json_string_length(response), false, &r);
    if (rc == 0) {
        const int32_t eos = tokenizer_eos(o->a->tok);
        if (eos >= 0) text_ids_add(&r, &eos, 1);
        draft_add(s, r.p, r.n, 0);
    }
    text_ids_free(&r);
    return rc;
}

/* --- conversations --- */

/* As verl's extract_system_prompt_and_generation: two probes show what is put
 * before the first message, a third what add_generation_prompt appends. */
static int find_affixes(struct opening *o) {
    struct text_ids one = {0}, two = {0}, gen = {0};
    json_t *m1 = json_pack("[{s:s, s:s}]", "role", "user", "content", "");
    json_t *m2 = json_pack("[{s:s, s:s}, {s:s, s:s}]", "role", "user", "content", "", "role", "user", "content", "");
    int rc = 0;
    TRYG(render(o, m1, NULL, false, &one), out);
    TRYG(render(o, m2, NULL, false, &two), out);
    TRYG(render(o, m1, NULL, true, &gen), out);
    const int64_t turn = two.n - one.n, before = one.n - turn;
    if (turn <= 0 || before < 0 || gen.n < one.n)
        FAILG(out, ERR_UNSUPPORTED,
              "unsupported chat template: turns of a conversation cannot be distinguished; use prompt_key and "
              "response_key");
    text_ids_add(&o->system, one.p, before);
    text_ids_add(&o->header, gen.p + one.n, gen.n - one.n);
out:
    json_decref(m1);
    json_decref(m2);
    text_ids_free(&one);
    text_ids_free(&two);
    text_ids_free(&gen);
    return rc;
}

static const char *role_of(const char *from) {
    static const char *const roles[][2] = {{"human", "user"},        {"user", "user"},           {"gpt", "assistant"},
                                           {"chatgpt", "assistant"}, {"assistant", "assistant"}, {"system", "system"}};
    for (size_t i = 0; from && i < sizeof roles / sizeof *roles; i++)
        if (strcmp(from, roles[i][0]) == 0) return roles[i][1];
    return NULL;
}

/* ShareGPT's turns {from, value} as messages {role, content}. */
static int from_sharegpt(const json_t *turns, const char *column, json_t **messages) {
    const json_t *t;
    size_t i;
    json_t *out = json_array();
    json_array_foreach(turns, i, t) {
        const char *from = json_string_value(json_object_get(t, "from")), *role = role_of(from);
        json_t *value = json_object_get(t, "value");
        if (!role || !json_is_string(value)) {
            json_decref(out);
            FAIL(ERR_INPUT, "turn %zu of column '%s' is from '%s'; expected {\"from\": human, gpt or system, \"value\": text}",
                 i + 1, column, from ? from : "");
        }
        json_array_append_new(out, json_pack("{s:s, s:O}", "role", role, "content", value));
    }
    *messages = out;
    return 0;
}

/* A text as one message of the role, or the messages of a list. */
static void add_messages(json_t *messages, json_t *v, const char *role) {
    if (json_is_string(v)) json_array_append_new(messages, json_pack("{s:s, s:O}", "role", role, "content", v));
    else json_array_extend(messages, v);
}

static bool is_part(const json_t *v) { return json_is_string(v) || json_array_size(v) > 0; }

/* The columns that a row has, for a message. Caller frees. */
static char *columns_of(const json_t *row) {
    struct buf b = {0};
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)row, name, v) buf_addf(&b, "%s%s", b.n ? ", " : "", name);
    return b.p ? buf_take(&b) : xstrdup("none");
}

/* Puts messages into a row that has a conversation in another form. */
static int complete(const struct opening *o, json_t *row) {
    const char *key = o->a->messages_key;
    const json_t *given = json_object_get(row, key);
    json_t *prompt = json_object_get(row, "prompt"), *answer = json_object_get(row, "completion"), *messages = NULL;
    if (given && json_is_null(given)) given = NULL;
    if (!given && json_is_array(json_object_get(row, "conversations"))) given = json_object_get(row, key = "conversations");
    if (!is_part(answer)) answer = json_object_get(row, "response");
    if (json_object_get(json_array_get(given, 0), "from")) TRY(from_sharegpt(given, key, &messages));
    else if (given) messages = json_incref((json_t *)(uintptr_t)given);
    else if (is_part(prompt) && is_part(answer)) {
        messages = json_array();
        add_messages(messages, prompt, "user");
        add_messages(messages, answer, "assistant");
    } else {
        char *have = columns_of(row);
        const int rc =
            err_set(ERR_INPUT, __FILE__, __LINE__,
                    "there is no column '%s'; it has: %s; a row has messages, or prompt and completion (or response), or "
                    "conversations (ShareGPT)",
                    key, have);
        free(have);
        return rc;
    }
    json_object_set_new(row, o->a->messages_key, messages);
    return 0;
}

static void ask(json_t *each, json_t *messages, const json_t *extra) {
    json_t *q = json_copy((json_t *)(uintptr_t)extra);
    json_object_set_new(q, "messages", messages);
    json_array_append_new(each, q);
}

/* Each message alone, then the whole conversation. */
static int chat_ask(const struct opening *o, json_t *row, json_t *each) {
    TRY(complete(o, row));
    json_t *messages = json_object_get(row, o->a->messages_key), *m;
    json_t *thinking = json_object_get(row, o->thinking_key), *tools = json_object_get(row, o->tools_key);
    size_t i;
    if (json_array_size(messages) == 0)
        FAIL(ERR_INPUT, "column '%s' is not a list of messages {role, content}", o->a->messages_key);
    json_array_foreach(messages, i, m) if (!json_is_string(json_object_get(m, "role")))
        FAIL(ERR_INPUT, "message %zu has no role", i + 1);
    json_t *extra = json_pack("{s:b}", "add_generation_prompt", 0);
    if (thinking && !json_is_null(thinking)) json_object_set(extra, "enable_thinking", thinking);
    json_t *first = json_copy(extra); /* tools are announced once, with the first message */
    if (json_array_size(tools)) json_object_set(first, "tools", tools);
    json_array_foreach(messages, i, m) ask(each, json_pack("[O]", m), i == 0 ? first : extra);
    ask(each, json_incref(messages), first);
    json_decref(extra);
    json_decref(first);
    return 0;
}

/* Message i of a conversation, as it was rendered alone. */
static void add_turn(const struct opening *o, const json_t *message, size_t i, const struct text_ids *ids, struct draft *s) {
    const char *role = json_string_value(json_object_get(message, "role"));
    int64_t skip = i > 0 && strcmp(role, "system") != 0 ? o->system.n : 0;
    if (skip > ids->n) skip = ids->n;
    const int64_t n = ids->n - skip;
    const bool learn = strcmp(role, "assistant") == 0;
    draft_add(s, ids->p + skip, n, learn ? o->header.n : n);
}

static int check_whole(struct opening *o, const struct text_ids *whole, const struct draft *s) {
    if (whole->n == s->ids.n && (whole->n == 0 || memcmp(whole->p, s->ids.p, (size_t)whole->n * sizeof *whole->p) == 0)) return 0;
    if (!o->a->ignore_input_ids_mismatch)
        FAIL(ERR_INPUT, "the chat template renders the whole conversation differently from its turns one by "
                        "one (templates that change earlier turns do); set "
                        "data.ignore_input_ids_mismatch=True to train on the turns");
    o->n_mismatch++;
    return 0;
}

static int chat_draft(struct opening *o, json_t *row, const struct text_ids *ids, struct draft *s) {
    json_t *messages = json_object_get(row, o->a->messages_key), *m;
    size_t i;
    json_array_foreach(messages, i, m) add_turn(o, m, i, &ids[i], s);
    return check_whole(o, &ids[i], s);
}

/* --- open --- */

/* Cuts, and moves the draft's arrays into a sample. */
static int finish(struct opening *o, struct draft *s, struct sft_sample *out) {
    const int64_t n = s->ids.n, max = o->a->max_length;
    if (n == 0) FAIL(ERR_INPUT, "the row renders to no tokens");
    const int64_t kept = data_truncate(s->ids.p, n, max, o->a->truncation);
    if (kept < 0) return err_wrap((int)kept, "data.max_length, data.truncation");
    if (kept < n && o->a->truncation == DATA_TRUNC_LEFT) memmove(s->mask.p, s->mask.p + n - kept, (size_t)kept);
    s->mask.p[0] = 0;
    bool any = false;
    for (int64_t t = 0; t < kept; t++) any |= s->mask.p[t] != 0;
    o->n_empty += !any;
    *out = (struct sft_sample){s->ids.p, (uint8_t *)buf_take(&s->mask), kept};
    s->ids = (struct text_ids){0};
    return 0;
}

/* Rows [lo, hi), rendered together. *at: the row at fault after an error. */
static int add_rows(struct sft_dataset *d, struct opening *o, int64_t lo, int64_t hi, int64_t *at) {
    json_t *each = json_array();
    int64_t *first = xcalloc((size_t)(hi - lo) + 1, sizeof *first), done = 0; /* requests of row i: first[i - lo] on */
    struct text_ids *ids = NULL;
    int rc = 0;
    for (*at = lo; *at < hi; ++*at) {
        json_t *row = json_array_get(o->t.rows, (size_t)*at);
        first[*at - lo] = (int64_t)json_array_size(each);
        TRYG(o->a->messages_key ? chat_ask(o, row, each) : pair_ask(o, row, each), out);
    }
    const int64_t n = first[hi - lo] = (int64_t)json_array_size(each);
    ids = xcalloc((size_t)n, sizeof *ids);
    rc = chat_template_encode_many(o->a->chat, o->a->chat_kwargs, each, ids, &done);
    if (rc < 0) {
        for (*at = lo; first[*at - lo + 1] <= done; ++*at) {
        }
        goto out;
    }
    for (*at = lo; *at < hi; ++*at) {
        struct draft s = {0};
        json_t *row = json_array_get(o->t.rows, (size_t)*at);
        const struct text_ids *own = &ids[first[*at - lo]];
        rc = o->a->messages_key ? chat_draft(o, row, own, &s) : pair_draft(o, row, own, &s);
        if (rc == 0 && d->keys) rc = data_sampler_key(o->a->sampler, row, &d->keys[d->n]);
        if (rc == 0) rc = finish(o, &s, &d->samples[d->n]);
        draft_free(&s);
        if (rc < 0) break;
        d->n++;
    }
out:
    for (int64_t i = 0; ids && i < first[hi - lo]; i++) text_ids_free(&ids[i]);
    free(ids);
    free(first);
    json_decref(each);
    return rc;
}

/* What the rows as a whole lack. */
static int check_samples(const struct opening *o, const struct sft_dataset *d) {
    const struct sft_dataset_args *a = o->a;
    if (o->n_mismatch)
        log_note("%s: %lld of %lld conversations render differently turn by turn than as a whole; the turns are used", a->what,
                 (long long)o->n_mismatch, (long long)d->n);
    if (o->n_empty == d->n)
        FAIL(ERR_INPUT, "%s: no row has a token to learn within data.max_length=%lld; raise it", a->what, (long long)a->max_length);
    if (o->n_empty)
        log_warn("%s: %lld of %lld rows have no token to learn within data.max_length=%lld", a->what, (long long)o->n_empty,
                 (long long)d->n, (long long)a->max_length);
    return 0;
}

int sft_dataset_open(struct sft_dataset **out, const struct sft_dataset_args *a) {
    struct sft_dataset *d = xcalloc(1, sizeof *d);
    struct opening o = {.a = a,
                        .prompt_key = a->prompt_key ? a->prompt_key : "prompt",
                        .response_key = a->response_key ? a->response_key : "response",
                        .tools_key = a->tools_key ? a->tools_key : "tools",
                        .thinking_key = a->enable_thinking_key ? a->enable_thinking_key : "enable_thinking"};
    const char *const pair[] = {o.prompt_key, o.response_key, NULL}, *const chat[] = {a->messages_key, NULL};
    const bool any = a->messages_key && strcmp(a->messages_key, "messages") == 0; /* form of conversation: see complete */
    const char *const *const needed = any ? NULL : a->messages_key ? chat : pair;
    const struct data__table_args ta = {.files = a->files,
                                        .n_files = a->n_files,
                                        .need = {needed, NULL},
                                        .max_samples = a->max_samples,
                                        .shuffle = a->shuffle,
                                        .seed = a->seed,
                                        .what = a->what};
    int rc = 0;
    if (a->max_length < 2) FAILG(out, ERR_INVAL, "data.max_length=%lld must be at least 2", (long long)a->max_length);
    if (a->truncation == DATA_TRUNC_MIDDLE)
        FAILG(out, ERR_INVAL, "data.truncation=middle cuts a conversation in the middle; use error, left or right");
    TRYG(data__table_read(&o.t, &ta), out);
    if (a->messages_key) TRYG(find_affixes(&o), out);
    d->samples = xcalloc((size_t)o.t.n, sizeof *d->samples);
    if (a->sampler && a->sampler->order >= DATA_WEIGHTED) d->keys = xcalloc((size_t)o.t.n, sizeof *d->keys);
    for (int64_t lo = 0, at; lo < o.t.n; lo += ROWS) {
        rc = add_rows(d, &o, lo, o.t.n - lo < ROWS ? o.t.n : lo + ROWS, &at);
        if (rc == 0) continue;
        char *place = data__table_place(&o.t, at);
        err_wrap(rc, "%s: %s", a->what, place);
        free(place);
        goto out;
    }
    TRYG(check_samples(&o, d), out);
    *out = d;
    d = NULL;
out:
    sft_dataset_close(d);
    data__table_free(&o.t);
    text_ids_free(&o.system);
    text_ids_free(&o.header);
    return rc;
}

void sft_dataset_close(struct sft_dataset *d) {
    if (!d) return;
    for (int64_t i = 0; i < d->n; i++) {
        free(d->samples[i].ids);
        free(d->samples[i].loss_mask);
    }
    free(d->samples);
    free(d->keys);
    free(d);
}
