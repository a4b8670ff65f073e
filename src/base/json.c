/* json.c - see json.h. jansson does the parsing and printing. */
#include "base/json.h"

#include "base/err.h"
#include "base/file.h"

#include <stdlib.h>
#include <string.h>

int json_parse(json_t **out, const char *text, size_t n, const char *where) {
    json_error_t e;
    json_t *v = json_loadb(text, n, JSON_ALLOW_NUL | JSON_DECODE_ANY, &e);
    if (!v) FAIL(ERR_FORMAT, "%s: not JSON: %s at line %d column %d", where, e.text, e.line, e.column);
    *out = v;
    return 0;
}

int json_load(json_t **out, const char *path, size_t max_bytes) {
    struct buf b = {0};
    int rc = file_read(&b, path, max_bytes);
    if (rc == 0) rc = json_parse(out, b.p, b.n, path);
    buf_free(&b);
    return rc;
}

static int add_bytes(const char *p, size_t n, void *b) { return buf_add(b, p, n) < 0 ? -1 : 0; }

int json_dump_line(struct buf *b, const json_t *v) {
    if (json_dump_callback(v, add_bytes, b, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(17)) < 0)
        FAIL(ERR_INTERNAL, "cannot print JSON (a string that is not UTF-8, or a number that is not finite)");
    return 0;
}

json_t *json_i32_array(const int32_t *v, int64_t n) {
    json_t *a = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(a, json_integer(v[i]));
    return a;
}

int json_save_atomic(const char *path, const json_t *v) {
    struct buf b = {0};
    int rc = 0;
    if (json_dump_callback(v, add_bytes, &b, JSON_INDENT(2) | JSON_ENCODE_ANY | JSON_REAL_PRECISION(17)) < 0)
        rc = err_set(ERR_INTERNAL, __FILE__, __LINE__, "%s: cannot print JSON", path);
    if (rc == 0) rc = buf_addc(&b, '\n');
    if (rc == 0) rc = file_write_atomic(path, b.p, b.n);
    buf_free(&b);
    return rc;
}

static int need(const json_t *o, const char *key, const char *where, const json_t **v, const char *what) {
    *v = json_object_get(o, key);
    if (!*v) FAIL(ERR_FORMAT, "%s: \"%s\" (%s) is missing", where, key, what);
    return 0;
}

#define GETTER(name, ctype, what, test, get)                                                 \
    int json_##name(const json_t *o, const char *key, ctype *out, const char *where) {       \
        const json_t *v;                                                                     \
        TRY(need(o, key, where, &v, what));                                                  \
        if (!(test)) FAIL(ERR_FORMAT, "%s: \"%s\" is not %s", where, key, what);             \
        *out = (get);                                                                        \
        return 0;                                                                            \
    }                                                                                        \
    int json_##name##_opt(const json_t *o, const char *key, ctype *out, const char *where) { \
        const json_t *v = json_object_get(o, key);                                           \
        if (!v || json_is_null(v)) return 0;                                                 \
        return json_##name(o, key, out, where);                                              \
    }
GETTER(i64, int64_t, "a whole number", json_is_integer(v), (int64_t)json_integer_value(v))
GETTER(f64, double, "a number", json_is_number(v), json_number_value(v))
GETTER(bool, bool, "true or false", json_is_boolean(v), json_is_true(v))
GETTER(str, const char *, "a string", json_is_string(v), json_string_value(v))
