/* sandbox.c - one run: bwrap's arguments, its descriptors, the watch over limits, the end.
 *
 * bwrap is started through base/process, whose reaper ends it with us. Its own first process inside is process 1 of the pid
 * namespace, with which the kernel ends all others. Inside, prlimit sets the limits of a process, and where we are root
 * setpriv makes it another user.
 * Invariant: every descriptor that bwrap gets is one of ours made for this run, and bwrap closes those above 2 before the
 * program starts. */
#include "sandbox/sandbox_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

enum { PAGE = 4096, LOOK_MS = 20, MAX_STATUS = 1 << 16 };

const struct sandbox_limits sandbox_default_limits = {
    .wall_s = 10,
    .cpu_s = 10,
    .memory_bytes = (int64_t)1 << 30,
    .disk_bytes = (int64_t)64 << 20,
    .output_bytes = (int64_t)4 << 20,
    .n_processes = 64,
    .n_files = 64,
};

static const char *const end_names[] = {
#define X(name, text) text,
    SANDBOX_END_MAP(X)
#undef X
};
const char *sandbox_end_name(enum sandbox_end e) { return end_names[e]; }

void sandbox_result_free(struct sandbox_result *r) {
    buf_free(&r->out);
    buf_free(&r->err);
}

/* ---- bwrap's command line ---- */

struct command {
    char **v;
    int64_t n, cap;
};
static void add(struct command *c, const char *s) {
    xgrow((void **)&c->v, &c->cap, c->n + 2, sizeof *c->v);
    c->v[c->n++] = xstrdup(s);
    c->v[c->n] = NULL;
}
static void add_all(struct command *c, const char *const *list) {
    for (; list && *list; list++) add(c, *list);
}
#define ADD(c, ...) add_all((c), (const char *const[]){__VA_ARGS__, NULL})
__attribute__((format(printf, 2, 3))) static void addf(struct command *c, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    char *s = xvasprintf(fmt, ap);
    va_end(ap);
    add(c, s);
    free(s);
}
static void command_free(struct command *c) {
    for (int64_t i = 0; i < c->n; i++) free(c->v[i]);
    free(c->v);
}

/* The programs and libraries of the system: /usr, and where these are not links into it, /bin, /lib and their like. */
static void add_system(struct command *c) {
    static const char *const dirs[] = {"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"};
    ADD(c, "--ro-bind", "/usr", "/usr");
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
        char target[256];
        const ssize_t n = readlink(dirs[i], target, sizeof target - 1);
        if (n < 0) {
            ADD(c, "--ro-bind-try", dirs[i], dirs[i]);
            continue;
        }
        target[n] = '\0';
        ADD(c, "--symlink", target, dirs[i]);
    }
    ADD(c, "--perms", "0755", "--dir", "/etc");
    ADD(c, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache");
    ADD(c, "--ro-bind-try", "/etc/alternatives", "/etc/alternatives"); /* /usr/bin/cc is a link through it */
}

/* A directory of ours at the same path, whose parents everybody may search. */
static void add_read_dir(struct command *c, const char *dir) {
    for (const char *slash = strchr(dir + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        ADD(c, "--perms", "0755", "--dir");
        addf(c, "%.*s", (int)(slash - dir), dir);
    }
    ADD(c, "--ro-bind", dir, dir);
}

static void add_devices(struct command *c) {
    static const char *const devices[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"};
    ADD(c, "--perms", "0755", "--dir", "/dev");
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) ADD(c, "--dev-bind", devices[i], devices[i]);
    ADD(c, "--symlink", SANDBOX_DIR, "/dev/shm");
}

static void add_limits(struct command *c, const struct sandbox_limits *l, bool counts_first) {
    ADD(c, "prlimit", "--core=0", "--memlock=0");
    addf(c, "--as=%lld", (long long)l->memory_bytes);
    addf(c, "--cpu=%lld:%lld", (long long)l->cpu_s, (long long)l->cpu_s + 1);
    addf(c, "--fsize=%lld", (long long)l->disk_bytes);
    addf(c, "--nofile=%lld", (long long)l->n_files);
    addf(c, "--nproc=%lld", (long long)l->n_processes + counts_first); /* process 1 */
}

enum { FD_STATUS = 3, FD_SECCOMP, FD_FILES }; /* in bwrap */

/* Whose processes the program's are to the kernel. It is never root's: RLIMIT_NPROC does not hold for that. */
enum owner {
    CALLER,   /* an ordinary user's, in a user namespace where the limit counts the sandbox's own */
    NOBODY,   /* root makes the namespaces; the program is a user that nobody else is */
    NOBODY_2, /* root of a container may not make them: bwrap is that user already, in a user namespace */
};

static bool may_mount(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct caps[2] = {{0}};
    return syscall(SYS_capget, &head, caps) == 0 && (caps[0].effective & (1u << CAP_SYS_ADMIN));
}

static enum owner owner_of(void) { return geteuid() != 0 ? CALLER : may_mount() ? NOBODY : NOBODY_2; }

/* A user whom no account and no other run has, among those that this user namespace knows; 0: it knows root alone. */
static unsigned unused_user(void) {
    enum { RUNS = 64, WANTED = 1 << 15, FIRST = 1 << 30 };
    static atomic_uint runs;
    const unsigned mine = (unsigned)getpid() * RUNS + atomic_fetch_add(&runs, 1) % RUNS;
    unsigned first, outside, n, id = 0;
    FILE *map = fopen("/proc/self/uid_map", "r");
    while (map && fscanf(map, "%u %u %u", &first, &outside, &n) == 3) {
        if (first < FIRST && n > FIRST + (1u << 29)) id = FIRST + mine; /* pids have 22 bits */
        else if (n >= WANTED && id == 0) id = first + n - 2 - mine % (WANTED / 2);
    }
    if (map) fclose(map);
    return id;
}

static void add_user(struct command *c) {
    const unsigned id = unused_user();
    ADD(c, "/usr/bin/setpriv", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all");
    addf(c, "--reuid=%u", id);
    addf(c, "--regid=%u", id);
    add(c, "--");
}

static void add_namespaces(struct command *c, enum owner owner) {
    ADD(c, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox");
    ADD(c, "--new-session", "--die-with-parent", "--cap-drop", "ALL");
    if (owner == NOBODY) ADD(c, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"); /* add_user */
    else ADD(c, "--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534");
}

/* Our executable, at the same path, which listens inside. */
static char *own_path(void) {
    char path[PATH_MAX];
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    return n > 0 ? xstrndup(path, (size_t)n) : xstrdup("/nonexistent");
}
static void add_self(struct command *c) {
    char *exe = own_path();
    add_read_dir(c, exe);
    free(exe);
}
static void add_listening(struct command *c, const struct sandbox_args *a) {
    char *exe = own_path();
    ADD(c, exe, SANDBOX_LISTEN);
    addf(c, "%lld", (long long)a->port);
    addf(c, "%d", FD_FILES + a->n_files);
    free(exe);
}

static void make_command(struct command *c, const char *bwrap, const struct sandbox_args *a) {
    const enum owner owner = owner_of();
    if (owner == NOBODY_2) add_user(c);
    add(c, bwrap);
    add_namespaces(c, owner);
    add(c, "--json-status-fd");
    addf(c, "%d", FD_STATUS);
    add(c, "--seccomp");
    addf(c, "%d", FD_SECCOMP);
    add_system(c);
    add_devices(c);
    ADD(c, "--perms", "0777", "--size");
    addf(c, "%lld", (long long)a->limits.disk_bytes);
    ADD(c, "--tmpfs", SANDBOX_DIR);
    for (const char *const *d = a->read_dirs; d && *d; d++) add_read_dir(c, *d); /* may lie below SANDBOX_DIR */
    for (int i = 0; i < a->n_files; i++) {
        ADD(c, "--perms", "0644", "--file");
        addf(c, "%d", FD_FILES + i);
        addf(c, SANDBOX_DIR "/%s", a->files[i].name);
    }
    if (a->port > 0) add_self(c);
    ADD(c, "--remount-ro", "/", "--chdir", SANDBOX_DIR, "--");
    if (owner == NOBODY) add_user(c);
    if (a->port > 0) add_listening(c, a);
    add_limits(c, &a->limits, owner != NOBODY);
    add(c, "--");
    add_all(c, a->argv);
}

/* ---- one run ---- */

struct sandbox {
    struct sandbox_limits limits;
    struct process process;
    int fds[FD_FILES + SANDBOX_MAX_FILES + 1]; /* what bwrap gets; the last is of the listener */
    int n_fds;
    int channel; /* where the listener comes from; -1: none */
    double start;
    char *bwrap;
    int out, err, status; /* our ends, -1 after the end of the stream */
    struct buf report;    /* of bwrap: objects one after another */
    pid_t first;          /* process 1 of the sandbox; 0: not known yet */
    double looked;
    bool killed;
    struct sandbox_result result;
};

/* An unchangeable descriptor of these bytes: as standard input it is a file that the program can neither write nor grow. */
static int sealed(const char *p, size_t n, int *fd) {
    const int f = memfd_create("input", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    size_t at = 0;
    for (ssize_t w; f >= 0 && at < n; at += (size_t)w)
        if ((w = write(f, p + at, n - at)) <= 0) break;
    if (f < 0 || at < n || lseek(f, 0, SEEK_SET) != 0 ||
        fcntl(f, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0) {
        const int e = errno;
        if (f >= 0) close(f);
        FAIL(ERR_HELPER, "sandbox: cannot make an input of %zu bytes: %s", n, strerror(e));
    }
    *fd = f;
    return 0;
}

/* A pipe whose reading end, *ours, does not block. */
static int make_pipe(int *ours, int *theirs) {
    int p[2];
    if (pipe2(p, O_CLOEXEC) < 0) FAIL(ERR_HELPER, "sandbox: cannot make a pipe: %s", strerror(errno));
    fcntl(p[0], F_SETFL, O_NONBLOCK);
    *ours = p[0];
    *theirs = p[1];
    return 0;
}

/* Over which the listener comes. */
static int make_channel(int *ours, int *theirs) {
    int p[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, p) < 0)
        FAIL(ERR_HELPER, "sandbox: cannot make a socket: %s", strerror(errno));
    fcntl(p[0], F_SETFL, O_NONBLOCK);
    *ours = p[0];
    *theirs = p[1];
    return 0;
}

static int open_fds(struct sandbox *r, const struct sandbox_args *a) {
    TRY(sealed(a->stdin_data, a->n_stdin, &r->fds[0]));
    TRY(make_pipe(&r->out, &r->fds[1]));
    TRY(make_pipe(&r->err, &r->fds[2]));
    TRY(make_pipe(&r->status, &r->fds[FD_STATUS]));
    TRY(sandbox__seccomp(a->port > 0, &r->fds[FD_SECCOMP]));
    for (int i = 0; i < a->n_files; i++) TRY(sealed(a->files[i].data, a->files[i].n, &r->fds[FD_FILES + i]));
    return a->port > 0 ? make_channel(&r->channel, &r->fds[FD_FILES + a->n_files]) : 0;
}

static void close_theirs(struct sandbox *r) {
    for (int i = 0; i < r->n_fds; i++) {
        if (r->fds[i] >= 0) close(r->fds[i]);
        r->fds[i] = -1;
    }
}

static void kill_for(struct sandbox *r, enum sandbox_end why) {
    if (!r->killed) r->result.end = why;
    r->killed = true;
}

static void read_into(struct sandbox *r, int *fd, struct buf *to, int64_t max) {
    char piece[1 << 16];
    ssize_t n;
    while (*fd >= 0 && (n = read(*fd, piece, sizeof piece)) != 0) {
        if (n < 0) return;
        const size_t room = (size_t)max - to->n, take = (size_t)n < room ? (size_t)n : room;
        buf_add(to, piece, take);
        if (take < (size_t)n) kill_for(r, SANDBOX_OUTPUT_LIMIT);
        if (r->killed) return;
    }
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static void read_all(struct sandbox *r) {
    read_into(r, &r->out, &r->result.out, r->limits.output_bytes);
    read_into(r, &r->err, &r->result.err, r->limits.output_bytes);
    read_into(r, &r->status, &r->report, MAX_STATUS);
}

/* The value of a key in what bwrap has reported; -1: it is not there. */
static int64_t reported(const struct sandbox *r, const char *key) {
    const char *const at = r->report.p ? strstr(r->report.p, key) : NULL;
    return at ? strtoll(at + strlen(key), NULL, 10) : -1;
}
#define REPORT_PID "\"child-pid\": "
#define REPORT_EXIT "\"exit-code\": "

static void look_at_limits(struct sandbox *r) {
    struct sandbox__usage u;
    const double now = clock_now();
    if (r->first <= 0) r->first = (pid_t)reported(r, REPORT_PID);
    if (r->first <= 0 || now - r->looked < LOOK_MS / 1e3) return;
    r->looked = now;
    sandbox__usage(r->first, r->limits.disk_bytes, &u);
    if (u.bytes > r->result.peak_bytes) r->result.peak_bytes = u.bytes;
    if (u.bytes > r->limits.memory_bytes) kill_for(r, SANDBOX_MEMORY_LIMIT);
    if (u.n_processes > r->limits.n_processes + 1) kill_for(r, SANDBOX_PROCESS_LIMIT);
    if (u.n_inodes > SANDBOX_DIR_INODES) kill_for(r, SANDBOX_DISK_LIMIT);
}

bool sandbox_step(struct sandbox *r) {
    const bool ended = process_exited(&r->process);
    if (!ended && clock_awake() >= r->start + r->limits.wall_s) kill_for(r, SANDBOX_WALL_LIMIT);
    read_all(r);
    look_at_limits(r);
    return ended || r->killed;
}

static void watch(struct sandbox *r) {
    while (!sandbox_step(r)) {
        struct pollfd fds[] = {{r->out, POLLIN, 0}, {r->err, POLLIN, 0}, {r->status, POLLIN, 0}};
        const int left = clock_poll_ms(r->start + r->limits.wall_s);
        /* all ends closed: it is about to exit, or has closed them itself */
        poll(fds, 3, r->status < 0 ? 1 : left < LOOK_MS ? left : LOOK_MS);
    }
}

int sandbox_listener(struct sandbox *r) {
    const int fd = r->channel >= 0 ? sandbox__listener(r->channel) : -1;
    if (fd < 0) return -1;
    close(r->channel);
    r->channel = -1;
    return fd;
}

/* After the end of all its processes. */
static int finish(struct sandbox *r) {
    read_all(r); /* what came between the last look and the end; the exit code is the last of it */
    if (r->killed) return 0;
    const int64_t code = reported(r, REPORT_EXIT);
    if (code < 0) {
        struct buf why = {0};
        buf_add_visible(&why, r->result.err.p ? r->result.err.p : "it printed nothing", false);
        err_set(ERR_UNSUPPORTED, __FILE__, __LINE__, "%s", why.p);
        buf_free(&why);
        return ERR_UNSUPPORTED;
    }
    const int signal_no = code > 128 ? (int)code - 128 : 0;
    r->result.end = signal_no == SIGXCPU ? SANDBOX_CPU_LIMIT : signal_no > 0 ? SANDBOX_SIGNALED : SANDBOX_EXITED;
    r->result.status = signal_no == SIGXCPU ? 0 : signal_no > 0 ? signal_no : (int)code;
    return 0;
}

static int start_command(struct sandbox *r, const char *const *argv, const char *const *more) {
    static const char *const environment[] = {"PATH=/usr/local/bin:/usr/bin:/bin",
                                              "HOME=" SANDBOX_DIR,
                                              "TMPDIR=" SANDBOX_DIR,
                                              "LANG=C.UTF-8",
                                              "OMP_NUM_THREADS=1",
                                              "OPENBLAS_NUM_THREADS=1",
                                              "MALLOC_ARENA_MAX=2",
                                              NULL};
    struct command env = {0};
    add_all(&env, environment);
    add_all(&env, more);
    const struct process_args program = {.argv = argv, .env = env.v, .fds = r->fds, .n_fds = r->n_fds, .memory_bytes = -1};
    const int rc = process_start(&r->process, &program);
    command_free(&env);
    close_theirs(r);
    return rc;
}

/* ---- what a machine can do ---- */

static char *find_bwrap(void) {
    static const char *const places[] = {"/usr/bin/bwrap", "/bin/bwrap", "/usr/local/bin/bwrap"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (access(places[i], X_OK) == 0) return xstrdup(places[i]);
    return NULL;
}

static int64_t setting(const char *path) {
    long long v = -1;
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%lld", &v) != 1) v = -1;
    if (f) fclose(f);
    return v;
}

/* What most likely keeps this machine from it, and what helps. */
static const char *advice(void) {
    if (setting("/proc/sys/user/max_user_namespaces") == 0)
        return "user namespaces are switched off (user.max_user_namespaces is 0); 'sysctl user.max_user_namespaces=10000' as root "
               "allows them";
    if (setting("/proc/sys/kernel/unprivileged_userns_clone") == 0)
        return "users may not make namespaces (kernel.unprivileged_userns_clone is 0); 'sysctl kernel.unprivileged_userns_clone=1' "
               "as root allows it";
    if (setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1)
        return "AppArmor keeps users from making namespaces; an AppArmor profile for /usr/bin/bwrap with 'userns,' or 'sysctl "
               "kernel.apparmor_restrict_unprivileged_userns=0' as root allows it";
    return "in a container, start that with 'docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined' or "
           "on the host; docs/troubleshooting.md has more";
}

/* Before Linux 5.14 RLIMIT_NPROC counted all processes of the user, in this sandbox and elsewhere. */
static bool counts_by_namespace(void) {
    struct utsname u;
    int major, minor;
    return uname(&u) == 0 && sscanf(u.release, "%d.%d", &major, &minor) == 2 && (major > 5 || (major == 5 && minor >= 14));
}

static int check_args(const struct sandbox_args *a) {
    const struct sandbox_limits *l = &a->limits;
    if (!a->argv || !a->argv[0]) FAIL(ERR_INVAL, "sandbox: no program is named");
    if (a->n_files > SANDBOX_MAX_FILES)
        FAIL(ERR_INVAL, "sandbox: %d files; at most %d are possible", a->n_files, SANDBOX_MAX_FILES);
    for (int i = 0; i < a->n_files; i++) {
        const char *name = a->files[i].name;
        if (!*name || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
            FAIL(ERR_INVAL, "sandbox: the name of file %d is empty or has a directory", i + 1);
    }
    for (const char *const *d = a->read_dirs; d && *d; d++)
        if (**d != '/' || strcmp(*d, "/") == 0) FAIL(ERR_INVAL, "sandbox: a directory to read is not an absolute path below /");
    if (!(l->wall_s > 0) || l->cpu_s < 1 || l->memory_bytes < 1 || l->disk_bytes < PAGE || l->disk_bytes % PAGE ||
        l->output_bytes < 1 || l->n_processes < 1 || l->n_files < 8)
        FAIL(ERR_INVAL, "sandbox: a limit is not above 0 (8 open files, %d bytes of disk and a multiple of that)", PAGE);
    return 0;
}

/* What this machine lacks. */
static int check_machine(char **bwrap) {
    *bwrap = find_bwrap();
    if (!*bwrap)
        FAIL(ERR_UNSUPPORTED, "code is run in a sandbox of bubblewrap, whose program bwrap is not in /usr/bin; install it with "
                              "'apt-get install bubblewrap'. Nothing is run without it");
    if (owner_of() == CALLER && !counts_by_namespace())
        FAIL(ERR_UNSUPPORTED,
             "code is run in a sandbox that limits its processes, for which Linux 5.14 is needed where verlc is not "
             "run as root. Nothing is run without it");
    if (owner_of() != CALLER && unused_user() == 0)
        FAIL(ERR_UNSUPPORTED,
             "verlc is root of a user namespace that has no other user, to whom code in a sandbox could belong; run "
             "verlc as an ordinary user, or with more ids in /etc/subuid. Nothing is run without it");
    return 0;
}

static void sandbox_free(struct sandbox *r) {
    process_stop(&r->process, 0, NULL, 0);
    close_theirs(r);
    for (int *fd = (int[]){r->out, r->err, r->status, r->channel, -2}; *fd != -2; fd++)
        if (*fd >= 0) close(*fd);
    buf_free(&r->report);
    sandbox_result_free(&r->result);
    free(r->bwrap);
    free(r);
}

static int start(struct sandbox *r, const struct sandbox_args *a) {
    struct command c = {0};
    TRY(check_args(a));
    TRY(check_machine(&r->bwrap));
    r->n_fds = FD_FILES + a->n_files + (a->port > 0);
    make_command(&c, r->bwrap, a);
    int rc = open_fds(r, a);
    r->start = clock_awake();
    if (rc == 0) rc = start_command(r, (const char *const *)c.v, a->env);
    command_free(&c);
    return rc;
}

int sandbox_start(struct sandbox **out, const struct sandbox_args *a) {
    struct sandbox *r = xcalloc(1, sizeof *r);
    *r = (struct sandbox){.limits = a->limits, .process = {-1, -1}, .out = -1, .err = -1, .status = -1, .channel = -1};
    for (size_t i = 0; i < sizeof r->fds / sizeof *r->fds; i++) r->fds[i] = -1;
    const int rc = start(r, a);
    if (rc < 0) sandbox_free(r);
    else *out = r;
    return rc;
}

int sandbox_end(struct sandbox *r, struct sandbox_result *out) {
    if (!sandbox_step(r)) {
        r->killed = true; /* by whoever calls this */
        r->result.end = SANDBOX_SIGNALED;
        r->result.status = SIGKILL;
    }
    process_stop(&r->process, 0, NULL, 0);
    r->result.wall_s = clock_awake() - r->start;
    int rc = finish(r);
    if (rc == ERR_UNSUPPORTED)
        err_append(rc = err_wrap(rc, "bubblewrap cannot make a sandbox on this machine, and nothing is run without one"), "; %s",
                   advice());
    if (rc == 0 && out) {
        *out = r->result;
        r->result = (struct sandbox_result){0};
    }
    sandbox_free(r);
    return rc;
}

int sandbox_run(const struct sandbox_args *a, struct sandbox_result *out) {
    struct sandbox *r;
    *out = (struct sandbox_result){0};
    TRY(sandbox_start(&r, a));
    watch(r);
    return sandbox_end(r, out);
}

int sandbox_check(void) {
    struct sandbox_result r;
    TRY(sandbox_run(&(struct sandbox_args){.argv = (const char *const[]){"/bin/true", NULL}, .limits = sandbox_default_limits},
                    &r));
    const bool good = r.end == SANDBOX_EXITED && r.status == 0;
    char *const text = xstrndup(r.err.p ? r.err.p : "", r.err.n);
    const char *const how = sandbox_end_name(r.end);
    const int status = r.status;
    sandbox_result_free(&r);
    if (!good) err_set(ERR_UNSUPPORTED, __FILE__, __LINE__, "the sandbox does not run /bin/true: %s %d: %s", how, status, text);
    free(text);
    return good ? 0 : ERR_UNSUPPORTED;
}
