/* tools.h - the user's and verl's tools, and interactions, in Python processes.
 *
 * A call is sent and its result comes when it is there; thousands may be under way.  All calls of an episode go to one
 * process, whose tools share the episode's state (verl's AgentData); python/verlc_helpers/tools.py is that end.  This
 * module knows nothing of turns, tokens or rewards of a sample.
 *
 * Invariants: every ticket gives one result, and what goes wrong is its status and a text for the model; a call that
 * hangs, or ends its process, costs no other call its result. */
#ifndef VERLC_AGENT_TOOLS_H
#define VERLC_AGENT_TOOLS_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tools_config {                    /* borrowed for the call; NULL and 0: none, or the default */
    const char *tool_config_path;        /* verl's keys of multi_turn: YAML of classes */
    const char *function_tool_path;      /* Python file of @function_tool */
    const char *interaction_config_path; /* YAML of interactions */
    const char *python;                  /* interpreter (struct helper_args) */
    int64_t max_response_length;         /* characters of a result's text, without the mark of what was cut; < 0: no limit */
    const char *truncate_side;           /* left: the end stays; right: the beginning; else and NULL: both, from the middle */
    double timeout_s;                    /* of one call; 0: 300 */
    int n_processes;                     /* 1 to 256; 0: 1 */
    int64_t max_concurrent;              /* calls under way in each; 0: 1024 */
};

enum tool_status {
    TOOL_OK,
    TOOL_UNKNOWN,   /* no such tool, or not one of the row's */
    TOOL_ARGUMENTS, /* no JSON */
    TOOL_ERROR,     /* it raised, ended its process, or answered something else */
    TOOL_TIMEOUT,   /* it had no answer in time */
};
enum { TOOL_N_STATUS = TOOL_TIMEOUT + 1 };
const char *tool_status_name(enum tool_status s); /* "ok", "unknown", ... */

struct tools;
/* Starts the processes and loads what the files name. ERR_INPUT: a file is missing or does not load; ERR_HELPER: no Python. */
int tools_open(struct tools **out, const struct tools_config *c);
void tools_close(struct tools *t); /* NULL ok */

/* Schemas as a chat template takes them, those of the YAML and then functions by name, with the fields and the order of
 * verl's model_dump(exclude_unset, exclude_none): an array, borrowed. */
const json_t *tools_schemas(const struct tools *t);
/* Those of a row's tool_selection, in its order, without names that there are none of; all where it is NULL, null or
 * empty.  An array, new reference. */
json_t *tools_select(const struct tools *t, const json_t *tool_selection);
/* Whether a tool is given the episode's AgentData: one that is a class is, a function is not, nor is a name
 * that there is no tool of. */
bool tools_want_agent_data(const struct tools *t, const char *name);
/* Names of the interactions: an array, borrowed; empty: none. */
const json_t *tools_interactions(const struct tools *t);
/* Whether a row's interaction_kwargs name one of them. ERR_INPUT. */
int tools_check_interaction(const struct tools *t, const json_t *interaction_kwargs);

struct tool_request {      /* borrowed for the call */
    const char *episode;   /* its name: verl's request_id, the same over its calls */
    const char *name;      /* of the tool */
    const char *arguments; /* as the parser gave them, n_arguments bytes */
    size_t n_arguments;
    const json_t *tools_kwargs, *tool_selection; /* the row's, or NULL */
    const json_t *extra_fields; /* the episode's state (tool_result_apply), or NULL: for a process that does not have it */
    const json_t *agent_data;   /* what else of AgentData a tool may read, {"messages", "prompt_ids", "user_turns", ...}, or NULL */
};
int tools_call(struct tools *t, const struct tool_request *r, int64_t *ticket);

struct interaction_request { /* a turn without calls; borrowed for the call */
    const char *episode;
    const json_t *messages;           /* all of the episode */
    const json_t *interaction_kwargs; /* the row's, which tools_check_interaction has passed */
    const json_t *extra_fields;
};
/* The user's next message. A new process, or a new episode, starts the interaction first. */
int tools_interact(struct tools *t, const struct interaction_request *r, int64_t *ticket);

struct tool_result {
    int64_t ticket;
    enum tool_status status;
    char *text; /* for the model, n_text bytes of UTF-8; owned */
    size_t n_text;
    bool truncated;
    bool has_reward; /* of a failure it is 0.0, as in verl */
    double reward;
    bool stop; /* an interaction ends the episode */
    double seconds;
    json_t *set, *removed; /* changes of the episode's extra_fields: an object, an array of keys; owned, or NULL: none */
};
void tool_result_free(struct tool_result *r);
/* Makes the result's changes to the episode's extra_fields, an object. */
void tool_result_apply(const struct tool_result *r, json_t *extra_fields);

/* 1: *out is one result, in the order of finishing; 0: none within wait_s (0: only look), or none pending. */
int tools_recv(struct tools *t, double wait_s, struct tool_result *out);
int64_t tools_pending(const struct tools *t); /* calls and messages without a result */
/* The episode is over: its state in the process goes (finalize_interaction is called). Its calls have come back, or their
 * results are still to be received. */
int tools_end_episode(struct tools *t, const char *episode);
void tools_cancel(struct tools *t); /* forgets all calls; processes that were busy are killed */

#endif
