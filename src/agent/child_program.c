/* child_program.c - see child_program.h.
 * Invariant: what is kept of its output is bounded, however much it prints. */
#include "agent/child_program.h"

#include "base/err.h"
#include "base/process.h"
#include "sandbox/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern char **environ;

enum { LINE_BYTES = 1 << 16, TAIL_BYTES = 1 << 12, AT_ONCE = 1 << 20, SANDBOX_PROCESSES = 256, SANDBOX_FILES = 1024 };
#define SANDBOX_MEMORY ((int64_t)4 << 30)
#define SANDBOX_DISK ((int64_t)256 << 20)
#define SANDBOX_OUTPUT ((int64_t)16 << 20)

struct child_program {
    struct process process;
    struct sandbox *sandbox; /* in place of process; NULL: it has none, or has ended */
    char *how;               /* it has ended in its sandbox */
    int out, err;            /* our ends; -1: closed */
    struct buf line, last;
    bool line_long; /* the line under way is over LINE_BYTES */
    struct buf tail;
};

/* ---- start ---- */

static int input_of(const struct child_program_args *a, int *fd) {
    const int f = memfd_create("input", MFD_CLOEXEC);
    size_t at = 0;
    for (ssize_t w; f >= 0 && at < a->n_input; at += (size_t)w)
        if ((w = write(f, a->input + at, a->n_input - at)) <= 0) break;
    if (f < 0 || at < a->n_input || lseek(f, 0, SEEK_SET) != 0) {
        const int e = errno;
        if (f >= 0) close(f);
        FAIL(ERR_HELPER, "an agent's program: no standard input of %zu bytes: %s", a->n_input, strerror(e));
    }
    *fd = f;
    return 0;
}

static int pipe_of(int *ours, int *theirs) {
    int p[2];
    if (pipe2(p, O_CLOEXEC) < 0) FAIL(ERR_HELPER, "an agent's program: no pipe: %s", strerror(errno));
    fcntl(p[0], F_SETFL, O_NONBLOCK);
    *ours = p[0];
    *theirs = p[1];
    return 0;
}

/* Whether `var` ("NAME=VALUE") is of one of the names; those may be followed by a value too. */
static bool is_one_of(const char *var, const char *const *names) {
    const size_t n = strcspn(var, "=");
    for (; names && *names; names++)
        if (strcspn(*names, "=") == n && strncmp(var, *names, n) == 0) return true;
    return false;
}

/* The variables of the program; the caller frees the array. */
static char **environment(const struct child_program_args *a) {
    int64_t n = 0, n_own = 0;
    while (environ[n]) n++;
    while (a->env[n_own]) n_own++;
    char **env = xcalloc((size_t)(n + n_own) + 1, sizeof *env), **at = env;
    for (char **v = environ; *v; v++)
        if (!is_one_of(*v, a->env) && !is_one_of(*v, a->without)) *at++ = *v;
    memcpy(at, a->env, (size_t)n_own * sizeof *at);
    return env;
}

static int start(struct child_program *p, const struct child_program_args *a, int *theirs) {
    TRY(input_of(a, &theirs[0]));
    TRY(pipe_of(&p->out, &theirs[1]));
    TRY(pipe_of(&p->err, &theirs[2]));
    char **env = environment(a);
    char *command = a->max_files > 0 ? xasprintf("ulimit -n %lld; %s", (long long)a->max_files, a->command) : xstrdup(a->command);
    const char *const argv[] = {"/bin/sh", "-c", command, NULL};
    const int rc =
        process_start(&p->process, &(struct process_args){.argv = argv, .env = env, .fds = theirs, .n_fds = 3, .memory_bytes = -1});
    free(env);
    free(command);
    return rc;
}

static int start_in_sandbox(struct child_program *p, const struct child_program_args *a) {
    char *command = xasprintf("cd \"$VERLC_DIR\"\n%s", a->command),
         *dir = xasprintf("VERLC_DIR=%s", a->dirs[0] ? a->dirs[0] : SANDBOX_DIR);
    int64_t n = 0;
    while (a->env[n]) n++;
    const char **env = xcalloc((size_t)n + 2, sizeof *env);
    memcpy(env, a->env, (size_t)n * sizeof *env);
    env[n] = dir;
    const struct sandbox_args s = {.argv = (const char *const[]){"/bin/sh", "-c", command, NULL},
                                   .stdin_data = a->input,
                                   .n_stdin = a->n_input,
                                   .read_dirs = a->dirs,
                                   .env = env,
                                   .port = a->port,
                                   .limits = {.wall_s = a->wall_s + 60, /* the caller ends it before */
                                              .cpu_s = 16 * (int64_t)a->wall_s + 16,
                                              .memory_bytes = SANDBOX_MEMORY,
                                              .disk_bytes = SANDBOX_DISK,
                                              .output_bytes = SANDBOX_OUTPUT,
                                              .n_processes = SANDBOX_PROCESSES,
                                              .n_files = SANDBOX_FILES}};
    const int rc = sandbox_start(&p->sandbox, &s);
    free(env);
    free(dir);
    free(command);
    return rc;
}

int child_program_check_sandbox(void) { return sandbox_check(); }

int child_program_start(struct child_program **out, const struct child_program_args *a) {
    struct child_program *p = xcalloc(1, sizeof *p);
    int theirs[3] = {-1, -1, -1};
    *p = (struct child_program){.process = {-1, -1}, .out = -1, .err = -1};
    const int rc = a->sandbox ? start_in_sandbox(p, a) : start(p, a, theirs);
    for (int i = 0; i < 3; i++)
        if (theirs[i] >= 0) close(theirs[i]);
    if (rc < 0) child_program_stop(p, NULL);
    else *out = p;
    return rc < 0 ? err_pass(rc, __FILE__, __LINE__) : 0;
}

/* ---- what it prints ---- */

static bool is_blank(const struct buf *line) {
    for (size_t i = 0; i < line->n; i++)
        if (!strchr(" \t\r", line->p[i])) return false;
    return true;
}

static void end_line(struct child_program *p) {
    if (p->line_long || !is_blank(&p->line)) {
        buf_reset(&p->last);
        if (!p->line_long) buf_add(&p->last, p->line.p, p->line.n);
    }
    buf_reset(&p->line);
    p->line_long = false;
}

static void take_out(struct child_program *p, const char *s, size_t n) {
    for (size_t at = 0; at < n;) {
        const char *nl = memchr(s + at, '\n', n - at);
        const size_t len = nl ? (size_t)(nl - s) - at : n - at;
        if (p->line.n + len > LINE_BYTES) p->line_long = true;
        else if (!p->line_long) buf_add(&p->line, s + at, len);
        at += len + (nl != NULL);
        if (nl) end_line(p);
    }
}

/* Keeps the last TAIL_BYTES. */
static void take_err(struct child_program *p, const char *s, size_t n) {
    struct buf *b = &p->tail;
    buf_add(b, s, n);
    if (b->n <= TAIL_BYTES) return;
    memmove(b->p, b->p + b->n - TAIL_BYTES, TAIL_BYTES);
    b->n = TAIL_BYTES;
}

/* At most AT_ONCE bytes: a program that floods does not keep us. all: what is there at its end. */
static void drain(struct child_program *p, int *fd, void (*take)(struct child_program *, const char *, size_t)) {
    static char piece[1 << 16]; /* one thread calls */
    ssize_t n = 0;
    for (size_t sum = 0; *fd >= 0 && sum < AT_ONCE; sum += (size_t)n) {
        n = read(*fd, piece, sizeof piece);
        if (n < 0 && errno == EINTR) n = 0;
        else if (n < 0) return;
        else if (n == 0) {
            close(*fd);
            *fd = -1;
            return;
        }
        take(p, piece, (size_t)n);
    }
}

static void drain_both(struct child_program *p) {
    drain(p, &p->out, take_out);
    drain(p, &p->err, take_err);
}

/* One in a sandbox: its end, and what it has printed. */
static void end_sandbox(struct child_program *p) {
    struct sandbox_result r;
    const int rc = sandbox_end(p->sandbox, &r);
    p->sandbox = NULL;
    if (rc < 0) {
        p->how = xstrdup(err_msg());
        return;
    }
    take_out(p, r.out.p ? r.out.p : "", r.out.n);
    end_line(p);
    take_err(p, r.err.p ? r.err.p : "", r.err.n);
    if (r.end == SANDBOX_EXITED) p->how = xasprintf("exit code %d", r.status);
    else if (r.end == SANDBOX_SIGNALED) p->how = xasprintf("signal %d (%s)", r.status, strsignal(r.status));
    else p->how = xasprintf("its sandbox's limit %s", sandbox_end_name(r.end));
    sandbox_result_free(&r);
}

int child_program_listener(struct child_program *p) { return p->sandbox ? sandbox_listener(p->sandbox) : -1; }

bool child_program_ended(struct child_program *p) {
    if (p->how) return true;
    if (p->sandbox) {
        if (sandbox_step(p->sandbox)) end_sandbox(p);
        return p->how != NULL;
    }
    const bool ended = process_exited(&p->process);
    drain_both(p);
    if (ended && p->line.n + p->line_long > 0) end_line(p); /* a last line without its newline */
    return ended;
}

void child_program_stop(struct child_program *p, char **how) {
    char text[64];
    process_stop(&p->process, 0, text, sizeof text);
    if (p->sandbox) (void)sandbox_end(p->sandbox, NULL);
    if (how) *how = xstrdup(p->how ? p->how : text);
    free(p->how);
    if (p->out >= 0) close(p->out);
    if (p->err >= 0) close(p->err);
    buf_free(&p->line);
    buf_free(&p->last);
    buf_free(&p->tail);
    free(p);
}

const char *child_program_last_line(const struct child_program *p, size_t *n) {
    *n = p->last.n;
    return p->last.p ? p->last.p : "";
}

char *child_program_last_error(const struct child_program *p) {
    const char *s = p->tail.p;
    size_t to = p->tail.n, from;
    struct buf out = {0};
    while (to > 0 && strchr(" \t\r\n", s[to - 1])) to--;
    from = to;
    while (from > 0 && s[from - 1] != '\n' && to - from < 500) from--;
    char *line = xstrndup(to > from ? s + from : "", to - from);
    buf_add_visible(&out, line, false);
    free(line);
    return out.p ? out.p : xstrdup("");
}

json_t *child_program_reward_line(const char *line, size_t n) {
    json_t *o = json_loadb(line, n, JSON_REJECT_DUPLICATES, NULL);
    if (json_is_object(o) && json_is_number(json_object_get(o, "reward"))) return o;
    json_decref(o);
    return NULL;
}
