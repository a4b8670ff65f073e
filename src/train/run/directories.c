/* directories.c - the two directories of a run: where a model path leads (a
 * directory, or a snapshot in the local hub cache; nothing is downloaded), and the
 * one that the run writes to. */
#include "train/train.h"

#include "base/err.h"
#include "base/file.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static char *hub_cache(void) {
    const char *c = getenv("HF_HUB_CACHE"), *h = getenv("HF_HOME");
    if (c && *c) return xstrdup(c);
    if (h && *h) return file_join(h, "hub");
    return file_expand("~/.cache/huggingface/hub");
}

/* CACHE/models--USER--NAME/snapshots/REV, the newest REV; NULL if none. */
static char *newest_snapshot(const char *id) {
    char *cache = hub_cache(), *name = xstrdup(id);
    const char *slash = strchr(name, '/');
    char *dir = xasprintf("%s/models--%.*s--%s/snapshots", cache, (int)(slash - name), name, slash + 1), *best = NULL;
    time_t best_time = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        struct stat st;
        char *sub = file_join(dir, e->d_name);
        if (e->d_name[0] != '.' && stat(sub, &st) == 0 && S_ISDIR(st.st_mode) && (!best || st.st_mtime > best_time)) {
            free(best);
            best = xstrdup(sub);
            best_time = st.st_mtime;
        }
        free(sub);
    }
    if (d) closedir(d);
    free(dir);
    free(cache);
    free(name);
    return best;
}

int train_model_dir(const char *path, char **dir) {
    char *local = file_expand(path);
    if (file_is_dir(local)) {
        *dir = local;
        return 0;
    }
    const char *slash = strchr(path, '/');
    const bool hub_id = slash && path[0] != '/' && path[0] != '.' && path[0] != '~' && !strchr(slash + 1, '/');
    free(local);
    if (hub_id && (*dir = newest_snapshot(path))) return 0;
    if (hub_id)
        FAIL(ERR_INPUT,
             "model %s: no such directory, and no snapshot in the local hub cache; fetch it with "
             "'hf download %s', or make a random one with 'verlc model init --arch ... --out DIR'",
             path, path);
    FAIL(ERR_INPUT, "model %s: no such directory", path);
}

int train_run_dir(const char *key, const char *dir) {
    int rc = file_mkdirs(dir);
    char *probe = file_join(dir, ".write_test");
    if (rc == 0) rc = file_write_atomic(probe, "", 0);
    if (rc == 0) rc = file_remove_tree(probe);
    free(probe);
    if (rc < 0) return err_wrap(rc, "%s=%s cannot be written", key, dir);
    return 0;
}
