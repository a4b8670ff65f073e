/* fuzz_track.c - what a resumed run finds of its trackers: run.db or metrics.jsonl of arbitrary bytes; the first byte picks
 * which.  Either is an error with a message, or takes the next step. */
#include "fuzz.h"

#include "track/track.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const char *const names[] = {"run.db", "metrics.jsonl"}, *const loggers[] = {"file"};
    struct track *t = NULL;
    struct metrics m = {0};
    if (n == 0) return 0;
    fuzz_quiet();
    char *db = fuzz_file("run.db", data, 0), *wal = file_join(fuzz_dir(), "run.db-wal"), *shm = file_join(fuzz_dir(), "run.db-shm");
    unlink(wal);
    unlink(shm);
    char *path = fuzz_file(names[data[0] % 2], data + 1, n - 1);
    const struct track_args a = {
        .loggers = loggers, .n_loggers = 1, .project = "p", .experiment = "e", .run_dir = fuzz_dir(), .resume_step = 7};
    const int rc = track_open(&t, &a);
    fuzz_check_rc(rc);
    if (rc == 0) {
        metrics_set(&m, 1, "a");
        track_log(t, 8, &m);
        track_close(t);
    }
    metrics_free(&m);
    free(db);
    free(wal);
    free(shm);
    free(path);
    return 0;
}
