/* run_db_store.c - see run_db_store.h.
 *
 * Rows are moved by SELECT and INSERT between two connections, whatever the tables are, so that no lock of another program
 * can stop the stage. A kept file has a name of its own in its meta; run.db's meta has that of the one that was taken in
 * last, in the same transaction as its rows: a kept file that a crash left behind is not taken in twice.
 * It knows nothing of what the rows mean. */
#include "track/run_db_store.h"

#include "track/track.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define MAX_STAGE ((int64_t)256 << 20) /* bytes in memory, where neither file can be written */
#define FLUSH_AT ((int64_t)4 << 20)    /* a stage of that size is moved before its step has ended */
enum {
    OPEN_MS = 10000,  /* what another program's lock may last at the start */
    PATIENT_MS = 500, /* before rows are kept elsewhere */
    AGAIN_MS = 50     /* once they are */
};
#define AGAIN_S 0.5 /* between two tries */
#define END_S 20.0  /* of waiting at the end of a run */

static const char *const tables[] = {"meta", "metrics", "samples", "histograms", "status", "events"};
enum { N_TABLES = sizeof tables / sizeof *tables };

struct run_db_store {
    struct run_db_store_args a;
    char *path, *kept_path;
    sqlite3 *db, *stage, *kept; /* kept: NULL where nothing is kept; db: NULL after a failure that requires another open */
    int64_t bytes;              /* of the stage */
    bool failing, reported, news, kept_failed;
    int64_t n_outages;
    int code;     /* SQLite's, of the last failure */
    double again; /* clock_awake of the next try */
    int64_t n_lost;
    char why[512];
};

static int fail(sqlite3 *db, const char *path) {
    const int code = sqlite3_errcode(db) & 0xff;
    const bool locked = code == SQLITE_BUSY || code == SQLITE_LOCKED;
    FAIL(ERR_IO, "%s: %s%s", path, sqlite3_errmsg(db),
         locked ? "; another program has locked it (a database browser, a backup, a copy of the run)" : "");
}

static int exec(sqlite3 *db, const char *path, const char *sql) {
    return sqlite3_exec(db, sql, NULL, NULL, NULL) == SQLITE_OK ? 0 : fail(db, path);
}

static int open_db(sqlite3 **db, const char *path, int flags, int wait_ms) {
    *db = NULL;
    int rc = sqlite3_open_v2(path, db, flags, NULL) == SQLITE_OK ? 0 : fail(*db, path);
    if (rc == 0) sqlite3_busy_timeout(*db, wait_ms);
    if (rc == 0) rc = exec(*db, path, "PRAGMA trusted_schema=OFF");
    if (rc == 0) return 0;
    sqlite3_close(*db);
    *db = NULL;
    return rc;
}

/* ---- rows from one database to another ---- */

/* An INSERT for the columns of the query from; ids are assigned again. NULL: no memory. */
static char *insert_for(sqlite3_stmt *from, const char *table) {
    sqlite3_str *sql = sqlite3_str_new(NULL);
    const int n = sqlite3_column_count(from);
    sqlite3_str_appendf(sql, "INSERT OR REPLACE INTO \"%w\"(", table);
    for (int i = 0; i < n; i++) sqlite3_str_appendf(sql, "%s\"%w\"", i ? "," : "", sqlite3_column_name(from, i));
    sqlite3_str_appendf(sql, ") VALUES(");
    for (int i = 0; i < n; i++) sqlite3_str_appendf(sql, i ? ",?" : "?");
    sqlite3_str_appendf(sql, ")");
    return sqlite3_str_finish(sql);
}

static int put_rows(sqlite3 *to, const char *to_path, sqlite3 *from, const char *from_path, sqlite3_stmt *get, sqlite3_stmt *put) {
    const int n = sqlite3_column_count(get);
    int code;
    while ((code = sqlite3_step(get)) == SQLITE_ROW) {
        for (int i = 0; i < n; i++) {
            if (strcmp(sqlite3_column_name(get, i), "id") == 0) sqlite3_bind_null(put, i + 1);
            else sqlite3_bind_value(put, i + 1, sqlite3_column_value(get, i));
        }
        code = sqlite3_step(put);
        sqlite3_reset(put);
        if (code != SQLITE_DONE) return fail(to, to_path);
    }
    return code == SQLITE_DONE ? 0 : fail(from, from_path);
}

static int copy_table(sqlite3 *to, const char *to_path, sqlite3 *from, const char *from_path, const char *table) {
    sqlite3_stmt *get = NULL, *put = NULL;
    char sql[96], *insert = NULL;
    int rc = 0;
    snprintf(sql, sizeof sql, "SELECT * FROM %s%s", table, strcmp(table, "meta") == 0 ? " WHERE key <> 'kept'" : "");
    if (sqlite3_prepare_v2(from, sql, -1, &get, NULL) != SQLITE_OK) rc = fail(from, from_path);
    if (rc == 0 && !(insert = insert_for(get, table))) rc = err_set(ERR_NOMEM, __FILE__, __LINE__, "%s: no memory", to_path);
    if (rc == 0 && sqlite3_prepare_v2(to, insert, -1, &put, NULL) != SQLITE_OK) rc = fail(to, to_path);
    if (rc == 0) rc = put_rows(to, to_path, from, from_path, get, put);
    sqlite3_free(insert);
    sqlite3_finalize(get);
    sqlite3_finalize(put);
    return rc;
}

/* In a transaction of to. */
static int copy_rows(sqlite3 *to, const char *to_path, sqlite3 *from, const char *from_path) {
    for (int i = 0; i < N_TABLES; i++) TRY(copy_table(to, to_path, from, from_path, tables[i]));
    return 0;
}

static int clear_stage(struct run_db_store *s) {
    for (int i = 0; i < N_TABLES; i++) {
        char sql[64];
        snprintf(sql, sizeof sql, "DELETE FROM %s", tables[i]);
        TRY(exec(s->stage, "the rows in memory", sql));
    }
    s->bytes = 0;
    return 0;
}

/* ---- the kept file ---- */

/* The value of a key of meta; "": none. */
static void meta_of(sqlite3 *db, const char *key, char *out, size_t n) {
    sqlite3_stmt *st;
    out[0] = '\0';
    if (sqlite3_prepare_v2(db, "SELECT value FROM meta WHERE key = ?", -1, &st, NULL) != SQLITE_OK) return;
    sqlite3_bind_text(st, 1, key, -1, SQLITE_STATIC);
    if (sqlite3_step(st) == SQLITE_ROW && sqlite3_column_text(st, 0))
        snprintf(out, n, "%s", (const char *)sqlite3_column_text(st, 0));
    sqlite3_finalize(st);
}

/* The rows of the kept file to run.db, in the transaction that run.db is in. */
static int copy_kept(sqlite3 *db, const char *path, sqlite3 *kept, const char *kept_path) {
    char name[64], taken[64];
    sqlite3_stmt *st;
    meta_of(kept, "kept", name, sizeof name);
    meta_of(db, "taken_in", taken, sizeof taken);
    if (!name[0]) FAIL(ERR_FORMAT, "%s is no file of kept records", kept_path);
    if (strcmp(name, taken) == 0) return 0;
    TRY(copy_rows(db, path, kept, kept_path));
    if (sqlite3_prepare_v2(db, "INSERT OR REPLACE INTO meta VALUES('taken_in', ?)", -1, &st, NULL) != SQLITE_OK)
        return fail(db, path);
    sqlite3_bind_text(st, 1, name, -1, SQLITE_STATIC);
    const int code = sqlite3_step(st);
    sqlite3_finalize(st);
    return code == SQLITE_DONE ? 0 : fail(db, path);
}

static void remove_kept(const char *kept_path) {
    char *journal = xasprintf("%s-journal", kept_path);
    if (unlink(kept_path) < 0 && errno != ENOENT) log_debug("%s: %s", kept_path, strerror(errno));
    unlink(journal);
    free(journal);
}

static int make_kept(struct run_db_store *s, sqlite3 *db) {
    unsigned char r[8] = {0};
    char sql[128];
    TRY(exec(db, s->kept_path, "PRAGMA locking_mode=EXCLUSIVE; PRAGMA synchronous=OFF; BEGIN EXCLUSIVE"));
    TRY(exec(db, s->kept_path, s->a.schema));
    TRY(s->a.complete(db, s->kept_path));
    if (getrandom(r, sizeof r, 0) != sizeof r) FAIL(ERR_INTERNAL, "no random numbers: %s", strerror(errno));
    snprintf(sql, sizeof sql, "INSERT OR IGNORE INTO meta VALUES('kept', '%02x%02x%02x%02x%02x%02x%02x%02x'); COMMIT", r[0], r[1],
             r[2], r[3], r[4], r[5], r[6], r[7]);
    return exec(db, s->kept_path, sql);
}

/* The lock on it is held while it is open: nobody else takes it in. */
static int open_kept(struct run_db_store *s) {
    sqlite3 *db;
    if (s->kept) return 0;
    const bool there = file_exists(s->kept_path);
    TRY(open_db(&db, s->kept_path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, AGAIN_MS));
    const int rc = make_kept(s, db);
    if (rc < 0) sqlite3_close(db);
    else s->kept = db;
    if (rc < 0 && !there) remove_kept(s->kept_path);
    return rc;
}

static int stage_to_kept(struct run_db_store *s) {
    TRY(open_kept(s));
    int rc = exec(s->kept, s->kept_path, "BEGIN IMMEDIATE");
    if (rc == 0) rc = copy_rows(s->kept, s->kept_path, s->stage, "the rows in memory");
    if (rc == 0) rc = exec(s->kept, s->kept_path, "COMMIT");
    if (rc == 0) return clear_stage(s);
    sqlite3_exec(s->kept, "ROLLBACK", NULL, NULL, NULL);
    return rc;
}

/* ---- run.db ---- */

static int open_file(struct run_db_store *s, int wait_ms) {
    if (s->db) return 0;
    TRY(open_db(&s->db, s->path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, wait_ms));
    if (exec(s->db, s->path, "PRAGMA journal_mode=WAL") == 0 && exec(s->db, s->path, "PRAGMA synchronous=NORMAL") == 0) return 0;
    sqlite3_close(s->db);
    s->db = NULL;
    return ERR_IO;
}

/* What is kept, then the stage, in one transaction. */
static int stage_to_file(struct run_db_store *s) {
    TRY(open_file(s, AGAIN_MS));
    sqlite3_busy_timeout(s->db, s->failing ? AGAIN_MS : PATIENT_MS);
    int rc = exec(s->db, s->path, "BEGIN IMMEDIATE");
    if (rc == 0 && s->kept) rc = copy_kept(s->db, s->path, s->kept, s->kept_path);
    if (rc == 0) rc = copy_rows(s->db, s->path, s->stage, "the rows in memory");
    if (rc == 0) rc = exec(s->db, s->path, "COMMIT");
    if (rc < 0) {
        const int code = s->code = sqlite3_errcode(s->db) & 0xff;
        sqlite3_exec(s->db, "ROLLBACK", NULL, NULL, NULL);
        if (code == SQLITE_BUSY || code == SQLITE_LOCKED) return rc;
        sqlite3_close(s->db); /* a file that was missing or read-only may be another one now */
        s->db = NULL;
        return rc;
    }
    TRY(clear_stage(s));
    if (!s->kept) return 0;
    remove_kept(s->kept_path); /* before the lock on it ends */
    sqlite3_close(s->kept);
    s->kept = NULL;
    return 0;
}

static void has_failed(struct run_db_store *s) {
    s->again = clock_awake() + AGAIN_S;
    snprintf(s->why, sizeof s->why, "%s", err_msg());
    if (!s->failing) s->n_outages++;
    s->failing = true;
    if (s->n_outages > 1 || s->reported) return;
    s->reported = s->news = true;
    log_warn("run.db cannot be written: %s; the run goes on, and what is not written is kept in %s until it can", s->why,
             s->kept_path);
}

static void has_worked(struct run_db_store *s) {
    if (s->failing && s->n_outages == 1) log_info("run.db can be written again, and has what was kept");
    s->failing = s->kept_failed = false;
}

int run_db_store_flush(struct run_db_store *s) {
    if (s->bytes == 0 && !s->kept) return 0;
    if (!s->failing || clock_awake() >= s->again) {
        if (stage_to_file(s) == 0) {
            has_worked(s);
            return 0;
        }
        has_failed(s);
    }
    if (s->bytes == 0 || stage_to_kept(s) == 0) return 0;
    if (!s->kept_failed) log_warn("nor can the records be kept next to it: %s; they stay in memory", err_msg());
    s->kept_failed = true;
    return 0;
}

bool run_db_store_room(struct run_db_store *s, int64_t bytes, bool is_sample) {
    if (is_sample && s->bytes + bytes > FLUSH_AT && !s->kept_failed) run_db_store_flush(s); /* a step's metrics stay together */
    if (s->bytes + bytes > (is_sample ? MAX_STAGE / 2 : MAX_STAGE)) {
        if (s->n_lost++ == 0) log_warn("run.db: no room for its records in memory; further ones are lost until there is");
        return false;
    }
    s->bytes += bytes;
    return true;
}

bool run_db_store_is_news(struct run_db_store *s, const char **why) {
    const bool is = s->news;
    s->news = false;
    *why = s->why;
    return is;
}

/* ---- taking in what an earlier run kept ---- */

/* Whether it failed by what the kept file is, rather than by a lock or a disk. */
static bool is_broken(sqlite3 *db, sqlite3 *kept) {
    const int of_kept = sqlite3_errcode(kept) & 0xff, of_db = sqlite3_errcode(db) & 0xff;
    return of_kept == SQLITE_ERROR || of_kept == SQLITE_CORRUPT || of_kept == SQLITE_NOTADB || of_db == SQLITE_ERROR ||
           of_db == SQLITE_CONSTRAINT || of_db == SQLITE_MISMATCH;
}

/* 1: taken in, and removed; 0: another process has it. ERR_FORMAT: it is no such file. */
static int take_in(sqlite3 *db, const char *path, const char *kept_path) {
    sqlite3 *kept;
    TRY(open_db(&kept, kept_path, SQLITE_OPEN_READWRITE, AGAIN_MS));
    int rc = exec(kept, kept_path, "BEGIN EXCLUSIVE");
    const bool in_use = rc < 0 && (sqlite3_errcode(kept) & 0xff) == SQLITE_BUSY;
    if (rc == 0) rc = exec(db, path, "BEGIN IMMEDIATE");
    if (rc == 0) rc = copy_kept(db, path, kept, kept_path);
    if (rc == 0) rc = exec(db, path, "COMMIT");
    if (rc == 0) remove_kept(kept_path);
    if (rc < 0 && (rc == ERR_FORMAT || is_broken(db, kept))) rc = ERR_FORMAT;
    if (!sqlite3_get_autocommit(db)) sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
    sqlite3_close(kept);
    return in_use ? 0 : rc < 0 ? rc : 1;
}

/* A kept file that cannot be read is renamed, so that a later one has its place. */
static int take_in_at_start(struct run_db_store *s) {
    if (!file_exists(s->kept_path)) return 0;
    if (s->a.fresh) {
        remove_kept(s->kept_path);
        return 0;
    }
    const int rc = take_in(s->db, s->path, s->kept_path);
    if (rc > 0) log_info("run.db has what was kept in %s, which another program's lock or a full disk had held back", s->kept_path);
    if (rc >= 0 || rc != ERR_FORMAT) return rc < 0 ? rc : 0;
    char *aside = xasprintf("%s.damaged", s->kept_path);
    log_warn("%s; it is %s now, and its records are not in run.db", err_msg(), aside);
    const int moved = rename(s->kept_path, aside) == 0 ? 0 : err_set(ERR_IO, __FILE__, __LINE__, "%s: %s", aside, strerror(errno));
    free(aside);
    return moved;
}

int track_take_in(const char *run_dir) {
    char *path = file_join(run_dir, "run.db"), *kept_path = file_join(run_dir, "run.kept.db");
    sqlite3 *db = NULL;
    int rc = 0;
    if (file_exists(kept_path)) {
        rc = open_db(&db, path, SQLITE_OPEN_READWRITE, PATIENT_MS);
        if (rc == 0) rc = take_in(db, path, kept_path);
    }
    sqlite3_close(db);
    free(path);
    free(kept_path);
    return rc;
}

/* ---- opening and closing ---- */

static int start(struct run_db_store *s) {
    TRY(open_file(s, OPEN_MS));
    TRY(exec(s->db, s->path, "BEGIN IMMEDIATE"));
    TRY(exec(s->db, s->path, s->a.schema));
    TRY(s->a.complete(s->db, s->path));
    TRY(exec(s->db, s->path, "COMMIT"));
    TRY(take_in_at_start(s));
    TRY(open_db(&s->stage, ":memory:", SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, 0));
    TRY(exec(s->stage, "the rows in memory", s->a.schema));
    return s->a.complete(s->stage, "the rows in memory");
}

int run_db_store_open(struct run_db_store **out, const struct run_db_store_args *a) {
    struct run_db_store *s = xcalloc(1, sizeof *s);
    s->a = *a;
    s->path = file_join(a->dir, "run.db");
    s->kept_path = file_join(a->dir, "run.kept.db");
    const int rc = start(s);
    if (rc < 0) {
        struct err_saved why;
        err_save(&why);
        run_db_store_close(s, 0);
        err_restore(&why);
    } else {
        *out = s;
    }
    return rc;
}

/* Until run.db has all, or the time is over; a damaged one is not waited for. */
static void move_rest(struct run_db_store *s, double end_by) {
    run_db_store_flush(s);
    if (s->bytes == 0 && !s->kept) return;
    const bool damaged =
        s->code == SQLITE_CORRUPT || s->code == SQLITE_NOTADB || s->code == SQLITE_ERROR || s->code == SQLITE_CONSTRAINT;
    const double until = damaged ? 0 : end_by < clock_awake() + END_S ? end_by : clock_awake() + END_S;
    if (until > clock_awake()) log_note("run.db: waiting up to %.0f s until it can be written", until - clock_awake());
    while ((s->bytes > 0 || s->kept) && clock_awake() < until) {
        nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
        s->again = 0;
        run_db_store_flush(s);
    }
    if (s->kept)
        log_warn("run.db has not the last records: %s; they are in %s, and `verlc show` or the run's next start takes them in",
                 s->why, s->kept_path);
    if (s->bytes > 0) log_warn("the last records of run.db are lost: neither it nor %s could be written", s->kept_path);
}

void run_db_store_close(struct run_db_store *s, double end_by) {
    if (!s) return;
    if (s->stage) move_rest(s, end_by);
    if (s->n_lost > 0) log_warn("run.db: %lld records were lost, there was no room to keep them", (long long)s->n_lost);
    sqlite3_close(s->kept);
    sqlite3_close(s->stage);
    sqlite3_close(s->db);
    free(s->path);
    free(s->kept_path);
    free(s);
}

sqlite3 *run_db_store_file(struct run_db_store *s) { return s->db; }
sqlite3 *run_db_store_stage(struct run_db_store *s) { return s->stage; }
