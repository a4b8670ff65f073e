/* batch.c - struct batch: named ragged columns over samples, with the
 * operations of verl's DataProto (verl/protocol.py) that a step needs.  A row
 * is one sample; there is no padding here, kernels pack what they need.
 * Invariant: every column's off has n_rows + 1 non-decreasing entries from 0, and
 * its array holds off[n_rows] elements. */
#include "data/data.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

size_t batch_type_bytes(enum batch_type t) {
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
    *b = (struct batch){0};
}

/* --- elements --- */

/* Room for the elements that off counts: zeros, which for strings and JSON the caller fills. */
static void alloc_elems(struct batch_col *c, int64_t n_rows) {
    c->p = xcalloc((size_t)c->off[n_rows], batch_type_bytes(c->type));
    if (c->type == BATCH_STR) c->str_len = xcalloc((size_t)c->off[n_rows], sizeof *c->str_len);
}

/* Copies n elements; strings are duplicated, JSON values shared (they are not changed in place). */
static void copy_elems(struct batch_col *dst, int64_t at, const struct batch_col *src, int64_t from, int64_t n) {
    const size_t size = batch_type_bytes(dst->type);
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

/* --- columns --- */

struct batch_col *batch_find(const struct batch *b, const char *name) {
    for (int i = 0; i < b->n_cols; i++)
        if (strcmp(b->cols[i].name, name) == 0) return &b->cols[i];
    return NULL;
}

/* Room for a record at the end. */
static struct batch_col *add_col(struct batch *b) {
    if (b->n_cols == b->cap_cols) {
        b->cap_cols = b->cap_cols ? 2 * b->cap_cols : 16;
        b->cols = xrealloc(b->cols, (size_t)b->cap_cols * sizeof *b->cols);
    }
    return &b->cols[b->n_cols++];
}

/* An empty column record at the end; off and array are the caller's to fill. */
static struct batch_col *push_col(struct batch *b, const char *name, enum batch_type type) {
    struct batch_col *c = add_col(b);
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
    if (type != BATCH_STR && type != BATCH_JSON && data && n > 0) memcpy(c->p, data, (size_t)n * batch_type_bytes(type));
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

void batch_drop(struct batch *b, const char *name) {
    struct batch_col *c = batch_find(b, name);
    if (!c) return;
    col_free(c, b->n_rows);
    memmove(c, c + 1, (size_t)(b->cols + b->n_cols - (c + 1)) * sizeof *c);
    b->n_cols--;
}

void batch_move(struct batch *to, struct batch *from, const char *name) {
    CHECK(to->n_rows == from->n_rows);
    if (!batch_find(from, name)) return;
    batch_drop(to, name);
    struct batch_col *c = add_col(to), *old = batch_find(from, name);
    *c = *old;
    memmove(old, old + 1, (size_t)(from->cols + --from->n_cols - old) * sizeof *old);
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
    *out = r;
    return 0;
}

int batch_repeat(struct batch *out, const struct batch *b, int64_t times) {
    if (times < 1) FAIL(ERR_INVAL, "a batch cannot be repeated %lld times", (long long)times);
    const int64_t n = b->n_rows * times;
    int64_t *rows = xmalloc((size_t)n * sizeof *rows);
    for (int64_t i = 0; i < n; i++) rows[i] = i / times;
    const int rc = batch_select(out, b, rows, n);
    free(rows);
    return rc;
}

/* --- several batches --- */

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
    batch_init(&r, rows);
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
