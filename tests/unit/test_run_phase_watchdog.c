/* test_run_phase_watchdog.c - stages add up their time, signals ask for a stop, and the
 * watchdog ends a process that makes no progress, naming the stage. */
#include "base/clock.h"
#include "base/err.h"
#include "run/directories.h"
#include "run/phase_watchdog.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

static void nap(double s) {
    const struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
    nanosleep(&t, NULL);
}

static void test_times(void **state) {
    (void)state;
    struct phases *s;
    struct metrics m = {0};
    double a, b;
    assert_int_equal(phases_create(&s, 0), 0);
    for (int i = 0; i < 2; i++) {
        phase_begin(s, "gen");
        nap(0.02);
        phase_begin(s, "ref"); /* ends gen */
    }
    phase_end(s);
    phases_metrics(s, &m);
    assert_true(metrics_get(&m, "timing_s/gen", &a) && a >= 0.04);
    assert_true(metrics_get(&m, "timing_s/ref", &b) && b < a);
    metrics_reset(&m);
    phases_metrics(s, &m); /* reset by the call before */
    assert_int_equal(m.n, 0);
    metrics_free(&m);
    phases_destroy(s);
    phases_destroy(NULL);
}

/* Runs fn in a child; its standard error in text. Returns the wait status. */
static int child(void (*fn)(void), char *text, size_t cap, double *seconds) {
    int fds[2], status = 0;
    assert_int_equal(pipe(fds), 0);
    const double start = clock_now();
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(fds[1], STDERR_FILENO);
        close(fds[0]);
        fn();
        _exit(99);
    }
    close(fds[1]);
    size_t n = 0;
    for (ssize_t got; n < cap - 1 && (got = read(fds[0], text + n, cap - 1 - n)) > 0;) n += (size_t)got;
    text[n] = '\0';
    close(fds[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    *seconds = clock_now() - start;
    return status;
}

static void stall(void) {
    struct phases *s;
    if (phases_create(&s, 0.3) < 0) _exit(98);
    phase_begin(s, "update_actor");
    nap(60);
}
static void beat_then_end(void) {
    struct phases *s;
    if (phases_create(&s, 0.5) < 0) _exit(98);
    phase_begin(s, "gen");
    for (int i = 0; i < 12; i++) { /* longer than the deadline in all, never silent for it */
        nap(0.1);
        phase_beat(s);
    }
    phase_end(s);
    nap(0.8); /* outside a stage nothing is expected */
    phases_destroy(s);
    _exit(7);
}
static void two_signals(void) {
    struct phases *s;
    if (phases_create(&s, 0) < 0) _exit(98);
    if (phase_stop_signal() != 0) _exit(97);
    raise(SIGTERM);
    if (phase_stop_signal() != SIGTERM) _exit(96);
    raise(SIGTERM); /* ends here */
    nap(60);
}
static void handlers_back(void) {
    struct phases *s;
    if (phases_create(&s, 0) < 0) _exit(98);
    phases_destroy(s);
    raise(SIGINT); /* the default action again */
    nap(60);
}

static void test_watchdog(void **state) {
    (void)state;
    char text[2048];
    double t;
    int status = child(stall, text, sizeof text, &t);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), err_exit_status(ERR_TIMEOUT));
    assert_non_null(strstr(text, "stage 'update_actor'"));
    assert_true(t < 30);
    status = child(beat_then_end, text, sizeof text, &t);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

static void test_signals(void **state) {
    (void)state;
    char text[2048];
    double t;
    int status = child(two_signals, text, sizeof text, &t);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
    assert_non_null(strstr(text, "once more ends at once"));
    status = child(handlers_back, text, sizeof text, &t);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT);
    assert_string_equal(phase_signal_name(SIGINT), "SIGINT");
}

static void test_dirs(void **state) {
    (void)state;
    char dir[] = "/tmp/verlc-test-XXXXXX", path[256];
    char *found = NULL;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/a/b", dir);
    assert_int_equal(run_directory("trainer.default_local_dir", path), 0);
    snprintf(path, sizeof path, "%s/a/b/.write_test", dir);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(run_directory("trainer.default_local_dir", "/proc/verlc-no"), ERR_IO);
    assert_non_null(strstr(err_msg(), "trainer.default_local_dir=/proc/verlc-no"));

    assert_int_equal(run_model_dir("/no/such/model", true, &found), ERR_INPUT);
    assert_int_equal(run_model_dir(dir, true, &found), 0);
    free(found);
    snprintf(path, sizeof path, "rm -rf %s", dir);
    assert_int_equal(system(path), 0);
}

int main(void) {
    (void)signal(SIGINT, SIG_DFL); /* a shell ignores it in what it starts in the background */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_watchdog), /* children with threads: forked while this process has none (thread sanitizer) */
        cmocka_unit_test(test_signals),
        cmocka_unit_test(test_times),
        cmocka_unit_test(test_dirs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
