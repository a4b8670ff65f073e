/* tool_parser_int.h - what the files of the tool parsers share: scanning, Python's values and their texts. */
#ifndef VERLC_AGENT_TOOL_PARSER_INT_H
#define VERLC_AGENT_TOOL_PARSER_INT_H

#include "agent/tool_parser/tool_parser.h"
#include "base/map.h"

#include <stdbool.h>
#include <string.h>

/* ---- texts (tool_parser_text.c) ---- */

struct tool_parser__span { /* borrowed bytes */
    const char *p;
    size_t n;
};
#define TOOL_SPAN(literal) ((struct tool_parser__span){literal, sizeof(literal) - 1})
#define TOOL_INIT(literal) \
    { literal, sizeof(literal) - 1 } /* the same in a static table */
#define TOOL_NONE SIZE_MAX

static inline struct tool_parser__span tool_parser__sub(struct tool_parser__span s, size_t lo, size_t hi) {
    return (struct tool_parser__span){s.p + lo, hi - lo};
}
static inline bool tool_parser__is(struct tool_parser__span s, struct tool_parser__span other) {
    return s.n == other.n && (s.n == 0 || memcmp(s.p, other.p, s.n) == 0);
}
/* Whether other stands at `at`. */
static inline bool tool_parser__at(struct tool_parser__span s, size_t at, struct tool_parser__span other) {
    return at <= s.n && s.n - at >= other.n && memcmp(s.p + at, other.p, other.n) == 0;
}
/* The first place of what, from `from` on; TOOL_NONE. */
size_t tool_parser__find(struct tool_parser__span s, size_t from, struct tool_parser__span what);
/* Appends s without all of `what`: s.replace(what, ""). */
void tool_parser__add_without(struct buf *out, struct tool_parser__span s, struct tool_parser__span what);
/* How often it stands there, without overlaps. */
int64_t tool_parser__count(struct tool_parser__span s, struct tool_parser__span what);

/* The next open(.*?)close from `from` on. */
struct tool_parser__block {
    size_t at;     /* of open; TOOL_NONE: there is none */
    size_t lo, hi; /* what is between; hi TOOL_NONE: not closed */
    size_t end;    /* behind close */
};
bool tool_parser__block(struct tool_parser__span s, size_t from, struct tool_parser__span open, struct tool_parser__span close,
                        struct tool_parser__block *b); /* true: closed */

/* One character at p, n > 0: its code point, -1 where it is no UTF-8; *len: its bytes. */
int32_t tool_parser__char(const char *p, size_t n, size_t *len);
void tool_parser__put_char(struct buf *out, int32_t c);                     /* a surrogate too */
bool tool_parser__is_space(int32_t c);                                      /* str.isspace of Python */
bool tool_parser__is_regex_space(int32_t c);                                /* \s of the package regex */
size_t tool_parser__skip_space(struct tool_parser__span s, size_t at);      /* behind \s* */
struct tool_parser__span tool_parser__strip(struct tool_parser__span s);    /* str.strip() */
bool tool_parser__is_nocase(struct tool_parser__span s, const char *lower); /* s.lower() == lower, which is ASCII */

/* ---- values (tool_parser_value.c) ---- */

/* What json.loads and ast.literal_eval give. */
enum tool_parser__kind {
    TOOL_NULL,
    TOOL_BOOL,
    TOOL_INT,
    TOOL_FLOAT,
    TOOL_STRING,
    TOOL_LIST,
    TOOL_DICT,
    TOOL_TUPLE, /* json.dumps: as a list */
    TOOL_SET,   /* json.dumps refuses it and what follows */
    TOOL_BYTES,
    TOOL_COMPLEX,
    TOOL_ELLIPSIS,
    TOOL_LONG_INT /* over 4300 digits: Python makes it of hexadecimal ones, and no text of it */
};
struct tool_parser__value {
    enum tool_parser__kind kind;
    bool truth;                             /* BOOL */
    double re, im;                          /* FLOAT, COMPLEX */
    struct tool_parser__span text;          /* INT: as Python prints it; FLOAT: the same, or p NULL; STRING: UTF-8, with lone
                                       surrogates in three bytes */
    struct tool_parser__item *first, *last; /* LIST, TUPLE, SET, DICT */
    int64_t n;
    struct map *index; /* DICT of many keys */
};
struct tool_parser__item {
    struct tool_parser__value *key, *value; /* key: DICT */
    struct tool_parser__span id;            /* the same of keys that are equal */
    struct tool_parser__item *next;
};

struct tool_parser__chunk;
struct tool_parser__memory { /* of values; zeroed to begin */
    struct tool_parser__chunk *chunks;
    struct tool_parser__index *indices; /* of dicts with many keys */
    struct buf scratch;
};
void tool_parser__memory_free(struct tool_parser__memory *m);
void *tool_parser__alloc(struct tool_parser__memory *m, size_t n);
struct tool_parser__value *tool_parser__value(struct tool_parser__memory *m, enum tool_parser__kind kind);
struct tool_parser__value *tool_parser__string(struct tool_parser__memory *m, const char *p, size_t n);      /* copies */
struct tool_parser__value *tool_parser__float(struct tool_parser__memory *m, struct tool_parser__span text); /* strtod's text */
void tool_parser__list_add(struct tool_parser__memory *m, struct tool_parser__value *list, struct tool_parser__value *v);
/* dict[key] = v: of equal keys the first stays, with the last value. false: Python cannot hash the key. */
bool tool_parser__dict_set(struct tool_parser__memory *m, struct tool_parser__value *dict, struct tool_parser__value *key,
                           struct tool_parser__value *v);
struct tool_parser__value *tool_parser__dict_get(const struct tool_parser__value *dict, const char *key); /* NULL: none */
bool tool_parser__dict_has(const struct tool_parser__value *dict, const char *key, size_t n);
bool tool_parser__hashable(const struct tool_parser__value *v);
/* Appends json.dumps(v, ensure_ascii=False), but for a lone surrogate, which stays an escape. false: it raises; out is then as
 * before. */
bool tool_parser__dumps(struct buf *out, const struct tool_parser__value *v);

/* json.loads. NULL: it raises. Values are of m. */
enum { TOOL_JSON_DEPTH = 950, TOOL_INT_DIGITS = 4300 };
struct tool_parser__value *tool_parser__json(struct tool_parser__memory *m, struct tool_parser__span s);

/* Of a value that s begins with; *n: its bytes. */
struct tool_parser__value *tool_parser__json_prefix(struct tool_parser__memory *m, struct tool_parser__span s, size_t *n);
/* ast.literal_eval. NULL: it raises. */
struct tool_parser__value *tool_parser__literal(struct tool_parser__memory *m, struct tool_parser__span s);

/* ---- numbers (tool_parser_number.c) ---- */

/* int(s), float(s). NULL: they raise. */
struct tool_parser__value *tool_parser__int_of(struct tool_parser__memory *m, struct tool_parser__span s);
struct tool_parser__value *tool_parser__float_of(struct tool_parser__memory *m, struct tool_parser__span s);
struct tool_parser__value *tool_parser__whole(struct tool_parser__memory *m, double v); /* int(v), v finite */
/* Of decimal digits, at least one; NULL: more than 4300. */
struct tool_parser__value *tool_parser__int(struct tool_parser__memory *m, bool minus, struct tool_parser__span digits);
/* Of digits of `bits` bits each: 4, 3 or 1. */
struct tool_parser__value *tool_parser__int_bits(struct tool_parser__memory *m, struct tool_parser__span digits, int bits);

/* ---- the formats ---- */

/* The parsing of one turn. */
struct tool_parser__run {
    struct tool_parser__span text;
    const json_t *tools; /* maybe NULL */
    struct tool_turn *out;
    int64_t cap_calls;
    struct tool_parser__memory memory; /* of the call being read */
};
/* Adds a call, and gives it. arguments NULL, or such as json.dumps refuses: adds none, NULL. */
struct tool_call *tool_parser__add(struct tool_parser__run *r, struct tool_parser__span name,
                                   const struct tool_parser__value *arguments);
struct tool_call *tool_parser__add_text(struct tool_parser__run *r, struct tool_parser__span name,
                                        struct tool_parser__span arguments);
void tool_parser__content(struct tool_parser__run *r, struct tool_parser__span s); /* appends */

void tool_parser__drop(struct tool_parser__run *r, int64_t first); /* takes the calls from `first` on back */
char *tool_parser__c_string(struct tool_parser__span s);           /* NUL and what is no UTF-8 become U+FFFD; the caller's */

void tool_parser__hermes(struct tool_parser__run *r);
void tool_parser__qwen3_coder(struct tool_parser__run *r);
void tool_parser__gpt_oss(struct tool_parser__run *r);
void tool_parser__glm(struct tool_parser__run *r);
void tool_parser__seed(struct tool_parser__run *r);
void tool_parser__minimax(struct tool_parser__run *r);
void tool_parser__kimi(struct tool_parser__run *r);
void tool_parser__deepseek_v4(struct tool_parser__run *r);
void tool_parser__gemma4(struct tool_parser__run *r);
void tool_parser__llama3_json(struct tool_parser__run *r);

#endif
