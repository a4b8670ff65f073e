/* user_loop.c - see user_loop.h. A loop's request for a turn is one request of the engine, whose answer is written when it has
 * been drawn. Turns of an episode have seeds of their own, so a loop that asks twice draws twice.
 * Invariant: what an episode draws depends on weights, data, seed and its own requests alone. */
#include "ppo/stages/user_loop.h"
#include "ppo/stages/generation.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "helper/helper.h"
#include "http/server.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define START_S 180.                          /* of a helper: imports, the classes' modules */
#define USER_MEMORY_BYTES ((int64_t)64 << 30) /* address space */
#define WAIT_S 0.005                          /* between two looks at the helpers, where nothing is drawn */
enum { CALLS_AT_ONCE = 1024, ID_BYTES = 16, MAX_BODY = 64 << 20, MAX_OUTPUTS = 256 };

struct episode {
    struct generation_state *g; /* NULL: it is held, or dropped */
    int64_t sample, ticket;
    char id[2 * ID_BYTES + 1]; /* of its address */
    bool open, dropped, ended; /* ended while it was held: with this result */
    struct helper_result result;
    struct drawn_turn *turns;
    int64_t n_turns, n_asked;
    double begun, drawing; /* drawing: seconds of its turns */
    int64_t n_preempted;
};
struct call { /* one turn that is being drawn */
    int64_t episode;
    struct http_exchange *exchange; /* NULL: the loop has left */
    struct engine_request q;        /* n_prompt 0: it was asked while its episode is held, and is not read yet */
    int32_t *prompt, *stop_ids;     /* its; owned, prompt until the turn has it */
    /* of one that was interrupted: what it has */
    int32_t *ids, *versions;
    float *logp, *kept;
    int64_t n;
};
struct user_loops {
    struct helper_pool *pool;
    struct http_server *server;
    json_t *names;
    double timeout_s;
    int64_t vocab;
    struct episode *episodes;
    int64_t n_episodes, cap_episodes, n_open;
    struct call **calls; /* by their number */
    int64_t n_calls, cap_calls;
    int rc; /* of a request to the engine, within a callback */
};

/* ---- start and end ---- */

static void serve(void *arg, struct http_exchange *x);

static int open_server(struct user_loops *u) {
    return http_server_open(&u->server, &(struct http_server_args){.host = "127.0.0.1",
                                                                   .max_connections = 1 << 14,
                                                                   .max_of_peer = 1 << 14,
                                                                   .max_body = MAX_BODY,
                                                                   .request_s = 60,
                                                                   .answer_s = 7 * 86400,
                                                                   .stepped = true,
                                                                   .serve = serve,
                                                                   .arg = u});
}

static int open_pool(struct user_loops *u, const struct user_loops_args *a) {
    const json_t *config;
    TRY(conf_json(a->conf, "", &config));
    json_t *init = json_pack("{s:O, s:s, s:s, s:s?, s:s, s:s, s:s?, s:s?, s:I}", "config", config, "agent_loop_config_path",
                             a->config_path, "tokenizer", a->tokenizer_dir, "model_type", a->model_type, "url",
                             http_server_address(u->server), "token", "", "tool_config_path", a->tool_config_path,
                             "function_tool_path", a->function_tool_path, "processes", (json_int_t)a->n_processes);
    CHECK(init != NULL);
    const struct helper_args h = {.module = "verlc_helpers.agent_loop",
                                  .init = init,
                                  .log_as = "agent loop",
                                  .memory_bytes = USER_MEMORY_BYTES,
                                  .start_timeout_s = START_S};
    const int rc = helper_pool_create(&u->pool, &h, &(struct helper_pool_args){.n = (int)a->n_processes, .n_calls = CALLS_AT_ONCE});
    json_decref(init);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* The names of the classes. */
static int describe(struct user_loops *u) {
    struct helper_result r;
    json_t *ask = json_pack("{s:s}", "op", "describe");
    int64_t ticket;
    int got = helper_pool_send(u->pool, ask, START_S, &ticket);
    json_decref(ask);
    TRY(got);
    while ((got = helper_pool_recv(u->pool, START_S + 10, &r)) == 0) {
    }
    TRY(got);
    if (r.rc == 0) u->names = json_incref(json_object_get(r.reply, "loops"));
    else err_set(r.rc, __FILE__, __LINE__, "%s", r.error);
    const int rc = r.rc;
    helper_result_free(&r);
    return rc;
}

static int check_path(const char *given) {
    char *path = file_expand(given);
    const bool there = file_exists(path);
    const int rc = there ? file_check(path) : 0;
    free(path);
    if (!there) FAIL(ERR_INPUT, "actor_rollout_ref.rollout.agent.agent_loop_config_path=%s: the file does not exist", given);
    return rc;
}

int user_loops_open(struct user_loops **out, const struct user_loops_args *a) {
    struct user_loops *u = xcalloc(1, sizeof *u);
    int rc = check_path(a->config_path);
    u->timeout_s = a->timeout_s;
    u->vocab = a->vocab;
    if (rc == 0) rc = open_server(u);
    if (rc == 0) rc = open_pool(u, a);
    if (rc == 0) rc = describe(u);
    if (rc < 0) {
        user_loops_close(u);
        return err_pass(rc, __FILE__, __LINE__);
    }
    *out = u;
    return 0;
}

void user_loops_close(struct user_loops *u) {
    if (!u) return;
    user_loop_end(u, NULL);
    helper_pool_destroy(u->pool);
    http_server_close(u->server);
    json_decref(u->names);
    free(u->episodes);
    free(u->calls);
    free(u);
}

bool user_loops_has(const struct user_loops *u, const char *name) {
    size_t i;
    const json_t *v;
    if (!u) return false;
    json_array_foreach(u->names, i, v) if (strcmp(json_string_value(v), name) == 0) return true;
    return false;
}

char *user_loops_names(const struct user_loops *u, const char *more) {
    struct buf b = {0};
    size_t i;
    const json_t *v;
    buf_adds(&b, more);
    if (u) json_array_foreach(u->names, i, v) buf_addf(&b, ", %s", json_string_value(v));
    return b.p;
}

/* ---- an episode begins ---- */

/* verl's sampling_params of the agent loop. */
static json_t *sampling_params(const struct engine_request *q) {
    return json_pack("{s:f, s:f, s:i, s:f, s:b}", "temperature", (double)q->temperature, "top_p", (double)q->top_p, "top_k",
                     q->top_k > 0 ? q->top_k : -1, "repetition_penalty", (double)q->repetition_penalty, "logprobs", true);
}

/* All columns of the row, and what verl's run() gets in addition. */
static json_t *row_of(const struct generation_state *g, int64_t i) {
    const struct generation_group *group = &g->groups[i / g->per];
    json_t *row = json_copy(batch_find(group->prompts, "row")->json[group->row]), *info = json_object_get(row, "extra_info");
    json_t *kwargs = json_object_get(info, "tools_kwargs"), *index = json_object_get(info, "index");
    json_object_del(row, g->in->rows->prompt_key);
    json_object_del(row, "agent_name");
    json_object_set(row, "raw_prompt", batch_find(group->prompts, "raw_prompt")->json[group->row]);
    json_object_set_new(row, "uid", json_integer(batch_find(group->prompts, "uid")->i64[group->row]));
    json_object_set_new(row, "session_id", json_integer((json_int_t)(i % g->per)));
    json_object_set_new(row, "global_steps", json_integer((json_int_t)g->s->run->step));
    json_object_set_new(row, "index", index ? json_incref(index) : json_integer(0));
    json_object_set_new(row, "tools_kwargs", json_is_object(kwargs) ? json_incref(kwargs) : json_object());
    return row;
}

int user_loop_begin(struct generation_state *g, struct user_loops *u, int64_t i, const char *name) {
    struct episode e = {.g = g, .sample = i, .open = true, .begun = clock_awake()};
    struct engine_request q;
    TRY(generation_request(g, i, &q));
    TRY(random_hex(e.id, ID_BYTES));
    json_t *ask = json_pack("{s:s, s:s, s:s, s:o, s:o}", "op", "run", "agent_name", name, "session", e.id, "sampling_params",
                            sampling_params(&q), "row", row_of(g, i));
    CHECK(ask != NULL);
    const int rc = helper_pool_send(u->pool, ask, u->timeout_s, &e.ticket);
    json_decref(ask);
    TRY(rc);
    xgrow((void **)&u->episodes, &u->cap_episodes, u->n_episodes + 1, sizeof *u->episodes);
    u->episodes[u->n_episodes++] = e;
    u->n_open++;
    return 0;
}

/* ---- a loop asks for a turn ---- */

static void answer(struct http_exchange *x, int status, json_t *v) {
    struct buf body = {0};
    json_dump_line(&body, v);
    json_decref(v);
    http_exchange_reply(x, status, "application/json", &body);
}

static void refuse(struct http_exchange *x, int status, const char *why) {
    answer(x, status, json_pack("{s:{s:s}}", "error", "message", why));
}

/* The open episode of "/sessions/ID/generate"; -1: there is none. */
static int64_t episode_of(const struct user_loops *u, const char *path) {
    static const char head[] = "/sessions/", tail[] = "/generate";
    const size_t n = sizeof head - 1;
    if (strncmp(path, head, n) != 0 || strlen(path) != n + 2 * ID_BYTES + sizeof tail - 1) return -1;
    if (strcmp(path + n + 2 * ID_BYTES, tail) != 0) return -1;
    for (int64_t k = 0; k < u->n_episodes; k++)
        if (u->episodes[k].open && !u->episodes[k].dropped && memcmp(u->episodes[k].id, path + n, 2 * ID_BYTES) == 0) return k;
    return -1;
}

static int read_prompt(const json_t *v, int64_t vocab, struct text_ids *ids) {
    const json_t *a = json_object_get(v, "prompt_ids");
    if (!json_is_array(a) || json_array_size(a) == 0) FAIL(ERR_INVAL, "prompt_ids is no list of token ids");
    for (size_t i = 0; i < json_array_size(a); i++) {
        const json_t *x = json_array_get(a, i);
        const int32_t id =
            json_is_integer(x) && json_integer_value(x) >= 0 && json_integer_value(x) < vocab ? (int32_t)json_integer_value(x) : -1;
        if (id < 0) FAIL(ERR_INVAL, "prompt_ids: element %zu is no token id of the model", i);
        text_ids_add(ids, &id, 1);
    }
    return 0;
}

/* A number of the loop's sampling_params; absent: *out stays. */
static int number(const json_t *p, const char *key, double *out) {
    const json_t *v = json_object_get(p, key);
    if (!v || json_is_null(v)) return 0;
    if (!json_is_number(v)) FAIL(ERR_INVAL, "sampling_params.%s is no number", key);
    *out = json_number_value(v);
    return 0;
}

/* What a loop may choose: how long a turn is, and while nothing is trained from what is drawn, how it is drawn. */
static int read_sampling(const struct generation_state *g, const json_t *p, struct engine_request *q, int64_t room) {
    const json_t *stop = json_object_get(p, "stop");
    double most = (double)room, temperature = q->temperature, top_p = q->top_p, top_k = q->top_k;
    if (json_array_size(stop) > 0 || json_is_string(stop))
        FAIL(ERR_INVAL, "sampling_params.stop is not supported; stop_token_ids is");
    TRY(number(p, "max_new_tokens", &most));
    TRY(number(p, "max_tokens", &most));
    TRY(number(p, "temperature", &temperature));
    TRY(number(p, "top_p", &top_p));
    TRY(number(p, "top_k", &top_k));
    if (!(most >= 1)) FAIL(ERR_INVAL, "sampling_params.max_tokens is below 1");
    if (!g->validation && (float)temperature != q->temperature)
        FAIL(ERR_INVAL, "sampling_params.temperature=%g: a training run draws at rollout.temperature=%g, at which it trains",
             temperature, (double)q->temperature);
    q->max_tokens = most < (double)room ? (int64_t)most : room;
    q->temperature = (float)temperature;
    q->top_p = (float)top_p;
    q->top_k = top_k >= 1 && top_k < INT32_MAX ? (int32_t)top_k : 0;
    return 0;
}

static int read_stop_ids(const json_t *p, struct text_ids *ids) {
    size_t i;
    const json_t *v;
    json_array_foreach(json_object_get(p, "stop_token_ids"), i, v) {
        const int32_t id = (int32_t)json_integer_value(v);
        if (!json_is_integer(v) || json_integer_value(v) != id) FAIL(ERR_INVAL, "sampling_params.stop_token_ids has no token ids");
        text_ids_add(ids, &id, 1);
    }
    return 0;
}

static void left(void *arg) { ((struct call *)arg)->exchange = NULL; }

static void call_free(struct call *c) {
    if (!c) return;
    free(c->prompt);
    free(c->stop_ids);
    free(c->ids);
    free(c->versions);
    free(c->logp);
    free(c->kept);
    free(c);
}

static struct call *add_call(struct user_loops *u, int64_t k, struct http_exchange *x) {
    struct call *c = xcalloc(1, sizeof *c);
    c->episode = k;
    c->exchange = x;
    xgrow((void **)&u->calls, &u->cap_calls, u->n_calls + 1, sizeof *u->calls);
    u->calls[u->n_calls++] = c;
    http_exchange_on_close(x, left, c);
    return c;
}

/* The engine draws it, after the tokens that it has. */
static int draw(const struct user_loops *u, int64_t call) {
    const struct call *c = u->calls[call];
    const struct generation_state *g = u->episodes[c->episode].g;
    struct engine_request q = c->q;
    q.begun = c->ids;
    q.begun_logp = c->logp;
    q.begun_logp_kept = c->kept;
    q.n_begun = c->n;
    q.user = (void *)(intptr_t)user_loop_user(call, false);
    return g->s->worker->ops->generate_add(g->s->worker, &q);
}

/* ids: the prompt. The tokens are kept for the check of the loop's output. */
static int submit(struct user_loops *u, int64_t k, struct engine_request *q, const struct text_ids *ids, struct http_exchange *x) {
    struct episode *e = &u->episodes[k];
    struct call *c = add_call(u, k, x);
    c->prompt = xcopy(ids->p, ids->n, sizeof *ids->p);
    c->stop_ids = xcopy(q->stop_ids, q->n_stop_ids, sizeof *q->stop_ids);
    c->q = *q;
    c->q.prompt = c->prompt;
    c->q.n_prompt = ids->n;
    c->q.stop_ids = c->stop_ids;
    c->q.seed ^= (uint64_t)e->n_asked * 0xD1B54A32D192ED03u;
    const int rc = draw(u, u->n_calls - 1);
    if (rc == 0) {
        e->n_asked++;
        return 0;
    }
    http_exchange_on_close(x, NULL, NULL);
    call_free(u->calls[--u->n_calls]);
    return rc;
}

static int ask_turn(struct user_loops *u, int64_t k, const json_t *v, struct http_exchange *x) {
    const struct generation_state *const g = u->episodes[k].g;
    const json_t *p = json_object_get(v, "sampling_params");
    struct text_ids ids = {0}, stop = {0};
    struct engine_request q;
    int rc;
    TRYG(generation_request(g, u->episodes[k].sample, &q), out);
    TRYG(read_prompt(v, u->vocab, &ids), out);
    TRYG(read_stop_ids(p, &stop), out);
    const int64_t most = g->in->rows->max_response_length, all = g->in->rows->max_prompt_length + most;
    if (ids.n >= all) {
        rc = ERR_INVAL;
        err_set(rc, __FILE__, __LINE__, "prompt_ids has %lld tokens, and data.max_prompt_length and max_response_length leave %lld",
                (long long)ids.n, (long long)all);
        goto out;
    }
    TRYG(read_sampling(g, p, &q, all - ids.n < most ? all - ids.n : most), out);
    q.stop_ids = stop.p;
    q.n_stop_ids = stop.n;
    rc = submit(u, k, &q, &ids, x);
out:
    text_ids_free(&ids);
    text_ids_free(&stop);
    return rc;
}

static void serve(void *arg, struct http_exchange *x) {
    struct user_loops *u = arg;
    const int64_t k = episode_of(u, http_exchange_path(x));
    size_t n;
    json_t *v = NULL;
    if (k < 0) {
        refuse(x, 400, "there is no such episode, or it is over");
        return;
    }
    if (!u->episodes[k].g || u->episodes[k].g->interrupted) { /* until it goes on */
        add_call(u, k, x);
        return;
    }
    const char *body = http_exchange_body(x, &n);
    int rc = json_parse(&v, body, n, "the request");
    if (rc == 0) rc = ask_turn(u, k, v, x);
    json_decref(v);
    if (rc < 0) refuse(x, 400, err_msg());
}

static json_t *token_output(const struct generation_state *g, const struct engine_sample *s, const int32_t *versions) {
    json_t *logp = json_array();
    const json_int_t step = (json_int_t)(g->validation ? g->s->run->step : g->s->run->step - 1);
    const json_int_t first = g->validation || s->n == 0 ? step : versions[0];
    for (int64_t i = 0; i < s->n; i++) json_array_append_new(logp, json_real((double)s->logp[i]));
    return json_pack("{s:o, s:o, s:s, s:I, s:{s:I, s:I, s:I}}", "token_ids", json_i32_array(s->ids, s->n), "log_probs", logp,
                     "stop_reason", "completed", "num_preempted", (json_int_t)s->n_preempted, "extra_fields", "global_steps", step,
                     "min_global_steps", first, "max_global_steps", step);
}

/* What an interrupted turn has; versions: taken over. */
static void take_part(struct call *c, const struct engine_sample *s, int32_t *versions) {
    free(c->ids);
    free(c->logp);
    free(c->kept);
    free(c->versions);
    c->ids = xcopy(s->ids, s->n, sizeof *s->ids);
    c->logp = xcopy(s->logp, s->n, sizeof *s->logp);
    c->kept = xcopy(s->logp_kept, s->n, sizeof *s->logp_kept);
    c->versions = versions;
    c->n = s->n;
}

void user_loop_drawn(struct generation_state *g, struct user_loops *u, int64_t call, const struct engine_sample *s) {
    struct call *c = call < u->n_calls ? u->calls[call] : NULL;
    if (!c) return; /* of a generation that was dropped */
    struct episode *e = &u->episodes[c->episode];
    int32_t *versions = xmalloc((size_t)s->n * sizeof *versions + 1);
    for (int64_t i = 0; i < s->n; i++) versions[i] = i < c->n ? c->versions[i] : ppo_version(g->s);
    e->drawing += s->seconds;
    e->n_preempted += s->n_preempted;
    if (s->finish == ENGINE_INTERRUPTED) {
        take_part(c, s, versions);
        return;
    }
    e->turns = xrealloc(e->turns, (size_t)(e->n_turns + 1) * sizeof *e->turns);
    e->turns[e->n_turns++] = (struct drawn_turn){.prompt = c->prompt,
                                                 .ids = xcopy(s->ids, s->n, sizeof *s->ids),
                                                 .logp = xcopy(s->logp, s->n, sizeof *s->logp),
                                                 .kept = xcopy(s->logp_kept, s->n, sizeof *s->logp_kept),
                                                 .versions = versions,
                                                 .n_prompt = c->q.n_prompt,
                                                 .n = s->n};
    c->prompt = NULL;
    if (c->exchange) answer(c->exchange, 200, token_output(g, s, versions));
    call_free(c);
    u->calls[call] = NULL;
}

/* ---- an episode ends ---- */

/* A loop may return a list: outputs of one episode, whose last one is scored (verl's AgentLoopWorkerTQ). */
static int read_reply(struct generation_state *g, const struct episode *e, const json_t *reply) {
    const json_t *crash = json_object_get(reply, "crash"), *outputs = json_object_get(reply, "outputs");
    const struct loop_limits limits = {g->in->rows->max_prompt_length, g->in->rows->max_response_length};
    if (json_is_string(crash)) FAIL(ERR_INPUT, "%s", json_string_value(crash));
    if (json_array_size(outputs) == 0 || json_array_size(outputs) > MAX_OUTPUTS)
        FAIL(ERR_FORMAT, "the loop gives %zu outputs; 1 to %d are expected", json_array_size(outputs), MAX_OUTPUTS);
    for (size_t k = 0; k < json_array_size(outputs); k++) {
        struct loop_output o;
        TRY(loop_output_read(&o, json_array_get(outputs, k), e->turns, e->n_turns, &limits));
        user_episode_add(g, &g->samples[e->sample], &o);
    }
    return 0;
}

static void free_turns(struct episode *e) {
    for (int64_t k = 0; k < e->n_turns; k++) drawn_turn_free(&e->turns[k]);
    free(e->turns);
    e->turns = NULL;
    e->n_turns = 0;
}

static void close_episode(struct user_loops *u, struct episode *e) {
    e->open = false;
    u->n_open--;
    free_turns(e);
}

static void take_result(struct user_loops *u, struct episode *e, const struct helper_result *r) {
    struct generation_state *const g = e->g;
    struct generation_sample *s = &g->samples[e->sample];
    struct user_episode *const x = s->user;
    int rc = r->rc;
    if (rc == 0) rc = read_reply(g, e, r->reply);
    if (rc < 0) {
        x->failure = xstrdup(r->rc < 0 ? r->error : err_msg());
        user_episode_forget(s);
        user_episode_take_output(g, s, &x->out);
    }
    x->timed_out = r->rc == ERR_TIMEOUT;
    s->finish = ENGINE_STOP;
    s->seconds += e->drawing;
    s->n_preempted += e->n_preempted;
    s->ended = clock_wall();
    close_episode(u, e);
    phase_beat(g->s->run->stages);
    generation_ended(g, e->sample);
}

/* *r is emptied where it is kept. */
static void take(struct user_loops *u, struct episode *e, struct helper_result *r) {
    if (e->dropped) {
        close_episode(u, e);
    } else if (e->g) {
        take_result(u, e, r);
    } else {
        e->result = *r;
        e->ended = true;
        *r = (struct helper_result){0};
    }
}

int user_loop_step(struct generation_state *g, struct user_loops *u, bool wait) {
    double wait_s = wait ? WAIT_S : 0;
    if (!user_loop_waits(u, g)) wait_s = 0;
    TRY(http_server_step(u->server));
    for (; u->n_open > 0; wait_s = 0) {
        struct helper_result r;
        const int got = helper_pool_recv(u->pool, wait_s, &r);
        TRY(got);
        if (got == 0) return 0;
        for (int64_t k = 0; k < u->n_episodes; k++)
            if (u->episodes[k].open && u->episodes[k].ticket == r.ticket) {
                take(u, &u->episodes[k], &r);
                break;
            }
        helper_result_free(&r);
    }
    return 0;
}

bool user_loop_waits(const struct user_loops *u, const struct generation_state *g) {
    bool waits = false;
    for (int64_t k = 0; u && k < u->n_episodes && !waits && !g->interrupted; k++)
        waits = u->episodes[k].open && u->episodes[k].g == g;
    return waits;
}

/* Episodes that are over go, and those of g (NULL: all) that are open; the remaining calls are numbered again. */
static void compact(struct user_loops *u, const struct generation_state *g) {
    int64_t *to = xmalloc((size_t)(u->n_episodes + 1) * sizeof *to), n = 0, n_calls = 0;
    for (int64_t k = 0; k < u->n_episodes; k++) {
        struct episode *e = &u->episodes[k];
        to[k] = e->open && g && e->g != g ? n : -1;
        if (to[k] >= 0) {
            u->episodes[n++] = *e;
            continue;
        }
        free_turns(e);
        if (e->ended) helper_result_free(&e->result);
        u->n_open -= e->open;
    }
    for (int64_t c = 0; c < u->n_calls; c++) {
        struct call *const x = u->calls[c];
        if (!x) continue;
        x->episode = to[x->episode];
        if (x->episode >= 0) {
            u->calls[n_calls++] = x;
            continue;
        }
        if (x->exchange) refuse(x->exchange, 400, "the generation has ended");
        call_free(x);
    }
    u->n_episodes = n;
    u->n_calls = n_calls;
    free(to);
}

void user_loop_end(struct user_loops *u, const struct generation_state *g) {
    bool busy = false;
    for (int64_t k = 0; k < u->n_episodes; k++) busy |= u->episodes[k].open && (!g || u->episodes[k].g == g);
    if (busy) helper_pool_cancel(u->pool);
    compact(u, g);
}

/* ---- episodes that new weights interrupt ---- */

static int32_t oldest_of(const struct user_loops *u, int64_t k) {
    const struct episode *e = &u->episodes[k];
    int32_t oldest = INT32_MAX;
    for (int64_t t = 0; t < e->n_turns; t++)
        if (e->turns[t].n > 0 && e->turns[t].versions[0] < oldest) oldest = e->turns[t].versions[0];
    for (int64_t c = 0; c < u->n_calls; c++)
        if (u->calls[c] && u->calls[c]->episode == k && u->calls[c]->n > 0 && u->calls[c]->versions[0] < oldest)
            oldest = u->calls[c]->versions[0];
    return oldest == INT32_MAX ? -1 : oldest;
}

void user_loop_hold(struct user_loops *u, struct generation_state *g) {
    for (int64_t k = 0; k < u->n_episodes; k++) {
        struct episode *e = &u->episodes[k];
        if (!e->open || e->g != g) continue;
        struct user_episode *const x = g->samples[e->sample].user;
        x->held = xstrdup(e->id);
        x->oldest = oldest_of(u, k);
        e->g = NULL;
    }
}

static int64_t find_held(const struct user_loops *u, const struct user_episode *x) {
    int64_t k = 0;
    while (k < u->n_episodes && (!u->episodes[k].open || strcmp(u->episodes[k].id, x->held) != 0)) k++;
    CHECK(k < u->n_episodes);
    return k;
}

int user_loop_resume(struct generation_state *g, struct user_loops *u, int64_t i) {
    struct user_episode *const x = g->samples[i].user;
    const int64_t k = find_held(u, x), n = u->n_calls;
    u->episodes[k].g = g;
    u->episodes[k].sample = i;
    free(x->held);
    x->held = NULL;
    for (int64_t c = 0; c < n; c++) { /* in the order in which they were asked for */
        struct call *const call = u->calls[c];
        if (!call || call->episode != k) continue;
        if (call->q.n_prompt > 0) {
            TRY(draw(u, c));
            continue;
        }
        u->calls[c] = NULL;
        if (call->exchange) http_exchange_on_close(call->exchange, NULL, NULL);
        if (call->exchange) serve(u, call->exchange);
        call_free(call);
    }
    if (!u->episodes[k].ended) return 0;
    struct helper_result r = u->episodes[k].result;
    u->episodes[k].ended = false;
    take_result(u, &u->episodes[k], &r);
    helper_result_free(&r);
    return 0;
}

void user_loop_forget(struct user_loops *u, const struct user_episode *x) {
    const int64_t k = find_held(u, x);
    struct episode *e = &u->episodes[k];
    for (int64_t c = 0; c < u->n_calls; c++) {
        struct call *const call = u->calls[c];
        if (!call || call->episode != k) continue;
        if (call->exchange) refuse(call->exchange, 400, "the episode was dropped");
        call_free(call);
        u->calls[c] = NULL;
    }
    e->dropped = true;
    if (!e->ended) return; /* its result is still to come */
    helper_result_free(&e->result);
    e->ended = false;
    close_episode(u, e);
}
