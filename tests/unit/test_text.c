/* test_text.c - the tokenizer's edges: bad files, unsupported features, streams, threads.
 * What ids are right is the matter of golden/test_text_golden.c. */
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/thread_pool.h"
#include "base/rng.h"
#include "text/text.h"
#include "text/text_int.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* A whole tokenizer in few lines: four letters and what they merge to. */
#define VOCAB "\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"abc\":4,\"\\u2581\":5,\"<0x0A>\":6}"
#define MERGES "\"merges\":[\"a b\",[\"ab\",\"c\"]]"
#define MODEL "\"model\":{\"type\":\"BPE\"," VOCAB "," MERGES "}"
#define TOKENIZER(more) "{\"version\":\"1.0\"," more MODEL "}"

static struct tokenizer *open_text(const char *json) {
    struct tokenizer *t;
    if (tokenizer_open_bytes(&t, json, strlen(json), "test.json") < 0) fail_msg("%s", err_msg());
    return t;
}

static void check_encodes(const struct tokenizer *t, const char *text, size_t n, const int32_t *want, int64_t n_want) {
    struct text_ids ids = {0};
    assert_int_equal(tokenizer_encode(t, text, n, true, &ids), 0);
    assert_int_equal(ids.n, n_want);
    for (int64_t i = 0; i < n_want; i++) assert_int_equal(ids.p[i], want[i]);
    text_ids_free(&ids);
}

static void test_small(void **state) {
    (void)state;
    struct tokenizer *t = open_text(TOKENIZER(""));
    check_encodes(t, "abcab", 5, (const int32_t[]){4, 3}, 2);
    check_encodes(t, "", 0, NULL, 0);
    check_encodes(t, "xyz", 3, NULL, 0); /* characters without a token are dropped */
    assert_int_equal(tokenizer_vocab_size(t), 7);
    assert_int_equal(tokenizer_id(t, "abc"), 4);
    assert_int_equal(tokenizer_id(t, "abcd"), -1);
    assert_string_equal(tokenizer_token(t, 3), "ab");
    assert_null(tokenizer_token(t, 7));
    assert_null(tokenizer_token(t, -1));
    assert_int_equal(tokenizer_eos(t), -1);
    assert_int_equal(tokenizer_pad(t), -1);
    assert_null(tokenizer_chat_template(t, false));
    struct buf out = {0};
    const int32_t ids[] = {4, 99, -5, 3, INT32_MAX};
    assert_int_equal(tokenizer_decode(t, ids, 5, false, &out), 0);
    assert_string_equal(out.p, "abc ab"); /* no decoder: joined by spaces; unknown ids are passed over */
    buf_free(&out);
    tokenizer_close(t);
}

/* A long word goes through the heap, a short one does not: same result by the definition. */
static void test_long_word(void **state) {
    (void)state;
    struct tokenizer *t = open_text(TOKENIZER(""));
    struct rng r = {.seed = 1, .stream = RNG_TEST};
    for (int round = 0; round < 200; round++) {
        char text[400];
        int32_t want[400];
        int64_t n_want = 0;
        const size_t n = 1 + rng_below(&r, sizeof text - 1);
        for (size_t i = 0; i < n; i++) text[i] = (char)('a' + rng_below(&r, 3));
        for (size_t i = 0; i < n;) { /* "a b" ranks first, so every ab merges, then abc */
            const bool ab = i + 1 < n && text[i] == 'a' && text[i + 1] == 'b', abc = ab && i + 2 < n && text[i + 2] == 'c';
            want[n_want++] = abc ? 4 : ab ? 3 : text[i] - 'a';
            i += abc ? 3 : ab ? 2 : 1;
        }
        check_encodes(t, text, n, want, n_want);
    }
    tokenizer_close(t);
}

static void test_word_cache_overflow(void **state) {
    (void)state;
    struct tokenizer *t = open_text(TOKENIZER("\"pre_tokenizer\":{\"type\":\"WhitespaceSplit\"},"));
    struct buf b = {0};
    struct text_ids ids = {0};
    for (int i = 0; i < 70000; i++) buf_addf(&b, "ab%d ", i); /* more words than the cache holds */
    assert_int_equal(tokenizer_encode(t, b.p, b.n, true, &ids), 0);
    assert_int_equal(ids.n, 70000);
    for (int64_t i = 0; i < ids.n; i++) assert_int_equal(ids.p[i], 3);
    buf_free(&b);
    text_ids_free(&ids);
    tokenizer_close(t);
}

/* ---- files that must be refused ---------------------------------------------------- */

static void refuse(const char *json, int code, const char *says) {
    struct tokenizer *t = NULL;
    const int rc = tokenizer_open_bytes(&t, json, strlen(json), "test.json");
    if (rc != code || !strstr(err_msg(), says) || !strstr(err_msg(), "test.json") || strchr(err_msg(), '\n'))
        fail_msg("%s\n gives %d \"%s\", expected %d and \"%s\"", json, rc, err_msg(), code, says);
    assert_null(t);
}

static void test_unsupported(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        /* section, feature named in the message */
        {"\"normalizer\":{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"\"},", "normalizer \"Precompiled\""},
        {"\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"StripAccents\"}]},", "StripAccents"},
        {"\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"},", "pre_tokenizer \"UnicodeScripts\""},
        {"\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{\"type\":"
         "\"Whitespace\"}]},",
         "after ByteLevel"},
        {"\"decoder\":{\"type\":\"WordPiece\"},", "decoder \"WordPiece\""},
        {"\"post_processor\":{\"type\":\"Other\"},", "post_processor \"Other\""},
        {"\"version\":\"2.0\",", "version \"2.0\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *json = xasprintf("{%s%s}", cases[i][0], MODEL);
        refuse(json, ERR_UNSUPPORTED, cases[i][1]);
        refuse(json, ERR_UNSUPPORTED, "unsupported");
        free(json);
    }
    refuse("{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",0.1]],\"unk_id\":0}}", ERR_UNSUPPORTED, "\"Unigram\"");
    refuse("{\"model\":{\"type\":\"BPE\",\"dropout\":0.1," VOCAB "," MERGES "}}", ERR_UNSUPPORTED, "dropout");
}

static void test_unsupported_regex(void **state) {
    (void)state;
    static const char *const patterns[] = {"\\\\bx",       "(a)\\\\1",
                                           "[a-z&&b]",     "[[:alpha:]]",
                                           "(?<n>a)",      "(?i)a",
                                           "a{2}+",        "a{2}?",
                                           "(?m:.)",       "\\\\h",
                                           "\\\\X",        "(?i:ss)",
                                           "(?i:\\u00e9)", "(?i:[\\u00e9])",
                                           "[^a&&[b]]",    "[&&[a]]",
                                           "[a&&[b]c]",    "[a&&[b&&[c]]]",
                                           "[a&&",         "[a&&[b]",
                                           "\\\\xff",      "\\\\p{Nothing}",
                                           "(a",           "a)",
                                           "[a",           "*a",
                                           "\\\\pL",       "",
                                           "a\\u0000b",    "[]",
                                           "\\\\"};
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        char *json = xasprintf("{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"%s\"},\"behavior\":\"Isolated\","
                               "\"invert\":false},%s}",
                               patterns[i], MODEL);
        refuse(json, ERR_UNSUPPORTED, "unsupported regular expression");
        free(json);
    }
}

static void test_malformed(void **state) {
    (void)state;
    static const char *const cases[] = {
        "",
        "{",
        "[]",
        "null",
        "{}",
        "{\"model\":1}",
        "{\"model\":{}}",
        "{\"model\":{\"vocab\":{}}}",
        "{\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}",
        "{\"model\":{\"vocab\":{\"a\":99999999},\"merges\":[]}}",
        "{\"model\":{\"vocab\":{\"a\":1.5},\"merges\":[]}}",
        "{\"model\":{\"vocab\":{\"a\":\"b\"},\"merges\":[]}}",
        "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a a\"]}}",
        "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a\"]}}",
        "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b c\"]}}",
        "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}",
        "{\"model\":{\"vocab\":{\"\\ud800\":0},\"merges\":[]}}",
        "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}} x",
        "{\"model\":{\"vocab\":{\"a\n\":0},\"merges\":[]}}",
        "{\"model\":{\"vocab\":{\"\\q\":0},\"merges\":[]}}",
        "{\"added_tokens\":{}," MODEL "}",
        "{\"added_tokens\":[1]," MODEL "}",
        "{\"added_tokens\":[{\"id\":1}]," MODEL "}",
        "{\"added_tokens\":[{\"id\":1,\"content\":\"x\",\"special\":3}]," MODEL "}",
        "{\"normalizer\":3," MODEL "}",
        "{\"normalizer\":{\"type\":\"Sequence\"}," MODEL "}",
        "{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{},\"content\":\"\"}," MODEL "}",
        "{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"xy\"}," MODEL "}",
        "{\"decoder\":{\"type\":\"Strip\",\"content\":\" \",\"start\":-1,\"stop\":0}," MODEL "}",
        "{\"post_processor\":{\"type\":\"TemplateProcessing\"}," MODEL "}",
        "{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\","
        "\"type_id\":0}}]}," MODEL "}",
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) refuse(cases[i], ERR_FORMAT, "");
    struct tokenizer *t;
    assert_int_equal(tokenizer_open_bytes(&t, "{\"\xff\":1}", 7, "test.json"), ERR_FORMAT);
    assert_int_equal(tokenizer_open(&t, "/nonexistent/dir"), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "/nonexistent/dir"));
}

/* Cut anywhere, a file is refused or (blanks at its end) whole; never a crash. */
static void test_truncated(void **state) {
    (void)state;
    const char *whole = TOKENIZER("\"added_tokens\":[{\"id\":7,\"content\":\"<s>\",\"special\":true}],"
                                  "\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"ByteLevel\"},");
    for (size_t n = 0; n < strlen(whole); n++) {
        struct tokenizer *t;
        char *part = xstrndup(whole, n);
        assert_int_equal(tokenizer_open_bytes(&t, part, n, "test.json"), ERR_FORMAT);
        free(part);
    }
    tokenizer_close(open_text(whole));
}

/* ---- what surrounds the ids ------------------------------------------------------------ */

static void write_file(const char *dir, const char *name, const char *text) {
    char *path = file_join(dir, name);
    assert_int_equal(file_write_atomic(path, text, strlen(text)), 0);
    free(path);
}

static void test_side_files(void **state) {
    (void)state;
    char dir[] = "/tmp/verlc_text_XXXXXX";
    assert_non_null(mkdtemp(dir));
    struct tokenizer *t;
    assert_int_equal(tokenizer_open(&t, dir), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "a model directory needs its tokenizer.json"));
    write_file(dir, "tiktoken.model", "IQ== 0\n");
    assert_int_equal(tokenizer_open(&t, dir), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "docs/tokenizers.md makes it from tiktoken.model"));
    write_file(dir, "tokenizer.json",
               TOKENIZER("\"added_tokens\":[{\"id\":7,\"content\":\"<s>\",\"special\":true},"
                         "{\"id\":8,\"content\":\"</s>\",\"special\":true}],"));
    write_file(dir, "tokenizer_config.json",
               "{\"model_max_length\":1000000000000000019884624838656,\"bos_token\":{\"content\":\"<s>\"},"
               "\"eos_token\":\"</s>\","
               "\"pad_token\":null,\"chat_template\":[{\"name\":\"default\",\"template\":\"A\"},{\"name\":"
               "\"tool_use\",\"template\":\"B\"}]}");
    assert_int_equal(tokenizer_open(&t, dir), 0);
    assert_int_equal(tokenizer_bos(t), 7);
    assert_int_equal(tokenizer_eos(t), 8);
    assert_int_equal(tokenizer_pad(t), 8);
    assert_string_equal(tokenizer_chat_template(t, false), "A");
    assert_string_equal(tokenizer_chat_template(t, true), "B");
    assert_string_equal(json_string_value(json_object_get(tokenizer_special_map(t), "bos_token")), "<s>");
    check_encodes(t, "ab<s>c</s>", 10, (const int32_t[]){3, 7, 2, 8}, 4);
    tokenizer_close(t);
    write_file(dir, "chat_template.jinja", "C");
    write_file(dir, "special_tokens_map.json", "{\"pad_token\":\"<s>\"}");
    assert_int_equal(tokenizer_open(&t, dir), 0);
    assert_string_equal(tokenizer_chat_template(t, false), "C");
    assert_int_equal(tokenizer_pad(t), 7);
    tokenizer_close(t);
    write_file(dir, "tokenizer_config.json", "{\"eos_token\":");
    assert_int_equal(tokenizer_open(&t, dir), ERR_FORMAT);
    assert_non_null(strstr(err_msg(), "tokenizer_config.json"));
    assert_int_equal(file_remove_tree(dir), 0);
}

static void test_bad_utf8(void **state) {
    (void)state;
    struct tokenizer *t = open_text("{\"model\":{" VOCAB "," MERGES ",\"unk_token\":\"\\u2581\"}}");
    check_encodes(t,
                  "ab\xff\xe2\x82"
                  "ab\0ab",
                  10, (const int32_t[]){3, 5, 5, 3, 5, 3}, 6); /* U+FFFD twice, U+0000 once */
    tokenizer_close(t);
    t = open_text("{\"model\":{" VOCAB "," MERGES ",\"unk_token\":\"nowhere\"}}");
    struct text_ids ids = {0};
    assert_int_equal(tokenizer_encode(t, "ab", 2, true, &ids), 0);
    assert_int_equal(tokenizer_encode(t, "ab?", 3, true, &ids), ERR_FORMAT);
    assert_non_null(strstr(err_msg(), "nowhere"));
    assert_int_equal(ids.n, 1); /* what was there before stays, nothing of the failed text */
    text_ids_free(&ids);
    tokenizer_close(t);
}

/* A pattern that backtracks without end is given up with a message. */
static void test_runaway_regex(void **state) {
    (void)state;
    struct tokenizer *t = open_text("{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(a|a|aa)+$\"},"
                                    "\"behavior\":\"Isolated\",\"invert\":false}," MODEL "}");
    struct text_ids ids = {0};
    char text[200];
    memset(text, 'a', sizeof text);
    text[sizeof text - 1] = 'b';
    assert_int_equal(tokenizer_encode(t, text, sizeof text, true, &ids), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "regular expression"));
    assert_int_equal(ids.n, 0);
    text_ids_free(&ids);
    tokenizer_close(t);
}

/* Normalizers that multiply the text twelve times by ten, and templates of 100,000 texts, are refused in time. */
static void test_bombs(void **state) {
    (void)state;
    struct buf json = {0};
    struct text_ids ids = {0};
    buf_addf(&json, "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[");
    for (int i = 0; i < 12; i++)
        buf_addf(&json, "%s{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"aaaaaaaaaa\"}", i ? "," : "");
    buf_addf(&json, "]}," MODEL "}");
    struct tokenizer *t = open_text(json.p);
    assert_int_equal(tokenizer_encode(t, "aaaa", 4, true, &ids), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "normalizer multiplies the text"));
    text_ids_free(&ids);
    tokenizer_close(t);
    buf_reset(&json);
    buf_addf(&json, "{\"post_processor\":{\"type\":\"TemplateProcessing\",\"special_tokens\":{},\"single\":[");
    for (int i = 0; i < 100000; i++) buf_addf(&json, "%s{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}", i ? "," : "");
    buf_addf(&json, "]}," MODEL "}");
    refuse(json.p, ERR_FORMAT, "100000 pieces");
    buf_free(&json);
}

/* Texts that make a careless implementation quadratic or overflow a stack. */
static void test_large_texts(void **state) {
    (void)state;
    struct tokenizer *t = open_text("{\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":"
                                    "\"ByteLevel\",\"add_prefix_space\":false}," MODEL "}");
    enum { N = 1 << 20 };
    struct buf b = {0};
    struct text_ids ids = {0};
    for (int i = 0; i < N; i++) buf_adds(&b, i % 2 ? "\xCC\x81" : "\xCC\xA7"); /* marks to be put in order */
    assert_int_equal(tokenizer_encode(t, b.p, b.n, true, &ids), 0);
    buf_reset(&b);
    for (int i = 0; i < N; i++) buf_addc(&b, ' ');
    assert_int_equal(tokenizer_encode(t, b.p, b.n, true, &ids), 0);
    buf_reset(&b);
    ids.n = 0;
    for (int i = 0; i < N; i++) buf_adds(&b, "abc"); /* one word of three million letters */
    assert_int_equal(tokenizer_encode(t, b.p, b.n, true, &ids), 0);
    assert_int_equal(ids.n, N);
    buf_free(&b);
    text_ids_free(&ids);
    tokenizer_close(t);
}

/* ---- threads ------------------------------------------------------------------------------ */

struct many {
    const struct tokenizer *t;
    struct text_ids out[64];
};
static void encode_part(void *arg, int64_t part, int thread) {
    struct many *m = arg;
    (void)thread;
    for (int i = 0; i < 50; i++) {
        char text[64];
        const int n = snprintf(text, sizeof text, "abcab ba%lld abc cab", (long long)(part % 7));
        m->out[part].n = 0;
        CHECK(tokenizer_encode(m->t, text, (size_t)n, true, &m->out[part]) == 0);
    }
}

static void test_threads(void **state) {
    (void)state;
    struct many m = {.t = open_text(TOKENIZER("\"pre_tokenizer\":{\"type\":\"WhitespaceSplit\"},"))};
    struct pool *pool;
    assert_int_equal(pool_create(&pool, 8), 0);
    pool_run(pool, 64, encode_part, &m);
    for (int i = 0; i < 64; i++) {
        assert_int_equal(m.out[i].n, m.out[0].n);
        assert_memory_equal(m.out[i].p, m.out[0].p, (size_t)m.out[0].n * sizeof(int32_t));
        if (i) text_ids_free(&m.out[i]);
    }
    text_ids_free(&m.out[0]);
    pool_destroy(pool);
    tokenizer_close((struct tokenizer *)m.t);
}

/* ---- streams --------------------------------------------------------------------------------- */

/* The four bytes of an emoji arrive one by one; the text only when they are complete. */
static void test_stream_holds(void **state) {
    (void)state;
    struct tokenizer *t = open_text("{\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"vocab\":{\"\\u00f0\":"
                                    "0,\"\\u0141\":1,\"\\u013a\":2,"
                                    "\"\\u0122\":3,\"a\":4},\"merges\":[]}}"); /* F0 9F 98 80, a */
    static const int32_t ids[] = {0, 1, 2, 3, 4, 0, 1};
    static const char *const after[] = {"",
                                        "",
                                        "",
                                        "\xF0\x9F\x98\x80",
                                        "\xF0\x9F\x98\x80"
                                        "a",
                                        "\xF0\x9F\x98\x80"
                                        "a",
                                        "\xF0\x9F\x98\x80"
                                        "a"};
    struct tokenizer_stream *s;
    struct buf out = {0};
    assert_int_equal(tokenizer_stream_create(&s, t, false), 0);
    for (int i = 0; i < 7; i++) {
        assert_int_equal(tokenizer_stream_push(s, ids[i], &out), 0);
        assert_string_equal(out.p ? out.p : "", after[i]);
    }
    assert_int_equal(tokenizer_stream_finish(s, &out), 0);
    assert_string_equal(out.p, "\xF0\x9F\x98\x80"
                               "a\xEF\xBF\xBD");          /* half a character at the very end */
    static const uint16_t want[] = {0, 0, 0, 4, 1, 0, 3}; /* the rest comes with the last id */
    uint16_t bytes[7];
    struct buf all = {0};
    assert_int_equal(tokenizer_decode_bytes(t, ids, 7, false, &all, bytes), 0);
    assert_string_equal(all.p, out.p);
    assert_memory_equal(bytes, want, sizeof want);
    buf_free(&all);
    tokenizer_stream_destroy(s);
    buf_free(&out);
    tokenizer_close(t);
}

/* ---- chat templates --------------------------------------------------------------------------- */

static int add_row(void *arg, char *line, size_t n, int64_t no) {
    (void)no;
    json_t *v;
    TRY(json_parse(&v, line, n, "chat.jsonl"));
    json_array_append_new(arg, v);
    return 0;
}

/* Every request against what transformers renders (tools/oracle_text.py); null: refused. */
/* Many at once, over the bound of one call: what each gives alone, refusals included. */
static void check_chat_many(struct chat_template *c, const json_t *rows) {
    enum { TIMES = 40 };
    json_t *common = json_pack("{s:b}", "unused_by_templates", 1), *good = json_array(), *bad = NULL;
    for (size_t i = 1; i < json_array_size(rows); i++) {
        json_t *q = json_object_get(json_array_get(rows, i), "request");
        if (json_is_null(json_object_get(json_array_get(rows, i), "text"))) bad = q;
        else json_array_append(good, q);
    }
    const int64_t k = (int64_t)json_array_size(good), n = k * TIMES;
    assert_true(n > 256 && bad);
    struct text_ids *many = calloc((size_t)n + 1, sizeof *many);
    json_t *each = json_array();
    int64_t done;
    for (int i = 0; i < TIMES; i++) json_array_extend(each, good);
    assert_int_equal(chat_template_encode_many(c, common, each, many, &done), 0);
    assert_int_equal(done, n);
    for (int64_t i = 0; i < n; i++) {
        struct text_ids one = {0};
        if (i < k || i >= n - k) {
            assert_int_equal(chat_template_encode(c, json_array_get(each, (size_t)i), NULL, &one), 0);
            assert_int_equal(one.n, many[i].n);
            assert_memory_equal(one.p, many[i].p, (size_t)one.n * sizeof *one.p);
        }
        text_ids_free(&one);
        text_ids_free(&many[i]);
    }
    json_array_insert(each, (size_t)n - 3, bad);
    const int rc = chat_template_encode(c, bad, NULL, &many[n]);
    char *message = xstrdup(err_msg());
    assert_true(rc < 0);
    assert_int_equal(chat_template_encode_many(c, NULL, each, many, &done), rc);
    assert_int_equal(done, n - 3);
    assert_string_equal(err_msg(), message);
    for (int64_t i = 0; i <= n; i++) text_ids_free(&many[i]);
    free(message);
    free(many);
    json_decref(each);
    json_decref(good);
    json_decref(common);
}

/* Texts that do not fit into one reply come in several. */
static void check_chat_long(struct chat_template *c) {
    enum { N = 8, CHARS = 1500000 };
    char *text = malloc(CHARS);
    memset(text, ' ', CHARS);
    for (int i = 0; i < CHARS; i += 2) text[i] = 'a';
    json_t *q = json_pack("{s:[{s:s, s:s%}]}", "messages", "role", "user", "content", text, (size_t)CHARS), *each = json_array();
    struct text_ids ids[N] = {0};
    int64_t done;
    for (int i = 0; i < N; i++) json_array_append(each, q);
    assert_int_equal(chat_template_encode_many(c, NULL, each, ids, &done), 0);
    assert_int_equal(done, N);
    for (int i = 0; i < N; i++) assert_true(ids[i].n > CHARS / 4 && ids[i].n == ids[0].n);
    for (int i = 0; i < N; i++) text_ids_free(&ids[i]);
    json_decref(each);
    json_decref(q);
    free(text);
}

static void check_chat(struct chat_template *c, const json_t *row) {
    const json_t *want = json_object_get(row, "text");
    struct buf text = {0};
    struct text_ids ids = {0};
    const int rc = chat_template_encode(c, json_object_get(row, "request"), &text, &ids);
    if (json_is_null(want)) {
        assert_int_equal(rc, ERR_FORMAT);
    } else {
        if (rc < 0) fail_msg("%s", err_msg());
        if (text.n != json_string_length(want) || memcmp(text.p, json_string_value(want), text.n) != 0)
            fail_msg("got  %s\nwant %s", text.p, json_string_value(want));
        assert_true(ids.n > 0);
    }
    buf_free(&text);
    text_ids_free(&ids);
}

/* Templates that ask for the time get one moment, in every process that renders, whenever it does. */
static void check_chat_date(struct chat_template *c, const struct tokenizer *tok) {
    json_t *q = json_pack("{s:[{s:s, s:s}], s:s}", "messages", "role", "user", "content", "", "chat_template",
                          "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}");
    struct chat_template *other;
    struct buf a = {0}, b = {0};
    assert_int_equal(chat_template_create(&other, tok), 0);
    assert_int_equal(chat_template_render(c, q, &a), 0);
    assert_int_equal(chat_template_render(other, q, &b), 0);
    assert_string_equal(a.p, b.p);
    chat_template_destroy(other);
    const int64_t today = chat_template_date();
    assert_int_equal(chat_template_set_date(20240229), 0); /* that of another day's start */
    assert_int_equal(chat_template_create(&other, tok), 0);
    buf_reset(&b);
    assert_int_equal(chat_template_render(other, q, &b), 0);
    assert_string_equal(b.p, "2024-02-29 12:00:00.000000");
    assert_int_equal(chat_template_date(), 20240229);
    assert_int_equal(chat_template_set_date(1), ERR_FORMAT);
    assert_int_equal(chat_template_set_date(20241301), ERR_FORMAT);
    assert_int_equal(chat_template_set_date(today), 0);
    chat_template_destroy(other);
    json_decref(q);
    buf_free(&a);
    buf_free(&b);
}

/* What is asked of the split at an added token: <|im_end|> (tests/fixtures/agent) is one, and <|im_start|>. */
static void test_splits(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t at;
        bool splits;
    } cases[] = {{"ab<|im_end|>c", 2, true},   {"ab<|im_end|>c", 1, false},
                 {"ab<|im_end|>c", 12, false}, {"<|im_start|><|im_end|>", 12, true},
                 {"a<<|im_end|>", 2, true},    {"ab", 1, false},
                 {"a<|im_end|", 1, false}};
    struct tokenizer *t;
    assert_int_equal(tokenizer_open(&t, FIXTURES "/agent/continuous/chatml"), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *text = cases[i].text;
        const size_t n = strlen(text), at = cases[i].at;
        struct text_ids all = {0}, parts = {0};
        assert_int_equal(tokenizer_splits_at(t, text, n, at), cases[i].splits);
        assert_int_equal(tokenizer_encode(t, text, n, false, &all), 0);
        assert_int_equal(tokenizer_encode(t, text, at, false, &parts), 0);
        assert_int_equal(tokenizer_encode(t, text + at, n - at, false, &parts), 0);
        if (cases[i].splits) assert_true(all.n == parts.n && memcmp(all.p, parts.p, (size_t)all.n * sizeof *all.p) == 0);
        text_ids_free(&all);
        text_ids_free(&parts);
    }
    assert_true(tokenizer_decided_at(t, "ab<|im_start|>u", 15, 2));
    assert_false(tokenizer_decided_at(t, "ab<|im_st", 9, 2));
    assert_false(tokenizer_decided_at(t, "ab<", 3, 2));
    assert_true(tokenizer_decided_at(t, "<ab", 3, 1));
    tokenizer_close(t);
}

static void test_chat(void **state) {
    (void)state;
    json_t *rows = json_array();
    char dir[] = "/tmp/verlc_text_XXXXXX";
    assert_non_null(mkdtemp(dir));
    assert_int_equal(file_each_line(FIXTURES "/text/chat.jsonl", add_row, rows), 0);
    write_file(dir, "tokenizer.json", TOKENIZER(""));
    struct tokenizer *t;
    struct chat_template *c;
    assert_int_equal(tokenizer_open(&t, dir), 0);
    assert_int_equal(chat_template_create(&c, t), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "no chat template"));
    tokenizer_close(t);
    write_file(dir, "chat_template.jinja", json_string_value(json_object_get(json_array_get(rows, 0), "template")));
    char *path = file_join(dir, "tokenizer_config.json");
    assert_int_equal(json_save_atomic(path, json_object_get(json_array_get(rows, 0), "special")), 0);
    free(path);
    assert_int_equal(tokenizer_open(&t, dir), 0);
    bool ready = false;
    if (chat_template_create(&c, t) == 0) {
        struct buf text = {0};
        const int rc = chat_template_render(c, json_object_get(json_array_get(rows, 1), "request"), &text);
        ready = rc == 0;
        if (rc < 0 && rc != ERR_HELPER) fail_msg("%s", err_msg());
        for (size_t i = 1; ready && i < json_array_size(rows); i++) check_chat(c, json_array_get(rows, i));
        if (ready) check_chat_many(c, rows);
        if (ready) check_chat_long(c);
        if (ready) check_chat_date(c, t);
        buf_free(&text);
        if (!ready) print_message("skipped: %s\n", err_msg());
        chat_template_destroy(c);
    } else {
        print_message("skipped: %s\n", err_msg());
    }
    tokenizer_close(t);
    json_decref(rows);
    assert_int_equal(file_remove_tree(dir), 0);
    if (!ready) skip();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small),         cmocka_unit_test(test_splits),
        cmocka_unit_test(test_long_word),     cmocka_unit_test(test_word_cache_overflow),
        cmocka_unit_test(test_unsupported),   cmocka_unit_test(test_unsupported_regex),
        cmocka_unit_test(test_malformed),     cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_side_files),    cmocka_unit_test(test_bad_utf8),
        cmocka_unit_test(test_runaway_regex), cmocka_unit_test(test_bombs),
        cmocka_unit_test(test_large_texts),   cmocka_unit_test(test_threads),
        cmocka_unit_test(test_stream_holds),  cmocka_unit_test(test_chat),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
