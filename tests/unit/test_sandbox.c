/* test_sandbox.c - sandbox_run from C: what comes back, several at once, what is refused. Attacks: tests/fault/sandbox_test.py. */
#include "sandbox/sandbox.h"

#include "base/err.h"
#include "base/process.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct sandbox_args sh(const char *const *argv) {
    return (struct sandbox_args){.argv = argv, .limits = sandbox_default_limits};
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

static void *one(void *arg) {
    char script[64];
    struct sandbox_result r;
    snprintf(script, sizeof script, "echo %d; sleep 0.1", *(int *)arg);
    const struct sandbox_args a = sh((const char *const[]){"sh", "-c", script, NULL});
    const bool good = sandbox_run(&a, &r) == 0 && r.out.p && atoi(r.out.p) == *(int *)arg;
    sandbox_result_free(&r);
    return good ? arg : NULL;
}

static void several_at_once(void **state) {
    enum { N = 12 };
    pthread_t thread[N];
    int id[N];
    void *good;
    (void)state;
    for (int i = 0; i < N; i++) {
        id[i] = 100 + i;
        assert_int_equal(pthread_create(&thread[i], NULL, one, &id[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(thread[i], &good);
        assert_ptr_equal(good, &id[i]);
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

int main(void) {
    process_prepare();
    if (sandbox_check() < 0) {
        printf("skipped: %s\n", err_msg());
        return 0;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_comes_back), cmocka_unit_test(several_at_once),
                                       cmocka_unit_test(limits_are_required)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
