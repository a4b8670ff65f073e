/* show_run.c - a run in a terminal: its headline metrics as plots, the last validation, what happened, the memory plan. */
#include "view/show.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PLOT_HEIGHT = 3, LABEL = 9, GAP = 3, CELL = 78, MAX_EVENTS = 10, MAX_VALIDATION = 30 };

json_t *show_number(double v) { return isfinite(v) ? json_real(v) : json_null(); }

/* ---- heading ---- */

int show_heading(struct run_reader *r, const struct run_meta *m, const struct terminal *t, struct buf *out) {
    struct buf name = {0};
    buf_addf(&name, "%s/%s", m->project, m->experiment);
    term_begin(t, out, TERM_BOLD);
    term_text(out, run_reader_dir(r), strlen(run_reader_dir(r)), false);
    term_end(t, out);
    buf_adds(out, "  ");
    if (name.n > 1) term_text(out, name.p, name.n, false);
    if (*m->version) {
        buf_adds(out, "  verlc ");
        term_text(out, m->version, strlen(m->version), false);
    }
    buf_free(&name);
    buf_addf(out, "\nstep %lld", m->last_step < 0 ? 0 : (long long)m->last_step);
    if (m->total_steps > 0) buf_addf(out, " of %lld", (long long)m->total_steps);
    if (m->started > 0) {
        buf_adds(out, ", started ");
        term_when(out, m->started);
    }
    return buf_addc(out, '\n');
}

/* ---- plots ---- */

/* What is shown of a run that names no headlines. */
static const char *const usual[] = {"critic/rewards/mean",
                                    "critic/score/mean",
                                    "actor/grad_norm",
                                    "actor/kl_loss",
                                    "actor/ppo_kl",
                                    "actor/entropy",
                                    "response_length/mean",
                                    "train/loss",
                                    "train/grad_norm",
                                    "val/loss",
                                    "perf/throughput",
                                    "actor/router/load_entropy",
                                    "train/router/load_entropy"};

bool show_on_log_scale(const char *name) {
    const size_t n = strlen(name);
    return n >= 9 && strcmp(name + n - 9, "grad_norm") == 0;
}

static void add_name(struct run_names *list, const struct run_names *all, const char *name) {
    bool there = false;
    for (int64_t i = 0; i < list->n; i++) there |= strcmp(list->v[i], name) == 0;
    for (int64_t i = 0; i < all->n && !there; i++) {
        if (strcmp(all->v[i], name) != 0) continue;
        xgrow((void **)&list->v, &list->cap, list->n + 1, sizeof *list->v);
        list->v[list->n++] = xstrdup(name);
        return;
    }
}

static bool is_validation(const char *name) { return strncmp(name, "val-core/", 9) == 0 || strcmp(name, "val/loss") == 0; }

void show_headlines(const struct run_meta *m, const struct run_names *all, struct run_names *list) {
    for (size_t i = 0; i < json_array_size(m->headline); i++) {
        const char *s = json_string_value(json_array_get(m->headline, i));
        if (s) add_name(list, all, s);
    }
    for (size_t i = 0; list->n == 0 && i < sizeof usual / sizeof *usual; i++) add_name(list, all, usual[i]);
    add_name(list, all, "actor/grad_norm");
    for (int64_t i = 0; i < all->n && list->n < 16; i++)
        if (is_validation(all->v[i])) add_name(list, all, all->v[i]);
}

/* One metric in lines of a cell: its name and last value, the plot with its range, the steps below. */
static int plot_cell(struct run_reader *r, const char *name, int width, const struct terminal *t,
                     struct buf lines[PLOT_HEIGHT + 1]) {
    struct run_series s;
    struct buf head = {0};
    char *rows[PLOT_HEIGHT] = {0};
    double lo, hi, *x;
    TRY(run_reader_series(r, name, -1, &s));
    x = xmalloc((size_t)(s.n + 1) * sizeof *x);
    for (int64_t i = 0; i < s.n; i++) x[i] = (double)s.step[i];
    const struct term_plot p = {x, s.value, s.n, width - LABEL - 1, PLOT_HEIGHT, show_on_log_scale(name)};
    const bool drawn = term_plot(&p, rows, &lo, &hi);
    term_text(&head, name, strlen(name), false);
    if (p.log) buf_adds(&head, " (log)");
    buf_adds(&head, "  ");
    term_number(&head, s.n > 0 ? s.value[s.n - 1] : NAN);
    if (s.n > 0) buf_addf(&head, "  at step %lld", (long long)s.step[s.n - 1]);
    term_begin(t, &lines[0], TERM_BOLD);
    term_cell(&lines[0], head.p, head.n, width, true);
    term_end(t, &lines[0]);
    for (int i = 0; i < PLOT_HEIGHT; i++) {
        struct buf label = {0};
        if (drawn && i == 0) term_number(&label, hi);
        if (drawn && i == PLOT_HEIGHT - 1 && lo < hi) term_number(&label, lo);
        buf_addf(&lines[i + 1], "%*s ", LABEL, label.p ? label.p : "");
        term_begin(t, &lines[i + 1], TERM_CYAN);
        if (drawn) buf_adds(&lines[i + 1], rows[i]);
        else term_cell(&lines[i + 1], i == 1 ? "no number" : "", i == 1 ? 9 : 0, p.width, true);
        term_end(t, &lines[i + 1]);
        buf_free(&label);
        free(rows[i]);
    }
    buf_free(&head);
    free(x);
    run_series_free(&s);
    return 0;
}

static int plots(struct run_reader *r, const struct run_names *list, const struct terminal *t, struct buf *out) {
    const int columns = t->width >= 2 * CELL ? t->width / CELL : 1, width = (t->width - (columns - 1) * GAP) / columns - 1;
    int rc = 0;
    for (int64_t at = 0; at < list->n && rc == 0; at += columns) {
        struct buf cell[8][PLOT_HEIGHT + 1] = {0};
        const int n = (int)(list->n - at < columns ? list->n - at : columns);
        for (int i = 0; i < n && rc == 0; i++) rc = plot_cell(r, list->v[at + i], width, t, cell[i]);
        for (int k = 0; k <= PLOT_HEIGHT && rc == 0; k++) {
            for (int i = 0; i < n; i++) buf_addf(out, "%s%*s", cell[i][k].p, i + 1 < n ? GAP : 0, "");
            while (out->n > 0 && out->p[out->n - 1] == ' ') out->p[--out->n] = '\0';
            buf_addc(out, '\n');
        }
        for (int i = 0; i < n; i++)
            for (int k = 0; k <= PLOT_HEIGHT; k++) buf_free(&cell[i][k]);
    }
    return rc;
}

/* ---- validation ---- */

static int validation_step(void *arg, const char *name, int64_t step, double value) {
    int64_t *last = arg;
    (void)value;
    if (is_validation(name) && step > *last) *last = step;
    return 0;
}

static int last_validation(struct run_reader *r, const struct terminal *t, struct buf *out) {
    int64_t step = -1, shown = 0;
    struct metrics m = {0};
    TRY(run_reader_last(r, validation_step, &step));
    if (step < 0) return 0;
    TRY(run_reader_step(r, step, &m));
    term_add(t, out, TERM_BOLD, "\nlast validation, step %lld\n", (long long)step);
    for (int64_t i = 0; i < m.n && shown < MAX_VALIDATION; i++) {
        if (strncmp(m.items[i].name, "val", 3) != 0) continue;
        buf_adds(out, "  ");
        term_cell(out, m.items[i].name, strlen(m.items[i].name), t->width - 16, true);
        buf_addc(out, ' ');
        term_number(out, m.items[i].value);
        buf_addc(out, '\n');
        shown++;
    }
    metrics_free(&m);
    return 0;
}

/* ---- events ---- */

struct events {
    struct buf last[MAX_EVENTS]; /* in a circle */
    int64_t n, n_warnings;
    const struct terminal *term;
};

static int keep_event(void *arg, const struct run_event *e) {
    enum { BEFORE = 2 + 19 + 13 + 13, INDENT = 6 };
    struct events *k = arg;
    struct buf *b = &k->last[k->n++ % MAX_EVENTS];
    const bool bad = strcmp(e->kind, "warning") == 0 || strcmp(e->kind, "reward_error") == 0;
    k->n_warnings += bad;
    buf_reset(b);
    buf_adds(b, "  ");
    term_when(b, e->wall);
    buf_addf(b, "  step %-5lld ", (long long)e->step);
    term_begin(k->term, b, bad ? TERM_YELLOW : TERM_DIM);
    term_cell(b, e->kind, strlen(e->kind), 12, true);
    term_end(k->term, b);
    buf_addc(b, ' ');
    term_wrapped(b, e->message, strlen(e->message), BEFORE, INDENT, k->term->width - 1);
    buf_addc(b, '\n');
    return 0;
}

static int events(struct run_reader *r, const struct terminal *t, struct buf *out) {
    struct events k = {.term = t};
    const int rc = run_reader_events(r, 0, keep_event, &k);
    if (rc == 0 && k.n > 0) {
        term_add(t, out, TERM_BOLD, "\nevents");
        buf_addf(out, "  %lld, %lld of them warnings%s\n", (long long)k.n, (long long)k.n_warnings,
                 k.n > MAX_EVENTS ? "; the last ones" : "");
        for (int64_t i = k.n > MAX_EVENTS ? k.n - MAX_EVENTS : 0; i < k.n; i++) buf_adds(out, k.last[i % MAX_EVENTS].p);
    }
    for (int i = 0; i < MAX_EVENTS; i++) buf_free(&k.last[i]);
    return rc;
}

/* ---- memory ---- */

static void memory(const json_t *plan, const struct terminal *t, struct buf *out) {
    enum { NAME = 34, SIZE = 11 };
    const double total = json_number_value(json_object_get(plan, "total")),
                 limit = json_number_value(json_object_get(plan, "limit"));
    const json_t *parts = json_object_get(plan, "parts"), *part;
    const int bar = t->width - NAME - SIZE - 8 < 60 ? t->width - NAME - SIZE - 8 : 60;
    size_t i;
    bool block = false;
    if (!json_is_array(parts) || !(total > 0)) return;
    term_add(t, out, TERM_BOLD, "\nmemory plan");
    buf_adds(out, "  ");
    term_bytes(out, total);
    buf_adds(out, " of ");
    term_bytes(out, limit);
    buf_addc(out, '\n');
    json_array_foreach(parts, i, part) {
        const char *name = json_string_value(json_object_get(part, "name"));
        const double bytes = json_number_value(json_object_get(part, "bytes"));
        struct buf size = {0};
        if (!name || !(bytes >= 0)) continue;
        term_bytes(&size, bytes);
        const bool in_block = json_is_true(json_object_get(part, "block"));
        block |= in_block;
        buf_adds(out, in_block ? "   *" : "    ");
        term_cell(out, name, strlen(name), NAME, true);
        buf_addf(out, "%*s  ", SIZE, size.p);
        const double share = bytes / total < 1 ? bytes / total : 1;
        for (int k = 0; k < (int)(share * bar + 0.5); k++) buf_adds(out, "▇");
        buf_addc(out, '\n');
        buf_free(&size);
    }
    if (block) buf_adds(out, "    * take turns in one block, of the size of the largest\n");
}

/* ---- JSON ---- */

static int event_json(void *arg, const struct run_event *e) {
    json_array_append_new(arg, json_pack("{s:I, s:o, s:s, s:s}", "step", (json_int_t)e->step, "wall", show_number(e->wall), "kind",
                                         e->kind, "message", e->message));
    return 0;
}

static int last_json(void *arg, const char *name, int64_t step, double value) {
    return json_object_set_new(arg, name, json_pack("{s:I, s:o}", "step", (json_int_t)step, "value", show_number(value)));
}

static int as_json(struct run_reader *r, const struct run_meta *m, struct buf *out) {
    json_t *last = json_object(), *list = json_array();
    int rc = run_reader_last(r, last_json, last);
    if (rc == 0) rc = run_reader_events(r, 0, event_json, list);
    json_t *o = json_pack("{s:s, s:s, s:s, s:s, s:I, s:I, s:o, s:o, s:s?, s:O?, s:o, s:o}", "run", run_reader_dir(r), "project",
                          m->project, "experiment", m->experiment, "version", m->version, "last_step", (json_int_t)m->last_step,
                          "total_steps", (json_int_t)m->total_steps, "started", show_number(m->started), "ended",
                          m->ended > 0 ? json_real(m->ended) : json_null(), "exit", m->exit, "plan", m->plan, "metrics", last,
                          "events", list);
    if (!o) FAIL(ERR_FORMAT, "%s: its directory's name is no UTF-8", run_reader_dir(r));
    if (rc == 0) rc = json_dump_line(out, o);
    json_decref(o);
    return rc == 0 ? buf_addc(out, '\n') : rc;
}

/* ---- the run ---- */

static int as_text(struct run_reader *r, const struct show_args *a, const struct run_meta *m, const struct run_names *all,
                   struct buf *out) {
    struct run_names list = {0};
    TRY(show_heading(r, m, &a->term, out));
    TRY(show_process(r, m, &a->term, out));
    show_headlines(m, all, &list);
    buf_addc(out, '\n');
    if (list.n == 0) buf_adds(out, "no metrics yet: the first step is not done\n");
    int rc = plots(r, &list, &a->term, out);
    run_names_free(&list);
    if (rc == 0) rc = last_validation(r, &a->term, out);
    if (rc == 0) rc = events(r, &a->term, out);
    if (rc == 0 && m->plan) memory(m->plan, &a->term, out);
    return rc;
}

int show_run(struct run_reader *r, const struct show_args *a, struct buf *out) {
    struct run_meta m;
    struct run_names all;
    TRY(run_reader_meta(r, &m));
    int rc = run_reader_metric_names(r, &all);
    if (rc == 0) {
        rc = a->json ? as_json(r, &m, out) : as_text(r, a, &m, &all, out);
        run_names_free(&all);
    }
    run_meta_free(&m);
    return rc;
}
