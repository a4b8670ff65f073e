/* process.c - the processes of agent programs: their environment and sandbox, their start in order, their end and its deadlines.
 *
 * Invariant: a program is started after its start is on disk, and nothing of it outlives its session. */
#include "ppo/stages/program/program_loop_int.h"

#include "base/err.h"
#include "base/file.h"
#include "base/json.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ROW_BYTES = 96 << 10 }; /* of a variable; the kernel takes 128 KiB */

struct variables {
    char *v[20];
    int n;
};
__attribute__((format(printf, 2, 3))) static void set(struct variables *e, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    CHECK(e->n + 1 < (int)(sizeof e->v / sizeof *e->v));
    e->v[e->n++] = xvasprintf(fmt, ap);
    va_end(ap);
}

/* Loopback is reached without a proxy. */
static void set_no_proxy(struct variables *e, const char *name) {
    const char *now = getenv(name);
    set(e, "%s=%s%s127.0.0.1,localhost", name, now ? now : "", now && *now ? "," : "");
}

static void set_variables(const struct program_loops *p, const struct program_session *s, const char *row, struct variables *e) {
    const struct generation_state *g = p->g;
    const char *url = http_server_address(p->http);
    set(e, "OPENAI_BASE_URL=%s/sessions/%s/v1", url, s->id);
    set(e, "OPENAI_API_KEY=%s", s->key);
    set(e, "ANTHROPIC_BASE_URL=%s/sessions/%s", url, s->id);
    set(e, "ANTHROPIC_API_KEY=%s", s->key);
    set(e, "VERLC_SESSION=%s", s->id);
    set(e, "VERLC_REWARD_URL=%s/sessions/%s/reward", url, s->id);
    set(e, "VERLC_MODEL=%s", p->a.model);
    set(e, "VERLC_STEP=%lld", (long long)g->s->run->step);
    set(e, "VERLC_SAMPLE=%lld", (long long)(s->sample % g->per));
    set(e, "VERLC_VALIDATION=%d", g->validation);
    set(e, "VERLC_RESTARTED=%lld", (long long)s->n_restarts);
    set_no_proxy(e, "NO_PROXY");
    set_no_proxy(e, "no_proxy");
    if (strlen(row) <= MAX_ROW_BYTES) set(e, "VERLC_ROW=%s", row);
}

static int start_program(struct program_loops *p, struct program_session *s) {
    static const char *const without[] = {"VERLC_ROW", "ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", NULL};
    const struct generation_group *group = &p->g->groups[s->sample / p->g->per];
    char *row = json_dumps(batch_find(group->prompts, "row")->json[group->row], JSON_COMPACT);
    const char *url = http_server_address(p->http);
    struct variables e = {0};
    CHECK(row != NULL);
    set_variables(p, s, row, &e);
    const struct child_program_args a = {.command = p->a.k->command,
                                         .env = (const char *const *)e.v,
                                         .without = without,
                                         .input = row,
                                         .n_input = strlen(row),
                                         .max_files = p->max_files,
                                         .sandbox = p->a.k->sandbox,
                                         .dirs = p->dirs,
                                         .port = atoi(strrchr(url, ':') + 1),
                                         .wall_s = p->a.k->episode_timeout};
    const int rc = child_program_start(&s->program, &a);
    for (int i = 0; i < e.n; i++) free(e.v[i]);
    free(row);
    TRY(rc);
    TRY(token_tree_create(&s->tree, p->a.join));
    s->begun = s->active = s->oldest = http_server_clock(p->http);
    s->log = json_array();
    s->calls = json_array();
    s->state = RUNNING;
    p->n_running++;
    return 0;
}

/* Starts those for which there is room, after their beginning is on disk. */
int program_processes_start(struct program_loops *p) {
    const struct program_journal journal = program_journal_of(p);
    int64_t from = p->next, n = 0;
    for (; p->next < p->n_sessions && p->n_running + n < p->a.k->max_concurrent; p->next++) {
        struct program_session *s = p->sessions[p->next];
        if (s->state != QUEUED) continue;
        TRY(program_journal_start(&journal, s->sample, s->n_restarts));
        n++;
    }
    if (*p->a.journal) TRY(tool_journal_sync(*p->a.journal)); /* ends of others too */
    for (; from < p->next; from++)
        if (p->sessions[from]->state == QUEUED) TRY(start_program(p, p->sessions[from]));
    return 0;
}

/* Why the run ends a program; NULL: it does not. */
static char *overdue(const struct program_loops *p, const struct program_session *s) {
    const struct ppo_agent_config *k = p->a.k;
    const double now = http_server_clock(p->http);
    if (now - s->begun > k->episode_timeout) return xasprintf("it took more than agent.episode_timeout=%g s", k->episode_timeout);
    if (s->n_open > 0 && now - s->oldest > k->turn_timeout)
        return xasprintf("a turn took more than agent.turn_timeout=%g s", k->turn_timeout);
    if (s->n_open == 0 && now - s->active > k->idle_timeout)
        return xasprintf("it asked for nothing in agent.idle_timeout=%g s", k->idle_timeout);
    return NULL;
}

/* The program has ended: how, and what it printed last. One that was refused a turn for its length ends so, whatever it makes of
 * the refusal. */
static int take_end(struct program_loops *p, struct program_session *s) {
    size_t n;
    const char *line = child_program_last_line(s->program, &n);
    json_t *reward = s->has_reward ? NULL : child_program_reward_line(line, n);
    char *last = child_program_last_error(s->program), *how, *failure = NULL;
    child_program_stop(s->program, &how);
    s->program = NULL;
    if (reward && program_session_take_reward(s, reward) < 0) failure = xasprintf("its last line: %s", err_msg());
    if (strcmp(how, "exit code 0") != 0 && !s->cut) {
        free(failure);
        failure = xasprintf("%s%s%s", how, *last ? ": " : "", last);
    }
    json_decref(reward);
    free(last);
    free(how);
    return program_episode_end(p, s, failure, false);
}

int program_process_look_at(struct program_loops *p, struct program_session *s) {
    const int listener = child_program_listener(s->program);
    if (listener >= 0) s->listener = http_server_add_listener(p->http, listener);
    if (child_program_ended(s->program)) return take_end(p, s);
    char *why = overdue(p, s);
    if (!why) return 0;
    child_program_stop(s->program, NULL);
    s->program = NULL;
    return program_episode_end(p, s, why, true);
}

/* What a sandbox may read: where this run was started, and what the key names. */
int program_sandbox_open(struct program_loops *p) {
    const struct ppo_agent_config *k = p->a.k;
    int64_t n = 0;
    TRY(child_program_check_sandbox());
    p->dirs = xcalloc((size_t)k->n_sandbox_dirs + 2, sizeof *p->dirs);
    p->dir = getcwd(NULL, 0);
    if (p->dir && strcmp(p->dir, "/") != 0) p->dirs[n++] = p->dir;
    for (int64_t i = 0; i < k->n_sandbox_dirs; i++) {
        if (!file_is_dir(k->sandbox_dirs[i]) || k->sandbox_dirs[i][0] != '/' || strcmp(k->sandbox_dirs[i], "/") == 0)
            FAIL(ERR_INVAL, "actor_rollout_ref.rollout.agent.sandbox_read: %s is no directory with an absolute path below /",
                 k->sandbox_dirs[i]);
        p->dirs[n++] = k->sandbox_dirs[i];
    }
    return 0;
}
