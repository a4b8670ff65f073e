/* text.h - text to token ids and back; chat templates.
 *
 * A tokenizer is a Hugging Face tokenizer.json with a BPE model, byte-level or
 * SentencePiece style, and gives the ids and the text that the `tokenizers`
 * library gives.  What the file requires and this module does not do is refused
 * when the file is opened (ERR_UNSUPPORTED, with the feature's name), never
 * approximated.  Chat templates are Jinja and are rendered by a Python helper.
 *
 * Invariant: an open tokenizer does not change; every function that takes a
 * const struct tokenizer may be called from several threads at once. */
#ifndef VERLC_TEXT_H
#define VERLC_TEXT_H

#include "base/buf.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- ids ---------------------------------------------------------------- */

struct text_ids {
    int32_t *p; /* owned */
    int64_t n, cap;
};
void text_ids_free(struct text_ids *v); /* frees and zeroes; a zeroed struct is a valid empty one */
void text_ids_add(struct text_ids *v, const int32_t *p, int64_t n);

/* Appends the n bytes to out as UTF-8: each maximal ill-formed part becomes one
 * U+FFFD, as Python's bytes.decode("utf-8", "replace") does it. */
int text_utf8_repair(struct buf *out, const char *text, size_t n);
bool text_utf8_valid(const char *text, size_t n);

/* ---- tokenizer ---------------------------------------------------------- */

struct tokenizer;

/* path: a model directory with tokenizer.json, or that file itself; the files
 * next to it (tokenizer_config.json, special_tokens_map.json,
 * chat_template.jinja) are read where they exist.
 * ERR_INPUT, ERR_FORMAT, ERR_UNSUPPORTED. */
int tokenizer_open(struct tokenizer **out, const char *path);
/* The same from memory, without any side file; `where` names it in messages. */
int tokenizer_open_bytes(struct tokenizer **out, const char *json, size_t n, const char *where);
void tokenizer_close(struct tokenizer *t); /* NULL ok */

/* Appends to ids. Text that is not UTF-8 is repaired first (text_utf8_repair). */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, bool add_special_tokens, struct text_ids *ids);
/* Appends UTF-8 to out. An id without a token is skipped, as Hugging Face does. */
int tokenizer_decode(const struct tokenizer *t, const int32_t *ids, int64_t n, bool skip_special, struct buf *out);
/* The same, with the bytes of text that came with each id, bytes (n), at most 65535: 0 of a special token that is skipped and
 * of a part of a character, whose bytes come with its last part; what is held back to the end comes with the last id. */
int tokenizer_decode_bytes(const struct tokenizer *t, const int32_t *ids, int64_t n, bool skip_special, struct buf *out,
                           uint16_t *bytes);

/* Whether the ids of text are those of its first `at` bytes and then those of the rest, because an added token begins at `at`
 * and none reaches over it. at < n. */
bool tokenizer_splits_at(const struct tokenizer *t, const char *text, size_t n, size_t at);
/* Whether that is decided by these n bytes, whatever follows them: no added token begins at `at` or before and reaches over the
 * end. */
bool tokenizer_decided_at(const struct tokenizer *t, const char *text, size_t n, size_t at);
size_t tokenizer_longest_added(const struct tokenizer *t); /* bytes of the longest added token; 0: none */

int32_t tokenizer_id(const struct tokenizer *t, const char *token); /* -1: no such token */
const char *tokenizer_token(const struct tokenizer *t, int32_t id); /* as stored; NULL: no such id */
int64_t tokenizer_vocab_size(const struct tokenizer *t);            /* largest id + 1, added tokens included */
int32_t tokenizer_bos(const struct tokenizer *t);                   /* -1: none */
int32_t tokenizer_eos(const struct tokenizer *t);                   /* -1: none */
int32_t tokenizer_pad(const struct tokenizer *t); /* the end token where none is named (verl's rule); -1: neither */
/* Borrowed; NULL: the model has none. A model may carry another one for requests with tools. */
const char *tokenizer_chat_template(const struct tokenizer *t, bool with_tools);
/* {"151645": "<|im_end|>", ...}: the tokens that skip_special skips, by id. The caller's. */
json_t *tokenizer_special_tokens(const struct tokenizer *t);
/* {"bos_token": "<s>", ...}: what a template may name. Borrowed. */
const json_t *tokenizer_special_map(const struct tokenizer *t);

/* ---- incremental decoding ------------------------------------------------ */

/* Text appears as its ids arrive: push appends what has become certain, never
 * half a character; finish appends the rest.  All that was appended, together,
 * equals tokenizer_decode of all ids.  tok is borrowed until destroy. */
struct tokenizer_stream;
int tokenizer_stream_create(struct tokenizer_stream **out, const struct tokenizer *tok, bool skip_special);
void tokenizer_stream_destroy(struct tokenizer_stream *s); /* NULL ok */
int tokenizer_stream_push(struct tokenizer_stream *s, int32_t id, struct buf *out);
int tokenizer_stream_finish(struct tokenizer_stream *s, struct buf *out);

/* ---- chat templates ------------------------------------------------------ */

/* One helper process that renders the tokenizer's template.  Not for use from
 * two threads at once; tok is borrowed until destroy.
 * ERR_INPUT: the model has no chat template. */
struct chat_template;
/* The date that templates write which ask for it (Llama 3.1), 20250131: that of the process's first question, so that a long run's
 * prompts stay as they are; a resumed run sets the one that it began with. set: for templates that are created from then on;
 * ERR_FORMAT. */
int64_t chat_template_date(void);
int chat_template_set_date(int64_t date);
int chat_template_create(struct chat_template **out, const struct tokenizer *tok);
void chat_template_destroy(struct chat_template *c); /* NULL ok */
/* request: {"messages": [...], "add_generation_prompt": bool, and optionally "tools",
 * "documents", "continue_final_message", "chat_template"}; every other key is handed to
 * the template as a variable.  Appends the text.  ERR_FORMAT with the template's
 * own message when it refuses the messages. */
int chat_template_render(struct chat_template *c, const json_t *request, struct buf *out);
/* Many of them in few requests to the helper: each is an array of requests, common (an object or NULL) holds the keys that all
 * of them share. *texts (the caller's): an array of the texts before the first request that fails, all of them if none does. */
int chat_template_render_many(struct chat_template *c, const json_t *common, const json_t *each, json_t **texts);
/* The text constants of the template but those that it only writes, of that for requests with tools where it is another one:
 * what it may compare a message's text with. An array, the caller's. */
int chat_template_constants(struct chat_template *c, bool with_tools, json_t **texts);
/* The rendered text's ids, without further special tokens. text may be NULL. */
int chat_template_encode(struct chat_template *c, const json_t *request, struct buf *text, struct text_ids *ids);
/* Many conversations in few requests to the helper: each is an array of requests, common (an
 * object or NULL) holds the keys that all of them share. ids: one (zeroed) list for each.
 * After an error *done is the number of the conversation at fault; those before it have their ids. */
int chat_template_encode_many(struct chat_template *c, const json_t *common, const json_t *each, struct text_ids *ids,
                              int64_t *done);

#endif
