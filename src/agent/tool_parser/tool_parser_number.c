/* tool_parser_number.c - int(text), float(text) of Python, and integers with a base.
 *
 * Invariant: an integer's text is Python's: no sign +, no leading zero, no -0. */
#include "agent/tool_parser/tool_parser_int.h"

#include <math.h>
#include <utf8proc.h>

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* ---- texts ---- */

/* The value of a decimal digit of any script, -1: none. Scripts have theirs in tens. */
static int decimal_of(int32_t c) {
    int32_t start = c;
    if (c < 0 || utf8proc_category(c) != UTF8PROC_CATEGORY_ND) return -1;
    while (utf8proc_category(start - 1) == UTF8PROC_CATEGORY_ND) start--;
    return (c - start) % 10;
}

/* What int() and float() read: digits of all scripts and other blanks in ASCII, without blanks around. false: neither can. */
static bool ascii_of(struct tool_parser__span s, struct buf *out) {
    static const char blanks[] = " \t\n\v\f\r";
    buf_reset(out);
    for (size_t i = 0, len; i < s.n; i += len) {
        const int32_t c = tool_parser__char(s.p + i, s.n - i, &len);
        const int digit = c < 127 ? -1 : decimal_of(c);
        if (c == 0 || (c >= 127 && digit < 0 && !tool_parser__is_space(c)) || c < 0) return false;
        buf_addc(out, (char)(c < 127 ? c : digit >= 0 ? '0' + digit : ' '));
    }
    size_t lo = 0;
    while (out->n && strchr(blanks, out->p[out->n - 1])) out->n--;
    while (lo < out->n && strchr(blanks, out->p[lo])) lo++;
    if (out->n == lo) return false;
    memmove(out->p, out->p + lo, out->n - lo);
    out->n -= lo;
    out->p[out->n] = '\0';
    return true;
}

/* Takes the underscores out; false: one is not between two digits. */
static bool drop_underscores(struct buf *b) {
    size_t n = 0;
    for (size_t i = 0; i < b->n; i++) {
        if (b->p[i] != '_') b->p[n++] = b->p[i];
        else if (i == 0 || !is_digit(b->p[i - 1]) || !is_digit(b->p[i + 1])) return false;
    }
    b->n = n;
    b->p[n] = '\0';
    return true;
}

struct tool_parser__value *tool_parser__int(struct tool_parser__memory *m, bool minus, struct tool_parser__span digits) {
    if (digits.n > TOOL_INT_DIGITS) return NULL;
    while (digits.n > 1 && digits.p[0] == '0') digits = tool_parser__sub(digits, 1, digits.n);
    struct tool_parser__value *v = tool_parser__value(m, TOOL_INT);
    char *const text = tool_parser__alloc(m, digits.n + 2);
    minus = minus && digits.p[0] != '0';
    text[0] = '-';
    memcpy(text + minus, digits.p, digits.n);
    text[minus + digits.n] = '\0';
    v->text = (struct tool_parser__span){text, minus + digits.n};
    return v;
}

struct tool_parser__value *tool_parser__int_of(struct tool_parser__memory *m, struct tool_parser__span s) {
    struct buf b = {0};
    struct tool_parser__value *v = NULL;
    if (ascii_of(s, &b) && drop_underscores(&b)) {
        const size_t sign = b.p[0] == '-' || b.p[0] == '+';
        if (b.n > sign && strspn(b.p + sign, "0123456789") == b.n - sign)
            v = tool_parser__int(m, b.p[0] == '-', (struct tool_parser__span){b.p + sign, b.n - sign});
    }
    buf_free(&b);
    return v;
}

/* [digits][.digits][e[sign]digits] with a digit before the exponent, or inf, infinity, nan. */
static bool is_float(const char *p) {
    p += *p == '-' || *p == '+';
    const struct tool_parser__span word = {p, strlen(p)};
    if (tool_parser__is_nocase(word, "inf") || tool_parser__is_nocase(word, "infinity") || tool_parser__is_nocase(word, "nan"))
        return true;
    const size_t whole = strspn(p, "0123456789");
    p += whole;
    if (*p == '.') {
        const size_t part = strspn(p + 1, "0123456789");
        if (whole + part == 0) return false;
        p += 1 + part;
    } else if (whole == 0) {
        return false;
    }
    if (*p == 'e' || *p == 'E') {
        p += 1 + (p[1] == '-' || p[1] == '+');
        const size_t n = strspn(p, "0123456789");
        if (n == 0) return false;
        p += n;
    }
    return *p == '\0';
}

struct tool_parser__value *tool_parser__float_of(struct tool_parser__memory *m, struct tool_parser__span s) {
    struct buf b = {0};
    struct tool_parser__value *v = NULL;
    if (ascii_of(s, &b) && drop_underscores(&b) && is_float(b.p)) v = tool_parser__float(m, (struct tool_parser__span){b.p, b.n});
    buf_free(&b);
    return v;
}

/* ---- powers of two in decimal ---- */

enum {
    LIMB = 1000000000,
    LIMBS = TOOL_INT_DIGITS / 9 + 4,
    MOST_SHIFT = 34,  /* a limb has 30 bits */
    MOST_BITS = 14285 /* of 10^4300 */
};

/* limbs (n) of nine decimal digits, lowest first: times 2^bits, plus add. */
static int scale(uint32_t *limbs, int n, int bits, uint32_t add) {
    uint64_t carry = add;
    for (int i = 0; i < n; i++) {
        carry += (uint64_t)limbs[i] << bits;
        limbs[i] = (uint32_t)(carry % LIMB);
        carry /= LIMB;
    }
    for (; carry; carry /= LIMB) limbs[n++] = (uint32_t)(carry % LIMB);
    return n;
}

/* The limbs' digits, in text (9 * LIMBS bytes). */
static struct tool_parser__span print(const uint32_t *limbs, int n, char *text) {
    char *p = text + 9 * LIMBS;
    for (int i = 0; i < n; i++) {
        uint32_t limb = limbs[i];
        for (int k = 0; k < 9; k++, limb /= 10) *--p = (char)('0' + limb % 10);
    }
    if (n == 0) *--p = '0';
    while (p < text + 9 * LIMBS - 1 && *p == '0') p++;
    return (struct tool_parser__span){p, (size_t)(text + 9 * LIMBS - p)};
}

/* v = mantissa 2^exponent, by limbs: printf takes three times as long. */
struct tool_parser__value *tool_parser__whole(struct tool_parser__memory *m, double v) {
    uint32_t limbs[LIMBS] = {0};
    char text[9 * LIMBS];
    int exponent, n = 0;
    uint64_t mantissa = (uint64_t)ldexp(frexp(fabs(v), &exponent), 53);
    exponent -= 53;
    for (; exponent < 0 && mantissa; exponent++) mantissa >>= 1;
    for (; mantissa; mantissa /= LIMB) limbs[n++] = (uint32_t)(mantissa % LIMB);
    for (int bits; exponent > 0; exponent -= bits) {
        bits = exponent < MOST_SHIFT ? exponent : MOST_SHIFT;
        n = scale(limbs, n, bits, 0);
    }
    return tool_parser__int(m, v < 0, print(limbs, n, text));
}

/* As many digits as make 28 bits at a time. */
struct tool_parser__value *tool_parser__int_bits(struct tool_parser__memory *m, struct tool_parser__span digits, int bits) {
    enum { PIECE = 28 };
    uint32_t limbs[LIMBS] = {0}, piece = 0;
    char text[9 * LIMBS];
    int n = 0, held = 0;
    while (digits.n && digits.p[0] == '0') digits = tool_parser__sub(digits, 1, digits.n);
    if (digits.n > MOST_BITS / (size_t)bits + 1) return tool_parser__value(m, TOOL_LONG_INT);
    for (size_t i = 0; i < digits.n; i++) {
        const char c = digits.p[i];
        piece = piece << bits | (uint32_t)(is_digit(c) ? c - '0' : (c | 32) - 'a' + 10);
        held += bits;
        if (held + bits <= PIECE && i + 1 < digits.n) continue;
        n = scale(limbs, n, held, piece);
        piece = 0;
        held = 0;
    }
    struct tool_parser__value *v = tool_parser__int(m, false, print(limbs, n, text));
    return v ? v : tool_parser__value(m, TOOL_LONG_INT);
}
