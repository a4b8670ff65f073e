/* remote_copy.c - what lies outside the local file system: the `hdfs` client, run as verl's utils/hdfs_io.py and fs.py run it, a
 * helper for the stores of fsspec, and the copy of a prepared directory. A copy that is in the cache is taken as it is.
 * Invariants: a program that does not end is killed at its deadline; what has its name in the cache is whole. */
#include "data/data_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "helper/helper.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

#define HDFS_S 3600.0   /* a large file over a slow link */
#define FETCH_S 86400.0 /* a model */
#define HDFS_ADVICE "install the Hadoop client and put 'hdfs' into PATH, or give a local path"

/* Runs argv[0] from PATH with its output on our stderr. ERR_HELPER names the
 * program and how it ended, or that it is not installed (with `advice`). */
static int run_program(const char *const *argv, double timeout_s, const char *advice) {
    pid_t pid;
    int status = 0;
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t at;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_addopen(&fa, 0, "/dev/null", 0, 0);
    posix_spawn_file_actions_adddup2(&fa, 2, 1); /* stdout carries results only */
    posix_spawnattr_init(&at);
    posix_spawnattr_setflags(&at, POSIX_SPAWN_SETPGROUP);
    const int e = posix_spawnp(&pid, argv[0], &fa, &at, (char *const *)(uintptr_t)argv, environ);
    posix_spawn_file_actions_destroy(&fa);
    posix_spawnattr_destroy(&at);
    if (e != 0) FAIL(ERR_HELPER, "cannot run '%s': %s; %s", argv[0], strerror(e), advice);
    const double deadline = clock_awake() + timeout_s;
    for (;;) {
        const pid_t got = waitpid(pid, &status, WNOHANG);
        if (got == pid) break;
        if (got < 0 && errno != EINTR) FAIL(ERR_INTERNAL, "waitpid: %s", strerror(errno));
        if (clock_awake() > deadline) {
            kill(-pid, SIGKILL);
            waitpid(pid, &status, 0);
            FAIL(ERR_TIMEOUT, "'%s %s' did not end within %g s and was killed", argv[0], argv[1] ? argv[1] : "", timeout_s);
        }
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
    struct buf line = {0};
    for (int i = 0; argv[i]; i++) buf_addf(&line, "%s%s", i ? " " : "", argv[i]);
    const int rc = WIFEXITED(status)
                       ? err_set(ERR_HELPER, __FILE__, __LINE__, "'%s' ended with exit code %d; its own message is above; %s",
                                 line.p, WEXITSTATUS(status), advice)
                       : err_set(ERR_HELPER, __FILE__, __LINE__, "'%s' was ended by signal %d", line.p, WTERMSIG(status));
    buf_free(&line);
    return rc;
}

static bool is_hdfs(const char *path) { return strncmp(path, "hdfs://", 7) == 0; }

bool data_is_remote(const char *path) {
    const char *colon = strstr(path, "://");
    for (const char *p = path; colon && p < colon; p++)
        if (!isalnum((unsigned char)*p) && *p != '+' && *p != '.' && *p != '-') return false;
    return colon && colon != path;
}

/* hdfs:// by its client, the rest by a helper, which has fsspec. */
static int copy_from(const char *url, const char *to) {
    const char *const argv[] = {"hdfs", "dfs", "-get", url, to, NULL};
    if (is_hdfs(url)) return run_program(argv, FETCH_S, HDFS_ADVICE);
    struct helper *h = NULL;
    json_t *ask = json_pack("{s:s, s:s, s:s}", "op", "fetch", "url", url, "to", to), *reply = NULL;
    int rc = 0;
    if (!ask) FAILG(out, ERR_INVAL, "%s: not UTF-8", url);
    TRYG(helper_create(&h, &(struct helper_args){.module = "verlc_helpers.remote_store", .memory_bytes = -1}), out);
    TRYG(helper_call(h, ask, FETCH_S, &reply), out);
out:
    helper_destroy(h);
    json_decref(ask);
    json_decref(reply);
    return rc;
}

/* Fetched to a name of its own and then renamed: an interrupted copy is never taken for the file. */
static int fetch_as(const char *url, const char *to) {
    int rc = 0;
    char *tmp = file_temp_path(to);
    log_info("fetching %s", url);
    TRYG(copy_from(url, tmp), out);
    if (rename(tmp, to) != 0) FAILG(out, ERR_IO, "%s: %s", to, strerror(errno));
out:
    if (rc < 0) {
        struct err_saved why;
        err_save(&why);
        (void)file_remove_tree(tmp);
        err_restore(&why);
    }
    free(tmp);
    return rc;
}

/* One at a time: another process that wants the same waits for the first. */
static int fetch(const char *url, const char *dir, const char *to) {
    int rc = 0;
    TRY(file_mkdirs(dir));
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) FAIL(ERR_IO, "%s: %s", dir, strerror(errno));
    const double deadline = clock_awake() + FETCH_S;
    while (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK && errno != EINTR) break; /* no locks on this file system */
        if (clock_awake() > deadline) FAILG(out, ERR_TIMEOUT, "%s: another process has fetched it for %g s", url, FETCH_S);
        nanosleep(&(struct timespec){0, 100000000}, NULL);
    }
    if (file_exists(to)) goto out;
    TRYG(file_remove_temps(dir), out);
    rc = fetch_as(url, to);
out:
    close(fd);
    return rc;
}

int data__local_path(char **out, const char *path) {
    if (!data_is_remote(path)) {
        *out = file_expand(path);
        return 0;
    }
    return data_remote_fetch(path, out);
}

int data_remote_fetch(const char *url, char **local) {
    size_t n = strlen(url);
    while (n > 0 && url[n - 1] == '/') n--;
    char *path = xstrndup(url, n), key[33], *base = strrchr(path, '/');
    int rc = 0;
    *local = NULL;
    if (!base || !base[1] || base[-1] == '/' || strcmp(base + 1, "..") == 0 || strcmp(base + 1, ".") == 0)
        FAILG(out, ERR_INPUT, "%s: it names no file of a store", url);
    hash_hex(path, n, key);
    char *root = file_expand("~/.cache/verl/rlhf"), *dir = file_join(root, key), *to = file_join(dir, base + 1);
    rc = file_exists(to) ? 0 : fetch(path, dir, to);
    free(root);
    free(dir);
    if (rc == 0) *local = to;
    else free(to);
out:
    free(path);
    return rc;
}

static int copy_local(const char *dir, const char *to) {
    TRY(file_mkdirs(to));
    DIR *d = opendir(dir);
    if (!d) FAIL(ERR_IO, "%s: %s", dir, strerror(errno));
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        char *src = file_join(dir, e->d_name), *dst = file_join(to, e->d_name);
        struct buf b = {0};
        if (!file_is_dir(src)) {
            rc = file_read(&b, src, 0);
            if (rc == 0) rc = file_write_atomic(dst, b.p, b.n);
        }
        buf_free(&b);
        free(src);
        free(dst);
    }
    closedir(d);
    return rc;
}

int data__copy_dir(const char *dir, const char *to) {
    if (!is_hdfs(to)) {
        char *local = file_expand(to);
        const int rc = copy_local(dir, local);
        free(local);
        return rc;
    }
    char *from = xasprintf("%s%s", dir[0] == '-' ? "./" : "", dir); /* not an option */
    const char *const make[] = {"hdfs", "dfs", "-mkdir", "-p", to, NULL};
    const char *const put[] = {"hdfs", "dfs", "-put", "-f", from, to, NULL};
    int rc = run_program(make, HDFS_S, HDFS_ADVICE);
    if (rc == 0) rc = run_program(put, HDFS_S, HDFS_ADVICE);
    free(from);
    return rc;
}
