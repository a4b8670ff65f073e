/* directories.c - see directories.h. A model path is a directory, a checkpoint of verl's, a hub id or a place in another store,
 * which data fetches. */
#include "run/directories.h"

#include "base/err.h"
#include "base/file.h"
#include "data/data.h"
#include "model/files/shards.h"

#include <stdlib.h>

/* A directory of verl's ranks means its huggingface/, from where the loader finds the shards. */
static char *config_dir(char *local) {
    char *config = file_join(local, "config.json");
    const bool model = file_exists(config);
    free(config);
    if (model) return local;
    char *shards = shards_find_dir(local);
    char *dir = shards ? shards_config_dir(shards) : shards_saved_model(local);
    free(shards);
    if (!dir) return local;
    free(local);
    return dir;
}

int run_model_dir(const char *path, bool weights, char **dir) {
    char *local;
    if (!data_is_remote(path)) local = file_expand(path);
    else TRY(data_remote_fetch(path, &local));
    if (file_is_dir(local)) {
        *dir = config_dir(local);
        return 0;
    }
    const bool file = file_exists(local);
    free(local);
    if (file) FAIL(ERR_INPUT, "model %s: it is a file; give the directory that holds config.json and the weights", path);
    if (!data_hub_id(path)) FAIL(ERR_INPUT, "model %s: no such directory, nor a hub id such as Qwen/Qwen2.5-0.5B-Instruct", path);
    const int rc = data_hub_fetch(weights ? DATA_HUB_MODEL : DATA_HUB_CONFIG, path, NULL, dir);
    return rc < 0 ? err_append(rc, "; nor is there a directory of that name") : 0;
}

int run_model_weights(const char *key, const char *path, const char *dir) {
    char *same = NULL;
    if (!dir) return 0;
    const int rc = run_model_dir(path, true, &same);
    free(same);
    return rc < 0 ? err_wrap(rc, "%s", key) : 0;
}

int run_directory(const char *key, const char *dir) {
    int rc = file_mkdirs(dir);
    char *probe = file_join(dir, ".write_test");
    if (rc == 0) rc = file_write_atomic(probe, "", 0);
    if (rc == 0) rc = file_remove_tree(probe);
    free(probe);
    if (rc < 0) return err_wrap(rc, "%s=%s cannot be written", key, dir);
    return 0;
}

bool run_val_files(const struct conf *c, const char *const *files, int64_t n) {
    return n > 0 && (conf_is_set(c, "data.val_files") || file_exists(files[0]));
}

int run_check_files(const char *key, const char *const *files, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const int rc = data_is_remote(files[i]) ? 0 : file_check(files[i]); /* what is elsewhere is fetched when it is read */
        if (rc < 0) return err_wrap(rc, "%s", key);
    }
    return 0;
}
