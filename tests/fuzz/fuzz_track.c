/* fuzz_track.c - what a resumed run finds of its trackers: run.db, what was kept beside it, metrics.jsonl, or a client's unsent
 * records or state, of arbitrary bytes; the first byte picks which.  Each is an error with a message, or takes the next record. */
#include "fuzz.h"

#include "track/tracker_client_int.h"
#include "track/track.h"

#include <sys/stat.h>

static const char *const names[] = {"run.db", "metrics.jsonl", "trackers/fuzz.jsonl", "trackers/fuzz.state.json", "run.kept.db"};
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

static void resume_client(void) {
    struct client *c = client__new("fuzz", fuzz_dir());
    int64_t n_kept, n_left;
    const int rc = client__take_up(c, 7, &n_kept, &n_left);
    fuzz_check_rc(rc);
    if (rc == 0) fuzz_check_rc(client__spool(c, json_pack("{s:i}", "step", 8), false));
    client__free(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const struct track_loggers loggers = {.file = true};
    if (n == 0) return 0;
    fuzz_quiet();
    char *trackers = file_join(fuzz_dir(), "trackers");
    mkdir(trackers, 0777);
    free(trackers);
    char *wal = file_join(fuzz_dir(), "run.db-wal"), *shm = file_join(fuzz_dir(), "run.db-shm");
    unlink(wal);
    unlink(shm);
    for (int i = 0; i < KEPT; i++) free(fuzz_file(names[i], data, 0));
    const int which = data[0] % N_NAMES;
    free(fuzz_file(names[which], data + 1, n - 1));
    const struct track_args a = {.loggers = &loggers, .project = "p", .experiment = "e", .run_dir = fuzz_dir(), .resume_step = 7};
    if (which == SPOOL || which == STATE) resume_client();
    else resume_run(&a);
    free(wal);
    free(shm);
    return 0;
}
