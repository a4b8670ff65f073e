/* run_db.c - run.db: every step's metrics, every sample, what happened and what the run does, in SQLite (WAL), so that it
 * can be read while the run goes on. run_db_schema.c has its tables; run_db_store.c keeps what cannot be written at the moment. */
#include "track/run_db_schema.h"
#include "track/run_db_store.h"
#include "track/track_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <math.h>
#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BINS = 40 };

/* What a step's histograms count: training's samples, then validation's. */
struct values {
    double *v;
    int64_t n, cap;
};
enum { SCORE, LENGTH, N_HISTOGRAMS };
static const char *const histogram_names[N_HISTOGRAMS] = {"score", "response_length"};

struct db_ctx {
    struct run_db_store *store;
    sqlite3 *db; /* the store's stage */
    sqlite3_stmt *put_metric, *put_sample, *put_histogram, *put_status, *put_event, *put_meta;
    struct values seen[2][N_HISTOGRAMS]; /* since the last step's metrics */
    double end_by;
    char *path;
};

static int db_fail(const struct db_ctx *c, sqlite3 *db) { FAIL(ERR_IO, "%s: %s", c->path, sqlite3_errmsg(db)); }
static int file_exec(struct db_ctx *c, const char *sql) {
    sqlite3 *const db = run_db_store_file(c->store);
    return sqlite3_exec(db, sql, NULL, NULL, NULL) == SQLITE_OK ? 0 : db_fail(c, db);
}

static void db_close(void *v) {
    struct db_ctx *c = v;
    sqlite3_stmt *const all[] = {c->put_metric, c->put_sample, c->put_histogram, c->put_status, c->put_event, c->put_meta};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) sqlite3_finalize(all[i]);
    run_db_store_close(c->store, c->end_by);
    for (int i = 0; i < 2 * N_HISTOGRAMS; i++) free(c->seen[i / N_HISTOGRAMS][i % N_HISTOGRAMS].v);
    free(c->path);
    free(c);
}

static int prepare(struct db_ctx *c, sqlite3_stmt **st, const char *sql) {
    return sqlite3_prepare_v2(c->db, sql, -1, st, NULL) == SQLITE_OK ? 0 : db_fail(c, c->db);
}

static int run_stmt(struct db_ctx *c, sqlite3_stmt *st) {
    const int rc = sqlite3_step(st);
    sqlite3_reset(st);
    return rc == SQLITE_DONE ? 0 : db_fail(c, c->db);
}

/* Room for a record of so many bytes in addition to its row. */
static bool has_room(struct db_ctx *c, int64_t bytes, bool is_sample) {
    enum { ROW = 128 };
    return run_db_store_room(c->store, bytes + ROW, is_sample);
}

static int db_flush(void *v) { return run_db_store_flush(((struct db_ctx *)v)->store); }

/* ---- opening ---- */

static int set_meta(struct db_ctx *c, const char *key, const char *value) {
    if (!has_room(c, value ? (int64_t)strlen(value) : 0, false)) return 0;
    sqlite3_bind_text(c->put_meta, 1, key, -1, SQLITE_STATIC);
    sqlite3_bind_text(c->put_meta, 2, value, -1, SQLITE_STATIC);
    return run_stmt(c, c->put_meta);
}

static int set_meta_json(struct db_ctx *c, const char *key, const json_t *value) {
    struct buf text = {0};
    int rc = json_dump_line(&text, value);
    if (rc == 0) rc = set_meta(c, key, text.p);
    buf_free(&text);
    return rc;
}

static int set_meta_wall(struct db_ctx *c, const char *key) {
    char text[40];
    snprintf(text, sizeof text, "%.3f", clock_wall());
    return set_meta(c, key, text);
}

static int set_headline(struct db_ctx *c, const struct track_args *a) {
    json_t *list = json_array();
    for (int i = 0; a->headlines && a->headlines[i][0]; i++) json_array_append_new(list, json_string(a->headlines[i][0]));
    const int rc = set_meta_json(c, "headline", list);
    json_decref(list);
    return rc;
}

static int put_event(struct db_ctx *c, int64_t step, const char *kind, const char *message, double wall) {
    if (!has_room(c, (int64_t)strlen(message), false)) return 0;
    sqlite3_bind_int64(c->put_event, 1, step);
    sqlite3_bind_double(c->put_event, 2, wall);
    sqlite3_bind_text(c->put_event, 3, kind, -1, SQLITE_STATIC);
    sqlite3_bind_text(c->put_event, 4, message, -1, SQLITE_STATIC);
    return run_stmt(c, c->put_event);
}

static int set_status(struct db_ctx *c, const char *key, const char *text) {
    sqlite3_bind_text(c->put_status, 1, key, -1, SQLITE_STATIC);
    sqlite3_bind_text(c->put_status, 2, text, -1, SQLITE_STATIC);
    return run_stmt(c, c->put_status);
}
static int set_status_i64(struct db_ctx *c, const char *key, int64_t v) {
    sqlite3_bind_text(c->put_status, 1, key, -1, SQLITE_STATIC);
    sqlite3_bind_int64(c->put_status, 2, v);
    return run_stmt(c, c->put_status);
}
static int set_status_f64(struct db_ctx *c, const char *key, double v) {
    sqlite3_bind_text(c->put_status, 1, key, -1, SQLITE_STATIC);
    sqlite3_bind_double(c->put_status, 2, v);
    return run_stmt(c, c->put_status);
}

/* Of the run's first start; a resumed one has it. */
static int set_started(struct db_ctx *c) {
    sqlite3 *const file = run_db_store_file(c->store);
    sqlite3_stmt *st;
    if (sqlite3_prepare_v2(file, "SELECT 1 FROM meta WHERE key = 'started'", -1, &st, NULL) != SQLITE_OK) return db_fail(c, file);
    const bool there = sqlite3_step(st) == SQLITE_ROW;
    sqlite3_finalize(st);
    return there ? 0 : set_meta_wall(c, "started");
}

static int describe(struct db_ctx *c, const struct track_args *a) {
    char text[32], host[256] = "";
    gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text, "%d", RUN_DB_FORMAT);
    TRY(set_meta(c, "format", text));
    TRY(set_meta(c, "version", VERLC_VERSION));
    TRY(set_meta(c, "project", a->project));
    TRY(set_meta(c, "experiment", a->experiment));
    snprintf(text, sizeof text, "%lld", (long long)a->total_steps);
    TRY(set_meta(c, "total_steps", text));
    TRY(set_started(c));
    TRY(set_headline(c, a));
    if (a->config) TRY(set_meta_json(c, "config", a->config));
    else TRY(set_meta(c, "config", "{}"));
    if (a->plan) TRY(set_meta_json(c, "plan", a->plan));
    if (a->set) TRY(set_meta_json(c, "set", a->set));
    if (a->special_tokens) TRY(set_meta_json(c, "special_tokens", a->special_tokens));
    TRY(set_status_i64(c, "pid", getpid()));
    TRY(set_status(c, "host", host));
    if (a->resume_step <= 0) return 0;
    snprintf(text, sizeof text, "from step %lld", (long long)a->resume_step);
    return put_event(c, a->resume_step, "resume", text, clock_wall());
}

static int prepare_all(struct db_ctx *c) {
    TRY(prepare(c, &c->put_metric, "INSERT OR REPLACE INTO metrics VALUES(?, ?, ?)"));
    TRY(prepare(c, &c->put_sample,
                "INSERT INTO samples(step, validation, uid, sample, data_source, prompt, response, ground_truth, score, advantage,"
                " reward_status, finish, prompt_ids, ids, logp, extra, entropy, ref_logp, advantages, reward_message,"
                " token_bytes, versions, prompt_number, place, prompt_bytes, segments, episode, routed_experts)"
                " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"));
    TRY(prepare(c, &c->put_histogram, "INSERT OR REPLACE INTO histograms VALUES(?, ?, ?, ?, ?, ?)"));
    TRY(prepare(c, &c->put_meta, "INSERT OR REPLACE INTO meta VALUES(?, ?)"));
    TRY(prepare(c, &c->put_status, "INSERT OR REPLACE INTO status VALUES(?, ?)"));
    return prepare(c, &c->put_event, "INSERT INTO events VALUES(NULL, ?, ?, ?, ?)");
}

/* What the new run does not continue goes. */
static int forget_later(struct db_ctx *c, int64_t resume_step) {
    static const char *const by_step[] = {"metrics", "samples", "histograms"};
    char sql[128];
    const long long keep = resume_step > 0 ? resume_step : -1; /* a new run starts empty */
    TRY(file_exec(c, "BEGIN IMMEDIATE"));
    for (size_t i = 0; i < sizeof by_step / sizeof *by_step; i++) {
        snprintf(sql, sizeof sql, "DELETE FROM %s WHERE step > %lld", by_step[i], keep);
        TRY(file_exec(c, sql));
    }
    TRY(file_exec(c, "DELETE FROM status; DELETE FROM meta WHERE key IN ('ended', 'exit')"));
    if (keep < 0) TRY(file_exec(c, "DELETE FROM events; DELETE FROM meta")); /* what happened stays with a resumed run */
    return file_exec(c, "COMMIT");
}

static int start(struct db_ctx *c, const struct track_args *a) {
    const struct run_db_store_args s = {
        .dir = a->run_dir, .schema = run_db_schema, .complete = run_db_add_columns, .fresh = a->resume_step <= 0};
    TRY(run_db_store_open(&c->store, &s));
    c->db = run_db_store_stage(c->store);
    TRY(prepare_all(c));
    TRY(forget_later(c, a->resume_step));
    TRY(describe(c, a));
    return db_flush(c);
}

double track_began(const char *run_dir) {
    sqlite3 *db = NULL;
    sqlite3_stmt *st = NULL;
    char *path = file_join(run_dir, "run.db");
    double began = 0;
    if (file_exists(path) && sqlite3_open_v2(path, &db, SQLITE_OPEN_READONLY, NULL) == SQLITE_OK &&
        sqlite3_prepare_v2(db, "SELECT CAST(value AS REAL) FROM meta WHERE key = 'started'", -1, &st, NULL) == SQLITE_OK &&
        sqlite3_step(st) == SQLITE_ROW)
        began = sqlite3_column_double(st, 0);
    sqlite3_finalize(st);
    sqlite3_close(db);
    free(path);
    return began > 0 && began < 1e11 ? began : 0;
}

static int db_open(void **ctx, const char *name, const struct track_args *a) {
    (void)name;
    struct db_ctx *c = xcalloc(1, sizeof *c);
    c->path = file_join(a->run_dir, "run.db");
    const int rc = start(c, a);
    if (rc < 0) {
        struct err_saved why;
        err_save(&why);
        db_close(c);
        err_restore(&why);
    } else {
        *ctx = c;
    }
    return rc;
}

/* ---- records ---- */

static void see(struct values *s, double v) {
    if (!isfinite(v)) return;
    xgrow((void **)&s->v, &s->cap, s->n + 1, sizeof *s->v);
    s->v[s->n++] = v;
}

/* Which of the bins from lo to hi has v; lo <= v <= hi, all finite. */
static int bin_of(double v, double lo, double hi) {
    const double whole = hi - lo, share = isfinite(whole) ? (v - lo) / whole : (v / 2 - lo / 2) / (hi / 2 - lo / 2);
    if (!(hi > lo) || !(share > 0)) return 0;
    return share < 1 ? (int)(share * BINS) : BINS - 1;
}

static int put_histogram(struct db_ctx *c, int64_t step, int validation, const char *name, const struct values *s) {
    int32_t counts[BINS] = {0};
    double lo = s->v[0], hi = s->v[0];
    for (int64_t i = 1; i < s->n; i++) {
        lo = fmin(lo, s->v[i]);
        hi = fmax(hi, s->v[i]);
    }
    for (int64_t i = 0; i < s->n; i++) counts[bin_of(s->v[i], lo, hi)]++;
    sqlite3_stmt *st = c->put_histogram;
    sqlite3_bind_int64(st, 1, step);
    sqlite3_bind_int(st, 2, validation);
    sqlite3_bind_text(st, 3, name, -1, SQLITE_STATIC);
    sqlite3_bind_double(st, 4, lo);
    sqlite3_bind_double(st, 5, hi);
    sqlite3_bind_blob(st, 6, counts, sizeof counts, SQLITE_STATIC);
    return run_stmt(c, st);
}

static int put_histograms(struct db_ctx *c, int64_t step) {
    for (int val = 0; val < 2; val++)
        for (int k = 0; k < N_HISTOGRAMS; k++) {
            struct values *s = &c->seen[val][k];
            if (s->n > 0) TRY(put_histogram(c, step, val, histogram_names[k], s));
            s->n = 0;
        }
    return 0;
}

static int db_log(void *v, int64_t step, const struct metrics *m, double wall) {
    struct db_ctx *c = v;
    const char *why;
    if (run_db_store_is_news(c->store, &why)) TRY(put_event(c, step, "warning", why, wall));
    for (int64_t i = 0; i < m->n; i++) {
        if (!has_room(c, (int64_t)strlen(m->items[i].name), false)) continue;
        sqlite3_bind_int64(c->put_metric, 1, step);
        sqlite3_bind_text(c->put_metric, 2, m->items[i].name, -1, SQLITE_STATIC);
        sqlite3_bind_double(c->put_metric, 3, m->items[i].value); /* NaN is stored as NULL */
        TRY(run_stmt(c, c->put_metric));
    }
    return put_histograms(c, step);
}

static void bind_f32(sqlite3_stmt *st, int at, const float *v, int64_t n) {
    sqlite3_bind_blob64(st, at, v, (sqlite3_uint64)n * sizeof *v, SQLITE_STATIC); /* NULL is stored as NULL */
}

/* Versions of n tokens as (tokens, version) of each run of equal ones. */
static void add_runs(struct buf *b, const int32_t *versions, int64_t n) {
    for (int64_t t = 0, lo = 0; t < n; t++) {
        if (t + 1 < n && versions[t + 1] == versions[t]) continue;
        buf_add(b, (const int32_t[]){(int32_t)(t + 1 - lo), versions[t]}, 2 * sizeof(int32_t));
        lo = t + 1;
    }
}

static int64_t sample_bytes(const struct track_sample *s) {
    const int64_t per_token =
        4 + 4 + (s->entropy ? 4 : 0) + (s->ref_logp ? 4 : 0) + (s->advantages ? 4 : 0) + (s->token_bytes ? 2 : 0);
    return (int64_t)(s->prompt.n + s->response.n + s->ground_truth.n) + 4 * s->n_prompt + per_token * s->n +
           (s->segments ? 8 * s->n_segments : 0) + 4 * s->n_routes;
}

static int db_sample(void *v, const struct track_sample *s) {
    struct db_ctx *c = v;
    sqlite3_stmt *st = c->put_sample;
    struct buf extra = {0}, runs = {0}, episode = {0};
    if (s->episode) TRY(json_dump_line(&episode, s->episode));
    if (!has_room(c, sample_bytes(s) + (int64_t)episode.n, true)) {
        buf_free(&episode);
        return 0;
    }
    if (s->extra) TRY(json_dump_line(&extra, s->extra));
    sqlite3_bind_int64(st, 1, s->step);
    sqlite3_bind_int(st, 2, s->validation);
    sqlite3_bind_int64(st, 3, s->uid);
    sqlite3_bind_int64(st, 4, s->index);
    sqlite3_bind_text(st, 5, s->data_source, -1, SQLITE_STATIC);
    const struct track_text texts[] = {s->prompt, s->response, s->ground_truth};
    for (int i = 0; i < 3; i++) /* whole, NUL or not: SQLite keeps the bytes, its shell shows those before the NUL */
        sqlite3_bind_text64(st, 6 + i, texts[i].p, (sqlite3_uint64)texts[i].n, SQLITE_STATIC, SQLITE_UTF8);
    sqlite3_bind_double(st, 9, s->score);
    sqlite3_bind_double(st, 10, s->advantage);
    sqlite3_bind_text(st, 11, s->reward_status, -1, SQLITE_STATIC);
    sqlite3_bind_text(st, 12, s->finish, -1, SQLITE_STATIC);
    sqlite3_bind_blob64(st, 13, s->prompt_ids, (sqlite3_uint64)s->n_prompt * 4, SQLITE_STATIC);
    sqlite3_bind_blob64(st, 14, s->ids, (sqlite3_uint64)s->n * 4, SQLITE_STATIC);
    bind_f32(st, 15, s->logp, s->n);
    sqlite3_bind_text64(st, 16, extra.p, (sqlite3_uint64)extra.n, SQLITE_STATIC, SQLITE_UTF8);
    bind_f32(st, 17, s->entropy, s->n);
    bind_f32(st, 18, s->ref_logp, s->n);
    bind_f32(st, 19, s->advantages, s->n);
    sqlite3_bind_text(st, 20, s->reward_message, -1, SQLITE_STATIC);
    sqlite3_bind_blob64(st, 21, s->token_bytes, (sqlite3_uint64)s->n * 2, SQLITE_STATIC);
    if (s->versions) add_runs(&runs, s->versions, s->n);
    sqlite3_bind_blob64(st, 22, s->versions ? runs.p : NULL, (sqlite3_uint64)runs.n, SQLITE_STATIC);
    sqlite3_bind_null(st, 23);
    sqlite3_bind_null(st, 24);
    if (s->versions && s->place >= 0) sqlite3_bind_int64(st, 23, s->prompt_number);
    if (s->versions && s->place >= 0) sqlite3_bind_int64(st, 24, s->place);
    sqlite3_bind_blob64(st, 25, s->prompt_bytes, (sqlite3_uint64)s->n_prompt * 2, SQLITE_STATIC);
    sqlite3_bind_blob64(st, 26, s->segments, (sqlite3_uint64)s->n_segments * 8, SQLITE_STATIC);
    sqlite3_bind_text64(st, 27, episode.p, (sqlite3_uint64)episode.n, SQLITE_STATIC, SQLITE_UTF8);
    sqlite3_bind_blob64(st, 28, s->routes, (sqlite3_uint64)s->n_routes * 4, SQLITE_STATIC);
    const int rc = run_stmt(c, st);
    buf_free(&extra);
    buf_free(&episode);
    buf_free(&runs);
    see(&c->seen[s->validation][SCORE], s->score);
    see(&c->seen[s->validation][LENGTH], (double)s->n);
    return rc;
}

static int db_event(void *v, int64_t step, const char *kind, const char *message, double wall) {
    return put_event(v, step, kind, message, wall);
}

/* Committed at once, and with it the samples so far. */
static int db_status(void *v, const struct track_status *s, double wall) {
    struct db_ctx *c = v;
    if (!has_room(c, 0, false)) return 0;
    TRY(set_status_i64(c, "step", s->step));
    TRY(set_status(c, "phase", s->phase));
    TRY(set_status_i64(c, "done", s->done));
    TRY(set_status_i64(c, "total", s->total));
    TRY(set_status_f64(c, "tok_s", s->tok_s));
    TRY(set_status_f64(c, "phase_since", s->since));
    TRY(set_status_f64(c, "wall", wall));
    return db_flush(c);
}

static void db_end(void *v, const char *how, const char *why, double end_by) {
    struct db_ctx *c = v;
    c->end_by = end_by;
    char *text = why ? xasprintf("%s: %s", how, why) : xstrdup(how);
    if (set_meta(c, "exit", text) < 0 || set_meta_wall(c, "ended") < 0) log_warn("tracker run.db: %s", err_msg());
    free(text);
}

const struct tracker track_db = {.name = "run.db",
                                 .open = db_open,
                                 .log = db_log,
                                 .sample = db_sample,
                                 .event = db_event,
                                 .status = db_status,
                                 .flush = db_flush,
                                 .end = db_end,
                                 .close = db_close};
