/* token_tree_int.h - keys of conversations. */
#ifndef VERLC_AGENT_TOKEN_TREE_INT_H
#define VERLC_AGENT_TOKEN_TREE_INT_H

#include "agent/continuous_tokens/continuous_tokens_int.h"
#include "agent/token_tree.h"

enum { TOKEN_TREE_KEY = 33 }; /* 32 hexadecimal digits */

/* (n + 1) keys: of the tools, then of them with each number of messages. The caller frees them. */
char (*token_tree__keys(const json_t *messages, const json_t *tools))[TOKEN_TREE_KEY];
/* Keys of a conversation with an assistant message behind it: with its reasoning, and without. */
void token_tree__turn_keys(const char *before, const json_t *message, char out[2][TOKEN_TREE_KEY]);

#endif
