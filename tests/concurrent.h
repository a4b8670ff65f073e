/* concurrent.h - cmocka tests that mostly wait, at once: each in a process of its own, which prints when it has ended.
 * For tests that share nothing but what the group's setup makes, which each makes for itself. */
#ifndef VERLC_TESTS_CONCURRENT_H
#define VERLC_TESTS_CONCURRENT_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CONCURRENT_MOST = 4 };

static inline pid_t concurrent__start(const struct CMUnitTest *test, CMFixtureFunction setup, CMFixtureFunction teardown,
                                      FILE *out) {
    const struct CMUnitTest tests[] = {*test};
    fflush(NULL);
    const pid_t pid = fork();
    if (pid != 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(fileno(out), STDOUT_FILENO);
    dup2(fileno(out), STDERR_FILENO);
    const int failed = cmocka_run_group_tests_name(test->name, tests, setup, teardown);
    fflush(NULL);
    _exit(failed != 0);
}

/* How many failed. */
static inline int concurrent_tests(const struct CMUnitTest *tests, int n, CMFixtureFunction setup, CMFixtureFunction teardown) {
    pid_t *pids = calloc((size_t)n, sizeof *pids);
    FILE **outs = calloc((size_t)n, sizeof(FILE *));
    int failed = 0, begun = 0, running = 0;
    if (!pids || !outs) return n;
    while (begun < n || running > 0) {
        int status, i = 0;
        char line[4096];
        while (begun < n && running < CONCURRENT_MOST) {
            outs[begun] = tmpfile();
            pids[begun] = outs[begun] ? concurrent__start(&tests[begun], setup, teardown, outs[begun]) : -1;
            if (pids[begun++] < 0) return n;
            running++;
        }
        const pid_t ended = wait(&status);
        if (ended < 0) return n;
        while (i < begun && pids[i] != ended) i++;
        if (i == begun) continue; /* a process that one of them has left behind */
        running--;
        failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
        rewind(outs[i]);
        while (fgets(line, sizeof line, outs[i])) fputs(line, stdout);
        fclose(outs[i]);
    }
    free(pids);
    free(outs);
    printf("%d of %d failed\n", failed, n);
    return failed;
}

#endif
