/* tiny_tokenizer.c - a small byte-level BPE tokenizer for the demo's models,
 * trained here on the arithmetic texts (Sennrich et al. 2016; byte alphabet and file
 * format as Qwen2.5's tokenizer.json, so every text has ids and digits stay single).
 * It does not tokenise: text/ reads what this writes.
 * Invariant: corpus, merges and files are functions of the constants below. */
#include "data/data_int.h"

#include "base/file.h"
#include "base/json.h"
#include "base/map.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_BYTES = 256,
    N_VOCAB = 768, /* at most, with the special tokens; small next to the layers of a tiny model */
    N_SPECIAL = 3,
    N_TEXTS = 2000, /* problems of each level in the corpus */
};
static const char *const specials[N_SPECIAL] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

/* Qwen2's pre-tokenizer; next_piece below is the same on ASCII. */
static const char split_regex[] = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
                                  "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* Qwen2.5's turns without its default system message: a tiny model's context is better spent. */
static const char chat_template[] =
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n";

/* Texts of other datasets' prompts, so that they are not split into single bytes. */
static const char *const extra_texts[] = {
    "system\nYou are a helpful assistant.",
    "user\n",
    "assistant\n",
    "Let's think step by step and output the final answer after \"####\".",
};
enum { EXTRA_WEIGHT = 50 };

/* --- corpus: pieces with their counts --- */

struct piece {
    int32_t *sym; /* current symbols */
    int64_t n, count;
};

/* Length of the first piece of an ASCII text. */
static size_t next_piece(const char *s) {
    const unsigned char *u = (const unsigned char *)s;
    size_t n = 0;
    if (s[0] == '\'' && s[1] && strchr("stmdSTMD", s[1])) return 2;
    if (!isalnum(u[0]) && s[0] != '\n' && s[0] != '\r' && isalpha(u[1])) n = 1;
    if (isalpha(u[n])) {
        while (isalpha(u[n])) n++;
        return n;
    }
    if (isdigit(u[0])) return 1;
    n = s[0] == ' ';
    if (ispunct(u[n])) {
        while (ispunct(u[n])) n++;
        while (s[n] == '\n' || s[n] == '\r') n++;
        return n;
    }
    for (n = 0; isspace(u[n]);) n++;
    /* \s+(?!\S) leaves the last space to the word after it */
    return n > 1 && s[n] && s[n - 1] == ' ' ? n - 1 : n ? n : 1;
}

static void count_text(struct map *pieces, const char *text, int64_t weight) {
    while (*text) {
        const size_t n = next_piece(text);
        int64_t count = 0;
        map_get(pieces, text, n, &count);
        map_set(pieces, text, n, count + weight);
        text += n;
    }
}

static void count_corpus(struct map *pieces) {
    struct rng r = {.seed = 0, .stream = RNG_DATA};
    struct buf q = {0}, a = {0};
    for (int level = 1; level <= 3; level++) {
        for (int i = 0; i < N_TEXTS; i++) {
            data__arith_problem(&r, level, &q, &a);
            count_text(pieces, q.p, 1);
            count_text(pieces, a.p, 1);
        }
    }
    for (size_t i = 0; i < sizeof extra_texts / sizeof *extra_texts; i++) count_text(pieces, extra_texts[i], EXTRA_WEIGHT);
    buf_free(&q);
    buf_free(&a);
}

/* --- training --- */

struct bpe {
    char *token[N_VOCAB]; /* UTF-8 of the byte alphabet, as in tokenizer.json */
    int32_t left[N_VOCAB], right[N_VOCAB];
    int32_t n; /* tokens so far: bytes, then merges */
};

/* GPT-2's byte alphabet: printable Latin-1 as itself, the rest from U+0100 on.
 * Ids in Qwen's order: the printable ones first. */
static bool is_printable(int b) { return (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff); }

static void add_bytes(struct bpe *t, int32_t id_of_byte[N_BYTES]) {
    for (int pass = 0, rest = 0; pass < 2; pass++) {
        for (int b = 0; b < N_BYTES; b++) {
            if (is_printable(b) != (pass == 0)) continue;
            const int cp = pass == 0 ? b : 0x100 + rest++;
            char utf8[3] = {(char)cp, 0, 0};
            if (cp >= 0x80) {
                utf8[0] = (char)(0xc0 | cp >> 6);
                utf8[1] = (char)(0x80 | (cp & 0x3f));
            }
            id_of_byte[b] = t->n;
            t->token[t->n++] = xstrdup(utf8);
        }
    }
}

/* The most frequent neighbouring pair; the smaller ids where counts are equal. */
static int64_t best_pair(const struct piece *p, int64_t n_pieces, int32_t pair[2]) {
    struct map counts = {0};
    int64_t best = 0;
    for (int64_t i = 0; i < n_pieces; i++) {
        for (int64_t k = 0; k + 1 < p[i].n; k++) {
            int64_t c = 0;
            map_get(&counts, (const char *)(p[i].sym + k), 2 * sizeof(int32_t), &c);
            map_set(&counts, (const char *)(p[i].sym + k), 2 * sizeof(int32_t), c + p[i].count);
        }
    }
    for (int64_t i = 0; i < counts.n; i++) {
        int32_t at[2];
        memcpy(at, counts.entries[i].key, sizeof at);
        const int64_t c = counts.entries[i].value;
        const bool smaller = at[0] < pair[0] || (at[0] == pair[0] && at[1] < pair[1]);
        if (c < best || (c == best && !smaller)) continue;
        best = c;
        memcpy(pair, at, sizeof at);
    }
    map_free(&counts);
    return best;
}

static void apply_merge(struct piece *p, const int32_t pair[2], int32_t id) {
    int64_t n = 0;
    for (int64_t k = 0; k < p->n; k++) {
        const bool hit = k + 1 < p->n && p->sym[k] == pair[0] && p->sym[k + 1] == pair[1];
        p->sym[n++] = hit ? id : p->sym[k];
        k += hit;
    }
    p->n = n;
}

static void train(struct bpe *t) {
    struct map words = {0};
    int32_t id_of_byte[N_BYTES], pair[2];
    add_bytes(t, id_of_byte);
    count_corpus(&words);
    struct piece *p = xcalloc((size_t)words.n, sizeof *p);
    for (int64_t i = 0; i < words.n; i++) {
        const struct map_entry *e = &words.entries[i];
        p[i] = (struct piece){xmalloc(e->n * sizeof(int32_t)), (int64_t)e->n, e->value};
        for (size_t k = 0; k < e->n; k++) p[i].sym[k] = id_of_byte[(unsigned char)e->key[k]];
    }
    while (t->n < N_VOCAB - N_SPECIAL && best_pair(p, words.n, pair) > 1) {
        t->token[t->n] = xasprintf("%s%s", t->token[pair[0]], t->token[pair[1]]);
        t->left[t->n] = pair[0];
        t->right[t->n] = pair[1];
        for (int64_t i = 0; i < words.n; i++) apply_merge(&p[i], pair, t->n);
        t->n++;
    }
    for (int64_t i = 0; i < words.n; i++) free(p[i].sym);
    free(p);
    map_free(&words);
}

/* --- files --- */

static json_t *special_token(int i) {
    return json_pack("{s:s, s:b, s:b, s:b, s:b, s:b}", "content", specials[i], "single_word", 0, "lstrip", 0, "rstrip", 0,
                     "normalized", 0, "special", 1);
}

static json_t *byte_level(void) {
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 0, "use_regex", 0);
}

static json_t *tokenizer_json(const struct bpe *t) {
    json_t *vocab = json_object(), *merges = json_array(), *added = json_array();
    for (int32_t i = 0; i < t->n; i++) {
        json_object_set_new(vocab, t->token[i], json_integer(i));
        if (i < N_BYTES) continue;
        char *m = xasprintf("%s %s", t->token[t->left[i]], t->token[t->right[i]]);
        json_array_append_new(merges, json_string(m));
        free(m);
    }
    for (int i = 0; i < N_SPECIAL; i++) {
        json_t *v = json_pack("{s:i}", "id", t->n + i), *s = special_token(i);
        json_object_update(v, s);
        json_decref(s);
        json_array_append_new(added, v);
    }
    json_t *split = json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex", split_regex, "behavior", "Isolated",
                              "invert", 0);
    json_t *pre = json_pack("{s:s, s:[o, o]}", "type", "Sequence", "pretokenizers", split, byte_level());
    json_t *model = json_pack("{s:s, s:n, s:n, s:s, s:s, s:b, s:b, s:o, s:o}", "type", "BPE", "dropout", "unk_token",
                              "continuing_subword_prefix", "", "end_of_word_suffix", "", "fuse_unk", 0, "byte_fallback", 0, "vocab",
                              vocab, "merges", merges);
    return json_pack("{s:s, s:n, s:n, s:o, s:{s:s}, s:o, s:o, s:o, s:o}", "version", "1.0", "truncation", "padding", "added_tokens",
                     added, "normalizer", "type", "NFC", "pre_tokenizer", pre, "post_processor", byte_level(), "decoder",
                     byte_level(), "model", model);
}

static json_t *config_json(const struct bpe *t) {
    json_t *decoder = json_object();
    for (int i = 0; i < N_SPECIAL; i++) {
        char *id = xasprintf("%d", t->n + i);
        json_object_set_new(decoder, id, special_token(i));
        free(id);
    }
    return json_pack("{s:b, s:b, s:o, s:[s, s], s:n, s:s, s:b, s:s, s:s, s:i, s:s, s:b, s:s, s:n}", "add_bos_token", 0,
                     "add_prefix_space", 0, "added_tokens_decoder", decoder, "additional_special_tokens", specials[1], specials[2],
                     "bos_token", "chat_template", chat_template, "clean_up_tokenization_spaces", 0, "eos_token", specials[2],
                     "errors", "replace", "model_max_length", 4096, "pad_token", specials[0], "split_special_tokens", 0,
                     "tokenizer_class", "Qwen2Tokenizer", "unk_token");
}

static int save(const char *dir, const char *name, json_t *v) {
    CHECK(v != NULL);
    char *path = file_join(dir, name);
    const int rc = json_save_atomic(path, v);
    free(path);
    json_decref(v);
    return rc;
}

int data_write_tiny_tokenizer(const char *dir) {
    struct bpe *t = xcalloc(1, sizeof *t);
    train(t);
    int rc = file_mkdirs(dir);
    if (rc == 0) rc = save(dir, "tokenizer.json", tokenizer_json(t));
    if (rc == 0) rc = save(dir, "tokenizer_config.json", config_json(t));
    for (int32_t i = 0; i < t->n; i++) free(t->token[i]);
    free(t);
    return rc;
}
