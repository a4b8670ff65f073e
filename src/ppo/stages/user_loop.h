/* user_loop.h - agent loops that are the user's Python classes (verl's AgentLoopBase, agent.agent_loop_config_path): they run in
 * helpers (verlc_helpers/agent_loop.py), and ask this run for each of the model's turns, at an address of this machine.
 *
 * Generation never waits for a loop. What a loop returns is checked against what was drawn for it (agent/loop_output.h).
 * Invariant: an episode that fails costs its own sample alone, and an address is of one episode, while it is open. */
#ifndef VERLC_PPO_STAGES_USER_LOOP_H
#define VERLC_PPO_STAGES_USER_LOOP_H

#include "ppo/stages/user_episode.h"

#include "conf/conf.h"
#include "engine/engine.h"

struct generation_state;
struct generation_sample;

/* ---- of a run ---- */
struct user_loops;
struct user_loops_args { /* borrowed for the call */
    const char *config_path, *tool_config_path, *function_tool_path, *tokenizer_dir, *model_type;
    const struct conf *conf;    /* what a class finds as its config */
    int64_t n_processes, vocab; /* vocab: of the model */
    double timeout_s;           /* of an episode */
};
/* Starts the helpers, loads the classes, listens. ERR_INPUT: the file or a class of it does not load. */
int user_loops_open(struct user_loops **out, const struct user_loops_args *a);
void user_loops_close(struct user_loops *u);                          /* NULL ok */
bool user_loops_has(const struct user_loops *u, const char *name);    /* u NULL: no */
char *user_loops_names(const struct user_loops *u, const char *more); /* "more, a, b", for messages; caller frees */

/* ---- in a generation ---- */
/* Sample i is made by the loop `name` of g->in->agents' user loops. */
int user_loop_begin(struct generation_state *g, struct user_loops *u, int64_t i, const char *name);
/* A turn that the engine has drawn: engine_request.user was user_loop_user(call, false). */
void user_loop_drawn(struct generation_state *g, struct user_loops *u, int64_t call, const struct engine_sample *s);
static inline bool user_loop_is_call(int64_t user) { return user < 0; }
/* Engine users of turns that are asked for: of loops of the user, and of programs (program_loop.h). */
static inline int64_t user_loop_user(int64_t call, bool program) { return -1 - (2 * call + program); }
static inline int64_t user_loop_call(int64_t user) { return (-1 - user) / 2; }
static inline bool user_loop_is_program(int64_t user) { return (-1 - user) % 2 != 0; }
/* Answers loops, takes what they return: samples that are over go to g->ended. wait: briefly. */
int user_loop_step(struct generation_state *g, struct user_loops *u, bool wait);
bool user_loop_waits(const struct user_loops *u, const struct generation_state *g); /* for a loop of g; u NULL: no */
/* Forgets the episodes of g, or (NULL) all; helpers that were busy with them are killed. */
void user_loop_end(struct user_loops *u, const struct generation_state *g);
/* A generation that was interrupted: its episodes stay open without one, what they ask waits. resume: sample i, which has one, goes
 * on in g. forget: it will not. */
void user_loop_hold(struct user_loops *u, struct generation_state *g);
int user_loop_resume(struct generation_state *g, struct user_loops *u, int64_t i);
void user_loop_forget(struct user_loops *u, const struct user_episode *x);

#endif
