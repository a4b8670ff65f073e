/* tool_agent.h - verl's ToolAgentLoop as a state machine of one episode: a conversation in which the policy calls tools, or is
 * answered by an interaction, turn by turn.
 *
 * The caller draws tokens, runs tools and renders messages; this says what comes next and keeps the response: ids, who wrote them,
 * the messages, the record of the episode. It has neither an engine nor a helper. Follows verl 0.9.1
 * experimental/agent_loop/tool_agent_loop.py; interactions follow 0.7.1, which had them.
 * Invariant: ids of the response are those that were given to it, in order; none is made here. */
#ifndef VERLC_AGENT_TOOL_AGENT_H
#define VERLC_AGENT_TOOL_AGENT_H

#include "agent/tool_parser/tool_parser.h"

#include "data/data.h"
#include "text/text.h"

struct tool_agent_rules {
    int64_t response_length;                     /* tokens of a response, an environment's included; >= 1 */
    int64_t max_assistant_turns, max_user_turns; /* turns of the policy; rounds of tools and interactions. <= 0: no limit */
    int64_t max_parallel_calls;                  /* calls of a turn that are run; those beyond it are dropped */
    const struct tool_parser *parser;
    bool interacts; /* a turn without calls is answered by an interaction */
};

/* What the caller does next. */
enum tool_agent_next {
    TOOL_AGENT_GENERATE, /* draws a turn, then tool_agent_drawn */
    TOOL_AGENT_TOOLS,    /* runs tool_agent_calls at once, then tool_agent_result for each */
    TOOL_AGENT_INTERACT, /* passes tool_agent_messages to the interaction, then tool_agent_replied */
    TOOL_AGENT_JOIN,     /* renders the messages that are new, then tool_agent_join, or tool_agent_fail */
    TOOL_AGENT_END,      /* the episode is over */
};
/* Why it is over: the first four are the policy's doing, or a limit's. */
enum tool_agent_end {
    TOOL_AGENT_STOP,            /* a turn without calls, or an interaction that stops */
    TOOL_AGENT_LENGTH,          /* response_length */
    TOOL_AGENT_ASSISTANT_TURNS, /* max_assistant_turns */
    TOOL_AGENT_USER_TURNS,      /* max_user_turns */
    TOOL_AGENT_REFUSED,         /* what was to be appended does not continue the tokens so far */
    TOOL_AGENT_ERROR,
    TOOL_AGENT_TIMEOUT,
    TOOL_AGENT_OPEN, /* it is not over */
};
const char *tool_agent_end_name(enum tool_agent_end e); /* "stop", "length", "max_assistant_turns", ... */

struct tool_agent;
/* messages: the prompt's, copied; tools: their schemas, NULL or [] for none, shared; the parser is borrowed. The first thing to do
 * is TOOL_AGENT_GENERATE. */
void tool_agent_create(struct tool_agent **out, const struct tool_agent_rules *rules, const json_t *messages, const json_t *tools);
void tool_agent_destroy(struct tool_agent *a); /* NULL ok */

/* A turn that the policy has drawn. */
struct tool_agent_turn {
    const int32_t *ids; /* of this turn alone, its end token included */
    int64_t n;
    const char *text; /* of these ids with special tokens, for the parser */
    size_t n_text;
    const char *plain; /* without them, for an interaction; else NULL */
    size_t n_plain;
};
/* A turn that ends the episode by a limit is not parsed, as in verl. ERR_*: the parser's. */
int tool_agent_drawn(struct tool_agent *a, const struct tool_agent_turn *t, enum tool_agent_next *next);

/* The calls to run, (*n), valid until the next turn. */
const struct tool_call *tool_agent_calls(const struct tool_agent *a, int64_t *n);

/* What call k gave. Results may come in any order; they are appended in the order of the calls. */
struct tool_agent_result {
    const char *text; /* as the model reads it */
    size_t n_text;
    const char *status; /* "ok", "unknown", "arguments", "error", "timeout" */
    double seconds, reward;
    bool has_reward, truncated;
};
enum tool_agent_next tool_agent_result(struct tool_agent *a, int64_t k,
                                       const struct tool_agent_result *r); /* TOOLS until the last */

/* The interaction's answer, which becomes a message of the user even when it stops. */
struct tool_agent_reply {
    const char *text;
    size_t n_text;
    bool stop, has_score;
    double score, seconds;
};
enum tool_agent_next tool_agent_replied(struct tool_agent *a, const struct tool_agent_reply *r);

/* All messages so far, borrowed; *n_old: how many of them the ids so far are of, the turn before included. */
const json_t *tool_agent_messages(const struct tool_agent *a, int64_t *n_old);
/* Copies of those whose tokens the response or the prompt has, from message `from` on. A turn's text ends without the special
 * tokens that ended it, which verl's messages have. */
json_t *tool_agent_plain_messages(const struct tool_agent *a, const struct tokenizer *tok, int64_t from);
const json_t *tool_agent_tools(const struct tool_agent *a); /* as given; NULL: none */

/* The new messages as tokens: n_removed are taken off the end of the response (of the turn that was drawn last; at most that
 * turn), then n_added are appended with mask 0. Where they would reach response_length the tools' results are dropped and the
 * episode ends, as in verl. */
enum tool_agent_next tool_agent_join(struct tool_agent *a, int64_t n_removed, const int32_t *added, int64_t n_added);
/* The episode ends with the tokens so far; why: for people, copied. */
void tool_agent_fail(struct tool_agent *a, enum tool_agent_end end, const char *why);

/* The response so far, cut to response_length at the end; borrowed. */
const int32_t *tool_agent_ids(const struct tool_agent *a, int64_t *n);
/* Its segments, (*n, 2): tokens and enum segment_kind (data.h); borrowed. */
const int32_t *tool_agent_segments(const struct tool_agent *a, int64_t *n);

enum tool_agent_end tool_agent_ended(const struct tool_agent *a);
const char *tool_agent_reason(const struct tool_agent *a);         /* of tool_agent_fail; NULL: none */
int64_t tool_agent_num_turns(const struct tool_agent *a);          /* verl's num_turns: turns of the policy and of users, and 1 */
int64_t tool_agent_num_calls(const struct tool_agent *a);          /* calls that were run */
double tool_agent_tool_seconds(const struct tool_agent *a);        /* of a round of calls its slowest; and of interactions */
const json_t *tool_agent_tool_rewards(const struct tool_agent *a); /* numbers, in the order of the calls; borrowed */
const json_t *tool_agent_turn_scores(const struct tool_agent *a);  /* an interaction's; borrowed */
bool tool_agent_asked(const struct tool_agent *a);                 /* a tool or an interaction has heard of it */
/* verl's AgentData.extra_fields: what tools keep over the calls of an episode, and the reward function sees. An object, borrowed;
 * whoever has the tools' results changes it. */
json_t *tool_agent_extra_fields(const struct tool_agent *a);
/* Further fields of AgentData: messages, user_turns, assistant_turns, tool_rewards, turn_scores; not the tokens, which would be
 * sent with each call. New reference; messages are the episode's own. */
json_t *tool_agent_data(const struct tool_agent *a);
/* {turns, end, reason, malformed, dropped, calls: [{segment, name, arguments, result, status, seconds, reward, truncated}]}: the
 * column `episode`. segment: which of the response's segments called. New reference. */
json_t *tool_agent_episode(const struct tool_agent *a);

/* ---- an episode that goes on later ---- */
/* What it waits for: GENERATE, TOOLS (calls that tool_agent_answered has not), INTERACT; END. */
enum tool_agent_next tool_agent_waits_for(const struct tool_agent *a);
bool tool_agent_answered(const struct tool_agent *a, int64_t k); /* call k of the turn has its result */
/* All of it but the ids, for a checkpoint. New reference. */
json_t *tool_agent_state(const struct tool_agent *a);
/* As tool_agent_create, with such a state; ids: at least as many as the response had, which begin with it. ERR_FORMAT. */
int tool_agent_restore(struct tool_agent **out, const struct tool_agent_rules *rules, const json_t *state, const json_t *tools,
                       const int32_t *ids, int64_t n);

#endif
