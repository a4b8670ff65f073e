/* track.c - metrics, the queue and the writer thread.  Each tracker is a row of
 * a table; the console is drawn by the caller, everything else by the writer.
 *
 * Invariant: the caller never waits for a tracker, except in track_flush. */
#include "track/track_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- metrics ---- */

void metrics_reset(struct metrics *m) {
    for (int64_t i = 0; i < m->n; i++) free(m->items[i].name);
    m->n = 0;
}
void metrics_free(struct metrics *m) {
    metrics_reset(m);
    free(m->items);
    *m = (struct metrics){0};
}

/* Takes name over. */
static void put(struct metrics *m, char *name, double value, bool whole) {
    int64_t i = 0;
    while (i < m->n && strcmp(m->items[i].name, name) != 0) i++;
    if (i == m->n) {
        xgrow((void **)&m->items, &m->cap, m->n + 1, sizeof *m->items);
        m->items[m->n++].name = name;
    } else {
        free(name);
    }
    m->items[i].value = value;
    m->items[i].whole = whole;
}

void metrics_set(struct metrics *m, double value, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    put(m, xvasprintf(fmt, ap), value, false);
    va_end(ap);
}
void metrics_set_i64(struct metrics *m, int64_t value, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    put(m, xvasprintf(fmt, ap), (double)value, true);
    va_end(ap);
}
void metrics_merge(struct metrics *into, const struct metrics *from) {
    for (int64_t i = 0; i < from->n; i++) put(into, xstrdup(from->items[i].name), from->items[i].value, from->items[i].whole);
}
bool metrics_get(const struct metrics *m, const char *name, double *value) {
    for (int64_t i = 0; i < m->n; i++) {
        if (strcmp(m->items[i].name, name) != 0) continue;
        *value = m->items[i].value;
        return true;
    }
    return false;
}

/* ---- the queue ---- */

enum { MAX_QUEUED = 8192, MAX_TRACKERS = 4 + TRACK_N_CLIENTS };
#define END_S 60.0 /* for clients, after the last step; tracker_client.c has what they get beyond it */
#define KILLED_END_S 10.0
#define STATUS_S 1.0 /* between two records of what the run does */

struct record { /* a step's metrics, a sample with everything it points to, validation samples to show, or an event */
    struct record *next;
    enum { METRICS, SAMPLE, GENERATIONS, EVENT } kind;
    int64_t step;
    double wall;
    struct metrics metrics;
    struct track_sample sample;
    json_t *rows;
    char *event, *message;
};

struct track {
    struct console *console;
    struct {
        const struct tracker *t;
        void *ctx;
        bool failed;
    } out[MAX_TRACKERS];
    int n_out;
    pthread_t writer;
    bool started, stop, flush; /* flush: requested */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct record *head, *tail;
    int64_t n_queued, n_lost, n_pushed, n_written;
    struct track_status status;
    bool status_new;
    double status_at; /* clock_now from which on it may be written again */
};

static void record_free(struct record *r) {
    struct track_sample *s = &r->sample;
    metrics_free(&r->metrics);
    json_decref(r->rows);
    free(r->event);
    free(r->message);
    if (r->kind == SAMPLE) {
        free((char *)(uintptr_t)s->data_source);
        free((char *)(uintptr_t)s->prompt.p);
        free((char *)(uintptr_t)s->response.p);
        free((char *)(uintptr_t)s->ground_truth.p);
        free((char *)(uintptr_t)s->reward_status);
        free((char *)(uintptr_t)s->reward_message);
        free((char *)(uintptr_t)s->finish);
        free((int32_t *)(uintptr_t)s->prompt_ids);
        free((int32_t *)(uintptr_t)s->ids);
        free((float *)(uintptr_t)s->logp);
        free((float *)(uintptr_t)s->entropy);
        free((float *)(uintptr_t)s->ref_logp);
        free((float *)(uintptr_t)s->advantages);
        free((uint16_t *)(uintptr_t)s->token_bytes);
        free((uint16_t *)(uintptr_t)s->prompt_bytes);
        free((int32_t *)(uintptr_t)s->versions);
        free((int32_t *)(uintptr_t)s->segments);
        free((int32_t *)(uintptr_t)s->routes);
        json_decref((json_t *)(uintptr_t)s->extra);
        json_decref((json_t *)(uintptr_t)s->episode);
        json_decref((json_t *)(uintptr_t)s->trace.sampling);
        free((char *)(uintptr_t)s->trace.prompt.p);
        free((char *)(uintptr_t)s->trace.response.p);
    }
    free(r);
}

static void failed(struct track *t, int i) {
    t->out[i].failed = true;
    log_warn("tracker %s stopped: %s; the run goes on without it", t->out[i].t->name, err_msg());
}

static int write_to(const struct tracker *k, void *ctx, const struct record *r) {
    switch (r->kind) {
    case METRICS: return k->log(ctx, r->step, &r->metrics, r->wall);
    case SAMPLE: return k->sample ? k->sample(ctx, &r->sample) : 0;
    case EVENT: return k->event ? k->event(ctx, r->step, r->event, r->message, r->wall) : 0;
    default: return k->generations ? k->generations(ctx, r->step, r->rows, r->wall) : 0;
    }
}

static void write_record(struct track *t, const struct record *r) {
    for (int i = 0; i < t->n_out; i++)
        if (!t->out[i].failed && write_to(t->out[i].t, t->out[i].ctx, r) < 0) failed(t, i);
}

static void flush_all(struct track *t) {
    for (int i = 0; i < t->n_out; i++)
        if (!t->out[i].failed && t->out[i].t->flush && t->out[i].t->flush(t->out[i].ctx) < 0) failed(t, i);
}

/* The lock is held, and given up while it is written. The last one is written whenever it came. */
static bool write_status(struct track *t) {
    if (!t->status_new || (clock_now() < t->status_at && !(t->stop && !t->head))) return false;
    const struct track_status s = t->status;
    t->status_new = false;
    t->status_at = clock_now() + STATUS_S;
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; i < t->n_out; i++)
        if (!t->out[i].failed && t->out[i].t->status && t->out[i].t->status(t->out[i].ctx, &s, clock_wall()) < 0) failed(t, i);
    pthread_mutex_lock(&t->lock);
    return true;
}

/* For a change, and where a status waits to be written for at most a second. */
static void wait_for_work(struct track *t) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec++;
    if (t->status_new) pthread_cond_timedwait(&t->changed, &t->lock, &until);
    else pthread_cond_wait(&t->changed, &t->lock);
}

static void *write_loop(void *v) {
    struct track *t = v;
    pthread_mutex_lock(&t->lock);
    for (;;) {
        if (write_status(t)) continue;
        if (!t->head && t->flush) {
            pthread_mutex_unlock(&t->lock);
            flush_all(t);
            pthread_mutex_lock(&t->lock);
            t->flush = false;
            pthread_cond_broadcast(&t->changed);
            continue;
        }
        if (!t->head && t->stop) break;
        if (!t->head) {
            wait_for_work(t);
            continue;
        }
        struct record *r = t->head;
        t->head = r->next;
        if (!t->head) t->tail = NULL;
        t->n_queued--;
        pthread_mutex_unlock(&t->lock);
        write_record(t, r);
        const bool show = r->kind == METRICS || r->kind == EVENT;
        record_free(r);
        if (show) flush_all(t);
        pthread_mutex_lock(&t->lock);
        t->n_written++;
        pthread_cond_broadcast(&t->changed);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

static void push(struct track *t, struct record *r) {
    pthread_mutex_lock(&t->lock);
    if (t->n_queued >= MAX_QUEUED && r->kind == SAMPLE) { /* a step's metrics are never dropped */
        t->n_lost++;
        pthread_mutex_unlock(&t->lock);
        record_free(r);
        return;
    }
    if (t->tail) t->tail->next = r;
    else t->head = r;
    t->tail = r;
    t->n_queued++;
    t->n_pushed++;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

/* ---- opening ---- */

/* verl's name of a logger; its older name of wandb. */
static int choose_one(struct track_loggers *out, const char *name) {
    if (strcmp(name, "console") == 0) return out->console = true;
    if (strcmp(name, "file") == 0) return out->file = true;
    if (strcmp(name, "tensorboard") == 0) return out->tensorboard = true;
    if (strcmp(name, "tracking") == 0) return out->client[TRACK_WANDB] = true;
    for (int i = 0; i < TRACK_N_CLIENTS; i++)
        if (strcmp(name, track_clients[i].name) == 0) return out->client[i] = true;
    if (strcmp(name, "vemlp_wandb") == 0)
        FAIL(ERR_INVAL, "trainer.logger: vemlp_wandb (Volcengine's W&B) is not supported; use wandb");
    FAIL(ERR_INVAL, "trainer.logger: unknown '%s'; known are console, file, tensorboard, mlflow, wandb, swanlab, clearml, trackio",
         name);
}

/* A client that cannot send keeps its records where that was requested, else it is left out. */
static void is_logged_out(struct track_loggers *out, int client, bool chosen) {
    if (chosen) {
        log_warn("trainer.logger: wandb is not logged in: " TRACK_WANDB_LOGIN ". Until then its records are kept in the run's "
                 "directory, for 'verlc trackers sync' or the run that resumes; the metrics are in run.db");
        out->absent[client] = true;
        return;
    }
    log_note("trainer.logger: wandb is verl's default, and it is not logged in: " TRACK_WANDB_LOGIN
             "; without it the metrics are in run.db");
    out->client[client] = false;
}

static void lacks_package(struct track_loggers *out, int client, bool chosen, const char *python) {
    const char *name = track_clients[client].name;
    const bool traces = out->trace && client == TRACK_MLFLOW;
    if (chosen || traces) {
        log_warn(
            "%s: the Python package '%s' is missing; '%s -m pip install %s' (VERLC_PYTHON names another Python). Until then its "
            "records are kept in the run's directory, for 'verlc trackers sync' or the run that resumes; the metrics are in run.db",
            chosen && out->client[client] ? "trainer.logger" : "actor_rollout_ref.rollout.trace.backend", name, python, name);
        out->absent[client] = true;
        return;
    }
    log_note("trainer.logger: %s is verl's default, and %s has no package of that name; the metrics are in run.db", name, python);
    out->client[client] = false;
}

static int check_packages(struct track_loggers *out, bool chosen) {
    const char *names[TRACK_N_CLIENTS];
    enum track_client_state state[TRACK_N_CLIENTS];
    int client[TRACK_N_CLIENTS], n = 0;
    char *python = NULL;
    for (int i = 0; i < TRACK_N_CLIENTS; i++) {
        if (!out->client[i] && !(i == TRACK_MLFLOW && out->trace)) continue;
        client[n] = i;
        names[n++] = track_clients[i].name;
    }
    if (n == 0) return 0;
    TRY(track_client_check(names, n, state, &python));
    for (int i = 0; i < n; i++)
        if (state[i] == TRACK_MISSING) lacks_package(out, client[i], chosen, python);
        else if (state[i] == TRACK_LOGGED_OUT) is_logged_out(out, client[i], chosen);
    free(python);
    return 0;
}

int track_choose(struct track_loggers *out, const char *const *names, int64_t n, bool chosen) {
    for (int64_t i = 0; i < n; i++) TRY(choose_one(out, names[i]));
    return check_packages(out, chosen);
}

/* A logger that is named twice is one. */
static int add_tracker(struct track *t, const struct tracker *k, const struct track_args *a) {
    for (int i = 0; i < t->n_out; i++)
        if (t->out[i].t == k) return 0;
    CHECK(t->n_out < MAX_TRACKERS);
    TRY(k->open(&t->out[t->n_out].ctx, k->name, a));
    t->out[t->n_out++].t = k;
    return 0;
}

static int add_trackers(struct track *t, const struct track_args *a) {
    const struct track_loggers none = {0}, *l = a->loggers ? a->loggers : &none;
    TRY(add_tracker(t, &track_db, a));
    if (l->file) TRY(add_tracker(t, &track_file, a));
    if (l->tensorboard) TRY(add_tracker(t, &track_tensorboard, a));
    for (int i = 0; i < TRACK_N_CLIENTS; i++)
        if (l->client[i]) TRY(add_tracker(t, &track_clients[i], a));
    return l->trace ? add_tracker(t, &track_traces, a) : 0;
}

int track_open(struct track **out, const struct track_args *a) {
    int rc = 0;
    struct track *t = xcalloc(1, sizeof *t);
    pthread_mutex_init(&t->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&t->changed, &attr);
    pthread_condattr_destroy(&attr);
    TRYG(add_trackers(t, a), fail);
    const int e = pthread_create(&t->writer, NULL, write_loop, t);
    if (e) FAILG(fail, ERR_NOMEM, "cannot start the tracking thread: %s", strerror(e));
    t->started = true;
    t->console = console_create(a, a->loggers && a->loggers->console);
    *out = t;
    return 0;
fail:
    track_close(t, rc);
    return rc;
}

void track_close(struct track *t, int rc) {
    struct err_saved why;
    if (!t) return;
    err_save(&why);
    console_destroy(t->console);
    if (t->started) {
        pthread_mutex_lock(&t->lock);
        t->stop = true;
        pthread_cond_broadcast(&t->changed);
        pthread_mutex_unlock(&t->lock);
        pthread_join(t->writer, NULL);
    }
    if (t->n_lost > 0) log_warn("tracking: %lld samples were not recorded, the disk was too slow", (long long)t->n_lost);
    const char *how = rc == 0 ? "done" : rc == ERR_SIGNAL ? "killed" : "failed";
    const double end_by = clock_awake() + (rc == ERR_SIGNAL ? KILLED_END_S : END_S);
    for (int i = 0; i < t->n_out; i++)
        if (t->out[i].t->end) t->out[i].t->end(t->out[i].ctx, how, rc < 0 ? why.msg : NULL, end_by);
    for (int i = 0; i < t->n_out; i++) t->out[i].t->close(t->out[i].ctx);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

/* ---- records ---- */

void track_log(struct track *t, int64_t step, const struct metrics *m) {
    struct record *r = xcalloc(1, sizeof *r);
    r->step = step;
    r->wall = clock_wall();
    metrics_merge(&r->metrics, m);
    console_step(t->console, step, m);
    push(t, r);
}

static void *copy(const void *p, size_t n) {
    void *q = xmalloc(n);
    if (n) memcpy(q, p, n);
    return q;
}
static float *numbers(const float *v, int64_t n) { return v ? copy(v, (size_t)n * sizeof *v) : NULL; }
static char *name(const char *s) { return xstrdup(s ? s : ""); }
static struct track_text text(struct track_text s) { return (struct track_text){copy(s.p, s.n), s.n}; }

void track_sample(struct track *t, const struct track_sample *s) {
    struct record *r = xcalloc(1, sizeof *r);
    r->kind = SAMPLE;
    r->step = s->step;
    r->sample = *s;
    r->sample.data_source = name(s->data_source);
    r->sample.prompt = text(s->prompt);
    r->sample.response = text(s->response);
    r->sample.ground_truth = text(s->ground_truth);
    r->sample.reward_status = name(s->reward_status);
    r->sample.reward_message = s->reward_message ? xstrdup(s->reward_message) : NULL;
    r->sample.finish = name(s->finish);
    r->sample.prompt_ids = copy(s->prompt_ids, (size_t)s->n_prompt * sizeof *s->prompt_ids);
    r->sample.ids = copy(s->ids, (size_t)s->n * sizeof *s->ids);
    r->sample.logp = numbers(s->logp, s->n);
    r->sample.entropy = numbers(s->entropy, s->n);
    r->sample.ref_logp = numbers(s->ref_logp, s->n);
    r->sample.advantages = numbers(s->advantages, s->n);
    r->sample.token_bytes = s->token_bytes ? copy(s->token_bytes, (size_t)s->n * sizeof *s->token_bytes) : NULL;
    r->sample.prompt_bytes = s->prompt_bytes ? copy(s->prompt_bytes, (size_t)s->n_prompt * sizeof *s->prompt_bytes) : NULL;
    r->sample.versions = s->versions ? copy(s->versions, (size_t)s->n * sizeof *s->versions) : NULL;
    r->sample.segments = s->segments ? copy(s->segments, (size_t)(2 * s->n_segments) * sizeof *s->segments) : NULL;
    r->sample.routes = s->routes ? copy(s->routes, (size_t)s->n_routes * sizeof *s->routes) : NULL;
    r->sample.episode = s->episode ? json_deep_copy(s->episode) : NULL;
    r->sample.extra = s->extra ? json_deep_copy(s->extra) : NULL; /* jansson counts are not shared between threads */
    if (s->trace.wanted) {
        r->sample.trace.sampling = json_deep_copy(s->trace.sampling);
        if (s->trace.prompt.p) r->sample.trace.prompt = text(s->trace.prompt);
        if (s->trace.response.p) r->sample.trace.response = text(s->trace.response);
    }
    push(t, r);
}

void track_generations(struct track *t, int64_t step, json_t *rows) {
    struct record *r = xcalloc(1, sizeof *r);
    r->kind = GENERATIONS;
    r->step = step;
    r->wall = clock_wall();
    r->rows = rows;
    push(t, r);
}

void track_event(struct track *t, int64_t step, const char *kind, const char *message) {
    struct record *r = xcalloc(1, sizeof *r);
    r->kind = EVENT;
    r->step = step;
    r->wall = clock_wall();
    r->event = xstrdup(kind);
    r->message = xstrdup(message);
    push(t, r);
}

/* The lock is held. Wakes a writer that waits for ever. */
static void status_changed(struct track *t) {
    if (!t->status_new) pthread_cond_broadcast(&t->changed);
    t->status_new = true;
}

void track_phase(struct track *t, int64_t step, const char *phase) {
    pthread_mutex_lock(&t->lock);
    t->status = (struct track_status){.step = step, .since = clock_wall()};
    snprintf(t->status.phase, sizeof t->status.phase, "%s", phase ? phase : "");
    status_changed(t);
    pthread_mutex_unlock(&t->lock);
}

void track_progress(struct track *t, int64_t step, const char *phase, int64_t done, int64_t total, double tok_s) {
    console_progress(t->console, step, phase, done, total, tok_s);
    pthread_mutex_lock(&t->lock);
    t->status.step = step;
    t->status.done = done;
    t->status.total = total;
    t->status.tok_s = tok_s;
    status_changed(t);
    pthread_mutex_unlock(&t->lock);
}

int track_flush(struct track *t) {
    const double deadline = clock_awake() + 30;
    int rc = 0;
    pthread_mutex_lock(&t->lock);
    const int64_t want = t->n_pushed;
    t->flush = true;
    pthread_cond_broadcast(&t->changed);
    while (t->n_written < want || t->flush) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec++;
        pthread_cond_timedwait(&t->changed, &t->lock, &until);
        if (clock_awake() < deadline) continue;
        rc =
            err_set(ERR_TIMEOUT, __FILE__, __LINE__, "%lld records were not written within 30 s", (long long)(want - t->n_written));
        break;
    }
    pthread_mutex_unlock(&t->lock);
    return rc;
}
