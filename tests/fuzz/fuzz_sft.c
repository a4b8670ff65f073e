/* fuzz_sft.c - dataset rows from arbitrary JSONL: conversations and prompt/response pairs
 * for SFT, prompts for RL, through a real tokenizer and the chat template's helper.  The
 * first byte picks the kind of row and the limits.  What is accepted has ids of the
 * vocabulary, masks of 0 and 1, and nothing over the limit. */
#include "fuzz.h"

#include "data/data.h"
#include "text/text.h"

static struct tokenizer *tok;
static struct chat_template *chat;

static void close_all(void) {
    chat_template_destroy(chat);
    tokenizer_close(tok);
}

static void open_all(void) {
    fuzz_quiet();
    CHECK(tokenizer_open(&tok, FIXTURES "/data/tok_plain") == 0);
    CHECK(chat_template_create(&chat, tok) == 0);
    atexit(close_all);
}

static void check_ids(const int32_t *ids, int64_t n, int64_t max) {
    CHECK(n > 0 && n <= max);
    for (int64_t t = 0; t < n; t++) CHECK(ids[t] >= 0 && ids[t] < tokenizer_vocab_size(tok));
}

static void sft(const char *path, bool turns, enum data_truncation how, int64_t max) {
    struct sft_dataset *d = NULL;
    const struct sft_dataset_args a = {.files = &path,
                                       .n_files = 1,
                                       .messages_key = turns ? "messages" : NULL,
                                       .tok = tok,
                                       .chat = chat,
                                       .max_length = max,
                                       .truncation = how,
                                       .ignore_input_ids_mismatch = max == 16,
                                       .what = "fuzz"};
    const int rc = sft_dataset_open(&d, &a);
    fuzz_check_rc(rc);
    if (rc < 0) return;
    for (int64_t i = 0; i < d->n; i++) {
        check_ids(d->samples[i].ids, d->samples[i].n, max);
        for (int64_t t = 0; t < d->samples[i].n; t++) CHECK(d->samples[i].loss_mask[t] <= (t > 0));
    }
    sft_dataset_close(d);
}

static void rl(const char *path, enum data_truncation how, int64_t max) {
    struct rl_dataset *d = NULL;
    const struct rl_dataset_args a = {.files = &path,
                                      .n_files = 1,
                                      .tok = tok,
                                      .chat = chat,
                                      .max_prompt_length = max,
                                      .filter_overlong_prompts = max == 16,
                                      .truncation = how,
                                      .what = "fuzz"};
    const int rc = rl_dataset_open(&d, &a);
    fuzz_check_rc(rc);
    if (rc < 0) return;
    struct batch b = {0};
    const int64_t all[] = {0};
    for (int64_t i = 0; i < d->n; i++) check_ids(d->prompts[i].ids, d->prompts[i].n_ids, max);
    fuzz_check_rc(rl_dataset_batch(d, all, 1, &b));
    batch_free(&b);
    rl_dataset_close(d);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (n == 0) return 0;
    if (!tok) open_all();
    char *path = fuzz_file("x.jsonl", data + 1, n - 1);
    const enum data_truncation how = (enum data_truncation)(data[0] / 4 % 4);
    const int64_t max = data[0] & 16 ? 16 : 512;
    switch (data[0] % 4) {
    case 0: sft(path, true, how, max); break;
    case 1: sft(path, false, how, max); break;
    default: rl(path, how, max);
    }
    free(path);
    return 0;
}
