/* tree.c - the tree of configuration values: null, bool, int, float, text,
 * list, dict with ordered keys. Knows paths ("a.b.0"), merging and Python's
 * texts of values; knows nothing of keys' meanings.
 * Invariant: a child's parent pointer is the container that holds it. */
#include "conf/conf_int.h"

#include "base/err.h"
#include "base/encoding/number.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct conf_node *conf__node_new(enum conf_kind kind) {
    struct conf_node *v = xcalloc(1, sizeof *v);
    v->kind = kind;
    return v;
}

struct conf_node *conf__node_str(const char *s, size_t n) {
    struct conf_node *v = conf__node_new(CONF_STR);
    v->s = xstrndup(s, n);
    return v;
}

void conf__node_free(struct conf_node *v) {
    if (!v) return;
    for (int64_t k = 0; k < v->n; k++) {
        free(v->items[k].key);
        conf__node_free(v->items[k].v);
    }
    free(v->items);
    free(v->strs);
    free(v->s);
    free(v);
}

static void append(struct conf_node *c, char *key, bool bare, struct conf_node *v) {
    xgrow((void **)&c->items, &c->cap, c->n + 1, sizeof *c->items);
    c->items[c->n++] = (struct conf_item){key, bare, v};
    v->parent = c;
}

struct conf_node *conf__node_copy(const struct conf_node *v) {
    struct conf_node *out = conf__node_new(v->kind);
    out->b = v->b;
    out->i = v->i;
    out->f = v->f;
    out->literal = v->literal;
    if (v->kind == CONF_STR) out->s = xstrdup(v->s);
    for (int64_t k = 0; k < v->n; k++)
        append(out, v->items[k].key ? xstrdup(v->items[k].key) : NULL, v->items[k].bare, conf__node_copy(v->items[k].v));
    return out;
}

static double number(const struct conf_node *v) { return v->kind == CONF_INT ? (double)v->i : v->f; }

bool conf__node_equal(const struct conf_node *a, const struct conf_node *b) {
    const bool num_a = a->kind == CONF_INT || a->kind == CONF_FLOAT;
    const bool num_b = b->kind == CONF_INT || b->kind == CONF_FLOAT;
    if (num_a && num_b) {
        if (a->kind == CONF_INT && b->kind == CONF_INT) return a->i == b->i;
        return number(a) == number(b) || (isnan(number(a)) && isnan(number(b)));
    }
    if (a->kind != b->kind) return false;
    switch (a->kind) {
    case CONF_BOOL: return a->b == b->b;
    case CONF_STR: return strcmp(a->s, b->s) == 0;
    case CONF_LIST:
    case CONF_DICT:
        if (a->n != b->n) return false;
        for (int64_t k = 0; k < a->n; k++) {
            const struct conf_node *w =
                a->kind == CONF_LIST ? b->items[k].v : conf__node_child(b, a->items[k].key, strlen(a->items[k].key));
            if (!w || !conf__node_equal(a->items[k].v, w)) return false;
        }
        return true;
    case CONF_NULL:
    default: return true;
    }
}

bool conf__node_missing(const struct conf_node *v) { return v->kind == CONF_STR && strcmp(v->s, "???") == 0; }

/* Index of a list element, -1 when key is no index of it. */
static int64_t list_index(const struct conf_node *c, const char *key, size_t n) {
    if (n == 0 || n > 9) return -1;
    int64_t k = 0;
    for (size_t j = 0; j < n; j++) {
        if (!isdigit((unsigned char)key[j])) return -1;
        k = 10 * k + (key[j] - '0');
    }
    return k < c->n ? k : -1;
}

static int64_t find(const struct conf_node *c, const char *key, size_t n) {
    if (c->kind == CONF_LIST) return list_index(c, key, n);
    if (c->kind != CONF_DICT) return -1;
    const char first = n > 0 ? key[0] : '\0'; /* most keys differ in it */
    for (int64_t k = 0; k < c->n; k++)
        if (c->items[k].key[0] == first && strncmp(c->items[k].key, key, n) == 0 && c->items[k].key[n] == '\0') return k;
    return -1;
}

struct conf_node *conf__node_child(const struct conf_node *c, const char *key, size_t n) {
    const int64_t k = find(c, key, n);
    return k < 0 ? NULL : c->items[k].v;
}

void conf__node_put(struct conf_node *c, const char *key, struct conf_node *v) {
    const int64_t k = key ? find(c, key, strlen(key)) : -1;
    if (k >= 0) {
        conf__node_free(c->items[k].v);
        c->items[k].v = v;
        v->parent = c;
        return;
    }
    append(c, key ? xstrdup(key) : NULL, false, v);
}

bool conf__node_remove(struct conf_node *c, const char *key, size_t n) {
    const int64_t k = c->kind == CONF_DICT ? find(c, key, n) : -1;
    if (k < 0) return false;
    free(c->items[k].key);
    conf__node_free(c->items[k].v);
    memmove(&c->items[k], &c->items[k + 1], (size_t)(c->n - k - 1) * sizeof *c->items);
    c->n--;
    return true;
}

struct conf_node *conf__node_at(const struct conf_node *root, const char *path) {
    const struct conf_node *v = root;
    while (v && *path) {
        const size_t n = strcspn(path, ".");
        v = conf__node_child(v, path, n);
        path += n + (path[n] == '.');
    }
    return (struct conf_node *)v;
}

void conf__node_merge(struct conf_node *into, struct conf_node *from) {
    for (int64_t k = 0; k < from->n; k++) {
        struct conf_item *it = &from->items[k];
        struct conf_node *old = conf__node_child(into, it->key, strlen(it->key));
        if (old && old->kind == CONF_DICT && it->v->kind == CONF_DICT) {
            conf__node_merge(old, it->v);
        } else {
            conf__node_put(into, it->key, it->v);
        }
        it->v = NULL;
    }
    conf__node_free(from);
}

int conf__path_check(const char *path, const char *what) {
    enum { MAX_PARTS = 32 };
    int n = 1;
    for (const char *p = path; *p; p++) n += strchr("./@", *p) != NULL;
    if (n > MAX_PARTS) FAIL(ERR_INVAL, "%.80s: %.80s... has over %d parts", what, path, MAX_PARTS);
    return 0;
}

int conf__node_set(struct conf_node *root, const char *path, struct conf_node *v) {
    struct conf_node *c = root;
    const char *p = path;
    for (;;) {
        const size_t n = strcspn(p, ".");
        struct conf_node *old = conf__node_child(c, p, n);
        if (p[n] == '\0') break;
        const bool reference = old && old->kind == CONF_STR && !old->literal && strstr(old->s, "${");
        if (!old || old->kind == CONF_NULL || reference) { /* a group that is null, or another's, gets a body of its own */
            if (c->kind == CONF_LIST) old = NULL;
            char *key = xstrndup(p, n);
            if (c->kind == CONF_DICT) conf__node_put(c, key, old = conf__node_new(CONF_DICT));
            free(key);
        }
        if (!old || (old->kind != CONF_DICT && old->kind != CONF_LIST)) {
            conf__node_free(v);
            FAIL(ERR_INVAL, "%s: %.*s is not a group of keys", path, (int)(p + n - path), path);
        }
        c = old;
        p += n + 1;
    }
    struct conf_node *old = conf__node_child(c, p, strlen(p));
    if (c->kind == CONF_LIST && !old) {
        const int64_t len = c->n;
        conf__node_free(v);
        FAIL(ERR_INVAL, "%s: the list has %lld elements", path, (long long)len);
    }
    if (old && old->kind == CONF_DICT && v->kind == CONF_DICT) {
        conf__node_merge(old, v);
    } else {
        conf__node_put(c, p, v);
    }
    return 0;
}

void conf__node_text(const struct conf_node *v, struct buf *b) {
    char f[32];
    switch (v->kind) {
    case CONF_NULL: buf_adds(b, "None"); break;
    case CONF_BOOL: buf_adds(b, v->b ? "True" : "False"); break;
    case CONF_INT: buf_addf(b, "%lld", (long long)v->i); break;
    case CONF_FLOAT:
        number_text(v->f, f);
        buf_adds(b, f);
        break;
    case CONF_STR: buf_adds(b, v->s); break;
    case CONF_LIST:
    case CONF_DICT:
    default: CHECK(!"a container has no text");
    }
}

/* As the user would write it, so that a message can be pasted back. */
static void show(const struct conf_node *v, struct buf *b) {
    if (b->n > 200) return;
    switch (v->kind) {
    case CONF_NULL: buf_adds(b, "null"); break;
    case CONF_BOOL: buf_adds(b, v->b ? "true" : "false"); break;
    case CONF_STR: buf_addf(b, "'%.160s'", v->s); break;
    case CONF_LIST:
    case CONF_DICT:
        buf_addc(b, v->kind == CONF_LIST ? '[' : '{');
        for (int64_t k = 0; k < v->n && b->n <= 200; k++) {
            if (k) buf_adds(b, ", ");
            if (v->kind == CONF_DICT) buf_addf(b, "%s: ", v->items[k].key);
            show(v->items[k].v, b);
        }
        buf_addc(b, v->kind == CONF_LIST ? ']' : '}');
        break;
    case CONF_INT:
    case CONF_FLOAT:
    default: conf__node_text(v, b);
    }
}

void conf__node_show(const struct conf_node *v, struct buf *b) {
    const size_t n = b->n;
    struct buf t = {0};
    show(v, &t);
    buf_add(b, t.p ? t.p : "", t.n < 200 ? t.n : 200);
    if (b->n - n == 200) buf_adds(b, "...");
    buf_free(&t);
}

static bool is_scalar(const struct conf_node *v) { return v->kind != CONF_LIST && v->kind != CONF_DICT; }

void conf__node_finish(struct conf_node *v) {
    if (is_scalar(v)) {
        if (v->s) return;
        struct buf b = {0};
        conf__node_text(v, &b);
        v->s = buf_take(&b);
        return;
    }
    bool scalars = v->kind == CONF_LIST;
    for (int64_t k = 0; k < v->n; k++) {
        conf__node_finish(v->items[k].v);
        scalars = scalars && is_scalar(v->items[k].v);
    }
    if (!scalars) return;
    v->strs = xcalloc((size_t)v->n, sizeof *v->strs);
    for (int64_t k = 0; k < v->n; k++) v->strs[k] = v->items[k].v->s;
}

json_t *conf__node_json(const struct conf_node *v) {
    char f[32];
    json_t *out;
    switch (v->kind) {
    case CONF_BOOL: return json_boolean(v->b);
    case CONF_INT: return json_integer(v->i);
    case CONF_FLOAT:
        if (isfinite(v->f)) return json_real(v->f);
        number_text(v->f, f);
        return json_string(f);
    case CONF_STR:
        if (conf__node_missing(v)) return json_null();
        out = json_string(v->s);
        return out ? out : json_null(); /* not UTF-8; the parsers refuse that */
    case CONF_LIST:
        out = json_array();
        for (int64_t k = 0; k < v->n; k++) json_array_append_new(out, conf__node_json(v->items[k].v));
        return out;
    case CONF_DICT:
        out = json_object();
        for (int64_t k = 0; k < v->n; k++) json_object_set_new(out, v->items[k].key, conf__node_json(v->items[k].v));
        return out;
    case CONF_NULL:
    default: return json_null();
    }
}
