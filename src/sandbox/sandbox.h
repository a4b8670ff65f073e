/* sandbox.h - runs an untrusted program, and reports what happened.
 *
 * The program runs in namespaces of its own (pid, network, ipc, uts, cgroup, mount, and user where we are not root), made by
 * bubblewrap, as a user who is never root: no network, no /proc, no terminal, no descriptor and no environment of ours, no
 * capability. It sees the system's programs and what it is
 * given, all read-only, and writes to one tmpfs of limited size. A seccomp filter allows the system calls that programs need
 * (seccomp.c). Where the kernel refuses any of it nothing runs. What it does not protect from: a defect of the kernel in a
 * system call that is allowed, and side channels of the hardware (docs/reliability.md).
 *
 * Invariant: when sandbox_run returns, no process, file or mount of the program is left; and it returns within wall_s and the
 * few seconds in which the kernel ends processes. */
#ifndef VERLC_SANDBOX_H
#define VERLC_SANDBOX_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct sandbox_limits {   /* all above 0 */
    double wall_s;        /* seconds from start to end */
    int64_t cpu_s;        /* processor seconds of one process (RLIMIT_CPU) */
    int64_t memory_bytes; /* address space of one process (RLIMIT_AS); and resident memory of all together with the tmpfs */
    int64_t disk_bytes;   /* the tmpfs, and so a file */
    int64_t output_bytes; /* standard output, and again standard error */
    int64_t n_processes;  /* processes and threads */
    int64_t n_files;      /* open files of a process */
};
/* 10 s of wall clock and of processor, 1 GiB, 64 MiB of disk, 4 MiB of output, 64 processes, 64 open files. */
extern const struct sandbox_limits sandbox_default_limits;
enum { SANDBOX_MAX_FILES = 16, SANDBOX_DIR_INODES = 4096 /* files and directories in the tmpfs */ };
#define SANDBOX_DIR "/tmp" /* the tmpfs: working directory, HOME and TMPDIR of the program */

struct sandbox_file {
    const char *name, *data; /* SANDBOX_DIR/name; no '/' in it */
    size_t n;
};
struct sandbox_args {        /* borrowed */
    const char *const *argv; /* a path in the sandbox, or a name in /usr/local/bin, /usr/bin and /bin; ends with NULL */
    const char *stdin_data;  /* NULL: n_stdin is 0 */
    size_t n_stdin;
    const struct sandbox_file *files;
    int n_files;
    const char *const *read_dirs; /* what else it may read, at the same path; ends with NULL; may be NULL */
    const char *const *env;       /* further variables, "NAME=VALUE"; ends with NULL; may be NULL */
    /* Above 0: it has sockets, in a network of its own, which has nothing but loopback; there 127.0.0.1 at this port is
     * sandbox_listener's. 0: no sockets. */
    int64_t port;
    struct sandbox_limits limits;
};
/* Why it ended. Of the limits the one that was found passed first. */
#define SANDBOX_END_MAP(X)                                       \
    X(EXITED, "exited")         /* status is its exit code */    \
    X(SIGNALED, "signaled")     /* status is the signal */       \
    X(WALL_LIMIT, "wall_limit") /* from here on it was killed */ \
    X(CPU_LIMIT, "cpu_limit")                                    \
    X(MEMORY_LIMIT, "memory_limit")                              \
    X(OUTPUT_LIMIT, "output_limit")                              \
    X(PROCESS_LIMIT, "process_limit")                            \
    X(DISK_LIMIT, "disk_limit") /* of files and directories; of bytes the program sees that the disk is full */
enum sandbox_end {
#define X(name, text) SANDBOX_##name,
    SANDBOX_END_MAP(X)
#undef X
};
const char *sandbox_end_name(enum sandbox_end e);

struct sandbox_result {
    enum sandbox_end end;
    int status;          /* of EXITED and SIGNALED; else 0. A shell's convention: an exit code above 128 is a signal */
    struct buf out, err; /* up to output_bytes each */
    double wall_s;
    int64_t peak_bytes; /* the most resident memory that was seen, of all processes and the tmpfs */
};
void sandbox_result_free(struct sandbox_result *r);

/* Whether this machine can run one: makes a sandbox with all its parts around /bin/true. ERR_UNSUPPORTED: why not and what
 * to do. */
int sandbox_check(void);
/* Waits for the end. ERR_UNSUPPORTED as above; ERR_INVAL: limits or arguments; ERR_HELPER: no process can be made. Any thread. */
int sandbox_run(const struct sandbox_args *args, struct sandbox_result *out);

/* The same by parts, for who has other things to do. Start: as sandbox_run; what args point to is not read later. */
struct sandbox;
int sandbox_start(struct sandbox **out, const struct sandbox_args *args);
/* Reads what it has printed, looks at its limits. True: it has ended, or is to be ended. Does not wait. */
bool sandbox_step(struct sandbox *s);
/* With args.port: the socket that listens inside, once; the caller closes it. -1: not yet, or given already. */
int sandbox_listener(struct sandbox *s);
/* Ends it, if it has not ended. As sandbox_run's result and errors; of one that ran still SIGNALED by SIGKILL. Frees s. out may be
 * NULL. */
int sandbox_end(struct sandbox *s, struct sandbox_result *out);

#endif
