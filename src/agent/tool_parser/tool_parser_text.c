/* tool_parser_text.c - scanning, and Python's classes of characters.
 *
 * Invariant: each function looks at a byte a bounded number of times. */
#include "agent/tool_parser/tool_parser_int.h"
#include "base/encoding/utf8.h"

#include <utf8proc.h>

size_t tool_parser__find(struct tool_parser__span s, size_t from, struct tool_parser__span what) {
    if (from > s.n || s.n - from < what.n) return TOOL_NONE;
    const char *const at = memmem(s.p + from, s.n - from, what.p, what.n);
    return at ? (size_t)(at - s.p) : TOOL_NONE;
}

void tool_parser__add_without(struct buf *out, struct tool_parser__span s, struct tool_parser__span what) {
    size_t from = 0;
    for (size_t at; (at = tool_parser__find(s, from, what)) != TOOL_NONE; from = at + what.n) buf_add(out, s.p + from, at - from);
    buf_add(out, s.p + from, s.n - from);
}

int64_t tool_parser__count(struct tool_parser__span s, struct tool_parser__span what) {
    int64_t n = 0;
    for (size_t at = 0; (at = tool_parser__find(s, at, what)) != TOOL_NONE; at += what.n) n++;
    return n;
}

bool tool_parser__block(struct tool_parser__span s, size_t from, struct tool_parser__span open, struct tool_parser__span close,
                        struct tool_parser__block *b) {
    *b = (struct tool_parser__block){TOOL_NONE, TOOL_NONE, TOOL_NONE, TOOL_NONE};
    b->at = tool_parser__find(s, from, open);
    if (b->at == TOOL_NONE) return false;
    b->lo = b->at + open.n;
    b->hi = tool_parser__find(s, b->lo, close);
    if (b->hi == TOOL_NONE) return false;
    b->end = b->hi + close.n;
    return true;
}

/* ---- characters ---- */

int32_t tool_parser__char(const char *p, size_t n, size_t *len) {
    utf8proc_int32_t c = (unsigned char)*p;
    *len = 1;
    if (c < 0x80) return c;
    const int step = utf8_step(p, n);
    *len = (size_t)(step < 0 ? -step : step);
    if (step < 0) return -1;
    utf8proc_iterate((const utf8proc_uint8_t *)p, step, &c);
    return c;
}

void tool_parser__put_char(struct buf *out, int32_t c) {
    char s[4];
    size_t n = 0;
    if (c < 0x80) {
        s[n++] = (char)c;
    } else if (c < 0x800) {
        s[n++] = (char)(0xc0 | c >> 6);
    } else if (c < 0x10000) {
        s[n++] = (char)(0xe0 | c >> 12);
        s[n++] = (char)(0x80 | (c >> 6 & 0x3f));
    } else {
        s[n++] = (char)(0xf0 | c >> 18);
        s[n++] = (char)(0x80 | (c >> 12 & 0x3f));
        s[n++] = (char)(0x80 | (c >> 6 & 0x3f));
    }
    if (c >= 0x80) s[n++] = (char)(0x80 | (c & 0x3f));
    buf_add(out, s, n);
}

bool tool_parser__is_regex_space(int32_t c) {
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool tool_parser__is_space(int32_t c) { return (c >= 0x1c && c <= 0x1f) || tool_parser__is_regex_space(c); }

size_t tool_parser__skip_space(struct tool_parser__span s, size_t at) {
    size_t len;
    while (at < s.n && tool_parser__is_regex_space(tool_parser__char(s.p + at, s.n - at, &len))) at += len;
    return at;
}

struct tool_parser__span tool_parser__strip(struct tool_parser__span s) {
    size_t lo = 0, len;
    while (lo < s.n && tool_parser__is_space(tool_parser__char(s.p + lo, s.n - lo, &len))) lo += len;
    size_t hi = s.n;
    while (hi > lo) {
        size_t start = hi - 1;
        while (start > lo && hi - start < 4 && ((unsigned char)s.p[start] & 0xc0) == 0x80) start--;
        if (!tool_parser__is_space(tool_parser__char(s.p + start, hi - start, &len)) || start + len != hi) break;
        hi = start;
    }
    return tool_parser__sub(s, lo, hi);
}

bool tool_parser__is_nocase(struct tool_parser__span s, const char *lower) {
    size_t i = 0;
    for (; i < s.n && lower[i]; i++) {
        const char c = s.p[i] >= 'A' && s.p[i] <= 'Z' ? (char)(s.p[i] + 32) : s.p[i];
        if (c != lower[i]) return false;
    }
    return i == s.n && lower[i] == '\0';
}
