/* conf.c - a loaded configuration: its values by path, the notes about settings that mean something else here, and the refusals.
 * Composition is compose.c's, verl's cross-key rules are ppo/validate_config.c's. */
#include "conf/conf_int.h"

#include "base/err.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

int conf_load(struct conf **out, const char *schema, int argc, char **argv) {
    struct conf *c = xcalloc(1, sizeof *c);
    c->paths = xcalloc(1, sizeof *c->paths);
    c->schema = xstrdup(schema);
    c->args = xcalloc((size_t)argc + 1, sizeof *c->args);
    for (; c->n_args < argc; c->n_args++) c->args[c->n_args] = xstrdup(argv[c->n_args]);
    const int rc = conf__load_args(c, schema, argc, argv);
    if (rc < 0) {
        conf_free(c);
        return err_pass(rc, __FILE__, __LINE__);
    }
    *out = c;
    return 0;
}

void conf_free(struct conf *c) {
    if (!c) return;
    conf__table_free(&c->table);
    conf__node_free(c->raw);
    conf__node_free(c->tree);
    conf__node_free(c->defaults);
    conf__node_free(c->others);
    conf__paths_free(c->paths);
    json_decref(c->json);
    map_free(&c->set);
    for (int64_t k = 0; k < c->n_origins; k++) free(c->origins[k]);
    for (int64_t k = 0; k < c->n_ignored; k++) free(c->ignored[k]);
    free(c->origins);
    free(c->ignored);
    for (int i = 0; i < c->n_args; i++) free(c->args[i]);
    free(c->args);
    free(c->schema);
    free(c->help_prefix);
    free(c);
}

struct conf_args conf_args(const struct conf *c) {
    return (struct conf_args){c->schema, c->args, c->n_args};
}

const char *conf_schema(const struct conf *c) { return c->table.schema; }

/* ---- values ---- */

/* A value that is there and is not ???. */
static int get(const struct conf *c, const char *key, const struct conf_node **out) {
    const struct conf_node *v = conf__node_at(c->tree, key);
    if (!v && conf__table_row(&c->table, key) && conf__table_row(&c->table, key)->def)
        FAIL(ERR_INVAL, "%s is needed but was deleted from the configuration", key);
    if (!v) FAIL(ERR_INVAL, "%s is needed and not set", key);
    if (conf__node_missing(v)) FAIL(ERR_INVAL, "%s is mandatory: set %s=...", key, key);
    *out = v;
    return 0;
}

int conf__mismatch(const struct conf *c, const char *key, const struct conf_node *v, const char *expected) {
    struct buf b = {0};
    conf__node_show(v, &b);
    const int rc = err_set(ERR_INVAL, __FILE__, __LINE__, "%s=%s: expected %s (%s)", key, b.p, expected,
                           map_gets(&c->set, key, NULL) ? conf__origin(c, key) : "default");
    buf_free(&b);
    return rc;
}

int conf_json(const struct conf *c, const char *key, const json_t **out) {
    const json_t *j = c->json;
    const struct conf_node *v = c->tree;
    if (*key) TRY(get(c, key, &v));
    for (const char *p = key; *p;) { /* the JSON value has the shape of the tree */
        const size_t n = strcspn(p, ".");
        j = json_is_array(j) ? json_array_get(j, (size_t)atoll(p)) : json_object_getn(j, p, n);
        CHECK(j != NULL);
        p += n + (p[n] == '.');
    }
    *out = j;
    return 0;
}

bool conf_is_null(const struct conf *c, const char *key) {
    const struct conf_node *v = conf__node_at(c->tree, key);
    return !v || v->kind == CONF_NULL;
}

bool conf_is_set(const struct conf *c, const char *key) { return map_gets(&c->set, key, NULL); }

json_t *conf_set_keys(const struct conf *c) {
    json_t *keys = json_array();
    for (int64_t i = 0; i < c->set.n; i++) json_array_append_new(keys, json_string(c->set.entries[i].key));
    return keys;
}

/* ---- printing ---- */

int conf_yaml(const struct conf *c, struct buf *b) {
    struct conf_node *v = NULL;
    TRY(conf__resolve(&v, c->raw));
    const int rc = conf__yaml_print(b, v);
    conf__node_free(v);
    return rc;
}

int conf_answer(const struct conf *c, FILE *out) {
    struct buf b = {0};
    if (c->action == CONF_RUN) return 0;
    if (c->action == CONF_HELP) {
        char *text = NULL;
        size_t n = 0;
        FILE *f = open_memstream(&text, &n);
        CHECK(f != NULL);
        const int rc = conf_help(f, c->table.schema, c->help_prefix);
        fclose(f);
        if (rc == 0)
            fprintf(out,
                    "Overrides: key=value changes a key, +key=value adds one, ++key=value does either, ~key deletes.\n"
                    "Lists [a,b], groups {a: 1}, null, ${other.key}; text with special characters in quotes.\n"
                    "--config-path DIR --config-name FILE reads YAML, --cfg job prints the configuration and stops.\n\n%s",
                    text);
        free(text);
        TRY(rc);
        return 1;
    }
    conf_notes(c);
    TRY(conf_yaml(c, &b));
    const size_t written = fwrite(b.p, 1, b.n, out);
    const size_t n = b.n;
    buf_free(&b);
    if (written != n || fflush(out) != 0) FAIL(ERR_IO, "cannot write the configuration");
    return 1;
}

/* ---- notes and refusals ---- */

/* A rejected key that kept its default is no matter. */
static bool is_default(const struct conf *c, const char *path) {
    const struct conf_node *v = conf__node_at(c->tree, path), *d = conf__node_at(c->defaults, path);
    if (!v) return true;
    if (!d)
        return v->kind == CONF_NULL || (v->kind == CONF_BOOL && !v->b) ||
               (v->kind == CONF_STR && strcmp(v->s, "disabled") == 0); /* absent by default: off */
    return conf__node_equal(v, d);
}

/* Whether the user's value needs no note: the key is used, or keeps its default, or requests what is done anyway
 * (rollout.name=verlc). */
static bool is_plain(const struct conf *c, const char *path, const struct conf_key *row) {
    const struct conf_node *v = conf__node_at(c->tree, path);
    return row->status == CONF_USED || (row->status == CONF_REJECTED && is_default(c, path)) ||
           (v && v->kind == CONF_STR && strcmp(v->s, "verlc") == 0);
}

/* All keys set by the user that share a note, in one line. */
static void note_row(const struct conf *c, const struct conf_key *row, int64_t from) {
    struct buf b = {0};
    for (int64_t k = from; k < c->set.n; k++) {
        const char *path = c->set.entries[k].key;
        const struct conf_key *r = conf__table_owner(&c->table, path);
        if (!r || r->status != row->status || strcmp(r->text, row->text) != 0 || is_plain(c, path, r)) continue;
        buf_addf(&b, "%s%s", b.n ? ", " : "", path);
    }
    if (row->status == CONF_MOVED) log_note("%s: an older name of %s, which takes its value", b.p, row->text);
    else if (row->status == CONF_REJECTED) log_note("%s: a run will refuse this value: %s", b.p, row->text);
    else log_note("%s: %s", b.p, row->text);
    buf_free(&b);
}

/* Whether an earlier key of the user's has the same note. */
static bool noted_before(const struct conf *c, const struct conf_key *row, int64_t before) {
    for (int64_t k = 0; k < before; k++) {
        const char *path = c->set.entries[k].key;
        const struct conf_key *r = conf__table_owner(&c->table, path);
        if (r && r->status == row->status && strcmp(r->text, row->text) == 0 && !is_plain(c, path, r)) return true;
    }
    return false;
}

const char *conf_first_set(const struct conf *c, const char *prefix, const char *except, int64_t *n) {
    const char *first = NULL;
    *n = 0;
    for (int64_t k = 0; k < c->set.n; k++) {
        const char *path = c->set.entries[k].key;
        if (strncmp(path, prefix, strlen(prefix)) != 0 || strcmp(path, except) == 0) continue;
        if ((*n)++ == 0) first = path;
    }
    return first;
}

void conf_notes(const struct conf *c) {
    for (int64_t k = 0; k < c->n_ignored; k++) log_note("%s", c->ignored[k]);
    for (int64_t k = 0; k < c->set.n; k++) {
        const char *path = c->set.entries[k].key;
        const struct conf_key *row = conf__table_owner(&c->table, path);
        if (!row && !conf__table_is_group(&c->table, path)) {
            const char *near = conf__table_near(&c->table, path);
            log_note("%s: nothing reads this key%s%s%s (%s)", path, near ? "; the nearest that is read is " : "", near ? near : "",
                     "", conf__origin(c, path));
        } else if (row && !is_plain(c, path, row) && !noted_before(c, row, k)) {
            note_row(c, row, k);
        }
    }
}

int conf_check(const struct conf *c) {
    for (int64_t k = 0; k < c->set.n; k++) {
        const char *path = c->set.entries[k].key;
        const struct conf_key *row = conf__table_owner(&c->table, path);
        if (row && row->status == CONF_MOVED) { /* what counts is the key that takes the value */
            path = row->text;
            row = conf__table_row(&c->table, path);
        }
        if (!row || row->status != CONF_REJECTED || is_default(c, path)) continue;
        const struct conf_node *v = conf__node_at(c->tree, path);
        struct buf b = {0};
        conf__node_show(v, &b);
        const int rc = err_set(ERR_INVAL, __FILE__, __LINE__, "%s=%s: %s", path, b.p, row->text);
        buf_free(&b);
        return rc;
    }
    return 0;
}
