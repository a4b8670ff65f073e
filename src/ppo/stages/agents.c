/* agents.c - see agents.h. Tools, the user's classes, programs and the chat template's joins are opened by the first row that needs
 * them. */
#include "ppo/stages/agents.h"
#include "ppo/stages/program_loop.h"
#include "ppo/stages/user_loop.h"

#include "agent/continuous_tokens/continuous_tokens.h"
#include "agent/tool_journal.h"
#include "agent/tools.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

#define MULTI_TURN "actor_rollout_ref.rollout.multi_turn."
enum { MODEL_CONFIG_BYTES = 1 << 24 };

void agents_create(struct agents **out, const struct agents_args *a) {
    *out = xcalloc(1, sizeof **out);
    (*out)->a = *a;
}

void agents_destroy(struct agents *a) {
    if (!a) return;
    program_loops_close(a->programs);
    for (int64_t k = 0; k < a->n_parked; k++) tool_result_free(&a->parked[k].result);
    free(a->parked);
    free(a->model_name);
    continuous_tokens_destroy(a->join);
    tool_journal_close(a->journal);
    tools_close(a->tools);
    user_loops_close(a->user);
    free(a->stop_ids);
    free(a);
}

void agents_finish(struct agents *a) {
    if (a && a->journal && tool_journal_clear(a->journal) < 0) log_warn("%s", err_msg());
}

bool agents_active(const struct agents *a) { return a && a->n_rows > 0; }

/* ---- rows ---- */

static int model_type(const struct agents *a, json_t **config, const char **type) {
    char *path = file_join(a->a.model_dir, "config.json");
    const int rc = json_load(config, path, MODEL_CONFIG_BYTES);
    free(path);
    TRY(rc);
    *type = json_string_value(json_object_get(*config, "model_type"));
    return 0;
}

static int open_join(struct agents *a) {
    json_t *config = NULL;
    const char *type = NULL;
    int rc = model_type(a, &config, &type);
    if (rc == 0) rc = continuous_tokens_create(&a->join, a->a.tok, type ? type : "", a->a.rows->chat_kwargs);
    json_decref(config);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* Says at start what the chat template cannot append to a turn: an episode that comes to it ends there. */
static int try_template(struct agents *a) {
    static const struct {
        const char *name, *text;
    } cases[] = {{"tool", "a tool's result"}, {"two_tools", "two results at once"}, {"user", "a user message"}};
    json_t *report;
    TRY(continuous_tokens_selftest(a->join, &report));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const json_t *one = json_object_get(json_object_get(report, "cases"), cases[i].name);
        const char *reason = json_string_value(json_object_get(one, "reason"));
        if (i == 1 && a->a.k->max_parallel_calls <= 1) continue;
        if (i == 2 && !a->a.k->interaction_config_path) continue;
        if (reason) log_warn("agent loops: an episode ends where %s would be appended: %s", cases[i].text, reason);
    }
    json_decref(report);
    return 0;
}

static int find_stop_ids(struct agents *a) {
    const char *const *names = tool_parser_stop_tokens(a->a.k->parser);
    int64_t n = 0;
    while (names[n]) n++;
    a->stop_ids = xcalloc((size_t)n + 1, sizeof *a->stop_ids);
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = tokenizer_id(a->a.tok, names[i]);
        if (id >= 0) a->stop_ids[a->n_stop_ids++] = id;
        else log_warn(MULTI_TURN "format=%s ends a turn at %s, which the tokenizer does not have", a->a.k->format, names[i]);
    }
    return 0;
}

static int open_all(struct agents *a) {
    const struct ppo_agent_config *k = a->a.k;
    if (a->tools) return 0;
    TRY(tools_open(&a->tools, &(struct tools_config){.tool_config_path = k->tool_config_path,
                                                     .function_tool_path = k->function_tool_path,
                                                     .interaction_config_path = k->interaction_config_path,
                                                     .max_response_length = k->max_tool_response_length,
                                                     .truncate_side = k->truncate_side,
                                                     .timeout_s = k->tool_timeout,
                                                     .n_processes = (int)k->tool_processes}));
    TRY(find_stop_ids(a));
    if (!a->join) TRY(open_join(a));
    return try_template(a);
}

/* The last part of the model's path. */
static char *model_name(const char *dir) {
    size_t to = strlen(dir), from;
    while (to > 1 && dir[to - 1] == '/') to--;
    for (from = to; from > 0 && dir[from - 1] != '/';) from--;
    return xstrndup(dir + from, to - from);
}

/* Of a model whose configuration is nested too. */
static int64_t vocab_of(const json_t *config) {
    const json_t *v = json_object_get(config, "vocab_size");
    return json_integer_value(v ? v : json_object_get(json_object_get(config, "text_config"), "vocab_size"));
}

/* A record has versions of tokens, and not when an episode asked for a turn. */
static int check_replay(const struct agents *a, const char *what) {
    if (a->a.schedule == PPO_FULLY_ASYNC && a->a.partial_replay)
        FAIL(ERR_UNSUPPORTED, "async_training.replay: %s are repeated with async_training.partial_rollout=False alone", what);
    return 0;
}

static int open_programs(struct agents *a) {
    json_t *config = NULL;
    const char *type;
    if (a->programs) return 0;
    if (!a->a.k->command)
        FAIL(ERR_INPUT, "agent_name '" PROGRAM_LOOP "': which program? Set actor_rollout_ref.rollout.agent.command");
    TRY(check_replay(a, "agent programs"));
    if (!a->join) TRY(open_join(a));
    TRY(model_type(a, &config, &type));
    const int64_t vocab = vocab_of(config);
    json_decref(config);
    a->model_name = model_name(a->a.model_dir);
    return program_loops_open(&a->programs, &(struct program_loops_args){.k = a->a.k,
                                                                         .rows = a->a.rows,
                                                                         .tok = a->a.tok,
                                                                         .join = a->join,
                                                                         .journal = &a->journal,
                                                                         .model = a->model_name,
                                                                         .vocab = vocab});
}

/* The user's classes, at the first row that may need them. */
static int open_user_loops(struct agents *a) {
    const struct ppo_agent_config *k = a->a.k;
    json_t *config = NULL;
    const char *type = NULL;
    if (a->user || !k->loop_config_path) return 0;
    TRY(check_replay(a, "agent loops of the user"));
    int rc = model_type(a, &config, &type);
    const int64_t vocab = vocab_of(config);
    const struct user_loops_args u = {.config_path = k->loop_config_path,
                                      .tool_config_path = k->tool_config_path,
                                      .function_tool_path = k->function_tool_path,
                                      .tokenizer_dir = a->a.model_dir,
                                      .model_type = type,
                                      .conf = a->a.conf,
                                      .n_processes = k->tool_processes,
                                      .vocab = vocab,
                                      .timeout_s = k->episode_timeout};
    if (rc == 0) rc = user_loops_open(&a->user, &u);
    json_decref(config);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

int agents_loop_of(struct agents *a, const json_t *row, enum agent_loop_kind *loop, const char **name) {
    const struct ppo_agent_config *k = a->a.k;
    const json_t *own = json_object_get(row, "agent_name");
    *name = own && !json_is_null(own) ? json_string_value(own) : k->default_loop;
    if (!*name) FAIL(ERR_INPUT, "column 'agent_name' is not text");
    if (a->a.schedule == PPO_FULLY_ASYNC && !k->multi_turn) *name = "single_turn_agent"; /* verl's rule */
    *loop = strcmp(*name, "tool_agent") == 0          ? AGENT_TOOLS
            : strcmp(*name, "single_turn_agent") == 0 ? AGENT_ONE_TURN
            : strcmp(*name, PROGRAM_LOOP) == 0        ? AGENT_PROGRAM
                                                      : AGENT_USER_LOOP;
    if (*loop == AGENT_PROGRAM) return open_programs(a);
    if (*loop != AGENT_USER_LOOP) return 0;
    TRY(open_user_loops(a));
    if (user_loops_has(a->user, *name)) return 0;
    char *names = user_loops_names(a->user, "single_turn_agent, tool_agent, " PROGRAM_LOOP);
    err_set(ERR_INPUT, __FILE__, __LINE__, "agent_name '%s': the agent loops there are: %s%s", *name, names,
            k->loop_config_path ? "" : "; classes of your own: actor_rollout_ref.rollout.agent.agent_loop_config_path");
    free(names);
    return ERR_INPUT;
}

const json_t *agents_info_of(const json_t *row, const char *key) {
    return json_object_get(json_object_get(row, "extra_info"), key);
}

bool agents_interacts(const struct agents *a) { return json_array_size(tools_interactions(a->tools)) > 0; }

int agents_row(void *agents, const json_t *row, json_t **tools) {
    struct agents *a = agents;
    enum agent_loop_kind loop;
    const char *name;
    *tools = NULL;
    TRY(agents_loop_of(a, row, &loop, &name));
    a->n_rows += loop != AGENT_ONE_TURN;
    if (loop != AGENT_TOOLS) return 0;
    TRY(open_all(a));
    a->n_tool_rows++;
    a->n_without_kwargs += json_object_size(agents_info_of(row, "tools_kwargs")) == 0;
    if (agents_interacts(a)) TRY(tools_check_interaction(a->tools, agents_info_of(row, "interaction_kwargs")));
    *tools = tools_select(a->tools, agents_info_of(row, "tool_selection"));
    return 0;
}

const int32_t *agents_stop_ids(const struct agents *a, int64_t *n) {
    *n = a->n_stop_ids;
    return a->stop_ids;
}

void agents_check(const struct agents *a) {
    const struct ppo_agent_config *k = a->a.k;
    const bool tools = k->tool_config_path || k->function_tool_path || k->interaction_config_path;
    if (a->a.schedule == PPO_FULLY_ASYNC && !k->multi_turn) {
        if (tools || k->command || k->loop_config_path)
            log_warn("no row of the data has several turns: in fully asynchronous training " MULTI_TURN
                     "enable=False makes every row a single_turn_agent, as in verl. Set it True");
        return;
    }
    if (a->n_rows == 0 && tools)
        log_warn("no row of the data has several turns: " MULTI_TURN "%s chooses no agent loop, as in verl. Set "
                 "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent, or give rows a column agent_name with tool_agent",
                 k->multi_turn ? "enable=True" : "tool_config_path");
    if (a->n_tool_rows > 0 && !tools)
        log_warn("%lld rows are of a tool_agent, and there are no tools: set " MULTI_TURN "tool_config_path or " MULTI_TURN
                 "function_tool_path",
                 (long long)a->n_tool_rows);
    if (k->command && !a->programs)
        log_warn("no row of the data has the program of actor_rollout_ref.rollout.agent.command: give rows agent_name "
                 "'" PROGRAM_LOOP "', or leave agent.default_agent_loop out");
    if (k->loop_config_path && !a->user)
        log_warn("no row of the data names an agent loop of actor_rollout_ref.rollout.agent.agent_loop_config_path in agent_name");
    if (k->need_tools_kwargs && a->n_without_kwargs > 0)
        log_warn("data.need_tools_kwargs=True: %lld rows of a tool_agent have no extra_info.tools_kwargs",
                 (long long)a->n_without_kwargs);
}
