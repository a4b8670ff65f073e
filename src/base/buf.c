/* buf.c - see buf.h. */
#include "base/buf.h"

#include "base/err.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *xmalloc(size_t n) {
    void *p = malloc(n ? n : 1);
    CHECK(p != NULL);
    return p;
}
void *xcalloc(size_t n, size_t size) {
    void *p = calloc(n ? n : 1, size ? size : 1);
    CHECK(p != NULL);
    return p;
}
void *xrealloc(void *p, size_t n) {
    p = realloc(p, n ? n : 1);
    CHECK(p != NULL);
    return p;
}
char *xstrdup(const char *s) { return xstrndup(s, strlen(s)); }
char *xstrndup(const char *s, size_t n) {
    char *p = xmalloc(n + 1);
    memcpy(p, s, n);
    p[n] = '\0';
    return p;
}
char *xasprintf(const char *fmt, ...) {
    va_list ap;
    char *p = NULL;
    va_start(ap, fmt);
    const int n = vasprintf(&p, fmt, ap);
    va_end(ap);
    CHECK(n >= 0 && p != NULL);
    return p;
}
void xgrow(void **p, int64_t *cap, int64_t need, size_t size) {
    if (need <= *cap) return;
    int64_t c = *cap < 16 ? 16 : *cap;
    while (c < need) {
        CHECK(c <= INT64_MAX / 2);
        c *= 2;
    }
    CHECK((uint64_t)c <= SIZE_MAX / (size ? size : 1));
    *p = xrealloc(*p, (size_t)c * size);
    *cap = c;
}

void buf_free(struct buf *b) {
    free(b->p);
    b->p = NULL;
    b->n = b->cap = 0;
}
void buf_reset(struct buf *b) {
    b->n = 0;
    if (b->p) b->p[0] = '\0';
}
int buf_add(struct buf *b, const void *p, size_t n) {
    if (b->max && (n > b->max || b->n > b->max - n))
        FAIL(ERR_FORMAT, "text is longer than the %zu bytes allowed here", b->max);
    if (b->n + n + 1 > b->cap) {
        size_t c = b->cap < 64 ? 64 : b->cap;
        while (c < b->n + n + 1) c *= 2;
        b->p = xrealloc(b->p, c);
        b->cap = c;
    }
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = '\0';
    return 0;
}
int buf_adds(struct buf *b, const char *s) { return buf_add(b, s, strlen(s)); }
int buf_addc(struct buf *b, char c) { return buf_add(b, &c, 1); }
int buf_addf(struct buf *b, const char *fmt, ...) {
    va_list ap;
    char *p = NULL;
    va_start(ap, fmt);
    const int n = vasprintf(&p, fmt, ap);
    va_end(ap);
    CHECK(n >= 0 && p != NULL);
    const int rc = buf_add(b, p, (size_t)n);
    free(p);
    return rc;
}
char *buf_take(struct buf *b) {
    char *p = b->p ? b->p : xstrdup("");
    *b = (struct buf){.max = b->max};
    return p;
}
