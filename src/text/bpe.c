/* bpe.c - byte-pair encoding: the vocabulary, the merges, one word at a time.
 *
 * A word starts as one symbol per character (byte, where the tokenizer is
 * byte-level) and the neighbours whose merge ranks lowest, the leftmost first, are
 * joined until none is left (Sennrich et al., 2016; HF models/bpe).  Short words,
 * which are nearly all, scan for the lowest rank; long ones use a heap, so that a
 * text without any break stays n log n.
 * Invariant: the result depends on the word alone; the word cache only saves time. */
#include "text/text_int.h"

#include "base/hash.h"
#include "base/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_ID = 1 << 24,  /* an id beyond this is a broken file, not a vocabulary */
    SHORT_WORD = 48,   /* symbols up to which scanning beats the heap */
    CACHED_WORD = 128, /* bytes; longer words hardly come twice */
    CACHE_SLOTS = 1 << 16,
    CACHE_ENTRIES = CACHE_SLOTS / 2,
};
static const uint32_t NO_RANK = UINT32_MAX;

/* ---- the byte-level alphabet ------------------------------------------------- */

/* GPT-2's bytes_to_unicode: printable bytes are themselves, the others follow from U+0100. */
static bool is_printable(int b) { return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE; }

static int32_t byte_char(uint8_t b) {
    if (is_printable(b)) return b;
    if (b <= 0x20) return 0x100 + b;
    if (b == 0xAD) return 0x143;
    return 0x121 + (b - 0x7F); /* 0x7F to 0xA0 */
}

int text__char_byte(int32_t c) {
    if (c < 0x100) return is_printable(c) ? c : -1;
    if (c <= 0x120) return c - 0x100;
    if (c <= 0x142) return c - 0x121 + 0x7F;
    return c == 0x143 ? 0xAD : -1;
}

/* ---- vocabulary ---------------------------------------------------------------- */

static const char *entry_str(const struct text__vocab *v, const struct text__entry *e) { return v->chars.p + e->at; }

/* Open addressing, never more than half full. The tag avoids most string comparisons.
 * The slot of the string, or the empty slot where it belongs. */
static int64_t vocab_slot(const struct text__vocab *v, const char *p, size_t n, uint64_t h) {
    const int64_t mask = v->n_slots - 1;
    const uint32_t tag = (uint32_t)(h >> 32);
    int64_t i = (int64_t)h & mask;
    for (; v->slots[i].entry >= 0; i = (i + 1) & mask) {
        if (v->slots[i].tag != tag) continue;
        const struct text__entry *e = &v->entries[v->slots[i].entry];
        if ((size_t)e->n == n && memcmp(entry_str(v, e), p, n) == 0) break;
    }
    return i;
}

static void vocab_resize(struct text__vocab *v, int64_t n_slots) {
    free(v->slots);
    v->slots = xmalloc((size_t)n_slots * sizeof *v->slots);
    v->n_slots = n_slots;
    for (int64_t i = 0; i < n_slots; i++) v->slots[i].entry = -1;
    for (int64_t i = 0; i < v->n; i++) {
        const struct text__entry *e = &v->entries[i];
        const uint64_t h = hash64(entry_str(v, e), (size_t)e->n);
        v->slots[vocab_slot(v, entry_str(v, e), (size_t)e->n, h)] = (struct text__slot){(uint32_t)(h >> 32), (int32_t)i};
    }
}

int32_t text__vocab_find(const struct text__vocab *v, const char *p, size_t n) {
    return v->n_slots == 0 ? -1 : v->slots[vocab_slot(v, p, n, hash64(p, n))].entry;
}

static int32_t find_id(const struct text__vocab *v, const char *p, size_t n) {
    const int32_t e = text__vocab_find(v, p, n);
    return e < 0 ? -1 : v->entries[e].id;
}

/* A string that comes again takes its last id. */
static int vocab_add(struct text__vocab *v, const char *p, size_t n, int64_t id, const char *where) {
    if (id < 0 || id >= MAX_ID)
        FAIL(ERR_FORMAT, "%s: not a valid tokenizer: token \"%.40s\" has the id %lld", where, p, (long long)id);
    if (n > INT32_MAX / 2) FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a token of %zu bytes", where, n);
    if (2 * (v->n + 1) > v->n_slots) vocab_resize(v, v->n_slots ? 2 * v->n_slots : 1024);
    const uint64_t h = hash64(p, n);
    const int64_t s = vocab_slot(v, p, n, h);
    int32_t entry = v->slots[s].entry;
    if (entry < 0) {
        xgrow((void **)&v->entries, &v->cap, v->n + 1, sizeof *v->entries);
        entry = (int32_t)v->n++;
        v->entries[entry] = (struct text__entry){(int64_t)v->chars.n, (int32_t)n, (int32_t)id};
        v->slots[s] = (struct text__slot){(uint32_t)(h >> 32), entry};
        TRY(buf_add(&v->chars, p, n));
        TRY(buf_addc(&v->chars, '\0'));
    }
    v->entries[entry].id = (int32_t)id;
    const int64_t had = v->n_ids;
    if (id >= had) {
        xgrow((void **)&v->by_id, &v->cap_ids, id + 1, sizeof *v->by_id);
        for (int64_t i = had; i <= id; i++) v->by_id[i] = -1;
        v->n_ids = id + 1;
    }
    v->by_id[id] = entry;
    return 0;
}

static int parse_vocab(struct text__vocab *v, struct text__json j) {
    int64_t n_slots = 1024;
    while (n_slots < (j.end - j.p) / 12) n_slots *= 2; /* an entry takes at least so many bytes, mostly twice */
    vocab_resize(v, n_slots);
    struct buf key = {0};
    int rc, more;
    TRYG(text__json_expect(&j, '{'), done);
    for (bool first = true;; first = false) {
        TRYG(more = text__json_more(&j, '}', first), done);
        if (!more) break;
        int64_t id;
        buf_reset(&key);
        TRYG(text__json_string(&j, &key), done);
        TRYG(text__json_expect(&j, ':'), done);
        TRYG(text__json_i64(&j, &id), done);
        TRYG(vocab_add(v, key.p ? key.p : "", key.n, id, j.where), done);
    }
    rc = 0;
done:
    buf_free(&key);
    return rc;
}

/* ---- merges ---------------------------------------------------------------------- */

/* Fibonacci hashing: the upper half of the product depends on all bits of the pair. */
static int64_t merge_slot(const struct text__bpe *b, uint64_t pair) {
    const int64_t mask = b->n_slots - 1;
    int64_t i = (int64_t)((pair * 0x9E3779B97F4A7C15ull) >> 32) & mask;
    while (b->merges[i].pair != pair && b->merges[i].pair != UINT64_MAX) i = (i + 1) & mask;
    return i;
}

static uint64_t pair_key(int32_t left, int32_t right) { return (uint64_t)(uint32_t)left << 32 | (uint32_t)right; }

static const struct text__merge *find_merge(const struct text__bpe *b, int32_t left, int32_t right) {
    const struct text__merge *m = &b->merges[merge_slot(b, pair_key(left, right))];
    return m->pair == UINT64_MAX ? NULL : m;
}

static void merges_resize(struct text__bpe *b, int64_t n_slots) {
    struct text__merge *old = b->merges;
    const int64_t n_old = b->n_slots;
    b->merges = xmalloc((size_t)n_slots * sizeof *b->merges);
    b->n_slots = n_slots;
    for (int64_t i = 0; i < n_slots; i++) b->merges[i].pair = UINT64_MAX;
    for (int64_t i = 0; i < n_old; i++)
        if (old[i].pair != UINT64_MAX) b->merges[merge_slot(b, old[i].pair)] = old[i];
    free(old);
}

/* left and right follow each other in tmp: left is tmp[0, n_left), right the rest. A
 * pair that comes again takes its last rank. */
static int merges_add(struct text__bpe *b, struct buf *tmp, size_t n_left, uint32_t rank, const char *where) {
    const size_t n_right = tmp->n - n_left, n_prefix = strlen(b->prefix);
    const int32_t left = find_id(&b->vocab, tmp->p, n_left), right = find_id(&b->vocab, tmp->p + n_left, n_right);
    int32_t id = -1;
    if (n_right >= n_prefix) { /* the joined token keeps only the left one's prefix */
        memmove(tmp->p + n_left, tmp->p + n_left + n_prefix, n_right - n_prefix);
        id = find_id(&b->vocab, tmp->p, tmp->n - n_prefix);
    }
    if (left < 0 || right < 0 || id < 0)
        FAIL(ERR_FORMAT, "%s: not a valid tokenizer: merge %u joins tokens that are not in the vocabulary (\"%.60s\")", where, rank,
             tmp->p);
    if (2 * (b->n_merges + 1) > b->n_slots) merges_resize(b, 2 * b->n_slots);
    struct text__merge *m = &b->merges[merge_slot(b, pair_key(left, right))];
    b->n_merges += m->pair == UINT64_MAX;
    *m = (struct text__merge){pair_key(left, right), rank, id};
    return 0;
}

/* "left right", or ["left", "right"]. Leaves both in tmp; *n_left < 0: a comment line. */
static int parse_merge(struct text__json *j, struct buf *tmp, int64_t *n_left) {
    char c;
    buf_reset(tmp);
    TRY(text__json_next(j, &c));
    if (c == '[') {
        TRY(text__json_expect(j, '['));
        TRY(text__json_string(j, tmp));
        *n_left = (int64_t)tmp->n;
        TRY(text__json_expect(j, ','));
        TRY(text__json_string(j, tmp));
        return text__json_expect(j, ']');
    }
    TRY(text__json_string(j, tmp));
    *n_left = -1;
    if (tmp->n >= 8 && memcmp(tmp->p, "#version", 8) == 0) return 0;
    char *space = tmp->n ? memchr(tmp->p, ' ', tmp->n) : NULL;
    if (!space || memchr(space + 1, ' ', tmp->n - (size_t)(space + 1 - tmp->p)))
        FAIL(ERR_FORMAT, "%s: not a valid tokenizer: a merge that is not two tokens (\"%.60s\")", j->where, tmp->p ? tmp->p : "");
    *n_left = space - tmp->p;
    memmove(space, space + 1, tmp->n - (size_t)*n_left - 1);
    tmp->n--;
    return 0;
}

static int parse_merges(struct text__bpe *b, struct text__json j) {
    int64_t n_slots = 1024;
    while (n_slots < (j.end - j.p) / 12) n_slots *= 2;
    merges_resize(b, n_slots);
    struct buf tmp = {0};
    uint32_t rank = 0;
    int rc, more;
    TRYG(text__json_expect(&j, '['), done);
    for (bool first = true;; first = false) {
        int64_t n_left = -1;
        TRYG(more = text__json_more(&j, ']', first), done);
        if (!more) break;
        TRYG(parse_merge(&j, &tmp, &n_left), done);
        if (n_left < 0) continue;
        TRYG(merges_add(b, &tmp, (size_t)n_left, rank++, j.where), done);
    }
    rc = 0;
done:
    buf_free(&tmp);
    return rc;
}

/* ---- the "model" section ------------------------------------------------------------ */

static int take_affix(const json_t *small, const char *key, char **out, const char *where) {
    const char *s = "";
    TRY(json_str_opt(small, key, &s, where));
    *out = xstrdup(s);
    return 0;
}

static int parse_small(struct text__bpe *b, const json_t *small, const char *where) {
    const char *type = "BPE", *unk = NULL;
    double dropout = 0;
    TRY(json_str_opt(small, "type", &type, where));
    if (strcmp(type, "BPE") != 0)
        FAIL(ERR_UNSUPPORTED, "%s: unsupported tokenizer model \"%s\"; only BPE is read here", where, type);
    TRY(json_f64_opt(small, "dropout", &dropout, where));
    if (dropout != 0) FAIL(ERR_UNSUPPORTED, "%s: unsupported: BPE dropout %g (ids would be random)", where, dropout);
    TRY(json_bool_opt(small, "fuse_unk", &b->fuse_unk, where));
    TRY(json_bool_opt(small, "byte_fallback", &b->byte_fallback, where));
    TRY(json_bool_opt(small, "ignore_merges", &b->ignore_merges, where));
    TRY(take_affix(small, "continuing_subword_prefix", &b->prefix, where));
    TRY(take_affix(small, "end_of_word_suffix", &b->suffix, where));
    TRY(json_str_opt(small, "unk_token", &unk, where));
    b->unk_name = unk ? xstrdup(unk) : NULL;
    return 0;
}

/* The tokens of single bytes, under both of the ways files spell them. */
static void find_bytes(struct text__bpe *b) {
    for (int i = 0; i < 256; i++) {
        char s[8];
        const int n = text__put_char(s, byte_char((uint8_t)i));
        b->byte_id[i] = find_id(&b->vocab, s, (size_t)n);
        snprintf(s, sizeof s, "<0x%02X>", (unsigned)i);
        b->fallback_id[i] = find_id(&b->vocab, s, 6);
    }
}

/* Small members go into one JSON object, the two large ones are read in place. */
int text__bpe_parse(struct text__bpe *b, struct text__json *j) {
    struct text__json vocab = {0}, merges = {0};
    struct buf key = {0};
    json_t *small = json_object();
    int rc, more;
    TRYG(text__json_expect(j, '{'), done);
    for (bool first = true;; first = false) {
        struct text__json part = *j;
        TRYG(more = text__json_more(j, '}', first), done);
        if (!more) break;
        buf_reset(&key);
        TRYG(text__json_string(j, &key), done);
        TRYG(text__json_expect(j, ':'), done);
        TRYG(text__json_skip(j, &part.p, &part.end), done);
        if (strcmp(key.p, "vocab") == 0) vocab = part;
        else if (strcmp(key.p, "merges") == 0) merges = part;
        else {
            json_t *v;
            TRYG(json_parse(&v, part.p, (size_t)(part.end - part.p), j->where), done);
            json_object_set_new(small, key.p, v);
        }
    }
    TRYG(parse_small(b, small, j->where), done);
    if (!vocab.p || !merges.p)
        FAILG(done, ERR_FORMAT, "%s: not a valid tokenizer: its model has no %s", j->where, vocab.p ? "merges" : "vocab");
    TRYG(parse_vocab(&b->vocab, vocab), done);
    TRYG(parse_merges(b, merges), done);
    b->unk = TEXT_NO_UNK;
    if (b->unk_name) {
        b->unk = find_id(&b->vocab, b->unk_name, strlen(b->unk_name));
        if (b->unk < 0) b->unk = TEXT_UNK_MISSING;
    }
    find_bytes(b);
    rc = 0;
done:
    json_decref(small);
    buf_free(&key);
    return rc;
}

void text__bpe_free(struct text__bpe *b) {
    buf_free(&b->vocab.chars);
    free(b->vocab.entries);
    free(b->vocab.slots);
    free(b->vocab.by_id);
    free(b->merges);
    free(b->unk_name);
    free(b->prefix);
    free(b->suffix);
    *b = (struct text__bpe){0};
}

/* ---- words ------------------------------------------------------------------------------ */

struct candidate { /* a pair that may be merged; order: rank, then position */
    uint64_t key;  /* rank << 32 | position */
    int32_t id;
};
struct cached {
    uint64_t hash;
    uint32_t key_at, key_n, ids_at, ids_n; /* key_n 0: empty */
};
struct text__word_scratch {
    struct cached *slots;
    int64_t n_cached;
    struct buf keys;
    struct text_ids cached_ids;
    /* the word under way */
    struct text_ids sym;
    int32_t *prev, *next; /* -1: none */
    int64_t cap_prev, cap_next;
    struct candidate *heap;
    int64_t n_heap, cap_heap;
    struct buf tmp;
};

struct text__word_scratch *text__word_scratch_create(void) {
    struct text__word_scratch *w = xcalloc(1, sizeof *w);
    w->slots = xcalloc(CACHE_SLOTS, sizeof *w->slots);
    return w;
}

void text__word_scratch_destroy(struct text__word_scratch *w) {
    if (!w) return;
    free(w->slots);
    buf_free(&w->keys);
    text_ids_free(&w->cached_ids);
    text_ids_free(&w->sym);
    free(w->prev);
    free(w->next);
    free(w->heap);
    buf_free(&w->tmp);
    free(w);
}

static void add_id(struct text_ids *v, int32_t id) {
    if (v->n == v->cap) xgrow((void **)&v->p, &v->cap, v->n + 1, sizeof *v->p);
    v->p[v->n++] = id;
}

/* A character that is no token: its bytes' tokens where there are all of them, else
 * the unknown token, which waits in *pending (< 0: none waits) so that neighbours fuse. */
static int add_missing(const struct text__bpe *b, struct text_ids *sym, const char *s, size_t n, int32_t *pending) {
    bool all = b->byte_fallback;
    for (size_t i = 0; all && i < n; i++) all = b->fallback_id[(uint8_t)s[i]] >= 0;
    if (all) {
        for (size_t i = 0; i < n; i++) add_id(sym, b->fallback_id[(uint8_t)s[i]]);
        return 0;
    }
    if (b->unk == TEXT_NO_UNK) return 0;
    if (b->unk == TEXT_UNK_MISSING)
        FAIL(ERR_FORMAT, "tokenizer: the text needs the unknown token \"%s\", which is not in the vocabulary", b->unk_name);
    if (*pending >= 0 && !b->fuse_unk) add_id(sym, *pending);
    *pending = b->unk;
    return 0;
}

/* One symbol per character, with the affixes of its place in the word. */
static int load_symbols(const struct text__bpe *b, struct text__word_scratch *w, const char *p, size_t n) {
    const bool affixes = b->prefix[0] || b->suffix[0];
    int32_t pending = -1;
    w->sym.n = 0;
    for (size_t i = 0; i < n;) {
        char c[4];
        const char *s = c;
        int len = 1;
        size_t s_n;
        int32_t id;
        if (b->byte_level) {
            s_n = (size_t)text__put_char(c, byte_char((uint8_t)p[i]));
            id = b->byte_id[(uint8_t)p[i]];
        } else {
            text__char(p + i, &len);
            s = p + i;
            s_n = (size_t)len;
            id = affixes ? -1 : find_id(&b->vocab, s, s_n);
        }
        if (affixes) {
            buf_reset(&w->tmp);
            if (i > 0) TRY(buf_adds(&w->tmp, b->prefix));
            TRY(buf_add(&w->tmp, s, s_n));
            if (i + (size_t)len == n) TRY(buf_adds(&w->tmp, b->suffix));
            s = w->tmp.p;
            s_n = w->tmp.n;
            id = find_id(&b->vocab, s, s_n);
        }
        i += (size_t)len;
        if (id < 0) {
            TRY(add_missing(b, &w->sym, s, s_n, &pending));
            continue;
        }
        if (pending >= 0) add_id(&w->sym, pending);
        pending = -1;
        add_id(&w->sym, id);
    }
    if (pending >= 0) add_id(&w->sym, pending);
    return 0;
}

/* sym[0, n) merged in place; returns how many are left. rank[i] and id[i] are those of
 * the pair (i, i + 1) and only change next to a merge. */
static int64_t merge_short(const struct text__bpe *b, int32_t *sym, int64_t n) {
    uint32_t rank[SHORT_WORD];
    int32_t id[SHORT_WORD];
    for (int64_t i = 0; i + 1 < n; i++) {
        const struct text__merge *m = find_merge(b, sym[i], sym[i + 1]);
        rank[i] = m ? m->rank : NO_RANK;
        id[i] = m ? m->id : -1;
    }
    while (n > 1) {
        int64_t best = 0;
        for (int64_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == NO_RANK) break;
        sym[best] = id[best];
        n--;
        const size_t tail = (size_t)(n - best - 1);
        memmove(sym + best + 1, sym + best + 2, tail * sizeof *sym);
        memmove(rank + best, rank + best + 1, tail * sizeof *rank);
        memmove(id + best, id + best + 1, tail * sizeof *id);
        for (int64_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const struct text__merge *m = find_merge(b, sym[i], sym[i + 1]);
            rank[i] = m ? m->rank : NO_RANK;
            id[i] = m ? m->id : -1;
        }
    }
    return n;
}

/* A binary heap with the lowest key on top. */
static void heap_push(struct text__word_scratch *w, struct candidate c) {
    xgrow((void **)&w->heap, &w->cap_heap, w->n_heap + 1, sizeof *w->heap);
    int64_t i = w->n_heap++;
    for (; i > 0 && c.key < w->heap[(i - 1) / 2].key; i = (i - 1) / 2) w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = c;
}

static struct candidate heap_pop(struct text__word_scratch *w) {
    const struct candidate top = w->heap[0], last = w->heap[--w->n_heap];
    int64_t i = 0;
    for (;;) {
        int64_t k = 2 * i + 1;
        if (k >= w->n_heap) break;
        if (k + 1 < w->n_heap && w->heap[k + 1].key < w->heap[k].key) k++;
        if (last.key <= w->heap[k].key) break;
        w->heap[i] = w->heap[k];
        i = k;
    }
    w->heap[i] = last;
    return top;
}

static void consider(const struct text__bpe *b, struct text__word_scratch *w, int64_t left, int64_t right) {
    const struct text__merge *m = find_merge(b, w->sym.p[left], w->sym.p[right]);
    if (m) heap_push(w, (struct candidate){(uint64_t)m->rank << 32 | (uint64_t)left, m->id});
}

/* Symbols are a list through prev and next; a symbol that was merged into its left
 * neighbour is -1.  Entries of the heap are not removed when they go stale but
 * recognised: their pair no longer merges to their id. */
static void merge_long(const struct text__bpe *b, struct text__word_scratch *w) {
    const int64_t n = w->sym.n;
    int32_t *sym = w->sym.p;
    xgrow((void **)&w->prev, &w->cap_prev, n, sizeof *w->prev);
    xgrow((void **)&w->next, &w->cap_next, n, sizeof *w->next);
    w->n_heap = 0;
    for (int64_t i = 0; i < n; i++) {
        w->prev[i] = (int32_t)(i - 1);
        w->next[i] = (int32_t)(i + 1 < n ? i + 1 : -1);
        if (i + 1 < n) consider(b, w, i, i + 1);
    }
    while (w->n_heap > 0) {
        const struct candidate c = heap_pop(w);
        const int64_t at = (int64_t)(c.key & UINT32_MAX), right = w->next[at];
        if (sym[at] < 0 || right < 0) continue;
        const struct text__merge *m = find_merge(b, sym[at], sym[right]);
        if (!m || m->id != c.id) continue;
        sym[at] = c.id;
        sym[right] = -1;
        w->next[at] = w->next[right];
        if (w->next[at] >= 0) w->prev[w->next[at]] = (int32_t)at;
        if (w->prev[at] >= 0) consider(b, w, w->prev[at], at);
        if (w->next[at] >= 0) consider(b, w, at, w->next[at]);
    }
    int64_t k = 0;
    for (int64_t i = 0; i < n; i++)
        if (sym[i] >= 0) sym[k++] = sym[i];
    w->sym.n = k;
}

static int split_word(const struct text__bpe *b, struct text__word_scratch *w, const char *p, size_t n, struct text_ids *ids) {
    if (b->ignore_merges) { /* a word that is a token as it stands */
        const char *s = p;
        size_t s_n = n;
        if (b->byte_level) {
            buf_reset(&w->tmp);
            for (size_t i = 0; i < n; i++) {
                char c[4];
                const int len = text__put_char(c, byte_char((uint8_t)p[i]));
                TRY(buf_add(&w->tmp, c, (size_t)len));
            }
            s = w->tmp.p;
            s_n = w->tmp.n;
        }
        const int32_t id = find_id(&b->vocab, s, s_n);
        if (id >= 0) {
            add_id(ids, id);
            return 0;
        }
    }
    TRY(load_symbols(b, w, p, n));
    if (w->sym.n <= SHORT_WORD) w->sym.n = merge_short(b, w->sym.p, w->sym.n);
    else merge_long(b, w);
    text_ids_add(ids, w->sym.p, w->sym.n);
    return 0;
}

struct key {
    uint64_t hash;
    const char *p;
    size_t n;
};

static bool cached_is(const struct text__word_scratch *w, const struct cached *c, const struct key *k) {
    return c->hash == k->hash && c->key_n == k->n && memcmp(w->keys.p + c->key_at, k->p, k->n) == 0;
}

/* Full: everything is forgotten at once, which needs no bookkeeping and is rare. */
static void cache_put(struct text__word_scratch *w, struct cached *at, const struct key *k, const int32_t *ids, int64_t n_ids) {
    *at = (struct cached){k->hash, (uint32_t)w->keys.n, (uint32_t)k->n, (uint32_t)w->cached_ids.n, (uint32_t)n_ids};
    CHECK(buf_add(&w->keys, k->p, k->n) == 0);
    text_ids_add(&w->cached_ids, ids, n_ids);
    if (++w->n_cached < CACHE_ENTRIES) return;
    memset(w->slots, 0, CACHE_SLOTS * sizeof *w->slots);
    w->n_cached = 0;
    w->cached_ids.n = 0;
    buf_reset(&w->keys);
}

/* Most words of a text have come before: the cache answers with one hash and one compare. */
int text__bpe_word(const struct text__bpe *b, struct text__word_scratch *w, const char *p, size_t n, struct text_ids *ids) {
    if (n == 0) return 0;
    if (n > CACHED_WORD) return split_word(b, w, p, n, ids);
    const struct key k = {.hash = hash64(p, n), .p = p, .n = n};
    struct cached *c = &w->slots[k.hash & (CACHE_SLOTS - 1)];
    while (c->key_n && !cached_is(w, c, &k)) c = c + 1 < w->slots + CACHE_SLOTS ? c + 1 : w->slots;
    if (c->key_n) {
        text_ids_add(ids, w->cached_ids.p + c->ids_at, c->ids_n);
        return 0;
    }
    const int64_t start = ids->n;
    TRY(split_word(b, w, p, n, ids));
    cache_put(w, c, &k, ids->p + start, ids->n - start);
    return 0;
}
