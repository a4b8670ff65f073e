/* run_lock.c - see run_lock.h. */
#include "track/run_lock.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NAME "run.lock"
enum { MAX_TEXT = 64 << 10, MAX_COMMAND = 4096, SHOWN_COMMAND = 200 };

struct run_lock {
    char *key, *dir, *path;
    int fd; /* -1: not held */
};

/* ---- who holds it ---- */

/* Text for one line of a message: anything else but printable ASCII becomes a question mark. Takes s. */
static char *plain(char *s) {
    for (char *p = s; *p; p++)
        if (*p < ' ' || *p > '~') *p = '?';
    return s;
}

/* This process' arguments, separated by spaces. */
static char *own_command(void) {
    struct buf b = {0};
    if (file_read(&b, "/proc/self/cmdline", 0) < 0) buf_reset(&b);
    while (b.n > 0 && b.p[b.n - 1] == '\0') b.n--;
    if (b.n > MAX_COMMAND) b.n = MAX_COMMAND;
    for (size_t i = 0; i < b.n; i++)
        if (b.p[i] == '\0') b.p[i] = ' ';
    char *text = xstrndup(b.n > 0 ? b.p : "", b.n);
    buf_free(&b);
    return plain(text);
}

static char *own_host(void) {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    return plain(xstrdup(host));
}

static int write_holder(const struct run_lock *l) {
    char when[32], *host = own_host(), *command = own_command();
    const time_t now = (time_t)clock_wall();
    struct tm utc;
    struct buf b = {0};
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    json_t *o = json_pack("{s:I, s:s, s:s, s:s}", "pid", (json_int_t)getpid(), "host", host, "started", when, "command", command);
    free(command);
    free(host);
    CHECK(o);
    int rc = json_dump_line(&b, o);
    json_decref(o);
    if (rc == 0 && (pwrite(l->fd, b.p, b.n, 0) != (ssize_t)b.n || ftruncate(l->fd, (off_t)b.n) < 0 || fsync(l->fd) < 0))
        rc = err_set(ERR_IO, __FILE__, __LINE__, "%s=%s cannot be written: %s: %s", l->key, l->dir, NAME, strerror(errno));
    buf_free(&b);
    return rc;
}

/* Of a process of this machine that has exited: the text of the holder before this one, which was killed. */
static bool is_stale(const json_t *o) {
    char *here = own_host();
    const char *host = json_string_value(json_object_get(o, "host"));
    const pid_t pid = (pid_t)json_integer_value(json_object_get(o, "pid"));
    const bool exited = host && strcmp(host, here) == 0 && kill(pid, 0) < 0 && errno == ESRCH;
    free(here);
    return exited;
}

/* The holder's text, which it may not have written yet. */
static json_t *read_holder(const struct run_lock *l) {
    json_t *o = NULL;
    for (int tries = 0; tries < 50; tries++) {
        if (json_load(&o, l->path, MAX_TEXT) == 0 && !is_stale(o)) return o;
        json_decref(o);
        o = NULL;
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    return NULL;
}

static char *member(const json_t *o, const char *key, int longest) {
    const char *s = json_string_value(json_object_get(o, key));
    return plain(xasprintf("%.*s%s", longest, s ? s : "?", s && strlen(s) > (size_t)longest ? "..." : ""));
}

static int refuse(const struct run_lock *l) {
    json_t *o = read_holder(l);
    char *host = member(o, "host", 64), *when = member(o, "started", 32), *command = member(o, "command", SHOWN_COMMAND);
    err_set(ERR_IO, __FILE__, __LINE__,
            "%s=%s is in use by another run: pid %lld on %s, started %s: %s; wait for its end or stop it, or give another %s",
            l->key, l->dir, (long long)json_integer_value(json_object_get(o, "pid")), host, when, command, l->key);
    json_decref(o);
    free(host);
    free(when);
    free(command);
    return ERR_IO;
}

/* ---- taking it ---- */

/* Whether the file that is open is still the one of its name. */
static bool in_place(const struct run_lock *l) {
    struct stat open_file, named;
    return fstat(l->fd, &open_file) == 0 && stat(l->path, &named) == 0 && open_file.st_dev == named.st_dev &&
           open_file.st_ino == named.st_ino;
}

/* 0: held; 1: another process has it; ERR_IO. */
static int try_lock(struct run_lock *l) {
    l->fd = open(l->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (l->fd < 0) FAIL(ERR_IO, "%s=%s cannot be written: %s: %s", l->key, l->dir, NAME, strerror(errno));
    while (flock(l->fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno == EINTR) continue;
        if (errno == EWOULDBLOCK) return 1;
        log_warn("%s=%s: its file system has no locks (%s); make sure that no other run writes there", l->key, l->dir,
                 strerror(errno));
        break;
    }
    return 0;
}

static void let_go(struct run_lock *l) {
    if (l->fd >= 0) close(l->fd);
    l->fd = -1;
}

static int take(struct run_lock *l) {
    for (int tries = 0; tries < 10; tries++) {
        int rc = file_mkdirs(l->dir);
        if (rc < 0) return err_wrap(rc, "%s=%s cannot be written", l->key, l->dir);
        TRY(rc = try_lock(l));
        if (rc == 1) return refuse(l);
        if (in_place(l)) return write_holder(l);
        let_go(l); /* the directory was removed in between */
    }
    FAIL(ERR_IO, "%s=%s is removed again and again by another process", l->key, l->dir);
}

int run_lock_take(struct run_lock **out, const char *key, const char *dir) {
    struct run_lock *l = xcalloc(1, sizeof *l);
    *l = (struct run_lock){.key = xstrdup(key), .dir = xstrdup(dir), .path = file_join(dir, NAME), .fd = -1};
    const int rc = take(l);
    if (rc < 0) {
        let_go(l); /* before the release, which would clear another's text */
        run_lock_release(l);
        return rc;
    }
    *out = l;
    return 0;
}

int run_lock_hold(struct run_lock *l) {
    if (in_place(l)) return 0;
    log_warn("%s=%s was removed while this run writes there; it is made again", l->key, l->dir);
    let_go(l);
    return take(l);
}

static void copy_member(char *out, size_t size, const json_t *o, const char *key) {
    char *s = member(o, key, (int)size - 4);
    snprintf(out, size, "%s", s);
    free(s);
}

/* Tried only where a live process may hold it, so that a run that begins never meets the lock of this check. */
static bool is_locked(int fd) {
    if (flock(fd, LOCK_SH | LOCK_NB) == 0) return false;
    return errno == EWOULDBLOCK;
}

void run_lock_look(struct run_holder *out, const char *dir) {
    json_t *o = NULL;
    char *path = file_join(dir, NAME);
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    *out = (struct run_holder){.state = RUN_FREE};
    if (fd >= 0 && json_load(&o, path, MAX_TEXT) == 0) {
        out->state = !is_stale(o) && is_locked(fd) ? RUN_HELD : RUN_LEFT;
        out->pid = json_integer_value(json_object_get(o, "pid"));
        copy_member(out->host, sizeof out->host, o, "host");
        copy_member(out->started, sizeof out->started, o, "started");
        copy_member(out->command, sizeof out->command, o, "command");
    }
    if (fd >= 0) close(fd);
    json_decref(o);
    free(path);
}

void run_lock_release(struct run_lock *l) {
    if (!l) return;
    if (l->fd >= 0) (void)!ftruncate(l->fd, 0); /* nobody holds it */
    let_go(l);
    free(l->key);
    free(l->dir);
    free(l->path);
    free(l);
}
