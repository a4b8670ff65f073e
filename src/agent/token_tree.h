/* token_tree.h - the samples of one episode whose agent sends its whole conversation with each request.
 *
 * What speaks to an endpoint owns its history: it may go on with it, rewrite it, compact it, ask again, or start another
 * conversation next to it.  Requests are matched with what was drawn by their messages, and what is drawn is kept as a tree of
 * ids: a request that goes on where a turn ended continues that turn's sample, any other begins a sample of its own, which shares
 * the ids before it.
 *
 * Messages are the same if tools, roles and texts are: no ids of calls, arguments as values, null as "", text parts joined, and
 * an assistant's reasoning only where it is sent back.
 *
 * Invariants: ids that were drawn are never made again; a token that was drawn is trained in at most one sample. Not for use from
 * two threads at once. */
#ifndef VERLC_AGENT_TOKEN_TREE_H
#define VERLC_AGENT_TOKEN_TREE_H

#include "agent/continuous_tokens/continuous_tokens.h"
#include "data/data.h"

struct token_tree;

/* Borrows c. */
int token_tree_create(struct token_tree **out, struct continuous_tokens *c);
void token_tree_destroy(struct token_tree *t); /* NULL ok */

/* Why a sample began. */
enum token_tree_start {
    TOKEN_TREE_FIRST,
    TOKEN_TREE_AGAIN,     /* the same request as before: a fresh draw */
    TOKEN_TREE_REWRITTEN, /* older messages are others than they were */
    TOKEN_TREE_COMPACTED, /* the same, with fewer messages than there were */
    TOKEN_TREE_SUB_AGENT, /* other tools or another first message than any sample before has */
    TOKEN_TREE_REFUSED,   /* it goes on, but the chat template cannot append to what was drawn (continuous_tokens.h) */
    TOKEN_TREE_N_STARTS
};
const char *token_tree_start_name(enum token_tree_start s); /* "first", "again", ... */

/* Appends the ids of a request: messages with the generation prompt behind them. *request is its number, for one of the two calls
 * below. ERR_INPUT, ERR_FORMAT: the chat template refuses it. */
int token_tree_prompt(struct token_tree *t, const json_t *messages, const json_t *tools, struct text_ids *ids, int64_t *request);

/* The same of a request that is ids already, of an agent that makes them itself: one that begins with a sample's tokens goes on
 * with it, the longest of those; any other begins a sample. n > 0. */
void token_tree_prompt_ids(struct token_tree *t, const int32_t *ids, int64_t n, int64_t *request);
/* The tag of the turn behind which a request goes on; -1: it begins a conversation. */
int64_t token_tree_behind(const struct token_tree *t, int64_t request);
/* Tokens of the prompt that a request's sample begins with; what the request has beyond them is of its response. */
int64_t token_tree_prompt_length(const struct token_tree *t, int64_t request);

struct token_tree_turn { /* all borrowed */
    int64_t tag;         /* the caller's */
    const int32_t *ids;  /* (n) as drawn */
    const float *logp;   /* (n): full softmax */
    const float *kept;   /* (n): after truncation; NULL: not wanted */
    int64_t n;
    const int32_t *version; /* (n) of the weights that drew each */
    const json_t *message;  /* the assistant message that the agent was given; NULL: of a request that was ids */
};
/* What was drawn for a request. */
void token_tree_drawn(struct token_tree *t, int64_t request, const struct token_tree_turn *turn);
/* Nothing comes of the request. */
void token_tree_dropped(struct token_tree *t, int64_t request);

/* A sample: a prompt, and a response that ends with a turn. A token of its policy segments is drawn here and trained here; one
 * that another sample trains is of the environment here. */
struct token_tree_sample {
    enum token_tree_start start;
    struct text_ids prompt, response; /* owned */
    struct segment *segments;         /* (n_segments), as of BATCH_SEGMENTS */
    int64_t n_segments, n_turns;      /* n_turns: of its own */
    int64_t *tags, *turn_segments;    /* (n_turns): of each its tag, and which segment it is in */
    float *logp, *kept;               /* (response.n): 0 where it is the environment's; kept 0 where no turn had them */
    int32_t *version;                 /* (response.n): -1 there */
};
/* The samples with at least one token to train, in the order in which they began. */
int64_t token_tree_samples(const struct token_tree *t, struct token_tree_sample **out);
void token_tree_samples_free(struct token_tree_sample *s, int64_t n);

struct token_tree_counts {
    int64_t n_requests, n_turns, n_started[TOKEN_TREE_N_STARTS];
    int64_t n_rolled_back; /* drawn tokens of turns that the agent has replaced by a text of its own: not trained */
};
struct token_tree_counts token_tree_counts(const struct token_tree *t);

#endif
