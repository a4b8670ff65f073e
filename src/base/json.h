/* json.h - typed reads from a jansson value, with the place in the message.
 * `where` names the file or "stdin:LINE" and is put in front of every message.
 * Getters return ERR_FORMAT when the key is missing or has another type; the
 * _opt forms keep the default when the key is missing or null. */
#ifndef VERLC_BASE_JSON_H
#define VERLC_BASE_JSON_H

#include "base/buf.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* Parses n bytes; depth is limited by jansson (2048). NUL in strings allowed.
 * The caller owns *out (json_decref). ERR_FORMAT names where, line and column. */
int json_parse(json_t **out, const char *text, size_t n, const char *where);
int json_load(json_t **out, const char *path, size_t max_bytes); /* ERR_INPUT, ERR_FORMAT */
/* Doubles print as number_text does, so that they parse back to the same value. One line, keys in insertion order. */
int json_dump_line(struct buf *b, const json_t *v);
json_t *json_i32_array(const int32_t *v, int64_t n);     /* as token ids */
int json_save_atomic(const char *path, const json_t *v); /* indented; ERR_IO */
int json_save_new(const char *path, const json_t *v);    /* the same by file_write_new */

int json_i64(const json_t *o, const char *key, int64_t *out, const char *where);
int json_f64(const json_t *o, const char *key, double *out, const char *where);
int json_bool(const json_t *o, const char *key, bool *out, const char *where);
int json_str(const json_t *o, const char *key, const char **out, const char *where); /* borrowed */
int json_i64_opt(const json_t *o, const char *key, int64_t *out, const char *where);
int json_f64_opt(const json_t *o, const char *key, double *out, const char *where);
int json_bool_opt(const json_t *o, const char *key, bool *out, const char *where);
int json_str_opt(const json_t *o, const char *key, const char **out, const char *where);

#endif
