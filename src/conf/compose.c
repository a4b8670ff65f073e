/* compose.c - composes a configuration: the schema's defaults, then YAML files
 * (--config-path, --config-name and their defaults lists), then overrides in the
 * order of the command line; resolves, checks types.  Hydra's rules for
 * k=v (the key exists), +k=v (it does not), ++k=v (either), ~k (delete).
 * Invariant: on failure the caller's struct conf holds nothing but what conf_free frees. */
#include "conf/conf_int.h"

#include "base/err.h"
#include "base/file.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_YAML_BYTES (4 << 20)
#define MAX_INCLUDES 16 /* files that include files, deep */
#define MAX_FILES 1000

struct loader {
    struct conf *c;
    const char *schema;            /* of the command, until a config name or model_engine says another */
    const char *path, *dir, *name; /* --config-path, --config-dir, --config-name */
    const char **overrides;
    int64_t n_overrides, cap_overrides;
    int depth, n_files;
};

/* ---- who set what ---- */

static int64_t origin_of(struct conf *c, const char *name) {
    for (int64_t k = 0; k < c->n_origins; k++)
        if (strcmp(c->origins[k], name) == 0) return k;
    c->origins = xrealloc(c->origins, (size_t)(c->n_origins + 1) * sizeof *c->origins);
    c->origins[c->n_origins] = xstrdup(name);
    return c->n_origins++;
}

static void ignore(struct conf *c, char *note) {
    c->ignored = xrealloc(c->ignored, (size_t)(c->n_ignored + 1) * sizeof *c->ignored);
    c->ignored[c->n_ignored++] = note;
}

/* Every leaf of v at path counts as set. From a file only what differs from the
 * default counts: a run's own configuration, given back, says nothing new. */
static void mark_set(struct conf *c, const char *path, const struct conf_node *v, const char *origin, bool from_file) {
    if (v->kind == CONF_DICT && v->n > 0) {
        for (int64_t k = 0; k < v->n; k++) {
            char *sub = xasprintf("%s%s%s", path, *path ? "." : "", v->items[k].key);
            mark_set(c, sub, v->items[k].v, origin, from_file);
            free(sub);
        }
        return;
    }
    const struct conf_node *d = conf__node_at(c->defaults, path);
    if (from_file && d && conf__node_equal(d, v)) return;
    map_set(&c->set, path, strlen(path), origin_of(c, origin));
}

const char *conf__origin(const struct conf *c, const char *path) {
    int64_t k;
    return map_gets(&c->set, path, &k) ? c->origins[k] : "command line";
}

/* ---- YAML files ---- */

static int include(struct loader *l, const char *dir, const char *name, const char *package, const char *from);

/* "# @package x" in the comments at the head of a file; caller frees; NULL: none. */
static char *package_of(const char *text) {
    for (const char *p = text; p && *p == '#'; p = strchr(p, '\n'), p = p ? p + 1 : NULL) {
        const char *q = p + 1 + strspn(p + 1, " \t");
        if (strncmp(q, "@package", 8) != 0) continue;
        q += 8 + strspn(q + 8, " \t:");
        return xstrndup(q, strcspn(q, " \t\r\n"));
    }
    return NULL;
}

/* One element "group: option" of a defaults list. */
static int include_group(struct loader *l, const char *dir, const struct conf_item *it, const char *from) {
    const char *key = it->key;
    if (strncmp(key, "override ", 9) == 0) key += 9 + strspn(key + 9, " ");
    if (strncmp(key, "optional ", 9) == 0) key += 9 + strspn(key + 9, " ");
    if (it->v->kind == CONF_NULL || *key == '/' || strncmp(key, "hydra/", 6) == 0) return 0;
    if (it->v->kind != CONF_STR) FAIL(ERR_INVAL, "%s: defaults: %s takes the name of a file", from, key);
    const size_t n = strcspn(key, "@");
    char *group = xstrndup(key, n), *name = xasprintf("%s/%s", group, it->v->s);
    char *file = xasprintf("%s/%s.yaml", dir, name);
    char *package = key[n] == '@' ? xstrdup(key + n + 1) : xstrdup(group);
    int rc = 0;
    for (char *p = package; *p; p++)
        if (*p == '/') *p = '.';
    if (file_exists(file)) rc = include(l, dir, name, package, from);
    else if (!strstr(it->v->s, "${") && strcmp(key, "model_engine") != 0) {
        rc = conf__group_check(&l->c->table, key, it->v->s);
        if (rc < 0) rc = err_wrap(rc, "%s: defaults", from);
    }
    free(group);
    free(name);
    free(file);
    free(package);
    return rc;
}

static bool is_schema(const char *name) {
    for (const char *const *s = conf_schemas(); *s; s++)
        if (strcmp(*s, name) == 0) return true;
    return false;
}

/* Takes body: puts it over the tree at its package. */
static int overlay(struct loader *l, struct conf_node *body, const char *package, const char *from) {
    struct conf *c = l->c;
    const int rc = conf__path_check(package, from);
    if (rc < 0) conf__node_free(body);
    TRY(rc);
    if (conf__node_remove(body, "hydra", 5)) ignore(c, xasprintf("%s: the section hydra: has no meaning here", from));
    if (!*package || strcmp(package, "_global_") == 0) {
        mark_set(c, "", body, from, true);
        conf__node_merge(c->raw, body);
        return 0;
    }
    mark_set(c, package, body, from, true);
    return conf__node_set(c->raw, package, body);
}

/* The defaults list in its order; `_self_` is the file's own body, last when unnamed. */
static int include_defaults(struct loader *l, const char *dir, const struct conf_node *list, struct conf_node **body,
                            const char *package, const char *from) {
    if (list->kind != CONF_LIST) FAIL(ERR_INVAL, "%s: defaults must be a list", from);
    for (int64_t k = 0; k < list->n; k++) {
        const struct conf_node *d = list->items[k].v;
        if (d->kind == CONF_STR && strcmp(d->s, "_self_") == 0) {
            if (*body) {
                struct conf_node *b = *body;
                *body = NULL;
                TRY(overlay(l, b, package, from));
            }
        } else if (d->kind == CONF_STR) {
            const size_t n = strcspn(d->s, "@");
            char *name = xstrndup(d->s, n);
            const int rc = is_schema(name) ? 0 : include(l, dir, name, d->s[n] ? d->s + n + 1 : package, from);
            free(name);
            if (rc < 0) return rc;
        } else if (d->kind == CONF_DICT && d->n == 1) {
            TRY(include_group(l, dir, &d->items[0], from));
        } else {
            FAIL(ERR_INVAL, "%s: defaults: element %lld is neither a name nor 'group: name'", from, (long long)k + 1);
        }
    }
    return 0;
}

static int read_yaml(const char *file, struct conf_node **body, char **package) {
    struct buf b = {0};
    int rc = file_read(&b, file, MAX_YAML_BYTES);
    if (rc < 0) rc = ERR_INVAL; /* a configuration error, whatever the file system says */
    if (rc == 0) rc = conf__yaml_parse(body, b.p ? b.p : "", b.n, file);
    if (rc == 0 && (*body)->kind == CONF_NULL) (*body)->kind = CONF_DICT;
    if (rc == 0 && (*body)->kind != CONF_DICT) {
        conf__node_free(*body);
        *body = NULL;
        rc = err_set(ERR_INVAL, __FILE__, __LINE__, "%s: a configuration is a mapping of keys", file);
    }
    if (rc == 0) *package = package_of(b.p ? b.p : "");
    buf_free(&b);
    return rc;
}

/* dir/name.yaml and what it includes, over the tree at package. */
static int include(struct loader *l, const char *dir, const char *name, const char *package, const char *from) {
    struct conf_node *body = NULL, *defaults;
    char *header = NULL;
    const size_t n = strlen(name);
    const bool has_ext = n > 5 && strcmp(name + n - 5, ".yaml") == 0;
    char *file = xasprintf("%s/%s%s", dir, name, has_ext ? "" : ".yaml");
    int rc = 0;
    if (l->depth >= MAX_INCLUDES) FAILG(done, ERR_INVAL, "%s: files include each other over %d deep", from, MAX_INCLUDES);
    if (++l->n_files > MAX_FILES) FAILG(done, ERR_INVAL, "%s: files include each other over %d times", from, MAX_FILES);
    l->depth++;
    TRYG(read_yaml(file, &body, &header), done);
    if (header) package = header;
    defaults = conf__node_child(body, "defaults", 8);
    if (defaults) {
        defaults = conf__node_copy(defaults);
        conf__node_remove(body, "defaults", 8);
        rc = include_defaults(l, dir, defaults, &body, package, file);
        conf__node_free(defaults);
    }
    if (rc == 0 && body) {
        rc = overlay(l, body, package, file);
        body = NULL;
    }
    l->depth--;
done:
    conf__node_free(body);
    free(header);
    free(file);
    return rc;
}

/* ---- overrides ---- */

static int unknown_key(const struct loader *l, const char *key, const char *text) {
    const char *near = conf__table_near(&l->c->table, key);
    const bool sft = strncmp(l->c->table.schema, "sft", 3) == 0;
    struct conf_table other;
    TRY(conf__table_open(&other, sft ? "ppo_trainer" : "sft_trainer_engine"));
    const bool elsewhere = conf__table_row(&other, key) != NULL;
    conf__table_free(&other);
    if (elsewhere)
        FAIL(ERR_INVAL, "%s: %s is a key of verlc %s, not of this program%s%s%s (--help lists its keys)", text, key,
             sft ? "ppo" : "sft", near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
    if (near) FAIL(ERR_INVAL, "%s: there is no key %s; did you mean %s? To add a key of your own: +%s", text, key, near, text);
    FAIL(ERR_INVAL, "%s: there is no key %s (--help lists them); to add a key of your own: +%s", text, key, text);
}

/* k=v reaches only keys that exist: in the tree, or known though absent. */
static int check_exists(const struct loader *l, const char *path, const struct conf_node *v, const char *text) {
    const struct conf *c = l->c;
    const struct conf_node *old = conf__node_at(c->raw, path);
    const struct conf_key *row = conf__table_owner(&c->table, path);
    if (!old && row && (!row->def || row->status == CONF_MOVED || row->status == CONF_NOTED)) return 0;
    if (!old && !row && v->kind == CONF_DICT && conf__table_is_group(&c->table, path)) return 0;
    if (!old) return unknown_key(l, path, text);
    if (old->kind != CONF_DICT || v->kind != CONF_DICT) return 0;
    for (int64_t k = 0; k < v->n; k++) {
        char *sub = xasprintf("%s.%s", path, v->items[k].key);
        const int rc = check_exists(l, sub, v->items[k].v, text);
        free(sub);
        if (rc < 0) return rc;
    }
    return 0;
}

static int delete_key(struct loader *l, const struct conf_override *o, const char *text) {
    struct conf *c = l->c;
    struct conf_node *v = conf__node_at(c->raw, o->key);
    struct buf b = {0};
    if (!v || !*o->key) FAIL(ERR_INVAL, "%s: there is no key %s to delete", text, o->key);
    if (o->value && !conf__node_equal(v, o->value)) {
        conf__node_show(v, &b);
        const int rc = err_set(ERR_INVAL, __FILE__, __LINE__, "%s: not deleted, the value is %s", text, b.p);
        buf_free(&b);
        return rc;
    }
    const char *dot = strrchr(o->key, '.');
    const char *leaf = dot ? dot + 1 : o->key;
    if (!conf__node_remove(v->parent, leaf, strlen(leaf)))
        FAIL(ERR_INVAL, "%s: an element of a list cannot be deleted; write the whole list", text);
    return 0;
}

/* group=option: a file of the user's, else the option that verlc is. */
static int apply_group(struct loader *l, const struct conf_override *o, const char *text) {
    if (o->op == CONF_DEL) FAIL(ERR_INVAL, "%s: config groups cannot be deleted", text);
    if (!o->value || o->value->kind != CONF_STR)
        FAIL(ERR_INVAL, "%s: %s is a config group and takes the name of one of its options", text, o->key);
    const size_t n = strcspn(o->key, "@");
    char *name = xasprintf("%.*s/%s", (int)n, o->key, o->value->s);
    const char *dirs[] = {l->path, l->dir};
    int rc = 1;
    for (int k = 0; k < 2 && rc == 1; k++) {
        char *file = xasprintf("%s/%s.yaml", dirs[k] ? dirs[k] : "", name);
        char *package = o->key[n] ? xstrdup(o->key + n + 1) : xstrndup(o->key, n);
        for (char *p = package; *p; p++)
            if (*p == '/') *p = '.';
        if (dirs[k] && file_exists(file)) rc = include(l, dirs[k], name, package, text);
        free(package);
        free(file);
    }
    free(name);
    return rc == 1 ? conf__group_check(&l->c->table, o->key, o->value->s) : rc;
}

/* A list in quotes that the shell did not remove (a variable that holds them): what is in the quotes. */
static void unquote_list(struct conf_override *o, const struct conf_key *row, const char *text) {
    struct conf_node *list = NULL;
    if (conf__parse_value(&list, o->value->s, text) < 0) return; /* the check of types names the value */
    if (!conf__type_ok(row->type, list)) {
        conf__node_free(list);
        return;
    }
    conf__node_free(o->value);
    o->value = list;
}

static int apply(struct loader *l, struct conf_override *o, const char *text) {
    struct conf *c = l->c;
    if (strncmp(o->key, "hydra.", 6) == 0 || strncmp(o->key, "hydra/", 6) == 0) {
        ignore(c, xasprintf("%s: there is no Hydra here; its own settings have no meaning", text));
        return 0;
    }
    const bool is_group = o->is_group || (conf__group_known(&c->table, o->key) && o->op == CONF_SET && o->value &&
                                          o->value->kind == CONF_STR && strcmp(o->key, "model_engine") != 0);
    if (is_group) return apply_group(l, o, text);
    if (!*o->key) FAIL(ERR_INVAL, "%s: the key is empty", text);
    if (o->op == CONF_DEL) return delete_key(l, o, text);
    const struct conf_node *old = conf__node_at(c->raw, o->key);
    if (o->op == CONF_SET) TRY(check_exists(l, o->key, o->value, text));
    /* absent from another version of verl, so command lines of that time add it: dynamic sampling, and what has no effect */
    const struct conf_key *row = conf__table_row(&c->table, o->key);
    const bool was_absent = strncmp(o->key, "algorithm.filter_groups.", 24) == 0 || (row && row->status == CONF_NOTED);
    const bool is_tree = o->value->kind == CONF_DICT || o->value->kind == CONF_LIST;
    if (o->op == CONF_ADD && !was_absent && old && old->kind != CONF_NULL && !is_tree)
        FAIL(ERR_INVAL, "%s: the key exists already; use %s to change it, or ++ to set it either way", text, text + 1);
    mark_set(c, o->key, o->value, "command line", false);
    if (row && o->value->kind == CONF_STR && !conf__type_ok(row->type, o->value) && o->value->s[0] == '[')
        unquote_list(o, row, text);
    struct conf_node *v = o->value;
    o->value = NULL;
    return conf__node_set(c->raw, o->key, v);
}

/* A word that is no override: what it should have been. next: the word behind it, NULL: none. ERR_INVAL. */
static int not_override(const struct loader *l, const char *text, const char *next) {
    static const char head[] = "not an override; write key=value";
    const struct conf_table *t = &l->c->table;
    const size_t n = strlen(text);
    if (strcmp(text, "help") == 0) FAIL(ERR_INVAL, "%s: %s, or --help for the keys", text, head);
    if (conf__table_row(t, text)) {
        if (next && strcmp(next, "=") == 0) FAIL(ERR_INVAL, "%s: %s, without spaces around the =: %s=...", text, head, text);
        FAIL(ERR_INVAL, "%s: %s: %s=%s", text, head, text, next && !strchr(next, '=') ? next : "...");
    }
    if ((n > 5 && strcmp(text + n - 5, ".yaml") == 0) || (n > 4 && strcmp(text + n - 4, ".yml") == 0))
        FAIL(ERR_INVAL, "%s: %s; a file of keys is read by --config-path DIR --config-name %s", text, head, text);
    if (file_is_dir(text) || file_exists(text))
        FAIL(ERR_INVAL, "%s: %s; a %s is the value of a key: %s=%s", text, head, file_is_dir(text) ? "directory" : "file",
             !file_is_dir(text) ? strcmp(t->schema, "evaluation") == 0 ? "data.path" : "data.train_files"
             : conf__table_row(t, "actor_rollout_ref.model.path") ? "actor_rollout_ref.model.path"
                                                                  : "model.path",
             text);
    const char *near = conf__table_near(t, text);
    FAIL(ERR_INVAL, "%s: %s%s%s%s", text, head, near ? "; did you mean " : "", near ? near : "", near ? "=...?" : "");
}

static int apply_all(struct loader *l) {
    for (int64_t k = 0; k < l->n_overrides; k++) {
        struct conf_override o;
        if (!strchr(l->overrides[k], '=') && l->overrides[k][0] != '~' && conf__is_utf8(l->overrides[k]))
            return not_override(l, l->overrides[k], k + 1 < l->n_overrides ? l->overrides[k + 1] : NULL);
        TRY(conf__parse_override(&o, l->overrides[k]));
        const int rc = apply(l, &o, l->overrides[k]);
        conf__override_free(&o);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ---- resolution and checks ---- */

/* Older names pass their value (from `resolved`) to the key that took their place
 * in raw, unless the user set that one. */
static int forward(struct conf *c, const struct conf_node *resolved, struct conf_node *raw) {
    for (int64_t k = 0; k < c->table.n; k++) {
        const struct conf_key *row = &c->table.rows[k];
        const struct conf_node *v = row->status == CONF_MOVED ? conf__node_at(resolved, row->path) : NULL;
        if (!v || v->kind == CONF_NULL) continue;
        const bool set = map_gets(&c->set, row->path, NULL) || v->kind == CONF_DICT;
        if (map_gets(&c->set, row->text, NULL)) {
            const struct conf_node *w = conf__node_at(resolved, row->text);
            if (set && w && !conf__node_equal(v, w))
                FAIL(ERR_INVAL, "%s and %s are the same setting (the first is the older name) and differ; set one", row->path,
                     row->text);
            continue;
        }
        TRY(conf__node_set(raw, row->text, conf__node_copy(v)));
    }
    return 0;
}

static int wrong_type(const struct conf *c, const struct conf_key *row, const struct conf_node *v) {
    struct buf b = {0};
    conf__node_show(v, &b);
    char *name = xstrndup(b.p + (*b.p == '\''), strcspn(b.p + (*b.p == '\''), "'"));
    char *near = strchr(row->type, '\'') ? str_near(row->type, name) : NULL; /* a type that is a list of names */
    struct buf words = {0};
    if (!strchr(row->type, '\'')) {
        buf_adds(&words, ", that is ");
        conf_type_words(row->type, &words);
    }
    if (v->kind == CONF_FLOAT && strncmp(row->type, "int", 3) == 0 && v->f == floor(v->f) && fabs(v->f) < 0x1p53)
        buf_addf(&words, ": write %.0f", v->f);
    if (v->kind == CONF_STR && *v->s && words.n && v->s[strspn(v->s, "0123456789.eE+-")] == '\0')
        buf_adds(&words, "; quotes make a text of it");
    const int rc =
        err_set(ERR_INVAL, __FILE__, __LINE__, "%s=%s: expected %s%s%s%s%s (%s)", row->path, b.p, row->type, words.n ? words.p : "",
                near ? "; did you mean " : "", near ? near : "", near ? "?" : "", conf__origin(c, row->path));
    buf_free(&words);
    free(near);
    free(name);
    buf_free(&b);
    return rc;
}

static int check_types(const struct conf *c, const struct conf_node *tree) {
    for (int64_t k = 0; k < c->table.n; k++) {
        const struct conf_key *row = &c->table.rows[k];
        const struct conf_node *v = conf__node_at(tree, row->path);
        if (!v || conf__node_missing(v) || conf__type_ok(row->type, v)) continue;
        if (tree == c->tree || v->kind != CONF_STR || !strstr(v->s, "${")) return wrong_type(c, row, v);
    }
    for (int64_t k = 0; k < c->set.n && tree == c->tree; k++) { /* a group that became a value */
        const char *path = c->set.entries[k].key;
        const struct conf_node *v = conf__node_at(tree, path);
        if (v && v->kind != CONF_DICT && v->kind != CONF_NULL && !conf__table_row(&c->table, path) &&
            conf__table_is_group(&c->table, path))
            FAIL(ERR_INVAL, "%s is a group of keys and cannot be a single value; --help %s lists its keys", path, path);
    }
    return 0;
}

static int finish(struct conf *c) {
    TRY(check_types(c, c->raw)); /* first what was written, so that the message names that key */
    struct conf_node *raw = conf__node_copy(c->raw), *resolved = NULL;
    int rc = conf__resolve(&resolved, c->raw);
    if (rc == 0) rc = forward(c, resolved, raw);
    if (rc == 0) rc = conf__resolve(&c->tree, raw);
    conf__node_free(resolved);
    conf__node_free(raw);
    TRY(rc);
    TRY(check_types(c, c->tree));
    conf__node_finish(c->tree);
    c->json = conf__node_json(c->tree);
    return 0;
}

/* ---- command line ---- */

/* The value of "--name value" or "--name=value" at argv[*k]; NULL: another flag. */
static int flag_value(int argc, char **argv, int *k, const char *name, const char *brief, const char **out) {
    const char *a = argv[*k];
    const size_t n = strlen(name);
    if (strncmp(a, name, n) == 0 && a[n] == '=') {
        *out = a + n + 1;
        return 1;
    }
    if (strcmp(a, name) != 0 && strcmp(a, brief) != 0) return 0;
    if (*k + 1 >= argc) FAIL(ERR_INVAL, "%s needs a value", a);
    *out = argv[++*k];
    return 1;
}

/* ERR_INVAL. A key with dashes before it is the usual one of those who come from other trainers. */
static int unknown_flag(const struct loader *l, const char *a) {
    struct conf_table t;
    const char *name = a + strspn(a, "-"), *near = NULL;
    char *word = xstrndup(name, strcspn(name, "=")), *flag = NULL;
    struct buf b = {0};
    if (strcmp(a, "--config") == 0) flag = xstrdup("--config-path DIR --config-name FILE");
    else flag = str_near("--config-path --config-name --config-dir --cfg --help", a);
    if (!flag && *word && conf__table_open(&t, l->schema) == 0) {
        for (char *p = word; *p; p++)
            if (*p == '-') *p = '_';
        const struct conf_key *row = conf__table_row(&t, word);
        near = row ? row->path : conf__table_near(&t, word); /* a row's texts outlive the table */
        conf__table_free(&t);
    }
    if (flag) buf_addf(&b, "did you mean %s? There", flag);
    else if (near) buf_addf(&b, "a key has no dashes: did you mean %s=...? There", near);
    else buf_adds(&b, "there");
    const int rc = err_set(ERR_INVAL, __FILE__, __LINE__,
                           "unknown flag %s; %s are --config-path, --config-name, --config-dir, --cfg job, --help, and overrides "
                           "key=value",
                           a, b.p);
    buf_free(&b);
    free(flag);
    free(word);
    return rc;
}

static int parse_flag(struct loader *l, int argc, char **argv, int *k) {
    static const char *const harmless[] = {"--resolve", "--run", "-r", "--experimental-rerun", "--info", "-i"};
    const char *a = argv[*k], *v = NULL;
    const struct {
        const char *name, *brief;
        const char **out;
    } paths[] = {{"--config-path", "-cp", &l->path}, {"--config-dir", "-cd", &l->dir}, {"--config-name", "-cn", &l->name}};
    for (size_t j = 0; j < sizeof paths / sizeof paths[0]; j++) {
        const int rc = flag_value(argc, argv, k, paths[j].name, paths[j].brief, paths[j].out);
        if (rc != 0) return rc < 0 ? rc : 0;
    }
    const int cfg = flag_value(argc, argv, k, "--cfg", "-c", &v);
    if (cfg < 0) return cfg;
    if (cfg) {
        if (strcmp(v, "job") != 0) FAIL(ERR_INVAL, "--cfg %s: job is the one configuration there is", v);
        l->c->action = CONF_PRINT;
        return 0;
    }
    if (strcmp(a, "--help") == 0 || strcmp(a, "-h") == 0) {
        l->c->action = CONF_HELP;
        return 0;
    }
    if (strcmp(a, "--multirun") == 0 || strcmp(a, "-m") == 0)
        FAIL(ERR_INVAL, "%s: verlc does not run sweeps; start one run for each value", a);
    for (size_t j = 0; j < sizeof harmless / sizeof harmless[0]; j++)
        if (strcmp(a, harmless[j]) == 0) return 0;
    return unknown_flag(l, a);
}

static int parse_args(struct loader *l, int argc, char **argv) {
    for (int k = 0; k < argc; k++) {
        if (strcmp(argv[k], "--") == 0) continue; /* nothing but overrides comes behind it */
        if (argv[k][0] == '-') {
            TRY(parse_flag(l, argc, argv, &k));
        } else if (l->c->action == CONF_HELP && !strchr(argv[k], '=')) {
            free(l->c->help_prefix);
            l->c->help_prefix = xstrdup(argv[k]);
        } else {
            xgrow((void **)&l->overrides, &l->cap_overrides, l->n_overrides + 1, sizeof *l->overrides);
            l->overrides[l->n_overrides++] = argv[k];
        }
    }
    return 0;
}

/* The whole schema follows the engine: model_engine=megatron of ppo, engine=megatron of sft. */
static int pick_engine(struct loader *l) {
    const bool ppo = strcmp(l->schema, "ppo_trainer") == 0;
    if (!ppo && strcmp(l->schema, "sft_trainer_engine") != 0) return 0;
    const char *const keys[] = {ppo ? "model_engine=" : "engine=", ppo ? "actor_rollout_ref.actor.model_engine=" : "engine="};
    for (int64_t k = 0; k < 2 * l->n_overrides; k++) {
        const char *text = l->overrides[k / 2], *key = keys[k % 2];
        const char *engine = strncmp(text, key, strlen(key)) == 0 ? text + strlen(key) : NULL;
        if (!engine || *engine == '{' || strcmp(engine, ppo ? "dp" : "fsdp") == 0) continue;
        l->schema = conf__engine_schema(ppo ? "ppo" : "sft", engine);
        if (!l->schema)
            FAIL(ERR_INVAL, "%s: verlc has one engine of its own, and takes the keys of verl's %s, megatron%s%s", text,
                 ppo ? "dp" : "fsdp", ppo ? "" : ", automodel", " and veomni");
    }
    return 0;
}

/* Schemas of one program: "ppo_trainer" and "one_step_off_ppo_trainer", "sft_trainer" and "sft_trainer_engine". */
static bool same_program(const char *a, const char *b) {
    return (strstr(a, "ppo_") && strstr(b, "ppo_")) || (strncmp(a, "sft_", 4) == 0 && strncmp(b, "sft_", 4) == 0);
}

/* The schema that a file is named after, or that its own list of defaults names, stands under it. */
static int pick_schema(struct loader *l, const char *dir, const char *name) {
    struct conf_node *body = NULL;
    char *package = NULL, *file = xasprintf("%s/%s.yaml", dir, name);
    const int rc = read_yaml(file, &body, &package);
    const struct conf_node *list = rc == 0 ? conf__node_child(body, "defaults", 8) : NULL;
    for (int64_t k = 0; list && list->kind == CONF_LIST && k < list->n; k++) {
        const struct conf_node *v = list->items[k].v;
        for (const char *const *s = conf_schemas(); v->kind == CONF_STR && *s; s++)
            if (strcmp(*s, v->s) == 0 && same_program(*s, l->schema)) l->schema = *s;
    }
    for (const char *const *s = conf_schemas(); *s; s++)
        if (strcmp(*s, name) == 0 && same_program(*s, l->schema)) l->schema = *s;
    conf__node_free(body);
    free(package);
    free(file);
    return rc;
}

/* The directory that holds --config-name; NULL: it is one of the schemas. Sets the schema. */
static int pick_config(struct loader *l, const char **dir, char **name) {
    *dir = NULL;
    *name = NULL;
    if (!l->name && l->path) l->name = l->schema; /* Hydra's default: the command's own name */
    if (!l->name) return 0;
    const size_t n = strlen(l->name);
    *name = xstrndup(l->name, n > 5 && strcmp(l->name + n - 5, ".yaml") == 0 ? n - 5 : n);
    const char *dirs[] = {l->path, l->dir, "."};
    for (int k = 0; k < 3; k++) {
        if (!dirs[k]) continue;
        char *file = xasprintf("%s/%s.yaml", dirs[k], *name);
        const bool there = file_exists(file) && (k < 2 || !is_schema(*name));
        free(file);
        if (!there) continue;
        *dir = dirs[k];
        return pick_schema(l, *dir, *name);
    }
    if (!is_schema(*name))
        FAIL(ERR_INVAL,
             "--config-name %s: no such file%s%s, and no configuration of verlc; there are ppo_trainer, "
             "ppo_megatron_trainer, ppo_veomni_trainer, one_step_off_ppo_trainer, fully_async_ppo_trainer, sft_trainer_engine, "
             "sft_trainer, generation, evaluation",
             l->name, l->path ? " in " : "", l->path ? l->path : "");
    l->schema = *name;
    return 0;
}

int conf__load_args(struct conf *c, const char *schema, int argc, char **argv) {
    struct loader l = {.c = c, .schema = schema};
    const char *dir = NULL;
    char *name = NULL;
    struct conf_node *defaults = NULL;
    int rc = 0;
    TRYG(parse_args(&l, argc, argv), done);
    TRYG(pick_config(&l, &dir, &name), done);
    TRYG(pick_engine(&l), done);
    TRYG(conf__table_open(&c->table, l.schema), done);
    if (c->action == CONF_HELP) goto done;
    TRYG(conf__table_defaults(&c->raw, &c->table), done);
    TRYG(conf__table_defaults(&defaults, &c->table), done);
    TRYG(conf__table_others(&c->others, &c->table), done);
    TRYG(conf__resolve(&c->defaults, defaults), done);
    if (dir) TRYG(include(&l, dir, name, "", "--config-name"), done);
    TRYG(apply_all(&l), done);
    rc = finish(c);
done:
    conf__node_free(defaults);
    free(l.overrides);
    free(name);
    return rc;
}
