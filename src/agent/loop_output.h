/* loop_output.h - what an agent loop of the user returns for an episode (verl's AgentLoopOutput), checked against the turns that
 * the model has drawn for it.
 *
 * verl trusts response_mask and response_logprobs. Here a token is the policy's where the model has drawn it, after the very
 * tokens that stand before it in the output, and its log-prob is the one that it was drawn with: what is trained was drawn.
 * Invariant: an output that claims other tokens as drawn gives no sample. */
#ifndef VERLC_AGENT_LOOP_OUTPUT_H
#define VERLC_AGENT_LOOP_OUTPUT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* One answer of the model, in the order in which they were asked for. */
struct drawn_turn {
    int32_t *prompt, *ids; /* (n_prompt) what it was drawn after, (n); owned */
    float *logp, *kept;    /* (n): full softmax; after truncation; owned */
    int32_t *versions;     /* (n): of the weights that drew each token; owned */
    int64_t n_prompt, n;
};
void drawn_turn_free(struct drawn_turn *t);

struct loop_output { /* owned */
    int32_t *prompt, *ids;
    float *logp, *kept; /* (n), 0 at tokens of an environment */
    int32_t *versions;  /* (n); an environment's are that of the token before it. NULL: not known */
    int64_t n_prompt, n;
    int32_t *segments; /* (2 * n_segments): tokens, kind (data/data.h) */
    int64_t n_segments;
    int64_t num_turns;
    bool has_reward;
    double reward; /* reward_score */
    double tool_seconds;
    json_t *extra_fields; /* an object */
    json_t *calls;        /* of tools, as in BATCH_EPISODE; NULL: none that is known */
};
struct loop_limits {
    int64_t prompt_length, response_length; /* the response is cut to it, as in verl */
};
/* o: an element of "outputs" of verlc_helpers/agent_loop.py. ERR_FORMAT: what does not fit, in the message. */
int loop_output_read(struct loop_output *out, const json_t *o, const struct drawn_turn *turns, int64_t n_turns,
                     const struct loop_limits *limits);
void loop_output_free(struct loop_output *o);
/* Of the policy's tokens versions are given, -1 elsewhere: an environment's tokens get theirs. */
void loop_output_spread_versions(struct loop_output *o);

#endif
