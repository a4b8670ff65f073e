/* tool_parser_value.c - Python's values, and the text that json.dumps makes of them.
 *
 * Makes nothing of text but numbers: tool_parser_json.c and tool_parser_literal.c read.
 * Invariant: a dict has the order and the keys that Python's has, and finds a key among many without looking at all. */
#include "agent/tool_parser/tool_parser_int.h"
#include "base/encoding/number.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { CHUNK = 1 << 14, FEW_KEYS = 8 };
struct tool_parser__chunk {
    struct tool_parser__chunk *next;
    size_t n, cap;
    _Alignas(16) char bytes[];
};
struct tool_parser__index { /* of a dict */
    struct map map;         /* id of a key -> address of its item */
    struct tool_parser__index *next;
};

void tool_parser__memory_free(struct tool_parser__memory *m) {
    while (m->indices) {
        struct tool_parser__index *const next = m->indices->next;
        map_free(&m->indices->map);
        free(m->indices);
        m->indices = next;
    }
    while (m->chunks) {
        struct tool_parser__chunk *const next = m->chunks->next;
        free(m->chunks);
        m->chunks = next;
    }
    buf_free(&m->scratch);
}

void *tool_parser__alloc(struct tool_parser__memory *m, size_t n) {
    const size_t size = (n + 15) & ~(size_t)15;
    struct tool_parser__chunk *c = m->chunks;
    if (!c || c->cap - c->n < size) {
        const size_t cap = size > CHUNK ? size : CHUNK;
        c = xmalloc(sizeof *c + cap);
        *c = (struct tool_parser__chunk){.next = m->chunks, .cap = cap};
        m->chunks = c;
    }
    void *const p = c->bytes + c->n;
    c->n += size;
    return p;
}

struct tool_parser__value *tool_parser__value(struct tool_parser__memory *m, enum tool_parser__kind kind) {
    struct tool_parser__value *v = tool_parser__alloc(m, sizeof *v);
    *v = (struct tool_parser__value){.kind = kind};
    return v;
}

/* The byte before a string makes it the id of a key. */
struct tool_parser__value *tool_parser__string(struct tool_parser__memory *m, const char *p, size_t n) {
    struct tool_parser__value *v = tool_parser__value(m, TOOL_STRING);
    char *const copy = tool_parser__alloc(m, n + 2);
    copy[0] = 's';
    if (n) memcpy(copy + 1, p, n);
    copy[n + 1] = '\0';
    v->text = (struct tool_parser__span){copy + 1, n};
    return v;
}

/* Whether Python prints it as it stands: few digits, none that could go. */
static bool is_plain(struct tool_parser__span s) {
    size_t i = s.n && s.p[0] == '-';
    const size_t lo = i;
    while (i < s.n && s.p[i] >= '0' && s.p[i] <= '9') i++;
    const size_t point = i++;
    if (point == lo || point >= s.n || s.p[point] != '.' || (s.p[lo] == '0' && point > lo + 1) || s.n - lo > 16) return false;
    while (i < s.n && s.p[i] >= '0' && s.p[i] <= '9') i++;
    if (i < s.n || i == point + 1 || (s.p[i - 1] == '0' && i > point + 2)) return false;
    return s.p[lo] != '0' || point + 2 >= s.n || s.p[point + 1] != '0'; /* 0.0...: maybe with an exponent */
}

struct tool_parser__value *tool_parser__float(struct tool_parser__memory *m, struct tool_parser__span text) {
    struct tool_parser__value *v = tool_parser__value(m, TOOL_FLOAT);
    char *const copy = tool_parser__alloc(m, text.n + 1);
    memcpy(copy, text.p, text.n);
    copy[text.n] = '\0';
    v->re = strtod(copy, NULL);
    if (is_plain(text)) v->text = (struct tool_parser__span){copy, text.n};
    return v;
}

/* ---- lists and dicts ---- */

static struct tool_parser__item *add_item(struct tool_parser__memory *m, struct tool_parser__value *of,
                                          struct tool_parser__value *v) {
    struct tool_parser__item *item = tool_parser__alloc(m, sizeof *item);
    *item = (struct tool_parser__item){.value = v};
    if (of->last) of->last->next = item;
    else of->first = item;
    of->last = item;
    of->n++;
    return item;
}

void tool_parser__list_add(struct tool_parser__memory *m, struct tool_parser__value *list, struct tool_parser__value *v) {
    add_item(m, list, v);
}

bool tool_parser__hashable(const struct tool_parser__value *v) {
    if (v->kind == TOOL_LIST || v->kind == TOOL_DICT || v->kind == TOOL_SET) return false;
    for (const struct tool_parser__item *i = v->kind == TOOL_TUPLE ? v->first : NULL; i; i = i->next)
        if (!tool_parser__hashable(i->value)) return false;
    return true;
}

/* The same bytes of numbers that Python holds equal, of whatever type. */
static void number_id(const struct tool_parser__value *v, struct buf *id) {
    if (v->kind == TOOL_BOOL) buf_addf(id, "n%d", v->truth);
    else if (v->kind == TOOL_INT) buf_addf(id, "n%.*s", (int)v->text.n, v->text.p);
    else if (v->im != 0 || v->im != v->im) buf_addf(id, "c%a,%a", v->re, v->im);
    else if (v->re == 0) buf_adds(id, "n0");
    else if (v->re == floor(v->re) && isfinite(v->re)) buf_addf(id, "n%.0f", v->re);
    else buf_addf(id, "f%a", v->re);
}

static struct tool_parser__span id_of(struct tool_parser__memory *m, const struct tool_parser__value *key) {
    if (key->kind == TOOL_STRING) return (struct tool_parser__span){key->text.p - 1, key->text.n + 1};
    buf_reset(&m->scratch);
    switch (key->kind) {
    case TOOL_BOOL:
    case TOOL_INT:
    case TOOL_FLOAT:
    case TOOL_COMPLEX: number_id(key, &m->scratch); break;
    case TOOL_NULL: buf_adds(&m->scratch, "z"); break;
    default: buf_addf(&m->scratch, "o%p", (const void *)key); /* never printed: which are equal does not matter */
    }
    char *const id = tool_parser__alloc(m, m->scratch.n);
    memcpy(id, m->scratch.p, m->scratch.n);
    return (struct tool_parser__span){id, m->scratch.n};
}

static void index_keys(struct tool_parser__memory *m, struct tool_parser__value *dict) {
    struct tool_parser__index *index = xcalloc(1, sizeof *index);
    index->next = m->indices;
    m->indices = index;
    dict->index = &index->map;
    for (struct tool_parser__item *i = dict->first; i; i = i->next) map_set(dict->index, i->id.p, i->id.n, (int64_t)(intptr_t)i);
}

static struct tool_parser__item *find_key(const struct tool_parser__value *dict, struct tool_parser__span id) {
    int64_t at;
    if (dict->index) return map_get(dict->index, id.p, id.n, &at) ? (struct tool_parser__item *)(intptr_t)at : NULL;
    for (struct tool_parser__item *i = dict->first; i; i = i->next)
        if (tool_parser__is(i->id, id)) return i;
    return NULL;
}

bool tool_parser__dict_set(struct tool_parser__memory *m, struct tool_parser__value *dict, struct tool_parser__value *key,
                           struct tool_parser__value *v) {
    if (!tool_parser__hashable(key)) return false;
    const struct tool_parser__span id = id_of(m, key);
    struct tool_parser__item *item = find_key(dict, id);
    if (item) {
        item->value = v;
        return true;
    }
    if (dict->n == FEW_KEYS && !dict->index) index_keys(m, dict);
    item = add_item(m, dict, v);
    item->key = key;
    item->id = id;
    if (dict->index) map_set(dict->index, id.p, id.n, (int64_t)(intptr_t)item);
    return true;
}

static struct tool_parser__value *get(const struct tool_parser__value *dict, struct tool_parser__span key) {
    for (const struct tool_parser__item *i = dict->first; i; i = i->next)
        if (i->key->kind == TOOL_STRING && tool_parser__is(i->key->text, key)) return i->value;
    return NULL;
}

struct tool_parser__value *tool_parser__dict_get(const struct tool_parser__value *dict, const char *key) {
    return get(dict, (struct tool_parser__span){key, strlen(key)});
}

bool tool_parser__dict_has(const struct tool_parser__value *dict, const char *key, size_t n) {
    return get(dict, (struct tool_parser__span){key, n}) != NULL;
}

/* ---- json.dumps ---- */

/* A lone surrogate is no UTF-8: it stays an escape, which reads back as the same. */
static void dump_string(struct buf *out, struct tool_parser__span s) {
    size_t from = 0;
    buf_addc(out, '"');
    for (size_t i = 0; i < s.n; i++) {
        const unsigned char c = (unsigned char)s.p[i];
        const bool surrogate = c == 0xed && i + 2 < s.n && (unsigned char)s.p[i + 1] >= 0xa0;
        if (!surrogate && c >= 0x20 && c != '"' && c != '\\') continue;
        buf_add(out, s.p + from, i - from);
        from = i + (surrogate ? 3 : 1);
        static const char named[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
        const char *const name = c ? strchr(named, c) : NULL;
        if (surrogate) {
            buf_addf(out, "\\u%04x", 0xd000 | (s.p[i + 1] & 0x3f) << 6 | (s.p[i + 2] & 0x3f));
            i += 2;
        } else if (name) buf_addf(out, "\\%c", letters[name - named]);
        else buf_addf(out, "\\u%04x", c);
    }
    buf_add(out, s.p + from, s.n - from);
    buf_addc(out, '"');
}

static void dump_float(struct buf *out, const struct tool_parser__value *v) {
    char text[NUMBER_TEXT];
    if (v->text.p) {
        buf_add(out, v->text.p, v->text.n);
    } else if (isfinite(v->re)) {
        number_text(v->re, text);
        buf_adds(out, text);
    } else {
        buf_adds(out, isnan(v->re) ? "NaN" : v->re > 0 ? "Infinity" : "-Infinity");
    }
}

static bool dump(struct buf *out, const struct tool_parser__value *v);

static bool dump_key(struct buf *out, const struct tool_parser__value *key) {
    switch (key->kind) {
    case TOOL_STRING: dump_string(out, key->text); return true;
    case TOOL_NULL:
    case TOOL_BOOL:
    case TOOL_INT:
    case TOOL_FLOAT: buf_addc(out, '"'); break;
    default: return false;
    }
    dump(out, key);
    buf_addc(out, '"');
    return true;
}

static bool dump_items(struct buf *out, const struct tool_parser__value *v) {
    buf_addc(out, v->kind == TOOL_DICT ? '{' : '[');
    for (const struct tool_parser__item *i = v->first; i; i = i->next) {
        if (i != v->first) buf_adds(out, ", ");
        if (v->kind == TOOL_DICT) {
            if (!dump_key(out, i->key)) return false;
            buf_adds(out, ": ");
        }
        if (!dump(out, i->value)) return false;
    }
    buf_addc(out, v->kind == TOOL_DICT ? '}' : ']');
    return true;
}

static bool dump(struct buf *out, const struct tool_parser__value *v) {
    switch (v->kind) {
    case TOOL_NULL: buf_adds(out, "null"); return true;
    case TOOL_BOOL: buf_adds(out, v->truth ? "true" : "false"); return true;
    case TOOL_INT: buf_add(out, v->text.p, v->text.n); return true;
    case TOOL_FLOAT: dump_float(out, v); return true;
    case TOOL_STRING: dump_string(out, v->text); return true;
    case TOOL_LIST:
    case TOOL_TUPLE:
    case TOOL_DICT: return dump_items(out, v);
    default: return false;
    }
}

bool tool_parser__dumps(struct buf *out, const struct tool_parser__value *v) {
    const size_t before = out->n;
    if (dump(out, v)) return true;
    out->n = before;
    if (out->p) out->p[before] = '\0';
    return false;
}
