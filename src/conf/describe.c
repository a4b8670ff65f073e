/* describe.c - what is known of a key, for `verlc explain` and completion: its row, types in words, the values of an enumeration,
 * older names and other trainers' names, keys whose defaults hang together. Knows no values of a run. */
#include "conf/conf_int.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

static const struct note {
    const char *key, *values, *advice, *related;
} notes[] = {
#define VALUES(key, words) {key, words, NULL, NULL},
#define ADVICE(key, when, related) {key, NULL, when, related},
#include "conf/keys/key_advice.def"
};
enum { N_NOTES = sizeof notes / sizeof notes[0] };

static void describe(const struct conf_key *row, struct conf_key_info *k) {
    *k = (struct conf_key_info){.key = row->path, .type = row->type, .def = row->def, .null_is = row->other, .text = row->text};
    k->own = strncmp(row->text, "verlc: ", 7) == 0;
    if (k->own) k->text += 7;
    switch (row->status) {
    case CONF_NOTED: k->how = CONF_KEY_NOTED; break;
    case CONF_REJECTED: k->how = CONF_KEY_FIXED; break;
    case CONF_MOVED: k->how = CONF_KEY_OLDER; break;
    case CONF_USED:
    default: k->how = CONF_KEY_ACTS;
    }
    for (int i = 0; i < N_NOTES; i++) {
        if (strcmp(notes[i].key, row->path) != 0) continue;
        if (notes[i].values) k->values = notes[i].values;
        if (notes[i].advice) k->advice = notes[i].advice;
        if (notes[i].related) k->related = notes[i].related;
    }
}

int conf_keys(const char *schema, int (*each)(void *arg, const struct conf_key_info *k), void *arg) {
    struct conf_table t;
    int rc = conf__table_open(&t, schema);
    for (int64_t i = 0; rc == 0 && i < t.n; i++) {
        struct conf_key_info k;
        describe(&t.rows[i], &k);
        rc = each(arg, &k);
    }
    conf__table_free(&t);
    return rc;
}

const char *conf_key_near(const char *schema, const char *name) {
    struct conf_table t;
    if (conf__table_open(&t, schema) < 0) return NULL;
    const char *near = conf__table_near(&t, name); /* the texts of rows outlive a table */
    conf__table_free(&t);
    return near;
}

/* ---- values ---- */

static void add_value(struct buf *out, const char *word, size_t n) { buf_addf(out, "%.*s\n", (int)n, word); }

void conf_key_values(const struct conf_key_info *k, struct buf *out) {
    for (const char *p = k->type; *p;) {
        const size_t n = strcspn(p, "|");
        if (n > 2 && *p == '\'') add_value(out, p + 1, n - 2);
        if (n == 4 && memcmp(p, "bool", 4) == 0) buf_adds(out, "True\nFalse\n");
        p += n + (p[n] == '|');
    }
    for (const char *p = k->values ? k->values : ""; *p; p += strspn(p, " ")) {
        const size_t n = strcspn(p, " ");
        add_value(out, p, n);
        p += n;
    }
}

/* ---- types in words ---- */

/* "[0,1)" behind "a number": " from 0 to below 1". */
static void interval_words(const char *p, size_t n, struct buf *out) {
    if (n < 5) return;
    const size_t comma = strcspn(p, ","), hi = n - comma - 2;
    const bool above = *p == '(', below = p[n - 1] == ')', ends = strncmp(p + comma + 1, "inf", 3) != 0 || !below;
    buf_addf(out, "%s %.*s", above ? " above" : " from", (int)comma - 1, p + 1);
    if (!ends) buf_adds(out, above ? "" : " on");
    else buf_addf(out, "%s %.*s", below ? " to below" : above ? " up to" : " to", (int)hi, p + comma + 1);
}

static void one_type_words(const char *p, size_t n, struct buf *out) {
    static const struct {
        const char *type, *words;
    } names[] = {{"bool", "True or False"}, {"str", "a text"},          {"list[str]", "a list of texts"},
                 {"list", "a list"},        {"dict", "a group {a: 1}"}, {"any", "anything"},
                 {"null", "null"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i].type) == n && memcmp(p, names[i].type, n) == 0) {
            buf_adds(out, names[i].words);
            return;
        }
    if (n > 2 && *p == '\'') {
        buf_addf(out, "%.*s", (int)n - 2, p + 1);
    } else if (strncmp(p, "int", 3) == 0 || strncmp(p, "float", 5) == 0) {
        const size_t name = *p == 'i' ? 3 : 5;
        const size_t comma = strcspn(p, ",");
        if (comma < n && n > name + 4 && p[name] == '[' && comma - name - 1 == n - comma - 2 &&
            memcmp(p + name + 1, p + comma + 1, n - comma - 2) == 0) { /* [0,0] */
            buf_add(out, p + comma + 1, n - comma - 2);
            return;
        }
        buf_adds(out, *p == 'i' ? "a whole number" : "a number");
        interval_words(p + name, n - name, out);
    } else if (strncmp(p, "list[", 5) == 0) {
        buf_adds(out, "a list, each of it ");
        one_type_words(p + 5, n - 6, out);
    } else {
        buf_add(out, p, n);
    }
}

void conf_type_words(const char *type, struct buf *out) {
    for (const char *p = type; *p;) {
        const size_t n = strcspn(p, "|");
        one_type_words(p, n, out);
        p += n;
        if (!*p) break;
        buf_adds(out, strchr(p + 1, '|') ? ", " : " or ");
        p++;
    }
}

/* ---- other names, other keys ---- */

static void add_name(struct buf *out, const char *name) { buf_addf(out, "%s%s", out->n ? ", " : "", name); }

/* Whether text has key in it as a whole path. */
static bool names_key(const char *text, const char *key) {
    static const char inside[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.";
    const size_t n = strlen(key);
    for (const char *p = text; (p = strstr(p, key)); p += n)
        if ((p == text || !strchr(inside, p[-1])) && (p[n] == '\0' || !strchr(inside, p[n]))) return true;
    return false;
}

int conf_key_relations(const char *schema, const char *key, struct buf *older, struct buf *elsewhere, struct buf *followers) {
    struct conf_table t;
    TRY(conf__table_open(&t, schema));
    for (int64_t i = 0; i < t.n; i++) {
        const struct conf_key *row = &t.rows[i];
        if (row->status == CONF_MOVED && strcmp(row->text, key) == 0) add_name(older, row->path);
        if (row->status == CONF_USED && row->def && strchr(row->def, '$') && names_key(row->def, key))
            add_name(followers, row->path);
    }
    for (int i = 0;; i++) {
        const char *name = conf__table_alias(&t, i, key);
        if (!name) break;
        if (*name) add_name(elsewhere, name);
    }
    conf__table_free(&t);
    return 0;
}
