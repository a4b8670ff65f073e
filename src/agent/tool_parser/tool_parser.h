/* tool_parser.h - the calls of tools that a turn's text holds.
 *
 * Ten formats, by verl's names: hermes, qwen3_coder, gpt-oss, glm, seed, minimax, kimi, deepseek_v4 and gemma4 read what
 * verl's parsers of those names read (verl/experimental/agent_loop/tool_parser.py), and give their arguments byte for byte;
 * llama3_json, which verl lacks, reads what Llama 3.1's chat template writes.  `qwen` is hermes, as old launches name it.
 * Text is data: nothing of it is evaluated, and a literal of Python is read by a parser of literals.
 *
 * Invariant: any bytes give a turn, in time linear in them; what is no call stays content. */
#ifndef VERLC_AGENT_TOOL_PARSER_H
#define VERLC_AGENT_TOOL_PARSER_H

#include "base/buf.h"
#include "text/text.h"

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

struct tool_call {
    char *id;        /* NULL: the format has none */
    char *name;      /* as the model wrote it: maybe of no tool */
    char *arguments; /* Python's json.dumps(arguments, ensure_ascii=False); may be no object, gpt-oss: any text */
};
struct tool_turn {           /* all owned; a zeroed struct is a valid empty one */
    struct buf content;      /* what the turn says besides its calls: verl's content of the assistant message */
    struct tool_call *calls; /* in their order */
    int64_t n_calls;
    int64_t n_malformed; /* calls that were begun and are lost: unclosed, bad JSON, no name; kimi: their arguments are lost */
};

struct tool_parser;

/* NULL: unknown. */
const struct tool_parser *tool_parser_find(const char *format);
/* "hermes, qwen3_coder, ...": for the message about an unknown one. */
const char *tool_parser_names(void);
/* The format's name; of `qwen`, hermes. */
const char *tool_parser_name(const struct tool_parser *p);
/* NULL-terminated texts of special tokens that end a turn besides the model's own end tokens. */
const char *const *tool_parser_stop_tokens(const struct tool_parser *p);

/* Appends the text that tool_parser_parse takes: ids (n) decoded with special tokens; gpt-oss, deepseek_v4 and gemma4: without
 * the pad token's text. */
int tool_parser_text(const struct tool_parser *p, const struct tokenizer *tok, const int32_t *ids, int64_t n, struct buf *out);
/* text: one turn as tool_parser_text has it. tools: the schemas of the tools that the sample has, an array of {"type":
 * "function", "function": {"name", "parameters": {"properties", "required"}}}, or NULL: qwen3_coder converts values by them,
 * kimi finds names by them. *out is overwritten; the caller frees it. */
int tool_parser_parse(const struct tool_parser *p, const char *text, size_t n, const json_t *tools, struct tool_turn *out);
void tool_turn_free(struct tool_turn *t); /* frees and zeroes */

#endif
