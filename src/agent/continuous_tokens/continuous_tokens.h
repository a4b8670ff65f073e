/* continuous_tokens.h - the ids of a conversation that goes on.
 *
 * A conversation's ids are never made again: what the policy drew stays as it was drawn, and only messages that are appended are
 * rendered, as the difference of two renders of the chat template around synthetic messages (verl 0.9.1,
 * verl/utils/tokenizer/continuous_token.py).  What stands between a turn as it was drawn and what follows is a rule of the
 * model's family: Qwen's newline, GLM's stop token that opens the next message, Gemma's tool response, and so on.
 *
 * A refusal is ERR_INPUT or ERR_FORMAT, with the reason: it ends the episode, not the run.  ERR_HELPER and ERR_TIMEOUT are
 * failures of the template's process.
 *
 * Invariant: what append gives depends on its arguments alone, whatever was rendered before. Not for use from two threads at
 * once. */
#ifndef VERLC_AGENT_CONTINUOUS_TOKENS_H
#define VERLC_AGENT_CONTINUOUS_TOKENS_H

#include "text/text.h"

#include <jansson.h>
#include <stdint.h>

struct continuous_tokens;

/* model_type: that of config.json; one without a rule of its own is generic, with a warning, and so is NULL. template_kwargs:
 * variables of every render (data.apply_chat_template_kwargs) or NULL. Borrows tok.
 * ERR_INPUT: no chat template, or the tokenizer lacks a token of the family; ERR_UNSUPPORTED: a vision-language family. */
int continuous_tokens_create(struct continuous_tokens **out, const struct tokenizer *tok, const char *model_type,
                             const json_t *template_kwargs);
void continuous_tokens_destroy(struct continuous_tokens *c); /* NULL ok */
/* The family whose rules hold: "generic", "qwen", "minimax", "glm", "gemma4", "gpt_oss", "deepseek", "deepseek_v4". */
const char *continuous_tokens_family(const struct continuous_tokens *c);

/* Appends the ids of the first prompt: the messages with the generation prompt. tools: schemas or NULL. */
int continuous_tokens_begin(struct continuous_tokens *c, const json_t *messages, const json_t *tools, struct text_ids *ids);

struct continuous_junction {
    int64_t n_removed;     /* tokens to take off the end of the stream, drawn ones among them */
    struct text_ids added; /* then these follow, none of them drawn: mask 0. The caller frees them */
};
/* What follows the stream of messages[0, n_old) where the rest of messages is appended: tool, user, system and
 * assistant messages, the last one no assistant's.  The old messages are those that the stream was made of, the caller sees to
 * that.  tools must not change while it is in use here: the array that came last is kept and known by its address.
 * *out is overwritten; after an error it is empty. */
int continuous_tokens_append(struct continuous_tokens *c, const json_t *messages, int64_t n_old, const json_t *tools,
                             const struct text_ids *stream, struct continuous_junction *out);

/* What of this works with the model's template, tried at start: {"family", "cases": {"tool", "two_tools", "user", "system"}},
 * each case {"ok": bool, "tokens": n, "exact": bool} or {"ok": false, "reason"}. exact: what is appended behind a turn is what
 * the template itself writes there; false where it rewrites older turns or writes the turn's end otherwise.
 * *report is the caller's. ERR_*: the template's process failed. */
int continuous_tokens_selftest(struct continuous_tokens *c, json_t **report);

/* How the stream of a conversation that is over compares with the ids that all of its messages are rendered to again. What the
 * template writes behind the last turn is left out, where it is white space. */
enum continuous_again {
    CONTINUOUS_SAME,
    CONTINUOUS_SPACE, /* as texts they differ in white space alone; or in nothing, and the ids of some text are others */
    CONTINUOUS_OTHER
};
/* ERR_INPUT, ERR_FORMAT: the template refuses them; ERR_UNSUPPORTED: the family has an encoder of its own. */
int continuous_tokens_again(struct continuous_tokens *c, const json_t *messages, const json_t *tools, const struct text_ids *stream,
                            enum continuous_again *out);

#endif
