/* pre_tokenizer.c - the "pre_tokenizer" section: where text is cut into words.
 *
 * A Sequence is flattened into one list of stages; each cuts every piece that the
 * stage before left, looking at that piece alone.  Stages that rewrite text
 * (Metaspace, a prefix space) move the pieces into a new buffer.
 * Invariant: pieces are in text order, none is empty, all lie on character bounds. */
#include "text/text_int.h"

#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* The pattern of ByteLevel's use_regex: GPT-2's. */
static const char gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* ---- parsing ------------------------------------------------------------------------- */

static int add_stage(struct text__splits *out, struct text__split stage, const char *where) {
    if (out->byte_level) {
        text__regex_destroy(stage.pattern);
        FAIL(ERR_UNSUPPORTED, "%s: unsupported: a pre_tokenizer after ByteLevel", where);
    }
    xgrow((void **)&out->p, &out->cap, out->n + 1, sizeof *out->p);
    out->p[out->n++] = stage;
    return 0;
}

static int parse_behavior(const json_t *v, enum text__behavior *out, const char *where) {
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
    const char *s = "Isolated"; /* what Punctuation has when it says nothing */
    TRY(json_str_opt(v, "behavior", &s, where));
    for (int i = 0; i < 5; i++) {
        if (strcmp(s, names[i]) != 0) continue;
        *out = (enum text__behavior)i;
        return 0;
    }
    FAIL(ERR_UNSUPPORTED, "%s: unsupported split behavior \"%s\"", where, s);
}

static int parse_split(struct text__splits *out, const json_t *v, const char *where) {
    struct text__split st = {.kind = PRE_REGEX};
    TRY(parse_behavior(v, &st.behavior, where));
    TRY(json_bool_opt(v, "invert", &st.invert, where));
    TRY(text__pattern_parse(&st.pattern, json_object_get(v, "pattern"), where));
    return add_stage(out, st, where);
}

static int parse_byte_level(struct text__splits *out, const json_t *v, const char *where) {
    bool prefix = true, regex = true;
    TRY(json_bool_opt(v, "add_prefix_space", &prefix, where));
    TRY(json_bool_opt(v, "use_regex", &regex, where));
    if (out->byte_level) FAIL(ERR_UNSUPPORTED, "%s: unsupported: a pre_tokenizer after ByteLevel", where);
    if (prefix) TRY(add_stage(out, (struct text__split){.kind = PRE_PREFIX_SPACE}, where));
    if (regex) {
        struct text__split st = {.kind = PRE_REGEX, .behavior = SPLIT_ISOLATED};
        TRY(text__regex_create(&st.pattern, gpt2_pattern, sizeof gpt2_pattern - 1, where));
        TRY(add_stage(out, st, where));
    }
    out->byte_level = true;
    return 0;
}

/* One character, as the JSON has it. */
int text__char_parse(const json_t *v, const char *key, int32_t *out, const char *where) {
    const char *s;
    int len;
    TRY(json_str(v, key, &s, where));
    const size_t n = json_string_length(json_object_get(v, key));
    if (n == 0 || (*out = text__char(s, &len), (size_t)len != n))
        FAIL(ERR_FORMAT, "%s: not a valid tokenizer: \"%s\" is not one character", where, key);
    return 0;
}

int text__metaspace_parse(const json_t *v, int32_t *c, int *prepend, const char *where) {
    const char *scheme = "always";
    bool add_prefix_space = true;
    TRY(text__char_parse(v, "replacement", c, where));
    TRY(json_str_opt(v, "prepend_scheme", &scheme, where));
    TRY(json_bool_opt(v, "add_prefix_space", &add_prefix_space, where));
    if (strcmp(scheme, "never") == 0) *prepend = PREPEND_NEVER;
    else if (strcmp(scheme, "first") == 0) *prepend = PREPEND_FIRST;
    else if (strcmp(scheme, "always") == 0) *prepend = PREPEND_ALWAYS;
    else FAIL(ERR_UNSUPPORTED, "%s: unsupported prepend_scheme \"%s\" of Metaspace", where, scheme);
    if (!add_prefix_space && *prepend != PREPEND_NEVER)
        FAIL(ERR_FORMAT, "%s: not a valid tokenizer: add_prefix_space of Metaspace contradicts its prepend_scheme", where);
    return 0;
}

static int parse_metaspace(struct text__splits *out, const json_t *v, const char *where) {
    struct text__split st = {.kind = PRE_METASPACE, .split = true};
    TRY(text__metaspace_parse(v, &st.c, &st.prepend, where));
    TRY(json_bool_opt(v, "split", &st.split, where));
    return add_stage(out, st, where);
}

static int add_class(struct text__splits *out, bool (*class)(int32_t), enum text__behavior behavior, const char *where) {
    return add_stage(out, (struct text__split){.kind = PRE_CLASS, .class = class, .behavior = behavior}, where);
}

static int parse_stage(struct text__splits *out, const json_t *v, const char *type, const char *where) {
    if (strcmp(type, "ByteLevel") == 0) return parse_byte_level(out, v, where);
    if (strcmp(type, "Split") == 0) return parse_split(out, v, where);
    if (strcmp(type, "Metaspace") == 0) return parse_metaspace(out, v, where);
    if (strcmp(type, "Whitespace") == 0) return add_stage(out, (struct text__split){.kind = PRE_WORDS}, where);
    if (strcmp(type, "WhitespaceSplit") == 0) return add_class(out, text__is_space, SPLIT_REMOVED, where);
    if (strcmp(type, "BertPreTokenizer") == 0) {
        TRY(add_class(out, text__is_space, SPLIT_REMOVED, where));
        return add_class(out, text__is_punct, SPLIT_ISOLATED, where);
    }
    if (strcmp(type, "Digits") == 0) {
        bool each = false;
        TRY(json_bool(v, "individual_digits", &each, where));
        return add_class(out, text__is_digit, each ? SPLIT_ISOLATED : SPLIT_CONTIGUOUS, where);
    }
    if (strcmp(type, "Punctuation") == 0) {
        enum text__behavior b;
        TRY(parse_behavior(v, &b, where));
        return add_class(out, text__is_punct, b, where);
    }
    if (strcmp(type, "CharDelimiterSplit") == 0) {
        struct text__split st = {.kind = PRE_CHAR, .behavior = SPLIT_REMOVED};
        TRY(text__char_parse(v, "delimiter", &st.c, where));
        return add_stage(out, st, where);
    }
    FAIL(ERR_UNSUPPORTED, "%s: unsupported pre_tokenizer \"%s\"", where, type);
}

int text__splits_parse(struct text__splits *out, const json_t *v, const char *where) {
    if (!v || json_is_null(v)) return 0;
    const char *type;
    TRY(text__type_of(v, &type, "pre_tokenizer", where));
    if (strcmp(type, "Sequence") != 0) return parse_stage(out, v, type, where);
    const json_t *list = json_object_get(v, "pretokenizers");
    if (!json_is_array(list)) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a Sequence without pretokenizers", where);
    for (size_t i = 0; i < json_array_size(list); i++) TRY(text__splits_parse(out, json_array_get(list, i), where));
    return 0;
}

void text__splits_free(struct text__splits *v) {
    for (int64_t i = 0; i < v->n; i++) text__regex_destroy(v->p[i].pattern);
    free(v->p);
    *v = (struct text__splits){0};
}

/* ---- cutting --------------------------------------------------------------------------- */

struct cutter { /* turns a piece's matches, and what lies between, into pieces */
    struct text__spans *out;
    enum text__behavior behavior;
    int64_t base; /* first piece made from the piece under way */
    bool was_match;
};

static void cut(struct cutter *c, int64_t lo, int64_t hi, bool match) {
    bool join = false; /* with the piece before */
    switch (c->behavior) {
    case SPLIT_REMOVED:
        if (!match) text__spans_add(c->out, lo, hi);
        return;
    case SPLIT_ISOLATED: break;
    case SPLIT_PREVIOUS: join = match && !c->was_match; break;
    case SPLIT_NEXT: join = !match && c->was_match; break;
    case SPLIT_CONTIGUOUS: join = match == c->was_match; break;
    }
    c->was_match = match;
    if (join && c->out->n > c->base) c->out->p[c->out->n - 1].hi = hi;
    else text__spans_add(c->out, lo, hi);
}

static void begin(struct cutter *c) {
    c->base = c->out->n;
    c->was_match = false;
}

/* Matches and what lies between; invert exchanges the two. */
static int cut_regex(const struct text__split *st, struct text__scratch *s, struct cutter *c, const char *subject,
                     struct text__span piece) {
    const size_t n = (size_t)(piece.hi - piece.lo);
    struct text__regex_iter it = {0};
    int64_t done = piece.lo;
    int found;
    while ((found = text__regex_next(st->pattern, s->regex, subject + piece.lo, n, &it)) > 0) {
        const int64_t lo = it.lo + piece.lo, hi = it.hi + piece.lo;
        if (done != lo) cut(c, done, lo, st->invert);
        cut(c, lo, hi, !st->invert);
        done = hi;
    }
    TRY(found);
    if (done != piece.hi) cut(c, done, piece.hi, st->invert);
    return 0;
}

static void cut_class(const struct text__split *st, struct cutter *c, const char *text, struct text__span piece) {
    int64_t done = piece.lo;
    for (int64_t i = piece.lo; i < piece.hi;) {
        int len;
        const int32_t ch = text__char(text + i, &len);
        if (st->class ? st->class(ch) : ch == st->c) {
            if (done < i) cut(c, done, i, false);
            cut(c, i, i + len, true);
            done = i + len;
        }
        i += len;
    }
    if (done < piece.hi) cut(c, done, piece.hi, false);
}

/* Whitespace: \w+|[^\w\s]+ */
static void cut_words(struct text__spans *out, const char *text, struct text__span piece) {
    int64_t from = piece.lo;
    int kind = 0; /* of [from, i): 0 blank, 1 word, 2 other */
    for (int64_t i = piece.lo; i < piece.hi;) {
        int len;
        const int32_t c = text__char(text + i, &len);
        const int k = text__is_word(c) ? 1 : text__is_space(c) ? 0 : 2;
        if (k != kind) {
            if (kind) text__spans_add(out, from, i);
            from = i;
            kind = k;
        }
        i += len;
    }
    if (kind) text__spans_add(out, from, piece.hi);
}

/* Copies the pieces into to, with the stage's changes; cuts at the metaspace. */
static int rewrite(const struct text__split *st, const char *text, const struct text__spans *in, bool at_start, struct buf *to,
                   struct text__spans *out) {
    char mark[4] = {' '};
    const size_t mark_n = st->kind == PRE_METASPACE ? (size_t)text__put_char(mark, st->c) : 1;
    buf_reset(to);
    for (int64_t i = 0; i < in->n; i++) {
        const char *p = text + in->p[i].lo;
        const size_t n = (size_t)(in->p[i].hi - in->p[i].lo);
        const int64_t lo = (int64_t)to->n;
        const bool has = (n >= mark_n && memcmp(p, mark, mark_n) == 0) || p[0] == ' ';
        const bool prefix =
            st->kind == PRE_PREFIX_SPACE || st->prepend == PREPEND_ALWAYS || (st->prepend == PREPEND_FIRST && at_start && i == 0);
        if (prefix && !has) TRY(buf_add(to, mark, mark_n));
        for (size_t k = 0; k < n; k++) {
            if (p[k] == ' ') TRY(buf_add(to, mark, mark_n));
            else TRY(buf_addc(to, p[k]));
        }
        text__spans_add(out, lo, (int64_t)to->n);
    }
    return 0;
}

static void drop_empty(struct text__spans *v) {
    int64_t k = 0;
    for (int64_t i = 0; i < v->n; i++)
        if (v->p[i].lo < v->p[i].hi) v->p[k++] = v->p[i];
    v->n = k;
}

static void swap_spans(struct text__scratch *s) {
    const struct text__spans t = s->spans;
    s->spans = s->spans2;
    s->spans2 = t;
}

/* From spans to spans2, which then trade places. */
static int run_stage(const struct text__split *st, struct text__scratch *s, const char *text, size_t n) {
    struct cutter c = {.out = &s->spans2, .behavior = st->behavior};
    const char *subject = text;
    if (st->kind == PRE_REGEX && !text__regex_is_literal(st->pattern)) subject = text__proxy(&s->proxy, text, n);
    s->spans2.n = 0;
    for (int64_t i = 0; i < s->spans.n; i++) {
        begin(&c);
        if (st->kind == PRE_REGEX) TRY(cut_regex(st, s, &c, subject, s->spans.p[i]));
        else if (st->kind == PRE_WORDS) cut_words(&s->spans2, text, s->spans.p[i]);
        else cut_class(st, &c, text, s->spans.p[i]);
    }
    drop_empty(&s->spans2);
    swap_spans(s);
    return 0;
}

int text__pre_tokenize(const struct text__splits *v, struct text__scratch *s, const char *text, size_t n, bool at_start,
                       const char **out) {
    struct buf *to = &s->pre, *other = &s->pre2;
    s->spans.n = 0;
    if (n > 0) text__spans_add(&s->spans, 0, (int64_t)n);
    for (int64_t i = 0; i < v->n && s->spans.n > 0; i++) {
        const struct text__split *st = &v->p[i];
        if (st->kind != PRE_METASPACE && st->kind != PRE_PREFIX_SPACE) {
            TRY(run_stage(st, s, text, n));
            continue;
        }
        at_start = at_start && s->spans.p[0].lo == 0;
        s->spans2.n = 0;
        TRY(rewrite(st, text, &s->spans, at_start, to, &s->spans2));
        swap_spans(s);
        text = to->p;
        n = to->n;
        struct buf *t = to;
        to = other;
        other = t;
        if (st->kind == PRE_METASPACE && st->split)
            TRY(run_stage(&(struct text__split){.kind = PRE_CHAR, .behavior = SPLIT_NEXT, .c = st->c}, s, text, n));
    }
    *out = text;
    return 0;
}
