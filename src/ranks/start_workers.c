/* start_workers.c - the controller: starts the workers of this host, watches them and prints what they print, and calls them.
 * A thread reads the workers' output and detects at once when one ends. The group then fails with its name.
 * Invariant: a worker runs below a reaper (base/process.h), which kills it and its descendants when the controller has ended. */
#include "ranks/start_workers_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "base/process.h"
#include "ranks/launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WATCH_MS = 50, LINE_BYTES = 4096 };
/* To send a call to a rank that takes its bytes. */
#define SEND_S 600.0
#define END_S 5.0

extern char **environ;

struct worker {
    int rank, output; /* a pipe's end; -1: closed */
    struct process process;
    pid_t pid;       /* process.pid, which stays */
    struct buf line; /* of its output, not complete yet */
    char last[512];  /* the last complete one; under `lock`, since the watching thread writes it */
    pthread_mutex_t lock;
    bool reported;       /* that it has ended */
    double stopped_from; /* of clock_awake, seen so before it had joined; 0: it runs */
};
struct workers {
    struct coordinator *coordinator;
    int size, n_workers;
    int local_rank, local_size; /* of the first worker, and how many share the cores */
    struct worker *workers;     /* of this host */
    struct helper *ray;         /* has the workers of other nodes; NULL: no Ray */
    const char *dir;            /* where a rendezvous file is to be removed; NULL: none */
    pthread_t thread;
    bool threaded;
    pthread_mutex_t lock;
    bool ending; /* under lock: the workers are to end, and the coordinator is closed */
    int lost;    /* the rank that ended before it had joined; -1: none */
    atomic_bool stop;
};

bool workers_started_this(const struct launch *l) { return l->by && (l->rank > 0 || strcmp(l->by, "verlc") == 0); }
int workers_size(const struct workers *c) { return c->size; }
struct coordinator *workers_coordinator(struct workers *c) {
    return c->coordinator;
}

/* ---- what a worker prints ---- */

static void print_line(struct worker *w) {
    pthread_mutex_lock(&w->lock);
    snprintf(w->last, sizeof w->last, "%s", w->line.p ? w->line.p : "");
    pthread_mutex_unlock(&w->lock);
    log_child("[rank %d] %s", w->rank, w->line.p ? w->line.p : "");
    buf_reset(&w->line);
}

/* Reads the available output; false: the worker has closed its end. */
static bool read_output(struct worker *w) {
    char bytes[LINE_BYTES];
    ssize_t n;
    while ((n = read(w->output, bytes, sizeof bytes)) > 0)
        for (ssize_t i = 0; i < n; i++) {
            if (bytes[i] == '\n' || w->line.n >= LINE_BYTES) print_line(w);
            if (bytes[i] != '\n' && bytes[i] != '\0') CHECK(buf_addc(&w->line, bytes[i]) >= 0);
        }
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (w->line.n) print_line(w);
    close(w->output);
    w->output = -1;
    return false;
}

/* How it ended, while the process is not reaped: "ended with exit code 4". */
static bool has_ended(const struct worker *w, char *how, size_t n) {
    siginfo_t si = {0};
    if (w->pid <= 0 || waitid(P_PID, (id_t)w->pid, &si, WEXITED | WNOHANG | WNOWAIT) < 0 || si.si_pid == 0) return false;
    if (si.si_code == CLD_EXITED) snprintf(how, n, "ended with exit code %d", si.si_status);
    else snprintf(how, n, "ended by signal %d (%s)", si.si_status, strsignal(si.si_status));
    return true;
}

/* Whether it has been stopped (SIGSTOP, a debugger) for as long as a rank that has joined may be silent. */
static bool stays_stopped(struct worker *w) {
    const bool stopped = process_suspended(&w->process);
    if (!stopped) w->stopped_from = 0;
    else if (w->stopped_from == 0) w->stopped_from = clock_awake();
    return stopped && clock_awake() - w->stopped_from > COMM_SILENCE_S;
}

static void watch_worker(struct workers *c, struct worker *w) {
    char how[64], state[256];
    if (w->reported || !has_ended(w, how, sizeof how)) return;
    if (w->output >= 0) (void)read_output(w);
    w->reported = true;
    pthread_mutex_lock(&c->lock);
    if (!c->ending) {
        coordinator_state(c->coordinator, w->rank, state, sizeof state);
        coordinator_fail(c->coordinator, w->rank, "%s: the process %s%s%s", state, how, w->last[0] ? "; its last line: " : "",
                         w->last);
    }
    pthread_mutex_unlock(&c->lock);
}

static void *watch(void *arg) {
    struct workers *c = arg;
    struct pollfd *fds = xcalloc((size_t)c->n_workers, sizeof *fds);
    while (!atomic_load(&c->stop)) {
        for (int i = 0; i < c->n_workers; i++) fds[i] = (struct pollfd){c->workers[i].output, POLLIN, 0};
        poll(fds, (nfds_t)c->n_workers, WATCH_MS);
        for (int i = 0; i < c->n_workers; i++) {
            if (fds[i].revents) (void)read_output(&c->workers[i]);
            watch_worker(c, &c->workers[i]);
        }
    }
    free(fds);
    return NULL;
}

/* ---- starting ---- */

static char **worker_env(const struct workers *c, const struct worker *w, int local_rank) {
    static const char *const own[] = {"VERLC_RANK=", "VERLC_RANKS=",          "VERLC_LOCAL_RANK=", "VERLC_LOCAL_RANKS=",
                                      "VERLC_NODE=", WORKERS__CONTROLLER "=", WORKERS__KEY "=",    "VERLC_COLOR="};
    const struct comm_where *where = coordinator_where(c->coordinator);
    size_t n = 0, k = 0;
    while (environ[n]) n++;
    char **env = xcalloc(n + 8, sizeof *env);
    for (size_t i = 0; i < n; i++) {
        bool ours = false;
        for (size_t o = 0; o < sizeof own / sizeof *own; o++) ours |= strncmp(environ[i], own[o], strlen(own[o])) == 0;
        if (!ours) env[k++] = xstrdup(environ[i]);
    }
    env[k++] = xstrdup("VERLC_COLOR=never"); /* its lines come through this process, which makes control characters visible */
    env[k++] = xasprintf("VERLC_RANK=%d", w->rank);
    env[k++] = xasprintf("VERLC_RANKS=%d", c->size);
    env[k++] = xasprintf("VERLC_LOCAL_RANK=%d", c->local_rank + local_rank);
    env[k++] = xasprintf("VERLC_LOCAL_RANKS=%d", c->local_size);
    env[k++] = xasprintf(WORKERS__CONTROLLER "=%s", where->address);
    env[k++] = xasprintf(WORKERS__KEY "=%s", where->key);
    return env;
}

/* This program's path, and its arguments; NULL at the end. One allocation of each string. */
static int worker_argv(bool own_arguments, char ***out) {
    struct buf line = {0};
    char **argv = NULL, *program = realpath("/proc/self/exe", NULL);
    size_t n = 0;
    if (!program) FAIL(ERR_IO, "/proc/self/exe: %s", strerror(errno));
    if (own_arguments) {
        const int rc = file_read(&line, "/proc/self/cmdline", (size_t)64 << 20);
        if (rc < 0) free(program);
        TRY(rc);
    } else {
        const char text[] = "verlc\0worker";
        CHECK(buf_add(&line, text, sizeof text) >= 0);
    }
    for (size_t i = 0; i < line.n; i++) n += line.p[i] == '\0';
    argv = xcalloc(n + 2, sizeof *argv);
    n = 0;
    for (size_t i = 0; i < line.n; i += strlen(line.p + i) + 1) argv[n++] = i ? xstrdup(line.p + i) : program;
    buf_free(&line);
    *out = argv;
    return 0;
}

static void free_strings(char **list) {
    for (char **s = list; s && *s; s++) free(*s);
    free(list);
}

static int start_worker(const struct workers *c, struct worker *w, char *const *argv, int local_rank) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) FAIL(ERR_IO, "a pipe for rank %d's output: %s", w->rank, strerror(errno));
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    char **env = worker_env(c, w, local_rank);
    const int fds[] = {-1, ends[1], ends[1]};
    const int rc = process_start(
        &w->process,
        &(struct process_args){.argv = (const char *const *)argv, .env = env, .fds = fds, .n_fds = 3, .memory_bytes = -1});
    close(ends[1]);
    w->output = ends[0];
    w->pid = rc < 0 ? -1 : w->process.pid;
    free_strings(env);
    TRY(rc);
    return 0;
}

static int check_workers(void *arg) {
    struct workers *c = arg;
    char how[64], last[sizeof c->workers->last];
    for (int i = 0; i < c->n_workers; i++) {
        struct worker *w = &c->workers[i];
        if (stays_stopped(w)) {
            c->lost = w->rank;
            FAIL(ERR_RANK, "rank %d has been suspended for %.0f s (SIGSTOP, a debugger) and has not joined", w->rank,
                 COMM_SILENCE_S);
        }
        if (!has_ended(w, how, sizeof how)) continue;
        usleep(2 * WATCH_MS * 1000); /* its last line may still come */
        pthread_mutex_lock(&w->lock);
        snprintf(last, sizeof last, "%s", w->last);
        pthread_mutex_unlock(&w->lock);
        c->lost = w->rank;
        FAIL(ERR_RANK, "rank %d %s before it had joined%s%s", w->rank, how, last[0] ? ": " : "", last);
    }
    return 0;
}

static int open_hub(struct workers *c, const struct workers_args *a, const struct launch *l) {
    const char *key = getenv(WORKERS__KEY), *listen = a->controller;
    const bool launched = c->size > c->n_workers;
    if (!listen && launched && (a->ray_nodes || l->local_size != l->size)) listen = "*";
    TRY(coordinator_open(
        &c->coordinator,
        &(struct coordinator_args){
            .size = c->size, .listen = listen, .key = a->controller ? key : NULL, .start_s = a->start_s, .deadline_s = SEND_S}));
    if (!launched || a->ray_nodes || (a->controller && key)) return 0;
    TRY(file_mkdirs(a->dir));
    c->dir = a->dir;
    _Static_assert(sizeof l->job <= COMM_JOB, "what a launcher's job is called goes into the file");
    TRY(comm_rendezvous_write(a->dir, coordinator_where(c->coordinator), l->job));
    return 0;
}

int workers_open(struct workers **out, const struct workers_args *a, const struct launch *l) {
    if (workers_started_this(l)) FAIL(ERR_INTERNAL, "a worker (%s, rank %d) starts no workers", l->by, l->rank);
    struct workers *c = xcalloc(1, sizeof *c);
    const bool launched = l->by && l->size > 1;
    char **argv = NULL;
    int rc;
    c->size = launched ? l->size : a->ranks;
    c->n_workers = launched ? 1 : a->ray_nodes ? 0 : a->ranks;
    const bool share = launched && l->local_size > 1 && worker_process__unbound();
    c->local_rank = share ? l->local_rank : 0;
    c->local_size = share ? l->local_size : c->n_workers;
    pthread_mutex_init(&c->lock, NULL);
    c->lost = -1;
    c->workers = xcalloc((size_t)c->n_workers, sizeof *c->workers);
    for (int i = 0; i < c->n_workers; i++)
        c->workers[i] = (struct worker){.rank = i, .output = -1, .process = {-1, -1}, .lock = PTHREAD_MUTEX_INITIALIZER};
    TRYG(open_hub(c, a, l), fail);
    TRYG(worker_argv(a->own_arguments, &argv), fail);
    for (int i = 0; i < c->n_workers; i++) TRYG(start_worker(c, &c->workers[i], argv, i), fail);
    if (a->ray_nodes) TRYG(ray_placement__start(&c->ray, c->coordinator, a, argv), fail);
    rc = pthread_create(&c->thread, NULL, watch, c);
    if (rc != 0) FAILG(fail, ERR_NOMEM, "no thread for the workers: %s", strerror(rc));
    c->threaded = true;
    TRYG(coordinator_join(c->coordinator, check_workers, c), fail);
    if (c->dir) comm_rendezvous_remove(c->dir);
    c->dir = NULL;
    *out = c;
    free_strings(argv);
    return 0;
fail:
    workers_close(c, false);
    free_strings(argv);
    return rc;
}

static int failed = -1;

int workers_failed_rank(void) { return failed; }

/* A process that has ended by itself comes before a failure that others report; of several that one which was found first, since
 * the others may have ended because of it. */
static int find_failed(const struct workers *c) {
    const int named = c->lost < 0 && c->coordinator ? coordinator_failed_rank(c->coordinator) : c->lost;
    int ended = -1;
    char how[64];
    for (int i = 0; i < c->n_workers; i++) {
        const int rank = c->workers[i].rank;
        if ((ended < 0 || rank == named) && has_ended(&c->workers[i], how, sizeof how)) ended = rank;
    }
    return ended < 0 ? named : ended;
}

void workers_close(struct workers *c, bool end) {
    struct err_saved e;
    if (!c) return;
    err_save(&e);
    failed = end ? -1 : find_failed(c);
    pthread_mutex_lock(&c->lock);
    c->ending = true;
    pthread_mutex_unlock(&c->lock);
    if (c->dir) comm_rendezvous_remove(c->dir);
    if (end) coordinator_close(c->coordinator, true); /* its workers end by themselves then */
    for (int i = 0; i < c->n_workers; i++) process_stop(&c->workers[i].process, end ? END_S : 0, NULL, 0);
    if (!end) coordinator_close(c->coordinator, false);
    helper_destroy(c->ray);
    atomic_store(&c->stop, true);
    if (c->threaded) pthread_join(c->thread, NULL);
    for (int i = 0; i < c->n_workers; i++) {
        if (c->workers[i].output >= 0 && read_output(&c->workers[i])) close(c->workers[i].output);
        buf_free(&c->workers[i].line);
    }
    pthread_mutex_destroy(&c->lock);
    free(c->workers);
    free(c);
    err_restore(&e);
}

int workers_call_all(struct workers *c, const struct coordinator_call_args *a, struct coordinator_reply *replies) {
    TRY(coordinator_call_ranks(c->coordinator, 0, workers_size(c), a));
    TRY(coordinator_collect(c->coordinator, replies));
    return 0;
}
