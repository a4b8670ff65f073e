/* conf.h - the configuration of a run: verl's keys, Hydra's command line.
 *
 * A configuration is a tree for one schema ("ppo_trainer", "sft_trainer", ...;
 * conf_schemas lists them).  It starts from the defaults of conf/keys, takes
 * YAML files (--config-path, --config-name) and overrides (k=v, +k=v, ++k=v, ~k),
 * then resolves ${...} and checks every value against the table's type.
 * What a key means here is its status: used, noted (accepted, reported once
 * in a note), or rejected (refused unless it keeps its default).
 *
 * Invariant: after conf_load no key set by the user is unknown to the program
 * without a note, and no value has another type or range than the table says. */
#ifndef VERLC_CONF_H
#define VERLC_CONF_H

#include "base/buf.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct conf;

/* argv holds what follows the command's name: overrides and Hydra's flags. All
 * errors are ERR_INVAL (exit 2), a missing or broken YAML file included. Values
 * that are ??? are no error here; reading one is. Caller owns *out. */
int conf_load(struct conf **out, const char *schema, int argc, char **argv);
void conf_free(struct conf *c); /* NULL ok */

/* 1: --cfg or --help was given and is answered on `out`, the command returns 0.
 * 0: go on. Call it right after conf_load. */
int conf_answer(const struct conf *c, FILE *out);

/* What conf_load was given, so that another process can load the same. */
struct conf_args {
    const char *schema;
    char *const *argv;
    int argc;
};
struct conf_args conf_args(const struct conf *c);
const char *conf_schema(const struct conf *c);
const char *const *conf_schemas(void); /* NULL-terminated */

/* ---- values, put into a program's struct ---- */

enum conf_into {
    INTO_NOTHING, /* the value acts through the default of another key */
    INTO_BOOL,
    INTO_OR,   /* a bool that one of several keys may set */
    INTO_MOST, /* an int64_t: the largest of several keys */
    INTO_INT,
    INTO_I64,
    INTO_F32,
    INTO_F64,
    INTO_STR,   /* const char *: a number gives its text */
    INTO_PATH,  /* const char *: a leading ~ or ~user is expanded, as Python's os.path.expanduser does */
    INTO_STRS,  /* const char *const *, int64_t: a list, or one text as a list of one; empty is NULL */
    INTO_PATHS, /* INTO_STRS of paths */
    INTO_F64S,  /* double[max], int64_t */
    INTO_JSON,  /* const json_t *: inf and nan have no JSON form: "inf", "-inf", "nan"; ??? is null */
    INTO_BYTES  /* int64_t: a number, or a text such as 20GiB */
};
/* Lists of enums.def as arrays, ended by a NULL word: CONF_WORDS(DTYPES), where the enum is known. */
struct conf_word {
    const char *word;
    int value;
};
#define CONF_WORD(w, v) {.word = w, .value = v},
#define CONF_WORDS(list) ((const struct conf_word[]){list(CONF_WORD, CONF_WORD){0}})

/* One key and the member it fills; made by bind.h from the rows of conf/keys. */
struct conf_binding {
    const char *key;
    enum conf_into into;
    size_t at, count_at, max;      /* offsets in the struct; max: of F64S */
    const struct conf_word *words; /* whole numbers and bool: the words that stand for values; may be NULL */
};
/* Fills the n bound members of `into`. A null or absent value leaves its member, unless the row says what null means.
 * Bindings of keys that this schema lacks are passed over. Strings, lists and JSON are borrowed until conf_free.
 * ERR_INVAL names key, value and what is expected; also for a value that is ??? or was deleted with ~. */
int conf_fill(const struct conf *c, const struct conf_binding *b, size_t n, void *into);

/* One word of a list (enums.def); ERR_INVAL names all of them. `key` is what the message names, "--dtype" too. */
int conf_word(const char *key, const char *text, const struct conf_word *words, int *out);
/* A number of a type of the tables, "int[1,2^24]" or "float(0,1]". ERR_INVAL names the key and the type. */
int conf_whole(const char *key, const char *type, const char *text, int64_t *out);
int conf_real(const char *key, const char *type, const char *text, double *out);
/* "20GiB", "1e9". ERR_INVAL names the key. */
int conf_bytes(const char *key, const char *text, int64_t *out);

/* A subtree by full path ("data", "trainer.logger.0"; "" is all). ERR_INVAL: absent or ???. */
int conf_json(const struct conf *c, const char *key, const json_t **out);
bool conf_is_null(const struct conf *c, const char *key); /* null or absent */
bool conf_is_set(const struct conf *c, const char *key);  /* by the user: file or command line */
json_t *conf_set_keys(const struct conf *c);              /* all such keys, a list of strings; the caller's */

/* The resolved tree as YAML, in verl's key order; ??? stays. Loading it again as
 * --config-name gives the same tree. ERR_INTERNAL. */
int conf_yaml(const struct conf *c, struct buf *b);
/* A key that acts, with its value before and now: texts of one line; a long one is cut and has a checksum. */
struct conf_change {
    const char *key, *was, *now;
};
/* What is otherwise in c than in a configuration that conf_yaml printed (n bytes; where: its name, for messages), key by key. Not
 * reported: keys that nothing reads, keys that the earlier program had not and that are not set, and those that follow another key
 * by default, which is reported. ERR_INVAL: not such a text. */
int conf_changes(const struct conf *c, const char *yaml, size_t n, const char *where,
                 void (*each)(void *arg, const struct conf_change *change), void *arg);
/* The first key under prefix ("critic.") that the user set, other than except; NULL: none. *n: how many. */
const char *conf_first_set(const struct conf *c, const char *prefix, const char *except, int64_t *n);
/* Prints what the keys that the user set and that are not simply used mean here (log_note). */
void conf_notes(const struct conf *c);
/* ERR_INVAL for the first rejected key with another value than its default, with the reason. */
int conf_check(const struct conf *c);
/* prefix NULL: the common keys with their meaning, then the names of the others that act. A prefix, or "all": key, type,
 * default, status and meaning of every key that starts so; ERR_INVAL: none does. */
int conf_help(FILE *f, const char *schema, const char *prefix);

/* ---- what is known of a key (describe.c) ---- */

struct conf_key_info { /* lives as long as the program */
    const char *key, *type;
    const char *def;              /* in the override grammar; NULL: not set by default */
    const char *null_is;          /* what null or an absent value means; NULL: nothing */
    const char *text;             /* what it does; NOTED: what holds instead, FIXED: why; OLDER: the key that took its place */
    const char *values;           /* of a type str: words between spaces; NULL: any */
    const char *advice, *related; /* when to change it; keys between spaces; NULL: none are known */
    enum { CONF_KEY_ACTS, CONF_KEY_NOTED, CONF_KEY_FIXED, CONF_KEY_OLDER } how;
    bool own; /* verl has no such key */
};
/* Each key of a schema, in its order; the callback's value other than 0 ends it and is returned. */
int conf_keys(const char *schema, int (*each)(void *arg, const struct conf_key_info *k), void *arg);
const char *conf_key_near(const char *schema, const char *name); /* what a slip may have meant; NULL: nothing is near */
/* The words that it takes, a line each: of an enumeration and of a bool; none of a number. */
void conf_key_values(const struct conf_key_info *k, struct buf *out);
/* "int[1,2^24]|null" as "a whole number from 1 to 2^24 or null". */
void conf_type_words(const char *type, struct buf *out);
/* Names with commas between them, appended: its older names in verl, other trainers' names, keys whose default is its value. */
int conf_key_relations(const char *schema, const char *key, struct buf *older, struct buf *elsewhere, struct buf *followers);

#endif
