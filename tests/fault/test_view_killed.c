/* test_view_killed.c - run.db of a writer that was killed with SIGKILL at any moment: whole (PRAGMA integrity_check), readable,
 * nothing lost of a step that was flushed, and taken up again by the run that goes on. */
#include "base/err.h"
#include "base/file.h"
#include "track/track.h"
#include "view/run_reader.h"

#include <setjmp.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

enum { KILLS = 60, SAMPLES = 24, TOKENS = 200 };

static char dir[64];

/* Steps without end, from the one after `from`; the number of each that is flushed goes down the pipe. */
static void write_steps(int64_t from, int pipe) {
    static int32_t ids[TOKENS];
    static float logp[TOKENS];
    const struct track_args a = {.project = "p", .experiment = "e", .run_dir = dir, .resume_step = from, .total_steps = 1 << 20};
    struct track *t;
    if (track_open(&t, &a) < 0) _exit(9);
    for (int64_t step = from + 1;; step++) {
        struct metrics m = {0};
        metrics_set(&m, (double)step, "critic/rewards/mean");
        track_phase(t, step, "gen");
        for (int i = 0; i < SAMPLES; i++) {
            const struct track_sample s = {.step = step,
                                           .uid = i / 4,
                                           .index = i % 4,
                                           .data_source = "d",
                                           .prompt = {"what", 4},
                                           .response = {"that", 4},
                                           .prompt_ids = ids,
                                           .ids = ids,
                                           .n_prompt = 4,
                                           .n = TOKENS,
                                           .logp = logp,
                                           .entropy = logp,
                                           .reward_status = "score",
                                           .finish = "stop"};
            track_sample(t, &s);
        }
        track_log(t, step, &m);
        track_event(t, step, "checkpoint", "here");
        metrics_free(&m);
        if (track_flush(t) < 0 || write(pipe, &step, sizeof step) != sizeof step) _exit(9);
    }
}

static int count(void *arg, const struct run_sample *s) {
    (void)s;
    ++*(int *)arg;
    return 0;
}

static void check_whole(void) {
    sqlite3 *db;
    sqlite3_stmt *st;
    char *path = file_join(dir, "run.db");
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, "PRAGMA integrity_check", -1, &st, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(st), SQLITE_ROW);
    assert_string_equal((const char *)sqlite3_column_text(st, 0), "ok");
    sqlite3_finalize(st);
    sqlite3_close(db);
    free(path);
}

/* What the reader finds of steps up to `flushed`, and no word of an end. */
static void check_run(int64_t flushed) {
    struct run_reader *r;
    struct run_meta m;
    int n = 0;
    assert_int_equal(run_reader_open(&r, dir), 0);
    assert_int_equal(run_reader_meta(r, &m), 0);
    assert_true(m.last_step >= flushed && !m.exit && m.ended == 0);
    run_meta_free(&m);
    const struct run_sample_query q = {.step = flushed, .uid = -1, .index = -1};
    if (flushed > 0) assert_int_equal(run_reader_samples(r, &q, count, &n), 0);
    assert_int_equal(n, flushed > 0 ? SAMPLES : 0);
    run_reader_close(r);
}

static void test_killed(void **state) {
    (void)state;
    int64_t done = 0; /* steps that were flushed */
    int written = 0;
    srand(7);
    for (int k = 0; k < KILLS; k++) {
        int fd[2];
        int64_t step;
        assert_int_equal(pipe(fd), 0);
        const pid_t pid = fork();
        if (pid == 0) write_steps(done, fd[1]);
        close(fd[1]);
        if (k % 3) assert_int_equal(read(fd[0], &step, sizeof step), sizeof step); /* some are killed while they open it */
        if (k % 3) done = step;
        usleep((useconds_t)(rand() % 30000));
        assert_int_equal(kill(pid, SIGKILL), 0);
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status)); /* it did not end by itself */
        while (read(fd[0], &step, sizeof step) == sizeof step) done = step;
        close(fd[0]);
        char *path = file_join(dir, "run.db");
        const bool there = file_size(path) > 0;
        free(path);
        if (!there) continue;
        written++;
        if (k % 2) check_whole(); /* a writer recovers it first, else the reader does */
        if (done > 0) check_run(done);
        check_whole();
    }
    assert_true(written >= KILLS - 5 && done > KILLS / 2);
}

int main(void) {
    snprintf(dir, sizeof dir, "/tmp/verlc-test-XXXXXX");
    if (!mkdtemp(dir)) return 1;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_killed)};
    const int rc = cmocka_run_group_tests(tests, NULL, NULL);
    return file_remove_tree(dir) < 0 ? 1 : rc;
}
