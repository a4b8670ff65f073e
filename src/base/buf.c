/* buf.c - see buf.h. */
#include "base/buf.h"

#include "base/err.h"
#include "base/encoding/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

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
void *xcopy(const void *p, int64_t n, size_t size) {
    void *q = xmalloc((size_t)n * size + 1);
    if (n > 0) memcpy(q, p, (size_t)n * size);
    return q;
}
char *xvasprintf(const char *fmt, va_list ap) {
    char *p = NULL;
    CHECK(vasprintf(&p, fmt, ap) >= 0 && p != NULL);
    return p;
}
char *xasprintf(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    char *p = xvasprintf(fmt, ap);
    va_end(ap);
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
    if (b->max && (n > b->max || b->n > b->max - n)) FAIL(ERR_FORMAT, "text is longer than the %zu bytes allowed here", b->max);
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
    va_start(ap, fmt);
    char *p = xvasprintf(fmt, ap);
    va_end(ap);
    const int rc = buf_adds(b, p);
    free(p);
    return rc;
}
void buf_add_visible(struct buf *b, const char *s, bool lines) {
    for (size_t n = strlen(s); n > 0;) {
        const int k = utf8_step(s, n), take = k < 0 ? -k : k;
        const unsigned char c = (unsigned char)*s;
        const bool control = (c < 0x20 && c != '\t' && !(c == '\n' && lines)) || c == 0x7f;
        const bool c1 = c == 0xc2 && k == 2 && (unsigned char)s[1] < 0xa0; /* U+0080 to U+009F: CSI and its like */
        if (c == '\n' && control) buf_adds(b, "\\n");
        else if (k > 0 && !control && !c1) buf_add(b, s, (size_t)take);
        else
            for (int i = 0; i < take; i++) buf_addf(b, "\\x%02x", (unsigned char)s[i]);
        s += take;
        n -= (size_t)take;
    }
}
char *buf_take(struct buf *b) {
    char *p = b->p ? b->p : xstrdup("");
    *b = (struct buf){.max = b->max};
    return p;
}

/* ---- did you mean ---- */

enum { MAX_NAME = 127 };

int str_distance(const char *a, const char *b) {
    int row[MAX_NAME + 1];
    const int n = (int)strnlen(b, MAX_NAME), m = (int)strnlen(a, MAX_NAME);
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; i <= m; i++) {
        int diag = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            const int up = row[j], sub = diag + (a[i - 1] != b[j - 1]);
            int best = sub < up + 1 ? sub : up + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
            diag = up;
        }
    }
    return row[n];
}

char *str_near(const char *list, const char *s) {
    static const char between[] = " ,|'";
    char *best = NULL;
    int least = 2 + (int)strlen(s) / 4; /* edits that a slip may take */
    for (const char *p = list + strspn(list, between); *p; p += strspn(p, between)) {
        const size_t n = strcspn(p, between);
        char *name = xstrndup(p, n);
        const int d = strcasecmp(s, name) == 0 ? 0 : str_distance(s, name);
        p += n;
        if (d < least) {
            least = d;
            free(best);
            best = name;
        } else {
            free(name);
        }
    }
    return best;
}
