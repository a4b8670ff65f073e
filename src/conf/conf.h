/* conf.h - the configuration of a run: verl's keys, Hydra's command line.
 *
 * A configuration is a tree for one schema ("ppo_trainer", "sft_trainer", ...;
 * conf_schemas lists them).  It starts from the defaults of keys.def, takes
 * YAML files (--config-path, --config-name) and overrides (k=v, +k=v, ++k=v, ~k),
 * then resolves ${...} and checks every value against the table's type.
 * What a key means here is its status: used, noted (accepted, said once in a
 * note), or rejected (refused unless it keeps its default).
 *
 * Invariant: after conf_load no key set by the user is unknown to the program
 * without a note, and no value has another type or range than the table says. */
#ifndef VERLC_BASE_CONF_H
#define VERLC_BASE_CONF_H

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

const char *conf_schema(const struct conf *c);
const char *const *conf_schemas(void); /* NULL-terminated */

/* Values by full path ("data.train_batch_size", lists by index "trainer.logger.0").
 * ERR_INVAL names key, value and what is expected; also for a value that is ???,
 * was deleted with ~, or is null where the getter has no null. Strings and JSON
 * are borrowed until conf_free. */
int conf_i64(const struct conf *c, const char *key, int64_t *out);
int conf_f64(const struct conf *c, const char *key, double *out);
int conf_bool(const struct conf *c, const char *key, bool *out);
int conf_str(const struct conf *c, const char *key, const char **out); /* a number gives its text */
/* A list of strings, or one string as a list of one; null gives none. *out points
 * to *n strings (an array owned by c). */
int conf_strs(const struct conf *c, const char *key, const char *const **out, int64_t *n);
/* The same for numbers: fills at most `max`, ERR_INVAL when there are more. */
int conf_f64s(const struct conf *c, const char *key, double *out, int64_t max, int64_t *n);
/* A subtree. inf, nan and ??? have no JSON form: "inf", "-inf", "nan", null. */
int conf_json(const struct conf *c, const char *key, const json_t **out);

/* As above; null or absent leaves *out and returns 0. */
int conf_i64_opt(const struct conf *c, const char *key, int64_t *out);
int conf_f64_opt(const struct conf *c, const char *key, double *out);
int conf_bool_opt(const struct conf *c, const char *key, bool *out);
int conf_str_opt(const struct conf *c, const char *key, const char **out);

bool conf_has(const struct conf *c, const char *key);     /* present, whatever its value */
bool conf_is_null(const struct conf *c, const char *key); /* null or absent */
bool conf_is_set(const struct conf *c, const char *key);  /* by the user: file or command line */

/* The resolved tree as YAML, in verl's key order; ??? stays. Loading it again as
 * --config-name gives the same tree. ERR_INTERNAL. */
int conf_yaml(const struct conf *c, struct buf *b);
/* The first key under prefix ("critic.") that the user set, other than except; NULL: none. *n: how many. */
const char *conf_first_set(const struct conf *c, const char *prefix, const char *except, int64_t *n);
/* Prints what the keys that the user set and that are not simply used mean here (log_note). */
void conf_notes(const struct conf *c);
/* ERR_INVAL for the first rejected key with another value than its default, with the reason. */
int conf_check(const struct conf *c);
/* Key, type, default, status and meaning of every key under prefix (NULL: all). */
int conf_help(FILE *f, const char *schema, const char *prefix);

#endif
