/* agents.h - what all episodes of several turns of a run share: which loop a row has, and the tools, classes, programs and joins
 * that rows ask for. What happens within an episode is agent_loop.h's.
 *
 * Invariant: nothing is opened that no row of the data asks for. */
#ifndef VERLC_PPO_STAGES_AGENTS_H
#define VERLC_PPO_STAGES_AGENTS_H

#include "agent/tools.h"
#include "conf/conf.h"
#include "ppo/config.h"

struct agents_args {
    const struct ppo_agent_config *k;
    const struct ppo_data_config *rows;
    enum ppo_schedule schedule;
    bool partial_replay; /* fully asynchronous: a record is repeated in which new weights interrupt episodes */
    const struct tokenizer *tok;
    const char *model_dir; /* its config.json says which family's rules join messages */
    const struct conf *conf;
};
/* agents.c fills it; agent_loop.c adds what its episodes bring. */
struct agents {
    struct agents_args a;
    struct tools *tools;
    struct user_loops *user; /* NULL: none */
    struct program_loops *programs;
    struct tool_journal *journal; /* NULL until the first call */
    struct continuous_tokens *join;
    char *model_name;
    int32_t *stop_ids;                                         /* of the parser */
    int64_t n_stop_ids, n_rows, n_tool_rows, n_without_kwargs; /* rows of several turns, of a tool_agent */
    int64_t n_refused, n_cut, n_results;                       /* since the last report */
    bool warned_again;
    struct parked {
        int64_t ticket;
        bool there;
        struct tool_result result; /* that came while no generation waited for it */
    } * parked;                    /* calls of samples that agent_loop_hold has held */
    int64_t n_parked, cap_parked;
};
/* Opens nothing yet: tools, interactions and templates are opened by the first row that needs them. Arguments are borrowed. */
void agents_create(struct agents **out, const struct agents_args *a);
void agents_destroy(struct agents *a); /* NULL ok */
/* The run has ended as it should: what tools have said is not kept. */
void agents_finish(struct agents *a);
/* Whether a row of the data has several turns; before the data are open: no. */
bool agents_active(const struct agents *a);
/* rl_dataset_args.tools: what a row's prompt is rendered with. ERR_INPUT: no such loop; else the tools' errors. */
int agents_row(void *agents, const json_t *row, json_t **tools);
/* What ends a turn besides the model's end tokens; borrowed. */
const int32_t *agents_stop_ids(const struct agents *a, int64_t *n);
/* After the data are open: warnings about rows that do not do what the keys suggest. */
void agents_check(const struct agents *a);

enum agent_loop_kind { AGENT_ONE_TURN, AGENT_TOOLS, AGENT_USER_LOOP, AGENT_PROGRAM };
/* A row's loop, and its name; opens what that loop needs. ERR_INPUT: no such loop. */
int agents_loop_of(struct agents *a, const json_t *row, enum agent_loop_kind *loop, const char **name);
/* With interactions every row of a tool_agent has one, as in verl 0.7.1. */
bool agents_interacts(const struct agents *a);
const json_t *agents_info_of(const json_t *row, const char *key); /* of its extra_info, borrowed; NULL: not there */

#endif
