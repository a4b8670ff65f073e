/* exec.c - `verlc exec COMMAND...`: a launcher of verl as it stands, with a stand-in `verl` package first on PYTHONPATH.
 * Sets the environment of that one command, waits for it and ends as it does, signals included. What the stand-in does is
 * python/verlc_standin's; here is whether anything reached it, which is reported over a datagram socket (VERLC_EXEC_SOCKET).
 * Invariant: nothing outside the command's own environment is changed, and a command that passed the stand-in by is an error. */
#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "cmd/cmd.h"
#include "helper/helper.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define SOCKET "VERLC_EXEC_SOCKET"
static const double LEFT_S = 10; /* for what a command leaves running in the background */

static void print_help(void) {
    puts("usage: verlc exec [--plan [--gpu NAME|SIZE]] [--set KEY=VALUE]... COMMAND...\n\n"
         "Runs a launcher written for verl as it stands: bash run.sh, python3 -m verl.trainer.main_ppo, torchrun, uv run,\n"
         "ray job submit. Where it starts one of verl's programs, verlc runs. A verl that is installed is not touched.\n\n"
         "options:\n"
         "  --plan            print the command line of each program of verl and its memory plan; nothing trains\n"
         "  --gpu NAME|SIZE   with --plan: for such a GPU, as in verlc plan: H100, A100-40GB, 4090, 24 (GB), 141GB\n"
         "  --set KEY=VALUE   an override put behind those of every program of verl; may be given several times\n"
         "  --allow-nothing   a command that starts nothing of verl is no error\n\n"
         "A command that ends well and has started nothing of verl in this way is an error. The stand-in is found by PATH and\n"
         "PYTHONPATH. A script that overwrites PYTHONPATH and activates an environment, or uses python -I, -E or -S, env -i or an\n"
         "interpreter by its path, passes it by, and a verl that is installed runs. Call python3 by its name, and put behind what\n"
         "sets the two:\n"
         "  export PATH=\"$VERLC_EXEC_DIR/bin:$PATH\" PYTHONPATH=\"$VERLC_EXEC_DIR:$PYTHONPATH\"");
}

/* ---- whether the stand-in was reached ---- */

/* An abstract address: no file of it is left by whatever ends this process. */
static socklen_t address(struct sockaddr_un *a, const char *name) {
    const size_t n = strnlen(name, sizeof a->sun_path - 1);
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    memcpy(a->sun_path + 1, name, n);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

/* Binds a socket and puts its name into the environment. */
static int open_socket(int *fd) {
    struct sockaddr_un a;
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != sizeof random) FAIL(ERR_IO, "verlc exec: no random bytes: %s", strerror(errno));
    char *name = xasprintf("verlc-exec-%016llx%016llx", (unsigned long long)random[0], (unsigned long long)random[1]);
    const socklen_t n = address(&a, name);
    *fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const int bad = *fd < 0 || bind(*fd, (const struct sockaddr *)&a, n) < 0, e = errno;
    if (!bad) setenv(SOCKET, name, 1);
    free(name);
    if (bad) FAIL(ERR_IO, "verlc exec: a local socket: %s", strerror(e));
    return 0;
}

enum reached { NOTHING, TOUCHED, PROGRAM }; /* TOUCHED: by data preparation, or Python that imports verl */

/* The most that has been reported so far. */
static enum reached reached(int fd, enum reached so_far) {
    char text[16];
    ssize_t n;
    while ((n = recv(fd, text, sizeof text, 0)) >= 0)
        if (so_far < PROGRAM) so_far = n == 5 && memcmp(text, "touch", 5) == 0 ? TOUCHED : PROGRAM;
    return so_far;
}

static void report(const char *name, enum reached what) {
    struct sockaddr_un a;
    const socklen_t n = address(&a, name);
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return;
    const char *text = what == TOUCHED ? "touch" : "program";
    (void)!sendto(fd, text, strlen(text), 0, (const struct sockaddr *)&a, n);
    close(fd);
}

void cmd_exec_tell(void) {
    const char *name = getenv(SOCKET);
    if (name && *name) report(name, PROGRAM);
}

/* ---- the command ---- */

/* dir in front of the value that the variable has. */
static void extend(const char *name, const char *dir, const char *unset) {
    const char *old = getenv(name);
    if (!old) old = unset;
    char *v = xasprintf("%s%s%s", dir, old && *old ? ":" : "", old ? old : "");
    setenv(name, v, 1);
    free(v);
}

/* What the entry points of the stand-in read (python/verlc_standin/verlc_entry.py, and bin there). */
static int set_environment(bool plan, const char *gpu, const json_t *overrides) {
    char *found = NULL, path[256] = "/usr/bin:/bin";
    TRY(helper_find_dir("verlc_standin.sitecustomize", &found));
    char *exe = realpath("/proc/self/exe", NULL), *dir = realpath(found, NULL);
    char *standin = file_join(dir ? dir : found, "verlc_standin"), *bin = file_join(standin, "bin");
    char *sets = json_dumps(overrides, JSON_COMPACT);
    int rc = 0;
    if (!exe || !dir) FAILG(out, ERR_IO, "%s: %s", exe ? found : "/proc/self/exe", strerror(errno));
    if (strchr(standin, ':')) FAILG(out, ERR_INVAL, "verlc exec: %s: PATH cannot have a directory with ':' in its name", standin);
    (void)!confstr(_CS_PATH, path, sizeof path); /* where exec looks without a PATH */
    setenv("VERLC", exe, 1);
    setenv("VERLC_EXEC_DIR", standin, 1);
    setenv("VERLC_EXEC_SET", sets, 1);
    unsetenv("VERLC_EXEC_SHIM");
    if (plan) setenv("VERLC_EXEC_PLAN", "1", 1);
    else unsetenv("VERLC_EXEC_PLAN");
    if (gpu) setenv("VERLC_EXEC_GPU", gpu, 1);
    else unsetenv("VERLC_EXEC_GPU");
    extend("PYTHONPATH", standin, NULL);
    extend("PATH", bin, path);
out:
    free(exe);
    free(sets);
    free(bin);
    free(standin);
    free(dir);
    free(found);
    return rc;
}

static const int forwarded[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
enum { N_FORWARDED = sizeof forwarded / sizeof *forwarded };
static volatile pid_t command;            /* 0: not started, or ended */
static volatile sig_atomic_t interrupted; /* a signal that came after its end */

/* A signal of the terminal goes to the whole process group, and so to the command too. */
static void forward(int sig, siginfo_t *info, void *context) {
    (void)context;
    if (command == 0) interrupted = sig;
    else if (info->si_code <= 0) kill(command, sig);
}

/* In the child, whose signals are blocked. reason_fd: where errno goes when the command cannot be executed. */
static void become(char **argv, const sigset_t *mask, pid_t parent, int reason_fd) {
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* as when this process was the command */
    if (getppid() != parent) raise(SIGKILL);
    signal(SIGPIPE, SIG_DFL); /* main ignores them, and an ignored signal stays ignored */
    signal(SIGXFSZ, SIG_DFL);
    sigprocmask(SIG_SETMASK, mask, NULL);
    execvp(argv[0], argv);
    const int e = errno;
    (void)!write(reason_fd, &e, sizeof e);
    _exit(127);
}

/* Starts the command; what it leaves behind when it ends becomes a child of this process. */
static int start(char **argv) {
    sigset_t ours, old;
    int reason[2], e = 0;
    if (pipe2(reason, O_CLOEXEC) < 0) FAIL(ERR_IO, "verlc exec: a pipe: %s", strerror(errno));
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    sigemptyset(&ours);
    for (int i = 0; i < N_FORWARDED; i++) sigaddset(&ours, forwarded[i]);
    sigprocmask(SIG_BLOCK, &ours, &old);
    fflush(NULL);
    const pid_t parent = getpid(), pid = fork();
    if (pid == 0) become(argv, &old, parent, reason[1]);
    const int failed = pid < 0 ? errno : 0;
    close(reason[1]);
    command = pid;
    struct sigaction sa = {.sa_sigaction = forward, .sa_flags = SA_SIGINFO | SA_RESTART}, was;
    for (int i = 0; i < N_FORWARDED && pid > 0; i++)
        if (sigaction(forwarded[i], NULL, &was) == 0 && was.sa_handler != SIG_IGN) sigaction(forwarded[i], &sa, NULL);
    sigprocmask(SIG_SETMASK, &old, NULL);
    if (pid > 0 && read(reason[0], &e, sizeof e) != sizeof e) e = 0;
    close(reason[0]);
    if (failed) FAIL(ERR_NOMEM, "verlc exec: fork: %s", strerror(failed));
    if (!e) return 0;
    waitpid(pid, NULL, 0);
    if (file_exists(argv[0]) && !strchr(argv[0], '/'))
        FAIL(ERR_INVAL, "verlc exec: %s is a file, not a program: write verlc exec bash %s", argv[0], argv[0]);
    FAIL(ERR_INVAL, "verlc exec: %s: %s", argv[0], strerror(e));
}

/* Its status; what it has left and what ends meanwhile is reaped. */
static int wait_for(pid_t pid) {
    int status = 0;
    for (;;) {
        siginfo_t ended = {0};
        if (waitid(P_ALL, 0, &ended, WEXITED | WNOWAIT) < 0 && errno == EINTR) continue;
        if (ended.si_pid == pid) command = 0; /* before its number is free */
        while (waitpid(ended.si_pid, &status, 0) < 0 && errno == EINTR) continue;
        if (ended.si_pid == pid) return status;
    }
}

/* What reached the stand-in, for which a command in the background has a few seconds. *left: some still run. */
static enum reached settle(int fd, bool *left) {
    const double deadline = clock_now() + LEFT_S;
    enum reached so_far = NOTHING;
    for (;;) {
        int pid;
        while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) continue;
        *left = pid == 0;
        so_far = reached(fd, so_far);
        if (so_far == PROGRAM || !*left || interrupted || clock_now() > deadline) return so_far;
        poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 100);
    }
}

/* Ends as the command did, by its signal too, which a waiting shell distinguishes. */
static int end_by(int status) {
    if (!WIFSIGNALED(status)) return WEXITSTATUS(status);
    const int sig = WTERMSIG(status);
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0}); /* the command has left one, if any */
    signal(sig, SIG_DFL);
    raise(sig);
    return 128 + sig;
}

/* Whether a command that ended so may have passed the stand-in by. */
static int judge(const char *name, enum reached what, bool well, bool left) {
    static const char how[] = "`verlc exec --help` says how a script can pass its stand-in by";
    if (what == PROGRAM) return 0;
    if (what == NOTHING && well)
        FAIL(ERR_INVAL,
             "nothing of verl was started through `verlc exec`, whatever ran: %s ended well%s; %s, and what to put into it "
             "(--allow-nothing: it is meant so)",
             name, left ? ", and what it left running has started nothing for 10 s" : "", how);
    if (what == NOTHING) log_note("nothing of verl was started through `verlc exec`; %s", how);
    else
        log_note("no program of verl was started through `verlc exec`, only data preparation or Python that imports verl; %s", how);
    return 0;
}

static int run(char **argv, bool allow_nothing) {
    char *outer = getenv(SOCKET) ? xstrdup(getenv(SOCKET)) : NULL; /* of a verlc exec around this one */
    bool left = false;
    int fd = -1, rc = open_socket(&fd);
    if (rc == 0) rc = start(argv);
    if (rc == 0) {
        const int status = wait_for(command);
        const bool well = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        const enum reached what = well ? settle(fd, &left) : reached(fd, NOTHING);
        if (what != NOTHING && outer) report(outer, what);
        if (!allow_nothing) rc = judge(argv[0], what, well, left);
        if (rc == 0) rc = end_by(status);
    }
    if (fd >= 0) close(fd);
    free(outer);
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : rc;
}

int cmd_exec(int argc, char **argv) {
    json_t *overrides = json_array();
    bool plan = false, allow_nothing = false;
    const char *gpu = NULL;
    int64_t bytes;
    int k = 1;
    int rc = 0;
    for (; k < argc && argv[k][0] == '-'; k++) {
        const char *set = strncmp(argv[k], "--set=", 6) == 0 ? argv[k] + 6 : NULL;
        if (strcmp(argv[k], "--help") == 0 || strcmp(argv[k], "-h") == 0) {
            print_help();
            json_decref(overrides);
            return 0;
        }
        if (strcmp(argv[k], "--") == 0) {
            k++;
            break;
        }
        if (strcmp(argv[k], "--plan") == 0) {
            plan = true;
            continue;
        }
        if (strcmp(argv[k], "--allow-nothing") == 0) {
            allow_nothing = true;
            continue;
        }
        const char *card = strncmp(argv[k], "--gpu=", 6) == 0 ? argv[k] + 6 : NULL;
        if (strcmp(argv[k], "--gpu") == 0 && k + 1 < argc) card = argv[++k];
        if (card) {
            TRYG(cmd_gpu_bytes("--gpu", card, &bytes), out);
            gpu = card;
            continue;
        }
        if (strcmp(argv[k], "--set") == 0 && k + 1 < argc) set = argv[++k];
        if (!set)
            FAILG(out, ERR_INVAL, "verlc exec: unknown option %s; there are --plan, --gpu, --set KEY=VALUE and --allow-nothing",
                  argv[k]);
        if (json_array_append_new(overrides, json_string(set)) < 0) FAILG(out, ERR_INVAL, "--set %s: not UTF-8", set);
    }
    if (k >= argc)
        FAILG(out, ERR_INVAL,
              "verlc exec: no command; usage: verlc exec [--plan [--gpu NAME|SIZE]] [--set KEY=VALUE]... COMMAND...");
    if (gpu && !plan)
        FAILG(out, ERR_INVAL, "verlc exec: --gpu %s is what --plan plans for; a run takes the GPUs that are there", gpu);
    TRYG(set_environment(plan, gpu, overrides), out);
    rc = run(argv + k, allow_nothing);
out:
    json_decref(overrides);
    return rc;
}
