/* helper_restart.c - a helper's process from its start to its end: what it prints, how it is ended, what is said of its death, and
 * its start again by the next request.
 * Knows no frames.
 * Invariant: after an end no request is pending, and nothing of the dead process is read any more. */
#include "helper/helper_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "base/encoding/utf8.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINES_A_SECOND = 20 };

/* --- what it prints --- */

static void say_kept(struct helper *h) {
    if (h->n_kept)
        log_info("%s: %lld more lines (at most %d a second are shown; VERL_LOGGING_LEVEL=DEBUG shows all)", h->a.log_as,
                 (long long)h->n_kept, LINES_A_SECOND);
    h->n_kept = 0;
}

/* A line that it printed, to the log; one that prints without end must not fill the disk. */
static void show_line(struct helper *h) {
    const double now = clock_now();
    if (!h->a.log_as || log_level() == LOG_DEBUG) {
        log_debug("%s: %s", h->a.module, h->line);
        return;
    }
    if (now - h->second >= 1) {
        say_kept(h);
        h->second = now;
        h->n_shown = 0;
    }
    if (h->n_shown++ < LINES_A_SECOND) log_info("%s: %s", h->a.log_as, h->line);
    else h->n_kept++;
}

static void take_line(struct helper *h) {
    h->n_line = utf8_cut(h->line, h->n_line); /* a long line was cut */
    while (h->n_line && (h->line[h->n_line - 1] == ' ' || h->line[h->n_line - 1] == '\r')) h->n_line--;
    if (h->n_line == 0) return;
    h->line[h->n_line] = '\0';
    memcpy(h->last_line, h->line, h->n_line + 1);
    show_line(h);
    h->n_line = 0;
}

void helper__drain_output(struct helper *h) {
    char chunk[4096];
    if (h->proc.err < 0) return;
    for (int rounds = 0; rounds < 1024; rounds++) { /* a helper that prints without end must not hold us */
        const ssize_t n = read(h->proc.err, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return;
        for (ssize_t i = 0; i < n; i++) {
            if (chunk[i] == '\n') take_line(h);
            else if (h->n_line < HELPER__LINE_MAX - 1) h->line[h->n_line++] = (unsigned char)chunk[i] < 0x20 ? ' ' : chunk[i];
        }
    }
}

/* --- start and end --- */

/* Ends the process and forgets every pending request. */
static void stop(struct helper *h, double grace_s, char *how, size_t n) {
    helper__drain_output(h);
    /* the last output comes after the socket's end: wait for the exit before the last read */
    for (const double until = clock_awake() + grace_s;
         h->proc.process.pid > 0 && !process_exited(&h->proc.process) && clock_awake() < until;)
        poll(NULL, 0, 5);
    helper__drain_output(h);
    take_line(h);
    helper__stop(&h->proc, 0, how, n);
    buf_free(&h->out);
    buf_free(&h->in);
    h->out_pos = 0;
    h->ready = false;
    h->last_id = h->n_pending = 0;
    h->n_line = 0;
}

void helper__kill(struct helper *h) { stop(h, 0, NULL, 0); }

void helper__end(struct helper *h, double grace_s) {
    helper__drain_output(h);
    helper__stop(&h->proc, grace_s, NULL, 0);
    say_kept(h);
}

static int start(struct helper *h) {
    const struct helper__spawn_args a = {h->python, h->dir, h->a.module, h->a.memory_bytes};
    h->last_line[0] = '\0';
    TRY(helper__spawn(&h->proc, &a));
    h->start_deadline = clock_awake() + h->a.start_timeout_s;
    int rc = helper__queue_frame(h, "init", h->a.init, 0, 0);
    if (rc < 0) helper__kill(h);
    return rc;
}

int helper__ensure_started(struct helper *h) {
    if (h->proc.process.pid > 0 && helper_pending(h) == 0 && process_exited(&h->proc.process)) {
        log_debug("helper %s ended between two requests; starting it again", h->a.module);
        helper__kill(h);
    }
    return h->proc.process.pid > 0 ? 0 : start(h);
}

/* --- messages --- */

/* "No module named 'pyarrow'" as the last line of a failed start: name the command that fixes it. */
static bool missing_package(const struct helper *h, char name[64]) {
    const char *s = strstr(h->last_line, "No module named '");
    if (!s) return false;
    s += strlen("No module named '");
    const size_t n = strcspn(s, "'.");
    if (n == 0 || n >= 64) return false;
    memcpy(name, s, n);
    name[n] = '\0';
    return true;
}

static int say_missing(const struct helper *h, const char *package) {
    if (strcmp(package, "verlc_helpers") == 0)
        FAIL(ERR_HELPER,
             "helper %s: its Python files are not all in %s; check out or install verlc again, or set "
             "VERLC_HELPERS_DIR",
             h->a.module, h->dir);
    /* A distribution's own Python refuses pip; there a private environment is the way. */
    if (strncmp(h->python, "/usr/bin/", 9) == 0) {
        const char *slash = strrchr(h->dir, '/');
        const int top = slash ? (int)(slash - h->dir) : 0; /* python/ lies in verlc's directory */
        FAIL(ERR_HELPER,
             "helper %s needs the Python package '%s'; run 'apt-get install python3-venv && cd %.*s && python3 -m venv .venv "
             "&& .venv/bin/pip install -r python/requirements.txt %s' (or set VERLC_PYTHON)",
             h->a.module, package, top, h->dir, package);
    }
    FAIL(ERR_HELPER, "helper %s needs the Python package '%s'; install it with '%s -m pip install %s'", h->a.module, package,
         h->python, package);
}

/* The process is dead (what == NULL) or has broken the protocol: end it, say why. */
int helper__died(struct helper *h, const char *what) {
    char how[64], package[64], words[HELPER__LINE_MAX + 40] = "";
    const char *when = h->ready ? "while serving a request" : "while starting";
    const char *advice = h->ready ? "the next request starts it again" : "run it by hand to see why";
    const bool starting = !h->ready;
    stop(h, what ? 0 : 1.0, how, sizeof how);
    if (starting && missing_package(h, package)) return say_missing(h, package);
    if (h->last_line[0]) snprintf(words, sizeof words, "; its last output: %s", h->last_line);
    if (what) FAIL(ERR_HELPER, "helper %s %s %s and was killed%s; %s", h->a.module, what, when, words, advice);
    if (strstr(h->last_line, "MemoryError") || strstr(h->last_line, "bad_alloc") || strncmp(how, "signal 9 ", 9) == 0)
        advice = "it was probably out of memory: give it smaller requests or a larger limit";
    if (h->a.cpu_s > 0 && strncmp(how, "signal 24 ", 10) == 0)
        advice = "it used up the processor time of a request: give it smaller requests or a larger limit";
    FAIL(ERR_HELPER, "helper %s died %s: %s%s; %s", h->a.module, when, how, words, advice);
}

int helper__expire(struct helper *h, double timeout_s) {
    const bool starting = !h->ready;
    char words[HELPER__LINE_MAX + 40] = "";
    stop(h, 0, NULL, 0);
    if (h->last_line[0]) snprintf(words, sizeof words, "; its last output: %s", h->last_line);
    if (starting)
        FAIL(ERR_TIMEOUT, "helper %s was not ready after %g s and was killed%s; run '%s -m %s' in %s by hand to see why",
             h->a.module, h->a.start_timeout_s, words, h->python, h->a.module, h->dir);
    FAIL(ERR_TIMEOUT, "helper %s did not answer within %g s and was killed%s; the next request starts it again", h->a.module,
         timeout_s, words);
}
