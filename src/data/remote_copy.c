/* remote_copy.c - what lies outside the local file system: the `hdfs` client, run as
 * verl's utils/hdfs_io.py and fs.py run it, and the copy of a prepared directory.
 * Invariant: a program that does not end is killed at its deadline. */
#include "data/data_int.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

#define HDFS_S 3600.0 /* a large file over a slow link */
#define HDFS_ADVICE "install the Hadoop client and put 'hdfs' into PATH, or give a local path"

int data__run(const char *const *argv, double timeout_s, const char *advice) {
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

bool data__is_hdfs(const char *path) { return strncmp(path, "hdfs://", 7) == 0; }

/* Fetched to a name of its own and then renamed: an interrupted copy is never taken for the file. */
static int fetch(const char *url, const char *dir, const char *to) {
    char *tmp = xasprintf("%s.%ld.tmp", to, (long)getpid());
    const char *const argv[] = {"hdfs", "dfs", "-get", url, tmp, NULL};
    int rc = 0;
    TRYG(file_mkdirs(dir), out);
    log_info("fetching %s", url);
    TRYG(data__run(argv, HDFS_S, HDFS_ADVICE), out);
    if (rename(tmp, to) != 0) FAILG(out, ERR_IO, "%s: %s", to, strerror(errno));
out:
    if (rc < 0) unlink(tmp);
    free(tmp);
    return rc;
}

int data__local_path(char **out, const char *path) {
    if (!data__is_hdfs(path)) {
        *out = file_expand(path);
        return 0;
    }
    char key[33];
    hash_hex(path, strlen(path), key);
    const char *base = strrchr(path, '/') + 1; /* "hdfs://" has one */
    char *root = file_expand("~/.cache/verl/rlhf"), *dir = file_join(root, key), *to = file_join(dir, base);
    const int rc = file_exists(to) ? 0 : fetch(path, dir, to);
    free(root);
    free(dir);
    if (rc == 0) *out = to;
    else free(to);
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
    if (!data__is_hdfs(to)) {
        char *local = file_expand(to);
        const int rc = copy_local(dir, local);
        free(local);
        return rc;
    }
    char *from = xasprintf("%s%s", dir[0] == '-' ? "./" : "", dir); /* not an option */
    const char *const make[] = {"hdfs", "dfs", "-mkdir", "-p", to, NULL};
    const char *const put[] = {"hdfs", "dfs", "-put", "-f", from, to, NULL};
    int rc = data__run(make, HDFS_S, HDFS_ADVICE);
    if (rc == 0) rc = data__run(put, HDFS_S, HDFS_ADVICE);
    free(from);
    return rc;
}
