/* run_db.c - run.db: every step's metrics and every sample, in SQLite (WAL), so
 * that it can be read while the run goes on.
 *
 *   meta(key, value)                 project, experiment, config (JSON), format
 *   metrics(step, name, value)       one row a metric
 *   samples(step, validation, uid, sample, data_source, prompt, response, ground_truth, score,
 *           advantage, reward_status, finish, prompt_ids, ids, logp, extra)
 *           texts are UTF-8 and may hold NUL; ids: little-endian int32; logp: little-endian float32; extra: JSON */
#include "track/track_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"

#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>

static const char schema[] =
    "CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT);"
    "CREATE TABLE IF NOT EXISTS metrics(step INTEGER, name TEXT, value REAL, PRIMARY KEY(step, name)) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS samples(id INTEGER PRIMARY KEY, step INTEGER, validation INTEGER, uid INTEGER, sample INTEGER,"
    " data_source TEXT, prompt TEXT, response TEXT, ground_truth TEXT, score REAL, advantage REAL, reward_status TEXT,"
    " finish TEXT, prompt_ids BLOB, ids BLOB, logp BLOB, extra TEXT);"
    "CREATE INDEX IF NOT EXISTS samples_step ON samples(step);";

struct db_ctx {
    sqlite3 *db;
    sqlite3_stmt *put_metric, *put_sample;
    bool in_transaction;
    char *path;
};

static int db_fail(const struct db_ctx *c) { FAIL(ERR_IO, "%s: %s", c->path, sqlite3_errmsg(c->db)); }
static int db_exec(struct db_ctx *c, const char *sql) {
    return sqlite3_exec(c->db, sql, NULL, NULL, NULL) == SQLITE_OK ? 0 : db_fail(c);
}

static void db_close(void *v) {
    struct db_ctx *c = v;
    if (c->in_transaction) sqlite3_exec(c->db, "COMMIT", NULL, NULL, NULL);
    sqlite3_finalize(c->put_metric);
    sqlite3_finalize(c->put_sample);
    sqlite3_close(c->db);
    free(c->path);
    free(c);
}

static int put_meta(struct db_ctx *c, const char *key, const char *value) {
    sqlite3_stmt *st;
    if (sqlite3_prepare_v2(c->db, "INSERT OR REPLACE INTO meta VALUES(?, ?)", -1, &st, NULL) != SQLITE_OK) return db_fail(c);
    sqlite3_bind_text(st, 1, key, -1, SQLITE_TRANSIENT);
    sqlite3_bind_text(st, 2, value, -1, SQLITE_TRANSIENT);
    const int ok = sqlite3_step(st) == SQLITE_DONE;
    sqlite3_finalize(st);
    return ok ? 0 : db_fail(c);
}

static int start(struct db_ctx *c, const struct track_args *a) {
    char sql[256];
    struct buf config = {0};
    TRY(db_exec(c, "PRAGMA journal_mode=WAL"));
    TRY(db_exec(c, "PRAGMA synchronous=NORMAL"));
    TRY(db_exec(c, schema));
    const long long keep = a->resume_step > 0 ? a->resume_step : -1; /* a new run starts empty */
    snprintf(sql, sizeof sql, "DELETE FROM metrics WHERE step > %lld; DELETE FROM samples WHERE step > %lld", keep, keep);
    TRY(db_exec(c, sql));
    TRY(put_meta(c, "format", "1"));
    TRY(put_meta(c, "project", a->project));
    TRY(put_meta(c, "experiment", a->experiment));
    int rc = a->config ? json_dump_line(&config, a->config) : 0;
    if (rc == 0) rc = put_meta(c, "config", config.p ? config.p : "{}");
    buf_free(&config);
    TRY(rc);
    if (sqlite3_prepare_v2(c->db, "INSERT OR REPLACE INTO metrics VALUES(?, ?, ?)", -1, &c->put_metric, NULL) != SQLITE_OK ||
        sqlite3_prepare_v2(c->db, "INSERT INTO samples VALUES(NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", -1,
                           &c->put_sample, NULL) != SQLITE_OK)
        return db_fail(c);
    return 0;
}

static int db_open(void **ctx, const char *name, const struct track_args *a) {
    (void)name;
    struct db_ctx *c = xcalloc(1, sizeof *c);
    c->path = file_join(a->run_dir, "run.db");
    int rc = sqlite3_open(c->path, &c->db) == SQLITE_OK ? 0 : db_fail(c);
    if (rc == 0) sqlite3_busy_timeout(c->db, 2000);
    if (rc == 0) rc = start(c, a);
    if (rc < 0) db_close(c);
    else *ctx = c;
    return rc;
}

static int begin(struct db_ctx *c) {
    if (c->in_transaction) return 0;
    TRY(db_exec(c, "BEGIN"));
    c->in_transaction = true;
    return 0;
}

static int run_stmt(struct db_ctx *c, sqlite3_stmt *st) {
    const int rc = sqlite3_step(st);
    sqlite3_reset(st);
    return rc == SQLITE_DONE ? 0 : db_fail(c);
}

static int db_log(void *v, int64_t step, const struct metrics *m, double wall) {
    struct db_ctx *c = v;
    (void)wall;
    TRY(begin(c));
    for (int64_t i = 0; i < m->n; i++) {
        sqlite3_bind_int64(c->put_metric, 1, step);
        sqlite3_bind_text(c->put_metric, 2, m->items[i].name, -1, SQLITE_STATIC);
        sqlite3_bind_double(c->put_metric, 3, m->items[i].value); /* NaN is stored as NULL */
        TRY(run_stmt(c, c->put_metric));
    }
    return 0;
}

static int db_sample(void *v, const struct track_sample *s) {
    struct db_ctx *c = v;
    sqlite3_stmt *st = c->put_sample;
    struct buf extra = {0};
    TRY(begin(c));
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
    sqlite3_bind_blob64(st, 15, s->logp, (sqlite3_uint64)s->n * 4, SQLITE_STATIC);
    sqlite3_bind_text64(st, 16, extra.p, (sqlite3_uint64)extra.n, SQLITE_STATIC, SQLITE_UTF8);
    const int rc = run_stmt(c, st);
    buf_free(&extra);
    return rc;
}

static int db_flush(void *v) {
    struct db_ctx *c = v;
    if (!c->in_transaction) return 0;
    c->in_transaction = false;
    return db_exec(c, "COMMIT");
}

const struct tracker track_db = {
    .name = "run.db", .open = db_open, .log = db_log, .sample = db_sample, .flush = db_flush, .close = db_close};
