/* agent_loop.c - see agent_loop.h. A turn that has ended is parsed; its calls go to the tools at once, and when the last of them
 * has answered, what they say is appended as tokens and the engine goes on with the response. */
#include "ppo/stages/agent_loop.h"
#include "ppo/stages/generation.h"
#include "ppo/stages/program_journal.h"
#include "ppo/stages/program_loop.h"
#include "ppo/stages/user_loop.h"

#include "agent/continuous_tokens/continuous_tokens.h"
#include "agent/tool_journal.h"
#include "agent/tools.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

/* ---- an episode ---- */

static const json_t *row_of(const struct generation_state *g, int64_t i) {
    const struct generation_group *group = &g->groups[i / g->per];
    return batch_find(group->prompts, "row")->json[group->row];
}

void agent_loop_drawn(struct generation_state *g, int64_t user, const struct engine_sample *s) {
    const struct agents *a = g->in->agents;
    if (user_loop_is_program(user)) program_loop_drawn(g, a->programs, user_loop_call(user), s);
    else user_loop_drawn(g, a->user, user_loop_call(user), s);
}

/* The last segment, if it is an environment's, has the version of the token before it. */
static void take_versions(struct generation_sample *s, int64_t n) {
    int64_t n_segments;
    const int32_t *segments = tool_agent_segments(s->agent, &n_segments), last = s->n > 0 ? s->versions[s->n - 1] : 0;
    s->versions = xrealloc(s->versions, (size_t)n * sizeof *s->versions + 1);
    if (n_segments == 0 || segments[2 * n_segments - 1] != SEGMENT_ENVIRONMENT) return;
    for (int64_t t = n - segments[2 * n_segments - 2]; t < n; t++) s->versions[t] = last;
}

/* The sample's tokens are the episode's: those of an environment have log-prob 0. */
static void take_ids(struct generation_sample *s) {
    int64_t n, n_segments, at = 0;
    const int32_t *ids = tool_agent_ids(s->agent, &n), *segments = tool_agent_segments(s->agent, &n_segments);
    if (s->versions) take_versions(s, n);
    s->ids = xrealloc(s->ids, (size_t)n * sizeof *s->ids + 1);
    memcpy(s->ids, ids, (size_t)n * sizeof *s->ids);
    float **const arrays[] = {&s->logp, &s->sampling_logp};
    for (int k = 0; k < 2; k++)
        if (*arrays[k]) *arrays[k] = xrealloc(*arrays[k], (size_t)n * sizeof **arrays[k] + 1);
    for (int64_t k = 0; k < n_segments; at += segments[2 * k++])
        for (int64_t t = at; segments[2 * k + 1] == SEGMENT_ENVIRONMENT && t < at + segments[2 * k]; t++) {
            s->logp[t] = 0;
            if (s->sampling_logp) s->sampling_logp[t] = 0;
        }
    s->n = n;
}

/* The episode is over. */
static int end_episode(struct generation_state *g, int64_t i) {
    struct generation_sample *s = &g->samples[i];
    TRY(rendered_again_look(g, i, g->in->agents->join, g->in->agents->a.k->sanity));
    char *name = generation_episode_name(g, i);
    take_ids(s);
    s->finish = tool_agent_ended(s->agent) == TOOL_AGENT_LENGTH ? ENGINE_LENGTH : ENGINE_STOP;
    generation_ended(g, i);
    const int rc = tool_agent_asked(s->agent) ? tools_end_episode(g->in->agents->tools, name) : 0;
    free(name);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int agent_loop_draw(struct generation_state *g, int64_t i) {
    struct generation_sample *s = &g->samples[i];
    struct engine_request q;
    int64_t begin; /* of the turn, which may have tokens */
    if (tool_agent_waits_for(s->agent) != TOOL_AGENT_GENERATE || g->interrupted) return 0;
    if (s->pause_at != 0 && s->pause_at <= s->n) return 0;
    tool_agent_ids(s->agent, &begin);
    TRY(generation_request(g, i, &q));
    q.stop_ids = agents_stop_ids(g->in->agents, &q.n_stop_ids);
    const int64_t most = g->in->rows->max_response_length, stream = q.n_prompt + begin;
    const int64_t left =
        g->in->rows->max_prompt_length + most - stream; /* verl's limit of a turn: of the stream, not the response */
    q.begun = s->ids;
    q.begun_logp = s->logp;
    q.begun_logp_kept = s->sampling_logp ? s->sampling_logp : s->logp;
    q.n_begun = s->n;
    q.segment = begin;
    q.max_tokens = begin + (left < most ? left : most);
    q.pause_at = s->pause_at;
    return g->s->worker->ops->generate_add(g->s->worker, &q);
}

/* The engine draws the next turn. */
static int draw_turn(struct generation_state *g, int64_t i) {
    take_ids(&g->samples[i]);
    return agent_loop_draw(g, i);
}

/* ---- tools ---- */

static struct tool_journal_key key_of(const struct generation_state *g, const struct tool_agent *a, const char *episode,
                                      int64_t call) {
    int64_t n, n_old;
    struct tool_journal_key k = {
        .step = g->s->run->step, .episode = episode, .turn = tool_agent_num_turns(a), .call = call, .name = "interaction"};
    if (call >= 0) {
        const struct tool_call *c = &tool_agent_calls(a, &n)[call];
        k.name = c->name;
        k.question = c->arguments;
    } else {
        const json_t *messages = tool_agent_messages(a, &n_old);
        k.question = json_string_value(json_object_get(json_array_get(messages, json_array_size(messages) - 1), "content"));
    }
    if (!k.question) k.question = "";
    k.n = strlen(k.question);
    return k;
}

/* Whether the journal has the answer, which is used in the next step then. */
static int find_answer(struct generation_state *g, int64_t i, const char *episode, int64_t call, bool *there) {
    struct agent_answer x = {.wait = {.ticket = -1, .sample = i, .call = call}};
    *there = false;
    if (g->s->run->probing) return 0;
    TRY(generation_open_journal(g, &g->in->agents->journal));
    const struct tool_journal_key k = key_of(g, g->samples[i].agent, episode, call);
    *there = tool_journal_find(g->in->agents->journal, &k, &x.result);
    if (!*there) return 0;
    xgrow((void **)&g->answers, &g->cap_answers, g->n_answers + 1, sizeof *g->answers);
    g->answers[g->n_answers++] = x;
    return 0;
}

static void wait_for(struct generation_state *g, struct agent_wait w) {
    xgrow((void **)&g->waits, &g->cap_waits, g->n_waits + 1, sizeof *g->waits);
    g->waits[g->n_waits++] = w;
}

/* An answer that has come is on disk before it is used. */
static int keep_answer(struct generation_state *g, struct agent_answer *x) {
    if (g->s->run->probing) return 0;
    char *name = generation_episode_name(g, x->wait.sample);
    const struct tool_journal_key k = key_of(g, g->samples[x->wait.sample].agent, name, x->wait.call);
    const int rc = tool_journal_add(g->in->agents->journal, &k, &x->result);
    x->record = tool_journal_added(g->in->agents->journal);
    free(name);
    return rc;
}

/* Whether an answer has come while no generation waited for it; nothing is kept for that call from here on. */
static bool unpark(struct agents *a, int64_t ticket, struct tool_result *out) {
    int64_t k = 0;
    while (k < a->n_parked && a->parked[k].ticket != ticket) k++;
    if (k == a->n_parked) return false;
    const bool there = a->parked[k].there;
    *out = a->parked[k].result;
    a->parked[k] = a->parked[--a->n_parked];
    return there;
}

/* Whether it was asked before this generation: what it has said since then is used in the next step. */
static int is_out(struct generation_state *g, struct agent_wait w, bool *out) {
    struct agents *const a = g->in->agents;
    const struct generation_sample *s = &g->samples[w.sample];
    struct agent_answer x = {.wait = w};
    x.wait.ticket = s->tickets ? s->tickets[w.call < 0 ? 0 : w.call] : -1;
    *out = x.wait.ticket >= 0;
    if (!*out) return 0;
    if (!unpark(a, x.wait.ticket, &x.result)) {
        wait_for(g, x.wait);
        return 0;
    }
    const int kept = keep_answer(g, &x);
    xgrow((void **)&g->answers, &g->cap_answers, g->n_answers + 1, sizeof *g->answers);
    g->answers[g->n_answers++] = x;
    return kept;
}

static int call_tool(struct generation_state *g, int64_t i, int64_t call, const char *episode, const json_t *data) {
    const struct generation_sample *s = &g->samples[i];
    struct agent_wait w = {.sample = i, .call = call};
    int64_t n;
    bool there;
    TRY(is_out(g, w, &there));
    if (there) return 0;
    TRY(find_answer(g, i, episode, call, &there));
    if (there) return 0;
    const struct tool_call *c = &tool_agent_calls(s->agent, &n)[call];
    const struct tool_request r = {.episode = episode,
                                   .name = c->name,
                                   .arguments = c->arguments,
                                   .n_arguments = strlen(c->arguments),
                                   .tools_kwargs = agents_info_of(row_of(g, i), "tools_kwargs"),
                                   .tool_selection = agents_info_of(row_of(g, i), "tool_selection"),
                                   .extra_fields = tool_agent_extra_fields(s->agent),
                                   .agent_data = data};
    TRY(tools_call(g->in->agents->tools, &r, &w.ticket));
    wait_for(g, w);
    return 0;
}

static int call_tools(struct generation_state *g, int64_t i) {
    const struct generation_sample *s = &g->samples[i];
    char *name = generation_episode_name(g, i);
    int64_t n;
    int rc = 0;
    const struct tool_call *calls = tool_agent_calls(s->agent, &n);
    bool wanted = false;
    for (int64_t k = 0; k < n; k++) wanted |= tools_want_agent_data(g->in->agents->tools, calls[k].name);
    json_t *data = wanted ? tool_agent_data(s->agent) : NULL; /* it has all ids: large */
    for (int64_t k = 0; k < n && rc == 0; k++)
        if (!tool_agent_answered(s->agent, k)) rc = call_tool(g, i, k, name, data);
    json_decref(data);
    free(name);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

static int ask_interaction(struct generation_state *g, int64_t i, const char *episode) {
    const struct generation_sample *s = &g->samples[i];
    struct agent_wait w = {.sample = i, .call = -1};
    int64_t n_old;
    bool there;
    TRY(is_out(g, w, &there));
    if (there) return 0;
    TRY(find_answer(g, i, episode, -1, &there));
    if (there) return 0;
    const struct interaction_request r = {.episode = episode,
                                          .messages = tool_agent_messages(s->agent, &n_old),
                                          .interaction_kwargs = agents_info_of(row_of(g, i), "interaction_kwargs"),
                                          .extra_fields = tool_agent_extra_fields(s->agent)};
    TRY(tools_interact(g->in->agents->tools, &r, &w.ticket));
    wait_for(g, w);
    return 0;
}

static int interact(struct generation_state *g, int64_t i) {
    char *name = generation_episode_name(g, i);
    const int rc = ask_interaction(g, i, name);
    free(name);
    return rc;
}

/* What an episode that goes on has asked, and has no answer to. */
static int ask_again(struct generation_state *g, int64_t i) {
    struct generation_sample *s = &g->samples[i];
    const enum tool_agent_next next = tool_agent_waits_for(s->agent);
    int rc = 0;
    if (next == TOOL_AGENT_TOOLS) rc = call_tools(g, i);
    if (next == TOOL_AGENT_INTERACT) rc = interact(g, i);
    free(s->tickets);
    s->tickets = NULL;
    return rc;
}

/* Of a loop of the user, or (NULL) of a program. */
static int begin_user_episode(struct generation_state *g, int64_t i, const char *loop) {
    struct generation_sample *const s = &g->samples[i];
    struct agents *const a = g->in->agents;
    if (s->user && s->user->held) return loop ? user_loop_resume(g, a->user, i) : program_loop_resume(g, a->programs, i);
    if (s->user) return 0;
    s->user = xcalloc(1, sizeof *s->user);
    s->user->program = !loop;
    s->user->n_starts = json_integer_value(json_object_get(s->agent_state, "starts"));
    if (!s->over) return loop ? user_loop_begin(g, a->user, i, loop) : program_loop_begin(g, a->programs, i);
    user_episode_forget(s); /* its tokens are in the record, with those of its other samples */
    if (!program_journal_restore(g, s->agent_state, s)) FAIL(ERR_FORMAT, "an episode of the checkpoint is damaged");
    json_decref(s->agent_state);
    s->agent_state = NULL;
    return generation_decode(g->in, s);
}

int agent_loop_begin(struct generation_state *g, int64_t i) {
    struct agents *const a = g->in->agents;
    const struct generation_group *group = &g->groups[i / g->per];
    enum agent_loop_kind loop;
    const char *name;
    if (!agents_active(a)) return 0;
    TRY(agents_loop_of(a, row_of(g, i), &loop, &name));
    if (loop == AGENT_USER_LOOP || loop == AGENT_PROGRAM) return begin_user_episode(g, i, loop == AGENT_PROGRAM ? NULL : name);
    if (loop == AGENT_ONE_TURN) return 0;
    if (g->samples[i].agent) return ask_again(g, i);
    json_t *tools = tools_select(a->tools, agents_info_of(row_of(g, i), "tool_selection"));
    const struct tool_agent_rules rules = {.response_length = g->in->rows->max_response_length,
                                           .max_assistant_turns = a->a.k->max_assistant_turns,
                                           .max_user_turns = a->a.k->max_user_turns,
                                           .max_parallel_calls = a->a.k->max_parallel_calls,
                                           .parser = a->a.k->parser,
                                           .interacts = agents_interacts(a)};
    struct generation_sample *const s = &g->samples[i];
    int rc = 0;
    if (s->agent_state) rc = tool_agent_restore(&s->agent, &rules, s->agent_state, tools, s->ids, s->n);
    else tool_agent_create(&s->agent, &rules, batch_find(group->prompts, "raw_prompt")->json[group->row], tools);
    json_decref(tools);
    json_decref(s->agent_state);
    s->agent_state = NULL;
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : ask_again(g, i);
}

/* What is new in the conversation becomes tokens. */
static int join(struct generation_state *g, int64_t i, enum tool_agent_next *next) {
    struct generation_sample *s = &g->samples[i];
    const struct generation_group *group = &g->groups[i / g->per];
    const struct batch_col *prompts = batch_find(group->prompts, "prompts");
    struct continuous_junction j = {0};
    struct text_ids stream = {0};
    int64_t n, n_old;
    const int32_t *ids = tool_agent_ids(s->agent, &n);
    const json_t *messages = tool_agent_messages(s->agent, &n_old);
    text_ids_add(&stream, prompts->i32 + prompts->off[group->row], batch_len(prompts, group->row));
    text_ids_add(&stream, ids, n);
    const int rc = continuous_tokens_append(g->in->agents->join, messages, n_old, tool_agent_tools(s->agent), &stream, &j);
    if (rc == 0) *next = tool_agent_join(s->agent, j.n_removed, j.added.p, j.added.n);
    text_ids_free(&stream);
    text_ids_free(&j.added);
    if (rc == 0) return 0;
    if (rc != ERR_FORMAT && rc != ERR_INPUT && rc != ERR_UNSUPPORTED) return err_pass(rc, __FILE__, __LINE__);
    tool_agent_fail(s->agent, TOOL_AGENT_REFUSED, err_msg());
    *next = TOOL_AGENT_END;
    return 0;
}

static int go_on(struct generation_state *g, int64_t i, enum tool_agent_next next) {
    if (next == TOOL_AGENT_JOIN) TRY(join(g, i, &next));
    switch (next) {
    case TOOL_AGENT_TOOLS: return call_tools(g, i);
    case TOOL_AGENT_INTERACT: return interact(g, i);
    case TOOL_AGENT_GENERATE: return draw_turn(g, i);
    default: return end_episode(g, i);
    }
}

/* A turn of sample i has ended. */
static int take_turn(struct generation_state *g, int64_t i) {
    struct generation_sample *s = &g->samples[i];
    const struct tokenizer *tok = g->in->tok;
    struct buf text = {0}, plain = {0};
    enum tool_agent_next next;
    int64_t begin;
    tool_agent_ids(s->agent, &begin);
    int rc = tool_parser_text(g->in->agents->a.k->parser, tok, s->ids + begin, s->n - begin, &text);
    if (rc == 0 && agents_interacts(g->in->agents)) rc = tokenizer_decode(tok, s->ids + begin, s->n - begin, true, &plain);
    const struct tool_agent_turn t = {.ids = s->ids + begin,
                                      .n = s->n - begin,
                                      .text = text.p ? text.p : "",
                                      .n_text = text.n,
                                      .plain = plain.p ? plain.p : "",
                                      .n_plain = plain.n};
    if (rc == 0) rc = tool_agent_drawn(s->agent, &t, &next);
    buf_free(&text);
    buf_free(&plain);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : go_on(g, i, next);
}

/* The call that waits for this answer; -1: none, it is of a generation that was dropped. */
static int64_t find_wait(const struct generation_state *g, int64_t ticket) {
    for (int64_t w = 0; w < g->n_waits; w++)
        if (g->waits[w].ticket == ticket) return w;
    return -1;
}

static enum tool_agent_next take_call(struct tool_agent *a, int64_t call, const struct tool_result *r) {
    const struct tool_agent_result x = {.text = r->text,
                                        .n_text = r->n_text,
                                        .status = tool_status_name(r->status),
                                        .seconds = r->seconds,
                                        .reward = r->reward,
                                        .has_reward = r->has_reward,
                                        .truncated = r->truncated};
    return tool_agent_result(a, call, &x);
}

/* An interaction that fails ends the episode, as its exception does in verl. */
static enum tool_agent_next take_reply(struct tool_agent *a, const struct tool_result *r) {
    const struct tool_agent_reply x = {.text = r->text,
                                       .n_text = r->n_text,
                                       .seconds = r->seconds,
                                       .stop = r->stop,
                                       .has_score = r->has_reward,
                                       .score = r->reward};
    if (r->status == TOOL_OK) return tool_agent_replied(a, &x);
    tool_agent_fail(a, r->status == TOOL_TIMEOUT ? TOOL_AGENT_TIMEOUT : TOOL_AGENT_ERROR, r->text);
    return TOOL_AGENT_END;
}

static int take_answer(struct generation_state *g, const struct agent_answer *x) {
    struct tool_agent *const a = g->samples[x->wait.sample].agent;
    tool_result_apply(&x->result, tool_agent_extra_fields(a));
    const enum tool_agent_next next = x->wait.call < 0 ? take_reply(a, &x->result) : take_call(a, x->wait.call, &x->result);
    phase_beat(g->s->run->stages);
    return next == TOOL_AGENT_TOOLS ? 0 : go_on(g, x->wait.sample, next);
}

/* The answer to a call that is held is kept; to one that was dropped it is not. */
static void park_result(struct agents *a, struct tool_result *r) {
    for (int64_t k = 0; k < a->n_parked; k++)
        if (a->parked[k].ticket == r->ticket) {
            a->parked[k].result = *r;
            a->parked[k].there = true;
            return;
        }
    tool_result_free(r);
}

/* What helpers have answered goes to g->answers, and to the journal. */
static int receive(struct generation_state *g, double wait_s) {
    for (; g->n_waits > 0; wait_s = 0) {
        struct agent_answer x = {0};
        const int got = tools_recv(g->in->agents->tools, wait_s, &x.result);
        TRY(got);
        if (got == 0) break;
        const int64_t w = find_wait(g, x.result.ticket);
        if (w < 0) {
            park_result(g->in->agents, &x.result);
            continue;
        }
        x.wait = g->waits[w];
        g->waits[w] = g->waits[--g->n_waits];
        const int kept = keep_answer(g, &x);
        xgrow((void **)&g->answers, &g->cap_answers, g->n_answers + 1, sizeof *g->answers);
        g->answers[g->n_answers++] = x;
        TRY(kept);
    }
    return 0;
}

bool agent_loop_waits(const struct generation_state *g) {
    if (g->interrupted) return g->n_turned + g->n_answers > 0;
    return g->n_waits + g->n_answers > 0 ||
           (g->in->agents && (user_loop_waits(g->in->agents->user, g) || program_loop_waits(g->in->agents->programs)));
}

/* Those that are on disk are used; the others stay. wait: for some of them, where there is none. */
static int use_answers(struct generation_state *g, bool wait) {
    struct tool_journal *const journal = g->in->agents ? g->in->agents->journal : NULL;
    struct agent_answer *const answers = g->answers;
    const int64_t n = g->n_answers;
    int64_t synced = 0;
    bool some = false;
    int rc = 0;
    for (int64_t k = 0; k < n; k++) some |= answers[k].record == 0;
    if (journal && n > 0) TRY(tool_journal_flush(journal, wait && !some, &synced));
    g->answers = NULL; /* those of turns that are drawn from here on are others */
    g->n_answers = g->cap_answers = 0;
    for (int64_t k = 0; k < n; k++) {
        if (answers[k].record > synced) {
            xgrow((void **)&g->answers, &g->cap_answers, g->n_answers + 1, sizeof *g->answers);
            g->answers[g->n_answers++] = answers[k];
            continue;
        }
        if (rc == 0) rc = take_answer(g, &answers[k]);
        tool_result_free(&answers[k].result);
    }
    free(answers);
    return rc;
}

int agent_loop_step(struct generation_state *g, bool wait) {
    struct user_loops *const user = g->in->agents ? g->in->agents->user : NULL;
    struct program_loops *const programs = g->in->agents ? g->in->agents->programs : NULL;
    if (user) TRY(user_loop_step(g, user, wait && g->n_waits + g->n_answers == 0));
    if (programs) TRY(program_loop_step(g, programs, wait && g->n_waits + g->n_answers == 0));
    for (int64_t k = 0; k < g->n_turned; k++) TRY(take_turn(g, g->turned[k]));
    g->n_turned = 0;
    TRY(receive(g, wait && g->n_answers == 0 && !g->interrupted ? 0.1 : 0));
    return use_answers(g, wait);
}

void agent_loop_hold(struct generation_state *g) {
    struct agents *const a = g->in->agents;
    for (int64_t k = 0; k < g->n_waits; k++) {
        const struct agent_wait *w = &g->waits[k];
        struct generation_sample *s = &g->samples[w->sample];
        int64_t n;
        tool_agent_calls(s->agent, &n);
        if (!s->tickets) {
            s->tickets = xmalloc((size_t)(n + 1) * sizeof *s->tickets);
            for (int64_t c = 0; c <= n; c++) s->tickets[c] = -1;
        }
        s->tickets[w->call < 0 ? 0 : w->call] = w->ticket;
        xgrow((void **)&a->parked, &a->cap_parked, a->n_parked + 1, sizeof *a->parked);
        a->parked[a->n_parked++] = (struct parked){.ticket = w->ticket};
    }
    g->n_waits = 0;
    if (a && a->user) user_loop_hold(a->user, g);
    if (a && a->programs) program_loop_hold(a->programs);
}

void agent_loop_forget(struct agents *a, struct generation_sample *s, const char *name) {
    int64_t n;
    if (s->user && s->user->held && s->user->program) program_loop_forget(a->programs, s->user);
    else if (s->user && s->user->held) user_loop_forget(a->user, s->user);
    if (!s->agent) return;
    tool_agent_calls(s->agent, &n);
    for (int64_t k = 0; s->tickets && k < (n > 0 ? n : 1); k++) {
        struct tool_result r = {0};
        if (unpark(a, s->tickets[k], &r)) tool_result_free(&r);
    }
    if (!s->over && tool_agent_asked(s->agent) && tools_end_episode(a->tools, name) < 0) log_warn("%s", err_msg());
}

void agent_loop_end(struct generation_state *g) {
    if (g->n_again_differ > 0) rendered_again_warn(g, &g->in->agents->warned_again);
    if (g->n_waits > 0) tools_cancel(g->in->agents->tools);
    if (g->in->agents && g->in->agents->user) user_loop_end(g->in->agents->user, g);
    if (g->in->agents && g->in->agents->programs) program_loop_end(g->in->agents->programs);
    for (int64_t k = 0; k < g->n_answers; k++) tool_result_free(&g->answers[k].result);
    free(g->turned);
    free(g->waits);
    free(g->answers);
    g->turned = NULL;
    g->waits = NULL;
    g->answers = NULL;
    g->n_turned = g->n_waits = g->n_answers = g->cap_turned = g->cap_waits = g->cap_answers = 0;
}

/* ---- of samples that are over ---- */

int64_t agent_loop_num_turns(const struct generation_sample *s) {
    return s->agent ? tool_agent_num_turns(s->agent) : s->user ? s->user->out.num_turns : 2;
}

char *agent_loop_failure(const struct generation_sample *s) {
    if (s->user && s->user->failure)
        return xasprintf("the agent %s failed: %s", s->user->program ? "program" : "loop", s->user->failure);
    if (!s->agent || !tool_agent_reason(s->agent)) return NULL;
    return xasprintf("the episode ended as %s: %s", tool_agent_end_name(tool_agent_ended(s->agent)), tool_agent_reason(s->agent));
}

static int64_t calls_of_user(const struct user_episode *u) { return u ? (int64_t)json_array_size(u->out.calls) : 0; }

/* The record of a sample of one turn, or of a loop or a program of the user. */
static json_t *plain_episode(const struct generation_sample *s) {
    const struct user_episode *u = s->user;
    const char *end = !u || !u->failure ? engine_finish_name(s->finish) : u->timed_out ? "timeout" : "error";
    json_t *e = json_pack("{s:I, s:s, s:i, s:i, s:[]}", "turns", (json_int_t)agent_loop_num_turns(s), "end", end, "malformed", 0,
                          "dropped", 0, "calls");
    if (u && u->failure) json_object_set_new(e, "reason", json_string(u->failure));
    if (u && u->out.calls) json_object_set(e, "calls", u->out.calls);
    if (u && u->record) json_object_update(e, u->record);
    return e;
}

json_t *agent_loop_episode(const struct generation_sample *s) { return s->agent ? tool_agent_episode(s->agent) : plain_episode(s); }

void agent_loop_extra_info(const struct generation_sample *s, json_t *extra) {
    json_object_set_new(extra, "turn_scores", s->agent ? json_deep_copy(tool_agent_turn_scores(s->agent)) : json_array());
    json_object_set_new(extra, "tool_rewards", s->agent ? json_deep_copy(tool_agent_tool_rewards(s->agent)) : json_array());
    if (!s->agent && !s->user) return;
    json_t *fields = json_deep_copy(s->agent ? tool_agent_extra_fields(s->agent) : s->user->out.extra_fields);
    json_object_update(extra, fields);
    json_decref(fields);
}

const int32_t *agent_loop_segments(const struct generation_sample *s, int32_t *one, int64_t *n) {
    if (s->agent) return tool_agent_segments(s->agent, n);
    one[0] = (int32_t)s->n;
    one[1] = SEGMENT_POLICY;
    *n = s->user && s->user->out.n_segments > 0 ? s->user->out.n_segments : 1;
    return s->user && s->user->out.n_segments > 0 ? s->user->out.segments : one;
}

static int add_segments(const struct generation_sample *const *at, struct batch *b) {
    struct batch_col *c;
    int32_t one[2];
    int64_t n, *lens = xmalloc((size_t)b->n_rows * sizeof *lens + 1);
    for (int64_t i = 0; i < b->n_rows; i++) {
        agent_loop_segments(at[i], one, &n);
        lens[i] = 2 * n;
    }
    const int rc = batch_add(b, BATCH_SEGMENTS, BATCH_I32, lens, NULL, &c);
    for (int64_t i = 0; i < b->n_rows && rc == 0; i++)
        memcpy(c->i32 + c->off[i], agent_loop_segments(at[i], one, &n), (size_t)lens[i] * sizeof *one);
    free(lens);
    return rc;
}

int agent_loop_columns(const struct generation_sample *const *at, struct batch *b) {
    struct batch_col *episode, *turns, *calls, *seconds, *other;
    TRY(add_segments(at, b));
    TRY(batch_add(b, "episode", BATCH_JSON, NULL, NULL, NULL));
    TRY(batch_add(b, "num_turns", BATCH_I64, NULL, NULL, NULL));
    TRY(batch_add(b, "num_tool_calls", BATCH_I64, NULL, NULL, NULL));
    TRY(batch_add(b, "tool_seconds", BATCH_F64, NULL, NULL, NULL));
    TRY(batch_add(b, "other_temperature", BATCH_I64, NULL, NULL, NULL));
    episode = batch_find(b, "episode");
    other = batch_find(b, "other_temperature");
    turns = batch_find(b, "num_turns");
    calls = batch_find(b, "num_tool_calls");
    seconds = batch_find(b, "tool_seconds");
    for (int64_t i = 0; i < b->n_rows; i++) {
        const struct tool_agent *a = at[i]->agent;
        json_decref(episode->json[i]);
        episode->json[i] = agent_loop_episode(at[i]);
        turns->i64[i] = agent_loop_num_turns(at[i]);
        other->i64[i] = at[i]->user ? at[i]->user->n_other_temperature : 0;
        calls->i64[i] = a ? tool_agent_num_calls(a) : calls_of_user(at[i]->user);
        seconds->f64[i] = a ? tool_agent_tool_seconds(a) : at[i]->user ? at[i]->user->out.tool_seconds : 0;
    }
    return 0;
}
