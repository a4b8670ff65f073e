/* tokenizer.c - opening a tokenizer.json, encoding and decoding.
 *
 * The sections of the file are read by the files named in text_int.h; this one
 * ties them together: which added token gets which id, the post-processor's
 * template, and the working memory that concurrent calls borrow.
 * Invariant: after tokenizer_open nothing of a tokenizer changes but its pool of
 * scratch, which a mutex guards. */
#include "text/text_int.h"

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const size_t MAX_TEXT = (size_t)1 << 30; /* positions in a word are 32 bits wide */

void text_ids_free(struct text_ids *v) {
    free(v->p);
    *v = (struct text_ids){0};
}

void text_ids_add(struct text_ids *v, const int32_t *p, int64_t n) {
    if (n == 0) return;
    if (v->n + n > v->cap) xgrow((void **)&v->p, &v->cap, v->n + n, sizeof *v->p);
    memcpy(v->p + v->n, p, (size_t)n * sizeof *p);
    v->n += n;
}

/* ---- scratch ------------------------------------------------------------------------- */

/* Working memory is kept between calls, so that a call costs no allocation and its word
 * cache stays warm; there are as many as calls were ever under way at once. */
struct text__scratch_pool {
    pthread_mutex_t lock;
    struct text__scratch *free;
};

static void scratch_destroy(struct text__scratch *s) {
    text__regex_scratch_destroy(s->regex);
    text__word_scratch_destroy(s->word);
    free(s->outer.p);
    free(s->inner.p);
    free(s->spans.p);
    free(s->spans2.p);
    free(s->chars.p);
    buf_free(&s->repaired);
    buf_free(&s->norm);
    buf_free(&s->norm2);
    buf_free(&s->pre);
    buf_free(&s->pre2);
    buf_free(&s->proxy);
    free(s);
}

/* Scratch is borrowed: taken from the tokenizer's free ones, or new. */
static int scratch_take(const struct tokenizer *t, struct text__scratch **out) {
    struct text__scratch_pool *pool = t->scratch;
    pthread_mutex_lock(&pool->lock);
    struct text__scratch *s = pool->free;
    if (s) pool->free = s->next;
    pthread_mutex_unlock(&pool->lock);
    if (!s) {
        struct text__regex_scratch *regex;
        TRY(text__regex_scratch_create(&regex));
        s = xcalloc(1, sizeof *s);
        s->regex = regex;
        s->word = text__word_scratch_create();
    }
    *out = s;
    return 0;
}

static void scratch_give(const struct tokenizer *t, struct text__scratch *s) {
    struct text__scratch_pool *pool = t->scratch;
    pthread_mutex_lock(&pool->lock);
    s->next = pool->free;
    pool->free = s;
    pthread_mutex_unlock(&pool->lock);
}

static struct text__scratch_pool *pool_new(void) {
    struct text__scratch_pool *p = xcalloc(1, sizeof *p);
    CHECK(pthread_mutex_init(&p->lock, NULL) == 0);
    return p;
}

static void pool_free(struct text__scratch_pool *p) {
    if (!p) return;
    for (struct text__scratch *s = p->free, *next; s; s = next) {
        next = s->next;
        scratch_destroy(s);
    }
    pthread_mutex_destroy(&p->lock);
    free(p);
}

/* ---- added tokens -------------------------------------------------------------------- */

/* "normalized" is true when it is not given, as in the reference. */
static int parse_added_token(struct text__added_token *t, const json_t *v, const char *where) {
    const char *s;
    if (!json_is_object(v)) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: an added token that is not an object", where);
    TRY(json_str(v, "content", &s, where));
    t->content_n = json_string_length(json_object_get(v, "content"));
    t->content = xstrndup(s, t->content_n);
    TRY(json_bool_opt(v, "single_word", &t->single_word, where));
    TRY(json_bool_opt(v, "lstrip", &t->lstrip, where));
    TRY(json_bool_opt(v, "rstrip", &t->rstrip, where));
    TRY(json_bool_opt(v, "special", &t->special, where));
    t->is_normalized = true;
    return json_bool_opt(v, "normalized", &t->is_normalized, where);
}

static struct text__added_token *find_added(struct text__added *a, const struct text__added_token *t) {
    int64_t i;
    return map_get(&a->index, t->content, t->content_n, &i) ? &a->p[i] : NULL;
}

/* The text a normalized token is matched as: what the normalizer makes of it. */
static int normalize_added(struct tokenizer *t, struct text__scratch *s, struct text__added_token *a) {
    const char *p;
    size_t n;
    if (!a->is_normalized) return 0;
    TRY(text__normalize(&t->norms, s, a->content, a->content_n, &p, &n));
    if (n == a->content_n && memcmp(p, a->content, n) == 0) return 0;
    a->normalized = xstrndup(p, n);
    a->normalized_n = n;
    return 0;
}

/* As the reference does, a token's id is that of the vocabulary, or else the next
 * free one; the id in the file is only compared. Returns 1 where it differs. */
static int add_token(struct tokenizer *t, struct text__scratch *s, const json_t *v, int64_t *next_id, const char *where) {
    struct text__added_token a = {0};
    int64_t file_id = -1;
    int rc;
    TRYG(parse_added_token(&a, v, where), fail);
    TRYG(json_i64(v, "id", &file_id, where), fail);
    if (a.content_n == 0) {
        free(a.content);
        return 0;
    }
    struct text__added_token *old = find_added(&t->added, &a);
    const int32_t e = text__vocab_find(&t->bpe.vocab, a.content, a.content_n);
    a.id = old ? old->id : e >= 0 ? t->bpe.vocab.entries[e].id : (int32_t)(*next_id)++;
    TRYG(normalize_added(t, s, &a), fail);
    if (old) {
        a.special |= old->special;
        free(old->content);
        free(old->normalized);
        *old = a;
        return a.id != file_id;
    }
    xgrow((void **)&t->added.p, &t->added.cap, t->added.n + 1, sizeof *t->added.p);
    map_set(&t->added.index, a.content, a.content_n, t->added.n);
    t->added.p[t->added.n++] = a;
    return a.id != file_id;
fail:
    free(a.content);
    free(a.normalized);
    return rc;
}

static int parse_added(struct tokenizer *t, const json_t *list, const char *where) {
    if (!list || json_is_null(list)) return 0;
    if (!json_is_array(list)) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: its added_tokens are not a list", where);
    struct text__scratch *s;
    int64_t next_id = t->bpe.vocab.n;
    TRY(scratch_take(t, &s));
    int rc = 0, n_other = 0;
    for (size_t i = 0; rc >= 0 && i < json_array_size(list); i++) {
        rc = add_token(t, s, json_array_get(list, i), &next_id, where);
        n_other += rc == 1;
    }
    scratch_give(t, s);
    TRY(rc);
    if (n_other) log_warn("%s: %d added tokens have another id than the file says, as in Hugging Face tokenizers", where, n_other);
    return text__added_build(&t->added, where);
}

/* Tables by id over vocabulary and added tokens. A token is special by its string. */
static void index_ids(struct tokenizer *t) {
    t->n_ids = t->bpe.vocab.n_ids;
    for (int64_t i = 0; i < t->added.n; i++)
        if (t->added.p[i].id >= t->n_ids) t->n_ids = t->added.p[i].id + 1;
    t->added_by_id = xcalloc((size_t)t->n_ids, sizeof *t->added_by_id);
    t->special = xcalloc((size_t)t->n_ids, sizeof *t->special);
    for (int64_t i = 0; i < t->added.n; i++) {
        const struct text__added_token *a = &t->added.p[i];
        t->added_by_id[a->id] = a;
        t->special[a->id] = a->special && !a->normalized;
    }
}

/* ---- post-processor ------------------------------------------------------------------- */

static void add_post(struct tokenizer *t, int64_t *cap, int32_t *ids, int64_t n) {
    xgrow((void **)&t->post, cap, t->n_post + 1, sizeof *t->post);
    t->post[t->n_post++] = (struct text__post){ids, n};
}

/* The ids of a name in the template; owned by the post element that gets them. */
static int special_ids(const json_t *token, int32_t **out, int64_t *n, const char *where) {
    const json_t *ids = json_object_get(token, "ids");
    if (!json_is_array(ids)) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a template token without ids", where);
    *n = (int64_t)json_array_size(ids);
    int32_t *p = xcalloc((size_t)*n + 1, sizeof *p);
    for (int64_t i = 0; i < *n; i++) {
        const json_t *v = json_array_get(ids, (size_t)i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > INT32_MAX) {
            free(p);
            FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a template id that is not an id", where);
        }
        p[i] = (int32_t)json_integer_value(v);
    }
    *out = p;
    return 0;
}

/* Only "single" matters: texts are never encoded in pairs here. */
static int parse_template(struct tokenizer *t, const json_t *v, const char *where) {
    const json_t *single = json_object_get(v, "single"), *tokens = json_object_get(v, "special_tokens");
    enum { MAX_PIECES = 64, MAX_TEXTS = 1 }; /* a template adds a few special tokens around one text */
    int64_t cap = 0, texts = 0;
    if (!json_is_array(single)) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a template without \"single\"", where);
    if (json_array_size(single) > MAX_PIECES)
        FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a template of %zu pieces; at most %d", where, json_array_size(single),
             MAX_PIECES);
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *piece = json_array_get(single, i), *seq = json_object_get(piece, "Sequence");
        const char *id;
        if (seq) {
            TRY(json_str(seq, "id", &id, where));
            if (strcmp(id, "A") != 0) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a single template with sequence %s", where, id);
            if (++texts > MAX_TEXTS) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a single template with the text twice", where);
            add_post(t, &cap, NULL, 0);
            continue;
        }
        const json_t *special = json_object_get(piece, "SpecialToken");
        if (!special)
            FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a template piece that is neither Sequence nor SpecialToken", where);
        TRY(json_str(special, "id", &id, where));
        int32_t *ids = NULL;
        int64_t n = 0;
        TRY(special_ids(json_object_get(tokens, id), &ids, &n, where));
        add_post(t, &cap, ids, n);
    }
    return 0;
}

/* Roberta and Bert: cls A sep, each ["<s>", 0]. */
static int parse_cls_sep(struct tokenizer *t, const json_t *v, const char *where) {
    int64_t cap = 0;
    static const char *const keys[] = {"cls", "sep"};
    for (int i = 0; i < 2; i++) {
        const json_t *id = json_array_get(json_object_get(v, keys[i]), 1);
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) > INT32_MAX)
            FAIL(ERR_FORMAT, "%s: not a valid tokenizer: \"%s\" of the post_processor has no id", where, keys[i]);
        int32_t *p = xmalloc(sizeof *p);
        *p = (int32_t)json_integer_value(id);
        add_post(t, &cap, p, 1);
        if (i == 0) add_post(t, &cap, NULL, 0);
    }
    return 0;
}

/* ByteLevel here only trims offsets, which nothing here uses. */
static int parse_post(struct tokenizer *t, const json_t *v, const char *where) {
    if (!v || json_is_null(v)) return 0;
    const char *type;
    TRY(text__type_of(v, &type, "post_processor", where));
    if (strcmp(type, "ByteLevel") == 0) return 0;
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(v, "processors");
        if (!json_is_array(list)) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a Sequence without processors", where);
        for (size_t i = 0; i < json_array_size(list); i++) TRY(parse_post(t, json_array_get(list, i), where));
        return 0;
    }
    if (t->n_post) FAIL(ERR_UNSUPPORTED, "%s: unsupported: more than one template in the post_processor", where);
    if (strcmp(type, "TemplateProcessing") == 0) return parse_template(t, v, where);
    if (strcmp(type, "RobertaProcessing") == 0 || strcmp(type, "BertProcessing") == 0) return parse_cls_sep(t, v, where);
    FAIL(ERR_UNSUPPORTED, "%s: unsupported post_processor \"%s\"", where, type);
}

/* ---- opening ---------------------------------------------------------------------------- */

/* The members of the file but the model, which is read in place and in whatever order. */
static int parse_members(struct tokenizer *t, struct text__json *j, json_t *members) {
    struct buf key = {0};
    bool has_model = false;
    int rc, more;
    TRYG(text__json_expect(j, '{'), done);
    for (bool first = true;; first = false) {
        TRYG(more = text__json_more(j, '}', first), done);
        if (!more) break;
        buf_reset(&key);
        TRYG(text__json_string(j, &key), done);
        TRYG(text__json_expect(j, ':'), done);
        if (strcmp(key.p, "model") == 0 && !has_model) {
            TRYG(text__bpe_parse(&t->bpe, j), done);
            has_model = true;
            continue;
        }
        const char *lo, *hi;
        json_t *v;
        TRYG(text__json_skip(j, &lo, &hi), done);
        TRYG(json_parse(&v, lo, (size_t)(hi - lo), j->where), done);
        json_object_set_new(members, key.p, v);
    }
    if (!has_model) FAILG(done, ERR_FORMAT, "%s: not a valid tokenizer: it has no model", j->where);
    TRYG(text__json_end(j), done);
    rc = 0;
done:
    buf_free(&key);
    return rc;
}

/* The order matters: added tokens need the vocabulary for their ids and the normalizer
 * for what they are matched as. */
static int parse_all(struct tokenizer *t, const json_t *m, const char *where) {
    const char *version = "1.0";
    TRY(json_str_opt(m, "version", &version, where));
    if (strcmp(version, "1.0") != 0) FAIL(ERR_UNSUPPORTED, "%s: unsupported tokenizer version \"%s\"", where, version);
    TRY(text__norms_parse(&t->norms, json_object_get(m, "normalizer"), where));
    TRY(text__splits_parse(&t->splits, json_object_get(m, "pre_tokenizer"), where));
    t->bpe.byte_level = t->splits.byte_level;
    TRY(text__decodes_parse(&t->decodes, json_object_get(m, "decoder"), where));
    TRY(parse_post(t, json_object_get(m, "post_processor"), where));
    TRY(parse_added(t, json_object_get(m, "added_tokens"), where));
    /* its truncation and padding are not read: each call decides, as in transformers */
    index_ids(t);
    return 0;
}

int tokenizer_open_bytes(struct tokenizer **out, const char *json, size_t n, const char *where) {
    struct tokenizer *t = xcalloc(1, sizeof *t);
    json_t *members = json_object();
    int rc;
    t->scratch = pool_new();
    t->bos = t->eos = t->pad = -1;
    t->special_map = json_object();
    if (!text_utf8_valid(json, n)) FAILG(fail, ERR_FORMAT, "%s: not a valid tokenizer: the file is not UTF-8", where);
    struct text__json j = {json, json, json + n, where};
    TRYG(parse_members(t, &j, members), fail);
    TRYG(parse_all(t, members, where), fail);
    json_decref(members);
    *out = t;
    return 0;
fail:
    json_decref(members);
    tokenizer_close(t);
    return rc;
}

int tokenizer_open(struct tokenizer **out, const char *path) {
    const bool is_dir = file_is_dir(path);
    char *file = NULL, *ranks = NULL;
    struct file_map map = {0};
    struct tokenizer *t = NULL;
    int rc;
    if (is_dir) TRYG(file_in_dir(&file, path, "tokenizer.json"), done);
    else if (file_exists(path)) file = xstrdup(path);
    if (!file && is_dir) {
        TRYG(file_in_dir(&ranks, path, "tiktoken.model"), done);
        FAILG(done, ERR_INPUT, "%s/tokenizer.json: no such file; %s", path,
              ranks ? "docs/tokenizers.md makes it from tiktoken.model" : "a model directory needs its tokenizer.json");
    }
    if (!file) FAILG(done, ERR_INPUT, "%s: no such file", path);
    TRYG(file_map_open(&map, file), done);
    TRYG(tokenizer_open_bytes(&t, (const char *)map.p, map.n, file), done);
    char *slash = is_dir ? NULL : strrchr(file, '/');
    if (slash) *slash = '\0';
    TRYG(text__side_files(t, is_dir ? path : slash ? file : "."), done);
    *out = t;
    t = NULL;
done:
    file_unmap(&map);
    tokenizer_close(t);
    free(ranks);
    free(file);
    return rc;
}

void tokenizer_close(struct tokenizer *t) {
    if (!t) return;
    text__bpe_free(&t->bpe);
    text__added_free(&t->added);
    text__norms_free(&t->norms);
    text__splits_free(&t->splits);
    text__decodes_free(&t->decodes);
    for (int64_t i = 0; i < t->n_post; i++) free(t->post[i].ids);
    free(t->post);
    free(t->added_by_id);
    free(t->special);
    free(t->chat_template);
    free(t->tool_template);
    json_decref(t->special_map);
    pool_free(t->scratch);
    free(t);
}

/* ---- encoding ------------------------------------------------------------------------------ */

/* A piece that holds no added token: words, then ids. */
static int encode_words(const struct tokenizer *t, struct text__scratch *s, const char *text, size_t n, bool at_start,
                        struct text_ids *ids) {
    const char *p;
    TRY(text__pre_tokenize(&t->splits, s, text, n, at_start, &p));
    for (int64_t i = 0; i < s->spans.n; i++) {
        const struct text__span w = s->spans.p[i];
        TRY(text__bpe_word(&t->bpe, s->word, p + w.lo, (size_t)(w.hi - w.lo), ids));
    }
    return 0;
}

/* First the tokens that are looked for in the text as it came, then, in what the
 * normalizer makes of each piece between, those that are looked for there. */
static int encode_text(const struct tokenizer *t, struct text__scratch *s, const char *text, size_t n, struct text_ids *ids) {
    text__added_split(&t->added, &t->added.raw, text, (int64_t)n, &s->outer);
    for (int64_t i = 0; i < s->outer.n; i++) {
        const struct text__piece a = s->outer.p[i];
        if (a.id >= 0) {
            text_ids_add(ids, &a.id, 1);
            continue;
        }
        const char *p;
        size_t p_n;
        TRY(text__normalize(&t->norms, s, text + a.lo, (size_t)(a.hi - a.lo), &p, &p_n));
        text__added_split(&t->added, &t->added.normalized, p, (int64_t)p_n, &s->inner);
        for (int64_t k = 0; k < s->inner.n; k++) {
            const struct text__piece b = s->inner.p[k];
            if (b.id >= 0) text_ids_add(ids, &b.id, 1);
            else TRY(encode_words(t, s, p + b.lo, (size_t)(b.hi - b.lo), a.lo == 0 && b.lo == 0, ids));
        }
    }
    return 0;
}

/* The template says what stands around the text; without special tokens only the text does. */
static int encode_post(const struct tokenizer *t, struct text__scratch *s, const char *text, size_t n, bool special,
                       struct text_ids *ids) {
    if (t->n_post == 0) return encode_text(t, s, text, n, ids);
    for (int64_t i = 0; i < t->n_post; i++) {
        if (!t->post[i].ids) TRY(encode_text(t, s, text, n, ids));
        else if (special) text_ids_add(ids, t->post[i].ids, t->post[i].n);
    }
    return 0;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, bool add_special_tokens, struct text_ids *ids) {
    if (n > MAX_TEXT) FAIL(ERR_INPUT, "tokenizer: a text of %zu bytes is over the limit of %zu", n, MAX_TEXT);
    struct text__scratch *s;
    const int64_t had = ids->n;
    TRY(scratch_take(t, &s));
    int rc = 0;
    if (!text_utf8_valid(text, n)) {
        buf_reset(&s->repaired);
        rc = text_utf8_repair(&s->repaired, text, n);
        text = s->repaired.p;
        n = s->repaired.n;
    }
    if (rc == 0) rc = encode_post(t, s, text, n, add_special_tokens, ids);
    scratch_give(t, s);
    if (rc < 0) ids->n = had;
    return rc;
}

static bool same_pieces(const struct text__piece *a, const struct text__piece *b, int64_t n, int64_t shift) {
    for (int64_t i = 0; i < n; i++)
        if (a[i].lo != b[i].lo + shift || a[i].hi != b[i].hi + shift || a[i].id != b[i].id) return false;
    return true;
}

bool tokenizer_splits_at(const struct tokenizer *t, const char *text, size_t n, size_t at) {
    struct text__pieces all = {0}, part = {0};
    int64_t k = 0;
    text__added_split(&t->added, &t->added.raw, text, (int64_t)n, &all);
    while (k < all.n && all.p[k].lo < (int64_t)at) k++;
    bool ok = k < all.n && all.p[k].lo == (int64_t)at && all.p[k].id >= 0;
    if (ok) {
        text__added_split(&t->added, &t->added.raw, text, (int64_t)at, &part);
        ok = part.n == k && same_pieces(all.p, part.p, k, 0);
    }
    if (ok) {
        text__added_split(&t->added, &t->added.raw, text + at, (int64_t)(n - at), &part);
        ok = part.n == all.n - k && same_pieces(all.p + k, part.p, part.n, (int64_t)at);
    }
    free(all.p);
    free(part.p);
    return ok;
}

bool tokenizer_decided_at(const struct tokenizer *t, const char *text, size_t n, size_t at) {
    for (int64_t i = 0; i < t->added.n; i++) {
        const struct text__added_token *a = &t->added.p[i];
        for (size_t lo = n > a->content_n ? n - a->content_n : 0; lo <= at && lo < n; lo++)
            if (n - lo < a->content_n && memcmp(text + lo, a->content, n - lo) == 0) return false;
    }
    return true;
}

size_t tokenizer_longest_added(const struct tokenizer *t) {
    size_t longest = 0;
    for (int64_t i = 0; i < t->added.n; i++)
        if (t->added.p[i].content_n > longest) longest = t->added.p[i].content_n;
    return longest;
}

/* ---- decoding ------------------------------------------------------------------------------- */

/* What a decoder sees of an id: NULL where it has no token. */
static const char *piece_of(const struct tokenizer *t, int32_t id, size_t *n) {
    if (id < 0 || id >= t->n_ids) return NULL;
    const struct text__added_token *a = t->added_by_id[id];
    if (a) {
        *n = a->normalized ? a->normalized_n : a->content_n;
        return a->normalized ? a->normalized : a->content;
    }
    const struct text__entry *e = text__vocab_entry(&t->bpe.vocab, id);
    if (!e) return NULL;
    *n = (size_t)e->n;
    return t->bpe.vocab.chars.p + e->at;
}

struct tokenizer_stream {
    const struct tokenizer *tok; /* borrowed */
    struct text__decode_run *run;
    bool skip_special;
};

int tokenizer_stream_create(struct tokenizer_stream **out, const struct tokenizer *tok, bool skip_special) {
    struct tokenizer_stream *s = xcalloc(1, sizeof *s);
    *s = (struct tokenizer_stream){tok, text__decode_run_create(&tok->decodes), skip_special};
    *out = s;
    return 0;
}

void tokenizer_stream_destroy(struct tokenizer_stream *s) {
    if (!s) return;
    text__decode_run_destroy(s->run);
    free(s);
}

static int stream_push(struct tokenizer_stream *s, struct text__scratch *scratch, int32_t id, struct buf *out) {
    size_t n;
    const char *p = piece_of(s->tok, id, &n);
    if (!p || (s->skip_special && s->tok->special[id])) return 0;
    return text__decode_push(s->run, scratch, p, n, out);
}

int tokenizer_stream_push(struct tokenizer_stream *s, int32_t id, struct buf *out) {
    struct text__scratch *scratch;
    TRY(scratch_take(s->tok, &scratch));
    const int rc = stream_push(s, scratch, id, out);
    scratch_give(s->tok, scratch);
    return rc;
}

int tokenizer_stream_finish(struct tokenizer_stream *s, struct buf *out) {
    struct text__scratch *scratch;
    TRY(scratch_take(s->tok, &scratch));
    const int rc = text__decode_finish(s->run, scratch, out);
    scratch_give(s->tok, scratch);
    return rc;
}

static uint16_t u16(size_t n) { return (uint16_t)(n < UINT16_MAX ? n : UINT16_MAX); }

/* A stream that gets everything at once; see detokenize.c. */
int tokenizer_decode_bytes(const struct tokenizer *t, const int32_t *ids, int64_t n, bool skip_special, struct buf *out,
                           uint16_t *bytes) {
    struct tokenizer_stream *s;
    struct text__scratch *scratch;
    size_t from = out->n;
    TRY(scratch_take(t, &scratch));
    int rc = tokenizer_stream_create(&s, t, skip_special);
    for (int64_t i = 0; rc == 0 && i < n; i++) {
        rc = stream_push(s, scratch, ids[i], out);
        if (bytes && i < n - 1) bytes[i] = u16(out->n - from);
        if (i < n - 1) from = out->n;
    }
    if (rc == 0) rc = text__decode_finish(s->run, scratch, out);
    if (bytes && n > 0) bytes[n - 1] = u16(out->n - from);
    scratch_give(t, scratch);
    tokenizer_stream_destroy(s);
    return rc;
}

int tokenizer_decode(const struct tokenizer *t, const int32_t *ids, int64_t n, bool skip_special, struct buf *out) {
    return tokenizer_decode_bytes(t, ids, n, skip_special, out, NULL);
}

/* ---- questions -------------------------------------------------------------------------------- */

int32_t tokenizer_id(const struct tokenizer *t, const char *token) {
    int64_t i;
    if (map_gets(&t->added.index, token, &i)) return t->added.p[i].id;
    const int32_t e = text__vocab_find(&t->bpe.vocab, token, strlen(token));
    return e < 0 ? -1 : t->bpe.vocab.entries[e].id;
}

const char *tokenizer_token(const struct tokenizer *t, int32_t id) {
    if (id < 0 || id >= t->n_ids) return NULL;
    if (t->added_by_id[id]) return t->added_by_id[id]->content;
    const struct text__entry *e = text__vocab_entry(&t->bpe.vocab, id);
    return e ? t->bpe.vocab.chars.p + e->at : NULL;
}

int64_t tokenizer_vocab_size(const struct tokenizer *t) { return t->n_ids; }
int32_t tokenizer_bos(const struct tokenizer *t) { return t->bos; }
int32_t tokenizer_eos(const struct tokenizer *t) { return t->eos; }
int32_t tokenizer_pad(const struct tokenizer *t) { return t->pad >= 0 ? t->pad : t->eos; }
json_t *tokenizer_special_tokens(const struct tokenizer *t) {
    json_t *names = json_object();
    for (int64_t id = 0; id < t->n_ids; id++) {
        char key[24];
        snprintf(key, sizeof key, "%lld", (long long)id);
        if (t->special[id]) json_object_set_new(names, key, json_string(t->added_by_id[id]->content));
    }
    return names;
}
const json_t *tokenizer_special_map(const struct tokenizer *t) { return t->special_map; }
const char *tokenizer_chat_template(const struct tokenizer *t, bool with_tools) {
    return with_tools && t->tool_template ? t->tool_template : t->chat_template;
}
