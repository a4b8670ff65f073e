/* lora_files.c - adapters as peft's directories.
 *
 * adapter_model.safetensors holds base_model.model.MODULE.lora_A.weight (r, k) and
 * lora_B.weight (n, r); written in f32, read in any float dtype.  A fingerprint of
 * the base goes into its metadata, which peft does not read.
 * Invariant: an adapter that is loaded has every tensor that its configuration
 * requires, of the right shape, finite, and no other. */
#include "model/lora/lora.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"
#include "model/files/files_int.h"
#include "model/files/load.h"
#include "model/master_weights.h"
#include "model/files/safetensors.h"
#include "model/lora/lora_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PREFIX "base_model.model."
#define FINGERPRINT "verlc_base"

/* ---- which base ---- */

/* The fingerprint is of the first rows of the embedding and the last norm, as bf16: frozen under an adapter, never
 * quantised, and the same whatever the compute dtype. */
enum { BASE_ROWS = 8 };

static int64_t base_rows(const struct model *m) { return m->cfg.vocab < BASE_ROWS ? m->cfg.vocab : BASE_ROWS; }
static size_t base_bytes(const struct model *m) { return (size_t)((base_rows(m) + 1) * m->cfg.hidden) * sizeof(uint16_t); }
uint16_t *model__base_bits_new(const struct model *m) { return xcalloc(1, base_bytes(m)); }
void model__base_bits_hash(const struct model *m, const uint16_t *bits, char hash[33]) { hash_hex(bits, base_bytes(m), hash); }

static int first_rows(struct model *m, uint16_t *bits) {
    const int64_t n = base_rows(m), h = m->cfg.hidden;
    const size_t ids_bytes = BASE_ROWS * sizeof(int32_t), row_bytes = (size_t)(n * h) * sizeof(float);
    const int32_t first[BASE_ROWS] = {0, 1, 2, 3, 4, 5, 6, 7};
    void *ids = NULL, *rows = NULL;
    float *host = xmalloc(row_bytes);
    int rc = 0;
    TRYG(dev_alloc(m->dev, ids_bytes, &ids), out);
    TRYG(dev_alloc(m->dev, row_bytes, &rows), out);
    TRYG(dev_copy_in(m->dev, ids, first, ids_bytes), out);
    TRYG(dev_embed_fwd(m->dev, tensor_2d(rows, DT_F32, n, h), tensor_1d(ids, DT_I32, n), m->g_embed->mat), out);
    TRYG(dev_copy_out(m->dev, host, rows, row_bytes), out);
    model__convert(bits, DT_BF16, host, DT_F32, n * h);
out:
    dev_free(m->dev, ids, ids_bytes);
    dev_free(m->dev, rows, row_bytes);
    free(host);
    return rc;
}

int model__base_bits(struct model *m, struct model_range groups, uint16_t *bits) {
    const int64_t embed = m->g_embed - m->groups, norm = m->g_norm - m->groups, h = m->cfg.hidden;
    if (embed >= groups.lo && embed < groups.hi) TRY(first_rows(m, bits));
    if (norm < groups.lo || norm >= groups.hi) return 0;
    void *host = xmalloc((size_t)h * sizeof(float));
    const int rc = dev_copy_out(m->dev, host, m->g_norm->vec.data, (size_t)h * dtype_size(m->act));
    model__convert(bits + base_rows(m) * h, DT_BF16, host, m->act, h);
    free(host);
    return rc;
}

int model__lora_hash_base(struct model *m) {
    if (m->flags & MODEL_SHARDED_WEIGHTS) { /* of what was read: here is a share of it */
        memcpy(m->lora->base_hash, m->base_hash, sizeof m->base_hash);
        return 0;
    }
    uint16_t *bits = model__base_bits_new(m);
    const int rc = model__base_bits(m, (struct model_range){0, m->n_groups}, bits);
    model__base_bits_hash(m, bits, m->lora->base_hash);
    free(bits);
    return rc;
}

static int check_base(const struct model *m, const struct safetensors_file *f, const char *dir) {
    const char *want = safetensors_metadata(f, FINGERPRINT);
    if (!want) return 0; /* written by peft: only the shapes show it */
    if (strcmp(want, m->lora->base_hash) == 0) return 0;
    FAIL(ERR_INPUT, "adapter %s was trained on another base model than this one; it names %s", dir,
         m->lora->cfg.base ? m->lora->cfg.base : "none");
}

static int find_tensor(const struct safetensors_tensor **out, const struct safetensors_file *f, const struct model_param *p,
                       const char *path) {
    char name[160];
    snprintf(name, sizeof name, PREFIX "%s", p->name);
    const struct safetensors_tensor *t = safetensors_find(f, name);
    if (!t) FAIL(ERR_FORMAT, "%s: tensor %s is missing", path, name);
    if (t->nd != p->nd || t->dim[0] != p->rows || (p->nd == 2 && t->dim[1] != p->cols))
        FAIL(ERR_FORMAT,
             "%s: tensor %s has shape (%lld, %lld), this model and adapter_config.json ask for (%lld, %lld); is it "
             "an adapter of another model?",
             path, name, (long long)(t->nd > 0 ? t->dim[0] : 0), (long long)(t->nd > 1 ? t->dim[1] : 0), (long long)p->rows,
             (long long)p->cols);
    if (t->dt != DT_F32 && t->dt != DT_BF16 && t->dt != DT_F16)
        FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported dtype %s", path, name, dtype_name(t->dt));
    if (!model_all_finite(t->data, t->dt, p->rows * p->cols)) FAIL(ERR_FORMAT, "%s: tensor %s holds NaN or Inf", path, name);
    *out = t;
    return 0;
}

/* Every tensor of the file belongs to a parameter: one that is left out would change the model silently. */
static int check_unused(const struct model *m, const struct safetensors_file *f, const char *path) {
    for (int64_t i = 0; i < safetensors_count(f); i++) {
        const char *name = safetensors_at(f, i)->name;
        bool used = false;
        for (int64_t k = 0; k < m->n_train_params && !used; k++)
            used = strncmp(name, PREFIX, strlen(PREFIX)) == 0 && strcmp(name + strlen(PREFIX), m->train_params[k].name) == 0;
        if (!used) FAIL(ERR_UNSUPPORTED, "%s: unsupported tensor %s: target_modules does not name its module", path, name);
    }
    return 0;
}

static int fill_master(struct model *m, const struct safetensors_file *f, const char *path) {
    int rc = 0;
    float *flat = xmalloc((size_t)m->n_train * sizeof *flat);
    TRYG(model__lora_head_start(m, flat), out);
    for (int64_t i = 0; i < m->n_train_params; i++) {
        const struct model_param *p = &m->train_params[i];
        const struct safetensors_tensor *t = NULL;
        if (i >= m->lora->n_sides && !m->lora->cfg.saves_head) break; /* an adapter without a head */
        TRYG(find_tensor(&t, f, p, path), out);
        model__convert(flat + p->offset, DT_F32, t->data, t->dt, p->rows * p->cols);
    }
    TRYG(check_unused(m, f, path), out);
    TRYG(model_set_master(m, flat), out);
out:
    free(flat);
    return rc;
}

int model_lora_load(struct model *m, const char *dir) {
    struct lora_config c;
    struct safetensors_file *f = NULL;
    char *path = NULL, *pickle = file_join(dir, "adapter_model.bin");
    int rc = 0;
    TRYG(lora_config_load(&c, dir), free_paths);
    TRYG(file_in_dir(&path, dir, "adapter_model.safetensors"), out);
    if (!path && file_exists(pickle))
        FAILG(out, ERR_UNSUPPORTED, "%s: unsupported pickled adapter; save it as safetensors first", pickle);
    if (!path) FAILG(out, ERR_INPUT, "%s/adapter_model.safetensors: no such file", dir);
    if (c.saves_head && !m->cfg.value)
        FAILG(out, ERR_UNSUPPORTED, "adapter %s is a critic's, with a score head (modules_to_save): unsupported on a model without",
              dir);
    TRYG(safetensors_open(&f, path), out);
    rc = model__lora_attach(m, &c);
    if (rc < 0) {
        rc = err_wrap(rc, "adapter %s", dir);
        goto out;
    }
    TRYG(fill_master(m, f, path), out);
    TRYG(check_base(m, f, dir), out);
out:
    lora_config_free(&c);
    safetensors_close(f);
free_paths:
    free(path);
    free(pickle);
    return rc;
}

/* ---- writing ---- */

struct slice { /* one safetensors_write_tensor's arg */
    const struct model *m;
    const struct model_param *p;
    char name[160];
};

static int read_slice(void *arg, size_t off, void *dst, size_t n) {
    const struct slice *s = arg;
    return dev_copy_out(s->m->dev, dst, (const char *)(s->m->master + s->p->offset) + off, n);
}

static int write_tensors(const struct model *m, const char *path, struct file_writer *w) {
    const size_t n = (size_t)m->n_train_params;
    struct slice *s = xcalloc(n, sizeof *s);
    struct safetensors_write_tensor *t = xcalloc(n, sizeof *t);
    json_t *meta = json_pack("{s:s, s:s}", "format", "pt", FINGERPRINT, m->lora->base_hash);
    for (size_t i = 0; i < n; i++) {
        const struct model_param *p = &m->train_params[i];
        s[i] = (struct slice){.m = m, .p = p};
        snprintf(s[i].name, sizeof s[i].name, PREFIX "%s", p->name);
        t[i] = (struct safetensors_write_tensor){
            .name = s[i].name, .dt = DT_F32, .nd = p->nd, .dim = {p->rows, p->cols}, .read = read_slice, .arg = &s[i]};
    }
    const int rc = safetensors_write(w, path, t, m->n_train_params, meta);
    json_decref(meta);
    free(t);
    free(s);
    return rc;
}

int model_lora_export(const struct model *m, const char *dir, struct file_writer *w) {
    CHECK(m->lora != NULL);
    char *config = file_join(dir, "adapter_config.json"), *tensors = file_join(dir, "adapter_model.safetensors");
    json_t *o = model__lora_json(m);
    int rc = 0;
    CHECK(o != NULL);
    TRYG(file_mkdirs(dir), out);
    TRYG(write_tensors(m, tensors, w), out);
    TRYG(json_save_atomic(config, o), out);
    TRYG(file_fsync_dir(dir), out);
out:
    json_decref(o);
    free(config);
    free(tensors);
    return rc;
}
