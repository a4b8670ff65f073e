/* rows.c - rows of Parquet, JSON and JSONL files as JSON objects, and back.
 * JSON is read here, Parquet by a helper process that sends some hundred
 * rows at a time, fewer where they are large, the next ones being decoded while these are taken in.
 * Rows of a class of the user's come from its object in a helper.
 * Invariant: a file is read whole or not at all, and written whole or not at all. */
#include "data/data_int.h"

#include "base/buf.h"
#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "helper/helper.h"

#include <stdlib.h>
#include <string.h>

#define MODULE "verlc_helpers.parquet"
#define CALL_S 300.0   /* one piece of a file: disk-bound, minutes mean a dead file system */
#define CLASS_S 3600.0 /* a class reads, and maybe downloads, all of its data when it is made */
enum { ROWS_PER_CALL = 512, BYTES_PER_CALL = 32 << 20 };
#define MAX_JSON_BYTES ((size_t)4 << 30)

static bool ends_with(const char *s, const char *end) {
    const size_t n = strlen(s), k = strlen(end);
    return n >= k && strcmp(s + n - k, end) == 0;
}

/* All that is missing at once. columns: an object with one member a column. */
static int check_columns(const json_t *columns, const struct data__columns *need, const char *where) {
    struct buf missing = {0}, have = {0};
    const char *name;
    json_t *v;
    int n = 0, rc = 0;
    for (const char *const *c = need->required; c && *c; c++)
        if (!json_object_get(columns, *c)) buf_addf(&missing, "%s'%s'", n++ ? ", " : "", *c);
    if (n > 0) {
        json_object_foreach((json_t *)(uintptr_t)columns, name, v) buf_addf(&have, "%s%s", have.n ? ", " : "", name);
        rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: there %s %s; it has: %s%s", where,
                     n > 1 ? "are no columns" : "is no column", missing.p, have.p ? have.p : "none",
                     need->advice ? need->advice : "");
    }
    buf_free(&missing);
    buf_free(&have);
    return rc;
}

/* --- JSON --- */

static int check_row(const json_t *row, const struct data__columns *need, const char *where) {
    if (!json_is_object(row)) FAIL(ERR_FORMAT, "%s: not a JSON object with one member a column", where);
    return check_columns(row, need, where);
}

struct line_reader {
    const char *path;
    const struct data__columns *need;
    json_t *rows;
};

static int read_line(void *arg, char *line, size_t n, int64_t no) {
    struct line_reader *r = arg;
    if (no == 1 && n >= 3 && memcmp(line, "\xef\xbb\xbf", 3) == 0) { /* byte order mark */
        line += 3;
        n -= 3;
    }
    if (strspn(line, " \t\r") == n) return 0;
    char *where = xasprintf("%s:%lld", r->path, (long long)no);
    json_t *row = NULL;
    int rc = json_parse(&row, line, n, where);
    if (rc == 0) rc = check_row(row, r->need, where);
    if (rc == 0) json_array_append(r->rows, row);
    json_decref(row);
    free(where);
    return rc;
}

static int read_array(json_t *rows, const char *path, const struct data__columns *need) {
    json_t *all = NULL, *row;
    size_t i;
    int rc = json_load(&all, path, MAX_JSON_BYTES);
    json_array_foreach(all, i, row) {
        if (rc < 0) break;
        char *where = xasprintf("%s row %zu", path, i + 1);
        rc = check_row(row, need, where);
        if (rc == 0) json_array_append(rows, row);
        free(where);
    }
    json_decref(all);
    return rc;
}

/* A .json file is one array of objects, or JSONL under another name. */
static bool starts_with_bracket(const char *path) {
    struct file_map m;
    if (file_map_open(&m, path) < 0) return false; /* the reader reports it */
    size_t i = m.n >= 3 && memcmp(m.p, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    while (i < m.n && strchr(" \t\r\n", m.p[i]) && m.p[i]) i++;
    const bool yes = i < m.n && m.p[i] == '[';
    file_unmap(&m);
    return yes;
}

static int read_json(json_t *rows, const char *path, const struct data__columns *need) {
    if (ends_with(path, ".json") && starts_with_bracket(path)) return read_array(rows, path, need);
    struct line_reader r = {path, need, rows};
    return file_each_line(path, read_line, &r);
}

/* --- Parquet --- */

/* All rows that a helper has, from its operation `next`. */
static int take_rows(struct helper *h, json_t *rows) {
    json_t *ask = json_pack("{s:s, s:i}", "op", "next", "count", ROWS_PER_CALL), *part = NULL;
    int rc = helper_send(h, ask);
    for (bool more = rc == 0; more;) {
        TRYG(helper_send(h, ask), out); /* one request in advance: it decodes while we parse */
        TRYG(helper_recv(h, CALL_S, &part), out);
        more = json_array_size(part) > 0;
        json_array_extend(rows, part);
        json_decref(part);
        part = NULL;
    }
out:
    json_decref(ask);
    return rc;
}

static int read_parquet(json_t *rows, const char *path, const struct data__columns *need) {
    struct helper *h = NULL;
    json_t *ask_open = json_pack("{s:s, s:s}", "op", "open", "path", path);
    json_t *info = NULL, *columns = json_object(), *name;
    size_t i;
    int rc = 0;
    if (!ask_open) FAILG(out, ERR_INPUT, "a file name that is not UTF-8 cannot be read as Parquet");
    TRYG(helper_create(&h, &(struct helper_args){.module = MODULE}), out);
    TRYG(helper_call(h, ask_open, CALL_S, &info), out);
    json_array_foreach(json_object_get(info, "columns"), i, name)
        json_object_set_new(columns, json_string_value(name), json_true());
    TRYG(check_columns(columns, need, path), out);
    rc = take_rows(h, rows);
out:
    helper_destroy(h);
    json_decref(ask_open);
    json_decref(info);
    json_decref(columns);
    return rc;
}

/* ---- a class of the user's ---- */

/* Each with the columns that are needed. */
static int read_class(json_t *rows, const struct data__table_args *a) {
    struct helper *h = NULL;
    json_t *files = json_array(), *init, *row;
    size_t i;
    for (int64_t f = 0; f < a->n_files; f++) json_array_append_new(files, json_string(a->files[f]));
    init = json_pack("{s:s, s:s?, s:o, s:O, s:s, s:I, s:s}", "path", a->cls->path, "name", a->cls->name, "files", files, "config",
                     a->cls->config, "tokenizer", a->cls->tokenizer_dir, "max_samples",
                     (json_int_t)(a->max_samples > 0 ? a->max_samples : -1), "prompt_key", a->prompt_key);
    if (!init) FAIL(ERR_INVAL, "data.custom_cls.path, .name or a file's name is not UTF-8");
    int rc = helper_create(
        &h, &(struct helper_args){
                .module = "verlc_helpers.dataset", .init = init, .log_as = "data set class", .start_timeout_s = CLASS_S});
    if (rc == 0) rc = take_rows(h, rows);
    json_array_foreach(rows, i, row) {
        if (rc < 0) break;
        char *where = xasprintf("%s.%s row %zu", a->cls->path, a->cls->name, i + 1);
        rc = check_row(row, &a->need, where);
        free(where);
    }
    helper_destroy(h);
    json_decref(init);
    return rc;
}

static int write_parquet(const char *path, const json_t *rows, const json_t *schema) {
    struct helper *h = NULL;
    json_t *reply = NULL, *ask = NULL;
    int rc = 0;
    TRYG(helper_create(&h, &(struct helper_args){.module = MODULE}), out);
    ask = json_pack("{s:s, s:s, s:O*}", "op", "create", "path", path, "schema", schema);
    if (!ask) FAILG(out, ERR_INVAL, "a file name that is not UTF-8 cannot be written as Parquet");
    if (!schema) json_object_set_new(ask, "schema", json_null());
    TRYG(helper_call(h, ask, CALL_S, &reply), out);
    for (size_t i = 0; i < json_array_size(rows);) {
        json_t *part = json_array();
        size_t bytes = 0;
        for (int k = 0; k < ROWS_PER_CALL && bytes < BYTES_PER_CALL && i < json_array_size(rows); k++) {
            json_t *row = json_array_get(rows, i++);
            bytes += json_dumpb(row, NULL, 0, JSON_COMPACT);
            json_array_append(part, row);
        }
        json_decref(ask);
        json_decref(reply);
        reply = NULL;
        ask = json_pack("{s:s, s:o}", "op", "add", "rows", part);
        TRYG(helper_call(h, ask, CALL_S, &reply), out);
    }
    json_decref(ask);
    json_decref(reply);
    reply = NULL;
    ask = json_pack("{s:s}", "op", "finish");
    TRYG(helper_call(h, ask, CALL_S, &reply), out);
out:
    helper_destroy(h);
    json_decref(ask);
    json_decref(reply);
    return rc;
}

/* --- any --- */

static int read_rows(json_t **rows, const char *path, const struct data__columns *need) {
    char *local = NULL;
    json_t *r = json_array();
    int rc = 0;
    TRYG(data__local_path(&local, path), out);
    if (!file_exists(local)) FAILG(out, ERR_INPUT, "%s: no such file; check the path, or make it with 'verlc data'", path);
    TRYG(file_check(local), out);
    if (ends_with(local, ".parquet")) TRYG(read_parquet(r, local, need), out);
    else if (ends_with(local, ".json") || ends_with(local, ".jsonl")) TRYG(read_json(r, local, need), out);
    else FAILG(out, ERR_UNSUPPORTED, "%s: unsupported file format; give a .parquet, .json or .jsonl file", path);
    *rows = r;
    r = NULL;
out:
    json_decref(r);
    free(local);
    return rc;
}

int data_read_rows(json_t **rows, const char *path, const char *const *required) {
    return read_rows(rows, path, &(struct data__columns){required, NULL});
}

int data_write_rows(const char *path, const json_t *rows, const json_t *schema) {
    if (ends_with(path, ".parquet")) return write_parquet(path, rows, schema);
    if (!ends_with(path, ".jsonl")) FAIL(ERR_INVAL, "%s: rows can be written to .parquet or .jsonl only", path);
    struct buf b = {0};
    size_t i;
    json_t *row;
    int rc = 0;
    json_array_foreach(rows, i, row) {
        TRYG(json_dump_line(&b, row), out);
        TRYG(buf_addc(&b, '\n'), out);
    }
    TRYG(file_write_atomic(path, b.p ? b.p : "", b.n), out);
out:
    buf_free(&b);
    return rc;
}

/* --- several files as one table --- */

void data__table_free(struct data__table *t) {
    json_decref(t->rows);
    free(t->uid);
    free(t->file_end);
    *t = (struct data__table){0};
}

char *data__table_place(const struct data__table *t, int64_t i) {
    int64_t f = 0;
    while (t->file_end[f] <= t->uid[i]) f++;
    return xasprintf("%s row %lld", t->files[f], (long long)(t->uid[i] - (f ? t->file_end[f - 1] : 0) + 1));
}

/* verl keeps the head, or when shuffling a random subset in random order. */
static void cap_rows(struct data__table *t, const struct data__table_args *a) {
    t->n = t->n_total;
    const int64_t most = a->cls ? 0 : a->max_samples; /* a class has capped its rows */
    t->uid = xmalloc((size_t)t->n * sizeof *t->uid);
    for (int64_t i = 0; i < t->n; i++) t->uid[i] = i;
    if (most <= 0 || most >= t->n) return;
    if (a->shuffle) {
        struct rng r = {.seed = a->seed, .stream = RNG_DATA};
        rng_shuffle(&r, t->uid, t->n);
    }
    t->n = most;
    json_t *kept = json_array();
    for (int64_t i = 0; i < t->n; i++) json_array_append(kept, json_array_get(t->rows, (size_t)t->uid[i]));
    json_decref(t->rows);
    t->rows = kept;
}

int data__table_read(struct data__table *t, const struct data__table_args *a) {
    struct data__table r = {.rows = json_array(), .files = a->files, .n_files = a->n_files};
    int rc = 0;
    if (a->n_files < 1) FAILG(fail, ERR_INVAL, "%s names no file", a->what);
    if (a->cls) {
        r.files = &a->cls->path;
        r.n_files = 1;
        rc = read_class(r.rows, a);
        if (rc < 0) {
            err_wrap(rc, "%s", a->what);
            goto fail;
        }
    }
    r.file_end = xcalloc((size_t)a->n_files, sizeof *r.file_end);
    r.file_end[0] = (int64_t)json_array_size(r.rows);
    for (int64_t f = 0; !a->cls && f < a->n_files; f++) {
        json_t *rows = NULL;
        rc = read_rows(&rows, a->files[f], &a->need);
        if (rc < 0) {
            err_wrap(rc, "%s", a->what);
            goto fail;
        }
        json_array_extend(r.rows, rows);
        json_decref(rows);
        r.file_end[f] = (int64_t)json_array_size(r.rows);
    }
    r.n_total = (int64_t)json_array_size(r.rows);
    if (r.n_total == 0)
        FAILG(fail, ERR_INPUT, "%s: no rows in %s%s", a->what, a->files[0], a->n_files > 1 ? " and the files after it" : "");
    cap_rows(&r, a);
    *t = r;
    return 0;
fail:
    data__table_free(&r);
    return rc;
}
