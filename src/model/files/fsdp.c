/* fsdp.c - the shards of verl's FSDP ranks as whole weights, read where they lie.
 *
 * Nothing is joined in memory: a weight is a list of its ranks' parts, and a range
 * of it is copied out of their mappings.  Which ranks shard and which repeat says
 * the device mesh: (ddp, fsdp) is laid out with the ranks 0 .. fsdp - 1 as the
 * first replica, and only these are read.
 * Invariant: after fsdp_open the parts of every weight cover it exactly. */
#include "model/files/fsdp.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/map.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 65536, MAX_CONFIG = 1 << 20 };

struct fsdp {
    struct torch_file **files; /* of the ranks 0 .. n_files - 1 */
    char **paths;
    int64_t n_files, world_size;
    struct fsdp_tensor *tensors;
    int64_t n;
    struct map by_name; /* without the adapter's */
    bool has_adapter;
};

/* ---- the files of a directory ---- */

/* The world size in the name of a shard, 0 if it is none. */
static int64_t shard_world(const char *name, int64_t *rank) {
    long long world, r;
    int end = 0;
    if (sscanf(name, "model_world_size_%lld_rank_%lld.pt%n", &world, &r, &end) != 2 || end == 0 || name[end]) return 0;
    *rank = r;
    return world > 0 ? world : 0;
}

bool fsdp_is_dir(const char *dir) {
    bool yes = false;
    int64_t rank;
    DIR *d = opendir(dir);
    for (struct dirent *e; d && !yes && (e = readdir(d));) yes = shard_world(e->d_name, &rank) > 0;
    if (d) closedir(d);
    return yes;
}

/* From the names of the files: checkpoints of verl before fsdp_config.json. */
static int world_of_names(const char *dir, int64_t *world) {
    int rc = 0;
    *world = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e; d && rc == 0 && (e = readdir(d));) {
        int64_t rank;
        const int64_t w = shard_world(e->d_name, &rank);
        if (w && *world && w != *world)
            rc = err_set(ERR_FORMAT, __FILE__, __LINE__,
                         "%s: shards of world sizes %lld and %lld, and no fsdp_config.json that names one", dir,
                         (long long)(w < *world ? w : *world), (long long)(w < *world ? *world : w));
        if (w) *world = w;
    }
    if (d) closedir(d);
    TRY(rc);
    if (*world == 0) FAIL(ERR_INPUT, "%s: no model_world_size_W_rank_0.pt, verl's FSDP shards", dir);
    return 0;
}

static int find_world(const char *dir, int64_t *world) {
    json_t *config = NULL;
    char *path;
    int rc = 0;
    TRY(file_in_dir(&path, dir, "fsdp_config.json"));
    if (!path) {
        TRYG(world_of_names(dir, world), out);
    } else {
        TRYG(json_load(&config, path, MAX_CONFIG), out);
        TRYG(json_i64(config, "world_size", world, path), out);
    }
    if (*world < 1 || *world > MAX_RANKS) FAILG(out, ERR_FORMAT, "%s: a world size of %lld", path ? path : dir, (long long)*world);
out:
    json_decref(config);
    free(path);
    return rc;
}

static int open_rank(struct fsdp *f, const char *dir, int64_t rank) {
    int64_t cap = f->n_files, cap_paths = cap;
    char *name = xasprintf("model_world_size_%lld_rank_%lld.pt", (long long)f->world_size, (long long)rank), *path, *in = NULL;
    const int rc = file_in_dir(&in, dir, name);
    path = file_join(dir, name);
    free(name);
    free(in);
    xgrow((void **)&f->files, &cap, f->n_files + 1, sizeof *f->files);
    xgrow((void **)&f->paths, &cap_paths, f->n_files + 1, sizeof *f->paths);
    f->files[f->n_files] = NULL;
    f->paths[f->n_files++] = path;
    if (rc < 0) return err_pass(rc, __FILE__, __LINE__);
    if (!file_exists(path))
        FAIL(ERR_INPUT,
             "%s is missing: the shards of a run of %lld ranks belong together; where several machines wrote them, copy all into "
             "one "
             "directory",
             path, (long long)f->world_size);
    return torch_file_open(&f->files[rank], path);
}

static int open_files(struct fsdp *f, const char *dir) {
    char *config;
    TRY(find_world(dir, &f->world_size));
    TRY(file_in_dir(&config, dir, "huggingface/config.json")); /* no link out of the checkpoint: read next to the shards */
    free(config);
    TRY(open_rank(f, dir, 0));
    const int64_t shards = torch_file_shards(f->files[0]), n = shards ? shards : f->world_size;
    if (shards && shards * torch_file_replicas(f->files[0]) != f->world_size)
        FAIL(ERR_FORMAT, "%s: a device mesh of %lld x %lld ranks in a checkpoint of world size %lld", f->paths[0],
             (long long)torch_file_replicas(f->files[0]), (long long)shards, (long long)f->world_size);
    for (int64_t r = 1; r < n; r++) {
        TRY(open_rank(f, dir, r));
        if (torch_file_shards(f->files[r]) != shards || torch_file_replicas(f->files[r]) != torch_file_replicas(f->files[0]))
            FAIL(ERR_FORMAT, "%s: another device mesh than that of rank 0", f->paths[r]);
    }
    return 0;
}

/* ---- whole weights ---- */

static bool same_dims(const int64_t *a, const int64_t *b, int n, int but) {
    for (int i = 0; i < n; i++)
        if (i != but && a[i] != b[i]) return false;
    return true;
}

/* What is not sharded is the same on every rank. */
static bool same_bytes(const struct fsdp_tensor *t, const struct torch_tensor *a, const struct torch_tensor *b) {
    enum { CHUNK = 1 << 16 };
    const size_t size = dtype_size(t->dt);
    char *x = xmalloc(2 * CHUNK * size), *y = x + CHUNK * size;
    bool same = true;
    for (int64_t i = 0; i < t->count && same; i += CHUNK) {
        const int64_t k = t->count - i < CHUNK ? t->count - i : CHUNK;
        torch_tensor_read(a, i, k, x);
        torch_tensor_read(b, i, k, y);
        same = memcmp(x, y, (size_t)k * size) == 0;
    }
    free(x);
    return same;
}

static int join_parts(const struct fsdp *f, struct fsdp_tensor *t) {
    const struct torch_tensor *first = t->parts[0];
    int64_t along = 0;
    for (int64_t r = 0; r < f->n_files; r++) {
        const struct torch_tensor *p = t->parts[r];
        if (p->dt != first->dt || p->dtensor != first->dtensor || p->shard_dim != first->shard_dim || p->nd != first->nd ||
            p->full_nd != first->full_nd || !same_dims(p->full_dim, first->full_dim, p->full_nd, -1) ||
            !same_dims(p->dim, first->dim, p->nd, first->shard_dim))
            FAIL(ERR_FORMAT, "%s: tensor %s: another dtype, shape or placement than on rank 0", f->paths[r], first->name);
        if (p->shard_dim >= 0) along += p->dim[p->shard_dim];
    }
    *t = (struct fsdp_tensor){.parts = t->parts, .dt = first->dt, .nd = first->nd, .shard_dim = first->shard_dim, .count = 1};
    for (int i = 0; i < t->nd; i++) {
        t->dim[i] = i == t->shard_dim ? along : first->dim[i];
        if (__builtin_mul_overflow(t->count, t->dim[i], &t->count))
            FAIL(ERR_FORMAT, "%s: tensor %s is too large", f->paths[0], first->name);
    }
    t->n_parts = t->shard_dim >= 0 ? f->n_files : 1;
    if (t->shard_dim >= 0 && along != first->full_dim[t->shard_dim])
        FAIL(ERR_FORMAT, "%s: tensor %s: its shards have %lld rows of %lld; does the directory hold files of two runs?",
             f->paths[0], first->name, (long long)along, (long long)first->full_dim[t->shard_dim]);
    for (int64_t r = 1; r < f->n_files && t->shard_dim < 0; r++)
        if (!same_bytes(t, first, t->parts[r]))
            FAIL(ERR_FORMAT, "%s: tensor %s is not sharded and differs from rank 0's", f->paths[r], first->name);
    return 0;
}

/* "a.b.c" without its first "b." where b stands as part; true: it was there. */
static bool cut(char *name, const char *part) {
    char *at = strstr(name, part);
    if (!at) return false;
    const size_t n = strlen(part);
    memmove(at, at + n, strlen(at + n) + 1);
    return true;
}

/* Of a peft model: the base's weights as its model has them, the adapter's as peft saves them. */
static char *model_name(const char *full, bool peft, bool *adapter) {
    char *name = xstrdup(full);
    *adapter = strstr(name, "lora_") != NULL || strstr(name, ".modules_to_save.") != NULL;
    if (!peft) return name;
    if (*adapter) {
        cut(name, "modules_to_save.default.");
        cut(name, ".default");
    } else {
        cut(name, "base_model.model.");
        cut(name, "base_layer.");
        cut(name, "original_module.");
    }
    return name;
}

static int join_tensors(struct fsdp *f) {
    f->n = torch_file_count(f->files[0]);
    f->tensors = xcalloc((size_t)f->n, sizeof *f->tensors);
    for (int64_t i = 0; i < f->n; i++)
        if (strstr(torch_file_at(f->files[0], i)->name, ".lora_")) f->has_adapter = true;
    for (int64_t r = 1; r < f->n_files; r++)
        if (torch_file_count(f->files[r]) != f->n)
            FAIL(ERR_FORMAT, "%s: %lld tensors, rank 0 has %lld", f->paths[r], (long long)torch_file_count(f->files[r]),
                 (long long)f->n);
    for (int64_t i = 0; i < f->n; i++) {
        struct fsdp_tensor *t = &f->tensors[i];
        const char *full = torch_file_at(f->files[0], i)->name;
        t->parts = xcalloc((size_t)f->n_files, sizeof *t->parts);
        for (int64_t r = 0; r < f->n_files; r++) {
            t->parts[r] = torch_file_find(f->files[r], full);
            if (!t->parts[r]) FAIL(ERR_FORMAT, "%s: no tensor %s, which rank 0 has", f->paths[r], full);
        }
        TRY(join_parts(f, t));
        t->name = model_name(full, f->has_adapter, &t->adapter);
        if (strcmp(t->name, "__metadata__") == 0) FAIL(ERR_FORMAT, "%s: tensor %s becomes %s", f->paths[0], full, t->name);
        if (t->adapter) continue;
        if (map_gets(&f->by_name, t->name, NULL)) FAIL(ERR_FORMAT, "%s: two tensors become %s", f->paths[0], t->name);
        map_set(&f->by_name, t->name, strlen(t->name), i);
    }
    return 0;
}

/* ---- public ---- */

int fsdp_open(struct fsdp **out, const char *dir) {
    struct fsdp *f = xcalloc(1, sizeof *f);
    int rc = open_files(f, dir);
    if (rc == 0) rc = join_tensors(f);
    if (rc == 0) *out = f;
    else fsdp_close(f);
    return rc;
}

void fsdp_close(struct fsdp *f) {
    if (!f) return;
    for (int64_t i = 0; i < f->n_files; i++) {
        torch_file_close(f->files[i]);
        free(f->paths[i]);
    }
    for (int64_t i = 0; f->tensors && i < f->n; i++) {
        free(f->tensors[i].name);
        free(f->tensors[i].parts);
    }
    free(f->files);
    free(f->paths);
    free(f->tensors);
    map_free(&f->by_name);
    free(f);
}

int64_t fsdp_count(const struct fsdp *f) { return f->n; }

const struct fsdp_tensor *fsdp_at(const struct fsdp *f, int64_t i) {
    CHECK(i >= 0 && i < f->n);
    return &f->tensors[i];
}

const struct fsdp_tensor *fsdp_find(const struct fsdp *f, const char *name) {
    int64_t i;
    return map_gets(&f->by_name, name, &i) ? &f->tensors[i] : NULL;
}

int64_t fsdp_shards(const struct fsdp *f) { return f->n_files; }

bool fsdp_has_adapter(const struct fsdp *f) { return f->has_adapter; }

void fsdp_read(const struct fsdp_tensor *t, int64_t first, int64_t n, void *dst) {
    if (t->n_parts == 1) {
        torch_tensor_read(t->parts[0], first, n, dst);
        return;
    }
    int64_t inner = 1; /* elements of one step along the sharded dimension */
    for (int i = t->shard_dim + 1; i < t->nd; i++) inner *= t->dim[i];
    const int64_t row = t->dim[t->shard_dim] * inner;
    while (n > 0) {
        int64_t at = first % row, p = 0;
        for (; at >= t->parts[p]->dim[t->shard_dim] * inner; p++) at -= t->parts[p]->dim[t->shard_dim] * inner;
        const int64_t part = t->parts[p]->dim[t->shard_dim] * inner, k = n < part - at ? n : part - at;
        torch_tensor_read(t->parts[p], first / row * part + at, k, dst);
        dst = (char *)dst + (size_t)k * dtype_size(t->dt);
        first += k;
        n -= k;
    }
}
