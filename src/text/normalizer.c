/* normalizer.c - the "normalizer" section: what is done to text between added tokens.
 *
 * A Sequence is flattened into one list of steps.  A step that would change
 * nothing does not copy: ASCII text passes the Unicode forms as it is.
 * Invariant: the result is valid UTF-8 when the input is, and not much longer than it. */
#include "text/text_int.h"

#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* {"String": ...} or {"Regex": ...} */
int text__pattern_parse(struct text__regex **out, const json_t *v, const char *where) {
    const json_t *s = json_object_get(v, "String"), *r = json_object_get(v, "Regex");
    if (json_is_string(s)) return text__regex_create_literal(out, json_string_value(s), json_string_length(s), where);
    if (json_is_string(r)) return text__regex_create(out, json_string_value(r), json_string_length(r), where);
    FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a pattern that is neither String nor Regex", where);
}

int text__type_of(const json_t *v, const char **type, const char *section, const char *where) {
    if (!json_is_object(v)) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: its %s is not an object", where, section);
    return json_str(v, "type", type, where);
}

static int parse_form(struct text__norm *n, const char *type) {
    static const char *const names[] = {"NFC", "NFD", "NFKC", "NFKD"}; /* in the order of enum text__form */
    for (int i = 0; i < 4; i++) {
        if (strcmp(type, names[i]) != 0) continue;
        n->kind = NORM_FORM;
        n->form = (enum text__form)i;
        return 1;
    }
    return 0;
}

static int parse_text(struct text__norm *n, const json_t *v, const char *key, const char *where) {
    const char *s;
    TRY(json_str(v, key, &s, where));
    n->text_n = json_string_length(json_object_get(v, key));
    n->text = xstrndup(s, n->text_n);
    return 0;
}

static int parse_step(struct text__norm *n, const json_t *v, const char *type, const char *where) {
    if (parse_form(n, type)) return 0;
    if (strcmp(type, "Lowercase") == 0) {
        n->kind = NORM_LOWERCASE;
        return 0;
    }
    if (strcmp(type, "Prepend") == 0) {
        n->kind = NORM_PREPEND;
        return parse_text(n, v, "prepend", where);
    }
    if (strcmp(type, "Replace") == 0) {
        n->kind = NORM_REPLACE;
        TRY(parse_text(n, v, "content", where));
        return text__pattern_parse(&n->pattern, json_object_get(v, "pattern"), where);
    }
    if (strcmp(type, "Strip") == 0) {
        n->kind = NORM_STRIP;
        TRY(json_bool(v, "strip_left", &n->left, where));
        return json_bool(v, "strip_right", &n->right, where);
    }
    FAIL(ERR_UNSUPPORTED, "%s: unsupported normalizer \"%s\"", where, type);
}

int text__norms_parse(struct text__norms *out, const json_t *v, const char *where) {
    if (!v || json_is_null(v)) return 0;
    const char *type;
    TRY(text__type_of(v, &type, "normalizer", where));
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(v, "normalizers");
        if (!json_is_array(list)) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a Sequence without normalizers", where);
        for (size_t i = 0; i < json_array_size(list); i++) TRY(text__norms_parse(out, json_array_get(list, i), where));
        return 0;
    }
    xgrow((void **)&out->p, &out->cap, out->n + 1, sizeof *out->p);
    out->p[out->n] = (struct text__norm){0};
    return parse_step(&out->p[out->n++], v, type, where);
}

void text__norms_free(struct text__norms *v) {
    for (int64_t i = 0; i < v->n; i++) {
        text__regex_destroy(v->p[i].pattern);
        free(v->p[i].text);
    }
    free(v->p);
    *v = (struct text__norms){0};
}

/* ---- running ----------------------------------------------------------------------- */

/* Below U+0300 nothing combines and NFC has nothing to compose; ASCII passes every form. */
static bool form_keeps(enum text__form form, const char *p, size_t n) {
    if (!text__has_byte_from_80(p, n)) return true;
    if (form != TEXT_NFC) return false;
    for (size_t i = 0; i < n; i++)
        if ((uint8_t)p[i] >= 0xCC) return false; /* first byte of U+0300 */
    return true;
}

int text__replace(const struct text__replacement *r, struct text__scratch *s, const char *text, size_t n, struct buf *out) {
    const char *subject = text__regex_is_literal(r->pattern) ? text : text__proxy(&s->proxy, text, n);
    struct text__regex_iter it = {0};
    size_t done = 0;
    for (;;) {
        const int found = n == 0 ? 0 : text__regex_next(r->pattern, s->regex, subject, n, &it);
        TRY(found);
        if (!found) break;
        TRY(buf_add(out, text + done, (size_t)it.lo - done));
        TRY(buf_add(out, r->by, r->by_n));
        done = (size_t)it.hi;
    }
    return buf_add(out, text + done, n - done);
}

static void strip(const struct text__norm *step, const char **p, size_t *n) {
    int len;
    while (step->left && *n > 0 && text__is_space(text__char(*p, &len))) {
        *p += len;
        *n -= (size_t)len;
    }
    while (step->right && *n > 0) {
        size_t at = *n - 1;
        while (((uint8_t)(*p)[at] & 0xC0) == 0x80) at--;
        if (!text__is_space(text__char(*p + at, &len))) break;
        *n = at;
    }
}

/* One step from *p into out; sets *changed to false where *p may simply be kept. */
static int run_step(const struct text__norm *step, struct text__scratch *s, const char **p, size_t *n, struct buf *out,
                    bool *changed) {
    *changed = true;
    switch (step->kind) {
    case NORM_FORM:
        if (!form_keeps(step->form, *p, *n)) return text__normal_form(out, &s->chars, step->form, *p, *n);
        break;
    case NORM_LOWERCASE: return text__lowercase(out, *p, *n);
    case NORM_REPLACE: return text__replace(&(struct text__replacement){step->pattern, step->text, step->text_n}, s, *p, *n, out);
    case NORM_PREPEND:
        if (*n == 0) break;
        TRY(buf_add(out, step->text, step->text_n));
        return buf_add(out, *p, *n);
    case NORM_STRIP: strip(step, p, n); break;
    }
    *changed = false;
    return 0;
}

int text__normalize(const struct text__norms *v, struct text__scratch *s, const char *text, size_t n, const char **out,
                    size_t *out_n) {
    enum { GROWTH = 256, SLACK = 65536 };
    struct buf *to = &s->norm, *other = &s->norm2;
    to->max = other->max = n * GROWTH + SLACK;
    for (int64_t i = 0; i < v->n; i++) {
        bool changed;
        buf_reset(to);
        const int rc = run_step(&v->p[i], s, &text, &n, to, &changed);
        if (rc == ERR_FORMAT && to->n + GROWTH > to->max)
            FAIL(ERR_INPUT, "the tokenizer's normalizer multiplies the text: %s", err_msg());
        TRY(rc);
        if (!changed) continue;
        text = to->p ? to->p : "";
        n = to->n;
        struct buf *t = to;
        to = other;
        other = t;
    }
    *out = text;
    *out_n = n;
    return 0;
}
