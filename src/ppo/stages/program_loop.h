/* program_loop.h - agent programs of the user (agent.command): each episode is a process that speaks OpenAI's or Anthropic's HTTP
 * interface to an address of its own, and what the model answers there is trained.
 *
 * Processes are agent/child_program.h's, requests and answers serve's, which request continues what is agent/token_tree.h's.
 * Generation never waits for a program. Invariant: a program that fails, hangs or floods costs its own episode alone; an address
 * and its key are of one episode, while it runs. */
#ifndef VERLC_PPO_STAGES_PROGRAM_LOOP_H
#define VERLC_PPO_STAGES_PROGRAM_LOOP_H

#include "agent/continuous_tokens/continuous_tokens.h"
#include "engine/engine.h"
#include "ppo/config.h"

#define PROGRAM_LOOP "program_agent" /* its rows' agent_name */

struct generation_state;
struct tool_journal;

/* ---- of a run ---- */
struct program_loops;
struct program_loops_args { /* borrowed, until close */
    const struct ppo_agent_config *k;
    const struct ppo_data_config *rows;
    const struct tokenizer *tok;
    struct continuous_tokens *join;
    struct tool_journal **journal; /* of the run; opened by the first that needs it */
    const char *model;             /* its name for clients */
    int64_t vocab;                 /* of the model */
};
/* Listens on an address of this machine. ERR_IO, ERR_INVAL. */
int program_loops_open(struct program_loops **out, const struct program_loops_args *a);
void program_loops_close(struct program_loops *p); /* NULL ok */

/* ---- in a generation ---- */
/* Sample i is made by a program, which is started when there is room. */
int program_loop_begin(struct generation_state *g, struct program_loops *p, int64_t i);
/* A turn that the engine has drawn: call of user_loop.h's engine users. */
void program_loop_drawn(struct generation_state *g, struct program_loops *p, int64_t call, const struct engine_sample *s);
/* Answers programs, starts and ends them: samples that are over go to g->ended. wait: briefly, where nothing is to be done. */
int program_loop_step(struct generation_state *g, struct program_loops *p, bool wait);
bool program_loop_waits(const struct program_loops *p); /* for a program that is not held; NULL: no */
void program_loop_end(struct program_loops *p);         /* ends what runs and is not held, forgets these episodes */
/* A generation that was interrupted: its programs run on, and what they ask waits. resume: sample i, which has one of them, goes on
 * in g. forget: it will not. */
struct user_episode;
void program_loop_hold(struct program_loops *p);
int program_loop_resume(struct generation_state *g, struct program_loops *p, int64_t i);
void program_loop_forget(struct program_loops *p, const struct user_episode *x);

#endif
