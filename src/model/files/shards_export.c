/* shards_export.c - the weights of verl's FSDP or Megatron checkpoints as a Hugging Face directory, and
 * compared with one: what verl.model_merger does.
 *
 * Any architecture: names and shapes are those of the trainer's model, and nothing
 * here interprets them.  Publishing (temporary name, rename) is the command's.
 * Invariant: a tensor is written with the bits that the shards hold, or rounded
 * once to the requested dtype. */
#include "model/files/shards.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/map.h"
#include "model/files/files_int.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

enum { MAX_CONFIG = 16 << 20, CHUNK = 1 << 18 /* elements */ };

static bool is_float(enum dtype dt) { return dt == DT_F32 || dt == DT_BF16 || dt == DT_F16; }

/* ---- tensors to write ---- */

struct export {
    const struct shards_export_args *a;
    size_t done, total; /* bytes */
    char *raw;          /* a chunk as the shards have it */
};
struct source { /* one safetensors_write_tensor's arg */
    struct export *e;
    const struct shards_tensor *t;
    enum dtype dt;
};

static int read_chunk(void *arg, size_t off, void *dst, size_t n) {
    const struct source *s = arg;
    const struct shards_tensor *t = s->t;
    const size_t size = dtype_size(s->dt);
    CHECK(off % size == 0 && n % size == 0);
    const int64_t first = (int64_t)(off / size), count = (int64_t)(n / size);
    for (int64_t i = 0; i < count; i += CHUNK) {
        const int64_t k = count - i < CHUNK ? count - i : CHUNK;
        char *to = (char *)dst + (size_t)i * size;
        shards_read(t, first + i, k, s->e->raw);
        if (is_float(t->dt) && !model_all_finite(s->e->raw, t->dt, k))
            FAIL(ERR_FORMAT, "%s: tensor %s holds NaN or Inf; the file is damaged or the training that wrote it diverged",
                 s->e->a->dir, t->name);
        if (is_float(t->dt)) model__convert(to, s->dt, s->e->raw, t->dt, k);
        else memcpy(to, s->e->raw, (size_t)k * size);
    }
    s->e->done += n;
    if (s->e->a->progress) s->e->a->progress(s->e->done, s->e->total);
    return 0;
}

static bool equal_tensors(const struct shards_tensor *a, const struct shards_tensor *b) {
    bool same = a->dt == b->dt && a->nd == b->nd && memcmp(a->dim, b->dim, sizeof a->dim) == 0;
    const size_t bytes = CHUNK * dtype_size(a->dt);
    char *x = xmalloc(2 * bytes);
    for (int64_t i = 0; i < a->count && same; i += CHUNK) {
        const int64_t k = a->count - i < CHUNK ? a->count - i : CHUNK;
        shards_read(a, i, k, x);
        shards_read(b, i, k, x + bytes);
        same = memcmp(x, x + bytes, (size_t)k * dtype_size(a->dt)) == 0;
    }
    free(x);
    return same;
}

/* The name that ties embeddings need not save: transformers makes lm_head from the embeddings. */
static const char *tied_copy(const struct shards *f, const json_t *config) {
    const struct shards_tensor *head = shards_find(f, "lm_head.weight"), *embed = shards_find(f, "model.embed_tokens.weight");
    if (!embed) embed = shards_find(f, "model.language_model.embed_tokens.weight");
    if (!json_is_true(json_object_get(config, "tie_word_embeddings")) || !head || !embed) return NULL;
    if (equal_tensors(head, embed)) return head->name;
    log_warn("config.json says tied embeddings, lm_head.weight differs from model.embed_tokens.weight: both are written");
    return NULL;
}

struct list {
    struct safetensors_write_tensor *t;
    struct source *src;
    int64_t n;
};

/* The model's tensors, or the adapter's; f32 first, so that every tensor is aligned to its size. */
static void list_tensors(struct list *l, struct export *e, bool adapter, const char *skip) {
    const struct shards *f = e->a->s;
    const int64_t n = shards_count(f);
    *l = (struct list){.t = xcalloc((size_t)n + 1, sizeof *l->t), .src = xcalloc((size_t)n + 1, sizeof *l->src)};
    for (size_t size = 8; size > 0; size /= 2) {
        for (int64_t i = 0; i < n; i++) {
            const struct shards_tensor *t = shards_at(f, i);
            const enum dtype dt = e->a->dt >= 0 && is_float(t->dt) && !t->own_dtype ? (enum dtype)e->a->dt : t->dt;
            if (t->adapter != adapter || dtype_size(dt) != size || (skip && strcmp(t->name, skip) == 0)) continue;
            l->src[l->n] = (struct source){e, t, dt};
            l->t[l->n] =
                (struct safetensors_write_tensor){.name = t->name, .dt = dt, .nd = t->nd, .read = read_chunk, .arg = &l->src[l->n]};
            memcpy(l->t[l->n++].dim, t->dim, sizeof t->dim);
            e->total += (size_t)t->count * size;
        }
    }
}

static void list_free(struct list *l) {
    free(l->t);
    free(l->src);
}

static int check_disk(const char *dir, size_t need) {
    struct statvfs v;
    if (statvfs(dir, &v) < 0) FAIL(ERR_IO, "%s: %s", dir, strerror(errno));
    const double room = (double)v.f_bavail * (double)v.f_frsize;
    if ((double)need > room)
        FAIL(ERR_IO, "%s: the weights need %.2f GB, the disk has %.2f GB free; choose another target directory", dir,
             1e-9 * (double)need, 1e-9 * room);
    return 0;
}

/* ---- the files next to the weights ---- */

static bool has_ending(const char *name, const char *ending) {
    const size_t n = strlen(name), k = strlen(ending);
    return n > k && strcmp(name + n - k, ending) == 0;
}

/* generation_config.json, tokenizer, processor: what is text, not code, and not the description of weights. */
static int copy_texts(const char *from, const char *to) {
    static const char *const kinds[] = {".json", ".jinja", ".txt", ".model"};
    DIR *d = opendir(from);
    int rc = 0;
    if (!d) FAIL(ERR_INPUT, "%s: %s", from, strerror(errno));
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        bool wanted = false;
        for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) wanted = wanted || has_ending(e->d_name, kinds[i]);
        if (!wanted || e->d_name[0] == '.' || strcmp(e->d_name, "config.json") == 0 || has_ending(e->d_name, ".index.json") ||
            strcmp(e->d_name, "fsdp_config.json") == 0 || strcmp(e->d_name, "lora_train_meta.json") == 0)
            continue;
        char *path;
        rc = file_in_dir(&path, from, e->d_name);
        free(path);
        if (rc == 0) rc = model__copy_file(from, to, e->d_name);
    }
    closedir(d);
    return rc;
}

/* Megatron's critics come with the config.json of the model that they began as. */
static int make_value(const struct shards_export_args *a, json_t **config) {
    struct model_config c;
    TRY(model_config_load(&c, a->config_dir));
    model_config_make_value(&c);
    if (!shards_find(a->s, "score.bias")) json_object_set_new(c.json, "token_classification_bias", json_false());
    json_decref(*config);
    *config = json_incref(c.json);
    model_config_free(&c);
    return 0;
}

static int write_config(const struct shards_export_args *a, json_t *config) {
    char *path = file_join(a->out, "config.json");
    if (a->dt >= 0) model__set_config_dtype(config, (enum dtype)a->dt);
    const int rc = json_save_atomic(path, config);
    free(path);
    return rc;
}

/* ---- the adapter of a LoRA run ---- */

/* "...self_attn.q_proj.lora_A.weight" -> "q_proj" */
static char *module_of(const char *name) {
    const char *end = strstr(name, ".lora_"), *from = end;
    while (end && from > name && from[-1] != '.') from--;
    return end ? xstrndup(from, (size_t)(end - from)) : NULL;
}

/* r and the adapted modules from the tensors, lora_alpha from verl's lora_train_meta.json. */
static int make_adapter_config(const struct shards_export_args *a, json_t **out) {
    int64_t alpha = 0, r = 0;
    const char *task = NULL;
    json_t *meta = NULL, *modules = json_array();
    struct map seen = {0};
    char *path = NULL;
    int rc = 0;
    TRYG(file_in_dir(&path, a->dir, "lora_train_meta.json"), out);
    if (!path)
        FAILG(out, ERR_INPUT,
              "%s: a LoRA run's checkpoint in which neither lora_adapter/adapter_config.json nor lora_train_meta.json says "
              "lora_alpha; write %s/lora_train_meta.json with {\"lora_alpha\": N} as the run had it",
              a->dir, a->dir);
    TRYG(json_load(&meta, path, MAX_CONFIG), out);
    TRYG(json_i64(meta, "lora_alpha", &alpha, path), out);
    TRYG(json_str_opt(meta, "task_type", &task, path), out);
    for (int64_t i = 0; i < shards_count(a->s); i++) {
        const struct shards_tensor *t = shards_at(a->s, i);
        char *module = t->adapter ? module_of(t->name) : NULL;
        if (module && strstr(t->name, ".lora_A") && t->nd == 2) r = t->dim[0];
        if (module && !map_gets(&seen, module, NULL)) {
            map_set(&seen, module, strlen(module), 0);
            json_array_append_new(modules, json_string(module));
        }
        free(module);
    }
    *out = json_pack("{s:s, s:s, s:I, s:I, s:O, s:s, s:f, s:b, s:n}", "peft_type", "LORA", "task_type", task ? task : "CAUSAL_LM",
                     "r", (json_int_t)r, "lora_alpha", (json_int_t)alpha, "target_modules", modules, "bias", "none", "lora_dropout",
                     0.0, "inference_mode", 1, "base_model_name_or_path");
out:
    map_free(&seen);
    json_decref(meta);
    json_decref(modules);
    free(path);
    return rc;
}

static int write_adapter(const struct shards_export_args *a, const struct list *l) {
    int rc = 0;
    json_t *config = NULL;
    char *to = file_join(a->out, "lora_adapter"), *made = NULL;
    char *path = file_join(to, "adapter_config.json"), *weights = file_join(to, "adapter_model.safetensors");
    json_t *metadata = json_pack("{s:s}", "format", "pt");
    TRYG(file_in_dir(&made, a->dir, "lora_adapter/adapter_config.json"), out);
    if (made) TRYG(json_load(&config, made, MAX_CONFIG), out);
    else TRYG(make_adapter_config(a, &config), out);
    TRYG(file_mkdirs(to), out);
    TRYG(json_save_atomic(path, config), out);
    TRYG(safetensors_write(NULL, weights, l->t, l->n, metadata), out);
    TRYG(file_fsync_dir(to), out);
out:
    json_decref(config);
    json_decref(metadata);
    free(to);
    free(made);
    free(path);
    free(weights);
    return rc;
}

int shards_export(const struct shards_export_args *a) {
    int rc = 0;
    struct export e = {.a = a, .raw = xmalloc(CHUNK * sizeof(double))};
    struct list model = {0}, adapter = {0};
    json_t *config = NULL;
    char *path = NULL;
    TRYG(file_in_dir(&path, a->config_dir, "config.json"), out);
    if (!path)
        FAILG(out, ERR_INPUT,
              "%s/config.json is missing: a checkpoint of verl has the model's config.json and tokenizer in huggingface/; name a "
              "model directory that has them with --hf_model_path",
              a->config_dir);
    TRYG(json_load(&config, path, MAX_CONFIG), out);
    if (shards_is_value(a->s)) TRYG(make_value(a, &config), out);
    list_tensors(&model, &e, false, tied_copy(a->s, config));
    list_tensors(&adapter, &e, true, NULL);
    TRYG(check_disk(a->out, e.total), out);
    if (adapter.n > 0) TRYG(write_adapter(a, &adapter), out);
    if (model.n > 0) {
        TRYG(model__write_weights(NULL, a->out, model.t, model.n, a->max_shard), out);
        TRYG(copy_texts(a->config_dir, a->out), out);
        TRYG(write_config(a, config), out);
    }
    TRYG(file_fsync_dir(a->out), out);
out:
    list_free(&model);
    list_free(&adapter);
    json_decref(config);
    free(path);
    free(e.raw);
    return rc;
}

/* ---- comparing ---- */

/* As bf16, which verl's test loads both in. */
static int compare_tensor(const struct shards_tensor *t, const struct safetensors_tensor *s, const char *path) {
    bool same = t->nd == s->nd;
    for (int i = 0; i < t->nd && same; i++) same = t->dim[i] == s->dim[i];
    if (!same) FAIL(ERR_INPUT, "%s: tensor %s has another shape than the merged checkpoint", path, t->name);
    if (is_float(t->dt) != is_float(s->dt) || (!is_float(t->dt) && t->dt != s->dt))
        FAIL(ERR_INPUT, "%s: tensor %s is %s, in the merged checkpoint %s", path, t->name, dtype_name(s->dt), dtype_name(t->dt));
    const size_t size = dtype_size(t->dt);
    char *raw = xmalloc(CHUNK * sizeof(double));
    uint16_t *x = xmalloc(2 * CHUNK * sizeof *x), *y = x + CHUNK;
    int rc = 0;
    for (int64_t i = 0; i < t->count && rc == 0; i += CHUNK) {
        const int64_t k = t->count - i < CHUNK ? t->count - i : CHUNK;
        shards_read(t, i, k, raw);
        if (!is_float(t->dt)) {
            if (memcmp(raw, s->data + (size_t)i * size, (size_t)k * size) != 0)
                rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: tensor %s differs from the merged checkpoint", path, t->name);
            continue;
        }
        model__convert(x, DT_BF16, raw, t->dt, k);
        model__convert(y, DT_BF16, s->data + (size_t)i * dtype_size(s->dt), s->dt, k);
        for (int64_t j = 0; j < k && rc == 0; j++) {
            const double got = bf16_to_f32(x[j]), want = bf16_to_f32(y[j]);
            if (!(fabs(got - want) <= 1e-6 + 1e-6 * fabs(got)))
                rc = err_set(ERR_INPUT, __FILE__, __LINE__,
                             "%s: tensor %s differs from the merged checkpoint at element %lld: %g, merged %g", path, t->name,
                             (long long)(i + j), want, got);
        }
    }
    free(raw);
    free(x);
    return rc;
}

static bool is_head(const char *name) { return strcmp(name, "lm_head.weight") == 0; } /* tied embeddings may leave it out */

static int compare_file(const struct shards *f, const char *path, struct map *seen) {
    struct safetensors_file *st;
    int rc = 0;
    TRY(safetensors_open(&st, path));
    for (int64_t i = 0; i < safetensors_count(st) && rc == 0; i++) {
        const struct safetensors_tensor *s = safetensors_at(st, i);
        const struct shards_tensor *t = shards_find(f, s->name);
        if (t) rc = compare_tensor(t, s, path);
        else if (!is_head(s->name))
            rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: tensor %s is not in the merged checkpoint", path, s->name);
        map_set(seen, s->name, strlen(s->name), 1);
    }
    safetensors_close(st);
    return rc;
}

int shards_compare(const struct shards *f, const char *hf_dir) {
    struct map seen = {0};
    int rc = 0;
    DIR *d = opendir(hf_dir);
    if (!d) FAIL(ERR_INPUT, "%s: %s", hf_dir, strerror(errno));
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        if (!has_ending(e->d_name, ".safetensors")) continue;
        char *path = NULL;
        rc = file_in_dir(&path, hf_dir, e->d_name);
        if (rc == 0 && path) rc = compare_file(f, path, &seen);
        free(path);
    }
    closedir(d);
    if (rc == 0 && seen.n == 0) rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: no *.safetensors to compare with", hf_dir);
    for (int64_t i = 0; i < shards_count(f) && rc == 0; i++) {
        const struct shards_tensor *t = shards_at(f, i);
        if (!t->adapter && !is_head(t->name) && !map_gets(&seen, t->name, NULL))
            rc = err_set(ERR_INPUT, __FILE__, __LINE__, "%s: no tensor %s, which the merged checkpoint has", hf_dir, t->name);
    }
    map_free(&seen);
    return rc;
}
