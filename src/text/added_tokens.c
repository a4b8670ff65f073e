/* added_tokens.c - tokens that are looked for in the text before anything else.
 *
 * At each place the longest one that fits is taken, the leftmost place first
 * (HF added_vocabulary.rs).  There are two passes: over the text as it came, and
 * over what the normalizer makes of the rest.
 * Invariant: the pieces cover the text in order; a token's piece may run into
 * the next one's only through rstrip, as in the reference. */
#include "text/text_int.h"

#include <stdlib.h>
#include <string.h>

static void set_free(struct text__added_set *s) {
    free(s->pat);
    *s = (struct text__added_set){0};
}

void text__added_free(struct text__added *a) {
    for (int64_t i = 0; i < a->n; i++) {
        free(a->p[i].content);
        free(a->p[i].normalized);
    }
    free(a->p);
    map_free(&a->index);
    set_free(&a->raw);
    set_free(&a->normalized);
    *a = (struct text__added){0};
}

static int compare(const struct text__added_pattern *a, const struct text__added_pattern *b) {
    const int c = memcmp(a->p, b->p, a->n < b->n ? a->n : b->n);
    return c ? c : (a->n > b->n) - (a->n < b->n);
}
static int compare_void(const void *a, const void *b) { return compare(a, b); }

static int set_build(struct text__added_set *s, const struct text__added *a, bool normalized, const char *where) {
    s->pat = xcalloc((size_t)a->n, sizeof *s->pat);
    for (int64_t i = 0; i < a->n; i++) {
        const struct text__added_token *t = &a->p[i];
        if (t->is_normalized != normalized) continue;
        const char *p = t->normalized ? t->normalized : t->content;
        const size_t n = t->normalized ? t->normalized_n : t->content_n;
        if (n == 0) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: the added token \"%s\" normalizes to nothing", where, t->content);
        s->pat[s->n++] = (struct text__added_pattern){p, n, (int32_t)i};
    }
    qsort(s->pat, (size_t)s->n, sizeof *s->pat, compare_void);
    for (int64_t i = 0; i < s->n; i++) {
        if (i > 0 && compare(&s->pat[i - 1], &s->pat[i]) == 0)
            FAIL(ERR_FORMAT, "%s: not a valid tokenizer: two added tokens are written \"%.60s\"", where, s->pat[i].p);
        s->first[(uint8_t)s->pat[i].p[0]] = true;
    }
    return 0;
}

int text__added_build(struct text__added *a, const char *where) {
    TRY(set_build(&a->raw, a, false, where));
    return set_build(&a->normalized, a, true, where);
}

/* First pattern in [lo, hi) whose byte at depth is at least b; they agree before depth
 * and are all longer than it. */
static int64_t lower_bound(const struct text__added_set *s, int64_t lo, int64_t hi, size_t depth, int b) {
    while (lo < hi) {
        const int64_t mid = (lo + hi) / 2;
        if ((uint8_t)s->pat[mid].p[depth] < b) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

/* The longest pattern at p, or NULL: the sorted patterns are narrowed byte by byte. */
static const struct text__added_pattern *longest(const struct text__added_set *s, const char *p, int64_t n) {
    const struct text__added_pattern *best = NULL;
    int64_t lo = 0, hi = s->n;
    for (int64_t d = 0; d < n && lo < hi; d++) {
        lo = lower_bound(s, lo, hi, (size_t)d, (uint8_t)p[d]);
        hi = lower_bound(s, lo, hi, (size_t)d, (uint8_t)p[d] + 1);
        if (lo < hi && s->pat[lo].n == (size_t)d + 1) best = &s->pat[lo++]; /* the shortest sorts first */
    }
    return best;
}

static bool word_before(const char *text, int64_t at) {
    int len;
    int64_t i = at - 1;
    while (i > 0 && ((uint8_t)text[i] & 0xC0) == 0x80) i--;
    return at > 0 && text__is_word(text__char(text + i, &len));
}

static bool word_after(const char *text, int64_t n, int64_t at) {
    int len;
    return at < n && text__is_word(text__char(text + at, &len));
}

static int64_t spaces_before(const char *text, int64_t at) {
    while (at > 0) {
        int len;
        int64_t i = at - 1;
        while (i > 0 && ((uint8_t)text[i] & 0xC0) == 0x80) i--;
        if (!text__is_space(text__char(text + i, &len))) break;
        at = i;
    }
    return at;
}

static int64_t spaces_after(const char *text, int64_t n, int64_t at) {
    int len;
    while (at < n && text__is_space(text__char(text + at, &len))) at += len;
    return at;
}

static void add_piece(struct text__pieces *out, int64_t lo, int64_t hi, int32_t id) {
    xgrow((void **)&out->p, &out->cap, out->n + 1, sizeof *out->p);
    out->p[out->n++] = (struct text__piece){lo, hi, id};
}

void text__added_split(const struct text__added *a, const struct text__added_set *set, const char *text, int64_t n,
                       struct text__pieces *out) {
    int64_t done = 0; /* text before it is in pieces */
    out->n = 0;
    for (int64_t i = 0; set->n > 0 && i < n;) {
        if (!set->first[(uint8_t)text[i]]) {
            i++;
            continue;
        }
        const struct text__added_pattern *m = longest(set, text + i, n - i);
        if (!m) {
            i++;
            continue;
        }
        const struct text__added_token *t = &a->p[m->token];
        int64_t lo = i, hi = i + (int64_t)m->n;
        i = hi; /* the search goes on after the match, whether it counts or not */
        if (t->single_word && (word_before(text, lo) || word_after(text, n, hi))) continue;
        if (t->lstrip) {
            const int64_t spaces = spaces_before(text, lo);
            lo = spaces > done ? spaces : done;
        }
        if (t->rstrip) hi = spaces_after(text, n, hi);
        if (done < lo) add_piece(out, done, lo, -1);
        add_piece(out, lo, hi, t->id);
        done = hi;
    }
    if (done < n) add_piece(out, done, n, -1);
}
