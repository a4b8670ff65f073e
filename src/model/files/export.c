/* export.c - a model as a directory that transformers loads as it is:
 * config.json, generation_config.json, safetensors in one file or in shards
 * with their index, and the tokenizer's files.
 *
 * Streams: at most one group of parameters is unpacked at a time.  Publishing
 * (temporary name, rename) is ckpt's work or the command's.
 * Invariant: what is written equals the master (or, without one, the compute
 * copy) rounded once to the dtype of the file; tensors that are no parameters' (vision towers, MTP heads) keep their bytes. */
#include "model/files/export.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "model/files/files_int.h"
#include "model/lora/lora_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t DEFAULT_SHARD = (size_t)5000000000; /* transformers' max_shard_size of 5 GB */

/* ---- reading parameters ---- */

struct reader {
    const struct model *m;
    enum dtype flat_dt; /* of what `stage` holds: f32 master range, or the group in act */
    void *stage;        /* device, one group; NULL when there is a master */
    size_t stage_bytes;
    int64_t group; /* in stage, -1: none */
    char *host;    /* what a read requests, of a device with its own memory */
    size_t host_bytes;
    const float *master; /* fp32 weights, NULL: the compute copy is read */
    struct lora_host adapter;
    int64_t expert_at; /* element of the flat array where the expert in `expert` begins; -1: none */
    char *expert;      /* of gpt-oss, in host memory */
};
struct param_source { /* one safetensors_write_tensor's arg */
    struct reader *r;
    const struct model_param *p;
    enum dtype dt;
};

static int unpack_group(struct reader *r, int64_t group) {
    const struct model *m = r->m;
    const struct model_group *g = &m->groups[group];
    if (r->group == group) return 0;
    r->group = -1;
    if (g->k) TRY(model__unpack(m, g, tensor_2d(r->stage, m->act, g->n, g->k)));
    else TRY(dev_copy(m->dev, r->stage, g->vec.data, (size_t)g->n * dtype_size(m->act)));
    r->group = group;
    return 0;
}

/* Makes *p, on the device, a copy in host memory. */
static int fetch(struct reader *r, const char **p, size_t bytes) {
    if (bytes > r->host_bytes) {
        r->host = xrealloc(r->host, bytes);
        r->host_bytes = bytes;
    }
    TRY(dev_copy_out(r->m->dev, r->host, *p, bytes));
    *p = r->host;
    return 0;
}

static int read_param(void *arg, size_t off, void *dst, size_t n) {
    const struct param_source *s = arg;
    struct reader *r = s->r;
    const size_t size = dtype_size(s->dt), from = dtype_size(r->flat_dt);
    const int64_t count = (int64_t)(n / size);
    CHECK(off % size == 0 && n % size == 0);
    int64_t at = (int64_t)(off / size); /* element of the parameter, then of the flat array it is in */
    const char *base;
    if (r->master) {
        base = (const char *)r->master;
        at += s->p->offset;
    } else {
        TRY(unpack_group(r, s->p->group));
        base = r->stage;
        at += s->p->offset - r->m->groups[s->p->group].offset;
    }
    const char *values = base + (size_t)at * from;
    if (dev_has_own_memory(r->m->dev)) TRY(fetch(r, &values, (size_t)count * from));
    if (!r->adapter.flat) {
        model__convert(dst, s->dt, values, r->flat_dt, count);
        return 0;
    }
    float *sum = xmalloc((size_t)count * sizeof *sum);
    model__convert(sum, DT_F32, values, r->flat_dt, count);
    model__lora_merge(&r->adapter, s->p, (int64_t)(off / size), sum, count);
    model__convert(dst, s->dt, sum, DT_F32, count);
    free(sum);
    if (!model_all_finite(dst, s->dt, count))
        FAIL(ERR_FORMAT,
             "tensor %s holds NaN or Inf with the adapter merged into it as %s; lora_alpha / r, or the adapter's weights, "
             "are too large for its dtype",
             s->p->name, dtype_name(s->dt));
    return 0;
}

/* The expert that begins at element `at` of the flat array, in host memory. */
static int load_expert(struct reader *r, const struct model_group *g, int64_t at, int64_t count) {
    const size_t size = dtype_size(r->flat_dt);
    const char *from = (const char *)(r->master ? r->master + at : NULL);
    if (r->expert_at == at) return 0;
    if (!r->master) {
        TRY(unpack_group(r, g - r->m->groups));
        from = (const char *)r->stage + (size_t)(at - g->offset) * size;
    }
    r->expert = xrealloc(r->expert, (size_t)count * size);
    r->expert_at = -1;
    if (dev_has_own_memory(r->m->dev)) {
        TRY(dev_copy_out(r->m->dev, r->expert, from, (size_t)count * size));
        TRY(dev_sync(r->m->dev));
    } else {
        memcpy(r->expert, from, (size_t)count * size);
    }
    r->expert_at = at;
    return 0;
}

/* All experts in one tensor, as gpt-oss has them (gpt_oss.c); p: the group's first parameter. */
static int read_interleaved(void *arg, size_t off, void *dst, size_t bytes) {
    const struct param_source *s = arg;
    struct reader *r = s->r;
    const struct model_group *const g = &r->m->groups[s->p->group];
    const int64_t n = g->n / g->count, k = g->k ? g->k : 1, each = n * k;
    const size_t size = dtype_size(s->dt), from = dtype_size(r->flat_dt);
    for (size_t i = 0; i < bytes / size; i++) {
        const int64_t at = (int64_t)(off / size + i), in = at % each;
        TRY(load_expert(r, g, g->offset + at / each * each, each));
        const int64_t row = model__interleaved_row(g, in % n), col = in / n;
        model__convert((char *)dst + i * size, s->dt, r->expert + (size_t)(row * k + col) * from, r->flat_dt, 1);
    }
    return 0;
}

/* All experts in one tensor, as the parameters are, which have one size. */
static int read_stacked(void *arg, size_t off, void *dst, size_t bytes) {
    const struct param_source *s = arg;
    const struct model *m = s->r->m;
    const size_t size = dtype_size(s->dt);
    const int64_t each = s->p->rows * s->p->cols, end = (int64_t)((off + bytes) / size);
    for (int64_t at = (int64_t)(off / size), n; at < end; at += n) {
        struct param_source one = {s->r, &m->params[m->groups[s->p->group].first_param + at / each], s->dt};
        n = each - at % each < end - at ? each - at % each : end - at;
        TRY(read_param(&one, (size_t)(at % each) * size, dst, (size_t)n * size));
        dst = (char *)dst + (size_t)n * size;
    }
    return 0;
}

static int read_buffer(void *arg, size_t off, void *dst, size_t n) {
    const struct model_buffer *const b = arg;
    const size_t size = dtype_size(b->src_dt);
    model__convert(dst, b->src_dt, (const char *)(b->host + off / size), DT_F32, (int64_t)(n / size));
    return 0;
}

static int reader_open(struct reader *r, const struct model *m) {
    /* An adapter's is not the weights'; of a rank's share the compute copy is the whole. */
    const float *master = m->lora || m->own ? NULL : m->master;
    *r = (struct reader){.m = m, .group = -1, .expert_at = -1, .flat_dt = master ? DT_F32 : m->act, .master = master};
    TRY(model__lora_host_open(&r->adapter, m));
    for (int64_t i = 0; !master && i < m->n_groups; i++) {
        const size_t bytes = (size_t)model__group_count(&m->groups[i]) * dtype_size(m->act);
        if (bytes > r->stage_bytes) r->stage_bytes = bytes;
    }
    return dev_alloc(m->dev, r->stage_bytes, &r->stage);
}

static void reader_close(struct reader *r) {
    dev_free(r->m->dev, r->stage, r->stage_bytes);
    model__lora_host_close(&r->adapter);
    free(r->host);
    free(r->expert);
}

/* ---- shards ---- */

static size_t tensor_bytes(const struct safetensors_write_tensor *t) {
    size_t n = dtype_size(t->dt);
    for (int i = 0; i < t->nd; i++) n *= (size_t)t->dim[i];
    return n;
}

static int write_shard(struct file_writer *w, const char *path, const struct safetensors_write_tensor *t, int64_t n) {
    json_t *meta = json_pack("{s:s}", "format", "pt");
    const int rc = safetensors_write(w, path, t, n, meta);
    json_decref(meta);
    return rc;
}

/* The end of the shard that begins at lo. */
static int64_t shard_end(const struct safetensors_write_tensor *t, int64_t n, int64_t lo, size_t max_shard) {
    size_t bytes = 0;
    int64_t hi = lo;
    for (; hi < n; hi++) {
        bytes += tensor_bytes(&t[hi]);
        if (bytes > max_shard && hi > lo) break;
    }
    return hi;
}

int model__write_weights(struct file_writer *w, const char *dir, const struct safetensors_write_tensor *t, int64_t n,
                         size_t max_shard) {
    int rc = 0;
    int64_t n_shards = 0, total = 0;
    char *path = NULL;
    if (max_shard == 0) max_shard = DEFAULT_SHARD;
    for (int64_t lo = 0; lo < n; lo = shard_end(t, n, lo, max_shard)) n_shards++;
    if (n_shards == 1) {
        path = file_join(dir, "model.safetensors");
        rc = write_shard(w, path, t, n);
        free(path);
        return rc;
    }
    json_t *weight_map = json_object();
    for (int64_t lo = 0, hi, i = 1; lo < n; lo = hi, i++) {
        char name[64];
        hi = shard_end(t, n, lo, max_shard);
        snprintf(name, sizeof name, "model-%05lld-of-%05lld.safetensors", (long long)i, (long long)n_shards);
        for (int64_t k = lo; k < hi; k++) {
            json_object_set_new(weight_map, t[k].name, json_string(name));
            total += (int64_t)tensor_bytes(&t[k]);
        }
        path = file_join(dir, name);
        TRYG(write_shard(w, path, t + lo, hi - lo), out);
        free(path);
        path = NULL;
    }
    path = file_join(dir, "model.safetensors.index.json");
    json_t *index = json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)total, "weight_map", weight_map);
    rc = json_save_atomic(path, index);
    json_decref(index);
out:
    free(path);
    json_decref(weight_map);
    return rc;
}

/* ---- configuration ---- */

void model__set_config_dtype(json_t *config, enum dtype dt) {
    const bool v5 = json_object_get(config, "dtype") != NULL; /* transformers 5 renamed torch_dtype */
    json_t *const text = model_text_json(config);
    if (text != config && json_object_get(text, "dtype")) json_object_set_new(text, "dtype", json_string(model__torch_dtype(dt)));
    if (v5) json_object_set_new(config, "dtype", json_string(model__torch_dtype(dt)));
    if (!v5 || json_object_get(config, "torch_dtype"))
        json_object_set_new(config, "torch_dtype", json_string(model__torch_dtype(dt)));
}

/* config.json as it was read, with the dtype of the files where that was chosen. */
static int write_configs(const struct model_config *c, const char *dir, int dt) {
    int rc = 0;
    json_t *o = json_deep_copy(c->json);
    char *config = file_join(dir, "config.json"), *generation = file_join(dir, "generation_config.json");
    if (dt >= 0) model__set_config_dtype(o, (enum dtype)dt);
    TRYG(json_save_atomic(config, o), out);
    if (c->generation_json) TRYG(json_save_atomic(generation, c->generation_json), out);
out:
    json_decref(o);
    free(config);
    free(generation);
    return rc;
}

int model__copy_file(const char *from, const char *to, const char *name) {
    char *src = file_join(from, name), *dst = file_join(to, name);
    struct file_map f = {0};
    int rc = file_map_open(&f, src);
    if (rc == 0) rc = file_write_atomic(dst, f.p, f.n);
    file_unmap(&f);
    free(src);
    free(dst);
    return rc;
}

/* ---- public ---- */

/* One parameter's dtype in the files. */
static int choose_dtype(const struct model *m, const struct model_param *p, int dt, enum dtype *out) {
    *out = dt >= 0 ? (enum dtype)dt : p->src_dt;
    if (dt < 0 && (!m->master || m->lora || m->own) && m->act != DT_F32 && *out != m->act)
        FAIL(ERR_INVAL, "cannot export %s as %s: the model was opened in %s for inference only", p->name, dtype_name(*out),
             dtype_name(m->act));
    return 0;
}

int model_export_config(const struct model *m, const char *dir) { return write_configs(&m->cfg, dir, -1); }

int model_export(const struct model *m, const char *dir, const struct model_export_args *a) {
    const int dt = a->dt;
    int rc = 0;
    struct reader r = {0};
    struct param_source *src = xcalloc((size_t)m->n_params, sizeof *src);
    struct safetensors_write_tensor *t = xcalloc((size_t)(m->n_params + m->n_buffers + model__kept_count(m)), sizeof *t);
    int64_t n_own = 0, n = 0; /* parameters, tensors */
    char(*const stack_names)[MODEL_STACK_NAME] = xcalloc((size_t)m->n_groups, sizeof *stack_names);
    for (int64_t i = 0; i < m->n_groups; i++)
        if (model__stacked(m, &m->groups[i])) model__stack_name(m, &m->groups[i], stack_names[i]);
    CHECK(dt < 0 || dt == DT_F32 || dt == DT_BF16 || dt == DT_F16);
    TRYG(reader_open(&r, m), out);
    for (int pass = 0; pass < 2; pass++) {           /* f32 first, so that every tensor is aligned to its size */
        for (int64_t i = 0; i < m->n_buffers; i++) { /* never rounded */
            const struct model_buffer *const b = &m->buffers[i];
            if ((b->src_dt == DT_F32) != (pass == 0)) continue;
            t[n++] = (struct safetensors_write_tensor){.name = b->name,
                                                       .dt = b->src_dt,
                                                       .nd = 1,
                                                       .dim = {b->n},
                                                       .read = read_buffer,
                                                       .arg = (void *)(uintptr_t)b,
                                                       .any_thread = true};
        }
        for (int64_t i = 0; i < m->n_params; i++) {
            enum dtype as;
            TRYG(choose_dtype(m, &m->params[i], dt, &as), out);
            if ((as == DT_F32) != (pass == 0)) continue;
            const struct model_param *p = &m->params[i];
            if (model__stacked(m, &m->groups[p->group]) && i != m->groups[p->group].first_param) continue; /* with that one */
            src[n_own] = (struct param_source){&r, p, as};
            t[n] = (struct safetensors_write_tensor){
                .name = p->name, .dt = as, .nd = p->nd, .dim = {p->rows, p->cols}, .read = read_param, .arg = &src[n_own++]};
            if (p->nd == 3) t[n].dim[1] = 1, t[n].dim[2] = p->cols;
            t[n].any_thread = r.master && !dev_has_own_memory(m->dev); /* memory, and no state */
            if (t[n].any_thread && as == DT_F32) t[n].data = r.master + p->offset;
            if (model__stacked(m, &m->groups[p->group])) {
                const bool turned = model__interleaved(m, &m->groups[p->group]);
                t[n].name = stack_names[p->group];
                t[n].nd = model__stack_shape(m, &m->groups[p->group], t[n].dim);
                t[n].read = turned ? read_interleaved : read_stacked;
                t[n].any_thread = false;
                t[n].data = NULL;
            }
            n++;
        }
        for (int64_t i = 0; i < model__kept_count(m); i++) {
            const struct safetensors_write_tensor kept = model__kept_at(m, i);
            if ((kept.dt == DT_F32) == (pass == 0)) t[n++] = kept;
        }
    }
    TRYG(file_mkdirs(dir), out);
    TRYG(model__write_weights(a->writer, dir, t, n, a->max_shard), out);
    TRYG(write_configs(&m->cfg, dir, dt), out);
    if (a->tokenizer) TRYG(tokenizer_files_write(a->tokenizer, dir), out);
    TRYG(file_fsync_dir(dir), out);
out:
    reader_close(&r);
    free(stack_names);
    free(src);
    free(t);
    return rc;
}
