/* unicode.c - characters by the tables of the reference.
 *
 * Hugging Face tokenizers carries several Unicode tables of different ages:
 * its regular expressions know Unicode 16, its normal forms Unicode 9.  utf8proc
 * and PCRE2 know another age again, which depends on the machine.  The differences
 * are listed in unicode_tables.h; with them every machine gives the same ids.
 * Invariant: a stand-in (text__proxy) has the category and the length of what it
 * stands for, so that offsets found in the proxy hold in the text. */
#include "text/text_int.h"

#include "text/unicode_tables.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#define LOOKUP(table, c) lookup((table), sizeof(table) / sizeof(table)[0], (c))

static const struct text__range *lookup(const struct text__range *t, size_t n, int32_t c) {
    size_t lo = 0, hi = n;
    while (lo < hi) {
        const size_t mid = (lo + hi) / 2;
        if (c > t[mid].hi) lo = mid + 1;
        else hi = mid;
    }
    return lo < n && c >= t[lo].lo ? &t[lo] : NULL;
}

enum { HAN = 100 }; /* text_newer: added to the category of a Han character */

/* utf8proc_category_t, by the reference's tables */
static int category(int32_t c) {
    const struct text__range *r = c >= text_newer[0].lo ? LOOKUP(text_newer, c) : NULL;
    return r ? r->value % HAN : (int)utf8proc_category(c);
}

static bool is_mark(int cat) { return cat == UTF8PROC_CATEGORY_MN || cat == UTF8PROC_CATEGORY_MC || cat == UTF8PROC_CATEGORY_ME; }
static bool is_letter(int cat) { return cat >= UTF8PROC_CATEGORY_LU && cat <= UTF8PROC_CATEGORY_LO; }
static bool is_number(int cat) { return cat >= UTF8PROC_CATEGORY_ND && cat <= UTF8PROC_CATEGORY_NO; }

/* The property White_Space, which no version of Unicode has changed since 6.3. */
bool text__is_space(int32_t c) {
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
           c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool text__is_punct(int32_t c) {
    if (c < 0x80) return (c > ' ' && c < '0') || (c > '9' && c < 'A') || (c > 'Z' && c < 'a') || (c > 'z' && c < 0x7F);
    const int cat = category(c);
    const bool p = cat >= UTF8PROC_CATEGORY_PC && cat <= UTF8PROC_CATEGORY_PO;
    return p != (LOOKUP(text_punct_flip, c) != NULL);
}

bool text__is_digit(int32_t c) {
    if (c < 0x80) return c >= '0' && c <= '9';
    return is_number(category(c)) != (LOOKUP(text_digit_flip, c) != NULL);
}

/* Alphabetic, marks, decimal digits, connectors, joiners (UTS 18, annex C). The
 * letters in circles and squares are the only Alphabetic symbols. */
bool text__is_word(int32_t c) {
    if (c < 0x80) return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
    const int cat = category(c);
    return is_letter(cat) || is_mark(cat) || cat == UTF8PROC_CATEGORY_ND || cat == UTF8PROC_CATEGORY_NL ||
           cat == UTF8PROC_CATEGORY_PC || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
           (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189) || c == 0x200C || c == 0x200D;
}

/* ---- proxies ---------------------------------------------------------------- */

/* Characters that every PCRE2 knows, by category: three bytes, four bytes. */
static const struct {
    int cat;
    int32_t three, four;
} stand_in[] = {
    {UTF8PROC_CATEGORY_LU, 0xA640, 0x10400}, {UTF8PROC_CATEGORY_LL, 0xA641, 0x10428}, {UTF8PROC_CATEGORY_LM, 0xA67F, 0x16B40},
    {UTF8PROC_CATEGORY_LO, 0xA66E, 0x10280}, {UTF8PROC_CATEGORY_MN, 0xA66F, 0x10A01}, {UTF8PROC_CATEGORY_MC, 0xA823, 0x11000},
    {UTF8PROC_CATEGORY_ND, 0xA620, 0x104A0}, {UTF8PROC_CATEGORY_NO, 0xA830, 0x10107}, {UTF8PROC_CATEGORY_PO, 0xA673, 0x10100},
    {UTF8PROC_CATEGORY_PD, 0x2E3A, 0x10EAD}, {UTF8PROC_CATEGORY_SO, 0xA490, 0x10137}, {UTF8PROC_CATEGORY_SM, 0x2A00, 0x1D6C1},
    {UTF8PROC_CATEGORY_CF, 0x200B, 0x110BD},
};
enum {
    HAN_STAND_IN = 0x20000,
    /* PCRE2's \s takes the Mongolian vowel separator for a space; Unicode no longer does. */
    VOWEL_SEPARATOR = 0x180E,
};

static int32_t proxy_of(int32_t c, int len) {
    if (c == VOWEL_SEPARATOR) return 0x200B; /* as the separator, a format character (Cf) */
    const struct text__range *r = LOOKUP(text_newer, c);
    if (!r) return c;
    if (r->value >= HAN) return HAN_STAND_IN;
    for (size_t i = 0; i < sizeof stand_in / sizeof stand_in[0]; i++)
        if (stand_in[i].cat == r->value) return len == 3 ? stand_in[i].three : stand_in[i].four;
    return c;
}

const char *text__proxy(struct buf *tmp, const char *text, size_t n) {
    if (!text__has_byte_from_e0(text, n)) return text;
    bool copied = false;
    for (size_t i = 0; i < n;) {
        int len;
        const int32_t c = text__char(text + i, &len);
        const int32_t p = len >= 3 ? proxy_of(c, len) : c;
        if (p != c) {
            if (!copied) {
                buf_reset(tmp);
                if (buf_add(tmp, text, n) < 0) return text; /* no ceiling: cannot happen */
                copied = true;
            }
            CHECK(text__put_char(tmp->p + i, p) == len);
        }
        i += (size_t)len;
    }
    return copied ? tmp->p : text;
}

/* ---- normal forms -------------------------------------------------------------- */

static void chars_add(struct text__chars *v, int32_t c) {
    if (v->n == v->cap) xgrow((void **)&v->p, &v->cap, v->n + 1, sizeof *v->p);
    v->p[v->n++] = c;
}

static int combining(int32_t c) { return utf8proc_get_property(c)->combining_class; }

/* Canonical ordering of a run of marks: a stable sort by combining class. Long runs
 * are counted, so that a text of nothing but marks stays linear. */
static void order_marks(int32_t *p, int64_t n) {
    if (n <= 32) {
        for (int64_t i = 1; i < n; i++) {
            const int32_t c = p[i];
            const int k = combining(c);
            int64_t j = i;
            for (; j > 0 && combining(p[j - 1]) > k; j--) p[j] = p[j - 1];
            p[j] = c;
        }
        return;
    }
    int64_t at[257] = {0};
    int32_t *copy = xmalloc((size_t)n * sizeof *copy);
    memcpy(copy, p, (size_t)n * sizeof *copy);
    for (int64_t i = 0; i < n; i++) at[combining(p[i]) + 1]++;
    for (int i = 0; i < 256; i++) at[i + 1] += at[i];
    for (int64_t i = 0; i < n; i++) p[at[combining(copy[i])]++] = copy[i];
    free(copy);
}

static void order_all(int32_t *p, int64_t n) {
    for (int64_t i = 0; i < n;) {
        if (combining(p[i]) == 0) {
            i++;
            continue;
        }
        int64_t j = i;
        while (j < n && combining(p[j]) != 0) j++;
        order_marks(p + i, j - i);
        i = j;
    }
}

static int put_chars(struct buf *out, const int32_t *p, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        char b[4];
        const int k = text__put_char(b, p[i]);
        TRY(buf_add(out, b, (size_t)k));
    }
    return 0;
}

/* Orders, composes and writes the decomposed characters, and empties the list. */
static int flush(struct buf *out, struct text__chars *v, bool compose) {
    order_all(v->p, v->n);
    if (compose && v->n > 0) {
        const utf8proc_ssize_t n = utf8proc_normalize_utf32(v->p, (utf8proc_ssize_t)v->n, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        CHECK(n >= 0);
        v->n = n;
    }
    const int rc = put_chars(out, v->p, v->n);
    v->n = 0;
    return rc;
}

int text__normal_form(struct buf *out, struct text__chars *v, enum text__form form, const char *text, size_t n) {
    const bool compose = form == TEXT_NFC || form == TEXT_NFKC;
    const utf8proc_option_t opts =
        UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (form == TEXT_NFKC || form == TEXT_NFKD ? UTF8PROC_COMPAT : 0);
    v->n = 0;
    for (size_t i = 0; i < n;) {
        int len, bound = 0;
        const int32_t c = text__char(text + i, &len);
        if (c >= text_frozen[0].lo && LOOKUP(text_frozen, c)) {
            /* inert for the reference: nothing orders or composes across it */
            TRY(flush(out, v, compose));
            TRY(buf_add(out, text + i, (size_t)len));
        } else {
            int32_t parts[32]; /* the longest decomposition has 18 */
            const utf8proc_ssize_t k = utf8proc_decompose_char(c, parts, 32, opts, &bound);
            CHECK(k >= 0 && k <= 32);
            for (utf8proc_ssize_t j = 0; j < k; j++) chars_add(v, parts[j]);
        }
        i += (size_t)len;
    }
    return flush(out, v, compose);
}

int text__lowercase(struct buf *out, const char *text, size_t n) {
    for (size_t i = 0; i < n;) {
        int len;
        const int32_t c = text__char(text + i, &len);
        const struct text__range *r = c >= text_lower[0].lo ? LOOKUP(text_lower, c) : NULL;
        int32_t low[2] = {r ? c + r->value : utf8proc_tolower(c), 0};
        if (c == 0x130) { /* the one letter whose lower case is two characters */
            low[0] = 'i';
            low[1] = 0x307;
        }
        TRY(put_chars(out, low, low[1] ? 2 : 1));
        i += (size_t)len;
    }
    return 0;
}
