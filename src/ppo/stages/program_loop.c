/* program_loop.c - see program_loop.h: the address that programs ask, and a generation's episodes, begun, stepped and ended. Its
 * parts are in program/ (program_loop_int.h).
 *
 * Invariant: what a generation leaves of its programs is what is held; all else is ended with it. */
#include "ppo/stages/program/program_loop_int.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#define LOOK_S 0.005     /* between two looks at the processes */
#define LOOK_EACH_S 4e-5 /* and of many: a tenth of the time */
#define WAIT_NS 1000000L /* of a step without work */
enum {
    MAX_BODY = 8 << 20,
    MAX_FILES = 1024,  /* of a process of a program, and so connections: fewer than the server has */
    OTHER_FILES = 1024 /* of this process, besides those of programs */
};

/* ---- a run ---- */

static void on_refused(void *arg, struct http_exchange *x, int status, const char *message) {
    serve_refused(((struct program_loops *)arg)->serve, x, status, message);
}
static void on_tick(void *arg) { serve_tick(((struct program_loops *)arg)->serve); }

/* How many connections there may be: so many that one process does not take those of the others, as far as this process may have
 * descriptors. */
static int64_t choose_connections(const struct program_loops *p) {
    const int64_t wanted = 16 * MAX_FILES + 16 * p->a.k->max_concurrent, other = OTHER_FILES + 4 * p->a.k->max_concurrent;
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return wanted;
    const rlim_t want = (rlim_t)(wanted + other), now = files.rlim_cur;
    if (now != RLIM_INFINITY && now < want) {
        files.rlim_cur = files.rlim_max == RLIM_INFINITY || files.rlim_max > want ? want : files.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &files) != 0) files.rlim_cur = now;
    }
    const int64_t left = files.rlim_cur == RLIM_INFINITY ? wanted : (int64_t)files.rlim_cur - other;
    return left > wanted ? wanted : left > 64 ? left : 64;
}

static int open_all(struct program_loops *p) {
    const struct ppo_data_config *rows = p->a.rows;
    const int64_t connections = choose_connections(p);
    p->max_files = connections / 4 < MAX_FILES ? connections / 4 : MAX_FILES;
    if (p->max_files < 64)
        log_warn("ulimit -n lets this process open few files, and a process of an agent's program %lld", (long long)p->max_files);
    if (p->a.k->sandbox) TRY(program_sandbox_open(p));
    p->hooks = program_session_hooks(p);
    TRY(serve_create(&p->serve, &(struct serve_args){.backend = program_turns_backend(p),
                                                     .sessions = &p->hooks,
                                                     .sessions_only = true,
                                                     .tok = p->a.tok,
                                                     .model = p->a.model,
                                                     .tool_format = tool_parser_name(p->a.k->parser),
                                                     .max_len = rows->max_prompt_length + rows->max_response_length,
                                                     .max_open = INT32_MAX}));
    return http_server_open(&p->http, &(struct http_server_args){.host = "127.0.0.1",
                                                                 .max_connections = connections,
                                                                 .max_of_peer = connections,
                                                                 .max_body = MAX_BODY,
                                                                 .request_s = 60,
                                                                 .answer_s = 7 * 86400,
                                                                 .stepped = true,
                                                                 .serve = program_request_take,
                                                                 .refused = on_refused,
                                                                 .tick = on_tick,
                                                                 .arg = p});
}

int program_loops_open(struct program_loops **out, const struct program_loops_args *a) {
    struct program_loops *p = xcalloc(1, sizeof *p);
    p->a = *a;
    const int rc = open_all(p);
    if (rc < 0) program_loops_close(p);
    else *out = p;
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

void program_loops_close(struct program_loops *p) {
    if (!p) return;
    for (int64_t k = 0; k < p->n_sessions; k++) p->sessions[k]->held = false;
    program_loop_end(p);
    http_server_close(p->http);
    serve_destroy(p->serve);
    free(p->dirs);
    free(p->dir);
    free(p->sessions);
    free(p->calls);
    free(p->later);
    free(p);
}

/* ---- a generation ---- */

/* What a run that was killed left of it: all of it, or that it ran. */
static int resume(struct program_loops *p, struct program_session *s) {
    struct generation_sample *const sample = &p->g->samples[s->sample];
    const struct program_journal journal = program_journal_of(p);
    bool over;
    TRY(program_journal_find(&journal, s->sample, &over, &s->n_restarts));
    if (s->n_restarts < sample->user->n_starts) s->n_restarts = sample->user->n_starts; /* the checkpoint's */
    const bool dropped = !over && s->n_restarts > 0 && !p->a.k->run_again;
    if (!over && !dropped) return 0;
    if (dropped) {
        sample->user->failure = xstrdup("the run was killed while it ran (agent.on_restart=drop)");
        sample->user->record = json_pack("{s:I}", "restarted", (json_int_t)s->n_restarts);
    }
    if (!sample->ids) user_episode_take_output(p->g, sample, &sample->user->out);
    program_episode_close(p, s);
    return 0;
}

int program_loop_begin(struct generation_state *g, struct program_loops *p, int64_t i) {
    char id[2 * PROGRAM_ID_BYTES + 1], key[sizeof id];
    TRY(random_hex(id, PROGRAM_ID_BYTES));
    TRY(random_hex(key, PROGRAM_ID_BYTES));
    struct program_session *s = xcalloc(1, sizeof *s);
    s->sample = i;
    s->oldest_version = -1;
    memcpy(s->id, id, sizeof id);
    memcpy(s->key, key, sizeof key);
    p->g = g;
    xgrow((void **)&p->sessions, &p->cap_sessions, p->n_sessions + 1, sizeof *p->sessions);
    map_set(&p->ids, s->id, strlen(s->id), p->n_sessions);
    p->sessions[p->n_sessions++] = s;
    p->n_waiting++;
    return resume(p, s);
}

int program_loop_step(struct generation_state *g, struct program_loops *p, bool wait) {
    p->g = g;
    TRY(http_server_step(p->http));
    if (p->rc < 0) return err_pass(p->rc, __FILE__, __LINE__);
    if (wait && p->n_waiting > 0) nanosleep(&(struct timespec){0, WAIT_NS}, NULL);
    const double now = clock_now();
    if (now - p->looked < fmax(LOOK_S, LOOK_EACH_S * (double)p->n_running)) return 0;
    p->looked = now;
    for (int64_t k = 0; k < p->n_sessions; k++)
        if (p->sessions[k]->state == RUNNING && !p->sessions[k]->held) TRY(program_process_look_at(p, p->sessions[k]));
    return g->interrupted ? 0 : program_processes_start(p);
}

bool program_loop_waits(const struct program_loops *p) { return p && p->n_waiting > 0; }

static void session_free(struct program_loops *p, struct program_session *s) {
    program_requests_end(p, s, "the episode is over");
    if (s->listener) http_server_remove_listener(p->http, s->listener);
    if (s->program) child_program_stop(s->program, NULL);
    token_tree_destroy(s->tree);
    json_decref(s->log);
    json_decref(s->calls);
    free(s->answered);
    json_decref(s->extra);
    free(s->said);
    free(s);
}

void program_loop_end(struct program_loops *p) {
    int64_t n = 0, n_calls = 0, n_later = 0;
    program_calls_fail(p, NULL);
    for (int64_t k = 0; k < p->n_calls; k++)
        if (p->calls[k].session) p->calls[n_calls++] = p->calls[k];
    map_free(&p->ids);
    p->ids = (struct map){0};
    for (int64_t k = 0; k < p->n_sessions; k++) {
        struct program_session *s = p->sessions[k];
        if (!s->held) {
            session_free(p, s);
            continue;
        }
        map_set(&p->ids, s->id, strlen(s->id), n);
        p->sessions[n++] = s;
    }
    for (int64_t k = 0; k < p->n_later; k++)
        if (p->later[k]) p->later[n_later++] = p->later[k];
    p->n_sessions = n;
    p->n_calls = n_calls;
    p->n_later = n_later;
    p->n_running = p->n_waiting = p->next = 0;
    p->g = NULL;
    p->rc = 0;
    if (n == 0 && p->serve) serve_failed_all(p->serve);
}
