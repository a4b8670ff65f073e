/* rendered_again.c - verl's tokenization_sanity_check_mode: whether the conversations of a generation would be other tokens if the
 * chat template rendered their messages again.
 *
 * It changes no sample: what is trained are the tokens that were drawn. Which conversations are looked at depends on the order of
 * the prompts alone, and a render waits for the template's helper, so they are few.
 * Invariant: what the template cannot render is not counted. */
#include "agent/continuous_tokens/continuous_tokens.h"
#include "ppo/stages/generation.h"

#include "base/err.h"
#include "base/log.h"

enum { PROMPTS = 16 }; /* of a generation: of each the first sample */

int rendered_again_look(struct generation_state *g, int64_t i, struct continuous_tokens *join, enum ppo_sanity mode) {
    const struct tool_agent *a = g->samples[i].agent;
    const struct generation_group *group = &g->groups[i / g->per];
    const struct batch_col *prompts = batch_find(group->prompts, "prompts");
    struct text_ids stream = {0};
    enum continuous_again how;
    int64_t n, n_old;
    const json_t *messages = tool_agent_messages(a, &n_old);
    if (mode == SANITY_DISABLE || i % g->per != 0 || i / g->per >= PROMPTS) return 0;
    if (tool_agent_ended(a) != TOOL_AGENT_STOP || n_old != (int64_t)json_array_size(messages)) return 0;
    const int32_t *ids = tool_agent_ids(a, &n);
    json_t *plain = tool_agent_plain_messages(a, g->in->tok, 0);
    text_ids_add(&stream, prompts->i32 + prompts->off[group->row], batch_len(prompts, group->row));
    text_ids_add(&stream, ids, n);
    const int rc = continuous_tokens_again(join, plain, tool_agent_tools(a), &stream, &how);
    text_ids_free(&stream);
    json_decref(plain);
    if (rc == ERR_INPUT || rc == ERR_FORMAT || rc == ERR_UNSUPPORTED) return 0;
    TRY(rc);
    g->n_again++;
    g->n_again_differ += how == CONTINUOUS_OTHER || (how == CONTINUOUS_SPACE && mode == SANITY_STRICT);
    return 0;
}

void rendered_again_warn(const struct generation_state *g, bool *warned) {
    if (*warned) return;
    *warned = true;
    log_warn("agent loops: %lld of %lld conversations would be other tokens if the chat template rendered their messages again. "
             "What is trained are the tokens that were drawn; a server that renders each turn again shows the model others. "
             "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=disable does not look",
             (long long)g->n_again_differ, (long long)g->n_again);
}
