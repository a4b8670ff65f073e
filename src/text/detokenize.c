/* detokenize.c - the "decoder" section: from tokens to text, all at once or as they come.
 *
 * The reference passes the whole list of tokens through each decoder in turn.  Here
 * each stage takes one token at a time and passes on what is final, and
 * decoding a list is the same run with all its tokens at hand; so a stream gives
 * the same text by construction.  Where a stage must see all that comes before it
 * can say anything, it holds it until the end.
 * Invariant: every stage passes on whole characters. */
#include "text/text_int.h"

#include "base/json.h"

#include <stdlib.h>
#include <string.h>

/* ---- parsing ------------------------------------------------------------------------ */

static int parse_stage(struct text__decode *d, const json_t *v, const char *type, const char *where) {
    if (strcmp(type, "ByteLevel") == 0) {
        d->kind = DECODE_BYTE_LEVEL;
        return 0;
    }
    if (strcmp(type, "ByteFallback") == 0) {
        d->kind = DECODE_BYTE_FALLBACK;
        return 0;
    }
    if (strcmp(type, "Fuse") == 0) {
        d->kind = DECODE_FUSE;
        return 0;
    }
    if (strcmp(type, "Replace") == 0) {
        const char *s;
        d->kind = DECODE_REPLACE;
        TRY(json_str(v, "content", &s, where));
        d->text_n = json_string_length(json_object_get(v, "content"));
        d->text = xstrndup(s, d->text_n);
        return text__pattern_parse(&d->pattern, json_object_get(v, "pattern"), where);
    }
    if (strcmp(type, "Strip") == 0) {
        d->kind = DECODE_STRIP;
        TRY(text__char_parse(v, "content", &d->c, where));
        TRY(json_i64(v, "start", &d->start, where));
        TRY(json_i64(v, "stop", &d->stop, where));
        if (d->start < 0 || d->stop < 0) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: Strip of a negative count", where);
        return 0;
    }
    if (strcmp(type, "Metaspace") == 0) {
        int prepend;
        d->kind = DECODE_METASPACE;
        TRY(text__metaspace_parse(v, &d->c, &prepend, where));
        d->drop_first = prepend != PREPEND_NEVER;
        return 0;
    }
    FAIL(ERR_UNSUPPORTED, "%s: unsupported decoder \"%s\"", where, type);
}

static struct text__decode *add_stage(struct text__decodes *out) {
    xgrow((void **)&out->p, &out->cap, out->n + 1, sizeof *out->p);
    out->p[out->n] = (struct text__decode){0};
    return &out->p[out->n++];
}

static int parse_chain(struct text__decodes *out, const json_t *v, const char *where) {
    const char *type;
    TRY(text__type_of(v, &type, "decoder", where));
    if (strcmp(type, "Sequence") != 0) return parse_stage(add_stage(out), v, type, where);
    const json_t *list = json_object_get(v, "decoders");
    if (!json_is_array(list)) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a Sequence without decoders", where);
    for (size_t i = 0; i < json_array_size(list); i++) TRY(parse_chain(out, json_array_get(list, i), where));
    return 0;
}

int text__decodes_parse(struct text__decodes *out, const json_t *v, const char *where) {
    if (!v || json_is_null(v)) {
        add_stage(out)->kind = DECODE_JOIN; /* without a decoder tokens are joined by spaces */
        return 0;
    }
    TRY(parse_chain(out, v, where));
    bool fused = false;
    for (int64_t i = 0; i < out->n; i++) {
        struct text__decode *d = &out->p[i];
        d->fused = fused;
        d->whole = fused && (d->kind == DECODE_BYTE_LEVEL || d->kind == DECODE_REPLACE || d->kind == DECODE_BYTE_FALLBACK ||
                             (d->kind == DECODE_STRIP && d->stop > 0));
        fused = fused || d->kind == DECODE_BYTE_LEVEL || d->kind == DECODE_FUSE;
    }
    return 0;
}

void text__decodes_free(struct text__decodes *v) {
    for (int64_t i = 0; i < v->n; i++) {
        text__regex_destroy(v->p[i].pattern);
        free(v->p[i].text);
    }
    free(v->p);
    *v = (struct text__decodes){0};
}

/* ---- running ---------------------------------------------------------------------------- */

struct stage_state {
    struct buf hold; /* bytes that cannot be passed on yet */
    struct buf tmp;
    int64_t n_tokens; /* taken so far */
    int64_t n_cut;    /* Strip over a fused token: characters taken off its start, or -1 at the first other */
};
struct text__decode_run {
    const struct text__decodes *chain; /* borrowed */
    struct stage_state *state;
};
struct ctx {
    struct text__decode_run *run;
    struct text__scratch *s;
    struct buf *out;
};

static int push(const struct ctx *c, int64_t k, const char *p, size_t n);

static int push_bytes(const struct ctx *c, int64_t k, size_t n) { /* hold[0, n) as text, to the stage after k */
    struct stage_state *st = &c->run->state[k];
    if (n == 0) return 0;
    buf_reset(&st->tmp);
    TRY(text_utf8_repair(&st->tmp, st->hold.p, n));
    memmove(st->hold.p, st->hold.p + n, st->hold.n - n + 1);
    st->hold.n -= n;
    return push(c, k + 1, st->tmp.p, st->tmp.n);
}

/* A token in the byte-level alphabet is its bytes; any other stands as it is. */
static int byte_level(const struct ctx *c, int64_t k, const char *p, size_t n) {
    struct stage_state *st = &c->run->state[k];
    const size_t had = st->hold.n;
    if (n == 0) return 0;
    TRY(buf_add(&st->hold, p, n)); /* no more bytes than characters, so they are written over it */
    char *to = st->hold.p + had;
    for (size_t i = 0; i < n;) {
        int len;
        const int b = text__char_byte(text__char(p + i, &len));
        if (b < 0) {
            memcpy(st->hold.p + had, p, n);
            to = st->hold.p + had + n;
            break;
        }
        *to++ = (char)b;
        i += (size_t)len;
    }
    st->hold.n = (size_t)(to - st->hold.p);
    *to = '\0';
    return push_bytes(c, k, st->hold.n - text__unfinished(st->hold.p ? st->hold.p : "", st->hold.n));
}

/* "<0x0A>": 10. Rust's from_str_radix also takes a plus for the first digit. */
static int fallback_byte(const char *p, size_t n) {
    if (n != 6 || memcmp(p, "<0x", 3) != 0 || p[5] != '>') return -1;
    int v = 0;
    for (int i = 3; i < 5; i++) {
        const char d = p[i];
        if (d >= '0' && d <= '9') v = v * 16 + (d - '0');
        else if (d >= 'a' && d <= 'f') v = v * 16 + (d - 'a' + 10);
        else if (d >= 'A' && d <= 'F') v = v * 16 + (d - 'A' + 10);
        else if (d != '+' || i != 3) return -1;
    }
    return v;
}

/* The end of a run of byte tokens: one text if it is one, else a replacement for each. */
static int end_run(const struct ctx *c, int64_t k) {
    struct stage_state *st = &c->run->state[k];
    if (st->hold.n == 0) return 0;
    if (text_utf8_valid(st->hold.p, st->hold.n)) TRY(push(c, k + 1, st->hold.p, st->hold.n));
    else
        for (size_t i = 0; i < st->hold.n; i++) TRY(push(c, k + 1, "\xEF\xBF\xBD", 3));
    buf_reset(&st->hold);
    return 0;
}

static int byte_fallback(const struct ctx *c, int64_t k, const char *p, size_t n) {
    const int b = fallback_byte(p, n);
    if (b >= 0) return buf_addc(&c->run->state[k].hold, (char)b);
    TRY(end_run(c, k));
    return push(c, k + 1, p, n);
}

/* Off each token, or off the one fused token as its parts pass by: n_cut counts. */
static int strip(const struct ctx *c, int64_t k, const char *p, size_t n) {
    const struct text__decode *d = &c->run->chain->p[k];
    struct stage_state *st = &c->run->state[k];
    char mark[4];
    const size_t m = (size_t)text__put_char(mark, d->c);
    int64_t cut = d->fused ? st->n_cut : 0;
    while (cut >= 0 && cut < d->start && n >= m) {
        if (memcmp(p, mark, m) != 0) {
            cut = -1;
            break;
        }
        p += m;
        n -= m;
        cut++;
    }
    st->n_cut = cut;
    for (int64_t i = 0; i < d->stop && n >= m && memcmp(p + n - m, mark, m) == 0; i++) n -= m;
    return push(c, k + 1, p, n);
}

/* Marks are spaces; those of the first token were put there by the encoder and go. */
static int metaspace(const struct ctx *c, int64_t k, const char *p, size_t n) {
    const struct text__decode *d = &c->run->chain->p[k];
    struct stage_state *st = &c->run->state[k];
    const bool drop = d->drop_first && (d->fused || st->n_tokens == 1);
    buf_reset(&st->tmp);
    for (size_t i = 0; i < n;) {
        int len;
        if (text__char(p + i, &len) != d->c) TRY(buf_add(&st->tmp, p + i, (size_t)len));
        else if (!drop) TRY(buf_addc(&st->tmp, ' '));
        i += (size_t)len;
    }
    return push(c, k + 1, st->tmp.p ? st->tmp.p : "", st->tmp.n);
}

static int take(const struct ctx *c, int64_t k, const char *p, size_t n) {
    const struct text__decode *d = &c->run->chain->p[k];
    struct stage_state *st = &c->run->state[k];
    st->n_tokens++;
    switch (d->kind) {
    case DECODE_BYTE_LEVEL: return byte_level(c, k, p, n);
    case DECODE_BYTE_FALLBACK: return byte_fallback(c, k, p, n);
    case DECODE_STRIP: return strip(c, k, p, n);
    case DECODE_METASPACE: return metaspace(c, k, p, n);
    case DECODE_FUSE: return push(c, k + 1, p, n);
    case DECODE_REPLACE:
        buf_reset(&st->tmp);
        TRY(text__replace(&(struct text__replacement){d->pattern, d->text, d->text_n}, c->s, p, n, &st->tmp));
        return push(c, k + 1, st->tmp.p, st->tmp.n);
    case DECODE_JOIN:
        if (st->n_tokens > 1) TRY(push(c, k + 1, " ", 1));
        return push(c, k + 1, p, n);
    }
    return 0;
}

static int push(const struct ctx *c, int64_t k, const char *p, size_t n) {
    if (k == c->run->chain->n) return buf_add(c->out, p, n);
    if (c->run->chain->p[k].whole) return buf_add(&c->run->state[k].hold, p, n);
    return take(c, k, p, n);
}

int text__decode_push(struct text__decode_run *r, struct text__scratch *s, const char *p, size_t n, struct buf *out) {
    return push(&(struct ctx){r, s, out}, 0, p, n);
}

/* In order of the stages: what one lets go passes through those after it. */
int text__decode_finish(struct text__decode_run *r, struct text__scratch *s, struct buf *out) {
    const struct ctx c = {r, s, out};
    for (int64_t k = 0; k < r->chain->n; k++) {
        struct stage_state *st = &r->state[k];
        if (r->chain->p[k].whole) {
            struct buf all = st->hold;
            st->hold = (struct buf){0};
            const int rc = take(&c, k, all.p ? all.p : "", all.n);
            buf_free(&all);
            TRY(rc);
        }
        if (r->chain->p[k].kind == DECODE_BYTE_LEVEL) TRY(push_bytes(&c, k, st->hold.n));
        if (r->chain->p[k].kind == DECODE_BYTE_FALLBACK) TRY(end_run(&c, k));
    }
    return 0;
}

struct text__decode_run *text__decode_run_create(const struct text__decodes *v) {
    struct text__decode_run *r = xcalloc(1, sizeof *r);
    r->chain = v;
    r->state = xcalloc((size_t)v->n, sizeof *r->state);
    return r;
}

void text__decode_run_destroy(struct text__decode_run *r) {
    if (!r) return;
    for (int64_t k = 0; k < r->chain->n; k++) {
        buf_free(&r->state[k].hold);
        buf_free(&r->state[k].tmp);
    }
    free(r->state);
    free(r);
}
