/* tracker_client.c - a tracker that has a client in Python (mlflow, wandb, swanlab, clearml, trackio): RUN_DIR/trackers/NAME.jsonl
 * is the queue to it (tracker_spool.c).  The writer thread appends records; a thread sends them (tracker_send.c).
 *
 * Invariant: a record is in the file until the client has it, so a client that is slow, down or broken costs no step and
 * no record within the limit of the queue; the remaining ones are sent after a recovery, at the end, by the run that resumes,
 * or by `verlc trackers sync`. */
#include "track/tracker_client_int.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/encoding/number.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* After the end of a run, in addition to what the caller gives (track.c). */
#define FIRST_S 60.0       /* for a client that has not answered yet: imports, a database, a first connection */
#define MORE_S 60.0        /* more time for each request that worked, */
#define LONGEST_S 600.0    /* this long at most */
#define KILLED_MORE_S 10.0 /* the same where a signal ended it */
#define KILLED_LONGEST_S 90.0

/* ---- opening and closing ---- */

static void client_end(void *v, const char *how, const char *why, double end_by) {
    struct client *c = v;
    const double now = clock_awake();
    const bool killed = strcmp(how, "killed") == 0;
    (void)why;
    pthread_mutex_lock(&c->lock);
    c->ending = true;
    c->how = how;
    c->end_by = c->answered ? end_by : fmax(end_by, now + FIRST_S);
    c->more = killed ? KILLED_MORE_S : MORE_S;
    c->give_up = now + (killed ? KILLED_LONGEST_S : LONGEST_S);
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

/* The run has not begun: another tracker could not be opened. */
static void abandon(struct client *c) {
    pthread_mutex_lock(&c->lock);
    c->ending = true;
    c->how = "failed";
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static void say_left(const struct client *c) {
    if (c->n_unsent > 0)
        log_warn(
            "tracker %s: %lld records were not sent; they are kept in %s, and 'verlc trackers sync %s' sends them, or the same "
            "command, which resumes the run",
            c->name, (long long)c->n_unsent, c->path, c->run_dir);
    else if (c->started && !c->traces && json_is_null(c->end))
        log_warn("tracker %s: its run there is still open; 'verlc trackers sync %s' ends it", c->name, c->run_dir);
    if (c->n_dropped > 0) log_warn("tracker %s: %lld records were dropped, %s was full", c->name, (long long)c->n_dropped, c->path);
}

static void client_close(void *v) {
    struct client *c = v;
    if (c->started) {
        if (!c->ending) abandon(c);
        client__wait(c);
    }
    if (c->fd >= 0) say_left(c);
    client__free(c);
}

/* Traces go to MLflow as well. */
static bool is_absent(const struct client *c, const struct track_loggers *l) {
    for (int i = 0; i < TRACK_N_CLIENTS; i++)
        if (l->absent[i] && (c->traces ? i == TRACK_MLFLOW : strcmp(c->name, track_clients[i].name) == 0)) return true;
    return false;
}

static int start(struct client *c, const struct track_args *a) {
    int64_t n_kept, n_left;
    char *dir = file_join(a->run_dir, "trackers");
    const int made = file_mkdirs(dir);
    free(dir);
    TRY(made);
    TRY(client__take_up(c, a->resume_step, &n_kept, &n_left));
    if (n_kept > 0) log_info("tracker %s: %lld records that could not be sent before are sent now", c->name, (long long)n_kept);
    if (a->resume_step <= 0 && n_left > 0)
        log_warn("tracker %s: %lld records of the run before in %s were never sent; this run starts from scratch without them",
                 c->name, (long long)n_left, a->run_dir);
    if (is_absent(c, a->loggers)) return 0;
    TRY(client__start_helper(c, a));
    const int e = pthread_create(&c->sender, NULL, client__send_loop, c);
    if (e) FAIL(ERR_NOMEM, "tracker %s: cannot start a thread: %s", c->name, strerror(e));
    c->started = true;
    return 0;
}

static int client_open(void **ctx, const char *name, const struct track_args *a) {
    struct client *c = client__new(name, a->run_dir);
    const int rc = start(c, a);
    if (rc < 0) client_close(c);
    else *ctx = c;
    return rc;
}

/* ---- records ---- */

static json_t *number(double v) { return isfinite(v) ? json_real(v) : json_string(isnan(v) ? "nan" : v > 0 ? "inf" : "-inf"); }

static int client_log(void *v, int64_t step, const struct metrics *m, double wall) {
    struct client *c = v;
    if (c->traces) return 0;
    json_t *data = json_object();
    for (int64_t i = 0; i < m->n; i++) {
        const struct metric *x = &m->items[i];
        json_object_set_new(data, x->name, x->whole && isfinite(x->value) ? json_integer((json_int_t)x->value) : number(x->value));
    }
    return client__spool(
        c, json_pack("{s:s, s:I, s:f, s:o}", "kind", "metrics", "step", (json_int_t)step, "time", wall, "data", data), false);
}

static int client_generations(void *v, int64_t step, const json_t *rows, double wall) {
    struct client *c = v;
    if (c->traces) return 0;
    return client__spool(c,
                         json_pack("{s:s, s:I, s:f, s:o}", "kind", "generations", "step", (json_int_t)step, "time", wall, "rows",
                                   json_deep_copy(rows)),
                         true);
}

static json_t *text(struct track_text s) {
    json_t *o = json_stringn(s.p ? s.p : "", s.n);
    return o ? o : json_string("(not UTF-8)");
}
static json_t *ids(const int32_t *v, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(list, json_integer(v[i]));
    return list;
}

/* A sample as a trace. */
static int client_sample(void *v, const struct track_sample *s) {
    const struct track_trace *t = &s->trace;
    if (!t->wanted) return 0;
    json_t *logp = json_array();
    for (int64_t i = 0; i < s->n; i++) json_array_append_new(logp, number(number_of_f32(s->logp[i])));
    json_t *o = json_pack("{s:s, s:I, s:f, s:f, s:I, s:I, s:b, s:s, s:s, s:s}", "kind", "trace", "step", (json_int_t)s->step,
                          "time", t->ended, "seconds", t->seconds, "sample_index", (json_int_t)t->sample_index, "rollout_n",
                          (json_int_t)s->index, "validate", s->validation, "data_source", s->data_source, "reward_status",
                          s->reward_status, "finish_reason", s->finish);
    json_object_set_new(o, "prompt_ids", ids(s->prompt_ids, s->n_prompt));
    json_object_set_new(o, "response_ids", ids(s->ids, s->n));
    json_object_set_new(o, "response_logprobs", logp);
    json_object_set_new(o, "reward", isnan(s->score) ? json_null() : json_real(s->score));
    json_object_set_new(o, "ground_truth", text(s->ground_truth));
    json_object_set_new(o, "extra", s->extra ? json_deep_copy(s->extra) : json_object());
    json_object_set_new(o, "sampling", json_deep_copy(t->sampling));
    if (t->prompt.p) json_object_set_new(o, "prompt_text", text(t->prompt));
    if (t->response.p) json_object_set_new(o, "response_text", text(t->response));
    return client__spool(v, o, true);
}

#define CLIENT(title)                                                                                                  \
    {                                                                                                                  \
        .name = (title), .open = client_open, .log = client_log, .generations = client_generations, .end = client_end, \
        .close = client_close                                                                                          \
    }
const struct tracker track_clients[TRACK_N_CLIENTS] = {
    [TRACK_MLFLOW] = CLIENT("mlflow"),   [TRACK_WANDB] = CLIENT("wandb"),     [TRACK_SWANLAB] = CLIENT("swanlab"),
    [TRACK_CLEARML] = CLIENT("clearml"), [TRACK_TRACKIO] = CLIENT("trackio"),
};
/* In a queue of their own: there may be thousands of them in a step, and metrics are not to wait for them. */
const struct tracker track_traces = {.name = "mlflow_traces",
                                     .open = client_open,
                                     .log = client_log,
                                     .sample = client_sample,
                                     .end = client_end,
                                     .close = client_close};

/* ---- which there are ---- */

static bool names_it(const json_t *list, const char *name) {
    for (size_t i = 0; i < json_array_size(list); i++)
        if (strcmp(json_string_value(json_array_get(list, i)), name) == 0) return true;
    return false;
}

int track_client_check(const char *const *names, int64_t n, enum track_client_state state[], char **python) {
    struct helper *h = NULL;
    json_t *request = json_object(), *list = json_array(), *reply = NULL;
    int rc = 0;
    for (int64_t i = 0; i < n; i++) json_array_append_new(list, json_string(names[i]));
    json_object_set_new(request, "check", list);
    const struct helper_args a = {.module = "verlc_helpers.tracker"};
    TRYG(helper_create(&h, &a), out);
    rc = helper_call(h, request, 60, &reply);
    if (rc == ERR_HELPER) rc = helper_call(h, request, 60, &reply); /* a process that was killed is started again */
    TRYG(rc, out);
    for (int64_t i = 0; i < n; i++)
        state[i] = names_it(json_object_get(reply, "missing"), names[i])      ? TRACK_MISSING
                   : names_it(json_object_get(reply, "logged_out"), names[i]) ? TRACK_LOGGED_OUT
                                                                              : TRACK_USABLE;
    *python = xstrdup(json_string_value(json_object_get(reply, "python")));
out:
    helper_destroy(h);
    json_decref(request);
    json_decref(reply);
    return rc;
}
