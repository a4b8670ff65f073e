/* yaml.c - YAML 1.1 as OmegaConf reads and PyYAML writes it, over libyaml.
 * Plain words get PyYAML's types (yes is true, 0o17 is text, 1e-6 is a float);
 * anchors, aliases and << work; other tags than !!str do not.
 * Invariant: a text printed plain reads back as the same text. */
#include "conf/conf_int.h"

#include "base/err.h"
#include "base/encoding/number.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define MAX_DEPTH 64
#define MAX_NODES 200000
#define MAX_KEYS 4096 /* of one mapping, which is searched from its first key on */

/* ---- types of plain words ---- */

static bool in_words(const char *s, const char *words) { /* words: "|a|b|" */
    const size_t n = strlen(s);
    if (n == 0 || strchr(s, '|')) return false;
    for (const char *p = words; (p = strstr(p, s)) != NULL; p++)
        if (p[-1] == '|' && p[n] == '|') return true;
    return false;
}

static size_t run_of(const char *s, const char *set) { return strspn(s, set); }

static bool is_int(const char *s) {
    s += *s == '-' || *s == '+';
    if (s[0] == '0' && s[1] == 'b') return s[2] && s[2 + run_of(s + 2, "01_")] == '\0';
    if (s[0] == '0' && s[1] == 'x') return s[2] && s[2 + run_of(s + 2, "0123456789abcdefABCDEF_")] == '\0';
    if (s[0] == '0') return s[1 + run_of(s + 1, "01234567_")] == '\0';
    return *s >= '1' && *s <= '9' && s[run_of(s, "0123456789_")] == '\0';
}

/* 190:20:30, an integer to base 60 in YAML 1.1 */
static bool is_sexagesimal(const char *s) {
    s += *s == '-' || *s == '+';
    if (*s < '1' || *s > '9') return false;
    s += run_of(s, "0123456789_");
    if (*s != ':') return false;
    while (*s == ':') {
        const size_t n = run_of(s + 1, "0123456789");
        if (n < 1 || n > 2 || (n == 2 && s[1] > '5')) return false;
        s += 1 + n;
    }
    return *s == '\0';
}

/* OmegaConf's float: digits with a point or an exponent. */
static bool is_float(const char *s) {
    const char *t = s + (*s == '-' || *s == '+');
    if (in_words(t, "|.inf|.Inf|.INF|") || in_words(s, "|.nan|.NaN|.NAN|")) return true;
    const bool lead = isdigit((unsigned char)*t);
    if (lead) {
        t += run_of(t, "0123456789_");
        if (t[-1] == '_') return false;
        if (*t == '.') t += 1 + run_of(t + 1, "0123456789_");
        else if (*t != 'e' && *t != 'E') return false;
    } else {
        if (t != s || *t != '.' || !isdigit((unsigned char)t[1])) return false;
        t += 1 + run_of(t + 1, "0123456789_");
        if (t[-1] == '_') return false;
    }
    if (*t == 'e' || *t == 'E') {
        t++;
        if (*t == '-' || *t == '+') t++;
        else if (!lead) return false;
        if (!isdigit((unsigned char)*t)) return false;
        t += run_of(t, "0123456789");
    }
    return *t == '\0';
}

static enum conf_kind plain_kind(const char *s) {
    if (*s == '\0' || in_words(s, "|~|null|Null|NULL|")) return CONF_NULL;
    if (in_words(s, "|yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF|")) return CONF_BOOL;
    if (is_int(s) || is_sexagesimal(s)) return CONF_INT;
    if (is_float(s)) return CONF_FLOAT;
    return CONF_STR;
}

static int int_value(const char *s, int64_t *out) {
    const bool neg = *s == '-';
    s += *s == '-' || *s == '+';
    int base = 10;
    if (s[0] == '0' && s[1] == 'b') base = 2, s += 2;
    else if (s[0] == '0' && s[1] == 'x') base = 16, s += 2;
    else if (s[0] == '0') base = 8;
    int64_t total = 0, part = 0;
    for (;; s++) {
        int digit = -1;
        if (isdigit((unsigned char)*s)) digit = *s - '0';
        else if (base == 16 && isxdigit((unsigned char)*s)) digit = tolower((unsigned char)*s) - 'a' + 10;
        if (digit >= 0) {
            if (__builtin_mul_overflow(part, (int64_t)base, &part) || __builtin_add_overflow(part, digit, &part)) return -1;
        } else if (*s == ':' || *s == '\0') {
            if (__builtin_mul_overflow(total, (int64_t)60, &total) || __builtin_add_overflow(total, part, &total)) return -1;
            part = 0;
            if (*s == '\0') break;
        }
    }
    *out = neg ? -total : total;
    return 0;
}

static double float_value(const char *s) {
    struct buf b = {0};
    const char *t = s + (*s == '-' || *s == '+');
    if (*t == '.' && isalpha((unsigned char)t[1])) { /* .inf, .nan */
        const double f = strtod(t + 1, NULL);
        return *s == '-' ? -f : f;
    }
    for (; *s; s++)
        if (*s != '_') buf_addc(&b, *s);
    const double f = strtod(b.p, NULL);
    buf_free(&b);
    return f;
}

/* ---- reading ---- */
struct anchor {
    char *name;
    struct conf_node *v; /* a copy, owned */
};
struct reader {
    yaml_parser_t parser;
    const char *where;
    struct anchor *anchors;
    int64_t n_anchors, cap_anchors;
    int64_t n_nodes;
    int depth;
};

static int next(struct reader *r, yaml_event_t *e) {
    if (yaml_parser_parse(&r->parser, e)) return 0;
    FAIL(ERR_INVAL, "%s:%zu: not YAML: %s", r->where, r->parser.problem_mark.line + 1,
         r->parser.problem ? r->parser.problem : "cannot be read");
}

static int64_t count(const struct conf_node *v) {
    int64_t n = 1;
    for (int64_t k = 0; k < v->n; k++) n += count(v->items[k].v);
    return n;
}

static void remember(struct reader *r, const char *name, const struct conf_node *v) {
    if (!name) return;
    xgrow((void **)&r->anchors, &r->cap_anchors, r->n_anchors + 1, sizeof *r->anchors);
    r->anchors[r->n_anchors++] = (struct anchor){xstrdup(name), conf__node_copy(v)};
}

static int read_scalar(struct reader *r, const yaml_event_t *e, struct conf_node **out) {
    const char *s = (const char *)e->data.scalar.value;
    const char *tag = (const char *)e->data.scalar.tag;
    const size_t line = e->start_mark.line + 1;
    if (strlen(s) != e->data.scalar.length) FAIL(ERR_INVAL, "%s:%zu: a text with a zero byte", r->where, line);
    if (tag && strcmp(tag, YAML_STR_TAG) != 0 && strcmp(tag, "!") != 0)
        FAIL(ERR_INVAL, "%s:%zu: the tag %s is not supported", r->where, line, tag);
    const bool plain = !tag && e->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    const enum conf_kind kind = plain ? plain_kind(s) : CONF_STR;
    struct conf_node *v = kind == CONF_STR ? conf__node_str(s, strlen(s)) : conf__node_new(kind);
    if (kind == CONF_BOOL) v->b = in_words(s, "|yes|Yes|YES|true|True|TRUE|on|On|ON|");
    if (kind == CONF_FLOAT) v->f = float_value(s);
    if (kind == CONF_INT && int_value(s, &v->i) < 0) {
        conf__node_free(v);
        FAIL(ERR_INVAL, "%s:%zu: %s does not fit in 64 bits", r->where, line, s);
    }
    *out = v;
    return 0;
}

static int read_node(struct reader *r, const yaml_event_t *e, struct conf_node **out);

/* "<<: *a" and "<<: [*a, *b]": keys that are not in the mapping yet. */
static int merge_key(struct reader *r, struct conf_node *map, struct conf_node *v, size_t line) {
    const struct conf_node *src = v;
    for (int64_t k = 0; k < (v->kind == CONF_LIST ? v->n : 1); k++) {
        if (v->kind == CONF_LIST) src = v->items[k].v;
        if (src->kind != CONF_DICT) FAIL(ERR_INVAL, "%s:%zu: << takes a mapping", r->where, line);
        if (map->n + src->n > MAX_KEYS) FAIL(ERR_INVAL, "%s:%zu: a mapping of over %d keys", r->where, line, MAX_KEYS);
        for (int64_t j = 0; j < src->n; j++)
            if (!conf__node_child(map, src->items[j].key, strlen(src->items[j].key)))
                conf__node_put(map, src->items[j].key, conf__node_copy(src->items[j].v));
    }
    return 0;
}

static int read_pair(struct reader *r, const yaml_event_t *ke, struct conf_node *map, struct conf_node **merge) {
    const size_t line = ke->start_mark.line + 1;
    yaml_event_t ve;
    struct conf_node *v = NULL;
    if (ke->type != YAML_SCALAR_EVENT) FAIL(ERR_INVAL, "%s:%zu: a key must be a word", r->where, line);
    if (map->n == MAX_KEYS) FAIL(ERR_INVAL, "%s:%zu: a mapping of over %d keys", r->where, line, MAX_KEYS);
    const char *key = (const char *)ke->data.scalar.value;
    const bool plain = ke->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    TRY(next(r, &ve));
    const int rc = read_node(r, &ve, &v);
    yaml_event_delete(&ve);
    TRY(rc);
    if (plain && strcmp(key, "<<") == 0) {
        conf__node_free(*merge);
        *merge = v;
        return 0;
    }
    if (conf__node_child(map, key, strlen(key))) {
        conf__node_free(v);
        FAIL(ERR_INVAL, "%s:%zu: the key %s stands twice", r->where, line, key);
    }
    conf__node_put(map, key, v);
    map->items[map->n - 1].bare = plain && plain_kind(key) != CONF_STR;
    return 0;
}

static int read_container(struct reader *r, const yaml_event_t *start, struct conf_node **out) {
    const bool is_map = start->type == YAML_MAPPING_START_EVENT;
    const size_t line = start->start_mark.line + 1;
    const char *tag = (const char *)(is_map ? start->data.mapping_start.tag : start->data.sequence_start.tag);
    if (tag && strcmp(tag, "!") != 0 && strcmp(tag, is_map ? YAML_MAP_TAG : YAML_SEQ_TAG) != 0)
        FAIL(ERR_INVAL, "%s:%zu: the tag %s is not supported", r->where, line, tag);
    struct conf_node *c = conf__node_new(is_map ? CONF_DICT : CONF_LIST), *merge = NULL;
    int rc = 0;
    for (;;) {
        yaml_event_t e;
        TRYG(next(r, &e), fail);
        const bool end = e.type == YAML_MAPPING_END_EVENT || e.type == YAML_SEQUENCE_END_EVENT;
        if (!end && is_map) {
            rc = read_pair(r, &e, c, &merge);
        } else if (!end) {
            struct conf_node *v = NULL;
            rc = read_node(r, &e, &v);
            if (rc == 0) conf__node_put(c, NULL, v);
        }
        yaml_event_delete(&e);
        if (rc < 0) goto fail;
        if (end) break;
    }
    if (merge) TRYG(merge_key(r, c, merge, line), fail);
    conf__node_free(merge);
    *out = c;
    return 0;
fail:
    conf__node_free(merge);
    conf__node_free(c);
    return rc;
}

static int read_alias(struct reader *r, const yaml_event_t *e, struct conf_node **out) {
    const char *name = (const char *)e->data.alias.anchor;
    for (int64_t k = r->n_anchors - 1; k >= 0; k--) {
        if (strcmp(r->anchors[k].name, name) != 0) continue;
        r->n_nodes += count(r->anchors[k].v);
        if (r->n_nodes > MAX_NODES) FAIL(ERR_INVAL, "%s: over %d values", r->where, MAX_NODES);
        *out = conf__node_copy(r->anchors[k].v);
        return 0;
    }
    FAIL(ERR_INVAL, "%s:%zu: no anchor &%s", r->where, e->start_mark.line + 1, name);
}

/* The node that begins with event e (which the caller deletes). */
static int read_node(struct reader *r, const yaml_event_t *e, struct conf_node **out) {
    const char *anchor = NULL;
    int rc;
    if (r->depth >= MAX_DEPTH) FAIL(ERR_INVAL, "%s: nested over %d deep", r->where, MAX_DEPTH);
    if (++r->n_nodes > MAX_NODES) FAIL(ERR_INVAL, "%s: over %d values", r->where, MAX_NODES);
    r->depth++;
    switch (e->type) {
    case YAML_SCALAR_EVENT:
        anchor = (const char *)e->data.scalar.anchor;
        rc = read_scalar(r, e, out);
        break;
    case YAML_SEQUENCE_START_EVENT:
    case YAML_MAPPING_START_EVENT:
        anchor = (const char *)(e->type == YAML_MAPPING_START_EVENT ? e->data.mapping_start.anchor : e->data.sequence_start.anchor);
        rc = read_container(r, e, out);
        break;
    case YAML_ALIAS_EVENT: rc = read_alias(r, e, out); break;
    default: rc = err_set(ERR_INVAL, __FILE__, __LINE__, "%s:%zu: a value is expected", r->where, e->start_mark.line + 1);
    }
    r->depth--;
    if (rc == 0) remember(r, anchor, *out);
    return rc;
}

/* Stream, one document (or none: an empty mapping), end. */
static int read_stream(struct reader *r, struct conf_node **out) {
    struct conf_node *v = NULL;
    for (;;) {
        yaml_event_t e;
        int rc = next(r, &e);
        if (rc < 0) {
            conf__node_free(v);
            return err_pass(rc, __FILE__, __LINE__);
        }
        const yaml_event_type_t type = e.type;
        const bool mark = type == YAML_STREAM_START_EVENT || type == YAML_DOCUMENT_START_EVENT || type == YAML_DOCUMENT_END_EVENT ||
                          type == YAML_STREAM_END_EVENT;
        if (!mark && v) rc = err_set(ERR_INVAL, __FILE__, __LINE__, "%s: more than one YAML document", r->where);
        else if (!mark) rc = read_node(r, &e, &v);
        yaml_event_delete(&e);
        if (rc < 0) {
            conf__node_free(v);
            return rc;
        }
        if (type == YAML_STREAM_END_EVENT) break;
    }
    *out = v ? v : conf__node_new(CONF_DICT);
    return 0;
}

int conf__yaml_parse(struct conf_node **out, const char *text, size_t n, const char *where) {
    struct reader r = {.where = where};
    if (!yaml_parser_initialize(&r.parser)) FAIL(ERR_NOMEM, "%s: no memory to read YAML", where);
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, n);
    const int rc = read_stream(&r, out);
    yaml_parser_delete(&r.parser);
    for (int64_t k = 0; k < r.n_anchors; k++) {
        free(r.anchors[k].name);
        conf__node_free(r.anchors[k].v);
    }
    free(r.anchors);
    return rc;
}

/* ---- printing ---- */

/* A text that some YAML reader would take for something else needs quotes. */
static bool needs_quotes(const char *s) {
    if (plain_kind(s) != CONF_STR || in_words(s, "|y|Y|n|N|=|<<|")) return true;
    const char *t = s + (*s == '-' || *s == '+');
    char *end;
    if (*s && strtod(s, &end) == strtod(s, NULL) && end != s && *end == '\0') return true; /* inf, 1_0, 0x1p3 */
    return isdigit((unsigned char)*t) && strlen(t) > 7 && t[4] == '-';                     /* a date */
}

static int emit(yaml_emitter_t *em, yaml_event_t *e, int made) {
    if (made && yaml_emitter_emit(em, e)) return 0;
    FAIL(ERR_INTERNAL, "cannot print the configuration as YAML: %s", em->problem ? em->problem : "no memory");
}

static int emit_text(yaml_emitter_t *em, const char *s, size_t n, yaml_scalar_style_t style) {
    yaml_event_t e;
    const int made = yaml_scalar_event_initialize(&e, NULL, NULL, (const unsigned char *)s, (int)n, 1, 1, style);
    return emit(em, &e, made);
}

/* A text: its "${" that is meant literally gets the backslash that keeps it so. */
static int emit_str(yaml_emitter_t *em, const struct conf_node *v) {
    if (!v->literal || !strstr(v->s, "${"))
        return emit_text(em, v->s, strlen(v->s), needs_quotes(v->s) ? YAML_SINGLE_QUOTED_SCALAR_STYLE : YAML_ANY_SCALAR_STYLE);
    struct buf b = {0};
    for (const char *p = v->s; *p; p++) {
        size_t k = strspn(p, "\\");
        if (p[k] == '$' && p[k + 1] == '{')
            for (size_t j = 0; j <= k; j++) buf_addc(&b, '\\'); /* k backslashes become 2k + 1 */
        buf_add(&b, p, k + (p[k] != '\0'));                     /* the backslashes may be the last of the text */
        p += k;
        if (*p == '\0') break;
    }
    const int rc = emit_text(em, b.p, b.n, YAML_ANY_SCALAR_STYLE);
    buf_free(&b);
    return rc;
}

static int emit_node(yaml_emitter_t *em, const struct conf_node *v);

static int emit_container(yaml_emitter_t *em, const struct conf_node *v) {
    yaml_event_t e;
    const bool map = v->kind == CONF_DICT;
    int made =
        map ? yaml_mapping_start_event_initialize(&e, NULL, NULL, 1, v->n ? YAML_BLOCK_MAPPING_STYLE : YAML_FLOW_MAPPING_STYLE)
            : yaml_sequence_start_event_initialize(&e, NULL, NULL, 1, v->n ? YAML_BLOCK_SEQUENCE_STYLE : YAML_FLOW_SEQUENCE_STYLE);
    TRY(emit(em, &e, made));
    for (int64_t k = 0; k < v->n; k++) {
        const char *key = v->items[k].key;
        if (map)
            TRY(emit_text(em, key, strlen(key),
                          needs_quotes(key) && !v->items[k].bare ? YAML_SINGLE_QUOTED_SCALAR_STYLE : YAML_ANY_SCALAR_STYLE));
        TRY(emit_node(em, v->items[k].v));
    }
    made = map ? yaml_mapping_end_event_initialize(&e) : yaml_sequence_end_event_initialize(&e);
    return emit(em, &e, made);
}

static int emit_node(yaml_emitter_t *em, const struct conf_node *v) {
    char t[40], f[32];
    switch (v->kind) {
    case CONF_NULL: return emit_text(em, "null", 4, YAML_PLAIN_SCALAR_STYLE);
    case CONF_BOOL: return emit_text(em, v->b ? "true" : "false", v->b ? 4 : 5, YAML_PLAIN_SCALAR_STYLE);
    case CONF_INT: snprintf(t, sizeof t, "%lld", (long long)v->i); return emit_text(em, t, strlen(t), YAML_PLAIN_SCALAR_STYLE);
    case CONF_FLOAT: { /* PyYAML: 1.0e-06, .inf */
        number_text(v->f, f);
        const char *e = strchr(f, 'e');
        const bool special = strpbrk(f, "in") != NULL && !e;
        if (special) snprintf(t, sizeof t, "%s.%s", *f == '-' ? "-" : "", *f == '-' ? f + 1 : f);
        else if (e && !strchr(f, '.')) snprintf(t, sizeof t, "%.*s.0%s", (int)(e - f), f, e);
        else snprintf(t, sizeof t, "%s", f);
        return emit_text(em, t, strlen(t), YAML_PLAIN_SCALAR_STYLE);
    }
    case CONF_STR: return emit_str(em, v);
    case CONF_LIST:
    case CONF_DICT:
    default: return emit_container(em, v);
    }
}

static int write_buf(void *b, unsigned char *p, size_t n) { return buf_add(b, p, n) == 0; }

static int print_document(yaml_emitter_t *em, const struct conf_node *v) {
    yaml_event_t e;
    int made = yaml_stream_start_event_initialize(&e, YAML_UTF8_ENCODING);
    TRY(emit(em, &e, made));
    made = yaml_document_start_event_initialize(&e, NULL, NULL, NULL, 1);
    TRY(emit(em, &e, made));
    TRY(emit_node(em, v));
    made = yaml_document_end_event_initialize(&e, 1);
    TRY(emit(em, &e, made));
    made = yaml_stream_end_event_initialize(&e);
    return emit(em, &e, made);
}

int conf__yaml_print(struct buf *b, const struct conf_node *v) {
    yaml_emitter_t em;
    if (!yaml_emitter_initialize(&em)) FAIL(ERR_NOMEM, "no memory to print YAML");
    yaml_emitter_set_output(&em, write_buf, b);
    yaml_emitter_set_width(&em, -1);
    yaml_emitter_set_unicode(&em, 1);
    const int rc = print_document(&em, v);
    yaml_emitter_delete(&em);
    return rc;
}
