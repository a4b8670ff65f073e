/* rl_dataset.c - the RL dataset (verl/utils/dataset/rl_dataset.py): rows with a list
 * of messages, rendered by the chat template and tokenised once when opened, then
 * returned as batches under verl's column names.  Order is the sampler's.
 * Invariant: every prompt of an open dataset has 1 to max_prompt_length ids. */
#include "data/data_int.h"

#include "base/buf.h"
#include "base/log.h"
#include "text/text.h"

#include <stdlib.h>
#include <string.h>

/* --- truncation --- */

int64_t data_truncate(int32_t *ids, int64_t n, int64_t max, enum data_truncation how) {
    if (n <= max) return n;
    int64_t head = 0; /* ids kept from the front; the rest from the end */
    switch (how) {
    case DATA_TRUNC_ERROR:
        FAIL(ERR_INPUT,
             "%lld tokens, the limit is %lld; raise the limit, filter such rows, or set truncation to left, "
             "right or middle",
             (long long)n, (long long)max);
    case DATA_TRUNC_LEFT: head = 0; break;
    case DATA_TRUNC_RIGHT: head = max; break;
    case DATA_TRUNC_MIDDLE: head = max / 2; break;
    }
    memmove(ids + head, ids + n - (max - head), (size_t)(max - head) * sizeof *ids);
    return max;
}

/* --- one prompt --- */

struct opening {
    const struct rl_dataset_args *a;
    struct data__table t;
    json_t *common; /* what all requests to the template share */
    int64_t shortest;
    int64_t n_bare; /* rows without reward_model, for a scorer of the user's own */
};

#define OWN_SOURCE "custom" /* the data source of a row that names none, where a scorer of the user's own grades it */
#define EXAMPLE                                                                                                  \
    "; a row is {\"data_source\": \"openai/gsm8k\", \"prompt\": [{\"role\": \"user\", \"content\": \"2+2?\"}], " \
    "\"reward_model\": {\"ground_truth\": \"4\"}}; with reward.custom_reward_function.path the prompt alone is enough"

static bool has_items(const json_t *row, const char *key) { return json_array_size(json_object_get(row, key)) > 0; }

/* A text becomes one message of the user; with a scorer of the user's own a row without a data source has one. */
static void complete(const struct rl_dataset *d, struct opening *o, json_t *row) {
    json_t *prompt = json_object_get(row, d->prompt_key), *source = json_object_get(row, d->reward_fn_key);
    if (json_is_string(prompt))
        json_object_set_new(row, d->prompt_key, json_pack("[{s:s, s:O}]", "role", "user", "content", prompt));
    if (!o->a->own_scorer) return;
    if (!source || json_is_null(source)) json_object_set_new(row, d->reward_fn_key, json_string(OWN_SOURCE));
    o->n_bare += !json_is_object(json_object_get(row, "reward_model"));
}

static int check_prompt(const struct rl_dataset *d, const json_t *row) {
    const json_t *messages = json_object_get(row, d->prompt_key), *m;
    size_t i;
    if (json_array_size(messages) == 0)
        FAIL(ERR_INPUT, "column '%s' is neither text nor a list of messages {role, content}", d->prompt_key);
    json_array_foreach(messages, i, m) {
        if (!json_is_string(json_object_get(m, "role")))
            FAIL(ERR_INPUT, "message %zu of column '%s' has no role", i + 1, d->prompt_key);
    }
    const json_t *source = json_object_get(row, d->reward_fn_key);
    if (!json_is_string(source)) FAIL(ERR_INPUT, "column '%s' is not text", d->reward_fn_key);
    if (strlen(json_string_value(source)) < json_string_length(source))
        FAIL(ERR_INPUT, "column '%s' holds a NUL character, which the name of a metric cannot", d->reward_fn_key);
    if (has_items(row, "images") || has_items(row, "videos") || has_items(row, "audios"))
        FAIL(ERR_UNSUPPORTED, "images, videos and audio in prompts are unsupported");
    return 0;
}

/* verl drops the three from apply_chat_template_kwargs: they say how Python returns ids. */
static json_t *render_request(const json_t *kwargs) {
    json_t *q = kwargs ? json_copy((json_t *)(uintptr_t)kwargs) : json_object();
    json_object_del(q, "tokenize");
    json_object_del(q, "return_dict");
    json_object_del(q, "return_tensors");
    json_object_set_new(q, "add_generation_prompt", json_true());
    return q;
}

/* --- open --- */

enum { ROWS = 1024 }; /* read together */

/* Adds row i with its ids (taken), unless the filter drops it. */
static int add_row(struct rl_dataset *d, struct opening *o, int64_t i, struct text_ids *ids) {
    const struct rl_dataset_args *a = o->a;
    if (ids->n == 0) FAIL(ERR_INPUT, "the chat template renders the prompt to nothing");
    if (o->shortest == 0 || ids->n < o->shortest) o->shortest = ids->n;
    if (a->filter_overlong_prompts && ids->n > a->max_prompt_length) {
        d->n_filtered++;
        return 0;
    }
    const int64_t n = data_truncate(ids->p, ids->n, a->max_prompt_length, a->truncation);
    if (n < 0) return err_wrap((int)n, "data.max_prompt_length, data.filter_overlong_prompts, data.truncation");
    if (d->keys) TRY(data_sampler_key(a->sampler, json_array_get(o->t.rows, (size_t)i), &d->keys[d->n]));
    d->prompts[d->n++] = (struct rl_prompt){ids->p, n, o->t.uid[i], json_incref(json_array_get(o->t.rows, (size_t)i))};
    *ids = (struct text_ids){0};
    return 0;
}

/* Rows [lo, hi), their prompts rendered together. *at: the row at fault after an error. */
static int add_rows(struct rl_dataset *d, struct opening *o, int64_t lo, int64_t hi, int64_t *at) {
    struct text_ids *ids = xcalloc((size_t)(hi - lo), sizeof *ids);
    json_t *each = json_array();
    int64_t done = 0;
    int rc = 0;
    for (*at = lo; *at < hi; ++*at) {
        json_t *row = json_array_get(o->t.rows, (size_t)*at);
        complete(d, o, row);
        TRYG(check_prompt(d, row), out);
        json_t *tools = NULL, *q = json_pack("{s:O}", "messages", json_object_get(row, d->prompt_key));
        json_array_append_new(each, q);
        if (o->a->tools) TRYG(o->a->tools(o->a->tools_arg, row, &tools), out);
        if (json_array_size(tools) > 0) json_object_set(q, "tools", tools);
        json_decref(tools);
    }
    rc = chat_template_encode_many(o->a->chat, o->common, each, ids, &done);
    *at = lo + done;
    if (rc < 0) goto out;
    for (*at = lo; *at < hi; ++*at) TRYG(add_row(d, o, *at, &ids[*at - lo]), out);
out:
    for (int64_t i = 0; i < hi - lo; i++) text_ids_free(&ids[i]);
    free(ids);
    json_decref(each);
    return rc;
}

int rl_dataset_open(struct rl_dataset **out, const struct rl_dataset_args *a) {
    struct rl_dataset *d = xcalloc(1, sizeof *d);
    struct opening o = {.a = a, .common = render_request(a->chat_kwargs)};
    int rc = 0;
    d->prompt_key = xstrdup(a->prompt_key ? a->prompt_key : "prompt");
    d->reward_fn_key = xstrdup(a->reward_fn_key ? a->reward_fn_key : "data_source");
    /* a scorer of the user's own needs the prompt alone */
    const char *const required[] = {d->prompt_key, a->own_scorer ? NULL : d->reward_fn_key, "reward_model", NULL};
    const struct data__table_args ta = {.files = a->files,
                                        .n_files = a->n_files,
                                        .need = {required, EXAMPLE},
                                        .max_samples = a->max_samples,
                                        .shuffle = a->shuffle,
                                        .seed = a->seed,
                                        .what = a->what,
                                        .cls = a->cls.path ? &a->cls : NULL,
                                        .prompt_key = d->prompt_key};

    if (a->max_prompt_length < 1)
        FAILG(out, ERR_INVAL, "data.max_prompt_length=%lld must be at least 1", (long long)a->max_prompt_length);
    TRYG(data__table_read(&o.t, &ta), out);
    d->n_rows = o.t.n_total;
    d->prompts = xcalloc((size_t)o.t.n, sizeof *d->prompts);
    if (a->sampler && a->sampler->order >= DATA_WEIGHTED) d->keys = xcalloc((size_t)o.t.n, sizeof *d->keys);
    for (int64_t lo = 0, at; lo < o.t.n; lo += ROWS) {
        rc = add_rows(d, &o, lo, o.t.n - lo < ROWS ? o.t.n : lo + ROWS, &at);
        if (rc == 0) continue;
        char *place = data__table_place(&o.t, at);
        err_wrap(rc, "%s: %s", a->what, place);
        free(place);
        goto out;
    }
    if (d->n == 0)
        FAILG(out, ERR_INPUT,
              "%s: all %lld prompts are longer than data.max_prompt_length=%lld tokens (the shortest has "
              "%lld); raise it",
              a->what, (long long)o.t.n, (long long)a->max_prompt_length, (long long)o.shortest);
    if (o.n_bare)
        log_note("%s: %lld rows have no reward_model: compute_score gets ground_truth=None, and in extra_info the row's other "
                 "columns where it has no extra_info",
                 a->what, (long long)o.n_bare);
    log_info("%s: %lld rows, %lld used, %lld dropped as longer than %lld tokens", a->what, (long long)d->n_rows, (long long)d->n,
             (long long)d->n_filtered, (long long)a->max_prompt_length);
    *out = d;
    d = NULL;
out:
    rl_dataset_close(d);
    data__table_free(&o.t);
    json_decref(o.common);
    return rc;
}

void rl_dataset_close(struct rl_dataset *d) {
    if (!d) return;
    for (int64_t i = 0; i < d->n; i++) {
        free(d->prompts[i].ids);
        json_decref(d->prompts[i].row);
    }
    free(d->prompts);
    free(d->keys);
    free(d->prompt_key);
    free(d->reward_fn_key);
    free(d);
}

/* --- batches --- */

/* A JSON column: a key of every row, or with NULL the whole row. */
static int add_json(struct batch *b, const struct rl_dataset *d, const int64_t *idx, const char *name, const char *key) {
    json_t **v = xmalloc((size_t)b->n_rows * sizeof *v);
    for (int64_t i = 0; i < b->n_rows; i++) {
        json_t *row = d->prompts[idx[i]].row;
        v[i] = key ? json_object_get(row, key) : row;
    }
    const int rc = batch_add(b, name, BATCH_JSON, NULL, v, NULL);
    free(v);
    return rc;
}

int rl_dataset_batch(const struct rl_dataset *d, const int64_t *idx, int64_t n, struct batch *out) {
    struct batch b;
    struct batch_col *ids, *c;
    int rc = 0;
    int64_t *lens = xmalloc((size_t)n * sizeof *lens);
    batch_init(&b, n);
    for (int64_t i = 0; i < n; i++) {
        if (idx[i] < 0 || idx[i] >= d->n)
            FAILG(fail, ERR_INTERNAL, "prompt %lld of a dataset of %lld", (long long)idx[i], (long long)d->n);
        lens[i] = d->prompts[idx[i]].n_ids;
    }
    TRYG(batch_add(&b, "prompts", BATCH_I32, lens, NULL, &ids), fail);
    for (int64_t i = 0; i < n; i++) memcpy(ids->i32 + ids->off[i], d->prompts[idx[i]].ids, (size_t)lens[i] * sizeof(int32_t));
    TRYG(batch_add(&b, "uid", BATCH_I64, NULL, NULL, &c), fail);
    for (int64_t i = 0; i < n; i++) c->i64[i] = d->prompts[idx[i]].uid;
    TRYG(batch_add(&b, "data_source", BATCH_STR, NULL, NULL, &c), fail);
    for (int64_t i = 0; i < n; i++) {
        const json_t *source = json_object_get(d->prompts[idx[i]].row, d->reward_fn_key);
        batch_set_str(c, i, json_string_value(source), json_string_length(source));
    }
    TRYG(add_json(&b, d, idx, "raw_prompt", d->prompt_key), fail);
    TRYG(add_json(&b, d, idx, "row", NULL), fail);
    free(lens);
    *out = b;
    return 0;
fail:
    free(lens);
    batch_free(&b);
    return rc;
}
