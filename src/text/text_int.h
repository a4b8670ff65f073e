/* text_int.h - what the files of src/text share.
 *
 * Encoding: added tokens are cut out (added_tokens.c), what lies between
 * is normalized (normalizer.c), cut into words (pre_tokenizer.c, regex.c), and
 * each word becomes ids (bpe.c).  Decoding is a chain of small stages
 * (detokenize.c).  tokenizer.c reads the file and ties them together.
 *
 * Everything that changes while encoding lives in struct text__scratch, one for
 * each running call; the parts of a tokenizer are read-only once it is open. */
#ifndef VERLC_TEXT_INT_H
#define VERLC_TEXT_INT_H

#include "base/buf.h"
#include "base/err.h"
#include "base/map.h"
#include "text/text.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- UTF-8 and Unicode (utf8.c, unicode.c) -------------------- */

struct text__range {
    int32_t lo, hi, value;
};

/* The code point at p of valid UTF-8; *len gets its bytes. */
int32_t text__char(const char *p, int *len);
int text__put_char(char out[4], int32_t c); /* bytes written */
/* Bytes at the end that may yet become a character: 0 to 3. */
size_t text__unfinished(const char *p, size_t n);
/* Whether some byte is at least 0x80 / 0xE0: what ASCII and Latin text need not pay for. */
bool text__has_byte_from_80(const char *p, size_t n);
bool text__has_byte_from_e0(const char *p, size_t n);

bool text__is_space(int32_t c);
bool text__is_punct(int32_t c);
bool text__is_digit(int32_t c);
bool text__is_word(int32_t c); /* \w of the reference's second regex library */
/* The same text for the eyes of PCRE2: characters that its tables do not know as
 * the reference's do stand in for by others of their category and length.
 * Returns text itself where there is none, else a copy in tmp. */
const char *text__proxy(struct buf *tmp, const char *text, size_t n);

enum text__form { TEXT_NFC, TEXT_NFD, TEXT_NFKC, TEXT_NFKD };
struct text__chars { /* code points under normalization */
    int32_t *p;
    int64_t n, cap;
};
int text__normal_form(struct buf *out, struct text__chars *tmp, enum text__form form, const char *text, size_t n);
int text__lowercase(struct buf *out, const char *text, size_t n);

/* ---- spans --------------------------------------------------------------- */

struct text__span {
    int64_t lo, hi; /* bytes */
};
struct text__spans {
    struct text__span *p; /* owned */
    int64_t n, cap;
};
static inline void text__spans_add(struct text__spans *s, int64_t lo, int64_t hi) {
    if (s->n == s->cap) xgrow((void **)&s->p, &s->cap, s->n + 1, sizeof *s->p);
    s->p[s->n++] = (struct text__span){lo, hi};
}

/* ---- reading tokenizer.json (json_reader.c) -------------------------------- */

struct text__json {
    const char *start, *p, *end;
    const char *where;
};
/* Each reads one thing and moves on; ERR_FORMAT names the byte. */
int text__json_next(struct text__json *j, char *c);                /* looks past blanks, does not take */
int text__json_expect(struct text__json *j, char c);               /* takes c */
int text__json_more(struct text__json *j, char close, bool first); /* 1: an element follows; 0: close was taken */
int text__json_end(struct text__json *j);                          /* nothing but blanks is left */
int text__json_string(struct text__json *j, struct buf *out);      /* appends the decoded string */
int text__json_i64(struct text__json *j, int64_t *out);
int text__json_skip(struct text__json *j, const char **lo, const char **hi); /* any value, its extent */

/* ---- regular expressions (regex.c) ----------------------------------- */

struct text__regex; /* Oniguruma syntax, run by PCRE2; or a plain string */
struct text__regex_scratch;
struct text__regex_iter { /* zeroed to begin */
    int64_t lo, hi;       /* the match */
    size_t from;
    int64_t last_end; /* end of the last match + 1; 0: none yet */
};
int text__regex_create(struct text__regex **out, const char *pattern, size_t n, const char *where);
int text__regex_create_literal(struct text__regex **out, const char *s, size_t n, const char *where);
void text__regex_destroy(struct text__regex *r);
int text__regex_scratch_create(struct text__regex_scratch **out);
void text__regex_scratch_destroy(struct text__regex_scratch *s);
/* 1: [it->lo, it->hi) is the next match; 0: no more; < 0: error. subject is a whole
 * text of its own: nothing before it is looked at. */
int text__regex_next(const struct text__regex *r, struct text__regex_scratch *s, const char *subject, size_t n,
                     struct text__regex_iter *it);
bool text__regex_is_literal(const struct text__regex *r);

/* ---- normalizers (normalizer.c) --------------------------------------------- */

enum text__norm_kind { NORM_FORM, NORM_REPLACE, NORM_PREPEND, NORM_LOWERCASE, NORM_STRIP };
struct text__norm {
    enum text__norm_kind kind;
    enum text__form form;
    struct text__regex *pattern;
    char *text; /* replacement or what is put in front */
    size_t text_n;
    bool left, right;
};
struct text__norms {
    struct text__norm *p;
    int64_t n, cap;
};
int text__norms_parse(struct text__norms *out, const json_t *v, const char *where);
void text__norms_free(struct text__norms *v);
/* {"String": ...} or {"Regex": ...} */
int text__pattern_parse(struct text__regex **out, const json_t *v, const char *where);
int text__type_of(const json_t *v, const char **type, const char *section, const char *where);
int text__char_parse(const json_t *v, const char *key, int32_t *out, const char *where);

/* ---- pre-tokenizers (pre_tokenizer.c) ----------------------------------------- */

enum text__behavior { SPLIT_REMOVED, SPLIT_ISOLATED, SPLIT_PREVIOUS, SPLIT_NEXT, SPLIT_CONTIGUOUS };
enum text__split_kind { PRE_REGEX, PRE_CLASS, PRE_WORDS, PRE_CHAR, PRE_METASPACE, PRE_PREFIX_SPACE };
enum { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS };
struct text__split {
    enum text__split_kind kind;
    enum text__behavior behavior;
    bool invert;
    struct text__regex *pattern; /* PRE_REGEX */
    bool (*class)(int32_t c);    /* PRE_CLASS */
    int32_t c;                   /* PRE_CHAR, PRE_METASPACE: the character */
    int prepend;                 /* PRE_METASPACE: PREPEND_ */
    bool split;                  /* PRE_METASPACE: cut after replacing */
};
struct text__splits {
    struct text__split *p;
    int64_t n, cap;
    bool byte_level; /* words are bytes written in the byte-level alphabet */
};
int text__splits_parse(struct text__splits *out, const json_t *v, const char *where);
void text__splits_free(struct text__splits *v);
int text__metaspace_parse(const json_t *v, int32_t *c, int *prepend, const char *where);

/* ---- vocabulary and merges (bpe.c) ------------------------------------ */

struct text__entry { /* a token string and its id */
    int64_t at;      /* into chars */
    int32_t n, id;
};
struct text__slot {
    uint32_t tag;  /* high hash bits */
    int32_t entry; /* -1: empty */
};
struct text__vocab {
    struct buf chars; /* all strings, each NUL-terminated */
    struct text__entry *entries;
    int64_t n, cap;
    struct text__slot *slots;
    int64_t n_slots;
    int32_t *by_id; /* entry of an id, -1: none */
    int64_t n_ids, cap_ids;
};
struct text__merge {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX: empty */
    uint32_t rank;
    int32_t id;
};
enum { TEXT_NO_UNK = -1, TEXT_UNK_MISSING = -2 };
struct text__bpe {
    struct text__vocab vocab;
    struct text__merge *merges;
    int64_t n_slots, n_merges;
    int32_t byte_id[256];     /* byte-level: token of each byte, -1: none */
    int32_t fallback_id[256]; /* <0x00> ... <0xFF>, -1: none */
    int32_t unk;              /* TEXT_NO_UNK: a character without a token is dropped */
    char *unk_name;           /* for the message where the vocabulary lacks it; may be NULL */
    bool fuse_unk, byte_fallback, ignore_merges, byte_level;
    char *prefix, *suffix; /* "" where the file has none */
};
/* byte_level is set before words are looked up. j stands at the "model" object. */
int text__bpe_parse(struct text__bpe *b, struct text__json *j);
void text__bpe_free(struct text__bpe *b);
/* The byte of a character of byte-level text; -1: not in the alphabet. */
int text__char_byte(int32_t c);
int32_t text__vocab_find(const struct text__vocab *v, const char *p, size_t n); /* entry, -1: none */
static inline const struct text__entry *text__vocab_entry(const struct text__vocab *v, int64_t id) {
    return id >= 0 && id < v->n_ids && v->by_id[id] >= 0 ? &v->entries[v->by_id[id]] : NULL;
}

struct text__word_scratch; /* word cache, symbols, heap */
struct text__word_scratch *text__word_scratch_create(void);
void text__word_scratch_destroy(struct text__word_scratch *w);
/* Appends the ids of one word: UTF-8, or any bytes where byte_level is set. */
int text__bpe_word(const struct text__bpe *b, struct text__word_scratch *w, const char *p, size_t n, struct text_ids *ids);

/* ---- added tokens (added_tokens.c) -------------------------------------------- */

struct text__added_token {
    char *content;    /* as written */
    char *normalized; /* what a normalized token is matched and decoded as; NULL: content */
    size_t content_n, normalized_n;
    int32_t id;
    bool single_word, lstrip, rstrip, is_normalized, special;
};
struct text__added_pattern {
    const char *p; /* borrowed */
    size_t n;
    int32_t token; /* index */
};
struct text__added_set { /* the patterns of one pass, sorted by bytes */
    struct text__added_pattern *pat;
    int64_t n;
    bool first[256]; /* bytes some pattern starts with */
};
struct text__added {
    struct text__added_token *p;
    int64_t n, cap;
    struct map index; /* content -> place in p */
    struct text__added_set raw, normalized;
};
struct text__piece {
    int64_t lo, hi;
    int32_t id; /* -1: text between added tokens */
};
struct text__pieces {
    struct text__piece *p;
    int64_t n, cap;
};
void text__added_free(struct text__added *a);
int text__added_build(struct text__added *a, const char *where);
void text__added_split(const struct text__added *a, const struct text__added_set *set, const char *text, int64_t n,
                       struct text__pieces *out);

/* ---- decoders (detokenize.c) ------------------------------------------------ */

enum text__decode_kind {
    DECODE_BYTE_LEVEL,
    DECODE_REPLACE,
    DECODE_BYTE_FALLBACK,
    DECODE_FUSE,
    DECODE_STRIP,
    DECODE_METASPACE,
    DECODE_JOIN
};
struct text__decode {
    enum text__decode_kind kind;
    struct text__regex *pattern;
    char *text; /* replacement */
    size_t text_n;
    int32_t c; /* the character stripped or replaced */
    int64_t start, stop;
    bool drop_first; /* metaspace: the first token's are dropped */
    bool fused;      /* all that comes in is one token, in parts */
    bool whole;      /* ... and must be seen complete */
};
struct text__decodes {
    struct text__decode *p;
    int64_t n, cap;
};
int text__decodes_parse(struct text__decodes *out, const json_t *v, const char *where);
void text__decodes_free(struct text__decodes *v);

/* A running chain: tokens in, text out. */
struct text__decode_run;
struct text__decode_run *text__decode_run_create(const struct text__decodes *v);
void text__decode_run_destroy(struct text__decode_run *r); /* NULL ok */
struct text__scratch;
int text__decode_push(struct text__decode_run *r, struct text__scratch *s, const char *p, size_t n, struct buf *out);
int text__decode_finish(struct text__decode_run *r, struct text__scratch *s, struct buf *out);

/* ---- the tokenizer (tokenizer.c) ---------------------------------------------------- */

struct text__scratch {
    struct text__scratch *next; /* while free */
    struct text__regex_scratch *regex;
    struct text__word_scratch *word;
    struct text__pieces outer, inner;
    struct text__spans spans, spans2, events;
    struct text__chars chars;
    struct buf repaired, norm, norm2, pre, pre2, proxy;
};
/* Normalizes into s->norm or leaves the text; *out and *out_n say where it is. */
int text__normalize(const struct text__norms *v, struct text__scratch *s, const char *text, size_t n, const char **out,
                    size_t *out_n);
struct text__replacement {
    const struct text__regex *pattern;
    const char *by;
    size_t by_n;
};
/* Appends text to out with every match replaced. */
int text__replace(const struct text__replacement *r, struct text__scratch *s, const char *text, size_t n, struct buf *out);
/* Leaves the words in s->spans, over *out. at_start: the text's first piece. */
int text__pre_tokenize(const struct text__splits *v, struct text__scratch *s, const char *text, size_t n, bool at_start,
                       const char **out);

struct text__post { /* an element of the post-processor's template */
    int32_t *ids;   /* NULL: the text itself */
    int64_t n;
};
struct tokenizer {
    struct text__bpe bpe;
    struct text__added added;
    struct text__norms norms;
    struct text__splits splits;
    struct text__decodes decodes;
    struct text__post *post;
    int64_t n_post;
    /* by id, vocabulary and added tokens together */
    const struct text__added_token **added_by_id;
    bool *special;
    int64_t n_ids;
    int32_t bos, eos, pad;
    char *chat_template, *tool_template;
    json_t *special_map;
    struct text__scratch_pool *scratch;
};
int text__side_files(struct tokenizer *t, const char *dir); /* tokenizer_config.c */

#endif
