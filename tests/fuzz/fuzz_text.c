/* fuzz_text.c - tokenizer.json from arbitrary bytes; arbitrary text through small real ones.
 *
 * The first byte chooses: a tokenizer file, a regular expression in one, or a text for
 * a byte-level and a SentencePiece-style tokenizer, whose stream must equal its decode. */
#include "fuzz.h"

#include "base/buf.h"
#include "base/json.h"
#include "text/text.h"

#define MODEL                                                                                            \
    "\"model\":{\"type\":\"BPE\",\"unk_token\":\"a\",\"byte_fallback\":true,\"vocab\":{\"a\":0,\"b\":1," \
    "\"ab\":2,\"\\u2581\":3,"                                                                            \
    "\"\\u0120\":4,\"\\u00e2\":5,\"\\u0138\":6,\"<0xE2>\":7,\"<0x96>\":8},\"merges\":[\"a b\"]}"
#define ADDED                                                                                            \
    "\"added_tokens\":[{\"id\":9,\"content\":\"<s>\",\"special\":true,\"lstrip\":true,\"rstrip\":true}," \
    "{\"id\":10,\"content\":\"ab "                                                                       \
    "b\",\"single_word\":true},{\"id\":11,\"content\":\"abba\",\"normalized\":false}],"

static const char byte_level[] =
    "{" ADDED "\"normalizer\":{\"type\":\"NFKC\"},\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":true},"
    "\"decoder\":{\"type\":\"ByteLevel\"}," MODEL "}";
static const char sentence_piece[] =
    "{" ADDED "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFD\"},{\"type\":\"Lowercase\"},"
    "{\"type\":\"Prepend\",\"prepend\":\"\\u2581\"},{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"\\\\s+\"},"
    "\"content\":\"\\u2581\"}]},"
    "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\\u2581\",\"prepend_scheme\":\"first\"},"
    "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":"
    "\"\\u2581\"},\"content\":\" \"},"
    "{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" "
    "\",\"start\":1,\"stop\":0}]}," MODEL "}";

static void use(const struct tokenizer *t, const char *text, size_t n) {
    struct text_ids ids = {0};
    struct buf all = {0}, parts = {0};
    struct tokenizer_stream *s;
    const int rc = tokenizer_encode(t, text, n, true, &ids);
    CHECK(rc == 0 || err_msg()[0] != '\0');
    CHECK(rc == 0 || ids.n == 0);
    CHECK(tokenizer_decode(t, ids.p, ids.n, false, &all) == 0);
    CHECK(text_utf8_valid(all.p ? all.p : "", all.n));
    CHECK(tokenizer_stream_create(&s, t, false) == 0);
    for (int64_t i = 0; i < ids.n; i++) {
        CHECK(tokenizer_stream_push(s, ids.p[i], &parts) == 0);
        CHECK(text_utf8_valid(parts.p ? parts.p : "", parts.n));
    }
    CHECK(tokenizer_stream_finish(s, &parts) == 0);
    CHECK(all.n == parts.n && (all.n == 0 || memcmp(all.p, parts.p, all.n) == 0));
    tokenizer_stream_destroy(s);
    buf_free(&all);
    buf_free(&parts);
    text_ids_free(&ids);
}

static void open_and_use(const char *json, size_t json_n, const char *text, size_t n) {
    struct tokenizer *t = NULL;
    const int rc = tokenizer_open_bytes(&t, json, json_n, "fuzz");
    CHECK(rc == 0 || (t == NULL && err_msg()[0] != '\0' && strchr(err_msg(), '\n') == NULL));
    if (rc == 0) use(t, text, n);
    tokenizer_close(t);
}

static void try_regex(const char *pattern, size_t n) {
    struct buf repaired = {0}, json = {0};
    json_t *file, *p;
    CHECK(text_utf8_repair(&repaired, pattern, n) == 0);
    CHECK(json_parse(&file, byte_level, sizeof byte_level - 1, "fuzz") == 0);
    p = json_pack("{s:s,s:{s:o},s:s,s:b}", "type", "Split", "pattern", "Regex",
                  json_stringn(repaired.p ? repaired.p : "", repaired.n), "behavior", "MergedWithNext", "invert", 0);
    json_object_set_new(file, "pre_tokenizer", p);
    CHECK(json_dump_line(&json, file) == 0);
    open_and_use(json.p, json.n, "aab  ab\n12 \xE4\xBD\xA0", 14);
    json_decref(file);
    buf_free(&json);
    buf_free(&repaired);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    fuzz_quiet();
    const char *rest = (const char *)data + 1;
    switch (data[0] % 4) {
    case 0: open_and_use(rest, size - 1, "a b<s>", 6); break;
    case 1: try_regex(rest, size - 1); break;
    case 2: open_and_use(byte_level, sizeof byte_level - 1, rest, size - 1); break;
    case 3: open_and_use(sentence_piece, sizeof sentence_piece - 1, rest, size - 1); break;
    }
    return 0;
}
