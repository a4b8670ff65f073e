/* override_grammar.c - Hydra's override grammar: [+|++|~]key[=value], where a value is
 * a quoted text, a word, a number, a list or a dict.  Interpolations stay text
 * here; interpolation.c gives them their values.  Wider than Hydra in two places:
 * ~ and non-ASCII letters need no quotes, and ${a.${b}} may nest unquoted.
 * Sweeps (a,b) and functions (choice(...)) are refused.
 * Invariant: the parser stops at MAX_DEPTH containers, so input cannot exhaust the stack. */
#include "conf/conf_int.h"

#include "base/err.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_DEPTH 64

struct parser {
    const char *p, *end;
    const char *what; /* for messages */
    int depth;
};

static bool is_ws(char c) { return c == ' ' || c == '\t'; }

static void skip_ws(struct parser *s) {
    while (s->p < s->end && is_ws(*s->p)) s->p++;
}

/* ---- words that are numbers, booleans or null ---- */

/* [0-9](_?[0-9])*; the characters matched. */
static size_t match_digits(const char *t) {
    if (!isdigit((unsigned char)*t)) return 0;
    size_t n = 1;
    for (;;) {
        if (isdigit((unsigned char)t[n])) n++;
        else if (t[n] == '_' && isdigit((unsigned char)t[n + 1])) n += 2;
        else return n;
    }
}

/* '0' or [1-9](_?[0-9])*. */
static size_t match_int(const char *t) { return *t == '0' ? 1 : match_digits(t); }

/* FLOAT of OverrideLexer.g4 without inf and nan: "1." ".5" "1e-6" "1.5E3". */
static bool is_float(const char *t) {
    const size_t whole = match_int(t);
    size_t n = whole;
    bool point = false;
    if (t[n] == '.') {
        const size_t frac = match_digits(t + n + 1);
        if (whole == 0 && frac == 0) return false;
        point = true;
        n += 1 + frac;
    }
    if (n > 0 && (t[n] == 'e' || t[n] == 'E')) {
        size_t e = n + 1;
        if (t[e] == '+' || t[e] == '-') e++;
        const size_t d = match_digits(t + e);
        return d > 0 && t[e + d] == '\0';
    }
    return point && t[n] == '\0';
}

static char *without_underscores(const char *t) {
    char *s = xstrdup(t), *w = s;
    for (const char *r = s; *r; r++)
        if (*r != '_') *w++ = *r;
    *w = '\0';
    return s;
}

/* The value of an unquoted word. ERR_INVAL: an integer beyond 64 bits. */
static int word_value(struct conf_node **out, const char *t, const char *what) {
    const char *u = t + (*t == '+' || *t == '-');
    struct conf_node *v = NULL;
    if (strcasecmp(t, "null") == 0) {
        v = conf__node_new(CONF_NULL);
    } else if (strcasecmp(t, "true") == 0 || strcasecmp(t, "false") == 0) {
        v = conf__node_new(CONF_BOOL);
        v->b = tolower((unsigned char)*t) == 't';
    } else if (*u && u[match_int(u)] == '\0') {
        char *s = without_underscores(t);
        errno = 0;
        const long long n = strtoll(s, NULL, 10);
        free(s);
        if (errno) FAIL(ERR_INVAL, "%s: %s does not fit in 64 bits", what, t);
        v = conf__node_new(CONF_INT);
        v->i = n;
    } else if (is_float(u) || strcasecmp(u, "inf") == 0 || strcasecmp(u, "nan") == 0) {
        char *s = without_underscores(t);
        v = conf__node_new(CONF_FLOAT);
        v->f = strtod(s, NULL);
        free(s);
    } else {
        v = conf__node_str(t, strlen(t));
    }
    *out = v;
    return 0;
}

/* ---- pieces of a word ---- */

/* Length of "${...}" at p with inner braces balanced; 0 when it does not end. */
static size_t interpolation_len(const char *p, const char *end) {
    int depth = 0;
    for (const char *q = p + 1; q < end; q++) {
        if (*q == '{') depth++;
        if (*q == '}' && --depth == 0) return (size_t)(q + 1 - p);
    }
    return 0;
}

static bool is_escapable(char c) { return c != '\0' && strchr("\\()[]{}:=, \t", c) != NULL; }

static bool is_word_char(char c) {
    const unsigned char u = (unsigned char)c;
    return u >= 0x80 || isalnum(u) || (c != '\0' && strchr("_/-\\+.$%*@?|~", c) != NULL);
}

static int unexpected(const struct parser *s, const char *expected) {
    if (s->p >= s->end) FAIL(ERR_INVAL, "%s: the value ends where %s is expected", s->what, expected);
    const unsigned char c = (unsigned char)*s->p;
    if (c == '(')
        FAIL(ERR_INVAL,
             "%s: functions such as choice(...) or range(...) are not supported; write the value, "
             "or put text with parentheses in quotes: key='\"...\"'",
             s->what);
    if (c < 0x20) FAIL(ERR_INVAL, "%s: character 0x%02x needs quotes inside the value: key='\"...\"'", s->what, c);
    FAIL(ERR_INVAL,
         "%s: unexpected '%c' where %s is expected (text with special characters needs quotes inside "
         "the value: key='\"...\"')",
         s->what, c, expected);
}

/* A word up to a structural character. In a dict key neither ':' nor ${ } may stand. */
static int parse_word(struct parser *s, struct conf_node **out, bool *typed, bool is_key) {
    struct buf b = {0};
    size_t solid = 0;  /* length that trailing blanks may not be trimmed below */
    bool plain = true; /* no escape, no interpolation: may be a number */
    int rc = 0;
    while (s->p < s->end) {
        const char c = *s->p;
        if (c == '\\' && s->p + 1 < s->end && is_escapable(s->p[1])) {
            buf_addc(&b, s->p[1]);
            s->p += 2;
            solid = b.n;
            plain = false;
        } else if (c == '$' && s->p + 1 < s->end && s->p[1] == '{' && !is_key) {
            const size_t n = interpolation_len(s->p, s->end);
            if (n <= 3) FAILG(done, ERR_INVAL, "%s: the interpolation %.40s has no end", s->what, s->p);
            buf_add(&b, s->p, n);
            s->p += n;
            solid = b.n;
            plain = false;
        } else if (c == ':' && !is_key) { /* the blanks after a colon belong to it */
            do buf_addc(&b, *s->p++);
            while (s->p < s->end && is_ws(*s->p));
            solid = b.n;
        } else if (is_word_char(c)) {
            buf_addc(&b, c);
            s->p++;
            solid = b.n;
        } else if (is_ws(c)) {
            buf_addc(&b, c);
            s->p++;
        } else {
            break;
        }
    }
    if (solid == 0) {
        rc = unexpected(s, is_key ? "a key" : "a value");
        goto done;
    }
    b.n = solid;
    b.p[solid] = '\0';
    if (plain) rc = word_value(out, b.p, s->what);
    else *out = conf__node_str(b.p, b.n);
    if (rc == 0) *typed = plain && (*out)->kind != CONF_STR;
done:
    buf_free(&b);
    return rc;
}

/* 'text' or "text". Backslashes count only in front of a quote of the same kind:
 * 2k + 1 of them give k and the quote, 2k at the end give k. */
static int parse_quoted(struct parser *s, struct conf_node **out) {
    const char q = *s->p;
    struct buf b = {0};
    const char *p = s->p + 1;
    while (p < s->end) {
        size_t n = 0;
        while (p + n < s->end && p[n] == '\\') n++;
        if (p + n < s->end && p[n] == q) {
            for (size_t k = 0; k < n / 2; k++) buf_addc(&b, '\\');
            p += n + 1;
            if (n % 2 == 0) {
                s->p = p;
                *out = conf__node_str(b.p ? b.p : "", b.n);
                buf_free(&b);
                return 0;
            }
            buf_addc(&b, q);
        } else if (n > 0) {
            buf_add(&b, p, n);
            p += n;
        } else {
            buf_addc(&b, *p++);
        }
    }
    buf_free(&b);
    FAIL(ERR_INVAL, "%s: the quote %c is not closed", s->what, q);
}

/* ---- values ---- */
static int parse_element(struct parser *s, struct conf_node **out);

static int parse_item(struct parser *s, struct conf_node *list) {
    struct conf_node *v = NULL;
    TRY(parse_element(s, &v));
    conf__node_put(list, NULL, v);
    return 0;
}

static int parse_pair(struct parser *s, struct conf_node *dict) {
    struct conf_node *key = NULL, *v = NULL;
    struct buf text = {0};
    bool typed = false;
    int rc = 0;
    const char *start = s->p;
    TRYG(parse_word(s, &key, &typed, true), done);
    if (key->kind == CONF_STR) buf_adds(&text, key->s);
    else buf_add(&text, start, strcspn(start, " \t:"));
    if (s->p >= s->end || *s->p != ':') {
        rc = unexpected(s, "':' after a key");
        goto done;
    }
    s->p++;
    skip_ws(s);
    TRYG(parse_element(s, &v), done);
    conf__node_put(dict, text.p, v);
    dict->items[dict->n - 1].bare |= typed && strcmp(dict->items[dict->n - 1].key, text.p) == 0;
done:
    conf__node_free(key);
    buf_free(&text);
    return rc;
}

/* From the opening character, at s->p, over items with commas between them to the closing one. */
static int parse_items(struct parser *s, bool dict, struct conf_node **out) {
    const char close = dict ? '}' : ']';
    struct conf_node *node = conf__node_new(dict ? CONF_DICT : CONF_LIST);
    int rc = 0;
    s->p++;
    skip_ws(s);
    if (s->p < s->end && *s->p == close) goto close;
    for (;;) {
        TRYG(dict ? parse_pair(s, node) : parse_item(s, node), fail);
        skip_ws(s);
        if (s->p < s->end && *s->p == close) break;
        if (s->p >= s->end || *s->p != ',') {
            rc = unexpected(s, dict ? "',' or '}'" : "',' or ']'");
            goto fail;
        }
        s->p++;
        skip_ws(s);
    }
close:
    s->p++;
    *out = node;
    return 0;
fail:
    conf__node_free(node);
    return rc;
}

static int parse_element(struct parser *s, struct conf_node **out) {
    bool typed;
    if (s->depth >= MAX_DEPTH) FAIL(ERR_INVAL, "%s: more than %d nested lists and dicts", s->what, MAX_DEPTH);
    const char c = s->p < s->end ? *s->p : '\0';
    int rc;
    s->depth++;
    if (c == '[') rc = parse_items(s, false, out);
    else if (c == '{') rc = parse_items(s, true, out);
    else if (c == '"' || c == '\'') rc = parse_quoted(s, out);
    else rc = parse_word(s, out, &typed, false);
    s->depth--;
    return rc;
}

int conf__parse_value(struct conf_node **out, const char *text, const char *what) {
    struct parser s = {.p = text, .end = text + strlen(text), .what = what};
    struct conf_node *v = NULL;
    skip_ws(&s);
    if (s.p == s.end) {
        *out = conf__node_str("", 0);
        return 0;
    }
    TRY(parse_element(&s, &v));
    skip_ws(&s);
    if (s.p == s.end) {
        *out = v;
        return 0;
    }
    const bool sweep = *s.p == ',';
    conf__node_free(v);
    if (sweep)
        FAIL(ERR_INVAL,
             "%s: values separated by commas are a sweep, which verlc does not run; a list is "
             "written [a,b], text with a comma needs quotes inside the value",
             what);
    return unexpected(&s, "the end of the value");
}

int conf__parse_args(struct conf_node **out, const char *text, size_t n, const char *what) {
    struct parser s = {.p = text, .end = text + n, .what = what};
    struct conf_node *list = conf__node_new(CONF_LIST), *v;
    int rc = 0;
    skip_ws(&s);
    while (s.p < s.end) {
        v = NULL;
        TRYG(parse_element(&s, &v), fail);
        conf__node_put(list, NULL, v);
        skip_ws(&s);
        if (s.p == s.end) break;
        if (*s.p != ',') {
            rc = unexpected(&s, "',' or '}'");
            goto fail;
        }
        s.p++;
        skip_ws(&s);
        if (s.p == s.end) conf__node_put(list, NULL, conf__node_str("", 0)); /* "a," has an empty last argument */
    }
    *out = list;
    return 0;
fail:
    conf__node_free(list);
    return rc;
}

/* ---- overrides ---- */

/* A part of a key: an index, or letters, digits, _ - $ that do not start with a digit or -. */
static bool is_part(const char *p, size_t n) {
    if (n == 0) return false;
    if (isdigit((unsigned char)*p)) {
        for (size_t k = 0; k < n; k++)
            if (!isdigit((unsigned char)p[k])) return false;
        return *p != '0' || n == 1;
    }
    for (size_t k = 0; k < n; k++)
        if (!isalnum((unsigned char)p[k]) && !(p[k] != '\0' && strchr("_-$", p[k]))) return false;
    return *p != '-';
}

/* Parts between dots; @ and / make it a group. */
static int check_key(const char *key, const char *text, bool *is_group) {
    TRY(conf__path_check(key, text));
    *is_group = strpbrk(key, "@/") != NULL;
    for (const char *p = key; *p;) {
        const size_t n = strcspn(p, "./@");
        if (memchr(p, ' ', n)) FAIL(ERR_INVAL, "%s: a key has no spaces; write key=value without spaces around the =", text);
        if (!is_part(p, n) && !(p == key && *p == '@')) FAIL(ERR_INVAL, "%s: '%.*s' cannot be part of a key", text, (int)n, p);
        p += n;
        if (*p && p[1] == '\0') FAIL(ERR_INVAL, "%s: the key ends in '%c'", text, *p);
        if (*p) p++;
    }
    return 0;
}

bool conf__is_utf8(const char *text) {
    json_t *s = json_string(text); /* jansson refuses what is not UTF-8 */
    json_decref(s);
    return s != NULL;
}

int conf__parse_override(struct conf_override *o, const char *text) {
    if (!conf__is_utf8(text)) FAIL(ERR_INVAL, "an override is not UTF-8 text");
    *o = (struct conf_override){.op = CONF_SET};
    const char *p = text;
    if (*p == '~') {
        o->op = CONF_DEL;
        p++;
    } else if (*p == '+') {
        o->op = p[1] == '+' ? CONF_FORCE : CONF_ADD;
        p += o->op == CONF_FORCE ? 2 : 1;
    }
    const char *eq = strchr(p, '=');
    if (!eq && o->op != CONF_DEL) FAIL(ERR_INVAL, "%s: not an override; write key=value", text);
    o->key = xstrndup(p, eq ? (size_t)(eq - p) : strlen(p));
    int rc = check_key(o->key, text, &o->is_group);
    if (rc == 0 && eq) rc = conf__parse_value(&o->value, eq + 1, text);
    if (rc < 0) conf__override_free(o);
    return rc;
}

void conf__override_free(struct conf_override *o) {
    free(o->key);
    conf__node_free(o->value);
    *o = (struct conf_override){0};
}
