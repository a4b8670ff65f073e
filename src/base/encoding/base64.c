/* base64.c - see base64.h. */
#include "base/encoding/base64.h"

#include "base/buf.h"

#include <stdint.h>

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

char *base64_text(const void *data, size_t n) {
    const uint8_t *p = data;
    char *out = xmalloc((n + 2) / 3 * 4 + 1), *o = out;
    for (size_t i = 0; i < n; i += 3) {
        const size_t left = n - i;
        const unsigned v = (unsigned)p[i] << 16 | (left > 1 ? (unsigned)p[i + 1] << 8 : 0) | (left > 2 ? p[i + 2] : 0u);
        *o++ = digits[v >> 18];
        *o++ = digits[v >> 12 & 63];
        *o++ = left > 1 ? digits[v >> 6 & 63] : '=';
        *o++ = left > 2 ? digits[v & 63] : '=';
    }
    *o = '\0';
    return out;
}

static int digit(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

bool base64_read(void *out, size_t n, const char *s, size_t len) {
    uint8_t *p = out;
    if (len != (n + 2) / 3 * 4) return false;
    for (size_t i = 0, at = 0; i < len; i += 4) {
        const size_t take = n - at < 3 ? n - at : 3;
        unsigned v = 0;
        for (size_t k = 0; k < 4; k++) {
            const int d = k <= take ? digit(s[i + k]) : s[i + k] == '=' ? 0 : -1;
            if (d < 0) return false;
            v = v << 6 | (unsigned)d;
        }
        for (size_t k = 0; k < take; k++) p[at++] = (uint8_t)(v >> (16 - 8 * k));
    }
    return true;
}
