/* grade_math.c - the graders of MATH and of DAPO's math data, after
 * verl/utils/reward_score/{math_reward,math_dapo}.py: a boxed or announced answer,
 * brought to a normal form by text rules, compared as a string.
 * Invariant: where Python's version raises, this one takes the same way out. */
#include "reward/reward_int.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* ---- MATH: \boxed{} and strip_string (Hendrycks et al., arXiv 2103.03874) ---- */

/* The content of the last box, NULL if there is none or it is malformed. */
static char *last_box(const char *s) {
    const char *spaced = reward__rfind(s, "\\boxed ");
    if (spaced) { /* "\boxed 5$": up to the next dollar */
        const char *from = spaced + strlen("\\boxed ");
        return xstrndup(from, strcspn(from, "$"));
    }
    const char *at = reward__rfind(s, "\\boxed");
    if (!at) return NULL; /* an \fbox is found too, but its content never accepted */
    char *box = reward__balanced(at), *content = NULL;
    const size_t n_left = strlen("\\boxed{");
    if (box && strncmp(box, "\\boxed{", n_left) == 0) content = xstrndup(box + n_left, strlen(box) - n_left - 1);
    free(box);
    return content;
}

/* \sqrt3 -> \sqrt{3}. False where Python would index an empty string. */
static bool fix_sqrt(char **s) {
    static const char cmd[] = "\\sqrt";
    struct buf out = {0};
    const char *p = *s, *hit;
    bool ok = true;
    while (ok && (hit = strstr(p, cmd))) {
        buf_add(&out, p, (size_t)(hit - p) + strlen(cmd));
        p = hit + strlen(cmd);
        if (*p == '{') continue;
        const size_t n = reward__char(p);
        ok = *p != '\0' && strncmp(p, cmd, strlen(cmd)) != 0;
        if (ok) {
            buf_addf(&out, "{%.*s}", (int)n, p);
            p += n;
        }
    }
    buf_adds(&out, p);
    reward__set(s, buf_take(&out));
    return ok;
}

/* \frac12 -> \frac{1}{2}, \frac1{72} -> \frac{1}{72}.  A piece of one character
 * leaves the whole string as it was; an empty piece is an error. */
static bool fix_fracs(char **s) {
    static const char cmd[] = "\\frac";
    const size_t n_cmd = strlen(cmd);
    const char *p = strstr(*s, cmd);
    if (!p) return true;
    struct buf out = {0};
    buf_add(&out, *s, (size_t)(p - *s));
    while (p) {
        const char *piece = p + n_cmd, *next = strstr(piece, cmd);
        const size_t n = next ? (size_t)(next - piece) : strlen(piece);
        if (n == 0) return buf_free(&out), false;
        const size_t n_a = reward__char_bytes(piece, n);
        buf_adds(&out, cmd);
        if (*piece == '{') {
            buf_add(&out, piece, n);
        } else if (n_a == n) {
            return buf_free(&out), true;
        } else {
            const char *b = piece + n_a;
            const size_t n_b = reward__char_bytes(b, n - n_a);
            buf_addf(&out, "{%.*s}", (int)n_a, piece);
            if (*b == '{') buf_add(&out, b, n - n_a);
            else buf_addf(&out, "{%.*s}%.*s", (int)n_b, b, (int)(n - n_a - n_b), b + n_b);
        }
        p = next;
    }
    reward__set(s, buf_take(&out));
    return true;
}

/* Length of an integer as Python prints it (no +, no leading zero, no -0). */
static size_t canonical_int(const char *p) {
    enum { LONGEST = 4300 }; /* digits of an int that Python reads */
    const size_t sign = *p == '-', digits = strspn(p + sign, "0123456789");
    if (digits == 0 || digits > LONGEST || (p[sign] == '0' && (digits > 1 || sign))) return 0;
    return sign + digits;
}

/* a/b of two integers -> \frac{a}{b} */
static void fix_a_slash_b(char **s) {
    const size_t a = canonical_int(*s);
    if (a == 0 || (*s)[a] != '/') return;
    const char *b = *s + a + 1;
    const size_t n_b = canonical_int(b);
    if (n_b == 0 || b[n_b] != '\0') return;
    char *frac = xasprintf("\\frac{%.*s}{%s}", (int)a, *s, b);
    reward__set(s, frac);
}

/* "k = 7" -> " 7": one '=', with at most 2 characters before it. */
static void drop_short_left_side(char **s) {
    const char *eq = strchr(*s, '=');
    if (!eq || strchr(eq + 1, '=')) return;
    int64_t chars = 0;
    for (const char *p = *s; p < eq; p += reward__char_bytes(p, (size_t)(eq - p))) chars++;
    if (chars > 2) return;
    char *right = xstrdup(eq + 1);
    reward__set(s, right);
}

bool reward__strip_string(char **s, bool any_percent) {
    static const char *const first[][2] = {
        {"\n", ""},     {"\\!", ""},     {"\\\\", "\\"},    {"tfrac", "frac"}, {"dfrac", "frac"},
        {"\\left", ""}, {"\\right", ""}, {"^{\\circ}", ""}, {"^\\circ", ""},   {"\\$", ""},
    };
    for (size_t i = 0; i < sizeof first / sizeof *first; i++) reward__replace(s, first[i][0], first[i][1]);
    char *unit = strstr(*s, "\\text{ "); /* units on the right */
    if (unit) {
        if (strstr(unit + 1, "\\text{ ")) return false;
        *unit = '\0';
    }
    if (!any_percent) reward__replace(s, "\\\\%", "");
    reward__replace(s, "\\%", "");
    if (any_percent) reward__replace(s, "%", "");
    reward__replace(s, " .", " 0.");
    reward__replace(s, "{.", "{0.");
    if (**s == '\0') return true;
    if (**s == '.') {
        char *with_zero = xasprintf("0%s", *s);
        reward__set(s, with_zero);
    }
    drop_short_left_side(s);
    if (!fix_sqrt(s)) return false;
    reward__replace(s, " ", "");
    if (!fix_fracs(s)) return false;
    if (strcmp(*s, "0.5") == 0) {
        reward__set(s, xstrdup("\\frac{1}{2}"));
    }
    fix_a_slash_b(s);
    return true;
}

/* Equal in normal form; where one has none, equal as they stand. */
static bool equivalent(const char *a, const char *b) {
    char *na = xstrdup(a), *nb = xstrdup(b);
    const bool normal = reward__strip_string(&na, false) && reward__strip_string(&nb, false);
    const bool same = normal ? strcmp(na, nb) == 0 : strcmp(a, b) == 0;
    free(na);
    free(nb);
    return same;
}

double reward__math(const char *s, size_t n, const char *truth) {
    char *text = xstrndup(s, n), *answer = last_box(text);
    const bool right = answer && equivalent(answer, truth);
    free(text);
    free(answer);
    return right;
}

/* ---- DAPO: "Answer: ..." in Minerva's normal form (Lewkowycz et al., arXiv 2206.14858) ---- */

#define WINDOW_CHARS 300
#define BOX_WINDOW_CHARS 100
#define INVALID "[INVALID]"

static const char *const minerva_replaced[][2] = {
    {"an ", ""}, {"a ", ""},       {".$", "$"},           {"\\$", ""},          {"\\ ", ""},
    {" ", ""},   {"mbox", "text"}, {",\\text{and}", ","}, {"\\text{and}", ","}, {"\\text{m}", "\\text{}"},
};
static const char *const minerva_removed[] = {
    "square",    "ways",        "integers",   "dollars",    "mph",        "inches",   "hours",           "km",        "units",
    "\\ldots",   "sue",         "points",     "feet",       "minutes",    "digits",   "cents",           "degrees",   "cm",
    "gm",        "pounds",      "meters",     "meals",      "edges",      "students", "childrentickets", "multiples", "\\text{s}",
    "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}",    "^\\circ",   "^{\\circ}",
    "\\;",       ",\\!",        "{,}",        "\"",         "\\dots",
};
static const char *const minerva_patterns[][2] = {
    {"(.*?)(\\$)(.*?)(\\$)(.*)", "$$${3}$$"}, {"(\\\\text\\{)(.*?)(\\})", "${2}"}, {"(\\\\textbf\\{)(.*?)(\\})", "${2}"},
    {"(\\\\overline\\{)(.*?)(\\})", "${2}"},  {"(\\\\boxed\\{)(.*)(\\})", "${2}"}, {"(frac)([^{])(.)", "frac{${2}}{${3}}"},
    {"(sqrt)([^{])", "sqrt{${2}}"},
};

char *reward__minerva_normal(const char *answer) {
    const char *eq = strrchr(answer, '=');
    char *s = xstrdup(eq ? eq + 1 : answer);
    for (size_t i = 0; i < sizeof minerva_replaced / sizeof *minerva_replaced; i++)
        reward__replace(&s, minerva_replaced[i][0], minerva_replaced[i][1]);
    for (size_t i = 0; i < sizeof minerva_removed / sizeof *minerva_removed; i++) reward__replace(&s, minerva_removed[i], "");
    for (size_t i = 0; i < sizeof minerva_patterns / sizeof *minerva_patterns; i++)
        reward__sub(&s, minerva_patterns[i][0], minerva_patterns[i][1]);
    reward__replace(&s, "$", "");
    char *plain = xstrdup(s);
    reward__replace(&plain, ",", "");
    if (reward__isdigit(plain)) reward__set(&s, plain);
    else free(plain);
    reward__strip(&s);
    return s;
}

/* The content of the last \boxed{...} in the last 100 characters, NULL if none. */
static char *strict_box(const char *s, size_t n) {
    size_t n_tail;
    const char *tail = reward__tail(s, n, BOX_WINDOW_CHARS, &n_tail);
    char *text = xstrndup(tail, n_tail), *content = NULL;
    const char *at = reward__rfind(text, "\\boxed{");
    char *box = at ? reward__balanced(at) : NULL;
    const size_t n_left = strlen("\\boxed{");
    if (box) content = xstrndup(box + n_left, strlen(box) - n_left - 1);
    free(box);
    free(text);
    return content;
}

double reward__math_dapo(const char *s, size_t n, const char *truth, bool strict_box_verify, char **pred) {
    size_t n_tail;
    const char *tail = reward__tail(s, n, WINDOW_CHARS, &n_tail);
    if (strict_box_verify) {
        *pred = strict_box(tail, n_tail);
        return *pred && strcmp(*pred, truth) == 0 ? 1 : -1;
    }
    char *answer = reward__last_group(tail, n_tail, "(?i)Answer" PY_SPACE "*:" PY_SPACE "*([^\\n]+)");
    char *want = reward__minerva_normal(truth);
    *pred = reward__minerva_normal(answer ? answer : INVALID);
    bool right = strcmp(*pred, want) == 0;
    if (strcmp(*pred, INVALID) == 0) { /* nothing announced: a box counts, word for word */
        char *box = strict_box(tail, n_tail);
        if (box) {
            right = strcmp(box, truth) == 0;
            free(*pred);
            *pred = box;
        }
    }
    free(answer);
    free(want);
    return right ? 1 : -1;
}
