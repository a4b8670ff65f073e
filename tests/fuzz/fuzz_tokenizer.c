/* fuzz_tokenizer.c - the files beside tokenizer.json: the first byte picks tokenizer_config.json, special_tokens_map.json,
 * chat_template.jinja or additional_chat_templates/tool_use.jinja, the rest is its bytes.  A tokenizer that opens encodes,
 * and its templates can be given to the helper that renders them. */
#include "fuzz.h"

#include "base/buf.h"
#include "base/json.h"
#include "text/text.h"

static const char *const names[] = {"tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                                    "additional_chat_templates/tool_use.jinja"};
enum { N_NAMES = sizeof names / sizeof *names };

static void make_dir(void) {
    struct buf b = {0};
    char *more = file_join(fuzz_dir(), "additional_chat_templates");
    fuzz_quiet();
    CHECK(file_mkdirs(more) == 0 && file_read(&b, FIXTURES "/data/tok_plain/tokenizer.json", 0) == 0);
    free(fuzz_file("tokenizer.json", (const uint8_t *)b.p, b.n));
    free(more);
    buf_free(&b);
}

static void use(struct tokenizer *t) {
    struct text_ids ids = {0};
    struct buf b = {0};
    struct chat_template *c = NULL;
    CHECK(tokenizer_encode(t, "a <s> b<|im_end|>", 17, true, &ids) == 0);
    CHECK(tokenizer_decode(t, ids.p, ids.n, true, &b) == 0);
    CHECK(json_dump_line(&b, tokenizer_special_map(t)) == 0);
    fuzz_check_rc(chat_template_create(&c, t)); /* the process starts with the first request: none here */
    chat_template_destroy(c);
    text_ids_free(&ids);
    buf_free(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static bool made;
    struct tokenizer *t = NULL;
    if (n == 0) return 0;
    if (!made) make_dir();
    made = true;
    char *path = fuzz_file(names[data[0] % N_NAMES], data + 1, n - 1);
    const int rc = tokenizer_open(&t, fuzz_dir());
    fuzz_check_rc(rc);
    if (rc == 0) use(t);
    tokenizer_close(t);
    unlink(path);
    free(path);
    return 0;
}
