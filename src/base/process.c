/* process.c - see process.h: our half, and the reaper's.
 * The reaper is started before main by an environment variable, so that every program that links this has one. It is a
 * process of its own executable, since a fork that stays would hold copies of our memory.
 * Invariant: the reaper's end of the lifeline has one other end, ours; end of file there means that we have exited or want
 * the program to end. */
#include "base/process.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

#define REAPER_ENV "VERLC_REAPER" /* "LIFELINE MEMORY DEAF": its descriptor, the program's limit in bytes, and its signals */
/* Not to be killed by name together with us: it is what cleans up then. */
#define REAPER_NAME "helper-reaper"
enum { OOM_SCORE_MORE = 500 }; /* of 1000: the kernel kills a helper before the run */

/* ---- the program, between fork and exec ---- */

static void limit(int what, int64_t value) {
    struct rlimit r;
    if (getrlimit((__rlimit_resource_t)what, &r) != 0) return;
    if (r.rlim_max == RLIM_INFINITY || r.rlim_max > (rlim_t)value) r.rlim_max = (rlim_t)value;
    r.rlim_cur = r.rlim_max;
    setrlimit((__rlimit_resource_t)what, &r);
}

static void die_first(void) {
    FILE *f = fopen("/proc/self/oom_score_adj", "r+");
    int score;
    if (f && fscanf(f, "%d", &score) == 1) {
        rewind(f);
        fprintf(f, "%d", score + OOM_SCORE_MORE < 1000 ? score + OOM_SCORE_MORE : 1000);
    }
    if (f) fclose(f);
}

/* What the reaper is to run. */
struct task {
    int lifeline, deaf;
    int64_t memory_bytes;
};

static _Noreturn void execute(char **argv, const struct task *t, pid_t reaper) {
    setpgid(0, 0); /* what it sends its own group does not reach the reaper */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != reaper) _exit(126); /* it died before prctl */
    for (int sig = 1; sig < NSIG; sig++) signal(sig, SIG_DFL);
    static const int stops[] = {SIGTERM, SIGINT, SIGHUP};
    for (size_t i = 0; t->deaf && i < sizeof stops / sizeof *stops; i++) signal(stops[i], SIG_IGN);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    die_first();
    limit(RLIMIT_CORE, 0);
    if (t->memory_bytes >= 0) limit(RLIMIT_AS, t->memory_bytes); /* last: this process may be over it, a sanitizer's is */
    execv(argv[0], argv);
    dprintf(2, "%s could not be executed: %s\n", argv[0], strerror(errno));
    _exit(127);
}

/* ---- the reaper ---- */

static void kill_children(void) {
    FILE *f = fopen("/proc/thread-self/children", "r");
    int pid;
    while (f && fscanf(f, "%d", &pid) == 1) kill(pid, SIGKILL);
    if (f) fclose(f);
}

/* Takes the children that have ended; false: there are none left. *status: that of `program`, where it is among them. */
static bool wait_children(pid_t program, int *status) {
    int s;
    pid_t pid;
    while ((pid = waitpid(-1, &s, WNOHANG)) > 0)
        if (pid == program) *status = s;
    return pid == 0;
}

/* Those of a killed process become ours: round by round until there are none. */
static void kill_tree(pid_t program, int *status, int child_ended) {
    for (int ms = 1; wait_children(program, status); ms = ms < 100 ? 2 * ms : ms) {
        struct signalfd_siginfo info;
        kill_children();
        poll(&(struct pollfd){child_ended, POLLIN, 0}, 1, ms);
        (void)!read(child_ended, &info, sizeof info);
    }
}

static void grant_cpu(pid_t program, int64_t seconds) {
    clockid_t clock;
    struct timespec used;
    struct rlimit r;
    if (clock_getcpuclockid(program, &clock) != 0 || clock_gettime(clock, &used) != 0) return;
    if (prlimit(program, RLIMIT_CPU, NULL, &r) != 0) return;
    r.rlim_cur = (rlim_t)(used.tv_sec + seconds + 1);
    if (r.rlim_cur > r.rlim_max) r.rlim_cur = r.rlim_max;
    prlimit(program, RLIMIT_CPU, &r, NULL);
}

/* Ends as a process with this wait status has ended. */
static _Noreturn void end_as(int status) {
    if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, WTERMSIG(status));
    limit(RLIMIT_CORE, 0);
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
    sigprocmask(SIG_UNBLOCK, &one, NULL);
    _exit(128 + WTERMSIG(status));
}

static _Noreturn void reap(char **argv, const struct task *t) {
    enum { RUNNING = -1 };
    const int lifeline = t->lifeline;
    struct signalfd_siginfo info;
    sigset_t all, ended;
    int status = RUNNING;
    int64_t cpu_s;
    signal(SIGCHLD, SIG_DFL);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL); /* whoever sends signals means the program, or us */
    sigemptyset(&ended);
    sigaddset(&ended, SIGCHLD);
    prctl(PR_SET_NAME, REAPER_NAME);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    fcntl(lifeline, F_SETFD, FD_CLOEXEC);
    const pid_t reaper = getpid(), program = fork();
    if (program == 0) execute(argv, t, reaper);
    if (program < 0) _exit(126);
    for (int fd = 0; fd < lifeline; fd++) close(fd); /* the program's alone: whoever reads there sees its end */
    const int child_ended = signalfd(-1, &ended, SFD_CLOEXEC | SFD_NONBLOCK);
    while (wait_children(program, &status) && status == RUNNING) {
        struct pollfd fds[] = {{lifeline, POLLIN, 0}, {child_ended, POLLIN, 0}};
        if (poll(fds, 2, -1) < 0) break;
        if (fds[1].revents) (void)!read(child_ended, &info, sizeof info);
        if (!fds[0].revents) continue;
        if (recv(lifeline, &cpu_s, sizeof cpu_s, 0) != sizeof cpu_s) break;
        grant_cpu(program, cpu_s);
    }
    kill_tree(program, &status, child_ended);
    end_as(status);
}

/* Before main. Its command line is taken off the process, where `pkill -f` would find it. */
__attribute__((constructor)) static void become_reaper(int argc, char **argv) {
    const char *const task = getenv(REAPER_ENV);
    struct task t;
    long long memory_bytes;
    if (!task || sscanf(task, "%d %lld %d", &t.lifeline, &memory_bytes, &t.deaf) != 3 || argc < 2) return;
    t.memory_bytes = memory_bytes;
    unsetenv(REAPER_ENV);
    char **copy = xcalloc((size_t)argc, sizeof *copy);
    for (int i = 1; i < argc; i++) {
        copy[i - 1] = xstrdup(argv[i]);
        memset(argv[i], 0, strlen(argv[i]));
    }
    reap(copy, &t);
}

/* ---- our half ---- */

void process_prepare(void) {
    struct sigaction child;
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO;
         fd++) /* the lowest free number is fd; what goes to a closed output is an error */
        if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", fd == STDOUT_FILENO ? O_RDONLY : O_RDWR);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    if (sigaction(SIGCHLD, NULL, &child) == 0 && child.sa_handler == SIG_IGN) signal(SIGCHLD, SIG_DFL);
}

static int above(int fd, int least) { return fcntl(fd, F_DUPFD_CLOEXEC, least); }

/* The reaper's descriptors: the program's from 0 on, then the lifeline. `at` gets copies that no dup2 overwrites. */
static int lay_out(posix_spawn_file_actions_t *fa, const struct process_args *a, int lifeline, int *at) {
    for (int i = 0; i <= a->n_fds; i++) {
        const int fd = i == a->n_fds ? lifeline : a->fds[i];
        if (fd < 0) {
            posix_spawn_file_actions_addopen(fa, i, "/dev/null", O_RDWR, 0);
            continue;
        }
        at[i] = above(fd, a->n_fds + 1);
        if (at[i] < 0) FAIL(ERR_HELPER, "%s: cannot copy a descriptor: %s", a->argv[0], strerror(errno));
        posix_spawn_file_actions_adddup2(fa, at[i], i);
    }
    posix_spawn_file_actions_addclosefrom_np(fa, a->n_fds + 1);
    return 0;
}

int process_start(struct process *p, const struct process_args *a) {
    int ends[2] = {-1, -1}, *at = xmalloc((size_t)(a->n_fds + 1) * sizeof *at), rc = 0;
    int64_t n_argv = 0, n_env = 0;
    while (a->argv[n_argv]) n_argv++;
    while (a->env[n_env]) n_env++;
    const char **const argv = xcalloc((size_t)n_argv + 2, sizeof *argv);
    char **const env = xcalloc((size_t)n_env + 2, sizeof *env);
    argv[0] = REAPER_NAME;
    memcpy(argv + 1, a->argv, (size_t)n_argv * sizeof *argv);
    memcpy(env + 1, a->env, (size_t)n_env * sizeof *env);
    env[0] = xasprintf(REAPER_ENV "=%d %lld %d", a->n_fds, (long long)a->memory_bytes, (int)a->deaf);
    for (int i = 0; i <= a->n_fds; i++) at[i] = -1;
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t attr;
    posix_spawn_file_actions_init(&fa);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP); /* a Ctrl-C at the terminal is for us */
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
        FAILG(out, ERR_HELPER, "%s: cannot make a socket: %s", a->argv[0], strerror(errno));
    TRYG(lay_out(&fa, a, ends[1], at), out);
    pid_t pid;
    const int e = posix_spawn(&pid, "/proc/self/exe", &fa, &attr, (char *const *)(uintptr_t)argv, env);
    if (e != 0) FAILG(out, ERR_HELPER, "%s: cannot start a process: %s", a->argv[0], strerror(e));
    *p = (struct process){pid, ends[0]};
    ends[0] = -1;
out:
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0) close(ends[i]);
    for (int i = 0; i <= a->n_fds; i++)
        if (at[i] >= 0) close(at[i]);
    posix_spawn_file_actions_destroy(&fa);
    posix_spawnattr_destroy(&attr);
    free(env[0]);
    free(env);
    free(argv);
    free(at);
    return rc;
}

bool process_exited(const struct process *p) {
    siginfo_t si = {0};
    return waitid(P_PID, (id_t)p->pid, &si, WEXITED | WNOHANG | WNOWAIT) < 0 || si.si_pid == p->pid;
}

bool process_suspended(const struct process *p) {
    char path[64], state = 0;
    int program = 0;
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)p->pid, (int)p->pid);
    FILE *f = p->pid > 0 ? fopen(path, "r") : NULL;
    if (f) {
        if (fscanf(f, "%d", &program) != 1) program = 0; /* the first is the program; others descend from it */
        fclose(f);
    }
    snprintf(path, sizeof path, "/proc/%d/stat", program);
    f = program > 0 ? fopen(path, "r") : NULL;
    if (f) {
        if (fscanf(f, "%*d (%*[^)]) %c", &state) != 1) state = 0;
        fclose(f);
    }
    return state == 'T' || state == 't';
}

void process_grant_cpu(const struct process *p, int64_t seconds) {
    (void)!send(p->lifeline, &seconds, sizeof seconds, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static bool wait_exit(const struct process *p, double seconds) {
    const double deadline = clock_awake() + seconds;
    for (long ns = 200000; !process_exited(p); ns = ns < 10000000 ? 2 * ns : ns) {
        if (clock_awake() >= deadline) return false;
        nanosleep(&(struct timespec){0, ns}, NULL);
    }
    return true;
}

void process_stop(struct process *p, double grace_s, char *how, size_t n) {
    int status = 0;
    if (how) snprintf(how, n, "not running");
    if (p->pid <= 0) return;
    const bool by_itself = wait_exit(p, grace_s);
    close(p->lifeline);
    kill(p->pid, SIGCONT); /* a reaper that is stopped would leave all there for ever */
    /* SIGKILL cannot be refused; only a process stuck in the kernel outlasts 5 s, and the reaper then waits alone */
    const bool exited = by_itself || wait_exit(p, 5);
    if (exited && waitpid(p->pid, &status, WNOHANG) == p->pid && how) {
        if (WIFEXITED(status)) snprintf(how, n, "exit code %d", WEXITSTATUS(status));
        else snprintf(how, n, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    }
    *p = (struct process){-1, -1};
}
