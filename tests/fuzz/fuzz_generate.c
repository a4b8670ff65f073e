/* fuzz_generate.c - a request of `verlc generate --model`: a line of arbitrary bytes, without a model. generate.c is
 * included whole, for its reader is its own.
 * What is accepted has ids of the vocabulary that fit the model's positions. */
#include "fuzz.h"

#include "cmd/generate.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static struct tokenizer *tok;
    fuzz_quiet();
    if (!tok) CHECK(tokenizer_open(&tok, FIXTURES "/data/tok_plain") == 0);
    struct generation_state g = {.tok = tok, .vocab = tokenizer_vocab_size(tok), .max_pos = 256};
    char *line = xstrndup((const char *)data, n);
    const int rc = read_line(&g, line, n, 1);
    fuzz_check_rc(rc);
    CHECK((rc == 0 && n > 0) == (g.n == 1));
    for (int64_t k = 0; g.n == 1 && k < g.rq[0].n_ids; k++) CHECK(g.rq[0].ids[k] >= 0 && g.rq[0].ids[k] < g.vocab);
    if (g.n == 1) CHECK(g.rq[0].n_ids > 0 && g.rq[0].max_tokens > 0 && g.rq[0].n_ids + g.rq[0].max_tokens <= g.max_pos);
    for (int64_t i = 0; i < g.n; i++) request_free(&g.rq[i]);
    free(g.rq);
    chat_template_destroy(g.chat);
    free(line);
    return 0;
}
