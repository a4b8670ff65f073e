/* process.h - a program run as a child, which ends with everything that descends from it.
 *
 * Between us and the program stands a reaper: this executable again, as a process that does nothing but wait. It is the
 * subreaper of the program (PR_SET_CHILD_SUBREAPER), so that what the program starts stays below it, by whatever forks and
 * setsids.
 * Invariant: when the program has ended, or is stopped, or this process has exited, by SIGKILL too, then all that descends
 * from the program is killed. */
#ifndef VERLC_BASE_PROCESS_H
#define VERLC_BASE_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct process {
    pid_t pid;    /* the reaper's, which ends as the program does; -1: not running */
    int lifeline; /* its end is closed with us; -1: not running */
};
struct process_args {
    const char *const *argv; /* argv[0]: the program's path; ends with NULL */
    char *const *env;        /* ends with NULL */
    const int *fds;          /* of ours, close-on-exec and above 2; they become 0, 1, ... of the program; -1: /dev/null */
    int n_fds;
    int64_t memory_bytes; /* most address space; < 0: no limit */
    bool deaf;            /* it starts with SIGTERM, SIGINT and SIGHUP ignored */
};
/* What a program does first: a closed descriptor of 0 to 2 becomes /dev/null, since the next file would take its number;
 * a closed pipe and a file over its limit are errors of the write (SIGPIPE, SIGXFSZ), and children can be waited for. */
void process_prepare(void);
/* Does not wait for the program: one that cannot be executed says so on its standard error and ends with 127.
 * ERR_HELPER where no process can be made. */
int process_start(struct process *p, const struct process_args *a);
/* It has ended and so has all that descends from it; process_stop is still to be called. */
bool process_exited(const struct process *p);
/* The program does not run, since it was stopped (SIGSTOP, a debugger); false also where /proc does not say. */
bool process_suspended(const struct process *p);
/* From now on it may use so many further seconds of processor time. */
void process_grant_cpu(const struct process *p, int64_t seconds);
/* Waits up to grace_s for it to end by itself, kills it and all below it, reaps it. how (may be NULL) gets "exit code 1",
 * "signal 9 (Killed)". Does nothing where it is not running. */
void process_stop(struct process *p, double grace_s, char *how, size_t n);

#endif
