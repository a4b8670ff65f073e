/* hf_hub.c - models and datasets of the Hugging Face hub: what the local cache has, and the download of the rest by a helper
 * (huggingface_hub does the work), with its progress.  Does not read what it fetched.
 * Invariant: a directory that is returned has every file that its patterns name, as far as the cache shows. */
#include "data/data.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "helper/helper.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    CALL_S = 180,  /* one question to the helper; listing a repository uses the network */
    STALL_S = 300, /* a download without progress for so long is aborted */
    LINE_S = 10    /* between lines in a pipe */
};

bool data_hub_id(const char *s) {
    const char *slash = strchr(s, '/');
    return slash && slash != s && slash[1] && !strchr(slash + 1, '/') && s[0] != '.' && s[0] != '~';
}

static char *cache_dir(void) {
    const char *c = getenv("HF_HUB_CACHE"), *h = getenv("HF_HOME");
    if (c && *c) return file_expand(c);
    if (h && *h) {
        char *home = file_expand(h), *hub = file_join(home, "hub");
        free(home);
        return hub;
    }
    return file_expand("~/.cache/huggingface/hub");
}

/* CACHE/models--USER--NAME/snapshots/REV, REV of refs/main; NULL if none. */
static char *snapshot_of(const char *kind, const char *id) {
    char *cache = cache_dir();
    const char *slash = strchr(id, '/');
    char *repo = xasprintf("%s/%ss--%.*s--%s", cache, kind, (int)(slash - id), id, slash + 1), *ref = file_join(repo, "refs/main");
    char *dir = NULL;
    struct buf rev = {0};
    if (file_exists(ref) && file_read(&rev, ref, 256) == 0) {
        rev.p[strcspn(rev.p, "\r\n")] = '\0';
        dir = xasprintf("%s/snapshots/%s", repo, rev.p);
        if (!file_is_dir(dir)) {
            free(dir);
            dir = NULL;
        }
    }
    buf_free(&rev);
    free(ref);
    free(repo);
    free(cache);
    return dir;
}

static bool has(const char *dir, const char *name) {
    char *path = file_join(dir, name);
    const bool yes = file_exists(path);
    free(path);
    return yes;
}

/* Every file that model.safetensors.index.json names is there. */
static bool has_shards(const char *dir) {
    char *path = file_join(dir, "model.safetensors.index.json");
    json_t *index = NULL, *shard;
    const char *name;
    bool all = json_load(&index, path, INT64_C(64) << 20) == 0 && json_is_object(json_object_get(index, "weight_map"));
    json_object_foreach(json_object_get(index, "weight_map"), name, shard) {
        all = all && json_is_string(shard) && has(dir, json_string_value(shard));
    }
    json_decref(index);
    free(path);
    return all;
}

static bool complete(const char *dir, enum data_hub_what what) {
    switch (what) {
    case DATA_HUB_MODEL: return has(dir, "config.json") && (has(dir, "model.safetensors") || has_shards(dir));
    case DATA_HUB_CONFIG: return has(dir, "config.json") && has(dir, "tokenizer_config.json");
    case DATA_HUB_DATASET:
    default: return true; /* as it was before: the rows say what is missing */
    }
}

static json_t *patterns(enum data_hub_what what, const char *folder) {
    json_t *p = json_array();
    if (what == DATA_HUB_DATASET) {
        json_array_append_new(p, json_sprintf("%s/*", folder));
        return p;
    }
    static const char *const small[] = {"*.json", "*.txt", "*.jinja", "*.model"};
    for (size_t k = 0; k < sizeof small / sizeof small[0]; k++) json_array_append_new(p, json_string(small[k]));
    if (what == DATA_HUB_MODEL) json_array_append_new(p, json_string("*.safetensors"));
    return p;
}

/* A line that moves on a terminal; in a pipe one now and then. */
static void progress(const char *id, double done, double total, double rate, double *last_line) {
    const double now = clock_now();
    const bool terminal = isatty(STDERR_FILENO);
    if (!terminal && now - *last_line < LINE_S) return;
    *last_line = now;
    struct buf b = {0};
    buf_addf(&b, "%s: %.2f of %.2f GiB", id, done / 0x1p30, total / 0x1p30);
    if (rate > 0) buf_addf(&b, ", %.1f MB/s, %.0f s left", rate / 1e6, (total - done) / rate);
    if (terminal) fprintf(stderr, "\r\033[K%s", b.p);
    else log_info("%s", b.p);
    buf_free(&b);
}

static int wait_for(struct helper *h, const char *id, double total, char **dir) {
    json_t *ask = json_pack("{s:s}", "op", "status");
    double last_line = clock_now(), begin = last_line, last_done = -1, last_move = begin;
    int rc = 0;
    while (!*dir) {
        json_t *reply = NULL;
        TRYG(helper_call(h, ask, CALL_S, &reply), out);
        const json_t *at = json_object_get(reply, "dir");
        const double now = clock_now(), done = json_number_value(json_object_get(reply, "done"));
        if (json_is_string(at)) *dir = xstrdup(json_string_value(at));
        json_decref(reply);
        if (*dir) break;
        if (done > last_done) last_move = now;
        last_done = done;
        progress(id, done, total, now - begin > 1 ? done / (now - begin) : 0, &last_line);
        if (now - last_move > STALL_S)
            FAILG(out, ERR_TIMEOUT, "%s: the download brought nothing for %d s; run it again, whole files are kept", id, STALL_S);
        usleep(now - begin < 2 ? 50000 : 500000);
    }
out:
    if (isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
    json_decref(ask);
    return rc;
}

/* part: a snapshot that lacks files, which is completed; NULL: there is none. */
static int fetch(const char *kind, const char *id, const char *part, json_t *files, char **dir) {
    struct helper *h = NULL;
    const char *slash = part ? strrchr(part, '/') : NULL;
    json_t *ask = json_pack("{s:s, s:s, s:s, s:s?, s:O}", "op", "start", "type", kind, "repo", id, "revision",
                            slash ? slash + 1 : NULL, "patterns", files),
           *reply = NULL;
    int rc = 0;
    if (!ask) FAILG(out, ERR_INVAL, "the name on the hub is not UTF-8");
    TRYG(helper_create(&h, &(struct helper_args){.module = "verlc_helpers.hub", .memory_bytes = -1}), out);
    TRYG(helper_call(h, ask, CALL_S, &reply), out);
    if (json_is_string(json_object_get(reply, "dir"))) {
        *dir = xstrdup(json_string_value(json_object_get(reply, "dir")));
        goto out;
    }
    const double total = json_number_value(json_object_get(reply, "total"));
    log_info("fetching %s %s from the hub: %lld files, %.2f GiB", kind, id,
             (long long)json_integer_value(json_object_get(reply, "files")), total / 0x1p30);
    TRYG(wait_for(h, id, total, dir), out);
    log_info("%s is in %s", id, *dir);
out:
    helper_destroy(h);
    json_decref(ask);
    json_decref(reply);
    return rc;
}

int data_hub_fetch(enum data_hub_what what, const char *id, const char *folder, char **dir) {
    const char *kind = what == DATA_HUB_DATASET ? "dataset" : "model";
    CHECK(data_hub_id(id));
    char *part = snapshot_of(kind, id);
    *dir = NULL;
    if (part && complete(part, what)) {
        *dir = part;
        return 0;
    }
    json_t *files = patterns(what, folder);
    int rc = fetch(kind, id, part, files, dir);
    json_decref(files);
    free(part);
    if (rc == 0 && what == DATA_HUB_MODEL && !complete(*dir, what))
        rc = err_set(ERR_UNSUPPORTED, __FILE__, __LINE__, "model %s: the hub has no config.json and *.safetensors of it", id);
    if (rc < 0) {
        free(*dir);
        *dir = NULL;
    }
    return rc;
}
