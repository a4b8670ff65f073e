/* remote_checkpoints.c - see remote_checkpoints.h. */
#include "run/remote_checkpoints.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "ckpt/ckpt.h"
#include "helper/helper.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define WORK ".remote" /* below the run's directory */
enum { TRIES = 3 };
static const double REQUEST_S = 300, LEAST_RATE = 2e6 /* bytes a second */, FIRST_WAIT_S = 10, LONGEST_WAIT_S = 300,
                    LAST_WAIT_S = 2;

struct copy {
    int64_t step; /* -1: none */
    int64_t bytes;
    char *dir;   /* hard links of it, which retention does not touch; else the checkpoint itself */
    bool linked; /* dir is to be removed */
};
struct remote {
    const char *url, *root;
    struct phases *stages;
    struct helper_pool *pool;
    struct copy now, next;
    int64_t there;   /* newest in the store, -1: none */
    int64_t skipped; /* for which a newer one came */
    int64_t failures;
    double again_at;
    bool closing;
};

static char *work_dir(const char *root, const char *what, int64_t step) {
    return xasprintf("%s/" WORK "/%s/global_step_%lld", root, what, (long long)step);
}

int remote_remove_left(const char *root) {
    char *dir = file_join(root, WORK);
    const int rc = file_remove_tree(dir);
    free(dir);
    return rc;
}

/* ---- requests ---- */

/* Waits for the one request that is under way; the watchdog gets a beat, and a signal ends the wait. */
static int wait_for(struct remote *r, json_t **reply) {
    struct helper_result got;
    while (helper_pool_recv(r->pool, 1, &got) == 0) {
        phase_beat(r->stages);
        if (!phase_stop_signal()) continue;
        helper_pool_cancel(r->pool);
        FAIL(ERR_SIGNAL, "stopped by %s", phase_signal_name(phase_stop_signal()));
    }
    const int rc = got.rc < 0 ? err_set(got.rc, __FILE__, __LINE__, "%s", got.error) : 0;
    if (rc == 0 && reply) *reply = json_incref(got.reply);
    helper_result_free(&got);
    return rc;
}

static int call_store(struct remote *r, json_t *request, double timeout_s, json_t **reply) {
    int64_t ticket;
    if (!request) FAIL(ERR_INVAL, "trainer.default_hdfs_dir: not UTF-8");
    int rc = helper_pool_send(r->pool, request, timeout_s, &ticket);
    json_decref(request);
    if (rc == 0) rc = wait_for(r, reply);
    return rc;
}

/* A store that is the run's own directory would damage a checkpoint by copying it onto itself. */
static int check_place(const char *url, const char *root) {
    char *path = file_expand(strncmp(url, "file://", 7) == 0 ? url + 7 : url), *there = realpath(path, NULL),
         *here = realpath(root, NULL);
    const bool same = there && here && strcmp(there, here) == 0;
    free(path);
    free(there);
    free(here);
    if (same) FAIL(ERR_INVAL, "trainer.default_hdfs_dir=%s is trainer.default_local_dir; give another directory, or null", url);
    return 0;
}

int remote_open(struct remote **out, const char *url, const char *root, struct phases *s) {
    static const struct helper_pool_args one = {.n = 1};
    const struct helper_args a = {.module = "verlc_helpers.remote_store", .log_as = "store", .memory_bytes = -1};
    TRY(check_place(url, root));
    struct remote *r = xcalloc(1, sizeof *r);
    *r = (struct remote){.url = url, .root = root, .stages = s, .now = {.step = -1}, .next = {.step = -1}, .there = -1};
    *out = r;
    return helper_pool_create(&r->pool, &a, &one);
}

/* ---- from the store ---- */

static int fetch_step(struct remote *r, int64_t step, int64_t bytes) {
    char *dir = work_dir(r->root, "downloads", step);
    int rc = 0;
    log_info("fetching global_step_%lld from %s: %.2f GB", (long long)step, r->url, 1e-9 * (double)bytes);
    for (int i = 0; i < TRIES; i++) {
        TRYG(file_remove_tree(dir), out);
        rc = call_store(r, json_pack("{s:s, s:s, s:I, s:s}", "op", "take", "url", r->url, "step", (json_int_t)step, "to", dir),
                        REQUEST_S + (double)bytes / LEAST_RATE, NULL);
        if (rc == 0 || rc == ERR_FORMAT || rc == ERR_SIGNAL) break;
    }
    TRYG(rc, out);
    TRYG(ckpt_adopt(r->root, dir, step), out);
out:
    free(dir);
    return rc;
}

/* The newest that is whole, of those that the store has above `after`; *taken: there was one. */
static int fetch_newest(struct remote *r, const json_t *steps, bool *taken) {
    const json_t *entry;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)steps, i, entry) {
        const int64_t step = json_integer_value(json_object_get(entry, "step"));
        const int rc = fetch_step(r, step, json_integer_value(json_object_get(entry, "bytes")));
        if (rc == 0) *taken = true;
        if (rc == 0) return 0;
        if (rc != ERR_FORMAT) return err_wrap(rc, "global_step_%lld of trainer.default_hdfs_dir", (long long)step);
        log_warn("%s/global_step_%lld is not usable (%s); trying the one before it", r->url, (long long)step, err_msg());
    }
    return 0;
}

int remote_resume(struct remote *r, struct resume *from, const struct resume_args *a) {
    json_t *reply = NULL;
    bool taken = false;
    int rc = 0;
    const bool fresh = strcmp(a->mode, "disable") == 0, newest = strcmp(a->mode, "auto") == 0;
    if (fresh) TRYG(call_store(r, json_pack("{s:s, s:s}", "op", "forget", "url", r->url), REQUEST_S, NULL), out);
    TRYG(call_store(r,
                    json_pack("{s:s, s:s, s:I, s:b}", "op", "newest", "url", r->url, "after",
                              (json_int_t)(newest ? from->step : -1), "write", true),
                    REQUEST_S, &reply),
         out);
    const json_t *latest = json_object_get(reply, "latest");
    r->there = json_is_integer(latest) ? json_integer_value(latest) : -1;
    if (newest) TRYG(fetch_newest(r, json_object_get(reply, "steps"), &taken), out);
    TRYG(remote_remove_left(r->root), out);
    if (taken) {
        resume_free(from);
        TRYG(resume_find(from, a), out);
    }
out:
    json_decref(reply);
    if (rc < 0 && rc != ERR_SIGNAL)
        rc = err_append(err_wrap(rc, "trainer.default_hdfs_dir=%s", r->url), "; a run does not start without its store");
    return rc;
}

/* ---- to the store ---- */

/* Links the files below from, under `to`; *bytes gets their sizes. false: the file system has no hard links. */
static bool link_tree(const char *from, const char *to, int64_t *bytes) {
    DIR *d = file_mkdirs(to) == 0 ? opendir(from) : NULL;
    bool good = d != NULL;
    for (struct dirent *e; good && (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        char *a = file_join(from, e->d_name), *b = file_join(to, e->d_name);
        if (file_is_dir(a)) good = link_tree(a, b, bytes);
        else {
            *bytes += file_size(a);
            good = link(a, b) == 0;
        }
        free(a);
        free(b);
    }
    if (d) closedir(d);
    return good;
}

static struct copy hold(const struct remote *r, int64_t step) {
    char *source = xasprintf("%s/global_step_%lld", r->root, (long long)step), *links = work_dir(r->root, "uploads", step);
    struct copy c = {.step = step, .linked = true};
    (void)file_remove_tree(links);
    if (link_tree(source, links, &c.bytes)) {
        c.dir = links;
        free(source);
        return c;
    }
    (void)file_remove_tree(links);
    free(links);
    c.dir = source;
    c.linked = false;
    return c;
}

static void drop(struct copy *c) {
    if (c->step >= 0 && c->linked && file_remove_tree(c->dir) < 0) log_warn("%s", err_msg());
    free(c->dir);
    *c = (struct copy){.step = -1};
}

static void begin(struct remote *r) {
    if (r->now.step >= 0 || r->next.step < 0 || clock_now() < r->again_at) return;
    r->now = r->next;
    r->next = (struct copy){.step = -1};
    char *notes = file_join(r->root, WORK "/notes");
    json_t *request = json_pack("{s:s, s:s, s:I, s:s, s:s}", "op", "put", "url", r->url, "step", (json_int_t)r->now.step, "from",
                                r->now.dir, "notes", notes);
    int64_t ticket;
    if (!request || helper_pool_send(r->pool, request, REQUEST_S + (double)r->now.bytes / LEAST_RATE, &ticket) < 0) {
        log_warn("global_step_%lld is not copied to %s: %s", (long long)r->now.step, r->url, err_msg());
        drop(&r->now);
    }
    json_decref(request);
    free(notes);
}

/* The one that failed waits for another try, unless a newer one does. */
static void failed(struct remote *r, const char *why) {
    if (r->failures++ == 0)
        log_warn("global_step_%lld was not copied to %s: %s; it is tried again, and training goes on", (long long)r->now.step,
                 r->url, why);
    double wait = FIRST_WAIT_S;
    for (int64_t i = 1; i < r->failures && wait < LONGEST_WAIT_S; i++) wait *= 2;
    if (wait > LONGEST_WAIT_S) wait = LONGEST_WAIT_S;
    r->again_at = clock_now() + (r->closing ? LAST_WAIT_S : wait);
    if (r->next.step < 0) {
        r->next = r->now;
        r->now = (struct copy){.step = -1};
    } else {
        r->skipped++;
        drop(&r->now);
    }
}

static int64_t arrived(struct remote *r) {
    const int64_t step = r->there = r->now.step;
    if (r->failures > 0) log_info("global_step_%lld is in %s now", (long long)step, r->url);
    r->failures = 0;
    drop(&r->now);
    return step;
}

static int64_t poll_for(struct remote *r, double wait_s) {
    struct helper_result got;
    int64_t step = -1;
    if (r->now.step >= 0 && helper_pool_recv(r->pool, wait_s, &got) == 1) {
        if (got.rc < 0) failed(r, got.error);
        else step = arrived(r);
        helper_result_free(&got);
    }
    begin(r);
    return step;
}

int64_t remote_poll(struct remote *r) { return r ? poll_for(r, 0) : -1; }

void remote_put(struct remote *r, int64_t step) {
    if (!r) return;
    if (r->next.step >= 0 && r->skipped++ == 0)
        log_note("global_step_%lld is not copied to %s: a newer one is there before its turn; so are others from now on",
                 (long long)r->next.step, r->url);
    drop(&r->next);
    if (r->there == step) r->there = -1; /* one of that number, which this replaces */
    r->next = hold(r, step);
    begin(r);
}

void remote_put_missing(struct remote *r, int64_t step) {
    char *dir = r && step >= 0 ? xasprintf("%s/global_step_%lld", r->root, (long long)step) : NULL;
    if (dir && r->there != step && file_is_dir(dir)) remote_put(r, step);
    free(dir);
}

static void wait_for_last(struct remote *r) {
    const int before = phase_stop_signal();
    const int64_t last = r->next.step >= 0 ? r->next.step : r->now.step;
    if (last < 0) return;
    log_info("copying global_step_%lld to %s; the run ends when it is there", (long long)last, r->url);
    r->closing = true;
    r->again_at = 0;
    if (r->failures > 1) r->failures = 1;
    while (r->there != last && r->failures < 1 + TRIES && phase_stop_signal() == before) {
        if (r->now.step >= 0) poll_for(r, 1);
        else {
            usleep(200000);
            begin(r);
        }
        phase_beat(r->stages);
    }
    if (r->there != last)
        log_warn("global_step_%lld is in %s and not in %s; a run that is started again there copies it", (long long)last, r->root,
                 r->url);
}

void remote_close(struct remote *r) {
    if (!r) return;
    if (r->pool) wait_for_last(r);
    helper_pool_destroy(r->pool);
    drop(&r->now);
    drop(&r->next);
    if (remote_remove_left(r->root) < 0) log_warn("%s", err_msg());
    free(r);
}
