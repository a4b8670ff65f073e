/* view.c - see view.h. The runs as JSON; numbers of many rows are arrays in base64 (little-endian), which a browser takes as
 * they are.
 *
 *   /api/runs                               all runs
 *   /api/run?run=ID                         one run: meta, metrics' names and explanations, memory plan
 *   /api/state?run=ID&event=N               what it does now; events after N
 *   /api/config?run=ID                      its configuration
 *   /api/series?run=ID&name=M...&since=N    metrics' values after step N
 *   /api/histograms?run=ID&name=&validation=&since=
 *   /api/steps?run=ID&validation=           steps with samples
 *   /api/step?run=ID&step=                  all metrics of a step
 *   /api/samples?run=ID&step=&validation=   all samples of a step, without texts
 *   /api/excerpts?...&offset=&limit=        the beginnings of their prompts and responses
 *   /api/group?...&uid=                     a group's samples, with texts
 *   /api/tokens?run=ID&id=                  the tokens of one sample
 *   /api/errors?run=ID                      samples without a score: by status, with an example of each
 *   /api/search?run=ID&q=&case=&in=         a stream: a JSON object a line */
#include "view/view.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "track/metric_table.h"
#include "train/run/run_lock.h"
#include "view/run_reader.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_NAMES = 64, MAX_OPEN = 8, EXCERPT_BYTES = 240, MAX_HITS = 500, MAX_ERROR_STEPS = 50, LINE_BYTES = 400, SILENT_S = 60 };

struct run {
    char id[9], *dir;
    double modified;
    json_t *summary; /* as of `modified` */
    dev_t dev;       /* of the run.db that is open */
    ino_t ino;
    struct run_reader *reader; /* NULL: not open */
    int64_t used;              /* for which reader is closed first */
};
struct view {
    const char *const *roots;
    int n_roots;
    struct run **v; /* the last written first */
    int64_t n, cap, clock;
};

/* ---- numbers ---- */

static json_t *number(double v) { return isfinite(v) ? json_real(v) : json_null(); }

/* UTF-8, of a text that may have been cut. */
static json_t *text(const char *p, size_t n) {
    json_t *v = json_stringn(p ? p : "", p ? n : 0);
    return v ? v : json_string("\xef\xbf\xbd");
}
static json_t *text0(const char *p) { return p ? text(p, strlen(p)) : json_null(); }

static json_t *base64(const void *data, size_t n) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *p = data;
    char *out = xmalloc((n + 2) / 3 * 4 + 1), *o = out;
    for (size_t i = 0; i < n; i += 3) {
        const uint32_t b = (uint32_t)p[i] << 16 | (i + 1 < n ? (uint32_t)p[i + 1] << 8 : 0) | (i + 2 < n ? p[i + 2] : 0);
        *o++ = digits[b >> 18];
        *o++ = digits[b >> 12 & 63];
        *o++ = i + 1 < n ? digits[b >> 6 & 63] : '=';
        *o++ = i + 2 < n ? digits[b & 63] : '=';
    }
    json_t *v = json_stringn_nocheck(out, (size_t)(o - out));
    free(out);
    return v;
}
static json_t *steps_base64(const int64_t *v, int64_t n) { return base64(v, (size_t)n * sizeof *v); }
static json_t *f32_base64(const float *v, int64_t n) { return v ? base64(v, (size_t)n * sizeof *v) : json_null(); }

static int send_json(struct http_reply *reply, json_t *o) {
    const int rc = json_dump_line(&reply->body, o);
    json_decref(o);
    return rc;
}

/* ---- which runs there are ---- */

static void close_run(struct run *r) {
    run_reader_close(r->reader);
    r->reader = NULL;
}

static void free_run(struct run *r) {
    close_run(r);
    json_decref(r->summary);
    free(r->dir);
    free(r);
}

static struct run *take_run(struct view *old, const char *dir) {
    for (int64_t i = 0; i < old->n; i++)
        if (old->v[i] && strcmp(old->v[i]->dir, dir) == 0) {
            struct run *r = old->v[i];
            old->v[i] = NULL;
            return r;
        }
    struct run *r = xcalloc(1, sizeof *r);
    r->dir = xstrdup(dir);
    snprintf(r->id, sizeof r->id, "%08x", (unsigned)hash64(dir, strlen(dir)));
    return r;
}

/* Looks at the directories again. */
static int find_runs(struct view *v) {
    struct view found = *v;
    int rc = 0;
    found.v = NULL;
    found.n = found.cap = 0;
    for (int i = 0; i < v->n_roots && rc == 0; i++) {
        struct run_places places = {0};
        rc = run_places_find(&places, v->roots[i]);
        for (int64_t k = 0; k < places.n && rc == 0; k++) {
            char *dir = realpath(places.v[k].dir, NULL);
            struct run *r = dir ? take_run(v, dir) : NULL;
            free(dir);
            if (!r) continue; /* gone since */
            if (r->modified != places.v[k].modified) {
                json_decref(r->summary);
                r->summary = NULL;
            }
            r->modified = places.v[k].modified;
            xgrow((void **)&found.v, &found.cap, found.n + 1, sizeof *found.v);
            found.v[found.n++] = r;
        }
        run_places_free(&places);
    }
    for (int64_t i = 0; i < v->n; i++)
        if (v->v[i]) free_run(v->v[i]);
    free(v->v);
    *v = found;
    return rc;
}

static struct run *run_of(const struct view *v, const char *id) {
    for (int64_t i = 0; i < v->n; i++)
        if (strcmp(v->v[i]->id, id) == 0) return v->v[i];
    return NULL;
}

/* At most MAX_OPEN are open; one whose file was replaced is opened again. */
static int open_run(struct view *v, struct run *r) {
    struct stat st;
    char *path = file_join(r->dir, "run.db");
    const bool there = stat(path, &st) == 0;
    free(path);
    if (!there || st.st_ino != r->ino || st.st_dev != r->dev) close_run(r);
    r->used = ++v->clock;
    if (r->reader) return 0;
    struct run *oldest = NULL;
    int n_open = 0;
    for (int64_t i = 0; i < v->n; i++) {
        if (!v->v[i]->reader) continue;
        n_open++;
        if (!oldest || v->v[i]->used < oldest->used) oldest = v->v[i];
    }
    if (n_open >= MAX_OPEN) close_run(oldest);
    if (there) {
        r->ino = st.st_ino;
        r->dev = st.st_dev;
    }
    return run_reader_open(&r->reader, r->dir);
}

static int asked_run(struct view *v, const struct http_get *g, struct run **out) {
    const char *id = http_param(g, "run");
    struct run *r = id ? run_of(v, id) : NULL;
    if (!r && id) {
        TRY(find_runs(v));
        r = run_of(v, id);
    }
    if (!r) FAIL(ERR_INPUT, "no such run; it may have been moved or removed");
    TRY(open_run(v, r));
    *out = r;
    return 0;
}

int view_open(struct view **out, const char *const *roots, int n) {
    struct view *v = xcalloc(1, sizeof *v);
    v->roots = roots;
    v->n_roots = n;
    int rc = find_runs(v);
    if (rc == 0 && v->n == 0) {
        err_set(ERR_INPUT, __FILE__, __LINE__, "%s: no run.db in it or below; RUN is trainer.default_local_dir of a run", roots[0]);
        rc = ERR_INPUT;
    }
    if (rc < 0) view_close(v);
    else *out = v;
    return rc;
}

void view_close(struct view *v) {
    if (!v) return;
    for (int64_t i = 0; i < v->n; i++) free_run(v->v[i]);
    free(v->v);
    free(v);
}

/* ---- runs and what they do ---- */

/* "running", "done", "failed", "killed"; "lost": it has not said that it ended, and is no longer there. Where a file system
 * has no locks, a run that has written lately is there. */
static const char *state_of(const struct run *r, const struct run_meta *m, const struct run_status *s) {
    static const char *const ends[] = {"done", "failed", "killed"};
    struct run_holder holder;
    run_lock_look(&holder, r->dir);
    if (holder.state == RUN_HELD) return "running";
    for (size_t i = 0; m->exit && i < sizeof ends / sizeof *ends; i++)
        if (strncmp(m->exit, ends[i], strlen(ends[i])) == 0) return ends[i];
    if (m->exit) return "failed";
    const double last = s->known && s->wall > r->modified ? s->wall : r->modified;
    if (holder.state == RUN_FREE && clock_wall() - last < SILENT_S) return "running";
    return holder.state == RUN_LEFT || m->format > 1 ? "lost" : "unknown"; /* format 1 never says how it ended */
}

static json_t *status_json(const struct run_status *s) {
    if (!s->known) return json_null();
    json_t *o =
        json_pack("{s:I, s:I, s:I}", "step", (json_int_t)s->step, "done", (json_int_t)s->done, "total", (json_int_t)s->total);
    json_object_set_new(o, "phase", text0(s->phase));
    json_object_set_new(o, "host", text0(s->host));
    json_object_set_new(o, "tok_s", number(s->tok_s));
    json_object_set_new(o, "since", number(s->since));
    json_object_set_new(o, "wall", number(s->wall));
    return o;
}

/* What every answer about a run begins with. epoch changes when the file is another one or its run was started again. */
static json_t *head(const struct run *r, const struct run_meta *m, const struct run_status *s) {
    char epoch[96];
    snprintf(epoch, sizeof epoch, "%llx-%llx-%.3f-%lld", (unsigned long long)r->dev, (unsigned long long)r->ino, m->started,
             (long long)s->pid);
    json_t *o = json_pack("{s:s, s:s, s:s}", "id", r->id, "epoch", epoch, "state", state_of(r, m, s));
    json_object_set_new(o, "dir", text0(r->dir));
    json_object_set_new(o, "project", text0(m->project));
    json_object_set_new(o, "experiment", text0(m->experiment));
    json_object_set_new(o, "version", text0(m->version));
    json_object_set_new(o, "exit", text0(m->exit));
    json_object_set_new(o, "step", json_integer(m->last_step));
    json_object_set_new(o, "total", json_integer(m->total_steps));
    json_object_set_new(o, "format", json_integer(m->format));
    json_object_set_new(o, "started", number(m->started));
    json_object_set_new(o, "ended", number(m->ended));
    json_object_set_new(o, "now", number(clock_wall()));
    json_object_set_new(o, "status", status_json(s));
    return o;
}

static void look_at_file(struct run *r) {
    struct stat st;
    static const char *const names[] = {"run.db", "run.db-wal"};
    for (int i = 0; i < 2; i++) {
        char *path = file_join(r->dir, names[i]);
        const double at = stat(path, &st) == 0 ? (double)st.st_mtim.tv_sec : 0;
        if (at > r->modified || i == 0) r->modified = at;
        free(path);
    }
}

static int run_head(struct run *r, struct run_meta *m, json_t **out) {
    struct run_status s = {0};
    look_at_file(r);
    TRY(run_reader_meta(r->reader, m));
    const int rc = run_reader_status(r->reader, &s);
    if (rc < 0) run_meta_free(m);
    TRY(rc);
    *out = head(r, m, &s);
    return 0;
}

static json_t *summary(struct view *v, struct run *r) {
    struct run_meta m = {0};
    json_t *o = NULL;
    const double modified = r->modified;
    if (open_run(v, r) == 0 && run_head(r, &m, &o) == 0) run_meta_free(&m);
    else {
        o = json_pack("{s:s, s:s}", "id", r->id, "state", "broken");
        json_object_set_new(o, "dir", text0(r->dir));
        json_object_set_new(o, "error", text0(err_msg()));
    }
    json_object_set_new(o, "modified", number(modified));
    r->modified = modified; /* of find_runs */
    return o;
}

static int answer_runs(struct view *v, const struct http_get *g, struct http_reply *reply) {
    (void)g;
    json_t *list = json_array();
    TRY(find_runs(v));
    for (int64_t i = 0; i < v->n; i++) {
        struct run *r = v->v[i];
        const char *state = json_string_value(json_object_get(r->summary, "state"));
        if (!state || strcmp(state, "running") == 0) { /* a silent run may have been killed meanwhile */
            json_decref(r->summary);
            r->summary = summary(v, r);
        }
        json_array_append(list, r->summary);
    }
    return send_json(reply, json_pack("{s:o}", "runs", list));
}

static json_t *names_json(const struct run_names *names) {
    json_t *list = json_array();
    for (int64_t i = 0; i < names->n; i++) {
        const struct metric_row *row = metric_row_of(names->v[i]);
        json_t *o = json_object();
        json_object_set_new(o, "name", text0(names->v[i]));
        if (row) {
            json_object_set_new(o, "text", text0(row->text));
            json_object_set_new(o, "reading", text0(row->reading));
        }
        json_array_append_new(list, o);
    }
    return list;
}

static int answer_run(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct run_meta m = {0};
    struct run_names names = {0};
    json_t *o;
    TRY(asked_run(v, g, &r));
    TRY(run_head(r, &m, &o));
    json_object_set(o, "headline", m.headline);
    if (m.plan) json_object_set(o, "plan", m.plan);
    run_meta_free(&m);
    const int rc = run_reader_metric_names(r->reader, &names);
    if (rc < 0) {
        json_decref(o);
        return rc;
    }
    json_object_set_new(o, "names", names_json(&names));
    run_names_free(&names);
    return send_json(reply, o);
}

static int add_event(void *list, const struct run_event *e) {
    json_t *o = json_pack("{s:I, s:I}", "id", (json_int_t)e->id, "step", (json_int_t)e->step);
    json_object_set_new(o, "wall", number(e->wall));
    json_object_set_new(o, "kind", text0(e->kind));
    json_object_set_new(o, "message", text0(e->message));
    json_array_append_new(list, o);
    return 0;
}

static int answer_state(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct run_meta m = {0};
    json_t *o, *events = json_array();
    int64_t after = 0;
    int rc = http_param_i64(g, "event", 0, INT64_MAX, &after);
    if (rc == 0) rc = asked_run(v, g, &r);
    if (rc == 0) rc = run_reader_events(r->reader, after, add_event, events);
    if (rc == 0) rc = run_head(r, &m, &o);
    if (rc < 0) json_decref(events);
    TRY(rc);
    run_meta_free(&m);
    json_object_set_new(o, "events", events);
    return send_json(reply, o);
}

static int answer_config(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct run_meta m = {0};
    TRY(asked_run(v, g, &r));
    TRY(run_reader_meta(r->reader, &m));
    json_t *o = json_object();
    json_object_set_new(o, "config", m.config ? json_incref(m.config) : json_object());
    run_meta_free(&m);
    return send_json(reply, o);
}

/* ---- metrics ---- */

static int answer_series(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    const char *names[MAX_NAMES];
    int64_t since = -1;
    TRY(http_param_i64(g, "since", -1, INT64_MAX, &since));
    TRY(asked_run(v, g, &r));
    const int n = http_params(g, "name", names, MAX_NAMES);
    struct run_series all[MAX_NAMES];
    TRY(run_reader_curves(r->reader, names, n, since, all));
    json_t *o = json_object();
    for (int i = 0; i < n; i++) {
        const struct run_series *s = &all[i];
        json_object_set_new(o, names[i],
                            json_pack("{s:o, s:o}", "step", steps_base64(s->step, s->n), "value",
                                      base64(s->value, (size_t)s->n * sizeof *s->value)));
        run_series_free(&all[i]);
    }
    return send_json(reply, json_pack("{s:o}", "series", o));
}

static int answer_step(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct metrics m = {0};
    int64_t step = 0;
    TRY(http_param_i64(g, "step", 0, INT64_MAX, &step));
    TRY(asked_run(v, g, &r));
    const int rc = run_reader_step(r->reader, step, &m);
    json_t *o = json_object();
    for (int64_t i = 0; i < m.n && rc == 0; i++) json_object_set_new(o, m.items[i].name, number(m.items[i].value));
    metrics_free(&m);
    if (rc < 0) json_decref(o);
    TRY(rc);
    return send_json(reply, json_pack("{s:o}", "metrics", o));
}

struct bins {
    struct buf step, range, counts;
    int64_t n; /* bins of a step; all steps have as many */
};
static int add_histogram(void *arg, const struct run_histogram *h) {
    struct bins *b = arg;
    const double range[2] = {h->lo, h->hi};
    if (b->n == 0) b->n = h->n;
    if (h->n != b->n) return 0; /* of another verlc */
    buf_add(&b->step, &h->step, sizeof h->step);
    buf_add(&b->range, range, sizeof range);
    return buf_add(&b->counts, h->counts, (size_t)h->n * sizeof *h->counts);
}

static int is_validation(const struct http_get *g, bool *out) {
    int64_t v = 0;
    TRY(http_param_i64(g, "validation", 0, 1, &v));
    *out = v == 1;
    return 0;
}

static int answer_histograms(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct bins b = {0};
    const char *name = http_param(g, "name");
    int64_t since = -1;
    bool validation;
    TRY(http_param_i64(g, "since", -1, INT64_MAX, &since));
    TRY(is_validation(g, &validation));
    TRY(asked_run(v, g, &r));
    const int rc = run_reader_histograms(r->reader, name ? name : "score", validation, since, add_histogram, &b);
    json_t *o = json_pack("{s:I, s:o, s:o, s:o}", "bins", (json_int_t)b.n, "step", base64(b.step.p, b.step.n), "range",
                          base64(b.range.p, b.range.n), "counts", base64(b.counts.p, b.counts.n));
    buf_free(&b.step);
    buf_free(&b.range);
    buf_free(&b.counts);
    if (rc < 0) json_decref(o);
    TRY(rc);
    return send_json(reply, o);
}

/* ---- samples ---- */

static int answer_steps(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct run_steps s = {0};
    bool validation;
    TRY(is_validation(g, &validation));
    TRY(asked_run(v, g, &r));
    TRY(run_reader_sample_steps(r->reader, validation, &s));
    json_t *o = json_pack("{s:o}", "step", steps_base64(s.v, s.n));
    run_steps_free(&s);
    return send_json(reply, o);
}

static int sample_query(struct view *v, const struct http_get *g, struct run **r, struct run_sample_query *q) {
    *q = (struct run_sample_query){.uid = -1, .index = -1};
    TRY(http_param_i64(g, "step", 0, INT64_MAX, &q->step));
    TRY(http_param_i64(g, "uid", 0, INT64_MAX, &q->uid));
    TRY(http_param_i64(g, "id", 1, INT64_MAX, &q->id));
    TRY(http_param_i64(g, "offset", 0, INT64_MAX, &q->offset));
    TRY(http_param_i64(g, "limit", 1, 1000, &q->limit));
    TRY(is_validation(g, &q->validation));
    return asked_run(v, g, r);
}

/* The head of a sample: what both lists and single samples have. */
static json_t *sample_json(const struct run_sample *s) {
    json_t *o = json_pack("{s:I, s:I, s:I, s:I, s:I}", "id", (json_int_t)s->id, "uid", (json_int_t)s->uid, "sample",
                          (json_int_t)s->index, "tokens", (json_int_t)s->n, "prompt_tokens", (json_int_t)s->n_prompt);
    json_object_set_new(o, "score", number(s->score));
    json_object_set_new(o, "advantage", number(s->advantage));
    json_object_set_new(o, "status", text0(s->reward_status));
    json_object_set_new(o, "finish", text0(s->finish));
    return o;
}
static int add_sample(void *list, const struct run_sample *s) { return json_array_append_new(list, sample_json(s)); }

/* All samples of a query as {key: [...]}. */
static int answer_query(struct run *r, const struct run_sample_query *q, int (*add)(void *, const struct run_sample *),
                        struct http_reply *reply) {
    json_t *list = json_array();
    const int rc = run_reader_samples(r->reader, q, add, list);
    if (rc < 0) json_decref(list);
    TRY(rc);
    return send_json(reply, json_pack("{s:o}", "samples", list));
}

static int answer_samples(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct run_sample_query q;
    TRY(sample_query(v, g, &r, &q));
    return answer_query(r, &q, add_sample, reply);
}

static size_t whole_characters(const char *p, size_t n, size_t most) {
    if (n <= most) return n;
    for (n = most; n > 0 && ((unsigned char)p[n] & 0xc0) == 0x80;) n--;
    return n;
}
static json_t *excerpt(struct track_text t, bool end) {
    size_t from = end && t.n > EXCERPT_BYTES ? t.n - EXCERPT_BYTES : 0;
    while (from > 0 && from < t.n && ((unsigned char)t.p[from] & 0xc0) == 0x80) from++;
    return text(t.p ? t.p + from : NULL, whole_characters(t.p + from, t.n - from, EXCERPT_BYTES));
}
static int add_excerpt(void *list, const struct run_sample *s) {
    json_t *pair = json_array();
    json_array_append_new(pair, excerpt(s->prompt, true)); /* a chat's prompt begins alike */
    json_array_append_new(pair, excerpt(s->response, false));
    return json_array_append_new(list, pair);
}
static int answer_excerpts(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct run_sample_query q;
    TRY(sample_query(v, g, &r, &q));
    q.whole = true;
    if (q.limit == 0) q.limit = 100;
    return answer_query(r, &q, add_excerpt, reply);
}

/* [[tokens, version], ...] */
static json_t *versions_json(const struct run_sample *s) {
    json_t *runs = json_array();
    for (int64_t i = 0; i < s->n_runs; i++) json_array_append_new(runs, json_pack("[i, i]", s->runs[2 * i], s->runs[2 * i + 1]));
    return runs;
}
static int add_whole(void *list, const struct run_sample *s) {
    json_t *o = sample_json(s);
    json_object_set_new(o, "response", text(s->response.p, s->response.n));
    json_object_set_new(o, "message", text0(s->reward_message));
    if (s->extra) json_object_set(o, "extra", s->extra);
    if (s->n_runs > 1) json_object_set_new(o, "versions", versions_json(s));
    if (json_array_size(list) == 0) { /* of the whole group */
        json_object_set_new(o, "prompt", text(s->prompt.p, s->prompt.n));
        json_object_set_new(o, "ground_truth", text(s->ground_truth.p, s->ground_truth.n));
        json_object_set_new(o, "data_source", text0(s->data_source));
    }
    return json_array_append_new(list, o);
}
static int answer_group(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct run_sample_query q;
    TRY(sample_query(v, g, &r, &q));
    q.whole = true;
    return answer_query(r, &q, add_whole, reply);
}

/* ends: in UTF-16 units of the response, as a browser counts. */
static json_t *ends_json(const struct run_sample *s) {
    if (!s->ends) return json_null();
    int32_t *ends = xmalloc((size_t)(s->n + 1) * sizeof *ends), units = 0;
    size_t at = 0;
    for (int64_t i = 0; i < s->n; i++) {
        for (; at < s->response.n && (int64_t)at < s->ends[i]; at++) {
            const unsigned char c = (unsigned char)s->response.p[at];
            units += (c & 0xc0) != 0x80 ? 1 + (c >= 0xf0) : 0;
        }
        ends[i] = units;
    }
    json_t *o = base64(ends, (size_t)s->n * sizeof *ends);
    free(ends);
    return o;
}
static int add_tokens(void *list, const struct run_sample *s) {
    json_t *o = json_object();
    json_object_set_new(o, "ids", base64(s->ids, (size_t)(s->ids ? s->n : 0) * sizeof *s->ids));
    json_object_set_new(o, "ends", ends_json(s));
    json_object_set_new(o, "logp", f32_base64(s->logp, s->n));
    json_object_set_new(o, "entropy", f32_base64(s->entropy, s->n));
    json_object_set_new(o, "ref_logp", f32_base64(s->ref_logp, s->n));
    json_object_set_new(o, "advantages", f32_base64(s->advantages, s->n));
    json_object_set_new(o, "advantage", number(s->advantage));
    return json_array_append_new(list, o);
}
static int answer_tokens(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct run_sample_query q;
    TRY(sample_query(v, g, &r, &q));
    if (q.id == 0) FAIL(ERR_INVAL, "id: a sample's is wanted");
    q.whole = true;
    return answer_query(r, &q, add_tokens, reply);
}

/* ---- samples without a score ---- */

/* by_status: status -> an example and how many there are */
static int count_error(void *by_status, const struct run_sample *s) {
    if (isfinite(s->score)) return 0;
    const char *status = s->reward_status && *s->reward_status ? s->reward_status : "unknown";
    json_t *o = json_object_get(by_status, status);
    if (!o) {
        o = sample_json(s);
        json_object_set_new(o, "step", json_integer(s->step));
        json_object_set_new(o, "message", text0(s->reward_message));
        json_object_set_new(o, "count", json_integer(0));
        json_object_set_new(by_status, status, o);
    }
    return json_integer_set(json_object_get(o, "count"), json_integer_value(json_object_get(o, "count")) + 1);
}

static int answer_errors(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct run_series s = {0};
    json_t *by_status = json_object();
    int rc = asked_run(v, g, &r);
    if (rc == 0) rc = run_reader_series(r->reader, "reward/num_errors", -1, &s);
    int64_t looked = 0;
    double all = 0;
    for (int64_t i = s.n; i-- > 0 && rc == 0;) {
        if (!(s.value[i] > 0) || !isfinite(s.value[i])) continue;
        all += s.value[i];
        const struct run_sample_query q = {.step = s.step[i], .uid = -1, .index = -1};
        if (looked++ < MAX_ERROR_STEPS) rc = run_reader_samples(r->reader, &q, count_error, by_status);
    }
    run_series_free(&s);
    if (rc < 0) json_decref(by_status);
    TRY(rc);
    return send_json(reply, json_pack("{s:f, s:I, s:I, s:o}", "all", all, "steps", (json_int_t)looked, "looked",
                                      (json_int_t)(looked < MAX_ERROR_STEPS ? looked : MAX_ERROR_STEPS), "by_status", by_status));
}

/* ---- search ---- */

struct search {
    struct run_reader *reader;
    struct run_search *search;
    int64_t n_hits;
    double told;
};

/* The line around its match: {from, to} are in bytes, cut at characters. */
static json_t *match_json(const struct run_match *m) {
    const char *p = m->line.p;
    size_t from = m->lo > LINE_BYTES / 4 ? m->lo - LINE_BYTES / 4 : 0;
    while (from > 0 && ((unsigned char)p[from] & 0xc0) == 0x80) from--;
    const size_t to = from + whole_characters(p + from, m->line.n - from, LINE_BYTES);
    const size_t hi = m->hi < to ? m->hi : to, lo = m->lo < hi ? m->lo : hi;
    json_t *o =
        json_pack("{s:I, s:I, s:I, s:I, s:b, s:b}", "id", (json_int_t)m->id, "step", (json_int_t)m->step, "uid", (json_int_t)m->uid,
                  "sample", (json_int_t)m->index, "validation", m->validation, "response", m->in_response);
    json_object_set_new(o, "score", number(m->score));
    json_object_set_new(o, "before", text(p + from, lo - from));
    json_object_set_new(o, "match", text(p + lo, hi - lo));
    json_object_set_new(o, "after", text(p + hi, to - hi));
    return o;
}

static int add_line(struct buf *out, json_t *o) {
    const int rc = json_dump_line(out, o);
    json_decref(o);
    return rc < 0 ? rc : buf_addc(out, '\n');
}

static int search_next(void *state, struct buf *out) {
    struct search *s = state;
    struct run_match m;
    const double end = clock_now() + 0.01;
    int what = RUN_SEARCH_MORE;
    while (clock_now() < end && s->n_hits < MAX_HITS) {
        what = run_search_next(s->search, 0.01, &m);
        TRY(what);
        if (what == RUN_SEARCH_END) break;
        if (what != RUN_SEARCH_MATCH) continue;
        s->n_hits++;
        TRY(add_line(out, match_json(&m)));
        run_search_skip_sample(s->search);
    }
    const bool more = what != RUN_SEARCH_END && s->n_hits < MAX_HITS;
    if (more && out->n == 0 && clock_now() - s->told < 0.2) return 1;
    int64_t done, total;
    run_search_progress(s->search, &done, &total);
    s->told = clock_now();
    TRY(add_line(out, json_pack("{s:I, s:I, s:b, s:b}", "done", (json_int_t)done, "total", (json_int_t)total, "more", more, "full",
                                s->n_hits >= MAX_HITS)));
    return more;
}

static void search_close(void *state) {
    struct search *s = state;
    run_search_destroy(s->search);
    run_reader_close(s->reader);
    free(s);
}

/* With a reader of its own, since it outlives this call. */
static int answer_search(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    const char *pattern = http_param(g, "q"), *in = http_param(g, "in");
    struct run_search_args a = {.pattern = pattern, .ignore_case = true, .prompts = true, .responses = true, .step = -1};
    int64_t match_case = 0;
    if (!pattern || !*pattern) FAIL(ERR_INVAL, "q: what to search for is missing");
    TRY(http_param_i64(g, "case", 0, 1, &match_case));
    TRY(http_param_i64(g, "step", -1, INT64_MAX, &a.step));
    a.ignore_case = !match_case;
    if (in && strcmp(in, "prompt") == 0) a.responses = false;
    if (in && strcmp(in, "response") == 0) a.prompts = false;
    TRY(asked_run(v, g, &r));
    struct search *s = xcalloc(1, sizeof *s);
    int rc = run_reader_open(&s->reader, r->dir);
    if (rc == 0) rc = run_search_create(&s->search, s->reader, &a);
    if (rc < 0) search_close(s);
    TRY(rc);
    reply->type = "application/x-ndjson";
    reply->stream = (struct http_stream){.next = search_next, .close = search_close, .state = s};
    return 0;
}

/* ---- */

int view_answer(void *view, const struct http_get *get, struct http_reply *reply) {
    static const struct {
        const char *path;
        int (*answer)(struct view *, const struct http_get *, struct http_reply *);
    } routes[] = {{"/api/runs", answer_runs},
                  {"/api/run", answer_run},
                  {"/api/state", answer_state},
                  {"/api/config", answer_config},
                  {"/api/series", answer_series},
                  {"/api/step", answer_step},
                  {"/api/histograms", answer_histograms},
                  {"/api/steps", answer_steps},
                  {"/api/samples", answer_samples},
                  {"/api/excerpts", answer_excerpts},
                  {"/api/group", answer_group},
                  {"/api/tokens", answer_tokens},
                  {"/api/errors", answer_errors},
                  {"/api/search", answer_search}};
    if (view_page_file(get->path, reply)) return 0;
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++)
        if (strcmp(get->path, routes[i].path) == 0) return routes[i].answer(view, get, reply);
    FAIL(ERR_INPUT, "there is no such page");
}
