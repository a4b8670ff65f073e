/* client.c - a tracker that has a client in Python (mlflow, wandb, swanlab, clearml, trackio): RUN_DIR/trackers/NAME.jsonl
 * is the queue to it.  The writer thread appends records; a thread of this file sends them through a helper process
 * (python/verlc_helpers/tracker.py) and writes down in NAME.state.json how far it came and which run they belong to.
 *
 * Invariant: a record is in the file until the client has it, so a client that is slow, down or broken costs no step and
 * no record within MAX_SPOOL; the remaining ones are sent after a recovery, at the end, or by the run that resumes. */
#include "track/track_int.h"

#include "helper/helper.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/number.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_SPOOL ((int64_t)256 << 20) /* bytes not sent; a step's metrics are still taken up to twice that */
#define COMPACT ((int64_t)8 << 20)     /* sent bytes at the file's start that are worth removing */
enum { BATCH_BYTES = 1 << 20, BATCH_RECORDS = 256 };
#define PAUSE_S 1.0         /* between requests, so that quick steps share one */
#define MAX_DELAY_S 60.0    /* between attempts while it is down */
#define CALL_S 600.0        /* one request; the first may make a database, which breaks if it is cut off */
#define START_S 300.0       /* interpreter and imports, behind everything else on the machine */
#define MORE_END_S 60.0     /* after the end of a run: more time for each request that worked, */
#define LONGEST_END_S 600.0 /* this long at most */
#define SLICE_S 0.2         /* how soon the end of the run is seen within a request */

struct client {
    const char *name;
    bool traces; /* samples as traces, and nothing else */
    char *path, *state_path;
    int fd;
    struct helper_pool *helper;
    pthread_t sender;
    bool started;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under the lock */
    int64_t size;     /* of the file */
    int64_t at;       /* where the first unsent record begins; the sender's to change */
    int64_t last_seq; /* of the record written last */
    int64_t n_dropped;
    bool ending;
    double end_by, give_up; /* end_by moves on while records are sent, up to give_up */
    const char *how;
    /* the sender's */
    int64_t sent; /* number of the record sent last */
    json_t *run;  /* what the client calls its run; NULL: none yet */
    bool failing;
    double delay;
    int64_t n_refused;
};

static const int64_t MAX_SEQ = (int64_t)1 << 53; /* of a record: another one is not of this file */

/* ---- the file ---- */

static int io_error(const struct client *c) { FAIL(ERR_IO, "%s: %s", c->path, strerror(errno)); }

/* A line that is not written whole is taken back. Under the lock. */
static int append(struct client *c, const struct buf *line) {
    const ssize_t n = write(c->fd, line->p, line->n);
    if (n == (ssize_t)line->n) {
        c->size += (int64_t)line->n;
        return 0;
    }
    const int e = n < 0 ? errno : ENOSPC;
    if (ftruncate(c->fd, c->size) < 0) log_debug("%s: %s", c->path, strerror(errno));
    errno = e;
    return io_error(c);
}

/* Takes o over. */
static int spool(struct client *c, json_t *o, bool droppable) {
    struct buf line = {0};
    int rc = 0;
    pthread_mutex_lock(&c->lock);
    json_object_set_new(o, "seq", json_integer(c->last_seq + 1));
    TRYG(json_dump_line(&line, o), out);
    TRYG(buf_addc(&line, '\n'), out);
    if (c->size - c->at + (int64_t)line.n > (droppable ? MAX_SPOOL : 2 * MAX_SPOOL)) {
        if (c->n_dropped++ == 0)
            log_warn("tracker %s: %s has %lld MiB that could not be sent; further records are dropped until some are", c->name,
                     c->path, (long long)((c->size - c->at) >> 20));
        goto out;
    }
    TRYG(append(c, &line), out);
    c->last_seq++;
    pthread_cond_broadcast(&c->changed);
out:
    pthread_mutex_unlock(&c->lock);
    buf_free(&line);
    json_decref(o);
    return rc;
}

static void save_state(struct client *c) {
    json_t *o = json_pack("{s:I, s:O?}", "sent", (json_int_t)c->sent, "run", c->run);
    if (json_save_atomic(c->state_path, o) < 0) log_debug("%s", err_msg());
    json_decref(o);
}

/* Removes what is sent from the file's start: all of it, or once it is the greater part. */
static int compact(struct client *c) {
    struct buf rest = {0};
    int rc = 0;
    pthread_mutex_lock(&c->lock);
    if (c->at == c->size && c->size > 0) {
        if (ftruncate(c->fd, 0) == 0) c->size = c->at = 0;
    } else if (c->at > COMPACT && c->at > c->size / 2) {
        TRYG(file_read(&rest, c->path, 0), out);
        TRYG(file_write_atomic(c->path, rest.p + c->at, rest.n - (size_t)c->at), out);
        const int fd = open(c->path, O_RDWR | O_APPEND | O_CLOEXEC);
        if (fd < 0) {
            rc = io_error(c);
            goto out;
        }
        close(c->fd);
        c->fd = fd;
        c->size -= c->at;
        c->at = 0;
    }
out:
    pthread_mutex_unlock(&c->lock);
    buf_free(&rest);
    return rc;
}

struct reading {
    struct client *c;
    struct buf kept;
    int64_t sent, resume_step, n_kept, n_unsent;
};
static int read_line(void *arg, char *line, size_t n, int64_t no) {
    struct reading *r = arg;
    json_t *o;
    int64_t seq, step;
    int rc = 0;
    (void)no;
    if (json_parse(&o, line, n, "") < 0) return 0; /* torn by a crash */
    if (json_i64(o, "seq", &seq, "") == 0 && json_i64(o, "step", &step, "") == 0 && seq <= MAX_SEQ) {
        if (seq > r->c->last_seq) r->c->last_seq = seq;
        if (seq > r->sent) r->n_unsent++;
        if (seq > r->sent && step <= r->resume_step) { /* later steps are made again */
            r->n_kept++;
            rc = buf_add(&r->kept, line, n);
            if (rc == 0) rc = buf_addc(&r->kept, '\n');
        }
    }
    json_decref(o);
    return rc;
}

/* What an earlier run of this directory left. */
static int take_up(struct client *c, const struct track_args *a) {
    struct reading r = {.c = c, .resume_step = a->resume_step};
    json_t *state = NULL;
    int rc = 0;
    if (file_exists(c->state_path) && json_load(&state, c->state_path, 1 << 20) == 0) {
        if (json_i64(state, "sent", &r.sent, "") < 0 || r.sent > MAX_SEQ) r.sent = 0;
        json_t *run = json_object_get(state, "run");
        if (a->resume_step > 0 && json_is_object(run)) c->run = json_incref(run);
    }
    json_decref(state);
    c->last_seq = c->sent = r.sent;
    if (file_exists(c->path)) rc = file_each_line(c->path, read_line, &r);
    if (rc == 0) rc = file_write_atomic(c->path, r.kept.p ? r.kept.p : "", r.kept.n);
    c->size = (int64_t)r.kept.n;
    if (rc == 0 && r.n_kept > 0)
        log_info("tracker %s: %lld records that could not be sent before are sent now", c->name, (long long)r.n_kept);
    if (rc == 0 && a->resume_step <= 0 && r.n_unsent > 0)
        log_warn("tracker %s: %lld records of the run before in %s were never sent; this run starts anew without them", c->name,
                 (long long)r.n_unsent, a->run_dir);
    buf_free(&r.kept);
    if (rc == 0) save_state(c);
    return rc;
}

/* ---- sending ---- */

struct batch {
    json_t *records;
    int64_t n, end[BATCH_RECORDS], seq[BATCH_RECORDS]; /* of each: the file offset behind it, its number */
};

/* The next records, none where all is sent; b->records is the caller's. */
static void next_batch(struct client *c, struct batch *b) {
    pthread_mutex_lock(&c->lock);
    const int64_t at = c->at, size = c->size;
    pthread_mutex_unlock(&c->lock);
    size_t want = (size_t)(size - at) < BATCH_BYTES ? (size_t)(size - at) : BATCH_BYTES, n = 0;
    char *p = NULL;
    *b = (struct batch){.records = json_array()};
    for (;;) { /* until a whole line is in it */
        p = xrealloc(p, want + 1);
        const ssize_t got = pread(c->fd, p + n, want - n, at + (int64_t)n);
        if (got > 0) n += (size_t)got;
        if (got <= 0 || memchr(p, '\n', n) || n == (size_t)(size - at)) break;
        want = want * 2 < (size_t)(size - at) ? want * 2 : (size_t)(size - at);
    }
    const char *line = p, *nl;
    while (b->n < BATCH_RECORDS && line < p + n && (nl = memchr(line, '\n', (size_t)(p + n - line)))) {
        json_t *o;
        if (json_parse(&o, line, (size_t)(nl - line), c->path) < 0) o = json_null();
        b->seq[b->n] = json_integer_value(json_object_get(o, "seq"));
        b->end[b->n++] = at + (nl + 1 - p);
        json_array_append_new(b->records, o);
        line = nl + 1;
    }
    free(p);
}

/* True: the run is over, and so is the time for remaining records. */
static bool is_over(struct client *c) {
    pthread_mutex_lock(&c->lock);
    const bool over = c->ending && clock_awake() >= c->end_by;
    pthread_mutex_unlock(&c->lock);
    return over;
}

static int call(struct client *c, json_t *request, json_t **reply) {
    struct helper_result r;
    int64_t ticket;
    int got;
    const int rc = helper_pool_send(c->helper, request, CALL_S, &ticket);
    json_decref(request);
    TRY(rc);
    while ((got = helper_pool_recv(c->helper, SLICE_S, &r)) == 0) {
        if (!is_over(c)) continue;
        helper_pool_cancel(c->helper);
        FAIL(ERR_TIMEOUT, "it did not answer before the end of the run");
    }
    TRY(got);
    if (r.rc < 0) {
        err_set(r.rc, __FILE__, __LINE__, "%s", r.error);
        const int failed = r.rc;
        helper_result_free(&r);
        return failed;
    }
    *reply = r.reply;
    return 0;
}

static void has_failed(struct client *c, const char *why) {
    c->delay = c->failing ? fmin(2 * c->delay, MAX_DELAY_S) : 1;
    if (!c->failing) log_warn("tracker %s fails: %s; the run goes on, and what is not sent is kept in %s", c->name, why, c->path);
    c->failing = true;
}

static void has_worked(struct client *c) {
    pthread_mutex_lock(&c->lock);
    c->end_by = fmax(c->end_by, fmin(clock_awake() + MORE_END_S, c->give_up));
    pthread_mutex_unlock(&c->lock);
    if (c->failing) log_info("tracker %s works again; what was kept is sent now", c->name);
    c->failing = false;
}

static void say_refused(struct client *c, const json_t *refused) {
    if (json_array_size(refused) == 0) return;
    if (c->n_refused == 0)
        log_warn("tracker %s does not take %s; such records are left out", c->name, json_string_value(json_array_get(refused, 0)));
    c->n_refused += (int64_t)json_array_size(refused);
}

/* One request with a batch, whose records it takes over, and what the answer says. how: the run's end, or NULL. */
static int exchange(struct client *c, const struct batch *b, const char *how) {
    json_t *reply = NULL, *request = json_pack("{s:O?, s:o, s:s?}", "run", c->run, "records", b->records, "finish", how);
    int64_t done = 0;
    TRY(call(c, request, &reply));
    json_t *run = json_object_get(reply, "run");
    const char *error = json_string_value(json_object_get(reply, "error"));
    if (json_i64(reply, "done", &done, c->name) < 0 || done > b->n) done = 0;
    if (json_is_object(run)) {
        json_decref(c->run);
        c->run = json_incref(run);
    }
    if (done > 0) {
        pthread_mutex_lock(&c->lock);
        c->at = b->end[done - 1];
        pthread_mutex_unlock(&c->lock);
        c->sent = b->seq[done - 1];
    }
    save_state(c);
    say_refused(c, json_object_get(reply, "refused"));
    const int rc = error ? err_set(ERR_HELPER, __FILE__, __LINE__, "%s", error) : compact(c);
    json_decref(reply);
    return rc;
}

/* Waits for seconds, or (< 0) for a record; false: the run has ended. */
static bool wait_for(struct client *c, double seconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)fmax(seconds, 0);
    pthread_mutex_lock(&c->lock);
    while (!c->ending && (seconds >= 0 || c->at == c->size))
        if (seconds < 0) pthread_cond_wait(&c->changed, &c->lock);
        else if (pthread_cond_timedwait(&c->changed, &c->lock, &until) == ETIMEDOUT) break;
    const bool on = !c->ending;
    pthread_mutex_unlock(&c->lock);
    return on;
}

static void *send_loop(void *v) {
    struct client *c = v;
    struct batch *b = xmalloc(sizeof *b);
    bool on = true, open = false; /* the run goes on; the client has opened it */
    while (!is_over(c)) {
        if (open) next_batch(c, b);
        else *b = (struct batch){.records = json_array()};
        if (open && b->n == 0) {
            json_decref(b->records);
            if (!on) break;
            on = wait_for(c, -1);
        } else if (exchange(c, b, NULL) == 0) {
            has_worked(c);
            if (on && open) on = wait_for(c, PAUSE_S);
            open = true;
        } else {
            has_failed(c, err_msg());
            if (!on) break;
            on = wait_for(c, c->delay);
        }
    }
    *b = (struct batch){0};
    if (!c->failing && !is_over(c)) {
        b->records = json_array();
        if (exchange(c, b, c->how) < 0) log_warn("tracker %s did not close its run: %s", c->name, err_msg());
    }
    free(b);
    helper_pool_destroy(c->helper); /* by the thread that started its process */
    c->helper = NULL;
    return NULL;
}

/* ---- opening and closing ---- */

static void client_end(void *v, const char *how, const char *why, double end_by) {
    struct client *c = v;
    (void)why;
    pthread_mutex_lock(&c->lock);
    c->ending = true;
    c->how = how;
    c->end_by = end_by;
    c->give_up = strcmp(how, "done") == 0 ? clock_awake() + LONGEST_END_S : end_by;
    if (c->at < c->size && c->size - c->at > BATCH_BYTES)
        log_info("tracker %s: sending %lld remaining MiB", c->name, (long long)((c->size - c->at) >> 20));
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static void client_close(void *v) {
    struct client *c = v;
    if (c->started) {
        if (!c->ending) client_end(c, "failed", NULL, 0);
        pthread_join(c->sender, NULL);
    }
    helper_pool_destroy(c->helper);
    if (c->fd >= 0 && c->at < c->size)
        log_warn("tracker %s: %s has records that were not sent; the same command resumes the run and sends them", c->name,
                 c->path);
    if (c->n_dropped > 0) log_warn("tracker %s: %lld records were dropped, %s was full", c->name, (long long)c->n_dropped, c->path);
    if (c->fd >= 0) close(c->fd);
    json_decref(c->run);
    free(c->path);
    free(c->state_path);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* Traces go to MLflow as well. */
static bool is_absent(const struct client *c, const struct track_loggers *l) {
    for (int i = 0; i < TRACK_N_CLIENTS; i++)
        if (l->absent[i] && (c->traces ? i == TRACK_MLFLOW : strcmp(c->name, track_clients[i].name) == 0)) return true;
    return false;
}

static int start(struct client *c, const struct track_args *a) {
    char *dir = file_join(a->run_dir, "trackers");
    const int made = file_mkdirs(dir);
    free(dir);
    TRY(made);
    TRY(take_up(c, a));
    c->fd = open(c->path, O_RDWR | O_APPEND | O_CLOEXEC);
    if (c->fd < 0) return io_error(c);
    if (is_absent(c, a->loggers)) return 0;
    json_t *init = json_pack("{s:s, s:s, s:s, s:O?, s:b, s:s, s:s?, s:s?, s:s?, s:s}", "tracker", c->name, "project", a->project,
                             "experiment", a->experiment, "config", (json_t *)(uintptr_t)a->config, "has_run",
                             a->loggers->client[TRACK_MLFLOW], "run_dir", a->run_dir, "proxy", a->wandb_proxy, "trace_project",
                             a->trace_project, "trace_experiment", a->trace_experiment, "version", VERLC_VERSION);
    const struct helper_args h = {.module = "verlc_helpers.tracker", .init = init, .memory_bytes = -1, .start_timeout_s = START_S};
    const int rc = helper_pool_create(&c->helper, &h, &(struct helper_pool_args){.n = 1});
    json_decref(init);
    TRY(rc);
    const int e = pthread_create(&c->sender, NULL, send_loop, c);
    if (e) FAIL(ERR_NOMEM, "tracker %s: cannot start a thread: %s", c->name, strerror(e));
    c->started = true;
    return 0;
}

static int client_open(void **ctx, const char *name, const struct track_args *a) {
    struct client *c = xcalloc(1, sizeof *c);
    pthread_condattr_t attr;
    c->name = name;
    c->traces = strcmp(name, track_traces.name) == 0;
    c->fd = -1;
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    c->path = xasprintf("%s/trackers/%s.jsonl", a->run_dir, name);
    c->state_path = xasprintf("%s/trackers/%s.state.json", a->run_dir, name);
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
    return spool(c, json_pack("{s:s, s:I, s:f, s:o}", "kind", "metrics", "step", (json_int_t)step, "time", wall, "data", data),
                 false);
}

static int client_generations(void *v, int64_t step, const json_t *rows, double wall) {
    struct client *c = v;
    if (c->traces) return 0;
    return spool(c,
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
    return spool(v, o, true);
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

int track_client_missing(const char *const *names, int64_t n, bool missing[], char **python) {
    struct helper *h = NULL;
    json_t *request = json_object(), *list = json_array(), *reply = NULL;
    int rc = 0;
    for (int64_t i = 0; i < n; i++) json_array_append_new(list, json_string(names[i]));
    json_object_set_new(request, "check", list);
    const struct helper_args a = {.module = "verlc_helpers.tracker"};
    TRYG(helper_create(&h, &a), out);
    TRYG(helper_call(h, request, 60, &reply), out);
    const json_t *gone = json_object_get(reply, "missing");
    for (int64_t i = 0; i < n; i++) {
        missing[i] = false;
        for (size_t k = 0; k < json_array_size(gone); k++)
            missing[i] |= strcmp(json_string_value(json_array_get(gone, k)), names[i]) == 0;
    }
    *python = xstrdup(json_string_value(json_object_get(reply, "python")));
out:
    helper_destroy(h);
    json_decref(request);
    json_decref(reply);
    return rc;
}
