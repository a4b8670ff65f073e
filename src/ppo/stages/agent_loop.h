/* agent_loop.h - episodes of several turns within a generation: what happens between two of their turns.
 *
 * The state of one episode is agent/tool_agent.h's; drawing is rollout.c's. Tools run in helpers: no call here waits for one.
 * Invariant: what an episode contains depends on weights, data, seeds and what its tools say alone, not on when they say it. */
#ifndef VERLC_PPO_STAGES_AGENT_LOOP_H
#define VERLC_PPO_STAGES_AGENT_LOOP_H

#include "agent/tool_agent.h"
#include "ppo/stages/agents.h"

/* ---- in a generation ---- */
struct generation_state;
/* A sample of a row with several turns gets its episode; another one stays without. One that was begun in an earlier generation
 * goes on: what its calls have said since then is there. */
int agent_loop_begin(struct generation_state *g, int64_t i);
int agent_loop_draw(struct generation_state *g, int64_t i); /* its turn under way, if it has one: the engine goes on with it */
/* The engine has drawn a turn that a loop of the user has asked for (user_loop.h). */
void agent_loop_drawn(struct generation_state *g, int64_t user, const struct engine_sample *s);
/* Goes on with episodes whose turn has ended or whose tools have answered; those that are over are in g->ended then. wait: briefly,
 * for an answer. */
int agent_loop_step(struct generation_state *g, bool wait);
bool agent_loop_waits(const struct generation_state *g); /* for tools */
void agent_loop_end(struct generation_state *g);         /* frees; answers that are pending are dropped */
/* Before agent_loop_end of a generation that was interrupted: calls that are out stay so, with their samples. */
void agent_loop_hold(struct generation_state *g);
struct generation_sample;
/* Such a sample will not go on; name: its episode's. */
void agent_loop_forget(struct agents *a, struct generation_sample *s, const char *name);
int64_t agent_loop_num_turns(const struct generation_sample *s); /* verl's num_turns: 2 of a sample with one turn */
/* Why an episode failed, which gives its sample no score; caller frees. NULL: it did not. */
char *agent_loop_failure(const struct generation_sample *s);
/* What its episode adds to extra_info: turn_scores, tool_rewards, and what tools or its loop have kept (extra_fields). */
void agent_loop_extra_info(const struct generation_sample *s, json_t *extra);
/* Its record, as the column BATCH_EPISODE has it; new reference. */
json_t *agent_loop_episode(const struct generation_sample *s);
/* Who wrote its tokens: (*n, 2) of tokens and enum segment_kind. one: two numbers, which a sample of one segment fills. */
const int32_t *agent_loop_segments(const struct generation_sample *s, int32_t *one, int64_t *n);
/* Adds segments, episode, num_turns, num_tool_calls, tool_seconds, and other_temperature: tokens that
 * were drawn at another temperature than the run's. at: each row's sample (n_rows). */
int agent_loop_columns(const struct generation_sample *const *at, struct batch *b);

#endif
