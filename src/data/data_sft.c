/* data_sft.c - supervised examples: token ids with a mask over the tokens to learn.
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

struct opening {
    const struct sft_dataset_args *a;
    struct data__table t;
    const char *prompt_key, *response_key, *tools_key, *thinking_key;
    /* multi-turn: what the template puts before a first message, and before an assistant's */
    struct text_ids system, header;
    int64_t n_empty; /* samples without any target left */
};

static int render(const struct opening *o, json_t *messages, json_t *extra, bool generate,
                  struct text_ids *ids) {
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
static int dig(json_t *row, const char *key, const char *const *keys, json_t **out) {
    json_t *v = json_object_get(row, key);
    for (; v && keys && *keys; keys++) {
        v = json_object_get(v, *keys);
        if (!v) FAIL(ERR_INPUT, "column '%s' has no member '%s'", key, *keys);
    }
    *out = v;
    return 0;
}

static int pair_draft(const struct opening *o, json_t *row, struct draft *s) {
    json_t *prompt, *response, *messages;
    struct text_ids r = {0};
    int rc = 0;
    TRY(dig(row, o->prompt_key, o->a->prompt_dict_keys, &prompt));
    TRY(dig(row, o->response_key, o->a->response_dict_keys, &response));
    if (!json_is_string(prompt) && !json_array_size(prompt))
        FAIL(ERR_INPUT, "column '%s' is neither text nor a list of messages", o->prompt_key);
    if (!json_is_string(response)) FAIL(ERR_INPUT, "column '%s' is not text", o->response_key);
    messages = json_is_array(prompt) ? json_incref(prompt)
                                     : json_pack("[{s:s, s:O}]", "role", "user", "content", prompt);

    rc = render(o, messages, NULL, true, &s->ids);
    json_decref(messages);
    if (rc < 0) return rc;
    for (int64_t i = 0; i < s->ids.n; i++) buf_addc(&s->mask, 0);
    /* verl appends eos_token as text; its id is the same, and stays one token in every tokenizer */
    rc = tokenizer_encode(o->a->tok, json_string_value(response), json_string_length(response), false, &r);
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
    json_t *m2 =
        json_pack("[{s:s, s:s}, {s:s, s:s}]", "role", "user", "content", "", "role", "user", "content", "");
    int rc = 0;
    TRYG(render(o, m1, NULL, false, &one), out);
    TRYG(render(o, m2, NULL, false, &two), out);
    TRYG(render(o, m1, NULL, true, &gen), out);
    const int64_t turn = two.n - one.n, before = one.n - turn;
    if (turn <= 0 || before < 0 || gen.n < one.n)
        FAILG(out, ERR_UNSUPPORTED,
              "unsupported chat template: turns of a conversation cannot be told apart; use prompt_key and "
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

/* Message i of a conversation, rendered alone. */
static int add_turn(const struct opening *o, json_t *message, size_t i, json_t *extra, struct draft *s) {
    struct text_ids ids = {0};
    const char *role = json_string_value(json_object_get(message, "role"));
    if (!role) FAIL(ERR_INPUT, "message %zu has no role", i + 1);
    json_t *alone = json_pack("[O]", message);
    int rc = render(o, alone, extra, false, &ids);
    json_decref(alone);
    if (rc == 0) {
        int64_t skip = i > 0 && strcmp(role, "system") != 0 ? o->system.n : 0;
        if (skip > ids.n) skip = ids.n;
        const int64_t n = ids.n - skip;
        const bool learn = strcmp(role, "assistant") == 0;
        draft_add(s, ids.p + skip, n, learn ? o->header.n : n);
    }
    text_ids_free(&ids);
    return rc;
}

static int check_whole(const struct opening *o, json_t *messages, json_t *extra, const struct draft *s) {
    struct text_ids whole = {0};
    int rc = render(o, messages, extra, false, &whole);
    const bool same = whole.n == s->ids.n &&
                      (whole.n == 0 || memcmp(whole.p, s->ids.p, (size_t)whole.n * sizeof *whole.p) == 0);
    text_ids_free(&whole);
    if (rc < 0 || same) return rc;
    if (!o->a->ignore_input_ids_mismatch)
        FAIL(ERR_INPUT, "the chat template renders the whole conversation differently from its turns one by "
                        "one (templates that change earlier turns do); set "
                        "data.ignore_input_ids_mismatch=True to train on the turns");
    log_note("%s: turns rendered one by one differ from the whole conversation; the turns are used",
             o->a->what);
    return 0;
}

static int chat_draft(const struct opening *o, json_t *row, struct draft *s) {
    json_t *messages = json_object_get(row, o->a->messages_key), *m;
    json_t *thinking = json_object_get(row, o->thinking_key), *tools = json_object_get(row, o->tools_key);
    json_t *extra = json_object(), *first = NULL;
    size_t i;
    int rc = 0;
    if (json_array_size(messages) == 0)
        FAILG(out, ERR_INPUT, "column '%s' is not a list of messages {role, content}", o->a->messages_key);
    if (thinking && !json_is_null(thinking)) json_object_set(extra, "enable_thinking", thinking);
    first = json_copy(extra); /* tools are announced once, with the first message */
    if (json_array_size(tools)) json_object_set(first, "tools", tools);
    json_array_foreach(messages, i, m) TRYG(add_turn(o, m, i, i == 0 ? first : extra, s), out);
    TRYG(check_whole(o, messages, first, s), out);
out:
    json_decref(extra);
    json_decref(first);
    return rc;
}

/* --- open --- */

/* Cuts, and moves the draft's arrays into a sample. */
static int finish(struct opening *o, struct draft *s, struct sft_sample *out) {
    const int64_t n = s->ids.n, max = o->a->max_length;
    if (n == 0) FAIL(ERR_INPUT, "the row renders to no tokens");
    const int64_t kept = data_truncate(s->ids.p, n, max, o->a->truncation);
    if (kept < 0) return err_wrap((int)kept, "data.max_length, data.truncation");
    if (kept < n && o->a->truncation == DATA_TRUNC_LEFT)
        memmove(s->mask.p, s->mask.p + n - kept, (size_t)kept);
    s->mask.p[0] = 0;
    bool any = false;
    for (int64_t t = 0; t < kept; t++) any |= s->mask.p[t] != 0;
    o->n_empty += !any;
    *out = (struct sft_sample){s->ids.p, (uint8_t *)buf_take(&s->mask), kept};
    s->ids = (struct text_ids){0};
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
    const struct data__table_args ta = {
        a->files, a->n_files, a->messages_key ? chat : pair, a->max_samples, a->shuffle, a->seed, a->what};
    int rc = 0;
    if (a->max_length < 2)
        FAILG(out, ERR_INVAL, "data.max_length=%lld must be at least 2", (long long)a->max_length);
    if (a->truncation == DATA_TRUNC_MIDDLE)
        FAILG(out, ERR_INVAL, "data.truncation=middle cuts a conversation apart; use error, left or right");
    TRYG(data__table_read(&o.t, &ta), out);
    if (a->messages_key) TRYG(find_affixes(&o), out);
    d->samples = xcalloc((size_t)o.t.n, sizeof *d->samples);
    for (; d->n < o.t.n; d->n++) {
        struct draft s = {0};
        json_t *row = json_array_get(o.t.rows, (size_t)d->n);
        rc = a->messages_key ? chat_draft(&o, row, &s) : pair_draft(&o, row, &s);
        if (rc == 0) rc = finish(&o, &s, &d->samples[d->n]);
        draft_free(&s);
        if (rc == 0) continue;
        char *place = data__table_place(&o.t, d->n);
        err_wrap(rc, "%s: %s", a->what, place);
        free(place);
        goto out;
    }
    if (o.n_empty == d->n)
        FAILG(out, ERR_INPUT, "%s: no row has a token to learn within data.max_length=%lld; raise it",
              a->what, (long long)a->max_length);
    if (o.n_empty)
        log_warn("%s: %lld of %lld rows have no token to learn within data.max_length=%lld", a->what,
                 (long long)o.n_empty, (long long)d->n, (long long)a->max_length);
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
    free(d);
}
