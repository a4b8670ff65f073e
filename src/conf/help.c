/* help.c - what --help prints of a schema's keys: the common ones with their meaning and the names of the others that act; on
 * request those under a prefix, or all, with type and status.  Knows no values but defaults.
 * Invariant: every key that acts is named by a plain --help. */
#include "conf/conf_int.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

enum {
    WIDTH = 112,
    TEXT_COLUMN = 36,
    FEW = 40 /* a schema with no more acting keys than this shows all of them with their meaning */
};

static const struct common {
    const char *schema, *path;
} common_keys[] = {
#define HELP(schema) {schema, NULL},
#define COMMON(path) {NULL, path},
#include "conf/keys/help_keys.def"
};
enum { N_COMMON = sizeof common_keys / sizeof common_keys[0] };

static const char *status_text(const struct conf_key *row) {
    switch (row->status) {
    case CONF_NOTED: return "noted: ";
    case CONF_REJECTED: return "fixed: ";
    case CONF_MOVED: return "older name of ";
    case CONF_USED:
    default: return "";
    }
}

/* Length of the group that heads a key: "trainer." of trainer.logger, "actor_rollout_ref.actor." of a key of the actor. */
static size_t group_length(const char *path) {
    const char *from = strncmp(path, "actor_rollout_ref.", 18) == 0 ? path + 18 : path, *dot = strchr(from, '.');
    return dot ? (size_t)(dot - path) + 1 : 0;
}

/* The group's name, where it is another than that of `before`. */
static void print_group(FILE *f, const char *path, const char *before) {
    const size_t n = group_length(path);
    if (before && group_length(before) == n && strncmp(before, path, n) == 0) return;
    fprintf(f, "%s%.*s\n", before ? "\n" : "", (int)n, path);
}

/* ".key=default   meaning", up to its first semicolon; a default that is long or refers to another key is left out. */
static void print_key(FILE *f, const struct conf_key *row) {
    const char *leaf = row->path + group_length(row->path);
    const bool value = row->def && !strchr(row->def, '$') && strlen(leaf) + strlen(row->def) + 6 <= TEXT_COLUMN;
    int n = fprintf(f, "  .%s", leaf);
    if (value) n += fprintf(f, "=%s", row->def);
    const char *text = strncmp(row->text, "verlc: ", 7) == 0 ? row->text + 7 : row->text;
    const size_t len = strcspn(text, ";");
    if (n + 2 > TEXT_COLUMN) n = fprintf(f, "\n") - 1;
    fprintf(f, "%*s%.*s\n", TEXT_COLUMN - n, "", (int)len, text);
}

/* Names of one group, wrapped. */
static void print_names(FILE *f, const struct conf_table *t, const char *group, size_t len, bool *shown) {
    int column = fprintf(f, "  %.*s", (int)len, group);
    for (int64_t k = 0; k < t->n; k++) {
        const char *path = t->rows[k].path;
        if (shown[k] || group_length(path) != len || strncmp(path, group, len) != 0) continue;
        shown[k] = true;
        const int n = (int)strlen(path + len) + 2;
        if (column + n > WIDTH) column = fprintf(f, "\n     ") - 1;
        column += fprintf(f, " .%s", path + len);
    }
    fprintf(f, "\n");
}

static int64_t acting(const struct conf_table *t, bool *shown) {
    int64_t n = 0;
    for (int64_t k = 0; k < t->n; k++) {
        shown[k] = t->rows[k].status != CONF_USED;
        n += !shown[k];
    }
    return n;
}

static void print_common(FILE *f, const struct conf_table *t, bool *shown) {
    const char *before = NULL;
    int k = 0;
    while (k < N_COMMON && (!common_keys[k].schema || strcmp(common_keys[k].schema, t->schema) != 0)) k++;
    for (k++; k < N_COMMON && common_keys[k].path; k++) {
        const struct conf_key *row = conf__table_row(t, common_keys[k].path);
        CHECK(row && row->status == CONF_USED); /* tested */
        print_group(f, row->path, before);
        print_key(f, row);
        shown[row - t->rows] = true;
        before = row->path;
    }
}

static void print_short(FILE *f, const struct conf_table *t) {
    bool *shown = xcalloc((size_t)t->n + 1, sizeof *shown);
    const int64_t n = acting(t, shown);
    const char *before = NULL;
    if (n <= FEW) {
        for (int64_t k = 0; k < t->n; k++) {
            if (shown[k]) continue;
            print_group(f, t->rows[k].path, before);
            print_key(f, &t->rows[k]);
            before = t->rows[k].path;
        }
    } else {
        print_common(f, t, shown);
        fprintf(f, "\nThe other keys that act:\n");
        for (int64_t k = 0; k < t->n; k++)
            if (!shown[k]) print_names(f, t, t->rows[k].path, group_length(t->rows[k].path), shown);
    }
    fprintf(f, "\n--help PREFIX explains the keys that start so, --help all every key: %lld act, %lld more are accepted.\n",
            (long long)n, (long long)(t->n - n));
    free(shown);
}

/* The path begins so, or is this name in some group: lr, optim.lr. */
static bool is_named(const char *path, const char *name, bool in_group) {
    const size_t n = strlen(name), m = strlen(path);
    return in_group ? m > n && path[m - n - 1] == '.' && strcmp(path + m - n, name) == 0 : strncmp(path, name, n) == 0;
}

static int64_t print_full(FILE *f, const struct conf_table *t, const char *prefix, bool in_group) {
    int64_t n = 0;
    for (int64_t k = 0; k < t->n; k++) {
        const struct conf_key *row = &t->rows[k];
        if (!is_named(row->path, prefix, in_group)) continue;
        n++;
        if (row->def) fprintf(f, "%s=%s\n", row->path, row->def);
        else fprintf(f, "+%s=...\n", row->path);
        fprintf(f, "    %s; %s%s\n", row->type, status_text(row), row->text);
    }
    return n;
}

int conf_help(FILE *f, const char *schema, const char *prefix) {
    struct conf_table t;
    TRY(conf__table_open(&t, schema));
    int64_t n = 1;
    if (!prefix || !*prefix) print_short(f, &t);
    else n = print_full(f, &t, strcmp(prefix, "all") == 0 ? "" : prefix, false);
    if (n == 0) n = print_full(f, &t, prefix, true);
    const char *near = n == 0 ? conf__table_near(&t, prefix) : NULL; /* a row's texts outlive the table */
    conf__table_free(&t);
    if (n == 0)
        FAIL(ERR_INVAL, "no key of %s starts or ends with '%s'%s%s%s; --help without a name lists the keys", schema, prefix,
             near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
    return 0;
}
