/* json_reader.c - a forward reader for the large parts of tokenizer.json.
 *
 * A vocabulary with its merges is half a million small strings; building a JSON
 * tree of them costs more than everything else in opening a tokenizer.  This
 * reader walks the file once and returns strings and numbers in place; small
 * parts are cut out whole (text__json_skip) and go through jansson.
 * Invariant: never reads at or past end; the caller has checked that the bytes
 * are UTF-8. */
#include "text/text_int.h"

#include <stdlib.h>
#include <string.h>

static int bad(const struct text__json *j, const char *what) {
    FAIL(ERR_FORMAT, "%s: malformed JSON: %s at byte %lld", j->where, what, (long long)(j->p - j->start));
}

static void skip_blanks(struct text__json *j) {
    while (j->p < j->end && (*j->p == ' ' || *j->p == '\n' || *j->p == '\t' || *j->p == '\r')) j->p++;
}

int text__json_next(struct text__json *j, char *c) {
    skip_blanks(j);
    if (j->p >= j->end) return bad(j, "the file ends early");
    *c = *j->p;
    return 0;
}

int text__json_expect(struct text__json *j, char c) {
    char got;
    TRY(text__json_next(j, &got));
    if (got != c) {
        const char what[] = {'\'', c, '\'', ' ', 'e', 'x', 'p', 'e', 'c', 't', 'e', 'd', 0};
        return bad(j, what);
    }
    j->p++;
    return 0;
}

int text__json_more(struct text__json *j, char close, bool first) {
    char c;
    TRY(text__json_next(j, &c));
    if (c == close) {
        j->p++;
        return 0;
    }
    if (!first) TRY(text__json_expect(j, ','));
    return 1;
}

int text__json_end(struct text__json *j) {
    skip_blanks(j);
    return j->p == j->end ? 0 : bad(j, "something after the end");
}

static int hex4(struct text__json *j, int32_t *out) {
    int32_t v = 0;
    if (j->end - j->p < 4) return bad(j, "the file ends in an escape");
    for (int i = 0; i < 4; i++) {
        const char c = *j->p++;
        if (c >= '0' && c <= '9') v = v << 4 | (c - '0');
        else if (c >= 'a' && c <= 'f') v = v << 4 | (c - 'a' + 10);
        else if (c >= 'A' && c <= 'F') v = v << 4 | (c - 'A' + 10);
        else return bad(j, "an escape that is not \\u and four hex digits");
    }
    *out = v;
    return 0;
}

/* After the backslash. */
static int escape(struct text__json *j, struct buf *out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (j->p >= j->end) return bad(j, "the file ends in a string");
    const char c = *j->p++;
    const char *at = memchr(from, c, sizeof from - 1);
    if (at) return buf_addc(out, to[at - from]);
    if (c != 'u') return bad(j, "an unknown escape in a string");
    int32_t v, low;
    TRY(hex4(j, &v));
    if (v >= 0xDC00 && v <= 0xDFFF) return bad(j, "half a surrogate pair");
    if (v >= 0xD800 && v <= 0xDBFF) {
        if (j->end - j->p < 2 || j->p[0] != '\\' || j->p[1] != 'u') return bad(j, "half a surrogate pair");
        j->p += 2;
        TRY(hex4(j, &low));
        if (low < 0xDC00 || low > 0xDFFF) return bad(j, "half a surrogate pair");
        v = 0x10000 + ((v - 0xD800) << 10) + (low - 0xDC00);
    }
    char b[4];
    const int n = text__put_char(b, v);
    return buf_add(out, b, (size_t)n);
}

int text__json_string(struct text__json *j, struct buf *out) {
    TRY(text__json_expect(j, '"'));
    for (;;) {
        const char *run = j->p;
        while (j->p < j->end && *j->p != '"' && *j->p != '\\' && (uint8_t)*j->p >= 0x20) j->p++;
        TRY(buf_add(out, run, (size_t)(j->p - run)));
        if (j->p >= j->end) return bad(j, "the file ends in a string");
        const char c = *j->p;
        if ((uint8_t)c < 0x20) return bad(j, "a control character in a string");
        j->p++;
        if (c == '"') return 0;
        TRY(escape(j, out));
    }
}

int text__json_i64(struct text__json *j, int64_t *out) {
    char c;
    TRY(text__json_next(j, &c));
    const bool minus = c == '-';
    const char *p = j->p + minus, *digits = p;
    int64_t v = 0;
    for (; p < j->end && *p >= '0' && *p <= '9'; p++) {
        if (v > INT64_MAX / 10 - 1) return bad(j, "a number that is too large");
        v = v * 10 + (*p - '0');
    }
    if (p == digits || (p < j->end && (*p == '.' || *p == 'e' || *p == 'E'))) return bad(j, "a whole number expected");
    j->p = p;
    *out = minus ? -v : v;
    return 0;
}

/* Finds the end of any value. What is inside is checked by who parses it. */
int text__json_skip(struct text__json *j, const char **lo, const char **hi) {
    char c;
    TRY(text__json_next(j, &c));
    *lo = j->p;
    int64_t depth = 0;
    do {
        if (j->p >= j->end) return bad(j, "the file ends early");
        c = *j->p++;
        if (c == '{' || c == '[') depth++;
        else if (c == '}' || c == ']') depth--;
        else if (c == '"') {
            for (; j->p < j->end && *j->p != '"'; j->p++)
                if (*j->p == '\\') j->p++;
            if (j->p >= j->end) return bad(j, "the file ends in a string");
            j->p++;
        } else if (depth == 0) { /* a number or a name: ends before what cannot belong to it */
            while (j->p < j->end && !strchr(",]} \n\t\r", *j->p)) j->p++;
        }
        if (depth < 0) return bad(j, "a bracket too many");
    } while (depth > 0);
    *hi = j->p;
    return 0;
}
