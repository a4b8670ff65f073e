/* seccomp.c - the system calls of a sandboxed program: an allow-list, which refuses what a new kernel adds.
 *
 * What is missing on purpose: namespaces and mounts, ptrace and other processes' memory, sockets but a pair (but for a program
 * with a network of its own: those of TCP and UDP), keys, BPF,
 * perf, userfaultfd, io_uring, modules, kexec, file handles, memory that no limit counts (memfd, System V, message queues,
 * locked pages), priorities and affinity, splice. All of them say ENOSYS, as a kernel without them does.
 * Invariant: a call that takes flags or a request is allowed with those alone that the table below says. */
#include "sandbox/sandbox_int.h"

#include "base/err.h"

#include <errno.h>
#include <sched.h>
#include <seccomp.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

static const char *const allowed[] = {
    /* files */
    "access", "chdir", "chmod", "close", "close_range", "copy_file_range", "creat", "dup", "dup2", "dup3", "faccessat",
    "faccessat2", "fadvise64", "fallocate", "fchdir", "fchmod", "fchmodat", "fcntl", "fdatasync", "flock", "fstat", "fstatfs",
    "fsync", "ftruncate", "futimesat", "getcwd", "getdents", "getdents64", "getxattr", "lgetxattr", "link", "linkat", "listxattr",
    "llistxattr", "lseek", "lstat", "mkdir", "mkdirat", "newfstatat", "open", "openat", "pipe", "pipe2", "pread64", "preadv",
    "pwrite64", "pwritev", "read", "readlink", "readlinkat", "readv", "rename", "renameat", "renameat2", "rmdir", "sendfile",
    "stat", "statfs", "statx", "symlink", "symlinkat", "truncate", "umask", "unlink", "unlinkat", "utime", "utimensat", "utimes",
    "write", "writev",
    /* waiting */
    "epoll_create", "epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_wait", "eventfd", "eventfd2", "poll", "ppoll", "pselect6",
    "select",
    /* memory */
    "brk", "madvise", "mincore", "mmap", "mprotect", "mremap", "msync", "munmap",
    /* time */
    "alarm", "clock_getres", "clock_gettime", "clock_nanosleep", "getitimer", "gettimeofday", "nanosleep", "setitimer", "time",
    "timer_create", "timer_delete", "timer_getoverrun", "timer_gettime", "timer_settime", "times",
    /* signals */
    "kill", "pause", "restart_syscall", "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigreturn", "rt_sigsuspend",
    "rt_sigtimedwait", "sigaltstack", "tgkill", "tkill",
    /* processes and threads */
    "arch_prctl", "execve", "exit", "exit_group", "fork", "futex", "get_robust_list", "getcpu", "getegid", "geteuid", "getgid",
    "getgroups", "getpgid", "getpgrp", "getpid", "getppid", "getpriority", "getresgid", "getresuid", "getrlimit", "getrusage",
    "getsid", "gettid", "getuid", "membarrier", "prlimit64", "rseq", "sched_get_priority_max", "sched_get_priority_min",
    "sched_getaffinity", "sched_getparam", "sched_getscheduler", "sched_yield", "set_robust_list", "set_tid_address", "setpgid",
    "setrlimit", "setsid", "vfork", "wait4", "waitid",
    /* setpriv gives up what it has; without capabilities they change nothing */
    "capget", "capset", "setgid", "setgroups", "setregid", "setresgid", "setresuid", "setreuid", "setuid",
    /* the machine */
    "getrandom", "sysinfo", "uname",
    /* a pair of sockets that talk to each other */
    "getpeername", "getsockname", "getsockopt", "recvfrom", "sendto", "shutdown"};

/* With a network of its own, which has loopback alone. */
static const char *const of_network[] = {"accept",  "accept4",  "bind",     "connect", "listen",
                                         "recvmsg", "recvmmsg", "sendmmsg", "sendmsg", "setsockopt"};

#define NEW_NAMESPACES (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)
#define LOW_32 UINT64_C(0xffffffff) /* what the kernel reads of an int */
/* Allowed where an argument, masked, is the value. */
static const struct {
    const char *name;
    unsigned arg;
    uint64_t mask, value;
} with_argument[] = {
    {"clone", 0, NEW_NAMESPACES, 0},       {"socketpair", 0, LOW_32, AF_UNIX},
    {"ioctl", 1, LOW_32, TCGETS}, /* isatty */
    {"ioctl", 1, LOW_32, TIOCGWINSZ},      {"ioctl", 1, LOW_32, FIONREAD},
    {"ioctl", 1, LOW_32, FIONBIO},         {"ioctl", 1, LOW_32, FIOCLEX},
    {"ioctl", 1, LOW_32, FIONCLEX},        {"prctl", 0, LOW_32, PR_SET_NAME},
    {"prctl", 0, LOW_32, PR_GET_NAME},     {"prctl", 0, LOW_32, PR_SET_PDEATHSIG},
    {"prctl", 0, LOW_32, PR_CAPBSET_READ}, /* setpriv's, as are those below */
    {"prctl", 0, LOW_32, PR_CAPBSET_DROP}, {"prctl", 0, LOW_32, PR_CAP_AMBIENT},
    {"prctl", 0, LOW_32, PR_SET_KEEPCAPS}, {"prctl", 0, LOW_32, PR_GET_SECUREBITS},
};

static int fill_network(scmp_filter_ctx filter) {
    static const uint64_t families[] = {AF_INET, AF_INET6};
    int e = 0;
    for (size_t i = 0; e == 0 && i < sizeof of_network / sizeof *of_network; i++) {
        const int nr = seccomp_syscall_resolve_name(of_network[i]);
        if (nr >= 0) e = seccomp_rule_add(filter, SCMP_ACT_ALLOW, nr, 0);
    }
    for (size_t i = 0; e == 0 && i < sizeof families / sizeof *families; i++) {
        const struct scmp_arg_cmp is = SCMP_CMP(0, SCMP_CMP_MASKED_EQ, LOW_32, families[i]);
        e = seccomp_rule_add_array(filter, SCMP_ACT_ALLOW, seccomp_syscall_resolve_name("socket"), 1, &is);
    }
    return e;
}

static int fill(scmp_filter_ctx filter) {
    int e = seccomp_attr_set(filter, SCMP_FLTATR_CTL_OPTIMIZE, 2); /* a binary tree; by default a list of 200 comparisons */
    for (size_t i = 0; e == 0 && i < sizeof allowed / sizeof *allowed; i++) {
        const int nr = seccomp_syscall_resolve_name(allowed[i]);
        if (nr >= 0) e = seccomp_rule_add(filter, SCMP_ACT_ALLOW, nr, 0); /* negative: another architecture's */
    }
    for (size_t i = 0; e == 0 && i < sizeof with_argument / sizeof *with_argument; i++) {
        const struct scmp_arg_cmp is =
            SCMP_CMP(with_argument[i].arg, SCMP_CMP_MASKED_EQ, with_argument[i].mask, with_argument[i].value);
        e = seccomp_rule_add_array(filter, SCMP_ACT_ALLOW, seccomp_syscall_resolve_name(with_argument[i].name), 1, &is);
    }
    return e;
}

int sandbox__seccomp(bool network, int *fd) {
    scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ERRNO(ENOSYS)); /* a call of another architecture kills */
    int e = filter ? fill(filter) : -ENOMEM;
    if (e == 0 && network) e = fill_network(filter);
    const int to = memfd_create("seccomp", MFD_CLOEXEC);
    if (e == 0) e = to < 0 ? -errno : seccomp_export_bpf(filter, to);
    seccomp_release(filter);
    if (e == 0 && lseek(to, 0, SEEK_SET) == 0) {
        *fd = to;
        return 0;
    }
    if (to >= 0) close(to);
    FAIL(ERR_INTERNAL, "the sandbox's seccomp filter cannot be made: %s", strerror(-e));
}
