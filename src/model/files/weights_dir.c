/* weights_dir.c - the weights of a Hugging Face directory by their names, whatever files they are in: model.safetensors, the shards
 * of its index, or the files of verl's ranks; and the directory's fingerprint. What a tensor means to a model is load.c's.
 *
 * Invariant: a tensor that is found stays readable until the directory is closed. */
#include "model/files/weights_dir.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "model/files/load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SHARDS = 4096, MAX_INDEX_BYTES = 256 << 20 };

void weights_dir_close(struct weights_dir *w) {
    for (int64_t i = 0; i < w->n; i++) {
        safetensors_close(w->files[i]);
        free(w->paths[i]);
    }
    free(w->files);
    free(w->paths);
    map_free(&w->by_name);
    shards_close(w->shards);
    free(w->whole);
}

static int add_file(struct weights_dir *w, int64_t *cap, char *path) {
    int64_t cap_paths = *cap;
    xgrow((void **)&w->files, cap, w->n + 1, sizeof *w->files);
    xgrow((void **)&w->paths, &cap_paths, w->n + 1, sizeof *w->paths);
    w->files[w->n] = NULL;
    w->paths[w->n++] = path;
    return safetensors_open(&w->files[w->n - 1], path);
}

static int open_index(struct weights_dir *w, const char *dir, const char *path) {
    int rc = 0;
    json_t *index = NULL, *file;
    struct map files = {0};
    const char *name;
    int64_t cap = 0;
    TRYG(json_load(&index, path, MAX_INDEX_BYTES), out);
    json_t *weight_map = json_object_get(index, "weight_map");
    if (!json_is_object(weight_map)) FAILG(out, ERR_FORMAT, "%s: no \"weight_map\"", path);
    json_object_foreach(weight_map, name, file) {
        const char *shard = json_string_value(file);
        if (!shard || !*shard || strchr(shard, '/') || shard[0] == '.')
            FAILG(out, ERR_FORMAT, "%s: tensor %s: not the name of a file next to the index", path, name);
        int64_t i;
        if (!map_gets(&files, shard, &i)) {
            if (w->n >= MAX_SHARDS) FAILG(out, ERR_UNSUPPORTED, "%s: unsupported: more than %d shards", path, MAX_SHARDS);
            i = w->n;
            map_set(&files, shard, strlen(shard), i);
            char *at;
            TRYG(file_in_dir(&at, dir, shard), out);
            TRYG(add_file(w, &cap, at ? at : file_join(dir, shard)), out);
        }
        map_set(&w->by_name, name, strlen(name), i);
    }
out:
    map_free(&files);
    json_decref(index);
    return rc;
}

/* The files of verl's ranks; dir has their config.json. */
static int open_shards(struct weights_dir *w, const char *shards, const char *dir) {
    w->paths = xcalloc(1, sizeof *w->paths);
    w->files = xcalloc(1, sizeof *w->files);
    w->paths[w->n++] = xstrdup(shards);
    TRY(shards_open(&w->shards, &(struct shards_args){.dir = shards, .config_dir = dir}));
    if (shards_has_adapter(w->shards))
        FAIL(ERR_UNSUPPORTED,
             "%s: unsupported as a model: the checkpoint of a LoRA run, whose base model and adapter are separate; give the base "
             "model and "
             "%s/lora_adapter as the adapter (lora_adapter_path), or 'verlc model_merger merge --backend fsdp --local_dir %s "
             "--target_dir OUT', then 'verlc model merge --model OUT --adapter OUT/lora_adapter --out DIR'",
             shards, shards, shards);
    w->whole = xcalloc((size_t)shards_count(w->shards), sizeof *w->whole);
    for (int64_t i = 0; i < shards_count(w->shards); i++) {
        const struct shards_tensor *t = shards_at(w->shards, i);
        w->whole[i] = (struct safetensors_tensor){.name = t->name, .dt = t->dt, .nd = t->nd};
        memcpy(w->whole[i].dim, t->dim, sizeof t->dim);
    }
    return 0;
}

int weights_dir_open(struct weights_dir *w, const char *dir) {
    int rc = 0;
    int64_t cap = 0;
    char *index = NULL, *one = NULL, *shards = NULL, *pickle = file_join(dir, "pytorch_model.bin");
    TRYG(file_in_dir(&index, dir, "model.safetensors.index.json"), out);
    TRYG(file_in_dir(&one, dir, "model.safetensors"), out);
    if (index) TRYG(open_index(w, dir, index), out);
    else if (one) TRYG(add_file(w, &cap, xstrdup(one)), out);
    else if ((shards = shards_find_dir(dir))) TRYG(open_shards(w, shards, dir), out);
    else if (file_exists(pickle))
        FAILG(out, ERR_UNSUPPORTED, "%s: unsupported pickled weights; save the model as safetensors first", pickle);
    else FAILG(out, ERR_INPUT, "%s: neither model.safetensors nor model.safetensors.index.json", dir);
out:
    free(index);
    free(one);
    free(pickle);
    free(shards);
    return rc;
}

const struct safetensors_tensor *weights_dir_find(void *arg, const char *name) {
    const struct weights_dir *w = arg;
    int64_t i = 0;
    if (w->shards) {
        const struct shards_tensor *t = shards_find(w->shards, name);
        return t ? &w->whole[t - shards_at(w->shards, 0)] : NULL;
    }
    if (w->by_name.n > 0 && !map_gets(&w->by_name, name, &i)) return NULL;
    return safetensors_find(w->files[i], name);
}

const struct safetensors_tensor *weights_dir_at(const struct weights_dir *w, int64_t f, int64_t i) {
    return w->shards ? &w->whole[i] : safetensors_at(w->files[f], i);
}
int64_t weights_dir_count(const struct weights_dir *w, int64_t f) {
    return w->shards ? shards_count(w->shards) : safetensors_count(w->files[f]);
}

/* ---- fingerprint ---- */

enum { PRINT_BYTES = 1024 }; /* at each of three places of a tensor */

struct print_tensor {
    const struct safetensors_tensor *t;
    const struct shards_tensor *parts; /* NULL: t has its data */
};

static int by_tensor_name(const void *a, const void *b) {
    return strcmp(((const struct print_tensor *)a)->t->name, ((const struct print_tensor *)b)->t->name);
}

/* Of all files, in the order of their names; caller frees. */
static struct print_tensor *list_tensors(const struct weights_dir *w, int64_t *n) {
    struct print_tensor *list = NULL;
    int64_t cap = 0;
    *n = 0;
    for (int64_t f = 0; f < w->n; f++) {
        const int64_t count = weights_dir_count(w, f);
        xgrow((void **)&list, &cap, *n + count, sizeof *list);
        for (int64_t i = 0; i < count; i++)
            list[(*n)++] = (struct print_tensor){weights_dir_at(w, f, i), w->shards ? shards_at(w->shards, i) : NULL};
    }
    if (*n > 1) qsort(list, (size_t)*n, sizeof *list, by_tensor_name);
    return list;
}

static void print_tensor(struct hash_stream *h, const struct print_tensor *p) {
    const struct safetensors_tensor *t = p->t;
    const size_t size = dtype_size(t->dt);
    int64_t all = 1;
    for (int i = 0; i < t->nd; i++) all *= t->dim[i];
    const int64_t n = all < PRINT_BYTES / (int64_t)size ? all : PRINT_BYTES / (int64_t)size;
    const int64_t at[] = {0, (all - n) / 2, all - n};
    char *head = xasprintf("%s %s %lld", t->name, dtype_name(t->dt), (long long)t->nd);
    _Alignas(16) char value[PRINT_BYTES];
    hash_stream_add(h, head, strlen(head) + 1);
    hash_stream_add(h, t->dim, (size_t)t->nd * sizeof *t->dim);
    for (size_t i = 0; i < sizeof at / sizeof *at && n > 0; i++) {
        if (p->parts) shards_read(p->parts, at[i], n, value);
        else memcpy(value, t->data + (size_t)at[i] * size, (size_t)n * size);
        hash_stream_add(h, value, (size_t)n * size);
    }
    free(head);
}

static int print_config(struct hash_stream *h, const char *dir) {
    char *path = NULL, *text;
    json_t *config = NULL;
    TRY(file_in_dir(&path, dir, "config.json"));
    if (!path) FAIL(ERR_INPUT, "%s: no config.json", dir);
    const int rc = json_load(&config, path, 1 << 20);
    free(path);
    TRY(rc);
    json_object_del(config, "_name_or_path");
    json_object_del(config, "transformers_version");
    text = json_dumps(config, JSON_SORT_KEYS | JSON_COMPACT | JSON_ENCODE_ANY);
    if (text) hash_stream_add(h, text, strlen(text));
    free(text);
    json_decref(config);
    return 0;
}

int model_fingerprint(const char *dir, char out[33]) {
    struct weights_dir w = {0};
    struct hash_stream *h = hash_stream_new();
    int64_t n;
    int rc = 0;
    TRYG(print_config(h, dir), out);
    TRYG(weights_dir_open(&w, dir), out);
    struct print_tensor *list = list_tensors(&w, &n);
    for (int64_t i = 0; i < n; i++) print_tensor(h, &list[i]);
    free(list);
    hash_stream_end(h, out);
    h = NULL;
out:
    hash_stream_free(h);
    weights_dir_close(&w);
    return rc;
}
