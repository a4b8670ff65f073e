/* show_step.c - a step in a terminal: its metrics by group, and a table of its samples. */
#include "view/show.h"

#include "base/err.h"
#include "base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- metrics ---- */

static size_t group_of(const char *name) {
    const char *slash = strchr(name, '/');
    return slash ? (size_t)(slash - name) : strlen(name);
}

/* The metrics from lo to hi of one group, in as many columns as fit, down and then right. */
static void group(const struct metrics *m, int64_t lo, int64_t hi, const struct terminal *t, struct buf *out) {
    enum { VALUE = 11 };
    int widest = 0;
    const size_t skip = group_of(m->items[lo].name);
    for (int64_t i = lo; i < hi; i++) {
        const char *s = m->items[i].name + skip;
        const int w = term_width(s, strlen(s));
        widest = w > widest ? w : widest;
    }
    const int most = t->width - VALUE - 4, name = widest < most ? widest : most, cell = name + VALUE + 3;
    const int64_t columns = t->width / cell > 1 ? t->width / cell : 1, rows = (hi - lo + columns - 1) / columns;
    term_begin(t, out, TERM_BOLD);
    term_text(out, m->items[lo].name, skip, false);
    term_end(t, out);
    buf_addc(out, '\n');
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = lo + row; i < hi; i += rows) {
            struct buf value = {0};
            const char *s = m->items[i].name + skip + (m->items[i].name[skip] == '/');
            term_number(&value, m->items[i].value);
            buf_adds(out, "  ");
            term_cell(out, s, strlen(s), name, true);
            buf_addf(out, "%*s", VALUE, value.p);
            buf_free(&value);
        }
        buf_addc(out, '\n');
    }
}

static void metrics_by_group(const struct metrics *m, const struct terminal *t, struct buf *out) {
    for (int64_t lo = 0, hi; lo < m->n; lo = hi) {
        const size_t n = group_of(m->items[lo].name);
        for (hi = lo + 1; hi < m->n && group_of(m->items[hi].name) == n && strncmp(m->items[hi].name, m->items[lo].name, n) == 0;)
            hi++;
        group(m, lo, hi, t, out);
    }
}

/* ---- samples ---- */

struct table {
    const struct show_args *a;
    struct buf *out;
    json_t *list; /* NULL: as text */
    bool turns;   /* the run has conversations with tools */
    int64_t n, shown;
};

static json_t *sample_json(const struct run_sample *s) {
    const struct run_episode e = run_episode_of(s->episode);
    json_t *o = json_pack("{s:I, s:I, s:I, s:b, s:s, s:o, s:o, s:I, s:I, s:s, s:s, s:s?, s:s%}", "id", (json_int_t)s->id, "uid",
                          (json_int_t)s->uid, "sample", (json_int_t)s->index, "validation", s->validation, "data_source",
                          s->data_source, "score", show_number(s->score), "advantage", show_number(s->advantage), "prompt_tokens",
                          (json_int_t)s->n_prompt, "tokens", (json_int_t)s->n, "finish", s->finish, "reward_status",
                          s->reward_status, "reward_message", s->reward_message, "response", s->response.p, s->response.n);
    if (!s->episode) return o;
    json_object_set_new(o, "turns", json_integer(e.turns));
    json_object_set_new(o, "tool_calls", json_integer(e.calls));
    json_object_set_new(o, "failed_calls", json_integer(e.failed));
    json_object_set_new(o, "malformed_calls", json_integer(e.malformed));
    json_object_set_new(o, "tools", run_episode_tools(s->episode));
    json_object_set_new(o, "end", json_string(e.end));
    return o;
}

static void number_cell(struct buf *out, double v, int width) {
    struct buf b = {0};
    term_number(&b, v);
    buf_addf(out, "%*s", width, b.p);
    buf_free(&b);
}

/* Turns, calls of tools, those that failed. */
static void turns_cell(const struct terminal *t, const struct run_sample *s, struct buf *out) {
    const struct run_episode e = run_episode_of(s->episode);
    buf_addf(out, "%5lld%6lld ", (long long)e.turns, (long long)e.calls);
    if (e.failed + e.malformed > 0) term_begin(t, out, TERM_RED);
    buf_addf(out, "%2lld ", (long long)(e.failed + e.malformed));
    if (e.failed + e.malformed > 0) term_end(t, out);
}

static int add_row(void *arg, const struct run_sample *s) {
    enum { TURNS = 15, BEFORE = 14 + 9 + 10 + 7 + 8 };
    struct table *k = arg;
    const struct terminal *t = &k->a->term;
    char place[48];
    if (!run_episode_fits(s->episode, &k->a->fits)) return 0;
    k->n++;
    if (k->a->limit > 0 && k->shown >= k->a->limit) return 0;
    k->shown++;
    if (k->list) return json_array_append_new(k->list, sample_json(s));
    snprintf(place, sizeof place, "%lld.%lld", (long long)s->uid, (long long)s->index);
    buf_addf(k->out, "%-13s ", place);
    const bool error = strcmp(s->reward_status, "score") != 0;
    term_begin(t, k->out, error ? TERM_RED : s->score > 0 ? TERM_GREEN : "0");
    if (error) term_cell(k->out, s->reward_status, strlen(s->reward_status), 9, true);
    else number_cell(k->out, s->score, 9);
    term_end(t, k->out);
    number_cell(k->out, s->advantage, 10);
    buf_addf(k->out, "%7lld", (long long)s->n);
    buf_addc(k->out, ' ');
    term_cell(k->out, s->finish, strlen(s->finish), 6, true);
    buf_addc(k->out, ' ');
    if (k->turns) turns_cell(t, s, k->out);
    const char *text = error && s->reward_message ? s->reward_message : s->response.p;
    const size_t n = error && s->reward_message ? strlen(text) : s->response.n;
    term_cell(k->out, text, n, t->width - BEFORE - (k->turns ? TURNS : 0) - 1, false);
    return buf_addc(k->out, '\n');
}

static int has_episode(void *turns, const struct run_sample *s) {
    *(bool *)turns |= s->episode != NULL;
    return 0;
}

static int samples(struct run_reader *r, const struct show_args *a, struct table *k) {
    const struct run_sample_query q = {.step = a->step, .validation = a->validation, .uid = -1, .index = -1, .whole = true};
    const struct terminal *t = &a->term;
    struct run_sample_query heads = q;
    heads.whole = false;
    if (!k->list) TRY(run_reader_samples(r, &heads, has_episode, &k->turns));
    if (!k->list) {
        term_add(t, k->out, TERM_BOLD, "%s\n", a->validation ? "validation samples" : "samples");
        term_add(t, k->out, TERM_DIM, "%-13s %9s%10s%7s %-6s %s%s\n", "uid.sample", "score", "advantage", "tokens", "finish",
                 k->turns ? "turns calls bad " : "", "response");
    }
    TRY(run_reader_samples(r, &q, add_row, k));
    if (k->list) return 0;
    if (k->shown < k->n)
        buf_addf(k->out, "... %lld more; --limit 0 shows all %lld\n", (long long)(k->n - k->shown), (long long)k->n);
    if (k->n == 0) buf_addf(k->out, "none%s\n", a->validation ? "" : " (--validation shows those of validation)");
    return 0;
}

/* ---- the step ---- */

static int no_step(struct run_reader *r, int64_t step) {
    struct run_steps s;
    TRY(run_reader_steps(r, -1, &s));
    if (s.n == 0)
        err_set(ERR_INPUT, __FILE__, __LINE__, "%s has no step %lld, and no other yet", run_reader_dir(r), (long long)step);
    else
        err_set(ERR_INPUT, __FILE__, __LINE__, "%s has no step %lld; it has %lld, from %lld to %lld", run_reader_dir(r),
                (long long)step, (long long)s.n, (long long)s.v[0], (long long)s.v[s.n - 1]);
    run_steps_free(&s);
    return ERR_INPUT;
}

static int write_json(const struct show_args *a, const struct metrics *m, json_t *list, struct buf *out) {
    json_t *values = json_object();
    for (int64_t i = 0; i < m->n; i++) json_object_set_new(values, m->items[i].name, show_number(m->items[i].value));
    json_t *o = json_pack("{s:I, s:o, s:O}", "step", (json_int_t)a->step, "metrics", values, "samples", list);
    int rc = json_dump_line(out, o);
    json_decref(o);
    return rc == 0 ? buf_addc(out, '\n') : rc;
}

int show_step(struct run_reader *r, const struct show_args *a, struct buf *out) {
    struct metrics m = {0};
    struct run_meta meta;
    struct table k = {.a = a, .out = out};
    TRY(run_reader_meta(r, &meta));
    if (a->json) k.list = json_array();
    int rc = run_reader_step(r, a->step, &m);
    if (rc == 0 && !a->json) {
        rc = show_heading(r, &meta, &a->term, out);
        term_add(&a->term, out, TERM_BOLD, "\nstep %lld\n", (long long)a->step);
        metrics_by_group(&m, &a->term, out);
        buf_addc(out, '\n');
    }
    if (rc == 0) rc = samples(r, a, &k);
    if (rc == 0 && m.n == 0 && k.n == 0) rc = no_step(r, a->step);
    if (rc == 0 && a->json) rc = write_json(a, &m, k.list, out);
    json_decref(k.list);
    metrics_free(&m);
    run_meta_free(&meta);
    return rc;
}
