/* batch.c - struct batch: named ragged columns over samples, with the
 * operations of verl's DataProto (verl/protocol.py) that a step needs.  A row
 * is one sample; there is no padding here, kernels pack what they need.
 * Invariant: every column's off has n_rows + 1 non-decreasing entries from 0, and
 * its array holds off[n_rows] elements. */
#include "data/data.h"

#include "base/buf.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static size_t elem_size(enum batch_type t) {
    switch (t) {
    case BATCH_I32:
    case BATCH_F32: return 4;
    case BATCH_I64:
    case BATCH_F64: return 8;
    case BATCH_STR:
    case BATCH_JSON: return sizeof(void *);
    }
    CHECK(!"batch type");
    return 0;
}

static const char *type_name(enum batch_type t) {
    static const char *const names[] = {"i32", "i64", "f32", "f64", "string", "JSON"};
    return names[t];
}

void batch_init(struct batch *b, int64_t n_rows) {
    CHECK(n_rows >= 0);
    *b = (struct batch){.n_rows = n_rows};
}

static void col_free(struct batch_col *c, int64_t n_rows) {
    const int64_t n = c->off ? c->off[n_rows] : 0;
    if (c->type == BATCH_STR)
        for (int64_t i = 0; i < n; i++) free(c->str[i]);
    if (c->type == BATCH_JSON)
        for (int64_t i = 0; i < n; i++) json_decref(c->json[i]);
    free(c->p);
    free(c->str_len);
    free(c->off);
    free(c->name);
}

void batch_free(struct batch *b) {
    for (int i = 0; i < b->n_cols; i++) col_free(&b->cols[i], b->n_rows);
    free(b->cols);
    json_decref(b->meta);
    *b = (struct batch){0};
}

void batch_free_all(struct batch *pieces, int64_t n) {
    for (int64_t i = 0; pieces && i < n; i++) batch_free(&pieces[i]);
    free(pieces);
}

/* --- elements --- */

/* Room for the elements that off counts: zeros, which for strings and JSON the caller fills. */
static void alloc_elems(struct batch_col *c, int64_t n_rows) {
    c->p = xcalloc((size_t)c->off[n_rows], elem_size(c->type));
    if (c->type == BATCH_STR) c->str_len = xcalloc((size_t)c->off[n_rows], sizeof *c->str_len);
}

/* Copies n elements; strings are duplicated, JSON values shared (they are not changed in place). */
static void copy_elems(struct batch_col *dst, int64_t at, const struct batch_col *src, int64_t from, int64_t n) {
    const size_t size = elem_size(dst->type);
    for (int64_t i = 0; i < n && dst->type == BATCH_STR; i++)
        batch_set_str(dst, at + i, src->str[from + i], src->str_len[from + i]);
    for (int64_t i = 0; i < n && dst->type == BATCH_JSON; i++) dst->json[at + i] = json_incref(src->json[from + i]);
    if (dst->type != BATCH_STR && dst->type != BATCH_JSON && n > 0)
        memcpy((char *)dst->p + (size_t)at * size, (const char *)src->p + (size_t)from * size, (size_t)n * size);
}

void batch_set_str(struct batch_col *c, int64_t i, const char *s, size_t n) {
    char *copy = xstrndup(s, n);
    free(c->str[i]);
    c->str[i] = copy;
    c->str_len[i] = n;
}

static bool same_f64(double a, double b) { return a == b || (isnan(a) && isnan(b)); }

static bool same_elem(const struct batch_col *a, const struct batch_col *b, int64_t i) {
    switch (a->type) {
    case BATCH_I32: return a->i32[i] == b->i32[i];
    case BATCH_I64: return a->i64[i] == b->i64[i];
    case BATCH_F32: return same_f64((double)a->f32[i], (double)b->f32[i]);
    case BATCH_F64: return same_f64(a->f64[i], b->f64[i]);
    case BATCH_STR: return a->str_len[i] == b->str_len[i] && memcmp(a->str[i], b->str[i], a->str_len[i]) == 0;
    case BATCH_JSON: return json_equal(a->json[i], b->json[i]);
    }
    return false;
}

static bool same_col(const struct batch_col *a, const struct batch_col *b, int64_t n_rows) {
    if (a->type != b->type || memcmp(a->off, b->off, (size_t)(n_rows + 1) * sizeof *a->off) != 0) return false;
    for (int64_t i = 0; i < a->off[n_rows]; i++)
        if (!same_elem(a, b, i)) return false;
    return true;
}

/* --- columns --- */

struct batch_col *batch_find(const struct batch *b, const char *name) {
    for (int i = 0; i < b->n_cols; i++)
        if (strcmp(b->cols[i].name, name) == 0) return &b->cols[i];
    return NULL;
}

/* An empty column record at the end; off and array are the caller's to fill. */
static struct batch_col *push_col(struct batch *b, const char *name, enum batch_type type) {
    if (b->n_cols == b->cap_cols) {
        b->cap_cols = b->cap_cols ? 2 * b->cap_cols : 16;
        b->cols = xrealloc(b->cols, (size_t)b->cap_cols * sizeof *b->cols);
    }
    struct batch_col *c = &b->cols[b->n_cols++];
    *c = (struct batch_col){.name = xstrdup(name), .type = type};
    c->off = xcalloc((size_t)b->n_rows + 1, sizeof *c->off);
    return c;
}

int batch_add(struct batch *b, const char *name, enum batch_type type, const int64_t *lens, const void *data,
              struct batch_col **out) {
    if (batch_find(b, name)) FAIL(ERR_INTERNAL, "the batch already has a column '%s'", name);
    struct batch_col *c = push_col(b, name, type);
    for (int64_t r = 0; r < b->n_rows; r++) {
        CHECK(!lens || lens[r] >= 0);
        c->off[r + 1] = c->off[r] + (lens ? lens[r] : 1);
    }
    const int64_t n = c->off[b->n_rows];
    json_t *const *json = data;
    CHECK(type != BATCH_STR || !data);
    alloc_elems(c, b->n_rows);
    for (int64_t i = 0; i < n && type == BATCH_STR; i++) batch_set_str(c, i, "", 0);
    for (int64_t i = 0; i < n && type == BATCH_JSON; i++) c->json[i] = json ? json_incref(json[i]) : json_null();
    if (type != BATCH_STR && type != BATCH_JSON && data && n > 0) memcpy(c->p, data, (size_t)n * elem_size(type));
    if (out) *out = c;
    return 0;
}

int batch_get(const struct batch *b, const char *name, enum batch_type type, struct batch_col **out) {
    struct batch_col *c = batch_find(b, name);
    if (!c) {
        struct buf have = {0};
        for (int i = 0; i < b->n_cols; i++) buf_addf(&have, "%s%s", i ? ", " : "", b->cols[i].name);
        const int rc =
            err_set(ERR_INTERNAL, __FILE__, __LINE__, "the batch has no column '%s'; it has: %s", name, have.p ? have.p : "none");
        buf_free(&have);
        return rc;
    }
    if (c->type != type) FAIL(ERR_INTERNAL, "column '%s' of the batch holds %s, not %s", name, type_name(c->type), type_name(type));
    *out = c;
    return 0;
}

int batch_rename(struct batch *b, const char *from, const char *to) {
    struct batch_col *c = batch_find(b, from);
    if (!c) FAIL(ERR_INTERNAL, "the batch has no column '%s' to rename", from);
    if (strcmp(from, to) == 0) return 0;
    if (batch_find(b, to)) FAIL(ERR_INTERNAL, "the batch already has a column '%s'", to);
    char *name = xstrdup(to); /* `from` may be c->name itself */
    free(c->name);
    c->name = name;
    return 0;
}

void batch_drop(struct batch *b, const char *name) {
    struct batch_col *c = batch_find(b, name);
    if (!c) return;
    col_free(c, b->n_rows);
    memmove(c, c + 1, (size_t)(b->cols + b->n_cols - (c + 1)) * sizeof *c);
    b->n_cols--;
}

/* --- rows --- */

/* dst (n_rows of the new batch set) gets the named rows of one column, in that order. */
static void gather(struct batch *dst, const struct batch_col *src, const int64_t *rows) {
    struct batch_col *c = push_col(dst, src->name, src->type);
    for (int64_t i = 0; i < dst->n_rows; i++) c->off[i + 1] = c->off[i] + batch_len(src, rows[i]);
    alloc_elems(c, dst->n_rows);
    for (int64_t i = 0; i < dst->n_rows; i++) copy_elems(c, c->off[i], src, src->off[rows[i]], batch_len(src, rows[i]));
}

int batch_select(struct batch *out, const struct batch *b, const int64_t *rows, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (rows[i] < 0 || rows[i] >= b->n_rows)
            FAIL(ERR_INTERNAL, "row %lld of a batch of %lld rows", (long long)rows[i], (long long)b->n_rows);
    struct batch r;
    batch_init(&r, n);
    for (int i = 0; i < b->n_cols; i++) gather(&r, &b->cols[i], rows);
    r.meta = json_deep_copy(b->meta);
    *out = r;
    return 0;
}

int batch_select_cols(struct batch *out, const struct batch *b, const char *const *names, int n) {
    for (int i = 0; i < n; i++)
        if (!batch_find(b, names[i])) FAIL(ERR_INTERNAL, "the batch has no column '%s'", names[i]);
    struct batch view = *b; /* records of the chosen columns, borrowed for the copy */
    view.cols = xcalloc((size_t)n, sizeof *view.cols);
    for (view.n_cols = 0; view.n_cols < n; view.n_cols++) view.cols[view.n_cols] = *batch_find(b, names[view.n_cols]);
    const int rc = batch_slice(out, &view, 0, b->n_rows);
    free(view.cols);
    return rc;
}

int batch_slice(struct batch *out, const struct batch *b, int64_t lo, int64_t hi) {
    if (lo < 0 || hi < lo || hi > b->n_rows)
        FAIL(ERR_INTERNAL, "rows %lld to %lld of a batch of %lld rows", (long long)lo, (long long)hi, (long long)b->n_rows);
    int64_t *rows = xmalloc((size_t)(hi - lo) * sizeof *rows);
    for (int64_t i = lo; i < hi; i++) rows[i - lo] = i;
    const int rc = batch_select(out, b, rows, hi - lo);
    free(rows);
    return rc;
}

int batch_repeat(struct batch *out, const struct batch *b, int64_t times, bool interleave) {
    if (times < 1) FAIL(ERR_INVAL, "a batch cannot be repeated %lld times", (long long)times);
    const int64_t n = b->n_rows * times;
    int64_t *rows = xmalloc((size_t)n * sizeof *rows);
    for (int64_t i = 0; i < n; i++) rows[i] = interleave ? i / times : i % b->n_rows;
    const int rc = batch_select(out, b, rows, n);
    free(rows);
    return rc;
}

int batch_reorder(struct batch *b, const int64_t *perm) {
    int rc = 0;
    struct batch r;
    bool *seen = xcalloc((size_t)b->n_rows, sizeof *seen);
    for (int64_t i = 0; i < b->n_rows; i++) {
        if (perm[i] < 0 || perm[i] >= b->n_rows || seen[perm[i]])
            FAILG(out, ERR_INTERNAL, "the new order of a batch of %lld rows is not a permutation (entry %lld is %lld)",
                  (long long)b->n_rows, (long long)i, (long long)perm[i]);
        seen[perm[i]] = true;
    }
    TRYG(batch_select(&r, b, perm, b->n_rows), out);
    batch_free(b);
    *b = r;
out:
    free(seen);
    return rc;
}

int batch_chunk(struct batch *out, const struct batch *b, int64_t n) {
    if (n < 1 || b->n_rows % n != 0)
        FAIL(ERR_INVAL, "%lld rows do not divide into %lld equal pieces", (long long)b->n_rows, (long long)n);
    const int64_t size = b->n_rows / n;
    for (int64_t i = 0; i < n; i++) {
        const int rc = batch_slice(&out[i], b, i * size, (i + 1) * size);
        CHECK(rc == 0); /* the ranges are within the batch */
    }
    return 0;
}

int batch_split(struct batch **out, int64_t *n, const struct batch *b, int64_t size) {
    if (size < 1) FAIL(ERR_INVAL, "a batch cannot be split into pieces of %lld rows", (long long)size);
    const int64_t k = (b->n_rows + size - 1) / size;
    struct batch *p = xcalloc((size_t)k, sizeof *p);
    for (int64_t i = 0; i < k; i++) {
        const int64_t hi = (i + 1) * size < b->n_rows ? (i + 1) * size : b->n_rows;
        const int rc = batch_slice(&p[i], b, i * size, hi);
        CHECK(rc == 0);
    }
    *out = p;
    *n = k;
    return 0;
}

int batch_pad_to(struct batch *out, const struct batch *b, int64_t k, int64_t *n_pad) {
    if (k < 1 || b->n_rows == 0)
        FAIL(ERR_INVAL, "%lld rows cannot be padded to a multiple of %lld", (long long)b->n_rows, (long long)k);
    const int64_t pad = (k - b->n_rows % k) % k, n = b->n_rows + pad;
    int64_t *rows = xmalloc((size_t)n * sizeof *rows);
    for (int64_t i = 0; i < n; i++) rows[i] = i % b->n_rows;
    const int rc = batch_select(out, b, rows, n);
    free(rows);
    if (rc == 0) *n_pad = pad;
    return rc;
}

/* --- several batches --- */

/* meta_info["metrics"]: an object of lists, or a list of objects; both become an object of lists. */
static void add_metrics(json_t *into, const json_t *metrics) {
    size_t i;
    json_t *v;
    const char *key;
    if (json_is_array(metrics)) {
        json_array_foreach(metrics, i, v) add_metrics(into, v);
        return;
    }
    json_object_foreach((json_t *)(uintptr_t)metrics, key, v) {
        json_t *list = json_object_get(into, key);
        if (!list) {
            list = json_array();
            json_object_set_new(into, key, list);
        }
        if (json_is_array(v)) json_array_extend(list, v);
        else json_array_append(list, v);
    }
}

static int merge_meta(json_t **out, const struct batch *const *parts, int64_t n) {
    json_t *meta = json_object(), *metrics = json_object(), *v;
    const char *key;
    for (int64_t i = 0; i < n; i++) {
        json_object_foreach(parts[i]->meta, key, v) {
            const json_t *have = json_object_get(meta, key);
            if (strcmp(key, "metrics") == 0) {
                add_metrics(metrics, v);
            } else if (have && !json_equal(have, v)) {
                const int rc = err_set(ERR_INTERNAL, __FILE__, __LINE__, "the batches to join differ in meta '%s'", key);
                json_decref(meta);
                json_decref(metrics);
                return rc;
            } else {
                json_object_set(meta, key, v);
            }
        }
    }
    if (json_object_size(metrics)) json_object_set(meta, "metrics", metrics);
    json_decref(metrics);
    if (json_object_size(meta) == 0) {
        json_decref(meta);
        meta = NULL;
    }
    *out = meta;
    return 0;
}

static int check_same_columns(const struct batch *a, const struct batch *b) {
    for (int i = 0; i < a->n_cols; i++) {
        struct batch_col *c;
        TRY(batch_get(b, a->cols[i].name, a->cols[i].type, &c));
    }
    if (a->n_cols != b->n_cols) FAIL(ERR_INTERNAL, "the batches to join have %d and %d columns", a->n_cols, b->n_cols);
    return 0;
}

int batch_concat(struct batch *out, const struct batch *const *parts, int64_t n) {
    struct batch r;
    int64_t rows = 0;
    if (n < 1) FAIL(ERR_INTERNAL, "no batches to join");
    for (int64_t i = 0; i < n; i++) {
        TRY(check_same_columns(parts[0], parts[i]));
        rows += parts[i]->n_rows;
    }
    json_t *meta = NULL;
    TRY(merge_meta(&meta, parts, n));
    batch_init(&r, rows);
    r.meta = meta;
    for (int k = 0; k < parts[0]->n_cols; k++) {
        struct batch_col *c = push_col(&r, parts[0]->cols[k].name, parts[0]->cols[k].type);
        int64_t row = 0, at = 0;
        for (int64_t i = 0; i < n; i++) {
            const struct batch_col *s = batch_find(parts[i], c->name);
            for (int64_t j = 0; j < parts[i]->n_rows; j++, row++) c->off[row + 1] = c->off[row] + batch_len(s, j);
        }
        alloc_elems(c, rows);
        for (int64_t i = 0; i < n; i++) {
            const struct batch_col *s = batch_find(parts[i], c->name);
            copy_elems(c, at, s, 0, s->off[parts[i]->n_rows]);
            at += s->off[parts[i]->n_rows];
        }
    }
    *out = r;
    return 0;
}

int batch_union(struct batch *b, const struct batch *src) {
    const char *key;
    json_t *v;
    /* every check first, so that a failure changes nothing */
    if (b->n_rows != src->n_rows)
        FAIL(ERR_INTERNAL, "a batch of %lld rows cannot take columns of %lld rows", (long long)b->n_rows, (long long)src->n_rows);
    for (int i = 0; i < src->n_cols; i++) {
        const struct batch_col *have = batch_find(b, src->cols[i].name);
        if (have && !same_col(have, &src->cols[i], b->n_rows))
            FAIL(ERR_INTERNAL, "column '%s' is in both batches with different values", have->name);
    }
    json_object_foreach(src->meta, key, v) {
        const json_t *have = json_object_get(b->meta, key);
        if (have && !json_equal(have, v)) FAIL(ERR_INTERNAL, "meta '%s' is in both batches with different values", key);
    }
    int64_t *rows = xmalloc((size_t)b->n_rows * sizeof *rows);
    for (int64_t i = 0; i < b->n_rows; i++) rows[i] = i;
    for (int i = 0; i < src->n_cols; i++)
        if (!batch_find(b, src->cols[i].name)) gather(b, &src->cols[i], rows);
    free(rows);
    if (json_object_size(src->meta)) {
        if (!b->meta) b->meta = json_object();
        json_object_update(b->meta, src->meta);
    }
    return 0;
}
