/* python_str.c - what Python's str does, on NUL-terminated UTF-8: the graders are written in these steps, as verl's are.
 *
 * Strings that change are owned and changed in place of *s.  Knows nothing of answers.
 * Invariant: on UTF-8 each function gives what Python 3.11's of that name gives; a byte that is no UTF-8 is a character
 * of no kind. */
#include "reward/reward_int.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <utf8proc.h>

/* ---- the time of an answer ---- */

enum { LOOK = 1 << 20 }; /* bytes of work between two looks at the clock: about a millisecond */
static _Thread_local struct {
    bool limited, over;
    double seconds, end; /* end: thread_seconds, 0: the clock has not been read, as for most answers */
    size_t bytes;
} budget;

static double thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void reward__budget_begin(double seconds) {
    budget.limited = true;
    budget.over = false;
    budget.bytes = 0;
    budget.seconds = seconds;
    budget.end = 0;
}

bool reward__budget_end(void) {
    const bool in_time = !budget.over;
    budget.limited = budget.over = false;
    return in_time;
}

void reward__exhaust(void) { budget.over = budget.limited; }

bool reward__spend(size_t bytes) {
    budget.bytes += bytes;
    if (budget.bytes >= LOOK) {
        budget.bytes = 0;
        const double now = budget.limited ? thread_seconds() : 0;
        if (budget.end == 0) budget.end = now + budget.seconds;
        if (budget.limited && now > budget.end) budget.over = true;
    }
    return !budget.over;
}

/* ---- texts ---- */

const char *reward__tail(const char *s, size_t n, int64_t n_chars, size_t *n_tail) {
    const size_t most = 4 * (size_t)n_chars, least = n > most ? n - most : 0; /* bytes, where it is no UTF-8 */
    size_t at = n;
    while (at > least && n_chars > 0) {
        at--;
        if (((unsigned char)s[at] & 0xC0) != 0x80) n_chars--; /* a first byte */
    }
    *n_tail = n - at;
    return s + at;
}

size_t reward__char_bytes(const char *p, size_t left) {
    size_t n = 1;
    while (n < left && ((unsigned char)p[n] & 0xC0) == 0x80) n++;
    return n;
}

size_t reward__char(const char *p) {
    size_t n = 1;
    while (*p && ((unsigned char)p[n] & 0xC0) == 0x80) n++;
    return n;
}

void reward__set(char **s, char *to) {
    free(*s);
    *s = to;
}

void reward__replace(char **s, const char *from, const char *to) {
    const size_t n_from = strlen(from);
    const char *p = *s, *hit = reward__spend(strlen(p)) ? strstr(p, from) : NULL;
    if (!hit) return;
    struct buf out = {0};
    for (; hit; p = hit + n_from, hit = strstr(p, from)) {
        buf_add(&out, p, (size_t)(hit - p));
        buf_adds(&out, to);
    }
    buf_adds(&out, p);
    reward__set(s, buf_take(&out));
}

const char *reward__rfind(const char *s, const char *needle) {
    const char *last = NULL;
    if (!reward__spend(strlen(s))) return NULL;
    for (const char *p = s; (p = strstr(p, needle)); p++) last = p;
    return last;
}

char *reward__balanced(const char *open) {
    int64_t depth = 0;
    if (!reward__spend(strlen(open))) return NULL;
    for (const char *p = open; *p; p++) {
        if (*p == '{') depth++;
        if (*p == '}' && --depth == 0) return xstrndup(open, (size_t)(p - open) + 1);
    }
    return NULL;
}

/* ---- classes of characters ---- */

/* The code point at p and its bytes; -1 where it is no UTF-8. */
static int32_t decode(const char *p, size_t *n) {
    int32_t c;
    const utf8proc_ssize_t got = utf8proc_iterate((const utf8proc_uint8_t *)p, (utf8proc_ssize_t)strnlen(p, 4), &c);
    *n = got > 0 ? (size_t)got : 1;
    return got > 0 ? c : -1;
}

static bool is_space(int32_t c) {
    return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

static bool is_decimal(int32_t c) { return c >= 0 && utf8proc_category(c) == UTF8PROC_CATEGORY_ND; }

static bool is_letter(int32_t c) {
    return c >= 0 && utf8proc_category(c) >= UTF8PROC_CATEGORY_LU && utf8proc_category(c) <= UTF8PROC_CATEGORY_LO;
}

/* Digits that are no decimals: superscripts, circled digits and the like (Numeric_Type=Digit). */
static bool is_other_digit(int32_t c) {
    static const int32_t ranges[][2] = {
        {0xB2, 0xB3},     {0xB9, 0xB9},       {0x1369, 0x1371},   {0x19DA, 0x19DA},   {0x2070, 0x2070},
        {0x2074, 0x2079}, {0x2080, 0x2089},   {0x2460, 0x2468},   {0x2474, 0x247C},   {0x2488, 0x2490},
        {0x24EA, 0x24EA}, {0x24F5, 0x24FD},   {0x24FF, 0x24FF},   {0x2776, 0x277E},   {0x2780, 0x2788},
        {0x278A, 0x2792}, {0x10A40, 0x10A43}, {0x10E60, 0x10E68}, {0x11052, 0x1105A}, {0x1F100, 0x1F10A},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (c >= ranges[i][0] && c <= ranges[i][1]) return true;
    return false;
}

/* Bytes of the character at p if it is whitespace (\s, isspace); 0: it is not. */
static size_t space_bytes(const char *p) {
    size_t n;
    if ((unsigned char)*p < 128) return *p && is_space(*p);
    return *p && is_space(decode(p, &n)) ? n : 0;
}

size_t reward__decimal(const char *p) {
    size_t n;
    if ((unsigned char)*p < 128) return *p >= '0' && *p <= '9';
    return *p && is_decimal(decode(p, &n)) ? n : 0;
}

bool reward__isdigit(const char *s) {
    const char *p = s;
    for (size_t n; *p; p += n) {
        const int32_t c = decode(p, &n);
        if (!is_decimal(c) && !is_other_digit(c)) return false;
    }
    return p > s;
}

int reward__letters(const char *s, int limit) {
    int32_t seen[8];
    int n_seen = 0;
    if (limit > 8) limit = 8;
    for (size_t n; *s && n_seen < limit; s += n) {
        const int32_t c = decode(s, &n);
        int i = 0;
        while (i < n_seen && seen[i] != c) i++;
        if (i == n_seen && is_letter(c)) seen[n_seen++] = c;
    }
    return n_seen;
}

bool reward__is_word(const char *p) {
    size_t n;
    if ((unsigned char)*p < 128) return *p && (isalnum((unsigned char)*p) || *p == '_');
    const int32_t c = decode(p, &n);
    return c == '_' || is_letter(c) ||
           (c >= 0 && utf8proc_category(c) >= UTF8PROC_CATEGORY_ND && utf8proc_category(c) <= UTF8PROC_CATEGORY_NO);
}

/* ---- whitespace and case ---- */

void reward__strip(char **s) {
    const char *from = *s, *end;
    if (!reward__spend(strlen(from))) return;
    for (size_t n; (n = space_bytes(from)) > 0;) from += n;
    end = from;
    for (const char *p = from; *p;) {
        const size_t n = space_bytes(p), step = n ? n : reward__char(p);
        p += step;
        if (!n) end = p;
    }
    const size_t n = (size_t)(end - from);
    memmove(*s, from, n);
    (*s)[n] = '\0';
}

char *reward__words(const char *s) {
    struct buf out = {0};
    if (!reward__spend(strlen(s))) return xstrdup("");
    for (size_t n; *s; s += n) {
        if ((n = space_bytes(s)) > 0) continue;
        if (out.n > 0) buf_addc(&out, ' ');
        for (n = 0; s[n] && !space_bytes(s + n);) n += reward__char(s + n);
        buf_add(&out, s, n);
    }
    return buf_take(&out);
}

/* Unicode's Cased and Case_Ignorable, as far as the categories define them. */
static bool is_cased(int32_t c) { return c >= 0 && (utf8proc_toupper(c) != c || utf8proc_tolower(c) != c); }
static bool is_case_ignorable(int32_t c) {
    if (c < 0) return false;
    const utf8proc_category_t k = utf8proc_category(c);
    return k == UTF8PROC_CATEGORY_MN || k == UTF8PROC_CATEGORY_ME || k == UTF8PROC_CATEGORY_CF || k == UTF8PROC_CATEGORY_LM ||
           k == UTF8PROC_CATEGORY_SK || (c < 128 && strchr("'.:", c)) || c == 0xB7 || c == 0x2018 || c == 0x2019;
}

/* Of a text from its start on: whether the last character that case does not ignore is a letter with case. */
struct case_before {
    const char *at;
    bool cased;
};
static void read_case(struct case_before *b, const char *end) {
    for (size_t n; b->at < end; b->at += n) {
        const int32_t c = decode(b->at, &n);
        if (!is_case_ignorable(c)) b->cased = is_cased(c);
    }
}

/* A capital sigma at p ends a word: a letter before it and none behind. b is read up to it, so that all of a text take the
 * time of one pass. */
static bool sigma_is_final(struct case_before *b, const char *p, size_t n_sigma) {
    size_t n;
    read_case(b, p);
    for (p += n_sigma; *p; p += n) {
        const int32_t c = decode(p, &n);
        if (!is_case_ignorable(c)) return b->cased && !is_cased(c);
    }
    return b->cased;
}

char *reward__lower(const char *s) {
    struct buf out = {0};
    struct case_before before = {.at = s};
    size_t n;
    if (!reward__spend(strlen(s))) return xstrdup("");
    for (const char *p = s; *p; p += n) {
        const int32_t c = decode(p, &n);
        utf8proc_uint8_t low[4];
        if (c < 0) buf_add(&out, p, n);
        else if (c < 128) buf_addc(&out, (char)tolower(c));
        else if (c == 0x130) buf_adds(&out, "i\xCC\x87"); /* the one letter whose lower case is two characters */
        else if (c == 0x3A3) buf_adds(&out, sigma_is_final(&before, p, n) ? "\xCF\x82" : "\xCF\x83");
        else buf_add(&out, low, (size_t)utf8proc_encode_char(utf8proc_tolower(c), low));
    }
    return buf_take(&out);
}

/* ---- numbers ---- */

/* Decimals of every script and spaces as ASCII, ends stripped: what float() reads. NULL: it has a character of no number; the four
 * separators that str.strip() takes for spaces are such ones for float(). */
static char *ascii_number(const char *s) {
    struct buf out = {0};
    for (size_t n; *s; s += n) {
        const int32_t c = decode(s, &n);
        const bool space = is_space(c) && !(c >= 0x1C && c <= 0x1F);
        if (!space && (c < 128 ? c < 0 || !strchr("0123456789_.+-eEiInNfFaAtTyY", c) : !is_decimal(c))) return buf_free(&out), NULL;
        if (space) {
            buf_addc(&out, ' ');
        } else if (c >= 128 && is_decimal(c)) {
            int value = 0; /* ten in a row from the script's zero on */
            while (value < 50 && is_decimal(c - value - 1)) value++;
            buf_addc(&out, (char)('0' + value % 10));
        } else {
            buf_add(&out, s, n);
        }
    }
    char *text = buf_take(&out);
    reward__strip(&text);
    return text;
}

/* Digits with single underscores between them, copied without; how many. */
static size_t digits(const char **p, struct buf *out) {
    size_t n = 0;
    for (; isdigit((unsigned char)**p) || (**p == '_' && n > 0 && isdigit((unsigned char)(*p)[1])); (*p)++) {
        if (**p == '_') continue;
        buf_addc(out, **p);
        n++;
    }
    return n;
}

bool reward__float(const char *s, double *x) {
    char *text = ascii_number(s);
    if (!text) return false;
    const char *p = text + (*text == '-' || *text == '+');
    struct buf plain = {0};
    if (*text == '-') buf_addc(&plain, '-');
    bool ok = strcasecmp(p, "inf") == 0 || strcasecmp(p, "infinity") == 0 || strcasecmp(p, "nan") == 0;
    if (ok) {
        buf_adds(&plain, p);
    } else {
        size_t n = digits(&p, &plain);
        if (*p == '.') {
            buf_addc(&plain, *p++);
            n += digits(&p, &plain);
        }
        ok = n > 0;
        if (ok && (*p == 'e' || *p == 'E')) {
            buf_addc(&plain, *p++);
            if (*p == '-' || *p == '+') buf_addc(&plain, *p++);
            ok = digits(&p, &plain) > 0;
        }
        ok = ok && *p == '\0';
    }
    if (ok) *x = strtod(plain.p, NULL);
    buf_free(&plain);
    free(text);
    return ok;
}
