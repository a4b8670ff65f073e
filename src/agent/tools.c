/* tools.c - calls of tools in a pool of Python processes, and their results.
 * What a tool is, and verl's texts and truncation, are python/verlc_helpers/tools.py's; here are tickets, processes that
 * died and deadlines.  A call in flight in a process that died is made again, once among others and then alone.
 * Invariant: flight[i] is the request of ticket first_ticket + i. */
#include "agent/tools.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/encoding/utf8.h"
#include "helper/helper.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_TIMEOUT_S 300.
#define START_S 180.                          /* of a process: imports, constructors, MCP servers */
#define USER_MEMORY_BYTES ((int64_t)64 << 30) /* address space: user code may import torch, and a thread has its stack */
#define NO_LIMIT (INT64_MAX / 2)
enum { DEFAULT_CONCURRENT = 1024, DEFAULT_LENGTH = 256, TRIES = 2 };

enum kind { CALL, INTERACT, END };
struct flight {
    enum kind kind;
    bool done;
    char *name;   /* of the tool; owned */
    double begun; /* clock_awake */
};
struct tools {
    struct helper_pool *pool;
    int n_processes;
    double timeout_s;
    json_t *names, *schemas, *interactions; /* arrays; names[i] has schemas[i] */
    json_t *functions;                      /* {name: true} of tools that are functions */
    struct flight *flight;                  /* flight[head .. n) */
    int64_t head, n, cap, first_ticket, pending;
    bool warned[TOOL_N_STATUS];
};

static const char *const STATUS[] = {"ok", "unknown", "arguments", "error", "timeout"};

const char *tool_status_name(enum tool_status s) { return STATUS[s]; }

/* ---- start and end ---- */

static int check_path(const char *key, const char *given, char **path) {
    *path = given && *given ? file_expand(given) : NULL;
    if (*path && !file_exists(*path)) FAIL(ERR_INPUT, "%s=%s: the file does not exist", key, given);
    return *path ? file_check(*path) : 0;
}

static json_t *init_json(const struct tools_config *c, const char *config, const char *functions, const char *interactions, int n) {
    const int64_t length = c->max_response_length < 0    ? NO_LIMIT
                           : c->max_response_length == 0 ? DEFAULT_LENGTH
                                                         : c->max_response_length;
    return json_pack("{s:s?, s:s?, s:s?, s:I, s:s?, s:i}", "tool_config_path", config, "function_tool_path", functions,
                     "interaction_config_path", interactions, "max_response_length", (json_int_t)length, "truncate_side",
                     c->truncate_side, "processes", n);
}

/* All processes are up, and say what they have: of the first that is kept. */
static int describe(struct tools *t) {
    json_t *request = json_pack("{s:s}", "op", "describe");
    struct helper_result r = {0};
    int64_t ticket;
    int rc = 0;
    for (int i = 0; i < t->n_processes && rc >= 0; i++) rc = helper_pool_send_to(t->pool, i, request, START_S, &ticket);
    json_decref(request);
    TRY(rc);
    for (int i = 0; i < t->n_processes; i++) {
        while ((rc = helper_pool_recv(t->pool, START_S, &r)) == 0) continue; /* the pool keeps the deadline */
        TRY(rc);
        if (r.rc < 0) {
            err_set(r.rc, __FILE__, __LINE__, "%s", r.error);
            rc = r.rc;
        } else if (!t->schemas) {
            size_t k;
            json_t *tool;
            t->names = json_array();
            t->schemas = json_array();
            t->functions = json_object();
            json_array_foreach(json_object_get(r.reply, "tools"), k, tool) {
                json_array_append(t->names, json_object_get(tool, "name"));
                json_array_append(t->schemas, json_object_get(tool, "schema"));
                if (json_is_true(json_object_get(tool, "function")))
                    json_object_set_new(t->functions, json_string_value(json_object_get(tool, "name")), json_true());
            }
            t->interactions = json_incref(json_object_get(r.reply, "interactions"));
        }
        helper_result_free(&r);
        if (rc < 0) return rc;
    }
    return 0;
}

int tools_open(struct tools **out, const struct tools_config *c) {
    struct tools *t = xcalloc(1, sizeof *t);
    char *config = NULL, *functions = NULL, *interactions = NULL;
    json_t *init = NULL;
    int rc = 0;
    t->timeout_s = c->timeout_s > 0 ? c->timeout_s : DEFAULT_TIMEOUT_S;
    t->n_processes = c->n_processes > 0 ? c->n_processes : 1;
    TRYG(check_path("tool_config_path", c->tool_config_path, &config), out);
    TRYG(check_path("function_tool_path", c->function_tool_path, &functions), out);
    TRYG(check_path("interaction_config_path", c->interaction_config_path, &interactions), out);
    init = init_json(c, config, functions, interactions, t->n_processes);
    const struct helper_args h = {.module = "verlc_helpers.tools",
                                  .init = init,
                                  .python = c->python,
                                  .log_as = "tools",
                                  .memory_bytes = USER_MEMORY_BYTES,
                                  .start_timeout_s = START_S};
    const struct helper_pool_args pool = {
        .n = t->n_processes, .n_calls = c->max_concurrent > 0 ? c->max_concurrent : DEFAULT_CONCURRENT, .n_tries = TRIES};
    TRYG(helper_pool_create(&t->pool, &h, &pool), out);
    TRYG(describe(t), out);
out:
    json_decref(init);
    free(config);
    free(functions);
    free(interactions);
    if (rc < 0) tools_close(t);
    else *out = t;
    return rc;
}

static void forget_flights(struct tools *t) {
    for (; t->head < t->n; t->head++) free(t->flight[t->head].name);
    t->head = t->n = t->pending = 0;
}

void tools_close(struct tools *t) {
    if (!t) return;
    forget_flights(t);
    helper_pool_destroy(t->pool);
    json_decref(t->names);
    json_decref(t->schemas);
    json_decref(t->functions);
    json_decref(t->interactions);
    free(t->flight);
    free(t);
}

void tools_cancel(struct tools *t) {
    helper_pool_cancel(t->pool);
    forget_flights(t);
}

/* ---- what there is ---- */

const json_t *tools_schemas(const struct tools *t) { return t->schemas; }

const json_t *tools_interactions(const struct tools *t) { return t->interactions; }

/* The schema of a name: of two the later, as in verl. Borrowed; NULL: none. */
static json_t *schema_of(const struct tools *t, const char *name) {
    for (size_t i = json_array_size(t->names); i-- > 0;) {
        const char *other = json_string_value(json_array_get(t->names, i));
        if (other && strcmp(other, name) == 0) return json_array_get(t->schemas, i);
    }
    return NULL;
}

bool tools_want_agent_data(const struct tools *t, const char *name) {
    return schema_of(t, name) && !json_object_get(t->functions, name);
}

static bool stands_before(const json_t *list, size_t end, const char *name) {
    for (size_t i = 0; i < end; i++) {
        const char *other = json_string_value(json_array_get(list, i));
        if (other && strcmp(other, name) == 0) return true;
    }
    return false;
}

json_t *tools_select(const struct tools *t, const json_t *tool_selection) {
    const size_t n = json_array_size(tool_selection);
    if (n == 0) return json_incref(t->schemas);
    json_t *out = json_array();
    for (size_t i = 0; i < n; i++) {
        const char *name = json_string_value(json_array_get(tool_selection, i));
        json_t *schema = name && !stands_before(tool_selection, i, name) ? schema_of(t, name) : NULL;
        if (schema) json_array_append(out, schema);
    }
    return out;
}

int tools_check_interaction(const struct tools *t, const json_t *interaction_kwargs) {
    const char *name = json_string_value(json_object_get(interaction_kwargs, "name"));
    const size_t n = json_array_size(t->interactions);
    if (!name) FAIL(ERR_INPUT, "extra_info.interaction_kwargs of a row has no name of an interaction");
    if (stands_before(t->interactions, n, name)) return 0;
    char *list = json_dumps(t->interactions, JSON_ENSURE_ASCII);
    err_set(ERR_INPUT, __FILE__, __LINE__,
            "extra_info.interaction_kwargs: interaction_config_path has no interaction '%s'; it has %s", name,
            list ? list : "none");
    free(list);
    return ERR_INPUT;
}

/* ---- to the processes ---- */

/* A JSON string of bytes that may not be UTF-8: what is ill-formed becomes U+FFFD. */
static json_t *text_json(const char *s, size_t n) {
    struct buf b = {0};
    for (size_t i = 0; i < n;) {
        const int step = utf8_step(s + i, n - i);
        buf_add(&b, step > 0 ? s + i : "\xef\xbf\xbd", step > 0 ? (size_t)step : 3);
        i += (size_t)abs(step);
    }
    json_t *v = json_stringn(b.p ? b.p : "", b.n);
    buf_free(&b);
    return v;
}

/* Takes request; name: of the tool. */
static int send(struct tools *t, json_t *request, const char *episode, const struct flight *f, int64_t *ticket) {
    const int worker = (int)(hash64(episode, strlen(episode)) % (uint64_t)t->n_processes);
    CHECK(request != NULL);
    const int rc = helper_pool_send_to(t->pool, worker, request, t->timeout_s, ticket);
    json_decref(request);
    TRY(rc);
    if (t->head == t->n) {
        t->head = t->n = 0;
        t->first_ticket = *ticket;
    }
    CHECK(*ticket - t->first_ticket == t->n);
    xgrow((void **)&t->flight, &t->cap, t->n + 1, sizeof *t->flight);
    t->flight[t->n] = *f;
    t->flight[t->n].name = xstrdup(f->name);
    t->flight[t->n++].begun = clock_awake();
    t->pending += f->kind != END;
    return 0;
}

int tools_call(struct tools *t, const struct tool_request *r, int64_t *ticket) {
    json_t *q = json_pack("{s:s, s:o, s:o, s:o, s:O?, s:O?, s:O?, s:O?}", "op", "call", "episode",
                          text_json(r->episode, strlen(r->episode)), "name", text_json(r->name, strlen(r->name)), "arguments",
                          text_json(r->arguments, r->n_arguments), "tools_kwargs", r->tools_kwargs, "tool_selection",
                          r->tool_selection, "extra_fields", r->extra_fields, "agent_data", r->agent_data);
    return send(t, q, r->episode, &(struct flight){.kind = CALL, .name = (char *)(uintptr_t)r->name}, ticket);
}

int tools_interact(struct tools *t, const struct interaction_request *r, int64_t *ticket) {
    json_t *q = json_pack("{s:s, s:o, s:O?, s:O?, s:O?}", "op", "interact", "episode", text_json(r->episode, strlen(r->episode)),
                          "messages", r->messages, "kwargs", r->interaction_kwargs, "extra_fields", r->extra_fields);
    static char name[] = "interaction";
    return send(t, q, r->episode, &(struct flight){.kind = INTERACT, .name = name}, ticket);
}

int tools_end_episode(struct tools *t, const char *episode) {
    int64_t ticket;
    static char name[] = "end";
    json_t *q = json_pack("{s:s, s:o}", "op", "end", "episode", text_json(episode, strlen(episode)));
    return send(t, q, episode, &(struct flight){.kind = END, .name = name}, &ticket);
}

/* ---- from the processes ---- */

/* The status and the text of a call without an answer. */
static void failed(struct tools *t, const struct flight *f, const struct helper_result *h, struct tool_result *out) {
    out->status = h->rc == ERR_TIMEOUT ? TOOL_TIMEOUT : TOOL_ERROR;
    char *what = h->rc == ERR_TIMEOUT  ? xasprintf("it had no answer within %g s", t->timeout_s)
                 : h->rc == ERR_HELPER ? xstrdup("it ended its process")
                                       : xstrdup(h->error);
    out->text = f->kind == CALL ? xasprintf("Error executing tool '%s': %s", f->name, what) : xstrdup(what);
    out->n_text = strlen(out->text);
    out->has_reward = true;
    out->stop = f->kind == INTERACT;
    out->seconds = clock_awake() - f->begun;
    if (!t->warned[out->status]) log_warn("tools: %s: %s (further ones are counted, not reported)", f->name, h->error);
    t->warned[out->status] = true;
    free(what);
}

static enum tool_status status_of(const char *name) {
    for (int s = TOOL_OK; name && s < TOOL_N_STATUS; s++)
        if (strcmp(STATUS[s], name) == 0) return (enum tool_status)s;
    return TOOL_ERROR;
}

static void answered(json_t *reply, struct tool_result *out) {
    const json_t *text = json_object_get(reply, "text"), *reward = json_object_get(reply, "reward");
    json_t *set = json_object_get(reply, "set"), *removed = json_object_get(reply, "removed");
    out->status = status_of(json_string_value(json_object_get(reply, "status")));
    out->n_text = json_string_length(text);
    out->text = xmalloc(out->n_text + 1);
    memcpy(out->text, out->n_text ? json_string_value(text) : "", out->n_text + 1);
    out->truncated = json_is_true(json_object_get(reply, "truncated"));
    out->has_reward = json_is_number(reward);
    out->reward = json_number_value(reward);
    out->stop = json_is_true(json_object_get(reply, "stop"));
    out->seconds = json_number_value(json_object_get(reply, "seconds"));
    out->set = json_object_size(set) ? json_incref(set) : NULL;
    out->removed = json_array_size(removed) ? json_incref(removed) : NULL;
}

/* Takes the request of a result out of the list. */
static struct flight land(struct tools *t, int64_t ticket) {
    struct flight *f = &t->flight[ticket - t->first_ticket];
    const struct flight landed = *f;
    CHECK(!f->done);
    f->done = true;
    f->name = NULL;
    while (t->head < t->n && t->flight[t->head].done) t->head++;
    t->pending -= landed.kind != END;
    return landed;
}

int tools_recv(struct tools *t, double wait_s, struct tool_result *out) {
    const double deadline = clock_awake() + wait_s;
    struct helper_result h;
    for (;;) {
        const int rc = helper_pool_recv(t->pool, fmax(0, deadline - clock_awake()), &h);
        if (rc <= 0) return rc;
        const struct flight f = land(t, h.ticket);
        *out = (struct tool_result){.ticket = h.ticket};
        if (f.kind != END && h.rc < 0) failed(t, &f, &h, out);
        else if (f.kind != END) answered(h.reply, out);
        helper_result_free(&h);
        free(f.name);
        if (f.kind != END) return 1;
    }
}

int64_t tools_pending(const struct tools *t) { return t->pending; }

void tool_result_free(struct tool_result *r) {
    free(r->text);
    json_decref(r->set);
    json_decref(r->removed);
    *r = (struct tool_result){0};
}

void tool_result_apply(const struct tool_result *r, json_t *extra_fields) {
    size_t i;
    json_t *key;
    if (r->set) json_object_update(extra_fields, r->set);
    json_array_foreach(r->removed, i, key) json_object_del(extra_fields, json_string_value(key));
}
