/* helper_process.c - the operating-system half of a helper: which interpreter and
 * which directory, its environment, its descriptors and its signals.
 * Knows nothing of frames or JSON.
 * Invariant: after helper__stop the process is reaped and both descriptors closed. */
#include "helper/helper_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

extern char **environ;

enum { SOCK_FD = 3 }; /* the helper's end of the socketpair */

static bool runnable(const char *path) { return !file_is_dir(path) && access(path, X_OK) == 0; }

static char *find_in(const char *dir, const char *const *names, bool (*good)(const char *)) {
    for (; *names; names++) {
        char *p = file_join(dir, *names);
        if (good(p)) return p;
        free(p);
    }
    return NULL;
}

/* The first of `names` (NULL ends them) in the program's directory, else in one of the four above it
 * (build/debug/verlc inside a source tree), else in the source tree the program was built from: the
 * nearest directory wins. NULL if there is none. */
static char *find_near_program(const char *const *names, bool (*good)(const char *)) {
    char *dir = file_program_dir(), *found = NULL;
    for (int up = 0; dir && !found && up < 5; up++) {
        found = find_in(dir, names, good);
        char *slash = strrchr(dir, '/');
        if (!slash) break;
        *slash = '\0';
    }
    free(dir);
#ifdef VERLC_SOURCE_DIR
    if (!found) found = find_in(VERLC_SOURCE_DIR, names, good);
#endif
    return found;
}

static char *find_in_path(const char *name) {
    const char *path = getenv("PATH");
    for (const char *s = path ? path : "/usr/bin:/bin"; *s;) {
        const size_t n = strcspn(s, ":");
        char *p = xasprintf("%.*s/%s", (int)n, s, name);
        if (n > 0 && runnable(p)) return p;
        free(p);
        s += n + (s[n] == ':');
    }
    return NULL;
}

/* The program that the user named; from: what named it. */
static int named_python(const char *from, const char *name, char **path) {
    char *p = strchr(name, '/') ? file_expand(name) : find_in_path(name);
    if (!p || !runnable(p)) {
        free(p);
        FAIL(ERR_HELPER,
             "%s%s is not a program that can be run; unset it, or install one with 'apt-get install python3 python3-venv'", from,
             name);
    }
    *path = p;
    return 0;
}

int helper__find_python(const char *requested, char **path) {
    const char *env = getenv("VERLC_PYTHON");
    if (requested) return named_python("", requested, path);
    if (env && *env) return named_python("VERLC_PYTHON=", env, path);
    char *dir = file_program_dir();
    char *p = dir ? find_in(dir, (const char *const[]){"python3", NULL}, runnable) : NULL; /* of an environment's bin/ */
    free(dir);
    if (!p) p = find_near_program((const char *const[]){".venv/bin/python", NULL}, runnable);
    if (!p) p = find_in_path("python3");
    if (!p)
        FAIL(ERR_HELPER, "no Python found (VERLC_PYTHON, python3 or .venv/bin/python next to the program, python3 in "
                         "PATH); install it with 'apt-get install python3 python3-venv'");
    *path = p;
    return 0;
}

static bool has_helpers(const char *dir) {
    char *p = file_join(dir, "verlc_helpers/protocol.py");
    const bool yes = file_exists(p);
    free(p);
    return yes;
}

int helper_find_dir(const char *module, char **path) {
    const char *env = getenv("VERLC_HELPERS_DIR");
    char *dir = NULL;
    if (env && *env) {
        if (!has_helpers(env))
            FAIL(ERR_HELPER,
                 "VERLC_HELPERS_DIR=%s does not hold verlc_helpers/protocol.py; point it at verlc's python/ "
                 "directory or unset it",
                 env);
        dir = xstrdup(env);
    } else {
        dir = find_near_program((const char *const[]){"python", "share/verlc/python", NULL}, has_helpers);
        if (!dir)
            FAIL(ERR_HELPER, "verlc's python/ directory with the helper modules was not found next to the "
                             "program; set VERLC_HELPERS_DIR to it");
    }
    /* verlc_helpers.NAME -> verlc_helpers/NAME.py: a missing file is named now, not at the first request. */
    char *rel = xasprintf("%s.py", module);
    for (char *s = rel; *s && strcmp(s, ".py") != 0; s++)
        if (*s == '.') *s = '/';
    char *file = file_join(dir, rel);
    const bool there = file_exists(file);
    int rc = 0;
    if (!there)
        rc = err_set(ERR_HELPER, __FILE__, __LINE__,
                     "helper %s: %s is missing; check out or install verlc again, or set VERLC_HELPERS_DIR", module, file);
    else *path = dir;
    if (!there) free(dir);
    free(rel);
    free(file);
    return rc;
}

/* --- start --- */

struct env {
    char **v;
    int64_t n, cap;
};
static void env_add(struct env *e, char *owned) {
    xgrow((void **)&e->v, &e->cap, e->n + 2, sizeof *e->v);
    e->v[e->n++] = owned;
    e->v[e->n] = NULL;
}
static bool env_is(const char *entry, const char *name) {
    const size_t n = strlen(name);
    return strncmp(entry, name, n) == 0 && entry[n] == '=';
}

/* Ours, with what keeps the helper small and quiet: one thread per numerical
 * library, two malloc arenas (each costs 64 MiB of address space), UTF-8. */
static struct env make_env(const char *dir) {
    static const char *const set[][2] = {
        {"MALLOC_ARENA_MAX", "2"},        {"OMP_NUM_THREADS", "1"},  {"OPENBLAS_NUM_THREADS", "1"},       {"PYTHONUTF8", "1"},
        {"PYTHONDONTWRITEBYTECODE", "1"}, {"PYTHONUNBUFFERED", "1"}, {"TOKENIZERS_PARALLELISM", "false"},
    };
    enum { N_SET = sizeof set / sizeof set[0] };
    struct env e = {0};
    const char *old = getenv("PYTHONPATH");
    for (char **p = environ; *p; p++) {
        bool ours = env_is(*p, "PYTHONPATH") || env_is(*p, "VERLC_HELPER_FD");
        for (int i = 0; i < N_SET; i++) ours |= env_is(*p, set[i][0]);
        if (!ours) env_add(&e, xstrdup(*p));
    }
    for (int i = 0; i < N_SET; i++) env_add(&e, xasprintf("%s=%s", set[i][0], set[i][1]));
    env_add(&e, xasprintf("VERLC_HELPER_FD=%d", SOCK_FD));
    char *own = file_program_dir(), *verlc = own ? find_in(own, (const char *const[]){"verlc", NULL}, runnable) : NULL;
    if (verlc && !getenv("VERLC")) env_add(&e, xasprintf("VERLC=%s", verlc)); /* verlc_helpers/sandbox.py */
    free(verlc);
    free(own);
    env_add(&e, old && *old ? xasprintf("PYTHONPATH=%s:%s", dir, old) : xasprintf("PYTHONPATH=%s", dir));
    return e;
}

static int set_nonblock(int fd) { return fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

/* `python -m MODULE`, but what the current directory has of that name does not come before ours. */
static const char RUN_MODULE[] = "import sys\n"
                                 "path = sys.path\n"
                                 "here = path[0] == ''\n"
                                 "if here: del path[0]\n"
                                 "import runpy\n"
                                 "if here: path.insert(1, '')\n"
                                 "runpy.run_module(sys.argv.pop(), run_name='__main__', alter_sys=True)\n";

int helper__spawn(struct helper__proc *p, const struct helper__spawn_args *a) {
    int sv[2] = {-1, -1}, ep[2] = {-1, -1}, rc = 0;
    struct env env = make_env(a->dir);
    const char *const argv[] = {a->python, "-c", RUN_MODULE, a->module, NULL};

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv) < 0 || pipe2(ep, O_CLOEXEC) < 0)
        FAILG(out, ERR_HELPER, "helper %s: cannot make its socket: %s", a->module, strerror(errno));
    fcntl(ep[1], F_SETPIPE_SZ, 1 << 20); /* room for prints while nobody reads; a smaller pipe works too */
    if (set_nonblock(sv[0]) < 0 || set_nonblock(ep[0]) < 0)
        FAILG(out, ERR_HELPER, "helper %s: fcntl: %s", a->module, strerror(errno));
    const int fds[] = {-1, ep[1], ep[1], sv[1]}; /* SOCK_FD */
    const struct process_args program = {
        .argv = argv, .env = env.v, .fds = fds, .n_fds = sizeof fds / sizeof *fds, .memory_bytes = a->memory_bytes, .deaf = true};
    TRYG(process_start(&p->process, &program), out);
    p->sock = sv[0];
    p->err = ep[0];
    sv[0] = ep[0] = -1;
out:
    for (int i = 0; i < 2; i++) {
        if (sv[i] >= 0) close(sv[i]);
        if (ep[i] >= 0) close(ep[i]);
    }
    for (int64_t i = 0; i < env.n; i++) free(env.v[i]);
    free(env.v);
    return rc;
}

void helper__stop(struct helper__proc *p, double grace_s, char *how, size_t n) {
    if (p->sock >= 0) close(p->sock); /* end of stream: a healthy helper leaves */
    process_stop(&p->process, grace_s, how, n);
    if (p->err >= 0) close(p->err);
    *p = HELPER__NOT_RUNNING;
}
