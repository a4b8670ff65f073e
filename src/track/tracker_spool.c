/* tracker_spool.c - the queue to a tracker's client: RUN_DIR/trackers/NAME.jsonl has the records, NAME.state.json how far they
 * are sent, which run of the tracker they belong to, and how that run has ended there:
 *   {"sent": number of the last record that was sent, "run": {"id": ...} or null, "end": "done" | "failed" | "killed" | null}
 *
 * Invariant: a record is in the file until the client has it; a crash at any moment leaves a file that is taken up, but for a
 * last line that was not written whole. */
#include "track/tracker_client_int.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_SPOOL ((int64_t)256 << 20) /* bytes not sent; a step's metrics are still taken up to twice that */
#define COMPACT ((int64_t)8 << 20)     /* sent bytes at the file's start that are worth removing */
#define MAX_STATE ((size_t)1 << 20)

static const int64_t MAX_SEQ = (int64_t)1 << 53; /* of a record: another one is not of this file */

struct client *client__new(const char *name, const char *run_dir) {
    struct client *c = xcalloc(1, sizeof *c);
    pthread_condattr_t attr;
    c->name = name;
    c->traces = strcmp(name, track_traces.name) == 0;
    c->fd = -1;
    c->most = CLIENT_BATCH_RECORDS;
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    c->run_dir = xstrdup(run_dir);
    c->path = xasprintf("%s/trackers/%s.jsonl", run_dir, name);
    c->state_path = xasprintf("%s/trackers/%s.state.json", run_dir, name);
    return c;
}

void client__free(struct client *c) {
    helper_pool_destroy(c->helper);
    if (c->fd >= 0) close(c->fd);
    json_decref(c->run);
    json_decref(c->end);
    free(c->run_dir);
    free(c->path);
    free(c->state_path);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* ---- appending ---- */

static int io_error(const struct client *c) { FAIL(ERR_IO, "%s: %s", c->path, strerror(errno)); }

/* A line that is not written whole is taken back. Under the lock. */
static int append(struct client *c, const struct buf *line) {
    const ssize_t n = write(c->fd, line->p, line->n);
    if (n == (ssize_t)line->n) {
        c->size += (int64_t)line->n;
        return 0;
    }
    const int e = n < 0 ? errno : ENOSPC;
    if (ftruncate(c->fd, c->size) < 0) log_debug("%s: %s", c->path, strerror(errno));
    errno = e;
    return io_error(c);
}

int client__spool(struct client *c, json_t *o, bool droppable) {
    struct buf line = {0};
    int rc = 0;
    pthread_mutex_lock(&c->lock);
    json_object_set_new(o, "seq", json_integer(c->last_seq + 1));
    TRYG(json_dump_line(&line, o), out);
    TRYG(buf_addc(&line, '\n'), out);
    if (c->size - c->at + (int64_t)line.n > (droppable ? MAX_SPOOL : 2 * MAX_SPOOL)) {
        if (c->n_dropped++ == 0)
            log_warn("tracker %s: %s has %lld MiB that could not be sent; further records are dropped until some are", c->name,
                     c->path, (long long)((c->size - c->at) >> 20));
        goto out;
    }
    TRYG(append(c, &line), out);
    c->last_seq++;
    c->n_unsent++;
    pthread_cond_broadcast(&c->changed);
out:
    pthread_mutex_unlock(&c->lock);
    buf_free(&line);
    json_decref(o);
    return rc;
}

void client__save_state(struct client *c) {
    json_t *o = json_pack("{s:I, s:O?}", "sent", (json_int_t)c->sent, "run", c->run);
    if (c->end) json_object_set(o, "end", c->end);
    if (json_save_atomic(c->state_path, o) < 0) log_debug("%s", err_msg());
    json_decref(o);
}

int client__compact(struct client *c) {
    struct buf rest = {0};
    int rc = 0;
    pthread_mutex_lock(&c->lock);
    if (c->at == c->size && c->size > 0) {
        if (ftruncate(c->fd, 0) == 0) c->size = c->at = 0;
    } else if (c->at > COMPACT && c->at > c->size / 2) {
        TRYG(file_read(&rest, c->path, 0), out);
        TRYG(file_write_atomic(c->path, rest.p + c->at, rest.n - (size_t)c->at), out);
        const int fd = open(c->path, O_RDWR | O_APPEND | O_CLOEXEC);
        if (fd < 0) {
            rc = io_error(c);
            goto out;
        }
        close(c->fd);
        c->fd = fd;
        c->size -= c->at;
        c->at = 0;
    }
out:
    pthread_mutex_unlock(&c->lock);
    buf_free(&rest);
    return rc;
}

/* ---- what is there ---- */

struct reading {
    struct client *c;
    int64_t sent, resume_step, n_kept, n_left;
    struct buf kept;
};
static int read_line(void *arg, char *line, size_t n, int64_t no) {
    struct reading *r = arg;
    json_t *o;
    int64_t seq, step;
    int rc = 0;
    (void)no;
    if (json_parse(&o, line, n, "") < 0) return 0; /* torn by a crash */
    if (json_i64(o, "seq", &seq, "") == 0 && json_i64(o, "step", &step, "") == 0 && seq <= MAX_SEQ) {
        if (seq > r->c->last_seq) r->c->last_seq = seq;
        if (seq > r->sent) r->n_left++;
        if (seq > r->sent && step <= r->resume_step) { /* later steps are made again */
            r->n_kept++;
            rc = buf_add(&r->kept, line, n);
            if (rc == 0) rc = buf_addc(&r->kept, '\n');
        }
    }
    json_decref(o);
    return rc;
}

/* NAME.state.json; false: there is none that can be read. run and end are borrowed from *state, the caller's. */
static bool read_state(const char *path, json_t **state, int64_t *sent) {
    *state = NULL;
    *sent = 0;
    if (!file_exists(path) || json_load(state, path, MAX_STATE) < 0) return false;
    if (json_i64(*state, "sent", sent, "") < 0 || *sent > MAX_SEQ) *sent = 0;
    return true;
}

int client__take_up(struct client *c, int64_t resume_step, int64_t *n_kept, int64_t *n_left) {
    struct reading r = {.c = c, .resume_step = resume_step};
    json_t *state;
    int rc = 0;
    if (read_state(c->state_path, &state, &r.sent) && resume_step > 0 && json_is_object(json_object_get(state, "run")))
        c->run = json_incref(json_object_get(state, "run"));
    json_decref(state);
    c->last_seq = c->sent = r.sent;
    c->end = json_null();
    if (file_exists(c->path)) rc = file_each_line(c->path, read_line, &r);
    if (rc == 0) rc = file_write_atomic(c->path, r.kept.p ? r.kept.p : "", r.kept.n);
    c->size = (int64_t)r.kept.n;
    c->n_unsent = *n_kept = r.n_kept;
    *n_left = r.n_left - r.n_kept;
    buf_free(&r.kept);
    TRY(rc);
    client__save_state(c);
    c->fd = open(c->path, O_RDWR | O_APPEND | O_CLOEXEC);
    return c->fd < 0 ? io_error(c) : 0;
}

struct counting {
    struct track_pending *p;
    int64_t sent;
};
static int count_line(void *arg, char *line, size_t n, int64_t no) {
    struct counting *g = arg;
    json_t *o;
    int64_t seq, step;
    (void)no;
    if (json_parse(&o, line, n, "") < 0) return 0;
    if (json_i64(o, "seq", &seq, "") == 0 && json_i64(o, "step", &step, "") == 0 && seq <= MAX_SEQ && seq > g->sent) {
        const char *kind = json_string_value(json_object_get(o, "kind"));
        if (g->p->n_records++ == 0 || step < g->p->first_step) g->p->first_step = step;
        if (g->p->n_records == 1 || step > g->p->last_step) g->p->last_step = step;
        g->p->n_metrics += kind && strcmp(kind, "metrics") == 0;
        g->p->bytes += (int64_t)n + 1;
    }
    json_decref(o);
    return 0;
}

int client__pending(struct track_pending *p, const char *name, const char *run_dir) {
    struct client *c = client__new(name, run_dir);
    struct counting g = {.p = p};
    json_t *state;
    *p = (struct track_pending){.name = name};
    const bool known = read_state(c->state_path, &state, &g.sent), there = file_exists(c->path);
    const json_t *end = json_object_get(state, "end");
    const char *id = json_string_value(json_object_get(json_object_get(state, "run"), "id"));
    p->sent = g.sent;
    if (id) snprintf(p->id, sizeof p->id, "%s", id);
    if (json_is_string(end)) snprintf(p->end, sizeof p->end, "%s", json_string_value(end));
    int rc = there ? file_each_line(c->path, count_line, &g) : 0;
    p->open = known && !c->traces && json_is_null(end);
    json_decref(state);
    client__free(c);
    TRY(rc);
    return known || there;
}

/* ---- taking records out ---- */

void client__next_batch(struct client *c, struct client_batch *b) {
    pthread_mutex_lock(&c->lock);
    const int64_t at = c->at, size = c->size;
    pthread_mutex_unlock(&c->lock);
    size_t want = (size_t)(size - at) < CLIENT_BATCH_BYTES ? (size_t)(size - at) : CLIENT_BATCH_BYTES, n = 0;
    char *p = NULL;
    *b = (struct client_batch){.records = json_array()};
    for (;;) { /* until a whole line is in it */
        p = xrealloc(p, want + 1);
        const ssize_t got = pread(c->fd, p + n, want - n, at + (int64_t)n);
        if (got > 0) n += (size_t)got;
        if (got <= 0 || memchr(p, '\n', n) || n == (size_t)(size - at)) break;
        want = want * 2 < (size_t)(size - at) ? want * 2 : (size_t)(size - at);
    }
    const char *line = p, *nl;
    while (b->n < c->most && line < p + n && (nl = memchr(line, '\n', (size_t)(p + n - line)))) {
        json_t *o;
        if (json_parse(&o, line, (size_t)(nl - line), c->path) < 0) o = json_null();
        b->seq[b->n] = json_integer_value(json_object_get(o, "seq"));
        b->end[b->n++] = at + (nl + 1 - p);
        json_array_append_new(b->records, o);
        line = nl + 1;
    }
    free(p);
}
