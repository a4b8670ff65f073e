/* conf_int.h - the parts of the configuration, private to conf.
 *
 *   tree.c     the tree of values
 *   override_grammar.c    the grammar of overrides and their values
 *   interpolation.c  ${...}
 *   yaml.c     YAML in and out
 *   key_table.c    the rows of conf/keys: find, type check, nearest, help
 *   compose.c     files and overrides -> tree
 *   describe.c     what is known of a key, for people
 *   fill.c     values -> the members of a program's struct
 *   conf.c          notes, rejections, printing */
#ifndef VERLC_CONF_INT_H
#define VERLC_CONF_INT_H

#include "base/map.h"
#include "conf/conf.h"

/* ---- tree ---- */
enum conf_kind { CONF_NULL, CONF_BOOL, CONF_INT, CONF_FLOAT, CONF_STR, CONF_LIST, CONF_DICT };

struct conf_item {
    char *key; /* owned; NULL in a list */
    bool bare; /* the key was a number or word of YAML, not a text: printed without quotes */
    struct conf_node *v;
};
struct conf_node {
    enum conf_kind kind;
    bool b;
    bool literal; /* CONF_STR: a "${" in it is text, not an interpolation */
    int64_t i;
    double f;
    char *s;                 /* CONF_STR: the text. After conf__node_finish: text of any scalar. Owned */
    struct conf_item *items; /* CONF_LIST, CONF_DICT: n of them, in order */
    int64_t n, cap;
    const char **strs;        /* conf__node_finish: texts of a list of scalars; array owned */
    struct conf_node *parent; /* the container; NULL at the root */
};

struct conf_node *conf__node_new(enum conf_kind kind);
struct conf_node *conf__node_str(const char *s, size_t n);
struct conf_node *conf__node_copy(const struct conf_node *v);                /* parent NULL */
void conf__node_free(struct conf_node *v);                                   /* NULL ok */
bool conf__node_equal(const struct conf_node *a, const struct conf_node *b); /* 1 equals 1.0 */
bool conf__node_missing(const struct conf_node *v);                          /* the text ??? */
/* Takes v. key NULL appends to a list; an existing key gets the new value in its place. */
void conf__node_put(struct conf_node *c, const char *key, struct conf_node *v);
struct conf_node *conf__node_child(const struct conf_node *c, const char *key, size_t n); /* NULL: none */
struct conf_node *conf__node_at(const struct conf_node *root, const char *path);          /* "a.b.0"; "" is root */
bool conf__node_remove(struct conf_node *c, const char *key, size_t n);
/* ERR_INVAL: more than 32 parts. Of every path that input names, since the functions of a tree descend by calling themselves. */
int conf__path_check(const char *path, const char *what);
/* Puts v (taken) at path: a dict merges into a dict, all else replaces. Creates
 * groups on the way; ERR_INVAL where a value that is no group stands in it. */
int conf__node_set(struct conf_node *root, const char *path, struct conf_node *v);
void conf__node_merge(struct conf_node *into, struct conf_node *from); /* dicts; takes from */
/* str() of Python: True, None, 1e-06. Not for containers. */
void conf__node_text(const struct conf_node *v, struct buf *b);
void conf__node_show(const struct conf_node *v, struct buf *b); /* for messages; cut when long */
void conf__node_finish(struct conf_node *v);                    /* fills s and strs */
json_t *conf__node_json(const struct conf_node *v);

/* ---- grammar ---- */
enum conf_op { CONF_SET, CONF_ADD, CONF_FORCE, CONF_DEL };
struct conf_override {
    enum conf_op op;
    char *key;               /* owned; "a.b", or a group "actor@actor_rollout_ref.actor" */
    bool is_group;           /* the key holds @ or / */
    struct conf_node *value; /* owned; NULL: ~key without a value */
};
int conf__parse_override(struct conf_override *o, const char *text);
void conf__override_free(struct conf_override *o);
bool conf__is_utf8(const char *text);
/* One value. `what` is put in front of messages. */
int conf__parse_value(struct conf_node **out, const char *text, const char *what);
/* "a, b, c": the arguments of a resolver, as a list. */
int conf__parse_args(struct conf_node **out, const char *text, size_t n, const char *what);

/* ---- interpolation ---- */
/* A copy of the tree in which every ${...} has its value; one that leads to ???
 * becomes ???. ERR_INVAL names the key. */
int conf__resolve(struct conf_node **out, const struct conf_node *root);

/* ---- YAML ---- */
int conf__yaml_parse(struct conf_node **out, const char *text, size_t n, const char *where);
int conf__yaml_print(struct buf *b, const struct conf_node *v);

/* ---- table ---- */
enum conf_status { CONF_USED, CONF_NOTED, CONF_REJECTED, CONF_MOVED, CONF_AS_BASE };
struct conf_key {
    const char *path, *type;
    const char *def;   /* NULL: absent by default */
    const char *other; /* what counts while the value is null or absent; NULL: nothing */
    enum conf_status status;
    const char *text;
    bool own; /* a row of the schema itself, not of its base alone */
};
struct conf_table {
    const char *schema;
    struct conf_key *rows; /* n, in the order of the YAML; a later schema's row replaces its base's */
    int64_t n, cap;
    struct map index; /* path -> row */
};
const char *conf__engine_schema(const char *program, const char *engine); /* ppo or sft of an engine of verl; NULL: none */
int conf__table_open(struct conf_table *t, const char *schema);           /* ERR_INVAL lists the schemas */
void conf__table_free(struct conf_table *t);
const struct conf_key *conf__table_row(const struct conf_table *t, const char *path); /* exact; NULL: none */
/* The row that applies to path: its own, or the nearest dict row above it. */
const struct conf_key *conf__table_owner(const struct conf_table *t, const char *path);
bool conf__table_is_group(const struct conf_table *t, const char *path); /* rows lie below it */
/* The nearest known key, for "did you mean"; NULL: nothing is near. */
const char *conf__table_near(const struct conf_table *t, const char *path);
/* Other trainers' i-th name: "" where it is one for another key; NULL: there are no more. */
const char *conf__table_alias(const struct conf_table *t, int i, const char *key);
int conf__table_defaults(struct conf_node **out, const struct conf_table *t);
int conf__table_others(struct conf_node **out, const struct conf_table *t); /* of the rows that have one */
bool conf__type_ok(const char *type, const struct conf_node *v);
bool conf__type_valid(const char *type); /* the text of the type itself */
/* Config groups: 0 when `option` is what verlc is built as (or "dp"-like); ERR_INVAL says why not. */
int conf__group_check(const struct conf_table *t, const char *group, const char *option);
bool conf__group_known(const struct conf_table *t, const char *group);

/* ---- the whole ---- */
struct conf_paths { /* what programs' structs borrow */
    void **owned;
    int64_t n, cap;
};
void conf__paths_free(struct conf_paths *p);
struct conf {
    struct conf_table table;
    struct conf_node *raw;      /* as composed, ${...} unresolved: what conf_yaml prints */
    struct conf_node *tree;     /* resolved, older names forwarded: what conf_fill reads */
    struct conf_node *defaults; /* resolved defaults of the schema */
    struct conf_node *others;   /* what counts in place of null */
    json_t *json;               /* of tree */
    struct map set;             /* paths the user set -> index of origins */
    char **origins;             /* "command line", file names */
    int64_t n_origins;
    char **ignored; /* hydra.* settings and other notes to print, owned */
    int64_t n_ignored;
    struct conf_paths *paths; /* with ~ expanded, as conf_fill gives them */
    char *schema, **args;     /* of conf_load: the schema's name and its n_args arguments */
    int n_args;
    enum { CONF_RUN, CONF_PRINT, CONF_HELP } action;
    char *help_prefix; /* owned; may be NULL */
};
int conf__load_args(struct conf *c, const char *schema, int argc, char **argv);
int conf__mismatch(const struct conf *c, const char *key, const struct conf_node *v, const char *expected); /* ERR_INVAL */
const char *conf__origin(const struct conf *c, const char *path); /* "command line" when unknown */

#endif
