/* tool_journal.c - see tool_journal.h. What is written by this process is never asked for by it, so only what was there at the
 * start is kept in memory. A thread of its own waits for the disk, which may take longer than a step of the engine.
 * Invariant: a record's key holds a digest of what was asked, so another question has another key. */
#include "agent/tool_journal.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "base/map.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct tool_journal {
    char *dir;
    int fd; /* of the step's file; -1: none */
    int64_t step, forgotten;
    json_t *records; /* an array */
    struct map at;   /* key -> index in records */
    int64_t added;   /* records */
    bool has_thread;
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t work, done;
    int64_t wanted, synced; /* records that shall be, and that are, on disk */
    int failed;             /* errno of a write to disk */
    bool stop;
};

static char *file_of(const char *dir, int64_t step) { return xasprintf("%s/%lld.jsonl", dir, (long long)step); }

static char *key_text(const struct tool_journal_key *k) {
    return xasprintf("%s/%lld/%lld/%s/%016llx", k->episode, (long long)k->turn, (long long)k->call, k->name,
                     (unsigned long long)hash64(k->question, k->n));
}

/* ---- start ---- */

/* The step of a file's name; -1: it is none of ours. */
static int64_t step_of(const char *name) {
    char *end;
    const long long step = strtoll(name, &end, 10);
    return end != name && step >= 0 && strcmp(end, ".jsonl") == 0 ? step : -1;
}

static int read_line(void *arg, char *line, size_t n, int64_t no) {
    struct tool_journal *j = arg;
    json_t *v = json_loadb(line, n, 0, NULL);
    const char *key = json_string_value(json_object_get(v, "key"));
    (void)no;
    if (key) {
        map_set(&j->at, key, strlen(key), (int64_t)json_array_size(j->records));
        json_array_append(j->records, v);
    }
    json_decref(v);
    return 0;
}

static int remove_file(const char *path) {
    if (unlink(path) < 0 && errno != ENOENT) FAIL(ERR_IO, "cannot remove %s: %s", path, strerror(errno));
    return 0;
}

/* Removes the files of steps before `first`; the others are read where j->records is there to take them. */
static int each_file(struct tool_journal *j, int64_t first, bool read) {
    DIR *d = opendir(j->dir);
    int rc = 0;
    if (!d && errno == ENOENT) return 0;
    if (!d) FAIL(ERR_IO, "cannot read %s: %s", j->dir, strerror(errno));
    for (const struct dirent *e; rc == 0 && (e = readdir(d));) {
        const int64_t step = step_of(e->d_name);
        if (step < 0) continue;
        char *path = file_join(j->dir, e->d_name);
        if (step < first) rc = remove_file(path);
        else if (read) rc = file_each_line(path, read_line, j);
        free(path);
    }
    closedir(d);
    return rc;
}

int tool_journal_open(struct tool_journal **out, const char *dir, int64_t saved, bool fresh) {
    struct tool_journal *j = xcalloc(1, sizeof *j);
    *j = (struct tool_journal){.dir = xstrdup(dir), .fd = -1, .step = -1, .forgotten = saved, .records = json_array()};
    pthread_mutex_init(&j->lock, NULL);
    pthread_cond_init(&j->work, NULL);
    pthread_cond_init(&j->done, NULL);
    const int rc = each_file(j, fresh ? INT64_MAX : saved, true);
    if (rc < 0) {
        tool_journal_close(j);
        return rc;
    }
    if (j->at.n > 0) log_note("%lld answers of tools are in %s: their calls are not made again", (long long)j->at.n, dir);
    *out = j;
    return 0;
}

static void end_thread(struct tool_journal *j) {
    if (!j->has_thread) return;
    pthread_mutex_lock(&j->lock);
    j->stop = true;
    pthread_cond_signal(&j->work);
    pthread_mutex_unlock(&j->lock);
    pthread_join(j->thread, NULL);
    j->has_thread = false;
}

void tool_journal_close(struct tool_journal *j) {
    if (!j) return;
    end_thread(j);
    pthread_mutex_destroy(&j->lock);
    pthread_cond_destroy(&j->work);
    pthread_cond_destroy(&j->done);
    if (j->fd >= 0) close(j->fd);
    json_decref(j->records);
    map_free(&j->at);
    free(j->dir);
    free(j);
}

/* ---- records ---- */

static enum tool_status status_of(const char *name) {
    for (int s = TOOL_OK; name && s < TOOL_N_STATUS; s++)
        if (strcmp(tool_status_name((enum tool_status)s), name) == 0) return (enum tool_status)s;
    return TOOL_ERROR;
}

bool tool_journal_find(const struct tool_journal *j, const struct tool_journal_key *k, struct tool_result *out) {
    char *key = key_text(k);
    int64_t at;
    const bool there = map_gets(&j->at, key, &at);
    free(key);
    if (!there) return false;
    const json_t *v = json_array_get(j->records, (size_t)at), *text = json_object_get(v, "text");
    const json_t *reward = json_object_get(v, "reward");
    json_t *set = json_object_get(v, "set"), *removed = json_object_get(v, "removed");
    *out = (struct tool_result){.ticket = -1,
                                .status = status_of(json_string_value(json_object_get(v, "status"))),
                                .text = xmalloc(json_string_length(text) + 1),
                                .n_text = json_string_length(text),
                                .truncated = json_is_true(json_object_get(v, "truncated")),
                                .has_reward = json_is_number(reward),
                                .reward = json_number_value(reward),
                                .stop = json_is_true(json_object_get(v, "stop")),
                                .seconds = json_number_value(json_object_get(v, "seconds")),
                                .set = json_is_object(set) ? json_incref(set) : NULL,
                                .removed = json_is_array(removed) ? json_incref(removed) : NULL};
    memcpy(out->text, out->n_text ? json_string_value(text) : "", out->n_text + 1);
    return true;
}

/* The file of step k->step is the one that is open. */
static int open_step(struct tool_journal *j, int64_t step) {
    if (j->fd >= 0 && j->step == step) return 0;
    TRY(tool_journal_sync(j));
    if (j->fd >= 0) close(j->fd);
    j->fd = -1;
    TRY(file_mkdirs(j->dir));
    char *path = file_of(j->dir, step);
    j->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    const int why = errno;
    j->step = step;
    if (j->fd < 0) err_set(ERR_IO, __FILE__, __LINE__, "cannot write %s: %s", path, strerror(why));
    free(path);
    return j->fd < 0 ? ERR_IO : file_fsync_dir(j->dir);
}

static int write_all(const struct tool_journal *j, const char *p, size_t n) {
    while (n > 0) {
        const ssize_t did = write(j->fd, p, n);
        if (did < 0 && errno == EINTR) continue;
        if (did < 0) FAIL(ERR_IO, "cannot write %s/%lld.jsonl: %s", j->dir, (long long)j->step, strerror(errno));
        p += did;
        n -= (size_t)did;
    }
    return 0;
}

int tool_journal_add(struct tool_journal *j, const struct tool_journal_key *k, const struct tool_result *r) {
    TRY(open_step(j, k->step));
    char *key = key_text(k);
    json_t *v = json_pack("{s:s, s:s, s:s%, s:b, s:b, s:f, s:O?, s:O?}", "key", key, "status", tool_status_name(r->status), "text",
                          r->text ? r->text : "", r->n_text, "truncated", r->truncated, "stop", r->stop, "seconds", r->seconds,
                          "set", r->set, "removed", r->removed);
    free(key);
    CHECK(v != NULL);
    if (r->has_reward) json_object_set_new(v, "reward", json_real(r->reward));
    /* the newline in front ends a line that a killed process has left half written */
    char *text = json_dumps(v, JSON_COMPACT), *line = xasprintf("\n%s\n", text);
    const int rc = write_all(j, line, strlen(line));
    json_decref(v);
    free(text);
    free(line);
    j->added += rc == 0;
    return rc;
}

int64_t tool_journal_added(const struct tool_journal *j) { return j->added; }

/* ---- to the disk ---- */

static void *write_to_disk(void *arg) {
    struct tool_journal *j = arg;
    pthread_mutex_lock(&j->lock);
    while (!j->stop) {
        if (j->wanted == j->synced || j->failed) {
            pthread_cond_wait(&j->work, &j->lock);
            continue;
        }
        const int64_t upto = j->wanted;
        const int fd = j->fd; /* the same until all is synced: open_step */
        pthread_mutex_unlock(&j->lock);
        const int failed = fdatasync(fd) < 0 ? errno : 0;
        pthread_mutex_lock(&j->lock);
        j->failed = failed;
        if (!failed) j->synced = upto;
        pthread_cond_broadcast(&j->done);
    }
    pthread_mutex_unlock(&j->lock);
    return NULL;
}

/* Asks for all that was added, and waits for the number `until`. */
static int request(struct tool_journal *j, int64_t until, int64_t *synced) {
    if (!j->has_thread && j->added > 0) {
        const int why = pthread_create(&j->thread, NULL, write_to_disk, j);
        if (why) FAIL(ERR_INTERNAL, "no thread: %s", strerror(why));
        j->has_thread = true;
    }
    pthread_mutex_lock(&j->lock);
    if (j->wanted < j->added) pthread_cond_signal(&j->work);
    j->wanted = j->added;
    while (j->synced < until && !j->failed) pthread_cond_wait(&j->done, &j->lock);
    *synced = j->synced;
    const int failed = j->failed;
    pthread_mutex_unlock(&j->lock);
    if (failed) FAIL(ERR_IO, "cannot write %s/%lld.jsonl: %s", j->dir, (long long)j->step, strerror(failed));
    return 0;
}

int tool_journal_flush(struct tool_journal *j, bool wait, int64_t *synced) {
    TRY(request(j, 0, synced));
    return wait && *synced < j->added ? request(j, *synced + 1, synced) : 0;
}

int tool_journal_sync(struct tool_journal *j) {
    int64_t synced;
    return request(j, j->added, &synced);
}

int tool_journal_forget(struct tool_journal *j, int64_t saved) {
    if (saved <= j->forgotten) return 0;
    j->forgotten = saved;
    return each_file(j, saved, false);
}

int tool_journal_clear(struct tool_journal *j) {
    TRY(each_file(j, INT64_MAX, false));
    if (rmdir(j->dir) < 0 && errno != ENOENT) FAIL(ERR_IO, "cannot remove %s: %s", j->dir, strerror(errno));
    return 0;
}
