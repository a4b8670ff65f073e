/* regex.c - the regular expressions of tokenizer.json, run by PCRE2.
 *
 * The files are written for Oniguruma.  Where the two libraries read the same
 * text differently it is rewritten (\w, \v, \uHHHH, {,n}, script names, [A&&[B]])
 * or, where that cannot be exact, refused: other set operations, inline flags, back
 * references, word boundaries, case folding to several characters.  The rest means the same in
 * both: leftmost match, alternatives in order, greedy unless marked.
 * Characters whose properties differ are handled by text__proxy, not here.
 * Invariant: a pattern that compiles here finds what Oniguruma finds. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/text_int.h"

#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct text__regex {
    pcre2_code *code; /* NULL: a plain string */
    bool jit;
    char *literal;
    size_t literal_n;
};
struct text__regex_scratch {
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* ---- translation --------------------------------------------------------------- */

struct translate {
    const char *pattern, *p, *end;
    const char *where;
    struct buf out;
    int64_t depth;         /* open groups */
    int64_t caseless_from; /* depth of the outermost (?i: group; 0: none */
    char last_letter;      /* of a case-insensitive literal, for the check of folds */
};

static int refuse(const struct translate *t, const char *feature) {
    FAIL(ERR_UNSUPPORTED, "%s: unsupported regular expression feature: %s, in the pattern %.200s", t->where, feature, t->pattern);
}

/* \w of Oniguruma: letters, marks, decimal and letter numbers, connectors, the
 * circled letters, and by a peculiarity of its table these five of Latin-1. */
#define WORD_SET                                                                                          \
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}\\x{24B6}-\\x{24E9}\\x{1F130}-" \
    "\\x{1F149}"                                                                                          \
    "\\x{1F150}-\\x{1F169}\\x{1F170}-\\x{1F189}"

static bool is_category(const char *s, size_t n) {
    static const char names[] = "|C|Cc|Cf|Cn|Co|Cs|L|Ll|Lm|Lo|Lt|Lu|M|Mc|Me|Mn|N|Nd|Nl|No|P|Pc|Pd|Pe|Pf|Pi|Po|Ps|"
                                "S|Sc|Sk|Sm|So|Z|Zl|Zp|Zs|";
    char key[8];
    if (n > 2) return false;
    const int k = snprintf(key, sizeof key, "|%.*s|", (int)n, s);
    return k > 2 && strstr(names, key) != NULL;
}

/* At the p or P of \p{Name}. Scripts are matched by Script, not by Script_Extensions. */
static int property(struct translate *t) {
    const char kind = *t->p++;
    if (t->p >= t->end || *t->p != '{') return refuse(t, "\\p without braces");
    const char *name = ++t->p;
    while (t->p < t->end && *t->p != '}') t->p++;
    if (t->p >= t->end) return refuse(t, "\\p without a closing brace");
    size_t n = (size_t)(t->p++ - name);
    const bool negated = n > 0 && name[0] == '^';
    if (negated) {
        name++;
        n--;
    }
    for (size_t i = 0; i < n; i++) {
        const char c = name[i];
        if (!((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_')) return refuse(t, "a property name");
    }
    if (n == 0) return refuse(t, "an empty property name");
    const char p = negated ? (kind == 'p' ? 'P' : 'p') : kind;
    return buf_addf(&t->out, is_category(name, n) ? "\\%c{%.*s}" : "\\%c{sc:%.*s}", p, (int)n, name);
}

static int code_point(struct translate *t, int64_t digits_min, int64_t digits_max, bool braces) {
    int64_t v = 0, n = 0;
    for (; t->p < t->end && n < digits_max; t->p++, n++) {
        const char c = *t->p;
        if (c >= '0' && c <= '9') v = v * 16 + (c - '0');
        else if (c >= 'a' && c <= 'f') v = v * 16 + (c - 'a' + 10);
        else if (c >= 'A' && c <= 'F') v = v * 16 + (c - 'A' + 10);
        else break;
    }
    if (n < digits_min) return refuse(t, "a character number");
    if (braces && (t->p >= t->end || *t->p++ != '}')) return refuse(t, "a character number without a closing brace");
    /* \x80 to \xff are bytes, not characters, to Oniguruma */
    if (v > 0x10FFFF || (v >= 0xD800 && v <= 0xDFFF) || (!braces && digits_max == 2 && v >= 0x80))
        return refuse(t, "a character number that is no character");
    return buf_addf(&t->out, "\\x{%llX}", (long long)v);
}

/* After a backslash; set: inside [...]. */
static int translate_escape(struct translate *t, bool set) {
    if (t->p >= t->end) return refuse(t, "a backslash at the end");
    const char c = *t->p;
    switch (c) {
    case 'p':
    case 'P': return property(t);
    case 'r':
    case 'n':
    case 't':
    case 'f':
    case 'a':
    case 'e':
    case 's':
    case 'S':
    case 'd':
    case 'D': t->p++; return buf_addf(&t->out, "\\%c", c);
    case 'v': t->p++; return buf_adds(&t->out, "\\x{B}");
    case 'w': t->p++; return buf_adds(&t->out, set ? WORD_SET : "[" WORD_SET "]");
    case 'W':
        if (set) return refuse(t, "\\W in a set");
        t->p++;
        return buf_adds(&t->out, "[^" WORD_SET "]");
    case 'u': t->p++; return code_point(t, 4, 4, false);
    case 'x':
        t->p++;
        if (t->p < t->end && *t->p == '{') {
            t->p++;
            return code_point(t, 1, 8, true);
        }
        return code_point(t, 1, 2, false);
    case 'A':
    case 'z':
    case 'Z':
        if (set) return refuse(t, "an anchor in a set");
        t->p++;
        return buf_addf(&t->out, "\\%c", c);
    default: break;
    }
    if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) {
        const char what[] = {'\\', c, 0};
        return refuse(t, what);
    }
    if ((uint8_t)c >= 0x80) return 0; /* an escaped character is itself; the caller copies it */
    t->p++;
    return buf_addf(&t->out, "\\%c", c);
}

static int translate_set(struct translate *t, bool inner);

/* At the && of [A&&[B]], with "[A" written from `from` on: (?:(?=[B])[A]), a character of both. */
static int translate_intersection(struct translate *t, size_t from) {
    struct buf left = {0};
    int rc;
    t->p += 2;
    if (t->p >= t->end || *t->p != '[') return refuse(t, "an intersection with other than one set in brackets");
    t->p++;
    TRYG(buf_add(&left, t->out.p + from, t->out.n - from), done);
    t->out.n = from;
    TRYG(buf_adds(&t->out, "(?:(?="), done);
    TRYG(translate_set(t, true), done);
    if (t->p >= t->end || *t->p != ']') {
        rc = refuse(t, "an intersection with other than one set in brackets");
        goto done;
    }
    t->p++;
    TRYG(buf_addc(&t->out, ')'), done);
    TRYG(buf_add(&t->out, left.p, left.n), done);
    TRYG(buf_adds(&t->out, "])"), done);
    rc = 0;
done:
    buf_free(&left);
    return rc;
}

/* After the bracket; inner: of an intersection. */
static int translate_set(struct translate *t, bool inner) {
    const size_t from = t->out.n;
    bool negated = false;
    TRY(buf_addc(&t->out, '['));
    if (t->p < t->end && *t->p == '^') {
        t->p++;
        negated = true;
        TRY(buf_addc(&t->out, '^'));
    }
    bool any = false;
    while (t->p < t->end && *t->p != ']') {
        const char c = *t->p;
        if (c == '[') return refuse(t, "a set within a set");
        if (c == '&' && t->end - t->p > 1 && t->p[1] == '&') {
            if (inner || negated || !any) return refuse(t, "an intersection of sets that is not [A&&[B]]");
            return translate_intersection(t, from);
        }
        if ((uint8_t)c >= 0x80 && t->caseless_from) return refuse(t, "case-insensitive characters beyond ASCII");
        t->p++;
        if (c == '\\') TRY(translate_escape(t, true));
        else TRY(buf_addc(&t->out, c));
        any = true;
    }
    if (t->p >= t->end || !any) return refuse(t, "a set that is empty or does not end");
    t->p++;
    return buf_addc(&t->out, ']');
}

static int translate_group(struct translate *t) {
    static const char *const same[] = {"?:", "?=", "?!", "?<=", "?<!", "?>"};
    TRY(buf_addc(&t->out, '('));
    t->depth++;
    if (t->p >= t->end || *t->p != '?') return buf_adds(&t->out, "?:"); /* captures are not used */
    const size_t left = (size_t)(t->end - t->p);
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        const size_t n = strlen(same[i]);
        if (left < n || memcmp(t->p, same[i], n) != 0) continue;
        t->p += n;
        return buf_adds(&t->out, same[i]);
    }
    if (left >= 3 && memcmp(t->p, "?i:", 3) == 0) {
        t->p += 3;
        if (!t->caseless_from) t->caseless_from = t->depth;
        return buf_adds(&t->out, "?i:");
    }
    return refuse(t, "a group that is neither plain, (?:, (?i:, (?>, nor a look-around");
}

/* At a brace: an interval, or a plain brace where it is none. */
static int translate_brace(struct translate *t) {
    const char *p = t->p + 1;
    int64_t lo = 0, hi = -1;
    const char *digits = p;
    for (; p < t->end && *p >= '0' && *p <= '9' && lo < 100000; p++) lo = lo * 10 + (*p - '0');
    const bool has_lo = p > digits;
    bool comma = false;
    if (p < t->end && *p == ',') {
        comma = true;
        digits = ++p;
        int64_t v = 0;
        for (; p < t->end && *p >= '0' && *p <= '9' && v < 100000; p++) v = v * 10 + (*p - '0');
        if (p > digits) hi = v;
    }
    if (p >= t->end || *p != '}' || (!has_lo && hi < 0)) {
        t->p++;
        return buf_adds(&t->out, "\\{");
    }
    p++;
    if (p < t->end && *p == '+') return refuse(t, "a possessive interval");
    if (p < t->end && *p == '?' && !comma) return refuse(t, "a lazy fixed count");
    if (hi >= 0 && hi < lo) return refuse(t, "an interval that runs backwards");
    t->p = p;
    if (!comma) return buf_addf(&t->out, "{%lld}", (long long)lo);
    if (hi < 0) return buf_addf(&t->out, "{%lld,}", (long long)lo);
    return buf_addf(&t->out, "{%lld,%lld}", (long long)lo, (long long)hi);
}

/* Oniguruma folds some pairs of letters to one character (the ligatures of f and s,
 * the sharp s) and PCRE2 does not. */
static int check_fold(struct translate *t, char c) {
    static const char *const pairs[] = {"ff", "fi", "fl", "ss", "st"};
    const char low = (char)(c >= 'A' && c <= 'Z' ? c + 32 : c), prev = t->last_letter;
    if ((uint8_t)c >= 0x80) return refuse(t, "case-insensitive characters beyond ASCII");
    t->last_letter = low;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        if (pairs[i][0] == prev && pairs[i][1] == low) return refuse(t, "case-insensitive letters that fold to one");
    return 0;
}

static int translate(struct translate *t) {
    while (t->p < t->end) {
        const char c = *t->p;
        if (c == '{') {
            TRY(translate_brace(t));
            continue;
        }
        t->p++;
        switch (c) {
        case '\\':
            t->last_letter = 0;
            TRY(translate_escape(t, false));
            break;
        case '[':
            t->last_letter = 0;
            TRY(translate_set(t, false));
            break;
        case '(': TRY(translate_group(t)); break;
        case ')':
            if (t->depth == 0) return refuse(t, "a closing bracket without its opening");
            if (t->caseless_from == t->depth) t->caseless_from = 0;
            t->depth--;
            TRY(buf_addc(&t->out, c));
            break;
        case '|':
            t->last_letter = 0;
            TRY(buf_addc(&t->out, c));
            break;
        case '\0': return refuse(t, "a NUL");
        default:
            if (t->caseless_from) TRY(check_fold(t, c));
            TRY(buf_addc(&t->out, c));
        }
    }
    if (t->depth != 0) return refuse(t, "an opening bracket without its closing");
    return 0;
}

/* ---- compiling ------------------------------------------------------------------- */

static int compile(struct text__regex *r, const struct translate *t) {
    int err;
    PCRE2_SIZE at;
    pcre2_compile_context *cc = pcre2_compile_context_create(NULL);
    CHECK(cc);
    pcre2_set_newline(cc, PCRE2_NEWLINE_LF);
    /* MULTILINE: ^ and $ are those of lines in Oniguruma */
    r->code = pcre2_compile((PCRE2_SPTR)t->out.p, t->out.n, PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &err, &at, cc);
    pcre2_compile_context_free(cc);
    if (!r->code) {
        char msg[200] = "";
        pcre2_get_error_message(err, (PCRE2_UCHAR *)msg, sizeof msg);
        return refuse(t, msg);
    }
    r->jit = pcre2_jit_compile(r->code, PCRE2_JIT_COMPLETE) == 0; /* some systems forbid it */
    return 0;
}

int text__regex_create(struct text__regex **out, const char *pattern, size_t n, const char *where) {
    struct translate t = {.pattern = pattern, .p = pattern, .end = pattern + n, .where = where};
    struct text__regex *r = xcalloc(1, sizeof *r);
    int rc = n == 0 ? refuse(&t, "an empty pattern") : translate(&t);
    if (rc == 0) rc = compile(r, &t);
    buf_free(&t.out);
    if (rc < 0) {
        free(r);
        return err_pass(rc, __FILE__, __LINE__);
    }
    *out = r;
    return 0;
}

int text__regex_create_literal(struct text__regex **out, const char *s, size_t n, const char *where) {
    if (n == 0) FAIL(ERR_UNSUPPORTED, "%s: unsupported: an empty string as a pattern", where);
    struct text__regex *r = xcalloc(1, sizeof *r);
    r->literal = xstrndup(s, n);
    r->literal_n = n;
    *out = r;
    return 0;
}

bool text__regex_is_literal(const struct text__regex *r) { return r->literal != NULL; }

void text__regex_destroy(struct text__regex *r) {
    if (!r) return;
    pcre2_code_free(r->code);
    free(r->literal);
    free(r);
}

/* ---- matching ---------------------------------------------------------------------- */

int text__regex_scratch_create(struct text__regex_scratch **out) {
    struct text__regex_scratch *s = xcalloc(1, sizeof *s);
    s->match = pcre2_match_data_create(1, NULL);
    s->context = pcre2_match_context_create(NULL);
    s->stack = pcre2_jit_stack_create(32 << 10, 8 << 20, NULL);
    if (!s->match || !s->context || !s->stack) {
        text__regex_scratch_destroy(s);
        FAIL(ERR_NOMEM, "tokenizer: no memory for regular expressions");
    }
    pcre2_jit_stack_assign(s->context, NULL, s->stack);
    *out = s;
    return 0;
}

void text__regex_scratch_destroy(struct text__regex_scratch *s) {
    if (!s) return;
    pcre2_jit_stack_free(s->stack);
    pcre2_match_context_free(s->context);
    pcre2_match_data_free(s->match);
    free(s);
}

/* The first match from it->from on. */
static int search(const struct text__regex *r, struct text__regex_scratch *s, const char *subject, size_t n,
                  struct text__regex_iter *it) {
    const size_t from = it->from;
    if (!r->code) {
        const char *at = memmem(subject + from, n - from, r->literal, r->literal_n);
        if (!at) return 0;
        it->lo = at - subject;
        it->hi = it->lo + (int64_t)r->literal_n;
        return 1;
    }
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (r->jit) rc = pcre2_jit_match(r->code, (PCRE2_SPTR)subject, n, from, 0, s->match, s->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its frames on the heap */
        rc = pcre2_match(r->code, (PCRE2_SPTR)subject, n, from, PCRE2_NO_JIT | PCRE2_NO_UTF_CHECK, s->match, s->context);
    if (rc == PCRE2_ERROR_NOMATCH) return 0;
    if (rc < 0) {
        char msg[200] = "";
        pcre2_get_error_message(rc, (PCRE2_UCHAR *)msg, sizeof msg);
        FAIL(ERR_INPUT, "tokenizer: its regular expression gave up on this text: %s", msg);
    }
    const PCRE2_SIZE *v = pcre2_get_ovector_pointer(s->match);
    it->lo = (int64_t)v[0];
    it->hi = (int64_t)v[1];
    return 1;
}

/* Walks as the onig crate's find_iter: an empty match where the last one ended is
 * passed over by one character. */
int text__regex_next(const struct text__regex *r, struct text__regex_scratch *s, const char *subject, size_t n,
                     struct text__regex_iter *it) {
    for (;;) {
        if (it->from > n) return 0;
        const int rc = search(r, s, subject, n, it);
        if (rc <= 0) return rc;
        if (it->lo != it->hi || it->last_end != it->hi + 1) break;
        int len = 1;
        if (it->from < n) text__char(subject + it->from, &len);
        it->from += (size_t)len;
    }
    it->from = (size_t)it->hi;
    it->last_end = it->hi + 1;
    return 1;
}
