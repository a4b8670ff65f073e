/* show_compare.c - runs side by side in a terminal: the chosen metric as curves over each other, the last metrics side by
 * side, the keys in which their configurations differ. One run with a chosen metric is the case of n = 1.
 * Reads through run_reader.h alone. */
#include "view/show.h"

#include "base/err.h"
#include "base/json.h"
#include "base/map.h"
#include "conf/conf.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEIGHT = 10, Y_LABEL = 9, COLUMN = 16, NAME_MIN = 24, NEAR = 8, MAX_CHOSEN = 32 };

struct compared {
    struct run_reader *r;
    struct run_meta m;
    struct run_names names;
    json_t *config; /* leaves by their whole key */
};
struct comparison {
    struct compared run[SHOW_MAX_RUNS];
    int n;
    struct run_names metrics; /* the last values of these are shown */
    char *plots[MAX_CHOSEN];  /* curves of these; owned */
    int n_plots;
};

/* ---- configurations ---- */

static void add_leaves(json_t *out, const char *path, const json_t *v) {
    const char *key;
    json_t *child;
    if (!json_is_object(v) || json_object_size(v) == 0) {
        json_object_set(out, path, (json_t *)(uintptr_t)v);
        return;
    }
    json_object_foreach((json_t *)(uintptr_t)v, key, child) {
        char *sub = xasprintf("%s%s%s", path, *path ? "." : "", key);
        add_leaves(out, sub, child);
        free(sub);
    }
}

static bool differs(const struct comparison *c, const char *key) {
    const json_t *first = json_object_get(c->run[0].config, key);
    for (int i = 1; i < c->n; i++) {
        const json_t *v = json_object_get(c->run[i].config, key);
        if (!first != !v || (v && !json_equal(first, v))) return true;
    }
    return false;
}

static int keep_noted(void *arg, const struct conf_key_info *k) {
    if (k->how != CONF_KEY_ACTS) map_set(arg, k->key, strlen(k->key), 0);
    return 0;
}

/* Keys without effect: a value that only follows another key's says nothing new. */
static int noted_keys(const struct comparison *c, struct map *out) {
    const bool ppo = json_object_get(c->run[0].config, "actor_rollout_ref.model.path") != NULL;
    return conf_keys(ppo ? "ppo_trainer" : "sft_trainer_engine", keep_noted, out);
}

/* Keys with different values, each with its values in the order of the runs; null where a run has no such key. */
static json_t *differences(const struct comparison *c) {
    json_t *out = json_object(), *v;
    struct map noted = {0};
    const char *key;
    (void)noted_keys(c, &noted);
    for (int i = 0; i < c->n; i++) json_object_foreach(c->run[i].config, key, v) {
            if (strcmp(key, "trainer.default_local_dir") == 0) continue; /* the headings have it */
            if (map_gets(&noted, key, NULL) || json_object_get(out, key) || !differs(c, key)) continue;
            json_t *list = json_array();
            for (int k = 0; k < c->n; k++) {
                json_t *x = json_object_get(c->run[k].config, key);
                json_array_append_new(list, x ? json_incref(x) : json_null());
            }
            json_object_set_new(out, key, list);
        }
    map_free(&noted);
    return out;
}

/* ---- which metrics ---- */

static bool has_name(const struct run_names *list, const char *name) {
    for (int64_t i = 0; i < list->n; i++)
        if (strcmp(list->v[i], name) == 0) return true;
    return false;
}

static bool some_run_has(const struct comparison *c, const char *name) {
    for (int i = 0; i < c->n; i++)
        if (has_name(&c->run[i].names, name)) return true;
    return false;
}

static void add_metric(struct comparison *c, const char *name) {
    if (has_name(&c->metrics, name)) return;
    xgrow((void **)&c->metrics.v, &c->metrics.cap, c->metrics.n + 1, sizeof *c->metrics.v);
    c->metrics.v[c->metrics.n++] = xstrdup(name);
}

/* ERR_INVAL: no run has it; names some that have the word. */
static int unknown_metric(const struct comparison *c, const char *name) {
    struct buf near = {0};
    int n = 0;
    for (int i = 0; i < c->n; i++)
        for (int64_t k = 0; k < c->run[i].names.n && n < NEAR; k++) {
            const char *x = c->run[i].names.v[k];
            if (!strstr(x, name) || (i > 0 && has_name(&c->run[0].names, x))) continue;
            buf_addf(&near, "%s%s", n++ ? ", " : "", x);
        }
    const int rc = err_set(ERR_INVAL, __FILE__, __LINE__, "--metric %s: %s no such metric; %s%s", name,
                           c->n > 1 ? "the runs have" : "the run has",
                           n ? "there are " : "'verlc show RUN --step N' lists a step's", n ? near.p : "");
    buf_free(&near);
    return rc;
}

/* "a,b" where no metric is named so as a whole. */
static int choose(struct comparison *c, const char *text) {
    if (some_run_has(c, text) || !strchr(text, ',')) {
        if (!some_run_has(c, text)) return unknown_metric(c, text);
        if (c->n_plots == MAX_CHOSEN) FAIL(ERR_INVAL, "--metric: at most %d metrics", MAX_CHOSEN);
        c->plots[c->n_plots++] = xstrdup(text);
        add_metric(c, text);
        return 0;
    }
    int rc = 0;
    for (const char *p = text; rc == 0 && *p; p += strspn(p, ", ")) {
        char *one = xstrndup(p, strcspn(p, ","));
        p += strlen(one);
        rc = choose(c, one);
        free(one);
    }
    return rc;
}

/* Each run's headlines, and the validation's; the first of each kind is drawn. */
static void choose_usual(struct comparison *c) {
    const char *headline = NULL, *validation = NULL;
    struct run_names list[SHOW_MAX_RUNS] = {0};
    for (int i = 0; i < c->n; i++) {
        show_headlines(&c->run[i].m, &c->run[i].names, &list[i]);
        for (int64_t k = 0; k < list[i].n; k++) {
            const bool val = strncmp(list[i].v[k], "val", 3) == 0;
            add_metric(c, list[i].v[k]);
            if (val && !validation) validation = list[i].v[k];
            if (!val && !headline) headline = list[i].v[k];
        }
    }
    if (headline) c->plots[c->n_plots++] = xstrdup(headline);
    if (validation) c->plots[c->n_plots++] = xstrdup(validation);
    for (int i = 0; i < c->n; i++) run_names_free(&list[i]);
}

/* ---- curves ---- */

static const char *const colours[] = {TERM_CYAN, TERM_YELLOW, TERM_MAGENTA, TERM_GREEN, TERM_RED, TERM_BLUE};
enum { N_COLOURS = sizeof colours / sizeof *colours };
static const char *colour_of(int i) { return colours[i % N_COLOURS]; }

/* The plot of one metric: lines with the range at their left, the steps below. */
static int plot(const struct comparison *c, const char *name, const struct terminal *t, struct buf *out) {
    struct run_series s[SHOW_MAX_RUNS] = {0};
    struct term_curve curves[SHOW_MAX_RUNS];
    struct buf lines[HEIGHT] = {0};
    struct term_axes a;
    double *x[SHOW_MAX_RUNS] = {0};
    int rc = 0;
    for (int i = 0; i < c->n && rc == 0; i++) {
        rc = run_reader_series(c->run[i].r, name, -1, &s[i]);
        x[i] = xcalloc((size_t)s[i].n + 1, sizeof *x[i]);
        for (int64_t k = 0; k < s[i].n; k++) x[i][k] = (double)s[i].step[k];
        curves[i] = (struct term_curve){x[i], s[i].value, s[i].n, colour_of(i), (char)('A' + i)};
    }
    const struct term_plot shape = {.width = t->width - Y_LABEL - 2, .height = HEIGHT, .log = show_on_log_scale(name)};
    buf_addc(out, '\n');
    term_begin(t, out, TERM_BOLD);
    term_cell(out, name, strlen(name), t->width - 8, false);
    term_end(t, out);
    buf_adds(out, shape.log ? " (log)\n" : "\n");
    const bool drawn = rc == 0 && term_plot_curves(curves, c->n, &shape, t, lines, &a);
    if (rc == 0 && !drawn) buf_adds(out, "  no number\n");
    for (int i = 0; i < HEIGHT && drawn; i++) {
        struct buf label = {0};
        if (i == 0) term_number(&label, a.y_hi);
        if (i == HEIGHT - 1 && a.y_lo < a.y_hi) term_number(&label, a.y_lo);
        buf_addf(out, "%*s %s", Y_LABEL, label.p ? label.p : "", lines[i].p);
        while (out->p[out->n - 1] == ' ') out->p[--out->n] = '\0';
        buf_addc(out, '\n');
        buf_free(&label);
    }
    if (drawn) {
        const int n = (int)strlen("step 00000000");
        buf_addf(out, "%*s step %-8.0f%*s%.0f\n", Y_LABEL, "", a.x_lo, shape.width > n + 8 ? shape.width - n - 8 : 1, "", a.x_hi);
    }
    for (int i = 0; i < HEIGHT; i++) buf_free(&lines[i]);
    for (int i = 0; i < c->n; i++) {
        run_series_free(&s[i]);
        free(x[i]);
    }
    return rc;
}

/* ---- tables ---- */

static int name_width(const struct comparison *c, const struct terminal *t) {
    const int left = t->width - 3 - COLUMN * c->n;
    return left < NAME_MIN ? NAME_MIN : left > 56 ? 56 : left;
}

static void table_head(const struct comparison *c, const char *title, const struct terminal *t, struct buf *out) {
    buf_addc(out, '\n');
    term_begin(t, out, TERM_BOLD);
    term_cell(out, title, strlen(title), name_width(c, t) + 2, c->n > 1);
    term_end(t, out);
    for (int i = 0; i < c->n && c->n > 1; i++) {
        buf_addf(out, "%*s", COLUMN - 1, "");
        term_add(t, out, colour_of(i), "%c", 'A' + i);
    }
    buf_addc(out, '\n');
}

static void right_cell(struct buf *out, const char *text) {
    struct buf cell = {0};
    term_cell(&cell, text, strlen(text), COLUMN - 2, false);
    const int w = term_width(cell.p ? cell.p : "", cell.n);
    buf_addf(out, "%*s%s", COLUMN - w, "", cell.p ? cell.p : "");
    buf_free(&cell);
}

static int metrics_table(const struct comparison *c, const struct terminal *t, struct buf *out) {
    table_head(c, "last metrics, and the step", t, out);
    for (int64_t k = 0; k < c->metrics.n; k++) {
        const char *name = c->metrics.v[k];
        buf_adds(out, "  ");
        term_cell(out, name, strlen(name), name_width(c, t), true);
        for (int i = 0; i < c->n; i++) {
            struct run_series s;
            struct buf cell = {0};
            TRY(run_reader_series(c->run[i].r, name, -1, &s));
            if (s.n > 0) {
                term_number(&cell, s.value[s.n - 1]);
                buf_addf(&cell, " (%lld)", (long long)s.step[s.n - 1]);
            }
            right_cell(out, s.n > 0 ? cell.p : "-");
            buf_free(&cell);
            run_series_free(&s);
        }
        buf_addc(out, '\n');
    }
    return 0;
}

static void config_table(const struct comparison *c, const json_t *diff, const struct terminal *t, struct buf *out) {
    const char *key;
    json_t *list, *v;
    size_t i;
    table_head(c, json_object_size(diff) ? "configuration, what differs" : "configuration: the same", t, out);
    json_object_foreach((json_t *)(uintptr_t)diff, key, list) {
        buf_adds(out, "  ");
        term_cell(out, key, strlen(key), name_width(c, t), true);
        json_array_foreach(list, i, v) {
            char *text =
                json_is_string(v) ? xstrdup(json_string_value(v)) : json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(12));
            right_cell(out, text ? text : "?");
            free(text);
        }
        buf_addc(out, '\n');
    }
}

/* ---- JSON ---- */

static int last_json(void *arg, const char *name, int64_t step, double value) {
    return json_object_set_new(arg, name, json_pack("{s:I, s:o}", "step", (json_int_t)step, "value", show_number(value)));
}

/* {"NAME": [{"step": [...], "value": [...]} of each run]} of the chosen metrics. */
static int curves_json(const struct comparison *c, json_t *out) {
    for (int k = 0; k < c->n_plots; k++) {
        json_t *list = json_array();
        json_object_set_new(out, c->plots[k], list);
        for (int i = 0; i < c->n; i++) {
            struct run_series s;
            json_t *steps = json_array(), *values = json_array();
            json_array_append_new(list, json_pack("{s:o, s:o}", "step", steps, "value", values));
            TRY(run_reader_series(c->run[i].r, c->plots[k], -1, &s));
            for (int64_t j = 0; j < s.n; j++) {
                json_array_append_new(steps, json_integer(s.step[j]));
                json_array_append_new(values, show_number(s.value[j]));
            }
            run_series_free(&s);
        }
    }
    return 0;
}

static int as_json(const struct comparison *c, json_t *diff, struct buf *out) {
    json_t *runs = json_array();
    int rc = 0;
    for (int i = 0; i < c->n && rc == 0; i++) {
        json_t *last = json_object();
        rc = run_reader_last(c->run[i].r, last_json, last);
        json_array_append_new(runs, json_pack("{s:s, s:I, s:o}", "run", run_reader_dir(c->run[i].r), "last_step",
                                              (json_int_t)c->run[i].m.last_step, "metrics", last));
    }
    json_t *curves = json_object(), *o = json_pack("{s:o, s:O, s:o}", "runs", runs, "differs", diff, "curves", curves);
    if (rc == 0) rc = curves_json(c, curves);
    if (rc == 0) rc = json_dump_line(out, o);
    json_decref(o);
    return rc == 0 ? buf_addc(out, '\n') : rc;
}

/* ---- the runs ---- */

static int headings(const struct comparison *c, const struct terminal *t, struct buf *out) {
    for (int i = 0; i < c->n; i++) {
        if (c->n > 1) {
            term_add(t, out, colour_of(i), "%c", 'A' + i);
            buf_adds(out, "  ");
        }
        TRY(show_heading(c->run[i].r, &c->run[i].m, t, out));
        TRY(show_process(c->run[i].r, &c->run[i].m, t, out));
    }
    return 0;
}

static int as_text(struct comparison *c, const struct show_args *a, const json_t *diff, struct buf *out) {
    TRY(headings(c, &a->term, out));
    for (int i = 0; i < c->n_plots; i++) TRY(plot(c, c->plots[i], &a->term, out));
    if (c->metrics.n == 0) buf_adds(out, "\nno metrics yet: the first step is not done\n");
    else TRY(metrics_table(c, &a->term, out));
    if (c->n > 1) config_table(c, diff, &a->term, out);
    return 0;
}

static int open_runs(struct comparison *c, struct run_reader *const *runs, int n) {
    for (; c->n < n; c->n++) {
        struct compared *x = &c->run[c->n];
        x->r = runs[c->n];
        TRY(run_reader_meta(x->r, &x->m));
        x->config = json_object();
        if (json_is_object(x->m.config)) add_leaves(x->config, "", x->m.config);
        const int rc = run_reader_metric_names(x->r, &x->names);
        if (rc < 0) c->n++; /* what is open is freed */
        TRY(rc);
    }
    return 0;
}

int show_compare(struct run_reader *const *runs, int n, const struct show_args *a, struct buf *out) {
    struct comparison *c = xcalloc(1, sizeof *c);
    int rc = open_runs(c, runs, n);
    if (rc == 0) {
        json_t *diff = differences(c);
        if (a->metric) rc = choose(c, a->metric);
        else choose_usual(c);
        if (rc == 0) rc = a->json ? as_json(c, diff, out) : as_text(c, a, diff, out);
        json_decref(diff);
    }
    for (int i = 0; i < c->n; i++) {
        run_names_free(&c->run[i].names);
        json_decref(c->run[i].config);
        run_meta_free(&c->run[i].m);
    }
    run_names_free(&c->metrics);
    for (int i = 0; i < c->n_plots; i++) free(c->plots[i]);
    free(c);
    return rc;
}
