/* interpolation.c - ${...} after OmegaConf: ${a.b}, relative ${.x} and ${..x},
 * nesting, texts with several, and the resolvers oc.select, oc.env, oc.decode.
 * The composed tree is left as it is; the result is a copy.
 * Invariant: MAX_DEPTH references deep, MAX_NODES values and MAX_BYTES of text at
 * most, so a cycle or a tree that doubles itself is an error, not a hang. */
#include "conf/conf_int.h"

#include "base/err.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 200
#define MAX_NODES 200000
#define MAX_BYTES (16 << 20)

struct resolver {
    const struct conf_node *root;
    struct conf_node **temps; /* values made on the way to others; freed at the end */
    int64_t n_temps, cap_temps;
    int64_t n_nodes, n_bytes; /* made so far */
    int depth;
};

static int enter(struct resolver *r) {
    if (r->depth >= MAX_DEPTH) FAIL(ERR_INVAL, "interpolations go round in a circle, or over %d deep", MAX_DEPTH);
    if (++r->n_nodes > MAX_NODES || r->n_bytes > MAX_BYTES)
        FAIL(ERR_INVAL, "interpolations blow the configuration up to over %d values", MAX_NODES);
    r->depth++;
    return 0;
}

static int eval(struct resolver *r, const struct conf_node *v, struct conf_node **out);
static int eval_text(struct resolver *r, const char *s, size_t n, const struct conf_node *base, struct conf_node **out);

static bool has_ref(const struct conf_node *v) { return v->kind == CONF_STR && !v->literal && strstr(v->s, "${") != NULL; }

static const struct conf_node *keep(struct resolver *r, struct conf_node *v) {
    xgrow((void **)&r->temps, &r->cap_temps, r->n_temps + 1, sizeof *r->temps);
    r->temps[r->n_temps++] = v;
    return v;
}

/* The end of "${...}" that starts at s: one past its '}', NULL when it has none.
 * Quotes hide braces. */
static const char *ref_end(const char *s, const char *end) {
    int depth = 0;
    char quote = '\0';
    for (const char *p = s + 1; p < end; p++) {
        if (quote) {
            if (*p == '\\') p++;
            else if (*p == quote) quote = '\0';
        } else if (*p == '"' || *p == '\'') {
            quote = *p;
        } else if (*p == '{') {
            depth++;
        } else if (*p == '}' && --depth == 0) {
            return p + 1;
        }
    }
    return NULL;
}

/* The node at a path text such as "a.b", ".x", "..x.0", "a[b].c", looked up from
 * `base` (the container of the reference). *out NULL: no such node. */
static int find(struct resolver *r, const char *path, const struct conf_node *base, const struct conf_node **out) {
    const struct conf_node *v = r->root;
    const char *p = path;
    *out = NULL;
    if (*p == '.') {
        v = base;
        for (p++; *p == '.' && v; p++) v = v->parent;
    }
    while (v && *p) {
        if (*p == '.' || *p == ']') {
            p++;
            continue;
        }
        if (*p == '[') p++;
        const size_t n = strcspn(p, ".[]");
        if (has_ref(v)) { /* a reference on the way: go on in its value */
            struct conf_node *t = NULL;
            TRY(eval(r, v, &t));
            v = keep(r, t);
        }
        v = conf__node_child(v, p, n);
        p += n;
    }
    *out = v;
    return 0;
}

/* ---- resolvers ---- */
struct call {
    const char *what; /* "${...}" for messages */
    const struct conf_node *base;
    struct conf_node **args; /* evaluated */
    int64_t n;
};

static int call_select(struct resolver *r, const struct call *c, struct conf_node **out) {
    const struct conf_node *v;
    if (c->args[0]->kind != CONF_STR) FAIL(ERR_INVAL, "%s: oc.select takes a key", c->what);
    TRY(find(r, c->args[0]->s, c->base, &v));
    if (v && !conf__node_missing(v)) return eval(r, v, out);
    *out = c->n > 1 ? conf__node_copy(c->args[1]) : conf__node_new(CONF_NULL);
    return 0;
}

static int call_env(struct resolver *r, const struct call *c, struct conf_node **out) {
    (void)r;
    if (c->args[0]->kind != CONF_STR) FAIL(ERR_INVAL, "%s: oc.env takes the name of a variable", c->what);
    const char *s = getenv(c->args[0]->s);
    if (s && !conf__is_utf8(s)) FAIL(ERR_INVAL, "%s: the variable %s is not UTF-8 text", c->what, c->args[0]->s);
    if (s) {
        *out = conf__node_str(s, strlen(s));
        (*out)->literal = true;
        return 0;
    }
    if (c->n < 2)
        FAIL(ERR_INVAL, "%s: the environment has no variable %s; set it, or give a default: ${oc.env:%s,...}", c->what,
             c->args[0]->s, c->args[0]->s);
    const struct conf_node *d = c->args[1];
    if (d->kind == CONF_LIST || d->kind == CONF_DICT) FAIL(ERR_INVAL, "%s: the default must be a text", c->what);
    if (d->kind == CONF_NULL) {
        *out = conf__node_new(CONF_NULL);
        return 0;
    }
    struct buf b = {0};
    conf__node_text(d, &b);
    *out = conf__node_str(b.p ? b.p : "", b.n);
    (*out)->literal = true;
    buf_free(&b);
    return 0;
}

static int call_decode(struct resolver *r, const struct call *c, struct conf_node **out) {
    struct conf_node *v = NULL;
    if (c->args[0]->kind == CONF_NULL) {
        *out = conf__node_new(CONF_NULL);
        return 0;
    }
    if (c->args[0]->kind != CONF_STR) FAIL(ERR_INVAL, "%s: oc.decode takes a text", c->what);
    TRY(conf__parse_value(&v, c->args[0]->s, c->what));
    v->parent = (struct conf_node *)c->base;
    const int rc = eval(r, v, out);
    conf__node_free(v);
    return rc;
}

static const struct {
    const char *name;
    int min_args, max_args;
    int (*run)(struct resolver *r, const struct call *c, struct conf_node **out);
} resolvers[] = {
    {"oc.select", 1, 2, call_select},
    {"oc.env", 1, 2, call_env},
    {"oc.decode", 1, 1, call_decode},
};

/* The text of a call. */
struct call_text {
    const char *name, *args;
    size_t n_name, n_args;
};

static int eval_call(struct resolver *r, const struct call_text *t, const struct call *proto, struct conf_node **out) {
    struct conf_node *list = NULL, *done = conf__node_new(CONF_LIST);
    struct call c = *proto;
    int rc = 0;
    size_t k = 0;
    const size_t n_resolvers = sizeof resolvers / sizeof resolvers[0];
    while (k < n_resolvers && (strlen(resolvers[k].name) != t->n_name || memcmp(resolvers[k].name, t->name, t->n_name) != 0)) k++;
    if (k == n_resolvers)
        FAILG(out_, ERR_INVAL, "%s: resolver '%.*s' is not known; there are oc.select, oc.env, oc.decode", c.what,
              (int)(t->n_name < 60 ? t->n_name : 60), t->name);
    TRYG(conf__parse_args(&list, t->args, t->n_args, c.what), out_);
    if (list->n < resolvers[k].min_args || list->n > resolvers[k].max_args)
        FAILG(out_, ERR_INVAL, "%s: %s takes %d to %d arguments, not %lld", c.what, resolvers[k].name, resolvers[k].min_args,
              resolvers[k].max_args, (long long)list->n);
    list->parent = (struct conf_node *)c.base;
    for (int64_t j = 0; j < list->n; j++) {
        struct conf_node *v = NULL;
        list->items[j].v->parent = (struct conf_node *)c.base; /* ${.x} in an argument */
        TRYG(eval(r, list->items[j].v, &v), out_);
        conf__node_put(done, NULL, v);
    }
    c.n = done->n;
    struct conf_node *argv[2] = {0};
    for (int64_t j = 0; j < done->n; j++) argv[j] = done->items[j].v;
    c.args = argv;
    rc = resolvers[k].run(r, &c, out);
out_:
    conf__node_free(list);
    conf__node_free(done);
    return rc;
}

/* The value of the inside of one ${...}: "path" or "resolver:arguments". */
static int eval_ref(struct resolver *r, const char *body, size_t n, const struct conf_node *base, struct conf_node **out) {
    TRY(enter(r));
    char *what = xasprintf("${%.*s}", (int)(n < 120 ? n : 120), body);
    struct conf_node *text = NULL;
    struct buf path = {0};
    const struct conf_node *v;
    int rc = 0;
    while (n && isspace((unsigned char)*body)) body++, n--;
    while (n && isspace((unsigned char)body[n - 1])) n--;
    size_t colon = 0;
    while (colon < n && (isalnum((unsigned char)body[colon]) || strchr("_.-", body[colon]))) colon++;
    if (colon < n && body[colon] == ':') {
        const struct call c = {.what = what, .base = base};
        rc = eval_call(r, &(struct call_text){.name = body, .n_name = colon, .args = body + colon + 1, .n_args = n - colon - 1}, &c,
                       out);
        goto done;
    }
    if (n == 0) FAILG(done, ERR_INVAL, "%s: an empty interpolation", what);
    TRYG(eval_text(r, body, n, base, &text), done); /* ${a.${b}}: the path itself is a text */
    if (text->kind == CONF_LIST || text->kind == CONF_DICT) FAILG(done, ERR_INVAL, "%s: not a key", what);
    conf__node_text(text, &path);
    if (!path.p || strpbrk(path.p, " \t{}'\"\\:")) FAILG(done, ERR_INVAL, "%s: not a key", what);
    TRYG(find(r, path.p, base, &v), done);
    if (!v) FAILG(done, ERR_INVAL, "%s: there is no key %s", what, path.p);
    rc = eval(r, v, out);
done:
    conf__node_free(text);
    buf_free(&path);
    free(what);
    r->depth--;
    return rc;
}

/* A text with references: the value itself when it is one reference, else their
 * texts joined. Backslashes in front of ${ halve; an odd one makes it literal. */
static int eval_text(struct resolver *r, const char *s, size_t n, const struct conf_node *base, struct conf_node **out) {
    const char *p = s, *end = s + n;
    struct buf b = {0};
    bool missing = false;
    int rc = 0;
    if (n > 2 && p[0] == '$' && p[1] == '{' && ref_end(p, end) == end) return eval_ref(r, s + 2, n - 3, base, out);
    while (p < end) {
        size_t k = 0;
        while (p + k < end && p[k] == '\\') k++;
        if (p + k + 1 >= end || p[k] != '$' || p[k + 1] != '{') {
            buf_add(&b, p, k ? k : 1);
            p += k ? k : 1;
            continue;
        }
        for (size_t j = 0; j < k / 2; j++) buf_addc(&b, '\\');
        p += k;
        if (k % 2) {
            buf_adds(&b, "${");
            p += 2;
            continue;
        }
        const char *e = ref_end(p, end);
        if (!e) FAILG(fail, ERR_INVAL, "%.60s: the interpolation has no end", p);
        struct conf_node *v = NULL;
        TRYG(eval_ref(r, p + 2, (size_t)(e - p) - 3, base, &v), fail);
        const bool container = v->kind == CONF_LIST || v->kind == CONF_DICT;
        missing = missing || conf__node_missing(v);
        if (!container) conf__node_text(v, &b);
        conf__node_free(v);
        if (container) FAILG(fail, ERR_INVAL, "%.*s is a list or a group and cannot be part of a text", (int)(e - p), p);
        p = e;
    }
    r->n_bytes += (int64_t)b.n;
    *out = missing ? conf__node_str("???", 3) : conf__node_str(b.p ? b.p : "", b.n);
    (*out)->literal = !missing;
fail:
    buf_free(&b);
    return rc;
}

static int eval_inner(struct resolver *r, const struct conf_node *v, struct conf_node **out) {
    if (v->kind == CONF_STR) r->n_bytes += (int64_t)strlen(v->s);
    if (has_ref(v)) return eval_text(r, v->s, strlen(v->s), v->parent ? v->parent : r->root, out);
    if (v->kind != CONF_LIST && v->kind != CONF_DICT) {
        *out = conf__node_copy(v);
        return 0;
    }
    struct conf_node *c = conf__node_new(v->kind);
    for (int64_t k = 0; k < v->n; k++) {
        struct conf_node *w = NULL;
        const int rc = eval(r, v->items[k].v, &w);
        if (rc < 0) {
            conf__node_free(c);
            return rc;
        }
        conf__node_put(c, v->items[k].key, w);
        c->items[c->n - 1].bare = v->items[k].bare;
    }
    *out = c;
    return 0;
}

static int eval(struct resolver *r, const struct conf_node *v, struct conf_node **out) {
    TRY(enter(r));
    const int rc = eval_inner(r, v, out);
    r->depth--;
    return rc;
}

/* As eval_inner over the whole tree, but a failure names the key it came from. */
static int resolve_under(struct resolver *r, const struct conf_node *v, const char *path, struct conf_node *into) {
    for (int64_t k = 0; k < v->n; k++) {
        const struct conf_item *it = &v->items[k];
        char *key = it->key ? xasprintf("%s%s%s", path, *path ? "." : "", it->key) : xasprintf("%s.%lld", path, (long long)k);
        struct conf_node *w = NULL;
        int rc;
        if (it->v->kind == CONF_DICT) {
            w = conf__node_new(CONF_DICT);
            rc = resolve_under(r, it->v, key, w);
            if (rc < 0) conf__node_free(w);
        } else {
            rc = eval(r, it->v, &w);
            if (rc < 0) rc = err_wrap(rc, "%s", key);
        }
        free(key);
        if (rc < 0) return rc;
        conf__node_put(into, it->key, w);
        into->items[into->n - 1].bare = it->bare;
    }
    return 0;
}

int conf__resolve(struct conf_node **out, const struct conf_node *root) {
    struct resolver r = {.root = root};
    struct conf_node *c = conf__node_new(CONF_DICT);
    const int rc = resolve_under(&r, root, "", c);
    for (int64_t k = 0; k < r.n_temps; k++) conf__node_free(r.temps[k]);
    free(r.temps);
    if (rc < 0) {
        conf__node_free(c);
        return rc;
    }
    *out = c;
    return 0;
}
