/* load.c - a Hugging Face directory into a model: find each parameter in its files
 * (weights_dir.c), check it, convert it, pack it.
 *
 * Data moves from the mapping to the device in chunks that stay in cache; an
 * inference model never holds an fp32 copy.
 * Invariant: a model that model_open returns has every parameter of its
 * config, of the right shape, and no NaN or Inf in any of them. */
#include "model/files/load.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "base/map.h"
#include "base/rng.h"
#include "model/files/files_int.h"
#include "model/files/shards.h"
#include "model/files/weights_dir.h"
#include "model/lora/lora_int.h"
#include "model/master_weights.h"
#include "model/parallel/weight_streaming.h"
#include "model/quantize.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 1 << 18 /* elements converted at a time */ };

/* ---- checking ---- */

struct source {
    const struct safetensors_tensor *t; /* NULL: not in the files, to be drawn (a new value head) */
    const struct shards_tensor *parts;  /* NULL: t has its data */
    int64_t first;                      /* of t's elements: its experts may be stacked there */
    const char *path;                   /* of its file */
    uint64_t seed;                      /* of a new one */
    struct bnb_weight bnb;              /* saved in 4 bits: bnb.code is t */
    struct interleaved all;             /* in a tensor of all experts: all.t is t */
    struct fp8_weight fp8;              /* in FP8: fp8.codes is t */
};
/* Of what `elements` gives. */
static enum dtype value_dtype(const struct source *s) { return s->all.t || s->fp8.codes ? DT_F32 : s->t->dt; }

enum head { HEAD_TOKENS, HEAD_VALUE, HEAD_REWARD }; /* what a directory is opened as */

/* May this parameter be absent? Only a value head's, when a causal model becomes a critic. */
static bool may_be_new(enum head head, const struct model_param *p) {
    return head == HEAD_VALUE && strncmp(p->name, "score.", 6) == 0;
}

static int find_codes(struct source *s, struct weights_dir *w, const struct model_param *p, const char *dir) {
    const struct bnb_args a = {.find = weights_dir_find, .arg = w, .param = p, .path = dir};
    s->path = dir;
    TRY(model__bnb_find(&s->bnb, &a));
    s->t = s->bnb.code;
    return 0;
}

/* The tensor of that name, with its file. */
static void find_tensor(struct source *s, struct weights_dir *w, const char *name) {
    int64_t i = 0;
    s->t = weights_dir_find(w, name);
    s->parts = w->shards ? shards_find(w->shards, name) : NULL;
    if (w->by_name.n > 0) map_gets(&w->by_name, name, &i);
    s->path = w->paths[i];
}

/* Shape of t for messages: "4, 64". */
static const char *shape_of(const struct safetensors_tensor *t, char out[128]) {
    out[0] = '\0';
    for (int k = 0, n = 0; k < t->nd && n < 100; k++)
        n += snprintf(out + n, 128 - (size_t)n, "%s%lld", k ? ", " : "", (long long)t->dim[k]);
    return out;
}

/* Of a family whose text is part of other checkpoints: the name without that prefix, or with it. */
static void find_alias(struct source *s, struct weights_dir *w, const struct model *m, const struct model_param *p) {
    const char *const prefix = model__prefix(&m->cfg), *const other = m->cfg.outer ? "model." : "model.language_model.";
    char name[sizeof p->name + 16];
    if (!m->cfg.family->outer_type || strncmp(p->name, prefix, strlen(prefix)) != 0) return;
    snprintf(name, sizeof name, "%s%s", other, p->name + strlen(prefix));
    find_tensor(s, w, name);
}

/* An expert's matrix in a tensor of all of them, as transformers 5 has them in memory: experts.gate_up_proj (E, 2f, h), gate
 * rows first, or experts.down_proj (E, h, f). t stays NULL where there is none. */
static int find_stacked(struct source *s, struct weights_dir *w, const struct model *m, const struct model_param *p) {
    const struct model_group *const g = &m->groups[p->group];
    char name[MODEL_STACK_NAME], have[128];
    if (g->role != MODEL_EXPERTS || !strstr(p->name, ".experts.")) return 0;
    const int64_t in_group = p - m->params - g->first_param, parts = g->n_params / g->count, rows = g->n / g->count;
    model__stack_name(m, g, name);
    find_tensor(s, w, name);
    if (!s->t) return 0;
    if (s->t->nd != 3 || s->t->dim[0] != g->count || s->t->dim[1] != rows || s->t->dim[2] != p->cols)
        FAIL(ERR_FORMAT, "%s: tensor %s has shape (%s), config.json asks for (%lld, %lld, %lld)", s->path, name,
             shape_of(s->t, have), (long long)g->count, (long long)rows, (long long)p->cols);
    s->first = (in_group / parts * rows + in_group % parts * p->rows) * p->cols;
    return 0;
}

/* A parameter of gpt-oss' experts. */
static int find_interleaved(struct source *s, struct weights_dir *w, const struct model *m, const struct model_param *p,
                            const char *dir) {
    const struct bnb_args a = {.find = weights_dir_find, .arg = w, .param = p, .path = dir};
    char name[MODEL_STACK_NAME];
    model__stack_name(m, &m->groups[p->group], name);
    if (w->shards) FAIL(ERR_UNSUPPORTED, "%s: unsupported shards of a %s model", dir, m->cfg.family->type);
    s->path = dir;
    TRY(model__interleaved_find(&s->all, m, &a));
    if (!s->all.t) FAIL(ERR_FORMAT, "%s: tensor %s is missing", dir, name);
    s->t = s->all.t;
    return 0;
}

static int find_param(struct source *s, struct weights_dir *w, const struct model *m, const struct model_param *p,
                      const char *dir) {
    char have[128];
    if (model__interleaved(m, &m->groups[p->group])) return find_interleaved(s, w, m, p, dir);
    find_tensor(s, w, p->name);
    if (!s->t) find_alias(s, w, m, p);
    const bool own = s->t != NULL;
    if (!s->t) TRY(find_stacked(s, w, m, p));
    if (!s->t && w->by_name.n > 0 && !map_gets(&w->by_name, p->name, NULL))
        FAIL(ERR_FORMAT, "%s: the index does not list tensor %s", dir, p->name);
    if (!s->t) FAIL(ERR_FORMAT, "%s: tensor %s is missing", s->path, p->name);
    const struct safetensors_tensor *t = s->t;
    const bool vec = p->nd == 1, fits = t->nd == p->nd && t->dim[0] == p->rows && (vec || t->dim[p->nd - 1] == p->cols);
    if (own && (!fits || (p->nd == 3 && t->dim[1] != 1)))
        FAIL(ERR_FORMAT,
             vec ? "%s: tensor %s has shape (%s), config.json asks for (%lld)"
                 : "%s: tensor %s has shape (%s), config.json asks for (%lld, %lld)",
             s->path, p->name, shape_of(t, have), (long long)p->rows, (long long)p->cols);
    if (t->dt == DT_E4M3 && own && !w->shards)
        return model__fp8_find(&s->fp8, &m->cfg, t,
                               &(struct bnb_args){.find = weights_dir_find, .arg = w, .param = p, .path = s->path});
    if (t->dt != DT_F32 && t->dt != DT_BF16 && t->dt != DT_F16)
        FAIL(ERR_UNSUPPORTED, "%s: tensor %s: unsupported dtype %s for a weight", s->path, t->name, dtype_name(t->dt));
    return 0;
}

/* ---- tensors of the files that are kept as they are ---- */

struct model_kept {
    struct weights_dir w; /* stays open */
    int64_t n;
    struct kept_tensor {
        const struct safetensors_tensor *t;
        const struct shards_tensor *parts; /* NULL: t has its data */
    } * tensors;
};

/* Whether a tensor is of a layer behind the last one. */
static bool behind_layers(const struct model *m, const char *name) {
    static const char layers[] = "model.layers.";
    char *end;
    if (strncmp(name, layers, sizeof layers - 1) != 0) return false;
    const long long l = strtoll(name + sizeof layers - 1, &end, 10);
    return *end == '.' && l >= m->cfg.n_layers;
}

static bool is_kept(const struct model *m, const char *name) {
    const char *const *const kept = m->cfg.family->kept;
    for (int i = 0; i < 2 && kept[i]; i++) {
        const size_t n = strlen(kept[i]);
        if (strncmp(name, kept[i], n) == 0) return !(m->cfg.mtp && strncmp(m->cfg.family->mtp->prefix, kept[i], n) == 0);
    }
    return m->cfg.family->keeps_layers && behind_layers(m, name);
}

/* Takes the files over where there are such tensors. */
static void keep_tensors(struct model *m, struct weights_dir *w) {
    struct model_kept k = {0};
    int64_t cap = 0, other = 0;
    for (int64_t f = 0; f < w->n; f++)
        for (int64_t i = 0; i < weights_dir_count(w, f); i++) {
            const struct safetensors_tensor *const t = weights_dir_at(w, f, i);
            if (!is_kept(m, t->name)) continue;
            other += t->dt == DT_E4M3;
            xgrow((void **)&k.tensors, &cap, k.n + 1, sizeof *k.tensors);
            k.tensors[k.n++] = (struct kept_tensor){t, w->shards ? shards_at(w->shards, i) : NULL};
        }
    if (other > 0) { /* what is written has no quantization_config that would say how to read them */
        log_warn("%lld tensors of other parts (%s ...) are not written again: %lld of them are in FP8", (long long)k.n,
                 k.tensors[0].t->name, (long long)other);
        free(k.tensors);
        return;
    }
    if (k.n == 0) return;
    log_info("%lld tensors of other parts (%s ...) are kept as they are", (long long)k.n, k.tensors[0].t->name);
    k.w = *w;
    *w = (struct weights_dir){0};
    m->kept = xcalloc(1, sizeof *m->kept);
    *m->kept = k;
}

static int read_kept(void *arg, size_t off, void *dst, size_t n) {
    const struct kept_tensor *const k = arg;
    const size_t size = dtype_size(k->t->dt);
    if (k->parts) shards_read(k->parts, (int64_t)(off / size), (int64_t)(n / size), dst);
    else memcpy(dst, k->t->data + off, n);
    return 0;
}

int64_t model__kept_count(const struct model *m) { return m->kept ? m->kept->n : 0; }

struct safetensors_write_tensor model__kept_at(const struct model *m, int64_t i) {
    struct kept_tensor *const k = &m->kept->tensors[i];
    struct safetensors_write_tensor t = {.name = k->t->name, .dt = k->t->dt, .nd = k->t->nd, .read = read_kept, .arg = k};
    memcpy(t.dim, k->t->dim, sizeof t.dim);
    t.any_thread = k->parts == NULL;
    return t;
}

static void kept_free(struct model *m) {
    if (!m->kept) return;
    weights_dir_close(&m->kept->w);
    free(m->kept->tensors);
    free(m->kept);
}

/* Tensors that no parameter takes are named once: they may mean another model than config.json says. */
static void note_unused(const struct model *m, const struct source *src, const struct weights_dir *w, const char *dir) {
    struct map used = {0};
    const char *first = NULL;
    int64_t n = 0;
    for (int64_t i = 0; i < m->n_params; i++) {
        map_set(&used, m->params[i].name, strlen(m->params[i].name), i);
        if (src[i].t) map_set(&used, src[i].t->name, strlen(src[i].t->name), i);
        if (src[i].fp8.scales) map_set(&used, src[i].fp8.scales->name, strlen(src[i].fp8.scales->name), i);
        if (src[i].all.scales) map_set(&used, src[i].all.scales->name, strlen(src[i].all.scales->name), i);
    }
    for (int64_t i = 0; i < m->n_buffers; i++) map_set(&used, m->buffers[i].name, strlen(m->buffers[i].name), i);
    /* a copy of the embedding, as in transformers; a critic has no use for it */
    if (m->cfg.tied || m->cfg.value) map_set(&used, "lm_head.weight", 14, 0);
    for (int64_t f = 0; f < w->n; f++) {
        for (int64_t i = 0; i < weights_dir_count(w, f); i++) {
            const char *name = weights_dir_at(w, f, i)->name;
            const char *part = m->cfg.saved_nf4 ? strstr(name, ".weight.") : NULL; /* of a 4-bit matrix */
            if (part && map_get(&used, name, (size_t)(part - name) + 7, NULL)) continue;
            if (map_gets(&used, name, NULL) || is_kept(m, name) || strstr(name, "rotary_emb.inv_freq")) continue;
            if (n++ == 0) first = name;
        }
    }
    if (n > 0) log_warn("%s: %lld tensors that config.json does not ask for are not used, first %s", dir, (long long)n, first);
    map_free(&used);
}

/* ---- moving ---- */

/* A parameter that no file has: transformers' init (normal with initializer_range, biases 0). */
static int draw_param(struct model *m, const struct model_param *p, uint64_t seed, struct model_range part, void *dst,
                      enum dtype dt) {
    const int64_t n = p->rows * p->cols;
    struct rng r = {.seed = seed, .stream = RNG_INIT};
    float *v = xcalloc((size_t)n, sizeof *v);
    for (int64_t i = 0; i < n && p->nd == 2; i++) v[i] = rng_normal(&r) * (float)m->cfg.init_range;
    void *as = xmalloc((size_t)n * sizeof *v);
    model__convert(as, dt, v + part.lo, DT_F32, part.hi - part.lo);
    int rc = dev_copy_in(m->dev, dst, as, (size_t)(part.hi - part.lo) * dtype_size(dt));
    if (rc == 0) rc = dev_sync(m->dev);
    free(as);
    free(v);
    return rc;
}

static int check_finite(const struct model_param *p, const struct source *s, const uint8_t *src, int64_t n) {
    if (model_all_finite(src, value_dtype(s), n)) return 0;
    FAIL(ERR_FORMAT, "%s: tensor %s holds NaN or Inf; the file is damaged or the training that wrote it diverged", s->path,
         p->name);
}

/* n elements of a tensor from `first` on: in its mapping, or gathered into raw. */
static const uint8_t *elements(const struct source *s, int64_t first, int64_t n, void *raw) {
    if (s->all.t) {
        model__interleaved_read(&s->all, first, n, raw);
        return raw;
    }
    if (s->fp8.codes) {
        model__fp8_read(&s->fp8, first, n, raw);
        return raw;
    }
    if (!s->parts) return s->t->data + (size_t)(s->first + first) * dtype_size(s->t->dt);
    shards_read(s->parts, s->first + first, n, raw);
    return raw;
}

/* Elements of a parameter on the device. */
struct target {
    struct model_range range;
    void *data;
    enum dtype dt;
};

/* Copies a range of parameter p to the target, refusing what is not finite. */
static int load_range(struct model *m, const struct model_param *p, const struct source *s, const struct target *to, void *chunk) {
    const struct model_range r = to->range;
    if (!s->t) return draw_param(m, p, s->seed, r, to->data, to->dt);
    const size_t size = dtype_size(to->dt);
    for (int64_t i = r.lo; i < r.hi; i += CHUNK) {
        const int64_t k = r.hi - i < CHUNK ? r.hi - i : CHUNK;
        const uint8_t *src = elements(s, i, k, (float *)chunk + CHUNK);
        TRY(check_finite(p, s, src, k));
        if (value_dtype(s) != to->dt) {
            model__convert(chunk, to->dt, src, value_dtype(s), k);
            src = chunk;
        }
        TRY(dev_copy_in(m->dev, (char *)to->data + (size_t)(i - r.lo) * size, src, (size_t)k * size));
        TRY(dev_sync(m->dev)); /* the chunk is used again */
    }
    return 0;
}

static int load_param(struct model *m, const struct model_param *p, const struct source *s, void *dst, enum dtype dt, void *chunk) {
    const struct target whole = {.range = {0, p->rows * p->cols}, .data = dst, .dt = dt};
    return load_range(m, p, s, &whole, chunk);
}

/* Codes of parameter i as they were saved. */
static int copy_codes(struct model *m, int64_t i, const struct source *s) {
    const struct quant_part *q = &m->quant->parts[i];
    const int64_t n = tensor_count(q->scale);
    float *scale = xmalloc((size_t)n * sizeof *scale);
    int rc = 0;
    model__bnb_scales(&s->bnb, n, scale);
    if (!model_all_finite(scale, DT_F32, n))
        FAILG(out, ERR_FORMAT, "%s: tensor %s has a scale of NaN or Inf; the file is damaged", s->path, m->params[i].name);
    TRYG(dev_copy_in(m->dev, q->code.data, s->t->data, s->t->bytes), out);
    TRYG(dev_copy_in(m->dev, q->scale.data, scale, (size_t)n * sizeof *scale), out);
    TRYG(dev_sync(m->dev), out);
out:
    free(scale);
    return rc;
}

/* Rows of parameter i at a time, through f32 into codes. */
static int load_codes(struct model *m, int64_t i, const struct source *s) {
    if (s->bnb.code) return copy_codes(m, i, s);
    const struct model_param *p = &m->params[i];
    const struct quant_part *q = &m->quant->parts[i];
    const enum quant_kind kind = m->quant->kind;
    const int64_t unit = kind == QUANT_NF4 ? DEV_NF4_BLOCK : p->cols, n = p->rows * p->cols;
    const int64_t step = (CHUNK + unit - 1) / unit * unit; /* whole blocks of NF4, whole rows of INT8 */
    float *w = xmalloc((size_t)step * sizeof *w), *raw = xmalloc((size_t)step * sizeof *raw),
          *scale = xmalloc((size_t)(step / unit) * sizeof *scale);
    uint8_t *code = xmalloc((size_t)step);
    int rc = 0;
    for (int64_t lo = 0; lo < n; lo += step) {
        const int64_t k = n - lo < step ? n - lo : step, rows = kind == QUANT_NF4 ? 1 : k / p->cols, cols = k / rows;
        const uint8_t *src = elements(s, lo, k, raw);
        TRYG(check_finite(p, s, src, k), out);
        model__convert(w, DT_F32, src, value_dtype(s), k);
        model_quantize(kind, w, rows, cols, code, scale);
        TRYG(dev_copy_in(m->dev, (char *)q->code.data + model__quant_codes(kind, lo), code, (size_t)model__quant_codes(kind, k)),
             out);
        TRYG(dev_copy_in(m->dev, (float *)q->scale.data + lo / unit, scale,
                         (size_t)model__quant_scales(kind, rows, cols) * sizeof *scale),
             out);
        TRYG(dev_sync(m->dev), out); /* the buffers are used again */
    }
out:
    free(w);
    free(raw);
    free(scale);
    free(code);
    return rc;
}

/* Straight into the compute copy, or its codes; stage holds one group as act on the device. */
static int load_group(struct model *m, struct model_group *g, const struct source *src, void *stage, void *chunk) {
    char *at = g->k ? stage : g->vec.data;
    if (m->quant && model__adaptable(g)) {
        for (int64_t i = g->first_param; i < g->first_param + g->n_params; i++) TRY(load_codes(m, i, &src[i]));
        return 0;
    }
    for (int64_t i = g->first_param; i < g->first_param + g->n_params; i++) {
        const struct model_param *p = &m->params[i];
        TRY(load_param(m, p, &src[i], at, m->act, chunk));
        at += (size_t)(p->rows * p->cols) * dtype_size(m->act);
    }
    return g->k ? model__pack(m, g, tensor_2d(stage, m->act, g->n, g->k)) : 0;
}

/* What the master has of the parameters, which are all trained. */
static int load_own(struct model *m, const struct source *src, void *chunk) {
    float *at = m->master;
    for (int64_t k = 0; k < m->n_own; k++)
        for (int64_t i = 0; i < m->n_params; i++) {
            const struct model_param *p = &m->params[i];
            const int64_t n = p->rows * p->cols;
            struct model_range r = {m->own[k].lo - p->offset, m->own[k].hi - p->offset};
            if (r.lo < 0) r.lo = 0;
            if (r.hi > n) r.hi = n;
            if (r.lo >= r.hi) continue;
            TRY(load_range(m, p, &src[i], &(struct target){.range = r, .data = at, .dt = DT_F32}, chunk));
            at += r.hi - r.lo;
        }
    return 0;
}

/* Each span of a sharded model is made in a buffer of its own, and a share of it is kept. */
static int load_shares(struct model *m, const struct source *src, void *stage, void *chunk) {
    const size_t bytes = model__span_most(m);
    struct model_range groups;
    void *whole = NULL;
    int rc = 0;
    TRY(dev_alloc(m->dev, bytes, &whole));
    uint16_t *const bits = model__base_bits_new(m);
    for (int64_t k = 0; model__span_open(m, k, whole, &groups); k++) {
        for (int64_t i = groups.lo; i < groups.hi; i++) TRYG(load_group(m, &m->groups[i], src, stage, chunk), out);
        TRYG(model__base_bits(m, groups, bits), out);
        TRYG(model__span_keep(m, k, whole), out);
    }
    TRYG(dev_sync(m->dev), out);
    model__base_bits_hash(m, bits, m->base_hash);
out:
    free(bits);
    dev_free(m->dev, whole, bytes);
    return rc;
}

/* Bytes of the largest of some groups in the compute type. */
static size_t group_most(const struct model *m, struct model_range groups) {
    size_t most = 0;
    for (int64_t i = groups.lo; i < groups.hi; i++) {
        const size_t bytes = (size_t)(m->groups[i].n * m->groups[i].k) * dtype_size(m->act);
        if (!(m->quant && model__adaptable(&m->groups[i])) && bytes > most) most = bytes;
    }
    return most;
}

/* The groups of all layers. */
static struct model_range layer_groups(const struct model *m) {
    return (struct model_range){m->layers[0].first - m->groups, m->layers[m->cfg.n_layers - 1].last - m->groups + 1};
}

static int load_weights(struct model *m, const struct source *src) {
    int rc = 0;
    size_t stage_bytes = 0;
    void *stage = NULL, *chunk = xmalloc(2 * CHUNK * sizeof(float)); /* converted; gathered */
    if (m->master && !m->own) {
        for (int64_t i = 0; i < m->n_params; i++)
            TRYG(load_param(m, &m->params[i], &src[i], m->master + m->params[i].offset, DT_F32, chunk), out);
        TRYG(model_refresh(m), out);
        goto out;
    }
    const int64_t own = m->base ? m->g_head - m->groups : 0; /* those before are there */
    const struct model_range later = m->flags & MODEL_FILE_LAYERS ? layer_groups(m) : (struct model_range){0};
    stage_bytes = group_most(m, (struct model_range){own, m->n_groups});
    TRYG(dev_alloc(m->dev, stage_bytes, &stage), out);
    if (m->flags & MODEL_SHARDED_WEIGHTS) TRYG(load_shares(m, src, stage, chunk), out);
    else
        for (int64_t i = own; i < m->n_groups; i++)
            if (i < later.lo || i >= later.hi) TRYG(load_group(m, &m->groups[i], src, stage, chunk), out);
    if (m->master) TRYG(load_own(m, src, chunk), out);
    TRYG(dev_sync(m->dev), out);
out:
    dev_free(m->dev, stage, stage_bytes);
    free(chunk);
    return rc;
}

/* ---- layers that are read later ---- */

struct model_files {
    struct weights_dir w; /* stays open */
    struct source *src;   /* of each parameter */
    /* while layers are read */
    void *room, *stage, *chunk; /* a layer, and load_group's */
    size_t room_bytes, stage_bytes;
};

size_t model__layer_place(struct model *m, int64_t l, char *base) {
    struct arena a = {.base = base, .cap = SIZE_MAX};
    for (struct model_group *g = m->layers[l].first; g <= m->layers[l].last; g++) {
        void *const at = arena_take(&a, model__group_bytes(m, g));
        if (!base) continue;
        if (g->k) g->mat.data = at;
        else g->vec.data = at;
    }
    return a.used;
}

static int open_room(struct model *m) {
    struct model_files *const f = m->files;
    f->stage_bytes = group_most(m, layer_groups(m));
    for (int64_t l = 0; l < m->cfg.n_layers; l++) {
        const size_t bytes = model__layer_place(m, l, NULL);
        f->room_bytes = bytes > f->room_bytes ? bytes : f->room_bytes;
    }
    f->chunk = xmalloc(2 * CHUNK * sizeof(float));
    TRY(dev_alloc(m->dev, f->room_bytes, &f->room));
    return dev_alloc(m->dev, f->stage_bytes, &f->stage);
}

size_t model_file_ends(const struct model_config *c, struct dev *dev, enum dtype act) {
    struct model m = {.cfg = *c, .dev = dev, .act = act, .flags = MODEL_FILE_LAYERS};
    struct arena weights = {0};
    model__params_build(&m);
    model__weights_layout(&m, &weights);
    model__params_free(&m);
    return weights.used;
}

size_t model_file_room(const struct model_config *c, struct dev *dev, enum dtype act) {
    struct model m = {.cfg = *c, .dev = dev, .act = act, .flags = MODEL_FILE_LAYERS};
    struct arena weights = {0};
    size_t most = 0;
    model__params_build(&m);
    model__weights_layout(&m, &weights);
    for (int64_t l = 0; l < c->n_layers; l++) {
        const size_t bytes = model__layer_place(&m, l, NULL);
        most = bytes > most ? bytes : most;
    }
    most += weights.used + group_most(&m, layer_groups(&m));
    model__params_free(&m);
    return most;
}

int model__files_layer(struct model *m, int64_t l) {
    struct model_files *const f = m->files;
    if (!f->room) TRY(open_room(m));
    model__layer_place(m, l, f->room);
    for (struct model_group *g = m->layers[l].first; g <= m->layers[l].last; g++) TRY(load_group(m, g, f->src, f->stage, f->chunk));
    return 0;
}

void model__files_end(struct model *m, bool taken) {
    struct model_files *const f = m->files;
    dev_free(m->dev, f->room, f->room_bytes);
    dev_free(m->dev, f->stage, f->stage_bytes);
    free(f->chunk);
    f->room = f->stage = f->chunk = NULL;
    if (!taken) return;
    model__release(m, MODEL_HOST_WEIGHTS, m->weights, m->weights_bytes);
    m->weights = NULL;
    m->weights_bytes = 0;
}

static void files_free(struct model *m) {
    if (!m->files) return;
    model__files_end(m, false);
    weights_dir_close(&m->files->w);
    free(m->files->src);
    free(m->files);
}

/* Buffers of layers, on the host. */
static int read_buffers(struct model *m, struct weights_dir *w, const char *dir) {
    for (int64_t i = 0; i < m->n_buffers; i++) {
        struct model_buffer *const b = &m->buffers[i];
        struct source s = {0};
        struct model_param p = {.rows = b->n, .cols = 1, .nd = 1};
        memcpy(p.name, b->name, sizeof p.name);
        TRY(find_param(&s, w, m, &p, dir));
        float *const raw = xmalloc((size_t)b->n * sizeof *raw);
        const uint8_t *const src = elements(&s, 0, b->n, raw);
        const int rc = check_finite(&p, &s, src, b->n);
        b->host = xmalloc((size_t)b->n * sizeof *b->host);
        b->src_dt = s.t->dt;
        if (rc == 0) model__convert(b->host, DT_F32, src, s.t->dt, b->n);
        free(raw);
        TRY(rc);
    }
    return 0;
}

/* ---- memory ---- */

static size_t rope_bytes(const struct model_config *c, int64_t max_len) {
    return (size_t)(max_len * model_rope_dim(c)) * sizeof(float);
}

static int alloc_rope(struct model *m, int64_t max_len) {
    const size_t bytes = rope_bytes(&m->cfg, max_len);
    float *host = xmalloc(bytes);
    int rc = 0;
    for (int i = 0; i < MODEL_ROPE_TABLES && rc == 0; i++) {
        void *p = NULL;
        if (!model_has_rope(&m->cfg, (enum model_rope_table)i)) continue;
        model_rope_table(&m->cfg, (enum model_rope_table)i, max_len, max_len, host);
        rc = dev_alloc(m->dev, bytes, &p);
        if (rc < 0) break;
        m->rope[i] = (struct tensor){p, DT_F32, 3, {max_len, model_rope_dim(&m->cfg) / 2, 2, 1}};
        rc = dev_copy_in(m->dev, p, host, bytes);
        if (rc == 0) rc = dev_sync(m->dev);
    }
    free(host);
    return rc;
}

static int alloc_query_scales(struct model *m, int64_t max_len) {
    if (!model_has_query_scales(&m->cfg, max_len)) return 0;
    const size_t bytes = (size_t)max_len * sizeof(float);
    float *host = xmalloc(bytes);
    void *p = NULL;
    model_query_scales(&m->cfg, max_len, m->act, host);
    int rc = dev_alloc(m->dev, bytes, &p);
    if (rc == 0) {
        m->query_scale = tensor_1d(p, DT_F32, max_len);
        rc = dev_copy_in(m->dev, p, host, bytes);
    }
    if (rc == 0) rc = dev_sync(m->dev);
    free(host);
    return rc;
}

static size_t buffers_bytes(const struct model *m) {
    size_t n = 0;
    for (int64_t i = 0; i < m->n_buffers; i++) n += (size_t)m->buffers[i].n * sizeof(float);
    return n;
}

/* From the host to the device. */
static int alloc_buffers(struct model *m) {
    for (int64_t i = 0; i < m->n_buffers; i++) {
        struct model_buffer *const b = &m->buffers[i];
        void *p = NULL;
        TRY(dev_alloc(m->dev, (size_t)b->n * sizeof(float), &p));
        b->dev = tensor_1d(p, DT_F32, b->n);
        TRY(dev_copy_in(m->dev, p, b->host, (size_t)b->n * sizeof(float)));
    }
    return m->n_buffers ? dev_sync(m->dev) : 0;
}

static int alloc_shares(struct model *m) {
    struct arena ar = {0};
    model__stream_create(m);
    model__shares_layout(m, m->shard.rank, &ar);
    m->weights_bytes = ar.used;
    TRY(dev_alloc(m->dev, m->weights_bytes, &m->weights));
    ar = (struct arena){.base = m->weights, .cap = m->weights_bytes};
    model__shares_layout(m, m->shard.rank, &ar);
    return 0;
}

static int alloc_model(struct model *m, const struct model_open_args *a) {
    struct arena ar = {0};
    model__weights_layout(m, &ar);
    if (a->flags & MODEL_SHARDED_WEIGHTS) {
        TRY(alloc_shares(m));
    } else {
        m->weights_bytes = ar.used;
        TRY(model__alloc(m, MODEL_HOST_WEIGHTS, m->weights_bytes, &m->weights));
        ar = (struct arena){.base = m->weights, .cap = m->weights_bytes};
        model__weights_layout(m, &ar);
        model__find_flat(m);
        if (a->flags & MODEL_HOST_WEIGHTS) model__stream_create(m);
    }
    if (a->flags & MODEL_TRAIN) TRY(model__alloc_master(m));
    TRY(alloc_rope(m, a->max_len));
    TRY(alloc_buffers(m));
    return alloc_query_scales(m, a->max_len);
}

/* ---- public ---- */

/* Whether the base has this model's groups, but for the head. */
static int check_base(const struct model *m, const struct model_open_args *a) {
    const struct model *b = a->base;
    if (!b) return 0;
    CHECK(m->cfg.value && b->dev == m->dev && b->act == m->act && !(b->master && !b->lora) && !(b->flags & MODEL_HOST_WEIGHTS) &&
          (b->quant ? b->quant->kind : QUANT_NONE) == a->quant);
    bool same = true;
    for (int64_t i = 0; same && m->groups + i < m->g_head; i++)
        same = i < b->n_groups && b->groups[i].n == m->groups[i].n && b->groups[i].k == m->groups[i].k;
    if (!same) FAIL(ERR_INPUT, "%s: not the model that was opened from there before; was it replaced since?", a->dir);
    return 0;
}

static int open_model(struct model **out, struct dev *dev, const struct model_open_args *a, enum head head, uint64_t head_seed) {
    int rc = 0;
    struct weights_dir w = {0};
    struct source *src = NULL;
    CHECK((a->act == DT_F32 || a->act == DT_BF16) && a->max_len > 0);
    CHECK(a->quant == QUANT_NONE || !(a->flags & MODEL_TRAIN)); /* codes are not trained */
    CHECK(!(a->flags & MODEL_SHARDED_WEIGHTS) || (a->shard.size > 1 && head != HEAD_REWARD && !a->base));
    CHECK(!(a->flags & (MODEL_HOST_WEIGHTS | MODEL_FILE_LAYERS)) || a->quant == QUANT_NONE);
    CHECK(!(a->flags & MODEL_FILE_LAYERS) || (a->flags == MODEL_FILE_LAYERS && !a->mtp));
    CHECK((a->base != NULL) == ((a->flags & MODEL_SHARED_BASE) != 0));
    CHECK(!a->mtp || head == HEAD_TOKENS);
    struct model *m = xcalloc(1, sizeof *m);
    m->dev = dev;
    m->act = a->act;
    m->flags = a->flags;
    m->shard = a->shard;
    TRYG(model_config_load(&m->cfg, a->dir), out);
    if (a->mtp) TRYG(model_config_use_mtp(&m->cfg, a->mtp_detached, a->dir), out);
    if (head == HEAD_VALUE) model_config_make_value(&m->cfg);
    if (head == HEAD_REWARD) TRYG(model_config_make_reward(&m->cfg, a->dir), out);
    if (m->cfg.saved_nf4 && a->quant != QUANT_NF4)
        FAILG(out, ERR_UNSUPPORTED,
              "%s holds 4-bit weights (bitsandbytes' NF4): unsupported but as the frozen base of an adapter; "
              "set quantization=nf4 and a lora_rank, or give the unquantized model",
              a->dir);
    json_object_del(m->cfg.json, "quantization_config"); /* what is exported is in full */
    TRYG(weights_dir_open(&w, a->dir), out);
    if (w.shards) {
        char *what = shards_words(w.shards);
        log_info("reading the weights of %s in %s", what, w.paths[0]);
        free(what);
    }
    model__params_build(m);
    TRYG(check_base(m, a), out);
    m->base = a->base;
    model__quant_create(m, a->quant);
    src = xcalloc((size_t)m->n_params, sizeof *src);
    if (m->cfg.saved_nf4 && w.shards) FAILG(out, ERR_UNSUPPORTED, "%s: unsupported shards of 4-bit weights", a->dir);
    if (head == HEAD_VALUE && weights_dir_find(&w, "v_head.summary.weight"))
        FAILG(out, ERR_UNSUPPORTED,
              "%s: unsupported value head v_head.summary (trl's AutoModelForCausalLMWithValueHead); a critic's is score, of "
              "...ForTokenClassification",
              a->dir);
    for (int64_t i = 0; i < m->n_params; i++) {
        if (may_be_new(head, &m->params[i]) && !weights_dir_find(&w, m->params[i].name)) {
            if (m->params[i].nd == 2) log_info("%s has no %s: the value head is new", a->dir, m->params[i].name);
            src[i].seed = head_seed;
            continue;
        }
        if (m->cfg.saved_nf4 && m->groups[m->params[i].group].role == MODEL_LINEAR) {
            TRYG(find_codes(&src[i], &w, &m->params[i], a->dir), out);
            continue;
        }
        TRYG(find_param(&src[i], &w, m, &m->params[i], a->dir), out);
        m->params[i].src_dt = src[i].all.scales || src[i].fp8.codes ? DT_BF16 : src[i].t->dt;
        struct model_group *const g = &m->groups[m->params[i].group];
        g->split_experts |= g->role == MODEL_EXPERTS && strstr(src[i].t->name, ".weight");
    }
    TRYG(read_buffers(m, &w, a->dir), out);
    note_unused(m, src, &w, a->dir);
    TRYG(alloc_model(m, a), out); /* after the cheap checks: a wrong directory fails at once */
    TRYG(load_weights(m, src), out);
    if (a->flags & MODEL_FILE_LAYERS) {
        m->files = xcalloc(1, sizeof *m->files);
        *m->files = (struct model_files){.w = w, .src = src};
        w = (struct weights_dir){0};
        src = NULL;
    } else if (head == HEAD_TOKENS) {
        keep_tensors(m, &w);
    }
    *out = m;
    m = NULL;
out:
    model_close(m);
    weights_dir_close(&w);
    free(src);
    return rc;
}

size_t model_open_bytes(const struct model_config *c, struct dev *dev, const struct model_open_args *a) {
    struct model m = {.cfg = *c, .dev = dev, .act = a->act, .flags = a->flags};
    struct arena weights = {0};
    model__params_build(&m);
    model__quant_create(&m, a->quant);
    model__weights_layout(&m, &weights);
    if (a->flags & MODEL_SHARDED_WEIGHTS) weights.used = model__shares_most(&m, a->shard);
    size_t n = buffers_bytes(&m) + (model_has_query_scales(c, a->max_len) ? (size_t)a->max_len * sizeof(float) : 0);
    for (int i = 0; i < MODEL_ROPE_TABLES; i++)
        if (model_has_rope(c, (enum model_rope_table)i)) n += rope_bytes(c, a->max_len);
    if (!(a->flags & MODEL_HOST_WEIGHTS)) n += weights.used;
    if (a->flags & MODEL_TRAIN && !(a->flags & MODEL_HOST_MASTER)) n += (size_t)model_own_most(&m, a->shard) * sizeof(float);
    model__params_free(&m);
    return n;
}

int model_open(struct model **out, struct dev *dev, const struct model_open_args *a) {
    return open_model(out, dev, a, HEAD_TOKENS, 0);
}

int model_open_value(struct model **out, struct dev *dev, const struct model_open_args *a, uint64_t head_seed) {
    return open_model(out, dev, a, HEAD_VALUE, head_seed);
}

int model_open_reward(struct model **out, struct dev *dev, const struct model_open_args *a) {
    return open_model(out, dev, a, HEAD_REWARD, 0);
}

void model_close(struct model *m) {
    if (!m) return;
    for (int i = 0; i < MODEL_ROPE_TABLES; i++) dev_free(m->dev, m->rope[i].data, (size_t)tensor_count(m->rope[i]) * sizeof(float));
    for (int64_t i = 0; i < m->n_buffers; i++)
        dev_free(m->dev, m->buffers[i].dev.data, (size_t)tensor_count(m->buffers[i].dev) * sizeof(float));
    dev_free(m->dev, m->query_scale.data, (size_t)tensor_count(m->query_scale) * sizeof(float));
    model__free_master(m);
    free(m->own);
    model__lora_free(m);
    kept_free(m);
    files_free(m);
    model__dispatch_free(m->dispatch);
    model__stream_free(m);
    model__release(m, MODEL_HOST_WEIGHTS, m->weights, m->weights_bytes);
    model__params_free(m);
    model_config_free(&m->cfg);
    free(m);
}
