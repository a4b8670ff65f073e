/* test_track_kept.c - run.db while another program has locked it, while its disk is full or fails: no record is lost, it is said
 * once, and what a run could not write is taken in later, once. */
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "track/run_db_store.h"
#include "track/track.h"

#include <errno.h>
#include <setjmp.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

static char dir[64], *path, *kept;
enum { SAMPLES = 3 };

static int make_dir(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/verlc-test-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    path = file_join(dir, "run.db");
    kept = file_join(dir, "run.kept.db");
    return 0;
}
static int remove_dir(void **state) {
    (void)state;
    free(path);
    free(kept);
    return file_remove_tree(dir);
}

static struct track *open_run(int64_t resume_step) {
    struct track *t = NULL;
    const struct track_args a = {.project = "p", .experiment = "e", .run_dir = dir, .resume_step = resume_step, .title = "test"};
    assert_int_equal(track_open(&t, &a), 0);
    return t;
}

static void log_step(struct track *t, int64_t step) {
    static const int32_t ids[] = {9, 10};
    static const float logp[] = {-0.5f, -1.25f};
    struct metrics m = {0};
    for (int k = 0; k < SAMPLES; k++) {
        const struct track_sample s = {.step = step,
                                       .uid = k,
                                       .data_source = "d",
                                       .response = {"a\0b", 3},
                                       .prompt_ids = ids,
                                       .ids = ids,
                                       .n_prompt = 2,
                                       .n = 2,
                                       .logp = logp,
                                       .score = k,
                                       .reward_status = "score",
                                       .finish = "stop"};
        track_sample(t, &s);
    }
    metrics_set_i64(&m, step, "training/global_step");
    track_log(t, step, &m);
    metrics_free(&m);
}

static sqlite3 *open_db(void) {
    sqlite3 *db;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    sqlite3_busy_timeout(db, 2000);
    return db;
}
static void exec(sqlite3 *db, const char *sql) { assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK); }
static int64_t query(sqlite3 *db, const char *sql) {
    sqlite3_stmt *st;
    assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &st, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(st), SQLITE_ROW);
    const int64_t v = sqlite3_column_int64(st, 0);
    sqlite3_finalize(st);
    return v;
}

/* Steps 1 to n, each once, with their samples in order and their histograms. */
static void assert_steps(int64_t n) {
    sqlite3 *db = open_db();
    assert_int_equal(query(db, "SELECT COUNT(*) FROM metrics"), n);
    assert_int_equal(query(db, "SELECT MAX(step) FROM metrics"), n);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM samples"), n * SAMPLES);
    assert_int_equal(query(db, "SELECT COUNT(DISTINCT step || ' ' || uid) FROM samples"), n * SAMPLES);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM samples a, samples b WHERE a.id < b.id AND a.step > b.step"), 0);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM samples WHERE length(CAST(response AS BLOB)) = 3"), n * SAMPLES);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM histograms"), 2 * n);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM pragma_integrity_check WHERE integrity_check = 'ok'"), 1);
    sqlite3_close(db);
}

static void test_locked(void **state) {
    (void)state;
    struct track *t = open_run(-1);
    log_step(t, 1);
    assert_int_equal(track_flush(t), 0);
    sqlite3 *db = open_db();
    exec(db, "BEGIN IMMEDIATE");
    for (int i = 2; i <= 5; i++) log_step(t, i);
    assert_int_equal(track_flush(t), 0); /* on disk, beside it */
    assert_true(file_exists(kept));
    assert_int_equal(query(db, "SELECT MAX(step) FROM metrics"), 1);
    assert_int_equal(track_take_in(dir), 0); /* its run has it */
    exec(db, "COMMIT");
    usleep(600000);
    log_step(t, 6);
    assert_int_equal(track_flush(t), 0);
    assert_false(file_exists(kept));
    assert_steps(6);
    exec(db, "BEGIN IMMEDIATE"); /* again: nothing more is said */
    log_step(t, 7);
    assert_int_equal(track_flush(t), 0);
    exec(db, "COMMIT");
    track_close(t, 0);
    assert_steps(7);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM events WHERE kind = 'warning'"), 1);
    assert_int_equal(query(db, "SELECT COUNT(*) FROM meta WHERE key = 'exit' AND value = 'done'"), 1);
    sqlite3_close(db);
}

/* The run that is killed: resumed at step 2, two steps once it is told to, and it ends without a close. */
static int go_on(const char *run_dir) {
    char c = 'x';
    snprintf(dir, sizeof dir, "%s", run_dir);
    struct track *t = open_run(2);
    if (write(STDOUT_FILENO, &c, 1) != 1 || read(STDIN_FILENO, &c, 1) != 1) return 1;
    for (int i = 3; i <= 4; i++) log_step(t, i);
    _exit(track_flush(t) == 0 ? 0 : 1);
}

/* A run that is killed while run.db is locked: steps 1 and 2 there, 3 and 4 kept. */
static void killed_run(void) {
    struct track *t = open_run(-1);
    for (int i = 1; i <= 2; i++) log_step(t, i);
    assert_int_equal(track_flush(t), 0);
    track_close(t, 0);
    int opened[2], go[2], status;
    char c;
    assert_true(pipe(opened) == 0 && pipe(go) == 0);
    const pid_t pid = fork();
    if (pid == 0) { /* a program of its own: this one has threads */
        dup2(go[0], STDIN_FILENO);
        dup2(opened[1], STDOUT_FILENO);
        for (int i = 0; i < 2; i++) close(opened[i]), close(go[i]);
        execl("/proc/self/exe", "test_track_kept", "goes on", dir, (char *)NULL);
        _exit(127);
    }
    close(opened[1]);
    close(go[0]);
    assert_int_equal(read(opened[0], &c, 1), 1);
    sqlite3 *other = open_db();
    exec(other, "BEGIN IMMEDIATE");
    assert_int_equal(write(go[1], &c, 1), 1);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    exec(other, "COMMIT");
    sqlite3_close(other);
    close(opened[0]);
    close(go[1]);
    assert_true(file_exists(kept));
    assert_steps(2);
}

static void test_taken_in(void **state) {
    (void)state;
    killed_run();
    struct buf copy = {0};
    assert_int_equal(file_read(&copy, kept, 0), 0);
    assert_int_equal(track_take_in(dir), 1);
    assert_false(file_exists(kept));
    assert_steps(4);
    assert_int_equal(track_take_in(dir), 0);
    assert_int_equal(file_write_atomic(kept, copy.p, copy.n), 0); /* a crash before it was removed */
    assert_int_equal(track_take_in(dir), 1);
    assert_false(file_exists(kept));
    assert_steps(4);
    buf_free(&copy);
}

static void test_resumed(void **state) {
    (void)state;
    killed_run();
    struct track *t = open_run(3); /* step 4 is made again */
    log_step(t, 4);
    track_close(t, 0);
    assert_false(file_exists(kept));
    assert_steps(4);
    killed_run();
    t = open_run(-1); /* a new run does not continue it */
    track_close(t, 0);
    assert_false(file_exists(kept));
    assert_steps(0);
}

static void test_damaged(void **state) {
    (void)state;
    struct track *t = open_run(-1);
    log_step(t, 1);
    track_close(t, 0);
    char *aside = file_join(dir, "run.kept.db.damaged");
    assert_int_equal(file_write_atomic(kept, "SQLite format 3\0garbage", 23), 0);
    assert_int_equal(track_take_in(dir), ERR_FORMAT);
    t = open_run(1);
    log_step(t, 2);
    track_close(t, 0);
    assert_true(file_exists(aside));
    assert_steps(2);
    sqlite3 *db;
    assert_int_equal(sqlite3_open(kept, &db), SQLITE_OK); /* tables of other columns */
    exec(db,
         "CREATE TABLE meta(key TEXT, value TEXT); INSERT INTO meta VALUES('kept', 'x'); CREATE TABLE metrics(step, \"a\"\"b\");"
         "INSERT INTO metrics VALUES(1, 2)");
    sqlite3_close(db);
    assert_int_equal(track_take_in(dir), ERR_FORMAT);
    assert_steps(2);
    free(aside);
}

static int complete(sqlite3 *db, const char *where) {
    (void)db, (void)where;
    return 0;
}

/* At the end it is waited for, not for ever; then what is left is in the kept file. */
static void test_end(void **state) {
    (void)state;
    struct track *t = open_run(-1);
    track_close(t, 0);
    struct run_db_store *s;
    const struct run_db_store_args a = {
        .dir = dir,
        .schema =
            "CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT); CREATE TABLE IF NOT EXISTS metrics(step INTEGER, "
            "name TEXT, value REAL, PRIMARY KEY(step, name)) WITHOUT ROWID; CREATE TABLE IF NOT EXISTS samples(id INTEGER "
            "PRIMARY KEY); CREATE TABLE IF NOT EXISTS histograms(step); CREATE TABLE IF NOT EXISTS status(key TEXT PRIMARY KEY);"
            "CREATE TABLE IF NOT EXISTS events(id INTEGER PRIMARY KEY)",
        .complete = complete};
    assert_int_equal(run_db_store_open(&s, &a), 0);
    sqlite3 *db = open_db();
    exec(db, "BEGIN IMMEDIATE");
    assert_true(run_db_store_room(s, 10, false));
    exec(run_db_store_stage(s), "INSERT INTO metrics VALUES(7, 'a', 1)");
    const double begin = clock_awake();
    run_db_store_close(s, begin + 2);
    assert_true(clock_awake() - begin < 5);
    exec(db, "COMMIT");
    assert_int_equal(query(db, "SELECT COUNT(*) FROM metrics"), 0);
    assert_int_equal(track_take_in(dir), 1);
    assert_int_equal(query(db, "SELECT value FROM metrics WHERE step = 7"), 1);
    sqlite3_close(db);
}

/* ---- a disk that is full, or fails ---- */

static int disk; /* errno of every write of SQLite; 0: it works */
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static ssize_t broken_pwrite(int fd, const void *p, size_t n, off_t at) {
    if (disk == 0) return real_pwrite(fd, p, n, at);
    errno = disk;
    return -1;
}
static void break_writes(void) {
    static const char *const names[] = {"pwrite", "pwrite64"};
    sqlite3_vfs *vfs = sqlite3_vfs_find("unix");
    for (int i = 0; i < 2; i++) {
        const sqlite3_syscall_ptr p = vfs->xGetSystemCall(vfs, names[i]);
        if (!p || p == (sqlite3_syscall_ptr)broken_pwrite) continue;
        real_pwrite = (ssize_t(*)(int, const void *, size_t, off_t))p;
        assert_int_equal(vfs->xSetSystemCall(vfs, names[i], (sqlite3_syscall_ptr)broken_pwrite), SQLITE_OK);
    }
    assert_non_null(real_pwrite);
}

static void test_disk(void **state) {
    static const int errors[] = {ENOSPC, EIO, EROFS};
    (void)state;
    break_writes();
    for (int k = 0; k < 3; k++) {
        struct track *t = open_run(-1);
        log_step(t, 1);
        assert_int_equal(track_flush(t), 0);
        disk = errors[k];
        for (int i = 2; i <= 4; i++) log_step(t, i);
        assert_int_equal(track_flush(t), 0);
        disk = 0;
        usleep(600000);
        log_step(t, 5);
        track_close(t, 0);
        assert_false(file_exists(kept));
        assert_steps(5);
    }
}

#define T(f) cmocka_unit_test_setup_teardown(f, make_dir, remove_dir)
int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "goes on") == 0) return go_on(argv[2]);
    const struct CMUnitTest tests[] = {T(test_locked),  T(test_taken_in), T(test_resumed),
                                       T(test_damaged), T(test_end),      T(test_disk)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
