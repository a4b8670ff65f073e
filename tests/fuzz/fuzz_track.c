/* fuzz_track.c - what a resumed run finds of its trackers: run.db, what was kept beside it, metrics.jsonl, or a client's unsent
 * records or state, of arbitrary bytes; the first byte picks which.  Each is an error with a message, or takes the next record.
 * client.c is included whole, so that no client has to be started. */
#include "fuzz.h"

#include "track/client.c"

static const char *const names[] = {"run.db", "metrics.jsonl", "client.jsonl", "client.json", "run.kept.db"};
enum { RUN_DB, METRICS, SPOOL, STATE, KEPT, N_NAMES };

static void resume_run(const struct track_args *a) {
    struct track *t = NULL;
    struct metrics m = {0};
    const int rc = track_open(&t, a);
    fuzz_check_rc(rc);
    if (rc < 0) return;
    metrics_set(&m, 1, "a");
    track_log(t, 8, &m);
    track_close(t, 0);
    metrics_free(&m);
}

static void resume_client(const struct track_args *a) {
    struct client c = {.name = "fuzz", .fd = -1, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    c.path = file_join(fuzz_dir(), names[SPOOL]);
    c.state_path = file_join(fuzz_dir(), names[STATE]);
    const int rc = take_up(&c, a);
    fuzz_check_rc(rc);
    CHECK(rc < 0 || (c.fd = open(c.path, O_RDWR | O_APPEND | O_CLOEXEC)) >= 0);
    if (rc == 0) fuzz_check_rc(spool(&c, json_pack("{s:i}", "step", 8), false));
    if (c.fd >= 0) close(c.fd);
    json_decref(c.run);
    free(c.path);
    free(c.state_path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const struct track_loggers loggers = {.file = true};
    if (n == 0) return 0;
    fuzz_quiet();
    char *wal = file_join(fuzz_dir(), "run.db-wal"), *shm = file_join(fuzz_dir(), "run.db-shm");
    unlink(wal);
    unlink(shm);
    for (int i = 0; i < KEPT; i++) free(fuzz_file(names[i], data, 0));
    const int which = data[0] % N_NAMES;
    free(fuzz_file(names[which], data + 1, n - 1));
    const struct track_args a = {.loggers = &loggers, .project = "p", .experiment = "e", .run_dir = fuzz_dir(), .resume_step = 7};
    if (which == SPOOL || which == STATE) resume_client(&a);
    else resume_run(&a);
    free(wal);
    free(shm);
    return 0;
}
