/* message_codec.c - see message_codec.h. */
#include "ranks/message_codec.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* ---- arrays ---- */

struct message message_new(bool borrows) {
    return (struct message){.head = json_object(), .borrows = borrows};
}

void message_free(struct message *m) {
    for (int i = 0; i < m->n && !m->borrows; i++) free(m->arrays[i].p);
    free(m->arrays);
    json_decref(m->head);
    *m = (struct message){0};
}

void message_add(struct message *m, const void *p, size_t n) {
    void *at = (void *)(uintptr_t)p;
    if (m->n == m->cap) {
        m->cap = m->cap ? 2 * m->cap : 16;
        m->arrays = xrealloc(m->arrays, (size_t)m->cap * sizeof *m->arrays);
    }
    if (!m->borrows) {
        at = xmalloc(n + 1);
        if (n) memcpy(at, p, n);
    }
    m->arrays[m->n++] = (struct comm_bytes){at, n};
}

int message_next(struct message_reader *r, size_t n, struct comm_bytes *out) {
    if (r->at >= r->n) FAIL(ERR_FORMAT, "%s sent %d arrays, and one more is wanted", r->who, r->n);
    *out = r->arrays[r->at++];
    if (n != SIZE_MAX && out->n != n)
        FAIL(ERR_FORMAT, "%s sent an array of %zu bytes where one of %zu is wanted", r->who, out->n, n);
    return 0;
}

int message_items(struct message_reader *r, size_t size, int64_t *n, void **out) {
    struct comm_bytes a;
    TRY(message_next(r, SIZE_MAX, &a));
    if (a.n % size != 0) FAIL(ERR_FORMAT, "%s sent an array of %zu bytes, which are no items of %zu", r->who, a.n, size);
    *n = (int64_t)(a.n / size);
    *out = a.p;
    return 0;
}

/* ---- batches ---- */

/* 0: strings and JSON are not sent. */
static size_t item_bytes(enum batch_type t) { return t == BATCH_STR || t == BATCH_JSON ? 0 : batch_type_bytes(t); }

void message_columns(struct message *m, const struct batch *b, const char *const *names) {
    json_t *list = json_array();
    json_object_set_new(m->head, "rows", json_integer((json_int_t)b->n_rows));
    json_object_set_new(m->head, "columns", list);
    for (; *names; names++) {
        const struct batch_col *c = batch_find(b, *names);
        if (!c || item_bytes(c->type) == 0) continue;
        json_array_append_new(list, json_pack("{s:s, s:i}", "name", c->name, "type", (int)c->type));
        message_add(m, c->off, (size_t)(b->n_rows + 1) * sizeof *c->off);
        message_add(m, c->p, (size_t)c->off[b->n_rows] * item_bytes(c->type));
    }
}

static int read_column(struct message_reader *r, struct batch *b, const json_t *x) {
    const char *name;
    int64_t type;
    struct comm_bytes off, data;
    int64_t *lens = xmalloc((size_t)(b->n_rows + 1) * sizeof *lens);
    int rc = 0;
    TRYG(json_str(x, "name", &name, r->who), out);
    TRYG(json_i64(x, "type", &type, r->who), out);
    if (type < BATCH_I32 || type > BATCH_F64)
        FAILG(out, ERR_FORMAT, "%s sent the column %s of a type %lld", r->who, name, (long long)type);
    TRYG(message_next(r, (size_t)(b->n_rows + 1) * sizeof *lens, &off), out);
    const int64_t *at = off.p;
    bool ok = at[0] == 0;
    for (int64_t i = 0; i < b->n_rows; i++) {
        lens[i] = at[i + 1] - at[i];
        ok &= lens[i] >= 0;
    }
    if (!ok) FAILG(out, ERR_FORMAT, "%s sent the column %s with rows of less than no elements", r->who, name);
    TRYG(message_next(r, (size_t)at[b->n_rows] * item_bytes((enum batch_type)type), &data), out);
    batch_drop(b, name);
    rc = batch_add(b, name, (enum batch_type)type, lens, data.p, NULL);
out:
    free(lens);
    return rc;
}

int message_read_columns(struct message_reader *r, struct batch *b) {
    const json_t *list = json_object_get(r->head, "columns");
    int64_t rows;
    TRY(json_i64(r->head, "rows", &rows, r->who));
    if (b->n_cols == 0) batch_init(b, rows);
    if (rows != b->n_rows)
        FAIL(ERR_FORMAT, "%s sent columns of %lld rows for a batch of %lld", r->who, (long long)rows, (long long)b->n_rows);
    for (size_t i = 0; i < json_array_size(list); i++) TRY(read_column(r, b, json_array_get(list, i)));
    return 0;
}

void message_metrics(struct message *m, const struct metrics *x) {
    struct metric *items = xmalloc((size_t)(x->n + 1) * sizeof *items);
    json_t *names = json_array();
    for (int64_t i = 0; i < x->n; i++) {
        json_array_append_new(names, json_string(x->items[i].name));
        items[i] = x->items[i];
        items[i].name = NULL;
    }
    json_object_set_new(m->head, "metrics", names);
    CHECK(!m->borrows); /* items do not last */
    message_add(m, items, (size_t)x->n * sizeof *items);
    free(items);
}

int message_read_metrics(struct message_reader *r, struct metrics *x) {
    const json_t *names = json_object_get(r->head, "metrics");
    struct comm_bytes a;
    TRY(message_next(r, json_array_size(names) * sizeof(struct metric), &a));
    for (size_t i = 0; i < json_array_size(names); i++) {
        const char *name = json_string_value(json_array_get(names, i));
        const struct metric *v = (const struct metric *)a.p + i;
        if (!name) FAIL(ERR_FORMAT, "%s sent a metric without a name", r->who);
        if (v->whole) metrics_set_i64(x, (int64_t)v->value, "%s", name);
        else metrics_set(x, v->value, "%s", name);
    }
    return 0;
}

/* Tokens, and the first target or a mask. */
enum { MAX_WORDS = MODEL_MAX_LAYERS * DEV_MAX_CHOICES };
struct seq_item {
    int64_t n, first, masked;
    int64_t words; /* of a token's recorded choices of experts; 0: none */
};

void message_seqs(struct message *m, const struct packed_seq *seqs, int64_t n, int64_t words) {
    struct seq_item *items = xmalloc((size_t)(n + 1) * sizeof *items);
    struct buf ids = {0}, masks = {0}, routes = {0};
    int rc = 0;
    for (int64_t i = 0; i < n && rc == 0; i++) {
        items[i] = (struct seq_item){seqs[i].n, seqs[i].first, seqs[i].mask != NULL, seqs[i].routes ? words : 0};
        rc = buf_add(&ids, seqs[i].ids, (size_t)seqs[i].n * sizeof *seqs[i].ids);
        if (rc == 0 && seqs[i].mask) rc = buf_add(&masks, seqs[i].mask, (size_t)seqs[i].n);
        if (rc == 0) rc = buf_add(&routes, seqs[i].routes, (size_t)(seqs[i].n * items[i].words) * sizeof *seqs[i].routes);
    }
    CHECK(rc >= 0 && !m->borrows);
    message_add(m, items, (size_t)n * sizeof *items);
    message_add(m, ids.p, ids.n);
    message_add(m, masks.p, masks.n);
    message_add(m, routes.p, routes.n);
    buf_free(&ids);
    buf_free(&masks);
    buf_free(&routes);
    free(items);
}

int message_read_seqs(struct message_reader *r, struct packed_seq **seqs, int64_t *n) {
    struct seq_item *items;
    int64_t tokens = 0, masked = 0, words = 0;
    struct comm_bytes ids, masks, routes;
    TRY(message_items(r, sizeof *items, n, (void **)&items));
    for (int64_t i = 0; i < *n; i++) {
        if (items[i].n < 0 || items[i].first < 0 || items[i].n > INT32_MAX)
            FAIL(ERR_FORMAT, "%s sent a sequence of %lld tokens", r->who, (long long)items[i].n);
        if (items[i].words < 0 || items[i].words > MAX_WORDS)
            FAIL(ERR_FORMAT, "%s sent a sequence with %lld words of choices a token", r->who, (long long)items[i].words);
        tokens += items[i].n;
        words += items[i].n * items[i].words;
        if (items[i].masked) masked += items[i].n;
    }
    TRY(message_next(r, (size_t)tokens * sizeof(int32_t), &ids));
    TRY(message_next(r, (size_t)masked, &masks));
    TRY(message_next(r, (size_t)words * sizeof(int32_t), &routes));
    *seqs = xmalloc((size_t)(*n + 1) * sizeof **seqs);
    const int32_t *at = ids.p;
    const uint8_t *mask = masks.p;
    const int32_t *route = routes.p;
    for (int64_t i = 0; i < *n; at += items[i++].n) {
        (*seqs)[i] =
            (struct packed_seq){.ids = at, .n = items[i].n, .first = items[i].first, .mask = items[i].masked ? mask : NULL};
        if (items[i].masked) mask += items[i].n;
        if (items[i].words) (*seqs)[i].routes = route;
        route += items[i].n * items[i].words;
    }
    return 0;
}

/* ---- generation ---- */

struct request_item {
    struct engine_request q; /* its pointers mean nothing, but whether begun_logp_kept is NULL */
    int64_t user;
};

void request_list_add(struct request_list *l, const struct engine_request *q) {
    const size_t begun = (size_t)q->n_begun * 4;
    const int64_t cap = l->cap_begun;
    for (int64_t i = 0; i < q->n_stop; i++) buf_add(&l->stop, q->stop[i], strlen(q->stop[i]) + 1);
    xgrow((void **)&l->items, &l->cap, l->n + 1, sizeof *l->items);
    xgrow((void **)&l->ids, &l->cap_ids, l->n_ids + q->n_prompt + q->n_stop_ids + q->n_begun, sizeof *l->ids);
    xgrow((void **)&l->logp, &l->cap_begun, l->n_begun + q->n_begun, sizeof *l->logp);
    if (l->cap_begun != cap) l->kept = xrealloc(l->kept, (size_t)l->cap_begun * sizeof *l->kept);
    l->items[l->n++] = (struct request_item){.q = *q, .user = (int64_t)(intptr_t)q->user};
    memcpy(l->ids + l->n_ids, q->prompt, (size_t)q->n_prompt * sizeof *l->ids);
    l->n_ids += q->n_prompt;
    if (q->n_stop_ids) memcpy(l->ids + l->n_ids, q->stop_ids, (size_t)q->n_stop_ids * sizeof *l->ids);
    l->n_ids += q->n_stop_ids;
    if (q->n_begun == 0) return;
    memcpy(l->ids + l->n_ids, q->begun, begun);
    memcpy(l->logp + l->n_begun, q->begun_logp, begun);
    if (q->begun_logp_kept) memcpy(l->kept + l->n_begun, q->begun_logp_kept, begun);
    else memset(l->kept + l->n_begun, 0, begun);
    l->n_ids += q->n_begun;
    l->n_begun += q->n_begun;
}

void request_list_clear(struct request_list *l) {
    free(l->items);
    free(l->ids);
    free(l->logp);
    free(l->kept);
    buf_free(&l->stop);
    *l = (struct request_list){0};
}

void message_requests(struct message *m, const struct request_list *l) {
    message_add(m, l->items, (size_t)l->n * sizeof *l->items);
    message_add(m, l->ids, (size_t)l->n_ids * sizeof *l->ids);
    message_add(m, l->logp, (size_t)l->n_begun * sizeof *l->logp);
    message_add(m, l->kept, (size_t)l->n_begun * sizeof *l->kept);
    message_add(m, l->stop.p, l->stop.n);
}

/* Takes n stop strings off *text; the caller frees *out, an array into it. */
static int take_stop(const struct message_reader *r, int64_t n, const char **text, const char *end, const char ***out) {
    if (n < 0 || n > end - *text) FAIL(ERR_FORMAT, "%s sent a request without its stop strings", r->who);
    *out = xcalloc((size_t)n + 1, sizeof **out);
    for (int64_t i = 0; i < n; i++) {
        const char *nul = *text < end ? memchr(*text, '\0', (size_t)(end - *text)) : NULL;
        if (!nul) {
            free(*out);
            FAIL(ERR_FORMAT, "%s sent a stop string without an end", r->who);
        }
        (*out)[i] = *text;
        *text = nul + 1;
    }
    return 0;
}

int message_read_requests(struct message_reader *r, int (*fn)(void *arg, struct engine_request *q), void *arg) {
    const struct request_item *items;
    const int32_t *ids;
    const float *logp, *kept;
    const char *text;
    int64_t n, n_ids, n_begun, n_kept, n_text, at = 0, begun = 0;
    TRY(message_items(r, sizeof *items, &n, (void **)&items));
    TRY(message_items(r, sizeof *ids, &n_ids, (void **)&ids));
    TRY(message_items(r, sizeof *logp, &n_begun, (void **)&logp));
    TRY(message_items(r, sizeof *kept, &n_kept, (void **)&kept));
    TRY(message_items(r, 1, &n_text, (void **)&text));
    const char *const end = text + n_text;
    for (int64_t i = 0; i < n; i++) {
        struct engine_request q = items[i].q;
        if (q.n_prompt < 0 || q.n_begun < 0 || q.n_stop_ids < 0 || q.n_prompt > n_ids - at ||
            q.n_stop_ids > n_ids - at - q.n_prompt || q.n_begun > n_ids - at - q.n_prompt - q.n_stop_ids ||
            q.n_begun > n_begun - begun || n_kept != n_begun)
            FAIL(ERR_FORMAT, "%s sent a request without its tokens", r->who);
        q.prompt = ids + at;
        q.stop_ids = ids + at + q.n_prompt;
        q.begun = q.stop_ids + q.n_stop_ids;
        q.begun_logp = logp + begun;
        q.begun_logp_kept = items[i].q.begun_logp_kept ? kept + begun : NULL;
        const char **stop;
        TRY(take_stop(r, q.n_stop, &text, end, &stop));
        q.stop = stop;
        q.user = (void *)(intptr_t)items[i].user;
        at += q.n_prompt + q.n_stop_ids + q.n_begun;
        begun += q.n_begun;
        const int rc = fn(arg, &q);
        free(stop);
        TRY(rc);
    }
    return 0;
}

struct sample_item {
    int64_t user, index, n, n_preempted, finish, n_cached, text_bytes, n_verified, n_drafted, n_accepted;
    double seconds;
};

void sample_list_add(struct sample_list *l, const struct engine_sample *s) {
    const size_t bytes = (size_t)s->n * 4;
    int64_t cap = l->cap_ids;
    xgrow((void **)&l->items, &l->cap, l->n + 1, sizeof *l->items);
    xgrow((void **)&l->ids, &l->cap_ids, l->n_ids + s->n, sizeof *l->ids);
    if (l->cap_ids != cap) {
        l->logp = xrealloc(l->logp, (size_t)l->cap_ids * sizeof *l->logp);
        l->kept = xrealloc(l->kept, (size_t)l->cap_ids * sizeof *l->kept);
    }
    l->items[l->n++] = (struct sample_item){.user = (int64_t)(intptr_t)s->user,
                                            .index = s->index,
                                            .n = s->n,
                                            .n_preempted = s->n_preempted,
                                            .finish = (int64_t)s->finish,
                                            .n_cached = s->n_cached,
                                            .text_bytes = s->text_bytes,
                                            .n_verified = s->n_verified,
                                            .n_drafted = s->n_drafted,
                                            .n_accepted = s->n_accepted,
                                            .seconds = s->seconds};
    if (s->n == 0) return; /* interrupted before its first token */
    memcpy(l->ids + l->n_ids, s->ids, bytes);
    memcpy(l->logp + l->n_ids, s->logp, bytes);
    memcpy(l->kept + l->n_ids, s->logp_kept, bytes);
    l->n_ids += s->n;
}

void sample_list_clear(struct sample_list *l) {
    free(l->items);
    free(l->ids);
    free(l->logp);
    free(l->kept);
    *l = (struct sample_list){0};
}

void message_samples(struct message *m, const struct sample_list *l) {
    message_add(m, l->items, (size_t)l->n * sizeof *l->items);
    message_add(m, l->ids, (size_t)l->n_ids * sizeof *l->ids);
    message_add(m, l->logp, (size_t)l->n_ids * sizeof *l->logp);
    message_add(m, l->kept, (size_t)l->n_ids * sizeof *l->kept);
}

int64_t message_n_samples(const struct message_reader *r) {
    return r->at < r->n ? (int64_t)(r->arrays[r->at].n / sizeof(struct sample_item)) : 0;
}

int message_read_samples(struct message_reader *r, int (*fn)(void *arg, const struct engine_sample *s), void *arg) {
    const struct sample_item *items;
    struct comm_bytes ids, logp, kept;
    int64_t n, tokens = 0, at = 0;
    TRY(message_items(r, sizeof *items, &n, (void **)&items));
    for (int64_t i = 0; i < n; i++) {
        if (items[i].n < 0 || items[i].n > INT32_MAX)
            FAIL(ERR_FORMAT, "%s sent a sample of %lld tokens", r->who, (long long)items[i].n);
        tokens += items[i].n;
    }
    TRY(message_next(r, (size_t)tokens * 4, &ids));
    TRY(message_next(r, (size_t)tokens * 4, &logp));
    TRY(message_next(r, (size_t)tokens * 4, &kept));
    for (int64_t i = 0; i < n; at += items[i++].n) {
        const struct engine_sample s = {.user = (void *)(intptr_t)items[i].user,
                                        .index = items[i].index,
                                        .ids = (const int32_t *)ids.p + at,
                                        .n = items[i].n,
                                        .logp = (const float *)logp.p + at,
                                        .logp_kept = (const float *)kept.p + at,
                                        .n_cached = items[i].n_cached,
                                        .text_bytes = items[i].text_bytes,
                                        .finish = (enum engine_finish)items[i].finish,
                                        .n_preempted = items[i].n_preempted,
                                        .n_verified = items[i].n_verified,
                                        .n_drafted = items[i].n_drafted,
                                        .n_accepted = items[i].n_accepted,
                                        .seconds = items[i].seconds};
        TRY(fn(arg, &s));
    }
    return 0;
}
