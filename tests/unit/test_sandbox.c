/* test_sandbox.c - sandbox_run from C: what comes back, several at once, what is refused. Attacks: tests/fault/sandbox_test.py. */
#include "sandbox/sandbox.h"

#include "base/err.h"
#include "base/process.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

/* What a machine under load, or a sanitizer, may take for twelve starts at once; none comes near it. */
enum { LONG_S = 600 };

static struct sandbox_args sh(const char *const *argv) {
    struct sandbox_args a = {.argv = argv, .limits = sandbox_default_limits};
    a.limits.wall_s = LONG_S;
    a.limits.cpu_s = LONG_S;
    return a;
}

static void what_comes_back(void **state) {
    const char *const argv[] = {"sh", "-c", "cat - data; echo no >&2; exit 7", NULL};
    const struct sandbox_file file = {"data", "b\0c", 3};
    struct sandbox_args a = sh(argv);
    struct sandbox_result r;
    (void)state;
    a.stdin_data = "a\n";
    a.n_stdin = 2;
    a.files = &file;
    a.n_files = 1;
    assert_int_equal(sandbox_run(&a, &r), 0);
    assert_int_equal(r.end, SANDBOX_EXITED);
    assert_int_equal(r.status, 7);
    assert_int_equal(r.out.n, 5);
    assert_memory_equal(r.out.p, "a\nb\0c", 5);
    assert_string_equal(r.err.p, "no\n");
    sandbox_result_free(&r);
    a.argv = (const char *const[]){"sh", "-c", "kill -11 $$", NULL};
    assert_int_equal(sandbox_run(&a, &r), 0);
    assert_int_equal(r.end, SANDBOX_SIGNALED);
    assert_int_equal(r.status, 11);
    sandbox_result_free(&r);
}

struct one {
    int id;
    char said[256];
};

static void *run_one(void *arg) {
    struct one *o = arg;
    char script[64];
    struct sandbox_result r;
    snprintf(script, sizeof script, "echo %d", o->id);
    const struct sandbox_args a = sh((const char *const[]){"sh", "-c", script, NULL});
    if (sandbox_run(&a, &r) < 0) {
        snprintf(o->said, sizeof o->said, "%.200s", err_msg());
        return NULL;
    }
    snprintf(o->said, sizeof o->said, "%s %d: %.*s", sandbox_end_name(r.end), r.status, (int)(r.out.n < 100 ? r.out.n : 100),
             r.out.p ? r.out.p : "");
    sandbox_result_free(&r);
    return NULL;
}

/* Each has its own output, however long the others take. */
static void several_at_once(void **state) {
    enum { N = 12 };
    pthread_t thread[N];
    struct one ones[N];
    (void)state;
    for (int i = 0; i < N; i++) {
        ones[i] = (struct one){.id = 100 + i};
        assert_int_equal(pthread_create(&thread[i], NULL, run_one, &ones[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        char wanted[64];
        pthread_join(thread[i], NULL);
        snprintf(wanted, sizeof wanted, "exited 0: %d\n", ones[i].id);
        assert_string_equal(ones[i].said, wanted);
    }
}

static void limits_are_required(void **state) {
    struct sandbox_result r;
    struct sandbox_args a = sh((const char *const[]){"true", NULL});
    (void)state;
    a.limits.wall_s = 0;
    assert_int_equal(sandbox_run(&a, &r), ERR_INVAL);
    a.limits = (struct sandbox_limits){0};
    assert_int_equal(sandbox_run(&a, &r), ERR_INVAL);
    a = sh((const char *const[]){NULL});
    assert_int_equal(sandbox_run(&a, &r), ERR_INVAL);
    a = sh((const char *const[]){"true", NULL});
    a.read_dirs = (const char *const[]){"/no/such/directory", NULL};
    assert_int_equal(sandbox_run(&a, &r), ERR_UNSUPPORTED); /* bwrap says which */
    assert_non_null(strstr(err_msg(), "/no/such/directory"));
}

/* A program with a port reaches us there, and nothing else. */
static void a_port_is_ours(void **state) {
    (void)state;
    struct sandbox *s;
    struct sandbox_result r;
    const char *const script = "exec 3<>/dev/tcp/127.0.0.1/4321; read x <&3; echo got $x; exec 3<&-; "
                               "for p in 4322 22; do (: <>/dev/tcp/127.0.0.1/$p) 2>/dev/null && echo open; done; "
                               "(: <>/dev/tcp/10.0.0.1/80) 2>/dev/null && echo out; ls /proc/self/fd 2>/dev/null; echo $EXTRA";
    const struct sandbox_args a = {.argv = (const char *const[]){"/bin/bash", "-c", script, NULL},
                                   .env = (const char *const[]){"EXTRA=more", NULL},
                                   .port = 4321,
                                   .limits = sandbox_default_limits};
    int fd = -1, taken = -1;
    assert_int_equal(sandbox_start(&s, &a), 0);
    while (!sandbox_step(s)) {
        if (fd < 0) fd = sandbox_listener(s);
        if (fd >= 0 && taken < 0 && (taken = accept4(fd, NULL, NULL, SOCK_CLOEXEC)) >= 0)
            assert_int_equal(send(taken, "hello\n", 6, 0), 6);
        usleep(1000);
    }
    assert_true(fd >= 0 && taken >= 0);
    assert_int_equal(sandbox_listener(s), -1);
    assert_int_equal(sandbox_end(s, &r), 0);
    assert_int_equal(r.end, SANDBOX_EXITED);
    assert_string_equal(r.out.p, "got hello\nmore\n");
    sandbox_result_free(&r);
    close(taken);
    close(fd);
}

static void one_that_runs_is_ended(void **state) {
    (void)state;
    struct sandbox *s;
    struct sandbox_result r;
    const struct sandbox_args a = {.argv = (const char *const[]){"/bin/sleep", "100", NULL}, .limits = sandbox_default_limits};
    assert_int_equal(sandbox_start(&s, &a), 0);
    for (int i = 0; i < 20; i++) assert_false(sandbox_step(s)), usleep(1000);
    assert_int_equal(sandbox_end(s, &r), 0);
    assert_true(r.end == SANDBOX_SIGNALED && r.status == SIGKILL && r.wall_s < 5);
    sandbox_result_free(&r);
}

int main(void) {
    process_prepare();
    if (sandbox_check() < 0) {
        printf("skipped: %s\n", err_msg());
        return 0;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_comes_back), cmocka_unit_test(several_at_once),
                                       cmocka_unit_test(limits_are_required), cmocka_unit_test(a_port_is_ours),
                                       cmocka_unit_test(one_that_runs_is_ended)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
