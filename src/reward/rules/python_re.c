/* python_re.c - Python's re on str through PCRE2: Unicode classes, '.' stops at \n only.
 *
 * Patterns are string literals of the graders, compiled once; PY_SPACE stands for \s, which in Python has four characters
 * more.  Invariant: a text on which the matcher gives up uses up the answer's budget, so that it has no score; where there is
 * none it matches nothing and stays as it is. */
#include "reward/reward_int.h"

#include "base/err.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PATTERNS = 32 };

static pcre2_code *compile(const char *pattern) {
    int code;
    PCRE2_SIZE at;
    pcre2_compile_context *ctx = pcre2_compile_context_create(NULL);
    CHECK(ctx != NULL);
    pcre2_set_newline(ctx, PCRE2_NEWLINE_LF);
    pcre2_code *re =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF, &code, &at, ctx);
    pcre2_compile_context_free(ctx);
    CHECK(re != NULL);
    return re;
}

static const pcre2_code *compiled(const char *pattern) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct {
        const char *pattern;
        pcre2_code *code;
    } cache[MAX_PATTERNS];
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < MAX_PATTERNS && cache[i].pattern && cache[i].pattern != pattern) i++;
    CHECK(i < MAX_PATTERNS);
    if (!cache[i].pattern) {
        cache[i].pattern = pattern;
        cache[i].code = compile(pattern);
    }
    pthread_mutex_unlock(&lock);
    return cache[i].code;
}

/* What a match gave: > 0 or 0. At a limit the time of the answer is over. */
static int matched(int rc) {
    const bool gave_up = rc == PCRE2_ERROR_MATCHLIMIT || rc == PCRE2_ERROR_DEPTHLIMIT || rc == PCRE2_ERROR_HEAPLIMIT;
    if (gave_up) reward__exhaust();
    return rc > 0 ? rc : 0;
}

/* Limits of one match: about a tenth of a second, and 64 MiB. */
static pcre2_match_context *limits(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static pcre2_match_context *ctx;
    pthread_mutex_lock(&lock);
    if (!ctx) {
        ctx = pcre2_match_context_create(NULL);
        CHECK(ctx != NULL);
        pcre2_set_match_limit(ctx, 4000000);
        pcre2_set_heap_limit(ctx, 64 << 10);
    }
    pthread_mutex_unlock(&lock);
    return ctx;
}

void reward__sub(char **s, const char *pattern, const char *by) {
    const size_t n = strlen(*s);
    if (!reward__spend(n)) return;
    PCRE2_SIZE n_out = 4 * n + 64; /* each of our patterns adds at most 4 bytes to a match of 5 or more */
    char *out = xmalloc(n_out);
    const int rc = pcre2_substitute(compiled(pattern), (PCRE2_SPTR)*s, n, 0, PCRE2_SUBSTITUTE_GLOBAL, NULL, limits(),
                                    (PCRE2_SPTR)by, PCRE2_ZERO_TERMINATED, (PCRE2_UCHAR *)out, &n_out);
    if (matched(rc) == 0) free(out);
    else reward__set(s, out);
}

/* Group 1 of the first match in s, or of the last one. */
static char *group(const char *s, size_t n, const char *pattern, bool first) {
    const pcre2_code *re = compiled(pattern);
    pcre2_match_data *m = pcre2_match_data_create_from_pattern(re, NULL);
    CHECK(m != NULL);
    char *found = NULL;
    for (size_t at = 0; at <= n && !(first && found) && reward__spend(n - at);) {
        if (matched(pcre2_match(re, (PCRE2_SPTR)s, n, at, 0, m, limits())) == 0) break;
        const PCRE2_SIZE *v = pcre2_get_ovector_pointer(m);
        reward__set(&found, xstrndup(s + v[2], v[3] - v[2]));
        at = v[1];
    }
    pcre2_match_data_free(m);
    return found;
}

char *reward__first_group(const char *s, size_t n, const char *pattern) { return group(s, n, pattern, true); }
char *reward__last_group(const char *s, size_t n, const char *pattern) { return group(s, n, pattern, false); }

bool reward__search(const char *s, const char *pattern) {
    const pcre2_code *re = compiled(pattern);
    pcre2_match_data *m = pcre2_match_data_create_from_pattern(re, NULL);
    CHECK(m != NULL);
    const size_t n = strlen(s);
    const bool found = reward__spend(n) && matched(pcre2_match(re, (PCRE2_SPTR)s, n, 0, 0, m, limits())) > 0;
    pcre2_match_data_free(m);
    return found;
}
