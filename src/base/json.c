/* json.c - see json.h. jansson does the parsing and printing. */
#include "base/json.h"

#include "base/err.h"
#include "base/file.h"
#include "base/encoding/number.h"

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

/* One number of jansson's text, at p; *end: behind it. */
static int add_number(struct buf *b, const char *p, const char **end) {
    const char *q = p + 1;
    bool real = false;
    char s[NUMBER_TEXT];
    for (; (*q >= '0' && *q <= '9') || *q == '.' || *q == 'e' || *q == '+' || *q == '-'; q++) real |= *q == '.' || *q == 'e';
    *end = q;
    if (!real) return buf_add(b, p, (size_t)(q - p));
    number_text(strtod(p, NULL), s);
    return buf_adds(b, s);
}

/* Jansson's text with each real number as number_text has it. */
static int add_text(struct buf *b, const char *p) {
    while (*p) {
        const size_t plain = strcspn(p, "\"-0123456789");
        TRY(buf_add(b, p, plain));
        p += plain;
        if (*p == '"') { /* to its end, escapes jumped over */
            const char *q = p + 1;
            while (*q != '"') q += *q == '\\' ? 2 : 1;
            TRY(buf_add(b, p, (size_t)(q + 1 - p)));
            p = q + 1;
        } else if (*p) {
            TRY(add_number(b, p, &p));
        }
    }
    return 0;
}

static int add_bytes(const char *p, size_t n, void *b) { return buf_add(b, p, n) < 0 ? -1 : 0; }

static int dump(struct buf *b, const json_t *v, size_t flags) {
    struct buf text = {0};
    int rc = 0;
    if (json_dump_callback(v, add_bytes, &text, flags | JSON_ENCODE_ANY | JSON_REAL_PRECISION(17)) < 0)
        FAILG(out, ERR_INTERNAL, "cannot print JSON (a string that is not UTF-8, or a number that is not finite)");
    rc = add_text(b, text.p ? text.p : "");
out:
    buf_free(&text);
    return rc;
}

int json_dump_line(struct buf *b, const json_t *v) { return dump(b, v, JSON_COMPACT); }

json_t *json_i32_array(const int32_t *v, int64_t n) {
    json_t *a = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(a, json_integer(v[i]));
    return a;
}

static int save(const char *path, const json_t *v, int (*write)(const char *, const void *, size_t)) {
    struct buf b = {0};
    int rc = dump(&b, v, JSON_INDENT(2));
    if (rc < 0) rc = err_set(ERR_INTERNAL, __FILE__, __LINE__, "%s: cannot print JSON", path);
    if (rc == 0) rc = buf_addc(&b, '\n');
    if (rc == 0) rc = write(path, b.p, b.n);
    buf_free(&b);
    return rc;
}
int json_save_atomic(const char *path, const json_t *v) { return save(path, v, file_write_atomic); }
int json_save_new(const char *path, const json_t *v) { return save(path, v, file_write_new); }

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
