/* phase_watchdog.c - see phase_watchdog.h.  The watchdog thread is the one place below cmd that
 * may end the process: the thread it reports on cannot. */
#include "run/phase_watchdog.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_STAGES = 48, N_STOPS = 3 };
static const int stops[N_STOPS] = {SIGINT, SIGTERM, SIGHUP};
static const double SAME_REQUEST_S = 1;

struct phases {
    pthread_t watchdog;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stop;
    double deadline, last_beat;
    char current[48];
    double since;
    struct {
        char name[48];
        double seconds;
    } done[MAX_STAGES];
    int n_done;
    void (*follow)(void *arg, const char *name); /* NULL: none */
    void *follow_arg;
    void (*report)(void *arg, const char *name, int64_t done, int64_t total); /* NULL: none */
    void *report_arg;
    struct sigaction old[N_STOPS];
};

static volatile sig_atomic_t stop_signal, requested, stateless; /* requested: by SIGINT or SIGTERM */
static struct timespec requested_at;
static pid_t requested_by; /* 0: a terminal */
static bool hold;

/* Whether this is the previous request a second time, by another way: a signal to a whole process group or tree also reaches
 * `verlc exec`, which forwards it. */
static bool same_request(const siginfo_t *info) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const pid_t by = info->si_code == SI_USER ? info->si_pid : 0;
    const bool soon =
        (double)(now.tv_sec - requested_at.tv_sec) + 1e-9 * (double)(now.tv_nsec - requested_at.tv_nsec) < SAME_REQUEST_S;
    const bool same = requested && soon && by != requested_by && by && requested_by;
    if (!requested) {
        requested_at = now;
        requested_by = by;
    }
    return same;
}

/* A SIGHUP never ends at once: one that closes a terminal comes twice, and systemd sends one after SIGTERM. */
static void on_signal(int sig, siginfo_t *info, void *context) {
    (void)context;
    if (sig != SIGHUP && same_request(info)) return;
    if (sig != SIGHUP && requested) { /* requested twice: end now, as the default action would */
        signal(sig, SIG_DFL);
        raise(sig);
        return;
    }
    if (sig == SIGHUP && stop_signal) return;
    if (sig != SIGHUP) requested = 1;
    if (!stop_signal) stop_signal = sig;
    static const char saving[] = "\nstopping: saving the state; once more ends at once\n",
                      ending[] = "\nstopping; once more ends at once\n";
    (void)!write(STDERR_FILENO, stateless ? ending : saving, (stateless ? sizeof ending : sizeof saving) - 1);
}

void phases_stateless(void) { stateless = 1; }
int phase_stop_signal(void) { return stop_signal; }
int phase_stop_due(void) { return hold ? 0 : stop_signal; }
void phase_hold_stop(bool held) { hold = held; }
bool phase_stop_held(void) { return hold; }

void phase_ask_stop(int sig) {
    if (!stop_signal) stop_signal = sig;
}

int phase_check_stop(void) {
    const int sig = phase_stop_due();
    if (sig) FAIL(ERR_SIGNAL, "stopped by %s", phase_signal_name(sig));
    return 0;
}

void phase_progress(const struct progress *p, const char *name, int64_t done, int64_t total, double tok_s) {
    phase_beat(p->stages);
    if (p->stages->report) p->stages->report(p->stages->report_arg, name, done, total);
    if (p->track) track_progress(p->track, p->step, name, done, total, tok_s);
}

const char *phase_signal_name(int sig) { return sig == SIGINT ? "SIGINT" : sig == SIGTERM ? "SIGTERM" : "SIGHUP"; }

static void *watch(void *v) {
    struct phases *s = v;
    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        const double late = clock_awake() - s->last_beat;
        if (s->current[0] && late > s->deadline) {
            log_error("stage '%s' made no progress for %.0f s (deadline %.0f s, trainer.deadline); "
                      "ending%s",
                      s->current, late, s->deadline, stateless ? "" : "; resume continues from the last checkpoint");
            _exit(err_exit_status(ERR_TIMEOUT));
        }
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        const double left = s->current[0] ? s->deadline - late : s->deadline;
        until.tv_nsec += (long)((left < 0.5 ? (left > 0.05 ? left : 0.05) : 0.5) * 1e9);
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        pthread_cond_timedwait(&s->wake, &s->lock, &until);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

int phases_create(struct phases **out, double deadline_s) {
    struct phases *s = xcalloc(1, sizeof *s);
    s->deadline = deadline_s > 0 ? deadline_s : 600;
    s->last_beat = clock_awake();
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&s->wake, &attr);
    pthread_condattr_destroy(&attr);
    stop_signal = requested = 0;
    struct sigaction sa = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
    for (int i = 0; i < N_STOPS; i++) sigaddset(&sa.sa_mask, stops[i]);
    for (int i = 0; i < N_STOPS; i++) {
        sigaction(stops[i], NULL, &s->old[i]);
        const bool nohup = stops[i] == SIGHUP && s->old[i].sa_handler == SIG_IGN;
        if (!nohup) sigaction(stops[i], &sa, NULL);
    }
    const int e = pthread_create(&s->watchdog, NULL, watch, s);
    if (e) {
        free(s);
        FAIL(ERR_NOMEM, "cannot start the watchdog thread: %s", strerror(e));
    }
    *out = s;
    return 0;
}

void phases_destroy(struct phases *s) {
    if (!s) return;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->watchdog, NULL);
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
    for (int i = 0; i < N_STOPS; i++) sigaction(stops[i], &s->old[i], NULL);
    free(s);
}

static void close_current(struct phases *s, double now) {
    if (!s->current[0]) return;
    int i = 0;
    while (i < s->n_done && strcmp(s->done[i].name, s->current) != 0) i++;
    if (i == s->n_done && s->n_done < MAX_STAGES) {
        memcpy(s->done[i].name, s->current, sizeof s->current);
        s->done[i].seconds = 0;
        s->n_done++;
    }
    if (i < MAX_STAGES) s->done[i].seconds += now - s->since;
    s->current[0] = '\0';
}

void phase_begin(struct phases *s, const char *name) {
    const double now = clock_now();
    pthread_mutex_lock(&s->lock);
    close_current(s, now);
    snprintf(s->current, sizeof s->current, "%s", name);
    s->since = now;
    s->last_beat = clock_awake();
    pthread_mutex_unlock(&s->lock);
    if (s->follow) s->follow(s->follow_arg, name);
}

void phase_end(struct phases *s) {
    pthread_mutex_lock(&s->lock);
    close_current(s, clock_now());
    pthread_mutex_unlock(&s->lock);
    if (s->follow) s->follow(s->follow_arg, NULL);
}

void phases_follow(struct phases *s, void (*fn)(void *arg, const char *name), void *arg) {
    s->follow = fn;
    s->follow_arg = arg;
}

void phases_report(struct phases *s, void (*fn)(void *arg, const char *name, int64_t done, int64_t total), void *arg) {
    s->report = fn;
    s->report_arg = arg;
}

void phase_beat(struct phases *s) {
    pthread_mutex_lock(&s->lock);
    s->last_beat = clock_awake();
    pthread_mutex_unlock(&s->lock);
}

double phase_seconds(const struct phases *s) { return clock_now() - s->since; }

void phases_metrics(struct phases *s, struct metrics *m) {
    for (int i = 0; i < s->n_done; i++) metrics_set(m, s->done[i].seconds, "timing_s/%s", s->done[i].name);
    s->n_done = 0;
}
