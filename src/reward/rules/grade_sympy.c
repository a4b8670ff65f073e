/* grade_sympy.c - PRM800K's grade_answer (Lightman et al., arXiv 2305.20050) in the two forms that verl uses: its own of
 * prime_math, and mathruler's, for Geometry3K.
 *
 * Text rules decide here; pylatexenc's reading of LaTeX and sympy's difference of two expressions are requests to the helper.
 * Invariant: where Python's version raises, this one takes the same way out. */
#include "reward/reward_int.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- numbers ---- */

/* "1,234,567" -> "1234567", but not the commas of a tuple. */
static void strip_thousands(char **s) {
    /* each pass takes matches that do not overlap, as re.sub; what a pass leaves or makes is at most two passes more */
    while (reward__spend(strlen(*s))) {
        struct buf out = {0};
        bool found = false;
        for (const char *p = *s; *p;) {
            const size_t a = reward__decimal(p);
            const char *q = p + a;
            size_t n = 0, k = 0;
            if (a > 0 && *q == ',')
                while (k < 3 && reward__decimal(q + 1 + n) > 0) {
                    n += reward__decimal(q + 1 + n);
                    k++;
                }
            const char *next = q + 1 + n;
            if (k == 3 && !reward__decimal(next)) {
                const size_t tail = *next ? reward__char(next) : 0;
                buf_add(&out, p, a);
                buf_add(&out, q + 1, n + tail);
                p = next + tail;
                found = true;
            } else {
                const size_t step = a ? a : reward__char(p);
                buf_add(&out, p, step);
                p += step;
            }
        }
        reward__set(s, buf_take(&out));
        if (!found) return;
    }
}

static bool near_int(double x) { return isfinite(x) && fabs(x - nearbyint(x)) <= 1e-7; }

static bool is_int_text(const char *s) {
    char *plain = xstrdup(s);
    double x;
    strip_thousands(&plain);
    const bool ok = reward__float(plain, &x) && near_int(x);
    free(plain);
    return ok;
}

static char *int_text(double x) { return xasprintf("%.0f", x == 0 ? 0.0 : x); }

static bool is_frac(const char *s) { return reward__search(s, "^-?[0-9]+.?/0*[1-9][0-9]*.?$"); }

/* ---- normal form ---- */

/* The text of "\text{...}" alone; NULL: it is something else. */
static char *inside_text(const char *s) {
    static const char open[] = "\\text{";
    size_t n = strlen(s);
    if (n > 0 && s[n - 1] == '\n') n--;
    if (n < strlen(open) + 2 || strncmp(s, open, strlen(open)) != 0 || s[n - 1] != '}') return NULL;
    char *text = xstrndup(s + strlen(open), n - strlen(open) - 1);
    if (!strchr(text, '\n')) return text;
    free(text);
    return NULL;
}

/* MATH's normal form; the answer itself where it has none. */
static char *normal_of_math(const char *answer, enum reward__dialect d) {
    char *s = xstrdup(answer);
    reward__strip(&s);
    char *text = inside_text(s);
    if (text) {
        reward__set(&s, text);
        reward__strip(&s);
    }
    char *normal = xstrdup(s);
    if (reward__strip_string(&normal, d == REWARD__MATHRULER)) {
        free(s);
        return normal;
    }
    free(normal);
    return s;
}

/* Deletes the unit with its plural and its power: "cm^2", "inches". */
static void remove_unit(char **s, const char *unit) {
    struct buf out = {0};
    const char *p = *s, *hit;
    if (!strstr(p, unit)) return;
    for (; (hit = strstr(p, unit));) {
        buf_add(&out, p, (size_t)(hit - p));
        p = hit + strlen(unit);
        if (strncmp(p, "es", 2) == 0) p += 2;
        if (*p == 's') p++;
        p += strspn(p, " ");
        const size_t power = *p == '^' ? strspn(p + 1, "0123456789") : 0;
        if (power > 0) p += 1 + power;
    }
    buf_adds(&out, p);
    reward__set(s, buf_take(&out));
}

/* Deletes `head`, spaces between, `tail`. */
static void remove_spaced(char **s, const char *head, const char *tail, const char *by) {
    struct buf out = {0};
    const char *p = *s, *hit;
    if (!strstr(p, head)) return;
    while ((hit = strstr(p, head))) {
        const char *end = hit + strlen(head);
        end += strspn(end, " ");
        const bool found = strncmp(end, tail, strlen(tail)) == 0;
        buf_add(&out, p, (size_t)(hit - p));
        if (found) buf_adds(&out, by);
        else buf_addc(&out, *hit);
        p = found ? end + strlen(tail) : hit + 1;
    }
    buf_adds(&out, p);
    reward__set(s, buf_take(&out));
}

/* "7 3/4" -> "7+3/4" */
static void add_mixed_number(char **s) {
    struct buf out = {0};
    for (const char *p = *s; *p;) {
        const size_t spaces = isdigit((unsigned char)*p) ? strspn(p + 1, " ") : 0;
        if (spaces > 0 && isdigit((unsigned char)p[1 + spaces])) {
            buf_addf(&out, "%c+%c", *p, p[1 + spaces]);
            p += 2 + spaces;
        } else {
            buf_addc(&out, *p++);
        }
    }
    reward__set(s, buf_take(&out));
}

/* LaTeX as plain text, through pylatexenc; what it cannot read stays. */
static void read_latex(struct reward__grading *g, char **s) {
    static const char *const signs[][2] = {{"√", "sqrt"}, {"π", "pi"}, {"∞", "inf"}, {"∪", "U"}, {"·", "*"}, {"×", "*"}};
    char *latex = xstrdup(*s);
    reward__replace(&latex, "\\tfrac", "\\frac");
    reward__replace(&latex, "\\dfrac", "\\frac");
    reward__replace(&latex, "\\frac", " \\frac");
    const char *text = json_string_value(json_object_get(reward__ask(g, json_pack("{s:s}", "latex", latex)), "text"));
    free(latex);
    if (!text) return;
    reward__set(s, xstrdup(text));
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) reward__replace(s, signs[i][0], signs[i][1]);
    reward__strip(s);
}

static void remove_words(char **s, enum reward__dialect d) {
    static const char *const replaced[][2] = {
        {"\\%", "%"},         {"\\$", "$"},           {"$", ""}, {"%", ""}, {" or ", " , "}, {" and ", " , "}, {"million", "*10^6"},
        {"billion", "*10^9"}, {"trillion", "*10^12"},
    };
    static const char *const units[] = {"degree", "cm",    "centimeter", "meter", "mile", "second", "minute", "hour", "day",
                                        "week",   "month", "year",       "foot",  "feet", "inch",   "yard",   "liter"};
    const size_t n_units = sizeof units / sizeof *units - (d == REWARD__MATHRULER ? 1 : 0); /* it does not know the liter */
    for (size_t i = 0; i < sizeof replaced / sizeof *replaced; i++) reward__replace(s, replaced[i][0], replaced[i][1]);
    for (size_t i = 0; i < n_units; i++) remove_unit(s, units[i]);
    remove_spaced(s, "^", "\\circ", "");
}

static char *normal(struct reward__grading *g, const char *expr, enum reward__dialect d) {
    char *s = inside_text(expr);
    double x;
    if (!s) s = xstrdup(expr);
    remove_words(&s, d);
    const size_t n = strlen(s);
    if (n > 0 && *s == '{' && s[n - 1] == '}') reward__set(&s, n > 1 ? xstrndup(s + 1, n - 2) : xstrdup(""));
    remove_spaced(&s, ",\\!", "", "");
    if (reward__float(s, &x) && near_int(x)) reward__set(&s, int_text(nearbyint(x)));
    if (strchr(s, '\\')) read_latex(g, &s);
    remove_spaced(&s, "-", "", "-");
    add_mixed_number(&s);
    if (d == REWARD__MATHRULER) {
        reward__replace(&s, " ", "");
        reward__replace(&s, "{", "");
        reward__replace(&s, "}", "");
    }
    reward__set(&s, reward__lower(s));
    if (is_int_text(s)) {
        reward__replace(&s, ",", "");
        if (reward__float(s, &x)) reward__set(&s, int_text(trunc(x)));
    }
    return s;
}

/* ---- comparison ---- */

struct elements {
    char **v;
    int64_t n, cap;
};

static void free_elements(struct elements *e) {
    for (int64_t i = 0; i < e->n; i++) free(e->v[i]);
    free(e->v);
}

static void add_element(struct elements *e, const char *p, size_t n, bool strip) {
    xgrow((void **)&e->v, &e->cap, e->n + 1, sizeof *e->v);
    e->v[e->n] = xstrndup(p, n);
    if (strip) reward__strip(&e->v[e->n]);
    e->n++;
}

/* The elements of a tuple or interval; anything else is one, "" none. */
static struct elements elements_of(const char *expr) {
    static const char brackets[] = "()[]";
    struct elements e = {0};
    char *s = xstrdup(expr);
    strip_thousands(&s);
    const size_t n = strlen(s);
    if (n > 2 && strchr(brackets, *s) && strchr(brackets, s[n - 1]) && 1 + strcspn(s + 1, brackets) == n - 1) {
        const char *p = s + 1, *end = s + n - 1;
        for (const char *comma; (comma = memchr(p, ',', (size_t)(end - p))); p = comma + 1)
            add_element(&e, p, (size_t)(comma - p), true);
        add_element(&e, p, (size_t)(end - p), true);
    } else if (n > 0) {
        add_element(&e, s, n, false);
    }
    free(s);
    return e;
}

/* Text of more than two letters, and powers that sympy might hang on, are not given to it. */
static bool may_evaluate(const char *expr) {
    char *s = xstrdup(expr);
    reward__replace(&s, "sqrt", "");
    reward__replace(&s, "frac", "");
    const bool ok = reward__letters(s, 3) < 3 && !strstr(expr, "^{") && !strstr(expr, "^(") &&
                    !reward__search(expr, "\\^[0-9]+\\^|\\^[0-9][0-9]+");
    free(s);
    return ok;
}

static bool equal_under_sympy(struct reward__grading *g, const char *truth, const char *given) {
    char *expr = xasprintf("(%s)-(%s)", truth, given);
    const json_t *answer = may_evaluate(expr) ? reward__ask(g, json_pack("{s:s}", "zero", expr)) : NULL;
    free(expr);
    return json_is_true(json_object_get(answer, "zero"));
}

static bool equal_elements(struct reward__grading *g, const char *truth, const char *given) {
    if (is_frac(truth) && is_frac(given)) return strcmp(truth, given) == 0; /* fractions are to be reduced */
    if (is_int_text(truth) != is_int_text(given)) return false;             /* and integers to be integers */
    return equal_under_sympy(g, truth, given);
}

/* Both in normal form. */
static bool equal_normal(struct reward__grading *g, const char *truth, const char *given) {
    if (strcmp(truth, given) == 0) return true;
    if (!*given) return false;
    struct elements t = elements_of(truth), e = elements_of(given);
    const bool other_ends = t.n > 1 && (*truth != *given || truth[strlen(truth) - 1] != given[strlen(given) - 1]);
    bool same = !other_ends && t.n == e.n;
    for (int64_t i = 0; same && i < t.n; i++) same = equal_elements(g, t.v[i], e.v[i]);
    free_elements(&t);
    free_elements(&e);
    return same;
}

bool reward__grade_answer(struct reward__grading *g, const char *given, const char *truth, enum reward__dialect d) {
    char *a = normal_of_math(truth, d), *b = normal_of_math(given, d);
    bool same = strcmp(a, b) == 0;
    if (!same) {
        reward__set(&a, normal(g, truth, d));
        reward__set(&b, normal(g, given, d));
        same = !g->question && equal_normal(g, a, b);
    }
    free(a);
    free(b);
    return same && !g->question;
}

double reward__geo3k(struct reward__grading *g) {
    static const char open[] = "\\boxed{";
    const char *at = reward__rfind(g->text, open);
    char *box = at ? reward__balanced(at) : NULL;
    char *given = box ? xstrndup(box + strlen(open), strlen(box) - strlen(open) - 1) : xstrdup("None"); /* mathruler's */
    free(box);
    reward__strip(&given);
    const double right = reward__grade_answer(g, given, g->truth, REWARD__MATHRULER), format_score = 0.1;
    free(given);
    return (1 - format_score) * right + format_score * reward__geo3k_form(g->text);
}
