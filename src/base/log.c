/* log.c - levelled lines on stderr, whole lines at a time, under one lock.
 * Knows nothing about metrics or progress beyond the redraw hooks. */
#include "base/log.h"

#include "base/buf.h"
#include "base/hash.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define N_NOTES 1024 /* distinct notes remembered; more are printed again */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int level_set = -1;
static uint64_t notes[N_NOTES];
static int n_notes;
static void (*redraw_clear)(void *);
static void (*redraw_draw)(void *);
static void *redraw_arg;

enum log_level log_level(void) {
    if (level_set < 0) {
        const char *s = getenv("VERL_LOGGING_LEVEL");
        int l = LOG_INFO;
        if (s && strcasecmp(s, "DEBUG") == 0) l = LOG_DEBUG;
        else if (s && strncasecmp(s, "WARN", 4) == 0) l = LOG_WARN;
        else if (s && strcasecmp(s, "ERROR") == 0) l = LOG_ERROR;
        level_set = l;
    }
    return (enum log_level)level_set;
}

void log_set_level(enum log_level level) { level_set = (int)level; }

void log_set_redraw(void (*clear)(void *), void (*draw)(void *), void *arg) {
    pthread_mutex_lock(&lock);
    redraw_clear = clear;
    redraw_draw = draw;
    redraw_arg = arg;
    pthread_mutex_unlock(&lock);
}

bool log_colour(int fd) {
    const char *how = getenv("VERLC_COLOR"), *none = getenv("NO_COLOR"), *term = getenv("TERM");
    if (how && strcmp(how, "always") == 0) return true;
    if (how && strcmp(how, "never") == 0) return false;
    return isatty(fd) && !(none && *none) && !(term && strcmp(term, "dumb") == 0);
}

static void add_tag(struct buf *line, const char *tag) {
    const char *sgr = strcmp(tag, "error: ") == 0 ? "1;31" : strcmp(tag, "warning: ") == 0 ? "33" : NULL;
    if (sgr && log_colour(STDERR_FILENO)) buf_addf(line, "\x1b[%sm%s\x1b[0m", sgr, tag);
    else buf_adds(line, tag);
}

static void log_line(const char *tag, const char *fmt, va_list ap, bool once) {
    struct buf line = {0};
    char *text = xvasprintf(fmt, ap);
    add_tag(&line, tag);
    buf_add_visible(&line, text, tag[0] == '\0'); /* log_info has tables */
    buf_addc(&line, '\n');
    free(text);
    pthread_mutex_lock(&lock);
    if (once) {
        const uint64_t h = hash64(line.p, line.n);
        for (int i = 0; i < n_notes; i++) {
            if (notes[i] == h) goto out;
        }
        if (n_notes < N_NOTES) notes[n_notes++] = h;
    }
    if (redraw_clear) redraw_clear(redraw_arg);
    fputs(line.p, stderr);
    fflush(stderr);
    if (redraw_draw) redraw_draw(redraw_arg);
out:
    pthread_mutex_unlock(&lock);
    buf_free(&line);
}

#define LOG_FN(name, lvl, tag, once)     \
    void name(const char *fmt, ...) {    \
        if (log_level() > (lvl)) return; \
        va_list ap;                      \
        va_start(ap, fmt);               \
        log_line(tag, fmt, ap, once);    \
        va_end(ap);                      \
    }
LOG_FN(log_debug, LOG_DEBUG, "debug: ", false)
LOG_FN(log_info, LOG_INFO, "", false)
LOG_FN(log_warn, LOG_WARN, "warning: ", false)
LOG_FN(log_error, LOG_ERROR, "error: ", false)
LOG_FN(log_child, LOG_ERROR, "", false)
LOG_FN(log_note, LOG_INFO, "note: ", true)
