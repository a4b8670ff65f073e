/* tool_parser_json.c - json.loads of Python, whose JSON is not quite jansson's: NaN and Infinity are numbers, integers have up to
 * 4300 digits, a lone surrogate is a character, and of equal keys the last one counts.
 *
 * Invariant: what it accepts is what Python 3.11's json.loads accepts, but for the depth: lists in lists are TOOL_JSON_DEPTH at
 * most here, and there as many as the interpreter has calls to go. */
#include "agent/tool_parser/tool_parser_int.h"

struct reader {
    struct tool_parser__memory *m;
    const char *p, *end;
    int depth;
    struct buf text; /* of a string with escapes */
};

static void skip_blanks(struct reader *r) {
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\t' || *r->p == '\n' || *r->p == '\r')) r->p++;
}

/* Moves over the word, if it stands there. */
static bool take(struct reader *r, const char *word) {
    const size_t n = strlen(word);
    if ((size_t)(r->end - r->p) < n || memcmp(r->p, word, n) != 0) return false;
    r->p += n;
    return true;
}

static bool is_digit(const char *p, const char *end) { return p < end && *p >= '0' && *p <= '9'; }

static struct tool_parser__value *read_number(struct reader *r) {
    const char *const start = r->p, *q = r->p + (*r->p == '-');
    bool real = false;
    if (!is_digit(q, r->end)) return NULL;
    const char *const digits = q;
    if (*q == '0') q++;
    else
        while (is_digit(q, r->end)) q++;
    const size_t n_digits = (size_t)(q - digits);
    if (q < r->end && *q == '.' && is_digit(q + 1, r->end)) {
        for (q++, real = true; is_digit(q, r->end);) q++;
    }
    if (q < r->end && (*q == 'e' || *q == 'E')) {
        const char *x = q + 1;
        if (x < r->end && (*x == '+' || *x == '-')) x++;
        if (is_digit(x, r->end))
            for (q = x, real = true; is_digit(q, r->end);) q++;
    }
    r->p = q;
    const struct tool_parser__span text = {start, (size_t)(q - start)};
    if (real) return tool_parser__float(r->m, text);
    if (n_digits > TOOL_INT_DIGITS) return NULL;
    struct tool_parser__value *v = tool_parser__value(r->m, TOOL_INT);
    v->text = tool_parser__is(text, TOOL_SPAN("-0")) ? TOOL_SPAN("0") : text;
    return v;
}

static int32_t hex4(const char *p, const char *end) {
    int32_t v = 0;
    if (end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        const char c = p[i];
        const int d = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
        if (d < 0) return -1;
        v = 16 * v + d;
    }
    return v;
}

/* \uXXXX at p, behind the u; a pair of them is one character. */
static bool read_unicode(struct reader *r) {
    int32_t c = hex4(r->p, r->end);
    if (c < 0) return false;
    r->p += 4;
    if (c >= 0xd800 && c < 0xdc00 && r->end - r->p >= 6 && r->p[0] == '\\' && r->p[1] == 'u') {
        const int32_t low = hex4(r->p + 2, r->end);
        if (low >= 0xdc00 && low < 0xe000) {
            c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
            r->p += 6;
        }
    }
    tool_parser__put_char(&r->text, c);
    return true;
}

static struct tool_parser__value *read_string(struct reader *r) {
    const char *from = ++r->p;
    buf_reset(&r->text);
    for (;;) {
        if (r->p >= r->end || (unsigned char)*r->p < 0x20) return NULL;
        const char c = *r->p++;
        if (c == '"') break;
        if (c != '\\') continue;
        buf_add(&r->text, from, (size_t)(r->p - 1 - from));
        if (r->p >= r->end) return NULL;
        const char e = *r->p++;
        static const char letters[] = "\"\\/bfnrt", named[] = "\"\\/\b\f\n\r\t";
        const char *const letter = e ? strchr(letters, e) : NULL;
        if (letter) buf_addc(&r->text, named[letter - letters]);
        else if (e != 'u' || !read_unicode(r)) return NULL;
        from = r->p;
    }
    const size_t rest = (size_t)(r->p - 1 - from);
    if (r->text.n == 0) return tool_parser__string(r->m, from, rest);
    buf_add(&r->text, from, rest);
    return tool_parser__string(r->m, r->text.p, r->text.n);
}

static struct tool_parser__value *read_value(struct reader *r);

static struct tool_parser__value *read_list(struct reader *r) {
    struct tool_parser__value *list = tool_parser__value(r->m, TOOL_LIST);
    r->p++;
    skip_blanks(r);
    if (take(r, "]")) return list;
    for (;;) {
        struct tool_parser__value *v = read_value(r);
        if (!v) return NULL;
        tool_parser__list_add(r->m, list, v);
        skip_blanks(r);
        if (take(r, "]")) return list;
        if (!take(r, ",")) return NULL;
        skip_blanks(r);
    }
}

static struct tool_parser__value *read_dict(struct reader *r) {
    struct tool_parser__value *dict = tool_parser__value(r->m, TOOL_DICT);
    r->p++;
    skip_blanks(r);
    if (take(r, "}")) return dict;
    for (;;) {
        struct tool_parser__value *key = r->p < r->end && *r->p == '"' ? read_string(r) : NULL, *v;
        if (!key) return NULL;
        skip_blanks(r);
        if (!take(r, ":")) return NULL;
        skip_blanks(r);
        v = read_value(r);
        if (!v) return NULL;
        tool_parser__dict_set(r->m, dict, key, v);
        skip_blanks(r);
        if (take(r, "}")) return dict;
        if (!take(r, ",")) return NULL;
        skip_blanks(r);
    }
}

static struct tool_parser__value *of_float(struct reader *r, const char *text) {
    return tool_parser__float(r->m, (struct tool_parser__span){text, strlen(text)});
}

static struct tool_parser__value *read_value(struct reader *r) {
    struct tool_parser__value *v = NULL;
    if (r->p >= r->end) return NULL;
    switch (*r->p) {
    case '"': return read_string(r);
    case '[':
    case '{':
        if (r->depth == TOOL_JSON_DEPTH) return NULL;
        r->depth++;
        v = *r->p == '[' ? read_list(r) : read_dict(r);
        r->depth--;
        return v;
    case 'n': return take(r, "null") ? tool_parser__value(r->m, TOOL_NULL) : NULL;
    case 't':
        if (!take(r, "true")) return NULL;
        v = tool_parser__value(r->m, TOOL_BOOL);
        v->truth = true;
        return v;
    case 'f': return take(r, "false") ? tool_parser__value(r->m, TOOL_BOOL) : NULL;
    case 'N': return take(r, "NaN") ? of_float(r, "nan") : NULL;
    case 'I': return take(r, "Infinity") ? of_float(r, "inf") : NULL;
    default:
        if (take(r, "-Infinity")) return of_float(r, "-inf");
        return *r->p == '-' || is_digit(r->p, r->end) ? read_number(r) : NULL;
    }
}

struct tool_parser__value *tool_parser__json_prefix(struct tool_parser__memory *m, struct tool_parser__span s, size_t *n) {
    struct reader r = {.m = m, .p = s.p, .end = s.p + s.n};
    skip_blanks(&r);
    struct tool_parser__value *v = read_value(&r);
    skip_blanks(&r);
    buf_free(&r.text);
    *n = (size_t)(r.p - s.p);
    return v;
}

struct tool_parser__value *tool_parser__json(struct tool_parser__memory *m, struct tool_parser__span s) {
    size_t n;
    struct tool_parser__value *v = tool_parser__json_prefix(m, s, &n);
    return n == s.n ? v : NULL;
}
