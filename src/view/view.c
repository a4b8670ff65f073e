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
 *   /api/excerpts?...&offset=&limit=        the beginnings of the user's last messages and of the responses
 *   /api/group?...&uid=                     a group's samples, with texts
 *   /api/prompt?run=ID&uid=&validation=     a prompt's samples in all steps
 *   /api/tokens?run=ID&id=&prompt=          the tokens of one sample, with prompt=1 its prompt's too
 *   /api/errors?run=ID                      samples without a score: by status, with an example of each
 *   /api/search?run=ID&q=&case=&in=&step=&min=&max=&ids=   a stream: a JSON object a line */
#include "view/view_int.h"

#include "base/encoding/base64.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "track/metric_table.h"
#include "track/run_lock.h"
#include "view/run_notes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_NAMES = 64, MAX_OPEN = 8, SILENT_S = 60, MEAN_STEPS = 10, LOOKED_STEPS = 2000 };

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

json_t *view__number(double v) { return isfinite(v) ? json_real(v) : json_null(); }

/* UTF-8, of a text that may have been cut. */
json_t *view__text(const char *p, size_t n) {
    json_t *v = json_stringn(p ? p : "", p ? n : 0);
    return v ? v : json_string("\xef\xbf\xbd");
}
json_t *view__text0(const char *p) { return p ? view__text(p, strlen(p)) : json_null(); }

json_t *view__base64(const void *data, size_t n) {
    char *text = base64_text(data, n);
    json_t *v = json_stringn_nocheck(text, (n + 2) / 3 * 4);
    free(text);
    return v;
}
json_t *view__steps(const int64_t *v, int64_t n) { return view__base64(v, (size_t)n * sizeof *v); }

int view__send(struct http_reply *reply, json_t *o) {
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
        struct run_list places = {0};
        rc = run_list_find(&places, v->roots[i]);
        for (int64_t k = 0; k < places.n && rc == 0; k++) {
            char *dir = realpath(places.v[k].dir, NULL);
            struct run *r = dir ? take_run(v, dir) : NULL;
            free(dir);
            if (!r) continue; /* removed since */
            if (r->modified != places.v[k].modified) {
                json_decref(r->summary);
                r->summary = NULL;
            }
            r->modified = places.v[k].modified;
            xgrow((void **)&found.v, &found.cap, found.n + 1, sizeof *found.v);
            found.v[found.n++] = r;
        }
        run_list_free(&places);
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

int view__reader(struct view *v, const struct http_get *g, struct run_reader **out) {
    struct run *r;
    TRY(asked_run(v, g, &r));
    *out = r->reader;
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

/* "running", "done", "failed", "killed"; "lost": it has not reported its end, and has exited. Where a file system
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
    json_object_set_new(o, "phase", view__text0(s->phase));
    json_object_set_new(o, "host", view__text0(s->host));
    json_object_set_new(o, "tok_s", view__number(s->tok_s));
    json_object_set_new(o, "since", view__number(s->since));
    json_object_set_new(o, "wall", view__number(s->wall));
    return o;
}

/* Notes and tags; of a file that is something else the reason stands in place of a note. */
static void add_notes(json_t *o, const struct run *r) {
    json_t *notes = NULL;
    if (run_notes_read(&notes, r->dir) < 0)
        notes = json_pack("{s:[], s:[{s:i, s:o}]}", "tags", "notes", "wall", 0, "text", view__text0(err_msg()));
    json_object_update(o, notes);
    json_decref(notes);
}

/* What every answer about a run begins with. epoch changes when the file is another one or its run was started again. */
static json_t *head(const struct run *r, const struct run_meta *m, const struct run_status *s) {
    char epoch[96];
    snprintf(epoch, sizeof epoch, "%llx-%llx-%.3f-%lld", (unsigned long long)r->dev, (unsigned long long)r->ino, m->started,
             (long long)s->pid);
    json_t *o = json_pack("{s:s, s:s, s:s}", "id", r->id, "epoch", epoch, "state", state_of(r, m, s));
    json_object_set_new(o, "dir", view__text0(r->dir));
    json_object_set_new(o, "project", view__text0(m->project));
    json_object_set_new(o, "experiment", view__text0(m->experiment));
    json_object_set_new(o, "version", view__text0(m->version));
    json_object_set_new(o, "exit", view__text0(m->exit));
    json_object_set_new(o, "step", json_integer(m->last_step));
    json_object_set_new(o, "total", json_integer(m->total_steps));
    json_object_set_new(o, "format", json_integer(m->format));
    json_object_set_new(o, "started", view__number(m->started));
    json_object_set_new(o, "ended", view__number(m->ended));
    json_object_set_new(o, "now", view__number(clock_wall()));
    json_object_set_new(o, "status", status_json(s));
    add_notes(o, r);
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

/* {"name", "value"} of the first of these that the run has lately, or null. */
static int recent(struct run_reader *reader, const char *const *prefixes, int n, json_t **out) {
    char name[256] = "";
    double v = NAN;
    *out = json_null();
    for (const char *const *p = prefixes; *p && !name[0]; p++) TRY(run_reader_recent(reader, *p, n, LOOKED_STEPS, name, &v));
    if (!name[0]) return 0;
    *out = json_object();
    json_object_set_new(*out, "name", view__text0(name));
    return json_object_set_new(*out, "value", view__number(v));
}

/* A number of the configuration, whether YAML took it for one or for a text (1e-6); null: none. */
static json_t *config_number(const json_t *config, const char *const *keys) {
    for (; *keys; keys++) {
        char *path = xstrdup(*keys), *rest = path, *end;
        const json_t *v = config;
        for (char *part; v && (part = strsep(&rest, "."));) v = json_object_get(v, part);
        free(path);
        if (json_is_number(v)) return view__number(json_number_value(v));
        const char *s = json_string_value(v);
        const double x = s ? strtod(s, &end) : NAN;
        if (s && *s && !*end) return view__number(x);
    }
    return json_null();
}

/* What the list of runs shows in addition to the head. */
static int add_results(json_t *o, struct run *r, const struct run_meta *m) {
    static const char *const rewards[] = {"critic/rewards/mean", "critic/score/mean", NULL};
    static const char *const validations[] = {"val-core/", "val/loss", "val-", NULL};
    static const char *const rates[] = {"actor_rollout_ref.actor.optim.lr", "optim.lr", NULL};
    const char *state = json_string_value(json_object_get(o, "state"));
    const double end = strcmp(state, "running") == 0 ? clock_wall() : m->ended > 0 ? m->ended : r->modified;
    json_t *v;
    TRY(recent(r->reader, rewards, MEAN_STEPS, &v));
    json_object_set_new(o, "reward", v);
    TRY(recent(r->reader, validations, 1, &v));
    json_object_set_new(o, "validation", v);
    json_object_set_new(o, "lr", config_number(m->config, rates));
    return json_object_set_new(o, "seconds", view__number(m->started > 0 && end > m->started ? end - m->started : NAN));
}

static json_t *summary(struct view *v, struct run *r) {
    struct run_meta m = {0};
    json_t *o = NULL;
    const double modified = r->modified;
    int rc = open_run(v, r);
    if (rc == 0) rc = run_head(r, &m, &o);
    if (rc == 0) rc = add_results(o, r, &m);
    run_meta_free(&m);
    if (rc < 0) {
        json_decref(o);
        o = json_pack("{s:s, s:s}", "id", r->id, "state", "broken");
        json_object_set_new(o, "dir", view__text0(r->dir));
        json_object_set_new(o, "error", view__text0(err_msg()));
    }
    json_object_set_new(o, "modified", view__number(modified));
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
        } else if (strcmp(state, "broken") != 0) {
            add_notes(r->summary, r);
        }
        json_array_append(list, r->summary);
    }
    return view__send(reply, json_pack("{s:o}", "runs", list));
}

static json_t *names_json(const struct run_names *names) {
    json_t *list = json_array();
    for (int64_t i = 0; i < names->n; i++) {
        const struct metric_row *row = metric_row_of(names->v[i]);
        json_t *o = json_object();
        json_object_set_new(o, "name", view__text0(names->v[i]));
        if (row) {
            json_object_set_new(o, "text", view__text0(row->text));
            json_object_set_new(o, "reading", view__text0(row->reading));
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
    if (m.special_tokens) json_object_set(o, "special", m.special_tokens);
    run_meta_free(&m);
    const int rc = run_reader_metric_names(r->reader, &names);
    if (rc < 0) {
        json_decref(o);
        return rc;
    }
    json_object_set_new(o, "names", names_json(&names));
    run_names_free(&names);
    return view__send(reply, o);
}

static int add_event(void *list, const struct run_event *e) {
    json_t *o = json_pack("{s:I, s:I}", "id", (json_int_t)e->id, "step", (json_int_t)e->step);
    json_object_set_new(o, "wall", view__number(e->wall));
    json_object_set_new(o, "kind", view__text0(e->kind));
    json_object_set_new(o, "message", view__text0(e->message));
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
    return view__send(reply, o);
}

static int answer_config(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct run_meta m = {0};
    TRY(asked_run(v, g, &r));
    TRY(run_reader_meta(r->reader, &m));
    json_t *o = json_object();
    json_object_set_new(o, "config", m.config ? json_incref(m.config) : json_object());
    json_object_set_new(o, "set", m.set ? json_incref(m.set) : json_null());
    run_meta_free(&m);
    return view__send(reply, o);
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
                            json_pack("{s:o, s:o}", "step", view__steps(s->step, s->n), "value",
                                      view__base64(s->value, (size_t)s->n * sizeof *s->value)));
        run_series_free(&all[i]);
    }
    return view__send(reply, json_pack("{s:o}", "series", o));
}

static int answer_step(struct view *v, const struct http_get *g, struct http_reply *reply) {
    struct run *r;
    struct metrics m = {0};
    int64_t step = 0;
    TRY(http_param_i64(g, "step", 0, INT64_MAX, &step));
    TRY(asked_run(v, g, &r));
    const int rc = run_reader_step(r->reader, step, &m);
    json_t *o = json_object();
    for (int64_t i = 0; i < m.n && rc == 0; i++) json_object_set_new(o, m.items[i].name, view__number(m.items[i].value));
    metrics_free(&m);
    if (rc < 0) json_decref(o);
    TRY(rc);
    return view__send(reply, json_pack("{s:o}", "metrics", o));
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

int view__is_validation(const struct http_get *g, bool *out) {
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
    TRY(view__is_validation(g, &validation));
    TRY(asked_run(v, g, &r));
    const int rc = run_reader_histograms(r->reader, name ? name : "score", validation, since, add_histogram, &b);
    json_t *o = json_pack("{s:I, s:o, s:o, s:o}", "bins", (json_int_t)b.n, "step", view__base64(b.step.p, b.step.n), "range",
                          view__base64(b.range.p, b.range.n), "counts", view__base64(b.counts.p, b.counts.n));
    buf_free(&b.step);
    buf_free(&b.range);
    buf_free(&b.counts);
    if (rc < 0) json_decref(o);
    TRY(rc);
    return view__send(reply, o);
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
                  {"/api/steps", view__steps_answer},
                  {"/api/samples", view__samples},
                  {"/api/excerpts", view__excerpts},
                  {"/api/group", view__group},
                  {"/api/prompt", view__prompt},
                  {"/api/tokens", view__tokens},
                  {"/api/errors", view__errors},
                  {"/api/search", view__search}};
    if (view_page_file(get->path, reply)) return 0;
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++)
        if (strcmp(get->path, routes[i].path) == 0) return routes[i].answer(view, get, reply);
    FAIL(ERR_INPUT, "there is no such page");
}
