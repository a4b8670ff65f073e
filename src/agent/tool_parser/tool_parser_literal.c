/* tool_parser_literal.c - ast.literal_eval of Python: numbers, texts, bytes, tuples, lists, dicts, sets, True, False, None, `...`,
 * signs, and a complex number as a sum. Nothing is evaluated: a name, a call or an operator ends the reading.
 *
 * Does not know the names of \N{...}: such a text is no literal here.
 * Invariant: what it accepts is what Python 3.11's ast.literal_eval accepts, with the same value. */
#include "agent/tool_parser/tool_parser_int.h"

#include <math.h>
#include <stdlib.h>

enum { MOST_BRACKETS = 200 }; /* of Python's tokenizer */

/* What Python's syntax tree has: literal_eval takes a sign before a number alone, and one sum of a signed number and a number.
 * NAME: the name set, which is a value once it is called. */
enum shape { ATOM, SIGNED, SUM, NAME };
struct node {
    struct tool_parser__value *v; /* NULL: no literal */
    enum shape shape;
};
static const struct node no_node = {NULL, ATOM};

struct reader {
    struct tool_parser__memory *m;
    const char *p, *end; /* newlines are \n, no NUL */
    int brackets;        /* open ones: newlines are blanks in there */
    struct buf text;     /* of a string */
};

static char peek(const struct reader *r) { return r->p < r->end ? *r->p : '\0'; }
static char peek_at(const struct reader *r, int i) { return r->end - r->p > i ? r->p[i] : '\0'; }
static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_name(char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (unsigned char)c >= 0x80;
}

/* Blanks, comments, continued lines; false: a backslash that continues nothing. */
static bool skip(struct reader *r) {
    for (;;) {
        const char c = peek(r);
        if (c == ' ' || c == '\t' || c == '\f' || (c == '\n' && r->brackets)) {
            r->p++;
        } else if (c == '#') {
            while (r->p < r->end && *r->p != '\n') r->p++;
        } else if (c == '\\') {
            if (peek_at(r, 1) != '\n' || r->end - r->p == 2) return false;
            r->p += 2;
        } else {
            return true;
        }
    }
}

/* Skips, and takes c if it stands there. */
static bool take(struct reader *r, char c) {
    if (!skip(r) || peek(r) != c) return false;
    r->p++;
    return true;
}

/* ---- numbers ---- */

/* digits(_digits)* to text; false: none, or an underscore at the wrong place. */
static bool add_digits(struct reader *r, bool (*is)(char)) {
    if (!is(peek(r))) return false;
    for (;;) {
        while (is(peek(r))) buf_addc(&r->text, *r->p++);
        if (peek(r) != '_') return true;
        r->p++;
        if (!is(peek(r))) return false;
    }
}

static bool is_hex(char c) { return is_digit(c) || ((c | 32) >= 'a' && (c | 32) <= 'f'); }
static bool is_octal(char c) { return c >= '0' && c <= '7'; }
static bool is_binary(char c) { return c == '0' || c == '1'; }

static struct tool_parser__value *read_based(struct reader *r, bool (*is)(char), int bits) {
    r->p += 2;
    if (peek(r) == '_') r->p++;
    if (!add_digits(r, is)) return NULL;
    return tool_parser__int_bits(r->m, (struct tool_parser__span){r->text.p, r->text.n}, bits);
}

/* [.digits][e[sign]digits] behind the whole part; false: not Python's. *real: there is one. */
static bool add_fraction(struct reader *r, bool *real) {
    if (peek(r) == '.') {
        *real = true;
        buf_addc(&r->text, *r->p++);
        if (is_digit(peek(r)) && !add_digits(r, is_digit)) return false;
    }
    if ((peek(r) | 32) == 'e') {
        *real = true;
        buf_addc(&r->text, *r->p++);
        if (peek(r) == '+' || peek(r) == '-') buf_addc(&r->text, *r->p++);
        return add_digits(r, is_digit);
    }
    return true;
}

static struct tool_parser__value *read_number(struct reader *r) {
    const char second = (char)(peek_at(r, 1) | 32);
    bool real = false;
    buf_reset(&r->text);
    if (peek(r) == '0' && second == 'x') return read_based(r, is_hex, 4);
    if (peek(r) == '0' && second == 'o') return read_based(r, is_octal, 3);
    if (peek(r) == '0' && second == 'b') return read_based(r, is_binary, 1);
    if (peek(r) != '.' && !add_digits(r, is_digit)) return NULL;
    const bool zeros = r->text.n && strspn(r->text.p, "0") == r->text.n;
    const bool octal = r->text.n && r->text.p[0] == '0' && !zeros; /* 012: only a real or imaginary number */
    if (!add_fraction(r, &real)) return NULL;
    const struct tool_parser__span text = {r->text.p, r->text.n};
    if ((peek(r) | 32) == 'j') {
        struct tool_parser__value *v = tool_parser__value(r->m, TOOL_COMPLEX);
        v->im = strtod(text.p, NULL);
        r->p++;
        return v;
    }
    if (real) return tool_parser__float(r->m, text);
    if (zeros) return tool_parser__int(r->m, false, TOOL_SPAN("0")); /* of any length */
    return octal ? NULL : tool_parser__int(r->m, false, text);
}

static bool is_number(const struct tool_parser__value *v) {
    return v->kind == TOOL_INT || v->kind == TOOL_FLOAT || v->kind == TOOL_COMPLEX || v->kind == TOOL_LONG_INT;
}

static void negate(struct reader *r, struct tool_parser__value *v) {
    if (v->kind == TOOL_INT) {
        *v = *tool_parser__int(r->m, true, v->text);
    } else {
        v->re = -v->re;
        v->im = -v->im;
        v->text = (struct tool_parser__span){NULL, 0};
    }
}

/* left + right, left - right: a whole or real number and an imaginary one. */
static struct node sum(struct reader *r, struct node left, struct node right, bool minus) {
    const struct tool_parser__value *const a = left.v, *const b = right.v;
    if (!a || !b || left.shape == SUM || right.shape != ATOM || b->kind != TOOL_COMPLEX) return no_node;
    if (a->kind != TOOL_INT && a->kind != TOOL_FLOAT) return no_node; /* a TOOL_LONG_INT is beyond the range of a float */
    struct tool_parser__value *v = tool_parser__value(r->m, TOOL_COMPLEX);
    v->re = a->kind == TOOL_INT ? strtod(a->text.p, NULL) : a->re;
    v->im = minus ? -b->im : b->im;
    if (a->kind == TOOL_INT && isinf(v->re)) return no_node;
    return (struct node){v, SUM};
}

/* ---- strings ---- */

struct prefix {
    bool raw, bytes, unicode, format;
    int n; /* characters before the quote; -1: no string starts here */
};

static struct prefix read_prefix(const struct reader *r) {
    struct prefix x = {0};
    for (;; x.n++) {
        const char c = peek_at(r, x.n), lower = (char)(c | 32);
        if (c == '"' || c == '\'') return x;
        if (lower == 'b' && !(x.bytes || x.unicode || x.format)) x.bytes = true;
        else if (lower == 'u' && !(x.bytes || x.unicode || x.raw || x.format)) x.unicode = true;
        else if (lower == 'r' && !(x.raw || x.unicode)) x.raw = true;
        else if (lower == 'f' && !(x.format || x.bytes || x.unicode)) x.format = true;
        else break;
    }
    x.n = -1;
    return x;
}

static int hex_of(char c) { return is_digit(c) ? c - '0' : (c | 32) - 'a' + 10; }

/* n hexadecimal digits at the reader; -1: not so many. */
static int64_t read_hex(struct reader *r, int n) {
    int64_t c = 0;
    for (int i = 0; i < n; i++) {
        if (!is_hex(peek(r))) return -1;
        c = 16 * c + hex_of(*r->p++);
    }
    return c;
}

/* Behind a backslash: appends what it stands for. */
static bool read_escape(struct reader *r, bool bytes) {
    static const char letters[] = "\\'\"abfnrtv", named[] = "\\'\"\a\b\f\n\r\t\v";
    const char c = *r->p++;
    const char *const letter = strchr(letters, c);
    int64_t code = -1;
    if (c == '\n') return true;
    if (letter) {
        code = named[letter - letters];
    } else if (is_octal(c)) {
        code = c - '0';
        for (int i = 0; i < 2 && is_octal(peek(r)); i++) code = 8 * code + (*r->p++ - '0');
    } else if (c == 'x') {
        if ((code = read_hex(r, 2)) < 0) return false;
    } else if (!bytes && (c == 'u' || c == 'U')) {
        if ((code = read_hex(r, c == 'u' ? 4 : 8)) < 0 || code > 0x10ffff) return false;
    } else if (!bytes && c == 'N') {
        return false;
    }
    if (code >= 0) {
        tool_parser__put_char(&r->text, (int32_t)code);
    } else {
        buf_addc(&r->text, '\\');
        buf_addc(&r->text, c);
    }
    return true;
}

/* Appends one string, from its first quote on. */
static bool read_quoted(struct reader *r, const struct prefix *x) {
    const char quote = peek(r);
    const bool triple = peek_at(r, 1) == quote && peek_at(r, 2) == quote;
    r->p += triple ? 3 : 1;
    while (r->p < r->end) {
        if (*r->p == quote && (!triple || (peek_at(r, 1) == quote && peek_at(r, 2) == quote))) {
            r->p += triple ? 3 : 1;
            return true;
        }
        if ((*r->p == '\n' && !triple) || (x->bytes && (unsigned char)*r->p >= 0x80)) return false;
        const char c = *r->p++;
        if (c != '\\') {
            buf_addc(&r->text, c);
        } else if (r->p == r->end) {
            return false;
        } else if (x->raw) {
            if (x->bytes && (unsigned char)*r->p >= 0x80) return false;
            buf_addc(&r->text, c);
            buf_addc(&r->text, *r->p++);
        } else if ((x->bytes && (unsigned char)*r->p >= 0x80) || !read_escape(r, x->bytes)) {
            return false;
        }
    }
    return false;
}

/* One or more strings, which are one. */
static struct tool_parser__value *read_strings(struct reader *r, struct prefix x) {
    const bool bytes = x.bytes;
    buf_reset(&r->text);
    do {
        r->p += x.n;
        if (x.format || x.bytes != bytes || !read_quoted(r, &x) || !skip(r)) return NULL;
        x = read_prefix(r);
    } while (x.n >= 0);
    return bytes ? tool_parser__value(r->m, TOOL_BYTES) : tool_parser__string(r->m, r->text.p, r->text.n);
}

/* ---- expressions ---- */

static struct node read_expression(struct reader *r);

/* The name set: set() is the one call that literal_eval knows. */
static struct node call_set(struct reader *r) {
    if (!take(r, '(')) return (struct node){tool_parser__value(r->m, TOOL_SET), NAME};
    r->brackets++;
    const bool called = r->brackets <= MOST_BRACKETS && take(r, ')');
    r->brackets--;
    return called ? (struct node){tool_parser__value(r->m, TOOL_SET), ATOM} : no_node;
}

static struct node read_name(struct reader *r) {
    const char *const start = r->p;
    struct tool_parser__value *v = NULL;
    while (is_name(peek(r))) r->p++;
    const struct tool_parser__span name = {start, (size_t)(r->p - start)};
    if (tool_parser__is(name, TOOL_SPAN("set"))) return call_set(r);
    if (tool_parser__is(name, TOOL_SPAN("None"))) v = tool_parser__value(r->m, TOOL_NULL);
    if (tool_parser__is(name, TOOL_SPAN("True")) || tool_parser__is(name, TOOL_SPAN("False"))) {
        v = tool_parser__value(r->m, TOOL_BOOL);
        v->truth = name.n == 4;
    }
    return (struct node){v, ATOM};
}

/* An expression that has a value. */
static struct node read_value(struct reader *r) {
    const struct node n = read_expression(r);
    return n.shape == NAME ? no_node : n;
}

/* Behind the first of several, or of none: up to close. */
static struct node read_items(struct reader *r, struct tool_parser__value *list, char close) {
    for (;;) {
        if (take(r, close)) return (struct node){list, ATOM};
        if (list->n && !take(r, ',')) return no_node;
        if (list->n && take(r, close)) return (struct node){list, ATOM};
        const struct node item = read_value(r);
        if (!item.v) return no_node;
        tool_parser__list_add(r->m, list, item.v);
    }
}

static struct node read_parens(struct reader *r) {
    struct tool_parser__value *tuple = tool_parser__value(r->m, TOOL_TUPLE);
    if (take(r, ')')) return (struct node){tuple, ATOM};
    const struct node first = read_expression(r);
    if (!first.v || take(r, ')')) return first;
    if (first.shape == NAME) return no_node;
    tool_parser__list_add(r->m, tuple, first.v);
    return read_items(r, tuple, ')');
}

static struct node read_dict(struct reader *r, struct node key) {
    struct tool_parser__value *dict = tool_parser__value(r->m, TOOL_DICT);
    for (;;) { /* behind a key */
        if (!key.v || !take(r, ':')) return no_node;
        const struct node v = read_value(r);
        if (!v.v || !tool_parser__dict_set(r->m, dict, key.v, v.v)) return no_node;
        const bool more = take(r, ',');
        if (take(r, '}')) return (struct node){dict, ATOM};
        if (!more) return no_node;
        key = read_value(r);
    }
}

static struct node read_braces(struct reader *r) {
    if (take(r, '}')) return (struct node){tool_parser__value(r->m, TOOL_DICT), ATOM};
    const struct node first = read_value(r);
    if (!first.v || !skip(r)) return no_node;
    if (peek(r) == ':') return read_dict(r, first);
    struct tool_parser__value *set = tool_parser__value(r->m, TOOL_SET);
    tool_parser__list_add(r->m, set, first.v);
    const struct node n = read_items(r, set, '}');
    for (const struct tool_parser__item *i = set->first; i; i = i->next)
        if (!tool_parser__hashable(i->value)) return no_node;
    return n;
}

static struct node read_brackets(struct reader *r) {
    struct node n;
    if (r->brackets == MOST_BRACKETS) return no_node;
    r->brackets++;
    switch (*r->p++) {
    case '(': n = read_parens(r); break;
    case '[': n = read_items(r, tool_parser__value(r->m, TOOL_LIST), ']'); break;
    default: n = read_braces(r); break;
    }
    r->brackets--;
    return n;
}

static struct node read_atom(struct reader *r) {
    if (!skip(r)) return no_node;
    const char c = peek(r);
    const struct prefix x = read_prefix(r);
    if (x.n >= 0) return (struct node){read_strings(r, x), ATOM};
    if (is_digit(c) || (c == '.' && is_digit(peek_at(r, 1)))) return (struct node){read_number(r), ATOM};
    if (c == '.' && peek_at(r, 1) == '.' && peek_at(r, 2) == '.') {
        r->p += 3;
        return (struct node){tool_parser__value(r->m, TOOL_ELLIPSIS), ATOM};
    }
    if (c == '(' || c == '[' || c == '{') {
        const struct node n = read_brackets(r);
        return n.shape == NAME && skip(r) && peek(r) == '(' ? call_set(r) : n;
    }
    return is_name(c) ? read_name(r) : no_node;
}

static struct node read_signed(struct reader *r) {
    if (!skip(r)) return no_node;
    const char c = peek(r);
    if (c != '-' && c != '+') return read_atom(r);
    r->p++;
    if (!skip(r)) return no_node;
    const struct node n = read_atom(r);
    if (!n.v || n.shape != ATOM || !is_number(n.v)) return no_node;
    if (c == '-') negate(r, n.v);
    return (struct node){n.v, SIGNED};
}

static struct node read_expression(struct reader *r) {
    const struct node n = read_signed(r);
    if (!n.v || !skip(r)) return no_node;
    const char c = peek(r);
    if (c != '+' && c != '-') return n;
    r->p++;
    return sum(r, n, read_atom(r), c == '-');
}

/* ---- the text ---- */

/* Empty lines and comments; false: a line that is indented, or nothing follows. */
static bool skip_first_lines(struct reader *r) {
    for (;;) {
        int column = 0, continued = 0;
        for (;; r->p++) {
            const char c = peek(r);
            if (c == ' ' || c == '\t') {
                column++;
            } else if (c == '\f') {
                column = 0;
            } else if (c == '\\') {
                if (peek_at(r, 1) != '\n' || r->end - r->p == 2) return false;
                if (!continued) continued = column;
                r->p++;
            } else {
                break;
            }
        }
        while (peek(r) == '#' && r->p < r->end)
            while (r->p < r->end && *r->p != '\n') r->p++;
        if (peek(r) != '\n') return r->p < r->end && column == 0 && continued == 0;
        r->p++;
    }
}

/* Nothing but empty lines and comments is left. */
static bool is_end(struct reader *r) {
    if (!skip(r)) return false;
    if (r->p == r->end) return true;
    if (*r->p != '\n') return false;
    r->brackets = 1; /* newlines are blanks now */
    return skip(r) && r->p == r->end;
}

/* \r\n and \r are newlines. */
static struct tool_parser__span with_newlines(struct tool_parser__memory *m, struct tool_parser__span s) {
    if (!memchr(s.p, '\r', s.n)) return s;
    char *const copy = tool_parser__alloc(m, s.n);
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) {
        if (s.p[i] == '\n' && i && s.p[i - 1] == '\r') continue;
        copy[n++] = s.p[i] == '\r' ? '\n' : s.p[i];
    }
    return (struct tool_parser__span){copy, n};
}

struct tool_parser__value *tool_parser__literal(struct tool_parser__memory *m, struct tool_parser__span s) {
    if (s.n && memchr(s.p, '\0', s.n)) return NULL;
    while (s.n && (s.p[0] == ' ' || s.p[0] == '\t')) s = tool_parser__sub(s, 1, s.n);
    if (s.n == 0) return NULL;
    s = with_newlines(m, s);
    struct reader r = {.m = m, .p = s.p, .end = s.p + s.n};
    struct node n = no_node;
    if (skip_first_lines(&r)) n = read_value(&r);
    if (n.v && skip(&r) && peek(&r) == ',') { /* a tuple without brackets */
        struct tool_parser__value *tuple = tool_parser__value(m, TOOL_TUPLE);
        tool_parser__list_add(m, tuple, n.v);
        n.v = tuple;
        while (n.v && take(&r, ',') && skip(&r) && r.p < r.end && *r.p != '\n') {
            const struct node item = read_value(&r);
            if (item.v) tool_parser__list_add(m, tuple, item.v);
            else n.v = NULL;
        }
    }
    if (n.v && !is_end(&r)) n.v = NULL;
    buf_free(&r.text);
    return n.v;
}
