/* changes.c - what differs between this configuration and the one of a checkpoint, which conf_yaml printed: one call a key.
 *
 * Keys that this program uses are reported. A key that is noted or unknown changes nothing. An older name is reported as the key
 * that takes its value. Knows no key by name; which of them a caller leaves out is its own affair.
 * Invariant: a configuration that is loaded with the same values as before has no changes, whatever names and files it is
 * written in. */
#include "conf/conf_int.h"

#include "base/err.h"
#include "base/hash.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST = 160, SHOWN = 100 }; /* bytes of a value in a line */

struct comparison {
    const struct conf *c;
    struct conf_node *was; /* with older names forwarded */
    void (*each)(void *arg, const struct conf_change *change);
    void *arg;
};

/* ---- a value in a line ---- */

/* A text that the grammar of overrides reads back as it is. */
static bool is_word(const char *s) {
    struct conf_node *v = NULL;
    if (!*s) return false;
    for (const char *p = s; *p; p++)
        if (!isalnum((unsigned char)*p) && !strchr("_-./:@~+%", *p)) return false;
    if (conf__parse_value(&v, s, "") < 0) return false;
    const bool same = v->kind == CONF_STR;
    conf__node_free(v);
    return same;
}

static void add_text(const char *s, struct buf *b) {
    if (is_word(s)) {
        buf_adds(b, s);
        return;
    }
    buf_addc(b, '\'');
    for (; *s; s++) {
        if (*s == '\n') buf_adds(b, "\\n");
        else if (*s == '\t') buf_adds(b, "\\t");
        else if (*s == '\'' || *s == '\\') buf_addf(b, "\\%c", *s);
        else if ((unsigned char)*s < ' ' || *s == 127) buf_addf(b, "\\x%02x", (unsigned char)*s);
        else buf_addc(b, *s);
    }
    buf_addc(b, '\'');
}

static void add_value(const struct conf_node *v, struct buf *b) {
    if (!v || v->kind == CONF_NULL) {
        buf_adds(b, "null");
    } else if (v->kind == CONF_LIST || v->kind == CONF_DICT) {
        buf_addc(b, v->kind == CONF_LIST ? '[' : '{');
        for (int64_t k = 0; k < v->n; k++) {
            if (k) buf_adds(b, ", ");
            if (v->kind == CONF_DICT) buf_addf(b, "%s: ", v->items[k].key);
            add_value(v->items[k].v, b);
        }
        buf_addc(b, v->kind == CONF_LIST ? ']' : '}');
    } else if (v->kind == CONF_STR) {
        add_text(v->s, b);
    } else if (v->kind == CONF_BOOL) {
        buf_adds(b, v->b ? "true" : "false");
    } else {
        conf__node_text(v, b);
    }
}

/* Of a long one its beginning, and a checksum that distinguishes it from another with the same beginning. Caller frees. */
static char *value_text(const struct conf_node *v) {
    struct buf b = {0};
    add_value(v, &b);
    if (b.n > LONGEST) {
        const size_t n = b.n;
        const unsigned long long sum = hash64(b.p, b.n);
        b.n = SHOWN;
        while (b.n > 0 && ((unsigned char)b.p[b.n] & 0xC0) == 0x80) b.n--; /* between characters */
        buf_addf(&b, "... (%zu bytes, %016llx)", n, sum);
    }
    return buf_take(&b);
}

/* ---- one key ---- */

static bool is_null(const struct conf_node *v) { return !v || v->kind == CONF_NULL; }
static bool is_dict(const struct conf_node *v) { return v && v->kind == CONF_DICT; }

static bool same(const struct conf_node *a, const struct conf_node *b) {
    if (is_null(a) || is_null(b)) return is_null(a) && is_null(b);
    return conf__node_equal(a, b);
}

static void report(const struct comparison *x, const char *key, const struct conf_node *was, const struct conf_node *now) {
    char *a = value_text(was), *b = value_text(now);
    x->each(x->arg, &(struct conf_change){key, a, b});
    free(a);
    free(b);
}

/* Of an open dict the members that differ, where it is null on one side all; those with a row of their own are reported there. */
static void report_members(const struct comparison *x, const char *key, const struct conf_node *was, const struct conf_node *now) {
    const struct conf_node *const both[] = {was, now};
    if (!(is_dict(was) || is_null(was)) || !(is_dict(now) || is_null(now)) || (is_null(was) && is_null(now))) {
        report(x, key, was, now);
        return;
    }
    for (int i = 0; i < 2; i++)
        for (int64_t k = 0; both[i] && k < both[i]->n; k++) {
            const char *name = both[i]->items[k].key;
            const struct conf_node *a = was ? conf__node_child(was, name, strlen(name)) : NULL,
                                   *b = now ? conf__node_child(now, name, strlen(name)) : NULL;
            if ((i == 1 && a) || same(a, b)) continue; /* once */
            char *path = xasprintf("%s.%s", key, name);
            if (!conf__table_row(&x->c->table, path)) report_members(x, path, a, b);
            free(path);
        }
}

/* Whether the value is the default's text with ${...}, then as now: what it reads has changed, and is reported itself. */
static bool is_derived(const struct comparison *x, const char *key, const struct conf_node *was) {
    const struct conf_node *raw = conf__node_at(x->c->raw, key);
    if (conf_is_set(x->c, key) || !raw || raw->kind != CONF_STR || raw->literal || !strstr(raw->s, "${")) return false;
    struct conf_node *root = conf__node_copy(x->was), *resolved = NULL;
    bool yes = conf__node_set(root, key, conf__node_copy(raw)) == 0 && conf__resolve(&resolved, root) == 0;
    if (yes) yes = same(conf__node_at(resolved, key), was);
    if (resolved) conf__node_free(resolved);
    conf__node_free(root);
    return yes;
}

/* The value that counts, as fill.c has it. */
static const struct conf_node *counts(const struct comparison *x, const struct conf_key *row, const struct conf_node *v) {
    return is_null(v) && row->other ? conf__node_at(x->c->others, row->path) : v;
}

/* By the user: the key, or what lies in the dict that it is. */
static bool is_set(const struct conf *c, const char *key) {
    const size_t n = strlen(key);
    bool set = false;
    for (int64_t k = 0; k < c->set.n && !set; k++) {
        const char *path = c->set.entries[k].key;
        set = strncmp(path, key, n) == 0 && (path[n] == '\0' || path[n] == '.');
    }
    return set;
}

static void compare_key(const struct comparison *x, const struct conf_key *row) {
    const struct conf_node *was = conf__node_at(x->was, row->path), *now = conf__node_at(x->c->tree, row->path);
    if (!was && !is_set(x->c, row->path)) return; /* of an older program that had not this key: what it did is the default */
    if (!was) was = conf__node_at(x->c->defaults, row->path);
    was = counts(x, row, was);
    now = counts(x, row, now);
    if (same(was, now) || is_derived(x, row->path, was)) return;
    if (is_dict(was) || is_dict(now)) report_members(x, row->path, was, now);
    else report(x, row->path, was, now);
}

/* ---- the whole ---- */

/* The values of older names move to the new ones, as they did when the configuration was loaded. */
static int forward(const struct comparison *x) {
    const struct conf *c = x->c;
    for (int64_t k = 0; k < c->table.n; k++) {
        const struct conf_key *row = &c->table.rows[k];
        const struct conf_node *v = row->status == CONF_MOVED ? conf__node_at(x->was, row->path) : NULL;
        if (is_null(v) || !same(conf__node_at(x->was, row->text), conf__node_at(c->defaults, row->text))) continue;
        TRY(conf__node_set(x->was, row->text, conf__node_copy(v)));
    }
    return 0;
}

int conf_changes(const struct conf *c, const char *yaml, size_t n, const char *where,
                 void (*each)(void *arg, const struct conf_change *change), void *arg) {
    struct comparison x = {.c = c, .each = each, .arg = arg};
    TRY(conf__yaml_parse(&x.was, yaml, n, where));
    int rc = is_dict(x.was) ? forward(&x) : err_set(ERR_INVAL, __FILE__, __LINE__, "%s: not a configuration", where);
    for (int64_t k = 0; rc == 0 && k < c->table.n; k++)
        if (c->table.rows[k].status == CONF_USED) compare_key(&x, &c->table.rows[k]);
    conf__node_free(x.was);
    return rc;
}
