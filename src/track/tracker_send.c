/* tracker_send.c - records to a tracker's client: a thread sends them through a helper process
 * (python/verlc_helpers/tracker.py), which has the client.
 *
 * Invariant: after the end of a run the thread ends within the time that client->end_by and give_up say, whatever the client does:
 * what it has not taken by then stays in the queue. */
#include "track/tracker_client_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PAUSE_S 1.0      /* between requests, so that quick steps share one */
#define MAX_DELAY_S 60.0 /* between attempts while it is down */
#define CALL_S 600.0     /* one request; the first may make a database, which breaks if it is cut off */
#define START_S 300.0    /* interpreter and imports, behind everything else on the machine */
#define SLICE_S 0.2      /* how soon the end of the run is seen within a request */
#define CLOSE_S 10.0     /* of the time after a run's end: left for reporting how it ended */
#define SAY_FIRST_S 2.0  /* of a wait for it, then every */
#define SAY_AGAIN_S 10.0
enum {
    END_TRIES = 2, /* after the end of a run */
    GROWTH = 4,    /* of a request after one that worked */
};

int client__start_helper(struct client *c, const struct track_args *a) {
    json_t *init = json_pack("{s:s, s:s, s:s, s:O?, s:b, s:s, s:s?, s:s?, s:s?, s:s}", "tracker", c->name, "project", a->project,
                             "experiment", a->experiment, "config", (json_t *)(uintptr_t)a->config, "has_run",
                             a->loggers->client[TRACK_MLFLOW], "run_dir", a->run_dir, "proxy", a->wandb_proxy, "trace_project",
                             a->trace_project, "trace_experiment", a->trace_experiment, "version", VERLC_VERSION);
    const struct helper_args h = {.module = "verlc_helpers.tracker", .init = init, .memory_bytes = -1, .start_timeout_s = START_S};
    const int rc = helper_pool_create(&c->helper, &h, &(struct helper_pool_args){.n = 1});
    json_decref(init);
    return rc;
}

/* True: the run is over, and so is the time for remaining records. */
static bool is_over(struct client *c) {
    pthread_mutex_lock(&c->lock);
    const bool over = c->ending && clock_awake() >= c->end_by;
    pthread_mutex_unlock(&c->lock);
    return over;
}

/* True: the remaining time after the run's end is for reporting how it ended. */
static bool is_late(struct client *c) {
    pthread_mutex_lock(&c->lock);
    const bool late = c->ending && clock_awake() >= c->give_up - CLOSE_S;
    pthread_mutex_unlock(&c->lock);
    return late;
}

/* ---- one request ---- */

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

static void say_refused(struct client *c, const json_t *refused) {
    if (json_array_size(refused) == 0) return;
    if (c->n_refused == 0)
        log_warn("tracker %s does not take %s; such records are left out", c->name, json_string_value(json_array_get(refused, 0)));
    c->n_refused += (int64_t)json_array_size(refused);
}

/* The client has accepted the first n records of the batch. */
static void are_sent(struct client *c, const struct client_batch *b, int64_t n) {
    if (n == 0) return;
    pthread_mutex_lock(&c->lock);
    c->at = b->end[n - 1];
    c->n_unsent -= n;
    pthread_mutex_unlock(&c->lock);
    c->sent = b->seq[n - 1];
}

static int exchange(struct client *c, const struct client_batch *b, const char *how, double ended) {
    json_t *reply = NULL;
    json_t *request = json_pack("{s:O?, s:o, s:s?, s:f}", "run", c->run, "records", b->records, "finish", how, "ended", ended);
    int64_t done = 0;
    TRY(call(c, request, &reply));
    json_t *run = json_object_get(reply, "run");
    const char *error = json_string_value(json_object_get(reply, "error"));
    const char *hint = json_string_value(json_object_get(reply, "hint"));
    if (json_i64(reply, "done", &done, c->name) < 0 || done < 0 || done > b->n) done = 0;
    if (json_is_object(run)) {
        json_decref(c->run);
        c->run = json_incref(run);
    }
    are_sent(c, b, done);
    if (how && !error) {
        json_decref(c->end);
        c->end = json_string(how);
    }
    client__save_state(c);
    say_refused(c, json_object_get(reply, "refused"));
    if (hint) log_info("tracker %s: %s", c->name, hint);
    const int rc = error ? err_set(ERR_HELPER, __FILE__, __LINE__, "%s", error) : client__compact(c);
    json_decref(reply);
    return rc;
}

int client__exchange(struct client *c, const struct client_batch *b, const char *how, double ended) {
    const int rc = exchange(c, b, how, ended);
    c->most = rc < 0 ? 1 : c->most * GROWTH < CLIENT_BATCH_RECORDS ? c->most * GROWTH : CLIENT_BATCH_RECORDS;
    return rc;
}

/* ---- the thread ---- */

static void has_failed(struct client *c, const char *why) {
    c->delay = c->failing ? fmin(2 * c->delay, MAX_DELAY_S) : 1;
    if (!c->failing) log_warn("tracker %s fails: %s; the run goes on, and what is not sent is kept in %s", c->name, why, c->path);
    c->failing = true;
}

static void has_worked(struct client *c) {
    pthread_mutex_lock(&c->lock);
    c->answered = true;
    c->end_by = fmax(c->end_by, fmin(clock_awake() + c->more, c->give_up));
    pthread_mutex_unlock(&c->lock);
    if (c->failing) log_info("tracker %s works again; what was kept is sent now", c->name);
    c->failing = false;
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

/* How the run ended, where the client still answers. */
static void say_end(struct client *c) {
    int rc = 0;
    for (int tries = 0; tries < END_TRIES && !c->failing && !is_over(c); tries++) {
        const struct client_batch none = {.records = json_array()};
        rc = client__exchange(c, &none, c->how, 0);
        if (rc == 0) return;
    }
    if (rc < 0) log_warn("tracker %s did not close its run: %s", c->name, err_msg());
}

void *client__send_loop(void *v) {
    struct client *c = v;
    struct client_batch *b = xmalloc(sizeof *b);
    bool on = true, open = false; /* the run goes on; the client has opened it */
    int n_failed = 0;             /* after its end */
    while (!is_over(c) && !(open && is_late(c))) {
        if (open) client__next_batch(c, b);
        else *b = (struct client_batch){.records = json_array()};
        if (open && b->n == 0) {
            json_decref(b->records);
            if (!on) break;
            on = wait_for(c, -1);
        } else if (client__exchange(c, b, NULL, 0) == 0) {
            has_worked(c);
            if (on && open) on = wait_for(c, PAUSE_S);
            open = true;
        } else {
            has_failed(c, err_msg());
            if (!on && ++n_failed == END_TRIES) break;
            if (on) on = wait_for(c, c->delay);
            else nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        }
    }
    free(b);
    say_end(c);
    helper_pool_destroy(c->helper); /* by the thread that started its process */
    pthread_mutex_lock(&c->lock);
    c->helper = NULL;
    c->finished = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* Under the lock. */
static void say_waiting(const struct client *c) {
    log_info(
        "waiting for tracker %s: %s, %lld records to send; for %.0f s, longer while it takes them. Ctrl-C twice ends at once, and "
        "keeps what is not sent for 'verlc trackers sync %s'",
        c->name, c->answered ? "sending" : "its client is starting", (long long)c->n_unsent, fmax(c->end_by - clock_awake(), 0),
        c->run_dir);
}

void client__wait(struct client *c) {
    double say_at = clock_now() + SAY_FIRST_S;
    pthread_mutex_lock(&c->lock);
    while (!c->finished) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec++;
        pthread_cond_timedwait(&c->changed, &c->lock, &until);
        if (c->finished || clock_now() < say_at) continue;
        say_waiting(c);
        say_at = clock_now() + SAY_AGAIN_S;
    }
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->sender, NULL);
}
