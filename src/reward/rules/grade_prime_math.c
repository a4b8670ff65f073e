/* grade_prime_math.c - the answer of NuminaMath's rows, after verl/utils/reward_score/prime_math: what the response
 * announces, compared by grade_sympy.c, then by the rules for numbers, intervals and tuples of ToRA's grader.
 *
 * What verl gives to eval() is arithmetic for the helper here and else stays text; matrices are compared as text. verl's
 * symbolic comparison at the end of these rules never finds two answers equal (its timeout raises), so there is none.
 * Invariant: where Python's version raises, this one takes the same way out. */
#include "reward/reward_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- what the response announces ---- */

/* The last place of an ASCII marker in s, in any case; NULL: none. For texts in which ASCII letters alone have lower cases in
 * ASCII. */
static const char *last_in_any_case(const char *s, const char *marker) {
    const size_t n = strlen(s), n_marker = strlen(marker);
    const char first = (char)(*marker | 0x20);
    if (!reward__spend(n)) return NULL;
    for (const char *p = s + n - (n < n_marker ? n : n_marker); p >= s && n >= n_marker; p--)
        if ((*p | 0x20) == first && strncasecmp(p, marker, n_marker) == 0) return p;
    return NULL;
}

/* Of a text where others do (\u0130, the Kelvin sign): its lower case may have other lengths, so characters are counted. */
static const char *last_in_lower_case(const char *s, const char *marker) {
    char *low = reward__lower(s);
    const char *hit = reward__rfind(low, marker), *at = s;
    size_t chars = 0;
    for (const char *p = low; hit && p < hit; p += reward__char(p)) chars++;
    for (; chars > 0 && *at; chars--) at += reward__char(at);
    free(low);
    return hit ? at : NULL;
}

/* Behind the last marker of the response in any case, or before it; false: there is none. */
static bool cut_at(char **s, const char *marker, bool before) {
    const bool ascii = !strstr(*s, "\xC4\xB0") && !strstr(*s, "\xE2\x84\xAA");
    const char *hit = ascii ? last_in_any_case(*s, marker) : last_in_lower_case(*s, marker), *at = hit;
    if (!hit) return false;
    for (size_t chars = before ? 0 : strlen(marker); chars > 0 && *at; chars--) at += reward__char(at);
    reward__set(s, before ? xstrndup(*s, (size_t)(hit - *s)) : xstrdup(at));
    reward__strip(s);
    return true;
}

/* Between the braces of the last \boxed or \fbox, stripped; NULL: there is none, or nothing in it. */
static char *boxed(const char *s) {
    const char *at = reward__rfind(s, "\\boxed");
    if (!at) at = reward__rfind(s, "\\fbox");
    char *box = at ? reward__balanced(at) : NULL;
    const char *open = box ? strchr(box, '{') : NULL;
    char *content = open ? xstrndup(open + 1, strlen(open) - 2) : NULL;
    free(box);
    if (content) reward__strip(&content);
    if (content && *content) return content;
    free(content);
    return NULL;
}

static char *announced(const char *response) {
    static const char *const before[] = {"answer:", "answer is", "answers are"};
    static const char *const behind[] = {"is answer", "is the answer", "are answers", "are the answers"};
    static const char *const last[] = {"be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n"};
    char *s = xstrdup(response);
    for (size_t i = 0; i < sizeof before / sizeof *before; i++) cut_at(&s, before[i], false);
    for (size_t i = 0; i < sizeof behind / sizeof *behind; i++) cut_at(&s, behind[i], true);
    char *box = boxed(s);
    if (box) reward__set(&s, box);
    cut_at(&s, ". ", true);
    for (size_t i = 0; i < sizeof last / sizeof *last; i++) cut_at(&s, last[i], false);
    return s;
}

/* ---- math_equal ---- */

struct value {
    char *s;     /* str(value) */
    bool number; /* or another value that is no text */
    bool empty;  /* of those: an empty list or tuple */
};
struct equal {
    struct reward__grading *g;
    const char *pi;
    bool raised;
};

static bool stopped(const struct equal *e) { return e->raised || e->g->question; }

/* Bytes of \d+(\.\d+)? at p, 0: none. */
static size_t decimal_number(const char *p) {
    size_t n = 0, k, point;
    while ((k = reward__decimal(p + n)) > 0) n += k;
    if (n == 0 || p[n] != '.') return n;
    for (point = n++; (k = reward__decimal(p + n)) > 0;) n += k;
    return n == point + 1 ? point : n;
}

/* "30%" or "30\%", a newline may follow. */
static bool is_percentage(const char *s) {
    const size_t n = decimal_number(s);
    const char *rest = s + n;
    if (*rest == '\\') rest++;
    return n > 0 && *rest == '%' && (rest[1] == '\0' || strcmp(rest + 1, "\n") == 0);
}

/* "12_8": 12, a number in another base. */
static void read_base(struct equal *e, struct value *v) {
    double x;
    v->s[strcspn(v->s, "_")] = '\0';
    e->raised = !reward__float(v->s, &x) || !isfinite(x);
    v->number = true;
    if (!e->raised) reward__set(&v->s, xasprintf("%.0f", x == 0 ? 0 : trunc(x) + 0.0));
}

static bool ends_in_digit(const char *s, const char *end) {
    if (end == s) return false;
    do end--;
    while (end > s && ((unsigned char)*end & 0xC0) == 0x80);
    char *last = xstrndup(end, reward__char(end));
    const bool digit = reward__isdigit(last);
    free(last);
    return digit;
}

/* \pi as a number; an arithmetic expression becomes its value. */
static void read_pi(struct equal *e, struct value *v) {
    static const char name[] = "\\pi";
    struct buf out = {0};
    const char *p = v->s;
    for (const char *hit; (hit = strstr(p, name)); p = hit + strlen(name)) {
        buf_add(&out, p, (size_t)(hit - p));
        const bool digit = out.n > 0 && ends_in_digit(out.p, out.p + out.n);
        buf_addf(&out, "%s*%s", digit ? "" : "1", e->pi);
    }
    buf_adds(&out, p);
    reward__set(&v->s, buf_take(&out));
    const json_t *answer = reward__ask(e->g, json_pack("{s:s}", "value", v->s));
    const char *text = json_string_value(json_object_get(answer, "text"));
    if (!text) return;
    reward__set(&v->s, xstrdup(text));
    v->number = true;
    v->empty = json_is_true(json_object_get(answer, "empty"));
}

static struct value read_value(struct equal *e, const char *s) {
    struct value v = {.s = xstrdup(s)};
    if (*s == '$' && decimal_number(s + 1) > 0) {
        reward__set(&v.s, xstrdup(s + 1));
    } else if (is_percentage(s)) {
        reward__replace(&v.s, "\\%", "");
        reward__replace(&v.s, "%", "");
    } else if (strchr(s, '_')) {
        read_base(e, &v);
    } else if (strstr(s, "\\pi")) {
        read_pi(e, &v);
    }
    return v;
}

static bool same_text(const char *a, const char *b) {
    char *x = xstrdup(a), *y = xstrdup(b);
    reward__strip(&x);
    reward__strip(&y);
    reward__set(&x, reward__lower(x));
    reward__set(&y, reward__lower(y));
    bool same = strcmp(x, y) == 0;
    reward__set(&x, xstrdup(a));
    reward__set(&y, xstrdup(b));
    reward__replace(&x, " ", "");
    reward__replace(&y, " ", "");
    same = same || strcmp(x, y) == 0;
    free(x);
    free(y);
    return same;
}

static bool is_number(const char *s, double *x) {
    char *plain = xstrdup(s);
    reward__replace(&plain, strstr(s, "{,}") ? "{,}" : ",", "");
    const bool ok = reward__float(plain, x);
    free(plain);
    return ok;
}

static bool is_close(double a, double b) {
    const double tolerance = 1e-4, gap = fabs(a - b);
    if (a == b) return true;
    return isfinite(a) && isfinite(b) && (gap <= fabs(tolerance * a) || gap <= fabs(tolerance * b));
}

static bool starts(const char *s, const char *with) { return strncmp(s, with, strlen(with)) == 0; }
static char last_char(const char *s) { return *s ? s[strlen(s) - 1] : '\0'; }
static bool between(const char *s, char open, char close) { return *s == open && last_char(s) == close; }

/* Sympy's notation of intervals as brackets. */
static void format_interval(char **s) {
    static const struct {
        const char *name;
        char open, close;
    } kinds[] = {
        {"Interval(", '[', ']'}, {"Interval.Ropen(", '[', ')'}, {"Interval.Lopen(", '(', ']'}, {"Interval.open(", '(', ')'}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const size_t n = strlen(kinds[i].name), len = strlen(*s);
        if (!starts(*s, kinds[i].name) || len <= n || last_char(*s) != ')' || strchr(*s, '\n')) continue;
        reward__set(s, xasprintf("%c%.*s%c", kinds[i].open, (int)(len - n - 1), *s + n, kinds[i].close));
        return;
    }
}

static char *without_brackets(const char *s, bool strip) {
    size_t n = strlen(s), lead = strip ? strspn(s, "[]()") : 0;
    while (strip && n > lead && strchr("[]()", s[n - 1])) n--;
    struct buf out = {0};
    for (size_t i = lead; i < n; i++)
        if (!strchr("{}()", s[i])) buf_addc(&out, s[i]);
    return buf_take(&out);
}

static bool math_equal(struct equal *e, const char *prediction, const char *reference);

/* 1: as many parts between commas, and all equal; 0: not all; -1: another number of parts. Every part is looked at. */
static int equal_parts(struct equal *e, const char *a, size_t n_a, const char *b, size_t n_b, bool strip) {
    const char *end_a = a + n_a, *end_b = b + n_b;
    int64_t commas = 0;
    for (const char *p = a; p < end_a; p++) commas += *p == ',';
    for (const char *p = b; p < end_b; p++) commas -= *p == ',';
    if (commas != 0) return -1;
    bool all = true;
    for (;;) {
        const char *next_a = memchr(a, ',', (size_t)(end_a - a)), *next_b = memchr(b, ',', (size_t)(end_b - b));
        char *x = xstrndup(a, (size_t)((next_a ? next_a : end_a) - a)), *y = xstrndup(b, (size_t)((next_b ? next_b : end_b) - b));
        if (strip) reward__strip(&x);
        if (strip) reward__strip(&y);
        const bool same = math_equal(e, x, y);
        all = all && same;
        free(x);
        free(y);
        if (!next_a || stopped(e)) return all && !stopped(e);
        a = next_a + 1;
        b = next_b + 1;
    }
}

/* Both are text without spaces around them. */
static bool equal_structures(struct equal *e, const char *p, const char *r) {
    const bool strip = (between(p, '[', ']') && *r != '(') || (between(p, '(', ')') && *r != '[');
    char *x = without_brackets(p, strip), *y = without_brackets(r, strip);
    const bool same = strcmp(x, y) == 0;
    free(x);
    free(y);
    if (same) return true;
    const size_t n_p = strlen(p), n_r = strlen(r);
    if (n_p > 0 && n_r > 0 && strchr("([", *p) && strchr(")]", last_char(p)) && *p == *r && last_char(p) == last_char(r) &&
        equal_parts(e, p + 1, n_p - 2, r + 1, n_r > 1 ? n_r - 2 : 0, false) == 1)
        return true;
    if (stopped(e)) return false;
    if (strchr(p, ',') && strchr(r, ',')) {
        const int parts = equal_parts(e, p, n_p, r, n_r, true);
        if (parts >= 0) return parts;
    }
    if (starts(p, "Point")) {
        const char *open = strchr(p, '('), *from = open ? open + 1 : p;
        e->raised = n_r == 0;
        size_t n = strlen(from);
        while (n > 0 && ((unsigned char)from[n - 1] & 0xC0) == 0x80) n--; /* all but the last character */
        if (between(r, '(', ')') && equal_parts(e, from, n > 0 ? n - 1 : 0, r + 1, n_r > 1 ? n_r - 2 : 0, false) == 1) return true;
    }
    return false;
}

static bool equal_values(struct equal *e, struct value *p, struct value *r) {
    enum { LONGEST = 1000 };
    double x, y;
    if (!p->number) {
        const char *end = p->s;
        for (int i = 0; i < LONGEST && *end; i++) end += reward__char(end);
        p->s[end - p->s] = '\0';
    }
    if (!p->number && !r->number && same_text(p->s, r->s)) return true;
    if (is_number(p->s, &x) && is_number(r->s, &y)) return is_close(y / 100, x) || is_close(y, x) || is_close(y * 100, x);
    if (p->empty || (!p->number && !*p->s)) return false;
    reward__strip(&p->s);
    reward__strip(&r->s);
    format_interval(&p->s);
    return equal_structures(e, p->s, r->s);
}

static bool math_equal(struct equal *e, const char *prediction, const char *reference) {
    struct value p = read_value(e, prediction), r = {0};
    bool same = false;
    if (!stopped(e)) r = read_value(e, reference);
    if (!stopped(e)) same = equal_values(e, &p, &r);
    free(p.s);
    free(r.s);
    return same && !stopped(e);
}

static bool math_equal_any_pi(struct reward__grading *g, const char *prediction, const char *reference) {
    static const char *const pis[] = {"3.141592653589793", "3.14"};
    const bool has_pi = strstr(prediction, "\\pi") || strstr(reference, "\\pi");
    bool same = false;
    for (int i = 0; i < (has_pi ? 2 : 1); i++) {
        struct equal e = {.g = g, .pi = pis[i]};
        same = math_equal(&e, prediction, reference) || same;
        if (stopped(&e)) return false;
    }
    return same;
}

double reward__prime_math(struct reward__grading *g) {
    char *answer = announced(g->text);
    bool right = reward__grade_answer(g, answer, g->truth, REWARD__PRIME_MATH);
    if (!right && !g->question) right = math_equal_any_pi(g, answer, g->truth);
    free(answer);
    return right;
}
