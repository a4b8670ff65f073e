/* utf8.c - see utf8.h. */
#include "base/encoding/utf8.h"

#include <stdint.h>
#include <string.h>

int utf8_step(const char *text, size_t n) {
    const uint8_t *p = (const uint8_t *)text, c = p[0];
    int need;
    uint8_t lo = 0x80, hi = 0xBF; /* allowed second byte */
    if (c < 0x80) return 1;
    if (c >= 0xC2 && c <= 0xDF) {
        need = 1;
    } else if (c >= 0xE0 && c <= 0xEF) {
        need = 2;
        if (c == 0xE0) lo = 0xA0;
        if (c == 0xED) hi = 0x9F;
    } else if (c >= 0xF0 && c <= 0xF4) {
        need = 3;
        if (c == 0xF0) lo = 0x90;
        if (c == 0xF4) hi = 0x8F;
    } else {
        return -1;
    }
    for (int i = 1; i <= need; i++) {
        if ((size_t)i >= n || p[i] < lo || p[i] > hi) return -i;
        lo = 0x80;
        hi = 0xBF;
    }
    return need + 1;
}

size_t utf8_cut(const char *s, size_t n) {
    const size_t len = strnlen(s, n);
    for (size_t k = 1; k <= 3 && k <= len; k++) {
        const char *lead = s + len - k;
        if (((uint8_t)*lead & 0xC0) == 0x80) continue;
        return (uint8_t)*lead >= 0xC2 && utf8_step(lead, k) == -(int)k ? len - k : len;
    }
    return len;
}
