/* console.c - what a person sees: one line a step, and on a terminal a bar
 * that moves within the step.  In a pipe: verl's "step:N - name:value - ..." on
 * standard output, and a plain progress line at most every 10 s on stderr.
 * A terminal shows the program's headlines, a pipe all metrics; VERLC_CONSOLE=short or all says otherwise. */
#include "track/track_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/encoding/number.h"
#include "base/encoding/utf8.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { MAX_HEADLINES = 12, BAR_HEADLINES = 3, BAR = 24 };

struct console {
    bool step_lines, terminal, all, shown;
    char *title;
    int64_t total, first_step, last_step;
    double start, last_draw, last_line;
    struct {
        const char *metric, *label; /* the program's own words */
        double value;
        bool known;
    } head[MAX_HEADLINES];
    int n_head;
    pthread_mutex_t lock; /* of line and shown: a log line of another thread draws it again */
    char *line;           /* the live line as last drawn; NULL: none */
};

static void clear_line(void *v) {
    struct console *c = v;
    pthread_mutex_lock(&c->lock);
    if (c->shown) fputs("\r\033[K", stderr);
    pthread_mutex_unlock(&c->lock);
}
static void draw_line(void *v) {
    struct console *c = v;
    pthread_mutex_lock(&c->lock);
    if (c->line) {
        fputs(c->line, stderr);
        fflush(stderr);
        c->shown = true;
    }
    pthread_mutex_unlock(&c->lock);
}

struct console *console_create(const struct track_args *a, bool step_lines) {
    struct console *c = xcalloc(1, sizeof *c);
    pthread_mutex_init(&c->lock, NULL);
    c->step_lines = step_lines && (fcntl(STDOUT_FILENO, F_GETFL) & O_ACCMODE) != O_RDONLY; /* closed at the start: process.c */
    c->terminal = isatty(STDERR_FILENO) && isatty(STDOUT_FILENO);
    const char *how = getenv("VERLC_CONSOLE");
    c->all = how && *how ? strcmp(how, "all") == 0 : !c->terminal;
    if (how && *how && !c->all && strcmp(how, "short") != 0)
        log_warn("VERLC_CONSOLE=%s: expected short or all; it is short now", how);
    c->total = a->total_steps;
    c->first_step = c->last_step = a->resume_step > 0 ? a->resume_step : 0;
    for (int i = 0; a->headlines && a->headlines[i][0] && i < MAX_HEADLINES; i++) {
        c->head[i].metric = a->headlines[i][0];
        c->head[i].label = a->headlines[i][1];
        c->n_head++;
    }
    struct buf title = {0};
    buf_add_visible(&title, a->title ? a->title : "", false);
    c->title = buf_take(&title);
    c->start = c->last_draw = clock_now();
    if (c->terminal) log_set_redraw(clear_line, draw_line, c);
    return c;
}

void console_destroy(struct console *c) {
    if (!c) return;
    if (c->terminal) {
        log_set_redraw(NULL, NULL, NULL);
        clear_line(c);
    }
    pthread_mutex_destroy(&c->lock);
    free(c->title);
    free(c->line);
    free(c);
}

static void add_value(struct buf *b, const char *label, double v) {
    if (fabs(v) >= 1e15) buf_addf(b, "  %s %.4g", label, v);
    else if (fabs(v) >= 10000) buf_addf(b, "  %s %.0f", label, v);
    else if (fabs(v) >= 100) buf_addf(b, "  %s %.1f", label, v);
    else buf_addf(b, "  %s %.4g", label, v);
}

static void add_number(struct buf *b, const struct metric *m) {
    char s[NUMBER_TEXT];
    number_text(m->value, s);
    if (m->whole) buf_addf(b, "%lld", (long long)m->value);
    else buf_adds(b, s);
}

static bool is_validation(const char *name) { return strncmp(name, "val-core/", 9) == 0 || strcmp(name, "val/loss") == 0; }

/* One of the numbers that a short line has. */
static bool is_main(const struct console *c, const char *name) {
    bool yes = is_validation(name) || strcmp(name, "timing_s/step") == 0;
    for (int i = 0; i < c->n_head && !yes; i++) yes = strcmp(name, c->head[i].metric) == 0;
    return yes;
}

static void step_line_pipe(struct console *c, int64_t step, const struct metrics *m) {
    struct buf b = {0};
    buf_addf(&b, "step:%lld", (long long)step);
    for (int64_t i = 0; i < m->n; i++) {
        if (!c->all && !is_main(c, m->items[i].name)) continue;
        buf_adds(&b, " - ");
        buf_add_visible(&b, m->items[i].name, false);
        buf_addc(&b, ':');
        add_number(&b, &m->items[i]);
    }
    clear_line(c);
    puts(b.p);
    fflush(stdout);
    draw_line(c);
    buf_free(&b);
}

static void step_line_terminal(struct console *c, int64_t step, const struct metrics *m) {
    struct buf b = {0};
    double v;
    buf_addf(&b, "%s step %lld/%lld", c->title, (long long)step, (long long)c->total);
    for (int i = 0; i < c->n_head; i++)
        if (metrics_get(m, c->head[i].metric, &v)) add_value(&b, c->head[i].label, v);
    if (metrics_get(m, "timing_s/step", &v)) buf_addf(&b, "  %.1f s", v);
    for (int64_t i = 0; i < m->n; i++) /* validation shows its main number */
        if (is_validation(m->items[i].name)) {
            buf_adds(&b, "  ");
            buf_add_visible(&b, m->items[i].name, false);
            buf_addf(&b, " %.4g", m->items[i].value);
        }
    clear_line(c);
    puts(b.p);
    fflush(stdout);
    draw_line(c);
    buf_free(&b);
}

/* Steps of a fraction of a second would only scroll: then the bar carries the
 * values, and a line comes every few seconds, with validation, and at the end. */
static bool line_is_due(struct console *c, int64_t step, const struct metrics *m) {
    const double now = clock_now();
    bool due = now - c->last_line >= 3 || step == c->total;
    for (int64_t i = 0; i < m->n && !due; i++) due = strncmp(m->items[i].name, "val", 3) == 0;
    if (due) c->last_line = now;
    return due;
}

void console_step(struct console *c, int64_t step, const struct metrics *m) {
    for (int i = 0; i < c->n_head; i++)
        if (metrics_get(m, c->head[i].metric, &c->head[i].value)) c->head[i].known = true;
    c->last_step = step;
    if (!c->step_lines) return;
    if (!c->terminal || c->all) step_line_pipe(c, step, m);
    else if (line_is_due(c, step, m)) step_line_terminal(c, step, m);
}

static void add_eta(const struct console *c, struct buf *b, int64_t step, double part) {
    const double done = (double)(step - 1 - c->first_step) + part;
    if (c->total <= 0 || done < 0.2) return;
    const double left = (clock_now() - c->start) / done * ((double)(c->total - c->first_step) - done);
    const int64_t s = left > 0 ? (int64_t)left : 0;
    if (s >= 3600) buf_addf(b, "  ETA %lld:%02lld:%02lld", (long long)(s / 3600), (long long)(s / 60 % 60), (long long)(s % 60));
    else buf_addf(b, "  ETA %lld:%02lld", (long long)(s / 60), (long long)(s % 60));
}

static void cut_to_width(char *line) {
    struct winsize w;
    size_t width = 100;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 10) width = w.ws_col;
    line[utf8_cut(line, width - 1)] = '\0';
}

void console_progress(struct console *c, int64_t step, const char *phase, int64_t done, int64_t total, double tok_s) {
    const double now = clock_now();
    if (now - c->last_draw < (c->terminal ? 0.1 : 10.0)) return;
    c->last_draw = now;
    struct buf b = {0};
    /* the bar shows the steps of the run; a step's phases have no common measure */
    const double part = total > 0 ? (double)done / (double)total : 0;
    const double whole = c->total > 0 ? ((double)(step > 0 ? step - 1 : 0)) / (double)c->total : 0;
    if (c->terminal) {
        const int fill = (int)(whole * BAR);
        buf_addf(&b, "%s [", c->title);
        for (int i = 0; i < BAR; i++) buf_addc(&b, i < fill ? '#' : '.');
        buf_adds(&b, "]");
    }
    buf_addf(&b, " step %lld/%lld %s %lld/%lld", (long long)step, (long long)c->total, phase, (long long)done, (long long)total);
    if (tok_s > 0) buf_addf(&b, "  %.0f tok/s", tok_s);
    for (int i = 0; i < c->n_head && i < BAR_HEADLINES; i++)
        if (c->head[i].known && (tok_s <= 0 || strcmp(c->head[i].label, "tok/s") != 0))
            add_value(&b, c->head[i].label, c->head[i].value);
    if (step > c->first_step) add_eta(c, &b, step, part / 2);
    if (c->terminal) {
        char *line = buf_take(&b), *old;
        cut_to_width(line);
        clear_line(c);
        pthread_mutex_lock(&c->lock);
        old = c->line;
        c->line = line;
        pthread_mutex_unlock(&c->lock);
        free(old);
        draw_line(c);
    } else {
        fprintf(stderr, "%s\n", b.p + (b.p[0] == ' '));
        fflush(stderr);
    }
    buf_free(&b);
}
