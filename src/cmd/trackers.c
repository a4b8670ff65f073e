/* trackers.c - verlc trackers: what a run has not sent to its trackers, and sends it without training. */
#include "cmd/cmd.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "track/run_lock.h"
#include "track/track.h"
#include "view/run_reader.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

#define SAY_S 2.0 /* between two lines of progress */

#define RUN_HELP "RUN is the run's directory (trainer.default_local_dir)."

/* ---- the run ---- */

struct over {
    struct run_reader *reader;
    struct run_meta meta;
    const char *dir;
    const char *how; /* how it ended */
    double ended;    /* wall clock */
    struct track_loggers loggers;
    struct track_args track;
    struct track_pending queues[TRACK_N_QUEUES];
    int n;
};

static const char *key(const json_t *config, const char *a, const char *b, const char *c, const char *d) {
    const char *const path[] = {a, b, c, d};
    for (int i = 0; i < 4 && path[i]; i++) config = json_object_get(config, path[i]);
    return json_string_value(config);
}

/* How the run ended, as it would have been reported to its trackers; a run that could not report it was killed. */
static int how_it_ended(struct over *o) {
    struct run_status s;
    const char *exit = o->meta.exit ? o->meta.exit : "killed";
    o->how = strncmp(exit, "done", 4) == 0 ? "done" : strncmp(exit, "killed", 6) == 0 ? "killed" : "failed";
    o->ended = o->meta.ended;
    if (o->ended > 0) return 0;
    TRY(run_reader_status(o->reader, &s));
    o->ended = s.known ? s.wall : 0;
    return 0;
}

static int open_run(struct over *o, const char *dir) {
    TRY(run_reader_open(&o->reader, dir));
    o->dir = run_reader_dir(o->reader);
    TRY(run_reader_meta(o->reader, &o->meta));
    TRY(how_it_ended(o));
    o->n = track_pending(o->queues, o->dir);
    TRY(o->n);
    const json_t *config = o->meta.config;
    for (int i = 0; i < o->n; i++) o->loggers.client[TRACK_MLFLOW] |= strcmp(o->queues[i].name, "mlflow") == 0;
    o->track = (struct track_args){.loggers = &o->loggers,
                                   .project = o->meta.project,
                                   .experiment = o->meta.experiment,
                                   .run_dir = o->dir,
                                   .config = config,
                                   .wandb_proxy = key(config, "trainer", "wandb_proxy", NULL, NULL),
                                   .trace_project = key(config, "actor_rollout_ref", "rollout", "trace", "project_name"),
                                   .trace_experiment = key(config, "actor_rollout_ref", "rollout", "trace", "experiment_name")};
    return 0;
}

static void close_run(struct over *o) {
    run_meta_free(&o->meta);
    run_reader_close(o->reader);
}

static bool is_due(const struct track_pending *p) { return p->n_records > 0 || p->open; }

/* ---- the list ---- */

static int print(const struct buf *b) { return cmd_print_line(b->p ? b->p : "", b->n ? b->n : 0); }

static int add_steps(struct buf *line, const struct track_pending *p) {
    if (p->n_records == 0) return 0;
    TRY(buf_addf(line, " of step %lld", (long long)p->first_step));
    return p->last_step > p->first_step ? buf_addf(line, " to %lld", (long long)p->last_step) : 0;
}

static int print_queue(const struct track_pending *p) {
    struct buf line = {0};
    int rc = 0;
    TRYG(buf_addf(&line, "%s: %lld sent, %lld to send", p->name, (long long)p->sent, (long long)p->n_records), out);
    TRYG(add_steps(&line, p), out);
    if (p->open) TRYG(buf_addf(&line, "; its run is to be ended"), out);
    else if (p->end[0]) TRYG(buf_addf(&line, "; its run has ended as %s", p->end), out);
    if (p->id[0]) TRYG(buf_addf(&line, " (%s)", p->id), out);
    TRYG(print(&line), out);
out:
    buf_free(&line);
    return rc;
}

static int print_json(const struct over *o, bool held) {
    struct buf line = {0};
    json_t *list = json_array();
    for (int i = 0; i < o->n; i++) {
        const struct track_pending *p = &o->queues[i];
        json_t *q = json_pack("{s:s, s:I, s:I, s:I, s:I, s:b}", "tracker", p->name, "sent", (json_int_t)p->sent, "unsent",
                              (json_int_t)p->n_records, "metrics", (json_int_t)p->n_metrics, "bytes", (json_int_t)p->bytes, "open",
                              (int)p->open);
        json_object_set_new(q, "run", p->id[0] ? json_string(p->id) : json_null());
        json_object_set_new(q, "end", p->end[0] ? json_string(p->end) : json_null());
        if (p->n_records > 0) {
            json_object_set_new(q, "first_step", json_integer((json_int_t)p->first_step));
            json_object_set_new(q, "last_step", json_integer((json_int_t)p->last_step));
        }
        json_array_append_new(list, q);
    }
    json_t *all = json_pack("{s:s, s:s?, s:o}", "run", o->dir, "ended", held ? NULL : o->how, "trackers", list);
    int rc = json_dump_line(&line, all);
    if (rc == 0) rc = print(&line);
    json_decref(all);
    buf_free(&line);
    return rc;
}

static int list(const struct over *o, bool json) {
    struct run_holder h;
    run_lock_look(&h, o->dir);
    if (json) return print_json(o, h.state == RUN_HELD);
    if (o->n == 0) log_info("%s: no tracker with a client (mlflow, wandb, swanlab, clearml, trackio)", o->dir);
    bool due = false;
    for (int i = 0; i < o->n; i++) {
        TRY(print_queue(&o->queues[i]));
        due |= is_due(&o->queues[i]);
    }
    if (h.state == RUN_HELD) log_info("the run goes on (pid %lld on %s) and sends them itself", (long long)h.pid, h.host);
    else if (due) log_info("'verlc trackers sync %s' sends them", o->dir);
    return 0;
}

static int cmd_trackers_list(int argc, char **argv) {
    const char *dir = NULL;
    bool json = false;
    int n = 0;
    const struct cmd_opt opts[] = {{"--json", CMD_FLAG, &json, NULL, "JSON, a line"}};
    struct cmd_spec spec =
        CMD_SPEC(opts, "verlc trackers RUN [--json]\n       verlc trackers sync RUN [options]",
                 "What a run has sent to its trackers with a client in Python, and what is kept in RUN/trackers.\n"
                 "sync sends it ('verlc trackers sync --help'). " RUN_HELP " docs/trackers.md has more.");
    spec.operands = &dir;
    spec.max_operands = 1;
    spec.n_operands = &n;
    struct over o = {0};
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (n == 0) FAIL(ERR_INVAL, "trackers: which run? usage: verlc trackers RUN, or verlc trackers sync RUN");
    rc = open_run(&o, dir);
    if (rc == 0) rc = list(&o, json);
    close_run(&o);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : cmd_flush();
}

/* ---- sync ---- */

static volatile sig_atomic_t stop; /* the signal that requested it */

/* The request under way is waited for, so that what the client has accepted is recorded; a second signal ends at once. */
static void on_stop(int sig) {
    stop = sig;
    signal(sig, SIG_DFL);
}

struct progress_line {
    double say_at;
};
static int report_progress(void *arg, const char *name, int64_t done, int64_t total) {
    struct progress_line *p = arg;
    if (stop) FAIL(ERR_SIGNAL, "stopped by %s", strsignal(stop));
    if (done == total || clock_now() < p->say_at) return 0;
    log_info("tracker %s: %lld of %lld records sent", name, (long long)done, (long long)total);
    p->say_at = clock_now() + SAY_S;
    return 0;
}

static int sync_one(const struct over *o, const struct track_pending *p) {
    struct progress_line line = {clock_now() + SAY_S};
    struct buf text = {0};
    const struct track_sync_args a = {
        .track = &o->track, .how = o->how, .ended = o->ended, .progress = report_progress, .arg = &line};
    TRY(track_client_usable(p->name));
    log_info("tracker %s: sending %lld records", p->name, (long long)p->n_records);
    TRY(track_sync(p->name, &a));
    int rc = buf_addf(&text, "%s: %lld records sent", p->name, (long long)p->n_records);
    if (rc == 0 && strcmp(p->name, "mlflow_traces") != 0) rc = buf_addf(&text, "; its run has ended as %s", o->how);
    if (rc == 0) rc = print(&text);
    buf_free(&text);
    return rc < 0 ? rc : cmd_flush();
}

/* Each tracker by itself: one that fails keeps no other from being sent. The first failure is the result. */
static int sync_all(const struct over *o, const char *only) {
    struct err_saved why;
    int rc = 0, n_due = 0;
    for (int i = 0; i < o->n; i++) {
        if ((only && strcmp(only, o->queues[i].name) != 0) || !is_due(&o->queues[i])) continue;
        n_due++;
        const int one = sync_one(o, &o->queues[i]);
        if (one == ERR_IO || one == ERR_SIGNAL) return one;
        if (one < 0 && rc < 0) log_error("%s", err_msg());
        if (one < 0 && rc == 0) {
            rc = one;
            err_save(&why);
        }
    }
    if (n_due == 0) log_info("%s: nothing is left to send", o->dir);
    if (rc < 0) err_restore(&why);
    return rc;
}

static int check_only(const struct over *o, const char *only) {
    struct buf names = {0};
    int rc = 0;
    for (int i = 0; i < o->n; i++) {
        if (strcmp(only, o->queues[i].name) == 0) goto out;
        TRYG(buf_addf(&names, "%s%s", i ? ", " : "", o->queues[i].name), out);
    }
    rc = err_set(ERR_INVAL, __FILE__, __LINE__, "--only %s: %s has %s", only, o->dir,
                 names.n ? names.p : "no tracker with a client");
out:
    buf_free(&names);
    return rc;
}

static int cmd_trackers_sync(int argc, char **argv) {
    const char *dir = NULL, *only = NULL;
    bool dry = false;
    int n = 0;
    const struct cmd_opt opts[] = {
        {"--only", CMD_STR, &only, "NAME", "this tracker alone: mlflow, mlflow_traces, wandb, swanlab, clearml, trackio"},
        {"--dry-run", CMD_FLAG, &dry, NULL, "says what would be sent, and sends nothing"}};
    struct cmd_spec spec =
        CMD_SPEC(opts, "verlc trackers sync RUN [--only NAME] [--dry-run]",
                 "Sends what a run that is over has not sent to its trackers, each record once, into the same run of\n"
                 "the tracker, and ends that as the run has ended. Trains nothing. " RUN_HELP "\n"
                 "Exit status: 0 all is sent; 1 a tracker failed, what it has not taken stays; 4 the run goes on.");
    spec.operands = &dir;
    spec.max_operands = 1;
    spec.n_operands = &n;
    struct over o = {0};
    struct run_lock *lock = NULL;
    int rc = cmd_parse(&spec, argc, argv);
    if (rc != 0) return rc < 0 ? rc : 0;
    if (n == 0) FAIL(ERR_INVAL, "trackers sync: which run? usage: %s", spec.usage);
    struct run_reader *there = NULL;
    TRY(run_reader_open(&there, dir)); /* before the lock, which would make the directory */
    rc = dry ? 0 : run_lock_take(&lock, "RUN", run_reader_dir(there));
    run_reader_close(there);
    if (rc == 0) rc = open_run(&o, dir);
    if (rc == 0 && only) rc = check_only(&o, only);
    if (!dry) signal(SIGINT, on_stop);
    if (!dry) signal(SIGTERM, on_stop);
    if (rc == 0) rc = dry ? list(&o, false) : sync_all(&o, only);
    close_run(&o);
    run_lock_release(lock);
    if (rc == ERR_SIGNAL) log_error("%s", err_msg());
    if (rc == ERR_SIGNAL) return 128 + stop;
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : cmd_flush();
}

int cmd_trackers(int argc, char **argv) {
    if (argc >= 2 && strcmp(argv[1], "sync") == 0) return cmd_trackers_sync(argc - 1, argv + 1);
    return cmd_trackers_list(argc, argv);
}
