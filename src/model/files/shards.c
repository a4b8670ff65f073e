/* shards.c - see shards.h: which trainer wrote a checkpoint, and one list of weights whichever it was. */
#include "model/files/shards.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/map.h"
#include "model/files/fsdp.h"
#include "model/files/megatron.h"

#include <stdlib.h>
#include <string.h>

struct shards {
    struct fsdp *fsdp; /* one of the two */
    struct megatron *megatron;
    struct shards_tensor *tensors;
    int64_t n;
    struct map by_name; /* without the adapter's */
};

/* ---- directories ---- */

char *shards_find_dir(const char *path) {
    static const char *const places[] = {".", "model", "actor", "actor/model", ".."};
    enum { N = sizeof places / sizeof *places };
    char *config = file_join(path, "config.json"), *found = NULL;
    const bool below = file_exists(config) || dcp_is_dir(path); /* a huggingface/ or a dist_ckpt/ has its shards above it */
    for (int i = 0; i < (below ? N : N - 1) && !found; i++) {
        char *dir = i == 0 ? xstrdup(path) : file_join(path, places[i]);
        if (fsdp_is_dir(dir) || megatron_is_dir(dir)) found = dir;
        else free(dir);
    }
    free(config);
    return found || !dcp_is_dir(path) ? found : xstrdup(path); /* without any of verl's directories around it */
}

char *shards_config_dir(const char *dir) {
    char *sub = file_join(dir, "huggingface"), *config = file_join(sub, "config.json");
    const bool there = file_exists(config);
    free(config);
    if (there) return sub;
    free(sub);
    return xstrdup(dir);
}

char *shards_saved_model(const char *path) {
    static const char *const places[] = {"model/huggingface", "actor/model/huggingface"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char *dir = file_join(path, places[i]), *config = file_join(dir, "config.json");
        const bool there = file_exists(config);
        free(config);
        if (there) return dir;
        free(dir);
    }
    return NULL;
}

const char *shards_backend(const char *dir) { return fsdp_is_dir(dir) ? "fsdp" : "megatron"; }

/* ---- weights ---- */

static void add(struct shards *s, const struct shards_tensor *t) {
    if (!t->adapter) map_set(&s->by_name, t->name, strlen(t->name), s->n);
    s->tensors[s->n++] = *t;
}

static int open_fsdp(struct shards *s, const struct shards_args *a) {
    TRY(fsdp_open(&s->fsdp, a->dir));
    s->tensors = xcalloc((size_t)fsdp_count(s->fsdp) + 1, sizeof *s->tensors);
    for (int64_t i = 0; i < fsdp_count(s->fsdp); i++) {
        const struct fsdp_tensor *f = fsdp_at(s->fsdp, i);
        struct shards_tensor t = {.name = f->name, .dt = f->dt, .nd = f->nd, .count = f->count, .adapter = f->adapter, .fsdp = f};
        memcpy(t.dim, f->dim, sizeof t.dim);
        add(s, &t);
    }
    return 0;
}

static int open_megatron(struct shards *s, const struct shards_args *a) {
    char *config = a->config_dir ? xstrdup(a->config_dir) : shards_config_dir(a->dir);
    const int rc = megatron_open(&s->megatron, &(struct megatron_args){.dir = a->dir, .config_dir = config, .no_head = a->no_head});
    free(config);
    TRY(rc);
    s->tensors = xcalloc((size_t)megatron_count(s->megatron) + 1, sizeof *s->tensors);
    for (int64_t i = 0; i < megatron_count(s->megatron); i++) {
        const struct megatron_tensor *m = megatron_at(s->megatron, i);
        struct shards_tensor t = {
            .name = m->name, .dt = m->dt, .nd = m->nd, .count = m->count, .own_dtype = m->buffer, .megatron = m};
        memcpy(t.dim, m->dim, sizeof t.dim);
        add(s, &t);
    }
    return 0;
}

/* ---- public ---- */

int shards_open(struct shards **out, const struct shards_args *a) {
    struct shards *s = xcalloc(1, sizeof *s);
    const bool megatron = !fsdp_is_dir(a->dir) && (megatron_is_dir(a->dir) || dcp_is_dir(a->dir));
    const int rc = megatron ? open_megatron(s, a) : open_fsdp(s, a);
    if (rc == 0) *out = s;
    else shards_close(s);
    return rc;
}

void shards_close(struct shards *s) {
    if (!s) return;
    free(s->tensors);
    map_free(&s->by_name);
    fsdp_close(s->fsdp);
    megatron_close(s->megatron);
    free(s);
}

int64_t shards_count(const struct shards *s) { return s->n; }

const struct shards_tensor *shards_at(const struct shards *s, int64_t i) {
    CHECK(i >= 0 && i < s->n);
    return &s->tensors[i];
}

const struct shards_tensor *shards_find(const struct shards *s, const char *name) {
    int64_t i;
    return map_gets(&s->by_name, name, &i) ? &s->tensors[i] : NULL;
}

char *shards_words(const struct shards *s) {
    if (s->fsdp) return xasprintf("%lld FSDP ranks", (long long)fsdp_shards(s->fsdp));
    return xasprintf("%lld files of Megatron's", (long long)megatron_files(s->megatron));
}

int64_t shards_left(const struct shards *s) { return s->megatron ? megatron_left(s->megatron) : 0; }

bool shards_is_value(const struct shards *s) { return s->megatron && megatron_has_score(s->megatron); }

bool shards_has_adapter(const struct shards *s) { return s->fsdp && fsdp_has_adapter(s->fsdp); }

void shards_read(const struct shards_tensor *t, int64_t first, int64_t n, void *dst) {
    if (t->fsdp) fsdp_read(t->fsdp, first, n, dst);
    else megatron_read(t->megatron, first, n, dst);
}
