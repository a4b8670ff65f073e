/* user_c.c - a C file of the user's becomes a function: the system's compiler makes
 * a shared object of it in the run's directory, which is opened here.
 *
 * What is compiled is a line around the file that gives the function its type, so that a
 * wrong one is the compiler's error and not a crash; the header is the one that this
 * program was built with.  It is compiled again at each start: the file may include others.
 * Invariant: nothing is opened that this start did not compile, and a compiler that does
 * not end is killed. */
#include "algo/custom/user_int.h"

#include "base/clock.h"
#include "base/file.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

__asm__(".pushsection .rodata\n"
        ".globl algo__user_header\n.globl algo__user_header_end\n"
        "algo__user_header:\n.incbin \"" VERLC_ALGO_HEADER "\"\nalgo__user_header_end:\n.byte 0\n"
        ".popsection\n");

#define COMPILE_S 120.0
enum { MAX_ARGS = 64 };

/* ---- the compiler ---- */

static bool is_error(const char *line, size_t n) {
    static const char *const words[] = {"error:", "error ", "undefined reference"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (memmem(line, n, words[i], strlen(words[i]))) return true;
    return false;
}

char *algo__first_error(const char *output) {
    const char *first = NULL;
    for (const char *s = output; *s;) {
        const size_t n = strcspn(s, "\r\n");
        if (is_error(s, n)) return xstrndup(s, n < 500 ? n : 500);
        if (!first && n > 0) first = s;
        s += n + strspn(s + n, "\r\n");
    }
    if (!first) return xstrdup("no message");
    const size_t n = strcspn(first, "\r\n");
    return xstrndup(first, n < 500 ? n : 500);
}

static int wait_for(pid_t pid, const char *compiler, int *status) {
    const double deadline = clock_awake() + COMPILE_S;
    for (;;) {
        const pid_t got = waitpid(pid, status, WNOHANG);
        if (got == pid) return 0;
        if (got < 0 && errno != EINTR) FAIL(ERR_INTERNAL, "waitpid: %s", strerror(errno));
        if (clock_awake() > deadline) {
            kill(-pid, SIGKILL);
            waitpid(pid, status, 0);
            FAIL(ERR_TIMEOUT, "%s did not end within %g s and was killed", compiler, COMPILE_S);
        }
        nanosleep(&(struct timespec){0, 5000000}, NULL);
    }
}

/* Runs the compiler with its messages in the file `log`. 1: it does not exist; 0: *status is its wait status. */
static int spawn(char *const *argv, const char *log, int *status) {
    pid_t pid;
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t at;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_addopen(&fa, 0, "/dev/null", 0, 0);
    posix_spawn_file_actions_addopen(&fa, 1, log, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    posix_spawn_file_actions_adddup2(&fa, 1, 2);
    posix_spawnattr_init(&at);
    posix_spawnattr_setflags(&at, POSIX_SPAWN_SETPGROUP);
    const int e = posix_spawnp(&pid, argv[0], &fa, &at, argv, environ);
    posix_spawn_file_actions_destroy(&fa);
    posix_spawnattr_destroy(&at);
    if (e == ENOENT) return 1;
    if (e != 0) FAIL(ERR_HELPER, "cannot run '%s': %s", argv[0], strerror(e));
    return wait_for(pid, argv[0], status);
}

struct job {
    struct algo_user *u;
    char *file;          /* the whole path of the user's file */
    const char *include; /* the directory of verlc_algo.h and of the shared object */
    char *so;
    char *work, *src, *log, *tmp; /* a directory in it for this compilation, and what lies there */
};

/* What kept the compiler from writing, or NULL. On a full disk its messages may be missing as well, and its output was removed: so
 * writing as much as a small object is tried. */
static const char *disk_error(const struct job *j, const char *output) {
    static const int errors[] = {ENOSPC, EDQUOT, EROFS, EFBIG};
    static const char probe[64 << 10];
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (strstr(output, strerror(errors[i]))) return strerror(errors[i]);
    return file_write_atomic(j->tmp, probe, sizeof probe) < 0 ? strerror(ENOSPC) : NULL;
}

static int report(const struct job *j, const char *compiler) {
    const struct algo_user *u = j->u;
    struct buf text = {0};
    if (file_read(&text, j->log, 1 << 20) < 0) buf_adds(&text, "");
    const char *disk = disk_error(j, text.p ? text.p : "");
    if (disk) {
        buf_free(&text);
        FAIL(ERR_IO, "%s: %s could not be compiled into %s: %s; make room there, or set trainer.default_local_dir to another disk",
             u->key, u->path, j->include, disk);
    }
    char *line = algo__first_error(text.p ? text.p : "");
    if (strncmp(line, "verlc:", 6) == 0) /* the line around the file: NAME is missing or of another type */
        err_set(ERR_INPUT, __FILE__, __LINE__, "%s: %s has no function '%s' of the type %s (verlc_algo.h): %s", u->key, u->path,
                u->name, u->loss ? "verlc_loss_fn" : "verlc_adv_fn", line);
    else err_set(ERR_INPUT, __FILE__, __LINE__, "%s: %s does not compile (%s): %s", u->key, u->path, compiler, line);
    free(line);
    buf_free(&text);
    return ERR_INPUT;
}

/* One compiler command, words separated by spaces. 1: it does not exist. */
static int compile_with(const struct job *j, const char *compiler) {
    char *words = xstrdup(compiler), *argv[MAX_ARGS + 16], *save = NULL;
    int n = 0, status = 0, rc;
    for (char *w = strtok_r(words, " \t", &save); w && n < MAX_ARGS; w = strtok_r(NULL, " \t", &save)) argv[n++] = w;
    static const char *const flags[] = {
        "-std=gnu11", "-O2", "-fPIC", "-shared", "-Werror=incompatible-pointer-types", "-Werror=implicit-function-declaration",
        "-I"};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) argv[n++] = (char *)(uintptr_t)flags[i];
    argv[n++] = (char *)(uintptr_t)j->include;
    argv[n++] = (char *)(uintptr_t) "-o";
    argv[n++] = j->tmp;
    argv[n++] = j->src;
    argv[n++] = (char *)(uintptr_t) "-lm";
    argv[n] = NULL;
    rc = spawn(argv, j->log, &status);
    if (rc == 0 && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) rc = report(j, argv[0]);
    free(words);
    return rc;
}

static int compile(const struct job *j) {
    const char *env = getenv("CC");
    const char *const compilers[] = {env && strspn(env, " \t") < strlen(env) ? env : "cc", "cc", "gcc", "clang"};
    for (size_t i = 0; i < sizeof compilers / sizeof *compilers; i++) {
        const int rc = compile_with(j, compilers[i]);
        if (rc <= 0) return rc;
    }
    FAIL(ERR_INPUT, "%s: %s needs a C compiler, and there is no $CC, cc, gcc or clang; install one with 'apt-get install gcc'",
         j->u->key, j->u->spec);
}

static int write_sources(const struct job *j) {
    char *header = file_join(j->include, "verlc_algo.h");
    struct buf b = {0};
    buf_addf(&b, "#include \"verlc_algo.h\"\n#include \"%s\"\n#line 1 \"verlc\"\n%s *const verlc_user_function = %s;\n", j->file,
             j->u->loss ? "verlc_loss_fn" : "verlc_adv_fn", j->u->name);
    int rc = file_mkdirs(j->work);
    if (rc == 0) rc = file_write_atomic(header, algo__user_header, (size_t)(algo__user_header_end - algo__user_header));
    if (rc == 0) rc = file_write_atomic(j->src, b.p, b.n);
    buf_free(&b);
    free(header);
    return rc < 0 ? err_wrap(rc, "%s", j->u->key) : 0;
}

/* ---- the shared object ---- */

static int open_object(struct algo_user *u, const char *path) {
    void *const *function;
    u->so = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!u->so) FAIL(ERR_INPUT, "%s: %s cannot be loaded: %s", u->key, u->spec, dlerror());
    function = dlsym(u->so, "verlc_user_function");
    if (!function) FAIL(ERR_INPUT, "%s: %s cannot be loaded: %s", u->key, u->spec, dlerror());
    if (u->loss) memcpy(&u->run_loss, function, sizeof *function); /* ISO C has no cast from void * */
    else memcpy(&u->run_adv, function, sizeof *function);
    char *name = xasprintf("%s_verlc_needs", u->name);
    const unsigned *needs = dlsym(u->so, name);
    free(name);
    u->adv.needs = needs ? *needs & (ALGO_NEEDS_VALUES | ALGO_NEEDS_BASELINES | ALGO_NEEDS_SUM_PI) : 0;
    return 0;
}

static int build(const struct job *j) {
    TRY(write_sources(j));
    TRY(compile(j));
    if (rename(j->tmp, j->so) != 0) FAIL(ERR_IO, "%s: %s: %s", j->u->key, j->so, strerror(errno));
    return open_object(j->u, j->so);
}

/* dir: a whole path, which a compiler does not take for an option. */
static int build_in(struct algo_user *u, const char *dir) {
    struct job j = {.u = u, .file = realpath(u->path, NULL), .include = dir};
    if (!j.file) FAIL(ERR_INPUT, "%s: %s: %s", u->key, u->path, strerror(errno));
    j.so = xasprintf("%s/%s.so", dir, u->name);
    j.work = file_temp_path(j.so);
    j.src = file_join(j.work, "function.c");
    j.log = file_join(j.work, "log");
    j.tmp = file_join(j.work, "function.so");
    int rc = build(&j);
    struct err_saved why;
    err_save(&why);
    (void)file_remove_tree(j.work);
    err_restore(&why);
    free(j.file);
    free(j.so);
    free(j.work);
    free(j.src);
    free(j.log);
    free(j.tmp);
    return rc;
}

int algo__user_open_c(struct algo_user *u, const char *dir) {
    char scratch[] = "/tmp/verlc_algo_XXXXXX";
    int rc = 0;
    if (!dir && !mkdtemp(scratch)) FAIL(ERR_IO, "%s: cannot make a directory in /tmp: %s", u->key, strerror(errno));
    if (dir && (rc = file_mkdirs(dir)) < 0) return err_wrap(rc, "%s", u->key);
    char *whole = realpath(dir ? dir : scratch, NULL);
    rc = whole ? build_in(u, whole) : err_set(ERR_IO, __FILE__, __LINE__, "%s: %s: %s", u->key, dir, strerror(errno));
    free(whole);
    if (!dir) (void)file_remove_tree(scratch); /* what is open stays */
    return rc;
}

void algo__user_close_c(struct algo_user *u) {
    if (u->so) dlclose(u->so);
    u->so = NULL;
}
