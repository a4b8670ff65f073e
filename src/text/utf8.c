/* utf8.c - UTF-8: what is valid, what becomes of the rest, one character at a time.
 *
 * Ill-formed input is replaced by the rule of the Unicode standard (3.9, "maximal
 * subparts"), which is what Python's errors="replace" and Rust's from_utf8_lossy do.
 * Invariant: everything past text_utf8_repair may rely on well-formed text. */
#include "text/text_int.h"

#include "base/encoding/utf8.h"

#include <string.h>

static uint64_t word_at(const char *p) {
    uint64_t w;
    memcpy(&w, p, sizeof w);
    return w;
}
#define HIGH_BITS 0x8080808080808080ull

bool text_utf8_valid(const char *text, size_t n) {
    size_t i = 0;
    while (i < n) {
        if (n - i >= 8 && (word_at(text + i) & HIGH_BITS) == 0) {
            i += 8;
            continue;
        }
        const int k = utf8_step(text + i, n - i);
        if (k < 0) return false;
        i += (size_t)k;
    }
    return true;
}

int text_utf8_repair(struct buf *out, const char *text, size_t n) {
    size_t i = 0, good = 0; /* [good, i): well formed, not yet written */
    while (i < n) {
        const int k = utf8_step(text + i, n - i);
        if (k > 0) {
            i += (size_t)k;
            continue;
        }
        TRY(buf_add(out, text + good, i - good));
        TRY(buf_add(out, "\xEF\xBF\xBD", 3));
        i += (size_t)-k;
        good = i;
    }
    return buf_add(out, text + good, n - good);
}

size_t text__unfinished(const char *p, size_t n) {
    for (size_t k = 1; k <= 3 && k <= n; k++) {
        const uint8_t lead = (uint8_t)p[n - k];
        if ((lead & 0xC0) == 0x80) continue;
        return lead >= 0xC2 && lead <= 0xF4 && utf8_step(p + n - k, k) == -(int)k ? k : 0;
    }
    return 0;
}

int32_t text__char(const char *p, int *len) {
    const uint8_t *u = (const uint8_t *)p;
    if (u[0] < 0x80) {
        *len = 1;
        return u[0];
    }
    if (u[0] < 0xE0) {
        *len = 2;
        return (u[0] & 0x1F) << 6 | (u[1] & 0x3F);
    }
    if (u[0] < 0xF0) {
        *len = 3;
        return (u[0] & 0x0F) << 12 | (u[1] & 0x3F) << 6 | (u[2] & 0x3F);
    }
    *len = 4;
    return (u[0] & 0x07) << 18 | (u[1] & 0x3F) << 12 | (u[2] & 0x3F) << 6 | (u[3] & 0x3F);
}

int text__put_char(char out[4], int32_t c) {
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xC0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xE0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3F));
        out[2] = (char)(0x80 | (c & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3F));
    out[2] = (char)(0x80 | (c >> 6 & 0x3F));
    out[3] = (char)(0x80 | (c & 0x3F));
    return 4;
}

bool text__has_byte_from_80(const char *p, size_t n) {
    size_t i = 0;
    for (; n - i >= 8; i += 8)
        if (word_at(p + i) & HIGH_BITS) return true;
    for (; i < n; i++)
        if ((uint8_t)p[i] >= 0x80) return true;
    return false;
}

bool text__has_byte_from_e0(const char *p, size_t n) {
    size_t i = 0;
    for (; n - i >= 8; i += 8) {
        const uint64_t w = word_at(p + i);
        if (w & w << 1 & w << 2 & HIGH_BITS) return true; /* bits 7, 6 and 5 of some byte */
    }
    for (; i < n; i++)
        if ((uint8_t)p[i] >= 0xE0) return true;
    return false;
}
