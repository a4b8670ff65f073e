/* run_reader.c - see run_reader.h: opening, what is known of the run, metrics, histograms, events.
 *
 * Invariant: no value is used before its type and size are checked. */
#include "view/run_reader_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/encoding/utf8.h"
#include "text/text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { FORMAT = 2, MAX_ROWS = 10000000, MAX_BYTES = 256 << 20, MAX_BINS = 4096, SHOWN_RUNS = 5 };
#define QUERY_S 60.0

/* ---- opening ---- */

static int give_up(void *v) { return clock_now() > ((struct run_reader *)v)->deadline; }

/* What the directory has instead of a run. */
static int no_run(const char *dir) {
    struct run_list found = {0};
    struct buf b = {0};
    if (run_list_find(&found, dir) == 0)
        for (int64_t i = 0; i < found.n && i < SHOWN_RUNS; i++) buf_addf(&b, "%s%s", i ? ", " : "", found.v[i].dir);
    if (found.n > SHOWN_RUNS) buf_addf(&b, " and %lld more", (long long)found.n - SHOWN_RUNS);
    if (found.n > 0) err_set(ERR_INPUT, __FILE__, __LINE__, "%s has no run.db; runs below it: %s", dir, b.p);
    else
        err_set(ERR_INPUT, __FILE__, __LINE__,
                "%s has no run.db, nor has a directory below it; a run is the directory of trainer.default_local_dir", dir);
    run_list_free(&found);
    buf_free(&b);
    return ERR_INPUT;
}

/* The database's error as one of ours. */
static int fail(const struct run_reader *r) {
    switch (sqlite3_errcode(r->db) & 0xff) {
    case SQLITE_INTERRUPT: FAIL(ERR_TIMEOUT, "%s: a query took longer than %.0f s", r->path, QUERY_S);
    case SQLITE_NOTADB:
    case SQLITE_CORRUPT:
    case SQLITE_TOOBIG:
    case SQLITE_ERROR: FAIL(ERR_FORMAT, "%s cannot be read: %s", r->path, sqlite3_errmsg(r->db));
    default: FAIL(ERR_INPUT, "%s cannot be read: %s", r->path, sqlite3_errmsg(r->db));
    }
}

/* A database in a directory where nothing can be created, and that no run writes: read as it is. */
static int open_unchanging(struct run_reader *r) {
    struct buf uri = {0};
    char *wal = xasprintf("%s-wal", r->path);
    const bool written = file_size(wal) > 0;
    free(wal);
    if (written) return fail(r);
    buf_adds(&uri, "file:");
    for (const char *p = r->path; *p; p++) {
        if (*p == '%' || *p == '?' || *p == '#') buf_addf(&uri, "%%%02X", (unsigned char)*p);
        else buf_addc(&uri, *p);
    }
    buf_adds(&uri, "?immutable=1");
    sqlite3_close(r->db);
    r->db = NULL;
    const int code = sqlite3_open_v2(uri.p, &r->db, SQLITE_OPEN_READONLY | SQLITE_OPEN_URI, NULL);
    buf_free(&uri);
    return code == SQLITE_OK ? 0 : fail(r);
}

static void prepare(struct run_reader *r) {
    sqlite3_busy_timeout(r->db, 2000);
    sqlite3_limit(r->db, SQLITE_LIMIT_LENGTH, MAX_BYTES);
    sqlite3_db_config(r->db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    sqlite3_db_config(r->db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, NULL); /* its text is not ours */
    sqlite3_progress_handler(r->db, 20000, give_up, r);
}

static int open_file(struct run_reader *r) {
    TRY(file_check(r->path));
    if (sqlite3_open_v2(r->path, &r->db, SQLITE_OPEN_READONLY, NULL) != SQLITE_OK) return fail(r);
    prepare(r);
    r->deadline = clock_now() + QUERY_S;
    const int code = sqlite3_exec(r->db, "SELECT 1 FROM sqlite_schema", NULL, NULL, NULL);
    if (code != SQLITE_CANTOPEN && code != SQLITE_READONLY) return code == SQLITE_OK ? 0 : fail(r);
    TRY(open_unchanging(r));
    prepare(r);
    return 0;
}

/* 1: a table of rows, not a view or a virtual table, in which anything may be computed. */
static int has_table(struct run_reader *r, const char *name) {
    sqlite3_stmt *st;
    TRY(reader__query(r, &st, "SELECT 1 FROM sqlite_schema WHERE name = ? AND type = 'table' AND sql LIKE 'CREATE TABLE%'"));
    sqlite3_bind_text(st, 1, name, -1, SQLITE_STATIC);
    const int rc = reader__row(r, st);
    sqlite3_finalize(st);
    return rc;
}

static int has_column(struct run_reader *r, const char *name) {
    sqlite3_stmt *st;
    TRY(reader__query(r, &st, "SELECT 1 FROM pragma_table_info('samples') WHERE name = ?"));
    sqlite3_bind_text(st, 1, name, -1, SQLITE_STATIC);
    const int rc = reader__row(r, st);
    sqlite3_finalize(st);
    return rc;
}

static int look(struct run_reader *r) {
    static const char *const needed[] = {"meta", "metrics", "samples"};
    static const char *const columns[N_COLUMNS] = {"entropy",  "ref_logp",     "advantages", "reward_message", "token_bytes",
                                                   "versions", "prompt_bytes", "segments",   "episode"};
    sqlite3_stmt *st;
    int rc;
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        TRY(rc = has_table(r, needed[i]));
        if (rc == 0) FAIL(ERR_FORMAT, "%s is no run.db of verlc: it has no table %s", r->path, needed[i]);
    }
    TRY(rc = has_table(r, "status"));
    r->has_status = rc;
    TRY(rc = has_table(r, "events"));
    r->has_events = rc;
    TRY(rc = has_table(r, "histograms"));
    r->has_histograms = rc;
    for (int i = 0; i < N_COLUMNS; i++) {
        TRY(rc = has_column(r, columns[i]));
        r->has[i] = rc;
    }
    TRY(reader__query(r, &st, "SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'format'"));
    rc = reader__row(r, st);
    r->format = rc == 1 ? reader__i64(st, 0) : 1;
    sqlite3_finalize(st);
    TRY(rc);
    if (r->format > FORMAT)
        FAIL(ERR_UNSUPPORTED, "%s has format %lld, of a later verlc; this one reads up to %d", r->path, (long long)r->format,
             FORMAT);
    return 0;
}

/* What its run could not write before it ended; where it cannot be written now either, run.db is read as it is. */
static void take_in(const struct run_reader *r) {
    const char *slash = strrchr(r->path, '/');
    if (strcmp(slash ? slash + 1 : r->path, "run.db") != 0) return;
    const int rc = track_take_in(r->dir);
    if (rc > 0) log_info("%s has now what was kept in run.kept.db while it could not be written", r->path);
    if (rc < 0) log_note("%s has not the last records of its run, which are in run.kept.db: %s", r->path, err_msg());
}

int run_reader_open(struct run_reader **out, const char *path) {
    struct run_reader *r = xcalloc(1, sizeof *r);
    int rc = 0;
    if (file_is_dir(path)) {
        r->dir = xstrdup(path);
        r->path = file_join(path, "run.db");
    } else {
        const char *slash = strrchr(path, '/');
        r->path = xstrdup(path);
        r->dir = !slash ? xstrdup(".") : xstrndup(path, slash == path ? 1 : (size_t)(slash - path));
    }
    if (!file_exists(r->path) && file_is_dir(path)) rc = no_run(path);
    else if (!file_exists(r->path))
        rc = err_set(ERR_INPUT, __FILE__, __LINE__,
                     "%s does not exist; a run is the directory of trainer.default_local_dir, or its run.db", path);
    if (rc == 0) take_in(r);
    if (rc == 0) rc = open_file(r);
    if (rc == 0) rc = look(r);
    if (rc < 0) run_reader_close(r);
    else *out = r;
    return rc;
}

void run_reader_close(struct run_reader *r) {
    if (!r) return;
    sqlite3_close(r->db);
    free(r->dir);
    free(r->path);
    free(r);
}

const char *run_reader_dir(const struct run_reader *r) { return r->dir; }

/* ---- rows ---- */

int reader__query(struct run_reader *r, sqlite3_stmt **st, const char *sql) {
    r->deadline = clock_now() + QUERY_S;
    return sqlite3_prepare_v2(r->db, sql, -1, st, NULL) == SQLITE_OK ? 0 : fail(r);
}

int reader__row(struct run_reader *r, sqlite3_stmt *st) {
    const int code = sqlite3_step(st);
    return code == SQLITE_ROW ? 1 : code == SQLITE_DONE ? 0 : fail(r);
}

int64_t reader__i64(sqlite3_stmt *st, int column) {
    return sqlite3_column_type(st, column) == SQLITE_INTEGER ? sqlite3_column_int64(st, column) : 0;
}
double reader__f64(sqlite3_stmt *st, int column) {
    const int type = sqlite3_column_type(st, column);
    return type == SQLITE_INTEGER || type == SQLITE_FLOAT ? sqlite3_column_double(st, column) : NAN;
}
bool reader__is_text(sqlite3_stmt *st, int column) { return sqlite3_column_type(st, column) == SQLITE_TEXT; }

struct track_text reader__text(sqlite3_stmt *st, int column, struct reader__texts *keep) {
    if (!reader__is_text(st, column)) return (struct track_text){"", 0};
    struct buf b = {0};
    const char *p = (const char *)sqlite3_column_text(st, column);
    const size_t n = (size_t)sqlite3_column_bytes(st, column);
    CHECK(keep->n < (int)(sizeof keep->v / sizeof *keep->v));
    if (p) text_utf8_repair(&b, p, n);
    const size_t got = b.n;
    return (struct track_text){keep->v[keep->n++] = buf_take(&b), got};
}

void reader__texts_free(struct reader__texts *t) {
    while (t->n > 0) free(t->v[--t->n]);
}

/* ---- what is known of the run ---- */

static char *text_copy(sqlite3_stmt *st, int column) {
    struct reader__texts keep = {0};
    char *s = xstrdup(reader__text(st, column, &keep).p);
    reader__texts_free(&keep);
    return s;
}

/* An object or array of a meta row; another value is none. */
static json_t *json_of(sqlite3_stmt *st, int column, int type) {
    struct reader__texts keep = {0};
    const struct track_text t = reader__text(st, column, &keep);
    json_t *v = NULL;
    if (json_parse(&v, t.p, t.n, "run.db") < 0) v = NULL;
    reader__texts_free(&keep);
    if (v && json_typeof(v) != (json_type)type) {
        json_decref(v);
        v = NULL;
    }
    return v;
}

static double number_of(sqlite3_stmt *st, int column) {
    char *s = text_copy(st, column), *end;
    const double v = strtod(s, &end);
    const bool ok = *s && !*end && isfinite(v) && v >= 0 && v < 0x1p53;
    free(s);
    return ok ? v : 0;
}

static void take_meta(struct run_meta *m, sqlite3_stmt *st) {
    char *key = text_copy(st, 0);
    char **const texts[] = {&m->version, &m->project, &m->experiment, &m->exit};
    static const char *const text_keys[] = {"version", "project", "experiment", "exit"};
    json_t **const values[] = {&m->config, &m->plan, &m->special_tokens, &m->headline, &m->set};
    static const char *const value_keys[] = {"config", "plan", "special_tokens", "headline", "set"};
    for (int i = 0; i < 4; i++)
        if (strcmp(key, text_keys[i]) == 0) {
            free(*texts[i]);
            *texts[i] = text_copy(st, 1);
        }
    for (int i = 0; i < 5; i++)
        if (strcmp(key, value_keys[i]) == 0) {
            json_decref(*values[i]);
            *values[i] = json_of(st, 1, i >= 3 ? JSON_ARRAY : JSON_OBJECT);
        }
    if (strcmp(key, "total_steps") == 0) m->total_steps = (int64_t)number_of(st, 1);
    if (strcmp(key, "started") == 0) m->started = number_of(st, 1);
    if (strcmp(key, "ended") == 0) m->ended = number_of(st, 1);
    free(key);
}

int run_reader_meta(struct run_reader *r, struct run_meta *m) {
    sqlite3_stmt *st;
    *m = (struct run_meta){.format = r->format, .last_step = -1};
    TRY(reader__query(r, &st, "SELECT key, value FROM meta LIMIT 1000"));
    int rc;
    while ((rc = reader__row(r, st)) == 1) take_meta(m, st);
    sqlite3_finalize(st);
    if (rc == 0) rc = reader__query(r, &st, "SELECT MAX(step) FROM metrics");
    if (rc == 0) {
        rc = reader__row(r, st);
        if (rc == 1 && sqlite3_column_type(st, 0) == SQLITE_INTEGER) m->last_step = sqlite3_column_int64(st, 0);
        sqlite3_finalize(st);
    }
    char **const texts[] = {&m->version, &m->project, &m->experiment};
    for (int i = 0; i < 3; i++)
        if (!*texts[i]) *texts[i] = xstrdup("");
    if (!m->headline) m->headline = json_array();
    if (rc < 0) run_meta_free(m);
    return rc < 0 ? rc : 0;
}

void run_meta_free(struct run_meta *m) {
    free(m->version);
    free(m->project);
    free(m->experiment);
    free(m->exit);
    json_decref(m->config);
    json_decref(m->plan);
    json_decref(m->headline);
    json_decref(m->set);
    json_decref(m->special_tokens);
    *m = (struct run_meta){0};
}

static void take_status(struct run_status *s, sqlite3_stmt *st) {
    char *key = text_copy(st, 0);
    int64_t *const whole[] = {&s->step, &s->done, &s->total, &s->pid};
    static const char *const whole_keys[] = {"step", "done", "total", "pid"};
    double *const real[] = {&s->tok_s, &s->since, &s->wall};
    static const char *const real_keys[] = {"tok_s", "phase_since", "wall"};
    for (int i = 0; i < 4; i++)
        if (strcmp(key, whole_keys[i]) == 0) *whole[i] = reader__i64(st, 1);
    for (int i = 0; i < 3; i++)
        if (strcmp(key, real_keys[i]) == 0) {
            const double v = reader__f64(st, 1);
            *real[i] = isfinite(v) ? v : 0;
        }
    char *text = text_copy(st, 1);
    if (strcmp(key, "phase") == 0) snprintf(s->phase, sizeof s->phase, "%.*s", (int)utf8_cut(text, sizeof s->phase - 1), text);
    if (strcmp(key, "host") == 0) snprintf(s->host, sizeof s->host, "%.*s", (int)utf8_cut(text, sizeof s->host - 1), text);
    s->known |= strcmp(key, "wall") == 0;
    free(text);
    free(key);
}

int run_reader_status(struct run_reader *r, struct run_status *s) {
    sqlite3_stmt *st;
    int rc;
    *s = (struct run_status){0};
    if (!r->has_status) return 0;
    TRY(reader__query(r, &st, "SELECT key, value FROM status LIMIT 1000"));
    while ((rc = reader__row(r, st)) == 1) take_status(s, st);
    sqlite3_finalize(st);
    return rc;
}

int run_reader_events(struct run_reader *r, int64_t after_id, int (*each)(void *arg, const struct run_event *e), void *arg) {
    sqlite3_stmt *st;
    int rc;
    if (!r->has_events) return 0;
    TRY(reader__query(r, &st, "SELECT id, step, wall, kind, message FROM events WHERE id > ? ORDER BY id LIMIT 100000"));
    sqlite3_bind_int64(st, 1, after_id);
    while ((rc = reader__row(r, st)) == 1) {
        struct reader__texts keep = {0};
        const double wall = reader__f64(st, 2);
        const struct run_event e = {.id = reader__i64(st, 0),
                                    .step = reader__i64(st, 1),
                                    .wall = isfinite(wall) ? wall : 0,
                                    .kind = reader__text(st, 3, &keep).p,
                                    .message = reader__text(st, 4, &keep).p};
        rc = each(arg, &e);
        reader__texts_free(&keep);
        if (rc < 0) break;
    }
    sqlite3_finalize(st);
    return rc;
}

/* ---- metrics ---- */

/* The steps of a table that a loose scan of its index finds: one look-up a step, not one a row. */
static int steps_of(struct run_reader *r, const char *sql, int64_t after, struct run_steps *out) {
    sqlite3_stmt *st;
    int rc;
    TRY(reader__query(r, &st, sql));
    for (;;) {
        sqlite3_bind_int64(st, 1, after);
        rc = reader__row(r, st);
        if (rc != 1 || sqlite3_column_type(st, 0) != SQLITE_INTEGER || out->n == MAX_ROWS) break;
        const int64_t step = sqlite3_column_int64(st, 0);
        sqlite3_reset(st);
        if (step <= after) break;
        xgrow((void **)&out->v, &out->cap, out->n + 1, sizeof *out->v);
        out->v[out->n++] = after = step;
    }
    sqlite3_finalize(st);
    if (rc < 0) run_steps_free(out);
    return rc < 0 ? rc : 0;
}

int run_reader_steps(struct run_reader *r, int64_t after, struct run_steps *out) {
    *out = (struct run_steps){0};
    return steps_of(r, "SELECT MIN(step) FROM metrics WHERE step > ?", after, out);
}

int run_reader_sample_steps(struct run_reader *r, bool validation, struct run_steps *out) {
    return run_reader_prompt_steps(r, -1, validation, out);
}

int run_reader_prompt_steps(struct run_reader *r, int64_t uid, bool validation, struct run_steps *out) {
    sqlite3_stmt *st;
    struct run_steps all = {0};
    int rc = 0;
    *out = (struct run_steps){0};
    TRY(steps_of(r, "SELECT MIN(step) FROM samples WHERE step > ?", -1, &all));
    TRYG(reader__query(r, &st,
                       uid < 0 ? "SELECT 1 FROM samples WHERE step = ? AND validation = ? LIMIT 1"
                               : "SELECT 1 FROM samples WHERE step = ? AND validation = ? AND uid = ? LIMIT 1"),
         out);
    if (uid >= 0) sqlite3_bind_int64(st, 3, uid);
    for (int64_t i = 0; i < all.n && rc >= 0; i++) {
        sqlite3_bind_int64(st, 1, all.v[i]);
        sqlite3_bind_int(st, 2, validation);
        rc = reader__row(r, st);
        sqlite3_reset(st);
        if (rc != 1) continue;
        xgrow((void **)&out->v, &out->cap, out->n + 1, sizeof *out->v);
        out->v[out->n++] = all.v[i];
    }
    sqlite3_finalize(st);
out:
    run_steps_free(&all);
    if (rc < 0) run_steps_free(out);
    return rc < 0 ? rc : 0;
}

void run_steps_free(struct run_steps *s) {
    free(s->v);
    *s = (struct run_steps){0};
}

int run_reader_metric_names(struct run_reader *r, struct run_names *out) {
    sqlite3_stmt *st;
    int rc;
    *out = (struct run_names){0};
    TRY(reader__query(r, &st, "SELECT DISTINCT name FROM metrics ORDER BY name LIMIT 100000"));
    while ((rc = reader__row(r, st)) == 1) {
        if (!reader__is_text(st, 0)) continue;
        xgrow((void **)&out->v, &out->cap, out->n + 1, sizeof *out->v);
        out->v[out->n++] = text_copy(st, 0);
    }
    sqlite3_finalize(st);
    if (rc < 0) run_names_free(out);
    return rc;
}

void run_names_free(struct run_names *n) {
    for (int64_t i = 0; i < n->n; i++) free(n->v[i]);
    free(n->v);
    *n = (struct run_names){0};
}

int run_reader_series(struct run_reader *r, const char *name, int64_t after, struct run_series *out) {
    struct run_steps steps;
    sqlite3_stmt *st;
    int rc = 0;
    *out = (struct run_series){0};
    TRY(run_reader_steps(r, after, &steps));
    TRYG(reader__query(r, &st, "SELECT value FROM metrics WHERE step = ? AND name = ?"), out);
    out->cap = steps.n;
    out->step = xmalloc((size_t)steps.n * sizeof *out->step);
    out->value = xmalloc((size_t)steps.n * sizeof *out->value);
    sqlite3_bind_text(st, 2, name, -1, SQLITE_STATIC);
    for (int64_t i = 0; i < steps.n && rc >= 0; i++) {
        sqlite3_bind_int64(st, 1, steps.v[i]);
        rc = reader__row(r, st);
        if (rc == 1) {
            out->step[out->n] = steps.v[i];
            out->value[out->n++] = reader__f64(st, 0);
        }
        sqlite3_reset(st);
    }
    sqlite3_finalize(st);
out:
    run_steps_free(&steps);
    if (rc < 0) run_series_free(out);
    return rc < 0 ? rc : 0;
}

void run_series_free(struct run_series *s) {
    free(s->step);
    free(s->value);
    *s = (struct run_series){0};
}

int run_reader_last(struct run_reader *r, int (*each)(void *arg, const char *name, int64_t step, double value), void *arg) {
    sqlite3_stmt *st;
    int rc;
    TRY(reader__query(r, &st, "SELECT name, MAX(step), value FROM metrics GROUP BY name ORDER BY name LIMIT 100000"));
    while ((rc = reader__row(r, st)) == 1) {
        char *name = text_copy(st, 0);
        rc = each(arg, name, reader__i64(st, 1), reader__f64(st, 2));
        free(name);
        if (rc < 0) break;
    }
    sqlite3_finalize(st);
    return rc;
}

/* Names from lo on, below hi; both owned. */
struct name_range {
    char *lo, *hi;
};

/* A metric of a step into *name and *value, the first one in the range; 1: there is one. */
static int first_of_step(struct run_reader *r, sqlite3_stmt *st, int64_t step, const struct name_range *range, char **name,
                         double *value) {
    sqlite3_reset(st);
    sqlite3_bind_int64(st, 1, step);
    sqlite3_bind_text(st, 2, range->lo, -1, SQLITE_TRANSIENT);
    sqlite3_bind_text(st, 3, range->hi, -1, SQLITE_TRANSIENT);
    const int rc = reader__row(r, st);
    if (rc != 1) return rc;
    *name = text_copy(st, 0);
    *value = reader__f64(st, 1);
    return 1;
}

int run_reader_recent(struct run_reader *r, const char *prefix, int n, int64_t look, char name[256], double *mean) {
    sqlite3_stmt *before = NULL, *st = NULL;
    struct name_range range = {.lo = xstrdup(prefix), .hi = xasprintf("%s\xff", prefix)};
    int64_t step = INT64_MAX;
    double sum = 0;
    int found = 0, rc = reader__query(r, &before, "SELECT MAX(step) FROM metrics WHERE step < ?");
    name[0] = '\0';
    *mean = NAN;
    if (rc == 0)
        rc = reader__query(r, &st,
                           "SELECT name, value FROM metrics WHERE step = ? AND name >= ? AND name < ?"
                           " ORDER BY name NOT LIKE '%/mean@%', name LIMIT 1");
    for (int64_t i = 0; i < look && found < n && rc >= 0; i++) {
        char *got = NULL;
        double v;
        sqlite3_reset(before);
        sqlite3_bind_int64(before, 1, step);
        rc = reader__row(r, before);
        if (rc != 1 || sqlite3_column_type(before, 0) != SQLITE_INTEGER) break;
        step = sqlite3_column_int64(before, 0);
        rc = first_of_step(r, st, step, &range, &got, &v);
        if (rc != 1) continue;
        if (!name[0]) { /* from now on this one alone */
            snprintf(name, 256, "%.*s", (int)utf8_cut(got, 255), got);
            free(range.lo);
            free(range.hi);
            range = (struct name_range){.lo = xstrdup(got), .hi = xasprintf("%s\x01", got)};
        }
        free(got);
        if (!isfinite(v)) continue;
        sum += v;
        found++;
    }
    if (found > 0) *mean = sum / found;
    sqlite3_finalize(before);
    sqlite3_finalize(st);
    free(range.lo);
    free(range.hi);
    return rc < 0 ? rc : 0;
}

int run_reader_step(struct run_reader *r, int64_t step, struct metrics *out) {
    sqlite3_stmt *st;
    int rc;
    TRY(reader__query(r, &st, "SELECT name, value FROM metrics WHERE step = ? ORDER BY name LIMIT 5000"));
    sqlite3_bind_int64(st, 1, step);
    while ((rc = reader__row(r, st)) == 1) {
        char *name = text_copy(st, 0);
        metrics_set(out, reader__f64(st, 1), "%s", name);
        free(name);
    }
    sqlite3_finalize(st);
    if (rc < 0) metrics_free(out);
    return rc;
}

int run_reader_histograms(struct run_reader *r, const char *name, bool validation, int64_t after,
                          int (*each)(void *arg, const struct run_histogram *h), void *arg) {
    sqlite3_stmt *st;
    int32_t *counts = NULL;
    int rc;
    if (!r->has_histograms) return 0;
    TRY(reader__query(r, &st,
                      "SELECT step, lo, hi, counts FROM histograms WHERE name = ? AND validation = ? AND step > ? ORDER BY step "
                      "LIMIT 1000000"));
    sqlite3_bind_text(st, 1, name, -1, SQLITE_STATIC);
    sqlite3_bind_int(st, 2, validation);
    sqlite3_bind_int64(st, 3, after);
    while ((rc = reader__row(r, st)) == 1) {
        const bool blob = sqlite3_column_type(st, 3) == SQLITE_BLOB;
        const size_t bytes = blob ? (size_t)sqlite3_column_bytes(st, 3) : 0;
        const struct run_histogram h = {.step = reader__i64(st, 0), .lo = reader__f64(st, 1), .hi = reader__f64(st, 2)};
        if (bytes == 0 || bytes % 4 || bytes / 4 > MAX_BINS || !isfinite(h.lo) || !isfinite(h.hi) || h.lo > h.hi) continue;
        counts = xrealloc(counts, bytes);
        memcpy(counts, sqlite3_column_blob(st, 3), bytes);
        for (size_t i = 0; i < bytes / 4; i++) counts[i] = counts[i] < 0 ? 0 : counts[i];
        struct run_histogram whole = h;
        whole.counts = counts;
        whole.n = (int64_t)(bytes / 4);
        rc = each(arg, &whole);
        if (rc < 0) break;
    }
    sqlite3_finalize(st);
    free(counts);
    return rc;
}
