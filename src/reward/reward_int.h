/* reward_int.h - native graders, calls of compute_score, and Python's text operations that the graders share. */
#ifndef VERLC_REWARD_INT_H
#define VERLC_REWARD_INT_H

#include "reward/reward.h"

#include "base/buf.h"

/* Takes message. */
struct reward_result reward__failure(enum reward_status status, char *message);

/* --- compute_score.c --- */
struct reward__calls;
int reward__calls_create(struct reward__calls **out, const struct reward_args *a); /* ERR_INPUT: no such file */
void reward__calls_destroy(struct reward__calls *c);                               /* NULL ok */
void reward__calls_cancel(struct reward__calls *c);                                /* forgets them all */
int reward__call_send(struct reward__calls *c, const struct reward_request *q, int64_t tag);
struct reward__called {
    int64_t tag, response_len; /* as they were sent */
    struct reward_result result;
};
int reward__call_take(struct reward__calls *c, double wait_s, struct reward__called *out); /* 1: one has finished */
int64_t reward__calls_pending(const struct reward__calls *c);

/* --- grade.c: the router --- */
struct reward_result reward__grade(const struct reward_request *q);

/* --- Python's str (python_str.c), on NUL-terminated UTF-8; char **s is an owned string that is changed --- */
/* The last n_chars code points of s[0 .. n) (Python s[-n_chars:]). */
const char *reward__tail(const char *s, size_t n, int64_t n_chars, size_t *n_tail);
/* Bytes of the code point at p (at least 1, at most `left`). */
size_t reward__char_bytes(const char *p, size_t left);
void reward__set(char **s, char *to); /* frees *s, takes `to` */
void reward__replace(char **s, const char *from, const char *to);
/* The last place of needle in s, NULL if none (rfind). */
const char *reward__rfind(const char *s, const char *needle);
/* From `open` on, up to and with the brace that closes the first one; NULL if it never does. */
char *reward__balanced(const char *open);
/* Bytes of the character at p if it is whitespace (\s, isspace), or a decimal (\d, isdecimal); 0: it is not. */
size_t reward__space(const char *p);
size_t reward__decimal(const char *p);
bool reward__is_word(const char *p); /* \w at p */
bool reward__isdigit(const char *s);
/* How many different letters (isalpha) there are in s, at most `limit` (<= 8). */
int reward__letters(const char *s, int limit);
void reward__strip(char **s);
char *reward__words(const char *s); /* " ".join(s.split()) */
char *reward__lower(const char *s);
bool reward__float(const char *s, double *x); /* float(s); false where it raises */

#endif
