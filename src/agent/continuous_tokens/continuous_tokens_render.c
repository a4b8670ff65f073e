/* continuous_tokens_render.c - renders of conversations and what one has more than another.
 *
 * Renders are texts where they can be, since ids of a text that splits at an added token are those of its two parts: then only
 * what is new is made into ids.  Where it does not split, ids are compared.
 * Invariant: the ids are those of verl's way, which makes ids of both renders and compares them. */
#include "agent/continuous_tokens/continuous_tokens_int.h"
#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

enum { KEEP_PREFIXES = 512, KEEP_TOOLSETS = 4096 };

void continuous_tokens__text_free(struct continuous_tokens__text *t) {
    buf_free(&t->text);
    text_ids_free(&t->ids);
    *t = (struct continuous_tokens__text){0};
}

int continuous_tokens__ids(const struct continuous_tokens *c, struct continuous_tokens__text *t) {
    if (t->has_ids) return 0;
    TRY(tokenizer_encode(c->tok, t->text.p ? t->text.p : "", t->text.n, false, &t->ids));
    t->has_ids = true;
    return 0;
}

/* ---- renders ---- */

static json_t *common_of(const struct continuous_tokens *c, const json_t *tools) {
    json_t *common = c->kwargs ? json_copy(c->kwargs) : json_object();
    if (tools) json_object_set(common, "tools", (json_t *)(uintptr_t)tools);
    return common;
}

static json_t *request_of(const struct continuous_tokens__request *q) {
    json_t *r = json_object();
    json_object_set(r, "messages", (json_t *)(uintptr_t)q->messages);
    json_object_set_new(r, "add_generation_prompt", json_boolean(q->generation_prompt));
    return r;
}

static bool starts_with(const struct buf *b, const struct buf *prefix) {
    return b->n >= prefix->n && (prefix->n == 0 || memcmp(b->p, prefix->p, prefix->n) == 0);
}

/* Whether the ids of text are those of its prefix and of the rest. */
static bool splits(const struct continuous_tokens *c, const struct buf *text, const struct buf *prefix) {
    if (!starts_with(text, prefix)) return false;
    return prefix->n == 0 || prefix->n == text->n || tokenizer_splits_at(c->tok, text->p, text->n, prefix->n);
}

/* all without the first n_cut ids. */
static void cut_ids(const struct text_ids *all, int64_t n_cut, struct text_ids *out) {
    if (n_cut < all->n) text_ids_add(out, all->p + n_cut, all->n - n_cut);
}

/* An empty user message in front, whose render is cut off, by the number of its ids. */
static int render_behind_user(struct continuous_tokens *c, const struct continuous_tokens__request *q, const json_t *tools,
                              struct continuous_tokens__text *out) {
    json_t *common = common_of(c, tools), *ask;
    json_t *user = json_pack("[{s:s, s:[{s:s, s:s}]}]", "role", "user", "content", "type", "text", "text", "");
    json_t *both = json_copy(user);
    struct continuous_tokens__text a = {.is_text = true}, b = {.is_text = true};
    int rc;
    json_array_extend(both, (json_t *)(uintptr_t)q->messages);
    ask = request_of(&(struct continuous_tokens__request){user, false});
    json_object_update_missing(ask, common);
    rc = chat_template_render(c->chat, ask, &a.text);
    json_decref(ask);
    if (rc < 0) goto done;
    ask = request_of(&(struct continuous_tokens__request){both, q->generation_prompt});
    json_object_update_missing(ask, common);
    rc = chat_template_render(c->chat, ask, &b.text);
    json_decref(ask);
    if (rc < 0) goto done;
    out->is_text = splits(c, &b.text, &a.text);
    if (out->is_text) {
        buf_add(&out->text, b.text.p + a.text.n, b.text.n - a.text.n);
        goto done;
    }
    TRYG(continuous_tokens__ids(c, &a), done);
    TRYG(continuous_tokens__ids(c, &b), done);
    cut_ids(&b.ids, a.ids.n, &out->ids);
    out->has_ids = true;
done:
    continuous_tokens__text_free(&a);
    continuous_tokens__text_free(&b);
    json_decref(user);
    json_decref(both);
    json_decref(common);
    return rc;
}

int continuous_tokens__render(struct continuous_tokens *c, const struct continuous_tokens__request *q, int64_t n,
                              const json_t *tools, struct continuous_tokens__text *out) {
    json_t *common = common_of(c, tools);
    int rc = 0;
    for (int64_t done = 0; rc == 0 && done < n; done++) {
        json_t *each = json_array(), *texts = NULL;
        for (int64_t i = done; i < n; i++) json_array_append_new(each, request_of(&q[i]));
        rc = chat_template_render_many(c->chat, common, each, &texts);
        json_decref(each);
        if (rc < 0) break;
        for (size_t i = 0; i < json_array_size(texts); i++) {
            const json_t *t = json_array_get(texts, i);
            out[done] = (struct continuous_tokens__text){.is_text = true};
            buf_add(&out[done++].text, json_string_value(t), json_string_length(t));
        }
        json_decref(texts);
        if (done == n) break;
        out[done] = (struct continuous_tokens__text){0};
        rc = render_behind_user(c, &q[done], tools, &out[done]); /* the template refused this one */
    }
    json_decref(common);
    return rc;
}

/* ---- what was rendered before ---- */

void continuous_tokens__forget(struct continuous_tokens *c) {
    for (int64_t i = 0; i < c->n_prefix; i++) continuous_tokens__text_free(&c->prefix[i]);
    c->n_prefix = 0;
    map_free(&c->prefixes);
}

int64_t continuous_tokens__toolset(struct continuous_tokens *c, const json_t *tools) {
    if (!tools) return -1;
    if (tools == c->toolset) return c->toolset_no;
    struct buf text = {0};
    int64_t no;
    json_dump_line(&text, tools);
    if (!map_get(&c->toolsets, text.p, text.n, &no)) {
        if (c->toolsets.n >= KEEP_TOOLSETS) { /* numbers go on: those of before are not given again */
            no = c->toolsets.entries[c->toolsets.n - 1].value + 1;
            map_free(&c->toolsets);
        } else {
            no = c->toolsets.n ? c->toolsets.entries[c->toolsets.n - 1].value + 1 : 0;
        }
        map_set(&c->toolsets, text.p, text.n, no);
    }
    buf_free(&text);
    json_decref(c->toolset);
    c->toolset = json_incref((json_t *)(uintptr_t)tools);
    c->toolset_no = no;
    return no;
}

/* The kept render of a prefix, NULL: none; *key is what it is kept under. */
static struct continuous_tokens__text *find_prefix(struct continuous_tokens *c, const json_t *prefix, const json_t *tools,
                                                   struct buf *key) {
    int64_t at;
    buf_addf(key, "%lld ", (long long)continuous_tokens__toolset(c, tools));
    json_dump_line(key, prefix);
    return map_get(&c->prefixes, key->p, key->n, &at) ? &c->prefix[at] : NULL;
}

static struct continuous_tokens__text *keep_prefix(struct continuous_tokens *c, const struct buf *key,
                                                   struct continuous_tokens__text *t) {
    if (c->n_prefix >= KEEP_PREFIXES) continuous_tokens__forget(c);
    xgrow((void **)&c->prefix, &c->prefix_cap, c->n_prefix + 1, sizeof *c->prefix);
    map_set(&c->prefixes, key->p, key->n, c->n_prefix);
    c->prefix[c->n_prefix] = *t;
    *t = (struct continuous_tokens__text){0};
    return &c->prefix[c->n_prefix++];
}

/* ---- differences ---- */

static int no_prefix(const json_t *group) {
    struct buf roles = {0};
    for (size_t i = 0; i < json_array_size(group); i++)
        buf_addf(&roles, "%s%s", i ? ", " : "", continuous_tokens__role(json_array_get(group, i)));
    if (!roles.n) buf_adds(&roles, "generation prompt");
    err_set(ERR_INPUT, __FILE__, __LINE__,
            "continuous tokens: the chat template cannot append (%s): what it writes before changes; use a template that keeps "
            "what it has written",
            roles.p);
    buf_free(&roles);
    return ERR_INPUT;
}

static int subtract(struct continuous_tokens *c, struct continuous_tokens__text *a, struct continuous_tokens__text *b,
                    const json_t *group, struct text_ids *ids) {
    if (a->is_text && b->is_text && splits(c, &b->text, &a->text))
        return tokenizer_encode(c->tok, b->text.p ? b->text.p + a->text.n : "", b->text.n - a->text.n, false, ids);
    TRY(continuous_tokens__ids(c, a));
    TRY(continuous_tokens__ids(c, b));
    if (b->ids.n < a->ids.n || (a->ids.n && memcmp(a->ids.p, b->ids.p, (size_t)a->ids.n * sizeof *a->ids.p) != 0))
        return no_prefix(group);
    cut_ids(&b->ids, a->ids.n, ids);
    return 0;
}

int continuous_tokens__delta(struct continuous_tokens *c, const struct continuous_tokens__delta *d, const json_t *tools,
                             struct text_ids *ids) {
    json_t *both = json_copy((json_t *)(uintptr_t)d->prefix);
    struct continuous_tokens__text fresh[2] = {{{0}, 0, {0}, 0}}, *a = NULL, *b = &fresh[1];
    struct buf key = {0};
    int rc;
    json_array_extend(both, (json_t *)(uintptr_t)d->group);
    if (d->keep) a = find_prefix(c, d->prefix, tools, &key);
    const struct continuous_tokens__request q[] = {{d->prefix, false}, {both, d->generation_prompt}};
    if (a) TRYG(continuous_tokens__render(c, q + 1, 1, tools, fresh + 1), done);
    else TRYG(continuous_tokens__render(c, q, 2, tools, fresh), done);
    if (!a) a = d->keep ? keep_prefix(c, &key, &fresh[0]) : &fresh[0];
    rc = subtract(c, a, b, d->group, ids);
done:
    continuous_tokens__text_free(&fresh[0]);
    continuous_tokens__text_free(&fresh[1]);
    buf_free(&key);
    json_decref(both);
    return rc;
}
