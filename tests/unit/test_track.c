/* test_track.c - metrics, the queue, and what each tracker leaves on disk: the JSONL
 * file, run.db (read while the writer is open), TensorBoard's bytes; new and resumed. */
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "track/async_schedule.h"
#include "track/track.h"

#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static char dir[64];

static int make_dir(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/verlc-test-XXXXXX");
    unsetenv("VERL_FILE_LOGGER_PATH");
    unsetenv("VERL_FILE_LOGGER_ROOT");
    unsetenv("TENSORBOARD_DIR");
    return mkdtemp(dir) ? 0 : -1;
}
static int remove_dir(void **state) {
    (void)state;
    return file_remove_tree(dir);
}

static struct track *open_run(int64_t resume_step) {
    static const struct track_loggers loggers = {.file = true, .tensorboard = true};
    struct track *t = NULL;
    const struct track_args a = {.loggers = &loggers,
                                 .project = "p",
                                 .experiment = "e",
                                 .run_dir = dir,
                                 .total_steps = 10,
                                 .resume_step = resume_step,
                                 .title = "test"};
    assert_int_equal(track_open(&t, &a), 0);
    return t;
}

static void log_step(struct track *t, int64_t step, double v) {
    struct metrics m = {0};
    metrics_set(&m, v, "critic/rewards/mean");
    metrics_set(&m, NAN, "actor/nan");
    metrics_set_i64(&m, step, "training/global_step");
    track_log(t, step, &m);
    metrics_free(&m);
}

static void log_sample(struct track *t, int64_t step, double score) {
    static const int32_t prompt[] = {5, -1, 7}, ids[] = {9, 10};
    static const float logp[] = {-0.5f, -1.25f}, entropy[] = {0.25f, 2}, advantages[] = {1, -1};
    json_t *extra = json_pack("{s:s}", "pred", "4");
    const struct track_sample s = {.step = step,
                                   .uid = 3,
                                   .index = 1,
                                   .data_source = "openai/gsm8k",
                                   .prompt = {"2 + 2 = ?", 9},
                                   .response = {"4\0\xE2\x82\xAC", 5},
                                   .ground_truth = {"4\0", 2},
                                   .prompt_ids = prompt,
                                   .ids = ids,
                                   .n_prompt = 3,
                                   .n = 2,
                                   .logp = logp,
                                   .entropy = entropy,
                                   .advantages = advantages,
                                   .score = score,
                                   .advantage = NAN,
                                   .reward_status = isnan(score) ? "crash" : "score",
                                   .reward_message = isnan(score) ? "ValueError: no" : NULL,
                                   .extra = extra,
                                   .finish = "stop"};
    track_sample(t, &s);
    json_decref(extra);
}

/* The one event file of TensorBoard. Caller frees. */
static char *event_file(void) {
    char *tb = file_join(dir, "tensorboard"), *path = NULL;
    DIR *d = opendir(tb);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        if (strncmp(e->d_name, "events.out.tfevents.", 20) == 0) path = file_join(tb, e->d_name);
    closedir(d);
    free(tb);
    assert_non_null(path);
    return path;
}

/* ---- metrics ---- */

static void test_metrics(void **state) {
    (void)state;
    struct metrics m = {0}, n = {0};
    double v;
    for (int i = 0; i < 200; i++) metrics_set(&m, i, "a/%d", i);
    metrics_set(&m, -1, "a/%d", 7); /* in its place */
    assert_int_equal(m.n, 200);
    assert_true(metrics_get(&m, "a/7", &v) && v == -1);
    assert_string_equal(m.items[7].name, "a/7");
    metrics_set_i64(&n, 5, "a/7");
    metrics_set(&n, 6, "b");
    metrics_merge(&m, &n);
    assert_int_equal(m.n, 201);
    assert_true(metrics_get(&m, "a/7", &v) && v == 5 && m.items[7].whole);
    assert_false(metrics_get(&m, "c", &v));
    metrics_reset(&m);
    assert_int_equal(m.n, 0);
    metrics_free(&m);
    metrics_free(&n);
}

/* A name of any length, whole in every tracker; two that differ in their last character are two. */
static void test_long_names(void **state) {
    (void)state;
    enum { LONG = 10000 };
    char name[2][LONG + 8];
    struct metrics m = {0};
    for (int k = 0; k < 2; k++) {
        memset(name[k], 'a', LONG);
        snprintf(name[k] + LONG, 8, "\xE2\x82\xAC/%d", k);
        metrics_set(&m, k, "%s", name[k]);
    }
    static const char *const names[] = {"file", "tensorboard", "file", "console", "tensorboard", "file"}; /* twice is once */
    static const char *const headlines[][2] = {{"a", "a"}, {NULL, NULL}};
    struct track_loggers loggers = {0};
    assert_int_equal(track_choose(&loggers, names, 6, true), 0);
    const struct track_args a = {
        .loggers = &loggers, .project = name[0], .experiment = name[1], .run_dir = dir, .title = name[0], .headlines = headlines};
    struct track *t;
    assert_int_equal(track_open(&t, &a), 0);
    track_log(t, 1, &m);
    track_close(t, 0);
    metrics_free(&m);
    struct buf b = {0};
    char *path = file_join(dir, "metrics.jsonl"), *events = event_file();
    assert_int_equal(file_read(&b, path, 0), 0);
    assert_int_equal(file_read(&b, events, 0), 0);
    free(path);
    free(events);
    sqlite3 *db;
    sqlite3_stmt *st;
    path = file_join(dir, "run.db");
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, "SELECT value FROM metrics WHERE name = ?", -1, &st, NULL), SQLITE_OK);
    for (int k = 0; k < 2; k++) {
        const char *at = memmem(b.p, b.n, name[k], strlen(name[k]));
        assert_non_null(at); /* in the lines, and in the events after them */
        assert_non_null(memmem(at + 1, b.n - (size_t)(at + 1 - b.p), name[k], strlen(name[k])));
        sqlite3_bind_text(st, 1, name[k], -1, SQLITE_STATIC);
        assert_int_equal(sqlite3_step(st), SQLITE_ROW);
        assert_true(sqlite3_column_double(st, 0) == k);
        sqlite3_reset(st);
    }
    sqlite3_finalize(st);
    sqlite3_close(db);
    free(path);
    buf_free(&b);
}

/* ---- the JSONL file ---- */

struct lines {
    json_t *v[16];
    int n;
};
static int keep_line(void *arg, char *line, size_t n, int64_t no) {
    struct lines *l = arg;
    (void)no;
    assert_true(l->n < 16);
    return json_parse(&l->v[l->n++], line, n, "metrics.jsonl");
}
static struct lines read_lines(void) {
    struct lines l = {0};
    char *path = file_join(dir, "metrics.jsonl");
    assert_int_equal(file_each_line(path, keep_line, &l), 0);
    free(path);
    return l;
}
static void free_lines(struct lines *l) {
    for (int i = 0; i < l->n; i++) json_decref(l->v[i]);
}

static void test_file(void **state) {
    (void)state;
    struct track *t = open_run(-1);
    log_step(t, 1, 0.1);
    log_step(t, 2, 1.0 / 3);
    log_step(t, 3, 1e-300);
    track_close(t, 0);
    char *path = file_join(dir, "metrics.jsonl");
    FILE *f = fopen(path, "a");
    assert_non_null(f);
    fputs("{\"step\": 4, \"data\": {\"critic/rew", f); /* torn by a crash */
    fclose(f);
    t = open_run(2); /* step 3 is made again */
    log_step(t, 3, 7);
    assert_int_equal(track_flush(t), 0);
    struct lines l = read_lines(); /* while the writer is open */
    assert_int_equal(l.n, 3);
    for (int i = 0; i < 3; i++) {
        const json_t *data = json_object_get(l.v[i], "data");
        assert_int_equal(json_integer_value(json_object_get(l.v[i], "step")), i + 1);
        assert_true(json_is_null(json_object_get(data, "actor/nan")));
        assert_true(json_is_integer(json_object_get(data, "training/global_step")));
    }
    assert_true(json_real_value(json_object_get(json_object_get(l.v[1], "data"), "critic/rewards/mean")) == 1.0 / 3);
    assert_true(json_number_value(json_object_get(json_object_get(l.v[2], "data"), "critic/rewards/mean")) == 7);
    free_lines(&l);
    track_close(t, 0);
    t = open_run(-1); /* a new run starts empty */
    track_close(t, 0);
    assert_int_equal(file_size(path), 0);
    free(path);
}

static void test_places(void **state) {
    (void)state;
    char *path = file_join(dir, "deep/er/numbers.jsonl");
    setenv("VERL_FILE_LOGGER_PATH", path, 1);
    struct track *t = open_run(-1);
    log_step(t, 1, 1);
    track_close(t, 0);
    assert_true(file_size(path) > 0);
    unsetenv("VERL_FILE_LOGGER_PATH");
    free(path);
    static const char *const unknown[] = {"consol"};
    struct track_loggers l = {0};
    assert_int_equal(track_choose(&l, unknown, 1, true), ERR_INVAL);
    assert_non_null(strstr(err_msg(), "'consol'"));
}

/* A tracker that cannot write is dropped with its warning; the others go on. */
static void test_failing(void **state) {
    (void)state;
    setenv("VERL_FILE_LOGGER_PATH", "/dev/full", 1);
    struct track *t = open_run(-1);
    for (int i = 1; i <= 3; i++) log_step(t, i, i);
    assert_int_equal(track_flush(t), 0);
    track_close(t, 0);
    unsetenv("VERL_FILE_LOGGER_PATH");
    sqlite3 *db;
    sqlite3_stmt *st;
    char *path = file_join(dir, "run.db");
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, "SELECT COUNT(DISTINCT step) FROM metrics", -1, &st, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(st), SQLITE_ROW);
    assert_int_equal(sqlite3_column_int(st, 0), 3);
    sqlite3_finalize(st);
    sqlite3_close(db);
    free(path);
}

/* ---- run.db ---- */

static int64_t query(sqlite3 *db, const char *sql) {
    sqlite3_stmt *st;
    assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &st, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(st), SQLITE_ROW);
    const int64_t v = sqlite3_column_int64(st, 0);
    sqlite3_finalize(st);
    return v;
}

static void test_db(void **state) {
    (void)state;
    struct track *t = open_run(-1);
    for (int i = 1; i <= 4; i++) {
        log_sample(t, i, i == 2 ? NAN : 0.5 * i);
        log_step(t, i, i);
    }
    assert_int_equal(track_flush(t), 0);
    sqlite3 *db; /* a second connection while the writer is open */
    sqlite3_stmt *st;
    char *path = file_join(dir, "run.db");
    assert_int_equal(sqlite3_open_v2(path, &db, SQLITE_OPEN_READONLY, NULL), SQLITE_OK);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM metrics"), 12);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM samples"), 4);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM metrics WHERE name = 'actor/nan' AND value IS NULL"), 4);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM samples WHERE score IS NULL"), 1); /* no score is no number */
    assert_int_equal(query(db, "SELECT COUNT(*) FROM meta WHERE key = 'project' AND value = 'p'"), 1);
    assert_int_equal(sqlite3_prepare_v2(db,
                                        "SELECT prompt, response, ids, logp, extra, uid, sample, score, ground_truth FROM samples "
                                        "WHERE step = 1",
                                        -1, &st, NULL),
                     SQLITE_OK);
    assert_int_equal(sqlite3_step(st), SQLITE_ROW);
    assert_string_equal((const char *)sqlite3_column_text(st, 0), "2 + 2 = ?");
    assert_memory_equal(sqlite3_column_text(st, 1), "4\0\xE2\x82\xAC", 6); /* whole, the NUL in it too */
    assert_int_equal(sqlite3_column_bytes(st, 1), 5);
    assert_memory_equal(sqlite3_column_text(st, 8), "4\0", 3);
    assert_int_equal(sqlite3_column_bytes(st, 8), 2);
    assert_int_equal(sqlite3_column_bytes(st, 2), 8);
    assert_memory_equal(sqlite3_column_blob(st, 2), ((const int32_t[]){9, 10}), 8);
    assert_memory_equal(sqlite3_column_blob(st, 3), ((const float[]){-0.5f, -1.25f}), 8);
    assert_string_equal((const char *)sqlite3_column_text(st, 4), "{\"pred\":\"4\"}");
    assert_int_equal(sqlite3_column_int(st, 5), 3);
    assert_int_equal(sqlite3_column_int(st, 6), 1);
    assert_true(sqlite3_column_double(st, 7) == 0.5);
    sqlite3_finalize(st);
    sqlite3_close(db);
    track_close(t, 0);

    t = open_run(2); /* resumed: what is newer goes, and is made again */
    log_sample(t, 3, 9);
    log_step(t, 3, 9);
    track_close(t, 0);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(query(db, "SELECT MAX(step) FROM metrics"), 3);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM samples"), 3);
    assert_int_equal(query(db, "SELECT value FROM metrics WHERE step = 3 AND name = 'critic/rewards/mean'"), 9);
    sqlite3_close(db);
    t = open_run(-1);
    track_close(t, 0);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM metrics"), 0);
    sqlite3_close(db);
    free(path);
}

static char *text_of(sqlite3 *db, const char *sql) {
    sqlite3_stmt *st;
    assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &st, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(st), SQLITE_ROW);
    const char *s = (const char *)sqlite3_column_text(st, 0);
    char *copy = s ? strdup(s) : NULL;
    sqlite3_finalize(st);
    return copy;
}
static void assert_text(sqlite3 *db, const char *sql, const char *want) {
    char *got = text_of(db, sql);
    assert_non_null(got);
    assert_string_equal(got, want);
    free(got);
}

static sqlite3 *open_db(void) {
    sqlite3 *db;
    char *path = file_join(dir, "run.db");
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    free(path);
    return db;
}

/* Any finite score has a bin, whatever the width of the range. */
static void test_histogram_range(void **state) {
    static const double extremes[][3] = {{-1e308, 1e308, 0}, {-1.7e308, 1.7e308, 1.7e308}, {0, 5e-324, 0}, {-5e-324, 1e308, 1},
                                         {3, 3, 3},          {1, 1 + 0x1p-52, 1}};
    (void)state;
    struct track *t = open_run(-1);
    for (int i = 0; i < 6; i++) {
        for (int k = 0; k < 3; k++) log_sample(t, i + 1, extremes[i][k]);
        log_step(t, i + 1, 1);
    }
    track_close(t, 0);
    sqlite3 *db = open_db();
    sqlite3_stmt *st;
    assert_int_equal(
        sqlite3_prepare_v2(db, "SELECT step, counts FROM histograms WHERE name = 'score' ORDER BY step", -1, &st, NULL), SQLITE_OK);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(sqlite3_step(st), SQLITE_ROW);
        const int32_t *counts = sqlite3_column_blob(st, 1);
        const int n = sqlite3_column_bytes(st, 1) / 4;
        int sum = 0;
        for (int b = 0; b < n; b++) sum += counts[b];
        assert_int_equal(sum, 3);
        assert_true(counts[0] >= 1);
        if (extremes[i][1] > extremes[i][0]) assert_true(counts[n - 1] >= 1);
        if (i == 0) assert_int_equal(counts[n / 2], 1);
    }
    sqlite3_finalize(st);
    sqlite3_close(db);
}

/* Numbers of each token, why a sample has no score, histograms, events. */
static void test_db_columns(void **state) {
    (void)state;
    struct track *t = open_run(-1);
    for (int i = 0; i < 5; i++) log_sample(t, 1, i == 4 ? NAN : i == 3 ? 1 : 0.25 * i);
    log_step(t, 1, 1);
    track_event(t, 1, "warning", "entropy is low");
    assert_int_equal(track_flush(t), 0);
    sqlite3 *db = open_db();
    assert_int_equal(query(db, "SELECT entropy = x'0000803E00000040' AND advantages = x'0000803F000080BF' AND ref_logp IS NULL "
                               "FROM samples LIMIT 1"),
                     1);
    assert_text(db, "SELECT reward_message FROM samples WHERE reward_status = 'crash'", "ValueError: no");
    assert_int_equal(query(db, "SELECT COUNT(*) FROM samples WHERE reward_message IS NULL"), 4);
    assert_int_equal(query(db, "SELECT lo = 0 AND hi = 1 AND length(counts) = 160 FROM histograms WHERE name = 'score'"), 1);
    assert_text(db,
                "SELECT hex(substr(counts, 1, 4)) || hex(substr(counts, 41, 4)) || hex(substr(counts, 81, 4)) || "
                "hex(substr(counts, -4)) FROM histograms WHERE name = 'score'",
                "01000000010000000100000001000000");
    assert_int_equal(query(db, "SELECT lo = 2 AND hi = 2 AND substr(counts, 1, 4) = x'05000000' FROM histograms "
                               "WHERE name = 'response_length' AND validation = 0 AND step = 1"),
                     1);
    assert_text(db, "SELECT kind || ': ' || message FROM events WHERE step = 1", "warning: entropy is low");
    assert_text(db, "SELECT value FROM meta WHERE key = 'format'", "2");
    assert_int_equal(query(db, "SELECT COUNT(*) FROM meta WHERE key IN ('ended', 'exit')"), 0);
    track_close(t, err_set(ERR_HELPER, "x.c", 1, "the scorer died"));
    assert_text(db, "SELECT value FROM meta WHERE key = 'exit'", "failed: the scorer died");
    char *started = text_of(db, "SELECT value FROM meta WHERE key = 'started'");
    t = open_run(1); /* resumed: the end is taken back, what happened stays */
    assert_int_equal(query(db, "SELECT COUNT(*) FROM meta WHERE key IN ('ended', 'exit')"), 0);
    assert_text(db, "SELECT value FROM meta WHERE key = 'started'", started);
    assert_text(db, "SELECT group_concat(kind) FROM (SELECT kind FROM events ORDER BY id)", "warning,resume");
    track_close(t, 0);
    assert_text(db, "SELECT value FROM meta WHERE key = 'exit'", "done");
    t = open_run(-1);
    assert_int_equal(query(db, "SELECT (SELECT COUNT(*) FROM events) + (SELECT COUNT(*) FROM histograms)"), 0);
    track_close(t, 0);
    free(started);
    sqlite3_close(db);
}

/* What the run does: the last of many reports, at once in the beginning, the last one of all at the end. */
static void test_status(void **state) {
    (void)state;
    struct track *t = open_run(-1);
    track_phase(t, 1, "gen");
    sqlite3 *db = open_db();
    for (int i = 0; i < 200 && query(db, "SELECT COUNT(*) FROM status WHERE key = 'phase'") == 0; i++) usleep(10000);
    assert_text(db, "SELECT value FROM status WHERE key = 'phase'", "gen");
    const int64_t before = query(db, "PRAGMA data_version");
    for (int i = 1; i <= 2000; i++) track_progress(t, 1, "rollout", i, 4000, 7.5);
    assert_true(query(db, "PRAGMA data_version") - before <= 1); /* not one a call */
    track_close(t, 0);
    assert_text(db,
                "SELECT group_concat(key || '=' || value) FROM (SELECT * FROM status WHERE key IN ('done', 'phase', 'step', "
                "'tok_s', 'total') ORDER BY key)",
                "done=2000,phase=gen,step=1,tok_s=7.5,total=4000");
    assert_int_equal(query(db, "SELECT value FROM status WHERE key = 'pid'"), getpid());
    assert_int_equal(query(db, "SELECT (SELECT value FROM status WHERE key = 'wall') >= "
                               "(SELECT value FROM status WHERE key = 'phase_since')"),
                     1);
    sqlite3_close(db);
}

/* The run of an earlier verlc goes on in the new format, with its samples. */
static void test_format_1(void **state) {
    (void)state;
    sqlite3 *db = open_db();
    assert_int_equal(
        sqlite3_exec(
            db,
            "PRAGMA journal_mode=WAL;"
            "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT);"
            "CREATE TABLE metrics(step INTEGER, name TEXT, value REAL, PRIMARY KEY(step, name)) WITHOUT ROWID;"
            "CREATE TABLE samples(id INTEGER PRIMARY KEY, step INTEGER, validation INTEGER, uid INTEGER, sample INTEGER,"
            " data_source TEXT, prompt TEXT, response TEXT, ground_truth TEXT, score REAL, advantage REAL,"
            " reward_status TEXT, finish TEXT, prompt_ids BLOB, ids BLOB, logp BLOB, extra TEXT);"
            "CREATE INDEX samples_step ON samples(step);"
            "INSERT INTO meta VALUES('format', '1');"
            "INSERT INTO samples VALUES(NULL, 1, 0, 3, 1, 'd', 'p', 'r', 'g', 0.5, 1, 'score', 'stop', x'', x'', x'', '{}');"
            "INSERT INTO metrics VALUES(1, 'a', 2)",
            NULL, NULL, NULL),
        SQLITE_OK);
    struct track *t = open_run(1);
    log_sample(t, 2, 1);
    log_step(t, 2, 1);
    track_close(t, 0);
    assert_text(db, "SELECT value FROM meta WHERE key = 'format'", "2");
    assert_int_equal(query(db, "SELECT COUNT(*) FROM samples WHERE (step = 1) = (entropy IS NULL)"), 2);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM metrics WHERE step = 1"), 1);
    assert_text(db, "PRAGMA integrity_check", "ok");
    sqlite3_close(db);
}

/* ---- an asynchronous schedule ---- */

static void log_drawn(struct track *t, int64_t step, int64_t number, int64_t sample, const int32_t *versions, int64_t n) {
    static const int32_t ids[8] = {0};
    static const float logp[8] = {0};
    const struct track_sample s = {.step = step,
                                   .uid = 3,
                                   .index = sample,
                                   .data_source = "d",
                                   .prompt_ids = ids,
                                   .ids = ids,
                                   .n_prompt = 1,
                                   .n = n,
                                   .logp = logp,
                                   .reward_status = "score",
                                   .finish = "stop",
                                   .versions = versions,
                                   .prompt_number = number,
                                   .place = 10 + number};
    track_sample(t, &s);
}

static void test_schedule(void **state) {
    (void)state;
    struct track_schedule s;
    assert_int_equal(track_schedule_read(&s, dir), ERR_INPUT); /* there is no run.db */
    struct track *t = open_run(-1);
    log_sample(t, 1, 1); /* of a run that is not asynchronous */
    assert_int_equal(track_flush(t), 0);
    assert_int_equal(track_schedule_read(&s, dir), ERR_INPUT);
    assert_non_null(strstr(err_msg(), "no step of a fully asynchronous run"));
    log_drawn(t, 2, 7, 1, (const int32_t[]){0, 0, 0, 2, 3, 3}, 6);
    log_drawn(t, 2, 7, 0, (const int32_t[]){1}, 1);
    log_drawn(t, 3, 5, 0, (const int32_t[]){2, 2}, 2);
    track_close(t, 0);
    assert_int_equal(track_schedule_read(&s, dir), 0);
    assert_int_equal(s.n, 3);
    const struct track_schedule_row *r = track_schedule_find(&s, 7, 1);
    assert_ptr_equal(r, &s.rows[2]); /* by number, then sample */
    assert_int_equal(r->step, 2);
    assert_int_equal(r->place, 17);
    assert_int_equal(r->n_runs, 3);
    assert_memory_equal(r->runs, ((const int32_t[]){3, 0, 1, 2, 2, 3}), 6 * sizeof(int32_t));
    assert_null(track_schedule_find(&s, 7, 2));
    assert_null(track_schedule_find(&s, 6, 0));
    track_schedule_free(&s);
    static const char *const damage[] = {"x'0100'", "x'0000000001000000'", "x'01000000020000000100000002000000'"};
    sqlite3 *db = open_db();
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        char sql[128];
        snprintf(sql, sizeof sql, "UPDATE samples SET versions = %s WHERE prompt_number = 5", damage[i]);
        assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
        assert_int_equal(track_schedule_read(&s, dir), ERR_FORMAT);
    }
    sqlite3_close(db);
}

/* ---- TensorBoard ---- */

/* The records of the one event file: length, masked CRC32-C, bytes, masked CRC32-C. */
static uint32_t masked_crc(const uint8_t *p, size_t n) {
    uint32_t c = ~0u;
    for (size_t i = 0; i < n; i++) {
        c ^= p[i];
        for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0x82f63b78u : c >> 1;
    }
    c = ~c;
    return (c >> 15 | c << 17) + 0xa282ead8u;
}

static void test_tensorboard(void **state) {
    (void)state;
    struct track *t = open_run(-1);
    log_step(t, 1, 0.25);
    log_step(t, 300, 0.5);
    track_close(t, 0);
    char *path = event_file();
    struct buf b = {0};
    assert_int_equal(file_read(&b, path, 1 << 20), 0);
    const uint8_t *p = (const uint8_t *)b.p;
    size_t at = 0;
    int n = 0;
    while (at < b.n) {
        uint64_t len;
        uint32_t head, body;
        assert_true(at + 12 <= b.n);
        memcpy(&len, p + at, 8);
        memcpy(&head, p + at + 8, 4);
        assert_int_equal(head, masked_crc(p + at, 8));
        assert_true(len < b.n && at + 16 + len <= b.n);
        memcpy(&body, p + at + 12 + len, 4);
        assert_int_equal(body, masked_crc(p + at + 12, len));
        assert_int_equal(p[at + 12], 1 << 3 | 1); /* wall_time: field 1, fixed64 */
        at += 16 + len;
        n++;
    }
    assert_int_equal(n, 3); /* the version, then a record a step */
    assert_non_null(memmem(b.p, b.n, "brain.Event:2", 13));
    assert_non_null(memmem(b.p, b.n, "critic/rewards/mean", 19));
    assert_int_equal(masked_crc((const uint8_t *)"123456789", 9),
                     (0xe3069283u >> 15 | 0xe3069283u << 17) + 0xa282ead8u); /* RFC 3720 */
    buf_free(&b);
    free(path);
}

/* ---- the queue ---- */

static void test_queue(void **state) {
    (void)state;
    struct track *t = open_run(-1);
    enum { STEPS = 200, PER_STEP = 20 };
    for (int i = 1; i <= STEPS; i++) {
        for (int k = 0; k < PER_STEP; k++) log_sample(t, i, 1);
        log_step(t, i, i);
        track_progress(t, i, "rollout", 1, 2, 100);
    }
    track_close(t, 0); /* writes all that is queued */
    sqlite3 *db;
    char *path = file_join(dir, "run.db");
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(query(db, "SELECT COUNT(DISTINCT step) FROM metrics"), STEPS);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM samples"), STEPS * PER_STEP);
    sqlite3_close(db);
    free(path);
    track_close(NULL, 0);
}

#define T(f) cmocka_unit_test_setup_teardown(f, make_dir, remove_dir)
int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_metrics),  T(test_long_names),      T(test_file),       T(test_places), T(test_failing),
        T(test_db),       T(test_histogram_range), T(test_db_columns), T(test_status), T(test_format_1),
        T(test_schedule), T(test_tensorboard),     T(test_queue)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
