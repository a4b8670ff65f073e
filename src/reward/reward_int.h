/* reward_int.h - text operations that the graders share. */
#ifndef VERLC_REWARD_INT_H
#define VERLC_REWARD_INT_H

#include "reward/reward.h"

#include "base/buf.h"

/* The last n_chars code points of s[0 .. n) (Python s[-n_chars:]). */
const char *reward__tail(const char *s, size_t n, int64_t n_chars, size_t *n_tail);
/* Bytes of the code point at p (at least 1, at most `left`). */
size_t reward__char_bytes(const char *p, size_t left);
/* Python str.replace on a NUL-terminated string, in place of *s (owned). */
void reward__replace(char **s, const char *from, const char *to);
/* The last place of needle in s, NULL if none (Python str.rfind). */
const char *reward__rfind(const char *s, const char *needle);
/* From `open` on, up to and with the brace that closes the first one; NULL if it never does. */
char *reward__balanced(const char *open);

#endif
