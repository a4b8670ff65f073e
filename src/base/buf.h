/* buf.h - a growable byte string with a ceiling, always NUL-terminated.
 * Out of memory in these small host buffers is a CHECK, not an error; a text
 * that passes the ceiling is an error and leaves the buffer unchanged. */
#ifndef VERLC_BASE_BUF_H
#define VERLC_BASE_BUF_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buf {
    char *p;  /* owned; NULL when empty and never written */
    size_t n; /* bytes without the NUL */
    size_t cap;
    size_t max; /* 0: no ceiling */
};

void buf_free(struct buf *b);  /* frees and zeroes; zeroed struct is a valid empty buf */
void buf_reset(struct buf *b); /* n = 0, keeps memory */
int buf_add(struct buf *b, const void *p, size_t n);
int buf_adds(struct buf *b, const char *s);
int buf_addc(struct buf *b, char c);
int buf_addf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Text from outside for a terminal: control characters and what is no UTF-8 become \x1b, newlines \n, so that it neither
 * steers the terminal nor looks like a line of its own. lines: newlines stay. */
void buf_add_visible(struct buf *b, const char *s, bool lines);
char *buf_take(struct buf *b); /* transfers the string ("" if empty); caller frees */

/* malloc family that never returns NULL (CHECKs), for small host objects. */
void *xmalloc(size_t n);
void *xcalloc(size_t n, size_t size);
void *xrealloc(void *p, size_t n);
char *xstrdup(const char *s);
void *xcopy(const void *p, int64_t n, size_t size); /* n elements of `size` bytes; none: memory of no use, not NULL */
/* Levenshtein distance of the first 127 bytes, for "did you mean". */
int str_distance(const char *a, const char *b);
/* The name in a list ("a, b, c" or "'a'|'b'") that is nearest to s, or is s in other cases, a new string; NULL: none is near. */
char *str_near(const char *list, const char *s);
char *xstrndup(const char *s, size_t n);
char *xasprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
char *xvasprintf(const char *fmt, va_list ap) __attribute__((format(printf, 1, 0)));
/* Grows *p (elements of `size` bytes) so that `need` fit; doubles. */
void xgrow(void **p, int64_t *cap, int64_t need, size_t size);

#endif
