/* fill.c - puts the values of a loaded configuration into a program's struct, by the bindings that its rows give.
 * Knows no key. Invariant: a member of a bound key holds that key's value, or what it held before where the value is null
 * (or the key absent) and the row names no other value for that. */
#include "conf/conf_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

int conf_bytes(const char *key, const char *text, int64_t *out) {
    static const struct {
        const char *unit;
        double bytes;
    } units[] = {{"", 1}, {"B", 1}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}};
    char *end;
    const double v = strtod(text, &end);
    while (*end == ' ') end++;
    for (size_t i = 0; end != text && i < sizeof units / sizeof *units; i++) {
        if (strcmp(end, units[i].unit) != 0 || !(v * units[i].bytes <= 0x1p56) || !(v >= 0)) continue;
        *out = (int64_t)(v * units[i].bytes);
        return 0;
    }
    FAIL(ERR_INVAL, "%s=%s: expected bytes, or a number with KiB, MiB or GiB", key, text);
}

int conf_whole(const char *key, const char *type, const char *text, int64_t *out) {
    char *end;
    errno = 0;
    const struct conf_node v = {.kind = CONF_INT, .i = strtoll(text, &end, 10)};
    if (errno || end == text || *end || !conf__type_ok(type, &v)) FAIL(ERR_INVAL, "%s=%s: expected %s", key, text, type);
    *out = v.i;
    return 0;
}

int conf_real(const char *key, const char *type, const char *text, double *out) {
    char *end;
    const struct conf_node v = {.kind = CONF_FLOAT, .f = strtod(text, &end)};
    if (end == text || *end || !conf__type_ok(type, &v)) FAIL(ERR_INVAL, "%s=%s: expected %s", key, text, type);
    *out = v.f;
    return 0;
}

int conf_word(const char *key, const char *text, const struct conf_word *words, int *out) {
    struct buf names = {0};
    for (const struct conf_word *w = words; w->word; w++) {
        if (strcmp(w->word, text) == 0) {
            *out = w->value;
            buf_free(&names);
            return 0;
        }
        buf_addf(&names, "%s%s", names.n == 0 ? "" : w[1].word ? ", " : " or ", w->word);
    }
    const int rc = err_set(ERR_INVAL, __FILE__, __LINE__, "%s=%s: expected %s", key, text, names.p);
    buf_free(&names);
    return rc;
}

static int put_strs(const struct conf_binding *b, const struct conf_node *v, char *into) {
    const char *const **list = (const char *const **)(void *)(into + b->at);
    int64_t *const n = (int64_t *)(void *)(into + b->count_at);
    const bool one = v->kind != CONF_LIST;
    *list = one ? (const char *const *)&v->s : v->n > 0 ? v->strs : NULL;
    *n = one ? 1 : v->n;
    return 0;
}

static void *keep(struct conf_paths *p, void *x) {
    xgrow((void **)&p->owned, &p->cap, p->n + 1, sizeof *p->owned);
    return p->owned[p->n++] = x;
}

void conf__paths_free(struct conf_paths *p) {
    for (int64_t i = 0; p && i < p->n; i++) free(p->owned[i]);
    if (p) free(p->owned);
    free(p);
}

static const char *expanded(const struct conf *c, const char *path) {
    return path[0] == '~' ? keep(c->paths, file_expand(path)) : path;
}

static int put_paths(const struct conf *c, const struct conf_binding *b, const struct conf_node *v, char *into) {
    TRY(put_strs(b, v, into));
    const char *const **list = (const char *const **)(void *)(into + b->at);
    const int64_t n = *(int64_t *)(void *)(into + b->count_at);
    const char **paths = keep(c->paths, xcalloc((size_t)n + 1, sizeof *paths));
    for (int64_t i = 0; i < n; i++) paths[i] = expanded(c, (*list)[i]);
    if (n > 0) *list = paths;
    return 0;
}

static bool is_number(const struct conf_node *v) { return v->kind == CONF_INT || v->kind == CONF_FLOAT; }
static double number(const struct conf_node *v) { return v->kind == CONF_INT ? (double)v->i : v->f; }

static int put_f64s(const struct conf_binding *b, const struct conf_node *v, char *into) {
    bool ok = v->kind == CONF_LIST && v->n <= (int64_t)b->max;
    for (int64_t k = 0; ok && k < v->n; k++) ok = is_number(v->items[k].v);
    if (!ok) FAIL(ERR_INVAL, "%s: expected a list of at most %zu numbers", b->key, b->max);
    for (int64_t k = 0; k < v->n; k++) ((double *)(void *)(into + b->at))[k] = number(v->items[k].v);
    *(int64_t *)(void *)(into + b->count_at) = v->n;
    return 0;
}

/* What is stored of a value of this kind; NULL: anything. */
static const char *wants(const struct conf_binding *b, const struct conf_node *v) {
    switch (b->into) {
    case INTO_BOOL:
    case INTO_OR: return v->kind == CONF_BOOL || b->words ? NULL : "true or false";
    case INTO_INT:
    case INTO_MOST:
    case INTO_I64: return v->kind == CONF_INT || b->words ? NULL : "a whole number";
    case INTO_F32:
    case INTO_F64: return is_number(v) ? NULL : "a number";
    case INTO_STR:
    case INTO_PATH:
    case INTO_BYTES: return v->kind != CONF_LIST && v->kind != CONF_DICT ? NULL : "a text";
    case INTO_STRS:
    case INTO_PATHS: return v->kind != CONF_DICT && (v->kind != CONF_LIST || v->strs) ? NULL : "a text or a list of texts";
    case INTO_NOTHING:
    case INTO_JSON:
    case INTO_F64S: return NULL;
    }
    return NULL;
}

/* A whole number, or a word that stands for one. */
static int whole(const struct conf_binding *b, const struct conf_node *v, int64_t *out) {
    int value = 0;
    if (b->words && v->kind != CONF_INT) TRY(conf_word(b->key, v->s, b->words, &value));
    *out = v->kind == CONF_INT ? v->i : v->kind == CONF_BOOL ? v->b : value;
    return 0;
}

static int put(const struct conf *c, const struct conf_binding *b, const struct conf_node *v, const json_t *json, char *into) {
    void *const at = into + b->at;
    int64_t i = 0;
    switch (b->into) {
    case INTO_NOTHING: return 0;
    case INTO_BOOL:
        TRY(whole(b, v, &i));
        *(bool *)at = i != 0;
        return 0;
    case INTO_OR: *(bool *)at |= v->b; return 0;
    case INTO_MOST:
        TRY(whole(b, v, &i));
        if (i > *(int64_t *)at) *(int64_t *)at = i;
        return 0;
    case INTO_INT:
        TRY(whole(b, v, &i));
        if (i < INT_MIN || i > INT_MAX) FAIL(ERR_INVAL, "%s=%lld: does not fit in 32 bits", b->key, (long long)i);
        *(int *)at = (int)i;
        return 0;
    case INTO_I64: return whole(b, v, (int64_t *)at);
    case INTO_F32: *(float *)at = (float)number(v); return 0;
    case INTO_F64: *(double *)at = number(v); return 0;
    case INTO_STR: *(const char **)at = v->s; return 0;
    case INTO_PATH: *(const char **)at = expanded(c, v->s); return 0;
    case INTO_JSON: *(const json_t **)at = json; return 0;
    case INTO_BYTES: return conf_bytes(b->key, v->s, (int64_t *)at);
    case INTO_STRS: return put_strs(b, v, into);
    case INTO_PATHS: return put_paths(c, b, v, into);
    case INTO_F64S: return put_f64s(b, v, into);
    }
    return 0;
}

/* The value that counts: the key's own, else what its row says for null; NULL: none. */
static int value_of(const struct conf *c, const struct conf_key *row, const struct conf_node **out) {
    const struct conf_node *v = conf__node_at(c->tree, row->path), null = {0};
    if (!v && row->def && !row->other && !conf__type_ok(row->type, &null))
        FAIL(ERR_INVAL, "%s is needed but was deleted from the configuration", row->path);
    if (v && conf__node_missing(v)) FAIL(ERR_INVAL, "%s is mandatory: set %s=...", row->path, row->path);
    *out = v && v->kind != CONF_NULL ? v : row->other ? conf__node_at(c->others, row->path) : NULL;
    return 0;
}

int conf_fill(const struct conf *c, const struct conf_binding *b, size_t n, void *into) {
    for (; n > 0; n--, b++) {
        const struct conf_key *row = conf__table_row(&c->table, b->key);
        const struct conf_node *v = NULL;
        const json_t *json = NULL;
        if (!row) continue; /* of another schema of the same program */
        TRY(value_of(c, row, &v));
        if (!v) continue;
        const char *const wanted = wants(b, v);
        if (wanted) return conf__mismatch(c, b->key, v, wanted);
        if (b->into == INTO_JSON) TRY(conf_json(c, b->key, &json));
        TRY(put(c, b, v, json, into));
    }
    return 0;
}
