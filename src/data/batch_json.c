/* batch_json.c - a batch as JSON and back, for what a checkpoint keeps of the samples that a later step trains.
 *
 * Numbers and strings are base64 of their bytes, so nothing changes on the way; lengths of rows are there where a column is
 * not one element a row.
 * Invariant: what is read has the shape that its own lengths say, whatever the text is; else it is refused. */
#include "data/data.h"

#include "base/encoding/base64.h"
#include "base/buf.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

static const char *const types[] = {"i32", "i64", "f32", "f64", "string", "json"};
enum { N_TYPES = sizeof types / sizeof *types };
static const size_t sizes[] = {4, 8, 4, 8, 1, 0}; /* of an element; of a string: of a byte */

static json_t *packed(const void *p, size_t bytes) {
    char *text = base64_text(p, bytes);
    json_t *v = json_string(text);
    free(text);
    return v;
}

static json_t *lens_json(const int64_t *off, int64_t n) {
    json_t *a = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(a, json_integer(off[i + 1] - off[i]));
    return a;
}

/* All strings of a column in one text, and where each ends. */
static void add_strings(json_t *o, const struct batch_col *c, int64_t n) {
    struct buf all = {0};
    json_t *bytes = json_array();
    for (int64_t i = 0; i < n; i++) {
        buf_add(&all, c->str[i], c->str_len[i]);
        json_array_append_new(bytes, json_integer((json_int_t)c->str_len[i]));
    }
    json_object_set_new(o, "bytes", bytes);
    json_object_set_new(o, "data", packed(all.p, all.n));
    buf_free(&all);
}

static bool named(const char *const *names, const char *name) {
    for (; names && *names; names++)
        if (strcmp(*names, name) == 0) return true;
    return false;
}

json_t *batch_json(const struct batch *b, const char *const *without) {
    json_t *cols = json_array();
    for (int k = 0; k < b->n_cols; k++) {
        const struct batch_col *c = &b->cols[k];
        const int64_t n = c->off[b->n_rows];
        bool one_each = true;
        if (named(without, c->name)) continue;
        for (int64_t i = 0; i < b->n_rows; i++) one_each &= batch_len(c, i) == 1;
        json_t *o = json_pack("{s:s, s:s}", "name", c->name, "type", types[c->type]);
        if (!one_each) json_object_set_new(o, "lens", lens_json(c->off, b->n_rows));
        if (c->type == BATCH_STR) {
            add_strings(o, c, n);
        } else if (c->type == BATCH_JSON) {
            json_t *all = json_array();
            for (int64_t i = 0; i < n; i++) json_array_append(all, c->json[i]);
            json_object_set_new(o, "data", all);
        } else {
            json_object_set_new(o, "data", packed(c->p, (size_t)n * sizes[c->type]));
        }
        json_array_append_new(cols, o);
    }
    return json_pack("{s:I, s:o}", "rows", (json_int_t)b->n_rows, "columns", cols);
}

/* n lengths under key and their sum; *lens NULL where the key is missing. Caller frees. */
static int read_lens(const json_t *o, const char *key, int64_t n, const char *where, int64_t **lens, int64_t *sum) {
    const json_t *a = json_object_get(o, key);
    *lens = NULL;
    *sum = n;
    if (!a) return 0;
    if ((int64_t)json_array_size(a) != n) FAIL(ERR_FORMAT, "%s: a column's \"%s\" are not %lld", where, key, (long long)n);
    int64_t *v = xmalloc((size_t)(n + 1) * sizeof *v);
    *sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const json_t *x = json_array_get(a, (size_t)i);
        v[i] = json_is_integer(x) ? (int64_t)json_integer_value(x) : -1;
        if (v[i] < 0 || v[i] > INT32_MAX || (*sum += v[i]) > INT64_MAX / 16) {
            free(v);
            FAIL(ERR_FORMAT, "%s: a length in \"%s\" is no count", where, key);
        }
    }
    *lens = v;
    return 0;
}

static int read_packed(const json_t *o, void *out, size_t bytes, const char *where) {
    const json_t *v = json_object_get(o, "data");
    if (!json_is_string(v) || !base64_read(out, bytes, json_string_value(v), json_string_length(v)))
        FAIL(ERR_FORMAT, "%s: a column's data are not %zu bytes in base64", where, bytes);
    return 0;
}

static int read_strings(const json_t *o, struct batch_col *c, int64_t n, const char *where) {
    int64_t *lens, sum;
    TRY(read_lens(o, "bytes", n, where, &lens, &sum));
    char *all = xmalloc((size_t)sum + 1);
    const int rc = read_packed(o, all, (size_t)sum, where);
    for (int64_t i = 0, at = 0; rc == 0 && i < n; at += lens[i++]) batch_set_str(c, i, all + at, (size_t)lens[i]);
    free(all);
    free(lens);
    return rc;
}

/* Whether o has as many elements as n says, before memory for n is taken. */
static bool has(const json_t *o, int type, int64_t n) {
    const json_t *data = json_object_get(o, "data");
    if (type == BATCH_JSON) return (int64_t)json_array_size(data) == n;
    if (type != BATCH_STR) return json_string_length(data) == ((size_t)n * sizes[type] + 2) / 3 * 4;
    int64_t *lens, sum;
    if (!json_object_get(o, "bytes") || read_lens(o, "bytes", n, "", &lens, &sum) < 0) return false;
    free(lens);
    return json_string_length(data) == ((size_t)sum + 2) / 3 * 4;
}

static int read_column(struct batch *b, const json_t *o, const char *where) {
    const char *name, *type;
    struct batch_col *c;
    int64_t *lens, n;
    int t = 0, rc = 0;
    TRY(json_str(o, "name", &name, where));
    TRY(json_str(o, "type", &type, where));
    while (t < N_TYPES && strcmp(types[t], type) != 0) t++;
    if (t == N_TYPES || batch_find(b, name)) FAIL(ERR_FORMAT, "%s: column %s of type %s", where, name, type);
    TRY(read_lens(o, "lens", b->n_rows, where, &lens, &n));
    if (!has(o, t, n))
        rc = err_set(ERR_FORMAT, __FILE__, __LINE__, "%s: column %s has not %lld elements", where, name, (long long)n);
    if (rc == 0) rc = batch_add(b, name, (enum batch_type)t, lens, NULL, &c);
    free(lens);
    TRY(rc);
    if (t == BATCH_STR) return read_strings(o, c, n, where);
    if (t != BATCH_JSON) return read_packed(o, c->p, (size_t)n * sizes[t], where);
    for (int64_t i = 0; i < n; i++) {
        json_decref(c->json[i]);
        c->json[i] = json_incref(json_array_get(json_object_get(o, "data"), (size_t)i));
    }
    return 0;
}

int batch_of_json(struct batch *out, const json_t *v, const char *where) {
    struct batch b;
    int64_t rows;
    const json_t *cols = json_object_get(v, "columns");
    TRY(json_i64(v, "rows", &rows, where));
    if (rows < 0 || rows > INT32_MAX || !json_is_array(cols)) FAIL(ERR_FORMAT, "%s: no batch", where);
    batch_init(&b, rows);
    int rc = 0;
    for (size_t k = 0; rc == 0 && k < json_array_size(cols); k++) rc = read_column(&b, json_array_get(cols, k), where);
    if (rc == 0) *out = b;
    else batch_free(&b);
    return rc;
}
