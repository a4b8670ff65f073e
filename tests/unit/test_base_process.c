/* test_base_process.c - child processes: how they end is told, and all that descends from them ends with them, one that
 * forks and leaves as fast as it can too; whether one is suspended. */
#include "base/buf.h"
#include "base/clock.h"
#include "base/process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

extern char **environ;
static char own_path[4096], mark[64];

/* Each of its generations leaves session, group and parent, then forks the next and ends. */
static _Noreturn void comet(void) {
    for (int sig = 1; sig < NSIG; sig++)
        if (sig != SIGCHLD) signal(sig, SIG_IGN);
    if (fork()) {
        usleep(100000);
        _exit(0);
    }
    for (;;) {
        setsid();
        if (fork() > 0) _exit(0);
    }
}

static struct process begin(const char *program, const char *arg) {
    static const int fds[] = {-1, -1, 2};
    const char *const argv[] = {program, arg, mark, NULL};
    struct process p;
    assert_int_equal(
        process_start(&p, &(struct process_args){.argv = argv, .env = environ, .fds = fds, .n_fds = 3, .memory_bytes = -1}), 0);
    return p;
}

static void expect(const char *program, const char *arg, const char *want) {
    struct process p = begin(program, arg);
    char how[64];
    process_stop(&p, 20, how, sizeof how);
    assert_string_equal(how, want);
    assert_int_equal(p.pid, -1);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

static void the_end_is_told(void **state) {
    (void)state;
    expect("/bin/true", "", "exit code 0");
    expect(own_path, "seven", "exit code 7");
    expect(own_path, "term", "signal 15 (Terminated)");
    expect("/no/such/program", "", "exit code 127");
    struct process p = begin(own_path, "wait");
    char how[64];
    assert_false(process_exited(&p));
    process_stop(&p, 0, how, sizeof how);
    assert_string_equal(how, "signal 9 (Killed)");
    process_stop(&p, 0, how, sizeof how);
    assert_string_equal(how, "not running");
}

/* Processes with our mark on the command line. */
static int alive(void) {
    DIR *d = opendir("/proc");
    int n = 0;
    for (struct dirent *e; (e = readdir(d));) {
        char path[300], text[4096];
        snprintf(path, sizeof path, "/proc/%s/cmdline", e->d_name);
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        const ssize_t got = fd < 0 ? 0 : read(fd, text, sizeof text);
        if (fd >= 0) close(fd);
        n += got > 0 && memmem(text, (size_t)got, mark, strlen(mark)) != NULL;
    }
    closedir(d);
    return n;
}

static void descendants_end_too(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        const double t = clock_now();
        expect(own_path, "comet", "exit code 0");
        assert_true(clock_now() - t < 10);
        assert_int_equal(alive(), 0);
    }
}

static void a_program_is_suspended(void **state) {
    (void)state;
    struct process runs = begin(own_path, "wait"), p = begin(own_path, "stop");
    char how[64];
    const double deadline = clock_awake() + 20;
    while (!process_suspended(&p) && clock_awake() < deadline) usleep(1000);
    assert_true(process_suspended(&p));
    assert_false(process_suspended(&runs));
    assert_false(process_suspended(&(struct process){-1, -1}));
    process_stop(&p, 0, how, sizeof how);
    assert_string_equal(how, "signal 9 (Killed)");
    process_stop(&runs, 0, how, sizeof how);
}

static void a_reaper_is_stopped(void **state) {
    (void)state;
    struct process p = begin(own_path, "wait");
    siginfo_t si = {0};
    assert_int_equal(kill(p.pid, SIGSTOP), 0);
    assert_int_equal(waitid(P_PID, (id_t)p.pid, &si, WSTOPPED | WNOWAIT), 0);
    const double t = clock_now();
    process_stop(&p, 0, NULL, 0);
    assert_true(clock_now() - t < 4);
    assert_int_equal(alive(), 0);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "comet") == 0) comet();
    if (argc > 1 && strcmp(argv[1], "seven") == 0) return 7;
    if (argc > 1 && strcmp(argv[1], "term") == 0) return raise(SIGTERM);
    if (argc > 1 && strcmp(argv[1], "wait") == 0) return (int)sleep(60);
    if (argc > 1 && strcmp(argv[1], "stop") == 0) return raise(SIGSTOP);
    const ssize_t n = readlink("/proc/self/exe", own_path, sizeof own_path - 1);
    own_path[n > 0 ? n : 0] = '\0';
    snprintf(mark, sizeof mark, "mark-%d", (int)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_end_is_told),
        cmocka_unit_test(descendants_end_too),
        cmocka_unit_test(a_program_is_suspended),
        cmocka_unit_test(a_reaper_is_stopped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
